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

/// Not a test: the `main` of the launchers that the tests start. Does nothing otherwise.
#[test]
fn role_launcher() {
    harness::run_launcher();
}
