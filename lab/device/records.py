#!/usr/bin/env python3
"""Records of a call of cuda.sh, in the form of those in bench/records: records.py LOGS OUT STEPS [--verdict]

Takes whatever the steps have left in LOGS so far; a file is written for each kind that has figures. With --verdict every bar is told beside its figure.
"""
import datetime
import json
import os
import re
import statistics
import sys

# Milliseconds at most; of a step also gigabytes.
STEP_BARS = {4: (8.0, 7.2, None), 32: (55.0, 50.0, 10.0), 64: (110.0, 98.0, None)}
ENCODER_BARS = {("large", 1, 64): 0.9, ("large", 50, 128): 9.5, ("large", 1, 8192): 15.0, ("mmbert", 1, 64): 0.6, ("mmbert", 50, 128): 3.5}
LOSS_BARS = {"LCE forward 8192x4096x151936": 15.5, "LCE fwd+bwd 8192x4096x151936": 50.0, "LCE forward 32768x768x50257": 5.0, "LCE fwd+bwd 32768x768x50257": 14.5}


def main():
    logs, out, ran = sys.argv[1:4]

    def text(name):
        try:
            with open(os.path.join(logs, name), errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def parsed(name):
        try:
            return json.loads(text(name) or "null")
        except ValueError:
            return None

    def rows(piece, kind=""):
        lines = (json.loads(line) for line in text(piece + ".jsonl").splitlines() if line.startswith("{"))
        return [{k: v for k, v in row.items() if k != "piece"} for row in lines if row.get("kind", "") == kind]

    card = text("card.txt").splitlines()
    chip = (card[0].split(",")[0].split() or ["gpu"])[-1].lower() if card else "gpu"
    date = datetime.date.today().isoformat()
    head = {"date": date, "commands": [f"lab/device/cuda.sh FOLDER OUT {ran}"], "card": card}

    def write(name, what, **more):
        with open(os.path.join(out, f"{date}-{name}-{chip}.json"), "w") as file:
            json.dump({"what": what, **head, **more}, file, indent=1)
            file.write("\n")

    def with_peer(command, piece):
        found = rows(piece)
        return {"peer": {"command": command, "rows": found}} if found else {}

    steps = parsed("steps.json")
    if steps:
        write("cuda-steps", "GPT-2 124M training steps, bf16, T=1024: medians of visits by turns, host's clock; the peer's by events", steps=steps,
              **with_peer("gpt2_train.py --variant VARIANT --batches B", "a_gpt2"))
    speeds = {shape: parsed(f"speed-{shape}.json") for shape in ("large", "mmbert")}
    speeds = {shape: speed for shape, speed in speeds.items() if speed}
    if speeds:
        write("encoder", "typed decisions in f16: whole calls of Laya::score (host's clock; device's clock from upload to download) and passes of the encoder "
              "alone (device's clock), random weights; the peer's rows are its encoder alone", **speeds,
              **with_peer("encoder.py --dtypes fp16 --variants region", "d_encoder"))
    probe = parsed("probe.json")
    if probe:
        write("cuda-probe", "ops at production shapes, medians of device time over replays of graphs", **probe)
        loss = [row for row in probe["rows"] if row.get("name", "").startswith("LCE")]
        run = {"data": "random, no two rows of a tile alike (period 1,000,003 elements)",
               "ceilings": {key: probe[key] for key in ("copy_tb_s", "bf16_tflop_s")}, "tilewright": loss, "peers": rows("c_linear_ce")}
        write("linear-cross-entropy", "linear cross-entropy, bf16; tilewright rows by cuda-probe (graph replays, medians of device time), peer rows by torch "
              "(events, medians), one after the other on one machine", runs=[run])
    outcomes = text("outcomes.txt").splitlines()
    results = {}
    for name in sorted(os.listdir(logs)):
        found = re.findall(r"^test result: (\w+)\. (\d+) passed; (\d+) failed; (\d+) ignored", text(name), re.M) if name.endswith(".log") else []
        if found:
            results[name[:-4]] = {"result": found[-1][0], "passed": int(found[-1][1]), "failed": int(found[-1][2]), "ignored": int(found[-1][3]),
                                  "names": re.findall(r"^test (\S+) \.\.\. ok", text(name), re.M)}
    said = [line for line in (text("train.log") + text("laya.log") + text("golden.log")).splitlines()
            if line and not re.match(r"(running|test |$)", line)][:120]
    if results or parsed("cli.json"):
        write("cuda-correctness", "case tables, golden set, training, recorded decisions, the program itself and the memory checker on a device", outcomes=outcomes,
              results=results, said=said, cli=parsed("cli.json"))
    tried = parsed("try.json")
    if tried:
        write("cuda-candidates", "kernels tried in the place of built-in ones, by turns; gain is the built-in median over the candidate's", **tried)
    if "--verdict" not in sys.argv:
        return

    def tell(holds, words):
        print(f"{'held  ' if holds else 'MISSED'}  {words}")

    for name, result in results.items():
        tell(result["result"] == "ok" and result["passed"] > 0, f"{name}: {result['passed']} passed, {result['failed']} failed")
    for line in outcomes:
        if re.search(r"exit (?!0\b)\d+|SKIPPED", line):
            tell(False, line)
    for line in said:
        if "deviation" in line or "largest" in line:
            print(f"        {line[:150]}")
    for row in (steps or {}).get("rows", []):
        bar, nearer, gigabytes = STEP_BARS.get(row["batch"], (None, None, None))
        if bar:
            tell(row["median_ms"] <= bar, f"step B={row['batch']} recompute {row['recompute']}: {row['median_ms']:.2f} ms, bar {bar}, next {nearer}")
        if gigabytes:
            tell(row["peak_bytes"] <= gigabytes * 1e9, f"peak memory B={row['batch']}: {row['peak_bytes'] / 1e9:.2f} GB, bar {gigabytes}")
    for row in (probe or {}).get("rows", []):
        for name, bar in LOSS_BARS.items():
            if row.get("name", "").startswith(name):
                tell(row["ms"] <= bar, f"{row['name']}: {row['ms']:.2f} ms, bar {bar}")
    for shape, speed in speeds.items():
        for case in speed["cases"]:
            key = (shape, case["rows"], case["tokens_a_row"])
            if key in ENCODER_BARS:
                ms = 1e3 * statistics.median(case["encoder_seconds"])
                tell(ms <= ENCODER_BARS[key], f"encoder {shape} {key[1]}x{key[2]}: {ms:.3f} ms, bar {ENCODER_BARS[key]}")
    for piece, keys in (("a_gpt2", ("variant", "B", "ms")), ("d_encoder", ("model", "variant", "B", "S", "gpu_ms")), ("c_linear_ce", ("impl", "shape", "mode", "ms", "work_gb"))):
        for row in rows(piece):
            print("peer    " + " ".join(f"{row[k]:.3f}" if isinstance(row.get(k), float) else str(row.get(k)) for k in keys) + ("  " + row["error"][:80] if "error" in row else ""))


main()
