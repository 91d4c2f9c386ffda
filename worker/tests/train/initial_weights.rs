//! `model.init_from`: runs that begin with weights that another one has exported.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::train_support::{Job, Trained, assert_same};
use ddp_worker::checkpoint::{Disk, ExportedTokenizer, Reader, TensorKind, Which, export};
use ddp_worker::config::{self, ModelKind, Precision, Resume, Strategy, TrainConfig};
use ddp_worker::train::TrainError;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use tempfile::TempDir;

/// Bits of all parameters, by name.
type Parameters = BTreeMap<String, Vec<u32>>;

/// A model that was trained a little, so that no two of its weights are the same by their making.
struct Exported {
    folder: TempDir,
    trained: Trained,
    /// What was exported.
    parameters: Parameters,
}

impl Exported {
    fn new(change: impl FnOnce(&mut TrainConfig)) -> Self {
        Self::by(1, change)
    }

    fn by(ranks: u32, change: impl FnOnce(&mut TrainConfig)) -> Self {
        let job = Job::with(change);
        let trained = job.train(ranks);
        let folder = tempfile::tempdir().unwrap();
        let reader = Reader::open(&job.out_dir(), Which::Latest).unwrap();
        export(
            &Disk,
            &reader,
            &folder.path().join("model"),
            &ExportedTokenizer::default(),
        )
        .unwrap();
        Self {
            folder,
            trained,
            parameters: parameters(&job),
        }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("model")
    }

    /// By the names of the file.
    fn tensors(&self) -> Parameters {
        let bytes = fs::read(self.path().join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let bits = |(name, tensor): (String, TensorView<'_>)| (name, words(tensor.data()));
        tensors.tensors().into_iter().map(bits).collect()
    }
}

fn words(bytes: &[u8]) -> Vec<u32> {
    let words = bytes.chunks_exact(4);
    words
        .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
        .collect()
}

/// A run of one step that changes nothing.
fn standing_still(path: &Path, change: impl FnOnce(&mut TrainConfig)) -> Job {
    Job::with(|c| {
        c.model.init_from = Some(path.to_owned());
        c.train.steps = 1;
        c.train.optimizer.lr = 0.0;
        change(c);
    })
}

/// What the latest checkpoint holds.
fn parameters(job: &Job) -> Parameters {
    let reader = Reader::open(&job.out_dir(), Which::Latest).unwrap();
    let tensors = reader.manifest().tensors.iter();
    let own = tensors.filter(|tensor| tensor.name.kind == TensorKind::Parameter);
    own.map(|tensor| {
        let bytes = reader.read_whole(&tensor.name).unwrap();
        (tensor.name.key.clone(), words(&bytes))
    })
    .collect()
}

#[test]
fn every_strategy_begins_with_the_bits_of_the_file_on_any_number_of_ranks() {
    let source = Exported::new(|_| ());
    let expected = source.tensors();
    for precision in [Precision::F32, Precision::Bf16] {
        for strategy in [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3] {
            for ranks in [1, 2, 4] {
                let job = standing_still(&source.path(), |c| {
                    c.train.precision = precision;
                    c.parallel.strategy = strategy;
                });
                job.train(ranks);
                assert!(
                    parameters(&job) == expected,
                    "{precision:?}, {strategy:?}, {ranks} ranks"
                );
            }
        }
    }
}

#[test]
fn rows_that_the_file_has_not_are_those_of_a_run_without_it() {
    let source = Exported::new(|_| ());
    let padded = |c: &mut TrainConfig| {
        c.model.vocab_size = Some(304);
        c.model.block_size = 12;
    };
    let random = Job::with(|c| {
        c.train.steps = 1;
        c.train.optimizer.lr = 0.0;
        padded(c);
    });
    random.train(1);
    let (random, known) = (parameters(&random), source.tensors());
    for (strategy, ranks, tensor) in [
        (Strategy::Ddp, 1, 1),
        (Strategy::Zero3, 4, 1),
        (Strategy::Zero1, 4, 2),
    ] {
        let job = standing_still(&source.path(), |c| {
            c.parallel.strategy = strategy;
            c.parallel.tensor = tensor;
            padded(c);
        });
        job.train(ranks);
        let found = parameters(&job);
        let channels = job.config.model.n_embd;
        let (table, positions) = (&found["wte.weight"], &found["wpe.weight"]);
        assert_eq!(table[..256 * channels], known["wte.weight"]);
        assert_eq!(table[256 * channels..], random["wte.weight"][256 * channels..]);
        assert_eq!(positions[..], known["wpe.weight"][..12 * channels]);
        assert_eq!(found["h.0.mlp.c_fc.weight"], known["h.0.mlp.c_fc.weight"]);
    }
}

/// Sizes and parts of a model that are not GPT-2's.
type Change = fn(&mut config::Model);

const OTHERS: [(&str, Change); 8] = [
    ("mlp", |model| model.kind = ModelKind::Mlp),
    ("gpt2 with a head and a width of its own", |model| {
        (model.tied, model.n_inner) = (Some(false), Some(24));
    }),
    ("llama", |model| model.kind = ModelKind::Llama),
    ("llama with grouped queries", |model| {
        (model.kind, model.n_head, model.n_kv_head) = (ModelKind::Llama, 4, Some(2));
        (model.n_inner, model.norm_eps) = (Some(24), 1e-6);
    }),
    ("tied llama with scaled positions", |model| {
        (model.kind, model.tied, model.rope_theta) = (ModelKind::Llama, Some(true), 500_000.0);
        model.rope_scaling = Some(config::RopeScaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_positions: 8,
        });
    }),
    ("mixtral", |model| model.kind = ModelKind::Mixtral),
    ("mixtral with shared experts in every second layer", |model| {
        (model.kind, model.n_layer) = (ModelKind::Mixtral, 2);
        (model.experts.every, model.experts.shared) = (2, 1);
    }),
    ("tied mlp", |model| {
        (model.kind, model.tied) = (ModelKind::Mlp, Some(true));
    }),
];

fn exported_config_of(model: &Path) -> String {
    fs::read_to_string(model.join("config.json")).unwrap()
}

fn exported_config(job: &Job) -> String {
    let folder = tempfile::tempdir().unwrap();
    let reader = Reader::open(&job.out_dir(), Which::Latest).unwrap();
    let path = folder.path().join("model");
    export(&Disk, &reader, &path, &ExportedTokenizer::default()).unwrap();
    exported_config_of(&folder.path().join("model"))
}

#[test]
fn every_model_that_is_exported_comes_back_bit_by_bit() {
    for (what, change) in OTHERS {
        let source = Exported::new(|c| change(&mut c.model));
        for (strategy, ranks) in [(Strategy::Ddp, 1), (Strategy::Zero3, 4)] {
            let job = standing_still(&source.path(), |c| {
                change(&mut c.model);
                c.parallel.strategy = strategy;
            });
            let again = job.train(ranks);
            assert!(parameters(&job) == source.parameters, "{what}, {strategy:?}");
            if ranks == 1 {
                assert_eq!(again.summary.val_loss, source.trained.summary.val_loss, "{what}");
                // Where the weights of a run came from is no part of the model.
                assert_eq!(
                    exported_config(&job),
                    exported_config_of(&source.path()),
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn a_run_that_goes_on_does_not_look_for_the_weights() {
    for strategy in [Strategy::Ddp, Strategy::Zero2] {
        let source = Exported::new(|_| ());
        let run = |steps| {
            Job::with(|c| {
                c.model.init_from = Some(source.path());
                c.run.resume = Resume::Auto;
                c.train.schedule.kind = ddp_worker::config::LearningRate::Constant;
                c.train.steps = steps;
                c.parallel.strategy = strategy;
            })
        };
        let undisturbed = run(6).train(2);
        let mut resumed = run(3);
        resumed.train(2);
        fs::remove_dir_all(source.path()).unwrap();
        resumed.config.train.steps = 6;
        assert_same(&resumed.train(2), &undisturbed, &format!("{strategy:?}"));
        // Without the key, with another number of ranks: the checkpoint has what became of the weights.
        resumed.config.model.init_from = None;
        resumed.config.train.steps = 7;
        resumed.train(1);
        // A restart of the job, too, in a folder that was to be overwritten.
        resumed.config.model.init_from = Some(source.path());
        (resumed.config.run.resume, resumed.config.run.overwrite) = (Resume::Never, true);
        (resumed.config.train.steps, resumed.restarts) = (8, 1);
        resumed.train(1);
    }
}

#[test]
fn weights_that_are_refused_leave_the_run_that_was_to_be_overwritten() {
    let mut job = Job::with(|c| c.train.steps = 1);
    job.train(1);
    let before = parameters(&job);
    job.config.run.overwrite = true;
    job.config.model.init_from = Some(job.out_dir_beside("absent"));
    let error = job.run(1).remove(0).expect_err("it should fail");
    assert!(matches!(error, TrainError::Pretrained(_)), "{error}");
    assert_eq!(parameters(&job), before);
}

#[test]
fn ranks_with_different_weights_do_not_begin() {
    let [one, other] = [1, 2].map(|seed| Exported::new(|c| c.run.seed = seed));
    let job = standing_still(&one.path(), |c| c.parallel.strategy = Strategy::Zero3);
    let outcomes = job.run_with(2, |rank, config| {
        if rank == 1 {
            config.model.init_from = Some(other.path());
        }
    });
    for outcome in outcomes {
        let error = outcome.expect_err("it should fail").to_string();
        assert!(
            error.contains("rank 1 does not agree with rank 0: content of `model.init_from` is"),
            "{error}"
        );
    }
}
