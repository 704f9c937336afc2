//! Choices with more options than a row has room for.
//!
//! Options compete in groups, and the winners of the groups in another round, until one group is left; every option is read with the token budget of a small
//! question. Each option gets a probability: within a group the ratio of two options' probabilities is what the model says of them, and the ratio of two
//! winners is what a later round says. So `p(option) = p(winner in the last round) * product of (p(option) / p(winner))`, divided by their sum. It is the
//! distribution that one pass over all options would give if options did not influence each other, and the winner of the tournament is its maximum.

use serde_json::{Map, Value, json};
use tilewright_decide::{Answer, AnswerValue, Distribution, PredictOptions, Prediction, Result, round4};

use crate::config::Tournament;
use crate::models::Lease;

/// Questions with large choices among them.
pub(super) struct Narrowed<'a> {
    questions: &'a Map<String, Value>,
    /// Ids of the large ones.
    large: Vec<&'a str>,
    group: usize,
}

impl<'a> Narrowed<'a> {
    /// None if no choice is large.
    pub(super) fn of(questions: &'a Value, tournament: Tournament) -> Option<Self> {
        let questions = questions.as_object()?;
        let is_large = |definition: &Value| {
            let count = match definition.get("criteria") {
                Some(Value::Object(options)) => options.len(),
                Some(Value::Array(labels)) => labels.len(),
                _ => 0,
            };
            definition.get("type").is_some_and(|t| t == "choice") && count > tournament.above
        };
        let large: Vec<&str> = questions.iter().filter(|(_, d)| is_large(d)).map(|(id, _)| id.as_str()).collect();
        (!large.is_empty()).then(|| Narrowed { questions, large, group: tournament.group.max(2) })
    }
}

/// An option that is still in, and the options that lost to it with their weight relative to its own.
#[derive(Clone, Debug, PartialEq)]
struct Contender {
    option: usize,
    with: Vec<(usize, f64)>,
}

struct Contest<'a> {
    id: &'a str,
    definition: &'a Value,
    labels: Vec<Value>,
    left: Vec<Contender>,
    rounds: usize,
}

impl<'a> Contest<'a> {
    fn new(id: &'a str, definition: &'a Value) -> Self {
        let labels: Vec<Value> = match definition.get("criteria") {
            Some(Value::Object(options)) => options.keys().map(|k| k.as_str().into()).collect(),
            Some(Value::Array(labels)) => labels.clone(),
            _ => Vec::new(),
        };
        let left = (0..labels.len()).map(|option| Contender { option, with: vec![(option, 1.0)] }).collect();
        Contest { id, definition, labels, left, rounds: 0 }
    }

    /// The question about some contenders alone. An order of all options has no meaning for a few of them.
    fn question(&self, contenders: &[Contender]) -> Value {
        let mut definition = self.definition.clone();
        let criteria = match self.definition.get("criteria") {
            Some(Value::Object(options)) => {
                let entry = |c: &Contender| {
                    let label = self.labels[c.option].as_str().unwrap_or_default();
                    (label.to_owned(), options[label].clone())
                };
                contenders.iter().map(entry).collect::<Map<_, _>>().into()
            }
            _ => contenders.iter().map(|c| self.labels[c.option].clone()).collect::<Vec<_>>().into(),
        };
        if let Some(definition) = definition.as_object_mut() {
            definition.insert("criteria".into(), criteria);
            definition.shift_remove("option_order");
        }
        definition
    }

    /// Near-equal groups in the order of the options; one if nothing has to be narrowed.
    fn groups(&self, size: usize) -> Vec<Vec<Contender>> {
        let n = self.left.len();
        let parts = n.div_ceil(size).max(1);
        (0..parts).map(|i| self.left[i * n / parts..(i + 1) * n / parts].to_vec()).collect()
    }
}

/// The winner of a group takes the others with it.
fn winner(group: &[Contender], p: &[f32]) -> Contender {
    let best = (0..p.len()).fold(0, |best, i| if p[i] > p[best] { i } else { best });
    let with = group.iter().zip(p).flat_map(|(contender, &share)| {
        let ratio = f64::from(share) / f64::from(p[best]);
        contender.with.iter().map(move |&(option, weight)| (option, weight * ratio))
    });
    Contender { option: group[best].option, with: with.collect() }
}

/// Answers all questions about a state, the large choices in rounds.
pub(super) fn predict(
    agent: &mut Lease,
    state: &Value,
    narrowed: &Narrowed<'_>,
    options: &PredictOptions,
) -> Result<Prediction> {
    // What is wrong with a large question is told of it, not of a group.
    tilewright_decide::parse_questions(&Value::Object(narrowed.questions.clone()))?;
    let mut contests: Vec<Contest<'_>> =
        narrowed.large.iter().map(|id| Contest::new(id, &narrowed.questions[*id])).collect();
    let mut read = 0;
    let plain = PredictOptions { gate: None, ..options.clone() };
    loop {
        let mut asked = Map::new();
        let mut groups = Vec::new();
        for (c, contest) in contests.iter().enumerate().filter(|(_, c)| c.left.len() > narrowed.group) {
            for group in contest.groups(narrowed.group) {
                asked.insert(groups.len().to_string(), contest.question(&group));
                groups.push((c, group));
            }
        }
        if groups.is_empty() {
            break;
        }
        let result = agent.predict(state, &asked.into(), &plain)?;
        read += result.usage.input_tokens;
        let mut winners: Vec<Vec<Contender>> = vec![Vec::new(); contests.len()];
        for ((c, group), answer) in groups.iter().zip(&result.answers) {
            winners[*c].push(winner(group, answer.distribution.probabilities()));
        }
        for (contest, winners) in contests.iter_mut().zip(winners).filter(|(_, w)| !w.is_empty()) {
            contest.left = winners;
            contest.rounds += 1;
        }
    }
    let mut last = narrowed.questions.clone();
    for contest in &contests {
        last[contest.id] = contest.question(&contest.left);
    }
    let mut result = agent.predict(state, &last.into(), options)?;
    result.usage.input_tokens += read;
    let mut meta = Map::new();
    for contest in &contests {
        if let Some(answer) = result.answers.iter_mut().find(|a| a.id == contest.id) {
            widen(answer, contest, options)?;
        }
        let finalists: Vec<Value> = contest.left.iter().map(|c| contest.labels[c.option].clone()).collect();
        let entry = json!({"labels": finalists, "n": contest.labels.len(), "rounds": contest.rounds});
        meta.insert(contest.id.to_owned(), entry);
    }
    result.extra.insert("tournament".into(), meta.into());
    Ok(result)
}

/// Turns the answer of the last round into one over all options.
fn widen(answer: &mut Answer, contest: &Contest<'_>, options: &PredictOptions) -> Result<()> {
    let last = answer.distribution.probabilities();
    let mut p = vec![0.0; contest.labels.len()];
    for (contender, &share) in contest.left.iter().zip(last) {
        for &(option, weight) in &contender.with {
            p[option] = weight * f64::from(share);
        }
    }
    let sum: f64 = p.iter().sum();
    let distribution = Distribution::new(p.iter().map(|x| (x / sum) as f32).collect())?;
    let (best, largest) = distribution.largest();
    let keys: Vec<String> = contest.labels.iter().map(key).collect();
    answer.value = AnswerValue::Choice(contest.labels[best].clone());
    answer.keys = keys;
    answer.confidence = round4(distribution.concentration());
    answer.answer_confidence = round4(largest);
    answer.distribution = distribution;
    answer.judge(options.gate.as_ref());
    Ok(())
}

fn key(label: &Value) -> String {
    match label {
        Value::String(s) => s.clone(),
        other => tilewright_decide::json_text(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contender(option: usize) -> Contender {
        Contender { option, with: vec![(option, 1.0)] }
    }

    #[test]
    fn weights_are_those_of_one_pass_if_options_do_not_influence_each_other() {
        // Softmax weights of six options, in groups of two, then of three.
        let w = [1.0, 4.0, 2.0, 2.0, 8.0, 1.0];
        let p = |options: &[usize]| -> Vec<f32> {
            let sum: f32 = options.iter().map(|&o| w[o]).sum();
            options.iter().map(|&o| w[o] / sum).collect()
        };
        let mut left = Vec::new();
        for pair in [[0, 1], [2, 3], [4, 5]] {
            left.push(winner(&pair.map(contender), &p(&pair)));
        }
        assert_eq!(left.iter().map(|c| c.option).collect::<Vec<_>>(), [1, 2, 4]);
        let last = p(&[1, 2, 4]);
        let mut all = [0.0; 6];
        for (c, share) in left.iter().zip(last) {
            for &(option, weight) in &c.with {
                all[option] = weight * f64::from(share);
            }
        }
        let sum: f64 = all.iter().sum();
        let total: f32 = w.iter().sum();
        for (got, want) in all.iter().zip(w) {
            assert!((got / sum - f64::from(want / total)).abs() < 1e-6, "{all:?}");
        }
    }

    #[test]
    fn only_large_choices_are_narrowed() {
        let labels: Vec<String> = (0..5).map(|i| i.to_string()).collect();
        let questions = json!({
            "a": {"type": "choice", "criteria": labels},
            "b": {"type": "choice", "criteria": ["x", "y"]},
            "c": {"type": "score", "criteria": labels},
        });
        let tournament = Tournament { above: 4, group: 2 };
        assert_eq!(Narrowed::of(&questions, tournament).unwrap().large, ["a"]);
        assert!(Narrowed::of(&questions, Tournament { above: 5, group: 2 }).is_none());
    }

    #[test]
    fn groups_are_near_equal_and_keep_the_order() {
        let definition = json!({"type": "choice", "criteria": ["a", "b", "c", "d", "e"]});
        let contest = Contest::new("q", &definition);
        let sizes: Vec<usize> = contest.groups(2).iter().map(Vec::len).collect();
        assert_eq!(sizes, [1, 2, 2]);
        assert_eq!(contest.question(&contest.groups(2)[1])["criteria"], json!(["b", "c"]));
    }
}
