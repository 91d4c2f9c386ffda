//! What all ranks must agree on before the first step, compared over the key-value store.
//!
//! Every rank writes its [`Signature`] down as named fields. Rank 0 publishes its own, the others compare and answer,
//! and rank 0 publishes the outcome, so that every rank stops with the same words.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::GradientLayout;
use crate::collective::{Failure, StoreExchange, Wait};
use crate::model::Model;
use crate::session::Session;

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
    /// A rank did not come, or the store failed.
    #[error("comparing the ranks before the first step: {0}")]
    Failed(#[from] Failure),
}

/// Succeeds on all ranks if all have the same signature; else fails on all ranks, with the first field in which the lowest
/// such rank differs from rank 0. `name` is unique in the generation, and `timeout` bounds the call. Every rank must call it.
pub fn check_agreement(
    session: &Session,
    name: &str,
    signature: &Signature,
    timeout: Duration,
) -> Result<(), AgreementError> {
    let (env, store) = (session.env(), session.store());
    let exchange = StoreExchange {
        store: store.as_ref(),
        wait: &Wait::new(timeout, &session.cancel()),
        what: "exchanging signatures",
        prefix: format!("agreement/{name}"),
        rank: env.rank.get() as usize,
        ranks: env.world_size.get() as usize,
    };
    if exchange.ranks == 1 {
        return Ok(());
    }
    let own = if exchange.rank == 0 {
        publish(&exchange, signature)?;
        String::new()
    } else {
        let first = read(&exchange)?;
        let difference = first.difference(signature);
        difference.map_or_else(String::new, |(field, theirs, ours)| {
            let rank = exchange.rank;
            format!("rank {rank} does not agree with rank 0: {field} is {ours}, on rank 0 {theirs}")
        })
    };
    let first_difference = |found: Vec<Vec<u8>>| {
        let mut differences = found.into_iter().filter(|difference| !difference.is_empty());
        Ok(differences.next().unwrap_or_default())
    };
    match exchange.decide(own.as_bytes(), first_difference)? {
        none if none.is_empty() => Ok(()),
        difference => Err(AgreementError::Differs(
            String::from_utf8_lossy(&difference).into_owned(),
        )),
    }
}

fn publish(exchange: &StoreExchange<'_>, signature: &Signature) -> Result<(), Failure> {
    let text = serde_json::to_vec(signature).expect("strings are JSON");
    let parts: Vec<&[u8]> = text.chunks(PART_BYTES).collect();
    for (i, part) in parts.iter().enumerate() {
        exchange.publish(&format!("part/{i}"), part)?;
    }
    exchange.publish("parts", parts.len().to_string().as_bytes())
}

fn read(exchange: &StoreExchange<'_>) -> Result<Signature, Failure> {
    let unreadable = |e| Failure::Invalid(format!("rank 0 published an unreadable signature: {e}"));
    let parts: usize = serde_json::from_slice(&exchange.of_rank_zero("parts")?).map_err(unreadable)?;
    let mut text = Vec::new();
    for i in 0..parts {
        text.extend(exchange.of_rank_zero(&format!("part/{i}"))?);
    }
    serde_json::from_slice(&text).map_err(unreadable)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ddp_proto::env::WorkerEnv;
    use ddp_proto::ids::{GlobalRank, WorldSize};

    use super::*;
    use crate::session::MemoryStore;

    /// Of a world of `ranks`, those that come with a signature.
    fn check(ranks: u32, signatures: &[Signature], timeout: Duration) -> Vec<Result<(), AgreementError>> {
        let store = Arc::new(MemoryStore::default());
        let of_rank = |(rank, signature)| {
            let env = WorkerEnv {
                rank: GlobalRank(rank),
                world_size: WorldSize(ranks),
                ..WorkerEnv::single()
            };
            let session = Session::in_process(env, store.clone());
            move || check_agreement(&session, "test", signature, timeout)
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..)
                .zip(signatures)
                .map(of_rank)
                .map(|rank| scope.spawn(rank))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn check_all(signatures: &[Signature]) -> Vec<Result<(), AgreementError>> {
        check(signatures.len() as u32, signatures, Duration::from_secs(30))
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

    /// Also by the ranks that wait for rank 0.
    #[test]
    fn a_rank_that_does_not_come_is_named() {
        let two = [Signature::new(), Signature::new()];
        for outcome in check(3, &two, Duration::from_millis(200)) {
            let error = outcome.unwrap_err().to_string();
            let expected = "comparing the ranks before the first step: waited ";
            assert!(
                error.starts_with(expected) && error.contains(" ms for rank 2\n"),
                "{error}"
            );
        }
    }
}
