//! Matrix products on CUDA: cuBLASLt with fused epilogues where shape and addresses allow, a general kernel of our own where they do not.

mod hopper;

use tilewright_core::{DType, Result};

pub(crate) use hopper::SOURCE as HOPPER;

use super::{BackwardInput, BackwardWeight, Forward};
use crate::gelu::{self, Gelu};
use crate::runtime::cuda::cublaslt::{Epilogue, Matrix, Product};
use crate::runtime::cuda::launch::aligned;
use crate::runtime::cuda::source::code;
use crate::runtime::cuda::{Arg, Cuda, SCRATCH_BYTES, SUMS_BYTES, Source};
use crate::{Device, Tensor};

pub(crate) static SOURCE: Source = Source {
    name: "matmul/matmul.cu",
    text: include_str!("matmul.cu"),
    parameters: &[],
    variants: &[&[]],
    exact: false,
};

/// A row-major tensor of rows of `ld` elements.
fn matrix(t: &Tensor, ld: usize) -> Matrix {
    Matrix { address: t.cuda_address(), dtype: t.dtype(), ld }
}

/// Whether the library's GELU and its derivative are exact enough: their tanh is off by 1.5e-5 whichever algorithm is taken (seen in cuBLASLt
/// 13.0), which 16-bit storage hides and f32 does not.
fn fuses_gelu(pre: &Tensor, out: &Tensor) -> bool {
    pre.dtype() == out.dtype() && out.dtype() != DType::F32
}

pub(super) fn forward(device: &Device, cuda: &Cuda, args: &Forward<'_>, m: usize, n: usize, k: usize) -> Result<()> {
    const OP: &str = "matmul.forward";
    let Forward { x, weight, bias, gelu, pre_gelu, out } = *args;
    let fused = match (gelu, pre_gelu, bias) {
        (None, _, None) => Some(Epilogue::None),
        (None, _, Some(bias)) => Some(Epilogue::Bias(bias.cuda_address())),
        (Some(Gelu::Tanh), Some(pre), Some(bias)) if fuses_gelu(pre, out) => {
            Some(Epilogue::BiasGelu { bias: bias.cuda_address(), aux: pre.cuda_address() })
        }
        _ => None,
    };
    let same_bias = bias.is_none_or(|bias| bias.dtype() == out.dtype());
    let product = |out: &Tensor, epilogue| Product {
        m: n,
        n: m,
        k,
        a: matrix(weight, k),
        transpose_a: true,
        b: matrix(x, k),
        transpose_b: false,
        d: matrix(out, n),
        alpha: 1.0,
        accumulate: false,
        epilogue,
    };
    if let (Some(epilogue), true) = (fused, same_bias)
        && cuda.blas().run(cuda, OP, &product(out, epilogue))?
    {
        return Ok(());
    }
    // An activation that the library does not know: the product first, the activation behind it.
    if let (Some(kind), Some(pre), true) = (gelu, pre_gelu, same_bias)
        && pre.dtype() == out.dtype()
    {
        let epilogue = bias.map_or(Epilogue::None, |bias| Epilogue::Bias(bias.cuda_address()));
        if cuda.blas().run(cuda, OP, &product(pre, epilogue))? {
            return gelu::forward(device, &gelu::Forward { kind, x: &pre.view(&out.shape())?, out });
        }
    }
    let general = General { bias, gelu, pre_out: pre_gelu, ..General::plain((x, k, 1), (weight, k, 1), (out, n)) };
    general.run(cuda, OP, m, n, k)
}

pub(super) fn backward_input(
    device: &Device,
    cuda: &Cuda,
    args: &BackwardInput<'_>,
    m: usize,
    n: usize,
    k: usize,
) -> Result<()> {
    if hopper::backward_input(cuda, args, m, n, k)? {
        return Ok(());
    }
    input_gradient(device, cuda, args, m, n, k)?;
    super::behind(device, args)
}

/// `dx` alone.
fn input_gradient(device: &Device, cuda: &Cuda, args: &BackwardInput<'_>, m: usize, n: usize, k: usize) -> Result<()> {
    const OP: &str = "matmul.backward_input";
    let BackwardInput { dout, weight, gelu, dx, accumulate, .. } = *args;
    let epilogue = match gelu {
        None => Some(Epilogue::None),
        Some((Gelu::Tanh, pre)) if fuses_gelu(pre, dx) => Some(Epilogue::GeluBackward { aux: pre.cuda_address() }),
        Some(_) => None,
    };
    if let Some(epilogue) = epilogue {
        let product = Product {
            m: k,
            n: m,
            k: n,
            a: matrix(weight, k),
            transpose_a: false,
            b: matrix(dout, n),
            transpose_b: false,
            d: matrix(dx, k),
            alpha: 1.0,
            accumulate,
            epilogue,
        };
        if cuda.blas().run(cuda, OP, &product)? {
            return Ok(());
        }
    }
    // A derivative that the library does not know: the product first, the derivative behind it.
    if let Some((kind, pre)) = gelu
        && !accumulate
        && pre.dtype() == dx.dtype()
    {
        General::plain((dout, n, 1), (weight, 1, k), (dx, k)).run(cuda, OP, m, k, n)?;
        let pre = pre.view(&dx.shape())?;
        return gelu::backward(device, &gelu::Backward { kind, x: &pre, dout: dx, dx });
    }
    let general = General {
        gelu: gelu.map(|(kind, _)| kind),
        pre_in: gelu.map(|(_, pre)| pre),
        accumulate,
        ..General::plain((dout, n, 1), (weight, 1, k), (dx, k))
    };
    general.run(cuda, OP, m, k, n)
}

pub(super) fn backward_weight(cuda: &Cuda, args: &BackwardWeight<'_>, m: usize, n: usize, k: usize) -> Result<()> {
    const OP: &str = "matmul.backward_weight";
    let BackwardWeight { dout, x, dweight, dbias, accumulate } = *args;
    if let Some(dbias) = dbias {
        bias_gradient(cuda, dout, dbias, accumulate, m, n)?;
    }
    let general = General { accumulate, ..General::plain((dout, 1, n), (x, 1, k), (dweight, k)) };
    general.run(cuda, OP, n, k, m)
}

/// `dbias (N) (+)= sum over M of dout (M, N)`: blocks of rows first, then the blocks in order.
pub(super) fn bias_gradient(
    cuda: &Cuda,
    dout: &Tensor,
    dbias: &Tensor,
    accumulate: bool,
    m: usize,
    n: usize,
) -> Result<()> {
    const OP: &str = "matmul.backward_weight";
    let wide = n.is_multiple_of(8) && aligned(&[dout]) && dout.dtype() != DType::F32;
    let columns = n.div_ceil(if wide { 256 } else { 32 });
    // Enough blocks to fill the chip, at least 64 rows each, sums that fit the scratch.
    let fill = (8 * cuda.info().multiprocessors as usize).div_ceil(columns.max(1));
    let room = (SCRATCH_BYTES / size_of::<f32>() / n.max(1)).max(1);
    let rows = m.div_ceil(fill.min(room).max(1)).max(64);
    let blocks = m.div_ceil(rows);
    let scratch = Arg::Address(cuda.scratch());
    let sizes = [Arg::Long(m as i64), Arg::Int(n as i32), Arg::Int(rows as i32)];
    let [m, n_arg, rows] = sizes;
    let grid = [columns, blocks, 1];
    if wide {
        let entry = if dout.dtype() == DType::BF16 { "column_sums_bf16" } else { "column_sums_f16" };
        cuda.launch(OP, &SOURCE.kernel(entry, &[]), grid, 256, 0, &[Arg::Tensor(dout), scratch, m, n_arg, rows])?;
    } else {
        let list = [Arg::Tensor(dout), Arg::Int(code(dout.dtype()) as i32), scratch, m, n_arg, rows];
        cuda.launch(OP, &SOURCE.kernel("column_sums", &[]), grid, 256, 0, &list)?;
    }
    finish_sums(cuda, OP, blocks, dbias, accumulate, n)
}

/// Adds `parts` rows of `n` partial sums in the device's scratch, in order.
pub(crate) fn finish_sums(
    cuda: &Cuda,
    op: &'static str,
    parts: usize,
    sums: &Tensor,
    accumulate: bool,
    n: usize,
) -> Result<()> {
    let list = [
        Arg::Address(cuda.scratch()),
        Arg::Int(parts as i32),
        Arg::Tensor(sums),
        Arg::Int(code(sums.dtype()) as i32),
        Arg::Int(i32::from(accumulate)),
        Arg::Int(n as i32),
    ];
    cuda.launch(op, &SOURCE.kernel("finish_sums", &[]), [n.div_ceil(32), 1, 1], 256, 0, &list)
}

/// `out (m, n) = alpha * sum over p of a[i, p] b[j, p]`, then bias, GELU or its derivative, and what is added to.
#[derive(Clone, Copy)]
pub(crate) struct General<'a> {
    /// A tensor, the distance of its rows and of its terms; one of the two is 1.
    pub(crate) a: (&'a Tensor, usize, usize),
    pub(crate) b: (&'a Tensor, usize, usize),
    /// A tensor and the distance of its rows.
    pub(crate) out: (&'a Tensor, usize),
    pub(crate) bias: Option<&'a Tensor>,
    pub(crate) gelu: Option<Gelu>,
    pub(crate) pre_out: Option<&'a Tensor>,
    pub(crate) pre_in: Option<&'a Tensor>,
    pub(crate) alpha: f32,
    pub(crate) accumulate: bool,
}

impl<'a> General<'a> {
    /// The product alone.
    pub(crate) fn plain(
        a: (&'a Tensor, usize, usize),
        b: (&'a Tensor, usize, usize),
        out: (&'a Tensor, usize),
    ) -> Self {
        let (bias, gelu, pre_out, pre_in) = (None, None, None, None);
        General { a, b, out, bias, gelu, pre_out, pre_in, alpha: 1.0, accumulate: false }
    }

    /// As cuBLASLt sees it: its result is the transpose, so the operands change places.
    fn product(&self, m: usize, n: usize, k: usize) -> Product {
        let operand = |(t, row, step): (&Tensor, usize, usize)| matrix(t, if step == 1 { row } else { step });
        Product {
            m: n,
            n: m,
            k,
            a: operand(self.b),
            transpose_a: self.b.2 == 1,
            b: operand(self.a),
            transpose_b: self.a.2 != 1,
            d: matrix(self.out.0, self.out.1),
            alpha: self.alpha,
            accumulate: self.accumulate,
            epilogue: Epilogue::None,
        }
    }

    /// Adds to a 16-bit tensor: the library would round the product before it adds it, so the product goes to f32 scratch, some rows at a time,
    /// and is rounded once. `false`: the library has no kernel for the shape, and nothing was launched.
    fn added_behind(&self, cuda: &Cuda, op: &'static str, m: usize, n: usize, k: usize) -> Result<bool> {
        // Whole packs of 16 bytes, so that every part starts as well aligned as the first.
        const WHOLE: usize = 64;
        let (out, out_row) = self.out;
        let rows = (SUMS_BYTES / size_of::<f32>() / n.max(1)).min(m);
        let rows = if rows < m { rows / WHOLE * WHOLE } else { m };
        if out.dtype() == DType::F32 || rows == 0 {
            return Ok(false);
        }
        let product = self.product(m, n, k);
        let part = |first: usize| {
            let b = Matrix {
                address: product.b.address + (first * self.a.1 * self.a.0.dtype().size()) as u64,
                ..product.b
            };
            let d = Matrix { address: cuda.sums(), dtype: DType::F32, ld: n };
            Product { n: rows.min(m - first), b, d, accumulate: false, ..product }
        };
        for first in (0..m).step_by(rows) {
            let part = part(first);
            if !cuda.blas().run(cuda, op, &part)? {
                // All parts have the same alignment, so it is the first that is refused, before anything was added.
                return Ok(false);
            }
            let list = [
                Arg::Address(cuda.sums()),
                Arg::Address(out.cuda_address() + (first * out_row * out.dtype().size()) as u64),
                Arg::Int(code(out.dtype()) as i32),
                Arg::Long(out_row as i64),
                Arg::Int(part.n as i32),
                Arg::Int(n as i32),
            ];
            let blocks = (part.n * n).div_ceil(256).min(8 * cuda.info().multiprocessors as usize);
            cuda.launch(op, &SOURCE.kernel("add_product", &[]), [blocks, 1, 1], 256, 0, &list)?;
        }
        Ok(true)
    }

    /// `m` rows, `n` columns, `k` terms.
    pub(crate) fn run(&self, cuda: &Cuda, op: &'static str, m: usize, n: usize, k: usize) -> Result<()> {
        let plain = self.bias.is_none() && self.gelu.is_none();
        if plain && cuda.blas().run(cuda, op, &self.product(m, n, k))? {
            return Ok(());
        }
        if plain && self.accumulate && self.added_behind(cuda, op, m, n, k)? {
            return Ok(());
        }
        let of = |t: Option<&Tensor>| Arg::Int(t.map_or(0, |t| code(t.dtype()) as i32));
        let ((a, a_row, a_step), (b, b_row, b_step), (out, out_row)) = (self.a, self.b, self.out);
        let list = [
            Arg::Tensor(a),
            of(Some(a)),
            Arg::Long(a_row as i64),
            Arg::Long(a_step as i64),
            Arg::Tensor(b),
            of(Some(b)),
            Arg::Long(b_row as i64),
            Arg::Long(b_step as i64),
            Arg::Maybe(self.bias),
            of(self.bias),
            Arg::Int(self.gelu.map_or(-1, gelu::cuda::code)),
            Arg::Maybe(self.pre_out),
            of(self.pre_out),
            Arg::Maybe(self.pre_in),
            of(self.pre_in),
            Arg::Float(self.alpha),
            Arg::Int(i32::from(self.accumulate)),
            Arg::Tensor(out),
            of(Some(out)),
            Arg::Long(out_row as i64),
            Arg::Int(m as i32),
            Arg::Int(n as i32),
            Arg::Int(k as i32),
        ];
        cuda.launch(op, &SOURCE.kernel("general", &[]), [n.div_ceil(64), m.div_ceil(64), 1], 256, 0, &list)
    }
}
