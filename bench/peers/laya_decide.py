"""The `laya` package on the CPU, fp32, as an arm of `tilewright bench` (docs/bench-protocol.md).

    tilewright bench run bench/plans/decide-cpu-vs-laya.toml --set PEER_PYTHON=...

A `run` is one `Agent.system_one`: the first questions of a file about the text of one input, each row cut to a fixed number of tokens. Tokenizing,
the model and the result are all timed, by this program's own clock. The package rewrites tokenizer_config.json while it loads, so it is given a copy
of the checkpoint (with a link to the weights).
"""

import argparse
import hashlib
import json
import os
import shutil
import tempfile
import time

import arm
import torch

# Random bytes become letters and spaces, as in `tilewright bench-decide`.
ALPHABET = "abcdefghijklmnopqrstuvwxyz      "


def copy_of(checkpoint, folder):
    target = os.path.join(folder, "checkpoint")
    shutil.copytree(checkpoint, target, ignore=shutil.ignore_patterns("model.safetensors"))
    os.symlink(os.path.abspath(os.path.join(checkpoint, "model.safetensors")), os.path.join(target, "model.safetensors"))
    return target


def published(answer):
    return list(answer["probabilities"].values()) if "probabilities" in answer else [answer["noul"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a checkpoint")
    parser.add_argument("--questions", required=True)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--row-tokens", type=int, default=65)
    parser.add_argument("--head-tokens", type=int, default=56)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    os.environ["HF_HUB_OFFLINE"] = "1"
    import laya

    torch.set_num_threads(args.threads)
    with open(args.questions, encoding="utf-8") as file:
        questions = dict(list(json.load(file).items())[: args.count])
    states, agents = [], []
    folder = tempfile.TemporaryDirectory()

    def prepare(inputs, params, seed):
        states.extend("".join(ALPHABET[byte % 32] for byte in arm.read(i)) for i in inputs if i["name"] == "text")
        agent = laya.Agent(copy_of(args.model, folder.name), device="cpu")
        # A checkpoint whose encoder/config.json says otherwise is run in that type, which is no comparison.
        if any(p.dtype != torch.float32 for p in agent.model.parameters()):
            raise ValueError("the package does not keep this checkpoint in f32; remove `dtype` from its encoder/config.json")
        agents.append(agent)

    def run(index):
        start = time.perf_counter_ns()
        result = agents[0].system_one(states[index % len(states)], questions, max_len=args.row_tokens, head_max_len=args.head_tokens)
        ns = time.perf_counter_ns() - start
        probabilities = [p for answer in result["answers"].values() for p in published(answer)]
        metrics = {"probabilities": probabilities, "input_tokens": result["usage"]["input_tokens"]}
        return {"ns": ns, "output": hashlib.sha256(json.dumps(result).encode()).hexdigest(), "metrics": metrics}

    fingerprint = {
        "laya": laya.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "dtype": "f32",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "questions": args.count,
        "row_tokens": args.row_tokens,
    }
    arm.serve(f"laya {laya.__version__}", fingerprint, prepare, run)
    folder.cleanup()


if __name__ == "__main__":
    main()
