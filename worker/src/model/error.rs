//! Models that cannot be.

/// A model section that describes no network. Each variant names the key of `train.yaml` that is to blame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// A size is zero.
    #[error("`model.{key}` is 0\n  hint: it must be at least 1")]
    Zero {
        /// Key within `model`.
        key: &'static str,
    },
    /// A size is beyond what this build addresses.
    #[error("`model.{key}` is {value}, more than {max}\n  hint: is there a digit too many?")]
    TooLarge {
        /// Key within `model`.
        key: &'static str,
        /// The value found.
        value: usize,
        /// The largest one taken.
        max: usize,
    },
    /// The channels cannot be shared out evenly among the heads.
    #[error(
        "`model.n_embd` ({n_embd}) is not divisible by `model.n_head` ({n_head})\n  hint: \
         use `n_embd: {suggestion}`, or another number of heads"
    )]
    HeadsDoNotDivide {
        /// Channels.
        n_embd: usize,
        /// Heads.
        n_head: usize,
        /// The next larger number of channels that works.
        suggestion: usize,
    },
    /// The tokenizer makes tokens that the model has no row for.
    #[error(
        "`model.vocab_size` ({vocab_size}) is smaller than the tokenizer's vocabulary ({tokenizer})\n  hint: \
         leave `vocab_size` out to take the tokenizer's"
    )]
    VocabTooSmall {
        /// The value found.
        vocab_size: usize,
        /// Tokens that the tokenizer makes.
        tokenizer: usize,
    },
}

impl ModelError {
    /// The key within the `model` section that is to blame, to find its line.
    #[must_use]
    pub const fn key(&self) -> &'static str {
        match self {
            Self::Zero { key } | Self::TooLarge { key, .. } => key,
            Self::HeadsDoNotDivide { .. } => "n_embd",
            Self::VocabTooSmall { .. } => "vocab_size",
        }
    }
}
