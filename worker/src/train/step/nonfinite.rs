//! Steps whose numbers are not finite: what to do, and which rank saw it first.
//!
//! What to do is decided alike on all ranks, since all see the same numbers. Then the passes of the step run once more on
//! every rank, looking at what each block makes, to say which rank saw it first, in which micro-batch and block. First is
//! what comes first in the order in which a rank executes a step, which is the same on all of them, not what a clock says.
//!
//! This costs the time of a step and, at a time, memory for the gradients of one block and of what it is tied to. Every
//! rank passes through all blocks, finite or not: under ZeRO-3 a pass is a collective one.

use std::cell::RefCell;
use std::collections::HashMap;

use crate::config::OnNonFinite;
use crate::data::Loader;
use crate::device::{ArenaSpec, Buffer, DType, DeviceError, Event};
use crate::model::{Activation, GradSink, GradSlot, Hooks, Model, ParamId, Pass, SampleKey};
use crate::parallel::pipeline::Action;
use crate::train::TrainError;
use crate::train::rank_table::RankTable;
use crate::train::replica::{MicroBatch, Replica};
use crate::train::row_state::RowPurpose;
use crate::train::run_row::{RowCaller, run_row};
use crate::train::world::World;

/// Steps that were skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Skips {
    policy: OnNonFinite,
    /// Most in a row.
    limit: u64,
    in_a_row: u64,
    total: u64,
}

/// What becomes of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The step counts.
    Keep,
    /// The step was without effect. `is_first`: the one before was not.
    Skip {
        /// See above.
        is_first: bool,
    },
    /// Training ends, after so many skipped steps in a row.
    Stop {
        /// See above.
        skipped: u64,
    },
}

impl Skips {
    pub(crate) fn new(policy: OnNonFinite, limit: u64) -> Self {
        Self {
            policy,
            limit,
            in_a_row: 0,
            total: 0,
        }
    }

    /// What becomes of the next step.
    pub(crate) fn judge(&mut self, is_finite: bool) -> Decision {
        if is_finite {
            self.in_a_row = 0;
            return Decision::Keep;
        }
        if self.policy == OnNonFinite::Stop || self.in_a_row == self.limit {
            return Decision::Stop {
                skipped: self.in_a_row,
            };
        }
        self.in_a_row += 1;
        self.total += 1;
        Decision::Skip {
            is_first: self.in_a_row == 1,
        }
    }

    /// Whether the last step was skipped.
    pub(super) fn is_skipping(&self) -> bool {
        self.in_a_row > 0
    }

    /// Since this life of the run began.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }
}

/// The passes of a step once more.
pub(super) struct Inspection<'a> {
    pub(super) replica: &'a mut Replica,
    /// The model of which this rank may hold a part.
    pub(super) whole: &'a Model,
    pub(super) loader: &'a Loader,
    pub(super) rank_table: &'a RankTable,
    pub(super) step: u64,
    /// The samples of each micro-batch.
    pub(super) keys: Vec<SampleKey>,
}

impl Inspection<'_> {
    /// Which rank saw a number that is not finite first, and where, in words: the same ones on all ranks. Every rank must
    /// call it.
    pub(super) fn run(mut self) -> Result<String, TrainError> {
        let places = places(self.whole.blocks.len(), self.whole.params.len());
        let found = self.search(&places)?;
        let own = found.map_or(NONE, |(m, code)| [m as f64, code as f64]);
        let first_seen = self.rank_table.gather("what is not finite", own)?;
        Ok(match first_of(&first_seen) {
            Some((rank, [m, code])) => {
                let words = places[code as usize].words(self.whole);
                format!("first seen on rank {rank}: {words}, micro-batch {m}")
            }
            None => {
                "no rank can reproduce it alone: the sum over the ranks is too large, or a machine is faulty"
                    .into()
            }
        })
    }

    /// The first micro-batch, and in it the first of `places` by its index, with a number that is not finite on this rank.
    fn search(&mut self, places: &[Location]) -> Result<Option<(usize, usize)>, TrainError> {
        let world = self.replica.world.clone();
        let model = self.replica.model.clone();
        let seen = RefCell::new(Seen {
            world: &world,
            places,
            blocks: in_whole(&model, self.whole),
            at: (0, 0),
            first: None,
        });
        let mut row = InspectionRow {
            loader: self.loader,
            step: self.step,
            keys: &self.keys,
            hooks: LookingHooks { seen: &seen },
            sink: LookingSink {
                model: &model,
                memory: HashMap::new(),
                seen: &seen,
            },
        };
        run_row(self.replica, RowPurpose::Inspection, self.keys.len(), &mut row)?;
        let first = seen.borrow().first;
        Ok(first)
    }
}

struct InspectionRow<'a> {
    loader: &'a Loader,
    step: u64,
    keys: &'a [SampleKey],
    hooks: LookingHooks<'a>,
    sink: LookingSink<'a>,
}

impl RowCaller for InspectionRow<'_> {
    fn before(&mut self, _replica: &Replica, action: Action) -> Result<(), TrainError> {
        self.hooks.seen.borrow_mut().at.0 = action.micro_batch;
        Ok(())
    }

    fn read(&mut self, _replica: &Replica, action: Action, batch: &mut MicroBatch) -> Result<(), TrainError> {
        let MicroBatch { inputs, targets } = batch;
        self.loader
            .fill(self.step, action.micro_batch as u64, inputs, targets)?;
        Ok(())
    }

    fn samples(&self, micro_batch: usize) -> SampleKey {
        self.keys[micro_batch]
    }

    fn sinks(&mut self) -> (&mut dyn Hooks, &mut dyn GradSink) {
        (&mut self.hooks, &mut self.sink)
    }
}

/// By block that a rank holds: its number in the whole model.
fn in_whole(model: &Model, whole: &Model) -> Vec<usize> {
    let number = |name: &str| whole.blocks.iter().position(|block| block.name() == name);
    let held = model.blocks.iter().map(|block| number(block.name()));
    held.map(|number| number.expect("the whole model has every block"))
        .collect()
}

/// Where a number was not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Location {
    /// In the output of a block. Blocks and parameters are those of the whole model.
    Output(usize),
    /// In a block's gradient of a parameter.
    Gradient(usize, ParamId),
    /// In a block's gradient of its input.
    InputGradient(usize),
}

/// All of them, in the order in which a micro-batch comes through: forward over the blocks, then backward from the last
/// one; there a block's parameters from the last one, then its input.
fn places(blocks: usize, params: usize) -> Vec<Location> {
    let backward = (0..blocks).rev().flat_map(|block| {
        let params = (0..params)
            .rev()
            .map(move |id| Location::Gradient(block, ParamId(id)));
        params.chain([Location::InputGradient(block)])
    });
    (0..blocks).map(Location::Output).chain(backward).collect()
}

impl Location {
    fn words(self, model: &Model) -> String {
        let block = |index: usize| model.blocks[index].name();
        match self {
            Self::Output(index) => format!("the output of block `{}`", block(index)),
            Self::Gradient(index, id) => {
                let param = &model.params[id.0].key;
                format!("the gradient of `{param}` in block `{}`", block(index))
            }
            Self::InputGradient(index) => format!("the gradient of the input of block `{}`", block(index)),
        }
    }
}

/// The first number of a rank that is not finite: its micro-batch, and its index in [`places`]. A micro-batch below 0 says
/// that the rank found only finite numbers.
type FirstNonFinite = [f64; 2];

const NONE: FirstNonFinite = [-1.0, 0.0];

/// The first rank with the earliest number that is not finite, by micro-batch and index.
fn first_of(ranks: &[FirstNonFinite]) -> Option<(usize, FirstNonFinite)> {
    let seen = ranks.iter().copied().enumerate().filter(|(_, [m, _])| *m >= 0.0);
    seen.min_by(|(_, one), (_, other)| one[0].total_cmp(&other[0]).then(one[1].total_cmp(&other[1])))
}

/// Where a number that is not finite was seen first, in the order of micro-batches and places: a rank may come to a later
/// micro-batch before an earlier one comes back.
struct Seen<'a> {
    world: &'a World,
    places: &'a [Location],
    /// By block of this rank: its number in the whole model.
    blocks: Vec<usize>,
    /// The micro-batch, and the block of this rank, whose pass is under way.
    at: (usize, usize),
    first: Option<(usize, usize)>,
}

impl Seen<'_> {
    fn look_at(&mut self, place: Location, buffer: &Buffer) -> Result<(), DeviceError> {
        let code = self.places.iter().position(|other| *other == place);
        let found = (self.at.0, code.expect("the whole model has this place"));
        let is_earlier = self.first.is_none_or(|first| found < first);
        if is_earlier && !is_finite(self.world, buffer)? {
            self.first = Some(found);
        }
        Ok(())
    }

    /// The block whose pass is under way, in the whole model.
    fn block(&self) -> usize {
        self.blocks[self.at.1]
    }
}

/// Looks at what each block makes.
struct LookingHooks<'a> {
    seen: &'a RefCell<Seen<'a>>,
}

impl Hooks for LookingHooks<'_> {
    fn before(&mut self, block: usize, _pass: Pass) -> Result<(), DeviceError> {
        self.seen.borrow_mut().at.1 = block;
        Ok(())
    }

    fn after(&mut self, _block: usize, pass: Pass, made: Option<&Activation>) -> Result<(), DeviceError> {
        let mut seen = self.seen.borrow_mut();
        let place = match pass {
            Pass::Forward => Location::Output(seen.block()),
            Pass::Backward => Location::InputGradient(seen.block()),
        };
        made.map_or(Ok(()), |made| seen.look_at(place, made.buffer()))
    }
}

/// Looks at gradients of parameters, each for as long as that takes.
struct LookingSink<'a> {
    model: &'a Model,
    memory: HashMap<ParamId, Buffer>,
    seen: &'a RefCell<Seen<'a>>,
}

impl GradSink for LookingSink<'_> {
    fn grad(&mut self, id: ParamId) -> Result<GradSlot, DeviceError> {
        let param = &self.model.params[id.0];
        let name = format!("gradient of `{}` under inspection", param.key);
        let spec = ArenaSpec::private(name, DType::F32, param.len());
        let buffer = self.seen.borrow().world.compute.device.alloc(&spec)?.whole();
        self.memory.insert(id, buffer.clone());
        Ok(GradSlot {
            buffer,
            accumulate: false,
        })
    }

    fn contributed(&mut self, id: ParamId, _at: Event) -> Result<(), DeviceError> {
        let Some(gradient) = self.memory.remove(&id) else {
            return Ok(());
        };
        let mut seen = self.seen.borrow_mut();
        let place = Location::Gradient(seen.block(), self.model.whole_id(id));
        seen.look_at(place, &gradient)
    }
}

fn is_finite(world: &World, buffer: &Buffer) -> Result<bool, DeviceError> {
    let bytes = world.compute.download(buffer)?;
    let all = |width: usize, test: fn(&[u8]) -> bool| bytes.chunks_exact(width).all(test);
    Ok(match buffer.dtype() {
        DType::F64 => all(8, |x| bytemuck::pod_read_unaligned::<f64>(x).is_finite()),
        DType::F32 => all(4, |x| bytemuck::pod_read_unaligned::<f32>(x).is_finite()),
        DType::Bf16 => all(2, |x| bytemuck::pod_read_unaligned::<half::bf16>(x).is_finite()),
        DType::I32 | DType::U8 => true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_stops_at_once_or_after_too_many_in_a_row() {
        let mut skips = Skips::new(OnNonFinite::Stop, 2);
        assert_eq!(skips.judge(true), Decision::Keep);
        assert_eq!(skips.judge(false), Decision::Stop { skipped: 0 });

        let mut skips = Skips::new(OnNonFinite::Skip, 2);
        assert_eq!(skips.judge(false), Decision::Skip { is_first: true });
        assert_eq!(skips.judge(false), Decision::Skip { is_first: false });
        assert_eq!(skips.judge(true), Decision::Keep);
        assert_eq!(skips.judge(false), Decision::Skip { is_first: true });
        assert_eq!(skips.judge(false), Decision::Skip { is_first: false });
        assert_eq!(skips.judge(false), Decision::Stop { skipped: 2 });
        assert_eq!(skips.total(), 4);
    }

    #[test]
    fn places_have_the_order_of_execution() {
        let of_block = |block| {
            [
                Location::Gradient(block, ParamId(1)),
                Location::Gradient(block, ParamId(0)),
                Location::InputGradient(block),
            ]
        };
        let outputs = [Location::Output(0), Location::Output(1)];
        let expected = [&outputs[..], &of_block(1), &of_block(0)].concat();
        assert_eq!(places(2, 2), expected);
    }

    #[test]
    fn the_earlier_number_counts_on_any_rank() {
        assert_eq!(first_of(&[NONE, NONE]), None);
        assert_eq!(first_of(&[NONE, [1.0, 4.0], NONE]), Some((1, [1.0, 4.0])));
        assert_eq!(
            first_of(&[[1.0, 3.0], [0.0, 9.0]]),
            Some((1, [0.0, 9.0])),
            "micro-batch"
        );
        assert_eq!(
            first_of(&[[0.0, 9.0], [0.0, 3.0]]),
            Some((1, [0.0, 3.0])),
            "place"
        );
        assert_eq!(first_of(&[[0.0, 3.0], [0.0, 3.0]]), Some((0, [0.0, 3.0])), "rank");
    }
}
