//! The model: a checkpoint's weights in memory, and rows of any number and length through it.

use std::collections::HashMap;
use std::path::Path;
use std::time::Instant;

use tilewright_core::{DType, Error, Result};
use tilewright_ops::{Arena, Device, Plan, Replay, Tensor};

use super::checkpoint::Checkpoint;
use super::config::{AgentConfig, OptionLayout};
use super::digest::Digests;
use super::head::{Head, heads, scores};
use super::params::{self, ACT_FEATURES, ACT_HIDDEN};
use super::row::{Row, RowScores, Scorer};
use crate::modernbert::EncoderConfig;
use crate::modernbert::buffers::{Buffers, Capacity, Pack, Views, Widths, between};
use crate::modernbert::encoder::{Encoder, Observer, Of};
use crate::modernbert::store::{Source, Store};

/// Tokens of a pack unless asked otherwise: enough rows at a time to read each weight once for many tokens, few enough that a layer's activations stay
/// in the last cache.
pub const PACK_TOKENS: usize = 1024;

/// Tokens of a pack on a GPU, which is filled by thousands.
pub const GPU_PACK_TOKENS: usize = 16_384;

/// Shapes of packs that a GPU keeps a recorded forward pass of; when another comes, all are forgotten.
pub const RECORDED_SHAPES: usize = 64;

/// How a checkpoint is loaded.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// How weights are kept in memory; arithmetic on the stream, norms and scores is f32. f32 is the reference.
    pub precision: DType,
    /// Where the model runs.
    pub device: Device,
    /// Sums that the files must have; without them those of the environment, if there are any.
    pub sha256: Option<Digests>,
    /// Tokens of the rows that run together. Results do not depend on it. A longer row runs alone.
    pub pack_tokens: usize,
    /// Whether weights may be looked at where they lie in their mapped file, as the embedding table is for good. A process that outlives its files does not
    /// want that: a file that is cut short under a mapping ends the process. Weights that are read instead survive it, and so does the process.
    pub mapped: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            precision: DType::F32,
            device: Device::cpu(),
            sha256: None,
            pack_tokens: PACK_TOKENS,
            mapped: true,
        }
    }
}

/// See the module's words.
pub struct Laya {
    agent: AgentConfig,
    config: EncoderConfig,
    precision: DType,
    device: Device,
    parameters: u64,
    weights: Arena,
    table: Tensor,
    encoder: Encoder,
    head: Head,
    widths: Widths,
    replays: HashMap<PassShape, Replay>,
    passes: Passes,
    timed: bool,
    buffers: Option<Buffers>,
    pack_tokens: usize,
}

/// What a recorded pass was recorded for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct PassShape {
    capacity: Capacity,
    /// Options are laid out in parallel.
    parallel: bool,
    /// All rows are short ones.
    short: bool,
}

/// The passes over packs that a GPU has made: a shape's first two run its ops one by one, compile what they need and record them.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Passes {
    /// Shapes that are kept.
    pub shapes: usize,
    /// Passes that ran ops one by one or recorded them.
    pub first: usize,
    /// Seconds that those took.
    pub first_seconds: f64,
    /// Passes that were replayed.
    pub replays: usize,
    /// Seconds that those took.
    pub replay_seconds: f64,
    /// The device's share of them, from the upload to the download; only where [`Laya::time_passes`] asked for it.
    pub device_seconds: f64,
}

/// How packs become shapes, for people.
pub const SHAPE_POLICY: &str = "packs are padded to one of 16 numbers of tokens and 8 of options an octave, rows to powers of two; a shape's pass is recorded at its second call, and at most 64 are kept";

/// One stage of a row's way through the model.
#[derive(Clone, PartialEq, Debug)]
pub struct Stage {
    /// `embeddings`, `encoder.layers.N`, `encoder.final_norm`, `head.layers.N`.
    pub name: String,
    /// Which tokens have a state here: all, or of the last layer those that are read.
    pub tokens: Vec<usize>,
    /// Their states, one after the other.
    pub values: Vec<f32>,
}

impl Laya {
    /// Opens, validates and loads a checkpoint's folder.
    ///
    /// # Errors
    /// Those of [`Checkpoint::open`], and [`Error::OutOfMemory`] before an arena that does not fit.
    pub fn open(dir: &Path, options: &LoadOptions) -> Result<Self> {
        Self::load(&Checkpoint::open(dir, options.sha256.as_ref())?, options)
    }

    /// Loads a checkpoint that is open.
    pub fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Self> {
        let source = |device: &Device, name: &str| {
            // The tensor before this one has been packed; its pages would count as the process's memory.
            checkpoint.forget_pages();
            if options.mapped { checkpoint.tensor(device, name) } else { checkpoint.read_tensor(device, name) }
        };
        let mut model = Self::build(checkpoint.agent(), checkpoint.encoder(), options, &source)?;
        checkpoint.forget_pages();
        model.parameters = checkpoint.parameter_count();
        Ok(model)
    }

    /// A model without values on a null device of so many threads: for plans. It tells the launches of a call, and computes nothing.
    pub fn blank(
        agent: &AgentConfig,
        encoder: &EncoderConfig,
        precision: DType,
        threads: usize,
        pack_tokens: usize,
    ) -> Result<Self> {
        let options = LoadOptions { precision, device: Device::null(threads), sha256: None, pack_tokens, mapped: true };
        Self::build(agent, encoder, &options, &blank(agent, encoder))
    }

    fn build(agent: &AgentConfig, config: &EncoderConfig, options: &LoadOptions, source: &Source<'_>) -> Result<Self> {
        let &LoadOptions { precision, ref device, pack_tokens, .. } = options;
        if !precision.is_float() {
            return Err(Error::config(format!("weights cannot be kept as {precision}"), "use f32, bf16 or f16"));
        }
        let (d, layers) = (config.hidden, agent.head_layers);
        let widths = Widths {
            hidden: d,
            wide: (3 * d).max(config.intermediate).max(if layers > 1 { 4 * d } else { 0 }),
            wide_selected: if layers > 0 { 4 * d } else { config.intermediate.max(d) },
            act: [d + ACT_FEATURES, ACT_HIDDEN, agent.act_classes],
            heads: [config.heads, heads(d)?],
            between: between(device, precision),
        };
        let blank = blank(agent, config);
        let model = |store: &mut Store<'_>| {
            let table = store.unpacked(&format!("{ENCODER}{TABLE}"))?;
            let encoder = Encoder::load(store, config, &table, ENCODER, precision, layers == 0)?;
            Ok((table, encoder, Head::load(store, d, layers, precision, widths.between)?))
        };
        let ((table, encoder, head), weights) = Store::build(device, &blank, source, model)?;
        Ok(Laya {
            agent: agent.clone(),
            config: config.clone(),
            precision,
            device: device.clone(),
            parameters: parameters(agent, config),
            weights,
            table,
            encoder,
            head,
            widths,
            replays: HashMap::new(),
            passes: Passes::default(),
            timed: false,
            buffers: None,
            pack_tokens,
        })
    }

    /// The agent's configuration.
    pub fn agent(&self) -> &AgentConfig {
        &self.agent
    }

    /// The encoder's configuration.
    pub fn encoder(&self) -> &EncoderConfig {
        &self.config
    }

    /// How weights are kept.
    pub fn precision(&self) -> DType {
        self.precision
    }

    /// Where it runs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The passes so far, on a GPU.
    pub fn passes(&self) -> Passes {
        self.passes
    }

    /// Has the device's clock read around each pass, which costs a little time of its own.
    pub fn time_passes(&mut self, on: bool) {
        self.timed = on;
    }

    /// Elements of all tensors of the checkpoint.
    pub fn parameter_count(&self) -> u64 {
        self.parameters
    }

    /// Bytes of weights in memory. The embedding table is not among them: it stays in its file.
    pub fn weight_bytes(&self) -> usize {
        self.weights.plan().bytes()
    }

    /// Bytes of the embedding table in its file, of which the rows in use are in the system's cache.
    pub fn table_bytes(&self) -> usize {
        self.table.bytes()
    }

    /// Bytes of activations, which grow with the largest pack so far.
    pub fn activation_bytes(&self) -> usize {
        self.buffers.as_ref().map_or(0, |b| b.arena.plan().bytes())
    }

    /// The arenas, in the order of their allocation.
    pub fn arenas(&self) -> Vec<&Plan> {
        let activations = self.buffers.as_ref().map(|b| b.arena.plan());
        [Some(self.weights.plan()), activations].into_iter().flatten().collect()
    }

    /// Makes room for packs of so many tokens, rows and selected tokens (first ones and markers) before they come.
    pub fn reserve(&mut self, tokens: usize, rows: usize, selected: usize) -> Result<()> {
        self.room(Capacity { tokens, rows, selected })
    }

    fn room(&mut self, wanted: Capacity) -> Result<()> {
        let held = self.buffers.as_ref().map(|b| b.capacity);
        if held.is_some_and(|h| h.holds(&wanted)) {
            return Ok(());
        }
        let capacity = held.map_or(wanted, |h| h.union(&wanted)).rounded();
        // The old arena goes first, so that both are never alive.
        self.replays.clear();
        self.buffers = None;
        self.buffers = Some(Buffers::allocate(&self.device, &self.widths, capacity)?);
        Ok(())
    }

    /// Scores one row and tells the state after every stage.
    pub fn trace(&mut self, row: &Row) -> Result<(RowScores, Vec<Stage>)> {
        self.check(0, row)?;
        let pack = pack_of(&[row]);
        let mut stages = Vec::new();
        let selected: Vec<usize> = pack.selected.iter().map(|&t| t as usize).collect();
        let all: Vec<usize> = (0..row.ids.len()).collect();
        let mut observe = |name: &str, of: Of, state: &Tensor| {
            let tokens = if of == Of::All { all.clone() } else { selected.clone() };
            stages.push(Stage { name: name.to_owned(), tokens, values: state.read_f32()? });
            Ok(())
        };
        let mut scores = self.run_observed(&pack, &mut observe)?;
        Ok((scores.pop().expect("one row"), stages))
    }

    /// Scores a pack; on a GPU by a recorded pass over the smallest shape that holds it.
    fn run(&mut self, pack: &Pack) -> Result<Vec<RowScores>> {
        if !self.device.is_gpu() {
            return self.run_observed(pack, &mut |_, _, _| Ok(()));
        }
        let padded = pack.padded();
        self.room(padded.capacity())?;
        let buffers = self.buffers.as_ref().expect("there is room");
        let mut views = Views::of(&self.device, buffers, &self.widths, &padded)?;
        let shape = PassShape {
            capacity: padded.capacity(),
            parallel: !padded.option_ids.is_empty(),
            short: padded.longest.is_some(),
        };
        if self.replays.len() >= RECORDED_SHAPES && !self.replays.contains_key(&shape) {
            self.replays.clear();
        }
        let (head, encoder) = (&self.head, &self.encoder);
        let replay = self.replays.entry(shape).or_default();
        let (start, known) = (Instant::now(), replay.is_recorded());
        let mut pass = || {
            buffers.send(&views)?;
            replay.run(&self.device, || head.answer(encoder, &mut views, &mut |_, _, _| Ok(())))?;
            buffers.fetch(&views)
        };
        let on_device = if self.timed { self.device.timed(pass)? } else { pass().map(|()| None)? };
        let answers = buffers.answers(&views)?;
        let passes = &mut self.passes;
        passes.shapes = self.replays.len();
        if known {
            passes.replays += 1;
            passes.replay_seconds += start.elapsed().as_secs_f64();
            passes.device_seconds += f64::from(on_device.unwrap_or(0.0)) / 1e3;
        } else {
            passes.first += 1;
            passes.first_seconds += start.elapsed().as_secs_f64();
        }
        Ok(scores(&views, pack, &answers))
    }

    /// Milliseconds on the device's clock of so many passes of the encoder alone over one pack, from the upload to the states of every token, which stay
    /// there. For measurements; empty on a processor.
    pub fn time_encoder(&mut self, rows: &[Row], passes: usize) -> Result<Vec<f32>> {
        for (index, row) in rows.iter().enumerate() {
            self.check(index, row)?;
        }
        let pack = pack_of(&rows.iter().collect::<Vec<_>>()).padded();
        self.room(pack.capacity())?;
        let buffers = self.buffers.as_ref().expect("there is room");
        let views = Views::of(&self.device, buffers, &self.widths, &pack)?;
        let (mut replay, mut times) = (Replay::default(), Vec::new());
        for pass in 0..passes + 2 {
            let once = || {
                buffers.send(&views)?;
                let mut views = views.clone();
                replay.run(&self.device, || self.encoder.forward(&mut views, &mut |_, _, _| Ok(())))
            };
            // The first runs ops one by one, the second records them.
            times.extend(self.device.timed(once)?.filter(|_| pass > 1));
        }
        Ok(times)
    }

    fn run_observed(&mut self, pack: &Pack, observe: &mut Observer<'_>) -> Result<Vec<RowScores>> {
        self.room(pack.capacity())?;
        let buffers = self.buffers.as_ref().expect("there is room");
        let mut views = Views::of(&self.device, buffers, &self.widths, pack)?;
        buffers.send(&views)?;
        self.head.forward(&self.encoder, &mut views, pack, observe)
    }

    /// A row that this model can read.
    fn check(&self, index: usize, row: &Row) -> Result<()> {
        let bad = |what: String| Err(Error::Argument { op: "laya.score", what: format!("row {index}: {what}") });
        let n = row.ids.len();
        self.check_ids("laya.score", index, &row.ids)?;
        if row.markers.is_empty() {
            return bad("there is no marker; a question has an option at least".into());
        }
        if let Some(pair) = row.markers.windows(2).find(|pair| pair[0] >= pair[1]) {
            return bad(format!("markers must rise, but {} follows {}", pair[1], pair[0]));
        }
        let last = row.markers[row.markers.len() - 1] as usize;
        if last >= n {
            return bad(format!("marker {last} lies outside of the {n} tokens"));
        }
        match (&row.positions, self.agent.option_layout) {
            (None, OptionLayout::Sequential) => Ok(()),
            (None, OptionLayout::Parallel) => {
                bad("the checkpoint lays options out in parallel, and the row has no positions".into())
            }
            (Some(_), OptionLayout::Sequential) => {
                bad("the checkpoint lays options out in sequence, and the row has positions of the parallel layout"
                    .into())
            }
            (Some(p), OptionLayout::Parallel) => {
                if p.position_ids.len() != n || p.option_ids.len() != n {
                    let (a, b) = (p.position_ids.len(), p.option_ids.len());
                    return bad(format!("{a} position ids and {b} option ids for {n} tokens"));
                }
                let most = self.config.max_positions;
                if let Some(id) = p.position_ids.iter().find(|&&id| id as usize >= most) {
                    return bad(format!("position id {id} exceeds the encoder's {most} positions"));
                }
                match p.option_ids.iter().find(|&&id| id > i32::MAX as u32) {
                    Some(id) => bad(format!("option id {id} is larger than any number of options")),
                    None => Ok(()),
                }
            }
        }
    }

    fn check_ids(&self, op: &'static str, index: usize, ids: &[u32]) -> Result<()> {
        let (n, most, vocab) = (ids.len(), self.config.max_positions, self.config.vocab_size);
        let what = if n == 0 {
            "there are no tokens".into()
        } else if n > most {
            format!("{n} tokens exceed the encoder's {most} positions; lower max_len")
        } else if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
            format!(
                "token id {id} is outside of the vocabulary of {vocab}; check that the tokenizer is the checkpoint's"
            )
        } else {
            return Ok(());
        };
        Err(Error::Argument { op, what: format!("row {index}: {what}") })
    }

    /// Rows in packs within the budget, about equally long.
    fn packs<'r>(&self, rows: &[&'r Row]) -> Vec<Vec<&'r Row>> {
        let total: usize = rows.iter().map(|r| r.ids.len()).sum();
        // Tokens are numbered in 32 bits.
        let budget = self.pack_tokens.clamp(1, 1 << 24);
        let fair = total.div_ceil(total.div_ceil(budget).max(1));
        let mut packs: Vec<Vec<&Row>> = Vec::new();
        let mut tokens = 0;
        for row in rows {
            let n = row.ids.len();
            match packs.last_mut() {
                Some(pack) if tokens < fair && tokens + n <= budget => pack.push(row),
                _ => {
                    tokens = 0;
                    packs.push(vec![row]);
                }
            }
            tokens += n;
        }
        packs
    }
}

impl Scorer for Laya {
    fn score(&mut self, rows: &[Row]) -> Result<Vec<RowScores>> {
        for (index, row) in rows.iter().enumerate() {
            self.check(index, row)?;
        }
        // Equal rows have equal scores: each runs once.
        let mut distinct: Vec<&Row> = Vec::new();
        let mut known: HashMap<&Row, usize> = HashMap::new();
        let which: Vec<usize> = rows
            .iter()
            .map(|row| {
                *known.entry(row).or_insert_with(|| {
                    distinct.push(row);
                    distinct.len() - 1
                })
            })
            .collect();
        let mut scores = Vec::with_capacity(distinct.len());
        for pack in self.packs(&distinct) {
            scores.extend(self.run(&pack_of(&pack))?);
        }
        Ok(which.into_iter().map(|i| scores[i].clone()).collect())
    }

    fn embed(&mut self, rows: &[Vec<u32>]) -> Result<Vec<Vec<f32>>> {
        for (index, ids) in rows.iter().enumerate() {
            self.check_ids("laya.embed", index, ids)?;
        }
        let plain = |ids: &Vec<u32>| Row {
            ids: ids.clone(),
            question: super::QuestionType::Choice,
            markers: vec![0],
            positions: None,
        };
        let rows: Vec<Row> = rows.iter().map(plain).collect();
        let d = self.widths.hidden;
        let mut means = Vec::with_capacity(rows.len());
        for rows in self.packs(&rows.iter().collect::<Vec<_>>()) {
            let pack = pack_of(&rows);
            self.room(pack.capacity())?;
            let buffers = self.buffers.as_ref().expect("there is room");
            let mut views = Views::of(&self.device, buffers, &self.widths, &pack)?;
            buffers.send(&views)?;
            self.encoder.forward(&mut views, &mut |_, _, _| Ok(()))?;
            let states = views.x.read_f32()?;
            for span in pack.row_starts.windows(2) {
                let (start, end) = (span[0] as usize, span[1] as usize);
                let mut sums = vec![0.0f64; d];
                for state in states[start * d..end * d].chunks_exact(d) {
                    sums.iter_mut().zip(state).for_each(|(sum, x)| *sum += f64::from(*x));
                }
                means.push(sums.into_iter().map(|sum| (sum / (end - start) as f64) as f32).collect());
            }
        }
        Ok(means)
    }
}

const ENCODER: &str = "encoder.";
const TABLE: &str = "embeddings.tok_embeddings.weight";

/// Tensors of the right shapes on a null device, which holds none of their bytes.
fn blank(agent: &AgentConfig, encoder: &EncoderConfig) -> impl Fn(&Device, &str) -> Result<Tensor> {
    let shapes: HashMap<_, _> = params::all(encoder, agent.head_layers, agent.act_classes).into_iter().collect();
    move |device, name| Tensor::zeros(device, DType::F16, shapes.get(name).map_or(&[], |s| s))
}

fn parameters(agent: &AgentConfig, encoder: &EncoderConfig) -> u64 {
    let all = params::all(encoder, agent.head_layers, agent.act_classes);
    all.iter().map(|(_, shape)| shape.iter().product::<usize>() as u64).sum()
}

/// Rows one behind the other.
fn pack_of(rows: &[&Row]) -> Pack {
    let mut pack = Pack { row_starts: vec![0], selected_starts: vec![0], logit_starts: vec![0], ..Pack::default() };
    for row in rows {
        let start = pack.ids.len() as i32;
        let n = row.ids.len();
        pack.ids.extend(row.ids.iter().map(|&id| id as i32));
        match &row.positions {
            None => pack.positions.extend(0..n as i32),
            Some(p) => {
                pack.positions.extend(p.position_ids.iter().map(|&id| id as i32));
                pack.option_ids.extend(p.option_ids.iter().map(|&id| id as i32));
            }
        }
        pack.types.extend(std::iter::repeat_n(row.question.index() as i32, n));
        pack.selected.push(start);
        pack.selected.extend(row.markers.iter().map(|&m| start + m as i32));
        pack.row_starts.push(pack.ids.len() as i32);
        pack.selected_starts.push(pack.selected.len() as i32);
        pack.logit_starts.push((pack.selected.len() - (pack.selected_starts.len() - 1)) as i32);
        pack.longest = pack.longest.max(Some(n));
    }
    pack
}
