//! What a run reports: `metrics.jsonl`, a line a step, cut back to the checkpoint's step after a rollback; `summary.json`,
//! the run in one object; and the files of a timeline, in the folder `timeline`.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use ddp_proto::words::rate;
use serde::{Deserialize, Deserializer, Serialize};

use super::run_file::{RunFilesError, delete_file, replace_file};
use crate::checkpoint::open_to_read;
use crate::collective::WireBytes;

const FOLDER: &str = "timeline";
const RANKS: &str = "ranks";
const TRACE: &str = "timeline.json";
const PICTURE: &str = "timeline.svg";

/// The open `metrics.jsonl`. Only rank 0 has one.
pub struct MetricsLog {
    path: PathBuf,
    file: File,
    last_step: u64,
    validations: Validations,
}

/// Validation losses of a run so far, those of its former lives included.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Validations {
    /// The last one, with its step.
    pub last: Option<(f64, u64)>,
    /// The lowest one, with its step.
    pub best: Option<(f64, u64)>,
}

impl Validations {
    fn add(&mut self, step: u64, loss: f64) {
        self.last = Some((loss, step));
        if self.best.is_none_or(|(best, _)| loss < best) {
            self.best = Some((loss, step));
        }
    }
}

impl MetricsLog {
    /// Opens `path` for appending after the lines of `step` finished steps: later lines, and a line that was
    /// cut off by a crash, are dropped first. A missing file is an empty one.
    pub fn open(path: &Path, step: u64) -> Result<Self, RunFilesError> {
        let (last_step, validations) = Self::drop_after(path, step)?;
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map_err(|e| RunFilesError::io("open", path, &e))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            last_step,
            validations,
        })
    }

    /// Step of the last line; 0 without lines.
    pub const fn last_step(&self) -> u64 {
        self.last_step
    }

    /// The validation losses of all lines, including those from before it was opened.
    pub const fn validations(&self) -> Validations {
        self.validations
    }

    /// Appends a line. It is handed to the system whole before this returns, so that a reader sees it and a
    /// killed worker loses none. What of it fits on a full disk is taken back, so that later lines are whole. In a deleted
    /// file it is lost.
    pub fn append(&mut self, line: &MetricsLine) -> Result<(), RunFilesError> {
        self.last_step = line.step;
        if let Some(loss) = line.val_loss {
            self.validations.add(line.step, loss);
        }
        // String keys and numbers only: cannot fail.
        let mut bytes = serde_json::to_vec(line).expect("metrics serialise");
        bytes.push(b'\n');
        let end = self.file.metadata().map(|file| file.len());
        let written = self.file.write_all(&bytes);
        if let (Err(_), Ok(end)) = (&written, end) {
            // The error that counts is on its way.
            let _ = self.file.set_len(end);
        }
        written.map_err(|e| RunFilesError::io("append to", &self.path, &e))?;
        self.check()
    }

    /// An error if the file is not where it was opened.
    pub fn check(&self) -> Result<(), RunFilesError> {
        let is_gone = matches!(self.path.try_exists(), Ok(false));
        (!is_gone)
            .then_some(())
            .ok_or_else(|| RunFilesError::Gone(self.path.clone()))
    }

    fn drop_after(path: &Path, step: u64) -> Result<(u64, Validations), RunFilesError> {
        let mut old = Vec::new();
        match open_to_read(path).and_then(|mut file| file.read_to_end(&mut old)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((0, Validations::default())),
            read => read.map_err(|e| RunFilesError::io("read", path, &e))?,
        };
        let (mut kept, mut validations, mut last_step) =
            (Vec::with_capacity(old.len()), Validations::default(), 0);
        for line in old
            .split_inclusive(|b| *b == b'\n')
            .filter(|line| line.ends_with(b"\n"))
        {
            let Ok(found) = serde_json::from_slice::<Kept>(line) else {
                continue;
            };
            if found.step <= step {
                kept.extend(line);
                last_step = found.step;
                if let Some(loss) = found.val_loss {
                    validations.add(found.step, loss);
                }
            }
        }
        if kept != old {
            replace_file(path, &kept)?;
        }
        Ok((last_step, validations))
    }
}

/// The fields of a line that decide whether it is kept, and that are remembered.
#[derive(Deserialize)]
struct Kept {
    step: u64,
    #[serde(default)]
    val_loss: Option<f64>,
}

/// What rank 0 records after each step.
///
/// `step` counts finished steps: the first line has 1, and a checkpoint of step `N` belongs to lines `1..=N`.
/// A number that is not finite is written as `null`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MetricsLine {
    /// Steps finished, this one included.
    pub step: u64,
    /// Passes over the data so far, as a fraction.
    pub epoch: f64,
    /// Training loss, mean over all ranks, nats per token.
    #[serde(deserialize_with = "number")]
    pub loss: f64,
    /// Validation loss, nats per token; only after a validation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub val_loss: Option<f64>,
    /// How experts were used, if there are some.
    #[serde(flatten)]
    pub experts: Option<ExpertMetrics>,
    /// Learning rate of this step.
    pub lr: f64,
    /// Global norm of the gradient before clipping.
    #[serde(deserialize_with = "number")]
    pub grad_norm: f64,
    /// Steps without effect, because loss or gradient was not finite, since this life of the run began.
    pub skipped: u64,
    /// Tokens consumed by all ranks since the run began.
    pub tokens: u64,
    /// Tokens a second in this step, over all ranks.
    pub tokens_per_s: f64,
    /// The same as arithmetic.
    #[serde(flatten)]
    pub achieved: Achieved,
    /// Wall time of the step.
    pub step_ms: f64,
    /// Part of the step: reading samples.
    pub data_ms: f64,
    /// Part of the step: forward, without waiting for communication.
    pub forward_ms: f64,
    /// Part of the step: backward, without waiting for communication.
    pub backward_ms: f64,
    /// Averaging of gradients and gathering of parameters, waits for other ranks included, hidden behind arithmetic or
    /// not.
    pub comm_ms: f64,
    /// Part of the step: waits for it, of the host or of the stream that computes, wherever they are: what nothing else
    /// hid.
    pub comm_exposed_ms: f64,
    /// Part of the step: exchanging losses and norms with other ranks, as far as backward did not hide it; a rank also
    /// waits for slower ones here.
    pub share_ms: f64,
    /// Part of the step: clipping and the optimizer.
    pub optimizer_ms: f64,
    /// Before the step: time for which checkpoints blocked training since the step before.
    pub checkpoint_ms: f64,
    /// Bytes that this rank moved between itself and others in this step, counted at the transport: see
    /// [`WireBytes`].
    pub wire_bytes: WireBytes,
    /// Number of ranks.
    pub world_size: u32,
    /// Generation of the job.
    pub generation: u64,
    /// Bytes of this rank.
    pub memory: Memory,
}

/// How the experts of all layers were used in a step, over all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpertMetrics {
    /// Tokens of the expert with the most, in terms of the mean of its layer: 1 where all have as many.
    pub expert_load: f64,
    /// Share of the tokens' choices that an expert had no room for.
    pub expert_dropped: f64,
    /// `E · Σ f_e · p_e` of the step's tokens, mean over layers: `top_k` where all experts have as many.
    pub balance_loss: f64,
    /// Mean square of the logarithms of the router's softmax denominators.
    pub router_z_loss: f64,
}

/// Arithmetic of the model a second, over all ranks: that of [`crate::costs::Work`], without what recomputation repeats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Achieved {
    /// Floating-point operations a second.
    pub model_flops_per_s: f64,
    /// Model FLOP utilisation: its share of the peak rate of all ranks' GPUs in `train.precision` (Chowdhery et al. 2022,
    /// section 4.1). None on CPUs, and for GPUs without a data sheet in [`crate::costs::Accelerator`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
}

impl fmt::Display for Achieved {
    /// `380 TFLOP/s, MFU 38.4%`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = rate(self.model_flops_per_s);
        let digits = rate.trim_end_matches(char::is_alphabetic);
        write!(f, "{digits} {}FLOP/s", &rate[digits.len()..])?;
        self.mfu
            .map_or(Ok(()), |mfu| write!(f, ", MFU {:.1}%", mfu * 1e2))
    }
}

/// `null` is what became of a number that is not finite.
fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// Bytes held, by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// Parameters.
    pub params: u64,
    /// Gradients.
    pub grads: u64,
    /// Moments and master weights.
    pub optimizer: u64,
    /// Moments and master weights in memory of the host beside a GPU, with the page-locked memory through which updates go; 0 elsewhere.
    pub optimizer_host: u64,
    /// Moments and master weights in a file, of which `optimizer` is resident; 0 elsewhere.
    pub optimizer_file: u64,
    /// Shards of parameters and gradients in memory of the host beside a GPU; 0 elsewhere.
    pub params_host: u64,
    /// The same in a file, of which `params` and `grads` are resident; 0 elsewhere.
    pub params_file: u64,
    /// Activations and their gradients: the pool that they share, which keeps the size of its peak.
    pub activations: u64,
    /// Parameters gathered at the moment; 0 where every rank holds all of them.
    pub gathered: u64,
    /// Host memory for the copy of what is being saved, set aside at the start.
    pub checkpoint: u64,
    /// Most bytes of a GPU's memory that this rank held at one time; 0 on the processor.
    pub device_peak: u64,
    /// Largest resident set of the process so far.
    pub peak_rss: u64,
    /// Proportional set: shared pages count by their share. Both as of at most a second ago.
    pub pss: u64,
}

/// `summary.json`: what is known when a run ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// `run.name`.
    pub name: String,
    /// Run id of the job.
    pub run_id: String,
    /// Steps finished since the run began.
    pub steps: u64,
    /// True when all steps of the configuration are done and saved; false when the run was asked to stop before its last
    /// step, or when its last state could not be saved.
    pub complete: bool,
    /// Why the run was asked to stop before its last step, such as the name of a signal; none unless its state was saved
    /// then. Started again, the same job goes on.
    #[serde(default)]
    pub stopped: Option<String>,
    /// Samples consumed since the run began.
    pub samples: u64,
    /// Tokens consumed since the run began.
    pub tokens: u64,
    /// Number of parameters.
    pub parameters: u64,
    /// Training loss of the last step, nats per token.
    pub loss: Option<f64>,
    /// Validation loss at the end, nats per token.
    pub val_loss: Option<f64>,
    /// The lowest validation loss since the run began.
    #[serde(default)]
    pub best_val_loss: Option<f64>,
    /// The step after which it was measured.
    #[serde(default)]
    pub best_val_step: Option<u64>,
    /// Bytes of text per token of the validation data, if their files record it.
    #[serde(default)]
    pub bytes_per_token: Option<f64>,
    /// Wall time of this life of the run, start to end.
    pub seconds: f64,
    /// Tokens a second over the steps of this life, over all ranks.
    pub tokens_per_s: f64,
    /// The same as arithmetic.
    #[serde(flatten)]
    pub achieved: Achieved,
    /// Number of ranks at the end.
    pub world_size: u32,
    /// Generation at the end.
    pub generation: u64,
    /// Restarts of the job before this life.
    pub restarts: u32,
    /// Name of the last checkpoint below `checkpoints/`, if there is one.
    pub checkpoint: Option<String>,
    /// Checkpoints of this life that could not be saved.
    #[serde(default)]
    pub failed_saves: u64,
    /// Bytes of rank 0's GPU that are in use at the end, by all processes; `None` without a GPU.
    #[serde(default)]
    pub device_taken: Option<u64>,
}

impl Summary {
    /// The summary that an earlier life of the run wrote to `path`, if it can be read.
    pub fn read(path: &Path) -> Option<Self> {
        let mut bytes = Vec::new();
        open_to_read(path).ok()?.read_to_end(&mut bytes).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Deletes the file at `path`; one that is not there is fine.
    pub fn delete(path: &Path) -> Result<(), RunFilesError> {
        delete_file(path)
    }

    /// Replaces the file at `path` as a whole.
    pub fn write(&self, path: &Path) -> Result<(), RunFilesError> {
        // String keys, numbers and strings only: cannot fail.
        let mut bytes = serde_json::to_vec_pretty(self).expect("a summary serialises");
        bytes.push(b'\n');
        replace_file(path, &bytes)
    }
}

/// The folder `timeline` of a run. A file is there as a whole or not at all.
#[derive(Clone, Debug)]
pub struct TimelineFiles {
    folder: PathBuf,
}

impl TimelineFiles {
    /// The timeline files of the run in this folder. Touches nothing.
    pub fn of_run(out_dir: &Path) -> Self {
        Self {
            folder: out_dir.join(FOLDER),
        }
    }

    /// Writes the trace of one rank.
    pub fn write_rank(&self, rank: usize, json: &[u8]) -> Result<(), RunFilesError> {
        write(&self.of_rank(rank), json)
    }

    /// The path that [`TimelineFiles::write_rank`] writes to.
    pub fn of_rank(&self, rank: usize) -> PathBuf {
        self.folder.join(RANKS).join(format!("rank_{rank:05}.json"))
    }

    /// Writes the trace of all ranks. Returns its path.
    pub fn write_trace(&self, json: &[u8]) -> Result<PathBuf, RunFilesError> {
        let path = self.folder.join(TRACE);
        write(&path, json).map(|()| path)
    }

    /// Writes the picture. Returns its path.
    pub fn write_picture(&self, svg: &str) -> Result<PathBuf, RunFilesError> {
        let path = self.folder.join(PICTURE);
        write(&path, svg.as_bytes()).map(|()| path)
    }

    /// Deletes what a run writes here, and the folders if nothing else is in them.
    pub(super) fn delete(&self) -> Result<(), RunFilesError> {
        let ranks = self.folder.join(RANKS);
        let listed = match fs::read_dir(&ranks) {
            Ok(listed) => listed.map(|entry| entry.map(|entry| entry.path())).collect(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(e),
        };
        let listed: Vec<PathBuf> = listed.map_err(|e| RunFilesError::io("read", &ranks, &e))?;
        let of_ranks = listed.into_iter().filter(|path| is_of_rank(path));
        for path in of_ranks.chain([self.folder.join(TRACE), self.folder.join(PICTURE)]) {
            delete_file(&path)?;
        }
        for folder in [&ranks, &self.folder] {
            // Absent, or not empty: somebody else's files stay.
            let _ = fs::remove_dir(folder);
        }
        Ok(())
    }
}

fn is_of_rank(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let number = name.and_then(|name| name.strip_prefix("rank_")?.strip_suffix(".json"));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), RunFilesError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(|e| RunFilesError::io("create", folder, &e))?;
    replace_file(path, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(path: &Path) -> Vec<u64> {
        let text = fs::read_to_string(path).unwrap();
        text.lines()
            .map(|l| serde_json::from_str::<MetricsLine>(l).unwrap().step)
            .collect()
    }

    fn line(step: u64) -> MetricsLine {
        MetricsLine {
            step,
            loss: 2.5,
            ..MetricsLine::default()
        }
    }

    #[test]
    fn a_rollback_drops_later_lines_and_appending_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut log = MetricsLog::open(&path, 0).unwrap();
        for step in 1..=5 {
            log.append(&line(step)).unwrap();
        }
        assert_eq!(steps(&path), [1, 2, 3, 4, 5]);
        let mut log = MetricsLog::open(&path, 2).unwrap();
        log.append(&line(3)).unwrap();
        assert_eq!(steps(&path), [1, 2, 3]);
        assert_eq!(
            fs::read_dir(folder.path()).unwrap().count(),
            1,
            "a temporary file is left"
        );
    }

    #[test]
    fn a_line_in_a_deleted_file_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut log = MetricsLog::open(&path, 0).unwrap();
        log.append(&line(1)).unwrap();
        fs::remove_file(&path).unwrap();
        let lost = log.append(&line(2)).unwrap_err().to_string();
        assert!(
            lost.contains("metrics.jsonl` was deleted or moved during the run"),
            "{lost}"
        );
    }

    #[test]
    fn validations_are_those_of_the_lines_that_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let validated = |step, loss| MetricsLine {
            val_loss: Some(loss),
            ..line(step)
        };
        let mut log = MetricsLog::open(&path, 0).unwrap();
        for (step, loss) in [(2, 3.0), (4, 2.0), (6, 1.0)] {
            log.append(&line(step - 1)).unwrap();
            log.append(&validated(step, loss)).unwrap();
        }
        let mut log = MetricsLog::open(&path, 5).unwrap();
        let expected = |last, best| Validations {
            last: Some(last),
            best: Some(best),
        };
        assert_eq!(log.validations(), expected((2.0, 4), (2.0, 4)));
        log.append(&validated(6, 2.5)).unwrap();
        assert_eq!(log.validations(), expected((2.5, 6), (2.0, 4)));
    }

    #[test]
    fn a_line_cut_off_by_a_crash_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        fs::write(&path, "{\"step\":1,\"loss\":null}\n{\"step\":2,\"lo").unwrap();
        MetricsLog::open(&path, 9).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "{\"step\":1,\"loss\":null}\n");
    }

    #[test]
    fn a_line_has_the_documented_fields() {
        let text = serde_json::to_string(&line(1)).unwrap();
        insta::assert_snapshot!(text, @r#"{"step":1,"epoch":0.0,"loss":2.5,"lr":0.0,"grad_norm":0.0,"skipped":0,"tokens":0,"tokens_per_s":0.0,"model_flops_per_s":0.0,"step_ms":0.0,"data_ms":0.0,"forward_ms":0.0,"backward_ms":0.0,"comm_ms":0.0,"comm_exposed_ms":0.0,"share_ms":0.0,"optimizer_ms":0.0,"checkpoint_ms":0.0,"wire_bytes":{"grads":0,"params":0,"activations":0,"pipeline":0,"other":0},"world_size":0,"generation":0,"memory":{"params":0,"grads":0,"optimizer":0,"optimizer_host":0,"optimizer_file":0,"params_host":0,"params_file":0,"activations":0,"gathered":0,"checkpoint":0,"device_peak":0,"peak_rss":0,"pss":0}}"#);
    }

    #[test]
    fn a_number_that_is_not_finite_can_be_read_again() {
        let skipped = MetricsLine {
            loss: f64::NAN,
            grad_norm: f64::INFINITY,
            ..line(1)
        };
        let text = serde_json::to_string(&skipped).unwrap();
        let read: MetricsLine = serde_json::from_str(&text).unwrap();
        assert!(read.loss.is_nan() && read.grad_norm.is_nan(), "{text}");
    }

    #[test]
    fn a_pipe_is_no_log_and_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let error = MetricsLog::open(&path, 0).err().unwrap().to_string();
        assert!(error.ends_with("metrics.jsonl`: not a regular file"), "{error}");
    }

    #[test]
    fn a_log_that_cannot_be_opened_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = MetricsLog::open(folder.path(), 0).err().unwrap();
        assert!(
            error.to_string().contains(folder.path().to_str().unwrap()),
            "{error}"
        );
    }

    #[test]
    fn a_summary_replaces_the_one_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("summary.json");
        let mut summary = Summary {
            name: "train".into(),
            run_id: "r".into(),
            steps: 3,
            complete: true,
            stopped: None,
            samples: 48,
            tokens: 6144,
            parameters: 10,
            loss: Some(2.5),
            val_loss: None,
            best_val_loss: Some(2.25),
            best_val_step: Some(2),
            bytes_per_token: Some(1.0),
            seconds: 1.5,
            tokens_per_s: 4096.0,
            achieved: Achieved::default(),
            world_size: 2,
            generation: 1,
            restarts: 0,
            checkpoint: Some("step_00000003".into()),
            failed_saves: 1,
            device_taken: Some(1 << 30),
        };
        summary.write(&path).unwrap();
        summary.steps = 4;
        summary.write(&path).unwrap();
        assert_eq!(Summary::read(&path), Some(summary));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_pipe_is_no_summary_and_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("summary.json");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(Summary::read(&path), None);
    }

    #[test]
    fn only_what_a_run_writes_is_deleted() {
        let run = tempfile::tempdir().unwrap();
        let files = TimelineFiles::of_run(run.path());
        files.delete().unwrap();
        let write = || {
            files.write_rank(0, b"{}").unwrap();
            files.write_rank(123_456, b"{}").unwrap();
            files.write_trace(b"{}").unwrap();
            files.write_picture("<svg/>").unwrap();
        };
        write();
        files.delete().unwrap();
        assert!(!run.path().join(FOLDER).exists());
        write();
        let kept = run.path().join("timeline/ranks/rank_of_mine.json");
        fs::write(&kept, "mine").unwrap();
        files.delete().unwrap();
        let left: Vec<_> = fs::read_dir(run.path().join(FOLDER)).unwrap().collect();
        assert!(kept.exists() && left.len() == 1);
    }
}
