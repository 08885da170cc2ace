#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint costs that follows another one: time and space of the first, of one of the same memory, and of one with
a part of the memory changed, all into one store (cr-checkpoint --keep).

Usage: incremental.py --product DIR --programs DIR [--mib N,...] [--changing P] [--folder DIR] [--driver FILE] [--native]
                      [--user NAME [--state DIR]] [--json FILE] [--check]

DIR of the product: cr-run, cr-server, cr-checkpoint, cr-restart, cr-inspect, cr-hostd. Prints a table, a row for each checkpoint; the
columns "of first" are what counts, and the bars are held against them. After the last one, the job is ended and restarted
from the newest image, and compares all of its memory. `raw` is a file of random bytes, written and flushed in the same
folder. --native adds what there is without cuda-remote: the driver's own checkpoint (cuCheckpointProcess*), a CRIU dump of
the process, and the flush; each of them costs as much as the first. --check fails unless space, and what is not read, are
what they should be; times are never checked. Needs root and CRIU.

--user NAME does it all as this user: the script starts a cr-hostd of its own, and the user's tools ask that. The user
must be able to read the product and the programs, and to enter --folder. Times are those of the whole command then,
with the copy from cr-hostd's folder to the store. The store is in --folder and takes the job's GPU memory and what
changes of it. cr-hostd's folder is in --state and takes the GPU memory once, at the first checkpoint and at the
restart, and cr-hostd leaves a twentieth of that disk free. If both are on one disk, it needs room for all of this.
"""

import argparse
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
import timings  # noqa: E402

RAW_MIB = 4096  # at most: the disk's rate shows in less time than its files take
PROCESSES_BYTES = 1 << 29  # at most, in all images together


def row(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def wait_for(what, condition, limit):
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not within {limit} s")
        time.sleep(0.02)


NOTHING = "nothing changed"


class Measure:
    KIND = ""  # before what bars name

    def __init__(self, options, folder, mib, found):
        self.options, self.folder, self.mib, self.found = options, folder, mib, found
        self.orders = os.path.join(folder, "orders")
        self.store = os.path.join(folder, "store")
        self.job = os.path.join(folder, "job")  # as tools name it
        self.job_option = ["--job-dir", self.job]
        self.out = os.path.join(folder, "out")
        self.number = 0
        self.processes = []
        self.as_user = {}  # for subprocess
        os.makedirs(self.orders)
        self.env = dict(os.environ)
        if options.driver:
            self.env["CUDA_REMOTE_DRIVER"] = options.driver

    def tool(self, name, *words):
        command = [os.path.join(self.options.product, name)] + list(words)
        done = subprocess.run(command, capture_output=True, text=True, timeout=self.options.limit, env=self.env,
                              **self.as_user)  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def start(self, out, *command, as_user=None):
        with open(out, "a") as file, open(out + ".err", "a") as errors:
            # A restart opens the job's files once more, as its user.
            for one in (file, errors) if as_user else ():
                os.fchown(one.fileno(), as_user["user"], as_user["group"])
            process = subprocess.Popen(command, stdout=file, stderr=errors, stdin=subprocess.DEVNULL, env=self.env,
                                       start_new_session=True, **as_user or {})  # fmt: skip
        self.processes.append(process)
        return process

    def text(self):
        return open(self.out).read()

    def order(self, word):
        """Has the job do something, and compare its memory."""
        self.number += 1
        path = os.path.join(self.orders, str(self.number))
        with open(path + ".new", "w") as file:
            file.write(word)
        os.rename(path + ".new", path)
        answer = f"{self.number} wrong "
        wait_for(f"the job's answer to {word}", lambda: f"{answer}" in self.text() and self.text().endswith("\n"),
                 self.options.limit)
        if f"{answer}0\n" not in self.text():
            raise RuntimeError(f"the job's memory is not what it was: {self.text()[-200:]}")

    def save(self):
        options = ["--json", "--keep", "9", *self.options.checkpoint_option]
        return json.loads(self.tool("cr-checkpoint", *options, self.job, self.store))

    def checkpoint(self, name, first=None):
        told = self.save()
        listed = json.loads(self.tool("cr-inspect", "--json", self.store))
        told["store_bytes"] = listed["total_bytes"]
        # What the store has grown by: no image is removed meanwhile.
        grown = told["store_bytes"] - (first["store_bytes"] if first else 0)
        told["grown_bytes"] = grown
        base = first["first"] if first else told
        told["first"] = base
        gpu = grown - told["client_bytes"]
        of = lambda value, whole: f"{100 * value / whole:.1f}%" if whole else "-"
        row(self.mib, name, f"{told['seconds']:.2f}", of(told["seconds"], base["seconds"]), f"{told['paused_seconds']:.3f}",
            f"{told['reading_seconds']:.3f}", f"{told['dumping_seconds']:.3f}", f"{told['unread_bytes'] / 1e6:.1f}",
            f"{gpu / 1e6:.1f}",
            of(gpu, base["grown_bytes"] - base["client_bytes"]), f"{told['client_bytes'] / 1e6:.1f}")
        told["gpu_grown"] = gpu
        group = f"{self.mib / 1024:.3g} GiB, seconds of a checkpoint{self.KIND and ', '}{self.KIND}"
        if base is told:
            self.found.add("first", told["seconds"], group=group, name=name)
            return told
        changed, percent = name != NOTHING, float(self.options.changing)
        what = f"{self.KIND}{self.KIND and ', '}{'changed' if changed else NOTHING}"
        self.found.add(f"{what}: time", told["seconds"], group=group, name=f"{name}: time", first=base["seconds"], mib=self.mib,
                       percent=percent)  # fmt: skip
        self.found.add(f"{what}: space", told["seconds"], group=group, name=f"{name}: space", mib=self.mib, percent=percent,
                       value=gpu / (base["grown_bytes"] - base["client_bytes"]))  # fmt: skip
        return told

    def native(self):
        """The driver's checkpoint of such a job, CRIU's, and the flush, all as one."""
        orders, images = os.path.join(self.folder, "native-orders"), os.path.join(self.folder, "native-images")
        os.makedirs(orders)
        os.makedirs(images)
        out = os.path.join(self.folder, "native-out")
        programs = self.options.programs
        job = self.start(out, os.path.join(programs, "incremental_job"), str(self.mib), orders)
        wait_for("the native job", lambda: "ready" in open(out).read() or job.poll() is not None, self.options.limit)
        criu = os.environ.get("CUDA_REMOTE_CRIU", "criu")
        save = (f'"{criu}" dump --tree {job.pid} --images-dir "{images}" --leave-running --shell-job --log-file dump.log '
                f'&& sync -f "{images}"')  # fmt: skip
        done = subprocess.run([os.path.join(programs, "native_checkpoint"), str(job.pid), os.path.join(orders, "none"), "sh", "-c", save],
                              capture_output=True, text=True, timeout=self.options.limit, env=self.env)  # fmt: skip
        os.killpg(job.pid, 9)
        job.wait()
        shutil.rmtree(images)
        told = json.loads(done.stdout or '{"error": "native_checkpoint printed nothing"}')
        if "error" in told:
            raise RuntimeError(f"{told['error']} {done.stderr.strip()[-300:]}")
        seconds = told["checkpoint_s"] + told["command_s"]
        row(self.mib, "the driver's own, and CRIU", f"{seconds:.2f}", "100.0%", f"{seconds:.3f}", *["-"] * 6)
        self.found.add("native", seconds, group=f"{self.mib / 1024:.3g} GiB, seconds of a checkpoint",
                       name="the driver's own, and CRIU")  # fmt: skip

    def run(self):
        product = self.options.product
        job = self.start(self.out, os.path.join(product, "cr-run"), *self.job_option, "--",
                         os.path.join(self.options.programs, "incremental_job"), str(self.mib), self.orders,
                         as_user=self.as_user)  # fmt: skip
        wait_for("the job", lambda: "ready" in self.text() or job.poll() is not None, self.options.limit)
        if job.poll() is not None:
            raise RuntimeError(f"the job ended: {open(self.out + '.err').read()[-500:]}")
        self.raw()
        first = self.checkpoint("first")
        same = self.checkpoint(NOTHING, first)
        self.order(self.options.changing)
        changed = self.checkpoint(f"{self.options.changing}% changed", same)
        again = self.checkpoint(NOTHING, changed)
        self.order("1")
        self.tool("cr-checkpoint", "--keep", "9", "--stop", self.job, self.store)
        job.wait(self.options.limit)
        start = time.monotonic()
        self.start(self.out, os.path.join(product, "cr-restart"), "--cut-back", self.store, as_user=self.as_user)
        self.order("end")
        row(self.mib, "restart, and memory compared", f"{time.monotonic() - start:.2f}", *["-"] * 8)
        if self.options.check:
            whole, part = first["gpu_grown"], float(self.options.changing) / 100
            # A chunk that is changed in part is stored whole: one in each allocation of 256 MiB.
            allowed = whole * part + (self.mib // 256 + 2) * (2 << 20)
            if not (same["gpu_grown"] < 1 << 20 and again["gpu_grown"] < 1 << 20 and changed["gpu_grown"] < allowed):
                raise RuntimeError("an image takes more space than what has changed")
            for told, changing in ((same, 0), (changed, allowed), (again, 0)):
                if told["unread_bytes"] < 0.9 * told["gpu_bytes"] - changing:
                    raise RuntimeError("memory that an earlier image has was read again")

    def raw(self):
        path = os.path.join(self.folder, "raw")
        block = os.urandom(16 << 20)
        blocks = max(1, min(self.mib, RAW_MIB) // 16)
        start = time.monotonic()
        with open(path, "wb") as file:
            for _ in range(blocks):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.monotonic() - start
        os.unlink(path)
        row(self.mib, f"raw: {blocks * 16 / seconds:.0f} MiB/s", f"{seconds:.2f}", *["-"] * 8)

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()


def account_of(name):
    """Its number, its group and its groups. A number need not be that of an account."""
    if name.isdigit():
        return int(name), int(name), []
    account = pwd.getpwnam(name)
    return account.pw_uid, account.pw_gid, os.getgrouplist(name, account.pw_gid)


class UserMeasure(Measure):
    """The same of an ordinary user's job, through a cr-hostd that is started for it."""

    KIND = "by a user"

    def __init__(self, options, folder, mib, found):
        super().__init__(options, folder, mib, found)
        user, group, groups = account_of(options.user)
        home = os.path.join(folder, "home")
        for path in (folder, self.orders):
            os.chmod(path, 0o755)
        os.mkdir(home, 0o700)
        os.chown(home, user, group)
        self.store, self.out = os.path.join(home, "store"), os.path.join(home, "out")
        self.job = "incremental"
        self.job_option = ["--name", self.job]
        self.as_user = {"user": user, "group": group, "extra_groups": groups, "cwd": home}
        # Not below --folder: names of sockets must be short.
        self.hostd_folder = tempfile.mkdtemp(prefix="incremental-", dir="/tmp")
        self.job_folders = f"{self.hostd_folder}/users/{user}"
        self.hostd_env = dict(self.env)
        self.env = {name: value for name, value in self.env.items() if not name.startswith(("CUDA_REMOTE_", "XDG_"))}
        self.env |= {"HOME": home, "USER": options.user, "LOGNAME": options.user,
                     "CUDA_REMOTE_HOSTD": self.hostd_folder + "/hostd.sock"}  # fmt: skip
        if options.driver:
            self.env["CUDA_REMOTE_DRIVER"] = options.driver
        self.state = self.hostd = None

    def check_room(self):
        memory = (self.mib << 20) * 1.02 + PROCESSES_BYTES
        facts = os.statvfs(self.state)
        needs = {self.folder: memory * (1 + float(self.options.changing) / 100),
                 self.state: memory + facts.f_blocks * facts.f_frsize / 20}  # fmt: skip
        if os.stat(self.folder).st_dev == os.stat(self.state).st_dev:
            needs = {self.folder: sum(needs.values())}
        for path, need in needs.items():
            left = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
            if left < need:
                raise RuntimeError(f"{path} has {left / 1e9:.1f} GB left and needs {need / 1e9:.1f} GB (--folder, --state, --mib)")

    def run(self):
        state = os.path.abspath(self.options.state or self.folder)
        self.state = tempfile.mkdtemp(prefix="incremental-state-", dir=state)
        self.check_room()
        errors, (ready, told) = self.hostd_folder + "/errors", os.pipe()
        with open(errors, "w") as file:
            command = [os.path.join(self.options.product, "cr-hostd"), "--socket", self.env["CUDA_REMOTE_HOSTD"]]
            command += ["--state", self.state, "--ready-fd", str(told)]
            self.hostd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, pass_fds=[told],
                                          env=self.hostd_env, start_new_session=True)  # fmt: skip
        os.close(told)
        with open(ready) as answer:
            if not answer.read():
                raise RuntimeError(f"cr-hostd does not start: {open(errors).read()[-500:]}")
        super().run()

    def save(self):
        start = time.monotonic()
        told = super().save()
        if os.stat(told["image"]).st_uid != self.as_user["user"]:
            raise RuntimeError(f"{told['image']} is not the user's")
        told["seconds"] = time.monotonic() - start
        return told

    def end(self):
        # They pass it on to what cr-hostd has started for them.
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    pass
        super().end()
        if self.hostd:
            self.hostd.terminate()
            self.hostd.wait()
        # A file system of its own where this folder is in memory.
        if os.path.ismount(self.job_folders):
            subprocess.run(["umount", self.job_folders], check=False)
        shutil.rmtree(self.hostd_folder, ignore_errors=True)
        if self.state:
            shutil.rmtree(self.state, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--product", required=True)
    parser.add_argument("--programs", required=True, help="the folder of incremental_job")
    parser.add_argument("--mib", default="1024,8192", help="GPU memory of the job")
    parser.add_argument("--changing", default="5", help="per cent that are rewritten")
    parser.add_argument("--folder", help="where images go (default: a temporary folder)")
    parser.add_argument("--driver", help="the driver library (CUDA_REMOTE_DRIVER)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each step")
    parser.add_argument("--native", action="store_true", help="the driver's own checkpoint and CRIU, too")
    parser.add_argument("--json", help="file for the times; pause_plot.py draws them")
    parser.add_argument("--user", help="all as this user (a name, or a number), through a cr-hostd of its own")
    parser.add_argument("--state", help="with --user: where cr-hostd keeps images on their way (default: --folder)")
    parser.add_argument("--checkpoint-option", action="append", default=[], metavar="OPTION", help="one more for cr-checkpoint")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.state and not options.user:
        parser.error("--state is for --user")
    if options.user:
        os.umask(0o022)
        try:
            account_of(options.user)
        except KeyError:
            parser.error(f"there is no account {options.user}")
    options.product, options.programs = os.path.abspath(options.product), os.path.abspath(options.programs)
    row("MiB", "checkpoint", "s", "of first", "pause s", "of it reading", "of it processes", "GPU memory not read, MB",
        "GPU memory stored, MB", "of first", "processes, MB")
    row(*["---"] * 11)
    failed = 0
    found = timings.Timings("What a checkpoint costs that follows another one")
    for mib in options.mib.split(","):
        folder = os.path.abspath(tempfile.mkdtemp(prefix="incremental-", dir=options.folder))
        measure = (UserMeasure if options.user else Measure)(options, folder, int(mib), found)
        try:
            # First, and its files are gone by then: the disk need not have room for both.
            if options.native:
                measure.native()
            measure.run()
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            print(f"{mib} MiB: {error}", file=sys.stderr, flush=True)
            failed += 1
        finally:
            measure.end()
            shutil.rmtree(folder, ignore_errors=True)
    found.finish(options.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
