//! Which tensors of a file are which parameter, how much of it, and all that does not fit as one error.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::ops::Range;
use std::path::Path;

use safetensors::tensor::Dtype;

use super::files::{PretrainedError, StoredTensor};
use crate::config::Model;
use crate::model::{Decoder, HEAD, ParamSpec, Published, PublishedTensor};
use crate::ops::WeightLayout;

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
    /// Of the parameter.
    pub(super) elements: Range<usize>,
}

impl ParamSource {
    /// How many elements.
    pub(super) fn elements(&self) -> usize {
        self.pieces.last().map_or(0, |piece| piece.elements.end)
    }
}

/// What a file has to hold for a model.
pub(super) struct Expected<'a> {
    model: &'a Model,
    params: &'a [ParamSpec],
    published: &'static Published,
    decoder: Decoder,
    /// By parameter.
    tensors: Vec<Vec<PublishedTensor>>,
}

impl<'a> Expected<'a> {
    pub(super) fn new(model: &'a Model, params: &'a [ParamSpec]) -> Self {
        let (published, decoder) = (Published::of(model.kind), Decoder::of(model));
        let tensors = params
            .iter()
            .map(|spec| published.tensors(&decoder, &spec.key, &spec.global_shape));
        Self {
            model,
            params,
            published,
            tensors: tensors.collect(),
            decoder,
        }
    }

    /// Token embedding.
    pub(super) fn tokens(&self) -> &'static str {
        self.decoder.names.tokens
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
            if named.contains_key(&name) {
                let prefix = self.published.prefix;
                misfit.differs(format!(
                    "`{name}` occurs in the file with and without the prefix `{prefix}`"
                ));
            }
            named.insert(name, tensor);
        }
        named
    }

    /// The name with the prefix or without it: as it is published.
    fn published_name(&self, name: &str, expected: &BTreeSet<&str>) -> String {
        let prefix = self.published.prefix;
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

    /// Says how large the model in the file is, where that is not how large it is here.
    pub(super) fn compare_sizes(&self, named: &Named<'_>, misfit: &mut Misfit) {
        let (model, names) = (self.model, self.decoder.names);
        let layers = named
            .keys()
            .filter_map(|name| Some(names.layer_of(name)?.0.saturating_add(1)));
        if let Some(layers) = layers.max().filter(|layers| *layers != model.n_layer) {
            misfit.write("n_layer", layers);
        }
        let axis =
            |name: &str, axis: usize| named.get(name).and_then(|tensor| tensor.shape.get(axis).copied());
        let mut there = model.clone();
        if let Some(channels) = axis(names.tokens, 1).filter(|there| *there != model.n_embd) {
            misfit.write("n_embd", channels);
            // What follows from it is no difference of its own.
            there.n_embd = channels.min(MAX_CHANNELS);
        }
        if let Some(positions) = axis(names.positions, 0).filter(|there| *there < model.block_size) {
            misfit.write("block_size", positions);
        }
        if let Some(inner) = self
            .outputs(named, names.widen, 0)
            .filter(|inner| *inner != there.inner())
        {
            misfit.write("n_inner", inner);
        }
        let head_size = there.n_embd / there.n_head;
        if let Some(keys) = self.outputs(named, names.qkv, 1)
            && head_size > 0
            && keys.is_multiple_of(head_size)
            && keys / head_size != there.kv_heads()
        {
            misfit.write("n_kv_head", keys / head_size);
        }
    }

    /// Outputs, in the file, of tensor `index` of those that make up a matrix of the first layer.
    fn outputs(&self, named: &Named<'_>, matrix: &str, index: usize) -> Option<usize> {
        let key = format!("{}.0.{matrix}.weight", self.decoder.names.layer);
        let param = self.params.iter().position(|spec| spec.key == key)?;
        let tensor = named.get(&self.tensors[param].get(index)?.name)?;
        let axis = match self.decoder.layout {
            WeightLayout::InOut => 1,
            WeightLayout::OutIn => 0,
        };
        tensor.shape.get(axis).copied()
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
        name == self.tokens() || name == HEAD
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
        let words: Vec<String> = words.collect();
        (!words.is_empty()).then(|| words.join("; "))
    }
}

/// More than this makes no model; the bound keeps products of sizes far from overflow.
const MAX_CHANNELS: usize = 1 << 24;
/// Differences that are named one by one: a wrong number of channels makes every tensor one.
const MOST_NAMED: usize = 3;

/// What was found so far.
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

    /// One that makes it another architecture.
    pub(super) fn is_foreign(&mut self, what: String) {
        self.differs_for_good(
            what,
            "the weights are of an architecture that this build does not support",
        );
    }

    /// One that no line of the configuration can mend, and what can.
    fn differs_for_good(&mut self, what: String, instead: &'static str) {
        self.instead.get_or_insert(instead);
        self.differs(what);
    }

    /// What would fit.
    pub(super) fn write(&mut self, key: &str, value: impl Display) {
        let line = format!("`{key}: {value}`");
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
                "the sizes match: check that the weights are complete and of this kind of model".to_owned()
            }
            None => format!("write {} in section `model`", self.changes.join(", ")),
        };
        let what = format!(" does not fit the `model` section: {}", words.join("; "));
        PretrainedError::unusable(path, what, hint)
    }
}
