//! Classes of characters, as Python's `str` methods and regular expressions draw them.

use unicode_general_category::{GeneralCategory as Category, get_general_category};

/// A letter: Unicode category L*. Rust's `is_alphabetic` also takes marks and letter numbers.
pub fn is_letter(c: char) -> bool {
    if c.is_ascii() {
        return c.is_ascii_alphabetic();
    }
    matches!(
        get_general_category(c),
        Category::UppercaseLetter
            | Category::LowercaseLetter
            | Category::TitlecaseLetter
            | Category::ModifierLetter
            | Category::OtherLetter
    )
}

/// What a word is made of, `[^\W\d_]`: letters and numbers that are no decimal digits (`²`, `Ⅳ`).
pub fn is_word_letter(c: char) -> bool {
    is_letter(c) || !c.is_ascii() && matches!(get_general_category(c), Category::LetterNumber | Category::OtherNumber)
}

/// A letter or any number: `\w` without the underscore.
pub fn is_alphanumeric(c: char) -> bool {
    is_word_letter(c) || c.is_ascii_digit() || !c.is_ascii() && get_general_category(c) == Category::DecimalNumber
}

/// `\w`. Combining marks are not in it.
pub fn is_word_character(c: char) -> bool {
    c == '_' || is_alphanumeric(c)
}

/// `str.isspace`: Unicode white space and the four information separators.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `str.isupper`: at least one capital, and no lower-case or title-case letter.
pub fn is_upper(text: &[char]) -> bool {
    let title = |c: char| !c.is_ascii() && get_general_category(c) == Category::TitlecaseLetter;
    text.iter().any(|c| c.is_uppercase()) && !text.iter().any(|&c| c.is_lowercase() || title(c))
}

/// A combining mark: it belongs to the letter before it.
pub fn is_combining(c: char) -> bool {
    !c.is_ascii() && unicode_normalization::char::canonical_combining_class(c) != 0
}

/// Runs of word letters.
pub fn words(text: &[char]) -> impl Iterator<Item = &[char]> {
    text.split(|&c| !is_word_letter(c)).filter(|w| !w.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chars(text: &str) -> Vec<char> {
        text.chars().collect()
    }

    #[test]
    fn marks_are_no_letters_and_split_words() {
        assert!(is_letter('é') && is_letter('字') && is_letter('ʰ'));
        assert!(!is_letter('\u{301}') && !is_letter('1') && !is_letter('Ⅳ') && !is_letter('_'));
        let text = chars("naïve co\u{301}mo x²y Ⅳ 12ab_c");
        let found: Vec<String> = words(&text).map(|w| w.iter().collect()).collect();
        assert_eq!(found, ["naïve", "co", "mo", "x²y", "Ⅳ", "ab", "c"]);
    }

    #[test]
    fn capitals_are_judged_over_cased_letters_only() {
        assert!(is_upper(&chars("ABC")) && is_upper(&chars("A字")) && is_upper(&chars("É²")));
        assert!(!is_upper(&chars("Abc")) && !is_upper(&chars("字")) && !is_upper(&chars("ǅA")) && !is_upper(&[]));
    }

    #[test]
    fn separators_of_ascii_are_space() {
        assert!(is_space('\u{1c}') && is_space('\u{a0}') && is_space('\u{3000}') && !is_space('\u{200b}'));
    }
}
