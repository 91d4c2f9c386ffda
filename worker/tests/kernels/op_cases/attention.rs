//! Attention in training and over a key-value cache, and rotations of queries and keys.

use ddp_worker::config::RopeScaling;
use ddp_worker::device::{Buffer, DType};
use ddp_worker::ops::{
    AttentionBackward, AttentionDecode, AttentionForward, AttentionMerge, AttentionShape, DropoutMask,
    HeadsView, Rotary, RotaryEmbedding,
};

use super::matrix::tensor;
use super::numbers::numbers;
use super::{Case, Kind, Outcome, Size, Tensor};

const F32: Kind = Kind::Fixed(DType::F32);

/// Attention: by the plain kernels in all types, and in bf16 by those with a name of their own on tensor cores.
pub(super) fn attention(size: Size) -> Vec<Case> {
    // Samples, positions, heads of queries and of keys, channels of a head.
    let plain: &[[usize; 5]] = match size {
        Size::Small => &[
            [2, 1, 1, 1, 8],
            [1, 77, 2, 2, 48],
            [1, 70, 3, 3, 5],
            [1, 33, 1, 1, 144],
            [2, 70, 6, 2, 5],
        ],
        Size::Large => &[[1, 1000, 2, 2, 80], [1, 1000, 8, 2, 80]],
    };
    let flash: &[[usize; 5]] = match size {
        Size::Small => &[
            [1, 70, 1, 1, 64],
            [1, 1, 2, 2, 64],
            [1, 33, 1, 1, 32],
            [1, 40, 1, 1, 128],
            [1, 130, 2, 1, 64],
        ],
        Size::Large => &[
            [2, 77, 3, 3, 64],
            [1, 1000, 2, 2, 64],
            [2, 1024, 2, 2, 64],
            [1, 1025, 2, 2, 32],
            [2, 513, 2, 2, 128],
            [1, 1000, 8, 2, 128],
            [2, 513, 6, 1, 64],
        ],
    };
    let mut cases = Vec::new();
    for (name, sizes) in [("attention", plain), ("flash attention", flash)] {
        for shape in sizes.iter().copied().map(shape) {
            // Compiled kernels are what takes time: masks for one width of the plain ones.
            let is_dropped = shape.positions > 1 && (name == "flash attention" || shape.head_size == 5);
            for rate in [Some(0.0), is_dropped.then_some(0.25)].into_iter().flatten() {
                cases.extend([
                    attention_forward(name, shape, rate),
                    attention_backward(name, shape, rate),
                ]);
            }
        }
    }
    // After the first key: the last queries, some that see no later key, and some after the last key.
    let stretches = [
        ("attention", [2, 40, 6, 2, 5], 77, [37, 0]),
        ("flash attention", [1, 66, 2, 1, 64], 130, [64, 0]),
        ("flash attention", [1, 20, 2, 1, 64], 130, [0, 0]),
        ("flash attention", [1, 20, 2, 1, 64], 64, [144, 16]),
    ];
    for (name, sizes, keys, firsts) in stretches {
        for rate in [0.0, 0.25] {
            cases.extend(apart(name, shape(sizes), keys, firsts, rate));
        }
    }
    cases.extend([[2, 70, 6, 2, 5], [1, 9, 2, 2, 64]].map(|sizes| merge(shape(sizes))));
    cases
}

/// Of queries that see more of some keys, and of others.
fn merge(shape: AttentionShape) -> Case {
    let (n, queries) = (shape.rows() * shape.channels(), shape.rows() * shape.heads);
    let tensors = vec![
        tensor(Kind::Act, 1, n, Outcome::Same),
        tensor(F32, 2, queries, Outcome::Same),
        tensor(Kind::Act, 3, n, Outcome::Close),
        tensor(F32, 4, queries, Outcome::Close),
    ];
    Case::new(format!("attention merge of {shape:?}"), tensors, move |b| {
        AttentionMerge {
            part: b[0].clone(),
            part_lse: b[1].clone(),
            out: b[2].clone(),
            lse: b[3].clone(),
            shape,
        }
    })
}

/// Queries, and keys and values, in buffers of their own, from these positions on.
fn apart(name: &str, shape: AttentionShape, keys: usize, firsts: [usize; 2], rate: f32) -> [Case; 2] {
    let [n, n_kv] = [
        shape.rows() * shape.channels(),
        shape.batch * keys * 2 * shape.kv_channels(),
    ];
    let views = move |q: &Buffer, kv: &Buffer| {
        let view = |buffer: &Buffer, [stride, offset, first_position]: [usize; 3]| HeadsView {
            buffer: buffer.clone(),
            stride,
            offset,
            first_position,
        };
        let (channels, kv_channels) = (shape.channels(), shape.kv_channels());
        [
            view(q, [channels, 0, firsts[0]]),
            view(kv, [2 * kv_channels, 0, firsts[1]]),
            view(kv, [2 * kv_channels, kv_channels, firsts[1]]),
        ]
    };
    let seen = |row: usize| (firsts[0] - firsts[1] + row % shape.positions + 1).min(keys);
    let lse = (0..shape.rows() * shape.heads).map(|row| (seen(row) as f64).ln() + 0.2);
    let [q, kv] = [
        tensor(Kind::Act, 1, n, Outcome::Same),
        tensor(Kind::Act, 2, n_kv, Outcome::Same),
    ];
    // Results also in f32, where activations are bf16.
    let result = if rate > 0.0 { Kind::Grad } else { Kind::Act };
    let forward = vec![
        q.clone(),
        kv.clone(),
        tensor(result, 3, n, Outcome::Rounded),
        tensor(F32, 4, shape.rows() * shape.heads, Outcome::Products),
    ];
    let backward = vec![
        q,
        kv,
        tensor(Kind::Act, 3, n, Outcome::Same),
        Tensor::new(F32, lse.collect()),
        tensor(Kind::Act, 5, n, Outcome::Same),
        tensor(result, 6, n, Outcome::Rounded),
        tensor(result, 7, n_kv, Outcome::Rounded).of_sections(vec![shape.kv_channels(); 2]),
    ];
    let which = format!("of {shape:?} over {keys} keys, first positions {firsts:?}, dropout {rate}");
    [
        Case::new(format!("{name} forward {which}"), forward, move |b| {
            AttentionForward {
                qkv: views(&b[0], &b[1]),
                out: b[2].clone(),
                lse: b[3].clone(),
                shape,
                dropout: mask(rate),
            }
        }),
        Case::new(format!("{name} backward {which}"), backward, move |b| {
            AttentionBackward {
                forward: AttentionForward {
                    qkv: views(&b[0], &b[1]),
                    out: b[2].clone(),
                    lse: b[3].clone(),
                    shape,
                    dropout: mask(rate),
                },
                dout: b[4].clone(),
                dqkv: views(&b[5], &b[6]),
                accumulate: rate > 0.0,
            }
        }),
    ]
}

const fn shape([batch, positions, heads, kv_heads, head_size]: [usize; 5]) -> AttentionShape {
    AttentionShape {
        batch,
        positions,
        heads,
        kv_heads,
        head_size,
    }
}

/// Of samples whose numbers do not all fit 32 bits, and of heads from the third on.
fn mask(rate: f32) -> Option<DropoutMask> {
    (rate > 0.0).then(|| DropoutMask::new(9, 4, 1, (1 << 32) - 1, rate).of_part(2))
}

fn attention_forward(name: &str, shape: AttentionShape, rate: f32) -> Case {
    let n = shape.rows() * shape.channels();
    let queries = shape.rows() * shape.heads;
    let qkv = numbers(1, shape.rows() * shape.qkv_channels());
    let qkv = qkv.iter().map(|x| 3.0 * x).collect();
    let tensors = vec![
        Tensor::new(Kind::Act, qkv),
        tensor(Kind::Act, 2, n, Outcome::Products),
        tensor(F32, 3, queries, Outcome::Products),
    ];
    Case::new(
        format!("{name} forward of {shape:?}, dropout {rate}"),
        tensors,
        move |b| AttentionForward {
            qkv: shape.views(&b[0]),
            out: b[1].clone(),
            lse: b[2].clone(),
            shape,
            dropout: mask(rate),
        },
    )
}

fn attention_backward(name: &str, shape: AttentionShape, rate: f32) -> Case {
    let n = shape.rows() * shape.channels();
    let (n_qkv, queries) = (shape.rows() * shape.qkv_channels(), shape.rows() * shape.heads);
    // About what forward leaves of so many keys.
    let lse = (0..queries).map(|query| ((query % shape.positions + 1) as f64).ln() + 0.2);
    let tensors = vec![
        tensor(Kind::Act, 1, n_qkv, Outcome::Same),
        tensor(Kind::Act, 2, n, Outcome::Same),
        Tensor::new(F32, lse.collect()),
        tensor(Kind::Act, 4, n, Outcome::Same),
        // Its queries, keys and values, of different sizes.
        tensor(Kind::Act, 5, n_qkv, Outcome::Products).of_sections(vec![
            shape.channels(),
            shape.kv_channels(),
            shape.kv_channels(),
        ]),
    ];
    Case::new(
        format!("{name} backward of {shape:?}, dropout {rate}"),
        tensors,
        move |b| AttentionBackward {
            forward: AttentionForward {
                qkv: shape.views(&b[0]),
                out: b[1].clone(),
                lse: b[2].clone(),
                shape,
                dropout: mask(rate),
            },
            dout: b[3].clone(),
            dqkv: shape.views(&b[4]),
            accumulate: false,
        },
    )
}

/// Texts that begin, and go on: within one part of the keys, at the end of one, over several; heads that share and not,
/// more than a block serves, and widths that are not aligned.
pub(super) fn decode(size: Size) -> Vec<Case> {
    // First position, room of the cache, sizes.
    let sizes: &[(usize, usize, [usize; 5])] = match size {
        Size::Small => &[
            (0, 12, [2, 9, 2, 1, 64]),
            (0, 9, [1, 9, 3, 3, 5]),
            (5, 8, [1, 1, 3, 3, 16]),
            (126, 140, [1, 3, 6, 2, 5]),
            (300, 310, [2, 1, 4, 2, 64]),
            (130, 131, [1, 1, 12, 1, 16]),
        ],
        Size::Large => &[
            (0, 1024, [1, 700, 8, 2, 128]),
            (3000, 4096, [2, 1, 32, 8, 128]),
            (4000, 4100, [1, 77, 8, 2, 64]),
        ],
    };
    let cases = sizes.iter().map(|&(first_position, room, sizes)| {
        let shape = shape(sizes);
        let (rows, cached) = (shape.rows(), shape.batch * room * shape.kv_channels());
        let tensors = vec![
            tensor(Kind::Act, 1, rows * shape.qkv_channels(), Outcome::Same),
            tensor(Kind::Act, 2, cached, Outcome::Exact),
            tensor(Kind::Act, 3, cached, Outcome::Exact),
            tensor(Kind::Act, 4, rows * shape.channels(), Outcome::Products),
        ];
        let name = format!("decode of {shape:?} after {first_position} positions of {room}");
        Case::new(name, tensors, move |b| AttentionDecode {
            qkv: b[0].clone(),
            keys: b[1].clone(),
            values: b[2].clone(),
            out: b[3].clone(),
            shape,
            first_position,
        })
    });
    cases.collect()
}

/// The same bits on every device.
pub(super) fn rotary(size: Size) -> Vec<Case> {
    let llama_2 = RotaryEmbedding {
        base: 10_000.0,
        scaling: None,
    };
    let llama_3_1 = RotaryEmbedding {
        base: 500_000.0,
        scaling: Some(RopeScaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_positions: 8192,
        }),
    };
    let sizes: &[[usize; 5]] = match size {
        Size::Small => &[[2, 37, 3, 1, 64], [1, 9, 2, 2, 10]],
        Size::Large => &[[2, 1000, 32, 8, 128], [1, 1024, 12, 12, 64]],
    };
    let mut cases = Vec::new();
    for shape in sizes.iter().copied().map(shape) {
        for (embedding, first_position) in [(llama_2, 0), (llama_3_1, 131_000)] {
            let tensors = vec![tensor(
                Kind::Act,
                1,
                shape.rows() * shape.qkv_channels(),
                Outcome::Exact,
            )];
            let name = format!("of {shape:?} from position {first_position}");
            let forward = Case::new(format!("rotary forward {name}"), tensors.clone(), move |b| {
                Rotary {
                    qkv: b[0].clone(),
                    shape,
                    embedding,
                    first_position,
                    backward: false,
                }
            });
            let backward = || {
                let name = format!("rotary backward {name}");
                Case::new(name, tensors.clone(), move |b| Rotary {
                    qkv: b[0].clone(),
                    shape,
                    embedding,
                    first_position,
                    backward: true,
                })
            };
            cases.extend([forward, backward()]);
            if size == Size::Small && shape.head_size == 64 {
                cases.push(backward().shifted(3));
            }
        }
    }
    cases
}
