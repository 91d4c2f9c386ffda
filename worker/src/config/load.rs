//! From a file and its overrides to a checked configuration.

use std::io::Read as _;
use std::path::Path;

use super::schema::TrainConfig;
use super::source::{ConfigError, Source};
use super::{keys, rules};

/// Longest configuration file.
pub const MAX_FILE_BYTES: u64 = 1 << 20;

/// A configuration that still knows where its values came from.
#[derive(Clone, Debug)]
pub struct Located {
    /// The configuration; its paths of `data` and `model.init_from` can be opened from the current folder.
    pub config: TrainConfig,
    source: Source,
}

/// Reads the YAML at `path`, applies the overrides (`train.steps=20`) in order, and checks the result,
/// the data files included.
pub fn load(path: &Path, overrides: &[String]) -> Result<TrainConfig, ConfigError> {
    load_located(path, overrides).map(|located| located.config)
}

/// As [`load`], for callers that report errors of their own at a key's place.
pub fn load_located(path: &Path, overrides: &[String]) -> Result<Located, ConfigError> {
    let located = load_without_data(path, overrides)?;
    rules::check_data(&located.config, &located.source)?;
    Ok(located)
}

/// As [`load_located`], for callers that train nothing: the data files need not exist.
pub fn load_without_data(path: &Path, overrides: &[String]) -> Result<Located, ConfigError> {
    let source = Source::parse(path, &read(path)?, overrides)?;
    let values: Result<TrainConfig, _> = serde_json::from_value(keys::read(&source)?);
    let mut config = values.map_err(|error| source.error("", error.to_string(), None))?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let data = &mut config.data;
    data.train = data.train.below(folder);
    data.val = data.val.as_ref().map(|val| val.below(folder));
    data.tokenizer = std::mem::take(&mut data.tokenizer).below(folder);
    config.model.init_from = config.model.init_from.map(|weights| folder.join(weights));
    rules::check(&config, &source)?;
    Ok(Located { config, source })
}

impl Located {
    /// Where the value of a dotted key came from: `train.yaml:12`, or the `--set`. For a key that is not
    /// set, the section around it.
    #[must_use]
    pub fn place(&self, key: &str) -> String {
        self.source.place_of(key)
    }

    /// The dotted keys that file and overrides set, and their values as YAML would have them in one line.
    #[must_use]
    pub fn entries(&self) -> Vec<(String, String)> {
        self.source.root().entries()
    }

    /// An error about the value of a dotted key, such as `launch.nproc_per_node`.
    #[must_use]
    pub fn error(&self, key: &str, problem: impl Into<String>, hint: Option<&str>) -> ConfigError {
        self.source
            .error(key, problem.into(), hint.map(ToOwned::to_owned))
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    let error = |problem: String, hint: Option<&str>| ConfigError {
        place: path.display().to_string(),
        problem,
        hint: hint.map(ToOwned::to_owned),
    };
    let failed = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound => error(
            "no such file".into(),
            Some("the path of the configuration counts from the current folder"),
        ),
        _ => error(format!("cannot read the configuration: {e}"), None),
    };
    let file = std::fs::File::open(path).map_err(failed)?;
    if file.metadata().is_ok_and(|metadata| metadata.is_dir()) {
        return Err(error(
            "is a folder, expected a configuration: a YAML file".into(),
            Some("name the file in it, such as `train.yaml`"),
        ));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(error(
            format!("longer than {MAX_FILE_BYTES} bytes: not a configuration"),
            None,
        ));
    }
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        error(
            format!("is not text (byte {at} is not UTF-8), expected a configuration: a YAML file"),
            Some("a target that ends in `.yaml` or `.yml` is read as a configuration; any other is run as a program"),
        )
    })
}
