//! Text that goes on from a prompt, token after token. Keys and values of the text so far are cached, so that a token
//! costs one row of every layer.

use super::loaded::{InferenceError, LoadedModel};
use super::sampling::Sampling;
use crate::device::{ArenaSpec, DType, DeviceError};
use crate::model::{Activation, KvCache, Passes};

/// A text under way.
pub struct Generator<'a> {
    loaded: &'a LoadedModel,
    /// By block.
    caches: Vec<KvCache>,
    positions: usize,
}

/// How a text is to go on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Generation {
    /// Most tokens to make.
    pub tokens: usize,
    /// How each is chosen.
    pub sampling: Sampling,
    /// Ends the text; it is not part of it.
    pub end_of_text: Option<u32>,
}

impl<'a> Generator<'a> {
    /// An empty text; memory for all positions that the model has.
    pub fn new(loaded: &'a LoadedModel) -> Result<Self, InferenceError> {
        let (device, positions) = (&loaded.device, loaded.config.block_size);
        let dtype = loaded.model.dtype();
        let caches = loaded.model.blocks.iter().map(|block| {
            let part = |name| device.alloc(&ArenaSpec::private(name, dtype, positions * block.cached()));
            Ok(KvCache {
                keys: part("cached keys")?.whole(),
                values: part("cached values")?.whole(),
                positions: 0,
            })
        });
        Ok(Self {
            caches: caches.collect::<Result<_, DeviceError>>()?,
            positions: 0,
            loaded,
        })
    }

    /// Positions that are left.
    #[must_use]
    pub fn room(&self) -> usize {
        self.loaded.config.block_size - self.positions
    }

    /// Appends tokens to the text. Returns the logits of the one that follows.
    pub fn advance(&mut self, tokens: &[u32]) -> Result<Vec<f32>, InferenceError> {
        let (count, room, vocabulary) = (tokens.len(), self.room(), self.loaded.vocabulary());
        if count == 0 || count > room {
            return Err(InferenceError::Refused(format!(
                "{count} tokens do not fit: the model has {} positions, of which {room} are left\n  hint: give a prompt of at least one token, and a shorter one",
                self.loaded.config.block_size
            )));
        }
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
            return Err(InferenceError::Refused(format!(
                "token {token} is outside of the model's vocabulary of {vocabulary}"
            )));
        }
        let LoadedModel { device, stream, .. } = self.loaded;
        let arena = device.alloc(&ArenaSpec::private("tokens", DType::I32, count))?;
        device.upload(*stream, &arena.whole(), bytemuck::cast_slice(tokens));
        let inp = Activation::borrowed(arena.whole(), vec![1, count]);
        let (model, ctx) = (&self.loaded.model, self.loaded.context([1, count], None));
        let head = model.blocks.len() - 1;
        let made = Passes { model, ctx: &ctx }.decode(0..head, &inp, &mut self.caches[..head])?;
        // Only the last row is followed by anything new.
        let (ctx, last) = (self.loaded.context([1, 1], None), made.rows(count - 1..count));
        let logits = Passes { model, ctx: &ctx }.decode(head..head + 1, &last, &mut self.caches[head..])?;
        self.positions += count;
        let bytes = device.download(*stream, logits.buffer())?;
        Ok(match model.dtype() {
            DType::Bf16 => {
                let each = bytes
                    .chunks_exact(2)
                    .map(bytemuck::pod_read_unaligned::<half::bf16>);
                each.map(f32::from).collect()
            }
            _ => bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect(),
        })
    }

    /// Goes on from a prompt; `on_token` is called for each token as it comes, and ends the text by `false`. Returns how
    /// many there were. Ends where the model has no more positions.
    pub fn run(
        &mut self,
        prompt: &[u32],
        how: &Generation,
        on_token: &mut dyn FnMut(u32) -> bool,
    ) -> Result<usize, InferenceError> {
        let mut logits = self.advance(prompt)?;
        for number in 0..how.tokens {
            let Some(token) = how.sampling.choose(&logits, number as u64) else {
                return Err(InferenceError::Refused(
                    "the model's logits are not finite\n  hint: the training that made the checkpoint has diverged; take an earlier step".into(),
                ));
            };
            if how.end_of_text == Some(token) || !on_token(token) {
                return Ok(number);
            }
            if number + 1 == how.tokens || self.room() == 0 {
                return Ok(number + 1);
            }
            logits = self.advance(&[token])?;
        }
        Ok(0)
    }
}
