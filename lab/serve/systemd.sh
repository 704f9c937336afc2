#!/usr/bin/env bash
# Does deploy/tilewright.service start, answer, reload, drain and stay within its walls? A small Debian is booted beside this one, with a systemd of its own.
#
#   lab/serve/systemd.sh [FOLDER]      FOLDER keeps the system between runs (default: a new temporary one)
#
# Root; Debian: apt-get install systemd-container debootstrap. TILEWRIGHT names the binary (default: target/release/tilewright).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$here/../..
tilewright=${TILEWRIGHT:-"$repo/target/release/tilewright"}
root=${1:-$(mktemp -d)}
command -v systemd-nspawn >/dev/null || { echo "no systemd-nspawn here (Debian: apt-get install systemd-container debootstrap)" >&2; exit 1; }
[ -e "$root/etc/debian_version" ] ||
    debootstrap --variant=minbase --include=systemd,systemd-sysv,curl,libgcc-s1,procps bookworm "$root" >"$root.log" 2>&1 ||
    { tail "$root.log" >&2; exit 1; }

install -m 755 "$tilewright" "$root/usr/local/bin/tilewright"
install -m 644 "$repo/deploy/tilewright.service" "$root/etc/systemd/system/tilewright.service"
install -d -m 700 "$root/etc/tilewright"
echo 'alice:first-secret' >"$root/etc/tilewright/keys"
chmod 600 "$root/etc/tilewright/keys"
rm -rf "$root/srv/other" "$root/var/lib/tilewright-models" "$root/var/log/private/tilewright" "$root/result.txt"
mkdir -p "$root/var/lib/tilewright-models"
"$tilewright" decide demo "$root/var/lib/tilewright-models/laya" >/dev/null
"$tilewright" decide demo --seed 7 "$root/srv/other" >/dev/null
mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
ln -sf ../tilewright.service "$root/etc/systemd/system/multi-user.target.wants/tilewright.service"
# Runs inside, once the service is there, and turns the system off.
ln -sf ../look.service "$root/etc/systemd/system/multi-user.target.wants/look.service"
cat >"$root/etc/systemd/system/look.service" <<'UNIT'
[Unit]
After=tilewright.service
[Service]
Type=oneshot
ExecStart=/look.sh
ExecStopPost=/bin/systemctl --no-block poweroff
StandardOutput=append:/result.txt
StandardError=inherit
UNIT
cat >"$root/look.sh" <<'LOOK'
#!/bin/bash
ask() { # key
    curl -s -m 20 -o /tmp/answer -w '%{http_code}' localhost:8000/v1/systemone -H "Authorization: Bearer $1" \
        -d '{"state": "My card was charged twice", "questions": {"q": {"type": "noul", "instructions": "Is a refund requested?"}}}'
}
for _ in $(seq 300); do curl -fs -o /dev/null localhost:8000/health && break; sleep 0.1; done
echo "is active: $(systemctl is-active tilewright)"
pid=$(systemctl show -P MainPID tilewright)
echo "user: $(ps -o user= -p "$pid"), capabilities: $(sed -n 's/^CapEff:\s*//p' "/proc/$pid/status"), no new privileges: $(sed -n 's/^NoNewPrivs:\s*//p' "/proc/$pid/status"), seccomp: $(sed -n 's/^Seccomp:\s*//p' "/proc/$pid/status")"
echo "with its key: $(ask first-secret), without: $(ask nothing)"
inside() { nsenter --mount --target "$pid" --setuid "$(stat -c %u "/proc/$pid")" --setgid "$(stat -c %g "/proc/$pid")" --wd=/ -- "$@"; }
inside sh -c 'touch /usr/local/x' 2>/dev/null && echo "CAN WRITE to /usr" || echo "cannot write to /usr"
inside sh -c 'touch /var/lib/tilewright-models/x' 2>/dev/null && echo "CAN WRITE to its models" || echo "cannot write to its models"
inside sh -c 'cat /etc/tilewright/keys' >/dev/null 2>&1 && echo "CAN READ the file of keys" || echo "cannot read the file of keys, only its credential"
before=$(cat /tmp/answer; ask first-secret >/dev/null; cat /tmp/answer)
cp -r /srv/other/. /var/lib/tilewright-models/laya/
echo 'alice:second-secret' >/etc/tilewright/keys
systemctl reload tilewright && sleep 3
after=$(ask first-secret >/dev/null; cat /tmp/answer)
[ "$before" != "$after$after" ] && echo "reload: the new checkpoint answers, same process: $([ "$pid" = "$(systemctl show -P MainPID tilewright)" ] && echo yes || echo NO)"
echo "after a reload: old key $(ask first-secret), new key $(ask second-secret)"
systemctl restart tilewright
for _ in $(seq 300); do curl -fs -o /dev/null localhost:8000/health && break; sleep 0.1; done
echo "after a restart: old key $(ask first-secret), new key $(ask second-secret)"
kill -9 "$(systemctl show -P MainPID tilewright)"
sleep 4
for _ in $(seq 300); do curl -fs -o /dev/null localhost:8000/health && break; sleep 0.1; done
echo "after a kill: $(ask second-secret), restarts $(systemctl show -P NRestarts tilewright)"
sleep 1
systemctl stop tilewright
echo "stopped: $(systemctl show -P Result tilewright), exit code $(systemctl show -P ExecMainStatus tilewright)"
echo "lines of audit: $(wc -l </var/log/private/tilewright/audit.jsonl), mode $(stat -c %a /var/log/private/tilewright/audit.jsonl)"
systemd-analyze verify /etc/systemd/system/tilewright.service && echo "verify: nothing to say"
systemd-analyze security tilewright.service 2>/dev/null | tail -n 1
journalctl -u tilewright --no-pager -o cat | grep -iE 'fail|error|denied|ignor' | head -n 20
LOOK
chmod 755 "$root/look.sh"
timeout "${LIMIT:-180}" systemd-nspawn --quiet --register=no --keep-unit --private-network -b -D "$root" >"$root.boot.log" 2>&1 || true
[ -s "$root/result.txt" ] || { tail -n 30 "$root.boot.log" >&2; echo "the system did not get as far as looking" >&2; exit 1; }
cat "$root/result.txt"
bad=0
for line in 'is active: active' 'with its key: 200, without: 401' 'cannot write to /usr' 'cannot write to its models' 'cannot read the file of keys' 'same process: yes' \
    'after a kill: 200' 'stopped: success, exit code 0' 'verify: nothing to say'; do
    grep -q "$line" "$root/result.txt" || { echo "MISSING: $line" >&2; bad=1; }
done
exit $bad
