//! One function a route.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::response::Response;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{AppState, Caller, body, dialect_of, json_response, openapi, refused, respond};
use crate::config::Dialect;
use crate::dialect;
use crate::fault::Fault;
use crate::playground;
use crate::service::{Reply, Task};
use crate::telemetry::Told;
use crate::wire::{self, Form, Rules};

/// A header by which a client gives its request less time, in milliseconds.
const TIMEOUT: &str = "x-timeout-ms";

pub async fn playground() -> Response {
    let page = playground::page();
    let mut response = respond(StatusCode::OK, "text/html; charset=utf-8", page.html.as_str());
    if let Ok(policy) = HeaderValue::from_str(&page.policy) {
        response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
    }
    response
}

pub async fn openapi(State(state): State<Arc<AppState>>) -> Response {
    json_response(StatusCode::OK, &openapi::document(&state))
}

pub async fn not_found(State(state): State<Arc<AppState>>, uri: Uri) -> Response {
    let fault = Fault::NotFound(super::shown(uri.path()));
    state.service.metrics.fault(fault.kind());
    fault.response(dialect_of(uri.path(), state.config.dialect))
}

pub async fn wrong_method(State(state): State<Arc<AppState>>, uri: Uri) -> Response {
    let is_post = ["/systemone", "/batch", "/explain"].iter().any(|end| uri.path().ends_with(end));
    let fault = Fault::Method(if is_post { "POST" } else { "GET, HEAD" });
    state.service.metrics.fault(fault.kind());
    fault.response(dialect_of(uri.path(), state.config.dialect))
}

/// `/health`: ready or not, and for who has a key what is loaded and what went wrong.
pub async fn health(State(state): State<Arc<AppState>>, request: Request) -> Response {
    let service = &state.service;
    let word = match (service.is_draining(), service.is_ready()) {
        (true, _) => "draining",
        (false, true) => "ok",
        (false, false) => "loading",
    };
    let status = if service.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let header = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    if state.auth.is_on() && state.auth.check(header).is_err() {
        return json_response(status, &json!({"status": word}));
    }
    let models = service.models.status();
    let waiting = service.engine.waiting();
    let audit = state.audit.as_ref().map(|audit| {
        let error = audit.error();
        json!({"ok": error.is_none(), "error": error, "failures": service.metrics.audit_failures.get()})
    });
    let loaded: Vec<&str> = models.iter().filter(|m| m.loaded).map(|m| m.key.as_str()).collect();
    let body = json!({
        "status": word,
        "version": env!("CARGO_PKG_VERSION"),
        "uptime_seconds": state.started.elapsed().as_secs(),
        "loaded": loaded,
        "models": models.iter().map(|m| json!({
            "name": m.key, "loaded": m.loaded, "sha256": m.sha256, "error": m.error,
            "loaded_at": m.loaded_at.and_then(seconds),
        })).collect::<Vec<_>>(),
        "in_flight": service.in_flight(),
        "queue": {
            "requests": waiting.jobs, "tokens": waiting.tokens,
            "expected_seconds": service.engine.backlog().as_secs_f64(),
            "pack_seconds": service.engine.busy_for().map(|busy| busy.as_secs_f64()),
        },
        "connections": state.connections.count(),
        "audit": audit,
    });
    json_response(status, &body)
}

fn seconds(time: SystemTime) -> Option<u64> {
    Some(time.duration_since(UNIX_EPOCH).ok()?.as_secs())
}

pub async fn metrics(State(state): State<Arc<AppState>>) -> Response {
    let service = &state.service;
    let waiting = service.engine.waiting();
    let loaded = service.models.status().iter().filter(|m| m.loaded).count();
    let busy = service.engine.busy_for().unwrap_or_default();
    let audit = f64::from(u8::from(state.audit.as_ref().is_none_or(|a| a.error().is_none())));
    let text = service.metrics.text(&[
        ("in_flight", "Requests that are being answered.", service.in_flight() as f64),
        ("queue_requests", "Passes that are not complete.", waiting.jobs as f64),
        ("queue_tokens", "Tokens of rows that wait.", waiting.tokens as f64),
        ("queue_seconds", "How long what waits is expected to take.", service.engine.backlog().as_secs_f64()),
        ("pack_age_seconds", "How long the pack on the device has been there.", busy.as_secs_f64()),
        ("connections_open", "Open connections.", state.connections.count() as f64),
        ("models_loaded", "Loaded checkpoints.", loaded as f64),
        ("audit_ok", "Whether the last line of the audit file was written.", audit),
        ("ready", "Whether requests are welcome.", f64::from(u8::from(service.is_ready()))),
        ("uptime_seconds", "Since the start.", state.started.elapsed().as_secs_f64()),
    ]);
    respond(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", text)
}

/// `/v1/models`: the name that leaves the choice to the router, and all that can be pinned.
pub async fn models(State(state): State<Arc<AppState>>) -> Response {
    let all = state.service.models.status();
    let date = |time: Option<SystemTime>| day(time.unwrap_or(UNIX_EPOCH));
    let newest = all.iter().filter_map(|m| m.changed_at).max();
    let mut models = vec![json!({
        "name": dialect::JEV_MODEL,
        "description": "Chooses the checkpoint by the language of the state and by the hints of the request",
        "release_date": date(newest),
    })];
    models.extend(all.iter().map(|m| {
        let description = format!("The Laya checkpoint `{}`", m.key);
        json!({"name": m.key, "description": description, "release_date": date(m.changed_at), "x_loaded": m.loaded})
    }));
    json_response(StatusCode::OK, &json!({"models": models}))
}

/// The day of a time, as YYYY-MM-DD (Howard Hinnant's `civil_from_days`).
fn day(time: SystemTime) -> String {
    let days = seconds(time).unwrap_or(0) / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

/// The three routes that ask a model.
pub async fn answer(State(state): State<Arc<AppState>>, request: Request, dialect: Dialect, form: Form) -> Response {
    let caller = request.extensions().get::<Caller>().cloned().unwrap_or(Caller { key: None, id: String::new() });
    match asked(&state, request, dialect, form, &caller).await {
        Ok(response) => response,
        Err(fault) => refused(&state, &fault, dialect, &caller.id),
    }
}

async fn asked(
    state: &Arc<AppState>,
    request: Request,
    dialect: Dialect,
    form: Form,
    caller: &Caller,
) -> Result<Response, Fault> {
    let service = &state.service;
    // Who will be refused anyway is refused before his body is read.
    service.has_place()?;
    let (parts, content) = request.into_parts();
    let limits = &service.limits;
    let content = body::read(&state.memory, &parts.headers, content, limits.body_bytes, service.timing.body).await?;
    let start = Instant::now();
    let rules = Rules {
        dialect,
        limits,
        most_options: service.most_options(),
        narrowed_above: service.tournament().map_or(usize::MAX, |t| t.above),
    };
    if state.config.log_text {
        tracing::info!(id = caller.id, body = %String::from_utf8_lossy(&content.bytes), "asked");
    }
    let call = wire::parse(&content.bytes, form, rules)?;
    let hash = state.audit.as_ref().map(|_| hex(&Sha256::digest(&content.bytes)));
    drop(content);
    let explain = call.task == Task::Explain;
    let time = parts.headers.get(TIMEOUT).and_then(|v| v.to_str().ok()?.parse().ok()).map(Duration::from_millis);
    let reply = service.call_within(call, time.unwrap_or(service.timing.request)).await?;
    service.metrics.request_seconds.observe(start.elapsed().as_secs_f64());
    if let (Some(audit), Some(hash)) = (&state.audit, hash) {
        audit.record(&record(&reply, caller, &hash));
    }
    let out = match form {
        Form::Batch => dialect::write_batch(&reply.outcomes, dialect),
        _ if explain => json!({
            "result": dialect::write(first(&reply)?, dialect),
            "explanations": first(&reply)?.details,
            "model": first(&reply)?.model,
        }),
        _ => dialect::write(first(&reply)?, dialect),
    };
    if state.config.log_text {
        tracing::info!(id = caller.id, answer = %out, "answered");
    }
    let mut response = json_response(StatusCode::OK, &out);
    tell(&mut response, &reply);
    Ok(response)
}

fn first(reply: &Reply) -> Result<&crate::service::Outcome, Fault> {
    reply.outcomes.first().ok_or_else(|| Fault::Failed("no outcome".into()))
}

/// What the envelope has no room for, in headers and for the log: how long it took, who answered, whether something of the state was left out.
fn tell(response: &mut Response, reply: &Reply) {
    let ms = reply.took.as_secs_f64() * 1e3;
    let dropped: usize = reply.outcomes.iter().filter_map(|o| Some(o.prediction.usage.state.as_ref()?.dropped)).sum();
    let mut models: Vec<&str> = reply.outcomes.iter().map(|o| o.model.as_str()).collect();
    models.dedup();
    let (model, ended) = (models.join(","), SystemTime::now());
    response.extensions_mut().insert(Told { model: model.clone(), took: reply.took, spent: reply.spent, ended });
    let headers = response.headers_mut();
    for (name, value) in [
        ("x-inference-time-ms", format!("{ms:.2}")),
        ("server-timing", format!("inference;dur={ms:.2}")),
        ("x-tilewright-model", model),
        ("x-tilewright-state-tokens-dropped", dropped.to_string()),
    ] {
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(name, value);
        }
    }
}

/// The line of the audit file: hashes and answers, no text of the request but labels.
fn record(reply: &Reply, caller: &Caller, hash: &str) -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let results: Vec<Value> = reply
        .outcomes
        .iter()
        .map(|o| {
            let answers = o.prediction.to_json()["answers"].take();
            json!({"model": o.model, "model_sha256": o.model_sha256, "answers": answers})
        })
        .collect();
    json!({
        "time": now.as_secs_f64(),
        "id": caller.id,
        "key": caller.key,
        "request_sha256": hash,
        "results": results,
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_those_of_the_calendar() {
        for (seconds, want) in [
            (0, "1970-01-01"),
            (951_782_400, "2000-02-29"),
            (1_709_251_199, "2024-02-29"),
            (1_796_083_200, "2026-12-01"),
        ] {
            assert_eq!(day(UNIX_EPOCH + Duration::from_secs(seconds)), want);
        }
    }
}
