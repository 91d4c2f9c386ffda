//! Launches of `attention.cu`, `flash_forward.cu` and `flash_backward.cu`: tensor cores for bf16 and the usual widths of
//! heads, plain f32 arithmetic for everything else.

use super::plan::{Arg, Call, ELEMENT, Plan, Planned, Scratch, count, element, expect_dtype};
use crate::device::cuda::{CompileUnit, Define, Grid, KernelSource};
use crate::device::{Buffer, DType, DeviceError};
use crate::ops::dropout::{DROPOUT, mask_args, mask_define};
use crate::ops::{AttentionBackward, AttentionForward, AttentionShape, CpuKernel, DropoutMask};

static PLAIN: KernelSource =
    KernelSource::with_headers("attention.cu", include_str!("attention.cu"), &[ELEMENT, DROPOUT]);

const FLASH: (&str, &str) = ("flash.cuh", include_str!("flash.cuh"));
const TENSOR_CORE: (&str, &str) = ("tensor_core.cuh", include_str!("tensor_core.cuh"));
static FLASH_FORWARD: KernelSource = KernelSource::with_headers(
    "flash_forward.cu",
    include_str!("flash_forward.cu"),
    &[ELEMENT, TENSOR_CORE, DROPOUT, FLASH],
);
static FLASH_BACKWARD: KernelSource = KernelSource::with_headers(
    "flash_backward.cu",
    include_str!("flash_backward.cu"),
    &[ELEMENT, TENSOR_CORE, DROPOUT, FLASH],
);

/// Bytes of keys and values that the blocks in flight share through the L2 cache, a third of a small one.
const GROUP_BYTES: usize = 16 << 20;

/// Widest head of the plain kernels.
const MAX_HEAD: usize = 256;

/// How a flash kernel is cut: see `flash.cuh`. The numbers are the fastest of those measured on an H200.
#[derive(Clone, Copy, Debug)]
struct TileCut {
    head: usize,
    warps: usize,
    row_tiles: usize,
    step: usize,
    /// Blocks of a multiprocessor, which bounds the registers of a thread.
    blocks: usize,
    /// Backward: columns of scores at a time, and operands that stay in registers.
    part: Option<(usize, usize)>,
}

const fn cut(
    head: usize,
    [warps, row_tiles, step, blocks]: [usize; 4],
    part: Option<(usize, usize)>,
) -> TileCut {
    TileCut {
        head,
        warps,
        row_tiles,
        step,
        blocks,
        part,
    }
}

const FORWARD: [TileCut; 3] = [
    cut(32, [4, 1, 64, 4], None),
    cut(64, [4, 2, 64, 2], None),
    cut(128, [4, 1, 64, 2], None),
];

const BACKWARD: [TileCut; 3] = [
    cut(32, [4, 2, 64, 2], Some((32, 2))),
    cut(64, [4, 2, 64, 2], Some((32, 1))),
    cut(128, [4, 1, 64, 1], Some((32, 1))),
];

impl TileCut {
    /// Queries or keys of a block.
    const fn rows(self) -> usize {
        self.warps * self.row_tiles * 16
    }

    fn grid(self, shape: AttentionShape, own_tiles: usize, op: &'static str) -> Result<Grid, DeviceError> {
        let blocks = shape.batch * shape.heads * shape.positions.div_ceil(self.rows());
        // Own rows, and two steps of two operands.
        let rows = own_tiles * self.rows() + 4 * self.step;
        let grid = Grid::linear(count(op, "blocks", blocks)?, 32 * self.warps as u32);
        Ok(grid.with_shared(rows * self.head * DType::Bf16.bytes()))
    }

    fn defines(self, has_mask: bool) -> Vec<Define> {
        let number = |name, value: usize| Define::number(name, value as i64);
        let mut defines = vec![
            number("HEAD", self.head),
            number("WARPS", self.warps),
            number("ROW_TILES", self.row_tiles),
            number("STEP", self.step),
            number("BLOCKS", self.blocks),
        ];
        if let Some((part, resident)) = self.part {
            defines.extend([number("PART", part), number("RESIDENT", resident)]);
        }
        defines.extend(mask_define(has_mask));
        defines
    }
}

/// The cut for these buffers, if tensor cores can have them: rows must start at multiples of 16 bytes.
fn flash_cut(cuts: &[TileCut], shape: AttentionShape, buffers: &[&Buffer]) -> Option<TileCut> {
    let fits = |buffer: &&Buffer| {
        buffer.dtype() == DType::Bf16 && (buffer.range().start * DType::Bf16.bytes()).is_multiple_of(16)
    };
    let cut = cuts.iter().find(|cut| cut.head == shape.head_channels())?;
    buffers.iter().all(fits).then_some(*cut)
}

/// Heads whose blocks start together.
fn group(shape: AttentionShape) -> usize {
    let bytes = 2 * shape.positions * shape.head_channels() * DType::Bf16.bytes();
    (GROUP_BYTES / bytes).clamp(1, shape.batch * shape.heads)
}

/// What all kernels take of an attention's sizes.
struct Sizes {
    positions: Arg,
    heads: Arg,
    pairs: Arg,
    group: Arg,
    scale: Arg,
}

impl Sizes {
    fn of(op: &'static str, shape: AttentionShape) -> Result<Self, DeviceError> {
        let number = |name, value| count(op, name, value).map(Arg::U32);
        // Within a sample, rows are found by 32-bit arithmetic.
        count(op, "elements of a row", 3 * shape.channels)?;
        Ok(Self {
            positions: number("positions", shape.positions)?,
            heads: number("heads", shape.heads)?,
            pairs: number("heads of all samples", shape.batch * shape.heads)?,
            group: number("heads of a group", group(shape))?,
            scale: Arg::F32((1.0 / (shape.head_channels() as f64).sqrt()) as f32),
        })
    }

    fn flash(self) -> [Arg; 5] {
        [self.positions, self.heads, self.pairs, self.group, self.scale]
    }

    fn plain(self) -> [Arg; 3] {
        [self.positions, self.heads, self.scale]
    }
}

/// Channels as the plain kernels lay them out.
const fn padded(head: usize) -> usize {
    head.next_multiple_of(16)
}

/// Queries and keys of a tile of the plain kernels. Up to heads of 176 channels the four operands of backward fit into
/// the 99 KiB that a block has on every card since sm_80.
const fn plain_tile(head: usize) -> usize {
    if head > 80 { 32 } else { 64 }
}

fn plain_defines(act: &'static str, head: usize, has_mask: bool) -> Vec<Define> {
    let mut defines = vec![
        Define::word("ACT", act),
        Define::number("HEAD", head as i64),
        Define::number("TILE", plain_tile(head) as i64),
    ];
    defines.extend(mask_define(has_mask));
    defines
}

fn plain_call(
    op: &'static str,
    kernel: &'static str,
    (shape, act): (AttentionShape, &'static str),
    operands: usize,
    (mut args, mask): (Vec<Arg>, Option<&DropoutMask>),
) -> Result<Call, DeviceError> {
    let head = shape.head_channels();
    if head > MAX_HEAD {
        let what = format!("heads of {head} channels, on a GPU at most {MAX_HEAD}");
        return Err(DeviceError::Shape { op, what });
    }
    let tile = plain_tile(head);
    let blocks = shape.batch * shape.heads * shape.positions.div_ceil(tile);
    let words = operands * tile * (padded(head) + 1) + tile * (tile + 1);
    let threads = (tile / 4) * (tile / 4);
    let grid = Grid::linear(count(op, "blocks", blocks)?, threads as u32);
    args.extend(mask_args(mask));
    Ok(Call {
        source: &PLAIN,
        kernel,
        defines: plain_defines(act, head, mask.is_some()),
        grid: grid.with_shared(words * DType::F32.bytes()),
        args,
    })
}

impl Planned for AttentionForward {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let shape = self.shape;
        self.check()?;
        let act = element(Self::NAME, &self.out)?;
        expect_dtype(self.out.dtype(), &[&self.qkv])?;
        expect_dtype(DType::F32, &[&self.lse])?;
        let sizes = Sizes::of(Self::NAME, shape)?;
        let mut args = vec![
            Arg::Read(self.qkv.clone()),
            Arg::Write(self.out.clone()),
            Arg::Write(self.lse.clone()),
        ];
        let call = if let Some(cut) = flash_cut(&FORWARD, shape, &[&self.qkv, &self.out]) {
            args.extend(sizes.flash());
            args.extend(mask_args(self.dropout.as_ref()));
            Call {
                source: &FLASH_FORWARD,
                kernel: "flash_forward",
                defines: cut.defines(self.dropout.is_some()),
                grid: cut.grid(shape, 1, Self::NAME)?,
                args,
            }
        } else {
            args.extend(sizes.plain());
            plain_call(
                Self::NAME,
                "attention_forward",
                (shape, act),
                2,
                (args, self.dropout.as_ref()),
            )?
        };
        Ok(Plan::one(call))
    }
}

impl Planned for AttentionBackward {
    fn plan(&self) -> Result<Plan, DeviceError> {
        let shape = self.shape;
        self.check()?;
        expect_dtype(self.dqkv.dtype(), &[&self.qkv, &self.out, &self.dout])?;
        expect_dtype(DType::F32, &[&self.lse])?;
        match flash_cut(&BACKWARD, shape, &[&self.qkv, &self.out, &self.dout, &self.dqkv]) {
            Some(cut) => self.flash(cut),
            None => self.plain(),
        }
    }
}

impl AttentionBackward {
    /// Elements of what a kernel leaves of each query and head for the next: numbers of type f32.
    fn along(&self, each: usize) -> (Scratch, Arg) {
        let mut scratch = Scratch::default();
        let at = scratch.take(each * self.lse.len() * DType::F32.bytes());
        (scratch, Arg::Scratch(at))
    }

    fn flash(&self, cut: TileCut) -> Result<Plan, DeviceError> {
        let (scratch, known) = self.along(2);
        let read = |buffer: &Buffer| Arg::Read(buffer.clone());
        let dqkv = || Arg::Write(self.dqkv.clone());
        let queries = vec![
            read(&self.qkv),
            read(&self.out),
            read(&self.lse),
            read(&self.dout),
            dqkv(),
            known.clone(),
        ];
        let keys = vec![read(&self.qkv), read(&self.dout), dqkv(), known];
        let call = |kernel, mut args: Vec<Arg>| {
            args.extend(Sizes::of(Self::NAME, self.shape)?.flash());
            args.extend(mask_args(self.dropout.as_ref()));
            Ok::<_, DeviceError>(Call {
                source: &FLASH_BACKWARD,
                kernel,
                defines: cut.defines(self.dropout.is_some()),
                grid: cut.grid(self.shape, 2, Self::NAME)?,
                args,
            })
        };
        Ok(Plan {
            scratch_bytes: scratch.bytes(),
            calls: vec![call("flash_dq", queries)?, call("flash_dkv", keys)?],
        })
    }

    fn plain(&self) -> Result<Plan, DeviceError> {
        let act = element(Self::NAME, &self.dqkv)?;
        let (scratch, along) = self.along(1);
        let read = |buffer: &Buffer| Arg::Read(buffer.clone());
        let dqkv = || Arg::Write(self.dqkv.clone());
        let queries = vec![
            read(&self.qkv),
            read(&self.out),
            read(&self.lse),
            read(&self.dout),
            dqkv(),
            along.clone(),
        ];
        let keys = vec![read(&self.qkv), read(&self.lse), read(&self.dout), dqkv(), along];
        let call = |kernel, mut args: Vec<Arg>| {
            args.extend(Sizes::of(Self::NAME, self.shape)?.plain());
            plain_call(
                Self::NAME,
                kernel,
                (self.shape, act),
                4,
                (args, self.dropout.as_ref()),
            )
        };
        Ok(Plan {
            scratch_bytes: scratch.bytes(),
            calls: vec![call("attention_dq", queries)?, call("attention_dkv", keys)?],
        })
    }
}

pub(super) fn units() -> Vec<CompileUnit> {
    let mut units = Vec::new();
    for has_mask in [false, true] {
        let flash = |source: &'static KernelSource, cuts: [TileCut; 3]| {
            cuts.map(|cut| CompileUnit::new(source, &cut.defines(has_mask)))
        };
        units.extend(flash(&FLASH_FORWARD, FORWARD));
        units.extend(flash(&FLASH_BACKWARD, BACKWARD));
    }
    let plain = [("f32", 48), ("f32", 64), ("f32", 96), ("f32", 256), ("bf16", 48)];
    let unit = |act, head, has_mask| CompileUnit::new(&PLAIN, &plain_defines(act, head, has_mask));
    units.extend(plain.map(|(act, head)| unit(act, head, false)));
    units.extend([("f32", 64), ("bf16", 48)].map(|(act, head)| unit(act, head, true)));
    units
}
