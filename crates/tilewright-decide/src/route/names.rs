//! Names of checkpoints: the built-in ones, what people type for them, and names of one's own.

use crate::python::{repr_str, strip};

/// The built-in names, each with its repository and the folder in it.
pub const BUILT_IN: [(&str, &str); 3] = [
    ("english", "convaiinnovations/laya"),
    ("multilingual", "convaiinnovations/laya/multilingual"),
    ("typed-decisions", "convaiinnovations/laya/typed-decisions"),
];

const ALIASES: [(&str, &str); 10] = [
    ("decisions", "typed-decisions"),
    ("default", "english"),
    ("en", "english"),
    ("laya", "english"),
    ("laya-multilingual", "multilingual"),
    ("laya-typed-decisions", "typed-decisions"),
    ("ml", "multilingual"),
    ("multi", "multilingual"),
    ("typed", "typed-decisions"),
    ("typed_decisions", "typed-decisions"),
];

/// The name without surrounding space, in lower case, an alias replaced by what it stands for.
pub fn canonical(name: &str) -> String {
    let key = strip(name).to_lowercase();
    match ALIASES.iter().find(|(alias, _)| *alias == key) {
        Some((_, name)) => (*name).to_owned(),
        None => key,
    }
}

/// Whether this is one of the three.
pub fn is_built_in(key: &str) -> bool {
    BUILT_IN.iter().any(|(name, _)| *name == key)
}

/// Why a name may not be given to a checkpoint of one's own.
pub fn refusal(name: &str, key: &str) -> Option<String> {
    let first = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let valid = key.starts_with(first) && key.chars().all(|c| first(c) || "._-".contains(c));
    if !valid {
        return Some(format!(
            "invalid checkpoint name {}: use lowercase letters, digits, '.', '_' or '-', starting with a letter or digit",
            repr_str(name)
        ));
    }
    (key == "auto").then(|| {
        format!("invalid checkpoint name {}: 'auto' means automatic routing in every model= argument", repr_str(name))
    })
}

/// The complaint about a name that nobody registered.
pub fn unknown<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> String {
    let list = |mut names: Vec<&str>| {
        names.sort_unstable();
        names.into_iter().map(repr_str).collect::<Vec<_>>().join(", ")
    };
    format!(
        "unknown model {}; choose one of [{}] (or an alias: [{}])",
        repr_str(name),
        list(known.collect()),
        list(ALIASES.iter().map(|(alias, _)| *alias).collect())
    )
}

/// A warning for a new name that is probably a mistyped built-in one.
pub fn typo_warning(key: &str) -> Option<String> {
    let near = BUILT_IN.iter().map(|(name, _)| *name).find(|name| is_one_edit(key, name))?;
    Some(format!(
        "checkpoint name {} is one edit from the built-in {}; it is registered as a separate checkpoint and {} is unchanged",
        repr_str(key),
        repr_str(near),
        repr_str(near)
    ))
}

/// One letter put in, left out or replaced, or two neighbours swapped.
fn is_one_edit(left: &str, right: &str) -> bool {
    let (a, b): (Vec<char>, Vec<char>) = (left.chars().collect(), right.chars().collect());
    let (short, long) = if a.len() <= b.len() { (&a, &b) } else { (&b, &a) };
    let start = short.iter().zip(long).take_while(|(x, y)| x == y).count();
    let (short, long) = (&short[start..], &long[start..]);
    match long.len() - short.len() {
        1 => *short == long[1..],
        0 if short.is_empty() => false,
        0 => {
            short[1..] == long[1..]
                || short.len() >= 2 && short[0] == long[1] && short[1] == long[0] && short[2..] == long[2..]
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aliases_are_trimmed_and_lowered() {
        for (name, want) in [
            (" EN ", "english"),
            ("Laya", "english"),
            ("default", "english"),
            ("ML", "multilingual"),
            ("laya-multilingual", "multilingual"),
            ("typed_decisions", "typed-decisions"),
            ("decisions", "typed-decisions"),
            ("Papers", "papers"),
        ] {
            assert_eq!(canonical(name), want);
        }
    }

    #[test]
    fn one_edit_is_one_letter_or_one_swap() {
        for typo in ["englsh", "englishh", "english1", "engmish", "enlgish", "nglish", "xenglish", "englihs"] {
            assert!(is_one_edit(typo, "english"), "{typo}");
        }
        for other in ["english", "en", "enlgsih", "hsilgne", "eng-lish2", "glish"] {
            assert!(!is_one_edit(other, "english"), "{other}");
        }
        assert!(typo_warning("multilingua").unwrap().contains("'multilingual'"));
        assert!(typo_warning("papers").is_none());
    }

    #[test]
    fn names_of_ones_own_have_a_spelling() {
        for good in ["papers", "a", "7b", "my.model_v2-x"] {
            assert_eq!(refusal(good, good), None);
        }
        for bad in ["", "-x", "a/b", "größe", "a b", "auto"] {
            assert!(refusal(bad, bad).is_some(), "{bad}");
        }
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let text = unknown("klingon", ["multilingual", "english"].into_iter());
        assert!(
            text.starts_with(
                "unknown model 'klingon'; choose one of ['english', 'multilingual'] (or an alias: ['decisions', "
            ),
            "{text}"
        );
    }
}
