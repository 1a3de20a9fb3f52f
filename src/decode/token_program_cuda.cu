// Makes programs: the operations of the plan become descriptions for the kernel, are cut into pieces, and these get
// their places in the ring of shared memory.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "decode/token_kernel.cuh"
#include "decode/token_program.h"
#include "gpu/launch.cuh"
#include "tensor/device.h"

namespace furious {
namespace cuda {
namespace {

using Kind = TokenPiece::Kind;

// How the blocks of the device share out the steps of a mixer: everything in a StepCall that follows from sizes.
void share_out(StepCall& step, int64_t window, int64_t first_fold, const SharedMemoryPlan& memory) {
  const Cache& cache = step.cache;
  const auto fours = [](int64_t count) { return divide_up(count, 4) * 4; };
  step.blocks = std::max(1, multiprocessors() / step.heads);
  // What one block can fetch ahead anyway is not shared out: its sums need not go through memory.
  constexpr int kSmall = 48 << 10;
  const int64_t small = cache.state_rows * state_row_bytes(cache) + window_bytes(cache, static_cast<int>(window));
  if (cache.state_rows > 0 && small <= kSmall) step.blocks = 1;
  step.rows = fours(divide_up(cache.state_rows, step.blocks));
  step.columns = divide_up(cache.v_dim, step.blocks);
  step.rows_at_once = 128 / cache.v_dim;
  step.part_of_row = divide_up(1 << 18, cache.v_dim);
  step.partial_width = cache.v_dim + (step.softmax ? 2 : 1);
  // Chunks of twice the tokens, where there is memory for three, are added up in little more time.
  const bool large = 3 * window_bytes(cache, 2 * kChunkTokens) <= memory.largest();
  step.first_tokens = step.chunk_tokens = (large ? 2 : 1) * kChunkTokens;
  // A window that is most of what a step reads is copied faster than a small one, which comes beside a state.
  step.window_cycles = cache.state_rows > 0 ? kStateCycles : 40;
  int stages = 3;
  if (cache.state_rows > 0) {
    // After the first fold a block has no more than first_tokens, before it those of the long first window.
    step.first_tokens = fours(divide_up(window, step.blocks));
    const int further = fours(divide_up(first_fold, step.blocks)) - step.first_tokens;
    step.chunk_tokens = std::clamp(further, 4, kChunkTokens);
    stages = std::clamp(divide_up(further, step.chunk_tokens), 1, 2);
  }
  const int free = memory.largest() - window_bytes(cache, step.first_tokens);
  step.stages = std::clamp(free / window_bytes(cache, step.chunk_tokens), 0, stages);
}

// Bytes of the part of a step's piece that holds rows of the state, or in their place chunks of a window.
int state_bytes(const StepCall& step, int rows) {
  return std::max(rows * state_row_bytes(step.cache), step.stages * window_bytes(step.cache, step.chunk_tokens));
}

// Cuts an operation into pieces. Returns the bytes that each needs.
std::vector<int> cut(const TokenPiece& operation, const SharedMemoryPlan& memory, int blocks,
                     std::vector<TokenPiece>& pieces) {
  std::vector<int> bytes;
  int share = 1, most = 1;
  if (operation.kind == Kind::linear) {
    const int groups = operation.linear.pairs() ? 2 : 1, tile = groups * 8 * row_units(operation.linear.k) * 16;
    share = divide_up(operation.linear.tiles, blocks);
    most = std::clamp(memory.largest() / tile, 1, kMostGroups / groups);
    for (int begin = 0; begin < share; begin += most)
      bytes.push_back(std::min(most, share - begin) * tile + SharedMemoryPlan::kBehind);
  } else if (operation.kind == Kind::step) {
    const StepCall& step = operation.step;
    const int window = window_bytes(step.cache, step.first_tokens), row = state_row_bytes(step.cache);
    share = std::max(step.rows, 1);
    most = std::min((memory.largest() - window) / row, kMostStateRows) / 4 * 4;
    most = divide_up(divide_up(share, divide_up(share, most)), 4) * 4;
    for (int begin = 0; begin < share; begin += most) bytes.push_back(state_bytes(step, most) + window);
  } else {
    bytes.push_back(0);
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    TokenPiece piece = operation;
    piece.begin = static_cast<int>(i) * most;
    piece.count = operation.kind == Kind::step ? most : std::min(most, share - piece.begin);
    piece.share = share;
    piece.first = i == 0;
    piece.last = i + 1 == bytes.size();
    pieces.push_back(piece);
  }
  return bytes;
}

// Gives every piece its place in the ring, and the piece that must have been used before. Several rows keep memory busy
// all the time: a piece goes where space is free first. One row waits for its chain of operations instead, which copies
// too early only slow down: pieces lie one behind the other.
void place(std::vector<TokenPiece>& pieces, const std::vector<int>& bytes, int ring, bool one_row) {
  const auto size_of = [&](size_t p) { return divide_up(bytes[p], 128) * 128; };
  for (size_t p = 0; p < pieces.size(); ++p) {
    // A description is overwritten when all warps have finished with it: when they have used the next piece.
    const auto fewest = static_cast<size_t>(std::max(static_cast<int>(p) - kPieceSlots + 2, 0));
    const auto needs_at = [&](int at) {
      size_t needs = fewest;
      for (size_t q = fewest; q < p; ++q)
        if (pieces[q].at < at + size_of(p) && at < pieces[q].at + size_of(q)) needs = q + 1;
      return static_cast<int>(needs);
    };
    TokenPiece& piece = pieces[p];
    piece.at = 0;
    piece.needs = needs_at(0);
    for (size_t q = one_row && p > 0 ? p - 1 : fewest; q < p; ++q) {  // behind that one
      const int at = pieces[q].at + size_of(q);
      if (at + size_of(p) > ring || (!one_row && needs_at(at) >= piece.needs)) continue;
      piece.at = at;
      piece.needs = needs_at(at);
    }
  }
}

const float* optional(const Tensor& x) {
  return x ? x.data<float>() : nullptr;
}

// Turns the plan into operations of the kernel. A value of the plan has one buffer of tagged words, which all layers
// use; the input of a layer is the output of the previous one.
class Builder {
 public:
  Builder(Device device, const TokenProgramInputs& inputs, std::vector<Tensor>& held)
      : device_(device), in_(inputs), plan_(inputs.plan->plan), rows_(inputs.rows.size()), held_(held) {}

  std::vector<TokenPiece> build(const Tensor& logits) {
    values_.resize(plan_.values.size());
    buffer(plan_.input, 1);
    values_[plan_.output] = values_[plan_.input];
    embed();
    for (size_t layer = 0; layer < in_.weights.size(); ++layer) {
      layer_ = layer;
      values_[plan_.input].operation = values_[plan_.output].operation;
      for (const TokenOp& op : in_.plan->ops) {
        if (const auto* linear = std::get_if<FusedLinear>(&op.op)) add(*linear);
        if (const auto* mixer = std::get_if<FusedMixer>(&op.op)) add(*mixer);
      }
    }
    add_head(logits);
    return std::move(operations_);
  }

  std::vector<SlotRecord*> caches;

 private:
  // Tagged words; a word has 16 bits of an activation, or two words an f32.
  struct Buffer {
    char* words = nullptr;
    int width = 0;       // of a row
    int operation = -1;  // that wrote it last
  };

  // Of the first copy; the others lie kCopyBytes apart. No word has a tag yet.
  char* new_words(int64_t bytes) {
    constexpr int64_t kLine = 128;
    bytes = (bytes + kLine - 1) / kLine * kLine;
    require(bytes <= kCopyBytes, "token_program: {} bytes of activations, expected {} at most", bytes, kCopyBytes);
    if (bytes > free_bytes_) {
      held_.push_back(Tensor::zeros({kCopies * kCopyBytes / 4}, DType::i32, device_));
      free_ = static_cast<char*>(held_.back().raw());
      free_bytes_ = kCopyBytes;
    }
    free_ += bytes;
    free_bytes_ -= bytes;
    return free_ - bytes;
  }
  // The buffer of a value, for words of so many per number.
  Buffer& buffer(Value value, int words) {
    Buffer& buffer = values_[value];
    if (buffer.words != nullptr) return buffer;
    buffer.width = static_cast<int>(plan_.values[value].width());
    buffer.words = new_words(rows_ * buffer.width * words * 4);
    return buffer;
  }
  // The buffer that holds a value, which may be part of a larger one, and where in a row it begins.
  std::pair<const Buffer*, int> find(Value value) const {
    const TokenPlan::Place& place = in_.plan->places[value];
    const Buffer& buffer = values_[place.value];
    require(buffer.operation >= 0, "token_program: \"{}\" is read before an operation has written it",
            plan_.values[value].name);
    return {&buffer, static_cast<int>(place.column)};
  }
  const Tensor& weight(Weight weight) const { return in_.weights[layer_][weight]; }
  const float* floats(Weight of) const { return of == kNo ? nullptr : weight(of).data<float>(); }
  const __nv_bfloat16* matrix(Weight of) const { return of == kNo ? nullptr : pointer<bfloat16>(weight(of)); }
  int operation() const { return static_cast<int>(operations_.size()); }

  void embed() {
    TokenPiece piece{};
    piece.kind = Kind::embedding;
    Buffer& out = values_[plan_.input];
    piece.embedding = {in_.embedding.data<float>(), reinterpret_cast<uint32_t*>(out.words), static_cast<int>(rows_),
                       out.width};
    out.operation = values_[plan_.output].operation = operation();
    operations_.push_back(piece);
  }

  TokenPiece new_linear(const Buffer& x, const Tensor& norm, float eps) const {
    TokenPiece piece{};
    piece.kind = Kind::linear;
    piece.x_from = x.operation;
    LinearCall& call = piece.linear;
    call.x = reinterpret_cast<const __nv_bfloat16*>(x.words);
    call.x_stride = x.width;
    call.norm = optional(norm);
    call.eps = eps;
    call.batch = static_cast<int>(rows_);
    call.k = x.width;
    return piece;
  }

  void add(const FusedLinear& op) {
    TokenPiece piece = new_linear(*find(op.x).first, op.norm == kNo ? Tensor() : weight(op.norm), op.eps);
    LinearCall& call = piece.linear;
    if (op.gate != kNo) {
      const Buffer& gate = *find(op.gate).first;
      call.gate = reinterpret_cast<const __nv_bfloat16*>(gate.words);
      call.gate_stride = gate.width;
      piece.gate_from = gate.operation;
    }
    for (const FusedLinear::Part& from : op.parts) {
      LinearPart& part = call.part[call.parts++];
      part.kind = from.kind;
      part.after_conv = from.activation;
      part.qk_activation = from.qk_activation;
      part.rows = static_cast<int>(weight(from.weight).size(0));
      part.qk_width = static_cast<int>(from.qk_width);
      part.sign = from.factor;
      part.weight = matrix(from.weight);
      part.second = matrix(from.second);
      part.bias = floats(from.bias);
      part.a_log = floats(from.a_log);
      if (from.conv_weight != kNo) {
        part.conv_weight = floats(from.conv_weight);
        part.window = static_cast<int>(weight(from.conv_weight).size(1));
        part.conv_state = in_.conv[layer_].data<float>();
        part.slot_of_row = in_.rows.table.data<int32_t>();
      }
      if (from.residual != kNo) {
        const Buffer& residual = *find(from.residual).first;
        piece.residual = reinterpret_cast<const uint32_t*>(residual.words);
        piece.residual_from = residual.operation;
      }
      const int words = from.kind == FusedLinear::Kind::softplus ? 2 : 1;
      const auto write = [&](Value value) {
        Buffer& out = buffer(value, words);
        out.operation = operation();
        return out.words;
      };
      part.out = from.y != kNo ? write(from.y) : nullptr;
      if (from.decay != kNo) part.decay = reinterpret_cast<float*>(write(from.decay));
    }
    call.number_tiles();
    operations_.push_back(piece);
  }

  void add_head(const Tensor& logits) {
    TokenPiece piece = new_linear(values_[plan_.output], in_.norm, in_.norm_eps);
    LinearPart& part = piece.linear.part[piece.linear.parts++];
    part.kind = TokenPart::Kind::value;
    part.f32_out = true;
    part.rows = static_cast<int>(in_.head.size(0));
    part.weight = pointer<bfloat16>(in_.head);
    part.out = logits.raw();
    piece.linear.number_tiles();
    operations_.push_back(piece);
  }

  // The buffer of an input of the mixer, which one operation writes together with the others.
  const Buffer& written_with(Value value, int operation) const {
    const Buffer& buffer = *find(value).first;
    require(buffer.operation == operation, "token_program: the inputs of a mixer come from several operations");
    return buffer;
  }
  TaggedRows tagged_rows(Value value, int heads, int operation) const {
    const Buffer& buffer = written_with(value, operation);
    return {reinterpret_cast<const uint32_t*>(buffer.words) + find(value).second, buffer.width,
            heads / static_cast<int>(plan_.values[value].heads)};
  }

  void add(const FusedMixer& op) {
    const MixerCache& cache = *in_.mixers[layer_];
    TokenPiece piece{};
    piece.kind = Kind::step;
    StepCall& step = piece.step;
    step.cache = cache_of(cache.spec(), cache.shape(), DType::bf16, cache.records());
    caches.push_back(step.cache.slots);
    step.polynomial = polynomial_of(op.mixer.spec);
    step.softmax = op.mixer.spec.score == Score::exponential;
    const int heads = step.cache.heads;
    step.inputs_from = find(op.q).first->operation;
    step.q = tagged_rows(op.q, heads, step.inputs_from);
    step.k = tagged_rows(op.k, heads, step.inputs_from);
    step.v = tagged_rows(op.v, heads, step.inputs_from);
    const auto numbers = [&](Value value) {
      return value == kNo ? nullptr : reinterpret_cast<const uint64_t*>(written_with(value, step.inputs_from).words);
    };
    step.log_decay = numbers(op.mixer.log_decay);
    step.dt = numbers(op.dt);
    step.d = floats(op.d);
    if (op.rope) {
      step.halves = op.rope->pairing == RopePairing::halves;
      step.turns = turns_of(*op.rope, step.cache.qk_dim / 2);
    }
    step.heads = static_cast<int>(rows_) * heads;
    share_out(step, cache.window(), cache.first_fold(), SharedMemoryPlan(rows_, widest()));
    step.partials = partials(int64_t{step.heads} * step.blocks * step.partial_width);
    Buffer& out = buffer(op.y, 1);
    out.operation = operation();
    step.out = reinterpret_cast<uint32_t*>(out.words);
    operations_.push_back(piece);
  }

  // Parts of a full turn by which each pair of dimensions turns from one position to the next.
  const double* turns_of(const RopeOp& rope, int half) {
    if (!turns_) {
      const Tensor turns = Tensor::empty({half}, DType::f64);
      for (int i = 0; i < half; ++i)
        turns.data<double>()[i] =
            rope.scaling(std::exp2(-std::log2(rope.base) * i / half)) * 0.15915494309189533577;  // 1 / 2π
      turns_ = to_device(turns, device_);
      held_.push_back(turns_);
    }
    return turns_.data<double>();
  }
  // All steps have one memory for their partial sums, which so stays in the L2 cache: a block that writes there for the
  // next step has read what comes of all sums of the previous one.
  uint64_t* partials(int64_t numbers) {
    if (!partials_ || partials_.size(0) < 2 * numbers) {
      partials_ = Tensor::zeros({2 * numbers}, DType::i32, device_);  // no word has a tag
      held_.push_back(partials_);
    }
    return static_cast<uint64_t*>(partials_.raw());
  }

 public:
  // Numbers of the widest input of a product.
  int64_t widest() const { return widest_input(*in_.plan); }
  static int64_t widest_input(const TokenPlan& plan) {
    int64_t widest = 8;
    for (const TokenOp& op : plan.ops)
      if (const auto* linear = std::get_if<FusedLinear>(&op.op))
        widest = std::max(widest, plan.plan.values[linear->x].width());
    return widest;
  }

 private:
  Device device_;
  const TokenProgramInputs& in_;
  const Plan& plan_;
  int64_t rows_;
  std::vector<Tensor>& held_;
  std::vector<Buffer> values_;
  std::vector<TokenPiece> operations_;
  size_t layer_ = 0;
  Tensor partials_, turns_;
  char* free_ = nullptr;  // what is left of the newest memory for words
  int64_t free_bytes_ = 0;
};

bool has_states(const TokenProgramInputs& inputs) {
  return std::ranges::any_of(inputs.mixers, [](const MixerCache* cache) { return cache->shape().state_rows > 0; });
}

std::string missing_linear(const TokenPlan& plan, const FusedLinear& op, const SharedMemoryPlan& memory) {
  const Plan& layer = plan.plan;
  if (op.parts.size() > kMostTokenParts) return fmt::format("{} products of one input", op.parts.size());
  const int64_t k = layer.values[op.x].width();
  if (k % 8 != 0) return fmt::format("an input of {} numbers, which is no multiple of 8", k);
  for (const FusedLinear::Part& part : op.parts) {
    const bool pair = part.kind == FusedLinear::Kind::swiglu;
    if (pair && op.parts.size() > 1) return "a gated pair beside other products";
    if ((pair ? 16 : 8) * row_units(static_cast<int>(k)) * 16 > memory.largest())
      return fmt::format("an input of {} numbers", k);
    if (part.conv_weight != kNo && layer.weights[part.conv_weight].shape[1] > 4)
      return fmt::format("a convolution over {} tokens", layer.weights[part.conv_weight].shape[1]);
    for (const Activation f : {part.activation, part.qk_activation})
      if (f != Activation::none && f != Activation::relu && f != Activation::silu) return "this activation";
  }
  return {};
}

std::string missing_mixer(const TokenPlan& plan, const FusedMixer& op, int64_t rows, const SharedMemoryPlan& memory) {
  const Plan& layer = plan.plan;
  const MixerSpec& spec = op.mixer.spec;
  const ValueInfo &q = layer.values[op.q], &v = layer.values[op.v], &y = layer.values[op.y];
  StepCall step{};
  Cache& cache = step.cache;
  cache.decay = spec.decay;
  cache.qk_dim = static_cast<int>(q.dim);
  cache.v_dim = static_cast<int>(v.dim);
  cache.features = feature_map(spec, q.dim);
  cache.state_rows = static_cast<int>(state_rows(spec, q.dim));
  for (const int dim : {cache.qk_dim, cache.v_dim})
    if (dim % 8 != 0 || dim > kLargestHead) return fmt::format("heads of {} numbers", dim);
  if (rows * y.heads > multiprocessors())
    return fmt::format("{} heads of all rows on {} multiprocessors", rows * y.heads, multiprocessors());
  step.softmax = spec.score == Score::exponential;
  if (step.softmax && spec.norm != Norm::sum) return "an exponential score that is not divided by its sum";
  if (spec.signed_decay) return "decays that may grow";
  if (spec.window > 0) return "a sliding window";
  if (op.mixer.log_decay != kNo && layer.values[op.mixer.log_decay].width() != y.heads)
    return "decays that heads share";
  if (!step.softmax && (cache.features.degree == 0 || cache.features.degree > 2)) return "a score of this degree";
  if (op.dt != kNo && v.heads != y.heads) return "time steps of values that heads share";
  step.heads = static_cast<int>(rows * y.heads);
  share_out(step, kChunkTokens, 1 << 20, memory);
  const int state = cache.state_rows > 0 ? state_bytes(step, kFewestRows) : state_bytes(step, 0);
  if (step.stages < 1 || state + window_bytes(cache, step.first_tokens) > memory.largest())
    return fmt::format("heads of {} and {} numbers for {} rows", cache.qk_dim, cache.v_dim, rows);
  return {};
}

}  // namespace
}  // namespace cuda

struct TokenProgram::Parts {
  Device device;
  std::vector<Tensor> held = {};
  Tensor logits = {};
  cuda::TokenWork work = {};
  int bytes = 0;  // of shared memory
};

std::string TokenProgram::missing(Device device, int64_t rows) {
  if (device.is_cpu()) return "a GPU";
  (void)cuda::stream(device);  // makes it current
  if (!cuda::has_token_kernel()) return "a GPU of compute capability 9.0 with all its multiprocessors";
  if (rows < 1 || rows > kMostRows) return fmt::format("{} sequences", rows);
  return {};
}

std::string TokenProgram::missing(Device device, const TokenPlan& plan, const TokenOp& op, int64_t rows) {
  using namespace cuda;
  if (std::string reason = missing(device, rows); !reason.empty()) return reason;
  const SharedMemoryPlan memory(rows, Builder::widest_input(plan));
  if (const auto* linear = std::get_if<FusedLinear>(&op.op)) return missing_linear(plan, *linear, memory);
  if (const auto* mixer = std::get_if<FusedMixer>(&op.op)) return missing_mixer(plan, *mixer, rows, memory);
  const Op& plain = std::get<Op>(op.op);
  if (std::holds_alternative<SplitOp>(plain)) return {};  // where the parts lie is known
  return fmt::format("{} on its own", name_of(plain));
}

std::string TokenProgram::missing(Device device, const TokenPlan& plan, int64_t rows) {
  if (std::string reason = missing(device, rows); !reason.empty()) return reason;
  for (const TokenOp& op : plan.ops)
    if (std::string reason = missing(device, plan, op, rows); !reason.empty()) return reason;
  return {};
}

int TokenProgram::resident_blocks(Device device, int shared_bytes) {
  (void)cuda::stream(device);  // makes it current
  return cuda::has_token_kernel() ? cuda::resident_token_blocks(shared_bytes) : 0;
}

TokenProgram::TokenProgram(Device device, const TokenProgramInputs& inputs) : parts_(new Parts{device}) {
  using namespace cuda;
  const int64_t rows = inputs.rows.size();
  const std::string reason = missing(device, *inputs.plan, rows);
  require(reason.empty(), "token_program: the kernel does not run {}. Decode with a graph instead.", reason);
  (void)stream(device);
  parts_->logits = Tensor::empty({rows, inputs.head.size(0)}, DType::f32, device);
  Builder builder(device, inputs, parts_->held);
  std::vector<TokenPiece> operations = builder.build(parts_->logits);

  const SharedMemoryPlan memory(rows, builder.widest());
  std::vector<TokenPiece> pieces;
  std::vector<int> bytes;
  for (TokenPiece& operation : operations) {
    operation.final = &operation == &operations.back();
    operation.operation = static_cast<int>(&operation - operations.data());
    for (int of_piece : cut(operation, memory, multiprocessors(), pieces)) bytes.push_back(of_piece);
  }
  place(pieces, bytes, memory.ring, rows == 1);

  const auto on_device = [&](const void* from, size_t size) {
    const Tensor copied = Tensor::empty({static_cast<int64_t>(size / 4)}, DType::i32, device);
    memory::copy(device, copied.raw(), {}, from, size);
    parts_->held.push_back(copied);
    return copied.raw();
  };
  std::vector<char> descriptions(pieces.size() * kDescriptionBytes);
  for (size_t p = 0; p < pieces.size(); ++p)
    std::memcpy(descriptions.data() + p * kDescriptionBytes, static_cast<const void*>(&pieces[p]), sizeof(TokenPiece));
  TokenWork& made = parts_->work;
  made.pieces = static_cast<const uint4*>(on_device(descriptions.data(), descriptions.size()));
  made.count = static_cast<int>(pieces.size());
  const std::vector<unsigned> tags(static_cast<size_t>(multiprocessors()), 1);  // no word has this one
  made.tags = static_cast<unsigned*>(on_device(tags.data(), tags.size() * sizeof(unsigned)));
  made.operations = static_cast<int>(operations.size());
  // Measured: where steps read windows alone, slower copies of weights leave more of the memory to them.
  made.weight_cycles = has_states(inputs) ? 54 : 74;
  made.caches =
      static_cast<SlotRecord* const*>(on_device(builder.caches.data(), builder.caches.size() * sizeof(SlotRecord*)));
  made.cache_count = static_cast<int>(builder.caches.size());
  made.slots = inputs.rows.table.data<int32_t>();
  made.rows = static_cast<int>(rows);
  made.warp_activations = memory.warp_activations / 16;
  made.sums = memory.sums;
  parts_->bytes = memory.all;
  // The program reads all of these for as long as it lives.
  for (const std::vector<Tensor>& layer : inputs.weights)
    parts_->held.insert(parts_->held.end(), layer.begin(), layer.end());
  parts_->held.insert(parts_->held.end(), inputs.conv.begin(), inputs.conv.end());
  for (const Tensor& x : {inputs.embedding, inputs.norm, inputs.head, inputs.rows.table}) parts_->held.push_back(x);
}

TokenProgram::~TokenProgram() {
  // The memory goes back to the device, which may not have finished the last run.
  if (parts_) synchronize(parts_->device);
}

const Tensor& TokenProgram::logits() const {
  return parts_->logits;
}

bool TokenProgram::run(const Tensor& ids) const {
  cuda::TokenWork work = parts_->work;
  work.ids = ids.data<int32_t>();
  work.id_stride = static_cast<int>(ids.stride(0));
  return run_token_kernel(parts_->device, work, parts_->bytes);
}

}  // namespace furious
