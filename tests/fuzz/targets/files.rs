//! What files of others hold: checkpoints, published weights, token files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ddp_worker::checkpoint::{Disk, Extent, Reader, Rng, State, TensorKind, Writer};
use ddp_worker::config::{self, Paths, Tokenizer};
use ddp_worker::data::{Tokens, Vocabulary};
use ddp_worker::device::DType;
use ddp_worker::model::{self, Decoder, ParamId, ParamSpec, Published, PublishedTensor, Region};
use ddp_worker::pretrained::{PretrainedError, PretrainedWeights};
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
        data: String::new(),
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

/// A small model, as `model.init_from` would take it.
struct Weights {
    model: config::Model,
    params: Vec<ParamSpec>,
    /// What the files have to hold.
    tensors: Vec<PublishedTensor>,
}

impl Weights {
    /// Of a model of this kind.
    fn of(kind: &str) -> Self {
        let section = serde_json::json!({
            "kind": kind, "n_layer": 1, "n_head": 2, "n_embd": 4, "block_size": 8, "vocab_size": 16
        });
        let model: config::Model = config::section("model", section).expect("a model");
        let params = model::build(&model, 1).expect("a model").params;
        let (published, decoder) = (Published::of(model.kind), Decoder::of(&model));
        let tensors = params
            .iter()
            .flat_map(|spec| published.tensors(&decoder, &spec.key, &spec.global_shape))
            .collect();
        Self {
            model,
            params,
            tensors,
        }
    }

    /// Its `config.json`.
    fn settings(&self) -> Vec<u8> {
        let settings = Published::of(self.model.kind).settings(&self.model, 16, None);
        settings.to_string().into_bytes()
    }

    /// Elements of all parameters.
    fn elements(&self) -> usize {
        self.params.iter().map(ParamSpec::len).sum()
    }

    /// Opens a folder and reads all that it has; how many elements that is.
    fn read(&self, folder: &Path) -> Result<usize, PretrainedError> {
        let weights = PretrainedWeights::open(folder, &self.model, &self.params)?;
        let mut outcome = weights.fingerprint().map(drop);
        for id in (0..self.params.len()).map(ParamId) {
            let mut out = vec![0.0; weights.elements(id)];
            outcome = outcome.and(weights.read(id, 0..out.len(), &mut out));
        }
        outcome.map(|()| weights.parameters())
    }
}

/// A file of tensors of f32, in order.
fn safetensors_file(tensors: &[PublishedTensor]) -> Vec<u8> {
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for PublishedTensor { name, shape, .. } in tensors {
        let start = end;
        end += shape.iter().product::<usize>() * 4;
        let info = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": [start, end]});
        header.insert(name.clone(), info);
    }
    let header = serde_json::Value::Object(header).to_string();
    [
        &(header.len() as u64).to_le_bytes()[..],
        header.as_bytes(),
        &vec![0; end],
    ]
    .concat()
}

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
    let (folder, weights) = (folder(), Weights::of("gpt2"));
    let file = folder.path().join("model.safetensors");
    fs::write(folder.path().join("config.json"), weights.settings()).expect("memory");
    let seeds = vec![
        safetensors_file(&weights.tensors),
        safetensors_file(&weights.tensors[..1]),
    ];
    let read = |weights: &Weights, content: &[u8]| {
        fs::write(&file, content).expect("memory");
        weights.read(folder.path())
    };
    assert_eq!(read(&weights, &seeds[0]), Ok(weights.elements()));
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
                let _ = weights.read(folder.path());
            }
        })
    }
}

pub(crate) fn safetensors_index() -> Target {
    let (folder, weights) = (folder(), Weights::of("gpt2"));
    let index = folder.path().join("model.safetensors.index.json");
    let (first, second) = weights.tensors.split_at(3);
    let mut map = serde_json::Map::new();
    for (file, tensors) in [("a.safetensors", first), ("b.safetensors", second)] {
        fs::write(folder.path().join(file), safetensors_file(tensors)).expect("memory");
        map.extend(tensors.iter().map(|tensor| (tensor.name.clone(), file.into())));
    }
    let seed = serde_json::json!({"metadata": {"total_size": 1000}, "weight_map": map}).to_string();
    fs::write(&index, &seed).expect("memory");
    assert_eq!(weights.read(folder.path()), Ok(weights.elements()));
    Target {
        words: &["../a.safetensors", "/etc/passwd", "a.safetensors", "weight_map"],
        ..Target::new("safetensors_index", vec![seed.into_bytes()], move |bytes| {
            fs::write(&index, bytes).expect("memory");
            let _ = weights.read(folder.path());
        })
    }
}

/// `config.json` beside weights of each kind.
pub(crate) fn pretrained_config() -> Target {
    let models = ["gpt2", "llama"].map(|kind| {
        let (folder, weights) = (folder(), Weights::of(kind));
        let file = folder.path().join("model.safetensors");
        fs::write(file, safetensors_file(&weights.tensors)).expect("memory");
        (folder, weights)
    });
    let seeds: Vec<Vec<u8>> = models.iter().map(|(_, weights)| weights.settings()).collect();
    let fits = move |config: &[u8]| {
        models.each_ref().map(|(folder, weights)| {
            fs::write(folder.path().join("config.json"), config).expect("memory");
            weights.read(folder.path()) == Ok(weights.elements())
        })
    };
    assert_eq!(fits(&seeds[0]), [true, false], "it is GPT-2's");
    assert_eq!(fits(&seeds[1]), [false, true], "it is Llama's");
    Target {
        words: &[
            "\"model_type\":\"llama\"",
            "\"n_layer\":",
            "\"tie_word_embeddings\":",
            "\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0}",
            "\"rope_parameters\":{\"rope_theta\":1e400}",
        ],
        ..Target::new("pretrained_config", seeds, move |bytes| {
            fits(bytes);
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
    let mut numpy =
        b"\x93NUMPY\x01\x00\x3a\x00{'descr': '<u2', 'fortran_order': False, 'shape': (40,), }".to_vec();
    numpy.extend([1; 80]);
    let count = move |content: &[u8]| {
        let _ = &texts;
        fs::write(&file, content).expect("memory");
        let Ok(tokens) = Tokens::open(&paths, &Tokenizer::Gpt2, None, &vocabulary) else {
            return 0;
        };
        let _ = tokens.fingerprint();
        let mut out = vec![0; tokens.len().min(64)];
        let _ = tokens.read(tokens.len() - out.len(), &mut out);
        tokens.len()
    };
    assert_eq!(
        [&named, &llm_c, &numpy].map(|seed| count(seed)),
        [40, 40, 40],
        "all are token files"
    );
    Target {
        words: &[
            "\"dtype\":\"U32\"",
            "\"shape\":[40]",
            "tokenizer_hash",
            "'<i8'",
            "(40,)",
        ],
        ..Target::new(
            "token_file",
            vec![named, llm_c, numpy, vec![7; 300]],
            move |bytes| {
                for content in [bytes.to_vec(), with_right_length(bytes)] {
                    count(&content);
                }
            },
        )
    }
}
