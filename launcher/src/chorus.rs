//! Errors that several native workers of a node word alike, byte by byte: the console shows them once.
//!
//! Ranks that meet a mistake of the configuration or of the data all say so, and would push the failure report off the
//! screen. Nothing is lost by it: a line is left out only if the very same one was shown of another rank of the same
//! generation; log files have all of them, and the report names all ranks that say the same.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use ddp_proto::ids::GlobalRank;

/// What the first line of an error begins with.
const ERROR: &[u8] = b"error: ";
/// What its other lines begin with.
const INDENT: &[u8] = b"  ";
/// Most lines that are remembered; further ones are all shown.
const MAX_LINES: usize = 64;
/// A longer line is not remembered.
const MAX_LINE_BYTES: usize = 4 << 10;

/// The errors of one generation on one node, shared by the streams of its workers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chorus {
    /// Who said a line first.
    said: Arc<Mutex<HashMap<Box<[u8]>, GlobalRank>>>,
}

impl Chorus {
    /// One rank's part in it, for lines that will be shown.
    pub(crate) fn voice(&self, rank: GlobalRank) -> Voice {
        Voice {
            chorus: self.clone(),
            rank,
            in_error: false,
        }
    }
}

/// The standard error of one rank.
#[derive(Debug)]
pub(crate) struct Voice {
    chorus: Chorus,
    rank: GlobalRank,
    /// The last line was one of an error.
    in_error: bool,
}

impl Voice {
    /// True of a line of an error that was shown of another rank already.
    pub(crate) fn repeats(&mut self, line: &[u8]) -> bool {
        self.in_error = line.starts_with(ERROR) || (self.in_error && line.starts_with(INDENT));
        if !self.in_error || line.len() > MAX_LINE_BYTES {
            return false;
        }
        let mut said = self.chorus.said.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(first) = said.get(line) {
            return *first != self.rank;
        }
        if said.len() < MAX_LINES {
            said.insert(line.into(), self.rank);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(voice: &mut Voice, lines: &[&str]) -> Vec<String> {
        let fresh = lines.iter().filter(|line| !voice.repeats(line.as_bytes()));
        fresh.map(ToString::to_string).collect()
    }

    #[test]
    fn only_what_another_rank_has_said_in_the_same_words_is_left_out() {
        let chorus = Chorus::default();
        let [mut one, mut two, mut three] = [0, 1, 2].map(|rank| chorus.voice(GlobalRank(rank)));
        let common = ["error: no data", "  hint: give some"];
        assert_eq!(shown(&mut one, &common), common);
        assert_eq!(
            shown(&mut one, &common),
            common,
            "it says it twice, and is heard twice"
        );
        assert_eq!(shown(&mut two, &common), [""; 0]);
        let own = [
            "error: no data",
            "  hint: another disk",
            "error: rank 2 is out of memory",
            "  hint: give some",
        ];
        assert_eq!(shown(&mut three, &own), own[1..3]);
    }

    #[test]
    fn lines_that_belong_to_no_error_are_always_shown() {
        let chorus = Chorus::default();
        let lines = ["  hint: give some", "warning: slow", "", "error", "step 1"];
        for rank in 0..3 {
            assert_eq!(shown(&mut chorus.voice(GlobalRank(rank)), &lines), lines);
        }
    }

    #[test]
    fn far_too_many_errors_are_all_shown() {
        let chorus = Chorus::default();
        let lines: Vec<String> = (0..=MAX_LINES).map(|line| format!("error: {line}")).collect();
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        assert_eq!(shown(&mut chorus.voice(GlobalRank(0)), &lines).len(), lines.len());
        assert_eq!(
            shown(&mut chorus.voice(GlobalRank(1)), &lines),
            [lines[MAX_LINES]]
        );
        let long = format!("error: {}", "x".repeat(MAX_LINE_BYTES));
        for rank in 0..2 {
            assert_eq!(shown(&mut chorus.voice(GlobalRank(rank)), &[&long]).len(), 1);
        }
    }
}
