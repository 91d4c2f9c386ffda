//! Work that takes time, done beside the agent's loop: its results come back through the inbox.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use ddp_proto::client::Client;
use ddp_proto::ids::{Generation, LocalRank};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use super::driver::Ready;
use super::suspension::{REFUSED_FOR, is_refused};
use super::workers::PrepareError;
use crate::cgroup::WorkerCgroup;
use crate::output::console::Console;
use crate::output::pump::TailReader;
use crate::supervise::proc_table;
use crate::supervise::sweep::KillTargets;

/// How long the last lines and words of a failed worker are waited for.
const DESCRIBE_BOUND: Duration = Duration::from_millis(300);
/// How long the last words of a worker on the control socket are waited for.
const CONTROL_DRAIN_BOUND: Duration = Duration::from_millis(300);
/// How long the file system may take to give what workers left in files.
const FILE_BOUND: Duration = Duration::from_secs(1);
/// How long workers may take to say what they do: they look up the names of functions first.
const ANSWER_BOUND: Duration = Duration::from_secs(3);
/// How long leftovers of workers may take to die.
const SWEEP_BOUND: Duration = Duration::from_secs(3);
/// How long the end of the workers' output is waited for while the console does not move.
const DRAIN_PATIENCE: Duration = Duration::from_secs(1);
/// How long the end of the workers' output is waited for at all.
const DRAIN_BOUND: Duration = Duration::from_secs(30);

/// What the threads of processes do, a line each, by process id.
pub(super) type Threads = BTreeMap<i32, String>;

/// Results of work that the driver started beside its loop.
pub(super) enum TaskResult {
    /// The files and pipes of a generation's workers are there, or cannot be made.
    Prepared(Generation, Box<Result<Ready, PrepareError>>),
    /// The last words of a failed worker are there, as far as they will be; with those of its error file.
    Described(Generation, LocalRank, Option<String>),
    /// A worker has said all it will ever say on the control socket.
    ControlDrained(Generation, LocalRank),
    /// The workers have had the time to say what they do; what the kernel knows of their threads, by process id.
    Answered { threads: Threads },
    /// Whether the daemon refuses every connection.
    Probed { refused: bool },
    /// Nothing is left of the workers but these processes, which cannot be killed, and what they left in files.
    Swept(Vec<String>, LeftInFiles),
}

/// What is read in files when the workers are gone; nothing where the file system does not answer.
#[derive(Debug, Default)]
pub(super) struct LeftInFiles {
    /// Words of the error files.
    pub(super) words: Vec<(LocalRank, String)>,
    /// [`crate::output::logs::free_attempt`], where there is a log directory.
    pub(super) free_attempt: Option<u32>,
}

/// Waits for what the workers of a generation need to be made by `making`, which gives nothing if it panicked.
pub(super) fn prepare(
    results: mpsc::Sender<TaskResult>,
    generation: Generation,
    making: impl Future<Output = Option<Result<Ready, PrepareError>>> + Send + 'static,
) {
    tokio::spawn(async move {
        let made = making.await.unwrap_or(Err(PrepareError::Panicked));
        let made = Box::new(made);
        let _ = results.send(TaskResult::Prepared(generation, made)).await;
    });
}

/// Waits for `silence` on the control socket: what the worker wrote before it ended has arrived then.
pub(super) fn drain_control(
    results: mpsc::Sender<TaskResult>,
    (generation, local_rank): (Generation, LocalRank),
    silence: impl Future<Output = ()> + Send + 'static,
) {
    tokio::spawn(async move {
        // A child that holds the worker's socket open must not hold up the verdict.
        let _ = timeout(CONTROL_DRAIN_BOUND, silence).await;
        let _ = results
            .send(TaskResult::ControlDrained(generation, local_rank))
            .await;
    });
}

/// Looks whether the daemon is gone.
pub(super) fn probe(results: mpsc::Sender<TaskResult>, daemon: Client) {
    tokio::spawn(async move {
        let refused = is_refused(&daemon, REFUSED_FOR).await;
        let _ = results.send(TaskResult::Probed { refused }).await;
    });
}

/// Leaves workers the time to say what they do, since those that hang may not answer at all; then `read` gives what the
/// kernel knows of them.
pub(super) fn wait_for_answers(
    results: mpsc::Sender<TaskResult>,
    read: impl Future<Output = Option<Threads>> + Send + 'static,
) {
    tokio::spawn(async move {
        tokio::time::sleep(ANSWER_BOUND).await;
        let threads = timeout(FILE_BOUND, read).await.ok().flatten();
        let threads = threads.unwrap_or_default();
        let _ = results.send(TaskResult::Answered { threads }).await;
    });
}

/// Waits for the last words of a failed worker: the end of its stderr, `silence` on the control socket, and then what
/// `in_file` finds in its error file.
pub(super) fn describe(
    results: mpsc::Sender<TaskResult>,
    (generation, local_rank): (Generation, LocalRank),
    stderr: Option<TailReader>,
    silence: impl Future<Output = ()> + Send + 'static,
    in_file: impl Future<Output = Option<Option<String>>> + Send + 'static,
) {
    tokio::spawn(async move {
        let words = async {
            if let Some(mut stderr) = stderr {
                stderr.ended().await;
            }
            silence.await;
        };
        // A process that still holds its pipes open has had the time to write.
        let _ = timeout(DESCRIBE_BOUND, words).await;
        let in_file = timeout(FILE_BOUND, in_file).await.ok().flatten().flatten();
        let described = TaskResult::Described(generation, local_rank, in_file);
        let _ = results.send(described).await;
    });
}

/// What is left of workers, and what is not.
pub(super) struct Leftovers {
    /// Our descendant too, and spared.
    pub(super) guardian: i32,
    pub(super) group: Option<Arc<WorkerCgroup>>,
}

impl Leftovers {
    /// Kills them all, and returns those that are left after [`SWEEP_BOUND`]. Blocks.
    pub(super) fn kill(self) -> Vec<i32> {
        if let Some(group) = &self.group {
            group.kill();
        }
        let spared = BTreeSet::from([self.guardian]);
        let of = nix::unistd::Pid::this().as_raw();
        KillTargets::Descendants { of, spared: &spared }.kill_all(SWEEP_BOUND)
    }
}

/// Waits until what is left of the workers is killed, for the end of their output, and for what `read` finds in files.
/// `kill` gives the processes that cannot be killed, or nothing if it panicked.
pub(super) fn sweep(
    results: mpsc::Sender<TaskResult>,
    kill: impl Future<Output = Option<Vec<i32>>> + Send + 'static,
    read: impl Future<Output = Option<LeftInFiles>> + Send + 'static,
    streams: Vec<TailReader>,
    console: Console,
) {
    tokio::spawn(async move {
        let stuck = kill.await.unwrap_or_default();
        drain(streams, &console).await;
        let stuck = stuck.into_iter().map(proc_table::describe).collect();
        let left = timeout(FILE_BOUND, read).await.ok().flatten();
        let swept = TaskResult::Swept(stuck, left.unwrap_or_default());
        let _ = results.send(swept).await;
    });
}

/// Waits for the ends of the workers' streams, longer while the console is moving.
async fn drain(streams: Vec<TailReader>, console: &Console) {
    let last = Instant::now() + DRAIN_BOUND;
    for mut stream in streams {
        loop {
            let written = console.written();
            let ended = timeout(DRAIN_PATIENCE, stream.ended()).await.is_ok();
            if ended {
                break;
            }
            if console.written() == written || Instant::now() >= last {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::blocking_thread::BlockingThread;
    use super::*;

    /// What `/proc` gives of a worker's threads takes as long as the kernel likes: the worker may hold a lock there.
    #[tokio::test]
    async fn a_look_at_threads_that_does_not_end_holds_up_neither_the_loop_nor_the_report() {
        let files = BlockingThread::start("test").unwrap();
        let (kernel, never) = std::sync::mpsc::channel::<Threads>();
        let (results, mut inbox) = mpsc::channel(1);
        wait_for_answers(results, files.give(move || never.recv().unwrap_or_default()));
        let Some(TaskResult::Answered { threads }) = inbox.recv().await else {
            panic!("another result than that of the question");
        };
        assert_eq!(threads, Threads::new());
        drop(kernel);
    }
}
