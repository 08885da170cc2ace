# SPDX-License-Identifier: Apache-2.0
"""clang-tidy over hand-written sources: one action for each, so that Bazel runs it again only after a change.

The checks are in .clang-tidy at the root of the workspace.
"""

CLANG_TIDY = "clang-tidy-14"

def _flags(context, defines):
    flags = ["-std=c++17"]
    for define in defines:
        flags.append("-D" + define)
    for folder in context.quote_includes.to_list():
        flags += ["-iquote", folder]
    for folder in context.includes.to_list() + context.system_includes.to_list():
        flags += ["-isystem", folder]
    return flags

def _tidy_impl(target, ctx):
    reports = []
    rule = ctx.rule
    transitive = [dep[OutputGroupInfo].tidy for dep in getattr(rule.attr, "deps", []) if OutputGroupInfo in dep and hasattr(dep[OutputGroupInfo], "tidy")]
    if rule.kind in ("cc_library", "cc_binary", "cc_test") and target.label.workspace_name == "":
        # Of a program Bazel has no context for compilation; it is that of what the program uses.
        infos = [target[CcInfo]] if CcInfo in target else []
        infos += [dep[CcInfo] for dep in rule.attr.deps if CcInfo in dep]
        context = cc_common.merge_cc_infos(cc_infos = infos).compilation_context
        defines = context.defines.to_list() + context.local_defines.to_list() + rule.attr.local_defines + rule.attr.defines
        sources = [f for src in rule.attr.srcs for f in src.files.to_list()]
        for source in sources:
            if not source.is_source or source.extension != "cc":
                continue
            report = ctx.actions.declare_file("{}.{}.tidy".format(source.path.replace("/", "_"), target.label.name))
            ctx.actions.run_shell(
                # Headers of a library's own may be among its sources.
                inputs = depset(sources + [ctx.file._config], transitive = [context.headers]),
                outputs = [report],
                mnemonic = "ClangTidy",
                progress_message = "Checking " + source.path,
                # It prints how many warnings it has suppressed, also when there are none to show.
                command = "{tidy} --quiet --config-file={config} {source} -- \"$@\" >{out} 2>{out}.notes || {{ cat {out} {out}.notes >&2; exit 1; }}".format(
                    tidy = CLANG_TIDY,
                    config = ctx.file._config.path,
                    source = source.path,
                    out = report.path,
                ),
                arguments = _flags(context, defines) + ["-iquote", ".", "-iquote", ctx.bin_dir.path],
            )
            reports.append(report)
    all = depset(reports, transitive = transitive)
    return [OutputGroupInfo(tidy = all)]

# Of a target and what it depends on.
tidy = aspect(
    implementation = _tidy_impl,
    attr_aspects = ["deps"],
    attrs = {"_config": attr.label(default = "//:.clang-tidy", allow_single_file = True)},
)

def _tidy_test_impl(ctx):
    reports = depset(transitive = [dep[OutputGroupInfo].tidy for dep in ctx.attr.targets])
    script = ctx.actions.declare_file(ctx.label.name + ".sh")
    count = len(reports.to_list())
    ctx.actions.write(script, "#!/bin/sh\necho 'ok   {} sources'\n[ {} -ge {} ]\n".format(count, count, ctx.attr.least), is_executable = True)
    return [DefaultInfo(executable = script, runfiles = ctx.runfiles(transitive_files = reports))]

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
