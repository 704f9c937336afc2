//! What the stand-in remembers: memory handed out, modules, what is being recorded. One for the process, as the driver's is.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, c_char, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::cubin::Kernel;

pub(crate) type Status = i32;
pub(crate) type Handle = *mut c_void;

/// The chip that it claims to be.
pub(crate) const MULTIPROCESSORS: u32 = 132;
pub(crate) const SHARED_PER_BLOCK: u32 = 232_448;
const REGISTERS: u32 = 65_536;
/// Memory that it claims to have: little, so that programs which ask for too much are refused.
pub(crate) const MEMORY: usize = 24 << 30;

/// One piece of work, as a graph keeps it.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    pub(crate) what: String,
    /// Ranges that it reads or writes: where, and how many bytes at least.
    pub(crate) touched: Vec<(u64, usize)>,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) memory: BTreeMap<u64, usize>,
    /// Everything ever handed out lies between these.
    lowest: u64,
    highest: u64,
    pub(crate) modules: HashMap<usize, HashMap<String, Kernel>>,
    pub(crate) functions: Vec<Function>,
    /// Streams, events and their like that are alive, by what they are.
    pub(crate) handles: HashMap<usize, &'static str>,
    serial: usize,
    /// By stream: what is recorded now.
    pub(crate) recording: HashMap<usize, Vec<Work>>,
    pub(crate) graphs: HashMap<usize, Vec<Work>>,
    pub(crate) replays: u64,
    pub(crate) launches: u64,
    pub(crate) products: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) module: usize,
    pub(crate) name: String,
    pub(crate) kernel: Kernel,
    /// Shared memory that it was allowed to ask for.
    pub(crate) allowed: u32,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);
/// What was wrong with the last refused call, for `cuGetErrorString`.
static WORDS: Mutex<Option<&'static std::ffi::CStr>> = Mutex::new(None);

/// Runs a call: 0, or 1 with its words kept and printed.
pub(crate) fn answer(call: &str, f: impl FnOnce(&mut State) -> Result<(), String>) -> Status {
    let mut guard: MutexGuard<'_, Option<State>> = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    match f(guard.get_or_insert_with(State::default)) {
        Ok(()) => 0,
        Err(words) => {
            let words = format!("{call}: {words}");
            eprintln!("stand-in: {words}");
            // Few, and asked for at any time later.
            let kept: &'static CString =
                Box::leak(Box::new(CString::new(words.replace('\0', " ")).unwrap_or_default()));
            *WORDS.lock().unwrap_or_else(PoisonError::into_inner) = Some(kept.as_c_str());
            1
        }
    }
}

pub(crate) fn last_words() -> *const c_char {
    WORDS.lock().unwrap_or_else(PoisonError::into_inner).map_or(c"nothing was refused".as_ptr(), |w| w.as_ptr())
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes.max(1), 512).expect("sizes are checked before")
}

impl State {
    pub(crate) fn held(&self) -> usize {
        self.memory.values().sum()
    }

    pub(crate) fn allocate(&mut self, bytes: usize) -> Result<u64, String> {
        if bytes == 0 || bytes > MEMORY - self.held() {
            return Err(format!("{bytes} bytes asked for, {} of {MEMORY} held", self.held()));
        }
        // SAFETY: the layout's size is not zero.
        let address = unsafe { alloc_zeroed(layout(bytes)) } as u64;
        if address == 0 {
            return Err("the machine has no such memory".into());
        }
        self.lowest = if self.lowest == 0 { address } else { self.lowest.min(address) };
        self.highest = self.highest.max(address + bytes as u64);
        self.memory.insert(address, bytes);
        Ok(address)
    }

    pub(crate) fn free(&mut self, address: u64) -> Result<(), String> {
        let bytes = self.memory.remove(&address).ok_or_else(|| format!("{address:#x} was not allocated"))?;
        // SAFETY: allocated by `allocate` with this layout, freed once.
        unsafe { dealloc(address as *mut u8, layout(bytes)) };
        Ok(())
    }

    /// Whether so many bytes from an address on are memory that is allocated now.
    pub(crate) fn check(&self, what: &str, address: u64, bytes: usize) -> Result<(), String> {
        let (start, size) = self.memory.range(..=address).next_back().unwrap_or((&0, &0));
        if address == 0 || address + bytes as u64 > start + *size as u64 {
            return Err(format!(
                "{what} at {address:#x}, {bytes} bytes: not within an allocation (nearest {start:#x}, {size} bytes)"
            ));
        }
        Ok(())
    }

    /// Whether a parameter can only be an address.
    pub(crate) fn looks_like_memory(&self, value: u64) -> bool {
        value >= self.lowest && value < self.highest && value > 1 << 40
    }

    pub(crate) fn handle(&mut self, kind: &'static str) -> Handle {
        self.serial += 1;
        // Odd, so that it is no address of anything.
        let handle = (self.serial << 4) | 1;
        self.handles.insert(handle, kind);
        handle as Handle
    }

    pub(crate) fn known(&self, kind: &str, handle: Handle) -> Result<usize, String> {
        let at = handle as usize;
        if self.handles.get(&at).is_some_and(|k| *k == kind) {
            Ok(at)
        } else {
            Err(format!("{at:#x} is no {kind} that is alive"))
        }
    }

    pub(crate) fn destroy(&mut self, kind: &str, handle: Handle) -> Result<usize, String> {
        let at = self.known(kind, handle)?;
        self.handles.remove(&at);
        Ok(at)
    }

    /// Does a piece of work, or records it.
    pub(crate) fn work(&mut self, stream: Handle, what: String, touched: Vec<(u64, usize)>) -> Result<bool, String> {
        let stream = self.known("stream", stream)?;
        let work = Work { what, touched };
        self.verify(&work)?;
        if let Some(list) = self.recording.get_mut(&stream) {
            list.push(work);
            return Ok(false);
        }
        Ok(true)
    }

    pub(crate) fn verify(&self, work: &Work) -> Result<(), String> {
        work.touched.iter().try_for_each(|&(address, bytes)| self.check(&work.what, address, bytes))
    }

    /// Checks a launch against what the machine code says of the kernel.
    pub(crate) fn launch(
        &mut self,
        function: Handle,
        grid: [u32; 3],
        threads: u32,
        shared: u32,
        stream: Handle,
        parameters: *mut *mut c_void,
    ) -> Result<(), String> {
        let function = self.functions.get((function as usize).wrapping_sub(1)).ok_or("no such function")?.clone();
        let Function { name, kernel, allowed, module } = &function;
        let fault = |what: String| Err(format!("{name}, grid {grid:?}, {threads} threads, {shared} bytes: {what}"));
        if !self.modules.contains_key(module) {
            return fault("its module was unloaded".into());
        }
        if grid.contains(&0) || grid[0] > i32::MAX as u32 || grid[1].max(grid[2]) > 65_535 {
            return fault("no such grid".into());
        }
        if threads == 0 || threads > 1024 || (kernel.most_threads > 0 && threads > kernel.most_threads) {
            return fault(format!("at most {} threads", kernel.most_threads));
        }
        // Registers are handed out by warps, eight a lane at a time.
        if kernel.registers.next_multiple_of(8) * threads.next_multiple_of(32) > REGISTERS {
            return fault(format!("{} registers a thread do not fit", kernel.registers));
        }
        if shared + kernel.shared > SHARED_PER_BLOCK || (shared + kernel.shared > 48 << 10 && shared > *allowed) {
            return fault(format!("{} bytes of its own, {allowed} allowed", kernel.shared));
        }
        if (0..3).any(|i| kernel.cluster[i] > 0 && !grid[i].is_multiple_of(kernel.cluster[i])) {
            return fault(format!("clusters of {:?}", kernel.cluster));
        }
        let mut touched = Vec::new();
        for (i, &size) in kernel.parameters.iter().enumerate() {
            // SAFETY: the caller gives one pointer for each parameter of the kernel, to at least its bytes; a null one is refused.
            let value = unsafe {
                let place = *parameters.add(i);
                if place.is_null() {
                    return fault(format!("parameter {i} of {size} bytes is not given"));
                }
                if size == 8 { place.cast::<u64>().read_unaligned() } else { 0 }
            };
            if self.looks_like_memory(value) {
                touched.push((value, 1));
            }
        }
        // A struct's words have places of their own, of which the driver reads the first alone.
        let structs = kernel.parameters.iter().any(|&size| size > 8);
        // SAFETY: the array ends with null pointers behind the last parameter given.
        if !structs && unsafe { !(*parameters.add(kernel.parameters.len())).is_null() } {
            return fault(format!("more than its {} parameters", kernel.parameters.len()));
        }
        self.launches += 1;
        self.work(stream, format!("{name} {grid:?}"), touched).map(|_| ())
    }
}
