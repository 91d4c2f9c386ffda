//! Joining, starting, ranks, addresses, refusals, time-outs.

use super::super::DEFAULT_JOB_ID;
use super::*;

#[test]
fn one_node_starts_at_once() {
    let mut s = Scene::new();
    s.join("a", 1, 1);
    insta::assert_snapshot!(s.words("a"), @"assignment 1: node rank 0 of 1, first rank 0, master 127.0.0.1:29500, restart 0/3: generation 1: the only node joined; node ranks by host name");
}

#[test]
fn a_fixed_number_of_nodes_starts_when_all_are_there() {
    let mut s = Scene::new();
    s.join("n10", 3, 3).join("n2", 3, 3);
    insta::assert_snapshot!(s.words("n2"), @"waiting: 2 of 3 nodes joined: `n10`, `n2`; waiting for 1 more (up to 600 s)");
    s.join("n1", 3, 3);
    let (generation, first) = s.assignment("n1");
    assert_eq!((generation, first.node_rank, first.lease_ms), (1, 0, 9_000));
    assert_eq!(first.master_addr, "10.0.0.1");
    for (rank, node) in (0..).zip(["n1", "n2", "n10"]) {
        let other = if rank == 0 {
            first.clone()
        } else {
            s.assignment(node).1
        };
        let own = other.own.clone().unwrap();
        assert_eq!((own.hostname.as_str(), own.first_rank), (node, 2 * rank));
        assert_eq!((other.node_count, other.world_size), (3, 6));
        let first = Assignment {
            node_rank: rank,
            own: other.own.clone(),
            role_first_rank: 2 * rank,
            ..first.clone()
        };
        assert_eq!(other, first);
    }
}

/// Healthy jobs one after the other look like one that waits, if they are only counted.
#[test]
fn the_longest_wait_is_of_one_job() {
    let mut s = Scene::new();
    s.join("a", 2, 2).pass(100 * SECOND, &["a"]);
    s.job = "job2";
    s.join("c", 2, 2);
    let census = s.state.census(s.now, 64);
    assert_eq!((census.gathering, census.longest_gathering), (2, 100 * SECOND));
    assert!(census.generations.is_empty(), "no generation runs");
    s.job = JOB;
    s.join("b", 2, 2);
    let census = s.state.census(s.now, 64);
    assert_eq!((census.gathering, census.longest_gathering), (1, Duration::ZERO));
    assert_eq!(census.generations, [(JOB.to_owned(), 1_u64)]);
}

#[test]
fn an_elastic_job_starts_at_max_at_once() {
    let mut s = Scene::new();
    s.join("a", 1, 2).join("b", 1, 2);
    assert_eq!(s.assignment("a").1.node_count, 2);
    assert_eq!(s.now, Duration::ZERO);
}

#[test]
fn an_elastic_job_starts_at_min_after_the_last_call() {
    let mut s = Scene::new();
    s.join("a", 2, 4).pass(SECOND, &["a"]).join("b", 2, 4);
    insta::assert_snapshot!(s.words("b"), @"waiting: 2 nodes joined (`a`, `b`), enough to start; waiting up to 10 s for more");
    s.pass(9 * SECOND, &["a", "b"]);
    assert_eq!(s.words("b"), "");
    s.join("c", 2, 4).pass(SECOND, &["a", "b", "c"]);
    insta::assert_snapshot!(s.words("c"), @r"
    waiting: 3 nodes joined (`a`, `b`, `c`), enough to start; waiting up to 1 s for more
    assignment 1: node rank 2 of 3, first rank 4, master 10.0.0.1:29500, restart 0/3: generation 1: 3 nodes joined (of 2 to 4) within `last_call_timeout`; node ranks by host name
    ");
}

#[test]
fn the_last_call_is_off_when_a_node_goes() {
    let mut s = Scene::new();
    s.join("a", 2, 3)
        .join("b", 2, 3)
        .pass(5 * SECOND, &["a", "b"])
        .leave("b", None, "changed my mind");
    s.pass(20 * SECOND, &["a"]);
    assert!(s.words("a").starts_with("waiting: "), "one node is not enough");
    s.join("b'", 2, 3).pass(9 * SECOND, &["a", "b'"]);
    assert_eq!(s.words("a"), "");
    s.pass(SECOND, &["a", "b'"]);
    assert_eq!(s.assignment("a").1.node_count, 2);
}

#[test]
fn a_node_has_the_rank_it_asked_for() {
    let mut s = Scene::new();
    s.join_with(
        "a",
        [10, 0, 0, 1],
        0,
        Join {
            node_rank: Some(1),
            ..join("a", 2, 2)
        },
    );
    s.join_with(
        "z",
        [10, 0, 0, 2],
        0,
        Join {
            node_rank: Some(0),
            ..join("z", 2, 2)
        },
    );
    assert_eq!(s.assignment("a").1.node_rank, 1);
    let (_, first) = s.assignment("z");
    assert_eq!((first.node_rank, first.master_addr.as_str()), (0, "10.0.0.2"));
}

#[test]
fn a_rank_that_is_taken_or_out_of_range_is_refused_by_name() {
    let mut s = Scene::new();
    let asks = |node: &str, rank| Join {
        node_rank: Some(rank),
        ..join(node, 2, 2)
    };
    s.join_with("a", [10, 0, 0, 1], 0, asks("a", 1));
    s.join_with("b", [10, 0, 0, 2], 0, asks("b", 1));
    insta::assert_snapshot!(s.words("b"), @"waiting: node `a` has node rank 1: this node takes its place if it is lost");
    s.heartbeat("a", 0);
    insta::assert_snapshot!(s.words("b"), @r"
    refused Invalid: node rank 1 of job `job1` is requested by node `b`, but node `a` already has it
      hint: give each node a different `--node-rank`, or omit the flag on all nodes
    closed
    ");
    s.join_with("c", [10, 0, 0, 3], 0, asks("c", 2));
    insta::assert_snapshot!(s.words("c"), @r"
    refused Invalid: `--node-rank` of node `c` is 2, but there are at most 2 nodes
      hint: node ranks run from 0 to 1
    closed
    ");
    s.join_with("d", [10, 0, 0, 4], 0, asks("d", 0));
    assert_eq!(s.assignment("a").1.node_rank, 1, "the others are not harmed");
}

#[test]
fn a_claimed_rank_whose_process_is_gone_goes_to_the_new_process() {
    let mut s = Scene::new();
    let asks = |node: &str, rank| Join {
        node_rank: Some(rank),
        ..join(node, 2, 2)
    };
    s.join_with("a", [10, 0, 0, 1], 0, asks("a", 0))
        .join_with("b", [10, 0, 0, 2], 0, asks("b", 1));
    s.words("a");
    s.break_stream("b")
        .join_with("b'", [10, 0, 0, 2], 0, asks("b'", 1));
    insta::assert_snapshot!(s.words("a"), @"generation 1 over: node `b` was restarted (failure on ``, restart 1/3, back-off 0 ms)");
    s.say("a", 1, Body::NodeStopped(NodeStopped::default()))
        .say("a", 1, Body::Join(asks("a", 0)));
    s.pass(SECOND, &["a", "b'"]);
    assert_eq!(s.assignment("b'").1.node_rank, 1);
}

#[test]
fn a_node_on_the_daemons_host_is_reached_where_the_others_reach_the_daemon() {
    let mut s = Scene::new();
    s.join_with("a", [127, 0, 0, 1], 0, join("a", 2, 2))
        .join_with("b", [10, 0, 0, 2], 0, join("b", 2, 2));
    let (_, a) = s.assignment("a");
    assert_eq!(
        (a.own.unwrap().addr.as_str(), a.master_addr.as_str()),
        ("10.0.0.9", "10.0.0.9")
    );
    assert_eq!(s.assignment("b").1.own.unwrap().addr, "10.0.0.2");
}

#[test]
fn an_address_that_was_given_wins() {
    let mut s = Scene::new();
    s.join_with(
        "a",
        [10, 0, 0, 1],
        0,
        Join {
            local_addr: "ib0.a".into(),
            ..join("a", 2, 2)
        },
    );
    s.join("b", 2, 2);
    assert_eq!(s.assignment("b").1.master_addr, "ib0.a");
}

#[test]
fn nodes_that_disagree_before_the_start_all_end() {
    let mut s = Scene::new();
    let seed = |node: &str, seed: &str| Join {
        agreed: agreed(&[("target", "train.yaml"), ("train.seed", seed)]),
        ..join(node, 3, 3)
    };
    s.join_with("a", [10, 0, 0, 1], 0, seed("a", "1"))
        .join_with("b", [10, 0, 0, 2], 0, seed("b", "2"));
    insta::assert_snapshot!(s.words("b"), @r"
    refused Disagree: nodes disagree on job `job1`: `train.seed` differs between node `a` and node `b`
      hint: start every node with the same target, configuration and flags
    closed
    ");
    insta::assert_snapshot!(s.words("a"), @r"
    waiting: 1 of 3 nodes joined: `a`; waiting for 2 more (up to 600 s)
    refused Disagree: nodes disagree on job `job1`: `train.seed` differs between node `a` and node `b`
      hint: start every node with the same target, configuration and flags
    ");
}

#[test]
fn a_node_that_disagrees_with_a_running_job_is_refused_alone() {
    let mut s = Scene::new();
    s.join("a", 1, 1).words("a");
    s.join("b", 1, 2);
    insta::assert_snapshot!(s.words("b"), @r"
    refused Disagree: nodes disagree on job `job1`: `--nnodes` differs between node `a` and node `b`
      hint: start every node with the same target, configuration and flags
    closed
    ");
    assert_eq!(s.words("a"), "");
}

#[test]
fn who_came_and_who_is_missing_when_the_time_is_over() {
    let mut s = Scene::new();
    s.join("a", 3, 3).join("b", 3, 3).words("b");
    s.pass(599 * SECOND, &["a", "b"]);
    assert_eq!(s.words("b"), "");
    s.pass(SECOND, &["a", "b"]);
    insta::assert_snapshot!(s.words("b"), @r"
    refused TimedOut: rendezvous of job `job1` timed out after 600.0 s: 2 of 3 nodes joined: `a`, `b`; missing: 1 node
      hint: start the missing nodes with the same `--rdzv-endpoint`, `--rdzv-id` and `--nnodes`
    ");
    assert!(s.words("a").contains("refused TimedOut"));
}

#[test]
fn bad_requests_are_refused_and_change_nothing() {
    let mut s = Scene::new();
    let bad = [
        Join {
            protocol: 2,
            ..join("x", 1, 1)
        },
        Join {
            workers: 0,
            ..join("x", 1, 1)
        },
        Join {
            master_port: 70_000,
            ..join("x", 1, 1)
        },
        join("x", 3, 2),
        join("x", 0, 0),
        join("x", 1, u32::MAX),
        Join {
            hostname: "h".repeat(10_000),
            ..join("x", 1, 1)
        },
        Join {
            hostname: "x\n[ddp-run] y".into(),
            ..join("x", 1, 1)
        },
        Join {
            role: "\u{1b}[2J".into(),
            ..join("x", 1, 1)
        },
        Join {
            agreed: agreed(&[(&"d".repeat(1 << 20), "x")]),
            ..join("x", 1, 1)
        },
    ];
    for bad in bad {
        s.join_with("x", [10, 0, 0, 1], 0, bad);
        let words = s.words("x");
        assert!(
            words.starts_with("refused Invalid: ") && words.ends_with("\nclosed"),
            "{words}"
        );
    }
    s.join_with("x", [10, 0, 0, 1], u64::MAX, join("x", 1, 1));
    assert!(s.words("x").starts_with("refused Invalid: "));
    assert!(s.state.is_idle());
}

#[test]
fn a_refusal_says_what_was_bad() {
    let mut s = Scene::new();
    s.join_with(
        "x",
        [10, 0, 0, 1],
        0,
        Join {
            protocol: 2,
            ..join("x", 1, 1)
        },
    );
    insta::assert_snapshot!(s.words("x"), @r"
    refused Invalid: node `x` uses version 2 of the rendezvous protocol, this daemon 1
      hint: install the same version of `ddp-run` on every node
    closed
    ");
    let without_port = Join {
        master_port: 0,
        ..join("x", 1, 1)
    };
    s.join_with("x", [10, 0, 0, 1], 0, without_port);
    insta::assert_snapshot!(s.words("x"), @r"
    refused Invalid: node `x` has no free port for MASTER_PORT
      hint: see the output of its launcher; `--master-port` sets the port
    closed
    ");
    s.join_with("x", [10, 0, 0, 1], 0, join("x", 3, 2));
    insta::assert_snapshot!(s.words("x"), @r"
    refused Invalid: `--nnodes` of node `x` is 3:2, expected 1 <= MIN <= MAX <= 16384
    closed
    ");
}

#[test]
fn a_stream_begins_with_join_and_speaks_for_one_node() {
    let mut s = Scene::new();
    s.current.insert("x".into(), ConnId(99));
    s.heartbeat("x", 0);
    insta::assert_snapshot!(s.words("x"), @r"
    refused Invalid: the first message of a stream must be `Join`
    closed
    ");
    s.join("a", 2, 2).words("a");
    let conn = s.current["a"];
    s.say_from("b", conn, [10, 0, 0, 1], 0, Body::Join(join("b", 2, 2)));
    insta::assert_snapshot!(s.words("a"), @r"
    refused Invalid: a stream belongs to one node of one job
    closed
    ");
}

#[test]
fn a_node_too_many_is_a_spare_and_takes_the_place_of_a_lost_one() {
    let mut s = Scene::new();
    s.join("a", 2, 2).join("b", 2, 2).join("c", 2, 2);
    insta::assert_snapshot!(s.words("c"), @"waiting: job `job1` is running with 2 nodes; this node is on standby");
    s.words("a");
    s.pass(16 * SECOND, &["a", "c"])
        .rejoin("a", 1, 2, 2)
        .pass(SECOND, &["a", "c"]);
    insta::assert_snapshot!(s.words("a"), @r"
    generation 1 over: node `b` (node rank 1) was lost: no heartbeat for 9.0 s (no restart spent)
    assignment 2: node rank 0 of 2, first rank 0, master 10.0.0.1:29500, restart 0/3: generation 2: all 2 nodes joined; node ranks: 1 kept from before, 1 by host name
    ");
    assert_eq!(s.assignment("c").1.node_rank, 1);
}

#[test]
fn a_job_that_nobody_named_takes_no_spares_but_takes_back_its_own() {
    let mut s = Scene::new();
    s.job = DEFAULT_JOB_ID;
    s.join("a", 2, 2).join("b", 2, 2).join("c", 2, 2);
    insta::assert_snapshot!(s.words("c"), @r"
    refused Disagree: job `none` is already running with all of its 2 nodes (`a`, `b`): node `c` belongs to a different job or is one too many
      hint: give each job its own `--rdzv-id`; a job of several nodes then keeps extra nodes on standby
    closed
    ");
    assert_eq!(s.assignment("a").1.node_count, 2, "the job goes on");
    s.break_stream("b").join("b'", 2, 2);
    assert!(
        s.words("b'").starts_with("waiting: "),
        "a new process in the place of a lost one"
    );
    s.job = JOB;
    s.join("d", 1, 2).join("e", 1, 2).join("f", 1, 2);
    assert!(s.words("f").contains("this node is on standby"));
}

#[test]
fn a_job_of_one_node_takes_no_spare_but_a_new_process_in_its_place() {
    let mut s = Scene::new();
    s.join("a", 1, 1).join("b", 1, 1);
    insta::assert_snapshot!(s.words("b"), @r"
    refused Disagree: job `job1` is already running with its only node (`a`): node `b` belongs to a different job or is one too many
      hint: give each job its own `--rdzv-id`; a job of several nodes then keeps extra nodes on standby
    closed
    ");
    assert_eq!(s.assignment("a").1.node_count, 1, "the job goes on");
    s.break_stream("a").join("c", 1, 1);
    assert!(s.words("c").starts_with("waiting: "), "{}", s.words("c"));
}

#[test]
fn two_jobs_that_nobody_named_are_refused_by_what_differs() {
    let of = |node: &str, arguments: &str| Join {
        agreed: agreed(&[("target", "t.py"), ("arguments", arguments)]),
        ..join(node, 2, 2)
    };
    let mut s = Scene::new();
    s.job = DEFAULT_JOB_ID;
    s.join_with("a", [10, 0, 0, 1], 0, of("a", "--lr 1"));
    s.join_with("b", [10, 0, 0, 2], 0, of("b", "--lr 2"));
    insta::assert_snapshot!(s.words("b"), @r"
    refused Disagree: two jobs without `--rdzv-id` meet at one rendezvous: `arguments` differs between node `a` and node `b`
      hint: give all nodes of a job the same `--rdzv-id`, and other jobs a different one
    closed
    ");
    assert!(
        s.words("a").contains("two jobs without `--rdzv-id`"),
        "which is right is unknown"
    );
    let mut s = Scene::with(Config {
        only_job: Some(DEFAULT_JOB_ID.to_owned()),
        ..Config::default()
    });
    s.job = DEFAULT_JOB_ID;
    s.join_with("a", [10, 0, 0, 1], 0, of("a", "--lr 1"));
    s.join_with("b", [10, 0, 0, 2], 0, of("b", "--lr 2"));
    assert_eq!(
        s.assignment("b").1.node_count,
        2,
        "a job that meets at a node of its own"
    );
    let mut s = Scene::new();
    s.job = DEFAULT_JOB_ID;
    s.join("a", 2, 2).join("b", 3, 3);
    insta::assert_snapshot!(s.words("b"), @r"
    refused Disagree: nodes disagree on job `none`: `--nnodes` differs between node `a` and node `b`
      hint: start every node with the same target, configuration and flags, or give each job its own `--rdzv-id`
    closed
    ");
}
#[test]
fn a_daemon_of_one_job_serves_no_other() {
    let mut s = Scene::with(Config {
        only_job: Some("mine".to_owned()),
        ..Config::default()
    });
    s.join("a", 1, 1);
    insta::assert_snapshot!(s.words("a"), @r"
    refused Disagree: the rendezvous at this address belongs to job `mine` and ends with it: it does not serve job `job1`
      hint: give all nodes of a job the same `--rdzv-id`, and other jobs a different `--rdzv-endpoint`
    closed
    ");
    assert!(s.state.is_idle());
    s.job = "mine";
    s.join("a", 1, 1);
    assert_eq!(s.assignment("a").1.node_count, 1);
}

#[test]
fn jobs_do_not_touch_each_other() {
    let mut s = Scene::new();
    s.join("a", 2, 2);
    let peer = Peer {
        remote: [10, 0, 0, 5].into(),
        local: [10, 0, 0, 9].into(),
    };
    let message = AgentMessage {
        job_id: "job2".into(),
        incarnation: "a".into(),
        generation: 0,
        assignment_id: String::new(),
        body: Some(Body::Join(join("a", 1, 1))),
    };
    s.apply(Event::Message {
        conn: ConnId(77),
        peer,
        message: Box::new(message),
    });
    s.current.insert("other".into(), ConnId(77));
    assert_eq!(s.assignment("other").1.node_count, 1);
    assert!(s.words("a").starts_with("waiting: 1 of 2"));
    assert_eq!(s.state.status(s.now, "job2").unwrap().phase, "running");
    assert_eq!(s.state.status(s.now, JOB).unwrap().phase, "gathering");
}
