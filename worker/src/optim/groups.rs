//! Parameter groups: which parameters have which factor of the learning rate and which weight decay.

use crate::config::OptimizerConfig;
use crate::model::ParamSpec;

/// Numbers of the parameters of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupRates {
    /// Factor of the learning rate.
    pub lr_scale: f32,
    /// λ
    pub weight_decay: f32,
}

/// The groups of all parameters of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamGroups {
    /// No two are the same.
    rates: Vec<GroupRates>,
    /// By parameter: index of its rates.
    of: Vec<usize>,
}

impl ParamGroups {
    /// Those of the first configured group whose pattern matches the parameter's name; where none does, norms and biases
    /// do not decay.
    #[must_use]
    pub fn of(config: &OptimizerConfig, params: &[ParamSpec]) -> Self {
        let mut groups = Self {
            rates: Vec::new(),
            of: Vec::with_capacity(params.len()),
        };
        for spec in params {
            let group = config.groups.iter().find(|group| group.matches(&spec.key));
            let usual = if spec.decay { config.weight_decay } else { 0.0 };
            let rates = GroupRates {
                lr_scale: group.map_or(1.0, |group| group.lr_scale),
                weight_decay: group.and_then(|group| group.weight_decay).unwrap_or(usual),
            };
            let known = groups.rates.iter().position(|known| *known == rates);
            groups.of.push(known.unwrap_or(groups.rates.len()));
            if known.is_none() {
                groups.rates.push(rates);
            }
        }
        groups
    }

    /// Index of the first configured group that no parameter matches.
    #[must_use]
    pub fn unmatched(config: &OptimizerConfig, params: &[ParamSpec]) -> Option<usize> {
        let mut groups = config.groups.iter();
        groups.position(|group| !params.iter().any(|spec| group.matches(&spec.key)))
    }

    /// Of all groups.
    #[must_use]
    pub fn rates(&self) -> &[GroupRates] {
        &self.rates
    }

    /// Index of a parameter's rates.
    ///
    /// # Panics
    /// If there is no such parameter.
    #[must_use]
    pub fn index(&self, param: usize) -> usize {
        self.of[param]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::OptimizerGroup;
    use crate::device::DType;
    use crate::model::{GroupId, Init};

    fn spec(name: &str, decay: bool) -> ParamSpec {
        ParamSpec {
            key: name.to_owned(),
            global_shape: vec![4, 4],
            cut: None,
            dtype: DType::F32,
            init: Init::Constant(0.0),
            decay,
            group: GroupId(0),
        }
    }

    #[test]
    fn the_first_group_that_matches_counts() {
        let params = [
            spec("wte", true),
            spec("h.0.w", true),
            spec("h.0.b", false),
            spec("h.1.b", false),
        ];
        let group = |params: &str, lr_scale, weight_decay| OptimizerGroup {
            params: params.to_owned(),
            lr_scale,
            weight_decay,
        };
        let mut config = OptimizerConfig {
            groups: vec![
                group("h.1.*", 0.5, None),
                group("h.*", 1.0, Some(0.3)),
                group("x*", 1.0, None),
            ],
            ..OptimizerConfig::default()
        };
        let groups = ParamGroups::of(&config, &params);
        let of = |param| {
            let GroupRates {
                lr_scale,
                weight_decay,
            } = groups.rates()[groups.index(param)];
            [lr_scale, weight_decay]
        };
        assert_eq!(
            [0, 1, 2, 3].map(of),
            [[1.0, 0.1], [1.0, 0.3], [1.0, 0.3], [0.5, 0.0]]
        );
        assert_eq!(groups.rates().len(), 3);
        assert_eq!(ParamGroups::unmatched(&config, &params), Some(2));
        config.groups.pop();
        assert_eq!(ParamGroups::unmatched(&config, &params), None);
    }
}
