//! Black-box tests: the built binaries, started as users start them.
//!
//! Each test is a script on [`harness`]; it waits for events with deadlines, binds free ports only, and
//! leaves nothing behind.

mod bad_config;
mod bad_input;
mod chaos;
mod ckpt;
mod conformance;
mod daemon;
mod deploy;
mod doctor;
mod elastic;
mod emulated_gpu;
mod exit_codes;
mod fences;
mod flags;
mod hangs;
mod harness;
mod inference;
mod initial_weights;
mod intruders;
mod key_value;
mod kill9;
mod kubeflow;
mod launcher_killed;
mod limits;
mod live;
mod main_job;
mod memory;
mod numa;
mod operators;
mod out_dir;
mod out_of_memory;
mod outage;
mod output;
mod parallel_examples;
mod parking;
mod pid_one;
mod pipelines;
mod planner;
mod python_contract;
mod reporting;
mod rlimits;
mod scale;
mod signals;
mod terminal;
mod three_d;
mod timeline;
mod tokens;
mod two_launchers;
mod worker_ports;
mod wrong_clock;

/// What workers run that are this test program.
const ROLES: &[(&str, fn())] = &[
    ("advances", operators::advances),
    ("keeps_the_contract", key_value::keeps_the_contract),
    ("meets_an_outage", key_value::meets_an_outage),
    ("writes_the_meeting", fences::writes_the_meeting),
];

/// Not a test: the `main` of workers that tests start. It does nothing without their variable.
#[test]
#[ignore = "a process that other tests start"]
fn child() {
    if let Ok(role) = std::env::var(harness::ROLE) {
        let (_, run) = ROLES.iter().find(|(name, _)| *name == role).expect("a role");
        run();
    }
}
