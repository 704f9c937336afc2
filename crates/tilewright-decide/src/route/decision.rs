//! The order in which hints and detection choose a checkpoint. Nothing is loaded here.

use serde_json::{Value, json};

use super::detect::Detection;
use super::registry::{Registry, Source};
use crate::error::Result;
use crate::python::{repr_str, strip};

/// Sets of question ids that mean the typed-decisions checkpoint, where that is asked for; sorted.
const WORKFLOWS: [(&str, [&str; 5]); 4] = [
    ("agent_trace_observability", ["action", "needs_review", "outcome", "risk", "urgency"]),
    ("customer_service", ["action", "category", "churn_risk", "needs_human", "urgency"]),
    ("invoice_processing", ["discrepancy_severity", "disposition", "duplicate", "matches_order", "urgency"]),
    ("security_incidents", ["credential_compromise", "disposition", "severity", "true_positive", "urgency"]),
];

/// Who knows the language without detection.
#[derive(Clone, Copy)]
pub enum LanguageGuess<'a> {
    /// A code such as `pt-BR`.
    Code(&'a str),
    /// A function of the state; `None` abstains.
    Ask(&'a dyn Fn(&Value) -> Option<String>),
}

impl LanguageGuess<'_> {
    fn is_english(self, state: &Value) -> Option<bool> {
        match self {
            LanguageGuess::Code(code) => is_english(code),
            LanguageGuess::Ask(ask) => is_english(&ask(state)?),
        }
    }
}

/// What a request says about where it should go.
#[derive(Clone, Copy, Default)]
pub struct Hints<'a> {
    /// The name of a checkpoint.
    pub model: Option<&'a str>,
    /// `typed-decisions`, or the name of a checkpoint.
    pub task: Option<&'a str>,
    /// The language of the state.
    pub lang: Option<&'a str>,
    /// A weaker hint at it.
    pub lang_guess: Option<LanguageGuess<'a>>,
}

/// Which checkpoint, and why.
#[derive(Clone, PartialEq, Debug)]
pub struct Decision {
    /// Its key.
    pub model: String,
    /// Where it comes from.
    pub repo: Option<String>,
    /// The reason, for people.
    pub reason: String,
    /// What detection found, if it was asked.
    pub detection: Option<Detection>,
    /// The workflow whose ids the questions have.
    pub workflow: Option<&'static str>,
}

impl Decision {
    /// The `routing` object of a result.
    pub fn to_json(&self) -> Value {
        json!({
            "model": self.model,
            "repo": self.repo,
            "reason": self.reason,
            "detection": self.detection.as_ref().map(Detection::to_json),
            "workflow": self.workflow,
        })
    }

    /// The language that detection named.
    pub fn language(&self) -> Option<&'static str> {
        self.detection.as_ref()?.language
    }
}

/// How decisions are made.
#[derive(Clone, Copy)]
pub struct Rules<'a> {
    /// The names.
    pub registry: &'a Registry,
    /// The key of the checkpoint for texts that say nothing of their language.
    pub default: &'a str,
    /// Whether the ids of the questions may choose the typed-decisions checkpoint.
    pub auto_task: bool,
    /// A hint that applies to all requests.
    pub lang_guess: Option<LanguageGuess<'a>>,
}

impl Rules<'_> {
    /// Decides. `questions` matter only by their ids.
    pub fn decide(&self, state: &Value, questions: &Value, hints: Hints) -> Result<Decision> {
        let decision = |model: &str, reason: String| Decision {
            repo: self.registry.source(model).map(Source::text),
            model: model.to_owned(),
            reason,
            detection: None,
            workflow: None,
        };
        if let Some(model) = hints.model {
            let key = self.registry.resolve(model)?;
            return Ok(decision(&key, format!("explicit model={}", repr_str(model))));
        }
        if let Some(task) = hints.task {
            let typed = task.to_lowercase().replace('-', "_") == "typed_decisions";
            let key = self.registry.resolve(if typed { "typed-decisions" } else { task })?;
            return Ok(decision(&key, format!("explicit task={}", repr_str(task))));
        }
        let workflow = workflow(questions);
        if let Some(name) = workflow.filter(|_| self.auto_task) {
            let reason = format!("question ids match the {} typed-decisions workflow", repr_str(name));
            return Ok(Decision { workflow, ..decision("typed-decisions", reason) });
        }
        let by_language = |english: bool| if english { "english" } else { "multilingual" };
        if let Some((lang, english)) = hints.lang.and_then(|lang| Some((lang, is_english(lang)?))) {
            let reason = format!("explicit lang={}", repr_str(lang));
            return Ok(Decision { workflow, ..decision(by_language(english), reason) });
        }
        for (whose, guess) in [("lang_guess", hints.lang_guess), ("Router(lang_guess=...)", self.lang_guess)] {
            if let Some(english) = guess.and_then(|guess| guess.is_english(state)) {
                let language = if english { "English" } else { "non-English" };
                let reason = format!("{whose}: the caller identified this as {language} text");
                return Ok(Decision { workflow, ..decision(by_language(english), reason) });
            }
        }
        let detection = Detection::of(state);
        let (model, reason) = self.by_detection(&detection);
        Ok(Decision { workflow, detection: Some(detection), ..decision(model, reason) })
    }

    fn by_detection(&self, found: &Detection) -> (&str, String) {
        let default = self.default;
        if found.script == "unknown" {
            return (default, format!("no letters detected in state; using default ({default})"));
        }
        if found.script != "latin" {
            let percent = 100.0 * found.non_latin_fraction;
            let reason = format!(
                "non-Latin script ({}, {percent:.0}% of letters); the English checkpoint cannot read it",
                found.script
            );
            return ("multilingual", reason);
        }
        if found.is_english {
            if !found.language_undecided {
                return ("english", "English Latin text".to_owned());
            }
            let reason =
                format!("Latin script, language not identified and no non-English letters; using default ({default})");
            return (default, reason);
        }
        let reason = match (&found.mixed_segment, found.language) {
            (Some(segment), language) => format!(
                "Latin script, mostly English, but a line or field reads as {} ({}); the English checkpoint cannot read it",
                language.map_or("None".to_owned(), repr_str),
                repr_str(&segment.chars().take(60).collect::<String>())
            ),
            (None, Some(language)) => {
                format!("Latin script but language looks like {}, not English", repr_str(language))
            }
            (None, None) => format!(
                "Latin script, language not identified but {:.0}% non-English letters; not safe for the English checkpoint",
                100.0 * found.diacritic_rate
            ),
        };
        ("multilingual", reason)
    }
}

/// Whether a language code means English; `None` if it names no language (`C.UTF-8`, `und`, blank).
fn is_english(code: &str) -> Option<bool> {
    let code = strip(code).to_lowercase();
    let primary = code.split(['.', '_', '-']).next().unwrap_or_default();
    match primary {
        "" | "c" | "posix" | "und" | "zxx" | "mul" => None,
        other => Some(matches!(other, "en" | "eng" | "english")),
    }
}

/// The workflow that has exactly these question ids.
fn workflow(questions: &Value) -> Option<&'static str> {
    let mut ids: Vec<&str> = questions.as_object()?.keys().map(String::as_str).collect();
    ids.sort_unstable();
    WORKFLOWS.iter().find(|(_, set)| ids == *set).map(|(name, _)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decide(state: &str, questions: Value, hints: Hints, auto_task: bool) -> Decision {
        let registry = Registry::default();
        Rules { registry: &registry, default: "multilingual", auto_task, lang_guess: None }
            .decide(&json!(state), &questions, hints)
            .unwrap()
    }

    fn reason(hints: Hints) -> (String, String) {
        let d = decide("Bonjour, je ne suis pas content", json!({}), hints, false);
        (d.model, d.reason)
    }

    #[test]
    fn an_explicit_model_wins_over_all_and_a_task_over_the_rest() {
        let all = Hints {
            model: Some(" EN"),
            task: Some("ml"),
            lang: Some("fr"),
            lang_guess: Some(LanguageGuess::Code("de")),
        };
        assert_eq!(reason(all), ("english".into(), "explicit model=' EN'".into()));
        assert_eq!(reason(Hints { model: None, ..all }), ("multilingual".into(), "explicit task='ml'".into()));
        let typed = Hints { task: Some("Typed-Decisions"), ..Hints::default() };
        assert_eq!(reason(typed), ("typed-decisions".into(), "explicit task='Typed-Decisions'".into()));
        let no_model = Hints { model: None, task: None, ..all };
        assert_eq!(reason(no_model), ("multilingual".into(), "explicit lang='fr'".into()));
        let guess = Hints { lang: None, ..no_model };
        assert_eq!(
            reason(guess),
            ("multilingual".into(), "lang_guess: the caller identified this as non-English text".into())
        );
    }

    #[test]
    fn languages_are_read_by_their_primary_subtag_and_codes_of_none_fall_through() {
        for (code, want) in [
            ("en", Some(true)),
            ("EN-us", Some(true)),
            ("en_US.UTF-8", Some(true)),
            (" english ", Some(true)),
            ("eng", Some(true)),
            ("de-AT", Some(false)),
            ("enm", Some(false)),
            ("C", None),
            ("C.UTF-8", None),
            ("posix", None),
            ("und", None),
            ("", None),
            ("  ", None),
            ("-en", None),
            (".en", None),
        ] {
            assert_eq!(is_english(code), want, "{code}");
        }
        let (model, why) = reason(Hints { lang: Some("C.UTF-8"), ..Hints::default() });
        assert!(model == "multilingual" && why.contains("looks like 'fr'"), "{why}");
    }

    #[test]
    fn a_function_may_guess_or_abstain_and_the_routers_own_guess_comes_second() {
        let registry = Registry::default();
        let yes = |_: &Value| Some("en-GB".to_owned());
        let no = |_: &Value| None;
        let rules = Rules {
            registry: &registry,
            default: "multilingual",
            auto_task: false,
            lang_guess: Some(LanguageGuess::Ask(&yes)),
        };
        let hints = Hints { lang_guess: Some(LanguageGuess::Ask(&no)), ..Hints::default() };
        let d = rules.decide(&json!("Bonjour à tous"), &json!({}), hints).unwrap();
        assert_eq!(
            (d.model.as_str(), d.reason.as_str()),
            ("english", "Router(lang_guess=...): the caller identified this as English text")
        );
    }

    #[test]
    fn question_ids_of_a_workflow_are_always_told_and_followed_only_if_asked() {
        let ids = json!({"urgency": {}, "action": {}, "category": {}, "needs_human": {}, "churn_risk": {}});
        let d = decide("the card is not here", ids.clone(), Hints::default(), false);
        assert_eq!((d.model.as_str(), d.workflow), ("english", Some("customer_service")));
        let d = decide("the card is not here", ids.clone(), Hints::default(), true);
        assert_eq!(d.model, "typed-decisions");
        assert_eq!(d.reason, "question ids match the 'customer_service' typed-decisions workflow");
        let mut more = ids;
        more["extra"] = json!({});
        assert_eq!(decide("the card is not here", more, Hints::default(), true).workflow, None);
    }

    #[test]
    fn an_unknown_model_or_task_is_an_error() {
        let registry = Registry::default();
        let rules = Rules { registry: &registry, default: "multilingual", auto_task: false, lang_guess: None };
        for hints in
            [Hints { model: Some("klingon"), ..Hints::default() }, Hints { task: Some("klingon"), ..Hints::default() }]
        {
            let message = rules.decide(&json!("x"), &json!({}), hints).unwrap_err().to_string();
            assert!(message.starts_with("unknown model 'klingon'; choose one of ['english',"), "{message}");
        }
    }

    #[test]
    fn the_default_is_for_texts_that_say_nothing() {
        let registry = Registry::default();
        let rules = Rules { registry: &registry, default: "english", auto_task: false, lang_guess: None };
        for (state, want) in [
            ("12 + 3", "no letters detected in state; using default (english)"),
            ("refund me", "Latin script, language not identified and no non-English letters; using default (english)"),
        ] {
            let d = rules.decide(&json!(state), &json!({}), Hints::default()).unwrap();
            assert_eq!((d.model.as_str(), d.reason.as_str()), ("english", want));
        }
    }
}
