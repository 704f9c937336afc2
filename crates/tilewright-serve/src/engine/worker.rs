//! The thread of a model: loads it, tries it, and scores packs until nobody needs it any more.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Instant;

use serde_json::json;
use tilewright_core::{Error, Result};
use tilewright_decide::{Agent, PredictOptions};
use tilewright_models::laya::{Row, RowScores, Scorer};

use super::mailbox::{Failure, Scored};
use super::queue::{Pack, Piece};
use super::{Engine, Loaded, Loader, ModelId};

/// Starts the thread and waits until it has loaded.
pub(super) fn start(
    engine: Arc<Engine>,
    id: ModelId,
    name: &str,
    loader: Loader,
) -> tilewright_decide::Result<Agent<()>> {
    let (tell, told) = mpsc::sync_channel(1);
    let body = move || {
        // A loader that panics is a checkpoint that does not load.
        let loaded = catch_unwind(AssertUnwindSafe(|| loader().and_then(tried)));
        drop(loader);
        match loaded.unwrap_or_else(|panic| Err(fault(format!("loading panicked: {}", words(&*panic))).into())) {
            Ok(Loaded { agent, scorer }) => {
                if tell.send(Ok(agent)).is_ok() {
                    run(&engine, id, scorer);
                }
            }
            Err(error) => {
                let _ = tell.send(Err(error));
            }
        }
    };
    let spawned = std::thread::Builder::new().name(format!("model-{name}-{id}")).spawn(body);
    spawned.map_err(|e| fault(format!("the system refused a thread: {e}")))?;
    told.recv().unwrap_or_else(|_| Err(fault("the thread of the model ended".into()).into()))
}

fn fault(what: String) -> Error {
    Error::config(what, "see the log")
}

/// Asks a checkpoint something before anyone else does: one whose answers are not finite is not let in.
fn tried(loaded: Loaded) -> tilewright_decide::Result<Loaded> {
    struct Borrowed<'a>(&'a mut dyn Scorer);
    impl Scorer for Borrowed<'_> {
        fn score(&mut self, rows: &[Row]) -> Result<Vec<RowScores>> {
            self.0.score(rows)
        }
        fn embed(&mut self, rows: &[Vec<u32>]) -> Result<Vec<Vec<f32>>> {
            self.0.embed(rows)
        }
    }
    let Loaded { agent, mut scorer } = loaded;
    let questions = json!({"ready": {"type": "noul", "instructions": "Does it answer?"}});
    agent.share(Borrowed(&mut *scorer)).predict(&"ready".into(), &questions, &PredictOptions::default())?;
    Ok(Loaded { agent, scorer })
}

fn run(engine: &Engine, id: ModelId, mut scorer: Box<dyn Scorer>) {
    while let Some(pack) = engine.next(id) {
        let start = Instant::now();
        let results = match pack {
            Pack::Rows(pieces) => rows(&mut *scorer, pieces, engine),
            Pack::Texts(piece, texts) => {
                vec![(piece, guarded(|| scorer.embed(&texts)).map(Scored::Vectors))]
            }
        };
        engine.metrics.pack_seconds.observe(start.elapsed().as_secs_f64());
        engine.finish(results);
    }
}

/// Scores a pack. If that fails, each request's rows are tried on their own, so that only the one whose fault it is fails.
fn rows(scorer: &mut dyn Scorer, pieces: Vec<Piece>, engine: &Engine) -> Vec<(Piece, Result<Scored, Failure>)> {
    let mut pieces = pieces;
    let counts: Vec<usize> = pieces.iter().map(|p| p.rows.len()).collect();
    let all: Vec<Row> = pieces.iter_mut().flat_map(|p| std::mem::take(&mut p.rows)).collect();
    let tokens: usize = all.iter().map(|r| r.ids.len()).sum();
    engine.metrics.rows.add(all.len() as u64);
    engine.metrics.tokens.add(tokens as u64);
    engine.metrics.pack_tokens.observe(tokens as f64);
    let mut scored = score(scorer, &all).map(|scores| scores.into_iter());
    let alone = scored.is_err() && pieces.len() > 1;
    let mut start = 0;
    let mut results = Vec::with_capacity(pieces.len());
    for (piece, n) in pieces.into_iter().zip(counts) {
        let own = start..start + n;
        start += n;
        let result = match &mut scored {
            Ok(scores) => Ok(scores.by_ref().take(n).collect()),
            Err(_) if alone => score(scorer, &all[own]),
            Err(failure) => Err(failure.clone()),
        };
        results.push((piece, result.map(Scored::Rows)));
    }
    results
}

fn score(scorer: &mut dyn Scorer, rows: &[Row]) -> Result<Vec<RowScores>, Failure> {
    let scores = guarded(|| scorer.score(rows))?;
    if scores.len() != rows.len() {
        return Err(Failure::Model(format!("the model scored {} of {} rows", scores.len(), rows.len())));
    }
    Ok(scores)
}

/// A panic is a failure like others. The model's buffers are written anew by every pass.
fn guarded<T>(call: impl FnOnce() -> Result<T>) -> Result<T, Failure> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|e| Failure::Model(e.to_string())),
        Err(panic) => Err(Failure::Model(format!("scoring panicked: {}", words(&*panic)))),
    }
}

fn words(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without words")
}
