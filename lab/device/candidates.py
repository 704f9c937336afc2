#!/usr/bin/env python3
"""Kernels that are tried before they are built in: candidates.py OUT

Writes OUT/<candidate>/<op>/<file>.cu, each the whole text that TILEWRIGHT_CUDA_SOURCES puts in the place of the built-in one, made of the tree's own
sources and the pieces in `candidates/`, and OUT/index.json: what each is, what is predicted, the tests that hold it, and what measures it. `cuda.sh FOLDER OUT try`
runs the tests of each and then times it by turns with what it would replace. `.ci/cuda-kernels` compiles all of them.
"""
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
OPS = os.path.join(HERE, "..", "..", "crates", "tilewright-ops", "src")

ATTENTION_TESTS = ["encoder_attention::tests::lengths", "encoder_attention::tests::masks", "encoder_attention::tests::properties", "encoder_attention::tests::selected"]


def read(*path):
    with open(os.path.join(*path)) as file:
        return file.read()


def piece(name):
    return read(HERE, "candidates", name)


def ops(name):
    return read(OPS, name)


def hopper():
    return ops("encoder_attention/cuda/rows.cuh") + ops("encoder_attention/cuda/hopper.cu")


def every_row():
    return {"encoder_attention/hopper.cu": "//@ forward_least 1\n" + hopper() + ops("runtime/cuda/barriers.cuh") + ops("encoder_attention/cuda/long_rows.cu")}


def rows_64():
    host = "//@ forward_threads 256\n//@ forward_shared 66560\n"
    return {"encoder_attention/hopper.cu": host + hopper() + piece("rows_64.cu")}


CANDIDATES = [
    {
        "name": "every-row",
        "what": "the kernel for long rows whatever the rows' length: holds it to the tables of short ones too",
        "predicted": "rows of 256 tokens: 2 blocks a head for 4, 10 % of attention slower",
        "sources": every_row,
        "tests": ATTENTION_TESTS, "measure": ["encoder:large:32x256"],
    },
    {
        "name": "rows-64",
        "what": "the kernel for long rows that was built in before: two groups share tiles of 64 keys, two blocks a multiprocessor",
        "predicted": "7 % slower at 8192, even at 512",
        "sources": rows_64,
        "tests": ATTENTION_TESTS, "measure": ["encoder:large:1x8192", "encoder:large:16x512", "encoder:large:1x1024"],
    },
]


def main():
    out = sys.argv[1]
    index = []
    for candidate in CANDIDATES:
        for name, text in candidate["sources"]().items():
            path = os.path.join(out, candidate["name"], name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                file.write(text)
        index.append({key: value for key, value in candidate.items() if key != "sources"})
    with open(os.path.join(out, "index.json"), "w") as file:
        json.dump(index, file, indent=1)


main()
