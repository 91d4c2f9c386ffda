//! A witness outside of all daemons and agents: it sees which workers live, what the store gave them, and how each
//! launcher ended. It forgets nothing, whoever dies.

use std::collections::{BTreeMap, BTreeSet};

use ddp_proto::rendezvous::{Assignment, GenerationOver};

use crate::words::Words;

/// Whether assignments have ids of their own that daemons and agents compare. While they have none, a daemon that lost
/// its state can give the same generation again, and [`Witness::breaches`] only counts.
pub(crate) const IS_FENCED: bool = false;

/// Names one assignment, as far as the protocol can tell two of them apart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct AssignmentId(String);

impl AssignmentId {
    /// The one place to change when an assignment has an id of its own.
    pub(crate) fn of(job: &str, generation: u64, _assignment: &Assignment) -> Self {
        Self(format!("generation {generation} of `{job}`"))
    }
}

/// One assignment as it was really made: two daemons that do not know of each other may give one run the same
/// generation, but not to the same hosts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Origin {
    pub(crate) job: String,
    pub(crate) run_token: String,
    pub(crate) generation: u64,
    /// In order of node rank.
    pub(crate) hosts: String,
}

/// Sees everything.
#[derive(Debug, Default)]
pub(crate) struct Witness {
    words: BTreeMap<(usize, String), Words>,
    /// Living workers, by what they hold.
    holders: BTreeMap<(AssignmentId, u32), BTreeSet<u64>>,
    /// What the store has accepted or given, which may not change.
    registers: BTreeMap<(Origin, String), Vec<u8>>,
    /// Verdicts of each run.
    verdicts: BTreeMap<String, BTreeSet<i32>>,
    /// Verdicts that a daemon has sent to a node.
    owed: BTreeMap<String, (usize, i32)>,
    /// Generations after whose end a restart was spent, by node and run.
    spent: BTreeMap<(String, String), BTreeSet<u64>>,
    generations: BTreeSet<(String, String, u64)>,
    /// Two living holders of one place, or a value from another assignment.
    pub(crate) breaches: Vec<String>,
}

impl Witness {
    /// What the daemon with this number says to a job.
    pub(crate) fn words(&mut self, daemon: usize, job: &str) -> &mut Words {
        self.words.entry((daemon, job.to_owned())).or_default()
    }

    /// A worker begins to live.
    pub(crate) fn born(&mut self, worker: u64, origin: &Origin, id: &AssignmentId, rank: u32) {
        let (job, run) = (origin.job.clone(), origin.run_token.clone());
        self.generations.insert((job, run, origin.generation));
        let holders = self.holders.entry((id.clone(), rank)).or_default();
        holders.insert(worker);
        if holders.len() > 1 {
            let count = holders.len();
            self.breaches
                .push(format!("{count} living workers are rank {rank} of {}", id.0));
        }
    }

    /// A worker is gone.
    pub(crate) fn died(&mut self, worker: u64, id: &AssignmentId, rank: u32) {
        if let Some(holders) = self.holders.get_mut(&(id.clone(), rank)) {
            holders.remove(&worker);
        }
    }

    /// The store has taken a value, or has given it: `writer` made it, for `reader`.
    pub(crate) fn register(&mut self, reader: &Origin, writer: &Origin, key: &str, value: &[u8]) {
        if reader != writer {
            self.breaches
                .push(format!("`{key}` of {reader:?} has a value of {writer:?}"));
            return;
        }
        let place = (reader.clone(), key.to_owned());
        let first = self.registers.entry(place).or_insert_with(|| value.to_vec());
        assert_eq!(first, value, "`{key}` has changed in {reader:?}");
    }

    /// The store refuses a value, because another one is there; only this node writes the key.
    pub(crate) fn conflict(&mut self, writer: &Origin, key: &str) {
        self.breaches
            .push(format!("`{key}` of {writer:?} was written by another node"));
    }

    /// A daemon sends the end of the job to a node.
    pub(crate) fn verdict(&mut self, daemon: usize, to: &str, run_token: &str, code: i32) {
        self.owed.insert(to.to_owned(), (daemon, code));
        if !run_token.is_empty() {
            let codes = self.verdicts.entry(run_token.to_owned()).or_default();
            codes.insert(code);
        }
    }

    /// The verdict that a daemon has sent to this node last.
    pub(crate) fn owed(&self, to: &str) -> Option<(usize, i32)> {
        self.owed.get(to).copied()
    }

    /// A node learns that its generation is over; without progress, its restarts are never more than allowed, whichever
    /// daemons count them.
    pub(crate) fn over(&mut self, node: &str, run_token: &str, generation: u64, over: &GenerationOver) {
        if over.membership {
            return;
        }
        let key = (node.to_owned(), run_token.to_owned());
        let spent = self.spent.entry(key).or_default();
        spent.insert(generation);
        assert!(
            spent.len() <= over.max_restarts as usize,
            "`{node}` was restarted after generations {spent:?}, {} times at most",
            over.max_restarts
        );
    }

    /// Runs that were told two different exit codes, by daemons that did not know of each other.
    pub(crate) fn changed_verdicts(&self) -> u64 {
        self.verdicts.values().filter(|codes| codes.len() > 1).count() as u64
    }

    /// Generations of which a worker has lived.
    pub(crate) fn generations(&self) -> u64 {
        self.generations.len() as u64
    }
}
