//! What rank 0 says before the first step: what is trained, on what, and with how much memory.

use comfy_table::{Table, presets};

use super::progress::{bytes, grouped};
use super::trainer::Trainer;
use crate::config::Sync;

/// Numbers that only set-up knows.
pub(super) struct StartupFacts<'a> {
    pub(super) out_dir: &'a std::path::Path,
    pub(super) train_tokens: usize,
    pub(super) val_tokens: usize,
    pub(super) buckets: usize,
}

/// The table.
pub(super) fn table(trainer: &Trainer<'_>, facts: &StartupFacts<'_>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    for (name, value) in rows(trainer, facts) {
        table.add_row([name.to_owned(), value]);
    }
    table.trim_fmt()
}

fn rows(trainer: &Trainer<'_>, facts: &StartupFacts<'_>) -> Vec<(&'static str, String)> {
    let config = trainer.config;
    let world = trainer.world.size();
    let train = &config.train;
    let samples = train.micro_batch * train.grad_accumulation * world;
    let batch = format!(
        "{} samples = {} tokens ({} × {} × {} of {} tokens)",
        grouped(samples as u64),
        grouped(trainer.tokens_per_step()),
        counted(world, "rank"),
        counted(train.grad_accumulation, "micro-batch"),
        counted(train.micro_batch, "sample"),
        config.model.block_size,
    );
    let parameters = trainer.replica.model.param_count() as u64;
    let data = format!(
        "{} tokens to train on, {} held out",
        grouped(facts.train_tokens as u64),
        grouped(facts.val_tokens as u64)
    );
    let steps = match trainer.first_step {
        0 => format!("{}", train.steps),
        first => format!("{}, resumed after {first}", train.steps),
    };
    let env = trainer.session.env();
    let transport = match (world, env.node_count) {
        (1, _) => "one rank".to_owned(),
        (_, 1) => format!("{world} ranks in shared memory"),
        (_, nodes) => format!("{world} ranks on {nodes} nodes, shared memory and TCP"),
    };
    vec![
        ("model", trainer.replica.model.name.clone()),
        ("parameters", grouped(parameters)),
        ("data", data),
        ("global batch", batch),
        ("steps", steps),
        ("memory of a rank", memory(trainer)),
        ("device", trainer.world.device.name()),
        ("backend", transport),
        ("gradient sync", sync(trainer, facts.buckets)),
        ("out_dir", facts.out_dir.display().to_string()),
    ]
}

fn counted(number: usize, what: &str) -> String {
    let plural = match (number, what.ends_with("ch")) {
        (1, _) => "",
        (_, true) => "es",
        _ => "s",
    };
    format!("{number} {what}{plural}")
}

fn memory(trainer: &Trainer<'_>) -> String {
    let of = |number: usize| bytes(number as u64);
    format!(
        "parameters {}, gradients {}, optimizer {}; activations are measured as it runs",
        of(trainer.replica.params.bytes()),
        of(trainer.grad_bytes),
        of(trainer.adamw.bytes())
    )
}

fn sync(trainer: &Trainer<'_>, buckets: usize) -> String {
    let parallel = &trainer.config.parallel;
    let how = match parallel.sync {
        Sync::Bucketed => format!("bucketed ({})", counted(buckets, "bucket")),
        Sync::PerParameter => "per-parameter".to_owned(),
        Sync::Naive => return "naive: one all-reduce after backward".to_owned(),
    };
    let when = if parallel.overlap {
        "while backward runs"
    } else {
        "after backward"
    };
    format!("{how}, {when}")
}
