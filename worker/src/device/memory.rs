//! Host memory: private pages, a memfd segment that other processes can map, or a mapped file.
//!
//! - Segments are `fallocate`d: a shortage is an error at allocation, never a SIGBUS at the first touch.
//! - A file is for what is touched once a step and need not be resident in between. Its blocks are allocated too. A disk
//!   that fails later, or a file system that allocates only when it writes, ends the process with SIGBUS, as for everyone
//!   who maps files.
//!
//! Nothing has a name in the file system, so a crash leaves nothing behind.
#![allow(unsafe_code, reason = "memory mappings")]

use std::any::Any;
use std::fs::File;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, OFlag, fallocate, posix_fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use nix::sys::resource::{Resource, getrlimit};

use super::{DeviceError, system_memory};

/// Signals that may interrupt one allocation.
const MAX_INTERRUPTIONS: usize = 100;

/// The bytes behind an arena, wherever they are.
///
/// # Safety
/// Arenas make slices of what an implementation says: for as long as the value lives, `host_ptr` must be none or
/// always the same address, of [`Memory::bytes`] readable, writable and initialised bytes, aligned to a page, that
/// nothing else of this process accesses.
pub unsafe trait Memory: Send + Sync + 'static {
    /// Size in bytes.
    fn bytes(&self) -> usize;
    /// First byte, if the host can reach it.
    fn host_ptr(&self) -> Option<NonNull<u8>>;
    /// For the device that made it.
    fn as_any(&self) -> &dyn Any;
}

/// A mapping of zeroed, page-aligned host memory.
#[derive(Debug)]
pub struct HostMemory {
    ptr: NonNull<u8>,
    bytes: usize,
    fd: Option<OwnedFd>,
}

// SAFETY: the mapping is plain memory, owned by this value; access to it is regulated by the arena.
unsafe impl Send for HostMemory {}
// SAFETY: as above; `&HostMemory` only gives out the address.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Private memory of this process.
    pub fn private(name: &str, bytes: usize) -> Result<Self, DeviceError> {
        let length = NonZeroUsize::new(bytes.max(1)).expect("at least 1");
        // SAFETY: a new anonymous mapping at an address of the kernel's choice aliases nothing.
        let ptr = unsafe {
            mmap_anonymous(
                None,
                length,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_PRIVATE,
            )
        }
        .map_err(|e| out_of_memory(name, bytes, e))?;
        let ptr = ptr.cast();
        advise_huge_pages(ptr, length.get());
        Ok(Self {
            ptr,
            bytes: length.get(),
            fd: None,
        })
    }

    /// A fresh memfd segment, with its pages allocated.
    pub fn shared(name: &str, bytes: usize) -> Result<Self, DeviceError> {
        let length = bytes.max(1);
        Self::check_room(name, length, 1)?;
        let fd = memfd_create(format!("ddp-{name}").as_str(), MFdFlags::MFD_CLOEXEC)
            .map_err(|e| out_of_memory(name, bytes, e))?;
        populate(&fd, length).map_err(|e| out_of_memory(name, bytes, e))?;
        Self::map(name, fd, length)
    }

    /// An error if the system would not give `count` shared segments of this size. Asking for them all the same
    /// could end this process: beyond `RLIMIT_FSIZE` the kernel sends SIGXFSZ, and beyond the machine's memory
    /// it starts to kill.
    pub fn check_room(name: &str, bytes: usize, count: usize) -> Result<(), DeviceError> {
        let refuse = |cause: String, hint: &str, never_fits: bool| {
            Err(DeviceError::OutOfMemory {
                what: name.to_owned(),
                bytes,
                cause,
                hint: hint.to_owned(),
                never_fits,
            })
        };
        let limit = getrlimit(Resource::RLIMIT_FSIZE).map_or(u64::MAX, |(soft, _)| soft);
        if bytes as u64 > limit {
            return refuse(
                format!("the limit on file sizes, which also holds for shared memory, is {limit} bytes"),
                "raise it with `ulimit -f unlimited`",
                true,
            );
        }
        let wanted = (bytes as u64).saturating_mul(count as u64);
        match system_memory::available_bytes() {
            Some(available) if wanted > available => refuse(
                format!("{count} of these are wanted on this node, where {available} bytes are available"),
                "lower the model's size or `--nproc-per-node`, or raise the memory limit",
                system_memory::most_bytes().is_some_and(|most| wanted > most),
            ),
            _ => Ok(()),
        }
    }

    /// Maps a segment that another process made and passed over a socket.
    pub fn map(name: &str, fd: OwnedFd, bytes: usize) -> Result<Self, DeviceError> {
        let length = NonZeroUsize::new(bytes.max(1)).expect("at least 1");
        let found = nix::sys::stat::fstat(&fd)
            .map_err(|e| out_of_memory(name, bytes, e))?
            .st_size;
        if usize::try_from(found).unwrap_or(0) < bytes {
            return Err(DeviceError::Upstream(format!(
                "shared segment `{name}` has {found} bytes, expected {bytes}"
            )));
        }
        // SAFETY: a new mapping at an address of the kernel's choice; the segment is at least that long.
        let ptr = unsafe {
            mmap(
                None,
                length,
                ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
                MapFlags::MAP_SHARED | MapFlags::MAP_POPULATE,
                fd.as_fd(),
                0,
            )
        }
        .map_err(|e| out_of_memory(name, bytes, e))?;
        Ok(Self {
            ptr: ptr.cast(),
            bytes: length.get(),
            fd: Some(fd),
        })
    }

    /// Descriptor of a shared segment.
    #[must_use]
    pub fn fd(&self) -> Option<&OwnedFd> {
        self.fd.as_ref()
    }

    /// First byte of the mapping.
    #[must_use]
    pub const fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Size of the mapping.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// Never: a mapping has at least one byte.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        false
    }
}

// SAFETY: a mapping of so many zeroed bytes at page-aligned `ptr`, owned by this value until it is dropped.
unsafe impl Memory for HostMemory {
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

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: `ptr` and `bytes` are those of our own mapping, and nobody can hold a slice of it:
        // guards borrow the arena that owns this value.
        let unmapped = unsafe { munmap(self.ptr.cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Allocates the pages of a segment. The kernel gives up, and all of them back, when a signal comes, however
/// harmless; it does not begin again by itself.
fn populate(fd: &OwnedFd, bytes: usize) -> Result<(), Errno> {
    again_if_interrupted(|| fallocate(fd, FallocateFlags::empty(), 0, bytes as i64))
}

fn again_if_interrupted(attempt: impl Fn() -> nix::Result<()>) -> nix::Result<()> {
    for _ in 0..MAX_INTERRUPTIONS {
        match attempt() {
            Err(Errno::EINTR) => {}
            outcome => return outcome,
        }
    }
    Err(Errno::EINTR)
}

fn advise_huge_pages(ptr: NonNull<u8>, bytes: usize) {
    const HUGE_PAGE: usize = 2 << 20;
    if bytes >= 2 * HUGE_PAGE {
        // SAFETY: advice on our own fresh mapping; it does not change its contents. A refusal only costs speed.
        let _ = unsafe { madvise(ptr.cast(), bytes, MmapAdvise::MADV_HUGEPAGE) };
    }
}

fn out_of_memory(name: &str, bytes: usize, error: Errno) -> DeviceError {
    let (mut cause, mut never_fits) = (error.desc().to_lowercase(), false);
    if error == Errno::ENOMEM {
        let limit = getrlimit(Resource::RLIMIT_AS).map_or(u64::MAX, |(soft, _)| soft);
        let machine = system_memory::machine_bytes().unwrap_or(u64::MAX);
        let held = AddressSpace::now();
        match Refusal::of(bytes as u64, held, (limit, machine)) {
            Some(Refusal::Limit { always }) => {
                cause = format!(
                    "this process may map {limit} bytes (`ulimit -v`), and has mapped {} of them",
                    held.mapped
                );
                never_fits = always;
            }
            Some(Refusal::Machine) => {
                cause = format!("the machine has {machine} bytes");
                never_fits = true;
            }
            None => {}
        }
    }
    DeviceError::OutOfMemory {
        what: name.to_owned(),
        bytes,
        cause,
        hint: "lower `train.micro_batch` or the model's size, or raise the memory limit (`ddp-train doctor` shows it)"
            .to_owned(),
        never_fits,
    }
}

/// Why private memory was refused, where that has nothing to do with what others hold.
#[derive(Debug, PartialEq, Eq)]
enum Refusal {
    /// It is more than the rest of the limit on this process's mappings; and if `always`, at every try.
    Limit { always: bool },
    /// The machine has less, at every try.
    Machine,
}

impl Refusal {
    /// `bytes` were refused to a process that holds `held`, on a machine of so many bytes.
    fn of(bytes: u64, held: AddressSpace, (limit, machine): (u64, u64)) -> Option<Self> {
        if held.mapped.saturating_add(bytes) > limit {
            Some(Self::Limit {
                always: held.resident.saturating_add(bytes) > limit,
            })
        } else {
            (bytes > machine).then_some(Self::Machine)
        }
    }
}

/// Memory of this process, in bytes; 0 if the system does not say.
#[derive(Clone, Copy, Debug, Default)]
struct AddressSpace {
    /// What counts against the limit on mappings. It differs from try to try: the C library reserves 64 MiB for each
    /// thread that finds the others allocating.
    mapped: u64,
    /// What of it is in use, and will be the next time.
    resident: u64,
}

impl AddressSpace {
    fn now() -> Self {
        let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE);
        let page = page.ok().flatten().unwrap_or(0) as u64;
        let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
        let mut counts = text
            .split(' ')
            .map(|pages| pages.parse::<u64>().unwrap_or(0) * page);
        Self {
            mapped: counts.next().unwrap_or(0),
            resident: counts.next().unwrap_or(0),
        }
    }
}

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
    again_if_interrupted(|| posix_fallocate(file, 0, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_refused_at_every_try_never_fits() {
        let unlimited = (u64::MAX, 1000);
        let always = |always| Some(Refusal::Limit { always });
        for (bytes, mapped, bounds, expected) in [
            (600, 800, (1000, 1000), always(true)),
            (300, 800, (1000, 1000), always(false)),
            (200, 800, (1000, 1000), None),
            (900, 800, unlimited, None),
            (1001, 0, unlimited, Some(Refusal::Machine)),
        ] {
            let held = AddressSpace {
                mapped,
                resident: mapped * 5 / 8,
            };
            assert_eq!(Refusal::of(bytes, held, bounds), expected, "{bytes}");
        }
        let held = AddressSpace::now();
        assert!(held.resident > 1 << 20 && held.mapped > held.resident, "{held:?}");
    }

    #[test]
    fn more_than_the_machine_has_is_refused_for_good() {
        let most = system_memory::most_bytes().expect("the kernel says");
        for (bytes, expected) in [(most as usize + 1, true), (4096, false)] {
            let verdict = HostMemory::check_room("test", bytes, 1);
            let never = matches!(verdict, Err(DeviceError::OutOfMemory { never_fits: true, .. }));
            assert_eq!(never, expected, "{verdict:?}");
        }
        assert!(system_memory::available_bytes() <= Some(most));
    }

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
