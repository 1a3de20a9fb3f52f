#include "paper/cache_memory.h"

#include <algorithm>

#include "base/error.h"
#include "decode/decoder.h"

namespace furious {
namespace {

constexpr int64_t kNumber = sizeof(float);

ModelConfig one_head(const char* arch, int64_t dim) {
  ModelConfig config;
  config.arch = arch;
  config.block = preset(arch).block;
  config.vocabulary = 2;
  config.hidden = config.intermediate = config.head_dim = config.qk_dim = dim;
  config.layers = config.q_heads = config.k_heads = config.v_heads = 1;
  check_config(config);
  return config;
}

// Bytes of a model's cache after each token.
std::vector<int64_t> cache_bytes(const ModelConfig& config, int64_t tokens, Device device) {
  const LanguageModel model(config, 1, device);
  Decoder decoder(model, 1);
  const int32_t slot = decoder.start(), token = 0;
  std::vector<int64_t> bytes;
  while (decoder.tokens(slot) < tokens) {
    decoder.read(slot, {&token, 1});
    bytes.push_back(decoder.bytes());
  }
  return bytes;
}

// Bytes of the state, which is allocated from the first token on: the mixer's, and the convolution's inputs.
std::vector<int64_t> state_bytes(const ModelConfig& config, int64_t tokens, Device device) {
  const int64_t dim = config.head_dim;
  MixerCache mixer(config.block.mixer(), {1, 1, 1, 1, dim, dim}, device);
  const Tensor x = Tensor::zeros({1, 1, dim}, DType::f32, device);
  const Tensor decay = config.block.mixer().decay ? Tensor::zeros({1, 1}, DType::f32, device) : Tensor();
  mixer.step(all_slots(1, device), x, x, x, decay);
  // Before its first token a slot holds only the inputs of the convolution.
  const LanguageModel model(config, 1, device);
  Decoder empty(model, 1);
  empty.start();
  const auto bytes = static_cast<int64_t>(mixer.state(0).bytes()) + empty.bytes();
  return std::vector<int64_t>(static_cast<size_t>(tokens), bytes);
}

template <class Count>
std::vector<int64_t> counted(int64_t tokens, Count&& numbers) {
  std::vector<int64_t> bytes;
  for (int64_t n = 1; n <= tokens; ++n) bytes.push_back(kNumber * numbers(n));
  return bytes;
}

}  // namespace

const MemoryCurve& CacheMemory::curve(const std::string& name) const {
  const auto found = std::find_if(curves.begin(), curves.end(), [&](const MemoryCurve& c) { return c.name == name; });
  require(found != curves.end(), "cache memory: unknown curve {}", name);
  return *found;
}

int64_t CacheMemory::break_even() const {
  const auto &state = curve("2mamba").measured, &plain = curve("softmax").measured;
  int64_t tokens_needed = tokens();
  while (tokens_needed > 0 && state[tokens_needed - 1] < plain[tokens_needed - 1]) --tokens_needed;
  return tokens_needed == tokens() ? 0 : tokens_needed + 1;
}

double CacheMemory::worst_of_lazy() const {
  const auto &lazy = curve(kLazyName).measured, &plain = curve("softmax").measured;
  double worst = 0;
  for (size_t i = 0; i < plain.size(); ++i)
    worst = std::max(worst, static_cast<double>(lazy[i]) / static_cast<double>(plain[i]));
  return worst;
}

int64_t break_even_formula(int64_t dim) {
  // 2·N·d > d·(d + 1)²/2 + 3·d, that is 4·N > (d + 1)² + 6.
  return ((dim + 1) * (dim + 1) + 6) / 4 + 1;
}

CacheMemory measure_cache_memory(int64_t dim, int64_t tokens, Device device) {
  require(tokens >= 1, "memory: {} tokens, expected 1 or more", tokens);
  const ModelConfig softmax = one_head("softmax", dim), linear = one_head("linear", dim), two = one_head("2mamba", dim);
  const auto plain = [dim](int64_t n) { return 2 * n * dim; };
  const auto conv = [dim] { return 3 * dim; };
  const auto state = [dim] { return dim * (dim + 1) * (dim + 1) / 2; };
  CacheMemory memory{dim, {}};
  memory.curves.push_back({"softmax", cache_bytes(softmax, tokens, device), counted(tokens, plain)});
  memory.curves.push_back(
      {"linear", state_bytes(linear, tokens, device), counted(tokens, [&](int64_t) { return dim * (dim + 1); })});
  memory.curves.push_back(
      {"2mamba", state_bytes(two, tokens, device), counted(tokens, [&](int64_t) { return state() + conv(); })});
  memory.curves.push_back({kLazyName, cache_bytes(two, tokens, device),
                           counted(tokens, [&](int64_t n) { return std::min(plain(n), state()) + conv(); })});
  return memory;
}

}  // namespace furious
