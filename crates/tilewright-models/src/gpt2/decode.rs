//! Sampling one token at a time against a cache of keys and values.

use tilewright_core::gpt2::Gpt2Config;
use tilewright_core::{DType, Error, Result};
use tilewright_ops::gelu::Gelu;
use tilewright_ops::layernorm::Residual;
use tilewright_ops::{Arena, Device, Plan, Tensor, attention, embedding, layernorm, matmul, sampling};

use super::{LAYERNORM_EPS, param};

/// A cache of keys and values for one row, and the buffers of one token's pass. Reads the model's parameters, so it follows their training.
pub struct Decoder {
    pub(crate) arena: Arena,
    device: Device,
    config: Gpt2Config,
    params: Vec<Tensor>,
    position: usize,
    tokens: Tensor,
    next: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    encoded: Tensor,
    stream: Tensor,
    branch: Tensor,
    normed: Tensor,
    mean: Tensor,
    rstd: Tensor,
    qkv: Tensor,
    atty: Tensor,
    hidden: Tensor,
    logits: Tensor,
}

impl Decoder {
    /// A cache for `len` positions over the parameters of a model.
    pub fn new(device: &Device, config: Gpt2Config, params: &[Tensor], len: usize) -> Result<Self> {
        let c = config.channels;
        let dtype = params[param::WTE].dtype();
        let mut plan = Plan::new("sampling cache");
        let mut add = |name: &str, dtype: DType, dims: &[usize]| plan.add(name, dtype, dims);
        let tokens = add("token", DType::I32, &[1, 1]);
        let next = add("next token", DType::I32, &[1]);
        let k_cache = add("keys", dtype, &[config.layers, 1, len, c]);
        let v_cache = add("values", dtype, &[config.layers, 1, len, c]);
        let encoded = add("encoded", dtype, &[1, 1, c]);
        let stream = add("residual stream", dtype, &[1, c]);
        let branch = add("branch", dtype, &[1, c]);
        let normed = add("layernorm", dtype, &[1, c]);
        let mean = add("mean", DType::F32, &[1]);
        let rstd = add("rstd", DType::F32, &[1]);
        let qkv = add("qkv", dtype, &[1, 3 * c]);
        let atty = add("attention", dtype, &[1, c]);
        let hidden = add("mlp hidden", dtype, &[1, 4 * c]);
        let logits = add("logits", dtype, &[1, config.padded_vocab_size]);
        let arena = Arena::allocate(device, plan)?;
        let t = |slot| arena.tensor(slot);
        Ok(Decoder {
            device: device.clone(),
            config,
            params: params.to_vec(),
            position: 0,
            tokens: t(tokens),
            next: t(next),
            k_cache: t(k_cache),
            v_cache: t(v_cache),
            encoded: t(encoded),
            stream: t(stream),
            branch: t(branch),
            normed: t(normed),
            mean: t(mean),
            rstd: t(rstd),
            qkv: t(qkv),
            atty: t(atty),
            hidden: t(hidden),
            logits: t(logits),
            arena,
        })
    }

    /// Forgets everything; the next token stands at position 0.
    pub fn reset(&mut self) {
        self.position = 0;
    }

    /// Tokens fed since the last reset.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The most tokens that fit.
    pub fn capacity(&self) -> usize {
        self.k_cache.shape()[2]
    }

    /// Feeds one token; [`Decoder::logits`] then holds the prediction of the next.
    pub fn step(&mut self, token: i32) -> Result<()> {
        if self.position == self.capacity() {
            return Err(Error::Argument {
                op: "decoder.step",
                what: format!("the cache holds {} positions and is full; sample fewer tokens", self.capacity()),
            });
        }
        self.tokens.write_i32(&[token])?;
        let p = &self.params;
        embedding::forward(
            &self.device,
            &embedding::Forward {
                tokens: &self.tokens,
                wte: &p[param::WTE],
                wpe: &p[param::WPE],
                vocab: self.config.vocab_size,
                position: self.position,
                out: &self.encoded,
            },
        )?;
        self.stream.copy_from(&self.encoded.view(&self.stream.shape())?)?;
        for l in 0..self.config.layers {
            let w = |index: usize| p[index].index(l);
            self.layernorm(&w(param::LN1W)?, &w(param::LN1B)?, l > 0)?;
            self.linear(&self.normed, &w(param::QKVW)?, &w(param::QKVB)?, None, &self.qkv)?;
            attention::decode(
                &self.device,
                &attention::Decode {
                    qkv: &self.qkv,
                    heads: self.config.heads,
                    position: self.position,
                    k_cache: &self.k_cache.index(l)?,
                    v_cache: &self.v_cache.index(l)?,
                    out: &self.atty,
                },
            )?;
            self.linear(&self.atty, &w(param::ATTPROJW)?, &w(param::ATTPROJB)?, None, &self.branch)?;
            self.layernorm(&w(param::LN2W)?, &w(param::LN2B)?, true)?;
            self.linear(&self.normed, &w(param::FCW)?, &w(param::FCB)?, Some(Gelu::Tanh), &self.hidden)?;
            self.linear(&self.hidden, &w(param::FCPROJW)?, &w(param::FCPROJB)?, None, &self.branch)?;
        }
        self.layernorm(&p[param::LNFW], &p[param::LNFB], true)?;
        matmul::forward(
            &self.device,
            &matmul::Forward {
                x: &self.normed,
                weight: &p[param::WTE],
                bias: None,
                gelu: None,
                pre_gelu: None,
                out: &self.logits,
            },
        )?;
        self.position += 1;
        Ok(())
    }

    /// `(1, Vp)`: the logits after the last step; columns from `V` on mean nothing.
    pub fn logits(&self) -> &Tensor {
        &self.logits
    }

    /// Draws the next token from the last logits: see [`sampling::Forward`] for the arguments.
    pub fn sample(&mut self, temperature: f32, top_k: usize, coin: f32) -> Result<i32> {
        sampling::forward(
            &self.device,
            &sampling::Forward {
                logits: &self.logits,
                vocab: self.config.vocab_size,
                temperature,
                top_k,
                coins: &[coin],
                out: &self.next,
            },
        )?;
        Ok(self.next.read_i32()?[0])
    }

    /// Normalises the stream, after adding the pending branch to it in place.
    fn layernorm(&self, weight: &Tensor, bias: &Tensor, add_branch: bool) -> Result<()> {
        layernorm::forward(
            &self.device,
            &layernorm::Forward {
                x: &self.stream,
                residual: add_branch.then_some(Residual { branch: &self.branch, sum: &self.stream }),
                weight,
                bias: Some(bias),
                eps: LAYERNORM_EPS,
                out: &self.normed,
                mean: &self.mean,
                rstd: &self.rstd,
            },
        )
    }

    fn linear(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, gelu: Option<Gelu>, out: &Tensor) -> Result<()> {
        matmul::forward(&self.device, &matmul::Forward { x, weight, bias: Some(bias), gelu, pre_gelu: None, out })
    }
}
