//! Shows an error once that several workers of a node print, if their texts are equal byte by byte.
//!
//! A mistake in the configuration, the data or the program makes every rank print the same error, which would push the
//! failure report off the screen. An error is held back until it is whole, so that those of several ranks do not mix. If
//! the console has shown the same error of another rank of this generation, one line replaces a traceback, and a native
//! worker's error is left out. Log files contain all lines.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use ddp_proto::ids::GlobalRank;

/// The first line of a native worker's error begins with this.
const ERROR: &str = "error: ";
/// The first line of Python's. Its last one is not indented.
const TRACEBACK: &str = "Traceback (most recent call last):";
/// The other lines of an error begin with this.
const INDENT: &str = "  ";
/// The last line after Ctrl-C. Each rank's traceback differs then, and one is enough.
const INTERRUPT: &str = "\nKeyboardInterrupt";
/// How the line between two tracebacks of a chain of exceptions begins. Empty lines surround it.
const LINKS: [&str; 2] = [
    "During handling of the above exception",
    "The above exception was",
];
/// Most errors that are remembered; all further ones are shown.
const MAX_ERRORS: usize = 64;
/// Bytes of an error beyond this length are always shown.
const MAX_ERROR_BYTES: usize = 16 << 10;

/// The errors of one generation on one node, shared by the streams of its workers.
#[derive(Clone, Debug, Default)]
pub(crate) struct RepeatedErrors {
    /// By error: the rank of which it was shown.
    printed: Arc<Mutex<BTreeMap<String, u32>>>,
}

impl RepeatedErrors {
    /// The filter for a stream of one rank.
    pub(crate) fn of_rank(&self, rank: GlobalRank, is_native: bool) -> RankErrors {
        RankErrors {
            repeated: self.clone(),
            rank: rank.0,
            is_native,
            prefix: format!("[rank{rank}]: "),
            error: String::new(),
            is_open: false,
        }
    }
}

/// A stream of one rank.
#[derive(Debug)]
pub(crate) struct RankErrors {
    repeated: RepeatedErrors,
    rank: u32,
    pub(crate) is_native: bool,
    /// What PyTorch writes before each line of a traceback.
    prefix: String,
    /// The error so far, which is held back; empty if the last line belonged to none.
    error: String,
    /// The last line of a traceback is still to come.
    is_open: bool,
}

impl RankErrors {
    /// Keeps a whole line if it belongs to an error. Before any other one, the [`rest`](Self::rest) is to be shown.
    pub(crate) fn hold(&mut self, line: &[u8]) -> bool {
        let Ok(line) = str::from_utf8(line) else {
            return false;
        };
        let text = line.strip_prefix(&self.prefix).unwrap_or(line);
        let is_indented = text.starts_with(INDENT);
        let is_link = text.is_empty() || LINKS.iter().any(|link| text.starts_with(link));
        let goes_on = !self.error.is_empty() && (self.is_open || is_indented || is_link);
        let begins = text == TRACEBACK || self.is_native && text.starts_with(ERROR);
        let belongs = (begins || goes_on) && self.error.len() + line.len() < MAX_ERROR_BYTES;
        if belongs {
            self.is_open = text == TRACEBACK || self.is_open && is_indented;
            self.error.extend([line, "\n"]);
        }
        belongs
    }

    /// True while lines are held back.
    pub(crate) fn is_holding(&self) -> bool {
        !self.error.is_empty()
    }

    /// The error so far. If another rank has printed it, one line in place of a traceback, and nothing of a native
    /// worker's, of which the report tells.
    pub(crate) fn rest(&mut self) -> Vec<u8> {
        self.is_open = false;
        let mut error = std::mem::take(&mut self.error);
        if error.is_empty() {
            return Vec::new();
        }
        let mut key = error.replace(&self.prefix, "").trim_end().to_owned();
        if key.ends_with(INTERRUPT) {
            INTERRUPT.clone_into(&mut key);
        }
        let mut printed = self
            .repeated
            .printed
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if printed.len() < MAX_ERRORS || printed.contains_key(&key) {
            let first = *printed.entry(key).or_insert(self.rank);
            if first != self.rank {
                error = format!("the same traceback as rank {first}\n");
                error.truncate(if self.is_native { 0 } else { error.len() });
            }
        }
        error.into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_rank(repeated: &RepeatedErrors, rank: u32, is_native: bool) -> RankErrors {
        repeated.of_rank(GlobalRank(rank), is_native)
    }

    fn shown(mut errors: RankErrors, lines: &[&str]) -> Vec<String> {
        let mut shown = Vec::new();
        for line in lines {
            if !errors.hold(line.as_bytes()) {
                shown.extend([&errors.rest(), line.as_bytes(), b"\n"].concat());
            }
        }
        shown.extend(errors.rest());
        String::from_utf8_lossy(&shown)
            .lines()
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn only_what_another_rank_has_said_in_the_same_words_is_left_out() {
        let repeated = RepeatedErrors::default();
        let common = ["error: no data", "  hint: give some"];
        for _ in 0..2 {
            assert_eq!(
                shown(of_rank(&repeated, 0, true), &common),
                common,
                "it may say it twice"
            );
        }
        let and_more = [&common[..], &["", "step 1"]].concat();
        assert_eq!(shown(of_rank(&repeated, 1, true), &and_more), ["step 1"]);
        for other in [
            ["error: rank 1 has no data", "  hint: give some"],
            ["error: no data", "  hint: another disk"],
            ["  hint: give some", "warning: slow"],
            ["", "error"],
        ] {
            assert_eq!(shown(of_rank(&repeated, 2, true), &other), other);
        }
        assert_eq!(
            shown(of_rank(&repeated, 3, false), &common),
            common,
            "no error of ours"
        );
    }

    #[test]
    fn far_too_many_and_far_too_long_errors_are_shown() {
        let repeated = RepeatedErrors::default();
        for line in 0..=MAX_ERRORS {
            let line = format!("error: {line}");
            assert_eq!(shown(of_rank(&repeated, 0, true), &[&line]), [&*line]);
        }
        for line in [0, MAX_ERRORS] {
            let shown = shown(of_rank(&repeated, 1, true), &[&format!("error: {line}")]);
            assert_eq!(shown.len(), usize::from(line == MAX_ERRORS));
        }
        let long = format!("  {}", "x".repeat(MAX_ERROR_BYTES));
        let lines = ["Traceback (most recent call last):", &long, "  more"];
        assert_eq!(shown(of_rank(&repeated, 0, false), &lines), lines);
    }

    #[test]
    fn equal_tracebacks_are_shown_once_and_whole() {
        let repeated = RepeatedErrors::default();
        let traceback = |rank: u32, error: &str| {
            let lines = [
                "Traceback (most recent call last):",
                "  File \"a.py\", line 1",
                "    x()",
                error,
            ];
            lines.map(|line| format!("[rank{rank}]: {line}"))
        };
        let printed = |rank, lines: &[String]| {
            let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
            shown(of_rank(&repeated, rank, false), &lines)
        };
        let mut slow = of_rank(&repeated, 3, false);
        assert!(slow.hold(TRACEBACK.as_bytes()), "they do not mix");
        let first = traceback(0, "ValueError: no data");
        assert_eq!(printed(0, &first), first);
        let links = [
            "",
            "During handling of the above exception, another exception occurred:",
        ]
        .map(str::to_owned);
        for (rank, left_out) in [(1, 0), (2, 10)] {
            let [same, next] = ["ValueError: no data", "KeyError: 'x'"].map(|error| traceback(rank, error));
            let chained = [&same[..], &links[..], &next, &["step 1".to_owned()]].concat();
            let word = (left_out > 0).then(|| "the same traceback as rank 1".to_owned());
            let expected: Vec<String> = word.into_iter().chain(chained[left_out..].to_vec()).collect();
            assert_eq!(printed(rank, &chained), expected);
        }
        let other = traceback(4, "ValueError: rank 4 has no data");
        assert_eq!(printed(4, &other), other);
        assert_eq!(
            slow.rest(),
            format!("{TRACEBACK}\n").as_bytes(),
            "its stream has ended"
        );
        let again = printed(5, &traceback(5, "ValueError: no data"));
        assert_eq!(again, ["the same traceback as rank 0"]);
    }

    #[test]
    fn an_interrupt_shows_one_traceback_wherever_the_ranks_are() {
        let repeated = RepeatedErrors::default();
        for rank in [0, 1] {
            let place = format!("  File \"a.py\", line {rank}");
            let head = ["epoch 1", "Traceback (most recent call last):", &place, "    x()"];
            let traceback = [&head[..], &["KeyboardInterrupt"]].concat();
            let expected = match rank {
                0 => traceback,
                _ => vec!["epoch 1", "the same traceback as rank 0"],
            };
            let found = shown(
                of_rank(&repeated, rank, false),
                &[&head[..], &["KeyboardInterrupt"]].concat(),
            );
            assert_eq!(found, expected);
        }
    }
}
