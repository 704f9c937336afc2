#!/usr/bin/env python3
"""Where a training step's time goes, kernel by kernel, by Nsight Compute: profile.py PROGRAM OUT.csv B:recompute

The second step is recorded and the third replayed, so the first is the one whose kernels are seen one by one; a run before it fills the caches of kernels
and algorithms. Clocks are left alone, caches are not flushed between kernels. Times of kernels do not contain the gaps between them.
"""
import collections
import csv
import io
import json
import subprocess
import sys


def ask(words, steps):
    batch, recompute = words[-1].split(":")
    command = words[:-1] + ["bench-step", "--device", "cuda", "--precision", "bf16", "--batch", batch, "--seq-len", "1024"]
    command += ["--recompute", recompute, "--clip", "1", "--ring", "1"]
    requests = [{"do": "hello"}] + [{"do": "run", "input": 0}] * steps + [{"do": "quit"}]
    text = "".join(json.dumps(r) + "\n" for r in requests)
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=150).stdout


def main():
    program, out, setting = sys.argv[1:4]
    ask([program, setting], 1)
    ncu = ["ncu", "--metrics", "gpu__time_duration.sum", "--clock-control", "none", "--cache-control", "none", "--csv", "--print-units", "base"]
    text = ask(ncu + [program, setting], 1)
    with open(out, "w") as file:
        file.write(text)
    lines = [line for line in text.splitlines() if line.startswith('"')]
    times = collections.defaultdict(list)
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        times[row["Kernel Name"].split("(")[0][:60], row["Grid Size"]].append(float(row["Metric Value"].replace(",", "")) / 1e6)
    total = sum(map(sum, times.values()))
    print(f"B:recompute {setting}: {sum(map(len, times.values()))} kernels, {total:.3f} ms")
    for (name, grid), all_times in sorted(times.items(), key=lambda item: -sum(item[1]))[:45]:
        print(f"{sum(all_times):8.3f} ms {len(all_times):4d} x {1e3 * sum(all_times) / len(all_times):8.1f} us  {name} {grid}")


main()
