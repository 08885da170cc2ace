// SPDX-License-Identifier: Apache-2.0
// Texture and surface objects: what is sent, what is answered from their descriptions, and which object a value names.
#include <cuda.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>

#include "client/calls/testing/custom_fixture.h"

namespace cuda_remote::client {
namespace {

constexpr uint64_t kValue = 5;
constexpr CUdeviceptr kMemory = 0x340000000000;

// How tables and log name an object of the context.
uint64_t KeyOf(CUcontext context, uint64_t value) {
  return uint64_t(SlotOf(reinterpret_cast<uint64_t>(context))) << 40 | value;
}

CUDA_RESOURCE_DESC OfArray(CUarray array) {
  CUDA_RESOURCE_DESC resource{};
  resource.resType = CU_RESOURCE_TYPE_ARRAY;
  resource.res.array.hArray = array;
  return resource;
}

CUDA_RESOURCE_DESC OfMemory(CUdeviceptr address) {
  CUDA_RESOURCE_DESC resource{};
  resource.resType = CU_RESOURCE_TYPE_LINEAR;
  resource.res.linear.devPtr = address;
  resource.res.linear.format = CU_AD_FORMAT_FLOAT;
  resource.res.linear.numChannels = 1;
  resource.res.linear.sizeInBytes = 256;
  return resource;
}

class TextureTest : public CustomTest {
 protected:
  void SetUp() override {
    CustomTest::SetUp();
    Answer(kValue);
  }

  // What the server's driver calls each new object.
  static void Answer(uint64_t value) {
    wire::cuTexObjectCreate_Reply texture;
    texture.pTexObject = value;
    server_->On(kCall_cuTexObjectCreate, {CUDA_SUCCESS, Encoded(texture)});
    wire::cuSurfObjectCreate_Reply surface;
    surface.pSurfObject = value;
    server_->On(kCall_cuSurfObjectCreate, {CUDA_SUCCESS, Encoded(surface)});
    server_->On(kCall_cuTexObjectDestroy, FakeServer::Answer());
    server_->On(kCall_cuSurfObjectDestroy, FakeServer::Answer());
  }

  static CUarray NewArray() {
    CUDA_ARRAY_DESCRIPTOR shape{};
    shape.Width = shape.Height = 16;
    shape.Format = CU_AD_FORMAT_FLOAT;
    shape.NumChannels = 1;
    CUarray array = nullptr;
    EXPECT_EQ(cuArrayCreate(&array, &shape), CUDA_SUCCESS);
    return array;
  }

  // Where the texture's memory is said to be; else the error, negative.
  static int64_t AddressUnder(CUtexObject texture) {
    CUDA_RESOURCE_DESC resource{};
    const CUresult result = cuTexObjectGetResourceDesc(&resource, texture);
    return result == CUDA_SUCCESS ? int64_t(resource.res.linear.devPtr) : -int64_t(result);
  }
};

constexpr int64_t kNone = -int64_t(CUDA_ERROR_INVALID_VALUE);

TEST_F(TextureTest, ALevelOrPlaneHasOneHandle) {
  CUDA_ARRAY3D_DESCRIPTOR shape{};
  shape.Width = shape.Height = 16;
  shape.Format = CU_AD_FORMAT_FLOAT;
  shape.NumChannels = 1;
  CUmipmappedArray mips = nullptr;
  ASSERT_EQ(cuMipmappedArrayCreate(&mips, &shape, 3), CUDA_SUCCESS);
  const size_t records = Records();
  CUarray first = nullptr, second = nullptr, again = nullptr;
  ASSERT_EQ(cuMipmappedArrayGetLevel(&first, mips, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuMipmappedArrayGetLevel(&second, mips, 1), CUDA_SUCCESS);
  EXPECT_NE(first, second);
  EXPECT_EQ(Records(), records + 2);
  Sent();
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(cuMipmappedArrayGetLevel(&again, mips, 0), CUDA_SUCCESS);
    EXPECT_EQ(again, first);
  }
  EXPECT_EQ(Sent(), Calls()) << "it is known";
  EXPECT_EQ(Records(), records + 2);
  server_->On(kCall_cuMipmappedArrayGetLevel, {CUDA_ERROR_INVALID_VALUE});
  EXPECT_EQ(cuMipmappedArrayGetLevel(&again, mips, 9), CUDA_ERROR_INVALID_VALUE);
  server_->On(kCall_cuMipmappedArrayGetLevel, FakeServer::Answer());
  EXPECT_EQ(cuMipmappedArrayGetLevel(nullptr, mips, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMipmappedArrayDestroy(mips), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kArray, reinterpret_cast<uint64_t>(first)));
  EXPECT_EQ(cuMipmappedArrayGetLevel(&again, mips, 0), CUDA_ERROR_INVALID_HANDLE);

  const CUarray array = NewArray();
  ASSERT_EQ(cuArrayGetPlane(&first, array, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuArrayGetPlane(&second, array, 1), CUDA_SUCCESS);
  ASSERT_EQ(cuArrayGetPlane(&again, array, 1), CUDA_SUCCESS);
  EXPECT_NE(first, second);
  EXPECT_EQ(again, second);
  EXPECT_EQ(cuArrayDestroy(array), CUDA_SUCCESS);
}

TEST_F(TextureTest, ATextureIsSentAndAnsweredAsItWasDescribed) {
  const CUarray array = NewArray();
  Sent();
  const CUDA_RESOURCE_DESC resource = OfArray(array);
  CUDA_TEXTURE_DESC texture{};
  texture.addressMode[1] = CU_TR_ADDRESS_MODE_MIRROR;
  texture.filterMode = CU_TR_FILTER_MODE_LINEAR;
  texture.borderColor[3] = 0.5F;
  CUDA_RESOURCE_VIEW_DESC view{};
  view.format = CU_RES_VIEW_FORMAT_FLOAT_1X32;
  view.width = view.height = 16;
  CUtexObject object = 0;
  ASSERT_EQ(cuTexObjectCreate(&object, &resource, &texture, &view), CUDA_SUCCESS);
  EXPECT_EQ(object, kValue) << "kernels get the driver's own value";
  const auto request = SentOne<wire::cuTexObjectCreate_Request>();
  EXPECT_EQ(sent_[0].header.context_or_result, SlotOf(reinterpret_cast<uint64_t>(context_)));
  EXPECT_EQ(request.pTexObject, 0u) << "any value";
  EXPECT_EQ(request.pResDesc, BytesOf(resource));
  EXPECT_TRUE(request.has_pTexDesc);
  EXPECT_EQ(request.pTexDesc, BytesOf(texture));
  EXPECT_TRUE(request.has_pResViewDesc);
  EXPECT_EQ(request.pResViewDesc, BytesOf(view));

  CUDA_RESOURCE_DESC resource_now{};
  CUDA_TEXTURE_DESC texture_now{};
  CUDA_RESOURCE_VIEW_DESC view_now{};
  EXPECT_EQ(cuTexObjectGetResourceDesc(&resource_now, object), CUDA_SUCCESS);
  EXPECT_EQ(cuTexObjectGetTextureDesc(&texture_now, object), CUDA_SUCCESS);
  EXPECT_EQ(cuTexObjectGetResourceViewDesc(&view_now, object), CUDA_SUCCESS);
  EXPECT_EQ(BytesOf(resource_now), BytesOf(resource));
  EXPECT_EQ(BytesOf(texture_now), BytesOf(texture));
  EXPECT_EQ(BytesOf(view_now), BytesOf(view));
  EXPECT_EQ(Sent(), Calls()) << "the client knows the descriptions";
  EXPECT_EQ(cuSurfObjectGetResourceDesc(&resource_now, object), CUDA_ERROR_INVALID_VALUE) << "it is no surface";
  EXPECT_EQ(cuTexObjectDestroy(object), CUDA_SUCCESS);
  EXPECT_EQ(cuArrayDestroy(array), CUDA_SUCCESS);
}

TEST_F(TextureTest, WithoutTextureAndViewDescription) {
  const CUDA_RESOURCE_DESC resource = OfMemory(kMemory);
  CUtexObject object = 0;
  ASSERT_EQ(cuTexObjectCreate(&object, &resource, nullptr, nullptr), CUDA_SUCCESS);
  const auto request = SentOne<wire::cuTexObjectCreate_Request>();
  EXPECT_FALSE(request.has_pTexDesc);
  EXPECT_FALSE(request.has_pResViewDesc);
  CUDA_RESOURCE_VIEW_DESC view;
  memset(&view, 1, sizeof(view));
  EXPECT_EQ(cuTexObjectGetResourceViewDesc(&view, object), CUDA_SUCCESS);
  EXPECT_EQ(BytesOf(view), BytesOf(CUDA_RESOURCE_VIEW_DESC{}));
  EXPECT_EQ(cuTexObjectDestroy(object), CUDA_SUCCESS);
}

TEST_F(TextureTest, TheRecordAsksForTheSameValue) {
  const CUarray array = NewArray();
  const CUDA_RESOURCE_DESC of_array = OfArray(array), of_memory = OfMemory(kMemory);
  CUtexObject texture = 0, memory = 0;
  CUsurfObject surface = 0;
  ASSERT_EQ(cuTexObjectCreate(&texture, &of_array, nullptr, nullptr), CUDA_SUCCESS);
  ASSERT_EQ(cuSurfObjectCreate(&surface, &of_array), CUDA_SUCCESS);
  Answer(kValue + 1);
  ASSERT_EQ(cuTexObjectCreate(&memory, &of_memory, nullptr, nullptr), CUDA_SUCCESS);
  const auto context = reinterpret_cast<uint64_t>(context_), owner = reinterpret_cast<uint64_t>(array);

  const auto of_texture = RecordOf(Kind::kTexture, KeyOf(context_, texture));
  wire::cuTexObjectCreate_Request request;
  ASSERT_TRUE(of_texture);
  ASSERT_TRUE(request.Decode(of_texture->message));
  EXPECT_EQ(request.pTexObject, kValue);
  EXPECT_EQ(request.pResDesc, BytesOf(of_array));
  EXPECT_EQ(of_texture->header.context_or_result, SlotOf(context));
  EXPECT_TRUE(DependsOn(*of_texture, Kind::kArray, owner));
  EXPECT_TRUE(DependsOn(*of_texture, Kind::kContext, context));

  const auto of_surface = RecordOf(Kind::kSurface, KeyOf(context_, surface));
  wire::cuSurfObjectCreate_Request surface_request;
  ASSERT_TRUE(of_surface);
  ASSERT_TRUE(surface_request.Decode(of_surface->message));
  EXPECT_EQ(surface_request.pSurfObject, kValue);
  EXPECT_TRUE(DependsOn(*of_surface, Kind::kArray, owner));

  // An array takes with it what was made of it.
  ASSERT_EQ(cuArrayDestroy(array), CUDA_SUCCESS);
  CUDA_RESOURCE_DESC resource{};
  EXPECT_FALSE(InLog(Kind::kTexture, KeyOf(context_, texture)));
  EXPECT_FALSE(InLog(Kind::kSurface, KeyOf(context_, surface)));
  EXPECT_EQ(cuTexObjectGetResourceDesc(&resource, texture), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuSurfObjectGetResourceDesc(&resource, surface), CUDA_ERROR_INVALID_VALUE);
  // Memory does not: the driver takes any address.
  EXPECT_TRUE(InLog(Kind::kTexture, KeyOf(context_, memory)));
  EXPECT_EQ(AddressUnder(memory), int64_t(kMemory));
  EXPECT_EQ(cuTexObjectDestroy(memory), CUDA_SUCCESS);
}

TEST_F(TextureTest, MipmappedArrays) {
  CUDA_ARRAY3D_DESCRIPTOR shape{};
  shape.Width = shape.Height = 16;
  shape.Format = CU_AD_FORMAT_FLOAT;
  shape.NumChannels = 1;
  CUmipmappedArray array = nullptr;
  ASSERT_EQ(cuMipmappedArrayCreate(&array, &shape, 2), CUDA_SUCCESS);
  CUDA_RESOURCE_DESC resource{};
  resource.resType = CU_RESOURCE_TYPE_MIPMAPPED_ARRAY;
  resource.res.mipmap.hMipmappedArray = array;
  CUtexObject object = 0;
  ASSERT_EQ(cuTexObjectCreate(&object, &resource, nullptr, nullptr), CUDA_SUCCESS);
  const auto record = RecordOf(Kind::kTexture, KeyOf(context_, object));
  ASSERT_TRUE(record);
  EXPECT_TRUE(DependsOn(*record, Kind::kMipmappedArray, reinterpret_cast<uint64_t>(array)));
  ASSERT_EQ(cuMipmappedArrayDestroy(array), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kTexture, KeyOf(context_, object)));
  Sent();
  EXPECT_EQ(cuTexObjectCreate(&object, &resource, nullptr, nullptr), CUDA_ERROR_INVALID_HANDLE) << "it is gone";
  EXPECT_EQ(Sent(), Calls());
}

TEST_F(TextureTest, DestroyingForgets) {
  const CUDA_RESOURCE_DESC of_memory = OfMemory(kMemory);
  CUtexObject texture = 0;
  ASSERT_EQ(cuTexObjectCreate(&texture, &of_memory, nullptr, nullptr), CUDA_SUCCESS);
  Sent();
  server_->On(kCall_cuTexObjectDestroy, {CUDA_ERROR_ILLEGAL_ADDRESS});
  EXPECT_EQ(cuTexObjectDestroy(texture), CUDA_ERROR_ILLEGAL_ADDRESS);
  EXPECT_EQ(AddressUnder(texture), int64_t(kMemory)) << "the server still has it";
  EXPECT_TRUE(InLog(Kind::kTexture, KeyOf(context_, texture)));
  server_->On(kCall_cuTexObjectDestroy, FakeServer::Answer());
  Sent();
  EXPECT_EQ(cuTexObjectDestroy(texture), CUDA_SUCCESS);
  EXPECT_EQ(SentOne<wire::cuTexObjectDestroy_Request>().texObject, texture);
  EXPECT_EQ(AddressUnder(texture), kNone);
  EXPECT_FALSE(InLog(Kind::kTexture, KeyOf(context_, texture)));
  EXPECT_EQ(cuTexObjectDestroy(texture), CUDA_SUCCESS) << "as natively";
  EXPECT_EQ(cuTexObjectDestroy(0), CUDA_SUCCESS);
  EXPECT_EQ(cuTexObjectDestroy(~CUtexObject(0)), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls());
}

TEST_F(TextureTest, SurfacesAreDestroyedAsTexturesAre) {
  const CUarray array = NewArray();
  const CUDA_RESOURCE_DESC of_array = OfArray(array);
  CUsurfObject surface = 0;
  CUtexObject texture = 0;
  ASSERT_EQ(cuSurfObjectCreate(&surface, &of_array), CUDA_SUCCESS);
  ASSERT_EQ(cuTexObjectCreate(&texture, &of_array, nullptr, nullptr), CUDA_SUCCESS);
  ASSERT_EQ(surface, texture) << "each kind has numbers of its own";
  Sent();
  EXPECT_EQ(cuSurfObjectDestroy(surface), CUDA_SUCCESS);
  EXPECT_EQ(SentOne<wire::cuSurfObjectDestroy_Request>().surfObject, surface);
  CUDA_RESOURCE_DESC resource{};
  EXPECT_EQ(cuSurfObjectGetResourceDesc(&resource, surface), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuTexObjectGetResourceDesc(&resource, texture), CUDA_SUCCESS);
  EXPECT_EQ(BytesOf(resource), BytesOf(of_array));
  EXPECT_EQ(cuSurfObjectDestroy(surface), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls());
  EXPECT_EQ(cuTexObjectDestroy(texture), CUDA_SUCCESS);
  EXPECT_EQ(cuArrayDestroy(array), CUDA_SUCCESS);
}

TEST_F(TextureTest, WhatTheServerRefusesLeavesNothing) {
  const CUarray array = NewArray();
  const CUDA_RESOURCE_DESC of_array = OfArray(array);
  const size_t records = Records();
  server_->On(kCall_cuTexObjectCreate, {CUDA_ERROR_OUT_OF_MEMORY});
  server_->On(kCall_cuSurfObjectCreate, {CUDA_ERROR_OUT_OF_MEMORY});
  CUtexObject texture = 77;
  CUsurfObject surface = 77;
  EXPECT_EQ(cuTexObjectCreate(&texture, &of_array, nullptr, nullptr), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(cuSurfObjectCreate(&surface, &of_array), CUDA_ERROR_OUT_OF_MEMORY);
  // The tables hold no such value.
  Answer(uint64_t(1) << 40);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(cuTexObjectCreate(&texture, &of_array, nullptr, nullptr), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(cuSurfObjectCreate(&surface, &of_array), CUDA_ERROR_NOT_SUPPORTED);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("unsupported call cuTexObjectCreate"), std::string::npos) << said;
  EXPECT_NE(said.find("unsupported call cuSurfObjectCreate"), std::string::npos) << said;
  EXPECT_EQ(texture, 77u);
  EXPECT_EQ(surface, 77u);
  EXPECT_EQ(Records(), records);
  CUDA_RESOURCE_DESC resource{};
  EXPECT_EQ(cuTexObjectGetResourceDesc(&resource, uint64_t(1) << 40), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuArrayDestroy(array), CUDA_SUCCESS);
}

TEST_F(TextureTest, ArgumentsThatAreWrong) {
  const CUarray array = NewArray();
  CUstream stream = nullptr;
  ASSERT_EQ(cuStreamCreate(&stream, 0), CUDA_SUCCESS);
  const CUDA_RESOURCE_DESC of_array = OfArray(array), of_memory = OfMemory(kMemory), of_nothing = OfArray(nullptr);
  const CUDA_RESOURCE_DESC of_stream = OfArray(reinterpret_cast<CUarray>(stream));
  CUDA_RESOURCE_DESC unknown = of_memory;
  unknown.resType = CUresourcetype(9);
  CUtexObject texture = 0;
  CUsurfObject surface = 0;
  CUDA_RESOURCE_DESC resource{};
  Sent();
  EXPECT_EQ(cuTexObjectCreate(nullptr, &of_array, nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuTexObjectCreate(&texture, nullptr, nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuTexObjectCreate(&texture, &of_nothing, nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuTexObjectCreate(&texture, &unknown, nullptr, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuTexObjectCreate(&texture, &of_stream, nullptr, nullptr), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(cuSurfObjectCreate(nullptr, &of_array), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuSurfObjectCreate(&surface, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuSurfObjectCreate(&surface, &of_memory), CUDA_ERROR_INVALID_VALUE) << "surfaces are of arrays";
  EXPECT_EQ(cuSurfObjectCreate(&surface, &of_nothing), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuSurfObjectCreate(&surface, &of_stream), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_EQ(cuTexObjectGetResourceDesc(nullptr, kValue), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuTexObjectGetTextureDesc(nullptr, kValue), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuTexObjectGetResourceViewDesc(nullptr, kValue), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuSurfObjectGetResourceDesc(nullptr, kValue), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuTexObjectGetResourceDesc(&resource, kValue), CUDA_ERROR_INVALID_VALUE) << "there is none";
  ASSERT_EQ(cuCtxSetCurrent(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cuTexObjectCreate(&texture, &of_array, nullptr, nullptr), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(cuSurfObjectCreate(&surface, &of_array), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(Sent(), Calls());
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_SUCCESS);
  EXPECT_EQ(cuArrayDestroy(array), CUDA_SUCCESS);
}

TEST_F(TextureTest, TheSameValueInTwoContexts) {
  CUcontext other = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&other, 1), CUDA_SUCCESS);
  const CUDA_RESOURCE_DESC first = OfMemory(kMemory), second = OfMemory(kMemory + 4096);
  CUtexObject texture = 0;
  ASSERT_EQ(cuTexObjectCreate(&texture, &first, nullptr, nullptr), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxSetCurrent(other), CUDA_SUCCESS);
  Sent();
  EXPECT_EQ(AddressUnder(texture), kNone) << "it is another context's";
  EXPECT_EQ(cuTexObjectDestroy(texture), CUDA_SUCCESS);
  EXPECT_EQ(Sent(), Calls()) << "there is none here";
  ASSERT_EQ(cuTexObjectCreate(&texture, &second, nullptr, nullptr), CUDA_SUCCESS);
  ASSERT_EQ(texture, kValue);
  EXPECT_EQ(AddressUnder(texture), int64_t(kMemory + 4096));
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  EXPECT_EQ(AddressUnder(texture), int64_t(kMemory));
  // A context takes its own with it.
  ASSERT_EQ(cuDevicePrimaryCtxReset(1), CUDA_SUCCESS);
  EXPECT_FALSE(InLog(Kind::kTexture, KeyOf(other, texture)));
  EXPECT_EQ(AddressUnder(texture), int64_t(kMemory));
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&other, 1), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxSetCurrent(other), CUDA_SUCCESS);
  EXPECT_EQ(AddressUnder(texture), kNone);
  ASSERT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
  EXPECT_EQ(cuTexObjectDestroy(texture), CUDA_SUCCESS);
  EXPECT_EQ(cuDevicePrimaryCtxRelease(1), CUDA_SUCCESS);
}

TEST_F(TextureTest, PinnedMemoryUnderATextureIsTheGpus) {
  void* pinned = nullptr;
  ASSERT_EQ(cuMemHostAlloc(&pinned, 4096, 0), CUDA_SUCCESS);
  const auto address = reinterpret_cast<CUdeviceptr>(pinned);
  const auto on_device = [address] {
    Session* const session = Session::Get();
    ReaderLock lock(&session->memory().mutex());
    return session->memory().host_ranges().At(address)->value.on_device;
  };
  EXPECT_FALSE(on_device());
  const CUDA_RESOURCE_DESC linear = OfMemory(address);
  CUDA_RESOURCE_DESC pitched{};
  pitched.resType = CU_RESOURCE_TYPE_PITCH2D;
  pitched.res.pitch2D.devPtr = address + 256;
  for (const CUDA_RESOURCE_DESC& resource : {linear, pitched}) {
    CUtexObject texture = 0;
    ASSERT_EQ(cuTexObjectCreate(&texture, &resource, nullptr, nullptr), CUDA_SUCCESS);
    EXPECT_TRUE(on_device());
    EXPECT_EQ(cuTexObjectDestroy(texture), CUDA_SUCCESS);
    Session* const session = Session::Get();
    WriterLock lock(&session->memory().mutex());
    session->memory().host_ranges().At(address)->value.on_device = false;
  }
  EXPECT_EQ(cuMemFreeHost(pinned), CUDA_SUCCESS);
}

// The driver gives the value of a destroyed object to the next one. So no object is made before the client has
// forgotten what is being destroyed: it would forget the new one in its place.
TEST_F(TextureTest, AValueThatIsUsedAgainIsTheNewObjects) {
  const CUDA_RESOURCE_DESC first = OfMemory(kMemory), second = OfMemory(kMemory + 4096);
  CUtexObject texture = 0, next = 0;
  ASSERT_EQ(cuTexObjectCreate(&texture, &first, nullptr, nullptr), CUDA_SUCCESS);
  std::atomic<bool> destroyed{false}, made{false};
  server_->On(kCall_cuTexObjectDestroy, [&destroyed](const FakeServer::Request&) {
    destroyed = true;
    return FakeServer::Answer();
  });
  server_->On(kCall_cuTexObjectCreate, [&made](const FakeServer::Request&) {
    made = true;
    wire::cuTexObjectCreate_Reply reply;
    reply.pTexObject = kValue;
    return FakeServer::Answer(CUDA_SUCCESS, Encoded(reply));
  });
  std::thread destroying, making;
  {
    // Forgetting waits for this lock, when the server has destroyed the object.
    ReaderLock lock(&Session::Get()->objects().mutex());
    destroying = std::thread([texture] {
      EXPECT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
      EXPECT_EQ(cuTexObjectDestroy(texture), CUDA_SUCCESS);
    });
    while (!destroyed) std::this_thread::yield();
    making = std::thread([&] {
      EXPECT_EQ(cuCtxSetCurrent(context_), CUDA_SUCCESS);
      EXPECT_EQ(cuTexObjectCreate(&next, &second, nullptr, nullptr), CUDA_SUCCESS);
    });
    // Long enough for the request to arrive, if it may be sent.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_FALSE(made);
  }
  destroying.join();
  making.join();
  EXPECT_TRUE(made);
  EXPECT_EQ(next, texture);
  EXPECT_EQ(AddressUnder(next), int64_t(kMemory + 4096));
  EXPECT_TRUE(InLog(Kind::kTexture, KeyOf(context_, next)));
  server_->On(kCall_cuTexObjectDestroy, FakeServer::Answer());
  EXPECT_EQ(cuTexObjectDestroy(next), CUDA_SUCCESS);
}

// The last one: nothing works after it.
TEST_F(TextureTest, AMalformedAnswerEndsTheSession) {
  server_->On(kCall_cuTexObjectCreate, {CUDA_SUCCESS, "\xff"});
  const CUDA_RESOURCE_DESC resource = OfMemory(kMemory);
  const size_t records = Records();
  CUtexObject texture = 77;
  EXPECT_EQ(cuTexObjectCreate(&texture, &resource, nullptr, nullptr), CUDA_ERROR_DEVICE_UNAVAILABLE);
  EXPECT_EQ(texture, 77u);
  EXPECT_EQ(Records(), records);
  EXPECT_EQ(Session::Get()->lost(), CUDA_ERROR_DEVICE_UNAVAILABLE);
}

}  // namespace
}  // namespace cuda_remote::client
