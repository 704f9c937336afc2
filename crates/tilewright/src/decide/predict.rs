//! `tilewright decide`: one state, or what every line of a batch needs.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tilewright_decide::route::{Decision, Request};
use tilewright_decide::{Gate, PredictOptions, Prediction};

use super::input::{Asked, QuestionArgs, StateArgs, parse, read};
use super::models::{LayaAgent, ModelArgs, Models};
use super::{batch, explain, table};

/// Command line of `decide` without a subcommand.
#[derive(clap::Args, Debug)]
#[group(skip)]
pub struct Args {
    #[command(flatten)]
    pub models: ModelArgs,
    #[command(flatten)]
    pub state: StateArgs,
    #[command(flatten)]
    pub questions: QuestionArgs,
    /// A JSON schema: answers become values of its properties
    #[arg(long, value_name = "FILE", group = "asks")]
    pub schema: Option<PathBuf>,
    /// States in a JSON Lines file, one a line: a text, or an object with `state` and perhaps `id`, `questions`, `lang`; `-` reads standard input
    #[arg(long, value_name = "FILE", group = "source")]
    pub batch: Option<PathBuf>,
    #[command(flatten)]
    pub to: batch::Output,
    #[command(flatten)]
    pub how: How,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
    /// Show the tokens that the model reads, what was cut, and raw logits
    #[arg(long, conflicts_with_all = ["batch", "long", "tournament", "shortlist", "schema"])]
    pub explain: bool,
    /// Tell which checkpoint would answer and why; nothing is loaded
    #[arg(long, conflicts_with_all = ["batch", "explain"])]
    pub route_only: bool,
}

/// How states are answered.
#[derive(clap::Args, Debug)]
pub struct How {
    /// Mark answers below this confidence as abstained: a number from 0 to 1, or a JSON object by bucket such as {"choice:3-5": 0.8, "default": 0.6}
    #[arg(long, value_name = "P", value_parser = gate)]
    pub min_confidence: Option<Gate>,
    /// Tokens of a row: question and state [default: the checkpoint's]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub max_len: Option<usize>,
    /// Tokens of instructions and options [default: the checkpoint's]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub head_max_len: Option<usize>,
    /// Language of the text, such as de or pt-BR: chooses checkpoint and temperatures
    #[arg(long, value_name = "CODE")]
    pub lang: Option<String>,
    /// Choose the checkpoint by task: typed-decisions, or a name of --model
    #[arg(long, value_name = "NAME")]
    pub task: Option<String>,
    /// Read a long text in overlapping windows; each answer is that of its surest window
    #[arg(long, conflicts_with_all = ["tournament", "shortlist", "schema", "min_confidence", "max_len", "head_max_len"])]
    pub long: bool,
    /// Tokens of a window
    #[arg(long, value_name = "N", requires = "long", value_parser = positive)]
    pub window: Option<usize>,
    /// Tokens from one window to the next
    #[arg(long, value_name = "N", requires = "long", value_parser = positive)]
    pub stride: Option<usize>,
    /// Let the labels of large choices compete in groups of this size
    #[arg(long, value_name = "SIZE", num_args = 0..=1, default_missing_value = "16", conflicts_with_all = ["shortlist", "schema"])]
    pub tournament: Option<usize>,
    /// Keep the labels of large choices that resemble the text most, this many
    #[arg(long, value_name = "K", num_args = 0..=1, default_missing_value = "20", conflicts_with = "schema")]
    pub shortlist: Option<usize>,
    /// Add the checkpoint's SHA-256 and the calibration's to the JSON
    #[arg(long)]
    pub provenance: bool,
}

fn gate(text: &str) -> Result<Gate, String> {
    let value: Value = serde_json::from_str(text)
        .map_err(|_| format!("`{text}` is no threshold; write a number such as 0.7, or a JSON object by bucket"))?;
    Gate::parse(&value).map_err(|e| e.to_string())
}

fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| format!("`{text}` is no number of tokens; write 1 or more"))
}

/// What is asked of every state.
#[derive(Clone, Debug)]
pub enum What {
    /// Questions.
    Questions(Asked),
    /// A schema, and the questions it asks.
    Schema(Value, Asked),
}

impl What {
    /// The questions.
    pub fn asked(&self) -> &Asked {
        match self {
            What::Questions(asked) | What::Schema(_, asked) => asked,
        }
    }
}

/// What came of one state.
pub struct Reply {
    /// The answers.
    pub prediction: Prediction,
    /// The result for programs.
    pub json: Value,
}

impl Args {
    /// What is asked, if the command line says so.
    pub fn what(&self) -> Result<Option<What>> {
        if let Some(path) = &self.schema {
            let schema = parse(&read(path)?, path, "write a JSON schema of an object with properties")?;
            let questions = tilewright_decide::schema_questions(&schema)
                .with_context(|| format!("{} cannot be asked", path.display()))?;
            return Ok(Some(What::Schema(schema, Asked::plain(questions))));
        }
        Ok(self.questions.read()?.map(What::Questions))
    }
}

impl How {
    /// The request of one state, without hints of its own.
    pub fn request(&self, state: Value, questions: Value, only: Option<&str>) -> Request {
        Request {
            model: only.map(str::to_owned),
            task: self.task.clone().filter(|_| only.is_none()),
            lang: self.lang.clone(),
            max_len: self.max_len,
            head_max_len: self.head_max_len,
            ..Request::new(state, questions)
        }
    }

    /// Whether states can be answered together.
    pub fn is_plain(&self, what: Option<&What>) -> bool {
        let schema = matches!(what, Some(What::Schema(..)));
        !self.long && !schema && self.tournament.is_none() && self.shortlist.is_none()
    }

    fn options(&self, request: &Request, decision: &Decision) -> PredictOptions {
        PredictOptions {
            lang: request.lang.clone().or(decision.language().map(str::to_owned)),
            max_len: request.max_len,
            head_max_len: request.head_max_len,
            gate: self.min_confidence.clone(),
            ..PredictOptions::default()
        }
    }

    /// Answers one request in whatever way was asked for.
    pub fn answer(&self, models: &mut Models, request: &Request, what: Option<&What>) -> Result<Reply> {
        let decision = models.router.route(request)?;
        let options = self.options(request, &decision);
        let agent = models.router.agent(&decision.model)?;
        let (state, questions) = (&request.state, &request.questions);
        let mut values = None;
        let mut prediction = match what {
            Some(What::Schema(schema, _)) => {
                let decided = agent.decide(state, schema, &options)?;
                values = Some(decided.details());
                decided.prediction
            }
            _ if self.long => agent.predict_long(state, questions, self.window, self.stride, &options)?,
            _ => match (self.tournament, self.shortlist) {
                (Some(size), _) => agent.predict_tournament(state, questions, size, &options)?,
                (_, Some(k)) => agent.predict_shortlist(state, questions, k, &options)?,
                _ => agent.predict(state, questions, &options)?,
            },
        };
        if models.only.is_none() {
            prediction.extra.insert("routing".to_owned(), decision.to_json());
        }
        let json = self.json(agent, &prediction, values);
        Ok(Reply { prediction, json })
    }

    /// The result for programs: the `laya` package's, with `values` first if a schema asked.
    pub fn json(&self, agent: &LayaAgent, prediction: &Prediction, values: Option<Value>) -> Value {
        let mut out = match values {
            Some(mut details) => {
                if let Some(routing) = prediction.extra.get("routing") {
                    details["routing"] = routing.clone();
                }
                details
            }
            None => prediction.to_json(),
        };
        if self.provenance {
            out["provenance"] = agent.provenance().to_json();
        }
        out
    }
}

/// Runs the subcommand.
pub fn run(args: &Args) -> Result<()> {
    let files = [&args.questions.questions, &args.schema, &args.state.state_file, &args.batch];
    let from_stdin = files.into_iter().flatten().filter(|path| path.as_os_str() == "-").count();
    ensure!(from_stdin < 2, "standard input can be read once, and `-` is given {from_stdin} times; name files");
    let what = args.what()?;
    if args.batch.is_some() {
        return batch::run(args, what.as_ref());
    }
    args.to.refuse_without_batch()?;
    let mut out = std::io::stdout().lock();
    if args.route_only {
        let asked = what.as_ref().map_or_else(|| Asked::plain(json!({})), |w| w.asked().clone());
        let state = args.state.read(&asked)?;
        let request = args.how.request(state, asked.questions, None);
        // Names of --model are known to the routing too.
        let decision = match args.models.is_empty() {
            true => route(&request)?,
            false => args.models.open(false)?.router.route(&request)?,
        };
        if args.json {
            writeln!(out, "{:#}", decision.to_json())?;
        } else {
            writeln!(out, "{}: {}", decision.model, decision.reason)?;
        }
        return Ok(());
    }
    let Some(what) = what else {
        bail!(
            "nothing is asked; give --questions FILE, --preset NAME or --schema FILE (`tilewright decide --help` shows one)"
        );
    };
    let state = args.state.read(what.asked())?;
    let mut models = args.models.open(args.how.provenance)?;
    let request = args.how.request(state, what.asked().questions.clone(), models.only);
    if args.explain {
        let decision = models.router.route(&request)?;
        let options = args.how.options(&request, &decision);
        let explanations =
            models.router.agent(&decision.model)?.explain(&request.state, &request.questions, &options)?;
        if args.json {
            let all: Vec<Value> = explanations.iter().map(|e| e.to_json()).collect();
            writeln!(out, "{:#}", Value::from(all))?;
        } else {
            write!(out, "{}", explain::text(&explanations))?;
        }
        return Ok(());
    }
    let reply = args.how.answer(&mut models, &request, Some(&what))?;
    models.tell_passes();
    for warning in &reply.prediction.warnings {
        eprintln!("note: {warning}");
    }
    if args.json {
        writeln!(out, "{:#}", reply.json)?;
    } else {
        if let Some(routing) = reply.prediction.extra.get("routing") {
            let text = |key: &str| routing[key].as_str().unwrap_or_default().to_owned();
            writeln!(out, "answered by {}: {}\n", text("model"), text("reason"))?;
        }
        if let Some(values) = reply.json.get("values") {
            writeln!(out, "{values:#}\n")?;
        }
        write!(out, "{}", table::text(&reply.prediction, out_is_terminal()))?;
    }
    Ok(())
}

fn out_is_terminal() -> bool {
    std::io::stdout().is_terminal()
}

/// Routing with the built-in names alone.
fn route(request: &Request) -> Result<Decision> {
    use tilewright_decide::route::{Hints, Registry, Rules};
    let registry = Registry::default();
    let rules = Rules { registry: &registry, default: "multilingual", auto_task: false, lang_guess: None };
    let hints = Hints { task: request.task.as_deref(), lang: request.lang.as_deref(), ..Hints::default() };
    Ok(rules.decide(&request.state, &request.questions, hints)?)
}
