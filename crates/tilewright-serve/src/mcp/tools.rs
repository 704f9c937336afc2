//! The tools: what they take, and what they do.

use std::sync::{Arc, OnceLock};

use rmcp::model::{Tool, ToolAnnotations};
use serde_json::{Map, Value, json};
use tilewright_decide::route::{Hints, LanguageGuess};
use tilewright_decide::{SHORTLIST_K, TOURNAMENT_GROUP, presets};

use crate::config::Dialect;
use crate::dialect;
use crate::fault::Fault;
use crate::service::{Call, Outcome, Service, Task};
use crate::wire::{self, Form, Rules};

type Arguments = Map<String, Value>;

/// Requests of a batch that are answered at once; their rows share passes.
const AT_ONCE: usize = 16;

/// All of them. None changes anything outside.
pub fn all() -> Vec<Tool> {
    static MADE: OnceLock<Vec<Tool>> = OnceLock::new();
    MADE.get_or_init(make).clone()
}

fn make() -> Vec<Tool> {
    let state = json!({"description": "The text, conversation (a list) or document (an object) that the questions are about. Not null."});
    let questions = json!({
        "type": "object",
        "description": "Definitions by id. Each has `type` (choice, score or noul, that is yes or no), `instructions` (the question) and, for choice and \
                        score, `criteria`: labels with descriptions, or levels from low to high.",
        "additionalProperties": {"type": "object"},
    });
    let text = |words: &str| json!({"type": ["string", "null"], "description": words});
    let count = |words: &str| json!({"type": ["integer", "null"], "minimum": 1, "description": words});
    let hints = || {
        vec![
            ("model", text("The checkpoint; left out, it is chosen by language.")),
            ("task", text("Chooses the checkpoint by task.")),
            ("lang", text("The language of the state, such as de.")),
            ("lang_guess", text("A weaker hint at the language.")),
        ]
    };
    let sizes = || {
        let mut all = hints();
        all.push((
            "max_len",
            count("Tokens of a row; what does not fit of the state is left out and reported in `usage`."),
        ));
        all.push(("head_max_len", count("Tokens of instructions and options.")));
        all.push((
            "min_confidence",
            json!({"description": "0 to 1, or by kind: answers below it are marked as abstained."}),
        ));
        all
    };
    let tool = |name: &'static str, words: &'static str, needed: &[(&str, Value)], more: Vec<(&str, Value)>| {
        let required: Vec<&str> = needed.iter().map(|(name, _)| *name).collect();
        let properties: Map<String, Value> =
            needed.iter().cloned().chain(more).map(|(name, schema)| (name.to_owned(), schema)).collect();
        let mut schema = Map::new();
        schema.insert("type".into(), "object".into());
        schema.insert("properties".into(), properties.into());
        schema.insert("required".into(), required.into());
        Tool::new(name, words, schema).annotate(ToolAnnotations::new().read_only(true).open_world(false))
    };
    let asked = [("state", state.clone()), ("questions", questions.clone())];
    let requests = json!({
        "type": "array", "minItems": 1, "maxItems": 64,
        "description": "Each an object with `state`, `questions` and the other arguments of laya_predict.",
        "items": {"type": "object", "required": ["state", "questions"]},
    });
    let routed = json!({
        "type": "array", "minItems": 1, "maxItems": 64,
        "description": "Each an object with `state` and the other arguments of laya_route.",
        "items": {"type": "object", "required": ["state"]},
    });
    let with = |argument: (&'static str, Value)| [argument].into_iter().chain(sizes()).collect::<Vec<_>>();
    let schema = json!({"type": "object", "description": "A JSON schema: enums, booleans and bounded integers. The answer is a value in its shape."});
    let preset = json!({"enum": presets::NAMES, "description": "triage of support messages, email, guard of prompts, moderation of posts, router of requests."});
    let mut long = hints();
    long.push(("window", count("Tokens of a window.")));
    long.push(("stride", count("Tokens from one window to the next.")));
    vec![
        tool("laya_predict", "Answer typed questions about one state, with probabilities.", &asked, sizes()),
        tool(
            "laya_predict_batch",
            "Answer many requests at once. Results come in their order; one that cannot be answered says why in its place.",
            &[("requests", requests)],
            vec![("min_confidence", json!({"description": "For the requests that have none of their own."}))],
        ),
        tool(
            "laya_predict_long",
            "Answer questions about a state of any length: it is read in windows, and the most confident window wins.",
            &asked,
            long,
        ),
        tool(
            "laya_route",
            "Tell which checkpoint would answer, and why. Nothing is predicted.",
            &[("state", state.clone())],
            [("questions", questions)].into_iter().chain(hints()).collect(),
        ),
        tool(
            "laya_route_batch",
            "Tell which checkpoint would answer each of many requests, and how many each. Nothing is predicted.",
            &[("requests", routed)],
            Vec::new(),
        ),
        tool(
            "laya_decide",
            "Fill in a JSON schema from a state.",
            &[("state", state.clone()), ("schema", schema)],
            sizes(),
        ),
        tool(
            "laya_shortlist",
            "Answer choices of many options: the options most similar to the question and the state are kept, then one is chosen among them. Fast; for \
             accuracy use laya_tournament.",
            &asked,
            with(("k", count("Options to keep of each choice; 20 if left out."))),
        ),
        tool(
            "laya_tournament",
            "Answer choices of many options in groups, whose winners meet in a last question. Probabilities are those of the last question.",
            &asked,
            with((
                "group_size",
                json!({"type": ["integer", "null"], "minimum": 2, "description": "Options of a group; 16 if left out."}),
            )),
        ),
        tool(
            "laya_preset",
            "Answer the ready-made questions of a preset.",
            &[("preset", preset), ("state", state)],
            sizes(),
        ),
        tool("laya_status", "Tell which checkpoints are there, and the limits.", &[], Vec::new()),
    ]
}

/// Calls a tool; `None` if there is none of that name.
pub async fn call(service: &Arc<Service>, name: &str, arguments: Arguments) -> Option<Result<Value, Fault>> {
    Some(match name {
        "laya_predict" => predict(service, arguments).await,
        "laya_predict_batch" => batch(service, arguments).await,
        "laya_predict_long" => long(service, arguments).await,
        "laya_route" => route(service, &arguments),
        "laya_route_batch" => route_batch(service, arguments),
        "laya_decide" => decide(service, arguments).await,
        "laya_shortlist" => narrowed(service, arguments, "k", SHORTLIST_K, 1, |k| Task::Shortlist { k }).await,
        "laya_tournament" => {
            let task = |group| Task::Tournament { group };
            narrowed(service, arguments, "group_size", TOURNAMENT_GROUP, 2, task).await
        }
        "laya_preset" => preset(service, arguments).await,
        "laya_status" => Ok(status(service)),
        _ => return None,
    })
}

/// Arguments as the body of a request: one set of checks for every way in.
fn read(service: &Service, arguments: &Arguments) -> Result<Call, Fault> {
    let narrowed_above = service.tournament().map_or(usize::MAX, |t| t.above);
    read_narrowed(service, arguments, service.most_options(), narrowed_above)
}

/// The same where choices may have `most_options`, and those of more than `narrowed_above` are not read in one pass.
fn read_narrowed(
    service: &Service,
    arguments: &Arguments,
    most_options: usize,
    narrowed_above: usize,
) -> Result<Call, Fault> {
    let body = serde_json::to_vec(arguments).map_err(|e| Fault::Failed(e.to_string()))?;
    let rules = Rules { dialect: Dialect::Laya, limits: &service.limits, most_options, narrowed_above };
    wire::parse(&body, Form::Single, rules)
}

async fn one(service: &Arc<Service>, call: Call) -> Result<Outcome, Fault> {
    let outcomes = service.call(call).await?.outcomes;
    outcomes.into_iter().next().ok_or_else(|| Fault::Failed("no outcome of one state".to_owned()))
}

async fn predict(service: &Arc<Service>, arguments: Arguments) -> Result<Value, Fault> {
    let outcome = one(service, read(service, &arguments)?).await?;
    Ok(dialect::write(&outcome, Dialect::Laya))
}

/// The `requests` of a batch, taken out.
fn requests(service: &Service, arguments: &mut Arguments) -> Result<Vec<Value>, Fault> {
    let requests = match arguments.remove("requests") {
        Some(Value::Array(requests)) if !requests.is_empty() => requests,
        _ => {
            let words = "`requests` must be a list with one request at least";
            return Err(Fault::invalid(&["requests"], "list_type", words));
        }
    };
    let most = service.limits.states;
    if requests.len() > most {
        return Err(Fault::TooLarge(format!("{} requests; the limit is {most}", requests.len())));
    }
    Ok(requests)
}

/// What stands in place of an answer.
fn instead(fault: &Fault) -> Value {
    json!({"error": fault.kind(), "message": fault.message()})
}

async fn batch(service: &Arc<Service>, mut arguments: Arguments) -> Result<Value, Fault> {
    let requests = requests(service, &mut arguments)?;
    let mut results = Vec::with_capacity(requests.len());
    for some in requests.chunks(AT_ONCE) {
        let mut running = Vec::new();
        for request in some {
            let mut own = request.as_object().cloned().unwrap_or_default();
            if let (false, Some(gate)) = (own.contains_key("min_confidence"), arguments.get("min_confidence")) {
                own.insert("min_confidence".into(), gate.clone());
            }
            let service = service.clone();
            running.push(Dropped(tokio::spawn(async move { predict(&service, own).await })));
        }
        for mut task in running {
            let result = (&mut task.0).await.unwrap_or_else(|e| Err(Fault::Failed(e.to_string())));
            results.push(result.unwrap_or_else(|f| instead(&f)));
        }
    }
    Ok(json!({"results": results}))
}

/// A task that ends when nobody waits for it any longer.
struct Dropped<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for Dropped<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn long(service: &Arc<Service>, arguments: Arguments) -> Result<Value, Fault> {
    let most = service.limits.token_budget;
    let count = |key: &str| match arguments.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64().filter(|n| (1..=most as u64).contains(n)) {
            Some(n) => Ok(Some(n as usize)),
            None => Err(Fault::invalid(&[key], "int_type", format!("`{key}` must be an integer from 1 to {most}"))),
        },
    };
    if arguments.get("min_confidence").is_some_and(|v| !v.is_null()) {
        let words = "long states have no `min_confidence`: windows compete by their confidence";
        return Err(Fault::invalid(&["min_confidence"], "value_error", words));
    }
    let task = Task::Long { window: count("window")?, stride: count("stride")? };
    let call = Call { task, ..read(service, &arguments)? };
    Ok(dialect::write(&one(service, call).await?, Dialect::Laya))
}

fn route(service: &Service, arguments: &Arguments) -> Result<Value, Fault> {
    let state = arguments.get("state").filter(|s| !s.is_null());
    let state = state.ok_or_else(|| Fault::invalid(&["state"], "missing", "`state` is absent or null"))?;
    let text = |key: &str| match arguments.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str())),
        Some(_) => Err(Fault::invalid(&[key], "string_type", format!("`{key}` must be a string or null"))),
    };
    let none = json!({});
    let questions = arguments.get("questions").unwrap_or(&none);
    let pinned = service.models.pinned(text("model")?)?;
    let hints = Hints {
        model: pinned.as_deref(),
        task: text("task")?,
        lang: text("lang")?,
        lang_guess: text("lang_guess")?.map(LanguageGuess::Code),
    };
    Ok(service.models.route(state, questions, hints)?.to_json())
}

/// The decision of each request; one that cannot be made says why in its place.
fn route_batch(service: &Service, mut arguments: Arguments) -> Result<Value, Fault> {
    let mut counts = Map::new();
    let decide = |request: &Value| {
        let decision = match request.as_object() {
            Some(own) => route(service, own),
            None => Err(Fault::invalid(&["requests"], "dict_type", "a request must be an object")),
        };
        let decision = decision.unwrap_or_else(|f| instead(&f));
        if let Some(model) = decision.get("model").and_then(Value::as_str) {
            let n = counts.get(model).and_then(Value::as_u64).unwrap_or(0);
            counts.insert(model.to_owned(), (n + 1).into());
        }
        decision
    };
    let decisions: Vec<Value> = requests(service, &mut arguments)?.iter().map(decide).collect();
    Ok(json!({"decisions": decisions, "model_counts": counts}))
}

/// Choices of many options by one of the ways that take a number, which stands under `key`.
async fn narrowed(
    service: &Arc<Service>,
    mut arguments: Arguments,
    key: &str,
    usual: usize,
    least: usize,
    task: impl FnOnce(usize) -> Task,
) -> Result<Value, Fault> {
    let most = service.limits.narrowed_options;
    let n = match arguments.remove(key) {
        None | Some(Value::Null) => usual,
        Some(value) => match value.as_u64().filter(|n| (least as u64..=most as u64).contains(n)) {
            Some(n) => n as usize,
            None => {
                let words = format!("`{key}` must be an integer from {least} to {most}");
                return Err(Fault::invalid(&[key], "int_type", words));
            }
        },
    };
    let call = Call { task: task(n), ..read_narrowed(service, &arguments, most, n)? };
    let outcome = one(service, call).await?;
    let mut value = dialect::write(&outcome, Dialect::Laya);
    // An order of options that could not be kept, for one.
    if let (Some(fields), false) = (value.as_object_mut(), outcome.prediction.warnings.is_empty()) {
        fields.insert("warnings".into(), outcome.prediction.warnings.into());
    }
    Ok(value)
}

async fn decide(service: &Arc<Service>, mut arguments: Arguments) -> Result<Value, Fault> {
    let schema = arguments
        .remove("schema")
        .filter(Value::is_object)
        .ok_or_else(|| Fault::invalid(&["schema"], "dict_type", "`schema` must be a JSON schema of an object"))?;
    let questions = tilewright_decide::schema_questions(&schema)
        .map_err(|e| Fault::invalid(&["schema"], "value_error", e.to_string()))?;
    arguments.insert("questions".into(), questions);
    let call = Call { task: Task::Decide { schema }, ..read(service, &arguments)? };
    let outcome = one(service, call).await?;
    let mut value = outcome.details.unwrap_or_default();
    if let (Some(fields), Some(routing)) = (value.as_object_mut(), outcome.prediction.extra.get("routing")) {
        fields.entry("routing").or_insert_with(|| routing.clone());
    }
    Ok(value)
}

async fn preset(service: &Arc<Service>, mut arguments: Arguments) -> Result<Value, Fault> {
    let name = arguments.remove("preset").and_then(|n| n.as_str().map(str::to_owned)).unwrap_or_default();
    let Some(questions) = presets::by_name(&name) else {
        let words = format!("there is no preset {name:?}; use one of {}", presets::NAMES.join(", "));
        return Err(Fault::invalid(&["preset"], "value_error", words));
    };
    // The questions name a field of the state; a plain text is put there.
    if let (Some(Value::String(text)), Some(field)) = (arguments.get("state"), presets::state_field(&questions)) {
        let state = json!({ field: text });
        arguments.insert("state".into(), state);
    }
    arguments.insert("questions".into(), questions);
    predict(service, arguments).await
}

fn status(service: &Service) -> Value {
    let models: Vec<Value> = service
        .models
        .status()
        .into_iter()
        .map(|m| json!({"name": m.key, "loaded": m.loaded, "sha256": m.sha256, "error": m.error}))
        .collect();
    let limits = &service.limits;
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "ready": service.is_ready(),
        "answering": service.in_flight(),
        "models": models,
        "presets": presets::NAMES,
        "limits": {
            "questions": limits.questions, "options": service.most_options(), "levels": limits.levels, "states": limits.states,
            "state_chars": limits.state_chars, "token_budget": limits.token_budget,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_have_the_names_that_clients_know_and_schemas_that_hold_together() {
        let names: Vec<String> = all().iter().map(|t| t.name.to_string()).collect();
        let known = [
            "predict",
            "predict_batch",
            "predict_long",
            "route",
            "route_batch",
            "decide",
            "shortlist",
            "tournament",
            "preset",
            "status",
        ];
        assert_eq!(names, known.map(|n| format!("laya_{n}")));
        for tool in all() {
            let schema = &tool.input_schema;
            assert_eq!(schema["type"], "object", "{}", tool.name);
            for needed in schema["required"].as_array().unwrap() {
                assert!(schema["properties"].get(needed.as_str().unwrap()).is_some(), "{}: {needed}", tool.name);
            }
            assert!(tool.annotations.unwrap().read_only_hint == Some(true), "{}", tool.name);
        }
    }
}
