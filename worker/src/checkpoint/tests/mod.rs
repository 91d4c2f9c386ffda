//! Checkpoints as a whole: fixtures and round trips.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;

use super::storage::{Disk, DiskStep, Storage};
use super::{CheckpointError, Extent, Reader, Rng, State, TensorKind, TensorName, Which, Writer, step_name};
use crate::device::DType;
use crate::model::Region;

mod crash;
mod damage;
mod journal;
mod layouts;
mod tools;

const SHAPE: &[u64] = &[3, 4];

impl Writer {
    /// Begins the checkpoint after `step` finished steps, on the rank that will commit it.
    pub(crate) fn begin(out_dir: &Path, step: u64, generation: u64) -> Result<Self, CheckpointError> {
        let writer = Self::on(Arc::new(Disk), out_dir, step, generation);
        writer.lead()?;
        Ok(writer)
    }

    /// Joins a checkpoint that rank 0 of the same generation begins, before this or after it.
    pub(crate) fn join(out_dir: &Path, step: u64, generation: u64) -> Result<Self, CheckpointError> {
        let writer = Self::on(Arc::new(Disk), out_dir, step, generation);
        writer.follow()?;
        Ok(writer)
    }

    /// Writes one file with these extents and their bytes.
    pub(crate) fn write(&self, stem: &str, pieces: &[(Extent, &[u8])]) -> Result<(), CheckpointError> {
        let extents: Vec<Extent> = pieces.iter().map(|(extent, _)| extent.clone()).collect();
        self.file(stem, &extents, |index, part| part.put(pieces[index].1))
    }
}

impl Reader {
    /// The first damage, whatever model it is.
    pub(crate) fn verify(&self) -> Result<(), CheckpointError> {
        let foreign = self.check_model().err();
        let mut damages = self.damages().into_iter();
        damages
            .find(|damage| Some(damage) != foreign.as_ref())
            .map_or(Ok(()), Err)
    }
}

/// Twelve numbers that belong to a step.
fn weights(step: u64) -> Vec<u8> {
    (0..12)
        .flat_map(|i| (step as f32 + i as f32 / 16.0).to_le_bytes())
        .collect()
}

fn state(step: u64) -> State {
    State {
        step,
        consumed_samples: step * 16,
        skipped: 0,
        batch: None,
        rng: Rng {
            seed: 1337,
            data_order: "test/1".into(),
        },
        // As the configuration gives it: an `f32`, which has a long decimal form.
        config: serde_json::json!({ "train": { "steps": 100, "lr": 3e-4_f32 } }),
        data: String::new(),
        val_data: None,
    }
}

fn parameter(key: &str) -> TensorName {
    TensorKind::Parameter.of(key)
}

/// A range of a tensor of f32 that is one region.
fn extent(tensor: TensorName, shape: &[u64], range: Range<u64>) -> Extent {
    Extent {
        tensor,
        shape: shape.to_vec(),
        dtype: DType::F32,
        region: Region::whole(shape),
        range,
    }
}

/// With its elements, of all those of the tensor.
fn piece<'a>(key: &str, range: Range<u64>, all: &'a [u8]) -> (Extent, &'a [u8]) {
    let bytes = &all[range.start as usize * 4..range.end as usize * 4];
    (extent(parameter(key), SHAPE, range), bytes)
}

/// A range of a parameter, as if it were one region.
fn read(reader: &Reader, key: &str, range: Range<u64>) -> Result<Vec<u8>, CheckpointError> {
    let tensor = reader.manifest().tensor(&parameter(key));
    let shape = tensor.map_or(SHAPE, |tensor| &tensor.shape);
    reader.read(&extent(parameter(key), shape, range))
}

/// Saves `w` whole and `m` in two files, as two ranks would.
fn save_on(storage: Arc<dyn Storage>, out_dir: &Path, step: u64) -> Result<(), CheckpointError> {
    let (w, m) = (weights(step), weights(step + 1000));
    let writer = Writer::on(storage, out_dir, step, 1);
    writer.lead()?;
    writer.write("part-0", &[piece("w", 0..12, &w), piece("m", 0..5, &m)])?;
    writer.write("part-1", &[piece("m", 5..12, &m)])?;
    writer.commit(&state(step), &["part-0", "part-1"]).map(drop)
}

fn save(out_dir: &Path, step: u64) {
    save_on(Arc::new(Disk), out_dir, step).unwrap();
}

/// The latest checkpoint opens, every hash is right, and it holds what was saved at its step.
fn check_latest(out_dir: &Path) -> u64 {
    let reader = Reader::open(out_dir, Which::Latest).unwrap();
    reader.verify().unwrap();
    let step = reader.manifest().state.step;
    assert_eq!(reader.manifest().state, state(step));
    assert_eq!(read(&reader, "w", 0..12).unwrap(), weights(step));
    assert_eq!(read(&reader, "m", 0..12).unwrap(), weights(step + 1000));
    step
}

fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(path)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// The checkpoints of a run, and `latest`.
fn listed(run: &TempDir) -> Vec<String> {
    names(&run.path().join("checkpoints"))
}

const PARTS: [&str; 3] = ["manifest.json", "part-0.safetensors", "part-1.safetensors"];

fn saved(step: u64) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), step);
    let path = folder.path().join("checkpoints").join(step_name(step));
    (folder, path)
}

/// The text of an error, without the hint of all errors about damaged files.
fn message(error: &CheckpointError, folder: &Path) -> String {
    const HINT: &str = "\n  hint: restore the file, or go back to the newest complete checkpoint: `ddp-train ckpt rewind OUT`";
    let text = error.to_string().replace(folder.to_str().unwrap(), "OUT");
    text.trim_end_matches(HINT).to_owned()
}

fn open_error(folder: &Path) -> String {
    message(
        &Reader::open(folder, Which::Latest).err().expect("must not open"),
        folder,
    )
}

#[test]
fn written_as_two_pieces_read_as_one_and_the_other_way_round() {
    let (folder, path) = saved(20);
    assert_eq!(check_latest(folder.path()), 20);
    let reader = Reader::open(folder.path(), Which::Step(20)).unwrap();
    // Across the cut between the two files, and in parts of what was written whole.
    let m = weights(1020);
    for (start, end) in [(3, 9), (0, 5), (5, 12), (4, 6), (7, 7), (11, 12)] {
        assert_eq!(
            read(&reader, "m", start as u64..end as u64).unwrap(),
            m[start * 4..end * 4]
        );
    }
    let w = weights(20);
    let halves = [
        read(&reader, "w", 0..7).unwrap(),
        read(&reader, "w", 7..12).unwrap(),
    ]
    .concat();
    assert_eq!(halves, w);
    assert_eq!(names(&path), PARTS);
    assert_eq!(listed(&folder), ["latest", "step_00000020"]);
}

/// As many files as ranks wrote are more than a process may have open.
#[test]
fn an_opened_checkpoint_holds_no_file_open() {
    let (folder, path) = saved(20);
    let reader = Reader::open(folder.path(), Which::Latest).unwrap();
    read(&reader, "w", 0..12).unwrap();
    let open = fs::read_dir("/proc/self/fd").unwrap();
    // A descriptor of another thread may be gone by now.
    let mut open = open.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
    assert_eq!(open.find(|file| file.starts_with(&path)), None);
}

#[test]
fn files_are_plain_safetensors() {
    let (_folder, path) = saved(3);
    let bytes = fs::read(path.join("part-0.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let whole = tensors.tensor("w").unwrap();
    assert_eq!(
        (whole.shape(), whole.data()),
        ([3, 4].as_slice(), weights(3).as_slice())
    );
    let part = tensors.tensor("m@0..5").unwrap();
    assert_eq!(
        (part.shape(), part.data()),
        ([5].as_slice(), &weights(1003)[..20])
    );
    assert_eq!((whole.data().as_ptr() as usize - bytes.as_ptr() as usize) % 4, 0);
}

#[test]
fn skipped_steps_are_saved() {
    let folder = tempfile::tempdir().unwrap();
    let w = weights(1);
    for (step, skipped) in [(20, 0), (30, 7)] {
        let writer = Writer::begin(folder.path(), step, 1).unwrap();
        writer.write("a", &[piece("w", 0..12, &w)]).unwrap();
        let state = State {
            skipped,
            ..state(step)
        };
        writer.commit(&state, &["a"]).unwrap();
        let reader = Reader::open(folder.path(), Which::Latest).unwrap();
        let saved = &reader.manifest().state;
        assert_eq!((saved, saved.updates()), (&state, step - skipped));
    }
}

#[test]
fn all_types_round_trip() {
    let folder = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..48).collect();
    let types = [DType::F64, DType::F32, DType::Bf16, DType::I32, DType::U8];
    let tensors: Vec<(String, [u64; 1])> = types
        .iter()
        .map(|t| (format!("t.{t}"), [48 / t.bytes() as u64]))
        .collect();
    let pieces: Vec<(Extent, &[u8])> = types
        .iter()
        .zip(&tensors)
        .map(|(&dtype, (name, shape))| {
            let whole = extent(parameter(name), shape, 0..shape[0]);
            (Extent { dtype, ..whole }, bytes.as_slice())
        })
        .collect();
    let writer = Writer::begin(folder.path(), 1, 1).unwrap();
    writer.write("a", &pieces).unwrap();
    writer.commit(&state(1), &["a"]).unwrap();
    let reader = Reader::open(folder.path(), Which::Latest).unwrap();
    let expected: Vec<Extent> = pieces.iter().map(|(extent, _)| extent.clone()).collect();
    reader.expect(&expected).unwrap();
    for (extent, _) in &pieces {
        assert_eq!(reader.read_whole(&extent.tensor).unwrap(), bytes);
    }
}

#[test]
fn the_manifest_names_tensors_and_neither_ranks_nor_arenas() {
    let folder = tempfile::tempdir().unwrap();
    let writer = Writer::begin(folder.path(), 7, 1).unwrap();
    let w = weights(7);
    writer.write("part-0", &[piece("w", 0..12, &w)]).unwrap();
    let path = writer.commit(&state(7), &["part-0"]).unwrap();
    let text = fs::read_to_string(path.join("manifest.json")).unwrap();
    insta::assert_snapshot!(text, @r#"
    {
      "format_version": 3,
      "blake3": "0b67600c4f05b67ec81ba3ea546cf98ac6adf4bcf6c8da15a24caf5559ab8945",
      "step": 7,
      "consumed_samples": 112,
      "skipped": 0,
      "rng": {
        "seed": 1337,
        "data_order": "test/1"
      },
      "config": {
        "train": {
          "lr": 0.0003000000142492354,
          "steps": 100
        }
      },
      "data": "",
      "files": [
        {
          "name": "part-0.safetensors",
          "bytes": 144
        }
      ],
      "tensors": [
        {
          "kind": "parameter",
          "key": "w",
          "shape": [
            3,
            4
          ],
          "dtype": "f32",
          "regions": [
            {
              "box": [
                [
                  0,
                  3
                ],
                [
                  0,
                  4
                ]
              ],
              "ranges": [
                {
                  "file": "part-0.safetensors",
                  "entry": "w",
                  "start": 0,
                  "end": 12,
                  "blocks": [
                    "88034a40a554c3f8720575665364a9288decdbf846b40cc08c6ab1b09fef1040"
                  ]
                }
              ]
            }
          ]
        }
      ]
    }
    "#);
}

#[test]
fn pieces_that_do_not_make_up_a_tensor_are_refused_and_nothing_is_left() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 10);
    let w = weights(20);
    let commit = |pieces: &[&[(Extent, &[u8])]]| {
        let writer = Writer::begin(folder.path(), 20, 1).unwrap();
        let stems: Vec<String> = (0..pieces.len()).map(|i| format!("part-{i}")).collect();
        for (stem, pieces) in stems.iter().zip(pieces) {
            writer.write(stem, pieces).unwrap();
        }
        let error = writer.commit(&state(20), &stems).unwrap_err();
        assert_eq!(listed(&folder), ["latest", "step_00000010"]);
        assert_eq!(check_latest(folder.path()), 10);
        message(&error, folder.path())
    };
    insta::assert_snapshot!(commit(&[&[piece("w", 0..5, &w)], &[piece("w", 6..12, &w)]]), @"the regions and ranges of tensor `w` do not cover it exactly: elements 5..6 of region [0..3, 0..4] are in no file");
    insta::assert_snapshot!(commit(&[&[piece("w", 0..7, &w)], &[piece("w", 6..12, &w)]]), @"the regions and ranges of tensor `w` do not cover it exactly: elements 6..7 of region [0..3, 0..4] are stored twice, also in `part-1.safetensors`");
    let other = (extent(parameter("w"), &[12], 6..12), &w[24..]);
    insta::assert_snapshot!(commit(&[&[piece("w", 0..6, &w)], &[other]]), @"the regions and ranges of tensor `w` do not cover it exactly: one file says f32[3, 4], another f32[12]");
}

#[test]
fn pieces_that_contradict_themselves_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let writer = Writer::begin(folder.path(), 1, 1).unwrap();
    let w = weights(1);
    let (good, bytes) = piece("w", 0..12, &w);
    let wrong = [
        Extent {
            range: 0..11,
            ..good.clone()
        },
        Extent {
            range: 5..17,
            ..good.clone()
        },
        Extent {
            dtype: DType::F64,
            ..good.clone()
        },
        Extent {
            shape: vec![u64::MAX, 9],
            ..good.clone()
        },
        Extent {
            region: Region::new(vec![[0, 4], [0, 3]]),
            ..good.clone()
        },
        Extent {
            region: Region::whole(&[12]),
            ..good.clone()
        },
        extent(parameter("a@b"), SHAPE, 0..12),
        extent(parameter("a[0..3]"), SHAPE, 0..12),
    ];
    for extent in wrong {
        let written = writer.write("a", &[(extent.clone(), bytes)]);
        assert!(matches!(written, Err(CheckpointError::Misuse(_))), "{extent:?}");
    }
    let twice = writer.write("a", &[(good.clone(), bytes), (good.clone(), bytes)]);
    assert!(matches!(twice, Err(CheckpointError::Misuse(_))));
    for stem in ["", "../a", "a.b", "a/b"] {
        let written = writer.write(stem, &[(good.clone(), bytes)]);
        assert!(matches!(written, Err(CheckpointError::Misuse(_))), "{stem}");
    }
    writer.abort().unwrap();
    assert!(listed(&folder).is_empty());
}

#[test]
fn saving_the_latest_step_again_mends_one_that_is_damaged() {
    let (folder, path) = saved(20);
    fs::write(path.join("part-1.safetensors"), "").unwrap();
    save(folder.path(), 20);
    assert_eq!(check_latest(folder.path()), 20);
}

#[test]
fn ranks_that_join_in_any_order_write_one_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let (w, m) = (weights(20), weights(1020));
    let follower = Writer::join(folder.path(), 20, 3).unwrap();
    follower.write("part-1", &[piece("m", 0..12, &m)]).unwrap();
    let leader = Writer::begin(folder.path(), 20, 3).unwrap();
    leader.write("part-0", &[piece("w", 0..12, &w)]).unwrap();
    leader.commit(&state(20), &["part-0", "part-1"]).unwrap();
    assert_eq!(check_latest(folder.path()), 20);
}

#[test]
fn a_rank_of_an_earlier_generation_disturbs_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let w = weights(20);
    let all = [piece("w", 0..12, &w)];
    let old = Writer::begin(folder.path(), 20, 1).unwrap();
    let new = Writer::begin(folder.path(), 20, 2).unwrap();
    new.write("part-0", &all).unwrap();
    old.write("part-0", &all).unwrap_err();
    let old = Writer::begin(folder.path(), 20, 1).unwrap();
    old.write("part-0", &[piece("w", 0..6, &w)]).unwrap();
    new.commit(&state(20), &["part-0"]).unwrap();
    old.commit(&state(20), &["part-0"]).unwrap_err();
    let late = Writer::begin(folder.path(), 10, 1).unwrap();
    late.write("part-0", &all).unwrap();
    let error = late.commit(&state(10), &["part-0"]).unwrap_err();
    insta::assert_snapshot!(error, @"the checkpoint of step 10 is older than the latest, of step 20: the job wrote that one after a later restart");
    let reader = Reader::open(folder.path(), Which::Latest).unwrap();
    assert_eq!(read(&reader, "w", 0..12).unwrap(), w);
    assert_eq!(listed(&folder), ["latest", "step_00000020"]);
}

#[test]
fn a_file_that_an_earlier_attempt_left_is_not_merged() {
    let folder = tempfile::tempdir().unwrap();
    let writer = Writer::begin(folder.path(), 20, 1).unwrap();
    let w = weights(3);
    writer.write("part-7", &[piece("w", 0..12, &w)]).unwrap();
    drop(writer);
    save(folder.path(), 20);
    assert_eq!(check_latest(folder.path()), 20);
    assert_eq!(names(&folder.path().join("checkpoints/step_00000020")), PARTS);
}

#[test]
fn an_out_dir_that_cannot_be_written_is_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("checkpoints"), "a file").unwrap();
    let error = Writer::begin(folder.path(), 1, 1).err().unwrap();
    assert!(
        message(&error, folder.path())
            .starts_with("cannot create `OUT/checkpoints/.saving_step_00000001.g1`")
    );
    let denied = CheckpointError::io("write", Path::new("x"), &io::ErrorKind::PermissionDenied.into());
    insta::assert_snapshot!(denied, @r"
    cannot write `x`: permission denied
      hint: check its owner and mode: the user of a run must be able to read and write its `run.out_dir`
    ");
    let full = CheckpointError::io("write", Path::new("x"), &io::ErrorKind::StorageFull.into());
    insta::assert_snapshot!(full, @r"
    cannot write `x`: no storage space
      hint: free some space there
    ");
}
