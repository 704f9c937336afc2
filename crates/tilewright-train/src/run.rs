//! A whole training run: what is opened, the loop, and what is written when.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde_json::json;
use tilewright_core::format::ParamSource;
use tilewright_core::format::eval::read_eval;
use tilewright_core::format::model::ModelReader;
use tilewright_core::fs::write_atomic;
use tilewright_core::gpt2::Gpt2Config;
use tilewright_core::rng::XorShift;
use tilewright_core::{DType, Error, Result};
use tilewright_models::plan::Report;
use tilewright_models::{AdamW, Gpt2, Options, Recompute};
use tilewright_ops::Device;

use crate::checkpoint::{self, Position};
use crate::config::{Model, TrainConfig};
use crate::data::{Prepared, prepare};
use crate::eval::{self, Question, Score};
use crate::folder::RunFolder;
use crate::loader::{Loader, Order, ShardSet};
use crate::log::{Entry, Line};
use crate::outlier::OutlierDetector;
use crate::sample::{Sampling, generate};
use crate::schedule::Schedule;
use crate::stats::{Throughput, flops_per_token};
use crate::thermal::Cooler;
use crate::vocab::Vocabulary;

/// Seed of the shuffled order of rank 0, as in llm.c.
const SHUFFLE_SEED: u32 = 42;
/// First state of the generator that seeds stochastic rounding, of rank 0, as in llm.c.
const ROUNDING_SEED: u64 = 13_371_337;

/// Where a run writes, and whether it continues.
#[derive(Clone, Copy, Default, Debug)]
pub struct RunOptions<'a> {
    /// The run folder; `None` writes nothing.
    pub folder: Option<&'a Path>,
    /// Continue from the folder's last checkpoint.
    pub resume: bool,
    /// Delete the checkpoints of another run in the folder.
    pub overwrite: bool,
}

/// What is known when training starts.
#[derive(Clone, Debug)]
pub struct Started<'a> {
    /// Updates of the whole run.
    pub steps: usize,
    /// Updates done by the run that is continued.
    pub first_step: usize,
    /// The model's sizes.
    pub model: Gpt2Config,
    /// The device's name.
    pub device: String,
    /// Bytes that the run holds.
    pub bytes: usize,
    /// The tokens, in words.
    pub data: &'a str,
    /// Tokens of an update.
    pub tokens_per_step: usize,
    /// The run folder.
    pub folder: Option<&'a Path>,
}

/// One update.
#[derive(Clone, Copy, Debug)]
pub struct StepReport {
    /// Its number, from 0.
    pub step: usize,
    /// Updates of the whole run.
    pub steps: usize,
    /// Mean loss.
    pub loss: f32,
    /// The loss's z-score.
    pub loss_z: f64,
    /// Gradient norm before clipping.
    pub norm: f32,
    /// The norm's z-score.
    pub norm_z: f64,
    /// Learning rate.
    pub lr: f32,
    /// Milliseconds.
    pub ms: f64,
    /// Fraction of the machine's peak, when that is known.
    pub utilisation: Option<f64>,
    /// Smoothed tokens per second.
    pub tokens_per_second: f64,
    /// The update was left out because of an outlier.
    pub skipped: bool,
}

/// Watches a run; the binary's is the progress bar.
pub trait Observer {
    /// Something the user should know.
    fn notice(&mut self, text: &str);
    /// Everything is open; the first step follows.
    fn started(&mut self, info: &Started<'_>);
    /// An update was made.
    fn step(&mut self, report: &StepReport);
    /// The validation loss at a step.
    fn validated(&mut self, step: usize, loss: f32);
    /// The multiple-choice score at a step.
    fn scored(&mut self, step: usize, score: &Score);
    /// A checkpoint was written.
    fn saved(&mut self, step: usize, model: &Path);
    /// A sample was drawn.
    fn sampled(&mut self, step: usize, text: &str);
}

/// An observer that looks away.
#[derive(Default, Debug)]
pub struct Silent;

impl Observer for Silent {
    fn notice(&mut self, _: &str) {}
    fn started(&mut self, _: &Started<'_>) {}
    fn step(&mut self, _: &StepReport) {}
    fn validated(&mut self, _: usize, _: f32) {}
    fn scored(&mut self, _: usize, _: &Score) {}
    fn saved(&mut self, _: usize, _: &Path) {}
    fn sampled(&mut self, _: usize, _: &str) {}
}

/// A finished run.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Summary {
    /// Updates of the whole run.
    pub steps: usize,
    /// Loss of the last update.
    pub train_loss: Option<f32>,
    /// First and last validation loss of this process.
    pub val_losses: Option<(f32, f32)>,
    /// The last sample.
    pub sample: Option<String>,
    /// The last model file.
    pub model: Option<PathBuf>,
    /// Mean milliseconds of an update, the first excluded.
    pub mean_ms: Option<f64>,
    /// Seconds of rests of this process, where a policy asked for them.
    pub rested: Option<f64>,
}

/// How a run ended.
#[derive(Clone, PartialEq, Debug)]
pub enum Outcome {
    /// All updates are done.
    Finished(Summary),
    /// It was asked to stop.
    Stopped {
        /// Updates done.
        step: usize,
        /// Whether a checkpoint was written, so that it can be continued.
        checkpoint: bool,
    },
}

struct Trainer<'a> {
    config: &'a TrainConfig,
    observer: &'a mut dyn Observer,
    model: Gpt2,
    train: Loader,
    val: Option<Loader>,
    questions: Vec<Question>,
    vocab: Vocabulary,
    folder: Option<RunFolder>,
    schedule: Schedule,
    steps: usize,
    accumulation: usize,
    rounding: XorShift,
    rounding_last_update: u64,
    losses: OutlierDetector,
    norms: OutlierDetector,
    throughput: Throughput,
    cooler: Option<Cooler>,
    live_bytes: Option<usize>,
    summary: Summary,
}

/// Trains. `stop` ends the run behind the current step with a checkpoint.
pub fn train(
    config: &TrainConfig,
    options: &RunOptions<'_>,
    device: &Device,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Outcome> {
    config.validate()?;
    // Without a run folder, the shards of a text live in a temporary one.
    let temporary = if options.folder.is_none() { Some(tempfile::tempdir().map_err(temp_error)?) } else { None };
    let resume = match options.folder {
        Some(folder) => {
            RunFolder::create(folder)?;
            RunFolder::claim(folder, options.resume, options.overwrite)?
        }
        None => None,
    };
    if options.resume && resume.is_none() {
        observer.notice("there is no complete checkpoint to resume from; starting from the beginning");
    }
    let data_folder =
        options.folder.or(temporary.as_ref().map(tempfile::TempDir::path)).expect("one of the two exists");
    let prepared = prepare(config, data_folder)?;
    let mut trainer = Trainer::open(config, options, device, prepared, resume, observer)?;
    if let (Some(step), Some(folder)) = (resume, options.folder) {
        trainer.resume(folder, step)?;
    }
    trainer.run(resume.map(|s| s as usize), stop)
}

fn temp_error(source: std::io::Error) -> Error {
    Error::Io { action: "create a folder in", path: std::env::temp_dir(), source }
}

impl<'a> Trainer<'a> {
    fn open(
        config: &'a TrainConfig,
        options: &RunOptions<'_>,
        device: &Device,
        prepared: Prepared,
        resume: Option<u64>,
        observer: &'a mut dyn Observer,
    ) -> Result<Self> {
        let Prepared { train, val, vocab, summary } = prepared;
        let accumulation = config.accumulation()?;
        let steps = config.steps.unwrap_or((train.tokens() / config.tokens_per_step() as u64) as usize);
        if steps == 0 {
            return Err(Error::config(
                format!("the data has {} tokens, one step takes {}", train.tokens(), config.tokens_per_step()),
                "use a smaller --total-batch, or give --steps",
            ));
        }
        if train.left_over() > 0 {
            let left = train.left_over();
            observer.notice(&format!("{left} tokens at the ends of shards fill no batch and are not read"));
        }
        let model = build_model(config, device, vocab.size(), resume.is_some())?;
        if model.config().vocab_size != vocab.size() {
            return Err(mismatch(model.config().vocab_size, vocab.size()));
        }
        let questions = read_questions(config, model.config().vocab_size)?;
        let folder = match options.folder {
            Some(path) => {
                write_atomic(&path.join("config.json"), config.to_json().as_bytes())?;
                Some(RunFolder::open(path, resume)?)
            }
            None => None,
        };
        let bytes = Report::of(&model).peak_bytes();
        observer.started(&Started {
            steps,
            first_step: resume.unwrap_or(0) as usize,
            model: *model.config(),
            device: device.name(),
            bytes,
            data: &summary,
            tokens_per_step: config.tokens_per_step(),
            folder: options.folder,
        });
        if let Some(pace) = device.calibrate()? {
            observer.notice(&pace);
        }
        let seed = (config.shuffle && !config.overfit).then_some(SHUFFLE_SEED);
        Ok(Trainer {
            config,
            observer,
            model,
            train: Loader::new(train, seed, !config.overfit)?,
            val: val.map(|v: ShardSet| Loader::new(v, None, false)).transpose()?,
            questions,
            vocab,
            folder,
            schedule: config.schedule(steps),
            steps,
            accumulation,
            rounding: XorShift::new(ROUNDING_SEED),
            rounding_last_update: ROUNDING_SEED,
            losses: OutlierDetector::default(),
            norms: OutlierDetector::default(),
            throughput: Throughput::default(),
            cooler: config.cool_down()?.map(Cooler::new).transpose()?,
            live_bytes: None,
            summary: Summary { steps, ..Summary::default() },
        })
    }

    fn resume(&mut self, folder: &Path, step: u64) -> Result<()> {
        let at = checkpoint::load(&mut self.model, folder, step)?;
        if at.shuffle.is_some() != self.train.order().shuffle().is_some() {
            return Err(Error::config(
                "the checkpoint's order of samples is shuffled and this run's is not, or the other way round",
                "resume with the run's own --no-shuffle and --overfit",
            ));
        }
        let order = Order::restore(self.train.shards().samples(), at.shard, at.sample, at.shuffle);
        let hint = "resume with the run's own shards, --batch and --seq-len";
        self.train.restore(order.map_err(|what| Error::config(what, hint))?);
        self.rounding = XorShift::new(at.rng_state);
        self.rounding_last_update = at.rng_state_last_update;
        (self.losses, self.norms) = (at.losses, at.norms);
        // The run may have been killed between the marker and the deletion that follows it.
        checkpoint::retain(folder, at.step, self.config)
    }

    fn run(mut self, resumed_at: Option<usize>, stop: &AtomicBool) -> Result<Outcome> {
        let first = resumed_at.unwrap_or(0);
        if first > self.steps {
            return Err(Error::config(
                format!("the checkpoint is of step {first}, the run ends at {}", self.steps),
                format!("use --steps {first} or more"),
            ));
        }
        for step in first..=self.steps {
            let last = step == self.steps;
            let due = |every: usize| every > 0 && (step.is_multiple_of(every) || last);
            if stop.load(Ordering::SeqCst) && !last {
                // A stopped run must leave no line that an undisturbed one would not have.
                let can_save = self.folder.is_some() && self.config.checkpoint_every != Some(0);
                if can_save && resumed_at != Some(step) && step > 0 {
                    self.save(step)?;
                }
                return Ok(Outcome::Stopped { step, checkpoint: can_save && step > 0 });
            }
            if due(self.config.val_every) {
                self.validate(step)?;
                if step > 0 {
                    self.score(step)?;
                }
            }
            // Before the sample, so that nothing that goes wrong there costs a checkpoint.
            let every = self.config.checkpoint_every;
            if every != Some(0) && resumed_at != Some(step) && step > 0 && (last || due(every.unwrap_or(0))) {
                self.save(step)?;
            }
            if step > 0 && due(self.config.sample_every) {
                self.sample(step)?;
            }
            if last {
                break;
            }
            let start = Instant::now();
            self.step(step)?;
            self.rest(step, start.elapsed().as_secs_f64(), stop)?;
            if due(self.config.val_every.max(self.config.sample_every)) {
                self.draw()?;
            }
        }
        self.draw()?;
        self.summary.mean_ms = self.throughput.mean_ms();
        self.summary.rested = self.cooler.as_ref().map(Cooler::rested);
        if let Some(folder) = &self.folder {
            let path = tilewright_core::format::checkpoint::model_path(folder.path(), self.steps as u64);
            self.summary.model = path.exists().then_some(path);
        }
        Ok(Outcome::Finished(self.summary))
    }

    /// One update.
    fn step(&mut self, step: usize) -> Result<()> {
        let start = Instant::now();
        let config = self.config;
        let tokens = config.tokens_per_step();
        let dloss = 1.0 / tokens as f32;
        if config.overfit {
            self.train.rewind();
        }
        let mut sum = 0.0;
        for micro in 0..self.accumulation {
            let batch = self.train.next_batch()?;
            sum += f64::from(self.model.forward_backward(batch.inputs, batch.targets, micro > 0, dloss)?);
        }
        let loss = (sum / tokens as f64) as f32;
        let loss_z = self.losses.update(f64::from(loss));
        self.model.start_grad_norm()?;
        let lr = self.schedule.rate(step);
        // Where nothing that the norm says can stop the update, the device has it before the host has the norm.
        let early = loss.is_finite() && config.skip_loss_z <= 0.0 && config.skip_grad_z <= 0.0;
        if early {
            self.update(step, lr)?;
        }
        let norm = self.model.finish_grad_norm()?;
        let norm_z = self.norms.update(f64::from(norm));
        if !loss.is_finite() || !norm.is_finite() {
            return Err(Error::config(
                format!("step {step} has loss {loss} and gradient norm {norm}: training has diverged"),
                "resume from an earlier checkpoint, or start again, with a lower --lr or more --warmup",
            ));
        }
        let skipped = OutlierDetector::is_outlier(loss_z, config.skip_loss_z)
            || OutlierDetector::is_outlier(norm_z, config.skip_grad_z);
        if !early && !skipped {
            self.update(step, lr)?;
        }
        self.check_memory(step)?;
        let seconds = start.elapsed().as_secs_f64();
        let flops = flops_per_token(self.model.config(), config.seq_len) * tokens as f64;
        let report = StepReport {
            step,
            steps: self.steps,
            loss,
            loss_z,
            norm,
            norm_z,
            lr,
            ms: 1e3 * seconds,
            utilisation: config.peak_gflops.map(|peak| flops / seconds / (peak * 1e9)),
            tokens_per_second: self.throughput.add(tokens, seconds),
            skipped,
        };
        self.summary.train_loss = Some(loss);
        if let Some(folder) = &mut self.folder {
            let finite = |x: f64| if x.is_finite() { json!(x) } else { json!(null) };
            let figures = json!({
                "step": step, "loss": loss, "loss_z": finite(loss_z), "grad_norm": norm, "grad_norm_z": finite(norm_z),
                "lr": lr, "ms": report.ms, "tokens_per_second": report.tokens_per_second, "skipped": skipped,
            });
            folder.log(Line { step, entry: Entry::Train { loss, lr, norm } }, &figures)?;
        }
        self.observer.step(&report);
        Ok(())
    }

    /// The optimiser's part of an update.
    fn update(&mut self, step: usize, lr: f32) -> Result<()> {
        let config = self.config;
        let stochastic = self.model.options().dtype == DType::BF16;
        self.rounding_last_update = self.rounding.state();
        let stochastic_seeds = stochastic.then(|| std::array::from_fn(|_| self.rounding.random_u32()));
        self.model.update(&AdamW {
            lr,
            beta1: config.beta1,
            beta2: config.beta2,
            eps: config.eps,
            weight_decay: config.weight_decay,
            decay_all: false,
            step: step as u64 + 1,
            grad_scale: 1.0,
            max_norm: (config.clip > 0.0).then_some(config.clip),
            stochastic_seeds,
        })
    }

    /// Rests if it is time to; `log.jsonl` tells for how long.
    fn rest(&mut self, step: usize, worked: f64, stop: &AtomicBool) -> Result<()> {
        let Some(cooler) = &mut self.cooler else { return Ok(()) };
        let seconds = cooler.after(worked, stop);
        match &mut self.folder {
            Some(folder) if seconds > 0.0 => folder.note(&json!({"step": step, "rest_seconds": seconds})),
            _ => Ok(()),
        }
    }

    /// Every buffer is planned before the first step, so the bytes of the arenas never change.
    fn check_memory(&mut self, step: usize) -> Result<()> {
        let live = self.model.device().live_bytes();
        let planned = *self.live_bytes.get_or_insert(live);
        if live != planned {
            return Err(Error::Argument {
                op: "train",
                what: format!(
                    "step {step} left {live} bytes of arenas alive, {planned} were planned; please report this"
                ),
            });
        }
        Ok(())
    }

    fn validate(&mut self, step: usize) -> Result<()> {
        let Some(loader) = &mut self.val else { return Ok(()) };
        let all: usize = loader.shards().samples().iter().sum();
        let batches = self.config.val_batches.unwrap_or(all).clamp(1, all);
        loader.rewind();
        let mut sum = 0.0;
        for _ in 0..batches {
            let batch = loader.next_batch()?;
            sum += f64::from(self.model.loss(batch.inputs, batch.targets)?);
        }
        let loss = (sum / batches as f64) as f32;
        let first = self.summary.val_losses.map_or(loss, |(first, _)| first);
        self.summary.val_losses = Some((first, loss));
        if let Some(folder) = &mut self.folder {
            folder.log(Line { step, entry: Entry::Val(loss) }, &json!({"step": step, "val_loss": loss}))?;
        }
        self.observer.validated(step, loss);
        Ok(())
    }

    fn score(&mut self, step: usize) -> Result<()> {
        if self.questions.is_empty() {
            return Ok(());
        }
        let score = eval::ask(&mut self.model, &self.questions)?;
        if let Some(folder) = &mut self.folder {
            let accuracy = score.accuracy() as f32;
            let figures = json!({"step": step, "accuracy": accuracy, "interval": score.interval()});
            folder.log(Line { step, entry: Entry::Eval(accuracy) }, &figures)?;
        }
        self.observer.scored(step, &score);
        Ok(())
    }

    fn save(&mut self, step: usize) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        folder.sync()?;
        let order = self.train.order();
        let position = Position {
            step,
            rng_state: self.rounding.state(),
            rng_state_last_update: self.rounding_last_update,
            shard: order.shard() as u64,
            sample: order.sample() as u64,
            shuffle: order.shuffle().cloned(),
            losses: self.losses.clone(),
            norms: self.norms.clone(),
        };
        checkpoint::save(&self.model, folder.path(), &position)?;
        checkpoint::retain(folder.path(), step, self.config)?;
        let path = tilewright_core::format::checkpoint::model_path(folder.path(), step as u64);
        self.observer.saved(step, &path);
        Ok(())
    }

    fn sample(&mut self, step: usize) -> Result<()> {
        let mut prompt = vec![self.vocab.eot() as i32];
        if let Some(text) = &self.config.prompt {
            prompt.extend(self.vocab.encode(text)?);
        }
        let sampling = Sampling {
            tokens: self.config.sample_tokens,
            temperature: self.config.temperature,
            top_k: self.config.top_k,
            seed: self.config.sample_seed,
        };
        let vocab = &self.vocab;
        let decoder = self.model.decoder().expect("planned with the model");
        let mut bytes = self.config.prompt.clone().unwrap_or_default().into_bytes();
        generate(decoder, &prompt, &sampling, &mut |token| {
            bytes.extend(vocab.decode(token as u32));
            Ok(true)
        })?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some(folder) = &mut self.folder {
            folder.sample(step, &text)?;
        }
        self.observer.sampled(step, &text);
        self.summary.sample = Some(text);
        Ok(())
    }

    fn draw(&self) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let c = self.model.config();
        folder.draw(&format!("{} layers, {} heads, {} channels, {} steps", c.layers, c.heads, c.channels, self.steps))
    }
}

fn mismatch(model: usize, data: usize) -> Error {
    Error::config(
        format!("the model has a vocabulary of {model} tokens, the data one of {data}"),
        "use data that was made with the model's tokenizer, or give --vocab-size",
    )
}

/// The model with its first weights.
fn build_model(config: &TrainConfig, device: &Device, vocab: usize, resumed: bool) -> Result<Gpt2> {
    let reader = match &config.model {
        Model::File(path) => Some((ModelReader::open(path)?, path)),
        _ => None,
    };
    let sizes = match &reader {
        Some((reader, _)) => *reader.config(),
        None => config.model_config(vocab)?.expect("sizes are given when no file is"),
    };
    let window = if config.sample_every > 0 { sizes.max_seq_len.min(1024) } else { 0 };
    let options = Options {
        batch: config.batch,
        seq_len: config.seq_len,
        recompute: Recompute::try_from(config.recompute)?,
        dtype: config.storage()?,
        train: true,
        masters: config.has_masters()?,
        decode_len: window,
    };
    let mut model = Gpt2::new(device, sizes, options)?;
    match &reader {
        // A checkpoint will fill the model.
        _ if resumed => {}
        Some((reader, path)) => checkpoint::load_model(&mut model, reader, path)?,
        None => model.init_random(config.seed)?,
    }
    Ok(model)
}

fn read_questions(config: &TrainConfig, vocab: usize) -> Result<Vec<Question>> {
    let Some(path) = &config.eval_file else { return Ok(Vec::new()) };
    let questions = eval::questions(read_eval(path, vocab)?, path)?;
    eval::check(&questions, config.seq_len, path)?;
    Ok(questions)
}
