#include "api/convert.h"
#include "api/convert_mixer.h"
#include "base/boundary.h"
#include "base/error.h"
#include "furious/mixer.h"
#include "ops/elementwise.h"
#include "ops/mixer/recurrent.h"
#include "tensor/check.h"
#include "tensor/stream.h"

namespace furious::ops {
namespace {

constexpr std::string_view kOperation = "mixer_cache";

furious::MixerCache::Sizes slots_of(const MixerSizes& sizes) {
  require_usable(kOperation, sizes.device);
  require(sizes.batch >= 1 && sizes.batch <= INT32_MAX, "{}: a batch of {}, expected 1 to {}", kOperation, sizes.batch,
          INT32_MAX);
  return {sizes.batch, sizes.qk_heads, sizes.qk_heads, sizes.heads, sizes.qk_dim, sizes.v_dim};
}

Tensor stored(const furious::Tensor& result, const Tensor& out) {
  if (!out) return external(result);
  copy(internal(out), result);
  return out;
}

}  // namespace

struct MixerCache::Contents {
  furious::Device device;
  furious::MixerCache cache;
  SlotRows rows;

  Contents(const MixerSpec& spec, const MixerSizes& sizes)
      : device(internal(sizes.device)),
        cache(internal(kOperation, spec), slots_of(sizes), device),
        rows(all_slots(sizes.batch, device)) {}

  // Before anything is computed, so that a wrong one leaves the cache as it was.
  void check_out(const Tensor& out, const std::vector<int64_t>& shape, const Tensor& like) const {
    if (!out) return;
    const ArgumentCheck check(kOperation);
    check.shape("out", internal(out), shape);
    check.dtype("out", internal(out), {internal(like).dtype()});
    check.device("out", internal(out), device);
    for (int i = 0; i < out.rank(); ++i)
      require(out.size(i) <= 1 || out.stride(i) != 0,
              "{}: argument \"out\" has stride 0 in dimension {}; give memory for every element", kOperation, i);
  }
};

MixerCache::MixerCache(const MixerSpec& spec, const MixerSizes& sizes) try {
  const KeepCurrentDevice keep(internal(sizes.device));
  contents_ = std::make_unique<Contents>(spec, sizes);
} catch (...) {
  rethrow_as_error();
}

MixerCache::~MixerCache() = default;
MixerCache::MixerCache(MixerCache&&) noexcept = default;
MixerCache& MixerCache::operator=(MixerCache&&) noexcept = default;

MixerCache::Contents& MixerCache::own() const {
  require(contents_ != nullptr, "{}: it was moved from; use the object it was moved to", kOperation);
  return *contents_;
}

Tensor MixerCache::prefill(const MixerInputs& in, const Tensor& out) try {
  Contents& contents = own();
  const KeepCurrentDevice keep(contents.device);
  const ArgumentCheck check(kOperation);
  const furious::MixerShape& shape = contents.cache.shape();
  const int64_t batch = contents.cache.slots();
  require(!in.initial_state && in.cu_seqlens.empty(),
          "{}: an initial state and packed sequences are not supported; the cache is the state", kOperation);
  check.rank("q", internal(in.q), 4);
  const int64_t length = in.q.size(1);
  check.shape("q", internal(in.q), {batch, length, shape.q_heads, shape.qk_dim});
  check.shape("k", internal(in.k), {batch, length, shape.k_heads, shape.qk_dim});
  check.shape("v", internal(in.v), {batch, length, shape.v_heads, shape.v_dim});
  if (in.log_decay) check.shape("log_decay", internal(in.log_decay), {batch, length, shape.heads});
  const std::vector<int64_t> out_shape{batch, length, shape.heads, shape.v_dim};
  contents.check_out(out, out_shape, in.v);
  const auto row = [](const Tensor& x, int64_t b) { return x ? internal(x).slice(0, b, 1) : furious::Tensor(); };
  const auto inputs = [&](int64_t b) {
    return furious::MixerInputs{row(in.q, b), row(in.k, b), row(in.v, b), row(in.log_decay, b), {}, {}};
  };
  // All sequences are checked before the first of them changes.
  for (int64_t b = 0; b < batch; ++b)
    check_mixer(kOperation, contents.cache.spec(), inputs(b), furious::Form::automatic);
  const Tensor result = out ? out : Tensor::empty(out_shape, in.v.dtype(), external(contents.device));
  for (int64_t b = 0; b < batch; ++b) copy(internal(result).slice(0, b, 1), contents.cache.prefill(b, inputs(b)));
  return result;
} catch (...) {
  rethrow_as_error();
}

Tensor MixerCache::step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay,
                        const Tensor& out) try {
  Contents& contents = own();
  const KeepCurrentDevice keep(contents.device);
  const furious::MixerShape& shape = contents.cache.shape();
  ArgumentCheck(kOperation).present("v", internal(v));
  contents.check_out(out, {contents.cache.slots(), shape.heads, shape.v_dim}, v);
  const furious::Tensor decay = internal(log_decay);
  return stored(contents.cache.step(contents.rows, internal(q), internal(k), internal(v),
                                    decay && !decay.is_contiguous() ? to_dtype(decay, decay.dtype()) : decay),
                out);
} catch (...) {
  rethrow_as_error();
}

void MixerCache::clear() try {
  const KeepCurrentDevice keep(own().device);
  for (int64_t slot = 0; slot < own().cache.slots(); ++slot) own().cache.clear(slot);
} catch (...) {
  rethrow_as_error();
}

Tensor MixerCache::state() const try {
  const Contents& contents = own();
  const KeepCurrentDevice keep(contents.device);
  const furious::MixerShape& shape = contents.cache.shape();
  require(shape.state_rows > 0, "{}: there is no state of constant size for {} and dimension {}", kOperation,
          to_string(contents.cache.spec()), shape.qk_dim);
  const furious::Tensor all =
      furious::Tensor::empty({contents.cache.slots(), shape.heads, shape.state_rows, shape.state_columns},
                             furious::DType::f32, contents.device);
  for (int64_t slot = 0; slot < contents.cache.slots(); ++slot) copy(all.slice(0, slot, 1), contents.cache.state(slot));
  return external(all);
} catch (...) {
  rethrow_as_error();
}

int64_t MixerCache::tokens() const {
  return own().cache.tokens(0);
}

int64_t MixerCache::bytes() const {
  return own().cache.bytes();
}

}  // namespace furious::ops
