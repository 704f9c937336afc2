//! Runs a compiled kernel: group after group, the threads of a group by turns until they meet, with records of who touched what.
//!
//! What stands here in `repr(C)` stands in `metal_stdlib` too.

use std::cell::Cell as Slot;
use std::ptr;

use super::fibre::{self, Place, Stacks};

/// Threads of a simdgroup.
pub(super) const SIMD: usize = 32;
/// Most threads of a group.
pub(super) const MOST_THREADS: usize = 1024;
/// Most threadgroup memory of an Apple GPU.
pub(super) const MOST_SHARED: usize = 32 << 10;
/// Words that a lane gives to the others, at most.
const WORDS: usize = 4;
/// In place of a thread's number: there were several.
const MANY: u32 = u32::MAX;

/// Who wrote two bytes last and when, who read them last and when.
pub(super) type Touched = [u32; 4];

#[repr(C)]
#[derive(Default)]
struct State {
    clock: u32,
    launch_start: u32,
    group_start: u32,
    group_tick: u32,
    device_tick: u32,
    simd_tick: u32,
    simd_device_tick: u32,
    uid: u32,
    group: u32,
    threads: u32,
    lane: u32,
    lanes: u32,
}

#[repr(C)]
struct Region {
    low: *mut u8,
    high: *mut u8,
    cells: *mut Touched,
    state: *mut State,
    kind: u32,
    index: u32,
}

#[repr(C)]
pub(super) struct Launch {
    buffers: *const Region,
    info: *const u64,
}

#[repr(C)]
pub(super) struct Thread {
    index_in_group: u32,
    index_in_simdgroup: u32,
    simdgroup: u32,
    simd: u32,
    in_grid: [u32; 3],
    in_group: [u32; 3],
    group: [u32; 3],
    groups: [u32; 3],
}

/// A kernel for one thread, as the compiled text exports it.
pub(super) type Entry = unsafe extern "C" fn(*const Launch, *const Thread);

#[repr(C)]
pub(super) struct Api {
    fault: extern "C" fn(u32, *const Region, *const u8, u64, u32),
    threadgroup_barrier: extern "C" fn(u32, u32),
    simdgroup_barrier: extern "C" fn(u32, u32),
    exchange: extern "C" fn(*const u64, u32, u32) -> *const u64,
    block: extern "C" fn() -> *const Region,
    state: extern "C" fn() -> *const State,
}

/// What compiled texts call.
pub(super) static API: Api = Api { fault, threadgroup_barrier, simdgroup_barrier, exchange, block, state };

/// A buffer of a launch: bytes that nobody else uses while it runs, with a record for every two of them, or none.
pub(super) struct Bound {
    pub(super) low: *mut u8,
    pub(super) bytes: usize,
    pub(super) touched: *mut Touched,
}

/// One launch.
pub(super) struct Job<'a> {
    pub(super) entry: Entry,
    pub(super) meets: bool,
    pub(super) shared_bytes: usize,
    pub(super) group: [u32; 3],
    pub(super) groups: [u32; 3],
    pub(super) buffers: &'a [Bound],
    pub(super) info: &'a [u64],
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Status {
    Ready,
    /// At a barrier of the group: flags and line.
    Group(u32, u32),
    /// At an operation of its simdgroup: what, and line.
    Simd(Meeting, u32),
    Done,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Meeting {
    Barrier(u32),
    Exchange(u32),
}

struct Fault {
    what: u32,
    /// Kind and number of the memory, its first byte.
    region: Option<(u32, u32, usize)>,
    at: usize,
    size: u64,
    write: bool,
    touched: Touched,
    thread: usize,
}

/// What executes launches, one at a time.
pub(super) struct Machine {
    state: State,
    stacks: Stacks,
    places: Vec<Place>,
    status: Vec<Status>,
    scheduler: Place,
    running: usize,
    entry: Option<Entry>,
    /// Whether one fibre runs all threads of a group.
    in_turn: bool,
    launch: Launch,
    thread: Thread,
    group: [u32; 3],
    /// Since when a simdgroup's accesses are ordered: threadgroup memory, device memory.
    simd_ticks: Vec<[u32; 2]>,
    /// What lanes give to each other: this meeting's and the last one's, which some may still read.
    given: Vec<[[u64; WORDS * SIMD]; 2]>,
    turn: Vec<u8>,
    memory: Box<[u64]>,
    touched: Vec<Touched>,
    block: Region,
    fault: Option<Fault>,
}

// SAFETY: the pointers are into what the machine itself owns, or into a launch's memory while it runs; nothing is bound to a thread of the system.
unsafe impl Send for Machine {}

thread_local!(static CURRENT: Slot<*mut Machine> = const { Slot::new(ptr::null_mut()) });

/// The machine that runs in this thread. Callers stand on a fibre's stack, and the machine's own code waits in [`Machine::resume`].
fn current() -> *mut Machine {
    CURRENT.get()
}

impl Machine {
    pub(super) fn new() -> Self {
        let region = Region {
            low: ptr::null_mut(),
            high: ptr::null_mut(),
            cells: ptr::null_mut(),
            state: ptr::null_mut(),
            kind: 1,
            index: 0,
        };
        let [zero, one] = [[0; 3], [1; 3]];
        Machine {
            state: State { clock: 1, ..State::default() },
            stacks: Stacks::new(1),
            places: vec![ptr::null_mut(); MOST_THREADS],
            status: vec![Status::Done; MOST_THREADS],
            scheduler: ptr::null_mut(),
            running: 0,
            entry: None,
            in_turn: false,
            launch: Launch { buffers: ptr::null(), info: ptr::null() },
            thread: Thread {
                index_in_group: 0,
                index_in_simdgroup: 0,
                simdgroup: 0,
                simd: SIMD as u32,
                in_grid: zero,
                in_group: zero,
                group: zero,
                groups: one,
            },
            group: one,
            simd_ticks: vec![[0; 2]; MOST_THREADS / SIMD],
            given: vec![[[0; WORDS * SIMD]; 2]; MOST_THREADS / SIMD],
            turn: vec![0; MOST_THREADS],
            memory: vec![0; MOST_SHARED / 8].into_boxed_slice(),
            touched: vec![[0; 4]; MOST_SHARED / 2],
            block: region,
            fault: None,
        }
    }

    /// Runs a launch to its end, or to the first thing that is wrong with it.
    ///
    /// # Safety
    /// The entry takes buffers of these types, which nobody else touches meanwhile.
    pub(super) unsafe fn run(&mut self, job: &Job) -> Result<(), String> {
        let threads = job.group.iter().product::<u32>() as usize;
        let groups: u64 = job.groups.iter().map(|&g| u64::from(g)).product();
        if threads == 0 || threads > MOST_THREADS {
            return Err(format!("{threads} threads a group; there may be 1 to {MOST_THREADS}"));
        }
        if job.shared_bytes > MOST_SHARED {
            return Err(format!("{} bytes of threadgroup memory; there are {MOST_SHARED}", job.shared_bytes));
        }
        if groups * threads as u64 >= u64::from(MANY) {
            return Err(format!("{groups} groups of {threads} threads are more than can be told apart"));
        }
        if self.stacks.count() < threads && job.meets {
            self.stacks = Stacks::new(threads);
        }
        let state: *mut State = &mut self.state;
        let regions: Vec<Region> = (job.buffers.iter().enumerate())
            .map(|(index, b)| Region {
                low: b.low,
                // SAFETY: the end of the bytes that the buffer has.
                high: unsafe { b.low.add(b.bytes) },
                cells: b.touched,
                state,
                kind: 0,
                index: index as u32,
            })
            .collect();
        self.launch = Launch { buffers: regions.as_ptr(), info: job.info.as_ptr() };
        (self.entry, self.in_turn, self.group) = (Some(job.entry), !job.meets, job.group);
        let low = self.memory.as_mut_ptr().cast::<u8>();
        self.block = Region {
            low,
            // SAFETY: no more than the memory has, by the check above.
            high: unsafe { low.add(job.shared_bytes) },
            cells: self.touched.as_mut_ptr(),
            state,
            kind: 1,
            index: 0,
        };
        self.thread.groups = job.groups;
        self.state.clock += 1;
        self.state.launch_start = self.state.clock;
        self.state.threads = threads as u32;
        self.fault = None;
        let mut done = Ok(());
        let [x, y, z] = job.groups;
        'launch: for c in 0..z {
            for b in 0..y {
                for a in 0..x {
                    self.thread.group = [a, b, c];
                    self.state.group = (c * y + b) * x + a;
                    self.memory[..job.shared_bytes.div_ceil(8)].fill(u64::MAX);
                    // SAFETY: as promised by the caller.
                    done = unsafe { self.run_group(threads) };
                    if done.is_err() {
                        break 'launch;
                    }
                }
            }
        }
        done
    }

    unsafe fn run_group(&mut self, threads: usize) -> Result<(), String> {
        self.state.clock += 1;
        let now = self.state.clock;
        (self.state.group_start, self.state.group_tick, self.state.device_tick) = (now, now, now);
        self.simd_ticks[..threads.div_ceil(SIMD)].fill([now; 2]);
        self.turn[..threads].fill(0);
        let fibres = if self.in_turn { 1 } else { threads };
        for i in 0..fibres {
            self.places[i] = self.stacks.begin(i, start);
            self.status[i] = Status::Ready;
        }
        loop {
            for i in 0..fibres {
                if self.status[i] == Status::Ready {
                    // SAFETY: its place is from `begin` or from where it stopped.
                    unsafe { self.resume(i) };
                    if let Some(fault) = self.fault.take() {
                        return Err(self.words(&fault));
                    }
                    if !self.stacks.is_whole(i) {
                        return Err(format!("thread {i} of group {} overran its stack", self.state.group));
                    }
                }
            }
            if (0..fibres).all(|i| self.status[i] == Status::Done) {
                return Ok(());
            }
            self.meet(threads)?;
        }
    }

    /// Lets fibre `i` go on until it stops.
    unsafe fn resume(&mut self, i: usize) {
        self.run_as(i);
        let this: *mut Machine = self;
        CURRENT.set(this);
        // SAFETY: the fibre comes back by way of `scheduler`; until then only it uses the machine, through the same pointer.
        unsafe { fibre::go(&mut (*this).scheduler, (&(*this).places)[i]) };
    }

    /// Makes thread `i` the running one.
    fn run_as(&mut self, i: usize) {
        self.running = i;
        let (simd, threads) = (i / SIMD, self.state.threads as usize);
        let s = &mut self.state;
        s.uid = s.group * s.threads + i as u32 + 1;
        s.lane = (i % SIMD) as u32;
        s.lanes = (threads - simd * SIMD).min(SIMD) as u32;
        [s.simd_tick, s.simd_device_tick] = self.simd_ticks[simd];
    }

    fn thread(&self) -> Thread {
        let i = self.running as u32;
        let [x, y, _] = self.group;
        let in_group = [i % x, i / x % y, i / x / y];
        let group = self.thread.group;
        Thread {
            index_in_group: i,
            index_in_simdgroup: i % SIMD as u32,
            simdgroup: i / SIMD as u32,
            in_grid: std::array::from_fn(|d| group[d] * self.group[d] + in_group[d]),
            in_group,
            ..self.thread
        }
    }

    /// No thread can go on alone: lets those go on that all stand at one place, or says who is missing.
    fn meet(&mut self, threads: usize) -> Result<(), String> {
        let mut released = false;
        for first in (0..threads).step_by(SIMD) {
            let lanes = &self.status[first..threads.min(first + SIMD)];
            let Status::Simd(what, _) = lanes[0] else { continue };
            if lanes.iter().any(|s| *s != lanes[0]) {
                continue;
            }
            if let Meeting::Barrier(flags) = what {
                self.state.clock += 1;
                let ticks = &mut self.simd_ticks[first / SIMD];
                for (bit, tick) in [2, 1].into_iter().zip(ticks) {
                    *tick = if flags & bit != 0 { self.state.clock } else { *tick };
                }
            }
            self.status[first..threads.min(first + SIMD)].fill(Status::Ready);
            released = true;
        }
        if released {
            return Ok(());
        }
        let all = &self.status[..threads];
        if let Status::Group(flags, _) = all[0]
            && all.iter().all(|s| *s == all[0])
        {
            self.state.clock += 1;
            let now = self.state.clock;
            if flags & 2 != 0 {
                self.state.group_tick = now;
            }
            if flags & 1 != 0 {
                self.state.device_tick = now;
            }
            self.status[..threads].fill(Status::Ready);
            return Ok(());
        }
        Err(self.missing(threads))
    }

    fn missing(&self, threads: usize) -> String {
        let all = &self.status[..threads];
        let says = |s: Status| match s {
            Status::Done => "has ended".to_owned(),
            Status::Group(_, line) => format!("waits at the threadgroup barrier of line {line}"),
            Status::Simd(_, line) => format!("waits at the simdgroup operation of line {line}"),
            Status::Ready => "runs".to_owned(),
        };
        // Where one stands at a simdgroup's operation, the lanes that are missing are its own.
        let simd = all.iter().position(|s| matches!(s, Status::Simd(..)));
        let range = simd.map_or(0..threads, |i| i / SIMD * SIMD..threads.min(i / SIMD * SIMD + SIMD));
        let waits = range.clone().find(|&i| all[i] != Status::Done).unwrap_or(range.start);
        let other = range.clone().find(|&i| all[i] != all[waits]).unwrap_or(range.start);
        let group = self.state.group;
        format!("thread {waits} of group {group} {}, while thread {other} {}", says(all[waits]), says(all[other]))
    }

    fn words(&self, fault: &Fault) -> String {
        let (group, thread) = (self.state.group, fault.thread);
        let who = format!("thread {thread} of group {group}");
        let verb = if fault.write { "writes" } else { "reads" };
        if fault.what == 4 {
            return format!("{who} takes element {} of an array of {}", fault.at, fault.size);
        }
        let Some((kind, index, low)) = fault.region else {
            return format!("{who} asks lane {} of its simdgroup, which has {}", fault.size, self.state.lanes);
        };
        let place = if kind == 0 { format!("buffer {index}") } else { "threadgroup memory".to_owned() };
        let at = fault.at as isize - low as isize;
        let did = format!("{who} {verb} {} bytes at byte {at} of {place}", fault.size);
        let name = |uid: u32| match uid {
            0 => "nobody".to_owned(),
            MANY => "several threads".to_owned(),
            uid => format!("thread {} of group {}", (uid - 1) % self.state.threads, (uid - 1) / self.state.threads),
        };
        let [writer, written, reader, read] = fault.touched;
        match fault.what {
            0 => format!("{did}, outside of it"),
            1 => format!("{did}, which is not aligned"),
            3 => format!("{did}, which nobody in the group has written"),
            _ if fault.write && (reader != self.state.uid && read > written) => {
                format!("{did}, which {} read with no barrier between", name(reader))
            }
            _ => format!("{did}, which {} wrote with no barrier between", name(writer)),
        }
    }
}

/// Where fibres begin: runs their thread, or all threads of the group where they never meet.
extern "C" fn start() -> ! {
    let m = current();
    // SAFETY: this fibre runs and the machine's own code waits; each use of the machine ends before control goes elsewhere.
    unsafe {
        let entry = (*m).entry.unwrap_unchecked();
        let launch: *const Launch = &(*m).launch;
        let fibre = (*m).running;
        let last = if (*m).in_turn { (*m).state.threads as usize } else { fibre + 1 };
        for i in fibre..last {
            (*m).run_as(i);
            let thread = (*m).thread();
            entry(launch, &thread);
        }
        (*m).running = fibre;
        (&mut (*m).status)[fibre] = Status::Done;
    }
    leave();
    // Nobody goes on with a thread that has ended.
    std::process::abort()
}

/// Gives control back to the machine until it comes back here.
fn leave() {
    let m = current();
    // SAFETY: the scheduler's place is where `resume` waits; this fibre's is used by the next `resume`.
    unsafe { fibre::go(&mut (&mut (*m).places)[(*m).running], (*m).scheduler) }
}

fn wait(status: Status) {
    // SAFETY: as in `start`.
    unsafe {
        let m = current();
        let running = (*m).running;
        (&mut (*m).status)[running] = status;
    }
    leave();
}

extern "C" fn threadgroup_barrier(flags: u32, line: u32) {
    wait(Status::Group(flags, line));
}

extern "C" fn simdgroup_barrier(flags: u32, line: u32) {
    wait(Status::Simd(Meeting::Barrier(flags), line));
}

extern "C" fn exchange(words: *const u64, count: u32, line: u32) -> *const u64 {
    let m = current();
    let count = (count as usize).min(WORDS);
    // SAFETY: as in `start`; the caller has `count` words. What a lane reads afterwards is overwritten only when it has come to the next meeting but
    // one.
    unsafe {
        let i = (*m).running;
        let turn = (&(*m).turn)[i] as usize;
        (&mut (*m).turn)[i] ^= 1;
        let given: *mut u64 = (&mut (*m).given)[i / SIMD][turn].as_mut_ptr();
        if count > 0 {
            ptr::copy_nonoverlapping(words, given.add(i % SIMD * count), count);
        }
        wait(Status::Simd(Meeting::Exchange(count as u32), line));
        given
    }
}

extern "C" fn block() -> *const Region {
    // SAFETY: as in `start`.
    unsafe { &(*current()).block }
}

extern "C" fn state() -> *const State {
    // SAFETY: as in `start`.
    unsafe { &(*current()).state }
}

extern "C" fn fault(what: u32, region: *const Region, at: *const u8, size: u64, write: u32) {
    let m = current();
    // SAFETY: as in `start`; the region is one of this launch.
    unsafe {
        let region = region.as_ref();
        // Of several bytes it is the first whose record says something.
        let touched = region.filter(|r| what >= 2 && !r.cells.is_null()).map_or([0; 4], |r| {
            let first = (at as usize - r.low as usize) / 2;
            let all = (0..(size as usize / 2).max(1)).map(|i| *r.cells.add(first + i));
            let uid = (*m).state.uid;
            let start = if r.kind == 0 { (*m).state.launch_start } else { (*m).state.group_start };
            let news = |t: &Touched| (t[0] != uid && t[1] >= start) || (write != 0 && t[2] != uid && t[3] >= start);
            all.clone().find(news).unwrap_or([0; 4])
        });
        // The thread's place in its group, also where one fibre runs them all.
        let thread = ((*m).state.uid - 1) % (*m).state.threads;
        (*m).fault = Some(Fault {
            what,
            region: region.map(|r| (r.kind, r.index, r.low as usize)),
            at: at as usize,
            size,
            write: write != 0,
            touched,
            thread: thread as usize,
        });
        if (*m).in_turn {
            (*m).running = 0;
        }
    }
    leave();
    // A thread that did something wrong is not gone on with.
    std::process::abort()
}
