//! From Metal's text to C++: pointers that know what they point into, memory of a threadgroup that the machine hands out, a function that calls
//! the kernel for one thread. Everything else is left as it is and means the same in both languages, or has its meaning from `metal_stdlib`.

/// A kernel's text as C++, and what it asks of the machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Translated {
    pub(super) source: String,
    /// Bytes of threadgroup memory.
    pub(super) shared_bytes: usize,
    /// Whether its threads can meet; where they cannot, one may run after the other.
    pub(super) meets: bool,
}

/// Translates a text with one kernel. The error says what in it is not understood.
pub(super) fn translate(metal: &str) -> Result<Translated, String> {
    let call = call(metal)?;
    let (text, shared_bytes) = blocks(metal)?;
    let text = pointers(&text)?;
    let meets = ["_barrier(", "simd_", "simdgroup_load", "simdgroup_store", "simdgroup_multiply"];
    let source = format!(
        "{text}\nextern \"C\" void emulator_bind(const emulator::Api* api) {{ emulator::api = api; }}\n\
         extern \"C\" void emulator_thread(const emulator::Launch* launch, const emulator::Thread* now) {{\n    {call}\n}}\n"
    );
    Ok(Translated { source, shared_bytes, meets: meets.iter().any(|word| metal.contains(word)) })
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// The length of the word at the start.
fn word(text: &str) -> usize {
    text.find(|c| !is_word(c)).unwrap_or(text.len())
}

/// `text` without `prefix` and the space behind it, where it begins with that word.
fn after_word<'a>(text: &'a str, prefix: &str) -> Option<&'a str> {
    let rest = text.strip_prefix(prefix)?;
    (!rest.starts_with(is_word)).then(|| rest.trim_start())
}

/// The call of the kernel with the arguments that its parameters' attributes name.
fn call(metal: &str) -> Result<String, String> {
    let (_, from) = metal.split_once("[[kernel]] void ").ok_or("it has no kernel")?;
    let name = &from[..word(from)];
    let parameters = from[name.len()..].strip_prefix('(').ok_or("the kernel has no parameters")?;
    let end = parameters.find(") {").ok_or("the kernel has no body")?;
    let mut arguments = Vec::new();
    // No parameter has a comma outside of angle brackets.
    let mut depth = 0;
    let parts = parameters[..end].split(|c| {
        depth += i32::from(c == '<') - i32::from(c == '>');
        c == ',' && depth == 0
    });
    for parameter in parts.map(str::trim).filter(|p| !p.is_empty()) {
        let attribute = parameter.split_once("[[").and_then(|(_, a)| a.strip_suffix("]]")).map(str::trim);
        arguments.push(match attribute {
            Some(a) if a.starts_with("buffer(") => {
                let index: u32 =
                    a["buffer(".len()..].trim_end_matches(')').parse().map_err(|_| format!("buffer {a}"))?;
                format!("emulator::Buffer{{launch, {index}}}")
            }
            Some(a) => format!("now->{a}"),
            // Scalars and lengths come in the buffer behind the others.
            None if parameter.starts_with("constant ") => "emulator::Info{launch}".to_owned(),
            None => return Err(format!("a parameter without an attribute: {parameter}")),
        });
    }
    Ok(format!("{name}({});", arguments.join(", ")))
}

/// Makes declarations of threadgroup memory into pointers into the machine's; also the bytes that they take.
fn blocks(text: &str) -> Result<(String, usize), String> {
    let (mut out, mut rest, mut bytes) = (String::with_capacity(text.len()), text, 0usize);
    const KEYWORD: &str = "threadgroup char ";
    while let Some(at) = rest.find(KEYWORD) {
        let declared = &rest[at + KEYWORD.len()..];
        let name = &declared[..word(declared)];
        let Some((size, behind)) = declared[name.len()..].strip_prefix('[').and_then(|d| d.split_once("];")) else {
            // A pointer to it, not memory.
            out.push_str(&rest[..at + KEYWORD.len()]);
            rest = declared;
            continue;
        };
        let (front, alignment) = rest[..at]
            .rsplit_once("alignas(")
            .and_then(|(front, a)| Some((front, a.trim_end().strip_suffix(')')?.parse::<usize>().ok()?)))
            .ok_or("threadgroup memory without an alignment")?;
        let size: usize = size.parse().map_err(|_| format!("{size} bytes of threadgroup memory"))?;
        let start = bytes.next_multiple_of(alignment);
        bytes = start + size;
        out.push_str(front);
        out.push_str(&format!("emulator::pointer<char> const {name} = emulator::block({start});"));
        rest = behind;
    }
    out.push_str(rest);
    Ok((out, bytes))
}

/// Makes pointers of `device` and `threadgroup` memory into those that know their bounds, and those of `constant` memory into ordinary ones.
fn pointers(text: &str) -> Result<String, String> {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(c) = rest.chars().next() {
        if !is_word(c) {
            out.push(c);
            rest = &rest[c.len_utf8()..];
            continue;
        }
        let here = &rest[..word(rest)];
        let space = ["device", "threadgroup", "constant"].into_iter().find(|s| *s == here);
        let Some((space, (ty, constant, mark, behind))) =
            space.and_then(|s| Some((s, declared(rest[s.len()..].trim_start())?)))
        else {
            out.push_str(here);
            rest = &rest[here.len()..];
            continue;
        };
        let constant = if constant || space == "constant" { " const" } else { "" };
        match (space, mark) {
            ("constant", mark) => out.push_str(&format!("{ty}{constant}{mark}")),
            (_, '*') => {
                // A cast from one such pointer to another is no cast of a plain pointer.
                if out.ends_with("reinterpret_cast<") {
                    out.truncate(out.len() - "reinterpret_cast<".len());
                    out.push_str("emulator::pointer_cast<");
                }
                out.push_str(&format!("emulator::pointer<{ty}{constant}>"));
            }
            _ => return Err(format!("a reference to {space} memory")),
        }
        rest = behind;
    }
    Ok(out)
}

/// A type, whether it is constant, `*` or `&`, and what stands behind; the words of a pointer behind its address space.
fn declared(text: &str) -> Option<(&str, bool, char, &str)> {
    let (text, before) = after_word(text, "const").map_or((text, false), |rest| (rest, true));
    let mut end = word(text);
    if end == 0 {
        return None;
    }
    if text[end..].starts_with('<') {
        let mut depth = 0;
        let close = text[end..].find(|c| {
            depth += i32::from(c == '<') - i32::from(c == '>');
            depth == 0
        })?;
        end += close + 1;
    }
    let behind = text[end..].trim_start();
    let (behind, after) = after_word(behind, "const").map_or((behind, false), |rest| (rest, true));
    let mark = behind.chars().next().filter(|c| "*&".contains(*c))?;
    Some((&text[..end], before || after, mark, &behind[1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_learn_their_bounds_and_constants_become_plain() {
        let cases = [
            ("device float const* const x = &y[i];", "emulator::pointer<float const> const x = &y[i];"),
            ("threadgroup array<float, 64> * p", "emulator::pointer<array<float, 64>> p"),
            (
                "reinterpret_cast<device float_4 const*>(x)",
                "emulator::pointer_cast<emulator::pointer<float_4 const>>(x)",
            ),
            ("constant info_st& info = *at;", "info_st const& info = *at;"),
            ("constant uint32_t const* const m", "uint32_t const* const m"),
            (
                "thread float * t = &own; device_id(); mem_flags::mem_device",
                "thread float * t = &own; device_id(); mem_flags::mem_device",
            ),
        ];
        for (metal, want) in cases {
            assert_eq!(pointers(metal).unwrap(), want);
        }
    }

    #[test]
    fn threadgroup_memory_is_laid_out_by_alignment() {
        let text = "alignas(4) threadgroup char a[6];\nalignas(16) threadgroup char b[32];\n";
        let (out, bytes) = blocks(text).unwrap();
        assert_eq!(bytes, 48);
        assert!(out.contains("a = emulator::block(0);") && out.contains("b = emulator::block(16);"), "{out}");
    }

    #[test]
    fn a_kernel_is_called_with_what_its_attributes_name() {
        let text = "[[kernel]] void k(device float * const x [[buffer(1)]], constant info_st const* const i, \
                    uint3 const p [[thread_position_in_grid]]) {\n}";
        assert_eq!(
            call(text).unwrap(),
            "k(emulator::Buffer{launch, 1}, emulator::Info{launch}, now->thread_position_in_grid);"
        );
        assert!(call("[[kernel]] void k(float x) {\n}").unwrap_err().contains("without an attribute"));
        assert!(call("void k() {}").is_err());
    }
}
