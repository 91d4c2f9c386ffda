//! The mean loss of a text, block by block as in training's validation: the same text gives the same number.

use ddp_proto::words::counted;

use super::loaded::{InferenceError, LoadedModel};
use crate::data::{Tokens, fill_batch};
use crate::device::{ArenaSpec, DType};
use crate::model::{Activation, NoHooks, Passes, sum_of_losses};

/// What a text costs a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluated {
    /// Mean over all positions, in nats per token.
    pub loss: f64,
    /// Positions with a loss.
    pub tokens: u64,
    /// Bytes of text per token, if the files record it.
    pub bytes_per_token: Option<f64>,
}

impl Evaluated {
    /// Loss per byte: comparable between models with different tokenizers.
    pub fn bits_per_byte(&self) -> Option<f64> {
        Some(self.loss / std::f64::consts::LN_2 / self.bytes_per_token?)
    }
}

impl LoadedModel {
    /// Mean loss over the first `blocks` blocks of `tokens`, all of them if there are fewer, `micro_batch` at a time.
    /// Calls `progress` with the blocks done and all blocks.
    pub fn evaluate(
        &self,
        tokens: &Tokens,
        blocks: u64,
        micro_batch: usize,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Evaluated, InferenceError> {
        let block_size = self.config.block_size;
        let blocks = blocks.min(tokens.blocks(block_size));
        if blocks == 0 {
            return Err(InferenceError::Refused(format!(
                "`{}` has {}, a sample of this model needs {}\n  hint: give a longer text with `--data`",
                tokens.path().display(),
                counted(tokens.len() as u64, "token"),
                block_size + 1
            )));
        }
        let rows = (micro_batch as u64).clamp(1, blocks) as usize;
        let shape = [rows, block_size];
        let (mut inputs, mut targets) = (vec![0; rows * block_size], vec![0; rows * block_size]);
        let alloc = |name| {
            let spec = ArenaSpec::private(name, DType::I32, rows * block_size);
            self.compute.device.alloc(&spec)
        };
        let (inputs_there, targets_there) = (alloc("tokens")?.whole(), alloc("targets")?.whole());
        let inp = Activation::borrowed(inputs_there.clone(), shape.to_vec());
        let (model, ctx) = (&self.model, self.context(shape, Some(&targets_there)));
        let passes = Passes { model, ctx: &ctx };
        let mut total = 0.0;
        for first in (0..blocks).step_by(rows) {
            progress(first, blocks);
            let batch = first..blocks.min(first + rows as u64);
            let read = (batch.end - first) as usize * block_size;
            let starts = batch.map(|block| block * block_size as u64);
            fill_batch(tokens, starts, &[0..block_size], &mut inputs, &mut targets)?;
            self.check_known(&inputs[..read])?;
            self.check_known(&targets[..read])?;
            self.compute.upload(&inputs_there, &inputs);
            self.compute.upload(&targets_there, &targets);
            let losses = passes.evaluate(0..model.blocks.len(), &inp, &mut NoHooks)?;
            total += sum_of_losses(&self.compute, &losses)?;
        }
        if !total.is_finite() {
            return Err(InferenceError::not_finite("losses"));
        }
        let positions = blocks * block_size as u64;
        Ok(Evaluated {
            loss: total / positions as f64,
            tokens: positions,
            bytes_per_token: tokens.bytes_per_token(),
        })
    }
}
