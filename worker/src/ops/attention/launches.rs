//! The kernels of causal attention on a GPU: tensor cores do it for bf16 and the usual sizes of heads, plain f32
//! arithmetic for everything else.
//!
//! A kernel is compiled for the size of a head, for the number of heads of queries that share keys and values, and for a
//! mask: where every head has its own and nothing is dropped, it pays for neither.

use super::shape::{AttentionShape, HeadsView, scale};
use crate::cuda::{Define, Grid, KernelSource};
use crate::memory::{Buffer, DType, DeviceError};
use crate::ops::DropoutMask;
use crate::ops::cuda::plan::{Call, count, element, is_aligned, kernels};

static PLAIN: KernelSource = kernels("attention.cu", include_str!("../cuda/attention.cu"));
static FLASH_FORWARD: KernelSource = kernels("flash_forward.cu", include_str!("../cuda/flash_forward.cu"));
static FLASH_BACKWARD: KernelSource = kernels("flash_backward.cu", include_str!("../cuda/flash_backward.cu"));

/// A kernel of attention.
pub(super) struct Kernel {
    /// Names on tensor cores, and plain.
    names: [&'static str; 2],
    /// There it has so many tiles of its own rows in shared memory, plain so many operands.
    tiles: [usize; 2],
    owned: Owned,
}

/// What the blocks of a kernel have each a tile of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owned {
    /// Queries, of every head of these.
    Queries,
    /// Keys and values, of every head of these.
    Keys,
}

/// The output.
pub(super) const OUT: Kernel = kernel(["flash_forward", "attention_forward"], [1, 2], Owned::Queries);
/// Gradients of queries.
pub(super) const DQ: Kernel = kernel(["flash_dq", "attention_dq"], [2, 4], Owned::Queries);
/// Gradients of keys and values.
pub(super) const DKV: Kernel = kernel(["flash_dkv", "attention_dkv"], [2, 4], Owned::Keys);

const fn kernel(names: [&'static str; 2], tiles: [usize; 2], owned: Owned) -> Kernel {
    Kernel { names, tiles, owned }
}

/// Forward or backward on tensor cores.
pub(super) struct Pass {
    source: &'static KernelSource,
    cuts: [TileCut; 3],
}

pub(super) static FORWARD: Pass = Pass {
    source: &FLASH_FORWARD,
    cuts: [cut(32, 4, 1, 4), cut(64, 4, 2, 2), cut(128, 4, 1, 2)],
};

pub(super) static BACKWARD: Pass = Pass {
    source: &FLASH_BACKWARD,
    cuts: [
        cut(32, 4, 2, 2).in_parts(32, 2),
        cut(64, 4, 2, 2).in_parts(32, 1),
        cut(128, 4, 1, 1).in_parts(32, 1),
    ],
};

/// True if tensor cores can have the attention of such heads.
pub(crate) fn has_tensor_kernels(head_size: usize) -> bool {
    let has_cut = |pass: &Pass| pass.cuts.iter().any(|cut| cut.head == head_size);
    has_cut(&FORWARD) && has_cut(&BACKWARD)
}

/// What a kernel is compiled for, beside types and sizes.
#[derive(Clone, Copy, Debug)]
struct Variant {
    has_mask: bool,
    heads_per_kv: usize,
    /// Results are f32, whatever the type of activations.
    is_wide: bool,
}

impl Variant {
    /// Without a mask, sharing nothing, and with results of one type, a kernel is compiled as it always was.
    fn defines(self) -> impl Iterator<Item = Define> {
        let mask = self.has_mask.then_some(Define::Number("DROPOUT", 1));
        let shares = self.heads_per_kv > 1;
        let shared = shares.then_some(Define::Number("HEADS_PER_KV", self.heads_per_kv as i64));
        let wide = self.is_wide.then_some(Define::Word("OUT", "f32"));
        mask.into_iter().chain(shared).chain(wide)
    }
}

/// Bytes of keys and values that the blocks in flight share through the L2 cache, a third of a small one.
const GROUP_BYTES: usize = 16 << 20;

/// Rows of the other operand that a flash kernel's block loads at once.
const STEP: usize = 64;

/// Keys that dropout's masks know together on tensor cores.
const KEY_GROUP: usize = 16;

/// Widest head on a GPU.
const MAX_HEAD: usize = 256;

/// How a flash kernel is cut: see `flash.cuh`. The numbers are the fastest of those measured on an H200.
#[derive(Clone, Copy, Debug)]
struct TileCut {
    head: usize,
    warps: usize,
    row_tiles: usize,
    /// Blocks of a multiprocessor, which bounds the registers of a thread.
    blocks: usize,
    /// Backward: columns of scores at a time, and operands that stay in registers.
    part: Option<(usize, usize)>,
}

const fn cut(head: usize, warps: usize, row_tiles: usize, blocks: usize) -> TileCut {
    TileCut {
        head,
        warps,
        row_tiles,
        blocks,
        part: None,
    }
}

impl TileCut {
    const fn in_parts(mut self, columns: usize, resident: usize) -> Self {
        self.part = Some((columns, resident));
        self
    }

    /// Queries or keys of a block.
    const fn rows(self) -> usize {
        self.warps * self.row_tiles * 16
    }

    /// Own rows, and two steps of two operands.
    const fn shared_bytes(self, own_tiles: usize) -> usize {
        (own_tiles * self.rows() + 4 * STEP) * self.head * DType::Bf16.bytes()
    }

    fn defines(self, variant: Variant) -> Vec<Define> {
        let number = |name, value: usize| Define::Number(name, value as i64);
        let mut defines = vec![
            number("HEAD", self.head),
            number("WARPS", self.warps),
            number("ROW_TILES", self.row_tiles),
            number("STEP", STEP),
            number("BLOCKS", self.blocks),
        ];
        if let Some((part, resident)) = self.part {
            defines.extend([number("PART", part), number("RESIDENT", resident)]);
        }
        defines.extend(variant.defines());
        defines
    }
}

/// Queries and keys of a tile of the plain kernels. Up to heads of 176 channels the four operands of backward fit into
/// the 99 KiB that a block has on every card since sm_80.
const fn plain_tile(head: usize) -> usize {
    if head > 80 { 32 } else { 64 }
}

fn plain_defines(act: &'static str, head: usize, variant: Variant) -> Vec<Define> {
    let mut defines = vec![
        Define::Word("ACT", act),
        Define::Number("HEAD", head as i64),
        Define::Number("TILE", plain_tile(head) as i64),
    ];
    defines.extend(variant.defines());
    defines
}

/// What the launches of an attention have in common.
pub(super) struct Launches<'a> {
    op: &'static str,
    act: &'static str,
    shape: AttentionShape,
    views: &'a [HeadsView; 3],
    mask: Option<DropoutMask>,
    is_wide: bool,
    /// None: the plain kernels.
    flash: Option<(&'static KernelSource, TileCut)>,
}

impl<'a> Launches<'a> {
    /// Launches on activations of one type, the first's, whose results have the last's. Tensor cores can have them if they are
    /// bf16, all rows start at multiples of 16 bytes, and the tiles of queries at tiles of keys, with whole tiles of keys before the end.
    pub(super) fn new(
        op: &'static str,
        pass: &'static Pass,
        shape: AttentionShape,
        views: &'a [HeadsView; 3],
        buffers: &[&Buffer],
    ) -> Result<Self, DeviceError> {
        let [first, .., last] = buffers else {
            unreachable!("an attention has several buffers");
        };
        let (first_key, keys) = (views[1].first_position, views[1].rows(&shape));
        let past = views[0].first_position - first_key;
        let in_tiles = keys.is_multiple_of(STEP) || past + shape.positions <= keys;
        let in_groups = past.is_multiple_of(STEP) && first_key.is_multiple_of(KEY_GROUP);
        let fit = first.dtype() == DType::Bf16 && buffers.iter().all(|buffer| is_aligned(buffer));
        let fit = fit && in_tiles && in_groups;
        let cut = pass.cuts.iter().find(|cut| fit && cut.head == shape.head_size);
        check_head(op, shape.head_size)?;
        Ok(Self {
            op,
            act: element(op, first)?,
            shape,
            views,
            mask: None,
            is_wide: first.dtype() != last.dtype(),
            flash: cut.map(|cut| (pass.source, *cut)),
        })
    }

    /// With a mask of the probabilities.
    pub(super) fn dropping(self, mask: Option<DropoutMask>) -> Self {
        Self { mask, ..self }
    }

    pub(super) const fn on_tensor_cores(&self) -> bool {
        self.flash.is_some()
    }

    /// A kernel's launch; `add` gives it the buffers, its first arguments.
    pub(super) fn call(&self, kernel: &Kernel, add: impl FnOnce(Call) -> Call) -> Result<Call, DeviceError> {
        let variant = Variant {
            has_mask: self.mask.is_some(),
            heads_per_kv: self.shape.heads_per_kv(),
            is_wide: self.is_wide,
        };
        let ([flash, plain], [own_tiles, operands]) = (kernel.names, kernel.tiles);
        let call = if let Some((source, cut)) = self.flash {
            let grid = self.grid(kernel.owned, cut.rows(), 32 * cut.warps)?;
            let grid = grid.with_shared(cut.shared_bytes(own_tiles));
            Call::new(source, flash, cut.defines(variant), grid)
        } else {
            let head = self.shape.head_size;
            // Channels as these kernels lay them out.
            let (tile, padded) = (plain_tile(head), head.next_multiple_of(16));
            let words = operands * tile * (padded + 1) + tile * (tile + 1);
            let grid = self.grid(kernel.owned, tile, (tile / 4) * (tile / 4))?;
            let grid = grid.with_shared(words * DType::F32.bytes());
            Call::new(&PLAIN, plain, plain_defines(self.act, head, variant), grid)
        };
        self.with_sizes(add(call), kernel.owned)
    }

    /// A block for each tile of rows of each head.
    fn grid(&self, owned: Owned, rows: usize, threads: usize) -> Result<Grid, DeviceError> {
        let blocks = self.pairs(owned) * self.rows(owned)[0].div_ceil(rows);
        Ok(Grid::linear(count(self.op, "blocks", blocks)?, threads as u32))
    }

    /// Rows of a sample that blocks own, and those that they read.
    fn rows(&self, owned: Owned) -> [usize; 2] {
        let (queries, keys) = (self.shape.positions, self.views[1].rows(&self.shape));
        match owned {
            Owned::Queries => [queries, keys],
            Owned::Keys => [keys, queries],
        }
    }

    /// Heads of all samples.
    fn pairs(&self, owned: Owned) -> usize {
        let heads = match owned {
            Owned::Queries => self.shape.heads,
            Owned::Keys => self.shape.kv_heads,
        };
        self.shape.batch * heads
    }

    /// Heads whose blocks start together: what these read fits the L2 cache.
    fn group(&self, owned: Owned) -> usize {
        let head = 2 * self.rows(owned)[1] * self.shape.head_size * DType::Bf16.bytes();
        let shared = self.shape.heads_per_kv();
        let heads = match owned {
            Owned::Queries => (GROUP_BYTES / head).max(1) * shared,
            Owned::Keys => GROUP_BYTES / (head * shared),
        };
        heads.clamp(1, self.pairs(owned))
    }

    /// Adds what all kernels take after their buffers.
    fn with_sizes(&self, call: Call, owned: Owned) -> Result<Call, DeviceError> {
        let (op, shape) = (self.op, self.shape);
        let ([q, k, _], [queries, keys]) = (self.views, self.rows(Owned::Queries));
        count(op, "positions", keys.max(q.first_position + queries))?;
        let positions = [queries, keys, q.first_position, k.first_position];
        let call = call.u64(self.views.each_ref().map(HeadsView::words));
        let call = call.u32(positions.map(|number| number as u32));
        let heads = count(op, "heads", shape.heads)?;
        let pairs = count(op, "heads of all samples", self.pairs(owned))?;
        let group = count(op, "heads of a group", self.group(owned))?;
        let call = match self.flash {
            Some(_) => call.u32([heads, pairs, group]),
            None => call.u32([heads]),
        };
        let call = call.f32([scale(shape.head_size)]);
        Ok(call.with(self.mask.iter().flat_map(DropoutMask::args)))
    }
}

/// Refuses heads for which kernels have no registers and shared memory.
pub(super) fn check_head(op: &'static str, head_size: usize) -> Result<(), DeviceError> {
    if head_size > MAX_HEAD {
        let what = format!("a head has {head_size} channels, but a GPU supports at most {MAX_HEAD}");
        return Err(DeviceError::Shape { op, what });
    }
    Ok(())
}
