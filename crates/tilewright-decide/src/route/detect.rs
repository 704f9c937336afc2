//! Detection of script and language: whether the English checkpoint can read a state.

use serde_json::{Map, Value, json};

use super::caps::{
    has_only_acronyms, is_code, is_shouted, lowered_words, shouted_evidence, without_capital_runs, without_compounds,
};
use super::chars::{is_letter, is_space, words};
use super::language::{FOREIGN_LETTER_RATE, LatinProfile, MIN_WORDS, evidence};
use super::round4;
use super::script::{Counts, has_non_latin_word, non_latin_carries};

/// Characters of a state that are read as a whole, and of each of its lines.
const WINDOW: usize = 4000;
/// Objects and arrays inside one another; deeper text is not read.
const MAX_DEPTH: usize = 6;
/// Letters of a field in another script that make it a message.
const MESSAGE_LETTERS: usize = 10;
/// A shorter line can hold neither four words nor ten letters.
const MIN_LINE: usize = 7;

/// What was found out about a state.
#[derive(Clone, PartialEq, Debug)]
pub struct Detection {
    /// The dominant script: `latin`, `han`, ..., `other`, or `unknown` without letters.
    pub script: &'static str,
    /// The share of letters by script.
    pub script_profile: Vec<(&'static str, f64)>,
    /// The language of Latin text, where one could be named.
    pub language: Option<&'static str>,
    /// Whether nothing speaks against the English checkpoint.
    pub is_english: bool,
    /// No language could be named.
    pub language_undecided: bool,
    /// Letters that English does not use, by characters; four decimals.
    pub diacritic_rate: f64,
    /// Letters that are not Latin, by letters; four decimals.
    pub non_latin_fraction: f64,
    /// The line or field that is foreign in a state which reads as English.
    pub mixed_segment: Option<String>,
}

impl Detection {
    /// Reads a state: its strings, however nested, without the keys of objects.
    pub fn of(state: &Value) -> Self {
        let mut leaves = Vec::new();
        collect(state, 0, &mut leaves);
        let whole = Self::of_text(&window(&leaves));
        if !whole.is_english {
            return whole;
        }
        // The English part of a ticket (a stack trace, a template) may outvote the sentence that the question is about, and the English
        // checkpoint would be confident and wrong. So each line and each field is heard by itself.
        if whole.script == "latin"
            && (leaves.len() > 1 || leaves.iter().any(|l| l.contains('\n')))
            && let Some((language, segment)) = foreign_segment(&leaves)
        {
            return Detection {
                language: Some(language),
                is_english: false,
                language_undecided: false,
                mixed_segment: Some(segment),
                ..whole
            };
        }
        if state.is_string() || state.is_null() {
            return whole;
        }
        let mut best: Option<(usize, Detection)> = None;
        for leaf in &leaves {
            let Some(found) = foreign_value(leaf) else { continue };
            let letters = leaf.chars().take(WINDOW).filter(|c| is_letter(*c)).count();
            if best.as_ref().is_none_or(|(most, _)| letters > *most) {
                best = Some((letters, found));
            }
        }
        match best {
            Some((_, found)) => Detection {
                language: found.language,
                is_english: false,
                language_undecided: found.language_undecided,
                ..whole
            },
            None => whole,
        }
    }

    /// Reads one text as a whole.
    fn of_text(text: &[char]) -> Self {
        let counts = Counts::of(text);
        let non_latin_fraction = counts.non_latin_fraction();
        let carries = non_latin_carries(non_latin_fraction, letters(text));
        let mut script = counts.dominant();
        if script == "latin" && carries && has_non_latin_word(text) {
            script = counts.largest_other().map_or(script, |(name, _)| name);
        }
        let base = Detection {
            script,
            script_profile: counts.profile(),
            language: None,
            is_english: script == "unknown",
            language_undecided: true,
            diacritic_rate: 0.0,
            non_latin_fraction,
            mixed_segment: None,
        };
        if script != "latin" {
            return base;
        }
        let profile = LatinProfile::of(text);
        let mut language = profile.language;
        // Acronyms read as function words (`MON DES EST LA`). Text that another script carries is not English whatever they say.
        if let Some(foreign) = language.filter(|l| *l != "en" && !carries) {
            if is_shouted(text) {
                language = language.filter(|_| shouted_evidence(text, foreign, profile.foreign_letter_rate));
            } else if has_only_acronyms(text) {
                language = LatinProfile::of(&without_capital_runs(text)).language;
            }
        }
        Detection {
            language,
            is_english: language == Some("en") || language.is_none() && !profile.looks_foreign,
            language_undecided: language.is_none(),
            diacritic_rate: round4(profile.foreign_letter_rate),
            ..base
        }
    }

    /// The object of a routing decision.
    pub fn to_json(&self) -> Value {
        let profile: Map<String, Value> =
            self.script_profile.iter().map(|(name, share)| ((*name).to_owned(), json!(share))).collect();
        json!({
            "script": self.script,
            "script_profile": profile,
            "language": self.language,
            "is_english": self.is_english,
            "language_undecided": self.language_undecided,
            "diacritic_rate": self.diacritic_rate,
            "non_latin_fraction": self.non_latin_fraction,
            "mixed_segment": self.mixed_segment,
        })
    }
}

/// The strings of a state, in order.
fn collect<'a>(value: &'a Value, depth: usize, leaves: &mut Vec<&'a str>) {
    if depth > MAX_DEPTH {
        return;
    }
    match value {
        Value::String(text) => leaves.push(text),
        Value::Array(items) => items.iter().for_each(|v| collect(v, depth + 1, leaves)),
        Value::Object(fields) => fields.values().for_each(|v| collect(v, depth + 1, leaves)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// The beginning of all strings together, a space between each two.
fn window(leaves: &[&str]) -> Vec<char> {
    let mut text = Vec::new();
    for (i, leaf) in leaves.iter().enumerate() {
        if i > 0 {
            // The space must leave room for a character.
            if text.len() + 1 >= WINDOW {
                break;
            }
            text.push(' ');
        }
        text.extend(leaf.chars().take(WINDOW - text.len()));
    }
    text
}

fn letters(text: &[char]) -> usize {
    text.iter().filter(|c| is_letter(**c)).count()
}

fn is_blank(text: &[char]) -> bool {
    text.iter().all(|c| is_space(*c))
}

/// The first line of any string that is prose of another language, within the window.
fn foreign_segment(leaves: &[&str]) -> Option<(&'static str, String)> {
    let mut left = WINDOW;
    for line in leaves.iter().flat_map(|leaf| leaf.split('\n')) {
        if left == 0 {
            return None;
        }
        let line: Vec<char> = line.chars().take(left).collect();
        left -= line.len();
        if let Some(language) = language_of_prose(&line) {
            let text: String = line.into_iter().collect();
            return Some((language, text.trim_matches(is_space).to_owned()));
        }
    }
    None
}

/// The language, other than English, of a line of prose: two different words of it at least, apart from code, compounds and acronyms.
fn language_of_prose(line: &[char]) -> Option<&'static str> {
    if is_blank(line) || is_code(line) {
        return None;
    }
    let mut prose = without_compounds(line);
    let shouted = is_shouted(&prose);
    if !shouted {
        prose = without_capital_runs(&prose);
    }
    if words(&prose).count() < MIN_WORDS {
        return None;
    }
    let profile = LatinProfile::of(&prose);
    let language = profile.language.filter(|l| *l != "en")?;
    if shouted && !shouted_evidence(&prose, language, profile.foreign_letter_rate) {
        return None;
    }
    let (_, distinct) = evidence(lowered_words(&prose).iter().map(String::as_str), language);
    (distinct >= 2).then_some(language)
}

/// What a string is, if one of its lines is not for the English checkpoint; of several, the line with the most letters.
fn foreign_value(leaf: &str) -> Option<Detection> {
    let mut best: Option<(usize, Detection)> = None;
    for line in leaf.split('\n') {
        let line: Vec<char> = line.chars().take(WINDOW).collect();
        if line.len() < MIN_LINE || is_blank(&line) || is_code(&line) {
            continue;
        }
        let found = Detection::of_text(&line);
        if found.is_english {
            continue;
        }
        let count = letters(&line);
        let named = found.language.is_some_and(|l| l != "en") && language_of_prose(&line).is_some();
        // Without a name, a message must be more than a name or an accent: a one-word field must not pull a ticket along.
        let message = if found.script == "latin" {
            found.diacritic_rate >= FOREIGN_LETTER_RATE && words(&line).count() >= MIN_WORDS
        } else {
            has_non_latin_word(&line) && count >= MESSAGE_LETTERS
        };
        if (named || message) && best.as_ref().is_none_or(|(most, _)| count > *most) {
            best = Some((count, found));
        }
    }
    best.map(|(_, found)| found)
}
