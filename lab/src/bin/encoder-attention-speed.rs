//! Encoder attention against the multiply-add peak measured beside it, banded against dense, mixed lengths against equal ones.
//!
//! ```text
//! cargo run --release -p lab --bin encoder-attention-speed -- [--threads N] [--reps N] [--heads N] [--json FILE]
//! ```
//!
//! Work is what the mask lets through: `4 * D` floating-point operations for each pair of a query and a key that it sees. All cases of a
//! table run in turn in every repetition, so that all meet the same clock and the same neighbours; `best` is the least time of all
//! repetitions, `med` the median of the ratios to the peak measured right before. Times are wall times; with `--threads 1` they are
//! processor times of the thread, which mean something on a busy machine too.

use std::time::Duration;

use serde_json::{Value, json};
use tilewright_ops::cpu::peak::run_multiply_adds;
use tilewright_ops::encoder_attention::{Forward, forward, workspace_bytes};
use tilewright_ops::{DType, Device, Tensor};

/// Channels of a head in every published checkpoint.
const HEAD: usize = 64;

/// The window of every published checkpoint.
const WINDOW: Option<usize> = Some(64);

fn main() {
    let (mut threads, mut reps, mut heads, mut path) = (None, 7, 16, None);
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().unwrap_or_else(|| fail(&format!("`{flag}` wants a value")));
        let number = || value.parse().ok().filter(|&n: &usize| n > 0);
        let number = || number().unwrap_or_else(|| fail(&format!("`{flag} {value}`: not a number above 0")));
        match flag.as_str() {
            "--threads" => threads = Some(number()),
            "--reps" => reps = number(),
            "--heads" => heads = number(),
            "--json" => path = Some(value),
            _ => fail(&format!("`{flag}` is none of --threads, --reps, --heads, --json")),
        }
    }
    let device = threads.map_or_else(Device::cpu, Device::cpu_with_threads);
    println!("{}, {heads} heads of {HEAD}, {reps} repetitions", device.name());

    let shapes: [(&str, Vec<usize>, Option<usize>); 10] = [
        ("1 x 65", vec![65], None),
        ("16 x 65", vec![65; 16], None),
        ("16 x 65, window", vec![65; 16], WINDOW),
        ("8 x 192", vec![192; 8], None),
        ("8 x 192, window", vec![192; 8], WINDOW),
        ("4 x 512, window", vec![512; 4], WINDOW),
        ("1 x 1024", vec![1024], None),
        ("1 x 1024, window", vec![1024], WINDOW),
        ("1 x 8192", vec![8192], None),
        ("1 x 8192, window", vec![8192], WINDOW),
    ];
    let cases = shapes.map(|(name, lengths, window)| Case::new(&device, heads, name, lengths, window));
    println!("\nrates over the pairs that are seen");
    let rates = measure(&device, &cases, reps);
    println!("rows                  GFLOP/s   % of peak: best   med");
    rates.iter().for_each(Rate::print);
    let (dense, band) = (&rates[8], &rates[9]);
    let (time, work) = (dense.best / band.best, cases[8].flops / cases[9].flops);
    println!("\n8192 tokens: the band takes 1/{time:.1} of the time for 1/{work:.1} of the work");

    println!("\nmixed lengths against equal ones, 16 rows");
    let mixed: Vec<usize> = (0..16).map(|i| 20 + (980 * ((i * 7) % 16)) / 15).collect();
    let tokens: usize = mixed.iter().sum();
    let equal: Vec<usize> = (0..16).map(|i| tokens / 16 + usize::from(i < tokens % 16)).collect();
    let mixes = [
        Case::new(&device, heads, "equal", equal.clone(), None),
        Case::new(&device, heads, "20 to 1000", mixed.clone(), None),
        Case::new(&device, heads, "equal, window", equal, WINDOW),
        Case::new(&device, heads, "20 to 1000, window", mixed, WINDOW),
    ];
    let mix_rates = measure(&device, &mixes, reps);
    println!("rows                  GFLOP/s   % of peak: best   med     tokens/s");
    for (rate, case) in mix_rates.iter().zip(&mixes) {
        rate.print_with(&format!("{:>13.0}", case.tokens as f64 / rate.best));
    }
    if let Some(path) = path {
        let all = |rates: &[Rate]| rates.iter().map(Rate::json).collect::<Vec<_>>();
        let record = json!({
            "probe": "encoder-attention-speed", "device": device.name(), "machine": cpu_model(), "heads": heads,
            "dense_over_band_time": time, "dense_over_band_work": work, "rates": all(&rates), "mixes": all(&mix_rates),
        });
        std::fs::write(&path, format!("{record:#}\n")).unwrap_or_else(|e| fail(&format!("{path}: {e}")));
        println!("record: {path}");
    }
}

fn fail(message: &str) -> ! {
    eprintln!("encoder-attention-speed: {message}");
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

struct Case {
    name: &'static str,
    device: Device,
    heads: usize,
    window: Option<usize>,
    tokens: usize,
    flops: f64,
    row_starts: Tensor,
    qkv: Tensor,
    out: Tensor,
    workspace: Tensor,
}

/// Pairs that see each other in a row.
fn pairs(length: usize, window: Option<usize>) -> usize {
    let half = window.unwrap_or(length);
    (0..length).map(|i| (i + half).min(length - 1) - i.saturating_sub(half) + 1).sum()
}

impl Case {
    fn new(device: &Device, heads: usize, name: &'static str, lengths: Vec<usize>, window: Option<usize>) -> Case {
        let d = heads * HEAD;
        let mut starts = vec![0i32];
        for length in &lengths {
            starts.push(starts[starts.len() - 1] + *length as i32);
        }
        let tokens: usize = lengths.iter().sum();
        let values: Vec<f32> = (0..tokens * 3 * d).map(|i| ((i * 7919) % 1000) as f32 * 2e-3 - 1.0).collect();
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(device, dtype, shape);
        let tensors = || {
            Ok::<_, tilewright_ops::Error>((
                Tensor::from_i32(device, &[starts.len()], &starts)?,
                Tensor::from_f32(device, DType::F32, &[tokens, 3 * d], &values)?,
                zeros(DType::F32, &[tokens, d])?,
                zeros(DType::U8, &[workspace_bytes(device, lengths.len(), heads, d)])?,
            ))
        };
        let (row_starts, qkv, out, workspace) = tensors().unwrap_or_else(|e| fail(&e.to_string()));
        let flops = 4.0 * (d * lengths.iter().map(|&l| pairs(l, window)).sum::<usize>()) as f64;
        Case { name, device: device.clone(), heads, window, tokens, flops, row_starts, qkv, out, workspace }
    }

    fn run(&self) {
        let args = Forward {
            q: &self.qkv,
            kv: &self.qkv,
            rotation: None,
            longest: None,
            key_column: self.heads * HEAD,
            heads: self.heads,
            row_starts: &self.row_starts,
            selected: None,
            window: self.window,
            positions: None,
            option_ids: None,
            out: &self.out,
            workspace: &self.workspace,
        };
        forward(&self.device, &args).unwrap_or_else(|e| fail(&e.to_string()));
    }
}

struct Rate {
    name: &'static str,
    flops: f64,
    /// Least seconds of a call.
    best: f64,
    seconds: Vec<f64>,
    peaks: Vec<f64>,
}

impl Rate {
    fn print(&self) {
        self.print_with("");
    }

    fn print_with(&self, rest: &str) {
        let gflops = self.flops / self.best / 1e9;
        let peak = self.peaks.iter().copied().fold(0.0, f64::max);
        let mut ratios: Vec<f64> =
            self.seconds.iter().zip(&self.peaks).map(|(s, p)| 100.0 * self.flops / s / 1e9 / p).collect();
        ratios.sort_by(f64::total_cmp);
        let median = ratios[ratios.len() / 2];
        println!("{:<20} {gflops:>8.0} {:>17.1} {median:>5.1}{rest}", self.name, 100.0 * gflops / peak);
    }

    fn json(&self) -> Value {
        json!({ "rows": self.name, "flops": self.flops, "seconds": self.seconds, "peak_gflops": self.peaks })
    }
}

/// Runs all cases in turn, `reps` times; short ones several times in a row, so that a sample lasts some milliseconds.
fn measure(device: &Device, cases: &[Case], reps: usize) -> Vec<Rate> {
    let rate = |c: &Case| Rate { name: c.name, flops: c.flops, best: f64::MAX, seconds: Vec::new(), peaks: Vec::new() };
    let mut rates: Vec<Rate> = cases.iter().map(rate).collect();
    for rep in 0..=reps {
        for (case, rate) in cases.iter().zip(&mut rates) {
            let peak = peak(device);
            let runs = (1.5e9 / case.flops).ceil().max(1.0) as usize;
            let seconds = seconds(device, || (0..runs).for_each(|_| case.run())) / runs as f64;
            // The first repetition warms up.
            if rep > 0 {
                rate.best = rate.best.min(seconds);
                rate.seconds.push(seconds);
                rate.peaks.push(peak);
            }
        }
    }
    rates
}

/// GFLOP/s of independent multiply-adds on all threads of the device, over some milliseconds.
fn peak(device: &Device) -> f64 {
    let Device::Cpu(cpu) = device else { fail("the peak is that of a CPU") };
    let mut flops = 0.0;
    let seconds = seconds(device, || flops = run_multiply_adds(cpu));
    flops / seconds / 1e9
}

/// Seconds that `work` takes: of the processor where one thread does it all, else by the clock on the wall.
fn seconds(device: &Device, work: impl FnOnce()) -> f64 {
    let clock = if device.threads() == 1 { libc::CLOCK_THREAD_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
    let now = || {
        let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: both clocks exist on every system that this program builds on, and the structure is the call's own.
        let failed = unsafe { libc::clock_gettime(clock, &raw mut t) } != 0;
        assert!(!failed, "the system has no such clock");
        Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
    };
    let start = now();
    work();
    (now() - start).as_secs_f64()
}
