//! The failure of a job for programs: `error.json` in the log directory, and the error file of the program that started
//! us.
//!
//! torch's `record` decorator writes what a Python worker died of to `TORCHELASTIC_ERROR_FILE`. A launcher that has
//! that variable itself was started by another one, to which it passes the first failure on in the same form.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use ddp_proto::rendezvous::WorkerExit;
use serde::Serialize;
use serde_json::json;

use crate::agent::ExitReason;
use crate::report::facts::ReportFacts;
use crate::report::failures::{Record, WorkerRecord};

/// Name of the variable, and of torch's protocol.
const ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";

/// What `error.json` says.
#[derive(Debug, Serialize)]
struct RootCause<'a> {
    job_id: &'a str,
    exit_code: u8,
    /// In words.
    reason: String,
    first_failure: Option<Failure<'a>>,
    /// All failures of the job in the order in which their reports reached the daemon, with the workers that were
    /// stopped; after them, the workers of this node whose ends the daemon did not know at the verdict.
    failures: Vec<Record<'a>>,
    /// Failures that are not in the list.
    more_failures: u32,
    /// Workers that were stopped and are not in the list.
    more_victims: u32,
}

#[derive(Debug, Serialize)]
struct Failure<'a> {
    node: &'a str,
    #[serde(flatten)]
    worker: WorkerRecord<'a>,
    stderr_tail: &'a [String],
}

/// What is written.
pub(crate) struct JobFailure<'a> {
    pub(crate) facts: &'a ReportFacts,
    /// The report for people.
    pub(crate) report: &'a str,
}

impl JobFailure<'_> {
    /// Writes `error.json` below the log directory, whole or not at all.
    pub(crate) fn write_to(&self, log_dir: &Path) -> io::Result<()> {
        let failure = self.failure().map(|(exit, node)| Failure {
            node,
            worker: WorkerRecord::new(exit),
            stderr_tail: &exit.stderr_tail,
        });
        let reason = match &self.facts.exit_reason {
            ExitReason::JobOver { reason, .. } => reason.clone(),
            _ => self.report.to_owned(),
        };
        let (failures, more_failures, more_victims) = self.records();
        let cause = RootCause {
            job_id: &self.facts.job_id,
            exit_code: self.facts.exit_reason.exit_code(),
            reason,
            first_failure: failure,
            failures,
            more_failures,
            more_victims,
        };
        // A node that shares the file system may have removed it: it was stopped, and the folder empty.
        fs::create_dir_all(log_dir)?;
        replace_file(&log_dir.join("error.json"), &serde_json::to_vec_pretty(&cause)?)
    }

    /// Passes the first failure on to the launcher that started this one, if one did.
    pub(crate) fn pass_on(&self, inherited: &[(OsString, OsString)]) -> io::Result<()> {
        let target = inherited.iter().find(|(name, _)| name == ERROR_FILE);
        let Some((_, target)) = target.filter(|(_, target)| !target.is_empty()) else {
            return Ok(());
        };
        let own_words = || {
            let at = self
                .failure()
                .map_or(0, |(exit, _)| exit.unix_time_ns / 1_000_000_000);
            let extra = json!({"py_callstack": "", "timestamp": at.to_string()});
            json!({"message": {"message": self.report, "errorCode": self.facts.exit_reason.exit_code(), "extraInfo": extra}})
        };
        let written = self
            .facts
            .worker_file
            .as_ref()
            .and_then(|file| fs::read(file).ok());
        let bytes = match written.filter(|bytes| !bytes.is_empty()) {
            Some(bytes) => bytes,
            None => serde_json::to_vec(&own_words())?,
        };
        replace_file(Path::new(target), &bytes)
    }

    /// The daemon's list, or the first failure alone if it told none; then the workers of this node that are not in it.
    /// And how many failures, and stopped workers, are in neither list.
    fn records(&self) -> (Vec<Record<'_>>, u32, u32) {
        let facts = self.facts;
        let generation = facts.generation.0;
        let of_node = |exit, node| Record::of_node(generation, node, Some(exit));
        let listed = &facts.failures.failures;
        let mut records: Vec<Record<'_>> = listed.iter().map(Record::new).collect();
        if listed.is_empty() {
            records.extend(self.failure().map(|(exit, node)| of_node(exit, node)));
        }
        let is_new = |exit: &&WorkerExit| !records.iter().any(|record| record.is_of(generation, exit.rank));
        let new: Vec<_> = facts.stopped.exits.iter().filter(is_new).collect();
        let (mut more_failures, mut more_victims) =
            (facts.failures.more_failures, facts.failures.more_victims);
        if !new.is_empty() {
            // The daemon may have counted them where its list was full. Of those that are not listed here it knows nothing.
            let victims = new.iter().filter(|exit| exit.stopped_with.is_some()).count() as u32;
            let failures = new.len() as u32 - victims;
            let local = &facts.stopped;
            more_failures = more_failures
                .saturating_sub(failures)
                .saturating_add(local.more_failures);
            more_victims = more_victims
                .saturating_sub(victims)
                .saturating_add(local.more_victims);
        }
        records.extend(new.into_iter().map(|exit| of_node(exit, &facts.hostname)));
        (records, more_failures, more_victims)
    }

    fn failure(&self) -> Option<(&WorkerExit, &str)> {
        let facts = self.facts;
        let local_failure = || Some((facts.local_failure.as_ref()?, &*facts.hostname));
        facts.exit_reason.first_failure().or_else(local_failure)
    }
}

/// Readers see the old contents or the new ones. A device, such as `/dev/stdout`, is written directly.
pub fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if path.metadata().is_ok_and(|there| !there.is_file()) {
        return fs::write(path, bytes);
    }
    // Launchers in pods have equal pids. In a folder of several users, another one's link is not followed.
    let temporary = path.with_added_extension(format!("{:x}.tmp", rand::random::<u64>()));
    let written = File::create_new(&temporary).and_then(|mut file| file.write_all(bytes));
    let moved = written.and_then(|()| fs::rename(&temporary, path));
    if moved.is_err() {
        // Usually it was never made.
        let _ = fs::remove_file(&temporary);
    }
    moved
}

#[cfg(test)]
mod tests {
    use ddp_proto::ids::Generation;
    use ddp_proto::rendezvous::{Failures, NodeStopped};

    use super::*;

    fn exit_reason() -> ExitReason {
        let failure = WorkerExit {
            rank: 5,
            signal: Some(9),
            message: "out of memory".into(),
            ..WorkerExit::default()
        };
        ExitReason::JobOver {
            exit_code: 137,
            reason: "rank 5 (node `b`) died of SIGKILL".into(),
            no_restart: String::new(),
            first_failure: Some(Box::new((failure, "b".into()))),
            signal: None,
        }
    }

    fn facts() -> ReportFacts {
        ReportFacts {
            job_id: "job".into(),
            exit_reason: exit_reason(),
            program: "train.py".into(),
            executable: "python3".into(),
            hostname: "a".into(),
            output_unseen: false,
            local_failure: None,
            local_ends: Vec::new(),
            stopped: NodeStopped::default(),
            failures: Failures::default(),
            generation: Generation(3),
            ran_for: None,
            worker_file: None,
        }
    }

    fn job_failure(facts: &ReportFacts) -> JobFailure<'_> {
        JobFailure {
            facts,
            report: "error: it failed",
        }
    }

    #[test]
    fn programs_read_the_first_failure() {
        let directory = tempfile::tempdir().unwrap();
        job_failure(&facts()).write_to(directory.path()).unwrap();
        let text = fs::read(directory.path().join("error.json")).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(value["exit_code"], 137);
        assert_eq!(value["first_failure"]["rank"], 5);
        assert_eq!(value["first_failure"]["node"], "b");
        assert_eq!(value["first_failure"]["signal"], 9);
        let [only] = &value["failures"].as_array().unwrap()[..] else {
            panic!("a daemon without a list still sends the first failure: {value}")
        };
        assert_eq!(
            (&only["rank"], &only["generation"], &only["node"]),
            (&5.into(), &3.into(), &"b".into())
        );
        assert_eq!(
            fs::read_dir(directory.path()).unwrap().count(),
            1,
            "no temporary is left"
        );
    }

    #[test]
    fn programs_read_all_failures_in_order() {
        let exit = |rank, exit_code| WorkerExit {
            rank,
            local_rank: 1,
            pid: 77,
            exit_code: Some(exit_code),
            unix_time_ns: 1_700_000_000_123_456_789,
            ..WorkerExit::default()
        };
        let worker = |generation, exit, after| ddp_proto::rendezvous::Failure {
            generation,
            hostname: "b".into(),
            exit: Some(exit),
            arrived_ns: after,
            happened_ns: after as i64 - 5,
            ..Default::default()
        };
        let victim = WorkerExit {
            stopped_with: Some(15),
            consequence: true,
            ..exit(2, 1)
        };
        let failures = Failures {
            failures: vec![
                worker(1, exit(3, 9), 0),
                ddp_proto::rendezvous::Failure {
                    generation: 2,
                    hostname: "c".into(),
                    node_gone: "node `c` left".into(),
                    arrived_ns: 10,
                    happened_ns: 10,
                    ..Default::default()
                },
                worker(2, victim, 20),
            ],
            more_failures: 4,
            more_victims: 2,
            ..Failures::default()
        };
        let directory = tempfile::tempdir().unwrap();
        let all = ReportFacts { failures, ..facts() };
        job_failure(&all).write_to(directory.path()).unwrap();
        let text = fs::read(directory.path().join("error.json")).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(value["more_failures"], 4);
        assert_eq!(value["more_victims"], 2);
        assert_eq!(
            value["failures"],
            json!([
                {
                    "generation": 1, "node": "b", "kind": "failed", "node_gone": null, "rank": 3, "local_rank": 1, "pid": 77,
                    "exit_code": 9, "signal": null, "core_dumped": false, "out_of_memory": false,
                    "consequence": false, "stopped_with": null, "unix_time_ns": 1_700_000_000_123_456_789_u64,
                    "arrived_ns": 0, "happened_ns": -5, "message": "", "log_file": ""
                },
                {
                    "generation": 2, "node": "c", "kind": "failed", "node_gone": "node `c` left",
                    "arrived_ns": 10, "happened_ns": 10
                },
                {
                    "generation": 2, "node": "b", "kind": "stopped", "node_gone": null, "rank": 2, "local_rank": 1, "pid": 77,
                    "exit_code": 1, "signal": null, "core_dumped": false, "out_of_memory": false,
                    "consequence": true, "stopped_with": 15, "unix_time_ns": 1_700_000_000_123_456_789_u64,
                    "arrived_ns": 20, "happened_ns": 15, "message": "", "log_file": ""
                },
            ])
        );
    }

    #[test]
    fn workers_of_this_node_follow_whose_ends_came_after_the_verdict() {
        let exit = |rank, signal| WorkerExit {
            rank,
            signal: Some(signal),
            ..WorkerExit::default()
        };
        let first = ddp_proto::rendezvous::Failure {
            generation: 3,
            hostname: "b".into(),
            exit: Some(exit(5, 9)),
            ..Default::default()
        };
        let failures = Failures {
            failures: vec![first],
            ..Failures::default()
        };
        let local = NodeStopped {
            exits: vec![exit(5, 9), exit(0, 15)],
            more_failures: 0,
            more_victims: 2,
        };
        let directory = tempfile::tempdir().unwrap();
        let all = ReportFacts {
            failures,
            stopped: local,
            ..facts()
        };
        job_failure(&all).write_to(directory.path()).unwrap();
        let text = fs::read(directory.path().join("error.json")).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let told: Vec<_> = value["failures"]
            .as_array()
            .unwrap()
            .iter()
            .map(|one| &one["rank"])
            .collect();
        assert_eq!(told, [5, 0], "each once");
        let last = &value["failures"][1];
        assert_eq!((&last["node"], &last["generation"]), (&"a".into(), &3.into()));
        assert!(
            last["arrived_ns"].is_null() && last["happened_ns"].is_null(),
            "{last}"
        );
        assert_eq!(value["more_victims"], 2);
    }

    #[test]
    fn the_launcher_above_gets_the_workers_own_file_or_our_words() {
        let directory = tempfile::tempdir().unwrap();
        let (above, own) = (
            directory.path().join("above.json"),
            directory.path().join("own.json"),
        );
        let env = vec![(OsString::from(ERROR_FILE), above.clone().into_os_string())];
        let all = ReportFacts {
            worker_file: Some(own.clone()),
            ..facts()
        };
        job_failure(&all).pass_on(&env).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&fs::read(&above).unwrap()).unwrap();
        assert_eq!(value["message"]["message"], "error: it failed");
        fs::write(&own, "{\"message\": \"torch says\"}").unwrap();
        job_failure(&all).pass_on(&env).unwrap();
        assert_eq!(
            fs::read_to_string(&above).unwrap(),
            "{\"message\": \"torch says\"}"
        );
        assert!(job_failure(&facts()).pass_on(&[]).is_ok());
    }
}
