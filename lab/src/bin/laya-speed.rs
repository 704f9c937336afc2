//! Laya at full size: load time, memory, and time of questions, with the products' share of it.
//!
//! ```text
//! cargo run --release -p lab --bin laya-speed -- [--shape large|mmbert|tiny] [--folder DIR] [--precision f32,f16,bf16]
//!     [--rows 1x65,16x80] [--pack TOKENS] [--reps N] [--threads N] [--json FILE] [--device cpu|cuda|gpu]
//! ```
//!
//! Weights are random; `--folder` keeps them for the next run. `best` and `med` are wall times of scoring so many rows of so many tokens,
//! four options each; with one thread they are times on the processor, which other work on the machine does not lengthen. `GFLOP/s` counts the operations of the model's ops by the best time, `peak` is measured between the repetitions
//! with f32 multiply-adds. Below, each op of the model is timed alone on the same rows, in one pack of at most `--pack` tokens.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use serde_json::{Value, json};
use tilewright_models::laya::demo::{self, DemoShape};
use tilewright_models::laya::{Laya, LoadOptions, PACK_TOKENS, QuestionType, Row, Scorer};
use tilewright_models::modernbert::LayerKind;
use tilewright_ops::cpu::memory::resident;
use tilewright_ops::cpu::peak::run_multiply_adds;
use tilewright_ops::linear::{Activation, Forward, Layout, Weight, forward};
use tilewright_ops::{DType, Device, Tensor, encoder_attention, layernorm, rope};

struct Options {
    shape: DemoShape,
    folder: Option<PathBuf>,
    precisions: Vec<DType>,
    rows: Vec<(usize, usize)>,
    pack: usize,
    reps: usize,
    threads: Option<usize>,
    json: Option<PathBuf>,
    device: String,
    start: Instant,
}

impl Options {
    fn from_args() -> Self {
        let mut options = Options {
            shape: DemoShape::Large,
            folder: None,
            precisions: vec![DType::F32],
            rows: vec![(1, 65), (16, 80)],
            pack: PACK_TOKENS,
            reps: 5,
            threads: None,
            json: None,
            device: String::new(),
            start: Instant::now(),
        };
        let mut args = std::env::args().skip(1);
        while let Some(flag) = args.next() {
            let value = args.next().unwrap_or_else(|| usage(&flag));
            let number = || value.parse().unwrap_or_else(|_| usage(&value));
            match flag.as_str() {
                "--shape" => {
                    options.shape = match value.as_str() {
                        "large" => DemoShape::Large,
                        "mmbert" => DemoShape::MmbertBase,
                        "tiny" => DemoShape::Tiny,
                        _ => usage(&value),
                    }
                }
                "--folder" => options.folder = Some(value.into()),
                "--precision" => {
                    let one = |p: &str| match p {
                        "f32" => DType::F32,
                        "f16" => DType::F16,
                        "bf16" => DType::BF16,
                        _ => usage(p),
                    };
                    options.precisions = value.split(',').map(one).collect();
                }
                "--rows" => {
                    let pair = |p: &str| {
                        let (r, l) = p.split_once('x').unwrap_or_else(|| usage(p));
                        (r.parse().unwrap_or_else(|_| usage(p)), l.parse().unwrap_or_else(|_| usage(p)))
                    };
                    options.rows = value.split(',').map(pair).collect();
                }
                "--pack" => options.pack = number(),
                "--reps" => options.reps = number(),
                "--json" => options.json = Some(value.into()),
                "--device" => options.device = value,
                "--threads" => options.threads = Some(number()),
                _ => usage(&flag),
            }
        }
        options
    }

    /// Seconds: on the processor where one thread does all the work and the system tells, else on the wall.
    fn clock(&self) -> f64 {
        let on_processor =
            || std::fs::read_to_string("/proc/thread-self/schedstat").ok()?.split(' ').next()?.parse::<f64>().ok();
        match on_processor().filter(|_| self.threads == Some(1)) {
            Some(nanoseconds) => nanoseconds / 1e9,
            None => self.start.elapsed().as_secs_f64(),
        }
    }
}

fn usage(word: &str) -> ! {
    eprintln!("laya-speed: do not know what to do with `{word}`; the head of this program's source lists the flags");
    std::process::exit(2)
}

fn rows(count: usize, length: usize, vocab: usize) -> Vec<Row> {
    let row = |r: usize| Row {
        ids: (0..length).map(|i| ((i * 7919 + r * 104_729 + 13) % vocab) as u32).collect(),
        question: QuestionType::ALL[r % 3],
        markers: (0..4).map(|s| (length / 4 + 3 * s) as u32).collect(),
        positions: None,
    };
    (0..count).map(row).collect()
}

fn best(times: &[f64]) -> f64 {
    times.iter().copied().fold(f64::INFINITY, f64::min)
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

fn peak(device: &Device, options: &Options) -> f64 {
    match device {
        Device::Cpu(cpu) => {
            let (start, mut work) = (options.clock(), 0.0);
            while work == 0.0 || options.clock() - start < 0.05 {
                work += run_multiply_adds(cpu);
            }
            work / (options.clock() - start) / 1e9
        }
        _ => 0.0,
    }
}

fn main() -> tilewright_ops::Result<()> {
    let options = Options::from_args();
    let temp = tempfile::tempdir().expect("a temporary folder");
    let folder = options.folder.clone().unwrap_or_else(|| temp.path().join("demo"));
    if !folder.exists() {
        let start = Instant::now();
        demo::write(&folder, options.shape, 1)?;
        println!("wrote random weights in {:.1} s", start.elapsed().as_secs_f64());
    }
    let processor = || options.threads.map_or_else(Device::cpu, Device::cpu_with_threads);
    let opened = match options.device.as_str() {
        "" | "cpu" => None,
        "cuda" => Some(Device::cuda(0)?),
        // Through Vulkan or Metal.
        "gpu" => Some(Device::gpu(0)?),
        other => usage(other),
    };
    let device = || opened.clone().unwrap_or_else(processor);
    println!("{}", device().name());
    let mut records = Vec::new();
    for &precision in &options.precisions {
        let load = LoadOptions { precision, device: device(), pack_tokens: options.pack, ..LoadOptions::default() };
        let mut times = Vec::new();
        let mut model = None;
        for _ in 0..2 {
            drop(model.take());
            let start = Instant::now();
            model = Some(Laya::open(&folder, &load)?);
            times.push(start.elapsed().as_secs_f64());
        }
        let mut model = model.expect("loaded");
        let (now, most) = resident().unwrap_or_default();
        println!(
            "\n{precision}: loaded in {:.2} s (first {:.2}); weights {:.0} MB, resident {:.0} MB, at most {:.0} MB",
            times[1],
            times[0],
            model.weight_bytes() as f64 / 1e6,
            now as f64 / 1e6,
            most as f64 / 1e6
        );
        for &(count, length) in &options.rows {
            let mut record = measure(&mut model, &options, count, length)?;
            record["precision"] = json!(precision.to_string());
            record["load_seconds"] = json!(times);
            record["resident_bytes_after_load"] = json!(now);
            record["weight_bytes"] = json!(model.weight_bytes());
            records.push(record);
        }
        let (now, _) = resident().unwrap_or_default();
        println!(
            "resident {:.0} MB, activations {:.0} MB of them",
            now as f64 / 1e6,
            model.activation_bytes() as f64 / 1e6
        );
    }
    if let Some(path) = &options.json {
        let record = json!({"probe": "laya-speed", "shape": format!("{:?}", options.shape), "device": device().name(),
            "threads": options.threads, "pack_tokens": options.pack, "cases": records});
        std::fs::write(path, format!("{record:#}\n")).unwrap_or_else(|e| eprintln!("write {}: {e}", path.display()));
    }
    Ok(())
}

fn measure(model: &mut Laya, options: &Options, count: usize, length: usize) -> tilewright_ops::Result<Value> {
    let device = model.device().clone();
    if device.is_gpu() {
        return measure_gpu(model, options, count, length);
    }
    let rows = rows(count, length, model.encoder().vocab_size);
    let mut plan = Laya::blank(model.agent(), model.encoder(), model.precision(), 1, options.pack)?;
    let null = plan.device().clone();
    let Device::Null(recorder) = &null else { unreachable!("a null device was asked for") };
    recorder.take_launches();
    plan.score(&rows)?;
    let mut ops = BTreeMap::<&str, (usize, f64)>::new();
    for launch in recorder.take_launches() {
        let entry = ops.entry(launch.op).or_default();
        *entry = (entry.0 + 1, entry.1 + launch.flops as f64);
    }
    let flops: f64 = ops.values().map(|(_, f)| f).sum();
    model.score(&rows)?;
    let (mut times, mut peaks) = (Vec::new(), Vec::new());
    for _ in 0..options.reps {
        peaks.push(peak(&device, options));
        let start = options.clock();
        model.score(&rows)?;
        times.push(options.clock() - start);
    }
    // Ticks of the processor's clock make single ones too high or too low.
    let peak = median(&peaks);
    println!(
        "{count} x {length} tokens: best {:.1} ms, med {:.1} ms, {:.0} GFLOP/s of {peak:.0} ({:.0} %)",
        1e3 * best(&times),
        1e3 * median(&times),
        flops / best(&times) / 1e9,
        100.0 * flops / best(&times) / 1e9 / peak
    );
    for (op, (launches, flops)) in &ops {
        println!("    {op:<28} {launches:>5} launches {:>9.2} GFLOP", flops / 1e9);
    }
    let parts = parts(model, options, count, length)?;
    let sum: f64 = parts.iter().map(|(_, seconds)| seconds).sum();
    println!("    all ops alone {:.1} ms", 1e3 * sum);
    let parts: serde_json::Map<_, _> = parts.into_iter().map(|(name, seconds)| (name, json!(seconds))).collect();
    Ok(json!({"rows": count, "tokens_a_row": length, "flops": flops, "seconds": times, "peak_gflops": peaks,
        "ops_alone_seconds": parts}))
}

/// First call, recording call, and replays: whole calls on the host's clock, with upload, head and answer; then the device's clock around the same passes,
/// from the upload to the download, and around passes of the encoder alone.
fn measure_gpu(model: &mut Laya, options: &Options, count: usize, length: usize) -> tilewright_ops::Result<Value> {
    let rows = rows(count, length, model.encoder().vocab_size);
    let mut times = Vec::new();
    for _ in 0..options.reps + 2 {
        let start = options.start.elapsed().as_secs_f64();
        model.score(&rows)?;
        times.push(options.start.elapsed().as_secs_f64() - start);
    }
    let (first, rest) = times.split_at(2);
    model.time_passes(true);
    let mut device = Vec::new();
    for _ in 0..options.reps {
        let before = model.passes().device_seconds;
        model.score(&rows)?;
        device.push(model.passes().device_seconds - before);
    }
    model.time_passes(false);
    let encoder: Vec<f64> = model.time_encoder(&rows, options.reps)?.into_iter().map(|t| f64::from(t) / 1e3).collect();
    println!(
        "{count} x {length} tokens: host best {:.3} ms, med {:.3} ms; device best {:.3}, med {:.3}; encoder alone best {:.3}, med {:.3}; first call {:.1}, recording {:.1}",
        1e3 * best(rest),
        1e3 * median(rest),
        1e3 * best(&device),
        1e3 * median(&device),
        1e3 * best(&encoder),
        1e3 * median(&encoder),
        1e3 * first[0],
        1e3 * first[1]
    );
    Ok(json!({"rows": count, "tokens_a_row": length, "seconds": rest, "device_seconds": device,
        "encoder_seconds": encoder, "first_seconds": first[0],
        "recording_seconds": first[1]}))
}

/// Seconds of every op of the model on such rows, each timed alone.
fn parts(model: &Laya, options: &Options, count: usize, length: usize) -> tilewright_ops::Result<Vec<(String, f64)>> {
    let device = model.device();
    let (c, head) = (model.encoder(), model.agent().head_layers);
    let (d, ff, layers) = (c.hidden, c.intermediate, c.layers.len());
    let packs = (count * length).div_ceil(options.pack);
    let rows = count / packs;
    let m = rows * length;
    let upper = head.saturating_sub(1);
    let full = c.layers.iter().filter(|k| **k == LayerKind::Full).count();
    let mut all = Vec::new();
    let mut report = |name: &str, times: usize, what: &str, work: f64, seconds: f64| {
        let share = seconds * (times * packs) as f64;
        println!(
            "    {name:<18} {times:>3} x {what:<20} {:>8.2} ms each {:>8.1} ms {:>6.0} GFLOP/s",
            1e3 * seconds,
            1e3 * share,
            work / seconds / 1e9
        );
        all.push((name.to_owned(), share));
    };
    let products = [
        ("Wqkv", layers, 3 * d, d, Activation::None),
        ("Wo", layers, d, d, Activation::None),
        ("Wi", layers, 2 * ff, d, Activation::Geglu),
        ("mlp.Wo", layers, d, ff, Activation::None),
        ("head q", upper, d, d, Activation::None),
        ("head kv", head, 2 * d, d, Activation::None),
        ("head out", upper, d, d, Activation::None),
        ("head up", upper, 4 * d, d, Activation::Relu),
        ("head down", upper, d, 4 * d, Activation::None),
    ];
    for (name, times, n, k, activation) in products {
        let gated = activation == Activation::Geglu;
        let layout = if gated { Layout::Gated } else { Layout::Plain };
        let source = Tensor::zeros(device, DType::F16, &[n, k])?;
        // Several, so that the weights come from memory as in the model, not from a cache.
        let weights: Vec<_> = (0..times.clamp(1, 6))
            .map(|_| Weight::pack(device, &source, model.precision(), layout))
            .collect::<Result<_, _>>()?;
        let x = Tensor::zeros(device, DType::F32, &[m, k])?;
        let out = Tensor::zeros(device, DType::F32, &[m, if gated { n / 2 } else { n }])?;
        let seconds = alone(options, weights.len(), |i| {
            let weight = &weights[i];
            forward(device, &Forward { x: &x, weight, bias: None, activation, residual: None, out: &out })
        })?;
        report(name, times, &format!("{m} x {n} x {k}"), 2.0 * (m * n * k) as f64, seconds);
    }
    let qkv = Tensor::zeros(device, DType::F32, &[m, 3 * d])?;
    let (x, out) = (Tensor::zeros(device, DType::F32, &[m, d])?, Tensor::zeros(device, DType::F32, &[m, d])?);
    let starts: Vec<i32> = (0..=rows).map(|r| (r * length) as i32).collect();
    let starts = Tensor::from_i32(device, &[rows + 1], &starts)?;
    let bytes = encoder_attention::workspace_bytes(device, rows, c.heads, d);
    let workspace = Tensor::zeros(device, DType::U8, &[bytes])?;
    for (name, times, window) in [("full", full + upper, None), ("sliding", layers - full, Some(c.half_window()))] {
        let args = encoder_attention::Forward {
            q: &qkv,
            kv: &qkv,
            rotation: None,
            longest: None,
            key_column: d,
            heads: c.heads,
            row_starts: &starts,
            selected: None,
            window,
            positions: None,
            option_ids: None,
            out: &out,
            workspace: &workspace,
        };
        let seconds = alone(options, 3, |_| encoder_attention::forward(device, &args))?;
        let seen = window.map_or(length, |half| length.min(2 * half + 1));
        report(
            &format!("{name} attention"),
            times,
            &format!("{rows} x {length}"),
            4.0 * (m * seen * d) as f64,
            seconds,
        );
    }
    let weight = Tensor::zeros(device, DType::F32, &[d])?;
    let (mean, rstd) = (Tensor::zeros(device, DType::F32, &[m])?, Tensor::zeros(device, DType::F32, &[m])?);
    let norm = layernorm::Forward {
        x: &x,
        residual: None,
        weight: &weight,
        bias: None,
        eps: 1e-5,
        out: &out,
        mean: &mean,
        rstd: &rstd,
    };
    let seconds = alone(options, 3, |_| layernorm::forward(device, &norm))?;
    report("layernorm", 2 * (layers + head), &format!("{m} x {d}"), 8.0 * (m * d) as f64, seconds);
    let table = rope::table(device, c.full_theta, length, c.head_size())?;
    let positions: Vec<i32> = (0..m).map(|i| (i % length) as i32).collect();
    let positions = Tensor::from_i32(device, &[m], &positions)?;
    let turn = rope::Forward { x: &qkv, heads: 2 * c.heads, positions: &positions, table: &table };
    let seconds = alone(options, 3, |_| rope::forward(device, &turn))?;
    report("rope", layers, &format!("{m} x {}", 2 * d), 6.0 * (m * d) as f64, seconds);
    Ok(all)
}

/// The best mean time of a call, in runs of at least a twentieth of a second: the system counts time on the processor in ticks.
fn alone(
    options: &Options,
    calls: usize,
    mut op: impl FnMut(usize) -> tilewright_ops::Result<()>,
) -> tilewright_ops::Result<f64> {
    let mut times = Vec::new();
    for _ in 0..=options.reps {
        let (start, mut rounds) = (options.clock(), 0);
        while rounds == 0 || options.clock() - start < 0.05 {
            for call in 0..calls {
                op(call)?;
            }
            rounds += 1;
        }
        times.push((options.clock() - start) / (calls * rounds) as f64);
    }
    Ok(best(&times))
}
