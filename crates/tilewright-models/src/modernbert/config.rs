//! `encoder/config.json`, in the spellings of transformers 4 and 5.

use std::path::Path;

use serde_json::Value;
use tilewright_core::{Error, Result};

use crate::json::{Fields, brief, object};

const HINT: &str = "give the encoder/config.json of a ModernBERT encoder as it was saved with the weights";

/// Far above any model; keeps a damaged file from asking for lists of any length.
const MAX_LAYERS: usize = 1 << 10;

/// What a layer's queries may see.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LayerKind {
    /// The whole row.
    Full,
    /// Positions at most half a window away.
    Sliding,
}

/// The sizes of a ModernBERT encoder.
#[derive(Clone, PartialEq, Debug)]
pub struct EncoderConfig {
    /// `vocab_size`: rows of the embedding table.
    pub vocab_size: usize,
    /// `hidden_size`, `D`.
    pub hidden: usize,
    /// `intermediate_size`: width of the gated MLP.
    pub intermediate: usize,
    /// `num_attention_heads`.
    pub heads: usize,
    /// One a layer.
    pub layers: Vec<LayerKind>,
    /// `norm_eps`, of every layer normalisation.
    pub norm_eps: f32,
    /// `local_attention`: the total window; a sliding layer sees half of it to each side.
    pub local_attention: usize,
    /// RoPE base of full layers.
    pub full_theta: f64,
    /// RoPE base of sliding layers.
    pub sliding_theta: f64,
    /// `max_position_embeddings`: the longest row.
    pub max_positions: usize,
    /// Layer normalisations have a bias.
    pub norm_bias: bool,
    /// The attention's two products have a bias.
    pub attention_bias: bool,
    /// The MLP's two products have a bias.
    pub mlp_bias: bool,
}

impl EncoderConfig {
    /// ModernBERT-large.
    pub fn modernbert_large() -> Self {
        EncoderConfig {
            vocab_size: 50368,
            hidden: 1024,
            intermediate: 2624,
            heads: 16,
            layers: every(28, 3),
            norm_eps: 1e-5,
            local_attention: 128,
            full_theta: 160_000.0,
            sliding_theta: 10_000.0,
            max_positions: 8192,
            norm_bias: false,
            attention_bias: false,
            mlp_bias: false,
        }
    }

    /// mmBERT-base.
    pub fn mmbert_base() -> Self {
        EncoderConfig {
            vocab_size: 256_000,
            hidden: 768,
            intermediate: 1152,
            heads: 12,
            layers: every(22, 3),
            sliding_theta: 160_000.0,
            ..Self::modernbert_large()
        }
    }

    /// Reads the file's text; `path` stands in errors.
    pub fn parse(json: &[u8], path: &Path) -> Result<Self> {
        let map = object(json, path, HINT)?;
        let f = Fields::new(path, HINT, &map);
        f.only("model_type", "modernbert")?;
        f.only("hidden_activation", "gelu")?;
        let hidden = f.size("hidden_size", None)?;
        let heads = f.size("num_attention_heads", None)?;
        if !hidden.is_multiple_of(heads) || !(hidden / heads).is_multiple_of(2) {
            return Err(f.error(format!(
                "`hidden_size` {hidden} over `num_attention_heads` {heads} does not give an even head size"
            )));
        }
        let layers = f.size("num_hidden_layers", None)?;
        if layers > MAX_LAYERS {
            return Err(f.error(format!("`num_hidden_layers` is {layers}, at most {MAX_LAYERS} are expected")));
        }
        let config = EncoderConfig {
            vocab_size: f.size("vocab_size", None)?,
            hidden,
            intermediate: f.size("intermediate_size", None)?,
            heads,
            layers: layer_kinds(&f, layers)?,
            norm_eps: f.positive("norm_eps", 1e-5)? as f32,
            local_attention: f.count("local_attention", Some(128))?,
            full_theta: theta(&f, "full_attention", "global_rope_theta", 160_000.0)?,
            sliding_theta: theta(&f, "sliding_attention", "local_rope_theta", 10_000.0)?,
            max_positions: f.size("max_position_embeddings", Some(8192))?,
            norm_bias: f.flag("norm_bias", false)?,
            attention_bias: f.flag("attention_bias", false)?,
            mlp_bias: f.flag("mlp_bias", false)?,
        };
        if config.norm_eps == 0.0 {
            return Err(f.error("`norm_eps` is too small for single precision"));
        }
        Ok(config)
    }

    /// The file's text, in the spelling of transformers 5.
    pub fn to_json(&self) -> Value {
        let kinds: Vec<_> = self.layers.iter().map(|k| k.name()).collect();
        let rope = |theta: f64| serde_json::json!({"rope_theta": theta, "rope_type": "default"});
        serde_json::json!({
            "architectures": ["ModernBertModel"],
            "model_type": "modernbert",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers.len(),
            "num_attention_heads": self.heads,
            "hidden_activation": "gelu",
            "norm_eps": self.norm_eps,
            "norm_bias": self.norm_bias,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "local_attention": self.local_attention,
            "max_position_embeddings": self.max_positions,
            "layer_types": kinds,
            "rope_parameters": {"full_attention": rope(self.full_theta), "sliding_attention": rope(self.sliding_theta)},
        })
    }

    /// Width of a head.
    pub fn head_size(&self) -> usize {
        self.hidden / self.heads
    }

    /// How far a sliding layer sees to each side, inclusive.
    pub fn half_window(&self) -> usize {
        self.local_attention / 2
    }

    /// The RoPE base of a kind of layers.
    pub fn theta(&self, kind: LayerKind) -> f64 {
        match kind {
            LayerKind::Full => self.full_theta,
            LayerKind::Sliding => self.sliding_theta,
        }
    }
}

impl LayerKind {
    /// The name in `layer_types`.
    pub const fn name(self) -> &'static str {
        match self {
            LayerKind::Full => "full_attention",
            LayerKind::Sliding => "sliding_attention",
        }
    }
}

/// Every `n`-th layer, from the first on, is full.
pub(crate) fn every(layers: usize, n: usize) -> Vec<LayerKind> {
    (0..layers).map(|i| if i.is_multiple_of(n) { LayerKind::Full } else { LayerKind::Sliding }).collect()
}

fn layer_kinds(f: &Fields<'_>, layers: usize) -> Result<Vec<LayerKind>> {
    let Some(list) = f.present("layer_types") else {
        return Ok(every(layers, f.size("global_attn_every_n_layers", Some(3))?));
    };
    let Some(list) = list.as_array().filter(|l| l.len() == layers) else {
        return Err(f.wrong("layer_types", list, &format!("a list of {layers} kinds, one a layer,")));
    };
    let kind = |(i, v): (usize, &Value)| {
        let known = [LayerKind::Full, LayerKind::Sliding].into_iter().find(|k| v.as_str() == Some(k.name()));
        known.ok_or_else(|| f.wrong(&format!("layer_types[{i}]"), v, "\"full_attention\" or \"sliding_attention\""))
    };
    list.iter().enumerate().map(kind).collect()
}

/// `rope_parameters[kind].rope_theta`, else the flat key, else the default. mmBERT's two are equal, and only the nested form says so.
fn theta(f: &Fields<'_>, kind: &str, flat: &str, default: f64) -> Result<f64> {
    let scaled = |name: &str, v: &Value| -> Error {
        f.error(format!("`{name}` is {}; scaled RoPE is not supported, only \"default\"", brief(v)))
    };
    // The old spelling of scaling applies to both kinds.
    if let Some(scaling) = f.present("rope_scaling") {
        let kind = ["rope_type", "type"].iter().find_map(|k| scaling.get(k));
        if kind.is_none_or(|t| t.as_str() != Some("default")) {
            return Err(scaled("rope_scaling", scaling));
        }
    }
    let parameters = match f.present("rope_parameters") {
        None => None,
        Some(Value::Object(map)) if map.contains_key("rope_theta") || map.contains_key("rope_type") => {
            let what = "gives one rotation for all layers; an object for each of full_attention and sliding_attention is expected";
            return Err(f.error(format!("`rope_parameters` {what}")));
        }
        Some(Value::Object(map)) => map.get(kind).filter(|v| !v.is_null()),
        Some(other) => return Err(f.wrong("rope_parameters", other, "an object")),
    };
    if let Some(parameters) = parameters {
        let name = format!("rope_parameters.{kind}");
        let Value::Object(map) = parameters else {
            return Err(f.wrong(&name, parameters, "an object"));
        };
        let rope_type = ["rope_type", "type"].iter().find_map(|k| map.get(*k).filter(|t| !t.is_null()));
        if let Some(t) = rope_type.filter(|t| t.as_str() != Some("default")) {
            return Err(scaled(&format!("{name}.rope_type"), t));
        }
        if let Some(theta) = map.get("rope_theta").filter(|t| !t.is_null()) {
            let number = theta.as_f64().filter(|x| x.is_finite() && *x > 0.0);
            return number.ok_or_else(|| f.wrong(&format!("{name}.rope_theta"), theta, "a number above 0"));
        }
    }
    f.positive(flat, default)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn base() -> Value {
        json!({"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4})
    }

    fn with(changes: &[(&str, Value)]) -> Result<EncoderConfig> {
        let mut config = base();
        for (name, value) in changes {
            config[*name] = value.clone();
        }
        EncoderConfig::parse(config.to_string().as_bytes(), Path::new("encoder/config.json"))
    }

    fn refused(changes: &[(&str, Value)]) -> String {
        let message = with(changes).unwrap_err().to_string();
        assert!(message.contains("encoder/config.json") && message.contains("as it was saved"), "{message}");
        message
    }

    #[test]
    fn absent_keys_have_modernbert_s_defaults() {
        use LayerKind::{Full, Sliding};
        let c = with(&[]).unwrap();
        assert_eq!((c.full_theta, c.sliding_theta), (160_000.0, 10_000.0));
        assert_eq!(c.layers, [Full, Sliding, Sliding, Full, Sliding]);
        assert_eq!((c.norm_eps, c.local_attention, c.max_positions), (1e-5, 128, 8192));
        assert_eq!((c.norm_bias, c.attention_bias, c.mlp_bias), (false, false, false));
        assert_eq!((c.half_window(), c.head_size()), (64, 16));
    }

    #[test]
    fn each_required_key_is_missed_by_name() {
        for name in ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"] {
            let mut config = base();
            config.as_object_mut().unwrap().remove(name);
            let error = EncoderConfig::parse(config.to_string().as_bytes(), Path::new("c.json")).unwrap_err();
            assert!(error.to_string().contains(&format!("there is no `{name}`")), "{error}");
        }
    }

    #[test]
    fn trap_17_both_spellings_of_thetas_are_read() {
        let flat = [("global_rope_theta", json!(5000.0)), ("local_rope_theta", json!(700))];
        let c = with(&flat).unwrap();
        assert_eq!((c.full_theta, c.sliding_theta), (5000.0, 700.0));
        let nested = json!({"full_attention": {"rope_theta": 160000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 160000.0, "rope_type": "default"}});
        let c = with(&[("rope_parameters", nested)]).unwrap();
        assert_eq!((c.full_theta, c.sliding_theta), (160_000.0, 160_000.0));
    }

    #[test]
    fn a_nested_theta_wins_kind_by_kind_over_the_flat_one() {
        let nested = json!({"full_attention": {"rope_theta": 9.0}, "sliding_attention": null});
        let c =
            with(&[("rope_parameters", nested), ("global_rope_theta", json!(1.0)), ("local_rope_theta", json!(2.0))])
                .unwrap();
        assert_eq!((c.full_theta, c.sliding_theta), (9.0, 2.0));
        let c = with(&[("rope_parameters", json!({"sliding_attention": {"rope_type": "default"}}))]).unwrap();
        assert_eq!((c.full_theta, c.sliding_theta), (160_000.0, 10_000.0));
    }

    #[test]
    fn scaled_rope_is_refused_in_every_spelling() {
        for (name, value) in [
            ("rope_parameters", json!({"full_attention": {"rope_type": "yarn"}})),
            ("rope_parameters", json!({"sliding_attention": {"type": "linear"}})),
            ("rope_scaling", json!({"type": "dynamic", "factor": 2})),
            ("rope_scaling", json!({"factor": 2})),
        ] {
            assert!(refused(&[(name, value)]).contains("scaled RoPE"), "{name}");
        }
        assert!(with(&[("rope_scaling", Value::Null)]).is_ok());
    }

    #[test]
    fn a_theta_that_is_not_given_by_kind_is_refused_and_not_passed_over() {
        let message = refused(&[("rope_parameters", json!({"rope_theta": 5000.0, "rope_type": "default"}))]);
        assert!(message.contains("`rope_parameters` gives one rotation for all layers"), "{message}");
    }

    #[test]
    fn explicit_layer_types_win_over_the_period() {
        let kinds =
            json!(["sliding_attention", "sliding_attention", "full_attention", "full_attention", "sliding_attention"]);
        let c = with(&[("layer_types", kinds), ("global_attn_every_n_layers", json!(2))]).unwrap();
        assert_eq!(c.layers.iter().map(|k| k.name().as_bytes()[0]).collect::<Vec<_>>(), b"ssffs");
        let c = with(&[("global_attn_every_n_layers", json!(2)), ("layer_types", Value::Null)]).unwrap();
        assert_eq!(c.layers.iter().map(|k| k.name().as_bytes()[0]).collect::<Vec<_>>(), b"fsfsf");
    }

    #[test]
    fn a_wrong_list_of_layer_types_is_refused() {
        assert!(refused(&[("layer_types", json!(["full_attention"]))]).contains("list of 5"));
        let kinds = json!(["full_attention", "full_attention", "causal", "full_attention", "full_attention"]);
        assert!(refused(&[("layer_types", kinds)]).contains("layer_types[2]"));
    }

    #[test]
    fn another_architecture_or_activation_is_refused() {
        assert!(refused(&[("model_type", json!("bert"))]).contains("`model_type` is \"bert\""));
        assert!(refused(&[("hidden_activation", json!("gelu_pytorch_tanh"))]).contains("hidden_activation"));
    }

    #[test]
    fn head_sizes_must_be_whole_and_even() {
        assert!(refused(&[("num_attention_heads", json!(5))]).contains("even head size"));
        assert!(refused(&[("num_attention_heads", json!(64))]).contains("even head size"));
        assert!(refused(&[("num_attention_heads", json!(0))]).contains("num_attention_heads"));
    }

    #[test]
    fn the_storage_type_and_the_old_epsilon_are_ignored() {
        let c =
            with(&[("dtype", json!("float16")), ("layer_norm_eps", json!(0.1)), ("torch_dtype", json!(7))]).unwrap();
        assert_eq!(c.norm_eps, 1e-5);
        assert_eq!(with(&[("norm_eps", json!(1e-6))]).unwrap().norm_eps, 1e-6);
        for bad in [json!(0), json!(-1), json!("x"), json!(1e-60)] {
            refused(&[("norm_eps", bad)]);
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let mut small = with(&[]).unwrap();
        small.norm_eps = 1e-6;
        for config in [EncoderConfig::modernbert_large(), EncoderConfig::mmbert_base(), small] {
            let text = config.to_json().to_string();
            assert_eq!(EncoderConfig::parse(text.as_bytes(), Path::new("c.json")).unwrap(), config);
        }
    }
}
