//! `--event-log-handler FILE`: one JSON object a line for each thing that happens on this node.
//!
//! A thread of its own writes, so that a file system that hangs never stops supervision; what does not fit into
//! its queue is dropped and counted in the next line.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::agent::ExitReason;
use crate::output::logs::LogError;

/// Lines that may wait to be written.
const QUEUE: usize = 4096;
/// Longest wait for the file at the end.
const PATIENCE: Duration = Duration::from_secs(1);

/// One thing that happened.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum LogEvent<'a> {
    /// The launcher asks the daemon for a place in the next generation.
    Joined { generation: u64 },
    /// The daemon gave this node its place.
    Assigned {
        generation: u64,
        assignment_id: &'a str,
        node_rank: u32,
        nodes: usize,
        restart_count: u32,
        reason: &'a str,
    },
    /// A worker runs.
    WorkerStarted {
        generation: u64,
        rank: u32,
        local_rank: u32,
        pid: i32,
    },
    /// A worker has ended.
    WorkerEnded {
        generation: u64,
        local_rank: u32,
        ending: String,
    },
    /// The generation is over, because of this.
    GenerationOver { generation: u64, cause: &'a str },
    /// The launch is over.
    Finished { exit_code: u8, report: Option<&'a str> },
}

#[derive(Serialize)]
struct Line<'a> {
    unix_time_ns: u64,
    job_id: &'a str,
    node: &'a str,
    #[serde(flatten)]
    event: LogEvent<'a>,
    #[serde(skip_serializing_if = "is_zero")]
    dropped_before: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
const fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// The open log; without a file it takes nothing.
pub(crate) struct EventLog {
    job_id: String,
    node: String,
    writer: Option<Writer>,
    dropped: AtomicU64,
}

/// The end of the queue.
struct Writer {
    lines: SyncSender<Vec<u8>>,
    /// Closed by the thread when it ends.
    ended: oneshot::Receiver<()>,
}

impl EventLog {
    /// Opens the file for appending, if there is one, and starts the thread that writes to it.
    pub(crate) fn start(path: Option<&Path>, job_id: &str, node: &str) -> Result<Self, ExitReason> {
        Ok(Self {
            job_id: job_id.to_owned(),
            node: node.to_owned(),
            writer: path.map(Writer::start).transpose()?,
            dropped: AtomicU64::new(0),
        })
    }

    /// Puts one line into the queue. Never waits.
    pub(crate) fn put(&self, event: LogEvent<'_>) {
        let Some(writer) = &self.writer else {
            return;
        };
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let line = Line {
            unix_time_ns: since_epoch.as_nanos() as u64,
            job_id: &self.job_id,
            node: &self.node,
            event,
            dropped_before: self.dropped.swap(0, Ordering::Relaxed),
        };
        let dropped = line.dropped_before;
        let Ok(mut bytes) = serde_json::to_vec(&line) else {
            return;
        };
        bytes.push(b'\n');
        if writer.lines.try_send(bytes).is_err() {
            self.dropped.fetch_add(dropped + 1, Ordering::Relaxed);
        }
    }

    /// Takes no more lines; returns when all are written, or after [`PATIENCE`]. Without it, the thread writes what is
    /// left for as long as the process lives.
    pub(crate) async fn shutdown(&mut self) {
        if let Some(Writer { lines, ended }) = self.writer.take() {
            drop(lines);
            // Nothing is ever sent: the wait ends when the thread does.
            let _ = timeout(PATIENCE, ended).await;
        }
    }
}

impl Writer {
    fn start(path: &Path) -> Result<Self, ExitReason> {
        let file = File::options().create(true).append(true).open(path);
        let mut file = file.map_err(LogError::at(path))?;
        let (lines, queue) = sync_channel::<Vec<u8>>(QUEUE);
        let (open, ended) = oneshot::channel();
        std::thread::Builder::new()
            .name("event-log".into())
            .stack_size(128 << 10)
            .spawn(move || {
                let _open: oneshot::Sender<()> = open;
                for line in queue {
                    // A full disk loses events, never the job.
                    let _ = file.write_all(&line);
                }
            })?;
        Ok(Self { lines, ended })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[tokio::test]
    async fn every_line_is_an_object_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("events.jsonl");
        for _ in 0..2 {
            let mut log = EventLog::start(Some(&path), "job", "a").unwrap();
            log.put(LogEvent::Joined { generation: 0 });
            log.put(LogEvent::WorkerStarted {
                generation: 1,
                rank: 4,
                local_rank: 0,
                pid: 77,
            });
            log.shutdown().await;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<serde_json::Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len(), 4, "a second launcher appends");
        assert_eq!(lines[1]["event"], "worker_started");
        assert_eq!(lines[1]["job_id"], "job");
        assert_eq!(lines[1]["rank"], 4);
        assert!(lines[1].get("dropped_before").is_none());
    }

    #[tokio::test]
    async fn others_go_on_while_the_last_lines_are_written() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let path = format!("/proc/self/fd/{}", writer.as_raw_fd());
        let mut log = EventLog::start(Some(Path::new(&path)), "job", "a").unwrap();
        drop(writer);
        // More than a pipe holds.
        let report = "x".repeat(1 << 20);
        log.put(LogEvent::Finished {
            exit_code: 1,
            report: Some(&report),
        });
        let began = std::cell::Cell::new(false);
        let shutdown = async {
            log.shutdown().await;
            assert!(began.get(), "it blocked the runtime");
        };
        let reading = async {
            began.set(true);
            std::thread::spawn(move || std::io::read_to_string(&mut reader))
        };
        let ((), text) = tokio::join!(shutdown, reading);
        assert!(text.join().unwrap().unwrap().contains(&report));
    }

    #[test]
    fn a_file_that_cannot_be_opened_is_named() {
        let started = EventLog::start(Some(Path::new("/dev/null/events")), "job", "a");
        let error = started.err().unwrap();
        assert!(error.to_string().contains("/dev/null/events"), "{error}");
    }
}
