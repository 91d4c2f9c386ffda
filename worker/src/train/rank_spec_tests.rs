//! A rehearsal finds enough memory for the activations of a run, and not a byte too much.

use ddp_proto::ids::WorldSize;

use super::*;
use crate::config;
use crate::device::Arena;

/// Every type of parameters with every recomputation, and dropout.
const VARIANTS: [&[&str]; 9] = [
    &["train.recompute=nothing"],
    &["train.recompute=norms"],
    &["train.recompute=selective"],
    &["train.recompute=full"],
    &["train.precision=bf16", "train.recompute=nothing"],
    &["train.precision=bf16", "train.recompute=norms"],
    &["train.precision=bf16", "train.recompute=selective"],
    &["train.precision=bf16", "train.recompute=full"],
    &["model.dropout=0.1"],
];

fn config_of(
    kind: &str,
    [layers, channels, positions, vocabulary]: [usize; 4],
    more: &[&str],
) -> TrainConfig {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train.yaml");
    let text = format!(
        "model: {{kind: {kind}, n_layer: {layers}, n_head: 4, n_embd: {channels}, block_size: {positions}, vocab_size: {vocabulary}}}\ndata: {{train: absent.txt}}\ntrain: {{micro_batch: 8}}\n"
    );
    std::fs::write(&path, text).unwrap();
    let overrides: Vec<String> = more.iter().map(|&words| words.to_owned()).collect();
    config::load_without_data(&path, &overrides).unwrap().config
}

fn specs(config: &TrainConfig) -> Vec<RankSpec> {
    let ranks = (config.parallel.pipeline.stages * config.parallel.context) as u32;
    let env = WorkerEnv {
        world_size: WorldSize(ranks),
        local_world_size: ranks,
        ..WorkerEnv::single()
    };
    let first = RankSpec::of(config, &env).unwrap();
    let of = |rank| RankSpec::new(config, first.strategy.mesh, &first.plan, rank).unwrap();
    (0..ranks as usize).map(of).collect()
}

/// The pool after some steps and evaluations.
fn used(spec: &RankSpec, pool: impl Fn(&World) -> ActivationPool, steps: usize) -> ActivationPool {
    let world = idle_world(spec.strategy.mesh, spec.rank);
    let (mut replica, mut reducer) = spec.idle(&world, 0).unwrap();
    replica.pool = pool(&world);
    for _ in 0..steps {
        let all = spec.plan.micro_batches();
        rehearse_step(&mut replica, &mut reducer, all, &|_| {}).unwrap();
        rehearse_evaluation(&mut replica, all).unwrap();
    }
    replica.pool
}

fn check(config: &TrainConfig, what: &str) {
    for spec in specs(config) {
        let held = |bytes| {
            let planned =
                |world: &World| ActivationPool::planned(world.compute.device.clone(), bytes).unwrap();
            used(&spec, planned, 3).allocated_bytes()
        };
        let bytes = spec.activations().unwrap();
        assert_eq!(held(bytes), bytes, "{what}, rank {}", spec.rank);
        // Something then lies outside of the pool.
        let less = bytes - Arena::ALIGNMENT;
        assert!(held(less) > less, "{what}, rank {}", spec.rank);
    }
}

#[test]
fn what_was_rehearsed_is_enough_and_not_a_byte_too_much() {
    let context: &[&str] = &["parallel.context=2"];
    for kind in ["gpt2", "mlp"] {
        for variant in VARIANTS {
            for more in [&[], context] {
                let more = [variant, more].concat();
                let config = config_of(kind, [3, 32, 64, 256], &more);
                check(&config, &format!("{kind}, {more:?}"));
            }
        }
    }
}

#[test]
fn what_was_rehearsed_of_a_pipeline_is_enough_and_not_a_byte_too_much() {
    for (schedule, micro_batches) in [
        ("gpipe", 3),
        ("1f1b", 4),
        ("interleaved", 4),
        ("zb-h1", 4),
        ("zbv", 4),
        ("greedy", 2),
    ] {
        let schedule = format!("parallel.pipeline.schedule={schedule}");
        let micro_batches = format!("train.grad_accumulation={micro_batches}");
        for variant in VARIANTS {
            let more = [
                &["parallel.pipeline.stages=2", &schedule, &micro_batches],
                variant,
            ]
            .concat();
            check(&config_of("mlp", [4, 32, 64, 256], &more), &format!("{more:?}"));
        }
    }
}

/// 1F1B keeps as many micro-batches as there are ranks ahead, `GPipe` keeps all.
#[test]
fn the_first_rank_keeps_most() {
    let bytes = |schedule: &str| -> Vec<usize> {
        let schedule = format!("parallel.pipeline.schedule={schedule}");
        let more = [
            "parallel.pipeline.stages=4",
            &schedule,
            "train.grad_accumulation=8",
        ];
        let config = config_of("mlp", [8, 32, 64, 256], &more);
        let specs = specs(&config);
        specs.iter().map(|spec| spec.activations().unwrap()).collect()
    };
    let (gpipe, one) = (bytes("gpipe"), bytes("1f1b"));
    assert!(one[0] > one[1] && one[1] > one[2], "{one:?}");
    assert!(gpipe[0] > one[0] * 3 / 2, "{gpipe:?} and {one:?}");
}

/// Recycling by size alone takes as much or more.
#[test]
fn little_is_lost_between_places() {
    for sizes in [[12, 768, 1024, 50_304], [6, 384, 256, 256], [4, 128, 128, 256]] {
        for kind in ["gpt2", "mlp"] {
            for variant in VARIANTS {
                let config = config_of(kind, sizes, variant);
                let spec = &specs(&config)[0];
                let by_size = used(spec, |world| ActivationPool::new(world.compute.device.clone()), 1);
                let (bytes, without) = (spec.activations().unwrap(), by_size.allocated_bytes());
                assert!(
                    bytes <= without,
                    "{kind}, {variant:?}: {bytes}, {without} by size"
                );
            }
        }
    }
}
