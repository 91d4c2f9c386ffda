//! Guards: elements of an arena, borrowed for as long as somebody touches them.
#![allow(unsafe_code, reason = "slices of mapped memory")]

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use super::arena::Access;
use super::{Buffer, DeviceError, Element};

/// Exclusive hold on a buffer without a slice of it; given back on drop.
#[derive(Debug)]
pub struct Held {
    buffer: Buffer,
    /// Not to be given back.
    abandoned: bool,
}

impl Held {
    /// For a buffer that was just borrowed for writing.
    pub(super) fn new(buffer: Buffer) -> Self {
        Self {
            buffer,
            abandoned: false,
        }
    }

    /// The buffer held.
    #[must_use]
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
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
}

impl Drop for Held {
    fn drop(&mut self) {
        let (arena, range) = (self.buffer.arena(), self.buffer.range());
        if self.abandoned {
            arena.abandon(&range);
        } else {
            arena.give_back(&range, Access::Write);
        }
    }
}

/// One borrow of an arena; ends on drop.
pub(super) struct Guard<'a> {
    buffer: &'a Buffer,
    access: Access,
}

impl<'a> Guard<'a> {
    /// Borrows the buffer's range.
    pub(super) fn take(buffer: &'a Buffer, access: Access) -> Result<Self, DeviceError> {
        buffer.arena().borrow(&buffer.range(), access)?;
        Ok(Self { buffer, access })
    }

    fn elements<T>(&self) -> usize {
        self.buffer.bytes() / size_of::<T>()
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.buffer.arena().give_back(&self.buffer.range(), self.access);
    }
}

/// Elements borrowed for reading.
pub struct HostRef<'a, T> {
    ptr: *const T,
    guard: Guard<'a>,
    _type: PhantomData<&'a [T]>,
}

impl<'a, T> HostRef<'a, T> {
    /// `ptr` is the address of the guarded range.
    pub(super) fn new(ptr: *const T, guard: Guard<'a>) -> Self {
        Self {
            ptr,
            guard,
            _type: PhantomData,
        }
    }
}

impl<T: Element> Deref for HostRef<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the pointer is that of the guarded range, aligned (mappings are page-aligned, ranges count
        // in elements; parts begin at multiples of 256 bytes), initialised (mappings are zeroed, every element type is `Pod`), and no exclusive
        // borrow of an overlapping range exists while the guard lives.
        unsafe { std::slice::from_raw_parts(self.ptr, self.guard.elements::<T>()) }
    }
}

/// Elements borrowed for writing.
pub struct HostMut<'a, T> {
    ptr: *mut T,
    guard: Guard<'a>,
    _type: PhantomData<&'a mut [T]>,
}

impl<'a, T> HostMut<'a, T> {
    /// `ptr` is the address of the guarded range.
    pub(super) fn new(ptr: *mut T, guard: Guard<'a>) -> Self {
        Self {
            ptr,
            guard,
            _type: PhantomData,
        }
    }
}

impl<T: Element> Deref for HostMut<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: as for `HostRef`; the guard is exclusive.
        unsafe { std::slice::from_raw_parts(self.ptr, self.guard.elements::<T>()) }
    }
}

impl<T: Element> DerefMut for HostMut<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as for `HostRef`; the guard is exclusive, and `&mut self` makes this the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.guard.elements::<T>()) }
    }
}
