//! Which crate of the workspace may use which.

use anyhow::Context;
use serde_json::Value;

/// A crate and all that it may depend on, in any section of its manifest. What is not listed is refused.
const ALLOWED: [(&str, &[&str]); 10] = [
    (
        "tilewright",
        &[
            "tilewright-serve",
            "tilewright-train",
            "tilewright-decide",
            "tilewright-bench",
            "tilewright-models",
            "tilewright-ops",
            "tilewright-core",
        ],
    ),
    ("tilewright-serve", &["tilewright-decide", "tilewright-models", "tilewright-ops", "tilewright-core"]),
    ("tilewright-decide", &["tilewright-models", "tilewright-ops", "tilewright-core"]),
    ("tilewright-train", &["tilewright-models", "tilewright-ops", "tilewright-core"]),
    ("tilewright-models", &["tilewright-ops", "tilewright-core"]),
    ("tilewright-ops", &["tilewright-core"]),
    ("tilewright-bench", &["tilewright-core"]),
    ("tilewright-core", &[]),
    ("lab", &["tilewright-train", "tilewright-models", "tilewright-ops", "tilewright-core"]),
    ("xtask", &[]),
];

/// Checks the output of `cargo metadata --no-deps`.
pub fn check(metadata: &Value, problems: &mut Vec<String>) -> anyhow::Result<()> {
    let packages = metadata["packages"].as_array().context("cargo metadata tells no packages")?;
    let names: Vec<&str> = packages.iter().filter_map(|p| p["name"].as_str()).collect();
    for package in packages {
        let name = package["name"].as_str().context("a package without a name")?;
        let Some((_, allowed)) = ALLOWED.iter().find(|(n, _)| *n == name) else {
            problems.push(format!("{name}: is no crate of the design; give it a place in xtask/src/tidy/edges.rs"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            // `name` is the package's own name even where the manifest renames it.
            let dependency = dependency["name"].as_str().unwrap_or_default();
            let ours = names.contains(&dependency) || ALLOWED.iter().any(|(n, _)| *n == dependency);
            if ours && !allowed.contains(&dependency) {
                problems.push(format!("{name}: must not use {dependency}; see the code map of ARCHITECTURE.md"));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn problems(edges: &[(&str, &[&str])]) -> Vec<String> {
        let package = |(name, uses): &(&str, &[&str])| {
            let uses: Vec<_> = uses.iter().map(|u| json!({"name": u, "rename": "alias"})).collect();
            json!({"name": name, "dependencies": uses})
        };
        let packages: Vec<_> = edges.iter().map(package).collect();
        let mut problems = Vec::new();
        check(&json!({ "packages": packages }), &mut problems).unwrap();
        problems
    }

    #[test]
    fn the_designed_edges_are_accepted() {
        assert_eq!(problems(&ALLOWED), Vec::<String>::new());
        assert!(
            problems(&[("tilewright-core", &["half", "thiserror"])]).is_empty(),
            "crates from outside are not our concern"
        );
    }

    #[test]
    fn every_edge_upwards_is_refused() {
        for (from, to) in [
            ("tilewright-core", "tilewright-ops"),
            ("tilewright-ops", "tilewright-models"),
            ("tilewright-models", "tilewright-train"),
            ("tilewright-train", "tilewright-serve"),
            ("tilewright-train", "tilewright-decide"),
            ("tilewright-decide", "tilewright-train"),
            ("tilewright-bench", "tilewright-ops"),
            ("tilewright-serve", "tilewright"),
            ("xtask", "tilewright-core"),
        ] {
            let found = problems(&[(from, &[to]), (to, &[])]);
            assert!(
                found.len() == 1 && found[0].starts_with(from) && found[0].contains(to),
                "{from} -> {to}: {found:?}"
            );
        }
    }

    #[test]
    fn a_crate_without_a_place_is_refused() {
        assert!(problems(&[("tilewright-everything", &[])])[0].contains("tilewright-everything"));
    }
}
