//! What all ranks must agree on before the first step, compared over the key-value store.
//!
//! Every rank writes its [`Signature`] down as named fields. Rank 0 publishes its own, the others compare and answer,
//! and rank 0 publishes the outcome, so that every rank stops with the same words.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::GradientLayout;
use crate::model::Model;
use crate::session::{KeyValue, StoreError};

/// Bytes of a signature in one key, below the store's bound on values.
const PART_BYTES: usize = 256 << 10;

/// What a rank is about to do, as named fields in a fixed order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    fields: Vec<(String, String)>,
}

impl Signature {
    /// No fields but the version of this build.
    pub fn new() -> Self {
        let mut signature = Self::default();
        signature.field("build", env!("CARGO_PKG_VERSION"));
        signature
    }

    /// Adds a field.
    pub fn field(&mut self, name: impl Into<String>, value: impl std::fmt::Display) {
        self.fields.push((name.into(), format!("{value}")));
    }

    /// Adds every value of a nested JSON document under its path: `train.optimizer.lr`.
    pub fn document(&mut self, path: &str, value: &serde_json::Value) {
        match value {
            serde_json::Value::Object(entries) => {
                for (key, value) in entries {
                    let path = if path.is_empty() {
                        key.clone()
                    } else {
                        format!("{path}.{key}")
                    };
                    self.document(&path, value);
                }
            }
            leaf => self.field(format!("configuration key `{path}`"), leaf),
        }
    }

    /// Adds name, shape, dtype and order of a model's parameters, and the layout of their gradients: those of the whole
    /// model, whichever part a rank holds.
    pub fn model(&mut self, model: &Model, layout: &GradientLayout) {
        self.field("number of parameters", model.all_params.len());
        for (i, param) in model.all_params.iter().enumerate() {
            let value = format!("`{}` {:?} {}", param.key, param.global_shape, param.dtype);
            self.field(format!("parameter {i}"), value);
        }
        let order: Vec<String> = layout.order().iter().map(|id| id.0.to_string()).collect();
        self.field("order of gradients", order.join(" "));
        self.field("layout of gradients", layout.signature());
    }

    /// First field in which `other` differs: name, our value, their value.
    fn difference<'a>(&'a self, other: &'a Self) -> Option<(&'a str, &'a str, &'a str)> {
        const ABSENT: &str = "absent";
        let len = self.fields.len().max(other.fields.len());
        (0..len).find_map(|i| match (self.fields.get(i), other.fields.get(i)) {
            (Some(ours), Some(theirs)) if ours == theirs => None,
            (Some(ours), Some(theirs)) if ours.0 == theirs.0 => {
                Some((ours.0.as_str(), ours.1.as_str(), theirs.1.as_str()))
            }
            (Some(ours), _) => Some((ours.0.as_str(), ours.1.as_str(), ABSENT)),
            (None, Some(theirs)) => Some((theirs.0.as_str(), ABSENT, theirs.1.as_str())),
            (None, None) => None,
        })
    }
}

/// Why ranks do not agree.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AgreementError {
    /// A rank is about to do something else.
    #[error("{0}\n  hint: all nodes must run the same build with the same configuration")]
    Differs(String),
    /// The store failed, or a rank did not come.
    #[error("comparing the ranks before the first step: {what}: {source}")]
    Store {
        /// What was done.
        what: String,
        /// What the store said.
        source: StoreError,
    },
    /// A signature that cannot be read.
    #[error("comparing the ranks before the first step: rank {rank} published something unreadable: {cause}")]
    Unreadable {
        /// The rank that published it.
        rank: usize,
        /// In words.
        cause: String,
    },
}

/// One comparison over the store. Every rank takes part.
pub struct Agreement<'a> {
    /// The store of this generation.
    pub store: &'a dyn KeyValue,
    /// Name of the comparison, unique in the generation.
    pub name: &'a str,
    /// Global rank of this process.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// When all must have come.
    pub deadline: Instant,
}

/// What a rank found.
const AGREED: &str = "";

impl Agreement<'_> {
    /// Succeeds on all ranks if all have the same signature; else fails on all ranks, with the first field in which
    /// the lowest such rank differs from rank 0.
    pub fn check(&self, signature: &Signature) -> Result<(), AgreementError> {
        if self.world_size == 1 {
            return Ok(());
        }
        let verdict = if self.rank == 0 {
            self.publish(signature)?;
            self.collect()?
        } else {
            let first = self.read()?;
            let verdict = first
                .difference(signature)
                .map_or_else(String::new, |(field, theirs, ours)| {
                    format!(
                        "rank {} does not agree with rank 0: {field} is {ours}, on rank 0 {theirs}",
                        self.rank
                    )
                });
            self.put(&format!("rank/{}", self.rank), verdict.as_bytes())?;
            self.get("verdict", 0)?
        };
        if verdict == AGREED {
            Ok(())
        } else {
            Err(AgreementError::Differs(verdict))
        }
    }

    fn publish(&self, signature: &Signature) -> Result<(), AgreementError> {
        let text = serde_json::to_vec(signature).expect("strings are JSON");
        let parts: Vec<&[u8]> = text.chunks(PART_BYTES).collect();
        for (i, part) in parts.iter().enumerate() {
            self.put(&format!("part/{i}"), part)?;
        }
        self.put("parts", parts.len().to_string().as_bytes())
    }

    fn read(&self) -> Result<Signature, AgreementError> {
        let unreadable = |cause: String| AgreementError::Unreadable { rank: 0, cause };
        let parts = self.get("parts", 0)?;
        let parts: usize = parts
            .parse()
            .map_err(|_| unreadable(format!("`{parts}` parts")))?;
        let mut text = Vec::new();
        for i in 0..parts {
            text.extend(self.get_bytes(&format!("part/{i}"), 0)?);
        }
        serde_json::from_slice(&text).map_err(|e| unreadable(e.to_string()))
    }

    /// The first complaint of the others, published for all.
    fn collect(&self) -> Result<String, AgreementError> {
        let mut verdict = String::new();
        for rank in 1..self.world_size {
            verdict = self.get(&format!("rank/{rank}"), rank)?;
            if verdict != AGREED {
                break;
            }
        }
        self.put("verdict", verdict.as_bytes())?;
        Ok(verdict)
    }

    fn key(&self, key: &str) -> String {
        format!("agreement/{}/{key}", self.name)
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), AgreementError> {
        let put = self.store.put(&self.key(key), value, self.deadline);
        put.map_err(|source| AgreementError::Store {
            what: "publishing".into(),
            source,
        })
    }

    fn get_bytes(&self, key: &str, rank: usize) -> Result<Vec<u8>, AgreementError> {
        let got = self.store.wait_for(&self.key(key), self.deadline);
        got.map_err(|source| AgreementError::Store {
            what: format!("waiting for rank {rank}"),
            source,
        })
    }

    fn get(&self, key: &str, rank: usize) -> Result<String, AgreementError> {
        let bytes = self.get_bytes(key, rank)?;
        String::from_utf8(bytes).map_err(|e| AgreementError::Unreadable {
            rank,
            cause: e.to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::session::MemoryStore;

    fn check_all(signatures: &[Signature]) -> Vec<Result<(), AgreementError>> {
        let store = MemoryStore::default();
        std::thread::scope(|scope| {
            let ranks: Vec<_> = signatures
                .iter()
                .enumerate()
                .map(|(rank, signature)| {
                    let store = &store;
                    scope.spawn(move || {
                        let agreement = Agreement {
                            store,
                            name: "test",
                            rank,
                            world_size: signatures.len(),
                            deadline: Instant::now() + Duration::from_secs(30),
                        };
                        agreement.check(signature)
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn signature(lr: f64, extra: Option<&str>) -> Signature {
        let mut signature = Signature::new();
        signature.document("", &serde_json::json!({ "train": { "lr": lr, "steps": 10 } }));
        if let Some(extra) = extra {
            signature.field(extra, 1);
        }
        signature
    }

    #[test]
    fn equal_signatures_pass() {
        let long = "x".repeat(3 * PART_BYTES);
        let same = signature(0.1, Some(&long));
        assert_eq!(
            check_all(&[same.clone(), same.clone(), same]),
            [Ok(()), Ok(()), Ok(())]
        );
    }

    #[test]
    fn the_first_differing_field_and_its_rank_are_named_on_every_rank() {
        let all = check_all(&[
            signature(0.1, None),
            signature(0.1, None),
            signature(0.2, Some("more")),
        ]);
        for outcome in all {
            assert_eq!(
                outcome.unwrap_err().to_string(),
                "rank 2 does not agree with rank 0: configuration key `train.lr` is 0.2, on rank 0 0.1\n  hint: all nodes must run the same build with the same configuration"
            );
        }
    }

    #[test]
    fn a_missing_field_is_named() {
        let error = check_all(&[signature(0.1, Some("more")), signature(0.1, None)])
            .remove(0)
            .unwrap_err();
        assert!(
            error.to_string().contains("more is absent, on rank 0 1"),
            "{error}"
        );
    }

    #[test]
    fn a_rank_that_does_not_come_is_named() {
        let agreement = Agreement {
            store: &MemoryStore::default(),
            name: "test",
            rank: 0,
            world_size: 2,
            deadline: Instant::now(),
        };
        let error = agreement.check(&Signature::new()).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("waiting for rank 1: no rank wrote key"),
            "{error}"
        );
    }
}
