//! The secret with which the ranks of one generation prove to each other that they are of it.

use std::fmt;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Length of a key.
pub const DATA_KEY_BYTES: usize = 32;

/// The key of a generation's data connections. The daemon makes it for each assignment, and it reaches a worker over the
/// control socket only: never through the environment. It has no `Display`, and `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct DataKey([u8; DATA_KEY_BYTES]);

impl DataKey {
    /// Of these bytes, which nobody else may know.
    pub const fn new(bytes: [u8; DATA_KEY_BYTES]) -> Self {
        Self(bytes)
    }

    /// As an assignment carries it; none if the bytes are no key.
    pub fn of_assignment(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// The secret itself.
    pub const fn as_bytes(&self) -> &[u8; DATA_KEY_BYTES] {
        &self.0
    }
}

impl fmt::Debug for DataKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DataKey(not shown)")
    }
}

/// As 64 hexadecimal digits.
impl Serialize for DataKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&blake3::Hash::from(self.0).to_hex())
    }
}

impl<'de> Deserialize<'de> for DataKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let digits = String::deserialize(deserializer)?;
        // The error must not repeat the digits.
        let bytes = blake3::Hash::from_hex(digits)
            .map_err(|_| D::Error::custom("a data key is 64 hexadecimal digits"))?;
        Ok(Self(bytes.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::{AgentMessage, Assignment, Join, Place, agent_message};

    #[test]
    fn a_key_survives_its_text_and_nothing_else_shows_it() {
        let key = DataKey::new(std::array::from_fn(|byte| 0xa0 + byte as u8));
        let text = serde_json::to_string(&key).unwrap();
        assert_eq!(serde_json::from_str::<DataKey>(&text).unwrap(), key);
        assert_eq!(format!("{key:?}"), "DataKey(not shown)");
        for wrong in ["\"\"", "\"a0\"", &text.replace("a0", "ä")[..], "7"] {
            let error = serde_json::from_str::<DataKey>(wrong).unwrap_err().to_string();
            assert!(!error.contains("a1a2"), "{error}");
        }
    }

    #[test]
    fn a_message_with_a_key_does_not_show_it() {
        let key: Vec<u8> = (0xa0..0xc0).collect();
        let assignment = Assignment {
            data_key: key.clone(),
            reason: "enough nodes".into(),
            ..Assignment::default()
        };
        let message = AgentMessage {
            body: Some(agent_message::Body::Join(Join {
                place: Some(Box::new(Place {
                    assignment: Some(assignment),
                    ..Place::default()
                })),
                ..Join::default()
            })),
            ..AgentMessage::default()
        };
        let shown = format!("{message:?}");
        assert!(shown.contains("enough nodes"), "{shown}");
        // `161, 162`, `a1a2`, or `\xa1\xa2`.
        for part in ["161, 162", "a1a2", "xa1", "0xa1"] {
            assert!(!shown.contains(part), "{shown}");
        }
    }
}
