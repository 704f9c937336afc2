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
        Value::String(s) => {
            let s = strip(s);
            let bytes = s.as_bytes();
            // Underscores are allowed between digits.
            let underscores = (0..bytes.len())
                .filter(|&i| bytes[i] == b'_')
                .all(|i| i > 0 && bytes[i - 1].is_ascii_digit() && bytes.get(i + 1).is_some_and(u8::is_ascii_digit));
            if underscores { s.replace('_', "").parse().ok() } else { None }
        }
        _ => None,
    }
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
