#include "ops/nn/conv.h"

#include "strided_cuda.h"

namespace furious {
namespace {

using namespace testing;

struct Data {
  Data(Random& random, const Shape& shape, DType its_dtype, int64_t its_margin, bool packed)
      : dtype(its_dtype),
        margin(its_margin),
        x(rounded(random.normal_tensor(shape), dtype)),
        weight(random.normal_tensor({shape[2], random.integer(2, 4)})),
        bias(random.normal_tensor({shape[2]})),
        dy(rounded(random.normal_tensor(shape), dtype)),
        x_there(gpu_copy(x, dtype, margin)),
        activation(random.pick<Activation>({Activation::none, Activation::relu, Activation::silu})) {
    if (!packed) return;
    std::vector<int32_t> starts;
    for (int32_t token = 0; token < shape[0] * shape[1]; ++token)
      if (random.integer(0, 5) == 0) starts.push_back(token);
    boundaries = int_tensor_of(starts, {static_cast<int64_t>(starts.size())});
  }

  Tensor forward_there(const Tensor& state = {}) const {
    return conv_forward(x_there, to_gpu(weight), to_gpu(bias), activation, boundaries, state);
  }
  ConvGradients gradients() const {
    const ConvGradients out{Tensor::empty_like(x), Tensor::empty_like(weight), Tensor::empty_like(bias)};
    conv_backward(out, dy, x, weight, bias, activation, boundaries);
    return out;
  }
  ConvGradients gradients_there() const {
    const ConvGradients out{gpu_empty(x.shape(), dtype, margin), gpu_empty(weight.shape(), DType::f32),
                            gpu_empty(bias.shape(), DType::f32)};
    conv_backward(out, to_gpu(dy, dtype), x_there, to_gpu(weight), to_gpu(bias), activation, boundaries);
    return out;
  }

  DType dtype;
  int64_t margin;
  Tensor x, weight, bias, dy, x_there, boundaries;
  Activation activation;
};

TEST(ConvCuda, MatchesTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (DType dtype : kActivationTypes)
    for (int64_t margin : kMargins)
      for (const Shape& shape :
           {Shape{1, 1, 1}, Shape{2, 3, 8}, Shape{3, 33, 21}, Shape{2, 70, 136}, Shape{1, 64, 260}, Shape{2, 600, 16}})
        for (bool packed : {false, true}) {
          const Data data(random, shape, dtype, margin, packed);
          const std::string where = to_string(shape) + " window " + std::to_string(data.weight.size(1)) + " margin " +
                                    std::to_string(margin) + (packed ? " packed" : "");
          const Tensor y = data.forward_there();
          EXPECT_EQ(y.dtype(), dtype);
          EXPECT_LT(gpu_error(y, conv_forward(data.x, data.weight, data.bias, data.activation, data.boundaries)),
                    tolerance(dtype))
              << where;
          const ConvGradients expected = data.gradients(), actual = data.gradients_there();
          EXPECT_LT(gpu_error(actual.x, expected.x), tolerance(dtype)) << where;
          EXPECT_LT(gpu_error(actual.weight, expected.weight), 1e-4) << where;
          EXPECT_LT(gpu_error(actual.bias, expected.bias), 1e-4) << where;
        }
}

TEST(ConvCuda, TheBiasIsOptional) {
  SKIP_WITHOUT_GPU();
  Random random(5);
  for (DType dtype : kActivationTypes) {
    Data data(random, {2, 70, 136}, dtype, 0, true);
    fill(data.bias, 0);
    const Tensor weight = to_gpu(data.weight);
    EXPECT_TRUE(
        same_gpu_bits(conv_forward(data.x_there, weight, {}, data.activation, data.boundaries), data.forward_there()));
    const ConvGradients expected = data.gradients_there();
    const ConvGradients out{gpu_empty(data.x.shape(), dtype), gpu_empty(data.weight.shape(), DType::f32), {}};
    conv_backward(out, to_gpu(data.dy, dtype), data.x_there, weight, {}, data.activation, data.boundaries);
    EXPECT_TRUE(same_gpu_bits(out.x, expected.x));
    EXPECT_TRUE(same_gpu_bits(out.weight, expected.weight));
  }
}

TEST(ConvCuda, SameBitsEveryTime) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  const Data data(random, {3, 1500, 256}, DType::bf16, 0, true);
  const ConvGradients first = data.gradients_there();
  for (int round = 0; round < 3; ++round) {
    const ConvGradients again = data.gradients_there();
    EXPECT_TRUE(same_gpu_bits(first.x, again.x));
    EXPECT_TRUE(same_gpu_bits(first.weight, again.weight));
    EXPECT_TRUE(same_gpu_bits(first.bias, again.bias));
  }
}

TEST(ConvCuda, StateMatchesTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  for (DType dtype : kActivationTypes)
    for (int round = 0; round < 30; ++round) {
      const Shape shape{random.integer(1, 3), random.integer(1, 6), random.pick<int64_t>({7, 16})};
      const Data data(random, shape, dtype, random.pick<int64_t>({0, 8, 3}), random.coin());
      const int64_t window = data.weight.size(1);
      const Tensor state = random.normal_tensor({shape[0], window - 1, shape[2]});
      EXPECT_LT(gpu_error(data.forward_there(to_gpu(state)),
                          conv_forward(data.x, data.weight, data.bias, data.activation, data.boundaries, state)),
                tolerance(dtype));
      for (const Tensor& before : {Tensor(), state}) {
        const Tensor actual = conv_state(data.x_there, window, data.boundaries, before ? to_gpu(before) : Tensor());
        EXPECT_TRUE(same_bits(to_cpu(actual), conv_state(data.x, window, data.boundaries, before)));
      }
    }
}

TEST(ConvCuda, StepsOfSlots) {
  SKIP_WITHOUT_GPU();
  Random random(5);
  for (DType dtype : kActivationTypes) {
    const Tensor x = to_gpu(random.normal_tensor({4, 300}), dtype), weight = to_gpu(random.normal_tensor({300, 4}));
    const Tensor state = to_gpu(random.normal_tensor({4, 3, 300})), alone = to_dtype(state, DType::f32);
    const std::vector<int32_t> slots{3, 0, 2};
    const Tensor y = conv_step(state, slot_rows(slots, kGpu), x.slice(0, 0, 3), weight, {}, Activation::silu);
    for (int64_t row = 0; row < 3; ++row) {
      const Tensor expected = conv_step(alone.slice(0, slots[row], 1), slot_rows({0}, kGpu), x.slice(0, row, 1), weight,
                                        {}, Activation::silu);
      EXPECT_TRUE(same_gpu_bits(y.slice(0, row, 1), expected)) << row;
    }
    EXPECT_TRUE(same_gpu_bits(state, alone));  // slot 1 is as it was
  }
}

TEST(ConvCuda, StepsAndPiecesGiveTheBitsOfOnePass) {
  SKIP_WITHOUT_GPU();
  Random random(4);
  for (DType dtype : kActivationTypes)
    for (int64_t window : {2, 3, 4}) {
      const Tensor x = to_gpu(random.normal_tensor({2, 50, 24}), dtype),
                   weight = to_gpu(random.normal_tensor({24, window}));
      const Tensor bias = to_gpu(random.normal_tensor({24}));
      const Tensor whole = conv_forward(x, weight, bias, Activation::silu);
      const Tensor begin = x.slice(1, 0, 37), rest = x.slice(1, 37, 13);
      const Tensor state = conv_state(begin, window);
      const Tensor pieces = conv_forward(rest, weight, bias, Activation::silu, {}, state);
      EXPECT_TRUE(same_gpu_bits(pieces, whole.slice(1, 37, 13))) << window;
      for (int64_t token = 37; token < 50; ++token)
        EXPECT_TRUE(same_gpu_bits(conv_step(state, all_slots(state.size(0), state.device()), x.select(1, token), weight,
                                            bias, Activation::silu),
                                  whole.select(1, token)))
            << window << " at " << token;
      EXPECT_TRUE(same_gpu_bits(state, conv_state(x, window)));
    }
}

}  // namespace
}  // namespace furious
