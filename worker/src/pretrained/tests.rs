//! Files as they are published, and what is wrong with those that are not taken.

mod llama;

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{PretrainedError, PretrainedWeights};
use crate::config::{Model, ModelKind};
use crate::model::{self, Decoder, ParamSpec, Published};

/// A tensor on its way to a file: name, type, shape, bytes.
type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

fn shape(kind: ModelKind) -> Model {
    Model {
        kind,
        n_layer: 2,
        n_head: 2,
        n_embd: 8,
        block_size: 16,
        vocab_size: Some(256),
        dropout: 0.0,
        ..Model::default()
    }
}

fn params(model: &Model) -> Vec<ParamSpec> {
    model::build(model, 256).unwrap().params
}

/// The settings of [`shape`]'s GPT-2, as they are published.
fn gpt2_settings() -> Value {
    json!({
        "model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": 256,
        "n_inner": null, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "scale_attn_weights": true,
    })
}

/// Element `i` of parameter `id`: exact in 8 bits of mantissa, and never that of its neighbour.
fn value(id: usize, i: usize) -> f32 {
    ((i * 7 + id * 13) % 251) as f32 / 128.0 - 1.0
}

fn tensor(name: &str, dtype: Dtype, shape: &[usize], of: impl Fn(usize) -> f32) -> Tensor {
    let values = (0..shape.iter().product()).map(of);
    let bytes = match dtype {
        Dtype::F16 => values
            .flat_map(|v| half::f16::from_f32(v).to_le_bytes())
            .collect(),
        Dtype::BF16 => values
            .flat_map(|v| half::bf16::from_f32(v).to_le_bytes())
            .collect(),
        Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
        _ => values.map(|_| 1).collect(),
    };
    (name.to_owned(), dtype, shape.to_vec(), bytes)
}

/// All parameters of a model, as they are published.
fn tensors(model: &Model, dtype: Dtype) -> Vec<Tensor> {
    let (published, decoder) = (Published::of(model.kind), Decoder::of(model));
    let params = params(model);
    let specs = params.iter().enumerate();
    let tensors = specs.flat_map(|(id, spec)| {
        let tensors = published.tensors(&decoder, &spec.key, &spec.global_shape);
        tensors.into_iter().map(move |published| {
            let first = published.elements.start;
            tensor(&published.name, dtype, &published.shape, |i| value(id, first + i))
        })
    });
    tensors.collect()
}

fn write(path: &Path, tensors: &[Tensor]) {
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// A folder as `save_pretrained` leaves it, but for what a test changes.
struct Case {
    folder: TempDir,
    model: Model,
}

impl Case {
    fn of(tensors: &[Tensor]) -> Self {
        let case = Self::empty();
        write(&case.path("model.safetensors"), tensors);
        case
    }

    fn empty() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            model: shape(ModelKind::Gpt2),
        }
    }

    /// The published settings of a GPT-2 with some changed.
    fn with_settings(self, changed: &Value) -> Self {
        self.with_settings_of(gpt2_settings(), changed)
    }

    fn with_settings_of(self, mut settings: Value, changed: &Value) -> Self {
        for (key, value) in changed.as_object().unwrap() {
            settings[key] = value.clone();
        }
        fs::write(self.path("config.json"), settings.to_string()).unwrap();
        self
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn open(&self) -> Result<PretrainedWeights, PretrainedError> {
        self.open_at("")
    }

    fn open_at(&self, name: &str) -> Result<PretrainedWeights, PretrainedError> {
        let path = if name.is_empty() {
            self.folder.path().to_owned()
        } else {
            self.path(name)
        };
        PretrainedWeights::open(&path, &self.model, &params(&self.model))
    }

    /// The message, with the temporary folder called by the kind of the model here.
    fn error(&self, name: &str) -> String {
        let error = self.open_at(name).err().expect("it should be refused");
        let kind = Published::of(self.model.kind).model_type;
        error
            .to_string()
            .replace(self.folder.path().to_str().unwrap(), kind)
    }

    /// All weights that there are have the values of [`value`].
    #[track_caller]
    fn expect_values(&self, weights: &PretrainedWeights) {
        for (id, spec) in params(&self.model).iter().enumerate() {
            let id = model::ParamId(id);
            let mut read = vec![0.0; weights.elements(id)];
            weights.read(id, 0..read.len(), &mut read).unwrap();
            let expected: Vec<f32> = (0..read.len()).map(|i| value(id.0, i)).collect();
            assert_eq!(read, expected, "`{}`", spec.key);
            let range = read.len() / 3..read.len() / 2;
            let mut part = vec![0.0; range.len()];
            weights.read(id, range.clone(), &mut part).unwrap();
            assert_eq!(part, expected[range], "`{}`", spec.key);
        }
    }
}

fn gpt2(dtype: Dtype) -> Vec<Tensor> {
    tensors(&shape(ModelKind::Gpt2), dtype)
}

#[test]
fn what_pytorch_wraps_a_model_in_is_left_out_of_the_names() {
    for (wrapped, left_out) in [
        ("_orig_mod.transformer.", "its names without `_orig_mod.`"),
        ("module.", "its names without `module.`"),
        (
            "module._orig_mod.",
            "its names without `_orig_mod.`; its names without `module.`",
        ),
    ] {
        let mut tensors = gpt2(Dtype::F32);
        for (name, ..) in &mut tensors {
            name.insert_str(0, wrapped);
        }
        let case = Case::of(&tensors);
        let weights = case.open().unwrap();
        case.expect_values(&weights);
        assert_eq!(weights.remainder(), Some(left_out));
    }
}

#[test]
fn every_type_and_both_kinds_of_names_are_read() {
    for (dtype, name) in [(Dtype::F32, "f32"), (Dtype::F16, "f16"), (Dtype::BF16, "bf16")] {
        for prefix in ["", "transformer."] {
            let mut tensors = gpt2(dtype);
            for (name, ..) in &mut tensors {
                name.insert_str(0, prefix);
            }
            let case = Case::of(&tensors);
            let weights = case.open().unwrap();
            case.expect_values(&weights);
            assert_eq!((weights.types().as_str(), weights.remainder()), (name, None));
            let all: usize = params(&case.model).iter().map(ParamSpec::len).sum();
            assert_eq!(weights.parameters(), all);
            case.expect_values(&case.open_at("model.safetensors").unwrap());
        }
    }
}

/// Where each tensor of a file is.
fn homes(tensors: &[Tensor], home: &str) -> Vec<(String, Value)> {
    let names = tensors.iter().map(|(name, ..)| name.clone());
    names.map(|name| (name, home.into())).collect()
}

#[test]
fn an_index_leads_to_several_files() {
    let case = Case::empty().with_settings(&json!({}));
    let (first, second) = (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    );
    let mut tensors = gpt2(Dtype::F32);
    let rest = tensors.split_off(9);
    write(&case.path(first), &tensors);
    write(&case.path(second), &rest);
    let mut map: serde_json::Map<String, Value> = homes(&tensors, first)
        .into_iter()
        .chain(homes(&rest, second))
        .collect();
    let index = "model.safetensors.index.json";
    let write_index = |map: &serde_json::Map<String, Value>| {
        fs::write(
            case.path(index),
            json!({ "metadata": {}, "weight_map": map }).to_string(),
        )
        .unwrap();
    };
    write_index(&map);
    case.expect_values(&case.open().unwrap());

    map.insert("h.2.ln_1.bias".into(), second.into());
    write_index(&map);
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2/model.safetensors.index.json` cannot be used: it says that tensor `h.2.ln_1.bias` is in `model-00002-of-00002.safetensors`, which has none of that name
      hint: download or create it again
    ");
    map.insert("h.2.ln_1.bias".into(), "../other.safetensors".into());
    write_index(&map);
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2/model.safetensors.index.json` cannot be used: `../other.safetensors` is not a valid file name
      hint: download or create it again
    ");
    map.insert("h.2.ln_1.bias".into(), "model-00003.safetensors".into());
    write_index(&map);
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2/model.safetensors.index.json` cannot be used: it names `model-00003.safetensors`, which is missing
      hint: download or create it again
    ");
    fs::write(case.path(index), "{}").unwrap();
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2/model.safetensors.index.json` cannot be used: missing field `weight_map` at line 1 column 2
      hint: download or create it again
    ");
}

#[test]
fn masks_and_a_tied_head_are_passed_over() {
    let mut tensors = gpt2(Dtype::F16);
    tensors.push(tensor("h.0.attn.bias", Dtype::BOOL, &[1, 1, 16, 16], |_| 0.0));
    tensors.push(tensor("h.1.attn.masked_bias", Dtype::F32, &[], |_| -1e4));
    // Nothing says that it is tied, but it is.
    tensors.push(tensor("lm_head.weight", Dtype::F16, &[256, 8], |i| value(0, i)));
    let mut case = Case::of(&tensors);
    case.expect_values(&case.open().unwrap());
    case = case.with_settings(&json!({ "tie_word_embeddings": false }));
    case.expect_values(&case.open().unwrap());

    *tensors.last_mut().unwrap() = tensor("lm_head.weight", Dtype::F16, &[256, 8], |i| value(1, i));
    write(&case.path("model.safetensors"), &tensors);
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2` does not fit the `model` section: `lm_head.weight` differs from `wte.weight` in the file, but this model ties them
      hint: write `tied: false` in section `model`
    ");
    let taken = Case {
        folder: tempfile::tempdir().unwrap(),
        model: Model {
            tied: Some(false),
            ..shape(ModelKind::Gpt2)
        },
    };
    write(
        &taken.path("model.safetensors"),
        &self::tensors(&taken.model, Dtype::F16),
    );
    taken.expect_values(&taken.open().unwrap());
    // With this word its values mean nothing.
    case = case.with_settings(&json!({ "tie_word_embeddings": true }));
    case.expect_values(&case.open().unwrap());
}

#[test]
fn a_vocabulary_may_be_padded_and_positions_left_out() {
    let mut case = Case::of(&gpt2(Dtype::F32)).with_settings(&json!({}));
    (case.model.vocab_size, case.model.block_size) = (Some(300), 12);
    let weights = case.open().unwrap();
    case.expect_values(&weights);
    let elements = [0, 1].map(|id| weights.elements(model::ParamId(id)));
    assert_eq!(elements, [256 * 8, 12 * 8]);
    insta::assert_snapshot!(weights.remainder().unwrap(), @"the last 44 of 300 rows of `wte.weight` are random; the first 12 of its 16 positions");
    case.model = Model {
        vocab_size: None,
        block_size: 17,
        ..case.model
    };
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2` does not fit the `model` section: `block_size` is 16 in the file and 17 in this model; `wpe.weight` is [16, 8] in the file and [17, 8] in this model
      hint: write `block_size: 16` in section `model`
    ");
    case.model.block_size = 16;
    write(
        &case.path("model.safetensors"),
        &tensors(
            &Model {
                vocab_size: Some(257),
                ..case.model.clone()
            },
            Dtype::F32,
        ),
    );
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2` does not fit the `model` section: `wte.weight` is [257, 8] in the file and [256, 8] in this model
      hint: write `vocab_size: 257` in section `model`
    ");
}

#[test]
fn an_untied_model_takes_its_own_head() {
    let mlp = shape(ModelKind::Mlp);
    let mut case = Case::of(&tensors(&mlp, Dtype::F32)).with_settings(&json!({ "model_type": "mlp" }));
    case.model = mlp;
    case.expect_values(&case.open().unwrap());
    case.model = shape(ModelKind::Gpt2);
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2` does not fit the `model` section: `kind` is mlp in the file and gpt2 in this model
      hint: write `kind: mlp` in section `model`
    ");
}

#[test]
fn sizes_that_differ_are_one_error_with_the_lines_to_write() {
    let mut case = Case::of(&gpt2(Dtype::F32));
    case.model.n_embd = 12;
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2` does not fit the `model` section: `wte.weight` is [256, 8] in the file and [256, 12] in this model; `wpe.weight` is [16, 8] in the file and [16, 12] in this model; `h.0.ln_1.weight` is [8] in the file and [12] in this model; and 25 more
      hint: check that the weights are complete, and that the sizes in section `model` are those of the weights
    ");
    case.model = Model {
        n_layer: 1,
        ..shape(ModelKind::Gpt2)
    };
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2` does not fit the `model` section: `h.1.attn.c_attn.bias` is in the file but not in this model; `h.1.attn.c_attn.weight` is in the file but not in this model; `h.1.attn.c_proj.bias` is in the file but not in this model; and 9 more
      hint: check that the weights are complete, and that the sizes in section `model` are those of the weights
    ");
    case.model.n_layer = 3;
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2` does not fit the `model` section: `h.2.ln_1.weight` is missing in the file; `h.2.ln_1.bias` is missing in the file; `h.2.attn.c_attn.weight` is missing in the file; and 9 more
      hint: check that the weights are complete, and that the sizes in section `model` are those of the weights
    ");
    case = case.with_settings(&json!({ "n_head": 4 }));
    case.model.n_layer = 2;
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2` does not fit the `model` section: `n_head` is 4 in the file and 2 in this model
      hint: write `n_head: 4` in section `model`
    ");
}

#[test]
fn another_architecture_is_told_from_other_sizes() {
    let case = Case::of(&gpt2(Dtype::F32));
    let case = case.with_settings(&json!({ "activation_function": "relu", "layer_norm_epsilon": 1e-6 }));
    insta::assert_snapshot!(case.error(""), @r#"
    `gpt2` does not fit the `model` section: `activation_function` is "relu" in the file and `gelu_new` in this model; `layer_norm_epsilon` is 1e-6 in the file and 1e-5 in this model
      hint: the weights are of an architecture that this build does not support
    "#);
    let case = case.with_settings(&json!({ "scale_attn_by_inverse_layer_idx": true }));
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2` does not fit the `model` section: `scale_attn_by_inverse_layer_idx` is true in the file and false in this model
      hint: the weights are of an architecture that this build does not support
    ");
    let case = case.with_settings(&json!({ "model_type": "gpt_neox", "n_layer": 80 }));
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2/config.json`: `model_type` is `gpt_neox`
      hint: the weights are of an architecture that this build does not support
    ");
    fs::write(case.path("config.json"), "[]").unwrap();
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2/config.json` cannot be used: invalid type: sequence, expected a map at line 1 column 0
      hint: download or create it again
    ");
}

#[test]
fn tensors_that_are_missing_twice_there_or_of_another_type_are_named() {
    let mut tensors = gpt2(Dtype::F32);
    let spare = tensors.remove(5);
    insta::assert_snapshot!(Case::of(&tensors).error(""), @r"
    `gpt2` does not fit the `model` section: `h.0.attn.c_attn.bias` is missing in the file
      hint: check that the weights are complete, and that the sizes in section `model` are those of the weights
    ");
    tensors.push(tensor("h.0.ln_2.bias", Dtype::I8, &[8], |_| 0.0));
    tensors.retain(|(name, dtype, ..)| name != "h.0.ln_2.bias" || *dtype == Dtype::I8);
    tensors.push(spare.clone());
    insta::assert_snapshot!(Case::of(&tensors).error(""), @r"
    `gpt2` does not fit the `model` section: `h.0.ln_2.bias` is of type I8 in the file
      hint: F32, F16 and BF16 are read: save the weights in one of these
    ");
    let mut tensors = gpt2(Dtype::F32);
    tensors.push((format!("transformer.{}", spare.0), spare.1, spare.2, spare.3));
    tensors.push(tensor("score.weight", Dtype::F32, &[2, 8], |_| 0.0));
    insta::assert_snapshot!(Case::of(&tensors).error(""), @r"
    `gpt2` does not fit the `model` section: `h.0.attn.c_attn.bias` occurs in the file twice, as `h.0.attn.c_attn.bias` and as `transformer.h.0.attn.c_attn.bias`; `score.weight` is in the file but not in this model
      hint: check that the weights are complete, and that the sizes in section `model` are those of the weights
    ");
}

#[test]
fn files_that_are_cut_short_or_something_else_are_named() {
    let case = Case::of(&gpt2(Dtype::F32));
    let path = case.path("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let mut said = String::new();
    let mut expect = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        said.push_str(&case.error(""));
        said.push('\n');
    };
    expect(&whole[..whole.len() - 1]);
    expect(&whole[..100]);
    expect(b"");
    expect(b"PK\x03\x04 is how a pickle begins, in a zip");
    expect(&[&3_u64.to_le_bytes()[..], b"{]}"].concat());
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
    expect(&[&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat());
    expect(b"version https://git-lfs.github.com/spec/v1\noid sha256:248dfc\nsize 548105171\n");
    insta::assert_snapshot!(said, @r"
    `gpt2/model.safetensors` is not a safetensors file, or it is damaged: it has 17871 bytes, expected 17872
      hint: download or create it again
    `gpt2/model.safetensors` is not a safetensors file, or it is damaged: it ends within its header, after 100 bytes
      hint: download or create it again
    `gpt2/model.safetensors` is not a safetensors file, or it is damaged: it ends within its header, after 0 bytes
      hint: download or create it again
    `gpt2/model.safetensors` is not a safetensors file, or it is damaged: its header claims 2338328217762614096 bytes
      hint: download or create it again
    `gpt2/model.safetensors` is not a safetensors file, or it is damaged: its header: key must be a string at line 1 column 2
      hint: download or create it again
    `gpt2/model.safetensors` is not a safetensors file, or it is damaged: it has 917 bytes, expected 18446744073709551615
      hint: download or create it again
    `gpt2/model.safetensors` is a Git LFS pointer, not the file itself
      hint: download it with `git lfs pull` in its directory
    ");
}

#[test]
fn what_is_no_file_with_weights_says_how_to_get_one() {
    let case = Case::empty();
    insta::assert_snapshot!(case.error("absent"), @r"
    cannot read `gpt2/absent`: No such file or directory (os error 2)
      hint: relative paths in `model.init_from` are resolved from the YAML's directory
    ");
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2` holds neither `model.safetensors` nor `model.safetensors.index.json`
      hint: give a directory that `save_pretrained` or `ddp-train ckpt export` has written, or one `.safetensors` file
    ");
    fs::create_dir(case.path("checkpoints")).unwrap();
    insta::assert_snapshot!(case.error(""), @r"
    `gpt2` holds neither `model.safetensors` nor `model.safetensors.index.json`
      hint: it belongs to a run: `ddp-train ckpt export gpt2 --to DIR` exports its checkpoint to such a file
    ");
    fs::write(case.path("pytorch_model.bin"), "PK").unwrap();
    insta::assert_snapshot!(case.error(""), @r#"
    `gpt2/pytorch_model.bin` is a pickle, which only Python can read, and only by running it
      hint: convert it once: `python3 -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained('gpt2').save_pretrained('NEW_DIR')"`, and use the new directory
    "#);
    assert_eq!(case.error(""), case.error("pytorch_model.bin"));
    nix::unistd::mkfifo(&case.path("pipe.safetensors"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    insta::assert_snapshot!(case.error("pipe.safetensors"), @"`gpt2/pipe.safetensors` is not a regular file");
}

#[test]
fn a_value_that_is_not_finite_is_found_when_it_is_read() {
    let mut tensors = gpt2(Dtype::F16);
    let name = tensors[3].0.clone();
    tensors[3] = tensor(
        &name,
        Dtype::F16,
        &tensors[3].2,
        |i| if i == 5 { 1e6 } else { 0.0 },
    );
    let weights = Case::of(&tensors);
    let (folder, weights) = (weights.folder.path().to_owned(), weights.open().unwrap());
    let read = |range: std::ops::Range<usize>| {
        weights.read(model::ParamId(3), range.clone(), &mut vec![0.0; range.len()])
    };
    read(0..5).unwrap();
    let error = read(0..6).unwrap_err().to_string();
    insta::assert_snapshot!(error.replace(folder.to_str().unwrap(), "gpt2"), @r"
    `gpt2/model.safetensors`: tensor `h.0.ln_1.bias` has a value that is not finite
      hint: the training that produced it diverged, or the file is damaged
    ");
}

#[test]
fn a_changed_byte_changes_the_fingerprint() {
    let case = Case::of(&gpt2(Dtype::F32));
    let before = case.open().unwrap().fingerprint().unwrap();
    assert_eq!(case.open().unwrap().fingerprint().unwrap(), before);
    let path = case.path("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    assert_ne!(case.open().unwrap().fingerprint().unwrap(), before);
}
