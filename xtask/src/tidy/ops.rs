//! What an op's folder holds, and that the table of ops tells the truth.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Context;

/// Folders of the op crate that are no ops: what the kernels of one kind of device share.
const SHARED: [&str; 2] = ["cpu", "runtime"];

/// Checks the sources of the op crate.
pub fn check(source: &Path, problems: &mut Vec<String>) -> anyhow::Result<()> {
    let mut folders = BTreeSet::new();
    for entry in std::fs::read_dir(source).with_context(|| format!("list {}", source.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !entry.file_type()?.is_dir() || SHARED.contains(&name.as_str()) {
            continue;
        }
        for part in ["mod", "reference", "cpu", "tests"] {
            let file = entry.path().join(format!("{part}.rs")).is_file();
            // The contract and the formula stay one file each, so that they can be read as one page.
            let folder = !matches!(part, "mod" | "reference") && entry.path().join(part).join("mod.rs").is_file();
            if !file && !folder {
                problems.push(format!("{name}: the op has no {part}.rs; see `How to add an op` in CONTRIBUTING.md"));
            }
        }
        folders.insert(name);
    }
    let lib = source.join("lib.rs");
    let table = table(&std::fs::read_to_string(&lib).with_context(|| format!("read {}", lib.display()))?);
    for op in folders.difference(&table) {
        problems.push(format!("{op}: is missing from the table of ops in tilewright-ops/src/lib.rs"));
    }
    for op in table.difference(&folders) {
        problems.push(format!("{op}: stands in the table of ops in tilewright-ops/src/lib.rs, but has no folder"));
    }
    Ok(())
}

/// The ops named by rows like ``//! | [`gelu`] | what it does |``.
fn table(lib: &str) -> BTreeSet<String> {
    let row = |line: &str| Some(line.strip_prefix("//! | [`")?.split_once("`]")?.0.to_owned());
    lib.lines().filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A folder below the target directory that goes away with the test.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[&str], table: &[&str]) -> Self {
            let root = std::env::temp_dir().join(format!("tidy-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&root);
            for file in files {
                let path = root.join(file);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, "").unwrap();
            }
            let rows: String = table.iter().map(|op| format!("//! | [`{op}`] | does it |\n")).collect();
            std::fs::create_dir_all(&root).unwrap();
            std::fs::write(root.join("lib.rs"), format!("//! | op | contract |\n//! |---|---|\n{rows}pub mod x;\n"))
                .unwrap();
            Tree(root)
        }

        fn problems(&self) -> Vec<String> {
            let mut problems = Vec::new();
            check(&self.0, &mut problems).unwrap();
            problems
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    const WHOLE: [&str; 4] = ["gelu/mod.rs", "gelu/reference.rs", "gelu/cpu.rs", "gelu/tests.rs"];

    #[test]
    fn a_whole_op_is_accepted() {
        assert!(Tree::new("whole", &WHOLE, &["gelu"]).problems().is_empty());
        let split = ["gelu/mod.rs", "gelu/reference.rs", "gelu/cpu/mod.rs", "gelu/tests/mod.rs", "cpu/mod.rs"];
        assert!(Tree::new("split", &split, &["gelu"]).problems().is_empty());
    }

    #[test]
    fn each_missing_part_is_named() {
        for (i, part) in ["mod.rs", "reference.rs", "cpu.rs", "tests.rs"].iter().enumerate() {
            let files: Vec<&str> = WHOLE.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, f)| *f).collect();
            let found = Tree::new(&format!("part{i}"), &files, &["gelu"]).problems();
            assert!(found.len() == 1 && found[0].starts_with("gelu") && found[0].contains(part), "{found:?}");
        }
    }

    #[test]
    fn the_table_and_the_folders_must_agree() {
        let unlisted = Tree::new("unlisted", &WHOLE, &[]).problems();
        assert!(unlisted.len() == 1 && unlisted[0].contains("missing from the table"), "{unlisted:?}");
        let ghost = Tree::new("ghost", &WHOLE, &["gelu", "softmax"]).problems();
        assert!(ghost.len() == 1 && ghost[0].starts_with("softmax"), "{ghost:?}");
    }
}
