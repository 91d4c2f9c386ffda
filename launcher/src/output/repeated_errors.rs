//! Shows an error once that several workers of a node print, if their texts are equal byte by byte.
//!
//! A mistake in the configuration, the data or the program makes every rank print the same error, which would push the
//! failure report off the screen. An error is held back until it is whole, so that those of several ranks do not mix, and
//! then shown, or left out if the console has shown it of another rank of this generation. Log files contain all lines.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use ddp_proto::ids::GlobalRank;
use ddp_proto::words::numbered;

/// The first line of a native worker's error begins with this.
const ERROR: &[u8] = b"error: ";
/// The first line of Python's. Its last one is not indented.
const TRACEBACK: &[u8] = b"Traceback (most recent call last):";
/// The other lines of an error begin with this.
const INDENT: &[u8] = b"  ";
/// The last line after Ctrl-C. It ends each rank somewhere else: one traceback of them is enough.
const INTERRUPT: &[u8] = b"\nKeyboardInterrupt\n";
/// Between a traceback and that of an exception that followed from it: begins so, with empty lines around.
const LINKS: [&[u8]; 2] = [
    b"During handling of the above exception",
    b"The above exception was",
];
/// Most errors that are remembered; all further ones are shown.
const MAX_ERRORS: usize = 64;
/// Bytes of an error beyond this length are always shown.
const MAX_ERROR_BYTES: usize = 16 << 10;

/// The errors of one generation on one node, shared by the streams of its workers.
#[derive(Clone, Debug, Default)]
pub(crate) struct RepeatedErrors {
    /// By error: the ranks that printed it; it was shown of the first.
    printed: Arc<Mutex<HashMap<Vec<u8>, Vec<u32>>>>,
}

impl RepeatedErrors {
    /// The filter for a stream of one rank.
    pub(crate) fn of_rank(&self, rank: GlobalRank, is_native: bool) -> RankErrors {
        RankErrors {
            repeated: self.clone(),
            rank: rank.0,
            is_native,
            prefix: format!("[rank{rank}]: ").into_bytes(),
            error: Vec::new(),
            is_open: false,
            was_repeat: false,
        }
    }

    /// Which ranks printed the same traceback, in words. The report names native ones.
    pub(crate) fn repeats(&self) -> BTreeSet<String> {
        let printed = self.printed.lock().unwrap_or_else(PoisonError::into_inner);
        let mut repeats = BTreeSet::new();
        for (error, ranks) in &*printed {
            if error.starts_with(TRACEBACK) && ranks.len() > 1 {
                let mut ranks = ranks.clone();
                ranks.sort_unstable();
                repeats.insert(numbered("rank", &ranks) + " printed the same traceback");
            }
        }
        repeats
    }

    /// True if another rank printed `error` already; otherwise remembers that `rank` did.
    fn is_known(&self, error: Vec<u8>, rank: u32) -> bool {
        let mut printed = self.printed.lock().unwrap_or_else(PoisonError::into_inner);
        if printed.len() >= MAX_ERRORS && !printed.contains_key(&error) {
            return false;
        }
        let ranks = printed.entry(error).or_default();
        if !ranks.contains(&rank) {
            ranks.push(rank);
        }
        ranks[0] != rank
    }
}

/// A stream of one rank.
#[derive(Debug)]
pub(crate) struct RankErrors {
    repeated: RepeatedErrors,
    rank: u32,
    pub(crate) is_native: bool,
    /// What PyTorch writes before each line of a traceback.
    prefix: Vec<u8>,
    /// The error so far, line by line; empty if the last line belonged to none.
    error: Vec<u8>,
    /// It is a traceback without its last line: nothing of it is shown yet.
    pub(crate) is_open: bool,
    /// The last error was left out, and nothing followed.
    was_repeat: bool,
}

impl RankErrors {
    /// Takes a whole line. Gives what is to be shown now.
    pub(crate) fn take(&mut self, line: &[u8]) -> Vec<u8> {
        let text = line.strip_prefix(&*self.prefix).unwrap_or(line);
        let begins = text == TRACEBACK || self.is_native && text.starts_with(ERROR);
        let goes_on = !begins && !self.error.is_empty() && text.starts_with(INDENT);
        let ends = !begins && !goes_on && self.is_open;
        let belongs = begins || goes_on || ends;
        let mut shown = if goes_on || ends { Vec::new() } else { self.rest() };
        let is_link = text.is_empty() || LINKS.iter().any(|link| text.starts_with(link));
        if self.was_repeat && is_link {
            return shown;
        }
        self.was_repeat &= belongs;
        self.is_open = belongs && if begins { text == TRACEBACK } else { self.is_open };
        let place = if belongs { &mut self.error } else { &mut shown };
        place.extend_from_slice(line);
        place.push(b'\n');
        if ends || self.error.len() > MAX_ERROR_BYTES {
            return self.rest();
        }
        shown
    }

    /// The error so far, unless another rank has printed it: nothing more of it comes.
    pub(crate) fn rest(&mut self) -> Vec<u8> {
        let error = std::mem::take(&mut self.error);
        if error.is_empty() {
            return error;
        }
        let lines = error.split(|byte| *byte == b'\n');
        let lines = lines.map(|line| line.strip_prefix(&*self.prefix).unwrap_or(line));
        let mut key = lines.collect::<Vec<_>>().join(&b'\n');
        if key.ends_with(INTERRUPT) {
            key = INTERRUPT.to_vec();
        }
        (self.is_open, self.was_repeat) = (false, self.repeated.is_known(key, self.rank));
        if self.was_repeat { Vec::new() } else { error }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_rank(repeated: &RepeatedErrors, rank: u32, is_native: bool) -> RankErrors {
        repeated.of_rank(GlobalRank(rank), is_native)
    }

    fn shown(mut errors: RankErrors, lines: &[&str]) -> Vec<String> {
        let mut shown: Vec<u8> = lines
            .iter()
            .flat_map(|line| errors.take(line.as_bytes()))
            .collect();
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
        let lines: Vec<String> = (0..=MAX_ERRORS).map(|line| format!("error: {line}")).collect();
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        assert_eq!(shown(of_rank(&repeated, 0, true), &lines), lines);
        assert_eq!(shown(of_rank(&repeated, 1, true), &lines), [lines[MAX_ERRORS]]);
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
        assert_eq!(slow.take(TRACEBACK), b"", "they do not mix");
        assert!(slow.is_open);
        let first = traceback(0, "ValueError: no data");
        assert_eq!(printed(0, &first), first);
        let links = [
            "",
            "During handling of the above exception, another exception occurred:",
        ]
        .map(str::to_owned);
        for (rank, left_out) in [(1, 6), (2, 10)] {
            let [same, next] = ["ValueError: no data", "KeyError: 'x'"].map(|error| traceback(rank, error));
            let chained = [&same[..], &links[..], &next, &["step 1".to_owned()]].concat();
            assert_eq!(printed(rank, &chained), chained[left_out..]);
        }
        let other = traceback(4, "ValueError: rank 4 has no data");
        assert_eq!(printed(4, &other), other);
        assert_eq!(slow.rest(), [TRACEBACK, b"\n"].concat(), "its stream has ended");
        let words = [
            "ranks 0 to 2 printed the same traceback",
            "ranks 1, 2 printed the same traceback",
        ];
        assert!(repeated.repeats().iter().eq(words.iter()));
    }

    #[test]
    fn an_interrupt_shows_one_traceback_wherever_the_ranks_are() {
        let repeated = RepeatedErrors::default();
        for (rank, lines) in [(0, 5), (1, 1)] {
            let place = format!("  File \"a.py\", line {rank}");
            let head = ["epoch 1", "Traceback (most recent call last):", &place, "    x()"];
            let traceback = [&head[..], &["KeyboardInterrupt"]].concat();
            assert_eq!(
                shown(of_rank(&repeated, rank, false), &traceback),
                traceback[..lines]
            );
        }
        assert!(repeated.repeats().is_empty());
    }
}
