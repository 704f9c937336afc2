//! The tensors of a checkpoint: names and shapes.

use crate::modernbert::EncoderConfig;

/// Hidden units of the action head.
pub(crate) const ACT_HIDDEN: usize = 256;

/// What the action head sees beside the state of `[CLS]`: four features of the option probabilities.
pub(crate) const ACT_FEATURES: usize = 4;

/// Question types, rows of `type_emb.weight`.
pub(crate) const TYPES: usize = 3;

/// Where a missing tensor is allowed: training saves it, inference never reads it.
pub(crate) const OPTIONAL: &str = "temperature";

/// A tensor's name and shape.
pub type Param = (String, Vec<usize>);

/// All tensors of the decision head.
pub(crate) fn head(hidden: usize, head_layers: usize, act_classes: usize) -> Vec<Param> {
    let d = hidden;
    let mut all = Vec::new();
    let mut add = |name: String, shape: &[usize]| all.push((name, shape.to_vec()));
    for j in 0..head_layers {
        let p = format!("head.layers.{j}.");
        add(format!("{p}self_attn.in_proj_weight"), &[3 * d, d]);
        add(format!("{p}self_attn.in_proj_bias"), &[3 * d]);
        add(format!("{p}self_attn.out_proj.weight"), &[d, d]);
        add(format!("{p}self_attn.out_proj.bias"), &[d]);
        add(format!("{p}linear1.weight"), &[4 * d, d]);
        add(format!("{p}linear1.bias"), &[4 * d]);
        add(format!("{p}linear2.weight"), &[d, 4 * d]);
        add(format!("{p}linear2.bias"), &[d]);
        for norm in ["norm1", "norm2"] {
            add(format!("{p}{norm}.weight"), &[d]);
            add(format!("{p}{norm}.bias"), &[d]);
        }
    }
    add("type_emb.weight".into(), &[TYPES, d]);
    add("scorer.0.weight".into(), &[d]);
    add("scorer.0.bias".into(), &[d]);
    add("scorer.1.weight".into(), &[d, d]);
    add("scorer.1.bias".into(), &[d]);
    add("scorer.3.weight".into(), &[1, d]);
    add("scorer.3.bias".into(), &[1]);
    add("act_head.0.weight".into(), &[ACT_HIDDEN, d + ACT_FEATURES]);
    add("act_head.0.bias".into(), &[ACT_HIDDEN]);
    add("act_head.2.weight".into(), &[act_classes, ACT_HIDDEN]);
    add("act_head.2.bias".into(), &[act_classes]);
    add(OPTIONAL.into(), &[TYPES]);
    all
}

/// All tensors of a checkpoint, the encoder's first.
pub fn all(encoder: &EncoderConfig, head_layers: usize, act_classes: usize) -> Vec<Param> {
    let mut all = encoder.params("encoder.");
    all.extend(head(encoder.hidden, head_layers, act_classes));
    all
}

/// The name under which a stored tensor is known here: exports of laya-mlx spell a few differently.
pub(crate) fn canonical(stored: &str) -> String {
    for part in ["scorer.", "act_head."] {
        if let Some(rest) = stored.strip_prefix(part).and_then(|rest| rest.strip_prefix("layers.")) {
            return format!("{part}{rest}");
        }
    }
    if let Some(layer) = stored.strip_prefix("head.layers.") {
        for kind in ["weight", "bias"] {
            if let Some(layer) = layer.strip_suffix(&format!(".self_attn.in_proj.{kind}")) {
                return format!("head.layers.{layer}.self_attn.in_proj_{kind}");
            }
        }
    }
    stored.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(encoder: &EncoderConfig) -> (usize, usize) {
        let all = all(encoder, 2, 2);
        (all.len(), all.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum())
    }

    #[test]
    fn the_released_checkpoints_have_so_many_tensors_and_parameters() {
        assert_eq!(count(&EncoderConfig::modernbert_large()), (206, 421_293_830));
        assert_eq!(count(&EncoderConfig::mmbert_base()), (170, 321_908_998));
    }

    #[test]
    fn names_are_distinct_with_all_biases_too() {
        let config =
            EncoderConfig { norm_bias: true, attention_bias: true, mlp_bias: true, ..EncoderConfig::mmbert_base() };
        let mut names: Vec<_> = all(&config, 3, 2).into_iter().map(|(name, _)| name).collect();
        let n = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), n);
        for name in &names {
            assert_eq!(&canonical(name), name, "a canonical name is its own");
        }
    }

    #[test]
    fn laya_mlx_names_map_onto_the_originals() {
        for (stored, name) in [
            ("head.layers.1.self_attn.in_proj.weight", "head.layers.1.self_attn.in_proj_weight"),
            ("head.layers.0.self_attn.in_proj.bias", "head.layers.0.self_attn.in_proj_bias"),
            ("scorer.layers.3.bias", "scorer.3.bias"),
            ("act_head.layers.0.weight", "act_head.0.weight"),
            ("encoder.layers.0.attn.Wo.weight", "encoder.layers.0.attn.Wo.weight"),
        ] {
            assert_eq!(canonical(stored), name);
        }
    }
}
