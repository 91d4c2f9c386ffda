//! Launches that people watch: Ctrl-C, prompts, progress bars, and the terminal that a single worker is given.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{Sentinel, launch, python_is_missing, temp_dir};

const CTRL_C: &str = "\x03";

/// It sleeps in short pieces: CPython does not see a signal that comes just before the call of `sleep` until that returns.
const INTERRUPTED: &str = "
import atexit, time
atexit.register(lambda: print('at the end'))
try:
    print('ready')
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    print('saved')
finally:
    print('finally')
";

#[test]
fn ctrl_c_is_a_keyboard_interrupt() {
    if python_is_missing() {
        return;
    }
    for workers in [1, 2] {
        let launch = launch().nproc(workers).target("python3");
        let mut screen = launch.target_args(["-u", "-c", INTERRUPTED]).on_screen();
        for _ in 0..workers {
            screen.wait_for("ready");
        }
        screen.type_in(CTRL_C);
        let (code, shown) = screen.finish();
        assert_eq!(code, Some(130), "{shown}");
        for words in ["saved", "finally", "at the end"] {
            assert_eq!(shown.matches(words).count(), workers as usize, "{shown}");
        }
        assert!(shown.contains("[ddp-run] stopped by SIGINT"), "{shown}");
    }
}

#[test]
fn own_lines_have_colours_and_fit_the_terminal_and_equal_tracebacks_are_shown_once() {
    let met = temp_dir();
    let script = format!(
        "printf '%s\n' 'Traceback (most recent call last):' '  File \"train.py\", line 1' 'ValueError: no data' >&2; cd {};
         echo > $TORCHELASTIC_RESTART_COUNT-$RANK
         until [ -e $TORCHELASTIC_RESTART_COUNT-0 -a -e $TORCHELASTIC_RESTART_COUNT-1 ]; do sleep 0.01; done; exit 1",
        met.path().display()
    );
    for no_color in ["", "1"] {
        let launch = launch().nproc(2).flag("--max-restarts", "1").env("TERM", "xterm");
        let (code, shown) = launch
            .env("NO_COLOR", no_color)
            .shell(&script)
            .on_screen()
            .finish();
        assert_eq!(code, Some(1), "{shown}");
        let [own, restarting, error, rank] = match no_color {
            "" => [
                "\x1b[1m[ddp-run]\x1b[0m",
                "\x1b[1;33mrestarting\x1b[0m",
                "\x1b[1;31merror:\x1b[0m",
                "\x1b[36m[0]\x1b[0m",
            ],
            _ => ["[ddp-run]", "restarting", "error:", "[0]"],
        };
        let restart = format!("; {restarting} now (1/1)\r\n{own}   ValueError: no data\r\n");
        for words in [
            restart,
            format!("{own} {error} `sh` failed"),
            " the same traceback as rank ".to_owned(),
        ] {
            assert!(shown.contains(&words), "{words:?} in {shown}");
        }
        let tracebacks = shown.matches("] Traceback").count() + shown.matches("]\x1b[0m Traceback").count();
        assert_eq!(tracebacks, 2, "one a start: {shown}");
        assert!(shown.contains(rank) || shown.contains("[1]"), "{shown}");
        let plain = ["0", "1", "1;31", "1;33", "32", "35", "36"]
            .iter()
            .fold(shown, |text, code| text.replace(&format!("\x1b[{code}m"), ""));
        assert!(plain.lines().all(|line| line.chars().count() <= 100), "{plain}");
        std::fs::read_dir(met.path()).expect("there").for_each(|entry| {
            std::fs::remove_file(entry.expect("readable").path()).expect("removed");
        });
    }
}

#[test]
fn a_second_ctrl_c_kills_at_once() {
    for workers in [1, 2] {
        let launch = launch().nproc(workers).flag("--shutdown-timeout", "3600");
        let mut screen = launch
            .shell("trap '' INT; echo ready; while :; do sleep 1000; done")
            .on_screen();
        for _ in 0..workers {
            screen.wait_for("ready");
        }
        screen.type_in(CTRL_C);
        screen.wait_for("stopping the workers");
        screen.insist(CTRL_C, "killing the workers");
        let (code, shown) = screen.finish();
        assert_eq!(code, Some(130), "{shown}");
        assert!(shown.contains(": terminated by ddp-run (SIGKILL)"), "{shown}");
    }
}

#[test]
fn a_prompt_is_seen_before_it_is_answered() {
    let script = r#"if [ "$RANK" = 0 ]; then printf 'name? '; read name; echo "hello $name"; fi"#;
    let mut screen = launch().nproc(2).shell(script).on_screen();
    screen.wait_for("[0] name? ");
    screen.type_in("you\n");
    screen.wait_for("hello you");
    assert_eq!(screen.finish().0, Some(0));
}

#[test]
fn a_bar_is_drawn_in_place_and_not_over_the_bar_of_another_rank() {
    // Each waits for a key, or for the other one, between two updates.
    let fifo = temp_dir();
    let path = fifo.path().join("fifo");
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let script = format!(
        r#"if [ "$RANK" = 0 ]; then
               printf '\r 10%%'; read key; printf '\r 20%%'; read key; echo >{path}; read key; printf '\r 30%%\n'
           else
               read key <{path}; printf '\r 11%%'; sleep 1000
           fi"#,
        path = path.display()
    );
    let mut screen = launch().nproc(2).shell(&script).on_screen();
    screen.wait_for("[0]  10%");
    screen.type_in("\n");
    screen.wait_for("\r[0]  20%");
    screen.type_in("\n");
    screen.wait_for("\n[1]  11%");
    screen.type_in("\n");
    screen.wait_for("\n[0]  30%\r\n");
    screen.type_in(CTRL_C);
    assert_eq!(screen.finish().0, Some(130));
}

#[test]
fn a_single_worker_is_given_the_terminal() {
    let script = "test -t 0 && test -t 1 && test -t 2 && stty size; read answer; echo received $answer";
    let mut screen = launch().shell(script).on_screen();
    screen.wait_for("24 100");
    screen.type_in("you\n");
    screen.wait_for("received you");
    let (code, shown) = screen.finish();
    assert_eq!(code, Some(0));
    assert!(!shown.contains("[0]"), "no prefix: {shown}");
    // A test that asks for part of the output gets it as before.
    let logs = temp_dir();
    let logged = launch().flag("--log-dir", logs.path());
    let (_, shown) = logged.shell("test -t 1 || echo a pipe").on_screen().finish();
    assert!(shown.contains("[0] a pipe"), "{shown}");
}

#[test]
fn a_worker_that_fails_leaves_the_terminal_as_it_was() {
    let mut screen = launch()
        .shell("stty -echo -icanon; echo ready; read answer; echo the cause >&2; kill -9 $$")
        .on_screen();
    screen.wait_for("ready");
    assert!(!screen.echoes());
    screen.type_in("\n");
    screen.wait_for("first failure: rank 0");
    assert!(screen.echoes());
    let (code, shown) = screen.finish();
    assert_eq!(code, Some(137));
    assert_eq!(shown.matches("the cause").count(), 1, "{shown}");
    assert!(!shown.contains("no output on stderr"), "{shown}");
}

#[test]
fn a_worker_that_has_the_terminal_does_not_outlive_its_launcher() {
    let sentinel = Sentinel::new();
    let script = format!("{}; echo ready; sleep 1000 & wait", sentinel.join_script());
    let mut screen = launch().shell(&script).on_screen();
    screen.wait_for("ready");
    kill(Pid::from_raw(screen.pid()), Signal::SIGKILL).expect("a child of ours");
    sentinel.expect_all_gone();
    screen.finish();
}

#[test]
fn output_that_gets_lost_is_told_of() {
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .expect("a device");
    let launch = launch().nproc(2).shell("echo one; echo two");
    let finished = launch.stdout_to(full).run();
    finished
        .expect_exit(0)
        .expect_stderr("cannot write to standard output: No space left on device");
    assert_eq!(finished.stderr().matches("cannot write to").count(), 1);
}
