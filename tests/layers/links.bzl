# SPDX-License-Identifier: Apache-2.0
"""Links each library alone with what it depends on: one action for each, so that Bazel does it again only after a change.

A library with functions that only its users define depends on them, although no rule says so. A program that has both in it
does not show that.
"""

CXX = "g++"

def _links_impl(target, ctx):
    transitive = [dep[OutputGroupInfo].links for dep in getattr(ctx.rule.attr, "deps", []) if OutputGroupInfo in dep and hasattr(dep[OutputGroupInfo], "links")]
    if ctx.rule.kind != "cc_library" or target.label.workspace_name != "":
        return [OutputGroupInfo(links = depset(transitive = transitive))]
    inputs, own, others, flags = [], [], [], []
    for linked in target[CcInfo].linking_context.linker_inputs.to_list():
        for library in linked.libraries:
            file = library.pic_static_library or library.static_library or library.dynamic_library
            inputs.append(file)
            (own if linked.owner == target.label else others).append(file.path)
        flags += linked.user_link_flags
        inputs += linked.additional_inputs
    if not own:
        return [OutputGroupInfo(links = depset(transitive = transitive))]
    report = ctx.actions.declare_file(target.label.name + ".links")
    ctx.actions.run_shell(
        inputs = inputs,
        outputs = [report],
        mnemonic = "LinkAlone",
        use_default_shell_env = True,
        progress_message = "Linking {} alone".format(target.label),
        command = ("echo 'int main() {{}}' | " + CXX + " -x c++ - -x none -o {out}.program \"$@\" 2>{out} && rm {out}.program || {{ cat {out} >&2; exit 1; }}").format(out = report.path),
        arguments = ["-Wl,--whole-archive"] + own + ["-Wl,--no-whole-archive", "-Wl,--start-group"] + others + ["-Wl,--end-group"] + flags,
    )
    return [OutputGroupInfo(links = depset([report], transitive = transitive))]

# Of a target and what it depends on.
links = aspect(implementation = _links_impl, attr_aspects = ["deps"])

def _links_test_impl(ctx):
    reports = depset(transitive = [dep[OutputGroupInfo].links for dep in ctx.attr.targets])
    count = len(reports.to_list())
    script = ctx.actions.declare_file(ctx.label.name + ".sh")
    ctx.actions.write(script, "#!/bin/sh\necho 'ok   {} libraries'\n[ {} -ge {} ]\n".format(count, count, ctx.attr.least), is_executable = True)
    return [DefaultInfo(executable = script, runfiles = ctx.runfiles(transitive_files = reports))]

# Passes once each library of the targets links alone; an undefined symbol is an error of the build. `least`: so many libraries
# there must be.
links_test = rule(
    implementation = _links_test_impl,
    test = True,
    attrs = {
        "least": attr.int(mandatory = True),
        "targets": attr.label_list(aspects = [links]),
    },
)
