//! From a question and a state to a row of token ids:
//!
//! ```text
//! [CLS] "<type> question: <instructions>" [SEP] [MASK] option [MASK] option ... [SEP] state [SEP]
//! ```
//!
//! The question half has a budget of its own, the state gets what is left of `max_len`. Both are cut as ids.

mod cache;
mod layout;

pub(crate) use cache::HeadCache;

use std::collections::HashSet;

use serde_json::Value;
use tilewright_models::laya::{OptionLayout, Row};

use crate::error::{Result, value_error};
use crate::json::plain_text;
use crate::python::repr_str;
use crate::question::Question;
use crate::tokenizer::Tokenizer;

/// Tokens of one option's text that are looked at.
const OPTION_TOKENS: usize = 48;

/// Fewer tokens than this for the instructions, and the options are shortened.
const SCARCE: i64 = 16;

/// Instructions keep this many tokens, whatever the budget; options likewise.
const LEAST_INSTRUCTIONS: i64 = 8;
const LEAST_OPTION: i64 = 4;

/// How long a row may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Budget {
    /// Tokens of a row, special tokens included.
    pub max_len: usize,
    /// Tokens of instructions and options.
    pub head_max_len: usize,
}

/// How much of a text became tokens of the row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cut {
    /// Tokens in the row.
    pub kept: usize,
    /// Tokens of the whole text.
    pub total: usize,
}

/// The question half of a row, which is the same for every state.
#[derive(Clone, PartialEq, Debug)]
pub struct Head {
    /// From `[CLS]` to the `[SEP]` behind the options.
    pub ids: Vec<u32>,
    /// Where each option's mask token is, in slot order.
    pub markers: Vec<u32>,
    /// How many options still differ from all others after the cut.
    pub distinct: usize,
    /// The tokens that each option was cut to, its mask token included, if they were.
    pub tokens_per_option: Option<usize>,
    /// The instructions, with the type before them.
    pub instructions: Cut,
    /// The options in slot order, without their mask tokens.
    pub options: Vec<Cut>,
}

impl Head {
    /// Builds the question half.
    pub fn build(tokenizer: &Tokenizer, question: &Question, head_max_len: usize) -> Result<Self> {
        let text = format!("{} question: {}", question.kind.name(), question.instructions);
        let mut instructions = tokenizer.encode(&text)?;
        let mut spans = Vec::with_capacity(question.options.len());
        let mut totals = Vec::with_capacity(question.options.len());
        for i in question.slots() {
            let mut span = tokenizer.encode(&format!(" {}", question.options[i]))?;
            totals.push(span.len());
            span.truncate(OPTION_TOKENS);
            span.insert(0, tokenizer.mask());
            spans.push(span);
        }

        let head_max_len = head_max_len.min(i64::MAX as usize) as i64;
        let left = |spans: &[Vec<u32>]| head_max_len - spans.iter().map(|s| s.len() as i64).sum::<i64>();
        let mut budget = left(&spans);
        let mut tokens_per_option = None;
        if budget < SCARCE {
            let per = (head_max_len - SCARCE).div_euclid(spans.len().max(1) as i64).max(LEAST_OPTION) as usize;
            spans.iter_mut().for_each(|span| span.truncate(per));
            tokens_per_option = Some(per);
            budget = left(&spans);
        }
        let total = instructions.len();
        instructions.truncate(budget.max(LEAST_INSTRUCTIONS) as usize);
        let instructions_cut = Cut { kept: instructions.len(), total };

        let mut ids = vec![tokenizer.cls()];
        ids.append(&mut instructions);
        ids.push(tokenizer.sep());
        let mut markers = Vec::with_capacity(spans.len());
        for span in &spans {
            markers.push(ids.len() as u32);
            ids.extend_from_slice(span);
        }
        ids.push(tokenizer.sep());
        // Counted on the spans as they were cut: in the row, the last one runs on into the state (trap 5).
        let distinct = spans.iter().collect::<HashSet<_>>().len();
        let options = spans.iter().zip(totals).map(|(s, total)| Cut { kept: s.len() - 1, total }).collect();
        Ok(Head { ids, markers, distinct, tokens_per_option, instructions: instructions_cut, options })
    }

    /// Tokens that are left for the state.
    pub fn state_room(&self, max_len: usize) -> usize {
        max_len.saturating_sub(self.ids.len() + 1)
    }
}

/// A state as token ids, made once and shared by all questions.
#[derive(Clone, PartialEq, Debug)]
pub struct StateTokens {
    /// All of them.
    pub ids: Vec<u32>,
    /// Whether the end is kept when it is too long: the newest turn of a conversation is last.
    pub keep_end: bool,
}

impl StateTokens {
    /// Tokenizes a state: a string as it is, anything else as its JSON text.
    pub fn new(tokenizer: &Tokenizer, state: &Value) -> Result<Self> {
        let ids = match state {
            Value::String(text) => tokenizer.encode(text)?,
            other => tokenizer.encode(&plain_text(other))?,
        };
        Ok(StateTokens { ids, keep_end: state.is_array() })
    }

    /// The range that fits into `room` tokens.
    fn kept(&self, room: usize) -> std::ops::Range<usize> {
        let n = self.ids.len();
        let room = room.min(n);
        if self.keep_end { n - room..n } else { 0..room }
    }
}

/// A row, and what of the state is in it.
#[derive(Clone, PartialEq, Debug)]
pub struct PromptRow {
    /// What the model reads.
    pub row: Row,
    /// The tokens of the state that are in it.
    pub state: std::ops::Range<usize>,
    /// Tokens of the whole state.
    pub state_tokens: usize,
}

impl PromptRow {
    /// Puts a question half and a state together.
    pub fn build(
        tokenizer: &Tokenizer,
        question: &Question,
        head: &Head,
        state: &StateTokens,
        budget: Budget,
        layout: OptionLayout,
    ) -> Result<Self> {
        let Budget { max_len, head_max_len } = budget;
        let kept = state.kept(head.state_room(max_len));
        let mut ids = Vec::with_capacity(head.ids.len() + kept.len() + 1);
        ids.extend_from_slice(&head.ids);
        ids.extend_from_slice(&state.ids[kept.clone()]);
        ids.push(tokenizer.sep());
        // Laid out before the cut: an option that is cut off must not widen the last one that is left.
        let mut positions = match layout {
            OptionLayout::Sequential => None,
            OptionLayout::Parallel => Some(layout::parallel(&head.markers, head.ids.len(), ids.len())),
        };
        ids.truncate(max_len);
        if let Some(positions) = &mut positions {
            positions.position_ids.truncate(max_len);
            positions.option_ids.truncate(max_len);
        }
        let markers: Vec<u32> = head.markers.iter().copied().filter(|&m| (m as usize) < max_len).collect();
        if markers.len() < head.markers.len() {
            return value_error!(
                "question {}: only {} of its {} option markers fit in max_len={max_len} with head_max_len={head_max_len} spent \
                 on the question; lower head_max_len, raise max_len, or use fewer options",
                repr_str(&question.id),
                markers.len(),
                head.markers.len()
            );
        }
        let row = Row { ids, question: question.kind, markers, positions };
        Ok(PromptRow { row, state: kept, state_tokens: state.ids.len() })
    }

    /// Tokens of the state that are not in the row.
    pub fn state_dropped(&self) -> usize {
        self.state_tokens - self.state.len()
    }
}
