//! The order of all failures, and the list of them in the verdict.

use ddp_proto::rendezvous::{Failures, JobOver, MAX_EXITS_OF_A_KIND};

use super::super::job::{MAX_KNOWN, MAX_LISTED, MAX_TAKEN};
use super::*;

const MS: Duration = Duration::from_millis(1);

/// Two nodes of two workers each, in their first generation.
fn two_nodes() -> Scene {
    let mut s = Scene::new();
    s.join("a", 2, 2).join("b", 2, 2);
    s.received("a");
    s.received("b");
    s
}

/// An exit after which there is no restart.
fn fatal(rank: u32, code: i32) -> WorkerExit {
    WorkerExit {
        permanent: true,
        ..exited(rank, code)
    }
}

fn follower(rank: u32, age: Duration) -> WorkerExit {
    WorkerExit {
        consequence: true,
        age_ns: age.as_nanos() as u64,
        ..exited(rank, 1)
    }
}

fn victim(rank: u32) -> WorkerExit {
    WorkerExit {
        stopped_with: Some(15),
        ..killed(rank, 15)
    }
}

fn stopped(exits: Vec<WorkerExit>) -> Body {
    Body::NodeStopped(NodeStopped {
        exits,
        ..NodeStopped::default()
    })
}

/// The verdict that the node has received since the last time, which is the last that it receives.
fn verdict(s: &mut Scene, node: &str) -> JobOver {
    let mut received = s.received(node);
    while received.last() == Some(&Received::Closed) {
        received.pop();
    }
    match received.pop() {
        Some(Received::Message(DaemonMessage {
            body: Some(Reply::JobOver(over)),
            ..
        })) => over,
        other => panic!("expected a verdict, not {other:?}"),
    }
}

/// The list of failures in that verdict.
fn list(s: &mut Scene, node: &str) -> Failures {
    verdict(s, node).failures.expect("something has failed")
}

fn lines(failures: &Failures) -> String {
    let line = |failure: &ddp_proto::rendezvous::Failure| {
        let what = match &failure.exit {
            Some(exit) => format!(
                "rank {} {:?}{}{}",
                exit.rank,
                exit.exit_code.or(exit.signal).unwrap_or_default(),
                if exit.consequence { ", a consequence" } else { "" },
                if exit.stopped_with.is_some() {
                    ", a victim"
                } else {
                    ""
                },
            ),
            None => failure.node_gone.clone(),
        };
        let is_in_order = failure.happened_ns <= failure.arrived_ns.cast_signed();
        assert!(is_in_order, "reported before it happened: {failure:?}");
        let (arrived, happened) = (failure.arrived_ns / 1_000_000, failure.happened_ns / 1_000_000);
        format!(
            "{}.`{}` {what}: happened {happened} ms, arrived {arrived} ms",
            failure.generation, failure.hostname
        )
    };
    let mut lines: Vec<String> = failures.failures.iter().map(line).collect();
    if failures.more_failures + failures.more_victims > 0 {
        lines.push(format!(
            "{} more failures, {} more victims",
            failures.more_failures, failures.more_victims
        ));
    }
    lines.join("\n")
}

#[test]
fn every_node_receives_what_is_known_at_the_verdict_and_no_more() {
    let mut s = two_nodes();
    s.now += SECOND;
    s.exit("a", 1, follower(0, 250 * MS));
    s.now += 100 * MS;
    let first = WorkerExit {
        age_ns: 300_000_000,
        ..fatal(2, 42)
    };
    s.exit("b", 1, first);
    for node in ["a", "b"] {
        insta::allow_duplicates! {
            insta::assert_snapshot!(lines(&list(&mut s, node)), @r"
            1.`a` rank 0 1, a consequence: happened -250 ms, arrived 0 ms
            1.`b` rank 2 42: happened -200 ms, arrived 100 ms
            ");
        }
    }
    s.exit("a", 1, killed(1, 9))
        .say("b", 1, stopped(vec![fatal(2, 42), victim(3)]))
        .say("a", 1, stopped(vec![follower(0, 250 * MS), exited(1, 7)]))
        .pass(SECOND, &["a", "b"]);
    assert_eq!(s.words("a") + &s.words("b"), "");
    s.leave("a", None, "").leave("b", None, "");
    assert!(s.state.is_idle());
}

#[test]
fn a_node_that_was_away_receives_the_same_list() {
    let mut s = two_nodes();
    s.exit("b", 1, fatal(2, 42)).break_stream("a");
    s.say("b", 1, stopped(vec![victim(3)]));
    s.pass(SECOND, &["b"]);
    let told = verdict(&mut s, "b");
    s.join_with("a", [10, 0, 0, 1], 1, join("a", 2, 2));
    assert_eq!(verdict(&mut s, "a"), told);
    // Even when no other node is left.
    s.leave("b", None, "").leave("a", None, "");
    assert!(s.state.is_idle());
    s.join_with("a", [10, 0, 0, 1], 1, join("a", 2, 2));
    assert_eq!(verdict(&mut s, "a"), told);
}

#[test]
fn a_lost_node_is_sent_away_with_what_is_known() {
    let mut s = Scene::new();
    s.join("a", 1, 3).join("b", 1, 3).join("c", 1, 3);
    s.break_stream("c").pass(5 * SECOND, &["a", "b"]);
    s.rejoin("a", 1, 1, 3).rejoin("b", 1, 1, 3);
    s.pass(11 * SECOND, &["a", "b"]);
    s.exit("b", 2, fatal(2, 42));
    s.join_with("c", [10, 0, 0, 1], 1, join("c", 1, 3));
    assert_eq!(list(&mut s, "c").failures.len(), 2);
}

#[test]
fn a_suspect_is_listed_before_the_cause_that_arrived_later() {
    let mut s = two_nodes();
    s.exit("a", 1, follower(0, MS));
    s.now += 20 * MS;
    s.exit("b", 1, fatal(2, 42));
    let verdict = verdict(&mut s, "a");
    assert_eq!(verdict.first_failure.map(|exit| exit.rank), Some(2));
    insta::assert_snapshot!(lines(&verdict.failures.unwrap()), @r"
    1.`a` rank 0 1, a consequence: happened -1 ms, arrived 0 ms
    1.`b` rank 2 42: happened 20 ms, arrived 20 ms
    ");
}

#[test]
fn earlier_generations_and_lost_nodes_are_in_the_list() {
    let mut s = two_nodes();
    s.exit("b", 1, killed(3, 9));
    s.say("a", 1, stopped(vec![follower(0, MS)]))
        .say("a", 1, Body::Join(join("a", 2, 2)))
        .rejoin("b", 1, 2, 2);
    s.pass(SECOND, &["a", "b"]);
    s.exit("a", 2, exited(0, 5));
    s.say("a", 2, stopped(vec![exited(0, 5)]))
        .say("a", 2, Body::Join(join("a", 2, 2)));
    // It never comes back from the second generation.
    s.break_stream("b").pass(6 * SECOND, &["a"]);
    s.join_with("b'", [10, 0, 0, 2], 0, join("b", 2, 2));
    s.pass(SECOND, &["a", "b'"]);
    s.exit("b'", 3, fatal(2, 42));
    insta::assert_snapshot!(lines(&list(&mut s, "a")), @r"
    1.`b` rank 3 9: happened 0 ms, arrived 0 ms
    1.`a` rank 0 1, a consequence: happened -1 ms, arrived 0 ms
    2.`a` rank 0 5: happened 1000 ms, arrived 1000 ms
    2.`b` node `b` (node rank 1) was lost: its connection broke and it did not reconnect within 5.0 s: happened 6000 ms, arrived 6000 ms
    3.`b` rank 2 42: happened 8000 ms, arrived 8000 ms
    ");
}

#[test]
fn the_end_of_a_job_that_nobody_came_back_to_tells_what_had_failed() {
    let mut s = two_nodes();
    s.break_stream("b").pass(6 * SECOND, &["a"]);
    s.rejoin("a", 1, 2, 2).received("a");
    s.pass(601 * SECOND, &["a"]);
    let Some(Received::Message(DaemonMessage {
        body: Some(Reply::Refused(refused)),
        ..
    })) = s.received("a").pop()
    else {
        panic!("expected a refusal")
    };
    let told = lines(&refused.failures.unwrap());
    assert!(
        told.starts_with("1.`b` node `b` (node rank 1) was lost: "),
        "{told}"
    );
}

#[test]
fn a_node_that_cannot_go_on_is_listed_with_its_reason() {
    let mut s = two_nodes();
    s.give_up("b", 127, "no such file");
    insta::assert_snapshot!(lines(&list(&mut s, "a")), @"1.`b` node `b` (node rank 1) left: no such file: happened 0 ms, arrived 0 ms");
}

#[test]
fn thousands_of_ends_that_are_repeated_count_once() {
    let each = 2 * MAX_EXITS_OF_A_KIND as u32;
    let nodes: Vec<String> = (0..80).map(|number| format!("n{number}")).collect();
    let mut s = Scene::new();
    for node in &nodes {
        s.join(node, 80, 80);
    }
    s.exit("n0", 1, exited(0, 42));
    for _ in 0..2 {
        for (first, node) in (0..).step_by(each as usize).zip(&nodes) {
            let ranks = first..first + each;
            s.say(node, 1, stopped(ranks.map(|rank| exited(rank, 3)).collect()));
        }
    }
    for node in &nodes {
        s.say(node, 1, Body::Join(join(node, 80, 80)));
    }
    s.exit("n0", 2, fatal(0, 42));
    let failures = list(&mut s, "n0");
    assert_eq!(
        failures.failures.len() as u32 + failures.more_failures,
        80 * each + 1
    );
}

#[test]
fn a_node_that_tells_of_more_ends_than_it_may_is_read_no_further() {
    let mut s = two_nodes();
    s.exit("b", 1, exited(0, 42));
    s.say("b", 1, stopped((0..5000).map(|rank| exited(rank, 3)).collect()));
    s.rejoin("a", 1, 2, 2).rejoin("b", 1, 2, 2);
    s.exit("b", 2, fatal(0, 42));
    let failures = list(&mut s, "a");
    assert_eq!(
        failures.failures.len() + failures.more_failures as usize,
        2 * MAX_EXITS_OF_A_KIND + 1
    );
}

#[test]
fn the_ends_of_all_workers_of_the_largest_job_are_known() {
    assert!(Config::default().max_nodes as usize * MAX_TAKEN <= MAX_KNOWN);
}

#[test]
fn a_job_that_succeeds_has_nothing_to_tell() {
    let mut s = two_nodes();
    s.exit("b", 1, killed(3, 9))
        .rejoin("a", 1, 2, 2)
        .rejoin("b", 1, 2, 2)
        .succeed("a", 2)
        .succeed("b", 2);
    let verdict = verdict(&mut s, "a");
    assert_eq!((verdict.exit_code, verdict.failures), (0, None));
}

#[test]
fn the_list_is_bounded_and_what_is_beyond_is_counted() {
    let mut s = Scene::new();
    s.join("a", 1, 1).received("a");
    s.exit("a", 1, exited(0, 3));
    let many = u32::try_from(MAX_LISTED).unwrap() + 4;
    let exits = (0..many)
        .map(|rank| exited(rank, 3))
        .chain((many..many + 2).map(victim))
        .collect();
    let stopped = Body::NodeStopped(NodeStopped {
        exits,
        more_failures: 10,
        more_victims: 1,
    });
    s.say("a", 1, stopped).say("a", 1, Body::Join(join("a", 1, 1)));
    s.exit("a", 2, fatal(0, 3));
    let failures = list(&mut s, "a");
    assert_eq!(
        failures.failures.len(),
        MAX_LISTED + 2,
        "victims have room of their own"
    );
    assert_eq!((failures.more_failures, failures.more_victims), (15, 1));
}

#[test]
fn the_last_generation_has_room_and_the_cause_of_each_restart_is_kept_longest() {
    let mut s = Scene::new();
    s.join("a", 1, 1);
    for generation in 1..=3 {
        s.exit("a", generation, exited(0, 1));
        let exits = (1..9).map(|rank| exited(rank, 1)).collect();
        s.say("a", generation, stopped(exits))
            .say("a", generation, Body::Join(join("a", 1, 1)))
            .pass(SECOND, &["a"]);
    }
    s.exit("a", 4, fatal(0, 3));
    let failures = list(&mut s, "a");
    let generations: Vec<u64> = failures.failures.iter().map(|f| f.generation).collect();
    let expected: Vec<u64> = [1; 6].into_iter().chain([2]).chain([3; 8]).chain([4]).collect();
    assert_eq!(generations, expected);
    assert_eq!(failures.failures[6].exit.as_ref().unwrap().rank, 0, "the cause");
    assert_eq!(failures.more_failures, 3 * 9 + 1 - 16);
}

#[test]
fn reports_that_are_repeated_count_once_and_long_words_are_cut() {
    let mut s = two_nodes();
    let exit = WorkerExit {
        message: "m".repeat(4000),
        stderr_tail: vec!["last words".into(); 100],
        ..exited(2, 42)
    };
    s.exit("b", 1, exit.clone());
    s.join_with("b", [10, 0, 0, 1], 1, join("b", 2, 2));
    s.exit("b", 1, exit);
    s.say("b", 1, stopped(vec![exited(2, 42), victim(3)]))
        .rejoin("b", 1, 2, 2)
        .rejoin("a", 1, 2, 2);
    s.exit("b", 2, fatal(2, 42));
    let failures = list(&mut s, "a");
    assert_eq!(failures.failures.len(), 3);
    assert_eq!((failures.more_failures, failures.more_victims), (0, 0));
    let first = failures.failures[0].exit.as_ref().unwrap();
    assert_eq!((first.message.len(), first.stderr_tail.len()), (512, 0));
}
