//! What is wrong with a value of the configuration, in one form for all printers.

/// A value that cannot be used. [`super::Source::locate`] adds the line or the `--set` that it came from.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}{}", hint.as_ref().map_or_else(String::new, |hint| format!("\n  hint: {hint}")))]
pub struct Problem {
    /// The dotted key of the value, empty if it is the file as a whole.
    pub key: String,
    /// What was found and what is expected, with the key in backticks.
    pub what: String,
    /// The next step, where there is an obvious one.
    pub hint: Option<String>,
}

impl Problem {
    /// A problem without a hint.
    pub fn new(key: impl Into<String>, what: impl Into<String>) -> Self {
        Self {
            key: key.into(),
            what: what.into(),
            hint: None,
        }
    }

    /// The same with a hint.
    #[must_use]
    pub fn with_hint(self, hint: impl Into<String>) -> Self {
        self.with_optional_hint(Some(hint.into()))
    }

    /// The same with a hint, where there is one.
    #[must_use]
    pub fn with_optional_hint(self, hint: Option<String>) -> Self {
        Self { hint, ..self }
    }
}

/// A [`Problem`], and where the value came from.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {problem}")]
pub struct ConfigError {
    /// `train.yaml:12`, or the `--set` that gave the value.
    pub place: String,
    /// What is wrong.
    pub problem: Problem,
}

/// The multiples of `divisor` around `value` that are above 0.
pub fn nearest_multiples(value: usize, divisor: usize) -> String {
    let above = value.next_multiple_of(divisor);
    match value / divisor * divisor {
        0 => above.to_string(),
        below => format!("{below} or {above}"),
    }
}
