//! Sizes as people write them: `24GiB`, `1.5e6`, and back.

/// A number of bytes with a binary unit and three or four digits: `1.46 GiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = match value {
        _ if unit == 0 => 0,
        v if v < 10.0 => 2,
        v if v < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {}", UNITS[unit])
}

/// Reads `1073741824`, `24GiB`, `24G` (binary, as tools do), `500MB` (decimal), `1.5 TiB`.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = (&text[..split], text[split..].trim());
    let number: f64 = number.parse().map_err(|_| format!("`{text}` is no size; write 24GiB, 500MB or bytes"))?;
    let factor: u64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(format!("`{unit}` is no unit of memory; use KiB MiB GiB TiB, or kB MB GB TB")),
    };
    Ok((number * factor as f64) as u64)
}

/// Reads a count: `100000`, `100_000`, `100k`, `1.5M`, `1e8`.
pub fn parse_count(text: &str) -> Result<u64, String> {
    let plain = text.trim().replace('_', "");
    if let Ok(n) = plain.parse::<u64>() {
        return Ok(n);
    }
    let (number, factor) = match plain.char_indices().last() {
        Some((i, 'k' | 'K')) => (&plain[..i], 1e3),
        Some((i, 'm' | 'M')) => (&plain[..i], 1e6),
        Some((i, 'g' | 'G' | 'b' | 'B')) => (&plain[..i], 1e9),
        _ => (plain.as_str(), 1.0),
    };
    let value = number.parse::<f64>().map_or(f64::NAN, |n| n * factor);
    if !(0.0..9e15).contains(&value) || value.fract() != 0.0 {
        return Err(format!("`{text}` is no count; write 100000, 100k, 1.5M or 1e8"));
    }
    Ok(value as u64)
}

/// `1234567` as `1,234,567`.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_keep_three_digits() {
        for (n, want) in [(0, "0 B"), (999, "999 B"), (1024, "1.00 KiB"), (1 << 20, "1.00 MiB"), (25 << 30, "25.0 GiB")]
        {
            assert_eq!(bytes(n), want);
        }
        assert_eq!(bytes(1023 * 1024), "1.00 MiB");
        assert_eq!(bytes(u64::MAX), "16384 PiB");
    }

    #[test]
    fn sizes_are_read_with_binary_and_decimal_units() {
        for (text, want) in
            [("7", 7), ("24GiB", 24 << 30), ("24g", 24 << 30), ("1.5 MiB", 3 << 19), ("500MB", 500_000_000)]
        {
            assert_eq!(parse_bytes(text), Ok(want), "{text}");
        }
        for bad in ["", "GiB", "3 apples", "-1", "1..2G"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn counts_are_read_with_suffixes() {
        for (text, want) in
            [("12", 12), ("100_000", 100_000), ("100k", 100_000), ("1.5M", 1_500_000), ("1e8", 100_000_000)]
        {
            assert_eq!(parse_count(text), Ok(want), "{text}");
        }
        for bad in ["", "k", "-3", "1.5", "many", "1e30"] {
            assert!(parse_count(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn thousands_are_grouped() {
        for (n, want) in [(0, "0"), (999, "999"), (1000, "1,000"), (1234567, "1,234,567")] {
            assert_eq!(grouped(n), want);
        }
    }
}
