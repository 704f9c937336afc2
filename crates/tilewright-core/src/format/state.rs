//! llm.c's optimiser state: moments, master weights, generators and the loader's position, for one process.
//!
//! After what llm.c reads we append a block of our own, which llm.c leaves unread: `TWSTATE1`, u64 bytes of the sections, the sections (4-byte tag, u32 length,
//! bytes), and the CRC-32 of the file up to there. Sections: `LOSS` and `NORM` are the outlier detectors' windows (f64 sum, f64 sum of squares, then the values,
//! oldest first), `MCRC` the CRC-32 of the model file of the same step; others are kept as they are.

use std::path::Path;

use super::{CHUNK, DAMAGED, Finished, HEADER_BYTES, Header, Sink, Source, argument, decode_f32, encode_f32};
use crate::rng::{MT_RECORD_BYTES, Mt19937};
use crate::{DType, Result};

const MAGIC: i32 = 20240527;
const OP: &str = "format.state";
const EXTENSION_TAG: &[u8; 8] = b"TWSTATE1";

/// The header of a state file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StateHeader {
    /// Processes that trained together.
    pub procs: usize,
    /// Which of them wrote this file.
    pub rank: usize,
    /// Whether f32 master weights follow the moments.
    pub use_master: bool,
    /// Whether the loader shuffles, so that its permutations follow.
    pub should_shuffle: bool,
    /// The optimiser step.
    pub step: u64,
    /// The xorshift* state that seeds stochastic rounding.
    pub rng_state: u64,
    /// That state before the last update: it rounds the masters again on resume.
    pub rng_state_last_update: u64,
    /// The loader's shard, as a position in the shard permutation.
    pub shard_index: u64,
    /// The loader's next sample, as a position in the sample permutation.
    pub sample_index: u64,
}

/// The loader's permutations and generator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShuffleState {
    /// Order of the shards in this epoch.
    pub shards: Vec<i32>,
    /// Order of the samples in this shard.
    pub samples: Vec<i32>,
    /// The generator after both were drawn.
    pub rng: Mt19937,
}

/// The window of an outlier detector.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct DetectorState {
    /// The values in the window, oldest first.
    pub values: Vec<f64>,
    /// Their running sum, with its own rounding history.
    pub sum: f64,
    /// The running sum of their squares.
    pub sum_sq: f64,
}

impl DetectorState {
    fn encode(&self) -> Vec<u8> {
        [self.sum, self.sum_sq].iter().chain(&self.values).flat_map(|x| x.to_le_bytes()).collect()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (chunks, []) = bytes.as_chunks::<8>() else { return None };
        let mut numbers = chunks.iter().map(|b| f64::from_le_bytes(*b));
        let (sum, sum_sq) = (numbers.next()?, numbers.next()?);
        Some(DetectorState { values: numbers.collect(), sum, sum_sq })
    }
}

/// What we save beyond llm.c.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Extension {
    /// The detector of losses.
    pub loss: DetectorState,
    /// The detector of gradient norms.
    pub norm: DetectorState,
    /// CRC-32 of the model file of this step.
    pub model_crc32: Option<u32>,
    /// Sections of other tags, in file order.
    pub other: Vec<([u8; 4], Vec<u8>)>,
}

/// The f32 arrays of a state file, in file order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// First moments.
    M,
    /// Second moments.
    V,
    /// Master weights.
    Master,
}

impl Part {
    fn name(self) -> &'static str {
        ["the first moments", "the second moments", "the master weights"][self as usize]
    }
}

/// Reads a state file.
#[derive(Debug)]
pub struct StateReader {
    source: Source,
    header: StateHeader,
    params: u64,
    shuffle: Option<ShuffleState>,
    extension: Option<Extension>,
}

impl StateReader {
    /// Opens the state of a process that holds `params` parameters: the file does not say how many.
    pub fn open(path: &Path, params: u64) -> Result<Self> {
        Self::new(Source::open(path)?, params)
    }

    /// Checks and reads everything but the arrays.
    pub fn new(source: Source, params: u64) -> Result<Self> {
        let raw = Header::read(&source, "an optimiser state")?;
        raw.expect_magic(&source, MAGIC, "an optimiser state")?;
        if raw.get(1) != 1 {
            return Err(raw.version_error(&source, "1"));
        }
        let procs = raw.count(&source, 2, "the number of processes", 1)?;
        let rank = raw.count(&source, 3, "the rank", 0)?;
        if rank >= procs {
            return Err(source.error(12, format!("rank {rank} of {procs} processes does not exist"), DAMAGED));
        }
        let header = StateHeader {
            procs,
            rank,
            use_master: raw.flag(&source, 4, "the master weights' flag")?,
            should_shuffle: raw.flag(&source, 5, "the shuffling flag")?,
            step: raw.count(&source, 10, "the step", 0)? as u64,
            rng_state: raw.get_u64(20),
            rng_state_last_update: raw.get_u64(22),
            shard_index: raw.get_u64(30),
            sample_index: raw.get_u64(32),
        };
        let arrays = if header.use_master { 3 } else { 2 };
        let bytes = params.saturating_mul(4 * arrays);
        source.check_range(HEADER_BYTES, bytes, &format!("{arrays} arrays of {params} parameters"))?;
        let mut at = HEADER_BYTES + bytes;
        let shuffle = if header.should_shuffle { Some(read_shuffle(&source, &header, &mut at)?) } else { None };
        let extension = if at == source.len() { None } else { Some(read_extension(&source, at)?) };
        Ok(StateReader { source, header, params, shuffle, extension })
    }

    /// The header.
    pub fn header(&self) -> &StateHeader {
        &self.header
    }

    /// The loader's permutations, when it shuffles.
    pub fn shuffle(&self) -> Option<&ShuffleState> {
        self.shuffle.as_ref()
    }

    /// Our own block; `None` in a file of llm.c.
    pub fn extension(&self) -> Option<&Extension> {
        self.extension.as_ref()
    }

    /// Reads the file once and compares its checksum; a file of llm.c has none and passes.
    pub fn verify(&self) -> Result<()> {
        if self.extension.is_none() {
            return Ok(());
        }
        let end = self.source.len() - 4;
        let mut crc = crc32fast::Hasher::new();
        self.source.stream(0, end, 1, "the file", &mut |chunk| {
            crc.update(chunk);
            Ok(())
        })?;
        let mut stored = [0; 4];
        self.source.read_at(end, &mut stored, "the checksum")?;
        let (stored, computed) = (u32::from_le_bytes(stored), crc.finalize());
        if stored != computed {
            let what = format!("the checksum is {stored:08x}, the content has {computed:08x}");
            return Err(self.source.error(end, what, "the file is damaged; resume from an earlier checkpoint"));
        }
        Ok(())
    }

    fn part_offset(&self, part: Part) -> Result<u64> {
        if part == Part::Master && !self.header.use_master {
            return Err(argument(OP, format!("{} holds no master weights", self.source.path().display())));
        }
        Ok(HEADER_BYTES + 4 * self.params * part as u64)
    }

    /// Reads part of an array, from element `start` on, into `out`.
    pub fn read_at(&self, part: Part, start: u64, out: &mut [f32]) -> Result<()> {
        let base = self.part_offset(part)?;
        if start.checked_add(out.len() as u64).is_none_or(|end| end > self.params) {
            let what = format!("{} from {start} on were asked of {} parameters", out.len(), self.params);
            return Err(argument(OP, what));
        }
        let mut buffer = vec![0; 4 * out.len().min(CHUNK)];
        for (i, piece) in out.chunks_mut(CHUNK).enumerate() {
            let bytes = &mut buffer[..4 * piece.len()];
            self.source.read_at(base + 4 * (start + (i * CHUNK) as u64), bytes, part.name())?;
            decode_f32(bytes, DType::F32, piece);
        }
        Ok(())
    }

    /// Streams an array.
    pub fn stream(&self, part: Part, sink: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        self.source.stream_f32(self.part_offset(part)?, self.params, DType::F32, part.name(), sink)
    }
}

fn read_u64(source: &Source, at: &mut u64, what: &str) -> Result<u64> {
    let mut bytes = [0; 8];
    source.read_at(*at, &mut bytes, what)?;
    *at += 8;
    Ok(u64::from_le_bytes(bytes))
}

/// A counted permutation, checked to be one.
fn read_permutation(source: &Source, at: &mut u64, what: &str) -> Result<Vec<i32>> {
    let count = read_u64(source, at, what)?;
    let bytes = source.read_vec(*at, count.saturating_mul(4), what)?;
    let order: Vec<i32> = bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
    let mut seen = vec![false; order.len()];
    for (i, &x) in order.iter().enumerate() {
        let slot = usize::try_from(x).ok().and_then(|x| seen.get_mut(x));
        if slot.is_none_or(|s| std::mem::replace(s, true)) {
            let what = format!("{what} is no permutation: entry {i} of {count} is {x}");
            return Err(source.error(*at + 4 * i as u64, what, DAMAGED));
        }
    }
    *at += bytes.len() as u64;
    Ok(order)
}

fn read_shuffle(source: &Source, header: &StateHeader, at: &mut u64) -> Result<ShuffleState> {
    let shards = read_permutation(source, at, "the order of the shards")?;
    let samples = read_permutation(source, at, "the order of the samples")?;
    if header.shard_index >= shards.len() as u64 {
        let what = format!("shard {} of {} is current", header.shard_index, shards.len());
        return Err(source.error(120, what, DAMAGED));
    }
    // One past the end: the shard is finished and the next read moves on.
    if header.sample_index > samples.len() as u64 {
        let what = format!("sample {} of {} is next", header.sample_index, samples.len());
        return Err(source.error(128, what, DAMAGED));
    }
    let mut record = [0; MT_RECORD_BYTES];
    source.read_at(*at, &mut record, "the shuffling generator")?;
    let rng = Mt19937::from_record(&record).map_err(|(byte, what)| source.error(*at + byte as u64, what, DAMAGED))?;
    *at += record.len() as u64;
    Ok(ShuffleState { shards, samples, rng })
}

fn read_extension(source: &Source, mut at: u64) -> Result<Extension> {
    let start = at;
    let mut tag = [0; 8];
    source.read_at(at, &mut tag, "the block after llm.c's part")?;
    if &tag != EXTENSION_TAG {
        let what = format!("{} bytes follow that are no block of this program", source.len() - start);
        return Err(source.error(start, what, "check that the model has the number of parameters of this state"));
    }
    at += 8;
    let bytes = read_u64(source, &mut at, "the extension's length")?;
    let want = at.saturating_add(bytes).saturating_add(4);
    if want != source.len() {
        let what = format!("the extension reaches to byte {want}, the file to {}", source.len());
        return Err(source.error(at - 8, what, "copy the file again, or resume from an earlier checkpoint"));
    }
    let payload = source.read_vec(at, bytes, "the extension")?;
    let mut extension = Extension::default();
    let mut seen: Vec<[u8; 4]> = Vec::new();
    let mut rest = &payload[..];
    while !rest.is_empty() {
        let offset = at + (payload.len() - rest.len()) as u64;
        let section = rest.split_first_chunk::<4>().and_then(|(tag, r)| {
            let (len, r) = r.split_first_chunk::<4>()?;
            Some((*tag, r.split_at_checked(u32::from_le_bytes(*len) as usize)?))
        });
        let Some((tag, (body, next))) = section else {
            return Err(source.error(offset, "a section of the extension is longer than the extension", DAMAGED));
        };
        let name = String::from_utf8_lossy(&tag).into_owned();
        if seen.contains(&tag) {
            return Err(source.error(offset, format!("section {name:?} appears twice"), DAMAGED));
        }
        seen.push(tag);
        let damaged = || source.error(offset, format!("section {name:?} has an impossible length"), DAMAGED);
        match &tag {
            b"LOSS" => extension.loss = DetectorState::decode(body).ok_or_else(damaged)?,
            b"NORM" => extension.norm = DetectorState::decode(body).ok_or_else(damaged)?,
            b"MCRC" => {
                let crc = body.try_into().map_err(|_| damaged())?;
                extension.model_crc32 = Some(u32::from_le_bytes(crc));
            }
            _ => extension.other.push((tag, body.to_vec())),
        }
        rest = next;
    }
    Ok(extension)
}

/// Writes a state file: the arrays in order, in as many pieces as is convenient.
#[derive(Debug)]
pub struct StateWriter {
    sink: Sink,
    header: StateHeader,
    params: u64,
    written: u64,
    buffer: Vec<u8>,
}

impl StateWriter {
    /// Starts the state of a process that holds `params` parameters.
    pub fn create(path: &Path, header: &StateHeader, params: u64) -> Result<Self> {
        Self::new(Sink::create(path)?, header, params)
    }

    /// Starts writing to a sink.
    pub fn new(mut sink: Sink, header: &StateHeader, params: u64) -> Result<Self> {
        let word = |name: &str, x: u64| {
            i32::try_from(x).map_err(|_| argument(OP, format!("{name} {x} does not fit the header")))
        };
        if header.rank >= header.procs {
            return Err(argument(OP, format!("rank {} of {} processes does not exist", header.rank, header.procs)));
        }
        let mut raw = Header::new(MAGIC, 1);
        raw.set(2, word("the number of processes", header.procs as u64)?);
        raw.set(3, word("the rank", header.rank as u64)?);
        raw.set(4, i32::from(header.use_master));
        raw.set(5, i32::from(header.should_shuffle));
        raw.set(10, word("step", header.step)?);
        raw.set_u64(20, header.rng_state);
        raw.set_u64(22, header.rng_state_last_update);
        raw.set_u64(30, header.shard_index);
        raw.set_u64(32, header.sample_index);
        raw.write(&mut sink)?;
        Ok(StateWriter { sink, header: *header, params, written: 0, buffer: Vec::new() })
    }

    /// Appends elements of an array.
    pub fn write(&mut self, part: Part, values: &[f32]) -> Result<()> {
        let base = self.params * part as u64;
        let room = base..=(base + self.params).saturating_sub(values.len() as u64);
        let absent = part == Part::Master && !self.header.use_master;
        if absent || values.len() as u64 > self.params || !room.contains(&self.written) {
            let what = format!(
                "{} values of {} were written after {} values of arrays of {}",
                values.len(),
                part.name(),
                self.written,
                self.params
            );
            return Err(argument(OP, what));
        }
        for chunk in values.chunks(CHUNK) {
            self.buffer.clear();
            encode_f32(chunk, DType::F32, &mut self.buffer);
            self.sink.write(&self.buffer)?;
        }
        self.written += values.len() as u64;
        Ok(())
    }

    /// Appends the loader's state (exactly when the header says that it shuffles) and our block (`None` writes llm.c's file and no more), and makes the file
    /// appear.
    pub fn finish(mut self, shuffle: Option<&ShuffleState>, extension: Option<&Extension>) -> Result<Finished> {
        let arrays = if self.header.use_master { 3 } else { 2 };
        if self.written != arrays * self.params {
            let what = format!("{} values of {} were written", self.written, arrays * self.params);
            return Err(argument(OP, what));
        }
        if shuffle.is_some() != self.header.should_shuffle {
            return Err(argument(
                OP,
                "the loader's permutations and the header's shuffling flag contradict each other",
            ));
        }
        if let Some(shuffle) = shuffle {
            let mut out = Vec::new();
            for order in [&shuffle.shards, &shuffle.samples] {
                out.extend((order.len() as u64).to_le_bytes());
                out.extend(order.iter().flat_map(|x| x.to_le_bytes()));
            }
            out.extend(shuffle.rng.to_record());
            self.sink.write(&out)?;
        }
        if let Some(extension) = extension {
            let mut payload = Vec::new();
            let mut section = |tag: &[u8; 4], body: &[u8]| {
                payload.extend(tag);
                payload.extend((body.len() as u32).to_le_bytes());
                payload.extend(body);
            };
            section(b"LOSS", &extension.loss.encode());
            section(b"NORM", &extension.norm.encode());
            if let Some(crc) = extension.model_crc32 {
                section(b"MCRC", &crc.to_le_bytes());
            }
            for (tag, body) in &extension.other {
                section(tag, body);
            }
            self.sink.write(EXTENSION_TAG)?;
            self.sink.write(&(payload.len() as u64).to_le_bytes())?;
            self.sink.write(&payload)?;
            let crc = self.sink.crc32();
            self.sink.write(&crc.to_le_bytes())?;
        }
        self.sink.finish()
    }
}
