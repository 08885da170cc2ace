#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Extracts proto/api/signatures.textproto from the CUDA toolkit's headers.

Usage: extract.py [--toolkit /usr/local/cuda] [--exports FILE] [--previous OLD.textproto] [--output FILE]

Read are the function-pointer typedefs (one line each: types, names, versions, per-thread suffix), the vendor's call
numbers, the plain type definitions, and the export list of the toolkit's stub library. --exports names a file with
the export list of a real driver; names in it that no header explains become `undocumented` entries. Without it they
are kept from --previous. Names, types and numbers only; no comment text.
"""

import argparse
import collections
import re
import struct
import sys

TYPEDEF = re.compile(r"^\s*typedef\s+CUresult\s*\(CUDAAPI \*PFN_(\w+?)_v(\d+)(?:_(ptsz|ptds))?\)\((.*)\);")
NUMBER = re.compile(r"_CBID_(\w+)\s*=\s*(0x[0-9a-fA-F]+|\d+)\s*,")
BUILTIN = {
    "int": "INTEGER", "unsigned int": "INTEGER", "unsigned": "INTEGER", "unsigned char": "INTEGER",
    "unsigned short": "INTEGER", "unsigned long long": "INTEGER", "size_t": "INTEGER", "float": "FLOAT",
    "double": "FLOAT", "char": "INTEGER", "cuuint32_t": "INTEGER", "cuuint64_t": "INTEGER", "long long": "INTEGER",
}


def read(path):
    with open(path, encoding="utf-8", errors="replace") as f:
        return f.read()


def strip_comments(text):
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    return re.sub(r"//[^\n]*", " ", text)


def dynamic_symbols(path):
    """Names of the symbols that a 64-bit ELF shared object defines and exports."""
    with open(path, "rb") as f:
        data = f.read()
    if data[:5] != b"\x7fELF\x02":
        raise SystemExit(f"{path}: not a 64-bit ELF file")
    shoff, = struct.unpack_from("<Q", data, 0x28)
    shentsize, shnum = struct.unpack_from("<HH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, shoff + i * shentsize) for i in range(shnum)]
    names = set()
    for section in sections:
        if section[1] != 11:  # SHT_DYNSYM
            continue
        strings = sections[section[6]]
        for at in range(section[4], section[4] + section[5], 24):
            name, info, _, shndx, _, _ = struct.unpack_from("<IBBHQQ", data, at)
            if shndx == 0 or not name or info >> 4 == 0:
                continue
            start = strings[4] + name
            names.add(data[start:data.index(b"\0", start)].decode())
    return names


def split_symbol(symbol):
    """(base name, ABI version, per-thread suffix or '') of an exported symbol."""
    match = re.fullmatch(r"(\w+?)(?:_v(\d+))?(?:_(ptsz|ptds))?", symbol)
    return match.group(1), int(match.group(2) or 1), match.group(3) or ""


def normalise_type(text):
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"\s*\*\s*", "*", text)
    text = re.sub(r"\*+", lambda m: " " + m.group(0), text, count=1)
    return text.replace("unsigned int", "unsigned int").strip()


def parse_params(text):
    params = []
    if text.strip() in ("", "void"):
        return params
    for part in text.split(","):
        match = re.fullmatch(r"\s*(.*?[\s*])(\w+)\s*((?:\[\w*\])*)\s*", part)
        if not match:
            raise SystemExit(f"cannot read parameter '{part}'")
        stars = "*" * match.group(3).count("[")
        params.append((normalise_type(match.group(1) + stars), match.group(2)))
    return params


def base_type(text):
    text = re.sub(r"\bconst\b|\*", " ", text)
    return re.sub(r"\s+", " ", text).strip()


def classify_types(header):
    """name -> (class, representation) for every typedef of the header."""
    header = re.sub(r"(?m)^\s*#.*?$", " ", header)
    header = re.sub(r"_CONCAT_OUTER\((\w+),\s*\w+\)", r"\g<1>1", header)  # the header's way to append a version
    types = {name: (kind, name) for name, kind in BUILTIN.items()}
    aliases = {}
    for match in re.finditer(r"typedef\s+struct\s+\w+\s*\*\s*(\w+)\s*;", header):
        types[match.group(1)] = ("HANDLE", "void *")
    for match in re.finditer(r"typedef\s+(?:void|size_t)\s*\(\s*(?:CUDA_CB)?\s*\*\s*(\w+)\s*\)", header):
        types[match.group(1)] = ("CALLBACK", "void *")
    # Bodies: find the closing brace that belongs to each opening one.
    for match in re.finditer(r"typedef\s+(struct|union|enum)\s+\w*\s*\{", header):
        depth, at = 1, match.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(header[at], 0)
            at += 1
        name = re.match(r"\s*(\w+)\s*;", header[at:])
        if name:
            types[name.group(1)] = ("ENUM", "int") if match.group(1) == "enum" else ("STRUCT", "")
    for match in re.finditer(r"typedef\s+((?:const\s+|unsigned\s+|long\s+)*\w+)\s+(\w+)\s*;", header):
        aliases.setdefault(match.group(2), match.group(1))

    def resolve(name):
        for _ in range(8):
            if name in types:
                return types[name]
            if name not in aliases:
                return None
            name = re.sub(r"\s+", " ", aliases[name])
        return None

    return resolve


def quote(text):
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def previous_undocumented(path):
    out = []
    for match in re.finditer(r'undocumented \{ symbol: "(\w+)"', read(path)):
        out.append(match.group(1))
    return out


def extract(toolkit, exports_file=None, previous=None):
    include = toolkit + "/include/"
    header = strip_comments(read(include + "cuda.h"))
    version = int(re.search(r"#define\s+CUDA_VERSION\s+(\d+)", header).group(1))
    # Macros that lead to another version; those that only append the per-thread suffix are inactive by default.
    macros = {name for name, target in re.findall(r"(?m)^\s*#\s*define\s+(cu\w+)\s+(?:__CUDA_API_PT\w+\()?(cu\w+)", header)
              if re.sub(r"_(ptsz|ptds)$", "", target) != name}
    numbers = {name: int(value, 0) for name, value in NUMBER.findall(read(include + "cupti_driver_cbid.h"))}
    exports = {s for s in dynamic_symbols(toolkit + "/lib64/stubs/libcuda.so") if s.startswith("cu")}

    typedefs = collections.defaultdict(list)  # (name, suffix) -> [(version, params)]
    for source in ("cudaTypedefs.h", "cudaProfilerTypedefs.h"):
        for line in strip_comments(read(include + source)).splitlines():
            match = TYPEDEF.match(line)
            if match:
                typedefs[match.group(1), match.group(3) or ""].append((int(match.group(2)), parse_params(match.group(4))))
    symbols = collections.defaultdict(list)  # (name, suffix) -> [abi]
    for symbol in exports:
        name, abi, suffix = split_symbol(symbol)
        symbols[name, suffix].append(abi)

    entries = {}     # (name, abi) -> dict
    unexplained = set()
    for (name, suffix), abis in symbols.items():
        declared = sorted(typedefs.get((name, suffix), []), key=lambda d: d[0])
        if len(declared) != len(abis):
            unexplained.update(join(name, abi, suffix) for abi in abis)
            continue
        for abi, (since, params) in zip(sorted(abis), declared):
            entry = entries.setdefault((name, abi), {})
            if suffix:
                entry["per_thread"] = (suffix, since, numbers[join(name, abi, suffix)])
                entry.setdefault("params", params)
            else:
                entry["since"], entry["params"] = since, params
                entry["id"] = numbers[join(name, abi, "")]

    lines = ["# SPDX-License-Identifier: Apache-2.0",
             "# Extracted by proto/gen/extract.py from the CUDA toolkit's headers. Do not edit: run",
             "#   bazel run //proto/gen:extract",
             f"cuda_version: {version}", ""]
    used = {}
    for (name, abi), entry in sorted(entries.items(), key=lambda e: e[1].get("id", 0)):
        symbol = join(name, abi, "")
        if "id" not in entry:
            raise SystemExit(f"{symbol}: has a per-thread variant only")
        lines.append("signature {")
        lines.append(f"  name: {quote(name)} symbol: {quote(symbol)} abi: {abi} since: {entry['since']} id: {entry['id']}")
        if symbol in macros:
            lines.append("  macro: true")
        if "per_thread" in entry:
            suffix, since, number = entry["per_thread"]
            lines.append(f"  per_thread {{ suffix: {quote(suffix)} since: {since} id: {number} }}")
        for kind, param in entry["params"]:
            lines.append(f"  param {{ type: {quote(kind)} name: {quote(param)} }}")
            used[base_type(kind)] = True
        lines.append("}")
    lines.append("")
    resolve = classify_types(header + strip_comments(read(include + "cudaProfiler.h")))
    for name in sorted(used):
        if name == "void":
            continue
        found = resolve(name)
        if not found:
            raise SystemExit(f"type {name}: no definition found in cuda.h")
        lines.append(f"type {{ name: {quote(name)} class: {found[0]} repr: {quote(found[1])} }}")
    lines.append("")

    others = {s for s in unexplained}
    if exports_file:
        others |= {s for s in read(exports_file).split() if s not in exports}
    elif previous:
        others |= {s for s in previous_undocumented(previous) if s not in exports}
    versions = collections.defaultdict(list)
    for source in ("cudaGLTypedefs.h", "cudaEGLTypedefs.h", "cudaVDPAUTypedefs.h"):
        for match in re.finditer(r"PFN_(\w+?)_v(\d+)(?:_(ptsz|ptds))?\)", strip_comments(read(include + source))):
            versions[match.group(1), match.group(3) or ""].append(int(match.group(2)))
    groups = collections.defaultdict(list)
    for symbol in others:
        name, abi, suffix = split_symbol(symbol)
        groups[name, suffix].append(abi)
    rows = []
    for (name, suffix), abis in groups.items():
        known = sorted(set(versions.get((name, suffix), [])))
        for index, abi in enumerate(sorted(abis)):
            row = f"undocumented {{ symbol: {quote(join(name, abi, suffix))}"
            if len(known) == len(abis):
                row += f" name: {quote(name)} since: {known[index]}"
            rows.append(row + " }")
    lines += sorted(rows)
    return "\n".join(lines) + "\n"


def join(name, abi, suffix):
    return name + (f"_v{abi}" if abi > 1 else "") + (f"_{suffix}" if suffix else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toolkit", default="/usr/local/cuda")
    parser.add_argument("--exports")
    parser.add_argument("--previous")
    parser.add_argument("--output")
    args = parser.parse_args()
    text = extract(args.toolkit, args.exports, args.previous)
    if args.output:
        with open(args.output, "w", encoding="utf-8") as f:
            f.write(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
