//! Answers for people: one block a question, a bar an option.

use std::fmt::Write;

use tilewright_decide::{Abstention, Answer, AnswerValue, Prediction};

/// Cells of a full bar.
const BAR: usize = 24;
/// Longest option text that is shown whole.
const TEXT: usize = 40;

/// All answers, with bars on a terminal.
pub fn text(prediction: &Prediction, bars: bool) -> String {
    let mut out = String::new();
    for (i, answer) in prediction.answers.iter().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        block(&mut out, answer, bars);
    }
    let usage = &prediction.usage;
    if let Some(state) = &usage.state
        && state.dropped > 0
    {
        let _ = writeln!(
            out,
            "\nnote: up to {} of the {} tokens of the state were cut for {}; raise --max-len, or use --long",
            state.dropped,
            state.tokens,
            state.questions.iter().map(|id| shortened(id, TEXT)).collect::<Vec<_>>().join(", ")
        );
    }
    for (id, options) in &usage.options {
        let id = shortened(id, TEXT);
        let _ = writeln!(
            out,
            "\nnote: after cutting, only {} of the {} options of {id} differ; raise --head-max-len, or use --tournament",
            options.distinct, options.total
        );
    }
    out
}

fn block(out: &mut String, answer: &Answer, bars: bool) {
    let value = match &answer.value {
        AnswerValue::Choice(label) => shortened(&label.as_str().map_or_else(|| label.to_string(), str::to_owned), TEXT),
        AnswerValue::Score { expected, legend } => format!("{expected:.2} on 0 to {}", legend.len().saturating_sub(1)),
        AnswerValue::Noul(p) => if *p >= 0.5 { "true" } else { "false" }.to_owned(),
    };
    let id = shortened(&answer.id, TEXT);
    let _ = write!(out, "{id}: {value}   ({}, confidence {:.4}", answer.kind().name(), answer.answer_confidence);
    if let Some(verdict) = &answer.verdict {
        let _ = match verdict.state {
            Abstention::Passed => write!(out, ", passes {}", verdict.threshold),
            Abstention::Abstained => write!(out, ", ABSTAINED: below {}", verdict.threshold),
            Abstention::Unevaluated => write!(out, ", not judged"),
        };
    }
    if let Some(window) = &answer.window {
        let _ = write!(
            out,
            ", window {} of {}: state tokens {} to {}",
            window.index + 1,
            window.count,
            window.token_start,
            window.token_end
        );
    }
    out.push_str(")\n");
    let names: Vec<String> = answer.keys.iter().enumerate().map(|(i, key)| name(answer, i, key)).collect();
    let width = names.iter().map(|n| n.chars().count()).max().unwrap_or(0);
    for (name, p) in names.iter().zip(answer.distribution.probabilities()) {
        let _ = write!(out, "  {name:width$}  ");
        if bars {
            let _ = write!(out, "{}  ", bar(f64::from(*p)));
        }
        let _ = writeln!(out, "{p:.4}");
    }
}

/// The label of an option, or the level with its text.
fn name(answer: &Answer, i: usize, key: &str) -> String {
    let full = match &answer.value {
        AnswerValue::Score { legend, .. } => {
            let text =
                legend.get(i).map(|t| t.as_str().map_or_else(|| t.to_string(), str::to_owned)).unwrap_or_default();
            format!("{key} {text}")
        }
        _ => key.to_owned(),
    };
    shortened(&full, TEXT)
}

/// A text on one line, with dots where it was cut. Nothing in it commands the terminal or turns the direction of what follows.
pub fn shortened(text: &str, limit: usize) -> String {
    let commands = |c: char| c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let line: String = text.chars().map(|c| if commands(c) { ' ' } else { c }).collect();
    match line.char_indices().nth(limit) {
        Some(_) => format!("{}...", line.chars().take(limit - 3).collect::<String>()),
        None => line,
    }
}

/// A bar in eighths of a cell.
fn bar(p: f64) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (p.clamp(0.0, 1.0) * (BAR * 8) as f64).round() as usize;
    let mut bar = "█".repeat(eighths / 8);
    bar += EIGHTHS[eighths % 8];
    let cells = eighths.div_ceil(8);
    bar + &"·".repeat(BAR - cells)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_have_one_width() {
        for p in [0.0, 0.001, 0.0026, 0.3333, 0.5, 0.99, 1.0] {
            assert_eq!(bar(p).chars().count(), BAR, "{p}");
        }
        assert_eq!(bar(0.0), "·".repeat(BAR));
        assert_eq!(bar(1.0), "█".repeat(BAR));
        assert!(bar(0.5).starts_with(&"█".repeat(12)) && bar(0.5).ends_with(&"·".repeat(12)));
    }

    #[test]
    fn long_texts_are_cut_on_one_line() {
        assert_eq!(shortened("a\nb", 10), "a b");
        assert_eq!(shortened("abcdefghijkl", 10), "abcdefg...");
        assert_eq!(shortened("äöüäöüäöüä", 10), "äöüäöüäöüä");
    }
}
