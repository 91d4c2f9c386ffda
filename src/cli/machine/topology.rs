//! The cores, caches and GPUs of this machine, as the kernel's files describe them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

/// What this process may use of the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// Where each core of the affinity mask lies, by the kernel's number. Hyperthreads are cores of their own here.
    pub cores: BTreeMap<usize, Core>,
    /// NUMA node of each GPU, by its number in CUDA; none where the machine does not say.
    pub gpus: Vec<Option<usize>>,
}

/// Where a core lies. A machine that does not say is one node, one socket and one core complex.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Core {
    /// NUMA node.
    pub node: usize,
    /// Processor package.
    pub socket: usize,
    /// First hyperthread of the same physical core, usable or not.
    pub physical: usize,
    /// First core that shares the last-level cache with it, usable or not.
    pub complex: usize,
}

impl Topology {
    /// Looks at this machine, whose GPUs have these PCI addresses.
    pub fn read(gpus: &[String]) -> Self {
        Self::read_below(Path::new("/"), &usable(), gpus)
    }

    /// The same of a machine whose files are below `root`.
    fn read_below(root: &Path, usable: &BTreeSet<usize>, gpus: &[String]) -> Self {
        let devices = root.join("sys/devices/system");
        let mut nodes = BTreeMap::new();
        for (node, directory) in numbered(&devices.join("node"), "node") {
            let cores = cpu_list(&text(&directory.join("cpulist")));
            nodes.extend(cores.into_iter().map(|core| (core, node)));
        }
        let place = |core: usize| {
            let directory = devices.join(format!("cpu/cpu{core}"));
            let siblings = cpu_list(&text(&directory.join("topology/thread_siblings_list")));
            let socket = text(&directory.join("topology/physical_package_id"));
            Core {
                node: nodes.get(&core).copied().unwrap_or(0),
                socket: socket.parse().unwrap_or(0),
                physical: siblings.first().copied().unwrap_or(core),
                complex: last_level_sharers(&directory.join("cache"))
                    .first()
                    .copied()
                    .unwrap_or(0),
            }
        };
        let node_of_gpu = |address: &String| {
            let directory = root.join("sys/bus/pci/devices").join(sysfs_name(address)?);
            // -1: the firmware does not say.
            text(&directory.join("numa_node")).parse().ok()
        };
        Self {
            cores: usable.iter().map(|core| (*core, place(*core))).collect(),
            gpus: gpus.iter().map(node_of_gpu).collect(),
        }
    }
}

/// Cores in the affinity mask.
fn usable() -> BTreeSet<usize> {
    let mask = sched_getaffinity(Pid::from_raw(0)).unwrap_or_else(|_| CpuSet::new());
    (0..CpuSet::count())
        .filter(|core| mask.is_set(*core).unwrap_or(false))
        .collect()
}

/// Cores that share the data cache of the highest level below `cache`, a core's folder of caches.
fn last_level_sharers(cache: &Path) -> BTreeSet<usize> {
    let last = numbered(cache, "index")
        .into_values()
        .filter(|index| text(&index.join("type")) != "Instruction")
        .max_by_key(|index| text(&index.join("level")).parse::<u32>().unwrap_or(0));
    last.map_or_else(BTreeSet::new, |index| {
        cpu_list(&text(&index.join("shared_cpu_list")))
    })
}

/// How sysfs calls the device that CUDA calls `00000000:3B:00.0`; none for what is no PCI address.
fn sysfs_name(address: &str) -> Option<String> {
    let (domain, rest) = address.split_once(':')?;
    let domain = u32::from_str_radix(domain, 16).ok()?;
    Some(format!("{domain:04x}:{}", rest.to_ascii_lowercase()))
}

/// Contents of a file of one line; empty if there is none.
fn text(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_default().trim().to_owned()
}

/// `0-3,8,10-11`
fn cpu_list(text: &str) -> BTreeSet<usize> {
    let range = |part: &str| -> Option<std::ops::RangeInclusive<usize>> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    text.split(',').filter_map(range).flatten().collect()
}

/// Entries called `prefix` and a number, in order of number.
fn numbered(directory: &Path, prefix: &str) -> BTreeMap<usize, PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let numbered = entries.filter_map(|entry| {
        let name = entry.file_name();
        let number = name.to_str()?.strip_prefix(prefix)?.parse().ok()?;
        Some((number, entry.path()))
    });
    numbered.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files of a machine, below a folder of their own.
    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn with(self, path: &str, text: &str) -> Self {
            let path = self.0.path().join("sys").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
            self
        }

        /// A core with its socket, hyperthreads and the cores of its L3 cache.
        fn core(self, number: usize, socket: &str, siblings: &str, l3: &str) -> Self {
            let file = |name: &str| format!("devices/system/cpu/cpu{number}/{name}");
            self.with(&file("topology/physical_package_id"), socket)
                .with(&file("topology/thread_siblings_list"), siblings)
                .with(&file("cache/index0/type"), "Data")
                .with(&file("cache/index0/level"), "1")
                .with(&file("cache/index0/shared_cpu_list"), siblings)
                .with(&file("cache/index3/type"), "Unified")
                .with(&file("cache/index3/level"), "3")
                .with(&file("cache/index3/shared_cpu_list"), l3)
                .with(&file("cache/index9/type"), "Instruction")
                .with(&file("cache/index9/level"), "9")
                .with(&file("cache/index9/shared_cpu_list"), "0-99")
        }

        fn read(&self, usable: impl IntoIterator<Item = usize>, gpus: &[&str]) -> Topology {
            let gpus: Vec<_> = gpus.iter().map(|gpu| (*gpu).to_owned()).collect();
            Topology::read_below(self.0.path(), &usable.into_iter().collect(), &gpus)
        }
    }

    #[test]
    fn cores_are_placed_and_those_of_others_left_out() {
        let machine = Machine::new()
            .with("devices/system/node/node0/cpulist", "0-1,4-5")
            .with("devices/system/node/node1/cpulist", "2-3")
            .core(1, "0", "1,5", "0-1,4-5")
            .core(2, "7", "2-3", "2-3")
            .core(5, "0", "1,5", "0-1,4-5");
        let first = Core {
            node: 0,
            socket: 0,
            physical: 1,
            complex: 0,
        };
        let second = Core {
            node: 1,
            socket: 7,
            physical: 2,
            complex: 2,
        };
        let expected = BTreeMap::from([(1, first), (2, second), (5, first)]);
        assert_eq!(machine.read([1, 2, 5], &[]).cores, expected);
    }

    #[test]
    fn a_machine_that_says_nothing_is_one_node() {
        let core = |physical| Core {
            physical,
            ..Core::default()
        };
        let expected = BTreeMap::from([(3, core(3)), (8, core(8))]);
        assert_eq!(Machine::new().read([3, 8], &[]).cores, expected);
    }

    #[test]
    fn gpus_are_found_under_the_address_that_cuda_gives_them() {
        let machine = Machine::new()
            .with("bus/pci/devices/0000:3b:00.0/numa_node", "1")
            .with("bus/pci/devices/10001:00:00.0/numa_node", "0")
            .with("bus/pci/devices/0000:42:00.0/numa_node", "-1");
        let addresses = [
            "0000:42:00.0",
            "00000000:3B:00.0",
            "10001:00:00.0",
            "0000:99:00.0",
            "",
        ];
        let expected = [None, Some(1), Some(0), None, None];
        assert_eq!(machine.read([0], &addresses).gpus, expected);
    }
}
