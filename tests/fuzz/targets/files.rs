//! What files of others hold: checkpoints, published weights, token files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ddp_worker::checkpoint::{Disk, Extent, Reader, Rng, State, TensorKind, Writer};
use ddp_worker::config::{self, Paths, Tokenizer};
use ddp_worker::data::{Tokens, Vocabulary};
use ddp_worker::device::DType;
use ddp_worker::model::Region;
use ddp_worker::pretrained::PretrainedWeights;
use tempfile::TempDir;

use crate::runner::Target;

/// In memory.
fn folder() -> TempDir {
    tempfile::tempdir_in("/dev/shm").expect("memory")
}

/// A checkpoint of two tensors, one of them in two regions, and its folder.
fn checkpoint(out_dir: &Path) -> PathBuf {
    let writer = Writer::on(Arc::new(Disk), out_dir, 20, 1);
    writer.lead().expect("writable");
    let extent = |key: &str, rows: [u64; 2]| Extent {
        tensor: TensorKind::Parameter.of(key),
        shape: vec![4, 3],
        dtype: DType::F32,
        region: Region::new(vec![rows, [0, 3]]),
        range: 0..3 * (rows[1] - rows[0]),
    };
    let extents = [extent("w", [0, 4]), extent("v", [0, 1]), extent("v", [1, 4])];
    let filled = writer.file("part-0", &extents, |index, part| {
        part.put(&vec![7; extents[index].bytes() as usize])
    });
    filled.expect("writable");
    let state = State {
        step: 20,
        consumed_samples: 320,
        skipped: 0,
        batch: None,
        rng: Rng {
            seed: 1337,
            data_order: "1".into(),
        },
        config: serde_json::json!({"model": {"n_layer": 2}, "train": {"steps": 40}}),
        data: None,
        val_data: None,
    };
    writer.commit(&state, &["part-0"]).expect("complete")
}

const SEAL: &str = "\"blake3\": \"";

/// With the hash that its text has: damage alone would be found there.
fn sealed(text: &str) -> String {
    let Some(at) = text.find(SEAL) else {
        return text.to_owned();
    };
    let start = at + SEAL.len();
    let Some(seal) = text.get(start..start + 64) else {
        return text.to_owned();
    };
    let unsealed = text.replacen(seal, &"0".repeat(64), 1);
    let hash = blake3::hash(unsealed.as_bytes()).to_hex();
    unsealed.replacen(&"0".repeat(64), &hash, 1)
}

pub(crate) fn manifest() -> Target {
    let run = folder();
    let path = checkpoint(run.path());
    let manifest = path.join("manifest.json");
    let seed = fs::read(&manifest).expect("it was written");
    Reader::open_folder(&path).expect("it is whole");
    Target {
        words: &["\"box\": [[0, 4], [0, 3]]", "\"parameter\"", "part-0.safetensors"],
        ..Target::new("manifest", vec![seed], move |bytes| {
            let _ = &run;
            fs::write(&manifest, sealed(&String::from_utf8_lossy(bytes))).expect("memory");
            let Ok(reader) = Reader::open_folder(&path) else {
                return;
            };
            for tensor in &reader.manifest().tensors {
                let _ = reader.read_whole(&tensor.name);
            }
            reader.damages();
        })
    }
}

/// A small GPT-2, as `model.init_from` would take it.
fn model() -> config::Model {
    let model = serde_json::json!({
        "kind": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 4, "block_size": 8, "vocab_size": 16
    });
    config::section("model", model).expect("a model")
}

/// A file of tensors of f32, in order.
fn safetensors_file(tensors: &[(&str, &[usize])]) -> Vec<u8> {
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let start = end;
        end += shape.iter().product::<usize>() * 4;
        let info = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]});
        header.insert((*name).to_owned(), info);
    }
    let header = serde_json::Value::Object(header).to_string();
    [
        &(header.len() as u64).to_le_bytes()[..],
        header.as_bytes(),
        &vec![0; end],
    ]
    .concat()
}

const TENSORS: &[(&str, &[usize])] = &[
    ("wte.weight", &[16, 4]),
    ("wpe.weight", &[8, 4]),
    ("h.0.ln_1.weight", &[4]),
    ("h.0.ln_1.bias", &[4]),
    ("h.0.attn.c_attn.weight", &[4, 12]),
    ("h.0.attn.c_attn.bias", &[12]),
];

/// With the length in front that the JSON has, most of the time.
fn with_right_length(bytes: &[u8]) -> Vec<u8> {
    let Some((_, rest)) = bytes.split_first_chunk::<8>() else {
        return bytes.to_vec();
    };
    let end = rest
        .iter()
        .rposition(|byte| *byte == b'}')
        .map_or(rest.len(), |last| last + 1);
    [&(end as u64).to_le_bytes()[..], rest].concat()
}

pub(crate) fn safetensors() -> Target {
    let weights = folder();
    let file = weights.path().join("model.safetensors");
    let (model, params) = (
        model(),
        ddp_worker::model::build(&model(), 1).expect("a model").params,
    );
    let config =
        br#"{"model_type":"gpt2","n_layer":1,"n_head":2,"n_embd":4,"n_positions":8,"vocab_size":16}"#;
    fs::write(weights.path().join("config.json"), config).expect("memory");
    let seeds = vec![safetensors_file(TENSORS), safetensors_file(&TENSORS[..1])];
    Target {
        words: &[
            "\"dtype\":\"F32\"",
            "\"shape\":[4,3]",
            "\"data_offsets\":[0,48]",
            "\"__metadata__\":{\"a\":\"b\"}",
        ],
        ..Target::new("safetensors", seeds, move |bytes| {
            for content in [bytes.to_vec(), with_right_length(bytes)] {
                fs::write(&file, content).expect("memory");
                if let Ok(weights) = PretrainedWeights::open(weights.path(), &model, &params) {
                    let _ = weights.fingerprint();
                }
            }
        })
    }
}

pub(crate) fn safetensors_index() -> Target {
    let weights = folder();
    let index = weights.path().join("model.safetensors.index.json");
    let (model, params) = (
        model(),
        ddp_worker::model::build(&model(), 1).expect("a model").params,
    );
    fs::write(
        weights.path().join("a.safetensors"),
        safetensors_file(&TENSORS[..3]),
    )
    .expect("memory");
    fs::write(
        weights.path().join("b.safetensors"),
        safetensors_file(&TENSORS[3..]),
    )
    .expect("memory");
    let map: serde_json::Map<_, _> = (0..)
        .zip(TENSORS)
        .map(|(i, (name, _))| {
            let file = if i < 3 { "a.safetensors" } else { "b.safetensors" };
            ((*name).to_owned(), file.into())
        })
        .collect();
    let seed = serde_json::json!({"metadata": {"total_size": 1000}, "weight_map": map}).to_string();
    Target {
        words: &["../a.safetensors", "/etc/passwd", "a.safetensors", "weight_map"],
        ..Target::new("safetensors_index", vec![seed.into_bytes()], move |bytes| {
            fs::write(&index, bytes).expect("memory");
            let _ = PretrainedWeights::open(weights.path(), &model, &params);
        })
    }
}

pub(crate) fn token_file() -> Target {
    let texts = folder();
    let file = texts.path().join("tokens.bin");
    let paths = Paths::from(file.clone());
    let vocabulary = Arc::new(Vocabulary::of(&Tokenizer::Gpt2).expect("built in"));
    let header = serde_json::json!({
        "__metadata__": {"tokenizer": "gpt2", "tokenizer_hash": vocabulary.hash, "vocab_size": "50257", "documents": "3"},
        "tokens": {"dtype": "U16", "shape": [40], "data_offsets": [0, 80]},
    });
    let header = header.to_string();
    let named = [
        &(header.len() as u64).to_le_bytes()[..],
        header.as_bytes(),
        &[1; 80],
    ]
    .concat();
    let mut llm_c = vec![0; 1024];
    llm_c[..4].copy_from_slice(&20_240_520_u32.to_le_bytes());
    llm_c[4..8].copy_from_slice(&1_u32.to_le_bytes());
    llm_c[8..12].copy_from_slice(&40_u32.to_le_bytes());
    llm_c.extend([1; 80]);
    Target {
        words: &["\"dtype\":\"U32\"", "\"shape\":[40]", "tokenizer_hash"],
        ..Target::new("token_file", vec![named, llm_c, vec![7; 300]], move |bytes| {
            let _ = &texts;
            for content in [bytes.to_vec(), with_right_length(bytes)] {
                fs::write(&file, content).expect("memory");
                let Ok(tokens) = Tokens::open(&paths, &Tokenizer::Gpt2, &vocabulary) else {
                    continue;
                };
                let _ = tokens.fingerprint();
                let mut out = vec![0; tokens.len().min(64)];
                let _ = tokens.read(tokens.len() - out.len(), &mut out);
            }
        })
    }
}
