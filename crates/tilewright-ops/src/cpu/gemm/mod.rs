//! The packed, multi-threaded matrix product behind every op that multiplies matrices.
//!
//! `C (m, n) (+)= alpha * A (m, k) @ B (k, n)`, operands in any float type and any strides, sums in f32. The scheme is that of GotoBLAS and
//! BLIS: panels of A and B are packed in the order in which a register-sized tile kernel reads them. The smaller operand is packed once and
//! shared; the larger one streams through packing buffers of the threads, each element read from memory once.
//!
//! What siblings may use:
//! - [`gemm`]: f32 output, all threads. [`product`]: any output type, fused [`Finish`] steps, scaling.
//! - [`packed_a_floats`], [`pack_a`], [`packed_b_floats`], [`pack_b`], [`multiply_packed`]: pack once, multiply often, inside a task.
//!
//! Each element of C is a sum over blocks of K that depend on `k` alone, each block one chain of multiply-adds: the same bits for any number
//! of threads. A zero times an infinity or NaN is not skipped.

mod block;
mod finish;
mod kernel;
mod pack;
mod parallel;
#[cfg(test)]
mod tests;

use std::marker::PhantomData;
use std::sync::atomic::AtomicU64;

use memmap2::MmapMut;
use tilewright_core::DType;

use super::{Cpu, Element, Isa};
use block::{A_FLOATS, B_FLOATS, Block, Operand, Panels, k_step};
pub(crate) use finish::{Finish, MatMut};
pub(crate) use kernel::Kernel;
#[cfg(target_arch = "x86_64")]
pub(crate) use pack::avx512;
use pack::{View, panel_floats};

/// A matrix operand: `data[i * row_stride + j * col_stride]`, in any float type.
#[derive(Clone, Copy)]
pub(crate) struct MatRef<'a> {
    ptr: *const u8,
    dtype: DType,
    row_stride: usize,
    col_stride: usize,
    len: usize,
    _data: PhantomData<&'a [u8]>,
}

// SAFETY: a shared view of plain numbers.
unsafe impl Send for MatRef<'_> {}
unsafe impl Sync for MatRef<'_> {}

impl<'a> MatRef<'a> {
    pub(crate) fn new<T: Element>(data: &'a [T], row_stride: usize, col_stride: usize) -> Self {
        MatRef {
            ptr: data.as_ptr().cast(),
            dtype: T::DTYPE,
            row_stride,
            col_stride,
            len: data.len(),
            _data: PhantomData,
        }
    }

    #[track_caller]
    fn check(&self, what: &str, rows: usize, cols: usize) {
        if rows > 0 && cols > 0 {
            let last = (rows - 1) * self.row_stride + (cols - 1) * self.col_stride;
            assert!(last < self.len, "{what} of a matrix product is too short for {rows} x {cols}");
        }
    }

    /// `cols` elements of a row whose elements lie next to each other.
    ///
    /// # Safety
    /// They exist, and `T` is their type.
    unsafe fn row<T>(&self, row: usize, col: usize, cols: usize) -> &[T] {
        unsafe { std::slice::from_raw_parts(self.ptr.cast::<T>().add(row * self.row_stride + col), cols) }
    }

    /// For packing as A: lines are rows.
    fn lines_are_rows(&self) -> View {
        View { ptr: self.ptr, dtype: self.dtype, line_stride: self.row_stride, k_stride: self.col_stride }
    }

    /// For packing as B: lines are columns.
    fn lines_are_columns(&self) -> View {
        View { ptr: self.ptr, dtype: self.dtype, line_stride: self.col_stride, k_stride: self.row_stride }
    }
}

/// Floats of the shared packed operand: 16 MiB, about half of a server's last cache and enough for the weights of a layer of 768 channels.
const SHARED_FLOATS: usize = 4 << 20;

/// Floats of a tile of partial sums, for outputs that cannot hold them.
const TILE_FLOATS: usize = 280 * 384;

/// Floats of one thread: a block of A, one of B, a tile. Whole pages, so that no two threads share one.
const THREAD_FLOATS: usize = (A_FLOATS + B_FLOATS + TILE_FLOATS).next_multiple_of(1024);

/// The packing buffers of one CPU device; constant size.
pub(crate) struct Scratch {
    map: MmapMut,
    /// What the buffer of each thread holds, for kernels that pack there once and multiply in several tasks.
    marks: Box<[AtomicU64]>,
    next_mark: u64,
}

impl Scratch {
    /// Floats of the buffer of one thread.
    pub(crate) const THREAD_FLOATS: usize = THREAD_FLOATS;

    pub(crate) fn bytes(threads: usize) -> usize {
        (SHARED_FLOATS + threads.max(1) * THREAD_FLOATS) * size_of::<f32>()
    }

    /// Pages are touched, and so counted by the system, when they are first used.
    ///
    /// # Panics
    /// When the system refuses the address space.
    pub(crate) fn new(threads: usize) -> Self {
        let bytes = Self::bytes(threads);
        let map = MmapMut::map_anon(bytes)
            .unwrap_or_else(|e| panic!("the packing buffers of {threads} threads ({bytes} bytes) were refused: {e}"));
        #[cfg(target_os = "linux")]
        // A hint only.
        let _ = map.advise(memmap2::Advice::HugePage);
        let marks = (0..threads.max(1)).map(|_| AtomicU64::new(0)).collect();
        Scratch { map, marks, next_mark: 1 }
    }

    /// Takes `count` marks that no thread's buffer bears yet; the first is returned.
    pub(crate) fn marks(&mut self, count: usize) -> u64 {
        let first = self.next_mark;
        self.next_mark += count as u64;
        first
    }

    /// The buffers of the threads, for tasks that divide them in their own way.
    pub(crate) fn workers(&mut self) -> WorkerBuffers<'_> {
        WorkerBuffers { buffers: Buffers { ptr: self.map.as_mut_ptr().cast() }, marks: &self.marks }
    }

    fn buffers(&mut self) -> Buffers {
        Buffers { ptr: self.map.as_mut_ptr().cast() }
    }
}

/// The addresses of the buffers, for tasks.
#[derive(Clone, Copy)]
struct Buffers {
    ptr: *mut f32,
}

// SAFETY: each thread uses its own part; the shared part is written by disjoint tasks and read after they have ended.
unsafe impl Send for Buffers {}
unsafe impl Sync for Buffers {}

impl Buffers {
    fn shared(&self) -> *mut f32 {
        self.ptr
    }

    /// A block of A, a block of B and a tile.
    ///
    /// # Safety
    /// Only the task that runs as `worker` may hold them.
    unsafe fn of_worker<'a>(&self, worker: usize) -> (&'a mut [f32], &'a mut [f32], &'a mut [f32]) {
        // SAFETY: the map holds `THREAD_FLOATS` for each worker behind the shared part.
        let all = unsafe {
            std::slice::from_raw_parts_mut(self.ptr.add(SHARED_FLOATS + worker * THREAD_FLOATS), THREAD_FLOATS)
        };
        let (a, rest) = all.split_at_mut(A_FLOATS);
        let (b, tile) = rest.split_at_mut(B_FLOATS);
        (a, b, tile)
    }
}

/// The buffers of the threads, each with the mark of what it holds.
pub(crate) struct WorkerBuffers<'a> {
    buffers: Buffers,
    marks: &'a [AtomicU64],
}

impl WorkerBuffers<'_> {
    /// The whole buffer of a thread and its mark.
    ///
    /// # Safety
    /// Only the task that runs as `worker` may hold it.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn of_worker(&self, worker: usize) -> (&mut [f32], &AtomicU64) {
        // SAFETY: as in `Buffers::of_worker`.
        let all = unsafe {
            std::slice::from_raw_parts_mut(self.buffers.ptr.add(SHARED_FLOATS + worker * THREAD_FLOATS), THREAD_FLOATS)
        };
        (all, &self.marks[worker])
    }
}

/// A product and all that is fused with it: `out (+)= finish(alpha * a (m, k) @ b (k, n))`.
pub(crate) struct Product<'a> {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: MatRef<'a>,
    pub(crate) b: MatRef<'a>,
    pub(crate) out: MatMut<'a>,
    /// `+=` instead of `=`.
    pub(crate) accumulate: bool,
    pub(crate) alpha: f32,
    pub(crate) finish: Finish<'a>,
}

impl Product<'_> {
    /// Whether partial sums may live in the output itself.
    fn direct(&self) -> bool {
        self.out.dtype == DType::F32 && (!self.accumulate || self.finish.only_adds())
    }

    #[track_caller]
    fn check(&self) {
        let &Product { m, n, k, .. } = self;
        self.a.check("a", m, k);
        self.b.check("b", k, n);
        let fits = |ld: usize, len: usize| n <= ld && (m == 0 || (m - 1) * ld + n <= len);
        assert!(fits(self.out.ld, self.out.len), "the output of a matrix product is too short for {m} x {n}");
        if let Some(bias) = &self.finish.bias {
            assert!(n <= bias.len && bias.col_stride == 1, "the bias of a matrix product is too short for {n}");
        }
        if let Some(pre) = &self.finish.pre {
            assert!(fits(pre.ld, pre.len), "the saved value of a matrix product is too short for {m} x {n}");
        }
        if let Some((_, at)) = &self.finish.gelu_grad {
            at.check("the argument of GELU", m, n);
            assert!(at.col_stride == 1, "the argument of GELU must be row-major");
        }
    }
}

/// `out(m, n) (+)= a(m, k) @ b(k, n)`; `out` is row-major with row stride `ldc`.
pub(crate) fn gemm(
    cpu: &Cpu,
    m: usize,
    n: usize,
    k: usize,
    a: MatRef<'_>,
    b: MatRef<'_>,
    out: &mut [f32],
    ldc: usize,
    accumulate: bool,
) {
    let (out, finish) = (MatMut::new(out, ldc), Finish::default());
    product(cpu, &Product { m, n, k, a, b, out, accumulate, alpha: 1.0, finish });
}

/// Runs a product on all threads.
///
/// # Panics
/// When a matrix is shorter than the dimensions say.
pub(crate) fn product(cpu: &Cpu, p: &Product<'_>) {
    p.check();
    if p.m == 0 || p.n == 0 {
        return;
    }
    let mut scratch = cpu.scratch();
    parallel::run(cpu, p, scratch.buffers());
}

/// # Safety
/// `p.check()` holds; `tile` is needed only when the output cannot hold partial sums.
unsafe fn serial_unchecked(kernel: Kernel, p: &Product<'_>, a: &mut [f32], b: &mut [f32], tile: &mut [f32]) {
    let step = k_step(p.k);
    let mut cols = (b.len() / panel_floats(kernel.nr, step)).max(1) * kernel.nr;
    let mut rows = p.m;
    if !p.direct() {
        cols = cols.min(384 / kernel.nr * kernel.nr);
        rows = tile.len() / cols / kernel.mr * kernel.mr;
    }
    for i0 in (0..p.m).step_by(rows.max(1)) {
        for j0 in (0..p.n).step_by(cols) {
            let area = Area { i0, rows: rows.min(p.m - i0), j0, cols: cols.min(p.n - j0) };
            let side_a = Operand::Raw(p.a.lines_are_rows().at(i0, 0));
            let side_b = Operand::Raw(p.b.lines_are_columns().at(0, 0).at(j0, 0));
            // SAFETY: the area lies inside the product and fits the buffers.
            unsafe { area.run(kernel, p, step, 0..p.k, (side_a, 0), (side_b, 0), None, (a, b, tile)) };
        }
    }
}

/// A rectangle of C.
#[derive(Clone, Copy)]
struct Area {
    i0: usize,
    rows: usize,
    j0: usize,
    cols: usize,
}

impl Area {
    /// Computes the rectangle over a range of K (whose start is a multiple of `step`), and finishes it when the range ends with K.
    ///
    /// # Safety
    /// The rectangle lies inside the product, fits the buffers, and nobody else works on it. Without the whole of K in one range the
    /// product must be `direct`.
    unsafe fn run(
        self,
        kernel: Kernel,
        p: &Product<'_>,
        step: usize,
        k: std::ops::Range<usize>,
        (a, a_panel): (Operand, usize),
        (b, b_panel): (Operand, usize),
        next: Option<block::Fetch>,
        (a_scratch, b_scratch, tile): (&mut [f32], &mut [f32], &mut [f32]),
    ) {
        let Area { i0, rows, j0, cols } = self;
        let direct = p.direct();
        let last = k.end == p.k;
        let (c, ldc) = if direct {
            (p.out.ptr.cast::<f32>().wrapping_add(i0 * p.out.ld + j0), p.out.ld)
        } else {
            assert!(rows * cols <= tile.len());
            (tile.as_mut_ptr(), cols)
        };
        let add = direct && (p.accumulate || k.start > 0);
        let block = Block {
            m: rows,
            n: cols,
            k: k.end - k.start,
            step,
            a,
            a_panel,
            b,
            b_panel,
            c,
            ldc,
            alpha: p.alpha,
            add,
            next,
        };
        let mut done = |first: usize, rows: usize| {
            if !last || (direct && p.finish.is_none()) {
                return;
            }
            for i in first..first + rows {
                // SAFETY: row `i` of the block is complete and belongs to this task; all matrices were checked.
                unsafe {
                    let x = std::slice::from_raw_parts_mut(c.add(i * ldc), cols);
                    p.finish.apply(kernel.isa, i0 + i, j0, x);
                    if !direct {
                        finish::store(kernel.isa, &p.out, i0 + i, j0, x, p.accumulate);
                    }
                }
            }
        };
        // SAFETY: as the caller vouches.
        unsafe { block::run(kernel, &block, a_scratch, b_scratch, &mut done) }
    }
}

/// Floats of A (`m x k`) packed by [`pack_a`].
pub(crate) fn packed_a_floats(isa: Isa, m: usize, k: usize) -> usize {
    let mr = Kernel::new(isa).mr;
    m.div_ceil(mr) * panel_floats(mr, k)
}

/// Floats of B (`k x n`) packed by [`pack_b`].
pub(crate) fn packed_b_floats(isa: Isa, n: usize, k: usize) -> usize {
    let nr = Kernel::new(isa).nr;
    n.div_ceil(nr) * panel_floats(nr, k)
}

/// Packs A for [`multiply_packed`].
///
/// # Panics
/// When the matrix or the room is too short.
pub(crate) fn pack_a(isa: Isa, a: MatRef<'_>, m: usize, k: usize, out: &mut [f32]) {
    a.check("a", m, k);
    assert!(out.len() >= packed_a_floats(isa, m, k), "too little room for a packed matrix");
    // SAFETY: checked.
    unsafe { pack::pack(isa, a.lines_are_rows(), Kernel::new(isa).mr, m, k, out.as_mut_ptr()) }
}

/// Packs B for [`multiply_packed`].
///
/// # Panics
/// When the matrix or the room is too short.
pub(crate) fn pack_b(isa: Isa, b: MatRef<'_>, n: usize, k: usize, out: &mut [f32]) {
    b.check("b", k, n);
    assert!(out.len() >= packed_b_floats(isa, n, k), "too little room for a packed matrix");
    // SAFETY: checked.
    unsafe { pack::pack(isa, b.lines_are_columns(), Kernel::new(isa).nr, n, k, out.as_mut_ptr()) }
}

/// `out (m, n) (+)= alpha * a @ b` of operands packed for exactly these dimensions, in the calling thread, in one pass over `k` (best up to
/// a few hundred).
///
/// # Panics
/// When a slice is too short.
pub(crate) fn multiply_packed(
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: &[f32],
    b: &[f32],
    out: &mut [f32],
    ldc: usize,
    accumulate: bool,
    alpha: f32,
) {
    if m == 0 || n == 0 {
        return;
    }
    let kernel = Kernel::new(isa);
    assert!(a.len() >= packed_a_floats(isa, m, k) && b.len() >= packed_b_floats(isa, n, k));
    assert!(n <= ldc && out.len() >= (m - 1) * ldc + n, "the output of a matrix product is too short for {m} x {n}");
    let side = |ptr: *const f32, width, panels| Operand::Packed(Panels { ptr, panels, width, step: k });
    let block = Block {
        m,
        n,
        k,
        step: k.max(1),
        a: side(a.as_ptr(), kernel.mr, m.div_ceil(kernel.mr)),
        a_panel: 0,
        b: side(b.as_ptr(), kernel.nr, n.div_ceil(kernel.nr)),
        b_panel: 0,
        c: out.as_mut_ptr(),
        ldc,
        alpha,
        add: accumulate,
        next: None,
    };
    // SAFETY: checked above.
    unsafe { block::run(kernel, &block, &mut [], &mut [], &mut |_, _| {}) }
}
