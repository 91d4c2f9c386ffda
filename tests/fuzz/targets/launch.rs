//! What a launcher is started with: flags, configurations, the batch system's variables; and what it shows of it.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt as _;

use ddp_proto::printable;
use ddp_run::cli::launch::{agreement, args, scheduler};
use ddp_run::cli::settings::Settings;
use ddp_worker::config;

use crate::runner::Target;

/// A configuration with a key of each section.
const YAML: &str = "\
run:
  out_dir: out
  seed: 1337
model:
  kind: gpt2
  n_layer: 2
  n_head: 2
  n_embd: 16
  block_size: 8
data:
  train: train.txt
  tokenizer: bytes
train:
  steps: 10
  micro_batch: 2
  optimizer: {kind: adamw, lr: 3e-3}
  schedule: {kind: cosine, warmup_steps: 2}
parallel:
  zero: 2
launch:
  nproc_per_node: 2
";

pub(crate) fn configuration() -> Target {
    let folder = tempfile::tempdir_in("/dev/shm").expect("memory");
    let file = folder.path().join("train.yaml");
    fs::write(folder.path().join("train.txt"), "to be or not to be ".repeat(40)).expect("memory");
    Target {
        words: &[
            "  n_layer: 2\n",
            "parallel:\n  pipeline: {stages: 2}\n",
            "- a\n",
            "|\n",
            "!!binary ",
            "---\n",
            "&a [*a]",
        ],
        bytes_per_byte: 512,
        ..Target::new(
            "configuration",
            vec![YAML.into(), b"model: {kind: llama}\n".to_vec()],
            move |bytes| {
                fs::write(&file, bytes).expect("memory");
                let overrides = ["train.steps=5".to_owned()];
                let _ = config::load_without_data(&file, &[]);
                let _ = config::load_without_data(&file, &overrides);
                let text = String::from_utf8_lossy(bytes);
                if let Some(line) = text.lines().next() {
                    let _ = config::load_without_data(&file, &[line.to_owned()]);
                }
                let _ = &folder;
            },
        )
    }
}

pub(crate) fn flags() -> Target {
    let line = |words: &[&str]| words.join("\0").into_bytes();
    let seeds = vec![
        line(&[
            "--nproc-per-node",
            "2",
            "--nnodes=1:4",
            "--rdzv-endpoint",
            "host:29400",
            "train.yaml",
            "--set",
            "a.b=1",
        ]),
        line(&[
            "--rdzv-conf",
            "join_timeout=60,is_host=true",
            "--tee",
            "0:1,1:3",
            "-m",
            "module",
            "-x",
        ]),
        line(&[
            "--worker-ports",
            "20000-20010",
            "--local-ranks-filter",
            "0,1",
            "--signals-to-handle",
            "SIGTERM",
            "t.py",
        ]),
        line(&[
            "--numa-binding",
            "node",
            "--node_rank",
            "1",
            "--log-dir",
            "logs",
            "--dry-run",
            "./program",
        ]),
    ];
    Target {
        words: &["--nnodes", "--rdzv-endpoint", "[::1]:80", "\0", "1:2", "--set"],
        // Clap's own tables are made anew for each line.
        bytes_per_byte: 4096,
        ..Target::new("flags", seeds, |bytes| {
            let words = bytes[..bytes.len().min(4096)]
                .split(|byte| *byte == 0)
                .map(<[u8]>::to_vec);
            let argv = std::iter::once(OsString::from("ddp-run")).chain(words.map(OsString::from_vec));
            let _ = args::parse(argv);
        })
    }
}

pub(crate) fn batch_system() -> Target {
    let variables = |pairs: &[(&str, &str)]| {
        let lines = pairs.iter().map(|(name, value)| format!("{name}={value}"));
        lines.collect::<Vec<_>>().join("\n").into_bytes()
    };
    let seeds = vec![
        variables(&[
            ("SLURM_STEP_NUM_NODES", "4"),
            ("SLURM_STEP_NODELIST", "gpu[07-09,12],cpu1"),
            ("SLURM_NODEID", "3"),
            ("SLURM_JOB_ID", "42"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_STEP_TASKS_PER_NODE", "1(x4)"),
        ]),
        variables(&[
            ("SLURM_STEP_NUM_NODES", "2"),
            ("SLURM_STEP_NODELIST", "a[1-2]b[3-4],c"),
            ("SLURM_PROCID", "1"),
        ]),
        variables(&[("JOB_COMPLETION_INDEX", "1"), ("SLURM_NNODES", "4")]),
    ];
    Target {
        words: &[
            "SLURM_STEP_NODELIST=",
            "[",
            "]",
            "-",
            "\n",
            "[0-18446744073709551615]",
        ],
        ..Target::new("batch_system", seeds, |bytes| {
            let text = String::from_utf8_lossy(bytes);
            let get = |name: &str| {
                let mut pairs = text.lines().filter_map(|line| line.split_once('='));
                pairs
                    .find(|(found, _)| *found == name)
                    .map(|(_, value)| value.to_owned())
            };
            for endpoint in ["", "host:29400"] {
                let mut upper = Settings::default();
                if !endpoint.is_empty() {
                    upper.rdzv_endpoint = ddp_run::cli::values::endpoint(endpoint).ok();
                }
                let _ = scheduler::layer(&upper, true, get);
            }
        })
    }
}

/// Words of peers have no control characters, and command lines no passwords.
pub(crate) fn shown_words() -> Target {
    let seeds = vec![
        "node-1 \u{1b}[31mred\u{1b}[0m \u{202e}".into(),
        b"--password=hunter2 -p x https://me:hunter2@host/a?token=b Bearer c".to_vec(),
        "größe 模型\u{9b}2J".into(),
    ];
    Target {
        words: &["--token", "Bearer ", "https://", "@", "?key=", "\u{1b}[", "m"],
        ..Target::new("shown_words", seeds, |bytes| {
            let text = String::from_utf8_lossy(bytes);
            let is_control = |c: char| c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c);
            assert!(!printable::line(&text).contains(|c| is_control(c) && c != '\t'));
            assert!(!printable::text(&text).contains(|c| is_control(c) && !matches!(c, '\t' | '\n')));
            let words: Vec<&str> = text.split(' ').collect();
            let shown = agreement::shown_words(words.iter().copied());
            assert_eq!(shown.len(), words.len());
            agreement::shown_value("set", &text);
            let password = format!("a{text}");
            let secret = agreement::shown_words(["--password", &password, "x"]);
            assert_eq!(secret[1], agreement::HIDDEN);
        })
    }
}
