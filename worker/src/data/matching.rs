//! The files that a path with a `*` names.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use super::{DataError, FileProblem};
use crate::config::Paths;

/// Most files that the data of one key lie in: each is kept open.
pub const MAX_FILES: usize = 4096;

/// All files of `paths`, in the order of their contents.
pub(super) fn files(paths: &Paths) -> Result<Vec<PathBuf>, DataError> {
    let mut all = Vec::new();
    for path in paths.iter() {
        all.append(&mut matching(path)?);
        if all.len() > MAX_FILES {
            return Err(DataError::file(path, FileProblem::TooMany { files: all.len() }));
        }
    }
    Ok(all)
}

/// The files that `path` names: itself, or, if there is no file of that name and its last part has a `*`, those of
/// its folder, sorted by the bytes of their names. As in a shell, a hidden file is named by a pattern with a dot only.
pub fn matching(path: &Path) -> Result<Vec<PathBuf>, DataError> {
    let failed = |problem| DataError::file(path, problem);
    let (Some(folder), Some(pattern)) = (path.parent(), path.file_name()) else {
        return Ok(vec![path.to_owned()]);
    };
    let has_star = |part: &OsStr| part.as_bytes().contains(&b'*');
    if !has_star(path.as_os_str()) || path.symlink_metadata().is_ok() {
        return Ok(vec![path.to_owned()]);
    }
    let folder = match folder.as_os_str() {
        empty if empty.is_empty() => Path::new("."),
        _ => folder,
    };
    if has_star(folder.as_os_str()) && !folder.is_dir() {
        return Err(failed(FileProblem::StarInFolder));
    }
    let unreadable = |e: std::io::Error| {
        let cause = e.to_string();
        failed(FileProblem::Unreadable { cause })
    };
    let pattern = pattern.as_bytes();
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let name = entry.map_err(unreadable)?.file_name();
        let is_hidden = name.as_bytes().starts_with(b".") && !pattern.starts_with(b".");
        if !is_hidden && matches(pattern, name.as_bytes()) {
            names.push(name);
        }
    }
    if names.is_empty() {
        return Err(failed(FileProblem::NoMatch));
    }
    names.sort_unstable();
    Ok(names.iter().map(|name| path.with_file_name(name)).collect())
}

/// True if `name` is `pattern` with something for each of its stars. What is between two stars is taken where it
/// occurs first: a later place leaves less for the rest.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let mut parts = pattern.split(|byte| *byte == b'*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else {
        return false;
    };
    let mut parts: Vec<&[u8]> = parts.collect();
    let Some(last) = parts.pop() else {
        return rest.is_empty();
    };
    for part in parts {
        if part.is_empty() {
            continue;
        }
        let Some(at) = rest.windows(part.len()).position(|window| window == part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_characters() {
        let table = [
            ("a", "a", true),
            ("a", "ab", false),
            ("*", "", true),
            ("a*", "a", true),
            ("a*c", "abc", true),
            ("a*c", "ac", true),
            ("a*a", "a", false),
            ("*a*b*", "xaxbx", true),
            ("*a*b*", "ba", false),
            ("train_*.bin", "train_000001.bin", true),
            ("train_*.bin", "val_000001.bin", false),
            ("**", "x", true),
        ];
        for (pattern, name, expected) in table {
            assert_eq!(
                matches(pattern.as_bytes(), name.as_bytes()),
                expected,
                "{pattern} {name}"
            );
        }
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
        `DIR/*/x` has a `*` in the name of a folder
          hint: a `*` may stand in the last part of a path only: name the folders one by one
        ");
        insta::assert_snapshot!(message("none/*.bin"), @"`DIR/none/*.bin` cannot be read: No such file or directory (os error 2)");
    }
}
