//! How much checkpoints slow training down: the same run without them, with them beside the training, and with
//! training standing still meanwhile.
//!
//!     cargo run --release -p ddp-worker --example checkpoint_stall                    2 ranks, 6 × 384, every 5 steps
//!     cargo run --release -p ddp-worker --example checkpoint_stall -- --ranks 2 --steps 31 --every 10 \
//!         --layers 12 --channels 768 --folder /mnt/disk
//!
//! A row shows the mean time of a step (the first one left out), the time for which saves held training up for each
//! save, and both together against the run without saves.

use std::collections::BTreeMap;
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
    let mut rows = Vec::new();
    for (name, every, beside) in [
        ("no saves", 0, true),
        ("beside training", sizes.every, true),
        ("training stands still", sizes.every, false),
    ] {
        let mut config = sizes.config(&data);
        config.run.out_dir = Some(folder.path().join(name));
        config.train.checkpoint_every = every;
        config.train.checkpoint_async = beside;
        train(&config, sizes.ranks)?;
        rows.push((name, Row::of(&folder.path().join(name), every)?));
    }
    let plain = rows[0].1.step_ms;
    println!(
        "\n{:24}{:>12}{:>8}{:>16}{:>12}{:>10}",
        "", "ms a step", "saves", "ms a save stood", "ms in all", "slower"
    );
    for (name, row) in rows {
        let slower = (row.all_ms / plain - 1.0) * 100.0;
        println!(
            "{name:24}{:>12.1}{:>8}{:>16.1}{:>12.1}{slower:>9.1}%",
            row.step_ms, row.saves, row.stood_ms, row.all_ms
        );
    }
    Ok(())
}

struct Row {
    step_ms: f64,
    saves: u64,
    /// For each save.
    stood_ms: f64,
    /// A step, and its part of the time that saves took.
    all_ms: f64,
}

impl Row {
    fn of(out_dir: &Path, every: u64) -> Result<Self, Failure> {
        let text = std::fs::read_to_string(out_dir.join("metrics.jsonl"))?;
        let lines: Vec<MetricsLine> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        let steps = &lines[1..];
        let mean = |of: &dyn Fn(&MetricsLine) -> f64| steps.iter().map(of).sum::<f64>() / steps.len() as f64;
        let saves = steps.iter().filter(|line| line.checkpoint_ms > 0.0).count() as u64;
        assert!((saves > 0) == (every > 0), "{saves} saves");
        let (step_ms, stood) = (mean(&|line| line.step_ms), mean(&|line| line.checkpoint_ms));
        Ok(Self {
            step_ms,
            saves,
            stood_ms: stood * steps.len() as f64 / saves.max(1) as f64,
            all_ms: step_ms + stood,
        })
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
                "--steps" => sizes.steps = value.parse()?,
                "--every" => sizes.every = value.parse()?,
                "--layers" => sizes.layers = value.parse()?,
                "--channels" => sizes.channels = value.parse()?,
                "--folder" => sizes.folder = value.into(),
                _ => {
                    return Err(format!(
                        "`{word}` is none of --ranks, --steps, --every, --layers, --channels, --folder"
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
            },
            data: config::Data {
                train: data.to_owned(),
                val: None,
                tokenizer: config::Tokenizer::Bytes,
                order: config::Order::Shuffled,
                last_batch: config::LastBatch::default(),
            },
            train: config::Train::default(),
            parallel: config::Parallel::default(),
            launch: BTreeMap::new(),
        };
        config.train.steps = self.steps;
        config.train.micro_batch = 8;
        config.train.threads = Some(1);
        config
    }
}
