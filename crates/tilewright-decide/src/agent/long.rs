//! States that are longer than a row: read in overlapping windows, decided by the window that is surest.

use std::ops::Range;

use serde_json::Value;
use tilewright_models::laya::Scorer;

use super::{Agent, PredictOptions};
use crate::answer::{Answer, AnswerValue, Window};
use crate::error::{Result, value_error};
use crate::prediction::Prediction;
use crate::prompt::{Budget, StateTokens};
use crate::question::{Question, check_state, parse_questions};
use crate::usage::Usage;

/// A default window that is cut to less than one part in this many is worth a warning: the scan costs as much more.
const WORTH_A_WARNING: usize = 2;

/// Windows over a state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Scan {
    window: usize,
    stride: usize,
    /// The state that fits beside the longest question.
    room: usize,
}

impl Scan {
    /// Fits a scan to the room that the questions leave, so that no window is cut again and no text lies between two (trap 27).
    fn fit(
        budget: Budget,
        room: Option<usize>,
        window: Option<usize>,
        stride: Option<usize>,
        warnings: &mut Vec<String>,
    ) -> Result<Self> {
        let Budget { max_len, head_max_len } = budget;
        let default = max_len.saturating_sub(head_max_len).saturating_sub(8).max(64);
        let asked = window.filter(|&w| w > 0);
        let stride = stride.filter(|&s| s > 0);
        let wanted = asked.unwrap_or(default);
        let room = room.unwrap_or(wanted);
        if room == 0 {
            return value_error!(
                "predict_long: the questions' options fill the whole sequence (max_len={max_len}, \
                 head_max_len={head_max_len}), leaving no room for the state; no window can carry any of it. A label set this \
                 large is what laya.shortlist.predict_shortlist is for"
            );
        }
        let window = wanted.min(room);
        if wanted > room {
            if asked.is_some() {
                warnings.push(format!(
                    "window {wanted} is wider than the {room} state tokens that these questions leave in max_len {max_len}; \
                     scanning with windows of {room}"
                ));
            } else if wanted >= room * WORTH_A_WARNING {
                warnings.push(format!(
                    "these questions leave {room} of max_len {max_len} for the state, so windows shrink from {wanted} to {room} \
                     and the scan costs {:.1} times as much; fewer or shorter options, a larger max_len or a shortlist would \
                     cost less",
                    wanted as f64 / room as f64
                ));
            }
        }
        let mut step = stride.unwrap_or((window / 2).max(1));
        if step > window {
            if window < wanted && step <= wanted {
                warnings.push(format!(
                    "stride {step} fitted the window of {wanted} that was asked for; the window is {window} now, so the stride \
                     is {}",
                    (window / 2).max(1)
                ));
                step = (window / 2).max(1);
            } else {
                let room = if window < wanted { " these questions leave room for" } else { "" };
                return value_error!(
                    "predict_long: stride={step} steps past the {window}-token window{room}, so {} tokens between every pair of \
                     windows would be read by no window at all; pass stride <= {window}",
                    step - window
                );
            }
        }
        Ok(Scan { window, stride: step, room })
    }

    /// Where the windows over `tokens` begin.
    fn starts(&self, tokens: usize) -> Vec<usize> {
        let mut starts = Vec::new();
        let mut start = 0;
        while start < tokens {
            starts.push(start);
            if start + self.window >= tokens {
                break;
            }
            start += self.stride;
        }
        starts
    }
}

/// What a window is chosen by. Evidence anywhere counts for a statement; of labels and levels the surest counts.
fn weight(answer: &Answer) -> f64 {
    match answer.value {
        AnswerValue::Noul(p) => p,
        _ => answer.answer_confidence,
    }
}

/// How a state is read: whole, or in windows.
#[derive(Clone, PartialEq, Debug)]
pub struct Windows {
    /// Tokens of a window.
    pub window: usize,
    /// Tokens from the start of one to the start of the next.
    pub stride: usize,
    /// Tokens of a state that fit beside the longest question.
    pub room: usize,
    /// The state.
    pub tokens: Vec<u32>,
    /// The windows; none if the state is read whole.
    pub spans: Vec<Range<usize>>,
    /// What was asked for and could not be had.
    pub warnings: Vec<String>,
}

impl<S: Scorer> Agent<S> {
    /// The windows in which [`Agent::predict_long`] reads a state.
    pub fn windows(
        &mut self,
        state: &Value,
        questions: &Value,
        window: Option<usize>,
        stride: Option<usize>,
    ) -> Result<Windows> {
        check_state(state)?;
        let questions = parse_questions(questions)?;
        let budget = self.budget(&PredictOptions::default());
        let mut warnings = Vec::new();
        let smallest = self.smallest_room(&questions, budget)?;
        let scan = Scan::fit(budget, smallest, window, stride, &mut warnings)?;
        let tokens = StateTokens::new(&self.tokenizer, state)?.ids;
        // A state that fits is read whole, unless windows of a size were asked for.
        let fits = if window.is_some_and(|w| w > 0) { scan.window } else { scan.room };
        let starts = if tokens.len() <= fits { Vec::new() } else { scan.starts(tokens.len()) };
        let spans = starts.into_iter().map(|s| s..(s + scan.window).min(tokens.len())).collect();
        let Scan { window, stride, room } = scan;
        Ok(Windows { window, stride, room, tokens, spans, warnings })
    }

    /// The answers to `questions` about a state of any length. A state that fits is read as by [`Agent::predict`]; a longer one in windows of `window`
    /// tokens every `stride` tokens, and each answer is that of the window that is surest. It is not a probability for the whole document: the largest of
    /// many is large. Budgets and the gate of `options` are not used.
    pub fn predict_long(
        &mut self,
        state: &Value,
        questions: &Value,
        window: Option<usize>,
        stride: Option<usize>,
        options: &PredictOptions,
    ) -> Result<Prediction> {
        let Windows { tokens, spans, warnings, .. } = self.windows(state, questions, window, stride)?;
        let options = PredictOptions { lang: options.lang.clone(), ..PredictOptions::default() };
        if spans.is_empty() {
            let mut result = self.predict(state, questions, &options)?;
            result.usage.windows = Some(1);
            result.warnings = warnings;
            return Ok(result);
        }
        // Each window is decoded and read as an ordinary state. Its ends may tokenize a little differently; the overlap absorbs that.
        let texts = spans.iter().map(|span| Ok(Value::String(self.tokenizer.decode(&tokens[span.clone()])?)));
        let texts = texts.collect::<Result<Vec<_>>>()?;
        let results = self.predict_batch(&texts, questions, &options)?;

        let answers = (0..results[0].answers.len()).map(|q| {
            let mut best = 0;
            for (i, result) in results.iter().enumerate() {
                if weight(&result.answers[q]) > weight(&results[best].answers[q]) {
                    best = i;
                }
            }
            let span = &spans[best];
            let window = Window { index: best, token_start: span.start, token_end: span.end, count: results.len() };
            Answer { window: Some(window), ..results[best].answers[q].clone() }
        });
        let answers = answers.collect();
        let usages: Vec<Usage> = results.into_iter().map(|r| r.usage).collect();
        Ok(Prediction { answers, usage: Usage::sum(&usages), warnings, ..Prediction::default() })
    }

    /// The state tokens that the longest of the questions leaves; none without questions.
    fn smallest_room(&mut self, questions: &[Question], budget: Budget) -> Result<Option<usize>> {
        let mut smallest = None;
        for question in questions {
            let room = self.heads.head(&self.tokenizer, question, budget.head_max_len)?.state_room(budget.max_len);
            smallest = Some(smallest.map_or(room, |s: usize| s.min(room)));
        }
        Ok(smallest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: Budget = Budget { max_len: 160, head_max_len: 64 };

    fn fit(room: usize, window: Option<usize>, stride: Option<usize>) -> (Result<Scan>, Vec<String>) {
        let mut warnings = Vec::new();
        (Scan::fit(BUDGET, Some(room), window, stride, &mut warnings), warnings)
    }

    #[test]
    fn the_default_window_is_the_state_budget_and_overlaps_by_half() {
        let (scan, warnings) = fit(120, None, None);
        assert_eq!(scan.unwrap(), Scan { window: 88, stride: 44, room: 120 });
        assert!(warnings.is_empty());
    }

    #[test]
    fn trap_27_a_window_wider_than_the_room_is_narrowed_with_a_warning() {
        let (scan, warnings) = fit(50, Some(70), None);
        assert_eq!(scan.unwrap(), Scan { window: 50, stride: 25, room: 50 });
        assert_eq!(warnings.len(), 1);
        let (scan, warnings) = fit(44, None, None);
        assert_eq!(scan.unwrap().window, 44);
        assert!(warnings[0].contains("from 88 to 44"), "{warnings:?}");
        assert!(fit(45, None, None).1.is_empty(), "a default that shrinks by less than half is not worth a word");
    }

    #[test]
    fn trap_27_a_stride_beyond_the_window_is_refused() {
        let (scan, _) = fit(120, Some(40), Some(41));
        let message = scan.unwrap_err().to_string();
        assert!(message.contains("stride=41 steps past the 40-token window, so 1 tokens"), "{message}");
        let (scan, _) = fit(30, Some(40), Some(41));
        assert!(scan.unwrap_err().to_string().contains("30-token window these questions leave room for"));
    }

    #[test]
    fn a_stride_that_only_the_narrowing_made_too_long_is_narrowed_too() {
        let (scan, warnings) = fit(30, Some(60), Some(40));
        assert_eq!(scan.unwrap(), Scan { window: 30, stride: 15, room: 30 });
        assert_eq!(warnings.len(), 2);
    }

    #[test]
    fn no_room_is_an_error() {
        assert!(fit(0, None, None).0.unwrap_err().to_string().starts_with("predict_long: the questions' options fill"));
    }

    #[test]
    fn windows_cover_every_token_and_stop_at_the_end() {
        let scan = Scan { window: 10, stride: 4, room: 10 };
        assert_eq!(scan.starts(10), [0]);
        assert_eq!(scan.starts(11), [0, 4]);
        assert_eq!(scan.starts(23), [0, 4, 8, 12, 16]);
        assert!(scan.starts(0).is_empty());
    }
}
