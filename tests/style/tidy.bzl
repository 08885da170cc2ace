# SPDX-License-Identifier: Apache-2.0
"""clang-tidy over hand-written sources, with the checks in .clang-tidy at the root of the workspace: one action for each
source, so that Bazel runs it again only after a change.
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
    """The reports on the target's sources and on those of what it depends on."""

    # It prints how many warnings it has suppressed, also when there are none to show.
    command = CLANG_TIDY + " --quiet --config-file=" + ctx.file._config.path + \
              " {source} -- \"$@\" >{out} 2>{out}.notes || {{ cat {out} {out}.notes >&2; exit 1; }}"
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
                command = command.format(source = source.path, out = report.path),
                arguments = _flags(context, defines) + ["-iquote", ".", "-iquote", ctx.bin_dir.path],
            )
            reports.append(report)
    return [OutputGroupInfo(tidy = depset(reports, transitive = transitive))]

# Of a target and what it depends on.
tidy = aspect(
    implementation = _tidy_impl,
    attr_aspects = ["deps"],
    attrs = {"_config": attr.label(default = "//:.clang-tidy", allow_single_file = True)},
)

def _tidy_test_impl(ctx):
    script = ctx.actions.declare_file(ctx.label.name + ".sh")
    reports = depset(transitive = [dep[OutputGroupInfo].tidy for dep in ctx.attr.targets])
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
