//! Bidirectional attention over packed rows of any lengths: `softmax(scale * q k^T) v` within each row, in tiles, never an `L x L` buffer.
//!
//! Letters: `N` tokens in the pack, `R` rows, `L` tokens of one row, `M` queries, `H` heads of `hs` channels, `D = H * hs`. There is no
//! padding: row `r` is tokens `row_starts[r]..row_starts[r + 1]`, and no token sees another row. `scale` is `1 / sqrt(hs)`.
//!
//! Which keys of its row query `i` sees:
//! - without `window` and `option_ids` all of them;
//! - with `window = Some(half)` those at a distance of at most `half`, inclusive: `|position_i - position_j| <= half`. Positions are the
//!   indices in the row, and only the band is computed, unless `positions` are given;
//! - with `option_ids` not those of another option: `j` is hidden when `option_ids[i] > 0`, `option_ids[j] > 0` and they differ.
//!
//! So a query always sees itself. A hidden score has probability exactly zero, even where it is not a number. All float tensors of a call
//! share one storage dtype; statistics and accumulation are f32, and a result is rounded once. The result of a query depends on its row
//! alone: not on other rows or queries, not on the row's place in the pack, not on the number of threads.

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use tilewright_core::{Error, Result};

use crate::check::Check;
use crate::cpu::element::with_element;
use crate::{DType, Device, Tensor, rope};

/// The largest head size.
pub const MAX_HEAD: usize = 256;

/// Some tokens of each row as queries; all tokens remain keys.
#[derive(Clone, Copy)]
pub struct Selected<'a> {
    /// `(R + 1)` i32, read: queries `starts[r]..starts[r + 1]` belong to row `r`.
    pub starts: &'a Tensor,
    /// `(M)` i32, read: the token of each query, counted from the start of the pack; it lies in the query's row.
    pub tokens: &'a Tensor,
}

/// A rotary embedding of queries and keys, see [`crate::rope`].
#[derive(Clone, Copy)]
pub struct Rotation<'a> {
    /// `(P, hs)` f32, read: from [`crate::rope::table`].
    pub table: &'a Tensor,
    /// `(N)` i32, read: the position of each token.
    pub positions: &'a Tensor,
    /// `(M)` i32, read: the position of each query; `None`: that of its token, where every token is a query.
    pub query_positions: Option<&'a Tensor>,
}

/// `out (M, D) = attention`; see the module's words.
#[derive(Clone, Copy)]
pub struct Forward<'a> {
    /// `(M, >= D)`, read: columns `0..D` are the queries, head `h` in columns `h*hs..(h+1)*hs`. May be the same tensor as `kv`.
    pub q: &'a Tensor,
    /// `(N, W)`, read: keys and, in the next `D` columns, values, heads as in `q`.
    pub kv: &'a Tensor,
    /// Turns queries and keys before they meet. `q` and `kv` hold either turned or given values afterwards. Queries have to start at column 0, and keys
    /// at column 0 or, in the tensor that holds the queries, at column `D`.
    pub rotation: Option<Rotation<'a>>,
    /// No row has more tokens than this; `None` promises nothing. What was recorded under a promise is replayed for rows that keep it.
    pub longest: Option<usize>,
    /// First column of the keys: `D` where `kv` holds packed queries, keys and values `(N, 3D)`, 0 where it holds keys and values.
    pub key_column: usize,
    /// `H`; divides `D`.
    pub heads: usize,
    /// `(R + 1)` i32, read: starts at 0, never falls, ends at `N`.
    pub row_starts: &'a Tensor,
    /// Which tokens are queries; `None`: all, in order, so that `M = N`.
    pub selected: Option<Selected<'a>>,
    /// The largest distance of positions at which a key is seen; half of what model files call the local attention.
    pub window: Option<usize>,
    /// `(N)` i32, read: the positions that distances are measured in; `None`: the index in the row.
    pub positions: Option<&'a Tensor>,
    /// `(N)` i32, read: option `s` has the id `s + 1`, everything else 0.
    pub option_ids: Option<&'a Tensor>,
    /// `(M, D)`, `=`, heads side by side.
    pub out: &'a Tensor,
    /// [`workspace_bytes`] bytes, overwritten.
    pub workspace: &'a Tensor,
}

/// Bytes of workspace that [`forward`] needs for `rows` rows of any lengths, `heads` heads and `D = d`.
pub fn workspace_bytes(device: &Device, rows: usize, heads: usize, d: usize) -> usize {
    cpu::workspace_words(device.threads(), rows, d / heads.max(1)) * size_of::<f32>()
}

/// Checks the call and tells `M`, the head size and the workspace in words.
fn checked(check: &Check<'_>, args: &Forward<'_>) -> Result<(usize, usize, Tensor)> {
    let device = check.device;
    let Forward { q, kv, key_column, heads, row_starts, selected, positions, option_ids, out, workspace, .. } = *args;
    let ((m, q_width), (n, kv_width)) = (q.shape().as_matrix(), kv.shape().as_matrix());
    let (_, d) = out.shape().as_matrix();
    let dtype = q.dtype();
    check.argument(heads > 0 && d > 0 && d.is_multiple_of(heads), || {
        format!("`heads` is {heads}, which does not divide D = {d}, the columns of `out`; choose a divisor")
    })?;
    let head = d / heads;
    check.argument(head <= MAX_HEAD, || format!("the head size is {head}; at most {MAX_HEAD} is supported"))?;
    check.matrix("q", q, m, q_width)?;
    check.typed("kv", kv, dtype, &kv.shape())?;
    check.typed("out", out, dtype, &out.shape())?;
    check.matrix("out", out, m, d)?;
    check.argument(q_width >= d, || format!("`q` has {q_width} columns, fewer than D = {d}"))?;
    check.argument(key_column.checked_add(2 * d).is_some_and(|end| end <= kv_width), || {
        format!("`kv` has {kv_width} columns; keys and values of D = {d} from column {key_column} on do not fit")
    })?;
    let rows = row_starts.numel().saturating_sub(1);
    check.typed("row_starts", row_starts, DType::I32, &[rows + 1])?;
    let mut inputs = vec![("q", q), ("kv", kv), ("row_starts", row_starts)];
    match &selected {
        Some(Selected { starts, tokens }) => {
            check.typed("selected.starts", starts, DType::I32, &[rows + 1])?;
            check.typed("selected.tokens", tokens, DType::I32, &[m])?;
            inputs.extend([("selected.starts", *starts), ("selected.tokens", *tokens)]);
        }
        None => check
            .argument(m == n, || format!("`q` has {m} rows and `kv` {n}; without `selected` every token is a query"))?,
    }
    for (what, ids) in [("positions", positions), ("option_ids", option_ids)] {
        if let Some(ids) = ids {
            check.typed(what, ids, DType::I32, &[n])?;
            inputs.push((what, ids));
        }
    }
    let words = cpu::workspace_words(device.threads(), rows, head);
    check.workspace(workspace, words * size_of::<f32>())?;
    let scratch = workspace.reinterpret(0, DType::F32, &[words])?;
    check.disjoint(&[("out", out), ("workspace", &scratch)], &inputs)?;
    if let Some(rotation) = &args.rotation {
        check.typed("rotation.table", rotation.table, DType::F32, &[rotation.table.shape().as_matrix().0, head])?;
        check.typed("rotation.positions", rotation.positions, DType::I32, &[n])?;
        if let Some(positions) = rotation.query_positions {
            check.typed("rotation.query_positions", positions, DType::I32, &[m])?;
        }
        check.argument((key_column == 0 && !q.overlaps(kv)) || (key_column == d && q.same_memory(kv)), || {
            format!("keys from column {key_column} on cannot be turned; let them start at 0, or at D = {d} of the tensor of the queries")
        })?;
        check.argument(rotation.query_positions.is_some() || selected.is_none(), || {
            "selected queries need `rotation.query_positions`".into()
        })?;
    }
    Ok((m, head, scratch))
}

/// What the values of a call say, where the host can see them.
fn checked_values(check: &Check<'_>, args: &Forward<'_>, m: usize) -> Result<()> {
    in_order(check, args.row_starts, &args.selected, args.kv.shape().as_matrix().0, m)?;
    short_enough(check, args.row_starts, args.longest)?;
    if let Some(Rotation { table, positions, query_positions }) = args.rotation {
        let longest = table.shape().as_matrix().0;
        rope::in_range(check, positions, longest)?;
        query_positions.map_or(Ok(()), |positions| rope::in_range(check, positions, longest))?;
    }
    Ok(())
}

/// Runs [`Forward`].
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let check = Check::new("encoder_attention.forward", device);
    let (m, head, scratch) = checked(&check, args)?;
    let Forward { kv, row_starts, window, .. } = *args;
    let turned = turn(device, args, head)?;
    let args = &turned;
    match device {
        Device::Cpu(cpu) => {
            checked_values(&check, args, m)?;
            with_element!(args.q.dtype(), T => cpu::forward::<T>(cpu, args, head, &scratch));
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => {
            checked_values(&check, args, m)?;
            cuda::forward(cuda, args, m, head)?;
        }
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            checked_values(&check, args, m)?;
            gpu::forward(gpu, args, m, head)?;
        }
        Device::Null(null) => {
            // Lengths are data; rows of equal length stand for them.
            let (n, d) = (kv.shape().as_matrix().0, args.out.shape().as_matrix().1);
            let length = n.div_ceil((row_starts.numel() - 1).max(1));
            let seen = window.map_or(length, |half| length.min(half.saturating_mul(2).saturating_add(1)));
            let bytes = (2 * m + 2 * n) * d * args.q.dtype().size();
            null.record(check.op, 4 * (m * seen * d) as u64, bytes as u64);
        }
    }
    Ok(())
}

/// Turns queries and keys where they lie, unless the kernel does it itself, and tells what remains to be done.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
fn turn<'a>(device: &Device, args: &Forward<'a>, head: usize) -> Result<Forward<'a>> {
    #[cfg(feature = "cuda")]
    if matches!(device, Device::Cuda(_)) && cuda::turns(args, head) {
        return Ok(*args);
    }
    if let Some(Rotation { table, positions, query_positions }) = args.rotation {
        let (q, kv, heads) = (args.q, args.kv, args.heads);
        if args.key_column > 0 {
            // The checks leave only queries and keys side by side.
            rope::forward(device, &rope::Forward { x: q, heads: 2 * heads, positions, table })?;
        } else {
            rope::forward(device, &rope::Forward { x: kv, heads, positions, table })?;
            let positions = query_positions.unwrap_or(positions);
            rope::forward(device, &rope::Forward { x: q, heads, positions, table })?;
        }
    }
    Ok(Forward { rotation: None, ..*args })
}

/// No row breaks the promise of `longest`.
fn short_enough(check: &Check<'_>, row_starts: &Tensor, longest: Option<usize>) -> Result<()> {
    let (Some(longest), Some(starts)) = (longest, row_starts.ids()?) else { return Ok(()) };
    match starts.windows(2).position(|pair| (pair[1] - pair[0]) as usize > longest) {
        None => Ok(()),
        Some(row) => Err(Error::Argument {
            op: check.op,
            what: format!("row {row} has {} tokens, more than `longest`, {longest}", starts[row + 1] - starts[row]),
        }),
    }
}

/// Rows and selected queries follow each other and lie where they must.
fn in_order(check: &Check<'_>, row_starts: &Tensor, selected: &Option<Selected<'_>>, n: usize, m: usize) -> Result<()> {
    rises(check, "row_starts", row_starts, n)?;
    if let Some(selected) = selected {
        rises(check, "selected.starts", selected.starts, m)?;
        tokens_in_rows(check, row_starts, selected)?;
    }
    Ok(())
}

/// `starts` begin at 0, never fall and end at `end`.
fn rises(check: &Check<'_>, what: &str, starts: &Tensor, end: usize) -> Result<()> {
    let Some(starts) = starts.ids()? else { return Ok(()) };
    let wrong = |at: usize, want: &str| Error::Argument {
        op: check.op,
        what: format!("`{what}` holds {} at {at}; {want}", starts[at]),
    };
    if starts[0] != 0 {
        return Err(wrong(0, "the first row starts at 0"));
    }
    if let Some(at) = starts.windows(2).position(|pair| pair[1] < pair[0]) {
        return Err(wrong(at + 1, &format!("no row ends before its start {}", starts[at])));
    }
    if usize::try_from(starts[starts.len() - 1]) != Ok(end) {
        return Err(wrong(starts.len() - 1, &format!("the last row ends at {end}, the number of rows of the tensor")));
    }
    Ok(())
}

/// Every query's token lies in the query's row.
fn tokens_in_rows(check: &Check<'_>, row_starts: &Tensor, selected: &Selected<'_>) -> Result<()> {
    let (Some(rows), Some(starts), Some(tokens)) = (row_starts.ids()?, selected.starts.ids()?, selected.tokens.ids()?)
    else {
        return Ok(());
    };
    for (row, (limits, queries)) in rows.windows(2).zip(starts.windows(2)).enumerate() {
        for query in queries[0] as usize..queries[1] as usize {
            if !(limits[0]..limits[1]).contains(&tokens[query]) {
                let what = format!(
                    "`selected.tokens` holds {} at query {query}, outside {}..{}, the tokens of its row {row}",
                    tokens[query], limits[0], limits[1]
                );
                return Err(Error::Argument { op: check.op, what });
            }
        }
    }
    Ok(())
}
