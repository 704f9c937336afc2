//! A plan: which arms, on which inputs, in which order, how often, and what must hold before a time is kept.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tilewright_core::{Error, Result};

use crate::record::{Kind, Measure};
use crate::stats::LEAST_CONFIRM;

/// A plan file.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Names the records.
    pub name: String,
    /// What is asked, in a sentence.
    #[serde(default)]
    pub description: String,
    /// A screen picks candidates, a confirmation may be claimed.
    #[serde(default)]
    pub kind: Kind,
    /// Of order, inputs and resampling.
    #[serde(default = "one")]
    pub seed: u64,
    /// Pairs of each arm with the baseline, in each case.
    #[serde(default = "twenty")]
    pub pairs: usize,
    /// The arm that all others are compared with; the first unless given.
    pub baseline: Option<String>,
    /// Whether a second process of the baseline runs along as the A/A control.
    #[serde(default = "yes")]
    pub control: bool,
    /// Whether a control whose interval excludes 1 makes the session `not comparable`; a confirmation's default.
    pub strict_control: Option<bool>,
    /// The time that verdicts are about.
    #[serde(default)]
    pub primary: Measure,
    /// Before the first pair.
    #[serde(default)]
    pub warm_up: WarmUp,
    /// Between calls and before cases.
    #[serde(default)]
    pub cool_down: CoolDown,
    /// How memory is compared.
    #[serde(default)]
    pub memory: Memory,
    /// When to give up.
    #[serde(default)]
    pub limits: Limits,
    /// Variables `${NAME}` and their defaults; `--set` and the environment go before.
    #[serde(default)]
    pub vars: BTreeMap<String, String>,
    /// Inputs and parameters.
    pub cases: Vec<Case>,
    /// The commands.
    pub arms: Vec<Arm>,
    /// What must hold.
    #[serde(default)]
    pub checks: Vec<CheckRule>,
}

/// Work of each arm before the first pair: both must be reached.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WarmUp {
    /// Calls after the first one.
    pub calls: usize,
    /// Seconds of work.
    pub seconds: f64,
}

impl Default for WarmUp {
    fn default() -> Self {
        WarmUp { calls: 3, seconds: 0.75 }
    }
}

/// Rests.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CoolDown {
    /// Before every call, so that no thread of the arm before still spins.
    pub pause_ms: u64,
    /// Before every case.
    pub seconds: f64,
    /// Wait before each round until the temperature is within so many degrees of the first; needs a sensor.
    pub within_c: Option<f64>,
    /// Longest wait for that.
    pub max_seconds: f64,
}

impl Default for CoolDown {
    fn default() -> Self {
        CoolDown { pause_ms: 10, seconds: 0.0, within_c: None, max_seconds: 120.0 }
    }
}

/// How memory is compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryMode {
    /// Not.
    #[default]
    None,
    /// In the timed processes, above live bytes that must be equal.
    Live,
    /// In fresh processes beside the timed ones.
    Fresh,
}

/// Memory settings.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Memory {
    /// How.
    pub mode: MemoryMode,
    /// Baselines that differ by more get no ratio.
    pub tolerance_bytes: u64,
    /// Fresh processes of each arm.
    pub runs: usize,
}

impl Default for Memory {
    fn default() -> Self {
        Memory { mode: MemoryMode::None, tolerance_bytes: 1 << 20, runs: 3 }
    }
}

/// When to give up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Seconds for one call.
    pub call_s: f64,
    /// Seconds to start and to prepare.
    pub start_s: f64,
    /// Refuse to confirm above this load a logical core.
    pub load: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { call_s: 120.0, start_s: 300.0, load: 0.5 }
    }
}

/// One set of inputs.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Names it in reports and claims.
    pub name: String,
    /// Given to the arms, and in commands as `{key}`.
    #[serde(default)]
    pub params: BTreeMap<String, Value>,
    /// Distinct inputs, used in turn.
    #[serde(default = "four")]
    pub ring: usize,
    /// What the harness draws and hands over as files.
    #[serde(default)]
    pub tensors: Vec<TensorSpec>,
}

/// One tensor of each input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorSpec {
    /// Its name; in a plain command `{name}` is the file.
    pub name: String,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
    /// How it is drawn.
    pub distribution: Distribution,
}

/// How values are drawn. Never zeros: they compress, and some kernels skip them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", try_from = "RawDistribution")]
pub enum Distribution {
    /// f32, normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// i32, all of `0..high` alike.
    Uniform {
        /// One above the greatest.
        high: u32,
    },
    /// i32 with a heavy tail, as words have: value k with weight 1 / (k + 1); a share of them -100, which losses pass over.
    Zipf {
        /// One above the greatest.
        high: u32,
        /// Share of ignored rows.
        ignored: f64,
    },
    /// u8, random bytes.
    Bytes,
}

/// A distribution as it is read. Enums that serde reads by a tag go through a buffer that holds no number of arbitrary precision.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawDistribution {
    kind: String,
    std: Option<f64>,
    high: Option<u32>,
    ignored: Option<f64>,
}

impl TryFrom<RawDistribution> for Distribution {
    type Error = String;

    fn try_from(raw: RawDistribution) -> Result<Self, String> {
        let RawDistribution { kind, std, high, ignored } = raw;
        match (kind.as_str(), std, high, ignored) {
            ("normal", Some(std), None, None) => Ok(Distribution::Normal { std }),
            ("uniform", None, Some(high), None) => Ok(Distribution::Uniform { high }),
            ("zipf", None, Some(high), ignored) => Ok(Distribution::Zipf { high, ignored: ignored.unwrap_or(0.0) }),
            ("bytes", None, None, None) => Ok(Distribution::Bytes),
            _ => Err(format!(
                "no distribution `{kind}` with these keys; write `normal` with `std`, `uniform` with `high`, `zipf` with `high` and \
                 perhaps `ignored`, or `bytes`"
            )),
        }
    }
}

/// How an arm is spoken to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// It speaks `docs/bench-protocol.md`.
    #[default]
    Protocol,
    /// It speaks nothing: each call is a process, timed as a whole.
    Plain,
}

/// What the outputs of one arm on the same input must be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OutputRule {
    /// The same each time.
    #[default]
    Constant,
    /// Anything: the arm keeps a state.
    Any,
}

/// A command to be measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arm {
    /// Names it.
    pub name: String,
    /// Program and arguments; no shell.
    pub command: Vec<String>,
    /// How it is spoken to.
    #[serde(default)]
    pub mode: Mode,
    /// Added to its environment.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Of its outputs.
    #[serde(default)]
    pub output: OutputRule,
}

/// A parity rule between every arm and the baseline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckRule {
    /// A metric of `run`, or `output` for equal digests.
    pub metric: String,
    /// Allowed difference.
    #[serde(default)]
    pub absolute: f64,
    /// Allowed difference as a share of the baseline's magnitude.
    #[serde(default)]
    pub relative: f64,
    /// Whether it must hold in each pair, not only before timing.
    #[serde(default)]
    pub every_pair: bool,
}

fn one() -> u64 {
    1
}

fn four() -> usize {
    4
}

fn twenty() -> usize {
    20
}

fn yes() -> bool {
    true
}

impl Plan {
    /// Reads and checks a plan; `set` goes before the environment, which goes before `[vars]`.
    pub fn read(path: &Path, set: &BTreeMap<String, String>) -> Result<(Plan, String)> {
        let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
        let plan = Plan::parse(&text, set, |name| std::env::var(name).ok()).map_err(|e| match e {
            Error::Config { what, hint } => Error::config(format!("{}: {what}", path.display()), hint),
            e => e,
        })?;
        Ok((plan, text))
    }

    /// Checks the text of a plan.
    pub fn parse(text: &str, set: &BTreeMap<String, String>, env: impl Fn(&str) -> Option<String>) -> Result<Plan> {
        let mut plan: Plan = toml::from_str(text)
            .map_err(|e| Error::config(e.to_string().trim_end().to_owned(), "see bench/plans for examples"))?;
        for name in set.keys() {
            if !plan.vars.contains_key(name) {
                return Err(Error::config(
                    format!("`--set {name}=` names no variable of this plan"),
                    "declare it in [vars]",
                ));
            }
        }
        for (name, value) in &mut plan.vars {
            if let Some(other) = set.get(name).cloned().or_else(|| env(name)) {
                *value = other;
            }
        }
        plan.check()?;
        Ok(plan)
    }

    fn check(&self) -> Result<()> {
        let fail = |what: String, hint: &str| Err(Error::config(what, hint));
        if !is_name(&self.name) {
            return fail(format!("the plan's name `{}` cannot name a file", self.name), "use letters, digits, - and _");
        }
        if self.arms.is_empty() || self.cases.is_empty() {
            return fail(
                "a plan needs at least one [[arms]] and one [[cases]]".to_owned(),
                "see bench/plans for examples",
            );
        }
        if self.arms.len() == 1 && !self.control {
            return fail("one arm alone is compared with nothing".to_owned(), "add an arm, or leave `control` on");
        }
        for names in
            [self.arms.iter().map(|a| &a.name).collect::<Vec<_>>(), self.cases.iter().map(|c| &c.name).collect()]
        {
            for (i, name) in names.iter().enumerate() {
                if !is_name(name) || names[..i].contains(name) {
                    return fail(
                        format!("`{name}` is no name or stands twice"),
                        "use letters, digits, - and _, each once",
                    );
                }
            }
        }
        if let Some(name) = self.baseline.as_ref().filter(|b| self.arms.iter().all(|a| a.name != **b)) {
            return fail(format!("the baseline `{name}` is no arm"), "name one of [[arms]]");
        }
        if self.kind == Kind::Confirm && self.pairs < LEAST_CONFIRM {
            return fail(
                format!("{} pairs confirm nothing", self.pairs),
                "a confirmation takes at least 60 pairs; or use kind = \"screen\"",
            );
        }
        if !(2..=100_000).contains(&self.pairs) {
            return fail(format!("{} pairs", self.pairs), "use 20 to screen and 60 or more to confirm");
        }
        for (what, value) in [
            ("limits.call_s", self.limits.call_s),
            ("limits.start_s", self.limits.start_s),
            ("limits.load", self.limits.load),
            ("cool_down.max_seconds", self.cool_down.max_seconds + 1.0),
            ("warm_up.seconds", self.warm_up.seconds + 1.0),
            ("cool_down.seconds", self.cool_down.seconds + 1.0),
        ] {
            if !(value > 0.0 && value < 1e6) {
                return fail(format!("{what} is out of range"), "use seconds above 0");
            }
        }
        for case in &self.cases {
            if case.ring < 4 && !case.tensors.is_empty() {
                return fail(
                    format!("case `{}` repeats {} inputs, which hides the caches", case.name, case.ring),
                    "use a ring of at least 4 distinct inputs",
                );
            }
            for tensor in &case.tensors {
                let elements = tensor.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
                if !elements.is_some_and(|n| n > 0 && n <= 1 << 28) || !is_name(&tensor.name) {
                    return fail(
                        format!("tensor `{}` of case `{}` has no usable shape or name", tensor.name, case.name),
                        "1 to 2^28 elements",
                    );
                }
                let high = match tensor.distribution {
                    Distribution::Uniform { high } | Distribution::Zipf { high, .. } => high,
                    _ => 1,
                };
                if high == 0 || high > i32::MAX as u32 {
                    return fail(format!("tensor `{}`: `high` is {high}", tensor.name), "use 1 to 2^31 - 1");
                }
            }
        }
        for arm in &self.arms {
            if arm.command.is_empty() {
                return fail(
                    format!("arm `{}` has no command", arm.name),
                    "give the program and its arguments as a list",
                );
            }
            for case in &self.cases {
                for word in arm.command.iter().chain(arm.env.values()) {
                    self.expand(word, case, &|_| Some(String::new()))?;
                }
            }
        }
        Ok(())
    }

    /// The arm that all others are compared with.
    pub fn baseline(&self) -> &str {
        self.baseline.as_deref().unwrap_or(&self.arms[0].name)
    }

    /// Whether a control whose interval excludes 1 spoils the session.
    pub fn strict_control(&self) -> bool {
        self.strict_control.unwrap_or(self.kind == Kind::Confirm)
    }

    /// Replaces `${NAME}` by variables, and `{key}` by the case's parameters or the file of a tensor.
    pub fn expand(&self, word: &str, case: &Case, file: &dyn Fn(&str) -> Option<String>) -> Result<String> {
        let mut out = String::new();
        let mut rest = word;
        while let Some(open) = rest.find('{') {
            let variable = rest[..open].ends_with('$');
            out += &rest[..open - variable as usize];
            let Some(close) = rest[open..].find('}') else {
                return Err(Error::config(
                    format!("`{word}` opens a brace and does not close it"),
                    "write ${VARIABLE} or {parameter}",
                ));
            };
            let name = &rest[open + 1..open + close];
            let value = if variable {
                self.vars.get(name).cloned()
            } else {
                let param = case.params.get(name).map(|v| v.as_str().map_or_else(|| v.to_string(), str::to_owned));
                param.or_else(|| case.tensors.iter().any(|t| t.name == name).then(|| file(name))?)
            };
            let Some(value) = value else {
                return Err(Error::config(
                    format!("`{word}`: `{name}` is no variable, parameter or tensor of case `{}`", case.name),
                    "declare it in [vars], in the case's params or tensors",
                ));
            };
            out += &value;
            rest = &rest[open + close + 1..];
        }
        Ok(out + rest)
    }
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= 64 && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = r#"
name = "small"
pairs = 20
[vars]
TOOL = "sum"
[[cases]]
name = "one"
params = { size = 8 }
[[cases.tensors]]
name = "x"
shape = [4]
distribution = { kind = "normal", std = 1.0 }
[[arms]]
name = "a"
command = ["${TOOL}", "--size={size}", "{x}"]
"#;

    fn parse(text: &str) -> Result<Plan> {
        Plan::parse(text, &BTreeMap::new(), |_| None)
    }

    #[test]
    fn words_are_expanded_from_variables_parameters_and_files() {
        let plan = parse(SMALL).unwrap();
        let expand = |word| plan.expand(word, &plan.cases[0], &|n| Some(format!("/tmp/{n}")));
        assert_eq!(expand("${TOOL} --size={size} {x}!").unwrap(), "sum --size=8 /tmp/x!");
        assert!(expand("{y}").unwrap_err().to_string().contains("`y`"));
        assert!(expand("{size").unwrap_err().to_string().contains("close"));
    }

    #[test]
    fn set_goes_before_the_environment_which_goes_before_the_plan() {
        let env = |name: &str| (name == "TOOL").then(|| "from-env".to_owned());
        let tool = |set: &BTreeMap<String, String>| Plan::parse(SMALL, set, env).map(|p| p.vars["TOOL"].clone());
        assert_eq!(tool(&BTreeMap::new()).unwrap(), "from-env");
        assert_eq!(tool(&BTreeMap::from([("TOOL".into(), "from-set".into())])).unwrap(), "from-set");
        assert!(tool(&BTreeMap::from([("TOLL".into(), "x".into())])).is_err());
    }

    #[test]
    fn plans_that_cannot_be_honest_are_refused() {
        for (from, to, what) in [
            ("pairs = 20", "pairs = 59\nkind = \"confirm\"", "confirm nothing"),
            ("pairs = 20", "pairs = 1", "1 pairs"),
            ("pairs = 20", "paris = 20", "unknown field"),
            ("pairs = 20", "control = false", "compared with nothing"),
            ("pairs = 20", "baseline = \"z\"", "is no arm"),
            ("params", "ring = 2\nparams", "hides the caches"),
            ("{size}", "{length}", "`length`"),
            ("shape = [4]", "shape = [0]", "usable shape"),
            ("name = \"small\"", "name = \"../small\"", "cannot name a file"),
        ] {
            let error = parse(&SMALL.replacen(from, to, 1)).unwrap_err().to_string();
            assert!(error.contains(what), "{to}: {error}");
        }
    }

    #[test]
    fn the_first_arm_is_the_baseline_and_only_a_confirmation_is_strict() {
        let plan = parse(SMALL).unwrap();
        assert_eq!((plan.baseline(), plan.strict_control()), ("a", false));
        let confirm = parse(&SMALL.replace("pairs = 20", "pairs = 60\nkind = \"confirm\"")).unwrap();
        assert!(confirm.strict_control());
    }
}
