//! Operations: one file each, forward beside backward, every argument with its shape.
//!
//! An operation is data ([`Op`]): the buffers it reads and writes and its sizes. A device runs it, at once (CPU),
//! later (a stream), or elsewhere (a kernel of the same name). Kernels on the CPU follow two rules:
//! - the result does not depend on the number of threads: work is cut by the problem's size alone;
//! - element-wise kernels use the same sequence of operations on every instruction set, so they agree bit by bit.
//!
//! Letters: `B` samples, `T` positions, `C` channels, `H` heads, `V` vocabulary, `R = B·T` rows.

mod adamw;
mod cast;
mod fill;
mod norm;

pub use adamw::{AdamW, AdamWStep};
pub use cast::Cast;
pub use fill::{Fill, Scale};
pub use norm::{CHUNK, ClipScale, SquaredNorm};

use crate::device::{Cpu, DeviceError};

/// Runs one operation on the CPU.
pub trait CpuKernel {
    /// Name in errors and traces: `layernorm_forward`.
    const NAME: &'static str;

    /// Borrows the buffers, checks their sizes, computes.
    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError>;
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
            #[must_use]
            pub const fn name(&self) -> &'static str {
                match self { $(Self::$op(_) => <$op as CpuKernel>::NAME,)* }
            }

            /// Runs it on the CPU, now.
            pub fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
                match self { $(Self::$op(op) => op.run(cpu),)* }
            }
        }

        $(impl From<$op> for Op {
            fn from(op: $op) -> Self {
                Self::$op(op)
            }
        })*
    };
}

operations!(AdamW, Cast, ClipScale, Fill, Scale, SquaredNorm);

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
