//! The global batch of a resumed run: `train.rescale`.
//!
//! Samples of a step = ranks × `train.micro_batch` × accumulation, where the ranks are the data-parallel ones: those of
//! the job, unless a model is divided over several. What it was is in the checkpoint, so that a run can shrink and grow
//! any number of times and still be the same run: with `keep_global_batch` every step reads the samples that it would
//! have read on the first number of ranks, and averages their gradients with the same weights. Only the order of the
//! additions differs.
//!
//! Who changes `train.grad_accumulation` wants another global batch, and so does who changes `train.micro_batch`
//! without changing the number of ranks: then the configuration counts.

use ddp_proto::control::Sizes;
use ddp_proto::words::counted;

use crate::checkpoint::{Batch, State};
use crate::config::{LrScaling, Rescale, ShardGroup, Train, TrainConfig};
use crate::mesh::{MeshShape, SAMPLES};
use crate::parallel::pipeline::PipelinePlan;
use crate::train::TrainError;

/// The batches of the run so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchBefore {
    batch: Batch,
    /// `train.micro_batch` and `train.grad_accumulation`, as they were configured.
    configured: (u64, u64),
}

impl BatchBefore {
    /// Reads them from the state of a checkpoint; `None` if it lacks them.
    pub(crate) fn of(state: &State) -> Option<Self> {
        let number = |pointer| state.config.pointer(pointer)?.as_u64();
        let batch = state.batch.filter(|batch| batch.samples > 0 && batch.ranks > 0)?;
        let configured = (number("/train/micro_batch")?, number("/train/grad_accumulation")?);
        Some(Self { batch, configured })
    }

    /// Whether the configuration asks for another global batch by itself.
    fn is_overruled(&self, train: &Train, ranks: u64) -> bool {
        let (micro_batch, accumulation) = self.configured;
        train.grad_accumulation as u64 != accumulation
            || (ranks == self.batch.ranks && train.micro_batch as u64 != micro_batch)
    }
}

/// Sets the gradient accumulation with which a run resumes on a mesh. A pure function: every rank decides the same. If
/// the number of data-parallel ranks has changed, returns the difference in words.
///
/// Fails if no accumulation keeps the global batch that must be kept.
pub(crate) fn rescale(
    config: &mut TrainConfig,
    mesh: &MeshShape,
    before: &BatchBefore,
) -> Result<Option<String>, TrainError> {
    let (train, ranks) = (&mut config.train, mesh.size(&SAMPLES) as u64);
    if train.rescale == Rescale::KeepGlobalBatch && !before.is_overruled(train, ranks) {
        train.grad_accumulation = kept(train.micro_batch as u64, mesh, before.batch.samples)?;
    }
    if ranks == before.batch.ranks {
        return Ok(None);
    }
    Ok(Some(words(train, mesh, before.batch)))
}

/// The numbers of ranks of the job with which a run can go on that is on `mesh` now: such as make a mesh, and keep the
/// global batch if it is to be kept, with a schedule for the micro-batches that a rank then has.
pub(crate) fn allowed_sizes(config: &TrainConfig, mesh: &MeshShape) -> Sizes {
    let (train, parallel) = (&config.train, &config.parallel);
    let multiple_of = MeshShape::ranks_multiple_of(parallel);
    // Whether the groups of other nodes lie within nodes cannot be told from the number of ranks.
    let stays = parallel.shard_group == Some(ShardGroup::Node) && parallel.pipeline.stages > 1;
    if train.rescale == Rescale::KeepMicroBatch && !stays {
        return Sizes {
            ranks_divide: None,
            ranks_multiple_of: multiple_of,
        };
    }
    let (data, micro_batches) = (mesh.size(&SAMPLES), train.grad_accumulation);
    let (of_each, of_step) = (mesh.ranks() / data, data * micro_batches);
    let (least, most) = if stays {
        (micro_batches, micro_batches)
    } else {
        (1, PipelinePlan::most_micro_batches(&parallel.pipeline))
    };
    let fewest = divisors(data).map(|ranks| ranks * of_each).find(|&ranks| {
        multiple_of.is_none_or(|unit| (ranks as u64).is_multiple_of(unit))
            && of_step * of_each / ranks <= most
    });
    let fewest = fewest.unwrap_or(data * of_each) as u64;
    Sizes {
        ranks_divide: Some((of_each * of_step / least) as u64),
        ranks_multiple_of: (fewest > 1).then_some(fewest),
    }
}

/// The smallest first.
fn divisors(number: usize) -> impl Iterator<Item = usize> {
    (1..=number).filter(move |divisor| number.is_multiple_of(*divisor))
}

/// The accumulation that makes a step of so many samples.
fn kept(micro_batch: u64, mesh: &MeshShape, samples: u64) -> Result<usize, TrainError> {
    let ranks = mesh.size(&SAMPLES) as u64;
    let of_a_pass = ranks * micro_batch;
    let accumulation = samples.is_multiple_of(of_a_pass).then(|| samples / of_a_pass);
    let accumulation = accumulation.and_then(|passes| usize::try_from(passes).ok());
    accumulation.ok_or_else(|| {
        TrainError::Refused(format!(
            "the run was trained with a global batch of {samples} samples, but {} with `train.micro_batch: {micro_batch}` cannot form it: {samples} is not a multiple of {ranks} × {micro_batch}\n  hint: change the number of ranks, how many of them share a sample (`parallel.context`, `parallel.tensor`), or `train.micro_batch`; `train.rescale: keep_micro_batch` allows a different global batch",
            mesh.data_ranks()
        ))
    })
}

fn words(train: &Train, mesh: &MeshShape, before: Batch) -> String {
    let samples = (mesh.size(&SAMPLES) * train.micro_batch * train.grad_accumulation) as u64;
    let ranks = mesh.data_ranks();
    let passes = counted(train.grad_accumulation, "micro-batch");
    let batch = if samples == before.samples {
        format!("the global batch stays {samples} samples")
    } else {
        let rate = match train.lr_scaling {
            LrScaling::None => "the learning rate is unchanged",
            LrScaling::Linear => "the learning rate is scaled with it",
        };
        format!(
            "the global batch is {samples} samples instead of {}, {rate}",
            before.samples
        )
    };
    format!(
        "continuing with {ranks} instead of {}: {passes} per step on each, {batch}",
        before.ranks
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::PathBuf;
    use std::sync::Arc;

    use ddp_proto::env::WorkerEnv;
    use ddp_proto::ids::WorldSize;

    use super::*;
    use crate::config::{self, Parallel, PipelineSchedule, Strategy};
    use crate::parallel::pipeline::LayerCosts;

    /// A run of 12 samples a step: 3 ranks × 2 micro-batches × 2 samples.
    fn before() -> BatchBefore {
        BatchBefore {
            batch: Batch {
                samples: 12,
                ranks: 3,
            },
            configured: (2, 2),
        }
    }

    fn train(rescale: Rescale) -> Train {
        Train {
            micro_batch: 2,
            grad_accumulation: 2,
            rescale,
            ..Train::default()
        }
    }

    fn config(train: Train) -> TrainConfig {
        TrainConfig {
            run: config::Run::default(),
            model: config::Model::default(),
            data: config::Data {
                train: PathBuf::from("text").into(),
                val: None,
                tokenizer: config::Tokenizer::Bytes,
                dtype: None,
                order: config::Order::Shuffled,
                last_batch: config::LastBatch::Wrap,
            },
            train,
            parallel: Parallel::default(),
            launch: BTreeMap::default(),
            vocabulary: Arc::default(),
        }
    }

    /// The accumulation on so many ranks, and the words.
    fn on(ranks: u64, train: Train) -> (usize, Option<String>) {
        let mut config = config(train);
        let words = on_ranks(&mut config, ranks, &before()).unwrap();
        (config.train.grad_accumulation, words)
    }

    fn mesh_of(parallel: &Parallel, ranks: u64) -> Result<MeshShape, crate::config::Problem> {
        let env = WorkerEnv {
            world_size: WorldSize(ranks as u32),
            local_world_size: ranks as u32,
            ..WorkerEnv::single()
        };
        MeshShape::new(parallel, &env)
    }

    /// On this number of data-parallel ranks.
    fn on_ranks(
        config: &mut TrainConfig,
        ranks: u64,
        before: &BatchBefore,
    ) -> Result<Option<String>, TrainError> {
        let of_each = (config.parallel.tensor * config.parallel.pipeline.stages) as u64;
        let mesh = mesh_of(&config.parallel, ranks * of_each).unwrap();
        rescale(config, &mesh, before)
    }

    fn allows(sizes: Sizes, ranks: u64) -> bool {
        sizes
            .ranks_divide
            .is_none_or(|divide| divide.is_multiple_of(ranks))
            && sizes
                .ranks_multiple_of
                .is_none_or(|unit| ranks.is_multiple_of(unit))
    }

    #[test]
    fn the_accumulation_keeps_the_global_batch() {
        let at = |ranks| on(ranks, train(Rescale::KeepGlobalBatch));
        assert_eq!(at(3), (2, None));
        assert_eq!(at(1).0, 6);
        assert_eq!(at(2).0, 3);
        let (accumulation, words) = at(6);
        assert_eq!(accumulation, 1);
        insta::assert_snapshot!(words.unwrap(), @"continuing with 6 ranks instead of 3: 1 micro-batch per step on each, the global batch stays 12 samples");
    }

    #[test]
    fn the_numbers_of_ranks_that_are_said_to_do_are_those_that_are_not_refused() {
        let keeps = config(train(Rescale::KeepGlobalBatch));
        let sizes = allowed_sizes(&keeps, &mesh_of(&keeps.parallel, 3).unwrap());
        for ranks in 1..=13 {
            let is_kept = on_ranks(&mut keeps.clone(), ranks, &before()).is_ok();
            assert_eq!(is_kept, allows(sizes, ranks), "{ranks} ranks");
        }
        let follows = config(train(Rescale::KeepMicroBatch));
        let sizes = allowed_sizes(&follows, &mesh_of(&follows.parallel, 3).unwrap());
        assert_eq!(sizes, Sizes::default());
    }

    /// A run of so many micro-batches on 2 pipelines of a schedule, whose stages are 2 ranks each.
    fn piped(stages: usize, schedule: PipelineSchedule, micro_batches: usize) -> TrainConfig {
        let mut config = config(train(Rescale::KeepGlobalBatch));
        config.train.grad_accumulation = micro_batches;
        config.parallel.tensor = 2;
        config.parallel.pipeline.stages = stages;
        config.parallel.pipeline.schedule = schedule;
        config
    }

    fn sizes_on(config: &TrainConfig, ranks: u64) -> Sizes {
        allowed_sizes(config, &mesh_of(&config.parallel, ranks).unwrap())
    }

    /// Whether a run that is on 2 data-parallel ranks can go on on so many ranks of the job.
    fn goes_on(config: &TrainConfig, ranks: u64) -> bool {
        let mut config = config.clone();
        let batch = Batch {
            samples: (2 * config.train.micro_batch * config.train.grad_accumulation) as u64,
            ranks: 2,
        };
        let configured = (
            config.train.micro_batch as u64,
            config.train.grad_accumulation as u64,
        );
        let Ok(mesh) = mesh_of(&config.parallel, ranks) else {
            return false;
        };
        let is_kept = rescale(&mut config, &mesh, &BatchBefore { batch, configured }).is_ok();
        let (pipeline, costs) = (&config.parallel.pipeline, LayerCosts::equal(16));
        is_kept && PipelinePlan::new(pipeline, config.train.grad_accumulation, &costs).is_ok()
    }

    #[test]
    fn data_parallel_ranks_share_the_micro_batches_however_many_ranks_each_consists_of() {
        // 4 ranks hold a model: a number that 2 × 3 micro-batches are no multiple of, nor 2 × 5.
        for micro_batches in [3, 4, 5, 6] {
            let config = piped(2, PipelineSchedule::OneFOneB, micro_batches);
            let sizes = sizes_on(&config, 8);
            assert_eq!(sizes.ranks_multiple_of, Some(4));
            for ranks in 1..=64 {
                let expected = goes_on(&config, ranks);
                assert_eq!(allows(sizes, ranks), expected, "{ranks} ranks, {micro_batches}");
            }
            assert!(allows(sizes, 4 * 2 * micro_batches as u64), "one each");
        }
    }

    #[test]
    fn no_number_of_ranks_is_said_to_do_for_which_there_is_no_schedule() {
        let interleaved = piped(2, PipelineSchedule::Interleaved, 6);
        let mut long = piped(2, PipelineSchedule::GPipe, 20_000);
        long.parallel.pipeline.chunks = Some(1);
        let mut sharded = piped(2, PipelineSchedule::Zbv, 16);
        sharded.parallel.strategy = Strategy::Zero1;
        sharded.parallel.shard_group = Some(ShardGroup::Ranks(2));
        let mut per_node = piped(2, PipelineSchedule::OneFOneB, 4);
        per_node.parallel.strategy = Strategy::Zero1;
        per_node.parallel.shard_group = Some(ShardGroup::Node);
        for (config, allowed) in [
            (interleaved, &[4, 8, 12, 16, 24, 48][..]),
            // 40,000 of one rank would be too many.
            (long, &[8, 16, 32, 40, 64]),
            (sharded, &[8, 16, 32, 64]),
            (per_node, &[8]),
        ] {
            let sizes = sizes_on(&config, 8);
            let found: Vec<u64> = (1..=64).filter(|&ranks| allows(sizes, ranks)).collect();
            assert_eq!(found, allowed, "{:?}", config.parallel.pipeline);
            // Large schedules take long to check.
            for ranks in found.into_iter().filter(|_| config.train.grad_accumulation < 100) {
                assert!(goes_on(&config, ranks), "{ranks}: {config:?}");
            }
        }
    }

    #[test]
    fn a_run_that_has_shrunk_can_grow_to_what_it_was() {
        let whole = sizes_on(&piped(2, PipelineSchedule::Zbv, 6), 8);
        let half = sizes_on(&piped(2, PipelineSchedule::Zbv, 12), 4);
        assert_eq!(half, whole);
    }

    #[test]
    fn ranks_that_hold_a_model_together_are_counted_once() {
        let mut config = piped(2, PipelineSchedule::OneFOneB, 2);
        let before = before();
        let words = on_ranks(&mut config.clone(), 6, &before).unwrap();
        insta::assert_snapshot!(words.unwrap(), @"continuing with 6 data-parallel ranks instead of 3: 1 micro-batch per step on each, the global batch stays 12 samples");
        let refused = on_ranks(&mut config, 4, &before).unwrap_err().to_string();
        assert!(refused.contains(" but 4 data-parallel ranks with "), "{refused}");
    }

    #[test]
    fn a_run_comes_back_to_what_it_was() {
        // On one rank since the last checkpoint, which tells of the configuration as it was given.
        let before = BatchBefore {
            batch: Batch {
                samples: 12,
                ranks: 1,
            },
            configured: (2, 2),
        };
        let mut again = config(train(Rescale::KeepGlobalBatch));
        assert_eq!(on_ranks(&mut again, 1, &before).unwrap(), None);
        assert_eq!(again.train.grad_accumulation, 6, "a restart at the same size");
        let mut grown = config(train(Rescale::KeepGlobalBatch));
        on_ranks(&mut grown, 3, &before).unwrap();
        assert_eq!(grown.train, train(Rescale::KeepGlobalBatch));
    }

    #[test]
    fn the_micro_batch_is_kept_on_demand_and_the_global_batch_follows() {
        let (accumulation, words) = on(1, train(Rescale::KeepMicroBatch));
        assert_eq!(accumulation, 2);
        insta::assert_snapshot!(words.unwrap(), @"continuing with 1 rank instead of 3: 2 micro-batches per step on each, the global batch is 4 samples instead of 12, the learning rate is unchanged");
        let mut scaled = train(Rescale::KeepMicroBatch);
        scaled.lr_scaling = LrScaling::Linear;
        let (_, words) = on(5, scaled);
        insta::assert_snapshot!(words.unwrap(), @"continuing with 5 ranks instead of 3: 2 micro-batches per step on each, the global batch is 20 samples instead of 12, the learning rate is scaled with it");
    }

    #[test]
    fn a_batch_that_is_configured_anew_counts() {
        let mut accumulation = train(Rescale::KeepGlobalBatch);
        accumulation.grad_accumulation = 5;
        assert_eq!(on(3, accumulation.clone()).0, 5);
        assert_eq!(on(1, accumulation).0, 5);
        let mut micro_batch = train(Rescale::KeepGlobalBatch);
        micro_batch.micro_batch = 4;
        assert_eq!(on(3, micro_batch.clone()), (2, None));
        // On fewer ranks a micro-batch may be larger, and the run still be the same.
        assert_eq!(on(1, micro_batch).0, 3);
    }

    #[test]
    fn what_does_not_divide_is_refused_with_what_would() {
        let refusal = |ranks, micro_batch| {
            let mut config = config(train(Rescale::KeepGlobalBatch));
            config.train.micro_batch = micro_batch;
            on_ranks(&mut config, ranks, &before()).unwrap_err().to_string()
        };
        insta::assert_snapshot!(refusal(4, 2), @"
        the run was trained with a global batch of 12 samples, but 4 ranks with `train.micro_batch: 2` cannot form it: 12 is not a multiple of 4 × 2
          hint: change the number of ranks, how many of them share a sample (`parallel.context`, `parallel.tensor`), or `train.micro_batch`; `train.rescale: keep_micro_batch` allows a different global batch
        ");
        insta::assert_snapshot!(refusal(5, 12), @"
        the run was trained with a global batch of 12 samples, but 5 ranks with `train.micro_batch: 12` cannot form it: 12 is not a multiple of 5 × 12
          hint: change the number of ranks, how many of them share a sample (`parallel.context`, `parallel.tensor`), or `train.micro_batch`; `train.rescale: keep_micro_batch` allows a different global batch
        ");
        insta::assert_snapshot!(refusal(5, 7), @"
        the run was trained with a global batch of 12 samples, but 5 ranks with `train.micro_batch: 7` cannot form it: 12 is not a multiple of 5 × 7
          hint: change the number of ranks, how many of them share a sample (`parallel.context`, `parallel.tensor`), or `train.micro_batch`; `train.rescale: keep_micro_batch` allows a different global batch
        ");
    }

    #[test]
    fn the_batch_before_comes_from_the_checkpoint() {
        let mut state = State {
            step: 1,
            consumed_samples: 12,
            skipped: 0,
            batch: None,
            rng: crate::checkpoint::Rng {
                seed: 1,
                data_order: String::new(),
            },
            data: String::new(),
            val_data: None,
            config: serde_json::json!({ "train": { "micro_batch": 2, "grad_accumulation": 2 } }),
        };
        assert_eq!(BatchBefore::of(&state), None);
        state.batch = Some(before().batch);
        assert_eq!(BatchBefore::of(&state), Some(before()));
    }
}
