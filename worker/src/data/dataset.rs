//! The training and the validation tokens of a configuration: the files that its paths name, one behind the other. A
//! configuration is complete with them and with its tokenizer's vocabulary, which a process reads once.

use std::ffi::OsStr;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ddp_proto::words::counted;
use safetensors::tensor::Dtype;

use super::token_file::{TokenFile, width};
use super::{DataError, Vocabulary};
use crate::config::{
    self, ConfigError, Located, Paths, Problem, Source, TokenDtype, Tokenizer, load_without_data,
    star_matches,
};

/// Without validation data, one in this many tokens is held out at the end of the training data.
pub const HELD_OUT_PART: usize = 10;
/// Most files that the data of one key lie in: each is kept open.
pub const MAX_FILES: usize = 4096;
/// Bytes at either end of the tokens that a fingerprint covers: of each file as much less as there are more.
const FINGERPRINT_BYTES: usize = 1 << 20;
/// The least of a file.
const MIN_FINGERPRINT_BYTES: usize = 4 << 10;
/// Digits of a hash that people compare.
const SHOWN_DIGITS: usize = 16;

/// A range of the tokens of one file, or of several that follow each other.
#[derive(Clone)]
pub struct Tokens {
    /// At least one.
    files: Arc<[TokenFile]>,
    /// Where each file begins among the tokens of all, and where the last one ends.
    borders: Arc<[usize]>,
    range: Range<usize>,
}

impl Tokens {
    /// All tokens of the files of `paths`. `dtype` is that of files without a header.
    pub fn open(
        paths: &Paths,
        tokenizer: &Tokenizer,
        dtype: Option<TokenDtype>,
        vocabulary: &Arc<Vocabulary>,
    ) -> Result<Self, DataError> {
        let name = tokenizer.to_string();
        let files = files(paths)?.into_iter();
        let files: Arc<[TokenFile]> = files
            .map(|path| TokenFile::open(&path, vocabulary, dtype, &name))
            .collect::<Result<_, _>>()?;
        assert!(!files.is_empty(), "tokens without files");
        let mut borders = vec![0];
        for file in &*files {
            borders.push(borders[borders.len() - 1] + file.len());
        }
        Ok(Self {
            range: 0..borders[files.len()],
            borders: borders.into(),
            files,
        })
    }

    /// Number of tokens of the files of `paths`, each of which is opened, checked against its header, and closed.
    pub fn count(paths: &Paths, data: &config::Data, vocabulary: &Arc<Vocabulary>) -> Result<u64, DataError> {
        let name = data.tokenizer.to_string();
        let files = files(paths)?.into_iter();
        files
            .map(|path| TokenFile::open(&path, vocabulary, data.dtype, &name).map(|file| file.len() as u64))
            .sum()
    }

    /// A part of them, which must lie within.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.len(),
            "{range:?} of {} tokens",
            self.len()
        );
        let from = self.range.start;
        Self {
            range: from + range.start..from + range.end,
            ..self.clone()
        }
    }

    /// All tokens of the same files.
    #[must_use]
    pub fn whole(&self) -> Self {
        Self {
            range: 0..self.borders[self.files.len()],
            ..self.clone()
        }
    }

    /// The file, or the first of several.
    pub fn path(&self) -> &Path {
        self.files[0].path()
    }

    /// Number of files.
    pub fn file_count(&self) -> usize {
        self.files.len()
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Bytes of text per token. None if a file does not record them, or if these are only a part of the tokens of its
    /// files: files record their total, and a part may differ from it by a fifth.
    pub fn bytes_per_token(&self) -> Option<f64> {
        let all = self.borders[self.files.len()];
        let is_text = || self.files.iter().all(|file| file.dtype() == Dtype::U8);
        if self.range != (0..all) && !is_text() {
            return None;
        }
        let bytes = self.files.iter().map(|file| file.facts().text_bytes);
        Some(bytes.sum::<Option<u64>>()? as f64 / all as f64)
    }

    /// True if every file records which tokenizer made it.
    pub fn knows_tokenizer(&self) -> bool {
        let mut files = self.files.iter();
        files.all(|file| file.facts().tokenizer_hash.is_some())
    }

    /// What identifies the tokens: how many they are, and a hash of both ends of each file.
    pub fn fingerprint(&self) -> Result<String, DataError> {
        let parts: Vec<_> = self.parts(self.range.clone()).collect();
        let most = (FINGERPRINT_BYTES / parts.len().max(1)).max(MIN_FINGERPRINT_BYTES);
        let mut hash = blake3::Hasher::new();
        for (file, part) in &parts {
            let width = width(file.dtype());
            let tokens = part.len().min(most / width);
            let mut end = vec![0; tokens * width];
            for start in [part.start, part.end - tokens] {
                file.read_stored(start, &mut end)?;
                hash.update(&end);
            }
            if parts.len() > 1 {
                hash.update(&(part.len() as u64).to_le_bytes());
            }
        }
        let files = match parts.len() {
            0 | 1 => String::new(),
            several => format!(" in {several} files"),
        };
        let hash = &hash.finalize().to_hex()[..SHOWN_DIGITS];
        Ok(format!("{} tokens{files}, hash {hash}", self.len()))
    }

    /// Copies the tokens from `start` into `out`, across files. The files must have enough of them. Each is below the size
    /// of the vocabulary.
    pub fn read(&self, start: usize, mut out: &mut [i32]) -> Result<(), DataError> {
        let fits = start.checked_add(out.len()).is_some_and(|end| end <= self.len());
        assert!(fits, "tokens {start}..+{} of {}", out.len(), self.len());
        let start = self.range.start + start;
        for (file, part) in self.parts(start..start + out.len()) {
            let (now, later) = out.split_at_mut(part.len());
            file.read(part.start, now)?;
            out = later;
        }
        Ok(())
    }

    /// The part of each file that a range of the tokens of all covers, in order; none of them is empty.
    fn parts(&self, range: Range<usize>) -> impl Iterator<Item = (&TokenFile, Range<usize>)> {
        let first = self.borders.partition_point(|border| *border <= range.start) - 1;
        let files = self.files.iter().zip(&*self.borders).skip(first);
        files
            .map(move |(file, &border)| {
                let start = range.start.max(border) - border;
                let end = range.end.saturating_sub(border).min(file.len());
                (file, start..end)
            })
            .take_while(|(_, part)| part.start < part.end)
    }

    /// Number of samples of `block_size` tokens: `floor((T − 1) / block_size)`, since each token's target
    /// is the next one.
    pub fn blocks(&self, block_size: usize) -> u64 {
        (self.len().saturating_sub(1) / block_size.max(1)) as u64
    }

    /// The sample from token `start`: as many `inputs` as there is room for, and as `targets` the tokens one further.
    pub fn read_sample(&self, start: u64, inputs: &mut [i32], targets: &mut [i32]) -> Result<(), DataError> {
        let block_size = inputs.len();
        assert_eq!(targets.len(), block_size, "a target for each input");
        let mut tokens = vec![0; block_size + 1];
        self.read(start as usize, &mut tokens)?;
        inputs.copy_from_slice(&tokens[..block_size]);
        targets.copy_from_slice(&tokens[1..]);
        Ok(())
    }
}

/// Both parts of the data.
#[derive(Clone)]
pub struct Dataset {
    /// What the model learns from.
    pub train: Tokens,
    /// What it never sees.
    pub val: Tokens,
}

impl Dataset {
    /// Opens the files of a configuration. Both parts hold at least one sample of `block_size`.
    pub fn open(
        data: &config::Data,
        block_size: usize,
        vocabulary: &Arc<Vocabulary>,
    ) -> Result<Self, DataError> {
        let open = |paths| Tokens::open(paths, &data.tokenizer, data.dtype, vocabulary);
        let all = open(&data.train)?;
        let (train, val) = if let Some(paths) = &data.val {
            (all, open(paths)?)
        } else {
            let split = all.len() - all.len() / HELD_OUT_PART;
            (all.part(0..split), all.part(split..all.len()))
        };
        let dataset = Self { train, val };
        for (part, tokens) in [("training", &dataset.train), ("validation", &dataset.val)] {
            if tokens.blocks(block_size) == 0 {
                let (found, needed) = (counted(tokens.len() as u64, "token"), block_size + 1);
                return Err(DataError::file(
                    tokens.path(),
                    format!("has {found} of {part}, but a sample needs {needed}"),
                    Some("use a longer text or a smaller `model.block_size`"),
                ));
            }
        }
        Ok(dataset)
    }
}

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

/// All files of `paths`, in the order of their contents.
fn files(paths: &Paths) -> Result<Vec<PathBuf>, DataError> {
    let mut all = Vec::new();
    for path in paths.iter() {
        all.append(&mut matching(path)?);
        if all.len() > MAX_FILES {
            let found = counted(all.len(), "file");
            return Err(DataError::file(
                path,
                format!("matches {found}, but at most {MAX_FILES} files can be opened"),
                Some("merge them into fewer files"),
            ));
        }
    }
    Ok(all)
}

/// The files that `path` names: itself, or, if there is no file of that name and its last part has a `*`, those of
/// its folder, sorted by the bytes of their names. As in a shell, a hidden file is named by a pattern with a dot only.
pub fn matching(path: &Path) -> Result<Vec<PathBuf>, DataError> {
    let (Some(folder), Some(pattern)) = (path.parent(), path.file_name()) else {
        return Ok(vec![path.to_owned()]);
    };
    let has_star = |part: &OsStr| part.as_bytes().contains(&b'*');
    if !has_star(path.as_os_str()) || path.symlink_metadata().is_ok() {
        return Ok(vec![path.to_owned()]);
    }
    let folder = ddp_proto::paths::or_here(folder);
    if has_star(folder.as_os_str()) && !folder.is_dir() {
        return Err(DataError::file(
            path,
            "has a `*` in a directory name",
            Some("a `*` is allowed only in the last part of a path: list the directories one by one"),
        ));
    }
    let unreadable = |e| DataError::unreadable(path, &e);
    let pattern = pattern.as_bytes();
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let name = entry.map_err(unreadable)?.file_name();
        let is_hidden = name.as_bytes().starts_with(b".") && !pattern.starts_with(b".");
        if !is_hidden && star_matches(pattern, name.as_bytes()) {
            names.push(name);
        }
    }
    if names.is_empty() {
        let hint = "a `*` stands for any characters of a file's name";
        return Err(DataError::file(path, "matches no file", Some(hint)));
    }
    names.sort_unstable();
    Ok(names.iter().map(|name| path.with_file_name(name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Data, LastBatch, Order, Tokenizer};

    fn data(folder: &Path, train: &[u8], val: Option<&[u8]>) -> Data {
        let write = |name: &str, bytes: &[u8]| {
            let path = folder.join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        Data {
            train: write("train", train).into(),
            val: val.map(|v| write("val", v).into()),
            tokenizer: Tokenizer::Bytes,
            dtype: None,
            order: Order::Sequential,
            last_batch: LastBatch::Wrap,
        }
    }

    #[test]
    fn the_last_tenth_is_held_out() {
        let folder = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = (0..105).collect();
        let dataset = Dataset::open(&data(folder.path(), &bytes, None), 4, &Arc::default()).unwrap();
        assert_eq!((dataset.train.len(), dataset.val.len()), (95, 10));
        assert_eq!((dataset.train.blocks(4), dataset.val.blocks(4)), (23, 2));
        let (mut inputs, mut targets) = ([0; 4], [0; 4]);
        dataset.val.read_sample(4, &mut inputs, &mut targets).unwrap();
        assert_eq!((inputs, targets), ([99, 100, 101, 102], [100, 101, 102, 103]));
        let beyond = std::panic::AssertUnwindSafe(|| dataset.val.read_sample(8, &mut [0; 4], &mut [0; 4]));
        assert!(std::panic::catch_unwind(beyond).is_err());
    }

    #[test]
    fn both_parts_hold_a_sample() {
        let folder = tempfile::tempdir().unwrap();
        let dataset =
            Dataset::open(&data(folder.path(), &[1; 5], Some(&[2; 5])), 4, &Arc::default()).unwrap();
        assert_eq!((dataset.train.blocks(4), dataset.val.blocks(4)), (1, 1));
        let error = Dataset::open(&data(folder.path(), &[1; 5], Some(&[2; 4])), 4, &Arc::default())
            .err()
            .unwrap();
        let message = error.to_string();
        assert!(
            message.contains("has 4 tokens of validation, but a sample needs 5\n"),
            "{message}"
        );
    }

    #[test]
    fn files_are_sorted_and_hidden_ones_left_out() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b_2.bin", "b_10.bin", "a.txt", ".b_0.bin", "odd*.bin"] {
            std::fs::write(folder.path().join(name), "x").unwrap();
        }
        let names = |pattern: &str| -> Vec<String> {
            let found = matching(&folder.path().join(pattern)).unwrap();
            let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
            found.iter().map(name).collect()
        };
        assert_eq!(names("b_*.bin"), ["b_10.bin", "b_2.bin"]);
        assert_eq!(names(".b*"), [".b_0.bin"]);
        assert_eq!(names("odd*.bin"), ["odd*.bin"], "a file of that very name");
        assert_eq!(names("gone.bin"), ["gone.bin"], "whoever opens it says so");
        let message = |pattern: &str| {
            let error = matching(&folder.path().join(pattern)).unwrap_err().to_string();
            error.replace(&folder.path().display().to_string(), "DIR")
        };
        insta::assert_snapshot!(message("c*"), @r"
        `DIR/c*` matches no file
          hint: a `*` stands for any characters of a file's name
        ");
        insta::assert_snapshot!(message("*/x"), @r"
        `DIR/*/x` has a `*` in a directory name
          hint: a `*` is allowed only in the last part of a path: list the directories one by one
        ");
        insta::assert_snapshot!(message("none/*.bin"), @"`DIR/none/*.bin` cannot be read: No such file or directory (os error 2)");
    }
}
