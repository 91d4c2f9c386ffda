//! Every operation, at several sizes of world, on one node and several, in place and staged.

use crate::collective_world::{Rank, World, done, fill, launch, numbers, read};
use ddp_worker::collective::{AllToAll, Executor, Launch, ReduceOp, Subgroup, Traffic, WireBytes};
use half::bf16;

const SUM: ReduceOp = ReduceOp::Sum;

/// Worlds of 1, 2, 3, 4 and 8 ranks on 1, 2 and 3 nodes.
const WORLDS: &[&[usize]] = &[
    &[1],
    &[2],
    &[1, 1],
    &[3],
    &[2, 1],
    &[1, 1, 1],
    &[4],
    &[2, 2],
    &[1, 2, 1],
    &[8],
    &[4, 4],
    &[3, 3, 2],
];

/// The contract in one line a step: local ranks in order within a node, then nodes in order.
fn sequential_sum(nodes: &[usize], inputs: &[Vec<f32>]) -> Vec<f32> {
    let mut first = 0;
    let mut total: Option<Vec<f32>> = None;
    for &ranks in nodes {
        let mut part = inputs[first].clone();
        for input in &inputs[first + 1..first + ranks] {
            part.iter_mut().zip(input).for_each(|(a, b)| *a += b);
        }
        first += ranks;
        total = Some(match total {
            None => part,
            Some(mut total) => {
                total.iter_mut().zip(&part).for_each(|(a, b)| *a += b);
                total
            }
        });
    }
    total.expect("at least one node")
}

fn bits(xs: &[f32]) -> Vec<u32> {
    xs.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn reduce_scatter_then_all_gather_is_all_reduce() {
    for nodes in WORLDS {
        let world = World::of(nodes);
        for (shared, each) in [(true, 3), (false, 3), (true, 20_011), (false, 20_011)] {
            let len = each * world.size();
            let inputs: Vec<_> = (0..world.size()).map(|rank| numbers(rank, len)).collect();
            let expected = bits(&sequential_sum(nodes, &inputs));
            let results = World::of(nodes).run(Executor::Inline, |rank| {
                let arena = rank.arena(shared, &inputs[rank.rank()]);
                let whole = arena.whole();
                done(&rank.comm.reduce_scatter(&whole, ReduceOp::Sum, launch()));
                let own = rank.rank() * each..(rank.rank() + 1) * each;
                assert!(bits(&read::<f32>(&whole.slice(own.clone()))) == expected[own]);
                done(&rank.comm.all_gather(&whole, launch()));
                read::<f32>(&whole)
            });
            assert!(
                results.iter().all(|r| bits(r) == expected),
                "{nodes:?}, {each} each, shared {shared}"
            );
        }
    }
}

#[test]
fn broadcast_from_every_root() {
    for nodes in WORLDS {
        let world = World::of(nodes);
        world.run(Executor::Inline, |rank| {
            for (shared, len) in [(true, 7), (false, 300_001), (true, 100_000)] {
                let arena = rank.arena(shared, &numbers(rank.rank(), len));
                for root in 0..rank.comm.size() {
                    fill(&arena.whole(), &numbers(rank.rank(), len));
                    done(&rank.comm.broadcast(&arena.whole(), root, launch()));
                    assert!(bits(&read::<f32>(&arena.whole())) == bits(&numbers(root, len)));
                }
            }
        });
    }
}

#[test]
fn nobody_passes_a_barrier_before_all_have_come() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    for nodes in WORLDS {
        let world = World::of(nodes);
        let come = AtomicUsize::new(0);
        world.run(Executor::Inline, |rank| {
            let arena = rank.arena::<u8>(false, &[0]);
            for round in 1..=20 {
                come.fetch_add(1, Ordering::SeqCst);
                done(&rank.comm.barrier(&arena.whole(), launch()));
                assert!(come.load(Ordering::SeqCst) >= round * world.size());
            }
        });
    }
}

#[test]
fn messages_go_round_a_ring() {
    for nodes in [&[2][..], &[3], &[1, 1], &[2, 2]] {
        World::of(nodes).run(Executor::Inline, |rank| {
            let (me, size) = (rank.rank(), rank.comm.size());
            let (next, previous) = ((me + 1) % size, (me + size - 1) % size);
            for len in [0, 1, 1000, 500_001] {
                let out = rank.arena(false, &numbers(me, len));
                let into = rank.arena(false, &vec![0.0_f32; len]);
                let send = || done(&rank.comm.send(&out.whole(), next, launch()));
                let recv = || done(&rank.comm.recv(&into.whole(), previous, launch()));
                if me == 0 {
                    send();
                    recv();
                } else {
                    recv();
                    send();
                }
                assert!(bits(&read::<f32>(&into.whole())) == bits(&numbers(previous, len)));
            }
        });
    }
}

/// Elements that a rank sends to another: to some none. The last rank sends to no rank.
fn part(from: usize, to: usize, size: usize, unit: usize) -> usize {
    if from + 1 == size {
        0
    } else {
        (3 * from + 2 * to) % 4 * unit
    }
}

#[test]
fn parts_of_any_length_reach_every_rank_in_rank_order() {
    for nodes in WORLDS.iter().filter(|nodes| nodes.iter().sum::<usize>() > 1) {
        for (shared, unit) in [(true, 1), (false, 3), (true, 60_001), (false, 60_001), (false, 0)] {
            World::of(nodes).run(Executor::Thread, |rank| {
                let (me, size) = (rank.rank(), rank.comm.size());
                let counts = |of: &dyn Fn(usize) -> usize| (0..size).map(of).collect::<Vec<_>>();
                let sent_counts = counts(&|to| part(me, to, size, unit));
                let received_counts = counts(&|from| part(from, me, size, unit));
                let sent = (0..size).flat_map(|to| numbers(me * size + to, part(me, to, size, unit)));
                let expected =
                    (0..size).flat_map(|from| numbers(from * size + me, part(from, me, size, unit)));
                let (sent, expected) = (sent.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
                let own = received_counts[me];
                // Something before and behind what is received. Shared arenas have one size on all ranks.
                let mut elements = vec![7.0_f32; 8 * size * unit + 8];
                elements[..sent.len()].copy_from_slice(&sent);
                let arena = rank.arena(shared, &elements);
                let first = sent.len() + 2;
                let received = arena.slice(first..first + expected.len());
                let parts = AllToAll {
                    sent: arena.slice(0..sent.len()),
                    sent_counts,
                    received_counts,
                };
                done(&rank.comm.all_to_all(&received, parts, launch()));
                elements[first..first + expected.len()].copy_from_slice(&expected);
                let found = read::<f32>(&arena.whole());
                assert!(
                    bits(&found) == bits(&elements),
                    "{nodes:?}, unit {unit}, rank {me}"
                );
                assert_eq!(rank.comm.wire_bytes().grads, 4 * (expected.len() - own) as u64);
                // The next operation finds the connections in order.
                let one = rank.arena(false, &[1.0_f32]);
                done(&rank.comm.all_reduce(&one.whole(), SUM, launch()));
                assert_eq!(read::<f32>(&one.whole()), [size as f32]);
            });
        }
    }
}

#[test]
fn golden_values() {
    let ranks = |rank: &Rank, xs: [[f32; 2]; 2]| xs[rank.rank()];
    World::of(&[2]).run(Executor::Inline, |rank| {
        let arena = rank.arena(true, &ranks(&rank, [[1.0, 2.0], [3.0, 4.0]]));
        done(&rank.comm.all_reduce(&arena.whole(), SUM, launch()));
        assert_eq!(read::<f32>(&arena.whole()), [4.0, 6.0]);
        let mut all = [0.0; 4];
        all[2 * rank.rank()..][..2].copy_from_slice(&ranks(&rank, [[1.0, 2.0], [3.0, 4.0]]));
        let arena = rank.arena(true, &all);
        done(&rank.comm.all_gather(&arena.whole(), launch()));
        assert_eq!(read::<f32>(&arena.whole()), [1.0, 2.0, 3.0, 4.0]);
    });
    World::of(&[3]).run(Executor::Inline, |rank| {
        let arena = rank.arena(true, &[rank.rank() as f32 + 1.0; 5]);
        done(&rank.comm.all_reduce(&arena.whole(), SUM, launch()));
        assert_eq!(read::<f32>(&arena.whole()), [6.0; 5]);
    });
    World::of(&[4]).run(Executor::Inline, |rank| {
        let arena = rank.arena(true, &[[0.20_f32, 0.10, -0.05, 0.15][rank.rank()]]);
        done(&rank.comm.all_reduce(&arena.whole(), ReduceOp::Sum, launch()));
        assert!((read::<f32>(&arena.whole())[0] - 0.40).abs() < 1e-7);
    });
}

#[test]
fn bf16_is_summed_in_f32_and_rounded_once() {
    for nodes in [&[2][..], &[1, 1], &[3], &[2, 1]] {
        World::of(nodes).run(Executor::Inline, |rank| {
            // 256 + 1 + 1 is 258; were each sum rounded to bf16, it would stay 256.
            let own = [256.0, 1.0, 1.0][rank.rank() + 3 - rank.comm.size()];
            let arena = rank.arena(true, &vec![bf16::from_f32(own); 40_000]);
            done(&rank.comm.all_reduce(&arena.whole(), SUM, launch()));
            let expected = if rank.comm.size() == 3 { 258.0 } else { 2.0 };
            assert!(
                read::<bf16>(&arena.whole())
                    .iter()
                    .all(|x| x.to_f32() == expected)
            );
        });
    }
    World::of(&[2]).run(Executor::Inline, |rank| {
        let first = 1.0 + 4.0 * rank.rank() as f32;
        let mut all = [bf16::ZERO; 8];
        for (i, x) in all[4 * rank.rank()..][..4].iter_mut().enumerate() {
            *x = bf16::from_f32(first + i as f32);
        }
        let arena = rank.arena(true, &all);
        done(&rank.comm.all_gather(&arena.whole(), launch()));
        let bytes = arena.whole().host_bytes().unwrap().to_vec();
        let golden = [
            0x80, 0x3f, 0x00, 0x40, 0x40, 0x40, 0x80, 0x40, 0xa0, 0x40, 0xc0, 0x40, 0xe0, 0x40, 0x00, 0x41,
        ];
        assert_eq!(bytes, golden);
    });
}

#[test]
fn maxima_and_other_types() {
    for nodes in [&[1][..], &[3], &[2, 1]] {
        World::of(nodes).run(Executor::Inline, |rank| {
            let (me, size) = (rank.rank(), rank.comm.size());
            let i32s: Vec<i32> = (0..9000).map(|i| (i + me as i32) % 7 - 3).collect();
            let arena = rank.arena(true, &i32s);
            done(&rank.comm.all_reduce(&arena.whole(), ReduceOp::Max, launch()));
            let expected = |i: i32| (0..size as i32).map(|r| (i + r) % 7 - 3).max().unwrap();
            assert!(
                read::<i32>(&arena.whole())
                    .iter()
                    .zip(0..)
                    .all(|(&x, i)| x == expected(i))
            );

            let arena = rank.arena(false, &[if me == 0 { f32::NAN } else { 1.0 }, me as f32]);
            done(&rank.comm.all_reduce(&arena.whole(), ReduceOp::Max, launch()));
            let got = read::<f32>(&arena.whole());
            assert!(got[0].is_nan() && got[1] == size as f32 - 1.0);

            let arena = rank.arena(true, &vec![1.0 + me as f64 * 1e-12; 6000]);
            done(&rank.comm.all_reduce(&arena.whole(), SUM, launch()));
            let sum = (1..size).fold(1.0, |sum, r| sum + (1.0 + r as f64 * 1e-12));
            assert!(read::<f64>(&arena.whole()) == vec![sum; 6000]);
        });
    }
}

#[test]
fn wire_bytes_equal_the_formulas() {
    // N = 8, S = 64 MiB has golden 117,440,512 bytes a rank: 2·(7/8)·S. The same at 1/64 of the size.
    for (nodes, shared) in [
        (&[8][..], true),
        (&[8], false),
        (&[4, 4], true),
        (&[2, 2, 2, 2], false),
        (&[3, 3, 2], false),
        (&[5, 1, 2], true),
    ] {
        let (n, s) = (8_u64, 1_u64 << 20);
        let all_reduce = |bytes| 2 * (n - 1) * (bytes / n);
        assert_eq!(all_reduce(64 * s), 117_440_512);
        let counted = World::of(nodes).run(Executor::Inline, |rank| {
            let arena = rank.arena(shared, &vec![1.0_f32; (s / 4) as usize]);
            let whole = arena.whole();
            let launch = |traffic| Launch::now(traffic, "test");
            done(&rank.comm.all_reduce(&whole, SUM, launch(Traffic::Grads)));
            done(&rank.comm.reduce_scatter(&whole, SUM, launch(Traffic::Params)));
            done(&rank.comm.all_reduce(&whole, SUM, launch(Traffic::Activations)));
            done(&rank.comm.all_gather(&whole, launch(Traffic::Other)));
            rank.comm.wire_bytes()
        });
        let expected = WireBytes {
            grads: all_reduce(s),
            params: (n - 1) * s / n,
            activations: all_reduce(s),
            pipeline: 0,
            other: (n - 1) * s / n,
        };
        if nodes.iter().all(|&ranks| ranks == nodes[0]) {
            assert_eq!(counted, vec![expected; 8], "{nodes:?}, shared {shared}");
        }
        // Who speaks for more ranks than others moves more.
        let sum = |of: fn(&WireBytes) -> u64| counted.iter().map(of).sum::<u64>();
        let all: [fn(&WireBytes) -> u64; 4] = [|c| c.grads, |c| c.params, |c| c.activations, |c| c.other];
        let expected = all.map(|of| n * of(&expected));
        let all = all.map(sum);
        assert_eq!(all, expected, "{nodes:?}, shared {shared}");
    }
}

#[test]
fn wire_bytes_of_small_gradients_equal_the_formula() {
    for nodes in [&[2][..], &[4], &[2, 2]] {
        let n: u64 = nodes.iter().sum::<usize>() as u64;
        let counted = World::of(nodes).run(Executor::Inline, |rank| {
            let arena = rank.arena(false, &vec![1.0_f32; 64]);
            done(&rank.comm.all_reduce(&arena.whole(), SUM, launch()));
            rank.comm.wire_bytes().grads
        });
        assert_eq!(counted, vec![2 * (n - 1) * 256 / n; n as usize]);
    }
}

#[test]
fn a_2_by_2_mesh_and_two_groups_at_once() {
    for nodes in [&[4][..], &[2, 2], &[1, 3]] {
        World::of(nodes).run(Executor::Inline, |rank| {
            let me = rank.rank();
            let group = |name, members: [usize; 2]| {
                let split = rank.comm.split(&Subgroup::new(name, members), Executor::Thread);
                split.unwrap()
            };
            let dp = group("dp", [me % 2, me % 2 + 2]);
            let tp = group("tp", [me / 2 * 2, me / 2 * 2 + 1]);
            assert_eq!(dp.members(), [me % 2, me % 2 + 2]);
            assert_eq!(tp.members(), [me / 2 * 2, me / 2 * 2 + 1]);
            assert_eq!((dp.rank(), tp.rank()), (me / 2, me % 2));
            // Arenas of the world serve the subgroups in place.
            let across = rank.arena(true, &numbers(me, 100_000));
            let along = rank.arena(true, &numbers(me + 10, 100_000));
            for _ in 0..5 {
                fill(&across.whole(), &numbers(me, 100_000));
                fill(&along.whole(), &numbers(me + 10, 100_000));
                let work = [
                    dp.all_reduce(&across.whole(), SUM, launch()),
                    tp.all_reduce(&along.whole(), SUM, launch()),
                ];
                work.iter().for_each(done);
                let sum = |a: usize, b: usize| -> Vec<f32> {
                    numbers(a, 100_000)
                        .iter()
                        .zip(numbers(b, 100_000))
                        .map(|(a, b)| a + b)
                        .collect()
                };
                assert!(read::<f32>(&across.whole()) == sum(dp.members()[0], dp.members()[1]));
                assert!(read::<f32>(&along.whole()) == sum(tp.members()[0] + 10, tp.members()[1] + 10));
            }
            dp.shutdown();
            tp.shutdown();
        });
    }
}

#[test]
fn different_offsets_in_a_shared_arena() {
    World::of(&[3]).run(Executor::Inline, |rank| {
        let arena = rank.arena(true, &vec![rank.rank() as f32 + 1.0; 30_000]);
        let at = 1 + 17 * rank.rank();
        let part = arena.slice(at..at + 20_001);
        done(&rank.comm.all_reduce(&part, SUM, launch()));
        let all = read::<f32>(&arena.whole());
        assert!(all[at..at + 20_001].iter().all(|&x| x == 6.0));
        assert!(
            all[..at]
                .iter()
                .chain(&all[at + 20_001..])
                .all(|&x| x == rank.rank() as f32 + 1.0)
        );
    });
}

#[test]
fn some_buffers_shared_and_others_private() {
    World::of(&[3]).run(Executor::Inline, |rank| {
        let shared = rank.arena(true, &vec![1.0_f32; 150_000]);
        let private = rank.arena(false, &vec![1.0_f32; 150_000]);
        let arena = if rank.rank() == 1 { private } else { shared };
        done(&rank.comm.all_reduce(&arena.whole(), SUM, launch()));
        assert!(read::<f32>(&arena.whole()).iter().all(|&x| x == 3.0));
    });
}
