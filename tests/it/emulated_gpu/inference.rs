//! A trained model at work on an emulated GPU, and the steps of a Llama: as on the processor.

use serde_json::Value;

use super::{emulator, expect_same_losses, gpus, job, train};
use crate::harness::{TinyJob, launch};

/// What a command of `ddp-train` says as JSON on a device.
fn said(job: &TinyJob, device: &str, words: &[&str]) -> Value {
    let program = emulator().program(env!("CARGO_BIN_EXE_ddp-train")).dir(job.dir());
    let words = [words, &["--json", "--device", device]].concat();
    let finished = program.args(words).run();
    finished.expect_exit(0);
    serde_json::from_str(&finished.stdout().join("\n")).expect("JSON")
}

#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn generation_and_evaluation_are_those_of_the_processor() {
    let job = job();
    train(launch().nproc(1).dir(job.dir()), &job, &["parallel.backend=cpu"]);
    let [there, here] = ["gpu", "cpu"].map(|device| {
        let evaluated = said(&job, device, &["eval", "out"]);
        // Longer than the model has positions.
        let words = "generate out --prompt 0123 --temperature 0 --max-tokens 40";
        let made = said(&job, device, &words.split(' ').collect::<Vec<_>>());
        assert_eq!(made["tokens"], 40);
        let name = evaluated["device"].as_str().expect("a name").to_owned();
        (
            name,
            evaluated["loss"].as_f64().expect("a loss"),
            made["text"].clone(),
        )
    });
    assert!(
        there.0.contains("Emulated GPU") && here.0.starts_with("cpu"),
        "{there:?}, {here:?}"
    );
    assert!((there.1 - here.1).abs() < 1e-5 * here.1, "{there:?}, {here:?}");
    assert_eq!(there.2, here.2);
}

#[test]
#[ignore = "minutes of emulated GPUs: .ci/run emulated_gpu"]
fn a_llama_trains_as_on_the_processor() {
    let settings = ["model.kind=llama", "model.n_kv_head=1", "train.steps=2"];
    let [here, there] = [job(), job()];
    let alone = [&settings[..], &["parallel.backend=cpu"]].concat();
    let expected = train(
        launch()
            .nproc(1)
            .dir(here.dir())
            .set("train.micro_batch=4")
            .set("train.grad_accumulation=1"),
        &here,
        &alone,
    );
    let found = train(gpus(emulator(), &there, 1), &there, &settings);
    expect_same_losses("a Llama", &found, &expected);
}
