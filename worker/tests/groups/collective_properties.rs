//! Sums equal the contract bit by bit, whatever the size, offset, type, topology, memory and executor.

use crate::collective_world::{World, done, numbers, read};
use ddp_worker::collective::{Executor, Launch, ReduceOp, Traffic};
use ddp_worker::device::Element;
use half::bf16;
use proptest::prelude::*;

#[derive(Clone, Debug)]
struct Case {
    nodes: Vec<usize>,
    len: usize,
    offset: usize,
    shared: bool,
    executor: Executor,
    traffic: Traffic,
    tree: bool,
}

fn case() -> impl Strategy<Value = Case> {
    let even = (1..=2_usize, 2..=6_usize).prop_map(|(ranks, nodes)| vec![ranks; nodes]);
    let nodes = prop_oneof![prop::collection::vec(1..=3_usize, 1..=3), even];
    let len = prop_oneof![0..40_usize, 0..9000_usize, 0..400_000_usize];
    let traffic = prop_oneof![Just(Traffic::Grads), Just(Traffic::Other)];
    let executor = prop_oneof![Just(Executor::Inline), Just(Executor::Thread)];
    (
        nodes,
        len,
        0..33_usize,
        any::<bool>(),
        executor,
        traffic,
        any::<bool>(),
    )
        .prop_map(|(nodes, len, offset, shared, executor, traffic, tree)| Case {
            nodes,
            len,
            offset,
            shared,
            executor,
            traffic,
            tree,
        })
}

/// The contract, element by element: local ranks in order, then nodes in order, in `W`; one rounding.
fn reference<T: Element, W: Copy>(
    nodes: &[usize],
    inputs: &[Vec<T>],
    widen: impl Fn(T) -> W,
    add: impl Fn(W, W) -> W,
    finish: impl Fn(W) -> T,
) -> Vec<T> {
    (0..inputs[0].len())
        .map(|i| {
            let mut ranks = inputs.iter().map(|input| widen(input[i]));
            let mut sum_node = |&count: &usize| {
                let first = ranks.next().expect("a node has ranks");
                ranks.by_ref().take(count - 1).fold(first, &add)
            };
            let mut nodes = nodes.iter();
            let first = nodes.next().map(&mut sum_node).expect("there is a node");
            finish(nodes.map(sum_node).fold(first, &add))
        })
        .collect()
}

/// What every rank holds after the reduction; elements around the buffer must stay.
fn reduced<T: Element + PartialEq>(case: &Case, inputs: &[Vec<T>], guard: T) -> Vec<Vec<T>> {
    let world = World {
        tree: Some(case.tree),
        ..World::of(&case.nodes)
    };
    world.run(case.executor, |rank| {
        let mut elements = vec![guard; case.offset + case.len + 5];
        elements[case.offset..][..case.len].copy_from_slice(&inputs[rank.rank()]);
        let arena = rank.arena(case.shared, &elements);
        let buffer = arena.slice(case.offset..case.offset + case.len);
        let launch = Launch::now(case.traffic, "property");
        done(&rank.comm.all_reduce(&buffer, ReduceOp::Sum, launch));
        rank.comm.shutdown();
        let all = read::<T>(&arena.whole());
        assert!(all[..case.offset].iter().all(|x| *x == guard));
        assert!(all[case.offset + case.len..].iter().all(|x| *x == guard));
        all[case.offset..][..case.len].to_vec()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 20, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn f32_sums(case in case()) {
        let inputs: Vec<_> = (0..case.nodes.iter().sum()).map(|rank| numbers(rank, case.len)).collect();
        let expected = reference(&case.nodes, &inputs, |x| x, |a: f32, b| a + b, |x| x);
        for result in reduced(&case, &inputs, 7.0) {
            prop_assert!(result.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }

    #[test]
    fn bf16_sums(case in case()) {
        let bf16s = |rank| numbers(rank, case.len).into_iter().map(bf16::from_f32).collect::<Vec<_>>();
        let inputs: Vec<_> = (0..case.nodes.iter().sum()).map(bf16s).collect();
        let expected = reference(&case.nodes, &inputs, bf16::to_f32, |a: f32, b| a + b, bf16::from_f32);
        for result in reduced(&case, &inputs, bf16::from_f32(7.0)) {
            prop_assert!(result.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }

    #[test]
    fn f64_sums(case in case()) {
        let f64s = |rank| numbers(rank, case.len).into_iter().map(|x| f64::from(x) / 3.0).collect::<Vec<_>>();
        let inputs: Vec<_> = (0..case.nodes.iter().sum()).map(f64s).collect();
        let expected = reference(&case.nodes, &inputs, |x| x, |a: f64, b| a + b, |x| x);
        for result in reduced(&case, &inputs, 7.0) {
            prop_assert!(result.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }
}
