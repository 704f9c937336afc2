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


def swap(text, old, new, times=1):
    if text.count(old) != times:
        raise SystemExit(f"{old!r} occurs {text.count(old)} times, not {times}: the kernel that this candidate changes has changed")
    return text.replace(old, new)


def long_rows(groups, keys, stages, overlap, turns, together, registers, polynomial=0, copiers=128, blocks=1):
    before = ops("encoder_attention/cuda/rows.cuh") + ops("encoder_attention/cuda/hopper.cu")
    before = swap(before, "\nforward(const T* q_all", "\nforward_before(const T* q_all")
    numbers = {"GROUPS": groups, "KEYS": keys, "STAGES": stages, "COPIERS": copiers, "BLOCKS": blocks, "OVERLAP": overlap, "TURNS": turns,
               "TOGETHER": together, "POLYNOMIAL": polynomial, "FEW_REGISTERS": registers[0], "MANY_REGISTERS": registers[1]}
    defines = "".join(f"#define RING_{name} {value}\n" for name, value in numbers.items())
    threads, shared = 128 * groups + copiers, (64 * groups + stages * 2 * keys) * 128 + 1024
    # What the host's side reads of a changed text: queries of a block, its threads, its shared memory; tokens of a row from which it is taken.
    host = f"//@ forward_queries {64 * groups}\n//@ forward_threads {threads}\n//@ forward_shared {shared}\n//@ forward_least 1\n"
    return {"encoder_attention/hopper.cu": host + defines + before + piece("long_rows.cu")}


def halves():
    before = swap(ops("linear/cuda/gated.cu"), "HOPPER(gated)", "HOPPER(gated_before)")
    return {"linear/gated.cu": ops("runtime/cuda/tiles.cuh") + before + piece("halves.cu")}


def adamw(loads, stores):
    text = ops("adamw/cuda/adamw.cu")
    text = swap(text, "#define TENSORS 16", piece("adamw.cuh") + "#define TENSORS 16")
    if loads:
        for name, kind in (("m", "float"), ("v", "float"), ("master", "float"), ("grad", "G")):
            load = f"= *(Few<{kind}, N>*)({name} + base + i)"
            text = swap(text, load, f"= load_once((const Few<{kind}, N>*)({name} + base + i))")
    if stores:
        for name, value in (("m", "fm"), ("v", "fv"), ("master", "fp")):
            text = swap(text, f"*(Few<float, N>*)({name} + base + i) = {value};", f"store_once((Few<float, N>*)({name} + base + i), {value});")
    return {"adamw/adamw.cu": text}


def tanh():
    text = ops("matmul/cuda/hopper.cu")
    old = text[text.index("TW_FORCE void gelu(float x"):text.index("TW_FORCE float low(u32 pair)")]
    return {"matmul/hopper.cu": ops("runtime/cuda/tiles.cuh") + swap(text, old, piece("tanh.cuh") + "\n")}


def norm():
    text = ops("layernorm/cuda/mixed.cu")
    start = text.index("    float4 held[FLOATS / 4];")
    text = text[:start] + piece("norm.cuh") + text[text.index("    float mean = warp_sum(total) / float(c);", start):]
    return {"layernorm/mixed.cu": swap(text, "float4 w = *(const float4*)(weight + j);", "float4 w = weights[i];")}


CANDIDATES = [
    {
        "name": "rows-2-turns",
        "what": "attention of long rows: a copying group keeps five tiles of 128 keys on the way; two groups of 64 queries each begin the next scores and this tile's "
                "sums, by turns, and make exponentials beside them",
        "predicted": "750 to 550 us a layer at 8192 (500 TFLOP/s): 20.1 to 17.9 ms",
        "sources": lambda: long_rows(2, 128, 5, 1, 1, 1, (40, 232)),
        "tests": ATTENTION_TESTS, "measure": ["encoder:large:1x8192"],
    },
    {
        "name": "rows-2",
        "what": "the same without turns",
        "predicted": "3 to 8 % of attention above rows-2-turns",
        "sources": lambda: long_rows(2, 128, 5, 1, 0, 1, (40, 232)),
        "tests": ATTENTION_TESTS, "measure": ["encoder:large:1x8192"],
    },
    {
        "name": "rows-2-turns-quarter",
        "what": "rows-2-turns with a quarter of the exponentials by multiply-adds: the special-function unit has as many cycles to do as the matrix units",
        "predicted": "5 % of attention below rows-2-turns",
        "sources": lambda: long_rows(2, 128, 5, 1, 1, 1, (40, 232), 4),
        "tests": ATTENTION_TESTS, "measure": ["encoder:large:1x8192"],
    },
    {
        "name": "rows-3x64-turns",
        "what": "three groups, tiles of 64 keys, exponentials beside the sums",
        "predicted": "750 to 600 us a layer: shorter products for the same number of waits",
        "sources": lambda: long_rows(3, 64, 8, 1, 1, 1, (32, 160)),
        "tests": ATTENTION_TESTS, "measure": ["encoder:large:1x8192"],
    },
    {
        "name": "rows-4x64",
        "what": "as built in, with four groups in one block and a copying group: nothing overlaps within a group, and no group waits for another's copies",
        "predicted": "750 to 680 us a layer at 8192: 20.1 to 19.4 ms",
        "sources": lambda: long_rows(4, 64, 6, 0, 0, 0, (32, 120)),
        "tests": ATTENTION_TESTS, "measure": ["encoder:large:1x8192"],
    },
    {
        "name": "halves",
        "what": "the gated product's tiles dealt out in halves, so that the last turn is not half empty",
        "predicted": "large, 8192 rows: 140 to 128 us (0.34 ms of 20.1); mmBERT 50x128: 47 to 41.5 (0.12 ms of 3.69); large 50x128 (525 tiles, 8 turns for 7.95): nothing",
        "sources": halves,
        "tests": ["linear::tests::fused"], "measure": ["encoder:mmbert:50x128", "encoder:large:1x8192", "encoder:large:50x128"],
    },
    {
        "name": "norm",
        "what": "the encoder's norms: every load of a row before its first store, and the weight's beside the sums",
        "predicted": "mmBERT 50x128: two norms of a layer 20 to 15 us (0.1 ms of 3.69); large 50x128: 29 to 22 (0.2 ms of 9.28); the same bits",
        "sources": norm,
        "tests": ["layernorm::tests"], "measure": ["encoder:mmbert:50x128", "encoder:large:50x128", "encoder:large:1x8192"],
    },
    {
        "name": "adamw-loads",
        "what": "AdamW reads moments, masters and gradients past the caches",
        "predicted": "3.9 to 4.1 TB/s: 0.04 ms of a step",
        "sources": lambda: adamw(True, False),
        "tests": ["adamw::tests"], "measure": ["step:4:0"],
    },
    {
        "name": "adamw-both",
        "what": "the same, and writes them so",
        "predicted": "as adamw-loads, or worse where the next step's norm finds less in the cache",
        "sources": lambda: adamw(True, True),
        "tests": ["adamw::tests"], "measure": ["step:4:0"],
    },
    {
        "name": "tanh",
        "what": "GELU and its slope behind fcproj's input gradient by the hardware's tanh: one special function for two, three instructions fewer a value",
        "predicted": "0.41 to 0.37 ms a layer at B=32: 0.5 ms of 54; gradients move by up to 5e-4 of their size",
        "sources": tanh,
        "tests": ["matmul::tests"], "measure": ["step:32:2", "step:4:0"],
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
