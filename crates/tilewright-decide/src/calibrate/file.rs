//! Calibration files: what was fitted on labelled rows, as JSON.

use std::path::Path;

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use tilewright_models::laya::{AgentConfig, OptionLayout};

use crate::error::{Error, Result, value_error};
use crate::json::{PyNumber, as_int, float, json_text};
use crate::python::{number_text, repr, repr_str, type_name};

/// The version that is written. Since 2 a file says which checkpoint it is for.
const VERSION: i64 = 2;

/// A step function from a largest probability to a confidence.
#[derive(Clone, PartialEq, Debug)]
pub struct Binning {
    values: Vec<f64>,
}

impl Binning {
    /// One value for each of equally wide bins, all within 0..=1, at least one.
    pub fn new(values: Vec<f64>) -> Option<Self> {
        let usable = !values.is_empty() && values.iter().all(|v| (0.0..=1.0).contains(v));
        usable.then_some(Binning { values })
    }

    /// The value of the bin that holds `confidence`.
    pub fn apply(&self, confidence: f64) -> f64 {
        let bins = self.values.len();
        // The cast saturates: below zero is the first bin.
        self.values[((confidence * bins as f64) as usize).min(bins - 1)]
    }

    /// One value a bin.
    pub fn values(&self) -> &[f64] {
        &self.values
    }
}

/// The checkpoint that a calibration was fitted for.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Identity {
    /// A name or repository; for people.
    pub model: Option<String>,
    /// SHA-256 of the weights.
    pub model_sha256: Option<String>,
    /// Keys of its configuration.
    pub config: Map<String, Value>,
}

impl Identity {
    /// The identity of a loaded checkpoint.
    pub fn new(config: &AgentConfig, model: Option<String>, model_sha256: Option<String>) -> Self {
        let layout = match config.option_layout {
            OptionLayout::Sequential => "sequential",
            OptionLayout::Parallel => "parallel",
        };
        let keys = [
            ("encoder", Value::from(config.encoder.as_str())),
            ("head_layers", config.head_layers.into()),
            ("max_len", config.max_len.into()),
            ("head_max_len", config.head_max_len.into()),
            ("option_layout", layout.into()),
        ];
        let config = keys.into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
        Identity { model, model_sha256, config }
    }

    /// What tells the two apart, if anything that both record does.
    pub fn difference(&self, other: &Identity) -> Option<String> {
        if let (Some(a), Some(b)) = (&self.model_sha256, &other.model_sha256) {
            return (a != b).then(|| format!("weights {a} and {b}"));
        }
        self.config.iter().find_map(|(key, a)| {
            let b = other.config.get(key)?;
            (a != b).then(|| format!("{key} {} and {}", json_text(a), json_text(b)))
        })
    }
}

/// The content of a calibration file. Temperatures are as written, neither checked nor confined.
#[derive(Clone, PartialEq, Debug)]
pub struct CalibrationFile {
    /// One a question type.
    pub temperature: [Value; 3],
    /// By bucket.
    pub temperature_by_options: Map<String, Value>,
    /// By bucket.
    pub binning: Vec<(String, Binning)>,
    /// The checkpoint it is for; version 1 did not say.
    pub identity: Option<Identity>,
    /// SHA-256 of the file it came from.
    pub id: Option<String>,
}

impl CalibrationFile {
    /// A calibration that was just fitted.
    pub fn new(by_type: [f64; 3], by_bucket: &[(&str, f64)], identity: Identity) -> Self {
        CalibrationFile {
            temperature: by_type.map(float),
            temperature_by_options: by_bucket.iter().map(|(name, t)| (name.to_string(), float(*t))).collect(),
            binning: Vec::new(),
            identity: Some(identity),
            id: None,
        }
    }

    /// Reads a file.
    pub fn load(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(tilewright_core::Error::io("read", path))?;
        let value = serde_json::from_slice(&bytes)
            .map_err(|e| Error::file(path, e, "a calibration file is a JSON object; fit it again"))?;
        let mut file = Self::parse(&value)?;
        file.id = Some(hex(&Sha256::digest(&bytes)));
        Ok(file)
    }

    /// Writes a file, whole or not at all, and returns its id.
    pub fn save(&self, path: &Path) -> Result<String> {
        let text = serde_json::to_string_pretty(&self.to_json()).expect("JSON values can be written") + "\n";
        let mut file = tilewright_core::fs::AtomicFile::create(path)?;
        file.write(text.as_bytes())?;
        file.commit()?;
        Ok(hex(&Sha256::digest(text.as_bytes())))
    }

    /// The content as JSON, in the form that the `laya` package reads.
    pub fn to_json(&self) -> Value {
        let mut out = Map::new();
        out.insert("version".into(), VERSION.into());
        out.insert("temperature".into(), self.temperature.to_vec().into());
        out.insert("temperature_by_options".into(), self.temperature_by_options.clone().into());
        let identity = self.identity.clone().unwrap_or_default();
        out.insert("model_id_or_path".into(), identity.model.into());
        out.insert("subfolder".into(), Value::Null);
        out.insert("config".into(), identity.config.into());
        out.insert("model_sha256".into(), identity.model_sha256.into());
        if !self.binning.is_empty() {
            let entry = |b: &Binning| {
                let values = b.values.iter().map(|v| float(*v)).collect::<Vec<_>>();
                serde_json::json!({ "bins": b.values.len(), "values": values })
            };
            let map = self.binning.iter().map(|(name, b)| (name.clone(), entry(b))).collect();
            out.insert("binning_map".into(), Value::Object(map));
        }
        Value::Object(out)
    }

    /// Checks the shape of a file's content. Temperatures may be anything, they are confined later; a bad binning has nothing to fall back to.
    pub fn parse(value: &Value) -> Result<Self> {
        let Value::Object(file) = value else {
            return value_error!("calibration JSON must be an object, got {}", type_name(value));
        };
        let version = match file.get("version") {
            None | Some(Value::Null) => 1,
            Some(raw) => match whole_number(raw) {
                Some(version) => version,
                None => return value_error!("calibration JSON version must be an integer, got {}", repr(raw)),
            },
        };
        let temperature = match file.get("temperature") {
            Some(Value::Array(list)) if list.len() == 3 => [list[0].clone(), list[1].clone(), list[2].clone()],
            _ => return value_error!("calibration JSON must contain temperature: [3 floats]"),
        };
        let temperature_by_options = match file.get("temperature_by_options") {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(map)) => map.clone(),
            Some(other) => {
                return value_error!(
                    "calibration JSON temperature_by_options must be an object of bucket -> float, got {}",
                    type_name(other)
                );
            }
        };
        let binning = match file.get("binning_map") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Object(map)) => {
                map.iter().map(|(name, entry)| Ok((name.clone(), binning(name, entry)?))).collect::<Result<_>>()?
            }
            Some(other) => {
                return value_error!(
                    "calibration JSON binning_map must be an object of bucket -> {{bins, values}}, got {}",
                    type_name(other)
                );
            }
        };
        let text = |key: &str| file.get(key).and_then(Value::as_str).map(str::to_owned);
        let identity = (version >= VERSION).then(|| Identity {
            model: text("model_id_or_path"),
            model_sha256: text("model_sha256"),
            config: file.get("config").and_then(Value::as_object).cloned().unwrap_or_default(),
        });
        Ok(CalibrationFile { temperature, temperature_by_options, binning, identity, id: None })
    }
}

fn binning(name: &str, entry: &Value) -> Result<Binning> {
    let place = format!("calibration JSON binning_map[{}]", repr_str(name));
    let Value::Object(map) = entry else {
        return value_error!("{place} must be an object with \"bins\" and \"values\", got {}", type_name(entry));
    };
    let raw = map.get("bins").unwrap_or(&Value::Null);
    let Some(bins) = as_int(raw).filter(|&bins| bins >= 1) else {
        return value_error!("{place} must have an integer \"bins\" >= 1, got {}", repr(raw));
    };
    let list = match map.get("values") {
        Some(Value::Array(list)) if list.len() as i64 == bins => list,
        _ => return value_error!("{place} must have \"values\" of length \"bins\" ({bins})"),
    };
    let shown = || repr(&map["values"]);
    let numbers: Option<Vec<f64>> = list
        .iter()
        .map(|v| match v {
            Value::Number(n) => Some(PyNumber::of(n).as_f64()),
            _ => None,
        })
        .collect();
    let Some(numbers) = numbers else {
        return value_error!("{place} values must be numbers, got {}", shown());
    };
    if numbers.iter().any(|v| !v.is_finite()) {
        return value_error!("{place} values must be finite, got {}", shown());
    }
    match Binning::new(numbers) {
        Some(binning) => Ok(binning),
        None => value_error!("{place} values must be in [0, 1], got {}", shown()),
    }
}

/// An integer, an integral float or a string of digits.
fn whole_number(value: &Value) -> Option<i64> {
    match value {
        Value::Number(n) => match PyNumber::of(n) {
            // One that does not fit is large, whatever it is.
            PyNumber::Int(digits) => Some(digits.parse().unwrap_or(if digits.starts_with('-') { 0 } else { i64::MAX })),
            PyNumber::Float(x) => (x.is_finite() && x.fract() == 0.0).then_some(x as i64),
        },
        Value::String(s) => number_text(s)?.parse().ok(),
        _ => None,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
