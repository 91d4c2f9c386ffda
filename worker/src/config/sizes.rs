//! What the sizes of a model must satisfy, for configurations and for models that a checkpoint describes.

use super::keys::out_of_range;
use super::problem::{Problem, nearest_multiples};
use super::schema::{Model, ModelKind, TrainConfig};

/// Rows of the token embedding, if all sizes fit each other and `tensor` ranks can share them. `tokens` is the number of
/// tokens that the tokenizer makes; `vocab_size`, where it is given, may be larger.
pub fn checked_vocab(model: &Model, tokens: usize, tensor: usize) -> Result<usize, Problem> {
    let vocab = model.vocab_size.unwrap_or(tokens);
    let broken = out_of_range("model", model)
        .or_else(|| heads(model))
        .or_else(|| rotary(model))
        .or_else(|| vocabulary(vocab, tokens))
        .or_else(|| parts(model, vocab, tensor));
    broken.map_or(Ok(vocab), Err)
}

fn heads(model: &Model) -> Option<Problem> {
    let (channels, heads, kv_heads) = (model.n_embd, model.n_head, model.kv_heads());
    if model.kind == ModelKind::Mlp {
        return None;
    }
    if !channels.is_multiple_of(heads) {
        let what =
            format!("`model.n_embd` is {channels}, expected a multiple of `model.n_head`, which is {heads}");
        let hint = format!(
            "use {}, or a different number of heads",
            nearest_multiples(channels, heads)
        );
        return Some(Problem::new("model.n_embd", what).with_hint(hint));
    }
    if !heads.is_multiple_of(kv_heads) {
        let what = format!(
            "`model.n_head` is {heads}, expected a multiple of `model.n_kv_head`, which is {kv_heads}"
        );
        let hint = "each key and value head must serve the same number of query heads";
        return Some(Problem::new("model.n_kv_head", what).with_hint(hint));
    }
    let size = channels / heads;
    (model.kind == ModelKind::Llama && !size.is_multiple_of(2)).then(|| {
        let what = format!("a head has {size} channels, but rotary positions need an even number");
        let hint = "use a different `model.n_head`, so that `model.n_embd` / `model.n_head` is even";
        Problem::new("model.n_head", what).with_hint(hint)
    })
}

fn rotary(model: &Model) -> Option<Problem> {
    let theta = model.rope_theta;
    let (key, what) = match model.rope_scaling {
        _ if model.kind != ModelKind::Llama => return None,
        _ if !theta.is_normal() || theta <= 0.0 => {
            ("model.rope_theta", format!("`model.rope_theta` is {theta}"))
        }
        Some(scaling) if !scaling.is_valid() => (
            "model.rope_scaling",
            format!("`model.rope_scaling` is `{scaling}`"),
        ),
        _ => return None,
    };
    let hint = "all numbers must be above 0, and `low_freq_factor` below `high_freq_factor`";
    Some(Problem::new(key, what).with_hint(hint))
}

fn vocabulary(vocab: usize, tokens: usize) -> Option<Problem> {
    (vocab < tokens).then(|| {
        let what = format!(
            "`model.vocab_size` is {vocab}, expected at least {tokens}, the number of tokens of `data.tokenizer`"
        );
        Problem::new("model.vocab_size", what).with_hint("leave it out to use the tokenizer's")
    })
}

/// The ranks of a tensor group share the heads, the width of the feed-forward layers and the vocabulary.
fn parts(model: &Model, vocab: usize, tensor: usize) -> Option<Problem> {
    let heads = (model.kind != ModelKind::Mlp).then_some([
        ("model.n_head", model.n_head),
        ("model.n_kv_head", model.kv_heads()),
    ]);
    let widths = [("model.n_inner", model.inner()), ("model.vocab_size", vocab)];
    let mut sizes = heads.into_iter().flatten().chain(widths);
    let (key, size) = sizes.find(|(_, size)| !size.is_multiple_of(tensor))?;
    let fits = match key {
        // A smaller one has no room for the tokenizer's.
        "model.vocab_size" => size.next_multiple_of(tensor).to_string(),
        _ => nearest_multiples(size, tensor),
    };
    let what = format!("`{key}` ({size}) cannot be divided over {tensor} tensor ranks");
    Some(
        Problem::new(key, what).with_hint(format!("set `{key}` to {fits}, or a different `parallel.tensor`")),
    )
}

/// With sequence parallelism, the ranks of a tensor group share the positions of a micro-batch evenly.
pub fn check_rows(config: &TrainConfig) -> Result<(), Problem> {
    let (samples, positions) = (config.train.micro_batch, config.model.block_size);
    let tensor = config.parallel.tensor;
    let fits = |samples: &usize| (samples * positions).is_multiple_of(tensor);
    if !config.parallel.sequence || fits(&samples) {
        return Ok(());
    }
    let above = (samples..samples + tensor).find(fits).unwrap_or(samples);
    let what = format!(
        "`parallel.sequence: true` shares the positions of a micro-batch, but {samples} × {positions} of them cannot be divided over {tensor} tensor ranks; `train.micro_batch: {above}` would work"
    );
    let hint = "change `train.micro_batch` or `model.block_size`, or leave out `parallel.sequence`";
    Err(Problem::new("parallel.sequence", what).with_hint(hint))
}
