//! What is only read in a call, in a form that tasks on all threads may hold.

use std::ops::Range;

use super::{Layout, kernels};
use crate::cpu::element::with_element;
use crate::cpu::gemm::MatRef;
use crate::linear_cross_entropy::Head;
use crate::{DType, Tensor};

/// Rows of a matrix, side by side.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    data: &'a [u8],
    dtype: DType,
    d: usize,
}

impl<'a> Rows<'a> {
    /// # Safety
    /// Nothing writes to the tensor's memory while the rows are in use.
    unsafe fn new(t: &'a Tensor, d: usize) -> Self {
        let dtype = t.dtype();
        Rows { data: with_element!(dtype, T => kernels::bytes(unsafe { t.slice_of::<T>() })), dtype, d }
    }

    fn row_bytes(&self) -> usize {
        self.d * self.dtype.size()
    }

    fn rows(&self, rows: Range<usize>) -> Rows<'a> {
        let bytes = self.row_bytes();
        Rows { data: &self.data[rows.start * bytes..rows.end * bytes], ..*self }
    }

    /// As `(rows, D - k)` from column `k` on.
    pub(super) fn at(&self, k: usize) -> MatRef<'a> {
        with_element!(self.dtype, T => MatRef::new(&kernels::elements::<T>(self.data)[k..], self.d, 1))
    }

    /// As `(D - k, rows)` from column `k` on.
    pub(super) fn transposed_at(&self, k: usize) -> MatRef<'a> {
        with_element!(self.dtype, T => MatRef::new(&kernels::elements::<T>(self.data)[k..], 1, self.d))
    }
}

/// The inputs of a call and its sizes.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    hidden: Rows<'a>,
    weight: Rows<'a>,
    targets: &'a [i32],
    /// The rows that count, ascending.
    pub(super) index: &'a [u32],
    pub(super) d: usize,
    pub(super) vocab: usize,
    pub(super) layout: &'a Layout,
}

impl<'a> Inputs<'a> {
    /// `index` has room for all rows.
    ///
    /// # Safety
    /// Nothing writes to the head's tensors while the inputs are in use.
    pub(super) unsafe fn new(head: Head<'a>, layout: &'a Layout, index: &'a mut [u32]) -> Self {
        let (_, d, _) = head.dims();
        // SAFETY: as the caller promises; the entry checked the dtype of the targets.
        let (hidden, weight, targets) =
            unsafe { (Rows::new(head.hidden, d), Rows::new(head.weight, d), head.targets.slice_of::<i32>()) };
        let mut count = 0;
        for (row, _) in targets.iter().enumerate().filter(|(_, t)| **t != head.ignore_index) {
            index[count] = row as u32;
            count += 1;
        }
        Inputs { hidden, weight, targets, index: &index[..count], d, vocab: head.vocab, layout }
    }

    /// Cuts gapless rows into blocks.
    pub(super) fn blocks(&self, rows: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let step = self.layout.block_rows(rows.len());
        rows.clone().step_by(step).map(move |start| start..(start + step).min(rows.end))
    }

    /// Vocabulary columns that all threads work on together.
    pub(super) fn tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (vocab, cols) = (self.vocab, self.layout.tile_cols);
        (0..vocab).step_by(cols).map(move |start| start..(start + cols).min(vocab))
    }

    /// Vocabulary columns of one task.
    pub(super) fn strip(&self, task: usize) -> Range<usize> {
        let cols = self.layout.task_cols;
        task * cols..((task + 1) * cols).min(self.vocab)
    }

    /// `D` cut into the steps that hidden rows are packed by.
    pub(super) fn steps(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (d, step) = (self.d, self.layout.step);
        (0..d).step_by(step).map(move |k| k..(k + step).min(d))
    }

    /// The hidden rows of a block; gathered first when ignored rows lie between them.
    pub(super) fn hidden<'b>(&self, block: Range<usize>, gather: &'b mut [f32]) -> Rows<'b>
    where
        'a: 'b,
    {
        let index = &self.index[block];
        let (first, last) = (index[0] as usize, index[index.len() - 1] as usize);
        if last - first + 1 == index.len() {
            return self.hidden.rows(first..last + 1);
        }
        let bytes = self.hidden.row_bytes();
        let gather = kernels::typed::<u8>(gather, index.len() * bytes);
        for (to, &row) in gather.chunks_exact_mut(bytes).zip(index) {
            to.copy_from_slice(&self.hidden.data[row as usize * bytes..][..bytes]);
        }
        Rows { data: gather, ..self.hidden }
    }

    /// The weights of some vocabulary columns.
    pub(super) fn weight(&self, columns: Range<usize>) -> Rows<'a> {
        self.weight.rows(columns)
    }

    /// The place of a row's target among these columns, if it is there. Rows are counted without gaps.
    pub(super) fn target_in(&self, row: usize, columns: &Range<usize>) -> Option<usize> {
        let target = self.targets[self.index[row] as usize] as usize;
        target.checked_sub(columns.start).filter(|&t| t < columns.len())
    }
}
