//! Which tensors of a file are which parameter, how much of it, and all that does not fit as one error.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::ops::Range;
use std::path::Path;

use safetensors::tensor::Dtype;

use super::files::{PretrainedError, StoredTensor};
use crate::config::Model;
use crate::model::{Decoder, HEAD, ParamSpec, Published, PublishedTensor};

/// What PyTorch puts into the names of a model that is wrapped: by `torch.compile`, DDP, FSDP or checkpointing.
const WRAPPERS: [&str; 4] = [
    "_orig_mod",
    "module",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
];

/// Tensors of a file by their published names.
pub(super) type Named<'a> = BTreeMap<String, &'a StoredTensor>;

/// Where the first elements of a parameter come from. The rest of it, if there is one, keeps its random first values.
#[derive(Clone, Debug)]
pub(super) struct ParamSource {
    /// One after the other.
    pub(super) pieces: Vec<Piece>,
}

/// Elements of a parameter that are the first ones of a tensor.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// Its name is that of the file, prefix included.
    pub(super) tensor: StoredTensor,
    /// Which elements of the parameter.
    pub(super) elements: Range<usize>,
}

impl ParamSource {
    /// How many elements.
    pub(super) fn elements(&self) -> usize {
        self.pieces.last().map_or(0, |piece| piece.elements.end)
    }
}

/// What a file has to hold for a model.
pub(super) struct Expected {
    published: &'static Published,
    pub(super) decoder: Decoder,
    /// The tensors of each parameter.
    tensors: Vec<Vec<PublishedTensor>>,
}

impl Expected {
    pub(super) fn new(model: &Model, params: &[ParamSpec]) -> Self {
        let (published, decoder) = (Published::of(model.kind), Decoder::of(model));
        let tensors = params
            .iter()
            .map(|spec| published.tensors(&decoder, &spec.key, &spec.global_shape));
        Self {
            published,
            tensors: tensors.collect(),
            decoder,
        }
    }

    /// The tensors by their published names, without those that are no parameters.
    pub(super) fn by_name<'t>(&self, tensors: &'t [StoredTensor], misfit: &mut Misfit) -> Named<'t> {
        let expected: BTreeSet<&str> = self.tensors.iter().flatten().map(|t| t.name.as_str()).collect();
        let mut named = Named::new();
        for tensor in tensors {
            let name = self.published_name(&tensor.name, &expected);
            if self.is_buffer(&name) {
                continue;
            }
            if let Some(other) = named.get(&name) {
                misfit.differs(format!(
                    "`{name}` occurs in the file twice, as `{}` and as `{}`",
                    other.name, tensor.name
                ));
            }
            named.insert(name, tensor);
        }
        named
    }

    /// The name with the prefix or without it: as it is published.
    fn published_name(&self, name: &str, expected: &BTreeSet<&str>) -> String {
        let prefix = self.published.prefix;
        let unwrapped = name.split('.').filter(|part| !WRAPPERS.contains(part));
        let name = unwrapped.collect::<Vec<_>>().join(".");
        let name = name.as_str();
        let bare = name.strip_prefix(prefix).unwrap_or(name);
        let is_known = |name: &&str| expected.contains(name) || self.decoder.names.layer_of(name).is_some();
        let with_prefix = format!("{prefix}{bare}");
        let known = [name, bare, &with_prefix].into_iter().find(is_known);
        known.unwrap_or(bare).to_owned()
    }

    /// What older tools saved of a layer.
    fn is_buffer(&self, name: &str) -> bool {
        let part = self.decoder.names.layer_of(name);
        part.is_some_and(|(_, part)| self.published.buffers.contains(&part))
    }

    /// The source of each parameter, in their order; what they lack is told to `misfit`.
    pub(super) fn sources(&self, named: &Named<'_>, misfit: &mut Misfit) -> Vec<ParamSource> {
        let mut sources = Vec::with_capacity(self.tensors.len());
        let mut left: BTreeSet<&str> = named.keys().map(String::as_str).collect();
        for tensors in &self.tensors {
            let mut pieces = Vec::with_capacity(tensors.len());
            for expected in tensors {
                left.remove(expected.name.as_str());
                match named.get(&expected.name) {
                    None => misfit.differs(format!("`{}` is missing in the file", expected.name)),
                    Some(tensor) => pieces.extend(self.piece(expected, tensor, misfit)),
                }
            }
            sources.push(ParamSource { pieces });
        }
        for name in left {
            misfit.differs(format!("`{name}` is in the file but not in this model"));
        }
        sources
    }

    fn piece(&self, expected: &PublishedTensor, tensor: &StoredTensor, misfit: &mut Misfit) -> Option<Piece> {
        let name = expected.name.as_str();
        let fits = match (expected.shape.as_slice(), tensor.shape.as_slice()) {
            ([here, others @ ..], [there, others_there @ ..]) => {
                others == others_there && self.rows_fit(name, *here, *there)
            }
            _ => false,
        };
        if !fits {
            misfit.differs(format!(
                "`{name}` is {:?} in the file and {:?} in this model",
                tensor.shape, expected.shape
            ));
            if self.is_table(name) && tensor.shape.first() > expected.shape.first() {
                misfit.write("vocab_size", tensor.shape[0]);
            }
            return None;
        }
        if !matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            let found = tensor.dtype;
            misfit.differs_for_good(
                format!("`{name}` is of type {found:?} in the file"),
                "F32, F16 and BF16 are read: save the weights in one of these",
            );
            return None;
        }
        let Range { start, end } = expected.elements;
        let elements = tensor.shape.iter().product::<usize>().min(end - start);
        Some(Piece {
            tensor: tensor.clone(),
            elements: start..start + elements,
        })
    }

    /// True for a tensor with a row a token.
    fn is_table(&self, name: &str) -> bool {
        name == self.decoder.names.tokens || name == HEAD
    }

    /// True if the first axis of a tensor may be `here` where the file's is `there`: the table of a vocabulary may be
    /// padded here, and later positions are not needed.
    fn rows_fit(&self, name: &str, here: usize, there: usize) -> bool {
        if self.is_table(name) {
            here >= there
        } else if name == self.decoder.names.positions {
            here <= there
        } else {
            here == there
        }
    }

    /// What is not taken from the file, or not all of it, in words.
    pub(super) fn remainder(&self, named: &Named<'_>) -> Option<String> {
        let words = self.tensors.iter().flatten().filter_map(|tensor| {
            let name = tensor.name.as_str();
            let (here, there) = (*tensor.shape.first()?, *named.get(name)?.shape.first()?);
            if self.is_table(name) && here > there {
                let random = here - there;
                Some(format!("the last {random} of {here} rows of `{name}` are random"))
            } else if name == self.decoder.names.positions && here < there {
                Some(format!("the first {here} of its {there} positions"))
            } else {
                None
            }
        });
        let wrappers = WRAPPERS.iter().filter(|wrapper| {
            let mut tensors = named.values();
            tensors.any(|tensor| tensor.name.split('.').any(|part| part == **wrapper))
        });
        let wrappers = wrappers.map(|wrapper| format!("its names without `{wrapper}.`"));
        let words: Vec<String> = words.chain(wrappers).collect();
        (!words.is_empty()).then(|| words.join("; "))
    }
}

/// Differences that are named one by one: a wrong number of channels makes every tensor one.
const MOST_NAMED: usize = 3;

/// What to do about an architecture that is not supported.
pub(super) const FOREIGN: &str = "the weights are of an architecture that this build does not support";

/// Differences between the weights and the model, and what to change.
#[derive(Default)]
pub(super) struct Misfit {
    differences: Vec<String>,
    /// Lines of YAML.
    changes: Vec<String>,
    /// What to do about a difference that no line of the configuration can mend.
    instead: Option<&'static str>,
}

impl Misfit {
    /// One more difference.
    pub(super) fn differs(&mut self, what: String) {
        self.differences.push(what);
    }

    /// A difference that makes it another architecture.
    pub(super) fn is_foreign(&mut self, what: String) {
        self.differs_for_good(what, FOREIGN);
    }

    /// One that no line of the configuration can mend, and what can.
    pub(super) fn differs_for_good(&mut self, what: String, instead: &'static str) {
        self.instead.get_or_insert(instead);
        self.differs(what);
    }

    /// What would fit.
    pub(super) fn write(&mut self, key: &str, value: impl Display) {
        let line = match key.split_once('.') {
            Some((section, key)) => format!("`{section}: {{ {key}: {value} }}`"),
            None => format!("`{key}: {value}`"),
        };
        if !self.changes.contains(&line) {
            self.changes.push(line);
        }
    }

    /// The error, if there is a difference.
    pub(super) fn into_result(self, path: &Path) -> Result<(), PretrainedError> {
        if self.differences.is_empty() {
            Ok(())
        } else {
            Err(self.into_error(path))
        }
    }

    /// All differences, and what to do about them.
    pub(super) fn into_error(self, path: &Path) -> PretrainedError {
        let more = self.differences.len().saturating_sub(MOST_NAMED);
        let mut words: Vec<String> = self.differences.into_iter().take(MOST_NAMED).collect();
        if more > 0 {
            words.push(format!("and {more} more"));
        }
        let hint = match self.instead {
            Some(instead) => instead.to_owned(),
            None if self.changes.is_empty() => {
                "check that the weights are complete, and that the sizes in section `model` are those of the weights".to_owned()
            }
            None => format!("write {} in section `model`", self.changes.join(", ")),
        };
        let what = format!(" does not fit the `model` section: {}", words.join("; "));
        PretrainedError::unusable(path, what, hint)
    }
}
