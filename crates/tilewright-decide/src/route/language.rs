//! The language of text in Latin letters, by its function words and its accented letters.

use std::collections::HashMap;
use std::sync::LazyLock;

use super::chars::{is_word_character, words};
use super::tables::{ENGLISH_LOOKALIKES, FOREIGN_LETTERS, LANGUAGES, NORDIC_OVERLAP, SHORT_SWEDISH};

/// From this share of accented letters on, text counts as not English.
pub const FOREIGN_LETTER_RATE: f64 = 0.02;
/// One loanword in a short sentence exceeds the share above; English words may outvote it below this one.
const RESCUE_RATE: f64 = 0.06;
/// Fewer words decide nothing.
pub const MIN_WORDS: usize = 4;

/// English is bit 0, as it is the first of the languages.
const ENGLISH: u16 = 1;

/// What the tables say of a word.
#[derive(Clone, Copy, Default)]
struct Entry {
    /// The languages that list it, one bit each.
    languages: u16,
    nordic: bool,
    short_swedish: bool,
    lookalike: bool,
}

impl Entry {
    /// Claimed by more than one language: it may not name one on its own.
    fn is_shared(self) -> bool {
        self.nordic || self.languages.count_ones() > 1
    }

    fn is_english_only(self) -> bool {
        self.languages == ENGLISH && !self.nordic
    }
}

static ENTRIES: LazyLock<HashMap<&'static str, Entry>> = LazyLock::new(|| {
    let mut entries: HashMap<&str, Entry> = HashMap::new();
    let mut mark = |list: &'static str, set: &dyn Fn(&mut Entry)| {
        list.split(' ').for_each(|word| set(entries.entry(word).or_default()));
    };
    for (i, language) in LANGUAGES.iter().enumerate() {
        mark(language.words, &|e| e.languages |= 1 << i);
    }
    mark(NORDIC_OVERLAP, &|e| e.nordic = true);
    mark(SHORT_SWEDISH, &|e| e.short_swedish = true);
    mark(ENGLISH_LOOKALIKES, &|e| e.lookalike = true);
    entries
});

fn entry(word: &str) -> Entry {
    ENTRIES.get(word).copied().unwrap_or_default()
}

/// The longest and the number of distinct words, among `words` (lower case), that the list of a language holds.
pub fn evidence<'a>(words: impl Iterator<Item = &'a str>, language: &str) -> (usize, usize) {
    let Some(bit) = LANGUAGES.iter().position(|l| l.code == language) else { return (0, 0) };
    let mut hits: Vec<&str> = words.filter(|w| entry(w).languages & 1 << bit != 0).collect();
    hits.sort_unstable();
    hits.dedup();
    (hits.iter().map(|w| w.chars().count()).max().unwrap_or(0), hits.len())
}

pub fn is_foreign_letter(c: char) -> bool {
    !c.is_ascii() && FOREIGN_LETTERS.contains(c)
}

/// What Latin text says of its language.
pub struct LatinProfile {
    /// The language, if one can be named.
    pub language: Option<&'static str>,
    /// Accented letters by characters.
    pub foreign_letter_rate: f64,
    /// Not English, although no language may be named.
    pub looks_foreign: bool,
}

impl LatinProfile {
    /// Reads a text.
    pub fn of(text: &[char]) -> Self {
        let prose: String = without_identifiers(text).into_iter().map(|c| if c == 'İ' { 'i' } else { c }).collect();
        let lowered: Vec<char> = prose.to_lowercase().chars().collect();
        let words: Vec<String> = words(&lowered).map(|w| w.iter().collect()).collect();
        let foreign_letter_rate = foreign_letter_rate(text);
        let many_foreign_letters = foreign_letter_rate >= FOREIGN_LETTER_RATE;
        let profile = |language, looks_foreign| LatinProfile { language, foreign_letter_rate, looks_foreign };

        let entries: Vec<Entry> = words.iter().map(|w| entry(w)).collect();
        // Danish and Norwegian have no list; these words say at least that the text is not English.
        let nordic = entries.iter().any(|e| e.nordic) && !entries.iter().any(|e| e.is_english_only());
        if words.len() < MIN_WORDS {
            if words.len() > 1 && entries.iter().any(|e| e.short_swedish) {
                return profile(Some("sv"), many_foreign_letters);
            }
            return profile(None, many_foreign_letters || nordic);
        }
        let language = name(&words, &entries, foreign_letter_rate);
        profile(language, many_foreign_letters || language.is_none() && nordic)
    }
}

/// The language that the words name.
fn name(words: &[String], entries: &[Entry], rate: f64) -> Option<&'static str> {
    let mut distinct: Vec<(&str, Entry, usize)> = Vec::new();
    let mut seen: HashMap<&str, usize> = HashMap::new();
    for (word, entry) in words.iter().zip(entries) {
        let at = *seen.entry(word).or_insert(distinct.len());
        match distinct.get_mut(at) {
            Some((_, _, n)) => *n += 1,
            None => distinct.push((word, *entry, 1)),
        }
    }
    let mut scores = [0; LANGUAGES.len()];
    // Languages with a word of their own; the others stay unnamed, however many shared words they score with.
    let mut own = 0;
    for (_, entry, n) in &distinct {
        for (i, score) in scores.iter_mut().enumerate() {
            if entry.languages & 1 << i != 0 {
                *score += if entry.lookalike { 1 } else { *n };
            }
        }
        if !entry.is_shared() {
            own |= entry.languages;
        }
    }
    let english = scores[0];
    let candidates = (1..LANGUAGES.len()).filter(|i| own & 1 << i != 0);
    let best = candidates.map(|i| (i, scores[i])).reduce(|best, next| if next.1 > best.1 { next } else { best });
    let many_foreign_letters = rate >= FOREIGN_LETTER_RATE;
    if let Some((i, score)) = best {
        let code = LANGUAGES[i].code;
        let has = |word: &str| seen.contains_key(word);
        // `kan inte logga in`: the phrase is Swedish, its last word reads as English.
        let swedish_phrase = code == "sv"
            && has("inte")
            && has("kan")
            && ["kan", "jag", "vi"].contains(&words[0].as_str())
            && english <= 1;
        if score >= 2.max(english + 2) || swedish_phrase || many_foreign_letters && score >= 2.max(english) {
            return Some(code);
        }
    }
    let rescued = || {
        let own_words = distinct.iter().filter(|(_, e, _)| e.is_english_only()).count();
        let accented = distinct.iter().filter(|(w, _, _)| w.chars().any(is_foreign_letter)).count();
        rate < RESCUE_RATE && own_words >= 2 && accented <= 1
    };
    (english > 0 && (!many_foreign_letters || rescued())).then_some("en")
}

/// Accented letters by characters, both after lower-casing.
fn foreign_letter_rate(text: &[char]) -> f64 {
    let lowered = text.iter().collect::<String>().to_lowercase();
    let foreign = lowered.chars().filter(|c| is_foreign_letter(*c)).count();
    foreign as f64 / lowered.chars().count().max(1) as f64
}

/// The text with addresses, domains and versions replaced by a space: word characters and hyphens joined by `.` or `@`. Their parts read as
/// function words (`com` is Portuguese).
fn without_identifiers(text: &[char]) -> Vec<char> {
    let inside = |i: usize| text.get(i).is_some_and(|&c| c == '-' || is_word_character(c));
    let run = |from: usize| (from..).find(|&i| !inside(i)).expect("a text ends");
    let mut out = Vec::with_capacity(text.len());
    let mut i = 0;
    while i < text.len() {
        let start = run(i);
        let mut end = start;
        while text.get(end).is_some_and(|c| matches!(c, '.' | '@')) && inside(end + 1) {
            end = run(end + 1);
        }
        if end > start {
            out.push(' ');
            i = end;
        } else {
            // Nothing joins here: keep the run and the character after it.
            let next = (start + 1).min(text.len());
            out.extend_from_slice(&text[i..next]);
            i = next;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn language(text: &str) -> Option<&'static str> {
        LatinProfile::of(&text.chars().collect::<Vec<_>>()).language
    }

    fn stripped(text: &str) -> String {
        without_identifiers(&text.chars().collect::<Vec<_>>()).into_iter().collect()
    }

    #[test]
    fn identifiers_become_a_space_and_prose_keeps_its_full_stops() {
        assert_eq!(stripped("mail a-b@acme.com or U.S.A. now."), "mail   or  . now.");
        assert_eq!(stripped(".env a..b x.@y end"), "  a.  x.  end", "a joiner may lead, if no word stands before it");
        assert_eq!(stripped("v1.2.3"), " ");
        assert_eq!(stripped("a. b"), "a. b");
        assert_eq!(stripped(""), "");
    }

    #[test]
    fn no_word_stands_in_two_lists_of_one_language_or_has_capitals() {
        for l in LANGUAGES {
            let words: Vec<&str> = l.words.split(' ').collect();
            assert!(words.windows(2).all(|w| w[0] < w[1]), "{}: sorted, no repeats", l.code);
            assert!(words.iter().all(|w| w.to_lowercase() == *w && !w.is_empty()), "{}", l.code);
        }
    }

    #[test]
    fn languages_are_named_by_words_of_their_own() {
        for (text, want) in [
            ("the card is not with me", Some("en")),
            ("der kunde ist nicht da", Some("de")),
            ("je voudrais annuler mon abonnement merci", Some("fr")),
            ("amar taka ekhono ferot pabo kobe", Some("bn")),
            ("sifariş üçün pul çox gec gəldi", Some("az")),
            ("la o un e", None),
            ("refund me", None),
        ] {
            assert_eq!(language(text), want, "{text}");
        }
    }

    #[test]
    fn a_repeated_lookalike_counts_once() {
        assert_eq!(language("more care less care than care"), Some("en"));
    }

    #[test]
    fn two_or_three_swedish_words_are_enough_and_one_is_not() {
        assert_eq!(language("glömt lösenord"), Some("sv"));
        assert_eq!(language("lösenord"), None);
        assert_eq!(language("kan inte logga in"), Some("sv"));
    }

    #[test]
    fn one_loanword_does_not_leave_english_and_two_do() {
        assert_eq!(language("we went to the café"), Some("en"));
        assert_eq!(language("we sent the résumé to José"), None);
    }

    #[test]
    fn an_identifier_of_any_length_is_read_in_linear_time() {
        let text: Vec<char> = "a".repeat(4000).chars().collect();
        assert_eq!(without_identifiers(&text).len(), 4000);
        assert!(LatinProfile::of(&text).language.is_none());
    }
}
