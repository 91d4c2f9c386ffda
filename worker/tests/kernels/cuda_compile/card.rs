//! What a card refuses of a launch, whatever the kernel does: limits of the CUDA C++ Programming Guide's table of compute
//! capabilities.

use ddp_worker::device::cuda::{Arch, CompileUnit, Grid, KernelSource};
use ddp_worker::ops::cuda::{Arg, Call};

use super::cubin::Resources;

/// Threads of a block.
const THREADS: u64 = 1024;
/// Threads of a block along z.
const THREADS_Z: u32 = 64;
/// Blocks of a grid along x, y and z.
const BLOCKS: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
/// Registers of a quarter of a multiprocessor, which runs every fourth warp, and in how many a warp gets them.
const REGISTERS: u32 = 16_384;
const REGISTER_UNIT: u32 = 256;
const WARP: u32 = 32;
/// Bytes of parameters, on every card and with every driver.
const PARAMETERS: usize = 4 << 10;

/// A kind of cards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Card {
    pub(crate) arch: Arch,
    /// Bytes of shared memory that a block can ask for.
    pub(crate) shared: usize,
    /// Bytes of shared memory that compiled kernels declare, and that do not count among those of the block.
    reserved: usize,
}

/// One for each amount of shared memory and each generation. What holds for sm_86 holds for sm_89.
pub(crate) const CARDS: [Card; 4] = [
    Card {
        arch: Arch::SM_80,
        shared: 163 << 10,
        reserved: 0,
    },
    Card {
        arch: Arch::of_capability(8, 6),
        shared: 99 << 10,
        reserved: 0,
    },
    Card {
        arch: Arch::SM_90A,
        shared: 227 << 10,
        reserved: 1 << 10,
    },
    Card {
        arch: Arch::of_capability(10, 0),
        shared: 227 << 10,
        reserved: 1 << 10,
    },
];

/// The cards whose kernels a test compiles: the one of sm_90a, which has the most kernels of its own, or all of them with
/// `DDP_CUDA_ARCHS=all`, which takes four times as long.
pub(crate) fn tested() -> Vec<Card> {
    let all = std::env::var("DDP_CUDA_ARCHS").is_ok_and(|archs| archs == "all");
    let is_tested = |card: &Card| all || card.arch == Arch::SM_90A;
    CARDS.into_iter().filter(is_tested).collect()
}

impl Card {
    /// Shared memory of a block of this launch in bytes: of the kernel, and of the launch.
    pub(crate) const fn shared_by(&self, kernel: &Resources, call: &Call) -> usize {
        kernel.shared_bytes.saturating_sub(self.reserved) + call.grid.shared_bytes
    }

    /// Everything for which the driver would refuse a launch, in words.
    pub(crate) fn refusals(&self, kernel: &Resources, call: &Call) -> Vec<String> {
        [grid(call), self.block(kernel, call), parameters(kernel, call)].concat()
    }

    fn block(&self, kernel: &Resources, call: &Call) -> Vec<String> {
        let [x, y, z] = call.grid.threads;
        let threads = u64::from(x) * u64::from(y) * u64::from(z);
        let mut found = Vec::new();
        if threads == 0 || threads > THREADS.min(kernel.max_threads) || z > THREADS_Z {
            found.push(format!(
                "{x} × {y} × {z} threads in a block, compiled for {}",
                kernel.max_threads
            ));
        }
        let of_a_warp = (kernel.registers * WARP).next_multiple_of(REGISTER_UNIT);
        let warps = threads.div_ceil(u64::from(WARP));
        if warps > u64::from(4 * (REGISTERS / of_a_warp.max(1))) {
            found.push(format!(
                "{warps} warps of {} registers a thread",
                kernel.registers
            ));
        }
        // What is more than 48 KiB is asked for when the kernel is launched.
        let shared = self.shared_by(kernel, call);
        if shared > self.shared {
            found.push(format!("{shared} bytes of shared memory, of {}", self.shared));
        }
        found
    }
}

fn grid(call: &Call) -> Vec<String> {
    // None at all are not launched.
    let blocks = call.grid.blocks;
    let outside = blocks.into_iter().zip(BLOCKS).any(|(blocks, most)| blocks > most);
    outside
        .then(|| format!("{blocks:?} blocks"))
        .into_iter()
        .collect()
}

fn parameters(kernel: &Resources, call: &Call) -> Vec<String> {
    let sizes: Vec<usize> = call.args.iter().map(bytes).collect();
    let mut found = Vec::new();
    if sizes != kernel.parameters {
        found.push(format!(
            "arguments of {sizes:?} bytes for parameters of {:?}",
            kernel.parameters
        ));
    }
    // Each at a multiple of its size, of 8 at most.
    let end = sizes.iter().fold(0_usize, |end, size| {
        end.next_multiple_of((*size).clamp(1, 8)) + size
    });
    if end > PARAMETERS {
        found.push(format!("{end} bytes of parameters"));
    }
    found
}

/// Of an argument.
fn bytes(arg: &Arg) -> usize {
    match arg {
        Arg::Read(_) | Arg::Write(_) | Arg::Scratch(_) | Arg::Null | Arg::U64(_) => 8,
        Arg::U32(_) | Arg::F32(_) => 4,
        Arg::Table(words) => 8 * words.len(),
    }
}

/// A kernel of so many registers a thread, compiled for 1,024 of them.
fn of_registers(registers: u32) -> Resources {
    Resources {
        registers,
        max_threads: THREADS,
        ..Resources::default()
    }
}

static NONE: KernelSource = KernelSource::with_headers("none.cu", "", &[]);

/// What is said of a launch on a card with little shared memory.
fn refusals(kernel: &Resources, grid: Grid, args: Vec<Arg>) -> Vec<String> {
    let call = Call {
        unit: CompileUnit::new(&NONE, Vec::new()),
        kernel: "none",
        grid,
        args,
    };
    CARDS[1].refusals(kernel, &call)
}

#[track_caller]
fn assert_refused(kernel: &Resources, grid: Grid, expected: &str) {
    let found = refusals(kernel, grid, Vec::new());
    assert!(
        found.len() == 1 && found[0].contains(expected),
        "{grid:?}: {found:?}"
    );
}

#[track_caller]
fn assert_launched(kernel: &Resources, grid: Grid) {
    assert_eq!(refusals(kernel, grid, Vec::new()), [""; 0]);
}

#[test]
fn too_many_threads_or_registers_are_refused() {
    let lean = of_registers(32);
    assert_launched(&lean, Grid::linear(1 << 20, 1024));
    assert_refused(&lean, Grid::linear(1, 2048), "2048 × 1 × 1 threads");
    assert_refused(&lean, Grid::linear(1, 0), "0 × 1 × 1 threads");
    let deep = Grid {
        threads: [1, 1, 128],
        ..Grid::linear(1, 1)
    };
    assert_refused(&lean, deep, "1 × 1 × 128 threads");
    let narrow = Resources {
        max_threads: 128,
        ..lean
    };
    assert_refused(&narrow, Grid::linear(1, 256), "compiled for 128");
    assert_launched(&of_registers(255), Grid::linear(1, 256));
    assert_refused(
        &of_registers(255),
        Grid::linear(1, 257),
        "9 warps of 255 registers",
    );
    assert_launched(&of_registers(64), Grid::linear(1, 1024));
    assert_refused(
        &of_registers(65),
        Grid::linear(1, 1024),
        "32 warps of 65 registers",
    );
}

#[test]
fn too_many_blocks_are_refused() {
    let lean = of_registers(32);
    let grid = |blocks| Grid {
        blocks,
        ..Grid::linear(1, 1)
    };
    assert_launched(&lean, grid([(1 << 31) - 1, 65_535, 65_535]));
    for blocks in [[1 << 31, 1, 1], [1, 65_536, 1], [1, 1, 65_536]] {
        assert_refused(&lean, grid(blocks), "blocks");
    }
}

#[test]
fn too_much_shared_memory_is_refused() {
    let lean = of_registers(32);
    let shares = Resources {
        shared_bytes: 1 << 10,
        ..lean.clone()
    };
    let grid = |bytes| Grid::linear(1, 1).with_shared(bytes);
    assert_launched(&lean, grid(99 << 10));
    assert_refused(&lean, grid((99 << 10) + 1), "of 101376");
    assert_launched(&shares, grid(98 << 10));
    assert_refused(&shares, grid(99 << 10), "of 101376");
}

#[test]
fn other_or_too_many_parameters_are_refused() {
    let takes = |parameters| Resources {
        parameters,
        ..of_registers(32)
    };
    let refusals = |sizes, args| refusals(&takes(sizes), Grid::linear(1, 1), args);
    assert_eq!(
        refusals(vec![8, 4], vec![Arg::U64(0), Arg::U64(0)]),
        ["arguments of [8, 8] bytes for parameters of [8, 4]"]
    );
    assert_eq!(
        refusals(vec![4104], vec![Arg::Table(vec![0; 513])]),
        ["4104 bytes of parameters"]
    );
}
