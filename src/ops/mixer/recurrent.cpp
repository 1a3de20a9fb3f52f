#include "ops/mixer/recurrent.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "ops/elementwise.h"
#include "ops/mixer/recurrent_kernels.h"
#include "tensor/check.h"
#include "tensor/dispatch.h"

namespace furious {
namespace {

constexpr int64_t kMostTokens = int64_t{1} << 60;  // so that a count with more added is still a number
constexpr int64_t kLongestWindow = 64;

int64_t pages_for(int64_t tokens) {
  return (tokens + CachePage::kTokens - 1) / CachePage::kTokens;
}

// Of q, k and v.
std::vector<DType> dtypes_on(Device device) {
  return device.is_cpu() ? std::vector{DType::f32} : std::vector{DType::f32, DType::bf16};
}

}  // namespace

MixerCache::MixerCache(const MixerSpec& spec, const Sizes& sizes, Device device) : spec_(spec), device_(device) {
  const auto in_range = [](int64_t dim) { return dim >= kSmallestDim && dim <= kLargestDim; };
  require(in_range(sizes.qk_dim) && in_range(sizes.v_dim), "mixer_cache: dimensions {} and {}, expected {} to {}",
          sizes.qk_dim, sizes.v_dim, kSmallestDim, kLargestDim);
  const int64_t heads = std::max({sizes.q_heads, sizes.k_heads, sizes.v_heads});
  for (int64_t own : {sizes.q_heads, sizes.k_heads, sizes.v_heads})
    require(own >= 1 && heads % own == 0, "mixer_cache: {} heads, expected a divisor of {}", own, heads);
  require(sizes.batch >= 1, "mixer_cache: batch {}, expected 1 or more", sizes.batch);
  check_spec("mixer_cache", spec);
  shape_.batch = sizes.batch;
  shape_.length = 1;
  shape_.heads = heads;
  shape_.q_heads = sizes.q_heads;
  shape_.k_heads = sizes.k_heads;
  shape_.v_heads = sizes.v_heads;
  shape_.qk_dim = sizes.qk_dim;
  shape_.v_dim = sizes.v_dim;
  shape_.features = feature_map(spec, sizes.qk_dim);
  shape_.state_rows = state_rows(spec, sizes.qk_dim);
  shape_.state_columns = state_columns(spec, sizes.v_dim);
  shape_.scale = spec.scale > 0 ? spec.scale : 1.0f / std::sqrt(static_cast<float>(sizes.qk_dim));
  if (!has_state()) return;
  const int64_t token = sizes.k_heads * sizes.qk_dim + sizes.v_heads * sizes.v_dim + (spec.decay ? heads : 0);
  // Counted as on the CPU, so that every device folds at the same tokens.
  const int64_t state = heads * cpu::head_state_numbers(shape_);
  window_ = std::clamp<int64_t>(state / token, 1, kLongestWindow);
  // Whole pages of plain k and v that take no less than the state and the pages of a window.
  const int64_t page = CachePage::kTokens * token;
  first_fold_ = CachePage::kTokens * ((state + page - 1) / page + pages_for(window_));
}

MixerCache::MixerCache(const MixerSpec& spec, const Sizes& sizes, const MixerContents& contents, Device device)
    : MixerCache(spec, sizes, device) {
  const ArgumentCheck check("mixer_cache");
  const bool folded = contents.state.defined();
  require(!folded || has_state(), "mixer_cache: contents with a state, but there is none for {}", to_string(spec));
  require(spec.decay || !contents.log_decay, "mixer_cache: contents with decays, but the spec has no decay");
  const int64_t most = folded ? window_ : has_state() ? first_fold_ : contents.tokens;
  require(contents.pending >= 0 && contents.pending <= most && contents.pending <= contents.tokens &&
              contents.tokens <= kMostTokens && (folded || contents.pending == contents.tokens),
          "mixer_cache: {} tokens of {} in the window cannot be", contents.pending, contents.tokens);
  const auto dense = [&](std::string_view name, const Tensor& x, std::vector<int64_t> sizes_wanted) {
    check.dense(name, x, DType::f32, std::move(sizes_wanted), x.device());
    return to_device(x, device_);
  };
  if (folded) {
    const Tensor state =
        dense("state", contents.state, {shape_.batch, shape_.heads, shape_.state_rows, shape_.state_columns});
    state_ = new_state();
    FURIOUS_DISPATCH(device_, cache_load(spec_, shape_, state, state_));
  }
  recent_.tokens = contents.tokens;
  const int64_t pages = pages_kept(folded, contents.pending);
  if (pages == 0) return;
  constexpr int64_t kTokens = CachePage::kTokens;
  const Tensor k = dense("k", contents.k, {shape_.batch, pages, shape_.k_heads, kTokens, shape_.qk_dim});
  const Tensor v = dense("v", contents.v, {shape_.batch, pages, shape_.v_heads, kTokens, shape_.v_dim});
  Tensor log_decay;
  if (spec_.decay) log_decay = dense("log_decay", contents.log_decay, {shape_.batch, pages, shape_.heads, kTokens});
  reserve(pages * kTokens);
  for (int64_t p = 0; p < pages; ++p) {
    const CachePage& page = recent_.pages[p];
    copy(page.k, k.select(1, p));
    copy(page.v, v.select(1, p));
    if (spec_.decay) copy(page.log_decay, log_decay.select(1, p));
  }
  recent_.pending = contents.pending;
  FURIOUS_DISPATCH(device_, cache_window_changed(device_, shape_, recent_));
  if (spec_.decay) FURIOUS_DISPATCH(device_, cache_sum_decay(shape_, recent_));
}

int64_t MixerCache::pages_kept(bool folded, int64_t pending) const {
  return pages_for(folded ? window_ : pending);
}

MixerContents MixerCache::contents(Device where) const {
  MixerContents contents{recent_.tokens, recent_.pending, {}, {}, {}, {}};
  if (state_) {
    const Tensor state =
        Tensor::empty({shape_.batch, shape_.heads, shape_.state_rows, shape_.state_columns}, DType::f32, device_);
    FURIOUS_DISPATCH(device_, cache_store(spec_, shape_, state_, state));
    contents.state = to_device(state, where);
  }
  const int64_t pages = pages_kept(state_.defined(), recent_.pending);
  if (pages == 0) return contents;
  const auto gather = [&](Tensor CachePage::*member) {
    const Tensor page = new_page(DType::f32).*member;
    std::vector<int64_t> sizes(page.shape().begin(), page.shape().end());
    sizes.insert(sizes.begin() + 1, pages);
    const Tensor all = Tensor::zeros(Shape(sizes), DType::f32, device_);
    for (int64_t p = 0; p < pages_for(recent_.pending); ++p) {
      const int64_t used = std::min(CachePage::kTokens, recent_.pending - p * CachePage::kTokens);
      copy(all.select(1, p).slice(2, 0, used), (recent_.pages[p].*member).slice(2, 0, used));
    }
    return to_device(all, where);
  };
  contents.k = gather(&CachePage::k);
  contents.v = gather(&CachePage::v);
  if (spec_.decay) contents.log_decay = gather(&CachePage::log_decay);
  return contents;
}

int64_t MixerCache::bytes() const {
  size_t sum = state_ ? state_.bytes() : 0;
  for (const CachePage& page : recent_.pages)
    for (const Tensor& x : {page.k, page.v, page.log_decay, page.total}) sum += x ? x.bytes() : 0;
  return static_cast<int64_t>(sum);
}

CachePage MixerCache::new_page(DType dtype) const {
  CachePage page;
  page.k = Tensor::empty({shape_.batch, shape_.k_heads, CachePage::kTokens, shape_.qk_dim}, dtype, device_);
  page.v = Tensor::empty({shape_.batch, shape_.v_heads, CachePage::kTokens, shape_.v_dim}, dtype, device_);
  const Shape decays{shape_.batch, shape_.heads, CachePage::kTokens};
  if (spec_.decay) page.log_decay = Tensor::empty(decays, DType::f32, device_);
  if (spec_.decay && !device_.is_cpu()) page.total = Tensor::empty(decays, DType::f64, device_);
  return page;
}

// Makes room for so many pending tokens.
void MixerCache::reserve(int64_t tokens) {
  std::vector<CachePage>& pages = recent_.pages;
  if (static_cast<int64_t>(pages.size()) >= pages_for(tokens)) return;
  while (static_cast<int64_t>(pages.size()) < pages_for(tokens)) pages.push_back(new_page(dtype_));
  FURIOUS_DISPATCH(device_, cache_window_changed(device_, shape_, recent_));
}

// From here on the pages hold k and v so: as the model computes, which a cache made from contents cannot know before.
void MixerCache::keep_as(DType dtype) {
  if (dtype == dtype_) return;
  dtype_ = dtype;
  for (CachePage& page : recent_.pages) {
    page.k = to_dtype(page.k, dtype);
    page.v = to_dtype(page.v, dtype);
  }
  recent_.listed = 0;
  FURIOUS_DISPATCH(device_, cache_window_changed(device_, shape_, recent_));
}

Tensor MixerCache::new_state() const {
  const int64_t numbers = FURIOUS_DISPATCH(device_, head_state_numbers(shape_));
  return Tensor::zeros({shape_.batch, shape_.heads, numbers}, DType::f32, device_);
}

void MixerCache::fold() {
  if (!state_) state_ = new_state();
  FURIOUS_DISPATCH(device_, cache_fold(spec_, shape_, recent_, state_));
  drop_window();
}

void MixerCache::drop_window() {
  recent_.pending = 0;
  // The pages of a window are used again; those of the long first window go back.
  recent_.pages.resize(std::min<size_t>(recent_.pages.size(), pages_for(window_)));
  FURIOUS_DISPATCH(device_, cache_window_changed(device_, shape_, recent_));
}

Tensor MixerCache::step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay) {
  const ArgumentCheck check("mixer_cache.step");
  check.present("q", q);
  const std::vector<DType> dtypes = dtypes_on(device_);
  const auto check_rows = [&](std::string_view argument, const Tensor& x, int64_t heads, int64_t dim) {
    check.shape(argument, x, {shape_.batch, heads, dim});
    check.dtype(argument, x, dtypes);
    check.dtype(argument, x, {q.dtype()});
    check.device(argument, x, device_);
    check.unit_inner_stride(argument, x);
  };
  check_rows("q", q, shape_.q_heads, shape_.qk_dim);
  check_rows("k", k, shape_.k_heads, shape_.qk_dim);
  check_rows("v", v, shape_.v_heads, shape_.v_dim);
  require(spec_.decay == log_decay.defined(), "mixer_cache.step: argument \"log_decay\" {}",
          spec_.decay ? "is missing, but the spec has decay" : "was given, but the spec has no decay");
  if (spec_.decay) {
    check.dense("log_decay", log_decay, DType::f32, {shape_.batch, shape_.heads}, device_);
    for (int64_t i = 0; device_.is_cpu() && i < log_decay.elements(); ++i)
      require(std::isfinite(log_decay.data<float>()[i]) && (spec_.signed_decay || log_decay.data<float>()[i] <= 0),
              "mixer_cache.step: argument \"log_decay\" holds {}, expected finite values{}", log_decay.data<float>()[i],
              spec_.signed_decay ? "" : " of at most 0");
  }
  const bool early = prepared_;
  make_room(q.dtype());
  const Tensor out = Tensor::empty({shape_.batch, shape_.heads, shape_.v_dim}, q.dtype(), device_);
  FURIOUS_DISPATCH(device_, cache_step(spec_, shape_, recent_, state_, q, k, v, log_decay, out, early));
  advance();
  return out;
}

void MixerCache::prepare(DType dtype) {
  make_room(dtype);
  prepared_ = true;
}

void MixerCache::make_room(DType dtype) {
  keep_as(dtype);
  if (first_fold_ > 0 && recent_.pending >= (state_ ? window_ : first_fold_)) fold();
  reserve(recent_.pending + 1);
}

std::array<const void*, 4> MixerCache::recording() const {
  const int64_t pieces = recent_.pending / kStepTokens;
  return {state_.raw(), recent_.table.raw(), recent_.counters.raw(), reinterpret_cast<const void*>(pieces)};
}

void MixerCache::advance() {
  ++recent_.pending;
  ++recent_.tokens;
  prepared_ = false;
}

Tensor MixerCache::prefill(const MixerInputs& inputs, const MixerOptions& options) {
  constexpr std::string_view kOperation = "mixer_cache.prefill";
  const MixerShape given = check_mixer(kOperation, spec_, inputs, options.form);
  const ArgumentCheck check(kOperation);
  check.shape("q", inputs.q, {shape_.batch, given.length, shape_.q_heads, shape_.qk_dim});
  check.shape("k", inputs.k, {shape_.batch, given.length, shape_.k_heads, shape_.qk_dim});
  check.shape("v", inputs.v, {shape_.batch, given.length, shape_.v_heads, shape_.v_dim});
  check.dtype("q", inputs.q, dtypes_on(device_));
  check.device("q", inputs.q, device_);
  require(!inputs.boundaries && !inputs.initial_state,
          "{}: boundaries and an initial state are not taken; the cache is the state", kOperation);
  const auto token = [&](const Tensor& x, int64_t t) { return x ? x.select(1, t) : Tensor(); };
  if (recent_.tokens > 0 && !has_state()) {  // a KV cache grows token by token
    const Tensor out =
        Tensor::empty({shape_.batch, given.length, shape_.heads, shape_.v_dim}, inputs.v.dtype(), device_);
    for (int64_t t = 0; t < given.length; ++t) {
      const Tensor decay = spec_.decay ? to_dtype(token(inputs.log_decay, t), DType::f32) : Tensor();
      copy(out.select(1, t), step(token(inputs.q, t), token(inputs.k, t), token(inputs.v, t), decay));
    }
    return out;
  }
  MixerInputs with_state = inputs;
  MixerOptions forward = options;
  keep_as(inputs.q.dtype());
  // Tokens that still fit into the first window stay plain, also when earlier ones were read through a state.
  forward.final_state = has_state() && (state_ || recent_.pending + given.length >= first_fold_);
  if (recent_.tokens > 0) with_state.initial_state = state();
  const MixerResult result = mixer_forward(spec_, with_state, forward);
  recent_.tokens += given.length;
  if (forward.final_state) {
    if (!state_) state_ = new_state();
    FURIOUS_DISPATCH(device_, cache_load(spec_, shape_, result.final_state, state_));
    drop_window();
  } else {
    reserve(recent_.pending + given.length);
    FURIOUS_DISPATCH(device_, cache_append(spec_, shape_, recent_, inputs.k, inputs.v, inputs.log_decay));
    recent_.pending += given.length;
    FURIOUS_DISPATCH(device_, cache_window_changed(device_, shape_, recent_));
  }
  return result.out;
}

Tensor MixerCache::state() const {
  require(has_state(), "mixer_cache.state: there is no state of constant size for {}", to_string(spec_));
  const Tensor packed = state_ ? to_dtype(state_, DType::f32) : new_state();
  if (recent_.pending > 0) FURIOUS_DISPATCH(device_, cache_fold(spec_, shape_, recent_, packed));
  const Tensor out =
      Tensor::empty({shape_.batch, shape_.heads, shape_.state_rows, shape_.state_columns}, DType::f32, device_);
  FURIOUS_DISPATCH(device_, cache_store(spec_, shape_, packed, out));
  return out;
}

}  // namespace furious
