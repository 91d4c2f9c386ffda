//! Which device this rank trains on.

use std::sync::Arc;
use std::time::Duration;

use ddp_proto::env::WorkerEnv;
use ddp_proto::words::counted;

use super::TrainError;
use super::world::{is_restarted, threads};
use crate::collective::nccl::Nccl;
use crate::config::{Backend, OffloadTarget, OptimizerKind, Precision, Train, TrainConfig};
use crate::cuda::{CudaOptions, GpuFacts, KernelCache, count_devices};
use crate::device::{CpuDevice, CudaDevice, Device, DeviceError};
use crate::libraries::Version;
use crate::metrics::RunDir;
use crate::session::Session;

/// With this variable NCCL lets several ranks share a GPU, and so do we.
const SHARE_GPUS: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// Ranks that name different hosts may share a GPU with any NCCL.
const HOST_NAME: &str = "NCCL_HOSTID";

/// Longest wait for the memory of the workers of the last generation.
const MEMORY_PATIENCE: Duration = Duration::from_mins(1);

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
    /// What the run trained on before, if it goes on, as its folder says.
    before: Option<String>,
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
    /// Asked for where NCCL has this version, if there is one, and ranks name their hosts or not. That there is no NCCL is
    /// said where it is needed.
    fn asked(nccl: Option<Version>, host_named: bool) -> Self {
        match nccl {
            Some(version) if (version.major, version.minor) < (2, 30) && !host_named => {
                Self::Refused(version)
            }
            _ => Self::Yes,
        }
    }
}

impl Situation {
    /// The decision. All ranks of a node decide alike, all nodes only if they have GPUs alike, which the check that
    /// ranks agree makes sure of.
    fn decide(&self) -> Result<Choice, TrainError> {
        let gpus = match &self.gpus {
            Ok(gpus) => *gpus,
            // Hours on the processor would be the worse surprise.
            Err(error) if self.backend == Backend::Auto && !error.is_absence() => {
                let words = format!("{error}; `parallel.backend: cpu` trains without GPUs");
                return Err(TrainError::Refused(words));
            }
            Err(_) => 0,
        };
        let workers = self.local_world_size;
        let is_wanted = match self.backend {
            Backend::Cpu => false,
            Backend::Nccl => true,
            Backend::Auto => gpus > 0,
        };
        match (is_wanted, self.precision) {
            (true, _) if gpus == 0 => return Err(self.needs_gpu("parallel.backend: nccl")),
            (true, _) => {}
            (false, _) if self.backend == Backend::Auto && self.was_on_gpus() => {
                return Err(TrainError::Refused(format!(
                    "this run has trained on {}, but this node has no GPU: {}; `parallel.backend: cpu` continues it without GPUs",
                    self.before.as_deref().unwrap_or_default(),
                    self.no_gpu()
                )));
            }
            (false, Precision::Tf32) => return Err(self.needs_gpu("train.precision: tf32")),
            (false, Precision::F32 | Precision::Bf16) => return Ok(Choice::Cpu),
        }
        let crowded = format!(
            "{workers} workers on this node, which has {}",
            counted(gpus, "GPU")
        );
        match self.sharing {
            GpuSharing::No if workers > gpus => Err(TrainError::Refused(format!(
                "{crowded}\n  hint: start one per GPU (`--nproc-per-node gpu`), or train on the CPU (`parallel.backend: cpu`)"
            ))),
            GpuSharing::Refused(nccl) if workers > gpus => Err(TrainError::Refused(format!(
                "{crowded}, and NCCL {nccl} does not let ranks share a GPU\n  hint: install NCCL 2.30 or later, or give each worker its own `NCCL_HOSTID`"
            ))),
            _ => Ok(Choice::Gpu(self.local_rank % gpus)),
        }
    }

    fn needs_gpu(&self, key: &str) -> TrainError {
        let why = match self.backend {
            Backend::Cpu => "`parallel.backend` is `cpu`".to_owned(),
            Backend::Auto | Backend::Nccl => self.no_gpu(),
        };
        TrainError::Refused(format!("`{key}` needs a GPU: {why}"))
    }

    fn no_gpu(&self) -> String {
        match &self.gpus {
            Ok(_) => {
                "the driver reports no GPU\n  hint: check `nvidia-smi` and CUDA_VISIBLE_DEVICES".to_owned()
            }
            Err(error) => error.to_string(),
        }
    }

    fn was_on_gpus(&self) -> bool {
        self.before
            .as_ref()
            .is_some_and(|device| device.starts_with("cuda:"))
    }
}

impl Choice {
    /// The choice for this rank; `given` is the caller's device, and the run in the folder goes on if it `continues`. What
    /// a node lacks after the first generation is the node's failure, not the job's.
    pub(super) fn of(
        config: &TrainConfig,
        session: &Session,
        given: Option<Arc<dyn Device>>,
        continues: bool,
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
        let sharing = if is_set(SHARE_GPUS) {
            let version = Nccl::load().ok().map(|nccl| nccl.version());
            GpuSharing::asked(version, std::env::var_os(HOST_NAME).is_some())
        } else {
            GpuSharing::No
        };
        let situation = Situation {
            backend,
            precision: config.train.precision,
            gpus,
            local_rank: env.local_rank.get() as usize,
            local_world_size: env.local_world_size as usize,
            sharing,
            before: (continues.then(|| RunDir::last_device(&config.run, &env.run_id))).flatten(),
        };
        let choice = situation.decide().map_err(|error| match error {
            TrainError::Refused(words) if is_restarted(env) => TrainError::NodeUnfit(words),
            error => error,
        })?;
        if let Self::Gpu(ordinal) = choice {
            check_mig(&GpuFacts::of(ordinal)?.name, env.world_size.get())?;
        }
        Ok(choice)
    }

    /// Kind of device, which all ranks must have in common.
    pub(super) const fn kind(&self) -> &'static str {
        match self {
            Self::Given(_) => "the caller's",
            Self::Cpu => "cpu",
            Self::Gpu(_) => "cuda",
        }
    }

    /// Opens the device.
    pub(super) fn open(self, config: &TrainConfig, env: &WorkerEnv) -> Result<Arc<dyn Device>, TrainError> {
        Ok(match self {
            Self::Given(device) => device,
            Self::Cpu => Arc::new(CpuDevice::new(threads(config))?),
            Self::Gpu(ordinal) => Arc::new(CudaDevice::open(CudaOptions {
                ordinal,
                tf32: config.train.precision == Precision::Tf32,
                cache: KernelCache::of_user(),
                memory_patience: if is_restarted(env) {
                    MEMORY_PATIENCE
                } else {
                    Duration::ZERO
                },
            })?),
        })
    }
}

/// True if a process can go on when a generation has ended in the middle of a step: its update has run, or never will.
pub(super) fn outlives(train: &Train) -> bool {
    train.offload.optimizer == OffloadTarget::None && train.optimizer.kind != OptimizerKind::Muon
}

/// NCCL has no way between the parts of a GPU, and CUDA shows a process only one of them.
fn check_mig(name: &str, ranks: u32) -> Result<(), TrainError> {
    if ranks == 1 || !name.contains(" MIG ") {
        return Ok(());
    }
    Err(TrainError::Refused(format!(
        "{ranks} ranks cannot train on `{name}`: NCCL does not connect MIG devices\n  hint: train with one rank, or switch MIG off (`nvidia-smi -mig 0`)"
    )))
}

/// True if an environment variable is 1.
fn is_set(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| value.trim() == "1")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::libraries::{LibraryError, LibraryKind};

    fn situation(backend: Backend, gpus: usize) -> Situation {
        Situation {
            backend,
            precision: Precision::F32,
            gpus: Ok(gpus),
            local_rank: 1,
            local_world_size: 2,
            sharing: GpuSharing::No,
            before: None,
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
    fn a_driver_that_does_not_start_is_an_error_unless_the_processor_is_asked_for() {
        let fails = || DeviceError::Driver {
            doing: "cannot initialise the CUDA driver `libcuda.so.1`".to_owned(),
            cause: "CUDA_ERROR_SYSTEM_NOT_READY: system not yet initialized".to_owned(),
            hint: "the fabric manager does not run".to_owned(),
        };
        let broken = |backend| Situation {
            gpus: Err(fails()),
            ..situation(backend, 0)
        };
        insta::assert_snapshot!(refusal(&broken(Backend::Auto)), @r"
        cannot initialise the CUDA driver `libcuda.so.1`: CUDA_ERROR_SYSTEM_NOT_READY: system not yet initialized
          hint: the fabric manager does not run; `parallel.backend: cpu` trains without GPUs
        ");
        insta::assert_snapshot!(refusal(&broken(Backend::Nccl)), @r"
        `parallel.backend: nccl` needs a GPU: cannot initialise the CUDA driver `libcuda.so.1`: CUDA_ERROR_SYSTEM_NOT_READY: system not yet initialized
          hint: the fabric manager does not run
        ");
        let absence = LibraryError::NotFound {
            kind: LibraryKind::Cuda,
            searched: Vec::new(),
            loader: "no such file".to_owned(),
        };
        let absent = Situation {
            gpus: Err(absence.into()),
            ..situation(Backend::Auto, 0)
        };
        assert_eq!(gpu(&absent), None);
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
        let old = Some(Version {
            major: 2,
            minor: 18,
            patch: 1,
        });
        let mut sharing = situation(Backend::Auto, 1);
        sharing.sharing = GpuSharing::asked(old, false);
        insta::assert_snapshot!(refusal(&sharing), @r"
        2 workers on this node, which has 1 GPU, and NCCL 2.18.1 does not let ranks share a GPU
          hint: install NCCL 2.30 or later, or give each worker its own `NCCL_HOSTID`
        ");
        sharing.sharing = GpuSharing::asked(old, true);
        assert_eq!(gpu(&sharing), Some(0));
        // Nothing is shared.
        sharing = situation(Backend::Auto, 2);
        sharing.sharing = GpuSharing::asked(old, false);
        assert_eq!(gpu(&sharing), Some(1));
    }

    #[test]
    fn a_run_that_has_trained_on_gpus_goes_on_without_them_only_if_told() {
        let without = |backend| Situation {
            before: Some("cuda:0 (NVIDIA H200, sm_90a, 140.4 GiB)".to_owned()),
            ..situation(backend, 0)
        };
        insta::assert_snapshot!(refusal(&without(Backend::Auto)), @r"
        this run has trained on cuda:0 (NVIDIA H200, sm_90a, 140.4 GiB), but this node has no GPU: the driver reports no GPU
          hint: check `nvidia-smi` and CUDA_VISIBLE_DEVICES; `parallel.backend: cpu` continues it without GPUs
        ");
        assert_eq!(gpu(&without(Backend::Cpu)), None);
        let before = Some("cpu (8 threads)".to_owned());
        let on_cpus = Situation {
            before,
            ..situation(Backend::Auto, 0)
        };
        assert_eq!(gpu(&on_cpus), None);
    }

    #[test]
    fn parts_of_a_gpu_train_alone() {
        let name = "NVIDIA H200 MIG 3g.71gb";
        assert!(check_mig(name, 1).is_ok() && check_mig("NVIDIA H200", 8).is_ok());
        let refused = check_mig(name, 2).unwrap_err().to_string();
        assert!(
            refused.starts_with("2 ranks cannot train on `NVIDIA H200 MIG 3g.71gb`: NCCL"),
            "{refused}"
        );
    }

    #[test]
    fn tf32_needs_a_gpu() {
        let mut on_cpu = situation(Backend::Cpu, 8);
        on_cpu.precision = Precision::Tf32;
        let expected = "`train.precision: tf32` needs a GPU: `parallel.backend` is `cpu`";
        assert_eq!(refusal(&on_cpu), expected);
    }
}
