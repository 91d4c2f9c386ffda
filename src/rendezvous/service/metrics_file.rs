//! `ddp-run --metrics-file`: what `ddp-rendezvous jobs --json` tells of a launcher's job, as Prometheus text, for the
//! textfile collector of the machine's node_exporter. A launcher that is killed leaves its file; node_exporter reports
//! how old it is.

use std::fmt::Write as _;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use ddp_launcher::replace_file;
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use super::actor::Request;
use crate::rendezvous::report::{self, Bounds};

/// Time between two writes, and, until there is a job, between two looks.
const INTERVALS: [Duration; 2] = [Duration::from_secs(15), Duration::from_secs(1)];

/// Starts the thread that writes the file until the sender of `stopped` is dropped. The thread then removes the file and
/// drops the sender of the receiver that is returned.
///
/// The thread exists from the start: later, the machine may refuse another one.
pub(super) fn start(
    path: PathBuf,
    requests: mpsc::Sender<Request>,
    stopped: Receiver<()>,
) -> oneshot::Receiver<()> {
    let (removing, removed) = oneshot::channel();
    let keep = move || {
        keep(&path, &requests, &stopped);
        drop(removing);
    };
    if let Err(error) = thread::Builder::new().name("metrics-file".into()).spawn(keep) {
        tracing::error!("cannot start the thread of `--metrics-file`: {error}; the job continues");
    }
    removed
}

fn keep(path: &Path, requests: &mpsc::Sender<Request>, stopped: &Receiver<()>) {
    let (mut interval, mut has_failed, mut is_there) = (Duration::ZERO, false, false);
    while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(interval) {
        let text = text(requests);
        interval = INTERVALS[usize::from(text.is_none())];
        let Some(text) = text else { continue };
        // A device is not written: the end would remove it.
        let is_device = path.metadata().is_ok_and(|there| !there.is_file());
        let written = if is_device {
            Err(io::Error::other("it is not a regular file"))
        } else {
            replace_file(path, text.as_bytes())
        };
        is_there |= written.is_ok();
        // The collector is another user.
        let shown = written.and_then(|()| fs::set_permissions(path, Permissions::from_mode(0o644)));
        if let Err(error) = shown
            && !std::mem::replace(&mut has_failed, true)
        {
            let path = path.display();
            let hint = "hint: users of this machine must be able to write to the folder";
            tracing::error!("cannot write `--metrics-file {path}`: {error}; the job continues\n  {hint}");
        }
    }
    if is_there {
        let _ = fs::remove_file(path);
    }
}

/// None without a job.
fn text(requests: &mpsc::Sender<Request>) -> Option<String> {
    let (answer, jobs) = oneshot::channel();
    requests.blocking_send(Request::Jobs(answer)).ok()?;
    let jobs = report::jobs(&jobs.blocking_recv().ok()?, Bounds::NONE);
    jobs["jobs"].get(0).map(text_of)
}

/// All numbers of a job, under their own names. Words have the escapes of JSON, which are those of Prometheus: names have
/// no control characters.
fn text_of(job: &Value) -> String {
    let labels = format!(
        "job_id={},user={},target={}",
        job["job"], job["user"], job["target"]
    );
    let mut text = String::new();
    let numbers = job.as_object().into_iter().flatten();
    for (key, value) in numbers.filter(|(_, value)| value.is_number()) {
        // A `String` takes everything.
        let _ = writeln!(
            text,
            "# TYPE ddp_job_{key} gauge\nddp_job_{key}{{{labels}}} {value}"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use ddp_proto::rendezvous::{JobSummary, JobsReply};

    use super::*;

    #[test]
    fn the_file_has_what_the_dashboard_asks_for() {
        let job = JobSummary {
            job_id: r#"nightly "7""#.into(),
            user: r"an\na".into(),
            target: "train.py".into(),
            nodes: 2,
            ranks: 16,
            step: Some(1200),
            loss: Some(2.5),
            step_time_s: Some(0.25),
            age_ms: 61_500,
            generation: 3,
            restart_count: 1,
            max_restarts: 3,
            ..JobSummary::default()
        };
        let reply = JobsReply {
            jobs: vec![job],
            ..JobsReply::default()
        };
        let text = text_of(&report::jobs(&reply, Bounds::NONE)["jobs"][0]);
        let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        insta::assert_snapshot!(samples.join("\n"), @r#"
        ddp_job_age_s{job_id="nightly \"7\"",user="an\\na",target="train.py"} 61.5
        ddp_job_generation{job_id="nightly \"7\"",user="an\\na",target="train.py"} 3
        ddp_job_kv_bytes{job_id="nightly \"7\"",user="an\\na",target="train.py"} 0
        ddp_job_loss{job_id="nightly \"7\"",user="an\\na",target="train.py"} 2.5
        ddp_job_max_restarts{job_id="nightly \"7\"",user="an\\na",target="train.py"} 3
        ddp_job_nodes{job_id="nightly \"7\"",user="an\\na",target="train.py"} 2
        ddp_job_ranks{job_id="nightly \"7\"",user="an\\na",target="train.py"} 16
        ddp_job_restarts{job_id="nightly \"7\"",user="an\\na",target="train.py"} 1
        ddp_job_step{job_id="nightly \"7\"",user="an\\na",target="train.py"} 1200
        ddp_job_step_time_s{job_id="nightly \"7\"",user="an\\na",target="train.py"} 0.25
        "#);
        let dashboard = include_str!("../../../deploy/monitoring/dashboard.json");
        let asked: Vec<&str> = dashboard.split("ddp_job_").skip(1).collect();
        assert!(asked.len() > 5, "the dashboard shows launchers' files");
        for rest in asked {
            let end = rest.find(|c: char| !c.is_ascii_lowercase() && c != '_');
            let line = format!("# TYPE ddp_job_{} gauge", &rest[..end.unwrap()]);
            assert!(text.lines().any(|l| l == line), "`{line}` is not in\n{text}");
        }
    }
}
