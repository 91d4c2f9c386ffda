//! The best layouts for the planned machines, as a table, and which one to use.

use std::fmt::Write as _;
use std::time::Duration;

use ddp_proto::words::{counted, grouped};

use super::report::{self, Context};
use crate::cli::native::{Axis, Candidate, FoundLayout, LayoutSearch};

/// The processor time after which no more layouts are searched.
pub(super) const SEARCH_TIME: Duration = Duration::from_secs(10);
/// Most meshes that are named as too large, or as not searched.
const MAX_NAMED: usize = 5;

/// A table with one layout per column. `memory` is the memory of a device.
pub(super) fn text(search: &LayoutSearch, memory: u64, context: &Context) -> String {
    let (bytes, memory) = (context.bytes, (context.bytes)(memory));
    let mut text = match &search.best[..] {
        [] => format!("No searched layout fits into {memory}.\n"),
        best => format!(
            "The best layouts for {} samples per step:\n{}\n{}",
            grouped(best[0].candidate.batch.samples()),
            table(best, context),
            recommendation(best)
        ),
    };
    for (mesh, least) in search.too_large.iter().take(MAX_NAMED) {
        let least = bytes(*least);
        let _ = writeln!(
            text,
            "`{mesh}` does not fit: it needs at least {least}, and a device has {memory}."
        );
    }
    let rest = search.too_large.len().saturating_sub(MAX_NAMED);
    for (number, what) in [
        (rest, "cannot fit either"),
        (search.slower, "do not fit or can only be slower"),
    ] {
        if number > 0 {
            let _ = writeln!(text, "{} {what}.", counted(number, "more layout"));
        }
    }
    if !search.not_searched.is_empty() {
        let named = search.not_searched.iter().take(MAX_NAMED);
        let named: Vec<String> = named.map(|mesh| format!("`{mesh}`")).collect();
        let more = match search.not_searched.len() - named.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let _ = writeln!(
            text,
            "After {} s of processor time the search ended. Not searched to the end, and maybe faster: {}{more}.",
            SEARCH_TIME.as_secs(),
            named.join(", ")
        );
    }
    text
}

/// Which layout to use, how much faster it is than the next one, and the flags that select each.
fn recommendation(best: &[FoundLayout]) -> String {
    let first = &best[0].candidate;
    let ahead = best.get(1).and_then(|FoundLayout { candidate: next, .. }| {
        let later = report::share(next.seconds? / first.seconds? - 1.0);
        Some(format!("; a step with `{}` takes {later} longer", next.mesh))
    });
    let mut text = format!(
        "Use `{}`: it has the shortest step of all searched layouts that fit{}.\n",
        first.mesh,
        ahead.unwrap_or_default()
    );
    for FoundLayout { candidate, settings } in best {
        let flags = match &settings[..] {
            [] => " as configured".to_owned(),
            settings => format!("\n {}", report::flags(settings)),
        };
        let _ = writeln!(text, "For `{}`:{flags}", candidate.mesh);
    }
    text
}

/// `zero3`, or `zero3 over 8` if it shards over 8 of the data-parallel ranks.
fn strategy(candidate: &Candidate) -> String {
    let name = report::name(candidate);
    match candidate.mesh.size(&[Axis::Shard, Axis::Expert]) as u64 {
        shard if shard == 1 || shard == candidate.batch.ranks => name.to_owned(),
        shard => format!("{name} over {shard}"),
    }
}

fn table(best: &[FoundLayout], context: &Context) -> String {
    let (bytes, [least, most]) = (context.bytes, report::bounds(context.mfu));
    let row = |title: &str, cell: &dyn Fn(&Candidate) -> String| -> Vec<String> {
        let cells = best.iter().map(|found| cell(&found.candidate));
        std::iter::once(title.to_owned()).chain(cells).collect()
    };
    let seconds = |c: &Candidate| c.seconds.unwrap_or(f64::INFINITY);
    let mut rows = vec![
        row("", &|c| c.mesh.to_string()),
        row("strategy", &strategy),
        row("schedule", &|c| {
            if c.layers.len() > 1 { c.schedule } else { "–" }.to_owned()
        }),
        row("recompute", &|c| c.recompute.to_owned()),
        row("chunks per rank", &|c| c.chunks.to_string()),
        row("micro-batches", &|c| c.batch.accumulation.to_string()),
        row("layers per rank", &report::layers),
        row("on the device", &|c| bytes(c.held)),
        row("  state", &|c| bytes(c.state())),
        row(best[0].candidate.offloaded_to, &|c| bytes(c.offloaded())),
    ];
    for axis in Axis::ALL.into_iter().rev() {
        let title = format!("sent along {}", axis.name());
        rows.push(row(&title, &|c| bytes(c.sent.along(&[axis]))));
    }
    rows.extend([
        row("pipeline bubble", &|c| report::share(c.times.bubble)),
        row(&format!("step time{least}"), &|c| report::duration(seconds(c))),
        row(&format!("tokens/s{most}"), &|c| {
            grouped((c.batch.tokens() as f64 / seconds(c)) as u64)
        }),
    ]);
    report::columns(report::without_nothing(rows))
}
