# SPDX-License-Identifier: Apache-2.0
"""Test targets for the fault cases."""

def fault_test(name, cases, size = "medium"):
    """Runs some cases of faults.py (separated by commas)."""
    native.sh_test(
        name = name,
        size = size,
        srcs = ["faults_test.sh"],
        args = [cases],
        data = [
            "faults.py",
            ":programs",
            "//tests/apps:all_apps",
            "//tests/matrix:harness.py",
            "//tests/matrix:product",
        ],
        # Real processes, mounts, and snapshots by CRIU, which needs root.
        tags = [
            "local",
            "no-sandbox",
        ],
    )
