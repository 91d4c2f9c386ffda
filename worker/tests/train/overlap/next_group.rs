//! ZeRO-3: the next group is gathered while a block computes and another one's gradients are scattered.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use ddp_worker::collective::{Operation, Request, Traffic};
use ddp_worker::config::{Precision, Strategy};
use ddp_worker::device::Arena;
use ddp_worker::ops::Op;

use super::log::{Log, Mark, Pass};
use super::{BLOCKS, RANKS, STEPS, job, watched};
use crate::train_support::assert_same;
use crate::train_support::watched::Watch;

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
            // Two norms a block; then the head's, which it repeats in backward.
            Op::NormForward(_) => {
                let norm = counts.norms;
                counts.norms += 1;
                let (block, step) = (norm / 2, counts.step());
                match norm % 2 {
                    0 if block < BLOCKS => Some(Mark::Computes(block, Pass::Forward(step))),
                    1 if block == BLOCKS => Some(Mark::Head(step)),
                    _ => None,
                }
            }
            Op::GeluBackward(_) => {
                counts.gelus += 1;
                let block = BLOCKS - counts.gelus;
                Some(Mark::Computes(block, Pass::Backward(counts.step())))
            }
            Op::Update(update) => {
                counts.updates = update.step as usize;
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
            (Operation::ReduceScatter(_), Traffic::Grads) => {
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
