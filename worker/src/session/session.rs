//! The session of a worker in its job.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use ddp_proto::control::{Phase, Progress, Sizes, ToAgent};
use ddp_proto::env::WorkerEnv;
use ddp_proto::trust::data_key::DataKey;
use ddp_proto::utc;

use super::link::{Link, SessionError, TIMES, Times};
use super::{Cancel, KeyValue, MemoryStore, StopRequest};

/// How long [`Session::fail`] waits until the words are written.
const FAIL_TIMEOUT: Duration = Duration::from_secs(1);
/// How long [`Session::verdict`] waits for the agent's message.
const VERDICT_TIMEOUT: Duration = Duration::from_secs(1);
/// The same of a worker that can go on if another one has failed, and restarts if none has.
const PARKING_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest failure message that is sent.
const MAX_FAILURE_BYTES: usize = 8 << 10;

/// A worker's link to its job, for one generation: in the next one it has another. The environment gives the initial
/// values; the assignment that the agent sends over the control socket is the truth. Clones are the same link.
#[derive(Clone)]
pub struct Session {
    env: WorkerEnv,
    node_addr: String,
    data_key: Option<DataKey>,
    store: Arc<dyn KeyValue>,
    cancel: Cancel,
    stop: StopRequest,
    link: Option<Arc<Link>>,
    /// This process can go on in the next generation.
    outlives: Arc<AtomicBool>,
}

impl Session {
    /// Takes the place that the process's environment describes.
    ///
    /// Without `RANK`, `WORLD_SIZE` and `DDP_CONTROL` the worker is alone: a world of one.
    pub fn from_env() -> Result<Self, SessionError> {
        Self::from_vars(|name| std::env::var(name).ok())
    }

    /// As [`Session::from_env`], from any source of variables.
    pub fn from_vars(get: impl Fn(&str) -> Option<String>) -> Result<Self, SessionError> {
        Self::from_vars_within(get, TIMES)
    }

    pub(super) fn from_vars_within(
        get: impl Fn(&str) -> Option<String>,
        times: Times,
    ) -> Result<Self, SessionError> {
        let started = ["RANK", "WORLD_SIZE", ddp_proto::env::DDP_CONTROL];
        if started.iter().all(|name| get(name).is_none()) {
            // A session that is started twice means two runs.
            let env = WorkerEnv {
                run_id: utc::unique_id(SystemTime::now()),
                ..WorkerEnv::single()
            };
            return Ok(Self::in_process(env, Arc::new(MemoryStore::default())));
        }
        let env = WorkerEnv::parse(get)?;
        let ranks = env.world_size.get();
        match env.control.clone() {
            Some(address) => Self::connect(env, &address, times, Arc::default()),
            None if ranks == 1 => Ok(Self::in_process(env, Arc::new(MemoryStore::default()))),
            None => Err(SessionError::Refused(format!(
                "`WORLD_SIZE` is {ranks}, but `DDP_CONTROL` is not set: the ranks cannot find each other\n  hint: start the program with `ddp-run --nproc-per-node {ranks}`; other launchers have no control socket"
            ))),
        }
    }

    /// A place without an agent, with the given store: for programs and tests whose ranks are threads. If the ranks are
    /// on several nodes, it needs [`Session::with_data_key`].
    pub fn in_process(env: WorkerEnv, store: Arc<dyn KeyValue>) -> Self {
        Self {
            node_addr: env.master_addr.clone(),
            env,
            data_key: None,
            store,
            cancel: Cancel::new(),
            stop: StopRequest::default(),
            link: None,
            outlives: Arc::default(),
        }
    }

    /// With a key for the connections between nodes, which an agent would have sent. All ranks must have the same.
    #[must_use]
    pub fn with_data_key(mut self, key: DataKey) -> Self {
        self.data_key = Some(key);
        self
    }

    /// Leaves the generation, which is over, and waits for this worker's place in the next one. Fails if none follows, and
    /// without an agent.
    pub fn park(&self) -> Result<Self, SessionError> {
        let (Some(link), Some(address)) = (&self.link, &self.env.control) else {
            return Err(SessionError::Lost("no agent has another place".into()));
        };
        link.shutdown();
        Self::connect(self.env.clone(), address, TIMES, self.outlives.clone())
    }

    /// True if this process can go on in the next generation ([`Session::park`]).
    pub fn outlives(&self) -> bool {
        self.outlives.load(Ordering::Relaxed)
    }

    /// From now on it can, or cannot.
    pub fn set_outlives(&self, outlives: bool) {
        self.outlives.store(outlives, Ordering::Relaxed);
    }

    /// `outlives` is set where the worker comes from another generation.
    fn connect(
        initial: WorkerEnv,
        address: &str,
        times: Times,
        outlives: Arc<AtomicBool>,
    ) -> Result<Self, SessionError> {
        let is_parked = outlives.load(Ordering::Relaxed);
        let (link, assigned) = Link::connect(address, &initial, times, is_parked)?;
        let mut env = WorkerEnv::parse(|name| assigned.env.get(name).cloned())
            .map_err(|e| SessionError::Refused(format!("the agent's assignment cannot be used: {e}")))?;
        env.generation = assigned.generation;
        env.control = Some(address.to_owned());
        env.error_file = env.error_file.or(initial.error_file);
        Ok(Self {
            env,
            node_addr: assigned.node_addr,
            data_key: assigned.data_key,
            store: link.shared.store.clone(),
            cancel: link.shared.cancel.clone(),
            stop: link.shared.stop.clone(),
            link: Some(Arc::new(link)),
            outlives,
        })
    }

    /// The worker's place.
    pub fn env(&self) -> &WorkerEnv {
        &self.env
    }

    /// Address under which other nodes reach this one.
    pub fn node_addr(&self) -> &str {
        &self.node_addr
    }

    /// The secret with which ranks on several nodes prove that they belong to this generation. `None` without
    /// an agent, unless [`Session::with_data_key`] gave one.
    pub fn data_key(&self) -> Option<&DataKey> {
        self.data_key.as_ref()
    }

    /// The key-value store of this generation.
    pub fn store(&self) -> Arc<dyn KeyValue> {
        Arc::clone(&self.store)
    }

    /// Set when the generation is over, or when the agent is gone.
    pub fn cancel(&self) -> Cancel {
        self.cancel.clone()
    }

    /// The cause, once the agent, or code in this process, asked to stop at the next step boundary.
    pub fn stop_requested(&self) -> Option<String> {
        self.stop.cause()
    }

    /// Whether another generation follows the stop that some rank was asked for, in which this process can go on.
    pub fn stays(&self) -> bool {
        self.outlives() && self.stop.stays(PARKING_TIMEOUT)
    }

    /// Lets a program without an agent ask for a stop.
    pub fn stop_request(&self) -> StopRequest {
        self.stop.clone()
    }

    /// Tells the agent how far this worker is: `step` steps are finished. Never blocks; a newer heartbeat
    /// replaces one that is not yet written, and the last one is repeated automatically.
    pub fn heartbeat(&self, step: u64, phase: Phase, progress: Option<Progress>) {
        if let Some(link) = &self.link {
            link.shared.outbox.beat(step, phase, progress.filter(is_finite));
        }
    }

    /// This worker waited for other ranks in a step; its next heartbeat says how long it did in all.
    pub fn add_wait(&self, waited: Duration) {
        if let Some(link) = &self.link {
            link.shared.outbox.add_wait(waited);
        }
    }

    /// Repeats the last heartbeat as a new one, since this worker has got on: for phases without steps.
    pub fn still_alive(&self) {
        if let Some(link) = &self.link {
            link.shared.outbox.beat_again();
        }
    }

    /// Tells the agent where in a step this worker is, in the words that `activity` makes: its next heartbeats say so until
    /// the phase changes. Counts as progress, and never blocks.
    pub fn set_activity(&self, activity: impl FnOnce() -> String) {
        if let Some(link) = &self.link {
            link.shared.outbox.set_activity(activity());
        }
    }

    /// What was said last of where this worker is, if it was said in this phase.
    pub fn activity(&self) -> Option<String> {
        let activity = self.link.as_ref()?.shared.outbox.activity();
        (!activity.is_empty()).then_some(activity)
    }

    /// Tells the agent with which numbers of ranks another generation can go on with this work. Said by one rank, once.
    pub fn limit_sizes(&self, sizes: Sizes) {
        if let Some(link) = &self.link {
            // Refused where the connection is gone, and with it this generation; or behind as many lines as may wait.
            let _ = link.shared.outbox.push(&ToAgent::Sizes(sizes));
        }
    }

    /// Why the generation is over, in the agent's words. For a worker that has lost another rank: the agents find out
    /// within moments what became of that one, so their word is waited for: a second, or five if this process can go on.
    pub fn verdict(&self) -> Option<String> {
        if self.link.is_some() {
            let (set, is_set) = std::sync::mpsc::channel();
            self.cancel.on_cancel(move || {
                // The caller may have stopped waiting.
                let _ = set.send(());
            });
            // No word in time is an answer too.
            let patience = if self.outlives() {
                PARKING_TIMEOUT
            } else {
                VERDICT_TIMEOUT
            };
            let _ = is_set.recv_timeout(patience);
        }
        self.cancel.cause().map(str::to_owned)
    }

    /// Tells the agent at once that the process of another rank ended, or that the data connection to it broke: a node that
    /// is lost is believed lost sooner.
    pub fn report_peer_lost(&self, rank: usize) {
        self.say_before_exit(&ToAgent::PeerLost { rank: rank as u32 });
    }

    /// Tells the agent, in the worker's own words, why the worker is about to exit. Returns when it is
    /// written, or after a second. `consequence` says that the worker fails only because another rank did: the agent looks
    /// for that rank before it names this one.
    pub fn fail(&self, message: &str, hint: Option<&str>, consequence: bool) {
        self.say_before_exit(&ToAgent::Failure {
            message: one_line(message),
            hint: hint.map(one_line),
            consequence,
        });
    }

    fn say_before_exit(&self, message: &ToAgent) {
        if let Some(link) = &self.link
            && link.shared.outbox.push(message).is_ok()
        {
            link.shared.outbox.flush(Instant::now() + FAIL_TIMEOUT);
        }
    }

    /// Leaves the job: writes what is queued, within a bound, and closes the control socket.
    pub fn shutdown(self) {
        if let Some(link) = &self.link {
            link.shutdown();
        }
    }
}

/// JSON has no NaN and no infinity; such a heartbeat goes without its numbers.
fn is_finite(progress: &Progress) -> bool {
    [progress.loss, progress.tokens_per_s, progress.seconds_left]
        .into_iter()
        .chain(progress.val_loss)
        .all(f64::is_finite)
}

fn one_line(text: &str) -> String {
    let mut line = text.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    line.truncate(line.floor_char_boundary(MAX_FAILURE_BYTES));
    line
}
