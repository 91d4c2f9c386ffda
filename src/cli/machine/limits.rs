//! What the system must let this process have, looked at before anything is started: a stack, and open files.

use ddp_launcher::LaunchPlan;
use ddp_proto::words::counted;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::cli::error::CliError;

/// Smallest stack of the first thread, its arguments and environment included, of which they may be a quarter. As a
/// release build, a launch of a program was seen to need 88 KiB, and of a configuration 112 KiB.
const STACK_BYTES: u64 = if cfg!(debug_assertions) {
    1 << 20
} else {
    256 << 10
};

/// Files that a launcher has open whatever it starts: 24 were seen, the rendezvous and its own connection included.
const OWN_FILES: u64 = 32;
/// Pipes of a worker's output, both ends of each while all are started.
const WORKER_FILES: u64 = 4;
/// Its log files.
const WORKER_LOG_FILES: u64 = 2;
/// Connections of a node to the rendezvous in this process, the one that it comes back with included.
const NODE_FILES: u64 = 2;
/// Connections of a rank to the store in this process: one, and one for each process group.
const RANK_FILES: u64 = 4;

/// More than any native worker or rendezvous has open; some systems have no limit to speak of.
const ENOUGH_FILES: u64 = 1 << 20;

/// Refuses a stack on which a launch would end in the middle. To be called first of all.
pub fn check_stack() -> Result<(), CliError> {
    match soft_and_hard(Resource::RLIMIT_STACK) {
        (found, _) if found < STACK_BYTES => Err(CliError::SmallStack {
            found: found >> 10,
            needed: STACK_BYTES >> 10,
        }),
        _ => Ok(()),
    }
}

/// Refuses a limit of open files with which not even one worker could be started.
pub fn check_open_files() -> Result<(), CliError> {
    let (soft, hard) = soft_and_hard(Resource::RLIMIT_NOFILE);
    let needed = OWN_FILES + WORKER_FILES + WORKER_LOG_FILES;
    soft_for(needed, needed, soft, hard).map_or_else(|hard| Err(too_few(hard, needed, 1)), |_| Ok(()))
}

/// Raises the soft limit of open files to what `plan` needs. Gives the old limit, which the workers keep: programs with
/// `select` cannot use a file above 1024, and some close every file up to the limit.
pub fn raise_open_files(plan: &LaunchPlan) -> Result<Option<u64>, CliError> {
    let (soft, hard) = soft_and_hard(Resource::RLIMIT_NOFILE);
    let each = match plan.log_dir {
        Some(_) => WORKER_FILES + WORKER_LOG_FILES,
        None => WORKER_FILES,
    };
    let needed = OWN_FILES + u64::from(plan.workers) * each;
    // It is not known yet which node hosts the rendezvous, and how many nodes come.
    let nodes = if plan.nodes.max > 1 {
        u64::from(plan.nodes.max)
    } else {
        0
    };
    let ranks = u64::from(plan.workers) * nodes.max(1);
    let all = needed + nodes * NODE_FILES + ranks * RANK_FILES;
    // The rendezvous takes no more than half of them, the store of ranks a quarter.
    let wanted = all.max(2 * nodes * NODE_FILES).max(4 * ranks * RANK_FILES);
    let raised = soft_for(needed, wanted, soft, hard).map_err(|hard| too_few(hard, needed, plan.workers))?;
    let set = |raised| setrlimit(Resource::RLIMIT_NOFILE, raised, hard);
    Ok(raise(soft, needed, raised, set)?.then_some(soft))
}

/// Sets a higher soft limit than `soft`, and says whether it did. A system that refuses, as sandboxes do, is in the way
/// only where more files are `needed`: that the rest of the nodes finds no room is an error of its own, if they come.
fn raise(
    soft: u64,
    needed: u64,
    raised: u64,
    set: impl FnOnce(u64) -> nix::Result<()>,
) -> Result<bool, CliError> {
    if raised == soft {
        return Ok(false);
    }
    match set(raised) {
        Ok(()) => Ok(true),
        Err(_) if soft >= needed => Ok(false),
        Err(errno) => Err(CliError::machine("cannot raise the limit of open files")(errno)),
    }
}

/// Lets this process open as many files as the system allows: a native worker, which has one open for each neighbour's
/// part of each shared arena, or a rendezvous, which has one open for each node. They use no `select`, and start no
/// program. Where that is refused, the limit stays as it is.
pub fn raise_open_files_fully() {
    let (soft, hard) = soft_and_hard(Resource::RLIMIT_NOFILE);
    let raised = soft.max(hard.min(ENOUGH_FILES));
    if raised > soft {
        // What then cannot be opened is an error of its own.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, raised, hard);
    }
}

/// The soft limit for what is `needed` and, as far as that goes, for what is `wanted`; the hard one if that is too low.
fn soft_for(needed: u64, wanted: u64, soft: u64, hard: u64) -> Result<u64, u64> {
    if hard < needed {
        return Err(hard);
    }
    Ok(soft.max(wanted.min(hard)))
}

fn too_few(hard: u64, needed: u64, workers: u32) -> CliError {
    CliError::TooFewFiles {
        hard,
        needed,
        workers: counted(workers, "worker"),
    }
}

/// A limit that cannot be read is none.
fn soft_and_hard(resource: Resource) -> (u64, u64) {
    getrlimit(resource).unwrap_or((u64::MAX, u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_soft_limit_is_raised_to_what_is_needed_and_never_lowered() {
        for (needed, wanted, (soft, hard), expected) in [
            (100, 100, (1024, 4096), Ok(1024)),
            (2000, 2000, (1024, 4096), Ok(2000)),
            (2000, 9000, (1024, 4096), Ok(4096)),
            (5000, 5000, (1024, 4096), Err(4096)),
            (5000, 5000, (1024, u64::MAX), Ok(5000)),
        ] {
            assert_eq!(
                soft_for(needed, wanted, soft, hard),
                expected,
                "{needed} of {soft} and {hard}"
            );
        }
    }

    #[test]
    fn a_refusal_matters_only_where_more_files_are_needed() {
        let refuse = |_| Err(nix::errno::Errno::EPERM);
        assert!(!raise(60, 40, 240, refuse).unwrap(), "only wanted");
        let words = raise(30, 40, 240, refuse).unwrap_err().to_string();
        assert!(words.contains("limit of open files"), "{words}");
        assert!(raise(30, 40, 240, |_| Ok(())).unwrap());
        assert!(!raise(60, 40, 60, |_| panic!("nothing to raise")).unwrap());
    }

    #[test]
    fn lacks_in_words() {
        insta::assert_snapshot!(too_few(64, 1832, 300), @r"
        at most 64 files may be open (`ulimit -Hn`), and a launch of 300 workers on this node needs 1832
          hint: raise the limit (`ulimit -Hn 1832` as root, `LimitNOFILE=` in a service, `--ulimit nofile=` for a container), or start fewer workers
        ");
        let stack = CliError::SmallStack {
            found: 64,
            needed: 256,
        };
        insta::assert_snapshot!(stack, @r"
        the stack is limited to 64 KiB (`ulimit -s`), and ddp-run needs 256
          hint: raise the limit: `ulimit -s 8192`
        ");
        assert_eq!((stack.exit_code(), too_few(1, 2, 1).exit_code()), (70, 70));
    }
}
