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
    /// Takes raw values; what had to be replaced is named in `replaced`, buckets first.
    fn clamped(by_type: &[Value; 3], by_bucket: &Map<String, Value>, replaced: &mut Vec<String>) -> Self {
        let mut take = |name: &str, raw: &Value| {
            let applied = clamp(raw);
            let kept = !raw.is_boolean() && to_float(raw) == Some(applied);
            if !kept {
                replaced.push(format!("{name}={} -> {}", repr(raw), general(applied)));
            }
            applied
        };
        let by_bucket = by_bucket.iter().map(|(name, raw)| (name.clone(), take(name, raw))).collect();
        let mut i = 0;
        let by_type = by_type.each_ref().map(|raw| {
            i += 1;
            take(&format!("temperature[{}]", i - 1), raw)
        });
        Temperatures { by_type, by_bucket }
    }

    /// The temperature of a bucket, else of the type.
    pub fn get(&self, kind: QuestionType, options: usize) -> f64 {
        let name = bucket(kind, options);
        let found = self.by_bucket.iter().find(|(b, _)| b == name);
        found.map_or(self.by_type[kind.index()], |(_, t)| *t)
    }
}

/// A usable temperature: 1 for what is no finite number (trap 2), confined otherwise.
fn clamp(raw: &Value) -> f64 {
    let [low, high] = TEMPERATURE_RANGE;
    to_float(raw).filter(|t| t.is_finite()).map_or(1.0, |t| t.clamp(low, high))
}

fn warning(what: &str, replaced: &[String]) -> Option<String> {
    let [low, high] = TEMPERATURE_RANGE.map(general);
    (!replaced.is_empty()).then(|| {
        let list = replaced.join(", ");
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
        let mut replaced = Vec::new();
        let temperatures = Temperatures::clamped(&config.temperature, &config.temperature_by_options, &mut replaced);
        Calibration {
            raw: config.temperature.clone(),
            temperatures,
            languages: Languages::default(),
            binning: Vec::new(),
            id: None,
            warnings: warning("the checkpoint's temperatures", &replaced).into_iter().collect(),
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
        let mut replaced = Vec::new();
        self.temperatures = Temperatures::clamped(&file.temperature, &file.temperature_by_options, &mut replaced);
        self.binning = file.binning.clone();
        self.id = file.id.clone();
        self.warnings.extend(warning("temperatures of the calibration file", &replaced));
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
