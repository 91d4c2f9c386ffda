//! `run.timeline`: what ran when, as a trace and as a picture.

use std::collections::BTreeMap;
use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{TinyJob, launch, parameters, wait_for_step};

/// A span of a trace.
#[derive(Debug)]
pub(crate) struct Span {
    pub(crate) lane: String,
    pub(crate) kind: String,
    pub(crate) name: String,
    pub(crate) start: f64,
    pub(crate) end: f64,
    /// Size of the buffer.
    pub(crate) bytes: Option<u64>,
}

/// The trace of a run: steps, and by rank what ran.
pub(crate) struct Trace {
    pub(crate) steps: Vec<u64>,
    pub(crate) ranks: BTreeMap<u64, Vec<Span>>,
}

impl Trace {
    /// Of all ranks.
    #[track_caller]
    pub(crate) fn of(out: &Path) -> Self {
        let text = std::fs::read(out.join("timeline/timeline.json")).expect("a trace");
        let trace: Value = serde_json::from_slice(&text).expect("a trace of JSON");
        let events = trace["traceEvents"].as_array().expect("events");
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let is_name = |event: &&Value| event["name"] == "thread_name";
        let lanes: BTreeMap<u64, String> = (events.iter().filter(is_name))
            .map(|event| {
                (
                    event["tid"].as_u64().expect("a number"),
                    text(&event["args"]["name"]),
                )
            })
            .collect();
        let mut ranks: BTreeMap<u64, Vec<Span>> = BTreeMap::new();
        for event in events.iter().filter(|event| event["ph"] == "X") {
            let number = |key: &str| event[key].as_f64().expect("a number");
            let pid = event["pid"].as_u64().expect("a number");
            ranks.entry(pid - 1).or_default().push(Span {
                lane: lanes[&event["tid"].as_u64().expect("a number")].clone(),
                kind: text(&event["cat"]),
                name: text(&event["name"]),
                start: number("ts"),
                end: number("ts") + number("dur"),
                bytes: event["args"]["bytes"].as_u64(),
            });
        }
        let about = trace["otherData"]["ranks"].as_array().expect("ranks");
        assert!(about.iter().all(|rank| rank["missed"] == 0), "{about:?}");
        let steps = about[0]["steps"].as_array().expect("steps");
        Self {
            steps: steps.iter().filter_map(Value::as_u64).collect(),
            ranks,
        }
    }

    /// What is true of every run: steps follow each other, passes are within steps, blocks within passes and operations
    /// within blocks; nothing of a lane is in two things that are not in each other.
    #[track_caller]
    pub(crate) fn expect_sense(&self) {
        for (rank, spans) in &self.ranks {
            let of = |kind: &'static str| on_device(spans, kind);
            let steps: Vec<_> = of("step").map(|span| span.name.as_str()).collect();
            let expected: Vec<_> = (self.steps[0]..=self.steps[1])
                .map(|step| format!("step {step}"))
                .collect();
            assert_eq!(steps, expected, "rank {rank}");
            let mut blocks = Vec::new();
            for pass in ["forward", "backward"] {
                let (whole, inner): (Vec<_>, Vec<_>) = of(pass).partition(|span| span.name.ends_with(pass));
                for span in &whole {
                    assert!(
                        of("step").any(|step| contains(step, span)),
                        "rank {rank}: {span:?}"
                    );
                }
                for block in &inner {
                    let around = whole.iter().any(|pass| contains(pass, block));
                    assert!(around, "rank {rank}: {block:?}");
                }
                blocks.extend(inner);
            }
            for op in of("operation") {
                let inside = blocks.iter().any(|block| contains(block, op));
                assert!(inside, "rank {rank}: {op:?}");
            }
        }
    }
}

/// What a rank's device was at, or on a processor its thread.
fn on_device<'a>(spans: &'a [Span], kind: &'a str) -> impl Iterator<Item = &'a Span> {
    let of_kind = move |span: &&Span| span.kind == kind && span.lane != "host";
    spans.iter().filter(of_kind)
}

/// Up to what two clocks that are read one after the other differ by.
fn contains(outer: &Span, inner: &Span) -> bool {
    const ROUNDING_US: f64 = 0.01;
    outer.start <= inner.start + ROUNDING_US && inner.end <= outer.end + ROUNDING_US
}

/// Sum of the bytes that gradients or parameters of a rank's trace moved.
#[track_caller]
pub(crate) fn bytes_of(spans: &[Span], kind: &str) -> u64 {
    let of_kind = spans.iter().filter(|span| span.kind == kind);
    of_kind.map(|span| span.bytes.expect("a size")).sum()
}

#[test]
fn it_shows_the_steps_of_all_ranks_and_changes_no_bit() {
    for strategy in ["ddp", "zero3"] {
        let (job, plain) = (TinyJob::new(), TinyJob::new());
        let train = |job: &TinyJob, timeline: &str| {
            let launch = launch()
                .nproc(2)
                .dir(job.dir())
                .set("train.steps=6")
                .set("train.grad_accumulation=2")
                .set("train.eval_every=2")
                .set(&format!("parallel.strategy={strategy}"));
            launch.set(timeline).target("tiny.yaml").run()
        };
        let finished = train(&job, "run.timeline=3-5");
        finished
            .expect_exit(0)
            .expect_stdout("timeline of steps 3 to 5")
            .expect_stdout("% of the communication hidden");
        train(&plain, "train.threads=1").expect_exit(0);
        assert!(parameters(&job.out()) == parameters(&plain.out()), "{strategy}");
        assert!(!plain.out().join("timeline").exists());
        let trace = Trace::of(&job.out());
        assert_eq!((&trace.steps[..], trace.ranks.len()), (&[3, 5][..], 2));
        trace.expect_sense();
        let [one, other] = [&trace.ranks[&0], &trace.ranks[&1]];
        for kind in ["gradients", "parameters"] {
            let bytes = bytes_of(one, kind);
            assert_eq!(bytes, bytes_of(other, kind), "{strategy}");
            assert_eq!(
                bytes > 0,
                kind == "gradients" || strategy == "zero3",
                "{strategy}"
            );
        }
        for spans in trace.ranks.values() {
            let count = |wanted: &dyn Fn(&Span) -> bool| spans.iter().filter(|span| wanted(span)).count();
            assert_eq!(count(&|span| span.name == "micro-batch 2: forward"), 3);
            assert_eq!(count(&|span| span.name == "backward h.1"), 6);
            assert_eq!(count(&|span| span.name == "update"), 3);
            // Validation and checkpoints are of no step.
            let is_of_step = |span: &Span| {
                on_device(spans, "step").any(|step| step.start <= span.start && span.start <= step.end)
            };
            let stray = spans.iter().find(|span| !is_of_step(span));
            assert!(stray.is_none(), "{strategy}: {stray:?}");
        }
        let picture = std::fs::read_to_string(job.out().join("timeline/timeline.svg")).expect("a picture");
        assert!(picture.contains("Step 5, 2 ranks") && picture.contains(&format!(", {strategy}, ")));
    }
}

#[test]
fn a_run_that_is_stopped_has_what_came_before() {
    let job = TinyJob::new();
    let running = job
        .launch()
        .nproc(2)
        .set("train.steps=1000000")
        .set("run.timeline=2-101")
        .set("model.n_layer=6")
        .set("model.n_embd=128")
        .start();
    wait_for_step(&job.out(), 3);
    running.signal(Signal::SIGTERM);
    running.finish().expect_exit(143);
    let trace = Trace::of(&job.out());
    assert!(trace.steps[0] == 2 && trace.steps[1] >= 3, "{:?}", trace.steps);
    trace.expect_sense();
}

#[test]
fn training_goes_on_where_it_cannot_be_written() {
    let job = TinyJob::new();
    std::fs::create_dir(job.out()).expect("writable");
    std::fs::write(job.out().join("timeline"), "in the way").expect("writable");
    let finished = job
        .launch()
        .nproc(2)
        .set("train.steps=6")
        .set("run.timeline=2")
        .run();
    finished
        .expect_exit(0)
        .expect_stderr("the timeline of rank 0 is lost")
        .expect_stderr("the timeline of rank 1 is lost");
}

#[test]
fn a_run_that_goes_on_behind_it_says_so() {
    let job = TinyJob::new();
    let train = |steps: &str| {
        let launch = launch().nproc(2).dir(job.dir()).set("run.resume=auto").set(steps);
        launch.set("run.timeline=3-4").target("tiny.yaml").run()
    };
    train("train.steps=5")
        .expect_exit(0)
        .expect_stdout("timeline of steps 3 to 4");
    let finished = train("train.steps=6");
    finished.expect_exit(0).expect_stdout("no timeline: step 4");
    assert_eq!(Trace::of(&job.out()).steps, [3, 4]);
}
