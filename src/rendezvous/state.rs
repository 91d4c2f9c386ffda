//! All jobs of one daemon, and [`apply`]: the one place through which anything changes.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::Duration;

use ddp_proto::printable;
use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{
    AgentMessage, JobSummary, JobsReply, KvPutRequest, Refused, StatusReply, refused::Code,
};
use prost::bytes::Bytes;

use super::config::{Callers, Config};
use super::context::ApplyContext;
use super::event::{About, At, CallId, ConnId, Effect, Event, KvError, Origin, Peer, Record, refusal};
use super::job::{Finished, Job, Joining};
use super::kv::Read;
use super::messages::clip;
use super::nodes::deadlines::Deadlines;
use super::partition::PartitionSuspicion;
use super::report::Census;
use super::store_totals::{Answers, Load, StoreTotals};

/// Jobs that a list holds.
const MAX_LISTED_JOBS: usize = 4096;
/// Finished jobs whose verdict is remembered for agents that missed it.
const MAX_FINISHED: usize = 256;
/// Shortest time between two decisions in the log that refuse a stream; those between are details.
const REFUSAL_INTERVAL: Duration = Duration::from_secs(10);

/// Everything the daemon knows.
#[derive(Debug)]
pub struct State {
    config: Config,
    daemon: Daemon,
    answers: Answers,
}

/// All jobs, without the settings, which a [`ApplyContext`] borrows.
#[derive(Debug, Default)]
struct Daemon {
    jobs: BTreeMap<String, Job>,
    /// When each job has something to do next.
    wakes: Deadlines,
    /// The node of each stream, once it has joined.
    speakers: HashMap<ConnId, Speaker>,
    /// Streams that the daemon has ended, and whose last messages may still arrive.
    ended: HashSet<ConnId>,
    /// Jobs without nodes, newest last.
    finished: VecDeque<Finished>,
    /// No less than the stores of all jobs take.
    store_totals: StoreTotals,
    partition: PartitionSuspicion,
    /// When the log showed last that a stream was refused.
    refusal_shown: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Speaker {
    job: String,
    incarnation: String,
}

impl State {
    /// A daemon without jobs.
    pub fn new(config: Config) -> Self {
        Self::recall(config, Vec::new(), Duration::ZERO)
    }

    /// A daemon that starts with the records of its ledger, oldest first.
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
        Self {
            config,
            daemon,
            answers: Answers::default(),
        }
    }

    /// When [`Event::Tick`] is due; earlier is harmless.
    pub fn next_wake(&self) -> Option<Duration> {
        self.daemon.wakes.next()
    }

    /// The status of a job.
    pub fn status(&self, now: Duration, job_id: &str) -> Option<StatusReply> {
        self.daemon.jobs.get(job_id).map(|job| job.status(now))
    }

    /// All jobs.
    pub fn jobs(&self, now: Duration) -> JobsReply {
        let Daemon { jobs, finished, .. } = &self.daemon;
        let listed: Vec<JobSummary> = jobs
            .values()
            .take(MAX_LISTED_JOBS)
            .map(|job| job.summary(now))
            .collect();
        JobsReply {
            more_jobs: (jobs.len() - listed.len()) as u32,
            jobs: listed,
            ended: finished.iter().rev().filter_map(|f| f.summary(now)).collect(),
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

    #[cfg(test)]
    pub(super) fn assert_counts(&self) {
        self.daemon.jobs.values().for_each(Job::assert_counts);
    }

    /// True if no agent is at this daemon, connected or expected back.
    pub fn is_idle(&self) -> bool {
        self.daemon.is_idle()
    }
}

/// Decides what an event means: a pure function of the time, the dice, the state and the event.
pub fn apply(at: At, state: &mut State, event: Event) -> Vec<Effect> {
    let State {
        config,
        daemon,
        answers,
    } = state;
    let mut context = ApplyContext {
        at,
        config,
        effects: Vec::new(),
        about: About::default(),
        answers: std::mem::take(answers),
    };
    let has_joined = matches!(&event, Event::Closed { conn, .. } if daemon.speakers.contains_key(conn));
    if daemon
        .partition
        .ends_with(&event, at.now, context.config, has_joined)
    {
        daemon.note_contact(&mut context);
    }
    match event {
        Event::Message { conn, .. } if daemon.ended.contains(&conn) => {
            context.detail("ignored a message on an ended stream");
        }
        Event::Message { conn, peer, message } => daemon.message(&mut context, conn, peer, *message),
        Event::Closed { conn, clean } => daemon.closed(&mut context, conn, clean),
        Event::KvPut { call, request } => daemon.kv_put(&mut context, call, request),
        Event::KvGet { call, request } => daemon.kv_read(&mut context, call, request.into()),
        Event::KvCancel { call, job } => {
            if let Some(job) = daemon.jobs.get_mut(&job) {
                job.cancel(call);
            }
        }
        Event::Close { job, reason } => daemon.close(&mut context, &job, &reason),
        Event::KvGather { call, request } => daemon.kv_read(&mut context, call, request.into()),
        Event::Tick => daemon.tick(&mut context),
    }
    for effect in &context.effects {
        if let Effect::Close { conn } = effect {
            daemon.ended.insert(*conn);
        }
    }
    *answers = context.answers;
    context.effects
}

impl Daemon {
    /// No job has nodes.
    fn is_idle(&self) -> bool {
        self.jobs.values().all(Job::is_idle)
    }

    /// Updates the deadline of a job after a change.
    fn replan(&mut self, job_id: &str) {
        let wake = self.jobs.get(job_id).and_then(Job::next_wake);
        self.wakes.note(job_id, wake);
    }

    fn message(&mut self, context: &mut ApplyContext<'_>, conn: ConnId, peer: Peer, message: AgentMessage) {
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
        if matches!(&body, Body::Leave(leave) if leave.launcher_died) && !self.speakers.contains_key(&conn) {
            if let Some(job) = self.jobs.get_mut(&speaker.job) {
                job.launcher_died(context, &speaker.incarnation);
            }
            self.forget(context, &speaker.job);
            return context.close(Some(conn));
        }
        if let Err(refused) = self.identify(context, conn, &speaker, &body) {
            return self.refuse(context, conn, refused);
        }
        let job_id = speaker.job;
        self.speak_of(context, &job_id, &speaker.incarnation, &body);
        let from = Origin {
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
            self.join(context, &job_id, joining);
        } else if let Some(job) = self.jobs.get_mut(&job_id) {
            job.receive(context, conn, &from, body);
        }
        self.forget(context, &job_id);
    }

    /// A stream begins with `Join`, and belongs to that node from then on.
    fn identify(
        &mut self,
        context: &ApplyContext<'_>,
        conn: ConnId,
        speaker: &Speaker,
        body: &Body,
    ) -> Result<(), Refused> {
        let invalid = |reason: &str| Err(refusal(Code::Invalid, reason.to_owned()));
        match self.speakers.get(&conn) {
            Some(known) if known == speaker => Ok(()),
            Some(_) => invalid("a stream belongs to one node of one job"),
            None if matches!(body, Body::Join(_)) => {
                self.admit_speaker(context, speaker)?;
                self.speakers.insert(conn, speaker.clone());
                Ok(())
            }
            None => invalid("the first message of a stream must be `Join`"),
        }
    }

    fn refuse(&mut self, context: &mut ApplyContext<'_>, conn: ConnId, refused: Refused) {
        let words = format!("refused a stream: {}", refused.reason);
        let now = context.at.now;
        if self
            .refusal_shown
            .is_some_and(|shown| now < shown + REFUSAL_INTERVAL)
        {
            context.detail(words);
        } else {
            self.refusal_shown = Some(now);
            context.decided(words);
        }
        context.send(Some(conn), 0, Reply::Refused(refused));
        context.close(Some(conn));
    }

    fn admit_speaker(&self, context: &ApplyContext<'_>, speaker: &Speaker) -> Result<(), Refused> {
        let max = context.config.max_name_bytes;
        let is_name = (1..=max).contains(&speaker.job.len()) && printable::is_name(&speaker.job);
        if !is_name || speaker.incarnation.is_empty() {
            let reason = format!("a job name has 1 to {max} bytes, and each agent needs its own name");
            return Err(refusal(Code::Invalid, reason));
        }
        if let Some(reason) = context.config.refuses(&speaker.job) {
            let hint =
                "give all nodes of a job the same `--rdzv-id`, and other jobs a different `--rdzv-endpoint`";
            let reason = match context.config.callers {
                Callers::Authenticated => format!("the rendezvous at this address {reason}"),
                Callers::Anybody => format!(
                    "the rendezvous at this address does not serve job `{}`",
                    clip(&speaker.job, 128)
                ),
            };
            return Err(refusal(Code::Disagree, format!("{reason}\n  hint: {hint}")));
        }
        let is_new = !self.jobs.contains_key(&speaker.job);
        if is_new && self.jobs.len() >= context.config.max_jobs {
            let count = self.jobs.len();
            let reason = format!("this daemon already has {count} jobs, the maximum");
            return Err(refusal(Code::Invalid, reason));
        }
        Ok(())
    }

    fn join(&mut self, context: &mut ApplyContext<'_>, job_id: &str, joining: Joining) {
        let mut finished = self.finished.iter().rev();
        let missed = finished.find(|f| f.is_of(job_id) && f.concerns(&joining));
        if missed.is_some_and(|missed| missed.tell(context, &joining)) {
            return;
        }
        let job = self.jobs.get_mut(job_id);
        if job.is_some_and(|job| job.is_cleared_for(context, &joining)) {
            // Its verdict is kept for those that were away when it was told.
            self.forget(context, job_id);
        }
        // Another run of this name continues to count generations: what is left of the old run stays fenced off.
        let earlier = self.finished.iter().filter(|f| f.is_of(job_id));
        let earlier = earlier.map(Finished::generation).max();
        let new = || Job::new(job_id, earlier.unwrap_or(0), context.at.now);
        let job = self.jobs.entry(job_id.to_owned()).or_insert_with(new);
        job.join(context, joining);
    }

    fn closed(&mut self, context: &mut ApplyContext<'_>, conn: ConnId, clean: bool) {
        self.ended.remove(&conn);
        if let Some(speaker) = self.speakers.remove(&conn)
            && let Some(job) = self.jobs.get_mut(&speaker.job)
        {
            context.about = job.about(&speaker.incarnation);
            job.closed(context, &speaker.incarnation, conn, clean);
            self.forget(context, &speaker.job);
        }
    }

    fn tick(&mut self, context: &mut ApplyContext<'_>) {
        let now = context.at.now;
        // A timer that is very late means that the daemon itself was stalled (a stopped process, a paused
        // machine): heartbeats may wait unread.
        if let Some(late) = self.wakes.next().and_then(|due| now.checked_sub(due))
            && late > context.config.heartbeat_interval()
        {
            context.decided(format!(
                "the daemon was stalled for {:.1} s; all leases are renewed",
                late.as_secs_f64()
            ));
            self.renew_leases(now + context.config.lease);
        } else {
            self.consider_partition(context);
        }
        let Self { jobs, wakes, .. } = self;
        let due = wakes.expired(now, Duration::ZERO, |id| jobs.get(id).and_then(Job::next_wake));
        for id in due {
            if let Some(job) = self.jobs.get_mut(&id) {
                context.about = job.about("");
                job.tick(context);
                self.forget(context, &id);
            }
        }
    }

    /// The daemon's own network may be down. A suspicion ends with the last node.
    fn suspects_network(&self, now: Duration, config: &Config) -> bool {
        self.partition.holds(now, config) && !self.is_idle()
    }

    fn note_contact(&mut self, context: &mut ApplyContext<'_>) {
        let silence = self.partition.silence(context.at.now);
        if self.partition.note_contact(context.at.now) && !self.is_idle() {
            context.decided(format!(
                "the daemon hears from nodes again after {:.1} s; all leases are renewed",
                silence.as_secs_f64()
            ));
            self.renew_leases(context.at.now + context.config.lease);
        }
    }

    /// Gives all nodes more time if the daemon hears none of them, though streams are open.
    fn consider_partition(&mut self, context: &mut ApplyContext<'_>) {
        let (now, config) = (context.at.now, context.config);
        let has_streams = || self.jobs.values().any(Job::has_open_streams);
        if !self.partition.is_due(now, config, has_streams) {
            return;
        }
        if self.partition.begin() {
            context.decided(format!(
                "no node has been heard for {:.1} s: the daemon's own network may be down; no node is lost for that, \
                 for up to {:.0} s",
                self.partition.silence(now).as_secs_f64(),
                config.silence_limit.as_secs_f64()
            ));
        }
        self.renew_leases(now + config.heartbeat_interval());
    }

    /// No node loses its lease before `until`.
    fn renew_leases(&mut self, until: Duration) {
        for (id, job) in &mut self.jobs {
            job.renew_leases(until);
            self.wakes.note(id, job.next_wake());
        }
    }

    /// Sets the subject of the notes: the job, and the node that sent the message.
    fn speak_of(&self, context: &mut ApplyContext<'_>, job_id: &str, incarnation: &str, body: &Body) {
        context.about = match self.jobs.get(job_id) {
            Some(job) => job.about(incarnation),
            None => About {
                job: job_id.to_owned(),
                ..About::default()
            },
        };
        if let Body::Join(join) = body {
            clip(&join.hostname, context.config.max_name_bytes).clone_into(&mut context.about.node);
        }
    }

    fn close(&mut self, context: &mut ApplyContext<'_>, job_id: &str, reason: &str) {
        if let Some(job) = self.jobs.get_mut(job_id) {
            context.about = job.about("");
            job.close(context, reason);
            self.forget(context, job_id);
        }
    }

    /// Drops a job that no node needs; its verdict is kept for agents that missed it.
    fn forget(&mut self, context: &mut ApplyContext<'_>, job_id: &str) {
        let job = self.jobs.get(job_id);
        if !job.is_some_and(|job| job.is_forgotten(context.at.now)) {
            return self.replan(job_id);
        }
        let finished = self.jobs.remove(job_id).and_then(|job| job.finish(context));
        self.replan(job_id);
        if let Some(finished) = finished {
            if self.finished.len() >= MAX_FINISHED {
                self.finished.pop_front();
            }
            self.finished.push_back(finished);
        }
    }

    fn kv_put(&mut self, context: &mut ApplyContext<'_>, call: CallId, request: KvPutRequest) {
        let result = self.put(context, request).map(|()| Bytes::new());
        context.effects.push(Effect::Answer { call, result });
    }

    fn put(&mut self, context: &mut ApplyContext<'_>, request: KvPutRequest) -> Result<(), KvError> {
        let more = Load {
            entries: 1,
            bytes: request.key.len() + request.value.len(),
            waiters: 0,
        };
        // A caller that is no node of the job learns nothing of the room either.
        self.job(&request.job_id, &request.incarnation)?;
        self.check_room(context.config, more)?;
        self.job(&request.job_id, &request.incarnation)?
            .put(context, request)?;
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

    fn kv_read(&mut self, context: &mut ApplyContext<'_>, call: CallId, read: Read) {
        let job_id = read.job_id.clone();
        if let Err(error) = self.try_read(context, call, read) {
            let result = Err(error);
            context.effects.push(Effect::Answer { call, result });
        }
        self.replan(&job_id);
    }

    /// Begins a read. Cancels it if it has to wait and too many reads wait already.
    fn try_read(&mut self, context: &mut ApplyContext<'_>, call: CallId, read: Read) -> Result<(), KvError> {
        self.job(&read.job_id, &read.incarnation)?;
        let room = self.check_room(context.config, Load::READ);
        let job = self.job(&read.job_id, &read.incarnation)?;
        let before = job.load().waiters;
        job.read(context, call, read)?;
        if job.load().waiters > before {
            if let Err(full) = room {
                job.cancel(call);
                return Err(full);
            }
            self.store_totals.add(Load::READ);
        }
        Ok(())
    }

    /// The job, for one of its nodes.
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

/// The answer to callers that are no nodes of the job. It does not tell whether the job exists.
fn unknown(job_id: &str) -> KvError {
    KvError::Unknown(format!(
        "this daemon has no job `{}` with this node",
        clip(job_id, 128)
    ))
}
