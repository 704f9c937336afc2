//! What the model was shown, token by token, and what it made of it.

use serde_json::{Value, json};
use tilewright_models::laya::Scorer;

use crate::agent::{Agent, Asked, PredictOptions};
use crate::answer::Answer;
use crate::error::Result;
use crate::json::float;
use crate::prompt::Cut;
use crate::question::{Question, check_state, parse_questions};

/// A part of a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// A special token that holds the row together.
    Special,
    /// The type and the instructions.
    Instructions,
    /// An option, by its index among the criteria; its mask token is in front.
    Option(usize),
    /// The state.
    State,
}

/// Tokens of one part.
#[derive(Clone, PartialEq, Debug)]
pub struct Segment {
    /// Which part.
    pub part: Part,
    /// The tokens in the row.
    pub tokens: Vec<Token>,
    /// How much of the part's text they are.
    pub cut: Cut,
    /// Tokens that were left out before the first one; the others are missing at the end.
    pub skipped: usize,
}

/// A token.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// How the vocabulary spells it.
    pub piece: String,
}

/// A question's row and its answer.
#[derive(Clone, PartialEq, Debug)]
pub struct Explanation {
    /// The question as it was understood.
    pub question: Question,
    /// The row from its first to its last token.
    pub segments: Vec<Segment>,
    /// What every option was cut to, if they were.
    pub tokens_per_option: Option<usize>,
    /// The answer with its raw logits.
    pub answer: Answer,
}

impl Explanation {
    /// As JSON: segments with token counts and pieces, then every option with logit and probability.
    pub fn to_json(&self) -> Value {
        let segment = |s: &Segment| {
            let (part, option) = match s.part {
                Part::Special => ("special", None),
                Part::Instructions => ("instructions", None),
                Part::Option(i) => ("option", Some(i)),
                Part::State => ("state", None),
            };
            json!({
                "part": part, "option": option, "kept": s.cut.kept, "of": s.cut.total, "skipped": s.skipped,
                "ids": s.tokens.iter().map(|t| t.id).collect::<Vec<_>>(),
                "tokens": s.tokens.iter().map(|t| t.piece.as_str()).collect::<Vec<_>>(),
            })
        };
        let answer = &self.answer;
        let option = |i: usize| {
            let p = answer.distribution.probabilities()[i];
            json!({
                "key": answer.keys[i], "text": self.question.options[i],
                "logit": float(f64::from(answer.logits[i])), "probability": float(f64::from(p)),
            })
        };
        json!({
            "question": self.question.id,
            "type": self.question.kind.name(),
            "segments": self.segments.iter().map(segment).collect::<Vec<_>>(),
            "tokens_per_option": self.tokens_per_option,
            "bucket": answer.applied.bucket,
            "temperature": float(answer.applied.temperature),
            "language": answer.applied.language,
            "options": (0..self.question.options.len()).map(option).collect::<Vec<_>>(),
            "act_logits": answer.act_logits.iter().map(|l| float(f64::from(*l))).collect::<Vec<_>>(),
        })
    }
}

impl<S: Scorer> Agent<S> {
    /// What [`Agent::predict`] shows the model for each question, and what comes back.
    pub fn explain(&mut self, state: &Value, questions: &Value, options: &PredictOptions) -> Result<Vec<Explanation>> {
        let questions = parse_questions(questions)?;
        check_state(state)?;
        let asked = self.ask(std::slice::from_ref(state), &questions, options)?;
        let scores = self.score(&asked)?;
        let mut explanations = Vec::with_capacity(questions.len());
        for ((question, asked), scores) in questions.into_iter().zip(&asked).zip(&scores) {
            let mut answer = Answer::new(&question, scores, self.calibration(), options.lang.as_deref())?;
            answer.judge(options.gate.as_ref());
            let segments = self.segments(&question, asked);
            let tokens_per_option = asked.head.tokens_per_option;
            explanations.push(Explanation { question, segments, tokens_per_option, answer });
        }
        Ok(explanations)
    }

    fn segments(&self, question: &Question, asked: &Asked) -> Vec<Segment> {
        let Asked { head, prompt } = asked;
        let mut rest = prompt.row.ids.as_slice();
        let mut segments = Vec::new();
        let mut take = |part: Part, tokens: usize, cut: Cut, skipped: usize| {
            // A row that was cut to its length may end early.
            let (ids, tail) = rest.split_at(tokens.min(rest.len()));
            rest = tail;
            let tokens = ids.iter().map(|&id| Token { id, piece: self.tokenizer().piece(id) }).collect();
            segments.push(Segment { part, tokens, cut, skipped });
        };
        let one = Cut { kept: 1, total: 1 };
        take(Part::Special, 1, one, 0);
        take(Part::Instructions, head.instructions.kept, head.instructions, 0);
        take(Part::Special, 1, one, 0);
        for (option, cut) in question.slots().into_iter().zip(&head.options) {
            take(Part::Option(option), cut.kept + 1, *cut, 0);
        }
        take(Part::Special, 1, one, 0);
        let state = Cut { kept: prompt.state.len(), total: prompt.state_tokens };
        take(Part::State, state.kept, state, prompt.state.start);
        take(Part::Special, 1, one, 0);
        segments.retain(|s| !s.tokens.is_empty() || s.part == Part::State);
        segments
    }
}
