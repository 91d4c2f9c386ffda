//! The lines that rank 0 prints before the first step: what is trained, on which device, with how much memory. A restart
//! prints only the lines that have changed.

use ddp_proto::words::{bytes, counted, grouped};

use super::reporting::Footprint;
use super::setup::Prepared;
use super::step::TrainerParts;
use super::world::is_restarted;
use crate::config::{
    Accumulate, ContextAlgorithm, Experts, LrScaling, Model, ModelKind, OffloadTarget, OptimizerKind,
    Recompute, Strategy, Sync, Train, TrainConfig, Vocabulary, can_have_buddies,
};
use crate::data::{Dataset, Tokens};
use crate::device::DType;
use crate::mesh::Axis;
use crate::model::{AttentionKind, Decoder};
use crate::ops::has_tensor_kernels;
use crate::optim::{batch_factor, learning_rate};
use crate::parallel::pipeline::PipelinePlan;
use crate::parallel::{Dtypes, group_axes};

/// Stands between the number of steps and the step after which a life began.
const RESUMED: &str = ", resumed after step ";

/// The lines for this life of the run. A file in the run's directory has the lines of the life before.
pub(super) fn startup_table(prepared: &Prepared<'_>) -> String {
    let rows = rows(prepared).0;
    let trainer = prepared.trainer.parts();
    let (is_restarted, step) = (is_restarted(trainer.session.env()), trainer.first_step);
    // Where a life began is no news.
    let lasting = |row: &String| row.split(RESUMED).next().unwrap_or_default().to_owned();
    let news = prepared
        .run_dir
        .exchange_startup(&rows.iter().map(lasting).collect::<Vec<_>>());
    match news.filter(|_| is_restarted) {
        None => rows.join("\n"),
        Some(news) => restarted(step, &news),
    }
}

/// What a restart after so many steps says.
fn restarted(steps: u64, news: &[String]) -> String {
    let from = match steps {
        0 => "restarted; no checkpoint yet: training starts again at step 1".to_owned(),
        _ => format!("restarted after step {steps}"),
    };
    match news {
        [] => format!("{from}; all else is as before"),
        news => format!("{from}; what has changed:\n{}", news.join("\n")),
    }
}

fn rows(prepared: &Prepared<'_>) -> Rows {
    let trainer = prepared.trainer.parts();
    let (config, train) = (trainer.config, &trainer.config.train);
    let global_batch = trainer.global_batch();
    let batch = format!(
        "{} samples = {} tokens ({} × {} × {} of {} tokens)",
        grouped(global_batch.samples()),
        grouped(global_batch.tokens()),
        trainer.spec.strategy.mesh.data_ranks(),
        counted(train.grad_accumulation, "micro-batch"),
        counted(train.micro_batch, "sample"),
        config.model.block_size,
    );
    let held = Footprint::of(
        &trainer.replica,
        &prepared.reducer,
        &trainer.optimizer,
        trainer.copy_bytes(),
    );
    let snapshot = trainer.checkpoints.snapshot_bytes() as u64;
    let stretched = |before| stretched(train, before, trainer.first_step, global_batch.samples());
    let mut table = Rows(Vec::new());
    table.add("rescaled", prepared.rescaled.clone());
    table.add("model", model(&config.model));
    table.add("parameters", grouped(trainer.replica.model.param_count() as u64));
    table.add("data", data(&prepared.dataset, config.data.val.is_some()));
    table.add("global batch", batch);
    table.add("steps", steps(train, trainer.first_step));
    table.add("memory per rank", memory(&held, snapshot, prepared.nccl_bytes));
    table.add("device", trainer.world.compute.device.name());
    table.add("backend", backend(trainer));
    table.add("precision", precision(config));
    table.add("strategy", strategy(trainer));
    table.add("experts", experts(trainer));
    table.add("context", context(trainer));
    table.add("tensor", tensor(trainer));
    table.add("pipeline", pipeline(&trainer.replica.plan));
    table.add("recovery", recovery(trainer));
    table.add("gradient sync", sync(trainer, prepared.reducer.operations()));
    table.add("tokenizer", tokenizer(&prepared.dataset, &config.vocabulary));
    table.add("initial weights", prepared.pretrained.clone());
    table.add("optimizer state", offloaded(prepared));
    table.add("recomputation", recomputation(train.recompute));
    table.add("learning rate", scaled_rate(train, global_batch.samples()));
    table.add("schedule", prepared.steps_before.and_then(stretched));
    table.add("warning", endless_warmup(train));
    let attends = config.model.kind != ModelKind::Mlp && Dtypes::of(config).has_masters();
    let has_tensor_cores = attends && trainer.world.compute.device.peak_bytes().is_some();
    let slow = slow_heads(config.model.n_embd / config.model.n_head);
    table.add("warning", slow.filter(|_| has_tensor_cores));
    table.add("out_dir", prepared.run_dir.path().display().to_string());
    table
}

/// Lines.
struct Rows(Vec<String>);

impl Rows {
    /// A row, if there is something to say.
    fn add(&mut self, name: &str, value: impl Into<Option<String>>) {
        if let Some(value) = value.into() {
            self.0.push(format!("{name:<17} {value}"));
        }
    }
}

/// `gpt2, 4 layers, 4 heads, width 128`; of a Mixtral also `2 of 8 experts`.
fn model(config: &Model) -> String {
    let (decoder, layers) = (Decoder::of(config), counted(config.n_layer, "layer"));
    let heads = |kind: AttentionKind| format!(", {}", counted(kind.heads, "head"));
    let heads = decoder.attention.map_or_else(String::new, heads);
    let experts = |all: Experts| format!(", {} of {} experts", all.top_k, all.count);
    let experts = decoder.experts.map_or_else(String::new, experts);
    let kind = decoder.names.kind;
    format!("{kind}, {layers}{heads}{experts}, width {}", config.n_embd)
}

fn backend(trainer: &TrainerParts<'_>) -> String {
    let world = trainer.world.size();
    match (world, trainer.session.env().node_count) {
        (1, _) => "one rank".to_owned(),
        _ if trainer.world.compute.device.peak_bytes().is_some() => format!("{world} ranks, NCCL"),
        (_, 1) => format!("{world} ranks in shared memory"),
        (_, nodes) => format!("{world} ranks on {nodes} nodes, shared memory and TCP"),
    }
}

fn data(dataset: &Dataset, has_val: bool) -> String {
    let part = |tokens: &Tokens| {
        let files = match tokens.file_count() {
            1 => String::new(),
            several => format!(" in {several} files"),
        };
        (grouped(tokens.len() as u64), files)
    };
    let ((train, in_files), (val, in_val_files)) = (part(&dataset.train), part(&dataset.val));
    if has_val {
        format!("{train} tokens{in_files} for training, {val}{in_val_files} for validation")
    } else {
        format!("{train} tokens{in_files} for training, {val} held out for validation")
    }
}

/// Whose tokens they are, where they are not bytes.
fn tokenizer(dataset: &Dataset, vocabulary: &Vocabulary) -> Option<String> {
    if vocabulary.is_bytes() {
        return None;
    }
    let parts = [&dataset.train, &dataset.val];
    let bytes = match dataset.train.whole().bytes_per_token() {
        Some(bytes) => format!(", {bytes:.2} bytes per token"),
        None => String::new(),
    };
    let unknown = if parts.iter().all(|tokens| tokens.knows_tokenizer()) {
        ""
    } else {
        "; a file does not record its tokenizer, so this was not checked"
    };
    Some(format!(
        "{}, {} tokens{bytes}; losses are in nats per token{unknown}",
        vocabulary.name,
        grouped(vocabulary.size as u64)
    ))
}

fn steps(train: &Train, first_step: u64) -> String {
    let steps = train.steps;
    match first_step {
        0 => format!("{steps}"),
        first if first >= steps => {
            format!(
                "nothing left to train: {first} of {steps} steps are done; increase `train.steps` to continue"
            )
        }
        first => format!("{steps}{RESUMED}{first}"),
    }
}

/// A rate that decays ends with the last step: with another number of them than `before` it makes a leap where the run is
/// resumed.
fn stretched(train: &Train, before: u64, first_step: u64, global_batch: u64) -> Option<String> {
    let rate = |steps| {
        let rate = learning_rate(first_step, steps, &train.optimizer, &train.schedule);
        f64::from(rate) * batch_factor(train, global_batch)
    };
    let (was, is) = (rate(before), rate(train.steps));
    let goes_on = first_step < train.steps;
    (goes_on && was != is).then(|| {
        format!(
            "over {} steps instead of {before}: training resumes at learning rate {is:.1e} instead of {was:.1e}",
            train.steps
        )
    })
}

/// Such a run trains with less than the rate that was asked for.
fn endless_warmup(train: &Train) -> Option<String> {
    let (steps, warmup) = (train.steps, train.schedule.warmup_steps);
    (warmup >= steps).then(|| {
        format!(
            "`train.schedule.warmup_steps` is {warmup}, and the run has {}: the learning rate never reaches its peak",
            counted(steps, "step")
        )
    })
}

/// Heads that only the plain kernels take, where others would be on tensor cores.
fn slow_heads(head_size: usize) -> Option<String> {
    (!has_tensor_kernels(head_size)).then(|| {
        format!(
            "heads of {head_size} channels do not use tensor cores: attention computes in f32, several times slower; 32, 64 and 128 channels use them (`model.n_head`)"
        )
    })
}

fn recomputation(what: Recompute) -> Option<String> {
    let words = match what {
        Recompute::Nothing => "nothing: norms and GELUs are kept",
        Recompute::Norms => return None,
        Recompute::Selective => "selective: the wide half of each feed-forward layer",
        Recompute::Full => "full: each block, from its input",
    };
    Some(words.to_owned())
}

/// The peak rate, where the size of the batch changes it.
fn scaled_rate(train: &Train, global_batch: u64) -> Option<String> {
    let (LrScaling::Linear, Some(base)) = (train.lr_scaling, train.base_batch) else {
        return None;
    };
    let lr = train.optimizer.lr;
    let scaled = f64::from(lr) * batch_factor(train, global_batch);
    let warmup = match train.schedule.warmup_steps {
        0 => "without warm-up (see `train.schedule.warmup_steps`)".to_owned(),
        steps => format!("after {} of warm-up", counted(steps, "step")),
    };
    Some(format!(
        "{scaled:.2e} = {lr:.2e} × {} / {} samples, {warmup}",
        grouped(global_batch),
        grouped(base)
    ))
}

fn memory(held: &Footprint, snapshot_bytes: u64, nccl_bytes: u64) -> String {
    format!(
        "parameters {}{}, gradients {}{}{}{}, optimizer {}{}{}{}, activations {}{}{}",
        bytes(held.params),
        aside(held.gathered, |gathered| format!(" (plus {gathered} gathered)")),
        bytes(held.grads),
        aside(held.in_flight, |slots| format!(" ({slots} of it in flight)")),
        aside(held.offloaded_params[0], |host| format!(
            ", {host} of both in host memory"
        )),
        aside(held.offloaded_params[1], |file| format!(
            ", {file} of both in a file"
        )),
        bytes(held.optimizer),
        aside(held.offloaded[0], |host| format!(" (plus {host} in host memory)")),
        aside(held.offloaded[1], |file| format!(" in memory ({file} in a file)")),
        aside(held.padding, |padding| format!(
            ", including {padding} of padding"
        )),
        bytes(held.activations),
        aside(snapshot_bytes, |snapshot| format!(
            ", checkpoint snapshot {snapshot}"
        )),
        aside(nccl_bytes, |nccl| format!(", NCCL {nccl}")),
    )
}

/// Says how many bytes there are, if there are any.
fn aside(number: u64, words: fn(String) -> String) -> String {
    match number {
        0 => String::new(),
        number => words(bytes(number)),
    }
}

fn precision(config: &TrainConfig) -> String {
    let Dtypes {
        params,
        reduced,
        accumulated,
    } = Dtypes::of(config);
    if params == DType::F32 {
        return "f32".to_owned();
    }
    let added = match config.train.grad_accumulation {
        1 => String::new(),
        _ => format!(" and accumulated in {accumulated}"),
    };
    format!("{params}, with f32 master weights and moments; gradients are averaged in {reduced}{added}")
}

fn strategy(trainer: &TrainerParts<'_>) -> String {
    let (parallel, strategy) = (&trainer.config.parallel, &trainer.spec.strategy);
    let what = match strategy.strategy {
        Strategy::Ddp if parallel.strategy != Strategy::Ddp => {
            return nothing_to_shard(strategy.mesh.copy_ranks());
        }
        Strategy::Ddp => match strategy.mesh.copy_ranks() {
            1 => return "ddp: full replica on each rank".to_owned(),
            ranks => return format!("ddp: full replica on each group of {ranks} ranks"),
        },
        Strategy::Zero1 => "zero1: optimizer state",
        Strategy::Zero2 => "zero2: optimizer state and gradients",
        Strategy::Zero3 => "zero3: optimizer state, gradients and parameters",
    };
    let ranks = counted(strategy.shard_ranks(), "rank");
    let copies = match strategy.mesh.size(&[Axis::Replicate]) {
        1 => String::new(),
        copies => format!(", {copies} replicas"),
    };
    let kept = match (parallel.strategy, parallel.reshard_after_forward) {
        (Strategy::Zero3, true) => "; each block is gathered for forward and again for backward",
        (Strategy::Zero3, false) => "; each block is gathered once and kept until its backward",
        _ => "; parameters are gathered while the next forward starts",
    };
    format!("{what} sharded over {ranks}{copies}{kept}")
}

/// Why `ddp` takes the place of a strategy that shards, where a copy of the model lies on so many ranks.
fn nothing_to_shard(ranks: usize) -> String {
    let copy = match ranks {
        1 => "a single rank".to_owned(),
        ranks => format!("{ranks} ranks hold a single replica"),
    };
    format!("ddp: {copy}, nothing to shard")
}

/// Where the state of a dead rank comes from, if not from a replica.
fn recovery(trainer: &TrainerParts<'_>) -> Option<String> {
    let (train, mesh) = (&trainer.config.train, &trainer.spec.strategy.mesh);
    if let Some(copy) = &trainer.copy {
        let held = bytes(copy.bytes() as u64);
        return Some(format!(
            "a dead rank's state comes from its buddy; copies take {held} per rank"
        ));
    }
    if trainer.world.size() == 1 {
        return None;
    }
    if train.offload.optimizer != OffloadTarget::None || train.optimizer.kind == OptimizerKind::Muon {
        return Some("if a rank dies, all restart from the latest checkpoint".to_owned());
    }
    let groups = group_axes(&trainer.spec.model.all_params);
    if groups.iter().all(|axes| mesh.size(&mesh.copied_along(axes)) > 1) {
        return None;
    }
    let hint = if can_have_buddies(trainer.config) {
        " (hint: `train.recovery: buddy`)"
    } else {
        ""
    };
    Some(format!("if a rank dies, all read the latest checkpoint{hint}"))
}

/// How many ranks share the experts of each layer, if several do.
fn experts(trainer: &TrainerParts<'_>) -> Option<String> {
    let mesh = &trainer.spec.strategy.mesh;
    let ranks = mesh.size(mesh.expert_axes());
    let each = trainer.config.model.experts.count / ranks;
    (ranks > 1).then(|| format!("{ranks} ranks share those of each layer: {each} each"))
}

/// How many ranks share the positions of each sample, if several do.
fn context(trainer: &TrainerParts<'_>) -> Option<String> {
    let ranks = trainer.spec.strategy.mesh.size(&[Axis::Context]);
    let positions = trainer.replica.shape()[1];
    let reached = match trainer.config.parallel.context_algorithm {
        ContextAlgorithm::Gather => "they gather keys and values",
        ContextAlgorithm::Ring => "keys and values go from rank to rank",
    };
    (ranks > 1).then(|| format!("{ranks} ranks share each sample: {positions} positions each; {reached}"))
}

/// How many ranks divide each matrix, if several do.
fn tensor(trainer: &TrainerParts<'_>) -> Option<String> {
    let ranks = trainer.spec.strategy.mesh.size(&[Axis::Tensor]);
    let norms = if trainer.config.parallel.sequence {
        "; sequence parallelism divides the rest by positions"
    } else {
        ""
    };
    (ranks > 1).then(|| format!("{ranks} ranks share each matrix{norms}"))
}

/// Schedule, stages and what is lost at their ends, if there are several.
fn pipeline(plan: &PipelinePlan) -> Option<String> {
    let placement = plan.placement();
    let layers: Vec<String> = (plan.layers().iter())
        .map(|layers| layers.len().to_string())
        .collect();
    (placement.stages() > 1).then(|| {
        format!(
            "{}: {} with {} layers on {}, {}; idle {:.1} % of the time if all stages take equally long",
            plan.name(),
            counted(placement.stages() as u64, "stage"),
            layers.join(" + "),
            counted(placement.ranks() as u64, "rank"),
            counted(plan.micro_batches() as u64, "micro-batch"),
            100.0 * plan.bubble(),
        )
    })
}

/// Where the optimizer's state is, if a place was chosen for it.
fn offloaded(prepared: &Prepared<'_>) -> Option<String> {
    let trainer = prepared.trainer.parts();
    let offload = &trainer.config.train.offload;
    let state = bytes(trainer.optimizer.bytes() as u64);
    match offload.optimizer {
        OffloadTarget::None => None,
        OffloadTarget::File => {
            let dir = offload.dir.as_deref().unwrap_or(prepared.run_dir.path());
            Some(format!("{state} per rank, in a file in {}", dir.display()))
        }
        OffloadTarget::Host => {
            let home = trainer.optimizer.home();
            Some(match home.host_state() {
                Some(host) => {
                    let threads = counted(host.threads(), "thread");
                    format!("{state} per rank in host memory, updated there by {threads}")
                }
                None => format!(
                    "{state} per rank, already in host memory: `train.offload` has no effect on this device"
                ),
            })
        }
    }
}

fn sync(trainer: &TrainerParts<'_>, reductions: usize) -> String {
    let parallel = &trainer.config.parallel;
    let when = if parallel.overlap {
        "overlapped with backward"
    } else {
        "after backward"
    };
    let how = match (trainer.spec.strategy.strategy, parallel.sync) {
        (Strategy::Ddp, Sync::Bucketed) => counted(reductions, "bucket"),
        (Strategy::Ddp, Sync::PerParameter) => "one all-reduce per parameter".to_owned(),
        (Strategy::Ddp, Sync::Naive) => return "one all-reduce after backward".to_owned(),
        (strategy, _) => {
            let unit = match (strategy, trainer.spec.strategy.accumulate) {
                (Strategy::Zero3, _) => "group",
                (Strategy::Zero2, Some(Accumulate::Sharded)) => "part",
                _ => "bucket",
            };
            format!("reduce-scatter of {}", counted(reductions, unit))
        }
    };
    match trainer.spec.strategy.accumulate {
        Some(Accumulate::Sharded) if !parallel.overlap => format!("{how}, between the blocks of backward"),
        _ => format!("{how}, {when}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LearningRate;

    #[test]
    fn a_restart_says_where_training_begins() {
        insta::assert_snapshot!(restarted(100, &[]), @"restarted after step 100; all else is as before");
        insta::assert_snapshot!(restarted(0, &[]), @"restarted; no checkpoint yet: training starts again at step 1; all else is as before");
        let news = ["steps             20".to_owned()];
        insta::assert_snapshot!(restarted(0, &news), @r"
        restarted; no checkpoint yet: training starts again at step 1; what has changed:
        steps             20
        ");
    }

    #[test]
    fn the_line_of_a_scaled_learning_rate() {
        let mut train = Train {
            lr_scaling: LrScaling::Linear,
            base_batch: Some(256),
            ..Train::default()
        };
        train.optimizer.lr = 0.1;
        insta::assert_snapshot!(scaled_rate(&train, 8192).unwrap(), @"3.20e0 = 1.00e-1 × 8,192 / 256 samples, without warm-up (see `train.schedule.warmup_steps`)");
        train.schedule.warmup_steps = 100;
        insta::assert_snapshot!(scaled_rate(&train, 64).unwrap(), @"2.50e-2 = 1.00e-1 × 64 / 256 samples, after 100 steps of warm-up");
        train.lr_scaling = LrScaling::None;
        assert_eq!(scaled_rate(&train, 64), None);
    }

    #[test]
    fn a_warm_up_as_long_as_the_run_is_said() {
        let mut train = Train {
            steps: 20,
            ..Train::default()
        };
        train.schedule.warmup_steps = 19;
        assert_eq!(endless_warmup(&train), None);
        train.schedule.warmup_steps = 20;
        insta::assert_snapshot!(endless_warmup(&train).unwrap(), @"`train.schedule.warmup_steps` is 20, and the run has 20 steps: the learning rate never reaches its peak");
    }

    #[test]
    fn a_run_that_is_resumed_with_more_steps_says_what_becomes_of_its_rate() {
        let mut train = Train {
            steps: 600,
            ..Train::default()
        };
        assert_eq!(stretched(&train, 600, 280, 16), None);
        assert_eq!(stretched(&train, 300, 0, 16), None, "the peak, either way");
        insta::assert_snapshot!(stretched(&train, 300, 280, 16).unwrap(), @"over 600 steps instead of 300: training resumes at learning rate 1.7e-4 instead of 3.0e-6");
        insta::assert_snapshot!(steps(&train, 280), @"600, resumed after step 280");
        insta::assert_snapshot!(steps(&train, 600), @"nothing left to train: 600 of 600 steps are done; increase `train.steps` to continue");
        train.schedule.kind = LearningRate::Constant;
        assert_eq!(stretched(&train, 300, 280, 16), None);
    }

    #[test]
    fn the_line_of_a_strategy_that_has_nothing_to_shard() {
        insta::assert_snapshot!(nothing_to_shard(1), @"ddp: a single rank, nothing to shard");
        insta::assert_snapshot!(nothing_to_shard(2), @"ddp: 2 ranks hold a single replica, nothing to shard");
    }

    /// Of parameters, gradients and AdamW's state of seven billion parameters in f32.
    fn seven_billion([params, grads, optimizer]: [u64; 3]) -> Footprint {
        Footprint {
            params: params * 1_000_000_000,
            grads: grads * 1_000_000_000,
            optimizer: optimizer * 1_000_000_000,
            activations: 48 << 30,
            ..Footprint::default()
        }
    }

    #[test]
    fn the_memory_line_of_seven_billion_parameters() {
        let ddp = seven_billion([28, 28, 56]);
        insta::assert_snapshot!(memory(&ddp, 0, 0), @"parameters 26.1 GiB, gradients 26.1 GiB, optimizer 52.2 GiB, activations 48.0 GiB");
        // An eighth of it.
        let zero3 = Footprint {
            params: 3_500_000_000,
            grads: 3_500_000_000 + (1 << 30),
            in_flight: 1 << 30,
            gathered: 2 << 30,
            padding: 5 << 20,
            offloaded: [0, 8_000_000_000],
            ..seven_billion([0, 0, 7])
        };
        insta::assert_snapshot!(memory(&zero3, 3 << 30, 5 << 20), @"parameters 3.3 GiB (plus 2.0 GiB gathered), gradients 4.3 GiB (1.0 GiB of it in flight), optimizer 6.5 GiB in memory (7.5 GiB in a file), including 5.0 MiB of padding, activations 48.0 GiB, checkpoint snapshot 3.0 GiB, NCCL 5.0 MiB");
    }

    #[test]
    fn heads_without_tensor_cores_are_warned_of() {
        assert_eq!([32, 64, 128].map(slow_heads), [None, None, None]);
        insta::assert_snapshot!(slow_heads(96).unwrap(), @"heads of 96 channels do not use tensor cores: attention computes in f32, several times slower; 32, 64 and 128 channels use them (`model.n_head`)");
    }
}
