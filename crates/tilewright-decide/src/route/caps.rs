//! Capitals and code: what looks like words of a language without being prose.

use super::chars::{is_alphanumeric, is_space, is_upper, is_word_character, words};
use super::language::{FOREIGN_LETTER_RATE, evidence};

/// On a line of capitals only, a word has at least that many letters; fewer may be an acronym.
const MIN_WORD: usize = 5;
/// ...and a function word that counts has that many: `LOS`, `LAS`, `EL` are parts of American addresses.
const MIN_FUNCTION_WORD: usize = 4;

/// Capitals, and no lower-case letter: an acronym, a list of them, or somebody who shouts.
pub fn is_shouted(text: &[char]) -> bool {
    text.iter().any(|c| c.is_uppercase()) && !text.iter().any(|c| c.is_lowercase())
}

/// Whether shouted text says more for `language` than acronyms do.
pub fn shouted_evidence(text: &[char], language: &str, foreign_letter_rate: f64) -> bool {
    words(text).any(|w| w.len() >= MIN_WORD)
        && (foreign_letter_rate >= FOREIGN_LETTER_RATE
            || evidence(lowered_words(text).iter().map(String::as_str), language).0 >= MIN_FUNCTION_WORD)
}

/// The words of a text, each lower-cased by itself.
pub fn lowered_words(text: &[char]) -> Vec<String> {
    words(text).map(|w| w.iter().collect::<String>().to_lowercase()).collect()
}

/// Runs of two or more capitals.
fn capital_runs(text: &[char]) -> impl Iterator<Item = &[char]> {
    words(text).filter(|w| w.len() >= 2 && is_upper(w))
}

/// The text with each run of capitals replaced by a space.
pub fn without_capital_runs(text: &[char]) -> Vec<char> {
    let mut out = Vec::with_capacity(text.len());
    let mut from = 0;
    for run in capital_runs(text) {
        // `run` is a part of `text`.
        let start = (run.as_ptr() as usize - text.as_ptr() as usize) / size_of::<char>();
        out.extend_from_slice(&text[from..start]);
        out.push(' ');
        from = start + run.len();
    }
    out.extend_from_slice(&text[from..]);
    out
}

/// Whether there are runs of capitals and all are short enough for acronyms. A longer one is a stressed word of its sentence.
pub fn has_only_acronyms(text: &[char]) -> bool {
    let mut runs = capital_runs(text).peekable();
    runs.peek().is_some() && runs.all(|run| run.len() < MIN_WORD)
}

/// A line of a program: it holds `=`, `;`, braces, brackets or a call.
pub fn is_code(line: &[char]) -> bool {
    line.iter().any(|c| "=;{}[]".contains(*c)) || line.windows(2).any(|w| w[1] == '(' && is_word_character(w[0]))
}

/// The tokens between white space, joined by spaces, without paths and compounds (`Nav/Com`, `os.path`): a letter or digit on both sides of
/// `.`, `_`, `/` or `\`.
pub fn without_compounds(line: &[char]) -> Vec<char> {
    let joined = |token: &&[char]| {
        token.windows(3).any(|w| "._/\\".contains(w[1]) && is_alphanumeric(w[0]) && is_alphanumeric(w[2]))
    };
    let tokens = line.split(|c| is_space(*c)).filter(|t| !t.is_empty());
    tokens.filter(|t| !joined(t)).collect::<Vec<_>>().join(&' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chars(text: &str) -> Vec<char> {
        text.chars().collect()
    }

    fn string(text: Vec<char>) -> String {
        text.into_iter().collect()
    }

    #[test]
    fn runs_of_capitals_are_blanked_and_single_ones_kept() {
        assert_eq!(string(without_capital_runs(&chars("A MON b DES2 É ÉS Ab"))), "A   b  2 É   Ab");
        assert_eq!(string(without_capital_runs(&chars("none"))), "none");
    }

    #[test]
    fn five_capitals_are_a_word_and_four_an_acronym() {
        assert!(has_only_acronyms(&chars("the HTTP API")) && !has_only_acronyms(&chars("the HTTPS API")));
        assert!(!has_only_acronyms(&chars("nothing here")), "no run at all");
    }

    #[test]
    fn shouting_needs_a_long_function_word_and_a_long_word() {
        assert!(!shouted_evidence(&chars("STORES LOS ANGELES LAS VEGAS EL PASO CLOSED"), "es", 0.0));
        assert!(shouted_evidence(&chars("QUIERO CANCELAR PERO NO PUEDO"), "es", 0.0));
        assert!(!shouted_evidence(&chars("PERO ES UN DIA"), "es", 0.0), "no word of five letters");
        assert!(shouted_evidence(&chars("WIE SPÄT IST ES IN KÖLN HEUT ABEND"), "de", 0.05));
    }

    #[test]
    fn caseless_text_does_not_shout() {
        assert!(!is_shouted(&chars("支付失败")) && is_shouted(&chars("支付 OK")) && !is_shouted(&chars("Ok")));
    }

    #[test]
    fn code_is_told_from_prose_with_brackets_after_a_space() {
        for code in ["x = 1", "round(el, 2)", "a[0]", "end;", "{"] {
            assert!(is_code(&chars(code)), "{code}");
        }
        assert!(!is_code(&chars("Deu erro (500) no login")));
    }

    #[test]
    fn compounds_are_dropped_whole() {
        assert_eq!(string(without_compounds(&chars(" Nav/Com  C:\\DOS\\mode a_b  end. -/x "))), "end. -/x");
    }
}
