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

use half::bf16;

use super::{Failure, ReduceOp};
use crate::device::{DType, bf16 as convert};

/// Elements summed at a time: the partial sums stay in the first-level cache.
const BLOCK: usize = 256;

/// How elements of a type are reduced.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reduction {
    dtype: DType,
    op: ReduceOp,
}

impl Reduction {
    /// An error if the type has no such arithmetic.
    pub(super) fn new(dtype: DType, op: ReduceOp) -> Result<Self, Failure> {
        match (dtype, op) {
            (DType::I32 | DType::U8, ReduceOp::Sum { .. }) => Err(Failure::Invalid(format!(
                "{dtype} has no scaled sum\n  hint: reduce f64, f32 or bf16, or take the maximum"
            ))),
            _ => Ok(Self { dtype, op }),
        }
    }

    /// Bytes of one element.
    pub(super) fn element_bytes(self) -> usize {
        self.dtype.bytes()
    }

    /// Bytes of one element of a part, which is not rounded yet.
    pub(super) fn part_bytes(self) -> usize {
        match self.dtype {
            DType::F64 => size_of::<<f64 as Number>::Wide>(),
            DType::F32 => size_of::<<f32 as Number>::Wide>(),
            DType::Bf16 => size_of::<<bf16 as Number>::Wide>(),
            DType::I32 => size_of::<<i32 as Number>::Wide>(),
            DType::U8 => size_of::<<u8 as Number>::Wide>(),
        }
    }

    /// Reduces `elements` elements of the ranks of one node to a part of what [`Reduction::run`] makes.
    ///
    /// # Safety
    /// As [`Reduction::run`]; the part must be aligned for the type in which is added, and none of the sources.
    pub(super) unsafe fn part(self, ranks: &[*const u8], part: *mut u8, elements: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            match self.dtype {
                DType::F64 => fold_part::<f64>(self.op, ranks, part, elements),
                DType::F32 => fold_part::<f32>(self.op, ranks, part, elements),
                DType::Bf16 => fold_part::<bf16>(self.op, ranks, part, elements),
                DType::I32 => fold_part::<i32>(self.op, ranks, part, elements),
                DType::U8 => fold_part::<u8>(self.op, ranks, part, elements),
            }
        }
    }

    /// Reduces `elements` elements of the nodes, first within each, then over all, and writes the result to every
    /// target.
    ///
    /// # Safety
    /// Every pointer must be aligned for the type, or for that of a part, and valid for so many elements. Until the call
    /// returns nobody else may write them, nor access the targets. Sources may be targets.
    pub(super) unsafe fn run(self, sources: &[NodeGives<*const u8>], targets: &[*mut u8], elements: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            match self.dtype {
                DType::F64 => fold::<f64>(self.op, sources, targets, elements),
                DType::F32 => fold::<f32>(self.op, sources, targets, elements),
                DType::Bf16 => fold::<bf16>(self.op, sources, targets, elements),
                DType::I32 => fold::<i32>(self.op, sources, targets, elements),
                DType::U8 => fold::<u8>(self.op, sources, targets, elements),
            }
        }
    }
}

/// What one node gives to a sum.
#[derive(Clone, Debug)]
pub(super) enum NodeGives<T> {
    /// The contributions of its ranks, in order.
    Ranks(Vec<T>),
    /// What [`Reduction::part`] made of them.
    Part(T),
}

impl<T> NodeGives<T> {
    /// The same of something else.
    pub(super) fn map<U>(&self, f: impl FnMut(&T) -> U) -> NodeGives<U> {
        let mut f = f;
        match self {
            Self::Ranks(ranks) => NodeGives::Ranks(ranks.iter().map(f).collect()),
            Self::Part(part) => NodeGives::Part(f(part)),
        }
    }
}

/// An element type and the type in which it is accumulated.
trait Number: Copy {
    type Wide: Copy + Default;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn max(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn scale(a: Self::Wide, factor: f32) -> Self::Wide;
}

macro_rules! float {
    ($wide:ty) => {
        #[inline(always)]
        fn add(a: $wide, b: $wide) -> $wide {
            a + b
        }
        // A NaN wins over everything, so that it is not lost.
        #[inline(always)]
        fn max(a: $wide, b: $wide) -> $wide {
            if a > b || a.is_nan() { a } else { b }
        }
        #[inline(always)]
        fn scale(a: $wide, factor: f32) -> $wide {
            a * <$wide>::from(factor)
        }
    };
}

macro_rules! integer {
    ($type:ty) => {
        impl Number for $type {
            type Wide = $type;
            #[inline(always)]
            fn widen(self) -> $type {
                self
            }
            #[inline(always)]
            fn narrow(wide: $type) -> Self {
                wide
            }
            // Sums of integers are refused when the reduction is made.
            #[inline(always)]
            fn add(a: $type, b: $type) -> $type {
                a.wrapping_add(b)
            }
            #[inline(always)]
            fn max(a: $type, b: $type) -> $type {
                Ord::max(a, b)
            }
            #[inline(always)]
            fn scale(a: $type, _factor: f32) -> $type {
                a
            }
        }
    };
}

integer!(i32);
integer!(u8);

impl Number for f64 {
    type Wide = f64;
    #[inline(always)]
    fn widen(self) -> f64 {
        self
    }
    #[inline(always)]
    fn narrow(wide: f64) -> Self {
        wide
    }
    float!(f64);
}

impl Number for f32 {
    type Wide = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        wide
    }
    float!(f32);
}

impl Number for bf16 {
    type Wide = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        convert::widen(self)
    }
    /// The sum of all ranks is rounded once, to nearest even.
    #[inline(always)]
    fn narrow(wide: f32) -> Self {
        convert::narrow(wide)
    }
    float!(f32);
}

/// See [`Reduction::run`].
unsafe fn fold<T: Number>(
    op: ReduceOp,
    sources: &[NodeGives<*const u8>],
    targets: &[*mut u8],
    elements: usize,
) {
    // `dispatch` compiles what it inlines for each instruction set.
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            let (mut sum, mut part) = ([T::Wide::default(); BLOCK], [T::Wide::default(); BLOCK]);
            for start in (0..elements).step_by(BLOCK) {
                let len = BLOCK.min(elements - start);
                let (sum, part) = (&mut sum[..len], &mut part[..len]);
                for (node, gives) in sources.iter().enumerate() {
                    let into = if node == 0 { &mut *sum } else { &mut *part };
                    match gives {
                        // SAFETY: within the caller's range; nobody writes it now.
                        NodeGives::Ranks(ranks) => unsafe { fold_node::<T>(op, ranks, start, into) },
                        NodeGives::Part(made) => {
                            // SAFETY: as above.
                            let made =
                                unsafe { std::slice::from_raw_parts(made.cast::<T::Wide>().add(start), len) };
                            into.copy_from_slice(made);
                        }
                    }
                    if node > 0 {
                        combine::<T>(op, sum, part);
                    }
                }
                for target in targets {
                    // SAFETY: within the caller's range; no slice of a source is alive, and nobody else
                    // accesses the target now.
                    let y = unsafe { std::slice::from_raw_parts_mut(target.cast::<T>().add(start), len) };
                    finish::<T>(op, sum, y);
                }
            }
        },
    );
}

/// See [`Reduction::part`].
unsafe fn fold_part<T: Number>(op: ReduceOp, ranks: &[*const u8], part: *mut u8, elements: usize) {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            for start in (0..elements).step_by(BLOCK) {
                let len = BLOCK.min(elements - start);
                // SAFETY: within the caller's range, which nobody else accesses.
                let into = unsafe { std::slice::from_raw_parts_mut(part.cast::<T::Wide>().add(start), len) };
                // SAFETY: within the caller's range; nobody writes it now.
                unsafe { fold_node::<T>(op, ranks, start, into) };
            }
        },
    );
}

/// Reduces one block of the contributions of one node.
///
/// # Safety
/// The sources must be aligned, valid for `start + into.len()` elements, and not written by anyone now.
#[inline(always)]
unsafe fn fold_node<T: Number>(op: ReduceOp, ranks: &[*const u8], start: usize, into: &mut [T::Wide]) {
    let len = into.len();
    // SAFETY: the caller's promise.
    let block =
        |source: &*const u8| unsafe { std::slice::from_raw_parts(source.cast::<T>().add(start), len) };
    let rest = match ranks {
        // Two at once: the streams of both memories run side by side.
        [first, second, rest @ ..] => {
            let pairs = into.iter_mut().zip(block(first).iter().zip(block(second)));
            match op {
                ReduceOp::Sum { .. } => pairs.for_each(|(a, (x, y))| *a = T::add(x.widen(), y.widen())),
                ReduceOp::Max => pairs.for_each(|(a, (x, y))| *a = T::max(x.widen(), y.widen())),
            }
            rest
        }
        [only] => {
            into.iter_mut().zip(block(only)).for_each(|(a, x)| *a = x.widen());
            &[]
        }
        [] => &[],
    };
    for source in rest {
        accumulate::<T>(op, into, block(source));
    }
}

#[inline(always)]
fn accumulate<T: Number>(op: ReduceOp, into: &mut [T::Wide], x: &[T]) {
    match op {
        ReduceOp::Sum { .. } => into
            .iter_mut()
            .zip(x)
            .for_each(|(a, &x)| *a = T::add(*a, x.widen())),
        ReduceOp::Max => into
            .iter_mut()
            .zip(x)
            .for_each(|(a, &x)| *a = T::max(*a, x.widen())),
    }
}

#[inline(always)]
fn combine<T: Number>(op: ReduceOp, sum: &mut [T::Wide], part: &[T::Wide]) {
    match op {
        ReduceOp::Sum { .. } => sum.iter_mut().zip(part).for_each(|(a, &b)| *a = T::add(*a, b)),
        ReduceOp::Max => sum.iter_mut().zip(part).for_each(|(a, &b)| *a = T::max(*a, b)),
    }
}

#[inline(always)]
fn finish<T: Number>(op: ReduceOp, sum: &[T::Wide], y: &mut [T]) {
    match op {
        ReduceOp::Sum { scale } if scale != 1.0 => {
            y.iter_mut()
                .zip(sum)
                .for_each(|(y, &a)| *y = T::narrow(T::scale(a, scale)));
        }
        _ => y.iter_mut().zip(sum).for_each(|(y, &a)| *y = T::narrow(a)),
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
            let reduction = Reduction::new(DType::F32, ReduceOp::Sum { scale: 0.1 }).unwrap();
            for parts in [[false, false], [true, false], [false, true], [true, true]] {
                let mut outputs = [vec![0.0_f32; len], vec![0.0; len]];
                let mut made = [vec![0.0_f32; len], vec![0.0; len]];
                let nodes = [&inputs[..2], &inputs[2..]];
                let gives = |node: usize, made: &mut [f32]| {
                    let ranks: Vec<*const u8> = nodes[node].iter().map(|x| x.as_ptr().cast()).collect();
                    if !parts[node] {
                        return NodeGives::Ranks(ranks);
                    }
                    // SAFETY: all vectors have `len` elements, and nobody else uses them.
                    unsafe { reduction.part(&ranks, made.as_mut_ptr().cast(), len) };
                    NodeGives::Part(made.as_ptr().cast())
                };
                let [one, other] = &mut made;
                let sources = [gives(0, one), gives(1, other)];
                let targets: Vec<*mut u8> = outputs.iter_mut().map(|y| y.as_mut_ptr().cast()).collect();
                // SAFETY: as above.
                unsafe { reduction.run(&sources, &targets, len) };
                for i in 0..len {
                    let expected = ((inputs[0][i] + inputs[1][i]) + inputs[2][i]) * 0.1;
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
        let reduction = Reduction::new(DType::Bf16, ReduceOp::Sum { scale: 0.25 }).unwrap();
        assert_eq!((reduction.element_bytes(), reduction.part_bytes()), (2, 4));
        let mut part = vec![0.0_f32; 300];
        let [mut whole, mut parted] = [vec![bf16::ZERO; 300], vec![bf16::ZERO; 300]];
        let first = NodeGives::Ranks(ranks[..3].to_vec());
        let second = NodeGives::Ranks(ranks[3..].to_vec());
        // SAFETY: all vectors have 300 elements, and nobody else uses them.
        unsafe {
            reduction.run(&[first, second.clone()], &[whole.as_mut_ptr().cast()], 300);
            reduction.part(&ranks[..3], part.as_mut_ptr().cast(), 300);
            let first = NodeGives::Part(part.as_ptr().cast());
            reduction.run(&[first, second], &[parted.as_mut_ptr().cast()], 300);
        }
        assert_eq!(whole, parted);
    }

    #[test]
    fn integers_have_no_scaled_sum() {
        let error = Reduction::new(DType::I32, ReduceOp::Sum { scale: 1.0 }).unwrap_err();
        assert!(error.to_string().starts_with("i32 has no scaled sum\n  hint: "));
        assert!(Reduction::new(DType::U8, ReduceOp::Max).is_ok());
    }
}
