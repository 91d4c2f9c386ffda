//! Copies of buffers that end at a page that nobody may touch.

use std::num::NonZeroUsize;
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

const PAGE: usize = 4096;
/// Accesses of this size must be aligned to it.
const ALIGNMENT: usize = 16;
/// What is around the bytes.
const FENCE: u8 = 0xa5;

/// Bytes with `past` as their address modulo 16, and at most 15 bytes between their end and the forbidden page.
pub(crate) struct Fenced {
    mapping: NonNull<u8>,
    length: usize,
    start: usize,
    bytes: usize,
}

impl Fenced {
    pub(crate) fn new(contents: &[u8], past: usize) -> Self {
        let bytes = contents.len();
        let body = (bytes + 2 * ALIGNMENT).next_multiple_of(PAGE);
        let length = body + 2 * PAGE;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, of which the first and the last page are
        // then forbidden.
        let mapping = unsafe {
            let mapping = mmap_anonymous(
                None,
                NonZeroUsize::new(length).unwrap(),
                protection,
                MapFlags::MAP_PRIVATE,
            )
            .unwrap();
            mprotect(mapping, PAGE, ProtFlags::PROT_NONE).unwrap();
            mprotect(mapping.byte_add(length - PAGE), PAGE, ProtFlags::PROT_NONE).unwrap();
            mapping.cast::<u8>()
        };
        let latest = length - PAGE - bytes;
        let start = (latest - past % ALIGNMENT) / ALIGNMENT * ALIGNMENT + past % ALIGNMENT;
        let mut fenced = Self {
            mapping,
            length,
            start,
            bytes,
        };
        fenced.open().fill(FENCE);
        let before = start - PAGE;
        fenced.open()[before..before + bytes].copy_from_slice(contents);
        fenced
    }

    pub(crate) fn address(&self) -> u64 {
        self.mapping.as_ptr() as u64 + self.start as u64
    }

    /// The bytes; panics if something was written around them.
    pub(crate) fn contents(&mut self, what: &str) -> &[u8] {
        let (start, bytes) = (self.start - PAGE, self.bytes);
        let open = self.open();
        let intact = open[..start].iter().chain(&open[start + bytes..]);
        assert!(
            intact.copied().all(|byte| byte == FENCE),
            "{what}: written outside its elements"
        );
        &open[start..start + bytes]
    }

    fn open(&mut self) -> &mut [u8] {
        // SAFETY: all between the two forbidden pages is ours, initialised by the kernel, and borrowed with `self`.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.as_ptr().add(PAGE), self.length - 2 * PAGE) }
    }
}

impl Drop for Fenced {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of which no slice is left.
        let unmapped = unsafe { munmap(self.mapping.cast(), self.length) };
        debug_assert!(unmapped.is_ok());
    }
}
