#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the tools print with --json has the fields of docs/json.md, and no other ones, and each field of the page is printed
at least once. Outputs that need several hosts are checked in tests/hosts.

Usage: json_test.py --product DIR --program PROGRAM --sample PROGRAM

Exit code: 0 passed, 1 failed. Needs root and CRIU.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [here, os.path.join(here, "../matrix")]
import harness  # noqa: E402
import json_fields  # noqa: E402

LIMIT = 120
NOBODY = 65534
# Opens the machine's GPU, which stands in a /dev of the job's own, and waits.
OPENS = """set -e
new=$(mktemp -d)
mount -t tmpfs -o mode=0755,dev none $new
for name in null zero full random urandom tty; do touch $new/$name; mount --bind /dev/$name $new/$name; done
mkdir $new/pts $new/shm; mount --bind /dev/pts $new/pts; mount --bind /dev/shm $new/shm
ln -s pts/ptmx $new/ptmx; ln -s /proc/self/fd $new/fd
mknod -m 666 $new/nvidia0 c 1 3
mount --move $new /dev
rmdir $new
exec "$@"
"""


class Outputs:
    """Runs tools with --json, and checks what they print."""

    def __init__(self, lab):
        self.lab = lab
        self.count = 0
        # Where cr-ps finds this test's jobs, and no others. Another user's job gets there, too.
        os.chmod(lab.folder, 0o755)
        os.makedirs(os.path.join(lab.folder, "runtime"), mode=0o755)
        lab.env["XDG_RUNTIME_DIR"] = os.path.join(lab.folder, "runtime")
        names = [name for name in json_fields.documented() if name not in ("cr-ps --hosts", "cr-checkpoint --hosts", "cr-migrate --whole")]
        self.sections = {name: json_fields.Section(name) for name in names}

    def of(self, section, *command, code=0):
        self.count += 1
        run = self.lab.run(f"tool{self.count}", [self.lab.tool(command[0]), "--json", *command[1:]], LIMIT, expect=code)
        return self.sections[section].check(run.stdout().decode())


def job_of(lab, name, server, program, **variables):
    """A job of that name, where cr-ps finds it."""
    lab.run_options = ("--name", name)
    job = lab.job(name, program, server, pause_at=(3, 6), env={**variables, "CUDA_REMOTE_JOB_DIR": None})
    lab.run_options = ()
    job.directory = os.path.join(lab.env["XDG_RUNTIME_DIR"], "cuda-remote/jobs", name)
    job.wait_paused(3, LIMIT)
    return job


def jobs_and_sessions(lab, outputs, options):
    limits = ["--user-memory-limit", "8GB", "--memory-limit", "4GB", "--session-gpus", "1", "--user-gpus", "1"]
    limits += ["--operator", "address:127.0.0.1"]
    lab.env["SOFTGPU_DEVICES"] = "2"  # of which a session sees one
    server, other = lab.server("limited", listen=True, extra=limits), lab.server("other")
    globals_ = [options.program, "--steps", "10"]
    saved = job_of(lab, "saved", server.unix, globals_, CUDA_MODULE_LOADING="EAGER")
    remote = job_of(lab, "remote", server.tcp, globals_)
    outputs.of("cr-checkpoint", "cr-checkpoint", saved.id, os.path.join(lab.folder, "image"))
    # Its sessions' server is told of the image after that.
    harness.wait_for(
        lambda: any("saved_bytes" in one for one in outputs.of("cr-ps", "cr-ps", "--server", server.unix)["sessions"]),
        LIMIT, lambda: "no session has an image",
    )  # fmt: skip
    outputs.of("cr-trace", "cr-trace", "--seconds", "0.5", remote.id)
    outputs.of("cr-migrate", "cr-migrate", saved.id, "--to", other.unix)
    for job in (saved, remote):
        job.kill()
    restarted = lab.start(harness.Process(lab, "restarted", [lab.tool("cr-restart"), os.path.join(lab.folder, "image"), "--server", other.unix]))
    jobs = lambda: outputs.of("cr-ps", "cr-ps", "--server", other.unix)["jobs"]
    harness.wait_for(lambda: any("restarted_from" in one for one in jobs()), LIMIT, lambda: f"{restarted.describe()}\n{jobs()}")


def other_jobs(lab, outputs, options):
    """Jobs of another user, without checkpoints, with the machine's GPU, that were killed."""
    script = os.path.join(lab.folder, "dev")
    with open(script, "w") as f:
        f.write(OPENS)
    sleeps = ["--", "/bin/sleep", "600"]
    ways = {
        "users": [lab.tool("cr-run"), "--no-check", "--name", "users", "--user", str(NOBODY), *sleeps],
        "plain": [lab.tool("cr-run"), "--no-check", "--name", "plain", "--plain", *sleeps],
        "gpu": ["unshare", "--mount", "--propagation", "private", "bash", script, lab.tool("cr-run"), "--no-check", "--name", "gpu", "--", "sh", "-c",
                "exec 9</dev/nvidia0; sleep 600"],
    }  # fmt: skip
    runs = {name: lab.start(harness.Process(lab, name, command)) for name, command in ways.items()}

    def jobs():
        return {one["name"]: one for one in outputs.of("cr-ps", "cr-ps")["jobs"]}

    def there():
        now = jobs()
        return "user" in now.get("users", {}) and "no_checkpoint" in now.get("plain", {}) and now.get("gpu", {}).get("machine_gpu")

    harness.wait_for(there, LIMIT, lambda: f"cr-ps shows {jobs()}\n" + "\n".join(run.describe() for run in runs.values()))


def server_without_workers(lab, outputs):
    broken = lab.server("broken", extra=["--driver", os.path.join(lab.folder, "no-driver.so")])
    seen = lambda: "worker_error" in outputs.of("cr-ps", "cr-ps", "--server", broken.unix)["server"]
    harness.wait_for(seen, LIMIT, broken.describe)


def images(lab, outputs, options):
    image, sample, store = (os.path.join(lab.folder, name) for name in ("image", "sample", "store"))
    subprocess.run([options.sample, sample], check=True)
    of_image, of_store = "cr-inspect of an image", "cr-inspect of a folder of images"
    outputs.of(of_image, "cr-inspect", image)
    outputs.of(of_image, "cr-inspect", "--verify", "--can-run-on", "sm_90", "--files-here", sample, image, code=3)
    outputs.of(of_image, "cr-inspect", "--export", image, os.path.join(lab.folder, "exported"))
    shutil.copytree(sample, store + "/image-000001")
    shutil.copytree(image, store + "/image-000002")
    outputs.of(of_store, "cr-inspect", "--verify", store)
    for damaged in (sample, store + "/image-000001"):
        with open(damaged + "/memory/index", "r+b") as f:
            f.truncate(10)
    outputs.of(of_store, "cr-inspect", "--verify", store, code=1)
    if outputs.of(of_image, "cr-inspect", "--verify", sample, code=1)["verify"]["undamaged"]:
        raise harness.Failure("a damaged image is called undamaged")


def trace_files(lab, outputs, options):
    """The file of CUDA_REMOTE_TRACE."""
    path = os.path.join(lab.folder, "calls.json")
    lab.run("traced", [lab.tool("cr-run"), "--", options.program, "--steps", "1"], LIMIT, env={"CUDA_REMOTE_TRACE": path})
    with open(path) as f:
        outputs.sections["cr-trace"].check(f.read())


def notices_mistakes():
    """The comparison finds what it is there for."""
    good = '{"version": 1, "host": "b", "rounds": 1}'
    for wrong in ('{"host": "b"}', good.replace('"b"', '""'), good.replace('"b"', '"{}"'), good.replace("rounds", "round"), good.replace("1}", "-1}")):
        try:
            json_fields.Section("cr-migrate --whole").check(wrong)
        except json_fields.Wrong:
            continue
        raise harness.Failure(f"passes: {wrong}")
    section = json_fields.Section("cr-migrate --whole")
    section.check(good)
    try:
        section.complete()
    except json_fields.Wrong as wrong:
        if "bytes_in_pause" in str(wrong):
            return
    raise harness.Failure("a field that no output has is not found")


def main():
    parser = argparse.ArgumentParser()
    for name in ("product", "program", "sample"):
        parser.add_argument("--" + name, required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    notices_mistakes()
    with harness.Lab(options.product) as lab:
        outputs = Outputs(lab)
        jobs_and_sessions(lab, outputs, options)
        other_jobs(lab, outputs, options)
        server_without_workers(lab, outputs)
        images(lab, outputs, options)
        trace_files(lab, outputs, options)
        for section in outputs.sections.values():
            section.complete()
            print(f"{section.name}: {len(section.fields)} fields")


if __name__ == "__main__":
    try:
        main()
    except (harness.Failure, json_fields.Wrong) as failure:
        sys.exit(f"failed: {failure}")
