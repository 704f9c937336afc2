//! The checkpoints of a server: which are known, which are loaded, which goes when another comes.

mod files;

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tilewright_decide::route::{Decision, Hints, Registry, Rules, Source};
use tilewright_decide::{Agent, Provenance};

use crate::engine::{Engine, Loader, Mailbox, ModelId, Remote};
use crate::fault::Fault;
use crate::metrics::Metrics;
pub use files::Stamp;

/// A checkpoint that a server may load.
#[derive(Clone)]
pub struct ModelSource {
    /// Its name; none for the only one, which then answers everything.
    pub name: Option<String>,
    /// Its folder, if its files shall be watched.
    pub dir: Option<PathBuf>,
    /// Loads it.
    pub loader: Loader,
}

/// How checkpoints are chosen and kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Keeping {
    /// How many stay loaded; at least one.
    pub max_loaded: usize,
    /// The name of the one for texts that say nothing of their language; if it is given, also for texts whose checkpoint is not served.
    pub default: Option<String>,
    /// Whether the ids of the questions may choose the typed-decisions checkpoint.
    pub auto_task: bool,
}

impl Default for Keeping {
    fn default() -> Self {
        Keeping { max_loaded: 2, default: None, auto_task: false }
    }
}

/// The name of the only checkpoint, if it was given without one.
const ONLY: &str = "model";

/// A loaded checkpoint. Requests that use it keep it alive; when the last lets go, its thread ends.
#[derive(Debug)]
pub struct Model {
    /// The checkpoint's key.
    pub key: String,
    id: ModelId,
    engine: Arc<Engine>,
    template: Agent<()>,
    /// Ready for the next request: their caches of question halves are warm.
    idle: Mutex<Vec<Agent<Remote>>>,
}

impl Model {
    /// Where its answers come from.
    pub fn provenance(&self) -> &Provenance {
        self.template.provenance()
    }

    /// The checkpoint's own settings.
    pub fn template(&self) -> &Agent<()> {
        &self.template
    }

    /// An agent for one request.
    pub fn agent(self: &Arc<Self>, mailbox: &Arc<Mailbox>) -> Lease {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut agent = idle.unwrap_or_else(|| self.template.share(Remote::new(self.engine.clone(), self.id)));
        agent.scorer_mut().attach(mailbox.clone());
        Lease { agent: Some(agent), model: self.clone() }
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.engine.retire(self.id);
    }
}

/// An agent that goes back to its model.
#[derive(Debug)]
pub struct Lease {
    agent: Option<Agent<Remote>>,
    model: Arc<Model>,
}

impl std::ops::Deref for Lease {
    type Target = Agent<Remote>;

    fn deref(&self) -> &Agent<Remote> {
        self.agent.as_ref().expect("there until it is dropped")
    }
}

impl std::ops::DerefMut for Lease {
    fn deref_mut(&mut self) -> &mut Agent<Remote> {
        self.agent.as_mut().expect("there until it is dropped")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(mut agent) = self.agent.take()
            && !std::thread::panicking()
        {
            agent.scorer_mut().release();
            self.model.idle.lock().unwrap_or_else(PoisonError::into_inner).push(agent);
        }
    }
}

struct Entry {
    key: String,
    dir: Option<PathBuf>,
    loader: Loader,
}

#[derive(Default)]
struct Slot {
    model: Option<Arc<Model>>,
    used: Option<Instant>,
    loaded_at: Option<SystemTime>,
    /// What the files looked like when they were loaded or last refused.
    stamp: Option<Stamp>,
    /// What they looked like at the last look, if that differed.
    seen: Option<Stamp>,
    error: Option<String>,
}

#[derive(Default)]
struct State {
    slots: Vec<Slot>,
    /// Whether a checkpoint is being loaded; one at a time, as each needs its memory twice for a moment.
    loading: bool,
}

/// What is known of a checkpoint, for `/health` and `/v1/models`.
#[derive(Clone, PartialEq, Debug)]
pub struct Status {
    /// Its key.
    pub key: String,
    /// Whether it is loaded.
    pub loaded: bool,
    /// SHA-256 of its weights, if that was computed.
    pub sha256: Option<String>,
    /// When it was loaded.
    pub loaded_at: Option<SystemTime>,
    /// When its weights were last changed.
    pub changed_at: Option<SystemTime>,
    /// Why it was not loaded the last time.
    pub error: Option<String>,
}

/// See the module's words.
pub struct Models {
    engine: Arc<Engine>,
    metrics: Arc<Metrics>,
    registry: Registry,
    default: String,
    /// Whether the default answers what another checkpoint should: because somebody said so, or because there is no other.
    stands_in: bool,
    auto_task: bool,
    /// The key of the only checkpoint, if it has no name.
    only: Option<String>,
    max_loaded: usize,
    entries: Vec<Entry>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Models {
    /// The checkpoints `sources`; none is loaded yet.
    ///
    /// # Errors
    /// No checkpoint, two of one name, a name that cannot be given, or an unknown default.
    pub fn new(
        engine: Arc<Engine>,
        metrics: Arc<Metrics>,
        sources: Vec<ModelSource>,
        keeping: &Keeping,
    ) -> tilewright_decide::Result<Self> {
        let refuse = |what: &str, hint: &str| Err(tilewright_core::Error::config(what, hint).into());
        let only = match &sources[..] {
            [] => return refuse("no checkpoint to serve", "give one with --model DIR"),
            [one] if one.name.is_none() => Some(ONLY.to_owned()),
            all if all.iter().any(|s| s.name.is_none()) => {
                return refuse("of several checkpoints each needs a name", "write --model NAME=DIR for each");
            }
            _ => None,
        };
        let mut registry = Registry::default();
        let mut entries: Vec<Entry> = Vec::new();
        for ModelSource { name, dir, loader } in sources {
            let name = name.as_deref().unwrap_or(ONLY);
            let source = dir.as_ref().map(|dir| Source::new(dir.to_string_lossy()));
            let (key, _) = registry.register(name, source, None)?;
            if entries.iter().any(|e| e.key == key) {
                return refuse(&format!("two checkpoints are called {key}"), "give each its own name");
            }
            entries.push(Entry { key, dir, loader });
        }
        for warning in registry.take_warnings() {
            tracing::warn!("{warning}");
        }
        let has = |key: &str| entries.iter().any(|e| e.key == key);
        let default = match &keeping.default {
            Some(name) => registry.resolve(name)?,
            None if has("multilingual") => "multilingual".to_owned(),
            None => entries[0].key.clone(),
        };
        if !has(&default) {
            return refuse(&format!("the default checkpoint {default} is not given"), "give it with --model NAME=DIR");
        }
        let slots = entries.iter().map(|_| Slot::default()).collect();
        Ok(Models {
            engine,
            metrics,
            registry,
            default,
            stands_in: keeping.default.is_some() || entries.len() == 1,
            auto_task: keeping.auto_task,
            only,
            max_loaded: keeping.max_loaded.max(1),
            entries,
            state: Mutex::new(State { slots, loading: false }),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The key of the only checkpoint, if it has no name: then nothing is chosen.
    pub fn only(&self) -> Option<&str> {
        self.only.as_deref()
    }

    /// All keys, in the order in which they were given.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|e| e.key.as_str())
    }

    /// The key that a client's `model` means: none leaves the choice to the router, as the names of other services do.
    ///
    /// # Errors
    /// A path or a repository that is not served: whoever names one must not be answered by another.
    pub fn pinned(&self, model: Option<&str>) -> Result<Option<String>, Fault> {
        let Some(name) = model.map(str::trim).filter(|m| !m.is_empty()) else { return Ok(None) };
        if let Ok(key) = self.registry.resolve(name)
            && self.entries.iter().any(|e| e.key == key)
        {
            return Ok(Some(key));
        }
        if name.contains(['/', '\\']) && !name.eq_ignore_ascii_case("convaiinnovations/laya") {
            let known: Vec<&str> = self.keys().collect();
            let msg = format!(
                "this server has no model {name:?}; it has {}, or leave `model` out to let the router choose",
                known.join(", ")
            );
            return Err(Fault::invalid(&["model"], "value_error", msg));
        }
        Ok(None)
    }

    /// Chooses a checkpoint. Nothing is loaded.
    ///
    /// # Errors
    /// A task that nobody knows, or a checkpoint that is not given.
    pub fn route(
        &self,
        state: &serde_json::Value,
        questions: &serde_json::Value,
        hints: Hints<'_>,
    ) -> Result<Decision, Fault> {
        let rules =
            Rules { registry: &self.registry, default: &self.default, auto_task: self.auto_task, lang_guess: None };
        let hints = match &self.only {
            Some(only) => Hints { model: Some(only), task: None, ..hints },
            None => hints,
        };
        let mut decision = rules
            .decide(state, questions, hints)
            .map_err(|e| Fault::invalid(&["task"], "value_error", e.to_string()))?;
        if !self.entries.iter().any(|e| e.key == decision.model) {
            if hints.task.is_some() || !self.stands_in {
                let known: Vec<&str> = self.keys().collect();
                let msg = format!(
                    "this request asks for the checkpoint {} ({}), which is not served; name one in `model`: {}",
                    decision.model,
                    decision.reason,
                    known.join(", ")
                );
                return Err(Fault::invalid(&["model"], "value_error", msg));
            }
            decision.reason = format!("{}; {} is not served, using {}", decision.reason, decision.model, self.default);
            decision.model = self.default.clone();
            decision.repo = self.registry.source(&self.default).map(Source::text);
        }
        Ok(decision)
    }

    /// A loaded checkpoint; loads it if it is not, which blocks. `mailbox` ends the waiting.
    pub fn get(&self, key: &str, mailbox: &Mailbox) -> Result<Arc<Model>, Fault> {
        let at = self.entries.iter().position(|e| e.key == key).ok_or_else(|| Fault::Failed(format!("no {key}")))?;
        let mut state = self.lock();
        loop {
            if let Some(model) = state.slots[at].model.clone() {
                state.slots[at].used = Some(Instant::now());
                return Ok(model);
            }
            if !state.loading {
                break;
            }
            if let Some(over) = mailbox.over() {
                return Err(over.into());
            }
            let look_again = Duration::from_millis(100);
            (state, _) = self.changed.wait_timeout(state, look_again).unwrap_or_else(PoisonError::into_inner);
        }
        state.loading = true;
        // Room first, so that memory never holds more than it may.
        self.make_room(&mut state, self.max_loaded - 1);
        drop(state);
        let loaded = self.load(at);
        let mut state = self.lock();
        state.loading = false;
        let result = match loaded {
            Ok((model, stamp)) => {
                self.metrics.loads.add(1);
                let now = Some(Instant::now());
                state.slots[at] = Slot {
                    model: Some(model.clone()),
                    used: now,
                    loaded_at: Some(SystemTime::now()),
                    stamp,
                    ..Slot::default()
                };
                Ok(model)
            }
            Err(error) => {
                self.metrics.load_failures.add(1);
                tracing::error!(model = key, %error, "the checkpoint did not load");
                state.slots[at].error = Some(error.to_string());
                Err(Fault::Failed(format!("{key} did not load: {error}")))
            }
        };
        drop(state);
        self.changed.notify_all();
        result
    }

    /// Loads without touching what is loaded.
    fn load(&self, at: usize) -> tilewright_decide::Result<(Arc<Model>, Option<Stamp>)> {
        let entry = &self.entries[at];
        // Taken before the files are read: what changes meanwhile is seen at the next look.
        let stamp = entry.dir.as_deref().map(Stamp::of);
        let start = Instant::now();
        let (id, template) = self.engine.start(&entry.key, entry.loader.clone())?;
        for warning in template.calibration().warnings() {
            tracing::warn!(model = entry.key, "{warning}");
        }
        let model = Model { key: entry.key.clone(), id, engine: self.engine.clone(), template, idle: Mutex::default() };
        let seconds = start.elapsed().as_secs_f64();
        tracing::info!(model = entry.key, seconds, sha256 = model.provenance().model_sha256, "loaded");
        Ok((Arc::new(model), stamp))
    }

    /// Unloads the least recently used until `most` are loaded.
    fn make_room(&self, state: &mut State, most: usize) {
        loop {
            let loaded = || state.slots.iter().enumerate().filter(|(_, s)| s.model.is_some());
            if loaded().count() <= most {
                return;
            }
            let Some(oldest) = loaded().min_by_key(|(_, s)| s.used).map(|(i, _)| i) else { return };
            self.unload(state, oldest, "another needs its place");
        }
    }

    fn unload(&self, state: &mut State, at: usize, why: &str) {
        state.slots[at].model = None;
        self.metrics.unloads.add(1);
        tracing::info!(model = self.entries[at].key, why, "unloaded");
    }

    /// Unloads what nobody has asked for since `idle` ago.
    pub fn unload_idle(&self, idle: Duration) {
        let mut state = self.lock();
        for at in 0..state.slots.len() {
            let slot = &state.slots[at];
            if slot.model.is_some() && slot.used.is_some_and(|used| used.elapsed() >= idle) {
                self.unload(&mut state, at, "idle");
            }
        }
    }

    /// Loads the loaded checkpoints anew, all or those whose files have changed and kept still since the last look. Requests under way keep the old ones;
    /// if a new one does not load, the old one stays. Blocks; the keys of those that were exchanged.
    pub fn reload(&self, only_changed: bool) -> Vec<String> {
        let mut exchanged = Vec::new();
        for (at, entry) in self.entries.iter().enumerate() {
            let stamp = entry.dir.as_deref().map(Stamp::of);
            {
                let mut state = self.lock();
                while state.loading && !only_changed {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                let loading = state.loading;
                let slot = &mut state.slots[at];
                let still = slot.seen == stamp;
                let changed = stamp.is_some() && slot.stamp != stamp;
                slot.seen.clone_from(&stamp);
                if slot.model.is_none() || (only_changed && !(changed && still)) || loading {
                    continue;
                }
                state.loading = true;
            }
            let loaded = self.load(at);
            let mut state = self.lock();
            state.loading = false;
            let slot = &mut state.slots[at];
            match loaded {
                Ok((model, stamp)) => {
                    self.metrics.reloads.add(1);
                    slot.model = Some(model);
                    slot.loaded_at = Some(SystemTime::now());
                    slot.stamp = stamp;
                    slot.error = None;
                    exchanged.push(entry.key.clone());
                }
                Err(error) => {
                    self.metrics.load_failures.add(1);
                    tracing::error!(model = entry.key, %error, "the changed checkpoint did not load; the old one stays");
                    // Not tried again before the files change again.
                    slot.stamp = stamp;
                    slot.error = Some(error.to_string());
                }
            }
            drop(state);
            self.changed.notify_all();
        }
        exchanged
    }

    /// What is known of every checkpoint.
    pub fn status(&self) -> Vec<Status> {
        let state = self.lock();
        let one = |(entry, slot): (&Entry, &Slot)| Status {
            key: entry.key.clone(),
            loaded: slot.model.is_some(),
            sha256: slot.model.as_ref().and_then(|m| m.provenance().model_sha256.clone()),
            loaded_at: slot.loaded_at.filter(|_| slot.model.is_some()),
            changed_at: entry.dir.as_deref().and_then(files::changed_at),
            error: slot.error.clone(),
        };
        self.entries.iter().zip(&state.slots).map(one).collect()
    }

    /// Loads as many as may stay loaded, the default first.
    ///
    /// # Errors
    /// The first that does not load.
    pub fn preload(&self) -> Result<(), Fault> {
        let forever = Mailbox::new(Instant::now() + Duration::from_secs(24 * 3600));
        let mut keys: Vec<&str> = self.keys().filter(|key| *key != self.default).collect();
        keys.insert(0, &self.default);
        for key in keys.into_iter().take(self.max_loaded) {
            self.get(key, &forever)?;
        }
        Ok(())
    }
}
