//! All that does not fit, as one error: what differs, and what to write in the YAML.

use std::fmt::Display;
use std::path::Path;

use super::PretrainedError;

/// Differences that are named one by one: a wrong number of channels makes every tensor one.
const MOST_NAMED: usize = 3;

/// What was found so far.
#[derive(Default)]
pub(super) struct Misfit {
    differences: Vec<String>,
    /// Lines of YAML.
    changes: Vec<String>,
    /// What to do about a difference that no line of the configuration can mend.
    instead: Option<&'static str>,
}

impl Misfit {
    /// One more difference.
    pub(super) fn differs(&mut self, what: String) {
        self.differences.push(what);
    }

    /// One that makes it another architecture.
    pub(super) fn is_foreign(&mut self, what: String) {
        self.differs_for_good(
            what,
            "they are weights of another architecture than this build trains",
        );
    }

    /// One that no line of the configuration can mend, and what can.
    pub(super) fn differs_for_good(&mut self, what: String, instead: &'static str) {
        self.instead.get_or_insert(instead);
        self.differs(what);
    }

    /// What would fit.
    pub(super) fn write(&mut self, key: &str, value: impl Display) {
        let line = format!("`{key}: {value}`");
        if !self.changes.contains(&line) {
            self.changes.push(line);
        }
    }

    /// The error, if there is a difference.
    pub(super) fn settle(self, path: &Path) -> Result<(), PretrainedError> {
        if self.differences.is_empty() {
            return Ok(());
        }
        let more = self.differences.len().saturating_sub(MOST_NAMED);
        let mut words: Vec<String> = self.differences.into_iter().take(MOST_NAMED).collect();
        if more > 0 {
            words.push(format!("and {more} more"));
        }
        let hint = match self.instead {
            Some(instead) => instead.to_owned(),
            None if self.changes.is_empty() => {
                "the sizes agree: are the weights complete, and of this kind of model?".to_owned()
            }
            None => format!("write {} in section `model`", self.changes.join(", ")),
        };
        Err(PretrainedError::Misfit {
            path: path.to_owned(),
            differences: words.join("; "),
            hint,
        })
    }
}
