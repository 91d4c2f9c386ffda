//! What rank 0 says before the first step: what is trained, on what, and with how much memory.

use comfy_table::{Table, presets};

use super::progress::{bytes, grouped};
use super::trainer::Trainer;
use crate::config::Sync;
use crate::plan::{Footprint, GlobalBatch};

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
    vec![
        ("model", trainer.replica.model.name.clone()),
        ("parameters", grouped(parameters)),
        ("data", data),
        ("global batch", batch),
        ("steps", steps),
        (
            "memory of a rank",
            memory(Footprint::replicated(trainer.replica.params.len() as u64)),
        ),
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

fn memory(footprint: Footprint) -> String {
    format!(
        "parameters {}, gradients {}, optimizer {}; activations are measured as it runs",
        bytes(footprint.params),
        bytes(footprint.grads),
        bytes(footprint.optimizer)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_line_of_seven_billion_parameters() {
        let line = memory(Footprint::replicated(7_000_000_000));
        // 28, 28 and 56 GB.
        insta::assert_snapshot!(line, @"parameters 26.1 GiB, gradients 26.1 GiB, optimizer 52.2 GiB; activations are measured as it runs");
    }
}
