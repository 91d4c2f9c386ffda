//! `config.json`: what no shape tells.

use std::path::Path;

use serde_json::{Map, Value};

use super::PretrainedError;
use super::files::read_json;
use super::misfit::Misfit;
use crate::config::{Model, ModelKind};
use crate::ops::LAYERNORM_EPSILON;

/// Names of the function between the two layers of a feed-forward layer, all of which mean `ops::gelu`'s.
const ACTIVATIONS: &[&str] = &["gelu_new", "gelu_pytorch_tanh"];

/// The keys of `config.json`. What it leaves out is as published.
pub(super) struct Settings(Map<String, Value>);

impl Settings {
    pub(super) fn read(path: &Path) -> Result<Self, PretrainedError> {
        let keys = serde_json::from_slice(&read_json(path)?);
        keys.map(Self)
            .map_err(|e| PretrainedError::json(path, e.to_string()))
    }

    /// The head is the table of the tokens, whatever else the file may hold.
    pub(super) fn is_tied(&self) -> bool {
        self.0.get("tie_word_embeddings") != Some(&Value::Bool(false))
    }

    /// Compares all that changes what the same numbers compute.
    pub(super) fn compare(&self, model: &Model, misfit: &mut Misfit) {
        self.compare_kind(model.kind, misfit);
        let heads = (model.kind == ModelKind::Gpt2).then_some(("n_head", model.n_head));
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
        let name = |kind| match kind {
            ModelKind::Gpt2 => "gpt2",
            ModelKind::Mlp => "mlp",
        };
        let Some(there) = self.0.get("model_type").and_then(Value::as_str) else {
            return;
        };
        if there == name(here) {
            return;
        }
        let words = format!("`model_type` is `{there}` there and `{}` here", name(here));
        if [ModelKind::Gpt2, ModelKind::Mlp]
            .into_iter()
            .any(|kind| name(kind) == there)
        {
            misfit.write("kind", there);
            misfit.differs(words);
        } else {
            misfit.is_foreign(words);
        }
    }
}
