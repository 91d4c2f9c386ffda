//! Errors that several native workers of a node word alike, byte by byte: the console shows them once.
//!
//! Ranks that meet a mistake of the configuration or of the data all say so, and would push the failure report off the
//! screen. Nothing is lost by it: a line is left out only if another rank of the same generation was shown with the
//! very same error up to there, and is shown after all if the error goes on in other words. Log files have all of it,
//! and the report names all ranks that say the same.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use ddp_proto::ids::GlobalRank;

/// What the first line of an error begins with.
const ERROR: &[u8] = b"error: ";
/// What its other lines begin with.
const INDENT: &[u8] = b"  ";
/// Most lines that are remembered; further ones are all shown.
const MAX_LINES: usize = 64;
/// What is beyond that in an error is always shown.
const MAX_ERROR_BYTES: usize = 4 << 10;

/// The errors of one generation on one node, shared by the streams of its workers.
#[derive(Clone, Debug, Default)]
pub(crate) struct RepeatedErrors {
    /// Who said a line first, by the error up to its end: the same hint may follow different errors.
    said: Arc<Mutex<HashMap<Box<[u8]>, GlobalRank>>>,
}

impl RepeatedErrors {
    /// One rank's part in it, for lines that will be shown.
    pub(crate) fn of_rank(&self, rank: GlobalRank) -> RankErrors {
        RankErrors {
            repeated: self.clone(),
            rank,
            error: Vec::new(),
            shown: 0,
        }
    }

    /// True if `rank` need not say `error`, since another one has; it is remembered otherwise.
    fn is_known(&self, error: &[u8], rank: GlobalRank) -> bool {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(first) = said.get(error) {
            return *first != rank;
        }
        if said.len() < MAX_LINES {
            said.insert(error.into(), rank);
        }
        false
    }
}

/// The standard error of one rank.
#[derive(Debug)]
pub(crate) struct RankErrors {
    repeated: RepeatedErrors,
    rank: GlobalRank,
    /// The error that is being said, line by line; empty: the last line was none of one.
    error: Vec<u8>,
    /// Bytes of it that were shown of this rank.
    shown: usize,
}

impl RankErrors {
    /// Passes the lines that are to be shown to `show`: none, if `line` is one of an error that another rank has said
    /// up to there, or first those that were held back of it. A line that is not whole belongs to no error.
    pub(crate) fn say(&mut self, line: &[u8], is_whole: bool, mut show: impl FnMut(&[u8])) {
        let begins = line.starts_with(ERROR);
        let goes_on = !begins && !self.error.is_empty() && line.starts_with(INDENT);
        if !goes_on {
            self.error.clear();
            self.shown = 0;
        }
        let is_error = is_whole && (begins || goes_on);
        let fits = self.error.len() + line.len() < MAX_ERROR_BYTES;
        if is_error && fits {
            self.error.extend_from_slice(line);
            self.error.push(b'\n');
            if self.repeated.is_known(&self.error, self.rank) {
                return;
            }
        }
        let held_back = self.error[self.shown..].split_inclusive(|byte| *byte == b'\n');
        held_back.for_each(|held| show(&held[..held.len() - 1]));
        self.shown = self.error.len();
        if !(is_error && fits) {
            show(line);
            self.error.clear();
            self.shown = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(errors: &mut RankErrors, lines: &[&str]) -> Vec<String> {
        let mut shown = Vec::new();
        for line in lines {
            errors.say(line.as_bytes(), true, |line| {
                shown.push(String::from_utf8_lossy(line).into_owned());
            });
        }
        shown
    }

    #[test]
    fn only_what_another_rank_has_said_in_the_same_words_is_left_out() {
        let repeated = RepeatedErrors::default();
        let [mut one, mut two] = [0, 1].map(|rank| repeated.of_rank(GlobalRank(rank)));
        let common = ["error: no data", "  hint: give some"];
        assert_eq!(shown(&mut one, &common), common);
        assert_eq!(
            shown(&mut one, &common),
            common,
            "it says it twice, and is shown twice"
        );
        assert_eq!(shown(&mut two, &common), [""; 0]);
        assert_eq!(shown(&mut two, &["step 1"]), ["step 1"]);
    }

    #[test]
    fn errors_that_have_lines_in_common_are_each_shown_whole() {
        let repeated = RepeatedErrors::default();
        let of = |first: &'static str, last: &'static str| [first, "  of a file", last];
        let base = of("error: no data", "  hint: give some");
        assert_eq!(shown(&mut repeated.of_rank(GlobalRank(0)), &base), base);
        for (rank, other) in [
            (1, of("error: rank 1 has no data", "  hint: give some")),
            (2, of("error: no data", "  hint: another disk")),
        ] {
            assert_eq!(shown(&mut repeated.of_rank(GlobalRank(rank)), &other), other);
        }
        let longer = [&base[..], &["  and a word more"]].concat();
        assert_eq!(shown(&mut repeated.of_rank(GlobalRank(3)), &longer), longer);
    }

    #[test]
    fn lines_that_belong_to_no_error_are_always_shown() {
        let repeated = RepeatedErrors::default();
        let lines = ["  hint: give some", "warning: slow", "", "error", "step 1"];
        for rank in 0..3 {
            assert_eq!(shown(&mut repeated.of_rank(GlobalRank(rank)), &lines), lines);
        }
        for rank in 0..2 {
            let mut errors = repeated.of_rank(GlobalRank(rank));
            let mut seen = 0;
            errors.say(b"error: 10 %", false, |_| seen += 1);
            assert_eq!(seen, 1, "a line that is written over");
        }
    }

    #[test]
    fn far_too_many_errors_are_all_shown() {
        let repeated = RepeatedErrors::default();
        let lines: Vec<String> = (0..=MAX_LINES).map(|line| format!("error: {line}")).collect();
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        assert_eq!(
            shown(&mut repeated.of_rank(GlobalRank(0)), &lines).len(),
            lines.len()
        );
        assert_eq!(
            shown(&mut repeated.of_rank(GlobalRank(1)), &lines),
            [lines[MAX_LINES]]
        );
    }

    #[test]
    fn a_far_too_long_error_is_shown_whole() {
        let repeated = RepeatedErrors::default();
        let long = format!("  {}", "x".repeat(MAX_ERROR_BYTES));
        let lines = ["error: short", &long, "  hint: shorter"];
        for rank in 0..2 {
            assert_eq!(shown(&mut repeated.of_rank(GlobalRank(rank)), &lines), lines);
        }
    }
}
