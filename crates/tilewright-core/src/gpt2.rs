//! The shape of a GPT-2: sizes, named configurations and the order of its tensors. Shared by file formats, model and planner.

use crate::{Error, Result};

/// GPT-2's vocabulary.
pub const VOCAB_SIZE: usize = 50257;

/// The sizes of a GPT-2 (or GPT-3) model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gpt2Config {
    /// Positions that the model has embeddings for.
    pub max_seq_len: usize,
    /// Token ids below this exist.
    pub vocab_size: usize,
    /// Rows of the token embedding: the vocabulary rounded up.
    pub padded_vocab_size: usize,
    /// Transformer blocks.
    pub layers: usize,
    /// Attention heads; divides `channels`.
    pub heads: usize,
    /// Width of the residual stream.
    pub channels: usize,
}

/// One of the sixteen parameter tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ParamInfo {
    /// llm.c's name.
    pub name: &'static str,
    /// Whether the outermost dimension is the layer.
    pub stacked: bool,
    /// Whether weight decay applies: matrices and embeddings.
    pub decayed: bool,
}

/// The parameter tensors in file order.
pub const PARAMS: [ParamInfo; 16] = {
    const fn p(name: &'static str, stacked: bool, decayed: bool) -> ParamInfo {
        ParamInfo { name, stacked, decayed }
    }
    [
        p("wte", false, true),
        p("wpe", false, true),
        p("ln1w", true, false),
        p("ln1b", true, false),
        p("qkvw", true, true),
        p("qkvb", true, false),
        p("attprojw", true, true),
        p("attprojb", true, false),
        p("ln2w", true, false),
        p("ln2b", true, false),
        p("fcw", true, true),
        p("fcb", true, false),
        p("fcprojw", true, true),
        p("fcprojb", true, false),
        p("lnfw", false, false),
        p("lnfb", false, false),
    ]
};

impl Gpt2Config {
    /// Checks that every size is positive, that heads divide channels, and that the padded vocabulary holds the vocabulary.
    pub fn validate(&self) -> Result<()> {
        let sizes = [self.max_seq_len, self.vocab_size, self.layers, self.heads, self.channels];
        let hint = "see `tilewright plan --help` for the named models";
        if sizes.contains(&0) {
            return Err(Error::config(format!("a GPT-2 needs positive sizes, got {self:?}"), hint));
        }
        if !self.channels.is_multiple_of(self.heads) {
            let what = format!("{} channels do not divide into {} heads", self.channels, self.heads);
            return Err(Error::config(what, hint));
        }
        if self.padded_vocab_size < self.vocab_size {
            let what = format!("padded vocabulary {} is smaller than {}", self.padded_vocab_size, self.vocab_size);
            return Err(Error::config(what, hint));
        }
        Ok(())
    }

    /// A named model: `d12` or `gpt2:d12` (GPT-2 by depth), `gpt3:c768` (GPT-3 by channels).
    pub fn from_descriptor(descriptor: &str) -> Result<Self> {
        const GPT2: [(usize, usize, usize); 8] = [
            (6, 384, 6),
            (12, 768, 12),
            (24, 1024, 16),
            (36, 1280, 20),
            (48, 1600, 25),
            (60, 1920, 30),
            (72, 2880, 30),
            (84, 3456, 36),
        ];
        // 5120 where llm.c has 5140, which its own divisibility check rejects.
        const GPT3: [(usize, usize, usize); 9] = [
            (384, 6, 64),
            (768, 12, 64),
            (1024, 24, 64),
            (1536, 24, 96),
            (2048, 24, 128),
            (2560, 32, 80),
            (4096, 32, 128),
            (5120, 40, 128),
            (12288, 96, 128),
        ];
        let unknown = || {
            let depths: Vec<_> = GPT2.iter().map(|(d, ..)| format!("d{d}")).collect();
            let widths: Vec<_> = GPT3.iter().map(|(c, ..)| format!("gpt3:c{c}")).collect();
            Error::config(
                format!("no model is called `{descriptor}`"),
                format!("use one of {}, {}, or the path of a .bin checkpoint", depths.join(" "), widths.join(" ")),
            )
        };
        let config = |max_seq_len, layers, heads, channels| Gpt2Config {
            max_seq_len,
            vocab_size: VOCAB_SIZE,
            padded_vocab_size: VOCAB_SIZE.next_multiple_of(128),
            layers,
            heads,
            channels,
        };
        if let Some(channels) = descriptor.strip_prefix("gpt3:c") {
            let channels: usize = channels.parse().map_err(|_| unknown())?;
            let &(_, depth, head_size) = GPT3.iter().find(|(c, ..)| *c == channels).ok_or_else(unknown)?;
            return Ok(config(2048, depth, channels / head_size, channels));
        }
        let depth = descriptor.strip_prefix("gpt2:").unwrap_or(descriptor).strip_prefix('d');
        let depth: usize = depth.and_then(|d| d.parse().ok()).ok_or_else(unknown)?;
        let &(_, channels, heads) = GPT2.iter().find(|(d, ..)| *d == depth).ok_or_else(unknown)?;
        Ok(config(1024, depth, heads, channels))
    }

    /// Channels of one head.
    pub fn head_size(&self) -> usize {
        self.channels / self.heads
    }

    /// Shape of parameter tensor `index` of [`PARAMS`].
    pub fn param_shape(&self, index: usize) -> Vec<usize> {
        let (l, c) = (self.layers, self.channels);
        match index {
            0 => vec![self.padded_vocab_size, c],
            1 => vec![self.max_seq_len, c],
            4 => vec![l, 3 * c, c],
            5 => vec![l, 3 * c],
            6 => vec![l, c, c],
            10 => vec![l, 4 * c, c],
            11 => vec![l, 4 * c],
            12 => vec![l, c, 4 * c],
            14 | 15 => vec![c],
            2 | 3 | 7 | 8 | 9 | 13 => vec![l, c],
            _ => panic!("a GPT-2 has 16 parameter tensors, there is no number {index}"),
        }
    }

    /// Elements of parameter tensor `index`.
    pub fn param_numel(&self, index: usize) -> usize {
        self.param_shape(index).iter().product()
    }

    /// Elements of all parameter tensors, padded rows included.
    pub fn parameter_count(&self) -> usize {
        (0..PARAMS.len()).map(|i| self.param_numel(i)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_counts_of_the_named_models() {
        for (name, count) in [
            ("d6", 30_357_504),
            ("d12", 124_475_904),
            ("d24", 354_871_296),
            ("d36", 774_090_240),
            ("d48", 1_557_686_400),
        ] {
            assert_eq!(Gpt2Config::from_descriptor(name).unwrap().parameter_count(), count, "{name}");
        }
    }

    #[test]
    fn gpt3_sizes_have_their_head_size_and_length() {
        for (name, head, layers) in [("gpt3:c1536", 96, 24), ("gpt3:c2560", 80, 32), ("gpt3:c5120", 128, 40)] {
            let c = Gpt2Config::from_descriptor(name).unwrap();
            assert_eq!((c.head_size(), c.layers, c.max_seq_len), (head, layers, 2048), "{name}");
            c.validate().unwrap();
        }
    }

    #[test]
    fn spellings_of_one_model_agree() {
        assert_eq!(Gpt2Config::from_descriptor("gpt2:d12").unwrap(), Gpt2Config::from_descriptor("d12").unwrap());
    }

    #[test]
    fn an_unknown_model_is_refused_with_the_list() {
        for name in ["d13", "d", "gpt3:c5140", "gpt4", ""] {
            let message = Gpt2Config::from_descriptor(name).unwrap_err().to_string();
            assert!(message.contains("d12") && message.contains("gpt3:c768"), "{message}");
        }
    }

    #[test]
    fn impossible_sizes_are_refused() {
        let good = Gpt2Config::from_descriptor("d6").unwrap();
        good.validate().unwrap();
        for bad in [
            Gpt2Config { heads: 5, ..good },
            Gpt2Config { layers: 0, ..good },
            Gpt2Config { padded_vocab_size: 50_256, ..good },
        ] {
            assert!(bad.validate().is_err(), "{bad:?}");
        }
    }
}
