//! What many nodes take of the rendezvous: its own measurement, with hundreds of simulated nodes.

use crate::harness::Program;

/// Of 200 nodes, with all that connections take. When each assignment held a list of all nodes, it was more.
const BYTES_A_NODE: u64 = 80_000;
const NODES: u64 = 200;

fn number(json: &str, key: &str) -> u64 {
    let after = json.split(&format!("\"{key}\":")).nth(1).expect(key);
    let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().expect(key)
}

#[test]
fn a_node_more_takes_little_memory_of_the_daemon_and_no_bytes_of_the_other_nodes() {
    let words = [
        "bench",
        "--nodes",
        "200",
        "--heartbeats",
        "0.1",
        "--gather",
        "--json",
    ];
    let bench = Program::new(env!("CARGO_BIN_EXE_ddp-rendezvous")).args(words.map(Into::into));
    let finished = bench.run();
    finished.expect_exit(0);
    let json = finished.stdout().concat();
    let growth = number(&json, "peak_bytes") - number(&json, "idle_bytes");
    assert!(growth < NODES * BYTES_A_NODE, "{json}");
    // All that a node is told, in which no other node has a part.
    assert!(number(&json, "assignment_bytes") < 1000, "{json}");
}
