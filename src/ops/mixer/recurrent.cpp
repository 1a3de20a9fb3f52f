#include "ops/mixer/recurrent.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

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

// Memory in steps of an eighth to a quarter of its size. A prompt that is read in chunks asks for a little more each
// time: of exact sizes the caching allocator could use none again, would hold the sum of all, and ask a GPU for each.
Tensor growing(const Shape& shape, DType dtype, Device device) {
  const auto elements = static_cast<uint64_t>(shape.elements());
  const uint64_t step = std::max<uint64_t>(std::bit_ceil(elements) / 8, 1);
  const auto rounded = static_cast<int64_t>((elements + step - 1) / step * step);
  return Tensor::empty({rounded}, dtype, device).slice(0, 0, shape.elements()).view(shape);
}

}  // namespace

MixerCache::MixerCache(const MixerSpec& spec, const Sizes& sizes, Device device) : spec_(spec), device_(device) {
  const auto in_range = [](int64_t dim) { return dim >= kSmallestDim && dim <= kLargestDim; };
  require(in_range(sizes.qk_dim) && in_range(sizes.v_dim), "mixer_cache: dimensions {} and {}, expected {} to {}",
          sizes.qk_dim, sizes.v_dim, kSmallestDim, kLargestDim);
  const int64_t heads = std::max({sizes.q_heads, sizes.k_heads, sizes.v_heads});
  for (int64_t own : {sizes.q_heads, sizes.k_heads, sizes.v_heads})
    require(own >= 1 && heads % own == 0, "mixer_cache: {} heads, expected a divisor of {}", own, heads);
  const int64_t decay_heads = sizes.decay_heads > 0 ? sizes.decay_heads : heads;
  require(heads % decay_heads == 0, "mixer_cache: {} heads of decay, expected a divisor of {}", decay_heads, heads);
  require(sizes.slots >= 1, "mixer_cache: {} slots, expected 1 or more", sizes.slots);
  check_spec("mixer_cache", spec);
  shape_.batch = 1;
  shape_.length = 1;
  shape_.heads = heads;
  shape_.q_heads = sizes.q_heads;
  shape_.k_heads = sizes.k_heads;
  shape_.v_heads = sizes.v_heads;
  shape_.decay_heads = decay_heads;
  shape_.state_heads = std::lcm(std::lcm(sizes.k_heads, sizes.v_heads), spec.decay ? decay_heads : 1);
  shape_.qk_dim = sizes.qk_dim;
  shape_.v_dim = sizes.v_dim;
  shape_.features = feature_map(spec, sizes.qk_dim);
  shape_.state_rows = state_rows(spec, sizes.qk_dim);
  shape_.state_columns = state_columns(spec, sizes.v_dim);
  shape_.scale = spec.scale > 0 ? spec.scale : 1.0f / std::sqrt(static_cast<float>(sizes.qk_dim));
  slots_.resize(static_cast<size_t>(sizes.slots));
  records_ = FURIOUS_DISPATCH(device_, new_records(shape_, sizes.slots, device_));
  if (!has_state()) return;
  const int64_t token = sizes.k_heads * sizes.qk_dim + sizes.v_heads * sizes.v_dim + (spec.decay ? decay_heads : 0);
  // Counted as on the CPU, so that every device folds at the same tokens.
  const int64_t state = shape_.state_heads * cpu::head_state_numbers(shape_);
  window_ = std::clamp<int64_t>(state / token, 1, kLongestWindow);
  // Whole pages of plain k and v that take no less than the state and the pages of a window.
  const int64_t page = CachePage::kTokens * token;
  first_fold_ = CachePage::kTokens * ((state + page - 1) / page + pages_for(window_));
}

const CacheSlot& MixerCache::at(int64_t slot) const {
  require(slot >= 0 && slot < slots(), "mixer_cache: slot {}, expected 0 to {}", slot, slots() - 1);
  return slots_[static_cast<size_t>(slot)];
}

CacheSlot& MixerCache::at(int64_t slot) {
  return const_cast<CacheSlot&>(std::as_const(*this).at(slot));
}

// To be called when anything of a slot has changed but by advance().
void MixerCache::changed(int64_t slot) {
  const auto index = static_cast<int32_t>(slot);
  FURIOUS_DISPATCH(device_, cache_slots_changed(records_, slots_, {&index, 1}));
}

int64_t MixerCache::pages_kept(bool folded, int64_t pending) const {
  return pages_for(folded ? window_ : pending);
}

void MixerCache::restore(int64_t index, const MixerContents& contents) {
  CacheSlot& slot = at(index);
  const ArgumentCheck check("mixer_cache");
  const bool folded = contents.state.defined();
  require(!folded || has_state(), "mixer_cache: contents with a state, but there is none for {}", to_string(spec_));
  require(spec_.decay || !contents.log_decay, "mixer_cache: contents with decays, but the spec has no decay");
  const int64_t most = folded ? window_ : has_state() ? first_fold_ : contents.tokens;
  const int64_t fewest = spec_.window > 0 ? std::min(contents.tokens, spec_.window - 1) : contents.tokens;
  require(contents.pending >= 0 && contents.pending <= most && contents.pending <= contents.tokens &&
              contents.tokens <= kMostTokens && (folded || contents.pending >= fewest),
          "mixer_cache: {} tokens of {} in the window cannot be", contents.pending, contents.tokens);
  const auto dense = [&](std::string_view name, const Tensor& x, std::vector<int64_t> sizes) {
    check.dense(name, x, DType::f32, std::move(sizes), x.device());
    return to_device(x, device_);
  };
  constexpr int64_t kTokens = CachePage::kTokens;
  const int64_t pages = pages_kept(folded, contents.pending);
  Tensor state, k, v, log_decay;
  if (folded) state = dense("state", contents.state, {1, shape_.state_heads, shape_.state_rows, shape_.state_columns});
  if (pages > 0) {
    k = dense("k", contents.k, {1, pages, shape_.k_heads, kTokens, shape_.qk_dim});
    v = dense("v", contents.v, {1, pages, shape_.v_heads, kTokens, shape_.v_dim});
    if (spec_.decay) log_decay = dense("log_decay", contents.log_decay, {1, pages, shape_.decay_heads, kTokens});
  }
  slot = {};
  if (folded) {
    slot.state = new_state();
    FURIOUS_DISPATCH(device_, cache_load(spec_, shape_, state, slot.state));
  }
  reserve(slot, pages * kTokens);
  for (int64_t p = 0; p < pages; ++p) {
    const CachePage& page = slot.pages[p];
    furious::copy(page.k, k.select(0, 0).select(0, p));
    furious::copy(page.v, v.select(0, 0).select(0, p));
    if (spec_.decay) furious::copy(page.log_decay, log_decay.select(0, 0).select(0, p));
  }
  slot.tokens = contents.tokens;
  slot.pending = contents.pending;
  changed(index);
  if (spec_.decay && slot.pending > 0) FURIOUS_DISPATCH(device_, cache_sum_decay(spec_, shape_, slot));
}

MixerContents MixerCache::contents(int64_t index, Device where) const {
  const CacheSlot& slot = at(index);
  MixerContents contents{slot.tokens, slot.pending, {}, {}, {}, {}};
  if (slot.state) {
    const Tensor state =
        Tensor::empty({1, shape_.state_heads, shape_.state_rows, shape_.state_columns}, DType::f32, device_);
    FURIOUS_DISPATCH(device_, cache_store(spec_, shape_, slot.state, state));
    contents.state = to_device(state, where);
  }
  const int64_t pages = pages_kept(slot.state.defined(), slot.pending);
  if (pages == 0) return contents;
  const auto gather = [&](Tensor CachePage::*member, int64_t heads, int64_t dim) {
    const Shape shape =
        dim > 0 ? Shape{1, pages, heads, CachePage::kTokens, dim} : Shape{1, pages, heads, CachePage::kTokens};
    const Tensor all = Tensor::zeros(shape, DType::f32, device_);
    for (int64_t p = 0; p < pages_for(slot.pending); ++p) {
      const int64_t used = std::min(CachePage::kTokens, slot.pending - p * CachePage::kTokens);
      furious::copy(all.select(0, 0).select(0, p).slice(1, 0, used), (slot.pages[p].*member).slice(1, 0, used));
    }
    return to_device(all, where);
  };
  contents.k = gather(&CachePage::k, shape_.k_heads, shape_.qk_dim);
  contents.v = gather(&CachePage::v, shape_.v_heads, shape_.v_dim);
  if (spec_.decay) contents.log_decay = gather(&CachePage::log_decay, shape_.decay_heads, 0);
  return contents;
}

void MixerCache::clear(int64_t slot) {
  at(slot) = {};
  changed(slot);
}

void MixerCache::copy(int64_t from, int64_t to) {
  const CacheSlot& source = at(from);
  CacheSlot& target = at(to);
  if (from == to) return;
  target = {};
  if (source.state) {
    target.state = Tensor::empty_like(source.state);
    furious::copy(target.state, source.state);
  }
  for (int64_t p = 0; p < pages_for(source.pending); ++p) {
    target.pages.push_back(new_page());
    furious::copy(target.pages.back().memory, source.pages[p].memory);
  }
  target.pending = source.pending;
  target.tokens = source.tokens;
  changed(to);
}

int64_t MixerCache::bytes(int64_t index) const {
  const CacheSlot& slot = at(index);
  size_t sum = slot.state ? slot.state.bytes() : 0;
  for (const CachePage& page : slot.pages) sum += page.memory.bytes();
  return static_cast<int64_t>(sum);
}

int64_t MixerCache::bytes() const {
  int64_t sum = 0;
  for (int64_t slot = 0; slot < slots(); ++slot) sum += bytes(slot);
  return sum;
}

CachePage MixerCache::new_page() const {
  const PageLayout layout(shape_, spec_.decay, dtype_, !device_.is_cpu());
  CachePage page;
  page.memory = Tensor::empty({layout.bytes / 4}, DType::i32, device_);
  const auto owner = std::make_shared<Tensor>(page.memory);
  const auto part = [&](int64_t begin, const Shape& shape, DType dtype) {
    return Tensor::wrap(static_cast<char*>(page.memory.raw()) + begin, shape, dtype, device_, owner);
  };
  page.k = part(0, {shape_.k_heads, CachePage::kTokens, shape_.qk_dim}, dtype_);
  page.v = part(layout.v, {shape_.v_heads, CachePage::kTokens, shape_.v_dim}, dtype_);
  if (spec_.decay) page.log_decay = part(layout.log_decay, {shape_.decay_heads, CachePage::kTokens}, DType::f32);
  return page;
}

// Makes room for so many pending tokens. Whether that took a page.
bool MixerCache::reserve(CacheSlot& slot, int64_t tokens) {
  const size_t before = slot.pages.size();
  while (static_cast<int64_t>(slot.pages.size()) < pages_for(tokens)) slot.pages.push_back(new_page());
  return slot.pages.size() > before;
}

// From here on the pages hold k and v so: as the model computes, which a slot made from contents cannot know before.
void MixerCache::keep_as(DType dtype) {
  if (dtype == dtype_) return;
  dtype_ = dtype;
  for (int64_t index = 0; index < slots(); ++index) {
    CacheSlot& slot = slots_[static_cast<size_t>(index)];
    if (slot.pages.empty()) continue;
    for (CachePage& page : slot.pages) {
      const CachePage before = std::exchange(page, new_page());
      furious::copy(page.k, before.k);
      furious::copy(page.v, before.v);
      if (spec_.decay) furious::copy(page.log_decay, before.log_decay);
    }
    slot.listed = 0;
    changed(index);
    if (spec_.decay && slot.pending > 0) FURIOUS_DISPATCH(device_, cache_sum_decay(spec_, shape_, slot));
  }
}

Tensor MixerCache::new_state() const {
  const int64_t numbers = FURIOUS_DISPATCH(device_, head_state_numbers(shape_));
  return Tensor::zeros({shape_.state_heads, numbers}, DType::f32, device_);
}

void MixerCache::drop_window(CacheSlot& slot) {
  slot.pending = 0;
  // The pages of a window are used again; those of the long first window go back.
  slot.pages.resize(std::min<size_t>(slot.pages.size(), pages_for(window_)));
}

// Drops the pages that the sliding window of the next token does not reach. Whether there were any.
bool MixerCache::drop_passed(CacheSlot& slot) {
  if (spec_.window == 0) return false;
  const int64_t passed = std::max<int64_t>(0, slot.pending + 1 - spec_.window) / CachePage::kTokens;
  if (passed == 0) return false;
  slot.pages.erase(slot.pages.begin(), slot.pages.begin() + passed);
  slot.pending -= passed * CachePage::kTokens;
  slot.listed = 0;
  return true;
}

Tensor MixerCache::step(const SlotRows& rows, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& log_decay) {
  const ArgumentCheck check("mixer_cache.step");
  check.present("q", q);
  check_slots(check, rows, ArgumentCheck::kAny, slots(), device_);
  const std::vector<DType> dtypes = dtypes_on(device_);
  const auto check_token = [&](std::string_view argument, const Tensor& x, int64_t heads, int64_t dim) {
    check.shape(argument, x, {rows.size(), heads, dim});
    check.dtype(argument, x, dtypes);
    check.dtype(argument, x, {q.dtype()});
    check.device(argument, x, device_);
    check.unit_inner_stride(argument, x);
  };
  check_token("q", q, shape_.q_heads, shape_.qk_dim);
  check_token("k", k, shape_.k_heads, shape_.qk_dim);
  check_token("v", v, shape_.v_heads, shape_.v_dim);
  require(spec_.decay == log_decay.defined(), "mixer_cache.step: argument \"log_decay\" {}",
          spec_.decay ? "is missing, but the spec has decay" : "was given, but the spec has no decay");
  if (spec_.decay) {
    check.dense("log_decay", log_decay, DType::f32, {rows.size(), shape_.decay_heads}, device_);
    for (int64_t i = 0; device_.is_cpu() && i < log_decay.elements(); ++i)
      require(std::isfinite(log_decay.data<float>()[i]) && (spec_.signed_decay || log_decay.data<float>()[i] <= 0),
              "mixer_cache.step: argument \"log_decay\" holds {}, expected finite values{}", log_decay.data<float>()[i],
              spec_.signed_decay ? "" : " of at most 0");
  }
  const Tensor out = Tensor::empty({rows.size(), shape_.heads, shape_.v_dim}, q.dtype(), device_);
  if (rows.size() == 0) return out;
  const bool early =
      q.dtype() == dtype_ && std::ranges::all_of(rows.slots, [&](int32_t slot) { return slots_[slot].prepared; });
  if (!early) make_room(rows, q.dtype());
  FURIOUS_DISPATCH(device_, cache_step(spec_, shape_, records_, slots_, rows, q, k, v, log_decay, out, early));
  advance(rows);
  return out;
}

void MixerCache::prepare(const SlotRows& rows, DType dtype) {
  check_slots(ArgumentCheck("mixer_cache.prepare"), rows, ArgumentCheck::kAny, slots(), device_);
  make_room(rows, dtype);
  for (int32_t slot : rows.slots) slots_[slot].prepared = true;
}

void MixerCache::make_room(const SlotRows& rows, DType dtype) {
  keep_as(dtype);
  std::vector<CacheFold> folds;
  std::vector<int32_t> changed_slots;
  for (int32_t index : rows.slots) {
    CacheSlot& slot = slots_[index];
    if (first_fold_ == 0 || slot.pending < (slot.state ? window_ : first_fold_)) continue;
    if (!slot.state) slot.state = new_state();
    folds.push_back({&slot, slot.state});
    changed_slots.push_back(index);
  }
  if (!folds.empty()) FURIOUS_DISPATCH(device_, cache_fold(spec_, shape_, folds));
  for (int32_t index : changed_slots) drop_window(slots_[index]);  // which leaves room for the next token
  for (int32_t index : rows.slots) {
    const bool dropped = drop_passed(slots_[index]);
    if (reserve(slots_[index], slots_[index].pending + 1) || dropped) changed_slots.push_back(index);
  }
  if (!changed_slots.empty()) FURIOUS_DISPATCH(device_, cache_slots_changed(records_, slots_, changed_slots));
}

std::vector<int64_t> MixerCache::recording(const SlotRows& rows) const {
  const auto address = [](const Tensor& x) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(x.raw())); };
  int64_t longest = 0, any_state = 0;
  for (int32_t index : rows.slots) {
    const CacheSlot& slot = at(index);
    longest = std::max(longest, slot.pending);
    if (slot.state) any_state = 1;
  }
  return {address(records_.slots), address(records_.done), address(rows.table), rows.size(), any_state,
          longest / kStepTokens};
}

void MixerCache::advance(const SlotRows& rows) {
  for (int32_t index : rows.slots) {
    CacheSlot& slot = at(index);
    ++slot.pending;
    ++slot.tokens;
    slot.prepared = false;
  }
}

Tensor MixerCache::positions() const {
  if (records_.slots) return records_.slots.select(1, CacheRecords::kTokensWord);
  const Tensor positions = Tensor::empty({slots()}, DType::i32);
  for (int64_t slot = 0; slot < slots(); ++slot)
    positions.data<int32_t>()[slot] = static_cast<int32_t>(slots_[static_cast<size_t>(slot)].tokens);
  return positions;
}

// Adds tokens [1, count, heads, dim] to the pages of a slot.
void MixerCache::append(int64_t index, const MixerInputs& inputs) {
  CacheSlot& slot = at(index);
  const int64_t count = inputs.k.size(1);
  if (reserve(slot, slot.pending + count)) changed(index);  // where the kernels look for the pages
  FURIOUS_DISPATCH(device_, cache_append(spec_, shape_, slot, inputs.k, inputs.v, inputs.log_decay));
  slot.pending += count;
  slot.tokens += count;
  slot.prepared = false;
  changed(index);
}

Tensor MixerCache::prefill(std::span<const SlotTokens> slots, const MixerInputs& inputs, const MixerOptions& options) {
  constexpr std::string_view kOperation = "mixer_cache.prefill";
  if (slots.size() == 1) return prefill(slots[0].slot, inputs, options);
  const ArgumentCheck check(kOperation);
  int64_t total = 0;
  bool documents = true;
  std::vector<int32_t> starts;
  for (const SlotTokens& own : slots) {
    const CacheSlot& slot = at(own.slot);
    require(own.count > 0, "{}: {} tokens of slot {}, expected 1 or more", kOperation, own.count, own.slot);
    require(std::ranges::count(slots, own.slot, &SlotTokens::slot) == 1, "{}: slot {} is listed twice; list it once",
            kOperation, own.slot);
    documents = documents && slot.tokens == 0 && (!has_state() || own.count < first_fold_);
    starts.push_back(static_cast<int32_t>(total));
    total += own.count;
  }
  check.shape("q", inputs.q, {1, total, shape_.q_heads, shape_.qk_dim});
  check.shape("k", inputs.k, {1, total, shape_.k_heads, shape_.qk_dim});
  check.shape("v", inputs.v, {1, total, shape_.v_heads, shape_.v_dim});
  if (spec_.decay) check.shape("log_decay", inputs.log_decay, {1, total, shape_.decay_heads});
  check.dtype("q", inputs.q, dtypes_on(device_));
  check.device("q", inputs.q, device_);
  const auto part = [&](size_t i) {
    const auto cut = [&](const Tensor& x) { return x ? x.slice(1, starts[i], slots[i].count) : x; };
    return MixerInputs{cut(inputs.q),         cut(inputs.k),     cut(inputs.v),
                       cut(inputs.log_decay), inputs.boundaries, inputs.initial_state};
  };
  if (!documents) {
    const Tensor out = Tensor::empty({1, total, shape_.heads, shape_.v_dim}, inputs.v.dtype(), device_);
    for (size_t i = 0; i < slots.size(); ++i)
      furious::copy(out.slice(1, starts[i], slots[i].count), prefill(slots[i].slot, part(i), options));
    return out;
  }
  require(!inputs.boundaries && !inputs.initial_state && inputs.first_query == 0,
          "{}: boundaries, an initial state and a first query are not supported; the cache is the state", kOperation);
  MixerInputs packed = inputs;
  packed.boundaries = Tensor::empty({static_cast<int64_t>(starts.size())}, DType::i32);
  std::ranges::copy(starts, packed.boundaries.data<int32_t>());
  const Tensor out = mixer_forward(spec_, packed, options).out;
  keep_as(inputs.q.dtype());
  for (size_t i = 0; i < slots.size(); ++i) {
    append(slots[i].slot, part(i));
    if (drop_passed(at(slots[i].slot))) changed(slots[i].slot);
  }
  return out;
}

Tensor MixerCache::prefill(int64_t index, const MixerInputs& inputs, const MixerOptions& options) {
  constexpr std::string_view kOperation = "mixer_cache.prefill";
  CacheSlot& slot = at(index);
  const MixerShape given = check_mixer(kOperation, spec_, inputs, options.form);
  const ArgumentCheck check(kOperation);
  check.shape("q", inputs.q, {1, given.length, shape_.q_heads, shape_.qk_dim});
  check.shape("k", inputs.k, {1, given.length, shape_.k_heads, shape_.qk_dim});
  check.shape("v", inputs.v, {1, given.length, shape_.v_heads, shape_.v_dim});
  if (spec_.decay) check.shape("log_decay", inputs.log_decay, {1, given.length, shape_.decay_heads});
  check.dtype("q", inputs.q, dtypes_on(device_));
  check.device("q", inputs.q, device_);
  require(!inputs.boundaries && !inputs.initial_state && inputs.first_query == 0,
          "{}: boundaries, an initial state and a first query are not supported; the cache is the state", kOperation);
  keep_as(inputs.q.dtype());
  slot.prepared = false;
  const bool folds = has_state() && (slot.state || slot.pending + given.length >= first_fold_);
  // What is no state yet is read as it is: to make a state of all of it for every chunk would take quadratic time.
  if (slot.tokens > 0 && !folds) {
    append(index, inputs);
    Tensor out;
    if (device_.is_cpu() && options.form != Form::reference) {
      out = Tensor::empty({1, given.length, shape_.heads, shape_.v_dim}, inputs.v.dtype());
      cpu::cache_read(spec_, shape_, slot, inputs.q, out);
    } else {
      MixerOptions forward = options;
      if (forward.form == Form::chunked) forward.form = Form::automatic;
      out = mixer_forward(spec_, all_pending(slot, inputs.q), forward).out;
    }
    if (drop_passed(slot)) changed(index);
    return out;
  }
  MixerInputs with_state = inputs;
  MixerOptions forward = options;
  forward.final_state = folds;
  if (slot.tokens > 0) with_state.initial_state = state(index);
  const MixerResult result = mixer_forward(spec_, with_state, forward);
  if (!forward.final_state) {
    append(index, inputs);
    if (drop_passed(slot)) changed(index);
    return result.out;
  }
  if (!slot.state) slot.state = new_state();
  FURIOUS_DISPATCH(device_, cache_load(spec_, shape_, shared_states(result.final_state), slot.state));
  drop_window(slot);
  slot.tokens += given.length;
  changed(index);
  return result.out;
}

// All tokens of a KV cache, with queries for the last of them.
MixerInputs MixerCache::all_pending(const CacheSlot& slot, const Tensor& q) const {
  MixerInputs all;
  all.q = q;
  all.first_query = slot.pending - q.size(1);
  all.k = growing({1, slot.pending, shape_.k_heads, shape_.qk_dim}, dtype_, device_);
  all.v = growing({1, slot.pending, shape_.v_heads, shape_.v_dim}, dtype_, device_);
  if (spec_.decay) all.log_decay = growing({1, slot.pending, shape_.decay_heads}, DType::f32, device_);
  FURIOUS_DISPATCH(device_, cache_gather(spec_, shape_, slot, all.k, all.v, all.log_decay));
  return all;
}

Tensor MixerCache::state(int64_t index) const {
  const CacheSlot& slot = at(index);
  require(has_state(), "mixer_cache.state: there is no state of constant size for {}", to_string(spec_));
  const bool has_pending = slot.pending > 0;  // otherwise the slot's own state is all
  const Tensor packed = !slot.state ? new_state() : has_pending ? to_dtype(slot.state, DType::f32) : slot.state;
  const CacheFold fold{&slot, packed};
  if (has_pending) FURIOUS_DISPATCH(device_, cache_fold(spec_, shape_, {&fold, 1}));
  const Tensor own =
      Tensor::empty({1, shape_.state_heads, shape_.state_rows, shape_.state_columns}, DType::f32, device_);
  FURIOUS_DISPATCH(device_, cache_store(spec_, shape_, packed, own));
  const int64_t sharers = shape_.heads / shape_.state_heads;
  if (sharers == 1) return own;
  const Tensor out = Tensor::empty({1, shape_.heads, shape_.state_rows, shape_.state_columns}, DType::f32, device_);
  const Tensor groups = out.select(0, 0).split_dim(0, shape_.state_heads, sharers);
  for (int64_t i = 0; i < sharers; ++i) furious::copy(groups.select(1, i), own.select(0, 0));
  return out;
}

// Of the states of all heads, [1, heads, D, columns], one for each group of heads whose states are the same.
Tensor MixerCache::shared_states(const Tensor& all) const {
  const int64_t sharers = shape_.heads / shape_.state_heads;
  if (sharers == 1) return all;
  const Tensor own = Tensor::empty({1, shape_.state_heads, all.size(2), all.size(3)}, DType::f32, device_);
  furious::copy(own.select(0, 0), all.select(0, 0).split_dim(0, shape_.state_heads, sharers).select(1, 0));
  return own;
}

}  // namespace furious
