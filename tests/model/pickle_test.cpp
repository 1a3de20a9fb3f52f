#include "model/pickle.h"

#include "base/file.h"
#include "model/torch_file.h"
#include "support.h"
#include "temporary_directory.h"

namespace furious {
namespace {

using namespace furious::testing;

class PickleTest : public ::testing::Test {
 protected:
  std::vector<StoredTensor> read(const std::string& bytes) const {
    write_text(path_, bytes);
    return read_pickled_tensors(path_);
  }
  void expect_refused(const std::string& bytes, std::vector<std::string> parts) const {
    parts.push_back(path_.string());
    expect_error([&] { read(bytes); }, parts);
  }

  Random random_{1};
  std::map<std::string, Tensor> tensors_ = {{"a.weight", random_.normal_tensor({3, 5})},
                                            {"b", random_.normal_tensor({4}, 1, DType::bf16)},
                                            {"half", random_.normal_tensor({2, 1, 3}, 1, DType::f16)}};
  TemporaryDirectory directory_;
  std::filesystem::path path_ = directory_ / "pytorch_model.bin";
};

TEST_F(PickleTest, ReadsTensorsOfEveryDtype) {
  read(TorchFile().bytes(tensors_));
  const SafetensorsReader reader(directory_.path());
  ASSERT_EQ(reader.tensors().size(), tensors_.size());
  for (const auto& [name, tensor] : tensors_) {
    EXPECT_EQ(reader.load(name).dtype(), tensor.dtype());
    EXPECT_EQ(to_doubles(reader.load(name)), to_doubles(tensor)) << name;
    EXPECT_EQ(reader.load(name).shape(), tensor.shape());
  }
}

TEST_F(PickleTest, RefusesEverythingButTensors) {
  TorchFile file;
  file.before = "cposix\nsystem\n";
  expect_refused(file.bytes(tensors_), {"posix.system"});
  file.before = "cbuiltins\neval\n";
  expect_refused(file.bytes(tensors_), {"builtins.eval"});
  file.before = "ctorch\nLongStorage\n";
  expect_refused(file.bytes(tensors_), {"torch.LongStorage"});
  file.before = "i";  // makes an object
  expect_refused(file.bytes(tensors_), {"instruction 0x69"});
  file.before = "";
  file.rebuild = "torch._utils\n_rebuild_parameter\n";
  expect_refused(file.bytes(tensors_), {"_rebuild_parameter"});
  file = {};
  file.transposed = true;
  expect_refused(file.bytes(tensors_), {"a.weight", "row by row"});
  expect_refused("PK", {"no ZIP archive"});
  expect_refused(std::string(100, 'x'), {"no ZIP archive"});
}

// Whatever is wrong with the bytes is an Error, and what is read lies within the file.
TEST_F(PickleTest, DamagedFilesAreRefusedOrHarmless) {
  const std::string good = TorchFile().bytes(tensors_);
  for (size_t length = 0; length < good.size(); length += 7) expect_refused(good.substr(0, length), {});
  for (int round = 0; round < 500; ++round) {
    std::string bad = good;
    for (int64_t i = random_.integer(1, 4); i > 0; --i)
      bad[random_.integer(0, static_cast<int64_t>(bad.size()) - 1)] = static_cast<char>(random_.integer(0, 255));
    try {
      for (const StoredTensor& tensor : read(bad)) {
        EXPECT_GE(tensor.bytes.data(), tensor.file->bytes().data());
        EXPECT_LE(tensor.bytes.data() + tensor.bytes.size(), tensor.file->bytes().data() + tensor.file->size());
      }
    } catch (const Error&) {
    }
  }
}

}  // namespace
}  // namespace furious
