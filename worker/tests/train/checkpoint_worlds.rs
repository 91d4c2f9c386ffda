//! Checkpoints from any number of ranks to any other, and runs that go on from them with the same bits.

use crate::train_support::faulty::{Fault, FaultyDevice, Spoilt};
use crate::train_support::{Job, Trained, copy_folder};
use ddp_worker::checkpoint::{Reader, TensorKind, TensorRecord, Which, file_stem};
use ddp_worker::config::{
    Accumulate, LastBatch, LearningRate, OffloadTarget, OnNonFinite, OptimizerKind, Precision, Recompute,
    Rescale, Resume, ShardGroup, Strategy, TrainConfig,
};

const SIZES: [u32; 5] = [1, 2, 3, 4, 8];
const STRATEGIES: [Strategy; 4] = [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];

/// Elements of parameters that each of `ranks` wrote into the latest checkpoint.
fn shares(job: &Job, ranks: u32) -> Vec<u64> {
    let reader = Reader::open(&job.out_dir(), Which::Latest).unwrap();
    let written_by = |rank| {
        let file = format!(
            "{}.safetensors",
            file_stem(&TensorKind::Parameter, rank, ranks as usize)
        );
        let pieces = reader.manifest().tensors.iter().flat_map(TensorRecord::ranges);
        let own = pieces.filter(|(_, piece)| piece.file == file);
        own.map(|(_, piece)| piece.end - piece.start).sum()
    };
    (0..ranks as usize).map(written_by).collect()
}

/// One step of a model of which each of eight ranks owns a part: eight times what is dealt out to a rank at once.
fn one_step(strategy: Strategy, precision: Precision) -> Job {
    Job::with(|c| {
        c.train.steps = 1;
        c.train.micro_batch = 1;
        c.train.verify_every = 0;
        set(c, precision);
        c.train.rescale = Rescale::KeepMicroBatch;
        c.run.resume = Resume::Auto;
        c.model.n_embd = 64;
        c.model.vocab_size = Some(2048);
        c.parallel.strategy = strategy;
    })
}

fn set(config: &mut TrainConfig, precision: Precision) {
    config.train.precision = precision;
}

/// Goes on from a copy of a run on other ranks, which load its state and have nothing to do but to save it as another
/// step: one that is skipped.
fn saved_again(first: &Job, (strategy, precision): (Strategy, Precision), ranks: u32) -> Trained {
    let mut again = Job::new();
    let data = again.config.data.clone();
    again.config = first.config.clone();
    again.config.data = data;
    again.config.run.out_dir = Some(again.out_dir_beside("again"));
    copy_folder(&first.out_dir(), &again.out_dir());
    again.config.parallel.strategy = strategy;
    set(&mut again.config, precision);
    again.config.train.steps = 2;
    again.config.train.on_nonfinite = OnNonFinite::Skip;
    let spoilt = Spoilt::in_passes(u64::MAX);
    again.device = Some(Box::new(move |_| FaultyDevice::going_wrong(spoilt, 1)));
    let trained = again.train(ranks);
    assert_eq!(trained.metrics[1].skipped, 1);
    assert_eq!(
        Reader::open(&again.out_dir(), Which::Latest)
            .unwrap()
            .manifest()
            .state
            .step,
        2
    );
    let written = shares(&again, ranks);
    assert!(
        written.iter().all(|&share| share > 0),
        "{strategy:?} on {ranks}: {written:?}"
    );
    trained
}

/// Over the sizes, every strategy loads what every other saved, and every third time in the other precision: a
/// checkpoint has the masters.
fn every_number_loads_what_every_other_saved(precision: Precision, turn: usize) {
    for (i, writers) in SIZES.into_iter().enumerate() {
        let wrote = STRATEGIES[(i + turn) % STRATEGIES.len()];
        let job = one_step(wrote, precision);
        let before = job.train(writers);
        assert!(
            shares(&job, writers).iter().all(|&share| share > 0),
            "{wrote:?} on {writers}"
        );
        assert!(before.state.keys().any(|name| name.starts_with("optimizer.")));
        for (j, readers) in SIZES.into_iter().enumerate() {
            let reads = STRATEGIES[(i + j) % STRATEGIES.len()];
            let other = match precision {
                Precision::F32 => Precision::Bf16,
                _ => Precision::F32,
            };
            let then = if (i + j) % 3 == 0 { other } else { precision };
            let after = saved_again(&job, (reads, then), readers);
            let what =
                format!("{wrote:?} on {writers} in {precision:?} to {reads:?} on {readers} in {then:?}");
            assert_eq!(before.state, after.state, "{what}");
        }
    }
}

#[test]
fn every_number_of_ranks_loads_what_every_other_saved_in_f32() {
    every_number_loads_what_every_other_saved(Precision::F32, 0);
}

#[test]
fn every_number_of_ranks_loads_what_every_other_saved_in_bf16() {
    every_number_loads_what_every_other_saved(Precision::Bf16, 2);
}

/// A run that dies in a step and goes on from the checkpoint before, beside one that does not: losses, norms, learning
/// rates and the last state are the same to the bit.
fn goes_on_as_undisturbed(what: &str, ranks: u32, change: impl Fn(&mut TrainConfig)) {
    let job = || {
        Job::with(|c| {
            c.model.n_layer = 2;
            c.model.n_embd = 64;
            c.train.steps = 8;
            c.train.micro_batch = 1;
            c.train.schedule.warmup_steps = 5;
            c.train.checkpoint_every = 3;
            // The checkpoint of step 3 is there when the fault comes.
            c.train.checkpoint_async = false;
            c.parallel.first_bucket_mb = 0.06;
            c.parallel.bucket_mb = 0.2;
            change(c);
        })
    };
    let undisturbed = job().train(ranks);
    let mut job = job();
    job.device = Some(Box::new(|session| {
        let is_broken = session.env().rank.get() == 0;
        FaultyDevice::going_wrong(Fault::Fails, if is_broken { 5 } else { u64::MAX })
    }));
    assert!(job.run(ranks).iter().all(Result::is_err), "{what}");
    let left = Reader::open(&job.out_dir(), Which::Latest).unwrap();
    assert_eq!(left.manifest().state.step, 3, "{what}");
    job.device = None;
    job.restarts = 1;
    let resumed = job.train(ranks);
    let numbers = |trained: &Trained| -> Vec<_> {
        let lines = trained.metrics.iter();
        lines
            .map(|l| (l.step, l.tokens, l.loss, l.grad_norm, l.lr))
            .collect()
    };
    assert_eq!(numbers(&undisturbed), numbers(&resumed), "{what}");
    assert_eq!(undisturbed.state, resumed.state, "{what}");
    assert_eq!(
        (resumed.metrics[2].generation, resumed.metrics[3].generation),
        (1, 2),
        "{what}"
    );
}

#[test]
fn a_run_goes_on_with_the_same_bits_whatever_it_is_made_of() {
    goes_on_as_undisturbed("accumulation of shards", 2, |c| {
        c.parallel.strategy = Strategy::Zero2;
        c.train.grad_accumulation = 2;
    });
    goes_on_as_undisturbed("accumulation of whole gradients", 2, |c| {
        c.parallel.strategy = Strategy::Zero3;
        c.parallel.accumulate = Accumulate::Full;
        c.train.grad_accumulation = 2;
    });
    goes_on_as_undisturbed("bf16", 2, |c| {
        c.parallel.strategy = Strategy::Zero1;
        c.train.precision = Precision::Bf16;
        c.train.recompute = Recompute::Full;
    });
    goes_on_as_undisturbed("the optimizer's state in a file", 2, |c| {
        c.parallel.strategy = Strategy::Zero1;
        c.train.offload.optimizer = OffloadTarget::File;
    });
    for ranks in [1, 2] {
        goes_on_as_undisturbed("parameters in a file", ranks, |c| {
            c.parallel.strategy = Strategy::Zero3;
            c.train.offload.optimizer = OffloadTarget::File;
            c.train.offload.parameters = OffloadTarget::File;
        });
    }
    for kind in [OptimizerKind::Lion, OptimizerKind::Sgd, OptimizerKind::Muon] {
        goes_on_as_undisturbed(&format!("{kind:?}"), 2, |c| {
            c.parallel.strategy = Strategy::Zero2;
            c.train.optimizer.kind = kind;
            c.train.schedule.kind = LearningRate::InverseSqrt;
        });
    }
    goes_on_as_undisturbed("two copies of the state", 4, |c| {
        c.parallel.strategy = Strategy::Zero3;
        c.parallel.shard_group = Some(ShardGroup::Ranks(2));
    });
    goes_on_as_undisturbed("an epoch that ends in a smaller batch", 2, |c| {
        c.data.last_batch = LastBatch::Short;
        // 443 samples: the fourth and the eighth step are short.
        c.train.micro_batch = 30;
        c.train.grad_accumulation = 2;
        c.train.threads = Some(1);
    });
    goes_on_as_undisturbed("an epoch that goes over into the next", 3, |c| {
        c.train.micro_batch = 35;
    });
}
