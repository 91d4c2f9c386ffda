//! One simulated agent: a connection of its own, and what a launcher says on it.

use std::sync::Arc;
use std::time::Duration;

use ddp_proto::client::{Access, AgentIdentity, AgentStream, Client, ClientError, KvScope};
use ddp_proto::ids::{Generation, NodeId};
use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{Assignment, GenerationOver, Heartbeat, Join, Leave, NodeStopped};
use tokio::sync::{Semaphore, SemaphorePermit, mpsc, watch};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

/// Longest wait of a node for the others, and for the daemon.
pub(super) const PATIENCE: Duration = Duration::from_mins(10);

/// Of what is gathered.
const PREFIX: &str = "bench/";

/// About as many as of a real launch.
const KEYS: u64 = 40;

/// How far the agents are to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Order {
    /// Connect to the daemon, join the job, and stay.
    Join,
    /// Write one entry, and gather those of all nodes of the job.
    Gather,
    /// A node more comes to the first job, and is on standby.
    StandBy,
    /// The last node of the first job leaves, and the one on standby takes its place.
    Leave,
}

/// What an agent tells the measurement.
#[derive(Debug)]
pub(super) enum News {
    /// The node that is one too many waits.
    OnStandby,
    Assigned {
        job: u32,
        generation: u64,
        node_rank: u32,
        bytes: usize,
    },
    Gathered,
    Failed(String),
}

/// Which node of which job it plays.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) job: u32,
    pub(super) node: u32,
    pub(super) nodes: u32,
    pub(super) workers: u32,
    /// It leaves at [`Order::Leave`].
    pub(super) leaves: bool,
    /// It joins at [`Order::StandBy`], and takes the place of the one that leaves.
    pub(super) stands_by: bool,
}

/// An agent, while it is connected.
pub(super) struct Agent {
    part: Part,
    client: Client,
    orders: watch::Receiver<Order>,
    news: mpsc::UnboundedSender<News>,
    /// Of the last assignment.
    place: Option<(Generation, Assignment)>,
}

impl Agent {
    /// Plays its part until the measurement is over.
    pub(super) async fn run(
        (endpoint, access): (&str, &Access),
        places: Arc<Semaphore>,
        part: Part,
        mut orders: watch::Receiver<Order>,
        news: mpsc::UnboundedSender<News>,
    ) {
        let told = news.clone();
        let begin = if part.stands_by {
            Order::StandBy
        } else {
            Order::Join
        };
        let played = async {
            // An error means that the measurement is over.
            if orders.wait_for(|order| *order >= begin).await.is_err() {
                return Ok(());
            }
            let busy = places.acquire().await;
            let agent = Self {
                part,
                client: Client::connect(endpoint, access, Instant::now() + PATIENCE).await?,
                orders,
                news,
                place: None,
            };
            agent.play(busy.ok()).await
        };
        if let Err(error) = played.await {
            let _ = told.send(News::Failed(error.to_string()));
        }
    }

    /// It is `busy` until the daemon has answered.
    async fn play(mut self, mut busy: Option<SemaphorePermit<'_>>) -> Result<(), ClientError> {
        let identity = AgentIdentity {
            job_id: self.job_id(),
            incarnation: NodeId(self.incarnation()),
        };
        let mut attempts = self.client.attempts(PATIENCE);
        let mut stream = self.client.agent_stream(identity, &mut attempts).await?;
        stream.sender().send(Generation(0), "", self.join())?;
        let mut beats: Option<Interval> = None;
        loop {
            // Cancel safe: a message, a beat and an order are each either returned or still to come.
            tokio::select! {
                message = stream.next() => {
                    let message = message?;
                    drop(busy.take());
                    let generation = Generation(message.generation);
                    match message.body {
                        Some(Reply::Assignment(assignment)) => {
                            beats.get_or_insert_with(|| self.beats(assignment.lease_ms));
                            self.assigned(generation, assignment);
                        }
                        Some(Reply::Waiting(waiting)) => {
                            beats.get_or_insert_with(|| self.beats(waiting.lease_ms));
                            if self.part.stands_by {
                                let _ = self.news.send(News::OnStandby);
                            }
                        }
                        Some(Reply::GenerationOver(over)) => self.over(&stream, generation, &over)?,
                        Some(Reply::JobOver(over)) => {
                            let _ = self.news.send(News::Failed(over.reason));
                            return Ok(());
                        }
                        Some(Reply::Refused(refused)) => {
                            let _ = self.news.send(News::Failed(refused.reason));
                            return Ok(());
                        }
                        _ => {}
                    }
                }
                () = tick(&mut beats) => self.say(&stream, Body::Heartbeat(Heartbeat::default()))?,
                changed = self.orders.changed() => {
                    if changed.is_err() {
                        return Ok(());
                    }
                    let order = *self.orders.borrow_and_update();
                    if order == Order::Gather {
                        self.gather();
                    }
                    if self.part.leaves && order >= Order::Leave {
                        let generation = self.place.as_ref().map_or(Generation(0), |(generation, _)| *generation);
                        let leave = Leave { reason: "its machine is gone".into(), ..Leave::default() };
                        stream.leave(generation, leave, Instant::now() + PATIENCE).await;
                        return Ok(());
                    }
                }
            }
        }
    }

    /// As the workers of a node do at their start: one call for all of them. Heartbeats go on meanwhile.
    fn gather(&self) {
        let Some((generation, place)) = &self.place else {
            return;
        };
        let scope = KvScope {
            job_id: self.job_id(),
            generation: *generation,
            assignment_id: place.assignment_id.clone(),
            incarnation: NodeId(self.incarnation()),
        };
        let (client, news) = (self.client.clone(), self.news.clone());
        let (own, nodes) = (self.part.node, self.part.nodes);
        tokio::spawn(async move {
            let gathered = async {
                // As long as the address of a rank.
                let value = format!("{{\"node\":{own},\"local\":0,\"inet\":\"10.0.0.1:40000\"}}");
                client
                    .kv_put(&scope, &format!("{PREFIX}{own}"), value.into_bytes())
                    .await?;
                client.kv_gather(&scope, PREFIX, nodes, PATIENCE).await
            };
            let _ = news.send(match gathered.await {
                Ok(Some(found)) if found.entries.len() == nodes as usize => News::Gathered,
                Ok(_) => News::Failed("not all entries were gathered".into()),
                Err(error) => News::Failed(error.to_string()),
            });
        });
    }

    fn job_id(&self) -> String {
        format!("job-{}", self.part.job)
    }

    /// Each node has its own moment within an interval.
    fn beats(&self, lease_ms: u32) -> Interval {
        let every = Duration::from_millis(u64::from(lease_ms)) / 3;
        let offset = every.mul_f64(f64::from(self.part.node) / f64::from(self.part.nodes));
        let mut beats = interval_at(Instant::now() + offset, every);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        beats
    }

    fn assigned(&mut self, generation: Generation, assignment: Assignment) {
        let _ = self.news.send(News::Assigned {
            job: self.part.job,
            generation: generation.0,
            node_rank: assignment.node_rank,
            bytes: prost::Message::encoded_len(&assignment),
        });
        self.place = Some((generation, assignment));
    }

    /// Its workers stop at once, and it is ready for the next generation.
    fn over(
        &self,
        stream: &AgentStream,
        generation: Generation,
        _: &GenerationOver,
    ) -> Result<(), ClientError> {
        let id = self
            .place
            .as_ref()
            .map_or("", |(_, place)| place.assignment_id.as_str());
        let sender = stream.sender();
        sender.send(generation, id, Body::NodeStopped(NodeStopped::default()))?;
        sender.send(generation, id, self.join())
    }

    fn say(&self, stream: &AgentStream, body: Body) -> Result<(), ClientError> {
        let place = self.place.as_ref();
        let (generation, id) = place.map_or((Generation(0), ""), |(generation, place)| {
            (*generation, place.assignment_id.as_str())
        });
        stream.sender().send(generation, id, body)
    }

    /// As the names of real agents, about 40 bytes.
    fn incarnation(&self) -> String {
        let Part {
            job, node, stands_by, ..
        } = self.part;
        format!("node-{node:05}-{job:05}-{}-0123456789abcdef", u8::from(stands_by))
    }

    fn join(&self) -> Body {
        let Part {
            node, nodes, workers, ..
        } = self.part;
        let [.., high, low] = node.to_be_bytes();
        Body::Join(Join {
            protocol: 1,
            hostname: format!("node-{node:05}.cluster.example"),
            min_nodes: nodes,
            max_nodes: nodes,
            workers,
            max_restarts: 3,
            local_addr: format!("10.0.{high}.{low}"),
            master_port: 29_500,
            agreed: (0..KEYS)
                .map(|key| (format!("a.key.of.the.job.{key}"), key))
                .collect(),
            join_timeout_ms: PATIENCE.as_millis() as u32,
            run_token: self
                .place
                .as_ref()
                .map_or_else(String::new, |(_, place)| place.run_token.clone()),
            role: "default".into(),
            ..Join::default()
        })
    }
}

async fn tick(beats: &mut Option<Interval>) {
    match beats {
        Some(beats) => {
            beats.tick().await;
        }
        None => std::future::pending().await,
    }
}
