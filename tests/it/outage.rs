//! The daemon dies while a job runs, and comes back; a node is suspended, and comes back.

use nix::sys::signal::Signal;

use crate::harness::{
    Daemon, Finished, Launch, Proxy, ReservedPort, Running, TinyJob, children, environment_of, launch,
    metrics, temp_dir, wait_for_step,
};

/// Two nodes of one worker each, which work until a file exists.
struct Pair {
    /// None while it is out.
    daemon: Option<Daemon>,
    endpoint: String,
    nodes: [Running; 2],
    dir: tempfile::TempDir,
}

impl Pair {
    #[track_caller]
    fn start(change: impl Fn(Launch) -> Launch) -> Self {
        let (daemon, dir) = (Daemon::start(), temp_dir());
        let done = dir.path().join("done");
        let script = r#"echo rank $RANK at work in life $TORCHELASTIC_RESTART_COUNT
            until [ -e "$DONE" ]; do sleep 0.02; done"#;
        let node = || {
            let node = launch()
                .node_of(2, &daemon.endpoint, "outage")
                .flag("--rdzv-conf", "is_host=false,join_timeout=2")
                .env("DONE", &done);
            change(node).shell(script).start()
        };
        let mut nodes = [node(), node()];
        for node in &mut nodes {
            node.wait_for("in life 0");
        }
        Self {
            endpoint: daemon.endpoint.clone(),
            daemon: Some(daemon),
            nodes,
            dir,
        }
    }

    /// The worker of each node.
    #[track_caller]
    fn workers(&self) -> [i32; 2] {
        let is_worker = |pid: &i32| environment_of(*pid).contains_key("RANK");
        [0, 1].map(|node: usize| {
            let workers = children(self.nodes[node].pid());
            workers.into_iter().find(is_worker).expect("a worker that runs")
        })
    }

    /// The daemon dies as in a crash, and all nodes notice.
    #[track_caller]
    fn kill_the_daemon(&mut self) {
        self.daemon.take().expect("one that runs").kill();
        for node in &mut self.nodes {
            node.wait_for("broke: ");
        }
    }

    /// Another one takes its place.
    fn bring_it_back(&mut self) {
        self.daemon = Some(Daemon::start_at(&self.endpoint));
    }

    #[track_caller]
    fn outage(&mut self) {
        self.kill_the_daemon();
        self.bring_it_back();
        for node in &mut self.nodes {
            node.wait_for("the workers continue without a restart");
        }
    }

    fn finish(self) -> [Finished; 2] {
        std::fs::write(self.dir.path().join("done"), "").expect("writable");
        let finished = self.nodes.map(Running::finish);
        stop(self.daemon);
        finished
    }
}

#[test]
fn the_workers_of_a_healthy_job_outlive_the_daemon() {
    let mut pair = Pair::start(|node| node.flag("--max-restarts", "0"));
    let before = pair.workers();
    // Twice: what one daemon took up, the next one can.
    for _ in 0..2 {
        pair.outage();
        assert_eq!(pair.workers(), before, "the same processes");
    }
    for finished in pair.finish() {
        finished.expect_exit(0);
        let said = finished.transcript();
        assert_eq!(said.matches("in life").count(), 1, "{said}");
        assert!(!said.contains("SIGTERM"), "{said}");
    }
}

/// The daemon is in the launcher of the first node; the launcher of the second is suspended until the first has left.
#[test]
fn a_node_that_was_suspended_until_all_others_had_left_says_so_and_ends() {
    let port = ReservedPort::new();
    let node = |rank: &str| {
        let node = launch()
            .node_of(2, &port.endpoint, "suspended")
            .flag("--rdzv-conf", "connect_timeout=10")
            .flag("--node-rank", rank);
        node.shell("echo at work; exec sleep 1000").start()
    };
    let [mut host, mut late] = [node("0"), node("1")];
    for node in [&mut host, &mut late] {
        node.wait_for("at work");
    }
    late.signal(Signal::SIGSTOP);
    host.wait_for("no heartbeat for 9.0 s");
    host.finish().expect_exit(75);
    late.signal(Signal::SIGCONT);
    let late = late.finish();
    late.expect_stderr("this launcher was stalled for ");
    // The host's last message may still be in the socket.
    let said = late.transcript();
    let knows = said.contains("(node rank 1) was lost: no heartbeat for 9.0 s");
    late.expect_exit(if knows { 75 } else { 69 });
}

/// Two ranks train after `edit`, and are at step 7; with the daemon, which is tried for so many seconds.
fn training(outage_timeout: u32, edit: impl FnOnce(&str) -> String) -> (Daemon, TinyJob, Running) {
    let (daemon, job) = (Daemon::start(), TinyJob::with(edit));
    let conf = format!("is_host=false,outage_timeout={outage_timeout}");
    let running = job
        .launch()
        .nproc(2)
        .flag("--rdzv-endpoint", &daemon.endpoint)
        .flag("--rdzv-id", "outage")
        .flag("--rdzv-conf", &conf)
        .start();
    wait_for_step(&job.out(), 7);
    (daemon, job, running)
}

#[test]
fn training_is_saved_when_the_daemon_is_gone_for_good() {
    let (daemon, job, running) = training(1, |yaml| {
        let yaml = yaml.replace("steps: 40", "steps: 100000");
        yaml.replace("checkpoint_every: 5", "checkpoint_every: 100000")
    });
    daemon.kill();
    running
        .finish()
        .expect_exit(69)
        .expect_stderr("cannot reach the rendezvous at")
        .expect_stderr("resume with `--set run.resume=auto --set run.out_dir=out`");
    let reached = metrics(&job.out()).len();
    let resume = launch()
        .dir(job.dir())
        .nproc(2)
        .set("run.resume=require")
        .set(&format!("train.steps={}", reached + 3));
    resume
        .target("tiny.yaml")
        .run()
        .expect_exit(0)
        .expect_stdout(&format!("resumed after step {reached}"));
}

#[test]
fn a_node_that_is_cut_off_while_training_advances_keeps_its_place() {
    let flags = ["--lease", "3", "--reconnect-grace", "1"];
    let mut daemon = Daemon::start_with("127.0.0.1:0", &flags);
    let (proxy, nobody) = (Proxy::to(&daemon.endpoint), ReservedPort::new());
    let job = TinyJob::with(|yaml| yaml.replace("steps: 40", "steps: 1000000"));
    let node = |rank: &str, endpoint: &str| {
        let node = launch()
            .nproc(1)
            .node_of(2, endpoint, "cut")
            .flag("--node-rank", rank)
            .flag("--rdzv-conf", "is_host=false")
            .dir(job.dir());
        node.target("tiny.yaml").start()
    };
    let nodes = [node("0", &daemon.endpoint), node("1", &proxy.endpoint())];
    // The daemon has learned by some heartbeats how long a step takes.
    wait_for_step(&job.out(), 300);
    // Nothing arrives.
    proxy.hold();
    daemon.wait_for("but the reported steps advance: waiting up to 600 s for it");
    proxy.release();
    daemon.wait_for(" is back after ");
    // Its connection breaks, and every other one is refused.
    proxy.aim(&nobody.endpoint);
    proxy.cut();
    daemon.wait_for("but the reported steps advance: waiting up to 60 s for it");
    proxy.aim(&daemon.endpoint);
    daemon.wait_for(" is back after ");
    nodes[0].signal(Signal::SIGTERM);
    for node in nodes {
        let finished = node.finish();
        finished.expect_exit(143);
        let said = finished.transcript();
        assert!(
            !said.contains("was lost") && !said.contains("restarting"),
            "{said}"
        );
    }
    stop(Some(daemon));
}

#[track_caller]
fn stop(daemon: Option<Daemon>) {
    daemon.expect("one that runs").stop().expect_exit(0);
}
