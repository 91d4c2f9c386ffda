//! The arithmetic of reductions: contributions of all ranks, in a fixed order, into one.
//!
//! Element by element, so that the result does not depend on where a buffer is cut. The compiler vectorises the
//! loops for the instruction set found at run time; it neither reorders nor fuses floating-point operations, so
//! all instruction sets agree bit by bit.
#![allow(unsafe_code, reason = "elements in memory that other ranks map")]
#![expect(
    clippy::inline_always,
    reason = "only what is inlined is compiled for the instruction set found"
)]

use std::convert::identity;
use std::ops::Add;

use half::bf16;

use super::operation::ReduceOp;
use crate::device::{DType, Isa, dtype as convert};
use crate::ops::cpu::kernel::{update, update2};

/// Elements summed at a time: the partial sums stay in the first-level cache.
const BLOCK: usize = 256;

/// Calls a function that is generic over the type of the elements.
macro_rules! for_type {
    ($dtype:expr, $function:ident($($argument:expr),*)) => {
        match $dtype {
            DType::F64 => $function::<f64>($($argument),*),
            DType::F32 => $function::<f32>($($argument),*),
            DType::Bf16 => $function::<bf16>($($argument),*),
            DType::I32 => $function::<i32>($($argument),*),
            DType::U8 => $function::<u8>($($argument),*),
        }
    };
}

/// An element type and how its elements are reduced.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reduction {
    dtype: DType,
    op: ReduceOp,
}

impl Reduction {
    /// Of a request whose type and operation were checked ([`super::operation::Descriptor::check`]).
    pub(super) fn new(dtype: DType, op: ReduceOp) -> Self {
        Self { dtype, op }
    }

    /// Bytes of one element.
    pub(super) fn element_bytes(self) -> usize {
        self.dtype.bytes()
    }

    /// Bytes of one element of a partial result, which is not rounded yet.
    pub(super) fn partial_bytes(self) -> usize {
        for_type!(self.dtype, wide_bytes())
    }

    /// Reduces `elements` elements of the ranks of one node to a partial result for [`Reduction::run`].
    ///
    /// # Safety
    /// As [`Reduction::run`]; `part` must be aligned for the type in which is added, and be none of the sources.
    pub(super) unsafe fn partial(self, ranks: &[*const u8], part: *mut u8, elements: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { for_type!(self.dtype, fold_partial(self.op, ranks, part, elements)) }
    }

    /// Reduces `elements` elements of the nodes, first within each, then over all, and writes the result to every
    /// target.
    ///
    /// # Safety
    /// Every pointer must be aligned for the type, or for that of a partial result, and valid for so many elements. Until
    /// the call returns no other thread may write them, nor access the targets. Sources may be targets.
    pub(super) unsafe fn run(self, sources: &[NodeInput<*const u8>], targets: &[*mut u8], elements: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { for_type!(self.dtype, fold(self.op, sources, targets, elements)) }
    }
}

/// What one node contributes.
#[derive(Clone, Debug)]
pub(super) enum NodeInput<T> {
    /// The contributions of its ranks, in order.
    Ranks(Vec<T>),
    /// Their partial result, by [`Reduction::partial`].
    Partial(T),
}

impl<T> NodeInput<T> {
    pub(super) fn map<U>(&self, mut f: impl FnMut(&T) -> U) -> NodeInput<U> {
        match self {
            Self::Ranks(ranks) => NodeInput::Ranks(ranks.iter().map(f).collect()),
            Self::Partial(part) => NodeInput::Partial(f(part)),
        }
    }
}

/// A type in which elements are accumulated. Sums of integers are refused before
/// ([`super::operation::Descriptor::check`]).
trait Wide: Copy + Default + PartialOrd + Add<Output = Self> {}

impl<W: Copy + Default + PartialOrd + Add<Output = W>> Wide for W {}

/// An element type and the type in which it is accumulated.
trait Reducible: Copy {
    type Wide: Wide;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
}

macro_rules! reducible {
    ($($type:ty as $wide:ty: $widen:expr, $narrow:expr;)*) => {$(
        impl Reducible for $type {
            type Wide = $wide;
            #[inline(always)]
            fn widen(self) -> $wide {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(wide: $wide) -> Self {
                $narrow(wide)
            }
        }
    )*};
}

reducible! {
    f64 as f64: identity, identity;
    f32 as f32: identity, identity;
    // The sum of all ranks is rounded once, to nearest even.
    bf16 as f32: convert::widen, convert::narrow;
    i32 as i32: identity, identity;
    u8 as u8: identity, identity;
}

/// The maximum with a NaN is a NaN, so that it is not lost.
#[inline(always)]
fn larger<W: Wide>(a: W, b: W) -> W {
    if a > b || a.partial_cmp(&a).is_none() {
        a
    } else {
        b
    }
}

fn wide_bytes<T: Reducible>() -> usize {
    size_of::<T::Wide>()
}

/// See [`Reduction::run`].
unsafe fn fold<T: Reducible>(
    op: ReduceOp,
    sources: &[NodeInput<*const u8>],
    targets: &[*mut u8],
    elements: usize,
) {
    // `dispatch` compiles what it inlines for each instruction set.
    Isa::detect().dispatch(
        #[inline(always)]
        || {
            let (mut sum, mut part) = ([T::Wide::default(); BLOCK], [T::Wide::default(); BLOCK]);
            for start in (0..elements).step_by(BLOCK) {
                let len = BLOCK.min(elements - start);
                let (sum, part) = (&mut sum[..len], &mut part[..len]);
                for (node, input) in sources.iter().enumerate() {
                    let into = if node == 0 { &mut *sum } else { &mut *part };
                    match input {
                        // SAFETY: within the caller's range; no thread writes it now.
                        NodeInput::Ranks(ranks) => unsafe { fold_node::<T>(op, ranks, start, into) },
                        NodeInput::Partial(input) => {
                            // SAFETY: as above.
                            let input = unsafe {
                                std::slice::from_raw_parts(input.cast::<T::Wide>().add(start), len)
                            };
                            into.copy_from_slice(input);
                        }
                    }
                    if node > 0 {
                        combine(op, sum, part);
                    }
                }
                for target in targets {
                    // SAFETY: within the caller's range; no slice of a source is alive, and no other
                    // thread accesses the target now.
                    let y = unsafe { std::slice::from_raw_parts_mut(target.cast::<T>().add(start), len) };
                    update(y, sum, |y, a| *y = T::narrow(a));
                }
            }
        },
    );
}

/// See [`Reduction::partial`].
unsafe fn fold_partial<T: Reducible>(op: ReduceOp, ranks: &[*const u8], part: *mut u8, elements: usize) {
    Isa::detect().dispatch(
        #[inline(always)]
        || {
            for start in (0..elements).step_by(BLOCK) {
                let len = BLOCK.min(elements - start);
                // SAFETY: within the caller's range, which no other thread accesses.
                let into = unsafe { std::slice::from_raw_parts_mut(part.cast::<T::Wide>().add(start), len) };
                // SAFETY: within the caller's range; no thread writes it now.
                unsafe { fold_node::<T>(op, ranks, start, into) };
            }
        },
    );
}

/// Reduces one block of the contributions of one node.
///
/// # Safety
/// The sources must be aligned, valid for `start + into.len()` elements, and not written by any thread now.
#[inline(always)]
unsafe fn fold_node<T: Reducible>(op: ReduceOp, ranks: &[*const u8], start: usize, into: &mut [T::Wide]) {
    let len = into.len();
    // SAFETY: the caller's promise.
    let block =
        |source: &*const u8| unsafe { std::slice::from_raw_parts(source.cast::<T>().add(start), len) };
    let rest = match ranks {
        // Two at once: the streams of both memories run side by side.
        [first, second, rest @ ..] => {
            let pairs = [block(first), block(second)];
            match op {
                ReduceOp::Sum => update2(into, pairs, |a, x, y| *a = x.widen() + y.widen()),
                ReduceOp::Max => update2(into, pairs, |a, x, y| *a = larger(x.widen(), y.widen())),
            }
            rest
        }
        [only] => {
            update(into, block(only), |a, x| *a = x.widen());
            &[]
        }
        [] => &[],
    };
    for source in rest {
        let more = block(source);
        match op {
            ReduceOp::Sum => update(into, more, |a, x| *a = *a + x.widen()),
            ReduceOp::Max => update(into, more, |a, x| *a = larger(*a, x.widen())),
        }
    }
}

#[inline(always)]
fn combine<W: Wide>(op: ReduceOp, sum: &mut [W], part: &[W]) {
    match op {
        ReduceOp::Sum => update(sum, part, |a, b| *a = *a + b),
        ReduceOp::Max => update(sum, part, |a, b| *a = larger(*a, b)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums of 2 + 1 contributions on two nodes, at all lengths around a block, with a part of either node and without.
    #[test]
    fn blocks_and_their_ends_are_summed_in_order() {
        for len in [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7] {
            let input = |rank: usize| {
                (0..len)
                    .map(|i| ((i * 7 + rank * 13) as f32).sin())
                    .collect::<Vec<_>>()
            };
            let inputs = [input(0), input(1), input(2)];
            let reduction = Reduction::new(DType::F32, ReduceOp::Sum);
            for parts in [[false, false], [true, false], [false, true], [true, true]] {
                let mut outputs = [vec![0.0_f32; len], vec![0.0; len]];
                let mut made = [vec![0.0_f32; len], vec![0.0; len]];
                let nodes = [&inputs[..2], &inputs[2..]];
                let input_of = |node: usize, made: &mut [f32]| {
                    let ranks: Vec<*const u8> = nodes[node].iter().map(|x| x.as_ptr().cast()).collect();
                    if !parts[node] {
                        return NodeInput::Ranks(ranks);
                    }
                    // SAFETY: all vectors have `len` elements, and no other thread uses them.
                    unsafe { reduction.partial(&ranks, made.as_mut_ptr().cast(), len) };
                    NodeInput::Partial(made.as_ptr().cast())
                };
                let [one, other] = &mut made;
                let sources = [input_of(0, one), input_of(1, other)];
                let targets: Vec<*mut u8> = outputs.iter_mut().map(|y| y.as_mut_ptr().cast()).collect();
                // SAFETY: as above.
                unsafe { reduction.run(&sources, &targets, len) };
                for i in 0..len {
                    let expected = (inputs[0][i] + inputs[1][i]) + inputs[2][i];
                    assert_eq!(outputs[0][i].to_bits(), expected.to_bits());
                    assert_eq!(outputs[1][i].to_bits(), expected.to_bits());
                }
            }
        }
    }

    /// Three contributions on one node and one on another: rounded once, at the end.
    #[test]
    fn a_part_in_bf16_is_not_rounded() {
        let inputs: Vec<Vec<bf16>> = (0..4)
            .map(|rank| {
                (0..300)
                    .map(|i| bf16::from_f32(((i * 3 + rank) as f32).cos()))
                    .collect()
            })
            .collect();
        let ranks: Vec<*const u8> = inputs.iter().map(|x| x.as_ptr().cast()).collect();
        let reduction = Reduction::new(DType::Bf16, ReduceOp::Sum);
        assert_eq!((reduction.element_bytes(), reduction.partial_bytes()), (2, 4));
        let mut part = vec![0.0_f32; 300];
        let [mut whole, mut parted] = [vec![bf16::ZERO; 300], vec![bf16::ZERO; 300]];
        let first = NodeInput::Ranks(ranks[..3].to_vec());
        let second = NodeInput::Ranks(ranks[3..].to_vec());
        // SAFETY: all vectors have 300 elements, and no other thread uses them.
        unsafe {
            reduction.run(&[first, second.clone()], &[whole.as_mut_ptr().cast()], 300);
            reduction.partial(&ranks[..3], part.as_mut_ptr().cast(), 300);
            let first = NodeInput::Partial(part.as_ptr().cast());
            reduction.run(&[first, second], &[parted.as_mut_ptr().cast()], 300);
        }
        assert_eq!(whole, parted);
    }
}
