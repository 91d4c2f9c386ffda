//! `--event-log-handler FILE`: one JSON object a line for each thing that happens on this node.
//!
//! A thread of its own writes to a file, so that a file system that hangs never stops supervision. Events that do not
//! fit into its queue, or on the disk, are lost; the launcher says how many at its end.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::agent::ExitReason;
use crate::output::console::Console;
use crate::output::logs::LogError;

/// Lines that may wait to be written.
const QUEUE: usize = 4096;
/// The target that the console writes to, between lines of others.
const CONSOLE: &str = "/dev/stderr";
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
    /// A worker runs; one that was kept has outlived an earlier generation.
    WorkerStarted {
        generation: u64,
        rank: u32,
        local_rank: u32,
        pid: i32,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        kept: bool,
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
}

/// The open log; without a target it takes nothing.
pub(crate) struct EventLog {
    job_id: String,
    node: String,
    console: Console,
    target: Option<Target>,
}

enum Target {
    Console,
    File(Writer),
}

/// The end of the queue.
struct Writer {
    lines: SyncSender<Vec<u8>>,
    /// Events that are not in the file.
    missing: Arc<AtomicUsize>,
    /// Gets the last error when the thread ends.
    ended: oneshot::Receiver<Option<String>>,
}

impl EventLog {
    /// Opens the file for appending, if there is one, and starts the thread that writes to it.
    pub(crate) fn start(
        path: Option<&Path>,
        job_id: &str,
        node: &str,
        console: &Console,
    ) -> Result<Self, ExitReason> {
        let target = match path {
            Some(path) if path == Path::new(CONSOLE) => Some(Target::Console),
            path => path.map(Writer::start).transpose()?.map(Target::File),
        };
        Ok(Self {
            job_id: job_id.to_owned(),
            node: node.to_owned(),
            console: console.clone(),
            target,
        })
    }

    /// Puts one line into the queue. Never waits.
    pub(crate) fn put(&self, event: LogEvent<'_>) {
        let Some(target) = &self.target else {
            return;
        };
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let line = Line {
            unix_time_ns: since_epoch.as_nanos() as u64,
            job_id: &self.job_id,
            node: &self.node,
            event,
        };
        // Strings and numbers only: cannot fail.
        let line = serde_json::to_string(&line).expect("events serialise");
        match target {
            Target::Console => self.console.put_event(&line),
            Target::File(writer) => {
                writer.missing.fetch_add(1, Ordering::Relaxed);
                // Without room, it stays missing.
                let _ = writer.lines.try_send((line + "\n").into_bytes());
            }
        }
    }

    /// Takes no more lines; returns when all are written, or after [`PATIENCE`]. Without it, the thread writes what is
    /// left for as long as the process lives.
    pub(crate) async fn shutdown(&mut self) {
        let Some(Target::File(writer)) = self.target.take() else {
            return;
        };
        drop(writer.lines);
        let ended = timeout(PATIENCE, writer.ended).await;
        let missing = writer.missing.load(Ordering::Relaxed);
        if missing > 0 {
            let cause = ended.ok().and_then(|error| error.ok()?);
            let cause = cause.unwrap_or_else(|| "it did not respond in time".to_owned());
            let text = format!("events missing in the file of `--event-log-handler`: {missing}: {cause}");
            self.console.say(&text);
        }
    }
}

impl Writer {
    fn start(path: &Path) -> Result<Self, ExitReason> {
        let file = File::options().create(true).append(true).open(path);
        let file = file.map_err(LogError::at(path))?;
        let (lines, queue) = sync_channel::<Vec<u8>>(QUEUE);
        let (report, ended) = oneshot::channel();
        let missing = Arc::<AtomicUsize>::default();
        let writer = Self {
            lines,
            missing: missing.clone(),
            ended,
        };
        std::thread::Builder::new()
            .name("event-log".into())
            .stack_size(128 << 10)
            .spawn(move || {
                let (mut last_error, mut is_torn) = (None, false);
                for line in queue {
                    // A full disk loses events, never the job.
                    match append(&file, &line, &mut is_torn) {
                        Ok(()) => drop(missing.fetch_sub(1, Ordering::Relaxed)),
                        Err(error) => last_error = Some(error.to_string()),
                    }
                }
                // Perhaps the launcher has not waited.
                let _ = report.send(last_error);
            })?;
        Ok(writer)
    }
}

/// Appends a line with one call: other launchers may write to the file too. A line of which a full disk took only a part
/// is ended before the next one.
fn append(mut file: impl Write, line: &[u8], is_torn: &mut bool) -> io::Result<()> {
    let end = &b"\n"[usize::from(!*is_torn)..];
    let mut bytes = &[end, line].concat()[..];
    while !bytes.is_empty() {
        let taken = file.write(bytes)?;
        bytes = &bytes[taken..];
        *is_torn = !bytes.is_empty();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;
    use crate::output::streams::{Chunk, Output, Source, Stream};

    struct Said(std::sync::mpsc::Sender<Vec<u8>>);

    impl Write for Said {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.send(bytes.to_vec()).map_err(io::Error::other)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A console, and what arrives on standard error.
    fn console() -> (Console, std::sync::mpsc::Receiver<Vec<u8>>) {
        let (sender, said) = std::sync::mpsc::channel();
        let output = Output {
            writers: [Box::new(io::sink()), Box::new(Said(sender))],
            is_file: [false; 2],
            is_one_place: false,
            looks: [ddp_proto::printable::Look::default(); 2],
        };
        (Console::start(output, false).unwrap(), said)
    }

    /// What the console has shown at its end.
    async fn shown(console: Console, said: std::sync::mpsc::Receiver<Vec<u8>>) -> String {
        console.close().await;
        String::from_utf8(said.try_iter().flatten().collect()).unwrap()
    }

    fn log_at(path: &str, console: &Console) -> EventLog {
        EventLog::start(Some(Path::new(path)), "job", "a", console).unwrap()
    }

    #[tokio::test]
    async fn a_full_disk_is_reported_with_the_number_of_lost_events() {
        let (console, said) = console();
        let mut log = log_at("/dev/full", &console);
        for generation in 0..3 {
            log.put(LogEvent::Joined { generation });
        }
        log.shutdown().await;
        insta::assert_snapshot!(shown(console, said).await, @"[ddp-run] events missing in the file of `--event-log-handler`: 3: No space left on device (os error 28)");
    }

    #[test]
    fn a_line_that_a_full_disk_has_cut_does_not_spoil_the_next_one() {
        /// Room for so many bytes in the file.
        struct Disk(Vec<u8>, usize);

        impl Write for Disk {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                let taken = bytes.len().min(self.1);
                if taken == 0 {
                    return Err(io::ErrorKind::StorageFull.into());
                }
                self.0.extend_from_slice(&bytes[..taken]);
                self.1 -= taken;
                Ok(taken)
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }

        let (mut disk, mut is_torn) = (Disk(Vec::new(), 9), false);
        append(&mut disk, b"first\n", &mut is_torn).unwrap();
        append(&mut disk, b"second\n", &mut is_torn).unwrap_err();
        append(&mut disk, b"third\n", &mut is_torn).unwrap_err();
        disk.1 = 100;
        append(&mut disk, b"fourth\n", &mut is_torn).unwrap();
        append(&mut disk, b"fifth\n", &mut is_torn).unwrap();
        assert_eq!(disk.0, b"first\nsec\nfourth\nfifth\n");
    }

    #[tokio::test]
    async fn the_console_shows_events_between_lines_of_workers() {
        let (console, said) = console();
        let prompt = Chunk {
            source: Source {
                stream: Stream::Stderr,
                id: 0,
            },
            prefix: "[0] ".into(),
            bytes: b"loading ...".to_vec(),
            continues: false,
        };
        console.put(prompt).await;
        let mut log = log_at(CONSOLE, &console);
        log.put(LogEvent::Joined { generation: 7 });
        log.shutdown().await;
        let shown = shown(console, said).await;
        let (first, event) = shown.trim_end().split_once('\n').unwrap();
        assert_eq!(first, "[0] loading ...");
        let event: serde_json::Value = serde_json::from_str(event).unwrap();
        assert_eq!(event["generation"], 7);
    }

    #[tokio::test]
    async fn every_line_is_an_object_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("events.jsonl");
        for _ in 0..2 {
            let mut log = log_at(path.to_str().unwrap(), &console().0);
            log.put(LogEvent::Joined { generation: 0 });
            log.put(LogEvent::WorkerStarted {
                generation: 1,
                rank: 4,
                local_rank: 0,
                pid: 77,
                kept: false,
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
    }

    #[tokio::test]
    async fn others_go_on_while_the_last_lines_are_written() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let path = format!("/proc/self/fd/{}", writer.as_raw_fd());
        let mut log = log_at(&path, &console().0);
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
        let started = Writer::start(Path::new("/dev/null/events"));
        let error = started.err().unwrap();
        assert!(error.to_string().contains("/dev/null/events"), "{error}");
    }
}
