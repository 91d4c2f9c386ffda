//! Networks from the `model` section: GPT-2 (Radford et al. 2019), and the same without attention.
//!
//! Names and shapes are those of GPT-2's published checkpoints, so these load without transposing: projections
//! (`c_attn`, `c_proj`, `c_fc`) are `[inputs, outputs]`, embeddings `[tokens or positions, channels]`. First values
//! too: normal with σ = 0.02, and 0.02/√(2·layers) where a projection ends in the residual stream.

use std::sync::Arc;

use super::sublayer::DropoutLayer;
use super::sublayer::{Attention, Dense, FeedForward, Norm};
use super::transformer::Embedding;
use super::transformer::Head;
use super::transformer::TransformerBlock;
use super::{AxisRole, Block, GroupId, Init, Model, ParamGroup, ParamId, ParamSpec};
use crate::config::{self, Recompute};
use crate::device::DType;
use crate::ops::WeightLayout;

const STD: f32 = 0.02;
/// Width of a feed-forward layer, in channels.
const EXPANSION: usize = 4;

/// The network that a `model` section describes. `vocab` is the number of tokens that the tokenizer makes;
/// `vocab_size`, where it is given, may be larger.
///
/// `mlp` is `gpt2` without attention and position embedding, with an untied head: every position sees itself only,
/// so its loss cannot fall below the bigram entropy of the text.
pub fn build(config: &config::Model, vocab: usize) -> Result<Model, ModelError> {
    let sizes = Sizes::new(config, vocab)?;
    let (kind, attention) = match config.kind {
        config::ModelKind::Gpt2 => ("gpt2", true),
        config::ModelKind::Mlp => ("mlp", false),
    };
    let mut parts = Parts::default();
    let mut blocks: Vec<Arc<dyn Block>> = Vec::with_capacity(sizes.layers + 2);

    let table = [sizes.vocab, sizes.channels];
    let token_group = parts.group("wte");
    let wte = parts.matrix(token_group, "wte.weight", table, STD);
    let wpe = attention.then(|| {
        let group = parts.group("wpe");
        parts.matrix(group, "wpe.weight", [sizes.positions, sizes.channels], STD)
    });
    blocks.push(Arc::new(Embedding::new(wte, wpe, sizes.channels, sizes.dropout)));

    for layer in 0..sizes.layers {
        blocks.push(Arc::new(parts.transformer_block(&sizes, layer, attention)));
    }

    let group = parts.group("head");
    let norm = parts.norm(group, "ln_f", sizes.channels);
    let projection = if attention {
        wte
    } else {
        parts.matrix(group, "lm_head.weight", table, STD)
    };
    blocks.push(Arc::new(Head::new(norm, projection, sizes.vocab)));

    Ok(Model {
        name: format!("{kind} {} × {}", sizes.layers, sizes.channels),
        params: parts.params,
        groups: parts.groups,
        keeps_input: vec![false; blocks.len()],
        blocks,
    })
}

/// Sizes that fit each other.
struct Sizes {
    layers: usize,
    heads: usize,
    channels: usize,
    positions: usize,
    vocab: usize,
    dropout: f32,
}

impl Sizes {
    fn new(config: &config::Model, tokenizer: usize) -> Result<Self, ModelError> {
        let vocab = config.vocab_size.unwrap_or(tokenizer);
        let bounds = [
            ("n_layer", config.n_layer, 1 << 12),
            ("n_head", config.n_head, 1 << 12),
            ("n_embd", config.n_embd, 1 << 17),
            ("block_size", config.block_size, 1 << 20),
            ("vocab_size", vocab, 1 << 22),
        ];
        for (key, value, max) in bounds {
            if value == 0 {
                return Err(ModelError::Zero { key });
            }
            if value > max {
                return Err(ModelError::TooLarge { key, value, max });
            }
        }
        let (n_embd, n_head) = (config.n_embd, config.n_head);
        if !n_embd.is_multiple_of(n_head) {
            let suggestion = n_embd.next_multiple_of(n_head);
            return Err(ModelError::HeadsDoNotDivide {
                n_embd,
                n_head,
                suggestion,
            });
        }
        if vocab < tokenizer {
            return Err(ModelError::VocabTooSmall {
                vocab_size: vocab,
                tokenizer,
            });
        }
        Ok(Self {
            layers: config.n_layer,
            heads: n_head,
            channels: n_embd,
            positions: config.block_size,
            vocab,
            dropout: config.dropout,
        })
    }
}

/// Parameters and groups so far, in forward order.
#[derive(Default)]
struct Parts {
    params: Vec<ParamSpec>,
    groups: Vec<ParamGroup>,
}

impl Parts {
    fn group(&mut self, name: impl Into<String>) -> GroupId {
        self.groups.push(ParamGroup {
            name: name.into(),
            params: Vec::new(),
        });
        GroupId(self.groups.len() - 1)
    }

    fn matrix(&mut self, group: GroupId, name: &str, shape: [usize; 2], std: f32) -> ParamId {
        self.param(group, name.to_owned(), shape.to_vec(), Init::Normal { std })
    }

    /// Matrices decay, vectors (norms and biases) do not.
    fn param(&mut self, group: GroupId, key: String, shape: Vec<usize>, init: Init) -> ParamId {
        let id = ParamId(self.params.len());
        let decay = shape.len() > 1;
        self.params.push(ParamSpec {
            key,
            global_shape: shape,
            cut: None,
            roles: AxisRole::replicated(),
            dtype: DType::F32,
            init,
            decay,
            group,
        });
        self.groups[group.0].params.push(id);
        id
    }

    fn norm(&mut self, group: GroupId, name: &str, channels: usize) -> Norm {
        Norm {
            weight: self.param(
                group,
                format!("{name}.weight"),
                vec![channels],
                Init::Constant(1.0),
            ),
            bias: self.param(group, format!("{name}.bias"), vec![channels], Init::Constant(0.0)),
        }
    }

    fn dense(&mut self, group: GroupId, name: &str, [inputs, outputs]: [usize; 2], std: f32) -> Dense {
        Dense {
            weight: self.matrix(group, &format!("{name}.weight"), [inputs, outputs], std),
            bias: self.param(group, format!("{name}.bias"), vec![outputs], Init::Constant(0.0)),
            inputs,
            outputs,
            layout: WeightLayout::InOut,
        }
    }

    fn transformer_block(&mut self, sizes: &Sizes, layer: usize, attention: bool) -> TransformerBlock {
        let (name, c) = (format!("h.{layer}"), sizes.channels);
        let group = self.group(name.clone());
        let dropout = DropoutLayer {
            rate: sizes.dropout,
            layer: layer as u32,
        };
        let into_stream = STD / (2.0 * sizes.layers as f32).sqrt();
        let attention = attention.then(|| Attention {
            norm: self.norm(group, &format!("{name}.ln_1"), c),
            qkv: self.dense(group, &format!("{name}.attn.c_attn"), [c, 3 * c], STD),
            projection: self.dense(group, &format!("{name}.attn.c_proj"), [c, c], into_stream),
            heads: sizes.heads,
            dropout,
        });
        let feed_forward = FeedForward {
            norm: self.norm(group, &format!("{name}.ln_2"), c),
            widen: self.dense(group, &format!("{name}.mlp.c_fc"), [c, EXPANSION * c], STD),
            projection: self.dense(
                group,
                &format!("{name}.mlp.c_proj"),
                [EXPANSION * c, c],
                into_stream,
            ),
            keeps_wide: true,
            dropout,
        };
        TransformerBlock::new(name, attention, feed_forward)
    }
}

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

/// The same model, which keeps less for backward: memory of activations for arithmetic (Chen et al. 2016; Korthikanti et
/// al. 2022).
///
/// A transformer block of C channels keeps 10·C numbers a position for its backward, and one a head. What is computed
/// element by element (normalisations, the output of the GELU) is never kept.
///
/// | `train.recompute` | kept, numbers a position | computed again |
/// |---|---|---|
/// | `none` | 10·C + heads | nothing |
/// | `selective` | 6·C + heads | the widened half of the feed-forward layer: a third of the block's products |
/// | `full` | C, the block's input | all of the block but its last product, whose output is not read |
///
/// `selective` gives up the largest thing that a block keeps, for one product that needs nothing but the layer's
/// input. Attention keeps what it has: per byte it is the more expensive part, since its core grows with the square of
/// the positions. The last block is left alone by `full`: its backward comes next, so nothing would be freed.
///
/// The same operations run on the same numbers, and dropout makes its masks again from the samples' numbers, so losses
/// and gradients have the same bits.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ModelKind;

    fn config(kind: ModelKind) -> config::Model {
        config::Model {
            kind,
            n_layer: 12,
            n_head: 12,
            n_embd: 768,
            block_size: 1024,
            vocab_size: None,
            init_from: None,
            dropout: 0.0,
        }
    }

    #[test]
    fn gpt2_has_the_published_size() {
        let model = build(&config(ModelKind::Gpt2), 50_257).unwrap();
        assert_eq!(model.param_count(), 124_439_808);
        assert_eq!(model.blocks.len(), 14);
        let find = |name: &str| model.params.iter().find(|p| p.key == name).unwrap();
        assert_eq!(find("h.11.attn.c_attn.weight").global_shape, [768, 2304]);
        assert_eq!(find("h.0.mlp.c_proj.weight").global_shape, [3072, 768]);
        assert_eq!(find("wpe.weight").global_shape, [1024, 768]);
        assert!(!find("h.3.ln_2.bias").decay && find("wte.weight").decay);
    }

    #[test]
    fn the_tied_weight_is_a_group_of_its_own_and_ready_last() {
        let model = build(&config(ModelKind::Gpt2), 256).unwrap();
        assert_eq!(model.groups[0].params, [ParamId(0)]);
        assert_eq!(model.uses()[0], 2);
        assert!(model.uses()[1..].iter().all(|&uses| uses == 1));
        assert_eq!(model.backward_order().last(), Some(&ParamId(0)));
    }

    #[test]
    fn every_parameter_is_in_one_group_and_in_a_block() {
        for kind in [ModelKind::Gpt2, ModelKind::Mlp] {
            let model = build(&config(kind), 256).unwrap();
            let mut grouped: Vec<ParamId> = model.groups.iter().flat_map(|g| g.params.clone()).collect();
            grouped.sort();
            assert_eq!(grouped, (0..model.params.len()).map(ParamId).collect::<Vec<_>>());
            for (i, group) in model.groups.iter().enumerate() {
                assert!(
                    group
                        .params
                        .iter()
                        .all(|id| model.params[id.0].group == GroupId(i))
                );
            }
            assert!(!model.uses().contains(&0));
        }
    }

    #[test]
    fn bad_sizes_are_named() {
        let gpt2 = config(ModelKind::Gpt2);
        let error = |config: config::Model| build(&config, 256).err().unwrap();
        let heads = error(config::Model {
            n_embd: 100,
            n_head: 12,
            ..gpt2.clone()
        });
        assert_eq!(heads.key(), "n_embd");
        insta::assert_snapshot!(heads, @r"
        `model.n_embd` (100) is not divisible by `model.n_head` (12)
          hint: use `n_embd: 108`, or another number of heads
        ");
        let zero = error(config::Model {
            n_layer: 0,
            ..gpt2.clone()
        });
        insta::assert_snapshot!(zero, @r"
        `model.n_layer` is 0
          hint: it must be at least 1
        ");
        let large = error(config::Model {
            n_embd: usize::MAX,
            ..gpt2.clone()
        });
        insta::assert_snapshot!(large, @r"
        `model.n_embd` is 18446744073709551615, more than 131072
          hint: is there a digit too many?
        ");
        let vocab = error(config::Model {
            vocab_size: Some(100),
            ..gpt2
        });
        insta::assert_snapshot!(vocab, @r"
        `model.vocab_size` (100) is smaller than the tokenizer's vocabulary (256)
          hint: leave `vocab_size` out to take the tokenizer's
        ");
    }
}
