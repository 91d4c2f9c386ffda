//! Ranks as processes on one GPU: this test binary starts itself again, once a rank.
//!
//! NCCL refuses two ranks of one host on one card. From 2.30 on `NCCL_MULTI_RANK_GPU_ENABLE` allows it; before that,
//! ranks that name different hosts are let in, and talk over the loopback interface.

pub(crate) mod timeline;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ddp_worker::collective::nccl::{Membership, Nccl, NcclTransport};
use ddp_worker::collective::{Communicator, Executor, Failure, RankInfo, connect};
use ddp_worker::cuda::{CudaOptions, KernelCache};
use ddp_worker::device::{CpuDevice, CudaDevice, Device};
use ddp_worker::session::{Cancel, Entries, KeyValue, StoreError};

/// What a rank is to do, by the name of a test that does nothing unless it is a rank.
const RANK: &str = "DDP_TEST_RANK";
const WORLD: &str = "DDP_TEST_WORLD";
const FOLDER: &str = "DDP_TEST_STORE";

/// No rank takes longer.
pub(crate) const PATIENCE: Duration = Duration::from_mins(10);

/// Bound of each operation.
pub(crate) const TIMEOUT: Duration = Duration::from_mins(10);

/// NCCL, where there is a GPU too; otherwise none, after a loud word.
pub(crate) fn nccl_and_gpu() -> Option<Nccl> {
    let found = open_gpu()
        .map_err(|e| e.to_string())
        .and_then(|_| Nccl::load().map_err(|e| e.to_string()));
    match found {
        Ok(nccl) => {
            eprintln!("{nccl:?}");
            Some(nccl)
        }
        Err(why) => {
            let required = std::env::var("DDP_REQUIRE_GPU").is_ok_and(|value| value == "1");
            assert!(!required, "{why}");
            eprintln!("SKIPPED, NCCL was not run between ranks: {why}");
            None
        }
    }
}

fn open_gpu() -> Result<CudaDevice, ddp_worker::device::DeviceError> {
    CudaDevice::open(CudaOptions {
        cache: KernelCache::of_user(),
        ..CudaOptions::default()
    })
}

/// Runs the test `name` of this binary in `size` processes, each of them one rank, and waits for them.
pub(crate) fn run_ranks(nccl: &Nccl, name: &str, size: usize) -> Vec<ExitStatus> {
    let folder = tempfile::tempdir().unwrap();
    let ranks: Vec<Child> = (0..size)
        .map(|rank| start(nccl, name, (rank, size), folder.path()))
        .collect();
    let deadline = Instant::now() + PATIENCE;
    ranks.into_iter().map(|rank| finish(rank, deadline)).collect()
}

fn start(nccl: &Nccl, name: &str, (rank, size): (usize, usize), folder: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", name, "--nocapture", "--test-threads", "1"])
        .env(RANK, rank.to_string())
        .env(WORLD, size.to_string())
        .env(FOLDER, folder)
        .stdin(Stdio::null());
    if (nccl.version().major, nccl.version().minor) >= (2, 30) {
        command.env("NCCL_MULTI_RANK_GPU_ENABLE", "1");
    } else {
        command.env("NCCL_HOSTID", format!("rank-{rank}"));
        command.env("NCCL_SOCKET_IFNAME", "lo").env("NCCL_NET", "Socket");
    }
    command.spawn().unwrap()
}

fn finish(mut rank: Child, deadline: Instant) -> ExitStatus {
    loop {
        if let Some(status) = rank.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > deadline {
            rank.kill().unwrap();
            return rank.wait().unwrap();
        }
        std::thread::park_timeout(Duration::from_millis(10));
    }
}

/// One rank before it has connected over NCCL.
pub(crate) struct Place {
    pub(crate) number: usize,
    pub(crate) size: usize,
    pub(crate) gpu: Arc<dyn Device>,
    pub(crate) over_memory: Communicator,
    pub(crate) cancel: Cancel,
    store: Arc<FileStore>,
}

impl Place {
    /// None if this process is not a rank.
    pub(crate) fn of_process() -> Option<Self> {
        let number = |name: &str| std::env::var(name).ok()?.parse::<usize>().ok();
        let (number, size) = (number(RANK)?, number(WORLD)?);
        let store = Arc::new(FileStore(std::env::var_os(FOLDER)?.into()));
        let cancel = Cancel::new();
        let info = RankInfo::on_one_node(number, size);
        let transport = connect(&info, store.as_ref(), &cancel, TIMEOUT).unwrap();
        Some(Self {
            number,
            size,
            gpu: Arc::new(open_gpu().unwrap()),
            over_memory: Communicator::new("memory", transport, Executor::Inline, TIMEOUT, &cancel),
            cancel,
            store,
        })
    }

    /// The group over NCCL, on a device. `timeout` is that of its operations.
    pub(crate) fn connect(
        &self,
        device: &Arc<dyn Device>,
        timeout: Duration,
    ) -> Result<NcclTransport, Failure> {
        let world = Membership {
            name: "world".into(),
            rank: self.number,
            members: (0..self.size).collect(),
            timeout,
            cancel: self.cancel.clone(),
        };
        NcclTransport::connect(&Nccl::load().unwrap(), device, self.store.clone(), world)
    }
}

/// One rank at work: the same group twice, over NCCL and over shared memory.
pub(crate) struct Rank {
    pub(crate) number: usize,
    pub(crate) size: usize,
    pub(crate) gpu: Arc<dyn Device>,
    pub(crate) cpu: Arc<dyn Device>,
    pub(crate) over_nccl: Communicator,
    pub(crate) over_memory: Communicator,
    pub(crate) cancel: Cancel,
}

impl Rank {
    /// None if this process is not a rank. `timeout` is that of NCCL's operations.
    pub(crate) fn of_process(timeout: Duration) -> Option<Self> {
        let place = Place::of_process()?;
        let transport = match place.connect(&place.gpu, timeout) {
            Ok(transport) => transport,
            Err(failure) => panic!("NCCL connects: {failure}"),
        };
        let Place {
            number,
            size,
            gpu,
            over_memory,
            cancel,
            ..
        } = place;
        Some(Self {
            number,
            size,
            over_nccl: Communicator::new("world", Box::new(transport), Executor::Inline, timeout, &cancel),
            over_memory,
            gpu,
            cpu: Arc::new(CpuDevice::new(1).unwrap()),
            cancel,
        })
    }
}

/// A file a key.
struct FileStore(PathBuf);

impl FileStore {
    fn path(&self, key: &str) -> PathBuf {
        self.0.join(key.replace('/', "_"))
    }
}

impl KeyValue for FileStore {
    fn put(&self, key: &str, value: &[u8], _: Instant) -> Result<(), StoreError> {
        let refused = |error: std::io::Error| StoreError::Refused(error.to_string());
        let draft = self.path(&format!("{key}.{}", std::process::id()));
        std::fs::write(&draft, value).map_err(refused)?;
        std::fs::rename(draft, self.path(key)).map_err(refused)
    }

    fn get(&self, key: &str, deadline: Instant) -> Result<Option<Vec<u8>>, StoreError> {
        loop {
            if let Ok(value) = std::fs::read(self.path(key)) {
                return Ok(Some(value));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }

    fn gather(&self, prefix: &str, count: usize, deadline: Instant) -> Result<Option<Entries>, StoreError> {
        loop {
            // Of ranks, one digit each.
            let keys = (0..10).map(|rank| format!("{prefix}{rank}"));
            let entries = keys.filter_map(|key| Some((key.clone(), std::fs::read(self.path(&key)).ok()?)));
            let entries: Entries = entries.collect();
            if entries.len() >= count || Instant::now() >= deadline {
                return Ok((entries.len() >= count).then_some(entries));
            }
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }
}
