//! Text that goes on from a prompt, token after token. Keys and values of the text so far are cached, so that a token
//! costs one row of every layer.
//!
//! A model has as many positions as its samples had in training. When they are used up, the last half of the text is read
//! again from the first position on, and goes on from there: a token sees between half of the positions and all of them.

use std::time::{Duration, Instant};

use ddp_proto::words::counted;

use super::loaded::{InferenceError, LoadedModel};
use super::sampling::{Sampling, Weighed};
use crate::device::{ArenaSpec, Buffer, DType, DeviceError};
use crate::model::{Activation, ChunkState, Context, Keep, NoHooks, Passes};
use crate::ops::Cast;
use crate::tokenize::{Decoder, Encoder};

/// Generation of one text. All memory is allocated at the start and by the first tokens.
pub struct Generator<'a> {
    loaded: &'a LoadedModel,
    /// Keys and values of the positions so far.
    cache: ChunkState,
    /// `[M]`, of the new positions.
    tokens: Buffer,
    /// `[V]`, f32.
    logits_there: Buffer,
    logits: Vec<f32>,
    candidates: Vec<Weighed>,
    positions: usize,
}

/// How to generate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CompletionOptions {
    /// Most tokens to make.
    pub tokens: usize,
    /// How each is chosen.
    pub sampling: Sampling,
    /// Only tokens below it are chosen: a model may know more than its tokenizer.
    pub vocabulary: usize,
    /// Ends the text; it is not part of it.
    pub end_of_text: Option<u32>,
}

/// The result of a generation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Completion {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens that were made.
    pub tokens: usize,
    /// Time until the first token was chosen.
    pub first_token: Duration,
    /// Time until the last token was chosen.
    pub last_token: Duration,
    /// The model ended it, by the token for that.
    pub is_ended: bool,
}

impl Completion {
    /// Tokens per second after the first one, if there are at least two.
    pub fn tokens_per_s(&self) -> Option<f64> {
        let seconds = self.last_token.saturating_sub(self.first_token).as_secs_f64();
        (self.tokens > 1 && seconds > 0.0).then(|| (self.tokens - 1) as f64 / seconds)
    }
}

impl<'a> Generator<'a> {
    /// An empty text.
    pub fn new(loaded: &'a LoadedModel) -> Result<Self, InferenceError> {
        let (device, vocabulary) = (&loaded.compute.device, loaded.vocabulary());
        let alloc = |name, dtype, len| {
            let arena = device.alloc(&ArenaSpec::private(name, dtype, len))?;
            Ok::<_, DeviceError>(arena.whole())
        };
        Ok(Self {
            cache: ChunkState::new(0..loaded.model.blocks.len() - 1),
            tokens: alloc("tokens", DType::I32, loaded.config.block_size)?,
            logits_there: alloc("logits of the next token", DType::F32, vocabulary)?,
            logits: vec![0.0; vocabulary],
            candidates: Vec::with_capacity(vocabulary),
            positions: 0,
            loaded,
        })
    }

    /// Positions that are left.
    pub fn room(&self) -> usize {
        self.loaded.config.block_size - self.positions
    }

    /// Appends tokens to the text. Returns the logits `[V]` of the one that follows.
    pub fn advance(&mut self, tokens: &[u32]) -> Result<&[f32], InferenceError> {
        let (count, room) = (tokens.len(), self.room());
        if count == 0 || count > room {
            let has = self.loaded.config.block_size;
            return Err(InferenceError::Refused(format!(
                "{count} tokens do not fit: the model has {has} positions, of which {room} are left"
            )));
        }
        self.loaded.check_known(bytemuck::cast_slice(tokens))?;
        let LoadedModel { compute, model, .. } = self.loaded;
        let there = self.tokens.slice(0..count);
        compute.upload(&there, tokens);
        let inp = Activation::borrowed(there, vec![1, count]);
        let ctx = Context {
            keep: Keep::KvCache {
                first_position: self.positions,
                capacity: self.loaded.config.block_size,
            },
            ..self.loaded.context([1, count], None)
        };
        let made = Passes { model, ctx: &ctx }.forward(&mut self.cache, &inp, &mut NoHooks)?;
        // Only the last row is followed by anything new.
        let (shape, last) = ([1, 1], made.rows(count - 1..count));
        let ctx = Context { shape, ..ctx };
        let head = &mut ChunkState::new(model.blocks.len() - 1..model.blocks.len());
        let logits = Passes { model, ctx: &ctx }.forward(head, &last, &mut NoHooks)?;
        ctx.enqueue(Cast {
            x: logits.buffer().clone(),
            out: self.logits_there.clone(),
        });
        self.positions += count;
        let bytes = bytemuck::cast_slice_mut(&mut self.logits);
        (compute.device).download_to(compute.stream, &self.logits_there, bytes)?;
        Ok(&self.logits)
    }

    /// Goes on from a prompt; `on_token` is called for each token as it comes, and ends the text by `false`.
    pub fn run(
        &mut self,
        prompt: &[u32],
        options: &CompletionOptions,
        on_token: &mut dyn FnMut(u32) -> Result<bool, InferenceError>,
    ) -> Result<Completion, InferenceError> {
        let started = Instant::now();
        let mut completion = Completion {
            prompt_tokens: prompt.len(),
            tokens: 0,
            first_token: Duration::ZERO,
            last_token: Duration::ZERO,
            is_ended: false,
        };
        self.advance(prompt)?;
        let mut text = Vec::with_capacity(self.loaded.config.block_size + 1);
        text.extend_from_slice(prompt);
        while completion.tokens < options.tokens {
            let known = &self.logits[..options.vocabulary.min(self.logits.len())];
            let (number, memory) = (completion.tokens as u64, &mut self.candidates);
            let Some(token) = options.sampling.choose(known, number, memory) else {
                return Err(InferenceError::not_finite("logits"));
            };
            completion.last_token = started.elapsed();
            if completion.tokens == 0 {
                completion.first_token = completion.last_token;
            }
            if options.end_of_text == Some(token) {
                completion.is_ended = true;
                break;
            }
            completion.tokens += 1;
            if !on_token(token)? {
                break;
            }
            text.push(token);
            if completion.tokens < options.tokens {
                self.go_on(&mut text)?;
            }
        }
        Ok(completion)
    }

    /// Takes the last token of `text` in, which the others were taken in before. Forgets what is never read again.
    fn go_on(&mut self, text: &mut Vec<u32>) -> Result<(), InferenceError> {
        let mut new = 1;
        if self.room() == 0 {
            new = (self.loaded.config.block_size / 2).max(1);
            text.drain(..text.len() - new);
            self.positions = 0;
        }
        self.advance(&text[text.len() - new..]).map(drop)
    }
}

/// Goes on from a text. `on_text` is called with the prompt, once that is accepted, and with what follows as it comes, by
/// whole characters; it ends the text by `false`.
pub fn complete(
    loaded: &LoadedModel,
    encoder: &Encoder,
    prompt: &str,
    options: &CompletionOptions,
    on_text: &mut dyn FnMut(&str) -> bool,
) -> Result<Completion, InferenceError> {
    let mut tokens = Vec::new();
    let encoded = encoder.encode(prompt, &mut tokens);
    encoded.map_err(|cause| InferenceError::Refused(format!("the prompt makes no tokens: {cause}")))?;
    let (count, positions) = (tokens.len(), loaded.config.block_size);
    if count == 0 || count > positions {
        return Err(InferenceError::Refused(format!(
            "the prompt has {}, and the model takes 1 to {positions} (`model.block_size`)\n  hint: give a {} prompt",
            counted(count, "token"),
            if count == 0 { "longer" } else { "shorter" }
        )));
    }
    let mut decoder = Decoder::new(encoder, &tokens)?;
    let mut is_wanted = on_text(prompt);
    let mut on_token = |token| {
        let text = decoder.push(token)?;
        is_wanted = is_wanted && (text.is_empty() || on_text(&text));
        Ok(is_wanted)
    };
    let completion = Generator::new(loaded)?.run(&tokens, options, &mut on_token)?;
    let rest = decoder.finish()?;
    if is_wanted && !rest.is_empty() {
        on_text(&rest);
    }
    Ok(completion)
}
