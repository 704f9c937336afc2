//! How much of the processor's peak attention reaches: `cargo run --release -p tilewright-ops --example attention_probe [repeats [filter]]`.
//!
//! Every repeat measures, in turn, the peak (register-only multiply-adds on all threads) and each shape; the table shows the best of all repeats, and
//! the median of the ratios taken within one repeat, which holds on a busy machine too. Work is counted causal: the visible half.

use std::time::Instant;

use tilewright_ops::attention::{Backward, Forward, Mask, backward, forward, workspace_bytes};
use tilewright_ops::{DType, Device, Tensor};

/// One shape with its tensors.
struct Case {
    name: String,
    heads: usize,
    flops: f64,
    rounds: usize,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dqkv: Tensor,
    workspace: Tensor,
}

impl Case {
    fn new(device: &Device, dtype: DType, (b, t, heads, head): (usize, usize, usize, usize)) -> Self {
        let c = heads * head;
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(device, dtype, shape).expect("room for the probe");
        let random = |shape: &[usize]| {
            let tensor = zeros(dtype, shape);
            let mut x = 12_345u32;
            let values: Vec<f32> = (0..tensor.numel())
                .map(|_| {
                    x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (x >> 8) as f32 / 8_388_608.0 - 1.0
                })
                .collect();
            tensor.write_f32(&values).expect("a float tensor");
            tensor
        };
        let flops = (b * heads * head) as f64 * 2.0 * (t * (t + 1) / 2) as f64;
        Case {
            name: format!("B={b} T={t} H={heads} hs={head} {dtype}"),
            heads,
            flops,
            rounds: (3e9 / flops).ceil() as usize,
            qkv: random(&[b, t, 3 * c]),
            out: zeros(dtype, &[b, t, c]),
            lse: zeros(DType::F32, &[b, heads, t]),
            dout: random(&[b, t, c]),
            dqkv: zeros(dtype, &[b, t, 3 * c]),
            workspace: zeros(DType::U8, &[workspace_bytes(device, b, t, c, heads)]),
        }
    }

    /// GFLOP/s of forward and backward.
    fn run(&self, device: &Device) -> [f64; 2] {
        let Case { heads, .. } = *self;
        let (qkv, out, lse, dout) = (&self.qkv, &self.out, &self.lse, &self.dout);
        let (mask, workspace) = (Mask::Causal, &self.workspace);
        let start = clock(device);
        for _ in 0..self.rounds {
            forward(device, &Forward { qkv, heads, mask, out, lse, workspace }).expect("a valid call");
        }
        let middle = clock(device);
        for _ in 0..self.rounds {
            let args = Backward { qkv, heads, mask, out, lse, dout, dqkv: &self.dqkv, dqkv_sums: None, workspace };
            backward(device, &args).expect("a valid call");
        }
        let rate = |products: f64, seconds: f64| self.rounds as f64 * products * self.flops / seconds / 1e9;
        [rate(2.0, middle - start), rate(5.0, clock(device) - middle)]
    }
}

/// GFLOP/s of multiply-adds that touch no memory, on all threads of the device.
fn peak(device: &Device) -> f64 {
    const ROUNDS: usize = 10_000_000;
    const SUMS: usize = 12;
    #[inline(always)]
    fn body<const LANES: usize>(seed: f32) -> f32 {
        let mut sums = [[seed; LANES]; SUMS];
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                for x in sum {
                    *x = *x * 0.999 + 1e-3;
                }
            }
        }
        sums.iter().flatten().sum()
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn avx512(seed: f32) -> f32 {
        use std::arch::x86_64::*;
        let mut sums = [_mm512_set1_ps(seed); SUMS];
        let (m, a) = (_mm512_set1_ps(0.999), _mm512_set1_ps(1e-3));
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, m, a);
            }
        }
        sums.into_iter().map(|x| _mm512_reduce_add_ps(x)).sum()
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn avx2(seed: f32) -> f32 {
        use std::arch::x86_64::*;
        let mut sums = [_mm256_set1_ps(seed); SUMS];
        let (m, a) = (_mm256_set1_ps(0.999), _mm256_set1_ps(1e-3));
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, m, a);
            }
        }
        sums.into_iter().map(|x| _mm256_cvtss_f32(x)).sum()
    }
    let Device::Cpu(cpu) = device else { return f64::NAN };
    let isa = cpu.isa().name();
    let start = clock(device);
    cpu.pool().run(cpu.threads(), &|task, _| {
        std::hint::black_box(match isa {
            // SAFETY: a device refuses an instruction set that the machine lacks.
            #[cfg(target_arch = "x86_64")]
            "avx512" => unsafe { avx512(task as f32) },
            #[cfg(target_arch = "x86_64")]
            "avx2" => unsafe { avx2(task as f32) },
            _ => body::<4>(task as f32),
        });
    });
    let lanes = match isa {
        "avx512" => 16,
        "avx2" => 8,
        _ => 4,
    };
    (cpu.threads() * ROUNDS * SUMS * lanes * 2) as f64 / (clock(device) - start) / 1e9
}

/// Seconds: of wall time, or with one thread of the processor's time where the system tells it, which other programs disturb less.
fn clock(device: &Device) -> f64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    let ran = || -> Option<f64> {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        Some(text.split_whitespace().next()?.parse::<f64>().ok()? * 1e-9)
    };
    let of_thread = if device.threads() == 1 { ran() } else { None };
    of_thread.unwrap_or_else(|| START.get_or_init(Instant::now).elapsed().as_secs_f64())
}

fn main() {
    let repeats = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(15);
    let device = Device::cpu();
    let mut cases: Vec<Case> = [(4, 1024, 12, 64), (4, 64, 12, 64), (1, 1024, 12, 64), (1, 1024, 12, 80)]
        .into_iter()
        .map(|shape| Case::new(&device, DType::F32, shape))
        .collect();
    cases.extend([DType::BF16, DType::F16].map(|dtype| Case::new(&device, dtype, (4, 64, 12, 64))));
    let filter = std::env::args().nth(2).unwrap_or_default();
    cases.retain(|case| case.name.contains(&filter));
    println!("{} ; GFLOP/s of the visible half; best, and median of the fraction of the peak", device.name());
    let mut best = vec![[0.0f64; 2]; cases.len()];
    let mut ratios = vec![[vec![], vec![]]; cases.len()];
    let mut peaks = vec![];
    for _ in 0..repeats {
        for (i, case) in cases.iter().enumerate() {
            let before = peak(&device);
            let rates = case.run(&device);
            let peak = (before + peak(&device)) / 2.0;
            peaks.push(peak);
            for direction in 0..2 {
                best[i][direction] = best[i][direction].max(rates[direction]);
                ratios[i][direction].push(rates[direction] / peak);
            }
        }
    }
    let median = |values: &mut Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let best_peak = peaks.iter().copied().fold(0.0, f64::max);
    println!("peak: best {best_peak:.1}, median {:.1}", median(&mut peaks));
    for (i, case) in cases.iter().enumerate() {
        for (direction, name) in ["forward ", "backward"].into_iter().enumerate() {
            let rate = best[i][direction];
            let ratio = 100.0 * median(&mut ratios[i][direction]);
            println!(
                "{:32} {name} {rate:7.1}  {:5.1} % of the best peak, median {ratio:5.1} %",
                case.name,
                100.0 * rate / best_peak
            );
        }
    }
}
