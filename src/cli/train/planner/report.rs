//! The report of a plan, as tables.

use std::fmt::Write as _;

use ddp_proto::words::{counted, grouped};

use super::device::Planned;
use crate::cli::answer;
use crate::cli::native::costs::Cluster;
use crate::cli::native::{Advice, Axis, Candidate, Comparison, Machines, Strategy};

/// Columns of a table, at most.
const WIDTH: usize = 80;
/// The cell of an unknown number.
const UNKNOWN: &str = "–";
/// Rows that have only such cells are left out.
const NOTHING: [&str; 3] = ["0 B", "0.000 ms", "0.0 %"];

/// The groups that compute layers together.
const GROUPS: [(&str, Axis); 3] = [
    ("  to its tensor group", Axis::Tensor),
    ("  to its context group", Axis::Context),
    ("  to its expert group", Axis::Expert),
];

/// What is appended to the titles of times and of rates. With less than the peak rate of a device,
/// they are estimates and not bounds.
pub(super) fn bounds(mfu: f64) -> [&'static str; 2] {
    if mfu < 1.0 {
        ["", ""]
    } else {
        [", at least", ", at most"]
    }
}

/// What the text says besides the numbers.
pub(super) struct Context<'a> {
    pub(super) device: &'a Planned,
    /// How sizes are written.
    pub(super) bytes: fn(u64) -> String,
    /// Share of its rate that training reaches.
    pub(super) mfu: f64,
    /// Ranks per node are not given.
    pub(super) has_default_ranks: bool,
}

/// The whole report but for the layouts.
pub(super) fn text(comparison: &Comparison, machines: &Machines, context: &Context) -> String {
    let advice = advice(comparison, machines, context);
    [
        facts(comparison, machines, context),
        strategies(comparison, context),
        advice,
    ]
    .join("\n")
}

/// What the device has of memory and rate, and what of it training gets.
fn of_device(machines: &Machines, context: &Context) -> String {
    let (device, bytes, mfu) = (context.device, context.bytes, context.mfu);
    let mut text = device.source.clone();
    if let (Some(all), Some(memory)) = (device.memory, machines.memory) {
        let _ = write!(text, "; {} of {} for training", bytes(memory), bytes(all));
        if device.reserve > 0 {
            let _ = write!(text, " (`--reserve`: {})", bytes(device.reserve));
        }
    }
    if let Some(flops) = device.flops {
        let _ = write!(text, "; {} TFLOP/s", shortened(flops / 1e12));
        if mfu < 1.0 {
            let _ = write!(text, ", of which training reaches {mfu}");
        }
    }
    text
}

fn precision(device: &Planned) -> String {
    let mut precision = device.precision.to_owned();
    if precision == "f32" && device.has_own_memory {
        precision.push_str("; a GPU needs less time and memory with `train.precision: bf16`");
    }
    precision
}

fn facts(comparison: &Comparison, machines: &Machines, context: &Context) -> String {
    let Comparison { work, model, .. } = comparison;
    let (first, batch) = (&comparison.candidates[0], &comparison.candidates[0].batch);
    let cluster = machines.cluster;
    let ranks = format!(
        "{} = {} × {}{}",
        cluster.ranks(),
        counted(cluster.nodes, "node"),
        cluster.ranks_a_node,
        if context.has_default_ranks {
            " (default of `--nproc-per-node`)"
        } else {
            ""
        },
    );
    let global_batch = format!(
        "{} samples = {} tokens ({} × {} × {} of {} tokens)",
        grouped(batch.samples()),
        grouped(batch.tokens()),
        first.mesh.data_ranks(),
        counted(batch.accumulation, "micro-batch"),
        counted(batch.micro_batch, "sample"),
        grouped(batch.block_size),
    );
    let again = match work.repeated {
        0 => String::new(),
        repeated => format!(", {} of it recomputed", shortened(repeated as f64 / 1e9)),
    };
    let of_rank = work.total() as f64 * batch.tokens() as f64 / cluster.ranks() as f64;
    let arithmetic = format!(
        "{} GFLOP per token{again}, {} TFLOP per rank and step",
        shortened(work.total() as f64 / 1e9),
        shortened(of_rank / 1e12),
    );
    let mut text = String::new();
    for (name, value) in [
        (
            "model",
            format!("{model}, {} parameters", grouped(first.estimate.parameters)),
        ),
        ("ranks", ranks + &layout(first)),
        ("device", of_device(machines, context)),
        ("precision", precision(context.device)),
        ("bandwidth", bandwidth(&cluster, context.mfu)),
        ("global batch", global_batch),
        ("arithmetic", arithmetic),
    ] {
        let _ = writeln!(text, "{name:<14}  {value}");
    }
    text
}

/// The mesh, if its ranks are not only data-parallel.
fn layout(given: &Candidate) -> String {
    let schedule = match given.layers.len() {
        _ if given.batch.ranks == given.mesh.ranks() as u64 => return String::new(),
        1 => String::new(),
        _ => format!(", {} with {} layers", given.schedule, layers(given)),
    };
    format!(": {}{schedule}", given.mesh)
}

/// Layers of each rank of a pipeline, in order: `21, 3 × 20`.
pub(super) fn layers(candidate: &Candidate) -> String {
    let runs: Vec<&[usize]> = candidate.layers.chunk_by(|a, b| a == b).collect();
    let words = runs.iter().map(|run| match run.len() {
        several if several > 1 && runs.len() > 1 => format!("{several} × {}", run[0]),
        _ => run[0].to_string(),
    });
    words.collect::<Vec<_>>().join(", ")
}

fn bandwidth(cluster: &Cluster, mfu: f64) -> String {
    let rate = |rate: f64| format!("{} GB/s", shortened(rate / mfu / 1e9));
    let mut rates = Vec::new();
    if cluster.ranks_a_node > 1 {
        rates.push(match cluster.link {
            Some(link) => format!("{} per rank within a node", rate(link)),
            None => "not known within a node: set `--link`".to_owned(),
        });
    }
    if cluster.nodes > 1 {
        rates.push(match cluster.network {
            Some(network) => format!("{} per node to other nodes", rate(network)),
            None => "not known between nodes: set `--network`".to_owned(),
        });
    }
    if rates.is_empty() {
        return "not needed: one rank".to_owned();
    }
    if mfu < 1.0 {
        rates.push(format!("of which training reaches {mfu}"));
    }
    rates.join(", ")
}

/// The table of strategies, one per column.
fn strategies(comparison: &Comparison, context: &Context) -> String {
    let (bytes, [least, most]) = (context.bytes, bounds(context.mfu));
    let candidates = &comparison.candidates;
    let row = |title: &str, cell: &dyn Fn(&Candidate) -> String| -> Vec<String> {
        let cells = candidates.iter().map(cell);
        std::iter::once(title.to_owned()).chain(cells).collect()
    };
    let size = |title: &str, bytes_of: fn(&Candidate) -> u64| row(title, &|c| bytes(bytes_of(c)));
    // Left out if no strategy has the number.
    let known = |title: &str, value: &dyn Fn(&Candidate) -> Option<String>| {
        let is_known = candidates.iter().any(|c| value(c).is_some());
        is_known.then(|| row(title, &|c| value(c).unwrap_or_else(|| UNKNOWN.to_owned())))
    };
    let first = &candidates[0];
    let (tokens, all) = (first.batch.tokens() as f64, first.estimate.parameters as f64);
    let mut rows = vec![
        row("", &|c| name(c).to_owned()),
        size("parameters", |c| c.estimate.held.params),
        size("gathered", |c| c.estimate.held.gathered),
        size("gradients", |c| c.estimate.held.grads),
        size("optimizer", |c| c.estimate.held.optimizer),
        row("  B/parameter", &|c| format!("{:.1}", c.state() as f64 / all)),
        size("activations", |c| c.estimate.held.activations),
        size("on the device", |c| c.held),
        size(first.offloaded_to, Candidate::offloaded),
    ];
    rows.extend(known("fits", &|c| {
        Some(if c.fits? { "yes" } else { "no" }.to_owned())
    }));
    rows.push(size("sent per rank", |c| c.sent.total()));
    for (title, axis) in GROUPS {
        rows.push(row(title, &|c| bytes(c.sent.exchanged_along(&[axis]))));
    }
    rows.push(size("  to other stages", |c| c.sent.along(&[Axis::Pipeline])));
    rows.push(size("    activations", |c| c.sent.pipeline));
    rows.extend(known("arithmetic", &|c| c.times.busy.compute.map(duration)));
    rows.extend(known("exchanges", &|c| c.times.busy.exchanges.map(duration)));
    rows.push(row("pipeline bubble", &|c| share(c.times.bubble)));
    rows.extend(known("communication", &|c| c.communication.map(duration)));
    rows.extend(known(&format!("step time{least}"), &|c| c.seconds.map(duration)));
    rows.extend(known(&format!("tokens/s{most}"), &|c| {
        Some(grouped((tokens / c.seconds?) as u64))
    }));
    columns(without_nothing(rows))
}

/// `3.1 %`
pub(super) fn share(part: f64) -> String {
    format!("{:.1} %", part * 100.0)
}

pub(super) fn name(candidate: &Candidate) -> &'static str {
    Strategy::WORDS[candidate.estimate.strategy as usize]
}

fn advice(comparison: &Comparison, machines: &Machines, context: &Context) -> String {
    let bytes = context.bytes;
    let (Some(advice), Some(memory)) = (&comparison.advice, machines.memory) else {
        let flags = if machines.has_own_memory {
            "`--gpu` or `--memory`"
        } else {
            "`--memory`"
        };
        return format!("The best strategy depends on the memory of a device: set {flags}.\n");
    };
    match advice {
        Advice::Take(strategy) => {
            let taken = Strategy::WORDS[*strategy as usize];
            format!("Of the strategies that fit, `parallel.strategy: {taken}` sends least.\n")
        }
        Advice::Change(None) => format!(
            "No strategy fits into {}, not even with recomputation and offloaded state: use a smaller `train.micro_batch`, divide layers or samples (`parallel.tensor`, `parallel.context`), or take more nodes.\n",
            bytes(memory)
        ),
        Advice::Change(Some(found)) => format!(
            "No strategy fits into {} as configured. `{}` needs {} with:\n {}\n",
            bytes(memory),
            name(&found.candidate),
            bytes(found.candidate.held),
            flags(&found.settings)
        ),
    }
}

/// ` --set KEY=VALUE` for each of the settings.
pub(super) fn flags(settings: &[String]) -> String {
    settings.iter().flat_map(|setting| [" --set ", setting]).collect()
}

/// Removes rows without information.
pub(super) fn without_nothing(mut rows: Vec<Vec<String>>) -> Vec<Vec<String>> {
    rows.retain(|row| !row[1..].iter().all(|cell| NOTHING.contains(&cell.as_str())));
    rows
}

/// A table with the numbers aligned right; several below each other, where it would be too wide.
pub(super) fn columns(mut rows: Vec<Vec<String>>) -> String {
    let table = |rows: &[Vec<String>], cells: usize| {
        let rows = rows.iter().map(|row| row[..cells].to_vec());
        answer::table(rows, |column| column > 0)
    };
    let is_narrow = |text: &str| text.lines().all(|line| line.chars().count() <= WIDTH);
    let mut text = String::new();
    loop {
        let all = rows[0].len();
        let narrow = (3..=all).rev().find(|cells| is_narrow(&table(&rows, *cells)));
        let shown = narrow.unwrap_or(all.min(2));
        text.push_str(&table(&rows, shown));
        if shown == all {
            return text;
        }
        text.push('\n');
        for row in &mut rows {
            row.drain(1..shown);
        }
    }
}

/// `12.3 ms`, `12.3 s`
pub(super) fn duration(seconds: f64) -> String {
    if seconds < 10.0 {
        format!("{} ms", shortened(seconds * 1e3))
    } else {
        format!("{} s", shortened(seconds))
    }
}

/// Three significant digits: `0.123`, `12.3`, `1234`.
fn shortened(number: f64) -> String {
    let digits = match number.abs() {
        n if n >= 99.95 => 0,
        n if n >= 9.995 => 1,
        n if n >= 0.9995 => 2,
        _ => 3,
    };
    format!("{number:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::native::{Draft, Precision, costs::Accelerator};

    fn plan(more: &str, gpu: &str, [nodes, ranks_a_node]: [u64; 2], mfu: f64) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train.yaml");
        let model =
            "{kind: gpt2, n_layer: 32, n_head: 32, n_embd: 4096, block_size: 2048, vocab_size: 50304}";
        std::fs::write(
            &path,
            format!("model: {model}\ndata: {{train: absent.txt}}\n{more}"),
        )
        .unwrap();
        let draft = Draft::read(&path, &[]).unwrap();
        let sheet = Accelerator::named(gpu);
        let device = Planned {
            source: sheet.map_or("not known".into(), |sheet| sheet.name.into()),
            memory: sheet.map(|sheet| sheet.memory),
            flops: sheet.map(|sheet| sheet.flops(draft.config().train.precision)),
            link: sheet.map(|sheet| sheet.link),
            precision: Precision::WORDS[draft.config().train.precision as usize],
            has_own_memory: true,
            ..Planned::default()
        };
        let machines = Machines {
            cluster: Cluster {
                nodes,
                ranks_a_node,
                link: device.link.map(|rate| rate * mfu),
                network: sheet.map(|_| 50e9 * mfu),
            },
            memory: device.memory,
            flops: device.flops.map(|flops| flops * mfu),
            has_own_memory: true,
        };
        text(
            &draft.comparison(&machines).unwrap(),
            &machines,
            &Context {
                device: &device,
                bytes: ddp_proto::words::bytes,
                mfu,
                has_default_ranks: false,
            },
        )
    }

    #[test]
    fn seven_billion_parameters_on_two_nodes() {
        let more = "train: {precision: bf16, micro_batch: 4}\nparallel: {overlap: false}";
        insta::assert_snapshot!(plan(more, "h100", [2, 8], 1.0), @r"
        model           gpt2 32 × 4096, 6,658,596,864 parameters
        ranks           16 = 2 nodes × 8
        device          h100; 74.5 GiB of 74.5 GiB for training; 989 TFLOP/s
        precision       bf16
        bandwidth       450 GB/s per rank within a node, 50.0 GB/s per node to other nodes
        global batch    64 samples = 131,072 tokens (16 ranks × 1 micro-batch × 4 samples of 2,048 tokens)
        arithmetic      41.5 GFLOP per token, 340 TFLOP per rank and step

                                    ddp     zero1     zero2      zero3
         parameters            12.5 GiB  12.5 GiB  12.5 GiB  797.6 MiB
         gathered                   0 B       0 B       0 B    1.2 GiB
         gradients             24.9 GiB  24.9 GiB   2.8 GiB    3.8 GiB
         optimizer             74.8 GiB   4.7 GiB   4.7 GiB    4.7 GiB
           B/parameter             18.1       6.8       3.2        1.5
         activations           21.0 GiB  21.0 GiB  21.0 GiB   21.0 GiB
         on the device        133.1 GiB  63.0 GiB  41.0 GiB   31.4 GiB
         fits                        no       yes       yes        yes
         sent per rank         46.7 GiB  35.1 GiB  35.1 GiB   46.4 GiB
         arithmetic              344 ms    344 ms    344 ms     344 ms
         communication           535 ms    401 ms    402 ms     531 ms
         step time, at least     879 ms    745 ms    746 ms     875 ms
         tokens/s, at most      149,134   175,918   175,799    149,866

        Of the strategies that fit, `parallel.strategy: zero2` sends least.
        ");
    }

    #[test]
    fn where_nothing_fits_it_says_what_would() {
        insta::assert_snapshot!(plan("train: {micro_batch: 8}", "a100-40gb", [1, 8], 0.4), @r"
        model           gpt2 32 × 4096, 6,658,596,864 parameters
        ranks           8 = 1 node × 8
        device          a100-40gb; 37.3 GiB of 37.3 GiB for training; 19.5 TFLOP/s, of which training reaches 0.4
        precision       f32; a GPU needs less time and memory with `train.precision: bf16`
        bandwidth       300 GB/s per rank within a node, of which training reaches 0.4
        global batch    64 samples = 131,072 tokens (8 ranks × 1 micro-batch × 8 samples of 2,048 tokens)
        arithmetic      41.5 GFLOP per token, 680 TFLOP per rank and step

                              ddp      zero1      zero2      zero3
         parameters      24.9 GiB   24.9 GiB   24.9 GiB    3.1 GiB
         gathered             0 B        0 B        0 B    2.3 GiB
         gradients       24.9 GiB   24.9 GiB    4.4 GiB    5.4 GiB
         optimizer       49.7 GiB    6.2 GiB    6.2 GiB    6.2 GiB
           B/parameter       16.0        9.0        5.7        2.4
         activations     83.9 GiB   83.9 GiB   83.9 GiB   83.9 GiB
         on the device  183.3 GiB  139.8 GiB  119.4 GiB  100.9 GiB
         fits                  no         no         no         no
         sent per rank   43.5 GiB   43.5 GiB   43.5 GiB   64.6 GiB
         arithmetic        87.2 s     87.2 s     87.2 s     87.2 s
         communication     389 ms     389 ms     390 ms     578 ms
         step time         87.2 s     87.2 s     87.2 s     87.2 s
         tokens/s           1,503      1,503      1,503      1,503

        No strategy fits into 37.3 GiB as configured. `zero3` needs 29.6 GiB with:
          --set parallel.strategy=zero3 --set train.recompute=full
        ");
    }

    #[test]
    fn without_a_device_there_is_memory_and_traffic() {
        insta::assert_snapshot!(plan("train: {micro_batch: 1}", "none", [1, 2], 1.0), @r"
        model           gpt2 32 × 4096, 6,658,596,864 parameters
        ranks           2 = 1 node × 2
        device          not known
        precision       f32; a GPU needs less time and memory with `train.precision: bf16`
        bandwidth       not known within a node: set `--link`
        global batch    2 samples = 4,096 tokens (2 ranks × 1 micro-batch × 1 sample of 2,048 tokens)
        arithmetic      41.5 GFLOP per token, 85.0 TFLOP per rank and step

                              ddp     zero1     zero2     zero3
         parameters      24.8 GiB  24.8 GiB  24.8 GiB  12.4 GiB
         gathered             0 B       0 B       0 B   2.3 GiB
         gradients       24.8 GiB  24.8 GiB  13.7 GiB  14.7 GiB
         optimizer       49.6 GiB  24.8 GiB  24.8 GiB  24.8 GiB
           B/parameter       16.0      12.0      10.2       8.4
         activations     10.5 GiB  10.5 GiB  10.5 GiB  10.5 GiB
         on the device  109.7 GiB  84.9 GiB  73.8 GiB  64.7 GiB
         sent per rank   24.8 GiB  24.8 GiB  24.8 GiB  36.8 GiB

        The best strategy depends on the memory of a device: set `--gpu` or `--memory`.
        ");
        for (home, row) in [
            ("host", " in host memory  74.5 GiB"),
            ("file", " in a file      49.6 GiB"),
        ] {
            let offloaded = format!("train: {{micro_batch: 1, offload: {{optimizer: {home}}}}}");
            let text = plan(&offloaded, "none", [1, 2], 1.0);
            assert!(text.contains(row) && text.contains("60.1 GiB"), "{home} {text}");
        }
    }

    #[test]
    fn a_table_that_is_too_wide_becomes_several() {
        let row = |title: &str| {
            let cells = (0..9).map(|i| format!("{i:>18}"));
            std::iter::once(title.to_owned()).chain(cells).collect()
        };
        let text = columns(vec![row("first"), row("second")]);
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert_eq!(text.matches("first").count(), 3);
        assert!((0..9).all(|i| text.matches(&i.to_string()).count() == 2));
    }

    #[test]
    fn three_digits_count() {
        let words = [0.0, 0.1234, 1.0, 9.9999, 12.34, 99.99, 1234.5].map(shortened);
        assert_eq!(words, ["0.000", "0.123", "1.00", "10.0", "12.3", "100", "1234"]);
    }
}
