//! The seam itself: adapters, capabilities, copies, accounts, refusals.

use super::*;
use crate::testing::{FLOATS, Random, gpus};
use crate::{DType, Device, Tensor};

fn portable() -> impl Iterator<Item = (Device, Rc<Gpu>)> {
    gpus().into_iter().filter_map(|device| match &device {
        Device::Gpu(gpu) => Some((device.clone(), gpu.clone())),
        _ => None,
    })
}

#[test]
fn an_adapter_that_is_not_there_is_refused_with_those_that_are() {
    let api = Api::here();
    let found = adapters(api);
    let error = Gpu::open(api, found.len() + 7).err().unwrap().to_string();
    if found.is_empty() {
        assert!(error.contains("no vulkan adapter") || error.contains("without"), "{error}");
    } else {
        assert!(error.contains("choose one of") && error.contains(&found[0].name), "{error}");
    }
}

#[test]
fn an_interface_that_is_not_built_says_which_feature_brings_it() {
    let other = if Api::here() == Api::Vulkan { Api::Metal } else { Api::Vulkan };
    let error = Gpu::open(other, 0).err().unwrap().to_string();
    assert!(error.contains(other.name()), "{error}");
}

#[test]
fn the_doctor_has_a_row_for_each_adapter_or_advice_why_there_is_none() {
    let report = doctor::report();
    assert!(!report.rows.is_empty());
    if adapters(Api::here()).is_empty() {
        assert!(report.advice[0].contains("--device"), "{:?}", report.advice);
    }
}

#[test]
fn capabilities_are_plausible() {
    for (_, gpu) in portable() {
        let c = gpu.capabilities();
        assert!(c.subgroup[0] >= 1 && c.subgroup[0] <= c.subgroup[1], "{c:?}");
        assert!(c.group >= 256 && c.shared_bytes >= 16 << 10 && c.groups[0] >= 65_535, "{c:?}");
        for t in &c.tiles {
            assert!(t.m > 0 && t.n > 0 && t.k > 0, "{t:?}");
        }
        assert!(!doctor::describe(c).is_empty());
    }
}

#[test]
fn bytes_come_back_from_any_place_in_any_number() {
    for (device, _) in portable() {
        let t = Tensor::zeros(&device, DType::U8, &[61]).unwrap();
        let mut want = vec![0u8; 61];
        let mut rng = Random::new(1);
        for _ in 0..40 {
            let start = rng.below(61);
            let bytes: Vec<u8> = (0..rng.below(61 - start + 1)).map(|_| rng.bits() as u8).collect();
            t.write_bytes(start, &bytes).unwrap();
            want[start..start + bytes.len()].copy_from_slice(&bytes);
            let mut got = vec![0; 61];
            t.read_bytes(0, &mut got).unwrap();
            assert_eq!(got, want);
        }
    }
}

#[test]
fn tensors_are_zeroed_and_copied_where_they_start_and_nowhere_else() {
    for (device, _) in portable() {
        for dtype in FLOATS {
            for (at, n) in [(0, 7), (1, 7), (3, 2), (5, 1), (2, 300)] {
                let values: Vec<f32> = (0..310).map(|i| i as f32).collect();
                let all = Tensor::from_f32(&device, dtype, &[310], &values).unwrap();
                let source = Tensor::from_f32(&device, dtype, &[n], &vec![-2.0; n]).unwrap();
                all.slice(at, &[n]).unwrap().copy_from(&source).unwrap();
                let before = all.read_f32().unwrap();
                assert!(before[at..at + n].iter().all(|&x| x == -2.0), "{dtype} {at} {n}: {before:?}");
                all.slice(at, &[n]).unwrap().zero();
                let after = all.read_f32().unwrap();
                for i in 0..310 {
                    let want = if (at..at + n).contains(&i) { 0.0 } else { before[i] };
                    assert_eq!(after[i], want, "{dtype} {at} {n}, element {i}");
                }
            }
        }
    }
}

#[test]
fn live_bytes_are_those_of_the_arenas() {
    for (device, gpu) in portable() {
        let before = device.live_bytes();
        let t = Tensor::zeros(&device, DType::F32, &[1000]).unwrap();
        assert_eq!(device.live_bytes() - before, 4096);
        drop(t);
        assert_eq!(device.live_bytes(), before);
        assert!(gpu.peak_bytes() >= before + 4096);
    }
}

#[test]
fn a_plan_that_does_not_fit_is_refused_before_anything_is_allocated() {
    for (device, gpu) in portable() {
        let error = Tensor::zeros(&device, DType::F32, &[1 << 45]).unwrap_err().to_string();
        assert!(error.contains("tensor") && error.contains(&gpu.adapter().name), "{error}");
    }
}

#[test]
fn a_grid_beyond_the_limit_of_one_dimension_covers_all_groups() {
    for (_, gpu) in portable() {
        for groups in [0, 1, 65_535, 65_536, 1 << 20, 5_000_011] {
            let cubecl::prelude::CubeCount::Static(x, y, z) = gpu.grid(groups) else { unreachable!() };
            let (x, y) = (x as usize, y as usize);
            assert!(x * y >= groups && x * y < groups + y.max(2) && z == 1, "{groups}: {x} {y}");
            assert!(x <= gpu.capabilities().groups[0] && y <= gpu.capabilities().groups[1]);
        }
    }
}
