//! How long a launch may hold the GPU. A desktop shares it: while a kernel runs no window is drawn, and drivers end what takes seconds.
//!
//! What a device computes in a second is measured when a program opens it, by a product of a few milliseconds; products and attention are cut into
//! launches of rows or groups that stay below the budget, and what was launched is handed to the driver before it adds up to more. Cuts change no bits: a
//! row is computed the same way whatever stands beside it. A device that was not measured cuts nothing.
//!
//! Passes over whole tensors are bound by memory. At 20 GB/s, which an integrated GPU with 16 GB has, a budget of 100 ms is 2 GB. AdamW reads and
//! writes 28 bytes an element, 2.8 GB for the widest weights of GPT-2 355M: it is cut by elements. The others stay below and are not cut: the norm
//! reads 0.4 GB there, a cleared arena of gradients is 1.4 GB, a layernorm of 32 x 1024 rows of 768 moves 0.4 GB, GELU on four times as many channels 1.2.

use std::cell::Cell;
use std::time::Instant;

use tilewright_core::Result;

use super::Core;
use crate::{DType, Device, Tensor, matmul};

/// Milliseconds that a launch may take, unless `TILEWRIGHT_GPU_BUDGET_MS` says otherwise; 0 sets no limit.
const BUDGET_MS: f64 = 100.0;

/// Bytes a second below which no GPU is that someone computes on.
const SLOWEST_BYTES: f64 = 20e9;

/// Rows that a cut falls on: tiles of kernels stay whole, and every tensor's part starts where any device can bind it.
pub(crate) const ROWS: usize = 128;

/// See the module's words.
pub(crate) struct Pace {
    /// Seconds; infinite for none.
    budget: Cell<f64>,
    /// Operations a second of products in f32, and in 16-bit types.
    rates: [Cell<Option<f64>>; 2],
    /// Seconds of work launched since the last hand-over, and since the start.
    waiting: Cell<f64>,
    expected: Cell<f64>,
}

impl Pace {
    /// As the environment says. A software driver draws no windows: it has a budget only when one is asked for.
    pub(crate) fn from_env(software: bool) -> Self {
        let asked = std::env::var("TILEWRIGHT_GPU_BUDGET_MS").ok().and_then(|text| text.parse::<f64>().ok());
        let milliseconds = asked.unwrap_or(if software { 0.0 } else { BUDGET_MS });
        Pace {
            budget: Cell::new(if milliseconds > 0.0 { milliseconds / 1e3 } else { f64::INFINITY }),
            rates: [Cell::new(None), Cell::new(None)],
            waiting: Cell::new(0.0),
            expected: Cell::new(0.0),
        }
    }

    fn rate(&self, dtype: DType) -> &Cell<Option<f64>> {
        &self.rates[usize::from(dtype.size() < 4)]
    }

    /// Seconds that a launch may take.
    pub(crate) fn budget(&self) -> f64 {
        self.budget.get()
    }

    /// Seconds of everything launched so far that was worth an estimate.
    pub(crate) fn expected(&self) -> f64 {
        self.expected.get()
    }

    /// For tests: a budget and a rate instead of measured ones.
    #[cfg(test)]
    pub(crate) fn set(&self, budget: f64, rate: Option<f64>) {
        self.budget.set(budget);
        self.rates.iter().for_each(|r| r.set(rate));
    }

    /// For people: what was measured, and what follows.
    pub(crate) fn describe(&self) -> String {
        let rate = |name: &str, cell: &Cell<Option<f64>>| cell.get().map(|r| format!("{name} {:.3} TFLOP/s", r / 1e12));
        let rates: Vec<_> =
            [rate("f32", &self.rates[0]), rate("16 bits", &self.rates[1])].into_iter().flatten().collect();
        let measured =
            if rates.is_empty() { "not measured".to_owned() } else { format!("products {}", rates.join(", ")) };
        match self.budget.get() {
            budget if budget.is_finite() => {
                format!("{measured}; calls are cut into launches of at most {:.0} ms", budget * 1e3)
            }
            _ => format!("{measured}; calls are not cut"),
        }
    }
}

impl Core {
    /// Measures products in f32 and, where they are, in f16, unless that is known. `device` is this one's handle.
    pub(crate) fn calibrate(&self, device: &Device) -> Result<()> {
        for dtype in [DType::F32, DType::F16] {
            if dtype == DType::F32 || self.capabilities().f16 {
                self.measure(device, dtype)?;
            }
        }
        Ok(())
    }

    fn measure(&self, device: &Device, dtype: DType) -> Result<()> {
        let rate = self.pace.rate(dtype);
        if rate.get().is_none() {
            rate.set(Some(rate_of_products(device, dtype, self.adapter().is_software())?));
        }
        Ok(())
    }

    /// How many of `rows` rows one launch may take when all of them are `flops` operations: a multiple of `unit`, or all.
    pub(crate) fn rows_at_once(&self, dtype: DType, rows: usize, unit: usize, flops: u64) -> usize {
        let Some(rate) = self.pace.rate(dtype).get() else { return rows };
        let launches = (flops as f64 / rate / self.pace.budget.get()).ceil();
        if launches <= 1.0 {
            return rows;
        }
        ((rows as f64 / launches) as usize / unit * unit).clamp(unit.min(rows), rows)
    }

    /// Calls `launch` with the first row and the number of rows of each launch of a call on `rows` rows; see [`Core::rows_at_once`].
    pub(crate) fn by_rows(
        &self,
        dtype: DType,
        (rows, unit): (usize, usize),
        flops: u64,
        mut launch: impl FnMut(usize, usize) -> Result<()>,
    ) -> Result<()> {
        let most = self.rows_at_once(dtype, rows, unit, flops);
        let mut first = 0;
        loop {
            let count = (rows - first).min(most);
            launch(first, count)?;
            self.expect(dtype, if count == rows { flops } else { (flops as f64 * count as f64 / rows as f64) as u64 })?;
            first += count;
            if first >= rows {
                return Ok(());
            }
        }
    }

    /// [`Core::by_rows`] for `groups` groups of attention that take `flops` operations, on the matrix units or not: the first group of each launch, and how many.
    pub(crate) fn by_groups(
        &self,
        units: bool,
        groups: usize,
        flops: u64,
        launch: impl FnMut(usize, usize) -> Result<()>,
    ) -> Result<()> {
        // An operation takes longer than one of a product: an H200 took 3.6 to 4 times as long in f32, and at most 8 times is expected of its matrix units. The other
        // kernels compute in f32, whatever they read.
        let (dtype, longer) = if units { (DType::F16, 8) } else { (DType::F32, 4) };
        self.by_rows(dtype, (groups, 1), longer * flops, launch)
    }

    /// Calls `launch` with the first and the end of the elements of each launch of a pass over `n` elements, for each of which it moves `bytes` bytes. What
    /// bounds such a pass is not measured: a slow GPU is assumed.
    pub(crate) fn by_elements(
        &self,
        n: usize,
        bytes: usize,
        mut launch: impl FnMut(usize, usize) -> Result<()>,
    ) -> Result<()> {
        // Whole groups, so that units read side by side.
        const UNIT: usize = 1 << 12;
        let cuts = self.pace.rate(DType::F32).get().is_some() && self.pace.budget.get().is_finite();
        let fit = (self.pace.budget.get() * SLOWEST_BYTES) as usize / bytes.max(1);
        let most = if cuts { (fit / UNIT * UNIT).max(UNIT) } else { n };
        let mut first = 0;
        while first < n {
            let end = n.min(first + most);
            launch(first, end)?;
            first = end;
        }
        Ok(())
    }

    /// Notes work that was launched, and hands it to the driver when what waits would take longer than the budget.
    pub(crate) fn expect(&self, dtype: DType, flops: u64) -> Result<()> {
        let Some(rate) = self.pace.rate(dtype).get() else { return Ok(()) };
        let seconds = flops as f64 / rate;
        self.pace.expected.set(self.pace.expected.get() + seconds);
        let waiting = self.pace.waiting.get() + seconds;
        let full = waiting >= self.pace.budget.get() && !self.recording.get();
        self.pace.waiting.set(if full { 0.0 } else { waiting });
        if full { self.check("gpu.flush", self.client.flush()) } else { Ok(()) }
    }
}

/// Operations a second of a square product, as large as takes some milliseconds.
fn rate_of_products(device: &Device, dtype: DType, software: bool) -> Result<f64> {
    const ENOUGH: f64 = 4e-3;
    let sizes: &[usize] = if software { &[128] } else { &[512, 1024, 2048] };
    let mut best = 0.0f64;
    for &size in sizes {
        let [x, weight, out] = [(); 3].map(|()| Tensor::zeros(device, dtype, &[size, size]));
        let (x, weight, out) = (x?, weight?, out?);
        let args = matmul::Forward { x: &x, weight: &weight, bias: None, gelu: None, pre_gelu: None, out: &out };
        // The first call compiles.
        matmul::forward(device, &args)?;
        device.synchronize()?;
        let mut least = f64::INFINITY;
        for _ in 0..3 {
            let start = Instant::now();
            matmul::forward(device, &args)?;
            device.synchronize()?;
            least = least.min(start.elapsed().as_secs_f64());
        }
        best = best.max(2.0 * (size as f64).powi(3) / least.max(1e-9));
        if least >= ENOUGH {
            break;
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gelu::Gelu;
    use crate::testing::{FLOATS, Random, portable_gpus, random};
    use crate::{adamw, attention, encoder_attention, linear};

    /// Runs `work` under a pace of the test's own, and puts back what was there.
    fn at_pace<T>(device: &Device, budget: f64, rate: f64, work: impl FnOnce(&Core) -> T) -> T {
        let Device::Gpu(gpu) = device else { unreachable!() };
        let before = (gpu.pace.budget.get(), gpu.pace.rates[0].get());
        gpu.pace.set(budget, Some(rate));
        let result = work(gpu);
        gpu.pace.set(before.0, before.1);
        result
    }

    #[test]
    fn a_call_is_cut_at_whole_units_and_every_row_is_launched_once() {
        for device in portable_gpus() {
            for (rows, budget) in [(1000, 0.1), (1000, 1e-9), (128, 1e-9), (1, 1e-9), (0, 1.0), (4096, 10.0), (77, 0.5)]
            {
                at_pace(&device, budget, 1e9, |core| {
                    let mut next = 0;
                    let flops = rows as u64 * 1_000_000;
                    core.by_rows(DType::F32, (rows, ROWS), flops, |first, count| {
                        assert!(
                            first == next && (first.is_multiple_of(ROWS) || first == rows),
                            "{rows} {first} {count}"
                        );
                        let seconds = count as f64 * 1e6 / 1e9;
                        assert!(seconds <= budget || count <= ROWS, "{rows} {budget}: {count} rows at once");
                        next += count;
                        Ok(())
                    })
                    .unwrap();
                    assert_eq!(next, rows);
                });
            }
        }
    }

    #[test]
    fn cut_calls_give_the_bits_of_whole_ones() {
        for device in portable_gpus() {
            for dtype in FLOATS {
                let mut rng = Random::new(9);
                let mut t = |shape: &[usize]| random(&device, dtype, shape, 1.0, &mut rng).0;
                let (m, n, k) = (300, 33, 40);
                let (x, weight, bias, dout) = (t(&[m, k]), t(&[n, k]), t(&[n]), t(&[m, n]));
                let (b, length, heads, head) = (3, 9, 2, 32);
                let c = heads * head;
                let (qkv, datt) = (t(&[b, length, 3 * c]), t(&[b, length, c]));
                let zeros = |dtype, shape: &[usize]| Tensor::zeros(&device, dtype, shape).unwrap();
                let run = || {
                    let (out, pre) = (zeros(dtype, &[m, n]), zeros(dtype, &[m, n]));
                    let args = matmul::Forward {
                        x: &x,
                        weight: &weight,
                        bias: Some(&bias),
                        gelu: Some(Gelu::Tanh),
                        pre_gelu: Some(&pre),
                        out: &out,
                    };
                    matmul::forward(&device, &args).unwrap();
                    let (dx, activation, sums) = (zeros(dtype, &[m, k]), zeros(dtype, &[m, k]), zeros(dtype, &[k]));
                    let args = matmul::BackwardInput {
                        dout: &dout,
                        weight: &weight,
                        gelu: Some((Gelu::Tanh, &x)),
                        dx: &dx,
                        accumulate: false,
                        activation: Some(&activation),
                        dx_sums: Some((&sums, false)),
                    };
                    matmul::backward_input(&device, &args).unwrap();
                    let (att, lse) = (zeros(dtype, &[b, length, c]), zeros(DType::F32, &[b, heads, length]));
                    let bytes = attention::workspace_bytes(&device, b, length, c, heads);
                    let workspace = zeros(DType::U8, &[bytes]);
                    let mask = attention::Mask::Causal;
                    let args =
                        attention::Forward { qkv: &qkv, heads, mask, out: &att, lse: &lse, workspace: &workspace };
                    attention::forward(&device, &args).unwrap();
                    let (dqkv, dqkv_sums) = (zeros(dtype, &[b, length, 3 * c]), zeros(dtype, &[3 * c]));
                    let args = attention::Backward {
                        qkv: &qkv,
                        heads,
                        mask,
                        out: &att,
                        lse: &lse,
                        dout: &datt,
                        dqkv: &dqkv,
                        dqkv_sums: Some((&dqkv_sums, false)),
                        workspace: &workspace,
                    };
                    attention::backward(&device, &args).unwrap();
                    [out, pre, dx, activation, sums, att, lse, dqkv, dqkv_sums].map(|t| t.read_f32().unwrap())
                };
                let launches = |core: &Core, run: &dyn Fn() -> [Vec<f32>; 9]| {
                    let before = core.launches();
                    (run(), core.launches() - before)
                };
                let (whole, few) = at_pace(&device, f64::INFINITY, 1e9, |core| launches(core, &run));
                let (cut, many) = at_pace(&device, 1e-7, 1e9, |core| launches(core, &run));
                assert!(whole == cut, "{dtype}");
                assert!(many > few, "{dtype}: {many} launches, whole {few}");
            }
        }
    }

    #[test]
    fn a_cut_linear_layer_gives_the_bits_of_a_whole_one() {
        for device in portable_gpus() {
            let mut rng = Random::new(3);
            let (m, n, k) = (260, 24, 40);
            let source = random(&device, DType::F32, &[n, k], 1.0, &mut rng).0;
            let (x, residual) = (
                random(&device, DType::F32, &[m, k], 1.0, &mut rng).0,
                random(&device, DType::F32, &[m, n], 1.0, &mut rng).0,
            );
            for (layout, width) in [(linear::Layout::Plain, n), (linear::Layout::Gated, n / 2)] {
                let weight = linear::Weight::pack(&device, &source, DType::F32, layout).unwrap();
                let residual = (layout == linear::Layout::Plain).then_some(&residual);
                let run = || {
                    let out = Tensor::zeros(&device, DType::F32, &[m, width]).unwrap();
                    let activation =
                        if residual.is_some() { linear::Activation::None } else { linear::Activation::Geglu };
                    let args = linear::Forward { x: &x, weight: &weight, bias: None, activation, residual, out: &out };
                    linear::forward(&device, &args).unwrap();
                    out.read_f32().unwrap()
                };
                let whole = at_pace(&device, f64::INFINITY, 1e9, |_| run());
                assert_eq!(at_pace(&device, 1e-7, 1e9, |_| run()), whole);
            }
        }
    }

    #[test]
    fn cut_encoder_attention_gives_the_bits_of_a_whole_one() {
        for device in portable_gpus() {
            for dtype in FLOATS {
                let mut rng = Random::new(4);
                let (n, heads, head) = (90, 2, 16);
                let d = heads * head;
                let qkv = random(&device, dtype, &[n, 3 * d], 1.0, &mut rng).0;
                let row_starts = Tensor::from_i32(&device, &[4], &[0, 7, 70, 90]).unwrap();
                let workspace =
                    Tensor::zeros(&device, DType::U8, &[encoder_attention::workspace_bytes(&device, 3, heads, d)])
                        .unwrap();
                for window in [None, Some(5)] {
                    let run = |core: &Core| {
                        let out = Tensor::zeros(&device, dtype, &[n, d]).unwrap();
                        let args = encoder_attention::Forward {
                            q: &qkv,
                            kv: &qkv,
                            rotation: None,
                            longest: Some(63),
                            key_column: d,
                            heads,
                            row_starts: &row_starts,
                            selected: None,
                            window,
                            positions: None,
                            option_ids: None,
                            out: &out,
                            workspace: &workspace,
                        };
                        let before = core.launches();
                        encoder_attention::forward(&device, &args).unwrap();
                        let launches = core.launches() - before;
                        (out.read_f32().unwrap(), launches)
                    };
                    let (whole, one) = at_pace(&device, f64::INFINITY, 1e9, run);
                    let (cut, many) = at_pace(&device, 1e-4, 1e9, run);
                    assert!(whole == cut, "{dtype}, window {window:?}");
                    assert!(one == 1 && many > 2, "{dtype}, window {window:?}: {many} launches, whole {one}");
                }
            }
        }
    }

    #[test]
    fn a_cut_update_gives_the_bits_of_a_whole_one() {
        for device in portable_gpus() {
            for (dtype, stacked) in [(DType::F32, false), (DType::BF16, true)] {
                let mut rng = Random::new(5);
                let shape = [2, 5003];
                let start = random(&device, dtype, &shape, 1.0, &mut rng).0;
                let grad = random(&device, dtype, &shape, 1.0, &mut rng).0;
                let run = |core: &Core| {
                    let zeros = |dtype| Tensor::zeros(&device, dtype, &shape).unwrap();
                    let (param, master, m, v) = (zeros(dtype), zeros(DType::F32), zeros(DType::F32), zeros(DType::F32));
                    param.copy_from(&start).unwrap();
                    let rounding = adamw::Rounding::Stochastic { seed: 7 };
                    let args = adamw::Update {
                        param: &param,
                        master: stacked.then_some(&master),
                        grad: &grad,
                        m: &m,
                        v: &v,
                        lr: 0.1,
                        beta1: 0.9,
                        beta2: 0.95,
                        eps: 1e-8,
                        weight_decay: 0.1,
                        step: 3,
                        grad_scale: 1.0,
                        clip: None,
                        rounding,
                        layers: 2,
                        zero_grad: false,
                    };
                    let before = core.launches();
                    adamw::update(&device, &args).unwrap();
                    let updated = param.read_f32().unwrap();
                    adamw::round(&device, &adamw::Round { master: &m, param: &param, rounding, layers: 2 }).unwrap();
                    let launches = core.launches() - before;
                    ([updated, param.read_f32().unwrap(), m.read_f32().unwrap(), v.read_f32().unwrap()], launches)
                };
                let (whole, few) = at_pace(&device, f64::INFINITY, 1e9, run);
                let (cut, many) = at_pace(&device, 1e-7, 1e9, run);
                assert!(whole == cut, "{dtype}");
                // Two calls of 10,006 elements, 4,096 at a time.
                assert_eq!((few, many), (2, 6), "{dtype}");
            }
        }
    }

    #[test]
    fn a_calibration_finds_a_rate_and_says_so() {
        for device in portable_gpus() {
            let Device::Gpu(gpu) = &device else { unreachable!() };
            gpu.calibrate(&device).unwrap();
            assert!(gpu.pace.rates[0].get().is_some_and(|rate| rate > 1e6));
            assert!(gpu.pace.describe().contains("f32"), "{}", gpu.pace.describe());
        }
    }
}
