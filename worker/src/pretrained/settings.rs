//! What `config.json` says, beside what the `model` section says.

use std::ops::RangeInclusive;
use std::path::Path;

use serde_json::{Map, Value};

use super::files::{PretrainedError, read_json};
use super::fit::Misfit;
use crate::config::{Model, ModelKind, RopeScaling};
use crate::model::{Decoder, NormKind, PositionKind, Published, SizeSetting};

/// Other sizes make no model; the bounds keep products of sizes far from overflow.
const SIZES: RangeInclusive<usize> = 1..=1 << 24;

/// The keys of `config.json`. What it leaves out is as transformers takes it then.
pub(super) struct Settings(Map<String, Value>);

impl Settings {
    pub(super) fn read(path: &Path) -> Result<Self, PretrainedError> {
        let keys = serde_json::from_slice(&read_json(path)?);
        keys.map(Self).map_err(|e| PretrainedError::json(path, e))
    }

    /// The value of a key, if it has one.
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn model_type(&self) -> Option<&str> {
        self.get("model_type").and_then(Value::as_str)
    }

    /// True unless they are those of another kind.
    pub(super) fn is_of(&self, kind: ModelKind) -> bool {
        self.model_type()
            .is_none_or(|there| there == Published::of(kind).model_type)
    }

    /// The head of a model of this kind is the table of the tokens, whatever else the file may hold.
    pub(super) fn is_tied(&self, kind: ModelKind) -> bool {
        let unsaid = Model {
            kind,
            ..Model::default()
        };
        let said = self.get(Published::TIED).and_then(Value::as_bool);
        said.unwrap_or(unsaid.is_tied())
    }

    /// Compares all that changes what the same numbers compute.
    pub(super) fn compare(&self, model: &Model, misfit: &mut Misfit) {
        let published = self.compare_kind(model.kind, misfit);
        self.check_types(published, misfit);
        // What follows from a kind or a size is no difference of its own: it is compared as if that was mended.
        let mut model = Model {
            kind: published.kind,
            ..model.clone()
        };
        for size in published.sizes {
            self.compare_size(size, &mut model, misfit);
        }
        for (key, here) in published.fixed {
            if let Some(there) = self.get(key).filter(|there| !here.is(there)) {
                misfit.is_foreign(format!(
                    "`{key}` is {} in the file and {here} in this model",
                    words(there)
                ));
            }
        }
        let decoder = Decoder::of(&model);
        if let NormKind::Rms { epsilon } = decoder.norm {
            let (key, default) = Published::EPSILON;
            let there = self.get(key).and_then(Value::as_f64).unwrap_or(default);
            if there.to_bits() != epsilon.to_bits() {
                misfit.differs(format!(
                    "`{key}` is {there:e} in the file and {epsilon:e} in this model"
                ));
                misfit.write("norm_eps", format_args!("{there:e}"));
            }
        }
        if let PositionKind::Rotary { theta, scaling } = decoder.position_kind {
            self.compare_rotary((theta, scaling), misfit);
            self.compare_positions(published.positions, model.block_size, misfit);
            let here = decoder.attention.map_or(0, |attention| attention.head_size);
            let there = self.get(Published::HEAD_SIZE).and_then(Value::as_u64);
            if let Some(there) = there.filter(|there| *there != here as u64) {
                let key = Published::HEAD_SIZE;
                misfit.is_foreign(format!(
                    "`{key}` is {there} in the file and {here} in this model, channels over heads"
                ));
            }
        }
    }

    /// Refuses what is there and cannot be read: it is not left out.
    fn check_types(&self, published: &Published, misfit: &mut Misfit) {
        type Form = (fn(&Value) -> bool, &'static str);
        const WHOLE: Form = (Value::is_u64, "a whole number");
        const NUMBER: Form = (Value::is_number, "a number");
        let mut check = |section: &Map<String, Value>, key: &str, (is, what): Form| {
            if let Some(there) = section.get(key).filter(|there| !there.is_null() && !is(there)) {
                misfit.is_foreign(format!(
                    "`{key}` is {} in the file, expected {what}",
                    words(there)
                ));
            }
        };
        let sizes = published.sizes.iter().map(|size| size.published);
        for key in sizes
            .chain(published.positions.iter().copied())
            .chain([Published::HEAD_SIZE])
        {
            check(&self.0, key, WHOLE);
        }
        for key in [Published::EPSILON.0, Published::THETA.0] {
            check(&self.0, key, NUMBER);
        }
        check(&self.0, "model_type", (Value::is_string, "a word"));
        check(&self.0, Published::TIED, (Value::is_boolean, "`true` or `false`"));
        for key in Published::SCALING {
            check(&self.0, key, (Value::is_object, "a section"));
            let Some(section) = self.get(key).and_then(Value::as_object) else {
                continue;
            };
            let [factor, low, high, positions] = Published::SCALING_KEYS;
            for key in [factor, low, high, Published::THETA.0] {
                check(section, key, NUMBER);
            }
            check(section, positions, WHOLE);
            for key in ["rope_type", "type"] {
                check(section, key, (Value::is_string, "a word"));
            }
        }
    }

    /// The table that the settings go by.
    fn compare_kind(&self, here: ModelKind, misfit: &mut Misfit) -> &'static Published {
        let published = Published::of(here);
        let Some(there) = self.model_type().filter(|_| !self.is_of(here)) else {
            return published;
        };
        let words = format!(
            "`model_type` is `{there}` in the file and `{}` in this model",
            published.model_type
        );
        let Some(other) = Published::of_type(there) else {
            misfit.is_foreign(words);
            return published;
        };
        misfit.write("kind", there);
        misfit.differs(words);
        other
    }

    /// Compares one size, and mends it in `model`.
    fn compare_size(&self, size: &SizeSetting, model: &mut Model, misfit: &mut Misfit) {
        let number = |key: &str| self.get(key).and_then(Value::as_u64);
        let default = size
            .default
            .and_then(|(times, key)| Some(number(key)?.saturating_mul(times)));
        let Some(there) = number(size.published).or(default) else {
            return;
        };
        let here = (size.get)(model);
        if there == here as u64 {
            return;
        }
        let words = format!(
            "`{}` is {there} in the file and {here} in this model",
            size.published
        );
        match usize::try_from(there) {
            Ok(there) if SIZES.contains(&there) => {
                misfit.differs(words);
                misfit.write(size.key, there);
                (size.set)(model, there);
            }
            _ => misfit.is_foreign(words),
        }
    }

    /// More positions than here are no difference, where none has numbers of its own.
    fn compare_positions(&self, keys: &[&str], here: usize, misfit: &mut Misfit) {
        for key in keys {
            let there = self.get(key).and_then(Value::as_u64);
            if let Some(there) = there.filter(|there| *there < here as u64) {
                misfit.differs(format!(
                    "`{key}` is {there} in the file and `block_size` is {here} in this model"
                ));
                misfit.write("block_size", there);
            }
        }
    }

    fn compare_rotary(&self, (theta, scaling): (f64, Option<RopeScaling>), misfit: &mut Misfit) {
        let section = Published::SCALING
            .into_iter()
            .filter_map(|key| self.get(key)?.as_object())
            .find(|section| !section.is_empty());
        let number = |key: &str| {
            let below = section.and_then(|section| section.get(key)?.as_f64());
            below.or_else(|| self.get(key)?.as_f64())
        };
        let (key, default) = Published::THETA;
        let there = number(key).unwrap_or(default);
        if there.to_bits() != theta.to_bits() {
            misfit.differs(format!(
                "`{key}` is {there:?} in the file and {theta:?} in this model"
            ));
            misfit.write(key, format_args!("{there:?}"));
        }
        let key = "partial_rotary_factor";
        if let Some(there) = number(key).filter(|there| *there < 1.0) {
            misfit.is_foreign(format!("`{key}` is {there} in the file and 1 in this model"));
        }
        match self.scaling(section) {
            Ok(there) if there == scaling => {}
            Ok(there) => {
                let [there, here] = [there, scaling].map(scaling_words);
                misfit.differs(format!(
                    "`rope_scaling` is {there} in the file and {here} in this model"
                ));
                misfit.write("rope_scaling", there);
            }
            Err(words) => misfit.is_foreign(words),
        }
    }

    /// How rotary positions are scaled there, or why that is unknown here.
    fn scaling(&self, section: Option<&Map<String, Value>>) -> Result<Option<RopeScaling>, String> {
        let Some(section) = section else {
            return Ok(None);
        };
        // Older versions write `type`.
        let kind = ["rope_type", "type"]
            .iter()
            .find_map(|key| section.get(*key)?.as_str());
        match kind.unwrap_or("default") {
            "default" => Ok(None),
            "llama3" => {
                let [factor, low, high, positions] = Published::SCALING_KEYS;
                let number = |key: &str| section.get(key).and_then(Value::as_f64);
                let needed = |key: &str| {
                    number(key)
                        .ok_or_else(|| format!("`rope_type` is `llama3` in the file, but `{key}` is missing"))
                };
                // Where it is left out, transformers takes the number of positions.
                let original = number(positions).or_else(|| self.get("max_position_embeddings")?.as_f64());
                Ok(Some(RopeScaling {
                    factor: needed(factor)?,
                    low_freq_factor: needed(low)?,
                    high_freq_factor: needed(high)?,
                    original_positions: original.map_or_else(|| needed(positions), Ok)? as usize,
                }))
            }
            other => Err(format!(
                "`rope_type` is `{other}` in the file, but only `default` and `llama3` are supported"
            )),
        }
    }
}

/// As YAML.
fn scaling_words(scaling: Option<RopeScaling>) -> String {
    let Some(scaling) = scaling else {
        return "null".into();
    };
    let RopeScaling {
        factor,
        low_freq_factor,
        high_freq_factor,
        original_positions,
    } = scaling;
    format!(
        "{{ factor: {factor:?}, low_freq_factor: {low_freq_factor:?}, high_freq_factor: {high_freq_factor:?}, original_positions: {original_positions} }}"
    )
}

/// A value as messages have it.
fn words(value: &Value) -> String {
    match value {
        Value::String(text) => format!("`{text}`"),
        Value::Number(number) => format!("{:e}", number.as_f64().unwrap_or(f64::NAN)),
        other => other.to_string(),
    }
}
