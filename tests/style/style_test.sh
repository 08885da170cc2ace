#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Bazel's runfiles are links: the real place of this script is in the workspace.
folder=$(dirname "$(readlink -f "$0")")
case $1 in
  --self-test) exec /usr/bin/python3 "$folder/style_test_test.py" ;;
  --one) exec /usr/bin/python3 "$folder/one_test.py" ;;
  --one-self-test) exec /usr/bin/python3 "$folder/one_test_test.py" ;;
  --sizes) exec /usr/bin/python3 "$folder/sizes_test.py" ;;
  --sizes-self-test) exec /usr/bin/python3 "$folder/sizes_test_test.py" ;;
  --annotations) exec /usr/bin/python3 "$folder/annotations_test.py" ;;
  *) exec /usr/bin/python3 "$folder/style_test.py" "$@" ;;
esac
