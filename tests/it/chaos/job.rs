//! One job under faults.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::Pid;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::Fault;
use crate::harness::{
    Daemon, Launch, Proxy, Running, TinyJob, children, environment_of, eventually, groups_made_by, launch,
    metrics, processes, temp_dir,
};

/// Names the job in the environment of all its processes.
const MARKER: &str = "CHAOS_JOB";
/// Longest time between two faults.
const MAX_GAP_MS: u64 = 250;
/// A fault that finds no target is tried again, so often.
const MAX_TRIES: u32 = 100;
/// Steps of a native job.
const STEPS: usize = 300;

/// A worker with a child and a grandchild that hides in a session of its own; it ends when the gate opens.
const WORKER: &str = r#"setsid sleep 1000 & sleep 1000 & echo "rank $RANK works"; read -r _ < "$GATE""#;

/// What a job is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// One node, two workers, the daemon inside the launcher.
    Alone,
    /// The same, with native workers that train.
    Native,
    /// Two nodes, a daemon.
    Pair,
    /// One or two nodes, a daemon.
    Elastic,
}

/// A named pipe on which workers wait.
struct Gate {
    path: PathBuf,
    pipe: File,
}

impl Gate {
    fn at(path: PathBuf) -> Self {
        nix::unistd::mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR).expect("a named pipe");
        // With both ends open here, workers neither wait for the pipe to be opened nor see its end.
        let pipe = File::options().read(true).write(true).open(&path);
        Self {
            path,
            pipe: pipe.expect("our own pipe"),
        }
    }

    /// A line for each worker that waits, now or in a later generation.
    fn open(&mut self) {
        self.pipe.write_all(&[b'\n'; 4096]).expect("room in the pipe");
    }
}

struct Node {
    running: Running,
    /// Its place among the nodes.
    place: usize,
    /// SIGKILL was sent; it may have come too late.
    killed: bool,
}

/// How a job ended.
pub(super) struct Verdict {
    pub(super) faults: Vec<Fault>,
    /// Of the first node that was not killed.
    pub(super) exit_code: Option<i32>,
}

pub(super) struct Job {
    /// For messages.
    name: String,
    dice: StdRng,
    kind: Kind,
    marker: String,
    max_restarts: String,
    /// Its workers do not listen to SIGTERM.
    stubborn: bool,
    planned: u32,
    /// `TMPDIR` of the job, and the gate.
    scratch: tempfile::TempDir,
    training: Option<TinyJob>,
    gate: Gate,
    daemon: Option<Daemon>,
    /// One a node, none if the daemon is in the launcher.
    wires: Vec<Proxy>,
    nodes: Vec<Node>,
    /// All launchers that there were.
    launchers: Vec<i32>,
    faults: Vec<Fault>,
}

impl Job {
    /// Job number `index` of the seed.
    pub(super) fn of(seed: u64, index: u64) -> Self {
        let mut dice = StdRng::seed_from_u64(seed ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let kind = [
            Kind::Alone,
            Kind::Pair,
            Kind::Elastic,
            Kind::Pair,
            Kind::Elastic,
            Kind::Native,
        ][dice.random_range(0..6)];
        let scratch = temp_dir();
        let yaml = |yaml: &str| yaml.replace("steps: 40", &format!("steps: {STEPS}"));
        let daemon = matches!(kind, Kind::Pair | Kind::Elastic).then(Daemon::start);
        let wires = daemon
            .iter()
            .flat_map(|daemon| [0, 1].map(|_| Proxy::to(&daemon.endpoint)));
        Self {
            name: format!("job {index} ({kind:?}) of seed {seed}"),
            marker: format!("{}-{seed:016x}-{index}", std::process::id()),
            max_restarts: dice.random_range(0..=6).to_string(),
            stubborn: dice.random_bool(0.25),
            planned: dice.random_range(1..=12),
            gate: Gate::at(scratch.path().join("gate")),
            training: (kind == Kind::Native).then(|| TinyJob::with(yaml)),
            wires: wires.collect(),
            nodes: Vec::new(),
            launchers: Vec::new(),
            faults: Vec::new(),
            scratch,
            daemon,
            kind,
            dice,
        }
    }

    /// Starts it, injects faults, lets it end, and looks at what is left.
    pub(super) fn run(mut self) -> Verdict {
        for place in 0..self.wires.len().max(1) {
            self.start(place);
        }
        let mut tries = 0;
        while self.faults.len() < self.planned as usize && tries < MAX_TRIES && !self.living().is_empty() {
            tries += 1;
            let gap = self.dice.random_range(0..MAX_GAP_MS);
            self.watch(Duration::from_millis(gap));
            let fault = self.inject_fault();
            self.faults.extend(fault);
        }
        self.gate.open();
        self.judge()
    }

    fn start(&mut self, place: usize) {
        let launch = self.flags(place).env(MARKER, &self.marker);
        let scratch = self.scratch.path().to_str().expect("unicode");
        let launch = launch
            .env("TMPDIR", scratch)
            .flag("--max-restarts", &self.max_restarts);
        let launch = match &self.training {
            Some(training) => launch.dir(training.dir()).target("tiny.yaml"),
            None => launch.env("GATE", &self.gate.path).shell(&self.script()),
        };
        let running = launch.start();
        self.launchers.push(running.pid());
        self.nodes.push(Node {
            running,
            place,
            killed: false,
        });
    }

    fn script(&self) -> String {
        let deaf = if self.stubborn { "trap '' TERM; " } else { "" };
        format!("{deaf}{WORKER}")
    }

    fn flags(&self, place: usize) -> Launch {
        let launch = launch().nproc(2).flag("--shutdown-timeout", "0.5");
        let Some(wire) = self.wires.get(place) else {
            return launch;
        };
        let nodes = if self.kind == Kind::Elastic { "1:2" } else { "2" };
        launch
            .flag("--nnodes", nodes)
            .flag("--rdzv-endpoint", wire.endpoint())
            .flag("--rdzv-id", "chaos")
            .flag(
                "--rdzv-conf",
                "is_host=false,join_timeout=5,timeout=20,last_call_timeout=0.3",
            )
    }

    /// Numbers of the nodes that were neither killed nor have ended.
    fn living(&mut self) -> Vec<usize> {
        let nodes = self.nodes.iter_mut().enumerate();
        let living = nodes.filter_map(|(number, node)| {
            (!node.killed && !node.running.ended_within(Duration::ZERO)).then_some(number)
        });
        living.collect()
    }

    /// Lets `gap` pass, less if the first of its living nodes ends.
    fn watch(&mut self, gap: Duration) {
        if let Some(first) = self.living().first() {
            self.nodes[*first].running.ended_within(gap);
        }
    }

    /// One fault at random; none if there was no target.
    fn inject_fault(&mut self) -> Option<Fault> {
        let fault = match (self.dice.random_range(0..100), self.daemon.is_some()) {
            (0..55, _) | (55..90, false) => Fault::Worker,
            (55..70, true) | (90.., false) => Fault::Agent,
            (70..90, true) => Fault::Connection,
            _ => Fault::Daemon,
        };
        let hit = match fault {
            Fault::Worker => self.kill_a_worker(),
            Fault::Agent => self.kill_an_agent(),
            Fault::Connection => {
                let place = self.dice.random_range(0..self.wires.len());
                self.wires[place].cut() > 0
            }
            Fault::Daemon => self.replace_the_daemon(),
        };
        hit.then_some(fault)
    }

    fn kill_a_worker(&mut self) -> bool {
        let launchers = self.nodes.iter().filter(|node| !node.killed);
        let workers: Vec<i32> = launchers
            .flat_map(|node| children(node.running.pid()))
            // Not the guardian, and not a stranger with a number that is in use again.
            .filter(|pid| environment_of(*pid).contains_key("RANK") && self.is_ours(*pid))
            .collect();
        if workers.is_empty() {
            return false;
        }
        let victim = workers[self.dice.random_range(0..workers.len())];
        kill(Pid::from_raw(victim), Signal::SIGKILL).is_ok()
    }

    /// Kills a launcher; on several nodes another one usually comes in its place.
    fn kill_an_agent(&mut self) -> bool {
        let living = self.living();
        if living.is_empty() {
            return false;
        }
        let victim = &mut self.nodes[living[self.dice.random_range(0..living.len())]];
        if kill(Pid::from_raw(victim.running.pid()), Signal::SIGKILL).is_err() {
            return false;
        }
        victim.killed = true;
        let place = victim.place;
        if self.daemon.is_some() && self.dice.random_bool(0.75) {
            self.start(place);
        }
        true
    }

    fn replace_the_daemon(&mut self) -> bool {
        let Some(daemon) = self.daemon.take() else {
            return false;
        };
        daemon.kill();
        let daemon = Daemon::start();
        for wire in &self.wires {
            wire.aim(&daemon.endpoint);
        }
        self.daemon = Some(daemon);
        true
    }

    fn is_ours(&self, pid: i32) -> bool {
        environment_of(pid).get(MARKER) == Some(&self.marker)
    }

    /// Waits for the end of every node; each must have one that can be explained.
    fn judge(mut self) -> Verdict {
        let mut codes = Vec::new();
        for node in std::mem::take(&mut self.nodes) {
            let finished = node.running.finish();
            let transcript = finished.transcript();
            let Some(code) = finished.code() else {
                assert!(
                    node.killed,
                    "{}: it ended without being killed: {transcript}",
                    self.name
                );
                finished.expect_killed_by(Signal::SIGKILL);
                continue;
            };
            // A rank that was killed, the daemon out of reach, nodes that did not come.
            assert!([0, 137, 69, 75].contains(&code), "{}: {transcript}", self.name);
            let named = finished.stderr().contains("error: ");
            assert!(
                code == 0 || named,
                "{}: a failure without a name: {transcript}",
                self.name
            );
            codes.push(code);
        }
        let alike = codes.iter().collect::<BTreeSet<_>>().len() <= 1;
        let only_workers = self.faults.iter().all(|fault| *fault == Fault::Worker);
        assert!(alike || !only_workers, "{}: {codes:?}", self.name);
        self.expect_nothing_left();
        if let (Some(training), Some(0)) = (&self.training, codes.first()) {
            assert_eq!(
                metrics(&training.out()).len(),
                STEPS,
                "{}: each step once",
                self.name
            );
        }
        Verdict {
            faults: self.faults,
            exit_code: codes.first().copied(),
        }
    }

    fn expect_nothing_left(&self) {
        eventually(&format!("no process left of {}", self.name), || {
            let left = processes().into_iter().find(|pid| self.is_ours(*pid));
            left.is_none().then_some(())
        });
        eventually(&format!("no control group left of {}", self.name), || {
            let left = self.launchers.iter().flat_map(|pid| groups_made_by(*pid));
            (left.count() == 0).then_some(())
        });
        // Guardians remove the directories of launchers that were killed, after the last process is gone.
        eventually(&format!("no file left of {}", self.name), || {
            let entries = std::fs::read_dir(self.scratch.path())
                .expect("our own folder")
                .flatten();
            entries
                .map(|entry| entry.file_name())
                .all(|name| name == "gate")
                .then_some(())
        });
    }
}
