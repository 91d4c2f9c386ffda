//! One gradient, as the layout must know it.

use crate::model::Model;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradSpec {
    /// For errors; unique.
    pub name: String,
    /// Shape of the parameter.
    pub shape: Vec<usize>,
    /// How many times it is reported in one micro-batch: once for each place where the parameter is used.
    pub contributions: usize,
    /// Group that the parameter is gathered with, where it is not held by every rank.
    pub group: usize,
}

impl GradSpec {
    /// A parameter that is used in one place, of group 0.
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        Self {
            name: name.into(),
            shape: shape.to_vec(),
            contributions: 1,
            group: 0,
        }
    }

    /// The gradients of a model, by parameter.
    #[must_use]
    pub fn of_model(model: &Model) -> Vec<Self> {
        let with_uses = model.params.iter().zip(model.uses());
        with_uses
            .map(|(param, contributions)| Self {
                name: param.key.clone(),
                shape: param.local_shape(),
                contributions,
                group: param.group.0,
            })
            .collect()
    }

    /// Its elements.
    pub(super) fn len(&self) -> usize {
        self.shape.iter().product()
    }
}
