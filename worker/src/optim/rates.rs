//! Learning rate and weight decay: by step, as a pure function, and by parameter group.

use std::f64::consts::PI;

use crate::config::{LearningRate, LrScaling, OptimizerConfig, Schedule, Train};
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
    /// Index of the rates of each parameter.
    of: Vec<usize>,
}

impl ParamGroups {
    /// Those of the first configured group whose pattern matches the parameter's name; where none does, norms and biases
    /// do not decay.
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
    pub fn unmatched(config: &OptimizerConfig, params: &[ParamSpec]) -> Option<usize> {
        let mut groups = config.groups.iter();
        groups.position(|group| !params.iter().any(|spec| group.matches(&spec.key)))
    }

    /// The rates of all groups.
    pub fn rates(&self) -> &[GroupRates] {
        &self.rates
    }

    /// Index of a parameter's rates.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn index(&self, param: usize) -> usize {
        self.of[param]
    }
}

/// Learning rate of `step` (from 0) in a run of `steps`.
///
/// The warm-up steps climb linearly from 0, exclusive, and the first step after them has the peak. Of a schedule that
/// decays to `min_lr`, the last step of the run has it. The same bits on every machine: ranks must agree, whatever their
/// C library.
pub fn learning_rate(step: u64, steps: u64, optimizer: &OptimizerConfig, schedule: &Schedule) -> f32 {
    let peak = f64::from(optimizer.lr);
    let warmup = schedule.warmup_steps;
    if step < warmup {
        return (peak * (step + 1) as f64 / (warmup + 1) as f64) as f32;
    }
    let low = f64::from(schedule.min_lr);
    // From 0 at `first` to 1 at the last step of the run.
    let progress = |first: u64| {
        let decay_steps = steps.saturating_sub(first + 1).max(1);
        (step.saturating_sub(first) as f64 / decay_steps as f64).min(1.0)
    };
    let line = |first| low + (peak - low) * (1.0 - progress(first));
    let rate = match schedule.kind {
        LearningRate::Constant => peak,
        // The series may end a rounding error below −1.
        LearningRate::Cosine => low + (peak - low) * 0.5 * (1.0 + cos_pi(progress(warmup))).max(0.0),
        LearningRate::Linear => line(warmup),
        LearningRate::Wsd => {
            // The last step before the decay has the peak too.
            let decay_steps = schedule.decay_steps.unwrap_or(1);
            line(steps.saturating_sub(decay_steps + 1).max(warmup))
        }
        LearningRate::InverseSqrt => (peak * ((warmup + 1) as f64 / (step + 1) as f64).sqrt()).max(low),
    };
    rate as f32
}

/// Factor of the learning rate for a global batch of so many samples: the linear scaling rule (Goyal et al. 2017), to
/// be used with a warm-up. It holds for the whole schedule, `min_lr` included.
pub fn batch_factor(train: &Train, global_batch: u64) -> f64 {
    match (train.lr_scaling, train.base_batch) {
        (LrScaling::Linear, Some(base)) => global_batch as f64 / base as f64,
        _ => 1.0,
    }
}

/// cos(πx) for 0 ≤ x ≤ 1, by the Taylor series of sin(π(½ − x)) in plain multiplications and additions.
fn cos_pi(x: f64) -> f64 {
    const TERMS: u32 = 12;
    let y = PI * (0.5 - x);
    let square = y * y;
    let mut term = y;
    let mut sum = y;
    for k in 1..TERMS {
        term *= -square / f64::from(2 * k * (2 * k + 1));
        sum += term;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::OptimizerGroup;
    use crate::device::DType;
    use crate::model::{AxisRole, GroupId, Init};

    fn spec(name: &str, decay: bool) -> ParamSpec {
        ParamSpec {
            key: name.to_owned(),
            global_shape: vec![4, 4],
            cut: None,
            roles: AxisRole::replicated(),
            dtype: DType::F32,
            init: Init::Constant(0.0),
            decay,
            group: GroupId(0),
            projections: Vec::new(),
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

    fn rate(step: u64, kind: LearningRate) -> f32 {
        let optimizer = OptimizerConfig {
            lr: 1e-3,
            ..OptimizerConfig::default()
        };
        let schedule = Schedule {
            kind,
            warmup_steps: 4,
            decay_steps: (kind == LearningRate::Wsd).then_some(20),
            min_lr: 1e-4,
        };
        learning_rate(step, 105, &optimizer, &schedule)
    }

    fn assert_close(step: u64, found: f32, expected: f32) {
        let error = (found - expected).abs();
        assert!(
            error <= expected * 2e-7,
            "step {step}: {found} instead of {expected}"
        );
    }

    #[test]
    fn golden_values() {
        // 4 steps of warm-up, then 100 steps from 1e-3 down to 1e-4: a quarter, the middle and the end of the
        // cosine are at 1e-4 + 9e-4 · {(1 + √½)/2, 1/2, 0}.
        let cases = [
            (0, 2e-4),
            (1, 4e-4),
            (3, 8e-4),
            (4, 1e-3),
            (29, 8.681_980_5e-4),
            (54, 5.5e-4),
            (104, 1e-4),
            (1000, 1e-4),
        ];
        for (step, expected) in cases {
            assert_close(step, rate(step, LearningRate::Cosine), expected);
        }
    }

    #[test]
    fn a_line_goes_down_evenly() {
        for (step, expected) in [
            (3, 8e-4),
            (4, 1e-3),
            (29, 7.75e-4),
            (54, 5.5e-4),
            (104, 1e-4),
            (1000, 1e-4),
        ] {
            assert_close(step, rate(step, LearningRate::Linear), expected);
        }
    }

    #[test]
    fn a_stable_rate_decays_in_the_last_steps() {
        // 20 of 105 steps decay: step 84 is the last at the peak.
        for (step, expected) in [
            (0, 2e-4),
            (4, 1e-3),
            (84, 1e-3),
            (85, 9.55e-4),
            (94, 5.5e-4),
            (104, 1e-4),
        ] {
            assert_close(step, rate(step, LearningRate::Wsd), expected);
        }
    }

    #[test]
    fn an_inverse_root_has_a_half_of_the_peak_after_four_times_the_warm_up() {
        // The peak is at the fifth step: 1e-3 · √(5 / number), from 1, at least 1e-4.
        let cases = [
            (3, 8e-4),
            (4, 1e-3),
            (19, 5e-4),
            (44, 3.333_333_3e-4),
            (104, 2.182_179e-4),
            (9999, 1e-4),
        ];
        for (step, expected) in cases {
            assert_close(step, rate(step, LearningRate::InverseSqrt), expected);
        }
    }

    #[test]
    fn the_rate_grows_with_the_batch() {
        let mut train = Train {
            base_batch: Some(256),
            ..Train::default()
        };
        assert_eq!(batch_factor(&train, 8192), 1.0);
        train.lr_scaling = LrScaling::Linear;
        // The paper: 0.1 for 256 images, 3.2 for 8192.
        assert_eq!(batch_factor(&train, 8192) * 0.1, 3.2);
        assert_eq!(batch_factor(&train, 64), 0.25);
    }

    #[test]
    fn a_constant_rate_still_warms_up() {
        assert_close(0, rate(0, LearningRate::Constant), 2e-4);
        assert_close(4, rate(4, LearningRate::Constant), 1e-3);
        assert_close(104, rate(104, LearningRate::Constant), 1e-3);
    }

    #[test]
    fn the_cosine_is_one() {
        for i in 0..=1000 {
            let x = f64::from(i) / 1000.0;
            assert!((cos_pi(x) - (PI * x).cos()).abs() < 1e-15, "cos(π · {x})");
        }
    }

    #[test]
    fn a_run_that_is_all_warm_up_or_one_step_has_a_rate() {
        let schedule = Schedule {
            warmup_steps: 10,
            ..Schedule::default()
        };
        for steps in 0..12 {
            for step in 0..12 {
                let rate = learning_rate(step, steps, &OptimizerConfig::default(), &schedule);
                assert!(rate.is_finite() && rate >= 0.0);
            }
        }
    }
}
