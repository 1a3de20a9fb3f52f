#include "gpu/rows.cuh"
#include "ops/nn/rope_kernels.h"

namespace furious::cuda {
namespace {

// Heads that a thread turns by the same angles; fewer when there are few tokens to share out.
constexpr int kHeadsPerThread = 8;
constexpr int64_t kManyTokens = 4096;

template <class T>
struct Heads {
  Tokens<T> tokens;
  int64_t stride;

  Heads from_row(int64_t row) const {
    return {{tokens.data + row * tokens.batch_stride, tokens.batch_stride, tokens.token_stride}, stride};
  }
};

struct Turn {
  double log2_base;
  RopeScaling scaling;
  int64_t offset;
  const int32_t *seen, *rows;  // of a step: positions before the offset of the slot of each row
  int64_t seen_stride;
  const int32_t* positions;  // of every token in its document; without them a row is one document
  int length, heads, half, heads_per_thread;
  bool halves;
  float direction;

  Turn from_row(int64_t row) const {
    Turn turn = *this;
    if (turn.rows != nullptr) turn.rows += row;
    if (turn.positions != nullptr) turn.positions += row * length;
    return turn;
  }
};

// A thread turns N neighbouring pairs. The angle is kept in turns: the whole ones drop out in double precision, so
// that single precision is enough for sine and cosine.
template <class T, int N>
__global__ void rotate_kernel(Heads<T> y, Heads<T> x, Turn turn, uint32_t items) {
  extern __shared__ double turns_per_token[];
  for (int i = static_cast<int>(threadIdx.x); i < turn.half; i += kRowThreads)
    turns_per_token[i] = turn.scaling(exp2(-turn.log2_base * i / turn.half)) * 0.15915494309189533577;  // 1 / 2π
  __syncthreads();
  const uint32_t item = blockIdx.x * kRowThreads + threadIdx.x;
  if (item >= items) return;
  const uint32_t packs = turn.half / N;
  const uint32_t groups = (turn.heads + turn.heads_per_thread - 1) / turn.heads_per_thread;
  const int pair = static_cast<int>(item % packs) * N;
  const int first_head = static_cast<int>(item / packs % groups) * turn.heads_per_thread;
  const uint32_t token = item / packs / groups;
  const int64_t batch = token / turn.length;
  const int at = static_cast<int>(token % turn.length);

  int64_t position = turn.positions ? turn.positions[token] : at;
  if (position == at)  // the document starts with its row
    position += turn.offset + (turn.seen ? turn.seen[turn.rows[batch] * turn.seen_stride] : 0);
  float cosine[N], sine[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const double turns = static_cast<double>(position) * turns_per_token[pair + i];
    sincospif(2.0f * static_cast<float>(turns - rint(turns)), &sine[i], &cosine[i]);
    sine[i] *= turn.direction;
  }

  const int first = turn.halves ? pair : 2 * pair;
  const int second = turn.halves ? turn.half + pair : 2 * pair + N;
  const int last_head = min(first_head + turn.heads_per_thread, turn.heads);
  const T* from = x.tokens.at(batch, at) + first_head * x.stride;
  T* to = y.tokens.at(batch, at) + first_head * y.stride;
#pragma unroll 2
  for (int head = first_head; head < last_head; ++head, from += x.stride, to += y.stride) {
    float a[N], b[N];
    load(a, from + first);
    load(b, from + second);
    float out[2 * N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      // Interleaved, a and b are one stretch of pairs.
      const float even = 2 * i < N ? a[2 * i % N] : b[2 * i % N];
      const float odd = 2 * i + 1 < N ? a[(2 * i + 1) % N] : b[(2 * i + 1) % N];
      const float p = turn.halves ? a[i] : even;
      const float q = turn.halves ? b[i] : odd;
      out[2 * i] = p * cosine[i] - q * sine[i];
      out[2 * i + 1] = q * cosine[i] + p * sine[i];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      a[i] = turn.halves ? out[2 * i] : out[i];
      b[i] = turn.halves ? out[2 * i + 1] : out[N + i];
    }
    store(to + first, a);
    store(to + second, b);
  }
}

template <int N, class T>
bool aligned(const Heads<T>& heads) {
  return aligned<N>(heads.tokens) && heads.stride % N == 0;
}

}  // namespace

void rope_rotate(const Tensor& y_tensor, const Tensor& x_tensor, const Rope& rope, std::span<const Segment> segments,
                 bool inverse) {
  if (x_tensor.elements() == 0) return;
  const int64_t batch = x_tensor.size(0), length = x_tensor.size(1), heads = x_tensor.size(2);
  const int64_t half = x_tensor.size(3) / 2;
  const Tensor positions = positions_on(x_tensor.device(), segments, batch, length);
  const int64_t share = batch * length >= kManyTokens ? std::min<int64_t>(kHeadsPerThread, heads) : 1;
  const Turn turn{std::log2(rope.base),
                  rope.scaling,
                  rope.offset,
                  rope.positions ? rope.positions.data<int32_t>() : nullptr,
                  rope.rows ? rope.rows.data<int32_t>() : nullptr,
                  rope.positions ? rope.positions.stride(0) : 0,
                  positions ? positions.data<int32_t>() : nullptr,
                  static_cast<int>(length),
                  static_cast<int>(heads),
                  static_cast<int>(half),
                  static_cast<int>(share),
                  rope.pairing == RopePairing::halves,
                  inverse ? -1.0f : 1.0f};
  with_activation_type(x_tensor.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using D = typename OnDevice<T>::Type;
    const Heads<D> y{tokens<T>(y_tensor), y_tensor.stride(2)}, x{tokens<T>(x_tensor), x_tensor.stride(2)};
    const auto launch = [&](auto lanes) {
      const int64_t per_row = length * ((heads + share - 1) / share) * (half / lanes);
      require(per_row <= INT32_MAX,
              "rope: a sequence of {} tokens is more than the CUDA kernel can count; use a "
              "shorter one",
              length);
      const int64_t most_rows = INT32_MAX / per_row;
      for (int64_t first = 0; first < batch; first += most_rows) {
        const int64_t items = std::min(most_rows, batch - first) * per_row;
        rotate_kernel<D, lanes>
            <<<blocks_for(items, kRowThreads), kRowThreads, half * sizeof(double), stream(x_tensor.device())>>>(
                y.from_row(first), x.from_row(first), turn.from_row(first), static_cast<uint32_t>(items));
      }
    };
    if (half % kLanes<T> == 0 && aligned<kLanes<T>>(y) && aligned<kLanes<T>>(x))
      launch(std::integral_constant<int, kLanes<T>>());
    else
      launch(std::integral_constant<int, 1>());
  });
  check_launch("rope");
}

}  // namespace furious::cuda
