//! Which scripts a text is written in.

use super::chars::{is_combining, is_letter};
use super::tables::SCRIPTS;

/// A Latin-plurality text belongs to its other script if that many of its letters are not Latin...
const LARGE_SHARE: f64 = 0.2;
/// ...or that many, where they make a sentence. A brand name or an order code outvotes the characters around it letter for letter.
const SMALL_SHARE: f64 = 0.1;
const SENTENCE_LETTERS: f64 = 10.0;

/// The script that a range claims the character for.
fn named(c: char) -> Option<&'static str> {
    let code = c as u32;
    let after = SCRIPTS.partition_point(|(low, _, _)| *low <= code);
    let (_, high, name) = SCRIPTS.get(after.checked_sub(1)?)?;
    (code <= *high).then_some(name)
}

fn is_latin(c: char) -> bool {
    // Latin with the phonetic extensions, additional Latin, full-width forms.
    matches!(c as u32, 0..0x02b0 | 0x1e00..=0x1eff | 0xff21..=0xff3a | 0xff41..=0xff5a)
}

/// Letters by script.
pub struct Counts {
    latin: usize,
    /// In order of first appearance; letters that no range claims are `other`.
    rest: Vec<(&'static str, usize)>,
}

impl Counts {
    /// Counts the letters of a text.
    pub fn of(text: &[char]) -> Self {
        let mut counts = Counts { latin: 0, rest: Vec::new() };
        for &c in text.iter().filter(|c| is_letter(**c)) {
            if is_latin(c) {
                counts.latin += 1;
                continue;
            }
            let name = named(c).unwrap_or("other");
            match counts.rest.iter_mut().find(|(n, _)| *n == name) {
                Some((_, n)) => *n += 1,
                None => counts.rest.push((name, 1)),
            }
        }
        counts
    }

    fn total(&self) -> usize {
        self.latin + self.rest.iter().map(|(_, n)| n).sum::<usize>()
    }

    /// The commonest script other than Latin; the first to appear among equals.
    pub fn largest_other(&self) -> Option<(&'static str, usize)> {
        self.rest.iter().copied().reduce(|best, next| if next.1 > best.1 { next } else { best })
    }

    /// The commonest script, `unknown` without letters. Latin loses a tie.
    pub fn dominant(&self) -> &'static str {
        match self.largest_other() {
            Some((name, n)) if n >= self.latin => name,
            _ if self.latin > 0 => "latin",
            _ => "unknown",
        }
    }

    /// The share of each script that occurs, Latin first.
    pub fn profile(&self) -> Vec<(&'static str, f64)> {
        let total = self.total() as f64;
        let latin = (self.latin > 0).then_some(("latin", self.latin));
        latin.iter().chain(&self.rest).map(|(name, n)| (*name, *n as f64 / total)).collect()
    }

    /// The share of letters that are not Latin, to four decimals.
    pub fn non_latin_fraction(&self) -> f64 {
        match self.total() {
            0 => 0.0,
            total => super::round4(1.0 - self.latin as f64 / total as f64),
        }
    }
}

/// Whether the non-Latin letters of a Latin-plurality text are enough to carry it. `letters` counts all letters of the text.
pub fn non_latin_carries(fraction: f64, letters: usize) -> bool {
    let count = (fraction * letters as f64).round_ties_even();
    fraction >= LARGE_SHARE || fraction >= SMALL_SHARE && count >= SENTENCE_LETTERS
}

/// Whether there is a run of two or more letters of one named script that does not begin with a capital: a word of a message rather than a
/// symbol (`α`), a name (`Дмитрий`) or a pronunciation, which English prose holds too.
pub fn has_non_latin_word(text: &[char]) -> bool {
    let mut run: Option<(&str, char, usize)> = None;
    let is_word = |run: Option<(&str, char, usize)>| run.is_some_and(|(_, first, n)| n >= 2 && !first.is_uppercase());
    for &c in text.iter().filter(|c| !is_combining(**c)) {
        let script = if is_latin(c) { None } else { named(c) };
        run = match (run, script) {
            (Some((name, first, n)), Some(script)) if name == script => Some((name, first, n + 1)),
            (before, script) => {
                if is_word(before) {
                    return true;
                }
                script.map(|script| (script, c, 1))
            }
        };
    }
    is_word(run)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(text: &str) -> Counts {
        Counts::of(&text.chars().collect::<Vec<_>>())
    }

    fn has_word(text: &str) -> bool {
        has_non_latin_word(&text.chars().collect::<Vec<_>>())
    }

    #[test]
    fn ranges_ascend_and_do_not_overlap() {
        for pair in SCRIPTS.windows(2) {
            assert!(pair[0].0 <= pair[0].1 && pair[0].1 < pair[1].0, "{pair:?}");
        }
    }

    #[test]
    fn a_named_script_wins_a_tie_against_latin_and_the_first_one_a_tie_among_others() {
        assert_eq!(counts("abяю").dominant(), "cyrillic");
        assert_eq!(counts("abcяю").dominant(), "latin");
        assert_eq!(counts("яюαβ").dominant(), "cyrillic");
        assert_eq!(counts("αβяю").dominant(), "greek");
        assert_eq!(counts("12 ,;").dominant(), "unknown");
    }

    #[test]
    fn letters_of_unlisted_scripts_count_as_other() {
        assert_eq!(counts("ᎠᎡ").profile(), [("other", 1.0)], "Cherokee");
        assert_eq!(counts("abcᎠ").profile(), [("latin", 0.75), ("other", 0.25)]);
    }

    #[test]
    fn shares_are_of_letters_and_marks_are_none() {
        // Seven code points, of which three are vowel signs or viramas.
        assert_eq!(counts("हिन्दी").profile(), [("devanagari", 1.0)]);
        assert_eq!(counts("a हिन्दी").non_latin_fraction(), 0.75);
        assert_eq!(counts("ab я").non_latin_fraction(), 0.3333);
    }

    #[test]
    fn symbols_names_and_pronunciations_are_no_words() {
        assert!(!has_word("Set α to 0.05") && !has_word("Дмитрий Савицкий") && !has_word("[vlɐˈdʲimʲɪr]"));
        assert!(has_word("hello мир") && has_word("支付") && has_word("это"));
        assert!(!has_word("Влади\u{301}мир"), "a mark does not split the name");
    }

    #[test]
    fn scripts_split_runs() {
        assert!(!has_word("α字"), "two scripts of one letter each");
    }

    #[test]
    fn a_small_share_carries_only_a_sentence() {
        assert!(non_latin_carries(0.2, 5) && !non_latin_carries(0.19, 40) && non_latin_carries(0.1, 100));
        assert!(!non_latin_carries(0.1, 90) && !non_latin_carries(0.05, 1000));
        assert!(non_latin_carries(0.1, 95) && !non_latin_carries(0.1, 94), "9.5 rounds to the even 10");
    }
}
