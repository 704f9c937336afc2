//! Finds the inputs and cuts them into pieces that can be tokenized one by one with the same result as the whole.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use super::{describe, open};

/// What a file holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Format {
    /// One document a file.
    Text,
    /// One JSON object a line, one document each.
    Jsonl,
}

/// Part of a document.
#[derive(PartialEq, Eq, Debug)]
pub struct Piece {
    /// Whether an end-of-text token goes before it.
    pub begins_document: bool,
    /// Whether it belongs to the validation split.
    pub validation: bool,
    /// Bytes of the input that it stands for.
    pub consumed: usize,
    /// Its text; UTF-8 where that was asked for.
    pub bytes: Vec<u8>,
}

struct File {
    path: PathBuf,
    format: Format,
}

/// All input files, in the order in which they are read.
pub struct Input {
    files: Vec<File>,
    skipped: Vec<PathBuf>,
    field: String,
    bytes: u64,
    block: usize,
}

/// Bytes of a text file that are read at a time.
const BLOCK: usize = 1 << 20;

impl Input {
    /// Lists the files: those named, and in folders, at any depth and sorted by path, those whose ending is known.
    pub fn find(inputs: &[PathBuf], format: Option<Format>, field: &str) -> anyhow::Result<Self> {
        let mut found =
            Input { files: Vec::new(), skipped: Vec::new(), field: field.to_owned(), bytes: 0, block: BLOCK };
        for path in inputs {
            let meta = std::fs::metadata(path).with_context(describe(path))?;
            if meta.is_dir() {
                found.add_folder(path, format)?;
            } else {
                let format = format.or_else(|| format_of(path)).unwrap_or(Format::Text);
                found.add(path.clone(), format, meta.len());
            }
        }
        if found.files.is_empty() {
            bail!("no .txt, .md or .jsonl file was found in the given folders; name the files themselves");
        }
        if found.bytes == 0 {
            bail!("the input is empty: {} has no bytes", found.files[0].path.display());
        }
        Ok(found)
    }

    fn add(&mut self, path: PathBuf, format: Format, bytes: u64) {
        self.bytes += bytes;
        self.files.push(File { path, format });
    }

    fn add_folder(&mut self, folder: &Path, format: Option<Format>) -> anyhow::Result<()> {
        let entries: Result<Vec<_>, _> =
            std::fs::read_dir(folder).and_then(Iterator::collect).with_context(describe(folder));
        let mut entries = entries?;
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let path = entry.path();
            // Follows links to files, not to folders: a link upwards would never end.
            let meta = std::fs::metadata(&path).with_context(describe(&path))?;
            let hidden = entry.file_name().to_string_lossy().starts_with('.');
            match format_of(&path) {
                _ if hidden => {}
                _ if meta.is_dir() && entry.file_type()?.is_dir() => self.add_folder(&path, format)?,
                Some(known) if meta.is_file() => self.add(path, format.unwrap_or(known), meta.len()),
                _ => self.skipped.push(path),
            }
        }
        Ok(())
    }

    /// Files of folders that were not taken.
    pub fn skipped(&self) -> &[PathBuf] {
        &self.skipped
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Hands on all pieces in order. Those that end within the first `val_bytes` bytes of the input are the validation split.
    pub fn pieces(
        &self,
        utf8: bool,
        val_bytes: u64,
        sink: &mut dyn FnMut(Piece) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut before = 0;
        for file in &self.files {
            let left = val_bytes.saturating_sub(before);
            before += match file.format {
                Format::Text => self.text(&file.path, utf8, left, sink)?,
                Format::Jsonl => self.json_lines(&file.path, left, sink)?,
            };
        }
        Ok(())
    }

    fn text(
        &self,
        path: &Path,
        utf8: bool,
        val_bytes: u64,
        sink: &mut dyn FnMut(Piece) -> anyhow::Result<()>,
    ) -> anyhow::Result<u64> {
        let mut file = open(path)?;
        let mut buffer: Vec<u8> = Vec::new();
        let (mut start, mut first) = (0u64, true);
        loop {
            // Never read across the end of the validation split, so that a piece can end there.
            let end = start + buffer.len() as u64;
            let room = if end < val_bytes { (val_bytes - end).min(self.block as u64) } else { self.block as u64 };
            let got = (&mut file).take(room).read_to_end(&mut buffer).with_context(describe(path))?;
            let last = got == 0;
            if last && buffer.is_empty() {
                return Ok(start);
            }
            let cut =
                if utf8 { cut(&buffer, last).map_err(|at| not_utf8(path, start + at as u64))? } else { buffer.len() };
            if cut == 0 && !last {
                continue;
            }
            let rest = buffer.split_off(cut);
            let mut bytes = std::mem::replace(&mut buffer, rest);
            let consumed = bytes.len();
            let validation = start + consumed as u64 <= val_bytes;
            if first && bytes.starts_with(b"\xEF\xBB\xBF") {
                bytes.drain(..3);
            }
            sink(Piece { begins_document: first, validation, consumed, bytes })?;
            first = false;
            start += consumed as u64;
        }
    }

    fn json_lines(
        &self,
        path: &Path,
        val_bytes: u64,
        sink: &mut dyn FnMut(Piece) -> anyhow::Result<()>,
    ) -> anyhow::Result<u64> {
        let mut reader = BufReader::with_capacity(BLOCK, open(path)?);
        let (mut start, mut number) = (0u64, 0u64);
        let mut line = Vec::new();
        loop {
            line.clear();
            let consumed = reader.read_until(b'\n', &mut line).with_context(describe(path))?;
            if consumed == 0 {
                return Ok(start);
            }
            number += 1;
            start += consumed as u64;
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let at = || format!("{}: line {number}", path.display());
            let object: serde_json::Value = serde_json::from_slice(&line)
                .with_context(|| format!("{}: not a JSON object; use --format text for plain text", at()))?;
            let Some(text) = object.get(&self.field).and_then(|v| v.as_str()) else {
                let fields: Vec<_> =
                    object.as_object().into_iter().flat_map(|o| o.keys().map(String::as_str)).collect();
                let fields = if fields.is_empty() { "none".to_owned() } else { fields.join(", ") };
                bail!("{}: no text in the field `{}`; choose another with --field (there: {fields})", at(), self.field);
            };
            let bytes = text.as_bytes().to_vec();
            sink(Piece { begins_document: true, validation: start <= val_bytes, consumed, bytes })?;
        }
    }
}

fn format_of(path: &Path) -> Option<Format> {
    match path.extension()?.to_str()?.to_ascii_lowercase().as_str() {
        "txt" | "text" | "md" => Some(Format::Text),
        "jsonl" | "ndjson" => Some(Format::Jsonl),
        _ => None,
    }
}

/// How many bytes to hand on: up to the last place where white space follows something else. GPT-2's tokens never cross such a place, so the
/// pieces have the same tokens as the whole. 0 when there is none; everything at the end of the file. `Err` holds the offset of bad UTF-8.
fn cut(buffer: &[u8], last: bool) -> Result<usize, usize> {
    let text = match std::str::from_utf8(buffer) {
        Ok(text) => text,
        Err(e) if e.error_len().is_none() && !last => {
            std::str::from_utf8(&buffer[..e.valid_up_to()]).unwrap_or_default()
        }
        Err(e) => return Err(e.valid_up_to()),
    };
    if last {
        return Ok(buffer.len());
    }
    let mut space = None;
    for (i, c) in text.char_indices().rev() {
        match space {
            Some(at) if !c.is_whitespace() => return Ok(at),
            _ => space = c.is_whitespace().then_some(i),
        }
    }
    Ok(0)
}

fn not_utf8(path: &Path, offset: u64) -> anyhow::Error {
    anyhow::anyhow!(
        "{}: byte {offset}: not UTF-8; convert it first (iconv -f latin1 -t utf-8), or use --tokenizer bytes",
        path.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, name: &str, content: &[u8]) -> PathBuf {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }

    fn pieces(path: PathBuf, block: usize, utf8: bool, val_bytes: u64) -> anyhow::Result<Vec<Piece>> {
        let mut input = Input::find(&[path], None, "text")?;
        input.block = block;
        let mut all = Vec::new();
        input.pieces(utf8, val_bytes, &mut |p| {
            all.push(p);
            Ok(())
        })?;
        Ok(all)
    }

    #[test]
    fn pieces_join_to_the_text_and_start_with_white_space() {
        let dir = tempfile::tempdir().unwrap();
        let text = "It was 1813.\n\n  \u{c9}t\u{e9}\u{a0}\u{2003}x \u{1f600}\u{1f600} don't\tgo  \n".repeat(20);
        for block in [1, 2, 3, 7, 64, 1000, 1 << 20] {
            let all = pieces(write(dir.path(), "a.txt", text.as_bytes()), block, true, 0).unwrap();
            assert_eq!(all.iter().flat_map(|p| p.bytes.clone()).collect::<Vec<_>>(), text.as_bytes(), "block {block}");
            for (i, piece) in all.iter().enumerate() {
                assert_eq!(piece.begins_document, i == 0);
                let piece = std::str::from_utf8(&piece.bytes).unwrap();
                assert!(i == 0 || piece.starts_with(char::is_whitespace), "block {block}: {piece:?}");
                assert!(i + 1 == all.len() || !piece.ends_with(char::is_whitespace), "block {block}: {piece:?}");
            }
        }
    }

    #[test]
    fn pieces_have_the_same_gpt2_tokens_as_the_whole() {
        let dir = tempfile::tempdir().unwrap();
        let text = "It's 1813.\n\n\n  So\u{a0} \u{2003}x  \u{1f600} don't\tgo\r\n  \n".repeat(7);
        let tokenizer = tilewright_core::tokenizer::Tokenizer::gpt2();
        let whole = tokenizer.encode(&text).unwrap();
        for block in [1, 5, 16, 100] {
            let all = pieces(write(dir.path(), "a.txt", text.as_bytes()), block, true, 0).unwrap();
            let parts = all.iter().flat_map(|p| tokenizer.encode(std::str::from_utf8(&p.bytes).unwrap()).unwrap());
            assert_eq!(parts.collect::<Vec<_>>(), whole, "block {block}");
            assert!(all.len() > 3, "{} pieces", all.len());
        }
    }

    #[test]
    fn the_validation_split_is_the_first_bytes_to_the_last_word() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(dir.path(), "a.txt", b"one two three four five");
        for (val_bytes, want) in
            [(0, ""), (2, ""), (9, "one two"), (13, "one two"), (14, "one two three"), (22, "one two three four")]
        {
            let all = pieces(path.clone(), 1 << 20, true, val_bytes).unwrap();
            let val: Vec<u8> = all.iter().filter(|p| p.validation).flat_map(|p| p.bytes.clone()).collect();
            assert_eq!(String::from_utf8(val).unwrap(), want, "{val_bytes}");
        }
    }

    #[test]
    fn bad_utf8_is_refused_with_its_offset_even_across_blocks() {
        let dir = tempfile::tempdir().unwrap();
        let mut text = b"caf\xC3\xA9 ".repeat(10);
        text.extend(b"\xE9t\xE9");
        for block in [1, 5, 1 << 20] {
            let message = pieces(write(dir.path(), "a.txt", &text), block, true, 0).unwrap_err().to_string();
            assert!(message.contains("byte 60") && message.contains("a.txt") && message.contains("iconv"), "{message}");
        }
        let cut_off = write(dir.path(), "b.txt", b"caf\xC3");
        assert!(pieces(cut_off.clone(), 64, true, 0).unwrap_err().to_string().contains("byte 3"));
        assert_eq!(pieces(cut_off, 64, false, 0).unwrap()[0].bytes, b"caf\xC3", "bytes need no UTF-8");
    }

    #[test]
    fn a_byte_order_mark_is_no_text() {
        let dir = tempfile::tempdir().unwrap();
        let all = pieces(write(dir.path(), "a.txt", b"\xEF\xBB\xBFhello"), 64, true, 0).unwrap();
        assert_eq!((all[0].bytes.as_slice(), all[0].consumed), (&b"hello"[..], 8));
    }

    #[test]
    fn each_json_line_is_a_document_and_empty_lines_are_none() {
        let dir = tempfile::tempdir().unwrap();
        let lines = b"{\"text\": \"a\\nb\"}\n\n{\"id\": 3, \"text\": \"\\u00e9\"}";
        let all = pieces(write(dir.path(), "a.jsonl", lines), 64, true, 17).unwrap();
        let texts: Vec<_> = all.iter().map(|p| std::str::from_utf8(&p.bytes).unwrap()).collect();
        assert_eq!(texts, ["a\nb", "\u{e9}"]);
        assert!(all.iter().all(|p| p.begins_document));
        assert_eq!(all.iter().map(|p| p.validation).collect::<Vec<_>>(), [true, false]);
    }

    #[test]
    fn a_wrong_line_is_named_with_its_number_and_fields() {
        let dir = tempfile::tempdir().unwrap();
        let error = |lines: &[u8]| {
            let error = pieces(write(dir.path(), "a.jsonl", lines), 64, true, 0).unwrap_err();
            format!("{error:#}")
        };
        let missing = error(b"{\"text\": \"a\"}\n{\"body\": \"b\", \"id\": 1}\n");
        assert!(missing.contains("line 2") && missing.contains("body, id") && missing.contains("--field"), "{missing}");
        assert!(error(b"{\"text\": 3}").contains("line 1"));
        assert!(error(b"plain words\n").contains("line 1: not a JSON object"));
    }

    #[test]
    fn folders_are_read_in_order_and_unknown_files_are_told() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["b.txt", "a/z.md", "a/y.jsonl", "c.png", ".hidden.txt", "d.TXT"] {
            write(dir.path(), name, b"{\"text\": \"x\"}");
        }
        let input = Input::find(&[dir.path().to_owned()], None, "text").unwrap();
        let names: Vec<_> =
            input.files.iter().map(|f| f.path.strip_prefix(dir.path()).unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["a/y.jsonl", "a/z.md", "b.txt", "d.TXT"]);
        assert_eq!(input.skipped().len(), 1);
        assert_eq!(input.bytes(), 4 * 13);
    }

    #[test]
    fn missing_and_empty_inputs_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let find = |path: PathBuf| format!("{:#}", Input::find(&[path], None, "text").err().unwrap());
        assert!(find(dir.path().join("no.txt")).contains("no.txt"));
        assert!(find(dir.path().to_owned()).contains(".jsonl"));
        assert!(find(write(dir.path(), "e.txt", b"")).contains("empty"));
    }
}
