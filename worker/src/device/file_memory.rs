//! Host memory that lies in a file: for what is touched once a step and need not be resident in between.
//!
//! The file has no name, so a crash leaves nothing behind, and its blocks are allocated, so that a full disk is an
//! error at allocation. A disk that fails later, or a file system that allocates only when it writes, ends the process
//! with SIGBUS, as for everyone who maps files.
#![allow(unsafe_code, reason = "memory mappings")]

use std::any::Any;
use std::fs::File;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::fcntl::{OFlag, posix_fallocate};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use nix::sys::resource::{Resource, getrlimit};

use super::{DeviceError, Memory};

/// Signals that may interrupt one allocation.
const MAX_INTERRUPTIONS: usize = 100;

/// Of a file's mapping Linux makes this much resident around a page that is read, at multiples of it.
const FAULT_AROUND: usize = 64 << 10;

/// A mapping of a nameless file.
#[derive(Debug)]
pub struct FileMemory {
    ptr: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain memory, owned by this value; access to it is regulated by the arena.
unsafe impl Send for FileMemory {}
// SAFETY: as above; `&FileMemory` gives out the address and advises the kernel.
unsafe impl Sync for FileMemory {}

impl FileMemory {
    /// Zeros in a file of the file system of `dir`. `hint` says what to do where that cannot be.
    pub fn create(dir: &Path, name: &str, bytes: usize, hint: &str) -> Result<Self, DeviceError> {
        let length = bytes.max(1);
        let refuse = |cause: String, never_fits: bool| DeviceError::OutOfMemory {
            what: name.to_owned(),
            bytes,
            cause: format!("`{}`: {cause}", dir.display()),
            hint: hint.to_owned(),
            never_fits,
        };
        let limit = getrlimit(Resource::RLIMIT_FSIZE).map_or(u64::MAX, |(soft, _)| soft);
        if length as u64 > limit {
            // The kernel would send SIGXFSZ.
            return Err(refuse(format!("the limit on file sizes is {limit} bytes"), true));
        }
        let file = nameless(dir).map_err(|error| refuse(error.to_string(), false))?;
        allocate(&file, length).map_err(|error| refuse(error.desc().to_lowercase(), false))?;
        let size = NonZeroUsize::new(length).expect("at least 1");
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice, of a file that is that long and that nobody
        // else can open by a name.
        let ptr = unsafe { mmap(None, size, protection, MapFlags::MAP_SHARED, file.as_fd(), 0) };
        let ptr = ptr.map_err(|error| refuse(error.desc().to_lowercase(), false))?;
        Ok(Self {
            ptr: ptr.cast(),
            bytes: length,
        })
    }

    /// Bytes that will be wanted soon: the kernel may begin to read them.
    pub fn prefetch(&self, bytes: Range<usize>) {
        self.advise(bytes, MmapAdvise::MADV_WILLNEED);
    }

    /// Bytes that are not wanted for a while: they leave this process, and with it the file cache as soon as the
    /// kernel needs the room and has written them. What they are does not change. Neighbours go with them, because the
    /// kernel has made them come with them.
    pub fn evict(&self, bytes: Range<usize>) {
        let base = self.ptr.as_ptr() as usize;
        let start = (base + bytes.start) / FAULT_AROUND * FAULT_AROUND;
        let end = (base + bytes.end).next_multiple_of(FAULT_AROUND);
        self.advise(start.max(base) - base..end - base, MmapAdvise::MADV_DONTNEED);
    }

    /// Whole pages around `bytes`.
    fn advise(&self, bytes: Range<usize>, advice: MmapAdvise) {
        const PAGE: usize = 4096;
        let start = bytes.start / PAGE * PAGE;
        let end = bytes.end.min(self.bytes);
        if start < end {
            // SAFETY: the range is within our own mapping. It is one of a file, shared: dropped pages are read again
            // from the file's cache, with what was written to them, whoever uses them meanwhile.
            let _ = unsafe { madvise(self.ptr.byte_add(start).cast(), end - start, advice) };
        }
    }
}

// SAFETY: a mapping of so many zeroed bytes at page-aligned `ptr`, owned by this value until it is dropped, of a file
// that has no name and that this process has not open.
unsafe impl Memory for FileMemory {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn host_ptr(&self) -> Option<NonNull<u8>> {
        Some(self.ptr)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for FileMemory {
    fn drop(&mut self) {
        // SAFETY: `ptr` and `bytes` are those of our own mapping, and nobody can hold a slice of it: guards borrow the
        // arena that owns this value.
        let unmapped = unsafe { munmap(self.ptr.cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

/// A file without a name; where the file system has no such thing, one whose name is gone at once.
fn nameless(dir: &Path) -> std::io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).mode(0o600);
    match options.clone().custom_flags(OFlag::O_TMPFILE.bits()).open(dir) {
        Err(error)
            if error
                .raw_os_error()
                .is_some_and(|code| [Errno::EOPNOTSUPP, Errno::EISDIR].contains(&Errno::from_raw(code))) => {}
        outcome => return outcome,
    }
    let random: u128 = rand::random();
    let path = dir.join(format!(".ddp-offload-{}-{random:032x}", std::process::id()));
    let file = options.create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

fn allocate(file: &File, bytes: usize) -> Result<(), Errno> {
    let length = i64::try_from(bytes).map_err(|_| Errno::EFBIG)?;
    for _ in 0..MAX_INTERRUPTIONS {
        match posix_fallocate(file, 0, length) {
            Err(Errno::EINTR) => {}
            outcome => return outcome,
        }
    }
    Err(Errno::EINTR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_evicted_is_what_was_written_and_the_file_has_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let memory = FileMemory::create(dir.path(), "test", 10_000, "").unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        // SAFETY: the only slice of the mapping.
        let bytes = unsafe { std::slice::from_raw_parts_mut(memory.ptr.as_ptr(), memory.bytes()) };
        assert!(bytes.iter().all(|byte| *byte == 0));
        bytes[5000] = 7;
        memory.evict(0..10_000);
        memory.prefetch(4096..20_000);
        assert_eq!((bytes[4999], bytes[5000]), (0, 7));
    }

    #[test]
    fn a_folder_that_is_none_and_a_file_that_cannot_be_that_large_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("nowhere");
        let error = FileMemory::create(&missing, "moments", 10, "make it").unwrap_err();
        let expected = format!(
            "cannot allocate 10 bytes for `moments`: `{}`: No such file or directory (os error 2)\n  hint: make it",
            missing.display()
        );
        assert_eq!(error.to_string(), expected);
        let error = FileMemory::create(dir.path(), "moments", 1 << 60, "take another disk").unwrap_err();
        assert!(
            matches!(&error, DeviceError::OutOfMemory { bytes, .. } if *bytes == 1 << 60),
            "{error}"
        );
    }
}
