//! Copies of rows, between buffers in which they lie in different orders: keys and values leave the fused projection, and
//! go into the order of their positions.

use super::merge::SOURCE;
use crate::cuda::Grid;
use crate::memory::{Buffer, DeviceError};
use crate::ops::cpu::kernel::{add_into, by_dtype};
use crate::ops::cpu::stored::Stored;
use crate::ops::cuda::plan::{Call, Plan, THREADS, WIDEST, act_defines, count, element, expect_dtype, width};
use crate::ops::{Cpu, Operation};

/// Blocks of consecutive rows: block `(i, j)` is the one with number `first + i·steps[0] + j·steps[1]` of a buffer.
#[derive(Clone, Debug)]
pub struct RowBlocks {
    /// Whole blocks, one after the other.
    pub buffer: Buffer,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Elements of a row before those that are meant.
    pub offset: usize,
    /// Number of `i`, and of `j`.
    pub blocks: [usize; 2],
    /// Block `(0, 0)`.
    pub first: usize,
    /// Blocks from one `i` to the next, and from one `j` to the next.
    pub steps: [isize; 2],
}

impl RowBlocks {
    fn block(&self, i: usize, j: usize) -> Option<usize> {
        let [step_i, step_j] = self.steps;
        self.first
            .checked_add_signed(i as isize * step_i + j as isize * step_j)
    }
}

/// `out[i, j] = x[i, j]`, block by block, or added to what is there.
#[derive(Clone, Debug)]
pub struct CopyRows {
    /// Is read.
    pub x: RowBlocks,
    /// Is written: every block once.
    pub out: RowBlocks,
    /// Rows of a block.
    pub rows: usize,
    /// Elements of a row that are copied.
    pub channels: usize,
    /// Add to `out` instead of overwriting it.
    pub accumulate: bool,
}

impl Operation for CopyRows {
    const NAME: &'static str = "copy_rows";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.out.buffer.dtype(), S => self.compute::<S>(cpu))
    }

    fn plan(&self) -> Result<Plan, DeviceError> {
        self.check()?;
        let (op, [x, out]) = (Self::NAME, [&self.x, &self.out]);
        let buffers = [&x.buffer, &out.buffer];
        expect_dtype(out.buffer.dtype(), &buffers)?;
        let lengths = [self.channels, x.stride, x.offset, out.stride, out.offset];
        let whole = lengths.iter().all(|len| len.is_multiple_of(WIDEST));
        let width = width(if whole { WIDEST } else { 1 }, &buffers);
        let packs = x.blocks.iter().product::<usize>() * self.rows * (self.channels / width);
        let defines = act_defines(element(op, &out.buffer)?, width);
        let mut call = Call::new(&SOURCE, op, defines, Grid::covering(packs, THREADS))
            .read([&x.buffer])
            .write([&out.buffer])
            .u32([
                count(op, "packs of elements", packs)?,
                count(op, "blocks", x.blocks[1])?,
                count(op, "rows", self.rows)?,
                count(op, "channels", self.channels)?,
            ])
            .flag(self.accumulate);
        for blocks in [x, out] {
            let [step_i, step_j] = blocks.steps.map(|step| step as u64);
            call = call.u64([
                blocks.stride as u64,
                blocks.offset as u64,
                blocks.first as u64,
                step_i,
                step_j,
            ]);
        }
        Ok(call.into())
    }
}

impl CopyRows {
    /// Refuses blocks that are not in their buffer.
    fn check(&self) -> Result<(), DeviceError> {
        let [i, j] = self.x.blocks;
        let fits = |all: &RowBlocks| {
            let block = self.rows * all.stride;
            let corners = [[0, 0], [0, j - 1], [i - 1, 0], [i - 1, j - 1]];
            let is_inside =
                |[i, j]: [usize; 2]| all.block(i, j).is_some_and(|at| at < all.buffer.len() / block);
            let in_row = all.offset + self.channels <= all.stride;
            in_row
                && block > 0
                && all.buffer.len().is_multiple_of(block)
                && corners.into_iter().all(is_inside)
        };
        if i * j > 0 && self.out.blocks == [i, j] && fits(&self.x) && fits(&self.out) {
            return Ok(());
        }
        let (op, what) = (Self::NAME, format!("there are no such blocks of rows: {self:?}"));
        Err(DeviceError::Shape { op, what })
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        self.check()?;
        let (x, mut out) = (self.x.buffer.host::<S>()?, self.out.buffer.host_mut::<S>()?);
        let [x_block, out_block] = [&self.x, &self.out].map(|blocks| self.rows * blocks.stride);
        let mut outs: Vec<Option<&mut [S]>> = out.chunks_mut(out_block).map(Some).collect();
        let [count_i, count_j] = self.x.blocks;
        let pairs = (0..count_i).flat_map(|i| (0..count_j).map(move |j| (i, j)));
        let parts = pairs.filter_map(|(i, j)| {
            let x = &x[self.x.block(i, j)? * x_block..][..x_block];
            Some((x, outs[self.out.block(i, j)?].take()?))
        });
        let (parts, isa) = (parts.collect(), cpu.isa());
        cpu.for_each_part(parts, |(x, out): (&[S], &mut [S])| {
            let rows = x
                .chunks_exact(self.x.stride)
                .zip(out.chunks_exact_mut(self.out.stride));
            for (x, out) in rows {
                let x = &x[self.x.offset..][..self.channels];
                let out = &mut out[self.out.offset..][..self.channels];
                if self.accumulate {
                    S::write(isa, out, true, |out| S::read(isa, x, |x| add_into(isa, x, out)));
                } else {
                    out.copy_from_slice(x);
                }
            }
        });
        Ok(())
    }
}
