//! Parameters as data, and their first values: stateless, so a part of a parameter initialises alone, under any layout.
//!
//! Global element `e` of the parameter with key `k` under seed `s` is a pure function of `(s, k, e)`: word `e mod 4` of the
//! Philox block with counter `(e div 4, stream of k)` and key `s`, made normal by Box–Muller. The stream is the first 8
//! bytes, little-endian, of BLAKE3 of the key in "derive key" mode. The logarithm, sine and cosine are polynomials in plain
//! f64 arithmetic, so the bits do not depend on a system's mathematical library.

use std::f64::consts::FRAC_PI_2;
use std::ops::Range;

use super::{Cut, Region, Run};
use crate::device::DType;
use crate::mesh::{Axis, GRADIENTS};
use crate::ops::cpu::kernel::ln;
use crate::ops::philox;

/// Index of a parameter in its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParamId(pub usize);

/// Number of a group in its model: parameters that are gathered and released together. A tied weight is a group of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub usize);

/// What the ranks along one axis of the mesh hold of a parameter, and of its gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AxisRole {
    /// Each rank holds another part of the parameter, or another parameter.
    Cut,
    /// Each rank holds all of it and computes its whole gradient: nothing is to be summed.
    EqualGradients,
    /// Each rank holds all of it and computes a part of its gradient: the parts are to be summed.
    PartialGradients,
}

impl AxisRole {
    /// Of a parameter that is not cut itself: gradients are partial along [`GRADIENTS`], and the ranks of a pipeline hold other
    /// parameters.
    pub fn replicated() -> [Self; Axis::ALL.len()] {
        Axis::ALL.map(|axis| match axis {
            Axis::Pipeline => Self::Cut,
            summed if GRADIENTS.contains(&summed) => Self::PartialGradients,
            _ => Self::EqualGradients,
        })
    }
}

/// All that is known of a parameter before it exists.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Unique in the model and the same under every layout, as in GPT-2's published checkpoints:
    /// `h.0.attn.c_attn.weight`. It seeds the first values, and names the tensors of a checkpoint.
    pub key: String,
    /// Shape of the whole parameter.
    pub global_shape: Vec<usize>,
    /// How the parameter is divided over ranks; none: all of it is on every rank.
    pub cut: Option<Cut>,
    /// What the ranks along each of [`Axis::ALL`] hold: who sums its gradient, owns and writes it follows from that.
    pub roles: [AxisRole; Axis::ALL.len()],
    /// Type in the parameter arena.
    pub dtype: DType,
    /// How an element gets its first value, from (seed, key, global element) alone.
    pub init: Init,
    /// Weight decay applies: matrices yes, norms and biases no.
    pub decay: bool,
    /// Group that it is gathered with.
    pub group: GroupId,
    /// Rows of each projection that it fuses: Llama's queries, keys and values, or gate and up. Empty: it is one.
    pub projections: Vec<usize>,
}

impl ParamSpec {
    /// Shape of this rank's part.
    pub fn local_shape(&self) -> Vec<usize> {
        match &self.cut {
            Some(cut) => cut.local_shape(&self.global_shape),
            None => self.global_shape.clone(),
        }
    }

    /// Number of elements of this rank's part.
    pub fn len(&self) -> usize {
        self.local_shape().iter().product()
    }

    /// The boxes of the whole parameter that this rank's part consists of.
    pub fn regions(&self) -> Vec<Region> {
        match &self.cut {
            Some(cut) => cut.regions(&self.global_shape),
            None => vec![Region::whole(&self.shape_on_disk())],
        }
    }

    /// Elements `range` of this rank's part, in order, as runs of neighbours.
    pub fn runs(&self, range: Range<usize>) -> Vec<Run> {
        match &self.cut {
            Some(cut) => cut.runs(&self.global_shape, range),
            None => vec![Run {
                region: 0,
                in_region: range.start,
                global: range.start,
                local: range,
            }],
        }
    }

    /// The global shape as files have it.
    pub(crate) fn shape_on_disk(&self) -> Vec<u64> {
        self.global_shape.iter().map(|&len| len as u64).collect()
    }
}

/// First value of the elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All the same.
    Constant(f32),
    /// Normal with mean 0, by Philox of (seed, key, global element).
    Normal {
        /// Standard deviation.
        std: f32,
    },
}

/// Context of the hash: keeps these streams apart from all others that share the seed.
const CONTEXT: &str = "ddp-worker first values of a parameter";

/// The stream of a parameter, by its key.
fn stream(key: &str) -> [u32; 2] {
    let hash = blake3::derive_key(CONTEXT, key.as_bytes());
    let word = |at: usize| u32::from_le_bytes([hash[at], hash[at + 1], hash[at + 2], hash[at + 3]]);
    [word(0), word(4)]
}

/// Writes the first values of elements `range` of a whole parameter into `out`.
///
/// # Panics
/// If the range is not within the parameter, or `out` has another length.
pub fn fill_init(spec: &ParamSpec, seed: u64, range: Range<usize>, out: &mut [f32]) {
    let elements = spec.global_shape.iter().product();
    assert!(range.end <= elements, "{range:?} outside `{}`", spec.key);
    assert_eq!(range.len(), out.len(), "elements of `{}`", spec.key);
    match spec.init {
        Init::Constant(value) => out.fill(value),
        Init::Normal { std } => {
            let key = [seed as u32, (seed >> 32) as u32];
            let [low, high] = stream(&spec.key);
            let mut element = range.start as u64;
            let mut rest = out;
            while !rest.is_empty() {
                let block = element / 4;
                let lane = (element % 4) as usize;
                let take = rest.len().min(4 - lane);
                let (now, later) = rest.split_at_mut(take);
                let counter = [block as u32, (block >> 32) as u32, low, high];
                let [a, b, c, d] = philox(counter, key);
                let normals = [box_muller(a, b), box_muller(c, d)];
                for (out, normal) in now.iter_mut().zip(&normals.as_flattened()[lane..]) {
                    *out = (f64::from(std) * normal) as f32;
                }
                element += take as u64;
                rest = later;
            }
        }
    }
}

/// Box & Muller 1958, with the radius from `(0, 1]` and the angle from `[0, 2π)`.
fn box_muller(radius: u32, angle: u32) -> [f64; 2] {
    const UNIT: f64 = 1.0 / 4_294_967_296.0;
    let radius = (-2.0 * ln((f64::from(radius) + 1.0) * UNIT)).sqrt();
    let [sin, cos] = sin_cos_turn(angle);
    [radius * cos, radius * sin]
}

/// Sine and cosine of `turn / 2³²` of a whole turn. The reduction to a quarter is exact, in integers.
fn sin_cos_turn(turn: u32) -> [f64; 2] {
    const QUARTER: f64 = 1_073_741_824.0;
    // Nearest quarter, and what is left of it: within an eighth of a turn.
    let quarter = turn.wrapping_add(1 << 29) >> 30;
    let rest = turn.wrapping_sub(quarter << 30) as i32;
    let x = f64::from(rest) / QUARTER * FRAC_PI_2;
    let square = x * x;
    // |x| ≤ π/4: the terms left out are below x¹⁷/17! and x¹⁶/16!, 10⁻¹⁵.
    let mut sin = 1.0;
    for k in (1..8).rev() {
        sin = 1.0 - sin * square / f64::from(2 * k * (2 * k + 1));
    }
    let sin = x * sin;
    let mut cos = 1.0;
    for k in (1..8).rev() {
        cos = 1.0 - cos * square / f64::from((2 * k - 1) * 2 * k);
    }
    match quarter & 3 {
        0 => [sin, cos],
        1 => [cos, -sin],
        2 => [-sin, -cos],
        _ => [-cos, sin],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DType;
    use crate::model::{Cut, GroupId};

    fn spec(len: usize, init: Init) -> ParamSpec {
        ParamSpec {
            key: "w".into(),
            global_shape: vec![len],
            cut: None,
            roles: AxisRole::replicated(),
            dtype: DType::F32,
            init,
            decay: true,
            group: GroupId(0),
            projections: Vec::new(),
        }
    }

    #[test]
    fn sine_and_cosine_agree_with_the_library() {
        for i in 0..10_000_u32 {
            let turn = i.wrapping_mul(429_497);
            let angle = f64::from(turn) / 4_294_967_296.0 * std::f64::consts::TAU;
            let [sin, cos] = sin_cos_turn(turn);
            assert!(
                (sin - angle.sin()).abs() < 2e-15 && (cos - angle.cos()).abs() < 2e-15,
                "{angle}"
            );
        }
    }

    #[test]
    fn a_shard_initialises_alone() {
        let spec = spec(1000, Init::Normal { std: 0.02 });
        let mut whole = vec![0.0; 1000];
        fill_init(&spec, 42, 0..1000, &mut whole);
        for range in [0..1, 1..4, 3..9, 5..6, 333..667, 998..1000] {
            let mut part = vec![0.0; range.len()];
            fill_init(&spec, 42, range.clone(), &mut part);
            assert_eq!(part, whole[range.clone()], "{range:?}");
        }
    }

    /// Other values would be another start of every run.
    #[test]
    fn the_stream_of_a_key_is_fixed() {
        assert_eq!(stream("h.0.attn.c_attn.weight"), [0x005b_647f, 0x843b_0007]);
    }

    #[test]
    fn a_cut_parameter_has_the_values_of_the_whole_one() {
        let whole = ParamSpec {
            global_shape: vec![5, 12],
            ..spec(60, Init::Normal { std: 1.0 })
        };
        let mut expected = vec![0.0; 60];
        fill_init(&whole, 42, 0..60, &mut expected);
        let mut found = vec![0.0; 60];
        for index in 0..2 {
            let cut = Cut::new(&[5, 12], 1, &[4, 6, 2], index, 2);
            let part = ParamSpec {
                cut: Some(cut),
                ..whole.clone()
            };
            for run in part.runs(0..part.len()) {
                let range = run.global..run.global + run.local.len();
                fill_init(&part, 42, range.clone(), &mut found[range]);
            }
        }
        assert_eq!(found, expected);
    }

    #[test]
    fn seeds_and_parameters_are_independent_streams() {
        let draw = |key: &str, seed| {
            let spec = ParamSpec {
                key: key.into(),
                ..spec(64, Init::Normal { std: 1.0 })
            };
            let mut out = vec![0.0; 64];
            fill_init(&spec, seed, 0..64, &mut out);
            out
        };
        assert_eq!(draw("h.0.w", 1), draw("h.0.w", 1));
        assert_ne!(draw("h.0.w", 1), draw("h.1.w", 1));
        assert_ne!(draw("h.0.w", 1), draw("h.0.w", 2));
        assert_ne!(draw("h.0.w", 1), draw("h.0.w", 1 + (1 << 32)));
    }

    #[test]
    fn normals_have_the_moments_of_a_normal() {
        const N: usize = 1 << 18;
        let mut x = vec![0.0; N];
        fill_init(&spec(N, Init::Normal { std: 0.5 }), 7, 0..N, &mut x);
        let moment = |k: i32| x.iter().map(|&x| (f64::from(x) / 0.5).powi(k)).sum::<f64>() / N as f64;
        assert!(moment(1).abs() < 0.01, "mean {}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.02, "variance {}", moment(2));
        assert!(moment(3).abs() < 0.04, "skew {}", moment(3));
        assert!((moment(4) - 3.0).abs() < 0.1, "kurtosis {}", moment(4));
    }

    #[test]
    fn constants_fill() {
        let mut x = vec![0.0; 5];
        fill_init(&spec(9, Init::Constant(1.0)), 7, 2..7, &mut x);
        assert_eq!(x, [1.0; 5]);
    }
}
