//! Workers that hang: found, asked what they do, written down, ended.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use ddp_proto::control::PeerWait;
use ddp_proto::ids::LocalRank;
use nix::sys::signal::Signal;

use super::super::tasks::{self, Threads};
use super::Driver;
use crate::supervise::hang::{self, Silent};

/// Lines of a worker's own answer that the report shows: what it waits for, and the stack of its main thread.
const ANSWER_LINES: usize = 24;

impl Driver<'_> {
    /// Asks all workers what they do when one has said nothing new for too long; the answers are judged by
    /// [`Driver::judge_hung`]. Half-way there, it is called slow.
    pub(super) fn look_for_hung_workers(&mut self) {
        let (Some(bound), true, None) = (self.plan.hang_timeout, self.machine.is_running(), self.asking)
        else {
            return;
        };
        if !self.told_unwatched && self.worker_group.is_unwatched(bound) {
            self.told_unwatched = true;
            self.console.say(&format!(
                "`--hang-timeout` is not active yet: no worker on this node has sent a heartbeat in {} s; each is watched from its first one on
  \
                 hint: Python scripts send them with `ddp_run.heartbeat(step)` (package `ddp_run`)",
                bound.as_secs_f64()
            ));
        }
        if let Some((local_rank, _, silent)) = self.silent(bound) {
            let worker = self.worker_group.get_mut(local_rank);
            if silent.waits && worker.is_some_and(|worker| worker.found_waiting == Some(silent.beat.step)) {
                return;
            }
            self.asking = Some(self.machine.generation());
            self.worker_group.forget_states();
            self.control.describe();
            let pids: Vec<i32> = self.worker_group.live_pids().collect();
            let read = self
                .files
                .give(move || pids.into_iter().map(|pid| (pid, hang::threads_of(pid))).collect());
            return tasks::wait_for_answers(self.task_results.clone(), read);
        }
        let Some((local_rank, _, Silent { beat, waits: false })) = self.silent(bound / 2) else {
            return;
        };
        if let Some(worker) = self.worker_group.get_mut(local_rank)
            && worker.called_slow != Some(beat.step)
        {
            worker.called_slow = Some(beat.step);
            let slowness = beat.slowness(&worker.activity, Instant::now(), bound);
            let words = format!("rank {} {slowness}", worker.rank);
            self.console.say(&words);
        }
    }

    /// The live worker that is to blame for a silence of at least `bound`. Only waits of native workers have a time-out
    /// of their own: others are not believed, since they might wait for ever.
    fn silent(&self, bound: Duration) -> Option<(LocalRank, i32, Silent)> {
        let (local_rank, pid, mut silent) = self.worker_group.silent(bound)?;
        silent.waits &= self.plan.command.native;
        Some((local_rank, pid, silent))
    }

    /// Ends the worker that hangs, with SIGABRT: a Python program with `faulthandler` shows where it was. One that is
    /// still there at the next look gets SIGKILL. What follows is what follows any failure.
    ///
    /// A worker that waits for others is not ended: who it waits for may be well too, with a cut link between them, and
    /// the wait has a time-out of its own.
    pub(super) fn judge_hung(&mut self, threads: &Threads) {
        let asked = self.asking.take();
        self.read_control();
        // Workers of a later generation have not been asked.
        let is_current = asked == Some(self.machine.generation()) && self.machine.is_running();
        let (Some(bound), true) = (self.plan.hang_timeout, is_current) else {
            return;
        };
        let Some((local_rank, pid, silent)) = self.silent(bound) else {
            return self
                .console
                .say("the silent worker made progress again: it was slow, not hung");
        };
        let (beat, now) = (silent.beat, Instant::now());
        if self
            .worker_group
            .get_mut(local_rank)
            .is_some_and(|worker| worker.aborted)
        {
            return self.worker_group.end_hung(local_rank, Signal::SIGKILL);
        }
        let states = self.write_states(threads);
        let Some(worker) = self.worker_group.get_mut(local_rank) else {
            return;
        };
        let states = states.map_or_else(String::new, |states| {
            format!("\n  state of all workers on this node: {states}")
        });
        let rank = worker.rank;
        if silent.waits {
            let wait = worker.waits.first().map_or_else(String::new, PeerWait::to_string);
            self.worker_group.found_waiting();
            return self.console.say(&format!(
                "rank {rank} makes no progress but is not stopped: {wait}, and this wait ends after \
                 `parallel.timeout_s`{states}"
            ));
        }
        worker.aborted = true;
        let mut words = beat.trouble(&worker.activity, now, bound);
        let threads = threads.get(&pid).map_or("", String::as_str);
        for line in summary(worker.state.as_deref(), threads) {
            let _ = write!(words, "\n  {line}");
        }
        words.push_str(&states);
        worker.said.get_or_insert_with(|| words.clone());
        self.console.say(&format!("rank {rank} {words}"));
        self.worker_group.end_hung(local_rank, Signal::SIGABRT);
    }

    /// Writes what every worker does into its log folder, as `hang.txt`; gives the pattern of the files.
    fn write_states(&self, threads: &Threads) -> Option<String> {
        let now = Instant::now();
        let dir = self.worker_group.attempt_dir()?;
        let mut states = Vec::new();
        for (pid, worker) in self.worker_group.live() {
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
            states.extend(worker.hang_file().map(|file| (worker.rank, file, text)));
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
