#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The options in the pages for users and operators are those that the programs have, and all of these are in a page.
exec python3 tests/product/options_check.py tests/matrix/product README.md docs/*.md
