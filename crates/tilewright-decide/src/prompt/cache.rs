//! Question halves that were built before: a service asks the same questions of every state.

use std::collections::HashMap;
use std::sync::Arc;

use tilewright_models::laya::QuestionType;

use super::Head;
use crate::error::Result;
use crate::question::Question;
use crate::tokenizer::Tokenizer;

/// Halves that are kept; each is a few kilobytes at most.
const CAPACITY: usize = 128;

/// All that a question half depends on.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    kind: QuestionType,
    instructions: String,
    options: Vec<String>,
    order: Option<Vec<usize>>,
    head_max_len: usize,
}

/// The most recently used question halves.
#[derive(Default)]
pub(crate) struct HeadCache {
    entries: HashMap<Key, (Arc<Head>, u64)>,
    uses: u64,
}

impl std::fmt::Debug for HeadCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HeadCache({} of {CAPACITY})", self.entries.len())
    }
}

impl HeadCache {
    pub(crate) fn head(
        &mut self,
        tokenizer: &Tokenizer,
        question: &Question,
        head_max_len: usize,
    ) -> Result<Arc<Head>> {
        let key = Key {
            kind: question.kind,
            instructions: question.instructions.clone(),
            options: question.options.clone(),
            order: question.order.clone(),
            head_max_len,
        };
        self.uses += 1;
        if let Some((head, used)) = self.entries.get_mut(&key) {
            *used = self.uses;
            return Ok(head.clone());
        }
        let head = Arc::new(Head::build(tokenizer, question, head_max_len)?);
        if self.entries.len() >= CAPACITY {
            let oldest = self.entries.values().map(|(_, used)| *used).min();
            self.entries.retain(|_, (_, used)| Some(*used) != oldest);
        }
        self.entries.insert(key, (head.clone(), self.uses));
        Ok(head)
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::question::parse_questions;

    #[test]
    fn a_half_is_built_once_for_each_question_and_budget_and_old_ones_make_room() {
        let fixtures =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../tilewright-models/tests/fixtures/laya/tiny-en/tokenizer");
        let tokenizer = Tokenizer::open(fixtures.as_ref()).unwrap();
        let question = |i: usize| {
            let questions = json!({"q": {"type": "noul", "instructions": format!("Number {i}?")}});
            parse_questions(&questions).unwrap().remove(0)
        };
        let mut cache = HeadCache::default();
        let first = cache.head(&tokenizer, &question(0), 64).unwrap();
        assert!(Arc::ptr_eq(&first, &cache.head(&tokenizer, &question(0), 64).unwrap()));
        assert!(!Arc::ptr_eq(&first, &cache.head(&tokenizer, &question(0), 32).unwrap()));
        for i in 1..2 * CAPACITY {
            cache.head(&tokenizer, &question(i), 64).unwrap();
            cache.head(&tokenizer, &question(0), 64).unwrap();
        }
        assert_eq!(cache.len(), CAPACITY);
        assert!(Arc::ptr_eq(&first, &cache.head(&tokenizer, &question(0), 64).unwrap()), "the latest stay");
    }
}
