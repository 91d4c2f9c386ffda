//! Every launch that training and the comparisons of operations make, against the limits of every kind of card.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use ddp_worker::cuda::{CompileUnit, Define};
use ddp_worker::ops::cuda::Call;

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
/// - attention with f32, of narrow heads and of grouped queries: a number or two of the keys' part;
/// - layer normalisation: sums of more than 8,192 channels, which no block has registers for; below that a number or two.
/// - rows by index: a division of 64 bits, on one card.
///
/// How many bytes it is depends a little on the compiler: so many with NVRTC 12.9 and 13.2.
fn local_bytes(call: &Call) -> u32 {
    let has_mask = call
        .unit
        .defines
        .iter()
        .any(|define| define.to_string() == "DROPOUT=1");
    match (call.kernel, call.grid.threads[0]) {
        _ if has_mask => 128,
        ("flash_forward" | "flash_dkv", _) => 64,
        ("norm_backward", ALL_THREADS) => 256,
        ("attention_forward" | "attention_dq" | "cross_entropy" | "norm_forward" | "norm_backward", _) => 16,
        ("index_rows", _) => 8,
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
        .map(|launch| launch.call.unit.clone())
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
            let unit = launch.call.unit.to_string();
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
        let unit = &call.unit;
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
        .map(|launch| launch.call.unit.source.file)
        .collect();
    let all = files();
    let all: BTreeSet<&str> = all.iter().map(String::as_str).collect();
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

/// The files of kernels, by name.
fn files() -> Vec<String> {
    let folders =
        ["src/ops/cuda", "src/optim"].map(|folder| Path::new(env!("CARGO_MANIFEST_DIR")).join(folder));
    let entries = folders.iter().flat_map(|folder| folder.read_dir().unwrap());
    let paths = entries.map(|entry| entry.unwrap().path());
    let kernels = paths.filter(|path| path.extension().is_some_and(|ending| ending == "cu"));
    kernels
        .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
        .collect()
}

/// What other sizes than those of [`everything`] are compiled as: unaligned buffers, wide heads, shared heads.
const OTHERS: [&str; 38] = [
    "adamw.cu GRAD=bf16 COPY=0 SLOTS=2 RUNS=456 RATES=32 CONSTANTS=8 VEC=1",
    "adamw.cu GRAD=f32 COPY=0 SLOTS=2 RUNS=456 RATES=32 CONSTANTS=8 VEC=1",
    "attention.cu ACT=bf16 HEAD=48 TILE=64 DROPOUT=1",
    "attention.cu ACT=f32 HEAD=256 TILE=32",
    "attention.cu ACT=f32 HEAD=64 TILE=64 HEADS_PER_KV=4",
    "attention.cu ACT=f32 HEAD=96 TILE=32",
    "cast.cu FROM=bf16 TO=bf16 VEC=1",
    "cast.cu FROM=bf16 TO=f32 VEC=1",
    "cast.cu FROM=f32 TO=bf16 VEC=1",
    "cast.cu FROM=f32 TO=f32 VEC=1",
    "decode.cu ACT=bf16 HEAD=128 HEADS=4 VEC=8",
    "decode.cu ACT=bf16 HEAD=64 HEADS=1 VEC=8",
    "decode.cu ACT=f32 HEAD=64 HEADS=8 VEC=8",
    "fill.cu ACT=bf16 VEC=1",
    "fill.cu ACT=bf16 VEC=8",
    "flash_backward.cu HEAD=128 WARPS=4 ROW_TILES=1 STEP=64 BLOCKS=1 PART=32 RESIDENT=1 HEADS_PER_KV=4",
    "flash_backward.cu HEAD=32 WARPS=4 ROW_TILES=2 STEP=64 BLOCKS=2 PART=32 RESIDENT=2 HEADS_PER_KV=4",
    "flash_backward.cu HEAD=64 WARPS=4 ROW_TILES=2 STEP=64 BLOCKS=2 PART=32 RESIDENT=1 HEADS_PER_KV=4",
    "flash_forward.cu HEAD=128 WARPS=4 ROW_TILES=1 STEP=64 BLOCKS=2 HEADS_PER_KV=4",
    "flash_forward.cu HEAD=32 WARPS=4 ROW_TILES=1 STEP=64 BLOCKS=4 HEADS_PER_KV=4",
    "flash_forward.cu HEAD=64 WARPS=4 ROW_TILES=2 STEP=64 BLOCKS=2 HEADS_PER_KV=4",
    "lion.cu GRAD=bf16 COPY=0 SLOTS=1 RUNS=456 RATES=32 CONSTANTS=8 VEC=1",
    "lion.cu GRAD=f32 COPY=0 SLOTS=1 RUNS=456 RATES=32 CONSTANTS=8 VEC=1",
    "muon.cu GRAD=bf16 COPY=0 SLOTS=0 RUNS=456 RATES=32 CONSTANTS=8 VEC=1",
    "muon.cu GRAD=bf16 COPY=0 SLOTS=1 RUNS=456 RATES=32 CONSTANTS=8 VEC=1",
    "muon.cu GRAD=f32 COPY=0 SLOTS=0 RUNS=456 RATES=32 CONSTANTS=8 VEC=1",
    "muon.cu GRAD=f32 COPY=0 SLOTS=1 RUNS=456 RATES=32 CONSTANTS=8 VEC=1",
    "norm.cu GRAD=bf16 VEC=1",
    "norm.cu GRAD=f32 VEC=1",
    "rotary.cu ACT=bf16 HEAD=128 VEC=8",
    "row_norm.cu CENTERED=0 ACT=bf16 VEC=8 CHANNELS=128 ROW_THREADS=32",
    "row_norm.cu CENTERED=0 ACT=f32 VEC=8 CHANNELS=128 ROW_THREADS=32",
    "row_norm.cu CENTERED=1 ACT=bf16 VEC=8 CHANNELS=128 ROW_THREADS=32",
    "row_norm.cu CENTERED=1 ACT=f32 VEC=8 CHANNELS=128 ROW_THREADS=32",
    "sgd.cu GRAD=bf16 COPY=0 SLOTS=0 RUNS=456 RATES=32 CONSTANTS=8 VEC=1",
    "sgd.cu GRAD=bf16 COPY=0 SLOTS=1 RUNS=456 RATES=32 CONSTANTS=8 VEC=1",
    "sgd.cu GRAD=f32 COPY=0 SLOTS=0 RUNS=456 RATES=32 CONSTANTS=8 VEC=1",
    "sgd.cu GRAD=f32 COPY=0 SLOTS=1 RUNS=456 RATES=32 CONSTANTS=8 VEC=1",
];

/// A unit by its text, which has the names of a unit that is launched.
fn unit_of(text: &str, launched: &[Launch]) -> CompileUnit {
    let leaked = |word: &str| -> &'static str { word.to_owned().leak() };
    let (file, defines) = text.split_once(' ').expect("a file");
    let defines = defines.split(' ').map(|define| {
        let (name, value) = define.split_once('=').expect("a value");
        match value.parse() {
            Ok(number) => Define::Number(leaked(name), number),
            Err(_) => Define::Word(leaked(name), leaked(value)),
        }
    });
    let defines: Vec<Define> = defines.collect();
    let of_file = launched.iter().map(|launch| &launch.call);
    let of_file: Vec<&Call> = of_file.filter(|call| call.unit.source.file == file).collect();
    let is_known = |define: &Define| {
        let name = define.to_string().split('=').next().map(str::to_owned);
        let mut known = of_file.iter().flat_map(|call| &call.unit.defines);
        known.any(|known| known.to_string().split('=').next() == name.as_deref())
    };
    assert!(
        defines.iter().all(is_known),
        "`{text}` has a name that no launch has"
    );
    CompileUnit {
        source: of_file[0].unit.source,
        defines,
    }
}

#[test]
fn what_other_sizes_are_compiled_as_compiles_too() {
    let launched = everything().launches();
    let units = OTHERS.map(|text| unit_of(text, &launched));
    assert_eq!(units.each_ref().map(ToString::to_string), OTHERS);
    let Some(nvrtc) = compiled::nvrtc() else { return };
    let mut failures = Vec::new();
    for Card { arch, .. } in card::tested() {
        let outcomes = compiled(&nvrtc, &units, arch);
        failures.extend(
            outcomes
                .into_iter()
                .filter_map(|outcome| Some(outcome.err()?.to_string())),
        );
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
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
