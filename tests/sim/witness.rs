//! A witness outside of all daemons and agents: it sees which workers live, what the store gave them, and how each
//! launcher ended. It forgets nothing when a process dies.

use std::collections::{BTreeMap, BTreeSet};

use ddp_proto::rendezvous::{Assignment, GenerationOver};

use crate::words::Words;

/// Names one assignment, as daemons and agents tell two of them apart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct AssignmentId(String);

impl AssignmentId {
    pub(crate) fn of(assignment: &Assignment) -> Self {
        assert!(!assignment.assignment_id.is_empty(), "{assignment:?}");
        Self::named(&assignment.assignment_id)
    }

    pub(crate) fn named(name: &str) -> Self {
        Self(name.to_owned())
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// One assignment and what it belongs to: two daemons that do not know of each other may count one generation twice.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Origin {
    pub(crate) job: String,
    pub(crate) run_token: String,
    pub(crate) generation: u64,
    pub(crate) id: AssignmentId,
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
    /// Assignments of which a worker has lived, by job and generation.
    assignments: BTreeMap<(String, u64), BTreeSet<AssignmentId>>,
    /// Two living holders of one place, or a value from another assignment.
    pub(crate) breaches: Vec<String>,
    /// Two assignments of one job that could train at the same time.
    pub(crate) overlaps: Vec<String>,
    /// Each assignment with a living worker: what it belongs to, and how many of its ranks live.
    living: BTreeMap<AssignmentId, Living>,
}

/// The living workers of one assignment.
#[derive(Debug)]
struct Living {
    job: String,
    generation: u64,
    ranks: u32,
    world_size: u32,
    /// Others may take the place of a node that is silent for this long.
    is_replaceable: bool,
}

impl Witness {
    /// What this daemon says to a job, with those whose ledger it has.
    pub(crate) fn words(&mut self, daemon: usize, job: &str) -> &mut Words {
        self.words.entry((daemon, job.to_owned())).or_default()
    }

    /// A daemon is started with the ledger of this one.
    pub(crate) fn inherit(&mut self, daemon: usize) {
        let all = self.words.iter_mut().filter(|((first, _), _)| *first == daemon);
        all.for_each(|(_, words)| words.inherit());
    }

    /// A worker begins to live.
    pub(crate) fn born(&mut self, worker: u64, origin: &Origin, rank: u32, assignment: &Assignment) {
        let living = self.living.entry(origin.id.clone()).or_insert_with(|| Living {
            job: origin.job.clone(),
            generation: origin.generation,
            ranks: 0,
            world_size: assignment.world_size,
            is_replaceable: assignment.takeover_ms > 0,
        });
        living.ranks += 1;
        self.find_overlaps(origin, rank);
        let (job, run) = (origin.job.clone(), origin.run_token.clone());
        self.generations.insert((job, run, origin.generation));
        let number = (origin.job.clone(), origin.generation);
        let assignments = self.assignments.entry(number).or_default();
        assignments.insert(origin.id.clone());
        let holders = self.holders.entry((origin.id.clone(), rank)).or_default();
        holders.insert(worker);
        if holders.len() > 1 {
            let count = holders.len();
            self.breaches
                .push(format!("{count} living workers are rank {rank} of {origin:?}"));
        }
    }

    /// A worker is born: the same rank lives in no other assignment. In a job of fixed size without standbys, not all ranks
    /// of an earlier one live, without which none of them makes a step.
    fn find_overlaps(&mut self, origin: &Origin, rank: u32) {
        let Some(own) = self.living.get(&origin.id) else {
            return;
        };
        let others = self.living.iter().filter(|(id, _)| **id != origin.id);
        for (id, other) in others.filter(|(_, other)| other.job == own.job) {
            let holders = self.holders.get(&(id.clone(), rank));
            let holds = holders.is_some_and(|holders| !holders.is_empty());
            let earlier = if other.generation < own.generation {
                other
            } else {
                own
            };
            let trains = earlier.ranks == earlier.world_size;
            if if earlier.is_replaceable { holds } else { trains } {
                let words = format!("rank {rank} of {origin:?} begins while {id:?} lives: {other:?}");
                self.overlaps.push(words);
            }
        }
    }

    /// A worker is gone.
    pub(crate) fn died(&mut self, worker: u64, origin: &Origin, rank: u32) {
        if let Some(living) = self.living.get_mut(&origin.id) {
            living.ranks -= 1;
            if living.ranks == 0 {
                self.living.remove(&origin.id);
            }
        }
        if let Some(holders) = self.holders.get_mut(&(origin.id.clone(), rank)) {
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

    /// Generations that a job has counted twice: the daemons did not know of each other.
    pub(crate) fn counted_twice(&self) -> u64 {
        let all = self.assignments.values();
        all.filter(|assignments| assignments.len() > 1).count() as u64
    }

    /// Generations of which a worker has lived.
    pub(crate) fn generations(&self) -> u64 {
        self.generations.len() as u64
    }
}
