//! The steps whose timeline is written: `run.timeline`.
//!
//! All ranks leave a barrier together and begin; behind the last of the steps each writes what it has seen, and rank 0
//! makes one trace of all of them, and a picture of the last step. Training stands still meanwhile, between two steps.

use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use ddp_proto::words::counted;
use serde_json::json;

use super::console::{say, warn};
use crate::config::{StepRange, Strategy, TrainConfig};
use crate::metrics::{RunFilesError, TimelineFiles, host_name};
use crate::model::Model;
use crate::session::Session;
use crate::timeline::{About, Lane, Overlap, Span, TraceFile, picture};
use crate::train::TrainError;
use crate::train::rank_table::RankTable;
use crate::train::world::World;

/// Most ranks of which one trace is made; the files of all are there.
const MAX_MERGED: usize = 64;

/// Most spans of one trace, unless one rank alone has more: some hundred MB, which a browser still reads. The other ranks
/// wait for rank 0 meanwhile, 10 s and more.
const MAX_MERGED_SPANS: f64 = 2e6;

/// The steps that are profiled, and the files that their timeline is written to.
pub(crate) struct ProfilingWindow {
    /// From 1.
    steps: Option<RangeInclusive<u64>>,
    files: TimelineFiles,
    /// The run and how it trains, in words.
    run: String,
    /// The step that was the first one, once it has begun.
    began_with: Option<u64>,
}

impl ProfilingWindow {
    /// Closed.
    pub(crate) fn new(config: &TrainConfig, out_dir: &Path, model: &Model, world: &World) -> Self {
        Self {
            steps: config.run.timeline.map(StepRange::steps),
            files: TimelineFiles::of_run(out_dir),
            run: training_in_words(config, model, world),
            began_with: None,
        }
    }

    /// Why there will be no timeline, if so many steps were done before this life of the run.
    pub(crate) fn is_behind(&self, done: u64) -> Option<String> {
        let last = *self.steps.as_ref()?.end();
        (last <= done)
            .then(|| format!("no timeline: step {last}, the last of `run.timeline`, was done before"))
    }

    /// True if this step, from 1, is the first of them in this life of the run.
    pub(crate) fn opens_with(&self, step: u64) -> bool {
        self.began_with.is_none() && self.steps.as_ref().is_some_and(|steps| steps.contains(&step))
    }

    /// True if it is open and this step is the last of them.
    pub(crate) fn closes_with(&self, step: u64) -> bool {
        self.is_open() && self.steps.as_ref().is_some_and(|steps| *steps.end() == step)
    }

    /// True if it is to be opened or closed behind this step.
    pub(crate) fn has_end_behind(&self, step: u64) -> bool {
        self.opens_with(step + 1) || self.closes_with(step)
    }

    /// True between its first step and its last.
    pub(crate) fn is_open(&self) -> bool {
        self.began_with.is_some()
    }

    /// Begins with this step. Every rank must call it, with nothing in flight.
    pub(crate) fn open(
        &mut self,
        world: &World,
        rank_table: &RankTable,
        step: u64,
    ) -> Result<(), TrainError> {
        rank_table.gather("begin of the timeline", [0.0; 2])?;
        (world.comm.timeline()).open(&world.compute, world.deadline())?;
        self.began_with = Some(step);
        Ok(())
    }

    /// Ends behind this step, and writes the files. Every rank must call it, with nothing in flight. A file that cannot
    /// be written is a warning: training goes on.
    pub(crate) fn close(
        &mut self,
        world: &World,
        rank_table: &RankTable,
        session: &Session,
        step: u64,
    ) -> Result<(), TrainError> {
        // The end of a step is behind the numbers by which the host knows that it is over.
        world.compute.record().wait(world.deadline())?;
        let (Some(first), Some(recording)) = (self.began_with.take(), world.comm.timeline().close()) else {
            return Ok(());
        };
        // Not again in this life, should another step be in the range.
        self.steps = None;
        let env = session.env();
        let about = About {
            run: self.run.clone(),
            rank: env.rank.get(),
            world_size: env.world_size.get(),
            host: host_name(),
            generation: env.generation.get(),
            steps: [first, step],
            clock: recording.clock,
            missed: recording.missed,
        };
        let spans = recording.spans.len() as f64;
        let file = TraceFile::of_rank(about, recording.spans);
        let written = self.files.write_rank(world.rank(), &file.to_json());
        if let Err(error) = &written {
            warn(&format!(
                "the timeline of rank {} is lost: {error}",
                env.rank.get()
            ));
        }
        let all = rank_table.gather("timelines", [f64::from(u8::from(written.is_ok())), spans])?;
        if world.rank() == 0 {
            match self.merge(merged(&all), [first, step]) {
                Ok(words) => say(&words),
                Err(error) => warn(&format!(
                    "the timelines of the ranks have not become one: {error}"
                )),
            }
        }
        Ok(())
    }

    /// One trace and one picture of some ranks. Returns what to tell of them.
    fn merge(&self, ranks: Vec<usize>, [first, last]: [u64; 2]) -> Result<String, String> {
        let read = |rank: usize| -> Result<TraceFile, String> {
            let path = self.files.of_rank(rank);
            let unread = |cause: &dyn std::error::Error| format!("{}: {cause}", path.display());
            let json = fs::read(&path).map_err(|e| unread(&e))?;
            TraceFile::parse(&json).map_err(|e| unread(&e))
        };
        let unwritten = |error: RunFilesError| error.to_string();
        let merged = TraceFile::merged(ranks.into_iter().map(read).collect::<Result<_, _>>()?);
        let trace = self.files.write_trace(&merged.to_json()).map_err(unwritten)?;
        let mut words = format!(
            "timeline of {}: {} (for https://ui.perfetto.dev)",
            in_words(&merged),
            trace.display()
        );
        // For the last one there may have been no room.
        if let Some(picture) = (first..=last).rev().find_map(|step| picture(&merged, step)) {
            let path = self.files.write_picture(&picture).map_err(unwritten)?;
            words = format!("{words}, {}", path.display());
        }
        Ok(words)
    }
}

/// By rank: whether it wrote a file, and its number of spans. One trace is made of all files.
fn merged(all: &[[f64; 2]]) -> Vec<usize> {
    let mut room = MAX_MERGED_SPANS;
    let whole = (0..all.len()).filter(|&rank| all[rank][0] > 0.0).enumerate();
    let fitting = whole.take_while(|&(before, rank)| {
        room -= all[rank][1];
        before == 0 || (room >= 0.0 && before < MAX_MERGED)
    });
    fitting.map(|(_, rank)| rank).collect()
}

/// `single-node: gpt2 4 × 128, f32, ddp, bucketed, overlap, on cpu (1 thread, avx512)`
fn training_in_words(config: &TrainConfig, model: &Model, world: &World) -> String {
    let word = |value: serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let parallel = &config.parallel;
    let mut words = vec![
        model.name.clone(),
        word(json!(config.train.precision)),
        word(json!(parallel.strategy)),
    ];
    if parallel.strategy == Strategy::Ddp {
        words.push(word(json!(parallel.sync)));
    }
    words.push(if parallel.overlap { "overlap" } else { "no overlap" }.to_owned());
    let (name, device) = (&config.run.name, world.compute.device.name());
    format!("{name}: {}, on {device}", words.join(", "))
}

/// `steps 10 to 12 of 4 of 8 ranks, 97 % of the communication hidden`
fn in_words(file: &TraceFile) -> String {
    let Some((about, _)) = file.ranks.first() else {
        return "no rank".to_owned();
    };
    let mut words = match about.steps {
        [first, last] if first == last => format!("step {first}"),
        [first, last] => format!("steps {first} to {last}"),
    };
    let ranks = file.ranks.len();
    if about.world_size as usize > ranks {
        words = format!("{words} of {ranks} of {}", counted(about.world_size, "rank"));
    }
    let missed = file.ranks.iter().map(|(about, _)| about.missed).sum::<u64>();
    if missed > 0 {
        let missed = counted(missed, "span");
        words = format!("{words} without {missed} for which there was no room");
    }
    let (mut all, mut whole_us) = (Overlap::default(), 0.0);
    for (_, spans) in &file.ranks {
        let steps = spans.iter().filter(|span| span.lane == Lane::Steps);
        all += Overlap::of(spans, steps.clone().map(|step| [step.start_us, step.end_us]));
        whole_us += steps.map(Span::length_us).sum::<f64>();
    }
    if let Some(hidden) = all.hidden() {
        words = format!("{words}, {:.0} % of the communication hidden", hidden * 100.0);
    }
    let share = all.late_us / whole_us;
    if share >= 0.01 {
        words = format!(
            "{words}, {:.0} % of the time spent waiting for slower ranks",
            share * 100.0
        );
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_trace_has_as_many_ranks_as_a_viewer_reads() {
        let few = [[1.0, 100.0], [0.0, 0.0], [1.0, 100.0]];
        assert_eq!(merged(&few), [0, 2]);
        assert_eq!(merged(&[[1.0, 100.0]; 70]), (0..64).collect::<Vec<_>>());
        assert_eq!(merged(&[[1.0, 5e5]; 8]), [0, 1, 2, 3]);
        assert_eq!(merged(&[[1.0, 3e6]; 2]), [0]);
        assert_eq!(merged(&[[0.0, 0.0]; 2]), [0; 0]);
    }
}
