//! The words in which the machine and its driver speak: what happened, and what is to be done.

use std::time::Duration;

use ddp_proto::ids::{Generation, LocalRank};
use ddp_proto::rendezvous::agent_message::Body as Report;
use ddp_proto::rendezvous::{Assignment, DaemonMessage, Leave, WorkerExit};

use super::exit_reason::ExitReason;
use crate::spawn::spawner::SpawnEvent;
use crate::supervise::ending::Ending;

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// The daemon said something.
    Daemon(DaemonMessage),
    /// The daemon cannot be reached any more, or refuses to talk.
    DaemonGone {
        /// Exit code that belongs to the error.
        exit_code: u8,
        /// In words.
        error: String,
    },
    /// The daemon has been silent for so long that other nodes may soon take the place of this one.
    Replaceable {
        /// The workers have to be gone after this time.
        end_in: Duration,
    },
    /// How the start of the workers goes.
    Spawn(SpawnEvent),
    /// Something that the generation needs failed before any worker was started.
    CannotBegin(ExitReason),
    /// A worker ended.
    Exited {
        /// Its place on this node.
        local_rank: LocalRank,
        /// How it ended.
        ending: Ending,
    },
    /// A worker has left its generation, and waits for the next one.
    Parked(LocalRank),
    /// All that a worker said on the control socket before it ended has arrived.
    ControlDrained {
        /// Its generation.
        generation: Generation,
        /// Its place on this node.
        local_rank: LocalRank,
        /// It says that it failed only because another rank did.
        consequence: bool,
    },
    /// All that is known of the first failure has been collected.
    Described(WorkerExit),
    /// A signal for the launcher.
    Signal(i32),
    /// The time set by [`Effect::Arm`] is over.
    Alarm,
    /// Nothing is left of the workers but these processes, which cannot be killed.
    Swept {
        /// In words.
        stuck: Vec<String>,
    },
    /// The daemon has received our good-bye, or never will.
    Left,
}

/// What is to be done.
#[derive(Debug, PartialEq)]
pub enum Effect {
    /// Send `Join` with a fresh port.
    Join,
    /// Send a report that speaks of the current generation.
    Report(Report),
    /// Report that the workers of the current generation are gone, and how they ended.
    ReportEnds,
    /// Start the workers.
    Spawn(Assignment),
    /// Start no more workers.
    CancelSpawn,
    /// Tell all workers that the generation is over.
    Notify(String),
    /// Ask all workers to stop at the next step boundary.
    AskToStop(String),
    /// Send this signal to all live workers that are not parked.
    SignalAll(i32),
    /// Send this signal to those of them that do not listen on the control socket.
    SignalUnasked(i32),
    /// Send this signal to a worker that was started while the others were being stopped.
    SignalLate(LocalRank, i32),
    /// Kill this worker: its generation was given up before it was started.
    KillStray(i32),
    /// Wait for the last words of a worker on the control socket, then [`Event::ControlDrained`].
    DrainControl(LocalRank),
    /// Collect what is known of a failed worker, then [`Event::Described`].
    Describe(LocalRank),
    /// Kill all that is left of the workers that are not parked, then [`Event::Swept`].
    Sweep,
    /// Give [`Event::Alarm`] after this time, instead of any set before.
    Arm(Duration),
    /// No alarm.
    Disarm,
    /// Tell people.
    Say(String),
    /// Tell the daemon good-bye, then [`Event::Left`].
    Leave(Leave),
    /// End.
    Finish(ExitReason),
}
