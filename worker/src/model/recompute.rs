//! Recomputation: memory of activations for arithmetic (Chen et al. 2016; Korthikanti et al. 2022).
//!
//! A transformer block of C channels keeps 10·C numbers a position for its backward, and one a head. What is computed
//! element by element (normalisations, the output of the GELU) is never kept.
//!
//! | `train.recompute` | kept, numbers a position | computed again |
//! |---|---|---|
//! | `none` | 10·C + heads | nothing |
//! | `selective` | 6·C + heads | the widened half of the feed-forward layer: a third of the block's products |
//! | `full` | C, the block's input | all of the block but its last product, whose output is not read |
//!
//! `selective` gives up the largest thing that a block keeps, for one product that needs nothing but the layer's
//! input. Attention keeps what it has: per byte it is the more expensive part, since its core grows with the square of
//! the positions. The last block is left alone by `full`: its backward comes next, so nothing would be freed.
//!
//! The same operations run on the same numbers, and dropout makes its masks again from the samples' numbers, so losses and
//! gradients have the same bits.

use super::Model;
use crate::config::Recompute;

/// The same model, which keeps less for backward.
#[must_use]
pub fn recomputing(mut model: Model, what: Recompute) -> Model {
    match what {
        Recompute::None => {}
        Recompute::Selective => {
            for block in &mut model.blocks {
                *block = block.selective().unwrap_or_else(|| block.clone());
            }
        }
        Recompute::Full => {
            let before_last = model.blocks.len().saturating_sub(1);
            let keeps_input = |(index, keeps): (usize, &mut bool)| {
                *keeps = index < before_last && !model.blocks[index].keeps_only_input();
            };
            model.keeps_input.iter_mut().enumerate().for_each(keeps_input);
        }
    }
    model
}
