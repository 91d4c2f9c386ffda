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
//! | [`validate`] | refuses what cannot be run, and says why |
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

pub use action::{Action, ActionKind, Edge, Schedule, Transfer};
pub use generators::{PipelineShape, ShapeError, gpipe, greedy, interleaved_1f1b, one_f_one_b, zb_h1, zbv};
pub use passes::{forward_only, with_transfers};
pub use picture::{SchedulePicture, grid};
pub use plan::{PipelinePlan, PlanError};
pub use simulator::{Deadlock, Interval, RankTimeline, Simulation, StageCosts, Waiting, simulate};
pub use stages::{LayerCosts, Placement, TooFewLayers, divide_layers};
#[cfg(test)]
use tests::schedule_of;
pub use validator::{Purpose, Reason, Refusal, validate};

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const KINDS: [ActionKind; 8] = [
        ActionKind::Forward,
        ActionKind::Backward,
        ActionKind::InputGradient,
        ActionKind::WeightGradient,
        ActionKind::SendActivation,
        ActionKind::ReceiveActivation,
        ActionKind::SendGradient,
        ActionKind::ReceiveGradient,
    ];

    /// The schedule of a text with a line for each rank.
    pub(super) fn schedule_of(text: &str) -> Schedule {
        let row = |(rank, line): (usize, &str)| {
            let actions = line.split(',').filter(|action| !action.is_empty());
            actions.map(|action| action_of(rank, action)).collect()
        };
        let rows: Vec<Vec<Action>> = text.lines().enumerate().map(row).collect();
        let actions = || rows.iter().flatten();
        let rank_of_stage: BTreeMap<usize, usize> = actions().map(|a| (a.stage, a.rank)).collect();
        let placement = Placement::new(rows.len(), rank_of_stage.into_values().collect());
        let last = actions().map(|a| a.micro_batch).max().expect("an action");
        Schedule::new(placement, last + 1, rows)
    }

    fn action_of(rank: usize, text: &str) -> Action {
        let is_digit = |c: char| c.is_ascii_digit();
        let rest = text.trim_start_matches(is_digit);
        let name = rest.trim_end_matches(is_digit);
        let kind = KINDS.into_iter().find(|kind| kind.name() == name);
        Action {
            rank,
            stage: text[..text.len() - rest.len()].parse().expect("a stage"),
            kind: kind.expect("a kind"),
            micro_batch: rest[name.len()..].parse().expect("a micro-batch"),
        }
    }

    #[test]
    fn a_schedule_has_the_text_of_its_rows() {
        let text = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n";
        let schedule = schedule_of(text);
        assert_eq!(schedule.placement(), &Placement::v_shaped(2, 2));
        assert_eq!(
            (schedule.micro_batches(), schedule.to_string().as_str()),
            (1, text)
        );
    }
}
