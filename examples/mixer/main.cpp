// The mixer on tensors of a program: a forward pass over its own memory, gradients, and the last tokens once more one
// at a time from a state.
//
//     cmake -S . -B build -DCMAKE_PREFIX_PATH=<where furious was installed> && cmake --build build && build/mixer
#include <furious/mixer.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace {

namespace ops = furious::ops;

constexpr int64_t kLength = 256, kRead = 250, kHeads = 4, kDim = 32;

std::vector<float> random_numbers(int64_t count, float scale) {
  static std::mt19937 engine(1);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> numbers(static_cast<size_t>(count));
  std::ranges::generate(numbers, [&] { return normal(engine); });
  return numbers;
}

// Tokens [first, end) of memory with `width` numbers per token and head, of which a tensor has `dim` from `offset` on.
ops::Tensor tokens(std::vector<float>& memory, int64_t first, int64_t end, int64_t width, int64_t offset, int64_t dim) {
  return ops::Tensor::view(memory.data() + first * kHeads * width + offset, {1, end - first, kHeads, dim},
                           ops::DType::f32, {}, {kLength * kHeads * width, kHeads * width, width, 1});
}

}  // namespace

int main() try {
  const ops::MixerSpec spec = ops::mixer_spec("2mamba");  // squared scores, decay, normalized by their sum
  std::vector<float> qkv =
      random_numbers(kLength * kHeads * 3 * kDim, 1);  // side by side, as one projection makes them
  std::vector<float> decay = random_numbers(kLength * kHeads, 0.1f);
  for (float& a : decay) a = -std::fabs(a);
  const auto inputs = [&](int64_t first, int64_t end) {
    return ops::MixerInputs{
        tokens(qkv, first, end, 3 * kDim, 0, kDim), tokens(qkv, first, end, 3 * kDim, kDim, kDim),
        tokens(qkv, first, end, 3 * kDim, 2 * kDim, kDim),
        ops::Tensor::view(decay.data() + first * kHeads, {1, end - first, kHeads}, ops::DType::f32)};
  };

  std::vector<float> out(kLength * kHeads * kDim);  // memory of the program, which the library writes
  const ops::MixerResult all =
      ops::mixer_forward(spec, inputs(0, kLength), {}, {.out = tokens(out, 0, kLength, kDim, 0, kDim)});
  const ops::MixerGradients gradients = ops::mixer_backward(spec, inputs(0, kLength), all, all.out);
  std::printf("form %s, first gradient of v %.4f\n", ops::name_of(all.form).c_str(), gradients.v.data<float>()[0]);

  const ops::MixerResult read = ops::mixer_forward(spec, inputs(0, kRead), {.final_state = true});
  float difference = 0;
  for (int64_t t = kRead; t < kLength; ++t) {
    const auto head_rows = [&](int64_t part) {
      return ops::Tensor::view(&qkv[static_cast<size_t>(t * kHeads * 3 + part) * kDim], {1, kHeads, kDim},
                               ops::DType::f32, {}, {kHeads * 3 * kDim, 3 * kDim, 1});
    };
    const ops::Tensor a = ops::Tensor::view(decay.data() + t * kHeads, {1, kHeads}, ops::DType::f32);
    const ops::Tensor step = ops::mixer_step(spec, head_rows(0), head_rows(1), head_rows(2), a, read.final_state);
    for (int64_t i = 0; i < kHeads * kDim; ++i)
      difference =
          std::max(difference, std::fabs(step.data<float>()[i] - out[static_cast<size_t>(t * kHeads * kDim + i)]));
  }
  std::printf("a state of %lld bytes; token by token differs by %.1e\n",
              static_cast<long long>(read.final_state.bytes()), difference);
  return difference < 1e-3f ? 0 : 1;
} catch (const furious::Error& error) {
  std::fprintf(stderr, "mixer: %s\n", error.what());
  return 1;
}
