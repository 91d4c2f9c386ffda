//! Rewriting checkpoints: for other numbers of ranks, and for other tools.

use safetensors::SafeTensors;

use super::super::{Disk, Keep, export, reshard, retain};
use super::*;

fn disk() -> Arc<dyn Storage> {
    Arc::new(Disk)
}

const NAMES: [&str; 6] = [
    "wte.weight",
    "h.0.ln_1.bias",
    "optimizer.m.wte.weight",
    "optimizer.m.h.0.ln_1.bias",
    "optimizer.v.wte.weight",
    "optimizer.v.h.0.ln_1.bias",
];

fn shape_of(name: &str) -> Vec<u64> {
    if name.ends_with("bias") {
        vec![7]
    } else {
        vec![300, 7]
    }
}

fn content_of(name: &str) -> Vec<u8> {
    let elements: u64 = shape_of(name).iter().product();
    let seed = name.len() as f32;
    (0..elements)
        .flat_map(|i| (seed * 100.0 + i as f32).to_le_bytes())
        .collect()
}

/// A run of a GPT-2 whose checkpoint one rank wrote.
fn run() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let writer = Writer::begin(folder.path(), 40, 1).unwrap();
    let contents: Vec<(Vec<u64>, Vec<u8>)> = NAMES.iter().map(|n| (shape_of(n), content_of(n))).collect();
    let pieces: Vec<Piece<'_>> = NAMES
        .iter()
        .zip(&contents)
        .map(|(tensor, (shape, bytes))| Piece {
            tensor,
            shape,
            dtype: DType::F32,
            range: 0..shape.iter().product(),
            bytes,
        })
        .collect();
    writer.write("parameters", &pieces).unwrap();
    let model = serde_json::json!({
        "kind": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 7, "block_size": 16, "vocab_size": null,
    });
    let state = State {
        config: serde_json::json!({ "model": model }),
        ..state(40)
    };
    writer.commit(&state, &["parameters"]).unwrap();
    folder
}

#[test]
fn resharding_keeps_every_bit_and_balances_the_files() {
    let source = run();
    let mut from = Reader::open(source.path(), Which::Latest).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (i, ranks) in [2, 8, 3, 1, 4].into_iter().enumerate() {
        let out = folder.path().join(i.to_string());
        let path = reshard(&disk(), &from, &out, ranks).unwrap();
        assert_eq!(path, out.join("checkpoints/step_00000040"));
        // The next one is made from this one.
        from = Reader::open(&out, Which::Latest).unwrap();
        from.verify().unwrap();
        assert_eq!(from.manifest().state.consumed_samples, 640);
        for name in NAMES {
            let elements = shape_of(name).iter().product();
            assert_eq!(
                from.read(name, 0..elements).unwrap(),
                content_of(name),
                "{name} for {ranks}"
            );
        }
        let files = &from.manifest().files;
        assert_eq!(files.len(), 3 * ranks);
        let data = |name: &str| -> u64 {
            let tensors = from.manifest().tensors.iter().flat_map(|t| &t.pieces);
            tensors.filter(|p| p.file == name).map(|p| p.end - p.start).sum()
        };
        let elements: Vec<u64> = files.iter().map(|file| data(&file.name)).collect();
        let (least, most) = (elements.iter().min().unwrap(), elements.iter().max().unwrap());
        assert!(most - least <= 1, "{elements:?}");
    }
    let taken = folder.path().join("0");
    let error = reshard(&disk(), &from, &taken, 2).unwrap_err();
    insta::assert_snapshot!(message(&error, folder.path()), @r"
    `OUT/0/checkpoints/latest` exists already
      hint: name a folder that does not exist yet, or delete it
    ");
}

#[test]
fn an_export_is_read_by_others_bit_by_bit() {
    let source = run();
    let reader = Reader::open(source.path(), Which::Latest).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("gpt2");
    export(&disk(), &reader, &target).unwrap();
    assert_eq!(names(folder.path()), ["gpt2"]);
    assert_eq!(names(&target), ["config.json", "model.safetensors"]);
    let bytes = fs::read(target.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.len(), 2, "parameters only");
    for name in &NAMES[..2] {
        let tensor = tensors.tensor(name).unwrap();
        let shape: Vec<u64> = tensor.shape().iter().map(|d| *d as u64).collect();
        assert_eq!(
            (shape, tensor.data()),
            (shape_of(name), content_of(name).as_slice())
        );
    }
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(target.join("config.json")).unwrap()).unwrap();
    assert_eq!(
        (&config["model_type"], &config["vocab_size"]),
        (&"gpt2".into(), &300.into())
    );
    assert_eq!(
        (&config["n_positions"], &config["n_layer"]),
        (&16.into(), &1.into())
    );
    let error = export(&disk(), &reader, &target).unwrap_err();
    insta::assert_snapshot!(message(&error, folder.path()), @r"
    `OUT/gpt2` exists already
      hint: name a folder that does not exist yet, or delete it
    ");
}

#[test]
fn a_damaged_source_is_neither_exported_nor_resharded() {
    let source = run();
    let part = source
        .path()
        .join("checkpoints/step_00000040/parameters.safetensors");
    let mut bytes = fs::read(&part).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&part, bytes).unwrap();
    let reader = Reader::open(source.path(), Which::Latest).unwrap();
    assert_eq!(reader.damages().len(), 1);
    let folder = tempfile::tempdir().unwrap();
    let (exported, resharded) = (folder.path().join("a"), folder.path().join("b"));
    // Entries are sorted by name: the last one is a parameter.
    for error in [
        export(&disk(), &reader, &exported).unwrap_err(),
        reshard(&disk(), &reader, &resharded, 3).unwrap_err(),
    ] {
        assert!(error.to_string().contains("tensor `wte.weight`"), "{error}");
    }
    assert!(!exported.exists());
    assert_eq!(names(folder.path()), ["b"]);
    assert!(names(&resharded.join("checkpoints")).is_empty());
}

#[test]
fn what_is_not_kept_goes_and_what_is_not_ours_stays() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("checkpoints");
    for step in [10, 20, 30, 40, 50] {
        save(folder.path(), step);
    }
    // A copy under another step's name, a folder without a checkpoint, a link, and a name of the user's.
    fs::create_dir(root.join("step_00000005")).unwrap();
    fs::create_dir(root.join("best")).unwrap();
    std::os::unix::fs::symlink(root.join("step_00000050"), root.join("step_00000006")).unwrap();
    fs::create_dir(root.join("step_00000007")).unwrap();
    fs::copy(
        root.join("step_00000050/manifest.json"),
        root.join("step_00000007/manifest.json"),
    )
    .unwrap();
    let keep = Keep {
        last: 2,
        every: Some(20),
    };
    assert_eq!(retain(&Disk, folder.path(), keep, &[10]).unwrap(), [30]);
    assert_eq!(
        names(&root),
        [
            "best",
            "latest",
            "step_00000005",
            "step_00000006",
            "step_00000007",
            "step_00000010",
            "step_00000020",
            "step_00000040",
            "step_00000050"
        ]
    );
    assert_eq!(
        retain(&Disk, folder.path(), Keep { last: 1, every: None }, &[]).unwrap(),
        [10, 20, 40]
    );
    assert_eq!(check_latest(folder.path()), 50);
}
