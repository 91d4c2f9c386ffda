//! The collective of a script in which a job hangs: which ranks wait in it, and which have not joined it.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use ddp_proto::rendezvous::{Collective, HungRank};
use ddp_proto::words::numbered;

/// Files that are not the user's.
const LIBRARIES: [&str; 3] = ["/site-packages/", "/lib/python", "<frozen "];

/// What the ranks' records show.
#[derive(Debug, Default)]
pub(super) struct HungCollective {
    /// A sentence, and a line for what each of the ranks does. Each ends with a line end.
    pub(super) words: String,
    /// The rank that has not joined and waits in no other group, if there is one only.
    pub(super) only_absent: Option<u32>,
}

type Entry<'a> = (&'a HungRank, &'a Collective);

/// Finds a process group in which ranks wait for a rank that has not joined, or that called another collective.
pub(super) fn find(hung: &[HungRank]) -> Option<HungCollective> {
    let mut groups: BTreeMap<&str, Vec<Entry<'_>>> = BTreeMap::new();
    for rank in hung {
        for collective in &rank.collectives {
            let entries = groups.entry(&collective.group).or_default();
            entries.push((rank, collective));
        }
    }
    let mut absences: Vec<_> = groups.values().filter_map(|entries| absence(entries)).collect();
    // In the others, a rank is absent because it waits in this one.
    let first = absences.iter().position(|found| found.only_absent.is_some());
    if let Some(first) = first.or((!absences.is_empty()).then_some(0)) {
        return Some(absences.swap_remove(first));
    }
    groups.values().find_map(|entries| mismatch(entries))
}

/// The ranks that wait in the group's oldest unfinished collective.
fn waiting<'a>(entries: &[Entry<'a>]) -> Vec<Entry<'a>> {
    let waits = || entries.iter().filter(|(_, collective)| !collective.done);
    let oldest = waits().map(|(_, collective)| collective.number).min();
    let of_oldest = waits().filter(|(_, collective)| Some(collective.number) == oldest);
    of_oldest.copied().collect()
}

fn absence(entries: &[Entry<'_>]) -> Option<HungCollective> {
    let waiting = waiting(entries);
    let (_, wanted) = waiting.first()?;
    let absent = entries.iter().filter(|(_, last)| last.number < wanted.number);
    let absent: Vec<&HungRank> = absent.map(|(rank, _)| *rank).collect();
    let waits_nowhere = |rank: &&HungRank| rank.collectives.iter().all(|last| last.done);
    let idle: Vec<&HungRank> = absent.iter().copied().filter(waits_nowhere).collect();
    let has = if absent.len() == 1 { "has" } else { "have" };
    let waits = if waiting.len() == 1 { "waits" } else { "wait" };
    let mut words = format!(
        "{} {has} not joined {} (#{} of group `{}`), in which {} {waits}{}\n",
        ranks(absent.iter().copied()),
        wanted.operation,
        wanted.number,
        wanted.group,
        ranks(waiting.iter().map(|(rank, _)| *rank)),
        place(idle.first().or(absent.first())?)
    );
    words.push_str(&table(entries));
    let only_absent = (idle.len() == 1).then(|| idle[0].rank);
    Some(HungCollective { words, only_absent })
}

fn mismatch(entries: &[Entry<'_>]) -> Option<HungCollective> {
    let waiting = waiting(entries);
    let (_, first) = waiting.first()?;
    let name = |collective: &Collective| collective.operation.split(" of ").next().map(str::to_owned);
    let differs = |(_, other): &Entry<'_>| name(other) != name(first);
    waiting.iter().any(differs).then(|| HungCollective {
        words: format!(
            "the ranks called different collectives as #{} of group `{}`\n{}",
            first.number,
            first.group,
            table(entries)
        ),
        only_absent: None,
    })
}

/// What each rank does; those that do the same share a line.
fn table(entries: &[Entry<'_>]) -> String {
    let mut lines: BTreeMap<String, Vec<&HungRank>> = BTreeMap::new();
    for (rank, collective) in entries {
        let (operation, number) = (&collective.operation, collective.number);
        let state = if collective.done { "finished" } else { "in" };
        let place = place_in_script(&rank.stack).map_or_else(String::new, |place| format!(", at {place}"));
        let step = rank.step;
        let line = format!("{state} {operation} (#{number}), after step {step}{place}");
        lines.entry(line).or_default().push(rank);
    }
    let mut words = String::new();
    for (line, of) in lines {
        let _ = writeln!(words, "  {}: {line}", ranks(of.into_iter()));
    }
    words
}

fn ranks<'a>(ranks: impl Iterator<Item = &'a HungRank>) -> String {
    let numbers: Vec<u32> = ranks.map(|rank| rank.rank).collect();
    numbered("rank", &numbers)
}

fn place(rank: &HungRank) -> String {
    match place_in_script(&rank.stack) {
        Some(place) => format!("; rank {} is at {place}", rank.rank),
        None if rank.stack.is_empty() => format!("; rank {} does not answer", rank.rank),
        None => String::new(),
    }
}

/// `train.py:41 in data`: the innermost frame of the stack that is not a library's, of lines `NAME at FILE:LINE: SOURCE`.
fn place_in_script(stack: &str) -> Option<String> {
    let own = |line: &&str| line.contains(" at ") && !LIBRARIES.iter().any(|library| line.contains(library));
    let (name, rest) = stack.lines().find(own)?.split_once(" at ")?;
    let place = rest.split(": ").next()?;
    Some(format!("{place} in {}", name.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: u32, place: &str, collectives: &[(&str, u64, &str, bool)]) -> HungRank {
        let collectives = collectives
            .iter()
            .map(|(group, number, operation, done)| Collective {
                group: (*group).into(),
                number: *number,
                operation: (*operation).into(),
                done: *done,
            });
        HungRank {
            rank,
            step: 11,
            lost: true,
            waits: false,
            stack: format!(
                "thread MainThread\n  wait at /usr/lib/python3.12/threading.py:355: waiter.acquire()\n  {place}"
            ),
            collectives: collectives.collect(),
        }
    }

    const REDUCE: &str = "all_reduce of Float[4, 1024]";
    const TRAIN: &str = "<module> at train.py:17: dist.all_reduce(gradients)";

    #[test]
    fn the_rank_that_has_not_joined_is_named_with_its_place() {
        let waits = |number| {
            rank(
                number,
                TRAIN,
                &[("default", 12, REDUCE, false), ("tp", 3, "broadcast", true)],
            )
        };
        let absent = rank(
            1,
            "data at train.py:8: queue.get()",
            &[("default", 11, REDUCE, true), ("tp", 3, "broadcast", true)],
        );
        let found = find(&[waits(0), absent, waits(2), waits(3)]).expect("a collective");
        assert_eq!(found.only_absent, Some(1));
        insta::assert_snapshot!(found.words, @r"
        rank 1 has not joined all_reduce of Float[4, 1024] (#12 of group `default`), in which ranks 0, 2, 3 wait; rank 1 is at train.py:8 in data
          rank 1: finished all_reduce of Float[4, 1024] (#11), after step 11, at train.py:8 in data
          ranks 0, 2, 3: in all_reduce of Float[4, 1024] (#12), after step 11, at train.py:17 in <module>
        ");
    }

    /// Ranks 0 and 1, 2 and 3 are groups of tensor parallelism; 0 and 2, 1 and 3 of data parallelism.
    #[test]
    fn a_rank_that_waits_in_another_group_is_not_the_cause() {
        let hung = [
            rank(0, TRAIN, &[("dp0", 5, REDUCE, false), ("tp0", 8, REDUCE, true)]),
            rank(1, TRAIN, &[("dp1", 5, REDUCE, false), ("tp0", 8, REDUCE, true)]),
            rank(2, TRAIN, &[("dp0", 4, REDUCE, true), ("tp1", 8, REDUCE, false)]),
            rank(3, TRAIN, &[("dp1", 4, REDUCE, true), ("tp1", 7, REDUCE, true)]),
        ];
        let found = find(&hung).expect("a collective");
        assert_eq!(found.only_absent, Some(3));
        assert!(
            found.words.starts_with("rank 3 has not joined"),
            "{}",
            found.words
        );
        assert_eq!(find(&hung[..3]).expect("a collective").only_absent, None);
    }

    #[test]
    fn ranks_that_call_different_collectives_are_compared() {
        let first = rank(0, TRAIN, &[("default", 12, REDUCE, false)]);
        let other = rank(
            1,
            "<module> at train.py:15: dist.barrier()",
            &[("default", 12, "barrier", false)],
        );
        let found = find(&[first.clone(), other]).expect("a collective");
        assert_eq!(found.only_absent, None);
        insta::assert_snapshot!(found.words, @r"
        the ranks called different collectives as #12 of group `default`
          rank 0: in all_reduce of Float[4, 1024] (#12), after step 11, at train.py:17 in <module>
          rank 1: in barrier (#12), after step 11, at train.py:15 in <module>
        ");
        let other_size = rank(1, TRAIN, &[("default", 12, "all_reduce of Float[2]", false)]);
        assert!(find(&[first.clone(), other_size]).is_none(), "sizes may differ");
        assert!(
            find(&[first, rank(1, "", &[])]).is_none(),
            "nothing is known of rank 1"
        );
    }

    #[test]
    fn a_rank_that_is_further_waits_for_nothing_in_an_older_collective() {
        let done = rank(0, TRAIN, &[("default", 12, REDUCE, true)]);
        let waits = rank(1, TRAIN, &[("default", 12, REDUCE, false)]);
        assert!(find(&[done, waits]).is_none());
    }
}
