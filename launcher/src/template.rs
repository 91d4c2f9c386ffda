//! Templates as Python's `string.Template.safe_substitute` reads them.

/// `template` with `$name` and `${name}` replaced by the `value` of the name. `$$` is a dollar sign, and a name without
/// a value is text.
pub(crate) fn substitute(template: &str, value: impl Fn(&str) -> Option<String>) -> String {
    let (mut text, mut rest) = (String::new(), template);
    while let Some((before, after)) = rest.split_once('$') {
        text.push_str(before);
        if let Some(after) = after.strip_prefix('$') {
            text.push('$');
            rest = after;
            continue;
        }
        let name = variable(after);
        match value(name.trim_matches(['{', '}'])) {
            Some(value) => text.push_str(&value),
            None => text.extend(["$", name]),
        }
        rest = &after[name.len()..];
    }
    text + rest
}

/// The name of a variable that `after` begins with, perhaps in braces; empty without one.
fn variable(after: &str) -> &str {
    let is_of_name = |c: char| c == '_' || c.is_ascii_alphanumeric();
    if let Some((name, _)) = after.strip_prefix('{').and_then(|braced| braced.split_once('}'))
        && !name.is_empty()
        && name.chars().all(is_of_name)
    {
        return &after[..name.len() + 2];
    }
    let end = after.find(|c| !is_of_name(c)).unwrap_or(after.len());
    &after[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_arguments_are_replaced_as_torchrun_does() {
        let of = |text: &str| substitute(text, |name| (name == "local_rank").then(|| "3".to_owned()));
        assert_eq!(of("--gpu=${local_rank}"), "--gpu=3");
        assert_eq!(of("$local_rank/$local_rank_2"), "3/$local_rank_2");
        assert_eq!(of("${LOCAL_RANK} ${rank} $"), "${LOCAL_RANK} ${rank} $");
        assert_eq!(of("$$local_rank costs $$1"), "$local_rank costs $1");
    }
}
