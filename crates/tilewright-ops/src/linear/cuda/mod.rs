//! Linear layers on CUDA: products by cuBLASLt, what follows them by one kernel of our own. On Hopper gated products of many rows and all layers of a few rows
//! are kernels of our own as a whole (`gated.cu`, `few.cu`).
//!
//! A weight lies as rows `(N, K)` in its type. `x` is rounded to the weight's type, products are summed in f32. A gated product, and one that needs more than
//! a bias-free sum, goes some rows at a time through scratch that stays in the second-level cache.

pub(crate) mod few;
pub(crate) mod gated;

use tilewright_core::{DType, Result};

use super::{Activation, Forward, Normed};
use crate::Tensor;
use crate::gelu;
use crate::runtime::cuda::cublaslt::{Epilogue, Matrix, Product};
use crate::runtime::cuda::source::{FLOATS, code};
use crate::runtime::cuda::{Arg, Cuda, SUMS_BYTES, Source};

pub(crate) static SOURCE: Source = Source {
    name: "linear/linear.cu",
    text: include_str!("linear.cu"),
    parameters: &["TW_DTYPE"],
    variants: FLOATS,
    exact: false,
};

const OP: &str = "linear.forward";

/// Columns up to which a warp makes one result, and results up to which it does whatever the shape.
const NARROW: usize = 8;
/// See [`NARROW`].
const FEW_RESULTS: usize = 1024;

/// How kernels know an activation.
fn activation_code(activation: Activation) -> i32 {
    match activation {
        Activation::None => -1,
        Activation::Gelu(kind) => gelu::cuda::code(kind),
        Activation::Relu => 2,
        Activation::Geglu => 3,
    }
}

/// `to = from` in another type.
fn convert(cuda: &Cuda, op: &'static str, from: (u64, DType), to: (u64, DType), n: usize) -> Result<()> {
    let list = [
        Arg::Address(from.0),
        Arg::Int(code(from.1) as i32),
        Arg::Address(to.0),
        Arg::Int(code(to.1) as i32),
        Arg::Long(n as i64),
    ];
    let blocks = n.div_ceil(256).min(16 * cuda.info().multiprocessors as usize);
    cuda.launch(op, &SOURCE.typed("convert", DType::F32), [blocks, 1, 1], 256, 0, &list)
}

/// Writes a weight's rows in its type.
pub(super) fn pack(cuda: &Cuda, op: &'static str, source: &Tensor, precision: DType, memory: &Tensor) -> Result<()> {
    let to = (memory.cuda_address(), precision);
    convert(cuda, op, (source.cuda_address(), source.dtype()), to, source.numel())
}

/// A call and its sizes.
struct Layer<'a> {
    args: &'a Forward<'a>,
    n: usize,
    k: usize,
    /// Columns of `out`.
    columns: usize,
}

pub(super) fn forward(cuda: &Cuda, args: &Forward<'_>, m: usize) -> Result<()> {
    let (n, k) = args.weight.shape();
    let columns = if args.activation == Activation::Geglu { n / 2 } else { n };
    let soon = cuda.take_expected();
    if m == 0 || columns == 0 || few::forward(cuda, OP, args, None, m, soon)? || gated::forward(cuda, OP, args, m)? {
        return Ok(());
    }
    Layer { args, n, k, columns }.run(cuda, m)
}

/// Runs both at once; `false`: they have to be run one behind the other, and nothing was launched.
pub(super) fn normed(cuda: &Cuda, args: &Normed<'_>, m: usize) -> Result<bool> {
    few::forward(cuda, "linear.normed", &args.layer, Some(&args.norm), m, cuda.take_expected())
}

/// Rows of a chunk, of which each needs so much scratch: all of them, or equal chunks of whole tiles.
fn chunk(m: usize, bytes_a_row: usize) -> usize {
    const TILE: usize = 128;
    if bytes_a_row * m <= SUMS_BYTES {
        return m;
    }
    let most = SUMS_BYTES / bytes_a_row / TILE * TILE;
    if most == 0 { 0 } else { m.div_ceil(m.div_ceil(most)).next_multiple_of(TILE) }
}

impl Layer<'_> {
    /// In chunks where scratch is needed: by cuBLASLt, or by the general kernel where that has none for the shape.
    fn run(&self, cuda: &Cuda, m: usize) -> Result<()> {
        let Forward { x, weight, bias, activation, residual, out } = *self.args;
        let (precision, size) = (weight.dtype(), out.dtype().size());
        if activation != Activation::Geglu && (self.columns <= NARROW || m * self.columns <= FEW_RESULTS) {
            return self.alone(cuda, "narrow", [(m * self.columns).div_ceil(8), 1, 1], 0, m);
        }
        let converted = x.dtype() != precision;
        // A sum is added to `out` where it lies, by the library; everything else passes through scratch or is finished in place.
        let added = residual.is_some() && activation == Activation::None && out.dtype() == DType::F32;
        let in_place = added || (residual.is_none() && activation != Activation::Geglu);
        let input = if converted { self.k * precision.size() } else { 0 };
        let rows = chunk(m, input + if in_place { 0 } else { self.n * size });
        if rows == 0 {
            // Not even a tile's rows fit the scratch.
            return self.general(cuda, 0, m);
        }
        let products = cuda.sums() + if converted { (rows * self.k * precision.size()) as u64 } else { 0 };
        for first in (0..m).step_by(rows) {
            let count = rows.min(m - first);
            let out_at = out.cuda_address() + (first * self.columns * size) as u64;
            let x_at = x.cuda_address() + (first * self.k * x.dtype().size()) as u64;
            let to = if in_place { out_at } else { products };
            let product = Product {
                m: self.n,
                n: count,
                k: self.k,
                a: Matrix { address: weight.memory().cuda_address(), dtype: precision, ld: self.k },
                transpose_a: true,
                b: Matrix { address: if converted { cuda.sums() } else { x_at }, dtype: precision, ld: self.k },
                transpose_b: false,
                d: Matrix { address: to, dtype: out.dtype(), ld: self.n },
                alpha: 1.0,
                accumulate: added,
                epilogue: Epilogue::None,
            };
            if !product.fits() {
                self.general(cuda, first, count)?;
                continue;
            }
            if converted {
                convert(cuda, OP, (x_at, x.dtype()), (cuda.sums(), precision), count * self.k)?;
            }
            if first == 0
                && added
                && let Some(residual) = residual.filter(|r| !r.same_memory(out))
            {
                cuda.copy(out.cuda_address(), residual.cuda_address(), out.bytes())?;
            }
            if !cuda.blas().run(cuda, OP, &product)? {
                self.general(cuda, first, count)?;
                continue;
            }
            if in_place && bias.is_none() && activation == Activation::None {
                continue;
            }
            let residual_at =
                residual.filter(|_| !added).map_or(0, |r| r.cuda_address() + (first * self.columns * size) as u64);
            self.finish(cuda, to, residual_at, out_at, count)?;
        }
        Ok(())
    }

    fn finish(&self, cuda: &Cuda, product: u64, residual: u64, out: u64, rows: usize) -> Result<()> {
        let Forward { bias, activation, out: tensor, .. } = *self.args;
        let pack = 16 / tensor.dtype().size();
        let wide = self.columns.is_multiple_of(pack) && [product, residual, out].iter().all(|a| a.is_multiple_of(16));
        let list = [
            Arg::Address(product),
            Arg::Maybe(bias),
            Arg::Int(activation_code(activation)),
            Arg::Address(residual),
            Arg::Address(out),
            Arg::Long(rows as i64),
            Arg::Int(self.columns as i32),
            Arg::Int(i32::from(wide)),
        ];
        let threads = rows * self.columns / if wide { pack } else { 1 };
        let blocks = threads.div_ceil(256).min(16 * cuda.info().multiprocessors as usize);
        cuda.launch(OP, &SOURCE.typed("finish", tensor.dtype()), [blocks, 1, 1], 256, 0, &list)
    }

    /// The whole layer by one kernel, for `count` rows from `first` on.
    fn general(&self, cuda: &Cuda, first: usize, count: usize) -> Result<()> {
        let grid = [self.columns.div_ceil(32), count.div_ceil(64), 1];
        self.alone(cuda, "general", grid, first, count)
    }

    fn alone(&self, cuda: &Cuda, entry: &'static str, grid: [usize; 3], first: usize, count: usize) -> Result<()> {
        let Forward { x, weight, bias, activation, residual, out } = *self.args;
        let at = |t: &Tensor, width: usize| Arg::Address(t.cuda_address() + (first * width * t.dtype().size()) as u64);
        let list = [
            at(x, self.k),
            Arg::Int(code(x.dtype()) as i32),
            Arg::Tensor(weight.memory()),
            Arg::Maybe(bias),
            Arg::Int(activation_code(activation)),
            residual.map_or(Arg::Address(0), |r| at(r, self.columns)),
            at(out, self.columns),
            Arg::Int(code(out.dtype()) as i32),
            Arg::Int(count as i32),
            Arg::Int(self.columns as i32),
            Arg::Int(self.k as i32),
        ];
        let kernel = SOURCE.typed(entry, weight.dtype());
        if entry == "narrow" {
            return cuda.launch_early(OP, &kernel, grid, 256, 0, &list);
        }
        cuda.launch(OP, &kernel, grid, 256, 0, &list)
    }
}
