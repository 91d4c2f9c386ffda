//! A pipeline as it ran, from the timeline of a run (`run.timeline`), in the form of the
//! simulator's steps; and the same steps simulated with the measured durations of their actions.

use std::collections::{BTreeMap, BTreeSet};

use super::action::{Action, RowsError, Schedule};
use super::simulator::{Deadlock, Interval, MeasuredTicks, RankTimeline, Simulation, replay};
use super::validator::{Purpose, Refusal, Rules, validate};
use crate::parallel::comm_times::WAITS;
use crate::timeline::{Kind, Lane, Span, TraceFile, TraceFileError};

/// A timeline that shows no pipeline.
#[derive(Debug, thiserror::Error)]
pub enum MeasuredError {
    /// It is another kind of file.
    #[error(transparent)]
    File(#[from] TraceFileError),
    /// No rank of it computes on stages.
    #[error(
        "the timeline contains no step of a pipeline\n  hint: set `run.timeline` in a run whose `parallel.pipeline.stages` is more than 1"
    )]
    NoStep,
    /// Its actions do not form a schedule: ranks are missing.
    #[error("the actions of step {0} do not form a schedule: {1}")]
    NoSchedule(u64, RowsError),
    /// Actions are missing.
    #[error("the actions of step {0} do not form a schedule: {1}")]
    Refused(u64, Refusal),
}

/// Steps of a run. Ticks are nanoseconds; a micro-batch keeps a byte of each stage.
#[derive(Clone, Debug)]
pub struct MeasuredRun {
    schedule: Schedule,
    /// By number, from 1.
    steps: BTreeMap<u64, Simulation>,
    simulated: BTreeMap<u64, Simulation>,
}

/// An action that ran; times in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Ran {
    action: Action,
    start: u64,
    end: u64,
    /// Nanoseconds since the action before, without waits.
    before: u64,
}

impl MeasuredRun {
    /// Reads the text of a `timeline.json`. Of several ranks with the same stages, only the first
    /// one is used. Steps whose actions differ from those of the last step are left out.
    pub fn of_trace(json: &[u8]) -> Result<Self, MeasuredError> {
        let trace = TraceFile::parse(json)?;
        let mut lanes: Vec<BTreeMap<u64, Vec<Ran>>> = Vec::new();
        let mut known: BTreeSet<BTreeSet<usize>> = BTreeSet::new();
        for (_, spans) in &trace.ranks {
            let steps = steps_of(spans, lanes.len());
            let actions = steps.values().flatten();
            let stages: BTreeSet<usize> = actions.map(|ran| ran.action.stage).collect();
            if !stages.is_empty() && known.insert(stages) {
                lanes.push(steps);
            }
        }
        let numbers = lanes.first().into_iter().flat_map(BTreeMap::keys);
        let mut steps = BTreeMap::new();
        for number in numbers {
            let rows: Option<Vec<&[Ran]>> = lanes.iter().map(|lane| Some(&**lane.get(number)?)).collect();
            if let Some(rows) = rows {
                steps.insert(*number, rows);
            }
        }
        let (&last, rows) = steps.last_key_value().ok_or(MeasuredError::NoStep)?;
        let schedule = Schedule::from_rows(actions(rows));
        let schedule = schedule.map_err(|error| MeasuredError::NoSchedule(last, error))?;
        let rules = Rules {
            purpose: Purpose::Training,
            capacity: None,
        };
        let refused = |error| MeasuredError::Refused(last, error);
        validate(&schedule, rules).map_err(refused)?;
        steps.retain(|_, rows| actions(rows) == schedule.rows());
        let simulated = steps.iter().map(|(&number, rows)| {
            let simulation = replayed(&schedule, rows).map_err(|error| refused(error.into()))?;
            Ok((number, simulation))
        });
        Ok(Self {
            simulated: simulated.collect::<Result<_, MeasuredError>>()?,
            steps: (steps.iter())
                .map(|(&number, rows)| (number, as_simulation(rows)))
                .collect(),
            schedule,
        })
    }

    /// What ranks computed in a step.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// The steps as they ran, by number; at least one.
    pub fn steps(&self) -> &BTreeMap<u64, Simulation> {
        &self.steps
    }

    /// The same steps, if each action, and what its rank does between two actions, takes as long as was measured, and
    /// messages arrive at once: only waiting is simulated.
    pub fn simulated(&self) -> &BTreeMap<u64, Simulation> {
        &self.simulated
    }
}

/// F, B, I and W of the steps of a rank, in order.
fn steps_of(spans: &[Span], lane: usize) -> BTreeMap<u64, Vec<Ran>> {
    let ns = |us: f64| (us * 1e3).round().max(0.0) as u64;
    let mut steps: BTreeMap<u64, Vec<Ran>> = BTreeMap::new();
    for step in spans.iter().filter(|span| span.lane == Lane::Steps) {
        let number = step
            .name
            .strip_prefix("step ")
            .and_then(|number| number.parse().ok());
        let Some(number) = number else { continue };
        let within = |span: &&Span| span.start_us >= step.start_us && span.end_us <= step.end_us;
        let waits = spans
            .iter()
            .filter(|span| span.lane == Lane::Compute && span.name == WAITS);
        let waits: Vec<&Span> = waits.filter(within).collect();
        let is_pass = |span: &&Span| matches!(span.kind, Kind::Forward | Kind::Backward);
        let passes = spans.iter().filter(|span| span.lane == Lane::Compute);
        let ran = passes.filter(is_pass).filter(within).filter_map(|span| {
            let (name, _) = span.name.split_once(':')?;
            let action = Action::parse(lane, name).filter(|action| action.kind.is_compute())?;
            let start = ns(span.start_us);
            Some(Ran {
                action,
                start,
                end: ns(span.end_us).max(start),
                before: 0,
            })
        });
        let mut ran: Vec<Ran> = ran.collect();
        ran.sort_by_key(|ran| ran.start);
        for number in 1..ran.len() {
            let (from, to) = (ran[number - 1].end, ran[number].start);
            let between = (waits.iter()).filter(|wait| ns(wait.start_us) >= from && ns(wait.end_us) <= to);
            let waited: u64 = between
                .map(|wait| ns(wait.end_us).saturating_sub(ns(wait.start_us)))
                .sum();
            ran[number].before = to.saturating_sub(from).saturating_sub(waited);
        }
        if !ran.is_empty() {
            steps.insert(number, ran);
        }
    }
    steps
}

fn actions(rows: &[&[Ran]]) -> Vec<Vec<Action>> {
    let row = |row: &&[Ran]| row.iter().map(|ran| ran.action).collect();
    rows.iter().map(row).collect()
}

/// A step with its own durations.
fn replayed(schedule: &Schedule, rows: &[&[Ran]]) -> Result<Simulation, Deadlock> {
    let of = |ran: &Ran| {
        let (before, took) = (ran.before, ran.end - ran.start);
        (ran.action, MeasuredTicks { before, took })
    };
    replay(schedule, &rows.iter().copied().flatten().map(of).collect())
}

/// From the start of the first action.
fn as_simulation(rows: &[&[Ran]]) -> Simulation {
    let all = || rows.iter().copied().flatten();
    let first = all().map(|ran| ran.start).min().unwrap_or(0);
    let last = all().map(|ran| ran.end).max().unwrap_or(0);
    let of_rank = |row: &&[Ran]| {
        let mut timeline = RankTimeline::default();
        for &Ran {
            action, start, end, ..
        } in *row
        {
            let (start, end) = (start - first, end - first);
            timeline.busy += end - start;
            timeline.note_memory(action, [start, end], 1);
            timeline.intervals.push(Interval { action, start, end });
        }
        timeline
    };
    Simulation {
        end: last - first,
        ranks: rows.iter().map(of_rank).collect(),
        deepest_queue: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::super::simulator::bubble_fraction;
    use super::*;
    use crate::timeline::{About, ClockReading};

    fn about(rank: u32) -> About {
        About {
            run: "test".into(),
            rank,
            world_size: 4,
            host: "node-a".into(),
            generation: 0,
            steps: [7, 7],
            clock: ClockReading {
                clock: "a".into(),
                ns: 0,
            },
            missed: 0,
        }
    }

    /// Spans of a step, 7: actions with begin and end in microseconds.
    fn spans(actions: &[(&str, f64, f64)]) -> Vec<Span> {
        let span = |lane, kind, name: String, start_us, end_us| Span {
            start_us,
            end_us,
            ..Span::of(lane, kind, name)
        };
        let mut spans = vec![span(Lane::Steps, Kind::Step, "step 7".into(), 0.0, 1000.0)];
        for &(action, start, end) in actions {
            let name = format!("{action}: stage 0, micro-batch 0: forward");
            let data = format!("{action}: stage 0, micro-batch 0: data");
            spans.push(span(Lane::Compute, Kind::Data, data, start - 1.0, start));
            spans.push(span(Lane::Compute, Kind::Forward, name, start, end));
            spans.push(span(
                Lane::Compute,
                Kind::Forward,
                "forward h.0".into(),
                start,
                end,
            ));
        }
        spans
    }

    /// 1F1B with one micro-batch: rank 1 is late by 30.
    fn two_ranks() -> TraceFile {
        let mut first = spans(&[("0F0", 100.0, 200.0), ("0B0", 430.0, 600.0)]);
        let wait = Span::of(Lane::Compute, Kind::Wait, WAITS);
        first.push(Span {
            start_us: 220.0,
            end_us: 420.0,
            ..wait
        });
        let second = spans(&[("1F0", 230.0, 330.0), ("1B0", 340.0, 430.0)]);
        let copies = [first.clone(), first, second.clone(), second];
        let ranks = (0..).zip(copies).map(|(rank, spans)| (about(rank), spans));
        TraceFile {
            ranks: ranks.collect(),
        }
    }

    #[test]
    fn a_timeline_gives_measured_and_simulated_steps() {
        let run = MeasuredRun::of_trace(&two_ranks().to_json()).unwrap();
        assert_eq!(
            run.schedule().placement().ranks(),
            2,
            "of ranks that hold the same, one"
        );
        let step = &run.steps()[&7];
        assert_eq!(
            (step.end, step.ranks[0].busy, step.ranks[1].busy),
            (500_000, 270_000, 190_000)
        );
        assert!((bubble_fraction(run.steps().values()) - 0.54).abs() < 1e-9);
        // Without the time of the message, with the 10 and 30 that the ranks did not wait between their actions.
        assert_eq!(run.simulated()[&7].end, 470_000);
        assert_eq!(step.ranks[0].memory, [(0, 1), (500_000, 0)]);
    }

    #[test]
    fn what_shows_no_whole_pipeline_is_refused_in_words() {
        let refused = |file: &TraceFile| MeasuredRun::of_trace(&file.to_json()).unwrap_err().to_string();
        let mut file = two_ranks();
        file.ranks.drain(..2);
        insta::assert_snapshot!(refused(&file), @"the actions of step 7 do not form a schedule: stage 0 must be on exactly one rank");
        let mut file = two_ranks();
        file.ranks[2].1.retain(|span| !span.name.starts_with("1B0"));
        file.ranks.truncate(3);
        insta::assert_snapshot!(refused(&file), @"the actions of step 7 do not form a schedule: rank 1 is refused at `1I0`: the action is missing");
        file.ranks.clear();
        insta::assert_snapshot!(refused(&file), @r"
        the timeline contains no step of a pipeline
          hint: set `run.timeline` in a run whose `parallel.pipeline.stages` is more than 1
        ");
        assert!(MeasuredRun::of_trace(b"{}").is_err());
    }
}
