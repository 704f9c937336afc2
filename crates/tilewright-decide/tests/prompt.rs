//! The budget of a question, at its edges.

mod support;

use serde_json::{Value, json};
use support::tokenizer;
use tilewright_decide::{Head, parse_questions};

fn head(question: Value, head_max_len: usize) -> Head {
    let question = parse_questions(&json!({"q": question})).unwrap().remove(0);
    Head::build(&tokenizer("tiny-en"), &question, head_max_len).unwrap()
}

fn choice(labels: &[&str]) -> Value {
    json!({"type": "choice", "instructions": "Which of the following many things is it, please, if you can tell?", "criteria": labels})
}

/// Levels may repeat, unlike labels.
fn score(levels: &[&str]) -> Value {
    json!({"type": "score", "instructions": "How much of the following things is it, please, if you can tell?", "criteria": levels})
}

/// Tokens of the options, their mask tokens included.
fn option_tokens(head: &Head) -> usize {
    head.options.iter().map(|o| o.kept + 1).sum()
}

#[test]
fn sixteen_tokens_for_the_instructions_are_enough_and_fifteen_are_not() {
    let question = choice(&["a description of the first", "a description of the second"]);
    let options = option_tokens(&head(question.clone(), 1000));
    let enough = head(question.clone(), options + 16);
    assert_eq!((enough.tokens_per_option, enough.instructions.kept), (None, 16));
    let scarce = head(question, options + 15);
    assert_eq!(scarce.tokens_per_option, Some((options - 1) / 2));
    assert!(option_tokens(&scarce) < options);
}

#[test]
fn an_option_keeps_its_first_48_tokens_whatever_the_budget() {
    let long = "word ".repeat(100);
    let head = head(choice(&[&long, "short"]), 1000);
    assert_eq!(head.options[0].kept, 48);
    assert!(head.options[0].total > 100);
    assert_eq!(head.markers[1] - head.markers[0], 49);
    assert_eq!(head.tokens_per_option, None);
}

#[test]
fn what_the_budget_leaves_is_shared_evenly_and_rounded_down() {
    let long = "word ".repeat(40);
    let question = score(&[&long, &long, &long]);
    for (head_max_len, per) in [(33, 5), (34, 6), (100, 28), (28, 4), (16, 4), (3, 4), (0, 4)] {
        let head = head(question.clone(), head_max_len);
        assert_eq!(head.tokens_per_option, Some(per), "head_max_len {head_max_len}");
        assert!(head.options.iter().all(|o| o.kept + 1 == per));
    }
}

#[test]
fn instructions_keep_eight_tokens_however_little_is_left() {
    let long = "word ".repeat(40);
    let head = head(score(&[long.as_str(); 12]), 20);
    assert_eq!(head.instructions.kept, 8);
    assert_eq!(head.ids.len(), 1 + 8 + 1 + 12 * 4 + 1);
}

#[test]
fn instructions_get_all_that_the_options_leave() {
    let question = choice(&["a", "b"]);
    let options = option_tokens(&head(question.clone(), 1000));
    for left in [16, 17, 20] {
        assert_eq!(head(question.clone(), options + left).instructions.kept, left);
    }
    let all = head(question.clone(), 1000).instructions;
    assert_eq!(all.kept, all.total);
}

#[test]
fn special_tokens_come_on_top_of_the_budget() {
    let question = choice(&["a", "b"]);
    let options = option_tokens(&head(question.clone(), 1000));
    let head = head(question, options + 18);
    assert_eq!(head.ids.len(), options + 18 + 3);
    let tokenizer = tokenizer("tiny-en");
    assert_eq!((head.ids[0], *head.ids.last().unwrap()), (tokenizer.cls(), tokenizer.sep()));
    assert!(head.markers.iter().all(|&m| head.ids[m as usize] == tokenizer.mask()));
    assert_eq!(head.ids[head.markers[0] as usize - 1], tokenizer.sep());
}

#[test]
fn slots_follow_the_order_and_the_room_does_not_depend_on_it() {
    let mut question = choice(&["first one", "second"]);
    let plain = head(question.clone(), 64);
    question["option_order"] = json!([1, 0]);
    let turned = head(question, 64);
    assert_eq!((turned.options[0], turned.options[1]), (plain.options[1], plain.options[0]));
    assert_eq!(turned.state_room(160), plain.state_room(160));
    assert_eq!(plain.state_room(160), 160 - plain.ids.len() - 1);
    assert_eq!(plain.state_room(3), 0);
}
