//! Ranks that hold one copy of the state together: a word or a number.

use serde::{Deserialize, Serialize};

/// `parallel.shard_group`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ShardGroup {
    /// The ranks of a node.
    Node,
    /// So many neighbours.
    #[serde(untagged)]
    Ranks(usize),
}

impl<'de> Deserialize<'de> for ShardGroup {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Group;
        impl serde::de::Visitor<'_> for Group {
            type Value = ShardGroup;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("`node` or a number of ranks")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<ShardGroup, E> {
                match text {
                    "node" => Ok(ShardGroup::Node),
                    other => Err(E::invalid_value(serde::de::Unexpected::Str(other), &self)),
                }
            }

            fn visit_u64<E: serde::de::Error>(self, ranks: u64) -> Result<ShardGroup, E> {
                usize::try_from(ranks).map(ShardGroup::Ranks).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Group)
    }
}
