//! Published numbers, which what is laid out must come to, but for padding and buffers.

use ddp_proto::ids::WorldSize;

use super::*;
use crate::config;

const ALL: [&str; 4] = ["ddp", "zero1", "zero2", "zero3"];

/// Of a GPT-2 of so many layers and channels, on nodes of 4 ranks.
fn estimate(sizes: [usize; 2], ranks: u32, strategy: &str, overrides: &[&str]) -> Estimate {
    try_estimate(sizes, ranks, strategy, overrides).unwrap()
}

fn try_estimate(
    [layers, channels]: [usize; 2],
    ranks: u32,
    strategy: &str,
    overrides: &[&str],
) -> Result<Estimate, TrainError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train.yaml");
    let text = format!(
        "model: {{kind: gpt2, n_layer: {layers}, n_head: 4, n_embd: {channels}, block_size: 32}}\ndata: {{train: absent.txt}}\nparallel: {{strategy: {strategy}}}\n"
    );
    std::fs::write(&path, text).unwrap();
    let overrides: Vec<String> = overrides.iter().map(|&words| words.to_owned()).collect();
    let config = config::load_without_data(&path, &overrides).unwrap().config;
    let env = WorkerEnv {
        world_size: WorldSize(ranks),
        local_world_size: ranks.min(4),
        node_count: ranks.div_ceil(4),
        ..WorkerEnv::single()
    };
    Estimate::of(&config, &env)
}

/// Bytes a parameter: of parameters, of gradients but for those in flight, and of the optimizer.
fn bytes_a_parameter(estimate: &Estimate) -> [f64; 3] {
    let held = estimate.held;
    let kinds = [held.params, held.grads - held.in_flight, held.optimizer];
    kinds.map(|bytes| bytes as f64 / estimate.parameters as f64)
}

fn assert_close(found: f64, expected: f64, what: &str) {
    assert!(
        (found - expected).abs() <= 0.02 * expected,
        "{what}: {found}, not {expected}"
    );
}

/// Rajbhandari et al. 2020, over 8 ranks: of ten billion parameters 160, 55, 37.5 and 20 GB.
#[test]
fn ten_billion_parameters_in_bf16_take_16_5_and_a_half_3_and_three_quarters_and_2_bytes_each() {
    let f32s = ["train.precision=bf16"];
    let bf16s = ["train.precision=bf16", "parallel.reduce_dtype=bf16"];
    for (overrides, published) in [
        (&bf16s[..], [16.0, 5.5, 3.75, 2.0]),
        (&f32s[..], [18.0, 7.5, 4.0, 2.25]),
    ] {
        for (strategy, expected) in ALL.into_iter().zip(published) {
            let told = estimate([48, 4096], 8, strategy, overrides);
            let found = bytes_a_parameter(&told).iter().sum();
            assert_close(found, expected, strategy);
            let (padding, sum) = (told.held.padding as f64, expected * told.parameters as f64);
            assert!(padding < 0.01 * sum, "{strategy}: {padding}");
        }
    }
}

#[test]
fn in_f32_it_is_4_4_and_8_bytes_whole_and_sharded_over_4_and_8() {
    for (strategy, ranks, expected) in [
        ("ddp", 8, [4.0, 4.0, 8.0]),
        ("zero1", 4, [4.0, 4.0, 2.0]),
        ("zero2", 4, [4.0, 1.0, 2.0]),
        ("zero3", 4, [1.0, 1.0, 2.0]),
        ("zero3", 8, [0.5, 0.5, 1.0]),
    ] {
        let told = estimate([24, 2048], ranks, strategy, &[]);
        for (found, expected) in bytes_a_parameter(&told).into_iter().zip(expected) {
            assert_close(found, expected, &format!("{strategy} over {ranks}"));
        }
    }
}

#[test]
fn gradients_that_are_added_up_take_four_bytes_and_whole_ones_give_the_saving_up() {
    let grads = |more: &str| {
        let overrides = ["train.precision=bf16", "parallel.reduce_dtype=bf16", more];
        bytes_a_parameter(&estimate([24, 2048], 8, "zero2", &overrides))[1]
    };
    assert_close(grads("train.grad_accumulation=4"), 0.5, "sharded");
    assert_close(grads("parallel.accumulate=full"), 0.25, "nothing is between");
    let both = [
        "train.precision=bf16",
        "parallel.accumulate=full",
        "train.grad_accumulation=4",
    ];
    let whole = estimate([24, 2048], 8, "zero2", &both);
    assert_close(bytes_a_parameter(&whole)[1], 4.0, "whole");
}

#[test]
fn an_optimizer_with_less_state_takes_less() {
    for (kind, expected) in [("adamw", 12.0), ("lion", 8.0), ("sgd", 8.0)] {
        let kind = format!("train.optimizer.kind={kind}");
        let told = estimate([12, 512], 1, "ddp", &["train.precision=bf16", &kind]);
        assert_close(bytes_a_parameter(&told)[2], expected, &kind);
    }
}

/// In units of (N−1)/N of all gradients or parameters in f32. With resharding `zero3` sends a little less than 3k: what
/// backward begins with is still there from forward, and what it does not read is not gathered again.
#[test]
fn a_step_sends_the_multiples_of_the_published_table() {
    type Multiple = fn(u64) -> u64;
    let table: [(&str, &str, bool, Multiple); 8] = [
        ("ddp", "sharded", true, |_| 2),
        ("zero1", "sharded", true, |_| 2),
        ("zero2", "sharded", true, |k| k + 1),
        ("zero2", "full", true, |_| 2),
        ("zero3", "sharded", true, |k| 3 * k),
        ("zero3", "sharded", false, |k| 2 * k),
        ("zero3", "full", true, |k| 2 * k + 1),
        ("zero3", "full", false, |k| k + 1),
    ];
    for (strategy, accumulate, reshard, multiple) in table {
        for k in [1, 4, 8] {
            let overrides = [
                format!("train.grad_accumulation={k}"),
                format!("parallel.accumulate={accumulate}"),
                format!("parallel.reshard_after_forward={reshard}"),
            ];
            let told = estimate([24, 1024], 8, strategy, &overrides.each_ref().map(String::as_str));
            let unit = told.padded as f64 * 4.0 * 7.0 / 8.0;
            let expected = multiple(k) as f64 * unit;
            let what = format!("{strategy}, {accumulate}, reshard {reshard}, {k} micro-batches");
            assert_close(told.sent.total() as f64, expected, &what);
        }
    }
}

#[test]
fn copies_exchange_their_shards_once_a_step() {
    for k in [1, 3] {
        let accumulation = format!("train.grad_accumulation={k}");
        for strategy in ["zero1", "zero2", "zero3"] {
            let told = estimate([2, 64], 8, strategy, &["parallel.shard_group=2", &accumulation]);
            // An all-reduce of half of all over 4 copies.
            let expected = 2 * 3 * (told.padded / 2 / 4) * 4;
            assert_eq!(
                told.sent.along(&[Axis::Replicate]),
                expected,
                "{strategy}, {k} micro-batches"
            );
        }
        let all = estimate([2, 64], 8, "ddp", &[&accumulation]).sent;
        assert_eq!(all.along(&[Axis::Replicate]), all.total());
    }
    assert_eq!(
        estimate([2, 64], 8, "zero3", &[]).sent.along(&[Axis::Replicate]),
        0
    );
    assert_eq!(estimate([2, 64], 1, "zero3", &[]).sent, StepTraffic::default());
}

#[test]
fn the_second_use_of_a_tied_weight_has_a_sum_of_its_own_where_micro_batches_are_added_up() {
    let grads = |strategy, overrides: &[&str]| {
        let held = estimate([2, 64], 2, strategy, overrides).held;
        held.grads - held.in_flight
    };
    let one = grads("ddp", &[]);
    let embedding = 4 * 256 * 64;
    assert_eq!(grads("ddp", &["train.grad_accumulation=2"]), one + embedding);
    let sharded = ["train.grad_accumulation=2"];
    let full = ["train.grad_accumulation=2", "parallel.accumulate=full"];
    assert_eq!(grads("zero1", &sharded), grads("zero1", &[]) + embedding);
    assert_eq!(grads("zero3", &sharded), grads("zero3", &[]));
    assert!(grads("zero3", &full) > embedding + grads("zero3", &[]));
}

#[test]
fn muon_is_refused_where_no_rank_has_a_whole_matrix() {
    let muon = "train.optimizer.kind=muon";
    assert!(try_estimate([2, 64], 4, "zero2", &[muon]).is_ok());
    let refused = try_estimate([2, 64], 4, "zero2", &[muon, "parallel.tensor=2"]).unwrap_err();
    insta::assert_snapshot!(refused, @r"
    `train.optimizer.kind: muon` makes whole matrices orthogonal, but with `parallel.tensor: 2` each rank has only a part of each matrix
      hint: set `parallel.tensor: 1` and split the model with `parallel.strategy: zero3` or `parallel.pipeline.stages`, or use a different optimizer
    ");
}

/// What a layer makes of an estimate, by how much a model of one layer more comes to more.
fn of_a_layer(channels: usize, overrides: &[&str], number: fn(&Estimate) -> u64) -> u64 {
    let across = ["parallel.tensor_across_nodes=true", "model.block_size=2048"];
    let overrides = [&across[..], overrides].concat();
    let of = |layers| number(&estimate([layers, channels], 8, "ddp", &overrides));
    of(4) - of(3)
}

/// Korthikanti et al. 2022: of A bytes of activations a rank sends 8 (t − 1)/t · A a layer and micro-batch; with shared rows as
/// much if gathered inputs are kept, and 10 (t − 1)/t · A if they are gathered again for the gradients of weights, as here.
#[test]
fn a_layer_of_32_mib_of_activations_sends_235_mb_over_8_tensor_ranks_and_294_mb_with_shared_rows() {
    let sent = |overrides: &[&str]| {
        let overrides = [
            &["parallel.tensor=8", "model.n_head=32", "train.micro_batch=1"][..],
            overrides,
        ]
        .concat();
        of_a_layer(4096, &overrides, |estimate| estimate.sent.activations)
    };
    assert_eq!(2048 * 4096 * 4, 32 << 20);
    assert_eq!(sent(&[]), 234_881_024);
    assert_eq!(sent(&["parallel.sequence=true"]), 293_601_280);
}

/// Keys and values of K bytes are gathered in forward and in backward, and their gradients reduce-scattered; or all three
/// go round.
#[test]
fn a_layer_of_c_context_ranks_sends_3_times_c_minus_1_of_c_parts_of_keys_and_values() {
    let keys_and_values = 2 * 2048 * 256 * 4;
    for (context, algorithm) in [2, 4, 8].into_iter().flat_map(|c| [(c, "gather"), (c, "ring")]) {
        let layout = format!("parallel.context={context}");
        let algorithm = format!("parallel.context_algorithm={algorithm}");
        let overrides = ["train.micro_batch=1", &layout, &algorithm];
        let sent = of_a_layer(256, &overrides, |told| {
            told.sent.exchanged_along(&[Axis::Context])
        });
        assert_eq!(sent, 3 * (context - 1) * keys_and_values / context, "{layout}");
        let all = of_a_layer(256, &overrides, |told| told.sent.activations);
        assert_eq!(sent, all, "{layout}");
    }
}

/// Of the layer of Korthikanti et al. 2022, table 2: with 16 bits, attention's matrices and the masks of dropout kept.
#[test]
fn a_layer_of_gpt_3_keeps_less_than_the_published_2869_579_and_359_mb() {
    let [s, b, h, a, t] = [2048, 1, 12_288, 96, 8_u64];
    let published = |t| s * b * h * 10 + s * b * h * 24 / t + 5 * a * s * s * b / t;
    let published_with_sequence = (s * b * h * 34 + 5 * a * s * s * b) / t;
    assert_eq!(
        [published(1), published(t), published_with_sequence],
        [2_868_903_936, 578_813_952, 358_612_992]
    );
    // Here 16 bits are kept of the inputs of attention and feed-forward, of q, k, v, of what attention mixed, and of the four
    // widths before the GELU; and 32 bits of a statistic a head and position. Norms, the GELU, attention's matrices and masks
    // are made again.
    let kept = |rows: u64, t: u64| s * b * h * 2 * 2 / rows + s * b * h * 2 * (3 + 1 + 4) / t;
    let statistics = |t: u64| 4 * a * s * b / t;
    let held = |layers, overrides: &[&str]| {
        let across = ["parallel.tensor_across_nodes=true", "model.block_size=2048"];
        let sizes = ["train.precision=bf16", "model.n_head=96", "train.micro_batch=1"];
        let overrides = [&across[..], &sizes, overrides].concat();
        estimate([layers, 12_288], 8, "ddp", &overrides).held.activations
    };
    let tensor = "parallel.tensor=8";
    for (kept, statistics, overrides) in [
        (kept(1, 1), statistics(1), &[][..]),
        (kept(1, t), statistics(t), &[tensor]),
        (kept(t, t), statistics(t), &[tensor, "parallel.sequence=true"]),
    ] {
        let found = held(11, overrides) - held(3, overrides);
        // Statistics find a place in holes that there are between places of different sizes.
        let most = 8 * (kept + statistics) + 2 * s * b * h;
        assert!(
            (8 * kept..=most).contains(&found),
            "{overrides:?}: {found}, kept {kept}"
        );
    }
    assert_eq!(
        [kept(1, 1), kept(1, t), kept(t, t)],
        [503_316_480, 150_994_944, 62_914_560]
    );
}

/// Each boundary and direction: b · s · h in 16 bits; divided by t where rows are shared.
#[test]
fn a_boundary_between_stages_of_2_samples_of_2048_positions_of_4096_channels_is_crossed_by_34_mb() {
    let sent = |overrides: &[&str]| {
        let common = [
            "train.precision=bf16",
            "model.block_size=2048",
            "model.n_head=32",
            "train.micro_batch=2",
            "train.grad_accumulation=3",
            "parallel.pipeline.stages=2",
        ];
        let overrides = [&common[..], overrides].concat();
        estimate([2, 4096], 4, "ddp", &overrides).sent.pipeline
    };
    assert_eq!(sent(&[]), 3 * 33_554_432);
    let shared = ["parallel.tensor=2", "parallel.sequence=true"];
    assert_eq!(sent(&shared), 3 * 33_554_432 / 2);
}

/// Forward gathers keys and values, backward gathers them again and scatters their gradients: 3(c − 1)/c·K a layer.
#[test]
fn context_ranks_exchange_keys_and_values_three_times() {
    let overrides = [
        "parallel.context=4",
        "train.micro_batch=2",
        "train.grad_accumulation=3",
    ];
    let keys = 2 * (2 * 32 * 64 * 4);
    for strategy in ALL {
        let sent = estimate([5, 64], 4, strategy, &overrides).sent;
        assert_eq!(sent.activations, 3 * 5 * (3 * 3 * keys / 4), "{strategy}");
        assert_eq!(sent.along(&[Axis::Context]), sent.total(), "{strategy}");
    }
}

/// Pipeline × data × tensor.
#[test]
fn what_goes_along_each_axis_is_counted_apart() {
    let sizes = [4, 64];
    let activation = 32 * 64 * 4;
    let overrides = [
        "parallel.tensor=2",
        "parallel.pipeline.stages=2",
        "train.micro_batch=1",
        "train.grad_accumulation=3",
    ];
    for strategy in ALL {
        let sent = estimate(sizes, 8, strategy, &overrides).sent;
        let kinds = [sent.grads, sent.params, sent.activations, sent.pipeline];
        assert_eq!(sent.total(), kinds.iter().sum::<u64>(), "{strategy}: {sent:?}");
        let [pipeline, replicate, shard, .., tensor] = Axis::ALL.map(|axis| sent.along(&[axis]));
        assert_eq!(
            (replicate == 0, shard == 0),
            (strategy != "ddp", strategy == "ddp"),
            "{sent:?}"
        );
        assert_eq!(tensor, sent.activations, "{strategy}: no norms are shared");
        // Two layers on the first stage, and the embedding's rows.
        assert_eq!(tensor, 3 * (2 * 4 * activation + activation), "{strategy}");
        // A message to the next stage, and the tied embedding's gradient once.
        assert_eq!(sent.pipeline, 3 * activation, "{strategy}");
        assert_eq!(pipeline - sent.pipeline, 4 * 128 * 64, "{strategy}");
    }
}
