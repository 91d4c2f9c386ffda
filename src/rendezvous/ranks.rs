//! Which nodes take part, and which node rank each gets (`job/assignment.rs` numbers the ranks): a pure function of who is there and who was there before.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeSet, HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::size::Limits;

/// A node that is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) incarnation: String,
    pub(super) hostname: String,
    /// `--node-rank`.
    pub(super) asked: Option<u32>,
    /// Number of its arrival at the job.
    pub(super) arrival: u64,
    /// How many ranks it brings.
    pub(super) workers: u32,
}

/// A place in the last assignment; its index is the node rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Member {
    pub(super) incarnation: String,
    pub(super) hostname: String,
    /// The node has left for good: the daemon does not wait for it.
    #[serde(skip)]
    pub(super) has_left: bool,
}

impl Member {
    pub(super) fn new(incarnation: String, hostname: String) -> Self {
        Self {
            incarnation,
            hostname,
            has_left: false,
        }
    }
}

/// The candidates that take part: those that asked for a rank, those of the last generation, then by arrival; as many
/// as the limits allow. If they allow none, as many as there may be: the workers know best why they cannot go on.
pub(super) fn choose(mut candidates: Vec<Candidate>, limits: Limits, previous: &[Member]) -> Vec<Candidate> {
    let hosts: HashSet<&str> = previous.iter().map(|member| member.hostname.as_str()).collect();
    let names: HashSet<&str> = previous
        .iter()
        .map(|member| member.incarnation.as_str())
        .collect();
    candidates.sort_by_cached_key(|c| {
        let by_host = hosts.contains(c.hostname.as_str());
        let by_name = names.contains(c.incarnation.as_str());
        (c.asked.is_none(), !by_name, !by_host, c.arrival)
    });
    let workers: Vec<u32> = candidates.iter().map(|c| c.workers).collect();
    if let Some(picked) = limits.pick(&workers) {
        return picked.into_iter().map(|i| candidates[i].clone()).collect();
    }
    candidates.truncate(limits.max);
    candidates
}

/// The candidates in order of their node rank, and the reason in words.
///
/// Ranks that were asked for come first, then a node keeps the rank of the last generation (itself, or its
/// host), then the natural order of host names fills the rest, then arrival.
pub(super) fn order(candidates: Vec<Candidate>, previous: &[Member]) -> (Vec<Candidate>, String) {
    let count = candidates.len();
    let mut slots: Vec<Option<Candidate>> = vec![None; count];
    let mut rest = Vec::new();
    let mut asked = 0;
    for candidate in candidates {
        match candidate.asked.map(|rank| rank as usize) {
            Some(rank) if rank < count && slots[rank].is_none() => {
                slots[rank] = Some(candidate);
                asked += 1;
            }
            _ => rest.push(candidate),
        }
    }

    let mut kept = 0;
    // The last in each list has arrived first.
    rest.sort_by_key(|c| Reverse(c.arrival));
    let mut keep = |rest: Vec<Candidate>, of: Key, of_member: fn(&Member) -> &str| {
        let (free, mut rest): (Vec<_>, Vec<_>) = rest.into_iter().partition(|c| c.asked.is_none());
        let mut free = by_key(free, of);
        for (slot, member) in slots.iter_mut().zip(previous) {
            if slot.is_none()
                && let Some(found) = free.get_mut(of_member(member)).and_then(Vec::pop)
            {
                *slot = Some(found);
                kept += 1;
            }
        }
        rest.extend(free.into_values().flatten());
        rest.sort_by_key(|c| Reverse(c.arrival));
        rest
    };
    let rest = keep(rest, |c| &c.incarnation, |member| &member.incarnation);
    let mut rest = keep(rest, |c| &c.hostname, |member| &member.hostname);

    // A rank that was asked for but does not exist in a smaller job still decides the order.
    rest.sort_by(|a, b| {
        let by_asked = (a.asked.is_none(), a.asked).cmp(&(b.asked.is_none(), b.asked));
        by_asked
            .then_with(|| natural(&a.hostname, &b.hostname))
            .then(a.arrival.cmp(&b.arrival))
    });
    let filled = rest.len();
    let mut rest = rest.into_iter();
    let ordered: Vec<_> = slots
        .into_iter()
        .filter_map(|slot| slot.or_else(|| rest.next()))
        .collect();
    let mut ways = vec![
        (asked, "as requested"),
        (kept, "kept from before"),
        (filled, "by host name"),
    ];
    ways.retain(|(n, _)| *n > 0);
    let reason = if let [(_, all)] = ways[..] {
        format!("node ranks {all}")
    } else {
        let each: Vec<_> = ways.iter().map(|(n, words)| format!("{n} {words}")).collect();
        format!("node ranks: {}", each.join(", "))
    };
    (ordered, reason)
}

/// Key that identifies a candidate.
type Key = fn(&Candidate) -> &str;

fn by_key(candidates: Vec<Candidate>, key: Key) -> HashMap<String, Vec<Candidate>> {
    let mut found: HashMap<String, Vec<Candidate>> = HashMap::with_capacity(candidates.len());
    for candidate in candidates {
        found
            .entry(key(&candidate).to_owned())
            .or_default()
            .push(candidate);
    }
    found
}

/// Ranks below `count` that no candidate asked for, if any rank was asked for at all.
pub(super) fn missing_ranks(candidates: &[Candidate], count: u32) -> Vec<u32> {
    let asked: BTreeSet<u32> = candidates.iter().filter_map(|c| c.asked).collect();
    if asked.is_empty() || asked.len() != candidates.len() {
        return Vec::new();
    }
    (0..count).filter(|rank| !asked.contains(rank)).collect()
}

/// Compares as people count: `node2` before `node10`.
pub(super) fn natural(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a, b);
    while !left.is_empty() && !right.is_empty() {
        let (l, l_rest) = run(left);
        let (r, r_rest) = run(right);
        let both_numbers = l.as_bytes()[0].is_ascii_digit() && r.as_bytes()[0].is_ascii_digit();
        let by_run = if both_numbers {
            let (l, r) = (l.trim_start_matches('0'), r.trim_start_matches('0'));
            l.len().cmp(&r.len()).then_with(|| l.cmp(r))
        } else {
            l.cmp(r)
        };
        if by_run.is_ne() {
            return by_run;
        }
        (left, right) = (l_rest, r_rest);
    }
    left.len().cmp(&right.len()).then_with(|| a.cmp(b))
}

/// Splits off the first run of digits or of other characters.
fn run(text: &str) -> (&str, &str) {
    let digits = text.as_bytes()[0].is_ascii_digit();
    let end = text
        .find(|c: char| c.is_ascii_digit() != digits)
        .unwrap_or(text.len());
    text.split_at(end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::size::RankLimits;

    fn node(incarnation: &str, hostname: &str, asked: Option<u32>, arrival: u64) -> Candidate {
        Candidate {
            incarnation: incarnation.into(),
            hostname: hostname.into(),
            asked,
            arrival,
            workers: 2,
        }
    }

    fn member(incarnation: &str, hostname: &str) -> Member {
        Member {
            incarnation: incarnation.into(),
            hostname: hostname.into(),
            has_left: false,
        }
    }

    fn hosts(nodes: Vec<Candidate>, previous: &[Member]) -> Vec<String> {
        order(nodes, previous)
            .0
            .into_iter()
            .map(|c| c.incarnation)
            .collect()
    }

    #[test]
    fn host_names_are_compared_as_people_count() {
        let mut names = [
            "node10", "node2", "b", "node02", "node", "node2x", "a10", "a9", "",
        ];
        names.sort_by(|a, b| natural(a, b));
        assert_eq!(
            names,
            [
                "", "a9", "a10", "b", "node", "node02", "node2", "node2x", "node10"
            ]
        );
    }

    #[test]
    fn host_names_decide_then_arrival() {
        let nodes = vec![
            node("x", "n10", None, 0),
            node("y", "n2", None, 2),
            node("z", "n2", None, 1),
        ];
        assert_eq!(hosts(nodes, &[]), ["z", "y", "x"]);
    }

    #[test]
    fn a_rank_that_was_asked_for_comes_before_names_and_history() {
        let nodes = vec![
            node("x", "a", None, 0),
            node("y", "b", Some(0), 1),
            node("z", "c", Some(2), 2),
        ];
        let (ordered, reason) = order(nodes, &[member("x", "a")]);
        let names: Vec<_> = ordered.iter().map(|c| c.incarnation.as_str()).collect();
        assert_eq!(names, ["y", "x", "z"]);
        assert_eq!(reason, "node ranks: 2 as requested, 1 by host name");
    }

    #[test]
    fn ranks_are_sticky_by_process_then_by_host() {
        let previous = [member("p", "b"), member("q", "a"), member("r", "c")];
        let nodes = vec![
            node("q", "a", None, 1),
            node("p", "b", None, 0),
            node("new", "c", None, 9),
        ];
        assert_eq!(hosts(nodes, &previous), ["p", "q", "new"]);
        let replaced = vec![
            node("q", "a", None, 1),
            node("s", "0", None, 9),
            node("p", "b", None, 0),
        ];
        assert_eq!(
            hosts(replaced, &previous),
            ["p", "q", "s"],
            "a stranger takes the free rank"
        );
    }

    #[test]
    fn ranks_stay_dense_when_a_job_shrinks() {
        let previous = [member("p", "a"), member("q", "b"), member("r", "c")];
        assert_eq!(
            hosts(vec![node("r", "c", None, 2), node("q", "b", None, 1)], &previous),
            ["r", "q"]
        );
        let asked = vec![node("x", "a", Some(7), 0), node("y", "b", Some(3), 1)];
        assert_eq!(hosts(asked, &[]), ["y", "x"]);
    }

    #[test]
    fn too_many_nodes_are_cut_to_those_with_a_claim() {
        let nodes = vec![
            node("spare", "s", None, 0),
            node("new", "b", None, 3),
            node("old", "a", None, 2),
            node("asked", "z", Some(2), 9),
        ];
        let chosen = |max, divide| {
            let limits = Limits {
                min: 1,
                max,
                ranks: RankLimits {
                    divide,
                    multiple_of: None,
                },
            };
            let chosen = choose(nodes.clone(), limits, &[member("old", "a"), member("gone", "b")]);
            chosen.into_iter().map(|c| c.incarnation).collect::<Vec<_>>()
        };
        assert_eq!(chosen(3, None), ["asked", "old", "new"]);
        assert_eq!(chosen(4, Some(6)), ["asked", "old", "new"]);
        assert_eq!(chosen(4, Some(4)), ["asked", "old"]);
        assert_eq!(
            chosen(3, Some(5)),
            ["asked", "old", "new"],
            "none can, and they say why"
        );
    }

    #[test]
    fn missing_ranks_are_named_only_when_all_asked() {
        let nodes = [node("x", "a", Some(0), 0), node("y", "b", Some(2), 1)];
        assert_eq!(missing_ranks(&nodes, 4), [1, 3]);
        assert_eq!(missing_ranks(&[node("x", "a", None, 0)], 2), [0; 0]);
    }
}
