//! What CPU kernels are written in: functions compiled for every instruction set, choice of type, scratch memory, and
//! arithmetic in f32 or f64.
//!
//! Arithmetic is plain operations only. No fused multiply-add and no library functions: each operation rounds once, the same
//! on every instruction set and system. Sums run in [`LANES`] lanes, combined pairwise, however wide the registers are.
#![expect(
    clippy::inline_always,
    reason = "so that it is compiled for each instruction set"
)]

use super::processor::Isa;
use std::cell::RefCell;
use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub};

use super::gemm::Gemm;
use crate::memory::Element;

/// Defines a function that is compiled for each instruction set and takes the one to use as first argument.
///
/// Everything that the body calls must be `#[inline(always)]`, or it is compiled for the baseline only.
macro_rules! kernel {
    ($(#[$attribute:meta])* $vis:vis fn $name:ident<$life:lifetime, $real:ident>(
        $($arg:ident: $type:ty),* $(,)?
    ) -> $out:ty $body:block) => {
        $(#[$attribute])*
        $vis fn $name<$life, $real: $crate::ops::cpu::kernel::Real>(
            isa: $crate::ops::Isa,
            $($arg: $type),*
        ) -> $out {
            struct Call<$life, $real> {
                $($arg: $type,)*
                _life: std::marker::PhantomData<&$life $real>,
            }

            impl<$life, $real: $crate::ops::cpu::kernel::Real> pulp::WithSimd for Call<$life, $real> {
                type Output = $out;

                #[inline(always)]
                fn with_simd<S: pulp::Simd>(self, _simd: S) -> $out {
                    let Self { $($arg,)* _life: _ } = self;
                    $body
                }
            }

            isa.dispatch(Call { $($arg,)* _life: std::marker::PhantomData })
        }
    };
}
pub(crate) use kernel;

/// Calls a generic function with the type of activations and parameters that a buffer holds.
macro_rules! by_dtype {
    ($op:expr, $dtype:expr, $stored:ident => $call:expr) => {
        match $dtype {
            $crate::memory::DType::F32 => {
                type $stored = f32;
                $call
            }
            $crate::memory::DType::F64 => {
                type $stored = f64;
                $call
            }
            $crate::memory::DType::Bf16 => {
                type $stored = half::bf16;
                $call
            }
            other => Err($crate::memory::DeviceError::Shape {
                op: $op,
                what: format!("takes f32, bf16 or f64, not {other}"),
            }),
        }
    };
}
pub(crate) use by_dtype;

/// As [`by_dtype`], with the type of parameters' gradients: the same, or f32 beside bf16.
macro_rules! by_dtypes {
    ($op:expr, $dtype:expr, $grad_dtype:expr, ($stored:ident, $grad:ident) => $call:expr) => {
        match ($dtype, $grad_dtype) {
            ($crate::memory::DType::Bf16, $crate::memory::DType::F32) => {
                type $stored = half::bf16;
                type $grad = f32;
                $call
            }
            // Where they should be the same and are not, the gradient is refused when it is borrowed.
            (dtype, _) => $crate::ops::cpu::kernel::by_dtype!($op, dtype, $stored => {
                type $grad = $stored;
                $call
            }),
        }
    };
}
pub(crate) use by_dtypes;

/// [`crate::ops::Operation::run`]: calls `compute` with the type that a buffer holds, and with that of a buffer of gradients.
macro_rules! runs_in {
    ($buffer:ident) => {
        fn run(&self, cpu: &$crate::ops::Cpu) -> Result<(), $crate::memory::DeviceError> {
            $crate::ops::cpu::kernel::by_dtype!(Self::NAME, self.$buffer.dtype(), S => self.compute::<S>(cpu))
        }
    };
    ($buffer:ident, $grads:ident) => {
        fn run(&self, cpu: &$crate::ops::Cpu) -> Result<(), $crate::memory::DeviceError> {
            let dtypes = (self.$buffer.dtype(), self.$grads.dtype());
            $crate::ops::cpu::kernel::by_dtypes!(Self::NAME, dtypes.0, dtypes.1, (S, G) => self.compute::<S, G>(cpu))
        }
    };
}
pub(crate) use runs_in;

/// Doubles in a cache line.
const LINE: usize = 8;

/// Lends `len` elements that start at a cache line. Their contents are whatever was there before. A thread keeps
/// its scratch memory, so that after the first step nothing is allocated.
pub(crate) fn with_scratch<T: Real, R>(len: usize, work: impl FnOnce(&mut [T]) -> R) -> R {
    let doubles = (len * size_of::<T>()).div_ceil(size_of::<f64>());
    let mut memory = take_scratch(doubles + LINE);
    let start = memory.as_ptr().align_offset(LINE * size_of::<f64>()).min(LINE);
    let result = work(&mut bytemuck::cast_slice_mut(&mut memory[start..start + doubles])[..len]);
    give_scratch_back(memory);
    result
}

thread_local! {
    /// The last one given back is the next one taken: every depth of nesting finds its own again.
    static SCRATCH: RefCell<Vec<Vec<f64>>> = const { RefCell::new(Vec::new()) };
}

fn take_scratch(doubles: usize) -> Vec<f64> {
    let mut memory = SCRATCH.with_borrow_mut(Vec::pop).unwrap_or_default();
    if memory.len() < doubles {
        memory.resize(doubles, 0.0);
    }
    memory
}

fn give_scratch_back(memory: Vec<f64>) {
    SCRATCH.with_borrow_mut(|free| free.push(memory));
}

/// Partial sums of a reduction: element `i` is added to lane `i mod LANES`.
pub(crate) const LANES: usize = 32;

/// Elements for which the lanes are read and written once.
const GROUP: usize = 4 * LANES;

/// Numbers whose exponentials are computed together.
pub(crate) const EXPS: usize = 64;

/// A floating-point type that kernels compute in.
pub(crate) trait Real:
    Element
    + PartialOrd
    + Default
    + Debug
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + MulAssign
{
    /// 0
    const ZERO: Self;
    /// 1
    const ONE: Self;
    /// The least number.
    const LEAST: Self;
    /// What multiplies matrices of these numbers.
    fn gemm() -> Gemm<Self>;
    /// The nearest value.
    fn of(x: f64) -> Self;
    /// Exactly.
    fn to_f64(self) -> f64;
    /// Correctly rounded.
    fn sqrt(self) -> Self;
    /// eˣ within 2 units in the last place. It saturates: below −87 (f64: −708) near the least normal number,
    /// above 88 (f64: 709) near the greatest power. NaN stays NaN.
    fn exp(self) -> Self;
    /// [`Real::exp`] of each, the same bits. A step is taken for all before the next: one exponential is a long chain of
    /// operations, which a processor fills with others only where they are near.
    fn exp_stages(x: &mut [Self; EXPS]);
    /// The same, but one after the other in debug builds: without vectors, stages are ten times slower.
    #[inline(always)]
    fn exp_each(x: &mut [Self; EXPS]) {
        if cfg!(debug_assertions) {
            for x in x {
                *x = x.exp();
            }
        } else {
            Self::exp_stages(x);
        }
    }
}

macro_rules! real {
    ($t:ident, gemm: $gemm:path, consts: $consts:path, bits: $mantissa:literal, $bias:literal, round: $round:literal,
     range: $low:literal, $high:literal, ln2: $ln2_high:literal, $ln2_low:literal, series: $series:path) => {
        impl Real for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const LEAST: Self = $t::MIN;

            fn gemm() -> Gemm<Self> {
                $gemm(Isa::limit())
            }

            #[inline(always)]
            fn of(x: f64) -> Self {
                x as Self
            }

            #[inline(always)]
            fn to_f64(self) -> f64 {
                self as f64
            }

            #[inline(always)]
            fn sqrt(self) -> Self {
                $t::sqrt(self)
            }

            #[inline(always)]
            fn exp(self) -> Self {
                use $consts as consts;
                // Comparisons that are false for NaN, so that NaN goes through.
                let x = if self < $low { $low } else { self };
                let x = if x > $high { $high } else { x };
                // Adding this constant leaves the integer nearest to x/ln 2 in the lowest bits.
                let shifted = x * consts::LOG2_E + $round;
                let n = shifted - $round;
                // ln 2 in two parts, the first with trailing zeros, so that `n · high` is exact.
                let r = x - n * $ln2_high - n * $ln2_low;
                let mut sum: Self = $series[0];
                for &coefficient in &$series[1..] {
                    sum = sum * r + coefficient;
                }
                sum * Self::from_bits(shifted.to_bits().wrapping_add($bias) << $mantissa)
            }

            #[inline(always)]
            fn exp_stages(x: &mut [Self; EXPS]) {
                use $consts as consts;
                let (mut shifted, mut r) = ([0.0; EXPS], [0.0; EXPS]);
                for i in 0..EXPS {
                    let x = if x[i] < $low { $low } else { x[i] };
                    let x = if x > $high { $high } else { x };
                    shifted[i] = x * consts::LOG2_E + $round;
                    let n = shifted[i] - $round;
                    r[i] = x - n * $ln2_high - n * $ln2_low;
                }
                let mut sum: [Self; EXPS] = [$series[0]; EXPS];
                for &coefficient in &$series[1..] {
                    for i in 0..EXPS {
                        sum[i] = sum[i] * r[i] + coefficient;
                    }
                }
                for i in 0..EXPS {
                    x[i] = sum[i] * Self::from_bits(shifted[i].to_bits().wrapping_add($bias) << $mantissa);
                }
            }
        }
    };
}

real!(f32, gemm: super::gemm::gemm_f32, consts: std::f32::consts, bits: 23, 127, round: 12_582_912.0,
      range: -87.0, 88.0, ln2: 0.693_359_4, -2.121_944_4e-4, series: SERIES_F32);
real!(f64, gemm: super::gemm::gemm_f64, consts: std::f64::consts, bits: 52, 1023, round: 6_755_399_441_055_744.0,
      range: -708.0, 709.0, ln2: 0.693_145_751_953_125, 1.428_606_820_309_417_2e-6, series: SERIES_F64);

/// Taylor's series of eʳ, highest power first; |r| ≤ ln 2 / 2.
const SERIES_F64: [f64; 14] = inverse_factorials();
const SERIES_F32: [f32; 8] = {
    let wide: [f64; 8] = inverse_factorials();
    let mut narrow = [0.0; 8];
    let mut i = 0;
    while i < narrow.len() {
        narrow[i] = wide[i] as f32;
        i += 1;
    }
    narrow
};

/// 1/(N−1)!, …, 1/1!, 1/0!
const fn inverse_factorials<const N: usize>() -> [f64; N] {
    let mut out = [1.0; N];
    let mut factorial = 1.0;
    let mut i = N - 1;
    while i > 0 {
        factorial *= (N - i) as f64;
        i -= 1;
        out[i] = 1.0 / factorial;
    }
    out
}

/// Natural logarithm of a positive normal number, within 2 units in the last place:
/// `x = 2ⁿ·m`, and `ln m = 2·artanh((m − 1)/(m + 1))`. NaN and infinity come out as NaN and a number.
pub(crate) fn ln(x: f64) -> f64 {
    const MANTISSA: u64 = (1 << 52) - 1;
    if x.is_nan() {
        return x;
    }
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i32 - 1023;
    let mut mantissa = f64::from_bits((bits & MANTISSA) | (1023 << 52));
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    // |s| ≤ 0.1716: the terms left out are below 2·s²¹/21, 10⁻¹⁷.
    let mut series = 0.0;
    for k in (0..10).rev() {
        series = series * square + 1.0 / f64::from(2 * k + 1);
    }
    f64::from(exponent) * std::f64::consts::LN_2 + 2.0 * s * series
}

/// Adds lanes pairwise: `i` and `i + N/2`, and so on. `N` is a power of two.
#[inline(always)]
pub(crate) fn sum_lanes<T: Real, const N: usize>(mut lanes: [T; N]) -> T {
    let mut half = N / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// `Σ f(x[i])` in lanes.
#[inline(always)]
pub(crate) fn sum_map<T: Real>(x: &[T], f: impl Fn(T) -> T) -> T {
    sum_map3(x, x, x, |x, _, _| f(x))
}

/// `Σ f(x[i], y[i])` in lanes, over the shorter of the two.
#[inline(always)]
pub(crate) fn sum_map2<T: Real>(x: &[T], y: &[T], f: impl Fn(T, T) -> T) -> T {
    sum_map3(x, y, y, |x, y, _| f(x, y))
}

/// `Σ f(x[i], y[i], z[i])` in lanes, over the shortest of the three.
#[expect(
    clippy::needless_range_loop,
    reason = "iterators are not always compiled into their caller"
)]
#[inline(always)]
pub(crate) fn sum_map3<T: Real>(x: &[T], y: &[T], z: &[T], f: impl Fn(T, T, T) -> T) -> T {
    let n = x.len().min(y.len()).min(z.len());
    let mut lanes = [T::ZERO; LANES];
    let (mut xs, mut ys) = (x[..n].chunks_exact(GROUP), y[..n].chunks_exact(GROUP));
    let mut zs = z[..n].chunks_exact(GROUP);
    while let (Some(x), Some(y), Some(z)) = (xs.next(), ys.next(), zs.next()) {
        for i in 0..LANES {
            let mut lane = lanes[i];
            for j in (i..GROUP).step_by(LANES) {
                lane += f(x[j], y[j], z[j]);
            }
            lanes[i] = lane;
        }
    }
    let (x, y, z) = (xs.remainder(), ys.remainder(), zs.remainder());
    for (j, &x) in x.iter().enumerate() {
        lanes[j % LANES] += f(x, y[j], z[j]);
    }
    sum_lanes(lanes)
}

/// `f(out[i], x[i])` for all places that both have. The library's `zip` stays a function of its own where a build optimizes
/// each part of a crate alone; this is always a part of its caller.
#[inline(always)]
pub(crate) fn update<O, T: Copy>(out: &mut [O], x: &[T], f: impl Fn(&mut O, T)) {
    update3(out, [x, x, x], |out, x, _, _| f(out, x));
}

/// `f(out[i], x[i], y[i])`, as [`update`].
#[inline(always)]
pub(crate) fn update2<O, T: Copy>(out: &mut [O], [x, y]: [&[T]; 2], f: impl Fn(&mut O, T, T)) {
    update3(out, [x, y, y], |out, x, y, _| f(out, x, y));
}

/// `f(out[i], x[i], y[i], z[i])`, as [`update`].
#[inline(always)]
pub(crate) fn update3<O, T: Copy>(out: &mut [O], [x, y, z]: [&[T]; 3], f: impl Fn(&mut O, T, T, T)) {
    let n = out.len().min(x.len()).min(y.len()).min(z.len());
    let (out, x, y, z) = (&mut out[..n], &x[..n], &y[..n], &z[..n]);
    for i in 0..n {
        f(&mut out[i], x[i], y[i], z[i]);
    }
}

kernel! {
    /// `y[i] += x[i]`
    pub(crate) fn add_into<'a, T>(x: &'a [T], y: &'a mut [T]) -> () {
        update(y, x, |y, x| *y += x);
    }
}

/// The largest element, NaN passed over. A maximum does not depend on its order.
#[inline(always)]
pub(crate) fn max_of<T: Real>(x: &[T]) -> T {
    let greater = |a: T, b: T| if b > a { b } else { a };
    let mut lanes = [T::LEAST; LANES];
    let mut chunks = x.chunks_exact(LANES);
    for chunk in &mut chunks {
        for i in 0..LANES {
            lanes[i] = greater(lanes[i], chunk[i]);
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = greater(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    chunks
        .remainder()
        .iter()
        .fold(lanes[0], |max, &x| greater(max, x))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_agrees_with_the_library() {
        for i in -8_000..8_800_i32 {
            let x = f64::from(i) * 0.01;
            let wide = (Real::exp(x) / x.exp() - 1.0).abs();
            assert!(wide < 1e-15, "exp {x}: {wide:e}");
            let x = x as f32;
            let narrow = (f64::from(Real::exp(x)) / f64::from(x).exp() - 1.0).abs();
            assert!(narrow < 2.5e-7, "exp {x}: {narrow:e}");
        }
        assert_eq!(Real::exp(0.0_f32), 1.0);
        assert!(Real::exp(f32::NAN).is_nan() && Real::exp(f64::NAN).is_nan());
        assert!(Real::exp(f32::NEG_INFINITY) < 1e-37 && Real::exp(f32::INFINITY) > 1e38);
        assert!(Real::exp(-700.0_f64) > 0.0);
    }

    #[test]
    fn exponentials_together_are_those_of_each() {
        fn compare<T: Real>(isa: Isa, numbers: impl Fn(usize) -> f64, bits: impl Fn(T) -> u64) {
            for first in (0..4096).step_by(EXPS) {
                let x: [T; EXPS] = std::array::from_fn(|i| T::of(numbers(first + i)));
                let mut together = x;
                exp_together(isa, &mut together);
                assert_eq!(together.map(&bits), x.map(|x| bits(x.exp())), "{x:?}");
            }
        }
        let numbers = |i| match i {
            0 => f64::NAN,
            1 => f64::NEG_INFINITY,
            2 => f64::INFINITY,
            i => (i as f64 - 2000.0) * 0.06,
        };
        for isa in Isa::available() {
            compare(isa, numbers, |x: f32| x.to_bits().into());
            compare(isa, numbers, f64::to_bits);
        }
    }

    kernel! {
        fn exp_together<'a, T>(x: &'a mut [T; EXPS]) -> () {
            T::exp_stages(x);
        }
    }

    #[test]
    fn ln_agrees_with_the_library() {
        for i in 1..10_000_u32 {
            for x in [f64::from(i) * 1e-4, f64::from(i) * 1e3] {
                assert!((ln(x) - x.ln()).abs() <= 1e-15 * (1.0 + x.ln().abs()), "ln {x}");
            }
        }
        assert_eq!(ln(1.0), 0.0);
        assert!(ln(f64::NAN).is_nan());
    }

    #[test]
    fn reductions_of_any_length() {
        for n in [0, 1, 31, 32, 33, 100] {
            let x: Vec<f64> = (0..n).map(f64::from).collect();
            assert_eq!(sum_map(&x, |x| x), x.iter().sum::<f64>());
            assert_eq!(
                sum_map2(&x, &x, |x, y| x * y),
                x.iter().map(|x| x * x).sum::<f64>()
            );
            if n > 0 {
                assert_eq!(max_of(&x), f64::from(n - 1));
            }
        }
    }
}
