//! Questions with more labels than a row has room for: a shortlist by similarity, or a tournament of groups.

use std::collections::HashSet;

use serde_json::{Map, Value};
use tilewright_models::laya::Scorer;

use super::{Agent, PredictOptions};
use crate::answer::AnswerValue;
use crate::error::{Error, Result, type_error, value_error};
use crate::json::{canonical, float, plain_text};
use crate::prediction::Prediction;
use crate::python::{LabelKey, label_text, repr, repr_str, type_name};

/// Labels of a shortlist by default.
pub const SHORTLIST_K: usize = 20;

/// Labels of a group by default.
pub const TOURNAMENT_GROUP: usize = 16;

/// Tokens of an embedded text, special tokens included.
const EMBED_TOKENS: usize = 512;

/// Turns texts into vectors of one length.
pub type Embed<'a> = dyn FnMut(&[String]) -> Result<Vec<Vec<f32>>> + 'a;

/// The labels of a choice with their descriptions; null where there is none.
type Items = Vec<(Value, Value)>;

impl<S: Scorer> Agent<S> {
    /// Embeds texts by the mean of the encoder's final hidden states. Handy, and not made for the purpose: an embedding model ranks better.
    pub fn embed(&mut self, texts: &[String]) -> Result<Vec<Vec<f32>>> {
        let mut rows = Vec::with_capacity(texts.len());
        for text in texts {
            let mut row = vec![self.tokenizer.cls()];
            row.extend(self.tokenizer.encode_verbatim(text)?.into_iter().take(EMBED_TOKENS - 2));
            row.push(self.tokenizer.sep());
            rows.push(row);
        }
        Ok(self.scorer.embed(&rows)?)
    }

    /// Keeps the `k` labels of each choice that are most similar to instructions and state, then predicts once. The probabilities are over the labels kept.
    pub fn predict_shortlist(
        &mut self,
        state: &Value,
        questions: &Value,
        k: usize,
        options: &PredictOptions,
    ) -> Result<Prediction> {
        let (reduced, meta, warnings) = shortlist(state, questions, k, &mut |texts| self.embed(texts))?;
        self.predict_narrowed("shortlist", state, &reduced, meta, warnings, options)
    }

    /// The same with another embedding.
    pub fn predict_shortlist_by(
        &mut self,
        embed: &mut Embed<'_>,
        state: &Value,
        questions: &Value,
        k: usize,
        options: &PredictOptions,
    ) -> Result<Prediction> {
        let (reduced, meta, warnings) = shortlist(state, questions, k, embed)?;
        self.predict_narrowed("shortlist", state, &reduced, meta, warnings, options)
    }

    fn predict_narrowed(
        &mut self,
        name: &str,
        state: &Value,
        questions: &Value,
        meta: Map<String, Value>,
        warnings: Vec<String>,
        options: &PredictOptions,
    ) -> Result<Prediction> {
        let mut result = self.predict(state, questions, options)?;
        result.extra.insert(name.into(), meta.into());
        result.warnings.extend(warnings);
        Ok(result)
    }

    /// Lets the labels of each large choice compete in groups of at most `group_size`, round after round, and then the winners in one last call. Every label
    /// is read with the token budget of a small question.
    pub fn predict_tournament(
        &mut self,
        state: &Value,
        questions: &Value,
        group_size: usize,
        options: &PredictOptions,
    ) -> Result<Prediction> {
        let questions = questions_map(questions)?;
        if group_size < 2 {
            return value_error!("group_size must be an integer of at least 2, got {group_size}");
        }
        struct Entry<'a> {
            id: &'a str,
            definition: &'a Value,
            items: Items,
            labels: usize,
            rounds: usize,
        }
        let mut entries = Vec::new();
        for (id, definition) in questions.iter().filter(|(_, d)| is_choice(d)) {
            let items = choice_items(id, definition)?;
            entries.push(Entry { id, definition, labels: items.len(), items, rounds: 0 });
        }
        let mut dropped = Dropped::default();
        loop {
            let mut groups: Vec<(usize, Items)> = Vec::new();
            for (e, entry) in entries.iter().enumerate() {
                let n = entry.items.len();
                let parts = n.div_ceil(group_size);
                if parts > 1 {
                    groups.extend((0..parts).map(|i| (e, entry.items[i * n / parts..(i + 1) * n / parts].to_vec())));
                }
            }
            if groups.is_empty() {
                break;
            }
            let asked: Map<String, Value> = groups
                .iter()
                .enumerate()
                .map(|(i, (e, items))| (i.to_string(), dropped.narrowed(entries[*e].id, entries[*e].definition, items)))
                .collect();
            let result = self.predict(state, &asked.into(), options)?;
            let mut winners: Vec<Items> = vec![Vec::new(); entries.len()];
            for ((e, items), answer) in groups.iter().zip(&result.answers) {
                let (best, _) = answer.distribution.largest();
                debug_assert!(matches!(answer.value, AnswerValue::Choice(_)));
                winners[*e].push(items[best].clone());
            }
            for (entry, winners) in entries.iter_mut().zip(winners).filter(|(_, w)| !w.is_empty()) {
                entry.items = winners;
                entry.rounds += 1;
            }
        }
        let mut last = questions.clone();
        for entry in entries.iter().filter(|e| e.rounds > 0) {
            last[entry.id] = dropped.narrowed(entry.id, entry.definition, &entry.items);
        }
        let meta = entries.into_iter().map(|entry| {
            let labels: Vec<Value> = entry.items.into_iter().map(|(label, _)| label).collect();
            (entry.id.to_owned(), serde_json::json!({"labels": labels, "n": entry.labels, "rounds": entry.rounds}))
        });
        let meta = meta.collect();
        self.predict_narrowed("tournament", state, &last.into(), meta, dropped.warnings, options)
    }
}

/// The questions with their choices narrowed, what was done to each choice, and warnings.
fn shortlist(
    state: &Value,
    questions: &Value,
    k: usize,
    embed: &mut Embed<'_>,
) -> Result<(Value, Map<String, Value>, Vec<String>)> {
    let questions = questions_map(questions)?;
    if k < 1 {
        return value_error!("k must be a positive integer, got {k}");
    }
    let mut reduced = questions.clone();
    let mut meta = Map::new();
    let mut dropped = Dropped::default();
    for (id, definition) in questions.iter().filter(|(_, d)| is_choice(d)) {
        let items = choice_items(id, definition)?;
        let n = items.len();
        let passthrough = k >= n;
        let (kept, scores) = if passthrough {
            (items, Value::Null)
        } else {
            let mut texts = vec![query(state, definition.get("instructions"))];
            texts.extend(items.iter().map(option_text));
            let similarities = cosines(&embed(&texts)?, texts.len())?;
            let mut order: Vec<usize> = (0..n).collect();
            // Stable: of equals the earlier label stays.
            order.sort_by(|&a, &b| similarities[b].total_cmp(&similarities[a]));
            order.truncate(k);
            let scores: Vec<Value> = order.iter().map(|&i| float(similarities[i])).collect();
            (order.into_iter().map(|i| items[i].clone()).collect::<Items>(), scores.into())
        };
        if !passthrough {
            reduced[id] = dropped.narrowed(id, definition, &kept);
        }
        let labels: Vec<Value> = kept.into_iter().map(|(label, _)| label).collect();
        let entry = serde_json::json!({
            "labels": labels, "scores": scores, "k": k, "n": n, "passthrough": passthrough
        });
        meta.insert(id.clone(), entry);
    }
    Ok((reduced.into(), meta, dropped.warnings))
}

fn questions_map(questions: &Value) -> Result<&Map<String, Value>> {
    match questions {
        Value::Object(map) => Ok(map),
        _ => type_error!("questions must be a dict of question id -> definition"),
    }
}

fn is_choice(definition: &Value) -> bool {
    definition.get("type").and_then(Value::as_str) == Some("choice")
}

fn choice_items(id: &str, definition: &Value) -> Result<Items> {
    let items: Items = match definition.get("criteria") {
        None => return value_error!("question {} is a choice but has no criteria", repr_str(id)),
        Some(Value::Object(map)) => map.iter().map(|(k, v)| (Value::String(k.clone()), v.clone())).collect(),
        Some(Value::Array(labels)) => labels.iter().map(|label| (canonical(label), Value::Null)).collect(),
        Some(other) => return type_error!("choice criteria must be a dict or list, got {}", type_name(other)),
    };
    if items.is_empty() {
        return value_error!("choice criteria must contain at least one option");
    }
    let mut seen = HashSet::new();
    for (label, _) in &items {
        if label.is_array() || label.is_object() {
            return Err(Error::Type(format!("unhashable type: '{}'", type_name(label))));
        }
        if !seen.insert(LabelKey::of(label)) {
            return value_error!("choice criteria label {} is duplicated", repr(label));
        }
    }
    Ok(items)
}

/// Option orders that no longer fit. An order has one slot an option; moved to the options kept it would put them elsewhere (trap 13).
#[derive(Default)]
struct Dropped {
    ids: HashSet<String>,
    warnings: Vec<String>,
}

impl Dropped {
    /// The definition with these labels only.
    fn narrowed(&mut self, id: &str, definition: &Value, items: &Items) -> Value {
        let mut definition = definition.as_object().cloned().unwrap_or_default();
        let criteria = match definition.get("criteria") {
            Some(Value::Object(_)) => {
                let members = items.iter().map(|(label, criterion)| (label_text(label), criterion.clone()));
                Value::Object(members.collect())
            }
            _ => items.iter().map(|(label, _)| label.clone()).collect(),
        };
        definition.insert("criteria".into(), criteria);
        // Not `remove`, which would move the last member into the gap.
        if definition.shift_remove("option_order").is_some() && self.ids.insert(id.to_owned()) {
            self.warnings.push(format!(
                "question {}: its option_order was dropped, because the labels were narrowed to {}",
                repr_str(id),
                items.len()
            ));
        }
        definition.into()
    }
}

fn option_text((label, criterion): &(Value, Value)) -> String {
    let label = label_text(label);
    match criterion {
        Value::Null => label,
        Value::String(s) if s.is_empty() => label,
        other => format!("{label}: {}", plain_text(other)),
    }
}

fn query(state: &Value, instructions: Option<&Value>) -> String {
    let body = plain_text(state);
    match instructions {
        None | Some(Value::Null) => body,
        Some(Value::String(s)) if s.is_empty() => body,
        Some(other) => format!("{}\n{body}", plain_text(other)),
    }
}

/// The cosine of the first vector with each of the others; 0 where one has no length.
fn cosines(vectors: &[Vec<f32>], texts: usize) -> Result<Vec<f64>> {
    let width = vectors.first().map_or(0, Vec::len);
    if vectors.len() != texts || width == 0 || vectors.iter().any(|v| v.len() != width) {
        return value_error!("the embedding must give {texts} vectors of one length, got {} of {width}", vectors.len());
    }
    let at = |v: &[f32], i: usize| if v[i].is_finite() { f64::from(v[i]) } else { 0.0 };
    let dot = |a: &[f32], b: &[f32]| (0..width).map(|i| at(a, i) * at(b, i)).sum::<f64>();
    let query = &vectors[0];
    let length = dot(query, query).sqrt();
    let cosine = |v: &Vec<f32>| {
        let lengths = dot(v, v).sqrt() * length;
        if lengths > 0.0 { (dot(v, query) / lengths).clamp(-1.0, 1.0) } else { 0.0 }
    };
    Ok(vectors[1..].iter().map(cosine).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn equal_similarities_keep_the_earlier_label() {
        let questions = json!({"q": {"type": "choice", "instructions": "?", "criteria": ["a", "b", "c"]}});
        let mut embed = |texts: &[String]| Ok(vec![vec![1.0]; texts.len()]);
        let (reduced, meta, _) = shortlist(&json!("s"), &questions, 2, &mut embed).unwrap();
        assert_eq!(reduced["q"]["criteria"], json!(["a", "b"]));
        assert_eq!(meta["q"].to_string(), r#"{"labels":["a","b"],"scores":[1.0,1.0],"k":2,"n":3,"passthrough":false}"#);
    }

    #[test]
    fn the_most_similar_labels_stay_in_the_order_of_their_similarity() {
        let questions = json!({"q": {"type": "choice", "instructions": "i", "criteria": {"a": "x", "b": null, "c": ""}},
                               "n": {"type": "noul", "instructions": "?"}});
        let mut seen = Vec::new();
        let mut embed = |texts: &[String]| {
            seen = texts.to_vec();
            Ok(vec![vec![1.0, 0.0], vec![-1.0, 0.1], vec![1.0, 1.0], vec![2.0, 0.1]])
        };
        let (reduced, meta, _) = shortlist(&json!({"k": 1}), &questions, 2, &mut embed).unwrap();
        assert_eq!(seen, ["i\n{\"k\": 1}", "a: x", "b", "c"]);
        assert_eq!(reduced["q"]["criteria"].to_string(), r#"{"c":"","b":null}"#);
        assert_eq!(meta["q"]["labels"], json!(["c", "b"]));
        assert!(!meta.contains_key("n"), "a question that is no choice is not ranked");
        assert_eq!(reduced["n"], questions["n"]);
    }

    #[test]
    fn trap_13_an_order_that_no_longer_fits_is_dropped_with_a_warning() {
        let questions = json!({"q": {"type": "choice", "option_order": [2, 1, 0], "instructions": "i", "criteria": ["a", "b", "c"]}});
        let mut embed = |texts: &[String]| Ok(vec![vec![1.0]; texts.len()]);
        let (reduced, _, warnings) = shortlist(&json!("s"), &questions, 2, &mut embed).unwrap();
        assert!(reduced["q"].get("option_order").is_none());
        assert_eq!(warnings.len(), 1);
        let (reduced, _, warnings) = shortlist(&json!("s"), &questions, 3, &mut embed).unwrap();
        assert_eq!(reduced, questions, "a question that needs no narrowing keeps its order");
        assert!(warnings.is_empty());
    }

    #[test]
    fn a_vector_without_length_ranks_as_nothing_alike() {
        let vectors = [vec![1.0, 0.0], vec![0.0, 0.0], vec![f32::NAN, 1.0], vec![-3.0, 0.0]];
        assert_eq!(cosines(&vectors, 4).unwrap(), [0.0, 0.0, -1.0]);
        assert!(cosines(&vectors, 5).is_err());
    }
}
