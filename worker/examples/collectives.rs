//! Measures all-reduce: median, minimum and maximum of 20 samples, and the bandwidth, by size.
//!
//! ```text
//! ddp-run --nproc-per-node 2 -- target/release/examples/collectives         is one rank of a job
//! cargo run --release -p ddp-worker --example collectives -- --ranks 2     starts its own ranks, without a launcher
//! ```
//!
//! Under `ddp-run` it meets the other ranks through its `Session`, as any worker does. Ranks that it starts itself
//! have no agent; a folder that is deleted with them serves as their key-value store.
//!
//! `--sizes 4096,26214400` chooses the sizes in bytes, `--private` measures buffers that peers cannot map,
//! `--nodes 2` divides the ranks it starts among nodes that talk over TCP, `--operation` is `all-reduce`,
//! `reduce-scatter`, `all-gather` or `broadcast`. `--other` exchanges small sizes as losses and norms are, in one step,
//! and `--tree true` or `false` says how these cross between nodes.

use std::error::Error;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ddp_proto::env::WorkerEnv;
use ddp_proto::trust::data_key::{DATA_KEY_BYTES, DataKey};
use ddp_worker::collective::{Communicator, Executor, Launch, RankInfo, ReduceOp, Traffic, Work, connect};
use ddp_worker::device::{ArenaSpec, Buffer, CpuDevice, DType, Device};
use ddp_worker::parallel::{JoinOptions, join_world};
use ddp_worker::session::{Entries, KeyValue, Session, StoreError};

const TIMEOUT: Duration = Duration::from_mins(1);
const SAMPLES: usize = 20;
const WARM_UP: usize = 3;
/// Where ranks without a launcher meet.
const STORE: &str = "COLLECTIVES_STORE";

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse(std::env::args().skip(1))?;
    if let Some(ranks) = options.ranks {
        return start_ranks(ranks, &options);
    }
    let session = session()?;
    let measured = measure(&session, &options);
    if let Err(error) = &measured {
        session.fail(&error.to_string(), None, false);
    }
    session.shutdown();
    measured
}

#[derive(Debug)]
struct Options {
    ranks: Option<usize>,
    nodes: usize,
    sizes: Vec<usize>,
    private: bool,
    operation: String,
    traffic: Traffic,
    tree: Option<bool>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mut options = Self {
            ranks: None,
            nodes: 1,
            sizes: vec![4096, 65536, 1_048_576, 26_214_400, 104_857_600],
            private: false,
            operation: "all-reduce".into(),
            traffic: Traffic::Grads,
            tree: None,
        };
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("`{arg}` needs a value"));
            match arg.as_str() {
                "--ranks" => options.ranks = Some(value()?.parse()?),
                "--nodes" => options.nodes = value()?.parse()?,
                "--sizes" => options.sizes = value()?.split(',').map(str::parse).collect::<Result<_, _>>()?,
                "--private" => options.private = true,
                "--operation" => options.operation = value()?,
                "--other" => options.traffic = Traffic::Other,
                "--tree" => options.tree = Some(value()?.parse()?),
                other => return Err(format!("unknown argument `{other}`").into()),
            }
        }
        Ok(options)
    }
}

/// Starts this program once a rank, with the environment of a worker and a folder as the key-value store.
fn start_ranks(ranks: usize, options: &Options) -> Result<(), Box<dyn Error>> {
    if !ranks.is_multiple_of(options.nodes) {
        return Err(format!("{ranks} ranks cannot be divided among {} nodes", options.nodes).into());
    }
    let folder = tempfile::tempdir()?;
    let local = ranks / options.nodes;
    let rank_of = |rank: usize| {
        let mut command = Command::new(std::env::current_exe()?);
        let variables = [
            ("RANK", rank),
            ("WORLD_SIZE", ranks),
            ("LOCAL_RANK", rank % local),
            ("LOCAL_WORLD_SIZE", local),
            ("GROUP_RANK", rank / local),
            ("GROUP_WORLD_SIZE", options.nodes),
            ("MASTER_PORT", 0),
        ];
        command.envs(variables.map(|(name, value)| (name, value.to_string())));
        command
            .env("MASTER_ADDR", "127.0.0.1")
            .env(STORE, folder.path())
            .args(["--operation", &options.operation]);
        let sizes: Vec<_> = options.sizes.iter().map(usize::to_string).collect();
        command
            .args(["--sizes", &sizes.join(",")])
            .args(options.private.then_some("--private"))
            .args((options.traffic == Traffic::Other).then_some("--other"));
        if let Some(tree) = options.tree {
            command.args(["--tree", &tree.to_string()]);
        }
        command.spawn()
    };
    let children: Vec<Child> = (0..ranks).map(rank_of).collect::<Result<_, _>>()?;
    let mut failed = false;
    for mut child in children {
        failed |= !child.wait()?.success();
    }
    folder.close()?;
    if failed {
        Err("a rank failed".into())
    } else {
        Ok(())
    }
}

/// A folder as a key-value store: enough for ranks on one machine, without a launcher.
struct Folder(PathBuf);

impl KeyValue for Folder {
    fn put(&self, key: &str, value: &[u8], _: Instant) -> Result<(), StoreError> {
        let path = self.0.join(key.replace('/', "-"));
        let unfinished = path.with_extension("unfinished");
        let written = std::fs::write(&unfinished, value).and_then(|()| std::fs::rename(&unfinished, path));
        written.map_err(|e| StoreError::Refused(e.to_string()))
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        loop {
            if let Ok(value) = std::fs::read(self.0.join(key.replace('/', "-"))) {
                return Ok(Some(value));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn gather(&self, prefix: &str, count: usize, deadline: Instant) -> Result<Option<Entries>, StoreError> {
        let entries = (0..count).map(|rank| {
            let key = format!("{prefix}{rank}");
            Ok(self.get(&key, deadline)?.map(|value| (key, value)))
        });
        entries.collect()
    }
}

/// The link to the job: to its agent, or, for ranks that were started here, to their folder.
fn session() -> Result<Session, Box<dyn Error>> {
    match std::env::var_os(STORE) {
        Some(folder) => {
            let env = WorkerEnv::parse(|name| std::env::var(name).ok())?;
            let session = Session::in_process(env, Arc::new(Folder(folder.into())));
            // All ranks are on this machine, and all talk over the loopback interface.
            Ok(session.with_data_key(DataKey::new([7; DATA_KEY_BYTES])))
        }
        None => Ok(Session::from_env()?),
    }
}

fn measure(session: &Session, options: &Options) -> Result<(), Box<dyn Error>> {
    let comm = join(session, options.tree)?;
    let device: Arc<dyn Device> = Arc::new(CpuDevice::new(1)?);
    let bench = Bench {
        comm: &comm,
        device: &device,
        options,
    };
    if comm.rank() == 0 {
        println!(
            "{:>12} {:>12} {:>12} {:>12} {:>10} {:>10} {:>12}",
            "bytes", "median us", "min us", "max us", "alg GB/s", "bus GB/s", "copy us"
        );
    }
    for &size in &options.sizes {
        bench.size(size)?;
    }
    Ok(())
}

/// All ranks. On the nodes of this machine, `tree` says how small operations cross between them.
fn join(session: &Session, tree: Option<bool>) -> Result<Communicator, Box<dyn Error>> {
    if tree.is_none() {
        let join = JoinOptions {
            executor: Executor::Inline,
            threads: 1,
            timeout: TIMEOUT,
        };
        return Ok(join_world(session, &join)?);
    }
    let env = session.env();
    let [rank, size] = [env.rank.get(), env.world_size.get()].map(|number| number as usize);
    let info = RankInfo {
        local_rank: env.local_rank.get() as usize,
        local_world_size: env.local_world_size as usize,
        node_rank: env.node_rank.get() as usize,
        data_key: session.data_key().cloned(),
        tree,
        ..RankInfo::on_one_node(rank, size)
    };
    let (store, cancel) = (session.store(), session.cancel());
    let transport = connect(&info, store.as_ref(), &cancel, TIMEOUT)?;
    Ok(Communicator::new(
        "world",
        transport,
        Executor::Inline,
        TIMEOUT,
        &cancel,
    ))
}

struct Bench<'a> {
    comm: &'a Communicator,
    device: &'a Arc<dyn Device>,
    options: &'a Options,
}

impl Bench<'_> {
    fn size(&self, size: usize) -> Result<(), Box<dyn Error>> {
        let arena = self.arena("buffer", size / 4)?;
        let buffer = arena.whole();
        for _ in 0..WARM_UP {
            wait(&self.operation(&buffer))?;
        }
        let batch = (4_000_000 / size.max(1)).clamp(1, 200);
        let samples = self.samples(|| {
            for _ in 0..batch {
                wait(&self.operation(&buffer))?;
            }
            Ok(())
        })?;
        let bound = self.bound(size)?;
        let [median, least, most] = samples.map(|s| s / batch as f64);
        let rate = size as f64 / median / 1e9;
        if self.comm.rank() == 0 {
            // An all-reduce moves 2(N−1)/N of it on each rank.
            let ranks = self.comm.size() as f64;
            let bus = 2.0 * (ranks - 1.0) / ranks * rate;
            println!(
                "{size:>12} {:>12.1} {:>12.1} {:>12.1} {rate:>10.2} {bus:>10.2} {:>12.1}",
                median * 1e6,
                least * 1e6,
                most * 1e6,
                bound * 1e6
            );
        }
        Ok(())
    }

    /// What memory allows: all ranks at once copy as many bytes, private to private. An all-reduce of two ranks
    /// reads and writes as much on each.
    fn bound(&self, bytes: usize) -> Result<f64, Box<dyn Error>> {
        let from = vec![1_u8; bytes];
        let mut to = vec![0_u8; bytes];
        let [median, ..] = self.samples(|| {
            to.copy_from_slice(std::hint::black_box(&from));
            std::hint::black_box(&mut to);
            Ok(())
        })?;
        Ok(median)
    }

    /// Median, least and most seconds of the slowest rank.
    fn samples(
        &self,
        mut body: impl FnMut() -> Result<(), Box<dyn Error>>,
    ) -> Result<[f64; 3], Box<dyn Error>> {
        let time = self.arena("time", 1)?.whole();
        let mut samples = Vec::with_capacity(SAMPLES);
        for _ in 0..SAMPLES {
            wait(&self.comm.barrier(&time, Launch::now(Traffic::Other, "samples")))?;
            let started = Instant::now();
            body()?;
            time.host_mut::<f32>()?[0] = started.elapsed().as_secs_f32();
            wait(
                &self
                    .comm
                    .all_reduce(&time, ReduceOp::Max, Launch::now(Traffic::Other, "slowest")),
            )?;
            samples.push(f64::from(time.host::<f32>()?[0]));
        }
        samples.sort_by(f64::total_cmp);
        Ok([samples[SAMPLES / 2], samples[0], samples[SAMPLES - 1]])
    }

    fn operation(&self, buffer: &Buffer) -> Work {
        let launch = Launch::now(self.options.traffic, "bench");
        let sum = ReduceOp::Sum;
        match self.options.operation.as_str() {
            "reduce-scatter" => self.comm.reduce_scatter(buffer, sum, launch),
            "all-gather" => self.comm.all_gather(buffer, launch),
            "broadcast" => self.comm.broadcast(buffer, 0, launch),
            _ => self.comm.all_reduce(buffer, sum, launch),
        }
    }

    fn arena(&self, name: &str, len: usize) -> Result<ddp_worker::device::Arena, Box<dyn Error>> {
        if self.options.private {
            return Ok(self.device.alloc(&ArenaSpec::private(name, DType::F32, len))?);
        }
        let spec = ArenaSpec::on_node(name, DType::F32, len);
        Ok(self.comm.alloc_shared(self.device, &spec)?)
    }
}

fn wait(work: &Work) -> Result<(), Box<dyn Error>> {
    work.wait(Instant::now() + 2 * TIMEOUT)?;
    Ok(())
}
