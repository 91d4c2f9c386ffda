//! Starts workers, with the environment that they expect, and finds the port that they meet at.

pub(crate) mod environment;
pub(crate) mod master_port;
pub(crate) mod process;
pub(crate) mod program;
pub(crate) mod spawner;
