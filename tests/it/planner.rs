//! `ddp-train plan`: which layouts it proposes for machines and data that need not exist. `worker/tests/costs.rs` compares
//! its numbers with those of runs.

use std::ffi::OsStr;
use std::path::Path;

use crate::harness::{Finished, TinyJob, ddp_train, temp_dir};

fn plan(dir: &Path, args: impl IntoIterator<Item: AsRef<OsStr>>) -> Finished {
    ddp_train().dir(dir).args(["plan"]).args(args).run()
}

#[test]
fn the_best_layouts_of_machines_are_listed_with_how_to_choose_them() {
    let dir = temp_dir();
    let model = "{kind: llama, n_layer: 80, n_head: 64, n_kv_head: 8, n_embd: 8192, n_inner: 28672, block_size: 8192, vocab_size: 32000}";
    let train = "train: {precision: bf16, micro_batch: 2}\nparallel: {reduce_dtype: bf16}";
    let yaml = format!("model: {model}\ndata: {{train: absent.txt}}\n{train}\n");
    std::fs::write(dir.path().join("llama.yaml"), yaml).expect("a file");
    let machines = "llama.yaml --gpu h100 --mfu 0.4 --nnodes 8 --network 400Gb/s --layouts 3";
    let planned = plan(dir.path(), machines.split(' '));
    // The rule of thumb for so many parameters, pp 4 × dp 2 × tp 8, is among the best. It recomputes nothing.
    insta::assert_snapshot!(planned.expect_exit(0).stdout().join("\n"), @r"
    model           llama 80 × 8192, 68,976,648,192 parameters
    ranks           64 = 8 nodes × 8 (default of `--nproc-per-node`)
    device          h100, by its data sheet; 72.6 GiB of 74.5 GiB for training (`--reserve`: 1.9 GiB); 989 TFLOP/s, of which training reaches 0.4
    precision       bf16
    bandwidth       450 GB/s per rank within a node, 50.0 GB/s per node to other nodes, of which training reaches 0.4
    global batch    128 samples = 1,048,576 tokens (64 ranks × 1 micro-batch × 2 samples of 8,192 tokens)
    arithmetic      444 GFLOP per token, 7283 TFLOP per rank and step

                          ddp      zero1      zero2      zero3
     parameters     128.8 GiB  128.8 GiB  128.8 GiB    2.0 GiB
     gathered             0 B        0 B        0 B    3.2 GiB
     gradients      128.8 GiB  128.8 GiB    3.8 GiB    5.2 GiB
     optimizer      772.7 GiB   12.1 GiB   12.1 GiB   12.1 GiB
       B/parameter       16.0        4.2        2.3        0.3
     activations    227.0 GiB  227.0 GiB  227.0 GiB  227.0 GiB
     on the device    1.2 TiB  496.7 GiB  371.7 GiB  249.5 GiB
     fits                  no         no         no         no
     sent per rank  253.6 GiB  253.6 GiB  253.6 GiB  379.4 GiB
     arithmetic        18.4 s     18.4 s     18.4 s     18.4 s
     communication     12.1 s     12.1 s     12.1 s     18.1 s
     step time         18.4 s     18.4 s     18.4 s     18.4 s
     tokens/s          56,982     56,982     56,982     56,982

    No strategy fits into 72.6 GiB as configured. `zero3` needs 46.4 GiB with:
      --set parallel.strategy=zero3 --set train.recompute=full

    The best layouts for 128 samples per step:
                              dp 64  pp 4 × dp 4 × tp 4  pp 4 × dp 2 × tp 8
     strategy                 zero3               zero1               zero1
     schedule                     –    interleaved 1F1B    interleaved 1F1B
     recompute                 full           selective               norms
     chunks per rank              1                   4                   4
     micro-batches                1                  16                  32
     layers per rank             80                  20                  20
     on the device         46.4 GiB            66.5 GiB            63.1 GiB
       state               19.3 GiB            36.9 GiB            24.5 GiB
     sent along tensor          0 B           669.0 GiB             1.4 TiB
     sent along shard     379.4 GiB            12.1 GiB             4.0 GiB
     sent along pipeline        0 B             8.0 GiB             8.0 GiB
     pipeline bubble          0.0 %               7.9 %               4.0 %
     step time               23.0 s              27.7 s              27.9 s
     tokens/s                45,673              37,903              37,540

    Use `dp 64`: it has the shortest step of all searched layouts that fit; a step with `pp 4 × dp 4 × tp 4` takes 20.5 % longer.
    For `dp 64`:
      --set parallel.strategy=zero3 --set train.recompute=full
    For `pp 4 × dp 4 × tp 4`:
      --set parallel.pipeline.chunks=4 --set parallel.pipeline.schedule=interleaved --set parallel.pipeline.stages=4 --set parallel.sequence=true --set parallel.strategy=zero1 --set parallel.tensor=4 --set train.grad_accumulation=16 --set train.recompute=selective
    For `pp 4 × dp 2 × tp 8`:
      --set parallel.pipeline.chunks=4 --set parallel.pipeline.schedule=interleaved --set parallel.pipeline.stages=4 --set parallel.sequence=true --set parallel.strategy=zero1 --set parallel.tensor=8 --set train.grad_accumulation=32
    19 more layouts do not fit or can only be slower.
    ");
}

#[test]
fn machines_and_data_need_not_be_here() {
    let dir = temp_dir();
    let model = "{kind: gpt2, n_layer: 32, n_head: 32, n_embd: 4096, block_size: 2048, vocab_size: 50304}";
    let yaml =
        format!("model: {model}\ndata: {{train: absent.txt}}\ntrain: {{precision: bf16, micro_batch: 1}}\n");
    std::fs::write(dir.path().join("train.yaml"), yaml).expect("a file");
    let words = "train.yaml --gpu h100 --nnodes 128 --network 3200Gb/s";
    plan(dir.path(), words.split(' '))
        .expect_exit(0)
        .expect_stdout("ranks           1024 = 128 nodes × 8")
        .expect_stdout("400 GB/s per node to other nodes")
        .expect_stdout("Of the strategies that fit, `parallel.strategy: zero1` sends least");
    plan(
        dir.path(),
        "train.yaml --memory 12GB --nproc-per-node 2".split(' '),
    )
    .expect_exit(0)
    .expect_stdout("No strategy fits into 9.3 GiB as configured. `zero3` needs")
    .expect_stdout("--set train.offload.optimizer=host --set train.offload.parameters=host");
    plan(
        dir.path(),
        "train.yaml --memory 3GB --nproc-per-node 2".split(' '),
    )
    .expect_exit(0)
    .expect_stdout("not even with recomputation and offloaded state");
}

/// Tables of papers: 16 bytes per parameter, in GB; and what one collective costs.
#[test]
fn what_a_paper_says_can_be_read_off() {
    let job = TinyJob::with(str::to_owned);
    let sets =
        "--set model.n_layer=12 --set model.n_embd=768 --set model.n_head=12 --set model.vocab_size=50304";
    let types = "--set train.precision=bf16 --set parallel.reduce_dtype=bf16";
    let words = format!("tiny.yaml --nproc-per-node 2 --units gb --memory 80GB {sets} {types}");
    plan(job.dir(), words.split(' '))
        .expect_exit(0)
        .expect_stdout("78.0 GB of 80.0 GB for training")
        .expect_stdout("B/parameter      16.0      10.0       9.9       8.9");
    let words = "--collective all-reduce --bytes 64MiB --ranks 8 --link 900GB/s --network 50GB/s";
    let found = plan(job.dir(), words.split(' '));
    insta::assert_snapshot!(found.expect_exit(0).stdout().join("\n"), @r"
    sent per rank   117,440,512 B, by a ring in 14 steps
    time, at least  0.130 ms at `--link`
    time, at least  2.35 ms at `--network`
    ");
    plan(
        job.dir(),
        "--collective all-gather --bytes 64MiB --ranks 8".split(' '),
    )
    .expect_exit(0)
    .expect_stdout("58,720,256 B, by a ring in 7 steps");
    plan(
        job.dir(),
        "tiny.yaml --collective all-reduce --bytes 1MB --ranks 2".split(' '),
    )
    .expect_exit(2)
    .expect_stderr("cannot be used with");
}

#[test]
fn the_launch_section_says_how_many_ranks() {
    let job = TinyJob::with(|yaml| format!("{yaml}launch: {{nnodes: \"1:3\", nproc_per_node: 2}}\n"));
    plan(job.dir(), ["tiny.yaml"])
        .expect_exit(0)
        .expect_stdout("6 = 3 nodes × 2");
    plan(job.dir(), "tiny.yaml --nnodes 1 --nproc-per-node 4".split(' '))
        .expect_exit(0)
        .expect_stdout("4 = 1 node × 4");
    plan(
        job.dir(),
        "tiny.yaml --nproc-per-node 1024 --nnodes 1024".split(' '),
    )
    .expect_exit(2)
    .expect_stderr("1024 nodes × 1024 ranks are too many: a plan supports at most 131072 ranks");
    let job = TinyJob::with(|yaml| format!("{yaml}launch: {{nproc_per_nod: 2}}\n"));
    plan(job.dir(), ["tiny.yaml"])
        .expect_exit(2)
        .expect_stderr("`launch.nproc_per_nod`: unknown key, did you mean `nproc_per_node`?");
    let job = TinyJob::with(|yaml| format!("{yaml}launch: {{nproc_per_node: 70000000}}\n"));
    plan(job.dir(), ["tiny.yaml"]).expect_exit(2);
}

/// Driver and libraries take their part of a GPU's memory, and of a CPU's none.
#[test]
fn what_is_reserved_is_said() {
    let job = TinyJob::with(str::to_owned);
    let given = |more: &[&str]| {
        let words = ["tiny.yaml", "--nproc-per-node", "2", "--memory", "1GB"];
        plan(job.dir(), &[&words[..], more].concat())
    };
    given(&[])
        .expect_exit(2)
        .expect_stderr(
            "error: `--reserve` is 1.9 GiB, and a device has 953.7 MiB: nothing is left for training",
        )
        .expect_stderr("hint: set a smaller `--reserve`");
    for more in [&["--reserve", "0"][..], &["--set", "parallel.backend=cpu"]] {
        given(more)
            .expect_exit(0)
            .expect_stdout("; 953.7 MiB of 953.7 MiB for training");
    }
    given(&["--set", "parallel.backend=cpu", "--reserve", "100MB"])
        .expect_exit(0)
        .expect_stdout("; 858.3 MiB of 953.7 MiB for training (`--reserve`: 95.4 MiB)");
}

#[test]
fn what_is_wrong_is_named() {
    let job = TinyJob::with(str::to_owned);
    plan(job.dir(), "tiny.yaml --gpu h1000".split(' '))
        .expect_exit(2)
        .expect_stderr("known are a100-40gb, a100, h100, h200, b200");
    plan(job.dir(), "tiny.yaml --network 400G".split(' '))
        .expect_exit(2)
        .expect_stderr("expected bytes or bits a second, for example `450GB/s` or `400Gb/s`");
    plan(job.dir(), ["absent.yaml"])
        .expect_exit(2)
        .expect_stderr("error: absent.yaml: no such file");
    let sets = [
        "--set",
        "parallel.strategy=zero3",
        "--set",
        "parallel.shard_group=3",
    ];
    plan(job.dir(), &[&["tiny.yaml"], &sets[..]].concat())
        .expect_exit(2)
        .expect_stderr("`--set parallel.shard_group=3`")
        .expect_stderr("8 data-parallel ranks cannot be divided into groups of 3");
}
