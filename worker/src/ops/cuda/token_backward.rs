//! Launches of `token_sort.cu` and `token_backward.cu`: rows are sorted by token, then added up run by run.

use super::plan::{Arg, Call, ELEMENT, Plan, Planned, Scratch, THREADS, count, element, expect_dtype};
use super::plan::{vec_define, width};
use crate::device::cuda::{Define, Grid, Source, Unit};
use crate::device::{Buffer, DType, DeviceError};
use crate::ops::{CpuKernel, Fill, TokenBackward, expect_len};

/// Bits of a token that one pass sorts by, and what they can be.
const DIGIT_BITS: u32 = 8;
const DIGITS: usize = 1 << DIGIT_BITS;
/// Rows of a block that sorts.
const SLAB: usize = 1024;
const SCAN_THREADS: u32 = 1024;
/// Places of the sorted order of a block that adds.
const PLACES: usize = 16;

static SORT: Source = Source::with_headers("token_sort.cu", include_str!("token_sort.cu"), &[ELEMENT]);
static SUM: Source = Source::with_headers("token_backward.cu", include_str!("token_backward.cu"), &[ELEMENT]);

impl Planned for TokenBackward {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let op = Self::NAME;
        let rows = self.tokens.len();
        let channels = self.dout.len() / rows.max(1);
        expect_len(op, "dout", self.dout.len(), rows * channels)?;
        let vocab = self.dwte.len() / channels.max(1);
        expect_len(op, "dwte", self.dwte.len(), vocab * channels)?;
        expect_dtype(DType::I32, &[&self.tokens])?;
        let mut plan = Plan::default();
        if !self.accumulate {
            let (out, value) = (self.dwte.clone(), 0.0);
            plan = Fill { out, value }.plan()?;
        }
        if rows == 0 {
            return Ok(plan);
        }
        let mut scratch = Scratch::default();
        let sort = Sort {
            tokens: &self.tokens,
            rows: count(op, "rows", rows)?,
            vocab: count(op, "tokens of the vocabulary", vocab)?,
        };
        let order = sort.calls(&mut scratch, &mut plan.calls);
        let partials = scratch.take(rows.div_ceil(PLACES) * 2 * channels * size_of::<f32>());
        let width = width(channels, &[&self.dout, &self.dwte]);
        let tiles = (channels / width).div_ceil(THREADS as usize);
        let call = |kernel, dout: &[Arg]| -> Result<Call, DeviceError> {
            let mut args = vec![Arg::Read(self.tokens.clone()), Arg::Scratch(order)];
            args.extend_from_slice(dout);
            args.extend([
                Arg::U32(sort.rows),
                Arg::U32(count(op, "channels", channels)?),
                Arg::U32(sort.vocab),
                Arg::flag(self.accumulate),
            ]);
            // No more threads than there are packs of channels.
            let threads = ((channels / width).next_multiple_of(32) as u32).min(THREADS);
            let tiles = if threads == THREADS { tiles } else { 1 };
            Ok(Call {
                source: &SUM,
                kernel,
                defines: defines(element(op, &self.dout)?, element(op, &self.dwte)?, width),
                grid: Grid {
                    blocks: [sort.rows.div_ceil(PLACES as u32), tiles as u32, 1],
                    ..Grid::linear(1, threads)
                },
                args,
            })
        };
        let (dout, dwte) = (Arg::Read(self.dout.clone()), Arg::Write(self.dwte.clone()));
        let partials = Arg::Scratch(partials);
        plan.calls
            .push(call("token_sum", &[dout, dwte.clone(), partials.clone()])?);
        plan.calls.push(call("token_join", &[partials, dwte])?);
        plan.scratch_bytes = scratch.bytes();
        Ok(plan)
    }
}

/// The order of rows by (token, row).
struct Sort<'a> {
    tokens: &'a Buffer,
    rows: u32,
    vocab: u32,
}

impl Sort<'_> {
    /// Adds its kernels; returns where the order is: `[rows]`, u32.
    fn calls(&self, scratch: &mut Scratch, calls: &mut Vec<Call>) -> usize {
        let slabs = self.rows.div_ceil(SLAB as u32);
        let orders = [(); 2].map(|()| scratch.take(self.rows as usize * size_of::<u32>()));
        let counts = scratch.take(slabs as usize * DIGITS * size_of::<u32>());
        // What is no token sorts as `vocab`.
        let bits = u32::BITS - self.vocab.leading_zeros();
        let passes = bits.div_ceil(DIGIT_BITS).max(1) as usize;
        for pass in 0..passes {
            let order = match pass {
                0 => Arg::Null,
                _ => Arg::Scratch(orders[(pass - 1) % 2]),
            };
            let sizes = [
                Arg::U32(self.rows),
                Arg::U32(slabs),
                Arg::U32(self.vocab),
                Arg::U32(pass as u32 * DIGIT_BITS),
            ];
            let mut call = |kernel, grid, args: Vec<Arg>| {
                calls.push(Call {
                    source: &SORT,
                    kernel,
                    defines: Vec::new(),
                    grid,
                    args,
                });
            };
            let tokens = Arg::Read(self.tokens.clone());
            let mut args = vec![tokens.clone(), order.clone(), Arg::Scratch(counts)];
            args.extend_from_slice(&sizes);
            call("digit_count", Grid::linear(slabs, THREADS), args);
            let total = Arg::U32(slabs * DIGITS as u32);
            let args = vec![Arg::Scratch(counts), total];
            call("digit_scan", Grid::linear(1, SCAN_THREADS), args);
            let sorted = Arg::Scratch(orders[pass % 2]);
            let mut args = vec![tokens, order, Arg::Scratch(counts), sorted];
            args.extend_from_slice(&sizes);
            call("digit_scatter", Grid::linear(slabs, THREADS), args);
        }
        orders[(passes - 1) % 2]
    }
}

fn defines(act: &'static str, grad: &'static str, width: usize) -> Vec<Define> {
    vec![
        Define::word("ACT", act),
        Define::word("GRAD", grad),
        vec_define(width),
    ]
}

pub(super) fn units() -> Vec<Unit> {
    let types = [("f32", "f32"), ("bf16", "bf16"), ("bf16", "f32")];
    let sums = types.map(|(act, grad)| [8, 1].map(|width| Unit::new(&SUM, &defines(act, grad, width))));
    let mut units = sums.concat();
    units.push(Unit::new(&SORT, &[]));
    units
}
