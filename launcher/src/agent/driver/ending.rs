//! The end of the launch: what people and programs are told of it.

use std::time::Instant;

use ddp_proto::ids::GlobalRank;
use nix::sys::signal::Signal;

use super::super::conclusion::Conclusion;
use super::Driver;
use crate::event_log::Happening;
use crate::hang;
use crate::report::{self, Facts};
use crate::root_cause::Verdict;

impl Driver<'_> {
    /// Ends a worker that hangs, with SIGABRT: a Python program with `faulthandler` shows where it was. One that is still
    /// there at the next look gets SIGKILL. What follows is what follows any failure.
    pub(super) fn look_for_hung_workers(&mut self) {
        let (Some(bound), true) = (self.plan.hang_timeout, self.machine.is_running()) else {
            return;
        };
        let Some((local_rank, pid, beat)) = self.crew.silent(bound) else {
            return;
        };
        let Some(worker) = self.crew.get_mut(local_rank) else {
            return;
        };
        if worker.aborted {
            self.crew.end_hung(local_rank, Signal::SIGKILL);
            return;
        }
        worker.aborted = true;
        let words = hang::describe(pid, beat, Instant::now());
        self.console.say(&format!("rank {} {words}", worker.rank));
        worker.said.get_or_insert(words);
        self.crew.end_hung(local_rank, Signal::SIGABRT);
    }

    /// Tells programs how it ended; those who start us, and those who read our files.
    pub(super) fn publish(&mut self, conclusion: &Conclusion, report: Option<&str>) {
        self.event_log.put(Happening::Finished {
            exit_code: conclusion.exit_code(),
            report,
        });
        let (Some(report), false) = (report, matches!(conclusion, Conclusion::Stopped { .. })) else {
            return;
        };
        let first_rank = match conclusion {
            Conclusion::JobOver { first_failure, .. } => first_failure.as_ref().map(|first| first.0.rank),
            _ => None,
        };
        let verdict = Verdict {
            job_id: &self.plan.job_id,
            conclusion,
            report,
            local_failure: self.local_failure.as_ref(),
            hostname: &self.hostname,
            worker_file: first_rank.and_then(|rank| self.crew.error_file_of(GlobalRank(rank))),
        };
        let below_logs = self
            .plan
            .log_dir
            .as_deref()
            .map_or(Ok(()), |dir| verdict.write_to(dir));
        for written in [below_logs, verdict.pass_on(&self.inherited)] {
            if let Err(error) = written {
                self.console.say(&format!("cannot write the error file: {error}"));
            }
        }
    }

    pub(super) fn report(&self, conclusion: &Conclusion) -> Option<String> {
        report::report(&Facts {
            conclusion,
            program: &self.plan.command.display_name,
            hostname: &self.hostname,
            local_failure: self.local_failure.as_ref(),
            local_ends: &self.crew.local_ends(),
            ran_for: self.crew.ran_for(),
        })
    }
}
