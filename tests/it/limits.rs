//! A user who may have no more processes and threads (`ulimit -u`): a launch ends with an error, never not at all.

use std::os::unix::fs::MetadataExt;

use crate::harness::{Finished, Program, ReservedPort, Running, eventually, temp_dir};

/// A limit with which all of a launch of two workers succeeds.
const ENOUGH: u32 = 12;

const LAUNCHER: &str = env!("CARGO_BIN_EXE_ddp-run");

/// A user without other processes: the system counts all processes and threads of a user together, and none of root's.
#[derive(Clone, Copy)]
struct User(u32);

impl User {
    /// The `nth` of this test binary; none where one cannot become another user.
    fn other(nth: u32) -> Option<Self> {
        let user = Self(61_000 + 8 * (std::process::id() % 500) + nth);
        let tried = std::process::Command::new("sh")
            .args(["-c", &user.script(ENOUGH, LAUNCHER, "--version")])
            .current_dir("/")
            .output()
            .expect("a shell");
        if !tried.status.success() {
            let why = String::from_utf8_lossy(&tried.stderr);
            eprintln!("SKIPPED: no program can be run as another user with a limit: {why}");
        }
        tried.status.success().then_some(user)
    }

    /// Shell code that runs a program as this user, who may have `limit` processes and threads and may not be able to
    /// reach the program by its path.
    fn script(self, limit: u32, program: &str, arguments: &str) -> String {
        let Self(id) = self;
        format!(
            "exec 9<'{program}'; exec prlimit --nproc={limit} setpriv --reuid={id} --regid={id} --clear-groups \
             /proc/self/fd/9 {arguments}"
        )
    }

    fn start(self, limit: u32, arguments: &str) -> Running {
        self.start_program(limit, LAUNCHER, arguments)
    }

    fn start_program(self, limit: u32, program: &str, arguments: &str) -> Running {
        let words = ["-c", &self.script(limit, program, arguments)];
        // Without a log directory it writes nothing but error files, and those only if a worker does.
        Program::new("sh")
            .args(words)
            .dir("/")
            .env("TMPDIR", "/tmp")
            // It cannot read the file of this test's user.
            .env("DDP_TOKEN", "0123456789abcdef0123456789abcdef")
            .start()
    }

    fn processes(self) -> Vec<i32> {
        let is_ours = |pid: &i32| {
            let owner = std::fs::metadata(format!("/proc/{pid}"));
            owner.is_ok_and(|owner| owner.uid() == self.0)
        };
        crate::harness::processes().into_iter().filter(is_ours).collect()
    }

    /// Waits for the end of the launch, and for that of everything it started.
    #[track_caller]
    fn finish(self, running: Running) -> Finished {
        let finished = running.finish();
        eventually("the last process to go", || {
            self.processes().is_empty().then_some(())
        });
        finished
    }
}

#[test]
fn a_launch_without_threads_or_processes_to_be_had_says_so() {
    let Some(user) = User::other(0) else {
        return;
    };
    let dir = temp_dir();
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).expect("ours");
    let arguments = format!(
        "--nproc-per-node 2 --event-log-handler '{}/events' true",
        dir.path().display()
    );
    let mut said = Vec::new();
    // One process is the launcher itself, the next its guardian: from there on, each limit fails one part later.
    for limit in 2..ENOUGH {
        let finished = user.finish(user.start(limit, &arguments));
        if finished.code() == Some(0) {
            continue;
        }
        finished
            .expect_exit(70)
            .expect_stderr("Resource temporarily unavailable")
            .expect_stderr("hint: ")
            .expect_stderr("`ulimit -u`");
        said.push(finished.stderr());
    }
    let with = |words: &str| said.iter().filter(|text| text.contains(words)).count();
    assert!(
        with("[ddp-run] error: cannot start a thread: ") >= 4,
        "{}",
        said.join("\n")
    );
    assert!(with("cannot be started: ") > 0, "{}", said.join("\n"));
    user.finish(user.start(ENOUGH, &arguments)).expect_exit(0);
}

#[test]
fn a_host_name_that_no_thread_can_look_up_is_an_error() {
    let Some(user) = User::other(2) else {
        return;
    };
    let port = ReservedPort::new();
    let (_, number) = port.endpoint.rsplit_once(':').expect("a port");
    let arguments = |rest: &str| format!("--rdzv-endpoint localhost:{number} {rest} true");
    let mut said = Vec::new();
    for rest in ["", "--rdzv-conf is_host=0,join_timeout=1,connect_timeout=1"] {
        // Where no daemon is, a launch with all its threads cannot end well.
        for limit in 2..=ENOUGH {
            let finished = user.finish(user.start(limit, &arguments(rest)));
            match finished.code() {
                Some(0) if rest.is_empty() => continue,
                Some(69) if !rest.is_empty() => continue,
                _ => finished
                    .expect_exit(70)
                    .expect_stderr("Resource temporarily unavailable")
                    .expect_stderr("`ulimit -u`"),
            };
            said.push(finished.stderr());
        }
    }
    let no_lookup_thread = "cannot start a thread to look up the host name `localhost`: ";
    let with = said.iter().filter(|text| text.contains(no_lookup_thread)).count();
    assert!(with >= 2, "{}", said.join("\n"));
    let daemon = env!("CARGO_BIN_EXE_ddp-rendezvous");
    let serve = user.start_program(1, daemon, "serve --listen localhost:0");
    user.finish(serve).expect_exit(70).expect_stderr(no_lookup_thread);
}

#[test]
fn a_rank_that_fails_when_no_thread_is_to_be_had_is_swept_after() {
    let Some(user) = User::other(1) else {
        return;
    };
    // As if a neighbour had taken what was left. The child has to be found by the sweep.
    let worker = r"sh -c 'sleep 1000 & prlimit --pid $PPID --nproc=1 && echo nothing left; exit 3'";
    let mut running = user.start(ENOUGH, worker);
    running.wait_for("nothing left");
    user.finish(running)
        .expect_exit(3)
        .expect_stderr("first failure: rank 0");
}
