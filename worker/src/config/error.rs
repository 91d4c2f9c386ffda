//! What is wrong with a configuration, and where.

use std::fmt;

/// A configuration that cannot be used: one thing, its place, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// `train.yaml:12`, or the `--set` that gave the value.
    pub place: String,
    /// What was found and what is expected, with the key in backticks.
    pub problem: String,
    /// The next step, where there is an obvious one.
    pub hint: Option<String>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.problem)?;
        match &self.hint {
            Some(hint) => write!(f, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for ConfigError {}
