//! Multiple-choice evaluation in the manner of HellaSwag: of four continuations the one with the lowest mean loss is the model's answer.

use std::path::Path;

use tilewright_core::format::eval::EvalExample;
use tilewright_core::{Error, Result};
use tilewright_models::Gpt2;
use tilewright_models::gpt2::IGNORE_INDEX;

use crate::stats::wilson;

/// Continuations of an example.
pub const CHOICES: usize = 4;

/// One question: a context, four continuations and the right one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Question {
    /// Tokens before each continuation.
    pub context: Vec<u16>,
    /// The continuations.
    pub choices: [Vec<u16>; CHOICES],
    /// Index of the right one.
    pub label: usize,
}

/// Right answers of a number of questions.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Score {
    /// Right answers.
    pub right: usize,
    /// Questions asked.
    pub questions: usize,
}

impl Score {
    /// The fraction of right answers.
    pub fn accuracy(&self) -> f64 {
        self.right as f64 / self.questions.max(1) as f64
    }

    /// Its 95 % interval.
    pub fn interval(&self) -> (f64, f64) {
        wilson(self.right, self.questions)
    }
}

/// One row of a batch: inputs and targets of `context + choice`, only the choice's tokens counting.
///
/// The token at position `i` of the continuation is the target at position `context + i - 1`.
fn fill_row(question: &Question, choice: usize, inputs: &mut [i32], targets: &mut [i32]) {
    inputs.fill(0);
    targets.fill(IGNORE_INDEX);
    let tokens = question.context.iter().chain(&question.choices[choice]);
    for (slot, token) in inputs.iter_mut().zip(tokens) {
        *slot = i32::from(*token);
    }
    let start = question.context.len() - 1;
    for (slot, token) in targets[start..].iter_mut().zip(&question.choices[choice]) {
        *slot = i32::from(*token);
    }
}

/// The questions of an evaluation file; each must have four choices.
pub fn questions(examples: Vec<EvalExample>, path: &Path) -> Result<Vec<Question>> {
    let convert = |(i, e): (usize, EvalExample)| {
        let n = e.completions.len();
        let choices = e.completions.try_into().map_err(|_| {
            Error::config(
                format!("question {i} of {} has {n} choices", path.display()),
                "use a file with four choices a question",
            )
        })?;
        Ok(Question { context: e.context, choices, label: e.label.into() })
    };
    examples.into_iter().enumerate().map(convert).collect()
}

/// Checks that every question fits a row of `seq_len` tokens.
pub fn check(questions: &[Question], seq_len: usize, path: &Path) -> Result<()> {
    let longest = |q: &Question| q.context.len() + q.choices.iter().map(Vec::len).max().unwrap_or(0);
    let Some((i, tokens)) = questions.iter().map(longest).enumerate().max_by_key(|(_, n)| *n) else { return Ok(()) };
    if tokens > seq_len {
        return Err(Error::config(
            format!("question {i} of {} is {tokens} tokens long, a row has {seq_len}", path.display()),
            format!("use --seq-len {tokens} or more"),
        ));
    }
    Ok(())
}

/// Asks a model all questions, which [`check`] has accepted. The model's batch takes `B / 4` questions at a time.
pub fn ask(model: &mut Gpt2, questions: &[Question]) -> Result<Score> {
    let (b, t) = (model.options().batch, model.options().seq_len);
    let together = b / CHOICES;
    if together == 0 {
        return Err(Error::config(
            format!("multiple-choice evaluation needs four rows a batch, not {b}"),
            "use --batch 4 or more",
        ));
    }
    let mut score = Score::default();
    let (mut inputs, mut targets, mut losses) = (vec![0; b * t], vec![IGNORE_INDEX; b * t], vec![0.0; b * t]);
    for group in questions.chunks(together) {
        inputs.fill(0);
        targets.fill(IGNORE_INDEX);
        for (i, question) in group.iter().enumerate() {
            for choice in 0..CHOICES {
                let row = (i * CHOICES + choice) * t;
                fill_row(question, choice, &mut inputs[row..row + t], &mut targets[row..row + t]);
            }
        }
        model.row_losses(&inputs, &targets, &mut losses)?;
        for (i, question) in group.iter().enumerate() {
            let means: [f64; CHOICES] = std::array::from_fn(|choice| {
                let row = (i * CHOICES + choice) * t;
                let sum: f64 = losses[row..row + t].iter().map(|l| f64::from(*l)).sum();
                sum / question.choices[choice].len() as f64
            });
            score.right += usize::from(lowest(&means) == question.label);
            score.questions += 1;
        }
    }
    Ok(score)
}

/// The first of the smallest values.
fn lowest(values: &[f64; CHOICES]) -> usize {
    (1..CHOICES).fold(0, |best, i| if values[i] < values[best] { i } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question() -> Question {
        Question { context: vec![5, 6, 7], choices: [vec![8, 9], vec![1], vec![2, 3, 4], vec![11]], label: 2 }
    }

    #[test]
    fn a_row_counts_only_the_tokens_of_its_continuation() {
        let (mut inputs, mut targets) = ([99; 8], [99; 8]);
        fill_row(&question(), 0, &mut inputs, &mut targets);
        const X: i32 = IGNORE_INDEX;
        assert_eq!(inputs, [5, 6, 7, 8, 9, 0, 0, 0]);
        assert_eq!(targets, [X, X, 8, 9, X, X, X, X]);
    }

    #[test]
    fn a_row_may_be_exactly_full() {
        let (mut inputs, mut targets) = ([0; 6], [0; 6]);
        fill_row(&question(), 2, &mut inputs, &mut targets);
        assert_eq!(inputs, [5, 6, 7, 2, 3, 4]);
        assert_eq!(targets[2..5], [2, 3, 4]);
        assert_eq!(targets[5], IGNORE_INDEX);
    }

    #[test]
    fn equal_losses_give_the_first_choice() {
        assert_eq!(lowest(&[1.0, 1.0, 1.0, 1.0]), 0);
        assert_eq!(lowest(&[2.0, 1.0, 1.0, 3.0]), 1);
        assert_eq!(lowest(&[2.0, 1.5, 1.2, 0.3]), 3);
    }

    #[test]
    fn a_score_has_its_interval() {
        let score = Score { right: 8, questions: 10 };
        let (low, high) = score.interval();
        assert!(low < score.accuracy() && score.accuracy() < high);
        assert_eq!(Score::default().accuracy(), 0.0);
    }
}
