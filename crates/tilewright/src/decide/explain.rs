//! What the model was shown, for people.

use std::fmt::Write;

use tilewright_decide::{Explanation, Part, Segment};

use super::table::shortened;

/// Longest run of token pieces that is shown whole.
const PIECES: usize = 90;

/// All rows.
pub fn text(explanations: &[Explanation]) -> String {
    let mut out = String::new();
    for (i, explanation) in explanations.iter().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        row(&mut out, explanation);
    }
    out
}

fn row(out: &mut String, e: &Explanation) {
    let tokens: usize = e.segments.iter().map(|s| s.tokens.len()).sum();
    let id = shortened(&e.question.id, 40);
    let _ = writeln!(out, "{id} ({}): a row of {tokens} tokens", e.question.kind.name());
    for segment in &e.segments {
        let name = match segment.part {
            Part::Special => "special".to_owned(),
            Part::Instructions => "instructions".to_owned(),
            Part::Option(i) => format!("option {}", shortened(&e.answer.keys[i], 20)),
            Part::State => "state".to_owned(),
        };
        let _ = writeln!(out, "  {name:<26}{:<18}{}", count(segment), pieces(segment));
    }
    if let Some(n) = e.tokens_per_option {
        let _ = writeln!(
            out,
            "  the options did not fit: each was cut to {n} tokens, its mask token included; raise --head-max-len"
        );
    }
    let answer = &e.answer;
    let width = answer.keys.iter().map(|k| shortened(k, 40).chars().count()).max().unwrap_or(0).max(6);
    let _ = writeln!(out, "  {:<width$}  {:>10}  probability", "option", "logit");
    for (key, (logit, p)) in answer.keys.iter().zip(answer.logits.iter().zip(answer.distribution.probabilities())) {
        let _ = writeln!(out, "  {:<width$}  {logit:>10.5}  {p:.6}", shortened(key, 40));
    }
    let language = answer.applied.language.as_ref().map(|l| format!(" of language {l}")).unwrap_or_default();
    let actions: Vec<String> = answer.act_logits.iter().map(|l| format!("{l:.5}")).collect();
    let _ = writeln!(
        out,
        "  temperature {} ({}{language}), action logits {}",
        answer.applied.temperature,
        answer.applied.bucket,
        actions.join(" ")
    );
}

fn count(segment: &Segment) -> String {
    let cut = segment.cut;
    if segment.part == Part::Special || cut.kept == cut.total {
        return segment.tokens.len().to_string();
    }
    let where_ = if segment.skipped > 0 { "last" } else { "first" };
    format!("{where_} {} of {}", cut.kept, cut.total)
}

fn pieces(segment: &Segment) -> String {
    let all: Vec<&str> = segment.tokens.iter().map(|t| t.piece.as_str()).collect();
    shortened(&all.join(" "), PIECES)
}
