//! What rank 0 says before the first step: what is trained, on what, and with how much memory.

use comfy_table::{Table, presets};

use super::progress::{bytes, grouped};
use super::strategy::between;
use super::trainer::Trainer;
use crate::config::{Accumulate, Strategy, Sync};
use crate::parallel::Between;
use crate::plan::{Footprint, GlobalBatch};

/// Numbers that only set-up knows.
pub(super) struct StartupFacts<'a> {
    pub(super) out_dir: &'a std::path::Path,
    pub(super) train_tokens: usize,
    pub(super) val_tokens: usize,
    /// Operations in which all gradients are reduced.
    pub(super) reductions: usize,
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
    let global_batch = GlobalBatch {
        ranks: world as u64,
        accumulation: train.grad_accumulation as u64,
        micro_batch: train.micro_batch as u64,
        block_size: config.model.block_size as u64,
    };
    let batch = format!(
        "{} samples = {} tokens ({} × {} × {} of {} tokens)",
        grouped(global_batch.samples()),
        grouped(global_batch.tokens()),
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
    let mut rows = vec![
        ("model", trainer.replica.model.name.clone()),
        ("parameters", grouped(parameters)),
        ("data", data),
        ("global batch", batch),
        ("steps", steps),
        (
            "memory of a rank",
            memory(
                footprint(trainer),
                trainer.replica.weights.gathered_bytes() as u64,
            ),
        ),
        ("device", trainer.world.device.name()),
        ("backend", transport),
        ("strategy", strategy(trainer)),
        ("gradient sync", sync(trainer, facts.reductions)),
        ("out_dir", facts.out_dir.display().to_string()),
    ];
    if let Some(accumulation) = accumulation(trainer) {
        rows.insert(rows.len() - 1, ("accumulation", accumulation));
    }
    rows
}

fn counted(number: usize, what: &str) -> String {
    let plural = match (number, what.ends_with("ch")) {
        (1, _) => "",
        (_, true) => "es",
        _ => "s",
    };
    format!("{number} {what}{plural}")
}

/// What this rank has allocated, by kind.
fn footprint(trainer: &Trainer<'_>) -> Footprint {
    Footprint {
        params: trainer.replica.weights.bytes() as u64,
        grads: trainer.grad_bytes as u64,
        optimizer: trainer.adamw.bytes() as u64,
    }
}

fn memory(footprint: Footprint, gathered_bytes: u64) -> String {
    let gathered = match gathered_bytes {
        0 => String::new(),
        number => format!(" (and {} gathered)", bytes(number)),
    };
    format!(
        "parameters {}{gathered}, gradients {}, optimizer {}; activations are measured as it runs",
        bytes(footprint.params),
        bytes(footprint.grads),
        bytes(footprint.optimizer)
    )
}

fn strategy(trainer: &Trainer<'_>) -> String {
    let parallel = &trainer.config.parallel;
    let what = match parallel.strategy {
        Strategy::Ddp => return "ddp: everything on every rank".to_owned(),
        Strategy::Zero1 => "zero1: the optimizer is",
        Strategy::Zero2 => "zero2: optimizer and gradients are",
        Strategy::Zero3 => "zero3: optimizer, gradients and parameters are",
    };
    let ranks = counted(trainer.world.size(), "rank");
    let kept = match (parallel.strategy, parallel.reshard_after_forward) {
        (Strategy::Zero3, true) => "; a block is gathered for forward and for backward",
        (Strategy::Zero3, false) => "; a block is gathered once, and stays until its backward",
        _ => "; parameters are gathered while the next forward begins",
    };
    format!("{what} sharded over {ranks}{kept}")
}

/// What both ways to accumulate cost, where there is a choice.
fn accumulation(trainer: &Trainer<'_>) -> Option<String> {
    let (parallel, micro_batches) = (&trainer.config.parallel, trainer.config.train.grad_accumulation);
    if micro_batches == 1 || matches!(parallel.strategy, Strategy::Ddp | Strategy::Zero1) {
        return None;
    }
    let sharding = trainer.replica.weights.sharding();
    let size = size_of::<f32>();
    let (whole, shard) = (sharding.whole_len() * size, sharding.shard_len() * size);
    let sent = bytes((whole - shard) as u64);
    let (whole, shard) = (bytes(whole as u64), bytes(shard as u64));
    Some(match parallel.accumulate {
        Accumulate::Sharded => format!(
            "sharded: {shard} of gradients and those in flight, {micro_batches} × {sent} sent a step; full would hold {whole} and send {sent}"
        ),
        Accumulate::Full => format!(
            "full: {whole} of gradients, {sent} sent a step; sharded would hold {shard} and those in flight, and send {micro_batches} × {sent}"
        ),
    })
}

fn sync(trainer: &Trainer<'_>, reductions: usize) -> String {
    let parallel = &trainer.config.parallel;
    let when = if parallel.overlap {
        "while backward runs"
    } else {
        "after backward"
    };
    let how = match (parallel.strategy, parallel.sync) {
        (Strategy::Zero1 | Strategy::Zero2, _) => {
            format!("reduce-scatter ({})", counted(reductions, "bucket"))
        }
        (Strategy::Zero3, _) => format!("reduce-scatter ({})", counted(reductions, "group")),
        (_, Sync::Bucketed) => format!("bucketed ({})", counted(reductions, "bucket")),
        (_, Sync::PerParameter) => "per-parameter".to_owned(),
        (_, Sync::Naive) => return "naive: one all-reduce after backward".to_owned(),
    };
    match between(trainer.config) {
        Some(Between::Shard) if !parallel.overlap => format!("{how}, between the blocks of backward"),
        _ => format!("{how}, {when}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_line_of_seven_billion_parameters() {
        let line = memory(Footprint::replicated(7_000_000_000), 0);
        // 28, 28 and 56 GB.
        insta::assert_snapshot!(line, @"parameters 26.1 GiB, gradients 26.1 GiB, optimizer 52.2 GiB; activations are measured as it runs");
    }
}
