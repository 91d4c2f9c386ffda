//! The best layouts for the planned machines, as a table, and which one to use.

use std::fmt::Write as _;

use ddp_proto::words::{counted, grouped};

use super::report::{self, Context};
use crate::cli::native::{Axis, Candidate, FoundLayout, LayoutSearch};

/// Most layouts that are listed as too large.
const MAX_NAMED: usize = 5;

/// A table with one layout per column. `memory` is the memory of a device.
pub(super) fn text(search: &LayoutSearch, memory: u64, context: &Context) -> String {
    let (bytes, memory) = (context.bytes, (context.bytes)(memory));
    let mut text = match &search.best[..] {
        [] => format!("No layout fits into {memory}.\n"),
        [first, others @ ..] => format!(
            "The best layouts for {} samples per step:\n{}\n{}{}",
            grouped(first.candidate.batch.samples()),
            table(search, context),
            recommendation(first, others.first()),
            alternatives(others)
        ),
    };
    for FoundLayout { candidate, .. } in search.too_large.iter().take(MAX_NAMED) {
        let (layout, held) = (candidate.layout(), bytes(candidate.held));
        let with = format!("`{}`{}", strategy(candidate), and_schedule(candidate));
        let _ = writeln!(
            text,
            "`{layout}` does not fit: with {with} it needs {held}, and a device has {memory}."
        );
    }
    let rest = search.too_large.len().saturating_sub(MAX_NAMED);
    for (number, what) in [
        (rest, "cannot fit either"),
        (search.slower, "can only be slower"),
        (search.not_looked_at, "could not be searched: there are too many"),
    ] {
        if number > 0 {
            let _ = writeln!(text, "{} {what}.", counted(number, "more layout"));
        }
    }
    text
}

/// Which layout to use, how much faster it is than the next one, and the flags that select it.
fn recommendation(first: &FoundLayout, next: Option<&FoundLayout>) -> String {
    let taken = &first.candidate;
    let ahead = next.and_then(|FoundLayout { candidate, .. }| {
        let later = report::share(candidate.seconds()? / taken.seconds()? - 1.0);
        Some(format!(
            "; a step with `{}` takes {later} longer",
            candidate.layout()
        ))
    });
    format!(
        "Use `{}` with `{}`{}: it has the shortest step of all layouts that fit{}.\n {}\n",
        taken.layout(),
        strategy(taken),
        and_schedule(taken),
        ahead.unwrap_or_default(),
        report::flags(&first.settings)
    )
}

/// The flags that select the other layouts of the table, a line each.
fn alternatives(others: &[FoundLayout]) -> String {
    let line = |found: &FoundLayout| {
        format!(
            "For `{}`:\n {}\n",
            found.candidate.layout(),
            report::flags(&found.settings)
        )
    };
    others.iter().map(line).collect()
}

/// `zero3`, or `zero3 over 8` if it shards over 8 of the data-parallel ranks.
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

/// The schedule, if the layout has a pipeline.
fn schedule(candidate: &Candidate) -> Option<&str> {
    (candidate.layers.len() > 1).then_some(candidate.schedule)
}

fn table(search: &LayoutSearch, context: &Context) -> String {
    let (bytes, [least, most]) = (context.bytes, report::bounds(context.mfu));
    let row = |title: &str, cell: &dyn Fn(&Candidate) -> String| -> Vec<String> {
        let cells = search.best.iter().map(|found| cell(&found.candidate));
        std::iter::once(title.to_owned()).chain(cells).collect()
    };
    let seconds = |c: &Candidate| c.seconds().unwrap_or(f64::INFINITY);
    let along = |title, axis| row(title, &|c| bytes(c.sent.along(&[axis])));
    let mut rows = vec![
        row("", &Candidate::layout),
        row("strategy", &strategy),
        row("schedule", &|c| schedule(c).unwrap_or("–").to_owned()),
    ];
    let recompute = |found: &FoundLayout| {
        let mut settings = found.settings.iter();
        let recompute = settings.find_map(|setting| setting.strip_prefix("train.recompute="));
        recompute.unwrap_or("–").to_owned()
    };
    let cells = search.best.iter().map(recompute);
    rows.push(std::iter::once("recompute".to_owned()).chain(cells).collect());
    if search.best.iter().any(|found| found.candidate.chunks > 1) {
        rows.push(row("chunks per rank", &|c| c.chunks.to_string()));
    }
    let elsewhere = (search.best.first()).map_or("", |found| found.candidate.offloaded_to);
    rows.extend([
        row("micro-batches", &|c| c.batch.accumulation.to_string()),
        row("layers per rank", &report::layers),
        row("on the device", &|c| bytes(c.held)),
        row("  state", &|c| bytes(c.state())),
        row(elsewhere, &|c| bytes(c.offloaded())),
        along("sent along tensor", Axis::Tensor),
        along("sent along pipeline", Axis::Pipeline),
        along("sent along shard", Axis::Shard),
        along("sent along replicate", Axis::Replicate),
        row("pipeline bubble", &|c| report::share(c.bubble)),
        row(&format!("step time{least}"), &|c| report::duration(seconds(c))),
        row(&format!("tokens/s{most}"), &|c| {
            grouped((c.batch.tokens() as f64 / seconds(c)) as u64)
        }),
    ]);
    report::columns(report::without_nothing(rows))
}
