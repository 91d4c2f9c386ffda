//! Workers that hang: found, asked what they do, written down, ended.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use ddp_proto::control::PeerWait;
use ddp_proto::ids::{Generation, LocalRank};
use nix::sys::signal::Signal;
use tokio::time::{sleep, timeout};

use super::WorkerGroup;
use crate::output::console::Console;
use crate::plan::LaunchPlan;
use crate::supervise::hang::{self, Silent};
use crate::threads::BlockingThread;

/// Looks within one `--hang-timeout`.
const LOOKS: u32 = 10;
/// How long workers may take to report their state: they look up the names of functions first.
const ANSWER_BOUND: Duration = Duration::from_secs(3);
/// How long the kernel may take to tell of their threads.
const THREADS_BOUND: Duration = Duration::from_secs(1);
/// The hint for a script that hangs.
const SCRIPT_HINT: &str =
    "\n  hint: if it was still working, raise `--hang-timeout`, or call `ddp_run.heartbeat` during long work";
/// Lines of a worker's own answer that the report shows: what it waits for, and the stack of its main thread.
const ANSWER_LINES: usize = 24;

/// What the threads of processes do, a line each, by process id.
pub(in crate::agent) type Threads = BTreeMap<i32, String>;

/// Looks for workers of this node that hang.
pub(in crate::agent) struct HangWatch {
    /// `--hang-timeout`: a worker without progress for this long hangs.
    bound: Option<Duration>,
    /// The workers are native, so their waits have a time-out. Other programs might wait for ever, so their waits are ignored.
    believes_waits: bool,
    console: Console,
    files: BlockingThread,
    /// The generation whose workers were asked what they do, and may answer still.
    asking: Option<Generation>,
    /// The missing heartbeats were reported.
    reported_unwatched: bool,
}

impl HangWatch {
    pub(in crate::agent) fn new(plan: &LaunchPlan, console: Console, files: BlockingThread) -> Self {
        Self {
            bound: plan.hang_timeout,
            believes_waits: plan.command.native,
            console,
            files,
            asking: None,
            reported_unwatched: false,
        }
    }

    /// How often to look, if `--hang-timeout` is set.
    pub(in crate::agent) fn interval(&self) -> Option<Duration> {
        self.bound.map(|bound| bound / LOOKS)
    }

    /// Looks whether one of the workers that run has said nothing new for too long. If so, all are to be asked what they
    /// do; [`HangWatch::judge`] takes what [`HangWatch::answers`] gives. Half-way there, it is called slow.
    pub(in crate::agent) fn has_to_ask(&mut self, generation: Generation, group: &mut WorkerGroup) -> bool {
        let (Some(bound), None) = (self.bound, self.asking) else {
            return false;
        };
        if !self.reported_unwatched && group.is_unwatched(bound) {
            self.reported_unwatched = true;
            self.console.say(&format!(
                "`--hang-timeout` is not active yet: no worker on this node has sent a heartbeat in {} s; each is watched from its first one on\n  \
                 hint: Python scripts send them with `ddp_run.heartbeat(step)` (package `ddp_run`)",
                bound.as_secs_f64()
            ));
        }
        if let Some((local_rank, _, silent)) = self.silent(group, bound) {
            let worker = group.get_mut(local_rank);
            if silent.waits && worker.is_some_and(|worker| worker.found_waiting == Some(silent.beat.step)) {
                return false;
            }
            self.asking = Some(generation);
            group.forget_states();
            return true;
        }
        let Some((local_rank, _, Silent { beat, waits: false })) = self.silent(group, bound / 2) else {
            return false;
        };
        if let Some(worker) = group.get_mut(local_rank)
            && worker.called_slow != Some(beat.step)
        {
            worker.called_slow = Some(beat.step);
            let slowness = beat.slowness(&worker.activity, Instant::now(), bound);
            self.console.say(&format!("rank {} {slowness}", worker.rank));
        }
        false
    }

    /// Leaves the workers the time to say what they do, since those that hang may not answer at all; then gives what the
    /// kernel knows of their threads.
    pub(in crate::agent) fn answers(&self, group: &WorkerGroup) -> impl Future<Output = Threads> + use<> {
        let pids: Vec<i32> = group.live_pids().collect();
        let read = move || pids.into_iter().map(|pid| (pid, hang::threads_of(pid))).collect();
        wait_for_answers(self.files.give(read))
    }

    /// The live worker that is to blame for a silence of at least `bound`.
    fn silent(&self, group: &WorkerGroup, bound: Duration) -> Option<(LocalRank, i32, Silent)> {
        let (local_rank, pid, mut silent) = group.silent(bound)?;
        silent.waits &= self.believes_waits;
        Some((local_rank, pid, silent))
    }

    /// Ends the worker that hangs, with SIGABRT: a Python program with `faulthandler` shows where it was. One that is
    /// still there at the next look gets SIGKILL. What follows is what follows any failure.
    ///
    /// A worker that waits for others is not ended: who it waits for may be well too, with a cut link between them, and
    /// the wait has a time-out of its own.
    pub(in crate::agent) fn judge(
        &mut self,
        running: Option<Generation>,
        group: &mut WorkerGroup,
        threads: &Threads,
    ) {
        let asked = self.asking.take();
        // Workers of a later generation have not been asked.
        let (Some(bound), true) = (self.bound, running.is_some() && asked == running) else {
            return;
        };
        let Some((local_rank, pid, silent)) = self.silent(group, bound) else {
            return self
                .console
                .say("the silent worker made progress again: it was slow, not hung");
        };
        if group.get_mut(local_rank).is_some_and(|worker| worker.aborted) {
            return group.end_hung(local_rank, Signal::SIGKILL);
        }
        let states = self
            .write_states(group, threads)
            .map_or_else(String::new, |states| {
                format!("\n  state of all workers on this node: {states}")
            });
        let Some(worker) = group.get_mut(local_rank) else {
            return;
        };
        let rank = worker.rank;
        if silent.waits {
            let wait = worker.waits.first().map_or_else(String::new, PeerWait::to_string);
            group.found_waiting();
            return self.console.say(&format!(
                "rank {rank} makes no progress but is not stopped: {wait}, and this wait ends after \
                 `parallel.timeout_s`{states}"
            ));
        }
        worker.aborted = true;
        let mut words = silent.beat.trouble(&worker.activity, Instant::now(), bound);
        let threads = threads.get(&pid).map_or("", String::as_str);
        for line in summary(worker.state.as_deref(), threads) {
            let _ = write!(words, "\n  {line}");
        }
        words.push_str(&states);
        if !self.believes_waits {
            words.push_str(SCRIPT_HINT);
        }
        worker.message.get_or_insert_with(|| words.clone());
        self.console.say(&format!("rank {rank} {words}"));
        group.end_hung(local_rank, Signal::SIGABRT);
    }

    /// Writes what every worker does into its log folder, as `hang.txt`; gives the pattern of the files.
    fn write_states(&self, group: &WorkerGroup, threads: &Threads) -> Option<String> {
        let now = Instant::now();
        let dir = group.attempt_dir()?;
        let mut states = Vec::new();
        for (pid, worker) in group.live() {
            let place = worker.place().unwrap_or_else(|| "no heartbeat yet".to_owned());
            let silence = worker.beat.map_or(0.0, |beat| beat.silence(now).as_secs_f64());
            let mut text = format!(
                "rank {}, pid {pid}: {place}, no progress for {silence:.1} s\n",
                worker.rank
            );
            let line = |wait: &PeerWait| format!("{wait}\n");
            let waits = || worker.waits.iter().map(line).collect();
            let state = worker.state.clone().unwrap_or_else(waits);
            if !state.is_empty() {
                let _ = write!(text, "\nreported by the worker:\n{state}");
            }
            if let Some(threads) = threads.get(&pid) {
                let _ = write!(text, "\nthreads, as the kernel reports them:\n{threads}");
            }
            states.extend(worker.files.hang_file().map(|file| (worker.rank, file, text)));
        }
        let console = self.console.clone();
        tokio::spawn(self.files.give(move || {
            for (rank, file, text) in states {
                if let Err(error) = std::fs::write(file, text) {
                    console.say(&format!("cannot write the state of rank {rank}: {error}"));
                }
            }
        }));
        Some(dir.join("*/hang.txt").display().to_string())
    }
}

async fn wait_for_answers(read: impl Future<Output = Option<Threads>>) -> Threads {
    sleep(ANSWER_BOUND).await;
    let threads = timeout(THREADS_BOUND, read).await;
    threads.ok().flatten().unwrap_or_default()
}

/// The worker's own words, or the kernel's if it has none.
fn summary<'a>(answer: Option<&'a str>, threads: &'a str) -> impl Iterator<Item = &'a str> {
    let own = answer.unwrap_or(threads);
    // The stack of the main thread comes first, and ends where the next thread begins.
    let mut seen = 0;
    own.lines()
        .take_while(move |line| {
            seen += usize::from(answer.is_some() && line.starts_with("thread "));
            seen < 2
        })
        .take(ANSWER_LINES)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `/proc` gives of a worker's threads takes as long as the kernel likes: the worker may hold a lock there.
    #[tokio::test]
    async fn a_look_at_threads_that_does_not_end_does_not_hold_up_the_report() {
        let files = BlockingThread::start("test").unwrap();
        let (kernel, never) = std::sync::mpsc::channel::<Threads>();
        let answers = wait_for_answers(files.give(move || never.recv().unwrap_or_default()));
        assert_eq!(answers.await, Threads::new());
        drop(kernel);
    }

    #[test]
    fn the_report_shows_what_is_waited_for_and_the_main_thread() {
        let answer = "all-reduce #3 has waited 9.0 s for rank 1\nthread 7 (ddp-train)\n  run\nthread 8 (other)\n  park\n";
        let shown: Vec<&str> = summary(Some(answer), "thread 7: S").collect();
        assert_eq!(
            shown,
            [
                "all-reduce #3 has waited 9.0 s for rank 1",
                "thread 7 (ddp-train)",
                "  run"
            ]
        );
        let shown: Vec<&str> = summary(None, "thread 7: S\nthread 8: S\n").collect();
        assert_eq!(shown, ["thread 7: S", "thread 8: S"]);
    }
}
