#include "furious/tensor.h"

#include <cstring>

#include "api/dlpack.h"
#include "support.h"

namespace furious {
namespace {

using testing::expect_error;

// A tensor of another framework that counts the calls of its deleter.
struct Foreign {
  std::vector<float> numbers;
  std::vector<int64_t> shape, strides;
  DLManagedTensor managed{};
  int deleted = 0;

  explicit Foreign(const std::vector<int64_t>& its_shape) : numbers(1000), shape(its_shape) {
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i);
    managed.dl_tensor = {
        numbers.data(), {kDLCPU, 0}, static_cast<int32_t>(shape.size()), {kDLFloat, 32, 1}, shape.data(), nullptr, 0};
    managed.manager_ctx = this;
    managed.deleter = [](DLManagedTensor* self) { ++static_cast<Foreign*>(self->manager_ctx)->deleted; };
  }
};

TEST(PublicTensor, OwnMemoryAndViews) {
  const ops::Tensor zeros = ops::Tensor::zeros({2, 3}, ops::DType::f32);
  EXPECT_EQ(zeros.shape(), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(zeros.strides(), (std::vector<int64_t>{3, 1}));
  EXPECT_EQ(zeros.bytes(), 24);
  EXPECT_EQ(zeros.size(-1), 3);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(zeros.data<float>()[i], 0);

  std::vector<float> numbers{0, 1, 2, 3, 4, 5};
  const ops::Tensor transposed = ops::Tensor::view(numbers.data(), {3, 2}, ops::DType::f32, {}, {1, 3});
  EXPECT_FALSE(transposed.is_contiguous());
  const ops::Tensor copy = ops::Tensor::empty({3, 2}, ops::DType::f32);
  copy.copy_from(transposed);
  EXPECT_EQ(std::vector<float>(copy.data<float>(), copy.data<float>() + 6), (std::vector<float>{0, 3, 1, 4, 2, 5}));
  transposed.copy_from(ops::Tensor::zeros({3, 2}, ops::DType::f64));
  EXPECT_EQ(numbers, std::vector<float>(6));
  const ops::Tensor half = ops::Tensor::zeros({4}, ops::DType::bf16);
  EXPECT_EQ(half.data<uint16_t>()[3], 0);
  EXPECT_EQ(zeros.to({}).raw(), zeros.raw());
  const ops::Tensor scalar = ops::Tensor::view(numbers.data(), {}, ops::DType::f32);
  EXPECT_EQ(scalar.rank(), 0);
  EXPECT_EQ(scalar.elements(), 1);
}

TEST(PublicTensor, OwnerLivesAsLongAsTheLastHandle) {
  auto owner = std::make_shared<std::vector<float>>(12);
  ops::Tensor tensor = ops::Tensor::view(owner->data(), {3, 4}, ops::DType::f32, {}, {}, owner);
  EXPECT_EQ(owner.use_count(), 2);
  ops::Tensor copy = tensor;
  tensor = {};
  EXPECT_EQ(owner.use_count(), 2);
  copy = {};
  EXPECT_EQ(owner.use_count(), 1);
}

TEST(PublicTensor, StridesOfDimensionsOfSizeOneAreNormal) {
  std::vector<float> numbers(12);
  const ops::Tensor tensor = ops::Tensor::view(numbers.data(), {1, 3, 1, 4}, ops::DType::f32, {}, {7, 4, 0, 1});
  EXPECT_EQ(tensor.strides(), (std::vector<int64_t>{12, 4, 4, 1}));
  EXPECT_TRUE(tensor.is_contiguous());
}

TEST(PublicTensor, UndefinedAndMovedFromIsAnError) {
  const ops::Tensor undefined;
  EXPECT_FALSE(undefined.defined());
  expect_error([&] { (void)undefined.shape(); }, {"tensor", "undefined"});
  expect_error([&] { (void)undefined.to_dlpack(); }, {"tensor", "undefined"});
  expect_error([&] { undefined.copy_from(undefined); }, {"tensor", "undefined"});
  ops::Tensor first = ops::Tensor::zeros({2}, ops::DType::f32);
  const ops::Tensor second = std::move(first);
  EXPECT_TRUE(second.defined());
  EXPECT_FALSE(first.defined());  // NOLINT(bugprone-use-after-move): what is tested
  expect_error([&] { (void)first.raw(); }, {"tensor", "moved"});
}

TEST(PublicTensor, BadArguments) {
  std::vector<float> numbers(8);
  const auto view = [&](void* data, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
    return [=] { (void)ops::Tensor::view(data, shape, ops::DType::f32, {}, strides); };
  };
  expect_error(view(nullptr, {2}, {}), {"tensor.view", "null"});
  expect_error(view(reinterpret_cast<char*>(numbers.data()) + 1, {2}, {}), {"tensor.view", "multiple of 4 bytes"});
  expect_error(view(numbers.data(), {2, 2}, {1}), {"tensor.view", "1 strides", "[2, 2]"});
  expect_error(view(numbers.data(), {-1}, {}), {"negative"});
  expect_error(view(numbers.data(), {1, 1, 1, 1, 1, 1, 1}, {}), {"rank 7"});
  expect_error(view(numbers.data(), {int64_t{1} << 40, int64_t{1} << 40}, {}), {"2^63"});
  expect_error([] { (void)ops::Tensor::zeros({2}, ops::DType::f32, {ops::DeviceKind::cpu, 1}); }, {"index 1"});
  expect_error(
      [] {
        (void)ops::Tensor::zeros({2}, ops::DType::f32, {ops::DeviceKind::cuda, 99});
      },
      {"cuda:99", "cannot be used"});
  expect_error([] { const ops::StreamScope scope({ops::DeviceKind::cuda, 99}, nullptr); }, {"cuda:99"});
  const ops::Tensor tensor = ops::Tensor::zeros({2, 3}, ops::DType::f32);
  expect_error([&] { (void)tensor.data<double>(); }, {"f32", "f64"});
  expect_error([&] { (void)tensor.data<uint16_t>(); }, {"f32", "16 bits"});
  expect_error([&] { (void)tensor.size(2); }, {"dimension 2", "rank 2"});
  expect_error([&] { tensor.copy_from(ops::Tensor::zeros({3, 2}, ops::DType::f32)); }, {"[3, 2]", "[2, 3]"});
  expect_error([&] { tensor.copy_from(ops::Tensor::zeros({2, 3}, ops::DType::i32)); }, {"i32", "f32"});
  expect_error([] { (void)ops::Tensor::zeros({2}, static_cast<ops::DType>(9)); }, {"dtype 9"});
  expect_error([&] { (void)ops::Tensor::view(numbers.data(), {2}, static_cast<ops::DType>(9)); }, {"dtype 9"});
  expect_error(
      [] {
        (void)ops::Tensor::zeros({2}, ops::DType::f32, {static_cast<ops::DeviceKind>(9), 0});
      },
      {"kind 9"});
  expect_error([] { (void)ops::dtype_from_name("float"); }, {"float"});
  expect_error([] { (void)ops::device_from_name("gpu"); }, {"gpu"});
  const ops::StreamScope scope({}, nullptr);  // no effect on the CPU
}

TEST(PublicTensor, FromDlpack) {
  Foreign foreign({2, 3});
  foreign.managed.dl_tensor.byte_offset = 8;
  {
    const ops::Tensor tensor = ops::Tensor::from_dlpack(&foreign.managed);
    EXPECT_TRUE(tensor.is_contiguous());
    EXPECT_EQ(tensor.data<float>()[0], 2);
    const ops::Tensor copy = tensor;
    EXPECT_EQ(foreign.deleted, 0);
  }
  EXPECT_EQ(foreign.deleted, 1);
  foreign.strides = {1, 2};
  foreign.managed.dl_tensor.strides = foreign.strides.data();
  foreign.managed.dl_tensor.device = {kDLCUDAHost, 0};  // pinned memory is memory of the CPU
  foreign.managed.deleter = nullptr;
  const ops::Tensor tensor = ops::Tensor::from_dlpack(&foreign.managed);
  EXPECT_EQ(tensor.strides(), (std::vector<int64_t>{1, 2}));
  EXPECT_TRUE(tensor.device().is_cpu());
  foreign.shape[0] = 0;
  foreign.managed.dl_tensor.data = nullptr;
  EXPECT_EQ(ops::Tensor::from_dlpack(&foreign.managed).elements(), 0);
}

TEST(PublicTensor, DlpackThatIsRefusedStaysTheCallers) {
  const auto refuse = [](const auto& change, const std::vector<std::string>& words) {
    Foreign foreign({2, 3});
    change(foreign.managed.dl_tensor);
    expect_error([&] { (void)ops::Tensor::from_dlpack(&foreign.managed); }, words);
    EXPECT_EQ(foreign.deleted, 0);
  };
  refuse([](DLTensor& x) { x.dtype = {kDLInt, 64, 1}; }, {"int64"});
  refuse([](DLTensor& x) { x.dtype = {kDLFloat, 32, 4}; }, {"float32x4"});
  refuse([](DLTensor& x) { x.dtype = {6, 8, 1}; }, {"bool8"});
  refuse([](DLTensor& x) { x.dtype = {77, 8, 1}; }, {"unknown"});
  refuse([](DLTensor& x) { x.device = {7, 0}; }, {"type 7"});
  refuse([](DLTensor& x) { x.device = {kDLCUDA, 99}; }, {"cuda:99"});
  refuse([](DLTensor& x) { x.ndim = 7; }, {"rank 7"});
  refuse([](DLTensor& x) { x.ndim = -1; }, {"rank -1"});
  refuse([](DLTensor& x) { x.shape = nullptr; }, {"no shape"});
  refuse([](DLTensor& x) { x.data = nullptr; }, {"null"});
  refuse([](DLTensor& x) { x.byte_offset = 2; }, {"multiple of 4 bytes"});
  expect_error([] { (void)ops::Tensor::from_dlpack(nullptr); }, {"null"});
}

TEST(PublicTensor, ToDlpackAndBack) {
  auto owner = std::make_shared<std::vector<float>>(24);
  for (size_t i = 0; i < owner->size(); ++i) (*owner)[i] = static_cast<float>(i);
  for (const ops::DType dtype :
       {ops::DType::f32, ops::DType::bf16, ops::DType::f16, ops::DType::i32, ops::DType::f64}) {
    DLManagedTensor* managed = nullptr;
    {
      const ops::Tensor tensor = ops::Tensor::view(owner->data(), {2, 3}, dtype, {}, {1, 2}, owner);
      managed = tensor.to_dlpack();
    }
    EXPECT_EQ(owner.use_count(), 2);  // the exported one
    EXPECT_EQ(managed->dl_tensor.data, owner->data());
    EXPECT_EQ(managed->dl_tensor.device.device_type, kDLCPU);
    EXPECT_EQ(managed->dl_tensor.byte_offset, 0u);
    {
      const ops::Tensor again = ops::Tensor::from_dlpack(managed);
      EXPECT_EQ(again.dtype(), dtype);
      EXPECT_EQ(again.shape(), (std::vector<int64_t>{2, 3}));
      EXPECT_EQ(again.strides(), (std::vector<int64_t>{1, 2}));
    }
    EXPECT_EQ(owner.use_count(), 1);
  }
  DLManagedTensor* const unused = ops::Tensor::zeros({3}, ops::DType::f32).to_dlpack();
  unused->deleter(unused);
}

}  // namespace
}  // namespace furious
