//! What a strategy holds is what the process holds: the account in `metrics.jsonl` beside the kernel's.

use crate::harness::{TinyJob, launch, metrics};

const STRATEGIES: [&str; 4] = ["ddp", "zero1", "zero2", "zero3"];

/// Large enough that buffers are most of a process: 3.2 million parameters, 51 MB of state.
fn job(strategy: &str) -> TinyJob {
    TinyJob::with(|yaml| {
        let sized = yaml
            .replace(
                "n_layer: 2, n_head: 2, n_embd: 32",
                "n_layer: 4, n_head: 2, n_embd: 256",
            )
            .replace("block_size: 32", "block_size: 8")
            .replace("steps: 40", "steps: 2")
            .replace("micro_batch: 2", "micro_batch: 1")
            .replace("checkpoint_every: 5", "checkpoint_every: 0");
        format!("{sized}parallel: {{ strategy: {strategy}, bucket_mb: 2 }}\n")
    })
}

/// Bytes of rank 0 after its first step.
#[derive(Debug)]
struct Account {
    /// Parameters, gradients, optimizer, gathered parameters.
    state: [i64; 4],
    /// Of the process, pages that are shared counted in parts.
    proportional: i64,
}

impl Account {
    fn of(strategy: &str, ranks: u32) -> Self {
        let job = job(strategy);
        let launch = launch().nproc(ranks).dir(job.dir()).target("tiny.yaml");
        launch.run().expect_exit(0);
        let line = metrics(&job.out()).remove(0);
        let bytes = |key: &str| line["memory"][key].as_i64().expect("a number of bytes");
        Self {
            state: ["params", "grads", "optimizer", "gathered"].map(bytes),
            proportional: bytes("pss"),
        }
    }

    fn total(&self) -> i64 {
        self.state.iter().sum()
    }
}

#[test]
fn the_kernel_sees_what_a_strategy_saves() {
    for ranks in [1, 2, 4, 8] {
        let [ddp, sharded @ ..] = STRATEGIES.map(|strategy| Account::of(strategy, ranks));
        let [params, grads, optimizer, gathered] = ddp.state;
        assert_eq!((grads, optimizer, gathered), (params, 2 * params, 0));
        for (strategy, account) in STRATEGIES[1..].iter().zip(&sharded) {
            let what = format!("{strategy} on {ranks} ranks: {account:?} beside {ddp:?}");
            assert!(account.total() <= ddp.total(), "no larger than ddp: {what}");
            // Moments have no buffers beside the shard; padding goes up to a chunk of each rank in each unit.
            let shard = account.state[2] * i64::from(ranks);
            assert!(shard >= optimizer * 2 / 3 && shard <= optimizer * 3 / 2, "{what}");
            let (saved, seen) = (
                ddp.total() - account.total(),
                ddp.proportional - account.proportional,
            );
            // Huge pages are rounded up: the same program twice differs by two of them, 4.2 MiB.
            let tolerance = saved / 20 + (6 << 20);
            assert!(
                (saved - seen).abs() <= tolerance,
                "saves {saved}, seen {seen}: {what}"
            );
        }
    }
}
