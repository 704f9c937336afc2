//! The model written a second time, from its description: f64, one token and one head at a time, no packing and nothing left out. Random
//! configurations compare the two.

use std::collections::HashMap;
use std::path::Path;

use tilewright_core::DType;
use tilewright_core::rng::XorShift;
use tilewright_models::laya::{AgentConfig, Checkpoint, OptionLayout, Row, Scorer, demo::DemoShape};
use tilewright_models::modernbert::{EncoderConfig, LayerKind};
use tilewright_ops::Device;

use crate::common::{devices, open, random_checkpoint, random_row};

type States = Vec<Vec<f64>>;

struct Reference {
    weights: HashMap<String, (Vec<usize>, Vec<f64>)>,
    encoder: EncoderConfig,
    agent: AgentConfig,
}

impl Reference {
    fn open(dir: &Path) -> Self {
        let checkpoint = Checkpoint::open(dir, None).unwrap();
        let device = Device::cpu_with_threads(1);
        let names = names(checkpoint.encoder(), checkpoint.agent());
        let weights = names.into_iter().map(|name| {
            let t = checkpoint.tensor(&device, &name).unwrap();
            let values = t.read_f32().unwrap().into_iter().map(f64::from).collect();
            (name, (t.shape().to_vec(), values))
        });
        Reference {
            weights: weights.collect(),
            encoder: checkpoint.encoder().clone(),
            agent: checkpoint.agent().clone(),
        }
    }

    fn get(&self, name: &str) -> Option<&[f64]> {
        self.weights.get(name).map(|(_, values)| &values[..])
    }

    /// `name.weight @ x + name.bias`.
    fn linear(&self, weight: &str, bias: &str, x: &[f64]) -> Vec<f64> {
        let w = self.get(weight).unwrap_or_else(|| panic!("there is no {weight}"));
        let mut out: Vec<f64> =
            w.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect();
        if let Some(bias) = self.get(bias) {
            out.iter_mut().zip(bias).for_each(|(o, b)| *o += b);
        }
        out
    }

    fn layer(&self, name: &str, x: &[f64]) -> Vec<f64> {
        self.linear(&format!("{name}.weight"), &format!("{name}.bias"), x)
    }

    fn norm(&self, name: &str, eps: f64, x: &[f64]) -> Vec<f64> {
        let n = x.len() as f64;
        let mean = x.iter().sum::<f64>() / n;
        let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
        let weight = self.get(&format!("{name}.weight")).unwrap();
        let bias = self.get(&format!("{name}.bias"));
        let scaled =
            |(i, x): (usize, &f64)| (x - mean) / (variance + eps).sqrt() * weight[i] + bias.map_or(0.0, |b| b[i]);
        x.iter().enumerate().map(scaled).collect()
    }

    fn forward(&self, row: &Row) -> (Vec<f64>, Vec<f64>) {
        let e = &self.encoder;
        let (d, n, eps) = (e.hidden, row.ids.len(), f64::from(e.norm_eps));
        let table = self.get("encoder.embeddings.tok_embeddings.weight").unwrap();
        let embed =
            |&id: &u32| self.norm("encoder.embeddings.norm", eps, &table[id as usize * d..(id as usize + 1) * d]);
        let mut x: States = row.ids.iter().map(embed).collect();
        let index: Vec<u32> = (0..n as u32).collect();
        let positions = row.positions.as_ref().map_or(&index, |p| &p.position_ids);
        let options = row.positions.as_ref().map(|p| &p.option_ids);
        for (i, &kind) in e.layers.iter().enumerate() {
            let p = format!("encoder.layers.{i}");
            let y: States = match i {
                0 => x.clone(),
                _ => x.iter().map(|x| self.norm(&format!("{p}.attn_norm"), eps, x)).collect(),
            };
            let qkv: States = y.iter().map(|y| self.layer(&format!("{p}.attn.Wqkv"), y)).collect();
            let theta = match kind {
                LayerKind::Full => e.full_theta,
                LayerKind::Sliding => e.sliding_theta,
            };
            let sees = |a: usize, b: usize| {
                let apart = options.is_some_and(|o| o[a] > 0 && o[b] > 0 && o[a] != o[b]);
                let far = positions[a].abs_diff(positions[b]) as usize > e.local_attention / 2;
                !apart && (kind == LayerKind::Full || !far)
            };
            let mixed = attention(&qkv, e.heads, Some((theta, positions)), sees);
            for (x, mixed) in x.iter_mut().zip(mixed) {
                add(x, &self.layer(&format!("{p}.attn.Wo"), &mixed));
                let both = self.layer(&format!("{p}.mlp.Wi"), &self.norm(&format!("{p}.mlp_norm"), eps, x));
                let (a, b) = both.split_at(e.intermediate);
                let hidden: Vec<f64> = a.iter().zip(b).map(|(a, b)| gelu(*a) * b).collect();
                add(x, &self.layer(&format!("{p}.mlp.Wo"), &hidden));
            }
        }
        let types = self.get("type_emb.weight").unwrap();
        let question = row.question.index();
        for x in &mut x {
            *x = self.norm("encoder.final_norm", eps, x);
            add(x, &types[question * d..(question + 1) * d]);
        }
        for j in 0..self.agent.head_layers {
            let p = format!("head.layers.{j}");
            let project = |x: &Vec<f64>| {
                let y = self.norm(&format!("{p}.norm1"), 1e-5, x);
                self.linear(&format!("{p}.self_attn.in_proj_weight"), &format!("{p}.self_attn.in_proj_bias"), &y)
            };
            let qkv: States = x.iter().map(project).collect();
            let mixed = attention(&qkv, (d / 64).max(1), None, |_, _| true);
            for (x, mixed) in x.iter_mut().zip(mixed) {
                add(x, &self.layer(&format!("{p}.self_attn.out_proj"), &mixed));
                let hidden = self.layer(&format!("{p}.linear1"), &self.norm(&format!("{p}.norm2"), 1e-5, x));
                let hidden: Vec<f64> = hidden.into_iter().map(|h| h.max(0.0)).collect();
                add(x, &self.layer(&format!("{p}.linear2"), &hidden));
            }
        }
        let score = |&m: &u32| {
            let hidden = self.layer("scorer.1", &self.norm("scorer.0", 1e-5, &x[m as usize]));
            self.layer("scorer.3", &hidden.into_iter().map(gelu).collect::<Vec<_>>())[0]
        };
        let logits: Vec<f64> = row.markers.iter().map(score).collect();
        let mut p = softmax(&logits);
        let k = logits.len().max(2) as f64;
        let entropy = -p.iter().map(|p| p * p.max(1e-9).ln()).sum::<f64>() / k.ln();
        p.sort_by(|a, b| b.total_cmp(a));
        let mut input = x[0].clone();
        input.extend([p[0], p[0] - p.get(1).unwrap_or(&0.0), entropy, k / 255.0]);
        let hidden: Vec<f64> = self.layer("act_head.0", &input).into_iter().map(gelu).collect();
        (logits, self.layer("act_head.2", &hidden))
    }
}

fn names(e: &EncoderConfig, agent: &AgentConfig) -> Vec<String> {
    let mut names: Vec<String> = e.params("encoder.").into_iter().map(|(name, _)| name).collect();
    for j in 0..agent.head_layers {
        for part in ["self_attn.in_proj_", "self_attn.out_proj.", "linear1.", "linear2.", "norm1.", "norm2."] {
            names.extend(["weight", "bias"].map(|kind| format!("head.layers.{j}.{part}{kind}")));
        }
    }
    names.push("type_emb.weight".into());
    for part in ["scorer.0", "scorer.1", "scorer.3", "act_head.0", "act_head.2"] {
        names.extend(["weight", "bias"].map(|kind| format!("{part}.{kind}")));
    }
    names
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn softmax(x: &[f64]) -> Vec<f64> {
    let largest = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let e: Vec<f64> = x.iter().map(|x| (x - largest).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.into_iter().map(|e| e / sum).collect()
}

fn attention(
    qkv: &States,
    heads: usize,
    rope: Option<(f64, &Vec<u32>)>,
    sees: impl Fn(usize, usize) -> bool,
) -> States {
    let d = qkv[0].len() / 3;
    let size = d / heads;
    let mut out = vec![vec![0.0; d]; qkv.len()];
    for head in 0..heads {
        let part = |token: usize, which: usize| {
            let x = qkv[token][which * d + head * size..][..size].to_vec();
            match rope {
                Some((theta, positions)) if which < 2 => turn(&x, f64::from(positions[token]), theta),
                _ => x,
            }
        };
        let [q, k, v] = [0, 1, 2].map(|which| (0..qkv.len()).map(|t| part(t, which)).collect::<States>());
        for (a, query) in q.iter().enumerate() {
            let keys: Vec<usize> = (0..qkv.len()).filter(|&b| sees(a, b)).collect();
            let dot = |&b: &usize| query.iter().zip(&k[b]).map(|(q, k)| q * k).sum::<f64>() / (size as f64).sqrt();
            let p = softmax(&keys.iter().map(dot).collect::<Vec<_>>());
            for (p, &b) in p.iter().zip(&keys) {
                for (o, v) in out[a][head * size..][..size].iter_mut().zip(&v[b]) {
                    *o += p * v;
                }
            }
        }
    }
    out
}

fn turn(x: &[f64], position: f64, theta: f64) -> Vec<f64> {
    let half = x.len() / 2;
    let mut out = vec![0.0; x.len()];
    for t in 0..half {
        let (sin, cos) = (position * theta.powf(-2.0 * t as f64 / x.len() as f64)).sin_cos();
        out[t] = x[t] * cos - x[t + half] * sin;
        out[t + half] = x[t + half] * cos + x[t] * sin;
    }
    out
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2))
}

/// The error function by its power series; from 4.2 on, where the series loses digits, it differs from 1 by less than 3e-9.
fn erf(x: f64) -> f64 {
    if x.abs() > 4.2 {
        return x.signum();
    }
    let (mut sum, mut term, mut n) = (x, x, 0.0);
    while term.abs() > 1e-18 {
        n += 1.0;
        term *= -x * x / n;
        sum += term / (2.0 * n + 1.0);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

#[test]
fn the_reference_s_error_function_is_right() {
    for (x, want) in
        [(0.0, 0.0), (0.5, 0.520_499_877_813_046_5), (1.0, 0.842_700_792_949_714_9), (3.0, 0.999_977_909_503_001_4)]
    {
        assert!((erf(x) - want).abs() < 1e-12 && (erf(-x) + want).abs() < 1e-12, "{x}: {}", erf(x));
    }
    assert!((erf(4.19) - 1.0).abs() < 4e-9 && erf(4.3) == 1.0);
}

/// A random model: sizes that fill no vector, windows of any width, every bias switched on its own.
fn random_config(rng: &mut XorShift) -> (EncoderConfig, AgentConfig) {
    let mut below = |n: usize| rng.random_u32() as usize % n;
    let sizes = [(12, 3), (32, 4), (34, 1), (64, 2), (72, 6), (128, 4), (130, 5), (192, 3)];
    let (hidden, heads) = sizes[below(sizes.len())];
    let kinds = (0..1 + below(4)).map(|_| [LayerKind::Full, LayerKind::Sliding][below(2)]).collect();
    let mut flag = || below(2) == 1;
    let (norm_bias, attention_bias, mlp_bias, parallel) = (flag(), flag(), flag(), flag());
    let encoder = EncoderConfig {
        vocab_size: 320,
        hidden,
        intermediate: [1, 7, 33, 48, 95][below(5)],
        heads,
        layers: kinds,
        norm_eps: [1e-5, 1e-3][below(2)],
        local_attention: [0, 1, 4, 7, 16, 200][below(6)],
        full_theta: [160_000.0, 50.0][below(2)],
        sliding_theta: [10_000.0, 160_000.0][below(2)],
        max_positions: 600,
        norm_bias,
        attention_bias,
        mlp_bias,
    };
    let mut agent = DemoShape::Tiny.agent();
    (agent.head_layers, agent.act_classes) = (below(4), 1 + below(3));
    agent.option_layout = if parallel { OptionLayout::Parallel } else { OptionLayout::Sequential };
    (encoder, agent)
}

fn check(seed: u64, device: &Device, encoder: &EncoderConfig, agent: &AgentConfig) {
    let mut rng = XorShift::new(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let (_temp, dir) = random_checkpoint(encoder, agent, seed as u32);
    let reference = Reference::open(&dir);
    let mut model = open(&dir, device, DType::F32);
    let lengths = [1, 2, 3, 17, 1 + rng.random_u32() as usize % 60];
    let rows: Vec<Row> =
        lengths.map(|n| random_row(&mut rng, encoder.vocab_size, n, agent.option_layout)).into_iter().collect();
    for (row, scores) in rows.iter().zip(model.score(&rows).unwrap()) {
        let (logits, act) = reference.forward(row);
        for (what, got, want) in [("logit", &scores.logits, &logits), ("action logit", &scores.act_logits, &act)] {
            assert_eq!(got.len(), want.len());
            for (g, w) in got.iter().zip(want) {
                let error = (f64::from(*g) - w).abs() / (1.0 + w.abs());
                assert!(
                    error < 5e-5,
                    "seed {seed}, {} tokens, {what}: {g} for {w}\n{encoder:?}\n{agent:?}",
                    row.ids.len()
                );
            }
        }
    }
}

#[test]
fn random_configurations_agree_with_the_reference() {
    let device = Device::cpu_with_threads(2);
    for seed in 0..40 {
        let (encoder, agent) = random_config(&mut XorShift::new(seed * 7919 + 17));
        check(seed, &device, &encoder, &agent);
    }
}

#[test]
fn every_number_of_head_layers_agrees_on_every_instruction_set() {
    for device in devices() {
        for layers in 0..4 {
            let (encoder, mut agent) = random_config(&mut XorShift::new(99 + layers as u64));
            agent.head_layers = layers;
            check(1000 + layers as u64, &device, &encoder, &agent);
        }
    }
}

#[test]
fn all_biases_at_once_and_none_at_all_agree() {
    let device = Device::cpu_with_threads(2);
    for (seed, on) in [(1, true), (2, false)] {
        let (mut encoder, agent) = random_config(&mut XorShift::new(5));
        (encoder.norm_bias, encoder.attention_bias, encoder.mlp_bias) = (on, on, on);
        encoder.layers = vec![LayerKind::Full, LayerKind::Sliding, LayerKind::Sliding];
        check(seed, &device, &encoder, &agent);
    }
}

#[test]
fn a_row_longer_than_every_window_and_tile_agrees() {
    let (mut encoder, mut agent) = random_config(&mut XorShift::new(5));
    (encoder.layers, encoder.local_attention) = (vec![LayerKind::Sliding, LayerKind::Full, LayerKind::Sliding], 128);
    agent.option_layout = OptionLayout::Sequential;
    let (_temp, dir) = random_checkpoint(&encoder, &agent, 3);
    let row = random_row(&mut XorShift::new(8), encoder.vocab_size, 517, OptionLayout::Sequential);
    let (logits, _) = Reference::open(&dir).forward(&row);
    let got = open(&dir, &Device::cpu_with_threads(2), DType::F32).score(&[row]).unwrap();
    let worst = got[0].logits.iter().zip(&logits).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max);
    assert!(worst < 1e-4, "{worst:e}");
}
