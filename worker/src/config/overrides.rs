//! `--set key=value`: values that replace those of the file.

use super::node::{Entry, Node, Origin, Value};

/// Replaces the value at the key of `text`, the override with index `index`, by its value, which is read as
/// YAML: `--set train.steps=20`, `--set 'train.optimizer.betas=[0.9, 0.99]'`.
pub(super) fn apply(root: &mut Node, index: usize, text: &str) -> Result<(), String> {
    let Some((path, value)) = text.split_once('=') else {
        return Err("expected `key=value`, for example `train.steps=20`".into());
    };
    let path = path.trim();
    if path.split('.').any(str::is_empty) {
        return Err(format!(
            "`{path}` is no key: expected names with dots between, for example `train.steps`"
        ));
    }
    if value.trim().is_empty() {
        return Err(format!(
            "a value is missing behind `=`; `{path}=null` says that there is none"
        ));
    }
    let origin = Origin::Set(index);
    let node = Node::parse(value).map_err(|e| format!("the value is not valid YAML: {}", e.message))?;
    *entry(root, path, origin)? = node.with_origin(origin);
    Ok(())
}

/// The node at `path`, with the sections above it, made where they do not exist.
fn entry<'a>(root: &'a mut Node, path: &str, origin: Origin) -> Result<&'a mut Node, String> {
    let mut node = root;
    let mut above = String::new();
    for key in path.split('.') {
        if matches!(node.value, Value::Null) {
            node.value = Value::Map(Vec::new());
        }
        let Value::Map(entries) = &mut node.value else {
            return Err(format!(
                "`{above}` is not a section, so that it has no key `{key}`"
            ));
        };
        let at = entries.iter().position(|e| e.key == key).unwrap_or_else(|| {
            let node = Node {
                value: Value::Null,
                origin,
            };
            entries.push(Entry {
                key: key.to_owned(),
                origin,
                node,
            });
            entries.len() - 1
        });
        node = &mut entries[at].node;
        if !above.is_empty() {
            above.push('.');
        }
        above.push_str(key);
    }
    Ok(node)
}
