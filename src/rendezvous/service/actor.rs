//! The task that owns the state: gives it the time and the dice, and carries out its effects without ever waiting
//! for an agent.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::{AgentMessage, DaemonMessage, JobsReply, StatusReply};
use prost::bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::ledger::{Ledger, LedgerError};
use super::ledger_queue::{LedgerQueue, Turn};
use super::metrics::Metrics;
use crate::rendezvous::config::Config;
use crate::rendezvous::event::{About, At, CallId, ConnId, Effect, Event, KvError, Secret, Weight};
use crate::rendezvous::report::Census;
use crate::rendezvous::state::{State, apply};

/// What the gRPC side asks of the actor.
#[derive(Debug)]
pub(in crate::rendezvous) enum Request {
    /// A stream was opened; what is sent to it goes here.
    Opened(ConnId, mpsc::Sender<Arc<DaemonMessage>>),
    /// A message, the end of a stream, or of a call that nobody waits for any more.
    Event(Event),
    /// A message on this stream that says `Join`; answers whether the node was taken.
    Join(ConnId, Event, oneshot::Sender<bool>),
    /// A call on the store.
    Call(CallId, Event, Answer),
    /// What is known of this job.
    Status(String, oneshot::Sender<Option<StatusReply>>),
    Jobs(oneshot::Sender<JobsReply>),
    /// All jobs in numbers, with the generations of so many.
    Census(usize, oneshot::Sender<Census>),
    /// Ends this job for this reason; false if there is none.
    Close(String, String, oneshot::Sender<bool>),
    /// Answer when no agent is left.
    AllLeft(oneshot::Sender<()>),
}

/// Where the result of a call on the store goes.
pub(in crate::rendezvous) type Answer = oneshot::Sender<Result<Bytes, KvError>>;

/// Owner of the state of one daemon.
#[derive(Debug)]
pub(in crate::rendezvous) struct Actor {
    state: State,
    ledger: LedgerQueue,
    inbox: mpsc::Receiver<Request>,
    born: Instant,
    agents: HashMap<ConnId, Agent>,
    /// Calls on the store that have no answer yet.
    calls: HashMap<CallId, Answer>,
    all_left: Vec<oneshot::Sender<()>>,
    metrics: Arc<Metrics>,
    /// Notes carry job, generation and node apart from their words.
    log_fields: bool,
    /// How long messages may keep a timer waiting.
    tick_slack: Duration,
}

/// One agent's stream.
#[derive(Debug)]
struct Agent {
    queue: mpsc::Sender<Arc<DaemonMessage>>,
    heartbeat: Option<Instant>,
}

impl Actor {
    /// With the ledger, if there is one, it takes up what an earlier daemon has written into it.
    pub(in crate::rendezvous) fn new(
        config: Config,
        ledger: Option<Ledger>,
    ) -> (Self, mpsc::Sender<Request>) {
        let (outbox, inbox) = mpsc::channel(config.inbox);
        let records = ledger.as_ref().map_or_else(Vec::new, Ledger::records);
        let actor = Self {
            tick_slack: config.heartbeat_interval() / 2,
            state: State::recall(config, records, Duration::ZERO),
            ledger: LedgerQueue::start(ledger),
            inbox,
            born: Instant::now(),
            agents: HashMap::new(),
            calls: HashMap::new(),
            all_left: Vec::new(),
            metrics: Arc::new(Metrics::new()),
            log_fields: false,
        };
        (actor, outbox)
    }

    /// What it counts goes there, and its notes have fields if they are to.
    pub(super) fn observed_by(self, metrics: Arc<Metrics>, log_fields: bool) -> Self {
        Self {
            metrics,
            log_fields,
            ..self
        }
    }

    /// Runs until all senders are gone, or the ledger cannot be written.
    pub(in crate::rendezvous) async fn run(mut self) -> Result<(), LedgerError> {
        loop {
            if !self.all_left.is_empty() && self.state.is_idle() && self.ledger.is_idle() {
                for asker in self.all_left.drain(..) {
                    // It stops waiting at its own deadline.
                    let _ = asker.send(());
                }
            }
            let wake = self.state.next_wake().map(|wake| self.born + wake);
            // While no message is read, no lease ends: a late tick renews them.
            let reads = !self.ledger.is_behind();
            if reads && wake.is_some_and(|wake| wake + self.tick_slack <= Instant::now()) {
                // A flood of messages must not keep leases and deadlines alive.
                self.apply(Event::Tick);
                continue;
            }
            // Cancel safe: `recv` takes a message only when it returns it, and a deadline is computed anew.
            // Messages first: a heartbeat that waits to be read counts before the lease that it renews ends.
            tokio::select! {
                biased;
                written = self.ledger.written() => written?.into_iter().for_each(|turn| self.carry_out_turn(turn)),
                request = self.inbox.recv(), if reads => match request {
                    Some(request) => self.handle(request),
                    None => return Ok(()),
                },
                () = sleep_until(wake), if reads => self.apply(Event::Tick),
            }
        }
    }

    fn handle(&mut self, request: Request) {
        match request {
            Request::Opened(conn, queue) => {
                let heartbeat = None;
                self.agents.insert(conn, Agent { queue, heartbeat });
                self.metrics.set_streams(self.agents.len());
            }
            Request::Event(event) => {
                match &event {
                    Event::Closed { conn, .. } => self.drop_agent(*conn),
                    Event::Message { conn, message, .. } => self.note_heartbeat(*conn, message),
                    Event::KvCancel { call, .. } => drop(self.calls.remove(call)),
                    _ => {}
                }
                self.apply(event);
            }
            Request::Join(conn, event, answer) => {
                let effects = self.decide(event);
                // The daemon ends a stream that it refuses in the same turn.
                let is_refused =
                    |effect: &Effect| matches!(effect, Effect::Close { conn: closed } if *closed == conn);
                let is_taken = !effects.iter().any(is_refused);
                self.carry_out(effects, None);
                let _ = answer.send(is_taken);
            }
            Request::Call(call, event, answer) => {
                self.calls.insert(call, answer);
                self.apply(event);
            }
            Request::Status(job, answer) => {
                let now = self.born.elapsed();
                // A caller that went away needs no answer.
                let _ = answer.send(self.state.status(now, &job));
            }
            Request::Jobs(answer) => {
                let _ = answer.send(self.state.jobs(self.born.elapsed()));
            }
            Request::Census(generations, answer) => {
                let _ = answer.send(self.state.census(self.born.elapsed(), generations));
            }
            Request::Close(job, reason, answer) => {
                let is_there = self.state.has_job(&job);
                let effects = self.decide(Event::Close { job, reason });
                self.carry_out(effects, Some((answer, is_there)));
            }
            Request::AllLeft(left) => self.all_left.push(left),
        }
    }

    fn apply(&mut self, event: Event) {
        let effects = self.decide(event);
        self.carry_out(effects, None);
    }

    fn decide(&mut self, event: Event) -> Vec<Effect> {
        let at = At {
            now: self.now_for(&event),
            dice: rand::random(),
            id: rand::random(),
            secret: Secret::new(rand::random()),
        };
        apply(at, &mut self.state, event)
    }

    /// Carries out the effects of one event: at once, or when its records and those of all events before are on disk.
    fn carry_out(&mut self, effects: Vec<Effect>, closed: Option<(oneshot::Sender<bool>, bool)>) {
        let turn = Turn { effects, closed };
        if let Some(turn) = self.ledger.write(turn) {
            self.carry_out_turn(turn);
        }
    }

    fn carry_out_turn(&mut self, turn: Turn) {
        for effect in turn.effects {
            self.metrics.note(&effect);
            match effect {
                Effect::Record(_) | Effect::Observed(_) => {}
                Effect::Send { conn, message } => self.send(conn, message),
                Effect::Close { conn } => {
                    // Dropping the sender ends the stream after what is queued.
                    self.drop_agent(conn);
                }
                Effect::Answer { call, result } => {
                    if let Some(answer) = self.calls.remove(&call) {
                        // A caller that went away needs no answer.
                        let _ = answer.send(result);
                    }
                }
                Effect::Note { weight, words, about } => self.say(weight, &words, &about),
            }
        }
        if let Some((answer, is_there)) = turn.closed {
            let _ = answer.send(is_there);
        }
    }

    fn say(&self, weight: Weight, words: &str, about: &About) {
        let About {
            job,
            generation,
            node,
        } = about;
        // Peers' words must not begin a line of the log.
        let words = words.replace('\n', "\n  ");
        match weight {
            Weight::Decision if self.log_fields => tracing::info!(job, generation, node, "{words}"),
            Weight::Detail if self.log_fields => tracing::debug!(job, generation, node, "{words}"),
            Weight::Decision => tracing::info!("{words}"),
            Weight::Detail => tracing::debug!("{words}"),
        }
    }

    fn note_heartbeat(&mut self, conn: ConnId, message: &AgentMessage) {
        if let Some(Body::Heartbeat(_)) = message.body
            && let Some(agent) = self.agents.get_mut(&conn)
        {
            let now = Instant::now();
            if let Some(last) = agent.heartbeat.replace(now) {
                self.metrics.heartbeat(now - last);
            }
        }
    }

    fn drop_agent(&mut self, conn: ConnId) {
        self.agents.remove(&conn);
        self.metrics.set_streams(self.agents.len());
    }

    /// The timer's precision is a millisecond: a deadline that it was set for has come when it fires.
    fn now_for(&self, event: &Event) -> Duration {
        let now = self.born.elapsed();
        let wake = matches!(event, Event::Tick)
            .then(|| self.state.next_wake())
            .flatten();
        wake.map_or(now, |wake| now.max(wake))
    }

    fn send(&mut self, conn: ConnId, message: Arc<DaemonMessage>) {
        let Some(agent) = self.agents.get(&conn) else {
            return;
        };
        if let Err(mpsc::error::TrySendError::Full(_)) = agent.queue.try_send(message) {
            // It has not read for a long time; its stream ends, and it may come back with a new one.
            tracing::warn!(
                "agent on stream {} does not read its messages; disconnected",
                conn.0
            );
            self.drop_agent(conn);
        }
    }
}

/// Never ends without a time.
pub(super) async fn sleep_until(wake: Option<Instant>) {
    match wake {
        Some(wake) => tokio::time::sleep_until(wake).await,
        None => std::future::pending().await,
    }
}
