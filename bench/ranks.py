#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint, a restart and a move of an MPI job cost, by its ranks and its hosts.

Usage: ranks.py --product DIR --apps DIR [--ranks N,...] [--hosts N,...] [--rounds N] [--json FILE [--plot FILE]]

The hosts are namespaces of this machine (tests/hosts), each with a cr-hostd, and each rank computes with a software GPU of
its own: the times are those of the tools, of CRIU and of the way between the hosts, not of a GPU. The job is the stencil of
tests/apps with Open MPI, begun by cr-mpirun. Prints a row for each number of ranks and hosts, with medians of the rounds:

  checkpoint   cr-checkpoint --hosts of a job that goes on: until the images are complete, and how long the job stood still
  restart      cr-restart --hosts on the same hosts: until all parts run
  move         cr-checkpoint --hosts --stop, and cr-restart --hosts of each part on the next host

Needs root, CRIU, iproute2 and Open MPI.
"""

import argparse
import json
import os
import statistics
import sys
import time
import types

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "../tests/hosts"), os.path.join(HERE, "../tests/matrix")]
import hosts  # noqa: E402
import plot  # noqa: E402
from hosts import harness, users  # noqa: E402

COLUMNS = ("checkpoint", "of it pause", "restart", "move")
COLORS = {"checkpoint": "#1f77b4", "of it pause": "#d62728", "restart": "#2ca02c", "move": "#d95f02"}


def share(ranks, count):
    """How many ranks each of `count` hosts has."""
    return [ranks // count + (i < ranks % count) for i in range(count)]


def measure(options, ranks, count):
    """Seconds by column, of one job."""
    with harness.Lab(options.product) as lab:
        network = hosts.Lan(users.Context(lab, types.SimpleNamespace(product=options.product, apps=options.apps)))
        hosts.start_all(network)
        here = [network.a, network.b, network.c][:count]
        there = [network.b, network.c, network.a][:count]
        members = [machine.address for machine in here]
        image = network.context.shared + "/image-{}"
        job = hosts.Stencil(network, "openmpi", here, share(ranks, count), 4, 8, 12)

        def timed(work):
            start = time.monotonic()
            work()
            return time.monotonic() - start

        saved = json.loads(job.save(image.format(0), members, "--json").stdout)
        took = {"checkpoint": saved["seconds"], "of it pause": saved["paused_seconds"]}
        job.go(4, then=8)
        job.stop(image.format(1), members)
        took["restart"] = timed(lambda: job.restart_as_one(image.format(1), here))
        job.go(8, then=12)
        took["move"] = timed(lambda: job.stop(image.format(2), members))
        took["move"] += timed(lambda: job.restart_as_one(image.format(2), there))
        job.go(12)
        job.finish()
    return took


def draw(results):
    """The SVG's text for what --json writes."""
    groups = []
    for row in results["rows"]:
        title = f"{row['ranks']} rank{'s' * (row['ranks'] > 1)} on {row['hosts']} host{'s' * (row['hosts'] > 1)}"
        groups.append((title, [(column, row[column], COLORS[column]) for column in COLUMNS]))
    return plot.bars("Saving, restarting and moving an MPI job, in seconds", results["environment"], groups)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", required=True)
    parser.add_argument("--apps", required=True, help="folder of mpi_stencil_openmpi")
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--hosts", default="1,2,3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--plot", help="SVG of the results")
    options = parser.parse_args()
    harness.own_network()
    rows = []
    print("| ranks | hosts | " + " | ".join(f"{column} s" for column in COLUMNS) + " |\n" + "| --- " * 6 + "|", flush=True)
    for ranks in map(int, options.ranks.split(",")):
        for count in map(int, options.hosts.split(",")):
            if ranks < count:
                continue
            rounds = [measure(options, ranks, count) for _ in range(options.rounds)]
            took = {column: statistics.median(one[column] for one in rounds) for column in COLUMNS}
            rows.append({"ranks": ranks, "hosts": count, **took})
            cells = " | ".join(f"{took[column]:.2f}" for column in COLUMNS)
            print(f"| {ranks} | {count} | {cells} |", flush=True)
    results = {"environment": f"software GPU, {os.cpu_count()} cores, Linux {os.uname().release}", "rows": rows}
    for path, text in ((options.json, json.dumps(results, indent=1) + "\n"), (options.plot, draw(results))):
        if path:
            with open(path, "w") as f:
                f.write(text)


if __name__ == "__main__":
    main()
