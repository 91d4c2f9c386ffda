//! What a node more takes of the rendezvous, with hundreds of nodes that are only connections.

use ddp_proto::client::{Access, AgentIdentity, AgentStream, Client, KvScope};
use ddp_proto::ids::{Generation, NodeId};
use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{Assignment, Join};
use ddp_proto::trust::token::Token;
use prost::Message as _;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::harness::{Daemon, PATIENCE, token_file};

/// Of 200 nodes, with all that their connections take. When each assignment held a list of all nodes, it was more.
const BYTES_A_NODE: u64 = 80_000;
const NODES: u32 = 200;
/// Keys that the nodes agree on: about as many as of a real launch.
const KEYS: u64 = 40;

/// The most memory that a process has had so far.
fn peak_bytes(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a process of ours");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = peak.and_then(|peak| peak.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.expect("a number") * 1024
}

/// One node: joins, writes an entry, and gathers those of all. Returns its stream and its assignment.
async fn meet(endpoint: String, access: Access, node: u32) -> (AgentStream, Assignment) {
    let deadline = Instant::now() + PATIENCE;
    let client = Client::connect(&endpoint, &access, deadline)
        .await
        .expect("a daemon");
    let incarnation = NodeId(format!("node-{node:05}-0123456789abcdef0123456789abcdef"));
    let identity = AgentIdentity {
        job_id: "scale".into(),
        incarnation: incarnation.clone(),
    };
    let mut attempts = client.attempts(PATIENCE);
    let mut stream = client
        .agent_stream(identity, &mut attempts)
        .await
        .expect("a stream");
    let join = Join {
        protocol: 1,
        hostname: format!("node-{node:05}.cluster.example"),
        min_nodes: NODES,
        max_nodes: NODES,
        workers: 8,
        local_addr: format!("10.0.0.{}", node % 250),
        master_port: 29_500,
        agreed: (0..KEYS)
            .map(|key| (format!("a.key.of.the.job.{key}"), key))
            .collect(),
        join_timeout_ms: PATIENCE.as_millis() as u32,
        ..Join::default()
    };
    stream
        .send(Generation(0), "", Body::Join(join))
        .expect("an open stream");
    let (generation, assignment): (_, Assignment) = loop {
        let message = stream.next().await.expect("a message");
        if let Some(Reply::Assignment(assignment)) = message.body {
            break (Generation(message.generation), assignment);
        }
    };
    let scope = KvScope {
        job_id: "scale".into(),
        generation,
        assignment_id: assignment.assignment_id.clone(),
        incarnation,
    };
    let value = format!("{{\"node\":{node},\"local\":0,\"inet\":\"10.0.0.1:40000\"}}").into_bytes();
    client
        .kv_put(&scope, &format!("rank/{node}"), value)
        .await
        .expect("written");
    let gathered = client
        .kv_gather(&scope, "rank/", NODES, PATIENCE)
        .await
        .expect("an answer");
    assert_eq!(gathered.map_or(0, |found| found.entries.len()), NODES as usize);
    (stream, assignment)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_more_takes_little_memory_of_the_daemon_and_no_bytes_of_the_other_nodes() {
    let daemon = Daemon::start();
    let idle = peak_bytes(daemon.pid());
    let token = std::fs::read_to_string(token_file()).expect("readable");
    let access = Access::Token(Token::parse(&token).expect("a token"));
    let mut nodes = JoinSet::new();
    for node in 0..NODES {
        nodes.spawn(meet(daemon.endpoint.clone(), access.clone(), node));
    }
    let met = nodes.join_all().await;
    let growth = peak_bytes(daemon.pid()) - idle;
    assert!(growth < u64::from(NODES) * BYTES_A_NODE, "{growth} bytes");
    // All that a node is told, in which no other node has a part.
    let longest = met.iter().map(|(_, assignment)| assignment.encoded_len()).max();
    assert!(longest.is_some_and(|bytes| bytes < 1000), "{longest:?} bytes");
    let mut ranks: Vec<u32> = met.iter().map(|(_, assignment)| assignment.node_rank).collect();
    ranks.sort_unstable();
    assert!(ranks.into_iter().eq(0..NODES), "every rank is given once");
    drop(met);
    daemon.stop();
}
