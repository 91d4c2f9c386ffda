//! The best layouts of the planned machines, as a table and as JSON, and which one to take.

use std::fmt::Write as _;

use ddp_proto::words::{bytes, grouped};
use serde_json::{Value, json};

use super::report;
use crate::cli::native::{Axis, Candidate, FoundLayout, LayoutSearch, TooLarge};

/// Layouts that do not fit and are named, at most.
const MAX_NAMED: usize = 5;

/// For people: a layout a column. `memory` is that of a device.
pub(super) fn text(search: &LayoutSearch, memory: u64, bounds: [&str; 2]) -> String {
    let mut text = match search.best.first() {
        None => format!("No layout fits into {}.\n", bytes(memory)),
        Some(first) => {
            let batch = first.candidate.batch;
            let samples = grouped(batch.samples());
            format!(
                "The best layouts for {samples} samples a step:\n{}\n{}",
                table(search, bounds),
                recommendation(search)
            )
        }
    };
    for mesh in search.too_large.iter().take(MAX_NAMED) {
        let _ = writeln!(
            text,
            "`{}` does not fit: with `{}` it needs {} of {}.",
            mesh.layout,
            report::strategy_name(mesh.strategy),
            bytes(mesh.held),
            bytes(memory)
        );
    }
    let rest = search.too_large.len().saturating_sub(MAX_NAMED);
    if rest > 0 {
        let _ = writeln!(text, "Neither do {rest} more.");
    }
    if search.slower > 0 {
        let _ = writeln!(text, "{} more can only be slower.", search.slower);
    }
    if search.is_cut {
        text.push_str("There are more than were looked at.\n");
    }
    text
}

/// Which one has the shortest step, how far it is ahead, and how to choose it.
fn recommendation(search: &LayoutSearch) -> String {
    let [first, others @ ..] = search.best.as_slice() else {
        return String::new();
    };
    let taken = &first.candidate;
    let schedule = match taken.layers.len() {
        1 => String::new(),
        _ => format!(", {}", taken.schedule),
    };
    let seconds = |found: &FoundLayout| found.candidate.seconds();
    let ahead = others.first().and_then(|next| {
        let later = seconds(next)? / seconds(first)? - 1.0;
        Some(format!(
            "; `{}` takes {} longer",
            next.candidate.layout(),
            report::share(later)
        ))
    });
    let flags: Vec<String> = first
        .settings
        .iter()
        .map(|setting| format!("--set {setting}"))
        .collect();
    let flags = match &flags[..] {
        [] => "It is what the configuration says.".to_owned(),
        flags => format!("  {}", flags.join(" ")),
    };
    format!(
        "Take `{}` with `{}`{schedule}: of what fits it has the shortest step{}.\n{flags}\n",
        taken.layout(),
        strategy(taken),
        ahead.unwrap_or_default(),
    )
}

/// `zero3`, or `zero3 over 8` of more data-parallel ranks.
fn strategy(candidate: &Candidate) -> String {
    let name = report::strategy_name(candidate.strategy);
    match candidate.mesh.size(&[Axis::Shard]) as u64 {
        shard if shard == 1 || shard == candidate.batch.ranks => name.to_owned(),
        shard => format!("{name} over {shard}"),
    }
}

fn table(search: &LayoutSearch, [least, most]: [&str; 2]) -> String {
    let row = |title: &str, cell: &dyn Fn(&Candidate) -> String| -> Vec<String> {
        let cells = search.best.iter().map(|found| cell(&found.candidate));
        std::iter::once(title.to_owned()).chain(cells).collect()
    };
    let mut rows = vec![
        row("", &Candidate::layout),
        row("strategy", &strategy),
        row("schedule", &|c| match c.layers.len() {
            1 => "–".to_owned(),
            _ => c.schedule.to_owned(),
        }),
        row("micro-batches", &|c| c.batch.accumulation.to_string()),
        row("layers a rank", &report::layers),
        row("on the device", &|c| bytes(c.held)),
        row("  state", &|c| bytes(c.state())),
    ];
    let axes = [Axis::Tensor, Axis::Pipeline, Axis::Shard, Axis::Replicate];
    rows.extend(axes.map(|axis| {
        row(&format!("along {}", axis.name()), &|c| {
            bytes(c.sent.along(&[axis]))
        })
    }));
    rows.push(row("waiting for stages", &|c| report::share(c.bubble)));
    let unknown = || "–".to_owned();
    rows.push(row(&format!("a step{least}"), &|c| {
        c.seconds().map_or_else(unknown, report::duration)
    }));
    rows.push(row(&format!("tokens/s{most}"), &|c| {
        let rate = c
            .seconds()
            .map(|seconds| grouped((c.batch.tokens() as f64 / seconds) as u64));
        rate.unwrap_or_else(unknown)
    }));
    report::columns(report::without_nothing(rows))
}

/// For programs.
pub(super) fn json(search: &LayoutSearch) -> Value {
    let too_large = |mesh: &TooLarge| json!({ "layout": mesh.layout, "strategy": mesh.strategy, "device_bytes": mesh.held });
    json!({
        "best": search.best.iter().map(layout).collect::<Vec<_>>(),
        "too_large": search.too_large.iter().map(too_large).collect::<Vec<_>>(),
        "slower_meshes": search.slower,
        "is_cut": search.is_cut,
    })
}

fn layout(found: &FoundLayout) -> Value {
    let mut layout = report::candidate(&found.candidate);
    layout["layout"] = found.candidate.layout().into();
    layout["schedule"] = found.candidate.schedule.into();
    layout["set"] = found.settings.clone().into();
    layout
}
