//! The global batch of a run that goes on: `train.rescale`.
//!
//! Samples of a step = ranks × `train.micro_batch` × accumulation. What it was is in the checkpoint, so that a run can
//! shrink and grow any number of times and still be the same run: with `keep_global_batch` every step reads the
//! samples that it would have read on the first number of ranks, and averages their gradients with the same weights.
//! Only the order of the additions differs.
//!
//! Who changes `train.grad_accumulation` wants another global batch, and so does who changes `train.micro_batch`
//! without changing the number of ranks: then the configuration counts.

use ddp_proto::words::counted;

use crate::checkpoint::{Batch, State};
use crate::config::{LrScaling, Rescale, Train};
use crate::train::TrainError;

/// So many numbers of ranks are looked at to name one that would fit.
const MAX_CANDIDATES: u64 = 1 << 12;

/// The batches of the run so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchBefore {
    batch: Batch,
    /// `train.micro_batch` and `train.grad_accumulation`, as they were configured.
    configured: (u64, u64),
}

impl BatchBefore {
    /// What a checkpoint tells of them; none: its build did not.
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

/// Sets the accumulation with which `train` goes on on so many ranks. A pure function: every rank decides the same.
/// Returns what is different from before, in words, where the number of ranks is.
///
/// Fails where no accumulation keeps the global batch that is to be kept.
pub(crate) fn rescale(
    train: &mut Train,
    ranks: u64,
    before: &BatchBefore,
) -> Result<Option<String>, TrainError> {
    if train.rescale == Rescale::KeepGlobalBatch && !before.is_overruled(train, ranks) {
        train.grad_accumulation = kept(train.micro_batch as u64, ranks, before.batch.samples)?;
    }
    if ranks == before.batch.ranks {
        return Ok(None);
    }
    Ok(Some(words(train, ranks, before.batch)))
}

/// What a number of ranks has to divide to go on with the global batch of `train` on `ranks` ranks: the micro-batches of
/// a step. None: the global batch may change.
pub(crate) fn ranks_divide(train: &Train, ranks: u64) -> Option<u64> {
    (train.rescale == Rescale::KeepGlobalBatch).then_some(ranks * train.grad_accumulation as u64)
}

/// The accumulation that makes a step of so many samples.
fn kept(micro_batch: u64, ranks: u64, samples: u64) -> Result<usize, TrainError> {
    let of_a_pass = ranks * micro_batch;
    let accumulation = samples.is_multiple_of(of_a_pass).then(|| samples / of_a_pass);
    let accumulation = accumulation.and_then(|passes| usize::try_from(passes).ok());
    accumulation.ok_or_else(|| {
        TrainError::Refused(format!(
            "the run was trained in global batches of {samples} samples, and {ranks} ranks with `train.micro_batch: {micro_batch}` cannot make one: {samples} is no multiple of {ranks} × {micro_batch}\n  hint: {}`train.rescale: keep_micro_batch` lets the global batch change",
            fits(micro_batch, ranks, samples)
        ))
    })
}

/// What would make steps of so many samples: the nearest numbers of ranks, the next smaller micro-batch.
fn fits(micro_batch: u64, ranks: u64, samples: u64) -> String {
    let is_kept = |ranks: &u64| samples.is_multiple_of(ranks * micro_batch);
    let fewer = (1..ranks).rev().take(MAX_CANDIDATES as usize).find(is_kept);
    let more = (ranks + 1..=ranks + MAX_CANDIDATES).find(is_kept);
    let numbers: Vec<String> = [fewer, more].iter().flatten().map(u64::to_string).collect();
    let smaller = (1..micro_batch)
        .rev()
        .find(|micro_batch| samples.is_multiple_of(ranks * micro_batch));
    let others = match numbers.last().map(String::as_str) {
        None => String::new(),
        Some("1") => "1 rank can; ".to_owned(),
        Some(_) => format!("{} ranks can; ", numbers.join(" or ")),
    };
    let these = smaller.map(|smaller| format!("{ranks} can with `train.micro_batch: {smaller}`; "));
    others + &these.unwrap_or_default()
}

fn words(train: &Train, ranks: u64, before: Batch) -> String {
    let samples = ranks * (train.micro_batch * train.grad_accumulation) as u64;
    let ranks = counted(ranks, "rank");
    let passes = counted(train.grad_accumulation, "micro-batch");
    let batch = if samples == before.samples {
        format!("the global batch stays {samples} samples")
    } else {
        let rate = match train.lr_scaling {
            LrScaling::None => "the learning rate stays",
            LrScaling::Linear => "the learning rate follows",
        };
        format!(
            "the global batch is {samples} samples instead of {}, {rate}",
            before.samples
        )
    };
    format!(
        "going on with {ranks} instead of {}: {passes} a step on each, {batch}",
        before.ranks
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run of 12 samples a step: 3 ranks × 2 micro-batches × 2 samples.
    fn before() -> BatchBefore {
        BatchBefore {
            batch: Batch {
                samples: 12,
                ranks: 3,
                since: None,
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

    /// The accumulation on so many ranks, and the words.
    fn on(ranks: u64, mut train: Train) -> (usize, Option<String>) {
        let words = rescale(&mut train, ranks, &before()).unwrap();
        (train.grad_accumulation, words)
    }

    #[test]
    fn the_accumulation_keeps_the_global_batch() {
        let at = |ranks| on(ranks, train(Rescale::KeepGlobalBatch));
        assert_eq!(at(3), (2, None));
        assert_eq!(at(1).0, 6);
        assert_eq!(at(2).0, 3);
        let (accumulation, words) = at(6);
        assert_eq!(accumulation, 1);
        insta::assert_snapshot!(words.unwrap(), @"going on with 6 ranks instead of 3: 1 micro-batch a step on each, the global batch stays 12 samples");
    }

    #[test]
    fn the_numbers_of_ranks_that_are_said_to_do_are_those_that_are_not_refused() {
        let keeps = train(Rescale::KeepGlobalBatch);
        let divided = ranks_divide(&keeps, 3).unwrap();
        for ranks in 1..=13 {
            let is_kept = rescale(&mut keeps.clone(), ranks, &before()).is_ok();
            assert_eq!(is_kept, divided.is_multiple_of(ranks), "{ranks} ranks");
        }
        assert_eq!(ranks_divide(&train(Rescale::KeepMicroBatch), 3), None);
    }

    #[test]
    fn a_run_comes_back_to_what_it_was() {
        // On one rank since the last checkpoint, which tells of the configuration as it was given.
        let before = BatchBefore {
            batch: Batch {
                samples: 12,
                ranks: 1,
                since: None,
            },
            configured: (2, 2),
        };
        let mut again = train(Rescale::KeepGlobalBatch);
        assert_eq!(rescale(&mut again, 1, &before).unwrap(), None);
        assert_eq!(again.grad_accumulation, 6, "a restart at the same size");
        let mut grown = train(Rescale::KeepGlobalBatch);
        rescale(&mut grown, 3, &before).unwrap();
        assert_eq!(grown, train(Rescale::KeepGlobalBatch));
    }

    #[test]
    fn the_micro_batch_is_kept_on_demand_and_the_global_batch_follows() {
        let (accumulation, words) = on(1, train(Rescale::KeepMicroBatch));
        assert_eq!(accumulation, 2);
        insta::assert_snapshot!(words.unwrap(), @"going on with 1 rank instead of 3: 2 micro-batches a step on each, the global batch is 4 samples instead of 12, the learning rate stays");
        let mut scaled = train(Rescale::KeepMicroBatch);
        scaled.lr_scaling = LrScaling::Linear;
        let (_, words) = on(5, scaled);
        insta::assert_snapshot!(words.unwrap(), @"going on with 5 ranks instead of 3: 2 micro-batches a step on each, the global batch is 20 samples instead of 12, the learning rate follows");
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
            let mut train = train(Rescale::KeepGlobalBatch);
            train.micro_batch = micro_batch;
            rescale(&mut train, ranks, &before()).unwrap_err().to_string()
        };
        insta::assert_snapshot!(refusal(4, 2), @"
        the run was trained in global batches of 12 samples, and 4 ranks with `train.micro_batch: 2` cannot make one: 12 is no multiple of 4 × 2
          hint: 3 or 6 ranks can; 4 can with `train.micro_batch: 1`; `train.rescale: keep_micro_batch` lets the global batch change
        ");
        insta::assert_snapshot!(refusal(5, 12), @"
        the run was trained in global batches of 12 samples, and 5 ranks with `train.micro_batch: 12` cannot make one: 12 is no multiple of 5 × 12
          hint: 1 rank can; `train.rescale: keep_micro_batch` lets the global batch change
        ");
        insta::assert_snapshot!(refusal(5, 7), @"
        the run was trained in global batches of 12 samples, and 5 ranks with `train.micro_batch: 7` cannot make one: 12 is no multiple of 5 × 7
          hint: `train.rescale: keep_micro_batch` lets the global batch change
        ");
    }

    #[test]
    fn a_checkpoint_of_an_older_build_changes_nothing() {
        let mut state = State {
            step: 1,
            consumed_samples: 12,
            skipped: 0,
            batch: None,
            rng: crate::checkpoint::Rng {
                seed: 1,
                data_order: String::new(),
            },
            data: None,
            val_data: None,
            config: serde_json::json!({ "train": { "micro_batch": 2, "grad_accumulation": 2 } }),
        };
        assert_eq!(BatchBefore::of(&state), None);
        state.batch = Some(before().batch);
        assert_eq!(BatchBefore::of(&state), Some(before()));
    }
}
