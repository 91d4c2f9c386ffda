use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use half::bf16;

use super::*;
use crate::device::{Buffer, Compute, CpuDevice, Element, Event, Result};
use crate::model::{ActivationPool, Context, ExchangeKind, GroupOps, ParamId, Params};
use crate::ops::AttentionShape;

const RANKS: usize = 4;

/// A rank of a ring of threads.
struct Neighbours {
    index: usize,
    next: Sender<Vec<u8>>,
    before: Mutex<Receiver<Vec<u8>>>,
}

impl GroupOps for Neighbours {
    fn index(&self) -> usize {
        self.index
    }

    fn size(&self) -> usize {
        RANKS
    }

    fn is_sequence(&self) -> bool {
        false
    }

    fn is_ring(&self) -> bool {
        true
    }

    fn start(&self, _: ExchangeKind, _: &Activation, _: &str) -> Result<Exchange> {
        unreachable!("a ring only passes on")
    }

    fn pass_on(&self, rows: [&Activation; 2], _: &str) -> Result<[Exchange; 2]> {
        let [sent, received] = rows.map(Activation::buffer);
        self.next.send(sent.host_bytes()?.to_vec()).unwrap();
        let arrived = self.before.lock().unwrap().recv().unwrap();
        received.host_bytes_mut()?.copy_from_slice(&arrived);
        Ok(rows.map(|x| Exchange::new(Event::reached(), x)))
    }

    fn finish(&self, exchange: Exchange) -> Result<Activation> {
        Ok(exchange.into_activation())
    }
}

struct NoParams;

impl Params for NoParams {
    fn get(&self, _: ParamId) -> Buffer {
        unreachable!("attention has none")
    }
}

/// Between −1 and 1.
fn numbers(seed: usize, len: usize) -> Vec<f32> {
    let mut state = seed as u32;
    let number = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(number).collect()
}

/// Outputs and gradients of some positions of one sample, `[positions, H·D]` and `[positions, (H + 2·KV)·D]`: of a rank, or
/// without a group of all.
fn attend<T: Element>(of: impl Fn(f32) -> T, shape: AttentionShape, group: Option<&Neighbours>) -> Vec<f32> {
    let device = Arc::new(CpuDevice::new(1).unwrap());
    let (compute, pool) = (Compute::new(device.clone()), ActivationPool::new(device));
    let all = shape.positions * group.map_or(1, |_| RANKS);
    let mut ctx = Context::new(&compute, &pool, &NoParams, [1, shape.positions], T::DTYPE);
    ctx.context_group = group.map(|group| group as _);
    let stretches = ctx.stretches();
    let lease = |seed, width| {
        let lease = ctx.lease("test", &[shape.positions, width]).unwrap();
        let (numbers, mut own) = (
            numbers(seed, all * width),
            lease.buffer().host_mut::<T>().unwrap(),
        );
        let rows = stretches.iter().flat_map(|stretch| stretch.positions.clone());
        for (row, own) in rows.zip(own.chunks_mut(width)) {
            for (x, own) in numbers[row * width..].iter().zip(own) {
                // As bf16 has it.
                *own = of(bf16::from_f32(*x).to_f32());
            }
        }
        drop(own);
        lease
    };
    let rows = AttentionRows {
        qkv: lease(1, shape.qkv_channels()),
        out: lease(2, shape.channels()),
        lse: ctx.lease_stat("lse", &[shape.heads, shape.positions]).unwrap(),
    };
    let (dout, dqkv) = (lease(3, shape.channels()), lease(4, shape.qkv_channels()));
    if let Some(ring) = KeyExchange::of(&ctx, shape, None) {
        ring.ring_forward(&rows).unwrap();
        ring.ring_backward(&rows, &dout, &dqkv).unwrap();
    } else {
        let forward = rows.of(&stretches[0], shape, None, None);
        ctx.enqueue(forward.clone());
        ctx.enqueue(AttentionBackward {
            forward,
            dout: dout.buffer().clone(),
            dqkv: shape.views(dqkv.buffer()),
            accumulate: false,
        });
    }
    compute.synchronize().unwrap();
    let wide = |x: &Activation| match T::DTYPE {
        DType::Bf16 => x
            .buffer()
            .host::<bf16>()
            .unwrap()
            .iter()
            .map(|x| x.to_f32())
            .collect(),
        _ => x.buffer().host::<f32>().unwrap().to_vec(),
    };
    [wide(&rows.out), wide(&dqkv)].concat()
}

/// What each rank of a ring has for its positions, in their order.
fn on_ring<T: Element>(of: impl Fn(f32) -> T + Sync, all: AttentionShape) -> Vec<f32> {
    let positions = all.positions / RANKS;
    let shape = AttentionShape { positions, ..all };
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..RANKS).map(|_| channel()).unzip();
    let neighbours = receivers
        .into_iter()
        .enumerate()
        .map(|(index, before)| Neighbours {
            index,
            next: senders[(index + 1) % RANKS].clone(),
            before: Mutex::new(before),
        });
    let neighbours: Vec<Neighbours> = neighbours.collect();
    let found: Vec<Vec<f32>> = std::thread::scope(|scope| {
        let of = &of;
        let run = |group| scope.spawn(move || attend(of, shape, Some(group)));
        let threads: Vec<_> = neighbours.iter().map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut ordered = vec![0.0; RANKS * found[0].len()];
    let (outs, dqkvs) = ordered.split_at_mut(all.positions * all.channels());
    for (rank, found) in found.iter().enumerate() {
        let (out, dqkv) = found.split_at(positions * all.channels());
        for (own, position) in super::super::zigzag(all.positions, rank, RANKS)
            .into_iter()
            .flatten()
            .enumerate()
        {
            for (to, from, width) in [
                (&mut *outs, out, all.channels()),
                (&mut *dqkvs, dqkv, all.qkv_channels()),
            ] {
                to[position * width..][..width].copy_from_slice(&from[own * width..][..width]);
            }
        }
    }
    ordered
}

/// Each result is rounded once, however many ranks the keys come from.
#[test]
fn a_ring_in_bf16_is_as_near_to_f32_as_one_rank() {
    let all = AttentionShape {
        batch: 1,
        positions: 512,
        heads: 2,
        kv_heads: 1,
        head_size: 32,
    };
    let exact = attend(|x| x, all, None);
    let (alone, ring) = (attend(bf16::from_f32, all, None), on_ring(bf16::from_f32, all));
    let ring_f32 = on_ring(|x| x, all);
    let outs = all.positions * all.channels();
    // Outputs, and gradients of queries, of keys and of values.
    let sections = [(0, 0..0), (1, 0..64), (1, 64..96), (1, 96..128)];
    for (gradient, columns) in sections {
        let error = |found: &[f32]| {
            let found = found.iter().zip(&exact).enumerate();
            let of_section = found.filter(|(i, _)| {
                if gradient == 0 {
                    *i < outs
                } else {
                    *i >= outs && columns.contains(&((i - outs) % 128))
                }
            });
            let squares = of_section.map(|(_, (a, b))| f64::from(a - b).powi(2));
            squares.sum::<f64>().sqrt()
        };
        let (alone, ring, ring_f32) = (error(&alone), error(&ring), error(&ring_f32));
        assert!(
            ring < 1.05 * alone,
            "section {gradient} {columns:?}: {ring} and {alone}"
        );
        assert!(
            ring_f32 < 1e-3 * alone,
            "section {gradient} {columns:?}: {ring_f32} and {alone}"
        );
    }
}
