//! All that two processes of `ddp-run` must agree on.
//!
//! | module | what it fixes | spoken between |
//! |---|---|---|
//! | [`ids`] | newtypes for nodes, ranks, world sizes, generations | everyone |
//! | [`rendezvous`] | the gRPC service, generated from `proto/rendezvous.proto` | daemon ⇄ agent |
//! | [`cgroup`] | finds the control groups of a process, for launcher and worker | – |
//! | [`client`] | the typed client of that service, with deadlines and jittered back-off | agent → daemon |
//! | [`mod@look_up`] | host names to addresses, for the client and for `--listen` | – |
//! | [`mod@env`] | the environment of a worker, written and parsed in one place | agent → worker |
//! | [`codec`] | encodes the messages of that service with small buffers | – |
//! | [`control`] | the messages of the control socket | agent ⇄ worker |
//! | [`trust`] | the token of a job, TLS from it, the key of data connections | everyone with it |
//! | [`utc`] | points in time as text, for file names and messages | – |
//! | [`words`] | numbers, sizes and lists in sentences | – |
//! | [`printable`] | replaces control characters before a peer's text reaches a terminal or a log | – |
//! | [`paths`] | the folder of a file | – |
//! | [`ports`] | ranges of TCP ports | agent → worker |
//! | [`exit`] | exit codes of the launcher | launcher → its caller |
//!
//! This package knows nothing of processes, tensors or training.
#![forbid(unsafe_code)]

pub mod cgroup;
pub mod client;
pub mod codec;
pub mod control;
pub mod env;
pub mod exit;
pub mod ids;
pub mod look_up;
pub mod ports;
pub mod printable;
pub mod trust;
pub mod utc;
pub mod words;

/// Messages, client and server of the rendezvous service. `proto/generate` writes them from `proto/rendezvous.proto`; they
/// are committed, so that a build needs no protobuf compiler.
#[allow(missing_docs, clippy::pedantic, unreachable_pub)]
pub mod rendezvous {
    include!("../proto/generated.rs");

    /// Workers that failed, and workers that were stopped, in one `NodeStopped`.
    pub const MAX_EXITS_OF_A_KIND: usize = 32;

    /// The key in `Join.agreed` of a program's arguments. They may differ between the nodes of one job.
    pub const ARGUMENTS: &str = "arguments";

    /// The hash of a value in `Join.agreed`. Equal values of two keys have different hashes.
    pub fn agreed_hash(key: &str, value: &str) -> u64 {
        let mut hasher = blake3::Hasher::new_derive_key("ddp-run value that all nodes agree on");
        hasher.update(&(key.len() as u64).to_le_bytes());
        hasher.update(key.as_bytes()).update(value.as_bytes());
        let mut short = [0; 8];
        hasher.finalize_xof().fill(&mut short);
        u64::from_le_bytes(short)
    }

    /// Leaves the data key out.
    impl std::fmt::Debug for Assignment {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("Assignment")
                .field("assignment_id", &self.assignment_id)
                .field("node_rank", &self.node_rank)
                .field("own", &self.own)
                .field("node_count", &self.node_count)
                .field("world_size", &self.world_size)
                .field("restart_count", &self.restart_count)
                .field("reason", &self.reason)
                .finish_non_exhaustive()
        }
    }
}

/// Paths of files and folders.
pub mod paths {
    use std::path::Path;

    /// The folder, or `.` for the empty path, which is what [`Path::parent`] gives for a bare name.
    pub fn or_here(folder: &Path) -> &Path {
        if folder.as_os_str().is_empty() {
            Path::new(".")
        } else {
            folder
        }
    }

    /// The folder that holds the file.
    pub fn folder_of(file: &Path) -> &Path {
        or_here(file.parent().unwrap_or(file))
    }
}

#[cfg(test)]
mod tests {
    use super::rendezvous::agreed_hash;

    #[test]
    fn a_key_and_its_value_make_the_hash() {
        let hashes =
            [("a", "b"), ("ab", ""), ("a", "c"), ("b", "b")].map(|(key, value)| agreed_hash(key, value));
        assert!(
            hashes
                .iter()
                .enumerate()
                .all(|(i, hash)| !hashes[..i].contains(hash))
        );
        assert_eq!(hashes[0], agreed_hash("a", "b"));
    }

    #[test]
    fn the_generated_code_is_of_the_committed_protocol() {
        let source = blake3::hash(include_bytes!("../proto/rendezvous.proto"));
        assert!(
            include_str!("../proto/generated.rs").contains(source.to_hex().as_str()),
            "run `cargo run --manifest-path proto/generate/Cargo.toml`, and commit what it writes"
        );
    }
}
