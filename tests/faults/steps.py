#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Jobs of several CUDA processes: one of them, or the tool, is killed in each step of a checkpoint, a stop, a restart or a move.

Usage: steps.py --product DIR --apps DIR --programs DIR [--driver LIB] [--only CASE,...] [--keep] [--logs FILE]

The tools say which steps they take and can be stopped before each of them (checkpoint/transaction/at_step.h), so the
steps are found by running the tool once without a fault. After each fault the other processes go on with the right
results, or all of the job is restored; nothing is left over: no half image, no process, no session, no lock. After the
tool was killed, all processes go on, and the next tool works at once.

Exit code: 0 all passed, 1 some failed, 2 wrong use.
"""

import argparse
import contextlib
import glob
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "../matrix"), os.path.join(os.path.dirname(os.path.realpath(__file__)), "../matrix")]
import harness  # noqa: E402
from harness import Failure, wait_for  # noqa: E402

CASES = {}
RANKS = 8
SAVE = "save processes"  # the step that is CRIU's work
STILL_PARTS = 4  # of apart.cu: so many steps in a row compare all memory that stands still
LIMIT = int(os.environ.get("CR_LIMIT", 90))  # seconds for anything that is waited for


def case(function):
    CASES[function.__name__] = function
    return function


class Trapped(Exception):
    """The job has ended as Ranks.leave_out_trapped says. The other steps need a new one."""


class Ranks:
    """A running job of the program `apart`, on one of two servers, and what must hold of it."""

    def __init__(self, lab, options, size=16, ranks=RANKS, far=False, still=0):
        self.lab = lab
        self.far = far  # moves go over TCP
        self.least = STILL_PARTS + 2 if still else 3  # reports of a rank that has compared all of its memory since
        self.lab.workers = 2
        program = harness.find(options.programs, "apart")
        if program is None:
            raise Failure(f"the program apart is not in {options.programs}")
        self.servers = [lab.server("one", listen=far), lab.server("two", listen=far)]
        command = [os.path.abspath(program), "--still", str(still), "--ranks", str(ranks), "--size", str(size)]
        self.job = lab.job("job", command, self.server.unix)
        self.carrier = self.job  # the process that the job depends on: cr-run, later a cr-restart
        self.count = ranks  # all ranks that were ever started
        self.added = 0
        self.dead = set()
        self.left = set()  # of the dead: those that have ended by themselves
        self.tools = 0
        self.expect_running("at first")

    @property
    def server(self):
        return self.servers[0]

    @property
    def place(self):
        """Where a move goes to."""
        return self.servers[1].tcp if self.far else self.servers[1].unix

    def path(self, name):
        return os.path.join(self.lab.folder, name)

    def sessions(self, server=None):
        """The sessions of a server, by the process's number in the job."""
        server = server or self.server
        asked = subprocess.run(
            [self.lab.tool("cr-ps"), "--json", "--server", server.unix], capture_output=True, text=True, timeout=harness.patient(LIMIT)
        )
        if asked.returncode != 0:
            raise Failure(f"cr-ps: {asked.stderr}")
        return {session["pid"]: session for session in json.loads(asked.stdout)["sessions"]}

    def rank(self, number):
        """(steps, PID in the job) of a rank; None if it has not made any yet."""
        try:
            with open(f"{self.job.sync}.rank.{number}") as f:
                step, pid = f.read().split()
        except (OSError, ValueError):
            return None
        return int(step), int(pid)

    def host_pid(self, pid, *otherwise):
        """The number here of the process that the job knows as `pid`; `otherwise`, if that is given, where there is none."""
        for outer in harness.descendants(self.carrier.pid):
            try:
                with open(f"/proc/{outer}/status") as f:
                    numbers = re.search(r"^NSpid:(.*)$", f.read(), re.M).group(1).split()
            except OSError:
                continue
            if len(numbers) > 1 and int(numbers[-1]) == pid:
                return outer
        if otherwise:
            return otherwise[0]
        raise Failure(f"there is no process {pid} in the job\n{self.carrier.describe()}")

    def living(self):
        return [number for number in range(self.count) if number not in self.dead]

    def expect_running(self, when):
        """All living ranks make steps, on their server and nowhere else; nobody else is left."""
        describe = lambda: f"{when}: {self.job.describe()}\n{self.carrier.describe()}"
        # A restarted rank begins with fewer steps than it had made.
        seen = {number: set() for number in self.living()}

        def standing():
            for number in self.living():
                seen[number].add(self.rank(number))
            return [number for number in seen if len(seen[number] - {None}) < self.least]

        wait_for(
            lambda: not standing() or not self.carrier.running(), LIMIT, lambda: f"ranks {standing()} stand still; {describe()}"
        )
        if not self.carrier.running():
            raise Failure(f"the job has ended; {describe()}")
        pids = sorted(self.rank(number)[1] for number in self.living())
        wait_for(lambda: sorted(self.sessions()) == pids, LIMIT, lambda: f"sessions of {sorted(self.sessions())}, not {pids}; {describe()}")
        other = self.servers[1]
        wait_for(lambda: not self.sessions(other), LIMIT, lambda: f"sessions on the other server: {self.sessions(other)}; {describe()}")
        zombies = lambda: [pid for pid in harness.descendants(self.carrier.pid) if harness.state_of(pid) == "Z"]
        wait_for(lambda: not zombies(), LIMIT, lambda: f"zombies below the job: {zombies()}; {describe()}")
        stopped = lambda: [pid for pid in harness.descendants(self.carrier.pid) if harness.state_of(pid) in ("T", "t")]
        wait_for(lambda: not stopped(), LIMIT, lambda: f"stopped processes: {stopped()}; {describe()}")
        self.job.expect_usual_policy(self.carrier)

    def expect_gone(self, number):
        """A rank that was hit has ended, and its parent has noticed."""
        self.dead.add(number)
        pid = self.rank(number)[1]
        wait_for(
            lambda: f"PID {pid} ended with status" in self.job.stderr() + self.carrier.stderr() or not self.carrier.running(),
            LIMIT,
            lambda: f"rank {number} (PID {pid}) goes on\n{self.job.describe()}\n{self.carrier.describe()}",
        )

    def leave_out_trapped(self, tool):
        """CRIU that meets a killed process while its code is in another one may leave that with a trap or a broken pipe, which ends it.

        There is no help against that; the tool names both.
        """
        harness.pause(0.5)
        for number in self.living():
            words = rf"PID {self.rank(number)[1]} ended with status 0x(5|d)\n"
            if not re.search(words, self.job.stderr() + self.carrier.stderr()):
                continue
            self.dead.add(number)
            if tool.stderr().count(" ended while it was saved: ") < 2:
                raise Failure(f"rank {number} has ended, too, and is not named\n{tool.describe()}")

    def check_first_process(self, tool):
        """The same for the job's first process, with which the job ends."""
        if self.carrier.running():
            return
        code = self.carrier.wait(LIMIT)
        if code not in (128 + signal.SIGTRAP, 128 + signal.SIGPIPE, 128 + signal.SIGSEGV):
            raise Failure(f"the job has ended with {code}\n{self.carrier.describe()}\n{tool.describe()}")
        if tool.stderr().count(" ended while it was saved: ") < 2:
            raise Failure(f"the job's first process has ended, too, and is not named\n{tool.describe()}")
        raise Trapped()

    def begin_one(self):
        """Has the job start one more rank, and returns its number."""
        open(f"{self.job.sync}.add.{self.added}", "w").close()
        self.added += 1
        self.count += 1
        return self.count - 1

    def rest(self, number):
        """Has a rank make no more calls, so that nothing can keep it from leaving."""
        open(f"{self.job.sync}.rest.{number}", "w").close()
        wait_for(lambda: os.path.exists(f"{self.job.sync}.rests.{number}"), LIMIT, self.job.describe)

    def leave(self, number):
        """Has a rank end by itself."""
        open(f"{self.job.sync}.leave.{number}", "w").close()
        self.dead.add(number)
        self.left.add(number)

    def execute(self, number):
        """Has a rank that rests execute its program again, in the same process."""
        open(f"{self.job.sync}.exec.{number}", "w").close()

    def add(self):
        """One more rank, in the place of one that has ended: nothing keeps it from opening a session."""
        number = self.begin_one()
        wait_for(
            lambda: self.rank(number) or not self.carrier.running(), LIMIT,
            lambda: f"rank {number} does not start\n{self.job.describe()}\n{self.carrier.describe()}",
        )  # fmt: skip
        if not self.rank(number):
            raise Failure(f"the job ended before rank {number} ran\n{self.job.describe()}")

    def tool(self, command, steps, stop_at=None):
        """Starts a tool that notes its steps in the file `steps`."""
        self.tools += 1
        env = {"CR_TEST_STEPS": steps}
        if stop_at:
            env["CR_TEST_STOP_AT"] = str(stop_at)
        name = f"{os.path.basename(command[0])}{self.tools}"
        return self.lab.start(harness.Process(self.lab, name, command, env))

    def restart(self, image, env=None):
        """Brings the job back from `image`."""
        self.tools += 1
        command = [self.lab.tool("cr-restart"), image, "--server", self.server.unix]
        self.carrier = self.lab.start(harness.Process(self.lab, f"restart{self.tools}", command, env))
        return self.carrier

    def end_job(self, when):
        """Ends the job as an operator does; its sessions end."""
        self.carrier.kill(signal.SIGTERM)
        self.carrier.wait(LIMIT)
        wait_for(lambda: not self.sessions(), LIMIT, lambda: f"{when}: sessions are left")

    def restart_from_image(self):
        """Saves the job stopped and restarts it without a fault. Returns the image, and the file of the restart's steps."""
        image, steps = self.path("image"), self.path("steps0")
        self.lab.run("checkpoint", [self.lab.tool("cr-checkpoint"), "--stop", self.job.id, image])
        self.job.wait(LIMIT)
        self.restart(image, {"CR_TEST_STEPS": steps})
        self.expect_running("without a fault")
        return image, steps

    def finish(self):
        """The job ends, and each living rank says that all was right."""
        open(self.job.sync + ".end", "w").close()
        self.carrier.expect_success(LIMIT)
        right = {int(number) for number in re.findall(r"rank (\d+) right\n", self.job.stdout().decode())}
        if right != set(self.living()) | self.left:
            raise Failure(f"right: {sorted(right)}, living: {self.living()}, left: {self.left}\n{self.job.describe()}")
        for name in (self.job, self.carrier):
            if "is wrong" in name.stderr():
                raise Failure(f"a wrong result\n{name.describe()}")
        for server in self.servers:
            wait_for(lambda: not self.sessions(server), LIMIT, lambda: f"sessions are left: {self.sessions(server)}")


def chosen(steps):
    """Of the steps in a file: their numbers and names. Of those that are taken for each process, the first and a middle one."""
    found = []
    with open(steps) as f:
        for line in f:
            number, name = line.rstrip("\n").split(" ", 1)
            part = re.search(r" (\d+)/(\d+)$", name)
            if not part or int(part.group(1)) in (1, int(part.group(2)) // 2 + 1):
                found.append((int(number), name))
    if len(found) < 5:
        raise Failure(f"a tool takes only these steps: {found}")
    return found


def kills(steps):
    """Before which steps something is killed, and how long after that: CRIU's work is long, and stops the processes in it."""
    for number, name in chosen(steps):
        for delay in (0, 0.03, 0.06, 0.1, 0.15, 0.25) if name == SAVE else (0,):
            yield number, name, delay


def held_dumps(steps, delays=(0, 0.05)):
    """The step that is CRIU's work, if there is one, and how long after CRIU is at one process (HeldDump) something is killed."""
    return [(number, name, delay) for number, name in chosen(steps) for delay in (delays if name == SAVE else ())]


class HeldDump:
    """A dump that does not get past one process: a file of CRIU's for that one is a pipe, which CRIU cannot open before somebody reads.

    So CRIU is in the middle of its work for as long as the test wants: it has stopped all processes, and has its code in
    this one. It is in no other one, which could end with that code in it (Ranks.leave_out_trapped). The image is of no use.
    """

    def __init__(self, image, pid):
        """Before CRIU is started. `pid`: the process's number in the job."""
        folder = os.path.join(image + ".partial", "client")
        # CRIU opens the first one just before the second.
        self.before, self.pipe = (os.path.join(folder, f"{name}-{pid}.img") for name in ("ids", "core"))
        self.reader = None
        os.mkfifo(self.pipe)

    def await_criu(self, tool):
        """Waits until CRIU is at the process."""
        at_it = lambda: os.path.exists(self.before)
        wait_for(lambda: at_it() or not tool.running(), LIMIT, lambda: f"CRIU does not come to the process\n{tool.describe()}")
        if not at_it():
            raise Failure(f"CRIU was not held\n{tool.describe()}")

    def let_go(self):
        """CRIU works on, if it still does. What it writes of the process fits into the pipe."""
        try:
            self.reader = os.open(self.pipe, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            pass  # it has failed, and all of the image was removed

    def close(self):
        """After the tool has ended."""
        if self.reader is not None:
            os.close(self.reader)


def all_steps(steps):
    """The numbers and names of all steps in a file, and delays: CRIU's work is long, and the job does not end at once."""
    delays = {SAVE: (0, 0.02, 0.06, 0.12, 0.2, 0.3), "end the job": (0, 0.005, 0.02, 0.1), "restore processes": (0, 0.05, 0.2)}
    with open(steps) as f:
        found = [(int(number), name) for number, name in (line.rstrip("\n").split(" ", 1) for line in f)]
    if len(found) < 5:
        raise Failure(f"a tool takes only these steps: {found}")
    return [(number, name, delay) for number, name in found for delay in delays.get(name, (0,))]


def at_work(command):
    """The processes of a tool that was started so, also those that are not below it."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as f:
                if f.read().split(b"\0")[:-1] == [os.fsencode(word) for word in command]:
                    found.append(int(entry))
        except (OSError, ValueError):
            pass
    return found


def kill_at_work(tool, everything):
    """Kills the process that does a tool's work; with `everything`, also what it has started and not executed anything."""
    killed = [pid for pid in at_work(tool.command) if pid != tool.pid]
    if not everything:
        killed = [pid for pid in killed if harness.parent_of(pid) not in killed]
    for pid in killed:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def await_step(tool, steps, number):
    reached = lambda: os.path.exists(steps) and any(line.startswith(f"{number} ") for line in open(steps))
    wait_for(lambda: reached() or not tool.running(), LIMIT, lambda: f"no step {number}\n{tool.describe()}")
    if not reached():
        raise Failure(f"the tool did not come to step {number}\n{tool.describe()}")


def no_half_image(image, committed):
    # CRIU's log of a failure stays, for whoever wants to know more.
    left = [path for path in glob.glob(glob.escape(image) + "*") if path not in (image, image + ".criu-dump.log")]
    if left or os.path.exists(image) != committed:
        raise Failure(f"committed: {committed}, but there are {left} and the image: {os.path.exists(image)}")


def fail_in_each_step(context, way, what, **job):
    """`way`: "keep", "stop" or "move". `what`: "rank" or "worker", which is killed."""
    _, options = context
    done = []
    with contextlib.ExitStack() as labs:
        for more in (2, 1, 0):
            try:
                fail_steps_of_one_job(context, way, what, done, **job)
                return
            except Trapped:
                if more == 0:
                    raise
            print("    the job's first process was trapped; the rest with another job", flush=True)
            context = (labs.enter_context(harness.Lab(options.product, options.driver, options.keep)), options)


def fail_steps_of_one_job(context, way, what, done, **job):
    """`done`: of each kill so far, also of earlier jobs, whether the tool succeeded."""
    lab, options = context
    ranks = Ranks(lab, options, **job)
    pick = random.Random(f"{way} {what}")
    count = len(ranks.living())

    def command(image):
        if way == "move":
            return [lab.tool("cr-migrate"), ranks.job.id, "--to", ranks.place]
        return [lab.tool("cr-checkpoint"), *(["--stop"] if way == "stop" else []), ranks.job.id, image]

    def settle(tool, image, name):
        """After the tool has ended: what must be there, and what must not."""
        ok = tool.wait(LIMIT) == 0
        if not ok and not tool.stderr().strip():
            raise Failure(f"{name}: failed without a word\n{tool.describe()}")
        wait_for(lambda: not harness.processes_with(image), LIMIT, lambda: f"{name}: left behind: {harness.processes_with(image)}")
        if way != "move":
            no_half_image(image, ok)
        if ok and way != "move":
            lab.run(f"verify{ranks.tools}", [lab.tool("cr-inspect"), "--verify", image])
        if ok and way == "move":
            ranks.servers.reverse()
        if ok and way == "stop":
            if ranks.carrier.wait(LIMIT) != 121:
                raise Failure(f"{name}: the stopped job's exit code is wrong\n{ranks.carrier.describe()}")
            for server in ranks.servers:
                wait_for(lambda: not ranks.sessions(server), LIMIT, lambda: f"{name}: sessions of the stopped job are left")
            ranks.restart(image)
        return ok

    image, steps = ranks.path("image0"), ranks.path("steps0")
    tool = ranks.tool(command(image), steps)
    if not settle(tool, image, "no fault"):
        raise Failure(f"failed without a fault\n{tool.describe()}")
    ranks.expect_running("without a fault")
    # With a worker that is killed in CRIU's work, the image would be complete, and of no use.
    held_ones = held_dumps(steps) if what == "rank" else []
    moments = [(*one, False) for one in kills(steps)] + [(*one, True) for one in held_ones]
    for number, name, delay, held in moments[len(done) :]:
        title = f"{what} killed {'in' if held else 'before'} step {number} ({name})" + (f", {delay} s later" if delay else "")
        unique = f"{number}-{delay}-{held}"
        image, steps = ranks.path(f"image{unique}"), ranks.path(f"steps{unique}")
        victim = pick.choice(ranks.living())
        session = ranks.sessions()[ranks.rank(victim)[1]]
        tool = ranks.tool(command(image), steps, stop_at=number)
        await_step(tool, steps, number)
        killed = ranks.host_pid(session["pid"]) if what == "rank" else session["worker_pid"]
        dump = HeldDump(image, session["pid"]) if held else None
        if delay or held:
            open(steps + ".go", "w").close()
            if held:
                dump.await_criu(tool)
            time.sleep(delay)
        try:
            os.kill(killed, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the job was stopped before that
        if not delay and pick.random() < 0.5:
            time.sleep(0.05)  # others may notice first
        if held:
            dump.let_go()
        open(steps + ".go", "w").close()
        ok = settle(tool, image, title)
        if held:
            dump.close()
            if ok:
                raise Failure(f"{title}: the job was saved\n{tool.describe()}")
        done.append(ok)
        in_criu = delay or held
        named = r"apart \(PID \d+\)" + (r"|was killed by 9 unexpectedly" if in_criu else "")  # CRIU's own words
        if not ok and not re.search(named, tool.stderr()):
            raise Failure(f"{title}: the message does not say what has ended\n{tool.describe()}")
        # What was saved whole is there again, also the one that was killed after that; and one that has moved needs its
        # old worker no more.
        may_live = ok and (way == "stop" or (way == "move" and what == "worker"))
        if not may_live or not lives_on(ranks, victim):
            ranks.expect_gone(victim)
        if in_criu and not ok:
            ranks.check_first_process(tool)
            ranks.leave_out_trapped(tool)
        try:
            ranks.expect_running(title)
        except Failure as failure:
            raise Failure(f"{failure}\nthe tool: {tool.describe()}")
        while len(ranks.living()) < count:
            ranks.add()
        print(f"    {'done  ' if ok else 'failed'} {title}: {tool.stderr().strip().splitlines()[-1:]}", flush=True)
    # A rank that has ended is left out of a move.
    if all(done) and (way, what) != ("move", "rank"):
        raise Failure("no fault made the tool fail")
    ranks.finish()


def change_in_each_step(context, way, execute=False):
    """In each step of a tool one rank ends by itself and another one begins, as in any job; or one executes its program again."""
    lab, options = context
    ranks = Ranks(lab, options, ranks=4)
    pick = random.Random(f"{way} change")
    change = "exec" if execute else "leave"

    def command(image):
        if way == "move":
            return [lab.tool("cr-migrate"), ranks.job.id, "--to", ranks.place]
        return [lab.tool("cr-checkpoint"), *(["--stop"] if way == "stop" else []), ranks.job.id, image]

    def restart(image, leaver):
        # CRIU fails if a process ends while its threads are let go one by one. When another rank has a session, that is over.
        leave = f"{ranks.job.sync}.{change}.{leaver}"
        if os.path.exists(leave):
            os.rename(leave, leave + ".later")
        before = {number: ranks.rank(number) for number in ranks.living()}
        ranks.restart(image)
        gone_on = lambda: any(ranks.rank(number) not in (None, before[number]) for number in before)
        wait_for(lambda: gone_on() or not ranks.carrier.running(), LIMIT, ranks.carrier.describe)
        if os.path.exists(leave + ".later"):
            os.rename(leave + ".later", leave)

    def settle(tool, image, title, leaver=None):
        if tool.wait(LIMIT) != 0:
            raise Failure(f"{title}: the tool failed\n{tool.describe()}\n{ranks.job.describe()}")
        if way == "move":
            ranks.servers.reverse()
        else:
            lab.run(f"verify{ranks.tools}", [lab.tool("cr-inspect"), "--verify", image])
        if way == "stop":
            ranks.carrier.wait(LIMIT)
            restart(image, leaver)

    image, steps = ranks.path("image0"), ranks.path("steps0")
    settle(ranks.tool(command(image), steps), image, "no change")
    ranks.expect_running("no change")
    for number, name, delay in kills(steps):
        what = "a rank executes" if execute else "ranks change"
        title = f"{way}: {what} before step {number} ({name})" + (f", {delay} s later" if delay else "")
        image, steps = ranks.path(f"image{number}-{delay}"), ranks.path(f"steps{number}-{delay}")
        leaver = pick.choice(ranks.living())
        ranks.rest(leaver)
        tool = ranks.tool(command(image), steps, stop_at=number)
        await_step(tool, steps, number)
        if delay:
            open(steps + ".go", "w").close()
            time.sleep(delay)
        if execute:
            ranks.execute(leaver)
        else:
            ranks.leave(leaver)
            ranks.begin_one()
        # Without a delay the new one may have come as far as it can, or not.
        if not delay:
            time.sleep(pick.choice((0, 0.02, 0.1, 0.4)))
        open(steps + ".go", "w").close()
        settle(tool, image, title, leaver)
        ranks.expect_running(title)
        shutil.rmtree(image, ignore_errors=True)
        print(f"    {title}: {tool.stderr().strip().splitlines()[-1:]}", flush=True)
    ranks.finish()


@case
def keep_change(context):
    """Ranks end and begin in each step of a checkpoint of a job that goes on."""
    change_in_each_step(context, "keep")


@case
def stop_change(context):
    """The same of cr-checkpoint --stop: what had begun is in the image."""
    change_in_each_step(context, "stop")


@case
def move_change(context):
    """The same of a move: all that have begun are at the new place."""
    change_in_each_step(context, "move")


@case
def keep_exec(context):
    """A rank executes its program again in each step of a checkpoint of a job that goes on."""
    change_in_each_step(context, "keep", execute=True)


@case
def stop_exec(context):
    """The same of cr-checkpoint --stop: the job is restarted, whichever program the image has of the rank."""
    change_in_each_step(context, "stop", execute=True)


@case
def move_exec(context):
    """The same of a move."""
    change_in_each_step(context, "move", execute=True)


@case
def restart_exec(context):
    """The same when a restarted job gets its sessions."""
    lab, options = context
    ranks = Ranks(lab, options, ranks=3)
    ranks.rest(1)
    image, steps = ranks.path("image"), ranks.path("steps0")
    lab.run("checkpoint", [lab.tool("cr-checkpoint"), "--stop", ranks.job.id, image])
    ranks.job.wait(LIMIT)
    tool = ranks.restart(image, {"CR_TEST_STEPS": steps})
    done = lambda: os.path.exists(steps) and "unlock" in open(steps).read()
    wait_for(lambda: done() or not tool.running(), LIMIT, tool.describe)
    for number, name in [(number, name) for number, name, _ in all_steps(steps) if name.startswith(("give the session", "unlock"))]:
        ranks.end_job(name)
        steps = ranks.path(f"steps{number}")
        tool = ranks.restart(image, {"CR_TEST_STEPS": steps, "CR_TEST_STOP_AT": str(number)})
        await_step(tool, steps, number)
        ranks.execute(1)
        time.sleep(0.1)
        open(steps + ".go", "w").close()
        ranks.expect_running(name)
    ranks.finish()


def lives_on(ranks, number):
    """Whether the rank makes more steps. Otherwise its parent says how it has ended."""
    pid = ranks.rank(number)[1]
    seen = set()

    def steps():
        seen.add(ranks.rank(number))
        return len(seen) > 3

    gone = lambda: f"PID {pid} ended with status" in ranks.job.stderr() + ranks.carrier.stderr()
    wait_for(
        lambda: gone() or steps(), LIMIT, lambda: f"rank {number} neither goes on nor has ended\n{ranks.carrier.describe()}"
    )
    return not gone()


@case
def keep_rank(context):
    """One of eight ranks is killed in each step of a checkpoint of a job that goes on."""
    fail_in_each_step(context, "keep", "rank")


@case
def keep_worker(context):
    """The same with the worker of one rank."""
    fail_in_each_step(context, "keep", "worker")


@case
def stop_rank(context):
    """One of eight ranks is killed in each step of cr-checkpoint --stop."""
    fail_in_each_step(context, "stop", "rank")


@case
def stop_worker(context):
    """The same with the worker of one rank."""
    fail_in_each_step(context, "stop", "worker")


@case
def move_rank(context):
    """One of eight ranks is killed in each step of a move."""
    fail_in_each_step(context, "move", "rank")


@case
def move_worker(context):
    """The same with the old worker of one rank."""
    fail_in_each_step(context, "move", "worker")


# Memory that is worth a round. The software GPU and few processors need some time for it.
FAR = {"far": True, "size": 16, "still": 3000, "ranks": 3}


@case
def move_far_rank(context):
    """One of three ranks is killed in each step of a move over TCP, which copies memory in rounds."""
    fail_in_each_step(context, "move", "rank", **FAR)


@case
def move_new_worker(context):
    """A worker at the new place is killed in each step of a move: all of the job continues at the old one until all have switched."""
    kill_new_worker_in_each_step(context)


@case
def move_far_new_worker(context):
    """The same over TCP."""
    kill_new_worker_in_each_step(context, **FAR)


def kill_new_worker_in_each_step(context, **job):
    lab, options = context
    ranks = Ranks(lab, options, **job)
    count = len(ranks.living())
    pick = random.Random(2)
    command = lambda: [lab.tool("cr-migrate"), ranks.job.id, "--to", ranks.place]
    steps = ranks.path("steps0")
    ranks.tool(command(), steps).expect_success(LIMIT)
    ranks.servers.reverse()
    ranks.expect_running("without a fault")
    failed = recovered = 0
    for number, name in chosen(steps):
        title = f"new worker killed before step {number} ({name})"
        steps = ranks.path(f"steps{number}")
        tool = ranks.tool(command(), steps, stop_at=number)
        await_step(tool, steps, number)
        new = ranks.sessions(ranks.servers[1])
        victim = pick.choice(ranks.living())
        pid = ranks.rank(victim)[1]
        killed = new.get(pid, {}).get("worker_pid")
        if killed:
            os.kill(killed, signal.SIGKILL)
        open(steps + ".go", "w").close()
        ok = tool.wait(LIMIT) == 0
        failed += not ok
        if ok:
            ranks.servers.reverse()
        # What was made ahead is made again in another session; once the job continues it is the rank's own that ends.
        other = lambda: ranks.sessions().get(pid, {}).get("worker_pid", killed) != killed
        if ok and killed:
            wait_for(
                lambda: other() or f"PID {pid} ended with status" in ranks.job.stderr(), LIMIT,
                lambda: f"{title}: rank {victim} (PID {pid}) has no session, and has not ended\n{ranks.job.describe()}",
            )  # fmt: skip
            if other():
                recovered += 1
            elif not name.startswith("unlock"):
                raise Failure(f"{title}: rank {victim} (PID {pid}) has ended\n{ranks.job.describe()}")
            else:
                ranks.expect_gone(victim)
        ranks.expect_running(title)
        while len(ranks.living()) < count:
            ranks.add()
        print(f"    {'done  ' if ok else 'failed'} {title}: {tool.stderr().strip().splitlines()[-1:]}", flush=True)
    if not failed or not recovered:
        raise Failure(f"{failed} faults made the tool fail, of {recovered} it knew a way out")
    ranks.finish()


@case
def restart_worker(context):
    """A worker is killed in each step of a restart: all of the job runs, or none of it, and it can be tried again."""
    kill_in_each_step_of_a_restart(context, "worker")


@case
def restart_rank(context):
    """The same with a rank, which is not let go yet."""
    kill_in_each_step_of_a_restart(context, "rank")


def kill_in_each_step_of_a_restart(context, what):
    lab, options = context
    ranks = Ranks(lab, options)
    pick = random.Random(3)
    image, steps = ranks.restart_from_image()
    killed = 0
    # The processes come back beside all steps: so there is one more moment in each, in which they are there.
    for number, name, delay in ((number, name, delay) for number, name in chosen(steps) for delay in (0, 0.5)[: 1 + (what == "rank")]):
        title = f"{what} killed before step {number} ({name})" + (f", {delay} s later" if delay else "")
        ranks.end_job(title)
        seen = {number: {ranks.rank(number)} for number in ranks.living()}
        steps = ranks.path(f"steps{number}-{delay}")
        tool = ranks.restart(image, {"CR_TEST_STEPS": steps, "CR_TEST_STOP_AT": str(number)})
        await_step(tool, steps, number)
        time.sleep(delay)
        sessions = ranks.sessions()
        victim = pick.choice(ranks.living())
        pid = ranks.rank(victim)[1]
        hit = ranks.host_pid(pid, None) if what == "rank" else sessions.get(pid, {}).get("worker_pid")
        if hit:
            killed += 1
            os.kill(hit, signal.SIGKILL)
        open(steps + ".go", "w").close()

        def all_run():
            # What a restored rank does up to its next CUDA call is not yet that it goes on.
            for number, steps_seen in seen.items():
                steps_seen.add(ranks.rank(number))
            return all(len(steps_seen) > 3 for number, steps_seen in seen.items() if number != victim)

        wait_for(lambda: all_run() or not tool.running(), LIMIT, lambda: f"{title}: {tool.describe()}")
        ran = tool.running()
        if ran:
            if hit:
                ranks.expect_gone(victim)
            ranks.expect_running(title)
            ranks.dead.clear()  # all of them are in the image
        else:
            if tool.wait(LIMIT) != 125:
                raise Failure(f"{title}: wrong exit code\n{tool.describe()}")
            if harness.descendants(tool.pid) or not tool.stderr().strip():
                raise Failure(f"{title}: processes are left, or nothing was said\n{tool.describe()}")
            wait_for(lambda: not ranks.sessions(), LIMIT, lambda: f"{title}: sessions are left")
        print(f"    {'ran   ' if ran else 'failed'} {title}: {tool.stderr().strip().splitlines()[-1:]}", flush=True)
        if tool.running():
            continue
        ranks.restart(image)
        ranks.expect_running(f"{title}, tried again")
    if killed < 5:
        raise Failure(f"only {killed} were there to be killed")
    ranks.carrier.kill(signal.SIGTERM)
    ranks.carrier.wait(LIMIT)
    ranks.restart(image)
    ranks.expect_running("at last")
    ranks.finish()


def kill_tool_in_each_step(context, way, **job):
    """The tool is killed in each step. All processes of the job go on, on one server, and the next tool works at once."""
    lab, options = context
    ranks = Ranks(lab, options, **{"ranks": 3, **job})

    def command(image):
        if way == "move":
            return [lab.tool("cr-migrate"), ranks.job.id, "--to", ranks.place]
        return [lab.tool("cr-checkpoint"), *(["--stop"] if way == "stop" else []), ranks.job.id, image]

    def find_server():
        """All of the job is on one server, which is the first from now on."""
        pids = sorted(ranks.rank(number)[1] for number in ranks.living())
        places = lambda: [sorted(ranks.sessions(server)) for server in ranks.servers]
        whole = lambda: any(now == pids for now in places()) and [] in places()
        wait_for(whole, LIMIT, lambda: f"sessions {places()}, not {pids} on one server\n{ranks.job.describe()}")
        if not places()[0]:
            ranks.servers.reverse()

    def after_stop(image):
        """A stopped job is brought back."""
        if ranks.carrier.wait(LIMIT) != 121:
            raise Failure(f"the stopped job's exit code is wrong\n{ranks.carrier.describe()}")
        lab.run(f"verify{ranks.tools}", [lab.tool("cr-inspect"), "--verify", image])
        for server in ranks.servers:
            wait_for(lambda: not ranks.sessions(server), LIMIT, lambda: "sessions of the stopped job are left")
        ranks.restart(image)

    image, steps = ranks.path("image0"), ranks.path("steps0")
    ranks.tool(command(image), steps).expect_success(LIMIT)
    if way == "stop":
        after_stop(image)
    find_server()
    ranks.expect_running("without a fault")
    counts = {"went on": 0, "done": 0}
    moments = [(*one, False) for one in all_steps(steps)] + [(*one, True) for one in held_dumps(steps)]
    for turn, (number, name, delay, held) in enumerate(moments):
        title = f"{way}: tool killed {'in' if held else 'before'} step {number} ({name})" + (f", {delay} s later" if delay else "")
        unique = f"{number}-{delay}-{held}"
        image, steps = ranks.path(f"image{unique}"), ranks.path(f"steps{unique}")
        tool = ranks.tool(command(image), steps, stop_at=number)
        await_step(tool, steps, number)
        dump = HeldDump(image, ranks.rank(ranks.living()[-1])[1]) if held else None
        if delay or held:
            open(steps + ".go", "w").close()
            if held:
                dump.await_criu(tool)
            time.sleep(delay)
        kill_at_work(tool, everything=turn % 2 == 0)
        if held:
            dump.let_go()
        open(steps + ".go", "w").close()
        try:
            # The next tool does not wait for anything: neither for the one that was killed, nor for the job.
            after = ranks.path(f"after{unique}") if way == "move" else image
            again = ranks.tool([lab.tool("cr-checkpoint"), ranks.job.id, after], steps + ".again")
            died = tool.wait(LIMIT) != 0
            if held:
                dump.close()
            if died and "has died" not in tool.stderr():
                raise Failure(f"it was not killed\n{tool.describe()}")
            stopped = again.wait(LIMIT) != 0 and way == "stop"
            if stopped:
                after_stop(image)
            elif again.wait(LIMIT) != 0:
                raise Failure(f"the next tool failed\n{again.describe()}\nbefore it: {tool.describe()}")
            else:
                no_half_image(after, True)
                lab.run(f"verify{ranks.tools}", [lab.tool("cr-inspect"), "--verify", after])
            find_server()
            ranks.expect_running(title)
        except Failure as failure:
            raise Failure(f"{title}: {failure}\nthe tool: {tool.describe()}")
        counts["done" if stopped or not died else "went on"] += 1
        shutil.rmtree(after, ignore_errors=True)
        said = [line for line in tool.stderr().splitlines() if "has died" not in line]
        print(f"    {'ended  ' if stopped else 'goes on'} {title}: {said[-1:]}", flush=True)
    if not counts["went on"]:
        raise Failure("the tool was never killed")
    ranks.finish()


@case
def keep_tool(context):
    """cr-checkpoint is killed in each step, while the job is to go on."""
    kill_tool_in_each_step(context, "keep")


@case
def stop_tool(context):
    """cr-checkpoint --stop is killed in each step: the job continues, or it has ended and its image is whole."""
    kill_tool_in_each_step(context, "stop")


@case
def move_tool(context):
    """cr-migrate is killed in each step: all processes have moved, or none has."""
    kill_tool_in_each_step(context, "move")


@case
def move_far_tool(context):
    """The same over TCP, where memory is copied in rounds."""
    kill_tool_in_each_step(context, "move", **FAR)


@case
def restart_tool(context):
    """cr-restart is killed in each step: nothing of the job is left, and the next one brings it back at once."""
    lab, options = context
    ranks = Ranks(lab, options, ranks=3)
    image, steps = ranks.restart_from_image()
    for number, name, delay in all_steps(steps):
        title = f"restart: tool killed before step {number} ({name})" + (f", {delay} s later" if delay else "")
        ranks.end_job(title)
        steps = ranks.path(f"steps{number}-{delay}")
        tool = ranks.restart(image, {"CR_TEST_STEPS": steps, "CR_TEST_STOP_AT": str(number)})
        await_step(tool, steps, number)
        if delay:
            open(steps + ".go", "w").close()
            time.sleep(delay)
        os.kill(tool.pid, signal.SIGKILL)
        again = ranks.restart(image)
        try:
            tool.wait(LIMIT)
            ranks.expect_running(title)
        except Failure as failure:
            raise Failure(f"{title}: {failure}\nthe one before: {tool.describe()}")
        print(f"    {title}: {again.stderr().strip().splitlines()[-1:]}", flush=True)
    ranks.finish()


@case
def no_space(context):
    """The image's folder has room for ever more of the image, and at last for all of it. The job goes on each time."""
    lab, options = context
    ranks = Ranks(lab, options, size=256)
    small = ranks.path("small")
    os.makedirs(small)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", small], capture_output=True, text=True)
    if mounted.returncode != 0:
        raise Failure(f"this test mounts a small tmpfs and needs root: {mounted.stderr}")
    image = os.path.join(small, "image")
    said = set()
    try:
        for way in ([], ["--stop"]):
            kib = 4
            while True:
                subprocess.run(["mount", "-o", f"remount,size={kib}k", small], check=True)
                ranks.tools += 1
                command = [lab.tool("cr-checkpoint"), *way, ranks.job.id, image]
                tool = lab.start(harness.Process(lab, f"checkpoint{ranks.tools}", command))
                if tool.wait(LIMIT) == 0:
                    break
                if not re.search("space|full", tool.stderr()):
                    raise Failure(f"{kib} KiB: the message does not say that there is no room\n{tool.describe()}")
                said.add(re.sub(r"[\d.]+", "N", tool.stderr()))
                if set(os.listdir(small)) - {"image.criu-dump.log"}:
                    raise Failure(f"{kib} KiB: left behind: {os.listdir(small)}")
                ranks.expect_running(f"{kib} KiB")
                kib *= 3
                if kib > 1 << 20:
                    raise Failure(f"1 GiB is not enough\n{tool.describe()}")
            lab.run(f"verify{ranks.tools}", [lab.tool("cr-inspect"), "--verify", image])
            if not way:
                ranks.expect_running("saved")
                shutil.rmtree(image)
                continue
            ranks.job.wait(LIMIT)
            ranks.restart(image)
            ranks.expect_running("restarted")
    finally:
        subprocess.run(["umount", "-l", small])
    if len(said) < 2:
        raise Failure(f"it failed in one way only: {said}")
    ranks.finish()


@case
def never_idle(context):
    """One of eight ranks does not become idle: the tool gives up at its deadline and names that one; killed, it is no hindrance."""
    lab, options = context
    ranks = Ranks(lab, options)
    for victim in (5, 2):
        hold = f"{ranks.job.sync}.hold.{victim}"
        open(hold, "w").close()
        wait_for(lambda: os.path.exists(f"{ranks.job.sync}.held.{victim}"), LIMIT, ranks.job.describe)
        pid = ranks.host_pid(ranks.rank(victim)[1])
        image = ranks.path(f"image{victim}")
        for number, command in enumerate(
            (
                [lab.tool("cr-checkpoint"), ranks.job.id, image],
                [lab.tool("cr-checkpoint"), "--stop", ranks.job.id, image],
                [lab.tool("cr-migrate"), ranks.job.id, "--to", ranks.servers[1].unix],
            )
        ):
            # Eight ranks share few cores: one that only waits for its turn may be busy at an early deadline.
            for seconds in (4, 25):
                words = rf"apart \(PID {pid}\) did not become idle in {seconds}(\.0)? s.*the job continues"
                limited = [command[0], "--timeout", str(seconds), *command[1:]]
                tool = lab.start(harness.Process(lab, f"idle{victim}-{number}-{seconds}", limited))
                if tool.wait(LIMIT) != 1 or not re.search(words, tool.stderr()):
                    raise Failure(f"expected {words!r}\n{tool.describe()}")
                named = len(re.findall(r"did not become idle", tool.stderr()))
                if named == 1:
                    break
            if named != 1:
                raise Failure(f"others are named, too\n{tool.describe()}")
            no_half_image(image, False)
            others = [number for number in ranks.living() if number != victim]
            before = {number: ranks.rank(number)[0] for number in others}
            wait_for(
                lambda: all(ranks.rank(number)[0] > before[number] + 2 for number in others), LIMIT,
                lambda: f"the others stand still\n{ranks.job.describe()}",
            )  # fmt: skip
        if victim == 5:
            os.unlink(hold)  # its work ends
        else:
            # Killed while the tool waits for it, it is left out.
            command = [lab.tool("cr-checkpoint"), "--timeout", str(LIMIT), ranks.job.id, image]
            tool = lab.start(harness.Process(lab, f"waits{victim}", command))
            time.sleep(1)
            if not tool.running():
                raise Failure(f"the tool did not wait\n{tool.describe()}")
            os.kill(pid, signal.SIGKILL)
            tool.expect_success(LIMIT)
            no_half_image(image, True)
            ranks.expect_gone(victim)
        ranks.expect_running(f"after rank {victim} was not idle")
    ranks.finish()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver")
    harness.run_cases_in_labs(parser, CASES, lambda lab, options: (lab, options))


if __name__ == "__main__":
    main()
