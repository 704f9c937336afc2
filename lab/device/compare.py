#!/usr/bin/env python3
"""Candidates against what they would replace: compare.py FOLDER OUT.json

First the case tables of each candidate (FOLDER/candidates/index.json says which); one that fails is told and not timed. Then each setting is visited by turns,
the built-in kernels and every candidate that the setting measures, ROUNDS times there and back. A visit is a process of its own. `gain` is the built-in
kernels' median over the candidate's; below the spread of the built-in visits it is noise.
"""
import json
import os
import re
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import steps  # noqa: E402

ROUNDS, REPS = 2, 15
DEADLINE = time.time() + float(os.environ.get("TILEWRIGHT_TRY_SECONDS", "500"))


def environment(folder, candidate):
    env = {k: v for k, v in os.environ.items() if k != "TILEWRIGHT_CUDA_SOURCES"}
    if candidate:
        env["TILEWRIGHT_CUDA_SOURCES"] = os.path.join(os.path.abspath(folder), "candidates", candidate)
    return env


def correct(folder, candidate):
    """Whether the case tables pass with it, and the harness's last words."""
    env = {**environment(folder, candidate["name"]), "TILEWRIGHT_TEST_CUDA": "only", "RUST_BACKTRACE": "0"}
    words = [os.path.join(folder, "ops-tests"), "--test-threads", "8", *candidate["tests"]]
    try:
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=70)
    except subprocess.TimeoutExpired:
        return False, "did not end in 70 s"
    said = re.findall(r"^test result.*|^test .*FAILED$|panicked at.*|^.*allowed .*$", done.stdout + done.stderr, re.M)
    ran = re.search(r"(\d+) passed", done.stdout)
    return done.returncode == 0 and ran is not None and int(ran[1]) > 0, "; ".join(said)[:400] or f"exit {done.returncode}"


def visit(folder, candidate, setting):
    """Milliseconds: of the encoder alone on the device's clock, or of a whole training step."""
    kind, *words = setting.split(":")
    env = environment(folder, candidate)
    if kind == "step":
        times, _, losses = steps.visit(os.path.join(folder, "tilewright"), int(words[0]), int(words[1]), env=env)
        return times, losses[-1]
    shape, rows = words
    path = f"/tmp/try-{os.getpid()}.json"
    command = [os.path.join(folder, "laya-speed"), "--device", "cuda", "--shape", shape, "--folder", f"/tmp/{shape}", "--precision", "f16",
               "--rows", rows, "--pack", "16384", "--reps", str(REPS), "--json", path]
    subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=90)
    with open(path) as file:
        return [1e3 * s for s in json.load(file)["cases"][0]["encoder_seconds"]], None


def main():
    folder, out = sys.argv[1:3]
    with open(os.path.join(folder, "candidates", "index.json")) as file:
        candidates = json.load(file)
    record = {"rounds": ROUNDS, "candidates": {}, "settings": {}}

    def save():
        with open(out, "w") as file:
            json.dump(record, file, indent=1)

    good = []
    for candidate in candidates:
        start = time.time()
        if DEADLINE - start < 60:
            print(f"{candidate['name']}: not tested, no time", flush=True)
            continue
        holds, words = correct(folder, candidate)
        record["candidates"][candidate["name"]] = {**candidate, "holds": holds, "words": words}
        print(f"{'holds' if holds else 'FAILS'}  {candidate['name']}: {words} ({time.time() - start:.0f} s)", flush=True)
        if holds:
            good.append(candidate)
        save()
    settings = {}
    for candidate in good:
        for setting in candidate["measure"]:
            settings.setdefault(setting, [None]).append(candidate["name"])
    for setting, names in settings.items():
        rows = {name: [] for name in names}
        losses = {}
        for turn in range(2 * ROUNDS):
            if DEADLINE - time.time() < 15:
                print(f"{setting}: stopped, no time", flush=True)
                break
            for name in names if turn % 2 == 0 else reversed(names):
                try:
                    times, loss = visit(folder, name, setting)
                    rows[name].append(times)
                    losses[name] = loss
                except Exception as error:  # noqa: BLE001  # one that fails leaves the others to run
                    print(f"{setting} {name}: {str(error)[:200]}", flush=True)
        base = rows[None]
        if not base:
            continue
        middle = statistics.median(sum(base, []))
        spread = [statistics.median(v) for v in base]
        print(f"{setting}: built in {middle:.3f} ms (visits {min(spread):.3f} to {max(spread):.3f})", flush=True)
        record["settings"][setting] = {"built in": {"ms": base, "last_loss": losses.get(None)}}
        for name in names[1:]:
            if rows[name]:
                own = statistics.median(sum(rows[name], []))
                visits = [statistics.median(v) for v in rows[name]]
                print(f"    {name}: {own:.3f} ms (visits {min(visits):.3f} to {max(visits):.3f}), gain {middle / own:.3f}", flush=True)
                record["settings"][setting][name] = {"ms": rows[name], "gain": middle / own, "last_loss": losses.get(name)}
        save()


if __name__ == "__main__":
    main()
