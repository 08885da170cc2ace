#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the names of metrics in a dashboard and in docs/metrics.md with what a server with one session exports, and a
cr-hostd with a GPU server.

Usage: dashboard_check.py URL HOST_URL DASHBOARD PAGE RULES    writes the dashboard's expressions to RULES, for `promtool check rules`
"""

import json
import re
import sys
import time
import urllib.request

PREFIX = "cuda_remote_"
# What the software GPU, and a job that was never saved, do not have.
ABSENT_HERE = {"gpu_busy_ratio", "session_saved_timestamp_seconds"}
NAME = re.compile(PREFIX + r"(\w+)")


def exported(url, once):
    """Types of the metrics by name, once this one is there."""
    for _ in range(300):
        with urllib.request.urlopen(url, timeout=30) as answer:
            text = answer.read().decode()
        types = dict(re.findall(rf"^# TYPE {PREFIX}(\w+) (\w+)$", text, re.M))
        if once in types:
            return types
        time.sleep(0.2)
    sys.exit(f"{url} does not export {once}")


def expressions(dashboard):
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], re.fullmatch(r"label_values\((\w+), \w+\)", variable["query"]).group(1)


def main():
    url, host_url, dashboard, page, rules = sys.argv[1:]
    types = {**exported(url, "session_calls_total"), **exported(host_url, "host_gpu_server_gpus")}
    problems = []
    with open(page, encoding="utf-8") as f:
        listed = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", f.read(), re.M))
    for name, kind in types.items():
        if listed.get(name) != kind:
            problems.append(f"{page} does not list {name} as a {kind}")
    for name in listed:
        if name not in types and name not in ABSENT_HERE:
            problems.append(f"{page} lists {name}, which the server does not export")
    with open(dashboard, encoding="utf-8") as f:
        asked = list(expressions(json.load(f)))
    names = set()
    for title, expression in asked:
        for name in NAME.findall(expression):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            family = base if types.get(base) == "histogram" else name
            names.add(family)
            if family not in types and family not in ABSENT_HERE:
                problems.append(f"{dashboard}: {title}: the server exports no {name}")
    for name in sorted(set(listed) - names):
        problems.append(f"{dashboard} does not show {name}")
    with open(rules, "w", encoding="utf-8") as f:
        f.write("groups:\n  - name: dashboard\n    rules:\n")
        for number, (_, expression) in enumerate(asked):
            f.write(f"      - record: dashboard:expression_{number}\n        expr: {json.dumps(expression)}\n")
    print(f"{len(types)} metrics, {len(asked)} expressions")
    for problem in problems:
        print(problem)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
