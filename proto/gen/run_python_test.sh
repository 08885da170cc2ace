#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs a Python test with the distribution's interpreter (the one that has python3-protobuf).
exec /usr/bin/python3 "$@"
