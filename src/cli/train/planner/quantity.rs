//! Sizes and rates as people and data sheets write them.

/// What a size is.
const EXPECTED_SIZE: &str = "expected a size, for example `80GB` or `24GiB`";

/// Bytes, at least one: `80GB`, `74.5GiB`, `512M`. Units of a thousand, or with an `i` of 1,024.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let bytes = size_or_zero(text)?;
    (bytes > 0)
        .then_some(bytes)
        .ok_or_else(|| EXPECTED_SIZE.to_owned())
}

/// The same, or nothing: `0` needs no unit.
pub(super) fn size_or_zero(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text).ok_or(EXPECTED_SIZE)?;
    if unit.is_empty() && number > 0.0 {
        return Err(format!("without a unit; {EXPECTED_SIZE}"));
    }
    let unit = unit.strip_suffix('B').unwrap_or(unit);
    let factor = match unit.strip_suffix('i') {
        Some(prefix) if !prefix.is_empty() => 1024_f64.powi(exponent(prefix).ok_or(EXPECTED_SIZE)?),
        Some(_) => return Err(EXPECTED_SIZE.to_owned()),
        None => 1000_f64.powi(exponent(unit).ok_or(EXPECTED_SIZE)?),
    };
    let bytes = number * factor;
    if bytes > MAX_BYTES {
        return Err(EXPECTED_SIZE.to_owned());
    }
    Ok(bytes as u64)
}

/// More than any device has.
const MAX_BYTES: f64 = 1e18;

/// Bytes a second: `450GB/s`, or in bits as networks are sold: `400Gb/s`, `400Gbit/s`.
pub(super) fn bytes_a_second(text: &str) -> Result<f64, String> {
    const EXPECTED: &str = "expected bytes or bits a second, for example `450GB/s` or `400Gb/s`";
    let parse = || {
        let (number, unit) = split(text)?;
        let unit = unit.strip_suffix("/s").or_else(|| unit.strip_suffix("ps"))?;
        let (prefix, bits) = match (unit.strip_suffix('B'), unit.strip_suffix("bit")) {
            (Some(prefix), _) => (prefix, 8.0),
            (None, Some(prefix)) => (prefix, 1.0),
            (None, None) => (unit.strip_suffix('b')?, 1.0),
        };
        Some(number * 1000_f64.powi(exponent(prefix)?) * bits / 8.0)
    };
    parse()
        .filter(|rate| *rate > 0.0)
        .ok_or_else(|| EXPECTED.to_owned())
}

/// Fewer operations a second than any device makes: a unit is missing.
const MIN_OPERATIONS: f64 = 1e9;

/// Floating-point operations a second: `989T`, `989TFLOP/s`, `1.2e12`.
pub(super) fn operations_a_second(text: &str) -> Result<f64, String> {
    const EXPECTED: &str =
        "expected floating-point operations a second, 1G or more, for example `989T` or `175GFLOP/s`";
    let parse = || {
        let (number, unit) = split(text)?;
        let endings = ["FLOP/s", "FLOPS", "FLOPs", "flop/s", "flops"];
        let prefix = endings.iter().find_map(|ending| unit.strip_suffix(ending));
        Some(number * 1000_f64.powi(exponent(prefix.unwrap_or(unit))?))
    };
    parse()
        .filter(|rate| *rate >= MIN_OPERATIONS)
        .ok_or_else(|| EXPECTED.to_owned())
}

/// A share of a whole: above 0, at most 1.
pub(super) fn share(text: &str) -> Result<f64, String> {
    let number = text
        .parse::<f64>()
        .ok()
        .filter(|share| *share > 0.0 && *share <= 1.0);
    number.ok_or_else(|| "expected a share above 0 and at most 1, for example `0.4`".to_owned())
}

/// The number, which is finite and not negative, and what follows it.
fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    // An exponent belongs to the number: `9.89e14`.
    let ends = (1..=text.len()).rev().filter(|end| text.is_char_boundary(*end));
    let mut parsed =
        ends.filter_map(|end| Some((text[..end].parse::<f64>().ok()?, text[end..].trim_start())));
    parsed
        .next()
        .filter(|(number, _)| number.is_finite() && *number >= 0.0)
}

/// Power of a thousand, or of 1,024.
fn exponent(prefix: &str) -> Option<i32> {
    match prefix {
        "" => Some(0),
        "k" | "K" => Some(1),
        "M" => Some(2),
        "G" => Some(3),
        "T" => Some(4),
        "P" => Some(5),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(size("80GB"), Ok(80_000_000_000));
        assert_eq!(size("80 GiB"), Ok(80 << 30));
        assert_eq!(size("1.5M"), Ok(1_500_000));
        assert_eq!(size("4096B"), Ok(4096));
        let bare = size("24").unwrap_err();
        assert_eq!(
            bare,
            "without a unit; expected a size, for example `80GB` or `24GiB`"
        );
        for bad in [
            "",
            "GB",
            "80 gigabytes",
            "-1GB",
            "0",
            "iB",
            "infGB",
            "nan",
            "1e30",
            "80GB/s",
        ] {
            assert!(size(bad).is_err(), "{bad}");
        }
        assert_eq!(
            ["0", "0GB", "2GB"].map(size_or_zero),
            [Ok(0), Ok(0), Ok(2_000_000_000)]
        );
        assert_eq!(size_or_zero("2"), Err(size("2").unwrap_err()));
    }

    #[test]
    fn a_small_b_is_a_bit() {
        assert_eq!(bytes_a_second("450GB/s"), Ok(450e9));
        assert_eq!(bytes_a_second("400Gb/s"), Ok(50e9));
        assert_eq!(bytes_a_second("400Gbps"), Ok(50e9));
        assert_eq!(bytes_a_second("3.2 Tbit/s"), Ok(400e9));
        for bad in ["450", "450GB", "fast", "0GB/s", "-1GB/s", "450G/s"] {
            assert!(bytes_a_second(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn operations() {
        for text in ["989T", "989TFLOP/s", "989 TFLOPS", "989e12"] {
            assert_eq!(operations_a_second(text), Ok(989e12), "{text}");
        }
        assert_eq!(operations_a_second("175 GFLOP/s"), Ok(175e9));
        for bad in ["", "T", "0T", "989X", "989", "1e-300T"] {
            assert!(operations_a_second(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn shares() {
        assert_eq!(share("0.4"), Ok(0.4));
        assert!(
            ["0", "1.1", "-1", "40%"]
                .into_iter()
                .all(|bad| share(bad).is_err())
        );
    }
}
