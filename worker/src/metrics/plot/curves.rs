//! The numbers of a run over its steps, read in one pass and in bounded memory. If a run has more
//! steps than the picture has columns, neighbouring steps are merged into their mean, lowest and
//! highest value.

use std::io::{self, BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};

use crate::checkpoint::open_to_read;
use crate::metrics::{MetricsLine, RunFilesError};

/// Columns of pixels of a picture: no curve has more than twice as many points.
const COLUMNS: usize = 800;
/// Longest line of `metrics.jsonl`: a longer one is invalid.
const MAX_LINE_BYTES: u64 = 64 << 10;
/// Most invalid lines that are listed; the others are only counted.
const MAX_NAMED: usize = 3;
/// Most restarts that are marked: the first ones of the run.
const MAX_RESTARTS: usize = 256;

/// What is drawn of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunCurves {
    /// What the legend calls it.
    pub name: String,
    /// Last step.
    pub steps: u64,
    /// Where invalid lines are, and why they are invalid. They are skipped.
    pub bad_lines: Vec<String>,
    pub(super) loss: Curve,
    pub(super) val_loss: Curve,
    pub(super) lr: Curve,
    pub(super) tokens_per_s: Curve,
    pub(super) grad_norm: Curve,
    /// Steps that were the first ones of a generation, and what is different from then on.
    pub(super) restarts: Vec<(u64, String)>,
}

impl RunCurves {
    /// Reads a `metrics.jsonl`. `path` is that file, or the directory of a run.
    pub fn read(path: &Path) -> Result<Self, RunFilesError> {
        let file = metrics_of(path);
        let failed = |error: io::Error| RunFilesError::io("read", &file, &error);
        let mut reader = BufReader::new(open_to_read(&file).map_err(failed)?);
        let mut run = Self {
            name: path.display().to_string(),
            ..Self::default()
        };
        let (mut bytes, mut number, mut bad, mut last) = (Vec::new(), 0_u64, 0, None);
        loop {
            bytes.clear();
            let mut line = reader.by_ref().take(MAX_LINE_BYTES);
            if line.read_until(b'\n', &mut bytes).map_err(failed)? == 0 {
                break;
            }
            number += 1;
            let is_long = !bytes.ends_with(b"\n") && bytes.len() as u64 == MAX_LINE_BYTES;
            let is_whole = bytes.ends_with(b"\n") || is_long;
            let parsed = if is_long {
                reader.skip_until(b'\n').map_err(failed)?;
                Err("too long".to_owned())
            } else {
                run.parse(&bytes)
            };
            match parsed {
                Ok(line) => {
                    run.add(&line, last.as_ref());
                    last = Some(line);
                }
                // The last line is still being written.
                Err(_) if !is_whole => {}
                Err(why) => {
                    bad += 1;
                    if bad <= MAX_NAMED {
                        run.bad_lines.push(format!("{}:{number}: {why}", file.display()));
                    }
                }
            }
        }
        if bad > MAX_NAMED {
            run.bad_lines.push(format!("and {} more", bad - MAX_NAMED));
        }
        if run.steps == 0 {
            return Err(RunFilesError::Refused(format!(
                "`{}` has no line of metrics\n  hint: pass the directory of a run that has finished at least one step",
                file.display()
            )));
        }
        Ok(run)
    }

    fn parse(&self, bytes: &[u8]) -> Result<MetricsLine, String> {
        let line: MetricsLine =
            serde_json::from_slice(bytes).map_err(|e| format!("not a line of metrics: {e}"))?;
        if line.step <= self.steps {
            return Err(format!(
                "step {} does not come after step {}",
                line.step, self.steps
            ));
        }
        Ok(line)
    }

    fn add(&mut self, line: &MetricsLine, before: Option<&MetricsLine>) {
        self.steps = line.step;
        for (curve, value) in [
            (&mut self.loss, Some(line.loss)),
            (&mut self.val_loss, line.val_loss),
            (&mut self.lr, Some(line.lr)),
            (&mut self.tokens_per_s, Some(line.tokens_per_s)),
            (&mut self.grad_norm, Some(line.grad_norm)),
        ] {
            if let Some(value) = value.filter(|value| value.is_finite()) {
                curve.add(line.step, value);
            }
        }
        let restart = before.filter(|before| before.generation != line.generation);
        if let Some(before) = restart.filter(|_| self.restarts.len() < MAX_RESTARTS) {
            let ranks = match (before.world_size, line.world_size) {
                (was, is) if was == is => String::new(),
                (was, is) => format!(", {was} → {is} ranks"),
            };
            let words = format!("generation {}{ranks}", line.generation);
            self.restarts.push((line.step, words));
        }
    }
}

/// The `metrics.jsonl` in a directory, or the file that `path` names.
fn metrics_of(path: &Path) -> PathBuf {
    if path.is_dir() {
        path.join("metrics.jsonl")
    } else {
        path.to_owned()
    }
}

/// A number over the steps.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Curve {
    /// Number of steps that one point stands for.
    width: u64,
    /// By step / width, ascending.
    points: Vec<(u64, Point)>,
}

/// Some steps next to each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    count: f64,
    steps: f64,
    sum: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Point {
    const fn new(step: u64, value: f64) -> Self {
        Self {
            count: 1.0,
            steps: step as f64,
            sum: value,
            min: value,
            max: value,
        }
    }

    fn join(&mut self, other: &Self) {
        self.count += other.count;
        self.steps += other.steps;
        self.sum += other.sum;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// Mean step.
    pub(super) fn step(&self) -> f64 {
        self.steps / self.count
    }

    pub(super) fn mean(&self) -> f64 {
        self.sum / self.count
    }
}

impl Default for Curve {
    fn default() -> Self {
        Self {
            width: 1,
            points: Vec::new(),
        }
    }
}

impl Curve {
    /// Steps come in ascending order.
    fn add(&mut self, step: u64, value: f64) {
        self.push(step / self.width, &Point::new(step, value));
        if self.points.len() > 2 * COLUMNS {
            self.width *= 2;
            for (index, point) in std::mem::take(&mut self.points) {
                self.push(index / 2, &point);
            }
        }
    }

    fn push(&mut self, index: u64, point: &Point) {
        match self.points.last_mut() {
            Some((last, joined)) if *last == index => joined.join(point),
            _ => self.points.push((index, *point)),
        }
    }

    pub(super) fn points(&self) -> impl Iterator<Item = &Point> + Clone {
        self.points.iter().map(|(_, point)| point)
    }

    /// Some points stand for several steps.
    pub(super) const fn is_merged(&self) -> bool {
        self.width > 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<RunCurves, String> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("metrics.jsonl"), text).unwrap();
        let hidden = |words: String| words.replace(folder.path().to_str().unwrap(), "RUN");
        let mut run = RunCurves::read(folder.path()).map_err(|e| hidden(e.to_string()))?;
        run.bad_lines = run.bad_lines.into_iter().map(hidden).collect();
        Ok(run)
    }

    fn values(curve: &Curve) -> Vec<(f64, f64)> {
        curve.points().map(|point| (point.step(), point.mean())).collect()
    }

    #[test]
    fn numbers_are_read_by_step() {
        let run = read(
            "{\"step\":1,\"loss\":3.0,\"lr\":0.1,\"grad_norm\":null,\"generation\":1,\"world_size\":2}\n\
             {\"step\":2,\"loss\":2.0,\"val_loss\":2.5,\"grad_norm\":1.5,\"generation\":1,\"world_size\":2}\n\
             {\"step\":3,\"loss\":1.0,\"generation\":2,\"world_size\":1}\n",
        )
        .unwrap();
        assert_eq!(values(&run.loss), [(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]);
        assert_eq!(values(&run.val_loss), [(2.0, 2.5)]);
        // What is not finite is not drawn.
        assert_eq!(values(&run.grad_norm)[0], (2.0, 1.5));
        assert_eq!(run.restarts, [(3, "generation 2, 2 → 1 ranks".to_owned())]);
        assert_eq!((run.steps, run.bad_lines.len()), (3, 0));
    }

    #[test]
    fn bad_lines_are_named_and_one_that_is_being_written_is_not() {
        let long = "x".repeat(MAX_LINE_BYTES as usize + 10);
        let text = format!(
            "{{\"step\":1}}\nnonsense\n{long}\n{{\"loss\":1}}\n{{\"step\":1}}\n{{\"step\":2}}\n{{\"st"
        );
        let run = read(&text).unwrap();
        assert_eq!(run.steps, 2);
        insta::assert_snapshot!(run.bad_lines.join("\n"), @"
        RUN/metrics.jsonl:2: not a line of metrics: expected ident at line 1 column 2
        RUN/metrics.jsonl:3: too long
        RUN/metrics.jsonl:4: step 0 does not come after step 1
        and 1 more
        ");
        insta::assert_snapshot!(read("{}\n").unwrap_err(), @"
        `RUN/metrics.jsonl` has no line of metrics
          hint: pass the directory of a run that has finished at least one step
        ");
    }

    #[test]
    fn of_many_steps_the_extremes_stay() {
        let mut curve = Curve::default();
        let steps = 1_000_000;
        for step in 1..=steps {
            let value = match step {
                777_777 => 100.0,
                333_333 => -100.0,
                _ => 1.0,
            };
            curve.add(step, value);
        }
        let count = curve.points().count();
        assert!((COLUMNS..=2 * COLUMNS).contains(&count), "{count} points");
        let all: f64 = curve.points().map(|point| point.count).sum();
        assert_eq!(all, steps as f64);
        let min = curve
            .points()
            .map(|point| point.min)
            .fold(f64::INFINITY, f64::min);
        let max = curve.points().map(|point| point.max).fold(0.0, f64::max);
        assert_eq!((min, max), (-100.0, 100.0));
        let places: Vec<f64> = curve.points().map(Point::step).collect();
        assert!(places.is_sorted());
    }
}
