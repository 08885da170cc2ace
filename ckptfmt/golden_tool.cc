// SPDX-License-Identifier: Apache-2.0
// Writes the golden image of the present format version: golden_tool DIR. Run once for each version, by hand; the tests
// read what it wrote.

#include <cstdio>

#include "ckptfmt/testing.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: golden_tool DIR\n");
    return 2;
  }
  const absl::Status status = cuda_remote::ckptfmt::WriteSample(argv[1], /*small=*/true);
  if (!status.ok()) fprintf(stderr, "golden_tool: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
