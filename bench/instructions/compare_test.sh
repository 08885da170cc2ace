#!/bin/sh
exec /usr/bin/python3 "$(dirname "$0")/compare_test.py"
