//! Temperatures: by question type, by number of options, by language; and what a calibration file changes.

mod file;
mod language;

pub use file::{Binning, CalibrationFile, Identity};

use serde_json::{Map, Value};
use tilewright_models::laya::{AgentConfig, QuestionType};

use crate::error::Result;
use crate::python::{general, repr, to_float};
use language::Languages;

/// What a temperature is confined to. A fitted value far below 1 would publish a guess as a certainty (trap 1).
pub const TEMPERATURE_RANGE: [f64; 2] = [0.5, 5.0];

/// The buckets of calibration maps and of gates: type and number of options.
pub const BUCKETS: [[&str; 4]; 3] = [
    ["choice:2", "choice:3-5", "choice:6-10", "choice:11+"],
    ["score:2", "score:3-5", "score:6-10", "score:11+"],
    ["noul:2", "noul:3-5", "noul:6-10", "noul:11+"],
];

/// The bucket of a question with `options` options.
pub fn bucket(kind: QuestionType, options: usize) -> &'static str {
    let size = match options {
        0..=2 => 0,
        3..=5 => 1,
        6..=10 => 2,
        _ => 3,
    };
    BUCKETS[kind.index()][size]
}

/// Temperatures that can be divided by.
#[derive(Clone, PartialEq, Debug)]
pub struct Temperatures {
    /// One a question type, in the order choice, score, noul.
    pub by_type: [f64; 3],
    /// By bucket; these come first.
    pub by_bucket: Vec<(String, f64)>,
}

impl Temperatures {
    /// Takes raw values, and notes what had to be replaced.
    fn clamped(by_type: &[Value; 3], by_bucket: &Map<String, Value>) -> (Self, Replaced) {
        let mut replaced = Replaced::default();
        let take = |name: &str, raw: &Value, replaced: &mut Vec<String>| {
            let applied = clamp(raw);
            let kept = !raw.is_boolean() && to_float(raw) == Some(applied);
            if !kept {
                replaced.push(format!("{name}={} -> {}", repr(raw), general(applied)));
            }
            applied
        };
        let buckets = by_bucket.iter().map(|(name, raw)| (name.clone(), take(name, raw, &mut replaced.buckets)));
        let by_bucket = buckets.collect();
        let mut by_type_applied = [1.0; 3];
        for (i, raw) in by_type.iter().enumerate() {
            by_type_applied[i] = take(&format!("temperature[{i}]"), raw, &mut replaced.types);
        }
        (Temperatures { by_type: by_type_applied, by_bucket }, replaced)
    }

    /// The temperature of a bucket, else of the type.
    pub fn get(&self, kind: QuestionType, options: usize) -> f64 {
        let name = bucket(kind, options);
        let found = self.by_bucket.iter().find(|(b, _)| b == name);
        found.map_or(self.by_type[kind.index()], |(_, t)| *t)
    }
}

/// Raw temperatures that were not used as they were, as `name=raw -> applied`.
#[derive(Default)]
struct Replaced {
    types: Vec<String>,
    buckets: Vec<String>,
}

/// A usable temperature: 1 for what is no finite number (trap 2), confined otherwise.
fn clamp(raw: &Value) -> f64 {
    let [low, high] = TEMPERATURE_RANGE;
    to_float(raw).filter(|t| t.is_finite()).map_or(1.0, |t| t.clamp(low, high))
}

fn warning(what: &str, first: Vec<String>, then: Vec<String>) -> Option<String> {
    let [low, high] = TEMPERATURE_RANGE.map(general);
    let list = [first, then].concat().join(", ");
    (!list.is_empty()).then(|| {
        format!("{what} outside [{low}, {high}] or not numbers: {list}; treat the confidence of these as uncalibrated")
    })
}

/// The temperature of one answer, and why.
#[derive(Clone, PartialEq, Debug)]
pub struct Applied {
    /// The bucket looked up.
    pub bucket: &'static str,
    /// What the logits are divided by.
    pub temperature: f64,
    /// The language whose override it is.
    pub language: Option<String>,
}

/// Everything that turns logits into published confidences.
#[derive(Clone, PartialEq, Debug)]
pub struct Calibration {
    raw: [Value; 3],
    temperatures: Temperatures,
    languages: Languages,
    binning: Vec<(String, Binning)>,
    id: Option<String>,
    warnings: Vec<String>,
}

impl Calibration {
    /// The temperatures that a checkpoint ships.
    pub fn of_checkpoint(config: &AgentConfig) -> Self {
        let (temperatures, replaced) = Temperatures::clamped(&config.temperature, &config.temperature_by_options);
        Calibration {
            raw: config.temperature.clone(),
            temperatures,
            languages: Languages::default(),
            binning: Vec::new(),
            id: None,
            warnings: warning("the checkpoint's temperatures", replaced.buckets, replaced.types).into_iter().collect(),
        }
    }

    /// Adds overrides by language: `{"de": {"temperature": [a, b, c], "temperature_by_options": {bucket: t}}}`. An override without temperatures inherits
    /// the checkpoint's own, but not those by bucket.
    pub fn with_languages(mut self, overrides: &Value) -> Result<Self> {
        self.languages = Languages::parse(overrides, &self.raw, &mut self.warnings)?;
        Ok(self)
    }

    /// Replaces temperatures and binning by those of a file. It is the whole state: a file without binning clears it.
    pub fn with_file(mut self, file: &CalibrationFile) -> Self {
        let (temperatures, replaced) = Temperatures::clamped(&file.temperature, &file.temperature_by_options);
        self.temperatures = temperatures;
        self.binning = file.binning.clone();
        self.id = file.id.clone();
        self.warnings.extend(warning("temperatures of the calibration file", replaced.types, replaced.buckets));
        self
    }

    /// The temperature of a question with `options` options, in the language of a call.
    pub fn applied(&self, kind: QuestionType, options: usize, lang: Option<&str>) -> Applied {
        let (temperatures, language) = match lang.and_then(|l| self.languages.get(l)) {
            Some((name, temperatures)) => (temperatures, Some(name.to_owned())),
            None => (&self.temperatures, None),
        };
        Applied { bucket: bucket(kind, options), temperature: temperatures.get(kind, options), language }
    }

    /// The published confidence of a largest probability. Binning was fitted on the temperatures of the file, so a language's override goes without it.
    pub(crate) fn confidence(&self, largest: f64, applied: &Applied) -> f64 {
        let entry = self.binning.iter().find(|(name, _)| applied.language.is_none() && name == applied.bucket);
        entry.map_or(largest, |(_, binning)| binning.apply(largest))
    }

    /// The temperatures in use where no language overrides them.
    pub fn temperatures(&self) -> &Temperatures {
        &self.temperatures
    }

    /// SHA-256 of the calibration file in use.
    pub fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    /// What was replaced while loading, and why; a line a source.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Notes something the user should know about the calibration.
    pub(crate) fn warn(&mut self, warning: impl Into<String>) {
        self.warnings.push(warning.into());
    }
}
