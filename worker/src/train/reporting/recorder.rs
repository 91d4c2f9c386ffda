//! Reports each step, with the memory that a rank holds: to `metrics.jsonl`, to the agent, to the console.

use std::fs;
use std::time::{Duration, Instant};

use ddp_proto::control::Progress;
use ddp_proto::env::DDP_PROGRESS;
use parking_lot::Mutex;

use super::console::{Pace, say, warn};
use crate::config::TrainConfig;
use crate::costs::Accelerator;
use crate::metrics::{
    Achieved, EventFile, Memory, MetricsLine, MetricsLog, RunDir, RunFilesError, Validations,
};
use crate::optim::Optimizer;
use crate::parallel::Reducer;
use crate::train::TrainError;
use crate::train::replica::Replica;
use crate::train::strategy::work;
use crate::train::world::World;

/// The kernel walks all page tables for the proportional size, some 20 ms for a GiB: not in every step.
const REFRESH: Duration = Duration::from_secs(1);

/// One finished step.
#[derive(Clone, Debug)]
pub(crate) struct StepRecord {
    /// The line of `metrics.jsonl`, without the memory of this process.
    pub(crate) line: MetricsLine,
    /// Tokens of all ranks.
    pub(crate) tokens: u64,
    /// Wall time of the step.
    pub(crate) time: Duration,
    /// A rank was asked to stop after this step.
    pub(crate) stop: bool,
}

/// Bytes that a rank holds for as long as it trains, as the types that hold them say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Parameters.
    pub params: u64,
    /// Slots for parameters that are gathered at the moment.
    pub gathered: u64,
    /// Gradients, with those in flight, and the sums of later uses of tied parameters.
    pub grads: u64,
    /// Slots for gradients that are being reduced.
    pub in_flight: u64,
    /// State of the optimizer, and masters, on the device, with the copy of another rank's part.
    pub optimizer: u64,
    /// The same in memory of the host, and in a file.
    pub offloaded: [u64; 2],
    /// Parameters and gradients in memory of the host, and in a file.
    pub offloaded_params: [u64; 2],
    /// Of parameters, gradients and optimizer: so that ranks have equal slices of whole chunks.
    pub padding: u64,
    /// Activations of all micro-batches in flight.
    pub activations: u64,
}

impl Footprint {
    pub(crate) fn of(replica: &Replica, reducer: &Reducer, optimizer: &Optimizer, copy_bytes: usize) -> Self {
        let (params, sums) = (replica.parameters.bytes(), reducer.sum_bytes_by_place());
        let padded = replica.parameters.sharding().whole_len();
        let padding = (padded - replica.model.held_count()) as f64 / padded as f64;
        let state = optimizer.bytes_by_place();
        let owned = replica.parameters.own().arena().bytes();
        let elements = owned + reducer.sum_bytes() + optimizer.bytes();
        Self {
            params: params.device as u64,
            gathered: replica.parameters.gathered_bytes() as u64,
            grads: (reducer.bytes() - reducer.sum_bytes() + sums.device) as u64,
            in_flight: reducer.in_flight_bytes() as u64,
            optimizer: (state.device + copy_bytes) as u64,
            offloaded: [state.host as u64, state.file as u64],
            offloaded_params: [params.host + sums.host, params.file + sums.file].map(|bytes| bytes as u64),
            padding: (elements as f64 * padding) as u64,
            activations: replica.pool.allocated_bytes() as u64,
        }
    }

    /// As a line of the metrics tells it.
    pub(crate) fn memory(&self) -> Memory {
        Memory {
            params: self.params,
            grads: self.grads,
            optimizer: self.optimizer,
            optimizer_host: self.offloaded[0],
            optimizer_file: self.offloaded[1],
            params_host: self.offloaded_params[0],
            params_file: self.offloaded_params[1],
            activations: self.activations,
            gathered: self.gathered,
            ..Memory::default()
        }
    }

    /// All of it on the device.
    pub const fn total(&self) -> u64 {
        self.params + self.gathered + self.grads + self.optimizer + self.activations
    }
}

/// Reports on rank 0 only.
pub(crate) struct Recorder {
    log: Option<MetricsLog>,
    /// The file of `run.tensorboard`, as long as it can be written.
    events: Option<EventFile>,
    /// The last line could not be written.
    is_losing: bool,
    pace: Pace,
    /// Whether to print step lines: the launcher draws no progress bar, or `train.log_every` is
    /// set.
    lines: bool,
    /// The last finite loss.
    last_loss: f64,
    /// Tokens and time of the steps since this process started.
    trained: (u64, Duration),
    /// Operations of the model for a token.
    flops_per_token: f64,
    /// Operations a second of all ranks' GPUs by their data sheet, if they have one.
    peak: Option<f64>,
}

impl Recorder {
    /// Opens the files of the run, of which `first_step` steps are finished. `run_dir` on rank 0 only.
    pub(crate) fn open(
        run_dir: Option<&RunDir>,
        first_step: u64,
        config: &TrainConfig,
        world: &World,
    ) -> Result<Self, TrainError> {
        let sheet = world.compute.device.gpu().and_then(Accelerator::of);
        let log = run_dir.map(|dir| MetricsLog::open(&dir.metrics(), first_step));
        let dir_of_events = run_dir.filter(|_| config.run.tensorboard && first_step < config.train.steps);
        let events = dir_of_events.and_then(|dir| written(EventFile::create(dir.path(), first_step)));
        let bar = std::env::var(DDP_PROGRESS).is_ok_and(|drawn_by| drawn_by == "bar");
        Ok(Self {
            lines: !bar || config.train.log_every.is_some(),
            log: log.transpose()?,
            events,
            is_losing: false,
            pace: Pace::new(Instant::now(), first_step, &config.train),
            last_loss: 0.0,
            trained: (0, Duration::ZERO),
            flops_per_token: work(config).model as f64,
            peak: sheet.map(|sheet| world.size() as f64 * sheet.flops(config.train.precision)),
        })
    }

    /// Reports one finished step. Returns what the agent's progress bar shows.
    pub(crate) fn record(&mut self, record: &StepRecord) -> Option<Progress> {
        let line = &record.line;
        self.trained = (self.trained.0 + record.tokens, self.trained.1 + record.time);
        if line.loss.is_finite() {
            self.last_loss = line.loss;
        }
        self.log.as_ref()?;
        let achieved = self.achieved(line.tokens_per_s);
        self.append(&MetricsLine {
            memory: with_process(line.memory),
            achieved,
            ..line.clone()
        });
        let now = Instant::now();
        let last = self.validations().last;
        let progress = Progress {
            steps: self.pace.steps,
            loss: self.last_loss,
            tokens_per_s: line.tokens_per_s,
            seconds_left: self.pace.seconds_left(now, line.step),
            val_loss: last.map(|(loss, _)| loss),
            val_step: last.map(|(_, step)| step),
            lr: Some(line.lr),
            model_flops_per_s: Some(achieved.model_flops_per_s),
            mfu: achieved.mfu,
        };
        // A line is of its step alone. The bar, which comes and goes, keeps the last validation.
        let shown = Progress {
            loss: line.loss,
            val_loss: line.val_loss,
            val_step: None,
            ..progress.clone()
        };
        let is_news = line.val_loss.is_some();
        if let Some(words) = (self.pace.line(now, line.step, &shown, is_news)).filter(|_| self.lines) {
            say(&words);
        }
        Some(progress)
    }

    /// The line of a step that the generation before has finished, unless it has written that.
    pub(crate) fn complete(&mut self, line: &MetricsLine) {
        if self.log.as_ref().is_some_and(|log| log.last_step() < line.step) {
            self.append(&MetricsLine {
                memory: with_process(line.memory),
                achieved: self.achieved(line.tokens_per_s),
                ..line.clone()
            });
        }
    }

    /// Writes a line of the metrics. A full disk must not end the training.
    fn append(&mut self, line: &MetricsLine) {
        let Some(log) = &mut self.log else { return };
        self.events =
            (self.events.take()).and_then(|mut events| written(events.append(line).map(|()| events)));
        match log.append(line) {
            Ok(()) => self.is_losing = false,
            Err(error) if !std::mem::replace(&mut self.is_losing, true) => warn(&format!(
                "the metrics of step {} are lost, training continues: {error}",
                line.step
            )),
            Err(_) => {}
        }
    }

    /// An error if the metrics were deleted or moved.
    pub(crate) fn check(&self) -> Result<(), RunFilesError> {
        self.log.as_ref().map_or(Ok(()), MetricsLog::check)
    }

    /// Validation losses of the run so far, on rank 0.
    pub(crate) fn validations(&self) -> Validations {
        self.log.as_ref().map(MetricsLog::validations).unwrap_or_default()
    }

    /// What tokens a second are in arithmetic.
    pub(crate) fn achieved(&self, tokens_per_s: f64) -> Achieved {
        let model_flops_per_s = tokens_per_s * self.flops_per_token;
        Achieved {
            model_flops_per_s,
            mfu: self.peak.map(|peak| model_flops_per_s / peak),
        }
    }

    /// Tokens per second of all ranks together, over the steps since this process started.
    pub(crate) fn tokens_per_s(&self) -> f64 {
        self.trained.0 as f64 / self.trained.1.as_secs_f64().max(1e-9)
    }
}

/// The file of events for TensorBoard. If it cannot be written, a warning says so, and training
/// continues without it.
fn written(events: Result<EventFile, RunFilesError>) -> Option<EventFile> {
    events
        .inspect_err(|error| {
            warn(&format!(
                "TensorBoard events are no longer written, training continues: {error}"
            ));
        })
        .ok()
}

/// What a rank holds, with what its process had of physical memory when that was last read, at most [`REFRESH`] ago.
fn with_process(mut held: Memory) -> Memory {
    static LAST: Mutex<Option<(Instant, [u64; 2])>> = Mutex::new(None);
    let mut last = LAST.lock();
    [held.peak_rss, held.pss] = match *last {
        Some((at, memory)) if at.elapsed() < REFRESH => memory,
        _ => last.insert((Instant::now(), process_memory())).1,
    };
    held
}

/// Most physical memory of this process so far, and now with shared pages divided by their users, in bytes. Zero if the
/// system does not report it.
fn process_memory() -> [u64; 2] {
    [
        ("/proc/self/status", "VmHWM:"),
        ("/proc/self/smaps_rollup", "Pss:"),
    ]
    .map(|(path, key)| kib(&fs::read_to_string(path).unwrap_or_default(), key))
}

/// The value of a line `key   123 kB`, in bytes.
fn kib(text: &str, key: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(key));
    let number = value.and_then(|v| v.split_whitespace().next()?.parse::<u64>().ok());
    number.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_system_are_read() {
        let text = "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t 4 kB\n";
        assert_eq!(kib(text, "VmHWM:"), 2 << 20);
        assert_eq!(kib(text, "Pss:"), 0);
    }

    #[test]
    fn this_process_uses_memory() {
        assert!(process_memory()[0] > 1 << 20);
    }
}
