//! What overlaps with what, shown by the order of events: an operation is held up until what must not wait for it has
//! happened. Were it waited for, nothing would go on, and the test would say what did not come.

mod train_support;

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ddp_worker::collective::{Operation, Request, Traffic};
use ddp_worker::config::{Precision, Strategy, TrainConfig};
use ddp_worker::device::{Arena, Buffer};
use ddp_worker::model;
use ddp_worker::ops::Op;
use ddp_worker::parallel::{GradientLayout, LayoutConfig, Sharding};
use train_support::watched::{Watch, WatchedDevice, watching};
use train_support::{Job, Trained, assert_same};

/// Longer than anything takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(40);

const BLOCKS: usize = 4;
const STEPS: usize = 3;
const RANKS: u32 = 2;

fn job(strategy: Strategy, change: impl FnOnce(&mut TrainConfig)) -> Job {
    Job::with(|c| {
        c.model.n_layer = BLOCKS;
        c.model.n_embd = 64;
        c.train.steps = STEPS as u64;
        c.train.micro_batch = 1;
        // Nothing between two steps.
        c.train.verify_every = 0;
        c.parallel.first_bucket_mb = 0.06;
        c.parallel.bucket_mb = 0.2;
        c.parallel.strategy = strategy;
        c.parallel.timeout_s = 120.0;
        change(c);
    })
}

/// Trains with one watch a rank.
fn watched<W: Watch>(mut job: Job, watches: &[Arc<W>]) -> Trained {
    let of_rank = |watches: &[Arc<W>]| {
        let watches = watches.to_vec();
        move |rank: u32| watches[rank as usize].clone()
    };
    let (device, transport) = (of_rank(watches), of_rank(watches));
    job.device = Some(Box::new(move |session| {
        WatchedDevice::telling(device(session.env().rank.get()))
    }));
    job.transport = Some(Box::new(move |session| {
        watching(transport(session.env().rank.get()))
    }));
    job.train(RANKS)
}

/// A pass over the blocks in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    Forward(usize),
    Backward(usize),
}

/// What happens to a rank.
#[derive(Clone, Debug)]
enum Mark {
    /// The group of a block is being gathered, into this memory.
    GatherBegan(usize, Pass, Buffer),
    GatherEnded(usize, Pass),
    /// A block has begun to compute.
    Computes(usize, Pass),
    /// A weight is read.
    Reads(Buffer),
    /// The head has begun its backward.
    Head(usize),
    /// The embedding has begun its forward.
    Embedding(usize),
}

/// Marks, in order, and who waits for them.
#[derive(Default)]
struct Log {
    marks: Mutex<Vec<Mark>>,
    more: Condvar,
    /// Marks that did not come.
    missed: Mutex<Vec<String>>,
}

impl Log {
    fn marks(&self) -> MutexGuard<'_, Vec<Mark>> {
        self.marks.lock().unwrap()
    }

    fn push(&self, mark: Mark) {
        self.marks().push(mark);
        self.more.notify_all();
    }

    /// Returns when there is such a mark. One that does not come is told of in the end, and no other is waited for.
    fn wait(&self, what: &str, is_it: impl Fn(&Mark) -> bool) {
        if !self.missed.lock().unwrap().is_empty() {
            return;
        }
        let missing = |marks: &mut Vec<Mark>| !marks.iter().any(&is_it);
        let (_marks, waited) = self
            .more
            .wait_timeout_while(self.marks(), PATIENCE, missing)
            .unwrap();
        if waited.timed_out() {
            self.missed.lock().unwrap().push(what.to_owned());
        }
    }

    fn assert_none_missed(&self) {
        assert_eq!(*self.missed.lock().unwrap(), Vec::<String>::new());
    }
}

/// Holds gathers and scatters of ZeRO-3 until what they must overlap with has happened.
#[derive(Default)]
struct Groups {
    log: Log,
    counts: Mutex<Counts>,
    slots: Mutex<Vec<Arena>>,
}

#[derive(Default)]
struct Counts {
    /// Forward passes begun.
    forwards: usize,
    /// Of the pass in progress.
    norms: usize,
    gelus: usize,
    /// By block: gathers begun.
    gathers: [usize; BLOCKS],
    updates: usize,
}

impl Counts {
    fn step(&self) -> usize {
        self.forwards - 1
    }
}

/// The block in a name like ``group of `h.2.mlp.c_proj.bias` ``.
fn block_of(tag: &str) -> Option<usize> {
    let (_, rest) = tag.split_once("`h.")?;
    rest.split('.').next()?.parse().ok()
}

impl Groups {
    /// The gather of a block that is in progress: each is gathered for forward, then for backward.
    fn pass_of(&self, block: usize) -> Pass {
        let count = self.counts.lock().unwrap().gathers[block] - 1;
        match count % 2 {
            0 => Pass::Forward(count / 2),
            _ => Pass::Backward(count / 2),
        }
    }

    fn is_training(&self) -> bool {
        self.counts.lock().unwrap().updates < STEPS
    }

    /// Before a block computes, the next one's group is under way.
    fn block_computes(&self, block: usize, pass: Pass) {
        let next = match pass {
            Pass::Forward(_) => Some(block + 1).filter(|next| *next < BLOCKS),
            Pass::Backward(_) => block.checked_sub(1),
        };
        if let Some(next) = next {
            let what = format!("the gather of block {next}, before block {block} computes {pass:?}");
            self.log.wait(
                &what,
                |mark| matches!(mark, Mark::GatherBegan(b, p, _) if (*b, *p) == (next, pass)),
            );
        }
        self.log.push(Mark::Computes(block, pass));
    }

    /// A group arrives no earlier than the block before it computes.
    fn hold_gather(&self, block: usize, pass: Pass) {
        let what = format!("the block before {block}, while that is gathered for {pass:?}");
        self.log.wait(&what, |mark| match (pass, mark) {
            (Pass::Forward(step), Mark::Embedding(s)) => block == 0 && *s == step,
            (Pass::Backward(step), Mark::Head(s)) => block + 1 == BLOCKS && *s == step,
            (Pass::Forward(_), Mark::Computes(b, p)) => *p == pass && b + 1 == block,
            (Pass::Backward(_), Mark::Computes(b, p)) => *p == pass && *b == block + 1,
            _ => false,
        });
    }
}

impl Watch for Groups {
    fn computes(&self, op: &Op) {
        let mut counts = self.counts.lock().unwrap();
        let reads = match op {
            Op::LinearForward(op) => Some(op.weight.clone()),
            Op::LinearDinp(op) => Some(op.weight.clone()),
            _ => None,
        };
        let mark = match op {
            Op::EncoderForward(_) => {
                (counts.norms, counts.gelus) = (0, 0);
                counts.forwards += 1;
                Some(Mark::Embedding(counts.step()))
            }
            Op::CrossEntropyBackward(_) => Some(Mark::Head(counts.step())),
            // Two norms a block; the last one is the head's.
            Op::LayerNormForward(_) => {
                let norm = counts.norms;
                counts.norms += 1;
                let block = norm / 2;
                (norm % 2 == 0 && block < BLOCKS).then(|| Mark::Computes(block, Pass::Forward(counts.step())))
            }
            Op::GeluBackward(_) => {
                counts.gelus += 1;
                let block = BLOCKS - counts.gelus;
                Some(Mark::Computes(block, Pass::Backward(counts.step())))
            }
            Op::AdamW(update) => {
                counts.updates = update.hyper.step as usize;
                None
            }
            _ => None,
        };
        drop(counts);
        if !self.is_training() {
            return;
        }
        match mark {
            Some(Mark::Computes(block, pass)) => self.block_computes(block, pass),
            Some(mark) => self.log.push(mark),
            None => {}
        }
        if let Some(weight) = reads {
            self.log.push(Mark::Reads(weight));
        }
    }

    fn began(&self, request: &Request) {
        let Some(block) = block_of(&request.tag) else {
            return;
        };
        match (request.operation, request.traffic) {
            (Operation::AllGather, Traffic::Params) => {
                self.counts.lock().unwrap().gathers[block] += 1;
                if !self.is_training() {
                    return;
                }
                let pass = self.pass_of(block);
                self.log
                    .push(Mark::GatherBegan(block, pass, request.buffer.clone()));
                self.hold_gather(block, pass);
            }
            (Operation::ReduceScatter, Traffic::Grads) => {
                let Some(later) = block.checked_sub(2) else {
                    return;
                };
                // Gathered meanwhile, on a communicator of its own.
                let step = self.counts.lock().unwrap().step();
                let what = format!("the gather of block {later}, while block {block} is scattered");
                self.log.wait(
                    &what,
                    |mark| matches!(mark, Mark::GatherEnded(b, p) if (*b, *p) == (later, Pass::Backward(step))),
                );
            }
            _ => {}
        }
    }

    fn ended(&self, request: &Request, _since: Instant) {
        if request.operation == Operation::AllGather
            && request.traffic == Traffic::Params
            && let Some(block) = block_of(&request.tag)
            && self.is_training()
        {
            self.log.push(Mark::GatherEnded(block, self.pass_of(block)));
        }
    }

    fn shared(&self, arena: &Arena) {
        if arena.name() == "gathered parameters" {
            self.slots.lock().unwrap().push(arena.clone());
        }
    }
}

impl Groups {
    /// Every read of a slot finds the group of the block that reads, whole: none was released before its last reader.
    fn assert_reads_find_their_group(&self) {
        /// Weights of linear layers that a pass of a block reads.
        const READS: usize = 4;
        let marks = self.log.marks();
        let mut reads = 0;
        for (at, mark) in marks.iter().enumerate() {
            let Mark::Reads(weight) = mark else { continue };
            let into_it = |mark: &&Mark| match mark {
                Mark::GatherBegan(_, _, buffer) => buffer.arena().same(weight.arena()),
                _ => false,
            };
            let Some(Mark::GatherBegan(block, pass, _)) = marks[..at].iter().rev().find(into_it) else {
                // The head's is a slot of its own.
                continue;
            };
            let (step, in_pass) = (reads / READS / (2 * BLOCKS), reads / READS % (2 * BLOCKS));
            let expected = match in_pass {
                forward if forward < BLOCKS => (forward, Pass::Forward(step)),
                backward => (2 * BLOCKS - 1 - backward, Pass::Backward(step)),
            };
            assert_eq!((*block, *pass), expected, "read {reads}");
            let is_whole = marks[..at]
                .iter()
                .any(|mark| matches!(mark, Mark::GatherEnded(b, p) if (*b, *p) == expected));
            assert!(is_whole, "read {reads} of {expected:?} before it was gathered");
            reads += 1;
        }
        assert_eq!(reads, STEPS * 2 * BLOCKS * READS);
    }

    /// Everything is gathered into the memory that is told of, and all of that is used.
    fn assert_memory_is(&self, declared: u64) {
        let slots = self.slots.lock().unwrap();
        let bytes: usize = slots.iter().map(Arena::bytes).sum();
        assert_eq!(bytes as u64, declared);
        let marks = self.log.marks();
        let used = slots.iter().filter(|slot| {
            marks
                .iter()
                .any(|mark| matches!(mark, Mark::GatherBegan(_, _, buffer) if buffer.arena().same(slot)))
        });
        let taken_in_turn = used.count();
        assert_eq!(taken_in_turn, 2, "blocks share two slots");
    }
}

#[test]
fn zero3_gathers_the_next_group_while_a_block_computes_and_another_is_scattered() {
    for precision in [Precision::F32, Precision::Bf16] {
        let reference = job(Strategy::Ddp, |c| c.train.precision = precision).train(RANKS);
        let watches = [(); RANKS as usize].map(|()| Arc::<Groups>::default());
        let trained = watched(job(Strategy::Zero3, |c| c.train.precision = precision), &watches);
        for watch in &watches {
            watch.log.assert_none_missed();
            watch.assert_reads_find_their_group();
            watch.assert_memory_is(trained.metrics[0].memory.gathered);
        }
        assert_same(&reference, &trained, &format!("{precision:?}"));
    }
}

/// Holds the last gather of an update until the next step's forward has begun.
#[derive(Default)]
struct NextForward {
    log: Log,
    /// Name of the unit that is gathered last.
    last: String,
    /// Gathers of it.
    held: Mutex<usize>,
    forwards: Mutex<usize>,
    /// Forwards begun when such a gather ended.
    ended: Mutex<Vec<usize>>,
}

impl Watch for NextForward {
    fn computes(&self, op: &Op) {
        if matches!(op, Op::EncoderForward(_)) {
            let mut forwards = self.forwards.lock().unwrap();
            self.log.push(Mark::Embedding(*forwards));
            *forwards += 1;
        }
    }

    fn began(&self, request: &Request) {
        if request.traffic != Traffic::Params || request.tag != format!("parameters of {}", self.last) {
            return;
        }
        let mut held = self.held.lock().unwrap();
        let next = *held;
        *held += 1;
        drop(held);
        // Before the first step nothing is under way, and behind the last one comes the validation.
        if (1..STEPS).contains(&next) {
            let what = format!("the forward of step {next}, while the last parameters are gathered");
            self.log.wait(
                &what,
                |mark| matches!(mark, Mark::Embedding(step) if *step == next),
            );
        }
    }

    fn ended(&self, request: &Request, _since: Instant) {
        if request.traffic == Traffic::Params && request.tag.ends_with(&self.last) {
            self.ended.lock().unwrap().push(*self.forwards.lock().unwrap());
        }
    }
}

#[test]
fn zero1_and_zero2_begin_the_next_forward_before_all_parameters_are_gathered() {
    let reference = job(Strategy::Ddp, |_| ()).train(RANKS);
    for strategy in [Strategy::Zero1, Strategy::Zero2] {
        let job = job(strategy, |_| ());
        let model = model::build(&job.config.model, 256).unwrap();
        let config = LayoutConfig::of(&job.config.parallel, RANKS as usize);
        let layout = GradientLayout::of_model(&model, &config).unwrap();
        let sharding = match strategy {
            Strategy::Zero1 => Sharding::of_buckets(&layout, RANKS as usize, 0),
            _ => Sharding::of_parts(&layout, RANKS as usize, 0),
        };
        // Backward finishes it first, so the forward needs it last.
        let last = &sharding.units()[0].name;
        let watch = || NextForward {
            last: last.clone(),
            ..NextForward::default()
        };
        let watches = [(); RANKS as usize].map(|()| Arc::new(watch()));
        let trained = watched(job, &watches);
        for watch in &watches {
            watch.log.assert_none_missed();
            // The gather after step s ends within forward s + 1, where it is held.
            let ended = watch.ended.lock().unwrap();
            assert_eq!(ended[1..STEPS], [2, 3], "{strategy:?}");
        }
        assert_same(&reference, &trained, &format!("{strategy:?}"));
    }
}

/// Measures how long a rank was blocked by communication, from its first forward to its last update.
#[derive(Default)]
struct Blocked {
    state: Mutex<BlockedState>,
    changed: Condvar,
    /// The rank itself carries out its collectives.
    is_inline: bool,
}

#[derive(Default)]
struct BlockedState {
    counts: bool,
    waits: bool,
    total: Duration,
    times: usize,
    missed: bool,
}

/// For which a collective holds a rank up that waits for it.
const HELD: Duration = Duration::from_millis(2);

impl Blocked {
    fn blocked_since(&self, since: Instant) {
        let mut state = self.state.lock().unwrap();
        if state.counts {
            state.total += since.elapsed();
            state.times += 1;
        }
    }
}

impl Watch for Blocked {
    fn computes(&self, op: &Op) {
        let mut state = self.state.lock().unwrap();
        match op {
            Op::EncoderForward(_) if state.times == 0 => state.counts = true,
            Op::AdamW(update) if update.hyper.step == STEPS as u64 => state.counts = false,
            _ => {}
        }
    }

    fn waits(&self) {
        self.state.lock().unwrap().waits = true;
        self.changed.notify_all();
    }

    fn waited(&self, since: Instant) {
        if !self.is_inline {
            self.blocked_since(since);
        }
        self.state.lock().unwrap().waits = false;
        self.changed.notify_all();
    }

    /// Nothing is hidden: it goes on only when the rank has waited for a while.
    fn began(&self, request: &Request) {
        let state = self.state.lock().unwrap();
        if self.is_inline || !state.counts || state.missed || request.traffic == Traffic::Other {
            return;
        }
        let idle = |state: &mut BlockedState| !state.waits && state.counts;
        let (mut state, waited) = self.changed.wait_timeout_while(state, PATIENCE, idle).unwrap();
        state.missed |= waited.timed_out();
        let waits = |state: &mut BlockedState| state.waits;
        drop(self.changed.wait_timeout_while(state, HELD, waits).unwrap());
    }

    fn ended(&self, request: &Request, since: Instant) {
        if self.is_inline && request.traffic != Traffic::Other {
            self.blocked_since(since);
        }
    }
}

/// Every strategy waits in places of its own: behind backward, for a slot, for the narrow wire, for parameters.
#[test]
fn exposed_time_has_every_wait_for_communication() {
    for strategy in [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3] {
        for (precision, accumulation, overlap) in [
            (Precision::F32, 1, true),
            (Precision::F32, 2, true),
            (Precision::Bf16, 2, true),
            (Precision::F32, 2, false),
            (Precision::Bf16, 2, false),
        ] {
            let what = format!("{strategy:?} {precision:?}, accumulation {accumulation}, overlap {overlap}");
            let job = job(strategy, |c| {
                c.train.precision = precision;
                c.train.grad_accumulation = accumulation;
                c.parallel.overlap = overlap;
            });
            let watch = || Blocked {
                is_inline: !overlap,
                ..Blocked::default()
            };
            let watches = [(); RANKS as usize].map(|()| Arc::new(watch()));
            let trained = watched(job, &watches);
            let state = watches[0].state.lock().unwrap();
            assert!(
                !state.missed && state.times >= STEPS,
                "{what}: {} waits",
                state.times
            );
            let sum = |part: fn(&ddp_worker::metrics::MetricsLine) -> f64| -> f64 {
                trained.metrics.iter().map(part).sum()
            };
            // What ranks tell each other of losses and norms has an account of its own.
            let told = sum(|line| line.comm_exposed_ms + line.share_ms);
            let blocked = state.total.as_secs_f64() * 1e3;
            assert!(told >= blocked, "{what}: {told:.3} ms of {blocked:.3}");
            for line in &trained.metrics {
                let compute = line.data_ms + line.forward_ms + line.backward_ms + line.optimizer_ms;
                let parts = compute + line.comm_exposed_ms + line.share_ms;
                assert!(
                    parts <= line.step_ms,
                    "step {}, {what}: {parts} of {}",
                    line.step,
                    line.step_ms
                );
            }
        }
    }
}
