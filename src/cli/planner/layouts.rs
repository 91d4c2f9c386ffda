//! The best layouts of the planned machines, as a table and as JSON, and which one to take.

use std::fmt::Write as _;

use ddp_proto::words::{bytes, grouped};
use serde_json::{Value, json};

use super::report;
use crate::cli::native::{Axis, Candidate, FoundLayout, LayoutSearch};

/// Layouts that do not fit and are named, at most.
const MAX_NAMED: usize = 5;

/// For people: a layout a column. `memory` is that of a device.
pub(super) fn text(search: &LayoutSearch, memory: u64, bounds: [&str; 2]) -> String {
    let memory = bytes(memory);
    let mut text = match &search.best[..] {
        [] => format!("No layout fits into {memory}.\n"),
        [first, others @ ..] => format!(
            "The best layouts for {} samples a step:\n{}\n{}",
            grouped(first.candidate.batch.samples()),
            table(search, bounds),
            recommendation(first, others.first())
        ),
    };
    for FoundLayout { candidate, .. } in search.too_large.iter().take(MAX_NAMED) {
        let (layout, held) = (candidate.layout(), bytes(candidate.held));
        let with = format!("`{}`{}", strategy(candidate), and_schedule(candidate));
        let _ = writeln!(
            text,
            "`{layout}` does not fit: with {with} it needs {held} of {memory}."
        );
    }
    let rest = search.too_large.len().saturating_sub(MAX_NAMED);
    for (number, what) in [
        (rest, "do not fit either"),
        (search.slower, "can only be slower"),
        (search.not_looked_at, "were not looked at: there are too many"),
    ] {
        if number > 0 {
            let _ = writeln!(text, "{number} more {what}.");
        }
    }
    text
}

/// How far the first one is ahead, and how to choose it.
fn recommendation(first: &FoundLayout, next: Option<&FoundLayout>) -> String {
    let taken = &first.candidate;
    let ahead = next.and_then(|FoundLayout { candidate, .. }| {
        let later = report::share(candidate.seconds()? / taken.seconds()? - 1.0);
        Some(format!("; `{}` takes {later} longer", candidate.layout()))
    });
    let flags = first.settings.iter().map(|setting| format!(" --set {setting}"));
    format!(
        "Take `{}` with `{}`{}: of what fits it has the shortest step{}.\n {}\n",
        taken.layout(),
        strategy(taken),
        and_schedule(taken),
        ahead.unwrap_or_default(),
        flags.collect::<String>()
    )
}

/// `zero3`, or `zero3 over 8` of more data-parallel ranks.
fn strategy(candidate: &Candidate) -> String {
    let name = report::name(candidate);
    match candidate.mesh.size(&[Axis::Shard]) as u64 {
        shard if shard == 1 || shard == candidate.batch.ranks => name.to_owned(),
        shard => format!("{name} over {shard}"),
    }
}

fn and_schedule(candidate: &Candidate) -> String {
    schedule(candidate).map_or_else(String::new, |schedule| format!(" and {schedule}"))
}

/// Of a pipeline.
fn schedule(candidate: &Candidate) -> Option<&str> {
    (candidate.layers.len() > 1).then_some(candidate.schedule)
}

fn table(search: &LayoutSearch, [least, most]: [&str; 2]) -> String {
    let row = |title: &str, cell: &dyn Fn(&Candidate) -> String| -> Vec<String> {
        let cells = search.best.iter().map(|found| cell(&found.candidate));
        std::iter::once(title.to_owned()).chain(cells).collect()
    };
    let seconds = |c: &Candidate| c.seconds().unwrap_or(f64::INFINITY);
    let along = |title, axis| row(title, &|c| bytes(c.sent.along(&[axis])));
    report::columns(report::without_nothing(vec![
        row("", &Candidate::layout),
        row("strategy", &strategy),
        row("schedule", &|c| schedule(c).unwrap_or("–").to_owned()),
        row("micro-batches", &|c| c.batch.accumulation.to_string()),
        row("layers a rank", &report::layers),
        row("on the device", &|c| bytes(c.held)),
        row("  state", &|c| bytes(c.state())),
        along("along tensor", Axis::Tensor),
        along("along pipeline", Axis::Pipeline),
        along("along shard", Axis::Shard),
        along("along replicate", Axis::Replicate),
        row("waiting for stages", &|c| report::share(c.bubble)),
        row(&format!("a step{least}"), &|c| report::duration(seconds(c))),
        row(&format!("tokens/s{most}"), &|c| {
            grouped((c.batch.tokens() as f64 / seconds(c)) as u64)
        }),
    ]))
}

/// For programs.
pub(super) fn json(search: &LayoutSearch) -> Value {
    let all = |found: &[FoundLayout]| -> Vec<Value> {
        let with_settings = |found: &FoundLayout| {
            let mut value = report::candidate(&found.candidate);
            value["set"] = found.settings.clone().into();
            value
        };
        found.iter().map(with_settings).collect()
    };
    json!({
        "best": all(&search.best),
        "too_large": all(&search.too_large),
        "slower": search.slower,
        "not_looked_at": search.not_looked_at,
    })
}
