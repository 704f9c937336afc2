//! Matrix products as a share of this machine's peak of f32 multiply-adds.
//!
//! ```text
//! cargo run --release -p lab --bin matmul-peak -- [--threads N] [--reps N] [--rows 256,1024,4096]
//!     [--forms forward,input,weight] [--layers 768x768,768x50304] [--json FILE]
//! ```
//!
//! The peak is measured on all threads right before every repetition of every shape, so both sides meet the same clock and the same
//! neighbours. Two columns for each form: `best` is the best rate over the best peak, `med` the median of the ratios of each repetition to
//! the peak beside it. Times are wall times: on a machine with other work only `best` over many repetitions means something. The weight
//! form accumulates, as training does.

use std::time::Instant;

use serde_json::json;
use tilewright_ops::cpu::peak::run_multiply_adds;
use tilewright_ops::matmul::{BackwardInput, BackwardWeight, Forward, backward_input, backward_weight, forward};
use tilewright_ops::{Arena, DType, Device, Plan, Tensor};

/// `(K, N)` of the linear layers and the head of GPT-2 with 768 channels.
const LAYERS: [(usize, usize); 5] = [(768, 768), (768, 2304), (768, 3072), (3072, 768), (768, 50304)];

fn main() {
    let options = Options::from_args();
    let device = match options.threads {
        Some(threads) => Device::cpu_with_threads(threads),
        None => Device::cpu(),
    };
    println!("{}, {} repetitions, % of the f32 multiply-add peak measured alongside", device.name(), options.reps);
    let peaks: Vec<f64> = (0..20).map(|_| peak(&device)).collect();
    println!("peak: best {:.0} GFLOP/s, median {:.0}\n", best(&peaks), median(peaks.clone()));
    println!("    M      K      N      forward: best   med      input: best   med     weight: best   med    GFLOP/s");
    let mut records = Vec::new();
    let mut worst: Option<(f64, String)> = None;
    for &m in &options.rows {
        for &(k, n) in &options.layers {
            let case = Case::new(&device, m, k, n);
            let mut line = format!("{m:>5} {k:>6} {n:>6}");
            let mut all_rates = String::new();
            for form in options.forms.iter().map(String::as_str) {
                let (rates, peaks): (Vec<f64>, Vec<f64>) = (0..options.reps).map(|_| case.sample(form)).unzip();
                let share = 100.0 * best(&rates) / best(&peaks);
                let middle = median(rates.iter().zip(&peaks).map(|(rate, peak)| 100.0 * rate / peak).collect());
                line += &format!("         {share:>5.1} {middle:>5.1}   ");
                all_rates += &format!(" {:>4.0}", best(&rates));
                if worst.as_ref().is_none_or(|(w, _)| share < *w) {
                    worst = Some((share, format!("{form} M={m} K={k} N={n}")));
                }
                records.push(json!({
                    "form": form, "m": m, "k": k, "n": n, "best_percent": share, "median_percent": middle,
                    "gflops": rates, "peak_gflops": peaks,
                }));
            }
            println!("{line}{all_rates}");
        }
    }
    if let Some((share, name)) = worst {
        println!("\nlowest: {share:.1} % ({name})");
    }
    if let Some(path) = options.json {
        let record =
            json!({ "probe": "matmul-peak", "device": device.name(), "machine": cpu_model(), "cases": records });
        std::fs::write(&path, format!("{record:#}\n")).unwrap_or_else(|e| fail(&format!("{path}: {e}")));
        println!("record: {path}");
    }
}

struct Options {
    threads: Option<usize>,
    reps: usize,
    rows: Vec<usize>,
    forms: Vec<String>,
    layers: Vec<(usize, usize)>,
    json: Option<String>,
}

impl Options {
    fn from_args() -> Options {
        let forms = ["forward", "input", "weight"].map(String::from).to_vec();
        let (rows, layers) = (vec![256, 1024, 4096], LAYERS.to_vec());
        let mut options = Options { threads: None, reps: 7, rows, forms, layers, json: None };
        let mut args = std::env::args().skip(1);
        while let Some(flag) = args.next() {
            let value = args.next().unwrap_or_else(|| fail(&format!("`{flag}` wants a value")));
            let number = |v: &str| {
                let parsed = v.parse().ok().filter(|&n: &usize| n > 0);
                parsed.unwrap_or_else(|| fail(&format!("`{flag} {v}`: not a number above 0")))
            };
            match flag.as_str() {
                "--threads" => options.threads = Some(number(&value)),
                "--reps" => options.reps = number(&value),
                "--rows" => options.rows = value.split(',').map(number).collect(),
                "--forms" => options.forms = value.split(',').map(String::from).collect(),
                "--layers" => {
                    let layer = |v: &str| {
                        let (k, n) = v.split_once('x').unwrap_or_else(|| fail(&format!("`--layers {v}`: not KxN")));
                        (number(k), number(n))
                    };
                    options.layers = value.split(',').map(layer).collect();
                }
                "--json" => options.json = Some(value),
                _ => fail(&format!("`{flag}` is none of --threads, --reps, --rows, --forms, --layers, --json")),
            }
        }
        options
    }
}

fn fail(message: &str) -> ! {
    eprintln!("matmul-peak: {message}");
    std::process::exit(2)
}

fn cpu_model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|l| l.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let family = field("cpu family").unwrap_or_default();
    format!("{} (family {family})", field("model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned()))
}

fn best(rates: &[f64]) -> f64 {
    rates.iter().copied().fold(0.0, f64::max)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// GFLOP/s of `work`.
fn measure(flops: f64, work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    flops / start.elapsed().as_secs_f64() / 1e9
}

/// The tensors of one layer.
struct Case {
    device: Device,
    shape: (usize, usize, usize),
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    /// The output, and the gradient that comes back.
    out: Tensor,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor,
}

impl Case {
    fn new(device: &Device, m: usize, k: usize, n: usize) -> Case {
        let mut plan = Plan::new("matmul-peak");
        let shapes: [(&str, &[usize]); 7] = [
            ("x", &[m, k]),
            ("weight", &[n, k]),
            ("bias", &[n]),
            ("out", &[m, n]),
            ("dx", &[m, k]),
            ("dweight", &[n, k]),
            ("dbias", &[n]),
        ];
        let slots = shapes.map(|(name, shape)| plan.add(name, DType::F32, shape));
        let arena = Arena::allocate(device, plan).unwrap_or_else(|e| fail(&e.to_string()));
        let [x, weight, bias, out, dx, dweight, dbias] = slots.map(|s| arena.tensor(s));
        for t in [&x, &weight, &bias, &out] {
            let values: Vec<f32> = (0..t.numel()).map(|i| ((i * 7919) % 1000) as f32 * 1e-3 - 0.5).collect();
            t.write_f32(&values).unwrap_or_else(|e| fail(&e.to_string()));
        }
        let case = Case { device: device.clone(), shape: (m, k, n), x, weight, bias, out, dx, dweight, dbias };
        case.run("input");
        case.run("weight");
        case
    }

    fn run(&self, form: &str) {
        let result = match form {
            "forward" => forward(
                &self.device,
                &Forward {
                    x: &self.x,
                    weight: &self.weight,
                    bias: Some(&self.bias),
                    gelu: None,
                    pre_gelu: None,
                    out: &self.out,
                },
            ),
            "input" => backward_input(
                &self.device,
                &BackwardInput {
                    dout: &self.out,
                    weight: &self.weight,
                    gelu: None,
                    dx: &self.dx,
                    accumulate: false,
                    activation: None,
                    dx_sums: None,
                },
            ),
            "weight" => backward_weight(
                &self.device,
                &BackwardWeight {
                    dout: &self.out,
                    x: &self.x,
                    dweight: &self.dweight,
                    dbias: Some(&self.dbias),
                    accumulate: true,
                },
            ),
            _ => fail(&format!("`--forms {form}`: the forms are forward, input and weight")),
        };
        result.unwrap_or_else(|e| fail(&e.to_string()));
    }

    /// The rate of the form, and the peak beside it; small shapes run several times, so that a slice lasts some milliseconds.
    fn sample(&self, form: &str) -> (f64, f64) {
        let (m, k, n) = self.shape;
        let flops = 2.0 * m as f64 * k as f64 * n as f64;
        let runs = (3e9 / flops).ceil().max(1.0) as usize;
        let peak = peak(&self.device);
        let rate = measure(flops * runs as f64, || (0..runs).for_each(|_| self.run(form)));
        (rate, peak)
    }
}

/// GFLOP/s of independent multiply-adds on all threads of the device, over some milliseconds.
fn peak(device: &Device) -> f64 {
    let Device::Cpu(cpu) = device else { fail("the peak is that of a CPU") };
    let start = Instant::now();
    let flops = run_multiply_adds(cpu);
    flops / start.elapsed().as_secs_f64() / 1e9
}
