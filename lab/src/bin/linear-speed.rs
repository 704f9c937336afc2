//! Linear layers of inference as a share of this machine's peak of f32 multiply-adds, in every precision, beside the matrix product of training.
//!
//! ```text
//! cargo run --release -p lab --bin linear-speed -- [--threads N] [--reps N] [--rows 1,16,65,1040]
//!     [--layers large|small|NxK[g],...] [--cold MB] [--json FILE]
//! cargo run --release -p lab --bin linear-speed -- --pack
//! ```
//!
//! `g` marks a gated layer. A model reads every weight once for each batch, so each variant walks over copies of its weight that take `--cold`
//! megabytes together (default 96, more than a last cache; 0 uses one copy). All variants and the peak are run by turns, and the best of each is
//! shown: GFLOP/s, percent of the best peak, and the time of the product of training over that of the variant. `--pack` measures how fast an F16
//! weight of the large encoder is packed.

use std::time::Instant;

use serde_json::json;
use tilewright_ops::cpu::peak::run_multiply_adds;
use tilewright_ops::linear::{Activation, Forward, Layout, Weight, forward};
use tilewright_ops::{Arena, DType, Device, Plan, Tensor, matmul};

/// `(N, K, gated)` of the large encoder and its head.
const LARGE: [(usize, usize, bool); 6] = [
    (3072, 1024, false),
    (1024, 1024, false),
    (5248, 1024, true),
    (1024, 2624, false),
    (4096, 1024, false),
    (1024, 4096, false),
];

/// The same of the small one.
const SMALL: [(usize, usize, bool); 6] = [
    (2304, 768, false),
    (768, 768, false),
    (2304, 768, true),
    (768, 1152, false),
    (3072, 768, false),
    (768, 3072, false),
];

const PRECISIONS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

fn main() {
    let options = Options::from_args();
    let device = match options.threads {
        Some(threads) => Device::cpu_with_threads(threads),
        None => Device::cpu(),
    };
    if options.pack {
        return pack(&device);
    }
    println!("{}, best of {}, copies of {} MB", device.name(), options.reps, options.cold >> 20);
    println!(
        "    M      N      K   peak |  matmul   %   | f32      %   ratio | bf16     %   ratio | f16      %   ratio"
    );
    let mut records = Vec::new();
    for &(n, k, gated) in &options.layers {
        let case = Case::new(&device, n, k, gated, options.cold);
        for &m in &options.rows {
            let (peak, rates) = case.measure(&device, m, options.reps);
            let mut line = format!("{m:>5} {n:>6} {k:>6}{} {peak:>5.0}", if gated { "g" } else { " " });
            for (index, rate) in rates.iter().enumerate() {
                line += &format!(" | {rate:>6.1} {:>5.1}", 100.0 * rate / peak);
                if index > 0 {
                    line += &format!(" {:>6.3}", rate / rates[0]);
                }
            }
            println!("{line}");
            records.push(json!({
                "m": m, "n": n, "k": k, "gated": gated, "peak_gflops": peak,
                "matmul": rates[0], "f32": rates[1], "bf16": rates[2], "f16": rates[3],
            }));
        }
    }
    if let Some(path) = options.json {
        let record =
            json!({ "probe": "linear-speed", "device": device.name(), "reps": options.reps, "cases": records });
        std::fs::write(&path, format!("{record:#}\n")).unwrap_or_else(|e| fail(&format!("{path}: {e}")));
        println!("record: {path}");
    }
}

struct Options {
    threads: Option<usize>,
    reps: usize,
    rows: Vec<usize>,
    layers: Vec<(usize, usize, bool)>,
    cold: usize,
    json: Option<String>,
    pack: bool,
}

impl Options {
    fn from_args() -> Options {
        let layers = LARGE.into_iter().chain(SMALL).collect();
        let rows = vec![1, 16, 65, 1040];
        let mut options = Options { threads: None, reps: 15, rows, layers, cold: 96 << 20, json: None, pack: false };
        let mut args = std::env::args().skip(1);
        while let Some(flag) = args.next() {
            if flag == "--pack" {
                options.pack = true;
                continue;
            }
            let value = args.next().unwrap_or_else(|| fail(&format!("`{flag}` wants a value")));
            let number = |v: &str| v.parse().unwrap_or_else(|_| fail(&format!("`{flag} {v}`: not a number")));
            match flag.as_str() {
                "--threads" => options.threads = Some(number(&value)),
                "--reps" => options.reps = number(&value),
                "--rows" => options.rows = value.split(',').map(number).collect(),
                "--cold" => options.cold = number(&value) << 20,
                "--json" => options.json = Some(value),
                "--layers" => {
                    let layer = |v: &str| {
                        let (v, gated) = v.strip_suffix('g').map_or((v, false), |v| (v, true));
                        let (n, k) = v.split_once('x').unwrap_or_else(|| fail(&format!("`--layers {v}`: not NxK")));
                        (number(n), number(k), gated)
                    };
                    options.layers = match value.as_str() {
                        "large" => LARGE.to_vec(),
                        "small" => SMALL.to_vec(),
                        list => list.split(',').map(layer).collect(),
                    };
                }
                _ => fail(&format!("`{flag}` is none of --threads, --reps, --rows, --layers, --cold, --json, --pack")),
            }
        }
        options
    }
}

fn fail(message: &str) -> ! {
    eprintln!("linear-speed: {message}");
    std::process::exit(2)
}

fn ok<T>(result: tilewright_ops::Result<T>) -> T {
    result.unwrap_or_else(|e| fail(&e.to_string()))
}

/// Small numbers of both signs.
fn numbers(device: &Device, dtype: DType, shape: &[usize]) -> Tensor {
    let t = ok(Tensor::zeros(device, dtype, shape));
    let values: Vec<f32> = (0..t.numel()).map(|i| ((i * 7919) % 1000) as f32 * 1e-4 - 0.05).collect();
    ok(t.write_f32(&values));
    t
}

/// Tensors of one arena.
fn arena(device: &Device, count: usize, dtype: DType, shape: &[usize]) -> Vec<Tensor> {
    let mut plan = Plan::new("linear-speed");
    let slots: Vec<_> = (0..count).map(|i| plan.add(format!("copy {i}"), dtype, shape)).collect();
    let arena = ok(Arena::allocate(device, plan));
    slots.into_iter().map(|slot| arena.tensor(slot)).collect()
}

/// One layer: copies of its weight for each variant.
struct Case {
    shape: (usize, usize),
    gated: bool,
    bias: Tensor,
    plain: Vec<Tensor>,
    packed: [Vec<Weight>; 3],
}

impl Case {
    fn new(device: &Device, n: usize, k: usize, gated: bool, cold: usize) -> Case {
        let copies = |size: usize| cold.div_ceil(n * k * size).max(1);
        let source = numbers(device, DType::F32, &[n, k]);
        let layout = if gated { Layout::Gated } else { Layout::Plain };
        // One arena each, as models have: it lies in large pages.
        let packed = PRECISIONS.map(|precision| {
            let bytes = ok(Weight::packed_bytes(device, n, k, precision, layout));
            let slots = arena(device, copies(precision.size()), DType::U8, &[bytes]);
            slots.iter().map(|slot| ok(Weight::pack_into(device, &source, precision, layout, slot))).collect()
        });
        let plain = arena(device, copies(4), DType::F32, &[n, k]);
        plain.iter().for_each(|t| ok(t.copy_from(&source)));
        Case { shape: (n, k), gated, bias: numbers(device, DType::F32, &[n]), plain, packed }
    }

    /// Best GFLOP/s: the peak, then the product of training and the three precisions.
    fn measure(&self, device: &Device, m: usize, reps: usize) -> (f64, [f64; 4]) {
        let Device::Cpu(cpu) = device else { fail("the peak is that of a CPU") };
        let (n, k) = self.shape;
        let x = numbers(device, DType::F32, &[m, k]);
        let columns = if self.gated { n / 2 } else { n };
        let (out, full) = (numbers(device, DType::F32, &[m, columns]), numbers(device, DType::F32, &[m, n]));
        let flops = 2.0 * m as f64 * n as f64 * k as f64;
        let runs = (1e9 / flops).ceil().clamp(1.0, 40.0) as usize;
        let (mut peak, mut rates, mut at) = (0.0f64, [0.0f64; 4], [0usize; 4]);
        for _ in 0..reps {
            let start = Instant::now();
            let done = run_multiply_adds(cpu);
            peak = peak.max(done / start.elapsed().as_secs_f64() / 1e9);
            for variant in 0..4 {
                let start = Instant::now();
                for _ in 0..runs {
                    at[variant] += 1;
                    if variant == 0 {
                        let weight = &self.plain[at[0] % self.plain.len()];
                        let bias = Some(&self.bias);
                        let args = matmul::Forward { x: &x, weight, bias, gelu: None, pre_gelu: None, out: &full };
                        ok(matmul::forward(device, &args));
                    } else {
                        let copies = &self.packed[variant - 1];
                        let args = Forward {
                            x: &x,
                            weight: &copies[at[variant] % copies.len()],
                            bias: Some(&self.bias),
                            activation: if self.gated { Activation::Geglu } else { Activation::None },
                            residual: if self.gated { None } else { Some(&out) },
                            out: &out,
                        };
                        ok(forward(device, &args));
                    }
                }
                rates[variant] = rates[variant].max(flops * runs as f64 / start.elapsed().as_secs_f64() / 1e9);
            }
        }
        (peak, rates)
    }
}

/// Packing of the gated weight of the large encoder, copies enough to leave every cache.
fn pack(device: &Device) {
    let (n, k) = (5248, 1024);
    for source_type in [DType::F16, DType::F32] {
        let sources: Vec<Tensor> = (0..12).map(|_| numbers(device, source_type, &[n, k])).collect();
        for precision in PRECISIONS {
            let bytes = ok(Weight::packed_bytes(device, n, k, precision, Layout::Gated));
            let memory = arena(device, sources.len(), DType::U8, &[bytes]);
            let mut times = Vec::new();
            // The first round meets memory that the system has not handed out yet, as a load does.
            for _ in 0..3 {
                let start = Instant::now();
                for (source, memory) in sources.iter().zip(&memory) {
                    ok(Weight::pack_into(device, source, precision, Layout::Gated, memory));
                }
                times.push(start.elapsed().as_secs_f64());
            }
            let elements = (sources.len() * n * k) as f64;
            let rates: Vec<String> = times.iter().map(|t| format!("{:.2}", elements / t / 1e9)).collect();
            println!("{source_type} to {precision}: {} thousand million elements a second", rates.join(", "));
        }
    }
}
