//! Activations of one pack of rows, planned for so many tokens; a longer pack gets a larger arena.

use tilewright_core::{DType, Result};
use tilewright_ops::{Arena, Device, Download, Plan, Tensor, Upload, encoder_attention};

/// How much a set of buffers holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Capacity {
    /// Tokens of all rows.
    pub(crate) tokens: usize,
    /// Rows.
    pub(crate) rows: usize,
    /// Tokens that the head reads: the first of each row and its markers.
    pub(crate) selected: usize,
}

impl Capacity {
    /// Steps of powers of two, so that packs of similar size share one arena.
    pub(crate) fn rounded(self) -> Self {
        Capacity {
            tokens: self.tokens.max(64).next_power_of_two(),
            rows: self.rows.max(8).next_power_of_two(),
            selected: self.selected.max(32).next_power_of_two(),
        }
    }

    /// The shape that stands for it in recorded work: at most 16 numbers of tokens and 8 of selected ones an octave, powers of two of rows. Padding
    /// takes rows of its own, none longer than `longest`.
    pub(crate) fn bucket(self, longest: Option<usize>) -> Self {
        let step = |n: usize, parts: usize, least: usize| (n.next_power_of_two() / parts).max(least);
        let tokens = self.tokens.next_multiple_of(step(self.tokens, 32, 32));
        let padding = (tokens - self.tokens).div_ceil(longest.unwrap_or(usize::MAX));
        Capacity {
            tokens,
            rows: (self.rows + padding).next_power_of_two(),
            selected: self.selected.next_multiple_of(step(self.selected, 16, 8)),
        }
    }

    pub(crate) fn holds(&self, other: &Capacity) -> bool {
        self.tokens >= other.tokens && self.rows >= other.rows && self.selected >= other.selected
    }

    pub(crate) fn union(&self, other: &Capacity) -> Capacity {
        Capacity {
            tokens: self.tokens.max(other.tokens),
            rows: self.rows.max(other.rows),
            selected: self.selected.max(other.selected),
        }
    }
}

/// Widths of the buffers, which depend on the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Widths {
    /// `D`.
    pub(crate) hidden: usize,
    /// The widest intermediate of a token: queries, keys and values, or a hidden layer.
    pub(crate) wide: usize,
    /// The widest hidden layer of a selected token.
    pub(crate) wide_selected: usize,
    /// Input, hidden layer and output of the action head.
    pub(crate) act: [usize; 3],
    /// Heads of encoder and decision head.
    pub(crate) heads: [usize; 2],
    /// What lies between the ops of a layer; the residual stream is f32.
    pub(crate) between: DType,
}

/// The type of what lies between the ops of a layer: processors keep f32, GPUs the type of the weights.
pub(crate) fn between(device: &Device, precision: DType) -> DType {
    if device.is_gpu() { precision } else { DType::F32 }
}

/// The memory of a pack of the largest size.
pub(crate) struct Buffers {
    pub(crate) arena: Arena,
    pub(crate) capacity: Capacity,
    /// All that a pack says, sent by one copy.
    inputs: Upload,
    said: Tensor,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    wide: Tensor,
    mean: Tensor,
    rstd: Tensor,
    sx: Tensor,
    sy: Tensor,
    sz: Tensor,
    sq: Tensor,
    swide: Tensor,
    act: [Tensor; 2],
    /// Logits of markers, then of the action head, fetched by one copy.
    answers: Tensor,
    fetched: Download,
    workspace: Tensor,
}

/// Parts of what is sent and fetched start at a multiple of so many elements.
const PART: usize = 4;

impl Buffers {
    pub(crate) fn allocate(device: &Device, widths: &Widths, capacity: Capacity) -> Result<Self> {
        let Capacity { tokens: n, rows: r, selected: s } = capacity;
        let d = widths.hidden;
        let mut plan = Plan::new("activations");
        // Per token: id, position, option, type; per selected token: itself, position, type, marker; per row: first token, three starts.
        let said = plan.add("pack", DType::I32, &[4 * n + 4 * s + 4 * (r + 1) + 12 * PART]);
        let narrow = widths.between != DType::F32;
        let mut between = |name: &str, n: usize| plan.add(name, widths.between, &[n]);
        let y = between("normalised", n * d);
        let wide = between("wide", n * widths.wide);
        let sy = between("selected normalised", s * d);
        let sq = between("selected queries", s * d);
        let swide = between("selected wide", s * widths.wide_selected);
        let mut f32 = |name: &str, n: usize| plan.add(name, DType::F32, &[n]);
        let x = f32("residual stream", n * d);
        // A normalised stream in f32 takes the place of the stream; where `y` is narrower it needs room of its own.
        let z = narrow.then(|| f32("final stream", n * d));
        let mean = f32("mean", n.max(s));
        let rstd = f32("rstd", n.max(s));
        let sx = f32("selected stream", s * d);
        let sz = narrow.then(|| f32("final selected stream", s * d));
        let act = [0, 1].map(|i| f32(["action input", "action hidden"][i], r * widths.act[i]));
        let answers = f32("logits", s + PART + r * widths.act[2]);
        let bytes = widths.heads.map(|h| encoder_attention::workspace_bytes(device, r, h, d));
        let workspace = plan.add("workspace", DType::U8, &[bytes[0].max(bytes[1])]);
        let arena = Arena::allocate(device, plan)?;
        let t = |slot| arena.tensor(slot);
        Ok(Buffers {
            capacity,
            inputs: Upload::new(&t(said))?,
            said: t(said),
            x: t(x),
            y: t(y),
            z: t(z.unwrap_or(y)),
            wide: t(wide),
            mean: t(mean),
            rstd: t(rstd),
            sx: t(sx),
            sy: t(sy),
            sz: t(sz.unwrap_or(sy)),
            sq: t(sq),
            swide: t(swide),
            act: act.map(t),
            answers: t(answers),
            fetched: Download::new(&t(answers))?,
            workspace: t(workspace),
            arena,
        })
    }

    /// Sends what the pack of these views says.
    pub(crate) fn send(&self, v: &Views) -> Result<()> {
        self.inputs.send_front(&v.said)
    }

    /// Begins to fetch the answers of a pass over these views.
    pub(crate) fn fetch(&self, v: &Views) -> Result<()> {
        self.fetched.start_front(v.answers.numel())
    }

    /// Waits for them.
    pub(crate) fn answers(&self, v: &Views) -> Result<Vec<f32>> {
        let mut answers = vec![0.0; v.answers.numel()];
        self.fetched.finish_front(&mut answers)?;
        Ok(answers)
    }
}

/// Rows up to this length are promised to be short, which GPUs have a kernel for.
const SHORT: usize = 128;

/// What a pack of rows says, on the host.
#[derive(Default)]
pub(crate) struct Pack {
    pub(crate) ids: Vec<i32>,
    pub(crate) positions: Vec<i32>,
    /// Empty in the sequential layout.
    pub(crate) option_ids: Vec<i32>,
    /// The question type of each token's row.
    pub(crate) types: Vec<i32>,
    /// Starts at 0, one more than there are rows.
    pub(crate) row_starts: Vec<i32>,
    /// First token and markers of each row, counted from the start of the pack.
    pub(crate) selected: Vec<i32>,
    pub(crate) selected_starts: Vec<i32>,
    /// Of each row's logits; one more than there are rows.
    pub(crate) logit_starts: Vec<i32>,
    /// No row has more tokens.
    pub(crate) longest: Option<usize>,
    /// Scores as many markers as there are selected tokens, so that their number follows from the shape; those behind the last are padding.
    pub(crate) all_selected: bool,
}

impl Pack {
    pub(crate) fn rows(&self) -> usize {
        self.row_starts.len() - 1
    }

    /// The shape that stands for it in recorded work, and the promise about its rows' lengths that belongs to it.
    pub(crate) fn bucket(&self) -> (Capacity, Option<usize>) {
        let longest = self.longest.filter(|&longest| longest <= SHORT).map(|_| SHORT);
        (self.capacity().bucket(longest), longest)
    }

    /// The same rows first, then padding up to its bucket: rows of token 0, empty rows, and selected tokens that repeat the last row's first one.
    pub(crate) fn padded(&self) -> Pack {
        let (to, longest) = self.bucket();
        let grown = |values: &[i32], n: usize, with: i32| {
            let mut values = values.to_vec();
            values.resize(n, with);
            values
        };
        let (tokens, selected) = (to.tokens as i32, to.selected as i32);
        let mut selected_starts = grown(&self.selected_starts, to.rows + 1, selected);
        selected_starts[self.rows()] = selected;
        let last = self.selected_starts[self.rows() - 1] as usize;
        let mut row_starts = self.row_starts.clone();
        let mut end = self.ids.len();
        row_starts.resize_with(to.rows + 1, || {
            end = to.tokens.min(end.saturating_add(longest.unwrap_or(usize::MAX)));
            end as i32
        });
        debug_assert_eq!(row_starts.last(), Some(&tokens));
        let logits = self.logit_starts[self.rows()];
        Pack {
            ids: grown(&self.ids, to.tokens, 0),
            positions: grown(&self.positions, to.tokens, 0),
            option_ids: if self.option_ids.is_empty() { Vec::new() } else { grown(&self.option_ids, to.tokens, 0) },
            types: grown(&self.types, to.tokens, 0),
            row_starts,
            selected: grown(&self.selected, to.selected, self.selected[last]),
            selected_starts,
            logit_starts: grown(&self.logit_starts, to.rows + 1, logits),
            longest,
            all_selected: true,
        }
    }

    pub(crate) fn capacity(&self) -> Capacity {
        Capacity { tokens: self.ids.len(), rows: self.rows(), selected: self.selected.len() }
    }
}

/// Where the action head's logits start behind those of so many markers.
fn act_at(markers: usize) -> usize {
    markers.next_multiple_of(PART)
}

/// The buffers cut to a pack.
#[derive(Clone)]
pub(crate) struct Views {
    pub(crate) device: Device,
    pub(crate) ids: Tensor,
    pub(crate) positions: Tensor,
    pub(crate) option_ids: Option<Tensor>,
    pub(crate) types: Tensor,
    pub(crate) row_starts: Tensor,
    pub(crate) selected: Tensor,
    pub(crate) selected_starts: Tensor,
    pub(crate) selected_positions: Tensor,
    pub(crate) selected_types: Tensor,
    /// Which selected tokens are markers.
    pub(crate) markers: Tensor,
    /// Which selected tokens are the first of their row.
    pub(crate) firsts: Tensor,
    /// `(N, D)`: the residual stream.
    pub(crate) x: Tensor,
    /// `(N, D)`.
    pub(crate) y: Tensor,
    /// `(N, D)` f32: `y` itself where that is f32.
    pub(crate) z: Tensor,
    pub(crate) wide: Tensor,
    pub(crate) mean: Tensor,
    pub(crate) rstd: Tensor,
    /// `(S, D)`: the residual stream of selected tokens.
    pub(crate) sx: Tensor,
    pub(crate) sy: Tensor,
    /// `(S, D)` f32: `sy` itself where that is f32.
    pub(crate) sz: Tensor,
    pub(crate) sq: Tensor,
    pub(crate) swide: Tensor,
    /// One for each marker.
    pub(crate) logits: Tensor,
    /// Where each row's logits start.
    pub(crate) logit_starts: Tensor,
    /// Input, hidden layer and output of the action head.
    pub(crate) act: [Tensor; 3],
    /// What the host reads: `logits`, and `act[2]` from [`Views::act_at`] on.
    pub(crate) answers: Tensor,
    /// No row has more tokens.
    pub(crate) longest: Option<usize>,
    pub(crate) workspace: Tensor,
    /// All that the pack says, in the order of the views.
    said: Vec<i32>,
}

impl Views {
    /// For a pack, which is to be sent before anything reads it.
    pub(crate) fn of(device: &Device, buffers: &Buffers, widths: &Widths, pack: &Pack) -> Result<Self> {
        let Capacity { tokens: n, rows: r, selected: s } = pack.capacity();
        let d = widths.hidden;
        let of_selected = |all: &[i32]| pack.selected.iter().map(|&t| all[t as usize]).collect::<Vec<_>>();
        // Empty rows have no first token; they show another row's, and nobody looks.
        let firsts: Vec<i32> = pack.selected_starts[..r].iter().map(|&first| first.min(s as i32 - 1)).collect();
        let mut markers: Vec<i32> = pack.selected_starts.windows(2).flat_map(|span| span[0] + 1..span[1]).collect();
        if pack.all_selected {
            markers.resize(s, 0);
        }
        let mut said: Vec<i32> = Vec::with_capacity(buffers.said.numel());
        let mut say = |values: &[i32]| {
            said.resize(said.len().next_multiple_of(PART), 0);
            said.extend_from_slice(values);
            buffers.said.slice(said.len() - values.len(), &[values.len()])
        };
        let f = |buffer: &Tensor, rows: usize, cols: usize| buffer.slice(0, &[rows, cols]);
        let b = buffers;
        let act_at = act_at(markers.len());
        Ok(Views {
            device: device.clone(),
            ids: say(&pack.ids)?,
            positions: say(&pack.positions)?,
            option_ids: if pack.option_ids.is_empty() { None } else { Some(say(&pack.option_ids)?) },
            types: say(&pack.types)?,
            row_starts: say(&pack.row_starts)?,
            selected: say(&pack.selected)?,
            selected_starts: say(&pack.selected_starts)?,
            selected_positions: say(&of_selected(&pack.positions))?,
            selected_types: say(&of_selected(&pack.types))?,
            markers: say(&markers)?,
            firsts: say(&firsts)?,
            logit_starts: say(&pack.logit_starts)?,
            longest: pack.longest,
            x: f(&b.x, n, d)?,
            y: f(&b.y, n, d)?,
            z: f(&b.z, n, d)?,
            wide: f(&b.wide, n, widths.wide)?,
            mean: b.mean.clone(),
            rstd: b.rstd.clone(),
            sx: f(&b.sx, s, d)?,
            sy: f(&b.sy, s, d)?,
            sz: f(&b.sz, s, d)?,
            sq: f(&b.sq, s, d)?,
            swide: f(&b.swide, s, widths.wide_selected)?,
            logits: f(&b.answers, markers.len(), 1)?,
            act: [
                f(&b.act[0], r, widths.act[0])?,
                f(&b.act[1], r, widths.act[1])?,
                b.answers.slice(act_at, &[r, widths.act[2]])?,
            ],
            answers: b.answers.slice(0, &[act_at + r * widths.act[2]])?,
            workspace: b.workspace.clone(),
            said,
        })
    }

    /// Where the action head's logits start in the answers.
    pub(crate) fn act_at(&self) -> usize {
        act_at(self.logits.numel())
    }

    /// What was normalised into `z` becomes the stream.
    pub(crate) fn take_final(&mut self) {
        std::mem::swap(&mut self.x, &mut self.z);
        if self.y.dtype() == DType::F32 {
            // They are one buffer, so the old stream is the next `y`.
            self.y = self.z.clone();
        }
    }

    /// The same for the selected tokens.
    pub(crate) fn take_final_selected(&mut self) {
        std::mem::swap(&mut self.sx, &mut self.sz);
        if self.sy.dtype() == DType::F32 {
            self.sy = self.sz.clone();
        }
    }

    /// The wide buffer as `(N, width)`.
    pub(crate) fn wide(&self, width: usize) -> Result<Tensor> {
        self.wide.slice(0, &[self.x.shape()[0], width])
    }
}
