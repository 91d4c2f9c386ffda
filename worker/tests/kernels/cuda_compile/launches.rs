//! Every launch that training and the comparisons of operations make, against the limits of every kind of card.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;

use ddp_worker::device::cuda::CompileUnit;
use ddp_worker::ops::cuda::Call;
use ddp_worker::ops::units;
use ddp_worker::optim;

use super::card::{self, CARDS, Card};
use super::compiled::{self, compiled};
use super::cubin::{Resources, kernels};
use super::paper::{Launch, Paper};
use super::training::{JOBS, Job, WIDEST};
use crate::op_cases::{Size, Types, catalogue};

/// Threads of a block that have 64 registers each.
const ALL_THREADS: u32 = 1024;

/// Most bytes of local memory that a thread may have. Few kernels have any, and not where they spend their time:
///
/// - flash attention: addresses and flags, read once for each step of 64 rows and never within its products;
/// - cross-entropy: values that are read once a row, for which 2,048 threads fit on a multiprocessor;
/// - attention with dropout: the words of masks take registers;
/// - attention with f32 and grouped queries: a number or two of the keys' part;
/// - layer normalisation: sums of more than 8,192 channels, which no block has registers for; below that a number or two.
///
/// How many bytes it is depends a little on the compiler: so many with NVRTC 12.9 and 13.2.
fn local_bytes(call: &Call) -> u32 {
    let has_mask = call
        .defines
        .iter()
        .any(|define| define.to_string() == "DROPOUT=1");
    match (call.kernel, call.grid.threads[0]) {
        _ if has_mask => 128,
        ("flash_forward" | "flash_dkv", _) => 64,
        ("norm_backward", ALL_THREADS) => 256,
        ("attention_forward" | "cross_entropy" | "norm_forward" | "norm_backward", _) => 16,
        _ => 0,
    }
}

/// A launch on a card.
struct Seen {
    card: Card,
    launch: Launch,
    kernel: Resources,
}

/// All launches on these cards; nothing where there is no compiler.
fn seen(paper: &Paper, cards: &[Card]) -> Option<Vec<Seen>> {
    let nvrtc = compiled::nvrtc()?;
    let launches = paper.launches();
    let units: BTreeMap<String, CompileUnit> = launches
        .iter()
        .map(|launch| CompileUnit::new(launch.call.source, &launch.call.defines))
        .map(|unit| (unit.to_string(), unit))
        .collect();
    let units: Vec<CompileUnit> = units.into_values().collect();
    let mut seen = Vec::new();
    for &card in cards {
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
            let unit = CompileUnit::new(launch.call.source, &launch.call.defines).to_string();
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
        let unit = CompileUnit::new(call.source, &call.defines);
        format!(
            "{}, {}: `{}` of {unit}, {:?}",
            self.card.arch, self.launch.of, call.kernel, call.grid
        )
    }
}

fn train(jobs: &[Job]) -> Arc<Paper> {
    let paper = Paper::new();
    let device = paper.device();
    for job in jobs {
        paper.begin(&format!("a step of {}", job.name));
        for types in Types::ALL {
            job.step(&device, types);
        }
    }
    paper
}

/// The small cases have every path of every kernel; training has the sizes.
fn everything() -> Arc<Paper> {
    let paper = train(&JOBS);
    let device = paper.device();
    for case in catalogue(Size::Small) {
        paper.begin(&case.name);
        for types in Types::ALL {
            let op = case.operation(device.as_ref(), types).unwrap();
            device.enqueue(device.stream(), op);
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
    let all: BTreeSet<&str> = [units(), optim::units()]
        .iter()
        .flatten()
        .map(|unit| unit.source.file)
        .collect();
    assert_eq!(asked, all, "files whose kernels are launched");
    let Some(seen) = seen(&paper, &card::tested()) else {
        return;
    };
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
    let Some(seen) = seen(&everything(), &card::tested()) else {
        return;
    };
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
    let Some(seen) = seen(&train(&[WIDEST]), &CARDS) else {
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
