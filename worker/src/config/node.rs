//! The YAML as a tree in which each value knows where it came from.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

/// Where a value came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// A line of the file, from 1; 0 is the file as a whole.
    Line(u64),
    /// An override, by its index.
    Set(usize),
}

/// A value and its origin.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) value: Value,
    pub(super) origin: Origin,
}

/// A YAML value.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Null,
    Bool(bool),
    /// A whole number, 0 or more.
    Unsigned(u64),
    /// A negative whole number.
    Signed(i64),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// A key of a map, its origin, and its value.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) origin: Origin,
    pub(super) node: Node,
}

impl Node {
    /// Reads one YAML document.
    pub(super) fn parse(text: &str) -> Result<Self, Syntax> {
        let options = serde_saphyr::options! {
            with_snippet: false,
            strict_booleans: true,
            // Refused where the key is known.
            non_finite_float_policy: serde_saphyr::options::NonFiniteFloatPolicy::PassThrough,
        };
        match serde_saphyr::from_str_with_options::<Spanned<Raw>>(text, options) {
            Ok(spanned) => {
                let mut root = from_spanned(spanned);
                if matches!(root.value, Value::Map(_) | Value::Null) {
                    root.origin = Origin::Line(0);
                }
                Ok(root)
            }
            Err(error) => Err(Syntax {
                line: error.location().map_or(0, |l| l.line()),
                message: message_of(&error),
            }),
        }
    }

    /// The value under a dotted path of keys.
    pub(super) fn find(&self, path: &str) -> Option<&Node> {
        path.split('.').try_fold(self, |node, key| node.get(key))
    }

    /// Origin of the longest part of `path` that exists.
    pub(super) fn origin_of(&self, path: &str) -> Origin {
        let mut node = self;
        for key in path.split('.') {
            match node.get(key) {
                Some(next) => node = next,
                None => break,
            }
        }
        node.origin
    }

    /// The same tree, with another origin throughout.
    pub(super) fn with_origin(mut self, origin: Origin) -> Self {
        self.origin = origin;
        self.value = match self.value {
            Value::List(nodes) => Value::List(nodes.into_iter().map(|n| n.with_origin(origin)).collect()),
            Value::Map(entries) => Value::Map(
                entries
                    .into_iter()
                    .map(|e| Entry {
                        origin,
                        node: e.node.with_origin(origin),
                        ..e
                    })
                    .collect(),
            ),
            scalar => scalar,
        };
        self
    }

    /// The dotted path and the value of everything that is no section.
    pub(super) fn entries(&self) -> Vec<(String, String)> {
        let Value::Map(entries) = &self.value else {
            return vec![(String::new(), self.to_string())];
        };
        let mut all = Vec::new();
        for entry in entries {
            for (below, value) in entry.node.entries() {
                let dot = if below.is_empty() { "" } else { "." };
                all.push((format!("{}{dot}{below}", entry.key), value));
            }
        }
        all
    }

    fn get(&self, key: &str) -> Option<&Node> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|e| e.key == key).map(|e| &e.node),
            _ => None,
        }
    }
}

/// As YAML in one line, but for quotes.
impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Value::Null => f.write_str("null"),
            Value::Bool(v) => write!(f, "{v}"),
            Value::Unsigned(v) => write!(f, "{v}"),
            Value::Signed(v) => write!(f, "{v}"),
            Value::Float(v) => write!(f, "{v}"),
            Value::Text(v) => f.write_str(v),
            Value::List(nodes) => {
                let items: Vec<String> = nodes.iter().map(ToString::to_string).collect();
                write!(f, "[{}]", items.join(", "))
            }
            Value::Map(entries) => {
                let entry = |e: &Entry| format!("{}: {}", e.key, e.node);
                let items: Vec<String> = entries.iter().map(entry).collect();
                write!(f, "{{{}}}", items.join(", "))
            }
        }
    }
}

/// Text that is not YAML.
pub(super) struct Syntax {
    /// From 1; 0 where it is not known.
    pub(super) line: u64,
    pub(super) message: String,
}

/// The parser's words, without the place, which is reported in our own form, and without advice to
/// programmers.
fn message_of(error: &serde_saphyr::Error) -> String {
    if let Some(words) = own_words(error) {
        return words;
    }
    let rendered = error.render_with_formatter(&serde_saphyr::UserMessageFormatter);
    let first = rendered.lines().next().unwrap_or("the parser gives no reason");
    let first = first.trim_start_matches("error: ");
    let first = match first.strip_prefix("line ").and_then(|rest| rest.split_once(": ")) {
        Some((_, message)) => message,
        None => first,
    };
    let end = [" at line ", ", set ", "; use "]
        .iter()
        .filter_map(|cut| first.find(cut))
        .min();
    first[..end.unwrap_or(first.len())].to_owned()
}

/// Where the parser's own words are those of its authors.
fn own_words(error: &serde_saphyr::Error) -> Option<String> {
    use serde_saphyr::Error;
    let words = match error {
        Error::AliasError { error, .. } => return own_words(error),
        Error::DuplicateMappingKey { key: Some(key), .. } => return Some(format!("`{key}` is given twice")),
        Error::InvalidScalar { .. } => "a value is not what its tag (`!!int`, say) makes of it",
        // Nothing but keys has to be text here.
        Error::NullIntoString { .. } => "a key is empty",
        Error::Unexpected { .. } => "a key is a list or a section, expected a word",
        Error::MergeValueNotMapOrSeqOfMaps { .. } => "`<<` takes a section, or a list of sections",
        Error::RecursiveReferencesRequireWeakTypes { .. } => "a value contains itself",
        Error::MultipleDocuments { .. } => "`---` begins a second document, and a configuration is one",
        Error::AliasReplayCounterOverflow { .. }
        | Error::AliasReplayLimitExceeded { .. }
        | Error::AliasExpansionLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. }
        | Error::Budget { .. } => "too many values, or too many of them within others",
        _ => return None,
    };
    Some(words.to_owned())
}

/// A value as the parser hands it out.
struct Raw(Value);

fn from_spanned(spanned: Spanned<Raw>) -> Node {
    Node {
        value: spanned.value.0,
        origin: Origin::Line(spanned.referenced.line()),
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor).map(Raw)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(Value::Unsigned(v))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(u64::try_from(v).map_or(Value::Signed(v), Value::Unsigned))
    }

    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        Ok(Value::Float(v))
    }

    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(Value::Text(v.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut nodes = Vec::new();
        while let Some(spanned) = seq.next_element::<Spanned<Raw>>()? {
            nodes.push(from_spanned(spanned));
        }
        Ok(Value::List(nodes))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(key) = map.next_key::<Spanned<String>>()? {
            let origin = Origin::Line(key.referenced.line());
            let mut node = from_spanned(map.next_value()?);
            // A section is where its name stands, not where its first key does.
            if matches!(node.value, Value::Map(_)) {
                node.origin = origin;
            }
            entries.push(Entry {
                key: key.value,
                origin,
                node,
            });
        }
        Ok(Value::Map(entries))
    }
}
