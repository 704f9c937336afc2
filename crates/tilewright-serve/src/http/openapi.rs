//! `/openapi.json`.

use serde_json::{Value, json};

use super::AppState;
use crate::config::Dialect;

/// The description of this server: its dialect at the plain paths, both at their own, its limits.
pub fn document(state: &AppState) -> Value {
    let mut paths = serde_json::Map::new();
    for (prefix, dialect) in [("", state.config.dialect), ("/jev", Dialect::Jev), ("/laya", Dialect::Laya)] {
        let name = dialect.name();
        let response = match dialect {
            Dialect::Jev => "JevResponse",
            Dialect::Laya => "LayaResponse",
        };
        let ask = |summary: &str, request: &str, answer: Value| {
            json!({"post": {
                "summary": format!("{summary} (dialect `{name}`)"),
                "requestBody": {"required": true, "content": {"application/json": {"schema": reference(request)}}},
                "responses": {
                    "200": {"description": "Answers", "content": {"application/json": {"schema": answer}}},
                    "400": error("No request at all (dialect `laya`), or a body that broke off"),
                    "401": error("No key, or a wrong one"),
                    "408": error("The body did not come in time"),
                    "413": error("Larger than a limit"),
                    "415": error("A content encoding other than gzip, zstd or none"),
                    "422": {"description": "Invalid; `detail` says where", "content": {"application/json": {"schema":
                        if dialect == Dialect::Jev { reference("ValidationError") } else { reference("Error") }}}},
                    "429": error("This key asks too often; `Retry-After` says when to come back"),
                    "500": error("Our fault"),
                    "503": error("All places are taken, the time is over, or the server stops; `Retry-After` says when to come back"),
                },
                "security": [{"bearer": []}, {}],
            }})
        };
        paths.insert(
            format!("{prefix}/v1/systemone"),
            ask("Answer questions about a state", "Request", reference(response)),
        );
        let batch = json!({"type": "object", "properties": {
            "results": {"type": "array", "items": reference(response)}, "total_usage": reference("Usage")}});
        paths.insert(
            format!("{prefix}/v1/systemone/batch"),
            ask("The same questions about many states", "BatchRequest", batch),
        );
        let explained = json!({"type": "object", "properties": {
            "result": reference(response),
            "explanations": {"type": "array", "items": {"type": "object"}},
            "model": {"type": "string"}}});
        paths.insert(
            format!("{prefix}/v1/explain"),
            ask("The answers, and the rows as the model reads them", "Request", explained),
        );
        paths.insert(format!("{prefix}/v1/models"), read("The checkpoints", "application/json"));
    }
    paths.insert(
        "/health".into(),
        read("Whether requests are welcome: 200, or 503 while loading and stopping", "application/json"),
    );
    paths.insert("/metrics".into(), read("Counts in the text format of Prometheus", "text/plain"));
    paths.insert("/openapi.json".into(), read("This description", "application/json"));
    paths.insert("/".into(), read("A page to try questions on", "text/html"));
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Tilewright",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Typed decisions: a state and questions in, calibrated probabilities out.",
        },
        "paths": paths,
        "components": {"schemas": schemas(state), "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    })
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

fn error(description: &str) -> Value {
    json!({"description": description, "content": {"application/json": {"schema": reference("Error")}}})
}

fn read(summary: &str, kind: &str) -> Value {
    json!({"get": {"summary": summary, "responses": {"200": {"description": summary, "content": {kind: {}}}}}})
}

fn schemas(state: &AppState) -> Value {
    let limits = &state.service.limits;
    let controls = json!({
        "questions": {"type": "object", "minProperties": 1, "maxProperties": limits.questions,
            "additionalProperties": reference("Question")},
        "model": {"type": ["string", "null"], "description": "A name of /v1/models; any other plain name leaves the choice to the router"},
        "task": {"type": ["string", "null"]},
        "lang": {"type": ["string", "null"], "description": "Language of the state, such as de-AT"},
        "lang_guess": {"type": ["string", "null"]},
        "max_len": {"type": ["integer", "null"], "minimum": 1, "maximum": limits.token_budget},
        "head_max_len": {"type": ["integer", "null"], "minimum": 1, "maximum": limits.token_budget},
        "min_confidence": {"description": "A number from 0 to 1, or thresholds by bucket"},
    });
    let with = |key: &str, value: Value| {
        let mut properties = controls.clone();
        properties[key] = value;
        json!({"type": "object", "required": [key, "questions"], "properties": properties})
    };
    let state_schema = json!({"type": ["string", "object", "array", "number", "boolean"],
        "description": format!("Its text has {} characters at most", limits.state_chars)});
    let text = json!({"type": ["string", "object", "array", "null"]});
    let probabilities =
        json!({"type": "object", "additionalProperties": {"type": "number", "minimum": 0, "maximum": 1}});
    let answer = |kind: &str, mut properties: Value| {
        properties["type"] = json!({"const": kind});
        json!({"type": "object", "properties": properties})
    };
    let number = json!({"type": "number"});
    let usage = json!({"type": "object", "required": ["input_tokens", "output_tokens"], "properties": {
        "input_tokens": {"type": "integer"}, "output_tokens": {"type": "integer"}}});
    let mut envelope = json!({"type": "object", "required": ["model", "answers", "usage"], "properties": {
        "model": {"type": "string"},
        "answers": {"type": "object", "additionalProperties": {"oneOf": [
            answer("noul", json!({"noul": number})),
            answer("choice", json!({"choice": {}, "probabilities": probabilities, "confidence": number})),
            answer("score", json!({"score": number, "legend": {"type": "object"}, "probabilities": probabilities,
                "confidence": number})),
        ]}},
        "usage": reference("Usage"),
    }});
    let jev = envelope.clone();
    envelope["properties"]["routing"] = json!({"type": "object"});
    json!({
        "Question": {"type": "object", "required": ["type"], "properties": {
            "type": {"enum": ["noul", "choice", "score"]},
            "instructions": text,
            "criteria": {"description": format!(
                "noul: descriptions of true and false; choice: descriptions by option, {} at most; score: descriptions of levels, {} at most",
                state.service.most_options(), limits.levels)},
            "labels": {"type": "object", "description": "noul: other words for false and true"},
            "option_order": {"type": "array", "items": {"type": "integer"}},
        }},
        "Request": with("state", state_schema.clone()),
        "BatchRequest": with("states", json!({"type": "array", "minItems": 1, "maxItems": limits.states, "items": state_schema})),
        "Usage": usage,
        "JevResponse": jev,
        "LayaResponse": envelope,
        "Error": {"type": "object", "properties": {"detail": {"oneOf": [
            {"type": "string"},
            {"type": "object", "properties": {"error_type": {"type": "string"}, "message": {"type": "string"}}},
        ]}}},
        "ValidationError": {"type": "object", "properties": {"detail": {"type": "array", "items": {"type": "object",
            "properties": {"loc": {"type": "array"}, "msg": {"type": "string"}, "type": {"type": "string"}}}}}},
    })
}
