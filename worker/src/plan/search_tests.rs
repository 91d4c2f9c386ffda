//! What the search finds: the seeds' rule of thumb for 70 billion parameters, and that it keeps its promises.

use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::{GlobalRank, WorldSize};

use super::*;
use crate::config;
use crate::costs::{Accelerator, Cluster};
use crate::plan::{Advice, Comparison, Estimate, StepTraffic};
use crate::train::strategy::pipeline_plan;

const GB: f64 = 1e9;

fn load(text: &str, overrides: &[String]) -> TrainConfig {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("train.yaml");
    std::fs::write(&path, text).unwrap();
    config::load_without_data(&path, overrides).unwrap().config
}

fn with(text: &str, overrides: &[&str]) -> TrainConfig {
    let overrides: Vec<String> = overrides.iter().map(|&words| words.to_owned()).collect();
    load(text, &overrides)
}

/// 80 layers of 8,192 channels: 69 billion parameters.
const LLAMA_70B: &str = "\
model: {kind: llama, n_layer: 80, n_head: 64, n_kv_head: 8, n_embd: 8192, n_inner: 28672, block_size: 8192, vocab_size: 32000}
data: {train: absent.txt}
train: {precision: bf16, micro_batch: 2}
parallel: {reduce_dtype: bf16}
";

/// 94 layers of 128 experts: 235 billion parameters, of which a token passes 20.
const MIXTRAL_235B: &str = "\
model: {kind: mixtral, n_layer: 94, n_head: 64, n_kv_head: 4, n_embd: 4096, n_inner: 1536, block_size: 4096, vocab_size: 151936, experts: {count: 128, top_k: 8, capacity: 1.25}}
data: {train: absent.txt}
train: {precision: bf16, micro_batch: 1, grad_accumulation: 4, recompute: selective}
parallel: {reduce_dtype: bf16}
";

/// Small, on nodes of four.
const SMALL: &str = "\
model: {kind: gpt2, n_layer: 6, n_head: 4, n_embd: 64, block_size: 32, vocab_size: 256}
data: {train: absent.txt}
train: {micro_batch: 2, grad_accumulation: 4}
";

/// H100s that reach two fifths of their rate, on nodes of eight with one adapter each.
fn h100s(nodes: u64) -> Machines {
    let sheet = Accelerator::named("h100").unwrap();
    Machines {
        cluster: Cluster {
            nodes,
            ranks_a_node: 8,
            link: Some(sheet.link),
            network: Some(50e9),
        },
        memory: Some(78_000_000_000),
        flops: Some(0.4 * sheet.flops(config::Precision::Bf16)),
        has_own_memory: true,
    }
}

fn small_machines(memory: u64) -> Machines {
    Machines {
        cluster: Cluster {
            nodes: 2,
            ranks_a_node: 4,
            link: Some(1e9),
            network: Some(1e8),
        },
        memory: Some(memory),
        flops: Some(1e11),
        has_own_memory: false,
    }
}

fn search(config: &TrainConfig, machines: &Machines, wanted: usize) -> LayoutSearch {
    bounded_search(config, machines, wanted, usize::MAX).0
}

/// Looks at `most` layouts at most. Returns how many it looked at, too.
fn bounded_search(
    config: &TrainConfig,
    machines: &Machines,
    wanted: usize,
    most: usize,
) -> (LayoutSearch, usize) {
    let mut left = 0..most;
    let mut may_go_on = || left.next().is_some();
    let search = LayoutSearch::of(config, machines, wanted, &mut may_go_on);
    (search.unwrap().expect("a search"), most - left.len())
}

#[test]
fn seventy_billion_parameters_on_64_gpus_have_tp_8_pp_4_dp_2_among_the_best() {
    // 128 samples of 8,192 tokens a step. The rule of thumb is a few per cent behind ZeRO-2 over 8 nodes.
    let found = search(&with(LLAMA_70B, &[]), &h100s(8), 5);
    let layouts = layouts(&found);
    let thumb = layouts.iter().position(|layout| layout == "pp 4 × dp 2 × tp 8");
    let thumb = &found.best[thumb.unwrap_or_else(|| panic!("{layouts:?}"))];
    assert_eq!(thumb.candidate.layers, [20; 4]);
    assert_eq!(thumb.candidate.batch.accumulation, 32);
}

/// 2,048 samples of 4,096 tokens a step, on the best mesh of 512 GPUs, and with the experts divided on top, where a step takes
/// an eighth longer.
#[test]
fn two_hundred_billion_parameters_on_512_gpus_fit_with_divided_experts() {
    let (config, machines) = (with(MIXTRAL_235B, &[]), h100s(64));
    let mut search = Search {
        config: &config,
        machines: &machines,
        memory: machines.memory.unwrap(),
        wanted: 2,
        fit: BTreeMap::new(),
        too_large: BTreeMap::new(),
        slower: BTreeSet::new(),
    };
    for draft in drafts(&config, &machines).unwrap() {
        let parallel = &draft.config.parallel;
        let cell = (parallel.pipeline.stages, parallel.context, parallel.tensor);
        if cell == (32, 2, 2) && parallel.expert <= 2 {
            search.look_at(&draft).unwrap();
        }
    }
    let found = search.result(Vec::new());
    let meshes = ["pp 32 × dp 4 × cp 2 × tp 2", "pp 32 × dp 4 × cp 2 × tp 2, ep 2"];
    assert_eq!(layouts(&found), meshes);
    let [whole, divided] = [0, 1].map(|index: usize| found.best[index].seconds());
    assert!(divided < 1.15 * whole, "{divided} and {whole} s");
}

fn layouts(search: &LayoutSearch) -> Vec<String> {
    let best = search.best.iter();
    best.map(|found| found.candidate.mesh.to_string()).collect()
}

/// The bounds leave little to rehearse: a search without them did not end.
#[test]
fn of_the_layouts_on_256_gpus_few_are_looked_at() {
    let (config, machines) = (with(LLAMA_70B, &[]), h100s(32));
    let all = drafts(&config, &machines).unwrap().len();
    let (found, looks) = bounded_search(&config, &machines, 5, all / 3);
    assert!(all > 300 && looks < all / 3, "{looks} of {all}");
    assert_eq!((found.best.len(), found.not_searched.len()), (5, 0));
}

/// Every layout is estimated in full and compared.
#[test]
fn nothing_that_fits_is_faster_than_what_is_found() {
    let config = with(SMALL, &[]);
    let all = search(&config, &small_machines(1 << 40), 100).best;
    let mut held: Vec<u64> = all.iter().map(|found| found.candidate.held).collect();
    held.sort_unstable();
    let machines = small_machines(held[held.len() / 3]);
    let mut fastest = f64::INFINITY;
    for draft in drafts(&config, &machines).unwrap() {
        let planned = PlannedMesh::new(draft.config.clone(), &machines, draft.busy);
        let Some(planned) = possible(planned).unwrap() else {
            continue;
        };
        let floor = draft.floor;
        for strategy in [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3] {
            let shared = planned.sharing(strategy, None).unwrap();
            let least = shared.candidate(&planned.kept(), u64::MAX).unwrap().held;
            let found = Candidate::of(&under(&draft.config, strategy), &machines).unwrap();
            let (seconds, what) = (
                found.seconds.unwrap(),
                format!("{} {}", draft.mesh, found.schedule),
            );
            assert!(seconds >= floor, "{what}: {seconds}, and at least {floor} s");
            assert!(
                found.held >= least,
                "{what}: {}, and at least {least} bytes",
                found.held
            );
            if found.fits == Some(true) {
                fastest = fastest.min(seconds);
            }
        }
    }
    let (found, looks) = bounded_search(&config, &machines, 1, usize::MAX);
    assert!(found.best[0].seconds() <= fastest * (1.0 + SAME));
    assert!(found.best[0].candidate.held <= machines.memory.unwrap());
    let (few, _) = bounded_search(&config, &machines, 1, looks - 1);
    assert!(!few.not_searched.is_empty());
    let (none, _) = bounded_search(&config, &machines, 1, 0);
    assert!(
        none.best.is_empty() && none.not_searched.len() == all.len(),
        "{none:?}"
    );
}

/// A combination comes before more machines.
#[test]
fn seventy_billion_parameters_fit_on_8_gpus_of_80_gb() {
    let config = with(&LLAMA_70B.replace("parallel: {reduce_dtype: bf16}", ""), &[]);
    let advice = Comparison::of(&config, &h100s(1)).unwrap().advice;
    let Some(Advice::Change(Some(found))) = advice else {
        panic!("{advice:?}");
    };
    let expected = [
        "parallel.strategy=zero3",
        "train.offload.optimizer=host",
        "train.offload.parameters=host",
        "train.recompute=full",
    ];
    assert_eq!(found.settings, expected);
}

/// 16 bytes a parameter (Rajbhandari et al. 2020): 2 of it, 2 of its gradient, 12 of the optimizer, and of the latter a half
/// with ZeRO-1 over two ranks. 70 · 10⁹ · 16 / 32 is 35.0 GB, 70 · 10⁹ · 10 / 32 is 21.9. The model has 69.0 · 10⁹.
///
/// That is one micro-batch a step. The layout that is listed has 32, and adds their gradients up in f32: 4 bytes instead of 2,
/// which makes 39.4 GB, and 26.2.
#[test]
fn the_state_of_its_ranks_is_35_0_gb_and_with_zero1_21_9() {
    for (strategy, micro_batches, published) in [
        ("ddp", 1, 35.0),
        ("zero1", 1, 21.9),
        ("ddp", 32, 39.4),
        ("zero1", 32, 26.2),
    ] {
        let strategy = format!("parallel.strategy={strategy}");
        let micro_batches = format!("train.grad_accumulation={micro_batches}");
        let layout = [
            "parallel.tensor=8",
            "parallel.sequence=true",
            "parallel.pipeline.stages=4",
            &strategy,
            &micro_batches,
        ];
        let config = with(LLAMA_70B, &layout);
        let machines = h100s(8);
        let candidate = Candidate::of(&config, &machines).unwrap();
        assert_eq!(candidate.layers, [20; 4]);
        let state = (candidate.state() - candidate.estimate.held.in_flight) as f64 / GB;
        assert!((state / published - 1.0).abs() < 0.02, "{layout:?}: {state}");
    }
}

#[test]
fn what_is_listed_fits_and_what_is_not_does_not() {
    let config = with(SMALL, &[]);
    let all = search(&config, &small_machines(1 << 40), 100);
    assert!(
        all.too_large.is_empty() && all.best.len() >= 8,
        "{}",
        all.best.len()
    );
    // With less memory a layout may still fit with another strategy: the first limit that parts them.
    let mut limits: Vec<u64> = all.best.iter().map(|found| found.candidate.held).collect();
    limits.extend([limits[0] / 2, limits[0] / 4, limits[0] * 3 / 4]);
    limits.sort_unstable();
    let searched = limits
        .into_iter()
        .map(|limit| (limit, search(&config, &small_machines(limit), 100)));
    let (limit, some) = searched
        .filter(|(_, some)| !some.best.is_empty())
        .find(|(_, some)| !some.too_large.is_empty())
        .expect("a limit between them");
    assert!(some.best.iter().all(|found| found.candidate.held <= limit));
    assert!(some.too_large.iter().all(|(_, least)| *least > limit));
    let none = search(&config, &small_machines(1000), 100);
    assert_eq!((none.best.len(), none.too_large.len()), (0, all.best.len()));
}

/// With 1F1B a tied embedding is on the first and on the last rank, with ZBV on one; and with several chunks a rank of which
/// one has the head has layers, too. With a large vocabulary that counts.
#[test]
fn a_mesh_is_too_large_if_it_fits_with_no_schedule() {
    let text = SMALL
        .replace(
            "block_size: 32, vocab_size: 256",
            "block_size: 8, vocab_size: 8192",
        )
        .replace("micro_batch: 2", "micro_batch: 1");
    let mesh = [
        "parallel.tensor=4",
        "parallel.sequence=true",
        "parallel.pipeline.stages=2",
        "train.grad_accumulation=32",
    ];
    let [one_f_one_b, zbv] = ["1f1b", "zbv"].map(|schedule| {
        let schedule = format!("parallel.pipeline.schedule={schedule}");
        let config = with(&text, &[&mesh[..], &[&schedule]].concat());
        let machines = small_machines(1 << 40);
        Candidate::of(&config, &machines).unwrap().held
    });
    assert!(zbv < one_f_one_b, "{zbv} and {one_f_one_b}");
    let fitting = search(&with(&text, &[]), &small_machines(zbv), 100);
    let layouts = layouts(&fitting);
    assert!(layouts.contains(&"pp 2 × tp 4".to_owned()), "{layouts:?}");
    for limit in [zbv, zbv * 3 / 4] {
        let machines = small_machines(limit);
        let too_large = search(&with(&text, &[]), &machines, 100).too_large;
        assert!(!too_large.is_empty());
        let is_too_large = |draft: &LayoutDraft| too_large.iter().any(|(mesh, _)| *mesh == draft.mesh);
        let drafts = drafts(&with(&text, &[]), &machines).unwrap();
        for draft in drafts.iter().filter(|draft| is_too_large(draft)) {
            for strategy in [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3] {
                let candidate = Candidate::of(&under(&draft.config, strategy), &machines);
                let fits = possible(candidate).unwrap().and_then(|candidate| candidate.fits);
                assert_ne!(fits, Some(true), "{} with {strategy:?}", draft.mesh);
            }
        }
    }
}

#[test]
fn those_that_are_not_looked_at_are_slower() {
    let config = with(SMALL, &[]);
    let machines = small_machines(1 << 40);
    let all = search(&config, &machines, 100);
    for wanted in [1, 3] {
        let few = search(&config, &machines, wanted);
        assert_eq!(few.best[..], all.best[..wanted]);
        assert_eq!(few.slower + wanted, all.best.len());
    }
}

/// A candidate's settings, given, are planned as that candidate: in long samples that few ranks can divide among them, too.
#[test]
fn settings_make_the_layout() {
    let long = SMALL.replace("block_size: 32", "block_size: 16384");
    let long = long.replace(
        "micro_batch: 2, grad_accumulation: 4",
        "grad_accumulation: 8, micro_batch: 1",
    );
    let experts = SMALL.replace(
        "kind: gpt2,",
        "kind: mixtral, n_inner: 64, experts: {count: 4, capacity: 2},",
    );
    for text in [SMALL, &long, &experts] {
        let found = search(&with(text, &[]), &small_machines(1 << 40), 100);
        let has = |axis| layouts(&found).iter().any(|layout| layout.contains(axis));
        assert_eq!((has("cp 8"), has("ep 4")), (text == long, text == experts));
        are_planned_as_listed(text, found.best);
    }
}

fn are_planned_as_listed(text: &str, best: Vec<FoundLayout>) {
    let machines = small_machines(1 << 40);
    for found in best {
        let given = load(text, &found.settings);
        assert_eq!(
            Candidate::of(&given, &machines).unwrap(),
            found.candidate,
            "{:?}",
            found.settings
        );
        let batch = found.candidate.batch;
        assert_eq!(
            batch.samples(),
            8 * 4 * 2,
            "the global batch is the configuration's"
        );
    }
}

/// Few micro-batches are rehearsed of a step, whose schedule a run may refuse for its size.
#[test]
fn a_run_takes_what_is_listed() {
    let text = SMALL.replace("grad_accumulation: 4", "grad_accumulation: 4096");
    let found = search(&with(&text, &[]), &small_machines(1 << 40), 100).best;
    let largest = found.iter().map(|found| {
        let given = load(&text, &found.settings);
        let plan = pipeline_plan(&given).unwrap_or_else(|error| panic!("{:?}: {error}", found.settings));
        if given.parallel.pipeline.stages == 1 {
            0
        } else {
            plan.micro_batches() * plan.layers().len()
        }
    });
    assert!(largest.max() > Some(1 << 15), "near the bound");
    let refused = with(
        &text,
        &[
            "parallel.pipeline.stages=4",
            "parallel.tensor=2",
            "train.grad_accumulation=32768",
        ],
    );
    let machines = small_machines(1 << 40);
    let error = Candidate::of(&refused, &machines).unwrap_err();
    assert!(
        error.to_string().contains("more than 65536 forward passes"),
        "{error}"
    );
}

#[test]
fn no_rate_is_too_low_or_too_high_for_the_simulator() {
    let config = with(
        SMALL,
        &["parallel.pipeline.stages=4", "train.grad_accumulation=8"],
    );
    let bubble = |flops: Option<f64>| {
        let machines = Machines {
            flops,
            ..small_machines(1 << 40)
        };
        let candidate = Candidate::of(&config, &machines);
        candidate.unwrap().times.bubble
    };
    // Beside the arithmetic no message counts; then there is nothing beside the messages.
    let alone = bubble(None);
    for rate in [989.0, 1e-200] {
        assert!((bubble(Some(rate)) - alone).abs() < 1e-6, "{rate}");
    }
    assert!(bubble(Some(1e30)) > 0.99);
}

#[test]
fn a_layout_that_is_given_is_not_searched() {
    let machines = small_machines(1 << 40);
    for given in ["parallel.tensor=2", "parallel.pipeline.stages=2"] {
        assert_eq!(
            LayoutSearch::of(&with(SMALL, &[given]), &machines, 5, &mut || true).unwrap(),
            None
        );
    }
    let unknown = Machines {
        memory: None,
        ..machines
    };
    let search = LayoutSearch::of(&with(SMALL, &[]), &unknown, 5, &mut || true);
    assert_eq!(search.unwrap(), None);
}

/// A candidate holds what the largest rank does, and sends the most that any does, however many micro-batches there are: a
/// planner was 32 % low on uneven stages.
#[test]
fn uneven_stages_are_planned_by_the_largest() {
    for (schedule, micro_batches) in [
        ("1f1b", 21),
        ("zb-h1", 3),
        ("zbv", 21),
        ("interleaved", 24),
        ("greedy", 2),
        ("gpipe", 21),
    ] {
        for more in [
            &["parallel.pipeline.stages=2", "parallel.strategy=zero1"][..],
            &[
                "parallel.pipeline.stages=2",
                "parallel.tensor=2",
                "parallel.sequence=true",
            ],
            &["parallel.pipeline.stages=2", "parallel.strategy=zero3"],
        ] {
            let schedule = format!("parallel.pipeline.schedule={schedule}");
            let micro_batches = format!("train.grad_accumulation={micro_batches}");
            is_planned_by_the_largest(&[more, &[&schedule, &micro_batches]].concat());
        }
    }
    let layers = "parallel.pipeline.layers=[1,5]";
    is_planned_by_the_largest(&["parallel.pipeline.stages=2", layers]);
    is_planned_by_the_largest(&["parallel.pipeline.stages=4", "parallel.strategy=zero3"]);
    for schedule in PipelineSchedule::WORDS {
        let schedule = format!("parallel.pipeline.schedule={schedule}");
        let many = [
            "parallel.pipeline.stages=4",
            "model.n_layer=8",
            "train.grad_accumulation=23",
        ];
        is_planned_by_the_largest(&[&many[..], &[&schedule]].concat());
    }
    // Interleaved 1F1B spreads 7 micro-batches that are left over on as many rounds.
    is_planned_by_the_largest(&[
        "parallel.pipeline.stages=8",
        "parallel.pipeline.schedule=interleaved",
        "model.n_layer=16",
        "train.grad_accumulation=71",
    ]);
}

fn is_planned_by_the_largest(overrides: &[&str]) {
    is_planned_by_the_largest_of(&with(SMALL, overrides));
}

fn is_planned_by_the_largest_of(config: &TrainConfig) {
    let machines = small_machines(1 << 40);
    let candidate = Candidate::of(config, &machines).unwrap();
    let (mut most, mut sent) = (0, StepTraffic::default());
    for rank in 0..8 {
        let env = WorkerEnv {
            rank: GlobalRank(rank),
            world_size: WorldSize(8),
            local_world_size: 4,
            node_count: 2,
            ..WorkerEnv::single()
        };
        let estimate = Estimate::of(config, &env).unwrap();
        most = most.max(estimate.held.total());
        sent = sent.max(estimate.sent);
    }
    // Fewer micro-batches are rehearsed than a step has.
    let error = (candidate.held as f64 / most as f64 - 1.0).abs();
    assert!(
        error < 0.02,
        "{} of {most}: {:?}",
        candidate.held,
        config.parallel
    );
    assert_eq!(candidate.sent, sent, "{:?}", config.parallel);
}

fn mixtral(experts: &str, more: &[&str]) -> TrainConfig {
    let experts = format!("model.experts={{count: 4, capacity: 2, {experts}}}");
    let kind = ["model.kind=mixtral", "model.n_inner=256", &experts];
    with(SMALL, &[&kind[..], more].concat())
}

/// Of five layers, the second and the fourth have experts.
#[test]
fn layers_with_experts_and_without_are_counted_apart() {
    let groups = [
        "parallel.tensor=2",
        "parallel.expert=2",
        "train.grad_accumulation=1",
    ];
    let config = mixtral("every: 2", &[&groups[..], &["model.n_layer=5"]].concat());
    let env = WorkerEnv {
        world_size: WorldSize(4),
        local_world_size: 4,
        ..WorkerEnv::single()
    };
    let sent = Estimate::of(&config, &env).unwrap().sent;
    let needs = LayerNeeds::of(&config).unwrap();
    assert_eq!(
        needs.exchanged.iter().map(|sent| sent.bytes).sum::<u64>(),
        sent.activations
    );
    assert!(needs.kept[0] < needs.kept[1], "{:?}", needs.kept);
}

/// The middle stages have as many layers, of which one has experts and one has none.
#[test]
fn stages_cost_what_their_layers_do() {
    let layers = [
        "model.n_layer=8",
        "parallel.pipeline.layers=[2,2,2,2]",
        "parallel.pipeline.stages=4",
    ];
    is_planned_by_the_largest_of(&mixtral("every: 4", &layers));
    let seconds = |more: &[&str]| {
        let stages = ["model.n_layer=4", "parallel.pipeline.stages=2"];
        let config = mixtral("every: 4, top_k: 4", &[&stages[..], more].concat());
        let candidate = Candidate::of(&config, &small_machines(1 << 40)).unwrap();
        (candidate.layers, candidate.times.bubble)
    };
    let ((divided, bubble), (_, of_halves)) = (seconds(&[]), seconds(&["parallel.pipeline.layers=[2,2]"]));
    assert_eq!(divided, [3, 1]);
    assert!(bubble < of_halves, "{bubble} and {of_halves}");
}
