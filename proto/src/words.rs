//! Numbers in sentences, for people: here because daemon, launcher and worker tell of the same things.

use std::fmt::Display;
use std::ops::Add;

/// How many there are: `1 rank`, `2 ranks`, `3 micro-batches`.
pub fn counted(number: impl Copy + Display + PartialEq + From<u8>, noun: &str) -> String {
    let plural = match noun.ends_with("ch") {
        _ if number == 1.into() => "",
        true => "es",
        false => "s",
    };
    format!("{number} {noun}{plural}")
}

/// Which ones, of `numbers` in ascending order: `no rank`, `rank 1`, `ranks 1, 2`, `ranks 0 to 40, 42`.
pub fn numbered<N>(noun: &str, numbers: &[N]) -> String
where
    N: Copy + Display + PartialEq + Add<Output = N> + From<u8>,
{
    let runs = numbers.chunk_by(|number, next| *number + 1.into() == *next);
    let told = |run: &[N]| match run {
        [first, _, .., last] => format!("{first} to {last}"),
        [first, second] => format!("{first}, {second}"),
        _ => run.iter().map(N::to_string).collect(),
    };
    let runs: Vec<String> = runs.map(told).collect();
    match numbers {
        [] => format!("no {noun}"),
        [one] => format!("{noun} {one}"),
        _ => format!("{noun}s {}", runs.join(", ")),
    }
}

/// A whole number in groups of three: `1,234,567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A size in binary units: `12.3 MiB`.
pub fn bytes(number: u64) -> String {
    scaled(number, 1024.0, "i")
}

/// A size in decimal units, as papers and data sheets have it: `12.9 MB`.
pub fn decimal_bytes(number: u64) -> String {
    scaled(number, 1000.0, "")
}

fn scaled(number: u64, base: f64, infix: &str) -> String {
    let value = number as f64;
    let mut units = [(4, "T"), (3, "G"), (2, "M"), (1, "K")].into_iter();
    match units.find(|(power, _)| value >= base.powi(*power)) {
        Some((power, prefix)) => format!("{:.1} {prefix}{infix}B", value / base.powi(power)),
        None => format!("{number} B"),
    }
}

/// A word of a command, as a shell takes it.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// A rate in three digits: `987`, `45.7k`, `432k`, `1.23M`.
pub fn rate(number: f64) -> String {
    const UNITS: [&str; 6] = ["", "k", "M", "G", "T", "P"];
    let (mut value, mut unit) = (number, 0);
    // 999.5 would be rounded to a fourth digit.
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1e3;
        unit += 1;
    }
    let decimals = match value {
        _ if unit == 0 => 0,
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}{}", UNITS[unit])
}

/// A length of time, as exact as it is short: `0:42`, `12:34`, `1h02m`, `3d04h`.
pub fn duration(seconds: f64) -> String {
    let seconds = seconds.round().max(0.0) as u64;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours) {
        (0, 0) => format!("{minutes}:{:02}", seconds % 60),
        (0, _) => format!("{hours}h{:02}m", minutes % 60),
        _ => format!("{days}d{:02}h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_no_plural() {
        let words = [0_u32, 1, 2].map(|number| counted(number, "rank"));
        assert_eq!(words, ["0 ranks", "1 rank", "2 ranks"]);
        let words = [1_u64, 3].map(|number| counted(number, "micro-batch"));
        assert_eq!(words, ["1 micro-batch", "3 micro-batches"]);
    }

    #[test]
    fn three_and_more_in_a_row_are_told_by_their_ends() {
        assert_eq!(numbered::<u32>("rank", &[]), "no rank");
        assert_eq!(numbered("rank", &[3_u32]), "rank 3");
        assert_eq!(numbered("local rank", &[0_usize, 1]), "local ranks 0, 1");
        assert_eq!(
            numbered("rank", &[0_usize, 1, 2, 4, 6, 7]),
            "ranks 0 to 2, 4, 6, 7"
        );
        assert_eq!(numbered("rank", &[2_usize, 1, 0]), "ranks 2, 1, 0");
    }

    #[test]
    fn large_numbers_are_readable() {
        assert_eq!(
            [0, 999, 1000, 1_234_567].map(grouped),
            ["0", "999", "1,000", "1,234,567"]
        );
        assert_eq!(
            [12, 2048, 10_485_760, 3 << 40].map(bytes),
            ["12 B", "2.0 KiB", "10.0 MiB", "3.0 TiB"]
        );
        assert_eq!(
            [999, 12_900_000, 160_000_000_000].map(decimal_bytes),
            ["999 B", "12.9 MB", "160.0 GB"]
        );
        assert_eq!(
            [0.0, 7.4, 999.4, 999.6, 9999.0, 45_678.0, 432_100.0, 1_234_567.0].map(rate),
            ["0", "7", "999", "1.00k", "10.0k", "45.7k", "432k", "1.23M"]
        );
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(quoted("--lr=3e-4"), "--lr=3e-4");
        assert_eq!(quoted("it's"), r"'it'\''s'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn the_longer_the_less_exact() {
        assert_eq!(
            [f64::NAN, 0.4, 62.0, 3599.6, 3723.0, 273_600.0].map(duration),
            ["0:00", "0:00", "1:02", "1h00m", "1h02m", "3d04h"]
        );
    }
}
