//! The form of the table of keys: what a row says, and the macros that make types, rows and words of one text.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use ddp_proto::printable;
use serde::de::DeserializeOwned;

use super::source::Value;

/// A row of the table.
pub(super) struct Key {
    pub(super) path: &'static str,
    /// What the key does: the comment of its field.
    pub(super) about: &'static str,
    /// The default as JSON.
    pub(super) default: Option<&'static str>,
    /// `null` is a value too. It is the default where no other is given.
    pub(super) is_nullable: bool,
    pub(super) allowed: Allowed,
}

impl Key {
    pub(super) const fn is_required(&self) -> bool {
        self.default.is_none() && !self.is_nullable
    }
}

/// The values of a key.
pub(super) enum Allowed {
    /// `true` or `false`.
    Flag,
    /// A whole number of this range.
    Whole(RangeInclusive<u64>),
    /// A finite number: its description, and the test of it as f32.
    Number(&'static str, fn(f32) -> bool),
    /// One of these words, each with its meaning.
    Word(&'static [(&'static str, &'static str)]),
    /// Any value that passes the test, with its description.
    Form(&'static str, fn(&Value) -> bool),
}

use Allowed::{Flag, Form, Number, Whole, Word};

/// Larger sizes are mistakes; the bound keeps products of sizes far from overflow.
const SIZE: Allowed = Whole(1..=1 << 24);
/// Ranks along an axis, chunks of a rank, layers, heads or threads.
pub(super) const DEGREE: Allowed = Whole(1..=1 << 12);
pub(super) const STEPS: Allowed = Whole(1..=1 << 40);
pub(super) const NOT_NEGATIVE: Allowed = Number("a number, 0 or more", |x| x >= 0.0);
pub(super) const BELOW_ONE: Allowed = Number("a number from 0 to below 1", |x| (0.0..1.0).contains(&x));
pub(super) const MIB: Allowed = Number("a number above 0, at most 65536", |x| x > 0.0 && x <= 65_536.0);
pub(super) const SECONDS: Allowed = Number("a number above 0, at most 86400", |x| x > 0.0 && x <= 86_400.0);

/// A type of fields, with the values of a key whose row names no others.
pub(super) trait KeyValue {
    const ALLOWED: Allowed;
    const IS_NULLABLE: bool = false;
}

impl<T: KeyValue> KeyValue for Option<T> {
    const ALLOWED: Allowed = T::ALLOWED;
    const IS_NULLABLE: bool = true;
}

impl KeyValue for bool {
    const ALLOWED: Allowed = Flag;
}

impl KeyValue for u64 {
    const ALLOWED: Allowed = Whole(0..=Self::MAX);
}

impl KeyValue for usize {
    const ALLOWED: Allowed = SIZE;
}

impl KeyValue for f32 {
    const ALLOWED: Allowed = Number("a number above 0", |x| x > 0.0);
}

impl KeyValue for f64 {
    const ALLOWED: Allowed = f32::ALLOWED;
}

impl KeyValue for String {
    const ALLOWED: Allowed = Form(
        "a name for a directory: not empty, without `/` and control characters, not starting with a dot",
        |value| matches!(value, Value::Text(name) if !name.is_empty() && !name.contains('/') && !name.starts_with('.') && printable::is_name(name)),
    );
}

impl KeyValue for PathBuf {
    const ALLOWED: Allowed = Form("the path of a directory", is_path);
}

pub(super) fn is_read_as<T: DeserializeOwned>(value: &Value) -> bool {
    serde_json::from_value::<T>(value.json()).is_ok()
}

pub(super) fn is_path(value: &Value) -> bool {
    matches!(value, Value::Text(text) if !text.is_empty()) && !is_for_a_shell(value)
}

/// A path, or a list with one, in which only a shell would expand `~` or a variable.
pub(super) fn is_for_a_shell(value: &Value) -> bool {
    match value {
        Value::Text(text) => text.starts_with('~') || text.split('/').any(|part| part.starts_with('$')),
        Value::List(nodes) => nodes.iter().any(|node| is_for_a_shell(&node.value)),
        _ => false,
    }
}

/// The values as an error message describes them.
impl fmt::Display for Allowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Flag => f.write_str("`true` or `false`"),
            Whole(range) => write!(f, "a whole number, {} or more", range.start()),
            Word(words) => {
                let words: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
                write!(f, "`{}`", words.join("` or `"))
            }
            Number(description, _) | Form(description, _) => f.write_str(description),
        }
    }
}

/// Makes enums whose variants are the words of a key: `Variant = "word",`, each with its meaning as a comment.
macro_rules! words {
    ($(
        $(#[doc = $about:literal])+
        $name:ident { $( $(#[doc = $what:literal])+ $variant:ident = $word:literal, )+ }
    )+) => { $(
        $(#[doc = $about])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum $name { $( $(#[doc = $what])+ #[serde(rename = $word)] $variant, )+ }

        impl $name {
            /// The words of the key.
            pub const WORDS: &'static [&'static str] = &[$($word),+];
        }

        impl KeyValue for $name {
            const ALLOWED: Allowed = Allowed::Word(&[$(($word, concat!($($what),+))),+]);
        }
    )+ };
}

/// Makes the types of sections, and `TABLES`, a list of rows for each of them, from lines such as
/// `name: Type = default, values;`. Default and values may be left out. A field `name { Type };` is a section.
macro_rules! sections {
    ($(
        $(#[doc = $about:literal])+
        $name:ident at $path:literal { $(
            $(#[doc = $what:literal])+
            $field:ident $({ $section:ty })? $(: $type:ty $(= $default:tt)? $(, $allowed:expr)?)? ;
        )+ }
    )+) => {
        $(
            $(#[doc = $about])+
            #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
            #[serde(deny_unknown_fields)]
            pub struct $name { $( $(#[doc = $what])+ pub $field: $($section)? $($type)?, )+ }
        )+

        /// The rows of each section, in the order of the sections' types. A section itself has no row.
        pub(super) static TABLES: &[&[Option<Key>]] = &[$(
            &[$( row!($path, $field, [$($what),+] $({ $section })? $(: $type $(= $default)? $(, $allowed)?)?) ),+]
        ),+];
    };
}

/// A row of the table, for the macro above.
macro_rules! row {
    ($path:literal, $field:ident, [$($what:literal),+] { $section:ty }) => {
        None
    };
    ($path:literal, $field:ident, [$($what:literal),+] : $type:ty $(= $default:tt)? $(, $allowed:expr)?) => {
        Some(Key {
            path: concat!($path, stringify!($field)),
            about: concat!($($what),+),
            default: only(&[$(stringify!($default))?]),
            is_nullable: <$type as KeyValue>::IS_NULLABLE,
            allowed: allowed!($type $(, $allowed)?),
        })
    };
}

/// The element of a list of one.
pub(super) const fn only(list: &[&'static str]) -> Option<&'static str> {
    match list {
        [one] => Some(*one),
        _ => None,
    }
}

/// The values that a row names, else those of its type.
macro_rules! allowed {
    ($type:ty) => {
        <$type as KeyValue>::ALLOWED
    };
    ($type:ty, $own:expr) => {
        $own
    };
}

pub(super) use {allowed, row, sections, words};
