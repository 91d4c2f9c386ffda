//! What operations on CPUs are written in.
//!
//! | file | what |
//! |---|---|
//! | `gemm.rs` | which code multiplies matrices |
//! | `kernel.rs` | functions that are compiled for each instruction set; numbers that they compute in |
//! | `matrix.rs` | views of matrices inside slices, and their product |
//! | `processor.rs` | the threads of a rank, and the instruction set of the machine |
//! | `row_product.rs` | one row times a matrix |
//! | `stored.rs` | numbers as they are stored: bf16 is widened for the work |

mod gemm;
pub(crate) mod kernel;
pub(super) mod matrix;
pub(super) mod processor;
pub(super) mod row_product;
pub(super) mod stored;
