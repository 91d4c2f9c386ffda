//! Arithmetic of a token.

use crate::config::{Model, ModelKind, Recompute};

/// Floating-point operations of one token of training; a multiply-add is two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Of forward and backward: 6Ψ + 12·layers·width·positions (Chowdhery et al. 2022, appendix B), by which a model FLOPs
    /// utilisation (MFU) is reckoned. Positions are not halved for causal attention.
    pub model: u64,
    /// What recomputation does again.
    pub repeated: u64,
}

impl Work {
    /// Of a model with so many parameters.
    #[must_use]
    pub fn of(model: &Model, parameters: u64, recompute: Recompute) -> Self {
        let [layers, width, positions] = [model.n_layer, model.n_embd, model.block_size].map(|n| n as u64);
        let attention = match model.kind {
            ModelKind::Gpt2 => layers * width * positions,
            ModelKind::Mlp => 0,
        };
        // A block's matrices: 4·width² of attention, if it has any, and 8·width² of the feed-forward layer.
        let square = layers * width * width;
        let forward = match model.kind {
            ModelKind::Gpt2 => 2 * 12 * square + 4 * attention,
            ModelKind::Mlp => 2 * 8 * square,
        };
        Self {
            model: 6 * parameters + 12 * attention,
            repeated: match recompute {
                Recompute::None => 0,
                // The first of the feed-forward layer's two products.
                Recompute::Selective => 2 * 4 * square,
                Recompute::Full => forward,
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
        };
        let of = |recompute| Work::of(&model, 124_475_904, recompute);
        assert_eq!(
            of(Recompute::None).total(),
            6 * 124_475_904 + 12 * 12 * 768 * 1024
        );
        // Forward once more, of the blocks alone: 85 M parameters.
        assert_eq!(of(Recompute::Full).repeated, 2 * 84_934_656 + 4 * 12 * 768 * 1024);
        assert_eq!(of(Recompute::Selective).repeated * 3, 2 * 84_934_656);
    }
}
