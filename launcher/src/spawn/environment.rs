//! The complete environment of a worker.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::net::IpAddr;
use std::path::Path;

use ddp_proto::env::{DDP_JOB_MARKER, DDP_LOCAL_RANK, DDP_PROGRESS, SCRUBBED, WorkerEnv};
use nix::ifaddrs::getifaddrs;

use crate::cgroup::usable_cores;
use crate::plan::LaunchPlan;

const OMP_NUM_THREADS: &str = "OMP_NUM_THREADS";
const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// Takes precedence on ROCm.
const HIP_VISIBLE_DEVICES: &str = "HIP_VISIBLE_DEVICES";
/// Hardware queues of a GPU. With the 8 of the default, a stream that waits for another rank can hold up one that computes.
const MAX_CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// Where NCCL finds other nodes. By itself it takes the first interface that is up.
const NCCL_INTERFACE: &str = "NCCL_SOCKET_IFNAME";
const ASYNC_ERROR_HANDLING: &str = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
/// Collectives that PyTorch's flight recorder keeps, for a report of a hang. PyTorch 2.15 keeps as many by itself.
const RECORDED_COLLECTIVES: (&str, &str) = ("TORCH_FR_BUFFER_SIZE", "2000");

/// What all workers of one launcher have in common.
#[derive(Clone, Debug)]
pub(crate) struct Common<'a> {
    /// Environment of the launcher.
    pub(crate) inherited: &'a [(OsString, OsString)],
    /// Value of `DDP_JOB_MARKER`.
    pub(crate) marker: &'a str,
    /// Threads for OpenMP, unless the user set it.
    pub(crate) threads: usize,
    /// They are `ddp-train`.
    pub(crate) native: bool,
    /// Address of this node in a job of several.
    pub(crate) node_addr: Option<&'a str>,
    /// The launcher draws a progress bar.
    pub(crate) progress_bar: bool,
    /// Every worker is local rank 0 and sees its own GPU only.
    pub(crate) virtual_local_rank: bool,
}

impl<'a> Common<'a> {
    pub(crate) fn new(plan: &'a LaunchPlan, inherited: &'a [(OsString, OsString)], marker: &'a str) -> Self {
        Self {
            inherited,
            marker,
            threads: threads_per_worker(plan.workers),
            native: plan.command.native,
            node_addr: None,
            progress_bar: plan.progress_bar,
            virtual_local_rank: plan.virtual_local_rank,
        }
    }
}

/// In rising order of precedence: defaults, inherited variables, the contract.
pub(crate) fn of_worker(common: &Common<'_>, contract: &WorkerEnv) -> Vec<(OsString, OsString)> {
    let mut env: BTreeMap<OsString, OsString> = BTreeMap::new();
    env.insert(OMP_NUM_THREADS.into(), common.threads.to_string().into());
    env.insert(ASYNC_ERROR_HANDLING.into(), "1".into());
    // PyTorch reads the older name after this one.
    if std::env::var_os("TORCH_NCCL_TRACE_BUFFER_SIZE").is_none() {
        env.insert(RECORDED_COLLECTIVES.0.into(), RECORDED_COLLECTIVES.1.into());
    }
    if common.native {
        env.insert(MAX_CONNECTIONS.into(), "32".into());
        // A variable would take precedence over these files.
        let home = std::env::home_dir().unwrap_or_default();
        let files = [Path::new("/etc/nccl.conf"), &home.join(".nccl.conf")];
        if let Some(interface) = common.node_addr.and_then(interface_of)
            && !files.iter().any(|file| file.exists())
        {
            env.insert(NCCL_INTERFACE.into(), format!("={interface}").into());
        }
    }
    let inherited = common.inherited.iter().filter(|(name, _)| !is_scrubbed(name));
    env.extend(inherited.cloned());
    env.extend(
        contract
            .to_vars()
            .into_iter()
            .map(|(name, value)| (name.into(), value.into())),
    );
    env.insert(DDP_JOB_MARKER.into(), common.marker.into());
    if common.progress_bar {
        env.insert(DDP_PROGRESS.into(), "bar".into());
    }
    if common.virtual_local_rank {
        let of = |name: &str| {
            env.get(OsStr::new(name))?
                .to_str()
                .filter(|list| !list.is_empty())
        };
        let hip = of(HIP_VISIBLE_DEVICES).is_some();
        let visible = of(HIP_VISIBLE_DEVICES).or_else(|| of(VISIBLE_DEVICES));
        let own = own_device(visible, contract.local_rank.0);
        if hip {
            env.insert(HIP_VISIBLE_DEVICES.into(), own.clone().into());
        }
        env.insert(VISIBLE_DEVICES.into(), own.into());
        env.insert("LOCAL_RANK".into(), "0".into());
        env.insert(DDP_LOCAL_RANK.into(), contract.local_rank.to_string().into());
    }
    env.into_iter().collect()
}

/// The network interface that has this address.
fn interface_of(address: &str) -> Option<String> {
    let wanted: IpAddr = address.trim_matches(['[', ']']).parse().ok()?;
    let found = getifaddrs().ok()?.find(|interface| {
        let address = interface.address.as_ref();
        let v4 = address.and_then(|at| Some(IpAddr::from(at.as_sockaddr_in()?.ip())));
        v4.or_else(|| Some(IpAddr::from(address?.as_sockaddr_in6()?.ip()))) == Some(wanted)
    });
    found.map(|interface| interface.interface_name)
}

/// The one device of a worker, out of those that are visible to all; a rank beyond the list sees none.
fn own_device(visible: Option<&str>, local_rank: u32) -> String {
    match visible.map(str::trim).filter(|list| !list.is_empty()) {
        None => local_rank.to_string(),
        Some(list) => {
            let device = list.split(',').nth(local_rank as usize);
            device.unwrap_or_default().trim().to_owned()
        }
    }
}

/// No worker inherits it.
pub(crate) fn is_scrubbed(name: &OsStr) -> bool {
    SCRUBBED.iter().any(|scrubbed| name == *scrubbed)
}

/// Cores for each of `workers`, at least one.
pub(crate) fn threads_per_worker(workers: u32) -> usize {
    (usable_cores() / workers.max(1) as usize).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env_of(inherited: &[(&str, &str)]) -> BTreeMap<String, String> {
        let inherited: Vec<_> = inherited
            .iter()
            .map(|(n, v)| (OsString::from(n), OsString::from(v)))
            .collect();
        let common = Common {
            inherited: &inherited,
            marker: "outer/me",
            threads: 3,
            native: true,
            node_addr: Some("127.0.0.1"),
            progress_bar: false,
            virtual_local_rank: inherited.iter().any(|(name, _)| name == "HIP_VISIBLE_DEVICES"),
        };
        let env = of_worker(&common, &WorkerEnv::single());
        let text = |s: OsString| s.into_string().unwrap();
        env.into_iter().map(|(n, v)| (text(n), text(v))).collect()
    }

    #[test]
    fn rank_variables_are_not_inherited() {
        let env = env_of(&[
            ("RANK", "7"),
            ("TORCHELASTIC_ERROR_FILE", "/x"),
            ("DDP_PROGRESS", "bar"),
            ("HOME", "/root"),
        ]);
        assert_eq!(env["RANK"], "0");
        assert_eq!(env["HOME"], "/root");
        assert_eq!(env[DDP_JOB_MARKER], "outer/me");
        assert!(!env.contains_key("TORCHELASTIC_ERROR_FILE"));
        assert!(!env.contains_key(DDP_PROGRESS));
    }

    #[test]
    fn what_the_user_set_is_kept() {
        let env = env_of(&[(OMP_NUM_THREADS, "16")]);
        assert_eq!(env[OMP_NUM_THREADS], "16");
        assert_eq!(env[MAX_CONNECTIONS], "32");
        assert_eq!(env_of(&[(MAX_CONNECTIONS, "1")])[MAX_CONNECTIONS], "1");
        assert_eq!(env[NCCL_INTERFACE], "=lo", "that of the node's address");
        assert_eq!(env_of(&[(NCCL_INTERFACE, "ib0")])[NCCL_INTERFACE], "ib0");
        assert_eq!(env[ASYNC_ERROR_HANDLING], "1");
        let env = env_of(&[(ASYNC_ERROR_HANDLING, "3")]);
        assert_eq!(
            (env[OMP_NUM_THREADS].as_str(), env[ASYNC_ERROR_HANDLING].as_str()),
            ("3", "3")
        );
    }

    #[test]
    fn a_virtual_local_rank_sees_one_device() {
        assert_eq!(own_device(None, 2), "2");
        assert_eq!(own_device(Some("4, 6,7"), 1), "6");
        assert_eq!(own_device(Some("4"), 1), "", "there is no second one");
        let env = env_of(&[(HIP_VISIBLE_DEVICES, "5,6"), (VISIBLE_DEVICES, "1,2")]);
        let devices = [HIP_VISIBLE_DEVICES, VISIBLE_DEVICES].map(|name| env[name].as_str());
        assert_eq!(devices, ["5", "5"], "as torchrun");
    }

    #[test]
    fn every_worker_has_a_core() {
        assert!(threads_per_worker(1) >= 1);
        assert_eq!(threads_per_worker(100_000), 1);
    }
}
