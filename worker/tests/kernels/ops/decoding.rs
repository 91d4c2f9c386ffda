//! Generation with a key-value cache against the training's forward: the logits of each position, however the text was
//! divided.

use ddp_worker::config::{self, ModelKind, RopeScaling};
use ddp_worker::device::DType;
use ddp_worker::model::{Activation, ChunkState, Context, Keep, NoHooks, build};

use super::rig::{Rank, Rig, assert_close, config, wide_values};

const SAMPLES: usize = 2;
const POSITIONS: usize = 12;
const VOCABULARY: usize = 11;

/// GPT-2, Llama with two query heads to a head of keys, Llama with the scaled rotation of Llama 3, no attention, and
/// Mixtral.
fn kinds() -> Vec<(&'static str, config::Model)> {
    let of = |kind| config::Model {
        block_size: POSITIONS,
        n_head: 4,
        n_embd: 16,
        ..config(kind)
    };
    let llama = config::Model {
        n_kv_head: Some(2),
        n_inner: Some(24),
        ..of(ModelKind::Llama)
    };
    // Positions of the second half are beyond those that the scaling was made for.
    let scaled = RopeScaling {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_positions: POSITIONS / 2,
    };
    let llama3 = config::Model {
        n_kv_head: Some(1),
        rope_scaling: Some(scaled),
        tied: Some(false),
        ..llama.clone()
    };
    vec![
        ("gpt2", of(ModelKind::Gpt2)),
        ("llama", llama),
        ("llama 3", llama3),
        ("mlp", of(ModelKind::Mlp)),
        ("mixtral", of(ModelKind::Mixtral)),
    ]
}

fn rank(model: &config::Model, dtype: DType) -> Rank {
    let model = build(model, VOCABULARY).unwrap().with_dtype(dtype);
    Rank::new(Rig::new(), model, dtype, [1, SAMPLES, POSITIONS])
}

/// Logits by sample and position, from parts of the text of these lengths, one after the other.
fn decoded(rank: &Rank, parts: &[usize]) -> Vec<Vec<f64>> {
    let mut text = ChunkState::new(rank.model.whole());
    let tokens: Vec<i32> = rank.batches[0].tokens.buffer().host::<i32>().unwrap().to_vec();
    let mut logits = vec![Vec::new(); SAMPLES * POSITIONS];
    let mut first = 0;
    for &count in parts {
        let samples = tokens.chunks_exact(POSITIONS);
        let part: Vec<i32> = samples
            .flat_map(|sample| sample[first..first + count].to_vec())
            .collect();
        let inp = Activation::borrowed(rank.rig.buffer(&part), vec![SAMPLES, count]);
        let ctx = Context {
            shape: [SAMPLES, count],
            keep: Keep::KvCache {
                first_position: first,
                capacity: POSITIONS,
            },
            samples: None,
            ..rank.context(0)
        };
        let passes = rank.passes(&ctx);
        let made = passes.forward(&mut text, &inp, &mut NoHooks).unwrap();
        assert_eq!(made.row_count(), SAMPLES * count);
        let rows = wide_values(made.buffer());
        for (row, logits_of_row) in rows.chunks_exact(VOCABULARY).enumerate() {
            logits[row / count * POSITIONS + first + row % count] = logits_of_row.to_vec();
        }
        first += count;
    }
    assert_eq!(first, POSITIONS);
    logits
}

/// One position at a time, and in parts that begin and end anywhere.
const DIVISIONS: [&[usize]; 4] = [&[1; POSITIONS], &[5, 1, 1, 1, 1, 1, 1, 1], &[3, 4, 5], &[11, 1]];

#[test]
fn their_losses_are_those_of_trainings_forward() {
    for (name, model) in kinds() {
        for (dtype, tolerance) in [(DType::F64, 1e-10), (DType::F32, 1e-5)] {
            let rank = rank(&model, dtype);
            let (losses, _) = rank.forward(0);
            let targets = rank.batches[0].targets.host::<i32>().unwrap().to_vec();
            for division in DIVISIONS {
                let logits = decoded(&rank, division);
                for (row, expected) in wide_values(losses.buffer()).into_iter().enumerate() {
                    let sum: f64 = logits[row].iter().map(|logit| logit.exp()).sum();
                    let loss = sum.ln() - logits[row][targets[row] as usize];
                    assert_close(
                        loss,
                        expected,
                        tolerance,
                        &format!("{name}, {dtype}, {division:?}, {row}"),
                    );
                }
            }
        }
    }
}

#[test]
fn a_later_token_changes_no_earlier_logits_and_an_earlier_one_does() {
    for (name, model) in kinds() {
        let rank = rank(&model, DType::F32);
        let before = decoded(&rank, &[1; POSITIONS]);
        let changed = POSITIONS / 2;
        {
            let mut tokens = rank.batches[0].tokens.buffer().host_mut::<i32>().unwrap();
            tokens[changed] = (tokens[changed] + 1) % VOCABULARY as i32;
        }
        let after = decoded(&rank, &[1; POSITIONS]);
        assert_eq!(before[..changed], after[..changed], "{name}");
        assert_eq!(
            before[POSITIONS..],
            after[POSITIONS..],
            "{name}: the other sample"
        );
        assert_ne!(before[changed], after[changed], "{name}");
        let is_seen = before[changed + 1] != after[changed + 1];
        assert_eq!(is_seen, name != "mlp", "{name}");
    }
}

#[test]
fn more_positions_than_the_cache_has_are_refused() {
    for (name, model) in kinds().into_iter().take(2) {
        let rank = rank(&model, DType::F32);
        let ctx = Context {
            keep: Keep::KvCache {
                first_position: 0,
                capacity: POSITIONS - 1,
            },
            ..rank.context(0)
        };
        let mut text = ChunkState::new(rank.model.whole());
        let tokens = &rank.batches[0].tokens;
        let _ = rank.passes(&ctx).forward(&mut text, tokens, &mut NoHooks);
        let error = rank.rig.device_error();
        assert!(error.contains("has room for 11 positions"), "{name}: {error}");
    }
}
