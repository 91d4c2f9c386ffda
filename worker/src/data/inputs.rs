//! The files that a configuration names: the tokenizer's, which a process reads once, and those of the data.

use std::path::Path;

use ddp_proto::words::counted;

use super::dataset::{HELD_OUT_PART, Tokens};
use super::{DataError, Vocabulary};
use crate::config::{ConfigError, Located, Paths, Problem, Source, load_without_data};

/// Reads the YAML at `path`, applies the overrides in order, and checks the result for training, the files of the data
/// included.
pub fn load_located(path: &Path, overrides: &[String]) -> Result<Located, ConfigError> {
    let mut located = load_without_data(path, overrides)?;
    located.check_schedule()?;
    read_vocabulary(&mut located)?;
    check_tokens(&located)?;
    Ok(located)
}

/// Reads the tokenizer of a configuration, which it completes: no code behind it reads that file again.
pub fn read_vocabulary(located: &mut Located) -> Result<(), ConfigError> {
    let vocabulary = Vocabulary::of(&located.config.data.tokenizer)
        .map_err(|error| data_error(&located.source, "data.tokenizer", &error))?;
    located.complete(vocabulary)
}

/// Checks that the files of the data have as many tokens as a run needs.
fn check_tokens(Located { config, source }: &Located) -> Result<(), ConfigError> {
    // Opened, not only looked at, so that a file without permission is noticed before anything starts.
    let data = &config.data;
    let tokens = |key: &str, paths: &Paths| {
        let found = Tokens::count(paths, data, &config.vocabulary);
        found.map_err(|error| data_error(source, key, &error))
    };
    let all = tokens("data.train", &data.train)?;
    let held_out = all / HELD_OUT_PART as u64;
    let (training, validation) = match &data.val {
        Some(val) => (all, ("`data.val`", tokens("data.val", val)?)),
        None => (all - held_out, ("the held-out tenth of `data.train`", held_out)),
    };
    let needed = config.model.block_size as u64 + 1;
    for (part, found) in [("`data.train`", training), validation] {
        if found < needed {
            let what = format!(
                "`model.block_size` is {}, but {part} has only {}, and a sample needs {needed}",
                needed - 1,
                counted(found, "token")
            );
            let hint = "use a smaller `model.block_size` or a longer text";
            return Err(source.locate(Problem::new("model.block_size", what).with_hint(hint)));
        }
    }
    Ok(())
}

/// What is wrong with a file, at the key that names it.
fn data_error(source: &Source, key: &str, error: &DataError) -> ConfigError {
    let (path, problem, hint) = match error {
        DataError::File { path, problem, hint } => (path, problem.clone(), hint.clone()),
        DataError::Unreadable { path, cause } => (
            path,
            format!("cannot be read: {cause}"),
            Some("relative paths in `data` are resolved from the YAML's directory".into()),
        ),
    };
    let what = format!("`{key}` is `{}`, which {problem}", path.display());
    source.locate(Problem::new(key, what).with_optional_hint(hint))
}
