#!/usr/bin/env python3
"""How long a server took for each answer, by the packets on the wire: neither its clock nor the client's has a say in it.

    tcpdump -i lo -s 160 -B 65536 -w lo.pcap port 8000      while the load is on
    lab/serve/wire.py lo.pcap 8000 [MILLISECONDS]

For each connection: from the last packet of a request to the first of its answer. Refusals slower than MILLISECONDS (50) are listed with the second in
which they were asked.
"""
import collections
import struct
import sys

path, port = sys.argv[1], int(sys.argv[2])
limit = float(sys.argv[3]) / 1e3 if len(sys.argv) > 3 else 0.05
with open(path, "rb") as capture:
    magic = struct.unpack("<I", capture.read(24)[:4])[0]
    unit = {0xA1B2C3D4: 1e-6, 0xA1B23C4D: 1e-9}[magic]
    asked, answers, first = {}, collections.defaultdict(list), None
    while len(head := capture.read(16)) == 16:
        seconds, fraction, kept, _ = struct.unpack("<IIII", head)
        packet, at = capture.read(kept), seconds + fraction * unit
        first = first or at
        # Ethernet, IPv4, TCP: what the loopback of Linux shows.
        ip = (packet[14] & 15) * 4
        total = struct.unpack(">H", packet[16:18])[0]
        tcp = packet[14 + ip :]
        source, target = struct.unpack(">HH", tcp[:4])
        offset = (tcp[12] >> 4) * 4
        if total == ip + offset:
            continue
        if target == port:
            asked[source] = at
        elif target in asked:
            answers[tcp[offset + 9 : offset + 12].decode("latin1")].append((at - asked[target], asked.pop(target) - first))
for status, times in sorted(answers.items()):
    times.sort()
    p50, p99, p999 = (1e3 * times[min(len(times) - 1, int(len(times) * q))][0] for q in (0.5, 0.99, 0.999))
    print(f"{status}: {len(times)}, p50 {p50:.2f} ms, p99 {p99:.2f}, p99.9 {p999:.2f}, most {1e3 * times[-1][0]:.2f}")
for took, at in sorted(answers.get("503", []), key=lambda t: t[1]):
    if took > limit:
        print(f"  503 after {1e3 * took:.0f} ms, asked at {at:.3f} s")
print(f"without an answer: {len(asked)}")
