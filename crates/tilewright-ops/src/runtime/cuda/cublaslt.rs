//! Matrix products by cuBLASLt: descriptors and the algorithm of each shape are made once and kept.
//!
//! cuBLASLt thinks in columns: its `(m, n, k)` product of column-major matrices. A row-major `(R, C)` tensor is its `(C, R)` matrix with leading
//! dimension `C`.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::path::PathBuf;

use tilewright_core::{DType, Error, Result};

use super::driver::{Address, Handle};
use super::library::{self, Missing, functions};
use super::{Cuda, SCRATCH_BYTES};

type Status = c_int;

functions! {
    /// libcublasLt.
    struct Functions returns Status {
        create = "cublasLtCreate"(*mut Handle);
        destroy = "cublasLtDestroy"(Handle);
        desc_create = "cublasLtMatmulDescCreate"(*mut Handle, c_int, c_int);
        desc_destroy = "cublasLtMatmulDescDestroy"(Handle);
        desc_set = "cublasLtMatmulDescSetAttribute"(Handle, c_int, *const c_void, usize);
        layout_create = "cublasLtMatrixLayoutCreate"(*mut Handle, c_int, u64, u64, i64);
        layout_destroy = "cublasLtMatrixLayoutDestroy"(Handle);
        preference_create = "cublasLtMatmulPreferenceCreate"(*mut Handle);
        preference_destroy = "cublasLtMatmulPreferenceDestroy"(Handle);
        preference_set = "cublasLtMatmulPreferenceSetAttribute"(Handle, c_int, *const c_void, usize);
        heuristic = "cublasLtMatmulAlgoGetHeuristic"(
            Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Found, *mut c_int,
        );
        matmul = "cublasLtMatmul"(
            Handle, Handle, *const c_void, Address, Handle, Address, Handle, *const c_void, Address, Handle, Address,
            Handle, *const Algorithm, Address, usize, Handle,
        );
    }
}

type Algorithm = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Found {
    algorithm: Algorithm,
    workspace: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

// Values of the library's enumerations.
const COMPUTE_F32: c_int = 68;
const COMPUTE_TF32: c_int = 77;
const TRANS_A: c_int = 3;
const TRANS_B: c_int = 4;
const EPILOGUE: c_int = 7;
const BIAS_POINTER: c_int = 8;
const AUX_POINTER: c_int = 11;
const AUX_LD: c_int = 12;
const MAX_WORKSPACE: c_int = 1;
const REDUCTION_SCHEMES: c_int = 3;
/// Split sums are added in f32 in the workspace, in a fixed order.
const REDUCE_IN_WORKSPACE: u32 = 2;

/// What happens to a product before it is stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Epilogue {
    /// Nothing.
    None,
    /// Adds one number a row (of the column-major result), of the result's type.
    Bias(Address),
    /// Adds it, stores the sum in `aux`, applies GPT-2's GELU.
    BiasGelu {
        /// One number a row.
        bias: Address,
        /// As large as the result, its type and leading dimension.
        aux: Address,
    },
    /// Multiplies by the derivative of GPT-2's GELU at `aux`.
    GeluBackward {
        /// As large as the result, its type and leading dimension.
        aux: Address,
    },
}

impl Epilogue {
    fn code(self) -> u32 {
        match self {
            Epilogue::None => 1,
            Epilogue::Bias(_) => 4,
            Epilogue::BiasGelu { .. } => 32 | 128 | 4,
            Epilogue::GeluBackward { .. } => 64 | 128,
        }
    }
}

/// One operand: address, storage type, leading dimension in elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub(crate) address: Address,
    pub(crate) dtype: DType,
    pub(crate) ld: usize,
}

/// `d (m, n) = alpha * op(a) (m, k) op(b) (k, n) [+ d]`, column-major.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: Matrix,
    pub(crate) transpose_a: bool,
    pub(crate) b: Matrix,
    pub(crate) transpose_b: bool,
    pub(crate) d: Matrix,
    /// Multiplies the product, not what it is added to.
    pub(crate) alpha: f32,
    pub(crate) accumulate: bool,
    pub(crate) epilogue: Epilogue,
}

impl Product {
    /// Whether the library's fast kernels take it: types that it knows, and every row on 16 bytes.
    pub(crate) fn fits(&self) -> bool {
        let whole = |x: &Matrix| x.address.is_multiple_of(16) && (x.ld * x.dtype.size()).is_multiple_of(16);
        let pointers = match self.epilogue {
            Epilogue::None => [0, 0],
            Epilogue::Bias(bias) => [bias, 0],
            Epilogue::BiasGelu { bias, aux } => [bias, aux],
            Epilogue::GeluBackward { aux } => [aux, 0],
        };
        let types = self.a.dtype == self.b.dtype && (self.d.dtype == self.a.dtype || self.d.dtype == DType::F32);
        let sized = self.m > 0 && self.n > 0 && self.k > 0;
        // The derivative would multiply what is added to, too; and Hopper's kernels round a product to the storage type before they add it.
        let sums = !self.accumulate || (self.d.dtype == DType::F32 && self.epilogue == Epilogue::None);
        let aux = !matches!(self.epilogue, Epilogue::BiasGelu { .. } | Epilogue::GeluBackward { .. });
        let sums = sums && (aux || self.d.ld.is_multiple_of(8));
        types
            && sized
            && sums
            && [self.a, self.b, self.d].iter().all(whole)
            && pointers.iter().all(|p| p.is_multiple_of(16))
    }

    fn key(&self) -> Key {
        Key {
            sizes: [self.m, self.n, self.k, self.a.ld, self.b.ld, self.d.ld],
            types: [kind(self.a.dtype), kind(self.b.dtype), kind(self.d.dtype)],
            flags: [self.transpose_a, self.transpose_b, self.accumulate],
            epilogue: self.epilogue.code(),
        }
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Key {
    sizes: [usize; 6],
    types: [c_int; 3],
    flags: [bool; 3],
    epilogue: u32,
}

impl Key {
    fn words(&self) -> String {
        let sizes: Vec<String> = self.sizes.iter().map(usize::to_string).collect();
        let types: Vec<String> = self.types.iter().map(c_int::to_string).collect();
        let flags: String = self.flags.iter().map(|&f| if f { '1' } else { '0' }).collect();
        format!("{} {} {flags} {}", sizes.join(" "), types.join(" "), self.epilogue)
    }
}

/// `cudaDataType_t`.
fn kind(dtype: DType) -> c_int {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 2,
        DType::BF16 => 14,
        other => unreachable!("{other} is not a float type; the op's check let it through"),
    }
}

struct Plan {
    desc: Handle,
    a: Handle,
    b: Handle,
    d: Handle,
    /// `None`: the library has no kernel for this shape.
    algorithm: Option<Algorithm>,
}

/// The library and the plans of all shapes seen.
pub(crate) struct CublasLt {
    functions: Functions,
    handle: Handle,
    compute: c_int,
    plans: RefCell<HashMap<Key, Plan>>,
    /// Algorithms found by timing, by this process or earlier ones.
    known: RefCell<HashMap<String, Algorithm>>,
    file: Option<PathBuf>,
}

/// The version as the library counts it, and where it was found.
pub(super) fn version() -> Result<(usize, String), Missing> {
    let functions = Functions::load(&library::CUBLASLT)?;
    Ok((number(&functions.path), functions.path.clone()))
}

/// `cublasLtGetVersion` returns a `size_t`, unlike all others.
fn number(path: &str) -> usize {
    // SAFETY: the library is loaded already; the symbol has this documented signature.
    unsafe {
        let Ok(library) = libloading::Library::new(path) else { return 0 };
        let version = library.get::<unsafe extern "C" fn() -> usize>(b"cublasLtGetVersion\0");
        version.map_or(0, |f| f())
    }
}

fn words(library: &str, status: Status) -> String {
    // SAFETY: as in `number`; the library hands out static strings.
    unsafe {
        let text = libloading::Library::new(library).ok().and_then(|library| {
            let f = library.get::<unsafe extern "C" fn(Status) -> *const c_char>(b"cublasLtGetStatusName\0").ok()?;
            let p = f(status);
            (!p.is_null()).then(|| std::ffi::CStr::from_ptr(p).to_string_lossy().into_owned())
        });
        text.unwrap_or_else(|| format!("status {status}"))
    }
}

impl CublasLt {
    pub(super) fn open(cuda: &Cuda) -> Result<Self> {
        let functions = Functions::load(&library::CUBLASLT).map_err(super::missing)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: an out-pointer; the context is current.
        let status = unsafe { (functions.create)(&mut handle) };
        if status != 0 {
            return Err(failed(cuda, "cuda.open", &functions.path, "cublasLtCreate", status));
        }
        let tf32 = std::env::var_os("TILEWRIGHT_TF32").is_some_and(|v| v == "1");
        let compute = if tf32 { COMPUTE_TF32 } else { COMPUTE_F32 };
        let version = number(&functions.path);
        let chip: String = cuda.info().name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let file = cuda.cache.as_ref().map(|folder| folder.join(format!("products-{chip}-{version}-{compute}.txt")));
        let known = file.as_deref().map(read_known).unwrap_or_default();
        Ok(CublasLt { functions, handle, compute, plans: RefCell::default(), known: RefCell::new(known), file })
    }

    /// Whether f32 products may round their inputs to TF32.
    pub(crate) fn tf32(&self) -> bool {
        self.compute == COMPUTE_TF32
    }

    /// Runs a product. `false`: the library has no kernel for it, and nothing was launched.
    pub(crate) fn run(&self, cuda: &Cuda, op: &'static str, p: &Product) -> Result<bool> {
        if !p.fits() {
            return Ok(false);
        }
        cuda.enter();
        let key = p.key();
        if !self.plans.borrow().contains_key(&key) {
            let plan = self.plan(cuda, op, p, &key)?;
            self.plans.borrow_mut().insert(key.clone(), plan);
        }
        let plans = self.plans.borrow();
        let plan = &plans[&key];
        let Some(algorithm) = &plan.algorithm else { return Ok(false) };
        self.launch(cuda, op, p, plan, algorithm)?;
        Ok(true)
    }

    fn launch(&self, cuda: &Cuda, op: &'static str, p: &Product, plan: &Plan, algorithm: &Algorithm) -> Result<()> {
        self.set_pointers(cuda, op, p, plan)?;
        let (alpha, beta) = (p.alpha, if p.accumulate { 1.0f32 } else { 0.0 });
        // SAFETY: the addresses are those of checked tensors; scalars are read before the call returns.
        let status = unsafe {
            let (alpha, beta) = (std::ptr::from_ref(&alpha).cast(), std::ptr::from_ref(&beta).cast());
            (self.functions.matmul)(
                self.handle,
                plan.desc,
                alpha,
                p.a.address,
                plan.a,
                p.b.address,
                plan.b,
                beta,
                p.d.address,
                plan.d,
                p.d.address,
                plan.d,
                algorithm,
                cuda.scratch(),
                SCRATCH_BYTES,
                cuda.stream,
            )
        };
        if status != 0 {
            let call = format!("cublasLtMatmul of {p:?}");
            return Err(failed(cuda, op, &self.functions.path, &call, status));
        }
        cuda.launches.set(cuda.launches.get() + 1);
        cuda.after_launch(op, || format!("cublasLtMatmul of {p:?}"))
    }

    fn set_pointers(&self, cuda: &Cuda, op: &'static str, p: &Product, plan: &Plan) -> Result<()> {
        let set = |attribute: c_int, value: u64| {
            // SAFETY: the attribute takes 8 bytes.
            let status =
                unsafe { (self.functions.desc_set)(plan.desc, attribute, std::ptr::from_ref(&value).cast(), 8) };
            if status == 0 {
                Ok(())
            } else {
                Err(failed(cuda, op, &self.functions.path, "a pointer's attribute", status))
            }
        };
        match p.epilogue {
            Epilogue::None => Ok(()),
            Epilogue::Bias(bias) => set(BIAS_POINTER, bias),
            Epilogue::BiasGelu { bias, aux } => set(BIAS_POINTER, bias).and_then(|()| set(AUX_POINTER, aux)),
            Epilogue::GeluBackward { aux } => set(AUX_POINTER, aux),
        }
    }

    fn plan(&self, cuda: &Cuda, op: &'static str, p: &Product, key: &Key) -> Result<Plan> {
        let f = &self.functions;
        let check = |call: &str, status| match status {
            0 => Ok(()),
            status => Err(failed(cuda, op, &f.path, &format!("{call} for {p:?}"), status)),
        };
        let mut plan = Plan {
            desc: std::ptr::null_mut(),
            a: std::ptr::null_mut(),
            b: std::ptr::null_mut(),
            d: std::ptr::null_mut(),
            algorithm: None,
        };
        // SAFETY: out-pointers to locals, attributes with their documented sizes. What is made lives in the plan until `drop`.
        unsafe {
            check("cublasLtMatmulDescCreate", (f.desc_create)(&mut plan.desc, self.compute, 0))?;
            let set = |attribute: c_int, value: &u64, bytes: usize| {
                let status = (f.desc_set)(plan.desc, attribute, std::ptr::from_ref(value).cast(), bytes);
                check("cublasLtMatmulDescSetAttribute", status)
            };
            set(TRANS_A, &u64::from(p.transpose_a), 4)?;
            set(TRANS_B, &u64::from(p.transpose_b), 4)?;
            set(EPILOGUE, &u64::from(p.epilogue.code()), 4)?;
            if matches!(p.epilogue, Epilogue::BiasGelu { .. } | Epilogue::GeluBackward { .. }) {
                set(AUX_LD, &(p.d.ld as u64), 8)?;
            }
            let layout = |out: &mut Handle, x: &Matrix, rows: usize, cols: usize| {
                let status = (f.layout_create)(out, kind(x.dtype), rows as u64, cols as u64, x.ld as i64);
                check("cublasLtMatrixLayoutCreate", status)
            };
            let (ar, ac) = if p.transpose_a { (p.k, p.m) } else { (p.m, p.k) };
            let (br, bc) = if p.transpose_b { (p.n, p.k) } else { (p.k, p.n) };
            layout(&mut plan.a, &p.a, ar, ac)?;
            layout(&mut plan.b, &p.b, br, bc)?;
            layout(&mut plan.d, &p.d, p.m, p.n)?;
        }
        self.set_pointers(cuda, op, p, &plan)?;
        let name = key.words();
        if let Some(known) = self.known.borrow().get(&name) {
            plan.algorithm = Some(*known);
            return Ok(plan);
        }
        let found = self.candidates(&plan)?;
        plan.algorithm = found.first().map(|f| f.algorithm);
        // Timing writes the result again and again, which only a product that does not add to it may do.
        if found.len() > 1 && !p.accumulate && !cuda.recording() && worth_a_search(p) {
            // By turns: a candidate timed once, while the clocks still rise or another program runs, would be judged by that.
            let mut best = vec![f32::INFINITY; found.len()];
            for turn in 0..4 {
                for (candidate, best) in found.iter().zip(&mut best) {
                    let run = |times: usize| {
                        let launch = || self.launch(cuda, op, p, &plan, &candidate.algorithm);
                        cuda.timed(|| (0..times).try_for_each(|_| launch()))
                    };
                    // The first run of a candidate loads its kernel; one that fails is not taken.
                    if (turn == 0 && run(1).is_err()) || (turn > 0 && best.is_infinite()) {
                        continue;
                    }
                    *best = best.min(run(4)?);
                }
            }
            let fastest = (0..found.len()).min_by(|&a, &b| best[a].total_cmp(&best[b])).unwrap_or(0);
            let best = (best[fastest], found[fastest].algorithm);
            plan.algorithm = Some(best.1);
            self.known.borrow_mut().insert(name, best.1);
            self.save();
        }
        Ok(plan)
    }

    fn candidates(&self, plan: &Plan) -> Result<Vec<Found>> {
        const MOST: usize = 16;
        let f = &self.functions;
        let empty = Found { algorithm: [0; 8], workspace: 0, state: 1, waves: 0.0, reserved: [0; 4] };
        let (mut found, mut count) = ([empty; MOST], 0);
        let mut preference = std::ptr::null_mut();
        // SAFETY: out-pointers, attributes with their documented sizes, an array and its length.
        unsafe {
            (f.preference_create)(&mut preference);
            let bytes = SCRATCH_BYTES;
            (f.preference_set)(preference, MAX_WORKSPACE, std::ptr::from_ref(&bytes).cast(), 8);
            (f.preference_set)(preference, REDUCTION_SCHEMES, std::ptr::from_ref(&REDUCE_IN_WORKSPACE).cast(), 4);
            let status = (f.heuristic)(
                self.handle,
                plan.desc,
                plan.a,
                plan.b,
                plan.d,
                plan.d,
                preference,
                MOST as c_int,
                found.as_mut_ptr(),
                &mut count,
            );
            (f.preference_destroy)(preference);
            // "Not supported" is an answer: no kernel takes this shape.
            if status != 0 {
                count = 0;
            }
        }
        Ok(found[..count.max(0) as usize].iter().filter(|f| f.state == 0).copied().collect())
    }

    fn save(&self) {
        let Some(path) = &self.file else { return };
        // Another process or thread may have searched meanwhile. What is in the file stays: the next run has the algorithms, and so the bits, of the one before.
        self.known.borrow_mut().extend(read_known(path));
        let known = self.known.borrow();
        let mut lines: Vec<String> = known
            .iter()
            .map(|(name, a)| {
                let words: Vec<String> = a.iter().map(|w| format!("{w:016x}")).collect();
                format!("{name} = {}\n", words.join(" "))
            })
            .collect();
        lines.sort();
        if let Some(folder) = path.parent() {
            let _ = std::fs::create_dir_all(folder);
        }
        // A search that cannot be kept is made again at the next start.
        let _ = tilewright_core::fs::write_atomic(path, lines.concat().as_bytes());
    }
}

/// Small products are bound by launches; the first suggestion does.
fn worth_a_search(p: &Product) -> bool {
    2.0 * p.m as f64 * p.n as f64 * p.k as f64 > 1e9
}

fn read_known(path: &std::path::Path) -> HashMap<String, Algorithm> {
    let line = |line: &str| {
        let (name, words) = line.split_once(" = ")?;
        let words: Option<Vec<u64>> = words.split(' ').map(|w| u64::from_str_radix(w, 16).ok()).collect();
        Some((name.to_owned(), Algorithm::try_from(words?).ok()?))
    };
    std::fs::read_to_string(path).unwrap_or_default().lines().filter_map(line).collect()
}

fn failed(cuda: &Cuda, op: &'static str, path: &str, call: &str, status: Status) -> Error {
    Error::Driver {
        op,
        device: cuda.name(),
        what: format!("{call} failed: {}", words(path, status)),
        hint: "check that the driver is no older than cuBLAS (`tilewright doctor`)".into(),
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        let f = &self.functions;
        // SAFETY: made by `plan` and `open`, destroyed once.
        unsafe {
            for plan in self.plans.borrow().values() {
                (f.desc_destroy)(plan.desc);
                for layout in [plan.a, plan.b, plan.d] {
                    (f.layout_destroy)(layout);
                }
            }
            (f.destroy)(self.handle);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn algorithms_found_are_read_back_and_damaged_lines_are_left_out() {
        let path = std::env::temp_dir().join(format!("tilewright-products-{}", std::process::id()));
        let line = "1 2 3 4 5 6 0 0 0 010 4 = 1 2 3 4 5 6 7 ff\n";
        std::fs::write(&path, format!("{line}half a line = 1 2\nx\n")).unwrap();
        let known = read_known(&path);
        assert_eq!(known.len(), 1);
        assert_eq!(known["1 2 3 4 5 6 0 0 0 010 4"], [1, 2, 3, 4, 5, 6, 7, 255]);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn rows_off_16_bytes_are_left_to_the_general_kernel() {
        let matrix = |ld| Matrix { address: 256, dtype: DType::BF16, ld };
        let product = |ld| Product {
            m: 8,
            n: 8,
            k: 8,
            a: matrix(ld),
            transpose_a: true,
            b: matrix(8),
            transpose_b: false,
            d: matrix(8),
            alpha: 1.0,
            accumulate: false,
            epilogue: Epilogue::None,
        };
        assert!(product(8).fits() && product(16).fits() && !product(9).fits());
        assert!(!Product { epilogue: Epilogue::Bias(258), ..product(8) }.fits());
        let backward = Product { epilogue: Epilogue::GeluBackward { aux: 0 }, ..product(8) };
        assert!(backward.fits() && !Product { accumulate: true, ..backward }.fits());
    }

    #[test]
    fn sums_are_left_to_the_library_only_where_it_rounds_once() {
        let matrix = |dtype| Matrix { address: 256, dtype, ld: 8 };
        let product = |d| Product {
            m: 8,
            n: 8,
            k: 8,
            a: matrix(DType::BF16),
            transpose_a: true,
            b: matrix(DType::BF16),
            transpose_b: false,
            d: matrix(d),
            alpha: 1.0,
            accumulate: true,
            epilogue: Epilogue::None,
        };
        assert!(product(DType::F32).fits() && !product(DType::BF16).fits());
    }
}
