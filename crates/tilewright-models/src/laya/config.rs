//! `rl_agent_config.json`.

use std::path::Path;

use serde_json::{Map, Value};
use tilewright_core::{Error, Result};

use crate::json::{Fields, brief, object};

const HINT: &str = "give the rl_agent_config.json that was saved with the weights";

/// How the options of a question are laid out; a property of the weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OptionLayout {
    /// One after another.
    #[default]
    Sequential,
    /// Side by side: each option starts at the same position and sees no other.
    Parallel,
}

impl OptionLayout {
    /// The name in the file.
    pub const fn name(self) -> &'static str {
        match self {
            OptionLayout::Sequential => "sequential",
            OptionLayout::Parallel => "parallel",
        }
    }
}

/// The agent's configuration, as the file says it: temperatures are raw, neither checked nor clamped.
#[derive(Clone, PartialEq, Debug)]
pub struct AgentConfig {
    /// Name of the base encoder; for people.
    pub encoder: String,
    /// Layers of the decision head.
    pub head_layers: usize,
    /// Tokens of a row, special tokens included.
    pub max_len: usize,
    /// Tokens of instructions and options.
    pub head_max_len: usize,
    /// Classes of the action head.
    pub act_classes: usize,
    /// `temperature`: one a [`super::QuestionType`].
    pub temperature: [Value; 3],
    /// `temperature_by_options`, by bucket.
    pub temperature_by_options: Map<String, Value>,
    /// `option_layout`.
    pub option_layout: OptionLayout,
}

impl AgentConfig {
    /// Reads the file's text; `path` stands in errors. Keys that inference does not need are ignored.
    pub fn parse(json: &[u8], path: &Path) -> Result<Self> {
        Draft::parse(json, path)?.finish(path)
    }

    /// `max_len` and `head_max_len` fit each other and an encoder of so many positions.
    pub(crate) fn check_lengths(&self, path: &Path, max_positions: usize) -> Result<()> {
        let (head, max) = (self.head_max_len, self.max_len);
        if 4 < head && head < max && max <= max_positions {
            return Ok(());
        }
        let most = match max_positions {
            usize::MAX => String::new(),
            n => format!(" <= {n} (max_position_embeddings of encoder/config.json)"),
        };
        let what = format!(
            "`head_max_len` {head} and `max_len` {max} do not fit: 4 < head_max_len < max_len{most} is expected"
        );
        Err(Error::format(path, 0, what, HINT))
    }
}

/// What is known before the weights are looked at: a list of temperatures of the wrong length is only refused after them.
pub(crate) struct Draft {
    config: AgentConfig,
    temperature: Option<Value>,
}

impl Draft {
    pub(crate) fn parse(json: &[u8], path: &Path) -> Result<Self> {
        let map = object(json, path, HINT)?;
        let f = Fields::new(path, HINT, &map);
        let layouts = [OptionLayout::Sequential, OptionLayout::Parallel];
        let option_layout = match f.get("option_layout") {
            None => OptionLayout::default(),
            Some(v) => match layouts.into_iter().find(|l| v.as_str() == Some(l.name())) {
                Some(layout) => layout,
                None => return Err(f.wrong("option_layout", v, "\"sequential\" or \"parallel\"")),
            },
        };
        let missing: Vec<_> = ["encoder", "head_layers"].into_iter().filter(|k| f.get(k).is_none()).collect();
        if !missing.is_empty() {
            return Err(f.error(format!("missing configuration keys {missing:?}")));
        }
        let encoder = match &map["encoder"] {
            Value::String(name) => name.clone(),
            other => return Err(f.wrong("encoder", other, "the name of the base encoder")),
        };
        let head_layers = f.count("head_layers", None)?;
        if head_layers > 1 << 10 {
            return Err(f.error(format!("`head_layers` is {head_layers}, at most 1024 are expected")));
        }
        let act_costs = match f.get("act_costs") {
            None => 0,
            Some(Value::Object(costs)) => costs.len(),
            Some(Value::Array(costs)) => costs.len(),
            Some(other) => return Err(f.wrong("act_costs", other, "an object with a cost for each escalation")),
        };
        let temperature_by_options = match f.get("temperature_by_options") {
            None => Map::new(),
            Some(Value::Object(map)) => map.clone(),
            Some(other) => return Err(f.wrong("temperature_by_options", other, "an object of numbers by bucket")),
        };
        Ok(Draft {
            config: AgentConfig {
                encoder,
                head_layers,
                max_len: f.count("max_len", Some(512))?,
                head_max_len: f.count("head_max_len", Some(192))?,
                act_classes: act_costs + 1,
                temperature: [1.0, 1.0, 1.0].map(Value::from),
                temperature_by_options,
                option_layout,
            },
            temperature: f.get("temperature").cloned(),
        })
    }

    pub(crate) fn head_layers(&self) -> usize {
        self.config.head_layers
    }

    pub(crate) fn act_classes(&self) -> usize {
        self.config.act_classes
    }

    pub(crate) fn finish(self, path: &Path) -> Result<AgentConfig> {
        let Draft { mut config, temperature } = self;
        if let Some(value) = temperature {
            let bad = |value: &Value| {
                let what = format!("`temperature` is {}, a list of 3 numbers is expected", brief(value));
                Error::format(path, 0, what, HINT)
            };
            let Value::Array(list) = value else { return Err(bad(&value)) };
            config.temperature = list.try_into().map_err(|list| bad(&Value::Array(list)))?;
        }
        config.check_lengths(path, usize::MAX)?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(value: &Value) -> Result<AgentConfig> {
        AgentConfig::parse(value.to_string().as_bytes(), Path::new("rl_agent_config.json"))
    }

    fn refused(name: &str, value: Value) -> String {
        let mut config = json!({"encoder": "x/y", "head_layers": 2});
        config[name] = value;
        let message = parse(&config).unwrap_err().to_string();
        assert!(message.contains("rl_agent_config.json") && message.contains("saved with the weights"), "{message}");
        message
    }

    #[test]
    fn absent_keys_have_their_defaults() {
        let c = parse(&json!({"encoder": "x/y", "head_layers": 0, "unknown": [1]})).unwrap();
        assert_eq!((c.encoder.as_str(), c.head_layers, c.max_len, c.head_max_len), ("x/y", 0, 512, 192));
        assert_eq!((c.act_classes, c.option_layout), (1, OptionLayout::Sequential));
        assert_eq!(c.temperature, [1.0, 1.0, 1.0].map(Value::from));
        assert!(c.temperature_by_options.is_empty());
    }

    #[test]
    fn temperatures_are_kept_raw() {
        let text = r#"{"encoder": "e", "head_layers": 2, "act_costs": {"a": 1, "b": 2}, "option_layout": "parallel",
            "temperature": [true, "a", NaN], "temperature_by_options": {"noul:2": 6.5, "choice:11+": 0.1006}}"#;
        let c = AgentConfig::parse(text.as_bytes(), Path::new("c")).unwrap();
        assert_eq!(c.temperature, [json!(true), json!("a"), json!("NaN")]);
        assert_eq!(
            c.temperature_by_options.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>(),
            ["noul:2=6.5", "choice:11+=0.1006"]
        );
        assert_eq!((c.act_classes, c.option_layout), (3, OptionLayout::Parallel));
    }

    #[test]
    fn missing_keys_are_named_together() {
        let message = parse(&json!({"max_len": 9})).unwrap_err().to_string();
        assert!(message.contains(r#"missing configuration keys ["encoder", "head_layers"]"#), "{message}");
        let message = parse(&json!({"encoder": "x"})).unwrap_err().to_string();
        assert!(message.contains(r#"missing configuration keys ["head_layers"]"#), "{message}");
    }

    #[test]
    fn an_unknown_layout_comes_before_missing_keys() {
        let message = parse(&json!({"option_layout": "Parallel"})).unwrap_err().to_string();
        assert!(message.contains("`option_layout` is \"Parallel\""), "{message}");
        assert!(refused("option_layout", Value::Null).contains("option_layout"));
    }

    #[test]
    fn trap_2_a_list_of_temperatures_of_the_wrong_length_is_refused() {
        for value in [json!([1.0, 1.0]), json!([1, 1, 1, 1]), json!(1.0), Value::Null, json!({"a": 1})] {
            assert!(refused("temperature", value).contains("a list of 3 numbers"));
        }
    }

    #[test]
    fn lengths_must_leave_room_for_head_and_state() {
        for (head, max) in [(4, 512), (0, 512), (192, 192), (193, 192), (512, 512)] {
            let c = parse(&json!({"encoder": "x", "head_layers": 1, "head_max_len": head, "max_len": max}));
            let message = c.unwrap_err().to_string();
            assert!(message.contains(&format!("`head_max_len` {head} and `max_len` {max}")), "{message}");
            assert!(message.contains("4 < head_max_len < max_len is expected"), "no limit that nobody set: {message}");
        }
        let c = parse(&json!({"encoder": "x", "head_layers": 1, "head_max_len": 5, "max_len": 6})).unwrap();
        assert!(c.check_lengths(Path::new("c"), 6).is_ok());
        assert!(c.check_lengths(Path::new("c"), 5).unwrap_err().to_string().contains("max_position_embeddings"));
    }

    #[test]
    fn values_of_the_wrong_type_are_refused_by_name() {
        for name in ["encoder", "head_layers", "max_len", "head_max_len", "act_costs", "temperature_by_options"] {
            for value in [json!(true), json!(-1.5), Value::Null] {
                assert!(refused(name, value).contains(&format!("`{name}`")), "{name}");
            }
        }
        assert!(refused("head_layers", json!(100_000)).contains("head_layers"));
    }
}
