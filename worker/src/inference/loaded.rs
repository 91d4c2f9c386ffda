//! The parameters of a checkpoint, in the memory of one device.

use std::sync::Arc;

use crate::checkpoint::{CheckpointError, Reader, TensorKind};
use crate::config::{self, Precision, Tokenizer};
use crate::device::{ArenaSpec, Buffer, DType, Device, DeviceError, Stream};
use crate::model::{self, ActivationPool, Context, Decoder, Model, ModelError, ParamId, Params};
use crate::ops::Cast;

/// Why a model cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum InferenceError {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Its configuration describes no model.
    #[error("the checkpoint's configuration describes no model: {0}")]
    Config(String),
    /// The same.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// What was asked for makes no sense with this model.
    #[error("{0}")]
    Refused(String),
}

/// A model with its parameters.
pub struct LoadedModel {
    /// Of the checkpoint.
    pub config: config::Model,
    /// What makes its tokens.
    pub tokenizer: Tokenizer,
    pub(super) model: Model,
    pub(super) device: Arc<dyn Device>,
    pub(super) stream: Stream,
    /// By parameter.
    params: Vec<Buffer>,
    pool: ActivationPool,
    no_targets: Buffer,
}

impl LoadedModel {
    /// Reads a checkpoint, whatever layout wrote it; every hash is checked. Parameters have the type that they were used in.
    pub fn open(reader: &Reader, device: &Arc<dyn Device>) -> Result<Self, InferenceError> {
        reader.check_model()?;
        let document = &reader.manifest().state.config;
        let section = |path: &str| document.pointer(path).cloned().unwrap_or_default();
        let bad = |error: serde_json::Error| InferenceError::Config(error.to_string());
        let mut config: config::Model = config::section("model", section("/model")).map_err(bad)?;
        let tokenizer: Tokenizer = serde_json::from_value(section("/data/tokenizer")).map_err(bad)?;
        let precision: Precision = serde_json::from_value(section("/train/precision")).map_err(bad)?;
        let dtype = match precision {
            Precision::Bf16 => DType::Bf16,
            Precision::F32 | Precision::Tf32 => DType::F32,
        };
        let table = TensorKind::Parameter.of(Decoder::of(&config).names.tokens);
        let rows = reader
            .manifest()
            .tensor(&table)
            .and_then(|tensor| tensor.shape.first());
        config.vocab_size = rows.map(|rows| *rows as usize);
        let model = model::build(&config, 1)?.with_dtype(dtype);
        let stream = device.stream();
        let mut params = Vec::with_capacity(model.params.len());
        for spec in &model.params {
            let bytes = reader.read_whole(&TensorKind::Parameter.of(&spec.key))?;
            let alloc = |dtype| device.alloc(&ArenaSpec::private(&spec.key, dtype, spec.len()));
            let master = alloc(DType::F32)?.whole();
            device.upload(stream, &master, &bytes);
            if dtype == DType::F32 {
                params.push(master);
                continue;
            }
            let param = alloc(dtype)?.whole();
            let (x, out) = (master, param.clone());
            device.enqueue(stream, Cast { x, out }.into());
            // The masters of one parameter at a time.
            device.synchronize(stream)?;
            params.push(param);
        }
        device.synchronize(stream)?;
        Ok(Self {
            no_targets: device
                .alloc(&ArenaSpec::private("targets", DType::I32, 0))?
                .whole(),
            pool: ActivationPool::new(device.clone()),
            device: device.clone(),
            config,
            tokenizer,
            model,
            stream,
            params,
        })
    }

    /// Tokens that it knows.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.config.vocab_size.unwrap_or_default()
    }

    /// For forward passes over tokens `[samples, positions]`, with targets where losses are wanted.
    pub(super) fn context<'a>(&'a self, shape: [usize; 2], targets: Option<&'a Buffer>) -> Context<'a> {
        Context {
            device: self.device.as_ref(),
            stream: self.stream,
            pool: &self.pool,
            params: self,
            targets: targets.unwrap_or(&self.no_targets),
            dloss: None,
            shape,
            dtype: self.model.dtype(),
            samples: None,
            tensor: None,
            timeline: None,
        }
    }
}

impl Params for LoadedModel {
    fn get(&self, id: ParamId) -> Buffer {
        self.params[id.0].clone()
    }
}
