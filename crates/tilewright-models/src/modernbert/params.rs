//! The tensors of an encoder: names and shapes.

use super::EncoderConfig;

impl EncoderConfig {
    /// All tensors, with `prefix` before each name.
    pub fn params(&self, prefix: &str) -> Vec<(String, Vec<usize>)> {
        let (d, ff) = (self.hidden, self.intermediate);
        let mut all = vec![(format!("{prefix}embeddings.tok_embeddings.weight"), vec![self.vocab_size, d])];
        let mut add = |name: String, shape: &[usize], bias: bool| {
            all.push((format!("{prefix}{name}.weight"), shape.to_vec()));
            if bias {
                all.push((format!("{prefix}{name}.bias"), vec![shape[0]]));
            }
        };
        add("embeddings.norm".into(), &[d], self.norm_bias);
        for i in 0..self.layers.len() {
            if i > 0 {
                add(format!("layers.{i}.attn_norm"), &[d], self.norm_bias);
            }
            add(format!("layers.{i}.attn.Wqkv"), &[3 * d, d], self.attention_bias);
            add(format!("layers.{i}.attn.Wo"), &[d, d], self.attention_bias);
            add(format!("layers.{i}.mlp_norm"), &[d], self.norm_bias);
            add(format!("layers.{i}.mlp.Wi"), &[2 * ff, d], self.mlp_bias);
            add(format!("layers.{i}.mlp.Wo"), &[d, ff], self.mlp_bias);
        }
        add("final_norm".into(), &[d], self.norm_bias);
        all
    }
}
