//! What all nodes of one job must have alike: each value is hashed, so that values stay on their nodes.

use std::collections::BTreeMap;

/// The key of a program's arguments. They may differ between the nodes of one job.
pub const ARGUMENTS: &str = "arguments";

/// The hash of each value, by its key, as [`Join`](crate::rendezvous::Join) carries it.
pub type Agreed = BTreeMap<String, u64>;

/// Hashes one value. Equal values of two keys have different hashes.
pub fn hash(key: &str, value: &str) -> u64 {
    let mut hasher = blake3::Hasher::new_derive_key("ddp-run value that all nodes agree on");
    hasher.update(&(key.len() as u64).to_le_bytes());
    hasher.update(key.as_bytes()).update(value.as_bytes());
    let mut short = [0; 8];
    hasher.finalize_xof().fill(&mut short);
    u64::from_le_bytes(short)
}

/// The keys whose values differ, or which only one node has.
pub fn differing(first: &Agreed, second: &Agreed) -> Vec<String> {
    let keys = first
        .keys()
        .chain(second.keys().filter(|key| !first.contains_key(*key)));
    let differ = keys.filter(|key| first.get(*key) != second.get(*key));
    differ.cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_with_other_values_and_keys_of_one_node_differ() {
        let agreed = |entries: &[(&str, &str)]| -> Agreed {
            let hashed = entries
                .iter()
                .map(|(key, value)| ((*key).to_owned(), hash(key, value)));
            hashed.collect()
        };
        let first = agreed(&[("target", "a"), ("train.seed", "1"), ("train.steps", "5")]);
        let second = agreed(&[("target", "a"), ("train.lr", "3"), ("train.seed", "2")]);
        assert_eq!(
            differing(&first, &second),
            ["train.seed", "train.steps", "train.lr"]
        );
        assert!(differing(&first, &first).is_empty());
        assert_ne!(hash("a", "b"), hash("ab", ""));
        assert_ne!(hash("a", "1"), hash("b", "1"));
    }
}
