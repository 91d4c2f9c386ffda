//! `train.optimizer` and `train.schedule`.

use serde::{Deserialize, Serialize};

/// `train.optimizer`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// Which one.
    pub kind: OptimizerKind,
    /// Peak learning rate.
    pub lr: f32,
    /// Decays of the moments; none: [`OptimizerConfig::betas`].
    pub betas: Option<[f32; 2]>,
    /// Added to the denominator.
    pub eps: f32,
    /// λ; norms and biases have none, unless a group says otherwise.
    pub weight_decay: f32,
    /// Decay of the momentum; none: [`OptimizerConfig::momentum`].
    pub momentum: Option<f32>,
    /// Nesterov's momentum; none: [`OptimizerConfig::nesterov`].
    pub nesterov: Option<bool>,
    /// Parameters with numbers of their own. The first group whose pattern matches counts.
    pub groups: Vec<OptimizerGroup>,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            kind: OptimizerKind::Adamw,
            lr: 3e-4,
            betas: None,
            eps: 1e-8,
            weight_decay: 0.1,
            momentum: None,
            nesterov: None,
            groups: Vec::new(),
        }
    }
}

impl OptimizerConfig {
    /// Decays of the moments.
    #[must_use]
    pub fn betas(&self) -> [f32; 2] {
        self.betas.unwrap_or(match self.kind {
            OptimizerKind::Lion => [0.9, 0.99],
            OptimizerKind::Adamw | OptimizerKind::Sgd | OptimizerKind::Muon => [0.9, 0.95],
        })
    }

    /// Decay of the momentum.
    #[must_use]
    pub fn momentum(&self) -> f32 {
        self.momentum.unwrap_or(match self.kind {
            OptimizerKind::Muon => 0.95,
            OptimizerKind::Adamw | OptimizerKind::Lion | OptimizerKind::Sgd => 0.9,
        })
    }

    /// Nesterov's momentum.
    #[must_use]
    pub fn nesterov(&self) -> bool {
        self.nesterov.unwrap_or(self.kind == OptimizerKind::Muon)
    }

    /// Keys of `train.optimizer` that its kind reads, beside those that every kind reads.
    pub(super) const fn own_keys(&self) -> &'static [&'static str] {
        match self.kind {
            OptimizerKind::Adamw => &["betas", "eps"],
            OptimizerKind::Lion => &["betas"],
            OptimizerKind::Sgd => &["momentum", "nesterov"],
            OptimizerKind::Muon => &["betas", "eps", "momentum", "nesterov"],
        }
    }
}

/// `train.optimizer.kind`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Loshchilov & Hutter 2019.
    #[default]
    Adamw,
    /// Chen et al. 2023.
    Lion,
    /// As `torch.optim.SGD`: with momentum, and weight decay as a part of the gradient.
    Sgd,
    /// Jordan et al. 2024, of the matrices of the blocks; AdamW of all other parameters.
    Muon,
}

impl OptimizerKind {
    /// The words of the key.
    pub(super) const WORDS: &'static [&'static str] = &["adamw", "lion", "sgd", "muon"];
}

/// One of `train.optimizer.groups`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerGroup {
    /// Pattern of parameter names; `*` stands for any characters.
    pub params: String,
    /// Factor of the learning rate.
    #[serde(default = "one")]
    pub lr_scale: f32,
    /// λ of all of them; none: as without the group.
    #[serde(default)]
    pub weight_decay: Option<f32>,
}

const fn one() -> f32 {
    1.0
}

impl OptimizerGroup {
    /// Most groups.
    pub const MOST: usize = 15;

    /// True if the pattern matches the name of a parameter.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        let Some((start, rest)) = self.params.split_once('*') else {
            return self.params == name;
        };
        let (middle, end) = rest.rsplit_once('*').unwrap_or(("", rest));
        let Some(mut inner) = name.strip_prefix(start).and_then(|name| name.strip_suffix(end)) else {
            return false;
        };
        // The first place of each part leaves most to the parts behind it.
        middle.split('*').all(|part| {
            let found = inner.split_once(part);
            inner = found.map_or("", |(_, after)| after);
            found.is_some()
        })
    }
}

/// `train.schedule`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Schedule {
    /// Shape after the warm-up.
    pub kind: LearningRate,
    /// Steps from 0 to the peak, linearly.
    pub warmup_steps: u64,
    /// Of `wsd`: steps of the decay, the last ones of the run.
    pub decay_steps: Option<u64>,
    /// Learning rate at the last step; of `inverse_sqrt` the least one.
    pub min_lr: f32,
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            kind: LearningRate::Cosine,
            warmup_steps: 0,
            decay_steps: None,
            min_lr: 0.0,
        }
    }
}

/// `train.schedule.kind`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LearningRate {
    /// Half a cosine from the peak to `min_lr`.
    #[default]
    Cosine,
    /// A line from the peak to `min_lr`.
    Linear,
    /// The peak for ever.
    Constant,
    /// Warm-up, stable, decay: the peak, then a line to `min_lr`.
    Wsd,
    /// With the root of the number of steps, from the peak.
    InverseSqrt,
}

#[cfg(test)]
mod tests {
    use super::*;

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
        for pattern in [
            "*",
            "h.*",
            "*.weight",
            "h.*.weight",
            "h.*mlp*weight",
            "h.0.mlp.weight",
            "h.0.*.*",
            "**",
        ] {
            assert!(matches(pattern, "h.0.mlp.weight"), "{pattern}");
        }
        for pattern in [
            "",
            "h",
            "h.",
            "*.bias",
            "h.*.attn.*",
            "h.0.mlp.weight.*",
            "*mlp*mlp*",
            "wte*",
        ] {
            assert!(!matches(pattern, "h.0.mlp.weight"), "{pattern}");
        }
        assert!(!matches("aba*aba", "aba"), "no character twice");
    }
}
