//! JSON values as the prompts need them: exactly the text of Python's `json.dumps(value, ensure_ascii=False)`.
//!
//! The model was trained on that text, so a different space or exponent is a different input. Nothing here recurses: a value that was built in code
//! may be nested deeper than any parser allows.

use std::fmt::Write;

use serde_json::{Number, Value};

/// A JSON number the way Python reads it.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum PyNumber {
    /// Digits of any length, without a sign on zero.
    Int(String),
    /// Infinite if the text exceeds the range of f64.
    Float(f64),
}

impl PyNumber {
    pub(crate) fn of(number: &Number) -> Self {
        let text = number.as_str();
        if text.contains(['.', 'e', 'E']) {
            // Every text that a JSON number can hold is a number to `parse`.
            return PyNumber::Float(text.parse().unwrap_or(f64::NAN));
        }
        PyNumber::Int(if text == "-0" { "0".into() } else { text.into() })
    }

    /// Python's `float(number)`; infinite where that overflows.
    pub(crate) fn as_f64(&self) -> f64 {
        match self {
            PyNumber::Int(digits) => digits.parse().unwrap_or(f64::NAN),
            PyNumber::Float(x) => *x,
        }
    }
}

/// The integer of a JSON number that has no fraction and no exponent and fits.
pub(crate) fn as_int(value: &Value) -> Option<i64> {
    match value {
        Value::Number(n) => match PyNumber::of(n) {
            PyNumber::Int(digits) => digits.parse().ok(),
            PyNumber::Float(_) => None,
        },
        _ => None,
    }
}

/// A float as Python prints it: the shortest digits that read back, `.0` when integral, an exponent below 1e-4 and from 1e16 on.
pub fn float_text(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let text = format!("{x:e}");
    let (mantissa, exponent) = text.split_once('e').expect("`{:e}` writes an exponent");
    let exponent: i32 = exponent.parse().expect("`{:e}` writes a decimal exponent");
    let (sign, mantissa) = match mantissa.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", mantissa),
    };
    let digits: String = mantissa.chars().filter(|c| *c != '.').collect();
    let mut out = String::from(sign);
    if !(-4..16).contains(&exponent) {
        out.push_str(&digits[..1]);
        if digits.len() > 1 {
            out.push('.');
            out.push_str(&digits[1..]);
        }
        let _ = write!(out, "e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs());
    } else if exponent < 0 {
        out.push_str("0.");
        out.extend(std::iter::repeat_n('0', (-exponent - 1) as usize));
        out.push_str(&digits);
    } else {
        let whole = exponent as usize + 1;
        if digits.len() <= whole {
            out.push_str(&digits);
            out.extend(std::iter::repeat_n('0', whole - digits.len()));
            out.push_str(".0");
        } else {
            out.push_str(&digits[..whole]);
            out.push('.');
            out.push_str(&digits[whole..]);
        }
    }
    out
}

/// A finite float as a JSON value that prints as Python prints it; null otherwise.
pub fn float(x: f64) -> Value {
    if x.is_finite() { float_text(x).parse().map_or(Value::Null, Value::Number) } else { Value::Null }
}

/// `x` rounded to four decimals, correctly and with ties to even on the exact binary value.
pub fn round4(x: f64) -> f64 {
    format!("{x:.4}").parse().unwrap_or(x)
}

/// The text of `value`, as `json.dumps(value, ensure_ascii=False)` writes it.
pub fn json_text(value: &Value) -> String {
    let mut out = String::new();
    write_value(&mut out, value, &Style { scalar: json_scalar, string: json_string });
    out
}

/// How a document of lists and objects is written; JSON and Python's `repr` differ in the leaves only.
pub(crate) struct Style {
    pub(crate) scalar: fn(&mut String, &Value),
    pub(crate) string: fn(&mut String, &str),
}

/// A list or object that is being written.
enum Open<'a> {
    List(std::slice::Iter<'a, Value>),
    Object(serde_json::map::Iter<'a>),
}

/// Writes nested values with a stack of its own.
pub(crate) fn write_value(out: &mut String, value: &Value, style: &Style) {
    let mut stack: Vec<Open> = Vec::new();
    let mut next = Some(value);
    loop {
        let opened = match next.take() {
            Some(Value::Array(items)) => {
                out.push('[');
                stack.push(Open::List(items.iter()));
                true
            }
            Some(Value::Object(map)) => {
                out.push('{');
                stack.push(Open::Object(map.iter()));
                true
            }
            Some(leaf) => {
                (style.scalar)(out, leaf);
                false
            }
            None => false,
        };
        let Some(top) = stack.last_mut() else { return };
        let comma = if opened { "" } else { ", " };
        match top {
            Open::List(items) => next = items.next().inspect(|_| out.push_str(comma)),
            Open::Object(members) => {
                if let Some((key, member)) = members.next() {
                    out.push_str(comma);
                    (style.string)(out, key);
                    out.push_str(": ");
                    next = Some(member);
                }
            }
        }
        if next.is_none() {
            out.push(if matches!(top, Open::List(_)) { ']' } else { '}' });
            stack.pop();
            if stack.is_empty() {
                return;
            }
        }
    }
}

fn json_scalar(out: &mut String, value: &Value) {
    match value {
        Value::Bool(b) => out.push_str(if *b { "true" } else { "false" }),
        Value::Number(n) => out.push_str(&number_key(n)),
        Value::String(s) => json_string(out, s),
        _ => out.push_str("null"),
    }
}

/// A number as Python's `json.dumps` spells it, also as an object key.
pub(crate) fn number_key(number: &Number) -> String {
    match PyNumber::of(number) {
        PyNumber::Int(digits) => digits,
        PyNumber::Float(x) if x.is_infinite() => if x > 0.0 { "Infinity" } else { "-Infinity" }.into(),
        PyNumber::Float(x) => float_text(x),
    }
}

fn json_string(out: &mut String, s: &str) {
    out.push('"');
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// A string as it is; anything else as its JSON text.
pub(crate) fn plain_text(value: &Value) -> String {
    match value {
        Value::String(s) => s.clone(),
        other => json_text(other),
    }
}
