"""Linear cross-entropy in PyTorch, forward and backward, as an arm of `tilewright bench` (docs/bench-protocol.md).

    tilewright bench run bench/plans/linear-cross-entropy-pytorch.toml --set PEER_PYTHON=python3

A `run` is the mean cross-entropy of hidden @ weight^T against the targets, rows with target -100 left out, and the gradients of hidden and
weight. Parameters: tokens, channels, vocab. Tensors: hidden [tokens, channels], targets [tokens], and weight [vocab, channels], which is
drawn from the seed when the plan gives none. The logits are built whole: in the dtype, or with --logits f32 widened before the loss.
"""

import argparse

import arm
import torch
import torch.nn.functional as F
import torch_arm

SHOWN = 64


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    torch_arm.add_arguments(parser)
    parser.add_argument("--logits", default="same", choices=("same", "f32"), help="dtype of the logits that the loss sees")
    args = parser.parse_args()
    fingerprint = torch_arm.set_up(args) | {"logits": args.logits}
    dtype = torch_arm.DTYPES[args.dtype]
    ring, calls = [], []

    def loss_of(hidden, weight, targets):
        logits = F.linear(hidden, weight)
        return F.cross_entropy(logits.float() if args.logits == "f32" else logits, targets)

    call = torch.compile(loss_of, dynamic=False) if args.compile else loss_of

    def work(index):
        hidden, weight, targets = ring[index]
        loss = call(hidden, weight, targets)
        loss.backward()
        return loss.detach()

    def prepare(inputs, params, seed):
        ring.clear()
        calls.clear()
        tokens, channels, vocab = (int(params[key]) for key in ("tokens", "channels", "vocab"))
        leaf = lambda x: x.to(args.device, dtype).requires_grad_()
        given = any(i["name"] == "weight" for i in inputs)
        if not given:
            drawn = leaf(torch.randn(vocab, channels, generator=torch.Generator().manual_seed(seed)) * 0.02)
        for index in torch_arm.indices(inputs):
            hidden = leaf(torch_arm.tensor(inputs, index, "hidden", (tokens, channels)))
            weight = leaf(torch_arm.tensor(inputs, index, "weight", (vocab, channels))) if given else drawn
            targets = torch_arm.tensor(inputs, index, "targets", (tokens,), torch.int32).long().to(args.device)
            ring.append((hidden, weight, targets))
        # Compiles, and lets libraries allocate what they keep.
        work(0)
        ring[0][0].grad = ring[0][1].grad = None

    def run(index):
        answer, loss = torch_arm.measure(args.device, lambda: work(index), memory=not calls)
        calls.append(index)
        hidden, weight, _ = ring[index]
        answer["output"] = torch_arm.digest(loss, hidden.grad, weight.grad)
        answer["metrics"] = {
            "loss": loss.item(),
            "hidden_gradient_norm": torch_arm.norm(hidden.grad),
            "weight_gradient_norm": torch_arm.norm(weight.grad),
            "hidden_gradient": hidden.grad.flatten()[:SHOWN].tolist(),
        }
        hidden.grad = weight.grad = None
        return answer

    arm.serve(f"pytorch {torch.__version__}", fingerprint, prepare, run)


if __name__ == "__main__":
    main()
