//! Exports for other tools, and which checkpoints are kept.

use std::ops::Range;

use safetensors::SafeTensors;

use super::super::{Disk, ExportedTokenizer, export, retain};
use super::*;
use crate::config::{self, CheckpointKeep, ModelKind};
use crate::model;
use crate::optim;

/// A GPT-2 of one block.
fn model() -> config::Model {
    config::Model {
        kind: ModelKind::Gpt2,
        n_layer: 1,
        n_head: 1,
        n_embd: 7,
        block_size: 16,
        vocab_size: None,
        dropout: 0.0,
        ..config::Model::default()
    }
}

/// Its tensors, parameters first.
fn tensors() -> Vec<Extent> {
    tensors_of(&model())
}

fn tensors_of(model: &config::Model) -> Vec<Extent> {
    let params = model::build(model, 300).unwrap().params;
    let kinds = TensorKind::with_slots(optim::rule(&config::OptimizerConfig::default()).slots);
    Extent::of_model(&kinds, &params)
}

fn content_of(tensor: &Extent) -> Vec<u8> {
    let seed = tensor.tensor.to_string().len() as f32;
    let elements = tensor.range.clone();
    elements
        .flat_map(|i| (seed * 100.0 + i as f32).to_le_bytes())
        .collect()
}

/// A run of a GPT-2 whose checkpoint one rank wrote.
fn run() -> TempDir {
    run_of(&model())
}

fn run_of(model: &config::Model) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let writer = Writer::begin(folder.path(), 40, 1).unwrap();
    let tensors = tensors_of(model);
    let contents: Vec<Vec<u8>> = tensors.iter().map(content_of).collect();
    let pieces: Vec<(Extent, &[u8])> = tensors
        .into_iter()
        .zip(contents.iter().map(Vec::as_slice))
        .collect();
    writer.write("parameters", &pieces).unwrap();
    let state = State {
        config: serde_json::json!({ "model": model }),
        ..state(40)
    };
    writer.commit(&state, &["parameters"]).unwrap();
    folder
}

#[test]
fn an_export_is_read_by_others_bit_by_bit() {
    let source = run();
    let reader = Reader::open(source.path(), Which::Latest).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("gpt2");
    export(&Disk, &reader, &target, &ExportedTokenizer::default()).unwrap();
    assert_eq!(names(folder.path()), ["gpt2"]);
    assert_eq!(names(&target), ["config.json", "model.safetensors"]);
    let bytes = fs::read(target.join("model.safetensors")).unwrap();
    let found = SafeTensors::deserialize(&bytes).unwrap();
    let (tensors, parameters) = (tensors(), tensors().len() / 3);
    assert_eq!(found.len(), parameters, "parameters only");
    for whole in &tensors[..parameters] {
        let tensor = found.tensor(&whole.tensor.key).unwrap();
        let found: Vec<u64> = tensor.shape().iter().map(|d| *d as u64).collect();
        assert_eq!(found, whole.shape);
        assert!(tensor.data() == content_of(whole), "{}", whole.tensor);
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
    let error = export(&Disk, &reader, &target, &ExportedTokenizer::default()).unwrap_err();
    insta::assert_snapshot!(message(&error, folder.path()), @r"
    `OUT/gpt2` already exists
      hint: give a directory that does not exist yet, or delete it
    ");
}

#[test]
fn an_export_has_the_tokenizer_and_the_ids_of_its_tokens() {
    let source = run();
    let reader = Reader::open(source.path(), Which::Latest).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("gpt2");
    let tokenizer = ExportedTokenizer {
        json: Some(b"{}".to_vec()),
        end_of_text: Some(7),
    };
    export(&Disk, &reader, &target, &tokenizer).unwrap();
    let files = [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(names(&target), files);
    assert_eq!(fs::read(target.join("tokenizer.json")).unwrap(), b"{}");
    let config = fs::read(target.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    assert_eq!(
        (&config["bos_token_id"], &config["eos_token_id"]),
        (&7.into(), &7.into())
    );
}

/// Names, shapes and bytes of an exported model, and its `config.json`.
struct ExportedModel {
    weights: Vec<u8>,
    config: String,
}

impl ExportedModel {
    fn new(model: &config::Model) -> Self {
        let source = run_of(model);
        let reader = Reader::open(source.path(), Which::Latest).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("model");
        export(&Disk, &reader, &target, &ExportedTokenizer::default()).unwrap();
        Self {
            weights: fs::read(target.join("model.safetensors")).unwrap(),
            config: fs::read_to_string(target.join("config.json")).unwrap(),
        }
    }

    /// Expects exactly these tensors: name, key of the parameter, first and last row.
    #[track_caller]
    fn expect(&self, model: &config::Model, expected: &[(&str, &str, Range<usize>)]) {
        let found = SafeTensors::deserialize(&self.weights).unwrap();
        assert_eq!(found.len(), expected.len(), "{:?}", found.names());
        let parameters = tensors_of(model);
        for (name, key, rows) in expected {
            let whole = parameters.iter().find(|whole| whole.tensor.key == *key).unwrap();
            let columns: usize = whole.shape[1..].iter().map(|len| *len as usize).product();
            let tensor = found.tensor(name).unwrap();
            assert_eq!(tensor.shape()[0], rows.len(), "{name}");
            assert_eq!(tensor.shape()[1..].iter().product::<usize>(), columns, "{name}");
            let bytes = [rows.start, rows.end].map(|row| row * columns * 4);
            assert!(tensor.data() == &content_of(whole)[bytes[0]..bytes[1]], "{name}");
        }
    }
}

/// Names in transformers, in our keys, and the first and last row.
fn of_a_llama(kv_rows: usize, head: Option<usize>) -> Vec<(&'static str, &'static str, Range<usize>)> {
    const QKV: &str = "model.layers.0.self_attn.qkv_proj.weight";
    const GATE_UP: &str = "model.layers.0.mlp.gate_up_proj.weight";
    let kept = [
        ("model.embed_tokens.weight", 300),
        ("model.norm.weight", 8),
        ("model.layers.0.input_layernorm.weight", 8),
        ("model.layers.0.self_attn.o_proj.weight", 8),
        ("model.layers.0.post_attention_layernorm.weight", 8),
        ("model.layers.0.mlp.down_proj.weight", 8),
    ];
    let head = head.map(|rows| ("lm_head.weight", rows));
    let kept = kept.into_iter().chain(head);
    let cut = [
        ("model.layers.0.self_attn.q_proj.weight", QKV, 0..8),
        ("model.layers.0.self_attn.k_proj.weight", QKV, 8..8 + kv_rows),
        (
            "model.layers.0.self_attn.v_proj.weight",
            QKV,
            8 + kv_rows..8 + 2 * kv_rows,
        ),
        ("model.layers.0.mlp.gate_proj.weight", GATE_UP, 0..12),
        ("model.layers.0.mlp.up_proj.weight", GATE_UP, 12..24),
    ];
    kept.map(|(name, rows)| (name, name, 0..rows))
        .chain(cut)
        .collect()
}

/// Transformers would load one as a Mixtral that computes something else.
#[test]
fn experts_that_transformers_lacks_have_a_type_that_it_refuses() {
    let changes: [fn(&mut config::Experts); 5] = [
        |_| (),
        |all| all.top_k = 1,
        |all| all.shared = 1,
        |all| all.score = config::RouterScore::Sigmoid,
        |all| all.every = 2,
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let model_type = if index == 0 { "mixtral" } else { "ddp_run_mixtral" };
        let mut mixtral = config::Model {
            kind: ModelKind::Mixtral,
            n_layer: 2,
            ..llama()
        };
        change(&mut mixtral.experts);
        let source = run_of(&mixtral);
        let reader = Reader::open(source.path(), Which::Latest).unwrap();
        let target = source.path().join("exported");
        export(&Disk, &reader, &target, &ExportedTokenizer::default()).unwrap();
        let config: serde_json::Value =
            serde_json::from_slice(&fs::read(target.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["model_type"], model_type, "{:?}", mixtral.experts);
    }
}

fn llama() -> config::Model {
    config::Model {
        kind: ModelKind::Llama,
        n_head: 4,
        n_embd: 8,
        n_inner: Some(12),
        norm_eps: 1e-6,
        rope_theta: 500_000.0,
        ..model()
    }
}

#[test]
fn a_llama_is_exported_as_transformers_has_it() {
    let llama = config::Model {
        n_kv_head: Some(2),
        rope_scaling: Some(config::RopeScaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_positions: 8,
        }),
        ..llama()
    };
    let exported = ExportedModel::new(&llama);
    exported.expect(&llama, &of_a_llama(4, Some(300)));
    insta::assert_snapshot!(exported.config, @r#"
    {
      "architectures": [
        "LlamaForCausalLM"
      ],
      "attention_bias": false,
      "attention_dropout": 0.0,
      "bos_token_id": null,
      "eos_token_id": null,
      "head_dim": 2,
      "hidden_act": "silu",
      "hidden_size": 8,
      "intermediate_size": 12,
      "max_position_embeddings": 16,
      "mlp_bias": false,
      "model_type": "llama",
      "num_attention_heads": 4,
      "num_hidden_layers": 1,
      "num_key_value_heads": 2,
      "rms_norm_eps": 1e-6,
      "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8,
        "rope_type": "llama3"
      },
      "rope_theta": 500000.0,
      "tie_word_embeddings": false,
      "torch_dtype": "float32",
      "vocab_size": 300
    }
    "#);
}

#[test]
fn a_llama_with_a_tied_head_is_exported_without_one() {
    let tied = config::Model {
        tied: Some(true),
        ..llama()
    };
    let exported = ExportedModel::new(&tied);
    exported.expect(&tied, &of_a_llama(8, None));
    let config: serde_json::Value = serde_json::from_str(&exported.config).unwrap();
    assert_eq!(config["tie_word_embeddings"], true);
    assert_eq!(
        (&config["num_key_value_heads"], &config["rope_scaling"]),
        (&4.into(), &serde_json::Value::Null)
    );
}

/// Transformers takes a GPT-2's file without `transformer.` for one without a head.
#[test]
fn a_gpt2_with_a_head_of_its_own_is_exported_with_the_prefix() {
    let untied = config::Model {
        tied: Some(false),
        n_inner: Some(10),
        ..model()
    };
    let exported = ExportedModel::new(&untied);
    let found = SafeTensors::deserialize(&exported.weights).unwrap();
    let keys = tensors_of(&untied);
    for extent in &keys[..keys.len() / 3] {
        let key = &extent.tensor.key;
        let name = match key.as_str() {
            "lm_head.weight" => key.clone(),
            _ => format!("transformer.{key}"),
        };
        assert!(
            found.tensor(&name).unwrap().data() == content_of(extent),
            "{name}"
        );
    }
    assert_eq!(found.len(), keys.len() / 3);
    insta::assert_snapshot!(exported.config, @r#"
    {
      "activation_function": "gelu_new",
      "architectures": [
        "GPT2LMHeadModel"
      ],
      "attn_pdrop": 0.0,
      "bos_token_id": null,
      "embd_pdrop": 0.0,
      "eos_token_id": null,
      "layer_norm_epsilon": 0.00001,
      "model_type": "gpt2",
      "n_ctx": 16,
      "n_embd": 7,
      "n_head": 1,
      "n_inner": 10,
      "n_layer": 1,
      "n_positions": 16,
      "resid_pdrop": 0.0,
      "scale_attn_by_inverse_layer_idx": false,
      "scale_attn_weights": true,
      "tie_word_embeddings": false,
      "torch_dtype": "float32",
      "vocab_size": 300
    }
    "#);
}

#[test]
fn a_damaged_source_is_not_exported() {
    let source = run();
    let part = source
        .path()
        .join("checkpoints/step_00000040/parameters.safetensors");
    let mut bytes = fs::read(&part).unwrap();
    let table = content_of(
        tensors()
            .iter()
            .find(|whole| whole.tensor.key == "wte.weight")
            .unwrap(),
    );
    let at = bytes
        .windows(table.len())
        .position(|found| found == table)
        .unwrap();
    bytes[at] ^= 1;
    fs::write(&part, bytes).unwrap();
    let reader = Reader::open(source.path(), Which::Latest).unwrap();
    assert_eq!(reader.damages().len(), 1);
    let folder = tempfile::tempdir().unwrap();
    let error = export(
        &Disk,
        &reader,
        &folder.path().join("a"),
        &ExportedTokenizer::default(),
    )
    .unwrap_err();
    assert!(error.to_string().contains("tensor `wte.weight`"), "{error}");
    assert!(names(folder.path()).is_empty());
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
    let keep = CheckpointKeep {
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
        retain(&Disk, folder.path(), CheckpointKeep { last: 1, every: None }, &[]).unwrap(),
        [10, 20, 40]
    );
    assert_eq!(check_latest(folder.path()), 50);
}
