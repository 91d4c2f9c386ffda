//! Ranks that a filter or a redirection names and that no worker of this node has: mostly a mistake in counting.

use std::collections::BTreeSet;

use ddp_launcher::{OutputPlan, StreamsByRank};
use ddp_proto::words::{counted, numbered};

/// Says, in a line for each flag, which of its ranks there are not. With several nodes the ranks of the job are unknown
/// before they have met: their numbers of workers may differ.
pub fn words_on_absent_ranks(output: &OutputPlan, workers: u32, alone: bool) -> Vec<String> {
    let listed = |streams: &StreamsByRank| match streams {
        StreamsByRank::All(_) => BTreeSet::new(),
        StreamsByRank::Listed(sets) => sets.keys().copied().collect(),
    };
    let local = |ranks: &Option<BTreeSet<u32>>| ranks.clone().unwrap_or_default();
    let global = local(&output.global_ranks);
    let flags = [
        ("--local-ranks-filter", "local rank", local(&output.local_ranks)),
        (
            "--global-ranks-filter",
            "rank",
            if alone { global } else { BTreeSet::new() },
        ),
        ("--redirects", "local rank", listed(&output.redirects)),
        ("--tee", "local rank", listed(&output.tee)),
    ];
    let words = |(flag, what, ranks): &(&str, &str, BTreeSet<u32>)| {
        let absent: Vec<u32> = ranks.range(workers..).copied().collect();
        (!absent.is_empty()).then(|| {
            format!(
                "`{flag}` names {}, but this node has {}, counted from 0",
                numbered(what, &absent),
                counted(workers, "worker")
            )
        })
    };
    flags.iter().filter_map(words).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ddp_launcher::StreamSet;

    use super::*;

    #[test]
    fn ranks_that_are_not_there_are_named() {
        let both = StreamSet {
            stdout: true,
            stderr: true,
        };
        let output = OutputPlan {
            redirects: StreamsByRank::Listed(BTreeMap::from([(0, both), (7, both)])),
            tee: StreamsByRank::All(both),
            local_ranks: Some(BTreeSet::from([1, 5, 6])),
            global_ranks: Some(BTreeSet::from([2])),
            ..OutputPlan::default()
        };
        insta::assert_snapshot!(words_on_absent_ranks(&output, 2, true).join("\n"), @r"
        `--local-ranks-filter` names local ranks 5, 6, but this node has 2 workers, counted from 0
        `--global-ranks-filter` names rank 2, but this node has 2 workers, counted from 0
        `--redirects` names local rank 7, but this node has 2 workers, counted from 0
        ");
        assert_eq!(words_on_absent_ranks(&output, 8, true), [""; 0]);
        assert_eq!(words_on_absent_ranks(&output, 2, false).len(), 2);
    }
}
