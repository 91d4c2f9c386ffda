//! Numbers of things, in words.

/// `1 worker`, `2 workers`.
#[must_use]
pub fn counted(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_no_plural() {
        let words = [0, 1, 2].map(|number| counted(number, "rank"));
        assert_eq!(words, ["0 ranks", "1 rank", "2 ranks"]);
    }
}
