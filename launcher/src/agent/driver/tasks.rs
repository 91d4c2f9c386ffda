//! Work that takes time, done beside the agent's loop: each gives an event for the loop.

use std::path::Path;
use std::time::Duration;

use ddp_proto::ids::{Generation, LocalRank};
use tokio::time::timeout;

use super::inbox::{LeftInFiles, LoopEvent};
use crate::cgroup::WorkerCgroup;
use crate::output::logs::{WorkerFiles, free_attempt};
use crate::output::reader::TailReader;
use crate::supervise::proc_table;
use crate::supervise::sweep::KillTargets;

/// How long the last lines and words of a failed worker are waited for.
const DESCRIBE_BOUND: Duration = Duration::from_millis(300);
/// How long the last words of a worker on the control socket are waited for.
const CONTROL_DRAIN_BOUND: Duration = Duration::from_millis(300);
/// How long the file system may take to give what workers left in files.
const FILE_BOUND: Duration = Duration::from_secs(1);
/// How long leftovers of workers may take to die.
const SWEEP_BOUND: Duration = Duration::from_secs(3);
/// How long the end of the workers' output is waited for. A slow console shows the rest later.
const DRAIN_BOUND: Duration = Duration::from_secs(1);

/// Waits for `disconnected` on the control socket: what the worker wrote before it ended has arrived then.
pub(super) async fn drain_control(
    generation: Generation,
    local_rank: LocalRank,
    disconnected: impl Future<Output = ()>,
) -> LoopEvent {
    // A child that holds the worker's socket open must not hold up the verdict.
    let _ = timeout(CONTROL_DRAIN_BOUND, disconnected).await;
    LoopEvent::ControlDrained(generation, local_rank)
}

/// Waits for the last words of a failed worker: the end of its stderr, `disconnected` on the control socket, and then what
/// `in_file` finds in its error file.
pub(super) async fn describe(
    generation: Generation,
    local_rank: LocalRank,
    stderr: Option<TailReader>,
    disconnected: impl Future<Output = ()>,
    in_file: impl Future<Output = Option<Option<String>>>,
) -> LoopEvent {
    let words = async {
        if let Some(mut stderr) = stderr {
            stderr.ended().await;
        }
        disconnected.await;
    };
    // A process that still holds its pipes open has had the time to write.
    let _ = timeout(DESCRIBE_BOUND, words).await;
    let in_file = timeout(FILE_BOUND, in_file).await.ok().flatten().flatten();
    LoopEvent::Described(generation, local_rank, in_file)
}

/// Looks into the error files of workers that failed without a message, and into the log directory. Blocks.
pub(super) fn read_left_files(failed: Vec<(LocalRank, WorkerFiles)>, log_dir: Option<&Path>) -> LeftInFiles {
    let messages = failed.into_iter();
    LeftInFiles {
        messages: messages
            .filter_map(|(rank, files)| Some((rank, files.error_message()?)))
            .collect(),
        free_attempt: log_dir.map(free_attempt),
    }
}

/// Kills all that is left of the workers, but not the `spared`, our descendants too; gives those that are left after
/// [`SWEEP_BOUND`]. Blocks.
pub(super) fn kill_leftovers(spared: &[i32], group: Option<&WorkerCgroup>) -> Vec<i32> {
    if let Some(group) = group {
        group.kill();
    }
    KillTargets::Descendants { spared }.kill_all(SWEEP_BOUND)
}

/// Waits until what is left of the workers is killed, for the end of their output, and for what `read` finds in files.
/// `kill` gives the processes that cannot be killed.
pub(super) async fn sweep(
    kill: impl Future<Output = Option<Vec<i32>>>,
    read: impl Future<Output = Option<LeftInFiles>>,
    streams: Vec<TailReader>,
) -> LoopEvent {
    let stuck = kill.await.unwrap_or_default();
    let ended = async {
        for mut stream in streams {
            stream.ended().await;
        }
    };
    let _ = timeout(DRAIN_BOUND, ended).await;
    let stuck = stuck.into_iter().map(proc_table::describe).collect();
    let left = timeout(FILE_BOUND, read).await.ok().flatten();
    LoopEvent::Swept(stuck, left.unwrap_or_default())
}
