#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Each metric that the dashboard (packaging/grafana.json) asks for is one that cr-server or cr-hostd exports,
# docs/metrics.md lists exactly what they export, and Prometheus understands the dashboard's expressions. Needs root, as
# cr-hostd does.
set -euo pipefail
product=$PWD/tests/matrix/product
program=$PWD/tests/apps/driver_ptx
work=$(mktemp -d)
server= hostd=
trap 'kill $server $hostd 2>/dev/null || true; wait; rm -rf "$work"' EXIT
promtool=$(command -v promtool || echo /opt/cuda-remote/promtool/promtool)
"$promtool" --version >/dev/null 2>&1 || { echo "promtool is missing: tools/setup installs it" >&2; exit 1; }

mkdir -m 700 "$work/server"
"$product/cr-server" --dir "$work/server" --driver "$product/libsoftgpu.so" --metrics 127.0.0.1:0 >"$work/log" 2>&1 &
server=$!
for _ in $(seq 600); do
  grep -q '^cr-server ready' "$work/log" && break
  kill -0 $server || { cat "$work/log"; exit 1; }
  sleep 0.1
done
port=$(sed -n 's/^cr-server ready:.* metrics:127.0.0.1:\([0-9]*\).*/\1/p' "$work/log")
# A session that is still there when the metrics are asked for.
CR_TEST_STEP_MS=100 "$product/cr-run" --plain --job-dir "$work/job" --server "unix:$work/server" -- \
  "$program" --steps 6000 >/dev/null 2>"$work/job.log" &
job=$!
"$product/cr-hostd" --socket "$work/hostd.sock" --state "$work/state" --metrics 127.0.0.1:0 \
  --gpu-server "unix:$work/server/session.sock" 2>"$work/hostd.log" &
hostd=$!
for _ in $(seq 600); do
  grep -q 'info cr-hostd: serving' "$work/hostd.log" && break
  kill -0 $hostd || { cat "$work/hostd.log"; exit 1; }
  sleep 0.1
done
host_port=$(sed -n 's/.* cr-hostd: serving .* metrics at 127.0.0.1:\([0-9]*\)$/\1/p' "$work/hostd.log")
/usr/bin/python3 tests/product/dashboard_check.py "http://127.0.0.1:$port/metrics" \
  "http://127.0.0.1:$host_port/metrics" packaging/grafana.json docs/metrics.md \
  "$work/rules.yml" || { cat "$work/log" "$work/job.log" "$work/hostd.log"; exit 1; }
kill $job
"$promtool" check rules "$work/rules.yml"
