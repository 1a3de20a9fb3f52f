#include "tensor/device.h"

#include "support.h"

namespace furious {
namespace {

TEST(Device, NamesRoundTrip) {
  EXPECT_EQ(device_from_name("cpu"), Device{});
  EXPECT_EQ(device_from_name("cuda"), (Device{DeviceKind::cuda, 0}));
  EXPECT_EQ(device_from_name("cuda:3"), (Device{DeviceKind::cuda, 3}));
  EXPECT_EQ(name_of(Device{}), "cpu");
  EXPECT_EQ(name_of(Device{DeviceKind::cuda, 3}), "cuda:3");
}

TEST(Device, UnknownNamesAreQuoted) {
  for (const char* name : {"gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", ""})
    testing::expect_error([&] { device_from_name(name); }, {std::string("\"") + name + "\"", "cuda:N"});
}

TEST(Device, UsableDevicesExist) {
  EXPECT_TRUE(usable_device("cpu").is_cpu());
  EXPECT_EQ(usable_device("auto").is_cpu(), describe_cuda_devices().empty());
  testing::expect_error([] { usable_device("cuda:4000"); }, {"cuda:4000"});
  testing::expect_error([] { usable_device("tpu"); }, {"tpu", "cuda"});
}

}  // namespace
}  // namespace furious
