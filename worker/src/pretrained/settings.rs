//! The model that a `config.json` describes, compared with the `model` section.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::files::{PretrainedError, read_json};
use super::fit::{FOREIGN, Misfit};
use crate::config::{Model, ModelKind, RopeScaling, RouterScore};
use crate::model::Published;

/// Sizes that a model can have.
const SIZES: RangeInclusive<usize> = 1..=1 << 24;

/// The keys of `config.json`.
pub(super) struct Settings {
    path: PathBuf,
    keys: Map<String, Value>,
}

/// `rope_scaling` or `rope_parameters` of `config.json`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Rotary {
    rope_type: Option<String>,
    /// Older versions of transformers write this one.
    r#type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
}

impl Settings {
    pub(super) fn read(path: &Path) -> Result<Self, PretrainedError> {
        let keys = serde_json::from_slice(&read_json(path)?);
        let keys = keys.map_err(|error| PretrainedError::json(path, error))?;
        let path = path.to_owned();
        Ok(Self { path, keys })
    }

    /// The value of a key, if it has one.
    fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, PretrainedError> {
        let value = self.keys.get(key).cloned().unwrap_or_default();
        serde_json::from_value(value)
            .map_err(|error| PretrainedError::json(&self.path, format_args!("`{key}`: {error}")))
    }

    /// The model that the file describes. Settings that the file leaves out are those that transformers assumes, or else
    /// `here`'s. `misfit` is told what no key of the `model` section expresses.
    pub(super) fn model(&self, here: &Model, misfit: &mut Misfit) -> Result<Model, PretrainedError> {
        let model_type: Option<String> = self.get("model_type")?;
        let published = match &model_type {
            None => Published::of(here.kind),
            Some(name) => Published::of_type(name).ok_or_else(|| {
                PretrainedError::unusable(&self.path, format_args!(": `model_type` is `{name}`"), FOREIGN)
            })?,
        };
        let mut there = Model {
            kind: published.kind,
            tied: self.get(Published::TIED)?,
            ..here.clone()
        };
        for (key, size, default) in published.sizes {
            let default = match default {
                Some((times, key)) => self.get(key)?.map(|number: usize| number.saturating_mul(*times)),
                None => None,
            };
            if let Some(number) = self.get(key)?.or(default) {
                if !SIZES.contains(&number) {
                    let what = format!("`{key}` is {number}");
                    return Err(PretrainedError::json(&self.path, what));
                }
                size.set(&mut there, number);
            }
        }
        for (key, here) in published.fixed {
            if let Some(found) = self.get::<Value>(key)?.filter(|found| !here.is(found)) {
                misfit.is_foreign(format!("`{key}` is {found} in the file and {here} in this model"));
            }
        }
        // Fewer positions than the weights have can be trained; rotary ones, which have no weights, can also be more.
        for key in published.positions.iter().filter(|_| !there.kind.is_llama()) {
            let positions = self.get(key)?.unwrap_or(there.block_size);
            there.block_size = there.block_size.min(positions);
        }
        if !model_type.is_some_and(|name| name.starts_with(Published::OWN)) {
            check_published(&there, misfit);
        }
        if there.kind == ModelKind::Mixtral {
            there.experts.score = self.get(Published::SCORE)?.unwrap_or(RouterScore::Softmax);
        }
        if there.kind.is_llama() {
            let (key, default) = Published::EPSILON;
            there.norm_eps = self.get(key)?.unwrap_or(default);
            self.add_rotary(&mut there, misfit)?;
            let (key, here) = (Published::HEAD_SIZE, there.n_embd / there.n_head);
            if let Some(found) = self.get::<usize>(key)?.filter(|found| *found != here) {
                misfit.is_foreign(format!(
                    "`{key}` is {found} in the file and {here} in this model, channels over heads"
                ));
            }
        }
        Ok(there)
    }

    fn add_rotary(&self, there: &mut Model, misfit: &mut Misfit) -> Result<(), PretrainedError> {
        let mut rotary = Rotary::default();
        for key in Published::SCALING.into_iter().rev() {
            if self
                .get::<Map<_, _>>(key)?
                .is_some_and(|section| !section.is_empty())
            {
                rotary = self.get(key)?.unwrap_or_default();
            }
        }
        let (key, default) = Published::THETA;
        there.rope_theta = rotary.rope_theta.or(self.get(key)?).unwrap_or(default);
        let key = "partial_rotary_factor";
        let share = rotary.partial_rotary_factor.or(self.get(key)?);
        if let Some(share) = share.filter(|share| *share < 1.0) {
            misfit.is_foreign(format!("`{key}` is {share} in the file and 1 in this model"));
        }
        // Where it is left out, transformers takes the number of positions.
        let positions = self.get("max_position_embeddings")?;
        let original_positions = rotary.original_max_position_embeddings.or(positions);
        there.rope_scaling = match rotary.rope_type.or(rotary.r#type).as_deref() {
            None | Some("default") => None,
            Some("llama3") => {
                let given = [rotary.factor, rotary.low_freq_factor, rotary.high_freq_factor];
                if let (
                    [Some(factor), Some(low_freq_factor), Some(high_freq_factor)],
                    Some(original_positions),
                ) = (given, original_positions)
                {
                    Some(RopeScaling {
                        factor,
                        low_freq_factor,
                        high_freq_factor,
                        original_positions,
                    })
                } else {
                    let keys = Published::SCALING_KEYS.join("`, `");
                    misfit.is_foreign(format!(
                        "`rope_type` is `llama3` in the file, which needs `{keys}`"
                    ));
                    None
                }
            }
            Some(other) => {
                misfit.is_foreign(format!(
                    "`rope_type` is `{other}` in the file, but only `default` and `llama3` are supported"
                ));
                None
            }
        };
        Ok(())
    }
}

/// Reports a model that computes something else in its published form.
pub(super) fn check_published(model: &Model, misfit: &mut Misfit) {
    if let Some(why) = Published::contradiction(model) {
        let hint = "use weights of a model with `experts.top_k` above 1, or leave out `init_from`";
        misfit.differs_for_good(why.to_owned(), hint);
    }
}

/// Reports the keys of the `model` section in which the model of the file differs.
pub(super) fn compare(there: &Model, here: &Model, misfit: &mut Misfit) {
    // Sizes that follow from others are compared as if those were changed already.
    let changed = Model {
        kind: there.kind,
        n_embd: there.n_embd,
        n_head: there.n_head,
        ..here.clone()
    };
    let kind = |model: &Model| Published::of(model.kind).model_type.to_owned();
    let sizes = |key, sizes: [usize; 2]| (key, sizes.map(|size| size.to_string()));
    for (key, [there, here]) in [
        ("kind", [there, here].map(kind)),
        sizes("n_layer", [there.n_layer, here.n_layer]),
        sizes("n_embd", [there.n_embd, here.n_embd]),
        sizes("n_head", [there.n_head, here.n_head]),
        sizes("n_kv_head", [there.kv_heads(), changed.kv_heads()]),
        sizes("n_inner", [there.inner(), changed.inner()]),
        sizes("experts.count", [there, here].map(|model| model.experts.count)),
        sizes("experts.top_k", [there, here].map(|model| model.experts.top_k)),
        (
            "experts.score",
            [there, here].map(|model| RouterScore::WORDS[model.experts.score as usize].to_owned()),
        ),
        sizes("block_size", [there.block_size, here.block_size]),
        (
            "norm_eps",
            [there, here].map(|model| format!("{:e}", model.norm_eps)),
        ),
        (
            "rope_theta",
            [there, here].map(|model| format!("{:?}", model.rope_theta)),
        ),
        (
            "rope_scaling",
            [there, here].map(|model| {
                model
                    .rope_scaling
                    .map_or("null".to_owned(), |all| all.to_string())
            }),
        ),
    ] {
        if there != here {
            misfit.differs(format!("`{key}` is {there} in the file and {here} in this model"));
            misfit.write(key, there);
        }
    }
}
