#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
exec /usr/bin/python3 tests/parity/parity_test.py "$@"
