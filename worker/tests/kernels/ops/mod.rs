//! Operations and models on the CPU: gradients against finite differences, results against plain references,
//! bits against other thread counts and instruction sets.

mod attention;
mod bf16;
mod bits;
mod decoding;
mod elementwise;
mod experts;
mod gradients;
mod model;
mod model_gradients;
mod optimizers;
mod parts;
mod published;
mod rig;
