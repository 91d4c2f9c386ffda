//! How far a result may be from the reference.

use ddp_worker::device::DType;
use half::bf16;

use super::{Kind, Outcome, Tensor};

/// Of products in bf16: how large the difference may be, as a part of the norm of what is expected. To round a result
/// once makes about 1e-3, and a kernel rounds once or twice on the way too.
const RELATIVE_NORM: f64 = 4e-3;

/// Of one element, as a part of itself or of a typical one, whichever is larger: where terms cancel, an element has the
/// error of its terms. The norm hides a single wrong element among many.
const WRONG: f64 = 1.0 / 16.0;

/// Compares a result, of this type on the device, with the reference.
pub(super) fn compare(expected: &[f64], found: &[f64], tensor: &Tensor, dtype: DType) -> Result<(), String> {
    let is_product = matches!(tensor.result, Outcome::Products | Outcome::Rounded);
    if is_product && dtype == DType::Bf16 {
        return tensor
            .sections(expected.len())
            .into_iter()
            .try_for_each(|section| by_norm(expected, found, &section));
    }
    let finite = expected.iter().filter(|x| x.is_finite());
    let size = finite.fold(0.0_f64, |most, x| most.max(x.abs()));
    // Two roundings of the storage apart, and for sums whose terms cancel a part of the largest result.
    let (relative, absolute) = match (tensor.result, dtype) {
        // An optimizer's copies are rounded in the reference too: maybe to the next number of bf16.
        (Outcome::Close, DType::Bf16) if tensor.kind == Kind::Fixed(DType::Bf16) => {
            (1.0 / 128.0, 2e-5 * size)
        }
        (Outcome::Close, DType::Bf16) => (1.0 / 256.0, 2e-5 * size),
        (Outcome::Close, _) => (1e-5, 1e-5 * size),
        (Outcome::Products | Outcome::Rounded, _) => (3e-5, 3e-5 * size),
        (Outcome::Same | Outcome::Exact, _) => (0.0, 0.0),
    };
    // `bf16::from_f64` looks at 20 bits of the mantissa only, and takes more than the half for a half.
    let narrow = |x: f64| match (tensor.result, dtype) {
        (Outcome::Exact, DType::Bf16) => bf16::from_f32(x as f32).to_f64(),
        _ => x,
    };
    for (element, (&expected, &found)) in expected.iter().zip(found).enumerate() {
        let expected = narrow(expected);
        let close = (expected - found).abs() <= relative * expected.abs() + absolute;
        if !close && !same(expected, found) {
            return Err(format!("element {element} is {found:e}, expected {expected:e}"));
        }
    }
    Ok(())
}

/// The same number, also where it is not finite.
fn same(a: f64, b: f64) -> bool {
    a == b || (a.is_nan() && b.is_nan())
}

/// The elements of a section, which its readers take for one tensor.
fn by_norm(expected: &[f64], found: &[f64], section: &[usize]) -> Result<(), String> {
    let pairs = || {
        let each = section
            .iter()
            .map(move |&element| (element, expected[element], found[element]));
        each.filter(|&(_, expected, found)| !same(expected, found) || expected.is_finite())
    };
    let norm = |of: &dyn Fn(f64, f64) -> f64| pairs().map(|(_, a, b)| of(a, b).powi(2)).sum::<f64>().sqrt();
    let (size, difference) = (
        norm(&|expected, _| expected),
        norm(&|expected, found| expected - found),
    );
    let typical = size / (section.len() as f64).sqrt();
    for (element, expected, found) in pairs() {
        let apart = (expected - found).abs();
        if !(apart.is_finite() && apart <= WRONG * expected.abs().max(typical)) {
            return Err(format!("element {element} is {found:e}, expected {expected:e}"));
        }
    }
    if difference <= RELATIVE_NORM * size {
        return Ok(());
    }
    let first = section[0];
    Err(format!(
        "the difference from element {first} on has a norm of {difference:e}, what is expected one of {size:e}"
    ))
}

#[cfg(test)]
mod tests {
    use super::super::numbers::numbers;
    use super::*;

    fn products(found: &[f64]) -> Result<(), String> {
        let tensor = Tensor::new(Kind::Act, numbers(1, 5000)).result(Outcome::Products);
        compare(&tensor.values, found, &tensor, DType::Bf16)
    }

    fn changed(change: impl Fn(usize, f64) -> f64) -> Vec<f64> {
        let values = numbers(1, 5000).into_iter().enumerate();
        values.map(|(i, x)| change(i, x)).collect()
    }

    #[test]
    fn one_rounding_to_bf16_passes() {
        products(&changed(|_, x| bf16::from_f32(x as f32).to_f64())).unwrap();
    }

    #[test]
    fn noise_of_a_hundredth_fails() {
        let noise = numbers(2, 5000);
        // Uniform noise of this width has a standard deviation of 1.
        let noisy = changed(|i, x| x * (1.0 + 0.01 * 3.0_f64.sqrt() * noise[i]));
        assert!(products(&noisy).unwrap_err().contains("a norm of"));
    }

    #[test]
    fn one_wrong_element_fails() {
        let wrong = changed(|i, x| if i == 1234 { x + 0.1 } else { x });
        assert!(products(&wrong).unwrap_err().starts_with("element 1234 is "));
        let not_finite = changed(|i, x| if i == 7 { f64::NAN } else { x });
        assert!(products(&not_finite).unwrap_err().starts_with("element 7 is "));
    }

    /// Noise in a small section, beside a large one.
    #[test]
    fn each_section_of_a_row_is_a_tensor_of_its_own() {
        let noise = numbers(2, 5000);
        let is_small = |i: usize| i % 10 >= 6;
        let values = changed(|i, x| if is_small(i) { 1e-3 * x } else { x });
        let found: Vec<f64> = values
            .iter()
            .enumerate()
            .map(|(i, x)| {
                if is_small(i) {
                    x * (1.0 + 0.02 * noise[i])
                } else {
                    *x
                }
            })
            .collect();
        let whole = Tensor::new(Kind::Act, values.clone()).result(Outcome::Products);
        compare(&values, &found, &whole, DType::Bf16).unwrap();
        let cut = whole.of_sections(vec![6, 4]);
        assert!(compare(&values, &found, &cut, DType::Bf16).is_err());
    }
}
