#include "ops/mixer/recurrent.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "ops/elementwise.h"
#include "ops/mixer/cpu.h"
#include "ops/mixer/recurrent_cpu.h"
#include "tensor/check.h"

namespace furious {
namespace {

constexpr int64_t kLongestWindow = 64;

int64_t pages_for(int64_t tokens) {
  return (tokens + CachePage::kTokens - 1) / CachePage::kTokens;
}

}  // namespace

MixerCache::MixerCache(const MixerSpec& spec, const Sizes& sizes) : spec_(spec) {
  const auto in_range = [](int64_t dim) { return dim >= kSmallestDim && dim <= kLargestDim; };
  require(in_range(sizes.qk_dim) && in_range(sizes.v_dim), "mixer_cache: dimensions {} and {}, expected {} to {}",
          sizes.qk_dim, sizes.v_dim, kSmallestDim, kLargestDim);
  const int64_t heads = std::max({sizes.q_heads, sizes.k_heads, sizes.v_heads});
  for (int64_t own : {sizes.q_heads, sizes.k_heads, sizes.v_heads})
    require(own >= 1 && heads % own == 0, "mixer_cache: {} heads, expected a divisor of {}", own, heads);
  require(sizes.batch >= 1, "mixer_cache: batch {}, expected 1 or more", sizes.batch);
  require(spec.scale >= 0 && std::isfinite(spec.scale), "mixer_cache: scale {}, expected 0 or more", spec.scale);
  shape_.batch = sizes.batch;
  shape_.length = 1;
  shape_.heads = heads;
  shape_.q_heads = sizes.q_heads;
  shape_.k_heads = sizes.k_heads;
  shape_.v_heads = sizes.v_heads;
  shape_.qk_dim = sizes.qk_dim;
  shape_.v_dim = sizes.v_dim;
  shape_.state_rows = state_rows(spec, sizes.qk_dim);
  shape_.state_columns = state_columns(spec, sizes.v_dim);
  shape_.scale = spec.scale > 0 ? spec.scale : 1.0f / std::sqrt(static_cast<float>(sizes.qk_dim));
  if (!spec.has_state()) return;
  const int64_t token = sizes.k_heads * sizes.qk_dim + sizes.v_heads * sizes.v_dim + (spec.decay ? heads : 0);
  const int64_t state = heads * cpu::head_state_numbers(shape_);
  window_ = std::clamp<int64_t>(state / token, 1, kLongestWindow);
  // Whole pages of plain k and v that take no less than the state and the pages of a window.
  const int64_t page = CachePage::kTokens * token;
  first_fold_ = CachePage::kTokens * ((state + page - 1) / page + pages_for(window_));
}

MixerCache::MixerCache(const MixerSpec& spec, const Sizes& sizes, const MixerContents& contents)
    : MixerCache(spec, sizes) {
  const ArgumentCheck check("mixer_cache");
  const bool folded = contents.state.defined();
  require(!folded || spec.has_state(), "mixer_cache: contents with a state, but an exponential score has none");
  require(spec.decay || !contents.log_decay, "mixer_cache: contents with decays, but the spec has no decay");
  const int64_t most = folded ? window_ : spec.has_state() ? first_fold_ : contents.tokens;
  require(contents.pending >= 0 && contents.pending <= most && contents.pending <= contents.tokens &&
              (folded || contents.pending == contents.tokens),
          "mixer_cache: {} tokens of {} in the window cannot be", contents.pending, contents.tokens);
  if (folded) {
    check.dense("state", contents.state, DType::f32,
                {shape_.batch, shape_.heads, shape_.state_rows, shape_.state_columns});
    state_ = new_state();
    cpu::cache_load(spec_, shape_, contents.state, state_);
  }
  tokens_ = contents.tokens;
  pending_ = contents.pending;
  const int64_t pages = pages_kept(folded, pending_);
  if (pages == 0) return;
  check.dense("k", contents.k, DType::f32, {shape_.batch, pages, shape_.k_heads, CachePage::kTokens, shape_.qk_dim});
  check.dense("v", contents.v, DType::f32, {shape_.batch, pages, shape_.v_heads, CachePage::kTokens, shape_.v_dim});
  if (spec_.decay)
    check.dense("log_decay", contents.log_decay, DType::f32, {shape_.batch, pages, shape_.heads, CachePage::kTokens});
  for (int64_t p = 0; p < pages; ++p) {
    pages_.push_back(new_page());
    copy(pages_[p].k, contents.k.select(1, p));
    copy(pages_[p].v, contents.v.select(1, p));
    if (spec_.decay) copy(pages_[p].log_decay, contents.log_decay.select(1, p));
  }
}

int64_t MixerCache::pages_kept(bool folded, int64_t pending) const {
  return pages_for(folded ? window_ : pending);
}

MixerContents MixerCache::contents() const {
  MixerContents contents{tokens_, pending_, {}, {}, {}, {}};
  if (state_) {
    contents.state = Tensor::empty({shape_.batch, shape_.heads, shape_.state_rows, shape_.state_columns}, DType::f32);
    cpu::cache_store(spec_, shape_, state_, contents.state);
  }
  const int64_t pages = pages_kept(state_.defined(), pending_);
  if (pages == 0) return contents;
  const auto gather = [&](Tensor CachePage::*member) {
    const Tensor page = new_page().*member;
    std::vector<int64_t> sizes(page.shape().begin(), page.shape().end());
    sizes.insert(sizes.begin() + 1, pages);
    const Tensor all = Tensor::zeros(Shape(sizes), DType::f32);
    for (int64_t p = 0; p < pages_for(pending_); ++p) {
      const int64_t used = std::min(CachePage::kTokens, pending_ - p * CachePage::kTokens);
      copy(all.select(1, p).slice(2, 0, used), (pages_[p].*member).slice(2, 0, used));
    }
    return all;
  };
  contents.k = gather(&CachePage::k);
  contents.v = gather(&CachePage::v);
  if (spec_.decay) contents.log_decay = gather(&CachePage::log_decay);
  return contents;
}

int64_t MixerCache::bytes() const {
  size_t sum = state_ ? state_.bytes() : 0;
  for (const CachePage& page : pages_)
    sum += page.k.bytes() + page.v.bytes() + (page.log_decay ? page.log_decay.bytes() : 0);
  return static_cast<int64_t>(sum);
}

CachePage MixerCache::new_page() const {
  CachePage page;
  page.k = Tensor::empty({shape_.batch, shape_.k_heads, CachePage::kTokens, shape_.qk_dim}, DType::f32);
  page.v = Tensor::empty({shape_.batch, shape_.v_heads, CachePage::kTokens, shape_.v_dim}, DType::f32);
  if (spec_.decay) page.log_decay = Tensor::empty({shape_.batch, shape_.heads, CachePage::kTokens}, DType::f32);
  return page;
}

void MixerCache::append(const Tensor& k, const Tensor& v, const Tensor& log_decay) {
  const int64_t at = pending_ % CachePage::kTokens;
  if (at == 0 && pending_ / CachePage::kTokens == static_cast<int64_t>(pages_.size())) pages_.push_back(new_page());
  const CachePage& page = pages_[pending_ / CachePage::kTokens];
  copy(page.k.select(2, at), k);
  copy(page.v.select(2, at), v);
  if (spec_.decay) copy(page.log_decay.select(2, at), log_decay);
  ++pending_;
  ++tokens_;
}

Tensor MixerCache::new_state() const {
  return Tensor::zeros({shape_.batch, shape_.heads, cpu::head_state_numbers(shape_)}, DType::f32);
}

void MixerCache::fold() {
  if (!state_) state_ = new_state();
  cpu::cache_fold(spec_, shape_, pages_, pending_, state_);
  drop_window();
}

void MixerCache::drop_window() {
  pending_ = 0;
  // The pages of a window are used again; those of the long first window go back.
  pages_.resize(std::min<size_t>(pages_.size(), pages_for(window_)));
}

Tensor MixerCache::step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay) {
  const ArgumentCheck check("mixer_cache.step");
  const auto check_rows = [&](std::string_view argument, const Tensor& x, int64_t heads, int64_t dim) {
    check.shape(argument, x, {shape_.batch, heads, dim});
    check.dtype(argument, x, {DType::f32});
    check.device(argument, x, {});
    check.unit_inner_stride(argument, x);
  };
  check_rows("q", q, shape_.q_heads, shape_.qk_dim);
  check_rows("k", k, shape_.k_heads, shape_.qk_dim);
  check_rows("v", v, shape_.v_heads, shape_.v_dim);
  require(spec_.decay == log_decay.defined(), "mixer_cache.step: argument \"log_decay\" {}",
          spec_.decay ? "is missing, but the spec has decay" : "was given, but the spec has no decay");
  if (spec_.decay) {
    check.dense("log_decay", log_decay, DType::f32, {shape_.batch, shape_.heads});
    for (int64_t i = 0; i < log_decay.elements(); ++i)
      require(log_decay.data<float>()[i] <= 0 && std::isfinite(log_decay.data<float>()[i]),
              "mixer_cache.step: argument \"log_decay\" holds {}, expected finite values of at most 0",
              log_decay.data<float>()[i]);
  }
  if (first_fold_ > 0 && pending_ >= (state_ ? window_ : first_fold_)) fold();
  append(k, v, log_decay);
  const Tensor out = Tensor::empty({shape_.batch, shape_.heads, shape_.v_dim}, DType::f32);
  cpu::cache_read(spec_, shape_, pages_, pending_, state_, q, out);
  return out;
}

Tensor MixerCache::prefill(const MixerInputs& inputs, const MixerOptions& options) {
  constexpr std::string_view kOperation = "mixer_cache.prefill";
  const MixerShape given = check_mixer(kOperation, spec_, inputs, options.form);
  const ArgumentCheck check(kOperation);
  check.shape("q", inputs.q, {shape_.batch, given.length, shape_.q_heads, shape_.qk_dim});
  check.shape("k", inputs.k, {shape_.batch, given.length, shape_.k_heads, shape_.qk_dim});
  check.shape("v", inputs.v, {shape_.batch, given.length, shape_.v_heads, shape_.v_dim});
  check.dtype("q", inputs.q, {DType::f32});
  require(!inputs.boundaries && !inputs.initial_state,
          "{}: boundaries and an initial state are not taken; the cache is the state", kOperation);
  const auto token = [&](const Tensor& x, int64_t t) { return x ? x.select(1, t) : Tensor(); };
  if (tokens_ > 0 && !spec_.has_state()) {  // a KV cache grows token by token
    const Tensor out = Tensor::empty({shape_.batch, given.length, shape_.heads, shape_.v_dim}, DType::f32);
    for (int64_t t = 0; t < given.length; ++t) {
      const Tensor decay = spec_.decay ? to_dtype(token(inputs.log_decay, t), DType::f32) : Tensor();
      copy(out.select(1, t), step(token(inputs.q, t), token(inputs.k, t), token(inputs.v, t), decay));
    }
    return out;
  }
  MixerInputs with_state = inputs;
  MixerOptions forward = options;
  // Tokens that still fit into the first window stay plain, also when earlier ones were read through a state.
  forward.final_state = spec_.has_state() && (state_ || pending_ + given.length >= first_fold_);
  if (tokens_ > 0) with_state.initial_state = state();
  const MixerResult result = mixer_forward(spec_, with_state, forward);
  if (forward.final_state) {
    if (!state_) state_ = new_state();
    cpu::cache_load(spec_, shape_, result.final_state, state_);
    drop_window();
    tokens_ += given.length;
  } else {
    for (int64_t t = 0; t < given.length; ++t)
      append(token(inputs.k, t), token(inputs.v, t), token(inputs.log_decay, t));
  }
  return result.out;
}

Tensor MixerCache::state() const {
  require(spec_.has_state(), "mixer_cache.state: an exponential score has no state of constant size");
  const Tensor packed = state_ ? to_dtype(state_, DType::f32) : new_state();
  if (pending_ > 0) cpu::cache_fold(spec_, shape_, pages_, pending_, packed);
  const Tensor out = Tensor::empty({shape_.batch, shape_.heads, shape_.state_rows, shape_.state_columns}, DType::f32);
  cpu::cache_store(spec_, shape_, packed, out);
  return out;
}

}  // namespace furious
