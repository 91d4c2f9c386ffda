//! Arithmetic of a token.

use crate::config::{Model, ModelKind, Recompute};

/// Floating-point operations of one token of training that no implementation can leave out; a multiply-add is two.
///
/// Products alone count, each once in forward and twice in backward: the blocks' matrices and the head's, and in attention
/// the scores and the weighted sum over the positions up to the token's own, (positions + 1)/2 on average. Embeddings are
/// looked up, and the masked half of attention need not be computed. The usual 6Ψ + 12·layers·width·positions (Chowdhery
/// et al. 2022, appendix B) counts both, and is no lower bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Of forward and backward.
    pub model: u64,
    /// What recomputation does again.
    pub repeated: u64,
}

impl Work {
    /// Of a model with a vocabulary of so many tokens.
    #[must_use]
    pub fn of(model: &Model, vocabulary: u64, recompute: Recompute) -> Self {
        let [layers, width, positions] = [model.n_layer, model.n_embd, model.block_size].map(|n| n as u64);
        // 4·width² of attention, if it has any, and 8·width² of the feed-forward layer, half of it in each of two products.
        let square = layers * width * width;
        let (matrices, attention) = match model.kind {
            ModelKind::Gpt2 => (12 * square, 2 * layers * width * (positions + 1)),
            ModelKind::Mlp => (8 * square, 0),
        };
        Self {
            model: 3 * (2 * (matrices + vocabulary * width) + attention),
            repeated: match recompute {
                Recompute::None => 0,
                // The first of the feed-forward layer's two products.
                Recompute::Selective => 2 * 4 * square,
                // All but the second one, whose output nobody reads.
                Recompute::Full => 2 * (matrices - 4 * square) + attention,
            },
        }
    }

    /// All that the device does.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.model + self.repeated
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpt2_124m_at_1024_positions() {
        let model = Model {
            kind: ModelKind::Gpt2,
            n_layer: 12,
            n_head: 12,
            n_embd: 768,
            block_size: 1024,
            vocab_size: None,
            init_from: None,
            dropout: 0.0,
        };
        let of = |recompute| Work::of(&model, 50_304, recompute);
        // The blocks' matrices have 84,934,656 parameters. A token sees 512.5 positions on average.
        let (blocks, attention) = (84_934_656, 4 * 12 * 768 * 1025 / 2);
        assert_eq!(
            of(Recompute::None).total(),
            6 * (blocks + 50_304 * 768) + 3 * attention
        );
        // Forward once more, of the blocks alone, without the last of their products: a third of the matrices.
        assert_eq!(of(Recompute::Full).repeated, 2 * blocks * 2 / 3 + attention);
        assert_eq!(of(Recompute::Selective).repeated * 3, 2 * blocks);
    }

    /// One layer, 128 wide, 4,096 positions: bound by attention and full of positions.
    #[test]
    fn neither_position_embeddings_nor_masked_positions_are_counted() {
        let model = Model {
            kind: ModelKind::Gpt2,
            n_layer: 1,
            n_head: 1,
            n_embd: 128,
            block_size: 4096,
            vocab_size: None,
            init_from: None,
            dropout: 0.0,
        };
        let products = 6 * (12 * 128 * 128 + 256 * 128);
        let scores_and_sums = 6 * 128 * 4097;
        assert_eq!(
            Work::of(&model, 256, Recompute::None).total(),
            products + scores_and_sums
        );
    }
}
