//! The settings that a checkpoint records of its run, as far as using the model needs them:
//! tokenizer, validation data, precision.

use std::sync::Arc;

use serde_json::Value;

use super::InferenceError;
use crate::checkpoint::{ExportedTokenizer, Reader, State, TOKENIZER_FILE};
use crate::config::{self, Paths, Precision, TokenDtype, Tokenizer};
use crate::data::{DataError, Dataset, Tokens, Vocabulary, read_tokenizer};
use crate::tokenize::Encoder;

/// The settings of a run in its checkpoint.
#[derive(Clone, Copy)]
pub struct RunSettings<'a>(&'a State);

const NO_TOKENIZER: &str =
    "\n  hint: set it with `--tokenizer bytes`, `--tokenizer gpt2` or `--tokenizer FILE.json`";
const NO_DATA: &str = "\n  hint: pass the text or the token files with `--data`; relative paths in a checkpoint are relative to the directory in which the run was started";

impl<'a> RunSettings<'a> {
    /// The settings that a checkpoint records.
    pub fn of(reader: &'a Reader) -> Self {
        Self(&reader.manifest().state)
    }

    /// Steps before the checkpoint.
    pub fn step(self) -> u64 {
        self.0.step
    }

    /// The precision of training.
    pub fn precision(self) -> Precision {
        let precision = self
            .value("/train/precision")
            .cloned()
            .map(serde_json::from_value);
        precision.and_then(Result::ok).unwrap_or(Precision::F32)
    }

    /// Samples of a micro-batch.
    pub fn micro_batch(self) -> usize {
        let samples = self.value("/train/micro_batch").and_then(Value::as_u64);
        samples.map_or(1, |samples| samples.max(1) as usize)
    }

    /// The tokenizer that is given. Otherwise the run's, if it is available and has not changed
    /// since.
    pub fn tokenizer(self, given: Option<&Tokenizer>) -> Result<Tokenizer, InferenceError> {
        if let Some(given) = given {
            return Ok(given.clone());
        }
        let refused = |what: String| InferenceError::Refused(format!("{what}{NO_TOKENIZER}"));
        let recorded = self
            .value("/data/tokenizer")
            .and_then(Value::as_str)
            .unwrap_or("not recorded");
        let path = self.value("/data").and_then(|data| data[TOKENIZER_FILE].as_str());
        let tokenizer = Tokenizer::try_from(recorded.to_owned()).ok();
        let tokenizer = tokenizer.or(path.map(|path| Tokenizer::File(path.into())));
        let tokenizer = tokenizer.ok_or_else(|| {
            refused(format!(
                "the run's tokenizer is {recorded}, but the checkpoint does not record its path"
            ))
        })?;
        let vocabulary = Vocabulary::of(&tokenizer)
            .map_err(|error| refused(format!("the run's tokenizer is not available: {error}")))?;
        if vocabulary.identity(&tokenizer) != recorded {
            return Err(refused(format!(
                "`{tokenizer}` has changed since the run, which used {recorded}"
            )));
        }
        Ok(tokenizer)
    }

    /// The run's tokenizer for other tools.
    pub fn exported_tokenizer(self) -> Result<ExportedTokenizer, InferenceError> {
        let tokenizer = self.tokenizer(None)?;
        let json = match &tokenizer {
            Tokenizer::File(path) => Some(read_tokenizer(path)?),
            Tokenizer::Bytes | Tokenizer::Gpt2 => None,
        };
        Ok(ExportedTokenizer {
            json,
            end_of_text: Encoder::new(&tokenizer, None)?.end_of_text,
        })
    }

    /// The data that the run validates on.
    pub fn validation(self, tokenizer: &Tokenizer, block_size: usize) -> Result<Tokens, InferenceError> {
        let refused = |what: String| InferenceError::Refused(format!("{what}{NO_DATA}"));
        let mut section = self.value("/data").cloned().unwrap_or_default();
        section["tokenizer"] = tokenizer.to_string().into();
        if let Some(section) = section.as_object_mut() {
            section.remove(TOKENIZER_FILE);
        }
        let data: config::Data = config::section("data", section).map_err(|error| {
            refused(format!(
                "the checkpoint does not record the validation data of its run: {error}"
            ))
        })?;
        if let Some(val) = &data.val {
            let tokens =
                open_tokens(val, tokenizer, data.dtype).map_err(|error| refused(error.to_string()))?;
            check_unchanged(&tokens, self.0.val_data.as_ref(), "validated")?;
            return Ok(tokens);
        }
        let opened =
            Vocabulary::of(tokenizer).and_then(|found| Dataset::open(&data, block_size, &Arc::new(found)));
        let dataset = opened.map_err(|error| refused(error.to_string()))?;
        check_unchanged(&dataset.train, Some(&self.0.data), "was trained")?;
        Ok(dataset.val)
    }

    /// The type of the numbers in its token files without a header.
    pub fn dtype(self) -> Option<TokenDtype> {
        serde_json::from_value(self.value("/data/dtype")?.clone()).ok()
    }

    /// True if the run validated on a held-out part of its training data.
    pub fn holds_out(self) -> bool {
        self.value("/data/val").is_none()
    }

    fn value(self, pointer: &str) -> Option<&'a Value> {
        self.0.config.pointer(pointer).filter(|value| !value.is_null())
    }
}

/// Refuses data that differ from what the checkpoint recorded, if it recorded anything.
fn check_unchanged(tokens: &Tokens, recorded: Option<&String>, what: &str) -> Result<(), InferenceError> {
    let found = tokens.fingerprint()?;
    match recorded {
        Some(recorded) if *recorded != found => Err(InferenceError::Refused(format!(
            "`{}` has changed since the run {what} on it: it has {found}; the run used {recorded}{NO_DATA}",
            tokens.path().display()
        ))),
        _ => Ok(()),
    }
}

/// All tokens of these files: texts with [`Tokenizer::Bytes`], token files with others.
pub fn open_tokens(
    paths: &Paths,
    tokenizer: &Tokenizer,
    dtype: Option<TokenDtype>,
) -> Result<Tokens, DataError> {
    Tokens::open(paths, tokenizer, dtype, &Arc::new(Vocabulary::of(tokenizer)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exported(data: &Value) -> Result<ExportedTokenizer, InferenceError> {
        let state = serde_json::json!({
            "step": 4, "consumed_samples": 8, "skipped": 0, "rng": { "seed": 1, "data_order": "v1" },
            "config": { "data": data }, "data": "",
        });
        RunSettings(&serde_json::from_value(state).unwrap()).exported_tokenizer()
    }

    #[test]
    fn an_export_gets_the_tokenizer_of_the_run() {
        let gpt2 = exported(&serde_json::json!({ "tokenizer": "gpt2" })).unwrap();
        assert_eq!((gpt2.json, gpt2.end_of_text), (None, Some(50_256)));
        let bytes = exported(&serde_json::json!({ "tokenizer": "bytes" })).unwrap();
        assert_eq!(bytes, ExportedTokenizer::default());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let json = r#"{"version": "1.0", "model": {"type": "WordLevel", "unk_token": "x", "vocab": {"x": 0, "</s>": 1}}}"#;
        std::fs::write(&path, json).unwrap();
        let file = Tokenizer::File(path.clone());
        let identity = Vocabulary::of(&file).unwrap().identity(&file);
        let recorded = serde_json::json!({ "tokenizer": identity, TOKENIZER_FILE: path });
        let found = exported(&recorded).unwrap();
        assert_eq!(found.json.as_deref(), Some(json.as_bytes()));
        assert_eq!(found.end_of_text, Some(1));
        std::fs::write(&path, json.replace('x', "y")).unwrap();
        assert!(
            exported(&recorded)
                .unwrap_err()
                .to_string()
                .contains("has changed since the run")
        );
    }
}
