//! What a user sees of a checkpoint that is damaged or belongs to another model.

use std::fs;

use super::super::Manifest;
use super::super::{latest_step, read_header};
use super::*;

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
    insta::assert_snapshot!(open_error(folder.path()), @"checkpoint file `OUT/checkpoints/step_00000020/part-0.safetensors` has 227 bytes, expected 228: truncated or overwritten");

    let mut flipped = good.clone();
    *flipped.last_mut().unwrap() ^= 1;
    fs::write(&part, &flipped).unwrap();
    let reader = Reader::open(folder.path(), Which::Latest).unwrap();
    let error = read(&reader, "w", 11..12)
        .or_else(|_| read(&reader, "m", 0..1))
        .and(reader.verify())
        .unwrap_err();
    insta::assert_snapshot!(message(&error, folder.path()), @"checkpoint file `OUT/checkpoints/step_00000020/part-0.safetensors`: the content of tensor `w`, elements 0..12, does not match its hash");

    let mut header = good.clone();
    header[9] = b'!';
    fs::write(&part, &header).unwrap();
    assert!(open_error(folder.path()).contains("part-0.safetensors` is damaged: its header"));

    fs::remove_file(&part).unwrap();
    insta::assert_snapshot!(open_error(folder.path()), @"checkpoint file `OUT/checkpoints/step_00000020/part-0.safetensors` is missing");
    // The hint that all other damage has.
    fs::create_dir(&part).unwrap();
    let error = Reader::open(folder.path(), Which::Latest)
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("part-0.safetensors` is damaged: not a regular file\n  hint: restore"),
        "{error}"
    );
    fs::remove_dir(&part).unwrap();
    nix::unistd::mkfifo(&part, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(open_error(folder.path()).contains("part-0.safetensors` is damaged: not a regular file"));
    fs::remove_file(&part).unwrap();
    fs::write(&part, &good).unwrap();

    let manifest = path.join("manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(
        &manifest,
        text.replace("\"consumed_samples\": 320", "\"consumed_samples\": 321"),
    )
    .unwrap();
    insta::assert_snapshot!(open_error(folder.path()), @"checkpoint file `OUT/checkpoints/step_00000020/manifest.json` is damaged: its content does not match its own hash");
    fs::write(
        &manifest,
        text.replace("\"format_version\": 3", "\"format_version\": 4"),
    )
    .unwrap();
    insta::assert_snapshot!(open_error(folder.path()), @r"
    checkpoint `OUT/checkpoints/step_00000020/manifest.json` has format version 4, this build reads 3
      hint: resume with the release that wrote it
    ");
    fs::write(&manifest, &text[..text.len() / 2]).unwrap();
    assert!(open_error(folder.path()).contains("manifest.json` is damaged"));
    fs::write(&manifest, &text).unwrap();

    fs::write(folder.path().join("checkpoints/latest"), "../../etc\n").unwrap();
    insta::assert_snapshot!(open_error(folder.path()), @r"
    cannot read `OUT/checkpoints/latest`: `OUT/checkpoints/latest` does not name a checkpoint: `../../etc`
      hint: write the name of a checkpoint into it, such as `step_00000040`, or delete it to use the newest one
    ");
    fs::write(folder.path().join("checkpoints/latest"), "step_00000020").unwrap();
    assert_eq!(check_latest(folder.path()), 20);
}

#[test]
fn a_latest_checkpoint_that_is_gone_is_named() {
    let (folder, _) = saved(20);
    fs::write(folder.path().join("checkpoints/latest"), "step_00000021").unwrap();
    insta::assert_snapshot!(open_error(folder.path()), @"checkpoint file `OUT/checkpoints/step_00000021/manifest.json` is missing");
    // What no name leads to is found by itself.
    fs::remove_file(folder.path().join("checkpoints/latest")).unwrap();
    assert_eq!(check_latest(folder.path()), 20);
}

#[test]
fn a_file_system_that_does_not_answer_is_named_with_what_it_was_asked() {
    let asked = "sync `out/checkpoints/.saving_step_00000004.g1/parameters-1-of-2.safetensors`";
    let stalled = CheckpointError::stalled(4, asked, 300.0);
    insta::assert_snapshot!(stalled, @r"
    cannot write the checkpoint of step 4: the file system has not responded for 300 s to sync `out/checkpoints/.saving_step_00000004.g1/parameters-1-of-2.safetensors`
      hint: check whether the disk or file server responds (`dmesg`); `train.checkpoint_timeout_s` limits the wait
    ");
    let stuck = CheckpointError::stuck(6, 4, asked);
    insta::assert_snapshot!(stuck, @r"
    cannot start the checkpoint of step 6: the file system has still not responded to sync `out/checkpoints/.saving_step_00000004.g1/parameters-1-of-2.safetensors` for that of step 4
      hint: check whether the disk or file server responds (`dmesg`); `train.checkpoint_timeout_s` limits the wait
    ");
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

/// Elements of a tensor of two blocks and a half, in one range.
const BLOCKS: u64 = 10 << 20;

/// Saves it, and turns a bit of its last block.
fn saved_in_blocks() -> (TempDir, PathBuf, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..BLOCKS as u32).flat_map(u32::to_le_bytes).collect();
    let piece = (extent(parameter("w"), &[BLOCKS], 0..BLOCKS), bytes.as_slice());
    let writer = Writer::begin(folder.path(), 1, 1).unwrap();
    writer.write("part-0", &[piece]).unwrap();
    let path = writer.commit(&state(1), &["part-0"]).unwrap();
    let part = path.join("part-0.safetensors");
    let mut damaged = fs::read(&part).unwrap();
    *damaged.last_mut().unwrap() ^= 1;
    fs::write(&part, damaged).unwrap();
    (folder, path, bytes)
}

#[test]
fn reading_a_part_of_a_range_verifies_only_its_blocks() {
    let (folder, _, bytes) = saved_in_blocks();
    let open = || Reader::open(folder.path(), Which::Latest).unwrap();
    // Across the border of two blocks, and to the end of the second one.
    for (start, end) in [(0, 10), ((4 << 20) - 3, (4 << 20) + 3), (8, 8 << 20)] {
        let found = read(&open(), "w", start..end).unwrap();
        assert!(
            found == bytes[start as usize * 4..end as usize * 4],
            "{start}..{end}"
        );
    }
    let errors = [
        read(&open(), "w", (8 << 20) - 1..(8 << 20) + 1).unwrap_err(),
        open().verify().unwrap_err(),
    ];
    assert_eq!(errors[0], errors[1]);
    insta::assert_snapshot!(message(&errors[0], folder.path()), @"checkpoint file `OUT/checkpoints/step_00000001/part-0.safetensors`: the content of tensor `w`, elements 8388608..10485760, does not match its hash");
    assert_eq!(read(&open(), "w", 0..BLOCKS).unwrap_err(), errors[0]);
}

#[test]
fn a_file_that_is_cut_after_it_was_opened_is_no_panic() {
    let (folder, path, _) = saved_in_blocks();
    let reader = Reader::open(folder.path(), Which::Latest).unwrap();
    let part = path.join("part-0.safetensors");
    // Within its first block, so that there is nothing of the last one.
    let file = fs::OpenOptions::new().write(true).open(&part).unwrap();
    file.set_len(1 << 20).unwrap();
    insta::assert_snapshot!(message(&reader.verify().unwrap_err(), folder.path()), @"checkpoint file `OUT/checkpoints/step_00000001/part-0.safetensors` ends before its last tensor");
}

#[test]
fn a_file_that_is_shorter_than_its_header_says_is_refused_though_the_manifest_agrees() {
    let (folder, path) = saved(20);
    let part = path.join("part-0.safetensors");
    let file = fs::OpenOptions::new().write(true).open(&part).unwrap();
    file.set_len(220).unwrap();
    let manifest = path.join("manifest.json");
    let sealed = fs::read_to_string(&manifest).unwrap();
    let mut contents = Manifest::read(&manifest).unwrap();
    contents.files[0].bytes = 220;
    assert!(sealed.contains("228"));
    fs::write(&manifest, contents.to_bytes().unwrap()).unwrap();
    insta::assert_snapshot!(open_error(folder.path()), @"checkpoint file `OUT/checkpoints/step_00000020/part-0.safetensors` has 220 bytes, but its header describes 228");
}

#[test]
fn a_header_of_more_bytes_than_there_are_numbers_for_is_refused() {
    let (folder, path) = saved(20);
    // Eight tensors, each as long as one may be: together more bytes than there are numbers for.
    let most = u64::MAX / 8;
    let entry = |i| {
        format!(
            r#""w{i}": {{"dtype": "U8", "shape": [{most}], "data_offsets": [{}, {}]}}"#,
            i * most,
            (i + 1) * most
        )
    };
    let header = format!("{{{}}}", (0..8).map(entry).collect::<Vec<_>>().join(", "));
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    fs::write(path.join("part-0.safetensors"), &file).unwrap();
    let manifest = path.join("manifest.json");
    let mut contents = Manifest::read(&manifest).unwrap();
    contents.files[0].bytes = file.len() as u64;
    fs::write(&manifest, contents.to_bytes().unwrap()).unwrap();
    let error = open_error(folder.path());
    assert!(
        error.contains(&format!("its header describes {}", u64::MAX)),
        "{error}"
    );
}

/// It made room for the whole header before it looked for it.
#[test]
fn a_header_that_is_longer_than_its_file_gets_no_room() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("claims.safetensors");
    fs::write(&path, [&99_000_000_u64.to_le_bytes()[..], b"{}"].concat()).unwrap();
    let Err(error) = read_header(&mut fs::File::open(&path).unwrap()) else {
        panic!("there is no header");
    };
    assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
    assert_eq!(
        error.to_string(),
        "its header claims 99000000 bytes, and 2 follow"
    );
}

#[test]
fn a_latest_that_is_too_long_names_no_step() {
    let (folder, _) = saved(20);
    let latest = folder.path().join("checkpoints/latest");
    fs::write(latest, vec![b'x'; (1 << 20) + 1]).unwrap();
    insta::assert_snapshot!(open_error(folder.path()), @r"
    cannot read `OUT/checkpoints/latest`: `OUT/checkpoints/latest` does not name a checkpoint: it is longer than 1048576 bytes
      hint: write the name of a checkpoint into it, such as `step_00000040`, or delete it to use the newest one
    ");
}

#[test]
fn hashes_that_are_not_those_of_the_blocks_are_refused() {
    let (folder, path, _) = saved_in_blocks();
    let manifest = path.join("manifest.json");
    let good = Manifest::read(&manifest).unwrap();
    let forged = |change: fn(&mut Vec<String>)| {
        let mut bad = good.clone();
        change(&mut bad.tensors[0].regions[0].ranges[0].blocks);
        fs::write(&manifest, bad.to_bytes().unwrap()).unwrap();
    };
    for change in
        [|blocks| blocks.swap(0, 1), |blocks| blocks[0] = "no hash".into()] as [fn(&mut Vec<String>); 2]
    {
        forged(change);
        let error = read(&Reader::open(folder.path(), Which::Latest).unwrap(), "w", 0..1).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("elements 0..4194304, does not match its hash"),
            "{error}"
        );
    }
    for change in
        [|blocks| drop(blocks.pop()), |blocks| blocks.push(String::new())] as [fn(&mut Vec<String>); 2]
    {
        forged(change);
        let error = open_error(folder.path());
        assert!(
            error.contains("entry `w` does not have one hash per block"),
            "{error}"
        );
    }
}

/// A short manifest and a short file made a tensor of any size.
#[test]
fn an_entry_that_is_listed_twice_is_refused() {
    let (folder, path) = saved(20);
    let manifest = path.join("manifest.json");
    let mut contents = Manifest::read(&manifest).unwrap();
    let tensor = contents.tensors.iter_mut().find(|tensor| tensor.name.key == "w");
    let tensor = tensor.unwrap();
    tensor.shape = vec![6, 4];
    let mut again = tensor.regions[0].clone();
    again.region = Region::new(vec![[3, 6], [0, 4]]);
    tensor.regions.push(again);
    fs::write(&manifest, contents.to_bytes().unwrap()).unwrap();
    insta::assert_snapshot!(open_error(folder.path()), @"checkpoint file `OUT/checkpoints/step_00000020/manifest.json` is damaged: entry `w` of `part-0.safetensors` is listed as `w[0..3, 0..4]`");
}

#[test]
fn another_model_is_refused_by_the_first_difference() {
    let (folder, _) = saved(20);
    let reader = Reader::open(folder.path(), Which::Latest).unwrap();
    let tensor = |key, shape: &[u64], dtype| Extent {
        dtype,
        ..extent(parameter(key), shape, 0..12)
    };
    let [w, m, v] = ["w", "m", "v"].map(|key| tensor(key, SHAPE, DType::F32));
    reader.expect(&[w.clone(), m.clone()]).unwrap();
    let error = |expected: &[Extent]| message(&reader.expect(expected).unwrap_err(), folder.path());
    insta::assert_snapshot!(error(&[tensor("w", &[4, 4], DType::F32), m.clone()]), @r"
    checkpoint `OUT/checkpoints/step_00000020`: tensor `w` is f32[3, 4], but f32[4, 4] in this model
      hint: resume with the model section that it was written with
    ");
    insta::assert_snapshot!(error(&[tensor("w", SHAPE, DType::Bf16), m.clone()]), @r"
    checkpoint `OUT/checkpoints/step_00000020`: tensor `w` is f32[3, 4], but bf16[3, 4] in this model
      hint: resume with the model section that it was written with
    ");
    insta::assert_snapshot!(error(&[w.clone(), m, v]), @r"
    checkpoint `OUT/checkpoints/step_00000020` has no tensor `v`
      hint: it belongs to a different model or optimizer
    ");
    insta::assert_snapshot!(error(&[w]), @r"
    checkpoint `OUT/checkpoints/step_00000020` has a tensor `m`, which this model does not have
      hint: it belongs to a different model or optimizer
    ");
    assert!(matches!(
        read(&reader, "w", 0..13),
        Err(CheckpointError::Misuse(_))
    ));
    assert!(matches!(
        read(&reader, "v", 0..1),
        Err(CheckpointError::Foreign { .. })
    ));
}
