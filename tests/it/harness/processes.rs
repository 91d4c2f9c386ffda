//! Processes as `/proc` shows them.

use std::collections::BTreeMap;

/// All living processes below `ancestor`, itself not included; zombies do not live.
pub(crate) fn descendants(ancestor: i32) -> Vec<i32> {
    let mut parents = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").expect("a mounted /proc").flatten() {
        let pid = entry.file_name().to_string_lossy().parse::<i32>();
        if let Some((pid, parent)) = pid.ok().and_then(|pid| Some((pid, living_parent(pid)?))) {
            parents.insert(pid, parent);
        }
    }
    let is_below = |mut pid: i32| {
        while let Some(parent) = parents.get(&pid) {
            if *parent == ancestor {
                return true;
            }
            pid = *parent;
        }
        false
    };
    parents.keys().copied().filter(|pid| is_below(*pid)).collect()
}

/// The parent of `pid`; none if it is gone or a zombie.
fn living_parent(pid: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in brackets may hold spaces and brackets of its own.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(parent)
}

/// The environment that `pid` was started with; empty if it is gone.
pub(crate) fn environment_of(pid: i32) -> BTreeMap<String, String> {
    let bytes = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    String::from_utf8_lossy(&bytes)
        .split('\0')
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}
