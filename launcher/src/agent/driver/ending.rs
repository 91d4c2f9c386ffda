//! The end of the launch: what people and programs are told of it.

use ddp_proto::ids::{Generation, GlobalRank};
use ddp_proto::rendezvous::agent_message::Body as Report;
use ddp_proto::rendezvous::daemon_message::Body as Word;

use super::super::conclusion::Conclusion;
use super::Driver;
use crate::event_log::Happening;
use crate::logs::remove_empty;
use crate::report::{self, Facts};
use crate::root_cause::Verdict;

impl Driver<'_> {
    /// Reports how the workers ended, when all of them are gone.
    pub(super) fn report_ends(&mut self, generation: Generation) {
        self.read_control();
        self.link.send(generation, Report::NodeStopped(self.crew.ends()));
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
    pub(super) fn publish(&mut self, conclusion: &Conclusion, report: Option<&str>) {
        self.event_log.put(Happening::Finished {
            exit_code: conclusion.exit_code(),
            report,
        });
        if matches!(conclusion, Conclusion::Succeeded) && self.run_token.is_empty() {
            self.console.say(
                "the job succeeded without this node: as a spare it was never needed, and started no worker",
            );
        }
        if matches!(conclusion, Conclusion::Stopped { .. }) {
            // It may have been stopped before it wrote anything.
            remove_empty(&self.made);
            return;
        }
        let Some(report) = report else { return };
        let first_rank = match conclusion {
            Conclusion::JobOver { first_failure, .. } => first_failure.as_ref().map(|first| first.0.rank),
            _ => None,
        };
        let verdict = Verdict {
            job_id: &self.plan.job_id,
            conclusion,
            report,
            local_failure: self.local_failure.as_ref(),
            failures: &self.failures,
            generation: self.machine.generation(),
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
            output_unseen: self.plan.output.direct,
            local_failure: self.local_failure.as_ref(),
            local_ends: &self.crew.local_ends(),
            failures: &self.failures,
            generation: self.machine.generation(),
            ran_for: self.crew.ran_for(),
        })
    }
}
