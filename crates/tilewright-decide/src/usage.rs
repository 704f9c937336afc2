//! What a call read, and what it had to leave out: always from the real token budget, never from characters (trap 3).

use serde_json::{Map, Value};

/// Counts of one result.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Usage {
    /// Tokens of all rows.
    pub input_tokens: usize,
    /// The state; absent if nothing was asked.
    pub state: Option<StateUsage>,
    /// Questions with options that the cut has made equal.
    pub options: Vec<(String, OptionUsage)>,
    /// Windows that a long state was read in.
    pub windows: Option<usize>,
}

/// The state in the rows of one result.
#[derive(Clone, PartialEq, Debug)]
pub struct StateUsage {
    /// Tokens of the whole state; summed over windows.
    pub tokens: usize,
    /// The most that one question had to leave out; summed over windows.
    pub dropped: usize,
    /// Whether something was left out.
    pub truncated: Truncated,
    /// The questions that had to, in their order.
    pub questions: Vec<String>,
}

/// A fact about one state, a count over windows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Truncated {
    /// Whether the state was cut.
    State(bool),
    /// How many windows were cut.
    Windows(usize),
}

/// Options of which some look the same to the model (trap 5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OptionUsage {
    /// How many there are.
    pub total: usize,
    /// How many different token spans they have.
    pub distinct: usize,
    /// What each was cut to, if the question's budget demanded it.
    pub tokens_per_option: Option<usize>,
}

impl Usage {
    /// One usage for the windows of a state: counts are summed, the questions are the last window's.
    pub(crate) fn sum(windows: &[Usage]) -> Usage {
        let mut total = Usage { windows: Some(windows.len()), ..Usage::default() };
        for usage in windows {
            total.input_tokens += usage.input_tokens;
            if let Some(state) = &usage.state {
                let cut = |t: Truncated| match t {
                    Truncated::State(b) => usize::from(b),
                    Truncated::Windows(n) => n,
                };
                let before = total.state.take();
                let (tokens, dropped, count) =
                    before.map_or((0, 0, 0), |s: StateUsage| (s.tokens, s.dropped, cut(s.truncated)));
                total.state = Some(StateUsage {
                    tokens: tokens + state.tokens,
                    dropped: dropped + state.dropped,
                    truncated: Truncated::Windows(count + cut(state.truncated)),
                    questions: state.questions.clone(),
                });
            }
            for (id, options) in &usage.options {
                match total.options.iter_mut().find(|(known, _)| known == id) {
                    Some((_, known)) => *known = *options,
                    None => total.options.push((id.clone(), *options)),
                }
            }
        }
        total
    }

    /// The `usage` object of a result.
    pub fn to_json(&self) -> Value {
        let mut out = Map::new();
        out.insert("input_tokens".into(), self.input_tokens.into());
        out.insert("output_tokens".into(), 0.into());
        if let Some(state) = &self.state {
            out.insert("state_tokens".into(), state.tokens.into());
            out.insert("state_tokens_dropped".into(), state.dropped.into());
            let truncated = match state.truncated {
                Truncated::State(b) => b.into(),
                Truncated::Windows(n) => n.into(),
            };
            out.insert("truncated".into(), truncated);
            out.insert("truncated_questions".into(), state.questions.clone().into());
        }
        if !self.options.is_empty() {
            let entry = |o: &OptionUsage| serde_json::json!({"total": o.total, "distinct": o.distinct, "tokens_per_option": o.tokens_per_option});
            let options = self.options.iter().map(|(id, o)| (id.clone(), entry(o))).collect();
            out.insert("options".into(), Value::Object(options));
        }
        if let Some(windows) = self.windows {
            out.insert("windows".into(), windows.into());
        }
        Value::Object(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_windows_are_summed_and_the_questions_are_the_last_windows() {
        let window = |dropped: usize, question: &str, distinct: usize| Usage {
            input_tokens: 100,
            state: Some(StateUsage {
                tokens: 50,
                dropped,
                truncated: Truncated::State(dropped > 0),
                questions: vec![question.into()],
            }),
            options: vec![(question.into(), OptionUsage { total: 9, distinct, tokens_per_option: None })],
            windows: None,
        };
        let sum = Usage::sum(&[window(3, "a", 1), window(4, "b", 2), window(0, "a", 5)]);
        assert_eq!(
            sum.to_json().to_string(),
            "{\"input_tokens\":300,\"output_tokens\":0,\"state_tokens\":150,\"state_tokens_dropped\":7,\"truncated\":2,\
             \"truncated_questions\":[\"a\"],\"options\":{\"a\":{\"total\":9,\"distinct\":5,\"tokens_per_option\":null},\
             \"b\":{\"total\":9,\"distinct\":2,\"tokens_per_option\":null}},\"windows\":3}"
        );
    }

    #[test]
    fn nothing_asked_is_nothing_read() {
        assert_eq!(Usage::default().to_json().to_string(), r#"{"input_tokens":0,"output_tokens":0}"#);
        let sum = Usage::sum(&[Usage::default(), Usage::default()]);
        assert_eq!(sum.to_json().to_string(), r#"{"input_tokens":0,"output_tokens":0,"windows":2}"#);
    }
}
