"""A GPT-2 training step in PyTorch on the CPU, fp32, as an arm of `tilewright bench` (docs/bench-protocol.md).

    tilewright bench run bench/plans/gpt2-cpu-vs-pytorch.toml --set PEER_PYTHON=python3

A `run` is one whole step (zero_grad, forward, backward, optimiser) on the tokens of the plan, by this program's own clock.

The model is the best plain PyTorch has on a CPU: scaled_dot_product_attention, one fused qkv product, fused AdamW; --compile adds
torch.compile.
"""

import argparse
import math
import time

import arm
import torch
import torch.nn as nn
import torch.nn.functional as F

# depth -> channels, heads
MODELS = {"d6": (384, 6), "d12": (768, 12), "d24": (1024, 16), "d36": (1280, 20), "d48": (1600, 25)}
VOCAB, PADDED_VOCAB, POSITIONS = 50257, 50304, 1024


class Layer(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.attproj = nn.Linear(channels, channels)
        self.ln2 = nn.LayerNorm(channels)
        self.fc = nn.Linear(channels, 4 * channels)
        self.fcproj = nn.Linear(4 * channels, channels)

    def forward(self, x):
        batch, length, channels = x.shape
        heads = (batch, length, self.heads, channels // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.ln1(x)).split(channels, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attproj(mixed.transpose(1, 2).reshape(batch, length, channels))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, depth, channels, heads):
        super().__init__()
        self.wte = nn.Embedding(PADDED_VOCAB, channels)
        self.wpe = nn.Embedding(POSITIONS, channels)
        self.layers = nn.ModuleList(Layer(channels, heads) for _ in range(depth))
        self.lnf = nn.LayerNorm(channels)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith("proj.weight")
                nn.init.normal_(parameter, 0.0, 0.02 / math.sqrt(2 * depth) if into_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.lnf(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="d12", choices=MODELS)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clip", type=float, default=0.0, help="clip the gradient norm; 0 leaves it out")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(42)
    model = Gpt2(int(args.model[1:]), *MODELS[args.model])
    parameters = list(model.parameters())
    # Matrices and embeddings decay, vectors do not.
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    batches = []
    call = torch.compile(model, dynamic=False) if args.compile else model

    def step(index):
        tokens, targets = batches[index % len(batches)]
        optimiser.zero_grad(set_to_none=True)
        loss = call(tokens, targets)
        loss.backward()
        if args.clip > 0:
            nn.utils.clip_grad_norm_(parameters, args.clip)
        optimiser.step()
        return loss.item()

    def prepare(inputs, params, seed):
        flat = [torch.frombuffer(bytearray(arm.read(i)), dtype=torch.int32).long() for i in inputs if i["name"] == "tokens"]
        size = (args.batch, args.seq_len)
        batches.extend((tokens[:-1].view(size), tokens[1:].view(size)) for tokens in flat)

    def run(index):
        start = time.perf_counter_ns()
        loss = step(index)
        return {"ns": time.perf_counter_ns() - start, "metrics": {"loss": loss}}

    fingerprint = {"torch": torch.__version__, "threads": torch.get_num_threads(), "dtype": "f32", "model": args.model, "compile": args.compile}
    fingerprint["blas"] = "mkl" if torch.backends.mkl.is_available() else "other"
    arm.serve(f"pytorch {torch.__version__}", fingerprint, prepare, run)


if __name__ == "__main__":
    main()
