//! From a configuration and a session to a trainer that is ready for its first step.

use std::sync::Arc;
use std::time::Instant;

use ddp_proto::control::Sizes;

use super::TrainError;
use super::checkpointing::{
    BatchBefore, BuddyCopy, Checkpoints, Kept, Origin, SavedRun, allowed_sizes, check_initial_weights,
    document, exchange, identity, load, open_checkpoint, recover, rescale,
};
use super::device_choice::{Choice, outlives};
use super::rank_spec::RankSpec;
use super::rank_table::{RankTable, StepTable};
use super::reporting::ProfilingWindow;
use super::step::{Trainer, TrainerParts};
use super::warm_up::warm_up;
use super::world::{World, WrapTransport, is_restarted, threads, timeout};
use crate::checkpoint::{Batch, Disk, State, Storage};
use crate::config::{OffloadTarget, TrainConfig};
use crate::costs::GlobalBatch;
use crate::cuda::GpuFacts;
use crate::data::{BatchShape, Dataset, Loader, ORDER_VERSION, Sampler};
use crate::device::{ArenaSpec, Buffer, Compute, Device, DeviceError, PIECE, StateMemory};
use crate::libraries::{Library, LibraryKind};
use crate::mesh::SAMPLES;
use crate::metrics::{Request, RunDir};
use crate::ops::Cast;
use crate::optim::Clip;
use crate::parallel::{GradientLayout, Parameters, Reducer, Signature, check_agreement};
use crate::session::Session;

/// A rank's place in one generation, and parts of the machine to use instead of what the configuration leads to.
pub struct Assignment {
    /// Its link to the job in this generation.
    pub session: Session,
    /// Holds the arenas and runs the operations.
    pub device: Option<Arc<dyn Device>>,
    /// Takes the checkpoints; reading them is left to the file system.
    pub storage: Option<Arc<dyn Storage>>,
    /// Comes between the communicators and the transport of host memory.
    pub transport: Option<WrapTransport>,
}

impl Assignment {
    /// The only one of a process, on the machine as it is.
    pub fn of(session: &Session) -> Self {
        Self {
            session: session.clone(),
            device: None,
            storage: None,
            transport: None,
        }
    }
}

/// A trainer and what belongs to it.
pub(super) struct Prepared<'a> {
    pub(super) trainer: Trainer<'a>,
    pub(super) reducer: Reducer,
    /// What NCCL has taken of the device's memory, with what other processes took meanwhile.
    pub(super) nccl_bytes: u64,
    pub(super) run_dir: Arc<RunDir>,
    pub(super) dataset: Dataset,
    /// What another number of ranks has changed, in words.
    pub(super) rescaled: Option<String>,
    /// The weights that it began with just now, in words.
    pub(super) pretrained: Option<String>,
    /// `train.steps` of the life that saved the checkpoint which this one goes on from.
    pub(super) steps_before: Option<u64>,
    /// Until it is loaded.
    origin: Option<Origin>,
}

impl Prepared<'_> {
    /// Loads or initialises the parameters. Every rank must call it.
    pub(super) fn begin(&mut self) -> Result<(), TrainError> {
        let origin = self.origin.take().expect("a generation begins once");
        self.trainer.begin(|parts| begin(parts, &origin))
    }
}

/// The files of a run, on which all ranks have agreed, and the state that it goes on from.
pub(super) struct Opened<'a> {
    assignment: &'a Assignment,
    spec: RankSpec,
    /// The layout of the gradients of a rank with the blocks of all stages.
    whole: Arc<GradientLayout>,
    choice: Choice,
    dataset: Dataset,
    run: SavedRun,
    origin: Origin,
    rescaled: Option<String>,
}

/// Opens everything and checks that all ranks agree. What this rank has `kept` is then the state that it goes on from, or
/// gone. Returns the configuration to train with as well: the one that is
/// given, but for the accumulation of a run that goes on on another number of ranks.
pub(super) fn open<'a>(
    config: &TrainConfig,
    assignment: &'a Assignment,
    kept: &mut Option<Kept>,
) -> Result<(TrainConfig, Opened<'a>), TrainError> {
    let session = &assignment.session;
    let env = session.env();
    let mut spec = RankSpec::of(config, env)?;
    let mut whole = spec.whole_layout()?;
    let dataset = Dataset::open(&config.data, config.model.block_size, &config.vocabulary)?;
    let begins = !is_restarted(env) && RunDir::begins(&config.run, &env.run_id);
    let choice = Choice::of(config, session, assignment.device.clone(), !begins)?;
    session.set_outlives(outlives(&config.train));
    agree(assignment, &spec, &whole, &dataset, &choice)?;
    if begins {
        // Before the folder is made, or emptied.
        check_initial_weights(config)?;
    }
    let (dir, latest) = open_run_dir(config, session)?;
    let mut run = SavedRun {
        dir: Arc::new(dir),
        latest,
        // Checkpoints tell of the configuration as it was given.
        identity: identity(config, &dataset)?,
        storage: assignment.storage.clone().unwrap_or_else(|| Arc::new(Disk)),
    };
    let origin = if let Some(go_on) = recover(session, &spec, kept, latest)? {
        Origin::kept(&run.identity, go_on)
    } else {
        match latest {
            Some(step) => Origin::Saved(Box::new(open_checkpoint(run.dir.path(), step, &run.identity)?)),
            None => Origin::fresh(config, &spec.model, session)?,
        }
    };
    let mut config = config.clone();
    let given = config.train.grad_accumulation;
    run.identity.skipped = origin.saved().map_or(0, |saved| saved.skipped);
    let rescaled = match origin.saved().and_then(BatchBefore::of) {
        None => None,
        Some(before) => rescale(&mut config, &spec.strategy.mesh, &before)?,
    };
    if config.train.grad_accumulation != given {
        spec = RankSpec::of(&config, env)?;
        whole = spec.whole_layout()?;
    }
    let batch = GlobalBatch::of(&config, &spec.strategy.mesh);
    run.identity.batch = Some(Batch {
        samples: batch.samples(),
        ranks: batch.ranks,
    });
    let sizes = allowed_sizes(&config, &spec.strategy.mesh);
    if env.rank.get() == 0 && sizes != Sizes::default() {
        session.limit_sizes(sizes);
    }
    let opened = Opened {
        assignment,
        spec,
        whole,
        choice,
        dataset,
        run,
        origin,
        rescaled,
    };
    Ok((config, opened))
}

/// Finds the other ranks, who are then in `joined`, and allocates all memory. What this rank has `kept` moves there, or
/// stays if that fails.
pub(super) fn prepare<'a>(
    config: &'a TrainConfig,
    opened: Opened<'a>,
    joined: &mut Option<World>,
    kept: &mut Option<Kept>,
) -> Result<Prepared<'a>, TrainError> {
    let (dataset, run_dir) = (opened.dataset, opened.run.dir.clone());
    let Assignment {
        session, transport, ..
    } = opened.assignment;
    let spec = opened.spec;
    let norm_order = spec.norm_order(&opened.whole)?;
    let activations = spec.activations()?;
    let compute = match kept {
        Some(kept) => kept.compute.clone(),
        // The first stream of a device is the one that computes.
        None => Compute::new(opened.choice.open(config, session.env())?),
    };
    // Until its communicators and all memory are there, it frees nothing behind an abort.
    let may_outlive = session.outlives();
    session.set_outlives(may_outlive && !compute.device.is_asynchronous());
    let taken_before = compute.device.taken_bytes();
    let world = World::connect(config, session, compute, transport.clone(), spec.strategy.mesh)?;
    *joined = Some(world.clone());
    let groups = spec.connect(&world)?;
    let taken = world.compute.device.taken_bytes().zip(taken_before);
    let taken = taken.filter(|_| world.size() > 1);
    let home = state_home(&world, config, &run_dir, kept.as_ref())?;
    let own = kept.as_ref().and_then(|kept| kept.own(&spec));
    let (parameters, reducer) = spec.allocate(&world, &groups, &home, own)?;
    let (set, sharding) = (parameters.replica_set(), parameters.sharding());
    let clip = Clip::new(set, &world.compute, sharding, &norm_order, &config.train)?;
    let replica = spec.replica(&world, groups, parameters, activations)?;
    let rank_table = RankTable::new(&world, "numbers of each rank")?;
    let step_table = StepTable::new(&world)?;
    warm_up(&replica, &spec, &norm_order, activations)?;
    let copy = match kept.as_mut().and_then(|kept| kept.copy.take()) {
        Some(copy) => Some(copy),
        None => BuddyCopy::new(&spec, replica.parameters.replica_set(), &home)?,
    };
    let holds = kept.is_some();
    let optimizer = match kept.take() {
        Some(kept) => kept.settle(&spec, &replica.parameters, &home)?,
        None => spec.optimizer(&replica.parameters, &home)?,
    };
    session.set_outlives(may_outlive);
    let saved = opened.origin.saved();
    clip.resume(saved.map_or(0, State::updates));
    let parts = TrainerParts {
        optimizer,
        copy,
        clip,
        rank_table,
        step_table,
        loader: loader(config, &world, &dataset, saved),
        validation: dataset.val.clone(),
        checkpoints: Checkpoints::new(opened.run, config, &world),
        window: ProfilingWindow::new(config, run_dir.path(), &replica.model, &world),
        first_step: saved.map_or(0, |state| state.step),
        resumed: opened.origin.held().cloned(),
        config,
        spec,
        session,
        world,
        replica,
    };
    Ok(Prepared {
        steps_before: saved.and_then(|state| state.config.pointer("/train/steps")?.as_u64()),
        trainer: Trainer::new(parts, holds),
        nccl_bytes: taken.map_or(0, |(taken, before)| taken.saturating_sub(before)) as u64,
        reducer,
        run_dir,
        dataset,
        rescaled: opened.rescaled,
        pretrained: opened.origin.weights_words(),
        origin: Some(opened.origin),
    })
}

/// The memory for what is offloaded: that of what was kept, if there is something. On a device that uses host memory, `host`
/// changes nothing.
fn state_home(
    world: &World,
    config: &TrainConfig,
    run_dir: &RunDir,
    kept: Option<&Kept>,
) -> Result<Arc<StateMemory>, TrainError> {
    if let Some(kept) = kept {
        return Ok(kept.optimizer.home().clone());
    }
    let device = world.compute.device.clone();
    let offload = &config.train.offload;
    let home = match offload.optimizer {
        OffloadTarget::None => StateMemory::on_device(device),
        OffloadTarget::Host => StateMemory::on_host(device, threads(config), PIECE)?,
        OffloadTarget::File if device.host_side().is_some() => {
            let parameters = match offload.parameters {
                OffloadTarget::None => "",
                _ => " and `train.offload.parameters: host`",
            };
            return Err(TrainError::Refused(format!(
                "`train.offload.optimizer: file` needs a device that uses host memory, but {} has its own memory\n  hint: train on the CPU (`parallel.backend: cpu`), or set `train.offload.optimizer: host`{parameters}",
                device.name()
            )));
        }
        OffloadTarget::File => {
            let dir = offload.dir.as_deref().unwrap_or(run_dir.path());
            StateMemory::in_files(device, dir)
        }
    };
    Ok(Arc::new(home))
}

/// Parameters and moments that were saved, or first values; then the same on all ranks.
fn begin(parts: &mut TrainerParts<'_>, origin: &Origin) -> Result<(), TrainError> {
    let config = parts.config;
    parts.with_checkpoints(|checkpoints, here| checkpoints.reserve(here, config))?;
    let (replica, optimizer, seed) = (&parts.replica, &parts.optimizer, config.run.seed);
    match origin {
        Origin::Fresh(weights) => replica.initialise(optimizer, seed, weights.as_ref())?,
        Origin::Saved(saved) => parts.with_checkpoints(|_, here| load(here, saved))?,
        Origin::Kept { go_on, .. } => {
            parts.with_checkpoints(|_, here| exchange(here, go_on))?;
            if let Some(copy) = &parts.copy {
                let (compute, parameters) = (&parts.world.compute, &parts.replica.parameters);
                copy.give_back(compute, parameters, &parts.optimizer, |rank| !go_on.holders[rank])?;
            }
        }
    }
    let (home, stream) = (parts.optimizer.home(), parts.world.compute.stream);
    home.synchronize(stream)?;
    let parameters = &parts.replica.parameters;
    // All ranks have read or computed the same; this only makes sure of it, where one communicator has all holders.
    let is_read = origin.held().is_none();
    if is_read && parameters.sharding().world() == 1 && parameters.replica_set().groups.len() == 1 {
        let masters = parts.optimizer.masters(parameters.own()).arena().whole();
        if home.host_state().is_some() {
            broadcast_from_host(&parts.world, home, parameters, &masters)?;
        } else {
            parameters.broadcast(&masters)?;
        }
    }
    parts.optimizer.round(stream, parameters.own());
    home.synchronize(stream)?;
    if let Some(copy) = &mut parts.copy {
        copy.refresh(&parts.world.compute, parameters, &parts.optimizer)?;
    }
    Ok(())
}

/// Masters that lie where the communicator may not reach them go through a little memory of the device.
fn broadcast_from_host(
    world: &World,
    home: &StateMemory,
    parameters: &Parameters,
    masters: &Buffer,
) -> Result<(), TrainError> {
    let bounce = world.compute.device.alloc(&ArenaSpec::private(
        "masters on their way",
        masters.dtype(),
        masters.len().min(PIECE),
    ))?;
    for start in (0..masters.len()).step_by(PIECE) {
        let piece = masters.slice(start..masters.len().min(start + PIECE));
        let carried = bounce.slice(0..piece.len());
        let copy = |x: &Buffer, out: &Buffer| {
            let (x, out) = (x.clone(), out.clone());
            home.enqueue_all(world.compute.stream, vec![Cast { x, out }.into()]);
        };
        copy(&piece, &carried);
        parameters.broadcast(&carried)?;
        copy(&carried, &piece);
    }
    Ok(())
}

/// Goes on behind what was `saved`.
fn loader(config: &TrainConfig, world: &World, dataset: &Dataset, saved: Option<&State>) -> Loader {
    let block_size = config.model.block_size;
    let sampler = Sampler::new(
        config.data.order,
        config.run.seed,
        dataset.train.blocks(block_size),
    );
    let shape = BatchShape {
        rank: world.mesh.index(&SAMPLES) as u64,
        world: world.mesh.size(&SAMPLES) as u64,
        micro_batch: config.train.micro_batch as u64,
        accumulation: config.train.grad_accumulation as u64,
    };
    let loader = Loader::new(dataset.train.clone(), sampler, shape, block_size);
    let (step, samples) = saved.map_or((0, 0), |state| (state.step, state.consumed_samples));
    let loader = loader.reading(world.stretches(block_size)).resumed(step, samples);
    loader.ending(config.data.last_batch)
}

fn open_run_dir(config: &TrainConfig, session: &Session) -> Result<(RunDir, Option<u64>), TrainError> {
    let env = session.env();
    let request = Request {
        run: &config.run,
        run_id: &env.run_id,
        token: Some(env.run_token.as_ref().unwrap_or(&env.run_id)),
        // Other launchers have no token, and run ids that others have too.
        is_unique: env.run_token.is_some(),
        restarted: is_restarted(env),
        rank: env.rank.get(),
        generation: env.generation.get(),
        world_size: env.world_size.get(),
        deadline: Instant::now() + timeout(config),
    };
    Ok(RunDir::open(request, session.store().as_ref())?)
}

/// Refuses to begin unless all that ranks must have in common is the same. Paths and threads are each node's own affair.
fn agree(
    assignment: &Assignment,
    spec: &RankSpec,
    whole: &GradientLayout,
    dataset: &Dataset,
    choice: &Choice,
) -> Result<(), TrainError> {
    let (config, session) = (&spec.config, &assignment.session);
    let mut document = document(config);
    for (section, key) in [
        ("/data", "train"),
        ("/data", "val"),
        ("/train", "threads"),
        ("/train/offload", "dir"),
        ("/run", "out_dir"),
        ("/model", "init_from"),
        ("", "launch"),
    ] {
        if let Some(section) = document.pointer_mut(section).and_then(|s| s.as_object_mut()) {
            section.remove(key);
        }
    }
    let mut signature = Signature::new();
    signature.document("", &document);
    signature.field("rule of the data order", ORDER_VERSION);
    signature.field("training tokens", dataset.train.fingerprint()?);
    signature.field("validation tokens", dataset.val.fingerprint()?);
    signature.model(&spec.model, whole);
    signature.field(
        "schedule of the pipeline (`parallel.pipeline`)",
        spec.plan.signature(),
    );
    signature.field("kind of device", choice.kind());
    if let Choice::Gpu(ordinal) = choice {
        // Replicas whose kernels another compiler has made, or another GPU runs, drift apart.
        signature.field("GPU", GpuFacts::of(*ordinal)?.name);
        for kind in [LibraryKind::Cuda, LibraryKind::Nvrtc, LibraryKind::CublasLt] {
            let version = Library::open(kind).and_then(|library| library.version());
            signature.field(kind.facts().name, version.map_err(DeviceError::from)?);
        }
    }
    Ok(check_agreement(session, "start", &signature, timeout(config))?)
}
