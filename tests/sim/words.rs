//! What must be true of all that one daemon says to the nodes of one job.

use std::collections::{BTreeMap, BTreeSet};

use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{Assignment, DaemonMessage, Failures, GenerationOver, JobOver};

/// Watches every word of a daemon to one job.
#[derive(Debug, Default)]
pub(crate) struct Words {
    /// The assignment of each generation, without the node rank.
    assignments: BTreeMap<u64, Assignment>,
    /// The first rank of each node, and the one after the last.
    first_ranks: BTreeMap<(u64, u32), u32>,
    /// Who has which node rank in which generation.
    ranks: BTreeMap<(u64, u32), String>,
    /// Generations whose end was announced.
    over: BTreeSet<u64>,
    /// Words about the end of each generation.
    causes: BTreeMap<u64, String>,
    /// The run that each node is in, by its token: the job's name is used again when all nodes have left.
    run_of: BTreeMap<String, String>,
    exit_codes: BTreeMap<String, i32>,
    /// The failures that the verdict on each run tells: all nodes receive the same.
    failures: BTreeMap<String, Option<Failures>>,
    last_generation: u64,
}

impl Words {
    /// Notes that a node says which run it is in. One that has read no assignment says nothing: it may have been lost
    /// since, and is in no run until it is assigned to one.
    pub(crate) fn joins(&mut self, from: &str, run_token: &str) {
        if run_token.is_empty() {
            self.run_of.remove(from);
        } else {
            self.run_of.insert(from.to_owned(), run_token.to_owned());
        }
    }

    /// Another daemon goes on with the ledger, and knows the runs that were assigned here. Of a run that nodes of another
    /// daemon brought along, it knows the end for those nodes only.
    pub(crate) fn inherit(&mut self) {
        let assigned: BTreeSet<&String> = self.assignments.values().map(|a| &a.run_token).collect();
        self.exit_codes.retain(|run, _| assigned.contains(run));
        self.failures.clear();
    }

    /// Checks a message to the node `to`.
    pub(crate) fn says(&mut self, to: &str, message: &DaemonMessage) {
        let body = message.body.as_ref();
        match body.expect("the daemon never sends an empty message") {
            Reply::Assignment(assignment) => self.assignment(to, message.generation, assignment),
            Reply::GenerationOver(over) => self.generation_over(to, message.generation, over),
            Reply::JobOver(over) => self.job_over(to, over),
            Reply::Refused(refused) => assert!(!refused.reason.is_empty()),
            Reply::HangVerdict(_) => {}
            Reply::Heard(heard) => assert!(heard.sent_ms > 0),
            Reply::Waiting(waiting) => {
                assert!(!waiting.reason.is_empty());
                assert!(waiting.lease_ms > 0);
            }
        }
    }

    fn generation_over(&mut self, to: &str, generation: u64, over: &GenerationOver) {
        assert!(!over.cause.is_empty());
        assert!(
            over.restart_count <= over.max_restarts,
            "the restart budget is overdrawn: {over:?}"
        );
        let is_member = |((g, _), who): (&(u64, u32), &String)| *g == generation && who == to;
        if self.ranks.iter().any(is_member) {
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

    fn job_over(&mut self, to: &str, over: &JobOver) {
        assert!(!over.reason.is_empty());
        if let Some(run) = self.run_of.get(to) {
            let code = *self.exit_codes.entry(run.clone()).or_insert(over.exit_code);
            assert_eq!(code, over.exit_code, "exit codes differ");
            // A ledger keeps the verdict without the list.
            if over.failures.is_some() {
                let told = self.failures.entry(run.clone());
                let first = told.or_insert_with(|| over.failures.clone());
                assert_eq!(*first, over.failures, "two lists of failures");
            }
        }
        if over.exit_code == 0 {
            assert_eq!(over.first_failure, None);
            assert_eq!(over.failures, None);
        }
        if over.first_failure.is_some() {
            assert!(over.failures.is_some(), "the first failure is not in the list");
        }
    }

    fn assignment(&mut self, to: &str, generation: u64, assignment: &Assignment) {
        self.joins(to, &assignment.run_token);
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
            // A daemon counts by one. These nodes come from another one that began generations in between: that life of the
            // run is not the one on which this daemon has given its verdict.
            if generation > self.last_generation + 1 {
                self.exit_codes.remove(&assignment.run_token);
                self.failures.remove(&assignment.run_token);
            }
            self.last_generation = generation;
            assert!(assignment.restart_count <= assignment.max_restarts);
            assert!(assignment.master_port > 0);
        }
        self.check_ranks(generation, assignment);
        let common = Assignment {
            node_rank: 0,
            own: None,
            role_first_rank: 0,
            role_world_size: 0,
            ..assignment.clone()
        };
        let first = self
            .assignments
            .entry(generation)
            .or_insert_with(|| common.clone());
        assert_eq!(*first, common, "two assignments in generation {generation}");

        let rank = assignment.node_rank;
        assert!(rank < assignment.node_count);
        let holder = self
            .ranks
            .entry((generation, rank))
            .or_insert_with(|| to.to_owned());
        assert_eq!(
            holder, to,
            "node rank {rank} of generation {generation} was given twice"
        );
        let all = self.ranks.range((generation, 0)..=(generation, u32::MAX));
        let places = all.filter(|(_, who)| *who == to).count();
        assert_eq!(places, 1, "`{to}` has {places} ranks in generation {generation}");
    }

    /// Ranks are dense and unique, and the master is node 0.
    fn check_ranks(&mut self, generation: u64, assignment: &Assignment) {
        let rank = assignment.node_rank;
        let own = assignment.own.as_ref().expect("an assignment names its node");
        assert!(own.workers > 0);
        let ends = [(0, 0), (assignment.node_count, assignment.world_size)];
        let own_ends = [(rank, own.first_rank), (rank + 1, own.first_rank + own.workers)];
        for (node, first_rank) in ends.into_iter().chain(own_ends) {
            let known = self.first_ranks.entry((generation, node)).or_insert(first_rank);
            assert_eq!(*known, first_rank, "ranks are not dense: {assignment:?}");
        }
        if assignment.node_count == 1 {
            assert_eq!(assignment.master_addr, "127.0.0.1");
        } else if rank == 0 {
            assert_eq!(assignment.master_addr, own.addr);
        }
    }
}
