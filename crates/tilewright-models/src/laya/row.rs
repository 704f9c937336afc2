//! What goes into the model and what comes out: rows of token ids, and one logit an option.

use tilewright_core::Result;

/// The kind of a question; its number selects the type embedding.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum QuestionType {
    /// One of several labels.
    Choice = 0,
    /// A level of an ordered scale.
    Score = 1,
    /// A statement that is false (option 0) or true (option 1).
    Noul = 2,
}

impl QuestionType {
    /// All of them, in the order of their numbers.
    pub const ALL: [QuestionType; 3] = [QuestionType::Choice, QuestionType::Score, QuestionType::Noul];

    /// The name in requests, prompts and calibration buckets.
    pub const fn name(self) -> &'static str {
        match self {
            QuestionType::Choice => "choice",
            QuestionType::Score => "score",
            QuestionType::Noul => "noul",
        }
    }

    /// The row of `type_emb.weight`, and the entry of `temperature`.
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// Positions of the parallel option layout; both have one entry a token.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub struct OptionPositions {
    /// What RoPE and the sliding window measure by.
    pub position_ids: Vec<u32>,
    /// `s + 1` inside the span of slot `s`, 0 elsewhere. Tokens of different spans do not see each other in the encoder.
    pub option_ids: Vec<u32>,
}

/// One question against one state.
#[derive(Clone, PartialEq, Eq, Debug, Hash)]
pub struct Row {
    /// Token ids, special tokens included, no padding. At least one.
    pub ids: Vec<u32>,
    /// Selects the type embedding.
    pub question: QuestionType,
    /// Index of the mask token before each option, in slot order, ascending. At least one.
    pub markers: Vec<u32>,
    /// Only for checkpoints with the parallel layout, and always for them.
    pub positions: Option<OptionPositions>,
}

/// The raw scores of one row.
#[derive(Clone, PartialEq, Debug)]
pub struct RowScores {
    /// One a marker, in slot order, before any temperature.
    pub logits: Vec<f32>,
    /// One an action class; class 0 is "answer".
    pub act_logits: Vec<f32>,
}

/// Scores rows. Implemented by the model, and by recorded scores in tests.
pub trait Scorer {
    /// The scores of each row, in order. A row's result depends on that row alone, to the bit.
    fn score(&mut self, rows: &[Row]) -> Result<Vec<RowScores>>;

    /// The mean of the encoder's final hidden states over each row of token ids.
    fn embed(&mut self, rows: &[Vec<u32>]) -> Result<Vec<Vec<f32>>>;
}
