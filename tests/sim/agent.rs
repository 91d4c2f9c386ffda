//! A simulated agent: the protocol of a node without processes, as `ddp_proto::client` documents it.

use std::time::Duration;

use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{
    Assignment, DaemonMessage, Heartbeat, JobOver, Join, Leave, NodeLeaving, NodeStopped, NodeSucceeded,
    Place, WorkerExit, refused,
};
use ddp_run::rendezvous::ConnId;

/// One agent process.
#[derive(Debug)]
pub(crate) struct Agent {
    pub(crate) incarnation: String,
    pub(crate) host: usize,
    pub(crate) join: Join,
    /// The stream that it believes to have.
    pub(crate) conn: Option<ConnId>,
    /// Generation last assigned, here or learned from the daemon.
    pub(crate) generation: u64,
    pub(crate) life: Life,
    /// What it last reported of this generation, repeated after a reconnect.
    pub(crate) report: Option<Body>,
    /// What it tells a daemon that has lost its state.
    pub(crate) place: Option<Place>,
    /// Highest generation of which a daemon spoke.
    pub(crate) latest_generation: u64,
    /// Exit code, once it has ended in order.
    pub(crate) exit_code: Option<i32>,
}

/// What the agent is doing.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Life {
    /// Has joined, waits for an assignment.
    Joining,
    /// Its workers run.
    Running(Box<Assignment>),
    /// Its workers have succeeded.
    Succeeded,
    /// Stops its workers; the world tells it when they are gone.
    Stopping,
    /// Was stopped by a signal: its workers stop, and it leaves when they are gone.
    Leaving,
    /// Has reported the end of a failed job, and waits for the last word to exit with this code.
    Listening(i32),
    /// Has ended in order, or was killed.
    Gone,
}

/// What an agent wants to happen because of a message.
#[derive(Debug, PartialEq)]
pub(crate) enum AgentAction {
    /// Send this on the current stream.
    Send(Body),
    /// Start workers: the world decides when they end, and how.
    RunWorkers,
    /// Stop workers: the world says when they are gone.
    StopWorkers,
    /// Wait no longer than this for the last word.
    Listen(Duration),
    /// Say good-bye and exit.
    Exit(i32),
}

impl Agent {
    /// Everything that is to be sent first on a new stream.
    pub(crate) fn greeting(&self) -> Vec<Body> {
        let mut join = self.join.clone();
        if let Some(place) = &self.place {
            join.run_token = place
                .assignment
                .as_ref()
                .map_or_else(String::new, |a| a.run_token.clone());
            join.place = Some(Box::new(place.clone()));
        }
        join.latest_generation = self.latest_generation;
        let mut greeting = vec![Body::Join(join)];
        greeting.extend(self.report.clone());
        greeting
    }

    /// Which assignment of its generation it has.
    pub(crate) fn assignment_id(&self) -> String {
        let assignment = self.place.as_ref().and_then(|place| place.assignment.as_ref());
        assignment.map_or_else(String::new, |assignment| assignment.assignment_id.clone())
    }

    pub(crate) fn receive(&mut self, message: DaemonMessage) -> Vec<AgentAction> {
        let generation = message.generation;
        self.latest_generation = self.latest_generation.max(generation);
        match message.body.expect("the daemon never sends an empty message") {
            Reply::Waiting(_) | Reply::HeartbeatAck(_) => vec![],
            Reply::Assignment(assignment) if generation == self.generation && self.life != Life::Joining => {
                if let Life::Running(own) = &self.life {
                    assert_eq!(**own, assignment, "`{}` has another place now", self.incarnation);
                }
                vec![]
            }
            Reply::Assignment(assignment) => {
                assert!(
                    self.life == Life::Joining && generation > self.generation,
                    "`{}` is {:?} in generation {}, but was assigned to {generation}",
                    self.incarnation,
                    self.life,
                    self.generation
                );
                self.generation = generation;
                self.place = Some(place(&assignment));
                self.life = Life::Running(Box::new(assignment));
                self.report = None;
                vec![AgentAction::RunWorkers]
            }
            Reply::GenerationOver(over) => match self.life {
                Life::Running(_) | Life::Succeeded | Life::Leaving => {
                    if let Some(place) = &mut self.place {
                        place.over = true;
                        if let Some(assignment) = place.assignment.as_mut().filter(|_| over.max_restarts > 0)
                        {
                            assignment.restart_count = over.restart_count;
                            assignment.best_step = over.best_step.max(assignment.best_step);
                        }
                    }
                    assert_eq!(
                        generation, self.generation,
                        "`{}` runs another generation",
                        self.incarnation
                    );
                    if self.life == Life::Leaving {
                        return vec![];
                    }
                    self.life = Life::Stopping;
                    self.report = None;
                    vec![AgentAction::StopWorkers]
                }
                // Nothing runs: say so again, the daemon has not received it.
                Life::Joining => self.stopped(),
                Life::Stopping | Life::Listening(_) | Life::Gone => vec![],
            },
            Reply::JobOver(over) => self.job_over(&over),
            Reply::LastWord(_) => self.last_word(),
            Reply::Refused(refused) => vec![AgentAction::Exit(match refused.code() {
                refused::Code::Disagree => 76,
                refused::Code::TimedOut | refused::Code::JobOver => 75,
                refused::Code::Unauthenticated => 77,
                refused::Code::Invalid | refused::Code::Unspecified => 2,
            })],
        }
    }

    /// Every other host runs an older build, which does not wait for the last word.
    fn job_over(&mut self, over: &JobOver) -> Vec<AgentAction> {
        if let Some(place) = &mut self.place {
            place.over = true;
        }
        if over.last_word_ms == 0 || !self.host.is_multiple_of(2) {
            return vec![AgentAction::Exit(over.exit_code)];
        }
        if let Life::Listening(_) = self.life {
            return vec![];
        }
        self.life = Life::Listening(over.exit_code);
        let exits = vec![WorkerExit {
            rank: self.host as u32,
            stopped_with: Some(15),
            ..WorkerExit::default()
        }];
        let stopped = NodeStopped {
            exits,
            ..NodeStopped::default()
        };
        vec![
            AgentAction::Send(Body::NodeStopped(stopped)),
            AgentAction::Listen(Duration::from_millis(over.last_word_ms.into())),
        ]
    }

    /// All was said, or the time for it is over.
    pub(crate) fn last_word(&mut self) -> Vec<AgentAction> {
        match self.life {
            Life::Listening(code) => vec![AgentAction::Exit(code)],
            _ => vec![],
        }
    }

    /// Its workers are gone.
    pub(crate) fn stopped(&mut self) -> Vec<AgentAction> {
        self.life = Life::Joining;
        vec![
            AgentAction::Send(Body::NodeStopped(NodeStopped::default())),
            AgentAction::Send(Body::Join(self.join.clone())),
        ]
    }

    /// One of its workers has failed.
    pub(crate) fn worker_failed(&mut self, exit: WorkerExit) -> Vec<AgentAction> {
        let report = Body::WorkerExit(exit);
        self.report = Some(report.clone());
        vec![AgentAction::Send(report)]
    }

    /// All of its workers have succeeded.
    pub(crate) fn workers_succeeded(&mut self) -> Vec<AgentAction> {
        self.life = Life::Succeeded;
        let report = Body::NodeSucceeded(NodeSucceeded {});
        self.report = Some(report.clone());
        vec![AgentAction::Send(report)]
    }

    /// A user stops it: its workers are to stop.
    pub(crate) fn leaving(&mut self, signal: i32) -> Vec<AgentAction> {
        self.life = Life::Leaving;
        let report = Body::NodeLeaving(NodeLeaving { signal });
        self.report = Some(report.clone());
        vec![AgentAction::Send(report)]
    }

    pub(crate) fn heartbeat() -> Body {
        Body::Heartbeat(Heartbeat::default())
    }

    pub(crate) fn farewell(signal: Option<i32>) -> Body {
        Body::Leave(Leave {
            signal,
            reason: String::new(),
            exit_code: None,
        })
    }
}

/// The place of one node, as it tells it to a daemon that has lost its state.
fn place(assignment: &Assignment) -> Place {
    let own = assignment.nodes[assignment.node_rank as usize].clone();
    Place {
        assignment: Some(Assignment {
            nodes: vec![own],
            ..assignment.clone()
        }),
        node_count: assignment.nodes.len() as u32,
        ..Place::default()
    }
}
