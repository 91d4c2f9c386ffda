//! The store's scope: one generation of one job.

use super::*;

#[test]
fn an_entry_crosses_from_node_to_node() {
    let mut s = Scene::new();
    s.join("a", 2, 2).join("b", 2, 2);
    let get = s.get(1, "nccl/id", 30_000);
    assert_eq!(s.answer(get), None);
    let put = s.put(1, "nccl/id", b"unique");
    assert_eq!(s.answer(put), Some(Ok(vec![])));
    assert_eq!(s.answer(get), Some(Ok(b"unique".to_vec())));
}

#[test]
fn a_read_times_out_on_the_daemons_clock() {
    let mut s = Scene::new();
    s.join("a", 1, 1);
    let get = s.get(1, "never", 1500);
    s.pass(Duration::from_millis(1499), &["a"]);
    assert_eq!(s.answer(get), None);
    s.pass(Duration::from_millis(1), &["a"]);
    assert_eq!(
        s.answer(get),
        Some(Err("no rank wrote key `never` within 1.5s".into()))
    );
}

#[test]
fn the_end_of_the_generation_ends_its_reads_and_its_entries() {
    let mut s = Scene::new();
    s.join("a", 1, 1);
    s.put(1, "k", b"1");
    let get = s.get(1, "never", 30_000);
    s.exit("a", 1, killed(0, 9));
    insta::assert_snapshot!(s.answer(get).unwrap().unwrap_err(), @"generation superseded: rank 0 (node `a`) died of SIGKILL");
    let late = s.get(1, "k", 30_000);
    assert_eq!(s.answer(late), s.answer(get));
    s.rejoin("a", 1, 1, 1).pass(SECOND, &["a"]);
    let next = s.get(2, "k", 0);
    assert!(
        s.answer(next).unwrap().is_err(),
        "entries do not outlive their generation"
    );
    let stale = s.put(1, "k", b"2");
    assert_eq!(s.answer(stale), s.answer(get));
}

#[test]
fn the_store_of_what_does_not_exist() {
    let mut s = Scene::new();
    let call = s.get(1, "k", 10);
    insta::assert_snapshot!(s.answer(call).unwrap().unwrap_err(), @"this daemon has no job `job1` with this node");
    s.join("a", 1, 1);
    let call = s.get(2, "k", 10);
    insta::assert_snapshot!(s.answer(call).unwrap().unwrap_err(), @"generation 2 of job `job1` was not assigned by this daemon");
    s.succeed("a", 1);
    let call = s.get(1, "k", 10);
    insta::assert_snapshot!(s.answer(call).unwrap().unwrap_err(), @"generation superseded: the job has ended: node `a` succeeded");
}
