//! Arenas: named, flat memory of one element type, and the buffers cut from them.
//!
//! Operations take [`Buffer`]s, never slices. Whoever touches host memory borrows the range for as long as it
//! does ([`Buffer::host`], [`Buffer::host_mut`]); overlapping use is refused as [`DeviceError::Race`], as a
//! `RefCell` refuses it, so that a missing event between two streams is an error with a name, not wrong numbers.
#![allow(unsafe_code, reason = "addresses in mapped memory")]

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use parking_lot::Mutex;

use super::host::Memory;
use super::{DType, DeviceError, Element};

/// Flat memory of one element type. Clones share it; it is freed with the last one.
#[derive(Clone)]
pub struct Arena(Arc<Inner>);

struct Inner {
    name: String,
    dtype: DType,
    len: usize,
    /// Byte of the memory at which it begins.
    start: usize,
    backing: Arc<Backing>,
}

/// Memory, and who uses which bytes of it at the moment.
struct Backing {
    memory: Box<dyn Memory>,
    borrows: Mutex<Vec<Borrow>>,
}

#[derive(Clone, PartialEq, Eq)]
struct Borrow {
    /// Bytes of the memory.
    bytes: Range<usize>,
    access: Access,
}

/// What a range is in use for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    /// Shared with other readers.
    Read,
    /// Alone.
    Write,
    /// Never given back.
    Abandoned,
}

impl Access {
    const fn is_exclusive(self) -> bool {
        !matches!(self, Self::Read)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Read => "reading",
            Self::Write => "writing",
            Self::Abandoned => "an operation that failed, which other ranks may still carry out",
        }
    }
}

impl Arena {
    /// Bytes of which every part's beginning is a multiple: the widest that a kernel asks for.
    pub const ALIGNMENT: usize = 256;

    /// Wraps memory that is of the kind that `spec` asks for.
    ///
    /// # Panics
    /// If the elements do not fit.
    pub fn new(spec: &ArenaSpec, memory: impl Memory) -> Self {
        let ArenaSpec { name, dtype, len, .. } = spec.clone();
        let end = end_of(0, dtype, len);
        assert!(
            end.is_some_and(|end| end <= memory.bytes()),
            "`{name}` is smaller than its arena"
        );
        let backing = Backing {
            memory: Box::new(memory),
            borrows: Mutex::default(),
        };
        Self(Arc::new(Inner {
            name,
            dtype,
            len,
            start: 0,
            backing: Arc::new(backing),
        }))
    }

    /// An arena of its own in this one's memory, `start` bytes from the beginning of this one. Parts may overlap: use of
    /// the same bytes at once is refused whichever arena it goes through.
    ///
    /// # Panics
    /// If it is not within this arena, or `start` is not a multiple of [`Arena::ALIGNMENT`].
    #[must_use]
    pub fn part(&self, start: usize, name: String, dtype: DType, len: usize) -> Self {
        assert!(
            start.is_multiple_of(Self::ALIGNMENT),
            "`{name}` begins at byte {start}"
        );
        let end = end_of(start, dtype, len);
        assert!(
            end.is_some_and(|end| end <= self.bytes()),
            "`{name}` at byte {start} of {self:?}"
        );
        Self(Arc::new(Inner {
            name,
            dtype,
            len,
            start: self.0.start + start,
            backing: self.0.backing.clone(),
        }))
    }

    /// Name for errors.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.len * self.0.dtype.bytes()
    }

    /// The memory behind it, for the device that made it and for the transport that shares it. Where in it a buffer
    /// begins: [`Buffer::start`].
    pub fn memory(&self) -> &dyn Memory {
        self.0.backing.memory.as_ref()
    }

    /// The memory behind it, if it is of this type.
    pub fn memory_as<T: Memory>(&self) -> Option<&T> {
        (self.memory() as &dyn Any).downcast_ref()
    }

    /// The whole arena as a buffer.
    pub fn whole(&self) -> Buffer {
        Buffer {
            arena: self.clone(),
            range: 0..self.len(),
        }
    }

    /// A range of elements.
    ///
    /// # Panics
    /// If the range is not within the arena: layouts are computed, so that is a bug.
    pub fn slice(&self, range: Range<usize>) -> Buffer {
        self.whole().slice(range)
    }

    /// True if both are the same arena.
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Bytes of the memory that these elements are.
    fn bytes_of(&self, elements: &Range<usize>) -> Range<usize> {
        let byte = |element: usize| self.0.start + element * self.dtype().bytes();
        byte(elements.start)..byte(elements.end)
    }
}

/// The byte behind so many elements from byte `start` on; none if that cannot be counted.
fn end_of(start: usize, dtype: DType, len: usize) -> Option<usize> {
    len.checked_mul(dtype.bytes())?.checked_add(start)
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{} × {}]", self.name(), self.len(), self.dtype())
    }
}

/// A range of an arena's elements. Cheap to clone. It is no borrow: who uses the elements borrows them.
#[derive(Clone)]
pub struct Buffer {
    arena: Arena,
    range: Range<usize>,
}

impl Buffer {
    /// The arena it is cut from.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// True if both are the same elements of the same memory.
    pub fn same(&self, other: &Self) -> bool {
        self.arena.same(&other.arena) && self.range == other.range
    }

    /// Elements of the arena.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.arena.dtype()
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype().bytes()
    }

    /// A part of it; `range` counts from its own start.
    ///
    /// # Panics
    /// If the range is not within the buffer.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len(),
            "{range:?} outside {self:?}"
        );
        Self {
            arena: self.arena.clone(),
            range: self.range.start + range.start..self.range.start + range.end,
        }
    }

    /// Borrows the elements for reading by the host.
    pub fn host<T: Element>(&self) -> Result<HostRef<'_, T>, DeviceError> {
        self.borrow_typed(Access::Read)
    }

    /// Borrows the elements for writing by the host.
    pub fn host_mut<T: Element>(&self) -> Result<HostMut<'_, T>, DeviceError> {
        self.borrow_typed(Access::Write).map(HostMut)
    }

    /// Borrows the elements as bytes, whatever their type.
    pub fn host_bytes(&self) -> Result<HostRef<'_, u8>, DeviceError> {
        self.borrow(Access::Read)
    }

    /// Borrows the elements as bytes for writing, whatever their type.
    pub fn host_bytes_mut(&self) -> Result<HostMut<'_, u8>, DeviceError> {
        self.borrow(Access::Write).map(HostMut)
    }

    /// Holds the elements exclusively, without a slice: for memory that peers write while a collective runs.
    pub fn hold(&self) -> Result<Held, DeviceError> {
        Held::take(self, Access::Write)
    }

    /// The same, shared with other readers, for memory that peers and this process only read meanwhile.
    pub fn hold_to_read(&self) -> Result<Held, DeviceError> {
        Held::take(self, Access::Read)
    }

    fn borrow_typed<T: Element>(&self, access: Access) -> Result<HostRef<'_, T>, DeviceError> {
        const { assert!(size_of::<T>() == T::DTYPE.bytes()) };
        self.expect_dtype(T::DTYPE)?;
        self.borrow(access)
    }

    /// `T` is the type of the elements, or a byte.
    fn borrow<T>(&self, access: Access) -> Result<HostRef<'_, T>, DeviceError> {
        Ok(HostRef {
            ptr: self.byte_ptr()?.cast(),
            held: Held::take(self, access)?,
            _type: PhantomData,
        })
    }

    /// An error unless its elements are of this type.
    pub(crate) fn expect_dtype(&self, expected: DType) -> Result<(), DeviceError> {
        let found = self.dtype();
        if found == expected {
            return Ok(());
        }
        let arena = self.arena.name().to_owned();
        Err(DeviceError::WrongDType {
            arena,
            found,
            expected,
        })
    }

    /// Byte of [`Arena::memory`] at which it begins.
    pub fn start(&self) -> usize {
        self.arena.bytes_of(&self.range).start
    }

    /// Address of its first byte.
    pub(crate) fn byte_ptr(&self) -> Result<*mut u8, DeviceError> {
        let base = self.arena.memory().host_ptr();
        let base = base.ok_or_else(|| DeviceError::NotHost(self.arena.name().to_owned()))?;
        // SAFETY: the range was checked against the arena's length, and the arena's end against that of its memory.
        Ok(unsafe { base.as_ptr().add(self.start()) })
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{:?}]", self.arena.name(), self.range)
    }
}

/// What to allocate.
#[derive(Clone, Debug)]
pub struct ArenaSpec {
    /// For errors and memory accounts.
    pub name: String,
    /// Type of the elements.
    pub dtype: DType,
    /// Number of elements.
    pub len: usize,
    /// The processes that must be able to reach it.
    pub sharing: Sharing,
}

/// The processes that can reach an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// This process only.
    Private,
    /// Other ranks of this node may map it (a memfd segment on the CPU).
    Node,
}

impl ArenaSpec {
    /// `len` elements that this process alone reaches.
    pub fn private(name: impl Into<String>, dtype: DType, len: usize) -> Self {
        Self {
            name: name.into(),
            dtype,
            len,
            sharing: Sharing::Private,
        }
    }

    /// `len` elements that other ranks of this node may map.
    pub fn on_node(name: impl Into<String>, dtype: DType, len: usize) -> Self {
        Self {
            sharing: Sharing::Node,
            ..Self::private(name, dtype, len)
        }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.bytes()
    }
}

/// Hold on a buffer without a slice of it: nobody else uses its elements in a way that clashes. Given back on drop.
#[derive(Debug)]
pub struct Held {
    buffer: Buffer,
    access: Access,
    /// Not to be given back.
    abandoned: bool,
}

impl Held {
    /// Borrows the elements, unless that clashes with who has them.
    fn take(buffer: &Buffer, access: Access) -> Result<Self, DeviceError> {
        let bytes = buffer.arena.bytes_of(&buffer.range);
        let mut borrows = buffer.arena.0.backing.borrows.lock();
        let overlaps = |b: &&Borrow| b.bytes.start < bytes.end && bytes.start < b.bytes.end;
        let exclusive = |b: &&Borrow| b.access.is_exclusive() || access.is_exclusive();
        if let Some(clash) = borrows.iter().filter(overlaps).find(exclusive) {
            return Err(DeviceError::Race {
                arena: buffer.arena.name().to_owned(),
                range: buffer.range(),
                held: clash.access.name(),
                wanted: access.name(),
            });
        }
        borrows.push(Borrow { bytes, access });
        Ok(Self {
            buffer: buffer.clone(),
            access,
            abandoned: false,
        })
    }

    /// Address of its first byte, for a transport whose peers read and write it under this hold.
    pub fn host_ptr(&self) -> Result<*mut u8, DeviceError> {
        self.buffer.byte_ptr()
    }

    /// Ends the hold without giving the elements back: nobody in this process can use them again, since peers may
    /// still write them.
    pub fn abandon(mut self) {
        self.abandoned = true;
    }

    /// The same, but for a range of the elements that peers at most read.
    pub fn abandon_but(self, spared: Range<usize>) {
        let buffer = &self.buffer;
        let mut borrows = buffer.arena.0.backing.borrows.lock();
        let given_up = [0..spared.start, spared.end..buffer.len()].map(|range| buffer.slice(range));
        borrows.extend(given_up.map(|part| Borrow {
            bytes: part.arena.bytes_of(&part.range),
            access: Access::Abandoned,
        }));
        // Then the hold of all of them ends.
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let arena = &self.buffer.arena;
        let own = Borrow {
            bytes: arena.bytes_of(&self.buffer.range),
            access: self.access,
        };
        let mut borrows = arena.0.backing.borrows.lock();
        match borrows.iter().position(|b| *b == own) {
            Some(at) if self.abandoned => borrows[at].access = Access::Abandoned,
            Some(at) => drop(borrows.swap_remove(at)),
            None => {}
        }
    }
}

/// Elements borrowed for reading.
pub struct HostRef<'a, T> {
    /// Address of the first element that is held.
    ptr: *mut T,
    held: Held,
    _type: PhantomData<&'a mut [T]>,
}

impl<T> HostRef<'_, T> {
    fn elements(&self) -> usize {
        self.held.buffer.bytes() / size_of::<T>()
    }
}

impl<T: Element> Deref for HostRef<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the pointer is that of the range held, aligned (mappings are page-aligned, parts begin at multiples of
        // 256 bytes, ranges count in elements), initialised (mappings are zeroed, every element type is `Pod`), and no
        // exclusive borrow of an overlapping range exists but this one.
        unsafe { std::slice::from_raw_parts(self.ptr, self.elements()) }
    }
}

/// Elements borrowed for writing.
pub struct HostMut<'a, T>(HostRef<'a, T>);

impl<T: Element> Deref for HostMut<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T: Element> DerefMut for HostMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `HostRef`; the hold is exclusive, and `&mut self` makes this the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.0.ptr, self.0.elements()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::HostMemory;

    fn of(dtype: DType, len: usize, bytes: usize) -> Arena {
        let memory = HostMemory::private("test", bytes).unwrap();
        Arena::new(&ArenaSpec::private("test", dtype, len), memory)
    }

    fn arena(len: usize) -> Arena {
        of(DType::F32, len, len * 4)
    }

    #[test]
    fn overlapping_writers_are_refused_and_disjoint_ones_are_not() {
        let arena = arena(10);
        let (left, right) = (arena.slice(0..6), arena.slice(4..10));
        let held = left.host_mut::<f32>().unwrap();
        assert!(matches!(right.host::<f32>(), Err(DeviceError::Race { .. })));
        assert!(arena.slice(6..10).host_mut::<f32>().is_ok());
        drop(held);
        assert!(right.host_mut::<f32>().is_ok());
    }

    #[test]
    #[should_panic(expected = "`test` is smaller than its arena")]
    fn a_length_whose_bytes_cannot_be_counted_is_refused() {
        let _ = of(DType::F32, usize::MAX / 4 + 2, 16);
    }

    #[test]
    fn parts_of_an_arena_clash_where_they_share_bytes() {
        let arena = of(DType::U8, 1024, 1024);
        let part = |start, len| arena.part(start, format!("at {start}"), DType::F32, len).whole();
        let (first, second, over) = (part(0, 64), part(256, 64), part(0, 65));
        let mut writing = second.host_mut::<f32>().unwrap();
        writing[0] = 7.0;
        assert!(first.host_mut::<f32>().is_ok());
        let error = over.host::<f32>().err().unwrap();
        assert_eq!(
            error.to_string(),
            "`at 0` elements 0..65 are in use for writing while they are wanted for reading"
        );
        drop(writing);
        assert_eq!(over.host::<f32>().unwrap()[64], 7.0);
        assert_eq!((second.start(), second.slice(2..3).start()), (256, 264));
        let nested =
            arena
                .part(256, "outer".into(), DType::U8, 512)
                .part(256, "inner".into(), DType::F64, 32);
        assert_eq!(nested.slice(1..2).start(), 520);
    }

    #[test]
    #[should_panic(expected = "`late` at byte 768 of test[1024 × u8]")]
    fn a_part_ends_with_its_arena() {
        let _ = of(DType::U8, 1024, 4096).part(768, "late".into(), DType::F32, 65);
    }

    #[test]
    fn readers_share() {
        let arena = arena(4);
        let whole = arena.whole();
        let first = whole.host::<f32>().unwrap();
        assert_eq!(&whole.host::<f32>().unwrap()[..], &first[..]);
        assert!(whole.hold().is_err());
    }

    #[test]
    fn what_was_abandoned_is_never_lent_again() {
        let arena = arena(10);
        arena.slice(2..6).hold().unwrap().abandon();
        let error = arena.slice(5..8).host::<f32>().err().unwrap();
        assert_eq!(
            error.to_string(),
            "`test` elements 5..8 are in use for an operation that failed, which other ranks may still carry out while they are wanted for reading"
        );
        assert!(arena.slice(6..10).host_mut::<f32>().is_ok());
    }

    #[test]
    fn what_peers_only_read_is_lent_again() {
        let arena = arena(10);
        arena.slice(1..9).hold().unwrap().abandon_but(2..4);
        assert!(arena.slice(3..5).host_mut::<f32>().is_ok());
        for given_up in [2..4, 4..6, 8..10] {
            assert!(arena.slice(given_up).host::<f32>().is_err());
        }
        assert!(arena.slice(0..1).host::<f32>().is_ok());
    }

    #[test]
    fn the_wrong_type_is_named() {
        let error = arena(4).whole().host::<f64>().err().unwrap();
        assert_eq!(error.to_string(), "`test` holds f32, expected f64");
    }
}
