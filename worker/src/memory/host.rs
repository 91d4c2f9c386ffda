//! Host memory: private pages, a memfd segment that other processes can map, or a mapped file; and how much of it the
//! system can still give, by the machine's count and by the control groups around this process.
//!
//! - Segments are `fallocate`d: a shortage is an error at allocation, never a SIGBUS at the first touch.
//! - A file is for what is touched once a step and need not be resident in between. Its blocks are allocated too. A disk
//!   that fails later, or a file system that allocates only when it writes, ends the process with SIGBUS, as for everyone
//!   who maps files.
//!
//! Nothing has a name in the file system, so a crash leaves nothing behind.
#![allow(unsafe_code, reason = "memory mappings")]

use std::any::Any;
use std::fs::{File, read_to_string};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::ptr::NonNull;

use ddp_proto::cgroup::CgroupMembership;
use ddp_proto::words;
use memmap2::{Advice, MmapOptions, MmapRaw, UncheckedAdvice};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, SealFlag, fcntl, posix_fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{Resource, getrlimit};

use super::DeviceError;

/// Signals that may interrupt one allocation.
const MAX_INTERRUPTIONS: usize = 100;

/// The bytes behind an arena, wherever they are.
///
/// # Safety
/// Arenas make slices of what an implementation returns: for as long as the value lives, `host_ptr` must be none or
/// always the same address, of [`Memory::bytes`] readable, writable and initialised bytes, aligned to a page, that
/// nothing else of this process accesses.
pub unsafe trait Memory: Any + Send + Sync {
    /// Size in bytes.
    fn bytes(&self) -> usize;
    /// First byte, if the host can reach it.
    fn host_ptr(&self) -> Option<NonNull<u8>> {
        None
    }
}

/// Mappings of this size or more ask for huge pages.
const HUGE_MAPPING: usize = 4 << 20;

/// A mapping of zeroed, page-aligned host memory.
#[derive(Debug)]
pub struct HostMemory {
    mapping: MmapRaw,
    fd: Option<OwnedFd>,
}

impl HostMemory {
    /// Private memory of this process.
    pub fn private(name: &str, bytes: usize) -> Result<Self, DeviceError> {
        let mapping = MmapOptions::new().len(bytes.max(1)).map_anon();
        let mapping = mapping.map_err(|e| out_of_memory(name, bytes, e))?;
        if bytes >= HUGE_MAPPING {
            // A refusal only costs speed.
            let _ = mapping.advise(Advice::HugePage);
        }
        Ok(Self {
            mapping: mapping.into(),
            fd: None,
        })
    }

    /// A fresh memfd segment, with its pages allocated, whose size nobody can change.
    pub fn shared(name: &str, bytes: usize) -> Result<Self, DeviceError> {
        let length = bytes.max(1);
        Self::check_room(name, length, 1)?;
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let fd =
            memfd_create(format!("ddp-{name}").as_str(), flags).map_err(|e| out_of_memory(name, bytes, e))?;
        allocate(&fd, length).map_err(|e| out_of_memory(name, bytes, e))?;
        fcntl(&fd, FcntlArg::F_ADD_SEALS(seals())).map_err(|e| out_of_memory(name, bytes, e))?;
        Self::map(name, fd, length)
    }

    /// An error if the system would not give `count` shared segments of this size. Asking for them all the same
    /// could end this process: beyond `RLIMIT_FSIZE` the kernel sends SIGXFSZ, and beyond the machine's memory
    /// it starts to kill.
    pub fn check_room(name: &str, bytes: usize, count: usize) -> Result<(), DeviceError> {
        let limit = limit_of(Resource::RLIMIT_FSIZE);
        let wanted = (bytes as u64).saturating_mul(count as u64);
        let (cause, hint, never_fits) = if bytes as u64 > limit {
            let limit = words::bytes(limit);
            let cause = format!("the limit on file sizes, which also applies to shared memory, is {limit}");
            (cause, "raise it with `ulimit -f unlimited`", true)
        } else if let Some(available) = available_bytes().filter(|available| wanted > *available) {
            let available = words::bytes(available);
            let cause = format!("this node needs {count} of these, but only {available} are available");
            let hint = "lower the model's size or `--nproc-per-node`, or raise the memory limit";
            (cause, hint, most_bytes().is_some_and(|most| wanted > most))
        } else {
            return Ok(());
        };
        Err(DeviceError::OutOfMemory {
            what: name.to_owned(),
            bytes,
            cause,
            hint: hint.to_owned(),
            never_fits,
        })
    }

    /// Maps a segment that another process made and passed over a socket.
    pub fn map(name: &str, fd: OwnedFd, bytes: usize) -> Result<Self, DeviceError> {
        let found = nix::sys::stat::fstat(&fd)
            .map_err(|e| out_of_memory(name, bytes, e))?
            .st_size;
        if usize::try_from(found).unwrap_or(0) < bytes {
            return Err(DeviceError::Upstream(format!(
                "shared segment `{name}` has {found} bytes, expected {bytes}"
            )));
        }
        let sealed = fcntl(&fd, FcntlArg::F_GET_SEALS).map(SealFlag::from_bits_retain);
        if !sealed.is_ok_and(|sealed| sealed.contains(seals())) {
            let what =
                format!("the size of shared segment `{name}` is not sealed: its owner could cut it off");
            return Err(DeviceError::Upstream(what));
        }
        let mapping = MmapOptions::new().len(bytes.max(1)).populate().map_raw(&fd);
        Ok(Self {
            mapping: mapping.map_err(|e| out_of_memory(name, bytes, e))?,
            fd: Some(fd),
        })
    }

    /// Descriptor of a shared segment.
    pub fn fd(&self) -> Option<&OwnedFd> {
        self.fd.as_ref()
    }

    /// First byte of the mapping.
    pub fn ptr(&self) -> NonNull<u8> {
        first_byte(&self.mapping)
    }
}

// SAFETY: a mapping of so many zeroed bytes at a page-aligned address, owned by this value until it is dropped.
unsafe impl Memory for HostMemory {
    fn bytes(&self) -> usize {
        self.mapping.len()
    }

    fn host_ptr(&self) -> Option<NonNull<u8>> {
        Some(self.ptr())
    }
}

/// The length of a shared segment is fixed, and so is that it is: without a page that a process has mapped, its next access
/// would end it with SIGBUS.
fn seals() -> SealFlag {
    SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL
}

fn first_byte(mapping: &MmapRaw) -> NonNull<u8> {
    NonNull::new(mapping.as_mut_ptr()).expect("no mapping is at address 0")
}

/// Allocates the pages of a segment or the blocks of a file. The kernel gives up, and all of them back, when a signal
/// comes, however harmless; it does not begin again by itself.
fn allocate(file: &impl AsFd, bytes: usize) -> Result<(), Errno> {
    let length = i64::try_from(bytes).map_err(|_| Errno::EFBIG)?;
    for _ in 0..MAX_INTERRUPTIONS {
        match posix_fallocate(file, 0, length) {
            Err(Errno::EINTR) => {}
            outcome => return outcome,
        }
    }
    Err(Errno::EINTR)
}

/// The limit of this process on one resource, in bytes.
fn limit_of(resource: Resource) -> u64 {
    getrlimit(resource).map_or(u64::MAX, |(soft, _)| soft)
}

fn out_of_memory(name: &str, bytes: usize, error: impl Into<io::Error>) -> DeviceError {
    // Without a number: the length is more than an address space.
    let error = error.into().raw_os_error().map_or(Errno::ENOMEM, Errno::from_raw);
    let refusal = || {
        let (limit, machine) = (limit_of(Resource::RLIMIT_AS), machine_bytes().unwrap_or(u64::MAX));
        refusal(bytes as u64, AddressSpace::now(), limit, machine)
    };
    let known = (error == Errno::ENOMEM).then(refusal).flatten();
    // Then nothing is wrong with the size.
    let is_forbidden = matches!(error, Errno::EPERM | Errno::EACCES | Errno::ENOSYS);
    let (cause, never_fits) = known.unwrap_or_else(|| (error.desc().to_lowercase(), is_forbidden));
    let hint = if is_forbidden {
        "a security profile (seccomp, SELinux) forbids shared memory: allow `memfd_create` and `fallocate`"
    } else {
        "lower `train.micro_batch` or the model's size, or raise the memory limit (`ddp-train doctor` shows it)"
    };
    DeviceError::OutOfMemory {
        what: name.to_owned(),
        bytes,
        cause,
        hint: hint.to_owned(),
        never_fits,
    }
}

/// Why `bytes` of private memory were refused to a process that holds `held`, where that has nothing to do with what
/// others hold; and true if they would be at every try. `limit` is that on the process's mappings.
fn refusal(bytes: u64, held: AddressSpace, limit: u64, machine: u64) -> Option<(String, bool)> {
    let mapped = held.mapped;
    if mapped.saturating_add(bytes) > limit {
        let cause = format!(
            "this process may map {} (`ulimit -v`) and has already mapped {}",
            words::bytes(limit),
            words::bytes(mapped)
        );
        Some((cause, held.resident.saturating_add(bytes) > limit))
    } else {
        (bytes > machine).then(|| (format!("the machine has {}", words::bytes(machine)), true))
    }
}

/// Memory of this process, in bytes; 0 where it is unknown.
#[derive(Clone, Copy, Debug)]
struct AddressSpace {
    /// What counts against the limit on mappings. It differs from try to try: the C library reserves 64 MiB for each
    /// thread that finds the others allocating.
    mapped: u64,
    /// What of it is in use, and will be the next time.
    resident: u64,
}

impl AddressSpace {
    fn now() -> Self {
        let status = read_to_string("/proc/self/status").unwrap_or_default();
        let count = |name| kernels_count(&status, name).unwrap_or(0);
        Self {
            mapped: count("VmSize:"),
            resident: count("VmRSS:"),
        }
    }
}

/// Linux makes this much of a mapped file resident around a page that is read, at multiples of it.
const FAULT_AROUND: usize = 64 << 10;

/// A mapping of a nameless file.
#[derive(Debug)]
pub struct FileMemory(MmapRaw);

impl FileMemory {
    /// Zeros in a file of the file system of `dir`. `hint` is the next step where that fails.
    pub fn create(dir: &Path, name: &str, bytes: usize, hint: &str) -> Result<Self, DeviceError> {
        let length = bytes.max(1);
        let refuse = |cause: String, never_fits: bool| DeviceError::OutOfMemory {
            what: name.to_owned(),
            bytes,
            cause: format!("`{}`: {cause}", dir.display()),
            hint: hint.to_owned(),
            never_fits,
        };
        let limit = limit_of(Resource::RLIMIT_FSIZE);
        if length as u64 > limit {
            // The kernel would send SIGXFSZ.
            let cause = format!("the limit on file sizes is {}", words::bytes(limit));
            return Err(refuse(cause, true));
        }
        let file = nameless(dir).map_err(|error| refuse(error.to_string(), false))?;
        allocate(&file, length).map_err(|error| refuse(error.desc().to_lowercase(), false))?;
        let mapping = MmapOptions::new().len(length).map_raw(&file);
        mapping
            .map(Self)
            .map_err(|error| refuse(error.to_string(), false))
    }

    /// Bytes that will be wanted soon: the kernel may begin to read them.
    pub fn prefetch(&self, bytes: Range<usize>) {
        let length = bytes.end.min(self.0.len()).saturating_sub(bytes.start);
        // A refusal only costs speed, here and below.
        let _ = self.0.advise_range(Advice::WillNeed, bytes.start, length);
    }

    /// Bytes that are not wanted for a while: they leave this process, and with it the file cache as soon as the
    /// kernel needs the room and has written them. What they are does not change. Neighbours go with them, because the
    /// kernel has made them come with them.
    pub fn evict(&self, bytes: Range<usize>) {
        let base = self.0.as_ptr() as usize;
        let start = ((base + bytes.start) / FAULT_AROUND * FAULT_AROUND).max(base) - base;
        let end = ((base + bytes.end).next_multiple_of(FAULT_AROUND) - base).min(self.0.len());
        let length = end.saturating_sub(start);
        // SAFETY: the mapping is one of a file, shared: dropped pages are read again from the file's cache, with what was
        // written to them, whoever uses them meanwhile.
        let _ = unsafe {
            self.0
                .unchecked_advise_range(UncheckedAdvice::DontNeed, start, length)
        };
    }
}

// SAFETY: a mapping of so many zeroed bytes at a page-aligned address, owned by this value until it is dropped, of a file
// that has no name and that this process has not open.
unsafe impl Memory for FileMemory {
    fn bytes(&self) -> usize {
        self.0.len()
    }

    fn host_ptr(&self) -> Option<NonNull<u8>> {
        Some(first_byte(&self.0))
    }
}

/// A file without a name; where the file system has no such thing, one whose name is gone at once.
fn nameless(dir: &Path) -> io::Result<File> {
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

/// What a version of control groups calls its files.
struct CgroupVersion {
    limit: &'static str,
    used: &'static str,
    /// Lines of `memory.stat` on cached files, those of the groups below included.
    cached: [&'static str; 2],
}

const V2: CgroupVersion = CgroupVersion {
    limit: "memory.max",
    used: "memory.current",
    cached: ["active_file", "inactive_file"],
};

const V1: CgroupVersion = CgroupVersion {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_active_file", "total_inactive_file"],
};

/// Bytes that can be allocated before somebody is killed; none if that is unknown.
fn available_bytes() -> Option<u64> {
    least("MemAvailable:", headroom(&CgroupMembership::of_this_process()))
}

/// Bytes that could be allocated if nobody else had any: the system never gives more. None if that is unknown.
fn most_bytes() -> Option<u64> {
    least("MemTotal:", CgroupMembership::of_this_process().memory_limit())
}

/// The least of a line of `/proc/meminfo` and of the control groups' number.
fn least(line: &str, of_groups: Option<u64>) -> Option<u64> {
    let meminfo = read_to_string("/proc/meminfo").unwrap_or_default();
    kernels_count(&meminfo, line).into_iter().chain(of_groups).min()
}

/// All memory of the machine, with its swap space; none if that is unknown.
fn machine_bytes() -> Option<u64> {
    let meminfo = read_to_string("/proc/meminfo").ok()?;
    let swap = kernels_count(&meminfo, "SwapTotal:").unwrap_or(0);
    Some(kernels_count(&meminfo, "MemTotal:")? + swap)
}

/// A line of `/proc/meminfo` or of a process's `status`, in bytes.
fn kernels_count(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// The least of limit minus use over the process's groups and all above them.
fn headroom(membership: &CgroupMembership) -> Option<u64> {
    let v2 = membership.unified_levels().map(|group| V2.headroom(&group));
    let v1 = membership.levels_of("memory").map(|group| V1.headroom(&group));
    v2.chain(v1).flatten().min()
}

impl CgroupVersion {
    /// Limit minus use of one group; cached files give way, and count as free.
    fn headroom(&self, group: &Path) -> Option<u64> {
        let used = number(&group.join(self.used))?;
        let stat = read_to_string(group.join("memory.stat")).unwrap_or_default();
        let limit = number(&group.join(self.limit))?;
        Some(limit.saturating_sub(used.saturating_sub(self.cached(&stat))))
    }

    fn cached(&self, stat: &str) -> u64 {
        let lines = stat.lines().filter_map(|line| line.split_once(' '));
        let cached = lines.filter(|(name, _)| self.cached.contains(name));
        cached.filter_map(|(_, bytes)| bytes.parse::<u64>().ok()).sum()
    }
}

/// The number that a file holds, if it is one.
fn number(file: &Path) -> Option<u64> {
    read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_refused_at_every_try_never_fits() {
        let unlimited = (u64::MAX, 1000);
        let limit = |always| {
            Some((
                "this process may map 1000 B (`ulimit -v`) and has already mapped 800 B",
                always,
            ))
        };
        for (bytes, mapped, bounds, expected) in [
            (600, 800, (1000, 1000), limit(true)),
            (300, 800, (1000, 1000), limit(false)),
            (200, 800, (1000, 1000), None),
            (900, 800, unlimited, None),
            (1001, 0, unlimited, Some(("the machine has 1000 B", true))),
        ] {
            let held = AddressSpace {
                mapped,
                resident: mapped * 5 / 8,
            };
            let expected = expected.map(|(cause, always)| (cause.to_owned(), always));
            assert_eq!(refusal(bytes, held, bounds.0, bounds.1), expected, "{bytes}");
        }
        let held = AddressSpace::now();
        assert!(held.resident > 1 << 20 && held.mapped > held.resident, "{held:?}");
    }

    #[test]
    fn a_forbidden_system_call_is_no_lack_of_memory() {
        let refused = out_of_memory("segment", 4096, Errno::EPERM);
        assert!(matches!(
            refused,
            DeviceError::OutOfMemory { never_fits: true, .. }
        ));
        assert_eq!(
            refused.to_string(),
            "cannot allocate 4.0 KiB for `segment`: operation not permitted\n  \
             hint: a security profile (seccomp, SELinux) forbids shared memory: allow `memfd_create` and `fallocate`"
        );
    }

    #[test]
    fn more_than_the_machine_has_is_refused_for_good() {
        let most = most_bytes().expect("the kernel says");
        for (bytes, expected) in [(most as usize + 1, true), (4096, false)] {
            let verdict = HostMemory::check_room("test", bytes, 1);
            let never = matches!(verdict, Err(DeviceError::OutOfMemory { never_fits: true, .. }));
            assert_eq!(never, expected, "{verdict:?}");
        }
        assert!(available_bytes() <= Some(most));
    }

    #[test]
    fn what_is_evicted_is_what_was_written_and_the_file_has_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let memory = FileMemory::create(dir.path(), "test", 10_000, "").unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        // SAFETY: the only slice of the mapping.
        let bytes = unsafe { std::slice::from_raw_parts_mut(memory.0.as_mut_ptr(), memory.bytes()) };
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
            "cannot allocate 10 B for `moments`: `{}`: No such file or directory (os error 2)\n  hint: make it",
            missing.display()
        );
        assert_eq!(error.to_string(), expected);
        let error = FileMemory::create(dir.path(), "moments", 1 << 60, "take another disk").unwrap_err();
        assert!(
            matches!(&error, DeviceError::OutOfMemory { bytes, .. } if *bytes == 1 << 60),
            "{error}"
        );
    }

    /// Both versions, mounted elsewhere than usual, as a container sees them.
    fn mounts(root: &Path) -> String {
        let root = root.display();
        format!(
            "24 1 0:22 / / rw,relatime - ext4 /dev/vda rw\n\
             33 30 0:29 /docker/7 {root}/cpu rw shared:3 - cgroup cgroup rw,cpu,cpuacct\n\
             31 30 0:27 /docker/7 {root}/v1 rw - cgroup cgroup rw,memory\n\
             32 30 0:28 /pod {root}/v2 rw,nosuid shared:9 - cgroup2 cgroup rw,nsdelegate\n"
        )
    }

    #[test]
    fn the_kernel_files_are_read() {
        let meminfo = "MemTotal:       24000000 kB\nMemAvailable:   1024 kB\n";
        assert_eq!(kernels_count(meminfo, "MemAvailable:"), Some(1 << 20));
        assert_eq!(kernels_count(meminfo, "MemTotal:"), Some(24_576_000_000));
        assert_eq!(kernels_count(meminfo, "SwapTotal:"), None);
    }

    #[test]
    fn nobody_cuts_off_a_shared_segment() {
        let segment = HostMemory::shared("test", 10_000).unwrap();
        let fd = segment.fd().unwrap();
        assert_eq!(nix::unistd::ftruncate(fd, 0), Err(Errno::EPERM));
        assert_eq!(nix::unistd::ftruncate(fd, 1 << 20), Err(Errno::EPERM));
        let other = HostMemory::map("test", fd.try_clone().unwrap(), 10_000).unwrap();
        // SAFETY: within both mappings, which no other thread knows.
        unsafe {
            segment.ptr().as_ptr().add(9_999).write(7);
            assert_eq!(other.ptr().as_ptr().add(9_999).read(), 7);
        }
    }

    #[test]
    fn a_segment_that_its_owner_can_cut_off_is_refused() {
        let fd = memfd_create("ddp-test", MFdFlags::MFD_CLOEXEC).unwrap();
        nix::unistd::ftruncate(&fd, 10_000).unwrap();
        let error = HostMemory::map("test", fd, 10_000).unwrap_err().to_string();
        assert!(error.contains("`test` is not sealed"), "{error}");
    }

    #[test]
    fn the_tightest_group_counts_wherever_it_is_mounted() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| std::fs::write(root.path().join(path), text).unwrap();
        for folder in ["v2/job/step", "v1/job"] {
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        let groups = |membership: &str| CgroupMembership::new(mounts(root.path()), membership.to_owned());
        let all = || groups("4:memory:/docker/7/job\n0::/pod/job/step\n");
        assert_eq!((headroom(&all()), all().memory_limit()), (None, None));
        write("v2/job/memory.max", "1000\n");
        write("v2/job/memory.current", "450\n");
        write(
            "v2/job/memory.stat",
            "anon 400\ninactive_file 30\nactive_file 20\n",
        );
        write("v2/job/step/memory.max", "max\n");
        write("v2/job/step/memory.current", "300\n");
        write("v1/job/memory.limit_in_bytes", "2000\n");
        write("v1/job/memory.usage_in_bytes", "500\n");
        write("v1/job/memory.stat", "active_file 7\ntotal_active_file 100\n");
        let v1 = groups("4:memory:/docker/7/job\n");
        assert_eq!((headroom(&v1), headroom(&all())), (Some(1600), Some(600)));
        let limits = (v1.memory_limit(), all().memory_limit());
        assert_eq!(limits, (Some(2000), Some(1000)), "whatever is in use");
        // Two ways to say that there is none.
        write("v1/job/memory.limit_in_bytes", "9223372036854771712\n");
        write("v2/job/memory.max", "max\n");
        assert_eq!(all().memory_limit(), None);
    }
}
