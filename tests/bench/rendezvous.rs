//! How long N nodes take to meet: clients of one daemon in one process, as `tests/peers/rendezvous.py` does it with
//! torchrun's rendezvous.
//!
//! `rendezvous [--turns T] N…` prints a line of medians for each N: from the first node that joins to the last that has
//! its rank, with all connections made before, and the same with them.

use std::time::Duration;

use ddp_proto::client::{Access, AgentIdentity, AgentStream, Client};
use ddp_proto::ids::{Generation, NodeId};
use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{Assignment, Join};
use ddp_run::rendezvous::{Config, Listener, Transport, listen, serve};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

/// Of every wait.
const PATIENCE: Duration = Duration::from_mins(5);

type Failure = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let mut turns = 5;
    let mut sizes = Vec::new();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--turns" => turns = words.next().ok_or("--turns T")?.parse::<usize>()?.max(1),
            number => sizes.push(number.parse::<u32>()?),
        }
    }
    // Two ends of a connection for each node.
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let listener = listen(&["127.0.0.1:0".parse()?])?;
    let endpoint = listener.local_addr()?.to_string();
    let daemon = tokio::spawn(serve(
        Listener::Tcp(listener, Transport::Plain),
        Config::default(),
        None,
        std::future::pending(),
    ));
    for nodes in sizes {
        let mut times = Vec::new();
        for turn in 0..turns {
            times.push(meet(&endpoint, &format!("{nodes} nodes, turn {turn}"), nodes).await?);
        }
        let ms = |which: fn(&Meeting) -> Duration| {
            let mut ms: Vec<f64> = times
                .iter()
                .map(|meeting| which(meeting).as_secs_f64() * 1e3)
                .collect();
            ms.sort_by(f64::total_cmp);
            format!(
                "{:.1} ms ({:.1} to {:.1})",
                ms[ms.len() / 2],
                ms[0],
                ms[ms.len() - 1]
            )
        };
        let (joined, connected) = (ms(|m| m.joined), ms(|m| m.connected + m.joined));
        println!("{nodes} nodes: {joined}; with their connections {connected}");
    }
    daemon.abort();
    Ok(())
}

struct Meeting {
    /// Until all nodes were connected.
    connected: Duration,
    /// From then until all had their ranks.
    joined: Duration,
}

async fn meet(endpoint: &str, job: &str, nodes: u32) -> Result<Meeting, Failure> {
    let begun = Instant::now();
    let mut connecting = JoinSet::new();
    for node in 0..nodes {
        connecting.spawn(connect(endpoint.to_owned(), job.to_owned(), node));
    }
    let agents: Vec<_> = connecting
        .join_all()
        .await
        .into_iter()
        .collect::<Result<_, _>>()?;
    let connected = begun.elapsed();
    let begun = Instant::now();
    let mut joining = JoinSet::new();
    for (node, agent) in agents {
        joining.spawn(rank(agent, node, nodes));
    }
    let met: Vec<(AgentStream, u32)> = joining.join_all().await.into_iter().collect::<Result<_, _>>()?;
    let joined = begun.elapsed();
    let mut ranks: Vec<u32> = met.iter().map(|(_, rank)| *rank).collect();
    ranks.sort_unstable();
    assert!(ranks.into_iter().eq(0..nodes), "every rank is given once");
    Ok(Meeting { connected, joined })
}

async fn connect(endpoint: String, job_id: String, node: u32) -> Result<(u32, AgentStream), Failure> {
    let client = Client::connect(&endpoint, &Access::Open, Instant::now() + PATIENCE).await?;
    let identity = AgentIdentity {
        job_id,
        incarnation: NodeId(format!("n{node}")),
    };
    let stream = client
        .agent_stream(identity, &mut client.attempts(PATIENCE))
        .await?;
    Ok((node, stream))
}

/// Joins and waits for the rank.
async fn rank(mut agent: AgentStream, node: u32, nodes: u32) -> Result<(AgentStream, u32), Failure> {
    let join = Join {
        protocol: 1,
        hostname: format!("n{node}"),
        min_nodes: nodes,
        max_nodes: nodes,
        workers: 8,
        master_port: 29_500,
        join_timeout_ms: PATIENCE.as_millis() as u32,
        ..Join::default()
    };
    agent.sender().send(Generation(0), "", Body::Join(join))?;
    loop {
        let message = timeout(PATIENCE, agent.next()).await??;
        match message.body {
            Some(Reply::Assignment(Assignment { node_rank, .. })) => return Ok((agent, node_rank)),
            Some(Reply::Refused(refused)) => return Err(format!("{refused:?}").into()),
            _ => {}
        }
    }
}
