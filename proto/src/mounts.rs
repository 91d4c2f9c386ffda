//! The kernel's mount table, `/proc/self/mountinfo`: where a control group can be seen.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path, PathBuf};

/// A control group that can be seen from here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenGroup {
    /// Where its hierarchy is mounted.
    pub mount: PathBuf,
    /// Its path below that.
    pub below: PathBuf,
}

impl SeenGroup {
    /// The group `own`, a path of `/proc/self/cgroup`, below the first mount of `mountinfo` that shows it and whose
    /// type and options of its file system `is_it` takes. A container sees a part of a hierarchy only, and a group that
    /// is not below that part is none.
    pub fn find(mountinfo: &str, own: &str, is_it: impl Fn(&str, &str) -> bool) -> Option<Self> {
        mountinfo.lines().find_map(|line| {
            let (mount, file_system) = line.split_once(" - ")?;
            let mut file_system = file_system.split(' ');
            let (kind, options) = (file_system.next()?, file_system.nth(1).unwrap_or_default());
            if !is_it(kind, options) {
                return None;
            }
            let mut fields = mount.split(' ').skip(3);
            let (root, point) = (fields.next()?, fields.next()?);
            let below = Path::new(own).strip_prefix(unescaped(root)).ok()?;
            let is_plain = |part| matches!(part, Component::Normal(_));
            below.components().all(is_plain).then(|| Self {
                mount: unescaped(point),
                below: below.to_owned(),
            })
        })
    }
}

/// As the kernel shows a path in this file: a byte that would end a field is `\` and three octal digits.
fn unescaped(field: &str) -> PathBuf {
    let mut parts = field.split('\\');
    let mut path = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let escaped = part.split_at_checked(3).and_then(|(digits, rest)| {
            let byte = u8::from_str_radix(digits, 8).ok()?;
            Some((byte, rest))
        });
        // The kernel escapes every backslash, so that this is always there.
        if let Some((byte, rest)) = escaped {
            path.push(byte);
            path.extend(rest.as_bytes());
        }
    }
    PathBuf::from(OsString::from_vec(path))
}
