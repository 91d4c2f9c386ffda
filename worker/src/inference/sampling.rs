//! From the logits of the next token to one token.

use crate::ops::philox;

/// How a token is chosen. Choices are repeatable: a function of the logits, the seed and the number of the token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; 0 takes the most probable token.
    pub temperature: f32,
    /// Only so many of the most probable tokens are considered; none: all.
    pub top_k: Option<usize>,
    /// Only the most probable tokens are considered whose probabilities add up to this (Holtzman et al. 2020); none: all.
    pub top_p: Option<f32>,
    /// Of the random numbers.
    pub seed: u64,
}

/// Keeps these random numbers apart from all others that share the seed.
const DOMAIN: u32 = 0x4745_4E45;

impl Sampling {
    /// Token `number` of the text, counted from the first generated one. Logits that are not finite are no tokens; none if
    /// no logit is finite.
    #[must_use]
    pub fn choose(&self, logits: &[f32], number: u64) -> Option<u32> {
        let mut candidates: Vec<(u32, f32)> = (0..)
            .zip(logits.iter().copied())
            .filter(|(_, logit)| logit.is_finite())
            .collect();
        // Of equal ones the first, on every machine.
        candidates.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
        let best = candidates.first()?;
        if self.temperature == 0.0 {
            return Some(best.0);
        }
        let (top, scale) = (f64::from(best.1), 1.0 / f64::from(self.temperature));
        candidates.truncate(self.top_k.unwrap_or(usize::MAX).max(1));
        let mut weights: Vec<f64> = candidates
            .iter()
            .map(|(_, logit)| ((f64::from(*logit) - top) * scale).exp())
            .collect();
        if let Some(top_p) = self.top_p {
            let enough = f64::from(top_p) * weights.iter().sum::<f64>();
            let mut sum = 0.0;
            let kept = weights.iter().position(|weight| {
                sum += weight;
                sum >= enough
            });
            weights.truncate(kept.map_or(weights.len(), |last| last + 1));
        }
        let mut left = self.uniform(number) * weights.iter().sum::<f64>();
        let chosen = weights.iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        Some(candidates[chosen.unwrap_or(weights.len() - 1)].0)
    }

    /// From 0 to below 1.
    fn uniform(&self, number: u64) -> f64 {
        let counter = [number as u32, (number >> 32) as u32, DOMAIN, 0];
        let [high, low, ..] = philox(counter, [self.seed as u32, (self.seed >> 32) as u32]);
        let bits = u64::from(high) << 32 | u64::from(low);
        (bits >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 4] = [1.0, 3.0, 2.0, f32::NEG_INFINITY];

    fn sampling(temperature: f32, top_k: Option<usize>, top_p: Option<f32>) -> Sampling {
        Sampling {
            temperature,
            top_k,
            top_p,
            seed: 7,
        }
    }

    fn counts(sampling: Sampling) -> [usize; 4] {
        let mut counts = [0; 4];
        for number in 0..20_000 {
            counts[sampling.choose(&LOGITS, number).unwrap() as usize] += 1;
        }
        counts
    }

    #[test]
    fn without_temperature_it_is_the_most_probable_one() {
        assert_eq!(sampling(0.0, None, None).choose(&LOGITS, 3), Some(1));
        assert_eq!(sampling(0.0, None, None).choose(&[2.0, 2.0], 3), Some(0));
        assert_eq!(sampling(1.0, None, None).choose(&[f32::NAN; 3], 3), None);
    }

    #[test]
    fn tokens_come_as_often_as_softmax_says() {
        let total: f64 = [1.0_f64, 3.0, 2.0].iter().map(|x| x.exp()).sum();
        for (token, count) in counts(sampling(1.0, None, None)).into_iter().enumerate() {
            let expected = f64::from(LOGITS[token]).exp() / total;
            let found = count as f64 / 20_000.0;
            assert!(
                (found - expected).abs() < 0.01,
                "{token}: {found}, expected {expected}"
            );
        }
    }

    #[test]
    fn top_k_and_top_p_leave_out_the_rest() {
        assert_eq!(counts(sampling(1.0, Some(1), None)), [0, 20_000, 0, 0]);
        let [rare, ..] = counts(sampling(1.0, Some(2), None));
        assert_eq!(rare, 0);
        // The first has 0.665 of all, the first two 0.910.
        assert_eq!(counts(sampling(1.0, None, Some(0.6))), [0, 20_000, 0, 0]);
        let [rare, _, second, _] = counts(sampling(1.0, None, Some(0.7)));
        assert!(rare == 0 && second > 0);
    }

    #[test]
    fn choices_are_repeatable_and_follow_the_seed() {
        let of = |seed| {
            let sampling = Sampling {
                seed,
                ..sampling(1.0, None, None)
            };
            (0..50)
                .map(|number| sampling.choose(&LOGITS, number))
                .collect::<Vec<_>>()
        };
        assert_eq!(of(7), of(7));
        assert_ne!(of(7), of(8));
    }
}
