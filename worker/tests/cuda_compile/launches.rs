//! Every launch that training and the comparisons of operations make, against the limits of every kind of card.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;

use ddp_worker::device::cuda::{Grid, Unit};
use ddp_worker::ops::cuda::{Arg, Call, units};

use crate::card::{CARDS, Card};
use crate::compiled::{self, compiled};
use crate::cubin::{Resources, kernels};
use crate::op_cases::{Size, Types, catalogue};
use crate::paper::{Launch, Paper};
use crate::training::{JOBS, Job, WIDEST};

/// Threads of a block that have 64 registers each.
const ALL_THREADS: u32 = 1024;

/// Most bytes of local memory that a thread may have. Few kernels have any, and not where they spend their time:
///
/// - flash attention: addresses and flags, read once for each step of 64 rows and never within its products;
/// - cross-entropy: values that are read once a row, for which 2,048 threads fit on a multiprocessor;
/// - layer normalisation: sums of more than 8,192 channels, which no block has registers for; below that a number or two.
///
/// How many bytes it is depends a little on the compiler: so many with NVRTC 12.9 and 13.2.
fn local_bytes(call: &Call) -> u32 {
    match (call.kernel, call.grid.threads[0]) {
        ("flash_forward" | "flash_dkv", _) => 64,
        ("layernorm_backward", ALL_THREADS) => 256,
        ("cross_entropy" | "layernorm_forward" | "layernorm_backward", _) => 16,
        _ => 0,
    }
}

/// A launch on a card.
struct Seen {
    card: Card,
    launch: Launch,
    kernel: Resources,
}

/// All launches on all cards; none where there is no compiler.
fn seen(paper: &Arc<Paper>) -> Option<Vec<Seen>> {
    let nvrtc = compiled::nvrtc()?;
    let launches = paper.launches();
    let units: BTreeMap<String, Unit> = launches
        .iter()
        .map(|launch| Unit::new(launch.call.source, &launch.call.defines))
        .map(|unit| (unit.to_string(), unit))
        .collect();
    let units: Vec<Unit> = units.into_values().collect();
    let mut seen = Vec::new();
    for card in CARDS {
        let cubins = compiled(&nvrtc, &units, card.arch);
        let known: BTreeMap<String, BTreeMap<String, Resources>> = units
            .iter()
            .map(ToString::to_string)
            .zip(
                cubins
                    .into_iter()
                    .map(|cubin| kernels(&cubin.unwrap_or_else(|error| panic!("{error}")))),
            )
            .collect();
        for launch in &launches {
            let unit = Unit::new(launch.call.source, &launch.call.defines).to_string();
            let kernel = known[&unit].get(launch.call.kernel);
            let kernel = kernel.unwrap_or_else(|| panic!("`{unit}` has no kernel `{}`", launch.call.kernel));
            assert!(
                kernel.registers > 0 && kernel.max_threads > 0,
                "`{unit}`: {kernel:?}"
            );
            seen.push(Seen {
                card,
                launch: launch.clone(),
                kernel: kernel.clone(),
            });
        }
    }
    Some(seen)
}

impl Seen {
    fn refusals(&self) -> Vec<String> {
        self.card.refusals(&self.kernel, &self.launch.call)
    }

    /// Which launch on which card, for errors.
    fn which(&self) -> String {
        let call = &self.launch.call;
        let unit = Unit::new(call.source, &call.defines);
        format!(
            "{}, {}: `{}` of {unit}, {:?}",
            self.card.arch, self.launch.of, call.kernel, call.grid
        )
    }
}

fn train(jobs: &[Job]) -> Arc<Paper> {
    let paper = Paper::new();
    for job in jobs {
        for types in Types::ALL {
            job.step(&paper, types);
        }
    }
    paper
}

/// The small cases have every path of every kernel; training has the sizes.
fn everything() -> Arc<Paper> {
    let paper = train(&JOBS);
    for case in catalogue(Size::Small) {
        paper.begin(&case.name);
        for types in Types::ALL {
            paper.ask(&case.operation(paper.as_ref(), types).unwrap());
        }
    }
    paper
}

#[test]
fn every_launch_is_within_the_limits_of_every_card() {
    let paper = everything();
    let asked: BTreeSet<&str> = paper
        .launches()
        .iter()
        .map(|launch| launch.call.source.file)
        .collect();
    let all: BTreeSet<&str> = units().iter().map(|unit| unit.source.file).collect();
    assert_eq!(asked, all, "files whose kernels are launched");
    let Some(seen) = seen(&paper) else { return };
    let refused: Vec<String> = seen
        .iter()
        .flat_map(|seen| {
            seen.refusals()
                .into_iter()
                .map(|why| format!("{}: {why}", seen.which()))
        })
        .collect();
    println!("{}", table(&seen));
    assert!(
        refused.is_empty(),
        "{} refused:\n{}",
        refused.len(),
        refused.join("\n")
    );
}

#[test]
fn only_what_is_known_to_spills_registers() {
    let Some(seen) = seen(&everything()) else { return };
    let too_much = seen
        .iter()
        .filter(|seen| seen.kernel.local_bytes > local_bytes(&seen.launch.call));
    let words = too_much.map(|seen| format!("{}: {} bytes a thread", seen.which(), seen.kernel.local_bytes));
    let words: Vec<String> = words.collect();
    assert!(words.is_empty(), "local memory:\n{}", words.join("\n"));
}

/// What the driver refuses is refused for one reason, on the cards that it is known of.
#[test]
fn backward_of_the_widest_heads_lacks_shared_memory_on_small_cards_only() {
    let Some(seen) = seen(&train(&[WIDEST])) else {
        return;
    };
    let mut kernels = BTreeSet::new();
    for seen in seen {
        for why in seen.refusals() {
            assert!(
                why.contains("shared memory") && seen.card.shared == 99 << 10,
                "{}: {why}",
                seen.which()
            );
            kernels.insert(seen.launch.call.kernel);
        }
    }
    assert_eq!(kernels, ["attention_dkv", "attention_dq"].into());
}

/// A line for each kernel and card, of the launch that takes most.
fn table(seen: &[Seen]) -> String {
    let mut lines: BTreeMap<(&str, String), [u64; 5]> = BTreeMap::new();
    for seen in seen {
        let call = &seen.launch.call;
        let numbers = [
            u64::from(seen.kernel.registers),
            u64::from(seen.kernel.local_bytes),
            seen.card.shared_by(&seen.kernel, call) as u64,
            call.grid.threads.iter().map(|n| u64::from(*n)).product(),
            seen.kernel.parameters.iter().sum::<usize>() as u64,
        ];
        let line = lines
            .entry((call.kernel, seen.card.arch.to_string()))
            .or_default();
        for (most, number) in line.iter_mut().zip(numbers) {
            *most = number.max(*most);
        }
    }
    let mut table = format!(
        "{:<20} {:<8} {:>9} {:>9} {:>9} {:>7} {:>10}\n",
        "kernel", "card", "registers", "local B", "shared B", "threads", "parameters"
    );
    for ((kernel, card), [registers, local, shared, threads, parameters]) in lines {
        writeln!(
            table,
            "{kernel:<20} {card:<8} {registers:>9} {local:>9} {shared:>9} {threads:>7} {parameters:>10}"
        )
        .expect("text can grow");
    }
    table
}

/// A kernel of so many registers a thread, compiled for 1,024 of them.
fn of_registers(registers: u32) -> Resources {
    Resources {
        registers,
        max_threads: 1024,
        ..Resources::default()
    }
}

fn launch(grid: Grid, args: Vec<Arg>) -> Call {
    Call {
        source: units()[0].source,
        kernel: "none",
        defines: Vec::new(),
        grid,
        args,
    }
}

#[test]
fn what_a_card_would_refuse_is_found() {
    let small = &CARDS[1];
    let refusals = |kernel: &Resources, grid| small.refusals(kernel, &launch(grid, Vec::new()));
    let expect = |kernel: &Resources, grid, expected: &str| {
        let found = refusals(kernel, grid);
        assert!(
            found.len() == 1 && found[0].contains(expected),
            "{grid:?}: {found:?}"
        );
    };
    let lean = of_registers(32);
    let narrow = Resources {
        max_threads: 128,
        ..lean.clone()
    };
    let shares = Resources {
        shared_bytes: 1 << 10,
        ..lean.clone()
    };
    assert_eq!(
        refusals(&lean, Grid::linear(1 << 20, 1024).with_shared(99 << 10)),
        [""; 0]
    );
    assert_eq!(refusals(&of_registers(255), Grid::linear(1, 256)), [""; 0]);
    assert_eq!(refusals(&of_registers(64), Grid::linear(1, 1024)), [""; 0]);
    expect(&lean, Grid::linear(1, 2048), "2048 × 1 × 1 threads");
    expect(&lean, Grid::linear(1, 0), "0 × 1 × 1 threads");
    expect(
        &lean,
        Grid {
            threads: [1, 1, 128],
            ..Grid::linear(1, 1)
        },
        "1 × 1 × 128 threads",
    );
    expect(&narrow, Grid::linear(1, 256), "compiled for 128");
    expect(
        &of_registers(255),
        Grid::linear(1, 257),
        "9 warps of 255 registers",
    );
    expect(
        &of_registers(65),
        Grid::linear(1, 1024),
        "32 warps of 65 registers",
    );
    expect(&lean, Grid::linear(1 << 31, 1), "blocks");
    expect(
        &lean,
        Grid {
            blocks: [1, 65_536, 1],
            ..Grid::linear(1, 1)
        },
        "blocks",
    );
    expect(
        &lean,
        Grid {
            blocks: [1, 1, 65_536],
            ..Grid::linear(1, 1)
        },
        "blocks",
    );
    expect(&lean, Grid::linear(1, 1).with_shared((99 << 10) + 1), "of 101376");
    expect(&shares, Grid::linear(1, 1).with_shared(99 << 10), "of 101376");
    let takes = Resources {
        parameters: vec![8, 4],
        ..lean.clone()
    };
    let found = small.refusals(
        &takes,
        &launch(Grid::linear(1, 1), vec![Arg::U64(0), Arg::U64(0)]),
    );
    assert!(
        found.len() == 1 && found[0].contains("arguments of [8, 8] bytes for parameters of [8, 4]"),
        "{found:?}"
    );
    let words = 513;
    let table = Resources {
        parameters: vec![8 * words],
        ..lean
    };
    let found = small.refusals(
        &table,
        &launch(Grid::linear(1, 1), vec![Arg::Table(vec![0; words])]),
    );
    assert_eq!(found, ["4104 bytes of parameters"]);
}
