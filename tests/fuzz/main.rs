//! Hostile input for everything that reads what others wrote: other processes, nodes, users, and files.
//!
//! A target takes bytes, and must neither panic, nor take more memory or time than its input explains. Each run first
//! replays the committed inputs of `corpus/<target>` and `failures/<target>`, then changes them and the target's own seeds
//! ([`mutation`]) for `DDP_FUZZ_SECONDS` each. An input that fails is cut down, written to `failures`, and named: committed
//! there, it is a regression test.
//!
//! `DDP_FUZZ_SECONDS=600 cargo test --test fuzz -- --nocapture manifest` runs one target for ten minutes, and
//! `DDP_FUZZ_SEED=<n>` takes other changes than the last run. Each target prints how many inputs it had.

mod memory;
mod mutation;
mod runner;
mod targets;

use runner::Target;

macro_rules! targets {
    ($($name:ident: $($part:ident)::+;)*) => {
        $(
            #[test]
            fn $name() {
                let target = targets::$($part)::+();
                assert_eq!(target.name, stringify!($name), "its inputs lie in folders of its name");
                runner::fuzz(&target);
            }
        )*

        /// All of them, for a test of their names.
        const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

targets! {
    rendezvous_events: rendezvous::events;
    rendezvous_messages: rendezvous::messages;
    ledger: rendezvous::ledger;
    agent_messages: agent::agent_messages;
    control_lines: agent::control_lines;
    worker_lines: agent::worker_lines;
    tcp_store_commands: agent::tcp_store_commands;
    data_plane: worker::data_plane;
    nccl_meeting: worker::nccl_meeting;
    manifest: files::manifest;
    safetensors: files::safetensors;
    safetensors_index: files::safetensors_index;
    pretrained_config: files::pretrained_config;
    token_file: files::token_file;
    configuration: launch::configuration;
    flags: launch::flags;
    batch_system: launch::batch_system;
    shown_words: launch::shown_words;
}

/// A folder of inputs that no target replays would prove nothing.
#[test]
fn every_committed_input_is_of_a_target() {
    for folder in [runner::CORPUS, runner::FAILURES] {
        for entry in std::fs::read_dir(runner::folder(folder)).into_iter().flatten() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(NAMES.contains(&name.as_str()), "`tests/fuzz/{folder}/{name}`");
        }
    }
}

/// What a target must not do is noticed.
#[test]
fn failures_are_noticed() {
    let found = |run: fn(&[u8])| {
        let target = Target {
            run: Box::new(run),
            ..Target::new("none", Vec::new(), |_| {})
        };
        runner::try_input(&target, b"12345678").unwrap_err()
    };
    assert!(found(|_| panic!("at the disco")).contains("panicked: at the disco"));
    let memory = found(|bytes| drop(std::hint::black_box(vec![0_u8; bytes.len() << 20])));
    assert!(memory.contains("8388608 bytes"), "{memory}");
    let time = found(|_| {
        let mut number = 0_u64;
        while std::hint::black_box(number) < 20_000_000_000 && !runner::is_over_time() {
            number += 1;
        }
    });
    assert!(time.contains("of processor time"), "{time}");
}
