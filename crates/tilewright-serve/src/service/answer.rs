//! One call from its states to their outcomes, on a thread of its own.

use std::sync::Arc;

use serde_json::Value;
use tilewright_decide::route::{Decider, Decision, Hints, LanguageGuess};
use tilewright_decide::{Error, PredictOptions, Prediction};

use super::narrow::{self, Narrowed};
use super::{Call, Outcome, Service, Task};
use crate::engine::Mailbox;
use crate::fault::Fault;
use crate::models::{Lease, Model};

/// States that one model answers in one way.
struct Group {
    key: String,
    lang: Option<String>,
    members: Vec<usize>,
}

impl Service {
    pub(super) fn answer(&self, call: &Call, mailbox: &Arc<Mailbox>) -> Result<Vec<Outcome>, Fault> {
        let asked = match &call.task {
            Task::Decide { schema } => tilewright_decide::schema_questions(schema)
                .map_err(|e| Fault::invalid(&["schema"], "value_error", e.to_string()))?,
            _ => call.questions.clone(),
        };
        let pinned = self.models.pinned(call.model.as_deref())?;
        let hints = Hints {
            model: pinned.as_deref(),
            task: call.hint_task.as_deref(),
            lang: call.lang.as_deref(),
            lang_guess: call.lang_guess.as_deref().map(LanguageGuess::Code),
        };
        let decide = |state| self.models.route(state, &asked, hints);
        let decisions = call.states.iter().map(decide).collect::<Result<Vec<Decision>, Fault>>()?;
        let mut outcomes: Vec<Option<Outcome>> = call.states.iter().map(|_| None).collect();
        let mut models: Vec<Arc<Model>> = Vec::new();
        for group in self.groups(call, &decisions, &mut models, mailbox)? {
            let model = models.iter().find(|m| m.key == group.key).expect("loaded for the groups");
            let mut agent = model.agent(mailbox);
            let states: Vec<Value> = group.members.iter().map(|&i| call.states[i].clone()).collect();
            let options = PredictOptions {
                lang: group.lang,
                max_len: call.max_len,
                head_max_len: call.head_max_len,
                gate: call.gate.clone(),
                ..PredictOptions::default()
            };
            let results = self.of_group(&mut agent, &states, call, &asked, &options)?;
            for (i, (mut prediction, details)) in group.members.into_iter().zip(results) {
                if self.models.only().is_none() {
                    prediction.extra.insert("routing".to_owned(), decisions[i].to_json());
                }
                for warning in &prediction.warnings {
                    tracing::debug!(model = model.key, "{warning}");
                }
                outcomes[i] = Some(Outcome {
                    prediction,
                    details,
                    model: model.key.clone(),
                    model_sha256: model.provenance().model_sha256.clone(),
                });
            }
        }
        Ok(outcomes.into_iter().flatten().collect())
    }

    /// States by model and by language, if that language has temperatures of its own.
    fn groups(
        &self,
        call: &Call,
        decisions: &[Decision],
        models: &mut Vec<Arc<Model>>,
        mailbox: &Arc<Mailbox>,
    ) -> Result<Vec<Group>, Fault> {
        let mut groups: Vec<Group> = Vec::new();
        for (i, decision) in decisions.iter().enumerate() {
            let at = match models.iter().position(|m| m.key == decision.model) {
                Some(at) => at,
                None => {
                    models.push(self.models.get(&decision.model, mailbox)?);
                    models.len() - 1
                }
            };
            let lang = call.lang.as_deref().or(decision.language());
            let agent = models[at].agent(mailbox);
            let lang = lang.filter(|lang| agent.has_temperatures_for(lang)).map(str::to_owned);
            match groups.iter_mut().find(|g| g.key == decision.model && g.lang == lang) {
                Some(group) => group.members.push(i),
                None => groups.push(Group { key: decision.model.clone(), lang, members: vec![i] }),
            }
        }
        Ok(groups)
    }

    fn of_group(
        &self,
        agent: &mut Lease,
        states: &[Value],
        call: &Call,
        asked: &Value,
        options: &PredictOptions,
    ) -> Result<Vec<(Prediction, Option<Value>)>, Fault> {
        let plain = |results: Vec<Prediction>| results.into_iter().map(|p| (p, None)).collect();
        let results = match &call.task {
            Task::Predict => match self.tournament.and_then(|t| Narrowed::of(asked, t)) {
                None => agent.predict_batch(states, asked, options).map(plain),
                Some(narrowed) => states
                    .iter()
                    .map(|state| narrow::predict(agent, state, &narrowed, options))
                    .collect::<Result<Vec<_>, _>>()
                    .map(plain),
            },
            Task::Long { window, stride } => states
                .iter()
                .map(|state| agent.predict_long(state, asked, *window, *stride, options))
                .collect::<Result<Vec<_>, _>>()
                .map(plain),
            Task::Shortlist { k } => states
                .iter()
                .map(|state| agent.predict_shortlist(state, asked, *k, options))
                .collect::<Result<Vec<_>, _>>()
                .map(plain),
            Task::Tournament { group } => states
                .iter()
                .map(|state| agent.predict_tournament(state, asked, *group, options))
                .collect::<Result<Vec<_>, _>>()
                .map(plain),
            Task::Decide { schema } => agent.decide_batch(states, schema, options).map(|decisions| {
                decisions
                    .into_iter()
                    .map(|d| {
                        let details = d.details();
                        (d.prediction, Some(details))
                    })
                    .collect()
            }),
            Task::Explain => states
                .iter()
                .map(|state| {
                    let explained = agent.explain(state, asked, options)?;
                    let details = explained.iter().map(|e| e.to_json()).collect();
                    let prediction = agent.predict(state, asked, options)?;
                    Ok((prediction, Some(Value::Array(details))))
                })
                .collect(),
        };
        results.map_err(|error| fault(agent, &error))
    }
}

/// The agent's error as ours.
fn fault(agent: &mut Lease, error: &Error) -> Fault {
    if let Some(failure) = agent.scorer_mut().take_failure() {
        return failure.into();
    }
    if error.is_request() {
        return Fault::invalid(&["questions"], "value_error", error.to_string());
    }
    Fault::Failed(error.to_string())
}
