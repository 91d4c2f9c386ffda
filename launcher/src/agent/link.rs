//! The agent's stream to the daemon, as a task: opened again when it breaks, while the workers keep running.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ddp_proto::client::{AgentIdentity, AgentStream, Attempts, Client, ClientError};
use ddp_proto::ids::Generation;
use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::daemon_message::Body as Word;
use ddp_proto::rendezvous::{DaemonMessage, Heartbeat, Join, Leave};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::place::HeldPlace;

/// Messages of the daemon that may wait for the agent.
const QUEUE: usize = 256;

/// Silence at the beginning that is worth a message: the daemon may just be starting.
const SILENCE: Duration = Duration::from_secs(3);

/// What the link tells the agent.
#[derive(Debug)]
pub(super) enum LinkEvent {
    /// No daemon has answered so far; the agent tries for so long in all. Why the last attempt failed, if one has.
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

/// How to reach the daemon.
pub(super) struct LinkConfig {
    pub(super) endpoint: String,
    pub(super) identity: AgentIdentity,
    /// How long it may be unreachable at the beginning.
    pub(super) connect_timeout: Duration,
    /// How long it may be unreachable later on, unless the agent gives up before.
    pub(super) outage_timeout: Duration,
}

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
    /// Starts to connect.
    pub(super) fn start(config: LinkConfig) -> (Self, mpsc::Receiver<LinkEvent>) {
        let (commands, queue) = mpsc::unbounded_channel();
        let (events, receiver) = mpsc::channel(QUEUE);
        let heartbeat = LatestHeartbeat::default();
        let mut task = JoinSet::new();
        let latest = heartbeat.clone();
        let (gives_up, end_of_attempts) = watch::channel(Instant::now());
        task.spawn(async move {
            let mut side = Side {
                config,
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

    /// Queues a report, or a `Join`. Never waits, and drops none: while the stream is broken, they are kept.
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

/// What the agent sends again after the stream broke.
#[derive(Debug, Default)]
pub struct Memory {
    /// The agent's latest `Join`.
    join: Option<Join>,
    /// Generation last assigned.
    generation: Generation,
    /// What was reported of this generation since.
    reports: Vec<Body>,
    /// The place in the generation last assigned.
    place: Option<HeldPlace>,
    /// Highest generation of which a daemon spoke.
    latest: Generation,
    /// The agent has no workers, and takes the next assignment.
    is_joining: bool,
    /// The daemon does not take this node.
    is_refused: bool,
}

impl Memory {
    /// The agent reports this.
    pub fn note(&mut self, generation: Generation, body: &Body) {
        if let Body::Join(join) = body {
            self.join = Some(join.clone());
        }
        if generation < self.generation {
            // The agent has not read the assignment yet.
            return;
        }
        match body {
            Body::Join(_) => {
                self.generation = generation;
                self.reports.clear();
                self.is_joining = true;
            }
            Body::WorkerExit(_) | Body::NodeSucceeded(_) | Body::NodeStopped(_) | Body::NodeLeaving(_) => {
                if generation != self.generation {
                    self.generation = generation;
                    self.reports.clear();
                }
                self.reports.push(body.clone());
            }
            Body::Heartbeat(heartbeat) => {
                if let Some(place) = self.place.as_mut().filter(|_| generation == self.generation) {
                    place.heartbeat = *heartbeat;
                }
            }
            // Nothing follows it.
            Body::Leave(_) => {}
        }
    }

    /// The daemon says this.
    pub fn receive(&mut self, now: Instant, message: &DaemonMessage) {
        let generation = Generation(message.generation);
        self.latest = self.latest.max(generation);
        match &message.body {
            // The agent takes an assignment: from now on it speaks of this generation.
            Some(Word::Assignment(assignment)) if self.takes(generation, &assignment.assignment_id) => {
                self.generation = generation;
                self.is_joining = false;
                self.reports.clear();
                self.place = HeldPlace::of(now, assignment);
            }
            Some(Word::GenerationOver(over)) if generation == self.generation => {
                if let Some(place) = &mut self.place {
                    // An agent that was out of reach learns of the end, but not what it has cost.
                    place.give_up((over.max_restarts > 0).then_some(over));
                }
            }
            Some(Word::JobOver(_) | Word::Refused(_)) => {
                self.is_refused = matches!(message.body, Some(Word::Refused(_)));
                if let Some(place) = &mut self.place {
                    place.give_up(None);
                }
            }
            _ => {}
        }
    }

    /// The daemon does not take this node: nothing is left to be said but good-bye.
    pub fn is_refused(&self) -> bool {
        self.is_refused
    }

    /// A daemon that lost its state may assign a number again. While workers run, the agent speaks of theirs.
    fn takes(&self, generation: Generation, assignment_id: &str) -> bool {
        let is_another = assignment_id != self.assignment_id(generation);
        generation > self.generation || generation == self.generation && self.is_joining && is_another
    }

    /// Which assignment of the generation it was; empty if that is not known any more.
    pub fn assignment_id(&self, generation: Generation) -> &str {
        let place = self.place.as_ref().filter(|_| generation == self.generation);
        place.map_or("", |place| &place.assignment.assignment_id)
    }

    /// What a new stream begins with: `Join`, then the reports of the generation of which they speak; nothing before
    /// the agent has joined.
    pub fn greeting(&self, now: Instant) -> (Generation, Vec<Body>) {
        let join = self.join(now).map(Body::Join);
        let reports = join.is_some().then_some(&self.reports).into_iter().flatten();
        let reports = reports.cloned();
        (self.generation, join.into_iter().chain(reports).collect())
    }

    fn join(&self, now: Instant) -> Option<Join> {
        let mut join = self.join.clone()?;
        join.latest_generation = self.latest.0;
        if let Some(place) = &self.place {
            join.run_token.clone_from(&place.assignment.run_token);
            join.place = Some(Box::new(place.told(now)));
        }
        Some(join)
    }
}

/// The task's side.
struct Side {
    config: LinkConfig,
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

/// Why the task stops using a stream.
enum Stop {
    /// It broke.
    Broken(ClientError),
    /// The agent leaves, or is gone.
    Done,
}

impl Side {
    async fn run(&mut self) -> Result<(), ClientError> {
        let client = self.connect().await?;
        self.tell(LinkEvent::Connected(client.clone())).await;
        let mut attempts = client.attempts(self.config.connect_timeout);
        loop {
            let identity = self.config.identity.clone();
            // Cancel safe: a stream that was not opened is given up.
            let stream = tokio::select! {
                stream = client.agent_stream(identity, &mut attempts) => stream?,
                () = changed(&mut self.gives_up) => {
                    attempts = self.attempts_left(&client);
                    continue;
                }
            };
            let error = match self.serve(stream, &client, &mut attempts).await {
                Stop::Done => return Ok(()),
                Stop::Broken(error) => error,
            };
            if self.is_known && !self.is_lost {
                // It has worked until now.
                self.gives_up.mark_unchanged();
                attempts = client.attempts(self.config.outage_timeout);
            } else if !self.is_known && matches!(error, ClientError::Stranger { .. }) {
                return Err(error);
            }
            if !self.is_lost {
                self.is_lost = true;
                self.tell(LinkEvent::Broken(error.clone())).await;
            }
            tokio::select! {
                goes_on = attempts.broke(&error) => goes_on?,
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
        let patience = self.config.connect_timeout;
        let cause = Mutex::new(None);
        let note = |words: &str| *cause.lock().expect("nothing panics with it") = Some(words.to_owned());
        let connecting = Client::connect_telling(&self.config.endpoint, Instant::now() + patience, note);
        tokio::pin!(connecting);
        if let Ok(outcome) = tokio::time::timeout(SILENCE.min(patience / 2), &mut connecting).await {
            return outcome;
        }
        let cause = cause.lock().expect("nothing panics with it").clone();
        self.tell(LinkEvent::Unanswered(patience, cause)).await;
        connecting.await
    }

    /// After a refusal the daemon ends the stream: nothing broke, and nothing is left to be said but good-bye.
    async fn await_leave(&mut self) -> Stop {
        while let Some(command) = self.queue.recv().await {
            if matches!(command, Command::Leave(..)) {
                self.tell(LinkEvent::Left).await;
                break;
            }
        }
        Stop::Done
    }

    /// Uses a stream until it breaks or the agent leaves. What is opened is the daemon's only when it says something,
    /// which it does at once; the `attempts` end when it did not.
    async fn serve(&mut self, mut stream: AgentStream, client: &Client, attempts: &mut Attempts) -> Stop {
        if let Err(error) = self.replay(&stream) {
            return Stop::Broken(error);
        }
        loop {
            let is_silent = self.is_lost || !self.is_known;
            // Cancel safe: `recv` and `next` lose nothing that they have not returned.
            let command = tokio::select! {
                command = self.queue.recv() => command,
                message = stream.next() => {
                    match message {
                        Ok(message) => self.take(message).await,
                        Err(_) if self.memory.is_refused => return self.await_leave().await,
                        Err(error) => return Stop::Broken(error),
                    }
                    continue;
                }
                () = changed(&mut self.gives_up), if is_silent => {
                    *attempts = self.attempts_left(client);
                    continue;
                }
                () = tokio::time::sleep_until(attempts.deadline()), if is_silent => {
                    return Stop::Broken(ClientError::Broken {
                        endpoint: self.config.endpoint.clone(),
                        cause: "the daemon said nothing on the stream".into(),
                    });
                }
            };
            let (generation, body) = match command {
                None => return Stop::Done,
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
                    return Stop::Done;
                }
            };
            self.memory.note(generation, &body);
            let assignment_id = self.memory.assignment_id(generation);
            match stream.sender().send(generation, assignment_id, body) {
                Err(_) if self.memory.is_refused => return self.await_leave().await,
                Err(error) => return Stop::Broken(error),
                Ok(()) => {}
            }
        }
    }

    /// The first message of every stream is `Join`; the reports of the generation follow.
    fn replay(&self, stream: &AgentStream) -> Result<(), ClientError> {
        let (generation, greeting) = self.memory.greeting(Instant::now());
        let assignment_id = self.memory.assignment_id(generation);
        let mut bodies = greeting.into_iter();
        bodies.try_for_each(|body| stream.sender().send(generation, assignment_id, body))
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

/// Waits for another moment. Cancel safe.
async fn changed(moment: &mut watch::Receiver<Instant>) {
    if moment.changed().await.is_err() {
        // The agent is gone: so will this task be.
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use ddp_proto::rendezvous::{
        Assignment, GenerationOver, NodeAssignment, NodeLeaving, NodeStopped, NodeSucceeded, Waiting,
    };

    use super::*;

    fn receive(memory: &mut Memory, generation: u64, body: Word) {
        let message = DaemonMessage {
            generation,
            body: Some(body),
        };
        memory.receive(Instant::now(), &message);
    }

    fn assignment() -> Word {
        assignment_of("a1")
    }

    fn assignment_of(assignment_id: &str) -> Word {
        let node = |hostname: &str, first_rank| NodeAssignment {
            hostname: hostname.into(),
            first_rank,
            workers: 2,
            ..NodeAssignment::default()
        };
        Word::Assignment(Assignment {
            node_rank: 1,
            nodes: vec![node("a", 0), node("b", 2)],
            run_token: "run".into(),
            assignment_id: assignment_id.into(),
            ..Assignment::default()
        })
    }

    #[test]
    fn a_new_generation_forgets_the_reports_of_the_last() {
        let mut memory = Memory::default();
        memory.note(Generation(0), &Body::Join(Join::default()));
        receive(&mut memory, 1, assignment());
        memory.note(Generation(1), &Body::NodeSucceeded(NodeSucceeded {}));
        assert_eq!((memory.generation, memory.reports.len()), (Generation(1), 1));
        memory.note(Generation(1), &Body::NodeStopped(NodeStopped::default()));
        memory.note(Generation(1), &Body::Join(Join::default()));
        assert_eq!((memory.generation, memory.reports.len()), (Generation(1), 0));
        receive(&mut memory, 2, assignment());
        assert_eq!(memory.generation, Generation(2));
    }

    #[test]
    fn what_is_said_of_a_generation_names_its_assignment() {
        let mut memory = Memory::default();
        memory.note(Generation(0), &Body::Join(Join::default()));
        assert_eq!(memory.assignment_id(Generation(0)), "");
        receive(&mut memory, 1, assignment());
        memory.note(Generation(1), &Body::NodeStopped(NodeStopped::default()));
        memory.note(Generation(1), &Body::Join(Join::default()));
        assert_eq!(memory.assignment_id(Generation(1)), "a1", "also when it is over");
        let place = memory.join(Instant::now()).unwrap().place.unwrap();
        assert_eq!(place.assignment.unwrap().assignment_id, "a1");
        receive(&mut memory, 2, assignment());
        assert_eq!(
            memory.assignment_id(Generation(1)),
            "",
            "it is not of the new one"
        );
    }

    #[test]
    fn a_number_that_is_assigned_again_is_taken_when_no_workers_run() {
        let mut memory = Memory::default();
        memory.note(Generation(0), &Body::Join(Join::default()));
        receive(&mut memory, 1, assignment());
        let again = assignment_of("b1");
        receive(&mut memory, 1, again.clone());
        assert_eq!(
            memory.assignment_id(Generation(1)),
            "a1",
            "its workers are of this one"
        );
        let stopped = Body::NodeStopped(NodeStopped::default());
        memory.note(Generation(1), &stopped);
        memory.note(Generation(1), &Body::Join(Join::default()));
        receive(&mut memory, 1, again.clone());
        memory.note(Generation(1), &stopped);
        receive(&mut memory, 1, again);
        assert_eq!(
            (memory.assignment_id(Generation(1)), memory.reports.len()),
            ("b1", 1),
            "a repeated one changes nothing"
        );
    }

    #[test]
    fn a_new_stream_repeats_the_notice_to_leave() {
        let mut memory = Memory::default();
        memory.note(Generation(0), &Body::Join(Join::default()));
        receive(&mut memory, 1, assignment());
        let leaving = Body::NodeLeaving(NodeLeaving { signal: 15 });
        memory.note(Generation(1), &leaving);
        assert_eq!(memory.reports, [leaving]);
    }

    #[test]
    fn a_join_that_crossed_an_assignment_does_not_hide_it() {
        let mut memory = Memory::default();
        memory.note(Generation(0), &Body::Join(Join::default()));
        receive(&mut memory, 2, assignment());
        // The agent has not read the assignment yet.
        memory.note(Generation(1), &Body::Join(Join::default()));
        assert_eq!(memory.generation, Generation(2));
    }

    #[test]
    fn a_new_stream_begins_with_the_place_of_this_node_alone() {
        let mut memory = Memory::default();
        memory.note(Generation(0), &Body::Join(Join::default()));
        receive(&mut memory, 1, assignment());
        let heartbeat = Heartbeat {
            step: Some(7),
            ranks_divide: Some(12),
            ..Heartbeat::default()
        };
        memory.note(Generation(1), &Body::Heartbeat(heartbeat));
        let join = memory.join(Instant::now()).unwrap();
        assert_eq!((join.run_token.as_str(), join.latest_generation), ("run", 1));
        let place = join.place.unwrap();
        let told = place.assignment.unwrap();
        assert_eq!((told.node_rank, place.node_count, place.over), (1, 2, false));
        assert_eq!(
            told.nodes
                .iter()
                .map(|node| node.hostname.as_str())
                .collect::<Vec<_>>(),
            ["b"]
        );
        assert_eq!(place.heartbeat, Some(heartbeat));
    }

    #[test]
    fn a_place_is_given_up_when_its_generation_is_over() {
        let mut memory = Memory::default();
        memory.note(Generation(0), &Body::Join(Join::default()));
        receive(&mut memory, 1, assignment());
        let over = GenerationOver {
            restart_count: 2,
            max_restarts: 3,
            best_step: Some(7),
            ..GenerationOver::default()
        };
        receive(&mut memory, 1, Word::GenerationOver(over));
        // Its workers are gone, and it waits for the next one.
        memory.note(Generation(1), &Body::Join(Join::default()));
        let place = memory.join(Instant::now()).unwrap().place.unwrap();
        let told = place.assignment.unwrap();
        assert_eq!(
            (place.over, told.restart_count, told.best_step),
            (true, 2, Some(7))
        );
        receive(&mut memory, 2, assignment());
        assert!(!memory.join(Instant::now()).unwrap().place.unwrap().over);
    }

    #[test]
    fn a_spare_tells_the_generation_that_it_received() {
        let mut memory = Memory::default();
        memory.note(Generation(0), &Body::Join(Join::default()));
        receive(&mut memory, 3, Word::Waiting(Waiting::default()));
        let join = memory.join(Instant::now()).unwrap();
        assert_eq!(
            (memory.generation, join.latest_generation, join.place),
            (Generation(0), 3, None)
        );
    }
}
