//! Trained models at work: the loss of a checkpoint is what its run said, and text goes on as it was learned.

use std::sync::Arc;

use crate::train_support::{Job, Trained};
use ddp_worker::checkpoint::{Reader, Which};
use ddp_worker::config::{ModelKind, Order, Precision, Strategy, Tokenizer, TrainConfig};
use ddp_worker::device::{CpuDevice, Device};
use ddp_worker::inference::{
    Completion, CompletionOptions, Encoder, Generator, InferenceError, LoadedModel, RunSettings, Sampling,
    complete,
};

type Change = fn(&mut TrainConfig);

const GREEDY: Sampling = Sampling {
    temperature: 0.0,
    top_k: None,
    top_p: None,
    seed: 0,
};

fn device(threads: usize) -> Arc<dyn Device> {
    Arc::new(CpuDevice::new(threads).unwrap())
}

fn reader(job: &Job) -> Reader {
    Reader::open(&job.out_dir(), Which::Latest).unwrap()
}

fn load(job: &Job, precision: Precision) -> LoadedModel {
    LoadedModel::open(&reader(job), &device(1), precision).unwrap()
}

/// The loss on what the run validated on, in the run's precision.
fn evaluated(job: &Job) -> f64 {
    let reader = reader(job);
    let run = RunSettings::of(&reader);
    let tokenizer = run.tokenizer(None).unwrap();
    let model = load(job, run.precision());
    let data = run.validation(&tokenizer, model.config.block_size).unwrap();
    let evaluated = model
        .evaluate(&data, u64::MAX, run.micro_batch(), &mut |_, _| {})
        .unwrap();
    assert_eq!(
        evaluated.bits_per_byte(),
        Some(evaluated.loss / std::f64::consts::LN_2)
    );
    evaluated.loss
}

fn assert_same_loss(job: &Job, trained: &Trained, tolerance: f64, what: &str) {
    let (found, expected) = (evaluated(job), trained.summary.val_loss.unwrap());
    assert!(
        (found - expected).abs() <= tolerance,
        "{what}: {found}, the run said {expected}"
    );
}

fn llama(c: &mut TrainConfig) {
    c.model.kind = ModelKind::Llama;
    c.model.n_head = 4;
    c.model.n_kv_head = Some(2);
    c.model.n_inner = Some(24);
}

#[test]
fn the_loss_of_a_checkpoint_is_the_runs_validation_loss() {
    let kinds: [(&str, Change); 5] = [
        ("gpt2", |_| ()),
        ("llama", llama),
        ("mixtral", |c| c.model.kind = ModelKind::Mixtral),
        ("mlp", |c| c.model.kind = ModelKind::Mlp),
        ("bf16", |c| c.train.precision = Precision::Bf16),
    ];
    for (what, change) in kinds {
        let job = Job::with(change);
        let trained = job.train(1);
        // One rank adds the same numbers up in the same order.
        assert_same_loss(&job, &trained, 0.0, what);
    }
}

#[test]
fn so_it_is_of_checkpoints_of_any_layout() {
    let layouts: [(&str, u32, Change); 3] = [
        ("zero3 on three ranks", 3, |c| {
            c.parallel.strategy = Strategy::Zero3;
        }),
        ("tp 2 × pp 2", 4, |c| {
            c.model.n_layer = 2;
            c.parallel.tensor = 2;
            c.parallel.pipeline.stages = 2;
            c.train.grad_accumulation = 2;
        }),
        ("a Llama on tp 2, with its rows divided", 2, |c| {
            llama(c);
            c.parallel.tensor = 2;
            c.parallel.sequence = true;
        }),
    ];
    for (what, ranks, change) in layouts {
        let job = Job::with(change);
        let trained = job.train(ranks);
        assert_same_loss(&job, &trained, 1e-6, what);
    }
}

/// A model that has learned a text of one sentence, again and again.
fn learned(change: impl FnOnce(&mut TrainConfig)) -> Job {
    let job = Job::with(|c| {
        c.model.n_layer = 2;
        c.model.n_embd = 32;
        // Prime to the length of the sentence: samples begin at each of its letters.
        c.model.block_size = 21;
        // The same samples in each epoch: it is to know them by heart.
        c.data.order = Order::Sequential;
        c.train.micro_batch = 8;
        c.train.steps = 500;
        c.train.verify_every = 0;
        change(c);
    });
    let text = job.config.data.train.iter().next().unwrap();
    std::fs::write(text, SENTENCE.repeat(300)).unwrap();
    job
}

/// What follows an `a` depends on the letters before.
const SENTENCE: &str = "abacadbc. ";

fn options(tokens: usize, sampling: Sampling) -> CompletionOptions {
    CompletionOptions {
        tokens,
        sampling,
        vocabulary: 256,
        end_of_text: None,
    }
}

fn text(model: &LoadedModel, prompt: &str, options: &CompletionOptions) -> (String, Completion) {
    let encoder = Encoder::new(&Tokenizer::Bytes, None).unwrap();
    let mut text = String::new();
    let completion = complete(model, &encoder, prompt, options, &mut |more| {
        text.push_str(more);
        true
    });
    (text[prompt.len()..].to_owned(), completion.unwrap())
}

#[test]
fn a_text_goes_on_as_it_was_learned_beyond_the_models_positions() {
    for (what, change) in [("gpt2", (|_| ()) as fn(&mut TrainConfig)), ("llama", llama)] {
        let job = learned(change);
        job.train(1);
        let model = load(&job, Precision::F32);
        let (found, completion) = text(&model, "abacadbc. abac", &options(100, GREEDY));
        let expected = SENTENCE.repeat(20)[14..114].to_owned();
        assert_eq!(found, expected, "{what}");
        assert_eq!((completion.prompt_tokens, completion.tokens), (14, 100));
        assert!(!completion.is_ended);
        // The model's own `.` ends the text where it is said to.
        let ended = CompletionOptions {
            end_of_text: Some(u32::from(b'.')),
            ..options(100, GREEDY)
        };
        let (found, completion) = text(&model, "abacadbc. abac", &ended);
        assert_eq!((found.as_str(), completion.tokens), ("adbc", 4));
        assert!(completion.is_ended);
    }
}

#[test]
fn the_same_seed_makes_the_same_text() {
    let job = Job::new();
    job.train(1);
    let model = load(&job, Precision::F32);
    let of = |seed, temperature| {
        let sampling = Sampling {
            temperature,
            seed,
            ..GREEDY
        };
        text(&model, "the ", &options(60, sampling)).0
    };
    assert_eq!(of(1, 1.0), of(1, 1.0));
    assert_ne!(of(1, 1.0), of(2, 1.0));
    assert_eq!(
        of(1, 0.0),
        of(2, 0.0),
        "without temperature there is nothing to draw"
    );
    // Threads make no difference.
    let other = LoadedModel::open(&reader(&job), &device(3), Precision::F32).unwrap();
    let sampling = Sampling {
        temperature: 1.0,
        seed: 1,
        ..GREEDY
    };
    assert_eq!(text(&other, "the ", &options(60, sampling)).0, of(1, 1.0));
    // Tokens beyond the tokenizer's are never chosen.
    let few = CompletionOptions {
        vocabulary: 100,
        ..options(200, sampling)
    };
    assert!(text(&model, "the ", &few).0.bytes().all(|byte| byte < 100));
}

#[test]
fn what_a_text_sees_is_the_end_of_it() {
    let job = Job::new();
    job.train(1);
    let model = load(&job, Precision::F32);
    let tokens: Vec<u32> = (0..).map(|i| 97 + i * 7 % 26).take(16).collect();
    let mut generator = Generator::new(&model).unwrap();
    generator.advance(&tokens).unwrap();
    assert_eq!(generator.room(), 0);
    // With all positions used, the next token is chosen after the last half and it.
    let mut chosen = Vec::new();
    let mut on_token = |token| {
        chosen.push(token);
        Ok(true)
    };
    let mut again = Generator::new(&model).unwrap();
    again.run(&tokens, &options(2, GREEDY), &mut on_token).unwrap();
    let seen = [&tokens[9..], &chosen[..1]].concat();
    assert_eq!(seen.len(), 8);
    let mut short = Generator::new(&model).unwrap();
    let logits = short.advance(&seen).unwrap();
    assert_eq!(GREEDY.choose(&logits[..256], 1, &mut Vec::new()), Some(chosen[1]));
}

#[test]
fn a_token_more_takes_no_more_memory() {
    let job = Job::new();
    job.train(1);
    let model = load(&job, Precision::F32);
    let mut generator = Generator::new(&model).unwrap();
    generator.advance(&[97]).unwrap();
    let first = model.activation_bytes();
    for _ in 0..15 {
        generator.advance(&[98]).unwrap();
        assert_eq!(model.activation_bytes(), first);
    }
}

#[test]
fn what_cannot_go_on_is_refused() {
    let job = Job::new();
    job.train(1);
    let model = load(&job, Precision::F32);
    let encoder = Encoder::new(&Tokenizer::Bytes, None).unwrap();
    let refusal = |prompt: &str| {
        let made = complete(&model, &encoder, prompt, &options(1, GREEDY), &mut |_| true);
        made.unwrap_err().to_string()
    };
    insta::assert_snapshot!(refusal(""), @r"
    the prompt has 0 tokens, and the model takes 1 to 16 (`model.block_size`)
      hint: give a longer prompt
    ");
    insta::assert_snapshot!(refusal("seventeen letters"), @r"
    the prompt has 17 tokens, and the model takes 1 to 16 (`model.block_size`)
      hint: give a shorter prompt
    ");
    let mut generator = Generator::new(&model).unwrap();
    let message = |error: Result<&[f32], InferenceError>| error.unwrap_err().to_string();
    insta::assert_snapshot!(message(generator.advance(&[1, 256])), @r"
    token 256 is outside of the model's vocabulary of 256
      hint: use the tokenizer that the model was trained with
    ");
    assert_eq!(generator.room(), 16, "nothing of it was taken in");
    assert!(message(generator.advance(&[])).contains("0 tokens do not fit"));
}
