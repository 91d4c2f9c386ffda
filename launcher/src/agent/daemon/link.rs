//! The agent's stream to the daemon, as a task: opened again when it breaks, while the workers keep running.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ddp_proto::client::{ATTEMPT_TIMEOUT, AgentIdentity, AgentStream, Attempts, Client, ClientError};
use ddp_proto::ids::Generation;
use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::{DaemonMessage, Heartbeat, Leave};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::memory::Memory;
use crate::plan::BoundPlan;

/// Messages of the daemon that may wait for the agent.
const QUEUE: usize = 256;

/// Silence at the beginning that is worth a message: the daemon may just be starting.
const SILENCE: Duration = Duration::from_secs(3);

/// A deadline that is noticed so late passed while this process was stopped.
const OVERSLEPT: Duration = Duration::from_secs(1);

/// What the link tells the agent, in the order in which it happened.
#[derive(Debug)]
pub(in crate::agent) enum LinkEvent {
    /// No daemon has answered so far: how long the agent tries in all, and why the last attempt failed.
    Unanswered(Duration, Option<String>),
    /// The daemon answers; also a client for the key-value calls.
    Connected(Client),
    /// The daemon said something.
    Message(DaemonMessage),
    /// The stream broke, and is being opened again.
    Broken(ClientError),
    /// The daemon speaks again.
    Restored,
    /// The daemon cannot be reached any more. Nothing follows.
    Gone(ClientError),
    /// The daemon received our good-bye, or the time for it is over. Nothing follows.
    Left,
}

#[derive(Debug)]
enum Command {
    Report(Generation, Body),
    /// The latest one.
    Heartbeat,
    Leave(Generation, Leave, Instant),
}

/// The latest heartbeat, until it is sent: it says all that those before it said.
type LatestHeartbeat = Arc<Mutex<Option<(Generation, Heartbeat)>>>;

/// The agent's handle to its stream.
pub(super) struct Link {
    /// Has no bound, because a job hangs without a report that was dropped. Few can wait: a node makes a handful in a
    /// generation, and the daemon assigns the next one when it has received them. One heartbeat waits at most.
    commands: mpsc::UnboundedSender<Command>,
    heartbeat: LatestHeartbeat,
    gives_up: watch::Sender<Instant>,
    /// Ends with the handle.
    _task: JoinSet<()>,
}

impl Link {
    /// Starts to connect to the daemon of the plan.
    pub(super) fn start(plan: Arc<BoundPlan>, identity: AgentIdentity) -> (Self, mpsc::Receiver<LinkEvent>) {
        let (commands, queue) = mpsc::unbounded_channel();
        let (events, receiver) = mpsc::channel(QUEUE);
        let heartbeat = LatestHeartbeat::default();
        let mut task = JoinSet::new();
        let latest = heartbeat.clone();
        let (gives_up, end_of_attempts) = watch::channel(Instant::now());
        task.spawn(async move {
            let mut side = Side {
                plan,
                identity,
                queue,
                heartbeat: latest,
                gives_up: end_of_attempts,
                events,
                memory: Memory::default(),
                is_known: false,
                is_lost: false,
            };
            if let Err(error) = side.run().await {
                side.tell(LinkEvent::Gone(error)).await;
            }
        });
        let link = Self {
            commands,
            heartbeat,
            gives_up,
            _task: task,
        };
        (link, receiver)
    }

    /// Queues a report, or a `Join`. Never waits, and keeps reports while the stream is broken.
    pub(super) fn report(&self, generation: Generation, body: Body) {
        // The task has ended only after a last event, which the agent may not have read yet.
        let _ = self.commands.send(Command::Report(generation, body));
    }

    /// Queues a heartbeat, instead of one that was not sent yet.
    pub(super) fn beat(&self, generation: Generation, heartbeat: Heartbeat) {
        let mut latest = self.heartbeat.lock().expect("nothing panics with it");
        if latest.replace((generation, heartbeat)).is_none() {
            // As above.
            let _ = self.commands.send(Command::Heartbeat);
        }
    }

    /// Sets when a daemon that is out of reach is given up.
    pub(super) fn give_up_at(&self, moment: Instant) {
        self.gives_up.send_replace(moment);
    }

    /// Says good-bye; [`LinkEvent::Left`] follows, at the latest at `deadline`. False if there is no stream.
    pub(super) fn leave(&self, generation: Generation, leave: Leave, deadline: Instant) -> bool {
        let command = Command::Leave(generation, leave, deadline);
        self.commands.send(command).is_ok()
    }
}

/// The task's side.
struct Side {
    plan: Arc<BoundPlan>,
    identity: AgentIdentity,
    queue: mpsc::UnboundedReceiver<Command>,
    heartbeat: LatestHeartbeat,
    /// When a daemon that is out of reach is given up. Counts when it changes, until the next break.
    gives_up: watch::Receiver<Instant>,
    events: mpsc::Sender<LinkEvent>,
    memory: Memory,
    /// The daemon has spoken to us: who answers at its address is no stranger.
    is_known: bool,
    /// [`LinkEvent::Broken`] was sent for this break.
    is_lost: bool,
}

impl Side {
    async fn run(&mut self) -> Result<(), ClientError> {
        let client = self.connect().await?;
        self.tell(LinkEvent::Connected(client.clone())).await;
        let mut attempts = client.attempts(self.plan.connect_timeout);
        loop {
            let identity = self.identity.clone();
            // Cancel safe: a stream that was not opened is given up.
            let stream = tokio::select! {
                stream = client.agent_stream(identity, &mut attempts) => match stream {
                    Ok(stream) => stream,
                    Err(error) => {
                        attempts = give_up(&client, &attempts, error)?;
                        continue;
                    }
                },
                () = changed(&mut self.gives_up) => {
                    attempts = self.attempts_left(&client);
                    continue;
                }
            };
            let Err(error) = self.serve(stream, &client, &mut attempts).await else {
                return Ok(());
            };
            if self.is_known && !self.is_lost {
                // It has worked until now.
                self.gives_up.mark_unchanged();
                attempts = client.attempts(self.plan.outage_timeout);
            } else if !self.is_known && !error.is_broken() {
                // Another server, or one that does not accept this node's certificate.
                return Err(error);
            }
            if !self.is_lost {
                self.is_lost = true;
                self.tell(LinkEvent::Broken(error.clone())).await;
            }
            tokio::select! {
                goes_on = attempts.broke(&error) => if let Err(error) = goes_on {
                    attempts = give_up(&client, &attempts, error)?;
                },
                () = changed(&mut self.gives_up) => attempts = self.attempts_left(&client),
            }
        }
    }

    /// Attempts until the daemon is given up.
    fn attempts_left(&self, client: &Client) -> Attempts {
        let left = self.gives_up.borrow().saturating_duration_since(Instant::now());
        client.attempts(left)
    }

    async fn connect(&self) -> Result<Client, ClientError> {
        let patience = self.plan.connect_timeout;
        let cause = Mutex::new(None);
        let note = |words: &str| *cause.lock().expect("nothing panics with it") = Some(words.to_owned());
        let plan = &self.plan;
        let connecting =
            Client::connect_telling(&plan.endpoint, &plan.access, Instant::now() + patience, note);
        tokio::pin!(connecting);
        if let Ok(outcome) = tokio::time::timeout(SILENCE.min(patience / 2), &mut connecting).await {
            return outcome;
        }
        let cause = cause.lock().expect("nothing panics with it").clone();
        self.tell(LinkEvent::Unanswered(patience, cause)).await;
        connecting.await
    }

    /// After a refusal the daemon ends the stream: nothing broke, and nothing is left to be said but good-bye.
    async fn await_leave(&mut self) {
        while let Some(command) = self.queue.recv().await {
            if matches!(command, Command::Leave(..)) {
                self.tell(LinkEvent::Left).await;
                return;
            }
        }
    }

    /// Uses a stream until it breaks, which is an error, or the agent leaves or is gone. What is opened is the daemon's
    /// only when it says something, which it does at once; the `attempts` end when it did not.
    async fn serve(
        &mut self,
        mut stream: AgentStream,
        client: &Client,
        attempts: &mut Attempts,
    ) -> Result<(), ClientError> {
        self.replay(&stream)?;
        loop {
            let is_silent = self.is_lost || !self.is_known;
            // Cancel safe: `recv` and `next` lose nothing that they have not returned.
            let command = tokio::select! {
                command = self.queue.recv() => command,
                message = stream.next() => {
                    match message {
                        Ok(message) => self.take(message).await,
                        Err(_) if self.memory.is_refused() => {
                            self.await_leave().await;
                            return Ok(());
                        }
                        Err(error) => return Err(error),
                    }
                    continue;
                }
                () = changed(&mut self.gives_up), if is_silent => {
                    *attempts = self.attempts_left(client);
                    continue;
                }
                () = tokio::time::sleep_until(attempts.deadline()), if is_silent => {
                    let silence = ClientError::Broken {
                        endpoint: self.plan.endpoint.clone(),
                        cause: "the daemon said nothing on the stream".into(),
                    };
                    *attempts = give_up(client, attempts, silence)?;
                    continue;
                }
            };
            let (generation, body) = match command {
                None => return Ok(()),
                Some(Command::Report(generation, body)) => (generation, body),
                Some(Command::Heartbeat) => {
                    let latest = self.heartbeat.lock().expect("nothing panics with it").take();
                    let Some((generation, heartbeat)) = latest else {
                        continue;
                    };
                    (generation, Body::Heartbeat(heartbeat))
                }
                Some(Command::Leave(generation, leave, deadline)) => {
                    stream.leave(generation, leave, deadline).await;
                    self.tell(LinkEvent::Left).await;
                    return Ok(());
                }
            };
            self.memory.note(generation, &body);
            let assignment_id = self.memory.assignment_id(generation);
            match stream.send(generation, assignment_id, body) {
                Err(_) if self.memory.is_refused() => {
                    self.await_leave().await;
                    return Ok(());
                }
                sent => sent?,
            }
        }
    }

    /// The first message of every stream is `Join`; the reports of the generation follow.
    fn replay(&self, stream: &AgentStream) -> Result<(), ClientError> {
        let (generation, greeting) = self.memory.greeting(Instant::now());
        let assignment_id = self.memory.assignment_id(generation);
        let mut bodies = greeting.into_iter();
        bodies.try_for_each(|body| stream.send(generation, assignment_id, body))
    }

    async fn take(&mut self, message: DaemonMessage) {
        self.memory.receive(Instant::now(), &message);
        self.is_known = true;
        if std::mem::take(&mut self.is_lost) {
            self.tell(LinkEvent::Restored).await;
        }
        self.tell(LinkEvent::Message(message)).await;
    }

    async fn tell(&self, event: LinkEvent) {
        // The agent is gone: so will this task be.
        let _ = self.events.send(event).await;
    }
}

/// Gives up the daemon, which is over its time. But a process that was stopped looks at the clock before it has read
/// what came meanwhile: the daemon then has the time of one more attempt.
fn give_up(client: &Client, attempts: &Attempts, error: ClientError) -> Result<Attempts, ClientError> {
    if has_overslept(Instant::now(), attempts.deadline()) {
        Ok(client.attempts(ATTEMPT_TIMEOUT))
    } else {
        Err(error)
    }
}

fn has_overslept(now: Instant, deadline: Instant) -> bool {
    now.saturating_duration_since(deadline) > OVERSLEPT
}

/// Waits for another moment. Cancel safe.
async fn changed(moment: &mut watch::Receiver<Instant>) {
    if moment.changed().await.is_err() {
        // The agent is gone: so will this task be.
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_that_passed_while_the_process_was_stopped_is_noticed_late() {
        let deadline = Instant::now();
        assert!(!has_overslept(deadline, deadline + OVERSLEPT));
        assert!(!has_overslept(deadline + OVERSLEPT, deadline));
        assert!(has_overslept(deadline + 50 * OVERSLEPT, deadline));
    }
}
