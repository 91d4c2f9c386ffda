//! The parameters of a checkpoint, in the memory of one device.

use std::sync::Arc;

use crate::checkpoint::{CheckpointError, Reader, TensorKind};
use crate::config::{self, Precision, Problem};
use crate::cuda::{CudaOptions, KernelCache, count_devices};
use crate::data::DataError;
use crate::device::{ArenaSpec, Buffer, Compute, CpuDevice, CudaDevice, DType, Device, DeviceError};
use crate::model::{self, ActivationPool, Context, Model, ParamId, Params};
use crate::ops::Cast;
use crate::parallel::Dtypes;
use crate::tokenize::TokenizeError;

/// A checkpoint cannot be used for inference.
#[derive(Debug, thiserror::Error)]
pub enum InferenceError {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Its configuration describes no model.
    #[error(transparent)]
    Model(#[from] Problem),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The text to evaluate, or the tokenizer's file, cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The tokenizer cannot be used.
    #[error(transparent)]
    Tokenize(#[from] TokenizeError),
    /// The request does not fit this model: the reason, and the next step.
    #[error("{0}")]
    Refused(String),
}

impl InferenceError {
    /// The model computes numbers that are not finite.
    pub(super) fn not_finite(what: &str) -> Self {
        Self::Refused(format!(
            "the model's {what} are not finite\n  hint: training had diverged before this checkpoint; use an earlier one: `--step N`"
        ))
    }
}

/// Opens the first GPU, or the CPU with this many threads. `is_gpu` selects one of them; without it,
/// a GPU is used if the driver reports one.
pub fn open_device(is_gpu: Option<bool>, threads: usize) -> Result<Arc<dyn Device>, InferenceError> {
    let has_gpus = || match count_devices() {
        Err(error) if error.is_absence() => Ok(false),
        counted => counted.map(|gpus| gpus > 0),
    };
    let is_gpu = is_gpu.map_or_else(has_gpus, Ok)?;
    if !is_gpu {
        return Ok(Arc::new(CpuDevice::new(threads)?));
    }
    Ok(Arc::new(CudaDevice::open(CudaOptions {
        cache: KernelCache::of_user(),
        ..CudaOptions::default()
    })?))
}

/// A model with its parameters.
pub struct LoadedModel {
    /// The checkpoint's `model` section, with the size of the vocabulary.
    pub config: config::Model,
    pub(super) model: Model,
    pub(super) compute: Compute,
    /// By parameter.
    params: Vec<Buffer>,
    pool: ActivationPool,
}

impl LoadedModel {
    /// Reads a checkpoint of any layout, and checks the hash of everything it reads. The parameters
    /// are the master weights: in f32, or rounded to bf16.
    pub fn open(
        reader: &Reader,
        device: &Arc<dyn Device>,
        precision: Precision,
    ) -> Result<Self, InferenceError> {
        reader.check_model()?;
        let config = reader.model_config()?;
        let dtype = Dtypes::params_in(precision);
        let model = model::build(&config, 1)?.with_dtype(dtype);
        let compute = Compute::new(device.clone());
        let mut params = Vec::with_capacity(model.params.len());
        for spec in &model.params {
            let bytes = reader.read_whole(&TensorKind::Parameter.of(&spec.key))?;
            let alloc = |dtype| device.alloc(&ArenaSpec::private(&spec.key, dtype, spec.len()));
            let master = alloc(DType::F32)?.whole();
            compute.upload(&master, &bytes);
            if dtype == DType::F32 {
                params.push(master);
                continue;
            }
            let param = alloc(dtype)?.whole();
            let (x, out) = (master, param.clone());
            compute.enqueue(Cast { x, out });
            // The masters of one parameter at a time.
            compute.synchronize()?;
            params.push(param);
        }
        compute.synchronize()?;
        Ok(Self {
            pool: ActivationPool::new(device.clone()),
            compute,
            config,
            model,
            params,
        })
    }

    /// Number of tokens in the model's vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.config.vocab_size.unwrap_or_default()
    }

    /// Refuses tokens outside of the vocabulary, which would be read beyond the end of the
    /// embedding.
    pub(super) fn check_known(&self, tokens: &[i32]) -> Result<(), InferenceError> {
        let vocabulary = self.vocabulary();
        let is_known = |token: &i32| usize::try_from(*token).is_ok_and(|token| token < vocabulary);
        match tokens.iter().find(|token| !is_known(token)) {
            None => Ok(()),
            Some(token) => Err(InferenceError::Refused(format!(
                "token {token} is outside of the model's vocabulary of {vocabulary}\n  hint: use the tokenizer that the model was trained with"
            ))),
        }
    }

    /// The device, as in `cpu (2 threads, avx512)`.
    pub fn device_name(&self) -> String {
        self.compute.device.name()
    }

    /// Bytes of memory for activations, which does not shrink.
    pub fn activation_bytes(&self) -> usize {
        self.pool.allocated_bytes()
    }

    /// For forward passes over tokens `[samples, positions]`, with targets where losses are wanted.
    pub(super) fn context<'a>(&'a self, shape: [usize; 2], targets: Option<&'a Buffer>) -> Context<'a> {
        let ctx = Context::new(&self.compute, &self.pool, self, shape, self.model.dtype());
        Context { targets, ..ctx }
    }
}

impl Params for LoadedModel {
    fn get(&self, id: ParamId) -> Buffer {
        self.params[id.0].clone()
    }
}
