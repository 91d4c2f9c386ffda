//! In what two nodes of one job differ, in words.
//!
//! A node describes its job in lines `key: value`. After an empty line follows what says less: it may differ where the
//! lines before it say why already, or rightly, and is named only if nothing else differs.

use ddp_proto::rendezvous::Join;

use super::config::DEFAULT_JOB_ID;
use super::kv::clip;
use super::words;

/// Most differences that are named one by one.
const MAX_NAMED: usize = 8;
/// Longest part of a value that is quoted.
const QUOTE_BYTES: usize = 160;
/// What is quoted before the place where two long values begin to differ.
const CONTEXT_BYTES: usize = 40;

/// What two nodes of one job disagree on; none if they agree.
pub(super) fn disagreement(job: &str, first: &Join, second: &Join) -> Option<String> {
    let nodes = Pair::of([first, second], ["joined earlier", "joined later"]);
    let what = match cut(nodes.disagreeing()?) {
        several if several.len() > 1 => format!("\n  {}", several.join("\n  ")),
        one => format!(" {}", one.concat()),
    };
    let or_two_jobs = if job == DEFAULT_JOB_ID {
        ", or give each job its own `--rdzv-id`"
    } else {
        ""
    };
    let of_one_machine = if first.hostname == second.hostname {
        "; a launcher of an earlier start may still run on that node"
    } else {
        ""
    };
    Some(format!(
        "nodes disagree on job `{job}`:{what}\n  \
         hint: start every node with the same target, configuration and flags{or_two_jobs}{of_one_machine}"
    ))
}

/// In what two jobs without a name differ, in one line.
pub(super) fn between_jobs(here: &Join, there: &Join) -> String {
    let nodes = Pair::of([here, there], ["this job", "the other job"]);
    let differences = nodes.disagreeing().unwrap_or_else(|| nodes.described());
    cut(differences).join("; ")
}

/// Two nodes, and what they are called: "node `a`". On one machine names do not tell them apart, so there they have the
/// ranks that they ask for, or their `roles`.
struct Pair<'a> {
    joins: [&'a Join; 2],
    called: [String; 2],
}

impl<'a> Pair<'a> {
    fn of(joins: [&'a Join; 2], roles: [&str; 2]) -> Self {
        let [first, second] = joins;
        let called = if first.hostname != second.hostname {
            joins.map(|join| words::node(&join.hostname, None))
        } else if first.node_rank != second.node_rank {
            joins.map(|join| words::node(&join.hostname, join.node_rank))
        } else {
            roles.map(|role| format!("{} ({role})", words::node(&first.hostname, None)))
        };
        Self { joins, called }
    }

    /// One line each, at least one; none if the two agree.
    fn disagreeing(&self) -> Option<Vec<String>> {
        let [first, second] = self.joins;
        let nnodes = |join: &Join| match (join.min_nodes, join.max_nodes) {
            (min, max) if min == max => min.to_string(),
            (min, max) => format!("{min}:{max}"),
        };
        let restarts = |join: &Join| join.max_restarts.to_string();
        let mut lines = Vec::new();
        for (flag, x, y) in [
            ("--nnodes", nnodes(first), nnodes(second)),
            ("--max-restarts", restarts(first), restarts(second)),
        ] {
            if x != y {
                lines.push(self.line(flag, [Some(&x), Some(&y)]));
            }
        }
        // The flags are part of the signature: they alone may be what makes it another.
        if first.job_signature != second.job_signature {
            let [fine, _] = self.parts();
            lines.extend(fine);
            if lines.is_empty() {
                lines = self.described();
            }
        }
        (!lines.is_empty()).then_some(lines)
    }

    /// The differences of two descriptions, the finer ones if there are some. One line each, at least one.
    fn described(&self) -> Vec<String> {
        let [fine, coarse] = self.parts();
        let lines = if fine.is_empty() { coarse } else { fine };
        if !lines.is_empty() {
            return lines;
        }
        let ([first, second], [a, b]) = (self.joins, &self.called);
        let (x, y) = (clip(&first.job_signature, 16), clip(&second.job_signature, 16));
        vec![format!(
            "{a} and {b} describe the job identically, but their signatures differ (`{x}`, `{y}`)"
        )]
    }

    /// The differences before the empty line, and those after it.
    fn parts(&self) -> [Vec<String>; 2] {
        if let Some(words) = self.of_two_builds() {
            return [vec![words], Vec::new()];
        }
        let halves = |join: &Join| -> [Vec<(String, String)>; 2] {
            let (fine, coarse) = join
                .job_description
                .split_once("\n\n")
                .unwrap_or((&join.job_description, ""));
            [fine, coarse].map(|half| half.lines().map(entry).collect())
        };
        let ([a_fine, a_coarse], [b_fine, b_coarse]) = (halves(self.joins[0]), halves(self.joins[1]));
        let differing = |a: &[(String, String)], b: &[(String, String)]| {
            let of = |entries: &[(String, String)], key: &str| {
                let found = entries.iter().find(|(known, _)| known == key);
                found.map(|(_, value)| value.clone())
            };
            let only_b = b.iter().filter(|(key, _)| of(a, key).is_none());
            let keys = a.iter().chain(only_b).map(|(key, _)| key);
            keys.filter_map(|key| {
                let (x, y) = (of(a, key), of(b, key));
                (x != y).then(|| self.line(key, [x.as_deref(), y.as_deref()]))
            })
            .collect()
        };
        [differing(&a_fine, &b_fine), differing(&a_coarse, &b_coarse)]
    }

    /// What can be said where only one of the two describes its job by keys; an earlier build does not.
    fn of_two_builds(&self) -> Option<String> {
        let [x, y] = self.joins.map(|join| join.job_description.as_str());
        let has_keys = |text: &str| text.lines().next().is_some_and(|line| line.contains(": "));
        if x.is_empty() || y.is_empty() || has_keys(x) == has_keys(y) {
            return None;
        }
        let [a, b] = &self.called;
        let in_one_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let (x, y) = (in_one_line(x), in_one_line(y));
        Some(format!(
            "{a} and {b} run different builds of ddp-run, and describe their job as `{}` and `{}`",
            clip(&x, QUOTE_BYTES),
            clip(&y, QUOTE_BYTES)
        ))
    }

    /// "`train.seed` is `1` on node `a`, `2` on node `b`".
    fn line(&self, key: &str, values: [Option<&str>; 2]) -> String {
        let skipped = match values {
            [Some(x), Some(y)] => shared(x, y),
            _ => 0,
        };
        let quoted = values.map(|value| match value {
            None => "not set".to_owned(),
            Some(value) if skipped == 0 => format!("`{}`", clip(value, QUOTE_BYTES)),
            Some(value) => format!("`…{}`", clip(&value[skipped..], QUOTE_BYTES)),
        });
        let [x, y] = quoted;
        let [a, b] = &self.called;
        format!("`{}` is {x} on {a}, {y} on {b}", clip(key, QUOTE_BYTES))
    }
}

/// Agents of earlier builds describe their job without keys.
fn entry(line: &str) -> (String, String) {
    let (key, value) = line.split_once(": ").unwrap_or(("the job", line));
    (key.to_owned(), value.to_owned())
}

/// Bytes at the beginning of both values that need not be quoted, since they are the same; 0 if the values differ
/// within what is quoted anyway.
fn shared(x: &str, y: &str) -> usize {
    let alike = x.bytes().zip(y.bytes()).take_while(|(x, y)| x == y).count();
    if alike + CONTEXT_BYTES <= QUOTE_BYTES {
        return 0;
    }
    let start = alike - CONTEXT_BYTES;
    // Both are the same up to here: a boundary of one is one of the other.
    (0..=start).rev().find(|&at| x.is_char_boundary(at)).unwrap_or(0)
}

fn cut(mut lines: Vec<String>) -> Vec<String> {
    let more = lines.len().saturating_sub(MAX_NAMED);
    if more > 0 {
        lines.truncate(MAX_NAMED);
        lines.push(format!("and {more} more"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join(hostname: &str, signature: &str, description: &str) -> Join {
        Join {
            hostname: hostname.into(),
            min_nodes: 2,
            max_nodes: 2,
            job_signature: signature.into(),
            job_description: description.into(),
            ..Join::default()
        }
    }

    #[test]
    fn a_disagreement_names_both_nodes_and_what_differs() {
        let a = join("a", "1234", "target: train.yaml\ntrain.seed: 1");
        let b = join("b", "5678", "target: train.yaml\ntrain.seed: 2");
        assert_eq!(disagreement("j", &a, &a), None);
        insta::assert_snapshot!(disagreement("j", &a, &b).unwrap(), @r"
        nodes disagree on job `j`: `train.seed` is `1` on node `a`, `2` on node `b`
          hint: start every node with the same target, configuration and flags
        ");
        let shorter = join("b", "5678", "target: train.yaml");
        insta::assert_snapshot!(disagreement("j", &a, &shorter).unwrap(), @r"
        nodes disagree on job `j`: `train.seed` is `1` on node `a`, not set on node `b`
          hint: start every node with the same target, configuration and flags
        ");
        let alike = join("b", "5678", &a.job_description);
        insta::assert_snapshot!(disagreement("j", &a, &alike).unwrap(), @r"
        nodes disagree on job `j`: node `a` and node `b` describe the job identically, but their signatures differ (`1234`, `5678`)
          hint: start every node with the same target, configuration and flags
        ");
    }

    #[test]
    fn all_that_differs_is_named_and_nothing_else() {
        let a = join(
            "a",
            "1234",
            "target: train.yaml\ntrain.seed: 1\ntrain.steps: 5\n\nconfiguration: abcd",
        );
        let mut b = join(
            "b",
            "5678",
            "target: train.yaml\ntrain.lr: 3\ntrain.seed: 2\ntrain.steps: 5\n\nconfiguration: ef01",
        );
        b.min_nodes = 1;
        b.max_restarts = 3;
        insta::assert_snapshot!(disagreement("j", &a, &b).unwrap(), @r"
        nodes disagree on job `j`:
          `--nnodes` is `2` on node `a`, `1:2` on node `b`
          `--max-restarts` is `0` on node `a`, `3` on node `b`
          `train.seed` is `1` on node `a`, `2` on node `b`
          `train.lr` is not set on node `a`, `3` on node `b`
          hint: start every node with the same target, configuration and flags
        ");
        insta::assert_snapshot!(between_jobs(&a, &b), @"`--nnodes` is `2` on node `a`, `1:2` on node `b`; `--max-restarts` is `0` on node `a`, `3` on node `b`; `train.seed` is `1` on node `a`, `2` on node `b`; `train.lr` is not set on node `a`, `3` on node `b`");
        b.job_description = String::new();
        b.job_signature.clone_from(&a.job_signature);
        insta::assert_snapshot!(disagreement("j", &a, &b).unwrap(), @r"
        nodes disagree on job `j`:
          `--nnodes` is `2` on node `a`, `1:2` on node `b`
          `--max-restarts` is `0` on node `a`, `3` on node `b`
          hint: start every node with the same target, configuration and flags
        ");
    }

    #[test]
    fn what_says_less_is_named_only_if_nothing_else_differs() {
        let a = join(
            "a",
            "1234",
            "target: t.yaml\ntrain.seed: 1\n\nconfiguration: abcd",
        );
        let b = join(
            "b",
            "5678",
            "target: t.yaml\ntrain.seed: 1\n\nconfiguration: ef01",
        );
        insta::assert_snapshot!(disagreement("j", &a, &b).unwrap(), @r"
        nodes disagree on job `j`: `configuration` is `abcd` on node `a`, `ef01` on node `b`
          hint: start every node with the same target, configuration and flags
        ");
        let folder =
            |node: &str, folder: &str| join(node, "1234", &format!("target: t.py\n\narguments: {folder}"));
        let (a, b) = (folder("a", "/a"), folder("b", "/b"));
        assert_eq!(disagreement("j", &a, &b), None, "arguments may differ");
        insta::assert_snapshot!(between_jobs(&a, &b), @"`arguments` is `/a` on node `a`, `/b` on node `b`");
    }

    #[test]
    fn nodes_of_one_name_are_told_apart_by_the_ranks_that_they_ask_for() {
        let of = |rank: u32, seed: u32| Join {
            node_rank: Some(rank),
            ..join("a", &seed.to_string(), &format!("train.seed: {seed}"))
        };
        insta::assert_snapshot!(between_jobs(&of(0, 1), &of(1, 2)), @"`train.seed` is `1` on node `a` (node rank 0), `2` on node `a` (node rank 1)");
        let unranked = |seed: u32| join("a", &seed.to_string(), &format!("train.seed: {seed}"));
        let (one, other) = (unranked(1), unranked(2));
        insta::assert_snapshot!(between_jobs(&one, &other), @"`train.seed` is `1` on node `a` (this job), `2` on node `a` (the other job)");
        insta::assert_snapshot!(disagreement("j", &one, &other).unwrap(), @r"
        nodes disagree on job `j`: `train.seed` is `1` on node `a` (joined earlier), `2` on node `a` (joined later)
          hint: start every node with the same target, configuration and flags; a launcher of an earlier start may still run on that node
        ");
    }

    #[test]
    fn a_node_of_an_earlier_build_is_not_said_to_lack_every_key() {
        let a = join("a", "1234", "target `t.yaml`, configuration 5c86c9ef (4 bytes)");
        let b = join("b", "5678", "target: t.yaml\ntrain.seed: 1\n\n--set: a=1");
        insta::assert_snapshot!(between_jobs(&a, &b), @"node `a` and node `b` run different builds of ddp-run, and describe their job as `target `t.yaml`, configuration 5c86c9ef (4 bytes)` and `target: t.yaml train.seed: 1 --set: a=1`");
        insta::assert_snapshot!(between_jobs(&a, &join("b", "5678", "target `u.yaml`")), @"`the job` is `target `t.yaml`, configuration 5c86c9ef (4 bytes)` on node `a`, `target `u.yaml`` on node `b`");
    }

    #[test]
    fn long_values_are_quoted_where_they_differ() {
        let of = |node: &str, end: &str| join(node, end, &format!("data.train: {}{end}", "é".repeat(150)));
        insta::assert_snapshot!(between_jobs(&of("a", "x"), &of("b", "y")), @"`data.train` is `…ééééééééééééééééééééx` on node `a`, `…ééééééééééééééééééééy` on node `b`");
    }

    #[test]
    fn many_differences_are_counted() {
        let of = |node: &str, value: &str| {
            let lines: Vec<String> = (0..20).map(|key| format!("k{key}: {value}")).collect();
            join(node, value, &lines.join("\n"))
        };
        let words = disagreement("j", &of("a", "1"), &of("b", "2")).unwrap();
        assert!(words.contains("`k7` is") && !words.contains("`k8` is"), "{words}");
        assert!(words.contains("\n  and 12 more\n  hint: "), "{words}");
    }
}
