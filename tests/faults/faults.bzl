# SPDX-License-Identifier: Apache-2.0
"""Test targets for the fault cases."""

def fault_test(name, cases, size = "medium", script = "faults.py", alone = False, extra_tags = []):
    """Runs some cases of a script (separated by commas); `alone`: while no other test runs; `extra_tags`: Bazel's."""
    native.sh_test(
        name = name,
        size = size,
        srcs = ["faults_test.sh"],
        args = [script, cases],
        data = [
            script,
            ":programs",
            "//tests/apps:all_apps",
            "//tests/matrix:harness.py",
            "//tests/matrix:product",
        ],
        # Real processes, mounts, and snapshots by CRIU, which needs root.
        tags = [
            "local",
            "no-sandbox",
        ] + (["exclusive"] if alone else []) + extra_tags,
    )
