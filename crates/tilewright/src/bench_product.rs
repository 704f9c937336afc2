//! `tilewright bench-product`: the three matrix products of a linear layer, or as many multiply-adds and nothing else, as an arm of
//! `tilewright bench` (`docs/bench-protocol.md`). The ratio of the two is the share of the processor's peak.

use std::io::{BufRead, Write};
use std::time::Instant;

use anyhow::{Context, bail};
use serde_json::{Value, json};
use tilewright_ops::cpu::{Isa, default_threads, peak};
use tilewright_ops::matmul::{BackwardInput, BackwardWeight, Forward, backward_input, backward_weight, forward};
use tilewright_ops::{DType, Device, Tensor};

/// Fewer operations than this are over before a clock can tell.
const LEAST_FLOPS: f64 = 4e9;

/// Command line of `bench-product`.
#[derive(clap::Args)]
pub struct Args {
    /// Rows of the input
    #[arg(long)]
    rows: usize,
    /// Width of the input
    #[arg(long)]
    width: usize,
    /// Width of the output
    #[arg(long)]
    out: usize,
    /// Only multiply-adds, as many as the three products take
    #[arg(long)]
    peak: bool,
}

/// Runs the subcommand.
pub fn run(args: Args) -> anyhow::Result<()> {
    let device = Device::cpu();
    let layer = if args.peak { None } else { Some(Layer::new(&device, &args)?) };
    let once = 6.0 * args.rows as f64 * args.width as f64 * args.out as f64;
    let repeats = (LEAST_FLOPS / once).ceil().max(1.0);
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let request: Value = serde_json::from_str(&line.context("read a request from standard input")?)
            .context("a request is one JSON object a line; see docs/bench-protocol.md")?;
        let answer = match request["do"].as_str().unwrap_or_default() {
            "hello" => json!({
                "ok": "hello",
                "name": concat!("tilewright ", env!("CARGO_PKG_VERSION")),
                "fingerprint": {
                    "revision": env!("TILEWRIGHT_REVISION"), "isa": Isa::from_env().name(), "threads": default_threads(),
                    "dtype": "f32", "work": if args.peak { "multiply-adds" } else { "forward, input and weight gradient" },
                    "flops": once * repeats,
                },
            }),
            "prepare" => json!({"ok": "prepare", "inputs": [], "live_bytes": device.live_bytes()}),
            "run" => {
                let start = Instant::now();
                match (&layer, &device) {
                    (Some(layer), _) => (0..repeats as usize).try_for_each(|_| layer.run(&device))?,
                    (None, Device::Cpu(cpu)) => peak::run_flops(cpu, once * repeats),
                    _ => bail!("the peak is that of a CPU"),
                }
                json!({"ok": "run", "ns": start.elapsed().as_nanos() as u64})
            }
            "quit" => json!({"ok": "quit"}),
            other => json!({"error": format!("no request `{other}`; see docs/bench-protocol.md")}),
        };
        writeln!(out, "{answer}")?;
        out.flush()?;
        if request["do"] == "quit" {
            break;
        }
    }
    Ok(())
}

/// A linear layer with bias, and its gradients.
struct Layer {
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    /// The output, and the gradient that comes back.
    out: Tensor,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor,
}

impl Layer {
    fn new(device: &Device, args: &Args) -> anyhow::Result<Self> {
        let &Args { rows, width, out, .. } = args;
        let filled = |shape: &[usize]| -> anyhow::Result<Tensor> {
            let len: usize = shape.iter().product();
            let values: Vec<f32> = (0..len).map(|i| ((i * 7919) % 1000) as f32 * 1e-3 - 0.5).collect();
            Ok(Tensor::from_f32(device, DType::F32, shape, &values)?)
        };
        let empty = |shape: &[usize]| Tensor::zeros(device, DType::F32, shape);
        Ok(Layer {
            x: filled(&[rows, width])?,
            weight: filled(&[out, width])?,
            bias: filled(&[out])?,
            out: filled(&[rows, out])?,
            dx: empty(&[rows, width])?,
            dweight: empty(&[out, width])?,
            dbias: empty(&[out])?,
        })
    }

    fn run(&self, device: &Device) -> tilewright_ops::Result<()> {
        let Layer { x, weight, bias, out, dx, dweight, dbias } = self;
        forward(device, &Forward { x, weight, bias: Some(bias), gelu: None, pre_gelu: None, out })?;
        backward_input(
            device,
            &BackwardInput { dout: out, weight, gelu: None, dx, accumulate: false, activation: None, dx_sums: None },
        )?;
        backward_weight(device, &BackwardWeight { dout: out, x, dweight, dbias: Some(dbias), accumulate: false })
    }
}
