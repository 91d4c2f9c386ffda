//! Activations: shaped buffers leased from a pool.
//!
//! A lease ends when the last clone is dropped; the memory then serves other activations. All users of a pool enqueue
//! on one stream, so reuse is ordered by the stream even on asynchronous devices.
//!
//! The memory is one arena of a size that is known beforehand ([`super::rehearse`]). What finds no place in it, or has
//! no such arena because nobody asked beforehand, gets memory of its own, which serves later activations of the same size.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::placement::Placement;
use crate::device::{Arena, ArenaSpec, Buffer, DType, Device, DeviceError};

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
    #[must_use]
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
    #[must_use]
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Sizes, outermost first.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
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
    used_bytes: usize,
    peak_bytes: usize,
}

impl ActivationPool {
    /// A pool without a plan.
    #[must_use]
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self::over(device, None)
    }

    /// A pool with an arena of so many bytes, which it allocates now.
    pub fn planned(device: Arc<dyn Device>, bytes: usize) -> Result<Self, DeviceError> {
        let arena = device.alloc(&ArenaSpec::private("activations", DType::U8, bytes))?;
        Ok(Self::over(device, Some(arena)))
    }

    fn over(device: Arc<dyn Device>, planned: Option<Arena>) -> Self {
        let bytes = planned.as_ref().map_or(0, Arena::bytes);
        Self(Arc::new(Inner {
            device,
            planned,
            state: Mutex::new(State {
                places: Placement::new(bytes),
                free: HashMap::new(),
                allocated_bytes: bytes,
                used_bytes: 0,
                peak_bytes: 0,
            }),
        }))
    }

    /// Leases memory; its contents are whatever was there before.
    pub fn lease(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<Activation, DeviceError> {
        let len: usize = shape.iter().product();
        let name = format!("activation {name}");
        let (arena, place) = match self.place(&name, dtype, len) {
            Some((arena, start)) => (arena, Some(start)),
            None => (self.beside(name, dtype, len)?, None),
        };
        let mut state = self.state();
        state.used_bytes += arena.bytes();
        state.peak_bytes = state.peak_bytes.max(state.used_bytes);
        drop(state);
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

    /// A part of the planned arena, and where it begins.
    fn place(&self, name: &str, dtype: DType, len: usize) -> Option<(Arena, usize)> {
        let arena = self.0.planned.as_ref()?;
        let bytes = len.checked_mul(dtype.bytes())?;
        let place = self.state().places.take(bytes)?;
        Some((arena.part(place.start, name.to_owned(), dtype, len), place.start))
    }

    /// Memory outside of the plan.
    fn beside(&self, name: String, dtype: DType, len: usize) -> Result<Arena, DeviceError> {
        let recycled = self.state().free.get_mut(&(dtype, len)).and_then(Vec::pop);
        if let Some(arena) = recycled {
            return Ok(arena);
        }
        let arena = self.0.device.alloc(&ArenaSpec::private(name, dtype, len))?;
        self.state().allocated_bytes += arena.bytes();
        Ok(arena)
    }

    /// Bytes ever allocated: what the process holds for activations.
    #[must_use]
    pub fn allocated_bytes(&self) -> usize {
        self.state().allocated_bytes
    }

    /// Most bytes leased at one time.
    #[must_use]
    pub fn peak_bytes(&self) -> usize {
        self.state().peak_bytes
    }

    /// End of the last place in the planned arena that there ever was.
    pub(super) fn extent(&self) -> usize {
        self.state().places.extent()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Lease {
    pool: ActivationPool,
    arena: Arena,
    /// Where it begins in the planned arena; none beside it.
    place: Option<usize>,
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lease({:?})", self.arena)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        state.used_bytes -= self.arena.bytes();
        if let Some(start) = self.place {
            state.places.free(start);
        } else {
            let key = (self.arena.dtype(), self.arena.len());
            state.free.entry(key).or_default().push(self.arena.clone());
        }
    }
}
