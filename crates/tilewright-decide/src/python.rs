//! What Python's `repr`, `str`, `==`, `type().__name__` and `strip` say of JSON values: error messages, label texts and label equality depend on them.

use std::fmt::Write;

use serde_json::Value;
use unicode_general_category::{GeneralCategory as Category, get_general_category};

use crate::json::{PyNumber, Style, float_text, write_value};

/// `type(value).__name__`.
pub(crate) fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "NoneType",
        Value::Bool(_) => "bool",
        Value::Number(n) => match PyNumber::of(n) {
            PyNumber::Int(_) => "int",
            PyNumber::Float(_) => "float",
        },
        Value::String(_) => "str",
        Value::Array(_) => "list",
        Value::Object(_) => "dict",
    }
}

/// `repr(value)`.
pub(crate) fn repr(value: &Value) -> String {
    let mut out = String::new();
    write_value(&mut out, value, &Style { scalar: repr_scalar, string: repr_string });
    out
}

/// `repr(text)`.
pub(crate) fn repr_str(text: &str) -> String {
    let mut out = String::new();
    repr_string(&mut out, text);
    out
}

/// `str(label)` of a scalar.
pub(crate) fn label_text(label: &Value) -> String {
    match label {
        Value::String(s) => s.clone(),
        other => repr(other),
    }
}

fn repr_scalar(out: &mut String, value: &Value) {
    match value {
        Value::Bool(b) => out.push_str(if *b { "True" } else { "False" }),
        Value::Number(n) => match PyNumber::of(n) {
            PyNumber::Int(digits) => out.push_str(&digits),
            PyNumber::Float(x) => out.push_str(&float_text(x)),
        },
        Value::String(s) => repr_string(out, s),
        _ => out.push_str("None"),
    }
}

fn repr_string(out: &mut String, s: &str) {
    let quote = if s.contains('\'') && !s.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in s.chars() {
        let code = c as u32;
        let _ = match c {
            '\\' => write!(out, "\\\\"),
            '\n' => write!(out, "\\n"),
            '\r' => write!(out, "\\r"),
            '\t' => write!(out, "\\t"),
            c if c == quote => write!(out, "\\{c}"),
            c if is_printable(c) => write!(out, "{c}"),
            _ if code < 0x100 => write!(out, "\\x{code:02x}"),
            _ if code < 0x10000 => write!(out, "\\u{code:04x}"),
            _ => write!(out, "\\U{code:08x}"),
        };
    }
    out.push(quote);
}

/// `str.isprintable` of one character.
fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return (' '..='~').contains(&c);
    }
    !matches!(
        get_general_category(c),
        Category::Control
            | Category::Format
            | Category::Surrogate
            | Category::PrivateUse
            | Category::Unassigned
            | Category::LineSeparator
            | Category::ParagraphSeparator
            | Category::SpaceSeparator
    )
}

/// What `strip` removes: Unicode white space and the four separators of ASCII.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `text.strip()`.
pub(crate) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// A key that is equal for two labels exactly if Python calls the labels equal: 1, 1.0 and true are one.
#[derive(PartialEq, Eq, Hash, Debug)]
pub(crate) enum LabelKey {
    Text(String),
    Integer(String),
    Fraction(u64),
    Other,
}

impl LabelKey {
    pub(crate) fn of(label: &Value) -> Self {
        match label {
            Value::String(s) => LabelKey::Text(s.clone()),
            Value::Bool(b) => LabelKey::Integer(u8::from(*b).to_string()),
            Value::Number(n) => match PyNumber::of(n) {
                PyNumber::Int(digits) => LabelKey::Integer(digits),
                // Rust writes every digit of an integral float, which is what Python compares.
                PyNumber::Float(0.0) => LabelKey::Integer("0".into()),
                PyNumber::Float(x) if x.is_finite() && x.fract() == 0.0 => LabelKey::Integer(format!("{x:.0}")),
                PyNumber::Float(x) => LabelKey::Fraction(x.to_bits()),
            },
            _ => LabelKey::Other,
        }
    }
}

/// `float(value)` where that is a number at all: numbers, and strings that spell one.
pub(crate) fn to_float(value: &Value) -> Option<f64> {
    match value {
        Value::Number(n) => Some(PyNumber::of(n).as_f64()),
        Value::String(s) => number_text(s)?.parse().ok(),
        _ => None,
    }
}

/// A number's text without the space around it and without underscores, which may stand between digits.
pub(crate) fn number_text(text: &str) -> Option<String> {
    let text = strip(text);
    let bytes = text.as_bytes();
    let is_digit = |i: usize| bytes.get(i).is_some_and(u8::is_ascii_digit);
    let mut underscores = (0..bytes.len()).filter(|&i| bytes[i] == b'_');
    underscores.all(|i| i > 0 && is_digit(i - 1) && is_digit(i + 1)).then(|| text.replace('_', ""))
}

/// `'%g' % x`: six significant digits, no trailing zeros.
pub(crate) fn general(x: f64) -> String {
    if !x.is_finite() {
        return float_text(x);
    }
    let scientific = format!("{x:.5e}");
    let (mantissa, exponent) = scientific.split_once('e').expect("`{:e}` writes an exponent");
    let exponent: i32 = exponent.parse().expect("`{:e}` writes a decimal exponent");
    let trim =
        |s: &str| if s.contains('.') { s.trim_end_matches('0').trim_end_matches('.').to_owned() } else { s.to_owned() };
    if x != 0.0 && !(-4..6).contains(&exponent) {
        return format!("{}e{}{:02}", trim(mantissa), if exponent < 0 { '-' } else { '+' }, exponent.abs());
    }
    trim(&format!("{x:.*}", (5 - exponent).max(0) as usize))
}

/// `not value`: null, false, zero, nothing in it.
pub(crate) fn is_falsy(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(n) => PyNumber::of(n).as_f64() == 0.0,
        Value::String(s) => s.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => members.is_empty(),
        Value::Bool(true) => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn repr_quotes_and_escapes_as_python_does() {
        for (text, expected) in [
            ("a", "'a'"),
            ("it's", "\"it's\""),
            ("it's \"q\"", "'it\\'s \"q\"'"),
            ("\\ \n\r\t", "'\\\\ \\n\\r\\t'"),
            ("\u{0}\u{1f}\u{7f}\u{a0}", "'\\x00\\x1f\\x7f\\xa0'"),
            ("\u{200b}\u{2028}\u{3000}\u{ad}", "'\\u200b\\u2028\\u3000\\xad'"),
            ("é😀\u{301}", "'é😀\u{301}'"),
            ("\u{e0001}", "'\\U000e0001'"),
        ] {
            assert_eq!(repr_str(text), expected);
        }
        assert_eq!(
            repr(&json!({"k": [1, 2.0, null, true, "x"], "e": {}})),
            "{'k': [1, 2.0, None, True, 'x'], 'e': {}}"
        );
    }

    #[test]
    fn labels_are_equal_where_python_says_so() {
        let key = |text: &str| LabelKey::of(&serde_json::from_str(text).unwrap());
        for (a, b) in
            [("1", "1.0"), ("1", "true"), ("0", "false"), ("0", "-0.0"), ("-0", "0"), ("1e2", "100"), ("2.5", "25e-1")]
        {
            assert_eq!(key(a), key(b), "{a} {b}");
        }
        for (a, b) in [
            ("1", "\"1\""),
            ("1", "2"),
            ("9007199254740993", "9007199254740992.0"),
            ("0.1", "0.2"),
            ("true", "\"true\""),
        ] {
            assert_ne!(key(a), key(b), "{a} {b}");
        }
        assert_eq!(key("1e22"), key("10000000000000000000000"));
    }

    #[test]
    fn strings_that_spell_a_number_are_floats() {
        for (text, expected) in [
            ("1.5", Some(1.5)),
            (" 2_0.0\n", Some(20.0)),
            ("-.5", Some(-0.5)),
            ("1__0", None),
            ("_1", None),
            ("0x1", None),
            ("", None),
        ] {
            assert_eq!(to_float(&json!(text)), expected, "{text:?}");
        }
        assert_eq!(to_float(&json!(true)), None);
    }

    #[test]
    fn general_shows_six_digits() {
        for (x, expected) in
            [(0.5, "0.5"), (5.0, "5"), (1.23456789, "1.23457"), (1e-5, "1e-05"), (1234567.0, "1.23457e+06"), (0.0, "0")]
        {
            assert_eq!(general(x), expected);
        }
    }

    #[test]
    fn strip_removes_what_python_calls_space() {
        assert_eq!(strip("\u{1c}\u{85}\u{a0}\u{2003} a \t\u{1f}"), "a");
        assert_eq!(strip("\u{200b}"), "\u{200b}");
    }
}
