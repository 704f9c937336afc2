//! States and questions from the command line and from files.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tilewright_decide::presets;

/// Where a state comes from.
#[derive(clap::Args, Debug)]
pub struct StateArgs {
    /// The text to decide about
    #[arg(long, value_name = "TEXT", group = "source")]
    pub state: Option<String>,
    /// The document to decide about, as JSON: an object, or a list of turns
    #[arg(long, value_name = "JSON", group = "source")]
    pub state_json: Option<String>,
    /// A file to decide about: JSON if its name ends with .json, else text; `-` reads text from standard input
    #[arg(long, value_name = "FILE", group = "source")]
    pub state_file: Option<PathBuf>,
}

impl StateArgs {
    /// The state. Text goes under the one field that the questions name in backticks, if they are a preset's.
    pub fn read(&self, asked: &Asked) -> Result<Value> {
        let state = match (&self.state, &self.state_json, &self.state_file) {
            (Some(text), ..) => Value::String(text.clone()),
            (_, Some(text), _) => {
                serde_json::from_str(text).context("--state-json is no JSON; for text use --state")?
            }
            (.., Some(path)) => {
                let text = read(path)?;
                if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")) {
                    parse(&text, path, "a name that ends with .json is read as JSON; rename a text to .txt")?
                } else {
                    Value::String(text)
                }
            }
            _ => bail!(
                "nothing to decide about; give --state TEXT, --state-json JSON, --state-file FILE or --batch FILE"
            ),
        };
        ensure!(!state.is_null(), "the state is null; give a text, an object or a list of turns");
        Ok(asked.place(state))
    }
}

/// Where questions come from.
#[derive(clap::Args, Debug)]
pub struct QuestionArgs {
    /// A JSON file of questions: definitions by id; `-` reads standard input
    #[arg(long, value_name = "FILE", group = "asks")]
    pub questions: Option<PathBuf>,
    /// Ready-made questions: triage, email, guard, moderation, router
    #[arg(long, value_name = "NAME", group = "asks", value_parser = presets::NAMES)]
    pub preset: Option<String>,
}

/// Questions, and where a text belongs in the state.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Definitions by id.
    pub questions: Value,
    /// The field of a preset.
    pub field: Option<String>,
}

impl QuestionArgs {
    /// The questions, if any were given.
    pub fn read(&self) -> Result<Option<Asked>> {
        if let Some(name) = &self.preset {
            let questions = presets::by_name(name).with_context(|| format!("no preset is called {name}"))?;
            let field = presets::state_field(&questions).map(str::to_owned);
            return Ok(Some(Asked { questions, field }));
        }
        let Some(path) = &self.questions else { return Ok(None) };
        let questions =
            parse(&read(path)?, path, "write an object of questions by id; `tilewright decide --help` shows one")?;
        // Found here, so that the message can name the file.
        tilewright_decide::parse_questions(&questions)
            .with_context(|| format!("{} cannot be asked", path.display()))?;
        Ok(Some(Asked { questions, field: None }))
    }
}

impl Asked {
    /// Questions as they are.
    pub fn plain(questions: Value) -> Self {
        Asked { questions, field: None }
    }

    /// Puts a text where the questions look for it.
    pub fn place(&self, state: Value) -> Value {
        match &self.field {
            Some(field) if state.is_string() => json!({ field: state }),
            _ => state,
        }
    }
}

/// A whole file, or standard input for `-`.
pub fn read(path: &Path) -> Result<String> {
    if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().lock().read_to_string(&mut text).context("read standard input")?;
        return Ok(text);
    }
    std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
}

/// JSON from a file.
pub fn parse(text: &str, path: &Path, hint: &str) -> Result<Value> {
    serde_json::from_str(text).with_context(|| format!("{} is no JSON; {hint}", path.display()))
}
