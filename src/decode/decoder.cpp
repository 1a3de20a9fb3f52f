#include "decode/decoder.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "decode/token_linear.h"
#include "decode/token_program.h"
#include "ops/elementwise.h"
#include "ops/nn/conv.h"
#include "ops/nn/cross_entropy.h"
#include "ops/nn/embedding.h"
#include "ops/nn/linear.h"
#include "ops/nn/rms_norm.h"
#include "tensor/check.h"
#include "tensor/graph.h"

namespace furious {
namespace {

MixerCache::Sizes cache_sizes(const ModelConfig& config, int64_t slots) {
  return {slots, config.q_heads, config.k_heads, config.v_heads, config.qk_dim, config.head_dim, config.decays()};
}

// [rows, 1, …] as [rows, …].
Tensor without_length(const Variable& x) {
  return x ? x.value().select(1, 0) : Tensor();
}
Variable with_length(const Tensor& x) {
  std::vector<int64_t> sizes(x.shape().begin(), x.shape().end());
  sizes.insert(sizes.begin() + 1, 1);
  return Variable(x.view(Shape(sizes)));
}

// Calls f(name, tensor) for each tensor of a slot in a layer.
void for_each_tensor(size_t layer, auto& mixer, auto& conv, auto&& f) {
  const std::string prefix = fmt::format("layers.{}.", layer);
  f(prefix + "k", mixer.k);
  f(prefix + "v", mixer.v);
  f(prefix + "log_decay", mixer.log_decay);
  f(prefix + "state", mixer.state);
  f(prefix + "conv", conv);
}

// Of a token by its row of logits, on the CPU.
double log_probability(const Tensor& logits, int32_t token) {
  const std::span row(logits.data<float>(), static_cast<size_t>(logits.elements()));
  const double largest = std::ranges::max(row);
  double sum = 0;
  for (const float logit : row) sum += std::exp(static_cast<double>(logit) - largest);
  return static_cast<double>(row[static_cast<size_t>(token)]) - largest - std::log(sum);
}

bool is_largest(const Tensor& logits, int32_t token) {
  const std::span row(logits.data<float>(), static_cast<size_t>(logits.elements()));
  return std::ranges::max_element(row) - row.begin() == token;
}

}  // namespace

ChosenTokens::ChosenTokens(const Choice& choice) : ids_(choice.ids) {
  if (!choice.log_probabilities) return;
  best_.emplace(choice.best);
  log_probabilities_.emplace(choice.log_probabilities);
}

std::vector<int32_t> ChosenTokens::wait() const {
  const Tensor known = ids_.wait();
  require_finite_logits(known);
  std::vector<int32_t> ids;
  for (int64_t row = 0; row < known.size(0); ++row) ids.push_back(known.data<int32_t>()[2 * row]);
  return ids;
}

bool ChosenTokens::finite(size_t row) const {
  return ids_.wait().data<int32_t>()[2 * row + 1] == 1;
}

WrittenToken ChosenTokens::token(size_t row) const {
  const int32_t id = ids_.wait().data<int32_t>()[2 * row];
  if (!best_) return {{id, 0}, {}};
  const Tensor ids = best().select(0, static_cast<int64_t>(row));
  const Tensor logs = log_probabilities().select(0, static_cast<int64_t>(row));
  const auto column = [&](int64_t i) {
    return TokenLogProbability{ids.data<int32_t>()[i], static_cast<double>(logs.data<float>()[i])};
  };
  if (column(0).id < 0) return {{id, 0}, {}};  // other rows asked, this one did not
  WrittenToken token{column(0), {}};
  for (int64_t i = 1; i < ids.size(0) && column(i).id >= 0; ++i) token.most_probable.push_back(column(i));
  return token;
}

Tensor ChosenTokens::best() const {
  return best_ ? best_->wait() : Tensor();
}

Tensor ChosenTokens::log_probabilities() const {
  return log_probabilities_ ? log_probabilities_->wait() : Tensor();
}

// One token of some slots.
class Decoder::StepOps : public SequenceOps {
 public:
  StepOps(Layer& layer, const SlotRows& rows) : layer_(layer), rows_(rows) {}

  Variable conv(Tape&, const ConvOp& op, const Variable& x, const Variable& weight, const Variable& bias) override {
    return with_length(conv_step(layer_.conv, rows_, without_length(x), weight.value(), bias.value(), op.activation));
  }
  Variable rope(Tape&, const RopeOp& op, const Variable& x) override {
    return Variable(
        rope_forward(x.value(), {op.pairing, op.base, 0, layer_.mixer.positions(), rows_.table, op.scaling}));
  }
  Variable mixer(Tape&, const MixerOp&, const Variable& q, const Variable& k, const Variable& v,
                 const Variable& log_decay) override {
    return with_length(
        layer_.mixer.step(rows_, without_length(q), without_length(k), without_length(v), without_length(log_decay)));
  }

 private:
  Layer& layer_;
  const SlotRows& rows_;
};

namespace {

// Chunks of some slots that follow each other in one row.
struct PackedChunks {
  std::vector<MixerCache::SlotTokens> slots;
  std::vector<int64_t> starts;
  int64_t tokens = 0;
  Tensor boundaries;  // where every slot is empty: the chunks are documents of the row

  PackedChunks(std::span<const Decoder::Prompt> chunks, const MixerCache& cache) {
    bool all_new = true;
    for (const auto& [slot, own] : chunks) {
      slots.push_back({slot, static_cast<int64_t>(own.size())});
      starts.push_back(tokens);
      tokens += slots.back().count;
      all_new = all_new && cache.tokens(slot) == 0;
    }
    if (!all_new) return;
    boundaries = Tensor::empty({static_cast<int64_t>(starts.size())}, DType::i32);
    std::ranges::copy(starts, boundaries.data<int32_t>());
  }

  // The row x with f(part, slot) of each slot's part of it instead of that part.
  Variable by_slot(const Tensor& x, auto&& f) const {
    if (slots.size() == 1) return Variable(f(x, slots[0].slot));
    const Tensor out = Tensor::empty(x.shape(), x.dtype(), x.device());
    for (size_t i = 0; i < slots.size(); ++i)
      copy(out.slice(1, starts[i], slots[i].count), f(x.slice(1, starts[i], slots[i].count), slots[i].slot));
    return Variable(out);
  }
};

}  // namespace

class Decoder::PrefillOps : public SequenceOps {
 public:
  PrefillOps(Layer& layer, const PackedChunks& chunks, MixerPrecision precision)
      : layer_(layer), chunks_(chunks), precision_(precision) {}

  Variable conv(Tape&, const ConvOp& op, const Variable& x, const Variable& weight, const Variable& bias) override {
    const auto convolved = [&](const Tensor& part, const Tensor& boundaries, const Tensor& state) {
      return conv_forward(part, weight.value(), bias.value(), op.activation, boundaries, state);
    };
    const auto state_of = [&](int64_t slot) { return layer_.conv.slice(0, slot, 1); };
    Variable y = chunks_.boundaries ? Variable(convolved(x.value(), chunks_.boundaries, {}))
                                    : chunks_.by_slot(x.value(), [&](const Tensor& part, int64_t slot) {
                                        return convolved(part, {}, state_of(slot));
                                      });
    for (size_t i = 0; i < chunks_.slots.size(); ++i) {
      const Tensor state = state_of(chunks_.slots[i].slot);
      const Tensor part = x.value().slice(1, chunks_.starts[i], chunks_.slots[i].count);
      copy(state, conv_state(part, op.window, {}, state));
    }
    return y;
  }
  Variable rope(Tape&, const RopeOp& op, const Variable& x) override {
    if (chunks_.boundaries) return Variable(rope_forward(x.value(), op.rope(), chunks_.boundaries));
    return chunks_.by_slot(x.value(), [&](const Tensor& part, int64_t slot) {
      return rope_forward(part, op.rope(layer_.mixer.tokens(slot)));
    });
  }
  Variable mixer(Tape&, const MixerOp&, const Variable& q, const Variable& k, const Variable& v,
                 const Variable& log_decay) override {
    const MixerInputs inputs{q.value(), k.value(), v.value(), log_decay ? log_decay.value() : Tensor(), {}, {}};
    return Variable(layer_.mixer.prefill(chunks_.slots, inputs, {.precision = precision_}));
  }

 private:
  Layer& layer_;
  const PackedChunks& chunks_;
  MixerPrecision precision_;
};

struct Decoder::Recording {
  std::vector<int64_t> key;      // of what was recorded
  int64_t warm = 0;              // the version of the model whose operations have run for so many rows
  Tensor ids;                    // where the graph finds its tokens
  std::shared_ptr<Graph> graph;  // or
  std::shared_ptr<TokenProgram> program;
  Tensor logits;  // in the memory of what runs
};

Decoder::Decoder(const LanguageModel& model, int64_t slots, int64_t vocabulary)
    : model_(&model),
      plan_(plan_tokens(model.plan())),
      slots_(static_cast<size_t>(slots)),
      sampler_(slots, vocabulary > 0 ? vocabulary : model.config().vocabulary, model.device()) {
  require(slots >= 1, "decoder: {} slots, expected 1 or more", slots);
  const ModelConfig& config = model.config();
  for (int64_t i = 0; i < config.layers; ++i) {
    Layer layer{MixerCache(config.block.mixer(), cache_sizes(config, slots), model.device()), {}};
    if (config.block.conv_window > 0)
      layer.conv = Tensor::zeros({slots, config.block.conv_window - 1, config.qkv_width()}, DType::f32, model.device());
    layers_.push_back(std::move(layer));
  }
}

Decoder::~Decoder() = default;
Decoder::Decoder(Decoder&&) noexcept = default;
Decoder& Decoder::operator=(Decoder&&) noexcept = default;

Decoder::Slot& Decoder::used(int32_t slot) {
  require(slot >= 0 && slot < slots(), "decoder: slot {}, expected 0..{}", slot, slots() - 1);
  require(slots_[slot].used, "decoder: slot {} holds no sequence; start() gives one", slot);
  return slots_[slot];
}

int64_t Decoder::free_slots() const {
  return std::ranges::count(slots_, false, &Slot::used);
}

int32_t Decoder::start() {
  const auto found = std::ranges::find(slots_, false, &Slot::used);
  require(found != slots_.end(), "decoder: all {} slots hold a sequence; stop one, or make a decoder with more slots",
          slots());
  *found = {true, {}, -1};
  return static_cast<int32_t>(found - slots_.begin());
}

void Decoder::stop(int32_t slot) {
  used(slot) = {};
  for (Layer& layer : layers_) {
    layer.mixer.clear(slot);
    if (layer.conv) fill(layer.conv.slice(0, slot, 1), 0);
  }
  sampler_.clear(slot);
}

int32_t Decoder::fork(int32_t slot) {
  const Tensor logits = used(slot).logits;
  const int32_t other = start();
  for (Layer& layer : layers_) {
    layer.mixer.copy(slot, other);
    if (layer.conv) copy(layer.conv.slice(0, other, 1), layer.conv.slice(0, slot, 1));
  }
  sampler_.copy(slot, other);
  if (logits) slots_[other].logits = to_dtype(logits, DType::f32);
  return other;
}

void Decoder::set_sampling(int32_t slot, const Sampling& sampling) {
  (void)used(slot);
  sampler_.set(slot, sampling);
}

Tensor Decoder::logits(int32_t slot) const {
  const Tensor& logits = used(slot).logits;
  require(logits.defined(), "decoder: slot {} has read nothing", slot);
  return logits.select(0, 0);
}

int64_t Decoder::tokens(int32_t slot) const {
  (void)used(slot);
  return layers_.front().mixer.tokens(slot);
}

int64_t Decoder::bytes(int32_t slot) const {
  (void)used(slot);
  int64_t sum = 0;
  for (const Layer& layer : layers_)
    sum += layer.mixer.bytes(slot) + (layer.conv ? static_cast<int64_t>(layer.conv.bytes()) / slots() : 0);
  return sum;
}

int64_t Decoder::bytes() const {
  int64_t sum = 0;
  for (size_t i = 0; i < slots_.size(); ++i)
    if (slots_[i].used) sum += bytes(static_cast<int32_t>(i));
  return sum;
}

void Decoder::read(int32_t slot, std::span<const int32_t> tokens) {
  const Prompt prompt{slot, tokens};
  read({&prompt, 1}, {});
}

bool Decoder::read(std::span<const Prompt> prompts, const ReadProgress& progress) {
  return read_passes(prompts, progress, {});
}

// All before the first chunk: a slot that has read half of a prompt would be of no use.
void Decoder::check_prompts(std::span<const Prompt> prompts) const {
  for (const auto& [slot, tokens] : prompts) {
    (void)used(slot);
    require(std::ranges::count(prompts, slot, &Prompt::slot) == 1,
            "decoder.read: two prompts for slot {}; join them, or read them one after the other", slot);
    for (const int32_t id : tokens)
      require(id >= 0 && id < model_->config().vocabulary, "decoder.read: token {}, expected 0 to {}", id,
              model_->config().vocabulary - 1);
  }
}

bool Decoder::read_passes(std::span<const Prompt> prompts, const ReadProgress& progress, const AfterPass& after) {
  check_prompts(prompts);
  int64_t all = 0, done = 0;
  for (const Prompt& prompt : prompts) all += static_cast<int64_t>(prompt.tokens.size());
  std::vector<Prompt> rest(prompts.begin(), prompts.end());
  while (done < all) {
    std::vector<Prompt> chunks;
    size_t tokens = 0;
    for (auto& [slot, own] : rest) {
      const size_t count = std::min(kPassTokens, own.size());
      if (count == 0 || tokens + count > kPassTokens) continue;
      tokens += count;
      chunks.push_back({slot, own.first(count)});
      own = own.subspan(count);
    }
    const Tensor hidden = read_chunks(chunks);
    // After every pass, so that a later one that fails leaves these slots whole.
    for (const auto& [slot, own] : chunks) sampler_.read(slot, own);
    if (after) after(chunks, hidden);
    done += static_cast<int64_t>(tokens);
    if (progress && !progress(done, all) && done < all) return false;
  }
  return true;
}

// Chunks of some slots on their way through the layers.
class Decoder::Pass {
 public:
  PackedChunks packed;
  std::vector<int32_t> slots;
  Tensor ids, x;  // where there is one token of each slot, a step reads them, and x stays undefined
  size_t layer = 0;

  Pass(std::span<const Prompt> chunks, const MixerCache& cache) : packed(chunks, cache) {
    const auto count = static_cast<int64_t>(chunks.size());
    ids = Tensor::empty(packed.tokens == count ? Shape{count, 1} : Shape{1, packed.tokens}, DType::i32);
    for (size_t i = 0; i < chunks.size(); ++i) {
      std::ranges::copy(chunks[i].tokens, ids.data<int32_t>() + packed.starts[i]);
      slots.push_back(chunks[i].slot);
    }
  }
  bool one_each() const { return packed.tokens == static_cast<int64_t>(slots.size()); }
};

// The next layer of a pass. Every chunk gives logits, also where its prompt goes on: reading may end after any pass.
bool Decoder::run_layer(Pass& pass) {
  if (pass.one_each()) {
    forward(pass.slots, model_->checked_ids("tokens", pass.ids));
    return true;
  }
  if (pass.layer == 0) pass.x = model_->embedded(pass.ids);
  PrefillOps ops(layers_[pass.layer], pass.packed, model_->compute().mixer);
  pass.x = model_->after_layer(pass.layer, pass.x, ops);
  if (++pass.layer < layers_.size()) return false;
  pass.x = model_->last_norm(pass.x);
  const auto count = static_cast<int64_t>(pass.slots.size());
  const Tensor last = Tensor::empty({count, pass.x.size(2)}, pass.x.dtype(), pass.x.device());
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    const int64_t end = pass.packed.starts[at] + pass.packed.slots[at].count;
    copy(last.select(0, i), pass.x.select(0, 0).select(0, end - 1));
  }
  const Tensor logits = logits_forward(last, model_->output_matrix());
  for (int64_t i = 0; i < count; ++i) slots_[pass.slots[static_cast<size_t>(i)]] = {true, logits.slice(0, i, 1), -1};
  return true;
}

Tensor Decoder::read_chunks(std::span<const Prompt> chunks) {
  Pass pass(chunks, layers_.front().mixer);
  while (!run_layer(pass)) {
  }
  return pass.x;
}

std::shared_ptr<Decoder::Pass> Decoder::begin_pass(const Prompt& prompt) {
  check_prompts({&prompt, 1});
  require(!prompt.tokens.empty() && prompt.tokens.size() <= kPassTokens,
          "decoder.begin_pass: {} tokens, expected 1 to {}", prompt.tokens.size(), kPassTokens);
  return std::make_shared<Pass>(std::span(&prompt, 1), layers_.front().mixer);
}

bool Decoder::advance(Pass& pass) {
  (void)used(pass.slots[0]);
  if (!run_layer(pass)) return false;
  sampler_.read(pass.slots[0], {pass.ids.data<int32_t>(), static_cast<size_t>(pass.packed.tokens)});
  return true;
}

double TokenScores::sum() const {
  return std::accumulate(log_probabilities.begin(), log_probabilities.end(), 0.0);
}

std::vector<TokenScores> Decoder::score(std::span<const Prompt> prompts, bool greedy) {
  std::vector<TokenScores> scores(prompts.size());
  std::vector<Prompt> read;
  std::map<int32_t, TokenScores*> of_slot;
  const auto add_from_logits = [&](int32_t slot, int32_t token) {
    const Tensor logits = to_device(this->logits(slot), {});
    of_slot[slot]->log_probabilities.push_back(log_probability(logits, token));
    if (greedy && !is_largest(logits, token)) of_slot[slot]->greedy = false;
  };
  // All before the first pass, which replaces the logits.
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto& [slot, tokens] = prompts[i];
    require(!tokens.empty(), "decoder.score: no tokens for slot {}; give at least one", slot);
    for (const int32_t id : {tokens.front(), tokens.back()})
      require(id >= 0 && id < model_->config().vocabulary, "decoder.score: token {}, expected 0 to {}", id,
              model_->config().vocabulary - 1);
    of_slot[slot] = &scores[i];
    add_from_logits(slot, tokens.front());
    read.push_back({slot, tokens.first(tokens.size() - 1)});
  }
  // The target of a token is the next one of its prompt, which follows it in memory also where a chunk ends.
  read_passes(read, {}, [&](std::span<const Prompt> chunks, const Tensor& hidden) {
    if (!hidden) {
      for (const auto& [slot, own] : chunks) add_from_logits(slot, own.data()[1]);
      return;
    }
    const Tensor targets = Tensor::empty({1, hidden.size(1)}, DType::i32);
    int32_t* next_target = targets.data<int32_t>();
    for (const auto& [slot, own] : chunks) next_target = std::copy_n(own.data() + 1, own.size(), next_target);
    CrossEntropyOptions options;
    options.row_losses = Tensor::empty(targets.shape(), DType::f32, model_->device());
    options.precision = model_->compute().precision;
    cross_entropy_forward(hidden, model_->output_matrix(), model_->checked_ids("targets", targets), options);
    const Tensor losses = to_device(options.row_losses, {});
    int64_t row = 0;
    for (const auto& [slot, own] : chunks) {
      TokenScores& score = *of_slot[slot];
      for (size_t i = 0; i < own.size(); ++i, ++row) {
        score.log_probabilities.push_back(-losses.data<float>()[row]);
        if (!greedy || !score.greedy) continue;
        const Tensor logits = logits_forward(hidden.select(0, 0).slice(0, row, 1), model_->output_matrix());
        score.greedy = is_largest(to_device(logits, {}), own.data()[i + 1]);
      }
    }
  });
  return scores;
}

void Decoder::read_token(std::span<const int32_t> slots, const Tensor& tokens) {
  ArgumentCheck("decoder.read_token").shape("tokens", tokens, {static_cast<int64_t>(slots.size()), 1});
  const Tensor ids = model_->checked_ids("tokens", tokens);
  forward(slots, ids);
  if (!tokens.device().is_cpu()) return;
  for (size_t i = 0; i < slots.size(); ++i) sampler_.read(slots[i], {tokens.data<int32_t>() + i, 1});
}

ChosenTokens Decoder::step(std::span<const int32_t> slots) {
  require(!slots.empty(), "decoder.step: no slots were given");
  const Choice choice = sampler_.choose(logits_of(slots), rows_of(slots));
  ChosenTokens chosen(choice);
  forward(slots, choice.ids.slice(1, 0, 1));
  return chosen;
}

// Rows of one number share a table, which recordings know.
const SlotRows& Decoder::rows_of(std::span<const int32_t> slots) {
  for (const int32_t slot : slots) (void)used(slot);
  SlotRows& rows = rows_[static_cast<int64_t>(slots.size())];
  if (!std::ranges::equal(rows.slots, slots)) {
    rows.slots.assign(slots.begin(), slots.end());
    if (!rows.table) rows.table = Tensor::empty({rows.size()}, DType::i32, model_->device());
    write_table(rows);
  }
  check_slots(ArgumentCheck("decoder"), rows, ArgumentCheck::kAny, this->slots(), model_->device());
  return rows;
}

// [rows, vocabulary]: what the last step wrote, if it was of these slots.
Tensor Decoder::logits_of(std::span<const int32_t> slots) const {
  bool as_written = std::ranges::equal(last_.slots, slots);
  for (size_t i = 0; i < slots.size(); ++i) {
    const Slot& slot = used(slots[i]);
    require(slot.logits.defined(), "decoder: slot {} has read nothing, so there is nothing to continue", slots[i]);
    as_written = as_written && slot.row == static_cast<int64_t>(i);
  }
  if (as_written) return last_.logits;
  if (slots.size() == 1) return used(slots[0]).logits;
  const Tensor all =
      Tensor::empty({static_cast<int64_t>(slots.size()), model_->config().vocabulary}, DType::f32, model_->device());
  for (size_t i = 0; i < slots.size(); ++i) copy(all.slice(0, static_cast<int64_t>(i), 1), used(slots[i]).logits);
  return all;
}

void Decoder::forward(std::span<const int32_t> slots, const Tensor& ids) {
  const SlotRows& rows = rows_of(slots);
  for (Slot& slot : slots_) {
    const auto index = static_cast<int32_t>(&slot - slots_.data());
    if (slot.row >= 0 && !model_->device().is_cpu() && std::ranges::find(slots, index) == slots.end())
      slot.logits = to_dtype(slot.logits, DType::f32);  // a copy: the step may write where it was
    slot.row = -1;
  }
  for (Layer& layer : layers_) layer.mixer.prepare(rows, model_->compute().activations);
  ran_as_ = "operations";
  last_ = {{slots.begin(), slots.end()}, model_->device().is_cpu() ? token_pass(rows, ids) : recorded_pass(rows, ids)};
  for (size_t i = 0; i < slots.size(); ++i)
    slots_[slots[i]] = {true, last_.logits.slice(0, static_cast<int64_t>(i), 1), static_cast<int64_t>(i)};
}

bool Decoder::runs_as_program(int64_t rows) const {
  const Compute& compute = model_->compute();
  // The kernel has been tested with layers that end with an MLP.
  return program_fits_ && compute.token_program && model_->config().intermediate > 0 && !model_->config().layer_norm &&
         compute.activations == DType::bf16 && model_->output_matrix().dtype() == DType::bf16 &&
         TokenProgram::missing(model_->device(), plan_, rows).empty();
}

std::shared_ptr<TokenProgram> Decoder::new_program(const SlotRows& rows) const {
  TokenProgramInputs inputs;
  inputs.plan = &plan_;
  for (const std::vector<Variable>& weights : model_->layers()) {
    inputs.weights.emplace_back();
    for (const Variable& weight : weights) inputs.weights.back().push_back(weight.value());
  }
  inputs.embedding = model_->embedding_table();
  inputs.norm = model_->final_norm();
  inputs.norm_eps = model_->config().norm_eps;
  inputs.head = model_->output_matrix();
  for (const Layer& layer : layers_) {
    inputs.conv.push_back(layer.conv);
    inputs.mixers.push_back(&layer.mixer);
  }
  inputs.rows = rows;
  return std::make_shared<TokenProgram>(model_->device(), inputs);
}

// On a GPU a step is recorded and run again from token to token, with the weights where they are.
Tensor Decoder::recorded_pass(const SlotRows& rows, const Tensor& ids) {
  std::unique_ptr<Recording>& place = recordings_[rows.size()];
  if (!place) place = std::make_unique<Recording>();
  Recording& recorded = *place;
  const bool program = runs_as_program(rows.size());
  if (!program && recorded.warm != model_->version()) {
    recorded = {};
    recorded.warm = model_->version();
    return token_pass(rows, ids);  // the first token makes everything ready
  }
  std::vector<int64_t> key{model_->version(), program};
  for (const Layer& layer : layers_) {
    if (program) {
      key.push_back(reinterpret_cast<intptr_t>(layer.mixer.positions().raw()));  // where its records are
      continue;
    }
    const std::vector<int64_t> own = layer.mixer.recording(rows);
    key.insert(key.end(), own.begin(), own.end());
  }
  const bool is_new = recorded.key != key;
  if (is_new) {
    recorded.key = std::move(key);
    recorded.graph.reset();
    recorded.program.reset();
    recorded.logits = {};
  }
  if (program) {
    if (is_new) {
      recorded.program = new_program(rows);
      recorded.logits = recorded.program->logits();
    }
    if (!recorded.program->run(ids)) {
      program_fits_ = false;
      return recorded_pass(rows, ids);  // as a graph
    }
  } else {
    if (!recorded.ids) recorded.ids = Tensor::empty({rows.size(), 1}, DType::i32, model_->device());
    copy(recorded.ids, ids);
    if (is_new) {
      Tensor logits;
      recorded.graph = std::make_shared<Graph>(model_->device(), [&] { logits = token_pass(rows, recorded.ids); });
      // The logits lie in the graph's memory: whoever holds them holds the graph.
      const auto owner = std::make_shared<std::pair<std::shared_ptr<Graph>, Tensor>>(recorded.graph, logits);
      recorded.logits = Tensor::wrap(logits.raw(), logits.shape(), logits.dtype(), model_->device(), owner);
    }
    recorded.graph->run();
  }
  // Capturing a graph has counted the token already.
  if (program || !is_new)
    for (Layer& layer : layers_) layer.mixer.advance(rows);
  ran_as_ = program ? "persistent kernel" : "graph";
  return recorded.logits;
}

Tensor Decoder::token_pass(const SlotRows& rows, const Tensor& tokens) {
  const ModelConfig& config = model_->config();
  Tensor ids = tokens;
  if (!tokens.is_contiguous()) {  // a column of what was chosen
    ids = Tensor::empty(tokens.shape(), DType::i32, tokens.device());
    copy(ids, tokens);
  }
  Tensor x = embedding_forward(model_->embedding_table(), ids, model_->compute().activations);
  for (size_t i = 0; i < layers_.size(); ++i) x = run_layer(i, rows, x);
  const TokenInput in{x.view({rows.size(), config.hidden}), {}, model_->final_norm(), config.norm_eps};
  const Tensor logits = Tensor::empty({rows.size(), config.vocabulary}, DType::f32, model_->device());
  const TokenPart part{.weight = model_->output_matrix(), .out = logits};
  if (!config.layer_norm && token_linear(in, {&part, 1})) return logits;
  return logits_forward(model_->last_norm(in.x), model_->output_matrix());
}

namespace {

// A joined product of the plan with its tensors.
class FusedCall {
 public:
  FusedCall(const FusedLinear& op, const TokenPlan& plan, const std::vector<Variable>& weights,
            const Tensor& conv_state, const SlotRows& rows, std::vector<Variable>& values)
      : op_(op), plan_(plan), weights_(weights), values_(values) {
    const Tensor& x = values[op.x].value();
    rows_ = x.size(0);
    device_ = x.device();
    in_ = {flat(op.x), op.gate == kNo ? Tensor() : flat(op.gate), weight(op.norm), op.eps};
    for (const FusedLinear::Part& part : op.parts) parts_.push_back(bound(part, conv_state, rows));
  }

  // Whether a kernel did it; the values are there then. Outputs are allocated only for a kernel.
  bool run() {
    if (!has_token_linear(in_, parts_)) return false;
    for (size_t i = 0; i < parts_.size(); ++i) {
      const FusedLinear::Part& part = op_.parts[i];
      const bool softplus = part.kind == FusedLinear::Kind::softplus;
      // The residual stream is added to in place.
      parts_[i].out = part.kind == FusedLinear::Kind::add
                          ? flat(part.residual)
                          : new_rows(part.weight, softplus ? DType::f32 : in_.x.dtype());
      if (parts_[i].a_log) parts_[i].decay = new_rows(part.weight, DType::f32);
    }
    token_linear(in_, parts_);
    for (size_t i = 0; i < parts_.size(); ++i) {
      values_[op_.parts[i].y] = with_length(parts_[i].out);
      if (op_.parts[i].decay != kNo) values_[op_.parts[i].decay] = with_length(parts_[i].decay);
    }
    return true;
  }

 private:
  Tensor weight(Weight w) const { return w == kNo ? Tensor() : weights_[w].value(); }
  Tensor flat(Value v) const { return values_[v].value().view({rows_, plan_.plan.values[v].width()}); }
  Tensor new_rows(Weight w, DType dtype) const { return Tensor::empty({rows_, weight(w).size(0)}, dtype, device_); }

  TokenPart bound(const FusedLinear::Part& part, const Tensor& conv_state, const SlotRows& rows) const {
    TokenPart to{.kind = part.kind, .weight = weight(part.weight), .second = weight(part.second)};
    to.bias = weight(part.bias);
    to.conv_weight = weight(part.conv_weight);
    if (to.conv_weight) to.conv_state = conv_state, to.slots = rows.table;
    to.after_conv = part.activation;
    to.qk_activation = part.qk_activation;
    to.qk_width = part.qk_width;
    to.sign = part.factor;
    to.a_log = weight(part.a_log);
    return to;
  }

  const FusedLinear& op_;
  const TokenPlan& plan_;
  const std::vector<Variable>& weights_;
  std::vector<Variable>& values_;
  int64_t rows_ = 0;
  Device device_;
  TokenInput in_;
  std::vector<TokenPart> parts_;
};

}  // namespace

Tensor Decoder::run_layer(size_t index, const SlotRows& rows, const Tensor& x) {
  const Plan& plan = plan_.plan;
  Layer& layer = layers_[index];
  StepOps ops(layer, rows);
  const PlanRunner runner(plan, model_->layers()[index], model_->compute(), Tape::off(), ops);
  std::vector<Variable> values(plan.values.size());
  values[plan.input] = Variable(x);
  // A value that a joined operation has left among the columns of another.
  const auto find = [&](Value v) {
    const auto& [whole, column] = plan_.places[v];
    if (values[v] || !values[whole]) return;
    const ValueInfo& info = plan.values[v];
    const Tensor columns = values[whole].value().slice(2, column, info.width());
    values[v] = Variable(info.heads > 0 ? columns.split_dim(2, info.heads, info.dim) : columns);
  };
  std::vector<char> done(plan.ops.size(), 0);
  for (const TokenOp& op : plan_.ops) {
    const auto* linear = std::get_if<FusedLinear>(&op.op);
    if (linear && !x.device().is_cpu() &&
        FusedCall(*linear, plan_, model_->layers()[index], layer.conv, rows, values).run()) {
      for (const int i : op.covers) done[i] = 1;
      continue;
    }
    for (const int i : op.covers) {
      if (std::exchange(done[i], 1)) continue;
      for (const Value v : inputs_of(plan.ops[i])) find(v);
      runner.run(plan.ops[i], values);
    }
  }
  return values[plan.output].value();
}

SlotContents Decoder::contents(int32_t slot) const {
  SlotContents contents;
  const Tensor& logits = used(slot).logits;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    const MixerContents mixer = layer.mixer.contents(slot);
    const Tensor conv = layer.conv ? to_device(to_dtype(layer.conv.slice(0, slot, 1), DType::f32), Device{}) : Tensor();
    contents.tokens = mixer.tokens;
    contents.pending = mixer.pending;
    for_each_tensor(i, mixer, conv, [&](const std::string& name, const Tensor& x) {
      if (x) contents.tensors[name] = x;
    });
  }
  if (logits) contents.logits = to_device(to_dtype(logits, DType::f32), Device{}).select(0, 0);
  contents.sampling = sampler_.contents(slot);
  return contents;
}

void Decoder::restore(int32_t slot, const SlotContents& contents) {
  (void)used(slot);
  const ArgumentCheck check("decoder.restore");
  if (contents.logits) check.dense("logits", contents.logits, DType::f32, {model_->config().vocabulary});
  require(contents.logits.defined() == (contents.tokens > 0),
          "decoder.restore: logits belong to the contents exactly when tokens were read, here {}", contents.tokens);
  for (const int32_t id : contents.sampling.history)
    require(id >= 0 && id < model_->config().vocabulary,
            "decoder.restore: token {} among the recent ones, expected 0 to {}", id, model_->config().vocabulary - 1);
  size_t found_tensors = 0;
  for (size_t i = 0; i < layers_.size(); ++i) {
    Layer& layer = layers_[i];
    MixerContents mixer{contents.tokens, contents.pending, {}, {}, {}, {}};
    Tensor conv;
    for_each_tensor(i, mixer, conv, [&](const std::string& name, Tensor& x) {
      const auto found = contents.tensors.find(name);
      if (found == contents.tensors.end()) return;
      x = found->second;
      ++found_tensors;
    });
    require(conv.defined() == layer.conv.defined(),
            "decoder.restore: the convolution's inputs are in the contents or in the model, but not in both");
    if (conv) {
      const Tensor own = layer.conv.slice(0, slot, 1);
      check.dense("conv", conv, DType::f32, {1, own.size(1), own.size(2)}, conv.device());
      copy(own, to_device(conv, model_->device()));
    }
    layer.mixer.restore(slot, mixer);
  }
  require(found_tensors == contents.tensors.size(), "decoder.restore: contents with {} tensors, the model knows {}",
          contents.tensors.size(), found_tensors);
  slots_[slot].row = -1;
  slots_[slot].logits = {};
  if (contents.logits)
    slots_[slot].logits = to_device(contents.logits.view({1, model_->config().vocabulary}), model_->device());
  sampler_.restore(slot, contents.sampling);
}

}  // namespace furious
