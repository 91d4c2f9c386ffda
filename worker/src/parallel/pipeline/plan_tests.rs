//! What a configuration leads to, and what it is refused for.

use super::*;

const ALL: [PipelineSchedule; 6] = [
    PipelineSchedule::GPipe,
    PipelineSchedule::OneFOneB,
    PipelineSchedule::Interleaved,
    PipelineSchedule::ZbH1,
    PipelineSchedule::Zbv,
    PipelineSchedule::Greedy,
];

fn of(schedule: PipelineSchedule, stages: usize) -> Pipeline {
    Pipeline {
        stages,
        schedule,
        ..Pipeline::default()
    }
}

fn plan(config: &Pipeline, micro_batches: usize, layers: usize) -> Result<PipelinePlan, PlanError> {
    PipelinePlan::new(config, micro_batches, &LayerCosts::equal(layers))
}

fn refusal(config: &Pipeline, micro_batches: usize) -> String {
    let error = PipelinePlan::new(config, micro_batches, &LayerCosts::equal(8)).unwrap_err();
    format!("{}: {error}", error.key)
}

fn text(row: &[Action]) -> String {
    let words: Vec<String> = row.iter().map(ToString::to_string).collect();
    words.join(" ")
}

#[test]
fn without_a_pipeline_one_micro_batch_comes_after_the_other() {
    for kind in ALL {
        let plan = plan(&of(kind, 1), 3, 2).unwrap();
        assert_eq!(text(&plan.row(0, 3)), "0F0 0B0 0F1 0B1 0F2 0B2");
        assert_eq!(text(&plan.row(0, 1)), "0F0 0B0");
        assert_eq!(text(&plan.evaluation_row(0, 2)), "0F0 0F1");
        assert_eq!(plan.chunks_of(0), [0..4]);
        assert_eq!(plan.bubble(), 0.0);
    }
}

#[test]
fn one_forward_one_backward_on_two_ranks() {
    let plan = plan(&of(PipelineSchedule::OneFOneB, 2), 2, 4).unwrap();
    assert_eq!(
        text(&plan.row(0, 2)),
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1"
    );
    assert_eq!(
        text(&plan.row(1, 2)),
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    );
    assert_eq!(text(&plan.evaluation_row(1, 1)), "1RECV_F0 1F0");
    assert_eq!([plan.chunks_of(0), plan.chunks_of(1)], [[0..3], [3..6]]);
}

#[test]
fn every_schedule_is_there_for_every_number_of_micro_batches_that_it_has() {
    for kind in ALL {
        for stages in [2, 3, 4] {
            for micro_batches in 1..=9 {
                check_short_steps(&plan(&of(kind, stages), micro_batches, 30).unwrap());
            }
        }
    }
}

/// No rank waits in a circle, however many micro-batches a step or an evaluation has.
fn check_short_steps(plan: &PipelinePlan) {
    let placement = plan.placement();
    for micro_batches in 1..=plan.micro_batches() {
        for (purpose, row) in [
            (
                Purpose::Training,
                PipelinePlan::row as fn(&PipelinePlan, usize, usize) -> Vec<Action>,
            ),
            (Purpose::Evaluation, PipelinePlan::evaluation_row),
        ] {
            let rows = (0..placement.ranks()).map(|rank| row(plan, rank, micro_batches));
            let step = Schedule::new(placement.clone(), micro_batches, rows.collect());
            assert_eq!(validate(&step, purpose), Ok(()), "{micro_batches} micro-batches");
        }
    }
}

#[test]
fn layers_are_divided_by_cost_or_as_they_are_given() {
    let mut config = of(PipelineSchedule::OneFOneB, 4);
    let sizes = |plan: PipelinePlan| -> Vec<usize> {
        let layers = plan.layers().iter();
        layers.map(ExactSizeIterator::len).collect()
    };
    assert_eq!(sizes(plan(&config, 4, 30).unwrap()), [8, 8, 7, 7]);
    config.layers = Some(vec![2, 2, 2, 4]);
    let given = plan(&config, 4, 10).unwrap();
    assert_eq!(given.chunks_of(3), [7..12]);
    assert_eq!(sizes(given), [2, 2, 2, 4]);
    config.layers = None;
    assert_ne!(
        plan(&config, 4, 10).unwrap().signature(),
        plan(&config, 4, 11).unwrap().signature()
    );
}

#[test]
fn what_is_no_pipeline_is_refused_in_words() {
    let zbv = of(PipelineSchedule::Zbv, 2);
    let several = Pipeline {
        chunks: Some(2),
        ..of(PipelineSchedule::OneFOneB, 2)
    };
    insta::assert_snapshot!(refusal(&several, 4), @r"
    parallel.pipeline.schedule: 1F1B does not support 2 ranks, 2 chunks per rank and 4 micro-batches: 1F1B has one chunk per rank; use interleaved 1F1B for several
      hint: change `parallel.pipeline.chunks` (chunks per rank), `train.grad_accumulation` (micro-batches) or `parallel.pipeline.schedule`
    ");
    insta::assert_snapshot!(refusal(&of(PipelineSchedule::OneFOneB, 9), 3), @r"
    parallel.pipeline.stages: 8 layers cannot be divided on 9 stages: each stage needs a layer
      hint: use fewer pipeline ranks or chunks
    ");
    let layers = Pipeline {
        layers: Some(vec![4, 3]),
        ..zbv.clone()
    };
    insta::assert_snapshot!(refusal(&layers, 4), @r"
    parallel.pipeline.layers: `parallel.pipeline.layers` has 2 numbers that add up to 7 layers, but there are 4 stages and `model.n_layer` is 8
      hint: give one number per stage (ranks × chunks), or leave it out to divide the layers by cost
    ");
    let alone = Pipeline {
        chunks: Some(2),
        ..of(PipelineSchedule::Zbv, 1)
    };
    insta::assert_snapshot!(refusal(&alone, 4), @r"
    parallel.pipeline.chunks: `parallel.pipeline.chunks` is set, but `parallel.pipeline.stages` is 1: there is no pipeline
      hint: set `parallel.pipeline.stages`, or leave it out
    ");
}

#[test]
fn sizes_beyond_all_pipelines_are_refused_before_anything_is_made_of_them() {
    let refused = |ranks, chunks, micro_batches| {
        let plan = PipelinePlan::named("interleaved", ranks, Some(chunks), micro_batches);
        plan.unwrap_err().to_string()
    };
    insta::assert_snapshot!(refused(1 << 40, usize::MAX, 8), @r"
    a schedule of 1099511627776 ranks × 18446744073709551615 chunks × 8 micro-batches has more than 65536 forward passes
      hint: use fewer and larger micro-batches
    ");
    refused(1 << 12, 1 << 12, 1);
}

#[test]
fn a_rank_says_which_stages_it_has_also_where_it_is_behind_its_row() {
    let words = |kind| plan(&of(kind, 2), 4, 8).unwrap().behind_row_in_words(0);
    assert_eq!(
        words(PipelineSchedule::OneFOneB),
        "stage 0 of 2, reduction and update"
    );
    assert_eq!(
        words(PipelineSchedule::Zbv),
        "stages 0, 3 of 4, reduction and update"
    );
}
