//! Checkpoints: which are given, how they are loaded, which of them answers.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use tilewright_core::DType;
use tilewright_decide::route::{Router, Source, canonical_name};
use tilewright_decide::{Agent, CalibrationFile, Limits, Tokenizer};
use tilewright_models::laya::{Checkpoint, GPU_PACK_TOKENS, Laya, LoadOptions, PACK_TOKENS, Passes, SHAPE_POLICY};
use tilewright_serve::{Loaded, Loader, ModelSource};

use crate::device::DeviceName;

/// A checkpoint that answers.
pub type LayaAgent = Agent<Laya>;

/// The name under which a checkpoint without a name is known.
const ONLY: &str = "model";

/// Which checkpoints, and how they are loaded.
#[derive(clap::Args, Debug)]
pub struct ModelArgs {
    /// Folder of a Laya checkpoint; of several, given as NAME=DIR, one is chosen by the language of the text (english, multilingual,
    /// typed-decisions) or by --task
    #[arg(long, value_name = "[NAME=]DIR")]
    pub model: Vec<String>,
    /// A checkpoint of the Hugging Face hub, downloaded once; NAME= as for --model
    #[cfg(feature = "hub")]
    #[arg(long, value_name = "[NAME=]OWNER/REPO[/SUBFOLDER][@REVISION]")]
    pub hub: Vec<String>,
    /// How weights are kept in memory: f32 is the reference, the others need half the memory
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = ["f32", "bf16", "f16"])]
    pub precision: String,
    /// Where the model runs: cpu, or an NVIDIA GPU as cuda or cuda:1
    #[arg(long, value_name = "DEVICE", default_value_t)]
    pub device: DeviceName,
    /// Calibration file that replaces the checkpoint's temperatures; `decide calibrate` writes one
    #[arg(long, value_name = "FILE")]
    pub calibration: Option<PathBuf>,
}

/// A checkpoint of the command line.
#[derive(Clone)]
struct Given {
    name: Option<String>,
    dir: PathBuf,
    /// Known without reading all of the weights.
    sha256: Option<String>,
}

/// `NAME=DIR` or `DIR`. A name holds nothing that paths do, so that `a/b=c` is a folder.
fn named(text: &str) -> (Option<String>, &str) {
    match text.split_once('=') {
        Some((name, rest)) if !name.is_empty() && !name.contains(['/', '\\', '.']) => (Some(name.to_owned()), rest),
        _ => (None, text),
    }
}

/// The checkpoints of a call.
pub struct Models {
    /// Holds them.
    pub router: Router<LayaAgent>,
    /// The name of the only one, if it was given without a name: then nothing is chosen.
    pub only: Option<&'static str>,
}

impl Models {
    /// Tells what first calls of a shape cost on a GPU, apart from those that were replayed.
    pub fn tell_passes(&mut self) {
        let loaded: Vec<String> = self.router.loaded().map(str::to_owned).collect();
        for name in loaded {
            let Ok(agent) = self.router.agent(&name) else { continue };
            if let Some(line) = passes_line(&agent.scorer_mut().passes()) {
                eprintln!("note: {line}");
            }
        }
    }
}

/// `None` where nothing was recorded: processors have no first calls.
fn passes_line(passes: &Passes) -> Option<String> {
    let &Passes { shapes, first, first_seconds, replays, replay_seconds, .. } = passes;
    let each =
        if replays > 0 { format!(", {:.2} ms each", 1e3 * replay_seconds / replays as f64) } else { String::new() };
    (first > 0).then(|| {
        format!(
            "{shapes} shapes: first and recording calls {first} in {first_seconds:.2} s; replayed {replays} in {replay_seconds:.2} s{each}"
        )
    })
}

impl ModelArgs {
    /// Whether no checkpoint is given.
    pub fn is_empty(&self) -> bool {
        self.model.is_empty() && !self.is_from_hub()
    }

    /// Whether a checkpoint is fetched from the hub.
    pub fn is_from_hub(&self) -> bool {
        #[cfg(feature = "hub")]
        let from_hub = !self.hub.is_empty();
        #[cfg(not(feature = "hub"))]
        let from_hub = false;
        from_hub
    }

    fn given(&self) -> Result<Vec<Given>> {
        let mut given: Vec<Given> = Vec::new();
        for text in &self.model {
            let (name, dir) = named(text);
            given.push(Given { name, dir: PathBuf::from(dir), sha256: None });
        }
        #[cfg(feature = "hub")]
        for text in &self.hub {
            let (name, spec) = named(text);
            let (dir, sha256) = super::hub::fetch(spec)?;
            given.push(Given { name, dir, sha256: Some(sha256) });
        }
        // What cannot be found is told now, not when a text asks for it.
        for Given { dir, .. } in &given {
            ensure!(
                dir.is_dir(),
                "there is no folder {}; give the folder of a Laya checkpoint, or make one for trying: tilewright decide demo {0}",
                dir.display()
            );
        }
        Ok(given)
    }

    /// Registers what was given, without loading it. `hash` asks for the sum of the weights, which takes a while to read.
    pub fn open(&self, hash: bool) -> Result<Models> {
        let given = self.given()?;
        let only = match &given[..] {
            [] => bail!("no checkpoint; give --model DIR, or make one for trying with `tilewright decide demo`"),
            [Given { name: None, .. }] => Some(ONLY),
            several => {
                if let Some(unnamed) = several.iter().find(|g| g.name.is_none()) {
                    let dir = unnamed.dir.display();
                    bail!(
                        "of several checkpoints each needs a name; write --model english={dir} or --model multilingual={dir}"
                    );
                }
                None
            }
        };
        for (i, Given { name, dir, .. }) in given.iter().enumerate() {
            // Aliases of one name, such as en and english, are one checkpoint too.
            let key = |name: &Option<String>| name.as_deref().map(canonical_name);
            if let Some(other) = given[..i].iter().find(|g| key(&g.name) == key(name)) {
                let name = name.as_deref().unwrap_or(ONLY);
                bail!(
                    "two checkpoints are called {name}: {} and {}; give each its own name",
                    other.dir.display(),
                    dir.display()
                );
            }
        }
        ensure!(
            self.calibration.is_none() || given.len() == 1,
            "--calibration belongs to one checkpoint, and {} are given",
            given.len()
        );
        let loader = self.loader(hash, None)?;
        let known = given.clone();
        let mut router = Router::new(move |name: &str, source: &Source| {
            match known.iter().find(|g| source.subfolder.is_none() && g.dir == Path::new(&source.location)) {
                Some(given) => loader(given),
                None => {
                    let what = format!("this text asks for the checkpoint `{name}`, which is not given");
                    let hint = format!("add --model {name}=DIR, or choose another with --lang or --task");
                    Err(tilewright_core::Error::config(what, hint).into())
                }
            }
        });
        // All that were given stay loaded: who names them has the memory for them.
        router.set_max_loaded(given.len());
        for Given { name, dir, .. } in &given {
            router.register(name.as_deref().unwrap_or(ONLY), Source::new(dir.to_string_lossy()), None)?;
        }
        for warning in router.take_warnings() {
            eprintln!("note: {warning}");
        }
        // Texts that say nothing of their language go to `multilingual`, if there is one.
        if only.is_none() && !given.iter().any(|g| is_named(g, "multilingual")) {
            router.set_default(given[0].name.as_deref().unwrap_or(ONLY))?;
        }
        Ok(Models { router, only })
    }

    /// Loads the one checkpoint of a command that takes one.
    pub fn open_one(&self, hash: bool) -> Result<LayaAgent> {
        match &self.given()?[..] {
            [one] => Ok(self.loader(hash, None)?(one)?),
            [] => bail!("no checkpoint; give --model DIR, or make one for trying with `tilewright decide demo`"),
            several => bail!("this takes one checkpoint, and {} are given", several.len()),
        }
    }

    /// What was given, for a server with packs of so many tokens. It outlives the files: nothing of what it loads stays in them.
    pub fn sources(&self, hash: bool, pack_tokens: usize) -> Result<Vec<ModelSource>> {
        let given = self.given()?;
        ensure!(
            !given.is_empty(),
            "no checkpoint; give --model DIR, or make one for trying with `tilewright decide demo`"
        );
        ensure!(
            self.calibration.is_none() || given.len() == 1,
            "--calibration belongs to one checkpoint, and {} are given",
            given.len()
        );
        let load = self.loader(hash, Some(pack_tokens))?;
        let source = |given: Given| {
            let (name, dir, load) = (given.name.clone(), Some(given.dir.clone()), load.clone());
            let loader: Loader = Arc::new(move || load(&given).map(Loaded::from));
            ModelSource { name, dir, loader }
        };
        Ok(given.into_iter().map(source).collect())
    }

    /// Tokens of a pack on the device.
    pub fn pack_tokens(&self) -> usize {
        if self.device == DeviceName::Cpu { PACK_TOKENS } else { GPU_PACK_TOKENS }
    }

    fn loader(
        &self,
        hash: bool,
        served_packs: Option<usize>,
    ) -> Result<impl Fn(&Given) -> tilewright_decide::Result<LayaAgent> + Clone + Send + Sync + 'static> {
        let calibration = match &self.calibration {
            Some(path) => Some(CalibrationFile::load(path).with_context(|| format!("calibration {}", path.display()))?),
            None => None,
        };
        let precision = match self.precision.as_str() {
            "bf16" => DType::BF16,
            "f16" => DType::F16,
            _ => DType::F32,
        };
        let name = self.device;
        Ok(move |given: &Given| {
            let Given { dir, sha256, .. } = given;
            let device = name.open()?;
            let usual = if device.is_gpu() { GPU_PACK_TOKENS } else { PACK_TOKENS };
            let (pack_tokens, serving) = (served_packs.unwrap_or(usual), served_packs.is_some());
            let options = LoadOptions { precision, device, pack_tokens, sha256: None, mapped: !serving };
            let checkpoint = Checkpoint::open(dir, options.sha256.as_ref())?;
            let tokenizer = Tokenizer::open(&dir.join("tokenizer"))?;
            let sha256 = match (sha256, hash) {
                (Some(known), _) => Some(known.clone()),
                (None, true) => Some(checkpoint.model_hash()?),
                (None, false) => None,
            };
            let model = Laya::load(&checkpoint, &options)?;
            if model.device().is_gpu() {
                eprintln!("note: {}: {SHAPE_POLICY}", model.device().name());
            }
            let mut agent = Agent::new(model, tokenizer, checkpoint.agent().clone())
                .with_limits(Limits { row_tokens: checkpoint.encoder().max_positions })
                .with_model(Some(dir.to_string_lossy().into_owned()), sha256);
            if let Some(file) = &calibration {
                agent = agent.with_calibration(file);
            }
            // A server logs them.
            for warning in agent.calibration().warnings().iter().filter(|_| !serving) {
                eprintln!("note: {}: {warning}", dir.display());
            }
            Ok(agent)
        })
    }
}

fn is_named(given: &Given, key: &str) -> bool {
    given.name.as_deref().is_some_and(|name| canonical_name(name) == key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_calls_are_told_apart_from_replayed_ones_and_only_where_there_are_any() {
        assert_eq!(passes_line(&Passes::default()), None);
        let passes =
            Passes { shapes: 2, first: 3, first_seconds: 0.5, replays: 4, replay_seconds: 0.01, device_seconds: 0.0 };
        let line = passes_line(&passes).unwrap();
        assert_eq!(line, "2 shapes: first and recording calls 3 in 0.50 s; replayed 4 in 0.01 s, 2.50 ms each");
    }

    #[test]
    fn a_name_stands_before_the_first_equals_sign_unless_it_is_a_path() {
        assert_eq!(named("en=models/x"), (Some("en".to_owned()), "models/x"));
        assert_eq!(named("models/a=b"), (None, "models/a=b"));
        assert_eq!(named("./a=b"), (None, "./a=b"));
        assert_eq!(named("=x"), (None, "=x"));
        assert_eq!(named("plain"), (None, "plain"));
    }
}
