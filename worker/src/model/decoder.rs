//! A decoder as data: what GPT-2, Llama and the network without attention differ in. One description builds them all, and
//! counts their arithmetic.

use std::ops::Range;

use crate::config::{self, Experts, ModelKind, RopeScaling};
use crate::ops::WeightLayout;

/// A decoder-only transformer: an embedding, layers of attention and feed-forward around a residual stream, a head.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoder {
    /// Layers.
    pub layers: usize,
    /// Channels `C` of the residual stream.
    pub channels: usize,
    /// Most positions of a sample.
    pub positions: usize,
    /// None: every position sees itself only.
    pub attention: Option<AttentionKind>,
    /// How a token's position comes in.
    pub position_kind: PositionKind,
    /// Before attention, before feed-forward, before the head.
    pub norm: NormKind,
    /// Width of the feed-forward layers.
    pub inner: usize,
    /// Between the two products of a feed-forward layer.
    pub activation: ActivationKind,
    /// What takes the place of feed-forward layers.
    pub experts: Option<Experts>,
    /// Linear layers add a bias.
    pub has_biases: bool,
    /// The head's matrix is the token embedding.
    pub is_tied: bool,
    /// Layout of the layers' matrices.
    pub layout: WeightLayout,
    /// Share of what is dropped in training.
    pub dropout: f32,
    /// Names of parameters.
    pub names: &'static Names,
}

/// Sizes of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionKind {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_size: usize,
}

impl AttentionKind {
    /// Columns of queries, keys and values in the fused projection.
    pub fn stretches(&self) -> [usize; 3] {
        let of = |heads: usize| heads * self.head_size;
        [of(self.heads), of(self.kv_heads), of(self.kv_heads)]
    }
}

/// Positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PositionKind {
    /// They make no difference.
    None,
    /// A vector a position, added to the token's.
    Learned,
    /// Queries and keys are rotated by angles that grow with the position (Su et al. 2021).
    Rotary {
        /// Base of the angles.
        theta: f64,
        /// See [`RopeScaling`].
        scaling: Option<RopeScaling>,
    },
}

/// Normalisation of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NormKind {
    /// Mean 0, variance 1, weight and bias (Ba et al. 2016).
    Layer,
    /// Mean square 1, weight (Zhang & Sennrich 2019); what is added to the mean square.
    Rms {
        /// ε
        epsilon: f64,
    },
}

/// Function between the products of a feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationKind {
    /// GELU in its tanh form (Hendrycks & Gimpel 2016).
    Gelu,
    /// silu(gate) · up, from one product of twice the width (Shazeer 2020).
    SwiGlu,
}

/// Names of parameters; those of a layer follow its prefix and number.
#[derive(Debug, PartialEq, Eq)]
pub struct Names {
    /// For people: `gpt2`.
    pub kind: &'static str,
    /// Token embedding.
    pub tokens: &'static str,
    /// Position embedding.
    pub positions: &'static str,
    /// Before the number of a layer.
    pub layer: &'static str,
    /// Norm before attention.
    pub attention_norm: &'static str,
    /// Queries, keys and values in one.
    pub qkv: &'static str,
    /// From the heads to the residual stream.
    pub attention_projection: &'static str,
    /// Norm before feed-forward.
    pub feed_forward_norm: &'static str,
    /// To the inner width; with SwiGLU gate and up in one.
    pub widen: &'static str,
    /// From the inner width to the residual stream.
    pub narrow: &'static str,
    /// Norm before the head.
    pub final_norm: &'static str,
}

impl Names {
    /// Those of a kind.
    pub fn of(kind: ModelKind) -> &'static Self {
        match kind {
            ModelKind::Gpt2 => &GPT2,
            ModelKind::Llama => &LLAMA,
            ModelKind::Mlp => &MLP,
            ModelKind::Mixtral => &MIXTRAL,
        }
    }

    /// True of a parameter of a layer, of any kind of model.
    pub fn are_of_a_layer(key: &str) -> bool {
        [&GPT2, &LLAMA, &MLP]
            .iter()
            .any(|names| names.layer_of(key).is_some())
    }

    /// Which layer a tensor is of, by its name, and the rest of the name: 3 and `mlp.down_proj.weight`.
    pub fn layer_of<'a>(&self, tensor: &'a str) -> Option<(usize, &'a str)> {
        let (number, rest) = tensor
            .strip_prefix(self.layer)?
            .strip_prefix('.')?
            .split_once('.')?;
        Some((number.parse().ok()?, rest))
    }
}

/// The head's matrix, where it is not tied.
pub const HEAD: &str = "lm_head.weight";

/// Of a layer with experts: its router; gate and up of each expert in one, and what narrows them; the same of shared experts.
pub const ROUTER: &str = "block_sparse_moe.gate";
pub(super) const EXPERTS: [&str; 2] = [
    "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.experts.down_proj",
];
pub(super) const SHARED_EXPERTS: [&str; 2] = [
    "block_sparse_moe.shared_experts.gate_up_proj",
    "block_sparse_moe.shared_experts.down_proj",
];

static MLP: Names = Names { kind: "mlp", ..GPT2 };

/// The names in GPT-2's published checkpoints.
const GPT2: Names = Names {
    kind: "gpt2",
    tokens: "wte.weight",
    positions: "wpe.weight",
    layer: "h",
    attention_norm: "ln_1",
    qkv: "attn.c_attn",
    attention_projection: "attn.c_proj",
    feed_forward_norm: "ln_2",
    widen: "mlp.c_fc",
    narrow: "mlp.c_proj",
    final_norm: "ln_f",
};

static MIXTRAL: Names = Names {
    kind: "mixtral",
    ..LLAMA
};

/// The names in Hugging Face's Llama, with queries, keys and values in one matrix, and gate and up in one, one after the other.
const LLAMA: Names = Names {
    kind: "llama",
    tokens: "model.embed_tokens.weight",
    positions: "",
    layer: "model.layers",
    attention_norm: "input_layernorm",
    qkv: "self_attn.qkv_proj",
    attention_projection: "self_attn.o_proj",
    feed_forward_norm: "post_attention_layernorm",
    widen: "mlp.gate_up_proj",
    narrow: "mlp.down_proj",
    final_norm: "model.norm",
};

impl Decoder {
    /// The one that a `model` section describes.
    pub fn of(config: &config::Model) -> Self {
        let heads = AttentionKind {
            heads: config.n_head,
            kv_heads: config.kv_heads(),
            head_size: config.n_embd / config.n_head,
        };
        let gpt2 = Self {
            layers: config.n_layer,
            channels: config.n_embd,
            positions: config.block_size,
            attention: Some(heads),
            position_kind: PositionKind::Learned,
            norm: NormKind::Layer,
            inner: config.inner(),
            activation: ActivationKind::Gelu,
            experts: None,
            has_biases: true,
            is_tied: config.is_tied(),
            layout: WeightLayout::InOut,
            dropout: config.dropout,
            names: Names::of(config.kind),
        };
        match config.kind {
            ModelKind::Gpt2 => gpt2,
            ModelKind::Mlp => Self {
                attention: None,
                position_kind: PositionKind::None,
                ..gpt2
            },
            ModelKind::Llama | ModelKind::Mixtral => Self {
                experts: (config.kind == ModelKind::Mixtral).then_some(config.experts),
                position_kind: PositionKind::Rotary {
                    theta: config.rope_theta,
                    scaling: config.rope_scaling,
                },
                norm: NormKind::Rms {
                    epsilon: config.norm_eps,
                },
                activation: ActivationKind::SwiGlu,
                has_biases: false,
                layout: WeightLayout::OutIn,
                ..gpt2
            },
        }
    }

    /// Columns of the first product of a feed-forward layer.
    pub fn widened(&self) -> usize {
        match self.activation {
            ActivationKind::Gelu => self.inner,
            ActivationKind::SwiGlu => 2 * self.inner,
        }
    }

    /// The experts of a layer, counted from 0.
    pub fn experts_of(&self, layer: usize) -> Option<Experts> {
        self.experts
            .filter(|experts| (layer + 1).is_multiple_of(experts.every))
    }

    /// How many of some layers have experts.
    pub fn expert_layers(&self, layers: Range<usize>) -> usize {
        layers.filter(|&layer| self.experts_of(layer).is_some()).count()
    }

    /// Elements of the matrices of a layer that a token passes: of attention's two products, of the feed-forward layer's, and
    /// the router.
    pub fn layer_matrices(&self, layer: usize) -> [usize; 5] {
        let [qkv, projection] = self.attention.map_or([0, 0], |attention| {
            let [queries, keys, values] = attention.stretches();
            [queries + keys + values, queries]
        });
        let experts = self.experts_of(layer);
        let [passed, router] = experts.map_or([1, 0], |all| [all.top_k + all.shared, all.count]);
        let [widen, narrow] = [self.widened(), self.inner].map(|width| passed * width);
        [qkv, projection, widen, narrow, router].map(|width| width * self.channels)
    }
}
