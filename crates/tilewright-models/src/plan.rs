//! The memory planner: the same code that allocates a model, run on the null device. What it prints is what a run holds, to the byte.

use tilewright_core::Result;
use tilewright_core::gpt2::Gpt2Config;
use tilewright_ops::{Device, Plan};

use crate::{Gpt2, Options};

/// One buffer of a [`Section`].
#[derive(Clone, PartialEq, Debug)]
pub struct Buffer {
    /// Its name.
    pub name: String,
    /// Its bytes, padding to the next buffer included.
    pub bytes: usize,
}

/// Memory of one purpose: one arena, or the device's own scratch.
#[derive(Clone, PartialEq, Debug)]
pub struct Section {
    /// Its name: `parameters`, `gradients`, `activations`, ...
    pub name: &'static str,
    /// All its bytes.
    pub bytes: usize,
    /// What it is made of; empty for the device's scratch.
    pub buffers: Vec<Buffer>,
}

/// What a model will hold from before its first step to its end.
#[derive(Clone, PartialEq, Debug)]
pub struct Report {
    /// By purpose.
    pub sections: Vec<Section>,
    /// Elements of all parameter tensors.
    pub parameter_count: usize,
}

impl Report {
    /// Bytes in all. Nothing is allocated or freed between steps, so this is also the peak.
    pub fn peak_bytes(&self) -> usize {
        self.sections.iter().map(|s| s.bytes).sum()
    }

    /// Describes the memory of a model, real or planned.
    pub fn of(model: &Gpt2) -> Self {
        Report::new(&model.arenas(), model.device(), model.config().parameter_count())
    }

    /// Arenas, then the device's own scratch.
    pub(crate) fn new(arenas: &[&Plan], device: &Device, parameter_count: usize) -> Self {
        let mut sections: Vec<_> = arenas
            .iter()
            .map(|plan| {
                let ends = plan.slots().iter().skip(1).map(|s| s.offset).chain([plan.bytes()]);
                let buffers = plan
                    .slots()
                    .iter()
                    .zip(ends)
                    .map(|(slot, end)| Buffer { name: slot.name.clone(), bytes: end - slot.offset })
                    .collect();
                Section { name: plan.name(), bytes: plan.bytes(), buffers }
            })
            .collect();
        sections.push(Section { name: "device scratch", bytes: device.scratch_bytes(), buffers: vec![] });
        Report { sections, parameter_count }
    }
}

/// Plans a model for a CPU of `threads` threads without allocating it.
///
/// # Errors
/// The same that [`Gpt2::new`] gives for impossible sizes.
pub fn plan(config: &Gpt2Config, options: &Options, threads: usize) -> Result<Report> {
    plan_on(&Device::null(threads), config, options)
}

/// Plans a model for the device that `planner` ([`Device::planner`]) stands for.
///
/// # Errors
/// As [`plan`].
pub fn plan_on(planner: &Device, config: &Gpt2Config, options: &Options) -> Result<Report> {
    Ok(Report::of(&Gpt2::new(planner, *config, *options)?))
}

/// The largest batch whose plan stays within `memory` bytes, and that plan; `None` when not even one row fits.
pub fn largest_batch(
    config: &Gpt2Config,
    options: &Options,
    threads: usize,
    memory: usize,
) -> Result<Option<(usize, Report)>> {
    largest_batch_on(&Device::null(threads), config, options, memory)
}

/// The same for the device that `planner` stands for.
///
/// # Errors
/// As [`plan`].
pub fn largest_batch_on(
    planner: &Device,
    config: &Gpt2Config,
    options: &Options,
    memory: usize,
) -> Result<Option<(usize, Report)>> {
    let at = |batch: usize| plan_on(planner, config, &Options { batch, ..*options });
    let mut best = at(1)?;
    if best.peak_bytes() > memory {
        return Ok(None);
    }
    // Memory grows with the batch: double until it no longer fits, then bisect.
    let (mut fits, mut fails) = (1, 2);
    loop {
        let report = at(fails)?;
        if report.peak_bytes() > memory {
            break;
        }
        (fits, fails, best) = (fails, fails * 2, report);
    }
    while fails - fits > 1 {
        let middle = fits + (fails - fits) / 2;
        let report = at(middle)?;
        if report.peak_bytes() <= memory {
            (fits, best) = (middle, report);
        } else {
            fails = middle;
        }
    }
    Ok(Some((fits, best)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Recompute;
    use tilewright_core::DType;

    const TINY: Gpt2Config =
        Gpt2Config { max_seq_len: 16, vocab_size: 29, padded_vocab_size: 37, layers: 2, heads: 3, channels: 48 };

    fn d12() -> Gpt2Config {
        Gpt2Config::from_descriptor("d12").unwrap()
    }

    #[test]
    fn plan_equals_the_accounts_of_a_real_model_to_the_byte() {
        for train in [false, true] {
            for recompute in [Recompute::None, Recompute::Gelu, Recompute::GeluAndLayernorm] {
                for dtype in [DType::F32, DType::BF16, DType::F16] {
                    let options = Options {
                        batch: 3,
                        seq_len: 7,
                        recompute,
                        dtype,
                        train,
                        masters: dtype != DType::F32,
                        decode_len: 5,
                    };
                    let device = Device::cpu_with_threads(2);
                    let model = Gpt2::new(&device, TINY, options).unwrap();
                    let planned = plan(&TINY, &options, 2).unwrap();
                    assert_eq!(planned, Report::of(&model));
                    assert_eq!(planned.peak_bytes(), device.live_bytes() + device.scratch_bytes());
                }
            }
        }
    }

    #[test]
    fn a_dropped_model_gives_its_bytes_back() {
        let device = Device::cpu_with_threads(1);
        drop(Gpt2::new(&device, TINY, Options::training(2, 4)).unwrap());
        assert_eq!(device.live_bytes(), 0);
    }

    #[test]
    fn planning_a_large_model_allocates_nothing() {
        let config = Gpt2Config::from_descriptor("gpt3:c12288").unwrap();
        let report = plan(&config, &Options::training(64, 2048), 2).unwrap();
        assert!(report.peak_bytes() > 2 << 40, "{}", report.peak_bytes());
    }

    #[test]
    fn optimiser_and_gradients_weigh_three_times_the_f32_parameters() {
        let report = plan(&d12(), &Options::training(4, 64), 2).unwrap();
        let bytes = |name: &str| report.sections.iter().find(|s| s.name == name).unwrap().bytes;
        assert_eq!(bytes("parameters"), 497_903_616); // 124,475,904 parameters of 4 bytes; every tensor ends on a 256-byte boundary
        for name in ["gradients", "first moments", "second moments"] {
            assert_eq!(bytes(name), bytes("parameters"), "{name}");
        }
    }

    #[test]
    fn each_recompute_mode_saves_exactly_its_buffers() {
        let activations = |recompute| {
            let report = plan(&d12(), &Options { recompute, ..Options::training(4, 64) }, 2).unwrap();
            report.sections.iter().find(|s| s.name == "activations").unwrap().bytes
        };
        let (n, c, l) = (4 * 64, 768, 12);
        let [none, gelu, both] = [Recompute::None, Recompute::Gelu, Recompute::GeluAndLayernorm].map(activations);
        assert_eq!(none - gelu, (l - 1) * n * 4 * c * 4);
        assert_eq!(gelu - both, 2 * (l - 1) * n * c * 4);
    }

    #[test]
    fn the_logits_are_in_no_plan() {
        let (b, t) = (4, 1024);
        let report = plan(&d12(), &Options::training(b, t), 2).unwrap();
        let logits = b * t * 50257 * 4;
        for section in report.sections.iter().filter(|s| !["parameters", "activations"].contains(&s.name)) {
            for buffer in &section.buffers {
                assert!(buffer.bytes < logits / 4, "{} holds {} bytes", buffer.name, buffer.bytes);
            }
        }
    }

    #[test]
    fn attention_never_plans_a_square_buffer() {
        let at = |t: usize| {
            let report = plan(&d12(), &Options { recompute: Recompute::None, ..Options::training(1, t) }, 2).unwrap();
            report.sections.iter().filter(|s| s.name != "workspace").map(|s| s.bytes).sum::<usize>()
        };
        // Twice the sequence is at most twice the bytes above the parameters'.
        assert!(at(1024) - at(512) <= 2 * (at(512) - at(256)) + 4096);
    }

    #[test]
    fn the_largest_batch_fits_and_the_next_does_not() {
        let options = Options::training(1, 64);
        for memory in [3usize << 30, 5 << 30, 24 << 30] {
            let (batch, report) = largest_batch(&d12(), &options, 2, memory).unwrap().unwrap();
            assert!(report.peak_bytes() <= memory);
            let next = plan(&d12(), &Options { batch: batch + 1, ..options }, 2).unwrap();
            assert!(next.peak_bytes() > memory, "batch {batch} at {memory}");
        }
    }

    #[test]
    fn no_batch_fits_into_less_than_the_parameters() {
        assert!(largest_batch(&d12(), &Options::training(1, 64), 2, 1 << 30).unwrap().is_none());
    }

    #[test]
    fn impossible_options_are_refused_with_a_next_step() {
        let too_long = plan(&d12(), &Options::training(1, 1025), 2).unwrap_err().to_string();
        assert!(too_long.contains("1024") && too_long.contains("--seq-len"), "{too_long}");
        assert!(plan(&d12(), &Options::training(0, 64), 2).is_err());
        assert!(plan(&d12(), &Options { dtype: DType::I32, ..Options::training(1, 64) }, 2).is_err());
    }
}
