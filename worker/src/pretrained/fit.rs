//! How published weights fit a model: which tensor is which parameter and how much of it, what `config.json` says, and all
//! that does not fit as one error.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;

use safetensors::tensor::Dtype;
use serde_json::{Map, Value};

use super::files::{PretrainedError, StoredTensor, read_json};
use crate::config::{Model, ModelKind};
use crate::model::ParamSpec;
use crate::ops::LAYERNORM_EPSILON;

/// What some tools put in front of every name.
const PREFIX: &str = "transformer.";
/// Output head. Where it is tied it is no parameter of its own.
pub(super) const HEAD: &str = "lm_head.weight";
/// Embedding of the tokens.
pub(super) const TOKENS: &str = "wte.weight";
/// Embedding of the positions.
const POSITIONS: &str = "wpe.weight";

/// Where the first elements of a parameter come from. The rest of it, if there is one, keeps its random first values.
#[derive(Clone, Debug)]
pub(super) struct ParamSource {
    /// Its name is that of the file, prefix included.
    pub(super) tensor: StoredTensor,
    /// How many elements.
    pub(super) elements: usize,
}

/// True if the first axis of a parameter may be `here` where the tensor's is `there`: the table of a vocabulary may be
/// padded here, and later positions are not needed.
fn rows_fit(parameter: &str, here: usize, there: usize) -> bool {
    match parameter {
        TOKENS | HEAD => here >= there,
        POSITIONS => here <= there,
        _ => here == there,
    }
}

/// The tensors by the names of parameters, without those that are none.
pub(super) fn by_name<'a>(
    tensors: &'a [StoredTensor],
    misfit: &mut Misfit,
) -> BTreeMap<&'a str, &'a StoredTensor> {
    let mut named = BTreeMap::new();
    for tensor in tensors.iter().filter(|tensor| !is_buffer(bare(&tensor.name))) {
        let name = bare(&tensor.name);
        if named.insert(name, tensor).is_some() {
            misfit.differs(format!("`{name}` is there with and without `{PREFIX}` in front"));
        }
    }
    named
}

/// The name without the prefix.
fn bare(name: &str) -> &str {
    name.strip_prefix(PREFIX).unwrap_or(name)
}

/// The causal masks of attention, which older tools saved.
fn is_buffer(name: &str) -> bool {
    let mut words = name.split('.');
    let is_layer = |word: Option<&str>| word.is_some_and(|word| word.parse::<usize>().is_ok());
    words.next() == Some("h")
        && is_layer(words.next())
        && words.next() == Some("attn")
        && matches!(words.next(), Some("bias" | "masked_bias"))
        && words.next().is_none()
}

/// Says how large the model in the file is, where that is not how large it is here.
pub(super) fn compare_sizes(named: &BTreeMap<&str, &StoredTensor>, model: &Model, misfit: &mut Misfit) {
    let layers = named
        .keys()
        .filter_map(|name| name.strip_prefix("h.")?.split('.').next()?.parse().ok());
    if let Some(last) = layers.max().filter(|last: &usize| last + 1 != model.n_layer) {
        misfit.write("n_layer", last + 1);
    }
    let axis = |name: &str, axis: usize| named.get(name).and_then(|tensor| tensor.shape.get(axis).copied());
    if let Some(channels) = axis(TOKENS, 1).filter(|there| *there != model.n_embd) {
        misfit.write("n_embd", channels);
    }
    if let Some(positions) = axis(POSITIONS, 0).filter(|there| *there < model.block_size) {
        misfit.write("block_size", positions);
    }
}

/// The source of each parameter, in their order; those that have none are told to `misfit`.
pub(super) fn sources(
    named: &BTreeMap<&str, &StoredTensor>,
    params: &[ParamSpec],
    misfit: &mut Misfit,
) -> Vec<ParamSource> {
    let mut sources = Vec::with_capacity(params.len());
    for spec in params {
        match named.get(spec.key.as_str()) {
            None => misfit.differs(format!("`{}` is missing there", spec.key)),
            Some(tensor) => sources.extend(source(spec, tensor, misfit)),
        }
    }
    for name in named.keys() {
        if !params.iter().any(|spec| spec.key == *name) {
            misfit.differs(format!("`{name}` is there, and not in this model"));
        }
    }
    sources
}

fn source(spec: &ParamSpec, tensor: &StoredTensor, misfit: &mut Misfit) -> Option<ParamSource> {
    let name = spec.key.as_str();
    let fits = match (spec.global_shape.as_slice(), tensor.shape.as_slice()) {
        ([here, others @ ..], [there, others_there @ ..]) => {
            others == others_there && rows_fit(name, *here, *there)
        }
        _ => false,
    };
    if !fits {
        misfit.differs(format!(
            "`{name}` is {:?} there and {:?} here",
            tensor.shape, spec.global_shape
        ));
        if matches!(name, TOKENS | HEAD) && tensor.shape.first() > spec.global_shape.first() {
            misfit.write("vocab_size", tensor.shape[0]);
        }
        return None;
    }
    if !matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
        let found = tensor.dtype;
        misfit.differs_for_good(
            format!("`{name}` is of type {found:?} there"),
            "F32, F16 and BF16 are read: save the weights in one of these",
        );
        return None;
    }
    let [here, there] = [&spec.global_shape, &tensor.shape].map(|shape| shape.iter().product::<usize>());
    Some(ParamSource {
        tensor: (*tensor).clone(),
        elements: here.min(there),
    })
}

/// What is not taken from the file, or not all of it, in words.
pub(super) fn remainder(named: &BTreeMap<&str, &StoredTensor>, params: &[ParamSpec]) -> Option<String> {
    let words = params.iter().filter_map(|spec| {
        let (here, there) = (
            *spec.global_shape.first()?,
            *named.get(spec.key.as_str())?.shape.first()?,
        );
        match spec.key.as_str() {
            name @ (TOKENS | HEAD) if here > there => Some(format!(
                "the last {} of {here} rows of `{name}` are random",
                here - there
            )),
            POSITIONS if here < there => Some(format!("the first {here} of its {there} positions")),
            _ => None,
        }
    });
    let words: Vec<String> = words.collect();
    (!words.is_empty()).then(|| words.join("; "))
}

/// Differences that are named one by one: a wrong number of channels makes every tensor one.
const MOST_NAMED: usize = 3;

/// What was found so far.
#[derive(Default)]
pub(super) struct Misfit {
    differences: Vec<String>,
    /// Lines of YAML.
    changes: Vec<String>,
    /// What to do about a difference that no line of the configuration can mend.
    instead: Option<&'static str>,
}

impl Misfit {
    /// One more difference.
    pub(super) fn differs(&mut self, what: String) {
        self.differences.push(what);
    }

    /// One that makes it another architecture.
    pub(super) fn is_foreign(&mut self, what: String) {
        self.differs_for_good(
            what,
            "they are weights of another architecture than this build trains",
        );
    }

    /// One that no line of the configuration can mend, and what can.
    fn differs_for_good(&mut self, what: String, instead: &'static str) {
        self.instead.get_or_insert(instead);
        self.differs(what);
    }

    /// What would fit.
    pub(super) fn write(&mut self, key: &str, value: impl Display) {
        let line = format!("`{key}: {value}`");
        if !self.changes.contains(&line) {
            self.changes.push(line);
        }
    }

    /// The error, if there is a difference.
    pub(super) fn into_result(self, path: &Path) -> Result<(), PretrainedError> {
        if self.differences.is_empty() {
            return Ok(());
        }
        let more = self.differences.len().saturating_sub(MOST_NAMED);
        let mut words: Vec<String> = self.differences.into_iter().take(MOST_NAMED).collect();
        if more > 0 {
            words.push(format!("and {more} more"));
        }
        let hint = match self.instead {
            Some(instead) => instead.to_owned(),
            None if self.changes.is_empty() => {
                "the sizes agree: are the weights complete, and of this kind of model?".to_owned()
            }
            None => format!("write {} in section `model`", self.changes.join(", ")),
        };
        let what = format!(" does not fit the `model` section: {}", words.join("; "));
        Err(PretrainedError::unusable(path, what, hint))
    }
}

/// Names of the function between the two layers of a feed-forward layer, all of which mean `ops::gelu`'s.
const ACTIVATIONS: &[&str] = &["gelu_new", "gelu_pytorch_tanh"];

/// The keys of `config.json`. What it leaves out is as published.
pub(super) struct Settings(Map<String, Value>);

impl Settings {
    pub(super) fn read(path: &Path) -> Result<Self, PretrainedError> {
        let keys = serde_json::from_slice(&read_json(path)?);
        keys.map(Self).map_err(|e| PretrainedError::json(path, e))
    }

    /// The head is the table of the tokens, whatever else the file may hold.
    pub(super) fn is_tied(&self) -> bool {
        self.0.get("tie_word_embeddings") != Some(&Value::Bool(false))
    }

    /// Compares all that changes what the same numbers compute.
    pub(super) fn compare(&self, model: &Model, misfit: &mut Misfit) {
        self.compare_kind(model.kind, misfit);
        let heads = (model.kind != ModelKind::Mlp).then_some(("n_head", model.n_head));
        let sizes = [("n_layer", model.n_layer), ("n_embd", model.n_embd)];
        for (key, here) in sizes.into_iter().chain(heads) {
            if let Some(there) = self.0.get(key).and_then(Value::as_u64)
                && there != here as u64
            {
                misfit.differs(format!("`{key}` is {there} there and {here} here"));
                misfit.write(key, there);
            }
        }
        if let Some(activation) = self.0.get("activation_function").and_then(Value::as_str)
            && !ACTIVATIONS.contains(&activation)
        {
            misfit.is_foreign(format!(
                "`activation_function` is `{activation}` there and `gelu_new` here"
            ));
        }
        if let Some(epsilon) = self.0.get("layer_norm_epsilon").and_then(Value::as_f64)
            && epsilon != LAYERNORM_EPSILON
        {
            misfit.is_foreign(format!(
                "`layer_norm_epsilon` is {epsilon:e} there and {LAYERNORM_EPSILON:e} here"
            ));
        }
        for (key, here) in [
            ("scale_attn_weights", true),
            ("scale_attn_by_inverse_layer_idx", false),
        ] {
            if self.0.get(key) == Some(&Value::Bool(!here)) {
                misfit.is_foreign(format!("`{key}` is {} there and {here} here", !here));
            }
        }
    }

    fn compare_kind(&self, here: ModelKind, misfit: &mut Misfit) {
        let name = match here {
            ModelKind::Gpt2 => "gpt2",
            ModelKind::Llama => "llama",
            ModelKind::Mlp => "mlp",
        };
        let there = self.0.get("model_type").and_then(Value::as_str);
        let Some(there) = there.filter(|there| *there != name) else {
            return;
        };
        let words = format!("`model_type` is `{there}` there and `{name}` here");
        if matches!(there, "gpt2" | "mlp") {
            misfit.write("kind", there);
            misfit.differs(words);
        } else {
            misfit.is_foreign(words);
        }
    }
}
