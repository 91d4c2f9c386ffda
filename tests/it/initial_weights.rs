//! `model.init_from` by the binaries: what one run has exported, another begins with.

use std::path::Path;

use crate::harness::{TinyJob, ddp_train, launch, metrics, parameters};

/// A job that begins with the weights in `weights`, which a run of its own shape has left there.
fn job_with_weights() -> TinyJob {
    let job = TinyJob::with(|yaml| {
        let yaml = yaml.replace("block_size: 32", "block_size: 32, init_from: weights");
        yaml.replace("steps: 40", "steps: 2")
    });
    let train = launch().dir(job.dir()).set("model.init_from=null");
    let train = train
        .set("run.out_dir=first")
        .set("run.seed=8")
        .target("tiny.yaml");
    train.run().expect_exit(0);
    let words = ["ckpt", "export", "first", "--to", "weights"];
    let export = ddp_train().dir(job.dir());
    export.args(words).run().expect_exit(0);
    job
}

fn expect_same_parameters(one: &Path, other: &Path) {
    let files = |out: &Path| {
        let mut files = parameters(out);
        files.retain(|name, _| name.starts_with("parameters"));
        files
    };
    assert!(files(one) == files(other), "the parameters are others");
}

#[test]
fn exported_weights_are_begun_with_once() {
    let job = job_with_weights();
    let train = |steps: &str| {
        let train = launch().nproc(2).dir(job.dir()).set("run.resume=auto");
        train
            .set(&format!("train.steps={steps}"))
            .target("tiny.yaml")
            .run()
    };
    let still = launch()
        .dir(job.dir())
        .set("run.out_dir=still")
        .set("train.optimizer.lr=0");
    still
        .target("tiny.yaml")
        .run()
        .expect_exit(0)
        .expect_stdout("initial weights   weights (34,688 parameters, f32)");
    expect_same_parameters(&job.dir().join("still"), &job.dir().join("first"));

    train("5")
        .expect_exit(0)
        .expect_stdout("initial weights   weights (");
    std::fs::remove_dir_all(job.dir().join("weights")).expect("the weights");
    let resumed = train("8");
    resumed.expect_exit(0).expect_stdout("8, resumed after step 5");
    assert!(!resumed.stdout().concat().contains("initial weights"));
    assert_eq!(metrics(&job.out()).len(), 8);
}

#[test]
fn weights_that_do_not_fit_are_refused_before_anything_starts() {
    let job = job_with_weights();
    let refused = |set: &str| {
        let launch = job.launch().nproc(2).set(set);
        let finished = launch.run();
        finished.expect_exit(2);
        assert!(!job.out().exists(), "a folder was made for a run that never was");
        finished.errors()
    };
    insta::assert_snapshot!(refused("model.n_layer=3"), @r"
    [ddp-run] error: tiny.yaml:2: `weights` does not fit the `model` section: `n_layer` is 2 in the file and 3 in this model; `h.2.ln_1.weight` is missing in the file; `h.2.ln_1.bias` is missing in the file; and 10 more
    [ddp-run]   hint: write `n_layer: 2` in section `model`
    ");
    insta::assert_snapshot!(refused("model.n_head=4"), @r"
    [ddp-run] error: tiny.yaml:2: `weights` does not fit the `model` section: `n_head` is 2 in the file and 4 in this model
    [ddp-run]   hint: write `n_head: 2` in section `model`
    ");
    insta::assert_snapshot!(refused("model.init_from=first"), @r"
    [ddp-run] error: `--set model.init_from=first`: `first` holds neither `model.safetensors` nor `model.safetensors.index.json`
    [ddp-run]   hint: it belongs to a run: `ddp-train ckpt export first --to DIR` exports its checkpoint to such a file
    ");
    insta::assert_snapshot!(refused("model.init_from=absent"), @r"
    [ddp-run] error: `--set model.init_from=absent`: cannot read `absent`: No such file or directory (os error 2)
    [ddp-run]   hint: relative paths in `model.init_from` are resolved from the YAML's directory
    ");
}
