#include "model/safetensors.h"

#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <fstream>

#include "support.h"
#include "temporary_directory.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using testing::expect_error;
using testing::int_tensor_of;
using testing::Random;
using testing::same_bits;
using testing::TemporaryDirectory;
using testing::tensor_of;
using testing::to_doubles;

void put(const fs::path& path, std::string_view bytes) {
  fs::remove(path);  // avoids the implicit sync of some file systems when a truncated file is rewritten
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

std::string length_prefix(uint64_t length) {
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes;
}

std::string file_of(std::string_view header, std::string_view data) {
  return length_prefix(header.size()).append(header).append(data);
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// Every loadable dtype, and one tensor of an odd number of bytes of a dtype that is not.
std::map<std::string, Tensor> some_tensors() {
  Random random(31);
  const Tensor f16 = random.normal_tensor({3}, 1, DType::f16);
  return {{"weight", random.normal_tensor({2, 3})},
          {"scalar", tensor_of({7}, {})},
          {"empty", Tensor::empty({0, 4}, DType::f32)},
          {"half", f16},
          {"brain", random.normal_tensor({5, 1, 2}, 1, DType::bf16)},
          {"double", random.normal_tensor({4}, 1, DType::f64)},
          {"tokens", int_tensor_of({1, -2, 1 << 30}, {3})}};
}

std::vector<std::string> names_of(const SafetensorsReader& reader) {
  std::vector<std::string> names;
  for (const StoredTensor& tensor : reader.tensors()) names.push_back(tensor.name);
  return names;
}

// Opens a file of these bytes.
class Safetensors : public ::testing::Test {
 protected:
  SafetensorsReader open(std::string_view bytes) {
    put(path_, bytes);
    return SafetensorsReader(path_);
  }
  void expect_refused(std::string_view bytes, std::vector<std::string> parts) {
    parts.push_back(path_.string());
    expect_error([&] { open(bytes); }, parts);
  }
  // One tensor "x" whose header entry is `entry`, before 8 bytes of data.
  void expect_entry_refused(std::string_view entry, std::vector<std::string> parts) {
    SCOPED_TRACE(entry);
    expect_refused(file_of(fmt::format(R"({{"x":{}}})", entry), "12345678"), std::move(parts));
  }

  TemporaryDirectory directory_;
  fs::path path_ = directory_ / "model.safetensors";
};

TEST_F(Safetensors, RoundTrip) {
  const std::map<std::string, Tensor> tensors = some_tensors();
  write_safetensors(path_, tensors, {{"format", "pt"}, {"\"ünï\n", ""}});
  const SafetensorsReader reader(path_);
  EXPECT_EQ(reader.path(), path_);
  EXPECT_EQ(names_of(reader),
            (std::vector<std::string>{"brain", "double", "empty", "half", "scalar", "tokens", "weight"}));
  EXPECT_EQ(reader.metadata(), (std::map<std::string, std::string>{{"format", "pt"}, {"\"ünï\n", ""}}));
  EXPECT_EQ(reader.find("brain")->dtype, "BF16");
  EXPECT_EQ(reader.find("brain")->shape, (std::vector<int64_t>{5, 1, 2}));
  EXPECT_EQ(reader.find("brain")->bytes.size(), 20u);
  EXPECT_EQ(reader.find("nothing"), nullptr);
  for (const auto& [name, tensor] : tensors) {
    SCOPED_TRACE(name);
    EXPECT_TRUE(same_bits(reader.load(name), tensor));
    EXPECT_TRUE(same_bits(reader.view(name, tensor.dtype()), tensor));
  }
}

TEST_F(Safetensors, NothingToWrite) {
  write_safetensors(path_, {});
  EXPECT_EQ(read_text(path_), file_of(R"({"__metadata__":{"furious.checksums":"a8c7f832281a39c5"}}       )", ""));
  EXPECT_TRUE(SafetensorsReader(path_).tensors().empty());
}

TEST_F(Safetensors, TheBytesOfAFile) {
  write_safetensors(path_,
                    {{"b", tensor_of({1, 2}, {2})},
                     {"a", to_dtype(tensor_of({1, 2, 3}, {3, 1}), DType::bf16)},
                     {"c", tensor_of({3}, {})}},
                    {{"k", "v"}});
  const std::string header = R"({"__metadata__":{"furious.checksums":")"
                             "5a97ffaac168e6a9 caf536f6c4f435d5 1891a08ac5ea083e 1e677cde47afde95"
                             R"(","k":"v"},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                             R"("c":{"dtype":"F32","shape":[],"data_offsets":[8,12]},)"
                             R"("a":{"dtype":"BF16","shape":[3,1],"data_offsets":[12,18]}})";
  const std::string padded = header + std::string((8 - header.size() % 8) % 8, ' ');
  EXPECT_EQ(read_text(path_),
            file_of(padded, bytes_of<float>({1, 2, 3}) + bytes_of<uint16_t>({0x3F80, 0x4000, 0x4040})));
}

TEST_F(Safetensors, Converts) {
  const Tensor values = tensor_of({1.5f, -2.25f, 1.00390625f}, {3});
  write_safetensors(path_, {{"f32", values},
                            {"bf16", to_dtype(values, DType::bf16)},
                            {"f16", to_dtype(values, DType::f16)},
                            {"f64", to_dtype(values, DType::f64)}});
  const SafetensorsReader reader(path_);
  const std::vector<DType> dtypes = {DType::f32, DType::bf16, DType::f16, DType::f64};
  for (const DType from : dtypes) {
    for (const DType to : dtypes) {
      SCOPED_TRACE(fmt::format("{} as {}", name_of(from), name_of(to)));
      const Tensor expected = to_dtype(to_dtype(values, from), to);
      EXPECT_TRUE(same_bits(reader.load(name_of(from), to), expected));
      EXPECT_TRUE(same_bits(reader.view(name_of(from), to), expected));
      const Tensor out = Tensor::zeros({3}, to);
      reader.load_into(name_of(from), out);
      EXPECT_TRUE(same_bits(out, expected));
    }
  }
}

TEST_F(Safetensors, LoadsIntoAPartOfATensor) {
  write_safetensors(path_, {{"x", tensor_of({1, 2, 3, 4}, {2, 2})}});
  const Tensor whole = Tensor::zeros({2, 3}, DType::f32);
  const SafetensorsReader reader(path_);
  reader.load_into("x", whole.slice(1, 1, 2));
  EXPECT_EQ(to_doubles(whole), (std::vector<double>{0, 1, 2, 0, 3, 4}));
  expect_error([&] { reader.load_into("x", whole); },
               {path_.string(), "\"x\"", "shape [2, 2]", "expected [2, 3]", "another model"});
  expect_error([&] { reader.load_into("x", Tensor::empty({2, 2}, DType::i32)); }, {"\"x\"", "F32", "i32"});
}

TEST_F(Safetensors, ViewsShareTheMappingAndKeepIt) {
  write_safetensors(path_, {{"x", tensor_of({1, 2, 3}, {3})}});
  Tensor view;
  {
    const SafetensorsReader reader(path_);
    view = reader.view("x", DType::f32);
    EXPECT_EQ(view.raw(), reader.view("x", DType::f32).raw());
    EXPECT_EQ(view.raw(), static_cast<const void*>(reader.find("x")->bytes.data()));
    EXPECT_NE(view.raw(), reader.load("x").raw());
  }
  fs::remove(path_);
  EXPECT_EQ(to_doubles(view), (std::vector<double>{1, 2, 3}));
}

TEST_F(Safetensors, MisalignedTensorsAreCopied) {
  // A header of an odd length puts the data at an odd address.
  const std::string header = R"({"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}     )";
  ASSERT_EQ(header.size() % 2, 1u);
  const SafetensorsReader reader = open(file_of(header, bytes_of<float>({1, -2})));
  const std::vector<double> expected = {1, -2};
  EXPECT_EQ(to_doubles(reader.load("x")), expected);
  EXPECT_EQ(to_doubles(reader.load("x", DType::bf16)), expected);
  const Tensor view = reader.view("x", DType::f32);
  EXPECT_EQ(to_doubles(view), expected);
  EXPECT_NE(view.raw(), static_cast<const void*>(reader.find("x")->bytes.data()));
}

TEST_F(Safetensors, WideIntegersLoadWhenTheyFit) {
  const std::string header = R"({"x":{"dtype":"I64","shape":[2],"data_offsets":[0,16]}})";
  const SafetensorsReader fits = open(file_of(header, bytes_of<int64_t>({INT32_MIN, INT32_MAX})));
  EXPECT_TRUE(same_bits(fits.load("x"), int_tensor_of({INT32_MIN, INT32_MAX}, {2})));
  EXPECT_TRUE(same_bits(fits.view("x", DType::i32), int_tensor_of({INT32_MIN, INT32_MAX}, {2})));
  for (const int64_t value : {int64_t{INT32_MAX} + 1, int64_t{INT32_MIN} - 1, int64_t{1} << 32}) {
    const SafetensorsReader wide = open(file_of(header, bytes_of<int64_t>({5, value})));
    expect_error([&] { wide.load("x"); }, {path_.string(), "\"x\"", fmt::format("holds {} at position 1", value)});
  }
}

TEST_F(Safetensors, IntegersAndFloatsDoNotConvert) {
  write_safetensors(path_, {{"i", int_tensor_of({1}, {1})}, {"f", tensor_of({1}, {1})}});
  const SafetensorsReader reader(path_);
  expect_error([&] { reader.load("i", DType::f32); }, {path_.string(), "\"i\"", "I32", "f32"});
  expect_error([&] { reader.view("f", DType::i32); }, {path_.string(), "\"f\"", "F32", "i32"});
}

TEST_F(Safetensors, OtherDtypesAreListedButNotLoaded) {
  const SafetensorsReader reader = open(file_of(R"({"new":{"dtype":"F3","shape":[7],"data_offsets":[4,7]},)"
                                                R"("four":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]},)"
                                                R"("mask":{"dtype":"BOOL","shape":[1,1],"data_offsets":[3,4]}})",
                                                "1234567"));
  EXPECT_EQ(names_of(reader), (std::vector<std::string>{"four", "mask", "new"}));
  EXPECT_EQ(reader.find("mask")->bytes[0], std::byte{'4'});
  for (const StoredTensor& tensor : reader.tensors()) {
    const std::vector<std::string> parts = {path_.string(), "\"" + tensor.name + "\"", "\"" + tensor.dtype + "\""};
    expect_error([&] { reader.load(tensor.name); }, parts);
    expect_error([&] { reader.view(tensor.name, DType::f32); }, parts);
  }
}

TEST_F(Safetensors, ManyDimensionsAreListedButNotLoaded) {
  const SafetensorsReader reader =
      open(file_of(R"({"x":{"dtype":"F32","shape":[1,1,1,1,1,1,1],"data_offsets":[0,4]}})", "1234"));
  EXPECT_EQ(reader.find("x")->shape.size(), 7u);
  expect_error([&] { reader.load("x"); }, {path_.string(), "\"x\"", "7 dimensions"});
  expect_error([&] { reader.view("x", DType::f32); }, {"7 dimensions"});
}

TEST_F(Safetensors, AnUnknownNameIsAnsweredWithTheNearest) {
  write_safetensors(path_, {{"model.norm.weight", tensor_of({1}, {1})}});
  const SafetensorsReader reader(path_);
  expect_error([&] { reader.load("model.norm.weights"); },
               {path_.string(), "no tensor \"model.norm.weights\"", "nearest name there is \"model.norm.weight\""});
}

TEST_F(Safetensors, BadLengths) {
  expect_error([&] { SafetensorsReader reader(path_); }, {path_.string(), "no such file"});
  expect_refused("", {"is empty"});
  expect_refused("1234567", {"7 bytes are too few"});
  expect_refused(length_prefix(3) + "{}", {"header length 3 exceeds the file's 10 bytes"});
  expect_refused(length_prefix(100'000'001) + "{}", {"100000001", "limit"});
  expect_refused(length_prefix(UINT64_MAX) + "{}", {"limit"});
  expect_refused(length_prefix(UINT64_MAX - 7) + "{}", {"limit"});
  expect_refused(length_prefix(0), {"not a JSON object"});
}

TEST_F(Safetensors, BadJson) {
  const auto refused = [&](std::string_view header, std::vector<std::string> parts) {
    SCOPED_TRACE(header);
    expect_refused(file_of(header, ""), std::move(parts));
  };
  refused("[]", {"not a JSON object"});
  refused(" {}", {"not a JSON object"});
  refused("\xEF\xBB\xBF{}", {"not a JSON object"});
  refused("{", {"invalid JSON"});
  refused("{} x", {"invalid JSON or UTF-8 at byte 4"});
  refused("{}{}", {"invalid JSON"});
  refused("{\"a\xFF\":1}", {"UTF-8"});
  refused(std::string_view("{}\0\0", 4), {"zero byte"});
  refused(R"({"x":1})", {"\"x\" is a number"});
  refused(R"({"x":1e999})", {"invalid JSON"});
  refused(R"({"x":[]})", {"\"x\" is a list"});
  refused(R"({"x":null})", {"\"x\" is null"});
  refused(R"({"__metadata__":{"a":1}})", {"__metadata__", "a number", "expected texts"});
  refused(R"({"__metadata__":{"a":{}}})", {"__metadata__", "an object"});
  refused(R"({"__metadata__":{"a":"","a":""}})", {"__metadata__", "\"a\" twice"});
  refused(R"({"__metadata__":{},"__metadata__":{}})", {"__metadata__", "twice"});
  refused("{\"x\":" + std::string(100'000, '['), {"\"x\" is a list"});
  refused("{\"x\":" + std::string(100'000, '{'), {"invalid JSON"});
}

TEST_F(Safetensors, BadEntries) {
  expect_entry_refused(R"({"shape":[2],"data_offsets":[0,8]})", {"\"x\" has no \"dtype\""});
  expect_entry_refused(R"({"dtype":"F32","data_offsets":[0,8]})", {"\"x\" has no \"shape\""});
  expect_entry_refused(R"({"dtype":"F32","shape":[2]})", {"\"x\" has no \"data_offsets\""});
  expect_entry_refused(R"({"dtype":3,"shape":[2],"data_offsets":[0,8]})", {"\"x\": \"dtype\" holds a number"});
  expect_entry_refused(R"({"dtype":"F32","shape":"2","data_offsets":[0,8]})", {"\"x\": \"shape\" holds a string"});
  expect_entry_refused(R"({"dtype":"F32","shape":2,"data_offsets":[0,8]})", {"\"x\": \"shape\" holds a number"});
  expect_entry_refused(R"({"dtype":"F32","shape":[[2]],"data_offsets":[0,8]})", {"\"x\": \"shape\" holds a list"});
  expect_entry_refused(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})", {"\"x\": \"shape\" holds a fraction"});
  expect_entry_refused(R"({"dtype":"F32","shape":["2"],"data_offsets":[0,8]})", {"\"x\": \"shape\" holds a string"});
  expect_entry_refused(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})", {"\"x\": \"shape\" holds a negative"});
  expect_entry_refused(R"({"dtype":"F32","shape":[2],"data_offsets":[-8,0]})", {"\"data_offsets\" holds a negative"});
  expect_entry_refused(R"({"dtype":"F32","shape":[2],"data_offsets":[0]})", {"\"x\": \"data_offsets\" has one end"});
  expect_entry_refused(R"({"dtype":"F32","shape":[2],"data_offsets":[]})", {"\"x\": \"data_offsets\""});
  expect_entry_refused(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4,8]})", {"\"x\": \"data_offsets\" has more"});
  expect_entry_refused(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1})", {"\"x\": \"more\" holds"});
  expect_entry_refused(R"({"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]})", {"\"dtype\" twice"});
  expect_entry_refused(R"({"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]})", {"\"shape\" twice"});
}

TEST_F(Safetensors, BadShapes) {
  const auto refused = [&](std::string_view shape, std::string_view part) {
    expect_entry_refused(fmt::format(R"({{"dtype":"F32","shape":[{}],"data_offsets":[0,8]}})", shape),
                         {"\"x\"", std::string(part)});
  };
  refused("3", "needs 96 bits, but \"data_offsets\" give it 8 bytes");
  refused("1", "needs 32 bits");
  refused("0", "needs 0 bits");
  refused("", "needs 32 bits");
  refused("18446744073709551615", "too large");
  refused("99999999999999999999999", "fraction or too large");
  refused("4294967296,4294967296", "too large");
  refused("2305843009213693954", "too large");      // · 32 bits overflows to 64 bits
  refused("0,4294967296,4294967296", "too large");  // no elements, but strides that overflow
  refused("1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,2", "over 32 dimensions");
  expect_entry_refused(R"({"dtype":"F4","shape":[3],"data_offsets":[0,1]})", {"\"x\"", "12 bits"});
  expect_entry_refused(R"({"dtype":"NEW","shape":[4294967296,4294967296],"data_offsets":[0,8]})", {"too large"});
}

TEST_F(Safetensors, BadOffsets) {
  const auto refused = [&](std::string_view offsets) {
    expect_entry_refused(fmt::format(R"({{"dtype":"F32","shape":[2],"data_offsets":[{}]}})", offsets),
                         {"\"x\"", "do not lie in the file's 8 bytes"});
  };
  refused("8,16");
  refused("4,12");
  refused("8,0");
  refused("0,18446744073709551615");
  refused("18446744073709551608,18446744073709551615");
  refused("18446744073709551608,0");
}

TEST_F(Safetensors, TensorsMustCoverTheDataOnce) {
  const auto file = [](std::string_view x, std::string_view y, size_t bytes) {
    return file_of(fmt::format(R"({{"x":{{"dtype":"F32","shape":[2],"data_offsets":[{}]}},)"
                               R"("y":{{"dtype":"F32","shape":[2],"data_offsets":[{}]}}}})",
                               x, y),
                   std::string(bytes, 'd'));
  };
  EXPECT_EQ(open(file("0,8", "8,16", 16)).tensors().size(), 2u);
  EXPECT_EQ(open(file("8,16", "0,8", 16)).tensors().size(), 2u);
  expect_refused(file("0,8", "4,12", 12), {"\"y\"", "byte 4", "before byte 8"});
  expect_refused(file("0,8", "0,8", 8), {"before byte 8"});
  expect_refused(file("0,8", "12,20", 20), {"\"y\"", "byte 12", "after byte 8"});
  expect_refused(file("4,12", "12,20", 20), {"\"x\"", "byte 4", "after byte 0"});
  expect_refused(file("0,8", "8,16", 17), {"1 bytes of data after the last tensor"});
  expect_refused(file("0,8", "8,16", 15), {"\"y\"", "15 bytes"});
  expect_refused(file_of("{}", "x"), {"1 bytes of data after the last tensor"});
}

TEST_F(Safetensors, DuplicateNames) {
  expect_refused(file_of(R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                         R"("x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                         "12345678"),
                 {"tensor \"x\" appears twice"});
}

TEST_F(Safetensors, NamesInMessagesAreShortAndPlain) {
  expect_refused(file_of(R"({"a\u001b[2J":1})", ""), {"\"a\\x1b[2J\""});
  try {
    open(file_of("{\"" + std::string(100'000, 'n') + "\":1}", ""));
    FAIL() << "no error was thrown";
  } catch (const Error& error) {
    EXPECT_LT(std::strlen(error.what()), 600u);
  }
}

TEST_F(Safetensors, EveryTruncationIsRefused) {
  write_safetensors(path_, some_tensors());
  const std::string bytes = read_text(path_);
  for (size_t length = 0; length < bytes.size(); ++length) {
    SCOPED_TRACE(length);
    expect_refused(std::string_view(bytes).substr(0, length), {});
  }
}

// Flips each bit of the file except those of JSON whitespace: only data that was written is loaded.
TEST_F(Safetensors, DetectsEveryFlippedBit) {
  const std::map<std::string, Tensor> tensors = some_tensors();
  const std::map<std::string, std::string> metadata = {{"format", "pt"}, {"steps", "1234"}};
  write_safetensors(path_, tensors, metadata);
  const std::string bytes = read_text(path_);
  EXPECT_EQ(SafetensorsReader(path_).damage(), std::vector<std::string>());
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof length);
  int in_header = 0;
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] ^= static_cast<char>(1 << bit % 8);
    SCOPED_TRACE(bit);
    try {
      const SafetensorsReader reader = open(flipped);
      // The key of the checksums itself, or offsets of empty tensors: the data is intact.
      std::map<std::string, std::string> found = reader.metadata();
      std::erase_if(found, [](const auto& entry) {
        return entry.first.find("checksums") != std::string::npos || entry.first.starts_with("furious");
      });
      const std::vector<std::string> damage = reader.damage();
      if (bit / 8 >= length + 8) {
        ASSERT_EQ(damage.size(), 1u);
        EXPECT_NE(damage[0].find("differs from its checksum"), std::string::npos);
        for (const StoredTensor& tensor : reader.tensors())
          if (damage[0].find("\"" + tensor.name + "\"") != std::string::npos)
            expect_error([&] { reader.load(tensor.name); }, {path_.string(), tensor.name, "checksum", "damaged"});
        continue;
      }
      ++in_header;
      for (const auto& [key, value] : metadata) EXPECT_EQ(found[key], value);
      for (const auto& [name, tensor] : tensors) {
        ASSERT_NE(reader.find(name), nullptr) << name;
        EXPECT_TRUE(same_bits(reader.load(name), tensor));
      }
    } catch (const Error&) {
    }
  }
  EXPECT_LT(in_header, 17 * 8 + 100);
}

TEST_F(Safetensors, FilesWithoutChecksumsLoad) {
  write_safetensors(path_, {{"x", tensor_of({1, 2, 3}, {3})}});
  std::string bytes = read_text(path_);
  EXPECT_TRUE(SafetensorsReader(path_).checksum().has_value());
  bytes.replace(bytes.find("furious.checksums"), 17, "another.program's");
  bytes.back() ^= 1;
  const SafetensorsReader reader = open(bytes);
  EXPECT_FALSE(reader.checksum().has_value());
  EXPECT_EQ(reader.damage(), std::vector<std::string>());
  EXPECT_EQ(reader.load("x").data<float>()[0], 1);
}

class SafetensorsIndex : public Safetensors {
 protected:
  void SetUp() override {
    write_safetensors(directory_ / "one.safetensors", {{"a", tensor_of({1}, {1})}, {"b", tensor_of({2}, {1})}});
    write_safetensors(directory_ / "two.safetensors", {{"c", tensor_of({3}, {1})}, {"spare", tensor_of({4}, {1})}});
  }
  SafetensorsReader open_index(std::string_view text) {
    put(index_, text);
    return SafetensorsReader(directory_.path());
  }
  void expect_index_refused(std::string_view text, std::vector<std::string> parts) {
    SCOPED_TRACE(text);
    parts.push_back(index_.string());
    expect_error([&] { open_index(text); }, parts);
  }

  fs::path index_ = directory_ / "model.safetensors.index.json";
};

constexpr std::string_view kIndex =
    R"({"metadata":{"total_size":12,"list":[1.5,-2,true,null,{"weight_map":{}}]},)"
    R"("weight_map":{"c":"two.safetensors","a":"one.safetensors","b":"one.safetensors"}})";

TEST_F(SafetensorsIndex, LoadsFromSeveralFiles) {
  const SafetensorsReader reader = open_index(kIndex);
  EXPECT_EQ(reader.path(), index_);
  EXPECT_EQ(names_of(reader), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(to_doubles(reader.load("a")), std::vector<double>{1});
  EXPECT_EQ(to_doubles(reader.load("c")), std::vector<double>{3});
  EXPECT_EQ(reader.find("a")->file, reader.find("b")->file);
  EXPECT_EQ(SafetensorsReader(index_).tensors().size(), 3u);
}

TEST_F(SafetensorsIndex, ADirectoryWithASingleFileNeedsNoIndex) {
  expect_error([&] { SafetensorsReader reader(directory_.path()); },
               {directory_.path().string(), "neither model.safetensors nor model.safetensors.index.json"});
  write_safetensors(path_, {{"single", tensor_of({1}, {1})}});
  EXPECT_EQ(names_of(SafetensorsReader(directory_.path())), std::vector<std::string>{"single"});
}

TEST_F(SafetensorsIndex, BadIndexes) {
  expect_index_refused("", {"invalid JSON"});
  expect_index_refused("3", {"the index is a number"});
  expect_index_refused("[]", {"the index is a list"});
  expect_index_refused("{}", {"no \"weight_map\""});
  expect_index_refused(R"({"metadata":{"weight_map":{}}})", {"no \"weight_map\""});
  expect_index_refused(R"({"weight_map":3})", {"\"weight_map\" is a number"});
  expect_index_refused(R"({"weight_map":["one.safetensors"]})", {"\"weight_map\" is a list"});
  expect_index_refused(R"({"weight_map":{"a":3}})", {"\"a\"", "is a number"});
  expect_index_refused(R"({"weight_map":{"a":{}}})", {"\"a\"", "is an object"});
  expect_index_refused(R"({"weight_map":{"a":[]}})", {"\"a\"", "is a list"});
  expect_index_refused(R"({"weight_map":{},"weight_map":{}})", {"twice"});
  expect_index_refused(R"({"weight_map":{"a":"one.safetensors","a":"two.safetensors"}})", {"\"a\" appears twice"});
  expect_index_refused("{\"weight_map\":{\"\xC0\":\"one.safetensors\"}}", {"UTF-8"});
  expect_index_refused(R"({"weight_map":{"c":"one.safetensors"}})", {"\"c\" is not in \"one.safetensors\""});
  expect_index_refused(R"({"weight_map":{"a":"three.safetensors"}})", {"\"a\"", "\"three.safetensors\"", "is missing"});
}

TEST_F(SafetensorsIndex, FilesAreInTheDirectoryOfTheIndex) {
  fs::create_directory(directory_ / "sub");
  fs::copy(directory_ / "one.safetensors", directory_ / "sub/one.safetensors");
  const std::string up = "../" + directory_.path().filename().string() + "/one.safetensors";
  for (const std::string& file :
       {up, (directory_ / "one.safetensors").string(), std::string("sub/one.safetensors"),
        std::string("sub/../one.safetensors"), std::string("./one.safetensors"), std::string(".."), std::string("."),
        std::string(), std::string("one\\\\x"), std::string("one.safetensors\\u0000")})
    expect_index_refused(fmt::format(R"({{"weight_map":{{"a":"{}"}}}})", file), {"\"a\"", "same directory"});
}

TEST_F(SafetensorsIndex, ADamagedFileIsNamed) {
  put(directory_ / "two.safetensors", "damaged!");
  expect_error([&] { open_index(kIndex); }, {(directory_ / "two.safetensors").string(), "header length"});
}

TEST_F(Safetensors, RefusesToWriteWhatCannotBeRead) {
  const Tensor x = tensor_of({1, 2, 3, 4}, {2, 2});
  expect_error([&] { write_safetensors(path_, {{"__metadata__", x}}); }, {path_.string(), "__metadata__"});
  expect_error([&] { write_safetensors(path_, {{"none", Tensor()}}); }, {path_.string(), "\"none\""});
  expect_error([&] { write_safetensors(path_, {{"part", x.slice(1, 0, 1)}}); }, {"\"part\"", "not contiguous"});
  expect_error([&] { write_safetensors(path_, {{"\xFF", x}}); }, {path_.string(), "not UTF-8"});
  expect_error([&] { write_safetensors(path_, {{"x", x}}, {{"a", "\xFF"}}); }, {path_.string(), "not UTF-8"});
  EXPECT_TRUE(fs::is_empty(directory_.path()));
}

TEST_F(Safetensors, FullDiskKeepsThePreviousFile) {
  write_safetensors(path_, {{"x", tensor_of({1}, {1})}});
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit limit{1000, before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &limit);
  // 8 bytes of length, 136 of header
  expect_error(
      [&] {
        write_safetensors(path_, {{"x", Tensor::zeros({500}, DType::f32)}});
      },
      {path_.string(), "2144 bytes are needed", "the previous file is untouched"});
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(to_doubles(SafetensorsReader(path_).load("x")), std::vector<double>{1});
}

// Damages a valid text as a failing disk or an attacker would.
std::string mutated(Random& random, std::string bytes, size_t header_end) {
  static const std::vector<std::string> kValues = {"0",
                                                   "1",
                                                   "-1",
                                                   "4",
                                                   "8",
                                                   "9223372036854775807",
                                                   "9223372036854775808",
                                                   "18446744073709551615",
                                                   "1e9",
                                                   "null",
                                                   "true",
                                                   "[]",
                                                   "{}",
                                                   "[0,8]",
                                                   "\"F32\"",
                                                   "\"\"",
                                                   "\"BF16\"",
                                                   "\"I64\"",
                                                   ",",
                                                   ":",
                                                   "}",
                                                   "]",
                                                   "\"",
                                                   "\\u0000",
                                                   "\xFF"};
  const auto position = [&](size_t end) {
    return static_cast<size_t>(random.integer(0, static_cast<int64_t>(end) - 1));
  };
  for (int64_t changes = random.integer(1, 3); changes > 0 && bytes.size() > header_end / 2; --changes) {
    header_end = std::min(header_end, bytes.size());
    switch (random.integer(0, 5)) {
      case 0:  // a bit anywhere
        bytes[position(bytes.size())] ^= static_cast<char>(1 << random.integer(0, 7));
        break;
      case 1:  // a bit of length or header
        bytes[position(header_end)] ^= static_cast<char>(1 << random.integer(0, 7));
        break;
      case 2:
        bytes.resize(position(bytes.size()));
        break;
      case 3:  // a value replaces a number or a string
      {
        const size_t begin = bytes.find_first_of("0123456789\"[{", position(header_end));
        if (begin == bytes.npos) break;
        const size_t end = std::min(bytes.find_first_of(",]}:", begin), bytes.size());
        bytes.replace(begin, end - begin, random.pick(kValues));
        break;
      }
      case 4:  // a digit for a digit: plausible but wrong numbers, and the length of the header stays right
      {
        const size_t digit = bytes.find_first_of("0123456789", position(header_end));
        if (digit != bytes.npos) bytes[digit] = static_cast<char>('0' + random.integer(0, 9));
        break;
      }
      default:
        bytes.insert(position(bytes.size()), random.pick(kValues));
    }
  }
  return bytes;
}

// Invariants of every accepted file. Reads every byte of every tensor.
void check_accepted(const SafetensorsReader& reader) {
  for (const StoredTensor& tensor : reader.tensors()) {
    const std::span<const std::byte> file = tensor.file->bytes();
    ASSERT_GE(tensor.bytes.data(), file.data());
    ASSERT_LE(tensor.bytes.data() + tensor.bytes.size(), file.data() + file.size());
    ASSERT_EQ(reader.find(tensor.name), &tensor);
    try {
      const Tensor loaded = reader.load(tensor.name);
      const Tensor view = reader.view(tensor.name, loaded.dtype());
      ASSERT_TRUE(same_bits(loaded, view));
    } catch (const Error&) {
      // of a dtype, value or rank that is refused on loading
    }
  }
}

// How often a damaged file was accepted, and how often refused. Anything but Error fails the test.
struct Outcomes {
  int accepted = 0;
  int refused = 0;
};

template <class Open>
void record(Outcomes& outcomes, Open&& open) {
  try {
    check_accepted(open());
    ++outcomes.accepted;
  } catch (const Error&) {
    ++outcomes.refused;
  }
}

// Corrects the length prefix, so that the damage reaches the parser and later checks.
void mend_length(std::string& bytes, size_t data_bytes) {
  if (bytes.size() < data_bytes + 8) return;
  bytes.replace(0, 8, length_prefix(bytes.size() - 8 - data_bytes));
}

TEST_F(Safetensors, FuzzedFiles) {
  Random random(77);
  write_safetensors(path_, some_tensors(), {{"format", "pt"}});
  std::string valid = read_text(path_);
  const size_t checksums = valid.find("furious.checksums");
  ASSERT_NE(checksums, valid.npos);
  valid[checksums] = 'F';  // without checksums, as from another program: the checks after them run, too
  uint64_t length = 0;
  std::memcpy(&length, valid.data(), sizeof length);
  Outcomes outcomes;
  for (int i = 0; i < 4000; ++i) {
    std::string bytes = mutated(random, valid, length + 8);
    if (random.coin()) mend_length(bytes, valid.size() - 8 - length);
    record(outcomes, [&] { return open(bytes); });
    if (HasFailure()) FAIL() << "after " << i << " files";
  }
  EXPECT_GT(outcomes.accepted, 100);
  EXPECT_GT(outcomes.refused, 1000);
}

TEST_F(SafetensorsIndex, FuzzedIndexes) {
  Random random(78);
  Outcomes outcomes;
  for (int i = 0; i < 2000; ++i) {
    record(outcomes, [&] { return open_index(mutated(random, std::string(kIndex), kIndex.size())); });
    if (HasFailure()) FAIL() << "after " << i << " indexes";
  }
  EXPECT_GT(outcomes.accepted, 50);
  EXPECT_GT(outcomes.refused, 500);
}

}  // namespace
}  // namespace furious
