//! What the stores of all jobs take together, and how much of it one owner of jobs may have.
//!
//! At a daemon of several users, jobs belong to the address from which their first node has come. Tokens tell no owners
//! apart: each job registers its own, and anybody can make as many as they like.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};

use prost::bytes::Bytes;

use super::config::{Callers, Config, KvLimits};
use super::event::KvError;

/// Whose job it is; none where all jobs are of one user.
pub(super) type Owner = Option<IpAddr>;

/// What there is for all has so many parts, and one owner may have one of them.
const PARTS: usize = 4;
/// What an answer takes besides its entries, while it is on its way.
const ANSWER_BYTES: usize = 16 << 10;

/// How much one owner may have of what there is for all.
pub(super) fn part_of(all: usize) -> usize {
    (all / PARTS).max(1)
}

/// What counts as one address: a host with IPv6 has a whole /64 of them.
pub(in crate::rendezvous) fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64)).into(),
        address @ IpAddr::V4(_) => address,
    }
}

/// To whom a job belongs whose first node comes from this address.
pub(super) fn owner_of(config: &Config, from: IpAddr) -> Owner {
    (config.callers == Callers::OfJobs).then(|| network_of(from))
}

/// Where the first is of the owner that has most.
pub(super) fn first_of_largest(owners: &[Owner]) -> Option<usize> {
    let mut counts: HashMap<Owner, usize> = HashMap::new();
    for owner in owners {
        *counts.entry(*owner).or_default() += 1;
    }
    let most = counts.values().max()?;
    owners.iter().position(|owner| counts.get(owner) == Some(most))
}

/// What a store takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) entries: usize,
    pub(super) bytes: usize,
    /// Reads that wait.
    pub(super) waiters: usize,
}

impl Load {
    /// One read that waits.
    pub(super) const READ: Self = Self {
        entries: 0,
        bytes: 0,
        waiters: 1,
    };

    fn plus(self, more: Self) -> Self {
        Self {
            entries: self.entries + more.entries,
            bytes: self.bytes + more.bytes,
            waiters: self.waiters + more.waiters,
        }
    }

    /// Whether there is room for `more`, where so much is allowed of each.
    fn takes(self, more: Self, allowed: impl Fn(usize) -> usize, limits: &KvLimits) -> bool {
        let sum = self.plus(more);
        let fits = |more: usize, sum: usize, all: usize| more == 0 || sum <= allowed(all);
        fits(more.entries, sum.entries, limits.entries_of_all)
            && fits(more.bytes, sum.bytes, limits.bytes_of_all)
            && fits(more.waiters, sum.waiters, limits.waiters_of_all)
    }
}

/// No less than all stores take.
#[derive(Debug, Default)]
pub(super) struct Shares {
    all: Load,
    of_owner: HashMap<IpAddr, Load>,
}

impl Shares {
    /// Why a store of this owner may not take so much more.
    pub(super) fn check(&self, limits: &KvLimits, owner: Owner, more: Load) -> Result<(), KvError> {
        if !self.all.takes(more, |all| all, limits) {
            return Err(KvError::TooMuch(format!(
                "the stores of this daemon are full ({})",
                in_words(self.all)
            )));
        }
        let own = owner.map(|owner| self.of_owner.get(&owner).copied().unwrap_or_default());
        match own.filter(|own| !own.takes(more, part_of, limits)) {
            None => Ok(()),
            Some(own) => Err(KvError::TooMuch(format!(
                "the stores of all jobs from this address have their part of this daemon's room ({})",
                in_words(own)
            ))),
        }
    }

    /// A store of this owner takes so much more.
    pub(super) fn add(&mut self, owner: Owner, more: Load) {
        self.all = self.all.plus(more);
        if let Some(owner) = owner {
            let own = self.of_owner.entry(owner).or_default();
            *own = own.plus(more);
        }
    }
}

fn in_words(load: Load) -> String {
    let Load {
        entries,
        bytes,
        waiters,
    } = load;
    format!("{entries} entries, {bytes} bytes, {waiters} waiting reads")
}

/// Answers to gathers that may still be on their way. Callers that ask for the same share one.
#[derive(Debug, Default)]
pub(super) struct Answers {
    sent: Vec<(Owner, Bytes)>,
    /// No less than they take.
    bytes: usize,
}

impl Answers {
    /// Whether another one may be made for a job of this owner. Those that have arrived are noticed when it seems not.
    pub(super) fn have_room(&mut self, limits: &KvLimits, owner: Owner) -> bool {
        let all = limits.answer_bytes_of_all;
        if self.bytes < part_of(all) {
            return true;
        }
        self.sent.retain(|(_, answer)| !answer.is_unique());
        self.bytes = self.sent.iter().map(|(_, answer)| size(answer)).sum();
        let own = self.sent.iter().filter(|(other, _)| *other == owner);
        let own: usize = own.map(|(_, answer)| size(answer)).sum();
        self.bytes < all && (owner.is_none() || own < part_of(all))
    }

    /// This one is about to be sent.
    pub(super) fn add(&mut self, owner: Owner, answer: Bytes) {
        // An empty one takes nothing, and never looks taken.
        if !answer.is_empty() {
            self.bytes += size(&answer);
            self.sent.push((owner, answer));
        }
    }
}

fn size(answer: &Bytes) -> usize {
    answer.len() + ANSWER_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Owner = Some(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST));

    fn limits() -> KvLimits {
        KvLimits {
            entries_of_all: 8,
            bytes_of_all: 80,
            waiters_of_all: 4,
            answer_bytes_of_all: 8 * ANSWER_BYTES,
            ..KvLimits::default()
        }
    }

    #[test]
    fn who_has_most_makes_room_first() {
        let [a, b] = [[192, 0, 2, 1], [192, 0, 2, 2]].map(|address| Some(IpAddr::from(address)));
        assert_eq!(first_of_largest(&[a, b, b, a, b]), Some(1));
        assert_eq!(first_of_largest(&[None, None]), Some(0));
        assert_eq!(first_of_largest(&[]), None);
    }

    #[test]
    fn one_owner_has_a_quarter_and_a_user_alone_has_all() {
        let limits = limits();
        let entry = Load {
            entries: 1,
            bytes: 10,
            waiters: 0,
        };
        for (owner, entries, reads) in [(HERE, 2, 1), (None, 8, 4)] {
            let mut shares = Shares::default();
            for (more, most) in [(entry, entries), (Load::READ, reads)] {
                for _ in 0..most {
                    shares.check(&limits, owner, more).unwrap();
                    shares.add(owner, more);
                }
                shares.check(&limits, owner, more).unwrap_err();
            }
            let other = Some([192, 0, 2, 1].into());
            assert_eq!(shares.check(&limits, other, entry).is_ok(), owner == HERE);
        }
    }

    #[test]
    fn answers_count_until_all_have_taken_them() {
        let limits = limits();
        let mut answers = Answers::default();
        let kept: Vec<Bytes> = (0..8_u8).map(|n| Bytes::from(vec![n])).collect();
        for answer in &kept[..2] {
            assert!(answers.have_room(&limits, HERE));
            answers.add(HERE, answer.clone());
        }
        assert!(!answers.have_room(&limits, HERE), "a quarter");
        for answer in &kept[2..] {
            assert!(answers.have_room(&limits, None));
            answers.add(None, answer.clone());
        }
        assert!(!answers.have_room(&limits, None), "all of it");
        drop(kept);
        assert!(answers.have_room(&limits, HERE));
        assert!(answers.sent.is_empty());
    }
}
