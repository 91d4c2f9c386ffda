//! Secrets that processes have in common, and what is derived from them.
//!
//! | module | what it is | who has it |
//! |---|---|---|
//! | [`token`] | the secret of a job | its launchers and their daemon |
//! | [`tls`] | mutual TLS, by the keys that follow from a token | daemon ⇄ agent |
//! | [`data_key`] | the secret of a generation's data connections | daemon → agent → worker |

pub mod data_key;
mod raw_key;
pub mod tls;
pub mod token;
