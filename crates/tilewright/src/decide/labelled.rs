//! Labelled rows: JSON Lines of states and what would be right, answered by a checkpoint.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Map, Value};
use tilewright_decide::evaluate::truth;
use tilewright_decide::{Answer, PredictOptions, json_text, parse_questions};

use super::input::{Asked, QuestionArgs, parse, read};
use super::models::LayaAgent;

/// Rows that are answered together.
const TOGETHER: usize = 32;

/// Where labelled rows come from.
#[derive(clap::Args, Debug)]
pub struct DataArgs {
    /// JSON Lines: {"state": ..., "labels": {"question id": label}}, perhaps with `id`, `questions`, `lang`. A label is a choice's label, a score's
    /// level, true or false
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    #[command(flatten)]
    questions: QuestionArgs,
}

/// An answer and the index of the true option.
pub struct Labelled {
    /// The row's id, or its line.
    pub id: String,
    /// The answer.
    pub answer: Answer,
    /// The true option.
    pub truth: usize,
}

/// A row before it is answered.
struct Row {
    line: usize,
    id: String,
    state: Value,
    /// Those of the questions that have a label.
    questions: Value,
    truths: Vec<usize>,
    lang: Option<String>,
}

impl DataArgs {
    /// Reads and checks all rows, then answers them.
    pub fn answer(&self, agent: &mut LayaAgent) -> Result<Vec<Labelled>> {
        let asked = self.questions.read()?;
        let text = read(&self.data)?;
        let mut rows = Vec::new();
        for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
            let place = || format!("{}, line {}", self.data.display(), i + 1);
            rows.push(row(i + 1, line, &self.data, asked.as_ref()).with_context(place)?);
        }
        ensure!(!rows.is_empty(), "{} holds no rows; write one JSON object a line", self.data.display());
        let bar = match std::io::stderr().is_terminal() {
            true => ProgressBar::with_draw_target(Some(rows.len() as u64), ProgressDrawTarget::stderr()),
            false => ProgressBar::hidden(),
        };
        let style = "{bar:28} {pos}/{len} rows | {elapsed} passed, {eta} left";
        bar.set_style(ProgressStyle::with_template(style).expect("the template is constant"));
        let mut labelled = Vec::new();
        let mut rest = &rows[..];
        while let Some(first) = rest.first() {
            // Rows in a line that are asked the same run together.
            let alike = |row: &Row| row.lang == first.lang && json_text(&row.questions) == json_text(&first.questions);
            let n = rest.iter().take(TOGETHER).take_while(|row| alike(row)).count();
            let (now, later) = rest.split_at(n);
            rest = later;
            let states: Vec<Value> = now.iter().map(|row| row.state.clone()).collect();
            let options = PredictOptions { lang: first.lang.clone(), ..PredictOptions::default() };
            let results = agent
                .predict_batch(&states, &first.questions, &options)
                .with_context(|| format!("{}, line {} and after", self.data.display(), first.line))?;
            for (row, result) in now.iter().zip(results) {
                for (answer, truth) in result.answers.into_iter().zip(&row.truths) {
                    labelled.push(Labelled { id: row.id.clone(), answer, truth: *truth });
                }
            }
            bar.inc(n as u64);
        }
        bar.finish_and_clear();
        Ok(labelled)
    }
}

fn row(line: usize, text: &str, path: &Path, asked: Option<&Asked>) -> Result<Row> {
    let mut value = parse(text, path, "write one JSON object a line")?;
    let Some(fields) = value.as_object_mut() else { bail!("a row is an object with `state` and `labels`") };
    let state = fields.remove("state").filter(|s| !s.is_null()).context("the row has no `state`")?;
    let (state, questions) = match (fields.remove("questions"), asked) {
        (Some(own), _) => (state, own),
        (None, Some(asked)) => (asked.place(state), asked.questions.clone()),
        (None, None) => bail!("the row has no `questions`, and neither --questions nor --preset is given"),
    };
    let Some(Value::Object(labels)) = fields.remove("labels") else {
        bail!("the row has no `labels`; write {{\"question id\": label}}")
    };
    ensure!(!labels.is_empty(), "`labels` is empty; leave the row out");
    let parsed = parse_questions(&questions)?;
    if let Some(id) = labels.keys().find(|id| !parsed.iter().any(|q| q.id == **id)) {
        let ids: Vec<&str> = parsed.iter().map(|q| q.id.as_str()).collect();
        bail!("`labels` names the question {id:?}, but asked are {}", ids.join(", "));
    }
    let mut labelled = Map::new();
    let mut truths = Vec::new();
    for question in &parsed {
        if let Some(label) = labels.get(&question.id) {
            truths.push(truth(question, label)?);
            labelled.insert(question.id.clone(), questions[&question.id].clone());
        }
    }
    let id = match fields.get("id") {
        None | Some(Value::Null) => line.to_string(),
        Some(Value::String(id)) => id.clone(),
        Some(other) => other.to_string(),
    };
    let lang = fields.get("lang").and_then(Value::as_str).map(str::to_owned);
    Ok(Row { line, id, state, questions: labelled.into(), truths, lang })
}
