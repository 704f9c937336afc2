//! The way in by HTTP.

mod body;
mod connections;
mod ending;
mod handlers;
mod openapi;
mod timed;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{get, post};
use serde_json::Value;

use crate::audit::Audit;
use crate::auth::Auth;
use crate::config::{Config, Dialect};
use crate::fault::Fault;
use crate::service::Service;
use crate::telemetry::{Telemetry, Told};
use crate::wire::Form;
use body::Memory;
pub use connections::{Connections, listen};

/// What handlers share.
pub struct AppState {
    /// What answers.
    pub service: Arc<Service>,
    /// Who may ask.
    pub auth: Auth,
    /// Where answers are recorded.
    pub audit: Option<Audit>,
    /// Where spans of requests go.
    pub telemetry: Option<Telemetry>,
    /// The settings.
    pub config: Config,
    /// The open connections.
    pub connections: Connections,
    memory: Memory,
    started: Instant,
    requests: AtomicU64,
    /// Differs from process to process, so that ids of requests do.
    instance: u64,
}

impl AppState {
    /// The state of a server.
    pub fn new(
        service: Arc<Service>,
        auth: Auth,
        audit: Option<Audit>,
        telemetry: Option<Telemetry>,
        config: Config,
    ) -> Self {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        AppState {
            connections: Connections::new(config.limits.connections, service.metrics.clone()),
            memory: Memory::new(config.limits.buffered_bytes),
            service,
            auth,
            audit,
            telemetry,
            config,
            started: Instant::now(),
            requests: AtomicU64::new(0),
            instance: since.as_nanos() as u64 ^ u64::from(std::process::id()).rotate_left(40),
        }
    }

    fn request_id(&self) -> String {
        let n = self.requests.fetch_add(1, Ordering::Relaxed);
        format!("{:012x}-{n:x}", self.instance & 0xffff_ffff_ffff)
    }
}

/// A JSON response.
pub fn json_response(status: StatusCode, body: &Value) -> Response {
    respond(status, "application/json", body.to_string())
}

/// A response of any kind.
pub fn respond(status: StatusCode, kind: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// All routes. What others add (`extra`) is behind the same key check and the same counts.
pub fn router(state: Arc<AppState>, extra: Router<Arc<AppState>>) -> Router {
    let mut router = Router::new()
        .route("/", get(handlers::playground))
        .route("/health", get(handlers::health))
        .route("/metrics", get(handlers::metrics))
        .route("/openapi.json", get(handlers::openapi));
    let default = state.config.dialect;
    for (prefix, dialect) in [("", default), ("/jev", Dialect::Jev), ("/laya", Dialect::Laya)] {
        for (path, form) in
            [("/v1/systemone", Form::Single), ("/v1/systemone/batch", Form::Batch), ("/v1/explain", Form::Explain)]
        {
            let answer =
                move |state: State<Arc<AppState>>, request: Request| handlers::answer(state, request, dialect, form);
            router = router.route(&format!("{prefix}{path}"), post(answer));
        }
        router = router.route(&format!("{prefix}/v1/models"), get(handlers::models));
    }
    router
        .merge(extra)
        .fallback(handlers::not_found)
        .method_not_allowed_fallback(handlers::wrong_method)
        .layer(middleware::from_fn_with_state(state.clone(), observed))
        .with_state(state)
}

/// Which dialect a path speaks.
fn dialect_of(path: &str, default: Dialect) -> Dialect {
    match path.split('/').nth(1) {
        Some("jev") => Dialect::Jev,
        Some("laya") => Dialect::Laya,
        _ => default,
    }
}

/// Who asked; put into the request for handlers and logs.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The name of the key, if one was needed.
    pub key: Option<String>,
    /// The id of the request.
    pub id: String,
}

/// Paths that need no key: whoever asks about health may be a balancer, and the page holds nothing.
const OPEN: [&str; 2] = ["/health", "/"];

/// Around every request: an id, the key, the count and the line in the log.
async fn observed(State(state): State<Arc<AppState>>, mut request: Request, next: Next) -> Response {
    let start = Instant::now();
    let id = state.request_id();
    let path = request.uri().path().to_owned();
    let route = request.extensions().get::<MatchedPath>().map(|m| m.as_str().to_owned());
    let method = request.method().clone();
    let dialect = dialect_of(&path, state.config.dialect);
    let header = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    let who = if OPEN.contains(&path.as_str()) { Ok(None) } else { state.auth.check(header) };
    let trace = state.telemetry.as_ref().map(|t| t.begin(&method, label(route.as_deref()), request.headers()));
    let mut key = None;
    let mut response = match who {
        Ok(name) => {
            key.clone_from(&name);
            request.extensions_mut().insert(Caller { key: name, id: id.clone() });
            next.run(request).await
        }
        Err(fault) => {
            state.service.metrics.fault(fault.kind());
            fault.response(dialect)
        }
    };
    let status = response.status().as_u16();
    let ms = milliseconds(start.elapsed());
    state.service.metrics.request(label(route.as_deref()), status);
    let told = response.extensions().get::<Told>();
    let (queue_ms, compute_ms) =
        (told.map(|t| milliseconds(t.spent.queue)), told.map(|t| milliseconds(t.spent.compute)));
    tracing::info!(id, %method, path = shown(&path), status, ms, queue_ms, compute_ms, key, "request");
    if let Some(trace) = trace {
        trace.end(status, &id, key.as_deref(), told);
    }
    if let Ok(value) = HeaderValue::from_str(&id) {
        let headers = response.headers_mut();
        headers.insert("x-request-id", value.clone());
        headers.insert("x-typesafe-request-id", value);
    }
    secure(response.headers_mut());
    response
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The route as a label, which must be one of few.
fn label(route: Option<&str>) -> &'static str {
    const ROUTES: [&str; 10] = [
        "/",
        "/health",
        "/metrics",
        "/openapi.json",
        "/v1/systemone",
        "/v1/systemone/batch",
        "/v1/explain",
        "/v1/models",
        "/mcp",
        "other",
    ];
    let route = route.unwrap_or("other");
    let route = route.strip_prefix("/jev").or(route.strip_prefix("/laya")).unwrap_or(route);
    ROUTES.into_iter().find(|r| *r == route).unwrap_or("other")
}

/// A path for the log, cut where somebody tries to fill it.
fn shown(path: &str) -> String {
    path.chars().take(200).collect()
}

fn secure(headers: &mut HeaderMap) {
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
}

/// The response to a fault, counted and told in the log.
fn refused(state: &AppState, fault: &Fault, dialect: Dialect, id: &str) -> Response {
    state.service.metrics.fault(fault.kind());
    match fault {
        Fault::Failed(cause) => tracing::error!(id, cause, "the request failed"),
        Fault::Cancelled => tracing::debug!(id, "the client has left"),
        other => tracing::debug!(id, kind = other.kind(), message = other.message(), "refused"),
    }
    fault.response(dialect)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_few_whatever_clients_ask_for() {
        assert_eq!(label(Some("/laya/v1/systemone")), "/v1/systemone");
        assert_eq!(label(Some("/v1/models")), "/v1/models");
        for other in [None, Some("/x/y"), Some("/jevil")] {
            assert_eq!(label(other), "other");
        }
    }

    #[test]
    fn the_first_part_of_a_path_names_the_dialect() {
        assert_eq!(dialect_of("/laya/v1/systemone", Dialect::Jev), Dialect::Laya);
        assert_eq!(dialect_of("/jev/v1/systemone", Dialect::Laya), Dialect::Jev);
        assert_eq!(dialect_of("/v1/systemone", Dialect::Laya), Dialect::Laya);
        assert_eq!(dialect_of("/layabout", Dialect::Jev), Dialect::Jev);
    }
}
