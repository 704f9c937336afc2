//! The case table of encoder attention.

mod contract;
mod lengths;
mod masks;
mod properties;
mod selected;
mod short;

use super::reference::{self, Pack};
use super::{Forward, Rotation, Selected, forward, workspace_bytes};
use crate::testing::{FLOATS, Random, assert_close, devices, poisoned, portable_gpus, random, workspace};
use crate::{DType, Device, Tensor};

/// Rows of these lengths, all queries, no window.
fn pack(heads: usize, head: usize, lengths: &[usize]) -> Pack {
    let mut row_starts = vec![0];
    for length in lengths {
        row_starts.push(row_starts.last().unwrap() + *length as i32);
    }
    Pack { heads, head, row_starts, selected: None, window: None, positions: None, option_ids: None }
}

/// `(atol, rtol)` for a result stored in `dtype`.
fn tolerance(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F32 => (1e-6, 1e-5),
        DType::F16 => (5e-3, 2e-2),
        DType::BF16 => (1.5e-2, 3.5e-2),
        other => unreachable!("{other} is not a float"),
    }
}

/// A call's tensors and the exact values of its inputs. Queries, keys and values are packed unless queries are selected; then keys and
/// values lie alone.
struct Call {
    pack: Pack,
    device: Device,
    qkv: Tensor,
    q: Option<Tensor>,
    row_starts: Tensor,
    selected: Option<(Tensor, Tensor)>,
    positions: Option<Tensor>,
    option_ids: Option<Tensor>,
    out: Tensor,
    workspace: Tensor,
    exact_qkv: Vec<f64>,
    exact_q: Vec<f64>,
}

impl Call {
    fn new(device: &Device, dtype: DType, pack: Pack, std: f32, seed: u64) -> Self {
        let mut rng = Random::new(seed);
        let (n, d) = (pack.tokens(), pack.d());
        let (qkv, exact_qkv) = random(device, dtype, &[n, 3 * d], std, &mut rng);
        let integers = |v: &[i32]| Tensor::from_i32(device, &[v.len()], v).unwrap();
        let m = pack.queries().len();
        // The selected rows of the very same queries, in a tensor of their own.
        let mut exact_q = Vec::new();
        let q = pack.selected.as_ref().map(|_| {
            for (_, token) in pack.queries() {
                exact_q.extend_from_slice(&exact_qkv[token * 3 * d..][..d]);
            }
            let values: Vec<f32> = exact_q.iter().map(|&x| x as f32).collect();
            Tensor::from_f32(device, dtype, &[m, d], &values).unwrap()
        });
        Call {
            device: device.clone(),
            q,
            row_starts: integers(&pack.row_starts),
            selected: pack.selected.as_ref().map(|(starts, tokens)| (integers(starts), integers(tokens))),
            positions: pack.positions.as_deref().map(integers),
            option_ids: pack.option_ids.as_deref().map(integers),
            out: poisoned(device, dtype, &[m, d]),
            workspace: workspace(device, workspace_bytes(device, pack.row_starts.len() - 1, pack.heads, d)),
            qkv,
            exact_qkv,
            exact_q,
            pack,
        }
    }

    fn args(&self) -> Forward<'_> {
        Forward {
            q: self.q.as_ref().unwrap_or(&self.qkv),
            kv: &self.qkv,
            rotation: None,
            longest: None,
            key_column: self.pack.d(),
            heads: self.pack.heads,
            row_starts: &self.row_starts,
            selected: self.selected.as_ref().map(|(starts, tokens)| Selected { starts, tokens }),
            window: self.pack.window,
            positions: self.positions.as_ref(),
            option_ids: self.option_ids.as_ref(),
            out: &self.out,
            workspace: &self.workspace,
        }
    }

    fn run(&self) -> Vec<u8> {
        forward(&self.device, &self.args()).unwrap();
        bits(&self.out)
    }

    fn want(&self) -> Vec<f64> {
        let d = self.pack.d();
        let (q, width) = if self.q.is_some() { (&self.exact_q, d) } else { (&self.exact_qkv, 3 * d) };
        reference::forward(&self.pack, q, width, &self.exact_qkv, 3 * d, d)
    }

    #[track_caller]
    fn check(&self) {
        self.run();
        let (atol, rtol) = tolerance(self.out.dtype());
        let Pack { heads, head, window, .. } = self.pack;
        let name = format!(
            "{heads} heads of {head}, rows {:?}, window {window:?}, {} on {}",
            self.pack.row_starts,
            self.out.dtype(),
            self.device.name()
        );
        assert_close(&name, &self.out, &self.want(), atol, rtol);
    }
}

fn bits(t: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; t.bytes()];
    t.read_bytes(0, &mut bytes).unwrap();
    bytes
}

/// Every device against the reference, in one storage type.
fn check_on_all(dtype: DType, packs: &[Pack]) {
    for device in devices() {
        for (i, pack) in packs.iter().enumerate() {
            Call::new(&device, dtype, pack.clone(), 1.0, 100 + i as u64).check();
        }
    }
}

/// Ids of a row in the parallel layout: a prefix, options of these lengths, and a rest.
fn parallel_row(prefix: usize, options: &[usize], rest: usize) -> (Vec<i32>, Vec<i32>) {
    let mut positions: Vec<i32> = (0..prefix as i32).collect();
    let mut ids = vec![0; prefix];
    for (s, &length) in options.iter().enumerate() {
        positions.extend((prefix..prefix + length).map(|p| p as i32));
        ids.extend(vec![s as i32 + 1; length]);
    }
    let after = prefix + options.iter().copied().max().unwrap_or(0);
    positions.extend((after..after + rest).map(|p| p as i32));
    ids.extend(vec![0; rest]);
    (positions, ids)
}

/// A pack of rows in the parallel layout.
fn parallel(heads: usize, head: usize, window: Option<usize>, rows: &[(usize, &[usize], usize)]) -> Pack {
    let (mut positions, mut ids, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
    for &(prefix, options, rest) in rows {
        let (p, o) = parallel_row(prefix, options, rest);
        lengths.push(p.len());
        positions.extend(p);
        ids.extend(o);
    }
    Pack { window, positions: Some(positions), option_ids: Some(ids), ..pack(heads, head, &lengths) }
}
