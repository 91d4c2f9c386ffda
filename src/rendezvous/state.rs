//! All jobs of one daemon, and [`apply`]: the one place through which anything changes.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::Duration;

use ddp_proto::printable::{self, Clean as _};
use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::{
    AgentMessage, JobSummary, JobsReply, KvGatherRequest, KvGetRequest, KvPutRequest, NodesRequest,
    StatusReply, refused::Code,
};
use prost::bytes::Bytes;

use super::config::{Callers, Config};
use super::event::{About, At, CallId, ConnId, Effect, Event, KvError, Peer, Speech, Turn, refusal};
use super::isolation::Isolation;
use super::job::{Finished, Job, Joining, Record};
use super::kv::clip;
use super::nodes::deadlines::Deadlines;
use super::store_totals::{Answers, Load, StoreTotals};

/// Jobs that a list holds.
const MAX_LISTED_JOBS: usize = 4096;
/// Finished jobs whose verdict is remembered for agents that missed it.
const MAX_FINISHED: usize = 256;

/// Everything the daemon knows.
#[derive(Debug)]
pub struct State {
    config: Config,
    daemon: Daemon,
    answers: Answers,
}

/// The same without the settings, which a [`Turn`] borrows.
#[derive(Debug, Default)]
pub(super) struct Daemon {
    pub(super) jobs: BTreeMap<String, Job>,
    /// When each job has something to do next.
    wakes: Deadlines,
    /// Who speaks on a stream, once it has joined.
    speakers: HashMap<ConnId, Speaker>,
    /// Streams that the daemon has ended, while messages may still come in from them.
    ended: HashSet<ConnId>,
    /// Jobs without nodes, newest last.
    finished: VecDeque<Finished>,
    /// No less than the stores of all jobs take.
    store_totals: StoreTotals,
    pub(super) isolation: Isolation,
}

/// All jobs of a daemon in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Nodes are to come before the next generation.
    pub gathering: u64,
    /// An earlier daemon's generation runs, whose nodes have not all come back.
    pub recovering: u64,
    /// A generation runs.
    pub running: u64,
    /// The job is over, and some nodes have not left.
    pub over: u64,
    /// Nodes that are there.
    pub nodes: u64,
    /// Those of them that are connected.
    pub connected: u64,
    /// Ranks of running generations.
    pub ranks: u64,
    /// Bytes in the key-value stores.
    pub kv_bytes: u64,
    /// For how long the quietest node has said nothing.
    pub longest_silence: Duration,
    /// For how long the nodes of a job have been waited for, of the job that waits longest.
    pub longest_gathering: Duration,
    /// The daemon's own network may be down.
    pub suspects_network: bool,
    /// Generations of the first jobs that run one, as many as were asked for.
    pub generations: Vec<(String, u64)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Speaker {
    job: String,
    incarnation: String,
}

impl State {
    /// A daemon that knows no job.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            daemon: Daemon::default(),
            answers: Answers::default(),
        }
    }

    /// A daemon that starts with what its ledger has of each job, oldest first.
    pub fn recall(config: Config, records: Vec<Record>, now: Duration) -> Self {
        let mut daemon = Daemon::default();
        for record in records {
            if record.is_final() {
                daemon.finished.push_back(Finished::recalled(record));
            } else {
                let id = record.job().to_owned();
                daemon.jobs.insert(id.clone(), Job::recall(&config, record, now));
                daemon.replan(&id);
            }
        }
        let answers = Answers::default();
        Self {
            config,
            daemon,
            answers,
        }
    }

    /// When [`Event::Tick`] is due; earlier is harmless.
    pub fn next_wake(&self) -> Option<Duration> {
        self.daemon.next_wake()
    }

    /// What people and tools may know of a job.
    pub fn status(&self, now: Duration, job_id: &str) -> Option<StatusReply> {
        self.daemon.jobs.get(job_id).map(|job| job.status(now))
    }

    /// All jobs.
    pub fn jobs(&self, now: Duration) -> JobsReply {
        let jobs = &self.daemon.jobs;
        let listed: Vec<JobSummary> = jobs
            .values()
            .take(MAX_LISTED_JOBS)
            .map(|job| job.summary(now))
            .collect();
        JobsReply {
            more_jobs: (jobs.len() - listed.len()) as u32,
            jobs: listed,
        }
    }

    /// The same in numbers, with the generations of so many jobs that run.
    pub fn census(&self, now: Duration, generations: usize) -> Census {
        let mut census = Census {
            suspects_network: self.daemon.suspects_network(now, &self.config),
            ..Census::default()
        };
        for (id, job) in &self.daemon.jobs {
            job.count(now, &mut census);
            if let Some(generation) = job.running_generation()
                && census.generations.len() < generations
            {
                census.generations.push((id.clone(), generation));
            }
        }
        census
    }

    /// The daemon has this job, and it is not over.
    pub fn has_job(&self, job_id: &str) -> bool {
        self.daemon.jobs.get(job_id).is_some_and(|job| !job.is_over())
    }

    /// The list of all nodes of a generation that runs, encoded, for one of them.
    pub fn nodes(&self, request: &NodesRequest) -> Result<Bytes, KvError> {
        let job = self.daemon.jobs.get(&request.job_id);
        let job = job.filter(|job| job.has(&request.incarnation));
        job.ok_or_else(|| unknown(&request.job_id))?.node_list(request)
    }

    /// True if no agent is at this daemon, connected or expected back.
    pub fn is_idle(&self) -> bool {
        self.daemon.is_idle()
    }

    /// How long nodes are expected back that fell silent: a launcher that was suspended comes for the verdict on its
    /// job. None if there are none; it may be in the past.
    pub fn expects_until(&self) -> Option<Duration> {
        let jobs = self.daemon.jobs.values().map(Job::silent);
        let all = jobs.chain(self.daemon.finished.iter().map(Finished::silent));
        all.flat_map(BTreeMap::values).max().copied()
    }
}

/// Decides what an event means: a pure function of the time, the dice, the state and the event.
pub fn apply(at: At, state: &mut State, event: Event) -> Vec<Effect> {
    let State {
        config,
        daemon,
        answers,
    } = state;
    let mut turn = Turn {
        at,
        config,
        effects: Vec::new(),
        about: About::default(),
        answers: std::mem::take(answers),
    };
    let has_joined = matches!(&event, Event::Closed { conn, .. } if daemon.speakers.contains_key(conn));
    if event.is_contact(daemon.isolation.silence(at.now), &turn, has_joined) {
        daemon.note_contact(&mut turn);
    }
    match event {
        Event::Message { conn, .. } if daemon.ended.contains(&conn) => {
            turn.detail("ignored a message on an ended stream");
        }
        Event::Message { conn, peer, message } => daemon.message(&mut turn, conn, peer, *message),
        Event::Closed { conn, clean } => daemon.closed(&mut turn, conn, clean),
        Event::KvPut { call, request } => daemon.kv_put(&mut turn, call, request),
        Event::KvGet { call, request } => daemon.kv_get(&mut turn, call, request),
        Event::KvCancel { call, job } => {
            if let Some(job) = daemon.jobs.get_mut(&job) {
                job.cancel(call);
            }
        }
        Event::Close { job, reason } => daemon.close(&mut turn, &job, &reason),
        Event::KvGather { call, request } => daemon.kv_gather(&mut turn, call, request),
        Event::Tick => daemon.tick(&mut turn),
    }
    for effect in &turn.effects {
        if let Effect::Close { conn } = effect {
            daemon.ended.insert(*conn);
        }
    }
    *answers = turn.answers;
    turn.effects
}

impl Daemon {
    /// No job has nodes.
    pub(super) fn is_idle(&self) -> bool {
        self.jobs.values().all(Job::is_idle)
    }

    fn next_wake(&self) -> Option<Duration> {
        self.wakes.next()
    }

    /// The job may have something to do earlier than before.
    fn replan(&mut self, job_id: &str) {
        let wake = self.jobs.get(job_id).and_then(Job::next_wake);
        self.wakes.note(job_id, wake);
    }

    /// The same of all jobs.
    pub(super) fn replan_all(&mut self) {
        for (id, job) in &self.jobs {
            self.wakes.note(id, job.next_wake());
        }
    }

    fn message(&mut self, turn: &mut Turn<'_>, conn: ConnId, peer: Peer, mut message: AgentMessage) {
        message.clean();
        let AgentMessage {
            job_id,
            incarnation,
            generation,
            assignment_id,
            body,
        } = message;
        // A later build may send what this one does not know.
        let Some(body) = body else { return };
        let speaker = Speaker {
            job: job_id,
            incarnation,
        };
        if let Err((code, reason)) = self.identify(turn, conn, &speaker, &body) {
            return refuse(turn, conn, code, reason);
        }
        let job_id = speaker.job;
        self.speak_of(turn, &job_id, &speaker.incarnation, &body);
        let from = Speech {
            incarnation: speaker.incarnation,
            generation,
            assignment_id,
        };
        if let Body::Join(join) = body {
            let joining = Joining {
                conn,
                peer,
                from,
                join,
            };
            self.join(turn, &job_id, joining);
        } else if let Some(job) = self.jobs.get_mut(&job_id) {
            job.receive(turn, conn, &from, body);
        }
        self.forget(turn, &job_id);
    }

    /// A stream begins with `Join`, and speaks for one node from then on.
    fn identify(
        &mut self,
        turn: &Turn<'_>,
        conn: ConnId,
        speaker: &Speaker,
        body: &Body,
    ) -> Result<(), (Code, String)> {
        let invalid = |reason: &str| Err((Code::Invalid, reason.to_owned()));
        match self.speakers.get(&conn) {
            Some(known) if known == speaker => Ok(()),
            Some(_) => invalid("a stream belongs to one node of one job"),
            None if matches!(body, Body::Join(_)) => {
                self.admit_speaker(turn, speaker)?;
                self.speakers.insert(conn, speaker.clone());
                Ok(())
            }
            None => invalid("the first message of a stream must be `Join`"),
        }
    }

    fn admit_speaker(&self, turn: &Turn<'_>, speaker: &Speaker) -> Result<(), (Code, String)> {
        let max = turn.config.max_name_bytes;
        if speaker.job.is_empty() || speaker.job.len() > max || speaker.incarnation.is_empty() {
            let reason = format!("a job name has 1 to {max} bytes, and each agent needs its own name");
            return Err((Code::Invalid, reason));
        }
        if let Some(reason) = turn.config.refuses(&speaker.job) {
            let hint =
                "give all nodes of a job the same `--rdzv-id`, and other jobs a different `--rdzv-endpoint`";
            let reason = match turn.config.callers {
                Callers::Authenticated => format!("the rendezvous at this address {reason}"),
                _ => format!(
                    "the rendezvous at this address does not serve job `{}`",
                    clip(&speaker.job, 128)
                ),
            };
            return Err((Code::Disagree, format!("{reason}\n  hint: {hint}")));
        }
        let is_new = !self.jobs.contains_key(&speaker.job);
        if is_new && self.jobs.len() >= turn.config.max_jobs {
            let count = self.jobs.len();
            let reason = format!("this daemon already has {count} jobs, the maximum");
            return Err((Code::Invalid, reason));
        }
        Ok(())
    }

    fn join(&mut self, turn: &mut Turn<'_>, job_id: &str, joining: Joining) {
        let mut finished = self.finished.iter_mut().rev();
        let missed = finished.find(|f| f.is_of(job_id) && f.concerns(&joining));
        if missed.is_some_and(|missed| missed.tell(turn, &joining)) {
            return;
        }
        let job = self.jobs.get_mut(job_id);
        if job.is_some_and(|job| job.is_cleared_for(turn, &joining)) {
            // Its verdict is kept for those that were away when it was told.
            self.forget(turn, job_id);
        }
        // Another run of this name continues to count generations: what is left of the old run stays fenced off.
        let earlier = self.finished.iter().filter(|f| f.is_of(job_id));
        let earlier = earlier.map(Finished::generation).max();
        let new = || Job::new(job_id, earlier.unwrap_or(0), turn.at.now);
        let job = self.jobs.entry(job_id.to_owned()).or_insert_with(new);
        job.join(turn, joining);
    }

    fn closed(&mut self, turn: &mut Turn<'_>, conn: ConnId, clean: bool) {
        self.ended.remove(&conn);
        if let Some(speaker) = self.speakers.remove(&conn)
            && let Some(job) = self.jobs.get_mut(&speaker.job)
        {
            turn.about = job.about(&speaker.incarnation);
            job.closed(turn, &speaker.incarnation, conn, clean);
            self.forget(turn, &speaker.job);
        }
    }

    fn tick(&mut self, turn: &mut Turn<'_>) {
        let now = turn.at.now;
        // A timer that is very late means that the daemon itself was stalled (a stopped process, a paused
        // machine): heartbeats may wait unread.
        if let Some(late) = self.next_wake().and_then(|due| now.checked_sub(due))
            && late > turn.config.heartbeat_interval()
        {
            turn.decided(format!(
                "the daemon was stalled for {:.1} s; all leases are renewed",
                late.as_secs_f64()
            ));
            self.renew_leases(now + turn.config.lease);
        } else {
            self.consider_isolation(turn);
        }
        let Self { jobs, wakes, .. } = self;
        let due = wakes.expired(now, Duration::ZERO, |id| jobs.get(id).and_then(Job::next_wake));
        for id in due {
            if let Some(job) = self.jobs.get_mut(&id) {
                turn.about = job.about("");
                job.tick(turn);
                self.forget(turn, &id);
            }
        }
    }

    /// The notes of this turn speak of this job, and of the node that has sent the message.
    fn speak_of(&self, turn: &mut Turn<'_>, job_id: &str, incarnation: &str, body: &Body) {
        turn.about = match self.jobs.get(job_id) {
            Some(job) => job.about(incarnation),
            None => About {
                job: job_id.to_owned(),
                ..About::default()
            },
        };
        if let Body::Join(join) = body {
            clip(&join.hostname, turn.config.max_name_bytes).clone_into(&mut turn.about.node);
        }
    }

    fn close(&mut self, turn: &mut Turn<'_>, job_id: &str, reason: &str) {
        if let Some(job) = self.jobs.get_mut(job_id) {
            turn.about = job.about("");
            job.close(turn, &printable::text(reason));
            self.forget(turn, job_id);
        }
    }

    /// Drops a job that no node needs; its verdict is kept for agents that missed it.
    fn forget(&mut self, turn: &mut Turn<'_>, job_id: &str) {
        let job = self.jobs.get(job_id);
        if !job.is_some_and(|job| job.is_forgotten(turn.at.now)) {
            return self.replan(job_id);
        }
        let finished = self.jobs.remove(job_id).and_then(|job| job.finish(turn));
        self.replan(job_id);
        if let Some(finished) = finished {
            if self.finished.len() >= MAX_FINISHED {
                self.finished.pop_front();
            }
            self.finished.push_back(finished);
        }
    }

    fn kv_put(&mut self, turn: &mut Turn<'_>, call: CallId, request: KvPutRequest) {
        let result = self.put(turn, request).map(|()| Bytes::new());
        turn.effects.push(Effect::Answer { call, result });
    }

    fn put(&mut self, turn: &mut Turn<'_>, request: KvPutRequest) -> Result<(), KvError> {
        let more = Load {
            entries: 1,
            bytes: request.key.len() + request.value.len(),
            waiters: 0,
        };
        // A caller that is no node of the job learns nothing of the room either.
        self.job(&request.job_id, &request.incarnation)?;
        self.check_room(turn.config, more)?;
        self.job(&request.job_id, &request.incarnation)?
            .put(turn, request)?;
        // A key that was there before is counted twice, until the next count.
        self.store_totals.add(more);
        Ok(())
    }

    /// Checks the bounds of all stores together. Where they seem to be reached, it counts anew, without the stores that
    /// have ended and the reads that were answered.
    fn check_room(&mut self, config: &Config, more: Load) -> Result<(), KvError> {
        if self.store_totals.check(&config.kv, more).is_ok() {
            return Ok(());
        }
        self.store_totals = StoreTotals::default();
        for job in self.jobs.values() {
            self.store_totals.add(job.load());
        }
        self.store_totals.check(&config.kv, more)
    }

    fn kv_get(&mut self, turn: &mut Turn<'_>, call: CallId, request: KvGetRequest) {
        let (job_id, caller) = (request.job_id.clone(), request.incarnation.clone());
        self.read(turn, call, (&job_id, &caller), |job, turn| {
            job.get(turn, call, request)
        });
    }

    fn kv_gather(&mut self, turn: &mut Turn<'_>, call: CallId, request: KvGatherRequest) {
        let (job_id, caller) = (request.job_id.clone(), request.incarnation.clone());
        self.read(turn, call, (&job_id, &caller), |job, turn| {
            job.gather(turn, call, request)
        });
    }

    fn read(
        &mut self,
        turn: &mut Turn<'_>,
        call: CallId,
        of: (&str, &str),
        begin: impl FnOnce(&mut Job, &mut Turn<'_>) -> Result<(), KvError>,
    ) {
        if let Err(error) = self.try_read(turn, call, of, begin) {
            let result = Err(error);
            turn.effects.push(Effect::Answer { call, result });
        }
        self.replan(of.0);
    }

    /// Begins a read. One that has to wait is given up again if too many do.
    fn try_read(
        &mut self,
        turn: &mut Turn<'_>,
        call: CallId,
        (job_id, caller): (&str, &str),
        begin: impl FnOnce(&mut Job, &mut Turn<'_>) -> Result<(), KvError>,
    ) -> Result<(), KvError> {
        self.job(job_id, caller)?;
        let room = self.check_room(turn.config, Load::READ);
        let job = self.job(job_id, caller)?;
        let before = job.load().waiters;
        begin(job, turn)?;
        if job.load().waiters > before {
            if let Err(full) = room {
                job.cancel(call);
                return Err(full);
            }
            self.store_totals.add(Load::READ);
        }
        Ok(())
    }

    /// The job, for one of its nodes. Others learn nothing of it.
    fn job(&mut self, job_id: &str, incarnation: &str) -> Result<&mut Job, KvError> {
        let Self { jobs, finished, .. } = self;
        let is_over = || finished.iter().any(|f| f.is_of(job_id) && f.has(incarnation));
        match jobs.get_mut(job_id).filter(|job| job.has(incarnation)) {
            Some(job) => Ok(job),
            None if is_over() => Err(KvError::Superseded("the job has ended".into())),
            None => Err(unknown(job_id)),
        }
    }
}

/// What all callers are told that are no nodes of the job, whether there is one or not.
fn unknown(job_id: &str) -> KvError {
    KvError::Unknown(format!(
        "this daemon has no job `{}` with this node",
        clip(job_id, 128)
    ))
}

fn refuse(turn: &mut Turn<'_>, conn: ConnId, code: Code, reason: String) {
    turn.decided(format!("refused a stream: {reason}"));
    turn.send(Some(conn), 0, refusal(code, reason));
    turn.close(Some(conn));
}
