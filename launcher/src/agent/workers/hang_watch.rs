//! Workers that hang: found, asked what they do, written down, compared by the daemon, ended.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use ddp_proto::control::{self, PeerWait};
use ddp_proto::ids::Generation;
use ddp_proto::printable;
use ddp_proto::rendezvous::{Collective, HangVerdict, HungRank, HungWorkers};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::time::{sleep, timeout};

use super::{Worker, WorkerGroup};
use crate::output::console::Console;
use crate::plan::LaunchPlan;
use crate::supervise::hang::{self, Beat};
use crate::threads::BlockingThread;

/// How many times to look within one `--hang-timeout`.
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
/// All stacks in a report to the daemon.
const MAX_STACKS_BYTES: usize = 64 << 10;
/// All collectives in it.
const MAX_REPORTED_COLLECTIVES: usize = 512;

/// What the threads of processes do, a line each, by process id.
pub(in crate::agent) type Threads = BTreeMap<i32, String>;

/// Looks for workers of this node that hang.
pub(in crate::agent) struct HangWatch {
    /// `--hang-timeout`: a worker without progress for this long hangs.
    bound: Option<Duration>,
    /// The workers are native, so their waits have a time-out. Other programs might wait for ever, so their waits do not save them from being ended.
    believes_waits: bool,
    console: Console,
    files: BlockingThread,
    /// The generation whose workers were asked what they do, and may answer still.
    asking: Option<Generation>,
    /// What the kernel said last of their threads.
    threads: Threads,
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
            threads: Threads::new(),
            reported_unwatched: false,
        }
    }

    /// How often to look, if `--hang-timeout` is set.
    pub(in crate::agent) fn interval(&self) -> Option<Duration> {
        self.bound.map(|bound| bound / LOOKS)
    }

    /// Looks whether one of the workers that run has said nothing new for too long. If so, all are to be asked what they
    /// do; [`HangWatch::report`] takes what [`HangWatch::answers`] gives.
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
        let silent = group.silent(bound);
        let is_news = |(_, worker, beat): &(i32, &Worker, Beat)| {
            !self.waits_with_time_out(worker, beat) || worker.found_waiting != Some(beat.step)
        };
        let has_news = silent.iter().any(is_news);
        if has_news {
            self.asking = Some(generation);
            group.forget_states();
        }
        has_news
    }

    /// Leaves the workers the time to say what they do, since those that hang may not answer at all; then gives what the
    /// kernel knows of their threads.
    pub(in crate::agent) fn answers(&self, group: &WorkerGroup) -> impl Future<Output = Threads> + use<> {
        let pids: Vec<i32> = group.live_pids().collect();
        let read = move || pids.into_iter().map(|pid| (pid, hang::threads_of(pid))).collect();
        wait_for_answers(self.files.give(read))
    }

    /// The worker lives, and waits for ranks that it knows. It is not ended: those may be well too, with a cut link between
    /// them, and the wait has a time-out of its own.
    fn waits_with_time_out(&self, worker: &Worker, beat: &Beat) -> bool {
        let lives = |bound| !beat.is_lost(Instant::now(), bound);
        let knows = worker.waits.iter().any(|wait| !wait.peers.is_empty());
        self.believes_waits && knows && self.bound.is_some_and(lives)
    }

    /// What the daemon is to compare with the workers of other nodes. A worker that was to be ended and is still there
    /// gets SIGKILL.
    pub(in crate::agent) fn report(
        &mut self,
        running: Option<Generation>,
        group: &mut WorkerGroup,
        threads: Threads,
    ) -> Option<HungWorkers> {
        let asked = self.asking.take();
        let bound = self.bound?;
        // Workers of a later generation have not been asked.
        if running.is_none() || asked != running {
            return None;
        }
        self.threads = threads;
        let mut silent = group.silent(bound);
        if silent.is_empty() {
            self.console
                .say("the silent worker made progress again: it was slow, not hung");
            return None;
        }
        if let Some((pid, ..)) = silent.iter().find(|(_, worker, _)| worker.aborted) {
            end_hung(*pid, Signal::SIGKILL);
            return None;
        }
        self.write_states(group);
        silent.sort_by_key(|(.., beat)| (beat.step, beat.silent_since()));
        let (waiting, silent): (Vec<_>, Vec<_>) = silent
            .into_iter()
            .partition(|(_, worker, beat)| self.waits_with_time_out(worker, beat));
        let report = HungWorkers {
            ranks: self.compare(&silent, bound),
            period_ms: (bound / LOOKS + ANSWER_BOUND + THREADS_BOUND).as_millis() as u32,
        };
        if let ([], [(_, worker, _), ..]) = (&silent[..], &waiting[..]) {
            let wait = worker.waits.first().map_or_else(String::new, PeerWait::to_string);
            self.console.say(&format!(
                "rank {} makes no progress but is not stopped: {wait}, and this wait ends after \
                 `parallel.timeout_s`{}",
                worker.rank,
                states_of(group)
            ));
            group.found_waiting();
        }
        Some(report)
    }

    /// What these workers do.
    fn compare(&self, silent: &[(i32, &Worker, Beat)], bound: Duration) -> Vec<HungRank> {
        let describe = |(_, worker, beat): &(i32, &Worker, Beat)| {
            let state = worker.state.as_deref().unwrap_or_default();
            let mut stack = summary(Some(state), "").collect::<Vec<_>>().join("\n");
            stack.truncate(stack.floor_char_boundary(MAX_STACKS_BYTES / silent.len()));
            HungRank {
                rank: worker.rank.0,
                step: beat.step,
                lost: beat.is_lost(Instant::now(), bound),
                collectives: of_each_group(&worker.collectives)
                    .into_iter()
                    .take(MAX_REPORTED_COLLECTIVES / silent.len())
                    .collect(),
                waits: !worker.waits.is_empty() || !self.believes_waits && hang::waits_for_ranks(state),
                stack,
            }
        };
        silent.iter().map(describe).collect()
    }

    /// Ends the worker that hangs, with SIGABRT: a Python program with `faulthandler` shows where it was. One that is
    /// still there at the next look gets SIGKILL. What follows is what follows any failure: the signal does not count as
    /// one of ours.
    pub(in crate::agent) fn carry_out(&self, verdict: &HangVerdict, group: &mut WorkerGroup) {
        let Some(rank) = verdict.rank else {
            let comparison = printable::text(&verdict.comparison);
            return self.console.say(&format!("{comparison}{}", states_of(group)));
        };
        let bound = self.bound.unwrap_or_default();
        let mut silent = group.silent(bound).into_iter();
        let Some((pid, worker, beat)) = silent.find(|(_, worker, _)| worker.rank.0 == rank) else {
            return;
        };
        let mut words = beat.trouble(&worker.activity, Instant::now(), bound);
        for line in printable::text(&verdict.comparison).lines() {
            let _ = write!(words, "\n  {line}");
        }
        let threads = self.threads.get(&pid).map_or("", String::as_str);
        for line in summary(worker.state.as_deref(), threads) {
            let _ = write!(words, "\n  {line}");
        }
        words.push_str(&states_of(group));
        if !self.believes_waits {
            words.push_str(SCRIPT_HINT);
        }
        self.console.say(&format!("rank {rank} {words}"));
        let ended = group.workers.values_mut().find(|worker| worker.rank.0 == rank);
        if let Some(worker) = ended {
            worker.aborted = true;
            worker.message.get_or_insert(words);
        }
        end_hung(pid, Signal::SIGABRT);
    }

    /// Writes what every worker does into its log folder, as `hang.txt`.
    fn write_states(&self, group: &WorkerGroup) {
        let now = Instant::now();
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
            for collective in worker.collectives.iter().rev() {
                let _ = write!(text, "\n{collective}");
            }
            if let Some(threads) = self.threads.get(&pid) {
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
    }
}

/// Of each process group, the first collective that the rank waits in, or the last one that it finished. The former come
/// first.
fn of_each_group(collectives: &[control::Collective]) -> Vec<Collective> {
    let mut groups = BTreeMap::new();
    for collective in collectives {
        let kept = groups.entry(&collective.group).or_insert(collective);
        if kept.done {
            *kept = collective;
        }
    }
    let mut kept: Vec<_> = groups.into_values().collect();
    kept.sort_by_key(|collective| collective.done);
    let reported = kept.into_iter().cloned().map(|kept| Collective {
        group: kept.group,
        number: kept.number,
        operation: kept.operation,
        done: kept.done,
    });
    reported.collect()
}

/// Where [`HangWatch::write_states`] writes, in words.
fn states_of(group: &WorkerGroup) -> String {
    group.attempt_dir().map_or_else(String::new, |dir| {
        let files = dir.join("*/hang.txt");
        format!("\n  state of all workers on this node: {}", files.display())
    })
}

fn end_hung(pid: i32, signal: Signal) {
    // A stopped process would not take it.
    let _ = killpg(Pid::from_raw(pid), signal);
    let _ = killpg(Pid::from_raw(pid), Signal::SIGCONT);
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
    fn of_each_group_the_collective_counts_that_the_rank_waits_in_or_finished_last() {
        let of = |group: &str, number, done| control::Collective {
            group: group.into(),
            number,
            operation: "all_reduce".into(),
            done,
        };
        let recorded = [
            of("dp", 1, true),
            of("tp", 7, true),
            of("dp", 2, false),
            of("tp", 8, true),
            of("dp", 3, false),
        ];
        let kept = of_each_group(&recorded).into_iter();
        let kept: Vec<_> = kept.map(|kept| (kept.group, kept.number, kept.done)).collect();
        assert_eq!(kept, [("dp".to_owned(), 2, false), ("tp".to_owned(), 8, true)]);
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
