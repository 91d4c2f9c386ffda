//! What others ran into with tensor, sequence, context and pipeline parallelism: an issue of theirs each, or a scenario of their
//! tests, on whole runs. What shows without a run is beside the code: schedules in `worker/src/parallel/pipeline`, layers
//! that are cut in `tensor_group.rs`.

use crate::train_support::faulty::{FaultyDevice, Spoilt};
use crate::train_support::{Job, Trained, assert_same, assert_within, copy_folder};
use ddp_worker::config::{
    Accumulate, ContextAlgorithm, LastBatch, LearningRate, ModelKind, OnNonFinite, OptimizerKind,
    PipelineSchedule, Recompute, Rescale, Resume, Strategy, TrainConfig,
};
use ddp_worker::plan::Estimate;

/// Ranks along each axis, and what they do.
#[derive(Clone, Copy, Debug)]
struct Layout {
    stages: usize,
    schedule: PipelineSchedule,
    data: usize,
    strategy: Strategy,
    /// Ranks that hold the experts of a layer together.
    expert: usize,
    context: usize,
    tensor: usize,
    sequence: bool,
}

const ALONE: Layout = Layout {
    stages: 1,
    schedule: PipelineSchedule::OneFOneB,
    data: 1,
    strategy: Strategy::Ddp,
    expert: 1,
    context: 1,
    tensor: 1,
    sequence: false,
};

const fn piped(stages: usize, schedule: PipelineSchedule) -> Layout {
    Layout {
        stages,
        schedule,
        ..ALONE
    }
}

const fn cut(tensor: usize, sequence: bool) -> Layout {
    Layout {
        tensor,
        sequence,
        ..ALONE
    }
}

/// Each axis alone, and together.
const LAYOUTS: [Layout; 10] = [
    piped(2, PipelineSchedule::OneFOneB),
    piped(2, PipelineSchedule::Zbv),
    piped(4, PipelineSchedule::ZbH1),
    cut(2, false),
    cut(4, true),
    Layout {
        data: 2,
        strategy: Strategy::Zero3,
        ..cut(2, true)
    },
    Layout {
        schedule: PipelineSchedule::Interleaved,
        stages: 2,
        data: 2,
        strategy: Strategy::Zero1,
        ..cut(2, true)
    },
    Layout { context: 2, ..ALONE },
    Layout {
        context: 4,
        strategy: Strategy::Zero1,
        ..piped(2, PipelineSchedule::ZbH1)
    },
    Layout {
        data: 2,
        context: 2,
        strategy: Strategy::Zero3,
        ..cut(2, true)
    },
];

/// The same of a model with experts: some on each rank, of all data-parallel ranks or of half of them, beside each axis.
const EXPERT_LAYOUTS: [Layout; 5] = [
    Layout {
        data: 2,
        expert: 2,
        ..ALONE
    },
    Layout {
        data: 4,
        strategy: Strategy::Zero3,
        expert: 2,
        ..ALONE
    },
    Layout {
        data: 2,
        strategy: Strategy::Zero1,
        expert: 4,
        context: 2,
        ..ALONE
    },
    Layout {
        data: 2,
        strategy: Strategy::Zero2,
        expert: 2,
        ..cut(2, true)
    },
    Layout {
        data: 2,
        strategy: Strategy::Zero1,
        expert: 2,
        ..piped(2, PipelineSchedule::ZbH1)
    },
];

fn with_experts(c: &mut TrainConfig) {
    c.model.kind = ModelKind::Mixtral;
    c.model.n_inner = Some(24);
}

/// Micro-batches of all data-parallel ranks in a step.
const MICRO_BATCHES: usize = 8;

impl Layout {
    fn ranks(self) -> u32 {
        (self.stages * self.data * self.context * self.tensor) as u32
    }

    /// Whether the contract promises the bits of one rank.
    fn has_the_bits_of_one_rank(self) -> bool {
        self.data == 1 && self.context == 1 && self.tensor == 1
    }

    fn apply(self, c: &mut TrainConfig) {
        c.train.grad_accumulation = MICRO_BATCHES / self.data;
        c.parallel.strategy = self.strategy;
        c.parallel.expert = self.expert;
        c.parallel.context = self.context;
        c.parallel.tensor = self.tensor;
        c.parallel.sequence = self.sequence;
        c.parallel.pipeline.stages = self.stages;
        c.parallel.pipeline.schedule = self.schedule;
    }

    /// A tied GPT-2 of four blocks. The updates of SGD have the scale of the gradients, which Adam would hide.
    fn job(self, change: impl FnOnce(&mut TrainConfig)) -> Job {
        Job::with(|c| {
            c.model.n_layer = 4;
            c.model.n_head = 4;
            c.model.n_embd = 32;
            c.train.steps = 3;
            c.train.grad_clip = None;
            c.train.optimizer.kind = OptimizerKind::Sgd;
            c.train.optimizer.lr = 0.05;
            self.apply(c);
            change(c);
        })
    }

    fn train(self, change: impl FnOnce(&mut TrainConfig)) -> Trained {
        self.job(change).train(self.ranks())
    }
}

/// The numbers of one rank: their bits where they are promised, else losses and norms to 1e-5.
fn assert_equal(layout: Layout, one: &Trained, other: &Trained) {
    let what = format!("{layout:?}");
    if layout.has_the_bits_of_one_rank() {
        return assert_same(one, other, &what);
    }
    assert_within(1e-5, one, other, &what);
    for (one, other) in one.metrics.iter().zip(&other.metrics) {
        let error = (one.grad_norm - other.grad_norm).abs() / one.grad_norm;
        assert!(error < 1e-5, "step {}, {what}: norm off by {error}", one.step);
    }
}

/// All layouts against one rank.
fn every_layout_equals_one_rank(change: impl Fn(&mut TrainConfig)) -> Trained {
    let alone = ALONE.train(&change);
    for layout in LAYOUTS {
        assert_equal(layout, &alone, &layout.train(&change));
    }
    alone
}

/// torchtitan 596: each stage clipped by the norm of its own gradients. nanotron: `test_clip_grads_with_pp`,
/// `test_clip_grads_with_tp` and `test_clip_grads_tied_weights`: a matrix that two stages hold counts once.
#[test]
fn gradients_are_clipped_by_the_norm_of_the_whole_model() {
    const MOST: f32 = 0.05;
    let clipped = every_layout_equals_one_rank(|c| c.train.grad_clip = Some(MOST));
    let norms: Vec<f64> = clipped.metrics.iter().map(|line| line.grad_norm).collect();
    assert!(
        norms.iter().all(|norm| *norm > f64::from(MOST)),
        "each is clipped: {norms:?}"
    );
}

/// pytorch 136766: zero-bubble schedules with recomputation ran out of memory, since each micro-batch kept its graph.
#[test]
fn zero_bubble_with_recomputation_keeps_no_more_than_its_micro_batches_in_flight() {
    let activations = |layout: Layout, recompute, micro_batches, rank| {
        let job = layout.job(|c| {
            c.model.n_layer = 8;
            c.model.n_embd = 128;
            c.model.block_size = 64;
            c.train.recompute = recompute;
            c.train.grad_accumulation = micro_batches;
        });
        let estimate = Estimate::of(&job.config, &job.env(rank, layout.ranks())).unwrap();
        estimate.held.activations
    };
    for schedule in [PipelineSchedule::ZbH1, PipelineSchedule::Zbv] {
        let layout = piped(2, schedule);
        for rank in 0..2 {
            let what = format!("{schedule:?}, rank {rank}");
            let bytes = |recompute| activations(layout, recompute, 8, rank);
            let (none, full) = (bytes(Recompute::Norms), bytes(Recompute::Full));
            // Between its halves of backward a micro-batch keeps what was computed again.
            assert!(
                full < none,
                "{what}: {full} bytes, and {none} without recomputation"
            );
            // What is kept is that of the micro-batches in the air, however many a step has.
            for recompute in [Recompute::Norms, Recompute::Full] {
                let (eight, more) = (bytes(recompute), activations(layout, recompute, 32, rank));
                let most = eight + eight / 20;
                assert!(
                    more <= most,
                    "{what}, {recompute:?}: {more} bytes, and {eight} for 8"
                );
            }
        }
    }
}

/// torchtitan, "evaluation before training": stages knew the shapes of their messages from the first training step.
#[test]
fn evaluation_before_any_training_has_the_loss_of_one_rank() {
    let evaluated = |layout: Layout| {
        let mut job = ALONE.job(|c| {
            c.train.rescale = Rescale::KeepMicroBatch;
            c.run.resume = Resume::Auto;
        });
        let trained = job.train(1);
        // Its steps are done: the next process has only the evaluation left.
        layout.apply(&mut job.config);
        let again = job.train(layout.ranks());
        assert_eq!(again.metrics.len(), trained.metrics.len(), "nothing was trained");
        [trained, again].map(|run| run.summary.val_loss.unwrap())
    };
    for layout in LAYOUTS {
        let [trained, again] = evaluated(layout);
        let error = (trained - again).abs() / trained;
        let most = if layout.has_the_bits_of_one_rank() {
            0.0
        } else {
            1e-6
        };
        assert!(error <= most, "{layout:?}: {again}, not {trained}");
    }
}

/// pytorch 168058: first values and masks of dropout depended on how the model was sharded. torchtitan 3029: one seed, 18
/// layouts, losses of the first step between 12.0325 and 12.0797.
#[test]
fn first_values_and_masks_are_those_of_the_seed_under_any_layout() {
    for (kind, layouts) in [
        (ModelKind::Gpt2, &LAYOUTS[..]),
        (ModelKind::Llama, &LAYOUTS),
        (ModelKind::Mixtral, &EXPERT_LAYOUTS),
    ] {
        let first = |dropout: f32| {
            move |c: &mut TrainConfig| {
                c.model.kind = kind;
                c.model.dropout = dropout;
                c.train.steps = 1;
                c.train.optimizer.lr = 0.0;
                c.train.optimizer.momentum = Some(0.0);
            }
        };
        let [alone, without] = [0.2, 0.0].map(|dropout| ALONE.train(first(dropout)));
        assert_ne!(alone.losses(), without.losses());
        for layout in layouts {
            let found = layout.train(first(0.2));
            assert_eq!(found.state, alone.state, "first values: {kind:?}, {layout:?}");
            assert_within(1e-6, &alone, &found, &format!("masks: {kind:?}, {layout:?}"));
        }
    }
}

/// torchtitan 1306, pytorch 150336: sequence and context parallelism with positions that the ranks do not divide.
#[test]
fn positions_that_ranks_do_not_divide_are_run_or_refused_in_words() {
    let odd = |samples: usize| {
        move |c: &mut TrainConfig| {
            c.model.block_size = 15;
            c.train.micro_batch = samples;
        }
    };
    // Rows are shared, of all samples: 30 of them.
    let alone = ALONE.train(odd(2));
    for layout in [cut(2, false), cut(4, false), cut(2, true)] {
        assert_equal(layout, &alone, &layout.train(odd(2)));
    }
    let refused = |layout: Layout, words: &str| {
        // One that fails first ends it for the other.
        let outcomes = layout.job(odd(1)).run(layout.ranks());
        let errors = outcomes.iter().map(|o| o.as_ref().unwrap_err().to_string());
        errors.into_iter().find(|error| error.contains(words)).unwrap()
    };
    insta::assert_snapshot!(refused(LAYOUTS[7], "context"), @r"
    `model.block_size` (15) cannot be divided over 2 context ranks, each of which computes two chunks of the positions of a sample
      hint: set `model.block_size` to 12 or 16, or a different `parallel.context`
    ");
    insta::assert_snapshot!(refused(cut(2, true), "1 × 15"), @r"
    `parallel.sequence: true` shares the positions of a micro-batch, but 1 × 15 of them cannot be divided over 2 tensor ranks; `train.micro_batch: 2` would work
      hint: change `train.micro_batch` or `model.block_size`, or leave out `parallel.sequence`
    ");
}

/// transformers 39648, Megatron-LM 673: the loss was averaged over the ranks that share a sample, and each rank's mean weighed
/// the same, however many targets it had.
#[test]
fn the_loss_is_the_mean_over_all_targets_under_any_layout() {
    // What the epoch leaves over is not the same for all data-parallel ranks.
    let change = |c: &mut TrainConfig| {
        c.data.last_batch = LastBatch::Short;
        c.model.block_size = 128;
        c.train.micro_batch = 3;
        c.train.steps = 5;
    };
    let alone = every_layout_equals_one_rank(change);
    let tokens: Vec<u64> = alone.metrics.iter().map(|line| line.tokens).collect();
    let sizes: Vec<u64> = tokens.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(
        sizes.iter().any(|size| *size < tokens[0]),
        "a step is short: {tokens:?}"
    );
}

/// A rank's queries see gathered keys and values in the order of one rank, so that losses before the first
/// update have its bits; ZeRO-1 to ZeRO-3 sum and update alike.
#[test]
fn context_ranks_have_the_losses_of_one_rank_and_one_state_whatever_is_sharded() {
    for (kind, context, data) in [
        (ModelKind::Gpt2, 2, 1),
        (ModelKind::Llama, 4, 1),
        (ModelKind::Gpt2, 2, 2),
    ] {
        let change = |c: &mut TrainConfig| {
            c.model.kind = kind;
            c.model.dropout = 0.1;
            c.model.block_size = 64;
            c.train.optimizer.kind = OptimizerKind::Adamw;
            c.train.optimizer.lr = 1e-3;
            c.parallel.accumulate = Accumulate::Full;
        };
        let alone = ALONE.train(change);
        let sharded = |strategy| {
            Layout {
                data,
                strategy,
                context,
                ..ALONE
            }
            .train(change)
        };
        let zero1 = sharded(Strategy::Zero1);
        let what = format!("{kind:?}, {context} context × {data} data-parallel ranks");
        assert_within(1e-5, &alone, &zero1, &what);
        assert_eq!(alone.losses()[0] as f32, zero1.losses()[0] as f32, "{what}");
        for strategy in [Strategy::Zero2, Strategy::Zero3] {
            assert_same(&zero1, &sharded(strategy), &format!("{strategy:?}, {what}"));
        }
    }
}

/// Megatron-LM: `test_zero_tokens_for_some_experts`. A micro-batch has two positions, and no expert of some ranks has any.
#[test]
fn zero_tokens_for_some_experts() {
    let few = |c: &mut TrainConfig| {
        with_experts(c);
        c.model.experts.top_k = 1;
        c.model.block_size = 4;
        c.train.micro_batch = 1;
    };
    let alone = ALONE.train(few);
    for layout in EXPERT_LAYOUTS {
        assert_equal(layout, &alone, &layout.train(few));
    }
    let loads = alone.metrics.iter().map(|line| line.experts.unwrap().expert_load);
    assert!(loads.clone().all(|load| load > 1.0), "{loads:?}");
}

/// pytorch 160285: the gradients of experts were scaled by the number of ranks that hold them together. The updates of SGD, and
/// the norm, would show it. What the router counts does not depend on who counts it.
#[test]
fn gradients_of_experts_are_not_scaled_by_the_size_of_their_group() {
    let alone = ALONE.train(with_experts);
    for layout in EXPERT_LAYOUTS {
        let found = layout.train(with_experts);
        assert_equal(layout, &alone, &found);
        for (one, other) in alone.metrics.iter().zip(&found.metrics) {
            let [one, other] = [one, other].map(|line| line.experts.unwrap());
            assert_eq!(one.expert_load, other.expert_load, "{layout:?}");
            let error = (one.balance_loss - other.balance_loss).abs() / one.balance_loss;
            assert!(error < 1e-5, "{layout:?}: balance off by {error}");
        }
    }
}

/// Where an expert has room for half of its mean, choices are dropped, and the others are as with any room.
#[test]
fn experts_drop_what_they_have_no_room_for() {
    let narrow = |c: &mut TrainConfig| {
        with_experts(c);
        c.model.experts.capacity = Some(0.5);
    };
    let alone = ALONE.train(narrow);
    assert_equal(EXPERT_LAYOUTS[1], &alone, &EXPERT_LAYOUTS[1].train(narrow));
    let dropped = alone.metrics[0].experts.unwrap().expert_dropped;
    assert!((0.5..1.0).contains(&dropped), "{dropped}");
    let roomy = ALONE.train(|c| {
        with_experts(c);
        c.model.experts.capacity = Some(8.0);
    });
    assert_same(&ALONE.train(with_experts), &roomy, "room for all");
}

/// Keys that go round are those that are gathered, with their masks; only sums have another order. Of three ranks, the
/// last one sends and receives over one link.
#[test]
fn keys_that_go_round_make_the_losses_of_keys_that_are_gathered() {
    for (kind, context, strategy) in [
        (ModelKind::Gpt2, 2, Strategy::Ddp),
        (ModelKind::Llama, 3, Strategy::Zero1),
        (ModelKind::Llama, 4, Strategy::Zero3),
    ] {
        let train = |context, algorithm| {
            let layout = Layout {
                context,
                strategy: if context == 1 { Strategy::Ddp } else { strategy },
                ..ALONE
            };
            layout.train(|c| {
                c.model.kind = kind;
                c.model.dropout = 0.1;
                c.model.block_size = 48;
                c.parallel.context_algorithm = algorithm;
            })
        };
        let alone = train(1, ContextAlgorithm::Gather);
        let gathered = train(context, ContextAlgorithm::Gather);
        let ring = train(context, ContextAlgorithm::Ring);
        let what = format!("{kind:?} on {context} context ranks");
        assert_within(1e-5, &alone, &ring, &what);
        assert_within(1e-5, &gathered, &ring, &what);
        assert_same(
            &ring,
            &train(context, ContextAlgorithm::Ring),
            &format!("{what}, again"),
        );
    }
}

/// A job under `to` that goes on from a copy of what `from` has saved.
fn moved(from: &Job, to: Layout) -> Job {
    let mut again = Job::new();
    let data = again.config.data.clone();
    again.config = from.config.clone();
    again.config.data = data;
    again.config.run.out_dir = Some(again.out_dir_beside("again"));
    copy_folder(&from.out_dir(), &again.out_dir());
    to.apply(&mut again.config);
    again
}

/// A run under `to` that loads what `from` has saved, has nothing to do but to skip a step, and saves it again.
fn saved_again(from: &Job, to: Layout) -> Trained {
    let mut again = moved(from, to);
    again.config.train.steps += 1;
    again.config.train.on_nonfinite = OnNonFinite::Skip;
    let spoilt = Spoilt::in_passes(u64::MAX);
    again.device = Some(Box::new(move |_| FaultyDevice::going_wrong(spoilt, 1)));
    let trained = again.train(to.ranks());
    assert_eq!(trained.metrics.last().unwrap().skipped, 1, "{to:?}");
    trained
}

/// Megatron-LM 1517, and its `test_optimizer_resharding`: the optimizer's state could not be read by other tensor, pipeline
/// and expert ranks.
#[test]
fn optimizer_state_is_read_by_other_layouts() {
    state_is_read_by_other_layouts(&LAYOUTS, |_| ());
    state_is_read_by_other_layouts(&EXPERT_LAYOUTS, with_experts);
}

fn state_is_read_by_other_layouts(layouts: &[Layout], model: fn(&mut TrainConfig)) {
    let all: Vec<Layout> = std::iter::once(&ALONE).chain(layouts).copied().collect();
    for (i, from) in all.iter().enumerate() {
        let job = from.job(|c| {
            c.train.steps = 2;
            c.train.optimizer.kind = OptimizerKind::Adamw;
            c.train.optimizer.lr = 1e-3;
            c.train.verify_every = 0;
            c.train.rescale = Rescale::KeepMicroBatch;
            c.run.resume = Resume::Auto;
            model(c);
        });
        let before = job.train(from.ranks());
        assert!(
            before
                .state
                .keys()
                .any(|name| name.starts_with("optimizer.exp_avg_sq"))
        );
        // A third of the pairs: each is read by one rank, and by the layouts one place and three places further.
        for to in [all[(i + 1) % all.len()], all[(i + 3) % all.len()], ALONE] {
            let after = saved_again(&job, to);
            assert_eq!(before.state, after.state, "{from:?} to {to:?}");
        }
    }
}

/// nanotron: `test_save_and_load_with_changed_topology`. The loss goes on as if nothing had changed.
#[test]
fn a_run_goes_on_with_other_stages_and_tensor_ranks() {
    let constant = |c: &mut TrainConfig| {
        c.train.steps = 7;
        c.train.optimizer.kind = OptimizerKind::Adamw;
        c.train.optimizer.lr = 1e-3;
        c.train.schedule.kind = LearningRate::Constant;
        c.run.resume = Resume::Auto;
    };
    let undisturbed = ALONE.train(constant);
    let mut job = ALONE.job(constant);
    for (steps, layout) in [
        (1, LAYOUTS[6]),
        (2, LAYOUTS[2]),
        (3, LAYOUTS[5]),
        (4, LAYOUTS[1]),
        (5, LAYOUTS[4]),
        (6, LAYOUTS[8]),
        (7, LAYOUTS[9]),
    ] {
        layout.apply(&mut job.config);
        job.config.train.steps = steps;
        job.train(layout.ranks());
    }
    let lines = job.metrics();
    assert_eq!(
        lines.iter().map(|line| line.world_size).collect::<Vec<_>>(),
        [8, 4, 4, 2, 4, 8, 8]
    );
    for (one, other) in undisturbed.metrics.iter().zip(&lines) {
        let error = (one.loss - other.loss).abs() / one.loss;
        assert!(error < 1e-5, "step {}: {} and {}", one.step, one.loss, other.loss);
        assert_eq!(one.tokens, other.tokens);
    }
}

/// Which rank has which experts and positions makes no difference to forward: the first loss after a move has the bits of a
/// run that was not moved. Gradients are summed in another order: the losses after it agree to 1e-5.
#[test]
fn a_run_goes_on_with_other_expert_and_context_ranks() {
    type Change = fn(&mut TrainConfig);
    let models: [Change; 2] = [with_experts, |_| ()];
    let four = |expert, strategy| Layout {
        data: 4,
        strategy,
        expert,
        ..ALONE
    };
    let shared = |data, context| Layout {
        data,
        context,
        strategy: Strategy::Zero1,
        ..ALONE
    };
    let [.., with_context, with_tensor, with_stages] = EXPERT_LAYOUTS;
    let cases = [
        (
            models[0],
            four(2, Strategy::Zero3),
            vec![
                ALONE,
                four(4, Strategy::Zero1),
                with_context,
                with_tensor,
                with_stages,
            ],
        ),
        (
            models[0],
            with_context,
            vec![ALONE, four(1, Strategy::Ddp), four(4, Strategy::Zero3)],
        ),
        (
            models[1],
            shared(2, 2),
            vec![ALONE, shared(1, 4), shared(4, 1), LAYOUTS[9]],
        ),
    ];
    for (model, from, others) in cases {
        let job = |steps| {
            from.job(|c| {
                c.train.steps = steps;
                c.train.optimizer.kind = OptimizerKind::Adamw;
                c.train.optimizer.lr = 1e-3;
                c.train.schedule.kind = LearningRate::Constant;
                c.run.resume = Resume::Auto;
                model(c);
            })
        };
        let undisturbed = job(5).train(from.ranks());
        let begun = job(2);
        begun.train(from.ranks());
        for to in others {
            let mut again = moved(&begun, to);
            again.config.train.steps = 5;
            let found = again.train(to.ranks());
            let what = format!("{from:?} to {to:?}");
            assert_eq!(found.metrics[2].world_size, to.ranks(), "{what}");
            let first = [&undisturbed, &found].map(|run| run.losses()[2] as f32);
            if to.tensor == 1 {
                assert_eq!(first[0], first[1], "{what}");
            }
            assert_within(1e-5, &undisturbed, &found, &what);
            assert_eq!(undisturbed.metrics[4].tokens, found.metrics[4].tokens, "{what}");
        }
    }
}

/// Megatron-LM: `test_vocab_size_padding_change`. Rows of padding follow from the configuration, never from the number of
/// ranks: a checkpoint has the same table under any layout.
#[test]
fn the_padding_of_the_vocabulary_does_not_depend_on_the_layout() {
    let padded = |c: &mut TrainConfig| {
        c.model.vocab_size = Some(264);
        c.train.steps = 1;
    };
    let rows = |job: &Job| job.parameters()["wte.weight"].len() / job.config.model.n_embd;
    let alone = ALONE.job(padded);
    alone.train(1);
    for layout in LAYOUTS {
        let job = layout.job(padded);
        job.train(layout.ranks());
        assert_eq!([rows(&alone), rows(&job)], [264; 2], "{layout:?}");
    }
    let refused = cut(4, false)
        .job(|c| c.model.vocab_size = Some(258))
        .run(4)
        .remove(0);
    insta::assert_snapshot!(refused.unwrap_err(), @r"
    `model.vocab_size` (258) cannot be divided over 4 tensor ranks
      hint: set `model.vocab_size` to 260, or a different `parallel.tensor`
    ");
}

/// Megatron-LM: `uneven_interleaving`. Neither the layers nor the micro-batches are the same for all stages and rounds.
#[test]
fn interleaving_with_uneven_layers_and_rounds_equals_one_rank() {
    let change = |c: &mut TrainConfig| {
        c.model.n_layer = 9;
        c.train.grad_accumulation = 5;
    };
    let alone = ALONE.train(change);
    for (stages, layers) in [
        (2, vec![1, 3, 2, 3]),
        (3, vec![1, 2, 1, 3, 1, 1]),
        (2, vec![2, 1, 1, 2, 1, 2]),
    ] {
        let found = piped(stages, PipelineSchedule::Interleaved).train(|c| {
            change(c);
            c.parallel.pipeline.chunks = Some(layers.len() / stages);
            c.parallel.pipeline.layers = Some(layers.clone());
        });
        assert_same(&alone, &found, &format!("{layers:?} on {stages} ranks"));
    }
    // Megatron-LM 1304: 30 layers on 4 stages silently became 28.
    let divided = piped(4, PipelineSchedule::OneFOneB).train(change);
    assert_same(&alone, &divided, "divided by cost over 4 ranks");
}
