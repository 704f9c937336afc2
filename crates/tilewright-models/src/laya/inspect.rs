//! What a folder holds, and whether it is a whole checkpoint: for people who have one that does not load.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tilewright_core::Result;

use super::checkpoint::{AGENT, Checkpoint, ENCODER, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS, absent, read};
use super::config::AgentConfig;
use super::digest::Digests;
use super::tensors::TensorFile;
use crate::json::object;
use crate::modernbert::EncoderConfig;

/// A file that a checkpoint should hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileEntry {
    /// Relative to the folder.
    pub path: &'static str,
    /// Its size; `None` when it is missing.
    pub bytes: Option<u64>,
}

/// A special token that prompts are built with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SpecialToken {
    /// `cls_token`, `sep_token`, `pad_token` or `mask_token`.
    pub role: &'static str,
    /// Its text.
    pub content: String,
    /// Its id.
    pub id: u32,
}

/// See the module's words.
#[derive(Clone, PartialEq, Debug)]
pub struct Inspection {
    /// The folder.
    pub dir: PathBuf,
    /// The five files.
    pub files: Vec<FileEntry>,
    /// The agent's configuration, where it can be read.
    pub agent: Option<AgentConfig>,
    /// The encoder's, where it can be read.
    pub encoder: Option<EncoderConfig>,
    /// Tensors in the weights' file.
    pub tensors: usize,
    /// Elements of them all.
    pub parameters: u64,
    /// How many tensors are stored in which type.
    pub dtypes: Vec<(String, usize)>,
    /// How many tensors are spelled as laya-mlx spells them.
    pub renamed_tensors: usize,
    /// The four special tokens, as far as they are there.
    pub special_tokens: Vec<SpecialToken>,
    /// What keeps it from being used, in words; empty for a whole checkpoint.
    pub problems: Vec<String>,
}

impl Inspection {
    /// Whether everything is there and fits.
    pub fn is_whole(&self) -> bool {
        self.problems.is_empty()
    }
}

/// Looks at a folder. Weights are compared with the configuration by name, shape and type; their values are not read.
///
/// # Errors
/// Only when there is no such folder; whatever is wrong inside of it is listed.
pub fn inspect(dir: &Path, sha256: Option<&Digests>) -> Result<Inspection> {
    if !dir.is_dir() {
        return Err(absent(dir, "there is no such folder; give the folder of a Laya checkpoint"));
    }
    let files = [AGENT, WEIGHTS, ENCODER, TOKENIZER, TOKENIZER_CONFIG]
        .map(|path| FileEntry { path, bytes: dir.join(path).metadata().ok().filter(|m| m.is_file()).map(|m| m.len()) });
    let mut problems = Vec::new();
    let (mut agent, mut encoder) = (None, None);
    match Checkpoint::open(dir, sha256) {
        Ok(checkpoint) => {
            agent = Some(checkpoint.agent().clone());
            encoder = Some(checkpoint.encoder().clone());
        }
        Err(error) => {
            problems.push(error.to_string());
            let path = dir.join(AGENT);
            agent = read(&path).and_then(|json| AgentConfig::parse(&json, &path)).ok().or(agent);
            let path = dir.join(ENCODER);
            encoder = read(&path).and_then(|json| EncoderConfig::parse(&json, &path)).ok().or(encoder);
        }
    }
    let weights = TensorFile::open(&dir.join(WEIGHTS)).ok();
    let special_tokens = special_tokens(dir, encoder.as_ref(), &mut problems);
    Ok(Inspection {
        dir: dir.to_owned(),
        files: files.to_vec(),
        agent,
        encoder,
        tensors: weights.as_ref().map_or(0, |w| w.tensors.len()),
        parameters: weights.as_ref().map_or(0, TensorFile::parameter_count),
        dtypes: weights.as_ref().map_or(vec![], TensorFile::dtypes),
        renamed_tensors: weights.as_ref().map_or(0, |w| w.renamed),
        special_tokens,
        problems,
    })
}

/// The four special tokens of the tokenizer's files.
fn special_tokens(dir: &Path, encoder: Option<&EncoderConfig>, problems: &mut Vec<String>) -> Vec<SpecialToken> {
    const HINT: &str = "fetch the tokenizer folder of the checkpoint again";
    let mut load = |name: &str| {
        let path = dir.join(name);
        if !path.is_file() {
            problems.push(absent(&path, &format!("there is no such file; {HINT}")).to_string());
            return None;
        }
        read(&path).and_then(|json| object(&json, &path, HINT)).map_err(|e| problems.push(e.to_string())).ok()
    };
    let (Some(tokenizer), Some(config)) = (load(TOKENIZER), load(TOKENIZER_CONFIG)) else { return vec![] };
    let mut found = Vec::new();
    for role in ["cls_token", "sep_token", "pad_token", "mask_token"] {
        let value = config.get(role).unwrap_or(&Value::Null);
        let Some(content) = value.as_str().or_else(|| value.get("content")?.as_str()) else {
            problems.push(format!("{}: there is no `{role}`; {HINT}", dir.join(TOKENIZER_CONFIG).display()));
            continue;
        };
        let added = tokenizer.get("added_tokens").and_then(Value::as_array);
        let added = added.and_then(|all| all.iter().find(|t| t["content"] == content)).map(|t| &t["id"]);
        let id = added.or_else(|| tokenizer.get("model")?.get("vocab")?.get(content)).and_then(Value::as_u64);
        let Some(id) = id.and_then(|id| u32::try_from(id).ok()) else {
            let path = dir.join(TOKENIZER);
            problems.push(format!("{}: `{role}` \"{content}\" has no id there; {HINT}", path.display()));
            continue;
        };
        if let Some(encoder) = encoder.filter(|e| id as usize >= e.vocab_size) {
            let path = dir.join(TOKENIZER);
            problems.push(format!(
                "{}: `{role}` has id {id}, but the encoder knows {} tokens; {HINT}",
                path.display(),
                encoder.vocab_size
            ));
        }
        found.push(SpecialToken { role, content: content.to_owned(), id });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::laya::demo::{self, DemoShape};

    fn demo_in(dir: &tempfile::TempDir) -> PathBuf {
        let path = dir.path().join("demo");
        demo::write(&path, DemoShape::Tiny, 1).unwrap();
        path
    }

    #[test]
    fn a_whole_checkpoint_is_described() {
        let dir = tempfile::tempdir().unwrap();
        let i = inspect(&demo_in(&dir), None).unwrap();
        assert_eq!(i.problems, Vec::<String>::new());
        assert!(i.is_whole() && i.files.iter().all(|f| f.bytes.is_some_and(|b| b > 0)));
        assert_eq!(i.dtypes, [("F16".to_owned(), i.tensors)]);
        let roles: Vec<_> = i.special_tokens.iter().map(|t| (t.role, t.content.as_str())).collect();
        assert_eq!(
            roles,
            [("cls_token", "[CLS]"), ("sep_token", "[SEP]"), ("pad_token", "[PAD]"), ("mask_token", "[MASK]")]
        );
        assert_eq!(i.encoder.unwrap(), DemoShape::Tiny.encoder());
    }

    #[test]
    fn each_missing_file_makes_it_incomplete_and_is_named() {
        for name in [AGENT, WEIGHTS, ENCODER, TOKENIZER, TOKENIZER_CONFIG] {
            let dir = tempfile::tempdir().unwrap();
            let path = demo_in(&dir);
            std::fs::remove_file(path.join(name)).unwrap();
            let i = inspect(&path, None).unwrap();
            assert!(!i.is_whole() && i.problems.iter().any(|p| p.contains(name)), "{name}: {:?}", i.problems);
            assert!(i.files.iter().any(|f| f.path == name && f.bytes.is_none()));
        }
    }

    #[test]
    fn a_tokenizer_without_a_special_token_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = demo_in(&dir).join(TOKENIZER_CONFIG);
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("\"[SEP]\"", "\"[NONE]\"").replace("cls_token", "class")).unwrap();
        let problems = inspect(path.parent().unwrap().parent().unwrap(), None).unwrap().problems;
        assert!(problems.iter().any(|p| p.contains("no `cls_token`")), "{problems:?}");
        assert!(problems.iter().any(|p| p.contains("`sep_token` \"[NONE]\"")), "{problems:?}");
    }

    #[test]
    fn a_folder_that_is_not_there_is_an_error() {
        let error = inspect(Path::new("no/such/folder"), None).unwrap_err().to_string();
        assert!(error.contains("no/such/folder"), "{error}");
    }
}
