//! Which code multiplies matrices: `gemm`'s, for the instruction set of this process.
//!
//! `gemm` chooses for itself the best set that the machine has. For a lower one its generic part is compiled here, with
//! its micro-kernels of that set.
#![allow(unsafe_code, reason = "calls of `gemm`, passed on")]

use super::processor::Isa;
use gemm_common::Parallelism;
use gemm_common::gemm::gemm_basic_generic;
use gemm_common::simd::MixedSimd;

/// `out = alpha · out + beta · lhs · rhs`, of column-major matrices by preference: sizes m, n, k; `out` with its strides
/// between columns and rows, and whether it is read; `lhs`; `rhs`; alpha and beta; whether to conjugate each.
pub(crate) type Gemm<T> = unsafe fn(
    usize,
    usize,
    usize,
    *mut T,
    isize,
    isize,
    bool,
    *const T,
    isize,
    isize,
    *const T,
    isize,
    isize,
    T,
    T,
    bool,
    bool,
    bool,
    Parallelism,
);

/// A [`Gemm`] of one instruction set. `$n` is the number of elements in a register.
macro_rules! of_set {
    ($name:ident, $t:ident, $($kernels:ident)::+, $simd:ty, $n:expr) => {
        unsafe fn $name(
            m: usize,
            n: usize,
            k: usize,
            out: *mut $t,
            out_cs: isize,
            out_rs: isize,
            read_out: bool,
            lhs: *const $t,
            lhs_cs: isize,
            lhs_rs: isize,
            rhs: *const $t,
            rhs_cs: isize,
            rhs_rs: isize,
            alpha: $t,
            beta: $t,
            conj_out: bool,
            conj_lhs: bool,
            conj_rhs: bool,
            parallelism: Parallelism,
        ) {
            use $($kernels)::+ as kernels;
            const N: usize = $n;
            let simd = <$simd as MixedSimd<$t, $t, $t, $t>>::try_new().expect("chosen only where the machine has it");
            // SAFETY: the caller's promises are those that this function asks for, and the processor has what the
            // micro-kernels need, or there would be no `simd`.
            unsafe {
                gemm_basic_generic::<
                    _,
                    $t,
                    N,
                    { kernels::MR_DIV_N * N },
                    { kernels::NR },
                    { kernels::MR_DIV_N },
                    { kernels::H_M },
                    { kernels::H_N },
                >(
                    simd,
                    m,
                    n,
                    k,
                    out,
                    out_cs,
                    out_rs,
                    read_out,
                    lhs,
                    lhs_cs,
                    lhs_rs,
                    rhs,
                    rhs_cs,
                    rhs_rs,
                    alpha,
                    beta,
                    conj_out,
                    conj_lhs,
                    conj_rhs,
                    |a, b, c| a * b + c,
                    &kernels::UKR,
                    &kernels::H_UKR,
                    false,
                    parallelism,
                );
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
of_set!(
    avx2_f32,
    f32,
    gemm_f32::microkernel::fma::f32,
    gemm_common::simd::V3,
    8
);
#[cfg(target_arch = "x86_64")]
of_set!(
    avx2_f64,
    f64,
    gemm_f64::microkernel::fma::f64,
    gemm_common::simd::V3,
    4
);
of_set!(
    baseline_f32,
    f32,
    gemm_f32::microkernel::scalar::f32,
    gemm_common::simd::Scalar,
    1
);
of_set!(
    baseline_f64,
    f64,
    gemm_f64::microkernel::scalar::f64,
    gemm_common::simd::Scalar,
    1
);

/// The product of f32 matrices; `limit` is the set to use in place of the best.
pub(super) fn gemm_f32(limit: Option<Isa>) -> Gemm<f32> {
    match limit {
        Some(isa) if isa.is_baseline() => baseline_f32,
        #[cfg(target_arch = "x86_64")]
        Some(isa) if isa.is_avx2() => avx2_f32,
        _ => gemm_f32::gemm::f32::get_gemm_fn(),
    }
}

/// The product of f64 matrices.
pub(super) fn gemm_f64(limit: Option<Isa>) -> Gemm<f64> {
    match limit {
        Some(isa) if isa.is_baseline() => baseline_f64,
        #[cfg(target_arch = "x86_64")]
        Some(isa) if isa.is_avx2() => avx2_f64,
        _ => gemm_f64::gemm::f64::get_gemm_fn(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::cpu::kernel::Real;

    /// Small whole numbers, of which all sums are exact: every set must compute them to the last bit.
    fn check<T: Real>(gemm: Gemm<T>, [m, n, k]: [usize; 3], what: &str) {
        let number = |i: usize| T::of(((i * 7) % 11) as f64 - 5.0);
        let lhs: Vec<T> = (0..m * k).map(number).collect();
        let rhs: Vec<T> = (0..k * n).map(|i| number(i + 3)).collect();
        let mut out = vec![T::ONE; m * n];
        // Columns of `out` and `lhs` without gaps, rows of `rhs`.
        let (out_cs, out_rs) = (m as isize, 1);
        let (lhs_cs, lhs_rs, rhs_cs, rhs_rs) = (m as isize, 1, 1, n as isize);
        // SAFETY: three matrices without gaps, of the sizes that are given.
        unsafe {
            gemm(
                m,
                n,
                k,
                out.as_mut_ptr(),
                out_cs,
                out_rs,
                true,
                lhs.as_ptr(),
                lhs_cs,
                lhs_rs,
                rhs.as_ptr(),
                rhs_cs,
                rhs_rs,
                T::ONE,
                T::of(2.0),
                false,
                false,
                false,
                Parallelism::None,
            );
        }
        for (i, found) in out.iter().enumerate() {
            let (row, col) = (i % m, i / m);
            let terms = (0..k).map(|j| lhs[row + j * m].to_f64() * rhs[j * n + col].to_f64());
            let expected = 1.0 + 2.0 * terms.sum::<f64>();
            assert_eq!(
                found.to_f64(),
                expected,
                "{what}: [{row}, {col}] of {m} × {n} × {k}"
            );
        }
    }

    #[test]
    fn every_instruction_set_multiplies() {
        let limits = Isa::available().into_iter().map(Some);
        for limit in limits.chain([None]) {
            let what = limit.map_or("the best".to_owned(), |isa| isa.to_string());
            for sizes in [
                [1, 1, 1],
                [3, 5, 7],
                [16, 16, 40],
                [67, 45, 130],
                [65, 1, 300],
                [130, 70, 33],
            ] {
                check(gemm_f32(limit), sizes, &what);
                check(gemm_f64(limit), sizes, &what);
            }
        }
    }

    #[test]
    fn each_instruction_set_has_code_of_its_own() {
        let sets = Isa::available();
        let wide = |isa: Isa| gemm_f32(Some(isa)) as usize;
        let narrow = |isa: Isa| gemm_f64(Some(isa)) as usize;
        for (i, &a) in sets.iter().enumerate() {
            for &b in &sets[..i] {
                assert!(wide(a) != wide(b) && narrow(a) != narrow(b), "{a} and {b}");
            }
        }
    }
}
