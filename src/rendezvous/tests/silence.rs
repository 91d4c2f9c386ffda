//! A node whose link to the daemon is cut while its workers train, and one that is gone.

use super::*;

/// Two nodes whose workers are at step 100.
fn training() -> Scene {
    training_with(Config::default())
}

fn training_with(config: Config) -> Scene {
    let mut s = Scene::with(config);
    s.join("a", 2, 2).join("b", 2, 2);
    s.words("a");
    s.words("b");
    s.train(30 * SECOND, &["a", "b"], 0, 10);
    s
}

/// Whatever node `a` was told, its workers go on.
#[track_caller]
fn expect_no_end(s: &mut Scene) {
    let words = s.words("a");
    let is_news = |line: &str| {
        !line.contains("has been silent for")
            && !line.contains("closed its connection")
            && !line.contains("is back after")
    };
    assert_eq!(words.lines().filter(|line| is_news(line)).count(), 0, "{words}");
}

impl Scene {
    fn step(&mut self, node: &str, step: u64) -> &mut Self {
        let heartbeat = Heartbeat {
            step: Some(step),
            ..Heartbeat::default()
        };
        self.say(node, 1, Body::Heartbeat(heartbeat))
    }

    /// Lets time pass while these nodes tell of so many more steps with each heartbeat; returns the last step.
    fn train(&mut self, time: Duration, alive: &[&str], from: u64, pace: u64) -> u64 {
        let beat = Config::default().heartbeat_interval();
        let (end, mut step) = (self.now + time, from);
        while self.now < end {
            self.pass(beat, &[]);
            step += pace;
            for node in alive {
                self.step(node, step);
            }
        }
        step
    }
}

#[test]
fn a_node_that_is_cut_off_while_training_advances_is_waited_for() {
    let mut s = training();
    let step = s.train(90 * SECOND, &["a"], 100, 10);
    expect_no_end(&mut s);
    // It comes back on another stream, and nobody notices.
    let (_, before) = {
        s.join_with("b", [10, 0, 0, 1], 1, join("b", 2, 2));
        s.assignment("b")
    };
    assert_eq!(before.restart_count, 0);
    s.train(30 * SECOND, &["a", "b"], step, 10);
    expect_no_end(&mut s);
    // The proof was for that silence only.
    s.pass(10 * SECOND, &["a"]);
    assert!(s.words("a").contains("no heartbeat for 9.0 s"));
}

#[test]
fn a_node_whose_connection_breaks_meanwhile_is_waited_for_too() {
    let mut s = training();
    let step = s.train(30 * SECOND, &["a"], 100, 10);
    s.break_stream("b");
    let step = s.train(30 * SECOND, &["a"], step, 10);
    expect_no_end(&mut s);
    s.join_with("b", [10, 0, 0, 1], 1, join("b", 2, 2));
    s.train(30 * SECOND, &["a", "b"], step, 10);
    expect_no_end(&mut s);

    // Refused at once, and again and again.
    let mut s = training();
    s.break_stream("b");
    let step = s.train(57 * SECOND, &["a"], 100, 10);
    expect_no_end(&mut s);
    // What lives has come back by now.
    s.train(3 * SECOND, &["a"], step, 10);
    insta::assert_snapshot!(s.words("a"), @"generation 1 over: node `b` (node rank 1) was lost: its connection broke and it did not reconnect within 60.0 s (failure on ``, restart 1/3, back-off 0 ms)");
}

/// A killed launcher once kept the others waiting for ten minutes where ranks do not train in lock-step.
#[test]
fn a_node_whose_connection_was_closed_is_not_waited_for_when_the_others_are_done() {
    let mut s = training();
    s.break_stream("b");
    s.train(15 * SECOND, &["a"], 100, 10);
    s.succeed("a", 1).pass(8 * SECOND, &["a"]);
    expect_no_end(&mut s);
    s.pass(SECOND, &["a"]);
    insta::assert_snapshot!(s.words("a"), @"generation 1 over: node `b` (node rank 1) was lost: its connection broke and it did not reconnect within 24.0 s (failure on ``, restart 1/3, back-off 0 ms)");
}

#[test]
fn a_node_is_lost_a_lease_after_training_stops() {
    let mut s = training();
    let step = s.train(30 * SECOND, &["a"], 100, 10);
    s.train(6 * SECOND, &["a"], step, 0);
    expect_no_end(&mut s);
    s.train(3 * SECOND, &["a"], step, 0);
    insta::assert_snapshot!(s.words("a"), @"generation 1 over: node `b` (node rank 1) was lost: no word of it for 39.0 s (failure on ``, restart 1/3, back-off 0 ms)");
}

/// Such as by checkpoints that a disk does not store in time.
#[test]
fn training_that_stalls_now_and_then_still_advances() {
    let mut s = training();
    let mut step = 100;
    for _ in 0..20 {
        step = s.train(3 * SECOND, &["a"], step, 10);
        // The heartbeat after the stall comes late.
        step = s.train(3 * SECOND, &["a"], step, 0);
        s.pass(SECOND / 2, &[]);
    }
    expect_no_end(&mut s);
}

#[test]
fn one_more_step_proves_nothing_as_it_may_have_been_under_way() {
    let mut s = training();
    s.train(3 * SECOND, &["a"], 100, 1);
    s.train(9 * SECOND, &["a"], 101, 0);
    let words = s.words("a");
    assert!(
        words.contains("(node rank 1) was lost: no word of it for 12.0 s"),
        "{words}"
    );
    assert!(!words.contains("but the reported steps advance"), "{words}");
}

#[test]
fn steps_from_before_the_silence_prove_nothing() {
    let mut s = training();
    // Node `a` tells late of what was done before.
    s.train(9 * SECOND, &["b"], 100, 10);
    s.step("a", 130);
    s.pass(3 * SECOND, &[]);
    s.step("a", 131).pass(9 * SECOND, &["a"]);
    let words = s.words("a");
    assert!(words.contains("was lost"), "{words}");
    assert!(!words.contains("but the reported steps advance"), "{words}");
}

#[test]
fn slow_steps_have_the_time_that_they_need() {
    let mut s = training();
    // A step takes 12 s.
    let mut step = 100;
    for _ in 0..4 {
        step = s.train(9 * SECOND, &["a", "b"], step, 0);
        step = s.train(3 * SECOND, &["a", "b"], step, 1);
    }
    for _ in 0..10 {
        step = s.train(9 * SECOND, &["a"], step, 0);
        step = s.train(3 * SECOND, &["a"], step, 1);
    }
    expect_no_end(&mut s);
    s.train(42 * SECOND, &["a"], step, 0);
    assert!(s.words("a").contains("was lost: no word of it for 162.0 s"));
}

#[test]
fn no_progress_excuses_a_silence_without_end() {
    let mut s = training_with(Config {
        silence_limit: 60 * SECOND,
        ..Config::default()
    });
    let step = s.train(57 * SECOND, &["a"], 100, 10);
    expect_no_end(&mut s);
    s.train(3 * SECOND, &["a"], step, 10);
    insta::assert_snapshot!(s.words("a"), @"generation 1 over: node `b` (node rank 1) was lost: no word of it for 60.0 s (failure on ``, restart 1/3, back-off 0 ms)");
}

#[test]
fn a_failure_while_a_node_is_silent_ends_the_wait_for_it() {
    let mut s = training();
    s.train(30 * SECOND, &["a"], 100, 10);
    expect_no_end(&mut s);
    s.exit(
        "a",
        1,
        WorkerExit {
            consequence: true,
            ..exited(0, 1)
        },
    );
    s.pass(SECOND / 100, &[]);
    insta::assert_snapshot!(s.words("a"), @"generation 1 over: node `b` (node rank 1) was lost: no word of it for 30.0 s (failure on ``, restart 1/3, back-off 0 ms)");

    // Its own words are awaited where it was not silent for long.
    let mut s = training();
    s.break_stream("b")
        .exit("a", 1, exited(0, 1))
        .pass(4 * SECOND, &["a"]);
    expect_no_end(&mut s);
    s.pass(SECOND, &["a"]);
    assert!(s.words("a").contains("did not reconnect within 5.0 s"));
}

#[test]
fn a_job_that_ends_while_a_node_is_cut_off_waits_for_its_verdict() {
    let mut s = training();
    s.train(6 * SECOND, &["a"], 100, 10);
    s.succeed("a", 1).pass(300 * SECOND, &["a"]);
    expect_no_end(&mut s);
    s.join_with("b", [10, 0, 0, 1], 1, join("b", 2, 2));
    s.succeed("b", 1);
    assert!(s.words("a").contains("job over 0: all 2 nodes succeeded"));

    // It does not come back.
    let mut s = training();
    s.train(6 * SECOND, &["a"], 100, 10);
    s.succeed("a", 1).pass(593 * SECOND, &["a"]);
    expect_no_end(&mut s);
    s.pass(SECOND, &["a"]);
    insta::assert_snapshot!(s.words("a"), @"generation 1 over: node `b` (node rank 1) was lost: no word of it for 600.0 s (failure on ``, restart 1/3, back-off 0 ms)");

    // What dies closes its connection.
    let mut s = training();
    s.succeed("a", 1).break_stream("b").pass(9 * SECOND, &["a"]);
    assert!(s.words("a").contains("was lost"));
}

#[test]
fn programs_that_report_no_steps_are_judged_by_the_lease_alone() {
    let mut s = Scene::new();
    s.join("a", 2, 2).join("b", 2, 2);
    s.words("a");
    s.pass(9 * SECOND, &["a"]);
    assert!(s.words("a").contains("no heartbeat for 9.0 s"));
}

#[test]
fn a_new_launcher_on_the_host_of_a_node_that_is_waited_for_takes_its_place() {
    let mut s = training();
    s.break_stream("b");
    s.train(30 * SECOND, &["a"], 100, 10);
    let words = s.words("a");
    assert!(
        words.contains(
            "node `b` closed its connection 12.0 s ago, but the reported steps advance: waiting up to 60 s for it"
        ),
        "{words}"
    );
    s.join("b'", 2, 2);
    assert!(s.words("a").contains("node `b` was restarted"));
    s.rejoin("a", 1, 2, 2);
    assert_eq!(s.assignment("b'").0, 2);
}
