#include "ops/nn/rms_norm.h"

#include "strided_cuda.h"

namespace furious {
namespace {

using namespace testing;

constexpr float kEps = 1e-5f;

struct Data {
  Data(Random& random, const Shape& shape, DType its_dtype, int64_t its_margin, bool gated)
      : dtype(its_dtype),
        margin(its_margin),
        x(rounded(random.normal_tensor(shape, 2), dtype)),
        weight(random.normal_tensor({shape[shape.rank() - 1]})),
        z(gated ? rounded(random.normal_tensor(shape, 2), dtype) : Tensor()),
        dy(rounded(random.normal_tensor(shape), dtype)),
        x_there(gpu_copy(x, dtype, margin)),
        z_there(gated ? gpu_copy(z, dtype, margin) : Tensor()) {}

  RmsNormResult forward_there() const { return rms_norm_forward(x_there, to_gpu(weight), kEps, z_there); }
  RmsNormGradients gradients() const {
    const RmsNormGradients out{Tensor::empty_like(x), Tensor::empty_like(weight), z ? Tensor::empty_like(x) : Tensor()};
    rms_norm_backward(out, dy, x, weight, rms_norm_forward(x, weight, kEps, z).inverse_rms, z);
    return out;
  }
  RmsNormGradients gradients_there() const {
    const RmsNormGradients out{gpu_empty(x.shape(), dtype, margin), gpu_empty(weight.shape(), DType::f32),
                               z ? gpu_empty(x.shape(), dtype, margin) : Tensor()};
    rms_norm_backward(out, to_gpu(dy, dtype), x_there, to_gpu(weight), forward_there().inverse_rms, z_there);
    return out;
  }

  DType dtype;
  int64_t margin;
  Tensor x, weight, z, dy, x_there, z_there;
};

class RmsNormCuda : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Gate, RmsNormCuda, ::testing::Bool());

void expect_match(const Data& data) {
  const std::string where = to_string(data.x.shape()) + " margin " + std::to_string(data.margin);
  const double most = tolerance(data.dtype);
  const RmsNormResult expected = rms_norm_forward(data.x, data.weight, kEps, data.z), actual = data.forward_there();
  EXPECT_EQ(actual.y.dtype(), data.dtype);
  EXPECT_LT(gpu_error(actual.y, expected.y), most) << where;
  EXPECT_LT(gpu_error(actual.inverse_rms, expected.inverse_rms), 1e-5) << where;
  const RmsNormGradients d = data.gradients(), there = data.gradients_there();
  // Rows of one or two elements hardly have a gradient: it cancels.
  const double most_of_gradient = data.x.size(-1) > 2 ? most : 0.05;
  EXPECT_LT(gpu_error(there.x, d.x), most_of_gradient) << where;
  EXPECT_LT(gpu_error(there.weight, d.weight), 1e-4) << where;
  if (data.z) {
    EXPECT_LT(gpu_error(there.z, d.z), most_of_gradient) << where;
  }
}

TEST_P(RmsNormCuda, MatchesTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(1);
  for (DType dtype : kActivationTypes)
    for (int64_t margin : kMargins)
      for (int64_t width : {2, 5, 64, 512, 513, 1024, 1536, 2560, 4096, 8192})
        expect_match(Data(random, {3, random.integer(1, 7), width}, dtype, margin, GetParam()));
}

TEST_P(RmsNormCuda, ManyRows) {
  SKIP_WITHOUT_GPU();
  Random random(2);
  for (DType dtype : kActivationTypes)
    for (int64_t width : {24, 1024}) expect_match(Data(random, {6001, width}, dtype, 0, GetParam()));
}

TEST_P(RmsNormCuda, SameBitsEveryTime) {
  SKIP_WITHOUT_GPU();
  Random random(3);
  const Data data(random, {5000, 640}, DType::bf16, 0, GetParam());
  const RmsNormGradients first = data.gradients_there();
  for (int round = 0; round < 3; ++round) {
    const RmsNormGradients again = data.gradients_there();
    EXPECT_TRUE(same_gpu_bits(first.x, again.x));
    EXPECT_TRUE(same_gpu_bits(first.weight, again.weight));
  }
}

TEST(RmsNormResidualCuda, AccumulatesIntoTheGradientOfAResidual) {
  SKIP_WITHOUT_GPU();
  Random random(5);
  for (DType dtype : kActivationTypes)
    for (int64_t margin : kMargins)
      for (int64_t width : {5, 64, 1024, 1536}) {
        const Data data(random, {3, random.integer(1, 7), width}, dtype, margin, false);
        const Tensor brought = rounded(random.normal_tensor(data.x.shape()), dtype);
        const RmsNormGradients there{gpu_copy(brought, dtype, margin), gpu_empty({width}, DType::f32), {}, true};
        rms_norm_backward(there, to_gpu(data.dy, dtype), data.x_there, to_gpu(data.weight),
                          data.forward_there().inverse_rms);
        const RmsNormGradients alone = data.gradients();
        add_into(brought, alone.x);
        EXPECT_LT(gpu_error(there.x, brought), tolerance(dtype)) << width << " margin " << margin;
        EXPECT_LT(gpu_error(there.weight, alone.weight), 1e-4) << width;
      }
}

TEST_P(RmsNormCuda, RecordsItsGradients) {
  SKIP_WITHOUT_GPU();
  Random random(4);
  const Data data(random, {4, 40}, DType::bf16, 8, GetParam());
  const RmsNormGradients expected = data.gradients_there();
  const Variable x(data.x_there, true), weight(to_gpu(data.weight), true);
  const Variable z = GetParam() ? Variable(data.z_there, true) : Variable();
  Tape tape;
  tape.backward(rms_norm(tape, x, weight, kEps, z), to_gpu(data.dy, data.dtype));
  EXPECT_TRUE(same_gpu_bits(x.gradient(), expected.x));
  EXPECT_TRUE(same_gpu_bits(weight.gradient(), expected.weight));
  EXPECT_TRUE(!GetParam() || same_gpu_bits(z.gradient(), expected.z));
}

// A row of the weight for each group of the last dimension but one.
TEST_P(RmsNormCuda, GroupsMatchTheCpu) {
  SKIP_WITHOUT_GPU();
  Random random(7);
  for (const DType dtype : kActivationTypes)
    for (const int64_t n : {8, 40, 1024}) {
      const Shape shape{2, 3, 4, n};
      const auto input = [&](double scale) { return rounded(random.normal_tensor(shape, scale), dtype); };
      const Tensor x = input(2), z = GetParam() ? input(2) : Tensor(), dy = input(1);
      const Tensor weight = random.normal_tensor({4, n});
      const auto there = [&](const Tensor& tensor) { return tensor ? to_gpu(tensor, dtype) : Tensor(); };
      const Variable x_here(x, true), w_here(weight, true), x_there(there(x), true), w_there(to_gpu(weight), true);
      const Variable z_here = z ? Variable(z, true) : Variable(), z_there = z ? Variable(there(z), true) : Variable();
      Tape tape, gpu_tape;
      const Variable expected = rms_norm(tape, x_here, w_here, kEps, z_here);
      const Variable actual = rms_norm(gpu_tape, x_there, w_there, kEps, z_there);
      tape.backward(expected, dy);
      gpu_tape.backward(actual, there(dy));
      EXPECT_LT(gpu_error(actual.value(), expected.value()), tolerance(dtype));
      EXPECT_LT(gpu_error(x_there.gradient(), x_here.gradient()), tolerance(dtype));
      EXPECT_LT(gpu_error(w_there.gradient(), w_here.gradient()), 1e-4);
      if (z) {
        EXPECT_LT(gpu_error(z_there.gradient(), z_here.gradient()), tolerance(dtype));
      }
    }
}

}  // namespace
}  // namespace furious
