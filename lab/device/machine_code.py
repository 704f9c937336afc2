#!/usr/bin/env python3
"""Machine code of Vulkan kernels out of NVIDIA's cache of pipelines: machine_code.py CACHE NVDISASM [N]

Fill the cache by running a program with `__GL_SHADER_DISK_CACHE=1 __GL_SHADER_DISK_CACHE_PATH=CACHE`. Without N: a line for each kernel, with how often it uses the
matrix units, shared memory, barriers and memory of its own (`STL`, `LDL`: registers that did not suffice). With N: that kernel, disassembled for compute capability 9.0.
Needs the module `zstandard`.
"""
import pathlib
import struct
import subprocess
import sys
import tempfile

import zstandard

MAGIC = b"\x28\xb5\x2f\xfd"
# The low twelve bits of an instruction of 16 bytes.
CODES = {0x23C: "HMMA", 0x83B: "LDSM", 0x984: "LDS", 0x388: "STS", 0xB1D: "BAR", 0x981: "LDG", 0x986: "STG", 0x387: "STL", 0x983: "LDL", 0x94D: "EXIT"}


def programs(cache):
    """Every compressed part of the cache that is a program: its code starts eight bytes behind a multiple of sixteen."""
    for path in sorted(pathlib.Path(cache).rglob("*.bin")):
        data, at = path.read_bytes(), -1
        while (at := data.find(MAGIC, at + 1)) >= 0:
            try:
                part = zstandard.ZstdDecompressor().decompressobj().decompress(data[at:])
            except zstandard.ZstdError:
                continue
            if part[8:12] == b"NVuc":
                yield part


def codes(part):
    return [(at, CODES.get(struct.unpack_from("<H", part, at)[0] & 0xFFF)) for at in range(8, len(part) - 16, 16)]


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    for number, part in enumerate(programs(sys.argv[1])):
        found = codes(part)
        if len(sys.argv) == 3:
            counts = {name: sum(code == name for _, code in found) for name in CODES.values()}
            print(number, len(part), " ".join(f"{name} {count}" for name, count in counts.items() if count))
        elif number == int(sys.argv[3]):
            # From where the disassembler accepts it, up to the last way out.
            last = max(at for at, code in found if code == "EXIT")
            for start in range(8, last, 16):
                with tempfile.NamedTemporaryFile() as file:
                    file.write(part[start : last + 16])
                    file.flush()
                    text = subprocess.run([sys.argv[2], "-b", "SM90", file.name], capture_output=True, text=True)
                if text.returncode == 0 and text.stdout.count("\n") > 100:
                    print(text.stdout)
                    return


if __name__ == "__main__":
    main()
