"""Two training steps against each other, in one run: who is faster, by how much, and how sure that is.

    python3 bench/peers/compare.py --batch 4 --seq-len 64 --pairs 60
    python3 bench/peers/compare.py --a tilewright --b tilewright      # control: the interval must hold 1

Both arms are workers which live for the whole run and do one step when told to. Each pair is one step of either on the same tokens; which
goes first is random and balanced. The figure is the median over pairs of t_b / t_a (above 1: A is faster) with its 95 % bootstrap interval.
Everything measured goes to a JSON record, failed runs included. The PyTorch arm needs `pip install torch` in the Python of --python.
"""

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

import stats

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ARMS = ("tilewright", "torch", "torch-compile")


class Worker:
    """One arm: a child process that answers `run` with seconds."""

    def __init__(self, name, args):
        size = ["--model", args.model, "--batch", str(args.batch), "--seq-len", str(args.seq_len)]
        size += ["--threads", str(args.threads), "--ring", str(args.ring), "--clip", str(args.clip)]
        if name == "tilewright":
            command = [args.binary, "bench-step", *size, "--recompute", str(args.recompute)]
        else:
            command = [args.python, str(HERE / "gpt2_cpu_step.py"), *size]
            command += ["--compile"] if name == "torch-compile" else []
        self.name = name
        # Paths of this machine have no place in a record.
        self.command = " ".join([os.path.basename(command[0])] + [os.path.relpath(c, ROOT) if c.startswith(str(ROOT)) else c for c in command[1:]])
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.expect("ready")

    def expect(self, word):
        line = self.process.stdout.readline().strip()
        if line != word:
            sys.exit(f"error: {self.name} said `{line}` instead of `{word}` (exit code {self.process.poll()}); command: {self.command}")

    def cpu_seconds(self):
        try:
            fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            return None

    def peak_bytes(self):
        try:
            for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        return None

    def run(self):
        before, start = self.cpu_seconds(), time.monotonic()
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline().split()
        if not line:
            sys.exit(f"error: {self.name} ended with exit code {self.process.wait()}; command: {self.command}")
        wall, after = time.monotonic() - start, self.cpu_seconds()
        loss = next((float(w[5:]) for w in line if w.startswith("loss=")), None)
        cpu = None if before is None or after is None else after - before
        return {"arm": self.name, "seconds": float(line[0]), "wall": wall, "cpu": cpu, "loss": loss}

    def quit(self):
        self.process.stdin.write("quit\n")
        self.process.stdin.close()
        self.process.wait(timeout=60)


def output(*command):
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def fingerprint(args):
    cpu = None
    if os.path.exists("/proc/cpuinfo"):
        names = [l.split(":", 1)[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")]
        cpu = names[0] if names else None
    binary = pathlib.Path(args.binary)
    return {
        "cpu": cpu or platform.processor(),
        "logical_cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": output(args.python, "-c", "import torch; print(torch.__version__)") if "torch" in args.a + args.b else None,
        "rustc": output("rustc", "--version"),
        "revision": output("git", "rev-parse", "HEAD"),
        "dirty": bool(output("git", "status", "--porcelain", "--untracked-files=no")),
        "binary_sha256": hashlib.sha256(binary.read_bytes()).hexdigest() if binary.is_file() else None,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("TILEWRIGHT_", "OMP_", "MKL_", "KMP_"))},
        "load_before": os.getloadavg(),
    }


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a", default="tilewright", choices=ARMS)
    parser.add_argument("--b", default="torch", choices=ARMS)
    parser.add_argument("--model", default="d12")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clip", type=float, default=0.0, help="clip the gradient norm in both arms; 0 leaves it out")
    parser.add_argument("--recompute", type=int, default=1, help="activation recompute of the tilewright arms; PyTorch keeps all")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=3, help="steps of each arm before the first pair")
    parser.add_argument("--ring", type=int, default=8, help="distinct batches, used in turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between steps, so that no thread of the other arm still spins")
    parser.add_argument("--kind", choices=("screen", "confirm"), default="screen")
    parser.add_argument("--binary", default=str(ROOT / "target/release/tilewright"))
    parser.add_argument("--python", default=sys.executable, help="the Python that has torch")
    parser.add_argument("--out", default=str(ROOT / "bench/records"), help="folder of the record")
    args = parser.parse_args()
    if args.pairs < 2 or args.ring < 4:
        parser.error("at least 2 pairs and 4 distinct batches are needed")
    if args.kind == "confirm" and args.pairs < 60:
        parser.error("a confirmation takes at least 60 pairs")
    return args


def main():
    args = parse()
    record = {"schema": 1, "name": "gpt2-cpu-step", "kind": args.kind, "status": "started"}
    record["started"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    record["settings"] = {k: v for k, v in vars(args).items() if k not in ("binary", "python", "out")}
    record["fingerprint"] = fingerprint(args)
    load = record["fingerprint"]["load_before"][0]
    if args.kind == "confirm" and load > 0.5 * os.cpu_count():
        sys.exit(f"error: the load is {load:.1f}; a confirmation wants a quiet machine (at most {0.5 * os.cpu_count():.1f}): wait, or use --kind screen")
    name = f"{record['started'][:19].replace(':', '')}-step-{args.model}-b{args.batch}-t{args.seq_len}-{args.a}-{args.b}-{args.kind}.json"
    path = pathlib.Path(args.out) / name
    try:
        measure(args, record)
        record["status"] = "done"
    except BaseException as error:
        record["status"] = f"failed: {type(error).__name__}: {error}".replace(str(ROOT), ".")
        raise
    finally:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=1) + "\n")
        temporary.rename(path)
    summary = record["summary"]
    for arm, label in (("a", args.a), ("b", args.b)):
        t = summary[arm]
        print(f"{arm} {label:<14} {t['median'] * 1e3:9.1f} ms   quartiles {t['q1'] * 1e3:.1f} .. {t['q3'] * 1e3:.1f}")
    r = summary["ratio_b_over_a"]
    print(f"{args.a} is {r['median']:.3f}x as fast as {args.b}, 95 % interval {r['ci95'][0]:.3f} .. {r['ci95'][1]:.3f} ({r['pairs']} pairs, least visible effect {100 * r['mde']:.1f} %)")
    if summary["cpu_ratio_b_over_a"]:
        c = summary["cpu_ratio_b_over_a"]
        print(f"in processor time: {c['median']:.3f}x, {c['ci95'][0]:.3f} .. {c['ci95'][1]:.3f}")
    print(f"record: {os.path.relpath(path)}")


def measure(args, record):
    workers = [Worker(args.a, args), Worker(args.b, args)]
    record["commands"] = [w.command for w in workers]
    record["warmup"] = [[w.run() for _ in range(args.warmup)] for w in workers]
    check_losses(record)
    order = stats.balanced_order(args.pairs, args.seed)
    record["a_first"], record["samples"] = order, []
    ratios, times = [], ([], [])
    for pair, a_first in enumerate(order):
        result = [None, None]
        for slot in (0, 1) if a_first else (1, 0):
            time.sleep(args.pause)
            result[slot] = workers[slot].run()
            record["samples"].append({"pair": pair, "slot": "ab"[slot], **result[slot]})
        a, b = (r["seconds"] for r in result)
        times[0].append(a)
        times[1].append(b)
        ratios.append(b / a)
        print(f"pair {pair + 1:3}/{args.pairs}   a {a:8.4f} s   b {b:8.4f} s   b/a {ratios[-1]:.3f}", flush=True)
    record["peak_bytes"] = {"a": workers[0].peak_bytes(), "b": workers[1].peak_bytes()}
    record["load_after"] = os.getloadavg()
    for worker in workers:
        worker.quit()
    cpu = [[s["cpu"] for s in record["samples"] if s["slot"] == slot] for slot in "ab"]
    record["summary"] = {
        "ratio_b_over_a": stats.median_with_interval(ratios),
        # Processor time is what is left to compare on a machine that others use too; its clock ticks every 10 ms.
        "cpu_ratio_b_over_a": stats.median_with_interval([b / a for a, b in zip(*cpu)]) if all(map(all, cpu)) else None,
        "a": stats.spread(times[0]),
        "b": stats.spread(times[1]),
        "order_effect": order_effect(ratios, order),
    }


def order_effect(ratios, order):
    """How far the medians of the two orders are apart; a large value means that one arm disturbs the other."""
    halves = [[r for r, o in zip(ratios, order) if o is first] for first in (True, False)]
    first, second = (stats.spread(h)["median"] for h in halves)
    return first / second - 1


def check_losses(record):
    """Both arms must do the same work: a random model's first loss is about ln(50257) = 10.82 on the same tokens in both."""
    a, b = (steps[0]["loss"] for steps in record["warmup"])
    record["checks"] = [{"metric": "first loss", "a": a, "b": b, "tolerance": 0.3, "pass": abs(a - b) < 0.3 and 10 < a < 12}]
    if not record["checks"][0]["pass"]:
        raise RuntimeError(f"the arms disagree about the first loss: {a} and {b}; nothing was timed")


if __name__ == "__main__":
    main()
