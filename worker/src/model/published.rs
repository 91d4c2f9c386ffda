//! How models are published: Hugging Face's names of tensors, and the words of its `config.json`, as a table for each kind.
//! What reads such files and what writes them goes by the same table.

use std::fmt;
use std::ops::Range;

use serde_json::{Map, Value, json};

use super::decoder::{Decoder, EXPERTS, HEAD, Names, NormKind, PositionKind};
use crate::config::{self, ModelKind, RopeScaling, RouterScore};
use crate::ops::LAYERNORM_EPSILON;

/// One kind of model as it is published.
#[derive(Debug)]
pub struct Published {
    /// Which kind.
    pub kind: ModelKind,
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// The class of transformers that loads it; none: it knows no such model.
    pub architecture: Option<&'static str>,
    /// Before every name but the head's. Some tools write it, some do not.
    pub prefix: &'static str,
    /// Parameters that are several tensors there.
    pub fused: &'static [FusedTensors],
    /// What older tools saved of a layer that is no parameter.
    pub buffers: &'static [&'static str],
    /// Sizes. The defaults of later ones follow from earlier ones.
    pub sizes: &'static [SizeSetting],
    /// What no key of the `model` section changes.
    pub fixed: &'static [(&'static str, FixedSetting)],
    /// Keys with the number of positions.
    pub positions: &'static [&'static str],
    /// Keys with the rate of dropout.
    pub dropout: &'static [&'static str],
}

/// A parameter of a layer whose rows are those of several tensors, one after the other; of experts those of each, with its
/// number for `{}`.
#[derive(Debug)]
pub struct FusedTensors {
    /// Its name within the layer, without `.weight`.
    pub parameter: &'static str,
    /// The tensors' names within the layer, without `.weight`.
    pub tensors: &'static [&'static str],
    /// Rows of each.
    pub rows: fn(&Decoder) -> Vec<usize>,
}

/// A size in `config.json`: its key there, the size, and its default, a multiple of the size under another key.
pub type SizeSetting = (&'static str, Size, Option<(usize, &'static str)>);

/// A setting that is the same in every model that this build trains.
#[derive(Debug)]
pub enum FixedSetting {
    /// One of some words that mean the same. The first is written.
    Word(&'static [&'static str]),
    /// A number.
    Number(f64),
    /// True or false.
    Flag(bool),
    /// None.
    Null,
}

/// A published tensor: rows of a parameter, or all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedTensor {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Elements of the parameter.
    pub elements: Range<usize>,
}

/// A size of a model, by its key in the `model` section.
#[derive(Clone, Copy, Debug)]
pub enum Size {
    /// `n_layer`
    Layers,
    /// `n_embd`
    Channels,
    /// `n_head`
    Heads,
    /// `n_kv_head`
    KvHeads,
    /// `n_inner`
    Inner,
    /// `experts.count`
    Experts,
    /// `experts.top_k`
    TopK,
}

impl Size {
    /// The size of a model, or its default.
    fn of(self, model: &config::Model) -> usize {
        match self {
            Self::Layers => model.n_layer,
            Self::Channels => model.n_embd,
            Self::Heads => model.n_head,
            Self::KvHeads => model.kv_heads(),
            Self::Inner => model.inner(),
            Self::Experts => model.experts.count,
            Self::TopK => model.experts.top_k,
        }
    }

    /// Changes the size of a model.
    pub fn set(self, model: &mut config::Model, size: usize) {
        match self {
            Self::Layers => model.n_layer = size,
            Self::Channels => model.n_embd = size,
            Self::Heads => model.n_head = size,
            Self::KvHeads => model.n_kv_head = Some(size),
            Self::Inner => model.n_inner = Some(size),
            Self::Experts => model.experts.count = size,
            Self::TopK => model.experts.top_k = size,
        }
    }
}

const GPT2: Published = Published {
    kind: ModelKind::Gpt2,
    model_type: "gpt2",
    architecture: Some("GPT2LMHeadModel"),
    prefix: "transformer.",
    fused: &[],
    // The causal masks of attention.
    buffers: &["attn.bias", "attn.masked_bias"],
    sizes: &[
        ("n_layer", Size::Layers, None),
        ("n_embd", Size::Channels, None),
        ("n_head", Size::Heads, None),
        ("n_inner", Size::Inner, Some((4, "n_embd"))),
    ],
    fixed: &[
        (
            "activation_function",
            FixedSetting::Word(&["gelu_new", "gelu_pytorch_tanh"]),
        ),
        ("layer_norm_epsilon", FixedSetting::Number(LAYERNORM_EPSILON)),
        ("scale_attn_weights", FixedSetting::Flag(true)),
        ("scale_attn_by_inverse_layer_idx", FixedSetting::Flag(false)),
    ],
    positions: &["n_positions", "n_ctx"],
    dropout: &["attn_pdrop", "embd_pdrop", "resid_pdrop"],
};

/// Ours alone: names and words are GPT-2's.
static MLP: Published = Published {
    kind: ModelKind::Mlp,
    model_type: "mlp",
    architecture: None,
    sizes: &[
        ("n_layer", Size::Layers, None),
        ("n_embd", Size::Channels, None),
        ("n_inner", Size::Inner, Some((4, "n_embd"))),
    ],
    ..GPT2
};

const LLAMA: Published = Published {
    kind: ModelKind::Llama,
    model_type: "llama",
    architecture: Some("LlamaForCausalLM"),
    prefix: "model.",
    fused: &[QKV, GATE_UP],
    // The frequencies of the angles.
    buffers: &["self_attn.rotary_emb.inv_freq"],
    sizes: LLAMA_SIZES.split_at(5).0,
    fixed: &[
        ("hidden_act", FixedSetting::Word(&["silu", "swish"])),
        ("attention_bias", FixedSetting::Flag(false)),
        ("mlp_bias", FixedSetting::Flag(false)),
    ],
    positions: &["max_position_embeddings"],
    dropout: &["attention_dropout"],
};

/// Of Mixtral all, of Llama the first five.
const LLAMA_SIZES: &[SizeSetting] = &[
    ("num_hidden_layers", Size::Layers, None),
    ("hidden_size", Size::Channels, None),
    ("num_attention_heads", Size::Heads, None),
    (
        "num_key_value_heads",
        Size::KvHeads,
        Some((1, "num_attention_heads")),
    ),
    ("intermediate_size", Size::Inner, None),
    ("num_local_experts", Size::Experts, None),
    ("num_experts_per_tok", Size::TopK, None),
];

const QKV: FusedTensors = FusedTensors {
    parameter: "self_attn.qkv_proj",
    tensors: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    rows: |decoder| {
        decoder
            .attention
            .map_or(Vec::new(), |attention| attention.stretches().to_vec())
    },
};

const GATE_UP: FusedTensors = FusedTensors {
    parameter: "mlp.gate_up_proj",
    tensors: &["mlp.gate_proj", "mlp.up_proj"],
    rows: |decoder| vec![decoder.inner; 2],
};

static MIXTRAL: Published = Published {
    kind: ModelKind::Mixtral,
    model_type: "mixtral",
    architecture: Some("MixtralForCausalLM"),
    fused: &[
        QKV,
        GATE_UP,
        FusedTensors {
            parameter: EXPERTS[0],
            tensors: &["block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"],
            rows: GATE_UP.rows,
        },
        FusedTensors {
            parameter: EXPERTS[1],
            tensors: &["block_sparse_moe.experts.{}.w2"],
            rows: |decoder| vec![decoder.channels],
        },
    ],
    sizes: LLAMA_SIZES,
    fixed: &[
        ("hidden_act", FixedSetting::Word(&["silu", "swish"])),
        ("sliding_window", FixedSetting::Null),
    ],
    ..LLAMA
};

impl Published {
    /// ε of an RMS norm, and what transformers takes where it is left out.
    pub const EPSILON: (&'static str, f64) = ("rms_norm_eps", 1e-6);
    /// Base of the angles of rotary positions, and what transformers takes where it is left out.
    pub const THETA: (&'static str, f64) = ("rope_theta", 10_000.0);
    /// How rotary positions are scaled; newer versions write the second, with `rope_theta` in it.
    pub const SCALING: [&'static str; 2] = ["rope_scaling", "rope_parameters"];
    /// The keys of [`RopeScaling`], in the order of its fields.
    pub const SCALING_KEYS: [&'static str; 4] = [
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ];
    /// Whether the head is the token embedding.
    pub const TIED: &'static str = "tie_word_embeddings";
    /// Channels of a head.
    pub const HEAD_SIZE: &'static str = "head_dim";
    /// Before the `model_type` of a model that transformers would load as another one: it refuses a type that it does not
    /// know.
    pub const OWN: &'static str = "ddp_run_";
    /// How the router's numbers become scores. Transformers' Mixtral knows softmax only.
    pub const SCORE: &'static str = "scoring_func";

    /// The table of a kind.
    pub fn of(kind: ModelKind) -> &'static Self {
        match kind {
            ModelKind::Gpt2 => &GPT2,
            ModelKind::Llama => &LLAMA,
            ModelKind::Mlp => &MLP,
            ModelKind::Mixtral => &MIXTRAL,
        }
    }

    /// The table with this `model_type`.
    pub fn of_type(model_type: &str) -> Option<&'static Self> {
        let model_type = model_type.strip_prefix(Self::OWN).unwrap_or(model_type);
        [&GPT2, &LLAMA, &MLP, &MIXTRAL]
            .into_iter()
            .find(|published| published.model_type == model_type)
    }

    /// Names of the parameters.
    pub fn names(&self) -> &'static Names {
        Names::of(self.kind)
    }

    /// The tensors that make up the parameter with this key and this shape, in the order of its rows.
    pub fn tensors(&self, decoder: &Decoder, key: &str, shape: &[usize]) -> Vec<PublishedTensor> {
        let part = self.names().layer_of(key).and_then(|(layer, part)| {
            let name = part.strip_suffix(".weight")?;
            let fused = self.fused.iter().find(|fused| fused.parameter == name)?;
            Some((layer, fused))
        });
        let Some((layer, fused)) = part else {
            return vec![PublishedTensor {
                name: key.to_owned(),
                shape: shape.to_vec(),
                elements: 0..shape.iter().product(),
            }];
        };
        let (experts, matrix) = shape.split_at(shape.len().saturating_sub(2));
        let columns: usize = matrix[1..].iter().product();
        let (mut tensors, mut start) = (Vec::new(), 0);
        for expert in 0..experts.iter().product::<usize>() {
            for (tensor, rows) in fused.tensors.iter().zip((fused.rows)(decoder)) {
                let tensor = tensor.replace("{}", &expert.to_string());
                let elements = start..start + rows * columns;
                start = elements.end;
                tensors.push(PublishedTensor {
                    name: format!("{}.{layer}.{tensor}.weight", self.names().layer),
                    shape: [&[rows][..], &matrix[1..]].concat(),
                    elements,
                });
            }
        }
        tensors
    }

    /// The class of transformers that loads a model; none: it knows no such model.
    fn class(&self, decoder: &Decoder) -> Option<&'static str> {
        let is_published = decoder.experts.is_none_or(|experts| {
            (experts.every, experts.shared, experts.score) == (1, 0, RouterScore::Softmax)
                && experts.top_k > 1
        });
        self.architecture.filter(|_| is_published)
    }

    /// Why the published form of a model computes something else, if it does.
    pub fn contradiction(model: &config::Model) -> Option<&'static str> {
        (model.kind == ModelKind::Mixtral && model.experts.top_k == 1).then_some(
            "with `experts.top_k: 1`, the weight of an expert is its score here, and always 1 in transformers' Mixtral",
        )
    }

    /// A tensor's name in a file for other tools. Transformers takes a file without the prefix for one without a head,
    /// so only such a file leaves it out.
    pub fn name_in_file(&self, name: &str, decoder: &Decoder) -> String {
        let is_known = self.class(decoder).is_some();
        if decoder.is_tied || !is_known || name == HEAD || name.starts_with(self.prefix) {
            name.to_owned()
        } else {
            format!("{}{name}", self.prefix)
        }
    }

    /// The `config.json` of a model whose token embedding has `vocab` rows. Where the words of transformers have changed,
    /// these are the older ones, which all versions read.
    pub fn settings(&self, model: &config::Model, vocab: usize, end_of_text: Option<u32>) -> Value {
        let decoder = Decoder::of(model);
        let mut settings = Map::new();
        let mut set = |key: &str, value: Value| {
            settings.insert(key.to_owned(), value);
        };
        if let Some(architecture) = self.class(&decoder) {
            set("architectures", json!([architecture]));
        }
        let model_type = match (self.architecture, self.class(&decoder)) {
            (Some(_), None) => format!("{}{}", Self::OWN, self.model_type),
            _ => self.model_type.to_owned(),
        };
        set("model_type", model_type.into());
        set("torch_dtype", "float32".into());
        set("vocab_size", vocab.into());
        set(Self::TIED, decoder.is_tied.into());
        for (key, size, _) in self.sizes {
            set(key, size.of(model).into());
        }
        for (key, value) in self.fixed {
            set(key, value.json());
        }
        for key in self.positions {
            set(key, model.block_size.into());
        }
        for key in self.dropout {
            set(key, decimal(model.dropout));
        }
        // Where they are left out, transformers takes those of its own vocabulary.
        for key in ["bos_token_id", "eos_token_id"] {
            set(key, json!(end_of_text));
        }
        if let NormKind::Rms { epsilon } = decoder.norm {
            set(Self::EPSILON.0, epsilon.into());
        }
        if let PositionKind::Rotary { theta, scaling } = decoder.position_kind {
            set(Self::THETA.0, theta.into());
            set(Self::SCALING[0], scaling.map_or(Value::Null, scaling_json));
            let head_size = decoder.attention.map(|attention| attention.head_size);
            set(Self::HEAD_SIZE, json!(head_size));
        }
        if let Some(experts) = decoder.experts.filter(|all| all.score != RouterScore::Softmax) {
            set(Self::SCORE, json!(experts.score));
        }
        settings.into()
    }
}

fn scaling_json(scaling: RopeScaling) -> Value {
    let [factor, low, high, positions] = Published::SCALING_KEYS;
    json!({
        "rope_type": "llama3",
        factor: scaling.factor,
        low: scaling.low_freq_factor,
        high: scaling.high_freq_factor,
        positions: scaling.original_positions,
    })
}

/// The shortest number that is this one in 32 bits.
fn decimal(value: f32) -> Value {
    let shortest: f64 = value.to_string().parse().unwrap_or(f64::from(value));
    shortest.into()
}

impl FixedSetting {
    /// True if it is the setting of `config.json`.
    pub fn is(&self, found: &Value) -> bool {
        match self {
            Self::Word(words) => found.as_str().is_some_and(|found| words.contains(&found)),
            Self::Number(number) => found.as_f64() == Some(*number),
            Self::Flag(flag) => found.as_bool() == Some(*flag),
            Self::Null => found.is_null(),
        }
    }

    fn json(&self) -> Value {
        match self {
            Self::Word(words) => words[0].into(),
            Self::Number(number) => (*number).into(),
            Self::Flag(flag) => (*flag).into(),
            Self::Null => Value::Null,
        }
    }
}

impl fmt::Display for FixedSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Word(words) => write!(f, "`{}`", words[0]),
            Self::Number(number) => write!(f, "{number:e}"),
            Self::Flag(flag) => write!(f, "{flag}"),
            Self::Null => f.write_str("null"),
        }
    }
}
