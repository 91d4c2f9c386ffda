//! The launcher as the first process of a container: orphans are its children, and it reaps them.

use std::process::{Command, Stdio};

use crate::harness::Program;

const NAMESPACE: [&str; 4] = ["--pid", "--fork", "--mount-proc", "--kill-child"];

/// Makes orphans, and waits until none of them is there any more, not even as a zombie.
const ORPHANS: &str = r#"
[ "$(cat /proc/1/comm)" = ddp-run ] || exit 3
orphans=$(for i in 1 2 3 4; do sh -c 'sh -c "exit 0" >/dev/null & echo $!'; done)
for orphan in $orphans; do
    looks=0
    while [ -e "/proc/$orphan" ]; do
        looks=$((looks + 1)); [ $looks -lt 3000 ] || exit 4
        sleep 0.01
    done
done
echo "all reaped"
"#;

#[test]
fn orphans_are_reaped_by_a_launcher_that_is_pid_1() {
    let allowed = Command::new("unshare")
        .args(NAMESPACE)
        .arg("true")
        .stderr(Stdio::null())
        .status();
    if !allowed.is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: no namespace of process ids can be made here");
        return;
    }
    let words = NAMESPACE.into_iter().chain([
        env!("CARGO_BIN_EXE_ddp-run"),
        "--nproc-per-node",
        "2",
        "sh",
        "-c",
        ORPHANS,
    ]);
    let finished = Program::new("unshare").args(words).run();
    finished
        .expect_exit(0)
        .expect_stdout("[0] all reaped")
        .expect_stdout("[1] all reaped");
}
