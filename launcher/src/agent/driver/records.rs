//! The records of a launch: the event log, the failures, the report, the error files.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use ddp_proto::ids::{Generation, GlobalRank};
use ddp_proto::rendezvous::daemon_message::Body as Word;
use ddp_proto::rendezvous::{DaemonMessage, Failures, WorkerExit};
use tokio::time::timeout;

use super::super::context::LaunchContext;
use super::super::machine::ExitReason;
use super::super::workers::WorkerGroup;
use crate::output::logs::{create_log_dir, free_attempt, remove_empty};
use crate::report::error_file::JobFailure;
use crate::report::event_log::{EventLog, LogEvent};
use crate::report::facts::ReportFacts;
use crate::report::text;

/// How long the file system may take to store the error files and their copies.
const FILE_BOUND: Duration = Duration::from_secs(2);

/// All that is kept.
pub(super) struct Records {
    event_log: EventLog,
    /// Folders made for log files, the innermost first.
    made: Vec<PathBuf>,
    /// The first attempt without log files.
    free_attempt: u32,
    /// The first failure that this node saw itself in the current generation.
    local_failure: Option<WorkerExit>,
    /// All failures of the job, as the daemon listed them last.
    failures: Failures,
}

impl Records {
    /// Makes the log directory, and opens the event log.
    pub(super) fn open(launch: &LaunchContext<'_>) -> Result<Self, ExitReason> {
        let plan = &launch.plan;
        let made = plan.log_dir.as_deref().map(create_log_dir).transpose()?;
        Ok(Self {
            event_log: EventLog::start(
                plan.event_log.as_deref(),
                &plan.job_id,
                &launch.hostname,
                &launch.console,
            )?,
            made: made.unwrap_or_default(),
            free_attempt: plan.log_dir.as_deref().map_or(0, free_attempt),
            local_failure: None,
            failures: Failures::default(),
        })
    }

    /// Writes something into the event log.
    pub(super) fn put(&self, event: LogEvent<'_>) {
        self.event_log.put(event);
    }

    /// The first attempt without log files.
    pub(super) fn free_attempt(&self) -> u32 {
        self.free_attempt
    }

    pub(super) fn set_free_attempt(&mut self, attempt: u32) {
        self.free_attempt = attempt;
    }

    /// The workers of a generation are being started.
    pub(super) fn generation_begins(&mut self) {
        self.local_failure = None;
    }

    /// A worker of this node has failed.
    pub(super) fn note_failure(&mut self, exit: &WorkerExit) {
        self.local_failure = Some(exit.clone());
    }

    /// Records a message of the daemon.
    pub(super) fn note_message(&mut self, message: &DaemonMessage) {
        let generation = message.generation;
        let failures = match &message.body {
            Some(Word::JobOver(over)) => over.failures.as_ref(),
            Some(Word::Refused(refused)) => refused.failures.as_ref(),
            Some(Word::Assignment(assignment)) => {
                return self.put(LogEvent::Assigned {
                    generation,
                    assignment_id: &assignment.assignment_id,
                    node_rank: assignment.node_rank,
                    nodes: assignment.node_count as usize,
                    restart_count: assignment.restart_count,
                    reason: &assignment.reason,
                });
            }
            Some(Word::GenerationOver(over)) => {
                let cause = &over.cause;
                return self.put(LogEvent::GenerationOver { generation, cause });
            }
            _ => None,
        };
        if let Some(failures) = failures {
            self.failures.clone_from(failures);
        }
    }

    /// Writes the end of the launch for programs: the event log and the error files. Gives the report for people.
    pub(super) async fn close(
        &mut self,
        launch: &LaunchContext<'_>,
        exit_reason: &ExitReason,
        generation: Generation,
        worker_group: &WorkerGroup,
    ) -> Option<String> {
        let facts = self.facts(launch, exit_reason, generation, worker_group);
        let report = text::report(&facts);
        self.put(LogEvent::Finished {
            exit_code: exit_reason.exit_code(),
            report: report.as_deref(),
        });
        let LaunchContext { console, files, .. } = launch;
        if matches!(exit_reason, ExitReason::Succeeded) && generation == Generation(0) {
            console
                .say("the job succeeded without this node, which stayed on standby and started no workers");
        }
        if matches!(exit_reason, ExitReason::Stopped { .. }) {
            // It may have been stopped before it wrote anything.
            let made = std::mem::take(&mut self.made);
            let removed = files.give(move || remove_empty(&made));
            // They are empty: nothing is lost if they stay.
            let _ = timeout(FILE_BOUND, removed).await;
        } else if let Some(report) = report.clone() {
            let (plan, inherited) = (launch.plan.clone(), launch.inherited.clone());
            let written = files.give(move || {
                let failure = JobFailure {
                    facts: &facts,
                    report: &report,
                };
                let log_dir = plan.log_dir.as_deref();
                [
                    log_dir.map_or(Ok(()), |dir| failure.write_to(dir)),
                    failure.pass_on(&inherited),
                ]
            });
            let complaints = match timeout(FILE_BOUND, written).await {
                Ok(results) => results.into_iter().flatten().filter_map(Result::err).collect(),
                Err(_) => vec![io::ErrorKind::TimedOut.into()],
            };
            for error in complaints {
                console.say(&format!("cannot write the error file: {error}"));
            }
        }
        self.event_log.shutdown().await;
        report
    }

    /// All that is known of how the launch ended.
    fn facts(
        &self,
        launch: &LaunchContext<'_>,
        exit_reason: &ExitReason,
        generation: Generation,
        worker_group: &WorkerGroup,
    ) -> ReportFacts {
        let plan = &launch.plan;
        let first_rank = exit_reason.first_failure().map(|(exit, _)| GlobalRank(exit.rank));
        ReportFacts {
            job_id: plan.job_id.clone(),
            exit_reason: exit_reason.clone(),
            program: plan.command.display_name.clone(),
            executable: plan.command.program.clone(),
            hostname: launch.hostname.clone(),
            output_unseen: !plan.output.is_seen(),
            local_failure: self.local_failure.clone(),
            local_ends: worker_group.local_ends(),
            stopped: worker_group.ends(),
            failures: self.failures.clone(),
            generation,
            ran_for: worker_group.ran_for(),
            worker_file: first_rank.and_then(|rank| worker_group.error_file_of(rank)),
        }
    }
}
