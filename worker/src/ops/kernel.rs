//! What kernels are made of: functions compiled for every instruction set, choice of type, scratch memory.

use std::cell::RefCell;

/// Defines a function that is compiled for each instruction set and takes the one to use as first argument.
///
/// Everything that the body calls must be `#[inline(always)]`, or it is compiled for the baseline only.
macro_rules! kernel {
    ($(#[$attribute:meta])* $vis:vis fn $name:ident<$life:lifetime, $real:ident>(
        $($arg:ident: $type:ty),* $(,)?
    ) -> $out:ty $body:block) => {
        $(#[$attribute])*
        $vis fn $name<$life, $real: $crate::ops::real::Real>(
            isa: $crate::device::Isa,
            $($arg: $type),*
        ) -> $out {
            struct Call<$life, $real> {
                $($arg: $type,)*
                _life: std::marker::PhantomData<&$life $real>,
            }

            impl<$life, $real: $crate::ops::real::Real> pulp::WithSimd for Call<$life, $real> {
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
            $crate::device::DType::F32 => {
                type $stored = f32;
                $call
            }
            $crate::device::DType::F64 => {
                type $stored = f64;
                $call
            }
            $crate::device::DType::Bf16 => {
                type $stored = half::bf16;
                $call
            }
            other => Err($crate::device::DeviceError::Shape {
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
            ($crate::device::DType::Bf16, $crate::device::DType::F32) => {
                type $stored = half::bf16;
                type $grad = f32;
                $call
            }
            // Where they should be the same and are not, the gradient is refused when it is borrowed.
            (dtype, _) => $crate::ops::kernel::by_dtype!($op, dtype, $stored => {
                type $grad = $stored;
                $call
            }),
        }
    };
}
pub(crate) use by_dtypes;

use super::real::Real;

/// Doubles in a cache line.
const LINE: usize = 8;

/// Lends `len` elements that start at a cache line. Their contents are whatever was there before. A thread keeps
/// its scratch memory, so that after the first step nothing is allocated.
pub(crate) fn with_scratch<T: Real, R>(len: usize, work: impl FnOnce(&mut [T]) -> R) -> R {
    thread_local! {
        // The last one given back is the next one taken: every depth of nesting finds its own again.
        static SCRATCH: RefCell<Vec<Vec<f64>>> = const { RefCell::new(Vec::new()) };
    }
    let mut memory = SCRATCH.with_borrow_mut(Vec::pop).unwrap_or_default();
    let doubles = (len * size_of::<T>()).div_ceil(size_of::<f64>());
    if memory.len() < doubles + LINE {
        memory.resize(doubles + LINE, 0.0);
    }
    let start = memory.as_ptr().align_offset(LINE * size_of::<f64>()).min(LINE);
    let result = work(&mut bytemuck::cast_slice_mut(&mut memory[start..start + doubles])[..len]);
    SCRATCH.with_borrow_mut(|free| free.push(memory));
    result
}
