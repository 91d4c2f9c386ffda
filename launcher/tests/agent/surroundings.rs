//! What workers see, and what becomes of what they write.

use std::collections::BTreeMap;

use nix::sys::signal::Signal;

use crate::daemon::{Daemon, Policy};
use crate::harness::launch;

#[test]
fn workers_see_the_environment_contract() {
    let daemon = Daemon::with(Policy {
        workers_of_node_0: 3,
        ..Policy::default()
    });
    let logs = tempfile::tempdir().unwrap();
    let launch = launch(&daemon)
        .workers(2)
        .max_restarts(4)
        .log_dir(logs.path())
        .agent_store()
        .env("MINE", "1")
        .program("env", &[]);
    let end = launch
        .start_with(|command| command.env("OMP_NUM_THREADS", "7"))
        .wait();
    end.expect_code(0);
    let text = std::fs::read_to_string(logs.path().join("attempt_0/4/stdout.log")).unwrap();
    let env: BTreeMap<&str, &str> = text.lines().filter_map(|line| line.split_once('=')).collect();
    let error_file = logs.path().join("attempt_0/4/error.json").display().to_string();
    let expected = [
        ("RANK", "4"),
        ("LOCAL_RANK", "1"),
        ("GROUP_RANK", "1"),
        ("ROLE_RANK", "4"),
        ("ROLE_NAME", "default"),
        ("WORLD_SIZE", "5"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("GROUP_WORLD_SIZE", "2"),
        ("ROLE_WORLD_SIZE", "5"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("TORCHELASTIC_RESTART_COUNT", "0"),
        ("TORCHELASTIC_MAX_RESTARTS", "4"),
        ("TORCHELASTIC_RUN_ID", "test-job"),
        ("TORCHELASTIC_ERROR_FILE", &error_file),
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("TORCH_FR_BUFFER_SIZE", "2000"),
        ("OMP_NUM_THREADS", "7"),
        ("DDP_GENERATION", "1"),
        ("MINE", "1"),
    ];
    for (name, value) in expected {
        assert_eq!(env.get(name), Some(&value), "{name}");
    }
    assert!(env["DDP_CONTROL"].starts_with('@'));
    assert!(env["MASTER_PORT"].parse::<u16>().unwrap() > 1024);
}

#[test]
fn lines_are_prefixed_and_whole() {
    let daemon = Daemon::start();
    let script = r"printf 'one\ntwo'; printf ' more\n\n'; printf '50%%\r100%%\r\nlast' ; printf '\377\n' >&2";
    let end = launch(&daemon).sh(script).run();
    assert!(
        end.stdout
            .ends_with("[0] one\n[0] two more\n[0]\n[0] 50%\r[0] 100%\r\n[0] last\n"),
        "{:?}",
        end.stdout
    );
    assert!(
        end.stderr.lines().any(|line| line == "[0] \u{fffd}"),
        "{}",
        end.stderr
    );
}

#[test]
fn lines_of_a_megabyte_stay_whole_beside_those_of_other_ranks() {
    let daemon = Daemon::start();
    let script =
        r#"for line in 1 2 3 4; do head -c 1000000 /dev/zero | tr '\000' "$RANK"; echo; echo short; done"#;
    let end = launch(&daemon).workers(2).sh(script).run();
    let mut lines: Vec<&str> = end.stdout.lines().filter(|line| line.starts_with('[')).collect();
    lines.sort_unstable();
    let expected = ["0", "1"].map(|rank| {
        let of = |text: &str| vec![format!("[{rank}] {text}"); 4];
        [of(&rank.repeat(1_000_000)), of("short")].concat()
    });
    assert!(lines == expected.concat(), "{} lines", lines.len());
}

#[test]
fn log_files_hold_every_byte() {
    let daemon = Daemon::start();
    let logs = tempfile::tempdir().unwrap();
    let script = "seq 1 20000; seq 1 100 >&2; printf end";
    let end = launch(&daemon).log_dir(logs.path()).sh(script).run();
    let numbers: String = (1..=20_000).fold(String::new(), |text, number| text + &number.to_string() + "\n");
    let log = |name: &str| std::fs::read_to_string(logs.path().join("attempt_0/0").join(name)).unwrap();
    assert_eq!(log("stdout.log"), numbers + "end");
    assert_eq!(log("stderr.log").lines().count(), 100);
    assert_eq!(end.stdout.matches("[0] ").count(), 20_001);
}

#[test]
fn a_console_that_nobody_reads_holds_up_the_workers_and_not_the_launcher() {
    let daemon = Daemon::start();
    // A pipe that stays full: its reader is held open here, and never read.
    let (reader, writer) = std::io::pipe().unwrap();
    // More than the pipe holds, and then more than the launcher keeps too.
    let launch = launch(&daemon).sh("seq 1 300000; echo printed >&2; seq 1 2000000; exit 6");
    let mut launcher = launch.start_with(|command| command.stdout(writer));
    launcher.stderr.expect("printed");
    launcher.insist(
        Signal::SIGTERM,
        "lines lost because standard output did not take them",
    );
    launcher.wait().expect_code(143);
    drop(reader);
}

/// What a launcher has open, ignores and blocks is its own affair; what its caller set is passed on.
#[test]
fn workers_start_with_a_clean_slate() {
    let daemon = Daemon::start();
    // What a program started here has open, but for the folder that it reads to say so.
    let open = r"$(ls -l /proc/self/fd | sed -n '/proc/!s/.* \([0-9]*\) -> .*/\1/p' | sort -n | tr '\n' ' ')";
    let hostile = format!(
        r#"trap '' PIPE CHLD USR1 HUP; umask 027; ulimit -S -n 300; ulimit -S -c 0; exec 9</dev/null
        echo "passed on: {open}"; exec "$0" "$@""#
    );
    // The shell itself reads its signals: while it starts a program, it blocks them.
    let script = format!(
        r#"echo "open: {open}"
        while read -r line; do case $line in SigBlk*|SigIgn*) echo "$line"; esac; done < /proc/$$/status
        echo "umask $(umask), files $(ulimit -S -n), core $(ulimit -S -c)"
        echo "oom score $(cat /proc/$$/oom_score_adj)"
        echo "group $(sed -n 's/^0:://p' /proc/$$/cgroup)"
        echo "session $(cut -d' ' -f6 /proc/$$/stat) of $$""#
    );
    let launch = launch(&daemon).workers(2).sh(&script);
    let end = launch.start_through(&hostile).wait();
    end.expect_code(0);
    let passed_on = end
        .stdout
        .lines()
        .find_map(|line| line.strip_prefix("passed on: "));
    let passed_on = passed_on.unwrap();
    assert!(passed_on.contains(" 9 "), "{passed_on}");
    let own_score = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap();
    for rank in 0..2 {
        let said = |line: &str| {
            let line = format!("[{rank}] {line}\n");
            assert!(end.stdout.contains(&line), "no `{line}` in:\n{}", end.stdout);
        };
        said(&format!("open: {passed_on}"));
        said("SigBlk:\t0000000000000000");
        said("umask 0027, files 300, core 0");
        said(&format!("oom score {}", own_score.trim()));
    }
    let ignored = end
        .stdout
        .lines()
        .filter_map(|line| line.split_once("] SigIgn:\t"));
    let ignored: Vec<u64> = ignored
        .map(|(_, mask)| u64::from_str_radix(mask, 16).unwrap())
        .collect();
    // 32 and 33 are the C library's own, which refuses to touch them.
    let of_libc = 0b11 << 31;
    assert_eq!(ignored.len(), 2);
    assert!(ignored.iter().all(|mask| mask & !of_libc == 0), "{}", end.stdout);
    if ddp_launcher::parent_of_workers().is_ok() {
        // Though SIGCHLD was ignored when the launcher tried it.
        assert_eq!(end.stdout.matches("/ddp-").count(), 2, "{}", end.stdout);
    }
    let leads = |line: &&str| {
        let session = line
            .split_once("] session ")
            .and_then(|(_, rest)| rest.split_once(" of "));
        session.is_some_and(|(session, pid)| session == pid)
    };
    assert_eq!(end.stdout.lines().filter(leads).count(), 2, "{}", end.stdout);
}
