//! Llama's names and settings, and those that are no Llama's.

use super::*;
use crate::config::{RopeScaling, RouterScore};

/// A Llama of two layers, four heads, of which two share one of keys and values.
fn llama() -> Model {
    Model {
        kind: ModelKind::Llama,
        n_head: 4,
        n_kv_head: Some(2),
        n_inner: Some(12),
        ..shape(ModelKind::Llama)
    }
}

/// Its settings as they are published.
fn settings() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 12, "head_dim": 2,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "rope_scaling": null,
        "hidden_act": "silu", "attention_bias": false, "mlp_bias": false, "tie_word_embeddings": false,
        "vocab_size": 256, "torch_dtype": "float32",
    })
}

fn llama3() -> (Value, RopeScaling) {
    let published = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    });
    let scaling = RopeScaling {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_positions: 32,
    };
    (published, scaling)
}

impl Case {
    /// A folder with `model`'s weights.
    fn of_llama(model: Model, dtype: Dtype) -> Self {
        let mut case = Case::of(&tensors(&model, dtype));
        case.model = model;
        case
    }

    /// With the published settings, of which some are changed.
    fn with(self, changed: &Value) -> Self {
        self.with_settings_of(settings(), changed)
    }

    /// The message for settings that are changed in this way.
    fn error_with(self, changed: &Value) -> String {
        self.with(changed).error("")
    }
}

fn with(changed: &Value) -> String {
    Case::of_llama(llama(), Dtype::F32).error_with(changed)
}

#[test]
fn rows_of_a_parameter_come_from_the_tensors_that_make_it_up() {
    for (dtype, name) in [(Dtype::F32, "f32"), (Dtype::F16, "f16"), (Dtype::BF16, "bf16")] {
        for bare in [false, true] {
            let mut tensors = tensors(&llama(), dtype);
            if bare {
                for (name, ..) in &mut tensors {
                    *name = name.trim_start_matches("model.").to_owned();
                }
            }
            let mut case = Case::of(&tensors).with(&json!({}));
            case.model = llama();
            let weights = case.open().unwrap();
            case.expect_values(&weights);
            assert_eq!((weights.types().as_str(), weights.remainder()), (name, None));
            let all: usize = params(&case.model).iter().map(ParamSpec::len).sum();
            assert_eq!(weights.parameters(), all);
        }
    }
}

#[test]
fn any_range_crosses_the_borders_of_the_tensors() {
    let case = Case::of_llama(llama(), Dtype::F16);
    let weights = case.open().unwrap();
    let specs = params(&case.model);
    let fused = specs
        .iter()
        .position(|spec| spec.key.contains("qkv_proj"))
        .unwrap();
    assert_eq!(specs[fused].global_shape, [16, 8]);
    let id = model::ParamId(fused);
    // Queries end with element 64, keys with 96.
    for range in [
        0..1,
        63..65,
        60..100,
        64..96,
        95..96,
        95..97,
        0..128,
        127..128,
        7..7,
    ] {
        let mut read = vec![0.0; range.len()];
        weights.read(id, range.clone(), &mut read).unwrap();
        let expected: Vec<f32> = range.clone().map(|i| value(fused, i)).collect();
        assert_eq!(read, expected, "{range:?}");
    }
}

/// The published names and shapes, which no code of ours has made.
#[test]
fn the_names_are_those_of_transformers() {
    let found: Vec<String> = tensors(&llama(), Dtype::F32)
        .iter()
        .filter(|(name, ..)| !name.contains("layers.1."))
        .map(|(name, _, shape, _)| format!("{name} {shape:?}"))
        .collect();
    assert_eq!(
        found,
        [
            "model.embed_tokens.weight [256, 8]",
            "model.layers.0.input_layernorm.weight [8]",
            "model.layers.0.self_attn.q_proj.weight [8, 8]",
            "model.layers.0.self_attn.k_proj.weight [4, 8]",
            "model.layers.0.self_attn.v_proj.weight [4, 8]",
            "model.layers.0.self_attn.o_proj.weight [8, 8]",
            "model.layers.0.post_attention_layernorm.weight [8]",
            "model.layers.0.mlp.gate_proj.weight [12, 8]",
            "model.layers.0.mlp.up_proj.weight [12, 8]",
            "model.layers.0.mlp.down_proj.weight [8, 12]",
            "model.norm.weight [8]",
            "lm_head.weight [256, 8]",
        ]
    );
}

#[test]
fn several_files_in_halves_are_read_as_one() {
    for dtype in [Dtype::F16, Dtype::BF16] {
        let mut case = Case::empty().with(&json!({ "torch_dtype": "bfloat16" }));
        case.model = llama();
        // Tensors of one parameter are in different files.
        let mut files: [Vec<Tensor>; 3] = Default::default();
        for (index, tensor) in tensors(&case.model, dtype).into_iter().enumerate() {
            files[index % 3].push(tensor);
        }
        let mut map = serde_json::Map::new();
        for (index, tensors) in files.iter().enumerate() {
            let home = format!("model-{:05}-of-00003.safetensors", index + 1);
            write(&case.path(&home), tensors);
            map.extend(homes(tensors, &home));
        }
        let index = json!({ "metadata": { "total_size": 0 }, "weight_map": map });
        fs::write(case.path("model.safetensors.index.json"), index.to_string()).unwrap();
        case.expect_values(&case.open().unwrap());
    }
}

#[test]
fn the_frequencies_that_older_tools_saved_are_passed_over() {
    let mut tensors = tensors(&llama(), Dtype::F16);
    for layer in 0..2 {
        let name = format!("model.layers.{layer}.self_attn.rotary_emb.inv_freq");
        tensors.push(tensor(&name, Dtype::F32, &[1], |_| 1.0));
    }
    let mut case = Case::of(&tensors);
    case.model = llama();
    case.expect_values(&case.open().unwrap());
}

#[test]
fn a_tied_model_has_no_head() {
    let tied = Model {
        tied: Some(true),
        ..llama()
    };
    let case = Case::of_llama(tied.clone(), Dtype::F32).with(&json!({ "tie_word_embeddings": true }));
    case.expect_values(&case.open().unwrap());
    let mut untied = Case::of_llama(tied.clone(), Dtype::F32);
    untied.model = llama();
    insta::assert_snapshot!(untied.error(""), @r"
    `llama` does not fit the `model` section: `lm_head.weight` is missing in the file
      hint: write `tied: true` in section `model`
    ");
    insta::assert_snapshot!(untied.error_with(&json!({ "tie_word_embeddings": true })), @r"
    `llama` does not fit the `model` section: `tie_word_embeddings` is true in the file, but `tied` is false in this model; `lm_head.weight` is missing in the file
      hint: write `tied: true` in section `model`
    ");
    let mut case = Case::of_llama(llama(), Dtype::F32);
    case.model = tied;
    // `config.json` says nothing, which means that it is not.
    insta::assert_snapshot!(case.error_with(&json!({ "tie_word_embeddings": null })), @r"
    `llama` does not fit the `model` section: `lm_head.weight` differs from `model.embed_tokens.weight` in the file, but this model ties them
      hint: write `tied: false` in section `model`
    ");
}

#[test]
fn a_larger_vocabulary_and_other_numbers_of_positions_are_none_of_its_business() {
    let model = Model {
        vocab_size: Some(300),
        ..llama()
    };
    let mut case = Case::of_llama(llama(), Dtype::F32).with(&json!({}));
    case.model = model;
    let weights = case.open().unwrap();
    case.expect_values(&weights);
    insta::assert_snapshot!(weights.remainder().unwrap(), @"the last 44 of 300 rows of `model.embed_tokens.weight` are random; the last 44 of 300 rows of `lm_head.weight` are random");
    for block_size in [8, 64] {
        case.model = Model {
            block_size,
            ..llama()
        };
        case.expect_values(&case.open().unwrap());
    }
}

#[test]
fn sizes_of_config_json_are_lines_to_write() {
    insta::assert_snapshot!(with(&json!({
        "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": null,
        "intermediate_size": 28672, "head_dim": 128,
    })), @r"
    `llama` does not fit the `model` section: `n_layer` is 80 in the file and 2 in this model; `n_embd` is 8192 in the file and 8 in this model; `n_head` is 64 in the file and 4 in this model; and 2 more
      hint: write `n_layer: 80`, `n_embd: 8192`, `n_head: 64`, `n_kv_head: 64`, `n_inner: 28672` in section `model`
    ");
    insta::assert_snapshot!(with(&json!({ "rms_norm_eps": 1e-6, "rope_theta": 500_000 })), @r"
    `llama` does not fit the `model` section: `norm_eps` is 1e-6 in the file and 1e-5 in this model; `rope_theta` is 500000.0 in the file and 10000.0 in this model
      hint: write `norm_eps: 1e-6`, `rope_theta: 500000.0` in section `model`
    ");
    insta::assert_snapshot!(with(&json!({ "rms_norm_eps": null })), @r"
    `llama` does not fit the `model` section: `norm_eps` is 1e-6 in the file and 1e-5 in this model
      hint: write `norm_eps: 1e-6` in section `model`
    ");
    // Nonsense must not become a division by zero.
    insta::assert_snapshot!(with(&json!({ "num_attention_heads": 0 })), @r"
    `llama/config.json` cannot be used: `num_attention_heads` is 0
      hint: download or create it again
    ");
    insta::assert_snapshot!(with(&json!({ "hidden_size": "wide" })), @r#"
    `llama/config.json` cannot be used: `hidden_size`: invalid type: string "wide", expected usize
      hint: download or create it again
    "#);
}

#[test]
fn sizes_show_in_the_shapes_too() {
    let error = |model: Model| {
        let mut case = Case::of_llama(llama(), Dtype::F32);
        case.model = model;
        case.error("")
    };
    insta::assert_snapshot!(error(Model { n_inner: Some(20), ..llama() }), @r"
    `llama` does not fit the `model` section: `model.layers.0.mlp.gate_proj.weight` is [12, 8] in the file and [20, 8] in this model; `model.layers.0.mlp.up_proj.weight` is [12, 8] in the file and [20, 8] in this model; `model.layers.0.mlp.down_proj.weight` is [8, 12] in the file and [8, 20] in this model; and 3 more
      hint: check that the weights are complete, and that the sizes in section `model` are those of the weights
    ");
    insta::assert_snapshot!(error(Model { n_kv_head: None, ..llama() }), @r"
    `llama` does not fit the `model` section: `model.layers.0.self_attn.k_proj.weight` is [4, 8] in the file and [8, 8] in this model; `model.layers.0.self_attn.v_proj.weight` is [4, 8] in the file and [8, 8] in this model; `model.layers.1.self_attn.k_proj.weight` is [4, 8] in the file and [8, 8] in this model; and 1 more
      hint: check that the weights are complete, and that the sizes in section `model` are those of the weights
    ");
    insta::assert_snapshot!(error(Model { n_layer: 3, n_embd: 16, n_inner: None, ..llama() }), @r"
    `llama` does not fit the `model` section: `model.embed_tokens.weight` is [256, 8] in the file and [256, 16] in this model; `model.layers.0.input_layernorm.weight` is [8] in the file and [16] in this model; `model.layers.0.self_attn.q_proj.weight` is [8, 8] in the file and [16, 16] in this model; and 27 more
      hint: check that the weights are complete, and that the sizes in section `model` are those of the weights
    ");
}

#[test]
fn rotary_positions_are_compared_in_the_words_of_all_versions() {
    let (published, scaling) = llama3();
    let scaled = Model {
        rope_theta: 500_000.0,
        rope_scaling: Some(scaling),
        ..llama()
    };
    let mut parameters = published.clone();
    parameters["rope_theta"] = 500_000.0.into();
    let mut older = published.clone();
    older.as_object_mut().unwrap().remove("rope_type");
    older["type"] = "llama3".into();
    for settings in [
        json!({ "rope_theta": 500_000, "rope_scaling": published }),
        json!({ "rope_theta": 500_000.0, "rope_scaling": older }),
        // Since version 5.
        json!({ "rope_theta": null, "rope_scaling": null, "rope_parameters": parameters }),
    ] {
        let case = Case::of_llama(scaled.clone(), Dtype::F32).with(&settings);
        case.expect_values(&case.open().unwrap());
    }
    for settings in [
        json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 10000.0 } }),
        json!({ "rope_scaling": { "type": "default" } }),
        json!({ "rope_theta": null, "rope_parameters": {} }),
    ] {
        let case = Case::of_llama(llama(), Dtype::F32).with(&settings);
        case.expect_values(&case.open().unwrap());
    }
    insta::assert_snapshot!(with(&json!({ "rope_theta": null, "rope_parameters": parameters })), @r"
    `llama` does not fit the `model` section: `rope_theta` is 500000.0 in the file and 10000.0 in this model; `rope_scaling` is { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_positions: 32 } in the file and null in this model
      hint: write `rope_theta: 500000.0`, `rope_scaling: { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_positions: 32 }` in section `model`
    ");
    let case = || Case::of_llama(scaled.clone(), Dtype::F32);
    insta::assert_snapshot!(case().error_with(&json!({ "rope_theta": 500_000.0 })), @r"
    `llama` does not fit the `model` section: `rope_scaling` is null in the file and { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_positions: 32 } in this model
      hint: write `rope_scaling: null` in section `model`
    ");
    let mut less = published;
    less["factor"] = 32.0.into();
    insta::assert_snapshot!(case().error_with(&json!({ "rope_theta": 5e5, "rope_scaling": less })), @r"
    `llama` does not fit the `model` section: `rope_scaling` is { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_positions: 32 } in the file and { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_positions: 32 } in this model
      hint: write `rope_scaling: { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_positions: 32 }` in section `model`
    ");
}

#[test]
fn what_is_no_llama_of_ours_says_so() {
    let yarn = json!({ "rope_type": "yarn", "factor": 4.0 });
    insta::assert_snapshot!(with(&json!({ "rope_scaling": yarn })), @r"
    `llama` does not fit the `model` section: `rope_type` is `yarn` in the file, but only `default` and `llama3` are supported
      hint: the weights are of an architecture that this build does not support
    ");
    let incomplete = json!({ "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0 });
    insta::assert_snapshot!(with(&json!({ "rope_scaling": incomplete })), @r"
    `llama` does not fit the `model` section: `rope_type` is `llama3` in the file, which needs `factor`, `low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings`
      hint: the weights are of an architecture that this build does not support
    ");
    insta::assert_snapshot!(with(&json!({ "head_dim": 4, "partial_rotary_factor": 0.5 })), @r"
    `llama` does not fit the `model` section: `partial_rotary_factor` is 0.5 in the file and 1 in this model; `head_dim` is 4 in the file and 2 in this model, channels over heads
      hint: the weights are of an architecture that this build does not support
    ");
    insta::assert_snapshot!(with(&json!({ "attention_bias": true, "mlp_bias": true, "hidden_act": "gelu" })), @r#"
    `llama` does not fit the `model` section: `hidden_act` is "gelu" in the file and `silu` in this model; `attention_bias` is true in the file and false in this model; `mlp_bias` is true in the file and false in this model
      hint: the weights are of an architecture that this build does not support
    "#);
    insta::assert_snapshot!(with(&json!({ "model_type": "mistral" })), @r"
    `llama/config.json`: `model_type` is `mistral`
      hint: the weights are of an architecture that this build does not support
    ");
}

#[test]
fn another_kind_is_named_with_all_that_it_needs() {
    let mut case = Case::of_llama(llama(), Dtype::F32).with(&json!({}));
    case.model = shape(ModelKind::Gpt2);
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2` does not fit the `model` section: `kind` is llama in the file and gpt2 in this model; `n_head` is 4 in the file and 2 in this model; `n_kv_head` is 2 in the file and 4 in this model; and 1 more
      hint: write `kind: llama`, `n_head: 4`, `n_kv_head: 2`, `n_inner: 12` in section `model`
    ");
    let mut case = Case::of(&gpt2(Dtype::F32)).with_settings(&json!({}));
    case.model = llama();
    insta::assert_snapshot!(case.error(""), @r"
    `llama` does not fit the `model` section: `kind` is gpt2 in the file and llama in this model; `n_head` is 2 in the file and 4 in this model; `n_inner` is 32 in the file and 12 in this model
      hint: write `kind: gpt2`, `n_head: 2`, `n_inner: 32` in section `model`
    ");
}

#[test]
fn tensors_of_a_llama_that_are_missing_or_too_many_are_named() {
    let mut tensors = tensors(&llama(), Dtype::F32);
    let spare = tensors.remove(3);
    let bias = tensor("model.layers.0.self_attn.q_proj.bias", Dtype::F32, &[8], |_| 0.0);
    tensors.push(bias);
    tensors.push(tensor("score.weight", Dtype::F32, &[2, 8], |_| 0.0));
    let error = |tensors: &[Tensor]| {
        let mut case = Case::of(tensors);
        case.model = llama();
        case.error("")
    };
    insta::assert_snapshot!(error(&tensors), @r"
    `llama` does not fit the `model` section: `model.layers.0.self_attn.k_proj.weight` is missing in the file; `model.layers.0.self_attn.q_proj.bias` is in the file but not in this model; `score.weight` is in the file but not in this model
      hint: check that the weights are complete, and that the sizes in section `model` are those of the weights
    ");
    tensors.truncate(tensors.len() - 2);
    tensors.push((
        spare.0.replacen("model.", "", 1),
        spare.1,
        spare.2.clone(),
        spare.3.clone(),
    ));
    tensors.push(spare);
    insta::assert_snapshot!(error(&tensors), @r"
    `llama` does not fit the `model` section: `model.layers.0.self_attn.k_proj.weight` occurs in the file twice, as `layers.0.self_attn.k_proj.weight` and as `model.layers.0.self_attn.k_proj.weight`
      hint: check that the weights are complete, and that the sizes in section `model` are those of the weights
    ");
}

#[test]
fn a_mixtral_that_computes_something_else_is_refused() {
    let published = |changed: &[(&str, Value)]| {
        let mut settings =
            json!({ "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2 });
        for (key, value) in changed {
            settings[key] = value.clone();
        }
        settings
    };
    let case = |change: fn(&mut Model)| {
        let mut model = Model {
            kind: ModelKind::Mixtral,
            ..llama()
        };
        change(&mut model);
        Case::of_llama(model, Dtype::F32)
    };
    let plain = case(|_| ()).with(&published(&[("sliding_window", Value::Null)]));
    plain.expect_values(&plain.open().unwrap());
    let window = published(&[("sliding_window", 4096.into())]);
    insta::assert_snapshot!(case(|_| ()).error_with(&window), @r"
    `mixtral` does not fit the `model` section: `sliding_window` is 4096 in the file and null in this model
      hint: the weights are of an architecture that this build does not support
    ");

    let sigmoid = || case(|model| model.experts.score = RouterScore::Sigmoid);
    insta::assert_snapshot!(sigmoid().error_with(&published(&[])), @r"
    `mixtral` does not fit the `model` section: `experts.score` is softmax in the file and sigmoid in this model
      hint: write `experts: { score: softmax }` in section `model`
    ");
    let ours = sigmoid().with(&published(&[("scoring_func", "sigmoid".into())]));
    ours.expect_values(&ours.open().unwrap());

    let single = || case(|model| model.experts.top_k = 1);
    let one = published(&[("num_experts_per_tok", 1.into())]);
    insta::assert_snapshot!(single().error_with(&one), @r"
    `mixtral` does not fit the `model` section: with `experts.top_k: 1`, the weight of an expert is its score here, and always 1 in transformers' Mixtral
      hint: use weights of a model with `experts.top_k` above 1, or leave out `init_from`
    ");
    assert_eq!(
        single().error(""),
        single().error_with(&one),
        "without `config.json`"
    );
    let ours = published(&[
        ("num_experts_per_tok", 1.into()),
        ("model_type", "ddp_run_mixtral".into()),
    ]);
    let ours = single().with(&ours);
    ours.expect_values(&ours.open().unwrap());
}
