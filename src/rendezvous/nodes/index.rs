//! What a job asks of all of its nodes with each message, kept up to date node by node: no message looks at all nodes.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use super::deadlines::Deadlines;

/// What is counted of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent of each other")]
pub(in crate::rendezvous) struct Facts {
    /// Free for the next generation, and connected.
    pub(in crate::rendezvous) is_ready: bool,
    pub(in crate::rendezvous) is_connected: bool,
    /// Workers of an ended generation may still run there.
    pub(in crate::rendezvous) is_stopping: bool,
    /// Not connected, or silent beyond its lease.
    pub(in crate::rendezvous) is_away: bool,
    /// `--node-rank`.
    pub(in crate::rendezvous) asked: Option<u32>,
    /// `Join.last_call_ms`.
    pub(in crate::rendezvous) last_call_ms: u32,
    pub(in crate::rendezvous) lease_until: Duration,
}

impl Facts {
    /// Nothing changes but when the lease ends.
    fn is_but_for_the_lease(self, after: Self) -> bool {
        let lease_until = after.lease_until;
        Self { lease_until, ..self } == after
    }
}

/// The nodes of one job by what is known of them, and the members of its last generation.
#[derive(Debug, Default)]
pub(in crate::rendezvous) struct NodeIndex {
    ready: BTreeSet<String>,
    away: BTreeSet<String>,
    /// Ready, and no members.
    spares: BTreeSet<String>,
    asked: BTreeSet<(u32, String)>,
    connected: usize,
    stopping: usize,
    /// How many nodes say so.
    last_calls: BTreeMap<u32, usize>,
    leases: Deadlines,
    /// Node rank of each member.
    ranks: HashMap<String, u32>,
    /// Members that left for good.
    left: HashSet<String>,
    /// Ready members that have not left.
    ready_members: usize,
}

impl NodeIndex {
    /// A node came (`before` is none), went (`after` is none), or changed.
    pub(in crate::rendezvous) fn update(
        &mut self,
        incarnation: &str,
        before: Option<Facts>,
        after: Option<Facts>,
    ) {
        self.leases
            .note(incarnation, after.map(|facts| facts.lease_until));
        if let (Some(before), Some(after)) = (before, after)
            && before.is_but_for_the_lease(after)
        {
            // A heartbeat.
            return;
        }
        let flag = |read: fn(&Facts) -> bool| {
            let is = |facts: &Option<Facts>| facts.as_ref().is_some_and(read);
            (is(&before), is(&after))
        };
        let ready = flag(|facts| facts.is_ready);
        put(&mut self.ready, incarnation, ready);
        put(&mut self.away, incarnation, flag(|facts| facts.is_away));
        count(&mut self.connected, flag(|facts| facts.is_connected));
        count(&mut self.stopping, flag(|facts| facts.is_stopping));
        if !self.ranks.contains_key(incarnation) {
            put(&mut self.spares, incarnation, ready);
        } else if !self.left.contains(incarnation) {
            count(&mut self.ready_members, ready);
        }
        let (was, is) = (before.and_then(|f| f.asked), after.and_then(|f| f.asked));
        if was != is {
            if let Some(was) = was {
                self.asked.remove(&(was, incarnation.to_owned()));
            }
            self.asked.extend(is.map(|is| (is, incarnation.to_owned())));
        }
        let (was, is) = (before.map(|f| f.last_call_ms), after.map(|f| f.last_call_ms));
        if was != is {
            if let Some(was) = was
                && let Some(nodes) = self.last_calls.get_mut(&was)
            {
                *nodes -= 1;
                if *nodes == 0 {
                    self.last_calls.remove(&was);
                }
            }
            if let Some(is) = is {
                *self.last_calls.entry(is).or_default() += 1;
            }
        }
    }

    /// These are the members from now on, in order of their ranks, and none of them has left.
    pub(in crate::rendezvous) fn set_members<'a>(&mut self, members: impl Iterator<Item = &'a str>) {
        self.left.clear();
        self.ranks.clear();
        for (member, rank) in members.zip(0..) {
            self.ranks.entry(member.to_owned()).or_insert(rank);
        }
        let (members, spares) = self
            .ready
            .iter()
            .cloned()
            .partition(|node| self.ranks.contains_key(node));
        let members: Vec<String> = members;
        (self.ready_members, self.spares) = (members.len(), BTreeSet::from_iter::<Vec<String>>(spares));
    }

    /// A member left for good.
    pub(in crate::rendezvous) fn mark_left(&mut self, incarnation: &str) {
        if self.ranks.contains_key(incarnation)
            && self.left.insert(incarnation.to_owned())
            && self.ready.contains(incarnation)
        {
            self.ready_members -= 1;
        }
    }

    pub(in crate::rendezvous) fn rank_of(&self, incarnation: &str) -> Option<u32> {
        self.ranks.get(incarnation).copied()
    }

    /// All members are ready but those that left, and there are members.
    pub(in crate::rendezvous) fn are_members_ready(&self) -> bool {
        !self.ranks.is_empty() && self.ready_members == self.ranks.len() - self.left.len()
    }

    pub(in crate::rendezvous) fn ready(&self) -> &BTreeSet<String> {
        &self.ready
    }

    pub(in crate::rendezvous) fn away(&self) -> &BTreeSet<String> {
        &self.away
    }

    pub(in crate::rendezvous) fn spares(&self) -> &BTreeSet<String> {
        &self.spares
    }

    pub(in crate::rendezvous) fn connected(&self) -> usize {
        self.connected
    }

    pub(in crate::rendezvous) fn has_stopping(&self) -> bool {
        self.stopping > 0
    }

    /// The first of the other nodes that asked for this rank.
    pub(in crate::rendezvous) fn other_with_rank(&self, rank: u32, incarnation: &str) -> Option<&str> {
        let from = self.asked.range((rank, String::new())..);
        let same = from.take_while(|(asked, _)| *asked == rank);
        same.map(|(_, node)| node.as_str())
            .find(|node| *node != incarnation)
    }

    /// The largest `last_call_ms`.
    pub(in crate::rendezvous) fn last_call_ms(&self) -> Option<u32> {
        self.last_calls.keys().next_back().copied()
    }

    /// No lease ends before; it may be early.
    pub(in crate::rendezvous) fn next_lease(&self) -> Option<Duration> {
        self.leases.next()
    }

    /// Nodes whose leases have ended, in order of their names: each of them is to be changed or to go now. `lease_of` is
    /// when that of a node ends.
    pub(in crate::rendezvous) fn expired(
        &mut self,
        now: Duration,
        slack: Duration,
        lease_of: impl Fn(&str) -> Option<Duration>,
    ) -> Vec<String> {
        self.leases.expired(now, slack, lease_of)
    }
}

fn put(set: &mut BTreeSet<String>, incarnation: &str, (was, is): (bool, bool)) {
    match (was, is) {
        (false, true) => {
            set.insert(incarnation.to_owned());
        }
        (true, false) => {
            set.remove(incarnation);
        }
        _ => {}
    }
}

fn count(counter: &mut usize, (was, is): (bool, bool)) {
    *counter = *counter + usize::from(is) - usize::from(was);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Nodes, of which everything is found by looking at all of them.
    #[derive(Debug, Default)]
    struct Naive {
        nodes: BTreeMap<String, Facts>,
        members: Vec<String>,
        left: BTreeSet<String>,
    }

    impl Naive {
        fn names(&self, wanted: impl Fn(&String, &Facts) -> bool) -> BTreeSet<String> {
            let nodes = self.nodes.iter().filter(|(name, facts)| wanted(name, facts));
            nodes.map(|(name, _)| name.clone()).collect()
        }

        fn check(&self, index: &NodeIndex) {
            let is_member = |name: &String| self.members.contains(name);
            assert_eq!(*index.ready(), self.names(|_, facts| facts.is_ready));
            assert_eq!(*index.away(), self.names(|_, facts| facts.is_away));
            assert_eq!(
                *index.spares(),
                self.names(|name, facts| facts.is_ready && !is_member(name))
            );
            assert_eq!(index.connected(), self.names(|_, facts| facts.is_connected).len());
            assert_eq!(
                index.has_stopping(),
                self.nodes.values().any(|facts| facts.is_stopping)
            );
            assert_eq!(
                index.last_call_ms(),
                self.nodes.values().map(|facts| facts.last_call_ms).max()
            );
            let mut expected = self.members.iter().filter(|name| !self.left.contains(*name));
            let is_back = |name: &String| self.nodes.get(name).is_some_and(|facts| facts.is_ready);
            assert_eq!(
                index.are_members_ready(),
                !self.members.is_empty() && expected.all(is_back)
            );
            for name in self.nodes.keys() {
                let rank = self.members.iter().position(|member| member == name);
                assert_eq!(index.rank_of(name), rank.map(|rank| rank as u32));
                for rank in 0..3 {
                    let others = self.names(|other, facts| other != name && facts.asked == Some(rank));
                    assert_eq!(
                        index.other_with_rank(rank, name),
                        others.first().map(String::as_str)
                    );
                }
            }
            let earliest = self.nodes.values().map(|facts| facts.lease_until).min();
            assert!(index.next_lease() <= earliest && index.next_lease().is_some() == earliest.is_some());
        }
    }

    fn facts() -> impl Strategy<Value = Facts> {
        let flags = any::<(bool, bool, bool, bool)>();
        (flags, proptest::option::of(0_u32..3), 0_u32..3, 0_u64..20).prop_map(
            |((is_ready, is_connected, is_stopping, is_away), asked, last_call_ms, lease)| Facts {
                is_ready,
                is_connected,
                is_stopping,
                is_away,
                asked,
                last_call_ms,
                lease_until: Duration::from_secs(lease),
            },
        )
    }

    #[derive(Clone, Debug)]
    enum Step {
        Set(usize, Option<Facts>),
        Assign(Vec<usize>),
        Left(usize),
        Expire(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            8 => (0_usize..6, proptest::option::of(facts())).prop_map(|(node, facts)| Step::Set(node, facts)),
            1 => Just((0..6).collect::<Vec<_>>()).prop_shuffle().prop_flat_map(|order| {
                (0..=order.len()).prop_map(move |count| Step::Assign(order[..count].to_vec()))
            }),
            1 => (0_usize..6).prop_map(Step::Left),
            2 => (0_u64..20).prop_map(Step::Expire),
        ];
        proptest::collection::vec(step, 1..60)
    }

    proptest! {
        #[test]
        fn the_index_knows_what_a_look_at_all_nodes_shows(steps in steps()) {
            let (mut index, mut naive) = (NodeIndex::default(), Naive::default());
            let name = |node: usize| format!("n{node}");
            for step in steps {
                match step {
                    Step::Set(node, after) => {
                        let name = name(node);
                        let before = match after {
                            Some(after) => naive.nodes.insert(name.clone(), after),
                            None => naive.nodes.remove(&name),
                        };
                        index.update(&name, before, after);
                    }
                    Step::Assign(members) => {
                        naive.members = members.into_iter().map(name).collect();
                        naive.left.clear();
                        index.set_members(naive.members.iter().map(String::as_str));
                    }
                    Step::Left(node) => {
                        index.mark_left(&name(node));
                        if naive.members.contains(&name(node)) {
                            naive.left.insert(name(node));
                        }
                    }
                    Step::Expire(now) => {
                        let now = Duration::from_secs(now);
                        let lease_of = |name: &str| naive.nodes.get(name).map(|facts| facts.lease_until);
                        let expired = index.expired(now, 2 * SECOND, lease_of);
                        let expected = naive.names(|_, facts| facts.lease_until <= now);
                        prop_assert!(expired.iter().eq(&expected));
                        for name in expired {
                            let facts = naive.nodes.get(&name).copied();
                            index.update(&name, facts, facts);
                        }
                    }
                }
                naive.check(&index);
            }
        }
    }
}
