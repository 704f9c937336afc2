//! Planned memory is held memory.

use tilewright_core::DType;
use tilewright_models::laya::demo::DemoShape;
use tilewright_models::laya::{Checkpoint, Laya, LoadOptions, PlanOptions, Scorer, plan};
use tilewright_models::modernbert::EncoderConfig;
use tilewright_ops::Device;

use crate::common::{fixtures, recorded};

#[test]
fn a_plan_equals_what_a_model_holds_to_the_byte() {
    for checkpoint in ["tiny-en", "tiny-multi", "tiny-parallel"] {
        for precision in [DType::F32, DType::BF16, DType::F16] {
            let device = Device::cpu();
            let c = Checkpoint::open(&fixtures().join(checkpoint), None).unwrap();
            let options =
                LoadOptions { precision, device: device.clone(), pack_tokens: 1 << 20, ..LoadOptions::default() };
            let mut model = Laya::load(&c, &options).unwrap();
            assert_eq!(model.weight_bytes(), device.live_bytes(), "before the first row there are weights alone");
            let rows: Vec<_> = recorded().into_iter().filter(|r| r.checkpoint == checkpoint).map(|r| r.row).collect();
            model.score(&rows).unwrap();
            let planned = plan(
                c.agent(),
                c.encoder(),
                &PlanOptions {
                    precision,
                    threads: device.threads(),
                    tokens: rows.iter().map(|r| r.ids.len()).sum(),
                    rows: rows.len(),
                    options: rows.iter().map(|r| r.markers.len()).sum(),
                },
            )
            .unwrap();
            assert_eq!(planned, model.report(), "{checkpoint} in {precision}");
            assert_eq!(planned.peak_bytes(), device.live_bytes() + device.scratch_bytes());
            assert_eq!(planned.parameter_count as u64, c.parameter_count());
            drop(model);
            assert_eq!(device.live_bytes(), 0, "a dropped model gives its bytes back");
        }
    }
}

fn of(shape: DemoShape, precision: DType, tokens: usize) -> (usize, usize) {
    let options = PlanOptions { precision, threads: 2, tokens, rows: 16, options: 64 };
    let report = plan(&shape.agent(), &shape.encoder(), &options).unwrap();
    let bytes = |name: &str| report.sections.iter().find(|s| s.name == name).unwrap().bytes;
    (bytes("weights"), bytes("activations"))
}

#[test]
fn full_size_weights_take_the_bytes_of_their_precision() {
    for (shape, parameters) in [(DemoShape::Large, 421_293_830usize), (DemoShape::MmbertBase, 321_908_998)] {
        let EncoderConfig { vocab_size, hidden, .. } = shape.encoder();
        let resident = parameters - vocab_size * hidden;
        for (precision, size) in [(DType::F32, 4), (DType::BF16, 2), (DType::F16, 2)] {
            let (weights, _) = of(shape, precision, 1024);
            let ratio = weights as f64 / (resident * size) as f64;
            assert!((1.0..1.02).contains(&ratio), "{shape:?} in {precision}: {ratio}");
        }
    }
}

#[test]
fn activations_of_a_pack_stay_small_and_grow_with_its_tokens() {
    for shape in [DemoShape::Large, DemoShape::MmbertBase] {
        let [(_, a), (_, b), (_, c)] = [1024, 2048, 4096].map(|tokens| of(shape, DType::F32, tokens));
        assert!(a < 40 << 20, "{a}");
        assert!(a < b && b < c && c - b <= 2 * (b - a) + 4096, "{a} {b} {c}");
    }
}

#[test]
fn an_impossible_model_is_refused_by_the_planner_too() {
    let options = PlanOptions { precision: DType::I32, threads: 1, tokens: 1, rows: 1, options: 1 };
    assert!(plan(&DemoShape::Tiny.agent(), &DemoShape::Tiny.encoder(), &options).is_err());
}
