//! The end of the launch: what it reports to people and programs.

use std::time::Duration;

use ddp_proto::exit;
use ddp_proto::ids::{Generation, GlobalRank, LocalRank};
use ddp_proto::rendezvous::agent_message::Body as Report;
use ddp_proto::rendezvous::daemon_message::Body as Word;
use tokio::time::timeout;

use super::super::event::Event;
use super::super::exit_reason::ExitReason;
use super::super::tasks::LeftInFiles;
use super::Driver;
use crate::output::logs::{free_attempt, remove_empty};
use crate::report::event_log::LogEvent;
use crate::report::root_cause::Verdict;
use crate::report::text::{self, Facts};

/// How long the file system may take to store the error files and their copies.
const FILE_BOUND: Duration = Duration::from_secs(2);

impl Driver<'_> {
    /// All that is known of a worker's failure has been collected.
    pub(super) fn on_described(
        &mut self,
        generation: Generation,
        local_rank: LocalRank,
        in_file: Option<String>,
    ) -> Option<Event> {
        if generation != self.machine.generation() {
            return None;
        }
        self.read_control();
        if let Some(words) = in_file {
            self.worker_group.found_in_file(local_rank, words);
        }
        let mut exit = self.worker_group.describe(local_rank)?;
        let is = |code| exit.exit_code == Some(i32::from(code));
        exit.permanent = is(exit::DO_NOT_RESTART)
            || self.plan.command.native && exit::PERMANENT_OF_NATIVE.into_iter().any(is);
        self.local_failure = Some(exit.clone());
        Some(Event::Described(exit))
    }

    /// What is read in files when the workers are gone; of those that failed and have not said why.
    pub(super) fn read_files(&self) -> impl Future<Output = Option<LeftInFiles>> + Send + 'static {
        let log_dir = self.plan.log_dir.clone();
        let failed = self.worker_group.silent_failures();
        let failed = failed.filter_map(|rank| Some((rank, self.worker_group.files_of(rank)?)));
        let failed: Vec<_> = failed.collect();
        self.files.give(move || {
            let words = failed.into_iter();
            LeftInFiles {
                words: words
                    .filter_map(|(rank, files)| Some((rank, files.error_message()?)))
                    .collect(),
                free_attempt: log_dir.as_deref().map(free_attempt),
            }
        })
    }

    /// Keeps what was read in files when the workers were gone.
    pub(super) fn note_files(&mut self, left: LeftInFiles) {
        for (local_rank, words) in left.words {
            self.worker_group.found_in_file(local_rank, words);
        }
        self.free_attempt = left.free_attempt.unwrap_or(self.free_attempt);
    }

    /// Reports how the workers ended, when all of them are gone.
    pub(super) fn report_ends(&mut self, generation: Generation) {
        self.read_control();
        self.link
            .report(generation, Report::NodeStopped(self.worker_group.ends()));
    }

    /// Keeps the failures of the job that the daemon tells.
    pub(super) fn note_failures(&mut self, word: Option<&Word>) {
        let failures = match word {
            Some(Word::JobOver(over)) => over.failures.as_ref(),
            Some(Word::Refused(refused)) => refused.failures.as_ref(),
            Some(Word::LastWord(failures)) => Some(failures),
            _ => None,
        };
        if let Some(failures) = failures {
            self.failures.clone_from(failures);
        }
    }

    /// Tells programs how it ended; those who start us, and those who read our files.
    pub(super) async fn publish(&mut self, exit_reason: &ExitReason, report: Option<&str>) {
        self.event_log.put(LogEvent::Finished {
            exit_code: exit_reason.exit_code(),
            report,
        });
        if matches!(exit_reason, ExitReason::Succeeded) && self.run_token.is_empty() {
            self.console
                .say("the job succeeded without this node, which stayed on standby and started no workers");
        }
        if matches!(exit_reason, ExitReason::Stopped { .. }) {
            // It may have been stopped before it wrote anything.
            let made = std::mem::take(&mut self.made);
            let removed = self.files.give(move || remove_empty(&made));
            // They are empty: nothing is lost if they stay.
            let _ = timeout(FILE_BOUND, removed).await;
            return;
        }
        let Some(report) = report else { return };
        let written = self.files.give(self.error_files(exit_reason, report));
        let complaints = match timeout(FILE_BOUND, written).await {
            Ok(results) => results.into_iter().flatten().filter_map(Result::err).collect(),
            Err(_) => vec![std::io::ErrorKind::TimedOut.into()],
        };
        for error in complaints {
            self.console.say(&format!("cannot write the error file: {error}"));
        }
    }

    /// What writes the error files: the launcher's own, and that of the program that started it.
    fn error_files(
        &self,
        exit_reason: &ExitReason,
        report: &str,
    ) -> impl FnOnce() -> [std::io::Result<()>; 2] + Send + 'static {
        let first_rank = match exit_reason {
            ExitReason::JobOver { first_failure, .. } => first_failure.as_ref().map(|first| first.0.rank),
            _ => None,
        };
        let (plan, inherited, generation) = (
            self.plan.clone(),
            self.inherited.clone(),
            self.machine.generation(),
        );
        let (local_failure, failures) = (self.local_failure.clone(), self.failures.clone());
        let (exit_reason, report, hostname) = (exit_reason.clone(), report.to_owned(), self.hostname.clone());
        let worker_file = first_rank.and_then(|rank| self.worker_group.error_file_of(GlobalRank(rank)));
        move || {
            let verdict = Verdict {
                job_id: &plan.job_id,
                exit_reason: &exit_reason,
                report: &report,
                local_failure: local_failure.as_ref(),
                failures: &failures,
                generation,
                hostname: &hostname,
                worker_file,
            };
            let below_logs = plan.log_dir.as_deref();
            [
                below_logs.map_or(Ok(()), |dir| verdict.write_to(dir)),
                verdict.pass_on(&inherited),
            ]
        }
    }

    pub(super) fn report(&self, exit_reason: &ExitReason) -> Option<String> {
        text::report(&Facts {
            exit_reason,
            program: &self.plan.command.display_name,
            executable: &self.plan.command.program,
            hostname: &self.hostname,
            output_unseen: self.plan.output.direct || self.plan.output.raw,
            local_failure: self.local_failure.as_ref(),
            local_ends: &self.worker_group.local_ends(),
            failures: &self.failures,
            generation: self.machine.generation(),
            ran_for: self.worker_group.ran_for(),
        })
    }
}
