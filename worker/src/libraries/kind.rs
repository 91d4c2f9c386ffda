//! Which libraries there are.

/// A library that is loaded at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The driver.
    Cuda,
    /// Matrix products.
    CublasLt,
    /// The compiler of kernels.
    Nvrtc,
    /// Collectives between GPUs.
    Nccl,
}

impl Kind {
    /// All of them, in the order of reports.
    pub const ALL: [Self; 4] = [Self::Cuda, Self::CublasLt, Self::Nvrtc, Self::Nccl];

    /// Stem of the file: `libnccl.so`, followed by nothing or a version.
    #[must_use]
    pub const fn stem(self) -> &'static str {
        match self {
            Self::Cuda => "libcuda.so",
            Self::CublasLt => "libcublasLt.so",
            Self::Nvrtc => "libnvrtc.so",
            Self::Nccl => "libnccl.so",
        }
    }

    /// As its makers call it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cuda => "CUDA driver",
            Self::CublasLt => "cuBLASLt",
            Self::Nvrtc => "NVRTC",
            Self::Nccl => "NCCL",
        }
    }

    /// True of what belongs to one version of CUDA, as its file is named for, and needs a driver that is as new.
    #[must_use]
    pub const fn follows_cuda(self) -> bool {
        matches!(self, Self::CublasLt | Self::Nvrtc)
    }

    /// What needs it.
    #[must_use]
    pub const fn purpose(self) -> &'static str {
        match self {
            Self::Cuda => "the driver",
            Self::CublasLt => "matrix products on GPUs",
            Self::Nvrtc => "kernels compiled on the machine",
            Self::Nccl => "collectives between GPUs",
        }
    }

    /// How to get it.
    #[must_use]
    pub const fn hint(self) -> &'static str {
        match self {
            Self::Cuda => "install the NVIDIA driver; in a container, start it with `--gpus all`",
            Self::CublasLt => {
                "`pip install nvidia-cublas-cu12` in a Python environment that is active, or the CUDA toolkit"
            }
            Self::Nvrtc => {
                "`pip install nvidia-cuda-nvrtc-cu12` in a Python environment that is active, or the CUDA toolkit"
            }
            Self::Nccl => {
                "`pip install nvidia-nccl-cu12` in a Python environment that is active, or the package `libnccl2`"
            }
        }
    }
}
