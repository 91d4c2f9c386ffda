//! From the tree to the types: every error knows its key and the key's origin.

use std::fmt;

use serde::de::value::StrDeserializer;
use serde::de::{
    self, DeserializeSeed, Deserializer, Expected, IntoDeserializer as _, MapAccess, SeqAccess, Unexpected,
    Visitor,
};
use serde::forward_to_deserialize_any;

use super::keys;
use super::node::{Entry, Node, Origin, Value};
use super::words::{expected_at, expected_words, found_words, hint, not_finite_words, one_of};

/// Why a tree does not fit the types.
#[derive(Debug)]
pub(super) struct Misfit {
    /// None until the place is known.
    place: Option<(String, Origin)>,
    what: What,
}

#[derive(Debug)]
enum What {
    UnknownKey {
        key: String,
        expected: &'static [&'static str],
    },
    MissingKey(&'static str),
    Value {
        found: String,
        expected: String,
        hint: Option<String>,
    },
    Other(String),
}

/// A misfit in words.
pub(super) struct Report {
    pub(super) origin: Origin,
    pub(super) problem: String,
    pub(super) hint: Option<String>,
}

impl Misfit {
    fn new(what: What) -> Self {
        Self { place: None, what }
    }

    fn not_finite(value: f64, expected: &dyn Expected) -> Self {
        let expected = match expected_words(expected) {
            words if words == "a number" || words == "any valid JSON value" => "a finite number".into(),
            words => words,
        };
        Self::new(What::Value {
            found: not_finite_words(value).into(),
            expected,
            hint: None,
        })
    }

    /// Says where it happened, unless something further inside already did.
    fn at(mut self, path: &str, origin: Origin) -> Self {
        self.place.get_or_insert_with(|| (path.to_owned(), origin));
        self
    }

    /// The words for the user.
    pub(super) fn report(self) -> Report {
        let (path, origin) = self.place.unwrap_or_else(|| (String::new(), Origin::Line(0)));
        let (problem, hint) = match self.what {
            What::UnknownKey { key, expected } => (
                format!("unknown key `{}`", join(&path, &key)),
                Some(keys::suggestion(&path, &key, expected)),
            ),
            What::MissingKey(key) if path.is_empty() => (
                format!("section `{key}` is missing"),
                Some("a configuration needs at least the sections `model` and `data`".into()),
            ),
            What::MissingKey(key) => (
                format!("`{}` is missing", join(&path, key)),
                Some(format!("add `{key}: …` below `{path}:`")),
            ),
            What::Value {
                found,
                expected,
                hint,
            } => {
                let expected = expected_at(&path, &expected);
                let subject = if path.is_empty() {
                    "the file".into()
                } else {
                    format!("`{path}`")
                };
                (format!("{subject} is {found}, expected {expected}"), hint)
            }
            What::Other(message) => (format!("`{path}`: {message}"), None),
        };
        Report {
            origin,
            problem,
            hint,
        }
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() {
        key.to_owned()
    } else {
        format!("{path}.{key}")
    }
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.what)
    }
}

impl std::error::Error for Misfit {}

impl de::Error for Misfit {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::new(What::Other(message.to_string()))
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        let expected = expected_words(expected);
        Self::new(What::Value {
            hint: hint(found, &expected),
            found: found_words(found),
            expected,
        })
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::invalid_type(found, expected)
    }

    fn invalid_length(length: usize, expected: &dyn Expected) -> Self {
        Self::new(What::Value {
            found: format!("a list of {length}"),
            expected: expected_words(expected),
            hint: None,
        })
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        Self::new(What::Value {
            found: format!("`{variant}`"),
            expected: one_of(expected),
            hint: None,
        })
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        Self::new(What::UnknownKey {
            key: field.to_owned(),
            expected,
        })
    }

    fn missing_field(field: &'static str) -> Self {
        Self::new(What::MissingKey(field))
    }
}

/// Refuses everything, and names the words that would have been taken.
struct OneOf(&'static [&'static str]);

impl Visitor<'_> for OneOf {
    type Value = std::convert::Infallible;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&one_of(self.0))
    }
}

/// A node to be deserialised, with its path for errors.
pub(super) struct De<'a> {
    node: &'a Node,
    path: String,
}

impl<'a> De<'a> {
    pub(super) fn new(root: &'a Node) -> Self {
        Self {
            node: root,
            path: String::new(),
        }
    }

    fn visit<'de, V: Visitor<'de>>(&self, visitor: V) -> Result<V::Value, Misfit> {
        match &self.node.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(v) => visitor.visit_bool(*v),
            Value::Unsigned(v) => visitor.visit_u64(*v),
            Value::Signed(v) => visitor.visit_i64(*v),
            Value::Float(v) if v.is_finite() => visitor.visit_f64(*v),
            Value::Float(v) => Err(Misfit::not_finite(*v, &visitor)),
            Value::Text(v) => visitor.visit_str(v),
            Value::List(nodes) => {
                let mut items = Items {
                    rest: nodes.iter().enumerate(),
                    path: &self.path,
                };
                let value = visitor.visit_seq(&mut items)?;
                if items.rest.len() > 0 {
                    let expected = format!("a list of {}", nodes.len() - items.rest.len());
                    return Err(de::Error::invalid_length(nodes.len(), &expected.as_str()));
                }
                Ok(value)
            }
            Value::Map(entries) => visitor.visit_map(Entries {
                rest: entries.iter(),
                value: None,
                path: &self.path,
            }),
        }
    }
}

impl<'de> Deserializer<'de> for De<'_> {
    type Error = Misfit;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Misfit> {
        self.visit(visitor)
            .map_err(|e| e.at(&self.path, self.node.origin))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Misfit> {
        match self.node.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Misfit> {
        visitor.visit_newtype_struct(self)
    }

    /// Derived types would also take a list, by position.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Misfit> {
        match self.node.value {
            Value::List(_) => {
                let misfit: Misfit = de::Error::invalid_type(Unexpected::Seq, &visitor);
                Err(misfit.at(&self.path, self.node.origin))
            }
            _ => self.deserialize_map(visitor),
        }
    }

    /// A section whose keys are all commented out is an empty one.
    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Misfit> {
        if !matches!(self.node.value, Value::Null) {
            return self.deserialize_any(visitor);
        }
        let none = Entries {
            rest: [].iter(),
            value: None,
            path: &self.path,
        };
        visitor
            .visit_map(none)
            .map_err(|e| e.at(&self.path, self.node.origin))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        words: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Misfit> {
        match &self.node.value {
            Value::Text(word) => {
                let word: StrDeserializer<'_, Misfit> = word.as_str().into_deserializer();
                visitor
                    .visit_enum(word)
                    .map_err(|e| e.at(&self.path, self.node.origin))
            }
            _ => {
                // Not a word at all: say which words there are, which the visitor does not.
                self.deserialize_any(OneOf(words)).map(|never| match never {})
            }
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf
        unit unit_struct seq tuple tuple_struct identifier ignored_any
    }
}

struct Entries<'a> {
    rest: std::slice::Iter<'a, Entry>,
    value: Option<&'a Entry>,
    path: &'a str,
}

impl<'de> MapAccess<'de> for Entries<'_> {
    type Error = Misfit;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Misfit> {
        self.value = self.rest.next();
        let Some(entry) = self.value else {
            return Ok(None);
        };
        let key: StrDeserializer<'_, Misfit> = entry.key.as_str().into_deserializer();
        seed.deserialize(key)
            .map(Some)
            .map_err(|e| e.at(self.path, entry.origin))
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, Misfit> {
        let entry = self.value.take().expect("a key comes before its value");
        seed.deserialize(De {
            node: &entry.node,
            path: join(self.path, &entry.key),
        })
    }
}

struct Items<'a> {
    rest: std::iter::Enumerate<std::slice::Iter<'a, Node>>,
    path: &'a str,
}

impl<'de> SeqAccess<'de> for Items<'_> {
    type Error = Misfit;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, Misfit> {
        let next = self.rest.next().map(|(index, node)| De {
            node,
            path: format!("{}[{index}]", self.path),
        });
        next.map(|item| seed.deserialize(item)).transpose()
    }
}
