//! Which op runs where, from the folders themselves: the README's table is made of it, and no GPU code is one vendor's outside the CUDA files.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;

/// Where the table stands in the README.
const BEGIN: &str = "<!-- made by `cargo xtask support` from the folders of the ops -->\n";
const END: &str = "<!-- end of what is made -->\n";

/// Folders of the op crate that are no ops.
const SHARED: [&str; 2] = ["cpu", "runtime"];

/// Columns of the table: what they are called, and the file or folder of an op that fills them.
const COLUMNS: [(&str, &str); 3] = [("processor", "cpu"), ("CUDA", "cuda"), ("Vulkan, Metal", "gpu")];

/// Languages of GPUs other than the two that this tree is written in: CUDA C++ in folders called `cuda`, Rust everywhere else.
const FOREIGN: [&str; 9] = ["ptx", "hip", "metal", "msl", "wgsl", "glsl", "comp", "hlsl", "spv"];

/// Names of vendors; a kernel or its launch asks what a device can, never who made it. Split, so that this file does not break its own rules.
const VENDORS: [&str; 12] = [
    concat!("nvi", "dia"),
    concat!("am", "d"),
    concat!("rad", "v"),
    concat!("rade", "on"),
    concat!("int", "el"),
    concat!("app", "le"),
    concat!("qual", "comm"),
    concat!("ma", "li"),
    concat!("cu", "da"),
    concat!("0x10", "de"),
    concat!("0x10", "02"),
    concat!("0x80", "86"),
];

/// The ops of `source`, each with the columns that its folder fills.
fn matrix(source: &Path) -> anyhow::Result<BTreeMap<String, [bool; COLUMNS.len()]>> {
    let mut ops = BTreeMap::new();
    for entry in std::fs::read_dir(source).with_context(|| format!("list {}", source.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.file_type()?.is_dir() && !SHARED.contains(&name.as_str()) {
            let has = |part: &str| {
                entry.path().join(format!("{part}.rs")).is_file() || entry.path().join(part).join("mod.rs").is_file()
            };
            ops.insert(name, COLUMNS.map(|(_, part)| has(part)));
        }
    }
    Ok(ops)
}

/// The table, with its marks.
pub fn table(source: &Path) -> anyhow::Result<String> {
    let mut text = format!("{BEGIN}\n| op | {} |\n|---|", COLUMNS.map(|(name, _)| name).join(" | "));
    text += &"---|".repeat(COLUMNS.len());
    for (op, runs) in matrix(source)? {
        text += &format!("\n| {op} | {} |", runs.map(|r| if r { "yes" } else { "" }).join(" | "));
    }
    Ok(text + "\n\n" + END)
}

/// The README with this table in place of its own.
pub fn with_table(readme: &str, table: &str) -> anyhow::Result<String> {
    let (before, rest) = readme.split_once(BEGIN).context("README.md has no place for the table of ops")?;
    let (_, after) = rest.split_once(END).context("the table of ops in README.md has no end")?;
    Ok(format!("{before}{table}{after}"))
}

/// Complains about a README whose table is not that of the folders.
pub fn check_readme(readme: &str, source: &Path, problems: &mut Vec<String>) -> anyhow::Result<()> {
    match with_table(readme, &table(source)?) {
        Ok(wanted) if wanted == readme => {}
        Ok(_) => {
            problems.push("README.md: the table of ops is not that of the folders; run `cargo xtask support`".into())
        }
        Err(error) => problems.push(format!("README.md: {error}; put `{}` and `{}` there", BEGIN.trim(), END.trim())),
    }
    Ok(())
}

/// Complains about GPU code of one vendor; `path` is relative to the root.
pub fn check_file(path: &str, content: &str, problems: &mut Vec<String>) {
    let Some(inside) = path.strip_prefix("crates/tilewright-ops/src/") else { return };
    let parts: Vec<&str> = inside.split('/').collect();
    let extension = inside.rsplit_once('.').map_or("", |(_, e)| e);
    if FOREIGN.contains(&extension) {
        problems.push(format!("{path}: kernels are CUDA C++ in a folder `cuda`, or Rust in gpu.rs"));
    }
    if matches!(extension, "cu" | "cuh") && !parts.contains(&"cuda") {
        problems.push(format!("{path}: CUDA C++ belongs in a folder `cuda`"));
    }
    let portable = extension == "rs" && (parts.contains(&"gpu") || parts.last() == Some(&"gpu.rs"));
    // What only tests are made of stands for one vendor's hardware on purpose.
    let stand_in = parts.iter().any(|p| p.starts_with("metal") || p.starts_with("emulat") || *p == "tests.rs");
    if !portable || stand_in {
        return;
    }
    // Tests may name whose hardware a case stands for.
    let tests = content.find("\n#[cfg(test)]\nmod tests {").unwrap_or(content.len());
    for (number, line) in content[..tests].lines().enumerate() {
        let code = code(line).to_lowercase();
        if let Some(vendor) = VENDORS.iter().find(|v| has_word(&code, v)) {
            problems
                .push(format!("{path}:{}: `{vendor}` in portable GPU code; ask for a capability instead", number + 1));
        }
    }
}

/// A line without its comment and without what stands in quotes.
fn code(line: &str) -> String {
    let mut out = String::new();
    let (mut quoted, mut before) = (false, ' ');
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' if before != '\\' && before != '\'' => quoted = !quoted,
            '/' if !quoted && chars.peek() == Some(&'/') => break,
            _ if !quoted => out.push(c),
            _ => {}
        }
        before = c;
    }
    out
}

/// Whether a word or a part of a name between underscores is `word`.
fn has_word(line: &str, word: &str) -> bool {
    line.split(|c: char| !c.is_alphanumeric()).any(|part| part == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ops(name: &str, files: &[&str]) -> std::path::PathBuf {
        let root = std::env::temp_dir().join(format!("support-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        for file in files {
            let path = root.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }
        root
    }

    #[test]
    fn the_table_is_what_the_folders_hold() {
        let files = ["gelu/cpu.rs", "gelu/gpu.rs", "matmul/cpu/mod.rs", "matmul/cuda/mod.rs", "cpu/mod.rs", "lib.rs"];
        let root = ops("table", &files);
        let table = table(&root).unwrap();
        assert!(table.contains("| gelu | yes |  | yes |\n| matmul | yes | yes |  |\n"), "{table}");
        assert!(!table.contains("| cpu |"), "{table}");
        let old = format!("# Name\n\n{BEGIN}old\n{END}\nmore\n");
        let mut problems = Vec::new();
        check_readme(&old, &root, &mut problems).unwrap();
        assert!(problems.len() == 1 && problems[0].contains("cargo xtask support"), "{problems:?}");
        let new = with_table(&old, &table).unwrap();
        assert!(new.starts_with("# Name\n\n<!--") && new.ends_with("-->\n\nmore\n"), "{new}");
        problems.clear();
        check_readme(&new, &root, &mut problems).unwrap();
        check_readme("no place", &root, &mut problems).unwrap();
        assert!(problems.len() == 1 && problems[0].contains("no place"), "{problems:?}");
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_vendor_in_portable_code_is_refused_and_in_words_about_it_is_not() {
        let found = |path: &str, line: &str| {
            let mut problems = Vec::new();
            check_file(path, line, &mut problems);
            problems
        };
        let ops = "crates/tilewright-ops/src";
        for vendor in VENDORS {
            for path in ["gelu/gpu.rs", "matmul/gpu/product.rs", "runtime/gpu/adapters.rs"] {
                let path = format!("{ops}/{path}");
                let line = format!("let fast = gpu.is_{vendor}();");
                assert_eq!(found(&path, &line).len(), 1, "{line}");
                assert!(found(&path, &format!("let x = 1; // on {vendor}")).is_empty());
                assert!(found(&path, &format!("say(\"of {vendor}, or \\\"{vendor}\\\"\");")).is_empty());
            }
            let line = format!("let fast = is_{vendor};");
            assert!(found(&format!("{ops}/gelu/cuda/mod.rs"), &line).is_empty());
            assert!(found(&format!("{ops}/runtime/gpu/metal.rs"), &line).is_empty());
            let tests = format!("let x = 1;\n#[cfg(test)]\nmod tests {{\n{line}\n}}\n");
            assert!(found(&format!("{ops}/gelu/gpu.rs"), &tests).is_empty());
        }
    }

    #[test]
    fn gpu_sources_in_other_languages_are_refused() {
        for (path, count) in [
            ("gelu/cuda/gelu.cu", 0),
            ("gelu/gelu.cu", 1),
            ("gelu/gelu.metal", 1),
            ("matmul/gpu/product.wgsl", 1),
            ("runtime/cuda/tiles.cuh", 0),
        ] {
            let mut problems = Vec::new();
            check_file(&format!("crates/tilewright-ops/src/{path}"), "", &mut problems);
            assert_eq!(problems.len(), count, "{path}");
        }
    }
}
