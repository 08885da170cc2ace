#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a relay's tunnel carries, without a GPU, next to one raw TCP stream of the same machine.

Usage: tunnel.py [--bin bazel-bin] [--seconds S] [--piece KB,KB...] [--rows up,down,round] [--ring] [--threads]

Starts cr-server with a worker that does nothing, cr-relay, and tunnel_rate as their client; prints JSON lines. --ring
measures the same without a relay, --threads also prints what each thread of the three processes used of a processor.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time


def start(command, ready, environment=None):
    """Starts a program and waits for its first line, which begins with `ready`; returns it with that line."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    line = process.stdout.readline()
    if not line.startswith(ready):
        sys.exit(f"tunnel.py: {command[0]} did not start")
    return process, line


def threads_of(pid):
    """User and system seconds of each thread of a process."""
    used = {}
    tick = os.sysconf("SC_CLK_TCK")
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", encoding="ascii", errors="replace") as file:
                text = file.read()
            name = text[text.index("(") + 1:text.rindex(")")]
            fields = text[text.rindex(")") + 2:].split()
            used[int(thread)] = (name, int(fields[11]) / tick, int(fields[12]) / tick)
    except OSError:
        pass
    return used


def measure(options, server, socket, way, piece, row):
    """One run of tunnel_rate."""
    client = subprocess.Popen([options.rate, socket, str(options.seconds), str(piece), row], stdout=subprocess.PIPE, text=True)
    watched = [("server", server.pid), ("client", client.pid)]
    if way == "relay":
        watched.append(("relay", options.relay_pid))
    # In the middle of what is measured.
    time.sleep(options.seconds * 0.3)
    before = {name: threads_of(pid) for name, pid in watched}
    at = time.monotonic()
    time.sleep(options.seconds * 0.5)
    after = {name: threads_of(pid) for name, pid in watched}
    elapsed = time.monotonic() - at
    out, _ = client.communicate()
    if client.returncode != 0:
        sys.exit("tunnel.py: tunnel_rate failed")
    for line in out.splitlines():
        print(json.dumps({"way": way, **json.loads(line)}), flush=True)
    if options.threads and row != "round":
        for name, threads in after.items():
            for thread, (what, user, system) in sorted(threads.items()):
                was = before[name].get(thread, (what, 0, 0))
                if user + system - was[1] - was[2] >= 0.02 * elapsed:
                    print(f"    {name} {what} {thread}: user {(user - was[1]) / elapsed:.2f}"
                          f" system {(system - was[2]) / elapsed:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="bazel-bin", help="folder with client/relay/cr-relay and so on")
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--piece", default="1024,256,128")
    parser.add_argument("--rows", default="up,down,round")
    parser.add_argument("--ring", action="store_true")
    parser.add_argument("--threads", action="store_true")
    options = parser.parse_args()

    def program(path):
        for candidate in (os.path.join(options.bin, path), os.path.join(options.bin, os.path.basename(path))):
            if os.path.exists(candidate):
                return os.path.abspath(candidate)
        sys.exit(f"tunnel.py: there is no {path} in {options.bin}")

    options.rate = program("bench/tunnel_rate")
    tcp = subprocess.run([program("bench/tcp_stream"), "1", str(options.seconds)], stdout=subprocess.PIPE, check=True)
    print(json.dumps({"way": "raw TCP, 1 stream", **json.loads(tcp.stdout)}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        server, line = start([program("server/supervisor/cr-server"), "--dir", folder + "/server", "--listen", "127.0.0.1:0",
                              "--insecure-tcp", "127.0.0.1", "--driver", "none", "--worker", program("server/supervisor/test_worker")],
                             "cr-server ready")
        port = line.strip().rsplit(":", 1)[1]
        relay, _ = start([program("client/relay/cr-relay"), "--connect", "127.0.0.1:" + port, "--socket",
                          folder + "/relay.sock"], "cr-relay ready")
        options.relay_pid = relay.pid
        try:
            ways = [("relay", folder + "/relay.sock")]
            if options.ring:
                ways.insert(0, ("ring", folder + "/server/session.sock"))
            for way, socket in ways:
                for piece in options.piece.split(","):
                    for row in options.rows.split(","):
                        measure(options, server, socket, way, int(piece), row)
        finally:
            for process in (relay, server):
                process.terminate()
                process.wait()


if __name__ == "__main__":
    main()
