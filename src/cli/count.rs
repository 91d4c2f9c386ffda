//! Numbers of things, in words.

use std::fmt::Display;

/// `1 worker`, `2 workers`.
#[must_use]
pub fn counted(number: impl Copy + Display + PartialEq + From<u8>, noun: &str) -> String {
    let plural = if number == 1.into() { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_no_plural() {
        let words = [0_u32, 1, 2].map(|number| counted(number, "rank"));
        assert_eq!(words, ["0 ranks", "1 rank", "2 ranks"]);
    }
}
