//! From a configuration and a session to a trainer that is ready for its first step.

use std::sync::Arc;
use std::time::Instant;

use super::TrainError;
use super::evaluation::Evaluation;
use super::exchange::Exchange;
use super::replica::Replica;
use super::saving::Checkpoints;
use super::startup::StartupFacts;
use super::strategy::Held;
use super::trainer::Trainer;
use super::world::{World, timeout};
use crate::collective::WireBytes;
use crate::config::{Strategy, TrainConfig};
use crate::data::{Dataset, Loader, ORDER_VERSION, Sampler, Shape, Tokens};
use crate::device::Device;
use crate::metrics::{Request, RunDir, Start};
use crate::model::{self, Model};
use crate::optim::{AdamW, Clip};
use crate::parallel::{
    Agreement, GradientLayout, LayoutConfig, Portion, Reducer, Replicas, Signature, gated,
};
use crate::session::Session;

/// Bytes at either end of the data that ranks compare before the first step.
const FINGERPRINT_BYTES: usize = 1 << 20;

/// A trainer and what belongs to it.
pub(super) struct Prepared<'a> {
    pub(super) trainer: Trainer<'a>,
    pub(super) reducer: Reducer,
    pub(super) run_dir: RunDir,
    pub(super) dataset: Dataset,
}

impl Prepared<'_> {
    /// For the start-up table.
    pub(super) fn facts(&self) -> StartupFacts<'_> {
        StartupFacts {
            out_dir: self.run_dir.path(),
            train_tokens: self.dataset.train.len(),
            val_tokens: self.dataset.val.len(),
            reductions: self.reducer.operations(),
        }
    }
}

/// Opens everything, finds the other ranks, checks that all agree, and loads or initialises the parameters.
pub(super) fn prepare<'a>(
    config: &'a TrainConfig,
    session: &'a Session,
    device: Option<Arc<dyn Device>>,
) -> Result<Prepared<'a>, TrainError> {
    let model = model::build(&config.model, Dataset::vocab_size(config.data.tokenizer))?;
    let dataset = Dataset::open(&config.data, config.model.block_size)?;
    let env = session.env();
    let world_size = env.world_size.get() as usize;
    let layout_config = LayoutConfig::of(&config.parallel, world_size);
    let layout = Arc::new(GradientLayout::of_model(&model, &layout_config)?);
    agree(config, session, &signature(config, &model, &layout, &dataset)?)?;
    let (run_dir, start) = open_run_dir(config, session)?;
    let world = World::connect(config, session, device)?;
    let Held { weights, reducer } = Held::new(&world, config, &model, &layout)?;
    let sharding = weights.sharding().clone();
    let decays: Vec<bool> = model.params.iter().map(|p| p.decay).collect();
    let model = match config.parallel.strategy {
        Strategy::Ddp => model,
        _ => gated(model, &weights),
    };
    let replica = Replica::new(&world, model, weights, config)?;
    let mut trainer = Trainer {
        adamw: AdamW::new(&world.device, &sharding, &decays, &config.train.optimizer)?,
        clip: Clip::new(&world.comm, &world.device, &sharding, config.train.grad_clip)?,
        exchange: Exchange::new(&world)?,
        replicas: Replicas::new(&world.comm, &world.device, &layout)?,
        loader: loader(config, &world, &dataset),
        evaluation: Evaluation::new(dataset.val.clone(), config.model.block_size),
        checkpoints: Checkpoints::new(run_dir.path(), env.generation.get(), config),
        grad_bytes: reducer.bytes(),
        first_step: 0,
        accounted: WireBytes::default(),
        progress: None,
        config,
        session,
        world,
        replica,
    };
    begin(&mut trainer, start, &dataset)?;
    Ok(Prepared {
        trainer,
        reducer,
        run_dir,
        dataset,
    })
}

/// Parameters and moments of the checkpoint, or first values from the seed; then the same on all ranks.
fn begin(trainer: &mut Trainer<'_>, start: Start, dataset: &Dataset) -> Result<(), TrainError> {
    match start {
        Start::Fresh => trainer.replica.initialise(trainer.config.run.seed),
        Start::Resume { step } => {
            let consumed =
                trainer
                    .checkpoints
                    .load(&trainer.world, &trainer.replica, &trainer.adamw, step)?;
            trainer.loader = loader(trainer.config, &trainer.world, dataset).resumed(step, consumed);
            trainer.first_step = step;
        }
    }
    let World { device, stream, .. } = &trainer.world;
    device.synchronize(*stream)?;
    let weights = &trainer.replica.weights;
    if let (Portion::Whole(params), 1) = (weights.own(), weights.sharding().world()) {
        trainer.replicas.broadcast(*stream, &params.whole())?;
    }
    let accounted = trainer.sent();
    weights.updated()?;
    trainer.accounted = accounted;
    Ok(())
}

fn loader(config: &TrainConfig, world: &World, dataset: &Dataset) -> Loader {
    let block_size = config.model.block_size;
    let sampler = Sampler::new(
        config.data.order,
        config.run.seed,
        dataset.train.blocks(block_size),
    );
    let shape = Shape {
        rank: world.rank() as u64,
        world: world.size() as u64,
        micro_batch: config.train.micro_batch as u64,
        accumulation: config.train.grad_accumulation as u64,
    };
    Loader::new(dataset.train.clone(), sampler, shape, block_size)
}

fn open_run_dir(config: &TrainConfig, session: &Session) -> Result<(RunDir, Start), TrainError> {
    let env = session.env();
    let request = Request {
        run: &config.run,
        run_id: &env.run_id,
        token: Some(env.run_token.as_ref().unwrap_or(&env.run_id)),
        restarted: env.restart_count > 0 || env.generation.get() > 1,
        rank: env.rank.get(),
        world_size: env.world_size.get(),
        deadline: Instant::now() + timeout(config),
    };
    Ok(RunDir::open(request, session.store().as_ref())?)
}

fn agree(config: &TrainConfig, session: &Session, signature: &Signature) -> Result<(), TrainError> {
    let env = session.env();
    let store = session.store();
    let agreement = Agreement {
        store: store.as_ref(),
        name: "start",
        rank: env.rank.get() as usize,
        world_size: env.world_size.get() as usize,
        deadline: Instant::now() + timeout(config),
    };
    Ok(agreement.check(signature)?)
}

/// All that ranks must have in common. Paths and threads are each node's own affair.
fn signature(
    config: &TrainConfig,
    model: &Model,
    layout: &GradientLayout,
    dataset: &Dataset,
) -> Result<Signature, TrainError> {
    let mut signature = Signature::new();
    let mut document = serde_json::to_value(config).expect("a configuration serialises");
    for (section, key) in [
        ("data", "train"),
        ("data", "val"),
        ("train", "threads"),
        ("run", "out_dir"),
    ] {
        if let Some(section) = document.get_mut(section).and_then(|s| s.as_object_mut()) {
            section.remove(key);
        }
    }
    if let Some(sections) = document.as_object_mut() {
        sections.remove("launch");
    }
    signature.document("", &document);
    signature.field("rule of the data order", ORDER_VERSION);
    signature.field("training tokens", fingerprint(&dataset.train)?);
    signature.field("validation tokens", fingerprint(&dataset.val)?);
    signature.model(model, layout);
    Ok(signature)
}

/// Length, and a hash of both ends.
fn fingerprint(tokens: &Tokens) -> Result<String, TrainError> {
    let mut ends = vec![0; FINGERPRINT_BYTES.min(tokens.len())];
    let mut hash = blake3::Hasher::new();
    for start in [0, tokens.len() - ends.len()] {
        tokens.read(start, &mut ends)?;
        hash.update(&ends);
    }
    Ok(format!(
        "{} tokens, hash {}",
        tokens.len(),
        &hash.finalize().to_hex()[..16]
    ))
}
