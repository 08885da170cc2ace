"""Test targets for the matrix: one for each program and group of modes, so that they balance over the machine's cores."""

GROUPS = {
    "run": "native,ring,grpc",
    "restart": "restart,live",
    "move": "migrate",
}

def matrix_test(name, app, modes, size = "medium"):
    """Runs one program in several modes; see matrix.py."""
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
            "//tests/apps:" + app,
        ],
        # Real processes, shared memory, and snapshots by CRIU, which needs root.
        tags = [
            "local",
            "no-sandbox",
        ],
    )

def matrix_tests(app, extra = {}):
    """All groups for one program; `extra` maps names of further groups to modes."""
    groups = dict(GROUPS)
    groups.update(extra)
    for group, modes in groups.items():
        matrix_test(name = "{}_{}_test".format(app, group), app = app, modes = modes)
