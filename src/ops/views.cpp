#include "ops/views.h"

#include <fmt/ranges.h>

#include <numeric>

#include "base/error.h"
#include "tensor/check.h"

namespace furious {
namespace {

void check_sizes(std::string_view operation, const Tensor& x, const std::vector<int64_t>& sizes) {
  ArgumentCheck(operation).present("x", x);
  const int64_t sum = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  require(x.rank() >= 1 && x.size(-1) == sum,
          "{}: argument \"x\" has shape {}, expected a last dimension of {} (the sum of {})", operation,
          to_string(x.shape()), sum, fmt::join(sizes, " + "));
}

}  // namespace

std::vector<Variable> split(Tape& tape, const Variable& x, const std::vector<int64_t>& sizes) {
  check_sizes("split", x.value(), sizes);
  std::vector<Tape::Part> parts;
  int64_t start = 0;
  for (int64_t size : sizes) {
    parts.emplace_back([start, size](const Tensor& tensor) { return tensor.slice(-1, start, size); });
    start += size;
  }
  return tape.parts(x, parts);
}

std::vector<Variable> split_heads(Tape& tape, const Variable& x, const std::vector<Heads>& pieces) {
  std::vector<int64_t> sizes;
  for (const Heads& piece : pieces) sizes.push_back(piece.count * piece.dim);
  check_sizes("split_heads", x.value(), sizes);
  std::vector<Tape::Part> parts;
  int64_t start = 0;
  for (const Heads& piece : pieces) {
    parts.emplace_back([start, piece](const Tensor& tensor) {
      return tensor.slice(-1, start, piece.count * piece.dim).split_dim(-1, piece.count, piece.dim);
    });
    start += piece.count * piece.dim;
  }
  return tape.parts(x, parts);
}

Variable reshape(Tape& tape, const Variable& x, const Shape& shape) {
  return tape.record(x.value().view(shape), {x}, [x](const Tensor& dy) { x.add_gradient(dy.view(x.value().shape())); });
}

}  // namespace furious
