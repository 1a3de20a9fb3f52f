#include "decode/sequence_state.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "base/names.h"
#include "ops/elementwise.h"

namespace furious {
namespace {

constexpr const char* kLogits = "logits";

NamedArray array_of(const std::string& name, const Tensor& tensor) {
  return {name, {tensor.shape().begin(), tensor.shape().end()}, floats_of(tensor)};
}

Tensor tensor_of(const NamedArray& array) {
  const std::string name = printable(array.name);
  require(array.shape.size() <= Shape::kMaxRank, "state: array \"{}\" has {} dimensions, more than {}", name,
          array.shape.size(), Shape::kMaxRank);
  int64_t elements = 1;
  for (const int64_t size : array.shape) {
    require(size >= 0 && (size == 0 || elements <= std::numeric_limits<int64_t>::max() / size),
            "state: array \"{}\" has a size of {}; give the arrays as they were returned", name, size);
    elements *= size;
  }
  require(elements == static_cast<int64_t>(array.values.size()),
          "state: array \"{}\" has {} values, but its shape has {}; give the arrays as they were returned", name,
          array.values.size(), elements);
  const Tensor tensor = Tensor::empty(Shape(std::span<const int64_t>(array.shape)), DType::f32);
  std::ranges::copy(array.values, tensor.data<float>());
  return tensor;
}

}  // namespace

std::vector<float> floats_of(const Tensor& tensor) {
  const Tensor here = to_device(to_dtype(tensor, DType::f32), Device{});
  return {here.data<float>(), here.data<float>() + here.elements()};
}

SequenceState sequence_state(const SlotContents& contents, const std::string& model_fingerprint) {
  SequenceState state{model_fingerprint, contents.tokens, contents.pending, contents.sampling.history, {}};
  for (const auto& [name, tensor] : contents.tensors) state.arrays.push_back(array_of(name, tensor));
  if (contents.logits) state.arrays.push_back(array_of(kLogits, contents.logits));
  return state;
}

SlotContents slot_contents(const SequenceState& state, const Model::Parts& model) {
  require(state.model.empty() || state.model == model.fingerprint(),
          "state: it belongs to another model, with other sizes, weights or tokenizer; use the model that made it");
  require(state.tokens >= 0, "state: {} tokens, expected 0 or more", state.tokens);
  SlotContents contents;
  contents.tokens = state.tokens;
  contents.pending = state.pending;
  contents.sampling = {static_cast<uint64_t>(state.tokens), state.recent};
  for (const NamedArray& array : state.arrays) {
    const Tensor tensor = tensor_of(array);
    if (array.name == kLogits) {
      require(!contents.logits, "state: two arrays \"{}\"", kLogits);
      contents.logits = tensor;
      continue;
    }
    require(contents.tensors.emplace(array.name, tensor).second, "state: two arrays \"{}\"", printable(array.name));
  }
  return contents;
}

}  // namespace furious
