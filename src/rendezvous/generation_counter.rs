//! The numbers and assignment ids of a job's generations. No daemon uses a number twice.

use ddp_proto::rendezvous::Assignment;

use super::context::ApplyContext;
use super::event::{Record, Stage};

/// The highest attempt number that the daemon accepts from a node.
const MAX_ATTEMPT: u32 = 1 << 20;

/// Number of different run tokens.
const TOKENS: f64 = (1_u64 << 53) as f64;

/// Counts the generations of one job.
#[derive(Debug, Default)]
pub(super) struct GenerationCounter {
    /// Last generation that was assigned; 0: none yet.
    generation: u64,
    /// Random id of its assignment.
    assignment_id: String,
    /// Last generation of a run or a daemon before this one.
    floor: u64,
    /// Generations up to this one of an earlier run or daemon are over for certain: none of them is taken up again.
    highest_ended: u64,
    /// Number of the next generation's log files: generations of this run that ended, and those of earlier runs that
    /// left files.
    attempts: u32,
    /// Random name of this run, from its first assignment on.
    run_token: String,
}

impl GenerationCounter {
    /// For a run whose generations are numbered after `floor`.
    pub(super) fn after(floor: u64) -> Self {
        Self {
            floor,
            highest_ended: floor,
            ..Self::default()
        }
    }

    /// Continues from the record of an earlier daemon.
    pub(super) fn recalled(record: &Record) -> Self {
        Self {
            highest_ended: record.generation - u64::from(record.stage == Stage::Running),
            attempts: record.attempt,
            run_token: record.run_token.clone(),
            ..Self::after(record.generation)
        }
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// This daemon has assigned a generation, or taken one up.
    pub(super) fn has_begun(&self) -> bool {
        self.generation > 0
    }

    pub(super) fn assignment_id(&self) -> &str {
        &self.assignment_id
    }

    pub(super) fn run_token(&self) -> &str {
        &self.run_token
    }

    pub(super) fn attempts(&self) -> u32 {
        self.attempts
    }

    /// No generation above this one was ever assigned.
    pub(super) fn highest(&self) -> u64 {
        self.generation.max(self.floor)
    }

    /// The generation cannot be taken up: some node knows that it is over.
    pub(super) fn has_ended(&self, generation: u64) -> bool {
        generation <= self.highest_ended
    }

    /// A new generation is assigned. Log files of attempts before `free_attempt` are there already.
    pub(super) fn assign(&mut self, context: &mut ApplyContext<'_>, free_attempt: u32) {
        self.generation = self.highest() + 1;
        self.assignment_id = context.assignment_id();
        if self.run_token.is_empty() {
            self.run_token = format!("{:014x}", (context.at.dice * TOKENS) as u64);
        }
        self.attempts = self.attempts.max(free_attempt.min(MAX_ATTEMPT));
    }

    /// A generation that an earlier daemon has assigned runs here from now on.
    pub(super) fn take_up(&mut self, generation: u64, told: &Assignment) {
        self.generation = generation;
        self.assignment_id.clone_from(&told.assignment_id);
        self.attempts = told.attempt;
        self.run_token.clone_from(&told.run_token);
    }

    /// The running generation has ended, and the next one has log files of its own.
    pub(super) fn end_attempt(&mut self) {
        self.attempts += 1;
    }

    /// An earlier daemon has come so far, in a generation that will not run again.
    pub(super) fn believe_attempt(&mut self, told: &Assignment) {
        self.attempts = told.attempt + 1;
    }

    /// A node knows of this generation of an earlier daemon, in the run of this name if that is known.
    pub(super) fn learn_of(&mut self, generation: u64, run_token: &str) {
        self.floor = self.floor.max(generation);
        if self.run_token.is_empty() && generation > 0 {
            run_token.clone_into(&mut self.run_token);
        }
    }

    /// A generation of an earlier daemon is over.
    pub(super) fn mark_ended(&mut self, generation: u64) {
        self.highest_ended = self.highest_ended.max(generation);
    }

    /// All nodes of the run are gone: the next node begins a new run.
    pub(super) fn forget_run(&mut self) {
        self.attempts = 0;
        self.run_token.clear();
    }
}
