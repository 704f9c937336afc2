//! The formula in f64, one score after the other: the oracle of the tests and the explanation of the op.

/// Sizes of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) b: usize,
    pub(super) heads: usize,
    pub(super) t: usize,
    pub(super) head: usize,
}

/// Which third of `qkv`.
#[derive(Clone, Copy)]
enum Part {
    Query,
    Key,
    Value,
}

impl Sizes {
    pub(super) fn c(&self) -> usize {
        self.heads * self.head
    }

    /// Where row `t` of a head's q, k or v starts in `(B, T, 3C)`.
    fn at(&self, b: usize, h: usize, t: usize, part: Part) -> usize {
        (b * self.t + t) * 3 * self.c() + part as usize * self.c() + h * self.head
    }

    /// Where row `t` of a head starts in `(B, T, C)`.
    fn out_at(&self, b: usize, h: usize, t: usize) -> usize {
        (b * self.t + t) * self.c() + h * self.head
    }

    fn rows(&self) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
        let s = *self;
        (0..s.b).flat_map(move |b| (0..s.heads).flat_map(move |h| (0..s.t).map(move |t| (b, h, t))))
    }

    fn scale(&self) -> f64 {
        1.0 / (self.head as f64).sqrt()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Scores of a query against the keys at or before it, and the log of the sum of their exponentials.
fn scores(s: Sizes, qkv: &[f64], b: usize, h: usize, i: usize) -> (Vec<f64>, f64) {
    let part = |t, p| &qkv[s.at(b, h, t, p)..][..s.head];
    let scores: Vec<f64> = (0..=i).map(|j| s.scale() * dot(part(i, Part::Query), part(j, Part::Key))).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = max + scores.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
    (scores, lse)
}

/// `(out, lse)`.
pub(super) fn forward(s: Sizes, qkv: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let mut out = vec![0.0; s.b * s.t * s.c()];
    let mut all_lse = Vec::with_capacity(s.b * s.heads * s.t);
    for (b, h, i) in s.rows() {
        let (scores, lse) = scores(s, qkv, b, h, i);
        all_lse.push(lse);
        for (j, score) in scores.iter().enumerate() {
            let p = (score - lse).exp();
            for d in 0..s.head {
                out[s.out_at(b, h, i) + d] += p * qkv[s.at(b, h, j, Part::Value) + d];
            }
        }
    }
    (out, all_lse)
}

/// `dqkv`: with `P = softmax(S)`, `dP = dout v^T` and `D = sum of P * dP` of a row, `dS = P * (dP - D)`.
pub(super) fn backward(s: Sizes, qkv: &[f64], dout: &[f64]) -> Vec<f64> {
    let mut dqkv = vec![0.0; qkv.len()];
    for (b, h, i) in s.rows() {
        let (scores, lse) = scores(s, qkv, b, h, i);
        let dout = &dout[s.out_at(b, h, i)..][..s.head];
        let p: Vec<f64> = scores.iter().map(|score| (score - lse).exp()).collect();
        let dp: Vec<f64> = (0..=i).map(|j| dot(dout, &qkv[s.at(b, h, j, Part::Value)..][..s.head])).collect();
        let mean = dot(&p, &dp);
        for j in 0..=i {
            let ds = p[j] * (dp[j] - mean) * s.scale();
            for d in 0..s.head {
                let (q, k, v) = (s.at(b, h, i, Part::Query), s.at(b, h, j, Part::Key), s.at(b, h, j, Part::Value));
                dqkv[q + d] += ds * qkv[k + d];
                dqkv[k + d] += ds * qkv[q + d];
                dqkv[v + d] += p[j] * dout[d];
            }
        }
    }
    dqkv
}
