//! The rules that a compiler does not check: who may depend on whom, what may be named where, and what an op's folder holds.

mod edges;
mod ops;
mod support;
mod text;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

/// Every breach of a rule in the tree at `root`, one line each: `path:line: what is wrong; what to do`.
pub fn check(root: &Path) -> anyhow::Result<Vec<String>> {
    let mut problems = Vec::new();
    edges::check(&metadata(root)?, &mut problems)?;
    for path in files(root)? {
        // Binary files (test vectors, corpora) hold no rules to break.
        if let Ok(content) = std::fs::read_to_string(root.join(&path)) {
            text::check(&path, &content, &mut problems);
            support::check_file(&path, &content, &mut problems);
        }
    }
    let ops_source = root.join("crates/tilewright-ops/src");
    if ops_source.is_dir() {
        ops::check(&ops_source, &mut problems)?;
        let readme = root.join("README.md");
        let readme = std::fs::read_to_string(&readme).with_context(|| format!("read {}", readme.display()))?;
        support::check_readme(&readme, &ops_source, &mut problems)?;
    }
    problems.sort();
    Ok(problems)
}

/// Writes the README's table of ops from the folders.
pub fn write_support(root: &Path) -> anyhow::Result<()> {
    let path = root.join("README.md");
    let readme = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let new = support::with_table(&readme, &support::table(&root.join("crates/tilewright-ops/src"))?)?;
    let temporary = path.with_extension("md.tmp");
    std::fs::write(&temporary, new).with_context(|| format!("write {}", temporary.display()))?;
    std::fs::rename(&temporary, &path).with_context(|| format!("rename {}", temporary.display()))
}

fn metadata(root: &Path) -> anyhow::Result<serde_json::Value> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let output = Command::new(&cargo)
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(root)
        .output()
        .with_context(|| format!("run {cargo} metadata in {}", root.display()))?;
    if !output.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// The files below `root` that belong to the project, relative to it, with `/` between their parts.
fn files(root: &Path) -> anyhow::Result<Vec<String>> {
    // Build outputs, the version control's own files, training runs and fuzzing leftovers.
    const SKIPPED: [&str; 5] = ["target", ".git", "runs", "corpus", "artifacts"];
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let path = root.join(&folder);
        for entry in std::fs::read_dir(&path).with_context(|| format!("list {}", path.display()))? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let relative = folder.join(&name);
            if SKIPPED.contains(&name.as_str()) || name.ends_with(".tmp") {
                continue;
            }
            if entry.file_type()?.is_dir() {
                folders.push(relative);
            } else {
                found
                    .push(relative.components().map(|c| c.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/"));
            }
        }
    }
    found.sort();
    Ok(found)
}
