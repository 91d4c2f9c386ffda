//! Pipeline parallelism: schedules as data, and what can be said of them before anything runs.
//!
//! The layers of a model are cut into stages, and each rank of the pipeline's axis holds one or several of them (its
//! chunks). A schedule says what every rank does in a step. It is made by a generator, completed by passes, checked by
//! the validator, and timed by the simulator; nothing here computes or communicates, or knows a model.
//!
//! | part | what it is |
//! |---|---|
//! | [`Action`], [`Schedule`] | what ranks do, in order; [`Transfer`] and [`Edge`]: messages between them |
//! | [`Placement`], [`divide_layers`] | which rank holds which stage; which layers a stage consists of |
//! | [`gpipe`], [`one_f_one_b`], [`interleaved_1f1b`], [`zb_h1`] | generators for stages in a loop |
//! | [`zbv`], [`greedy`] | generators for stages in a V |
//! | [`with_transfers`], [`forward_only`] | passes: add the messages between ranks; leave out backward |
//! | [`validate`], [`least_capacity`] | refuses what cannot be run, and says why |
//! | [`simulate`] | when each rank does what, its bubbles and its memory |
//! | [`SchedulePicture`], [`grid`] | a simulated step as an SVG, and as text |
//! | [`PipelinePlan`] | the pipeline of a configuration: its schedule, checked, and the layers of each stage |

mod action;
mod generators;
mod passes;
mod picture;
mod plan;
mod simulator;
mod stages;
mod validator;

pub use action::{Action, ActionKind, Edge, RowsError, Schedule, Transfer};
pub use generators::{PipelineShape, ShapeError, gpipe, greedy, interleaved_1f1b, one_f_one_b, zb_h1, zbv};
pub use passes::{forward_only, with_transfers};
pub use picture::{SchedulePicture, grid};
pub use plan::{PipelinePlan, PlanError};
pub use simulator::{Deadlock, Interval, Links, RankTimeline, Simulation, StageCosts, Waiting, simulate};
pub use stages::{LayerCosts, Placement, TooFewLayers, divide_layers};
#[cfg(test)]
use tests::schedule_of;
pub use validator::{Purpose, Reason, Refusal, Rules, least_capacity, validate};

#[cfg(test)]
mod tests {
    use super::*;

    /// The schedule of a text with a line for each rank.
    pub(super) fn schedule_of(text: &str) -> Schedule {
        let parse = |(rank, line): (usize, &str)| {
            let actions = line.split(',').filter(|action| !action.is_empty());
            let parsed = actions.map(|action| Action::parse(rank, action).expect("an action"));
            parsed.collect()
        };
        Schedule::from_rows(text.lines().enumerate().map(parse).collect()).expect("a schedule")
    }

    #[test]
    fn a_schedule_is_read_from_its_rows() {
        let text = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n";
        let schedule = schedule_of(text);
        assert_eq!(schedule.placement(), &Placement::v_shaped(2, 2));
        assert_eq!(
            (schedule.micro_batches(), schedule.to_string().as_str()),
            (1, text)
        );
        for no_action in [
            "F0",
            "1",
            "1f0",
            "1F0x",
            "1F-1",
            "-1F0",
            "1F",
            "1F1048576",
            "1UNSHARD",
        ] {
            assert_eq!(Action::parse(0, no_action), None, "{no_action}");
        }
        let rows = |rows: &[(usize, &str)]| {
            let row = |&(rank, action): &(usize, &str)| vec![Action::parse(rank, action).expect("an action")];
            Schedule::from_rows(rows.iter().map(row).collect())
        };
        assert_eq!(rows(&[(0, "0F0"), (1, "0F1")]), Err(RowsError { stage: 0 }));
        assert_eq!(rows(&[(0, "0F0"), (1, "2F0")]), Err(RowsError { stage: 1 }));
    }
}
