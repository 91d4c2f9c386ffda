//! Batch normalisation (Ioffe & Szegedy 2015) with gain and bias, over rows that may lie on several ranks.
//!
//! Each direction is two operations with a sum over the ranks between them: sums of this rank's rows, then what needs
//! the sums of all. Statistics are f64, so that their variance may be the difference of two sums.

use super::cpu::kernel::runs_in;
use super::cpu::stored::Stored;
use super::{Cpu, Operation, expect_len};
use crate::memory::{Buffer, DeviceError};

/// Added to the variance.
const EPSILON: f64 = 1e-5;

/// `sums = [Σ x | Σ x² | rows]` over this rank's rows, which may be none
#[derive(Clone, Debug)]
pub struct BatchNormSums {
    /// `[R, C]`
    pub inp: Buffer,
    /// `[2·C + 1]`, f64
    pub sums: Buffer,
}

/// `out = (inp − mean)/√(variance + ε) · weight + bias`, by columns
#[derive(Clone, Debug)]
pub struct BatchNormForward {
    /// `[R, C]`
    pub inp: Buffer,
    /// `[2·C + 1]`, f64: of [`BatchNormSums`], of all ranks
    pub sums: Buffer,
    /// `[C]`
    pub weight: Buffer,
    /// `[C]`
    pub bias: Buffer,
    /// `[R, C]`
    pub out: Buffer,
}

/// `dsums = [Σ dout | Σ dout · x̂]` over this rank's rows, which are also this rank's gradients of bias and weight
#[derive(Clone, Debug)]
pub struct BatchNormBackwardSums {
    /// `[R, C]`
    pub dout: Buffer,
    /// `[R, C]`
    pub inp: Buffer,
    /// `[2·C + 1]`, f64: of forward
    pub sums: Buffer,
    /// `[2·C]`, f64
    pub dsums: Buffer,
    /// `[C]`
    pub dweight: Buffer,
    /// `[C]`
    pub dbias: Buffer,
    /// Add to `dweight` instead of overwriting it.
    pub accumulate_dweight: bool,
    /// Add to `dbias` instead of overwriting it.
    pub accumulate_dbias: bool,
}

/// `dinp = weight/√(variance + ε) · (dout − mean(dout) − x̂ · mean(dout · x̂))`, means over the rows of all ranks
#[derive(Clone, Debug)]
pub struct BatchNormBackward {
    /// `[R, C]`
    pub dout: Buffer,
    /// `[R, C]`
    pub inp: Buffer,
    /// `[2·C + 1]`, f64: of forward
    pub sums: Buffer,
    /// `[2·C]`, f64: of [`BatchNormBackwardSums`], of all ranks
    pub dsums: Buffer,
    /// `[C]`
    pub weight: Buffer,
    /// `[R, C]`
    pub dinp: Buffer,
}

impl Operation for BatchNormSums {
    const NAME: &'static str = "batch_norm_sums";

    runs_in!(inp);
}

impl Operation for BatchNormForward {
    const NAME: &'static str = "batch_norm_forward";

    runs_in!(inp);
}

impl Operation for BatchNormBackwardSums {
    const NAME: &'static str = "batch_norm_backward_sums";

    runs_in!(inp);
}

impl Operation for BatchNormBackward {
    const NAME: &'static str = "batch_norm_backward";

    runs_in!(inp);
}

/// Mean and 1/√(variance + ε) of each column.
struct Statistics {
    columns: Vec<[f64; 2]>,
    rows: f64,
}

impl Statistics {
    fn of(sums: &[f64]) -> Self {
        let channels = sums.len() / 2;
        let rows = sums[2 * channels];
        let column = |c: usize| {
            let mean = sums[c] / rows;
            // A rounding error may take it below zero.
            let variance = (sums[channels + c] / rows - mean * mean).max(0.0);
            [mean, 1.0 / (variance + EPSILON).sqrt()]
        };
        Self {
            columns: (0..channels).map(column).collect(),
            rows,
        }
    }
}

/// Number of channels of `sums`; refuses sizes that do not fit it.
fn channels(
    op: &'static str,
    sums: &Buffer,
    rows: &[(&str, &Buffer)],
    columns: &[(&str, &Buffer)],
) -> Result<usize, DeviceError> {
    let channels = sums.len() / 2;
    expect_len(op, "sums", sums.len(), 2 * channels.max(1) + 1)?;
    for (name, buffer) in columns {
        expect_len(op, name, buffer.len(), channels)?;
    }
    let len = rows[0].1.len();
    for (name, buffer) in rows {
        expect_len(op, name, buffer.len(), len.next_multiple_of(channels))?;
    }
    Ok(channels)
}

impl BatchNormSums {
    fn compute<S: Stored>(&self, _: &Cpu) -> Result<(), DeviceError> {
        let channels = channels(Self::NAME, &self.sums, &[("inp", &self.inp)], &[])?;
        let (inp, mut sums) = (self.inp.host::<S>()?, self.sums.host_mut::<f64>()?);
        sums.fill(0.0);
        for row in inp.chunks_exact(channels) {
            for (c, x) in row.iter().enumerate() {
                let x = x.to_f64();
                sums[c] += x;
                sums[channels + c] += x * x;
            }
        }
        sums[2 * channels] = (inp.len() / channels) as f64;
        Ok(())
    }
}

impl BatchNormForward {
    fn compute<S: Stored>(&self, _: &Cpu) -> Result<(), DeviceError> {
        let rows = [("inp", &self.inp), ("out", &self.out)];
        let columns = [("weight", &self.weight), ("bias", &self.bias)];
        let channels = channels(Self::NAME, &self.sums, &rows, &columns)?;
        let statistics = Statistics::of(&self.sums.host::<f64>()?);
        let (inp, mut out) = (self.inp.host::<S>()?, self.out.host_mut::<S>()?);
        let (weight, bias) = (self.weight.host::<S>()?, self.bias.host::<S>()?);
        for (x, out) in inp.chunks_exact(channels).zip(out.chunks_exact_mut(channels)) {
            for (c, [mean, scale]) in statistics.columns.iter().enumerate() {
                let normalised = (x[c].to_f64() - mean) * scale;
                out[c] = S::of(normalised * weight[c].to_f64() + bias[c].to_f64());
            }
        }
        Ok(())
    }
}

impl BatchNormBackwardSums {
    fn compute<S: Stored>(&self, _: &Cpu) -> Result<(), DeviceError> {
        let rows = [("inp", &self.inp), ("dout", &self.dout)];
        let columns = [("dweight", &self.dweight), ("dbias", &self.dbias)];
        let channels = channels(Self::NAME, &self.sums, &rows, &columns)?;
        expect_len(Self::NAME, "dsums", self.dsums.len(), 2 * channels)?;
        let statistics = Statistics::of(&self.sums.host::<f64>()?);
        let (inp, dout) = (self.inp.host::<S>()?, self.dout.host::<S>()?);
        let mut dsums = self.dsums.host_mut::<f64>()?;
        dsums.fill(0.0);
        for (x, d) in inp.chunks_exact(channels).zip(dout.chunks_exact(channels)) {
            for (c, [mean, scale]) in statistics.columns.iter().enumerate() {
                dsums[c] += d[c].to_f64();
                dsums[channels + c] += d[c].to_f64() * (x[c].to_f64() - mean) * scale;
            }
        }
        let (dbias, dweight) = dsums.split_at(channels);
        add_to::<S>(&self.dbias, dbias, self.accumulate_dbias)?;
        add_to::<S>(&self.dweight, dweight, self.accumulate_dweight)
    }
}

fn add_to<S: Stored>(target: &Buffer, sums: &[f64], accumulate: bool) -> Result<(), DeviceError> {
    for (target, sum) in target.host_mut::<S>()?.iter_mut().zip(sums) {
        let before = if accumulate { target.to_f64() } else { 0.0 };
        *target = S::of(before + sum);
    }
    Ok(())
}

impl BatchNormBackward {
    fn compute<S: Stored>(&self, _: &Cpu) -> Result<(), DeviceError> {
        let rows = [("inp", &self.inp), ("dout", &self.dout), ("dinp", &self.dinp)];
        let channels = channels(Self::NAME, &self.sums, &rows, &[("weight", &self.weight)])?;
        expect_len(Self::NAME, "dsums", self.dsums.len(), 2 * channels)?;
        let statistics = Statistics::of(&self.sums.host::<f64>()?);
        let (inp, dout, weight) = (
            self.inp.host::<S>()?,
            self.dout.host::<S>()?,
            self.weight.host::<S>()?,
        );
        let dsums = self.dsums.host::<f64>()?;
        let (dmeans, dnormalised) = dsums.split_at(channels);
        let mut dinp = self.dinp.host_mut::<S>()?;
        let inputs = inp.chunks_exact(channels).zip(dout.chunks_exact(channels));
        for ((x, d), dinp) in inputs.zip(dinp.chunks_exact_mut(channels)) {
            for (c, [mean, scale]) in statistics.columns.iter().enumerate() {
                let normalised = (x[c].to_f64() - mean) * scale;
                let centred = d[c].to_f64() - (dmeans[c] + normalised * dnormalised[c]) / statistics.rows;
                dinp[c] = S::of(weight[c].to_f64() * scale * centred);
            }
        }
        Ok(())
    }
}
