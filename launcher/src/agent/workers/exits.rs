//! The ends of workers as the protocol tells them.

use std::time::{Duration, UNIX_EPOCH};

use ddp_proto::ids::GlobalRank;
use ddp_proto::rendezvous::{MAX_EXITS_OF_A_KIND, NodeStopped, WorkerExit};

use super::{End, LocalRank, Worker, WorkerGroup};
use crate::spawn::master_port::is_taken;
use crate::supervise::ending::Ending;

/// Rank 0 binds MASTER_PORT within this time of its start, imports included.
const BIND_BOUND: Duration = Duration::from_mins(1);
/// Longest part of a worker's words that is reported then.
const MAX_MESSAGE_CHARS: usize = 200;

impl WorkerGroup {
    /// The end of a worker with all that is known of it; none while it lives.
    pub(in crate::agent) fn describe(&self, local_rank: LocalRank) -> Option<WorkerExit> {
        let worker = self.get(local_rank)?;
        let end = worker.end?;
        Some(WorkerExit {
            stderr_tail: worker.stderr.lines(),
            stdout_in_tail: worker.stdout.is_same(&worker.stderr),
            message: worker.failure_message().unwrap_or_default(),
            port_taken: self.port_changes
                && worker.rank == GlobalRank(0)
                && self.step().is_none_or(|step| step == 0)
                && end.at.saturating_duration_since(self.began) < BIND_BOUND
                && worker
                    .stderr
                    .lines()
                    .iter()
                    .chain(&worker.failure_message())
                    .any(|line| is_taken(line)),
            ..worker.exit(local_rank.0, end)
        })
    }

    /// How all workers ended that did not end with 0, once they are gone.
    pub(in crate::agent) fn ends(&self) -> NodeStopped {
        let bad_end = |(local_rank, worker): (&LocalRank, &Worker)| {
            let end = worker.end.filter(|end| !end.ending.is_success())?;
            Some((*local_rank, end))
        };
        let mut ends: Vec<_> = self.workers.iter().filter_map(bad_end).collect();
        ends.sort_by_key(|(_, end)| end.at);
        let mut stopped = NodeStopped::default();
        let (mut failures, mut victims) = (0, 0);
        for (local_rank, end) in ends {
            let worker = &self.workers[&local_rank];
            let is_victim = worker.sent.is_some();
            let (count, more) = if is_victim {
                (&mut victims, &mut stopped.more_victims)
            } else {
                (&mut failures, &mut stopped.more_failures)
            };
            if *count == MAX_EXITS_OF_A_KIND {
                *more += 1;
                continue;
            }
            *count += 1;
            let mut exit = worker.exit(local_rank.0, end);
            if let (false, Some(words)) = (is_victim, worker.failure_message()) {
                exit.message = words.chars().take(MAX_MESSAGE_CHARS).collect();
            }
            stopped.exits.push(exit);
        }
        stopped
    }
}

impl Worker {
    /// Its end, without its words.
    fn exit(&self, local_rank: u32, end: End) -> WorkerExit {
        let (exit_code, signal, core_dumped) = match end.ending {
            Ending::Code(code) => (Some(code), None, false),
            Ending::Signal { signal, core_dumped } => (None, Some(signal), core_dumped),
        };
        let since_epoch = end.time.duration_since(UNIX_EPOCH).unwrap_or_default();
        WorkerExit {
            rank: self.rank.0,
            local_rank,
            pid: self.pid.unwrap_or(0) as u32,
            exit_code,
            signal,
            core_dumped,
            unix_time_ns: since_epoch.as_nanos() as u64,
            log_file: self
                .files
                .stderr_log()
                .map_or_else(String::new, |path| path.display().to_string()),
            consequence: self.consequence,
            out_of_memory: end.out_of_memory,
            activity: self.place_in_training().unwrap_or_default(),
            stopped_with: self.sent,
            age_ns: end.at.elapsed().as_nanos() as u64,
            // `permanent`: the driver knows what the program means by its exit codes.
            ..WorkerExit::default()
        }
    }
}
