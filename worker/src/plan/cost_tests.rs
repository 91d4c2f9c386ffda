//! Published numbers, and formulas against each other.

use super::*;
use crate::config::Accumulate;
use crate::device::DType;

const GB: u64 = 1_000_000_000;
const ALL: [Strategy; 4] = [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];

fn footprint(strategy: Strategy, ranks: u64, dtype: DType, parameters: u64) -> Footprint {
    Footprint::of(&Setting::simple(strategy, ranks, dtype), parameters)
}

#[test]
fn ten_billion_parameters_in_bf16_on_8_ranks_take_160_55_37_and_20_gb() {
    let totals = ALL.map(|strategy| footprint(strategy, 8, DType::Bf16, 10 * GB).total());
    assert_eq!(totals, [160 * GB, 55 * GB, 37 * GB + GB / 2, 20 * GB]);
}

#[test]
fn gradients_in_f32_take_two_bytes_more_where_they_are_held() {
    let totals = ALL.map(|strategy| {
        let mut setting = Setting::simple(strategy, 8, DType::Bf16);
        (setting.dtypes.reduced, setting.dtypes.accumulated) = (DType::F32, DType::F32);
        Footprint::of(&setting, 10 * GB).total()
    });
    assert_eq!(totals, [180 * GB, 75 * GB, 40 * GB, 22 * GB + GB / 2]);
}

#[test]
fn the_published_sizes_in_bf16() {
    let total = |strategy, parameters| footprint(strategy, 8, DType::Bf16, parameters).total();
    assert_eq!(total(Strategy::Ddp, 7 * GB), 112 * GB);
    assert_eq!(total(Strategy::Ddp, 12 * GB), 192 * GB);
    assert_eq!(total(Strategy::Zero3, 12 * GB), 24 * GB);
}

#[test]
fn seven_billion_parameters_in_f32_whole_and_sharded_over_4_and_8() {
    // Tenths of a GB of parameters, gradients and moments.
    for (strategy, ranks, tenths) in [
        (Strategy::Ddp, 8, [280, 280, 560]),
        (Strategy::Zero1, 4, [280, 280, 140]),
        (Strategy::Zero2, 4, [280, 70, 140]),
        (Strategy::Zero3, 4, [70, 70, 140]),
        (Strategy::Zero3, 8, [35, 35, 70]),
    ] {
        let [params, grads, optimizer] = tenths.map(|tenth: u64| tenth * GB / 10);
        let expected = Footprint {
            params,
            grads,
            optimizer,
        };
        let found = footprint(strategy, ranks, DType::F32, 7 * GB);
        assert_eq!(found, expected, "{strategy:?} over {ranks}");
    }
    assert_eq!(footprint(Strategy::Ddp, 1, DType::F32, 7 * GB).total(), 112 * GB);
    assert_eq!(footprint(Strategy::Zero3, 4, DType::F32, 7 * GB).total(), 28 * GB);
    assert_eq!(footprint(Strategy::Zero3, 8, DType::F32, 7 * GB).total(), 14 * GB);
}

#[test]
fn gradients_that_are_added_up_in_f32_take_two_bytes_more() {
    let mut setting = Setting::simple(Strategy::Zero2, 8, DType::Bf16);
    setting.micro_batches = 4;
    setting.dtypes.accumulated = DType::F32;
    assert_eq!(Footprint::of(&setting, 8 * GB).grads, 4 * GB);
    setting.accumulate = Accumulate::Full;
    assert_eq!(
        Footprint::of(&setting, 8 * GB).grads,
        32 * GB,
        "the saving is given up"
    );
    setting.micro_batches = 1;
    assert_eq!(
        Footprint::of(&setting, 8 * GB).grads,
        4 * GB,
        "nothing is between"
    );
}

#[test]
fn an_optimizer_with_less_state_takes_less() {
    let mut setting = Setting::simple(Strategy::Ddp, 1, DType::Bf16);
    let totals = [2, 1, 0].map(|slots| {
        setting.state_slots = slots;
        Footprint::of(&setting, GB).optimizer
    });
    assert_eq!(
        totals,
        [12 * GB, 8 * GB, 4 * GB],
        "AdamW; Lion, SGD; SGD without momentum"
    );
}

#[test]
fn a_size_that_ranks_do_not_divide_is_rounded_up() {
    let found = footprint(Strategy::Zero3, 8, DType::F32, 17);
    assert_eq!((found.params, found.optimizer), (12, 24));
}

const RANKS: u64 = 8;
const ELEMENTS: u64 = 1 << 20;

/// (N−1)/N of all elements in f32.
const UNIT: u64 = (RANKS - 1) * ELEMENTS / RANKS * 4;

fn setting(
    strategy: Strategy,
    accumulate: Accumulate,
    reshard_after_forward: bool,
    micro_batches: u64,
) -> Setting {
    Setting {
        micro_batches,
        accumulate,
        reshard_after_forward,
        ..Setting::simple(strategy, RANKS, DType::F32)
    }
}

#[test]
fn the_multiples_of_the_published_table() {
    use Accumulate::{Full, Sharded};
    use Strategy::{Ddp, Zero1, Zero2, Zero3};
    type Multiple = fn(u64) -> u64;
    let table: [(Strategy, Accumulate, bool, Multiple); 8] = [
        (Ddp, Sharded, true, |_| 2),
        (Zero1, Sharded, true, |_| 2),
        (Zero2, Sharded, true, |k| k + 1),
        (Zero2, Full, true, |_| 2),
        (Zero3, Sharded, true, |k| 3 * k),
        (Zero3, Sharded, false, |k| 2 * k),
        (Zero3, Full, true, |k| 2 * k + 1),
        (Zero3, Full, false, |k| k + 1),
    ];
    for (strategy, accumulate, reshard, multiple) in table {
        for k in [1, 4, 8] {
            let found = Traffic::of(&setting(strategy, accumulate, reshard, k), ELEMENTS);
            let what = format!("{strategy:?}, {accumulate:?}, reshard {reshard}, {k} micro-batches");
            assert_eq!(found.total(), multiple(k) * UNIT, "{what}");
        }
    }
}

#[test]
fn gradients_and_parameters_count_in_their_own_types() {
    let mut setting = setting(Strategy::Zero3, Accumulate::Sharded, true, 4);
    setting.dtypes.params = DType::Bf16;
    let found = Traffic::of(&setting, ELEMENTS);
    assert_eq!((found.grads, found.params), (4 * UNIT, 8 * UNIT / 2));
    setting.dtypes.reduced = DType::Bf16;
    assert_eq!(Traffic::of(&setting, ELEMENTS).grads, 4 * UNIT / 2);
}

#[test]
fn eight_micro_batches_save_seven_eighths_of_the_traffic_of_ddp() {
    let ddp = |k| Traffic::of(&setting(Strategy::Ddp, Accumulate::Sharded, true, k), ELEMENTS).total();
    assert_eq!(ddp(8), ddp(1), "one reduction a step");
    // So many samples take 8 steps of one micro-batch, or 1 step of 8.
    assert_eq!((8 * ddp(1) - ddp(8)) * 1000, 875 * 8 * ddp(1));
}

#[test]
fn one_rank_moves_nothing() {
    let mut setting = setting(Strategy::Zero3, Accumulate::Sharded, true, 4);
    setting.ranks = 1;
    assert_eq!(Traffic::of(&setting, ELEMENTS), Traffic::default());
}

#[test]
fn gpt2_124m_at_1024_positions() {
    let model = Model {
        kind: ModelKind::Gpt2,
        n_layer: 12,
        n_head: 12,
        n_embd: 768,
        block_size: 1024,
        vocab_size: None,
        init_from: None,
        dropout: 0.0,
    };
    let of = |recompute| Work::of(&model, 50_304, recompute);
    // The blocks' matrices have 84,934,656 parameters. A token sees 512.5 positions on average.
    let (blocks, attention) = (84_934_656, 4 * 12 * 768 * 1025 / 2);
    assert_eq!(
        of(Recompute::None).total(),
        6 * (blocks + 50_304 * 768) + 3 * attention
    );
    // Forward once more, of the blocks alone, without the last of their products: a third of the matrices.
    assert_eq!(of(Recompute::Full).repeated, 2 * blocks * 2 / 3 + attention);
    assert_eq!(of(Recompute::Selective).repeated * 3, 2 * blocks);
}

/// One layer, 128 wide, 4,096 positions: bound by attention and full of positions.
#[test]
fn neither_position_embeddings_nor_masked_positions_are_counted() {
    let model = Model {
        kind: ModelKind::Gpt2,
        n_layer: 1,
        n_head: 1,
        n_embd: 128,
        block_size: 4096,
        vocab_size: None,
        init_from: None,
        dropout: 0.0,
    };
    let products = 6 * (12 * 128 * 128 + 256 * 128);
    let scores_and_sums = 6 * 128 * 4097;
    assert_eq!(
        Work::of(&model, 256, Recompute::None).total(),
        products + scores_and_sums
    );
}

#[test]
fn four_mi_tokens_are_32_micro_batches_of_4_on_8_ranks() {
    let batch = GlobalBatch {
        ranks: 8,
        accumulation: 32,
        micro_batch: 4,
        block_size: 4096,
    };
    assert_eq!((batch.samples(), batch.tokens()), (1024, 4_194_304));
}
