//! One run that says which blocks a GPU's products should have: every variant right first, then timed, one line each.
//!
//! `cargo test -p tilewright-ops --features vulkan --lib -- --nocapture sweep`, with `TILEWRIGHT_TEST_GPU` naming the device. What the time does not
//! suffice for is named at the end. On software there is no time to measure, so the variants are only held to be right.

use std::time::{Duration, Instant};

use super::Gpu;
use crate::matmul::gpu::Product;
use crate::matmul::gpu::matrix::Way;
use crate::matmul::gpu::shape::{self, Blocks};
use crate::testing::{Random, gpus, is_portable, is_software};
use crate::{DType, Device, Tensor};

/// Time for all of it.
const TIME: Duration = Duration::from_secs(100);

/// Work before the first variant of a product is timed: a GPU that idled while kernels compiled takes more than a second to its clock.
const WAKE: Duration = Duration::from_millis(1500);

/// Work before a variant is timed.
const WARM: Duration = Duration::from_millis(40);

/// The three products of a linear layer of `n` outputs and `k` inputs over `m` rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    Forward,
    Input,
    Weight,
}

/// A product's tensors on a device.
struct Layer {
    form: Form,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    /// Rows, columns and terms of the product.
    size: [usize; 3],
}

impl Layer {
    /// `size` is that of the product; elements start `shift` elements behind an aligned place.
    fn new(device: &Device, form: Form, [a, b, out]: [DType; 3], size: [usize; 3], shift: usize) -> Self {
        let [m, n, k] = size;
        let mut rng = Random::new(7);
        // The pattern's length is prime, so that no two rows near each other are alike; what is longer is filled on the device.
        let pattern: Vec<f32> = (0..(m * k).max(n * k).min(1_000_003)).map(|_| rng.normal(0.5)).collect();
        let filled = |dtype, count: usize, from: usize| {
            let t = crate::testing::unaligned_zeros(device, dtype, &[count], shift);
            let mut there = count.min(pattern.len());
            let values: Vec<f32> = (0..there).map(|i| pattern[(i + from) % pattern.len()]).collect();
            t.slice(0, &[there]).unwrap().write_f32(&values).unwrap();
            while there < count {
                let more = there.min(count - there);
                t.slice(there, &[more]).unwrap().copy_from(&t.slice(0, &[more]).unwrap()).unwrap();
                there += more;
            }
            t
        };
        Layer {
            form,
            a: filled(a, m * k, 0),
            b: filled(b, n * k, 33_333),
            out: Tensor::zeros(device, out, &[m, n]).unwrap(),
            size,
        }
    }

    fn product(&self) -> Product<'_> {
        let [m, n, k] = self.size;
        let (a, b) = match self.form {
            Form::Forward => ((&self.a, k, 1), (&self.b, k, 1)),
            Form::Input => ((&self.a, k, 1), (&self.b, 1, n)),
            Form::Weight => ((&self.a, 1, m), (&self.b, 1, n)),
        };
        Product { round: true, ..Product::plain(a, b, (&self.out, n)) }
    }

    fn run(&self, gpu: &Gpu, way: Option<(Way, Blocks)>) {
        self.product().run_as(gpu, "sweep", self.size, way).unwrap();
    }

    /// Some of the result, from its start, its middle and its end.
    fn some(&self) -> Vec<f32> {
        let [m, n, _] = self.size;
        let count = (m * n).min(4096);
        let starts = [0, (m * n - count) / 2, m * n - count];
        starts.iter().flat_map(|&at| self.out.slice(at, &[count]).unwrap().read_f32().unwrap()).collect()
    }

    /// Whether what was computed is what the plain kernel computes, within rounding.
    fn agrees(&self, want: &[f32]) -> Result<(), String> {
        let bound = 0.02 * (self.size[2] as f32).sqrt().max(1.0) * 0.25;
        let got = self.some();
        let off = |(x, y): (&f32, &f32)| !x.is_finite() || (x - y).abs() > bound + 0.01 * y.abs();
        match got.iter().zip(want).position(off) {
            None => Ok(()),
            Some(at) => Err(format!("element {at}: {} for {}", got[at], want[at])),
        }
    }

    /// Keeps the GPU busy for so long; the number of calls.
    fn warm(&self, device: &Device, gpu: &Gpu, way: Option<(Way, Blocks)>, time: Duration) -> usize {
        let (start, mut calls) = (Instant::now(), 0);
        while start.elapsed() < time {
            (0..8).for_each(|_| self.run(gpu, way));
            device.synchronize().unwrap();
            calls += 8;
        }
        calls
    }

    /// Seconds of a call, the best of some.
    fn seconds(&self, device: &Device, gpu: &Gpu, way: Option<(Way, Blocks)>) -> f64 {
        let mut best = f64::INFINITY;
        let calls = (self.warm(device, gpu, way, WARM) / 8).clamp(8, 64);
        for _ in 0..4 {
            let start = Instant::now();
            for _ in 0..calls {
                self.run(gpu, way);
            }
            device.synchronize().unwrap();
            best = best.min(start.elapsed().as_secs_f64() / calls as f64);
        }
        best
    }
}

/// What is tried at 8192^3. What is not the first of its line differs from it in one thing.
fn large() -> Vec<Blocks> {
    let first = Blocks::new([128, 128, 32], [64, 64]);
    vec![
        first,
        Blocks { guarded: false, ..first },
        Blocks { plane: [64, 32], ..first },
        Blocks { group: [128, 96, 32], plane: [64, 48], ..first },
        Blocks { group: [256, 128, 32], ..first },
        Blocks { pad: 16, ..first },
        Blocks { band: 16, ..first },
    ]
}

/// With reads behind a branch, and with reads a driver may move.
fn both(blocks: Blocks) -> [Blocks; 2] {
    [true, false].map(|guarded| Blocks { guarded, ..blocks })
}

/// What is tried where there are fewer groups than a large GPU runs at one time.
fn small() -> Vec<Blocks> {
    let all = [
        Blocks::new([128, 128, 32], [64, 64]),
        Blocks::new([128, 96, 32], [64, 48]),
        Blocks::new([96, 96, 32], [48, 48]),
        Blocks::new([64, 64, 64], [32, 32]),
    ];
    all.into_iter().flat_map(both).collect()
}

/// What is tried for the few rows of one question.
fn few_rows() -> Vec<Blocks> {
    let some = |group, plane, split| Blocks { split, ..Blocks::new(group, plane) };
    let all = [
        some([32, 32, 128], [16, 32], 4),
        some([32, 32, 128], [32, 16], 4),
        some([32, 32, 128], [32, 32], 8),
        some([32, 32, 256], [16, 16], 2),
    ];
    all.into_iter().flat_map(both).collect()
}

/// What products get, and on software small ones beside it.
fn few(gpu: &Gpu) -> Vec<Blocks> {
    let Some((tile, plane)) = shape::tile(gpu.capabilities(), DType::F16) else { return Vec::new() };
    let mut all = shape::table(&tile, plane);
    if plane < 32 {
        all.push(Blocks::new([32, 16, 64], [16, 8]));
        all.push(Blocks { split: 2, ..Blocks::new([16, 16, 64], [8, 8]) });
        all.push(Blocks { split: 4, ..Blocks::new([16, 32, 64], [16, 32]) });
        all.push(Blocks { pad: 0, band: 1, ..Blocks::new([16, 32, 32], [8, 16]) });
    }
    all
}

/// What a variant is called in a line of the output.
fn name(b: &Blocks) -> String {
    let [m, n, k] = b.group;
    let [p, q] = b.plane;
    let ahead = if b.guarded { "guarded" } else { "ahead" };
    format!("{m}x{n}x{k} plane {p}x{q} split {} pad {} band {} {ahead}", b.split, b.pad, b.band)
}

struct Sweep {
    device: Device,
    started: Instant,
    skipped: Vec<String>,
    wrong: Vec<String>,
    timed: bool,
}

impl Sweep {
    fn gpu(&self) -> &Gpu {
        match &self.device {
            Device::Gpu(gpu) => gpu,
            _ => unreachable!("filtered"),
        }
    }

    /// Tries every variant that fits, the plain kernel first; the fastest comes back.
    fn layer(&mut self, what: &str, layer: &Layer, variants: &[Blocks]) -> Option<Blocks> {
        let [m, n, k] = layer.size;
        let Some(way) = Way::of(self.gpu(), &layer.product(), layer.size) else {
            println!("{what}: not for the matrix units of {}", self.device.name());
            return None;
        };
        layer.run(self.gpu(), None);
        let want = layer.some();
        let mut right = Vec::new();
        for blocks in variants {
            if !way.fits(self.gpu(), blocks) {
                continue;
            }
            let called = format!("{what} {:?} {m}x{n}x{k} {}", layer.form, name(blocks));
            if self.started.elapsed() > TIME {
                self.skipped.push(called);
                continue;
            }
            let way = Some((way, *blocks));
            layer.out.zero();
            layer.run(self.gpu(), way);
            match layer.agrees(&want) {
                Ok(()) => right.push((*blocks, way, called)),
                Err(error) => {
                    println!("WRONG {called}: {error}");
                    self.wrong.push(called);
                }
            }
        }
        let mut best: Option<(f64, Blocks)> = None;
        for (blocks, way, called) in right.iter().filter(|_| self.timed) {
            if best.is_none() {
                layer.warm(&self.device, self.gpu(), *way, WAKE);
            }
            let took = layer.seconds(&self.device, self.gpu(), *way);
            let rate = 2.0 * (m * n * k) as f64 / took / 1e12;
            println!("SWEEP {called}: {:.4} ms {rate:.1} TFLOP/s", took * 1e3);
            if best.is_none_or(|(least, _)| took < least) {
                best = Some((took, *blocks));
            }
        }
        if let Some((took, blocks)) = best {
            let rate = 2.0 * (m * n * k) as f64 / took / 1e12;
            println!("BEST {what} {:?} {m}x{n}x{k}: {rate:.1} TFLOP/s with {}", layer.form, name(&blocks));
        }
        best.map(|(_, blocks)| blocks)
    }
}

#[test]
fn sweep_of_variants_of_the_product() {
    for device in gpus().into_iter().filter(is_portable) {
        let timed = !is_software(&device);
        let mut sweep =
            Sweep { device: device.clone(), started: Instant::now(), skipped: Vec::new(), wrong: Vec::new(), timed };
        println!("{}: {:?}", device.name(), sweep.gpu().capabilities());
        let (f16, bf16, f32) = (DType::F16, DType::BF16, DType::F32);
        // Remainders of everything, elements that are aligned and elements that are not.
        for (form, size, shift) in [
            (Form::Forward, [200, 136, 328], 0),
            (Form::Input, [136, 200, 104], 0),
            (Form::Weight, [72, 136, 200], 0),
            (Form::Forward, [65, 67, 69], 1),
        ] {
            let layer = Layer::new(&device, form, [f16, f16, f32], size, shift);
            sweep.layer("remainders", &layer, &few(sweep.gpu()));
        }
        if timed {
            let side = [8192; 3];
            let square = Layer::new(&device, Form::Forward, [bf16; 3], side, 0);
            let best = sweep.layer("bf16", &square, &large());
            let Some(best) = best else { continue };
            drop(square);
            for form in [Form::Input, Form::Weight] {
                let all = [best, Blocks::new([128, 128, 32], [64, 64]), Blocks::new([256, 128, 32], [64, 64])];
                sweep.layer("bf16", &Layer::new(&device, form, [bf16; 3], side, 0), &all);
            }
            sweep.layer("f16", &Layer::new(&device, Form::Forward, [f16; 3], side, 0), &[best]);
            for (n, k) in [(3072, 1024), (1024, 1024), (5248, 1024), (1024, 2624)] {
                let layer = Layer::new(&device, Form::Forward, [f32, f16, f32], [64, n, k], 0);
                sweep.layer("f16 of f32", &layer, &few_rows());
            }
            for (n, k) in [(768, 768), (2304, 768), (3072, 768), (768, 3072)] {
                sweep.layer("bf16", &Layer::new(&device, Form::Forward, [bf16; 3], [4096, n, k], 0), &small());
                sweep.layer("bf16", &Layer::new(&device, Form::Input, [bf16; 3], [4096, k, n], 0), &small());
                sweep.layer("bf16", &Layer::new(&device, Form::Weight, [bf16; 3], [n, k, 4096], 0), &small());
            }
            sweep.layer("bf16 odd start", &Layer::new(&device, Form::Forward, [bf16; 3], [2048; 3], 1), &[best]);
        }
        println!("{} s; not tried for want of time: {:?}", sweep.started.elapsed().as_secs(), sweep.skipped);
        assert!(sweep.wrong.is_empty(), "{:?}", sweep.wrong);
    }
}

#[test]
fn products_in_parts_are_right_and_cuts_change_no_bits() {
    let mut tried = 0;
    for device in gpus().into_iter().filter(is_portable) {
        let Device::Gpu(gpu) = &device else { unreachable!("filtered") };
        for out in [DType::F16, DType::F32] {
            let layer = Layer::new(&device, Form::Weight, [DType::F16, DType::F16, out], [264, 72, 1000], 0);
            let product = Product { round: false, ..layer.product() };
            let Some(way) = Way::of(gpu, &product, layer.size) else { continue };
            for blocks in few(gpu).into_iter().filter(|b| way.fits(gpu, b)) {
                layer.run(gpu, None);
                let want = layer.some();
                let terms = 300usize.next_multiple_of(blocks.group[2]);
                let run = |accumulate| {
                    let product = Product { accumulate, ..layer.product() };
                    product.in_parts(&device, gpu, "sweep", layer.size, (way, blocks), terms).unwrap();
                    layer.some()
                };
                layer.out.zero();
                let whole = run(false);
                layer.agrees(&want).unwrap_or_else(|error| panic!("{out} {}: {error}", name(&blocks)));
                let twice = run(true);
                for (once, twice) in whole.iter().zip(&twice) {
                    assert!((2.0 * once - twice).abs() <= 0.01 * twice.abs() + 0.01, "{out} {}", name(&blocks));
                }
                let (before, budget) = (gpu.launches(), gpu.pace.budget());
                gpu.pace.set(1e-9, Some(1e9));
                let cut = run(false);
                gpu.pace.set(budget, None);
                assert!(gpu.launches() - before > 4, "{} launches", gpu.launches() - before);
                assert!(whole == cut, "{out} {}", name(&blocks));
                tried += 1;
            }
        }
    }
    println!("{tried} shapes of blocks tried in parts");
}
