//! Operations: one file each, forward beside backward, CPU kernel beside CUDA launch, every argument with its shape.
//!
//! An operation is data ([`Op`]): the buffers it reads and writes and its sizes. A device runs it, at once (CPU),
//! later (a stream), or elsewhere (a kernel of the same name). Kernels on the CPU follow three rules:
//! - the result does not depend on the number of threads: work is cut by the problem's size alone, but for the tiles of
//!   large products, which make no difference (`linear` says why);
//! - element-wise kernels use the same sequence of operations on every instruction set, so they agree bit by bit;
//! - every sum has an order that is written down.
//!
//! | file | operations |
//! |---|---|
//! | `linear`, `column_sum` | [`LinearForward`], [`LinearDinp`], [`LinearDweight`]; [`AddBiasResidual`], and [`ColumnSum`] for the bias |
//! | `encoder` | [`EncoderForward`], [`TokenBackward`], [`PositionBackward`]; of all tokens or a [`VocabularyPart`] |
//! | `row_norm` | [`NormForward`], [`NormBackward`]: layer and root mean square normalisation |
//! | `attention` | forward and backward, over stretches of keys with [`AttentionMerge`]; [`AttentionDecode`] in generation; [`Rotary`] |
//! | `batch_norm` | batch normalisation over the rows of several ranks: [`crate::parallel::SyncBatchNorm`] |
//! | `experts` | [`RouteForward`], [`RouteBackward`]; [`SortByExpert`]; [`IndexRows`], [`CombineBackward`]; [`GroupedLinear`], [`GroupedDweight`] |
//! | `swiglu` | [`SwigluForward`], [`SwigluBackward`] |
//! | `cross_entropy` | [`CrossEntropy`]: losses, and in training the gradient too; [`CrossEntropyPartial`] and [`CrossEntropyCombine`], where ranks have a part of the logits each; [`LossSum`] |
//! | `dropout` | [`Dropout`], and [`DropoutMask`] for it and attention; [`philox()`], random numbers without a state |
//! | `update` | [`Update`]: an optimizer's, by the rules of [`crate::optim`] |
//! | `norm` | [`SquaredNorm`], [`ClipScale`] |
//! | `elementwise` | [`Cast`], [`Fill`], [`GeluForward`], [`GeluBackward`] |
//! | `cpu` | what CPU kernels are written in; products; bf16 storage |
//! | [`cuda`] | CUDA C, and what an operation asks of a GPU as data |
//!
//! Types: activations and parameters have one type A (f32, bf16, or f64 in gradient checks). Gradients of parameters
//! have G, which is A or f32. Statistics (`losses`, `lse`, `dlosses`, norm, scale) are f32, or f64 where A is f64;
//! partial sums of the norm are f64. bf16 is storage: arithmetic is in f32, and a result is rounded once.
//!
//! Letters: `B` samples, `T` positions, `C` channels, `H` heads, `KV` heads of keys and values, `D` channels of a head,
//! `F` channels of a feed-forward layer, `V` vocabulary, `R = B·T` rows.

mod attention;
mod batch_norm;
mod column_sum;
pub(crate) mod cpu;
mod cross_entropy;
pub mod cuda;
mod dropout;
mod elementwise;
mod encoder;
mod experts;
mod linear;
mod norm;
mod row_norm;
mod swiglu;
mod update;

pub(crate) use attention::has_tensor_kernels;
pub use attention::{
    AttentionBackward, AttentionDecode, AttentionForward, AttentionMerge, AttentionShape, HeadsView, Rotary,
    RotaryEmbedding,
};
pub use batch_norm::{BatchNormBackward, BatchNormBackwardSums, BatchNormForward, BatchNormSums};
pub use column_sum::{AddBiasResidual, ColumnSum};
pub(crate) use cpu::kernel::kernel;
pub use cpu::processor::{Cpu, Isa};
pub use cross_entropy::{CrossEntropy, CrossEntropyCombine, CrossEntropyPartial, LossSum};
pub use dropout::{Dropout, DropoutMask, philox};
pub use elementwise::{Cast, Fill, GeluBackward, GeluForward};
pub use encoder::{EncoderForward, PositionBackward, TokenBackward, VocabularyPart};
pub use experts::{
    CombineBackward, GroupedDweight, GroupedLinear, IndexRows, MergedOrder, RouteBackward, RouteForward,
    Router, RouterScore, SortByExpert, inverse,
};
pub use linear::{LinearDinp, LinearDweight, LinearForward, LinearShape, WeightLayout};
pub use norm::{CHUNK, ClipScale, SquaredNorm, Updates};
pub(crate) use row_norm::LAYERNORM_EPSILON;
pub use row_norm::{NormBackward, NormForward};
pub use swiglu::{SwigluBackward, SwigluForward};
pub(crate) use update::HostUpdate;
pub use update::{
    MAX_CONSTANTS, MAX_RATES, MAX_SLOTS, Rates, Runs, UPDATE_NUMBERS, Update, UpdateKernel, UpdateNumbers,
    UpdatePart, UpdateRule,
};

use cuda::plan::Plan;

use crate::cuda::LaunchContext;
use crate::memory::{Buffer, DeviceError};

/// An operation: its kernel on the CPU, and what it launches on an NVIDIA GPU.
pub trait Operation {
    /// Name in errors and traces: `norm_forward`.
    const NAME: &'static str;

    /// Borrows the buffers, checks their sizes, computes.
    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError>;

    /// Checks sizes and types and chooses kernels, grids and scratch memory, by the sizes alone: on every GPU the
    /// sums have the same order.
    fn plan(&self) -> Result<Plan, DeviceError> {
        let (op, device) = (Self::NAME, "CUDA");
        Err(DeviceError::NoKernel { op, device })
    }

    /// Launches the plan on the context's stream; returns at once.
    fn launch(&self, cx: &mut LaunchContext<'_>) -> Result<(), DeviceError> {
        self.plan()?.launch(cx)
    }
}

macro_rules! operations {
    ($($op:ident),* $(,)?) => {
        /// Any operation, as data.
        #[derive(Clone, Debug)]
        pub enum Op {
            $(#[doc = concat!("See [`", stringify!($op), "`].")] $op($op),)*
        }

        impl Op {
            /// Name in errors and traces.
            pub const fn name(&self) -> &'static str {
                match self { $(Self::$op(_) => <$op as Operation>::NAME,)* }
            }

            /// Runs it on the CPU, now.
            pub fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
                match self { $(Self::$op(op) => op.run(cpu),)* }
            }

            /// What it launches on an NVIDIA GPU.
            fn plan(&self) -> Result<Plan, DeviceError> {
                match self { $(Self::$op(op) => op.plan(),)* }
            }

            /// Puts it on a stream of an NVIDIA GPU.
            pub fn launch(&self, cx: &mut LaunchContext<'_>) -> Result<(), DeviceError> {
                match self { $(Self::$op(op) => op.launch(cx),)* }
            }
        }

        $(impl From<$op> for Op {
            fn from(op: $op) -> Self {
                Self::$op(op)
            }
        })*
    };
}

operations!(
    AddBiasResidual,
    AttentionBackward,
    AttentionDecode,
    AttentionForward,
    AttentionMerge,
    BatchNormBackward,
    BatchNormBackwardSums,
    BatchNormForward,
    BatchNormSums,
    Cast,
    ClipScale,
    ColumnSum,
    CombineBackward,
    CrossEntropy,
    CrossEntropyCombine,
    CrossEntropyPartial,
    Dropout,
    EncoderForward,
    Fill,
    GeluBackward,
    GeluForward,
    GroupedDweight,
    GroupedLinear,
    IndexRows,
    LinearDinp,
    LinearDweight,
    LinearForward,
    LossSum,
    NormBackward,
    NormForward,
    PositionBackward,
    Rotary,
    RouteBackward,
    RouteForward,
    SortByExpert,
    SquaredNorm,
    SwigluBackward,
    SwigluForward,
    TokenBackward,
    Update,
);

/// An error that says which operation met which size.
pub(crate) fn expect_len(
    op: &'static str,
    name: &str,
    found: usize,
    expected: usize,
) -> Result<(), DeviceError> {
    if found == expected {
        Ok(())
    } else {
        Err(DeviceError::Shape {
            op,
            what: format!("`{name}` has {found} elements, expected {expected}"),
        })
    }
}

/// Refuses buffers of another size than the one beside their name.
pub(crate) fn expect_lens(op: &'static str, buffers: &[(&str, &Buffer, usize)]) -> Result<(), DeviceError> {
    let mut buffers = buffers.iter();
    buffers.try_for_each(|(name, buffer, len)| expect_len(op, name, buffer.len(), *len))
}

/// An error that says which token, or other index, is outside `least..end`.
pub(crate) fn expect_indices(
    op: &'static str,
    name: &str,
    indices: &[i32],
    least: i32,
    end: usize,
) -> Result<(), DeviceError> {
    let last = i32::try_from(end).unwrap_or(i32::MAX);
    let Some(at) = indices.iter().position(|index| !(least..last).contains(index)) else {
        return Ok(());
    };
    let expected = if indices[at] < least {
        format!("at least {least}")
    } else {
        format!("less than {end}")
    };
    let what = format!("`{name}[{at}]` is {}, expected {expected}", indices[at]);
    Err(DeviceError::Shape { op, what })
}
