//! Many states: JSON Lines in, JSON Lines out. A run that was stopped goes on where it was; a line that cannot be read or answered becomes a row
//! with an error, and the rest goes on.

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Map, Value, json};
use tilewright_bench::inputs::sha256;
use tilewright_decide::json_text;
use tilewright_decide::route::Request;

use super::models::Models;
use super::predict::{Args, What};

/// Where rows go.
#[derive(clap::Args, Debug)]
pub struct Output {
    /// Append rows of answers to this file, leaving out lines that are answered in it; without it they go to standard output
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Lines that are answered together
    #[arg(long, value_name = "N", default_value_t = 32)]
    batch_size: usize,
}

impl Output {
    /// An output without a batch is a mistake.
    pub fn refuse_without_batch(&self) -> Result<()> {
        ensure!(
            self.output.is_none(),
            "--output is for --batch FILE; for one state add --json and redirect standard output"
        );
        Ok(())
    }
}

/// A line of the input.
struct Item {
    line: usize,
    id: Value,
    key: String,
    request: Result<Request>,
}

impl Item {
    /// The row of an answer or an error.
    fn row(&self, answer: &Result<Value>) -> String {
        let mut row = Map::new();
        row.insert("line".into(), self.line.into());
        row.insert("id".into(), self.id.clone());
        row.insert("key".into(), self.key.as_str().into());
        match answer {
            Ok(result) => row.insert("result".into(), result.clone()),
            Err(error) => row.insert("error".into(), format!("{error:#}").into()),
        };
        Value::Object(row).to_string()
    }
}

/// What turns lines into requests.
struct Reader<'a> {
    args: &'a Args,
    what: Option<&'a What>,
    only: Option<&'static str>,
    /// How often each text was met, so that equal lines have keys of their own.
    met: HashMap<String, usize>,
    /// What changes answers besides the line.
    settings: String,
}

impl Reader<'_> {
    fn item(&mut self, line: usize, bytes: &[u8]) -> Item {
        let value = std::str::from_utf8(bytes)
            .context("it is no UTF-8")
            .and_then(|text| serde_json::from_str(text).context("it is no JSON; a text stands in quotes"))
            .with_context(|| format!("line {line} cannot be read"));
        let id = value.as_ref().ok().and_then(|v: &Value| v.get("id")).filter(|v| !v.is_null()).cloned();
        let request = value.and_then(|value| self.request(line, value));
        let content = match &request {
            Ok(r) => format!(
                "{}\n{}\n{:?}",
                json_text(&r.state),
                json_text(&r.questions),
                (&r.model, &r.task, &r.lang, &r.lang_guess, r.max_len, r.head_max_len)
            ),
            Err(_) => String::from_utf8_lossy(bytes).into_owned(),
        };
        let digest = sha256(format!("{}\n{:?}\n{content}", self.settings, id).as_bytes());
        let digest = &digest[..16];
        let count = self.met.entry(digest.to_owned()).or_default();
        *count += 1;
        let key = if *count == 1 { digest.to_owned() } else { format!("{digest}-{count}") };
        Item { line, id: id.unwrap_or_else(|| line.into()), key, request }
    }

    fn request(&self, line: usize, value: Value) -> Result<Request> {
        let how = &self.args.how;
        let mut value = match value {
            // A text, a conversation or a number is a state as it is.
            Value::String(_) | Value::Array(_) | Value::Number(_) | Value::Bool(_) => json!({ "state": value }),
            Value::Object(fields) => Value::Object(fields),
            Value::Null => bail!("line {line} is null; write a text in quotes, or an object with `state`"),
        };
        ensure!(
            value.get("state").is_some_and(|s| !s.is_null()),
            "line {line} has no `state`; to decide about the whole object write {{\"state\": {{...}}}}"
        );
        match (self.what, value.get("questions")) {
            (Some(What::Schema(..)), Some(_)) => bail!("line {line} has `questions`, but --schema asks already"),
            (_, Some(_)) => {}
            (Some(what), None) => {
                value["questions"] = what.asked().questions.clone();
                value["state"] = what.asked().place(value["state"].take());
            }
            (None, None) => {
                bail!("line {line} asks nothing; give it `questions`, or add --questions FILE or --preset NAME")
            }
        }
        let mut request = Request::from_json(line, &value)?;
        if let Some(only) = self.only {
            request.model = Some(only.to_owned());
        } else if request.model.is_none() {
            request.task = request.task.or(how.task.clone());
        }
        request.lang = request.lang.or(how.lang.clone());
        request.max_len = request.max_len.or(how.max_len);
        request.head_max_len = request.head_max_len.or(how.head_max_len);
        Ok(request)
    }
}

/// Some editors begin a file of UTF-8 with it.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Runs `--batch`.
pub fn run(args: &Args, what: Option<&What>) -> Result<()> {
    let input = args.batch.as_deref().expect("asked for");
    ensure!(args.to.batch_size > 0, "--batch-size 0 answers nothing; leave it out");
    let (mut source, bytes) = open(input)?;
    let (done, mut sink) = match &args.to.output {
        Some(path) => resume(path)?,
        None => (HashSet::new(), Box::new(std::io::stdout().lock()) as Box<dyn Write>),
    };
    let mut models = args.models.open(args.how.provenance)?;
    let stop = listen()?;
    let bar = progress(bytes);
    let settings = format!("{:?} {:?} {:?}", args.models, args.how, args.schema.is_some());
    let mut reader = Reader { args, what, only: models.only, met: HashMap::new(), settings };
    let start = Instant::now();
    let (mut answered, mut failed, mut skipped, mut line) = (0, 0, 0, 0);
    let mut buffer = Vec::new();
    let mut ended = false;
    while !ended && !stop.load(Ordering::SeqCst) {
        let mut items = Vec::new();
        while items.len() < args.to.batch_size {
            buffer.clear();
            let read = source.read_until(b'\n', &mut buffer).with_context(|| format!("read {}", input.display()))?;
            if read == 0 {
                ended = true;
                break;
            }
            line += 1;
            bar.inc(read as u64);
            if line == 1 && buffer.starts_with(BYTE_ORDER_MARK) {
                buffer.drain(..BYTE_ORDER_MARK.len());
            }
            if buffer.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let item = reader.item(line, &buffer);
            if done.contains(&item.key) {
                skipped += 1;
            } else {
                items.push(item);
            }
        }
        let answers = answer(args, what, &mut models, &mut items);
        for (item, result) in items.iter().zip(&answers) {
            writeln!(sink, "{}", item.row(result))?;
            *(if result.is_ok() { &mut answered } else { &mut failed }) += 1;
        }
        sink.flush()?;
        bar.set_message(format!("{answered} answered"));
    }
    bar.finish_and_clear();
    let before = if skipped > 0 { format!(", {skipped} were answered before") } else { String::new() };
    eprintln!("answered {answered} lines in {:.1} s{before}", start.elapsed().as_secs_f64());
    models.tell_passes();
    if stop.load(Ordering::SeqCst) && !ended {
        if args.to.output.is_some() {
            eprintln!("stopped; the same command goes on from here");
        }
        std::process::exit(130);
    }
    ensure!(failed == 0, "{failed} of {} lines could not be answered; their rows say why", answered + failed + skipped);
    Ok(())
}

/// The answers of some lines, in order. What fails together is tried one by one, so that one bad line costs only itself.
fn answer(args: &Args, what: Option<&What>, models: &mut Models, items: &mut [Item]) -> Vec<Result<Value>> {
    let how = &args.how;
    let requests: Vec<Request> = items.iter().filter_map(|i| i.request.as_ref().ok().cloned()).collect();
    if how.is_plain(what)
        && !how.provenance
        && requests.len() > 1
        && let Ok(results) = models.router.predict_batch(&requests, how.min_confidence.as_ref())
    {
        let mut results = results.into_iter();
        return items
            .iter_mut()
            .map(|item| {
                // Taken out, as the error is told by the row.
                std::mem::replace(&mut item.request, Ok(Request::default()))?;
                let mut prediction = results.next().expect("one a request");
                if models.only.is_some() {
                    prediction.extra.shift_remove("routing");
                }
                Ok(prediction.to_json())
            })
            .collect();
    }
    let one = |item: &mut Item| {
        let request = std::mem::replace(&mut item.request, Ok(Request::default()))?;
        let reply =
            how.answer(models, &request, what).with_context(|| format!("line {} cannot be answered", item.line))?;
        Ok(reply.json)
    };
    items.iter_mut().map(one).collect()
}

/// The input and its size, if that is known.
fn open(path: &Path) -> Result<(Box<dyn BufRead>, Option<u64>)> {
    if path == Path::new("-") {
        return Ok((Box::new(BufReader::new(std::io::stdin())), None));
    }
    let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    let bytes = file.metadata().ok().map(|m| m.len());
    Ok((Box::new(BufReader::new(file)), bytes))
}

/// The keys that are answered in an output, and the output ready to be appended to. Rows with errors, and a last row that was cut off when the
/// program was killed, are taken out: their lines are tried again.
fn resume(path: &Path) -> Result<(HashSet<String>, Box<dyn Write>)> {
    let mut done = HashSet::new();
    // A pipe or a device keeps no rows to go on from, and reading it may never end.
    let keeps_rows = std::fs::metadata(path).map_or(true, |m| m.is_file() || m.is_dir());
    let before = if keeps_rows { std::fs::read(path) } else { Ok(Vec::new()) };
    match before {
        Ok(bytes) => {
            let mut kept = Vec::with_capacity(bytes.len());
            for (number, row) in bytes.split_inclusive(|b| *b == b'\n').enumerate() {
                let whole = row.ends_with(b"\n");
                let parsed: Option<Value> = serde_json::from_slice(row).ok().filter(|_| whole);
                match parsed {
                    Some(row_value) if row_value.get("key").and_then(Value::as_str).is_some() => {
                        if row_value.get("result").is_some() {
                            done.insert(row_value["key"].as_str().unwrap_or_default().to_owned());
                            kept.extend_from_slice(row);
                        }
                    }
                    None if !whole => {}
                    _ => bail!(
                        "{}, line {} is no row of answers, so nothing is written to this file; give another --output",
                        path.display(),
                        number + 1
                    ),
                }
            }
            if kept.len() < bytes.len() {
                tilewright_core::fs::write_atomic(path, &kept)?;
            }
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(anyhow!(error).context(format!("read {}", path.display()))),
    }
    let file = OpenOptions::new().append(true).create(true).open(path);
    let file = file.with_context(|| format!("open {} to append", path.display()))?;
    Ok((done, Box::new(BufWriter::new(file))))
}

/// Set by Ctrl-C; the second one ends the program at once.
fn listen() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
        eprintln!("\nfinishing these lines; press Ctrl-C again to stop at once");
    })
    .context("cannot listen for Ctrl-C")?;
    Ok(stop)
}

fn progress(bytes: Option<u64>) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let (bar, style) = match bytes {
        Some(bytes) => (
            ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr()),
            "{bar:28} {percent}% | {msg} | {elapsed} passed, {eta} left",
        ),
        None => {
            (ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()), "{spinner} {msg} | {elapsed} passed")
        }
    };
    bar.enable_steady_tick(Duration::from_millis(500));
    bar.with_style(ProgressStyle::with_template(style).expect("the template is constant"))
}
