//! Shows an error once that several native workers of a node print, if their texts are equal byte by byte.
//!
//! A mistake in the configuration or the data makes every rank print the same error, which would push the failure report
//! off the screen. A line is left out only if the console has shown the same error of another rank of this generation up
//! to this line; if the error then continues differently, its lines are shown after all. Log files contain all lines,
//! and the report names all ranks with the same error.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use ddp_proto::ids::GlobalRank;

/// The first line of an error begins with this.
const ERROR: &[u8] = b"error: ";
/// Its other lines begin with this.
const INDENT: &[u8] = b"  ";
/// Most lines that are remembered; all further ones are shown.
const MAX_LINES: usize = 64;
/// Bytes of an error beyond this length are always shown.
const MAX_ERROR_BYTES: usize = 4 << 10;

/// The errors of one generation on one node, shared by the streams of its workers.
#[derive(Clone, Debug, Default)]
pub(crate) struct RepeatedErrors {
    /// The rank that first printed a line, by the error up to its end: the same hint may follow different errors.
    printed: Arc<Mutex<HashMap<Box<[u8]>, GlobalRank>>>,
}

impl RepeatedErrors {
    /// The filter for standard error of one rank.
    pub(crate) fn of_rank(&self, rank: GlobalRank) -> RankErrors {
        RankErrors {
            repeated: self.clone(),
            rank,
            error: Vec::new(),
            shown: 0,
        }
    }

    /// True if another rank printed `error` already; otherwise remembers that `rank` did.
    fn is_known(&self, error: &[u8], rank: GlobalRank) -> bool {
        let mut printed = self.printed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(first) = printed.get(error) {
            return *first != rank;
        }
        if printed.len() < MAX_LINES {
            printed.insert(error.into(), rank);
        }
        false
    }
}

/// The standard error of one rank.
#[derive(Debug)]
pub(crate) struct RankErrors {
    repeated: RepeatedErrors,
    rank: GlobalRank,
    /// The error so far, line by line; empty if the last line belonged to none.
    error: Vec<u8>,
    /// Bytes of it that were shown.
    shown: usize,
}

impl RankErrors {
    /// `None` holds `line` back: it belongs to an error that another rank has printed up to here. Otherwise gives the
    /// lines held back before, to be shown before `line`. A line that is not whole belongs to no error.
    pub(crate) fn release(&mut self, line: &[u8], is_whole: bool) -> Option<Vec<u8>> {
        let begins = line.starts_with(ERROR);
        let goes_on = !begins && !self.error.is_empty() && line.starts_with(INDENT);
        if !goes_on {
            self.error.clear();
            self.shown = 0;
        }
        let before = self.error.len();
        if is_whole && (begins || goes_on) && before + line.len() < MAX_ERROR_BYTES {
            self.error.extend_from_slice(line);
            self.error.push(b'\n');
            if self.repeated.is_known(&self.error, self.rank) {
                return None;
            }
            let shown = std::mem::replace(&mut self.shown, self.error.len());
            return Some(self.error[shown..before].to_vec());
        }
        let held = self.error.split_off(std::mem::take(&mut self.shown));
        self.error.clear();
        Some(held)
    }

    /// True while lines of an error are held back.
    pub(crate) fn holds_back(&self) -> bool {
        self.error.len() > self.shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(errors: &mut RankErrors, lines: &[&str]) -> Vec<String> {
        let mut shown = Vec::new();
        for line in lines {
            if let Some(held) = errors.release(line.as_bytes(), true) {
                shown.extend(String::from_utf8_lossy(&held).lines().map(str::to_owned));
                shown.push((*line).to_owned());
            }
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
            let update = errors.release(b"error: 10 %", false);
            assert_eq!(update, Some(vec![]), "a line that is overwritten");
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
