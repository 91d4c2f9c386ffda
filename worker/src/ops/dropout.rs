//! Dropout (Srivastava et al. 2014). Masks are not stored: whether a number is dropped is a pure function of the run's seed,
//! the place in the model, the sample's number in the run, the row and the column. Backward, recomputation and any layout
//! of ranks compute the same mask.

use super::kernel::by_dtype;
use super::philox::philox;
use super::real::Real;
use super::stored::Stored;
use super::{CpuKernel, expect_len};
use crate::device::{Buffer, Cpu, DeviceError};

/// Elements of one part of the work, about.
const PART: usize = 16_384;
/// Fourth word of the counter: keeps keys apart from all other numbers that share the seed.
const DOMAIN: u32 = 0x4452_4F50;

/// Which numbers of one place in the model are dropped, for the samples of one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DropoutMask {
    key: [u32; 2],
    first_sample: u64,
    rate: f32,
}

impl DropoutMask {
    /// The mask of place `site` in layer `layer`. `first_sample` is the number in the run of the micro-batch's first
    /// sample, `rate` the share of numbers that are dropped, from 0 to below 1.
    #[must_use]
    pub fn new(seed: u64, [layer, site]: [u32; 2], first_sample: u64, rate: f32) -> Self {
        let seed = [seed as u32, (seed >> 32) as u32];
        let [first, second, ..] = philox([layer, site, 0, DOMAIN], seed);
        Self {
            key: [first, second],
            first_sample,
            rate,
        }
    }

    /// The key of the place, its first word in the lower half.
    pub(super) fn key(&self) -> u64 {
        u64::from(self.key[1]) << 32 | u64::from(self.key[0])
    }

    pub(super) fn first_sample(&self) -> u64 {
        self.first_sample
    }

    /// Words below it drop their number.
    pub(super) fn threshold(&self) -> u32 {
        (f64::from(self.rate) * 2.0_f64.powi(32)) as u32
    }

    /// Factor of the numbers that stay: 1/(1 − rate).
    pub(super) fn scale(&self) -> f64 {
        1.0 / (1.0 - f64::from(self.rate))
    }

    /// Four random words. The counter has the sample's lower 48 bits, the head (of attention), the row, and the group of
    /// columns.
    fn words(&self, sample: usize, head: usize, row: usize, group: usize) -> [u32; 4] {
        let sample = self.first_sample + sample as u64;
        let high = (sample >> 32) as u32 & 0xffff | (head as u32) << 16;
        philox([sample as u32, high, row as u32, group as u32], self.key)
    }

    /// The factor of each channel of a position: word `c mod 4` of group `c div 4`.
    fn of_position<T: Real>(&self, sample: usize, position: usize, factors: &mut [T]) {
        let (threshold, scale) = (self.threshold(), T::of(self.scale()));
        for (group, factors) in factors.chunks_mut(4).enumerate() {
            let words = self.words(sample, 0, position, group);
            for (factor, word) in factors.iter_mut().zip(words) {
                *factor = if word < threshold { T::ZERO } else { scale };
            }
        }
    }

    /// Multiplies the numbers of a query and its keys, from the first on, by their factors. Of 16 keys, four groups have
    /// the words of keys `2g`, `2g + 1`, `2g + 8`, `2g + 9`: what one thread of a tensor core holds.
    pub(super) fn drop_keys<T: Real>(&self, sample: usize, head: usize, query: usize, row: &mut [T]) {
        let (threshold, scale) = (self.threshold(), T::of(self.scale()));
        for (block, keys) in row.chunks_mut(16).enumerate() {
            for quarter in 0..keys.len().div_ceil(2).min(4) {
                let words = self.words(sample, head, query, 4 * block + quarter);
                for (i, word) in words.into_iter().enumerate() {
                    if let Some(x) = keys.get_mut(2 * quarter + i % 2 + i / 2 * 8) {
                        *x = if word < threshold { T::ZERO } else { *x * scale };
                    }
                }
            }
        }
    }
}

/// `out = residual + mask · inp`; the gradient of `inp` is the same of `out`'s, without a residual.
#[derive(Clone, Debug)]
pub struct Dropout {
    /// `[B, T, C]`
    pub inp: Buffer,
    /// `[B, T, C]`; none: zeros
    pub residual: Option<Buffer>,
    /// `[B, T, C]`
    pub out: Buffer,
    /// What is dropped.
    pub mask: DropoutMask,
    /// `T`
    pub positions: usize,
    /// `C`
    pub channels: usize,
}

impl CpuKernel for Dropout {
    const NAME: &'static str = "dropout";

    fn run(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        by_dtype!(Self::NAME, self.out.dtype(), S => self.compute::<S>(cpu))
    }
}

impl Dropout {
    /// Refuses sizes that do not fit each other.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        let len = self.out.len();
        if self.positions * self.channels == 0 || !len.is_multiple_of(self.positions * self.channels) {
            let what = format!(
                "{len} elements are no samples of {} positions and {} channels",
                self.positions, self.channels
            );
            return Err(DeviceError::Shape { op: Self::NAME, what });
        }
        expect_len(Self::NAME, "inp", self.inp.len(), len)?;
        match &self.residual {
            Some(residual) => expect_len(Self::NAME, "residual", residual.len(), len),
            None => Ok(()),
        }
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        self.check()?;
        let inp = self.inp.host::<S>()?;
        let residual = self.residual.as_ref().map(Buffer::host::<S>).transpose()?;
        let mut out = self.out.host_mut::<S>()?;
        let (inp, residual) = (&*inp, residual.as_deref());
        let rows = (PART / self.channels).max(1);
        let parts = out.chunks_mut(rows * self.channels).enumerate().collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(part, out): (usize, &mut [S])| {
            let first = part * rows;
            let range = first * self.channels..first * self.channels + out.len();
            let residual = residual.map(|residual| &residual[range.clone()]);
            S::read(isa, &inp[range], |inp| {
                S::write(isa, out, false, |out| match residual {
                    Some(residual) => S::read(isa, residual, |residual| {
                        self.rows(first, inp, Some(residual), out);
                    }),
                    None => self.rows(first, inp, None, out),
                });
            });
        });
        Ok(())
    }

    fn rows<T: Real>(&self, first: usize, inp: &[T], residual: Option<&[T]>, out: &mut [T]) {
        let rows = inp
            .chunks_exact(self.channels)
            .zip(out.chunks_exact_mut(self.channels));
        for (i, (inp, out)) in rows.enumerate() {
            let row = first + i;
            self.mask
                .of_position(row / self.positions, row % self.positions, out);
            for (out, inp) in out.iter_mut().zip(inp) {
                *out *= *inp;
            }
            if let Some(residual) = residual {
                for (out, x) in out.iter_mut().zip(&residual[i * self.channels..]) {
                    *out += *x;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Within five standard deviations of a binomial distribution.
    fn assert_rate(dropped: usize, of: usize, rate: f32) {
        let expected = f64::from(rate) * of as f64;
        let deviation = (expected * (1.0 - f64::from(rate))).sqrt();
        assert!(
            (dropped as f64 - expected).abs() <= 5.0 * deviation,
            "{dropped} of {of} dropped at {rate}"
        );
    }

    #[test]
    fn as_many_are_dropped_as_the_rate_says() {
        for rate in [0.0, 0.1, 0.5, 0.9] {
            let mask = DropoutMask::new(7, [3, 1], 1000, rate);
            let (mut elements, mut keys) = (vec![0.0_f64; 40_001], vec![1.0_f64; 40_001]);
            mask.of_position(2, 5, &mut elements);
            mask.drop_keys(2, 5, 1, &mut keys);
            for values in [elements, keys] {
                let dropped = values.iter().filter(|x| **x == 0.0).count();
                assert_rate(dropped, values.len(), rate);
                assert!(values.iter().all(|x| *x == 0.0 || *x == mask.scale()));
            }
        }
    }

    #[test]
    fn a_mask_depends_on_seed_place_sample_and_row_only() {
        let mask = |seed, place, first, sample, row| {
            let mut factors = [0.0_f64; 64];
            DropoutMask::new(seed, place, first, 0.5).of_position(sample, row, &mut factors);
            factors
        };
        let one = mask(1, [2, 3], 10, 4, 5);
        assert_eq!(
            one,
            mask(1, [2, 3], 14, 0, 5),
            "the same sample in another micro-batch"
        );
        for other in [
            mask(2, [2, 3], 10, 4, 5),
            mask(1, [3, 3], 10, 4, 5),
            mask(1, [2, 4], 10, 4, 5),
            mask(1, [2, 3], 11, 4, 5),
            mask(1, [2, 3], 10, 4, 6),
        ] {
            assert_ne!(one, other);
        }
    }

    #[test]
    fn a_row_of_keys_begins_as_a_longer_one_does() {
        let mask = DropoutMask::new(1, [0, 0], 0, 0.5);
        let row = |len| {
            let mut row = vec![1.0_f32; len];
            mask.drop_keys(0, 1, 2, &mut row);
            row
        };
        for len in 0..40 {
            assert_eq!(row(len), row(50)[..len]);
        }
        let mut other_head = vec![1.0_f32; 50];
        mask.drop_keys(0, 2, 2, &mut other_head);
        assert_ne!(other_head, row(50));
    }
}
