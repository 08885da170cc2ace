#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Generates code, message definitions and reports from the tables in proto/api.

Usage: generate.py --api proto/api --emit EMITTER [--emit ...] --out DIR [--lock FILE] [--suffix .gen]
                   [--arguments FILE]

Emitters: proto, codec, ids, names, traits, named, driver, entry_points, infos, bodies, client, server, worker, interop,
coverage, lock, conformance, cases. Each writes its files into DIR. Nothing is written if the tables do not pass the lint.
"""

import argparse
import importlib
import os
import sys
import types

HERE = os.path.dirname(os.path.abspath(__file__))
# The folder is called gen; Python sees it as the package proto_gen wherever it stands.
package = types.ModuleType("proto_gen")
package.__path__ = [HERE]
sys.modules["proto_gen"] = package
sys.dont_write_bytecode = True

from proto_gen import lint, model as model_module  # noqa: E402


def write(directory, files):
    for name, text in files.items():
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", required=True)
    parser.add_argument("--emit", action="append", default=[])
    parser.add_argument("--out", required=True)
    parser.add_argument("--lock", help="the present field-number lock")
    parser.add_argument("--arguments", help="for cases: what the calls are given")
    parser.add_argument("--suffix", default="", help="appended to the names of the files")
    args = parser.parse_args()
    model = model_module.load(args.api)
    problems = lint.check(model)
    for problem in problems:
        print(f"lint: {problem}", file=sys.stderr)
    if problems:
        return 1
    for name in args.emit:
        emitter = importlib.import_module("proto_gen.emit_" + name)
        write(args.out, {n + args.suffix: t for n, t in emitter.emit(model, args).items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
