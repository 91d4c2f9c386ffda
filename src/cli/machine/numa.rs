//! `--numa-binding`: which cores each worker may run on.
//!
//! | binding | a worker gets |
//! |---|---|
//! | `node` | all cores of its NUMA node |
//! | `socket` | all cores of its processor package |
//! | `exclusive` | its share of the physical cores of its NUMA node, hyperthreads included, shared with no other worker |
//! | `core-complex` | the cores of its NUMA node that share one last-level cache; one of its own while there are enough |
//!
//! Its node is where its GPU is: local rank `i` has the GPU that CUDA calls `i`, whatever `CUDA_VISIBLE_DEVICES` and
//! `CUDA_DEVICE_ORDER` say, and `--virtual-local-rank` gives it that one too. Where GPUs are fewer than workers, or
//! their place is not known, workers are spread over the nodes evenly, neighbours together. Only cores of this
//! process's affinity mask count.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use ddp_launcher::CoreSet;
use ddp_proto::words::counted;

use super::topology::{Core, Topology};

/// `--numa-binding`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// The cores of one NUMA node.
    Node,
    /// The cores of one processor package.
    Socket,
    /// A share of one NUMA node's physical cores.
    Exclusive,
    /// The cores of one last-level cache.
    CoreComplex,
}

/// The cores of each worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// By local rank.
    pub cores: Vec<CoreSet>,
    /// A message, if a worker may be far from its GPU.
    pub doubt: Option<String>,
}

/// Binds `workers` workers, or says why that cannot be.
pub fn bind(binding: Binding, workers: u32, topology: &Topology) -> Result<Bound, String> {
    let domains = domains(binding, topology);
    if domains.is_empty() {
        return Err("the kernel does not report which cores may be used".to_owned());
    }
    let (homes, doubt) = homes(workers as usize, &domains, topology);
    let share = |worker: usize| {
        let domain = &domains[homes[worker]];
        let neighbours: Vec<usize> = (0..homes.len()).filter(|w| homes[*w] == homes[worker]).collect();
        let place = Place {
            index: neighbours.partition_point(|w| *w < worker),
            of: neighbours.len(),
        };
        match binding {
            Binding::Node | Binding::Socket => Ok(CoreSet(domain.keys().copied().collect())),
            Binding::Exclusive => exclusive(domain, place),
            Binding::CoreComplex => Ok(complex(domain, place)),
        }
    };
    let cores = (0..homes.len()).map(share).collect::<Result<_, _>>()?;
    Ok(Bound { cores, doubt })
}

/// Cores of one NUMA node or socket.
type Domain = BTreeMap<usize, Core>;

/// One of the workers of a domain.
#[derive(Clone, Copy)]
struct Place {
    index: usize,
    of: usize,
}

fn domains(binding: Binding, topology: &Topology) -> Vec<Domain> {
    let key = |core: &Core| match binding {
        Binding::Socket => core.socket,
        Binding::Node | Binding::Exclusive | Binding::CoreComplex => core.node,
    };
    let mut domains: BTreeMap<usize, Domain> = BTreeMap::new();
    for (number, core) in &topology.cores {
        domains.entry(key(core)).or_default().insert(*number, *core);
    }
    domains.into_values().collect()
}

/// The domain of each worker, and what is doubtful about it.
fn homes(workers: usize, domains: &[Domain], topology: &Topology) -> (Vec<usize>, Option<String>) {
    let evenly = |worker: usize| worker * domains.len() / workers;
    let spread = (0..workers).map(evenly).collect();
    let gpus = &topology.gpus;
    if gpus.is_empty() || domains.len() == 1 {
        return (spread, None);
    }
    if gpus.len() < workers {
        let doubt = format!(
            "the driver reports {} for {workers} workers, so the workers are spread evenly over the machine",
            counted(gpus.len(), "GPU")
        );
        return (spread, Some(doubt));
    }
    let with_node = |node: usize| {
        let holds = |domain: &Domain| domain.values().any(|core| core.node == node);
        domains.iter().position(holds)
    };
    let mut doubt = None;
    let by_gpu = |worker: usize| {
        let node = gpus[worker];
        node.and_then(with_node).unwrap_or_else(|| {
            let why = match node {
                None => "the machine does not report its location".to_owned(),
                Some(node) => format!("none of the cores of its NUMA node {node} may be used"),
            };
            doubt.get_or_insert(format!("local rank {worker} may be far from GPU {worker}: {why}"));
            evenly(worker)
        })
    };
    ((0..workers).map(by_gpu).collect(), doubt)
}

/// Physical cores in equal parts, the first workers with one more where they are not a multiple.
fn exclusive(domain: &Domain, place: Place) -> Result<CoreSet, String> {
    let physical = grouped(domain, |core| core.physical);
    let (each, over) = (physical.len() / place.of, physical.len() % place.of);
    if each == 0 {
        let node = domain.values().next().map_or(0, |core| core.node);
        return Err(format!(
            "`exclusive` needs a physical core for each worker, but NUMA node {node} has {} for {} workers",
            physical.len(),
            place.of
        ));
    }
    let first = place.index * each + place.index.min(over);
    let count = each + usize::from(place.index < over);
    Ok(CoreSet(
        physical.into_iter().skip(first).take(count).flatten().collect(),
    ))
}

/// Complexes with the most usable cores first; workers beyond their number begin again.
fn complex(domain: &Domain, place: Place) -> CoreSet {
    let mut complexes = grouped(domain, |core| core.complex);
    complexes.sort_by_key(|cores| Reverse(cores.len()));
    let own = place.index % complexes.len();
    CoreSet(complexes.swap_remove(own))
}

/// Numbers of the cores that have `key` in common, in order of the key.
fn grouped(domain: &Domain, key: impl Fn(&Core) -> usize) -> Vec<BTreeSet<usize>> {
    let mut groups: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for (number, core) in domain {
        groups.entry(key(core)).or_default().insert(*number);
    }
    groups.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sockets of two nodes each, a node of four physical cores with two hyperthreads: 0 to 3 and 16 to 19 are the
    /// first node. Two physical cores share a last-level cache.
    fn machine() -> Topology {
        let place = |number: usize| Core {
            node: number % 16 / 4,
            socket: number % 16 / 8,
            physical: number % 16,
            complex: number % 16 / 2 * 2,
        };
        Topology {
            cores: (0..32).map(|number| (number, place(number))).collect(),
            gpus: Vec::new(),
        }
    }

    fn with_gpus(gpus: &[Option<usize>]) -> Topology {
        Topology {
            gpus: gpus.to_vec(),
            ..machine()
        }
    }

    /// As `taskset` narrows it.
    fn within(cores: &[usize]) -> Topology {
        let mut topology = machine();
        topology.cores.retain(|number, _| cores.contains(number));
        topology
    }

    fn bound(binding: Binding, workers: u32, topology: &Topology) -> Vec<Vec<usize>> {
        let bound = bind(binding, workers, topology).unwrap();
        assert_eq!(bound.doubt, None);
        let numbers = |CoreSet(cores): CoreSet| cores.into_iter().collect();
        bound.cores.into_iter().map(numbers).collect()
    }

    fn doubt(workers: u32, topology: &Topology) -> String {
        bind(Binding::Node, workers, topology).unwrap().doubt.unwrap()
    }

    #[test]
    fn workers_without_gpus_are_spread_evenly() {
        let cores = bound(Binding::Node, 8, &machine());
        assert_eq!(cores[1], [0, 1, 2, 3, 16, 17, 18, 19]);
        assert_eq!(cores[2], [4, 5, 6, 7, 20, 21, 22, 23]);
        let cores = bound(Binding::Socket, 2, &machine());
        assert_eq!(cores[1], (8..16).chain(24..32).collect::<Vec<_>>());
    }

    #[test]
    fn a_worker_goes_where_its_gpu_is() {
        let topology = with_gpus(&[Some(3), Some(0), Some(3)]);
        let cores = bound(Binding::Node, 2, &topology);
        assert_eq!((cores[0][0], cores[1][0]), (12, 0));
        let cores = bound(Binding::Socket, 2, &topology);
        assert_eq!(
            cores[0],
            (8..16).chain(24..32).collect::<Vec<_>>(),
            "both nodes of the socket"
        );
        assert_eq!(cores[1][..8], [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn hyperthreads_of_a_physical_core_stay_together() {
        let topology = with_gpus(&[Some(1), Some(1), Some(1)]);
        assert_eq!(
            bound(Binding::Exclusive, 3, &topology),
            [vec![4, 5, 20, 21], vec![6, 22], vec![7, 23]]
        );
        let narrow = within(&[0, 1, 16, 18]);
        assert_eq!(
            bound(Binding::Exclusive, 3, &narrow),
            [vec![0, 16], vec![1], vec![18]]
        );
        let error = bind(Binding::Exclusive, 4, &narrow).unwrap_err();
        assert!(error.contains("NUMA node 0 has 3 for 4 workers"), "{error}");
    }

    #[test]
    fn a_core_complex_is_a_workers_own_while_there_are_enough() {
        let topology = with_gpus(&[Some(2); 3]);
        let (first, second) = (vec![8, 9, 24, 25], vec![10, 11, 26, 27]);
        assert_eq!(
            bound(Binding::CoreComplex, 3, &topology),
            [first.clone(), second, first]
        );
        assert_eq!(
            bound(Binding::CoreComplex, 1, &within(&[0, 2, 3])),
            [vec![2, 3]],
            "the one with more usable cores first"
        );
    }

    #[test]
    fn what_keeps_a_worker_from_its_gpu_is_said() {
        assert!(doubt(2, &with_gpus(&[Some(0)])).contains("1 GPU for 2 workers"));
        let unknown = doubt(2, &with_gpus(&[Some(0), None]));
        assert!(
            unknown.contains("far from GPU 1: the machine does not report"),
            "{unknown}"
        );
        let forbidden = Topology {
            gpus: vec![Some(2)],
            ..within(&[0, 4])
        };
        let forbidden = doubt(1, &forbidden);
        assert!(
            forbidden.contains("none of the cores of its NUMA node 2 may be used"),
            "{forbidden}"
        );
        let one_node = Topology {
            gpus: vec![None],
            ..within(&[0])
        };
        assert_eq!(
            bound(Binding::Node, 1, &one_node),
            [vec![0]],
            "no choice, no doubt"
        );
    }

    #[test]
    fn without_a_core_there_is_nothing_to_bind_to() {
        assert!(bind(Binding::Node, 1, &Topology::default()).is_err());
    }
}
