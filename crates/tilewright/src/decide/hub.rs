//! Checkpoints of the Hugging Face hub: only the files of the wanted folder are fetched, once, into the hub's usual cache, and their SHA-256 sums are
//! kept in a manifest beside it. Compiled with the feature `hub` only; nothing else of the program uses the network.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use hf_hub::api::sync::ApiBuilder;
use hf_hub::{Repo, RepoType};
use serde_json::{Map, Value, json};
use tilewright_models::laya::digest::sha256;

/// What a checkpoint consists of.
const FILES: [&str; 5] = [
    "rl_agent_config.json",
    "model.safetensors",
    "encoder/config.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
];

/// `OWNER/REPO[/SUBFOLDER][@REVISION]`.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Spec {
    repo: String,
    subfolder: Option<String>,
    revision: Option<String>,
}

impl Spec {
    fn parse(text: &str) -> Result<Self> {
        let (path, revision) = match text.split_once('@') {
            Some((path, revision)) => (path, Some(revision.to_owned())),
            None => (text, None),
        };
        let parts: Vec<&str> = path.split('/').collect();
        let usable = |part: &&str| !part.is_empty() && !part.starts_with('.') && !part.contains(['\\', ':', ' ']);
        ensure!(
            parts.len() >= 2 && parts.iter().all(usable) && revision.as_deref() != Some(""),
            "--hub {text} names no repository; write OWNER/REPO, OWNER/REPO/SUBFOLDER or OWNER/REPO@REVISION"
        );
        let subfolder = parts[2..].join("/");
        Ok(Spec { repo: parts[..2].join("/"), subfolder: (!subfolder.is_empty()).then_some(subfolder), revision })
    }

    /// A file's path in the repository.
    fn path(&self, file: &str) -> String {
        match &self.subfolder {
            Some(folder) => format!("{folder}/{file}"),
            None => file.to_owned(),
        }
    }
}

/// The folder of a checkpoint, fetched if it is not in the cache, and the SHA-256 of its weights.
pub fn fetch(text: &str) -> Result<(PathBuf, String)> {
    let spec = Spec::parse(text)?;
    let api = ApiBuilder::from_env().build().context("the hub's client cannot start; check HF_HOME and HF_ENDPOINT")?;
    let repo = match &spec.revision {
        Some(revision) => Repo::with_revision(spec.repo.clone(), RepoType::Model, revision.clone()),
        None => Repo::model(spec.repo.clone()),
    };
    let repo = api.repo(repo);
    let mut found = Vec::new();
    for file in FILES {
        let path = spec.path(file);
        let local = repo.get(&path).with_context(|| {
            format!(
                "{path} of {} cannot be fetched; check the name and the network, or fetch the folder by other means and give \
                 --model DIR",
                spec.repo
            )
        })?;
        found.push((file, local));
    }
    let dir = found[0].1.parent().context("a file of the cache has a folder")?.to_owned();
    if let Some((file, _)) = found.iter().find(|(file, local)| *local != dir.join(file)) {
        bail!(
            "{file} is of another revision than the rest; run this again when nobody is publishing, or pin @REVISION"
        );
    }
    let sum = manifest(&spec, &dir, &found)?;
    Ok((dir, sum))
}

/// The file beside the cache that holds the sums of this folder.
fn manifest_path(spec: &Spec, dir: &Path) -> PathBuf {
    // .../models--owner--repo/snapshots/<commit>[/<subfolder>]
    let depth = spec.subfolder.as_ref().map_or(0, |f| f.split('/').count());
    let snapshot = dir.ancestors().nth(depth).unwrap_or(dir);
    let root = snapshot.ancestors().nth(2).unwrap_or(snapshot);
    let commit = snapshot.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let folder = spec.subfolder.as_ref().map(|f| format!("-{}", f.replace('/', "-"))).unwrap_or_default();
    root.join(format!("tilewright-{commit}{folder}.json"))
}

/// Writes the sums of the files, or reads them where all sizes are those of the manifest. The sum of the weights.
fn manifest(spec: &Spec, dir: &Path, files: &[(&str, PathBuf)]) -> Result<String> {
    let path = manifest_path(spec, dir);
    let size = |local: &Path| {
        std::fs::metadata(local).map(|m| m.len()).with_context(|| format!("look at {}", local.display()))
    };
    let known: Option<Value> = std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let mut entries = Map::new();
    for (file, local) in files {
        let bytes = size(local)?;
        let entry = known.as_ref().and_then(|k| k["files"].get(file)).filter(|e| e["bytes"] == json!(bytes));
        let sum = match entry.and_then(|e| e["sha256"].as_str()) {
            Some(sum) => sum.to_owned(),
            None => sha256(local)?,
        };
        entries.insert((*file).to_owned(), json!({"bytes": bytes, "sha256": sum}));
    }
    let weights = entries["model.safetensors"]["sha256"].as_str().unwrap_or_default().to_owned();
    let content = json!({"repo": spec.repo, "subfolder": spec.subfolder, "revision": spec.revision, "files": entries});
    if known.as_ref() != Some(&content) {
        tilewright_core::fs::write_atomic(&path, format!("{content:#}\n").as_bytes())?;
    }
    Ok(weights)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_may_have_a_folder_and_a_revision() {
        let spec = Spec::parse("a/b/c/d@55cf").unwrap();
        assert_eq!(
            (spec.repo.as_str(), spec.subfolder.as_deref(), spec.revision.as_deref()),
            ("a/b", Some("c/d"), Some("55cf"))
        );
        assert_eq!(spec.path("x/y.json"), "c/d/x/y.json");
        let plain = Spec::parse("a/b").unwrap();
        assert_eq!((plain.subfolder.as_ref(), plain.path("x")), (None, "x".to_owned()));
        for bad in ["", "a", "a/", "/b", "a/../b", "a/b@", "C:\\x", "a b/c"] {
            assert!(Spec::parse(bad).unwrap_err().to_string().contains("OWNER/REPO"), "{bad}");
        }
    }

    #[test]
    fn the_manifest_lies_beside_the_cache_and_is_believed_while_the_sizes_are_right() {
        let cache = tempfile::tempdir().unwrap();
        let dir = cache.path().join("models--a--b/snapshots/55cf/multi");
        std::fs::create_dir_all(&dir).unwrap();
        let weights = dir.join("model.safetensors");
        std::fs::write(&weights, b"one").unwrap();
        let spec = Spec::parse("a/b/multi").unwrap();
        let files = [("model.safetensors", weights.clone())];
        let first = manifest(&spec, &dir, &files).unwrap();
        let path = cache.path().join("models--a--b/tilewright-55cf-multi.json");
        let told: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(told["files"]["model.safetensors"], json!({"bytes": 3, "sha256": first}));
        std::fs::write(&weights, b"other").unwrap();
        assert_ne!(manifest(&spec, &dir, &files).unwrap(), first, "another size is summed again");
    }
}
