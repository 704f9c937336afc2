//! The engine without sockets: scorers that are slow, fail or panic, requests that leave, checkpoints that come and go.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{Calls, broken, checkpoint, fake, holds, open, questions, real, service, until, write_checkpoint};
use serde_json::{Value, json};
use tilewright_decide::PredictOptions;
use tilewright_serve::fault::Fault;
use tilewright_serve::service::{Call, Reply, Service, Task};
use tilewright_serve::{Config, Keeping, Limits};

fn call(state: &str) -> Call {
    Call { states: vec![state.into()], questions: questions(), ..Call::default() }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

async fn all(service: &Arc<Service>, calls: Vec<Call>) -> Vec<Result<Reply, Fault>> {
    let tasks: Vec<_> = calls
        .into_iter()
        .map(|call| {
            let service = service.clone();
            tokio::spawn(async move { service.call(call).await })
        })
        .collect();
    let mut results = Vec::new();
    for task in tasks {
        results.push(task.await.unwrap());
    }
    results
}

fn slow(ms: u64) -> impl Fn(&[tilewright_models::laya::Row]) -> tilewright_core::Result<()> + Send + Sync {
    move |_| {
        std::thread::sleep(Duration::from_millis(ms));
        Ok(())
    }
}

#[test]
fn rows_of_different_requests_run_in_one_pack() {
    let packs = Calls::default();
    let count = packs.clone();
    let source = fake(None, move |_| {
        count.count();
        std::thread::sleep(Duration::from_millis(30));
        Ok(())
    });
    let service = service(&Config::default(), vec![source], &Keeping::default());
    runtime().block_on(async {
        let calls = (0..30).map(|i| call(&format!("number {i}"))).collect();
        assert!(all(&service, calls).await.iter().all(Result::is_ok));
    });
    assert!(packs.get() < 20, "30 requests in {} packs", packs.get());
}

#[test]
fn answers_are_those_of_decide_whatever_else_is_in_the_pack() {
    let mut agent = open(checkpoint());
    let words = ["refund", "Karte", "支付", "broken", "é", "it", "now", "please", "42", "{}"];
    let state = |i: usize| -> Value {
        let text: Vec<&str> = (0..1 + i * 7 % 60).map(|w| words[(i * 31 + w * w) % words.len()]).collect();
        match i % 3 {
            0 => text.join(" ").into(),
            1 => json!({"body": text.join(" "), "n": i}),
            _ => json!([{"role": "user", "content": text.join(" ")}]),
        }
    };
    let asked = |i: usize| {
        let mut asked = questions();
        let keys: Vec<String> = asked.as_object().unwrap().keys().cloned().collect();
        if !i.is_multiple_of(4) {
            asked.as_object_mut().unwrap().shift_remove(&keys[i % 3]);
        }
        asked
    };
    let service = service(&Config::default(), vec![real(None, checkpoint())], &Keeping::default());
    runtime().block_on(async {
        for round in 0..2 {
            let numbers: Vec<usize> = (round * 40..(round + 1) * 40).collect();
            let calls = numbers
                .iter()
                .map(|&i| Call {
                    states: (0..1 + i % 3).map(|s| state(i + s)).collect(),
                    questions: asked(i),
                    max_len: (i % 5 == 0).then_some(128),
                    ..Call::default()
                })
                .collect();
            for (i, reply) in numbers.into_iter().zip(all(&service, calls).await) {
                let reply = reply.unwrap();
                for (s, outcome) in reply.outcomes.iter().enumerate() {
                    let options = PredictOptions { max_len: (i % 5 == 0).then_some(128), ..PredictOptions::default() };
                    let alone = agent.predict(&state(i + s), &asked(i), &options).unwrap();
                    assert_eq!(outcome.prediction.to_json().to_string(), alone.to_json().to_string());
                }
            }
        }
    });
}

#[test]
fn a_panic_in_scoring_fails_the_request_that_caused_it_and_no_other() {
    let bad = holds("DYNAMITE");
    let source = fake(None, move |rows| {
        std::thread::sleep(Duration::from_millis(20));
        assert!(!rows.iter().any(&bad), "the planned panic");
        Ok(())
    });
    let service = service(&Config::default(), vec![source], &Keeping::default());
    runtime().block_on(async {
        let calls = (0..12).map(|i| call(if i == 5 { "say DYNAMITE" } else { "peace" })).collect();
        for (i, result) in all(&service, calls).await.into_iter().enumerate() {
            match result {
                Ok(_) => assert_ne!(i, 5),
                Err(Fault::Failed(cause)) => assert!(i == 5 && cause.contains("the planned panic"), "{i}: {cause}"),
                Err(other) => panic!("{other:?}"),
            }
        }
        assert!(service.call(call("after it")).await.is_ok());
    });
}

#[test]
fn a_failure_of_the_model_fails_the_request_that_caused_it_and_no_other() {
    let bad = holds("POISON");
    let source = fake(None, move |rows| if rows.iter().any(&bad) { Err(broken()) } else { Ok(()) });
    let service = service(&Config::default(), vec![source], &Keeping::default());
    runtime().block_on(async {
        let calls = (0..8).map(|i| call(if i == 3 { "POISON" } else { "water" })).collect();
        let failed: Vec<bool> = all(&service, calls).await.iter().map(Result::is_err).collect();
        assert_eq!(failed, (0..8).map(|i| i == 3).collect::<Vec<_>>());
    });
}

#[test]
fn a_request_is_given_up_when_its_time_is_over() {
    let service = service(&Config::default(), vec![fake(None, slow(300))], &Keeping::default());
    runtime().block_on(async {
        service.call(call("load it first")).await.unwrap();
        let start = Instant::now();
        let result = service.call_within(call("late"), Duration::from_millis(50)).await;
        assert_eq!(result.unwrap_err(), Fault::Deadline);
        assert!(start.elapsed() < Duration::from_millis(250));
    });
}

#[test]
fn the_rows_of_a_client_that_has_left_are_never_scored() {
    let scored = Calls::default();
    let (count, gone) = (scored.clone(), holds("FAREWELL"));
    let source = fake(None, move |rows| {
        rows.iter().filter(|row| gone(row)).for_each(|_| count.count());
        std::thread::sleep(Duration::from_millis(150));
        Ok(())
    });
    let service = service(&Config::default(), vec![source], &Keeping::default());
    runtime().block_on(async {
        service.call(call("load it first")).await.unwrap();
        let busy = service.clone();
        let first = tokio::spawn(async move { busy.call(call("keeps the device busy")).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        let leaving = service.clone();
        let second = tokio::spawn(async move { leaving.call(call("FAREWELL")).await });
        tokio::time::sleep(Duration::from_millis(30)).await;
        second.abort();
        assert!(first.await.unwrap().is_ok());
        service.call(call("and another")).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert_eq!(service.in_flight(), 0, "its place is free again");
    });
    assert_eq!(scored.get(), 0);
}

#[test]
fn more_requests_than_places_are_told_to_come_back_at_once() {
    let config = Config { limits: Limits { concurrent: 3, ..Limits::default() }, ..Config::default() };
    let service = service(&config, vec![fake(None, slow(200))], &Keeping::default());
    runtime().block_on(async {
        service.call(call("load it first")).await.unwrap();
        let accepted: Vec<_> = (0..3)
            .map(|_| {
                let service = service.clone();
                tokio::spawn(async move { service.call(call("in")).await })
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(50)).await;
        let start = Instant::now();
        assert!(matches!(service.call(call("out")).await, Err(Fault::Busy(_))));
        assert!(start.elapsed() < Duration::from_millis(50));
        for task in accepted {
            assert!(task.await.unwrap().is_ok(), "what was accepted is answered");
        }
        assert!(service.call(call("in again")).await.is_ok());
    });
}

/// A model that takes so many microseconds a token.
fn paced(
    pace: &Arc<AtomicU64>,
) -> impl Fn(&[tilewright_models::laya::Row]) -> tilewright_core::Result<()> + Send + Sync + 'static {
    let pace = pace.clone();
    move |rows| {
        let tokens: usize = rows.iter().map(|row| row.ids.len()).sum();
        std::thread::sleep(Duration::from_micros(tokens as u64 * pace.load(Ordering::SeqCst)));
        Ok(())
    }
}

/// Asks until the engine knows its pace, which takes a pack's worth of tokens.
async fn warm(service: &Arc<Service>) {
    let before = service.metrics.tokens.get();
    while service.metrics.tokens.get() < before + 1024 {
        service.call(call(&"long text ".repeat(60))).await.unwrap();
    }
}

#[test]
fn who_cannot_be_answered_in_time_is_told_so_at_once_and_who_is_let_in_keeps_its_time() {
    let pace = Arc::new(AtomicU64::new(200));
    let service = service(&Config::default(), vec![fake(None, paced(&pace))], &Keeping::default());
    runtime().block_on(async {
        warm(&service).await;
        let ask = |service: Arc<Service>| async move {
            let start = Instant::now();
            let result = service.call_within(call(&"long text ".repeat(60)), Duration::from_secs(3)).await;
            (result, start.elapsed())
        };
        let tasks: Vec<_> = (0..60).map(|_| tokio::spawn(ask(service.clone()))).collect();
        let (mut answered, mut refused) = (0, 0);
        for task in tasks {
            match task.await.unwrap() {
                (Ok(_), _) => answered += 1,
                (Err(Fault::NoTime { message, retry }), took) => {
                    refused += 1;
                    assert!(took < Duration::from_secs(1), "told after {took:?}");
                    assert!(retry >= Duration::from_secs(1) && message.contains("server busy"), "{message}");
                }
                (Err(other), took) => panic!("let in, then {other:?} after {took:?}"),
            }
        }
        assert!(answered > 4 && refused > 4, "{answered} answered, {refused} refused");
        assert_eq!(service.metrics.late.get(), refused);
        assert!(service.call(call("a short one")).await.is_ok(), "and then it goes on");
        assert_eq!(service.engine.backlog(), Duration::ZERO);
    });
}

#[test]
fn nobody_is_refused_for_his_time_before_the_pace_is_known() {
    let service = service(&Config::default(), vec![fake(None, slow(150))], &Keeping::default());
    runtime().block_on(async {
        let tasks: Vec<_> = (0..6)
            .map(|_| {
                let service = service.clone();
                tokio::spawn(async move { service.call_within(call("x"), Duration::from_millis(100)).await })
            })
            .collect();
        for task in tasks {
            assert_eq!(task.await.unwrap().unwrap_err(), Fault::Deadline);
        }
    });
    assert_eq!(service.metrics.late.get(), 0);
}

#[test]
fn a_request_that_is_too_long_for_its_time_is_refused_until_the_device_is_faster() {
    let pace = Arc::new(AtomicU64::new(1000));
    let service = service(&Config::default(), vec![fake(None, paced(&pace))], &Keeping::default());
    let long = || service.call_within(call(&"long text ".repeat(60)), Duration::from_millis(150));
    runtime().block_on(async {
        warm(&service).await;
        let start = Instant::now();
        let Err(Fault::NoTime { message, .. }) = long().await else { panic!("let in") };
        assert!(start.elapsed() < Duration::from_millis(100));
        assert!(message.contains("this request alone would take about"), "{message}");
        pace.store(1, Ordering::SeqCst);
        let mut result = Err(Fault::Deadline);
        for _ in 0..60 {
            service.call(call(&"long text ".repeat(30))).await.unwrap();
            result = long().await;
            if result.is_ok() {
                break;
            }
        }
        assert!(result.is_ok(), "{result:?}");
    });
}

#[test]
fn a_reply_tells_where_its_time_went() {
    let service = service(&Config::default(), vec![fake(None, slow(50))], &Keeping::default());
    runtime().block_on(async {
        service.call(call("load it first")).await.unwrap();
        let busy = service.clone();
        let first = tokio::spawn(async move { busy.call(call("keeps the device busy")).await });
        tokio::time::sleep(Duration::from_millis(20)).await;
        let spent = service.call(call("waits")).await.unwrap().spent;
        assert!(spent.compute >= Duration::from_millis(50) && spent.queue >= Duration::from_millis(10), "{spent:?}");
        assert!(spent.tokens > 10 && spent.packs == 1, "{spent:?}");
        first.await.unwrap().unwrap();
    });
}

#[test]
fn a_small_request_passes_a_large_one() {
    let service = service(&Config::default(), vec![fake(None, slow(20))], &Keeping::default());
    runtime().block_on(async {
        service.call(call("load it first")).await.unwrap();
        let large = Call {
            states: (0..64).map(|i| format!("{i} {}", "long text ".repeat(40)).into()).collect(),
            questions: questions(),
            ..Call::default()
        };
        let busy = service.clone();
        let first = tokio::spawn(async move {
            busy.call(large).await.unwrap();
            Instant::now()
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        for _ in 0..3 {
            service.call(call("small")).await.unwrap();
        }
        let small = Instant::now();
        assert!(first.await.unwrap() > small);
    });
}

#[test]
fn a_pass_beyond_the_token_limit_is_too_large() {
    let config = Config { limits: Limits { batch_tokens: 500, ..Limits::default() }, ..Config::default() };
    let service = service(&config, vec![fake(None, slow(0))], &Keeping::default());
    runtime().block_on(async {
        let result = service.call(call(&"long text ".repeat(60))).await;
        assert!(matches!(result, Err(Fault::TooLarge(_))), "{result:?}");
    });
}

#[test]
fn large_choices_are_narrowed_and_every_option_gets_a_probability() {
    let service = service(&Config::default(), vec![real(None, checkpoint())], &Keeping::default());
    let options: Vec<String> = (0..255).map(|i| format!("queue {i}")).collect();
    let call = Call {
        states: vec!["where to?".into()],
        questions: json!({
            "queue": {"type": "choice", "instructions": "Which?", "criteria": options},
            "sure": {"type": "noul", "instructions": "Sure?"},
        }),
        ..Call::default()
    };
    let reply = runtime().block_on(service.call(call)).unwrap();
    let prediction = &reply.outcomes[0].prediction;
    let answer = prediction.answer("queue").unwrap();
    assert_eq!(answer.keys, options);
    assert_eq!(answer.distribution.len(), 255);
    let (best, _) = answer.distribution.largest();
    assert_eq!(answer.to_json()["choice"], options[best]);
    assert_eq!(prediction.extra["tournament"]["queue"]["rounds"], 1);
    // The same winner as in a tournament of the decide crate.
    let theirs = open(checkpoint()).predict_tournament(
        &"where to?".into(),
        &json!({"queue": {"type": "choice", "instructions": "Which?", "criteria": options}}),
        16,
        &PredictOptions::default(),
    );
    assert_eq!(theirs.unwrap().to_json()["answers"]["queue"]["choice"], options[best]);
}

#[test]
fn long_states_schemas_and_explanations_go_through_the_engine_too() {
    let service = service(&Config::default(), vec![real(None, checkpoint())], &Keeping::default());
    let mut agent = open(checkpoint());
    let long: Value = "My card was charged twice. ".repeat(100).into();
    let schema = json!({"properties": {"refund": {"type": "boolean"}, "team": {"enum": ["billing", "it"]}}});
    let of = |task: Task| Call { states: vec![long.clone()], questions: questions(), task, ..Call::default() };
    runtime().block_on(async {
        let reply = service.call(of(Task::Long { window: None, stride: None })).await.unwrap();
        let alone = agent.predict_long(&long, &questions(), None, None, &PredictOptions::default()).unwrap();
        assert_eq!(reply.outcomes[0].prediction.to_json(), alone.to_json());
        let reply = service.call(of(Task::Decide { schema: schema.clone() })).await.unwrap();
        let alone = agent.decide(&long, &schema, &PredictOptions::default()).unwrap();
        assert_eq!(reply.outcomes[0].details, Some(alone.details()));
        let reply = service.call(of(Task::Explain)).await.unwrap();
        assert_eq!(reply.outcomes[0].details.as_ref().unwrap()[0]["question"], "refund");
    });
}

#[test]
fn a_checkpoint_is_exchanged_under_load_and_no_request_fails() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("served");
    write_checkpoint(&dir, 1);
    let service = service(&Config::default(), vec![real(None, &dir)], &Keeping::default());
    let other = temp.path().join("other");
    write_checkpoint(&other, 2);
    let old = open(&dir).predict(&"x".into(), &questions(), &PredictOptions::default()).unwrap().to_json();
    let new = open(&other).predict(&"x".into(), &questions(), &PredictOptions::default()).unwrap().to_json();
    assert_ne!(old, new);
    let stop = Arc::new(AtomicBool::new(false));
    runtime().block_on(async {
        service.call(call("x")).await.unwrap();
        let tasks: Vec<_> = (0..4)
            .map(|_| {
                let (service, stop) = (service.clone(), stop.clone());
                tokio::spawn(async move {
                    let mut answers = Vec::new();
                    while !stop.load(Ordering::SeqCst) {
                        answers.push(service.call(call("x")).await.unwrap().outcomes[0].prediction.to_json());
                    }
                    answers
                })
            })
            .collect();
        std::fs::remove_dir_all(&dir).unwrap();
        std::fs::rename(&other, &dir).unwrap();
        let models = service.models.clone();
        let exchanged = tokio::task::spawn_blocking(move || {
            assert!(models.reload(true).is_empty(), "one look is not enough: files may still be written");
            models.reload(true)
        });
        assert_eq!(exchanged.await.unwrap(), ["model"]);
        let after = service.call(call("x")).await.unwrap().outcomes[0].prediction.to_json();
        stop.store(true, Ordering::SeqCst);
        assert_eq!(after, new);
        let mut olds = 0;
        for task in tasks {
            for answer in task.await.unwrap() {
                assert!(answer == old || answer == new, "never a mixture");
                olds += usize::from(answer == old);
            }
        }
        assert!(olds > 0);
    });
    assert!(service.models.reload(true).is_empty(), "nothing has changed since");
}

#[test]
fn a_checkpoint_that_does_not_load_leaves_the_old_one_in_place() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("served");
    write_checkpoint(&dir, 1);
    let service = service(&Config::default(), vec![real(None, &dir)], &Keeping::default());
    runtime().block_on(async {
        let before = service.call(call("x")).await.unwrap().outcomes[0].prediction.to_json();
        // In place, as a careless copy does it: the file is cut while it is served.
        std::fs::write(dir.join("model.safetensors"), b"cut").unwrap();
        service.models.reload(true);
        assert!(service.models.reload(true).is_empty());
        let status = service.models.status();
        assert!(status[0].loaded && status[0].error.as_ref().unwrap().contains("model.safetensors"), "{status:?}");
        assert_eq!(service.metrics.load_failures.get(), 1);
        service.models.reload(true);
        assert_eq!(service.metrics.load_failures.get(), 1, "not tried again before it changes again");
        let after = service.call(call("y")).await.unwrap();
        assert_eq!(after.outcomes.len(), 1, "also new texts, whose embeddings were not read before");
        assert_eq!(service.call(call("x")).await.unwrap().outcomes[0].prediction.to_json(), before);
    });
}

#[test]
fn the_least_recently_used_checkpoint_makes_room() {
    let sources = ["a", "b", "c"].map(|name| fake(Some(name), slow(0))).to_vec();
    let service = service(&Config::default(), sources, &Keeping { max_loaded: 2, ..Keeping::default() });
    let loaded = || {
        let status = service.models.status();
        status.into_iter().filter(|s| s.loaded).map(|s| s.key).collect::<Vec<_>>()
    };
    let on = |model: &str| Call { model: Some(model.into()), ..call("x") };
    runtime().block_on(async {
        for (model, want) in [("a", vec!["a"]), ("b", vec!["a", "b"]), ("a", vec!["a", "b"]), ("c", vec!["a", "c"])] {
            let reply = service.call(on(model)).await.unwrap();
            assert_eq!(reply.outcomes[0].model, model);
            assert_eq!(loaded(), want);
        }
    });
    assert_eq!((service.metrics.loads.get(), service.metrics.unloads.get()), (3, 1));
    service.models.unload_idle(Duration::ZERO);
    assert!(loaded().is_empty());
}

#[test]
fn requests_that_need_the_same_checkpoint_share_one_build() {
    let source = fake(None, slow(50));
    let service = service(&Config::default(), vec![source], &Keeping::default());
    runtime().block_on(async {
        let calls = (0..20).map(|i| call(&i.to_string())).collect();
        assert!(all(&service, calls).await.iter().all(Result::is_ok));
    });
    assert_eq!(service.metrics.loads.get(), 1);
}

#[test]
fn states_are_routed_by_their_language_and_told_why() {
    let sources = ["english", "multilingual"].map(|name| fake(Some(name), slow(0))).to_vec();
    let service = service(&Config::default(), sources, &Keeping::default());
    let call = Call {
        states: ["the card is not here", "支付失败", "where is my refund"].map(Value::from).to_vec(),
        questions: questions(),
        ..Call::default()
    };
    let reply = runtime().block_on(service.call(call)).unwrap();
    let models: Vec<&str> = reply.outcomes.iter().map(|o| o.model.as_str()).collect();
    assert_eq!(models, ["english", "multilingual", "english"]);
    assert_eq!(reply.outcomes[0].prediction.extra["routing"]["reason"], "English Latin text");
}

#[test]
fn a_text_whose_checkpoint_is_not_served_is_refused_unless_another_stands_in_for_it() {
    let call = || Call { states: vec!["支付失败".into()], questions: questions(), ..Call::default() };
    let sources = |names: &[&str]| names.iter().map(|name| fake(Some(name), slow(0))).collect::<Vec<_>>();
    runtime().block_on(async {
        let two = service(&Config::default(), sources(&["english", "typed"]), &Keeping::default());
        let Err(Fault::Invalid { details, .. }) = two.call(call()).await else { panic!("answered") };
        assert!(details[0].msg.contains("multilingual") && details[0].msg.contains("english, typed-decisions"));
        assert!(two.call(Call { model: Some("english".into()), ..call() }).await.is_ok());

        let keeping = Keeping { default: Some("english".into()), ..Keeping::default() };
        let told = service(&Config::default(), sources(&["english", "typed"]), &keeping);
        let one = service(&Config::default(), sources(&["english"]), &Keeping::default());
        for service in [told, one] {
            let reply = service.call(call()).await.unwrap();
            assert_eq!(reply.outcomes[0].model, "english");
            let reason = reply.outcomes[0].prediction.extra["routing"]["reason"].as_str().unwrap().to_owned();
            assert!(reason.ends_with("multilingual is not served, using english"), "{reason}");
        }
    });
}

#[test]
fn names_pin_a_checkpoint_unknown_names_do_not_and_paths_are_refused() {
    let sources = ["english", "multilingual"].map(|name| fake(Some(name), slow(0))).to_vec();
    let service = service(&Config::default(), sources, &Keeping::default());
    let on = |model: &str| Call { model: Some(model.into()), ..call("the card is not here") };
    runtime().block_on(async {
        for (model, want) in [("ml", "multilingual"), ("jev-1", "english"), ("convaiinnovations/laya", "english")] {
            assert_eq!(service.call(on(model)).await.unwrap().outcomes[0].model, want, "{model}");
        }
        for path in ["/etc/passwd", "someone/else"] {
            assert!(matches!(service.call(on(path)).await, Err(Fault::Invalid { .. })), "{path}");
        }
    });
}

#[test]
fn a_checkpoint_that_panics_or_fails_while_loading_is_an_error_and_can_be_tried_again() {
    let first = Arc::new(AtomicBool::new(true));
    let good = fake(None, slow(0));
    let loader = good.loader.clone();
    let source = tilewright_serve::ModelSource {
        loader: Arc::new(move || {
            assert!(!first.swap(false, Ordering::SeqCst), "the planned panic");
            loader()
        }),
        ..good
    };
    let service = service(&Config::default(), vec![source], &Keeping::default());
    runtime().block_on(async {
        let error = service.call(call("x")).await.unwrap_err();
        assert!(matches!(&error, Fault::Failed(cause) if cause.contains("the planned panic")), "{error:?}");
        assert!(service.call(call("x")).await.is_ok());
    });
}

#[test]
fn a_model_whose_answers_are_not_finite_is_not_let_in() {
    struct Nan;
    impl tilewright_models::laya::Scorer for Nan {
        fn score(
            &mut self,
            rows: &[tilewright_models::laya::Row],
        ) -> tilewright_core::Result<Vec<tilewright_models::laya::RowScores>> {
            let nan = |row: &tilewright_models::laya::Row| tilewright_models::laya::RowScores {
                logits: vec![f32::NAN; row.markers.len()],
                act_logits: vec![0.0, 0.0],
            };
            Ok(rows.iter().map(nan).collect())
        }
        fn embed(&mut self, _: &[Vec<u32>]) -> tilewright_core::Result<Vec<Vec<f32>>> {
            Ok(Vec::new())
        }
    }
    let source = tilewright_serve::ModelSource {
        name: None,
        dir: None,
        loader: Arc::new(|| {
            let (agent, _) = open(checkpoint()).detach();
            Ok(tilewright_serve::Loaded { agent, scorer: Box::new(Nan) })
        }),
    };
    let service = service(&Config::default(), vec![source], &Keeping::default());
    assert!(service.models.preload().is_err());
}

#[test]
fn an_unloaded_model_gives_its_thread_back() {
    let alive = Arc::new(());
    let weak = Arc::downgrade(&alive);
    let source = fake(None, move |_| {
        let _ = &alive;
        Ok(())
    });
    let service = service(&Config::default(), vec![source], &Keeping::default());
    runtime().block_on(async { service.call(call("x")).await.unwrap() });
    let loaded = weak.strong_count();
    service.models.unload_idle(Duration::ZERO);
    until("the scorer is dropped", || weak.strong_count() <= loaded);
    drop(service);
    until("and the loader with it", || weak.strong_count() == 0);
}
