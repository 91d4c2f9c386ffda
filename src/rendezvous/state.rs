//! All jobs of one daemon, and [`apply`]: the one place through which anything changes.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::time::Duration;

use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{AgentMessage, KvGetRequest, KvPutRequest, Refused, StatusReply, refused::Code};

use super::config::Config;
use super::event::{At, CallId, ConnId, Effect, Event, KvError, Peer, Turn};
use super::hearing::Hearing;
use super::job::{Job, Phase, Speech};
use super::joining::Joining;
use super::record::{Record, Stage};

/// Finished jobs whose verdict is remembered for agents that missed it.
const MAX_FINISHED: usize = 256;

/// Everything the daemon knows.
#[derive(Debug)]
pub struct State {
    config: Config,
    jobs: BTreeMap<String, Job>,
    /// Who speaks on a stream, once it has joined.
    speakers: HashMap<ConnId, Speaker>,
    /// Streams that the daemon has ended, while messages may still come in from them.
    ended: HashSet<ConnId>,
    /// Jobs without nodes, newest last.
    finished: VecDeque<Finished>,
    hearing: Hearing,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Speaker {
    job: String,
    incarnation: String,
}

#[derive(Debug)]
struct Finished {
    job: String,
    told: BTreeSet<String>,
    /// [`Job::silent`]
    silent: BTreeMap<String, Duration>,
    run_token: String,
    generation: u64,
    verdict: Option<Reply>,
}

impl State {
    /// A daemon that knows no job.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            jobs: BTreeMap::new(),
            speakers: HashMap::new(),
            ended: HashSet::new(),
            finished: VecDeque::new(),
            hearing: Hearing::default(),
        }
    }

    /// A daemon that starts with what its ledger has of each job, oldest first.
    pub fn recall(config: Config, records: Vec<Record>, now: Duration) -> Self {
        let mut state = Self::new(config);
        for record in records {
            if record.is_final() {
                state.finished.push_back(Finished {
                    told: record.incarnations(),
                    silent: BTreeMap::new(),
                    verdict: record.verdict(),
                    run_token: record.run_token,
                    generation: record.generation,
                    job: record.job,
                });
            } else {
                let job = Job::recall(&state.config, record, now);
                state.jobs.insert(job.id.clone(), job);
            }
        }
        state
    }

    /// When [`Event::Tick`] is due; earlier is harmless.
    pub fn next_wake(&self) -> Option<Duration> {
        self.jobs.values().filter_map(|job| job.next_wake).min()
    }

    /// What people and tools may know of a job.
    pub fn status(&self, now: Duration, job_id: &str) -> Option<StatusReply> {
        self.jobs.get(job_id).map(|job| job.status(now))
    }

    /// True if no agent is at this daemon, connected or expected back.
    pub fn is_idle(&self) -> bool {
        self.jobs.values().all(|job| job.nodes.is_empty())
    }

    /// How long nodes are expected back that fell silent: a launcher that was suspended comes for the verdict on its
    /// job. None if there are none; it may be in the past.
    pub fn expects_until(&self) -> Option<Duration> {
        let jobs = self.jobs.values().map(|job| &job.silent);
        let all = jobs.chain(self.finished.iter().map(|finished| &finished.silent));
        all.flat_map(BTreeMap::values).max().copied()
    }
}

/// Decides what an event means: a pure function of the time, the dice, the state and the event.
pub fn apply(at: At, state: &mut State, event: Event) -> Vec<Effect> {
    let State {
        config,
        jobs,
        speakers,
        ended,
        finished,
        hearing,
    } = state;
    let mut turn = Turn {
        at,
        config,
        effects: Vec::new(),
    };
    let mut daemon = Daemon {
        jobs,
        speakers,
        finished,
        hearing,
    };
    if event.is_heard(daemon.hearing.silence(at.now), &turn) {
        daemon.heard(&mut turn);
    }
    match event {
        Event::Message { conn, .. } if ended.contains(&conn) => {
            turn.detail("ignored a message on an ended stream");
        }
        Event::Message { conn, peer, message } => daemon.message(&mut turn, conn, peer, *message),
        Event::Closed { conn, clean } => {
            ended.remove(&conn);
            daemon.closed(&mut turn, conn, clean);
        }
        Event::KvPut { call, request } => daemon.kv_put(&mut turn, call, request),
        Event::KvGet { call, request } => daemon.kv_get(&mut turn, call, request),
        Event::Tick => daemon.tick(&mut turn),
    }
    for effect in &turn.effects {
        if let Effect::Close { conn } = effect {
            ended.insert(*conn);
        }
    }
    turn.effects
}

/// [`State`] without the settings, which a [`Turn`] borrows.
pub(super) struct Daemon<'a> {
    pub(super) jobs: &'a mut BTreeMap<String, Job>,
    speakers: &'a mut HashMap<ConnId, Speaker>,
    finished: &'a mut VecDeque<Finished>,
    pub(super) hearing: &'a mut Hearing,
}

impl Daemon<'_> {
    fn message(&mut self, turn: &mut Turn<'_>, conn: ConnId, peer: Peer, message: AgentMessage) {
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
        let Speaker {
            job: job_id,
            incarnation,
        } = speaker;
        if let Body::Join(join) = body {
            self.join(
                turn,
                &job_id,
                Joining {
                    conn,
                    peer,
                    incarnation,
                    generation,
                    assignment_id,
                    join,
                },
            );
            self.forget(turn, &job_id);
            return;
        }
        let Some(job) = self.jobs.get_mut(&job_id) else {
            return;
        };
        if job
            .nodes
            .get(&incarnation)
            .is_some_and(|node| node.conn == Some(conn))
        {
            if job.is_of_another_assignment(generation, &assignment_id) {
                let from = Speech {
                    incarnation: &incarnation,
                    generation,
                    assignment_id: &assignment_id,
                };
                job.message_of_another(turn, &from, body);
            } else {
                job.message(turn, &incarnation, generation, body);
            }
            self.forget(turn, &job_id);
        } else {
            job.ignore(turn, &incarnation, generation, "a message on an old stream");
        }
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
            return Err((Code::Disagree, format!("{reason}\n  hint: {hint}")));
        }
        if !self.jobs.contains_key(&speaker.job) && self.jobs.len() >= turn.config.max_jobs {
            let count = self.jobs.len();
            let reason = format!("this daemon already has {count} jobs, the maximum");
            return Err((Code::Invalid, reason));
        }
        Ok(())
    }

    fn join(&mut self, turn: &mut Turn<'_>, job_id: &str, joining: Joining) {
        let missed = self.finished.iter_mut().rev().find(|f| {
            let concerns = f.told.contains(&joining.incarnation) || joining.is_of_run(&f.run_token);
            f.job == job_id && concerns
        });
        if let Some(Finished {
            generation,
            verdict: Some(verdict),
            silent,
            ..
        }) = missed
        {
            silent.remove(&joining.incarnation);
            turn.send(Some(joining.conn), *generation, verdict.clone());
            turn.close(Some(joining.conn));
            return;
        }
        let now = turn.at.now;
        // A run after this one has generations of its own: what is left of the old run stays fenced off.
        let earlier = self
            .finished
            .iter()
            .filter(|f| f.job == job_id)
            .map(|f| f.generation)
            .max();
        let new = || Job::new(job_id, earlier.unwrap_or(0), now);
        let job = self.jobs.entry(job_id.to_owned()).or_insert_with(new);
        let is_awaited = matches!(&job.phase, Phase::Recovering(recovery) if recovery.is_recorded());
        if job.nodes.is_empty() && joining.generation == 0 && !is_awaited {
            // No node is left, and the newcomer was in no generation: a new run, with generation numbers of its own.
            // What still waits for a key of the old one gets its answer.
            job.kv.end("a new run of the job has started", &mut turn.effects);
            *job = Job::new(job_id, job.highest_generation(), now);
        }
        job.join(turn, joining);
    }

    fn closed(&mut self, turn: &mut Turn<'_>, conn: ConnId, clean: bool) {
        if let Some(speaker) = self.speakers.remove(&conn)
            && let Some(job) = self.jobs.get_mut(&speaker.job)
        {
            job.closed(turn, &speaker.incarnation, conn, clean);
            self.forget(turn, &speaker.job);
        }
    }

    fn tick(&mut self, turn: &mut Turn<'_>) {
        let now = turn.at.now;
        // A timer that is very late means that the daemon itself was stalled (a stopped process, a paused
        // machine): heartbeats may wait unread.
        let due = self.jobs.values().filter_map(|job| job.next_wake).min();
        if let Some(late) = due.and_then(|due| now.checked_sub(due))
            && late > turn.config.heartbeat_interval()
        {
            turn.decided(format!(
                "the daemon was stalled for {:.1} s; all leases are renewed",
                late.as_secs_f64()
            ));
            self.renew_leases(now + turn.config.lease);
        }
        self.consider_isolation(turn);
        let due: Vec<String> = self
            .jobs
            .iter()
            .filter(|(_, job)| job.next_wake.is_some_and(|wake| wake <= now))
            .map(|(id, _)| id.clone())
            .collect();
        for id in due {
            if let Some(job) = self.jobs.get_mut(&id) {
                job.tick(turn);
                self.forget(turn, &id);
            }
        }
    }

    /// Drops a job that no node needs; its verdict is kept for agents that missed it.
    fn forget(&mut self, turn: &mut Turn<'_>, job_id: &str) {
        let job = self.jobs.get(job_id);
        if !job.is_some_and(|job| job.is_forgotten(turn.at.now)) {
            return;
        }
        let Some(job) = self.jobs.remove(job_id) else {
            return;
        };
        let generation = job.highest_generation();
        if !matches!(job.phase, Phase::Over(_)) {
            job.record(turn, Stage::Abandoned);
        }
        // Without a verdict only the generation number is of interest later.
        let (told, verdict) = match job.phase {
            Phase::Over(over) => (over.told, Some(over.verdict)),
            Phase::Gathering(_) | Phase::Recovering(_) | Phase::Running(_) => (BTreeSet::new(), None),
        };
        if generation > 0 || verdict.is_some() {
            if self.finished.len() >= MAX_FINISHED {
                self.finished.pop_front();
            }
            self.finished.push_back(Finished {
                job: job.id,
                told,
                silent: job.silent,
                run_token: job.run_token,
                generation,
                verdict,
            });
        }
    }

    fn kv_put(&mut self, turn: &mut Turn<'_>, call: CallId, request: KvPutRequest) {
        let limits = turn.config.kv;
        let job = self.store(&request.job_id, request.generation, &request.assignment_id);
        let result = job.and_then(|job| {
            job.kv
                .put(limits, request.key, request.value, &mut turn.effects)?;
            job.plan_wake();
            Ok(std::sync::Arc::default())
        });
        turn.effects.push(Effect::Answer { call, result });
    }

    fn kv_get(&mut self, turn: &mut Turn<'_>, call: CallId, request: KvGetRequest) {
        let limits = turn.config.kv;
        let timeout = Duration::from_millis(request.timeout_ms.into());
        match self.store(&request.job_id, request.generation, &request.assignment_id) {
            Ok(job) => {
                job.kv
                    .get(limits, turn.at.now, call, request.key, timeout, &mut turn.effects);
                if let Some(deadline) = job.kv.next_deadline() {
                    job.next_wake = Some(job.next_wake.map_or(deadline, |wake| wake.min(deadline)));
                }
            }
            Err(error) => turn.effects.push(Effect::Answer {
                call,
                result: Err(error),
            }),
        }
    }

    /// The job, if this assignment of this generation of it runs.
    fn store(&mut self, job_id: &str, generation: u64, assignment_id: &str) -> Result<&mut Job, KvError> {
        let Some(job) = self.jobs.get_mut(job_id) else {
            return Err(match self.finished.iter().rev().find(|f| f.job == job_id) {
                Some(_) => KvError::Superseded("the job has ended".into()),
                None => KvError::Unknown(format!("this daemon has no job `{job_id}`")),
            });
        };
        if job.is_of_another_assignment(generation, assignment_id) {
            let words = job.another_assignment_words(generation, assignment_id);
            return Err(KvError::Superseded(words));
        }
        if let Phase::Recovering(recovery) = &job.phase
            && recovery.generation == generation
        {
            if recovery.assignment_id.is_empty() && !assignment_id.is_empty() {
                return Err(KvError::Unknown(format!(
                    "no node of generation {generation} of job `{job_id}` has reconnected yet"
                )));
            }
            return Ok(job);
        }
        if generation > job.generation {
            return Err(KvError::Unknown(format!(
                "generation {generation} of job `{job_id}` was not assigned by this daemon"
            )));
        }
        match &job.phase {
            Phase::Running(_) if generation == job.generation => Ok(job),
            Phase::Over(over) => Err(KvError::Superseded(format!("the job has ended: {}", over.reason))),
            _ => Err(KvError::Superseded(job.last_over.as_ref().map_or_else(
                || format!("generation {} of the job runs", job.generation),
                |over| over.cause.clone(),
            ))),
        }
    }
}

fn refuse(turn: &mut Turn<'_>, conn: ConnId, code: Code, reason: String) {
    turn.decided(format!("refused a stream: {reason}"));
    turn.send(
        Some(conn),
        0,
        Reply::Refused(Refused {
            code: code.into(),
            reason,
            failures: None,
        }),
    );
    turn.close(Some(conn));
}
