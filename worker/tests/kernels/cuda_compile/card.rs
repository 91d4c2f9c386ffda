//! What a card refuses of a launch, whatever the kernel does: limits of the CUDA C++ Programming Guide's table of compute
//! capabilities.

use ddp_worker::cuda::Arch;
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
