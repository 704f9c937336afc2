#!/usr/bin/env python3
"""Median of a training step by `bench-step`, several settings by turns: steps.py PROGRAM OUT.json [B:recompute ...]

Each setting is a process of its own, so that its memory is its own; `rounds` visits to each show the spread between visits.
"""
import json
import os
import statistics
import subprocess
import sys
import time

# Seconds of steps before those that count: an idle GPU takes more than a second to its clock.
ROUNDS, WARM, STEPS = 2, 2.0, 20
DEVICE = os.environ.get("TILEWRIGHT_STEPS_DEVICE", "cuda")


def visit(program, batch, recompute, precision="bf16", env=None):
    words = [program, "bench-step", "--device", DEVICE, "--precision", precision, "--batch", str(batch), "--seq-len", "1024"]
    arm = subprocess.Popen(
        words + ["--recompute", str(recompute), "--clip", "1", "--ring", "4"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(**request):
        arm.stdin.write(json.dumps(request) + "\n")
        arm.stdin.flush()
        line = arm.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(words)} ended")
        return json.loads(line)

    ask(do="hello")
    ask(do="run", input=0)
    start, warm = time.time(), 0
    while warm < 5 or time.time() - start < WARM:
        ask(do="run", input=warm)
        warm += 1
    answers = [ask(do="run", input=i) for i in range(STEPS)]
    ask(do="quit")
    arm.wait(timeout=30)
    return [a["ns"] / 1e6 for a in answers], answers[-1]["peak_bytes"], [a["metrics"]["loss"] for a in answers]


def main():
    program, out, settings = sys.argv[1], sys.argv[2], sys.argv[3:] or ["4:0", "32:2", "64:0"]
    rows = {}
    for turn in range(ROUNDS):
        for setting in settings if turn % 2 == 0 else reversed(settings):
            batch, recompute = (int(n) for n in setting.split(":"))
            try:
                times, peak, losses = visit(program, batch, recompute)
            except Exception as error:
                print(f"B={batch} recompute {recompute}: {error}", flush=True)
                continue
            row = rows.setdefault(setting, {"batch": batch, "recompute": recompute, "peak_bytes": peak, "ms": [], "losses": losses})
            row["ms"].append(times)
    for row in rows.values():
        medians = [statistics.median(t) for t in row["ms"]]
        row["median_ms"] = statistics.median(sum(row["ms"], []))
        tokens = row["batch"] * 1024 / row["median_ms"] * 1e3
        print(f"B={row['batch']} T=1024 bf16, recompute {row['recompute']}: {row['median_ms']:.3f} ms (visits {', '.join(f'{m:.3f}' for m in medians)}), "
              f"{tokens / 1e3:.0f} k tokens/s, peak {row['peak_bytes'] / 1e9:.2f} GB, loss {row['losses'][0]:.3f} to {row['losses'][-1]:.3f}", flush=True)
    with open(out, "w") as file:
        json.dump({"device": DEVICE, "rounds": ROUNDS, "warm_seconds": WARM, "steps": STEPS, "rows": list(rows.values())}, file, indent=1)


if __name__ == "__main__":
    main()
