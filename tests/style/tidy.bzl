# SPDX-License-Identifier: Apache-2.0
"""Checks by clang over hand-written sources: one action for each, so that Bazel runs it again only after a change.

`tidy`: clang-tidy, with the checks in .clang-tidy at the root of the workspace. `threads`: clang's analysis of locks, which is
a compilation without code.
"""

CLANG_TIDY = "clang-tidy-14"
CLANG = "clang++-14"
THREAD_FLAGS = "-fsyntax-only -Wthread-safety -Wthread-safety-beta -Werror=thread-safety -Werror=thread-safety-beta"

# Whoever does not include it has nothing to check: tests/layers allows no other mutexes.
MUTEX = "proto/threads/mutex.h"

def _flags(context, defines):
    flags = ["-std=c++17"]
    for define in defines:
        flags.append("-D" + define)
    for folder in context.quote_includes.to_list():
        flags += ["-iquote", folder]
    for folder in context.includes.to_list() + context.system_includes.to_list():
        flags += ["-isystem", folder]
    return flags

def _reports(target, ctx, kind, mnemonic, verb, command, inputs = [], needs = ""):
    """The reports of what a source must not have, one for each of the target's and of what it depends on.

    `command` is for the shell: {source} is the source, "$@" the compiler's flags, {out} what is said of it. `needs`: only of
    libraries and programs that this header is among the headers of.
    """
    reports = []
    rule = ctx.rule
    transitive = [getattr(dep[OutputGroupInfo], kind) for dep in getattr(rule.attr, "deps", []) if OutputGroupInfo in dep and hasattr(dep[OutputGroupInfo], kind)]
    if rule.kind in ("cc_library", "cc_binary", "cc_test") and target.label.workspace_name == "":
        # Of a program Bazel has no context for compilation; it is that of what the program uses.
        infos = [target[CcInfo]] if CcInfo in target else []
        infos += [dep[CcInfo] for dep in rule.attr.deps if CcInfo in dep]
        context = cc_common.merge_cc_infos(cc_infos = infos).compilation_context
        defines = context.defines.to_list() + context.local_defines.to_list() + rule.attr.local_defines + rule.attr.defines
        sources = [f for src in rule.attr.srcs for f in src.files.to_list()]
        if needs and needs not in [f.path for f in context.headers.to_list()]:
            sources = []
        for source in sources:
            if not source.is_source or source.extension != "cc":
                continue
            report = ctx.actions.declare_file("{}.{}.{}".format(source.path.replace("/", "_"), target.label.name, kind))
            ctx.actions.run_shell(
                # Headers of a library's own may be among its sources.
                inputs = depset(sources + inputs, transitive = [context.headers]),
                outputs = [report],
                mnemonic = mnemonic,
                progress_message = verb + " " + source.path,
                command = command.format(source = source.path, out = report.path),
                arguments = _flags(context, defines) + ["-iquote", ".", "-iquote", ctx.bin_dir.path],
            )
            reports.append(report)
    return depset(reports, transitive = transitive)

def _tidy_impl(target, ctx):
    # It prints how many warnings it has suppressed, also when there are none to show.
    command = CLANG_TIDY + " --quiet --config-file=" + ctx.file._config.path + \
              " {source} -- \"$@\" >{out} 2>{out}.notes || {{ cat {out} {out}.notes >&2; exit 1; }}"
    return [OutputGroupInfo(tidy = _reports(target, ctx, "tidy", "ClangTidy", "Checking", command, [ctx.file._config]))]

def _threads_impl(target, ctx):
    command = CLANG + " " + THREAD_FLAGS + " \"$@\" {source} 2>{out} || {{ cat {out} >&2; exit 1; }}"
    return [OutputGroupInfo(threads = _reports(target, ctx, "threads", "ClangThreads", "Looking for missing locks in", command, needs = MUTEX))]

# Of a target and what it depends on.
tidy = aspect(
    implementation = _tidy_impl,
    attr_aspects = ["deps"],
    attrs = {"_config": attr.label(default = "//:.clang-tidy", allow_single_file = True)},
)

threads = aspect(implementation = _threads_impl, attr_aspects = ["deps"])

def _test(ctx, reports):
    script = ctx.actions.declare_file(ctx.label.name + ".sh")
    count = len(reports.to_list())
    ctx.actions.write(script, "#!/bin/sh\necho 'ok   {} sources'\n[ {} -ge {} ]\n".format(count, count, ctx.attr.least), is_executable = True)
    return [DefaultInfo(executable = script, runfiles = ctx.runfiles(transitive_files = reports))]

def _tidy_test_impl(ctx):
    return _test(ctx, depset(transitive = [dep[OutputGroupInfo].tidy for dep in ctx.attr.targets]))

def _threads_test_impl(ctx):
    return _test(ctx, depset(transitive = [dep[OutputGroupInfo].threads for dep in ctx.attr.targets]))

# Passes once clang-tidy has nothing to say about the targets' sources and those of what they depend on; what it says is
# an error of the build. `least`: so many sources there must be.
tidy_test = rule(
    implementation = _tidy_test_impl,
    test = True,
    attrs = {
        "least": attr.int(mandatory = True),
        "targets": attr.label_list(aspects = [tidy]),
    },
)

# The same of locks that are missing.
threads_test = rule(
    implementation = _threads_test_impl,
    test = True,
    attrs = {
        "least": attr.int(mandatory = True),
        "targets": attr.label_list(aspects = [threads]),
    },
)
