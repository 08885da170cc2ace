# SPDX-License-Identifier: Apache-2.0
"""Test targets for the matrix: one for each program and group of modes, so that they balance over the machine's cores."""

GROUPS = {
    "run": "native,ring,grpc",
    "restart": "restart,live",
    "move": "migrate",
    "late": "late_ring,late_grpc,late_restart,late_migrate",
}

def matrix_test(name, app, modes, size = "medium", program = None, extra_tags = []):
    """Runs one program in several modes; see matrix.py. `program`: its target, unless that is //tests/apps:APP."""
    native.sh_test(
        name = name,
        size = size,
        srcs = ["matrix_test.sh"],
        args = [
            app,
            modes,
        ],
        data = [
            "harness.py",
            "matrix.py",
            ":product",
            program or "//tests/apps:" + app,
        ],
        # Real processes, shared memory, and snapshots by CRIU, which needs root.
        tags = [
            "local",
            "no-sandbox",
        ] + extra_tags,
    )

def matrix_tests(app, extra = {}, program = None, extra_tags = []):
    """All groups for one program; `extra` maps names of further groups to modes; the rest as for matrix_test."""
    groups = dict(GROUPS)
    groups.update(extra)
    for group, modes in groups.items():
        matrix_test(name = "{}_{}_test".format(app, group), app = app, modes = modes, program = program, extra_tags = extra_tags)
