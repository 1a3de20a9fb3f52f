#include "ops/nn/rope.h"

#include <cmath>
#include <complex>

#include "base/error.h"
#include "base/parallel.h"
#include "ops/boundaries.h"
#include "ops/nn/rope_kernels.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

namespace furious {
namespace {

using Point = std::complex<double>;  // on the unit circle

// The points e^(i · position · frequency) for every frequency.
std::vector<Point> points_at(double position, const std::vector<double>& frequencies) {
  std::vector<Point> points;
  for (double frequency : frequencies)
    points.emplace_back(std::cos(position * frequency), std::sin(position * frequency));
  return points;
}

// Cosines and sines [count, 2, dim/2] of the positions from `first` on. Sine and cosine are slow: they are computed for
// every 64th position and for the 64 steps between, and one complex product joins the two.
Tensor angle_table(int64_t first, int64_t count, int64_t dim, const Rope& rope) {
  constexpr int64_t kStride = 64;
  const int64_t half = dim / 2;
  std::vector<double> frequencies;
  for (int64_t i = 0; i < half; ++i) frequencies.push_back(rope.scaling(std::pow(rope.base, -2.0 * i / dim)));
  std::vector<std::vector<Point>> steps;
  for (int64_t i = 0; i < std::min(count, kStride); ++i) steps.push_back(points_at(i, frequencies));

  Tensor table = Tensor::empty({count, 2, half}, DType::f32);
  float* const data = table.data<float>();
  parallel_for_if(count * dim > 2 * kElementsPerThread, (count + kStride - 1) / kStride, [&](int64_t block) {
    const int64_t start = block * kStride;
    const std::vector<Point> anchors = points_at(static_cast<double>(first + start), frequencies);
    for (int64_t row = start; row < std::min(count, start + kStride); ++row) {
      const std::vector<Point>& step = steps[row - start];
      float* const cosines = data + row * dim;
      for (int64_t i = 0; i < half; ++i) {
        cosines[i] = static_cast<float>(anchors[i].real() * step[i].real() - anchors[i].imag() * step[i].imag());
        cosines[half + i] = static_cast<float>(anchors[i].imag() * step[i].real() + anchors[i].real() * step[i].imag());
      }
    }
  });
  return table;
}

}  // namespace

void cpu::rope_rotate(const Tensor& y, const Tensor& x, const Rope& rope, std::span<const Segment> segments,
                      bool inverse) {
  const int64_t length = x.size(1);
  const int64_t dim = x.size(3);
  int64_t longest_inner = 0;
  for (const Segment& segment : segments)
    if (segment.begin > 0) longest_inner = std::max(longest_inner, segment.length());
  const Tensor from_offset = rope.positions ? Tensor() : angle_table(rope.offset, length, dim, rope);
  std::vector<Tensor> of_rows;
  for (int64_t row = 0; rope.positions && row < x.size(0); ++row) {
    const int64_t slot = rope.rows.data<int32_t>()[row];
    const int64_t position = rope.positions.data<int32_t>()[slot * rope.positions.stride(0)];
    of_rows.push_back(angle_table(rope.offset + position, length, dim, rope));
  }
  const Tensor from_zero = angle_table(0, longest_inner, dim, rope);

  std::vector<const float*> angles;
  angles.reserve(x.size(0) * length);
  for (const Segment& segment : segments) {
    const Tensor& from_begin = rope.positions ? of_rows[segment.batch] : from_offset;
    const float* const table = (segment.begin > 0 ? from_zero : from_begin).data<float>();
    for (int64_t i = 0; i < segment.length(); ++i) angles.push_back(table + i * dim);
  }
  rope_rotate_rows(y, x, angles, rope.pairing, inverse);
}

namespace {

void rotate(const ArgumentCheck& check, const Tensor& y, const Tensor& x, const Rope& rope, const Tensor& boundaries,
            bool inverse) {
  const std::vector<Segment> segments = segments_of(check.operation(), boundaries, x.size(0), x.size(1));
  FURIOUS_DISPATCH(x.device(), rope_rotate(y, x, rope, segments, inverse));
}

void check_input(const ArgumentCheck& check, std::string_view name, const Tensor& x, const Rope& rope) {
  check.rank(name, x, 4);
  check.rows(name, x);
  require(x.size(3) % 2 == 0, "{}: argument \"{}\" has shape {}, expected an even last dimension", check.operation(),
          name, to_string(x.shape()));
  require(rope.base > 0, "{}: base is {}, expected a positive number", check.operation(), rope.base);
  const RopeScaling& scaling = rope.scaling;
  require(scaling.factor > 0 && scaling.original >= 0 && (scaling.original == 0 || scaling.high > scaling.low),
          "{}: angles scaled by a factor of {} from {} to {} turns, expected a positive factor and a range",
          check.operation(), scaling.factor, scaling.low, scaling.high);
  require(rope.offset >= 0, "{}: offset is {}, expected 0 or more", check.operation(), rope.offset);
  require(rope.positions.defined() == rope.rows.defined(), "{}: positions go with rows; give both or neither",
          check.operation());
  if (!rope.positions) return;
  check.dense("rows", rope.rows, DType::i32, {x.size(0)}, x.device());
  check.rank("positions", rope.positions, 1);
  check.dtype("positions", rope.positions, {DType::i32});
  check.device("positions", rope.positions, x.device());
  for (int64_t i = 0; x.device().is_cpu() && i < x.size(0); ++i) {
    const int32_t slot = rope.rows.data<int32_t>()[i];
    require(slot >= 0 && slot < rope.positions.size(0), "{}: slot {} in \"rows\", expected 0 to {}", check.operation(),
            slot, rope.positions.size(0) - 1);
  }
}

}  // namespace

Tensor rope_forward(const Tensor& x, const Rope& rope, const Tensor& boundaries) {
  const ArgumentCheck check("rope");
  check_input(check, "x", x, rope);
  Tensor y = Tensor::empty_like(x);
  rotate(check, y, x, rope, boundaries, false);
  return y;
}

void rope_backward(const Tensor& dx, const Tensor& dy, const Rope& rope, const Tensor& boundaries) {
  const ArgumentCheck check("rope backward");
  check_input(check, "dy", dy, rope);
  check.rows("dx", dx, dy);
  rotate(check, dx, dy, rope, boundaries, true);
}

Variable rope(Tape& tape, const Variable& x, const Rope& rope, const Tensor& boundaries) {
  return tape.record(rope_forward(x.value(), rope, boundaries), {x}, [=](const Tensor& dy) {
    const Tensor dx = x.new_gradient();
    rope_backward(dx, dy, rope, boundaries);
    x.add_gradient(dx);
  });
}

}  // namespace furious
