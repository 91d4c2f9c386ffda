//! What a rank holds and moves: the closed formulas for the model's real number of parameters, and buffers that are
//! declared by name. Expected numbers are worked out here from the model's sizes; the run reports what it allocated
//! and what its transport counted.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::train_support::Job;
use crate::train_support::probed::{Moment, ProbedDevice};
use ddp_worker::config::{
    Accumulate, ModelKind, PipelineSchedule, Precision, Recovery, ReduceDtype, ShardGroup, Strategy,
    TrainConfig,
};
use ddp_worker::mesh::MeshShape;
use ddp_worker::model;
use ddp_worker::ops::CHUNK;
use ddp_worker::parallel::{Dtypes, GradientLayout, LayoutConfig, Sharding};
use ddp_worker::plan::Estimate;

const ALL: [Strategy; 4] = [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];
const TYPES: [(Precision, ReduceDtype); 3] = [
    (Precision::F32, ReduceDtype::F32),
    (Precision::Bf16, ReduceDtype::Bf16),
    (Precision::Bf16, ReduceDtype::F32),
];

const LAYERS: usize = 2;
const CHANNELS: usize = 128;
const POSITIONS: usize = 16;
const VOCABULARY: usize = 256;

/// Parameters of the groups of a GPT-2: the last norm, a block, positions, tokens (tied to the head).
const HEAD: usize = 2 * CHANNELS;
const BLOCK: usize = 12 * CHANNELS * CHANNELS + 13 * CHANNELS;
const WPE: usize = POSITIONS * CHANNELS;
const WTE: usize = VOCABULARY * CHANNELS;
const GROUPS: usize = LAYERS + 3;

/// Of every bucket but the first, which is smaller.
const BUCKET_BYTES: usize = 400 << 10;

const PARAMETERS: usize = HEAD + LAYERS * BLOCK + WPE + WTE;

fn job(strategy: Strategy, change: impl FnOnce(&mut TrainConfig)) -> Job {
    Job::with(|c| {
        c.model.n_layer = LAYERS;
        c.model.n_embd = CHANNELS;
        c.model.block_size = POSITIONS;
        c.train.steps = 1;
        c.train.micro_batch = 1;
        c.train.verify_every = 0;
        c.parallel.strategy = strategy;
        c.parallel.first_bucket_mb = 0.06;
        c.parallel.bucket_mb = BUCKET_BYTES as f64 / 1_048_576.0;
        change(c);
    })
}

fn estimate(job: &Job, world: usize) -> Estimate {
    Estimate::of(&job.config, &job.env(0, world as u32)).unwrap()
}

/// Bytes of an element: of parameters, of gradients on the wire, and of gradients that are kept.
fn widths((precision, reduce_dtype): (Precision, ReduceDtype), micro_batches: usize) -> [usize; 3] {
    let params = if precision == Precision::Bf16 { 2 } else { 4 };
    let wire = match reduce_dtype {
        ReduceDtype::F32 => 4,
        ReduceDtype::Bf16 => 2,
    };
    [params, wire, if micro_batches > 1 { 4 } else { wire }]
}

/// What whoever runs it knows of a case.
#[derive(Clone, Copy, Debug)]
struct Case {
    strategy: Strategy,
    types: (Precision, ReduceDtype),
    world: usize,
    micro_batches: usize,
    accumulate: Accumulate,
}

impl Case {
    fn job(&self) -> Job {
        job(self.strategy, |c| {
            (c.train.precision, c.parallel.reduce_dtype) = self.types;
            c.train.grad_accumulation = self.micro_batches;
            c.parallel.accumulate = self.accumulate;
            if self.strategy == Strategy::Zero3 {
                // One bucket: none ends within a group, which would pad that too.
                (c.parallel.first_bucket_mb, c.parallel.bucket_mb) = (4.0, 4.0);
            }
        })
    }

    fn keeps_whole_gradients(&self) -> bool {
        self.world == 1
            || matches!(self.strategy, Strategy::Ddp | Strategy::Zero1)
            || (self.accumulate == Accumulate::Full && self.micro_batches > 1)
    }

    /// Bytes of parameters, gradients and optimizer for so many elements.
    fn formula(&self, elements: usize) -> [f64; 3] {
        let [params, _, kept] = widths(self.types, self.micro_batches);
        let state = if self.types.0 == Precision::Bf16 { 12 } else { 8 };
        let over = |is_sharded: bool| if is_sharded { self.world as f64 } else { 1.0 };
        let divisors = [
            over(self.strategy == Strategy::Zero3),
            over(!self.keeps_whole_gradients()),
            over(self.strategy != Strategy::Ddp),
        ];
        let whole = [params, kept, state].map(|each| (each * elements) as f64);
        [0, 1, 2].map(|kind| whole[kind] / divisors[kind])
    }

    /// A length that every rank has an equal part of, in whole chunks.
    fn padded(&self, elements: usize) -> usize {
        elements.next_multiple_of(self.world * CHUNK)
    }

    /// Slots in bytes: gradients in flight, gathered parameters. Of those in flight an upper bound where buckets are
    /// cut: a bucket is no larger than its capacity and a chunk for each group, and a part no larger than a block.
    fn slots(&self) -> [usize; 2] {
        let [params, wire, kept] = widths(self.types, self.micro_batches);
        let ordinary = 2 * self.padded(BLOCK);
        let tied = self.padded(WTE);
        let in_flight = match (self.keeps_whole_gradients(), wire == kept) {
            (false, _) => ordinary + tied,
            (true, false) if self.strategy == Strategy::Zero3 && self.world > 1 => ordinary,
            (true, false) if self.strategy == Strategy::Zero3 => 2 * self.padded(PARAMETERS + GROUPS * CHUNK),
            (true, false) => 2 * self.padded((BUCKET_BYTES / wire + GROUPS * CHUNK).max(BLOCK)),
            (true, true) => 0,
        };
        let gathered = if self.strategy == Strategy::Zero3 && self.world > 1 {
            ordinary + self.padded(HEAD) + self.padded(WPE) + tied
        } else {
            0
        };
        [wire * in_flight, params * gathered]
    }
}

fn close(found: f64, expected: f64) -> bool {
    (found - expected).abs() <= 0.02 * expected
}

fn check_memory(case: Case) {
    let job = case.job();
    let memory = job.train(case.world as u32).metrics[0].memory;
    let told = estimate(&job, case.world);
    assert_eq!(told.parameters as usize, PARAMETERS);
    let found = [memory.params, memory.grads, memory.optimizer];
    let held = told.held;
    assert_eq!(found, [held.params, held.grads, held.optimizer], "{case:?}");
    assert_eq!(memory.gathered, held.gathered, "{case:?}");
    assert_eq!(memory.activations, held.activations, "{case:?}");

    // The second use of the tied weight has a sum of its own.
    let adds_up = case.keeps_whole_gradients() && case.micro_batches > 1;
    let later_uses = if adds_up { 4 * WTE as u64 } else { 0 };
    let declared = [0, held.in_flight + later_uses, 0];
    for (kind, formula) in case.formula(told.padded as usize).into_iter().enumerate() {
        let expected = formula + declared[kind] as f64;
        let what = format!("{case:?}: kind {kind}, {} for {expected}", found[kind]);
        assert!(close(found[kind] as f64, expected), "{what}");
    }
    // What is declared is what the reasons for it ask for, and no more.
    let [in_flight, gathered] = case.slots();
    assert_eq!(held.gathered, gathered as u64, "{case:?}");
    if case.strategy == Strategy::Zero3 && case.world > 1 {
        assert_eq!(held.in_flight, in_flight as u64, "{case:?}");
        let groups = [HEAD, WPE, WTE].map(|len| case.padded(len)).iter().sum::<usize>();
        let whole = groups + LAYERS * case.padded(BLOCK);
        assert_eq!(told.padded as usize, whole, "{case:?}");
    }
    assert!(held.in_flight <= in_flight as u64, "{case:?}: {told:?}");
    // A bucket or a part ends on a chunk of each rank. Two neighbouring buckets are more than one can hold.
    let buckets = 2 * (4 * PARAMETERS).div_ceil(BUCKET_BYTES) + 2;
    let most = (buckets + GROUPS) * case.world * CHUNK;
    assert!(told.padded as usize - PARAMETERS <= most, "{case:?}: {told:?}");
    let of_padding = case.formula(told.padded as usize - PARAMETERS);
    assert!(close(held.padding as f64, of_padding.iter().sum()), "{case:?}");
}

fn memory_of_all(types: (Precision, ReduceDtype), worlds: &[usize]) {
    for &world in worlds {
        for strategy in ALL {
            for (micro_batches, accumulate) in [
                (1, Accumulate::Sharded),
                (4, Accumulate::Sharded),
                (4, Accumulate::Full),
            ] {
                check_memory(Case {
                    strategy,
                    types,
                    world,
                    micro_batches,
                    accumulate,
                });
            }
        }
    }
}

#[test]
fn memory_in_f32_is_the_formula_and_the_declared_buffers() {
    memory_of_all(TYPES[0], &[1, 2, 8]);
}

#[test]
fn memory_in_bf16_is_the_formula_and_the_declared_buffers() {
    memory_of_all(TYPES[1], &[3]);
    memory_of_all(TYPES[2], &[1, 4]);
}

#[test]
fn padding_of_a_gpt2_of_124_million_parameters_is_below_three_percent() {
    for strategy in ALL {
        for world in [1, 2, 4, 8] {
            let job = job(strategy, |c| {
                (c.model.n_layer, c.model.n_head, c.model.n_embd) = (12, 12, 768);
                (c.model.block_size, c.model.vocab_size) = (1024, Some(50_257));
                (c.parallel.first_bucket_mb, c.parallel.bucket_mb) = (1.0, 25.0);
            });
            let told = estimate(&job, world);
            assert_eq!(told.parameters, 124_439_808);
            let (padding, held) = (told.held.padding, told.held);
            let formula = held.params + held.grads - held.in_flight + held.optimizer - padding;
            // Most of it where both buckets and groups are cut, over eight ranks.
            assert!(
                100 * padding <= 3 * formula,
                "{strategy:?}, {world} ranks: {told:?}"
            );
        }
    }
}

/// Padded elements of what is reduced or gathered in one step's pass, and of the blocks among them.
fn padded_units(job: &Job, world: usize) -> (usize, usize) {
    let config = &job.config;
    let model = model::build(&config.model, VOCABULARY).unwrap();
    let layout = LayoutConfig::of(&config.parallel, world).with_dtypes(Dtypes::of(config));
    let layout = GradientLayout::of_model(&model, &layout).unwrap();
    let is_full = config.parallel.accumulate == Accumulate::Full && config.train.grad_accumulation > 1;
    let mesh = MeshShape::of_shards(world);
    let sharding = match config.parallel.strategy {
        Strategy::Ddp if config.parallel.sync_each_batch && config.train.grad_accumulation > 1 => {
            Sharding::of_buckets(&layout, MeshShape::of_shards(1), 0)
        }
        Strategy::Ddp => Sharding::replicated(&layout),
        Strategy::Zero2 if !is_full => Sharding::of_parts(&layout, mesh, 0),
        Strategy::Zero1 | Strategy::Zero2 => Sharding::of_buckets(&layout, mesh, 0),
        Strategy::Zero3 => Sharding::of_groups(&layout, mesh, 0),
    };
    let units = sharding.units().iter();
    let blocks = units.filter(|unit| model.params[unit.params[0].0].key.starts_with("h."));
    (sharding.whole_len(), blocks.map(|unit| unit.whole.len()).sum())
}

/// Steps, validations and checkpoints of a job move what the multiples say: of gradients, and of parameters.
fn check_traffic(job: &Job, world: usize, multiples: (usize, usize), again: usize) {
    let config = &job.config;
    let trained = job.train(world as u32);
    let (all, blocks) = padded_units(job, world);
    let [params, wire, _] = widths(
        (config.train.precision, config.parallel.reduce_dtype),
        config.train.grad_accumulation,
    );
    let unit = |elements: usize, each: usize| ((world - 1) * (elements / world) * each) as u64;
    let grads = multiples.0 as u64 * unit(all, wire);
    let params = multiples.1 as u64 * unit(all, params) + again as u64 * unit(blocks, params);
    let told = estimate(job, world).sent;
    for line in &trained.metrics {
        let (parallel, k) = (&config.parallel, config.train.grad_accumulation);
        let what = format!(
            "step {}, {:?} {:?} {}, reshard {}, {k} micro-batches, {world} ranks",
            line.step,
            parallel.strategy,
            parallel.accumulate,
            parallel.sync_each_batch,
            parallel.reshard_after_forward
        );
        let sent = line.wire_bytes;
        assert_eq!((sent.grads, sent.params), (grads, params), "{what}");
        assert_eq!((sent.grads, sent.params), (told.grads, told.params), "{what}");
    }
}

fn traffic_of_all(types: (Precision, ReduceDtype), worlds: &[usize]) {
    use Accumulate::{Full, Sharded};
    /// For k micro-batches: how often all gradients are sent, all parameters, and those of the blocks once more.
    type Multiples = fn(usize) -> ((usize, usize), usize);
    // The blocks are gathered again for backward. The head and the tied weight are still there, as backward begins
    // with them, and positions are not read: 3k, less these.
    let table: [(Strategy, Accumulate, bool, Multiples); 9] = [
        (Strategy::Ddp, Full, true, |_| ((2, 0), 0)),
        // `sync_each_batch`: `no_sync` saves (k - 1)/k of this.
        (Strategy::Ddp, Sharded, true, |k| ((2 * k, 0), 0)),
        (Strategy::Zero1, Sharded, true, |_| ((1, 1), 0)),
        (Strategy::Zero2, Sharded, true, |k| ((k, 1), 0)),
        (Strategy::Zero2, Full, true, |_| ((1, 1), 0)),
        (Strategy::Zero3, Sharded, true, |k| ((k, k), k)),
        (Strategy::Zero3, Sharded, false, |k| ((k, k), 0)),
        (Strategy::Zero3, Full, true, |k| ((1, k), k)),
        (Strategy::Zero3, Full, false, |k| ((1, k), 0)),
    ];
    for &world in worlds {
        for (strategy, accumulate, reshard, multiples) in table {
            for k in [1, 4] {
                let job = job(strategy, |c| {
                    (c.train.precision, c.parallel.reduce_dtype) = types;
                    c.train.steps = 2;
                    c.train.eval_every = 1;
                    c.train.checkpoint_every = 1;
                    c.train.grad_accumulation = k;
                    c.parallel.accumulate = accumulate;
                    c.parallel.reshard_after_forward = reshard;
                    c.parallel.sync_each_batch = (strategy, accumulate) == (Strategy::Ddp, Sharded);
                });
                let (all, again) = multiples(k);
                check_traffic(&job, world, all, again);
            }
        }
    }
}

/// Masters, moments and gradients of another rank's part, which are sent once a step, as they are kept.
#[test]
fn a_buddy_holds_and_receives_one_more_part() {
    for (strategy, types, micro_batches) in [
        (Strategy::Zero1, TYPES[0], 1),
        (Strategy::Zero2, TYPES[1], 1),
        (Strategy::Zero2, TYPES[2], 4),
        (Strategy::Zero3, TYPES[0], 4),
    ] {
        let job = |recovery| {
            job(strategy, |c| {
                (c.train.precision, c.parallel.reduce_dtype) = types;
                c.train.grad_accumulation = micro_batches;
                c.train.recovery = recovery;
            })
        };
        let [without, with] = [Recovery::None, Recovery::Buddy].map(|recovery| {
            let job = job(recovery);
            let (line, told) = (job.train(3).metrics[0].clone(), estimate(&job, 3));
            let found = [line.memory.optimizer, line.wire_bytes.grads];
            assert_eq!(found, [told.held.optimizer, told.sent.grads], "{strategy:?}");
            (found, told.padded)
        });
        let ([held, sent], part) = (with.0, with.1 / 3);
        let [_, _, kept] = widths(types, micro_batches).map(|width| width as u64 * part);
        assert_eq!(held - without.0[0], 12 * part + kept, "{strategy:?}");
        assert_eq!(sent - without.0[1], kept, "{strategy:?}");
    }
}

#[test]
fn traffic_in_f32_is_exactly_that_of_the_formulas() {
    traffic_of_all(TYPES[0], &[2, 3]);
}

#[test]
fn traffic_in_bf16_is_exactly_that_of_the_formulas() {
    traffic_of_all(TYPES[1], &[2]);
    traffic_of_all(TYPES[2], &[2]);
}

#[test]
fn what_is_foretold_of_copies_and_of_groups_that_persist_is_what_happens() {
    for strategy in ALL {
        for (group, persist_below, k) in [
            (Some(ShardGroup::Ranks(2)), 0, 1),
            (Some(ShardGroup::Ranks(2)), 0, 3),
            (Some(ShardGroup::Ranks(1)), 0, 2),
            (None, 20_000, 3),
        ] {
            if strategy == Strategy::Ddp && group.is_some() {
                continue;
            }
            let job = job(strategy, |c| {
                c.train.precision = Precision::Bf16;
                c.train.steps = 2;
                c.train.grad_accumulation = k;
                c.parallel.shard_group = group;
                c.parallel.persist_below = if strategy == Strategy::Zero3 {
                    persist_below
                } else {
                    0
                };
            });
            let (trained, told) = (job.train(4), estimate(&job, 4));
            for line in &trained.metrics {
                let what = format!("{strategy:?}, {group:?}, below {persist_below}, {k} micro-batches");
                let (sent, memory, held) = (line.wire_bytes, line.memory, told.held);
                assert_eq!(
                    (sent.grads, sent.params),
                    (told.sent.grads, told.sent.params),
                    "{what}"
                );
                assert_eq!([memory.params, memory.grads], [held.params, held.grads], "{what}");
                assert_eq!(
                    [memory.optimizer, memory.gathered],
                    [held.optimizer, held.gathered],
                    "{what}"
                );
            }
        }
    }
}

/// On eight ranks or fewer: tensor groups, uneven stages, a V of them, and all axes at once.
#[test]
fn what_is_foretold_of_layouts_is_what_happens() {
    type Change = fn(&mut TrainConfig);
    let layouts: [(&str, usize, Change); 10] = [
        ("dp 2 × cp 2, ep 4, zero2", 4, |c| {
            c.model.kind = ModelKind::Mixtral;
            (c.model.n_inner, c.model.experts.capacity) = (Some(64), Some(1.5));
            (c.parallel.expert, c.parallel.context) = (4, 2);
            c.parallel.strategy = Strategy::Zero2;
        }),
        ("cp 2, zero3", 2, |c| {
            c.parallel.context = 2;
            c.parallel.strategy = Strategy::Zero3;
        }),
        ("dp 2 × cp 2 × tp 2, zero1", 8, |c| {
            (c.parallel.tensor, c.parallel.sequence, c.parallel.context) = (2, true, 2);
            c.parallel.strategy = Strategy::Zero1;
        }),
        ("tp 2", 2, |c| c.parallel.tensor = 2),
        ("tp 2 that shares rows", 2, |c| {
            (c.parallel.tensor, c.parallel.sequence) = (2, true);
        }),
        ("pp 2, uneven", 2, |c| {
            c.parallel.pipeline.stages = 2;
            c.parallel.pipeline.layers = Some(vec![3, 1]);
        }),
        ("pp 2, ZBV", 2, |c| {
            c.parallel.pipeline.stages = 2;
            c.parallel.pipeline.schedule = PipelineSchedule::Zbv;
        }),
        ("pp 2, interleaved", 2, |c| {
            c.parallel.pipeline.stages = 2;
            c.parallel.pipeline.schedule = PipelineSchedule::Interleaved;
        }),
        ("pp 2, uneven the other way × dp 2, zero3", 4, |c| {
            c.parallel.pipeline.stages = 2;
            c.parallel.pipeline.layers = Some(vec![1, 3]);
            c.parallel.strategy = Strategy::Zero3;
        }),
        ("pp 2 × dp 2 × tp 2, zero1", 8, |c| {
            c.parallel.pipeline.stages = 2;
            (c.parallel.tensor, c.parallel.sequence) = (2, true);
            c.parallel.strategy = Strategy::Zero1;
        }),
    ];
    for (layout, world, change) in layouts {
        let job = job(Strategy::Ddp, |c| {
            c.model.n_layer = 4;
            c.train.steps = 2;
            c.train.grad_accumulation = 4;
            change(c);
        });
        expect_as_foretold(layout, &job, world);
    }
}

fn expect_as_foretold(layout: &str, job: &Job, world: usize) {
    let (trained, told) = (job.train(world as u32), estimate(job, world));
    for line in &trained.metrics {
        let (memory, held) = (line.memory, told.held);
        let [measured, planned] = [
            [
                memory.params,
                memory.grads,
                memory.optimizer,
                memory.gathered,
                memory.activations,
            ],
            [
                held.params,
                held.grads,
                held.optimizer,
                held.gathered,
                held.activations,
            ],
        ];
        assert_eq!(measured, planned, "{layout}");
        let (sent, planned) = (line.wire_bytes, told.sent);
        assert_eq!(
            (sent.grads, sent.params),
            (planned.grads, planned.params),
            "{layout}"
        );
        assert_eq!(sent.pipeline, planned.pipeline, "{layout}");
        // Where rows go depends on the router.
        if job.config.parallel.expert == 1 {
            assert_eq!(sent.activations, planned.activations, "{layout}");
        }
    }
}

/// Under ZeRO-3 a rank initialises its shard alone: had any a whole model on the way, it would have allocated
/// as much again as all of its state takes.
#[test]
fn no_rank_holds_the_whole_model_while_it_starts() {
    let mut job = job(Strategy::Zero3, |_| {});
    let started: Arc<Mutex<Vec<Arc<AtomicUsize>>>> = Arc::default();
    let all = started.clone();
    job.device = Some(Box::new(move |_| {
        let (bytes, trains) = (Arc::new(AtomicUsize::new(0)), AtomicBool::new(false));
        all.lock().unwrap().push(bytes.clone());
        ProbedDevice::telling(Arc::new(move |moment| match moment {
            Moment::Forward => trains.store(true, Ordering::Relaxed),
            Moment::Allocation(more) if !trains.load(Ordering::Relaxed) => {
                bytes.fetch_add(more, Ordering::Relaxed);
            }
            _ => {}
        }))
    }));
    let trained = job.train(4);
    let memory = &trained.metrics[0].memory;
    // Gathered groups lie in memory that ranks share.
    let state = (memory.params + memory.grads + memory.optimizer) as usize;
    let whole = PARAMETERS * size_of::<f32>();
    for bytes in started.lock().unwrap().iter() {
        let bytes = bytes.load(Ordering::Relaxed);
        assert!(
            bytes > 0 && bytes < state + whole / 2,
            "{bytes} of {state}, {whole}"
        );
    }
}
