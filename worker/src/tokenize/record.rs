//! The text of a line of JSON: one field of an object.

use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

/// The string at `key` of the object that `line` is; all else in it is checked to be JSON, and passed over. Of two fields
/// of that name the last one counts, as in most programs.
pub(super) fn text_of(line: &str, key: &str) -> Result<String, String> {
    let mut json = serde_json::Deserializer::from_str(line);
    let found = Field(key).deserialize(&mut json).and_then(|text| {
        json.end()?;
        Ok(text)
    });
    match found {
        Ok(Some(text)) => Ok(text),
        Ok(None) => Err(format!(
            "the object has no field `{key}`\n  hint: `--key` names the field with the text"
        )),
        Err(e) => Err(format!("not a document: {}", without_line(&e))),
    }
}

/// The error counts lines too, and all of its lines are one.
fn without_line(error: &serde_json::Error) -> String {
    let words = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    match words.strip_suffix(&place) {
        Some(what) => format!("{what} at column {}", error.column()),
        None => words,
    }
}

struct Field<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Field<'_> {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Field<'_> {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with the string `{}`", self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
        let mut text = None;
        while let Some(is_wanted) = fields.next_key_seed(Is(self.0))? {
            if is_wanted {
                text = Some(fields.next_value::<String>()?);
            } else {
                fields.next_value::<IgnoredAny>()?;
            }
        }
        Ok(text)
    }
}

/// Whether a name is the wanted one.
struct Is<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for Is<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Is<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<bool, E> {
        Ok(name == self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_field_is_found_among_others() {
        let line = r#"{"id": 7, "meta": {"text": "not this"}, "text": "a \"b\"\n\u00e9", "n": [1, {}]}"#;
        assert_eq!(text_of(line, "text").unwrap(), "a \"b\"\né");
        assert_eq!(text_of(r#"{"a": "x"} "#, "a").unwrap(), "x");
        assert_eq!(text_of(r#"{"a": "x", "a": "y"}"#, "a").unwrap(), "y");
    }

    #[test]
    fn what_is_wrong_with_a_line_is_said() {
        let message = |line: &str| text_of(line, "text").unwrap_err();
        insta::assert_snapshot!(message(r#"{"txt": "x"}"#), @r"
        the object has no field `text`
          hint: `--key` names the field with the text
        ");
        insta::assert_snapshot!(message(r#"{"text": 5}"#), @"not a document: invalid type: integer `5`, expected a string at column 10");
        insta::assert_snapshot!(message("[1]"), @"not a document: invalid type: sequence, expected an object with the string `text` at column 0");
        insta::assert_snapshot!(message(r#"{"text": "x""#), @"not a document: EOF while parsing an object at column 12");
        insta::assert_snapshot!(message(r#"{"text": "x"} y"#), @"not a document: trailing characters at column 15");
    }
}
