//! What it came to, and what to write into a configuration.

use std::time::Duration;

use ddp_proto::words::counted;
use ddp_worker::tokenize::{END_OF_TEXT, Report, Request, Tokenizer};

/// The end of a successful run.
pub(super) fn words(request: &Request<'_>, report: &Report, took: Duration) -> String {
    let Report {
        documents,
        tokens,
        text_bytes,
        ..
    } = report;
    let seconds = took.as_secs_f64();
    let bytes = *text_bytes as f64;
    format!(
        "{}, {text_bytes} bytes of text: {}, {:.2} bytes per token\n\
         {seconds:.1} s, {:.1} MB/s\n\
         \n\
         data:\n  train: {}   # relative paths are resolved from the YAML's directory\n  tokenizer: {}\n",
        counted(*documents, "document"),
        counted(*tokens, "token"),
        bytes / *tokens as f64,
        bytes / 1e6 / seconds.max(1e-9),
        quoted(&request.output.display().to_string()),
        quoted(&request.tokenizer.to_string()),
    )
}

/// Nothing tells where a document ends.
pub(super) fn no_separator(tokenizer: &Tokenizer) -> String {
    format!(
        "warning: `{tokenizer}` has no token `{END_OF_TEXT}`, so nothing separates the documents\n  \
         hint: set the separator with `--end-of-text TOKEN`"
    )
}

/// As YAML takes it for a string.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "_-./+@%".contains(c);
    let starts_plain = word.starts_with(|c: char| c.is_alphanumeric() || c == '.' || c == '/' || c == '_');
    if starts_plain && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_lines_can_be_pasted_into_a_configuration() {
        let request = Request {
            tokenizer: &Tokenizer::File("my tokenizer.json".into()),
            end_of_text: None,
            key: "text",
            inputs: &[],
            output: Path::new("data/web.safetensors"),
            overwrite: false,
            threads: None,
        };
        let report = Report {
            documents: 1,
            tokens: 1_000_000,
            text_bytes: 4_430_000,
            has_separator: true,
        };
        insta::assert_snapshot!(words(&request, &report, Duration::from_millis(500)), @r"
        1 document, 4430000 bytes of text: 1000000 tokens, 4.43 bytes per token
        0.5 s, 8.9 MB/s

        data:
          train: data/web.safetensors   # relative paths are resolved from the YAML's directory
          tokenizer: 'my tokenizer.json'
        ");
        insta::assert_snapshot!(no_separator(request.tokenizer), @r"
        warning: `my tokenizer.json` has no token `<|endoftext|>`, so nothing separates the documents
          hint: set the separator with `--end-of-text TOKEN`
        ");
    }
}
