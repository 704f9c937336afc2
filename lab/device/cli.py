#!/usr/bin/env python3
"""The program itself on a GPU: cli.py PROGRAM FIXTURES OUT.json

`decide` on the small recorded checkpoints, each precision against the processor's f32; a short `train` run in both precisions, resumed; `doctor`. Prints
one line a check and ends with 1 where one fails.
"""
import json
import os
import subprocess
import sys
import tempfile

QUESTIONS = {
    "urgent": {"type": "noul", "instructions": "Is it urgent?"},
    "team": {"type": "choice", "instructions": "Who handles it?", "criteria": {"billing": "money", "it": "computers", "law": "contracts"}},
    "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", "annoyed", "furious"]},
}
STATE = "My card was charged twice for the same order, and nobody has answered for a week. Please help today."
# Answers are printed to four decimals; the others are what f16 and bf16 are published to make.
BOUNDS = {"f32": 2e-4, "f16": 0.019, "bf16": 0.073}
DEVICE = os.environ.get("TILEWRIGHT_CLI_DEVICE", "cuda")


def numbers(value, path=""):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, f"{path}/{key}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)


def run(words, **more):
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, **more)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: exit {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout


def decide(program, folder, fixtures, rows):
    questions = os.path.join(folder, "questions.json")
    with open(questions, "w") as file:
        json.dump(QUESTIONS, file)
    for checkpoint in ("tiny-en", "tiny-multi", "tiny-parallel"):
        words = [program, "decide", "--model", os.path.join(fixtures, checkpoint), "--questions", questions, "--state", STATE, "--json"]
        want = dict(numbers(json.loads(run(words))["answers"]))
        for precision, bound in BOUNDS.items():
            got = dict(numbers(json.loads(run(words + ["--device", DEVICE, "--precision", precision]))["answers"]))
            # A score is a sum of levels, up to two apart here.
            worst = max(abs(got[k] - want[k]) / (2 if k.endswith("/score") else 1) for k in want) if got.keys() == want.keys() else float("inf")
            # Confidence of a noul or a score stretches probabilities by no more than 2.
            rows.append({"check": f"decide {checkpoint} {precision}", "largest": worst, "bound": 2 * bound, "holds": worst <= 2 * bound})


def losses(folder):
    with open(os.path.join(folder, "log.jsonl")) as file:
        lines = [json.loads(line) for line in file]
    return [line[key] for line in lines for key in ("loss", "train_loss") if isinstance(line.get(key), (int, float))]


def train(program, folder, rows):
    for precision in ("bf16", "f32"):
        home = os.path.join(folder, precision)
        run([program, "train", "--device", DEVICE, "--precision", precision, "--steps", "20", "--output", home])
        all_losses = losses(home)
        rows.append({"check": f"train {precision}", "first": all_losses[0], "last": all_losses[-1], "steps": len(all_losses), "holds": all_losses[-1] < all_losses[0]})


def main():
    program, fixtures, out = sys.argv[1:4]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for part in (lambda: decide(program, folder, fixtures, rows), lambda: train(program, folder, rows)):
            try:
                part()
            except Exception as error:  # noqa: BLE001  # one part's failure leaves the other to run
                rows.append({"check": "ran to its end", "what": str(error), "holds": False})
        doctor = json.loads(run([program, "doctor", "--json"]))
        rows.append({"check": "doctor", "devices": doctor.get("devices"), "holds": DEVICE in json.dumps(doctor.get("devices", {}))})
    for row in rows:
        print(("holds  " if row["holds"] else "FAILS  ") + ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k != "holds"), flush=True)
    with open(out, "w") as file:
        json.dump(rows, file, indent=1)
    sys.exit(0 if all(row["holds"] for row in rows) else 1)


main()
