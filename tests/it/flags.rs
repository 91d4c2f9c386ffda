//! The flags that a user of torchrun relies on, one script each.

use std::fs;

use crate::harness::{Launch, launch, repository, temp_dir};

/// Prints one line on each stream.
const TALK: &str = "echo out of $RANK; echo err of $RANK >&2";

#[test]
fn redirected_output_is_in_files_and_teed_output_in_both() {
    let dir = temp_dir();
    let logs = dir.path().join("logs");
    let finished = launch()
        .nproc(3)
        .flag("--log-dir", &logs)
        .words(["-r", "0:3,1:1", "-t", "0:2"])
        .shell(TALK)
        .run();
    finished
        .expect_exit(0)
        .expect_stderr("[0] err of 0")
        .expect_stderr("[1] err of 1")
        .expect_stdout("[2] out of 2");
    let shown = finished.stdout().join("\n");
    assert!(
        !shown.contains("out of 0") && !shown.contains("out of 1"),
        "{shown}"
    );
    for rank in 0..3 {
        let of = |name: &str| {
            fs::read_to_string(logs.join(format!("attempt_0/{rank}/{name}"))).expect("a log file")
        };
        assert_eq!(of("stdout.log"), format!("out of {rank}\n"));
        assert_eq!(of("stderr.log"), format!("err of {rank}\n"));
    }
}

#[test]
fn a_second_run_leaves_the_log_files_of_the_first_one_alone() {
    let dir = temp_dir();
    for run in ["first", "second"] {
        launch()
            .flag("--log-dir", dir.path())
            .flag("--max-restarts", "1")
            .shell(&format!(
                "echo {run} $TORCHELASTIC_RESTART_COUNT; exit $((1 - TORCHELASTIC_RESTART_COUNT))"
            ))
            .run()
            .expect_exit(0);
    }
    let said: Vec<String> = (0..4)
        .map(|attempt| {
            fs::read_to_string(dir.path().join(format!("attempt_{attempt}/0/stdout.log")))
                .expect("a log file")
        })
        .collect();
    assert_eq!(said, ["first 0\n", "first 1\n", "second 0\n", "second 1\n"]);
}

#[test]
fn a_rank_of_two_digits_can_be_redirected() {
    let dir = temp_dir();
    let finished = launch()
        .nproc(11)
        .flag("--log-dir", dir.path())
        .words(["-r", "10:3"])
        .shell(TALK)
        .run();
    finished.expect_exit(0).expect_stdout("[9] out of 9");
    assert!(!finished.stdout().join("\n").contains("out of 10"));
}

#[test]
fn the_console_shows_the_ranks_that_were_asked_for_under_their_prefix() {
    let dir = temp_dir();
    let finished = launch()
        .nproc(3)
        .flag("--log-dir", dir.path())
        .flag("--local-ranks-filter", "1")
        .flag("--role", "trainer")
        .flag("--log-line-prefix-template", "[${role_name}${local_rank}]:")
        .flag("--duplicate-stdout-filters", "of 2,nothing")
        .shell(TALK)
        .run();
    finished.expect_exit(0).expect_stderr("[trainer1]:err of 1");
    assert_eq!(finished.stdout(), ["[trainer1]:out of 1"]);
    let filtered = fs::read_to_string(dir.path().join("attempt_0/filtered_stdout.log")).expect("written");
    assert_eq!(filtered, "out of 2\n", "files know no filter of ranks");
}

#[test]
fn raw_output_is_the_bytes_of_one_rank() {
    let dir = temp_dir();
    let script = r#"printf "$RANK\\r\\377\\n 10%%\\r"; head -c 3000000 /dev/zero; printf "words" >&2"#;
    let expected = [b"0\r\xff\n 10%\r".as_slice(), &vec![0; 3_000_000]].concat();
    for flags in [
        "--nproc-per-node 1 --output raw --",
        "--nproc-per-node 2 --output raw --local-ranks-filter 0 --",
    ] {
        let path = dir.path().join("out");
        let file = fs::File::create(&path).expect("writable");
        let finished = launch()
            .words(flags.split(' '))
            .stdout_to(file)
            .shell(script)
            .run();
        finished.expect_exit(0);
        assert_eq!(finished.stderr().trim_end(), "words");
        assert!(fs::read(&path).expect("written") == expected, "bytes differ");
    }
}

#[test]
fn raw_output_of_several_ranks_is_refused() {
    let refused = |flags: &[&str]| {
        let finished = launch().words(flags).flag("--output", "raw").target("true").run();
        finished.expect_exit(2).stderr()
    };
    insta::assert_snapshot!(refused(&["--nproc-per-node", "2"]), @r"
    [ddp-run] error: `--output raw` shows one rank, but up to 2 ranks of this node would be shown
    [ddp-run]   hint: `--local-ranks-filter 0` shows local rank 0 only; or use `--nproc-per-node 1`
    ");
    insta::assert_snapshot!(refused(&["--nproc-per-node", "1", "--log-dir", "logs"]), @r"
    [ddp-run] error: `--output raw` passes the output of a rank by the launcher, which cannot write it to files
    [ddp-run]   hint: omit `--log-dir`, `--redirects`, `--tee` and `--duplicate-…-filters`, or omit `--output raw`
    ");
}

#[test]
fn standard_input_reaches_rank_0() {
    let finished = launch()
        .nproc(2)
        .target("sh")
        .target_args(["-c", r#"read line; echo "$RANK read <$line>""#])
        .input("hello\n")
        .run();
    finished
        .expect_stdout("[0] 0 read <hello>")
        .expect_stdout("[1] 1 read <>");
}

#[test]
fn a_program_that_always_fails_at_once_is_given_up_with_the_reason() {
    let words = "`sh` failed; the last 5 starts failed within 5 s each, without progress";
    let launch = launch().flag("--max-restarts", "100").shell("exit 3");
    launch.run().expect_exit(3).expect_stderr(words);
}

#[test]
fn a_port_that_was_taken_costs_no_restart() {
    let dir = temp_dir();
    let script = r#"mkdir "$FIRST" || exit 0; echo "EADDRINUSE: port $MASTER_PORT" >&2; exit 1"#;
    let first = dir.path().join("first");
    let finished = launch()
        .env("FIRST", &first)
        .flag("--max-restarts", "0")
        .shell(script)
        .run();
    finished
        .expect_exit(0)
        .expect_stderr("because its port was in use; restarting without using up a restart");
    // A worker that always says so is not believed for ever.
    let always = launch()
        .flag("--max-restarts", "0")
        .shell("echo started; echo 'Address already in use' >&2; exit 4")
        .run();
    always.expect_exit(4);
    assert_eq!(always.stdout().len(), 4, "{:?}", always.stdout());
}

#[test]
fn a_master_port_that_is_taken_is_not_tried_again() {
    let taken = std::net::TcpListener::bind("0.0.0.0:0").expect("a free port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let hint = format!("leave it out (`ss -ltnp 'sport = :{port}'` shows who has it)");
    let launch = || launch().flag("--master-port", &port).flag("--max-restarts", "0");
    // The launcher hosts the store of what `--no-python` runs.
    let hosted = launch().words(["--no-python"]).shell("echo started").run();
    hosted
        .expect_exit(69)
        .expect_stderr(&format!(
            "cannot host PyTorch's store at MASTER_PORT {port}: Address already in use"
        ))
        .expect_stderr(&hint);
    assert!(hosted.stdout().is_empty(), "{:?}", hosted.stdout());
    let by_rank_0 = launch()
        .shell("echo started; echo 'Address already in use' >&2; exit 4")
        .run();
    by_rank_0.expect_exit(4).expect_stderr(&hint);
    assert_eq!(by_rank_0.stdout().len(), 1, "{:?}", by_rank_0.stdout());
}

#[test]
fn the_failure_is_told_to_programs_and_to_the_launcher_above() {
    let dir = temp_dir();
    let above = dir.path().join("above.json");
    let logs = dir.path().join("logs");
    let script = r#"[ "$RANK" = 1 ] || exec sleep 1000
printf '{"message": {"message": "no data", "extraInfo": {"timestamp": "1"}}}' > "$TORCHELASTIC_ERROR_FILE"; exit 7"#;
    let finished = launch()
        .nproc(2)
        .env("TORCHELASTIC_ERROR_FILE", &above)
        .flag("--log-dir", &logs)
        .shell(script)
        .run();
    finished.expect_exit(7).expect_stderr("no data");
    let json = |path| -> serde_json::Value {
        serde_json::from_slice(&fs::read(path).expect("written")).expect("JSON")
    };
    assert_eq!(json(above)["message"]["message"], "no data");
    let cause = json(logs.join("error.json"));
    assert_eq!(
        (&cause["exit_code"], &cause["first_failure"]["rank"]),
        (&7.into(), &1.into())
    );
}

#[test]
fn events_are_lines_of_json() {
    let dir = temp_dir();
    let file = dir.path().join("events.jsonl");
    let finished = launch()
        .nproc(2)
        .flag("--event-log-handler", &file)
        .target("true")
        .run();
    finished.expect_exit(0);
    let text = fs::read_to_string(file).expect("written");
    let events: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let count = |name: &str| events.iter().filter(|event| event["event"] == name).count();
    assert_eq!(
        (count("worker_started"), count("worker_ended"), count("finished")),
        (2, 2, 1),
        "{text}"
    );
}

#[test]
fn a_script_can_be_run_as_a_program_and_a_module_by_python() {
    let dir = temp_dir();
    let script = dir.path().join("program.py");
    fs::write(&script, "#!/bin/sh\necho a shell ran it\n").expect("writable");
    let mut mode = fs::metadata(&script).expect("there").permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut mode, 0o755);
    fs::set_permissions(&script, mode).expect("ours");
    launch()
        .words(["--no-python"])
        .target(script)
        .run()
        .expect_exit(0)
        .expect_stdout("[0] a shell ran it");
    let dry = launch()
        .words(["--dry-run", "-m"])
        .target("pkg.train")
        .target_args(["--lr", "1"])
        .run();
    dry.expect_exit(0).expect_stdout("python3 -u -m pkg.train --lr 1");
}

#[test]
fn a_virtual_local_rank_sees_one_gpu() {
    let finished = launch()
        .nproc(2)
        .words(["--virtual-local-rank"])
        .env("CUDA_VISIBLE_DEVICES", "4,6")
        .shell("echo $LOCAL_RANK $DDP_LOCAL_RANK $CUDA_VISIBLE_DEVICES")
        .run();
    finished
        .expect_exit(0)
        .expect_stdout("[0] 0 0 4")
        .expect_stdout("[1] 0 1 6");
}

#[test]
fn a_dry_run_shows_sources_and_starts_nothing() {
    let dir = temp_dir();
    let finished = launch()
        .nproc(2)
        .words(["--dry-run"])
        .env("PET_MAX_RESTARTS", "7")
        .dir(dir.path())
        .target(repository("examples/single-node/train.yaml"))
        .run();
    finished
        .expect_exit(0)
        .expect_stdout("PET_MAX_RESTARTS")
        .expect_stdout("command line")
        .expect_stdout("train.yaml is valid, and its data files can be read")
        .expect_stdout("nothing was started");
    let shown = finished.stdout().join("\n");
    assert!(!shown.contains("could not be started"), "{shown}");
    assert_eq!(
        fs::read_dir(dir.path()).expect("there").count(),
        0,
        "no folder of a run was made"
    );
}

/// In arguments of a script, in settings, in a file.
#[test]
fn a_dry_run_shows_no_secret() {
    let secrets = ["hunter2", "s3cr3t-of-url", "swordfish99"];
    let [password, of_url, key] = secrets;
    let url = format!("https://user:{of_url}@host/model");
    let dry = || {
        launch()
            .words(["--dry-run"])
            .env("DDP_TOKEN", "0123456789abcdef0123456789abcdef")
    };
    let native = |set: &str| {
        dry()
            .set(set)
            .target(repository("examples/single-node/train.yaml"))
            .run()
    };
    let arguments = [
        "-c",
        "true",
        "--password",
        password,
        "--from",
        &url,
        &format!("--api-key={key}"),
    ];
    let script = dry().target("sh").target_args(arguments).run();
    script.expect_exit(0).expect_stdout("…");
    let unknown = [format!("data.api_key={key}"), format!("run.password={password}")].map(|set| native(&set));
    let dir = temp_dir();
    let file = dir.path().join("train.yaml");
    fs::write(&file, format!("run:\n  password: {password}\n")).expect("writable");
    let in_a_file = dry().target(&file).run();
    for refused in unknown.iter().chain([&in_a_file]) {
        refused.expect_exit(2).expect_stderr("unknown key");
    }
    for shown in unknown.iter().chain([&in_a_file, &script]) {
        let all = format!("{}\n{}", shown.stdout().join("\n"), shown.stderr());
        let found = secrets.iter().find(|secret| all.contains(**secret));
        assert_eq!(found, None, "{all}");
        assert!(!all.contains("0123456789abcdef"), "{all}");
    }
}

#[test]
fn a_dry_run_ends_like_a_launch_whose_program_cannot_be_started() {
    for (program, code) in [("nosuchprog", 127), ("/etc/passwd", 126)] {
        let launch = |words: &[&str]| launch().words(words).target(program).run();
        launch(&[]).expect_exit(code);
        launch(&["--dry-run"])
            .expect_exit(code)
            .expect_stdout("nothing was started.")
            .expect_stdout(&format!("the job would end with exit code {code}: "));
    }
}

#[test]
fn a_dry_run_says_where_variables_of_the_workers_come_from() {
    let finished = launch()
        .nproc(2)
        .words(["--dry-run", "--virtual-local-rank"])
        .env("PET_ROLE", "trainer")
        .env("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
        // No other process gets the launcher's own cores.
        .env("RANK", "0")
        .target("true")
        .run();
    let lines = finished.expect_exit(0).stdout();
    for (variable, source) in [
        ("CUDA_VISIBLE_DEVICES=0", "`virtual_local_rank`: command line"),
        ("LOCAL_WORLD_SIZE=2", "`nproc_per_node`: command line"),
        ("MASTER_ADDR=127.0.0.1", ""),
        ("RANK=0", ""),
        ("ROLE_NAME=trainer", "`role`: PET_ROLE"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING=3", "inherited"),
    ] {
        let line = lines
            .iter()
            .find_map(|line| line.strip_prefix("  ")?.strip_prefix(variable));
        assert_eq!(
            line.map(str::trim),
            Some(source),
            "{variable} in\n{}",
            lines.join("\n")
        );
    }
    finished.expect_stdout("cores per worker");
    finished.expect_stdout("environment set for local rank 0:");
}

#[test]
fn a_dry_run_has_a_row_for_each_setting_that_is_given() {
    let dir = temp_dir();
    let yaml = dir.path().join("launch.yaml");
    let config = fs::read_to_string(repository("examples/single-node/train.yaml")).expect("there");
    let data = repository("examples/data").display().to_string();
    let config = config.replace("../data", &data) + "\nlaunch: {signal_scope: rank}\n";
    fs::write(&yaml, config).expect("writable");
    let finished = launch()
        .nproc(1)
        .words("--dry-run --redirects 0:1 --redirects=0:3 --hang-timeout 5".split(' '))
        .env("PET_HANG_TIMEOUT", "7")
        .env("PET_FORWARD_SIGNALS", "USR1,SIGUSR2")
        .target(yaml)
        .run();
    let rows = finished.expect_exit(0).stdout();
    let row = |name: &str| {
        let row = rows.iter().find(|line| line.trim_start().starts_with(name));
        row.map(|row| {
            row.split("  ")
                .map(str::trim)
                .filter(|cell| !cell.is_empty())
                .collect::<Vec<_>>()
                .join(" | ")
        })
    };
    assert_eq!(
        row("redirects").as_deref(),
        Some("redirects | 0:3 | command line")
    );
    assert_eq!(
        row("hang_timeout").as_deref(),
        Some("hang_timeout | 5 | command line")
    );
    assert_eq!(
        row("forward_signals").as_deref(),
        Some("forward_signals | USR1,SIGUSR2 | PET_FORWARD_SIGNALS")
    );
    let scope = row("signal_scope").expect("a row");
    assert!(scope.starts_with("signal_scope | rank | `launch` of "), "{scope}");
}

#[test]
fn a_dry_run_tells_of_the_rendezvous_and_the_ranks_of_this_node() {
    let finished = launch()
        .nproc(2)
        .words(["--dry-run", "--nnodes", "3", "--node-rank", "1"])
        .flag("--rdzv-conf", "is_host=0,last_call_timeout=3")
        .env("PET_MASTER_ADDR", "node0")
        .target("true")
        .run();
    let shown = finished.expect_exit(0).stdout().join("\n");
    let row = |name: &str| shown.lines().find(|line| line.trim_start().starts_with(name));
    let endpoint = row("rdzv_endpoint").expect("a row");
    assert!(
        endpoint.contains("node0:29400") && endpoint.ends_with("PET_MASTER_ADDR"),
        "{endpoint}"
    );
    let conf = row("rdzv_conf").expect("a row");
    assert!(
        conf.contains(
            "is_host=false,join_timeout=600,connect_timeout=60,outage_timeout=600,last_call_timeout=3"
        ),
        "{conf}"
    );
    finished.expect_stdout("ranks of this node if each lower-ranked node also has 2 workers: 2 to 3");
}

#[test]
fn a_dry_run_shows_the_variable_behind_each_value_of_a_batch_system() {
    let finished = launch()
        .nproc(1)
        .words(["--dry-run"])
        .env("SLURM_STEP_NUM_NODES", "3")
        .env("SLURM_STEP_NUM_TASKS", "3")
        .env("SLURM_STEP_NODELIST", "gpu[07-09]")
        .env("SLURM_PROCID", "2")
        .target("true")
        .run();
    let shown = finished.expect_exit(0).stdout().join("\n");
    let source = |name: &str| {
        let row = shown.lines().find(|line| line.trim_start().starts_with(name));
        row.and_then(|row| row.split("  ").last()).map(str::trim)
    };
    assert_eq!(source("nnodes"), Some("SLURM_STEP_NUM_NODES"), "{shown}");
    assert_eq!(source("node_rank"), Some("SLURM_PROCID"), "{shown}");
    assert_eq!(source("rdzv_endpoint"), Some("SLURM_STEP_NODELIST"), "{shown}");
    finished
        .expect_stdout("ddp-run would start 1 worker on this node, one of 3:")
        .expect_stdout("rank of this node if each lower-ranked node also has 1 worker: 2")
        .expect_stdout("  RANK=(decided at startup)");
}

#[test]
fn nodes_of_an_allocation_that_stay_unused_are_told_where_the_job_starts() {
    let batch = || launch().env("SLURM_NNODES", "4").env("SLURM_JOB_ID", "12");
    let finished = batch().target("true").run();
    finished
        .expect_exit(0)
        .expect_stderr("running on 1 of the 4 nodes of Slurm job 12");
    let meant = batch().words(["--standalone"]).target("true").run();
    meant.expect_exit(0);
    assert!(!meant.stderr().contains("Slurm"), "{}", meant.stderr());
}

#[test]
fn workers_that_share_the_only_core_of_an_affinity_mask_are_told() {
    let cores = fs::read_to_string("/proc/cpuinfo").expect("there");
    if cores.matches("processor\t:").count() < 2 {
        eprintln!("SKIPPED: this machine has one core, of which no mask takes any away");
        return;
    }
    // Of this thread, which ends with the test; what it starts inherits it.
    let this = nix::unistd::Pid::from_raw(0);
    let mask = nix::sched::sched_getaffinity(this).expect("a mask");
    let first = (0..nix::sched::CpuSet::count()).find(|cpu| mask.is_set(*cpu) == Ok(true));
    let mut one = nix::sched::CpuSet::new();
    one.set(first.expect("a core")).expect("it was set before");
    nix::sched::sched_setaffinity(this, &one).expect("fewer cores than before");
    let finished = launch().nproc(2).target("true").run();
    finished
        .expect_exit(0)
        .expect_stderr("2 workers compete for 1 core: ");
}

#[test]
fn ranks_that_do_not_fit_the_configuration_are_found_before_anything_starts() {
    let launch = || {
        launch()
            .nproc(3)
            .set("parallel.strategy=zero2")
            .set("parallel.shard_group=2")
            .target(repository("examples/single-node/train.yaml"))
    };
    let words = "`parallel.shard_group` is 2, but 3 data-parallel ranks cannot be divided into groups of 2";
    for flags in [&["--dry-run"][..], &[]] {
        launch()
            .words(flags)
            .run()
            .expect_exit(2)
            .expect_stderr(words)
            .expect_stderr("--set parallel.shard_group=2`: ");
    }
}

#[test]
fn log_files_without_a_place_are_nobody_elses() {
    let dir = temp_dir();
    for _ in 0..2 {
        let finished = launch()
            .words(["-r", "3"])
            .flag("--rdzv-id", "same")
            .env("TMPDIR", dir.path())
            .shell(TALK)
            .run();
        finished.expect_exit(0).expect_stderr("; logs in /");
    }
    let made: Vec<_> = fs::read_dir(dir.path())
        .expect("there")
        .map(|entry| entry.expect("readable"))
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("ddp-run-same-"))
        .collect();
    assert_eq!(made.len(), 2, "{made:?}");
    for folder in made {
        let mode = folder.metadata().expect("there").permissions();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o700);
        assert!(folder.path().join("attempt_0/0/stdout.log").exists());
    }
}

#[test]
fn torchruns_details_of_the_rendezvous_are_taken_with_their_quotes() {
    // As a program passes it that quotes for a shell, though none reads it.
    let finished = launch()
        .words([
            "--dry-run",
            "--rdzv-conf='join_timeout=5, last_call_timeout = \"1\",colour=red,read_timeout=60'",
        ])
        .target("true")
        .run();
    finished
        .expect_exit(0)
        .expect_stdout("join_timeout=5,connect_timeout=60,outage_timeout=600,last_call_timeout=1 ")
        .expect_stderr("ignored `--rdzv-conf colour`: it has no effect here")
        .expect_stderr("ignored `--rdzv-conf read_timeout`: it has no effect here");
}

#[test]
fn what_torchrun_says_of_output_and_shutdown_holds() {
    let dir = temp_dir();
    let host = nix::unistd::gethostname()
        .expect("a name")
        .to_string_lossy()
        .into_owned();
    let finished = launch()
        .flag("--log-dir", dir.path())
        .flag(
            "--log-line-prefix-template",
            "${hostname}:${rank}$$${group_rank} ",
        )
        .flag("--duplicate-stdout-filters", "a,,b,nothing")
        .shell("echo a; echo a,b; echo b")
        .run();
    finished
        .expect_exit(0)
        .expect_stdout(&format!("{host}:0$${{group_rank}} a,b"));
    let filtered = fs::read_to_string(dir.path().join("attempt_0/filtered_stdout.log")).expect("written");
    assert_eq!(filtered, "a,b\n");

    let shown = |flags: &[&str]| {
        let dry = launch()
            .env("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
            .words(flags)
            .target("true")
            .run();
        let rows = dry.expect_exit(0).stdout().join("\n");
        let row = rows.lines().find(|line| line.contains("shutdown_timeout"));
        row.map(|row| row.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    assert_eq!(
        shown(&["--dry-run"]).as_deref(),
        Some("shutdown_timeout 7 s TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    );
    assert_eq!(
        shown(&["--dry-run", "--shutdown-timeout", "8"]).as_deref(),
        Some("shutdown_timeout 8 s command line")
    );
}

#[test]
fn a_worker_that_changes_its_directory_keeps_its_error_file() {
    let script = r#"cd /; echo '{"message": "no data in /"}' > "$TORCHELASTIC_ERROR_FILE"; exit 3"#;
    let dir = temp_dir();
    let run = |launch: Launch| {
        let finished = launch.dir(dir.path()).shell(script).run();
        finished.expect_exit(3).expect_stderr("no data in /");
    };
    run(launch().flag("--log-dir", "logs"));
    run(launch().env("TMPDIR", "."));
    let left = fs::read_dir(dir.path()).expect("readable").flatten();
    let names: Vec<_> = left.map(|entry| entry.file_name()).collect();
    assert_eq!(names, ["logs"], "the folder of error files is removed");
    // Files were asked for, but no place.
    run(launch().env("TMPDIR", ".").words(["-r", "3"]));
}
