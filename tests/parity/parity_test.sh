#!/bin/sh
exec /usr/bin/python3 tests/parity/parity_test.py "$@"
