// Writes tensors as torch.save writes a dictionary of them: a ZIP archive of a pickle and of storages.
#pragma once

#include <map>
#include <string>

#include "tensor/tensor.h"

namespace furious::testing {

class TorchFile {
 public:
  // For files that are refused: instructions that come first, the function that makes a tensor, its strides.
  std::string before, rebuild = "torch._utils\n_rebuild_tensor_v2\n";
  bool transposed = false;

  std::string bytes(const std::map<std::string, Tensor>& tensors) const {
    std::map<std::string, std::string> files;
    std::string pickle = "\x80\x02" + before + "ccollections\nOrderedDict\n)R(";
    int key = 0;
    for (const auto& [name, tensor] : tensors) {
      files["archive/data/" + std::to_string(key)].assign(static_cast<const char*>(tensor.raw()), tensor.bytes());
      pickle += text(name) + "c" + rebuild + "((" + text("storage") + "ctorch\n" + storage_of(tensor.dtype()) + "\n" +
                text(std::to_string(key++)) + text("cpu") + number(tensor.elements()) + "tQ" + number(0);
      std::string sizes = "(", strides = "(";
      for (int i = 0; i < tensor.rank(); ++i) {
        sizes += number(tensor.size(i));
        strides += number(transposed ? 1 : tensor.stride(i));
      }
      pickle += sizes + "t" + strides + "t\x89" + "ccollections\nOrderedDict\n)RtR";
    }
    files["archive/data.pkl"] = pickle + "u.";
    files["archive/byteorder"] = "little";
    return archive(files);
  }

 private:
  template <class Number>
  static std::string raw(Number number) {
    return {reinterpret_cast<const char*>(&number), sizeof(number)};
  }
  static std::string text(const std::string& s) { return "X" + raw(static_cast<uint32_t>(s.size())) + s; }
  static std::string number(int64_t n) { return "J" + raw(static_cast<int32_t>(n)); }
  static std::string storage_of(DType dtype) {
    return dtype == DType::bf16 ? "BFloat16Storage" : dtype == DType::f16 ? "HalfStorage" : "FloatStorage";
  }
  static std::string archive(const std::map<std::string, std::string>& files) {
    std::string all, directory;
    for (const auto& [name, data] : files) {
      const auto size = static_cast<uint32_t>(data.size());
      const std::string common =
          raw(uint32_t{0}) + raw(uint32_t{0}) + raw(size) + raw(size) + raw(static_cast<uint16_t>(name.size()));
      directory += raw(uint32_t{0x02014b50}) + raw(uint32_t{0}) + raw(uint16_t{0}) + raw(uint16_t{0}) +
                   raw(uint32_t{0}) + raw(uint32_t{0}) + raw(size) + raw(size) +
                   raw(static_cast<uint16_t>(name.size())) + std::string(12, '\0') +
                   raw(static_cast<uint32_t>(all.size())) + name;
      all += raw(uint32_t{0x04034b50}) + std::string(6, '\0') + common + raw(uint16_t{0}) + name + data;
    }
    const auto count = static_cast<uint16_t>(files.size());
    return all + directory + raw(uint32_t{0x06054b50}) + raw(uint32_t{0}) + raw(count) + raw(count) +
           raw(static_cast<uint32_t>(directory.size())) + raw(static_cast<uint32_t>(all.size())) + raw(uint16_t{0});
  }
};

}  // namespace furious::testing
