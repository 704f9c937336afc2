"""The forward pass of a bidirectional encoder in PyTorch, as an arm of `tilewright bench` (docs/bench-protocol.md).

    tilewright bench run bench/plans/encoder-pytorch.toml --set PEER_PYTHON=python3

The model has the form of ModernBERT with random weights from the seed: LayerNorm without bias before attention and MLP (after the embedding in
place of the first), rotary positions, a gated GELU, full attention in every third layer and a window of 128 in the others, no dropout. A `run`
encodes `batch` rows of `seq_len` tokens, none padded, to hidden states. Parameters: batch, seq_len, layers, channels, heads, mlp, vocab.
Tensor: tokens [batch * seq_len].
"""

import argparse

import arm
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch_arm

WINDOW, FULL_EVERY = 128, 3
FULL_THETA, WINDOW_THETA = 160000.0, 10000.0
SHOWN = 64


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def explicit_attention(q, k, v, allowed):
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def fused_attention(q, k, v, allowed):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


class Layer(nn.Module):
    def __init__(self, index, channels, heads, mlp, attention):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.full = index % FULL_EVERY == 0
        self.attention_norm = nn.Identity() if index == 0 else nn.LayerNorm(channels, bias=False)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.out = nn.Linear(channels, channels, bias=False)
        self.mlp_norm = nn.LayerNorm(channels, bias=False)
        self.up = nn.Linear(channels, 2 * mlp, bias=False)
        self.down = nn.Linear(mlp, channels, bias=False)

    def forward(self, x, rotary, allowed):
        batch, length, channels = x.shape
        heads = (batch, length, self.heads, channels // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1))
        mixed = self.attention(rotate(q, *rotary), rotate(k, *rotary), v, allowed)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, channels))
        value, gate = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.gelu(value) * gate)


class Encoder(nn.Module):
    def __init__(self, layers, channels, heads, mlp, vocab, attention):
        super().__init__()
        if channels % heads or channels // heads % 2:
            raise ValueError(f"{channels} channels do not divide into {heads} heads of even size")
        self.embedding = nn.Embedding(vocab, channels)
        self.embedding_norm = nn.LayerNorm(channels, bias=False)
        self.layers = nn.ModuleList(Layer(i, channels, heads, mlp, attention) for i in range(layers))
        self.final_norm = nn.LayerNorm(channels, bias=False)
        self.head_size = channels // heads

    def draw(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, 0.0, 0.02, generator=generator)

    def positions(self, length, device, dtype):
        """Cosines and sines of both kinds of layers and the window's mask: made once a shape, they last."""
        at = torch.arange(length, dtype=torch.float32)
        tables = []
        for theta in (FULL_THETA, WINDOW_THETA):
            angle = torch.outer(at, theta ** (-torch.arange(0, self.head_size, 2) / self.head_size)).repeat(1, 2)
            tables.append((angle.cos().to(device, dtype), angle.sin().to(device, dtype)))
        near = (at[:, None] - at[None, :]).abs() <= WINDOW // 2
        return *tables, None if near.all() else near.to(device)

    def forward(self, tokens, full, windowed, near):
        x = self.embedding_norm(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x, full, None) if layer.full else layer(x, windowed, near)
        return self.final_norm(x)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    torch_arm.add_arguments(parser)
    parser.add_argument("--attention", default="fused", choices=("fused", "explicit"), help="explicit builds the scores")
    args = parser.parse_args()
    fingerprint = torch_arm.set_up(args) | {"attention": args.attention}
    attention = fused_attention if args.attention == "fused" else explicit_attention
    ready, calls = {}, []

    def work(index):
        with torch.inference_mode():
            return ready["call"](ready["ring"][index], *ready["positions"])

    def prepare(inputs, params, seed):
        ready.clear()
        calls.clear()
        size = tuple(int(params[key]) for key in ("batch", "seq_len"))
        model = Encoder(*(int(params[key]) for key in ("layers", "channels", "heads", "mlp", "vocab")), attention)
        model.draw(seed)
        model = model.to(args.device, torch_arm.DTYPES[args.dtype]).eval()
        ready["positions"] = model.positions(size[1], args.device, torch_arm.DTYPES[args.dtype])
        ready["ring"] = [
            torch_arm.tensor(inputs, index, "tokens", size, torch.int32).long().to(args.device)
            for index in torch_arm.indices(inputs)
        ]
        ready["call"] = torch.compile(model, dynamic=False) if args.compile else model
        # Compiles, and lets libraries allocate what they keep.
        work(0)

    def run(index):
        answer, states = torch_arm.measure(args.device, lambda: work(index), memory=not calls)
        calls.append(index)
        answer["output"] = torch_arm.digest(states)
        answer["metrics"] = {"norm": torch_arm.norm(states), "states": states[-1, -1, :SHOWN].tolist()}
        return answer

    arm.serve(f"pytorch {torch.__version__}", fingerprint, prepare, run)


if __name__ == "__main__":
    main()
