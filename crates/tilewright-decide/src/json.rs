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
    let mut text = format!("{x:e}");
    let decimals = text.find('e').unwrap_or(0).saturating_sub(2 + usize::from(x < 0.0));
    // Of two shortest texts that are equally near, Python takes the even one, as this rounding does.
    let nearest = format!("{x:.decimals$e}");
    if nearest.parse() == Ok(x) {
        text = nearest;
    }
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

/// A label as Python writes it back: 1e16 is 1e+16.
pub(crate) fn canonical(label: &Value) -> Value {
    match label {
        Value::Number(n) => match PyNumber::of(n) {
            PyNumber::Int(digits) => digits.parse().map_or_else(|_| label.clone(), Value::Number),
            PyNumber::Float(x) if x.is_finite() => float(x),
            PyNumber::Float(_) => label.clone(),
        },
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of a JSON document.
    fn text(document: &str) -> String {
        json_text(&serde_json::from_str(document).unwrap())
    }

    #[test]
    fn floats_are_spelled_as_python_spells_them() {
        for (x, expected) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (100.0, "100.0"),
            (0.1, "0.1"),
            (2.5, "2.5"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e16, "1.5e+16"),
            (123456789012345678.0, "1.2345678901234568e+17"),
            (0.0001, "0.0001"),
            (0.00012, "0.00012"),
            (0.00001, "1e-05"),
            (-1.25e-7, "-1.25e-07"),
            (5e-324, "5e-324"),
            (f64::MAX, "1.7976931348623157e+308"),
            (1e100, "1e+100"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(float_text(x), expected);
        }
    }

    #[test]
    fn of_two_equally_near_texts_the_even_one_is_taken() {
        assert_eq!(float_text(608668584602616.0 + 0.25), "608668584602616.2");
        assert_eq!(float_text(-18694510533781.0 - 0.0625), "-18694510533781.062");
    }

    #[test]
    fn numbers_keep_their_digits_and_their_kind() {
        for (document, expected) in [
            ("12345678901234567890123", "12345678901234567890123"),
            ("-0", "0"),
            ("-7", "-7"),
            ("1E5", "100000.0"),
            ("1e400", "Infinity"),
            ("-1e400", "-Infinity"),
            ("1.10", "1.1"),
        ] {
            assert_eq!(text(document), expected);
        }
    }

    #[test]
    fn strings_escape_what_json_demands_and_nothing_else() {
        let document = r#""\"\\\/\n\r\t\b\f\u0000\u001f\u007f\u00e9\u2028\ud83d\ude00""#;
        let expected = "\"\\\"\\\\/\\n\\r\\t\\b\\f\\u0000\\u001f\u{7f}é\u{2028}😀\"";
        assert_eq!(text(document), expected);
    }

    #[test]
    fn trap_28_lists_and_objects_have_spaces_and_keep_their_order() {
        assert_eq!(
            text(r#"{"b":[1,{"x":null},[]],"a":{},"":true}"#),
            r#"{"b": [1, {"x": null}, []], "a": {}, "": true}"#
        );
    }

    #[test]
    fn a_repeated_key_keeps_its_first_place_and_its_last_value() {
        assert_eq!(text(r#"{"a":1,"b":2,"a":3}"#), r#"{"a": 3, "b": 2}"#);
    }

    #[test]
    fn trap_28_four_decimals_are_rounded_on_the_exact_value_with_ties_to_even() {
        for (x, expected) in
            [(0.03125, 0.0312), (0.09375, 0.0938), (0.00005, 0.0001), (0.12345, 0.1235), (0.00015, 0.0001), (1.0, 1.0)]
        {
            assert_eq!(round4(x), expected, "{x}");
        }
    }

    #[test]
    fn a_float_of_a_result_prints_as_python_prints_it() {
        assert_eq!(float(1.0).to_string(), "1.0");
        assert_eq!(float(1e-7).to_string(), "1e-07");
        assert_eq!(float(f64::NAN), Value::Null);
    }
}
