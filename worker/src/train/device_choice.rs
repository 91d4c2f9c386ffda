//! Which device this rank trains on.

use std::sync::Arc;

use super::TrainError;
use super::reporting::warn;
use crate::collective::nccl::{Nccl, Version};
use crate::config::{Backend, Precision, TrainConfig};
use crate::device::cuda::{CubinCache, CudaDevice, CudaOptions, count_devices};
use crate::device::{CpuDevice, Device, DeviceError};
use crate::session::Session;

/// With this variable NCCL lets several ranks share a GPU, and so do we.
const SHARE_GPUS: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// Ranks that name different hosts may share a GPU with any NCCL.
const HOST_NAME: &str = "NCCL_HOSTID";

/// With this variable set to 1, a GELU belongs to the matrix product beside it. An experiment: whether it pays depends
/// on the library's version and the sizes, and losses differ in the last bits.
const FUSED_GELU: &str = "DDP_FUSED_GELU";

/// Where a rank computes.
pub(super) enum Choice {
    /// On what the caller brought.
    Given(Arc<dyn Device>),
    /// On the processor.
    Cpu,
    /// On the GPU of this number, among the visible ones.
    Gpu(usize),
}

/// What a choice depends on.
struct Situation {
    backend: Backend,
    precision: Precision,
    /// GPUs that the driver shows, or why it shows none.
    gpus: Result<usize, DeviceError>,
    local_rank: usize,
    local_world_size: usize,
    sharing: GpuSharing,
}

/// Whether ranks may share a GPU.
#[derive(Clone, Copy, Debug)]
enum GpuSharing {
    /// Nobody asked for it.
    No,
    Yes,
    /// NCCL of this version refuses it.
    Refused(Version),
}

impl GpuSharing {
    /// What the environment asks for and NCCL allows. That there is no NCCL is said where it is needed.
    fn here() -> Self {
        if is_set(SHARE_GPUS) {
            let version = Nccl::load().ok().map(|nccl| nccl.version());
            Self::asked(version, std::env::var_os(HOST_NAME).is_some())
        } else {
            Self::No
        }
    }

    /// With this version, and with a name for the host or without.
    fn asked(nccl: Option<Version>, host_named: bool) -> Self {
        match nccl {
            Some(version) if !version.is_at_least(2, 30) && !host_named => Self::Refused(version),
            _ => Self::Yes,
        }
    }
}

impl Situation {
    /// The decision. All ranks of a node decide alike, all nodes only if they have GPUs alike, which the check that
    /// ranks agree makes sure of.
    fn decide(&self) -> Result<Choice, TrainError> {
        let wanted = match self.backend {
            Backend::Cpu => false,
            Backend::Nccl => true,
            Backend::Auto => matches!(self.gpus, Ok(count) if count > 0),
        };
        if !wanted {
            return match self.precision {
                Precision::Tf32 => Err(TrainError::NeedsGpu {
                    key: "train.precision: tf32",
                    why: self.why_no_gpu(),
                }),
                Precision::F32 | Precision::Bf16 => Ok(Choice::Cpu),
            };
        }
        let count = match &self.gpus {
            Ok(count) if *count > 0 => *count,
            _ => {
                return Err(TrainError::NeedsGpu {
                    key: "parallel.backend: nccl",
                    why: self.why_no_gpu(),
                });
            }
        };
        let (gpus, workers) = (count, self.local_world_size);
        match self.sharing {
            GpuSharing::No if workers > gpus => return Err(TrainError::TooFewGpus { gpus, workers }),
            GpuSharing::Refused(nccl) if workers > gpus => {
                return Err(TrainError::SharedGpu { gpus, workers, nccl });
            }
            _ => {}
        }
        Ok(Choice::Gpu(self.local_rank % count))
    }

    fn why_no_gpu(&self) -> String {
        match (&self.backend, &self.gpus) {
            (Backend::Cpu, _) => "`parallel.backend` is `cpu`".to_owned(),
            (_, Ok(_)) => "the driver shows no GPU".to_owned(),
            (_, Err(error)) => error.to_string(),
        }
    }
}

impl Choice {
    /// For this rank; `given` is the device that the caller brought.
    pub(super) fn of(
        config: &TrainConfig,
        session: &Session,
        given: Option<Arc<dyn Device>>,
    ) -> Result<Self, TrainError> {
        if let Some(device) = given {
            return Ok(Self::Given(device));
        }
        let backend = config.parallel.backend;
        let env = session.env();
        // The driver takes a second to start: it is not asked in vain.
        let gpus = if backend == Backend::Cpu {
            Ok(0)
        } else {
            count_devices()
        };
        if let (Backend::Auto, Err(DeviceError::Library(error))) = (backend, &gpus)
            && !error.is_absence()
        {
            warn(&format!("no GPU is used: {error}"));
        }
        let situation = Situation {
            backend,
            precision: config.train.precision,
            gpus,
            local_rank: env.local_rank.get() as usize,
            local_world_size: env.local_world_size as usize,
            sharing: GpuSharing::here(),
        };
        situation.decide()
    }

    /// Kind of device, which all ranks must have in common.
    pub(super) const fn kind(&self) -> &'static str {
        match self {
            Self::Given(_) => "the caller's",
            Self::Cpu => "cpu",
            Self::Gpu(_) => "cuda",
        }
    }

    /// Opens the device; a CPU with so many threads.
    pub(super) fn open(self, config: &TrainConfig, threads: usize) -> Result<Arc<dyn Device>, TrainError> {
        Ok(match self {
            Self::Given(device) => device,
            Self::Cpu => Arc::new(CpuDevice::new(threads)?),
            Self::Gpu(ordinal) => Arc::new(CudaDevice::open(CudaOptions {
                ordinal,
                tf32: config.train.precision == Precision::Tf32,
                fused_gelu: is_set(FUSED_GELU),
                cache: CubinCache::of_user(),
            })?),
        })
    }
}

/// True if an environment variable is 1.
fn is_set(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| value.trim() == "1")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn situation(backend: Backend, gpus: usize) -> Situation {
        Situation {
            backend,
            precision: Precision::F32,
            gpus: Ok(gpus),
            local_rank: 1,
            local_world_size: 2,
            sharing: GpuSharing::No,
        }
    }

    /// The GPU that is chosen; none: the processor.
    fn gpu(situation: &Situation) -> Option<usize> {
        match situation.decide().unwrap() {
            Choice::Gpu(ordinal) => Some(ordinal),
            Choice::Cpu => None,
            Choice::Given(_) => panic!("nobody gave one"),
        }
    }

    /// The words of the refusal.
    fn refusal(situation: &Situation) -> String {
        situation.decide().err().expect("a refusal").to_string()
    }

    #[test]
    fn each_rank_has_a_gpu_of_its_own_where_there_are_gpus() {
        let chosen = |backend, gpus| gpu(&situation(backend, gpus));
        assert_eq!(chosen(Backend::Auto, 2), Some(1));
        assert_eq!(chosen(Backend::Nccl, 8), Some(1));
        assert_eq!(chosen(Backend::Auto, 0), None);
        assert_eq!(chosen(Backend::Cpu, 8), None);
    }

    #[test]
    fn a_driver_that_does_not_start_leaves_the_processor() {
        let mut without = situation(Backend::Auto, 0);
        without.gpus = Err(DeviceError::Upstream("no driver".to_owned()));
        assert_eq!(gpu(&without), None);
        let mut asked_for = situation(Backend::Nccl, 0);
        asked_for.gpus = Err(DeviceError::Upstream("no driver".to_owned()));
        assert_eq!(
            refusal(&asked_for),
            "`parallel.backend: nccl` needs a GPU: no driver"
        );
    }

    #[test]
    fn more_workers_than_gpus_are_refused_unless_they_may_share() {
        let error = refusal(&situation(Backend::Auto, 1));
        assert!(
            error.starts_with("2 workers on this node, which has 1 GPU\n  hint: "),
            "{error}"
        );
        let mut sharing = situation(Backend::Auto, 1);
        sharing.sharing = GpuSharing::Yes;
        assert_eq!(gpu(&sharing), Some(0));
    }

    #[test]
    fn an_nccl_that_lets_no_ranks_share_a_gpu_is_named_unless_ranks_name_their_hosts() {
        let old = Some(Version::LEAST);
        let mut sharing = situation(Backend::Auto, 1);
        sharing.sharing = GpuSharing::asked(old, false);
        insta::assert_snapshot!(refusal(&sharing), @r"
        2 workers on this node, which has 1 GPU, and NCCL 2.18.0 lets no ranks share one
          hint: install NCCL 2.30 or later, or give every worker an `NCCL_HOSTID` of its own
        ");
        sharing.sharing = GpuSharing::asked(old, true);
        assert_eq!(gpu(&sharing), Some(0));
        // Nothing is shared.
        sharing = situation(Backend::Auto, 2);
        sharing.sharing = GpuSharing::asked(old, false);
        assert_eq!(gpu(&sharing), Some(1));
    }

    #[test]
    fn tf32_needs_a_gpu() {
        let mut on_cpu = situation(Backend::Cpu, 8);
        on_cpu.precision = Precision::Tf32;
        let expected = "`train.precision: tf32` needs a GPU: `parallel.backend` is `cpu`";
        assert_eq!(refusal(&on_cpu), expected);
    }
}
