//! From the logits of the next token to one token.

use std::cmp::Ordering;

use crate::ops::philox;

/// How a token is chosen. Choices are repeatable: a function of the logits, the seed and the number of the token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; 0 takes the most probable token.
    pub temperature: f32,
    /// Consider only this many of the most probable tokens; by default all.
    pub top_k: Option<usize>,
    /// Consider only the most probable tokens whose probabilities add up to this (Holtzman et al. 2020); by default all.
    pub top_p: Option<f32>,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Keeps these random numbers apart from all others that share the seed.
const DOMAIN: u32 = 0x4745_4E45;

/// A token and its logit, later its weight.
pub type Weighed = (u32, f64);

impl Sampling {
    /// Token `number` of the text, counted from the first generated one. Logits that are not finite are no tokens; none if
    /// no logit is finite. Of equally probable tokens the smaller one comes first. `memory` is for the candidates.
    pub fn choose(&self, logits: &[f32], number: u64, memory: &mut Vec<Weighed>) -> Option<u32> {
        let finite = (0..).zip(logits).filter(|(_, logit)| logit.is_finite());
        let finite = finite.map(|(token, &logit)| (token, f64::from(logit)));
        let (best, top) = finite.clone().reduce(|a, b| if b.1 > a.1 { b } else { a })?;
        if self.temperature == 0.0 {
            return Some(best);
        }
        memory.clear();
        memory.extend(finite);
        if let Some(top_k) = self.top_k.filter(|top_k| *top_k < memory.len()) {
            memory.select_nth_unstable_by(top_k.max(1) - 1, most_probable_first);
            memory.truncate(top_k.max(1));
            memory.sort_unstable_by(most_probable_first);
        }
        let scale = 1.0 / f64::from(self.temperature);
        for (_, weight) in memory.iter_mut() {
            *weight = ((*weight - top) * scale).exp();
        }
        if let Some(top_p) = self.top_p.filter(|top_p| *top_p < 1.0) {
            keep_nucleus(memory, f64::from(top_p));
        }
        let mut left = self.uniform(number) * memory.iter().map(|(_, weight)| weight).sum::<f64>();
        let chosen = memory.iter().find(|(_, weight)| {
            left -= weight;
            left < 0.0
        });
        // Rounding may leave a little.
        chosen.or(memory.last()).map(|(token, _)| *token)
    }

    /// From 0 to below 1.
    fn uniform(&self, number: u64) -> f64 {
        let counter = [number as u32, (number >> 32) as u32, DOMAIN, 0];
        let [high, low, ..] = philox(counter, [self.seed as u32, (self.seed >> 32) as u32]);
        let bits = u64::from(high) << 32 | u64::from(low);
        (bits >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
    }
}

fn most_probable_first(a: &Weighed, b: &Weighed) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Keeps the fewest of the most probable candidates whose share of all weights is at least `top_p`.
fn keep_nucleus(candidates: &mut Vec<Weighed>, top_p: f64) {
    let total: f64 = candidates.iter().map(|(_, weight)| weight).sum();
    // All that weigh less than this weigh less than the rest beside `top_p` together, so that none of them is kept; half of
    // it leaves room for rounding. Few are left to be sorted.
    let least = 0.5 * (1.0 - top_p) * total / candidates.len() as f64;
    candidates.retain(|(_, weight)| *weight >= least);
    candidates.sort_unstable_by(most_probable_first);
    let mut sum = 0.0;
    let last = candidates.iter().position(|(_, weight)| {
        sum += weight;
        sum >= top_p * total
    });
    candidates.truncate(last.map_or(candidates.len(), |last| last + 1));
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::collections::BTreeSet;

    const LOGITS: [f32; 4] = [1.0, 3.0, 2.0, f32::NEG_INFINITY];

    fn sampling(temperature: f32, top_k: Option<usize>, top_p: Option<f32>) -> Sampling {
        Sampling {
            temperature,
            top_k,
            top_p,
            seed: 7,
        }
    }

    fn choose(sampling: &Sampling, logits: &[f32], number: u64) -> Option<u32> {
        sampling.choose(logits, number, &mut Vec::new())
    }

    #[test]
    fn without_temperature_it_is_the_most_probable_one() {
        let greedy = sampling(0.0, None, None);
        assert_eq!(choose(&greedy, &LOGITS, 3), Some(1));
        assert_eq!(
            choose(&greedy, &[1.0, 2.0, 2.0], 3),
            Some(1),
            "the first of equal ones"
        );
        assert_eq!(choose(&greedy, &[f32::NAN; 3], 3), None);
        assert_eq!(
            choose(&sampling(1.0, None, None), &[f32::NAN, f32::INFINITY], 3),
            None
        );
        // Almost no temperature is almost none.
        for number in 0..1000 {
            assert_eq!(choose(&sampling(0.01, None, None), &LOGITS, number), Some(1));
        }
    }

    #[test]
    fn tokens_come_as_often_as_softmax_says() {
        let logits = [0.5_f32, -1.0, 2.0, f32::NEG_INFINITY, 1.0];
        let draws = 20_000;
        for temperature in [0.7, 1.0, 1.5] {
            let weights = logits.map(|x| (f64::from(x) / f64::from(temperature)).exp());
            let total: f64 = weights.iter().sum();
            let mut counts = [0; 5];
            for number in 0..draws {
                counts[choose(&sampling(temperature, None, None), &logits, number).unwrap() as usize] += 1;
            }
            for (token, (&count, weight)) in counts.iter().zip(weights).enumerate() {
                let (found, expected) = (f64::from(count) / draws as f64, weight / total);
                assert!(
                    (found - expected).abs() < 0.012,
                    "{token}: {found}, expected {expected}"
                );
            }
            assert_eq!(counts[3], 0);
        }
    }

    /// All tokens that come in many draws.
    fn set(sampling: &Sampling, logits: &[f32]) -> BTreeSet<u32> {
        (0..4000)
            .map(|number| choose(sampling, logits, number).unwrap())
            .collect()
    }

    #[test]
    fn top_k_and_top_p_keep_the_right_tokens_and_of_equal_ones_the_first() {
        // Probabilities 1/10, 4/10, 1/10, 2/10, 2/10.
        let logits = [1.0_f32, 4.0, 1.0, 2.0, 2.0].map(f32::ln);
        let top_k = |k| set(&sampling(1.0, Some(k), None), &logits);
        assert_eq!(top_k(1), [1].into());
        assert_eq!(top_k(2), [1, 3].into(), "the first of two equal ones");
        assert_eq!(top_k(3), [1, 3, 4].into());
        assert_eq!(top_k(4), [0, 1, 3, 4].into());
        assert_eq!(top_k(5), top_k(1000));
        let top_p = |p| set(&sampling(1.0, None, Some(p)), &logits);
        assert_eq!(top_p(1e-9), [1].into());
        assert_eq!(top_p(0.39), [1].into());
        assert_eq!(top_p(0.41), [1, 3].into());
        assert_eq!(top_p(0.61), [1, 3, 4].into());
        assert_eq!(top_p(0.81), [0, 1, 3, 4].into());
        assert_eq!(top_p(0.91), [0, 1, 2, 3, 4].into());
        assert_eq!(top_p(1.0).len(), 5);
        // Of the three that top-k leaves, two make up three quarters.
        assert_eq!(set(&sampling(1.0, Some(3), Some(0.74)), &logits), [1, 3].into());
        assert_eq!(
            set(&sampling(1.0, Some(3), Some(0.76)), &logits),
            [1, 3, 4].into()
        );
    }

    #[test]
    fn equal_tokens_are_cut_exactly() {
        let logits = [0.0_f32; 8];
        assert_eq!(set(&sampling(1.0, Some(3), None), &logits), (0..3).collect());
        assert_eq!(set(&sampling(1.0, None, Some(0.5)), &logits), (0..4).collect());
        assert_eq!(set(&sampling(1.0, None, Some(0.51)), &logits), (0..5).collect());
    }

    #[test]
    fn the_nucleus_is_that_of_all_candidates_sorted() {
        let mut state = 3_u64;
        for top_p in [0.1, 0.5, 0.9, 0.99, 0.9999] {
            let weights = (0..500).map(|token| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (token, ((state >> 40) as f64 / 2e6).exp())
            });
            let mut found: Vec<Weighed> = weights.collect();
            let mut all = found.clone();
            all.sort_by(most_probable_first);
            let enough = top_p * found.iter().map(|(_, weight)| weight).sum::<f64>();
            let mut sum = 0.0;
            let count = all.iter().take_while(|(_, weight)| {
                let is_short = sum < enough;
                sum += weight;
                is_short
            });
            let expected: Vec<Weighed> = count.copied().collect();
            keep_nucleus(&mut found, top_p);
            assert_eq!(found, expected, "{top_p}");
        }
    }

    #[test]
    fn choices_are_repeatable_and_follow_the_seed() {
        let of = |seed| {
            let sampling = Sampling {
                seed,
                ..sampling(1.0, None, None)
            };
            (0..50)
                .map(|number| choose(&sampling, &LOGITS, number))
                .collect::<Vec<_>>()
        };
        assert_eq!(of(7), of(7));
        assert_ne!(of(7), of(8));
    }
}
