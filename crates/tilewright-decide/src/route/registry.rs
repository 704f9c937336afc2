//! The checkpoints a router knows, by name, and where they come from.

use super::names;
use crate::error::{Result, value_error};

/// Where a checkpoint is loaded from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Source {
    /// A folder, or `owner/name` of a repository.
    pub location: String,
    /// A folder in it.
    pub subfolder: Option<String>,
}

impl Source {
    /// A folder or repository as a whole.
    pub fn new(location: impl Into<String>) -> Self {
        Source { location: location.into(), subfolder: None }
    }

    /// For people: `location` or `location/subfolder`.
    pub fn text(&self) -> String {
        match &self.subfolder {
            Some(folder) => format!("{}/{folder}", self.location),
            None => self.location.clone(),
        }
    }
}

/// One checkpoint that is known.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Entry {
    key: String,
    /// `None`: attached ready-made, nothing to load it from.
    source: Option<Source>,
    description: Option<String>,
}

/// The three built-in checkpoints and those of one's own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Registry {
    entries: Vec<Entry>,
    warnings: Vec<String>,
}

impl Default for Registry {
    fn default() -> Self {
        let entry = |(key, repository): (&str, &str)| {
            // `owner/name` or `owner/name/folder`.
            let split = repository.match_indices('/').nth(1).map(|(at, _)| at);
            let source = Source {
                location: repository[..split.unwrap_or(repository.len())].to_owned(),
                subfolder: split.map(|at| repository[at + 1..].to_owned()),
            };
            Entry { key: key.to_owned(), source: Some(source), description: None }
        };
        Registry { entries: names::BUILT_IN.map(entry).to_vec(), warnings: Vec::new() }
    }
}

impl Registry {
    /// The key that a name or an alias stands for.
    pub fn resolve(&self, name: &str) -> Result<String> {
        let key = names::canonical(name);
        if self.find(&key).is_some() {
            return Ok(key);
        }
        value_error!("{}", names::unknown(name, self.names()))
    }

    /// Names a checkpoint, or points a known name at another one. A name that looks like a typing error is accepted with a warning.
    /// The key, and whether it was known with another source before.
    pub fn register(
        &mut self,
        name: &str,
        source: Option<Source>,
        description: Option<&str>,
    ) -> Result<(String, bool)> {
        let key = names::canonical(name);
        if !names::is_built_in(&key) {
            if let Some(refusal) = names::refusal(name, &key) {
                return value_error!("{refusal}");
            }
            self.warnings.extend(names::typo_warning(&key));
        }
        let description = description.map(str::to_owned);
        match self.entries.iter_mut().find(|e| e.key == key) {
            Some(entry) => {
                let replaced = entry.source != source;
                entry.source = source;
                entry.description = description.or(entry.description.take());
                Ok((key, replaced))
            }
            None => {
                self.entries.push(Entry { key: key.clone(), source, description });
                Ok((key, false))
            }
        }
    }

    /// Forgets a checkpoint of one's own.
    pub fn unregister(&mut self, name: &str, default: &str) -> Result<String> {
        let key = self.resolve(name)?;
        let quoted = crate::python::repr_str(&key);
        if names::is_built_in(&key) {
            return value_error!("{quoted} is a built-in checkpoint and cannot be unregistered");
        }
        if key == default {
            return value_error!(
                "{quoted} is this Router's default checkpoint; set another default before unregistering it"
            );
        }
        self.entries.retain(|e| e.key != key);
        Ok(key)
    }

    /// All names, the built-in ones first.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|e| e.key.as_str())
    }

    /// Where a checkpoint is loaded from.
    pub fn source(&self, key: &str) -> Option<&Source> {
        self.find(key)?.source.as_ref()
    }

    /// What was told of it.
    pub fn description(&self, key: &str) -> Option<&str> {
        self.find(key)?.description.as_deref()
    }

    /// Warnings since the last call.
    pub fn take_warnings(&mut self) -> Vec<String> {
        std::mem::take(&mut self.warnings)
    }

    fn find(&self, key: &str) -> Option<&Entry> {
        self.entries.iter().find(|e| e.key == key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_names_have_a_repository_and_a_folder() {
        let registry = Registry::default();
        let multilingual = registry.source("multilingual").unwrap();
        assert_eq!(multilingual.location, "convaiinnovations/laya");
        assert_eq!(multilingual.text(), "convaiinnovations/laya/multilingual");
        assert_eq!(registry.source("english").unwrap().subfolder, None);
    }

    #[test]
    fn a_registered_name_is_known_in_any_spelling_until_it_is_forgotten() {
        let mut registry = Registry::default();
        let source = Source::new("models/papers");
        assert_eq!(
            registry.register(" Papers", Some(source.clone()), Some("theses")).unwrap(),
            ("papers".into(), false)
        );
        assert_eq!(registry.resolve("PAPERS").unwrap(), "papers");
        assert_eq!(registry.description("papers"), Some("theses"));
        assert_eq!(registry.register("papers", Some(source), None).unwrap(), ("papers".into(), false), "unchanged");
        assert_eq!(registry.register("papers", None, None).unwrap(), ("papers".into(), true));
        assert_eq!(registry.description("papers"), Some("theses"), "kept");
        registry.unregister("papers", "multilingual").unwrap();
        assert!(registry.resolve("papers").unwrap_err().to_string().starts_with("unknown model 'papers'"));
    }

    #[test]
    fn built_in_names_can_be_pointed_elsewhere_but_not_removed() {
        let mut registry = Registry::default();
        assert!(registry.register("en", Some(Source::new("mine")), None).unwrap().1);
        assert_eq!(registry.source("english").unwrap().text(), "mine");
        assert!(registry.unregister("english", "multilingual").unwrap_err().to_string().contains("built-in"));
        registry.register("own", None, None).unwrap();
        assert!(registry.unregister("own", "own").unwrap_err().to_string().contains("default checkpoint"));
    }

    #[test]
    fn a_name_one_edit_from_a_built_in_warns_once_and_is_accepted() {
        let mut registry = Registry::default();
        registry.register("enlgish", None, None).unwrap();
        assert!(registry.take_warnings()[0].contains("'enlgish' is one edit from the built-in 'english'"));
        registry.register("english", Some(Source::new("x")), None).unwrap();
        assert!(registry.take_warnings().is_empty());
        assert!(registry.register("auto", None, None).is_err());
    }
}
