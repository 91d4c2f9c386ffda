//! What is rehearsed is what runs: it is enough, and not a byte too much.

use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::WorldSize;

use super::*;
use crate::config::{self, ModelKind, Parallel, Pipeline, PipelineSchedule, Recompute};
use crate::mesh::MeshShape;
use crate::model::{ModelPart, build_part, recomputing};
use crate::parallel::pipeline::LayerCosts;
use crate::train::idle_world::idle_world;

const SAMPLES: usize = 8;

fn shape_of(config: &config::Model) -> MicroBatchShape {
    MicroBatchShape {
        samples: SAMPLES,
        positions: config.block_size,
        channels: config.n_embd,
    }
}

fn config(kind: ModelKind, [n_layer, n_embd, positions, vocab]: [usize; 4]) -> config::Model {
    config::Model {
        kind,
        n_layer,
        n_head: 4,
        n_embd,
        block_size: positions,
        vocab_size: Some(vocab),
        dropout: 0.0,
        ..config::Model::default()
    }
}

/// A model in all types and with every recomputation, and with dropout.
fn variants(config: &config::Model, part: &ModelPart) -> Vec<(String, Model)> {
    let made = |config: &config::Model| build_part(config, 256, part).unwrap();
    let mut models = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        for what in [
            Recompute::Nothing,
            Recompute::Norms,
            Recompute::Selective,
            Recompute::Full,
        ] {
            let model = recomputing(made(config), what).with_dtype(dtype);
            models.push((format!("{} in {dtype}, {what:?}", model.name), model));
        }
    }
    let dropped = config::Model {
        dropout: 0.1,
        ..config.clone()
    };
    let model = made(&dropped);
    models.push((format!("{} with dropout", model.name), model));
    models
}

/// A rank of a pipeline, or the only one.
struct Rank {
    plan: Arc<PipelinePlan>,
    mesh: Arc<Mesh>,
    index: usize,
}

impl Rank {
    fn part(&self) -> ModelPart {
        ModelPart {
            chunks: Some(self.plan.chunks_of(self.index)),
            ..ModelPart::WHOLE
        }
    }
}

fn ranks(kind: PipelineSchedule, stages: usize, micro_batches: usize, layers: usize) -> Vec<Rank> {
    let parallel = Parallel {
        pipeline: Pipeline {
            stages,
            schedule: kind,
            ..Pipeline::default()
        },
        ..Parallel::default()
    };
    let plan = PipelinePlan::new(
        &parallel.pipeline,
        micro_batches,
        None,
        &LayerCosts::equal(layers),
    );
    let plan = Arc::new(plan.unwrap());
    let env = WorkerEnv {
        world_size: WorldSize(stages as u32),
        local_world_size: stages as u32,
        ..WorkerEnv::single()
    };
    let shape = MeshShape::new(&parallel, &env).unwrap();
    let rank = |index| Rank {
        plan: plan.clone(),
        mesh: idle_world(shape, index).mesh,
        index,
    };
    (0..stages).map(rank).collect()
}

fn single(micro_batches: usize) -> Rank {
    ranks(PipelineSchedule::OneFOneB, 1, micro_batches, 1).remove(0)
}

/// Bytes held after three steps with an arena of so many.
fn held(rank: &Rank, stage: &Stage<'_>, bytes: usize) -> usize {
    let pool = ActivationPool::planned(stage.device.clone(), bytes).unwrap();
    let mut flights = stage.flights(&rank.plan, &rank.mesh).unwrap();
    for _ in 0..3 {
        let all = rank.plan.micro_batches();
        stage.pass(&mut flights, &rank.plan, all, &pool).unwrap();
    }
    pool.allocated_bytes()
}

fn check(rank: &Rank, shape: MicroBatchShape, name: &str, model: &Model) {
    let all = rank.plan.micro_batches();
    let bytes = rehearse(model, &rank.plan, &rank.mesh, shape, std::iter::once(all)).unwrap();
    let stage = Stage::new(model, shape).unwrap();
    assert_eq!(held(rank, &stage, bytes), bytes, "{name}");
    assert!(held(rank, &stage, bytes - Arena::ALIGNMENT) > bytes, "{name}");
}

#[test]
fn what_was_rehearsed_is_enough_and_not_a_byte_too_much() {
    for kind in [ModelKind::Gpt2, ModelKind::Mlp] {
        let config = config(kind, [3, 32, 64, 256]);
        for (name, model) in variants(&config, &ModelPart::WHOLE) {
            check(&single(1), shape_of(&config), &name, &model);
        }
    }
}

#[test]
fn what_was_rehearsed_of_a_pipeline_is_enough_and_not_a_byte_too_much() {
    let config = config(ModelKind::Mlp, [4, 32, 64, 256]);
    for (kind, micro_batches) in [
        (PipelineSchedule::GPipe, 3),
        (PipelineSchedule::OneFOneB, 4),
        (PipelineSchedule::Interleaved, 4),
        (PipelineSchedule::ZbH1, 4),
        (PipelineSchedule::Zbv, 4),
        (PipelineSchedule::DualPipeV, 4),
        (PipelineSchedule::Greedy, 2),
    ] {
        for rank in ranks(kind, 2, micro_batches, config.n_layer) {
            let part = rank.part();
            for (name, model) in variants(&config, &part) {
                let name = format!("{kind:?}, rank {}: {name}", rank.index);
                check(&rank, shape_of(&config), &name, &model);
            }
        }
    }
}

/// The more micro-batches are in the air, the more is kept: 1F1B keeps as many as there are ranks ahead, `GPipe` all.
#[test]
fn the_first_rank_keeps_most() {
    let config = config(ModelKind::Mlp, [8, 32, 64, 256]);
    let bytes = |kind| -> Vec<usize> {
        let of = |rank: Rank| {
            let part = rank.part();
            let model = build_part(&config, 256, &part).unwrap();
            rehearse(
                &model,
                &rank.plan,
                &rank.mesh,
                shape_of(&config),
                std::iter::once(8),
            )
            .unwrap()
        };
        ranks(kind, 4, 8, config.n_layer).into_iter().map(of).collect()
    };
    let (gpipe, one) = (bytes(PipelineSchedule::GPipe), bytes(PipelineSchedule::OneFOneB));
    assert!(one[0] > one[1] && one[1] > one[2], "{one:?}");
    assert!(gpipe[0] > one[0] * 3 / 2, "{gpipe:?} and {one:?}");
}

/// Nothing can do with less than what is leased at one time. Recycling by size alone takes more.
#[test]
fn little_is_lost_between_places() {
    for (sizes, lost) in [
        ([12, 768, 1024, 50_304], 0.05),
        ([6, 384, 256, 256], 0.2),
        ([4, 128, 128, 256], 0.2),
    ] {
        for kind in [ModelKind::Gpt2, ModelKind::Mlp] {
            let config = config(kind, sizes);
            let rank = single(1);
            for (name, model) in variants(&config, &ModelPart::WHOLE) {
                let stage = Stage::new(&model, shape_of(&config)).unwrap();
                let by_size = ActivationPool::new(stage.device.clone());
                let mut flights = stage.flights(&rank.plan, &rank.mesh).unwrap();
                stage.pass(&mut flights, &rank.plan, 1, &by_size).unwrap();
                let steps = std::iter::once(1);
                let bytes = rehearse(&model, &rank.plan, &rank.mesh, shape_of(&config), steps).unwrap();
                let least = by_size.peak_bytes();
                assert!(
                    bytes as f64 <= (1.0 + lost) * least as f64,
                    "{name}: {bytes}, {least} are leased"
                );
                assert!(bytes <= by_size.allocated_bytes(), "{name}: {bytes}");
            }
        }
    }
}
