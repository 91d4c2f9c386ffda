//! The agent against a small daemon, with real processes as workers.
//!
//! | file | what it shows |
//! |---|---|
//! | `ends` | exit codes, signals, restarts, programs that cannot be started |
//! | `stopping` | grace, SIGKILL, signals in every state |
//! | `reported_ends` | what is reported of all workers when they are gone, and what the verdict brings |
//! | `leftovers` | grandchildren, orphans, a launcher that is killed |
//! | `surroundings` | environment, console, log files |
//! | `listening` | who is given time to end by himself, and how much |
//! | `strangers` | who answers at the endpoint and is no daemon, or is one no more |
//! | `hangs` | who is watched for hanging |
//! | `talk` | the control socket, the daemon's stream |
//! | `key_value` | the store, as workers ask for it |

mod daemon;
mod ends;
mod hangs;
mod harness;
mod key_value;
mod leftovers;
mod listening;
mod reported_ends;
mod stopping;
mod strangers;
mod surroundings;
mod talk;

/// The parts that workers of the tests play.
const ROLES: &[(&str, fn())] = &[
    ("hangs_up_or_hangs", hangs::hangs_up_or_hangs),
    ("key_value", key_value::key_value),
    ("reads_patiently", key_value::reads_patiently),
    ("stops_at_boundary", listening::stops_at_boundary),
    ("rank_0_stops_at_boundary", listening::rank_0_stops_at_boundary),
    ("connects_late", listening::connects_late),
    ("only_sends", listening::only_sends),
    ("sibling_dies", talk::sibling_dies),
    ("writes", talk::writes),
    ("loses_a_peer", talk::loses_a_peer),
    ("waits", talk::waits),
    ("claims_to_be_another", talk::claims_to_be_another),
    ("reports_progress", talk::reports_progress),
    ("never_reads", talk::never_reads),
    ("changes_sizes", talk::changes_sizes),
    ("repeats_sizes", talk::repeats_sizes),
    ("ends_in_a_phase", talk::ends_in_a_phase),
    ("hangs", talk::hangs),
    ("waits_for_a_peer", talk::waits_for_a_peer),
];

/// Not a test: the `main` of the launchers and workers that tests start. It does nothing without their variables.
#[test]
#[ignore = "a process that other tests start"]
fn child() {
    match std::env::var(harness::ROLE) {
        Ok(role) => ROLES.iter().find(|(name, _)| *name == role).unwrap().1(),
        Err(_) => harness::run_launcher(),
    }
}
