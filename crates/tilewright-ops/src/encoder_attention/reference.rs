//! The formula in f64, one query after the other: the oracle of the tests and the explanation of the op.

/// What a call says about its rows, with plain vectors.
#[derive(Clone, Debug)]
pub(super) struct Pack {
    pub(super) heads: usize,
    pub(super) head: usize,
    pub(super) row_starts: Vec<i32>,
    /// `(starts, tokens)` of selected queries.
    pub(super) selected: Option<(Vec<i32>, Vec<i32>)>,
    pub(super) window: Option<usize>,
    pub(super) positions: Option<Vec<i32>>,
    pub(super) option_ids: Option<Vec<i32>>,
}

impl Pack {
    pub(super) fn d(&self) -> usize {
        self.heads * self.head
    }

    pub(super) fn tokens(&self) -> usize {
        *self.row_starts.last().unwrap() as usize
    }

    /// Row and token of every query.
    pub(super) fn queries(&self) -> Vec<(usize, usize)> {
        let starts = self.selected.as_ref().map_or(&self.row_starts, |(starts, _)| starts);
        let of_row = |row: usize| (starts[row] as usize..starts[row + 1] as usize).map(move |query| (row, query));
        let token = |query: usize| self.selected.as_ref().map_or(query, |(_, tokens)| tokens[query] as usize);
        (0..starts.len() - 1).flat_map(of_row).map(|(row, query)| (row, token(query))).collect()
    }

    /// Whether token `i` sees token `j` of the same row, which starts at `start`.
    fn sees(&self, start: usize, i: usize, j: usize) -> bool {
        let position = |t: usize| self.positions.as_ref().map_or((t - start) as i64, |p| i64::from(p[t]));
        let near = self.window.is_none_or(|half| (position(i) - position(j)).unsigned_abs() <= half as u64);
        let apart = self.option_ids.as_ref().is_some_and(|o| o[i] > 0 && o[j] > 0 && o[i] != o[j]);
        near && !apart
    }
}

/// `out (M, D)`: `q` has `q_width` columns, `kv` has `kv_width` with keys from `key_column` on.
pub(super) fn forward(
    pack: &Pack,
    q: &[f64],
    q_width: usize,
    kv: &[f64],
    kv_width: usize,
    key_column: usize,
) -> Vec<f64> {
    let (d, head) = (pack.d(), pack.head);
    let mut out = vec![0.0; pack.queries().len() * d];
    for (query, (row, token)) in pack.queries().into_iter().enumerate() {
        let (start, end) = (pack.row_starts[row] as usize, pack.row_starts[row + 1] as usize);
        let seen: Vec<usize> = (start..end).filter(|&j| pack.sees(start, token, j)).collect();
        for h in 0..pack.heads {
            let q = &q[query * q_width + h * head..][..head];
            let part = |j: usize, column: usize| &kv[j * kv_width + column + h * head..][..head];
            let dot = |k: &[f64]| q.iter().zip(k).map(|(a, b)| a * b).sum::<f64>();
            let scores: Vec<f64> = seen.iter().map(|&j| dot(part(j, key_column)) / (head as f64).sqrt()).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            for (&j, score) in seen.iter().zip(&scores) {
                let p = (score - max).exp() / sum;
                for (o, v) in out[query * d + h * head..][..head].iter_mut().zip(part(j, key_column + d)) {
                    *o += p * v;
                }
            }
        }
    }
    out
}
