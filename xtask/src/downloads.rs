//! `cargo xtask downloads`: no feature may bring a crate whose build fetches something. What cargo itself fetches is checked against the lock file; what a
//! build script fetches is not.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, bail};
use serde_json::Value;

/// Crates that speak HTTP: of a build script's dependencies none may be one.
const CLIENTS: [&str; 9] = ["ureq", "reqwest", "curl", "attohttpc", "minreq", "isahc", "hyper", "hf-hub", "git2"];

/// Crates that are known to fetch a build of something by other means, or exist for that.
const FETCHERS: [&str; 7] = [
    "tracel-llvm",
    "tracel-llvm-bundler",
    concat!("cube", "cl-llvm"),
    concat!("cube", "cl-cpu"),
    concat!("cube", "cl-cuda"),
    concat!("cube", "cl-hip"),
    "ort-sys",
];

/// Checks everything that the program can be built of, with all features.
pub fn check(root: &Path) -> anyhow::Result<Vec<String>> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let output = std::process::Command::new(&cargo)
        .args(["metadata", "--all-features", "--locked", "--format-version", "1", "--filter-platform", &host(&cargo)?])
        .current_dir(root)
        .output()
        .with_context(|| format!("run {cargo} metadata in {}", root.display()))?;
    if !output.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    problems(&serde_json::from_slice(&output.stdout)?)
}

/// What builds made here are for, so that nothing of other systems has to be fetched.
fn host(cargo: &str) -> anyhow::Result<String> {
    let output = std::process::Command::new(cargo).arg("-vV").output().with_context(|| format!("run {cargo} -vV"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().find_map(|l| l.strip_prefix("host: ")).map(str::to_owned).context("cargo -vV names no host")
}

fn problems(metadata: &Value) -> anyhow::Result<Vec<String>> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let names: BTreeMap<String, String> =
        list(&metadata["packages"]).iter().map(|p| (text(&p["id"]), text(&p["name"]))).collect();
    let nodes: BTreeMap<String, Value> =
        list(&metadata["resolve"]["nodes"]).into_iter().map(|n| (text(&n["id"]), n)).collect();
    if nodes.is_empty() {
        bail!("cargo metadata tells no dependencies");
    }
    let mut found = BTreeSet::new();
    for (id, node) in &nodes {
        let name = &names[id];
        if FETCHERS.contains(&name.as_str()) {
            found.insert(format!("{name}: its build fetches something; choose features without it"));
        }
        // All that this crate's build script is made of.
        let mut waiting: Vec<String> = list(&node["deps"])
            .iter()
            .filter(|d| list(&d["dep_kinds"]).iter().any(|k| k["kind"] == "build"))
            .map(|d| text(&d["pkg"]))
            .collect();
        let mut seen = BTreeSet::new();
        while let Some(next) = waiting.pop() {
            if !seen.insert(next.clone()) {
                continue;
            }
            if CLIENTS.contains(&names[&next].as_str()) {
                found.insert(format!("{name}: its build script uses {}, which fetches; do without it", names[&next]));
            }
            let normal = |d: &Value| list(&d["dep_kinds"]).iter().any(|k| k["kind"].is_null());
            waiting.extend(list(&nodes[&next]["deps"]).iter().filter(|d| normal(d)).map(|d| text(&d["pkg"])));
        }
    }
    Ok(found.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A package with its dependencies and their kinds.
    type Package<'a> = (&'a str, &'a [(&'a str, Option<&'a str>)]);

    fn of(packages: &[Package]) -> Vec<String> {
        let nodes: Vec<_> = packages
            .iter()
            .map(|(name, deps)| {
                let deps: Vec<_> =
                    deps.iter().map(|(d, kind)| json!({"pkg": d, "dep_kinds": [{"kind": kind}]})).collect();
                json!({"id": name, "deps": deps})
            })
            .collect();
        let packages: Vec<_> = packages.iter().map(|(name, _)| json!({"id": name, "name": name})).collect();
        problems(&json!({"packages": packages, "resolve": {"nodes": nodes}})).unwrap()
    }

    #[test]
    fn a_client_at_run_time_is_fine_and_in_a_build_script_is_not() {
        assert!(of(&[("a", &[("ureq", None), ("cc", Some("build"))]), ("ureq", &[]), ("cc", &[])]).is_empty());
        let direct = of(&[("a", &[("ureq", Some("build"))]), ("ureq", &[])]);
        assert!(direct.len() == 1 && direct[0].starts_with("a:") && direct[0].contains("ureq"), "{direct:?}");
        let behind = of(&[("a", &[("b", Some("build"))]), ("b", &[("curl", None)]), ("curl", &[])]);
        assert!(behind.len() == 1 && behind[0].contains("curl"), "{behind:?}");
        // What b's own tests or build script use is not in a's build script.
        assert!(of(&[("a", &[("b", Some("build"))]), ("b", &[("curl", Some("dev"))]), ("curl", &[])]).is_empty());
    }

    #[test]
    fn crates_that_are_known_to_fetch_a_build_are_refused() {
        for name in FETCHERS {
            assert_eq!(of(&[("a", &[(name, None)]), (name, &[])]).len(), 1, "{name}");
        }
    }

    #[test]
    fn metadata_without_dependencies_is_an_error() {
        assert!(problems(&json!({"packages": [], "resolve": null})).is_err());
    }
}
