//! Networks from the `model` section: GPT-2 (Radford et al. 2019), Llama (Touvron et al. 2023), Mixtral (Jiang et al. 2024),
//! and GPT-2 without attention, all from one description ([`Decoder`]).
//!
//! Names and shapes are those of published checkpoints, so these load without transposing: GPT-2's projections are
//! `[inputs, outputs]`, Llama's `[outputs, inputs]`, embeddings `[tokens or positions, channels]`. First values are GPT-2's
//! for all: normal with σ = 0.02, and 0.02/√(2·layers) where a projection ends in the residual stream.

use std::ops::Range;
use std::sync::Arc;

use super::decoder::{
    ActivationKind, Decoder, EXPERTS, HEAD, NormKind, PositionKind, ROUTER, SHARED_EXPERTS,
};
use super::experts::ExpertLayer;
use super::layers::{Dense, DropoutLayer, Norm, NormedDense};
use super::transformer::{Attention, Embedding, FeedForward, Head, SecondLayer, TransformerBlock};
use super::{AxisRole, Block, Cut, GroupId, Init, Model, ModelPart, ParamId, ParamSpec};
use crate::config::{self, Experts, Problem, Recompute, checked_vocab};
use crate::device::DType;
use crate::mesh::Axis;
use crate::ops::{LAYERNORM_EPSILON, WeightLayout};

const STD: f32 = 0.02;

/// Blocks of a model: the embedding, a block a layer, the head.
pub fn block_count(config: &config::Model) -> usize {
    config.n_layer + 2
}

/// The network that a `model` section describes. `vocab` is the number of tokens that the tokenizer makes;
/// `vocab_size`, where it is given, may be larger.
///
/// `mlp` is `gpt2` without attention and position embedding, with an untied head: every position sees itself only,
/// so its loss cannot fall below the entropy of a token, given the one before.
pub fn build(config: &config::Model, vocab: usize) -> Result<Model, Problem> {
    build_part(config, vocab, &ModelPart::WHOLE)
}

/// What a rank holds of the network that [`build`] makes. Keys and global shapes of its parameters are those of the whole.
pub fn build_part(config: &config::Model, vocab: usize, part: &ModelPart) -> Result<Model, Problem> {
    let vocab = checked_vocab(config, vocab, part.tensor.1)?;
    let decoder = Decoder::of(config);
    let (names, channels) = (decoder.names, decoder.channels);
    let ends = [0, block_count(config) - 1].map(|block| part.holds(block));
    let mut parts = Parts {
        part,
        decoder: &decoder,
        ends_apart: ends[0] != ends[1],
        all: Vec::new(),
        params: Vec::new(),
        groups: 0,
        blocks: Vec::new(),
        numbers: Vec::new(),
        count: 0,
        is_held: false,
    };

    let table = [vocab, channels];
    parts.block(|parts| {
        parts.begin_group();
        let tokens = parts.matrix(names.tokens, table, STD, ROWS);
        let positions = (decoder.position_kind == PositionKind::Learned).then(|| {
            parts.begin_group();
            parts.matrix(names.positions, [decoder.positions, channels], STD, None)
        });
        let (held, rate) = (vocab / part.tensor.1, decoder.dropout);
        Arc::new(Embedding::new(tokens, positions, held, channels, rate))
    });

    for layer in 0..decoder.layers {
        parts.block(|parts| Arc::new(parts.transformer_block(layer)));
    }

    parts.block(|parts| {
        parts.begin_group();
        let norm = parts.norm(names.final_norm);
        let projection = if decoder.is_tied {
            parts.tied(names.tokens)
        } else {
            parts.matrix(HEAD, table, STD, ROWS)
        };
        let dense = Dense {
            weight: projection,
            bias: None,
            inputs: channels,
            outputs: vocab / part.tensor.1,
            layout: WeightLayout::OutIn,
        };
        Arc::new(Head::new(NormedDense {
            norm,
            dense,
            normalised: "head normalised",
        }))
    });
    Ok(parts.into_model(format!("{} {} × {channels}", names.kind, decoder.layers)))
}

/// The dimension along which a tensor group divides a parameter, and the lengths of the stretches that are divided one
/// by one: no lengths stand for a single stretch. With `None` every rank holds the whole parameter.
type Along<'a> = Option<(usize, &'a [usize])>;

/// The rows are divided.
const ROWS: Along<'static> = Some((0, &[]));

/// What of a linear layer is cut over a tensor group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side<'a> {
    /// The outputs, in stretches of these lengths: each rank has some of every stretch.
    Outputs(&'a [usize]),
    /// The inputs: each rank has a part of every sum. Such a layer ends in the residual stream.
    Inputs,
}

/// What this rank holds so far, in forward order.
struct Parts<'a> {
    part: &'a ModelPart,
    decoder: &'a Decoder,
    /// First and last block are on different ranks.
    ends_apart: bool,
    /// Parameters of the whole model.
    all: Vec<ParamSpec>,
    /// Parameters that this rank holds.
    params: Vec<ParamSpec>,
    /// Groups that this rank holds so far.
    groups: usize,
    /// Blocks that this rank holds, by chunk.
    blocks: Vec<Arc<dyn Block>>,
    /// Indexed by the number of the parameter in the whole model.
    numbers: Vec<usize>,
    /// Blocks of the whole model so far.
    count: usize,
    /// This rank holds the block that is being made.
    is_held: bool,
}

/// Stands for a parameter that this rank does not hold. The block that uses it is dropped.
const ABSENT: ParamId = ParamId(usize::MAX);

impl Parts<'_> {
    fn block(&mut self, make: impl FnOnce(&mut Self) -> Arc<dyn Block>) {
        self.is_held = self.part.holds(self.count);
        let block = make(self);
        if self.is_held {
            self.blocks.push(block);
            self.numbers.push(self.count);
        }
        self.count += 1;
    }

    fn into_model(self, name: String) -> Model {
        let chunks = self.part.chunks.clone().unwrap_or_else(|| vec![0..self.count]);
        let position = |number: usize| self.numbers.partition_point(|&other| other < number);
        let chunk = |chunk: &Range<usize>| position(chunk.start)..position(chunk.end);
        Model {
            name,
            part: self.part.clone(),
            recompute: Recompute::Norms,
            holds_embedding: self.part.holds(0),
            holds_head: self.part.holds(self.count - 1),
            chunks: chunks.iter().map(chunk).collect(),
            params: self.params,
            all_params: self.all.into(),
            blocks: self.blocks,
        }
    }

    /// The parameters that follow are a group.
    fn begin_group(&mut self) {
        self.groups += usize::from(self.is_held);
    }

    fn matrix(&mut self, name: &str, shape: [usize; 2], std: f32, along: Along<'_>) -> ParamId {
        self.param(name.to_owned(), &shape, Init::Normal { std }, along)
    }

    /// Matrices decay, vectors (norms and biases) do not. The first of three dimensions counts experts.
    fn param(&mut self, key: String, shape: &[usize], init: Init, along: Along<'_>) -> ParamId {
        let mut roles = AxisRole::replicated();
        if shape.len() == 3 && self.part.experts.1 > 1 {
            for axis in [Axis::Expert, Axis::Context] {
                roles[axis as usize] = AxisRole::Cut;
            }
        }
        self.all.push(ParamSpec {
            key,
            global_shape: shape.to_vec(),
            cut: None,
            roles,
            dtype: DType::F32,
            init,
            decay: shape.len() > 1,
            group: self.group(),
            projections: match along {
                Some((dim, stretches)) if dim + 2 == shape.len() => stretches.to_vec(),
                _ => Vec::new(),
            },
        });
        if !self.is_held {
            return ABSENT;
        }
        let whole = &self.all[self.all.len() - 1];
        let mut roles = whole.roles;
        let cut = self.cut(shape, along);
        roles[Axis::Tensor as usize] = match (&cut, self.part.sequence && shape.len() == 1) {
            (Some(_), _) => AxisRole::Cut,
            (None, true) => AxisRole::PartialGradients,
            (None, false) => AxisRole::EqualGradients,
        };
        let spec = ParamSpec {
            cut,
            roles,
            ..whole.clone()
        };
        self.hold(spec)
    }

    fn hold(&mut self, spec: ParamSpec) -> ParamId {
        let id = ParamId(self.params.len());
        self.params.push(spec);
        id
    }

    /// This rank's part of a parameter; `None` if every rank holds all of it.
    fn cut(&self, shape: &[usize], along: Along<'_>) -> Option<Cut> {
        let (index, parts) = self.part.tensor;
        let is_split = shape.len() == 3 && self.part.experts.1 > 1;
        let (dim, stretches) = along.filter(|_| parts > 1 || is_split)?;
        let whole = [shape[dim]];
        let stretches = if stretches.is_empty() { &whole } else { stretches };
        let cut = Cut::new(shape, dim, stretches, index, parts);
        Some(if is_split {
            cut.of_experts(self.part.own_experts(shape[0]))
        } else {
            cut
        })
    }

    /// A parameter of an earlier block, used once more. Where that block is on another rank, this one holds a copy.
    fn tied(&mut self, key: &str) -> ParamId {
        let held = self.params.iter().position(|spec| spec.key == key);
        // Also where this rank holds the earlier block only.
        let held = held.map(|id| self.share(ParamId(id)));
        if !self.is_held {
            return ABSENT;
        }
        if let Some(id) = held {
            return id;
        }
        let whole = self.all.iter().find(|spec| spec.key == key);
        let whole = whole.expect("an earlier block has it").clone();
        self.begin_group();
        let cut = self.cut(&whole.global_shape, ROWS);
        let mut roles = whole.roles;
        if cut.is_some() {
            roles[Axis::Tensor as usize] = AxisRole::Cut;
        }
        let id = self.hold(ParamSpec {
            cut,
            roles,
            group: self.group(),
            ..whole
        });
        self.share(id)
    }

    /// That of the parameters that follow.
    fn group(&self) -> GroupId {
        GroupId(self.groups.saturating_sub(1))
    }

    /// Marks a parameter of the first and the last block. If these are on different ranks, each has a part of its gradient.
    fn share(&mut self, id: ParamId) -> ParamId {
        if self.ends_apart {
            self.params[id.0].roles[Axis::Pipeline as usize] = AxisRole::PartialGradients;
        }
        id
    }

    fn vector(&mut self, key: String, len: usize, value: f32, along: Along<'_>) -> ParamId {
        self.param(key, &[len], Init::Constant(value), along)
    }

    fn norm(&mut self, name: &str) -> Norm {
        let decoder = self.decoder;
        let mut vector = |what, value| {
            let key = format!("{name}.{what}");
            self.vector(key, decoder.channels, value, None)
        };
        let weight = vector("weight", 1.0);
        let (bias, epsilon) = match decoder.norm {
            NormKind::Layer => (Some(vector("bias", 0.0)), LAYERNORM_EPSILON),
            NormKind::Rms { epsilon } => (None, epsilon),
        };
        Norm {
            weight,
            bias,
            epsilon,
        }
    }

    /// A layer whose outputs are cut, or its inputs, whose bias is whole then.
    fn dense(&mut self, name: &str, [inputs, outputs]: [usize; 2], side: Side<'_>) -> Dense {
        let (decoder, parts) = (self.decoder, self.part.tensor.1);
        let (std, local) = match side {
            Side::Outputs(_) => (STD, [inputs, outputs / parts]),
            Side::Inputs => {
                let depth = 2.0 * decoder.layers as f32;
                (STD / depth.sqrt(), [inputs / parts, outputs])
            }
        };
        let (shape, inputs_dim) = match decoder.layout {
            WeightLayout::InOut => ([inputs, outputs], 0),
            WeightLayout::OutIn => ([outputs, inputs], 1),
        };
        let (along, bias) = match side {
            Side::Outputs(stretches) => (Some((1 - inputs_dim, stretches)), Some((0, stretches))),
            Side::Inputs => (Some((inputs_dim, &[][..])), None),
        };
        let key = |what: &str| format!("{name}.{what}");
        Dense {
            weight: self.matrix(&key("weight"), shape, std, along),
            bias: decoder
                .has_biases
                .then(|| self.vector(key("bias"), outputs, 0.0, bias)),
            inputs: local[0],
            outputs: local[1],
            layout: decoder.layout,
        }
    }

    /// The two products of a feed-forward layer of `inner` channels.
    fn feed_forward(&mut self, keys: [String; 2], inner: usize) -> [Dense; 2] {
        let (channels, halves) = (self.decoder.channels, [inner; 2]);
        let stretches = match self.decoder.activation {
            ActivationKind::Gelu => &halves[..1],
            ActivationKind::SwiGlu => &halves,
        };
        let widened = inner * stretches.len();
        let [widen, narrow] = keys;
        let cut = Side::Outputs(stretches);
        [
            self.dense(&widen, [channels, widened], cut),
            self.dense(&narrow, [inner, channels], Side::Inputs),
        ]
    }

    /// Experts in the place of a feed-forward layer. Their matrices are one parameter each.
    fn experts(&mut self, layer: usize, all: Experts) -> ExpertLayer {
        let (decoder, tensor) = (self.decoder, self.part.tensor.1);
        let (channels, inner) = (decoder.channels, decoder.inner);
        let key = |what: &str| format!("{}.{layer}.{what}", decoder.names.layer);
        let norm = self.norm(&key(decoder.names.feed_forward_norm));
        let mut matrix = |what: &str, shape: &[usize], std, along| {
            self.param(key(what) + ".weight", shape, Init::Normal { std }, along)
        };
        let router = matrix(ROUTER, &[all.count, channels], STD, None);
        let [widen, narrow] = EXPERTS;
        let into_stream = STD / (2.0 * decoder.layers as f32).sqrt();
        let rows = Some((1, &[inner; 2][..]));
        let widen = matrix(widen, &[all.count, 2 * inner, channels], STD, rows);
        let columns = Some((2, &[][..]));
        let narrow = matrix(narrow, &[all.count, channels, inner], into_stream, columns);
        if self.is_held && tensor > 1 {
            // Each rank has a part of the experts' outputs, and so of the gradients of their weights in the sum.
            self.params[router.0].roles[Axis::Tensor as usize] = AxisRole::PartialGradients;
        }
        let dense = |weight, inputs, outputs| Dense {
            weight,
            bias: None,
            inputs,
            outputs,
            layout: decoder.layout,
        };
        ExpertLayer {
            norm,
            router: dense(router, channels, all.count),
            widen: dense(widen, channels, 2 * inner / tensor),
            narrow: dense(narrow, inner / tensor, channels),
            shared: (all.shared > 0).then(|| self.feed_forward(SHARED_EXPERTS.map(key), all.shared * inner)),
            config: all,
            held: self.part.own_experts(all.count).len(),
            dropout: DropoutLayer {
                rate: decoder.dropout,
                layer: layer as u32,
            },
        }
    }

    fn transformer_block(&mut self, layer: usize) -> TransformerBlock {
        let decoder = self.decoder;
        let (names, channels) = (decoder.names, decoder.channels);
        let name = format!("{}.{layer}", names.layer);
        self.begin_group();
        let dropout = DropoutLayer {
            rate: decoder.dropout,
            layer: layer as u32,
        };
        let key = |what: &str| format!("{name}.{what}");
        let attention = decoder.attention.map(|kind| {
            let stretches = kind.stretches();
            let (fused, heads) = (stretches.iter().sum(), kind.heads * kind.head_size);
            let cut = Side::Outputs(&stretches);
            Attention {
                qkv: NormedDense {
                    norm: self.norm(&key(names.attention_norm)),
                    dense: self.dense(&key(names.qkv), [channels, fused], cut),
                    normalised: "attention normalised",
                },
                projection: self.dense(&key(names.attention_projection), [heads, channels], Side::Inputs),
                heads: kind.heads / self.part.tensor.1,
                kv_heads: kind.kv_heads / self.part.tensor.1,
                head_size: kind.head_size,
                positions: decoder.position_kind,
                dropout,
            }
        });
        let second: Box<dyn SecondLayer> = if let Some(all) = decoder.experts_of(layer) {
            Box::new(self.experts(layer, all))
        } else {
            let norm = self.norm(&key(names.feed_forward_norm));
            let keys = [key(names.widen), key(names.narrow)];
            let [widen, projection] = self.feed_forward(keys, decoder.inner);
            Box::new(FeedForward {
                widen: NormedDense {
                    norm,
                    dense: widen,
                    normalised: "feed-forward normalised",
                },
                projection,
                activation: decoder.activation,
                dropout,
            })
        };
        TransformerBlock::new(name, attention, second)
    }
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
            dropout: 0.0,
            ..config::Model::default()
        }
    }

    /// In how many blocks each parameter is used.
    fn uses(model: &Model) -> Vec<usize> {
        let in_blocks = |id| {
            model
                .blocks
                .iter()
                .filter(|block| block.params().contains(&id))
                .count()
        };
        (0..model.params.len()).map(ParamId).map(in_blocks).collect()
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
        let of_its_group = model
            .params
            .iter()
            .filter(|spec| spec.group == model.params[0].group);
        assert_eq!(of_its_group.count(), 1);
        assert_eq!(uses(&model)[0], 2);
        assert!(uses(&model)[1..].iter().all(|&uses| uses == 1));
        assert_eq!(model.backward_order().last(), Some(&ParamId(0)));
    }

    #[test]
    fn a_weight_that_two_stages_share_has_a_part_of_its_gradient_on_each() {
        let config = config(ModelKind::Gpt2);
        let last = block_count(&config);
        let role = |blocks: &[Range<usize>]| {
            let part = ModelPart {
                chunks: Some(blocks.to_vec()),
                ..ModelPart::WHOLE
            };
            let model = build_part(&config, 256, &part).unwrap();
            let tied = model.params.iter().find(|spec| spec.key == "wte.weight")?;
            Some(tied.roles[Axis::Pipeline as usize])
        };
        assert_eq!(role(&[0..3]), Some(AxisRole::PartialGradients));
        assert_eq!(role(&[3..6]), None);
        assert_eq!(role(&[6..last]), Some(AxisRole::PartialGradients));
        assert_eq!(role(&[0..3, 6..last]), Some(AxisRole::Cut));
    }

    #[test]
    fn every_parameter_is_in_a_block_and_groups_are_numbered_in_their_order() {
        for kind in [ModelKind::Gpt2, ModelKind::Mlp] {
            let model = build(&config(kind), 256).unwrap();
            let mut groups: Vec<usize> = model.params.iter().map(|spec| spec.group.0).collect();
            groups.dedup();
            assert_eq!(groups, (0..groups.len()).collect::<Vec<_>>());
            assert!(groups.len() > 12, "{groups:?}");
            assert!(!uses(&model).contains(&0));
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
        assert_eq!(heads.key, "model.n_embd");
        insta::assert_snapshot!(heads, @r"
        `model.n_embd` is 100, expected a multiple of `model.n_head`, which is 12
          hint: use 96 or 108, or a different number of heads
        ");
        let zero = error(config::Model {
            n_layer: 0,
            ..gpt2.clone()
        });
        insta::assert_snapshot!(zero, @"`model.n_layer` is 0, expected at least 1");
        let large = error(config::Model {
            n_embd: usize::MAX,
            ..gpt2.clone()
        });
        insta::assert_snapshot!(large, @"`model.n_embd` is 18446744073709551615, expected at most 131072");
        let rotary = error(config::Model {
            rope_scaling: Some(config::RopeScaling {
                factor: 8.0,
                low_freq_factor: 4.0,
                high_freq_factor: 4.0,
                original_positions: 8,
            }),
            ..config(ModelKind::Llama)
        });
        insta::assert_snapshot!(rotary, @r"
        `model.rope_scaling` is `{ factor: 8.0, low_freq_factor: 4.0, high_freq_factor: 4.0, original_positions: 8 }`
          hint: all numbers must be above 0, and `low_freq_factor` below `high_freq_factor`
        ");
    }
}
