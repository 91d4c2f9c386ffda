//! How long N nodes take to meet, and what that takes of the daemon: clients in one process, as
//! `tests/peers/rendezvous.py` does it with torchrun's rendezvous, and `ddp-rendezvous serve` in another.
//!
//! `rendezvous [--turns T] [--tls] [--load] N…` prints a line of medians for each N: from the first node that joins to the
//! last that has its rank, with all connections made before, and the same with them. With `--tls`, connections have
//! the token. With `--load`, it also prints the daemon's processor time of a turn and the most memory that it has had.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ddp_proto::client::{Access, AgentIdentity, AgentStream, Client};
use ddp_proto::ids::{Generation, NodeId};
use ddp_proto::rendezvous::agent_message::Body;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{Assignment, Join};
use ddp_proto::trust::token::Token;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

/// Of every wait.
const PATIENCE: Duration = Duration::from_mins(5);

type Failure = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let (mut turns, mut access, mut shows_load) = (5, Access::Open, false);
    let mut sizes = Vec::new();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--turns" => turns = words.next().ok_or("--turns T")?.parse::<usize>()?.max(1),
            "--tls" => access = Access::Token(Token::random()),
            "--load" => shows_load = true,
            number => sizes.push(number.parse::<u32>()?),
        }
    }
    // Two ends of a connection for each node.
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let daemon = Daemon::start(&access)?;
    for nodes in sizes {
        let mut times = Vec::new();
        let cpu_before = daemon.cpu_s()?;
        for turn in 0..turns {
            times.push(
                meet(
                    &daemon.endpoint,
                    &access,
                    &format!("{nodes} nodes, turn {turn}"),
                    nodes,
                )
                .await?,
            );
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
        if shows_load {
            let cpu = (daemon.cpu_s()? - cpu_before) / turns as f64;
            println!(
                "daemon: {cpu:.2} s of processor time a turn, {} MiB at most",
                daemon.peak_mib()?
            );
        }
    }
    Ok(())
}

/// `ddp-rendezvous serve` of the same build, which ends with this value.
struct Daemon {
    process: Child,
    endpoint: String,
}

impl Daemon {
    fn start(access: &Access) -> Result<Self, Failure> {
        // Examples lie in a folder beside the programs.
        let program = std::env::current_exe()?.with_file_name("../ddp-rendezvous");
        let mut command = Command::new(program);
        command.args(["serve", "--listen", "127.0.0.1:0"]);
        match access.token() {
            Some(token) => command.env("DDP_TOKEN", token.reveal()),
            None => command.arg("--insecure"),
        };
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().ok_or("no output")?).read_line(&mut line)?;
        let endpoint = line.trim().to_owned();
        Ok(Self { process, endpoint })
    }

    fn cpu_s(&self) -> Result<f64, Failure> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process.id()))?;
        // The name, in brackets, may contain anything. After it, utime and stime are the 12th and 13th field.
        let (_, fields) = stat.rsplit_once(") ").ok_or("no such fields")?;
        let ticks = fields.split(' ').skip(11).take(2).map(str::parse::<u64>);
        Ok(ticks.sum::<Result<u64, _>>()? as f64 / 100.0)
    }

    fn peak_mib(&self) -> Result<u64, Failure> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = peak
            .and_then(|peak| peak.trim().strip_suffix(" kB"))
            .ok_or("no peak")?;
        Ok(kib.trim().parse::<u64>()? >> 10)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

struct Meeting {
    /// Until all nodes were connected.
    connected: Duration,
    /// From then until all had their ranks.
    joined: Duration,
}

async fn meet(endpoint: &str, access: &Access, job: &str, nodes: u32) -> Result<Meeting, Failure> {
    let begun = Instant::now();
    let mut connecting = JoinSet::new();
    for node in 0..nodes {
        connecting.spawn(connect(endpoint.to_owned(), access.clone(), job.to_owned(), node));
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

async fn connect(
    endpoint: String,
    access: Access,
    job_id: String,
    node: u32,
) -> Result<(u32, AgentStream), Failure> {
    let client = Client::connect(&endpoint, &access, Instant::now() + PATIENCE).await?;
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
    agent.send(Generation(0), "", Body::Join(join))?;
    loop {
        let message = timeout(PATIENCE, agent.next()).await??;
        match message.body {
            Some(Reply::Assignment(Assignment { node_rank, .. })) => return Ok((agent, node_rank)),
            Some(Reply::Refused(refused)) => return Err(format!("{refused:?}").into()),
            _ => {}
        }
    }
}
