// SPDX-License-Identifier: Apache-2.0
// cr-checkpoint: root's tool writes the image into the request's folder, and the user gets it from there.
#ifndef CUDA_REMOTE_HOST_REQUESTS_SAVE_H_
#define CUDA_REMOTE_HOST_REQUESTS_SAVE_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "host/earlier_images.h"
#include "host/exchange.h"
#include "host/requests/host_request.h"

namespace cuda_remote::host {

class Save : public HostRequest {
 public:
  explicit Save(Asked asked);
  ~Save() override;

  absl::Status Begin() override;

 protected:
  absl::Status TakeOwnOption(const Option& option) override;
  void EndArguments() override;
  absl::StatusOr<std::string> Do(checkpoint::Step step) override;
  bool CountsWhenCancelled() const override { return giver_ != nullptr; }

  // Whether the image shares memory with earlier ones of a store, and where those are.
  virtual bool Shares() const { return keep_ > 0; }
  virtual std::vector<std::string> PathsToShareWith() const;
  // Before the user gets the image under its name.
  virtual absl::Status AwaitPublishing() { return absl::OkStatus(); }

  std::unique_ptr<ImageGiver> giver_;

 private:
  absl::Status WatchGiver(const std::function<absl::Status()>& work);
  absl::StatusOr<std::string> BeginImage();
  absl::Status GiveImage();

  size_t keep_ = 0;                         // of a store's images; 0: it is none
  std::unique_ptr<EarlierImages> earlier_;  // null: the image shares nothing
};

}  // namespace cuda_remote::host

#endif  // CUDA_REMOTE_HOST_REQUESTS_SAVE_H_
