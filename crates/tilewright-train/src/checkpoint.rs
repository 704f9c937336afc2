//! Checkpoints of a run: `model_%08d.bin`, `state_%08d_00000.bin`, and `DONE_%08d`, which makes the other two count.
//!
//! Each file appears whole (temporary name, fsync, rename) and in that order, so a process that is killed at any moment leaves either a
//! complete checkpoint or none. A deletion takes the marker first.

use std::path::Path;

use tilewright_core::format::ParamSource;
use tilewright_core::format::checkpoint::{Retention, delete, mark_done, model_path, state_path};
use tilewright_core::format::model::{ModelReader, ModelWriter};
use tilewright_core::format::state::{Extension, Part, ShuffleState, StateHeader, StateReader, StateWriter};
use tilewright_core::gpt2::PARAMS;
use tilewright_core::{DType, Error, Result};
use tilewright_models::Gpt2;
use tilewright_ops::Tensor;

use crate::config::TrainConfig;
use crate::outlier::OutlierDetector;

/// Elements copied at a time: a checkpoint needs no second model in memory.
const PIECE: usize = 1 << 18;

/// Where training stands, apart from the tensors.
#[derive(Clone, PartialEq, Debug)]
pub struct Position {
    /// Updates done.
    pub step: usize,
    /// Generator of the seeds of stochastic rounding.
    pub rng_state: u64,
    /// That generator before the last update.
    pub rng_state_last_update: u64,
    /// Shards the loader has visited in this epoch.
    pub shard: u64,
    /// Samples it has visited of the current shard.
    pub sample: u64,
    /// The loader's permutations, when it shuffles.
    pub shuffle: Option<ShuffleState>,
    /// Window of losses.
    pub losses: OutlierDetector,
    /// Window of gradient norms.
    pub norms: OutlierDetector,
}

/// The storage of a model file for a storage of parameters: f16 widens to f32 without loss, because the format has no f16.
fn file_dtype(dtype: DType) -> DType {
    if dtype == DType::BF16 { DType::BF16 } else { DType::F32 }
}

/// Calls `f` with consecutive flat pieces of a tensor and their first element.
fn pieces(tensor: &Tensor, mut f: impl FnMut(&Tensor, usize) -> Result<()>) -> Result<()> {
    for start in (0..tensor.numel()).step_by(PIECE) {
        f(&tensor.slice(start, &[PIECE.min(tensor.numel() - start)])?, start)?;
    }
    Ok(())
}

/// Writes the parameters as a model file; gives its checksum.
pub fn save_model(model: &Gpt2, path: &Path) -> Result<u32> {
    let mut writer = ModelWriter::create(path, model.config(), file_dtype(model.options().dtype))?;
    let mut values = vec![0.0; PIECE];
    for (index, tensor) in model.params().iter().enumerate() {
        pieces(tensor, |piece, _| {
            let values = &mut values[..piece.numel()];
            piece.read_f32_into(values)?;
            writer.write_f32(index, values)
        })?;
    }
    Ok(writer.finish()?.crc32)
}

/// Reads a model file into a model of the same sizes, whatever the two storages are. Master weights take the file's values unrounded.
pub fn load_model(model: &mut Gpt2, reader: &ModelReader, path: &Path) -> Result<()> {
    if reader.config() != model.config() {
        return Err(Error::config(
            format!("{} holds {:?}, the run wants {:?}", path.display(), reader.config(), model.config()),
            "give the sizes of the file, or another file",
        ));
    }
    for (index, info) in PARAMS.iter().enumerate() {
        let mut start = 0;
        reader.read_f32(index, &mut |values| {
            let targets = [Some(&model.params()[index]), model.masters().get(index)];
            for target in targets.into_iter().flatten() {
                target.slice(start, &[values.len()])?.write_f32(values)?;
            }
            start += values.len();
            Ok(())
        })?;
        debug_assert_eq!(start, model.params()[index].numel(), "{}", info.name);
    }
    Ok(())
}

/// Writes model, state and marker of a step, in this order.
pub fn save(model: &Gpt2, folder: &Path, position: &Position) -> Result<()> {
    let step = position.step as u64;
    let crc = save_model(model, &model_path(folder, step))?;
    let header = StateHeader {
        procs: 1,
        rank: 0,
        use_master: !model.masters().is_empty(),
        should_shuffle: position.shuffle.is_some(),
        step,
        rng_state: position.rng_state,
        rng_state_last_update: position.rng_state_last_update,
        shard_index: position.shard,
        sample_index: position.sample,
    };
    let params = model.config().parameter_count() as u64;
    let mut writer = StateWriter::create(&state_path(folder, step, 0), &header, params)?;
    let mut values = vec![0.0; PIECE];
    for (part, tensors) in [(Part::M, model.m()), (Part::V, model.v()), (Part::Master, model.masters())] {
        for tensor in tensors {
            pieces(tensor, |piece, _| {
                let values = &mut values[..piece.numel()];
                piece.read_f32_into(values)?;
                writer.write(part, values)
            })?;
        }
    }
    let extension = Extension {
        loss: position.losses.state(),
        norm: position.norms.state(),
        model_crc32: Some(crc),
        other: Vec::new(),
    };
    writer.finish(position.shuffle.as_ref(), Some(&extension))?;
    mark_done(folder, step)
}

/// Deletes the checkpoint that the run's retention no longer wants once that of `step` is complete.
pub fn retain(folder: &Path, step: usize, config: &TrainConfig) -> Result<()> {
    let retention = Retention {
        every: config.checkpoint_every.unwrap_or(0) as u64,
        keep: config.checkpoint_keep as u64,
        major_every: config.checkpoint_major as u64,
    };
    match retention.victim(step as u64) {
        Some(old) => delete(folder, old),
        None => Ok(()),
    }
}

/// Reads the checkpoint of a step back, checking both files against their checksums. Files of llm.c are read too; their outlier windows start empty.
pub fn load(model: &mut Gpt2, folder: &Path, step: u64) -> Result<Position> {
    let (model_file, state_file) = (model_path(folder, step), state_path(folder, step, 0));
    let reader = ModelReader::open(&model_file)?;
    load_model(model, &reader, &model_file)?;
    let state = StateReader::open(&state_file, model.config().parameter_count() as u64)?;
    state.verify()?;
    let header = *state.header();
    let refuse = |what: String, hint: &str| Err(Error::format(&state_file, 0, what, hint));
    if header.procs != 1 {
        return refuse(format!("it is one of {} processes' states", header.procs), "resume it with as many processes");
    }
    if header.step != step {
        return refuse(format!("it is of step {}, its name says {step}", header.step), "restore the right file");
    }
    let masters = !model.masters().is_empty();
    if header.use_master != masters {
        let what = format!("master weights: {} in the file, {masters} in the run", header.use_master);
        return refuse(what, "resume with the --dtype and --masters of the run");
    }
    let extension = state.extension().cloned().unwrap_or_default();
    if let Some(want) = extension.model_crc32 {
        let got = reader.crc32()?;
        if got != want {
            return Err(Error::format(
                &model_file,
                0,
                format!("the checksum is {got:08x}, the state file beside it expects {want:08x}"),
                "the two files are not of one checkpoint; restore them, or resume from an earlier one",
            ));
        }
    }
    let mut values = vec![0.0; PIECE];
    for (part, tensors) in [(Part::M, model.m()), (Part::V, model.v()), (Part::Master, model.masters())] {
        let mut base = 0;
        for tensor in tensors {
            pieces(tensor, |piece, start| {
                let values = &mut values[..piece.numel()];
                state.read_at(part, base + start as u64, values)?;
                piece.write_f32(values)
            })?;
            base += tensor.numel() as u64;
        }
    }
    let detector = |state| {
        OutlierDetector::restore(state).ok_or_else(|| {
            Error::format(
                &state_file,
                0,
                "an outlier window is longer than 128 values",
                "resume from an earlier checkpoint",
            )
        })
    };
    Ok(Position {
        step: step as usize,
        rng_state: header.rng_state,
        rng_state_last_update: header.rng_state_last_update,
        shard: header.shard_index,
        sample: header.sample_index,
        shuffle: state.shuffle().cloned(),
        losses: detector(&extension.loss)?,
        norms: detector(&extension.norm)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tilewright_core::gpt2::Gpt2Config;
    use tilewright_core::rng::Mt19937;
    use tilewright_models::Options;
    use tilewright_ops::Device;

    const TINY: Gpt2Config =
        Gpt2Config { max_seq_len: 16, vocab_size: 29, padded_vocab_size: 37, layers: 2, heads: 3, channels: 48 };

    fn model(dtype: DType, masters: bool) -> Gpt2 {
        let options = Options { dtype, masters, ..Options::training(1, 4) };
        Gpt2::new(&Device::cpu_with_threads(1), TINY, options).unwrap()
    }

    fn filled(dtype: DType, masters: bool) -> Gpt2 {
        let mut m = model(dtype, masters);
        m.init_random(7).unwrap();
        let mut rng = Mt19937::new(3);
        for tensor in m.m().iter().chain(m.v()).chain(m.masters()) {
            let mut values = vec![0.0; tensor.numel()];
            rng.normal_fill(&mut values, 0.0, 1.0);
            tensor.write_f32(&values).unwrap();
        }
        m
    }

    fn position() -> Position {
        let mut losses = OutlierDetector::default();
        for i in 0..200 {
            losses.update((i as f64).sin());
        }
        let mut rng = Mt19937::new(42);
        let shuffle = ShuffleState { shards: rng.permutation(3), samples: rng.permutation(9), rng };
        Position {
            step: 12,
            rng_state: 5,
            rng_state_last_update: 4,
            shard: 1,
            sample: 9,
            shuffle: Some(shuffle),
            norms: OutlierDetector::default(),
            losses,
        }
    }

    fn bytes(model: &Gpt2) -> Vec<Vec<u8>> {
        let all = model.params().iter().chain(model.m()).chain(model.v()).chain(model.masters());
        all.map(|t| {
            let mut out = vec![0; t.bytes()];
            t.read_bytes(0, &mut out).unwrap();
            out
        })
        .collect()
    }

    #[test]
    fn every_storage_round_trips_bit_for_bit() {
        for (dtype, masters) in
            [(DType::F32, false), (DType::BF16, true), (DType::BF16, false), (DType::F16, true), (DType::F16, false)]
        {
            let dir = tempfile::tempdir().unwrap();
            let saved = filled(dtype, masters);
            save(&saved, dir.path(), &position()).unwrap();
            let mut loaded = model(dtype, masters);
            let at = load(&mut loaded, dir.path(), 12).unwrap();
            // The window's place in its ring may differ; what it holds may not.
            assert_eq!(at.losses.state(), position().losses.state());
            assert_eq!(Position { losses: position().losses, ..at }, position());
            assert_eq!(bytes(&loaded), bytes(&saved), "{dtype}, masters {masters}");
            assert!(dir.path().join("DONE_00000012").exists());
        }
    }

    #[test]
    fn a_checkpoint_saved_again_has_the_same_bytes() {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        save(&filled(DType::F32, false), dirs[0].path(), &position()).unwrap();
        let mut loaded = model(DType::F32, false);
        let at = load(&mut loaded, dirs[0].path(), 12).unwrap();
        save(&loaded, dirs[1].path(), &at).unwrap();
        for name in ["model_00000012.bin", "state_00000012_00000.bin"] {
            let read = |dir: &tempfile::TempDir| fs::read(dir.path().join(name)).unwrap();
            assert!(read(&dirs[0]) == read(&dirs[1]), "{name}");
        }
    }

    #[test]
    fn a_model_of_other_sizes_is_refused_with_both() {
        let dir = tempfile::tempdir().unwrap();
        save(&filled(DType::F32, false), dir.path(), &position()).unwrap();
        let other = Gpt2Config { layers: 3, ..TINY };
        let mut wrong = Gpt2::new(&Device::cpu_with_threads(1), other, Options::training(1, 4)).unwrap();
        let message = load(&mut wrong, dir.path(), 12).unwrap_err().to_string();
        assert!(message.contains("layers: 2") && message.contains("layers: 3"), "{message}");
    }

    #[test]
    fn files_of_different_checkpoints_are_not_mixed() {
        let dir = tempfile::tempdir().unwrap();
        save(&filled(DType::F32, false), dir.path(), &position()).unwrap();
        let mut other = filled(DType::F32, false);
        other.init_random(8).unwrap();
        save_model(&other, &model_path(dir.path(), 12)).unwrap();
        let message = load(&mut model(DType::F32, false), dir.path(), 12).unwrap_err().to_string();
        assert!(message.contains("model_00000012.bin") && message.contains("checksum"), "{message}");
    }

    #[test]
    fn a_flipped_bit_in_the_state_is_found() {
        let dir = tempfile::tempdir().unwrap();
        save(&filled(DType::F32, false), dir.path(), &position()).unwrap();
        let path = state_path(dir.path(), 12, 0);
        let mut raw = fs::read(&path).unwrap();
        raw[5000] ^= 4;
        fs::write(&path, raw).unwrap();
        let message = load(&mut model(DType::F32, false), dir.path(), 12).unwrap_err().to_string();
        assert!(message.contains("state_00000012") && message.contains("checksum"), "{message}");
    }

    #[test]
    fn master_weights_must_match_the_run() {
        let dir = tempfile::tempdir().unwrap();
        save(&filled(DType::BF16, true), dir.path(), &position()).unwrap();
        let message = load(&mut model(DType::BF16, false), dir.path(), 12).unwrap_err().to_string();
        assert!(message.contains("--masters"), "{message}");
    }

    #[test]
    fn masters_keep_the_precision_of_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.bin");
        let full = filled(DType::F32, false);
        save_model(&full, &path).unwrap();
        let mut half = model(DType::BF16, true);
        load_model(&mut half, &ModelReader::open(&path).unwrap(), &path).unwrap();
        assert_eq!(half.masters()[0].read_f32().unwrap(), full.params()[0].read_f32().unwrap());
    }
}
