//! Operations on bf16 storage against the same operations in f64.
//!
//! Both get the same numbers, exactly representable in bf16, so all that may differ is the arithmetic in f32 and one
//! rounding at each store. bf16 has 8 significant bits: rounding to nearest moves a number by at most 2⁻⁸ of itself.
//! Sums of a few thousand products of numbers near 1 are within 10⁻⁴ in f32. A second rounding anywhere (of an
//! intermediate, of a partial sum) would break the bound for some of the elements.

use ddp_worker::config::ModelKind;
use ddp_worker::device::{Buffer, DType, Isa};
use ddp_worker::model::build;
use ddp_worker::ops::{
    AddBiasResidual, AttentionBackward, AttentionDecode, AttentionForward, AttentionShape, CHUNK, ColumnSum,
    CrossEntropy, CrossEntropyCombine, CrossEntropyPartial, EncoderForward, GeluBackward, GeluForward,
    LinearDinp, LinearDweight, LinearForward, LinearShape, NormBackward, NormForward, PositionBackward,
    Rates, Rotary, RotaryEmbedding, Runs, SquaredNorm, SwigluBackward, SwigluForward, TokenBackward, Update,
    VocabularyPart, WeightLayout,
};
use ddp_worker::optim::adamw;
use half::bf16;

use super::rig::{Rank, Rig, config, numbers, numbers_f32, values, wide_values};

/// One way to store: type of activations and parameters, type of gradients.
struct Storage {
    rig: Rig,
    act: DType,
    grad: DType,
}

impl Storage {
    fn stat(&self) -> DType {
        match self.act {
            DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }

    /// The same numbers in every storage: rounded to bf16 first.
    fn filled(&self, dtype: DType, numbers: &[f64]) -> Buffer {
        let rounded = numbers.iter().map(|&x| bf16::from_f64(x));
        match dtype {
            DType::F64 => self.rig.buffer(&rounded.map(f64::from).collect::<Vec<_>>()),
            DType::F32 => self.rig.buffer(&rounded.map(f32::from).collect::<Vec<_>>()),
            _ => self.rig.buffer(&rounded.collect::<Vec<_>>()),
        }
    }

    fn inp(&self, seed: u64, len: usize) -> Buffer {
        self.filled(self.act, &numbers(seed, len))
    }

    /// A gradient that something is added to, or that must be overwritten.
    fn dirty_grad(&self, len: usize) -> Buffer {
        self.filled(self.grad, &numbers(77, len))
    }

    fn dirty(&self, len: usize) -> Buffer {
        self.filled(self.act, &numbers(78, len))
    }
}

/// Runs `work` in f64, and in bf16 with gradients of bf16 and of f32, and compares what it returns.
fn compare(work: impl Fn(&Storage) -> Vec<(&'static str, Buffer)>) {
    let run = |act, grad| {
        let rig = Rig::new();
        work(&Storage { rig, act, grad })
    };
    let expected = run(DType::F64, DType::F64);
    for grad in [DType::Bf16, DType::F32] {
        for ((name, found), (_, expected)) in run(DType::Bf16, grad).iter().zip(&expected) {
            let rounding = if found.dtype() == DType::Bf16 {
                0.5_f64.powi(8)
            } else {
                0.0
            };
            let (found, expected) = (wide_values(found), wide_values(expected));
            assert_eq!(found.len(), expected.len());
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let allowed = expected.abs() * rounding + 1e-4;
                let error = (found - expected).abs();
                assert!(
                    error <= allowed,
                    "{name}[{i}], gradients in {grad}: {found} instead of {expected}, off by {error}"
                );
            }
        }
    }
}

fn linear_of(s: &Storage, shape: LinearShape, accumulate: bool) -> Vec<(&'static str, Buffer)> {
    let LinearShape {
        rows,
        inputs,
        outputs,
        ..
    } = shape;
    let (inp, weight, dout) = (
        s.inp(1, rows * inputs),
        s.inp(2, inputs * outputs),
        s.inp(3, rows * outputs),
    );
    let (out, dinp) = (s.dirty(rows * outputs), s.dirty(rows * inputs));
    let (dweight, dbias) = (s.dirty_grad(inputs * outputs), s.dirty_grad(outputs));
    s.rig.run(LinearForward {
        inp: inp.clone(),
        weight: weight.clone(),
        bias: Some(s.inp(4, outputs)),
        residual: Some(s.inp(5, rows * outputs)),
        out: out.clone(),
        shape,
    });
    s.rig.run(LinearDinp {
        dout: dout.clone(),
        weight,
        dinp: dinp.clone(),
        shape,
    });
    s.rig.run(LinearDweight {
        inp,
        dout: dout.clone(),
        dweight: dweight.clone(),
        accumulate,
        shape,
    });
    s.rig.run(ColumnSum {
        x: dout,
        out: dbias.clone(),
        accumulate,
    });
    vec![
        ("out", out),
        ("dinp", dinp),
        ("dweight", dweight),
        ("dbias", dbias),
    ]
}

#[test]
fn linear() {
    // Beyond a tile and a widened block in every dimension, one after the other.
    for [rows, inputs, outputs] in [
        [5, 7, 3],
        [3, 1100, 40],
        [1030, 20, 70],
        [4, 30, 4200],
        [530, 65, 66],
    ] {
        for layout in [WeightLayout::InOut, WeightLayout::OutIn] {
            for accumulate in [false, true] {
                let shape = LinearShape {
                    rows,
                    inputs,
                    outputs,
                    layout,
                };
                compare(|s| linear_of(s, shape, accumulate));
            }
        }
    }
}

#[test]
fn layernorm_and_rmsnorm() {
    let (rows, channels, epsilon) = (70, 45, 1e-3);
    for (has_bias, accumulate) in [(false, false), (false, true), (true, false), (true, true)] {
        compare(|s| {
            let (inp, weight) = (s.inp(1, rows * channels), s.inp(2, channels));
            let (out, dinp) = (s.dirty(rows * channels), s.dirty(rows * channels));
            let (dweight, dbias) = (s.dirty_grad(channels), s.dirty_grad(channels));
            s.rig.run(NormForward {
                inp: inp.clone(),
                weight: weight.clone(),
                bias: has_bias.then(|| s.inp(3, channels)),
                out: out.clone(),
                epsilon,
            });
            s.rig.run(NormBackward {
                dout: s.inp(4, rows * channels),
                inp,
                weight,
                dinp: dinp.clone(),
                dweight: dweight.clone(),
                dbias: has_bias.then(|| dbias.clone()),
                epsilon,
                accumulate_dinp: accumulate,
                accumulate_dweight: accumulate,
                accumulate_dbias: accumulate,
            });
            let mut results = vec![("out", out), ("dinp", dinp), ("dweight", dweight)];
            results.extend(has_bias.then_some(("dbias", dbias)));
            results
        });
    }
}

#[test]
fn swiglu() {
    // Several parts of the work.
    let (rows, channels) = (30, 900);
    compare(|s| {
        let n = rows * channels;
        let wide = numbers(1, 2 * n).iter().map(|x| 3.0 * x).collect::<Vec<_>>();
        let inp = s.filled(s.act, &wide);
        let (out, dout) = (s.dirty(n), s.inp(2, n));
        s.rig.run(SwigluForward {
            inp: inp.clone(),
            out: out.clone(),
            channels,
        });
        s.rig.run(SwigluBackward {
            inp_dinp: inp.clone(),
            dout_out: dout.clone(),
            channels,
        });
        vec![("out", out), ("out once more", dout), ("dinp", inp)]
    });
}

#[test]
fn rotary() {
    let (shape, first_position) = (sizes(2), 4000);
    let embedding = RotaryEmbedding {
        base: 10_000.0,
        scaling: None,
    };
    let shape = AttentionShape {
        head_size: 8,
        ..shape
    };
    compare(|s| {
        let n = shape.rows() * shape.qkv_channels();
        let (qkv, dqkv) = (s.inp(1, n), s.inp(2, n));
        s.rig.run(Rotary {
            qkv: qkv.clone(),
            shape,
            embedding,
            first_position,
            backward: false,
        });
        s.rig.run(Rotary {
            qkv: dqkv.clone(),
            shape,
            embedding,
            first_position,
            backward: true,
        });
        vec![("rotated", qkv), ("rotated back", dqkv)]
    });
}

/// The cache holds what storage holds.
#[test]
fn attention_over_a_cache() {
    let (shape, first_position, room) = (
        AttentionShape {
            positions: 3,
            ..sizes(1)
        },
        80,
        90,
    );
    compare(|s| {
        let cached = shape.batch * room * shape.kv_channels();
        let (keys, values) = (s.inp(1, cached), s.inp(2, cached));
        let out = s.dirty(shape.rows() * shape.channels());
        s.rig.run(AttentionDecode {
            qkv: s.inp(3, shape.rows() * shape.qkv_channels()),
            keys: keys.clone(),
            values: values.clone(),
            out: out.clone(),
            shape,
            first_position,
        });
        vec![("out", out), ("keys", keys), ("values", values)]
    });
}

#[test]
fn gelu() {
    compare(|s| {
        let n = 20_000;
        let inp = s.filled(s.act, &numbers(1, n).iter().map(|x| 4.0 * x).collect::<Vec<_>>());
        let (out, dinp) = (s.dirty(n), s.inp(2, n));
        s.rig.run(GeluForward {
            inp: inp.clone(),
            out: out.clone(),
        });
        s.rig.run(GeluBackward {
            inp_out: inp.clone(),
            dout_dinp: dinp.clone(),
            makes_out: true,
        });
        vec![("out", out), ("out once more", inp), ("dinp", dinp)]
    });
}

#[test]
fn attention() {
    attention_of(2);
}

/// The gradients of keys and values are sums over both heads, rounded once.
#[test]
fn grouped_query_attention() {
    attention_of(1);
}

const fn sizes(kv_heads: usize) -> AttentionShape {
    AttentionShape {
        batch: 2,
        positions: 67,
        heads: 2,
        kv_heads,
        head_size: 5,
    }
}

fn attention_of(kv_heads: usize) {
    let shape = sizes(kv_heads);
    let (rows, channels, qkv_channels) = (shape.rows(), shape.channels(), shape.qkv_channels());
    // What forward gives to backward is rounded: backward gets the same in every storage.
    let forward = |s: &Storage| {
        let qkv = s.inp(1, rows * qkv_channels);
        let (out, lse) = (s.dirty(rows * channels), s.rig.empty(s.stat(), rows * 2));
        s.rig.run(AttentionForward {
            qkv: qkv.clone(),
            out: out.clone(),
            lse: lse.clone(),
            shape,
            dropout: None,
        });
        [qkv, out, lse]
    };
    let exact = forward(&Storage {
        rig: Rig::new(),
        act: DType::F64,
        grad: DType::F64,
    });
    compare(|s| {
        let [qkv, out, lse] = forward(s);
        let dqkv = s.dirty(rows * qkv_channels);
        s.rig.run(AttentionBackward {
            qkv,
            out: s.filled(s.act, &wide_values(&exact[1])),
            lse: lse.clone(),
            dout: s.inp(2, rows * channels),
            dqkv: dqkv.clone(),
            shape,
            dropout: None,
        });
        vec![("out", out), ("lse", lse), ("dqkv", dqkv)]
    });
}

#[test]
fn cross_entropy() {
    let (rows, vocab) = (18, 201);
    let targets: Vec<i32> = (0..rows as i32)
        .map(|i| if i % 7 == 3 { -1 } else { i * 11 % 201 })
        .collect();
    compare(|s| {
        let logits = s.inp(1, rows * vocab);
        let losses = s.rig.empty(s.stat(), rows);
        s.rig.run(CrossEntropy {
            logits: logits.clone(),
            targets: s.rig.buffer(&targets),
            losses: losses.clone(),
            dlosses: Some(s.filled(s.stat(), &numbers(2, rows))),
        });
        vec![("losses", losses), ("dlogits", logits)]
    });
}

#[test]
fn cross_entropy_by_parts_of_the_vocabulary() {
    let (rows, whole) = (18, 201);
    let parts = [(0, 67), (67, 134)].map(|(first, held)| VocabularyPart { first, held, whole });
    let targets: Vec<i32> = (0..rows as i32)
        .map(|i| if i % 7 == 3 { -1 } else { i * 11 % 201 })
        .collect();
    compare(|s| {
        let targets = s.rig.buffer(&targets);
        let logits = parts.map(|part| s.inp(1 + part.first as u64, rows * part.held));
        let [statistics, losses] = [2 * rows * 3, rows].map(|len| s.rig.empty(s.stat(), len));
        for (rank, part) in parts.into_iter().enumerate() {
            s.rig.run(CrossEntropyPartial {
                logits: logits[rank].clone(),
                targets: targets.clone(),
                statistics: statistics.slice(3 * rows * rank..3 * rows * (rank + 1)),
                part,
            });
        }
        for (rank, part) in parts.into_iter().enumerate() {
            s.rig.run(CrossEntropyCombine {
                logits: logits[rank].clone(),
                statistics: statistics.clone(),
                targets: targets.clone(),
                losses: losses.clone(),
                dlosses: Some(s.filled(s.stat(), &numbers(2, rows))),
                part,
            });
        }
        let [first, second] = logits;
        vec![
            ("losses", losses),
            ("first dlogits", first),
            ("second dlogits", second),
        ]
    });
}

#[test]
fn add_bias_residual() {
    let (rows, columns) = (40, 603);
    compare(|s| {
        let (inp, out) = (s.inp(1, rows * columns), s.dirty(rows * columns));
        let (bias, residual) = (s.inp(2, columns), s.inp(3, rows * columns));
        let add = |inp: &Buffer, out: &Buffer| {
            s.rig.run(AddBiasResidual {
                inp: inp.clone(),
                bias: Some(bias.clone()),
                residual: Some(residual.clone()),
                out: out.clone(),
            });
        };
        add(&inp, &out);
        add(&inp, &inp);
        vec![("out", out), ("in place", inp)]
    });
}

#[test]
fn embeddings() {
    let (batch, positions, channels, vocab) = (20, 3, 70, 4);
    // Tokens repeat many times: sums that were rounded on the way would be far off.
    let tokens: Vec<i32> = (0..batch * positions).map(|i| (i * i % 3) as i32).collect();
    for accumulate in [false, true] {
        compare(|s| {
            let tokens = s.rig.buffer(&tokens);
            let rows = batch * positions;
            let (out, dout) = (s.dirty(rows * channels), s.inp(3, rows * channels));
            let (dwte, dwpe) = (
                s.dirty_grad(vocab * channels),
                s.dirty_grad((positions + 1) * channels),
            );
            s.rig.run(EncoderForward {
                tokens: tokens.clone(),
                wte: s.inp(1, vocab * channels),
                wpe: Some(s.inp(2, (positions + 1) * channels)),
                out: out.clone(),
                positions,
                part: None,
            });
            s.rig.run(TokenBackward {
                tokens,
                dout: dout.clone(),
                dwte: dwte.clone(),
                accumulate,
                part: None,
            });
            s.rig.run(PositionBackward {
                dout,
                dwpe: dwpe.clone(),
                accumulate,
                positions,
                channels,
            });
            vec![("out", out), ("dwte", dwte), ("dwpe", dwpe)]
        });
    }
}

#[test]
fn an_update_by_bf16_gradients_is_one_by_their_numbers_and_the_copy_is_the_master_rounded() {
    let rig = Rig::new();
    let n = 40_001;
    let narrow: Vec<bf16> = numbers(1, n).into_iter().map(bf16::from_f64).collect();
    let wide: Vec<f32> = narrow.iter().copied().map(f32::from).collect();
    let update = |grad: Buffer, copy: Option<Buffer>| {
        let param = rig.buffer(&numbers_f32(2, n));
        let (m, v) = (rig.buffer(&vec![0.1_f32; n]), rig.buffer(&vec![0.2_f32; n]));
        rig.run(Update {
            rule: adamw([0.9, 0.95], 1e-8),
            runs: Runs::uniform(param.clone().len(), Rates::new(1e-2, 0.1)),
            param: param.clone(),
            copy,
            grad,
            slots: vec![m.clone(), v.clone()],
            scale: rig.buffer(&[0.7_f32]),
            step: 3,
        });
        [param, m, v].map(|b| values::<f32>(&b))
    };
    let copy = rig.empty(DType::Bf16, n);
    let found = update(rig.buffer(&narrow), Some(copy.clone()));
    assert_eq!(found, update(rig.buffer(&wide), None));
    let rounded: Vec<bf16> = found[0].iter().copied().map(bf16::from_f32).collect();
    assert_eq!(values::<bf16>(&copy), rounded);
}

#[test]
fn the_norm_of_bf16_gradients_is_that_of_their_numbers() {
    let rig = Rig::new();
    let narrow: Vec<bf16> = numbers(1, CHUNK + 77).into_iter().map(bf16::from_f64).collect();
    let wide: Vec<f32> = narrow.iter().copied().map(f32::from).collect();
    let norm = |x: Buffer| {
        let partials = rig.empty(DType::F64, 2);
        rig.run(SquaredNorm {
            x,
            partials: partials.clone(),
        });
        values::<f64>(&partials)
    };
    assert_eq!(norm(rig.buffer(&narrow)), norm(rig.buffer(&wide)));
}

#[test]
fn a_gradient_of_a_type_that_does_not_go_with_the_activations_is_refused() {
    let rig = Rig::new();
    let sum = |x, out| {
        rig.try_run(ColumnSum {
            x: rig.empty(x, 4),
            out: rig.empty(out, 4),
            accumulate: false,
        })
    };
    assert!(sum(DType::Bf16, DType::F32).is_ok());
    let error = sum(DType::F32, DType::Bf16).unwrap_err();
    assert_eq!(error.to_string(), "`test` holds bf16, expected f32");
    let error = sum(DType::I32, DType::I32).unwrap_err();
    assert_eq!(
        error.to_string(),
        "operation `column_sum`: takes f32, bf16 or f64, not i32"
    );
}

/// Losses and gradients of a whole network in bf16, beside f64 ones.
#[test]
fn a_network_in_bf16_has_the_gradients_of_one_in_f64_to_its_precision() {
    for kind in [ModelKind::Gpt2, ModelKind::Mlp] {
        let run = |act, grad| {
            let model = build(&config(kind), 201).unwrap();
            let mut rank = Rank::with_grads(Rig::with(1, Isa::detect()), model, (act, grad), [1, 4, 6]);
            let loss = rank.step(0);
            (loss, wide_values(&rank.grads.whole()))
        };
        let (exact_loss, exact) = run(DType::F64, DType::F64);
        for grad in [DType::Bf16, DType::F32] {
            let (loss, found) = run(DType::Bf16, grad);
            assert!(
                (loss - exact_loss).abs() < 2e-3 * exact_loss,
                "{loss} and {exact_loss}"
            );
            let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
            let error = norm(&mut found.iter().zip(&exact).map(|(f, e)| f - e));
            let size = norm(&mut exact.iter().copied());
            // About ten roundings of 2⁻⁸ at most lie on the way of each, in no preferred direction.
            assert!(error < 0.02 * size, "{kind:?}, {grad}: off by {}", error / size);
        }
    }
}
