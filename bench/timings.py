# SPDX-License-Identifier: Apache-2.0
"""Rows of pause.py and incremental.py: times, the bars that they are held against, and the JSON that pause_plot.py draws.

The bars are those under "timings" in bars.json. Python standard library only.
"""

import json
import os
import subprocess

HERE = os.path.dirname(os.path.realpath(__file__))


def load_bars(path=os.path.join(HERE, "bars.json")):
    with open(path) as f:
        return json.load(f)["timings"]


def is_about(mib, gb):
    """Whether so many MiB are the amount that a bar names, which may mean GB or GiB."""
    return abs(mib * (1 << 20) / 1e9 - gb) < 0.1 * gb


class Timings:
    """All rows of one run."""

    def __init__(self, title, bars=None):
        self.title = title
        self.bars = load_bars() if bars is None else bars
        self.rows = []

    def add(self, what, seconds, *, group, name, beside=0, first=1, value=None, mib=None, percent=None, room=True):
        """Adds a row.

        what: what bars name, as in "checkpoint". seconds: what the plot shows. group, name: headings in the plot. Bars are held
        against the seconds less `beside`, as a part of `first`; or against `value`, which is no time. mib, percent, room: GPU
        memory, how much of it changes, and whether the GPU has room for a copy.
        """
        # limit: the bar, on the scale of the seconds.
        row = {"what": what, "group": group, "name": name, "seconds": seconds, "beside": beside, "limit": None, "bars": []}
        for bar in self.bars:
            if bar["what"] != what or bar.get("percent", percent) != percent or bar.get("room", room) != room:
                continue
            if "gb" in bar and (mib is None or not is_about(mib, bar["gb"])):
                continue
            found = (seconds - beside) / first if value is None else value
            if value is None and "max" in bar:
                row["limit"] = round(bar["max"] * first + beside, 4)
            met = bar.get("min", found) <= found <= bar.get("max", found)
            row["bars"].append({**bar, "is": round(found, 4), "met": met})
        self.rows.append(row)
        return row

    def verdicts(self):
        """A line for each bar: what is measured, the limit, met or missed."""
        lines = []
        for row in self.rows:
            for bar in row["bars"]:
                limit = f"<= {bar['max']}" if "max" in bar else f">= {bar['min']}"
                word = "met" if bar["met"] else "missed"
                lines.append(f"{word}: {row['group']}: {row['name']}: {bar['is']:.3f} {bar['of']}, bar {limit}")
        return lines

    def finish(self, path):
        """Prints the bars, and writes the JSON if `path` is not None."""
        for line in self.verdicts():
            print(line, flush=True)
        if not path:
            return
        seen = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                              capture_output=True, text=True).stdout if any_nvidia_smi() else ""  # fmt: skip
        with open(path, "w") as f:
            json.dump({"title": self.title, "environment": "; ".join(seen.splitlines()) or "no GPU", "rows": self.rows}, f, indent=1)


def any_nvidia_smi():
    return any(os.access(os.path.join(folder, "nvidia-smi"), os.X_OK) for folder in os.environ.get("PATH", "").split(":"))
