//! A server from its start to its end.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tilewright_core::{Error, Result};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tracing_subscriber::EnvFilter;

use crate::audit::Audit;
use crate::auth::{Auth, KEYS_ENV};
use crate::config::Config;
use crate::engine::Engine;
use crate::fault::Fault;
use crate::http::{AppState, listen, router};
use crate::metrics::Metrics;
use crate::models::{Keeping, ModelSource, Models};
use crate::pulse::Pulse;
use crate::service::Service;
use crate::telemetry::Telemetry;

/// A server that is bound to its address and accepts when it is run.
pub struct Server {
    state: Arc<AppState>,
    listener: TcpListener,
    extra: Router<Arc<AppState>>,
}

impl Server {
    /// Puts a server together and binds it. No checkpoint is loaded yet. Call it inside of a runtime.
    ///
    /// # Errors
    /// Checkpoints that cannot be told apart, keys or an audit file that cannot be read or opened, an address that cannot be bound.
    pub async fn bind(
        config: Config,
        sources: Vec<ModelSource>,
        keeping: &Keeping,
        pack_tokens: usize,
    ) -> tilewright_decide::Result<Self> {
        let metrics = Arc::new(Metrics::default());
        let limits = &config.limits;
        let engine = Engine::new(pack_tokens, limits.queued_tokens, limits.batch_tokens, metrics.clone());
        let models = Arc::new(Models::new(engine.clone(), metrics.clone(), sources, keeping)?);
        let auth = Auth::new(config.keys.as_deref(), std::env::var(KEYS_ENV).ok().as_deref())?;
        let audit = config.audit.as_deref().map(|path| Audit::open(path, metrics.clone())).transpose()?;
        let telemetry = config.otlp.as_deref().map(Telemetry::open).transpose()?;
        let listener = TcpListener::bind(config.bind).await.map_err(|e| {
            Error::config(format!("cannot listen on {}: {e}", config.bind), "give another --host or --port")
        })?;
        let service =
            Service::new(models, engine, metrics, config.limits.clone(), config.timing.clone(), config.tournament);
        let state = Arc::new(AppState::new(Arc::new(service), auth, audit, telemetry, config));
        Ok(Server { state, listener, extra: Router::new() })
    }

    /// Adds routes of others, behind the same keys and counts.
    pub fn with_routes(mut self, extra: Router<Arc<AppState>>) -> Self {
        self.extra = self.extra.merge(extra);
        self
    }

    /// What handlers share.
    pub fn state(&self) -> &Arc<AppState> {
        &self.state
    }

    /// Where it listens.
    pub fn address(&self) -> Result<SocketAddr> {
        let unknown = |e: std::io::Error| Error::config(format!("no address: {e}"), "give another --host");
        self.listener.local_addr().map_err(unknown)
    }

    /// Loads the checkpoints to begin with, and accepts until `stop` is done; then lets what is under way finish.
    ///
    /// # Errors
    /// A checkpoint that does not load at the start.
    pub async fn run(self, stop: impl Future<Output = ()> + Send + 'static) -> tilewright_decide::Result<()> {
        let Server { state, listener, extra } = self;
        let (tell, told) = watch::channel(false);
        let timing = state.config.timing.clone();
        let accept = tokio::spawn(listen(listener, router(state.clone(), extra), state.clone(), timing.clone(), told));
        let upkeep = tokio::spawn(upkeep(state.clone()));
        let models = state.service.models.clone();
        let loaded = tokio::task::spawn_blocking(move || models.preload());
        let mut stop = std::pin::pin!(stop);
        let mut failed = None;
        let stopped_early = tokio::select! {
            loaded = loaded => {
                match loaded {
                    Ok(Ok(())) => state.service.set_ready(),
                    Ok(Err(Fault::Failed(what))) => failed = Some(what),
                    Ok(Err(fault)) => failed = Some(fault.message()),
                    Err(panic) => failed = Some(panic.to_string()),
                }
                false
            }
            () = stop.as_mut() => true,
        };
        if failed.is_none() && !stopped_early {
            tracing::info!("ready");
            stop.as_mut().await;
        }
        state.service.drain();
        let _ = tell.send(true);
        let _ = accept.await;
        upkeep.abort();
        if failed.is_none() && tokio::time::timeout(timing.drain, state.connections.closed()).await.is_err() {
            tracing::warn!(open = state.connections.count(), "stopped before all requests were answered");
        }
        if let Some(audit) = &state.audit {
            audit.flush();
        }
        let last = state.clone();
        let _ = tokio::task::spawn_blocking(move || {
            if let Some(telemetry) = &last.telemetry {
                telemetry.close();
            }
        })
        .await;
        match failed {
            None => Ok(()),
            Some(what) => Err(Error::config(what, "run `tilewright inspect DIR` on the checkpoint").into()),
        }
    }
}

/// What happens by itself: changed checkpoints are exchanged, idle ones unloaded.
async fn upkeep(state: Arc<AppState>) {
    let timing = state.config.timing.clone();
    let period = |time: Duration| if time.is_zero() { Duration::from_secs(24 * 3600) } else { time };
    let mut look = tokio::time::interval(period(timing.watch));
    let mut idle =
        tokio::time::interval(period(timing.unload).clamp(Duration::from_millis(10), Duration::from_secs(5)));
    loop {
        let watch = tokio::select! {
            _ = look.tick(), if !timing.watch.is_zero() => true,
            _ = idle.tick(), if !timing.unload.is_zero() => false,
            // Neither is wanted.
            else => return,
        };
        let models = state.service.models.clone();
        let unload = timing.unload;
        let work = tokio::task::spawn_blocking(move || match watch {
            true => {
                models.reload(true);
            }
            false => models.unload_idle(unload),
        });
        let _ = work.await;
    }
}

/// How logs look.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Logs {
    /// A line a record, for people.
    #[default]
    Text,
    /// A JSON object a line.
    Json,
}

/// Sends logs to standard error. `filter` is in the syntax of `RUST_LOG`, which wins.
pub fn logs(format: Logs, filter: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(filter));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // A second call, as tests make, changes nothing.
    let _ = match format {
        Logs::Text => builder.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).try_init(),
        Logs::Json => builder.json().flatten_event(true).try_init(),
    };
}

/// Runs a server until the process is told to stop, on a runtime of its own. `started` is told the address.
///
/// # Errors
/// Those of [`Server::bind`] and [`Server::run`].
pub fn run(
    config: Config,
    sources: Vec<ModelSource>,
    keeping: &Keeping,
    pack_tokens: usize,
    started: impl FnOnce(SocketAddr),
) -> tilewright_decide::Result<()> {
    raise_file_limit(config.limits.connections);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("http")
        // More than one may be held up at once.
        .worker_threads(std::thread::available_parallelism().map_or(4, |n| n.get().clamp(4, 8)))
        // One for each place, and some for files.
        .max_blocking_threads(config.limits.concurrent + 8)
        .build()
        .map_err(|e| Error::config(format!("no runtime: {e}"), "free some threads"))?;
    let pulse = Pulse::start(runtime.handle().clone())
        .map_err(|e| Error::config(format!("the system refused a thread: {e}"), "free some threads"))?;
    let result = runtime.block_on(async {
        let server = Server::bind(config, sources, keeping, pack_tokens).await?;
        started(server.address()?);
        let state = server.state().clone();
        let server = server.with_routes(crate::mcp::routes(&state.service));
        server.run(told_to_stop(state)).await
    });
    drop(pulse);
    // What still loads is not waited for.
    runtime.shutdown_background();
    result
}

/// Until SIGTERM or Ctrl-C. The second one ends the process at once; SIGHUP reads keys, checkpoints and the audit file's name anew.
#[cfg(unix)]
async fn told_to_stop(state: Arc<AppState>) {
    use tokio::signal::unix::{SignalKind, signal};
    let signals = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()), signal(SignalKind::hangup()));
    let (Ok(mut term), Ok(mut int), Ok(mut hup)) = signals else {
        tracing::error!("cannot listen for signals");
        return std::future::pending().await;
    };
    loop {
        tokio::select! {
            _ = term.recv() => break,
            _ = int.recv() => break,
            _ = hup.recv() => reload(state.clone()).await,
        }
    }
    tracing::info!("stopping: no new request is accepted");
    tokio::spawn(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        std::process::exit(130);
    });
}

#[cfg(not(unix))]
async fn told_to_stop(_: Arc<AppState>) {
    let _ = tokio::signal::ctrl_c().await;
}

/// What SIGHUP does.
#[cfg(unix)]
async fn reload(state: Arc<AppState>) {
    if let Some(audit) = &state.audit {
        audit.reopen();
    }
    if let Err(error) = state.auth.reload() {
        tracing::error!(%error, "the keys stay as they were");
    }
    let models = state.service.models.clone();
    // Not awaited: another signal must be heard meanwhile.
    tokio::task::spawn_blocking(move || {
        let exchanged = models.reload(false);
        tracing::info!(models = exchanged.join(","), "reloaded");
    });
}

/// As many files as the system lets this process open: a connection is one. The system's table of them is made large enough for `connections` now: later
/// it stops the thread that needs more of it until all processors have passed a certain point, and a busy machine takes a tenth of a second and more for that.
#[cfg(unix)]
fn raise_file_limit(connections: usize) {
    use rustix::process::{Resource, getrlimit, setrlimit};
    /// Files of the process itself.
    const OTHERS: usize = 64;
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
    let most = limit.current.map_or(i32::MAX, |most| i32::try_from(most).unwrap_or(i32::MAX));
    let last = i32::try_from(connections.saturating_add(OTHERS)).unwrap_or(i32::MAX).min(most.saturating_sub(1));
    // A hint: it is closed again, and the table stays as it is.
    let _ = rustix::io::fcntl_dupfd_cloexec(std::io::stderr(), last);
}

#[cfg(not(unix))]
fn raise_file_limit(_: usize) {}
