#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Extracts the signatures again from the installed CUDA toolkit and compares them with the checked-in table.

Another version of the toolkit than the table's is no failure: the test says so and ends. A missing toolkit is one.
"""

import difflib
import importlib.util
import os
import re
import sys

TOOLKIT = os.environ.get("CUDA_HOME", "/usr/local/cuda")


def main():
    extract_path, table_path = sys.argv[1:3]
    spec = importlib.util.spec_from_file_location("extract", extract_path)
    extract = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extract)
    if not os.path.exists(TOOLKIT + "/include/cudaTypedefs.h"):
        sys.exit(f"no CUDA toolkit in {TOOLKIT}: install it or set CUDA_HOME")
    with open(table_path, encoding="utf-8") as f:
        table = f.read()
    with open(TOOLKIT + "/include/cuda.h", encoding="utf-8", errors="replace") as f:
        installed = int(re.search(r"#define\s+CUDA_VERSION\s+(\d+)", f.read()).group(1))
    described = int(re.search(r"cuda_version: (\d+)", table).group(1))
    if installed != described:
        print(f"SKIPPED: the table describes CUDA {described}, the installed toolkit is {installed}")
        return 0
    again = extract.extract(TOOLKIT, previous=table_path)
    if again == table:
        count = table.count("\nsignature {")
        print(f"{count} entry points as in the headers of CUDA {installed}")
        return 0 if count > 500 else 1
    sys.stdout.writelines(difflib.unified_diff(table.splitlines(True), again.splitlines(True), table_path, "extracted"))
    print("the table differs from the headers; run proto/gen/extract.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
