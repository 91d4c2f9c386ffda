//! Activations: shaped buffers leased from a pool.
//!
//! A lease ends when the last clone is dropped; the memory then serves the next activation of the same size.
//! All users of a pool enqueue on one stream, so reuse is ordered by the stream even on asynchronous devices.
//! After the first step the pool no longer allocates.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::device::{Arena, ArenaSpec, Buffer, DType, Device, DeviceError, Sharing};

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

/// Memory for activations, by element type and length.
#[derive(Clone)]
pub struct ActivationPool(Arc<Inner>);

struct Inner {
    device: Arc<dyn Device>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    free: HashMap<(DType, usize), Vec<Arena>>,
    allocated_bytes: usize,
    used_bytes: usize,
    peak_bytes: usize,
}

impl ActivationPool {
    /// An empty pool.
    #[must_use]
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self(Arc::new(Inner {
            device,
            state: Mutex::default(),
        }))
    }

    /// Leases memory; its contents are whatever was there before.
    pub fn lease(&self, name: &str, dtype: DType, shape: &[usize]) -> Result<Activation, DeviceError> {
        let len: usize = shape.iter().product();
        let bytes = len * dtype.bytes();
        let recycled = self.state().free.get_mut(&(dtype, len)).and_then(Vec::pop);
        let arena = if let Some(arena) = recycled {
            arena
        } else {
            let spec = ArenaSpec {
                name: format!("activation {name}"),
                dtype,
                len,
                sharing: Sharing::Private,
            };
            let arena = self.0.device.alloc(&spec)?;
            self.state().allocated_bytes += bytes;
            arena
        };
        let mut state = self.state();
        state.used_bytes += bytes;
        state.peak_bytes = state.peak_bytes.max(state.used_bytes);
        drop(state);
        let buffer = arena.whole();
        let lease = Lease {
            pool: self.clone(),
            arena,
        };
        Ok(Activation {
            buffer,
            shape: shape.to_vec(),
            _lease: Some(Arc::new(lease)),
        })
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

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Lease {
    pool: ActivationPool,
    arena: Arena,
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
        let key = (self.arena.dtype(), self.arena.len());
        state.free.entry(key).or_default().push(self.arena.clone());
    }
}
