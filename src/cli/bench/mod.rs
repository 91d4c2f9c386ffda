//! `ddp-rendezvous bench`: how long nodes take to meet, and what that takes of the daemon.
//!
//! | file | what it has |
//! |---|---|
//! | `mod` | the measurement, step by step, and its result |
//! | `agent` | a simulated agent: real gRPC, no workers |
//! | `daemon` | the daemon, a process of its own |
//!
//! All agents are tasks of this process, each with a connection of its own: the daemon needs as many descriptors as they
//! do, so more processes would make room for no more agents.

mod agent;
mod daemon;

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use ddp_proto::client::Access;
use ddp_proto::trust::token::Token;
use ddp_proto::words;
use nix::sys::resource::{Resource, getrlimit};
use serde::Serialize;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::{Instant, timeout};

use super::error::CliError;
use super::machine::limits;
use agent::{Agent, News, Order, PATIENCE, Part};
use daemon::{Daemon, own_cpu_time};

/// Agents that connect at the same time, or wait for the first answer to their `Join`: the daemon ends streams without
/// one, and a single machine cannot speak for thousands of nodes at once.
const AT_ONCE: usize = 256;
/// Descriptors beyond one for each connection.
const OTHER_FILES: u64 = 64;

/// How large the cluster is.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct Args {
    /// Nodes of each job, 2 or more: one is replaced
    #[arg(long, value_name = "N", default_value = "1000", value_parser = clap::value_parser!(u32).range(2..=16_000))]
    nodes: u32,
    /// Workers of each node
    #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u32).range(1..=4096))]
    workers: u32,
    /// Jobs at the same time
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..=1024))]
    jobs: u32,
    /// How long heartbeats are watched
    #[arg(long, value_name = "S", default_value = "12", value_parser = super::values::seconds)]
    heartbeats: Duration,
    /// Also measure how long it takes until each node has gathered one entry of each node of its job
    #[arg(long)]
    gather: bool,
    /// Without TLS
    #[arg(long)]
    insecure: bool,
    /// Print the result as one line of JSON
    #[arg(long)]
    json: bool,
}

/// What was measured.
#[derive(Debug, Default, Serialize)]
struct Measured {
    nodes: u32,
    workers: u32,
    jobs: u32,
    /// With mutual TLS.
    tls: bool,
    /// From the first connection to the last `Assignment`.
    assigned_s: f64,
    /// Processor time of the daemon meanwhile.
    assigned_cpu_s: f64,
    /// The same of all agents together.
    assigned_agents_cpu_s: f64,
    assignment_bytes: usize,
    /// From the first entry that a node writes until the last node has those of all.
    #[serde(skip_serializing_if = "Option::is_none")]
    gathered_s: Option<f64>,
    /// Of a node that is lost: from its last word to the last `Assignment` of the next generation.
    replaced_s: f64,
    /// Share of one core that the daemon takes for heartbeats.
    heartbeat_core: f64,
    /// The most memory that the daemon has had: without nodes, and after all of this.
    idle_bytes: u64,
    peak_bytes: u64,
}

/// Measures, and returns what is to be printed.
pub(super) fn run(args: Args) -> Result<String, CliError> {
    let failed = |source| CliError::Machine {
        what: "the measurement failed",
        source,
    };
    limits::raise_open_files_fully();
    let connections = u64::from(args.nodes) * u64::from(args.jobs) + 1;
    let (files, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((u64::MAX, u64::MAX));
    if files < connections + OTHER_FILES {
        return Err(failed(io::Error::other(format!(
            "{connections} connections need as many files, but this process may open only {files}\n  \
             hint: `ulimit -Hn` is the limit of files"
        ))));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let measured = runtime.and_then(|runtime| {
        let measured = runtime.block_on(measure(args));
        // Tens of thousands of tasks need not end in order.
        runtime.shutdown_background();
        measured
    });
    let measured = measured.map_err(failed)?;
    if args.json {
        let json = serde_json::to_string(&measured).map_err(io::Error::other);
        return json.map(|json| json + "\n").map_err(failed);
    }
    Ok(measured.table())
}

async fn measure(args: Args) -> io::Result<Measured> {
    let access = access(args);
    let daemon = Daemon::start(&access)?;
    let (order, orders) = watch::channel(Order::Join);
    let (news, mut told) = mpsc::unbounded_channel();
    let mut measured = Measured {
        nodes: args.nodes,
        workers: args.workers,
        jobs: args.jobs,
        tls: !args.insecure,
        idle_bytes: daemon.peak_bytes()?,
        ..Measured::default()
    };
    let (begun, cpu, agents_cpu) = (Instant::now(), daemon.cpu_time()?, own_cpu_time()?);
    let places = Arc::new(Semaphore::new(AT_ONCE));
    for part in parts(args) {
        let (orders, news) = (orders.clone(), news.clone());
        let (endpoint, places) = (daemon.endpoint().to_owned(), places.clone());
        let access = access.clone();
        tokio::spawn(async move { Agent::run((&endpoint, &access), places, part, orders, news).await });
    }
    let of_all_jobs = args.nodes as usize * args.jobs as usize;
    measured.assignment_bytes = assignments(&mut told, 1, of_all_jobs).await?;
    measured.assigned_s = begun.elapsed().as_secs_f64();
    measured.assigned_cpu_s = daemon.cpu_time()?.saturating_sub(cpu).as_secs_f64();
    measured.assigned_agents_cpu_s = own_cpu_time()?.saturating_sub(agents_cpu).as_secs_f64();

    let (begun, cpu) = (Instant::now(), daemon.cpu_time()?);
    tokio::time::sleep(args.heartbeats).await;
    let cpu = daemon.cpu_time()?.saturating_sub(cpu);
    measured.heartbeat_core = cpu.as_secs_f64() / begun.elapsed().as_secs_f64();

    if args.gather {
        let begun = Instant::now();
        order.send_replace(Order::Gather);
        for _ in 0..of_all_jobs {
            match next(&mut told).await? {
                News::Gathered => {}
                other => return Err(unexpected(&other)),
            }
        }
        measured.gathered_s = Some(begun.elapsed().as_secs_f64());
    }

    order.send_replace(Order::StandBy);
    match next(&mut told).await? {
        News::OnStandby => {}
        other => return Err(unexpected(&other)),
    }
    let begun = Instant::now();
    order.send_replace(Order::Leave);
    assignments(&mut told, 2, args.nodes as usize).await?;
    measured.replaced_s = begun.elapsed().as_secs_f64();
    measured.peak_bytes = daemon.peak_bytes()?;
    Ok(measured)
}

fn access(args: Args) -> Access {
    if args.insecure {
        Access::Open
    } else {
        Access::Token(Token::random())
    }
}

/// All agents: those of all jobs, and the one that comes later.
fn parts(args: Args) -> Vec<Part> {
    let part = |job, node| Part {
        job,
        node,
        nodes: args.nodes,
        workers: args.workers,
        leaves: job == 0 && node == args.nodes - 1,
        stands_by: false,
    };
    let jobs = (0..args.jobs).flat_map(|job| (0..args.nodes).map(move |node| (job, node)));
    let mut parts: Vec<Part> = jobs.map(|(job, node)| part(job, node)).collect();
    parts.push(Part {
        leaves: false,
        stands_by: true,
        ..part(0, args.nodes - 1)
    });
    parts
}

/// Waits until so many nodes have their ranks in this generation, each its own. Returns the bytes of one assignment.
async fn assignments(
    told: &mut mpsc::UnboundedReceiver<News>,
    expected: u64,
    count: usize,
) -> io::Result<usize> {
    let (mut ranks, mut most) = (BTreeSet::new(), 0);
    while ranks.len() < count {
        match next(told).await? {
            // It is told again as the others go on.
            News::OnStandby => {}
            News::Assigned {
                job,
                generation,
                node_rank,
                bytes,
            } if generation == expected => {
                most = most.max(bytes);
                if !ranks.insert((job, node_rank)) {
                    let words = format!("node rank {node_rank} of job {job} was given twice");
                    return Err(io::Error::other(words));
                }
            }
            other => return Err(unexpected(&other)),
        }
    }
    Ok(most)
}

async fn next(told: &mut mpsc::UnboundedReceiver<News>) -> io::Result<News> {
    match timeout(PATIENCE, told.recv()).await {
        Ok(Some(News::Failed(words))) => Err(io::Error::other(words)),
        Ok(Some(news)) => Ok(news),
        Ok(None) | Err(_) => Err(io::Error::other("the agents do not get on")),
    }
}

fn unexpected(news: &News) -> io::Error {
    io::Error::other(format!("an agent was not to say {news:?} now"))
}

impl Measured {
    /// For people.
    fn table(&self) -> String {
        let gathered = self
            .gathered_s
            .map_or_else(|| "not measured".into(), |s| format!("{s:.2} s"));
        let rows = [
            ("nodes", format!("{} of {} workers", self.nodes, self.workers)),
            ("jobs", self.jobs.to_string()),
            (
                "connections",
                (if self.tls { "mutual TLS" } else { "without TLS" }).to_owned(),
            ),
            (
                "first connection to last assignment",
                format!("{:.2} s", self.assigned_s),
            ),
            (
                "of that, processor time of the daemon",
                format!("{:.2} s", self.assigned_cpu_s),
            ),
            (
                "and of all agents",
                format!("{:.2} s", self.assigned_agents_cpu_s),
            ),
            ("one assignment", words::bytes(self.assignment_bytes as u64)),
            ("all entries gathered by all nodes", gathered),
            (
                "one node lost to last assignment",
                format!("{:.2} s", self.replaced_s),
            ),
            (
                "heartbeats",
                format!("{:.1} % of a core", self.heartbeat_core * 100.0),
            ),
            ("memory of the daemon", words::bytes(self.peak_bytes)),
            ("of that, without nodes", words::bytes(self.idle_bytes)),
        ];
        let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let lines = rows.iter().map(|(name, value)| format!("{name:width$}  {value}"));
        lines.collect::<Vec<_>>().join("\n") + "\n"
    }
}
