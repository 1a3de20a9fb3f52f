// The safetensors format: an 8-byte little-endian length, a JSON header of that length that gives every tensor's dtype,
// shape and place, then the tensors' bytes.
//
// A file is not trusted: its header is checked completely when it is opened, before any number in it is used, and a
// file that breaks the format in any way is refused with the name of the file and of the tensor.
//
// What write_safetensors writes can be checked: "furious.checksums" in the metadata is a list of 64-bit hashes
// (base/hash.h) in hexadecimal, of the header (names, dtypes and shapes, tensor hashes, the rest of the metadata) and
// of the bytes of each tensor in the order of names. The header is checked when the file is opened, a tensor when it is
// loaded. Files of other programs have no checksums and load as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "tensor/tensor.h"

namespace furious {

// A tensor as it lies in its file.
struct StoredTensor {
  std::string name;
  std::string dtype;  // as the file names it: "F32", "BF16", …; not every one that can be stored can be loaded
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;  // within the mapping of `file`
  std::shared_ptr<const MappedFile> file;
  std::optional<uint64_t> checksum = {};  // of `bytes`, where the file has one
};

// The tensors of one file, or of the several files that an index names. Loads F32, BF16, F16, F64, I32, and I64 as i32.
class SafetensorsReader {
 public:
  // A .safetensors file, a pytorch_model.bin (pickle.h), an .index.json of several of either, or a directory that holds
  // one of them.
  explicit SafetensorsReader(const std::filesystem::path& path);
  // The bytes of a .safetensors file, which must outlive the reader and its views; messages call them `name`.
  SafetensorsReader(const std::filesystem::path& name, std::span<const std::byte> bytes);

  const std::filesystem::path& path() const { return path_; }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }             // sorted by name
  const std::map<std::string, std::string>& metadata() const { return metadata_; }  // of a single file
  const StoredTensor* find(std::string_view name) const;                            // nullptr when there is none
  // Of a single file's header, which holds those of the tensors: equal for equal contents. Nothing without checksums.
  std::optional<uint64_t> checksum() const { return checksum_; }
  std::vector<std::string> damage() const;  // a line for each tensor that differs from its checksum; reads all

  Tensor load(std::string_view name) const;                        // in the dtype it is stored in; I64 as i32
  Tensor load(std::string_view name, DType dtype) const;           // floats convert among each other
  void load_into(std::string_view name, const Tensor& out) const;  // of the same shape, on any device

  // As load(name, dtype), but without a copy when the file holds that dtype, aligned: the tensor is then a part of the
  // mapping, which it keeps alive, and must not be written to.
  Tensor view(std::string_view name, DType dtype) const;
  Tensor view(std::string_view name) const;  // in the dtype it is stored in; I64 as i32

 private:
  void open(std::shared_ptr<const MappedFile> file);
  const StoredTensor& stored(std::string_view name) const;

  std::filesystem::path path_;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
  std::optional<uint64_t> checksum_;
};

// Writes contiguous tensors of any device with their checksums, through AtomicFile. The same tensors give the same
// bytes: wider dtypes come first, so that every tensor is aligned, and names are sorted within a width.
void write_safetensors(const std::filesystem::path& path, const std::map<std::string, Tensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {});
// The bytes of such a file.
std::vector<std::byte> safetensors_bytes(const std::map<std::string, Tensor>& tensors,
                                         const std::map<std::string, std::string>& metadata = {});

}  // namespace furious
