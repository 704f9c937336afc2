//! Carries out a plan and keeps the record. One arm's failure is a row; the rest of the plan goes on.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tilewright_core::{Error, Result};

use crate::arm::{Fault, Launch, Speaker, run_whole};
use crate::plan::{Case, CheckRule, MemoryMode, Mode, OutputRule, Plan};
use crate::protocol::{Answer, InputFile, Metric, Ran, Request, VERSION};
use crate::record::*;
use crate::summary::summarise;
use crate::{inputs, machine, order, sys};

/// What the command line adds to a plan.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Goes before the plan's variables.
    pub set: BTreeMap<String, String>,
    /// Instead of the plan's.
    pub kind: Option<Kind>,
    /// Instead of the plan's.
    pub pairs: Option<usize>,
    /// Instead of the plan's.
    pub seed: Option<u64>,
    /// Only cases with these names; all when empty.
    pub cases: Vec<String>,
    /// Confirm on a loaded machine too, and label it.
    pub force: bool,
    /// Folder of records.
    pub out: PathBuf,
    /// A partial record to go on with.
    pub resume: Option<PathBuf>,
    /// As typed, for the record.
    pub command: String,
}

/// Told to the watcher after every call.
#[derive(Debug, Clone)]
pub struct Progress<'a> {
    /// The case.
    pub case: &'a str,
    /// `warm-up`, `pair`, `memory` or an error in words.
    pub what: &'a str,
    /// Calls done, of the whole plan.
    pub done: usize,
    /// Calls in all, warm-up aside.
    pub total: usize,
    /// Since this start.
    pub elapsed: Duration,
    /// What the pairs left of this case take at its own pace; calls of different cases differ too much for a figure of the whole plan.
    pub case_left: Option<Duration>,
}

/// Runs a plan; the record is on disk when this returns, and at least every ten seconds before.
pub fn run(
    path: &Path,
    options: &Options,
    stop: &AtomicBool,
    watch: &mut dyn FnMut(&Progress),
) -> Result<(Record, PathBuf)> {
    let (mut plan, text) = Plan::read(path, &options.set)?;
    let old = options.resume.as_deref().map(Record::read).transpose()?;
    // A partial record says itself what was asked for.
    plan.kind = options.kind.or(old.as_ref().map(|r| r.kind)).unwrap_or(plan.kind);
    plan.pairs = options.pairs.or(old.as_ref().map(|r| r.settings.pairs)).unwrap_or(plan.pairs);
    plan.seed = options.seed.or(old.as_ref().map(|r| r.settings.seed)).unwrap_or(plan.seed);
    let mut cases = options.cases.clone();
    if let (true, Some(old)) = (cases.is_empty(), &old) {
        cases = old.settings.cases.iter().map(|c| c.name.clone()).collect();
    }
    if let Some(name) = cases.iter().find(|n| plan.cases.iter().all(|c| c.name != **n)) {
        return Err(Error::config(format!("the plan has no case `{name}`"), "name one of its [[cases]]"));
    }
    plan.cases.retain(|c| cases.is_empty() || cases.contains(&c.name));
    if plan.kind == Kind::Confirm && plan.pairs < crate::stats::LEAST_CONFIRM {
        return Err(Error::config(
            format!("{} pairs confirm nothing", plan.pairs),
            "use --pairs 60 or more, or --kind screen",
        ));
    }
    let names: Vec<&str> = plan.cases.iter().map(|c| c.name.as_str()).collect();
    let asked = format!("{text}\n{:?} {} {} {names:?}", plan.kind, plan.pairs, plan.seed);
    let fresh = new_record(&plan, inputs::sha256(asked.as_bytes()), options)?;
    let (record, file) = match (old, &options.resume) {
        (Some(old), Some(file)) => (take_up(old, fresh, file)?, file.clone()),
        _ => {
            let file = options.out.join(fresh.file_name());
            (fresh, file)
        }
    };
    let begin = Instant::now();
    let total = plan.cases.len() * plan.pairs * record.arms.len();
    let mut session = Session {
        plan: &plan,
        record,
        file,
        begin,
        saved: begin,
        stop,
        watch,
        done: 0,
        total,
        pace: None,
        case_end: 0,
    };
    session.record.segments.push(Segment { started: machine::now(), load: sys::load() });
    let unquiet = machine::unquiet(plan.limits.load);
    if plan.kind == Kind::Confirm && !unquiet.is_empty() {
        if !options.force {
            session.record.status = Status::RefusedEnvironment;
            session.record.reason = Some(unquiet.join("; "));
            session.save()?;
            return Ok((session.record, session.file));
        }
        session.record.forced.extend(unquiet);
    }
    session.record.status = Status::Partial;
    session.record.reason = Some("not finished yet".to_owned());
    session.save()?;
    let mut interrupted = false;
    for case in &plan.cases {
        if session.run_case(case)? == Flow::Stop {
            interrupted = true;
            break;
        }
        session.save()?;
    }
    session.record.finished = Some(machine::now());
    (session.record.status, session.record.reason) = match (interrupted, session.record.errors.is_empty()) {
        (true, _) => (Status::Partial, Some("interrupted; `bench run PLAN --resume RECORD` goes on".to_owned())),
        (_, false) => (Status::Error, Some(format!("{} error rows", session.record.errors.len()))),
        _ => (Status::Ok, None),
    };
    session.save()?;
    Ok((session.record, session.file))
}

fn new_record(plan: &Plan, plan_sha256: String, options: &Options) -> Result<Record> {
    let mut arms = Vec::new();
    for arm in &plan.arms {
        let command: Vec<String> = arm
            .command
            .iter()
            .map(|w| plan.expand(w, &plan.cases[0], &|_| Some(String::new())))
            .collect::<Result<_>>()?;
        let program = machine::find_program(&command[0]);
        arms.push(ArmRow {
            name: arm.name.clone(),
            arm: arm.clone(),
            control: false,
            program_sha256: program.and_then(|p| inputs::sha256_of_file(&p)),
            files_sha256: machine::digests_of_files(&command[1..]),
            hello: Default::default(),
        });
        // What a plan spells out may hold a path of this machine; `${NAME}` does not.
        let row = arms.last_mut().map(|r| &mut r.arm);
        row.into_iter()
            .for_each(|a| a.command.iter_mut().chain(a.env.values_mut()).for_each(|w| *w = machine::redact(w)));
    }
    if plan.control {
        let of = arms.iter().find(|a| a.name == plan.baseline()).cloned();
        arms.extend(of.map(|a| ArmRow { name: format!("{}#2", a.name), control: true, ..a }));
    }
    let started = machine::now();
    Ok(Record {
        schema: SCHEMA,
        session_id: inputs::sha256(format!("{started} {} {}", std::process::id(), plan.name).as_bytes())[..16]
            .to_owned(),
        plan: plan.name.clone(),
        description: plan.description.clone(),
        plan_sha256,
        kind: plan.kind,
        status: Status::Partial,
        reason: None,
        forced: vec![],
        started,
        finished: None,
        command: machine::redact(&options.command),
        settings: Settings {
            pairs: plan.pairs,
            seed: plan.seed,
            baseline: plan.baseline().to_owned(),
            control: plan.control,
            strict_control: plan.strict_control(),
            primary: plan.primary,
            warm_up: plan.warm_up,
            cool_down: plan.cool_down,
            memory: plan.memory,
            limits: plan.limits,
            checks: plan.checks.clone(),
            cases: plan
                .cases
                .iter()
                .map(|c| CaseRow {
                    name: c.name.clone(),
                    params: c.params.clone(),
                    ring: c.ring,
                    tensors: c.tensors.clone(),
                })
                .collect(),
        },
        fingerprint: machine::fingerprint(),
        arms,
        inputs: vec![],
        order: BTreeMap::new(),
        segments: vec![],
        conditions: vec![],
        samples: vec![],
        checks: vec![],
        errors: vec![],
        summary: Default::default(),
    })
}

/// Goes on with a partial record if it is about the same things.
fn take_up(old: Record, new: Record, file: &Path) -> Result<Record> {
    let refuse =
        |what: &str| Err(Error::config(format!("{}: {what}", file.display()), "start a new run without --resume"));
    if old.status != Status::Partial {
        return refuse("is not partial");
    }
    if old.plan_sha256 != new.plan_sha256 {
        return refuse("was made with another plan, kind, number of pairs, seed or cases");
    }
    if old.fingerprint.cpu != new.fingerprint.cpu || old.fingerprint.cores != new.fingerprint.cores {
        return refuse("was made on another machine");
    }
    let programs =
        |r: &Record| r.arms.iter().map(|a| (a.program_sha256.clone(), a.files_sha256.clone())).collect::<Vec<_>>();
    if programs(&old) != programs(&new) || old.fingerprint.env != new.fingerprint.env {
        return refuse("was made with other programs or environment variables");
    }
    Ok(old)
}

#[derive(PartialEq)]
enum Flow {
    Go,
    Stop,
}

struct Session<'a> {
    plan: &'a Plan,
    record: Record,
    file: PathBuf,
    begin: Instant,
    saved: Instant,
    stop: &'a AtomicBool,
    watch: &'a mut dyn FnMut(&Progress),
    done: usize,
    total: usize,
    /// Since when and from which call on pairs of this case are measured.
    pace: Option<(Instant, usize)>,
    /// The call that ends this case.
    case_end: usize,
}

/// An arm in a case.
struct Seat {
    speaker: Option<Speaker>,
    alive: bool,
    /// Output seen for each input.
    outputs: HashMap<usize, String>,
}

/// A case under way.
struct Stage<'a> {
    case: &'a Case,
    files: Vec<InputFile>,
    seats: Vec<Seat>,
}

/// A call to be made.
#[derive(Clone, Copy)]
struct Call {
    arm: usize,
    phase: Phase,
    pair: usize,
    slot: usize,
    input: usize,
}

impl Session<'_> {
    fn save(&mut self) -> Result<()> {
        self.record.summary = summarise(&self.record);
        self.saved = Instant::now();
        self.record.write(&self.file)
    }

    fn tell(&mut self, case: &str, what: &str) {
        let case_left = self.pace.filter(|(_, from)| what == "pair" && self.done > *from).map(|(since, from)| {
            since.elapsed().mul_f64(self.case_end.saturating_sub(self.done) as f64 / (self.done - from) as f64)
        });
        let progress =
            Progress { case, what, done: self.done, total: self.total, elapsed: self.begin.elapsed(), case_left };
        (self.watch)(&progress);
    }

    fn run_case(&mut self, case: &Case) -> Result<Flow> {
        let arms = self.record.arms.len();
        // What a resumed record holds of this case.
        let complete = (0..).take_while(|r| self.round_is_complete(&case.name, *r)).count();
        let failed = self.record.errors.iter().any(|e| e.case == case.name);
        if complete >= self.plan.pairs && !self.lacks_memory(&case.name) || (failed && complete > 0) {
            self.done += self.plan.pairs * arms;
            return Ok(Flow::Go);
        }
        for sample in self.record.samples.iter_mut().filter(|s| s.case == case.name) {
            let old = matches!(sample.phase, Phase::First | Phase::WarmUp | Phase::Memory);
            if old || sample.pair >= complete {
                sample.phase = Phase::Cut;
            }
        }
        self.done += complete * arms;
        self.case_end = self.done + self.plan.pairs.saturating_sub(complete) * arms;

        let folder = tempfile::tempdir().map_err(Error::io("create", &std::env::temp_dir()))?;
        let files = inputs::write_ring(case, self.plan.seed, folder.path())?;
        self.record.inputs.retain(|i| i.case != case.name);
        self.record.inputs.extend(files.iter().map(|f| InputRow {
            case: case.name.clone(),
            index: f.index,
            name: f.name.clone(),
            shape: f.shape.clone(),
            dtype: f.dtype.clone(),
            sha256: f.sha256.clone(),
        }));
        let order = order::rounds(arms, self.plan.pairs, self.plan.seed);
        self.record.order.insert(case.name.clone(), order.clone());
        self.sleep(self.plan.cool_down.seconds);
        let (busy, start) = (machine::busy_seconds(), Instant::now());
        let first_temperature = self.condition(case, "before", None);

        let seats = (0..arms).map(|_| Seat { speaker: None, alive: true, outputs: HashMap::new() }).collect();
        let mut stage = Stage { case, files, seats };
        let mut flow = self.begin_case(&mut stage)?;
        if flow == Flow::Go {
            flow = self.warm_up(&mut stage)?;
        }
        self.pace = Some((Instant::now(), self.done));
        for (pair, round) in order.iter().enumerate().skip(complete) {
            if flow == Flow::Stop || !self.worth_going_on(&stage) {
                break;
            }
            self.wait_until_cool(first_temperature);
            flow = self.round(&mut stage, Phase::Pair, pair, round)?;
        }
        self.pace = None;
        let own: f64 = self.record.samples.iter().filter(|s| s.case == case.name).filter_map(|s| s.cpu_ns).sum::<u64>()
            as f64
            / 1e9;
        let foreign = busy.zip(machine::busy_seconds()).map(|(from, to)| {
            // Spinning threads of idle arms count as foreign: they take the cores from the arm that is timed.
            ((to - from - own) / (start.elapsed().as_secs_f64() * machine::cores() as f64)).clamp(0.0, 1.0)
        });
        self.condition(case, "after", foreign.filter(|_| complete == 0));
        for arm in 0..arms {
            if let (Some(speaker), true) = (stage.seats[arm].speaker.take(), flow == Flow::Go)
                && let Err(fault) = speaker.quit(Duration::from_secs(10))
            {
                self.fault(&mut stage, arm, "quit", fault);
            }
        }
        if flow == Flow::Go && self.plan.memory.mode == MemoryMode::Fresh {
            flow = self.fresh_memory(&mut stage)?;
        }
        Ok(flow)
    }

    fn round_is_complete(&self, case: &str, round: usize) -> bool {
        let seen = self.record.samples.iter().filter(|s| s.case == case && s.phase == Phase::Pair && s.pair == round);
        round < self.plan.pairs && seen.count() == self.record.arms.len()
    }

    fn lacks_memory(&self, case: &str) -> bool {
        self.plan.memory.mode == MemoryMode::Fresh
            && !self.record.samples.iter().any(|s| s.case == case && s.phase == Phase::Memory)
    }

    fn worth_going_on(&self, stage: &Stage) -> bool {
        let baseline = self.baseline();
        stage.seats[baseline].alive && stage.seats.iter().enumerate().any(|(i, s)| i != baseline && s.alive)
    }

    fn baseline(&self) -> usize {
        self.record.arms.iter().position(|a| a.name == self.record.settings.baseline).unwrap_or(0)
    }

    fn launch(&self, stage: &Stage, arm: usize, input: usize) -> Result<Launch> {
        let name = self.record.arms[arm].name.trim_end_matches("#2");
        let arm = self.plan.arms.iter().find(|a| a.name == name).unwrap_or(&self.plan.arms[0]);
        let file =
            |tensor: &str| stage.files.iter().find(|f| f.name == tensor && f.index == input).map(|f| f.path.clone());
        let command = arm.command.iter().map(|w| self.plan.expand(w, stage.case, &file)).collect::<Result<_>>()?;
        let env = arm
            .env
            .iter()
            .map(|(k, v)| Ok((k.clone(), self.plan.expand(v, stage.case, &file)?)))
            .collect::<Result<_>>()?;
        Ok(Launch { command, env })
    }

    /// Starts a speaker and lets it prepare.
    fn start(&mut self, stage: &Stage, arm: usize) -> Result<Result<Speaker, Fault>> {
        let launch = self.launch(stage, arm, 0)?;
        let limit = Duration::from_secs_f64(self.plan.limits.start_s);
        let prepare =
            Request::Prepare { seed: self.plan.seed, params: stage.case.params.clone(), inputs: stage.files.clone() };
        let stop = self.stop;
        let steps = || {
            let mut speaker = Speaker::start(&launch)?;
            let hello = speaker.ask(&Request::Hello { protocol: VERSION }, limit, stop)?;
            let prepared = speaker.ask(&prepare, limit, stop)?;
            Ok((speaker, hello, prepared))
        };
        Ok(match steps() {
            Err(fault) => Err(fault),
            Ok((speaker, hello, prepared)) => {
                if let Answer::Hello(mut hello) = hello {
                    for text in hello.fingerprint.values_mut() {
                        if let Some(words) = text.as_str() {
                            *text = machine::redact(words).into();
                        }
                    }
                    self.record.arms[arm].hello = hello;
                }
                let read = match prepared {
                    Answer::Prepared(read, _) => read,
                    _ => vec![],
                };
                let wrong = stage
                    .files
                    .iter()
                    .find(|f| !read.iter().any(|(i, n, s)| (*i, n, s) == (f.index, &f.name, &f.sha256)));
                match wrong {
                    Some(file) => Err(Fault::new(
                        FaultKind::WrongInput,
                        format!("did not tell the SHA-256 {} of `{}` number {}", file.sha256, file.name, file.index),
                    )),
                    None => Ok(speaker),
                }
            }
        })
    }

    /// Starts all arms and makes the first call of each, whose time is kept only when every check held.
    fn begin_case(&mut self, stage: &mut Stage) -> Result<Flow> {
        for arm in 0..stage.seats.len() {
            if self.record.arms[arm].arm.mode == Mode::Protocol {
                match self.start(stage, arm)? {
                    Ok(speaker) => stage.seats[arm].speaker = Some(speaker),
                    Err(fault) if fault.kind == FaultKind::Interrupted => return Ok(Flow::Stop),
                    Err(fault) => self.fault(stage, arm, "start", fault),
                }
            }
        }
        // The baseline first: all others are held against it.
        let baseline = self.baseline();
        let mut round: Vec<usize> = (0..stage.seats.len()).collect();
        round.sort_by_key(|a| *a != baseline);
        self.round(stage, Phase::First, 0, &round)
    }

    fn warm_up(&mut self, stage: &mut Stage) -> Result<Flow> {
        let wanted = self.plan.warm_up;
        let round: Vec<usize> = (0..stage.seats.len()).collect();
        for pair in 0.. {
            // By rounds, so that arms which keep a state, as training does, have done the same number of steps.
            let spent = |s: &Self, arm: usize| {
                let calls = s
                    .record
                    .samples
                    .iter()
                    .filter(|x| x.case == stage.case.name && x.arm == arm && x.phase == Phase::WarmUp);
                calls.map(|x| x.round_trip_ns.map_or(x.wall_ns, |n| n as f64)).sum::<f64>() / 1e9
            };
            let enough =
                (0..stage.seats.len()).all(|arm| !stage.seats[arm].alive || spent(self, arm) >= wanted.seconds);
            if pair >= wanted.calls && enough || !self.worth_going_on(stage) {
                break;
            }
            self.tell(&stage.case.name, "warm-up");
            if self.round(stage, Phase::WarmUp, pair, &round)? == Flow::Stop {
                return Ok(Flow::Stop);
            }
        }
        Ok(Flow::Go)
    }

    /// One call of every living arm on the same input.
    fn round(&mut self, stage: &mut Stage, phase: Phase, pair: usize, round: &[usize]) -> Result<Flow> {
        let baseline = self.baseline();
        // The ring turns on through warm-up and pairs.
        let input = pair % stage.case.ring.max(1);
        let mut results: Vec<(usize, Ran)> = Vec::new();
        let first_sample = self.record.samples.len();
        for (slot, &arm) in round.iter().enumerate() {
            if self.stop.load(Ordering::Relaxed) {
                return Ok(Flow::Stop);
            }
            if !stage.seats[arm].alive || (phase == Phase::First && arm != baseline && !stage.seats[baseline].alive) {
                continue;
            }
            std::thread::sleep(Duration::from_millis(self.plan.cool_down.pause_ms));
            let call = Call { arm, phase, pair, slot, input };
            match self.call(stage, call)? {
                Ok((sample, ran)) => {
                    self.record.samples.push(sample);
                    results.push((arm, ran));
                }
                Err(fault) if fault.kind == FaultKind::Interrupted => return Ok(Flow::Stop),
                Err(fault) => self.fault(stage, arm, &stage_name(phase, pair), fault),
            }
            if phase == Phase::Pair {
                self.done += 1;
                self.tell(&stage.case.name, "pair");
            }
        }
        self.hold_against_baseline(stage, phase, pair, &results, first_sample);
        if self.saved.elapsed() > Duration::from_secs(10) {
            self.save()?;
        }
        Ok(Flow::Go)
    }

    /// One call; the sample and what the arm told.
    fn call(&mut self, stage: &mut Stage, call: Call) -> Result<Result<(Sample, Ran), Fault>> {
        let limit = Duration::from_secs_f64(self.plan.limits.call_s);
        let mut sample = Sample {
            case: stage.case.name.clone(),
            arm: call.arm,
            phase: call.phase,
            pair: call.pair,
            slot: call.slot,
            input: call.input,
            at_ms: (self.begin.elapsed().as_secs_f64() * 1e6).round() / 1e3,
            wall_ns: 0.0,
            device_ns: None,
            cpu_ns: None,
            round_trip_ns: None,
            clock_mhz: None,
            temp_c: None,
            live_bytes: None,
            peak_bytes: None,
            rss_before: None,
            rss_peak: None,
            output: None,
            metrics: BTreeMap::new(),
        };
        let rule = self.record.arms[call.arm].arm.output;
        let ran = if self.record.arms[call.arm].arm.mode == Mode::Plain {
            let launch = self.launch(stage, call.arm, call.input)?;
            let own = sys::status_bytes(std::process::id(), "VmHWM:");
            match run_whole(&launch, limit, self.stop) {
                Err(fault) => return Ok(Err(fault)),
                Ok(whole) => {
                    sample.cpu_ns = Some(whole.cpu.as_nanos() as u64);
                    (sample.rss_before, sample.rss_peak) = (own, Some(whole.peak_rss));
                    Ran { ns: whole.wall.as_nanos() as f64, output: Some(whole.output), ..Ran::default() }
                }
            }
        } else {
            let seat = &mut stage.seats[call.arm];
            let Some(speaker) = seat.speaker.as_mut() else {
                return Ok(Err(Fault::new(FaultKind::Crash, "no process")));
            };
            let ran = run_speaker(speaker, &mut sample, self.plan.memory.mode, limit, self.stop);
            match ran {
                Ok(ran) => ran,
                Err(fault) => {
                    seat.speaker = None;
                    return Ok(Err(fault));
                }
            }
        };
        sample.wall_ns = ran.ns;
        (sample.device_ns, sample.live_bytes, sample.peak_bytes) = (ran.device_ns, ran.live_bytes, ran.peak_bytes);
        sample.output = ran.output.clone();
        (sample.clock_mhz, sample.temp_c) = (machine::clock_mhz(), machine::temperature());
        for (name, metric) in &ran.metrics {
            if let Metric::Number(n) = metric {
                sample.metrics.insert(name.clone(), *n);
            }
        }
        if let (Some(output), OutputRule::Constant) = (&ran.output, rule) {
            let seen = stage.seats[call.arm].outputs.entry(call.input).or_insert_with(|| output.clone());
            if seen != output {
                let what = format!("another output for input {} than before: {output}, not {seen}", call.input);
                return Ok(Err(Fault::new(FaultKind::ChangedOutput, what)));
            }
        }
        Ok(Ok((sample, ran)))
    }

    /// Parity of every arm with the baseline; an arm that fails is out, and its times of this round with it.
    fn hold_against_baseline(
        &mut self,
        stage: &mut Stage,
        phase: Phase,
        pair: usize,
        results: &[(usize, Ran)],
        first_sample: usize,
    ) {
        let baseline = self.baseline();
        let Some((_, expected)) = results.iter().find(|(arm, _)| *arm == baseline) else { return };
        for (arm, ran) in results.iter().filter(|(arm, _)| *arm != baseline) {
            for rule in self.plan.checks.iter().filter(|r| phase == Phase::First || r.every_pair) {
                let (difference, tolerance) = compare(rule, expected, ran);
                let pass = difference <= tolerance;
                if phase == Phase::First || !pass {
                    self.record.checks.push(CheckRow {
                        case: stage.case.name.clone(),
                        arm: self.record.arms[*arm].name.clone(),
                        metric: rule.metric.clone(),
                        // JSON has no infinity; a metric that is missing differs by more than any tolerance.
                        difference: difference.min(f64::MAX),
                        tolerance,
                        pass,
                        pair: (phase == Phase::Pair).then_some(pair),
                    });
                }
                if !pass {
                    let what = format!(
                        "`{}` differs from the baseline's by {difference:.3e}, allowed {tolerance:.3e}",
                        rule.metric
                    );
                    self.fault(stage, *arm, &stage_name(phase, pair), Fault::new(FaultKind::Parity, what));
                    let mut at = 0;
                    self.record.samples.retain(|s| {
                        at += 1;
                        at <= first_sample || s.arm != *arm
                    });
                    break;
                }
            }
        }
    }

    fn fresh_memory(&mut self, stage: &mut Stage) -> Result<Flow> {
        let arms = self.record.arms.len();
        for (pair, round) in order::rounds(arms, self.plan.memory.runs, self.plan.seed ^ 1).into_iter().enumerate() {
            for (slot, arm) in round.into_iter().enumerate() {
                if !stage.seats[arm].alive || self.record.arms[arm].arm.mode == Mode::Plain {
                    continue;
                }
                self.tell(&stage.case.name, "memory");
                let outcome = match self.start(stage, arm)? {
                    Err(fault) => Err(fault),
                    Ok(speaker) => {
                        stage.seats[arm].speaker = Some(speaker);
                        // A fresh process of an arm with a state starts from the beginning; its outputs are those of its first call.
                        stage.seats[arm].outputs.clear();
                        self.call(stage, Call { arm, phase: Phase::Memory, pair, slot, input: 0 })?
                    }
                };
                match outcome {
                    Ok((sample, _)) => self.record.samples.push(sample),
                    Err(fault) if fault.kind == FaultKind::Interrupted => return Ok(Flow::Stop),
                    Err(fault) => self.fault(stage, arm, "memory", fault),
                }
                if let Some(speaker) = stage.seats[arm].speaker.take()
                    && let Err(fault) = speaker.quit(Duration::from_secs(10))
                {
                    self.fault(stage, arm, "quit", fault);
                }
            }
        }
        Ok(Flow::Go)
    }

    fn fault(&mut self, stage: &mut Stage, arm: usize, at: &str, fault: Fault) {
        stage.seats[arm].alive = false;
        stage.seats[arm].speaker = None;
        let name = self.record.arms[arm].name.clone();
        let message = machine::redact(&fault.message);
        self.tell(&stage.case.name, &format!("error: {name} at {at}: {message}"));
        self.record.errors.push(ErrorRow {
            case: stage.case.name.clone(),
            arm: name,
            stage: at.to_owned(),
            kind: fault.kind,
            message,
            stderr: machine::redact(&fault.stderr),
        });
    }

    fn condition(&mut self, case: &Case, when: &str, foreign_cpu: Option<f64>) -> Option<f64> {
        let temp_c = machine::temperature();
        self.record.conditions.push(Condition {
            case: case.name.clone(),
            when: when.to_owned(),
            load: sys::load(),
            clock_mhz: machine::clock_mhz(),
            temp_c,
            foreign_cpu,
        });
        temp_c
    }

    fn wait_until_cool(&self, first: Option<f64>) {
        let (Some(within), Some(first)) = (self.plan.cool_down.within_c, first) else { return };
        let end = Instant::now() + Duration::from_secs_f64(self.plan.cool_down.max_seconds);
        while machine::temperature().is_some_and(|t| t > first + within)
            && Instant::now() < end
            && !self.stop.load(Ordering::Relaxed)
        {
            self.sleep(0.5);
        }
    }

    fn sleep(&self, seconds: f64) {
        let end = Instant::now() + Duration::from_secs_f64(seconds);
        while Instant::now() < end && !self.stop.load(Ordering::Relaxed) {
            std::thread::sleep(end.saturating_duration_since(Instant::now()).min(Duration::from_millis(100)));
        }
    }
}

fn stage_name(phase: Phase, pair: usize) -> String {
    match phase {
        Phase::First => "parity".to_owned(),
        Phase::WarmUp => "warm_up".to_owned(),
        Phase::Memory => "memory".to_owned(),
        Phase::Pair | Phase::Cut => format!("pair {pair}"),
    }
}

/// One `run` of a speaker; everything that is read of the process lies outside its window.
fn run_speaker(
    speaker: &mut Speaker,
    sample: &mut Sample,
    memory: MemoryMode,
    limit: Duration,
    stop: &AtomicBool,
) -> Result<Ran, Fault> {
    let pid = speaker.pid();
    if memory != MemoryMode::None {
        sample.rss_before = sys::status_bytes(pid, "VmRSS:");
        if memory == MemoryMode::Live {
            sys::reset_peak_rss(pid);
        }
    }
    let cpu = sys::cpu_ns(pid);
    let start = Instant::now();
    let answer = speaker.ask(&Request::Run { input: sample.input }, limit, stop)?;
    let round_trip = start.elapsed();
    sample.cpu_ns = sys::cpu_ns(pid).zip(cpu).map(|(after, before)| after.saturating_sub(before));
    sample.round_trip_ns = Some(round_trip.as_nanos() as u64);
    if memory != MemoryMode::None {
        sample.rss_peak = sys::status_bytes(pid, "VmHWM:");
    }
    let Answer::Ran(ran) = answer else {
        return Err(Fault::new(FaultKind::Garbage, "no answer to `run`"));
    };
    // A millisecond and 1 %: clocks of two processes agree far better than that.
    if ran.ns > round_trip.as_nanos() as f64 * 1.01 + 1e6 {
        let what = format!("tells {:.3} ms, but only {:.3} ms passed", ran.ns / 1e6, round_trip.as_secs_f64() * 1e3);
        return Err(Fault::new(FaultKind::ImpossibleTime, what));
    }
    Ok(ran)
}

/// The largest difference between two arms by a rule, and what it allows. A metric that either lacks differs by infinity.
fn compare(rule: &CheckRule, expected: &Ran, got: &Ran) -> (f64, f64) {
    if rule.metric == "output" {
        let same = expected.output.is_some() && expected.output == got.output;
        return (if same { 0.0 } else { 1.0 }, 0.0);
    }
    let list = |ran: &Ran| match ran.metrics.get(&rule.metric) {
        Some(Metric::Number(n)) => vec![*n],
        Some(Metric::List(list)) => list.clone(),
        None => vec![],
    };
    let (expected, got) = (list(expected), list(got));
    if expected.is_empty() || expected.len() != got.len() {
        return (f64::INFINITY, rule.absolute);
    }
    let magnitude = expected.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
    let difference = expected.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    let all_finite = expected.iter().chain(&got).all(|v| v.is_finite());
    (if all_finite { difference } else { f64::INFINITY }, rule.absolute + rule.relative * magnitude)
}
