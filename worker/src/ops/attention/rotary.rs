//! Rotary position embedding (Su et al. 2021): queries and keys are rotated by angles that grow with the position, so
//! that a score depends on the distance of two positions alone.
//!
//! The pairs that are rotated are channels `i` and `i + D/2` of a head, as in Llama on Hugging Face (`rotate_half`);
//! Llama's first release pairs neighbours, and its weights are permuted when they are converted.
//!
//! Cosines and sines are computed when they are needed, not read from a table. They cost about
//! forty operations per row and pair, which all heads of the row share. A table would need memory
//! in every model, rehearsal and cache, and would limit the positions. The angle of a position is a
//! fraction of a turn, as 64 bits: the product with the position wraps around as angles do, and is
//! exact. Then follow plain operations in f64, none of them fused, and one rounding. So the result
//! is bit-identical on every CPU and GPU. No function of a system's library is called.

use super::shape::AttentionShape;
use crate::config::RopeScaling;
use crate::cuda::{Define, Grid, KernelSource};
use crate::memory::{Buffer, DeviceError};
use crate::ops::cpu::kernel::{Real, kernel, ln, runs_in, with_scratch};
use crate::ops::cpu::stored::Stored;
use crate::ops::cuda::plan::{Call, Plan, THREADS, count, element, kernels, vec_define, width};
use crate::ops::{Cpu, Operation};

/// Rows of one part of the work.
const ROWS: usize = 16;

/// How far each pair of channels is rotated: pair `i` by `base^(−2i/D)` radians per position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryEmbedding {
    /// Base of the wavelengths (θ): 10,000 in Llama 1 and 2, 500,000 in Llama 3.
    pub base: f64,
    /// Scaling for texts longer than those of the first training.
    pub scaling: Option<RopeScaling>,
}

/// The rotation of a pair with Llama 3.1's scaling (`rope_type: llama3` of `transformers`): with wavelength
/// `w = 2π/frequency` and `M = original_positions`, a frequency is kept if `w < M/high_freq_factor`, divided by `factor` if
/// `w > M/low_freq_factor`, and between the two it is `(1 − s)·frequency/factor + s·frequency` with
/// `s = (M/w − low_freq_factor)/(high_freq_factor − low_freq_factor)`.
fn scaled(frequency: f64, scaling: &RopeScaling) -> f64 {
    let (low, high) = (scaling.low_freq_factor, scaling.high_freq_factor);
    // How many waves the first training's texts had.
    let waves = scaling.original_positions as f64 * frequency / std::f64::consts::TAU;
    if waves > high {
        return frequency;
    }
    if waves < low {
        return frequency / scaling.factor;
    }
    let kept = (waves - low) / (high - low);
    (1.0 - kept) * frequency / scaling.factor + kept * frequency
}

/// 2⁶⁴, the numbers of a turn.
const TURN: f64 = 18_446_744_073_709_551_616.0;

impl RotaryEmbedding {
    /// Rotation of each pair of channels per position, in radians.
    ///
    /// # Errors
    /// If a head has an odd number of channels, or a setting is not a positive number.
    pub fn frequencies(&self, head_size: usize) -> Result<Vec<f64>, DeviceError> {
        self.check(head_size)?;
        let base = ln(self.base);
        let of_pair = |pair: usize| {
            let frequency = Real::exp(-base * (2 * pair) as f64 / head_size as f64);
            self.scaling
                .as_ref()
                .map_or(frequency, |scaling| scaled(frequency, scaling))
        };
        Ok((0..head_size / 2).map(of_pair).collect())
    }

    /// The same as fractions of a turn, in units of 2⁻⁶⁴. Whole turns are dropped: they do not
    /// change the angle.
    fn turns(&self, head_size: usize) -> Result<Vec<u64>, DeviceError> {
        let frequencies = self.frequencies(head_size)?.into_iter();
        let turns = |frequency: f64| ((frequency / std::f64::consts::TAU).fract() * TURN) as u64;
        Ok(frequencies.map(turns).collect())
    }

    fn check(&self, head_size: usize) -> Result<(), DeviceError> {
        let valid = self.scaling.is_none_or(|scaling| scaling.is_valid());
        let what = if head_size == 0 || !head_size.is_multiple_of(2) {
            format!("a head has {head_size} channels, expected an even number above 0")
        } else if !self.base.is_normal() || self.base <= 0.0 || !valid {
            format!("{self:?} is not a valid rotary embedding")
        } else {
            return Ok(());
        };
        let op = Rotary::NAME;
        Err(DeviceError::Shape { op, what })
    }
}

/// Rotates the heads of queries and keys in place, by the angles of their positions: with `a = (p + t)·frequency` of a
/// pair, `(x, y)` becomes `(x·cos a − y·sin a, y·cos a + x·sin a)`. Its gradient is the rotation by the negative angles.
#[derive(Clone, Debug)]
pub struct Rotary {
    /// `[B, T, (H + 2·KV)·D]`: `qkv`, or `dqkv` in backward; values stay as they are
    pub qkv: Buffer,
    /// Sizes.
    pub shape: AttentionShape,
    /// The angles.
    pub embedding: RotaryEmbedding,
    /// `p`: position of the first row of each sample.
    pub first_position: usize,
    /// Rotate by the negative angles.
    pub backward: bool,
}

impl Operation for Rotary {
    const NAME: &'static str = "rotary";

    runs_in!(qkv);

    /// A thread rotates the same pairs of all heads of a row.
    fn plan(&self) -> Result<Plan, DeviceError> {
        let turns = self.turns()?;
        let (op, shape) = (Self::NAME, self.shape);
        let act = element(op, &self.qkv)?;
        if shape.head_size > MAX_HEAD {
            let what = format!(
                "a head has {} channels, but a GPU supports at most {MAX_HEAD}",
                shape.head_size
            );
            return Err(DeviceError::Shape { op, what });
        }
        let width = width(turns.len(), &[&self.qkv]);
        let threads = count(op, "packs of pairs", shape.rows() * (turns.len() / width))?;
        let grid = Grid::covering(threads as usize, THREADS);
        let call = Call::new(&SOURCE, op, defines(act, shape.head_size, width), grid)
            .write([&self.qkv])
            .u32([
                count(op, "rows", shape.rows())?,
                count(op, "positions", shape.positions)?,
                count(op, "heads", self.heads())?,
                count(op, "elements of a row", shape.qkv_channels())?,
            ])
            .u64([self.first_position as u64])
            .flag(self.backward)
            .table(turns);
        Ok(call.into())
    }
}

impl Rotary {
    /// Heads that are rotated: the first ones of a row.
    fn heads(&self) -> usize {
        self.shape.heads + self.shape.kv_heads
    }

    /// Checks that the sizes fit each other. Returns the rotation of each pair per position, as a
    /// fraction of a turn.
    fn turns(&self) -> Result<Vec<u64>, DeviceError> {
        let buffers = [("qkv", &self.qkv, self.shape.qkv_channels())];
        self.shape.check(Self::NAME, &buffers)?;
        self.embedding.turns(self.shape.head_size)
    }

    fn compute<S: Stored>(&self, cpu: &Cpu) -> Result<(), DeviceError> {
        let turns = &*self.turns()?;
        let shape = self.shape;
        let (channels, rotated) = (shape.qkv_channels(), self.heads() * shape.head_size);
        let mut x = self.qkv.host_mut::<S>()?;
        let parts = x.chunks_mut(ROWS * channels).enumerate().collect();
        let isa = cpu.isa();
        cpu.for_each_part(parts, |(part, x): (usize, &mut [S])| {
            with_scratch(shape.head_size, |angles: &mut [S::Real]| {
                for (i, row) in x.chunks_exact_mut(channels).enumerate() {
                    let position = self.first_position + (part * ROWS + i) % shape.positions;
                    cosines_and_sines(isa, position as u64, turns, self.backward, angles);
                    S::write(isa, &mut row[..rotated], true, |row| rotate(isa, angles, row));
                }
            });
        });
        Ok(())
    }
}

/// Degree 15 and 16: for angles of at most π/4 the terms left out are below 5·10⁻¹⁷.
const SINE: [f64; 8] = alternating(1);
const COSINE: [f64; 9] = alternating(0);

/// `±1/(first + 2k)!`, highest power first.
const fn alternating<const N: usize>(first: usize) -> [f64; N] {
    let mut series = [1.0; N];
    let (mut factorial, mut k) = (1.0, 1);
    while k < N {
        let power = first + 2 * k;
        factorial *= ((power - 1) * power) as f64;
        let sign = if k.is_multiple_of(2) { 1.0 } else { -1.0 };
        series[N - 1 - k] = sign / factorial;
        k += 1;
    }
    series
}

/// Cosine and sine of a fraction of a turn, within 2⁻⁵² of 1.
#[inline(always)]
fn cosine_and_sine(turn: u64) -> [f64; 2] {
    const RADIANS: f64 = std::f64::consts::TAU / TURN;
    // The nearest quarter of a turn, and what remains: at most an eighth either way.
    let quarter = turn.wrapping_add(1 << 61) >> 62;
    let rest = turn.wrapping_sub(quarter << 62) as i64 as f64 * RADIANS;
    let square = rest * rest;
    let (mut sine, mut cosine) = (SINE[0], COSINE[0]);
    for coefficient in &SINE[1..] {
        sine = sine * square + coefficient;
    }
    for coefficient in &COSINE[1..] {
        cosine = cosine * square + coefficient;
    }
    let sine = sine * rest;
    let (cosine, sine) = if quarter & 1 == 0 {
        (cosine, sine)
    } else {
        (-sine, cosine)
    };
    if quarter & 2 == 0 {
        [cosine, sine]
    } else {
        [-cosine, -sine]
    }
}

kernel! {
    /// Writes the cosines of the pairs at a position, then their sines; of the negative angles in backward.
    fn cosines_and_sines<'a, T>(
        position: u64,
        turns: &'a [u64],
        back: bool,
        angles: &'a mut [T],
    ) -> () {
        let (cosines, sines) = angles.split_at_mut(turns.len());
        for ((cosine_out, sine_out), &turn) in cosines.iter_mut().zip(sines).zip(turns) {
            let turn = position.wrapping_mul(turn);
            let [cosine, sine] = cosine_and_sine(turn);
            *cosine_out = T::of(cosine);
            *sine_out = T::of(if back { -sine } else { sine });
        }
    }
}

kernel! {
    /// The heads of a row. `angles` has their cosines and sines.
    fn rotate<'a, T>(angles: &'a [T], row: &'a mut [T]) -> () {
        let (cosines, sines) = angles.split_at(angles.len() / 2);
        for head in row.chunks_exact_mut(angles.len()) {
            let (low, high) = head.split_at_mut(cosines.len());
            let half = low.len();
            let (cosines, sines, high) = (&cosines[..half], &sines[..half], &mut high[..half]);
            for i in 0..half {
                let (x, y) = (low[i], high[i]);
                (low[i], high[i]) = (x * cosines[i] - y * sines[i], y * cosines[i] + x * sines[i]);
            }
        }
    }
}

static SOURCE: KernelSource = kernels("rotary.cu", include_str!("../cuda/rotary.cu"));

/// Widest head on a GPU: the frequencies are an argument by value.
const MAX_HEAD: usize = 512;

fn defines(act: &'static str, head: usize, width: usize) -> Vec<Define> {
    vec![
        Define::Word("ACT", act),
        Define::Number("HEAD", head as i64),
        vec_define(width),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published settings of Llama 3.1.
    const LLAMA_3_1: RotaryEmbedding = RotaryEmbedding {
        base: 500_000.0,
        scaling: Some(RopeScaling {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_positions: 8192,
        }),
    };

    #[test]
    fn angles_are_those_of_the_library() {
        for pair_turn in [0, 1, 1 << 40, 0x1234_5678_9abc_def0, u64::MAX / 3, u64::MAX] {
            for position in [0_u64, 1, 2, 7, 100, 8191, 1 << 20, u64::from(u32::MAX)] {
                let turn = position.wrapping_mul(pair_turn);
                let angle = turn as f64 / TURN * std::f64::consts::TAU;
                let [cosine, sine] = cosine_and_sine(turn);
                // The library's angle is rounded, up to 2π.
                assert!((cosine - angle.cos()).abs() < 2e-15, "cos {angle}: {cosine}");
                assert!((sine - angle.sin()).abs() < 2e-15, "sin {angle}: {sine}");
            }
        }
    }

    #[test]
    fn frequencies_are_powers_of_the_base() {
        let plain = RotaryEmbedding {
            scaling: None,
            ..LLAMA_3_1
        };
        let found = plain.frequencies(128).unwrap();
        let turns = plain.turns(128).unwrap();
        assert_eq!((found.len(), found[0]), (64, 1.0));
        for (i, (found, turn)) in found.iter().zip(turns).enumerate() {
            let expected = 500_000.0_f64.powf(-2.0 * i as f64 / 128.0);
            assert!(
                (found / expected - 1.0).abs() < 1e-14,
                "{i}: {found:e}, {expected:e}"
            );
            let angle = turn as f64 / TURN * std::f64::consts::TAU;
            assert!(
                (angle / expected - 1.0).abs() < 1e-11,
                "{i}: {angle:e}, {expected:e}"
            );
        }
    }

    /// Each of the three kinds, as `transformers` computes them in f32.
    #[test]
    fn long_waves_turn_slower() {
        let plain = RotaryEmbedding {
            scaling: None,
            ..LLAMA_3_1
        };
        let (plain, scaled) = (
            plain.frequencies(128).unwrap(),
            LLAMA_3_1.frequencies(128).unwrap(),
        );
        let (mut kept, mut divided, mut mixed) = (0, 0, 0);
        for (&before, &after) in plain.iter().zip(&scaled) {
            let wavelength = std::f64::consts::TAU / before;
            if wavelength < 8192.0 / 4.0 {
                assert_eq!(after, before);
                kept += 1;
            } else if wavelength > 8192.0 {
                assert_eq!(after, before / 8.0);
                divided += 1;
            } else {
                let smooth = (8192.0 / wavelength - 1.0) / 3.0;
                let expected = (1.0 - smooth) * before / 8.0 + smooth * before;
                assert!((after / expected - 1.0).abs() < 1e-14, "{after:e}, {expected:e}");
                mixed += 1;
            }
        }
        assert_eq!((kept, mixed, divided), (29, 6, 29));
    }

    #[test]
    fn settings_without_meaning_are_refused() {
        let words = |embedding: RotaryEmbedding, head| embedding.frequencies(head).unwrap_err().to_string();
        assert!(words(LLAMA_3_1, 7).contains("a head has 7 channels, expected an even number above 0"));
        for base in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let embedding = RotaryEmbedding { base, scaling: None };
            assert!(words(embedding, 8).contains("is not a valid rotary embedding"));
        }
        let scaling = LLAMA_3_1.scaling.map(|scaling| RopeScaling {
            high_freq_factor: scaling.low_freq_factor,
            ..scaling
        });
        assert!(
            words(RotaryEmbedding { scaling, ..LLAMA_3_1 }, 8).contains("is not a valid rotary embedding")
        );
    }
}
