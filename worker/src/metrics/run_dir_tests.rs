//! Tests of [`super`]: who gets a folder, and what is left of the run in it.

use super::*;
use crate::session::MemoryStore;

fn run(out_dir: &Path) -> Run {
    Run {
        out_dir: Some(out_dir.to_owned()),
        ..Run::default()
    }
}

fn request(run: &Run, rank: u32, world_size: u32) -> Request<'_> {
    Request {
        run,
        run_id: "job",
        token: None,
        is_unique: true,
        restarted: false,
        rank,
        generation: 1,
        world_size,
        deadline: Instant::now() + Duration::from_mins(10),
    }
}

fn open(run: &Run) -> Result<(RunDir, Option<u64>), RunFilesError> {
    RunDir::open(request(run, 0, 1), &MemoryStore::default())
}

fn error(run: &Run, folder: &Path) -> String {
    open(run)
        .unwrap_err()
        .to_string()
        .replace(folder.to_str().unwrap(), "DIR")
}

/// True if the folder was refused because of the run in it.
fn holds_run<T>(opened: Result<T, RunFilesError>) -> bool {
    opened.is_err_and(|error| error.to_string().contains("already holds a run"))
}

#[test]
fn the_default_folder_is_named_for_run_and_job() {
    let run = Run {
        name: "gpt".into(),
        ..Run::default()
    };
    assert_eq!(RunDir::resolve(&run, "j1"), Path::new("runs/gpt/j1"));
}

#[test]
fn all_ranks_agree_on_a_new_folder() {
    let folder = tempfile::tempdir().unwrap();
    let run = run(&folder.path().join("a/b"));
    let store = MemoryStore::default();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                scope.spawn({
                    let (run, store) = (&run, &store);
                    move || RunDir::open(request(run, rank, 3), store)
                })
            })
            .collect();
        for rank in ranks {
            assert_eq!(rank.join().unwrap().unwrap().1, None);
        }
    });
    let left: Vec<_> = fs::read_dir(folder.path().join("a/b")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_rank_on_another_file_system_is_named_on_both_sides() {
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (run(&folder.path().join("a")), run(&folder.path().join("b")));
    let store = MemoryStore::default();
    std::thread::scope(|scope| {
        let lead = scope.spawn(|| RunDir::open(request(&ours, 0, 2), &store));
        let mut short = request(&theirs, 1, 2);
        // Long enough for rank 0's word, which is awaited first; then the file is looked for once.
        store.wait_for(DECISION_KEY, short.deadline).unwrap();
        short.deadline = Instant::now();
        let error = RunDir::open(short, &store).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("rank 1 does not see what rank 0 wrote"),
            "{error}"
        );
        let error = lead.join().unwrap().unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("rank 1 does not see what rank 0 wrote"),
            "{error}"
        );
    });
}

#[test]
fn when_rank_zero_fails_the_others_know_why() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("metrics.jsonl"), "").unwrap();
    let run = run(folder.path());
    let store = MemoryStore::default();
    let lead = RunDir::open(request(&run, 0, 2), &store).unwrap_err();
    let follow = RunDir::open(request(&run, 1, 2), &store).unwrap_err();
    assert_eq!(
        follow.to_string(),
        format!("rank 0 could not prepare the run's directory: {lead}")
    );
}

#[test]
fn a_look_says_what_opening_would_do_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = run(&folder.path().join("out"));
    let refused = |run: &Run| RunDir::look(run, "job").unwrap_err().to_string();
    assert_eq!(RunDir::look(&run, "job").unwrap(), (FoundRun::None, None));
    assert!(!folder.path().join("out").exists());
    fs::create_dir_all(folder.path().join("out/checkpoints/step_00000060")).unwrap();
    fs::write(folder.path().join("out/checkpoints/latest"), "step_00000060").unwrap();
    assert!(refused(&run).contains("already holds a run"));
    run.overwrite = true;
    assert_eq!(RunDir::look(&run, "job").unwrap(), (FoundRun::Deleted, Some(60)));
    run.overwrite = false;
    for resume in [Resume::Auto, Resume::Require] {
        run.resume = resume;
        assert_eq!(
            RunDir::look(&run, "job").unwrap(),
            (FoundRun::Continued, Some(60))
        );
    }
    let left: Vec<_> = fs::read_dir(folder.path().join("out")).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    fs::remove_dir_all(folder.path().join("out")).unwrap();
    assert!(refused(&run).contains("holds no checkpoint"));
}

#[test]
fn a_folder_that_holds_a_run_is_refused_unless_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = run(folder.path());
    fs::create_dir_all(folder.path().join("checkpoints/step_00000001")).unwrap();
    fs::write(folder.path().join("notes.txt"), "mine").unwrap();
    insta::assert_snapshot!(error(&run, folder.path()), @r"
    `DIR` already holds a run (found `checkpoints`)
      hint: set `run.resume: auto` to continue it, `run.overwrite: true` to delete it, or a different `run.out_dir`
    ");
    run.resume = Resume::Require;
    insta::assert_snapshot!(error(&run, folder.path()), @r"
    `run.resume` is `require`, but `DIR` holds no checkpoint
      hint: set `run.out_dir` to the directory of the run to continue, or `run.resume: auto` to start a new one
    ");
    run.resume = Resume::Auto;
    assert_eq!(open(&run).unwrap().1, None);
    run.resume = Resume::Never;
    run.overwrite = true;
    assert_eq!(open(&run).unwrap().1, None);
    let left: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(
        left,
        ["notes.txt"],
        "overwriting deletes the run, and only the run"
    );
}

#[test]
fn a_refusal_to_begin_leaves_no_folder() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = run(&folder.path().join("out"));
    run.resume = Resume::Require;
    let request = Request {
        token: Some("token"),
        ..request(&run, 0, 1)
    };
    let refused = RunDir::open(request, &MemoryStore::default());
    assert!(
        matches!(refused, Err(RunFilesError::NothingToResume { .. })),
        "{refused:?}"
    );
    assert!(!folder.path().join("out").exists());
}

fn save(folder: &Path, step: u64) {
    let state = checkpoint::State {
        step,
        consumed_samples: step,
        skipped: 0,
        batch: None,
        rng: checkpoint::Rng {
            seed: 1,
            data_order: "test/1".into(),
        },
        config: serde_json::Value::Null,
        data: String::new(),
        val_data: None,
    };
    let writer = checkpoint::Writer::begin(folder, step, 1).unwrap();
    writer.write("a", &[]).unwrap();
    writer.commit(&state, &["a"]).unwrap();
}

#[test]
fn only_the_run_that_took_the_folder_goes_on_in_it_unasked() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = run(&folder.path().join("out"));
    let life = |run: &Run, token: &'static str, restarted: bool| {
        let request = Request {
            token: Some(token),
            restarted,
            ..request(run, 0, 1)
        };
        RunDir::open(request, &MemoryStore::default()).map(|(_, start)| start)
    };
    assert_eq!(life(&run, "a", false).unwrap(), None);
    save(&folder.path().join("out"), 20);
    assert_eq!(life(&run, "a", true).unwrap(), Some(20));
    // The first life of another run was killed before it had looked at the folder.
    assert!(holds_run(life(&run, "b", true)));
    assert_eq!(life(&run, "a", true).unwrap(), Some(20));
    run.overwrite = true;
    assert_eq!(life(&run, "b", true).unwrap(), None);
    save(&folder.path().join("out"), 40);
    assert_eq!(life(&run, "b", true).unwrap(), Some(40));
}

#[test]
fn a_run_is_resumed_from_its_latest_checkpoint_or_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = run(folder.path());
    save(folder.path(), 20);
    save(folder.path(), 40);
    // A save of a job that had come to its fifth generation, and was killed.
    drop(checkpoint::Writer::begin(folder.path(), 60, 5).unwrap());
    assert!(holds_run(open(&run)));
    for resume in [Resume::Auto, Resume::Require] {
        run.resume = resume;
        assert_eq!(open(&run).unwrap().1, Some(40));
    }
    assert!(
        !folder
            .path()
            .join("checkpoints/.saving_step_00000060.g5")
            .exists()
    );
    run.resume = Resume::Never;
    run.overwrite = true;
    assert_eq!(open(&run).unwrap().1, None);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn overwriting_follows_no_link_out_of_the_folder() {
    let [folder, elsewhere] = [(), ()].map(|()| tempfile::tempdir().unwrap());
    save(elsewhere.path(), 20);
    let checkpoints = elsewhere.path().join("checkpoints");
    std::os::unix::fs::symlink(&checkpoints, folder.path().join("checkpoints")).unwrap();
    let mut run = run(folder.path());
    run.overwrite = true;
    let error = open(&run).unwrap_err().to_string();
    assert!(
        error.contains("checkpoints` is a link, and `run.overwrite` deletes nothing"),
        "{error}"
    );
    assert_eq!(checkpoint::latest_step(elsewhere.path()).unwrap(), Some(20));
    assert!(checkpoints.join("step_00000020").is_dir());
}

#[test]
fn overwriting_deletes_no_checkpoint_of_somebody_else() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = run(folder.path());
    run.overwrite = true;
    let mine = folder.path().join("checkpoints/mine/model.pt");
    fs::create_dir_all(mine.parent().unwrap()).unwrap();
    fs::write(&mine, "mine").unwrap();
    save(folder.path(), 20);
    drop(checkpoint::Writer::begin(folder.path(), 60, 5).unwrap());
    assert_eq!(open(&run).unwrap().1, None);
    let left: Vec<_> = fs::read_dir(folder.path().join("checkpoints"))
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(left, ["mine"]);
    assert!(mine.is_file());
}

#[test]
fn the_folder_of_a_run_that_lives_is_refused_to_others_whatever_they_ask_for() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = run(folder.path());
    let life = |run: &Run, token: Option<&'static str>, restarted: bool| {
        let request = Request {
            token,
            restarted,
            generation: 1 + u64::from(restarted),
            // Nobody is waited for.
            deadline: Instant::now(),
            ..request(run, 0, 1)
        };
        RunDir::open(request, &MemoryStore::default())
    };
    let alive = life(&run, Some("a"), false).unwrap();
    save(folder.path(), 20);
    for (resume, overwrite) in [
        (Resume::Never, false),
        (Resume::Never, true),
        (Resume::Auto, false),
        (Resume::Require, false),
    ] {
        (run.resume, run.overwrite) = (resume, overwrite);
        for (token, restarted) in [
            (Some("b"), false),
            (Some("b"), true),
            (Some("a"), false),
            (None, false),
        ] {
            let refused = life(&run, token, restarted);
            assert!(
                matches!(&refused, Err(RunFilesError::InUse(words)) if words.contains("is in use: job `")),
                "{run:?} {token:?}: {refused:?}"
            );
        }
    }
    assert!(folder.path().join("checkpoints/step_00000020").is_dir());
    // Its own next life, while a disk that hangs keeps the one before.
    let next = life(&run, Some("a"), true).unwrap();
    assert_eq!(next.1, Some(20));
    drop((alive, next));
    run.resume = Resume::Auto;
    assert_eq!(life(&run, Some("b"), false).unwrap().1, Some(20));
}

#[test]
fn a_run_whose_latest_is_lost_goes_on_from_the_newest_whole_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = run(folder.path());
    run.resume = Resume::Require;
    save(folder.path(), 20);
    save(folder.path(), 40);
    // Not one of ours: a folder of this name is whole.
    fs::create_dir(folder.path().join("checkpoints/step_00000060")).unwrap();
    fs::remove_file(folder.path().join("checkpoints/latest")).unwrap();
    assert_eq!(open(&run).unwrap().1, Some(40));
}

#[test]
fn checkpoints_whose_deletion_was_interrupted_are_no_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = run(folder.path());
    save(folder.path(), 20);
    let named = folder.path().join("checkpoints");
    fs::rename(named, folder.path().join(".deleting_checkpoints")).unwrap();
    assert_eq!(open(&run).unwrap().1, None);
    save(folder.path(), 30);
    run.overwrite = true;
    assert_eq!(open(&run).unwrap().1, None);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_file_in_the_way_is_an_error_with_a_hint() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    insta::assert_snapshot!(error(&run(&file), folder.path()), @r"
    cannot create `DIR/file`: File exists (os error 17)
      hint: a file exists where a directory is needed; set a different `run.out_dir`
    ");
    insta::assert_snapshot!(error(&run(&file.join("below")), folder.path()), @r"
    cannot create `DIR/file/below`: Not a directory (os error 20)
      hint: a file exists where a directory is needed; set a different `run.out_dir`
    ");
}

#[test]
fn a_life_knows_what_is_new_since_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = run(folder.path());
    let lines = |ranks: &str| ["model a", ranks].map(str::to_owned);
    let (dir, _) = open(&run).unwrap();
    assert_eq!(dir.exchange_startup(&lines("2 ranks")), None);
    assert_eq!(dir.exchange_startup(&lines("2 ranks")), Some(vec![]));
    let news = dir.exchange_startup(&lines("1 rank"));
    assert_eq!(news, Some(vec!["1 rank".to_owned()]));
    drop(dir);
    run.overwrite = true;
    fs::write(folder.path().join("metrics.jsonl"), "").unwrap();
    let (dir, _) = open(&run).unwrap();
    assert_eq!(dir.exchange_startup(&lines("1 rank")), None);
}

#[test]
fn a_job_that_was_stopped_goes_on_when_it_is_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut run = run(folder.path());
    fs::create_dir_all(folder.path().join("checkpoints/step_00000001")).unwrap();
    let write_summary = |run_id: &str, complete: bool, stopped: Option<&str>| {
        let summary = serde_json::json!({
            "name": "train", "run_id": run_id, "steps": 1, "complete": complete, "stopped": stopped, "samples": 1, "tokens": 1,
            "parameters": 1, "seconds": 1.0, "tokens_per_s": 1.0, "world_size": 1,
            "generation": 1, "restarts": 0,
        });
        fs::write(folder.path().join("summary.json"), summary.to_string()).unwrap();
    };
    for (run_id, complete, stopped, goes_on) in [
        ("job", false, Some("SIGTERM"), true),
        ("job", true, None, false),
        // Its last state could not be saved.
        ("job", false, None, false),
        ("other", false, Some("SIGTERM"), false),
    ] {
        write_summary(run_id, complete, stopped);
        assert_eq!(open(&run).is_ok(), goes_on, "{run_id} {complete} {stopped:?}");
    }
    write_summary("job", false, Some("SIGTERM"));
    run.overwrite = true;
    open(&run).unwrap();
    assert!(!folder.path().join("summary.json").exists(), "as it was told");
}
