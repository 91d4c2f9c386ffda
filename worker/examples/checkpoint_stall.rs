//! How much checkpoints slow training down: the same run without them, with them beside the training, and with
//! training standing still meanwhile. The runs alternate, so that a machine that drifts does so for all of them.
//!
//!     cargo run --release -p ddp-worker --example checkpoint_stall                    2 ranks, 6 × 384, every 5 steps
//!     cargo run --release -p ddp-worker --example checkpoint_stall -- --turns 1 --steps 31 --every 10 \
//!         --layers 12 --channels 768 --folder /mnt/disk
//!
//! A step with a save in it is the one that follows the save: the time for which the save held training up before it,
//! and the step itself, beside which the files are written. All other steps are without; where writing takes longer
//! than one step, those of the same run show it, so all shares are of the median step, or the mean, of the run that
//! saves nothing. The first step is left out. Prints Markdown.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::{GlobalRank, LocalRank, WorldSize};
use ddp_worker::config::{self, ModelKind, TrainConfig};
use ddp_worker::metrics::MetricsLine;
use ddp_worker::session::{MemoryStore, Session};
use ddp_worker::train::run_worker;

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let sizes = Sizes::from_args()?;
    let folder = tempfile::tempdir_in(&sizes.folder)?;
    let text: String = (0..400_000_u32)
        .map(|i| char::from(b'a' + (i % 23 * (i % 7) % 26) as u8))
        .collect();
    let data = folder.path().join("text");
    std::fs::write(&data, text)?;
    let modes = [
        ("no saves", 0, true),
        ("beside training", sizes.every, true),
        ("training stands still", sizes.every, false),
    ];
    let mut found = modes.map(|_| Steps::default());
    for turn in 0..sizes.turns {
        for ((name, every, beside), steps) in modes.iter().zip(&mut found) {
            let mut config = sizes.config(&data);
            let out_dir = folder.path().join(format!("{name} {turn}"));
            config.run.out_dir = Some(out_dir.clone());
            config.train.checkpoint_every = *every;
            config.train.checkpoint_async = *beside;
            train(&config, sizes.ranks)?;
            steps.add(&out_dir, *every)?;
            std::fs::remove_dir_all(&out_dir)?;
        }
    }
    print(&modes.map(|(name, ..)| name), &mut found);
    Ok(())
}

fn print(names: &[&str], found: &mut [Steps]) {
    let plain = Spread::of(&mut found[0].without);
    let plain_mean = found[0].mean();
    println!(
        "\n| | step without a save | step with a save | longer | of it training stood still | longest step | mean of all steps |"
    );
    println!("|---|---|---|---|---|---|---|");
    for (name, steps) in names.iter().zip(found) {
        let slower = (steps.mean() / plain_mean - 1.0) * 100.0;
        let without = Spread::of(&mut steps.without);
        if steps.with.is_empty() {
            println!(
                "| {name} | {without} | | | | {:.0} ms | {plain_mean:.1} ms |",
                without.most
            );
            continue;
        }
        let with = Spread::of(&mut steps.with);
        let longer = (with.median / plain.median - 1.0) * 100.0;
        let stood = Spread::of(&mut steps.stood);
        let share = stood.median / plain.median * 100.0;
        println!(
            "| {name}, {} saves | {without} | {with} | {longer:+.1} % | {stood}: {share:.1} % | {:.0} ms | {slower:+.1} % |",
            steps.with.len(),
            with.most.max(without.most)
        );
    }
}

/// Milliseconds of steps of one way to save.
#[derive(Default)]
struct Steps {
    without: Vec<f64>,
    with: Vec<f64>,
    /// Of those with a save: for how long it held training up.
    stood: Vec<f64>,
}

impl Steps {
    fn add(&mut self, out_dir: &Path, every: u64) -> Result<(), Failure> {
        let text = std::fs::read_to_string(out_dir.join("metrics.jsonl"))?;
        let lines: Vec<MetricsLine> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        for line in &lines[1..] {
            let has_save = every > 0 && (line.step - 1).is_multiple_of(every);
            // The next save may wait for this one.
            assert!(
                has_save || line.checkpoint_ms == 0.0,
                "a save before step {}",
                line.step
            );
            let all_ms = line.step_ms + line.checkpoint_ms;
            if has_save {
                self.with.push(all_ms);
                self.stood.push(line.checkpoint_ms);
            } else {
                self.without.push(all_ms);
            }
        }
        assert!(!self.with.is_empty() || every == 0, "no step followed a save");
        Ok(())
    }

    fn mean(&self) -> f64 {
        let all = self.without.iter().chain(&self.with);
        all.sum::<f64>() / (self.without.len() + self.with.len()) as f64
    }
}

/// Of some milliseconds.
struct Spread {
    median: f64,
    least: f64,
    most: f64,
}

impl Spread {
    /// Sorts them; there is at least one.
    fn of(values: &mut [f64]) -> Self {
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let median = if values.len().is_multiple_of(2) {
            f64::midpoint(values[middle - 1], values[middle])
        } else {
            values[middle]
        };
        Self {
            median,
            least: values[0],
            most: values[values.len() - 1],
        }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { median, least, most } = self;
        write!(f, "{median:.1} ms ({least:.1} to {most:.1})")
    }
}

/// All ranks as threads of this process.
fn train(config: &TrainConfig, ranks: u32) -> Result<(), Failure> {
    let store = Arc::new(MemoryStore::default());
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..ranks)
            .map(|rank| {
                let mut env = WorkerEnv::single();
                env.rank = GlobalRank(rank);
                env.local_rank = LocalRank(rank);
                env.world_size = WorldSize(ranks);
                env.local_world_size = ranks;
                let session = Session::in_process(env, store.clone());
                scope.spawn(move || run_worker(config, &session).map(drop))
            })
            .collect();
        let ended = ranks.into_iter().map(std::thread::ScopedJoinHandle::join);
        for outcome in ended {
            outcome.map_err(|_| "a rank panicked")??;
        }
        Ok(())
    })
}

struct Sizes {
    ranks: u32,
    turns: u32,
    steps: u64,
    every: u64,
    layers: usize,
    channels: usize,
    folder: PathBuf,
}

impl Sizes {
    fn from_args() -> Result<Self, Failure> {
        let mut sizes = Self {
            ranks: 2,
            turns: 2,
            steps: 16,
            every: 5,
            layers: 6,
            channels: 384,
            folder: std::env::temp_dir(),
        };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let value = words.next().ok_or_else(|| format!("`{word}` needs a value"))?;
            match word.as_str() {
                "--ranks" => sizes.ranks = value.parse()?,
                "--turns" => sizes.turns = value.parse()?,
                "--steps" => sizes.steps = value.parse()?,
                "--every" => sizes.every = value.parse()?,
                "--layers" => sizes.layers = value.parse()?,
                "--channels" => sizes.channels = value.parse()?,
                "--folder" => sizes.folder = value.into(),
                _ => {
                    return Err(format!(
                        "`{word}` is none of --ranks, --turns, --steps, --every, --layers, --channels, --folder"
                    )
                    .into());
                }
            }
        }
        Ok(sizes)
    }

    fn config(&self, data: &Path) -> TrainConfig {
        let mut config = TrainConfig {
            run: config::Run::default(),
            model: config::Model {
                kind: ModelKind::Gpt2,
                n_layer: self.layers,
                n_head: self.channels / 64,
                n_embd: self.channels,
                block_size: 256,
                vocab_size: None,
                dropout: 0.0,
                ..config::Model::default()
            },
            data: config::Data {
                train: data.to_owned().into(),
                val: None,
                tokenizer: config::Tokenizer::Bytes,
                dtype: None,
                order: config::Order::Shuffled,
                last_batch: config::LastBatch::Wrap,
            },
            train: config::Train::default(),
            parallel: config::Parallel::default(),
            launch: BTreeMap::new(),
            vocabulary: Arc::default(),
        };
        config.train.steps = self.steps;
        config.train.micro_batch = 8;
        config.train.threads = Some(1);
        config
    }
}
