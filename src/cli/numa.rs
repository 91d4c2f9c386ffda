//! `--numa-binding`: which cores each worker may run on, from sysfs.
//!
//! | binding | worker `i` of `n` gets |
//! |---|---|
//! | `node` | all cores of its NUMA node |
//! | `socket` | all cores of its processor package |
//! | `exclusive` | its own share of the cores of its NUMA node, shared with nobody |
//!
//! Workers are spread over the nodes (or sockets) evenly, neighbours together; a worker with a GPU of its own goes to
//! the node that the GPU hangs on. Only cores of this process's affinity mask count.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use ddp_launcher::CoreSet;
use nix::sched::{CpuSet, sched_getaffinity};
use nix::unistd::Pid;

/// `--numa-binding`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// The cores of one NUMA node.
    Node,
    /// The cores of one processor package.
    Socket,
    /// A share of one NUMA node's cores.
    Exclusive,
}

/// The machine as sysfs shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// Usable cores by NUMA node.
    pub nodes: BTreeMap<usize, BTreeSet<usize>>,
    /// Usable cores by processor package.
    pub sockets: BTreeMap<usize, BTreeSet<usize>>,
    /// NUMA node of each visible GPU, in order of device number; none where the machine does not say.
    pub gpus: Vec<Option<usize>>,
}

impl Topology {
    /// Reads `/sys`. A machine without NUMA information is one node and one socket.
    pub fn read() -> Self {
        Self::read_from(Path::new("/sys"), &usable())
    }

    fn read_from(sys: &Path, usable: &BTreeSet<usize>) -> Self {
        let mut nodes = BTreeMap::new();
        for (number, directory) in numbered(&sys.join("devices/system/node"), "node") {
            let cores = fs::read_to_string(directory.join("cpulist")).unwrap_or_default();
            let cores: BTreeSet<usize> = cpu_list(&cores).intersection(usable).copied().collect();
            if !cores.is_empty() {
                nodes.insert(number, cores);
            }
        }
        if nodes.is_empty() {
            nodes.insert(0, usable.clone());
        }
        let mut sockets: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
        for core in usable {
            let file = sys.join(format!(
                "devices/system/cpu/cpu{core}/topology/physical_package_id"
            ));
            let socket = fs::read_to_string(file)
                .ok()
                .and_then(|text| text.trim().parse().ok());
            sockets.entry(socket.unwrap_or(0)).or_default().insert(*core);
        }
        Self {
            nodes,
            sockets,
            gpus: gpu_nodes(sys),
        }
    }
}

/// The cores of each of `workers` workers, by local rank.
pub fn bind(binding: Binding, workers: u32, topology: &Topology) -> Result<Vec<CoreSet>, String> {
    let domains: Vec<(usize, &BTreeSet<usize>)> = match binding {
        Binding::Node | Binding::Exclusive => topology.nodes.iter().map(|(n, cores)| (*n, cores)).collect(),
        Binding::Socket => topology.sockets.iter().map(|(n, cores)| (*n, cores)).collect(),
    };
    let workers = workers as usize;
    let by_gpu = binding != Binding::Socket && topology.gpus.len() >= workers;
    let home = |worker: usize| {
        let of_gpu = topology.gpus.get(worker).copied().flatten().filter(|_| by_gpu);
        let found = of_gpu.and_then(|node| domains.iter().position(|(number, _)| *number == node));
        found.unwrap_or(worker * domains.len() / workers)
    };
    let homes: Vec<usize> = (0..workers).map(home).collect();
    let share = |worker: usize| {
        let cores = domains[homes[worker]].1;
        if binding != Binding::Exclusive {
            return Ok(CoreSet(cores.clone()));
        }
        let neighbours: Vec<usize> = (0..workers).filter(|w| homes[*w] == homes[worker]).collect();
        let place = neighbours.iter().position(|w| *w == worker).unwrap_or(0);
        let (first, end) = (
            place * cores.len() / neighbours.len(),
            (place + 1) * cores.len() / neighbours.len(),
        );
        if first == end {
            return Err(format!(
                "`exclusive` needs a core for each worker, but NUMA node {} has {} for {} workers",
                domains[homes[worker]].0,
                cores.len(),
                neighbours.len()
            ));
        }
        Ok(CoreSet(
            cores.iter().skip(first).take(end - first).copied().collect(),
        ))
    };
    (0..workers).map(share).collect()
}

/// Cores in the affinity mask.
fn usable() -> BTreeSet<usize> {
    let mask = sched_getaffinity(Pid::from_raw(0)).unwrap_or_else(|_| CpuSet::new());
    (0..CpuSet::count())
        .filter(|core| mask.is_set(*core).unwrap_or(false))
        .collect()
}

/// `0-3,8,10-11`
fn cpu_list(text: &str) -> BTreeSet<usize> {
    let range = |part: &str| -> Option<std::ops::RangeInclusive<usize>> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    text.split(',').filter_map(range).flatten().collect()
}

/// Subdirectories called `prefix` and a number, in order of number.
fn numbered(directory: &Path, prefix: &str) -> BTreeMap<usize, std::path::PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let numbered = entries.filter_map(|entry| {
        let name = entry.file_name();
        let number = name.to_str()?.strip_prefix(prefix)?.parse().ok()?;
        Some((number, entry.path()))
    });
    numbered.collect()
}

/// NUMA nodes of NVIDIA's display controllers in order of their bus addresses, which is CUDA's order with
/// `CUDA_DEVICE_ORDER=PCI_BUS_ID`, and the usual one where all GPUs are alike.
fn gpu_nodes(sys: &Path) -> Vec<Option<usize>> {
    let read = |path: std::path::PathBuf| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let mut devices: Vec<_> = fs::read_dir(sys.join("bus/pci/devices"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| read(path.join("vendor")) == "0x10de" && read(path.join("class")).starts_with("0x03"))
        .collect();
    devices.sort();
    devices
        .iter()
        .map(|path| read(path.join("numa_node")).parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cores(range: std::ops::Range<usize>) -> BTreeSet<usize> {
        range.collect()
    }

    fn two_nodes() -> Topology {
        Topology {
            nodes: BTreeMap::from([(0, cores(0..4)), (1, cores(4..8))]),
            sockets: BTreeMap::from([(0, cores(0..8))]),
            gpus: vec![],
        }
    }

    fn bound(binding: Binding, workers: u32, topology: &Topology) -> Vec<Vec<usize>> {
        let sets = bind(binding, workers, topology).unwrap();
        sets.into_iter()
            .map(|CoreSet(cores)| cores.into_iter().collect())
            .collect()
    }

    #[test]
    fn workers_are_spread_over_the_nodes() {
        let topology = two_nodes();
        let node = [vec![0, 1, 2, 3], vec![4, 5, 6, 7]];
        assert_eq!(bound(Binding::Node, 2, &topology), node);
        assert_eq!(
            bound(Binding::Socket, 2, &topology)[1],
            (0..8).collect::<Vec<_>>()
        );
        assert_eq!(
            bound(Binding::Exclusive, 4, &topology),
            [vec![0, 1], vec![2, 3], vec![4, 5], vec![6, 7]]
        );
        assert_eq!(
            bound(Binding::Exclusive, 3, &topology),
            [vec![0, 1], vec![2, 3], vec![4, 5, 6, 7]]
        );
        let error = bind(Binding::Exclusive, 9, &topology).unwrap_err();
        assert!(error.contains("NUMA node 0 has 4 for 5 workers"), "{error}");
    }

    #[test]
    fn a_worker_goes_where_its_gpu_is() {
        let topology = Topology {
            gpus: vec![Some(1), Some(0)],
            ..two_nodes()
        };
        assert_eq!(
            bound(Binding::Node, 2, &topology),
            [vec![4, 5, 6, 7], vec![0, 1, 2, 3]]
        );
    }

    #[test]
    fn sysfs_is_read() {
        let sys = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("devices/system/node/node0/cpulist", "0-1,4\n");
        write("devices/system/node/node1/cpulist", "2-3\n");
        for (core, socket) in [(0, 0), (1, 0), (2, 1)] {
            write(
                &format!("devices/system/cpu/cpu{core}/topology/physical_package_id"),
                &format!("{socket}\n"),
            );
        }
        write("bus/pci/devices/0000:41:00.0/vendor", "0x10de\n");
        write("bus/pci/devices/0000:41:00.0/class", "0x030200\n");
        write("bus/pci/devices/0000:41:00.0/numa_node", "1\n");
        write("bus/pci/devices/0000:42:00.0/vendor", "0x8086\n");
        let topology = Topology::read_from(sys.path(), &cores(0..3));
        assert_eq!(
            topology.nodes,
            BTreeMap::from([(0, cores(0..2)), (1, cores(2..3))])
        );
        assert_eq!(
            topology.sockets,
            BTreeMap::from([(0, cores(0..2)), (1, cores(2..3))])
        );
        assert_eq!(topology.gpus, [Some(1)]);
        assert_eq!(
            Topology::read_from(Path::new("/nonexistent"), &cores(0..2)).nodes[&0],
            cores(0..2)
        );
    }
}
