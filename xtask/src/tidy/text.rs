//! What may stand in which file: lengths, words that belong to one crate, things never left behind.

/// Longest source file.
const MAX_LINES: usize = 800;

/// A word and the only folder whose sources may hold it; its crate's manifest may, too. Split, so that this file does not break its own rules.
const CONFINED: [(&str, &str); 5] = [
    (concat!("cube", "cl"), "crates/tilewright-ops/src/runtime/gpu/"),
    (concat!("cuda", "rc"), "crates/tilewright-ops/"),
    (concat!("std::", "arch"), "crates/tilewright-ops/"),
    (concat!("core::", "arch"), "crates/tilewright-ops/"),
    (concat!("tok", "io"), "crates/tilewright-serve/"),
];

/// What no source may hold.
const FORBIDDEN: [(&str, &str); 3] = [
    (concat!("to", "do!("), "finish it or leave it out"),
    (concat!("unimpl", "emented!("), "finish it or return a typed error"),
    (concat!("#[ig", "nore"), "make the test fast, or make it say what it lacks"),
];

/// Beginnings of paths that exist on one machine only.
const MACHINE_PATHS: [&str; 5] = [
    concat!("/ho", "me/"),
    concat!("/ro", "ot/"),
    concat!("/Us", "ers/"),
    concat!("/wo", "rk/"),
    concat!(":\\Us", "ers\\"),
];

/// Checks one file; `path` is relative to the root.
pub fn check(path: &str, content: &str, problems: &mut Vec<String>) {
    let source = path.ends_with(".rs");
    let manifest = path.ends_with("Cargo.toml") && path != "Cargo.toml";
    let lines = content.lines().count();
    if source && lines > MAX_LINES {
        problems.push(format!("{path}: {lines} lines, the limit is {MAX_LINES}; split it by subject"));
    }
    for (number, line) in content.lines().enumerate() {
        let at = || format!("{path}:{}", number + 1);
        if source || manifest {
            for (word, home) in CONFINED {
                let home = if manifest { home.find("src/").map_or(home, |at| &home[..at]) } else { home };
                if has_word(line, word) && !path.starts_with(home) {
                    problems.push(format!("{}: `{word}` belongs in {home} only", at()));
                }
            }
        }
        if source {
            for (what, instead) in FORBIDDEN {
                if line.contains(what) {
                    problems.push(format!("{}: `{what}`; {instead}", at()));
                }
            }
        }
        for prefix in MACHINE_PATHS {
            if has_path(line, prefix) {
                problems.push(format!("{}: a path of one machine (`{prefix}`); make it relative or a flag", at()));
            }
        }
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Whether `word` stands in `line` and is not the inside of a longer word.
fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(i, _)| {
        let before = line[..i].chars().next_back();
        let after = line[i + word.len()..].chars().next();
        // A suffix after an underscore names a part of the same library.
        !before.is_some_and(is_word) && !after.is_some_and(char::is_alphanumeric)
    })
}

/// Whether `line` holds an absolute path that begins with `prefix`: what precedes it must not be part of a longer path or address.
fn has_path(line: &str, prefix: &str) -> bool {
    line.match_indices(prefix).any(|(i, _)| {
        let before = line[..i].chars().next_back();
        prefix.starts_with(':') || !before.is_some_and(|c| is_word(c) || "./-}*)~".contains(c))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(path: &str, content: &str) -> Vec<String> {
        let mut problems = Vec::new();
        check(path, content, &mut problems);
        problems
    }

    #[test]
    fn a_source_of_800_lines_is_accepted_and_one_more_refused() {
        let line = "let x = 1;\n";
        assert!(problems("a.rs", &line.repeat(800)).is_empty());
        assert!(problems("a.rs", &line.repeat(801))[0].contains("801 lines"));
        assert!(problems("a.txt", &line.repeat(801)).is_empty(), "texts may be long");
    }

    #[test]
    fn confined_words_are_refused_outside_their_crate() {
        for (word, home) in CONFINED {
            let line = format!("use {word}::something;\n");
            let found = problems("crates/tilewright-models/src/lib.rs", &line);
            assert!(found.len() == 1 && found[0].contains("lib.rs:1") && found[0].contains(home), "{word}: {found:?}");
            assert!(problems(&format!("{home}src/lib.rs"), &line).is_empty(), "{word} at home");
        }
    }

    #[test]
    fn confined_words_are_refused_in_manifests_but_not_in_the_root_one_or_in_prose() {
        let line = format!("{}.workspace = true\n", CONFINED[0].0);
        assert_eq!(problems("crates/tilewright/Cargo.toml", &line).len(), 1);
        assert!(problems("Cargo.toml", &line).is_empty());
        assert!(problems("ARCHITECTURE.md", &line).is_empty());
    }

    #[test]
    fn the_portable_gpu_library_is_named_in_its_seam_and_manifest_and_not_in_the_kernels_of_an_op() {
        let line = format!("use {}::prelude::*;\n", CONFINED[0].0);
        assert_eq!(problems("crates/tilewright-ops/src/gelu/gpu.rs", &line).len(), 1);
        assert!(problems("crates/tilewright-ops/src/runtime/gpu/math.rs", &line).is_empty());
        assert!(problems("crates/tilewright-ops/Cargo.toml", &line).is_empty());
        assert_eq!(problems("crates/tilewright-ops/src/runtime/cuda/mod.rs", &line).len(), 1);
    }

    #[test]
    fn a_word_inside_a_longer_one_is_no_breach() {
        let inside = format!("let s{}ns = std::{}itecture;\n", CONFINED[4].0, "arch");
        assert!(problems("a.rs", &inside).is_empty());
        assert_eq!(problems("a.rs", &format!("use {}_runtime;\n", CONFINED[0].0)).len(), 1);
    }

    #[test]
    fn unfinished_work_and_skipped_tests_are_refused() {
        for (what, _) in FORBIDDEN {
            let found = problems("xtask/src/a.rs", &format!("fine\n    {what}\n"));
            assert!(found.len() == 1 && found[0].contains("a.rs:2"), "{what}: {found:?}");
        }
    }

    #[test]
    fn paths_of_one_machine_are_refused_in_every_kind_of_file() {
        for prefix in MACHINE_PATHS {
            for file in ["a.rs", "README.md", "bench/records/x.json", ".ci/run"] {
                let line = format!("see \"{prefix}someone/x\"\n").replace("\":", "\"C:");
                assert_eq!(problems(file, &line).len(), 1, "{prefix} in {file}");
            }
        }
    }

    #[test]
    fn relative_paths_and_addresses_are_no_breach() {
        let home = MACHINE_PATHS[0];
        for line in [
            format!("https://example.org{home}x"),
            format!("crates{home}x"),
            format!("..{home}x"),
            "/usr/share/x".into(),
        ] {
            assert!(problems("README.md", &line).is_empty(), "{line}");
        }
    }
}
