#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A program whose processes, connections and signals come and go all the time. Prints the same line in each round.

Usage: churn.py KIND ROUNDS      ends after so many rounds
       churn.py KIND FILE        ends when the file is there
"""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

KINDS = {}


def kind(function):
    KINDS[function.__name__] = function
    return function


@kind
def shells(number):
    """Programs that are just starting, pipes, exit codes."""
    command = f"echo {number} | cat; seq 50 | sort -r | head -1; exit {number % 7}"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True)
    return done.stdout.split(), done.stderr, done.returncode


@kind
def forks(number):
    pids = []
    for code in range(6):
        pid = os.fork()
        if pid == 0:
            time.sleep(0.002 * (code % 3))
            os._exit(code + number % 9)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


@kind
def orphans(number):
    """Processes that live longer than those that have started them."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        if os.fork() == 0:
            time.sleep(0.01 * (number % 4))
            os.write(theirs, b"%d" % number)
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(theirs)
    got = receive(lambda: os.read(ours, 100))
    os.close(ours)
    return got


@kind
def pairs(number):
    """A connection with a child, for each round."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        theirs.sendall(receive(lambda: theirs.recv(4096))[::-1])
        os._exit(number % 11)
    theirs.close()
    ours.sendall(b"round %d" % number)
    ours.shutdown(socket.SHUT_WR)
    got = receive(lambda: ours.recv(4096))
    ours.close()
    return got, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@kind
def connections(number, server=[]):
    """TCP connections of the program with itself."""
    if not server:
        server.append(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=serve, args=(server[0],), daemon=True).start()
    data = bytes([number % 251]) * (50000 + number)
    with socket.create_connection(server[0].getsockname()) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return receive(lambda: connection.recv(4096)) == hashlib.md5(data).hexdigest().encode()


@kind
def signals(number, got=[]):
    """It would notice a SIGCONT."""
    for name in (signal.SIGUSR1, signal.SIGCONT):
        signal.signal(name, lambda which, frame: got.append(which))
    del got[:]
    pid = os.fork()
    if pid == 0:
        os.kill(os.getppid(), signal.SIGUSR1)
        time.sleep(0.005)
        os._exit(0)
    os.waitpid(pid, 0)
    return got


def serve(server):
    while True:
        connection, _ = server.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def answer(connection):
    with connection:
        connection.sendall(hashlib.md5(receive(lambda: connection.recv(65536))).hexdigest().encode())


def receive(read):
    whole = b""
    while True:
        part = read()
        if not part:
            return whole
        whole += part


def main():
    ends = sys.argv[2]
    number = 0
    while number < int(ends) if ends.isdigit() else not os.path.exists(ends):
        print(number, KINDS[sys.argv[1]](number), flush=True)
        number += 1


if __name__ == "__main__":
    main()
