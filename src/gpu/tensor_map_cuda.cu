#include "gpu/tensor_map.h"

#include "tensor/cuda.cuh"

namespace furious::cuda {
namespace {

// Through the runtime, so that nothing links against the driver library, which a machine without a GPU does not have.
auto encoder() {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
          "tensor map");
    require(found == cudaDriverEntryPointSuccess,
            "the driver has no cuTensorMapEncodeTiled: update it to 525 or later");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encode;
}

}  // namespace

CUtensorMap tile_map(const Tensor& x) {
  CUtensorMap map;
  const auto size = [&](int i) { return static_cast<cuuint64_t>(x.size(i)); };
  const auto bytes = [&](int i) {
    // A dimension of one entry may have any stride; the engine requires a multiple of 16.
    return static_cast<cuuint64_t>(x.size(i) == 1 ? 16 : x.stride(i) * 2);
  };
  const cuuint64_t sizes[4] = {size(3), size(1), size(2), size(0)};
  const cuuint64_t strides[3] = {bytes(1), bytes(2), bytes(0)};
  const cuuint32_t box[4] = {64, 64, 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult result = encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, x.raw(), sizes, strides, box, steps,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(result == CUDA_SUCCESS, "tensor map of {}: error {}", to_string(x.shape()), static_cast<int>(result));
  return map;
}

}  // namespace furious::cuda
