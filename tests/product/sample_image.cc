// SPDX-License-Identifier: Apache-2.0
// sample_image DIR: writes an image with parts that images of running jobs rarely have, for json_test: a module that
// cannot be read, a call that cannot be replayed, a variable, a file that the job writes.

#include <cstdio>
#include <string>

#include "ckptfmt/image_writer.h"
#include "ckptfmt/testing.h"
#include "proto/api/call_ids.gen.h"
#include "replay/log/log.h"

namespace cuda_remote {
namespace {

FrameHeader Frame(uint32_t call) {
  FrameHeader header;
  header.call = call;
  return header;
}

absl::Status Write(const std::string& dir) {
  replay::Log log;
  log.Create({Kind::kContext, 0x10}, {}, Frame(kCall_cuCtxCreate_v4), "context", "", std::nullopt);
  log.Create({Kind::kModule, 0x20}, {}, Frame(kCall_cuModuleLoadData), "module", "",
             log.AddImage(".version 7.0\n.target sm_80\n.address_size 64\n.global .b8 table[100];\n"));
  log.Create({Kind::kModule, 0x30}, {}, Frame(kCall_cuModuleLoadData), "module", "", log.AddImage("no module"));
  log.Create({Kind::kGraph, 0x40}, {}, Frame(kCall_cuStreamEndCapture), "graph", "", std::nullopt);
  auto writer = ckptfmt::ImageWriter::Create(dir);
  if (!writer.ok()) return writer.status();
  ckptfmt::Region region;
  region.kind = ckptfmt::RegionKind::kModuleSymbol;
  region.address = 0x7000;
  region.object = 0x20;
  region.symbol = "table";
  region.bytes = 100;
  std::string bytes;
  log.Serialize(&bytes);
  absl::Status status = (*writer)->BeginRegion(region);
  if (status.ok()) status = (*writer)->AddData(std::string(100, 'x'));
  if (status.ok()) status = (*writer)->EndRegion();
  if (status.ok()) status = (*writer)->WriteLog(bytes);
  return status.ok() ? (*writer)->Commit(ckptfmt::SampleInfo()) : status;
}

}  // namespace
}  // namespace cuda_remote

int main(int argc, char** argv) {
  const absl::Status status =
      argc == 2 ? cuda_remote::Write(argv[1]) : absl::InvalidArgumentError("usage: sample_image DIR");
  if (!status.ok()) fprintf(stderr, "sample_image: %s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
