//! What must not change a result: company, order, packs, threads, repetition. And what must: nothing else.

use std::rc::Rc;

use tilewright_core::DType;
use tilewright_core::rng::XorShift;
use tilewright_models::laya::demo::DemoShape;
use tilewright_models::laya::{Laya, LoadOptions, OptionLayout, PACK_TOKENS, Row, RowScores, Scorer};
use tilewright_ops::Device;
use tilewright_ops::cpu::{Cpu, Isa};

use crate::common::{fixtures, open, parallel, random_checkpoint, random_row, recorded};

fn rows_of(checkpoint: &str) -> Vec<Row> {
    recorded().into_iter().filter(|r| r.checkpoint == checkpoint).map(|r| r.row).collect()
}

fn bits(scores: &[RowScores]) -> Vec<Vec<u32>> {
    scores.iter().map(|s| s.logits.iter().chain(&s.act_logits).map(|x| x.to_bits()).collect()).collect()
}

fn model(checkpoint: &str, device: &Device, precision: DType, pack_tokens: usize) -> Laya {
    let options = LoadOptions { device: device.clone(), precision, pack_tokens, ..LoadOptions::default() };
    Laya::open(&fixtures().join(checkpoint), &options).unwrap()
}

#[test]
fn a_row_has_the_same_bits_alone_in_any_pack_and_in_any_order() {
    for isa in Isa::available() {
        let device = Device::Cpu(Rc::new(Cpu::new(2, isa)));
        for precision in [DType::F32, DType::BF16, DType::F16] {
            for checkpoint in ["tiny-en", "tiny-parallel"] {
                let mut rows = rows_of(checkpoint);
                rows.truncate(6);
                let mut one = model(checkpoint, &device, precision, 1);
                let alone: Vec<_> =
                    rows.iter().map(|r| bits(&one.score(std::slice::from_ref(r)).unwrap()).remove(0)).collect();
                for budget in [300, 100_000] {
                    let mut many = model(checkpoint, &device, precision, budget);
                    assert_eq!(bits(&many.score(&rows).unwrap()), alone, "{checkpoint} {precision} {budget}");
                    let backwards: Vec<_> = rows.iter().rev().cloned().collect();
                    let mut turned = bits(&many.score(&backwards).unwrap());
                    turned.reverse();
                    assert_eq!(turned, alone, "{checkpoint} {precision} {budget} backwards");
                }
            }
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let rows = rows_of("tiny-multi");
    let [one, two, three] = [1, 2, 3].map(|threads| {
        bits(&model("tiny-multi", &Device::cpu_with_threads(threads), DType::F32, 512).score(&rows).unwrap())
    });
    assert!(one == two && one == three);
}

#[test]
fn rows_of_every_length_have_the_bits_of_their_own() {
    let (encoder, mut agent) = (DemoShape::Tiny.encoder(), DemoShape::Tiny.agent());
    for head_layers in [0, 1, 2] {
        agent.head_layers = head_layers;
        let (_temp, dir) = random_checkpoint(&encoder, &agent, 11);
        let mut rng = XorShift::new(4711);
        let rows: Vec<_> =
            (1..=40).map(|n| random_row(&mut rng, encoder.vocab_size, n, OptionLayout::Sequential)).collect();
        let mut model = open(&dir, &Device::cpu_with_threads(2), DType::F32);
        let together = bits(&model.score(&rows).unwrap());
        for (row, together) in rows.iter().zip(together) {
            assert_eq!(bits(&model.score(std::slice::from_ref(row)).unwrap())[0], together, "{} tokens", row.ids.len());
        }
    }
}

#[test]
fn a_larger_pack_before_changes_nothing_after() {
    let rows = rows_of("tiny-en");
    let device = Device::cpu_with_threads(2);
    let mut model = model("tiny-en", &device, DType::F32, 10_000);
    let before = bits(&model.score(&rows[..1]).unwrap());
    let small = model.activation_bytes();
    model.score(&rows).unwrap();
    let large = model.activation_bytes();
    assert!(large > small);
    assert_eq!(bits(&model.score(&rows[..1]).unwrap()), before);
    assert_eq!(model.activation_bytes(), large, "room once made is kept");
}

#[test]
fn equal_rows_run_once_and_answer_each() {
    let mut plan =
        Laya::blank(&DemoShape::Tiny.agent(), &DemoShape::Tiny.encoder(), DType::F32, 1, PACK_TOKENS).unwrap();
    let null = plan.device().clone();
    let Device::Null(recorder) = &null else { unreachable!() };
    let mut launches = |rows: &[Row]| {
        recorder.take_launches();
        assert_eq!(plan.score(rows).unwrap().len(), rows.len());
        recorder.take_launches()
    };
    let mut rng = XorShift::new(3);
    let [a, b] = [9, 9].map(|n| random_row(&mut rng, 320, n, OptionLayout::Sequential));
    let once = launches(&[a.clone(), b.clone()]);
    assert_eq!(launches(&[a.clone(), b.clone(), a.clone(), a.clone()]), once);
    assert_ne!(launches(std::slice::from_ref(&a)), once);

    let rows = rows_of("tiny-en");
    let mut model = model("tiny-en", &Device::cpu_with_threads(2), DType::F32, 4096);
    let [first, second] = [&rows[0], &rows[1]].map(|r| bits(&model.score(std::slice::from_ref(r)).unwrap()).remove(0));
    let mixed = [&rows[0], &rows[1], &rows[0]].map(Clone::clone);
    assert_eq!(bits(&model.score(&mixed).unwrap()), [first.clone(), second, first]);
}

#[test]
fn rows_that_differ_in_type_or_markers_alone_are_not_equal() {
    let mut row = rows_of("tiny-en").remove(0);
    let mut model = model("tiny-en", &Device::cpu_with_threads(2), DType::F32, 4096);
    let mut rows = vec![row.clone()];
    row.markers.pop();
    rows.push(row.clone());
    row.question = tilewright_models::laya::QuestionType::Noul;
    rows.push(row);
    let scores = model.score(&rows).unwrap();
    assert_eq!(scores[1].logits.len() + 1, scores[0].logits.len());
    assert_ne!(scores[1].logits, scores[2].logits);
}

#[test]
fn no_rows_have_no_scores() {
    let mut model = model("tiny-en", &Device::cpu_with_threads(1), DType::F32, 4096);
    assert!(model.score(&[]).unwrap().is_empty());
    assert!(model.embed(&[]).unwrap().is_empty());
    assert_eq!(model.activation_bytes(), 0);
}

/// A row of the parallel layout with its options in another order.
fn permuted(row: &Row, head: usize, order: &[usize]) -> Row {
    let ends: Vec<usize> = row.markers[1..].iter().map(|&m| m as usize).chain([head]).collect();
    let mut ids = row.ids[..row.markers[0] as usize].to_vec();
    let mut markers = Vec::new();
    for &s in order {
        markers.push(ids.len() as u32);
        ids.extend_from_slice(&row.ids[row.markers[s] as usize..ends[s]]);
    }
    ids.extend_from_slice(&row.ids[head..]);
    let positions = Some(parallel(&markers, head, ids.len()));
    Row { ids, markers, positions, ..row.clone() }
}

#[test]
fn the_parallel_layout_of_these_tests_is_the_recorded_one() {
    for row in rows_of("tiny-parallel") {
        let recorded = row.positions.clone().unwrap();
        let head = recorded.option_ids.iter().rposition(|&o| o > 0).unwrap() + 1;
        assert_eq!(parallel(&row.markers, head, row.ids.len()), recorded);
    }
}

#[test]
fn options_in_parallel_keep_their_logits_in_any_order() {
    let device = Device::cpu_with_threads(2);
    let mut model = model("tiny-parallel", &device, DType::F32, 4096);
    for row in rows_of("tiny-parallel") {
        let options = row.positions.as_ref().unwrap();
        let head = options.option_ids.iter().rposition(|&o| o > 0).unwrap() + 1;
        let k = row.markers.len();
        let before = model.score(std::slice::from_ref(&row)).unwrap().remove(0).logits;
        for shift in 1..k {
            let order: Vec<usize> = (0..k).map(|s| (s + shift) % k).collect();
            let after = model.score(&[permuted(&row, head, &order)]).unwrap().remove(0).logits;
            for (slot, &s) in order.iter().enumerate() {
                assert!((after[slot] - before[s]).abs() < 1e-5, "{} for {}", after[slot], before[s]);
            }
        }
    }
}

#[test]
fn options_in_sequence_do_not() {
    let row = rows_of("tiny-en").into_iter().find(|r| r.markers.len() == 3).unwrap();
    let mut model = model("tiny-en", &Device::cpu_with_threads(2), DType::F32, 4096);
    let head = row.markers[2] as usize + 2;
    let mut turned = permuted(&row, head, &[2, 1, 0]);
    turned.positions = None;
    let [a, b] = [row, turned].map(|r| model.score(&[r]).unwrap().remove(0).logits);
    assert!((a[0] - b[2]).abs() > 1e-3, "{a:?} {b:?}");
}

#[test]
fn an_embedding_is_the_mean_of_the_final_states() {
    for (head_layers, seed) in [(0, 1), (2, 2)] {
        let (encoder, mut agent) = (DemoShape::Tiny.encoder(), DemoShape::Tiny.agent());
        agent.head_layers = head_layers;
        let (_temp, dir) = random_checkpoint(&encoder, &agent, seed);
        let mut model = open(&dir, &Device::cpu_with_threads(2), DType::F32);
        let mut rng = XorShift::new(5);
        let rows: Vec<_> = [7, 1, 30].map(|n| random_row(&mut rng, 320, n, OptionLayout::Sequential)).into();
        let ids: Vec<_> = rows.iter().map(|r| r.ids.clone()).collect();
        let means = model.embed(&ids).unwrap();
        for ((row, ids), mean) in rows.iter().zip(&ids).zip(&means) {
            assert_eq!(&model.embed(std::slice::from_ref(ids)).unwrap()[0], mean, "alone and together");
            if head_layers > 0 {
                let (_, stages) = model.trace(row).unwrap();
                let states = &stages.iter().find(|s| s.name == "encoder.final_norm").unwrap().values;
                for (c, mean) in mean.iter().enumerate() {
                    let sum: f64 = states.iter().skip(c).step_by(encoder.hidden).map(|&x| f64::from(x)).sum();
                    assert!((sum / row.ids.len() as f64 - f64::from(*mean)).abs() < 1e-6);
                }
            }
        }
    }
}
