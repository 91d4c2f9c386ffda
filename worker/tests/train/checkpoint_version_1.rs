//! A checkpoint in the format of version 1, which the build before version 2 wrote, goes on with that build's losses.
//!
//! `fixtures/checkpoint-v1` has the run's configuration and text, the checkpoint of step 4 that two ranks wrote under
//! `zero1` (its files of tensors in hexadecimal, so that the repository holds text only), and the losses of all 8 steps
//! of a run that was not interrupted.

use std::fs;
use std::path::{Path, PathBuf};

use crate::train_support::Job;
use ddp_worker::checkpoint::{Reader, TensorKind, Which};
use ddp_worker::config::{Resume, Strategy};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoint-v1")
}

/// The checkpoint, below the folder of a run.
fn unpack(out_dir: &Path) {
    let step = out_dir.join("checkpoints/step_00000004");
    fs::create_dir_all(&step).unwrap();
    for entry in fs::read_dir(fixture()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if let Some(name) = name.strip_suffix(".hex") {
            let digits: Vec<u8> = fs::read(&path).unwrap();
            let digits: Vec<u8> = digits
                .into_iter()
                .filter(|byte| !byte.is_ascii_whitespace())
                .collect();
            let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
            fs::write(step.join(name), digits.chunks(2).map(byte).collect::<Vec<u8>>()).unwrap();
        } else if name == "manifest.json" {
            fs::copy(&path, step.join(name)).unwrap();
        }
    }
    fs::write(out_dir.join("checkpoints/latest"), "step_00000004\n").unwrap();
}

/// The run of the fixture's `job.yaml`.
fn job(strategy: Strategy) -> Job {
    let job = Job::with(|c| {
        c.run.seed = 7;
        c.run.resume = Resume::Require;
        c.model.n_head = 1;
        c.model.n_embd = 2;
        c.model.block_size = 8;
        c.data.train = fixture().join("text.txt").into();
        c.train.steps = 8;
        c.train.checkpoint_every = 4;
        c.parallel.strategy = strategy;
    });
    unpack(&job.out_dir());
    job
}

#[test]
fn a_checkpoint_of_version_1_goes_on_with_the_losses_of_its_own_build() {
    let text = fs::read_to_string(fixture().join("losses.txt")).unwrap();
    let losses: Vec<f64> = text.lines().map(|line| line.parse().unwrap()).collect();
    for strategy in [Strategy::Ddp, Strategy::Zero1, Strategy::Zero3] {
        let job = job(strategy);
        let before = Reader::open(&job.out_dir(), Which::Latest).unwrap();
        assert_eq!(before.manifest().format_version, 1);
        assert_eq!(before.damages(), []);
        assert_eq!(job.train(2).losses(), losses[4..], "{strategy:?}");
        let after = Reader::open(&job.out_dir(), Which::Latest).unwrap();
        assert_eq!(
            (after.manifest().format_version, after.manifest().state.step),
            (2, 8)
        );
    }
}

#[test]
fn its_tensors_are_named_by_key_and_kind_and_are_one_region() {
    let folder = tempfile::tempdir().unwrap();
    unpack(folder.path());
    let reader = Reader::open(folder.path(), Which::Latest).unwrap();
    let of = |kind: TensorKind| {
        let tensors = reader.manifest().tensors.iter();
        tensors
            .filter(|tensor| tensor.name.kind == kind)
            .map(|tensor| tensor.name.key.as_str())
            .collect::<Vec<_>>()
    };
    let parameters = of(TensorKind::Parameter);
    assert!(parameters.contains(&"h.0.attn.c_attn.weight"), "{parameters:?}");
    assert_eq!(of(TensorKind::State("exp_avg".into())), parameters);
    assert_eq!(of(TensorKind::State("exp_avg_sq".into())), parameters);
    assert_eq!(reader.manifest().tensors.len(), 3 * parameters.len());
    for tensor in &reader.manifest().tensors {
        assert_eq!(tensor.regions.len(), 1);
        assert!(tensor.regions[0].region.is_whole(&tensor.shape));
    }
}
