"""The arm's side of the line protocol (docs/bench-protocol.md), for peers in Python. Standard library only."""

import hashlib
import json
import sys


def read(tensor):
    """The bytes of one input file of `prepare`, which must be those that the harness wrote."""
    with open(tensor["path"], "rb") as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != tensor["sha256"]:
        raise ValueError(f"input {tensor['name']} {tensor['index']} is not what the harness wrote")
    return data


def serve(name, fingerprint, prepare, run):
    """Answers requests until `quit`: prepare(inputs, params, seed) gets ready, run(index) works once and returns the answer's fields."""
    # Libraries print; only answers may reach the harness.
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        asked = request["do"]
        answer = {"ok": asked}
        try:
            if asked == "hello":
                answer.update(name=name, fingerprint=fingerprint)
            elif asked == "prepare":
                prepare(request["inputs"], request["params"], request["seed"])
                answer["inputs"] = [{k: i[k] for k in ("index", "name", "sha256")} for i in request["inputs"]]
            elif asked == "run":
                answer.update(run(request["input"]))
            elif asked != "quit":
                raise ValueError(f"no request `{asked}`")
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)
        if asked == "quit":
            return
