#include "support.h"

#include <cstdlib>
#include <cstring>
#include <limits>

#include "ops/random.h"

namespace furious::testing {
namespace {

uint64_t choose_seed(uint64_t salt) {
  const char* given = std::getenv("FURIOUS_TEST_SEED");
  return given ? std::strtoull(given, nullptr, 10) : 20260 + salt;
}

template <class T>
Tensor tensor_from(const std::vector<T>& values, const Shape& shape) {
  Tensor tensor = Tensor::empty(shape, DTypeOf<T>::value);
  require(static_cast<int64_t>(values.size()) == tensor.elements(), "test: {} values for shape {}", values.size(),
          to_string(shape));
  std::copy(values.begin(), values.end(), tensor.data<T>());
  return tensor;
}

}  // namespace

Random::Random(uint64_t salt)
    : seed_(choose_seed(salt)),
      engine_(seed_),
      trace_(__FILE__, __LINE__, fmt::format("repeat with FURIOUS_TEST_SEED={}", seed_)) {}

int64_t Random::integer(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(engine_);
}

// With the library's generators: those of <random> are slow for large tensors.
Tensor Random::normal_tensor(const Shape& shape, double scale, DType dtype) {
  const Tensor values = Tensor::empty(shape, DType::f32);
  fill_normal(values, 0, static_cast<float>(scale), engine_(), 0);
  return dtype == DType::f32 ? values : to_dtype(values, dtype);
}

Tensor Random::uniform_tensor(const Shape& shape, double low, double high, DType dtype) {
  const Tensor values = Tensor::empty(shape, DType::f32);
  fill_uniform(values, static_cast<float>(low), static_cast<float>(high), engine_(), 0);
  return dtype == DType::f32 ? values : to_dtype(values, dtype);
}

Tensor tensor_of(const std::vector<float>& values, const Shape& shape) {
  return tensor_from(values, shape);
}

Tensor int_tensor_of(const std::vector<int32_t>& values, const Shape& shape) {
  return tensor_from(values, shape);
}

std::vector<double> to_doubles(const Tensor& tensor) {
  Tensor dense = Tensor::empty(tensor.shape(), DType::f64);
  copy(dense, tensor);
  const double* data = dense.data<double>();
  return {data, data + dense.elements()};
}

void PrintTo(const RelativeError& error, std::ostream* out) {
  *out << fmt::format("{:.3g} (row {}: {:.3g})", error.all, error.row, error.worst);
}

namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

// Of rows of `width` numbers; the last may be shorter.
RelativeError error_by_row(const std::vector<double>& actual, const std::vector<double>& expected, size_t width,
                           double floor) {
  if (actual.size() != expected.size()) return {kInfinite, kInfinite, 0};
  if (actual.empty()) return {};
  struct Row {
    double difference = 0, norm = 0;  // squared
  };
  std::vector<Row> rows((actual.size() + width - 1) / width);
  Row all;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!std::isfinite(actual[i])) return {kInfinite, kInfinite, static_cast<int64_t>(i / width)};
    const double difference = actual[i] - expected[i];
    for (Row* row : {&all, &rows[i / width]}) {
      row->difference += difference * difference;
      row->norm += expected[i] * expected[i];
    }
  }
  const auto count = static_cast<double>(rows.size());
  const double least = std::max({std::sqrt(all.norm / count), floor / std::sqrt(count), 1e-300});
  RelativeError error{std::sqrt(all.difference) / (std::sqrt(all.norm) + floor), 0, 0};
  for (size_t i = 0; i < rows.size(); ++i) {
    const double of_row = std::sqrt(rows[i].difference) / std::max(std::sqrt(rows[i].norm), least);
    if (of_row > error.worst) error = {error.all, of_row, static_cast<int64_t>(i)};
  }
  return error;
}

}  // namespace

RelativeError relative_error(const std::vector<double>& actual, const std::vector<double>& expected, double floor) {
  return error_by_row(actual, expected, kRowOfList, floor);
}

RelativeError relative_error(const Tensor& actual, const std::vector<double>& expected, double floor) {
  const auto width = static_cast<size_t>(actual.rank() > 0 ? std::max<int64_t>(actual.size(-1), 1) : 1);
  return error_by_row(to_doubles(actual), expected, width, floor);
}

RelativeError relative_error(const Tensor& actual, const Tensor& expected, double floor) {
  if (actual.shape() != expected.shape()) return {kInfinite, kInfinite, 0};
  return relative_error(actual, to_doubles(expected), floor);
}

bool all_finite(const Tensor& tensor) {
  for (double value : to_doubles(tensor))
    if (!std::isfinite(value)) return false;
  return true;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  require(a.is_contiguous() && b.is_contiguous(), "test: same_bits of strided tensors");
  return a.shape() == b.shape() && a.dtype() == b.dtype() && std::memcmp(a.raw(), b.raw(), a.bytes()) == 0;
}

std::vector<double> numeric_gradient(const Function& f, const std::vector<double>& x,
                                     const std::vector<double>& weights, double step) {
  const auto objective = [&](const std::vector<double>& at) {
    const std::vector<double> y = f(at);
    require(y.size() == weights.size(), "test: {} weights for {} results", weights.size(), y.size());
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += weights[i] * y[i];
    return sum;
  };
  std::vector<double> gradient(x.size());
  std::vector<double> moved = x;
  for (size_t i = 0; i < x.size(); ++i) {
    const double h = step * std::max(1.0, std::fabs(x[i]));
    moved[i] = x[i] + h;
    const double above = objective(moved);
    moved[i] = x[i] - h;
    const double below = objective(moved);
    moved[i] = x[i];
    gradient[i] = (above - below) / (2 * h);
  }
  return gradient;
}

void expect_error(const std::function<void()>& statement, const std::vector<std::string>& parts) {
  try {
    statement();
    ADD_FAILURE() << "no error was thrown";
  } catch (const Error& error) {
    for (const std::string& part : parts)
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "\"" << part << "\" is missing in: " << error.what();
  }
}

}  // namespace furious::testing
