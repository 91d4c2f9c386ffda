//! What the tests of training share: small jobs whose ranks are threads.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

pub mod agent;
pub mod deferred;
pub mod disk;
pub mod faulty;
pub mod hooked;
pub mod probed;
pub mod watched;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::{Generation, GlobalRank, LocalRank, NodeRank, WorldSize};
use ddp_proto::trust::data_key::{DATA_KEY_BYTES, DataKey};
use ddp_worker::checkpoint::{Reader, Storage, TensorKind, Which};
use ddp_worker::config::{self, ModelKind, Order, TrainConfig};
use ddp_worker::device::Device;
use ddp_worker::metrics::MetricsLine;
use ddp_worker::session::{Cancel, MemoryStore, Session};
use ddp_worker::train::{Assignment, RunSummary, TrainError, WrapTransport, run_generations};

pub type Outcome = Result<RunSummary, TrainError>;

/// Which device a rank trains on.
pub type DeviceOf = Box<dyn Fn(&Session) -> Arc<dyn Device> + Sync>;

/// Where a rank puts checkpoints.
pub type StorageOf = Box<dyn Fn(&Session) -> Arc<dyn Storage> + Sync>;

/// What lies between the communicators of a rank and its transport.
pub type TransportOf = Box<dyn Fn(&Session) -> WrapTransport + Sync>;

/// A small job in a folder of its own.
pub struct Job {
    pub config: TrainConfig,
    pub device: Option<DeviceOf>,
    pub transport: Option<TransportOf>,
    pub storage: Option<StorageOf>,
    /// How often the job was restarted before.
    pub restarts: u32,
    /// Over which the ranks are spread evenly, on loopback addresses.
    pub nodes: u32,
    folder: tempfile::TempDir,
}

impl Job {
    /// A GPT-2 of one block on a text of a few thousand bytes.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let train = folder.path().join("text");
        std::fs::write(&train, text()).unwrap();
        let model = config::Model {
            kind: ModelKind::Gpt2,
            n_layer: 1,
            n_head: 2,
            n_embd: 16,
            block_size: 16,
            vocab_size: None,
            dropout: 0.0,
            ..config::Model::default()
        };
        let data = config::Data {
            train: train.into(),
            val: None,
            tokenizer: config::Tokenizer::Bytes,
            dtype: None,
            order: Order::Shuffled,
            last_batch: config::LastBatch::Wrap,
        };
        let mut config = TrainConfig {
            run: config::Run::default(),
            model,
            data,
            train: config::Train::default(),
            parallel: config::Parallel::default(),
            launch: BTreeMap::default(),
            vocabulary: Arc::default(),
        };
        config.run.out_dir = Some(folder.path().join("run"));
        config.train.steps = 6;
        config.train.micro_batch = 2;
        config.train.optimizer.lr = 1e-2;
        config.train.threads = Some(1);
        config.train.verify_every = 1;
        // Several buckets even for so small a model, and in one of them pieces for several ranks.
        config.parallel.first_bucket_mb = 0.02;
        config.parallel.bucket_mb = 0.02;
        config.parallel.timeout_s = 600.0;
        Self {
            config,
            device: None,
            transport: None,
            storage: None,
            restarts: 0,
            nodes: 1,
            folder,
        }
    }

    pub fn with(change: impl FnOnce(&mut TrainConfig)) -> Self {
        let mut job = Self::new();
        change(&mut job.config);
        job
    }

    /// Runs all ranks of one node to their end. As an agent does, the generation is ended for all when one fails.
    pub fn run(&self, world_size: u32) -> Vec<Outcome> {
        self.run_with(world_size, |_, _| ())
    }

    /// As [`Job::run`]; `meddle` sees the configuration of each rank before it starts.
    pub fn run_with(&self, world_size: u32, meddle: impl Fn(u32, &mut TrainConfig)) -> Vec<Outcome> {
        let store = Arc::new(MemoryStore::default());
        let session = |rank| {
            let session = Session::in_process(self.env(rank, world_size), store.clone());
            session.with_data_key(DataKey::new([7; DATA_KEY_BYTES]))
        };
        let sessions: Vec<Session> = (0..world_size).map(session).collect();
        let cancels: Vec<Cancel> = sessions.iter().map(Session::cancel).collect();
        std::thread::scope(|scope| {
            let mut ranks = Vec::new();
            for (rank, session) in sessions.iter().enumerate() {
                let mut config = self.config.clone();
                meddle(rank as u32, &mut config);
                let cancels = &cancels;
                ranks.push(scope.spawn(move || {
                    let outcome = run_generations(&config, self.assignment(session), |_| None);
                    if outcome.is_err() {
                        let others = cancels.iter().enumerate().filter(|(other, _)| *other != rank);
                        others.for_each(|(_, cancel)| cancel.cancel(format!("rank {rank} failed")));
                    }
                    outcome
                }));
            }
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// A rank's place, on the machine of the job.
    pub fn assignment(&self, session: &Session) -> Assignment {
        Assignment {
            device: self.device.as_ref().map(|device| device(session)),
            storage: self.storage.as_ref().map(|storage| storage(session)),
            transport: self.transport.as_ref().map(|transport| transport(session)),
            ..Assignment::of(session)
        }
    }

    /// Runs all ranks; all must succeed.
    pub fn train(&self, world_size: u32) -> Trained {
        let outcomes = self.run(world_size);
        let errors: Vec<String> = outcomes
            .iter()
            .filter_map(|o| o.as_ref().err().map(ToString::to_string))
            .collect();
        assert!(errors.is_empty(), "{errors:#?}");
        let summaries: Vec<RunSummary> = outcomes.into_iter().map(Result::unwrap).collect();
        Trained {
            summary: summaries[0].clone(),
            metrics: self.metrics(),
            state: self.state(),
        }
    }

    pub fn out_dir(&self) -> PathBuf {
        self.config.run.out_dir.clone().unwrap()
    }

    /// A folder of another name beside the text.
    pub fn out_dir_beside(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// All lines of `metrics.jsonl`.
    pub fn metrics(&self) -> Vec<MetricsLine> {
        let text = std::fs::read_to_string(self.out_dir().join("metrics.jsonl")).unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    /// Hash of each tensor of the latest checkpoint: parameters and moments.
    pub fn state(&self) -> BTreeMap<String, String> {
        let reader = Reader::open(&self.out_dir(), Which::Latest).unwrap();
        let tensors = reader.manifest().tensors.iter();
        tensors
            .map(|tensor| {
                let bytes = reader.read_whole(&tensor.name).unwrap();
                (tensor.name.to_string(), blake3::hash(&bytes).to_hex().to_string())
            })
            .collect()
    }

    /// Parameters of the latest checkpoint.
    pub fn parameters(&self) -> BTreeMap<String, Vec<f32>> {
        let reader = Reader::open(&self.out_dir(), Which::Latest).unwrap();
        let tensors = reader.manifest().tensors.iter();
        let parameters = tensors.filter(|tensor| tensor.name.kind == TensorKind::Parameter);
        parameters
            .map(|tensor| {
                let bytes = reader.read_whole(&tensor.name).unwrap();
                let words = bytes.chunks_exact(4);
                let values = words.map(|word| f32::from_le_bytes(word.try_into().unwrap()));
                (tensor.name.key.clone(), values.collect())
            })
            .collect()
    }

    pub fn env(&self, rank: u32, world_size: u32) -> WorkerEnv {
        let mut env = WorkerEnv::single();
        env.rank = GlobalRank(rank);
        let local = world_size / self.nodes;
        env.local_rank = LocalRank(rank % local);
        env.node_rank = NodeRank(rank / local);
        env.node_count = self.nodes;
        env.world_size = WorldSize(world_size);
        env.local_world_size = local;
        env.run_id = "test".into();
        env.restart_count = self.restarts;
        env.generation = Generation(u64::from(self.restarts) + 1);
        env
    }
}

/// What a job came to.
pub struct Trained {
    pub summary: RunSummary,
    pub metrics: Vec<MetricsLine>,
    pub state: BTreeMap<String, String>,
}

impl Trained {
    pub fn losses(&self) -> Vec<f64> {
        self.metrics.iter().map(|line| line.loss).collect()
    }

    /// Bytes of gradients that rank 0 sent in all.
    pub fn grad_bytes(&self) -> u64 {
        self.metrics.iter().map(|line| line.wire_bytes.grads).sum()
    }
}

/// All files below `from`, also into a folder that is not there yet.
pub fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), &target).unwrap();
        }
    }
}

/// The same bits: losses, norms of the gradients, parameters and moments.
pub fn assert_same(one: &Trained, other: &Trained, what: &str) {
    let bits = |number: fn(&MetricsLine) -> f64, trained: &Trained| -> Vec<u64> {
        trained
            .metrics
            .iter()
            .map(|line| number(line).to_bits())
            .collect()
    };
    assert_eq!(one.losses(), other.losses(), "losses: {what}");
    let norm = |line: &MetricsLine| line.grad_norm;
    assert_eq!(bits(norm, one), bits(norm, other), "norms: {what}");
    assert_eq!(one.state, other.state, "parameters and moments: {what}");
}

/// Losses that differ by less than `tolerance` of themselves.
pub fn assert_within(tolerance: f64, one: &Trained, other: &Trained, what: &str) {
    assert_eq!(one.metrics.len(), other.metrics.len());
    for (one, other) in one.metrics.iter().zip(&other.metrics) {
        let error = (one.loss - other.loss).abs() / one.loss;
        assert!(error < tolerance, "step {}, {what}: off by {error}", one.step);
    }
}

/// What holds in f32 where sums are formed in another order.
pub fn assert_close(one: &Trained, other: &Trained, what: &str) {
    assert_within(1e-5, one, other, what);
}

/// Sentences with some structure to learn.
fn text() -> String {
    let mut text = String::new();
    let mut state = 12_345_u64;
    let mut pick = |n: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    for _ in 0..250 {
        let subject = ["the reader", "a rank", "every step", "the launcher"][pick(4) as usize];
        let verb = ["waits for", "follows", "counts", "stops"][pick(4) as usize];
        let object = ["the gradient", "its peers", "the last bucket", "nothing"][pick(4) as usize];
        let _ = writeln!(text, "{subject} {verb} {object}.");
    }
    text
}
