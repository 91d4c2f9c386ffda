//! Events as JSON lines, for collectors of logs.

use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Writes one line for each event: `{"time":…,"level":…,"job":…,"generation":…,"node":…,"message":…}`. What an event does
/// not speak of is left out.
#[derive(Debug)]
pub(super) struct JsonLines;

#[derive(Serialize)]
struct Line {
    time: String,
    level: &'static str,
    target: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    job: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    generation: Option<u64>,
    #[serde(skip_serializing_if = "String::is_empty")]
    node: String,
    message: String,
    #[serde(flatten)]
    more: Map<String, Value>,
}

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let metadata = event.metadata();
        let line = Line {
            time: now()?,
            level: metadata.level().as_str(),
            target: metadata.target(),
            job: fields.take_text("job"),
            generation: fields
                .0
                .remove("generation")
                .and_then(|value| value.as_u64())
                .filter(|n| *n > 0),
            node: fields.take_text("node"),
            message: fields.take_text("message"),
            more: fields.0,
        };
        let line = serde_json::to_string(&line).map_err(|_| fmt::Error)?;
        writeln!(writer, "{line}")
    }
}

fn now() -> Result<String, fmt::Error> {
    let mut time = String::new();
    SystemTime.format_time(&mut Writer::new(&mut time))?;
    Ok(time)
}

/// The error with which a program ends, as a line of its own, whatever `RUST_LOG` leaves out.
pub(super) fn last_line(target: &'static str, error: &dyn fmt::Display) -> String {
    let line = Line {
        time: now().unwrap_or_default(),
        level: Level::ERROR.as_str(),
        target,
        job: String::new(),
        generation: None,
        node: String::new(),
        message: error.to_string(),
        more: Map::new(),
    };
    // Texts always become JSON.
    serde_json::to_string(&line).unwrap_or_default() + "\n"
}

/// The fields of an event, by name.
#[derive(Debug, Default)]
struct Fields(Map<String, Value>);

impl Fields {
    fn take_text(&mut self, name: &str) -> String {
        match self.0.remove(name) {
            Some(Value::String(text)) => text,
            Some(other) => other.to_string(),
            None => String::new(),
        }
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0
            .insert(field.name().to_owned(), format!("{value:?}").into());
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_error_is_a_line_too() {
        let text = last_line("ddp_run::rendezvous", &"no \"port\"\n  hint: another one");
        let (line, rest) = text.split_once('\n').unwrap();
        assert_eq!(rest, "");
        let line: Value = serde_json::from_str(line).unwrap();
        assert_eq!(line["message"], "no \"port\"\n  hint: another one");
        assert_eq!(line["level"], "ERROR");
        assert_eq!(line["target"], "ddp_run::rendezvous");
        assert!(line["time"].as_str().unwrap().ends_with('Z'), "{text}");
    }

    #[test]
    fn an_event_is_a_line_whatever_it_says() {
        let written = Written::default();
        let sink = written.clone();
        let subscriber = tracing_subscriber::fmt()
            .event_format(JsonLines)
            .with_writer(move || sink.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(
                job = "a\n\"b\"",
                generation = 2_u64,
                node = "node0",
                waited = 1.5,
                "job `{}`\nends",
                "a"
            );
            tracing::warn!(job = "", generation = 0_u64, node = "", "nothing is known");
        });
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0]["job"], "a\n\"b\"");
        assert_eq!(
            (lines[0]["generation"].as_u64(), lines[0]["waited"].as_f64()),
            (Some(2), Some(1.5))
        );
        assert_eq!(lines[0]["message"], "job `a`\nends");
        assert_eq!(lines[1]["level"], "WARN");
        assert!(lines[1].get("job").is_none() && lines[1].get("generation").is_none());
        assert!(lines[0]["time"].as_str().unwrap().ends_with('Z'), "{text}");
    }
}
