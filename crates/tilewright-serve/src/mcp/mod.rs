//! The Model Context Protocol: the same service as tools, for programs that hand tools to language models.
//!
//! On standard input and output ([`run`]) for a program that starts this one, and as streamable HTTP ([`routes`]) beside the other paths of a server.
//! HTTP is stateless, so that replicas behind a balancer need not know each other's sessions. The protocol itself is the crate `rmcp`'s; names and
//! arguments of the tools are those of the `laya` package's server, so that a configuration can be changed over.

mod tools;

use std::sync::Arc;

use axum::Router;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, Implementation, ListToolsResult,
    PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
};
use rmcp::service::RequestContext;
use rmcp::transport::streamable_http_server::session::never::NeverSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use rmcp::{ErrorData, RoleServer, ServerHandler, ServiceExt};
use tilewright_core::Error;

use crate::config::Config;
use crate::engine::Engine;
use crate::http::AppState;
use crate::metrics::Metrics;
use crate::models::{Keeping, ModelSource, Models};
use crate::service::Service;

/// What a language model is told before it sees the tools.
const INSTRUCTIONS: &str = "Typed decisions about a text or a document by a small local model: choices, yes or no, levels, each with calibrated \
     probabilities. Use it for classification and routing, not for writing, arithmetic or reasoning in steps. laya_preset answers ready-made questions; \
     laya_predict answers your own.";

/// A service that speaks the protocol.
#[derive(Clone)]
pub struct Handler {
    service: Arc<Service>,
}

impl Handler {
    /// Of this service.
    pub fn new(service: Arc<Service>) -> Self {
        Handler { service }
    }
}

impl ServerHandler for Handler {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("tilewright", env!("CARGO_PKG_VERSION")))
            .with_instructions(INSTRUCTIONS)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(tools::all()))
    }

    fn get_tool(&self, name: &str) -> Option<Tool> {
        tools::all().into_iter().find(|tool| tool.name == name)
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        _: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let arguments = request.arguments.unwrap_or_default();
        let Some(result) = tools::call(&self.service, &request.name, arguments).await else {
            return Err(ErrorData::invalid_params(format!("there is no tool {:?}", request.name), None));
        };
        let (value, failed) = match result {
            Ok(value) => (value, false),
            Err(fault) => (serde_json::json!({"error": fault.kind(), "message": fault.message()}), true),
        };
        // Indented: a language model reads it as text.
        let text = serde_json::to_string_pretty(&value).unwrap_or_else(|e| e.to_string());
        let content = vec![ContentBlock::text(text)];
        Ok(if failed { CallToolResult::error(content) } else { CallToolResult::success(content) }.into())
    }
}

/// Speaks on standard input and output until the other side closes them. Logs go to standard error, as the protocol wants it.
///
/// The conversation begins at once; checkpoints are loaded meanwhile.
///
/// # Errors
/// Checkpoints that cannot be told apart, streams that broke, or a beginning that is none of this protocol.
pub fn run(
    config: &Config,
    sources: Vec<ModelSource>,
    keeping: &Keeping,
    pack_tokens: usize,
) -> tilewright_decide::Result<()> {
    let failed = |what: String| Error::config(what, "start it from a program that speaks the Model Context Protocol");
    let metrics = Arc::new(Metrics::default());
    let limits = &config.limits;
    let engine = Engine::new(pack_tokens, limits.queued_tokens, limits.batch_tokens, metrics.clone());
    let models = Arc::new(Models::new(engine.clone(), metrics.clone(), sources, keeping)?);
    let service = Service::new(models, engine, metrics, limits.clone(), config.timing.clone(), config.tournament);
    let service = Arc::new(service);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(2)
        .max_blocking_threads(limits.concurrent + 8)
        .build()
        .map_err(|e| failed(format!("no runtime: {e}")))?;
    let result = runtime.block_on(async {
        let loading = service.clone();
        tokio::task::spawn_blocking(move || match loading.models.preload() {
            Ok(()) => loading.set_ready(),
            // Told again to whoever asks; status shows it.
            Err(fault) => tracing::error!("a checkpoint did not load: {}", fault.message()),
        });
        let running = Handler::new(service).serve(rmcp::transport::stdio()).await.map_err(|e| failed(e.to_string()))?;
        running.waiting().await.map(drop).map_err(|e| failed(e.to_string()))
    });
    // A thread that reads standard input cannot be called back.
    runtime.shutdown_background();
    Ok(result?)
}

/// The route `/mcp`, for [`crate::Server::with_routes`]: keys and counts of requests are those of the other routes.
pub fn routes(service: &Arc<Service>) -> Router<Arc<AppState>> {
    Router::new().route_service("/mcp", http(service.clone()))
}

/// The protocol over HTTP. Web pages may not call it: whatever has an `Origin` is refused.
fn http(service: Arc<Service>) -> StreamableHttpService<Handler, NeverSessionManager> {
    let config = StreamableHttpServerConfig::default()
        .with_legacy_session_mode(false)
        .with_json_response(true)
        // The name under which a server is reached is the operator's affair; pages are kept out by their Origin.
        .disable_allowed_hosts()
        .enforce_origin_validation()
        .with_max_request_body_bytes(service.limits.body_bytes);
    StreamableHttpService::new(move || Ok(Handler::new(service.clone())), NeverSessionManager::default().into(), config)
}
