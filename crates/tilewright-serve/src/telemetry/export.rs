//! Spans by OpenTelemetry's own crates, sent as OTLP over HTTP by a thread of the SDK's batch processor.
//!
//! The SDK's environment variables hold: `OTEL_TRACES_SAMPLER`, `OTEL_BSP_...`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_EXPORTER_OTLP_HEADERS` and others.

use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, SystemTime};

use axum::http::{HeaderMap, Method};
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Span as _, SpanKind, Status, TraceContextExt, Tracer as _, TracerProvider as _};
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::{Bytes, HeaderExtractor, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, Span};
use tilewright_core::{Error, Result};

use super::Told;

/// What a collector's answer may be long.
const ANSWER_BYTES: u64 = 1 << 20;

/// Sends spans.
#[derive(Debug)]
pub struct Telemetry {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

/// The span of a request that is being answered. One that is dropped before its end, as its client has left, ends without a status.
#[derive(Debug)]
pub struct Trace {
    span: Span,
    tracer: SdkTracer,
}

impl Telemetry {
    /// Sends to a collector's address for traces, such as `http://127.0.0.1:4318/v1/traces`. Nothing is sent yet: a collector may come later.
    ///
    /// # Errors
    /// An address that is none of plain HTTP.
    pub fn open(endpoint: &str) -> Result<Self> {
        let refuse = |why: String| {
            let hint =
                "give http://HOST:4318/v1/traces, and put a collector beside the server if spans have to travel by TLS";
            Error::config(format!("spans cannot be sent to {endpoint}: {why}"), hint)
        };
        if !endpoint.starts_with("http://") {
            return Err(refuse("it does not begin with http://".into()));
        }
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Client::new(timeout()))
            .with_endpoint(endpoint)
            .build()
            .map_err(|e| refuse(e.to_string()))?;
        let given = |name: &str, part: &str| std::env::var(name).is_ok_and(|value| value.contains(part));
        let mut resource = Resource::builder();
        if !given("OTEL_SERVICE_NAME", "") && !given("OTEL_RESOURCE_ATTRIBUTES", "service.name=") {
            resource = resource.with_service_name("tilewright");
        }
        let resource = resource.with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION"))).build();
        let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build();
        let tracer = provider.tracer("tilewright-serve");
        Ok(Telemetry { provider, tracer })
    }

    /// Begins the span of a request, as a part of the trace that its headers name.
    pub fn begin(&self, method: &Method, route: &'static str, headers: &HeaderMap) -> Trace {
        let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &HeaderExtractor(headers));
        // Labels must stay few, and a method can be any word.
        let method = match *method {
            Method::GET | Method::HEAD | Method::POST | Method::PUT | Method::DELETE | Method::OPTIONS => {
                method.as_str()
            }
            _ => "_OTHER",
        };
        let span = self
            .tracer
            .span_builder(format!("{method} {route}"))
            .with_kind(SpanKind::Server)
            .with_attributes([
                KeyValue::new("http.request.method", method.to_owned()),
                KeyValue::new("http.route", route),
            ])
            .start_with_context(&self.tracer, &parent);
        Trace { span, tracer: self.tracer.clone() }
    }

    /// Sends what is left and ends.
    pub fn close(&self) {
        if let Err(error) = self.provider.shutdown_with_timeout(Duration::from_secs(5)) {
            tracing::warn!(%error, "the last spans were not sent");
        }
    }
}

impl Trace {
    /// The request was answered.
    pub fn end(mut self, status: u16, id: &str, key: Option<&str>, told: Option<&Told>) {
        let span = &mut self.span;
        span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status)));
        span.set_attribute(KeyValue::new("tilewright.request_id", id.to_owned()));
        if let Some(key) = key {
            span.set_attribute(KeyValue::new("tilewright.key", key.to_owned()));
        }
        // What the caller did wrong is no error of ours, by the conventions for servers.
        if status >= 500 {
            span.set_status(Status::error(""));
        }
        if let Some(Told { model, took, spent, ended }) = told {
            let parent = Context::new().with_remote_span_context(span.span_context().clone());
            let began = ended.checked_sub(*took).unwrap_or(SystemTime::UNIX_EPOCH);
            let count = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
            let work = self.tracer.span_builder("decide").with_kind(SpanKind::Internal).with_start_time(began);
            let mut work = work
                .with_attributes([
                    KeyValue::new("tilewright.model", model.clone()),
                    KeyValue::new("tilewright.queue_seconds", spent.queue.as_secs_f64()),
                    KeyValue::new("tilewright.compute_seconds", spent.compute.as_secs_f64()),
                    KeyValue::new("tilewright.tokens", count(spent.tokens)),
                    KeyValue::new("tilewright.packs", count(spent.packs)),
                ])
                .start_with_context(&self.tracer, &parent);
            work.end_with_timestamp(*ended);
        }
        span.end();
    }
}

/// The specification's variables for it, in milliseconds.
fn timeout() -> Duration {
    let told = ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"];
    let told = told.iter().find_map(|name| std::env::var(name).ok()?.parse().ok());
    Duration::from_millis(told.unwrap_or(10_000))
}

/// Posts. It blocks, which the thread that sends may.
#[derive(Debug)]
struct Client(ureq::Agent);

impl Client {
    fn new(timeout: Duration) -> Self {
        let config =
            ureq::Agent::config_builder().timeout_global(Some(timeout)).http_status_as_error(false).proxy(None);
        Client(config.build().new_agent())
    }

    fn send(&self, request: Request<Bytes>) -> std::result::Result<Response<Bytes>, HttpError> {
        let (parts, body) = request.into_parts();
        let (parts, mut body) = self.0.run(Request::from_parts(parts, &body[..]))?.into_parts();
        let body = body.with_config().limit(ANSWER_BYTES).read_to_vec()?;
        Ok(Response::from_parts(parts, body.into()))
    }
}

impl HttpClient for Client {
    // As the trait's macro spells `async fn`.
    fn send_bytes<'life0, 'async_trait>(
        &'life0 self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = std::result::Result<Response<Bytes>, HttpError>> + Send + 'async_trait>>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(std::future::ready(self.send(request)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_spans_cannot_be_sent_to_is_refused_with_an_example() {
        for address in ["https://collector/v1/traces", "collector:4318", ""] {
            let error = Telemetry::open(address).unwrap_err().to_string();
            assert!(error.contains(address) && error.contains("http://HOST:4318/v1/traces"), "{error}");
        }
    }
}
