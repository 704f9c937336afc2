//! `tilewright bench-decide`: one call of a Laya checkpoint whenever it is told to, as an arm of `tilewright bench` (`docs/bench-protocol.md`).
//!
//! A call answers the first questions of a file about the text of one input, each row cut to a fixed number of tokens: tokenizing, the model and the
//! result's JSON are all timed. `bench/peers/laya_decide.py` does the same with the `laya` package.

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};
use tilewright_bench::inputs::sha256;
use tilewright_decide::PredictOptions;
use tilewright_ops::cpu::{Isa, default_threads};

use super::input::{parse, read};
use super::models::{LayaAgent, ModelArgs};

/// Command line of `bench-decide`.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    models: ModelArgs,
    /// Questions, of which the first are asked
    #[arg(long, value_name = "FILE")]
    questions: PathBuf,
    /// How many of them
    #[arg(long, value_name = "N", default_value_t = 1)]
    count: usize,
    /// Tokens of each row
    #[arg(long, value_name = "N", default_value_t = 65)]
    row_tokens: usize,
    /// Tokens of instructions and options
    #[arg(long, value_name = "N", default_value_t = 56)]
    head_tokens: usize,
}

/// Random bytes become letters and spaces.
const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz      ";

fn text(bytes: &[u8]) -> String {
    bytes.iter().map(|b| char::from(ALPHABET[usize::from(b % 32)])).collect()
}

/// Runs the subcommand.
pub fn run(args: &Args) -> Result<()> {
    let all = parse(&read(&args.questions)?, &args.questions, "write an object of questions by id")?;
    let all = all.as_object().with_context(|| format!("{} is no object of questions", args.questions.display()))?;
    ensure!(
        (1..=all.len()).contains(&args.count),
        "--count {}: {} holds {} questions",
        args.count,
        args.questions.display(),
        all.len()
    );
    let questions: Map<String, Value> = all.iter().take(args.count).map(|(id, q)| (id.clone(), q.clone())).collect();
    let mut worker = Worker { args, questions: questions.into(), agent: None, states: Vec::new() };
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let request: Value = serde_json::from_str(&line.context("read a request from standard input")?)
            .context("a request is one JSON object a line; see docs/bench-protocol.md")?;
        let answer = worker.answer(&request).unwrap_or_else(|error| json!({"error": format!("{error:#}")}));
        writeln!(out, "{answer}")?;
        out.flush()?;
        if request["do"] == "quit" {
            break;
        }
    }
    Ok(())
}

struct Worker<'a> {
    args: &'a Args,
    questions: Value,
    agent: Option<LayaAgent>,
    states: Vec<Value>,
}

impl Worker<'_> {
    fn answer(&mut self, request: &Value) -> Result<Value> {
        Ok(match request["do"].as_str().unwrap_or_default() {
            "hello" => json!({
                "ok": "hello",
                "name": concat!("tilewright ", env!("CARGO_PKG_VERSION")),
                "fingerprint": {
                    "revision": env!("TILEWRIGHT_REVISION"), "isa": Isa::from_env().name(), "threads": default_threads(),
                    "precision": self.args.models.precision, "questions": self.args.count, "row_tokens": self.args.row_tokens,
                },
            }),
            "prepare" => json!({"ok": "prepare", "inputs": self.prepare(request)?}),
            "run" => {
                ensure!(!self.states.is_empty(), "there is no input; `prepare` names files called `text`");
                let index = request["input"].as_u64().unwrap_or(0) as usize % self.states.len();
                self.call(index)?
            }
            "quit" => json!({"ok": "quit"}),
            other => json!({"error": format!("no request `{other}`; see docs/bench-protocol.md")}),
        })
    }

    fn prepare(&mut self, request: &Value) -> Result<Vec<Value>> {
        let mut told = Vec::new();
        self.states.clear();
        for input in request["inputs"].as_array().into_iter().flatten() {
            let (name, path) = (input["name"].as_str().unwrap_or_default(), input["path"].as_str().unwrap_or_default());
            let bytes = std::fs::read(path).with_context(|| format!("read input `{name}`"))?;
            told.push(json!({"index": input["index"], "name": name, "sha256": sha256(&bytes)}));
            if name == "text" {
                self.states.push(text(&bytes).into());
            }
        }
        self.agent = Some(self.args.models.open_one(false)?);
        Ok(told)
    }

    fn call(&mut self, index: usize) -> Result<Value> {
        let agent = self.agent.as_mut().context("`prepare` comes first")?;
        let options = PredictOptions {
            max_len: Some(self.args.row_tokens),
            head_max_len: Some(self.args.head_tokens),
            ..PredictOptions::default()
        };
        let start = Instant::now();
        let prediction = agent.predict(&self.states[index], &self.questions, &options)?;
        let result = prediction.to_json();
        let ns = start.elapsed().as_nanos() as u64;
        let probabilities: Vec<Value> = prediction.answers.iter().flat_map(|a| published(&a.to_json())).collect();
        let metrics = json!({"probabilities": probabilities, "input_tokens": prediction.usage.input_tokens});
        Ok(json!({"ok": "run", "ns": ns, "output": sha256(result.to_string().as_bytes()), "metrics": metrics}))
    }
}

/// The probabilities of an answer as both programs publish them.
fn published(answer: &Value) -> Vec<Value> {
    match answer.get("probabilities").and_then(Value::as_object) {
        Some(all) => all.values().cloned().collect(),
        None => vec![answer["noul"].clone()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_become_letters_and_spaces() {
        assert_eq!(text(&[0, 25, 26, 31, 32, 255]), "az  a ");
    }
}
