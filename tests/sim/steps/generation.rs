//! The ranks of a generation: what each does next, what it holds, and what they have exchanged.

use std::collections::BTreeMap;

use ddp_worker::mesh::MeshShape;
use ddp_worker::metrics::MetricsLine;
use ddp_worker::train::{Decision, Held, Version};

use super::layout::{BATCH, mix};

/// What a rank does next, in the order of a generation. From [`Action::Save`] the next step begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Action {
    Report,
    Decide,
    Join,
    TakeApart,
    Load,
    /// A buddy receives its copy.
    Refresh,
    Gather,
    FirstBucket,
    LastBucket,
    Norm,
    /// A buddy receives the sums for its copy.
    CopySums,
    Enter,
    Leave,
    Update,
    /// An update that has collectives ends.
    Updated,
    Validate,
    Record,
    Save,
    End,
}

impl Action {
    pub(super) const ALL: [Self; 19] = [
        Self::Report,
        Self::Decide,
        Self::Join,
        Self::TakeApart,
        Self::Load,
        Self::Refresh,
        Self::Gather,
        Self::FirstBucket,
        Self::LastBucket,
        Self::Norm,
        Self::CopySums,
        Self::Enter,
        Self::Leave,
        Self::Update,
        Self::Updated,
        Self::Validate,
        Self::Record,
        Self::Save,
        Self::End,
    ];
}

/// The ranks that take part in a collective.
#[derive(Clone, Copy, Debug)]
pub(super) enum Among {
    All,
    /// Those that sum the gradients of the same part.
    Gradients,
    /// Those that hold one copy of the model.
    Replica,
}

/// The ranks of one generation, and what they have exchanged.
pub(super) struct World {
    pub(super) generation: u64,
    pub(super) mesh: MeshShape,
    /// By rank.
    pub(super) processes: Vec<usize>,
    pub(super) exchanged: BTreeMap<(u64, Action), Vec<Option<u64>>>,
    #[expect(
        clippy::option_option,
        reason = "not yet reported, or reported that nothing is held"
    )]
    pub(super) reports: Vec<Option<Option<Held>>>,
    /// The latest checkpoint, once rank 0 has looked.
    pub(super) latest: Option<u64>,
    pub(super) decision: Option<Decision>,
    /// State on its way to each rank.
    pub(super) sent: Vec<Option<State>>,
    /// The generation is over, which its ranks learn one by one.
    pub(super) is_over: bool,
}

/// The state of a part.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct State {
    pub(super) chain: u64,
    /// Data-parallel ranks in each step.
    pub(super) history: Vec<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Life {
    Runs,
    Parked,
    Ended,
}

/// A worker process.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(super) struct Process {
    pub(super) life: Life,
    /// It does not learn that its generation is over.
    pub(super) is_cut_off: bool,
    pub(super) world: usize,
    pub(super) rank: usize,
    pub(super) next: Action,
    /// `None`: nothing whole.
    pub(super) held: Option<Held>,
    pub(super) state: State,
    /// That of the rank whose buddy this one is, as far as [`Held::copy_of`] says so.
    pub(super) copy: State,
    /// What this rank contributes to the sums of the step, the sums, the ranks that they are of.
    pub(super) contribution: u64,
    pub(super) sums: u64,
    /// The sums for the copy.
    pub(super) copy_sums: u64,
    pub(super) of_ranks: u64,
    /// Whether the numbers of all ranks in this step are finite.
    pub(super) is_finite: bool,
    /// What is due after the step.
    pub(super) validates: bool,
    pub(super) saves: bool,
    /// The save that this rank 0 is to complete.
    pub(super) saving: Option<u64>,
    /// The last generation for which it gave up what it had kept.
    pub(super) trained_in: u64,
}

pub(super) struct Checkpoint {
    pub(super) held: Held,
    pub(super) states: Vec<State>,
}

impl Process {
    pub(super) fn new() -> Self {
        Self {
            life: Life::Runs,
            is_cut_off: false,
            world: 0,
            rank: 0,
            next: Action::Report,
            held: None,
            state: State::default(),
            copy: State::default(),
            contribution: 0,
            sums: 0,
            copy_sums: 0,
            of_ranks: 0,
            is_finite: true,
            validates: false,
            saves: false,
            saving: None,
            trained_in: 0,
        }
    }

    /// Ends a step with an update, unless a number of some rank is not finite.
    pub(super) fn update(&mut self, version: Version) {
        let Some(held) = &mut self.held else { return };
        let step = held.version.step;
        held.updates += u64::from(self.is_finite);
        self.finish(step, self.is_finite);
        let Some(held) = &mut self.held else { return };
        held.samples += self.of_ranks * BATCH;
        (held.version, held.unfinished) = (version, None);
        held.line = Some(MetricsLine {
            step: version.step,
            ..MetricsLine::default()
        });
    }

    /// The state and the copy after `step`, which updates them if it counts.
    pub(super) fn finish(&mut self, step: u64, counts: bool) {
        for (state, sums) in [(&mut self.state, self.sums), (&mut self.copy, self.copy_sums)] {
            if counts {
                state.chain = mix(state.chain, mix(sums, step));
            }
            state.history.push(self.of_ranks);
        }
    }
}
