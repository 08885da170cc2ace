# SPDX-License-Identifier: Apache-2.0
"""Stand-in for rules_java where the distribution's Bazel has none: re-exports the native rules."""

java_binary = native.java_binary
java_import = native.java_import
java_library = native.java_library
java_runtime = native.java_runtime
java_toolchain = native.java_toolchain
