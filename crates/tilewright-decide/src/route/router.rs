//! Checkpoints that are loaded when a request needs them and dropped when others were used since.

use std::time::{Duration, Instant};

use serde_json::Value;
use tilewright_models::laya::{QuestionType, Scorer};

use super::decision::{Decision, LanguageGuess, Rules};
use super::registry::{Registry, Source};
use super::request::Request;
use crate::agent::{Agent, PredictOptions};
use crate::error::{Result, value_error};
use crate::gate::Gate;
use crate::json::json_text;
use crate::prediction::Prediction;

/// A loaded checkpoint, as a router uses it.
pub trait Decider {
    /// Answers the same questions for each state: one result a state, in order.
    fn predict_batch(
        &mut self,
        states: &[Value],
        questions: &Value,
        options: &PredictOptions,
    ) -> Result<Vec<Prediction>>;

    /// Whether a language has temperatures of its own. States of languages that have none can share a call.
    fn has_temperatures_for(&self, lang: &str) -> bool;
}

impl<S: Scorer> Decider for Agent<S> {
    fn predict_batch(
        &mut self,
        states: &[Value],
        questions: &Value,
        options: &PredictOptions,
    ) -> Result<Vec<Prediction>> {
        Agent::predict_batch(self, states, questions, options)
    }

    fn has_temperatures_for(&self, lang: &str) -> bool {
        self.calibration().applied(QuestionType::Choice, 2, Some(lang)).language.is_some()
    }
}

struct Loaded<A> {
    key: String,
    agent: A,
    used: Instant,
}

type Loader<A> = Box<dyn FnMut(&str, &Source) -> Result<A> + Send>;

/// What the router itself knows of languages: a code, or a function of the state.
type Guess = Box<dyn Fn(&Value) -> Option<String> + Send>;

/// Chooses the checkpoint of each request and keeps the ones used last in memory.
///
/// Every call takes the router alone (`&mut`): one checkpoint is built at a time, and never twice. A server shares one behind a mutex or a thread.
pub struct Router<A> {
    registry: Registry,
    load: Loader<A>,
    default: String,
    auto_task: bool,
    lang_guess: Option<Guess>,
    max_loaded: usize,
    /// Least recently used first.
    loaded: Vec<Loaded<A>>,
}

impl<A: Decider> Router<A> {
    /// A router that loads with `load`, which is given the key and the source. Undecided texts go to `multilingual`; two checkpoints stay loaded.
    pub fn new(load: impl FnMut(&str, &Source) -> Result<A> + Send + 'static) -> Self {
        Router {
            registry: Registry::default(),
            load: Box::new(load),
            default: "multilingual".to_owned(),
            auto_task: false,
            lang_guess: None,
            max_loaded: 2,
            loaded: Vec::new(),
        }
    }

    /// The checkpoint for texts that say nothing of their language.
    pub fn set_default(&mut self, name: &str) -> Result<()> {
        self.default = self.registry.resolve(name)?;
        Ok(())
    }

    /// Whether the ids of the questions may choose the typed-decisions checkpoint.
    pub fn set_auto_task(&mut self, on: bool) {
        self.auto_task = on;
    }

    /// A function that may know the language of a state, asked before detection.
    pub fn set_lang_guess(&mut self, guess: impl Fn(&Value) -> Option<String> + Send + 'static) {
        self.lang_guess = Some(Box::new(guess));
    }

    /// How many checkpoints stay loaded, at least one.
    pub fn set_max_loaded(&mut self, count: usize) {
        self.max_loaded = count.max(1);
        self.evict();
    }

    /// The names and sources.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Names a checkpoint. If the name had another source, what was loaded from that is dropped.
    pub fn register(&mut self, name: &str, source: Source, description: Option<&str>) -> Result<String> {
        let (key, replaced) = self.registry.register(name, Some(source), description)?;
        if replaced {
            self.loaded.retain(|l| l.key != key);
        }
        Ok(key)
    }

    /// Forgets a checkpoint of one's own and drops it from memory.
    pub fn unregister(&mut self, name: &str) -> Result<()> {
        let key = self.registry.unregister(name, &self.default)?;
        self.loaded.retain(|l| l.key != key);
        Ok(())
    }

    /// Takes in a checkpoint that is loaded already. A new name is registered without a source; once dropped it must be attached again.
    pub fn attach(&mut self, name: &str, agent: A) -> Result<String> {
        let key = match self.registry.resolve(name) {
            Ok(key) => key,
            Err(_) => self.registry.register(name, None, None)?.0,
        };
        self.loaded.retain(|l| l.key != key);
        self.loaded.push(Loaded { key: key.clone(), agent, used: Instant::now() });
        self.max_loaded = self.max_loaded.max(self.loaded.len());
        Ok(key)
    }

    /// Warnings about names since the last call.
    pub fn take_warnings(&mut self) -> Vec<String> {
        self.registry.take_warnings()
    }

    /// Loads checkpoints before they are needed: these, or all that have a source. What stays loaded grows to hold them.
    pub fn preload(&mut self, names: Option<&[&str]>) -> Result<()> {
        let mut keys = Vec::new();
        match names {
            Some(names) => {
                for name in names {
                    keys.push(self.registry.resolve(name)?);
                }
            }
            None => {
                keys.extend(self.registry.names().filter(|key| self.registry.source(key).is_some()).map(str::to_owned))
            }
        }
        keys.sort_unstable();
        keys.dedup();
        let new = keys.iter().filter(|key| !self.is_loaded(key)).count();
        self.max_loaded = self.max_loaded.max(self.loaded.len() + new);
        for key in keys {
            if !self.is_loaded(&key) {
                self.agent(&key)?;
            }
        }
        Ok(())
    }

    /// What is loaded, the least recently used first.
    pub fn loaded(&self) -> impl Iterator<Item = &str> {
        self.loaded.iter().map(|l| l.key.as_str())
    }

    /// Drops one checkpoint, or all.
    pub fn unload(&mut self, name: Option<&str>) -> Result<()> {
        match name {
            Some(name) => {
                let key = self.registry.resolve(name)?;
                self.loaded.retain(|l| l.key != key);
            }
            None => self.loaded.clear(),
        }
        Ok(())
    }

    /// Drops what was last used at least `idle` before `now`; the keys. For a server to call from time to time.
    pub fn unload_idle(&mut self, now: Instant, idle: Duration) -> Vec<String> {
        let (drop, keep) =
            self.loaded.drain(..).partition::<Vec<_>, _>(|l| now.saturating_duration_since(l.used) >= idle);
        self.loaded = keep;
        drop.into_iter().map(|l| l.key).collect()
    }

    /// The checkpoint of a name, loaded if it is not.
    pub fn agent(&mut self, name: &str) -> Result<&mut A> {
        let key = self.registry.resolve(name)?;
        match self.loaded.iter().position(|l| l.key == key) {
            Some(at) => {
                let mut found = self.loaded.remove(at);
                found.used = Instant::now();
                self.loaded.push(found);
            }
            None => {
                let Some(source) = self.registry.source(&key) else {
                    return value_error!(
                        "checkpoint '{key}' has no source to load from: it was attached as a built Agent and is no longer \
                         resident; attach it again, or register a path or repo"
                    );
                };
                let agent = (self.load)(&key, source)?;
                self.loaded.push(Loaded { key, agent, used: Instant::now() });
                self.evict();
            }
        }
        Ok(&mut self.loaded.last_mut().expect("just pushed").agent)
    }

    /// Decides where a request goes, without loading anything.
    pub fn route(&self, request: &Request) -> Result<Decision> {
        let rules = Rules {
            registry: &self.registry,
            default: &self.default,
            auto_task: self.auto_task,
            lang_guess: self.lang_guess.as_deref().map(|guess| LanguageGuess::Ask(guess)),
        };
        rules.decide(&request.state, &request.questions, request.hints())
    }

    /// Routes a request and answers it; the result has the decision under `routing`.
    pub fn predict(&mut self, request: &Request, gate: Option<&Gate>) -> Result<Prediction> {
        let mut results = self.predict_batch(std::slice::from_ref(request), gate)?;
        Ok(results.pop().unwrap_or_default())
    }

    /// Routes requests, groups them by checkpoint, then by questions, limits and language, and answers each group in one call. Results are in
    /// the order of the requests.
    pub fn predict_batch(&mut self, requests: &[Request], gate: Option<&Gate>) -> Result<Vec<Prediction>> {
        // Everything that can be refused is refused before anything is loaded.
        requests.iter().try_for_each(Request::check)?;
        let decisions = requests.iter().map(|r| self.route(r)).collect::<Result<Vec<_>>>()?;
        let mut results = vec![Prediction::default(); requests.len()];
        let mut keys: Vec<&str> = Vec::new();
        for decision in &decisions {
            if !keys.contains(&decision.model.as_str()) {
                keys.push(&decision.model);
            }
        }
        for key in keys {
            let agent = self.agent(key)?;
            // The order of options is part of a question, so questions are compared with the order of their keys.
            let mut groups: Vec<(String, PredictOptions, Vec<usize>)> = Vec::new();
            for (i, request) in requests.iter().enumerate().filter(|(i, _)| decisions[*i].model == key) {
                let lang = request.lang.as_deref().or(decisions[i].language());
                let options = PredictOptions {
                    lang: lang.filter(|lang| agent.has_temperatures_for(lang)).map(str::to_owned),
                    max_len: request.max_len,
                    head_max_len: request.head_max_len,
                    gate: gate.cloned(),
                    ..PredictOptions::default()
                };
                let schema = json_text(&request.questions);
                match groups.iter_mut().find(|g| g.0 == schema && g.1 == options) {
                    Some(group) => group.2.push(i),
                    None => groups.push((schema, options, vec![i])),
                }
            }
            for (_, options, members) in groups {
                let states: Vec<Value> = members.iter().map(|i| requests[*i].state.clone()).collect();
                let answered = agent.predict_batch(&states, &requests[members[0]].questions, &options)?;
                for (i, mut result) in members.into_iter().zip(answered) {
                    result.extra.insert("routing".to_owned(), decisions[i].to_json());
                    results[i] = result;
                }
            }
        }
        Ok(results)
    }

    fn is_loaded(&self, key: &str) -> bool {
        self.loaded.iter().any(|l| l.key == key)
    }

    fn evict(&mut self) {
        let surplus = self.loaded.len().saturating_sub(self.max_loaded);
        self.loaded.drain(..surplus);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use serde_json::json;

    use super::*;

    /// Answers nothing; notes what it was asked.
    struct Fake {
        key: String,
        calls: Calls,
        languages: &'static [&'static str],
    }

    type Calls = Arc<Mutex<Vec<String>>>;

    impl Decider for Fake {
        fn predict_batch(
            &mut self,
            states: &[Value],
            questions: &Value,
            o: &PredictOptions,
        ) -> Result<Vec<Prediction>> {
            let ids: Vec<&str> = questions.as_object().unwrap().keys().map(String::as_str).collect();
            let call = format!(
                "{} {} {} lang={:?} max_len={:?} gate={}",
                self.key,
                json_text(&states.to_vec().into()),
                ids.join("+"),
                o.lang,
                o.max_len,
                o.gate.is_some()
            );
            self.calls.lock().unwrap().push(call);
            let named = |state: &Value| {
                let mut prediction = Prediction::default();
                prediction.extra.insert("state".to_owned(), state.clone());
                prediction
            };
            Ok(states.iter().map(named).collect())
        }

        fn has_temperatures_for(&self, lang: &str) -> bool {
            self.languages.contains(&lang)
        }
    }

    fn router(languages: &'static [&'static str]) -> (Router<Fake>, Calls) {
        let calls = Calls::default();
        let log = calls.clone();
        let router = Router::new(move |key, source| {
            log.lock().unwrap().push(format!("load {key} from {}", source.text()));
            if source.location == "broken" {
                return value_error!("no such checkpoint");
            }
            Ok(Fake { key: key.to_owned(), calls: log.clone(), languages })
        });
        (router, calls)
    }

    fn taken(calls: &Calls) -> Vec<String> {
        std::mem::take(&mut calls.lock().unwrap())
    }

    fn loaded(router: &Router<Fake>) -> Vec<&str> {
        router.loaded().collect()
    }

    #[test]
    fn a_request_is_routed_answered_and_told_why() {
        let (mut router, calls) = router(&[]);
        let request = Request::new(json!("the card is not here"), json!({"q": {}}));
        let gate = Gate::uniform(0.5).unwrap();
        let result = router.predict(&request, Some(&gate)).unwrap().to_json();
        assert_eq!(result["routing"]["reason"], "English Latin text");
        assert_eq!(result["routing"]["repo"], "convaiinnovations/laya");
        assert_eq!(result.as_object().unwrap().keys().next_back().unwrap(), "routing");
        assert_eq!(
            taken(&calls),
            [
                "load english from convaiinnovations/laya",
                "english [\"the card is not here\"] q lang=None max_len=None gate=true"
            ]
        );
    }

    #[test]
    fn a_batch_runs_by_checkpoint_then_questions_and_limits_and_comes_back_in_order() {
        let (mut router, calls) = router(&[]);
        let en = |text: &str| Request::new(json!(text), json!({"q": {}}));
        let mut long = en("the third is long");
        long.max_len = Some(99);
        let requests = [
            en("the first of all"),
            Request::new(json!("支付失败"), json!({"q": {}})),
            Request::new(json!("the second is here"), json!({"p": {}})),
            long,
            en("the fourth of all"),
        ];
        let results = router.predict_batch(&requests, None).unwrap();
        for (request, result) in requests.iter().zip(&results) {
            assert_eq!(result.extra["state"], request.state);
        }
        assert_eq!(
            taken(&calls),
            [
                "load english from convaiinnovations/laya",
                "english [\"the first of all\", \"the fourth of all\"] q lang=None max_len=None gate=false",
                "english [\"the second is here\"] p lang=None max_len=None gate=false",
                "english [\"the third is long\"] q lang=None max_len=Some(99) gate=false",
                "load multilingual from convaiinnovations/laya/multilingual",
                "multilingual [\"支付失败\"] q lang=None max_len=None gate=false"
            ]
        );
    }

    #[test]
    fn questions_that_differ_in_the_order_of_their_options_do_not_share_a_call() {
        let (mut router, calls) = router(&[]);
        let ask = |criteria: Value| Request::new(json!("the card is not here"), json!({"q": {"criteria": criteria}}));
        router.predict_batch(&[ask(json!({"a": 1, "b": 2})), ask(json!({"b": 2, "a": 1}))], None).unwrap();
        assert_eq!(taken(&calls).len(), 3, "one load and two calls");
    }

    #[test]
    fn a_detected_language_is_passed_on_where_it_has_temperatures() {
        let (mut router, calls) = router(&["de"]);
        let german = Request::new(json!("der Kunde ist nicht zufrieden mit uns"), json!({"q": {}}));
        let french = Request::new(json!("je ne suis pas content du tout"), json!({"q": {}}));
        let stated = Request { lang: Some("de".into()), ..french.clone() };
        router.predict_batch(&[german, french, stated], None).unwrap();
        let calls = taken(&calls);
        assert!(
            calls[1].contains("Kunde") && calls[1].contains("je ne suis") && calls[1].contains("lang=Some(\"de\")")
        );
        assert!(calls[2].contains("je ne suis") && calls[2].contains("lang=None"), "{calls:?}");
    }

    #[test]
    fn trap_21_two_checkpoints_stay_loaded_and_the_least_recently_used_one_goes() {
        let (mut router, calls) = router(&[]);
        for name in ["english", "ml", "en", "typed"] {
            router.agent(name).unwrap();
        }
        assert_eq!(loaded(&router), ["english", "typed-decisions"]);
        assert_eq!(taken(&calls).len(), 3, "english was loaded once");
        router.set_max_loaded(0);
        assert_eq!(loaded(&router), ["typed-decisions"], "at least one");
    }

    #[test]
    fn preloading_makes_room_for_all() {
        let (mut router, calls) = router(&[]);
        router.register("papers", Source::new("p"), None).unwrap();
        router.preload(Some(&["ml"])).unwrap();
        router.preload(None).unwrap();
        assert_eq!(router.loaded().count(), 4);
        assert_eq!(taken(&calls).len(), 4, "each once");
    }

    #[test]
    fn a_checkpoint_that_cannot_be_loaded_leaves_the_others_as_they_were() {
        let (mut router, _) = router(&[]);
        router.register("papers", Source::new("broken"), None).unwrap();
        router.agent("en").unwrap();
        assert!(router.agent("papers").is_err());
        assert_eq!(loaded(&router), ["english"]);
    }

    #[test]
    fn an_attached_checkpoint_serves_until_it_is_dropped() {
        let (mut router, calls) = router(&[]);
        let fake = |key: &str| Fake { key: key.to_owned(), calls: Calls::default(), languages: &[] };
        router.set_max_loaded(1);
        router.attach("papers", fake("papers")).unwrap();
        router.attach("en", fake("mine")).unwrap();
        assert_eq!(loaded(&router), ["papers", "english"], "attaching makes room");
        assert_eq!(router.agent("english").unwrap().key, "mine");
        assert!(taken(&calls).is_empty(), "nothing was loaded");
        router.unload(Some("papers")).unwrap();
        let Err(error) = router.agent("papers") else { panic!("nothing to load it from") };
        assert!(error.to_string().contains("has no source to load from"), "{error}");
    }

    #[test]
    fn a_new_source_drops_what_was_loaded_from_the_old_one() {
        let (mut router, calls) = router(&[]);
        router.agent("en").unwrap();
        router.register("english", Source::new("mine"), None).unwrap();
        assert!(loaded(&router).is_empty());
        router.agent("en").unwrap();
        assert_eq!(taken(&calls)[1], "load english from mine");
        router.register("enlgish", Source::new("typo"), None).unwrap();
        assert_eq!(router.take_warnings().len(), 1);
        router.unregister("enlgish").unwrap();
        assert!(router.agent("enlgish").is_err());
    }

    #[test]
    fn what_is_idle_is_dropped_and_what_was_used_since_stays() {
        let (mut router, _) = router(&[]);
        router.agent("ml").unwrap();
        router.agent("en").unwrap();
        let now = Instant::now();
        router.loaded[0].used = now - Duration::from_secs(60);
        router.loaded[1].used = now - Duration::from_secs(59);
        assert_eq!(router.unload_idle(now, Duration::from_secs(60)), ["multilingual"]);
        assert_eq!(loaded(&router), ["english"]);
        router.unload(None).unwrap();
        assert!(loaded(&router).is_empty());
    }

    #[test]
    fn a_bad_request_of_a_batch_is_refused_before_anything_is_loaded() {
        let (mut router, calls) = router(&[]);
        let good = Request::new(json!("the card is not here"), json!({"q": {}}));
        for bad in [Request::new(Value::Null, json!({})), Request::new(json!("x"), json!([]))] {
            assert_eq!(router.predict_batch(&[good.clone(), bad], None).unwrap_err().kind(), "TypeError");
        }
        let unknown = Request { model: Some("klingon".into()), ..good.clone() };
        assert_eq!(router.predict_batch(&[good, unknown], None).unwrap_err().kind(), "ValueError");
        assert!(taken(&calls).is_empty());
        assert!(router.predict_batch(&[], None).unwrap().is_empty());
    }

    #[test]
    fn the_router_has_a_default_a_guess_and_task_detection_of_its_own() {
        let (mut router, _) = router(&[]);
        router.set_default("en").unwrap();
        assert!(router.set_default("klingon").is_err());
        let bare = Request::new(json!("refund me"), json!({}));
        assert_eq!(router.route(&bare).unwrap().model, "english");
        router.set_lang_guess(|state| state.as_str().map(|_| "pt".to_owned()));
        assert_eq!(router.route(&bare).unwrap().model, "multilingual");
        router.set_auto_task(true);
        let ids = ["severity", "disposition", "true_positive", "urgency", "credential_compromise"];
        let questions: Value =
            ids.iter().map(|id| ((*id).to_owned(), json!({}))).collect::<serde_json::Map<_, _>>().into();
        assert_eq!(router.route(&Request::new(json!("x"), questions)).unwrap().model, "typed-decisions");
    }
}
