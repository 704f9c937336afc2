//! What the loss head of GPT-2 costs, entry by entry, beside the three bare matrix products on materialised logits.
//!
//! ```text
//! cargo run --release -p tilewright-ops --example linear_cross_entropy -- [rows 256] [rounds 8] [threads 1] [f32|f16|bf16] [D 768] [V 50257]
//! ```
//!
//! All arms run in each round, and the least time of each counts. With one thread the time is that which the processor gave this thread, where
//! the system tells it, so that a busy machine disturbs less; with more it is wall time.

use std::time::Instant;

use tilewright_ops::linear_cross_entropy::{
    Backward, Forward, ForwardBackward, backward, backward_workspace_bytes, forward, forward_backward,
    forward_backward_workspace_bytes, forward_workspace_bytes,
};
use tilewright_ops::{DType, Device, Result, Tensor, matmul};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: usize| args.get(i).map_or(default, |a| a.parse().expect("a number"));
    let (n, rounds, threads) = (number(0, 256), number(1, 8), number(2, 1));
    let dtype = match args.get(3).map(String::as_str) {
        None | Some("f32") => DType::F32,
        Some("f16") => DType::F16,
        Some("bf16") => DType::BF16,
        Some(other) => panic!("{other}: f32, f16 or bf16"),
    };
    let (d, vocab) = (number(4, 768), number(5, 50_257));
    let vp = vocab.next_multiple_of(128);
    let device = Device::cpu_with_threads(threads);
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(&device, dtype, shape);

    let (hidden, weight) = (zeros(dtype, &[n, d])?, zeros(dtype, &[vp, d])?);
    let (dhidden, dweight) = (zeros(dtype, &[n, d])?, zeros(dtype, &[vp, d])?);
    let (losses, lse) = (zeros(DType::F32, &[n])?, zeros(DType::F32, &[n])?);
    let mut state = 1u32;
    let mut fill = |t: &Tensor, amplitude: f32| {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 8) as f32 / 8_388_608.0 - 1.0) * amplitude
        };
        t.write_f32(&(0..t.numel()).map(|_| next()).collect::<Vec<_>>())
    };
    fill(&hidden, 1.7)?;
    fill(&weight, 0.06)?;
    let ids: Vec<i32> = (0..n).map(|row| (row * 7919 % vocab) as i32).collect();
    let targets = &Tensor::from_i32(&device, &[n], &ids)?;
    let bytes = [
        forward_workspace_bytes(&device, n, d, vp),
        backward_workspace_bytes(&device, n, d, vp),
        forward_backward_workspace_bytes(&device, n, d, vp),
    ];
    let workspace = &zeros(DType::U8, &[bytes.into_iter().max().unwrap_or(0)])?;
    let logits = zeros(DType::F32, &[n, vp])?;
    let (hidden, weight, dhidden, dweight, losses, lse) = (&hidden, &weight, &dhidden, &dweight, &losses, &lse);
    let (ignore_index, dloss, accumulate_dweight) = (-100, 1.0 / n as f32, true);

    let products = || {
        let (x, dout) = (hidden, &logits);
        matmul::forward(&device, &matmul::Forward { x, weight, bias: None, gelu: None, pre_gelu: None, out: &logits })?;
        let input = matmul::BackwardInput {
            dout,
            weight,
            gelu: None,
            dx: dhidden,
            accumulate: false,
            activation: None,
            dx_sums: None,
        };
        matmul::backward_input(&device, &input)?;
        let weight = matmul::BackwardWeight { dout, x, dweight, dbias: None, accumulate: true };
        matmul::backward_weight(&device, &weight)
    };
    let train = || {
        let args = ForwardBackward {
            hidden,
            weight,
            vocab,
            targets,
            ignore_index,
            losses,
            dloss,
            dhidden,
            dweight,
            accumulate_dweight,
            workspace,
        };
        forward_backward(&device, &args)
    };
    let loss = || {
        let args = Forward { hidden, weight, vocab, targets, ignore_index, losses, lse, workspace };
        forward(&device, &args)
    };
    let gradients = || {
        let args = Backward {
            hidden,
            weight,
            vocab,
            targets,
            ignore_index,
            lse,
            dloss,
            dhidden,
            dweight,
            accumulate_dweight,
            workspace,
        };
        backward(&device, &args)
    };
    let arms: [Arm<'_>; 4] = [
        ("three products, all logits", 6, &products),
        ("forward_backward", 6, &train),
        ("forward", 2, &loss),
        ("backward", 6, &gradients),
    ];
    let mut best = [f64::INFINITY; 4];
    for _ in 0..rounds {
        for ((_, _, run), best) in arms.iter().zip(&mut best) {
            let clock = Clock::start(threads == 1);
            run()?;
            *best = best.min(clock.seconds());
        }
    }
    println!("N={n} D={d} V={vocab} {dtype} on {}, workspaces {bytes:?} bytes", device.name());
    for ((name, factor, _), seconds) in arms.iter().zip(best) {
        // Work that the formula asks for; what is computed twice counts once.
        let rate = (factor * n * vocab * d) as f64 / seconds / 1e9;
        println!("{name:28} {:8.1} ms {rate:6.0} GFLOP/s {:6.3} of the products", seconds * 1e3, seconds / best[0]);
    }
    Ok(())
}

/// A name, the operations of its formula in units of `N V D`, and the call.
type Arm<'a> = (&'static str, usize, &'a dyn Fn() -> Result<()>);

struct Clock {
    wall: Instant,
    thread: Option<f64>,
}

impl Clock {
    fn start(one_thread: bool) -> Clock {
        Clock { wall: Instant::now(), thread: thread_seconds().filter(|_| one_thread) }
    }

    fn seconds(&self) -> f64 {
        match (self.thread, thread_seconds()) {
            (Some(start), Some(now)) => now - start,
            _ => self.wall.elapsed().as_secs_f64(),
        }
    }
}

/// Processor time of this thread, on Linux.
fn thread_seconds() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(stat.split(' ').next()?.parse::<f64>().ok()? / 1e9)
}
