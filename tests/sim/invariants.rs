//! What must be true after every event, whatever happened before.

use std::collections::{BTreeMap, BTreeSet};

use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{Assignment, DaemonMessage, Failures};

/// Watches every word of the daemon.
#[derive(Debug, Default)]
pub(crate) struct Witness {
    /// The assignment of each generation, without the node rank.
    assignments: BTreeMap<u64, Assignment>,
    /// Who has which node rank in which generation.
    ranks: BTreeMap<(u64, u32), String>,
    /// Generations whose end was announced.
    over: BTreeSet<u64>,
    /// Words about the end of each generation.
    causes: BTreeMap<u64, String>,
    /// Number of the run: the job's name is used again when a late node comes after all others have left.
    run: u32,
    /// Run that each agent was in first, and the exit code that `JobOver` gave to each run.
    run_of: BTreeMap<String, u32>,
    exit_codes: BTreeMap<u32, i32>,
    /// The last word on each run: all nodes receive the same.
    last_words: BTreeMap<u32, Failures>,
    last_generation: u64,
    /// All that were ever started.
    generations: BTreeSet<u64>,
}

impl Witness {
    /// Checks a message of the daemon to the agent `to`.
    pub(crate) fn receive(&mut self, to: &str, message: &DaemonMessage) {
        let generation = message.generation;
        let run = *self.run_of.entry(to.to_owned()).or_insert(self.run);
        match message
            .body
            .as_ref()
            .expect("the daemon never sends an empty message")
        {
            Reply::Assignment(assignment) => self.assignment(to, generation, assignment),
            Reply::GenerationOver(over) => {
                assert!(!over.cause.is_empty());
                assert!(
                    over.restart_count <= over.max_restarts,
                    "the restart budget is overdrawn: {over:?}"
                );
                if self
                    .ranks
                    .iter()
                    .any(|((g, _), who)| *g == generation && who == to)
                {
                    self.over.insert(generation);
                }
                if over.first_failure.is_some() {
                    let first = self
                        .causes
                        .entry(generation)
                        .or_insert_with(|| over.cause.clone());
                    assert_eq!(
                        *first, over.cause,
                        "two first failures in generation {generation}"
                    );
                }
            }
            Reply::JobOver(over) => {
                assert!(!over.reason.is_empty());
                let code = *self.exit_codes.entry(run).or_insert(over.exit_code);
                assert_eq!(code, over.exit_code, "exit codes differ");
                if over.exit_code == 0 {
                    assert_eq!(over.first_failure, None);
                    assert_eq!((&over.failures, over.last_word_ms), (&None, 0));
                }
                if over.first_failure.is_some() {
                    assert!(over.failures.is_some(), "the first failure is not in the list");
                }
            }
            Reply::LastWord(failures) => {
                let first = self.last_words.entry(run).or_insert_with(|| failures.clone());
                assert_eq!(first, failures, "two last words");
            }
            Reply::Refused(refused) => assert!(!refused.reason.is_empty()),
            Reply::Waiting(waiting) => {
                assert!(!waiting.reason.is_empty());
                assert!(waiting.lease_ms > 0);
            }
            Reply::HeartbeatAck(_) => {}
        }
    }

    fn assignment(&mut self, to: &str, generation: u64, assignment: &Assignment) {
        assert!(
            generation >= self.last_generation,
            "generation {generation} after {}",
            self.last_generation
        );
        assert!(
            !self.over.contains(&generation),
            "generation {generation} is over, `{to}` was assigned to it"
        );
        if generation > self.last_generation {
            self.last_generation = generation;
            self.generations.insert(generation);
            check_ranks(assignment);
        }
        let common = Assignment {
            node_rank: 0,
            ..assignment.clone()
        };
        let first = self
            .assignments
            .entry(generation)
            .or_insert_with(|| common.clone());
        assert_eq!(*first, common, "two assignments in generation {generation}");

        let rank = assignment.node_rank;
        assert!((rank as usize) < assignment.nodes.len());
        let holder = self
            .ranks
            .entry((generation, rank))
            .or_insert_with(|| to.to_owned());
        assert_eq!(
            holder, to,
            "node rank {rank} of generation {generation} was given twice"
        );
        let places = self
            .ranks
            .iter()
            .filter(|((g, _), who)| *g == generation && *who == to)
            .count();
        assert_eq!(places, 1, "`{to}` has {places} ranks in generation {generation}");
    }

    /// No node of the run is left.
    pub(crate) fn idle(&mut self) {
        self.run += 1;
    }

    /// Another daemon takes the place of one that died, and with it what that one had said, which may not have arrived.
    /// What it had decided for good, those in `undecided` may never learn: it is another run that they are in then.
    pub(crate) fn daemon_died(&mut self, undecided: &[String]) {
        self.assignments.clear();
        self.ranks.clear();
        self.over.clear();
        self.causes.clear();
        self.last_generation = 0;
        if self.exit_codes.contains_key(&self.run) {
            self.run += 1;
            for incarnation in undecided {
                self.run_of.remove(incarnation);
            }
        }
    }

    /// Exit code of the run that the agent was in; none if it did not end with `JobOver`.
    pub(crate) fn verdict(&self, incarnation: &str) -> Option<i32> {
        self.exit_codes.get(self.run_of.get(incarnation)?).copied()
    }

    /// Generations that were started.
    pub(crate) fn generations(&self) -> u64 {
        self.generations.len() as u64
    }
}

/// Ranks are dense and unique, and the master is node 0.
fn check_ranks(assignment: &Assignment) {
    let mut next = 0;
    for node in &assignment.nodes {
        assert_eq!(node.first_rank, next, "ranks are not dense: {assignment:?}");
        assert!(node.workers > 0);
        next += node.workers;
    }
    assert!(next > 0);
    assert!(assignment.restart_count <= assignment.max_restarts);
    assert!(assignment.master_port > 0);
    let master = if assignment.nodes.len() == 1 {
        "127.0.0.1"
    } else {
        &assignment.nodes[0].addr
    };
    assert_eq!(assignment.master_addr, master);
}
