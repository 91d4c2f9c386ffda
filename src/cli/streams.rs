//! Values of the settings that speak of streams, ranks, words and signals.

use std::collections::{BTreeMap, BTreeSet};

use ddp_launcher::{SignalScope, StreamSet, StreamsByRank, signal_name};
use nix::sys::signal::Signal;

/// Words of a filter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Words(pub Vec<String>);

/// Signals by number, in the order in which they were given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Signals(pub Vec<i32>);

/// `--output`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputStyle {
    /// Lines of all ranks, each behind a prefix.
    Prefixed,
    /// The bytes of one rank.
    Raw,
}

/// `prefixed` or `raw`.
pub fn output_style(text: &str) -> Result<OutputStyle, String> {
    match text {
        "prefixed" => Ok(OutputStyle::Prefixed),
        "raw" => Ok(OutputStyle::Raw),
        _ => Err("expected `prefixed` or `raw`".to_owned()),
    }
}

/// `0` none, `1` stdout, `2` stderr, `3` both; for all ranks, or `rank:set,…` by local rank.
pub fn streams_by_rank(text: &str) -> Result<StreamsByRank, String> {
    const EXPECTED: &str = "expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), for all workers or by local rank, for example `3` or `0:3,10:1`";
    let set = |text: &str| {
        let digit = ["0", "1", "2", "3"]
            .iter()
            .position(|digit| *digit == text.trim());
        let bits = digit.ok_or_else(|| EXPECTED.to_owned())?;
        Ok::<_, String>(StreamSet {
            stdout: bits & 1 != 0,
            stderr: bits & 2 != 0,
        })
    };
    if !text.contains(':') {
        return set(text).map(StreamsByRank::All);
    }
    let mut sets = BTreeMap::new();
    for pair in text.split(',').filter(|pair| !pair.trim().is_empty()) {
        let (rank, streams) = pair.split_once(':').ok_or(EXPECTED)?;
        let rank: u32 = rank.trim().parse().map_err(|_| EXPECTED)?;
        if sets.insert(rank, set(streams)?).is_some() {
            return Err(format!("local rank {rank} is given more than once"));
        }
    }
    Ok(StreamsByRank::Listed(sets))
}

/// `0,1,5`: ranks, separated by commas; nothing means none.
pub fn ranks(text: &str) -> Result<BTreeSet<u32>, String> {
    let rank = |part: &str| {
        part.trim()
            .parse()
            .map_err(|_| "expected ranks, separated by commas, for example `0,1`".to_owned())
    };
    text.split(',')
        .filter(|part| !part.trim().is_empty())
        .map(rank)
        .collect()
}

/// Words, separated by commas; `,,` is a comma in a word. An empty word would match every line, and is left out.
pub fn words(text: &str) -> Result<Words, String> {
    let (mut words, mut word) = (Vec::new(), String::new());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c != ',' || chars.next_if_eq(&',').is_some() {
            word.push(c);
        } else {
            words.push(std::mem::take(&mut word));
        }
    }
    words.push(word);
    words.retain(|word| !word.is_empty());
    Ok(Words(words))
}

/// `group` or `rank`.
pub fn signal_scope(text: &str) -> Result<SignalScope, String> {
    match text {
        "group" => Ok(SignalScope::Group),
        "rank" => Ok(SignalScope::Rank),
        _ => Err("expected `group` or `rank`".to_owned()),
    }
}

/// `SIGTERM,INT,10`: names with or without `SIG`, or numbers.
pub fn signals(text: &str) -> Result<Signals, String> {
    let mut numbers = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let upper = part.to_ascii_uppercase();
        let name = if upper.starts_with("SIG") {
            upper
        } else {
            format!("SIG{upper}")
        };
        let signal = match part.parse::<i32>() {
            Ok(number) => Signal::try_from(number).ok(),
            Err(_) => name.parse::<Signal>().ok(),
        };
        let signal = signal.ok_or_else(|| {
            format!(
                "`{part}` is not a signal: expected names separated by commas, for example `SIGTERM,SIGUSR1`"
            )
        })?;
        let number = signal as i32;
        if matches!(
            signal,
            Signal::SIGKILL
                | Signal::SIGSTOP
                | Signal::SIGCHLD
                | Signal::SIGSEGV
                | Signal::SIGILL
                | Signal::SIGFPE
        ) {
            return Err(format!("{} cannot be caught", signal_name(number)));
        }
        if !numbers.contains(&number) {
            numbers.push(number);
        }
    }
    Ok(Signals(numbers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_a_number_for_all_or_by_rank() {
        let both = StreamSet {
            stdout: true,
            stderr: true,
        };
        assert_eq!(streams_by_rank("3"), Ok(StreamsByRank::All(both)));
        let listed = StreamsByRank::Listed(BTreeMap::from([
            (
                0,
                StreamSet {
                    stdout: true,
                    stderr: false,
                },
            ),
            (10, both),
        ]));
        assert_eq!(streams_by_rank("0:1,10:3"), Ok(listed), "ranks of two digits too");
        for bad in ["", "4", "x", "0:4", "a:1", "0:1,2", "1:1,1:2"] {
            assert!(streams_by_rank(bad).is_err(), "`{bad}` was taken");
        }
    }

    #[test]
    fn lists_are_separated_by_commas() {
        assert_eq!(ranks("0, 2,11"), Ok(BTreeSet::from([0, 2, 11])));
        assert_eq!(ranks(""), Ok(BTreeSet::new()));
        assert!(ranks("0-3").is_err());
        assert_eq!(
            words("loss,error here"),
            Ok(Words(vec!["loss".into(), "error here".into()]))
        );
        assert_eq!(
            words("a,,b,c,,"),
            Ok(Words(vec!["a,b".into(), "c,".into()])),
            "as torchrun"
        );
    }

    #[test]
    fn signals_have_names_and_numbers() {
        assert_eq!(signals("SIGTERM,usr1,2"), Ok(Signals(vec![15, 10, 2])));
        assert_eq!(signals(""), Ok(Signals(vec![])));
        for bad in ["SIGNOPE", "0", "99", "KILL", "SIGCHLD"] {
            assert!(signals(bad).is_err(), "`{bad}` was taken");
        }
    }
}
