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

/// Calls a generic function with the floating-point type that a buffer holds.
macro_rules! by_dtype {
    ($op:expr, $dtype:expr, $real:ident => $call:expr) => {
        match $dtype {
            $crate::device::DType::F32 => {
                type $real = f32;
                $call
            }
            $crate::device::DType::F64 => {
                type $real = f64;
                $call
            }
            other => Err($crate::device::DeviceError::Shape {
                op: $op,
                what: format!("computes in f32 or f64, not in {other}"),
            }),
        }
    };
}
pub(crate) use by_dtype;

use super::real::Real;

/// Doubles in a cache line.
const LINE: usize = 8;

/// Lends `len` elements that start at a cache line. Their contents are whatever was there before. A thread keeps
/// its scratch memory, so that after the first step nothing is allocated.
pub(crate) fn with_scratch<T: Real, R>(len: usize, work: impl FnOnce(&mut [T]) -> R) -> R {
    thread_local! {
        static SCRATCH: RefCell<Vec<f64>> = const { RefCell::new(Vec::new()) };
    }
    // Taken out for the time of the work, so that a nested call is served too.
    let mut memory = SCRATCH.take();
    let doubles = (len * size_of::<T>()).div_ceil(size_of::<f64>());
    if memory.len() < doubles + LINE {
        memory.resize(doubles + LINE, 0.0);
    }
    let start = memory.as_ptr().align_offset(LINE * size_of::<f64>()).min(LINE);
    let result = work(&mut bytemuck::cast_slice_mut(&mut memory[start..start + doubles])[..len]);
    SCRATCH.set(memory);
    result
}
