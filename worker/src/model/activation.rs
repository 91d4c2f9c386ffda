//! Activations: shaped buffers leased from a pool.
//!
//! A lease ends when the last clone is dropped; the memory then serves other activations. All users of a pool enqueue
//! on one stream, so reuse is ordered by the stream even on asynchronous devices.
//!
//! The memory is one arena of a size that is known beforehand (`train/run_row.rs` rehearses). What finds no place in it, or has
//! no such arena because nobody asked beforehand, gets memory of its own, which serves later activations of the same size.
//! An activation lies in the lowest hole that is wide enough. That choice does not depend on how long the arena is, so what
//! was placed in endless memory once finds the same places, and fits, in memory of the `Placement::extent` that it then
//! had.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::device::{Arena, ArenaSpec, Buffer, DType, Device, Result};

/// A shaped buffer. Clones share it.
#[derive(Clone, Debug)]
pub struct Activation {
    buffer: Buffer,
    shape: Vec<usize>,
    _lease: Option<Arc<Lease>>,
}

impl Activation {
    /// A view of memory that belongs to someone else, such as a batch.
    ///
    /// # Panics
    /// If the shape does not have as many elements as the buffer.
    pub fn borrowed(buffer: Buffer, shape: Vec<usize>) -> Self {
        assert_eq!(
            buffer.len(),
            shape.iter().product::<usize>(),
            "shape {shape:?} of {buffer:?}"
        );
        Self {
            buffer,
            shape,
            _lease: None,
        }
    }

    /// The elements, row-major.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Sizes, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Rows `R` of the matrix `[R, C]` that it is: the product of all sizes but the last.
    pub fn row_count(&self) -> usize {
        let outer = self.shape.split_last().map_or(&[][..], |(_, outer)| outer);
        outer.iter().product()
    }

    /// Some of its rows, `[rows, C]`, in the same memory, which stays leased.
    ///
    /// # Panics
    /// If it has fewer rows.
    #[must_use]
    pub fn rows(&self, rows: Range<usize>) -> Self {
        let channels = self.shape.last().copied().unwrap_or(1);
        let elements = rows.start * channels..rows.end * channels;
        Self {
            buffer: self.buffer.slice(elements),
            shape: vec![rows.len(), channels],
            ..self.clone()
        }
    }
}

/// Memory for activations.
#[derive(Clone)]
pub struct ActivationPool(Arc<Inner>);

struct Inner {
    device: Arc<dyn Device>,
    planned: Option<Arena>,
    state: Mutex<State>,
}

struct State {
    /// In the planned arena.
    places: Placement,
    /// Beside it.
    free: HashMap<(DType, usize), Vec<Arena>>,
    allocated_bytes: usize,
}

impl ActivationPool {
    /// A pool without a plan.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self::over(device, None)
    }

    /// A pool with an arena of so many bytes, which it allocates now.
    pub fn planned(device: Arc<dyn Device>, bytes: usize) -> Result<Self> {
        let arena = device.alloc(&ArenaSpec::private("activations", DType::U8, bytes))?;
        Ok(Self::over(device, Some(arena)))
    }

    /// The memory that it was planned with.
    pub fn arena(&self) -> Option<&Arena> {
        self.0.planned.as_ref()
    }

    /// A pool in an arena of bytes, or without a plan.
    pub(crate) fn over(device: Arc<dyn Device>, planned: Option<Arena>) -> Self {
        let bytes = planned.as_ref().map_or(0, Arena::bytes);
        Self(Arc::new(Inner {
            device,
            planned,
            state: Mutex::new(State {
                places: Placement::new(bytes),
                free: HashMap::new(),
                allocated_bytes: bytes,
            }),
        }))
    }

    /// Leases memory; its contents are whatever was there before.
    pub fn lease(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<Activation> {
        let len: usize = shape.iter().product();
        let name = format!("activation {name}");
        let (arena, place) = match self.place(&name, dtype, len) {
            Some((arena, place)) => (arena, Some(place)),
            None => (self.beside(name, dtype, len)?, None),
        };
        let buffer = arena.whole();
        let lease = Lease {
            pool: self.clone(),
            arena,
            place,
        };
        Ok(Activation {
            buffer,
            shape: shape.to_vec(),
            _lease: Some(Arc::new(lease)),
        })
    }

    /// A part of the planned arena, and its place there.
    fn place(&self, name: &str, dtype: DType, len: usize) -> Option<(Arena, Range<usize>)> {
        let arena = self.0.planned.as_ref()?;
        let bytes = len.checked_mul(dtype.bytes())?;
        let place = self.0.state.lock().places.take(bytes)?;
        Some((arena.part(place.start, name.to_owned(), dtype, len), place))
    }

    /// Memory outside of the plan.
    fn beside(&self, name: String, dtype: DType, len: usize) -> Result<Arena> {
        let recycled = self.0.state.lock().free.get_mut(&(dtype, len)).and_then(Vec::pop);
        if let Some(arena) = recycled {
            return Ok(arena);
        }
        let arena = self.0.device.alloc(&ArenaSpec::private(name, dtype, len))?;
        self.0.state.lock().allocated_bytes += arena.bytes();
        Ok(arena)
    }

    /// Bytes ever allocated: what the process holds for activations.
    pub fn allocated_bytes(&self) -> usize {
        self.0.state.lock().allocated_bytes
    }

    /// End of the last place in the planned arena that there ever was.
    pub(crate) fn extent(&self) -> usize {
        self.0.state.lock().places.extent
    }
}

struct Lease {
    pool: ActivationPool,
    arena: Arena,
    /// Its place in the planned arena; none beside it.
    place: Option<Range<usize>>,
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lease({:?})", self.arena)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.pool.0.state.lock();
        if let Some(place) = self.place.take() {
            state.places.free(place);
        } else {
            let key = (self.arena.dtype(), self.arena.len());
            state.free.entry(key).or_default().push(self.arena.clone());
        }
    }
}

/// Which places are taken. All sizes in bytes.
#[derive(Clone, Debug)]
struct Placement {
    /// End of each hole by its start. There are few of them, however many places are taken.
    holes: BTreeMap<usize, usize>,
    /// End of the last place that there ever was.
    extent: usize,
}

impl Placement {
    /// All of the memory is free.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            holes: BTreeMap::from([(0, limit)]),
            extent: 0,
        }
    }

    /// A place for so many bytes, which begins at a multiple of [`Arena::ALIGNMENT`]; none if no hole is wide enough.
    pub(super) fn take(&mut self, bytes: usize) -> Option<Range<usize>> {
        // A place of no bytes would share its start with another.
        let bytes = bytes.max(1).checked_next_multiple_of(Arena::ALIGNMENT)?;
        let is_wide = |(start, end): &(&usize, &usize)| **end - **start >= bytes;
        let (&start, &hole_end) = self.holes.iter().find(is_wide)?;
        self.holes.remove(&start);
        let end = start + bytes;
        if end < hole_end {
            self.holes.insert(end, hole_end);
        }
        self.extent = self.extent.max(end);
        Some(start..end)
    }

    /// Frees a place that was taken.
    pub(super) fn free(&mut self, place: Range<usize>) {
        let end = self.holes.remove(&place.end).unwrap_or(place.end);
        let before = self.holes.range(..place.start).next_back();
        let joined = before.filter(|(_, hole_end)| **hole_end == place.start);
        let start = joined.map_or(place.start, |(start, _)| *start);
        self.holes.insert(start, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_lowest_hole_that_is_wide_enough_is_taken() {
        let mut places = Placement::new(2048);
        let starts = [1, 512, 256, 300].map(|bytes| places.take(bytes).unwrap().start);
        assert_eq!(starts, [0, 256, 768, 1024]);
        places.free(0..256);
        places.free(768..1024);
        assert_eq!(places.take(257), Some(1536..2048));
        assert_eq!(places.take(256), Some(0..256));
        assert_eq!(places.take(0), Some(768..1024));
        assert_eq!(places.take(1), None);
        places.free(1536..2048);
        assert_eq!(places.take(512), Some(1536..2048));
        assert_eq!(places.extent, 2048);
    }

    #[test]
    fn sizes_beyond_all_memory_have_no_place() {
        assert_eq!(Placement::new(usize::MAX).take(usize::MAX), None);
    }

    proptest! {
        #[test]
        fn what_fitted_in_endless_memory_fits_in_its_extent(
            moves in prop::collection::vec((0_usize..5000, any::<prop::sample::Index>(), any::<bool>()), 0..80),
        ) {
            let mut endless = Placement::new(usize::MAX);
            let play = |places: &mut Placement| {
                let mut held: Vec<Range<usize>> = Vec::new();
                let mut all = Vec::new();
                for (bytes, which, frees) in &moves {
                    if *frees && !held.is_empty() {
                        places.free(held.swap_remove(which.index(held.len())));
                    } else {
                        let place = places.take(*bytes).unwrap();
                        assert!(place.len() >= *bytes);
                        assert!(held.iter().all(|h| h.end <= place.start || place.end <= h.start));
                        all.push(place.clone());
                        held.push(place);
                    }
                }
                for place in held {
                    places.free(place);
                }
                all
            };
            let first = play(&mut endless);
            let mut exact = Placement::new(endless.extent);
            // As often as one likes, and to the same places.
            prop_assert_eq!(&play(&mut exact), &first);
            prop_assert_eq!(&play(&mut exact), &first);
        }
    }
}
