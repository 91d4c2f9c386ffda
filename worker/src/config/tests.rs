//! What a user sees for each class of mistake.

use std::path::{Path, PathBuf};

use super::keys::KEYS_OF_OTHERS;
use super::schema::keys;
use super::{OptimizerGroup, Order, Problem, Resume, ShardGroup, StepRange, Strategy, TrainConfig};
use crate::data::load_located;

const GOOD: &str = "\
run:
  name: tiny
model:
  kind: gpt2
  n_layer: 2
  n_head: 4
  n_embd: 128
  block_size: 16
data:
  train: text.txt
  order: sequential
train:
  steps: 10
  optimizer:
    lr: 3e-4
    betas: [0.9, 0.95]
launch:
  nproc_per_node: 2
";

struct Case {
    folder: tempfile::TempDir,
}

impl Case {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("text.txt"), vec![b'x'; 1000]).unwrap();
        Self { folder }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("train.yaml")
    }

    fn load(&self, yaml: &str, set: &[&str]) -> Result<TrainConfig, super::ConfigError> {
        std::fs::write(self.path(), yaml).unwrap();
        let set: Vec<String> = set.iter().map(ToString::to_string).collect();
        load_located(&self.path(), &set).map(|located| located.config)
    }

    /// The message for a file, with the temporary folder cut out of it.
    fn error(&self, yaml: &str, set: &[&str]) -> String {
        let message = self.load(yaml, set).unwrap_err().to_string();
        message.replace(&format!("{}/", self.folder.path().display()), "")
    }
}

/// The message for the good file with one piece of text replaced.
fn with(from: &str, to: &str) -> String {
    assert!(GOOD.contains(from), "`{from}` is not in the file");
    Case::new().error(&GOOD.replacen(from, to, 1), &[])
}

/// The message for the good file with one override.
fn set(text: &str) -> String {
    Case::new().error(GOOD, &[text])
}

/// The good file with overrides.
fn load_good(set: &[&str]) -> Result<TrainConfig, String> {
    Case::new().load(GOOD, set).map_err(|error| error.to_string())
}

#[test]
fn a_good_file_loads() {
    let case = Case::new();
    let config = case.load(GOOD, &[]).unwrap();
    assert_eq!(config.run.name, "tiny");
    assert_eq!((config.model.n_layer, config.model.n_embd), (2, 128));
    assert_eq!(config.data.train, case.folder.path().join("text.txt").into());
    assert_eq!(config.data.order, Order::Sequential);
    assert_eq!(config.train.optimizer.lr, 3e-4);
    assert_eq!(config.train.optimizer.betas(), [0.9, 0.95]);
    assert_eq!(config.parallel.strategy, Strategy::Ddp);
    assert_eq!(config.launch["nproc_per_node"], 2);
}

#[test]
fn overrides_replace_add_and_win_in_order() {
    let set = [
        "train.steps=20",
        "train.steps=30",
        "run.resume=auto",
        "parallel.overlap=false",
        "train.optimizer.betas=[0.5, 0.6]",
        "train.grad_clip=null",
        "run.out_dir=somewhere/else",
        "train.schedule.min_lr=1e-5",
    ];
    let config = Case::new().load(GOOD, &set).unwrap();
    assert_eq!(config.train.steps, 30);
    assert_eq!(config.run.resume, Resume::Auto);
    assert!(!config.parallel.overlap);
    assert_eq!(config.train.optimizer.betas(), [0.5, 0.6]);
    assert_eq!(config.train.grad_clip, None);
    assert_eq!(config.run.out_dir.as_deref(), Some(Path::new("somewhere/else")));
    assert_eq!(config.train.schedule.min_lr, 1e-5);
    assert_eq!(config.train.optimizer.lr, 3e-4, "neighbours stay");
}

#[test]
fn a_section_without_keys_is_an_empty_one() {
    let yaml = GOOD.replace("run:\n  name: tiny\n", "run:\n  # name: tiny\n");
    assert_eq!(Case::new().load(&yaml, &[]).unwrap().run.name, "train");
}

#[test]
fn places_are_known_to_callers() {
    let case = Case::new();
    std::fs::write(case.path(), GOOD).unwrap();
    let located = load_located(&case.path(), &["launch.max_restarts=3".into()]).unwrap();
    assert!(
        located
            .source
            .place("launch.nproc_per_node")
            .ends_with("train.yaml:18")
    );
    assert_eq!(
        located.source.place("launch.max_restarts"),
        "`--set launch.max_restarts=3`"
    );
    assert!(
        located
            .source
            .place("train.optimizer.eps")
            .ends_with("train.yaml:14"),
        "the section around a key that is not set"
    );
    let problem = Problem::new("launch.nproc_per_node", "too many").with_hint("fewer");
    let error = located.source.locate(problem);
    assert!(
        error
            .to_string()
            .ends_with("train.yaml:18: too many\n  hint: fewer"),
        "{error}"
    );
}

#[test]
fn unknown_keys() {
    insta::assert_snapshot!(with("  steps: 10", "  stpes: 10"), @r"
    train.yaml:13: unknown key `train.stpes`
      hint: did you mean `train.steps`?
    ");
    insta::assert_snapshot!(with("run:\n", "steps: 10\nrun:\n"), @r"
    train.yaml:1: unknown key `steps`
      hint: did you mean `train.steps`?
    ");
    insta::assert_snapshot!(with("  name: tiny", "  colour: red"), @r"
    train.yaml:2: unknown key `run.colour`
      hint: the keys of `run` are `name`, `out_dir`, `seed`, `resume`, `overwrite`, `timeline`, `tensorboard`
    ");
    insta::assert_snapshot!(set("train.optimiser.lr=1"), @r"
    `--set train.optimiser.lr`: unknown key `train.optimiser`
      hint: did you mean `train.optimizer`?
    ");
}

#[test]
fn wrong_types() {
    insta::assert_snapshot!(with("steps: 10", "steps: many"), @"train.yaml:13: `train.steps` is the string `many`, expected a whole number, 1 or more");
    insta::assert_snapshot!(with("steps: 10", "steps: 1.5"), @"train.yaml:13: `train.steps` is the number `1.5`, expected a whole number, 1 or more");
    insta::assert_snapshot!(with("steps: 10", "steps: -1"), @"train.yaml:13: `train.steps` is the number `-1`, expected a whole number, 1 or more");
    insta::assert_snapshot!(with("name: tiny", "name: 7"), @r"
    train.yaml:2: `run.name` is the number `7`, expected a name for a directory: not empty, without `/` and control characters, not starting with a dot
      hint: put the value in quotes to make it a string
    ");
    insta::assert_snapshot!(with("kind: gpt2", "kind: gpt5"), @"train.yaml:4: `model.kind` is `gpt5`, expected `gpt2` or `llama` or `mlp` or `mixtral`");
    insta::assert_snapshot!(with("kind: gpt2", "kind: 5"), @"train.yaml:4: `model.kind` is the number `5`, expected `gpt2` or `llama` or `mlp` or `mixtral`");
    insta::assert_snapshot!(with("lr: 3e-4", "lr: [1]"), @"train.yaml:15: `train.optimizer.lr` is a list, expected a number");
    insta::assert_snapshot!(with("[0.9, 0.95]", "[0.9]"), @"train.yaml:16: `train.optimizer.betas` is [0.9], expected two numbers from 0 to below 1");
    insta::assert_snapshot!(with("[0.9, 0.95]", "[0.9, 0.95, 0.99]"), @"train.yaml:16: `train.optimizer.betas` is [0.9, 0.95, 0.99], expected two numbers from 0 to below 1");
    insta::assert_snapshot!(with("  steps: 10\n  optimizer:\n    lr: 3e-4\n    betas: [0.9, 0.95]\n", "  - 1\n"), @"train.yaml:13: `train` is a list, expected a section with keys");
    insta::assert_snapshot!(set("parallel.overlap=yes"), @"`--set parallel.overlap=yes`: `parallel.overlap` is the string `yes`, expected `true` or `false`");
    insta::assert_snapshot!(Case::new().error("just text", &[]), @"train.yaml:1: the file is the string `just text`, expected a section with keys");
}

#[test]
fn wrong_types_in_words() {
    let mut said = String::new();
    for text in [
        "train.steps=2.0",
        "train.steps=1e3",
        "train.steps='5'",
        "train.steps=99999999999999999999",
        "train.micro_batch=1e9999",
        "train.eval_every=1.5",
        "train.grad_clip=yes",
        "train.grad_clip=1e39",
        "train.optimizer.lr=1e39",
        "train.optimizer.eps=1e39",
        "train.optimizer.betas=[0.9, x]",
        "data.train=5",
        "launch={nnodes: 2, nproc_per_node: .nan}",
        "train.steps=!!int x",
        "train.steps=!!float x",
        "train={steps: 1, steps: 2}",
        "train={~: 1}",
        "train={[1]: 1}",
        "train={<<: 1}",
        "train=&a [*a]",
        "train=1\n---\n2",
    ] {
        said.push_str(&load_good(&[text]).unwrap_err());
        said.push('\n');
    }
    insta::assert_snapshot!(said, @r"
    `--set train.steps=2.0`: `train.steps` is the number `2.0`, expected a whole number, 1 or more
      hint: write it without a point or an exponent: `2`
    `--set train.steps=1e3`: `train.steps` is the number `1000.0`, expected a whole number, 1 or more
      hint: write it without a point or an exponent: `1000`
    `--set train.steps='5'`: `train.steps` is the string `5`, expected a whole number, 1 or more
      hint: remove the quotes to make it a number
    `--set train.steps=99999999999999999999`: `train.steps` is the number `1e20`, expected a whole number, 1 or more
      hint: the largest value is 18446744073709551615
    `--set train.micro_batch=1e9999`: `train.micro_batch` is `.inf`, or too large, expected a whole number, 1 or more
    `--set train.eval_every=1.5`: `train.eval_every` is the number `1.5`, expected a whole number, 0 or more
    `--set train.grad_clip=yes`: `train.grad_clip` is the string `yes`, expected a number
    `--set train.grad_clip=1e39`: `train.grad_clip` is too large, expected a number above 0, or empty not to clip
    `--set train.optimizer.lr=1e39`: `train.optimizer.lr` is too large, expected a number, 0 or more
    `--set train.optimizer.eps=1e39`: `train.optimizer.eps` is too large, expected a number above 0
    `--set train.optimizer.betas=[0.9, x]`: `train.optimizer.betas` is [0.9, x], expected two numbers from 0 to below 1
    `--set data.train=5`: `data.train` is the number `5`, expected a path (a string), or a list of them
      hint: put the value in quotes to make it a string
    `--set launch={nnodes: 2, nproc_per_node: .nan}`: `launch.nproc_per_node` is `.nan`, expected a finite number
    `--set train.steps=!!int x`: the value is not valid YAML: a value does not match its tag (such as `!!int`)
    `--set train.steps=!!float x`: the value is not valid YAML: a value does not match its tag (such as `!!int`)
    `--set train={steps: 1, steps: 2}`: the value is not valid YAML: `steps` is given more than once
    `--set train={~: 1}`: the value is not valid YAML: a key is empty
    `--set train={[1]: 1}`: the value is not valid YAML: a key is a list or a section, expected a name
    `--set train={<<: 1}`: the value is not valid YAML: `<<` requires a section or a list of sections
    `--set train=&a [*a]`: the value is not valid YAML: a value contains itself
    `--set train=1
    ---
    2`: the value is not valid YAML: `---` starts a second document, but a configuration is a single one
    ");
    for word in "u64 i64 f64 f32 usize sequence scalar mapping unit floating".split(' ') {
        assert!(!said.contains(word), "`{word}` is no word of users:\n{said}");
    }
}

#[test]
fn missing_sections_and_keys() {
    insta::assert_snapshot!(Case::new().error("", &[]), @r"
    train.yaml: section `model` is missing
      hint: a configuration needs at least the sections `model` and `data`
    ");
    insta::assert_snapshot!(with("data:\n  train: text.txt\n  order: sequential\n", ""), @r"
    train.yaml: section `data` is missing
      hint: a configuration needs at least the sections `model` and `data`
    ");
    insta::assert_snapshot!(with("  n_layer: 2\n", ""), @r"
    train.yaml:3: `model.n_layer` is missing
      hint: add `n_layer: …` under `model:`
    ");
}

#[test]
fn broken_yaml() {
    insta::assert_snapshot!(with("  steps: 10", "  steps: 10\n   x: [1,"), @r"
    train.yaml:14: not valid YAML: mapping values are not allowed in this context
      hint: check indentation, brackets and the space after each colon, here and on the line before
    ");
    insta::assert_snapshot!(with("  steps: 10", "  steps: 10\n  steps: 11"), @"train.yaml:14: not valid YAML: `steps` is given more than once");
    insta::assert_snapshot!(with("  name: tiny", "\tname: tiny"), @r"
    train.yaml:2: not valid YAML: a tab in the indentation
      hint: use spaces: YAML allows no tabs there
    ");
    insta::assert_snapshot!(with("  steps: 10", "  steps: 10\n\tmicro_batch: 1"), @r"
    train.yaml:14: not valid YAML: a tab in the indentation
      hint: use spaces: YAML allows no tabs there
    ");
    let first = |text: &str| Case::new().error(text, &[]);
    insta::assert_snapshot!(first("# a run\n\tmodel:\n  kind: gpt2\n"), @r"
    train.yaml:2: not valid YAML: a tab in the indentation
      hint: use spaces: YAML allows no tabs there
    ");
    let in_brackets = first("{\n\tmodel: {},\n\tdata: {}\n}\n");
    assert!(!in_brackets.contains("tab"), "{in_brackets}");
    insta::assert_snapshot!(Case::new().error("model: 1\n---\nmodel: 2\n", &[]), @"train.yaml:3: not valid YAML: `---` starts a second document, but a configuration is a single one");
}

#[test]
fn broken_overrides() {
    insta::assert_snapshot!(set("train.steps"), @"`--set train.steps`: expected `key=value`, for example `train.steps=20`");
    insta::assert_snapshot!(set("run.out_dir="), @"`--set run.out_dir=`: the value after `=` is missing; `run.out_dir=null` sets no value");
    insta::assert_snapshot!(set("run.out_dir=''"), @"`--set run.out_dir=''`: `run.out_dir` is empty, expected the path of a directory");
    insta::assert_snapshot!(set("train..steps=1"), @"`--set train..steps=1`: `train..steps` is not a key: expected names separated by dots, for example `train.steps`");
    insta::assert_snapshot!(set("train.steps.x=1"), @"`--set train.steps.x=1`: `train.steps` is not a section, so it has no key `x`");
    insta::assert_snapshot!(set("train.steps=[1"), @"`--set train.steps=[1`: the value is not valid YAML: unclosed bracket '['");
    insta::assert_snapshot!(set("train.steps=0"), @"`--set train.steps=0`: `train.steps` is 0, expected at least 1");
}

#[test]
fn values_out_of_range() {
    insta::assert_snapshot!(with("steps: 10", "steps: 0"), @"train.yaml:13: `train.steps` is 0, expected at least 1");
    insta::assert_snapshot!(with("n_embd: 128", "n_embd: 130"), @r"
    train.yaml:7: `model.n_embd` is 130, expected a multiple of `model.n_head`, which is 4
      hint: use 128 or 132, or a different number of heads
    ");
    insta::assert_snapshot!(set("model.n_head=7"), @r"
    `--set model.n_head=7`: `model.n_embd` is 128, expected a multiple of `model.n_head`, which is 7
      hint: use 126 or 133, or a different number of heads
    ");
    insta::assert_snapshot!(set("model.n_head=129"), @r"
    `--set model.n_head=129`: `model.n_embd` is 128, expected a multiple of `model.n_head`, which is 129
      hint: use 129, or a different number of heads
    ");
    insta::assert_snapshot!(with("lr: 3e-4", "lr: -.inf"), @"train.yaml:15: `train.optimizer.lr` is `-.inf`, or too far below 0, expected a finite number");
    insta::assert_snapshot!(with("nproc_per_node: 2", "nproc_per_node: .nan"), @"train.yaml:18: `launch.nproc_per_node` is `.nan`, expected a finite number");
    insta::assert_snapshot!(with("[0.9, 0.95]", "[0.9, 1.0]"), @"train.yaml:16: `train.optimizer.betas` is [0.9, 1.0], expected two numbers from 0 to below 1");
    insta::assert_snapshot!(set("train.grad_clip=0"), @"`--set train.grad_clip=0`: `train.grad_clip` is 0, expected a number above 0, or empty not to clip");
    insta::assert_snapshot!(set("train.lr_scaling=linear"), @r"
    `--set train.lr_scaling=linear`: `train.lr_scaling: linear` needs `train.base_batch`: the global batch, in samples, that `train.optimizer.lr` is meant for
      hint: add `base_batch: …` under `train:`
    ");
    insta::assert_snapshot!(set("train.base_batch=8"), @r"
    `--set train.base_batch=8`: `train.base_batch` has no effect without `train.lr_scaling: linear`
      hint: leave it out
    ");
    insta::assert_snapshot!(set("train.optimizer.eps=0"), @"`--set train.optimizer.eps=0`: `train.optimizer.eps` is 0, expected a number above 0");
    insta::assert_snapshot!(set("train.optimizer.lr=.nan"), @"`--set train.optimizer.lr=.nan`: `train.optimizer.lr` is `.nan`, expected a finite number");
    insta::assert_snapshot!(set("train.optimizer.kind=sgd"), @r"
    train.yaml:16: `train.optimizer.betas` has no effect without `train.optimizer.kind: adamw`, `lion` or `muon`
      hint: leave it out
    ");
    insta::assert_snapshot!(set("train.optimizer.momentum=0.9"), @r"
    `--set train.optimizer.momentum=0.9`: `train.optimizer.momentum` has no effect without `train.optimizer.kind: sgd` or `muon`
      hint: leave it out
    ");
    insta::assert_snapshot!(set("train.optimizer.groups=[{params: wte.*, lr_scale: -1}]"), @"`--set train.optimizer.groups=[{params: wte.*, lr_scale: -1}]`: `train.optimizer.groups` is [{params: wte.*, lr_scale: -1}], expected a list of at most 15 sections of `params`, `lr_scale` and `weight_decay`, with rates of 0 or more");
    insta::assert_snapshot!(set("train.schedule.kind=wsd"), @r"
    `--set train.schedule.kind=wsd`: `train.schedule.kind: wsd` needs `train.schedule.decay_steps`: the steps of its decay
      hint: add `decay_steps: …` under `schedule:`; a tenth of `train.steps` is usual
    ");
    insta::assert_snapshot!(set("train.schedule.decay_steps=5"), @r"
    `--set train.schedule.decay_steps=5`: `train.schedule.decay_steps` has no effect without `train.schedule.kind: wsd`
      hint: leave it out
    ");
    insta::assert_snapshot!(set("train.schedule.min_lr=1"), @"`--set train.schedule.min_lr=1`: `train.schedule.min_lr` is 1, expected at most `train.optimizer.lr`, which is 0.0003");
    let sync = Case::new().error(GOOD, &["parallel.strategy=zero2", "parallel.sync=naive"]);
    insta::assert_snapshot!(sync, @"
    `--set parallel.sync=naive`: `parallel.sync` has no effect without `parallel.strategy: ddp`
      hint: leave it out
    ");
    insta::assert_snapshot!(set("parallel.strategy=zero4"), @"`--set parallel.strategy=zero4`: `parallel.strategy` is `zero4`, expected `ddp` or `zero1` or `zero2` or `zero3`");
    insta::assert_snapshot!(set("parallel.bucket_mb=-1"), @"`--set parallel.bucket_mb=-1`: `parallel.bucket_mb` is -1, expected a number above 0, at most 65536");
    insta::assert_snapshot!(set("model.vocab_size=10"), @r"
    `--set model.vocab_size=10`: `model.vocab_size` is 10, expected at least 256, the number of tokens of `data.tokenizer`
      hint: leave it out to use the tokenizer's
    ");
    assert!(
        set(r#"run.name="a\u001b]0;b""#).contains("control characters"),
        "a title of a terminal"
    );
    insta::assert_snapshot!(set("run.name=a/b"), @"`--set run.name=a/b`: `run.name` is `a/b`, expected a name for a directory: not empty, without `/` and control characters, not starting with a dot");
    let both = Case::new().error(GOOD, &["run.overwrite=true", "run.resume=auto"]);
    insta::assert_snapshot!(both, @r"
    `--set run.overwrite=true`: `run.overwrite: true` contradicts `run.resume`: the run would be deleted and continued
      hint: set only one of the two
    ");
}

#[test]
fn experts_out_of_range() {
    let experts = |set: &str| Case::new().error(GOOD, &["model.kind=mixtral", set]);
    assert!(
        set("model.experts.count=4").contains("`model.experts` has no effect without `model.kind: mixtral`")
    );
    insta::assert_snapshot!(experts("model.experts.top_k=9"), @r"
    `--set model.experts.top_k=9`: `model.experts.top_k` is 9, expected at most `model.experts.count`, which is 8
      hint: set `model.experts.top_k` to 8 or less, or a larger `model.experts.count`
    ");
    insta::assert_snapshot!(experts("parallel.expert=3"), @r"
    `--set parallel.expert=3`: `model.experts.count` (8) cannot be divided over 3 expert-parallel ranks
      hint: set `parallel.expert` to 2, or `model.experts.count` to 6 or 9
    ");
}

#[test]
fn data_that_cannot_be_used() {
    insta::assert_snapshot!(with("train: text.txt", "train: gone.txt"), @r"
    train.yaml:10: `data.train` is `gone.txt`, which cannot be read: No such file or directory (os error 2)
      hint: relative paths in `data` are resolved from the YAML's directory
    ");
    insta::assert_snapshot!(set("model.init_from=''"), @"`--set model.init_from=''`: `model.init_from` is empty, expected the path of a directory or of a `.safetensors` file");
    insta::assert_snapshot!(with("train: text.txt", "train: ''"), @"train.yaml:10: `data.train` is empty, expected a path (a string), or a list of them");
    insta::assert_snapshot!(with("train: text.txt", "train: ."), @"train.yaml:10: `data.train` is `.`, which is not a regular file");
    insta::assert_snapshot!(with("block_size: 16", "block_size: 128"), @r"
    train.yaml:8: `model.block_size` is 128, but the held-out tenth of `data.train` has only 100 tokens, and a sample needs 129
      hint: use a smaller `model.block_size` or a longer text
    ");
    insta::assert_snapshot!(with("block_size: 16", "block_size: 2000"), @r"
    train.yaml:8: `model.block_size` is 2000, but `data.train` has only 900 tokens, and a sample needs 2001
      hint: use a smaller `model.block_size` or a longer text
    ");
    let case = Case::new();
    std::fs::write(case.folder.path().join("short.txt"), "x").unwrap();
    insta::assert_snapshot!(case.error(GOOD, &["data.val=short.txt"]), @r"
    train.yaml:8: `model.block_size` is 16, but `data.val` has only 1 token, and a sample needs 17
      hint: use a smaller `model.block_size` or a longer text
    ");
    std::fs::write(case.folder.path().join("empty.txt"), "").unwrap();
    insta::assert_snapshot!(case.error(GOOD, &["data.val=empty.txt"]), @"`--set data.val=empty.txt`: `data.val` is `empty.txt`, which is empty");
}

/// A run was written to a folder called `~`.
#[test]
fn paths_that_only_a_shell_expands_are_refused() {
    insta::assert_snapshot!(set("run.out_dir=~/runs"), @r"
    `--set run.out_dir=~/runs`: `run.out_dir` is `~/runs`, expected a path without `~` and `$`
      hint: `~` and variables are not expanded: write the whole path
    ");
    insta::assert_snapshot!(set("data.train=[text.txt, $DATA/b.txt]"), @r"
    `--set data.train=[text.txt, $DATA/b.txt]`: `data.train` is [text.txt, $DATA/b.txt], expected a path without `~` and `$`
      hint: `~` and variables are not expanded: write the whole path
    ");
    insta::assert_snapshot!(set("data.tokenizer=${HOME}/tokenizer.json"), @r"
    `--set data.tokenizer=${HOME}/tokenizer.json`: `data.tokenizer` is `${HOME}/tokenizer.json`, expected a path without `~` and `$`
      hint: `~` and variables are not expanded: write the whole path
    ");
    insta::assert_snapshot!(set("model.init_from=~/weights"), @r"
    `--set model.init_from=~/weights`: `model.init_from` is `~/weights`, expected a path without `~` and `$`
      hint: `~` and variables are not expanded: write the whole path
    ");
    assert!(
        Case::new()
            .load(
                GOOD,
                &[
                    "run.out_dir=./~",
                    "train.offload.dir=a$b",
                    "train.offload.optimizer=file"
                ]
            )
            .is_ok()
    );
}

#[test]
fn sections_that_only_hold_anchors_may_have_any_keys() {
    let templates = "x-model: &small { n_layer: 2, n_head: 4 }\n.lr: &lr 1e-3\n";
    let yaml = GOOD
        .replace("  n_layer: 2\n  n_head: 4\n", "  <<: *small\n")
        .replace("lr: 3e-4", "lr: *lr");
    let config = Case::new().load(&format!("{templates}{yaml}"), &[]).unwrap();
    assert_eq!((config.model.n_head, config.train.optimizer.lr), (4, 1e-3));
    assert!(with("  name: tiny", "  x-name: tiny").contains("unknown key `run.x-name`"));
}

#[test]
fn a_pipe_is_no_data_and_is_not_waited_for() {
    let case = Case::new();
    nix::unistd::mkfifo(&case.folder.path().join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    insta::assert_snapshot!(case.error(GOOD, &["data.train=pipe"]), @"`--set data.train=pipe`: `data.train` is `pipe`, which is not a regular file");
}

#[test]
fn files_that_cannot_be_read() {
    let case = Case::new();
    let message = |path: &str| {
        let loaded = load_located(&case.folder.path().join(path), &[]);
        let error = loaded.unwrap_err().to_string();
        error.replace(&format!("{}/", case.folder.path().display()), "")
    };
    insta::assert_snapshot!(message("gone.yaml"), @r"
    gone.yaml: no such file
      hint: the path of the configuration is relative to the current directory
    ");
    std::fs::write(case.folder.path().join("binary.yaml"), [0xff, 0xfe]).unwrap();
    insta::assert_snapshot!(message("binary.yaml"), @r"
    binary.yaml: is not text (byte 0 is not UTF-8), expected a configuration: a YAML file
      hint: it is UTF-16: save it as UTF-8 (`iconv -f UTF-16 -t UTF-8`)
    ");
    std::fs::write(case.folder.path().join("latin.yaml"), b"run: { name: caf\xe9 }").unwrap();
    insta::assert_snapshot!(message("latin.yaml"), @r"
    latin.yaml: is not text (byte 16 is not UTF-8), expected a configuration: a YAML file
      hint: save it as UTF-8 (from Latin-1: `iconv -f LATIN1 -t UTF-8`)
    ");
    std::fs::write(case.folder.path().join("image.yaml"), b"\x89PNG\0").unwrap();
    insta::assert_snapshot!(message("image.yaml"), @r"
    image.yaml: is not text (byte 0 is not UTF-8), expected a configuration: a YAML file
      hint: a target that ends in `.yaml` or `.yml` is read as a configuration; any other target is run as a program
    ");
    std::fs::create_dir(case.folder.path().join("folder.yaml")).unwrap();
    insta::assert_snapshot!(message("folder.yaml"), @r"
    folder.yaml: is a directory, expected a configuration: a YAML file
      hint: give the file in it, such as `train.yaml`
    ");
    std::fs::write(
        case.folder.path().join("long.yaml"),
        vec![b'#'; (super::MAX_FILE_BYTES + 1) as usize],
    )
    .unwrap();
    insta::assert_snapshot!(message("long.yaml"), @"long.yaml: longer than 1048576 bytes: not a configuration");
}

#[test]
fn keys_that_the_strategy_does_not_read() {
    let under = |strategy: &str, key: &str| {
        let loaded = Case::new().load(GOOD, &[&format!("parallel.strategy={strategy}"), key]);
        loaded.map(|_| ()).map_err(|error| error.to_string())
    };
    let (full, kept) = ("parallel.accumulate=full", "parallel.reshard_after_forward=false");
    insta::assert_snapshot!(under("zero2", "train.offload.parameters=file").unwrap_err(), @r"
    `--set train.offload.parameters=file`: `train.offload.parameters: file` needs `parallel.strategy: zero3`: elsewhere every rank computes with a whole copy of the parameters
      hint: set `parallel.strategy: zero3`, or leave out `train.offload.parameters`
    ");
    insta::assert_snapshot!(under("zero3", "train.offload.parameters=host").unwrap_err(), @r"
    `--set train.offload.parameters=host`: `train.offload.parameters: host` needs `train.offload.optimizer: host`: an update works on both in one place
      hint: set `train.offload.optimizer: host`, or leave out `train.offload.parameters`
    ");
    for key in ["optimizer", "parameters"] {
        let offload = format!("train.offload.{key}=host");
        let error = Case::new().error(
            GOOD,
            &["parallel.strategy=zero3", "train.optimizer.kind=muon", &offload],
        );
        assert!(
            error.contains("hint: leave out `train.offload`, or use a different optimizer"),
            "{error}"
        );
    }
    insta::assert_snapshot!(under("zero1", full).unwrap_err(), @r"
    `--set parallel.accumulate=full`: `parallel.accumulate` has no effect without `parallel.strategy: zero2` or `zero3`
      hint: leave it out
    ");
    insta::assert_snapshot!(under("zero2", kept).unwrap_err(), @r"
    `--set parallel.reshard_after_forward=false`: `parallel.reshard_after_forward` has no effect without `parallel.strategy: zero3`
      hint: leave it out
    ");
    for (strategy, key) in [("ddp", full), ("ddp", kept), ("zero1", kept)] {
        assert!(under(strategy, key).is_err(), "{strategy}, {key}");
    }
    for (strategy, key) in [("zero2", full), ("zero3", full), ("zero3", kept)] {
        assert_eq!(under(strategy, key), Ok(()), "{strategy}, {key}");
    }
    // What is the default says nothing.
    for key in [
        "parallel.accumulate=sharded",
        "parallel.reshard_after_forward=true",
    ] {
        assert_eq!(under("ddp", key), Ok(()), "{key}");
    }
}

#[test]
fn stages_of_a_pipeline_are_not_told_to_hold_less_than_they_do() {
    let with = |settings: &[&str]| {
        let stages = "parallel.pipeline.stages=2";
        let settings = [&["parallel.strategy=zero2", stages][..], settings].concat();
        let loaded = Case::new().load(GOOD, &settings);
        loaded.map(|_| ()).map_err(|error| error.to_string())
    };
    let sharded = "parallel.accumulate=sharded";
    insta::assert_snapshot!(with(&[sharded]).unwrap_err(), @r"
    `--set parallel.accumulate=sharded`: `parallel.accumulate: sharded` is not supported with `parallel.pipeline.stages` above 1: each rank accumulates full gradients of its stages and reduces them once per step
      hint: leave it out, or set `parallel.accumulate: full`
    ");
    assert_eq!(with(&[]), Ok(()), "the default");
    assert_eq!(with(&["parallel.accumulate=full"]), Ok(()));
    assert_eq!(with(&[sharded, "parallel.pipeline.stages=1"]), Ok(()));
    // Under `ddp` it says nothing.
    assert_eq!(with(&[sharded, "parallel.strategy=ddp"]), Ok(()));
}

#[test]
fn a_buddy_needs_state_that_is_on_one_rank_and_stays_there() {
    let with = |overrides: &[&str]| {
        let all = [&["train.recovery=buddy"], overrides].concat();
        Case::new().load(GOOD, &all).map_err(|error| error.to_string())
    };
    for strategy in ["zero1", "zero2", "zero3"] {
        assert!(with(&[&format!("parallel.strategy={strategy}")]).is_ok());
    }
    insta::assert_snapshot!(with(&[]).unwrap_err(), @r"
    `--set train.recovery=buddy`: `train.recovery` has no effect without `parallel.strategy: zero1`, `zero2` or `zero3`, an optimizer other than `muon`, and none of `parallel.shard_group`, `parallel.expert` and `train.offload`
      hint: leave it out
    ");
    for refused in [
        "parallel.shard_group=2",
        "train.optimizer.kind=muon",
        "train.offload.optimizer=host",
    ] {
        let error = with(&["parallel.strategy=zero1", refused]).unwrap_err();
        assert!(error.contains("`train.recovery` has no effect"), "{error}");
    }
}

#[test]
fn a_shard_group_is_a_node_or_a_number() {
    let load = |group: &str| {
        let group = format!("parallel.shard_group={group}");
        let config = Case::new().load(GOOD, &["parallel.strategy=zero2", &group]);
        config
            .map(|config| config.parallel.shard_group)
            .map_err(|error| error.to_string())
    };
    assert_eq!(load("node"), Ok(Some(ShardGroup::Node)));
    assert_eq!(load("4"), Ok(Some(ShardGroup::Ranks(4))));
    assert_eq!(load("null"), Ok(None));
    insta::assert_snapshot!(load("nodes").unwrap_err(), @"`--set parallel.shard_group=nodes`: `parallel.shard_group` is `nodes`, expected `node` or a number of ranks, at least 1");
    insta::assert_snapshot!(load("0").unwrap_err(), @"`--set parallel.shard_group=0`: `parallel.shard_group` is the number `0`, expected `node` or a number of ranks, at least 1");
    insta::assert_snapshot!(set("parallel.shard_group=2"), @r"
    `--set parallel.shard_group=2`: `parallel.shard_group` has no effect without `parallel.strategy: zero1`, `zero2` or `zero3`
      hint: leave it out
    ");
    // What a checkpoint keeps of it reads as it was written.
    for group in [ShardGroup::Node, ShardGroup::Ranks(3)] {
        let text = serde_json::to_string(&group).unwrap();
        assert_eq!(serde_json::from_str::<ShardGroup>(&text).unwrap(), group);
    }
}

#[test]
fn tensor_ranks_share_the_positions_of_a_micro_batch_evenly() {
    let shared = |more: &[&str]| {
        let sets = [
            "parallel.tensor=4",
            "parallel.sequence=true",
            "model.block_size=15",
        ];
        load_good(&[&sets[..], more].concat())
    };
    insta::assert_snapshot!(shared(&["train.micro_batch=2"]).unwrap_err(), @r"
    `--set parallel.sequence=true`: `parallel.sequence: true` shares the positions of a micro-batch, but 2 × 15 of them cannot be divided over 4 tensor ranks; `train.micro_batch: 4` would work
      hint: change `train.micro_batch` or `model.block_size`, or leave out `parallel.sequence`
    ");
    assert!(shared(&["train.micro_batch=4"]).is_ok());
    assert!(shared(&["train.micro_batch=2", "parallel.sequence=false"]).is_ok());
    insta::assert_snapshot!(set("parallel.sequence=true"), @r"
    `--set parallel.sequence=true`: `parallel.sequence` has no effect without `parallel.tensor` above 1
      hint: leave it out
    ");
}

#[test]
fn words_and_units_of_other_programs_lead_to_ours() {
    insta::assert_snapshot!(set("parallel.strategy=fsdp"), @r"
    `--set parallel.strategy=fsdp`: `parallel.strategy` is `fsdp`, expected `ddp` or `zero1` or `zero2` or `zero3`
      hint: `fsdp` is `zero3` here
    ");
    let hint = |assignment: &str| {
        let words = set(assignment);
        words.split_once("hint: ").map(|(_, hint)| hint.to_owned())
    };
    for (assignment, expected) in [
        (
            "parallel.strategy=deepspeed",
            "the stages of DeepSpeed's ZeRO are `zero1`, `zero2` and `zero3` here",
        ),
        ("parallel.strategy=ZeRO-2", "`ZeRO-2` is `zero2` here"),
        ("train.precision=bfloat16", "`bfloat16` is `bf16` here"),
        ("train.optimizer.kind=AdamW", "`AdamW` is `adamw` here"),
        ("parallel.backend=gloo", "`gloo` is `cpu` here"),
    ] {
        assert_eq!(hint(assignment).as_deref(), Some(expected), "{assignment}");
    }
    assert_eq!(hint("parallel.strategy=pipeline"), None);
}

#[test]
fn keys_of_other_programs_lead_to_ours() {
    insta::assert_snapshot!(set("train.batch_size=4"), @r"
    `--set train.batch_size`: unknown key `train.batch_size`
      hint: did you mean `train.micro_batch`?
    ");
    for (theirs, ours) in [
        ("train.epochs", "train.steps"),
        ("train.optimizer.learning_rate", "train.optimizer.lr"),
        ("parallel.zero", "parallel.strategy"),
        ("parallel.tp", "parallel.tensor"),
        ("parallel.pp", "parallel.pipeline.stages"),
        ("parallel.pipeline.micro_batches", "train.grad_accumulation"),
        ("model.hidden_size", "model.n_embd"),
        ("model.d_model", "model.n_embd"),
        ("model.seq_len", "model.block_size"),
        ("model.n_ctx", "model.block_size"),
        ("model.max_seq_len", "model.block_size"),
        ("model.n_layers", "model.n_layer"),
        ("model.num_layers", "model.n_layer"),
        ("train.lr", "train.optimizer.lr"),
        ("train.seed", "run.seed"),
        ("train.device", "parallel.backend"),
        ("train.gradient_checkpointing", "train.recompute"),
    ] {
        let words = set(&format!("{theirs}=1"));
        let expected = format!("unknown key `{theirs}`\n  hint: did you mean `{ours}`?");
        assert!(words.ends_with(&expected), "{words}");
    }
}

#[test]
fn every_key_of_another_program_leads_to_one_of_ours() {
    for (ours, theirs) in KEYS_OF_OTHERS {
        assert!(keys().any(|key| key.path == *ours), "{ours}");
        for theirs in theirs.split(' ') {
            let is_ours = |name: &str| name == theirs;
            // The type of a file's numbers; in other sections `dtype` means that of the arithmetic.
            let mut keys = keys().filter(|key| key.path != "data.dtype");
            assert!(!keys.any(|key| key.path.split('.').any(is_ours)), "{theirs}");
        }
    }
}

#[test]
fn a_key_that_is_not_indented_or_lacks_its_space_is_named() {
    insta::assert_snapshot!(with("  block_size: 16", "block_size: 16"), @r"
    train.yaml:3: `model.block_size` is missing
      hint: add `block_size: …` under `model:`
    ");
    insta::assert_snapshot!(with("block_size: 16\n", "block_size: 16\nvocab_size: 300\n"), @r"
    train.yaml:9: unknown key `vocab_size`
      hint: did you mean `model.vocab_size`?
    ");
    insta::assert_snapshot!(with("  block_size: 16", "  block_size:16"), @r"
    train.yaml:8: not valid YAML: simple key expected ':'
      hint: check indentation, brackets and the space after each colon, here and on the line before
    ");
}

#[test]
fn a_schedule_needs_a_pipeline() {
    insta::assert_snapshot!(set("parallel.pipeline.schedule=zbv"), @r"
    `--set parallel.pipeline.schedule=zbv`: `parallel.pipeline.schedule` is set, but `parallel.pipeline.stages` is not: there is no pipeline
      hint: set `parallel.pipeline.stages`, or leave `schedule` out
    ");
    for stages in ["1", "2"] {
        let stages = format!("parallel.pipeline.stages={stages}");
        assert!(load_good(&["parallel.pipeline.schedule=zbv", &stages]).is_ok());
    }
    assert!(load_good(&["parallel.pipeline.schedule=1f1b"]).is_ok());
}

#[test]
fn a_timeline_is_of_steps_that_there_are() {
    insta::assert_snapshot!(set("run.timeline=5-3"), @"`--set run.timeline=5-3`: `run.timeline` is `5-3`, expected steps as `10-12`, or one step, from 1 on");
    insta::assert_snapshot!(set("run.timeline=0"), @"`--set run.timeline=0`: `run.timeline` is the number `0`, expected steps as `10-12`, or one step, from 1 on");
    insta::assert_snapshot!(set("run.timeline=1.5"), @"`--set run.timeline=1.5`: `run.timeline` is the number `1.5`, expected steps as `10-12`, or one step, from 1 on");
    insta::assert_snapshot!(set("run.timeline=9-11"), @"`--set run.timeline=9-11`: `run.timeline` is 9-11, expected steps up to `train.steps`, which is 10");
    insta::assert_snapshot!(set("run.timeline=[1, 2]"), @"`--set run.timeline=[1, 2]`: `run.timeline` is [1, 2], expected steps as `10-12`, or one step, from 1 on");
}

#[test]
fn a_star_is_any_characters() {
    let matches = |params: &str, name: &str| {
        let group = OptimizerGroup {
            params: params.to_owned(),
            lr_scale: 1.0,
            weight_decay: None,
        };
        group.matches(name)
    };
    for pattern in "* h.* *.weight h.*.weight h.*mlp*weight h.0.mlp.weight h.0.*.* **".split(' ') {
        assert!(matches(pattern, "h.0.mlp.weight"), "{pattern}");
    }
    for pattern in " h h. *.bias h.*.attn.* h.0.mlp.weight.* *mlp*mlp* wte*".split(' ') {
        assert!(!matches(pattern, "h.0.mlp.weight"), "{pattern}");
    }
    assert!(!matches("aba*aba", "aba"), "no character twice");
}

#[test]
fn a_step_range_reads_what_it_writes() {
    let read = |json: &str| serde_json::from_str::<StepRange>(json);
    for text in ["\"10-12\"", "\"7\""] {
        assert_eq!(serde_json::to_string(&read(text).unwrap()).unwrap(), text);
    }
    let number = read("7").unwrap();
    assert_eq!((number.steps(), number.count()), (7..=7, 1));
    for text in ["", "0", "0-3", "5-4", "a", "3-", "-3", "1-2-3", "1..3", "1.5"] {
        assert!(read(&format!("\"{text}\"")).is_err(), "{text}");
    }
}
