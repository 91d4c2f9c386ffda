//! Checkpoints as a whole: round trips, damage, and a crash after every step of a save.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use tempfile::TempDir;

use super::storage::{Disk, Storage};
use super::{CheckpointError, Expected, Piece, Reader, Rng, State, Which, Writer, latest_step, step_name};
use crate::device::DType;

const SHAPE: &[usize] = &[3, 4];

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
        rng: Rng {
            seed: 1337,
            data_order: "test/1".into(),
        },
        // As the configuration gives it: an `f32`, which has a long decimal form.
        config: serde_json::json!({ "train": { "steps": 100, "lr": 3e-4_f32 } }),
    }
}

fn piece<'a>(tensor: &'a str, range: std::ops::Range<u64>, all: &'a [u8]) -> Piece<'a> {
    let bytes = &all[range.start as usize * 4..range.end as usize * 4];
    Piece {
        tensor,
        shape: SHAPE,
        dtype: DType::F32,
        range,
        bytes,
    }
}

/// Saves `w` whole and `m` in two files, as two ranks would.
fn save_on(storage: Arc<dyn Storage>, out_dir: &Path, step: u64) -> Result<(), CheckpointError> {
    let (w, m) = (weights(step), weights(step + 1000));
    let writer = Writer::begin_on(storage, out_dir, step, 1)?;
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
    assert_eq!(reader.read("w", 0..12).unwrap(), weights(step));
    assert_eq!(reader.read("m", 0..12).unwrap(), weights(step + 1000));
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

fn saved(step: u64) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), step);
    let path = folder.path().join("checkpoints").join(step_name(step));
    (folder, path)
}

fn message(error: &CheckpointError, folder: &Path) -> String {
    error.to_string().replace(folder.to_str().unwrap(), "OUT")
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
            reader.read("m", start as u64..end as u64).unwrap(),
            m[start * 4..end * 4]
        );
    }
    let w = weights(20);
    let halves = [reader.read("w", 0..7).unwrap(), reader.read("w", 7..12).unwrap()].concat();
    assert_eq!(halves, w);
    assert_eq!(
        names(&path),
        ["manifest.json", "part-0.safetensors", "part-1.safetensors"]
    );
    assert_eq!(
        names(&folder.path().join("checkpoints")),
        ["latest", "step_00000020"]
    );
}

#[test]
fn files_are_plain_safetensors() {
    let (_folder, path) = saved(3);
    let bytes = fs::read(path.join("part-0.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let whole = tensors.tensor("w").unwrap();
    assert_eq!((whole.shape(), whole.data()), (SHAPE, weights(3).as_slice()));
    let part = tensors.tensor("m@0..5").unwrap();
    assert_eq!(
        (part.shape(), part.data()),
        ([5].as_slice(), &weights(1003)[..20])
    );
    assert_eq!((whole.data().as_ptr() as usize - bytes.as_ptr() as usize) % 4, 0);
}

#[test]
fn all_types_round_trip() {
    let folder = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..48).collect();
    let types = [DType::F64, DType::F32, DType::Bf16, DType::I32, DType::U8];
    let tensors: Vec<(String, [usize; 1])> = types
        .iter()
        .map(|t| (format!("t.{t}"), [48 / t.bytes()]))
        .collect();
    let pieces: Vec<Piece<'_>> = types
        .iter()
        .zip(&tensors)
        .map(|(&dtype, (name, shape))| Piece {
            tensor: name,
            shape,
            dtype,
            range: 0..shape[0] as u64,
            bytes: &bytes,
        })
        .collect();
    let writer = Writer::begin(folder.path(), 1, 1).unwrap();
    writer.write("a", &pieces).unwrap();
    writer.commit(&state(1), &["a"]).unwrap();
    let reader = Reader::open(folder.path(), Which::Latest).unwrap();
    let expected: Vec<_> = pieces
        .iter()
        .map(|p| Expected {
            tensor: p.tensor,
            shape: p.shape,
            dtype: p.dtype,
        })
        .collect();
    reader.expect(&expected).unwrap();
    for piece in &pieces {
        assert_eq!(reader.read(piece.tensor, piece.range.clone()).unwrap(), bytes);
    }
}

#[test]
fn the_manifest_names_tensors_and_neither_ranks_nor_arenas() {
    let (_folder, path) = saved(7);
    let text = fs::read_to_string(path.join("manifest.json")).unwrap();
    insta::assert_snapshot!(text, @r#"
    {
      "format_version": 1,
      "blake3": "b4950c8503e9b9951011f8d7f35c9b08059c3d5ea7ab7aba3be5a9740cc47b0a",
      "step": 7,
      "consumed_samples": 112,
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
      "files": [
        {
          "name": "part-0.safetensors",
          "bytes": 228
        },
        {
          "name": "part-1.safetensors",
          "bytes": 132
        }
      ],
      "tensors": [
        {
          "name": "m",
          "shape": [
            3,
            4
          ],
          "dtype": "f32",
          "pieces": [
            {
              "file": "part-0.safetensors",
              "entry": "m@0..5",
              "start": 0,
              "end": 5,
              "blake3": "d006f59b4b13098f9de8924733df6d271e3f56a5ddcb594798286c5b2a5ae270"
            },
            {
              "file": "part-1.safetensors",
              "entry": "m@5..12",
              "start": 5,
              "end": 12,
              "blake3": "fc5f908eb0a0d030c2755092c231c01c0b6489286bbe6bd297f116fe7d467c07"
            }
          ]
        },
        {
          "name": "w",
          "shape": [
            3,
            4
          ],
          "dtype": "f32",
          "pieces": [
            {
              "file": "part-0.safetensors",
              "entry": "w",
              "start": 0,
              "end": 12,
              "blake3": "88034a40a554c3f8720575665364a9288decdbf846b40cc08c6ab1b09fef1040"
            }
          ]
        }
      ]
    }
    "#);
}

#[test]
fn a_run_without_a_checkpoint_has_none() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(latest_step(folder.path()).unwrap(), None);
    insta::assert_snapshot!(open_error(folder.path()), @"`OUT/checkpoints` holds no checkpoint");
}

#[test]
fn damage_is_named() {
    let (folder, path) = saved(20);
    let part = path.join("part-0.safetensors");
    let good = fs::read(&part).unwrap();

    fs::write(&part, &good[..good.len() - 1]).unwrap();
    insta::assert_snapshot!(open_error(folder.path()), @r"
    checkpoint file `OUT/checkpoints/step_00000020/part-0.safetensors` has 227 bytes, expected 228: truncated or overwritten
      hint: restore the file, or write the name of an older `step_…` folder into `checkpoints/latest`
    ");

    let mut flipped = good.clone();
    *flipped.last_mut().unwrap() ^= 1;
    fs::write(&part, &flipped).unwrap();
    let reader = Reader::open(folder.path(), Which::Latest).unwrap();
    let error = reader
        .read("w", 11..12)
        .or_else(|_| reader.read("m", 0..1))
        .and(reader.verify())
        .unwrap_err();
    insta::assert_snapshot!(message(&error, folder.path()), @r"
    checkpoint file `OUT/checkpoints/step_00000020/part-0.safetensors`: the content of tensor `w`, elements 0..12, does not match its hash
      hint: restore the file, or write the name of an older `step_…` folder into `checkpoints/latest`
    ");

    let mut header = good.clone();
    header[9] = b'!';
    fs::write(&part, &header).unwrap();
    assert!(open_error(folder.path()).contains("part-0.safetensors` is damaged: its header"));

    fs::remove_file(&part).unwrap();
    insta::assert_snapshot!(open_error(folder.path()), @"cannot read `OUT/checkpoints/step_00000020/part-0.safetensors`: No such file or directory (os error 2)");
    fs::write(&part, &good).unwrap();

    let manifest = path.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(
        &manifest,
        text.replace("\"consumed_samples\": 320", "\"consumed_samples\": 321"),
    )
    .unwrap();
    insta::assert_snapshot!(open_error(folder.path()), @r"
    checkpoint file `OUT/checkpoints/step_00000020/manifest.json` is damaged: its content does not match its own hash
      hint: restore the file, or write the name of an older `step_…` folder into `checkpoints/latest`
    ");
    fs::write(
        &manifest,
        text.replace("\"format_version\": 1", "\"format_version\": 2"),
    )
    .unwrap();
    insta::assert_snapshot!(open_error(folder.path()), @r"
    checkpoint `OUT/checkpoints/step_00000020/manifest.json` has format version 2, this build reads 1
      hint: resume with the release that wrote it, or a newer one
    ");
    fs::write(&manifest, &text[..text.len() / 2]).unwrap();
    assert!(open_error(folder.path()).contains("manifest.json` is damaged"));
    fs::write(&manifest, &text).unwrap();

    fs::write(folder.path().join("checkpoints/latest"), "../../etc\n").unwrap();
    insta::assert_snapshot!(open_error(folder.path()), @"cannot read `OUT/checkpoints/latest`: `OUT/checkpoints/latest` names no step: `../../etc`");
    fs::write(folder.path().join("checkpoints/latest"), "step_00000020").unwrap();
    assert_eq!(check_latest(folder.path()), 20);
}

/// Flips a bit in every fifth byte of each file in turn: either the checkpoint is refused, or what it gives is right.
#[test]
fn no_flipped_bit_goes_unnoticed() {
    let (folder, path) = saved(2);
    for name in names(&path) {
        let file = path.join(&name);
        let good = fs::read(&file).unwrap();
        for at in (0..good.len()).step_by(5) {
            let mut bad = good.clone();
            bad[at] ^= 4;
            fs::write(&file, &bad).unwrap();
            let Ok(reader) = Reader::open(folder.path(), Which::Latest) else {
                continue;
            };
            if reader.verify().is_ok() {
                assert_eq!(check_latest(folder.path()), 2, "byte {at} of `{name}`");
            }
        }
        fs::write(&file, &good).unwrap();
    }
}

#[test]
fn another_model_is_refused_by_the_first_difference() {
    let (folder, _) = saved(20);
    let reader = Reader::open(folder.path(), Which::Latest).unwrap();
    let tensor = |tensor, shape, dtype| Expected { tensor, shape, dtype };
    let (w, m) = (tensor("w", SHAPE, DType::F32), tensor("m", SHAPE, DType::F32));
    reader.expect(&[w.clone(), m.clone()]).unwrap();
    let error = |expected: &[Expected<'_>]| message(&reader.expect(expected).unwrap_err(), folder.path());
    insta::assert_snapshot!(error(&[tensor("w", &[4, 4], DType::F32), m.clone()]), @r"
    checkpoint `OUT/checkpoints/step_00000020`: tensor `w` is f32[3, 4], this model's is f32[4, 4]
      hint: resume with the model section that it was written with
    ");
    insta::assert_snapshot!(error(&[tensor("w", SHAPE, DType::Bf16), m.clone()]), @r"
    checkpoint `OUT/checkpoints/step_00000020`: tensor `w` is f32[3, 4], this model's is bf16[3, 4]
      hint: resume with the model section that it was written with
    ");
    insta::assert_snapshot!(error(&[w.clone(), m, tensor("v", SHAPE, DType::F32)]), @r"
    checkpoint `OUT/checkpoints/step_00000020` has no tensor `v`
      hint: it belongs to another model or optimizer
    ");
    insta::assert_snapshot!(error(&[w]), @r"
    checkpoint `OUT/checkpoints/step_00000020` has a tensor `m`, which this model does not have
      hint: it belongs to another model or optimizer
    ");
    assert!(matches!(reader.read("w", 0..13), Err(CheckpointError::Misuse(_))));
    assert!(matches!(
        reader.read("v", 0..1),
        Err(CheckpointError::Missing { .. })
    ));
}

#[test]
fn pieces_that_do_not_make_up_a_tensor_are_refused_and_nothing_is_left() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 10);
    let w = weights(20);
    let commit = |pieces: &[&[Piece<'_>]]| {
        let writer = Writer::begin(folder.path(), 20, 1).unwrap();
        let stems: Vec<String> = (0..pieces.len()).map(|i| format!("part-{i}")).collect();
        for (stem, pieces) in stems.iter().zip(pieces) {
            writer.write(stem, pieces).unwrap();
        }
        let error = writer.commit(&state(20), &stems).unwrap_err();
        assert_eq!(
            names(&folder.path().join("checkpoints")),
            ["latest", "step_00000010"]
        );
        assert_eq!(check_latest(folder.path()), 10);
        message(&error, folder.path())
    };
    insta::assert_snapshot!(commit(&[&[piece("w", 0..5, &w)], &[piece("w", 6..12, &w)]]), @"the pieces of tensor `w` do not make it up: elements 5..6 are in no file");
    insta::assert_snapshot!(commit(&[&[piece("w", 0..7, &w)], &[piece("w", 6..12, &w)]]), @"the pieces of tensor `w` do not make it up: elements 6..7 are twice, also in `part-1.safetensors`");
    let other = Piece {
        shape: &[12],
        ..piece("w", 6..12, &w)
    };
    insta::assert_snapshot!(commit(&[&[piece("w", 0..6, &w)], &[other]]), @"the pieces of tensor `w` do not make it up: one file says f32[3, 4], another f32[12]");
}

#[test]
fn pieces_that_contradict_themselves_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let writer = Writer::begin(folder.path(), 1, 1).unwrap();
    let w = weights(1);
    let good = piece("w", 0..12, &w);
    let wrong = [
        Piece {
            range: 0..11,
            ..good.clone()
        },
        Piece {
            range: 5..17,
            ..good.clone()
        },
        Piece {
            dtype: DType::F64,
            ..good.clone()
        },
        Piece {
            shape: &[usize::MAX, 9],
            ..good.clone()
        },
        Piece {
            tensor: "a@b",
            ..good.clone()
        },
    ];
    for piece in wrong {
        assert!(
            matches!(
                writer.write("a", std::slice::from_ref(&piece)),
                Err(CheckpointError::Misuse(_))
            ),
            "{piece:?}"
        );
    }
    assert!(matches!(
        writer.write("a", &[good.clone(), good.clone()]),
        Err(CheckpointError::Misuse(_))
    ));
    for stem in ["", "../a", "a.b", "a/b"] {
        assert!(
            matches!(
                writer.write(stem, std::slice::from_ref(&good)),
                Err(CheckpointError::Misuse(_))
            ),
            "{stem}"
        );
    }
    writer.abort().unwrap();
    assert!(names(&folder.path().join("checkpoints")).is_empty());
}

#[test]
fn saving_the_latest_step_again_keeps_it_if_it_is_the_same() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 20);
    save(folder.path(), 20);
    assert_eq!(check_latest(folder.path()), 20);
    let other = weights(7);
    let writer = Writer::begin(folder.path(), 20, 1).unwrap();
    writer.write("a", &[piece("w", 0..12, &other)]).unwrap();
    let error = writer.commit(&state(20), &["a"]).unwrap_err();
    insta::assert_snapshot!(message(&error, folder.path()), @r"
    checkpoint `OUT/checkpoints/step_00000020` exists already with another content
      hint: delete it, or take another `run.out_dir`
    ");
    assert_eq!(check_latest(folder.path()), 20);
    assert_eq!(
        names(&folder.path().join("checkpoints")),
        ["latest", "step_00000020"]
    );
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
    assert_eq!(
        names(&folder.path().join("checkpoints/step_00000020")),
        ["manifest.json", "part-0.safetensors", "part-1.safetensors"]
    );
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
      hint: `run.out_dir` must be a folder that this user may write to
    ");
    let full = CheckpointError::io("write", Path::new("x"), &io::ErrorKind::StorageFull.into());
    insta::assert_snapshot!(full, @r"
    cannot write `x`: no storage space
      hint: free space there; the checkpoint before it is still usable
    ");
}

/// A disk that stops after a number of steps. What was not synced by then may be lost.
struct Faulty {
    state: Mutex<FaultyState>,
}

#[derive(Default)]
struct FaultyState {
    steps_left: usize,
    stopped: bool,
    /// Files whose content may be lost.
    unsynced: HashSet<PathBuf>,
    /// Renames whose folder was not synced: the file as it was before, and where it is now.
    renamed: Vec<(PathBuf, PathBuf, Option<Vec<u8>>)>,
}

impl Faulty {
    fn after(steps: usize) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(FaultyState {
                steps_left: steps,
                ..FaultyState::default()
            }),
        })
    }

    /// Takes a step, or fails from now on.
    fn step(&self, apply: impl FnOnce(&mut FaultyState) -> io::Result<()>) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        if state.steps_left == 0 {
            state.stopped = true;
            return Err(io::Error::new(io::ErrorKind::StorageFull, "stopped by the test"));
        }
        state.steps_left -= 1;
        apply(&mut state)
    }

    fn stopped(&self) -> bool {
        self.state.lock().unwrap().stopped
    }

    /// The power goes: renames that were not synced are undone, unsynced content is cut in half.
    fn lose_unsynced(&self) {
        let state = std::mem::take(&mut *self.state.lock().unwrap());
        for (from, to, before) in state.renamed.into_iter().rev() {
            fs::rename(&to, &from).unwrap();
            if let Some(before) = before {
                fs::write(&to, before).unwrap();
            }
        }
        for path in state.unsynced {
            if let Ok(content) = fs::read(&path) {
                fs::write(&path, &content[..content.len() / 2]).unwrap();
            }
        }
    }
}

impl Storage for Faulty {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.step(|_| Disk.create_folder(path))
    }

    fn write(&self, path: &Path, content: &[&[u8]]) -> io::Result<()> {
        let mut half = content.concat();
        half.truncate(half.len() / 2);
        let wrote = self.step(|state| {
            state.unsynced.insert(path.to_owned());
            Disk.write(path, content)
        });
        if wrote.is_err() && path.parent().is_some_and(Path::exists) {
            // A full disk leaves what fitted.
            Disk.write(path, &[&half])?;
        }
        wrote
    }

    fn sync_file(&self, path: &Path) -> io::Result<()> {
        self.step(|state| {
            state.unsynced.remove(path);
            Disk.sync_file(path)
        })
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.step(|state| {
            state.renamed.retain(|(_, to, _)| to.parent() != Some(path));
            Disk.sync_folder(path)
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step(|state| {
            let before = fs::read(to).ok();
            Disk.rename(from, to)?;
            state.renamed.push((from.to_owned(), to.to_owned(), before));
            let moved = |path: PathBuf| path.strip_prefix(from).map_or(path.clone(), |rest| to.join(rest));
            state.unsynced = state.unsynced.drain().map(moved).collect();
            Ok(())
        })
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.step(|_| Disk.remove_file(path))
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.step(|_| Disk.remove_folder(path))
    }
}

/// Stops a save after each of its steps in turn. After each, the latest checkpoint opens and verifies, and
/// the next save succeeds and leaves nothing of the failed one.
fn stop_after_each_step(power_cut: bool) {
    let mut stops = 0;
    loop {
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), 10);
        let storage = Faulty::after(stops);
        let result = save_on(storage.clone(), folder.path(), 20);
        let finished = !storage.stopped();
        if power_cut && !finished {
            storage.lose_unsynced();
        }
        let latest = check_latest(folder.path());
        assert!(
            latest == 10 || latest == 20,
            "after {stops} steps the latest is {latest}"
        );
        if finished {
            result.unwrap();
            assert_eq!(latest, 20);
            break;
        }
        result.unwrap_err();
        save(folder.path(), 20);
        assert_eq!(check_latest(folder.path()), 20, "after {stops} steps");
        let left = names(&folder.path().join("checkpoints"));
        assert_eq!(
            left,
            ["latest", "step_00000010", "step_00000020"],
            "after {stops} steps"
        );
        save(folder.path(), 30);
        assert_eq!(check_latest(folder.path()), 30, "after {stops} steps");
        stops += 1;
    }
    assert!(stops > 15, "a save has more than {stops} steps");
}

#[test]
fn a_process_that_dies_after_any_step_leaves_a_usable_checkpoint() {
    stop_after_each_step(false);
}

#[test]
fn a_power_cut_after_any_step_leaves_a_usable_checkpoint() {
    stop_after_each_step(true);
}

/// One step fails (a full disk), and the ones after it work again.
#[test]
fn a_save_that_failed_deletes_what_it_wrote() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 10);
    let writer = Writer::begin(folder.path(), 20, 1).unwrap();
    let w = weights(20);
    writer.write("part-0", &[piece("w", 0..12, &w)]).unwrap();
    let error = writer.commit(&state(20), &["part-0", "part-1"]).unwrap_err();
    assert!(
        message(&error, folder.path()).contains("part-1.index.json"),
        "{error}"
    );
    assert_eq!(
        names(&folder.path().join("checkpoints")),
        ["latest", "step_00000010"]
    );
}
