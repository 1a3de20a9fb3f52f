// Tensor maps: checked as the driver checks them, and written in the format of emulator.h.
#include <cuda.h>
#include <fmt/format.h>

#include <cstdint>
#include <cstring>

#include "emulator/emulator.h"
#include "emulator/runtime.h"

namespace furious::emulator {
namespace {

constexpr cuuint32_t kMostDimensions = 5, kMostOfBox = 256;
constexpr size_t kSwizzledRow = 128;  // bytes

uint16_t bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32:
      return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
      return 8;
    default:
      return 0;
  }
}

// Whether the driver would take the map; throws nothing, as it is called by name through a pointer of C.
CUresult refuse(CUresult result, const char* why) {
  fmt::print(stderr, "emulated CUDA: cuTensorMapEncodeTiled: {}\n", why);
  return result;
}

CUresult encode(CUtensorMap* to, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* sizes,
                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                CUtensorMapFloatOOBfill fill) {
  const uint16_t element = bytes_of(type);
  if (element == 0 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ||
      (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && swizzle != CU_TENSOR_MAP_SWIZZLE_128B))
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "a type, layout or fill that is not emulated");
  if (rank == 0 || rank > kMostDimensions) return refuse(CUDA_ERROR_INVALID_VALUE, "the number of dimensions");
  const auto place = reinterpret_cast<uintptr_t>(address);
  if (reinterpret_cast<uintptr_t>(to) % 64 != 0 || place == 0 || place % 16 != 0)
    return refuse(CUDA_ERROR_INVALID_VALUE, "an address that is not aligned");
  TensorMap map{.address = place,
                .sizes = {},
                .strides = {element},
                .box = {},
                .rank = static_cast<uint16_t>(rank),
                .element_bytes = element,
                .swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? uint32_t{kSwizzledRow} : 0};
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (sizes[i] == 0 || sizes[i] > uint64_t{1} << 32) return refuse(CUDA_ERROR_INVALID_VALUE, "a size");
    if (box[i] == 0 || box[i] > kMostOfBox) return refuse(CUDA_ERROR_INVALID_VALUE, "a size of the box");
    if (steps[i] != 1) return refuse(CUDA_ERROR_NOT_SUPPORTED, "steps other than 1 are not emulated");
    if (i > 0) {
      map.strides[i] = strides[i - 1];
      if (map.strides[i] % 16 != 0 || map.strides[i] >= uint64_t{1} << 40)
        return refuse(CUDA_ERROR_INVALID_VALUE, "a stride that is no multiple of 16 bytes, or too large");
    }
    map.sizes[i] = sizes[i];
    map.box[i] = box[i];
  }
  const size_t row = size_t{box[0]} * element;
  if (row % 16 != 0 || (map.swizzle != 0 && row > kSwizzledRow))
    return refuse(CUDA_ERROR_INVALID_VALUE, "rows of the box that are no multiple of 16 bytes, or exceed the swizzle");
  if (map.swizzle != 0 && row != kSwizzledRow)
    return refuse(CUDA_ERROR_NOT_SUPPORTED, "swizzled rows of fewer than 128 bytes are not emulated");
  std::memset(to, 0, sizeof(*to));
  std::memcpy(to, &map, sizeof(map));
  return CUDA_SUCCESS;
}

}  // namespace

void* tensor_map_encoder() {
  return reinterpret_cast<void*>(&encode);
}

}  // namespace furious::emulator
