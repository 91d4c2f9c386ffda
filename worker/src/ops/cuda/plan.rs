//! What an operation asks of a GPU, as data: which kernels run in which grids with which arguments.
//!
//! Made from the operation alone, without a GPU, so that the same plan can be carried out by [`LaunchContext`] or checked
//! elsewhere.

use std::borrow::Borrow;

use crate::cuda::{CompileUnit, Define, DevicePtr, Grid, KernelSource, LaunchContext};
use crate::memory::{Buffer, DType, DeviceError};

/// The files that kernels include.
const HEADERS: &[(&str, &str)] = &[
    ("element.cuh", include_str!("element.cuh")),
    ("elementwise.cuh", include_str!("elementwise.cuh")),
    ("row.cuh", include_str!("row.cuh")),
    ("dropout.cuh", include_str!("dropout.cuh")),
    ("heads.cuh", include_str!("heads.cuh")),
    ("tensor_core.cuh", include_str!("tensor_core.cuh")),
    ("flash.cuh", include_str!("flash.cuh")),
    ("update.cuh", include_str!("update.cuh")),
];

/// A file of kernels, which may include all headers of this folder.
pub(crate) const fn kernels(file: &'static str, text: &'static str) -> KernelSource {
    KernelSource {
        file,
        text,
        headers: HEADERS,
    }
}

/// Kernels that run one after the other.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// Scratch memory that they share.
    pub scratch_bytes: usize,
    /// In order.
    pub calls: Vec<Call>,
}

/// One kernel's launch.
#[derive(Clone, Debug)]
pub struct Call {
    /// The file that it is in, and what that is compiled with.
    pub unit: CompileUnit,
    /// Its name there.
    pub kernel: &'static str,
    /// Blocks and threads.
    pub grid: Grid,
    /// In the order of its parameters.
    pub args: Vec<Arg>,
}

/// One argument of a kernel.
#[derive(Clone, Debug)]
pub enum Arg {
    /// A pointer to elements that are only read.
    Read(Buffer),
    /// A pointer to elements that are written, or read and written.
    Write(Buffer),
    /// A pointer into the scratch memory, so many bytes from its start.
    Scratch(usize),
    /// No pointer.
    Null,
    /// `u32`
    U32(u32),
    /// `u64`
    U64(u64),
    /// `f32`
    F32(f32),
    /// A structure of `u64`s, by value. The last argument.
    Table(Vec<u64>),
}

impl From<Call> for Plan {
    /// One kernel, without scratch memory.
    fn from(call: Call) -> Self {
        Self {
            scratch_bytes: 0,
            calls: vec![call],
        }
    }
}

impl Plan {
    /// Puts its kernels on a stream.
    pub(crate) fn launch(&self, cx: &mut LaunchContext<'_>) -> Result<(), DeviceError> {
        let scratch = match self.scratch_bytes {
            0 => DevicePtr::NULL,
            bytes => cx.scratch(bytes)?,
        };
        for call in &self.calls {
            let (mut args, mut table): (Vec<u64>, &[u64]) = (Vec::new(), &[]);
            for arg in &call.args {
                assert!(table.is_empty(), "a structure is the last argument");
                args.push(match arg {
                    Arg::Read(buffer) | Arg::Write(buffer) => cx.address(buffer)?.raw(),
                    Arg::Scratch(offset) => scratch.offset(*offset).raw(),
                    Arg::Null => DevicePtr::NULL.raw(),
                    Arg::U32(value) => u64::from(*value),
                    Arg::U64(value) => *value,
                    Arg::F32(value) => u64::from(value.to_bits()),
                    Arg::Table(values) => {
                        table = values;
                        continue;
                    }
                });
            }
            cx.run(&call.unit, call.kernel, call.grid, &args, table)?;
        }
        Ok(())
    }
}

/// Arguments are added in the order of the kernel's parameters.
impl Call {
    /// Without arguments yet.
    pub(crate) const fn new(
        source: &'static KernelSource,
        kernel: &'static str,
        defines: Vec<Define>,
        grid: Grid,
    ) -> Self {
        Self {
            unit: CompileUnit { source, defines },
            kernel,
            grid,
            args: Vec::new(),
        }
    }

    /// Arguments as data.
    pub(crate) fn with(mut self, args: impl IntoIterator<Item = Arg>) -> Self {
        self.args.extend(args);
        self
    }

    /// Elements that are only read.
    pub(crate) fn read<const N: usize>(self, buffers: [&Buffer; N]) -> Self {
        self.with(buffers.map(|buffer| Arg::Read(buffer.clone())))
    }

    /// Elements that are only read, or no pointer.
    pub(crate) fn read_if(self, buffer: Option<&Buffer>) -> Self {
        self.with([buffer.map_or(Arg::Null, |buffer| Arg::Read(buffer.clone()))])
    }

    /// Elements that are written, or read and written.
    pub(crate) fn write<const N: usize>(self, buffers: [&Buffer; N]) -> Self {
        self.with(buffers.map(|buffer| Arg::Write(buffer.clone())))
    }

    /// Elements that are written, or no pointer.
    pub(crate) fn write_if(self, buffer: Option<&Buffer>) -> Self {
        self.with([buffer.map_or(Arg::Null, |buffer| Arg::Write(buffer.clone()))])
    }

    /// Places in the scratch memory.
    pub(crate) fn scratch<const N: usize>(self, offsets: [usize; N]) -> Self {
        self.with(offsets.map(Arg::Scratch))
    }

    /// `u32`
    pub(crate) fn u32<const N: usize>(self, values: [u32; N]) -> Self {
        self.with(values.map(Arg::U32))
    }

    /// `u64`
    pub(crate) fn u64<const N: usize>(self, values: [u64; N]) -> Self {
        self.with(values.map(Arg::U64))
    }

    /// `f32`
    pub(crate) fn f32<const N: usize>(self, values: [f32; N]) -> Self {
        self.with(values.map(Arg::F32))
    }

    /// `u32`, 0 or 1.
    pub(crate) fn flag(self, value: bool) -> Self {
        self.u32([u32::from(value)])
    }

    /// A structure: the last argument.
    pub(crate) fn table(self, values: Vec<u64>) -> Self {
        self.with([Arg::Table(values)])
    }
}

/// Elements that a kernel loads at once at most.
pub(crate) const WIDEST: usize = 8;

/// Threads of a block of the kernels that have no reason for another number.
pub(crate) const THREADS: u32 = 256;

/// An element type in CUDA C.
pub(crate) fn element(op: &'static str, buffer: &Buffer) -> Result<&'static str, DeviceError> {
    match buffer.dtype() {
        DType::F32 => Ok("f32"),
        DType::Bf16 => Ok("bf16"),
        other => Err(DeviceError::Shape {
            op,
            what: format!(
                "`{}` holds {other}, a GPU computes in f32 and bf16",
                buffer.arena().name()
            ),
        }),
    }
}

/// Refuses buffers of any other type.
pub(crate) fn expect_dtype<B: Borrow<Buffer>>(dtype: DType, buffers: &[B]) -> Result<(), DeviceError> {
    let mut buffers = buffers.iter().map(Borrow::borrow);
    buffers.try_for_each(|buffer| buffer.expect_dtype(dtype))
}

/// True if the elements start at a multiple of 16 bytes. Arenas do.
pub(crate) fn is_aligned(buffer: &Buffer) -> bool {
    buffer.start().is_multiple_of(16)
}

/// Elements that are loaded at once, `VEC`: 8 if every row of every buffer starts at a multiple of 16 bytes, else 1.
pub(crate) fn width(row: usize, buffers: &[&Buffer]) -> usize {
    if row.is_multiple_of(WIDEST) && buffers.iter().all(|buffer| is_aligned(buffer)) {
        WIDEST
    } else {
        1
    }
}

/// The definition of `VEC`.
pub(crate) fn vec_define(width: usize) -> Define {
    Define::Number("VEC", width as i64)
}

/// Definitions of a kernel that knows one type, and the elements that it loads at once.
pub(crate) fn act_defines(act: &'static str, width: usize) -> Vec<Define> {
    vec![Define::Word("ACT", act), vec_define(width)]
}

/// Definitions of a kernel that adds activations of one type to gradients of another.
pub(crate) fn grad_defines(act: &'static str, grad: &'static str, width: usize) -> Vec<Define> {
    vec![
        Define::Word("ACT", act),
        Define::Word("GRAD", grad),
        vec_define(width),
    ]
}

/// A number as kernels count with it.
pub(crate) fn count(op: &'static str, name: &str, number: usize) -> Result<u32, DeviceError> {
    // Half the range, so that kernels can go one block past the end.
    if number > usize::try_from(i32::MAX).unwrap_or(usize::MAX) {
        let what = format!("{number} {name} are more than a kernel counts");
        return Err(DeviceError::Shape { op, what });
    }
    Ok(number as u32)
}

/// The grid of an element-wise kernel with so many packs a thread.
pub(crate) fn elementwise_grid(elements: usize, width: usize, unroll: usize) -> Grid {
    // At least one block, for what is left of less than a pack.
    let packs = (elements / width).max(usize::from(elements > 0));
    Grid::covering(packs.div_ceil(unroll), THREADS)
}

/// An element-wise kernel of `op` on buffers of one type, the first's, with so many packs a thread; in rows of `row`
/// elements, 0 where there are none. The number of elements is its last argument: the caller adds all.
pub(crate) fn elementwise(
    op: &'static str,
    source: &'static KernelSource,
    buffers: &[&Buffer],
    row: usize,
    unroll: usize,
) -> Result<Call, DeviceError> {
    expect_dtype(buffers[0].dtype(), buffers)?;
    let width = width(row, buffers);
    let defines = act_defines(element(op, buffers[0])?, width);
    let grid = elementwise_grid(buffers[0].len(), width, unroll);
    Ok(Call::new(source, op, defines, grid))
}

/// Lays arrays out one after the other in scratch memory.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    bytes: usize,
}

impl Scratch {
    const ALIGNMENT: usize = 256;

    /// Room for so many bytes: where it starts.
    pub(crate) fn take(&mut self, bytes: usize) -> usize {
        let start = self.bytes;
        self.bytes += bytes.next_multiple_of(Self::ALIGNMENT);
        start
    }

    /// What runs in it.
    pub(crate) fn plan(self, calls: Vec<Call>) -> Plan {
        Plan {
            scratch_bytes: self.bytes,
            calls,
        }
    }
}
