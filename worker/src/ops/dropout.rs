//! Dropout (Srivastava et al. 2014). Masks are not stored. Whether a number is dropped is a pure
//! function of the run's seed, the place in the model, the sample's number in the run, the row and
//! the column, computed by the counter-based generator Philox. So backward, recomputation and any
//! layout of ranks compute the same mask, also for a part of the rows or of the heads.

use super::cpu::kernel::{Real, runs_in};
use super::cpu::stored::Stored;
use super::cuda::plan::{Arg, Plan, count, elementwise, kernels};
use super::{Cpu, Operation, expect_len};
use crate::cuda::KernelSource;
use crate::memory::{Buffer, DeviceError};

/// Approximate number of elements of one part of the work.
const PART: usize = 16_384;
/// Fourth word of the counter: keeps keys apart from all other numbers that share the seed.
const DOMAIN: u32 = 0x4452_4F50;

/// Which numbers of one place in the model are dropped, for the samples of one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DropoutMask {
    key: [u32; 2],
    first_sample: u64,
    /// First row or head of the micro-batch that the operation has.
    first: u32,
    rate: f32,
}

impl DropoutMask {
    /// The mask of place `site` in layer `layer`. `first_sample` is the number in the run of the micro-batch's first
    /// sample, `rate` the share of numbers that are dropped, from 0 to below 1.
    pub fn new(seed: u64, layer: u32, site: u32, first_sample: u64, rate: f32) -> Self {
        let seed = [seed as u32, (seed >> 32) as u32];
        let [first, second, ..] = philox([layer, site, 0, DOMAIN], seed);
        Self {
            key: [first, second],
            first_sample,
            first: 0,
            rate,
        }
    }

    /// The mask of a part: [`Dropout`] has rows `first..` of `[B·T, C]`, or attention heads `first..` of all heads.
    #[must_use]
    pub fn of_part(self, first: u32) -> Self {
        Self { first, ..self }
    }

    /// A random word below the threshold drops its number.
    fn threshold(&self) -> u32 {
        (f64::from(self.rate) * 2.0_f64.powi(32)) as u32
    }

    /// Factor of the numbers that are kept: 1/(1 − rate).
    fn scale(&self) -> f64 {
        1.0 / (1.0 - f64::from(self.rate))
    }

    /// The members of `Mask`, the last parameters of a kernel.
    pub(super) fn args(&self) -> [Arg; 5] {
        [
            Arg::U64(u64::from(self.key[1]) << 32 | u64::from(self.key[0])),
            Arg::U64(self.first_sample),
            Arg::U32(self.first),
            Arg::U32(self.threshold()),
            Arg::F32(self.scale() as f32),
        ]
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

    /// Multiplies the numbers of a query and its keys by their factors. Of 16 keys, from a multiple of 16 on, four groups
    /// have the words of keys `2g`, `2g + 1`, `2g + 8`, `2g + 9`: what one thread of a tensor core holds.
    pub(super) fn drop_keys<T: Real>(
        &self,
        [sample, head]: [usize; 2],
        [query, first_key]: [usize; 2],
        row: &mut [T],
    ) {
        let (threshold, scale) = (self.threshold(), T::of(self.scale()));
        let (head, end) = (self.first as usize + head, first_key + row.len());
        for block in (first_key / 16 * 16..end).step_by(16) {
            for quarter in 0..(end - block).div_ceil(2).min(4) {
                let words = self.words(sample, head, query, block / 4 + quarter);
                for (i, word) in words.into_iter().enumerate() {
                    let key = block + 2 * quarter + i % 2 + i / 2 * 8;
                    if let Some(x) = row.get_mut(key.wrapping_sub(first_key)) {
                        *x = if word < threshold { T::ZERO } else { *x * scale };
                    }
                }
            }
        }
    }
}

/// `out = residual + mask · inp`. The gradient of `inp` is the same operation on the gradient of
/// `out`, without a residual.
///
/// The rows `R` are all of the micro-batch, `B·T`, or consecutive ones of them, as under sequence parallelism.
#[derive(Clone, Debug)]
pub struct Dropout {
    /// `[R, C]`
    pub inp: Buffer,
    /// `[R, C]`; none: zeros
    pub residual: Option<Buffer>,
    /// `[R, C]`
    pub out: Buffer,
    /// The mask, which includes the number of the first row.
    pub mask: DropoutMask,
    /// `T`
    pub positions: usize,
    /// `C`
    pub channels: usize,
}

impl Operation for Dropout {
    const NAME: &'static str = "dropout";

    runs_in!(out);

    fn plan(&self) -> Result<Plan, DeviceError> {
        self.check()?;
        let mut buffers = vec![&self.out, &self.inp];
        buffers.extend(&self.residual);
        let positions = count(Self::NAME, "positions", self.positions)?;
        let channels = count(Self::NAME, "channels", self.channels)?;
        let call = elementwise(Self::NAME, &SOURCE, &buffers, self.channels, 1)?
            .read([&self.inp])
            .read_if(self.residual.as_ref())
            .write([&self.out])
            .u32([positions, channels])
            .with(self.mask.args());
        Ok(call.u64([self.out.len() as u64]).into())
    }
}

impl Dropout {
    /// Refuses sizes that do not fit each other.
    fn check(&self) -> Result<(), DeviceError> {
        let len = self.out.len();
        if self.positions * self.channels == 0 || !len.is_multiple_of(self.channels) {
            let what = format!(
                "{len} elements cannot be divided into rows of {} channels, in samples of {} positions",
                self.channels, self.positions
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
            // Without a residual, nothing is added.
            let residual = residual.map_or(&[][..], |residual| &residual[range.clone()]);
            S::read(isa, &inp[range], |inp| {
                S::read(isa, residual, |residual| {
                    S::write(isa, out, false, |out| self.rows(first, inp, residual, out));
                });
            });
        });
        Ok(())
    }

    fn rows<T: Real>(&self, first: usize, inp: &[T], residual: &[T], out: &mut [T]) {
        let rows = inp
            .chunks_exact(self.channels)
            .zip(out.chunks_exact_mut(self.channels));
        for (i, (inp, out)) in rows.enumerate() {
            let row = self.mask.first as usize + first + i;
            self.mask
                .of_position(row / self.positions, row % self.positions, out);
            for (out, inp) in out.iter_mut().zip(inp) {
                *out *= *inp;
            }
            let residual = residual.get(i * self.channels..).unwrap_or_default();
            for (out, x) in out.iter_mut().zip(residual) {
                *out += *x;
            }
        }
    }
}

static SOURCE: KernelSource = kernels("dropout.cu", include_str!("cuda/dropout.cu"));

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Key increments: the golden ratio and √3 − 1 (Weyl sequence).
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Four random words for a counter under a key.
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let [high0, low0] = wide_product(MULTIPLIERS[0], counter[0]);
        let [high1, low1] = wide_product(MULTIPLIERS[1], counter[2]);
        counter = [
            high1 ^ counter[1] ^ key[0],
            low1,
            high0 ^ counter[3] ^ key[1],
            low0,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// Both halves of a product, the high one first.
const fn wide_product(a: u32, b: u32) -> [u32; 2] {
    let product = a as u64 * b as u64;
    [(product >> 32) as u32, product as u32]
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
            let mask = DropoutMask::new(7, 3, 1, 1000, rate);
            let (mut elements, mut keys) = (vec![0.0_f64; 40_001], vec![1.0_f64; 40_001]);
            mask.of_position(2, 5, &mut elements);
            mask.drop_keys([2, 5], [1, 0], &mut keys);
            for values in [elements, keys] {
                let dropped = values.iter().filter(|x| **x == 0.0).count();
                assert_rate(dropped, values.len(), rate);
                assert!(values.iter().all(|x| *x == 0.0 || *x == mask.scale()));
            }
        }
    }

    #[test]
    fn a_mask_depends_on_seed_place_sample_and_row_only() {
        let mask = |seed, [layer, site]: [u32; 2], first, sample, row| {
            let mut factors = [0.0_f64; 64];
            DropoutMask::new(seed, layer, site, first, 0.5).of_position(sample, row, &mut factors);
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
        let mask = DropoutMask::new(1, 0, 0, 0, 0.5);
        let row = |len| {
            let mut row = vec![1.0_f32; len];
            mask.drop_keys([0, 1], [2, 0], &mut row);
            row
        };
        for len in 0..40 {
            assert_eq!(row(len), row(50)[..len]);
        }
        let mut later_keys = vec![1.0_f32; 34];
        mask.drop_keys([0, 1], [2, 16], &mut later_keys);
        assert_eq!(later_keys, row(50)[16..]);
        let mut other_head = vec![1.0_f32; 50];
        mask.drop_keys([0, 2], [2, 0], &mut other_head);
        assert_ne!(other_head, row(50));
    }

    /// The known answers published with Random123 (`kat_vectors`, `philox4x32 10`).
    #[test]
    fn known_answers() {
        let ones = u32::MAX;
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([ones; 4], [ones; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(
            philox(pi, [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }
}
