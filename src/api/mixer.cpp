#include "furious/mixer.h"

#include <algorithm>
#include <array>
#include <span>

#include "api/convert.h"
#include "api/convert_mixer.h"
#include "base/boundary.h"
#include "base/error.h"
#include "base/names.h"
#include "base/parallel.h"
#include "ops/elementwise.h"
#include "ops/mixer/cost.h"
#include "ops/mixer/mixer_kernels.h"
#include "tensor/arena.h"
#include "tensor/check.h"
#include "tensor/stream.h"

namespace furious::ops {
namespace {

template <class Enum, size_t N>
Enum from_name(std::string_view kind, std::string_view name, const std::array<std::string, N>& names) {
  const auto found = std::ranges::find(names, name);
  if (found == names.end()) unknown_name(kind, name, names);
  return static_cast<Enum>(found - names.begin());
}

// Results are written contiguously, on a GPU from a multiple of 16 bytes on.
bool dense(const furious::Tensor& x) {
  return x.is_contiguous() && (x.device().is_cpu() || reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0);
}

// Gradients of q, k and v are written in rows, on a GPU each from a multiple of 16 bytes on; those of log_decay (rank
// 3) with any strides.
bool has_rows(const furious::Tensor& x) {
  if (x.rank() == 3 || dense(x)) return true;
  bool rows = x.size(-1) <= 1 || x.stride(-1) == 1;
  if (x.device().is_cpu()) return rows;
  for (int i = 0; i + 1 < x.rank(); ++i) rows = rows && x.stride(i) > 0 && x.stride(i) % 8 == 0;
  return rows && reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
}

// Memory for a result: new, the caller's, or scratch that finish() copies to memory of the caller in which the kernels
// cannot write.
class Output {
 public:
  using Fits = bool (*)(const furious::Tensor&);

  Output() = default;  // none
  Output(std::string_view operation, std::string_view argument, const furious::Tensor& given,
         const furious::Shape& shape, furious::DType dtype, furious::Device device, Fits fits)
      : given_(given) {
    if (given) {
      const ArgumentCheck check(operation);
      check.shape(argument, given, {shape.begin(), shape.end()});
      check.dtype(argument, given, {dtype});
      check.device(argument, given, device);
      for (int i = 0; i < given.rank(); ++i)
        require(given.size(i) <= 1 || given.stride(i) != 0,
                "{}: argument \"{}\" of shape {} has stride 0 in dimension {}; give memory for every element",
                operation, argument, to_string(given.shape()), i);
    }
    tensor_ = given && fits(given) ? given : furious::Tensor::empty(shape, dtype, device);
  }
  const furious::Tensor& tensor() const { return tensor_; }
  // The result, after it has been computed.
  Tensor finish() const {
    if (!given_ || given_.raw() == tensor_.raw()) return ops::external(tensor_);
    copy(given_, tensor_);
    return ops::external(given_);
  }

 private:
  furious::Tensor given_, tensor_;
};

// The maps of a GPU's asynchronous copies have positive strides; views with others (expanded, reversed) are copied.
furious::Tensor readable(const furious::Tensor& x) {
  if (!x || x.device().is_cpu() || x.elements() == 0) return x;
  bool forward = true;
  for (int i = 0; i < x.rank(); ++i) forward = forward && (x.size(i) <= 1 || x.stride(i) > 0);
  if (forward || x.stride(-1) != 1) return x;  // a stride of the last dimension other than 1 is refused later
  return to_dtype(x, x.dtype());
}

furious::Tensor contiguous(const furious::Tensor& x) {
  return !x || dense(x) ? x : to_dtype(x, x.dtype());
}

furious::Device device_of(const Tensor& x) {
  return x ? ops::internal(x.device()) : furious::Device();
}

// Consecutive sequences of one length, which are one call: tokens from `token` on, sequences from `sequence` on.
struct Piece {
  int64_t token = 0, sequence = 0;
  int64_t count = 0, length = 0;
};

// A checked call, cut into pieces where sequences are packed and have states.
struct Call {
  std::string_view operation;
  furious::MixerSpec spec;
  furious::MixerInputs inputs;
  furious::MixerOptions options;
  furious::MixerShape shape;
  int64_t sequences = 0;
  std::vector<Piece> pieces;  // none: the call as it is

  furious::Device device() const { return inputs.q.device(); }
  furious::DType accumulator() const {
    return inputs.q.dtype() == furious::DType::f64 ? furious::DType::f64 : furious::DType::f32;
  }
  furious::Shape out_shape() const { return {shape.batch, shape.length, shape.heads, shape.v_dim}; }
  furious::Shape normalizer_shape() const { return {shape.batch, shape.heads, shape.length}; }
  furious::Shape state_shape() const { return {sequences, shape.heads, shape.state_rows, shape.state_columns}; }

  Output result(std::string_view argument, const Tensor& given, const furious::Shape& wanted,
                furious::DType dtype) const {
    return Output(operation, argument, ops::internal(given), wanted, dtype, device(), dense);
  }
  Output gradient(std::string_view argument, const Tensor& given, const furious::Tensor& input) const {
    return Output(operation, argument, ops::internal(given), input.shape(), input.dtype(), device(),
                  argument == "into.initial_state" ? dense : has_rows);
  }
};

// Of tensors [1, T, …]: [count, length, …].
furious::Tensor tokens_of(const Piece& piece, const furious::Tensor& x) {
  if (!x) return x;
  return x.slice(1, piece.token, piece.count * piece.length).split_dim(1, piece.count, piece.length).select(0, 0);
}
// Of a tensor with H·T numbers, those of the piece as [count, H, length].
furious::Tensor rows_of(const Piece& piece, const furious::Tensor& x, int64_t heads) {
  if (!x) return x;
  return x.view({x.elements()})
      .slice(0, heads * piece.token, heads * piece.count * piece.length)
      .view({piece.count, heads, piece.length});
}
furious::Tensor states_of(const Piece& piece, const furious::Tensor& x) {
  return x ? x.slice(0, piece.sequence, piece.count) : x;
}
furious::MixerInputs inputs_of(const Piece& piece, const furious::MixerInputs& in) {
  return {tokens_of(piece, in.q),
          tokens_of(piece, in.k),
          tokens_of(piece, in.v),
          tokens_of(piece, in.log_decay),
          {},
          contiguous(states_of(piece, in.initial_state))};
}

void check_cu_seqlens(std::string_view operation, std::span<const int64_t> starts, int64_t batch, int64_t length) {
  require(batch == 1, "{}: argument \"cu_seqlens\" was given with a batch of {}; pack all sequences into one row",
          operation, batch);
  require(starts.size() >= 2 && starts.front() == 0 && starts.back() == length,
          "{}: argument \"cu_seqlens\" has {} numbers, expected 2 or more, from 0 to the length {}", operation,
          starts.size(), length);
  require(length <= INT32_MAX, "{}: {} tokens in packed sequences, expected at most {}; use shorter rows", operation,
          length, INT32_MAX);
  for (size_t i = 1; i < starts.size(); ++i)
    require(starts[i] > starts[i - 1],
            "{}: argument \"cu_seqlens\" holds {} at position {} after {}; every sequence needs one token or more",
            operation, starts[i], i, starts[i - 1]);
}

std::vector<Piece> pieces_of(std::span<const int64_t> starts) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    const int64_t length = starts[i + 1] - starts[i];
    if (!pieces.empty() && pieces.back().length == length)
      ++pieces.back().count;
    else
      pieces.push_back({starts[i], static_cast<int64_t>(i), 1, length});
  }
  return pieces;
}

furious::Tensor boundaries_of(std::span<const int64_t> starts) {
  furious::Tensor boundaries = furious::Tensor::empty({static_cast<int64_t>(starts.size()) - 1}, furious::DType::i32);
  for (size_t i = 0; i + 1 < starts.size(); ++i) boundaries.data<int32_t>()[i] = static_cast<int32_t>(starts[i]);
  return boundaries;
}

furious::MixerOptions internal(std::string_view operation, const MixerOptions& options) {
  require(options.form <= Form::reference, "{}: argument \"form\" is {}, expected a Form", operation,
          static_cast<int>(options.form));
  require(options.precision <= Precision::f32, "{}: argument \"precision\" is {}, expected a Precision", operation,
          static_cast<int>(options.precision));
  return {static_cast<furious::Form>(options.form), options.chunk, options.final_state,
          static_cast<furious::MixerPrecision>(options.precision)};
}

// Checks all but the state and the options, which the engine checks.
Call call_of(std::string_view operation, const MixerSpec& spec, const MixerInputs& in, const MixerOptions& options) {
  Call call{operation, internal(operation, spec), {}, internal(operation, options), {}, 0, {}};
  call.inputs = {ops::internal(in.q), ops::internal(in.k), ops::internal(in.v), ops::internal(in.log_decay), {}, {}};
  call.shape = check_mixer(operation, call.spec, call.inputs, call.options.form);
  call.inputs.q = readable(call.inputs.q);
  call.inputs.k = readable(call.inputs.k);
  call.inputs.v = readable(call.inputs.v);
  call.inputs.initial_state = contiguous(ops::internal(in.initial_state));
  call.sequences = call.shape.batch;
  if (in.cu_seqlens.empty()) return call;
  check_cu_seqlens(operation, in.cu_seqlens, call.shape.batch, call.shape.length);
  call.sequences = static_cast<int64_t>(in.cu_seqlens.size()) - 1;
  if (!in.initial_state && !options.final_state) {
    call.inputs.boundaries = boundaries_of(in.cu_seqlens);
    return call;
  }
  call.pieces = pieces_of(in.cu_seqlens);
  if (in.initial_state && call.shape.state_rows > 0) {
    const furious::Shape state = call.state_shape();
    ArgumentCheck(operation).shape("initial_state", call.inputs.initial_state, {state.begin(), state.end()});
  }
  return call;
}

// A part of a result: scratch where the part begins at an address that the kernels cannot write.
Output part_of(const Call& call, const furious::Tensor& part, Output::Fits fits = dense) {
  return part ? Output(call.operation, "into", part, part.shape(), part.dtype(), part.device(), fits) : Output();
}

furious::MixerResult forward(const Call& call, const furious::MixerResult& into) {
  if (call.pieces.empty()) return furious::mixer_forward(call.spec, call.inputs, call.options, into);
  furious::MixerResult result = into;
  for (const Piece& piece : call.pieces) {
    const Output out = part_of(call, tokens_of(piece, into.out)),
                 normalizer = part_of(call, rows_of(piece, into.normalizer, call.shape.heads)),
                 maximum = part_of(call, rows_of(piece, into.maximum, call.shape.heads)),
                 final_state = part_of(call, states_of(piece, into.final_state));
    furious::MixerResult part;
    part.out = out.tensor();
    part.normalizer = normalizer.tensor();
    part.maximum = maximum.tensor();
    part.final_state = final_state.tensor();
    part = furious::mixer_forward(call.spec, inputs_of(piece, call.inputs), call.options, part);
    for (const Output* output : {&out, &normalizer, &maximum, &final_state}) output->finish();
    result.form = part.form;
    result.chunk = part.chunk;
    result.kernel = part.kernel;
  }
  return result;
}

void backward(const Call& call, const furious::MixerResult& result, const furious::Tensor& out_gradient,
              const furious::Tensor& final_state_gradient, const furious::MixerGradients& into) {
  if (call.pieces.empty()) {
    furious::mixer_backward(call.spec, call.inputs, result, out_gradient, final_state_gradient, call.options, into);
    return;
  }
  for (const Piece& piece : call.pieces) {
    furious::MixerResult part = result;
    part.out = tokens_of(piece, result.out);
    part.normalizer = contiguous(rows_of(piece, result.normalizer, call.shape.heads));
    part.maximum = contiguous(rows_of(piece, result.maximum, call.shape.heads));
    part.final_state = contiguous(states_of(piece, result.final_state));
    const Output q = part_of(call, tokens_of(piece, into.q), has_rows),
                 k = part_of(call, tokens_of(piece, into.k), has_rows),
                 v = part_of(call, tokens_of(piece, into.v), has_rows),
                 log_decay = part_of(call, tokens_of(piece, into.log_decay), has_rows),
                 initial_state = part_of(call, states_of(piece, into.initial_state));
    furious::mixer_backward(call.spec, inputs_of(piece, call.inputs), part, tokens_of(piece, out_gradient),
                            contiguous(states_of(piece, final_state_gradient)), call.options,
                            {q.tensor(), k.tensor(), v.tensor(), log_decay.tensor(), initial_state.tensor()});
    for (const Output* output : {&q, &k, &v, &log_decay, &initial_state}) output->finish();
  }
}

// Of the tensors that a call in pieces cuts: the engine checks the pieces only.
void check_whole(const Call& call, std::string_view argument, const furious::Tensor& x, const furious::Shape& wanted) {
  if (!call.pieces.empty() && x) ArgumentCheck(call.operation).shape(argument, x, {wanted.begin(), wanted.end()});
}

}  // namespace

MixerSpec mixer_spec(std::string_view name) try { return external(furious::mixer_spec(name)); } catch (...) {
  rethrow_as_error();
}

std::vector<std::string> mixer_names() {
  return furious::mixer_names();
}

Score score_from_name(std::string_view name) try {
  return from_name<Score>("score", name,
                          std::array<std::string, 5>{"linear", "squared", "exponential", "power", "series"});
} catch (...) {
  rethrow_as_error();
}

Norm norm_from_name(std::string_view name) try {
  return from_name<Norm>("norm", name, std::array<std::string, 2>{"none", "sum"});
} catch (...) {
  rethrow_as_error();
}

Form form_from_name(std::string_view name) try {
  return static_cast<Form>(furious::form_from_name(name));
} catch (...) {
  rethrow_as_error();
}

Precision precision_from_name(std::string_view name) try {
  return static_cast<Precision>(furious::mixer_precision_from_name(name));
} catch (...) {
  rethrow_as_error();
}

std::string name_of(Form form) {
  require(form <= Form::reference, "name_of: form {}, expected a Form", static_cast<int>(form));
  return std::string(furious::name_of(static_cast<furious::Form>(form)));
}

int64_t state_rows(const MixerSpec& spec, int64_t qk_dim) try {
  const furious::MixerSpec own = internal("state_rows", spec);
  check_spec("state_rows", own);
  require(qk_dim >= kSmallestDim && qk_dim <= kLargestDim, "state_rows: dimension {} per head, expected {} to {}",
          qk_dim, kSmallestDim, kLargestDim);
  return furious::state_rows(own, qk_dim);
} catch (...) {
  rethrow_as_error();
}

int64_t state_columns(const MixerSpec& spec, int64_t v_dim) {
  return furious::state_columns(internal("state_columns", spec), v_dim);
}

MixerResult mixer_forward(const MixerSpec& spec, const MixerInputs& inputs, const MixerOptions& options,
                          const MixerResult& into) try {
  const KeepCurrentDevice keep(device_of(inputs.q));
  const Call call = call_of("mixer_forward", spec, inputs, options);
  const bool sum = spec.norm == Norm::sum;
  const Output out = call.result("into.out", into.out, call.out_shape(), call.inputs.v.dtype());
  Output normalizer, maximum, final_state;
  if (sum) normalizer = call.result("into.normalizer", into.normalizer, call.normalizer_shape(), call.accumulator());
  if (sum && spec.score == Score::exponential)
    maximum = call.result("into.maximum", into.maximum, call.normalizer_shape(), call.accumulator());
  if (options.final_state && call.shape.state_rows > 0)  // where there is no state, the engine says so
    final_state = call.result("into.final_state", into.final_state, call.state_shape(), call.accumulator());
  furious::MixerResult memory;
  memory.out = out.tensor();
  memory.normalizer = normalizer.tensor();
  memory.maximum = maximum.tensor();
  memory.final_state = final_state.tensor();
  const furious::MixerResult result = forward(call, memory);
  return {out.finish(),
          normalizer.finish(),
          maximum.finish(),
          final_state.finish(),
          static_cast<Form>(result.form),
          result.chunk,
          std::string(result.kernel),
          ops::external(result.states)};
} catch (...) {
  rethrow_as_error();
}

MixerGradients mixer_backward(const MixerSpec& spec, const MixerInputs& inputs, const MixerResult& result,
                              const Tensor& out_gradient, const Tensor& final_state_gradient,
                              const MixerOptions& options, const MixerGradients& into) try {
  const KeepCurrentDevice keep(device_of(inputs.q));
  const Call call = call_of("mixer_backward", spec, inputs, options);
  furious::MixerResult forward_result;
  // Memory of the caller, which may have any strides.
  forward_result.out = ops::internal(result.out);
  if (forward_result.out && !has_rows(forward_result.out)) forward_result.out = contiguous(forward_result.out);
  forward_result.normalizer = contiguous(ops::internal(result.normalizer));
  forward_result.maximum = contiguous(ops::internal(result.maximum));
  forward_result.final_state = contiguous(ops::internal(result.final_state));
  forward_result.form = static_cast<furious::Form>(result.form);
  forward_result.chunk = result.chunk;
  if (call.pieces.empty()) forward_result.states = ops::internal(result.states);
  const furious::Tensor gradient_out = readable(ops::internal(out_gradient));
  const furious::Tensor gradient_state = contiguous(ops::internal(final_state_gradient));
  ArgumentCheck(call.operation).device("result.out", forward_result.out, call.device());
  check_whole(call, "result.out", forward_result.out, call.out_shape());
  check_whole(call, "result.normalizer", forward_result.normalizer, call.normalizer_shape());
  check_whole(call, "result.maximum", forward_result.maximum, call.normalizer_shape());
  check_whole(call, "result.final_state", forward_result.final_state, call.state_shape());
  check_whole(call, "out_gradient", gradient_out, call.out_shape());
  check_whole(call, "final_state_gradient", gradient_state, call.state_shape());

  const Output q = call.gradient("into.q", into.q, call.inputs.q), k = call.gradient("into.k", into.k, call.inputs.k),
               v = call.gradient("into.v", into.v, call.inputs.v);
  Output log_decay, initial_state;
  if (spec.decay) log_decay = call.gradient("into.log_decay", into.log_decay, call.inputs.log_decay);
  if (inputs.initial_state)
    initial_state = call.gradient("into.initial_state", into.initial_state, call.inputs.initial_state);
  backward(call, forward_result, gradient_out, gradient_state,
           {q.tensor(), k.tensor(), v.tensor(), log_decay.tensor(), initial_state.tensor()});
  return {q.finish(), k.finish(), v.finish(), log_decay.finish(), initial_state.finish()};
} catch (...) {
  rethrow_as_error();
}

Tensor mixer_step(const MixerSpec& spec, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& log_decay,
                  const Tensor& state, const Tensor& out) try {
  constexpr std::string_view kOperation = "mixer_step";
  const KeepCurrentDevice keep(device_of(q));
  const ArgumentCheck check(kOperation);
  const auto token = [&](std::string_view argument, const Tensor& given, int rank) {
    const furious::Tensor x = ops::internal(given);
    check.rank(argument, x, rank);
    return ops::external(x.split_dim(0, x.size(0), 1));
  };
  const MixerInputs inputs{token("q", q, 3), token("k", k, 3), token("v", v, 3),
                           log_decay ? token("log_decay", log_decay, 2) : Tensor()};
  Call call = call_of(kOperation, spec, inputs, {});
  require(call.shape.state_rows > 0,
          "{}: there is no state of constant size for {} and dimension {}; keep the keys and values of all tokens and "
          "use mixer_forward",
          kOperation, to_string(call.spec), call.shape.qk_dim);
  const furious::Tensor own_state = ops::internal(state);
  check.present("state", own_state);
  const Output output(kOperation, "out", out ? ops::internal(token("out", out, 3)) : furious::Tensor(),
                      call.out_shape(), call.inputs.v.dtype(), call.device(), dense);
  // The new state is computed beside the old one, which the kernels still read.
  const Output next(kOperation, "state", own_state, call.state_shape(), call.accumulator(), call.device(),
                    [](const furious::Tensor&) { return false; });
  call.inputs.initial_state = contiguous(own_state);
  call.options.final_state = true;
  furious::MixerResult memory;
  memory.out = output.tensor();
  memory.final_state = next.tensor();
  forward(call, memory);
  next.finish();
  const furious::Tensor result = ops::internal(output.finish());
  return out ? out : ops::external(result.select(1, 0));
} catch (...) {
  rethrow_as_error();
}

namespace {

MixerInputs zero_inputs(const MixerSpec& spec, const MixerSizes& sizes) {
  const int64_t sequences = sizes.cu_seqlens.empty() ? sizes.batch : static_cast<int64_t>(sizes.cu_seqlens.size()) - 1;
  const DType accumulator = sizes.dtype == DType::f64 ? DType::f64 : DType::f32;
  const auto zeros = [&](const std::vector<int64_t>& shape, DType dtype) {
    return Tensor::zeros(shape, dtype, sizes.device);
  };
  MixerInputs inputs{zeros({sizes.batch, sizes.length, sizes.qk_heads, sizes.qk_dim}, sizes.dtype),
                     zeros({sizes.batch, sizes.length, sizes.qk_heads, sizes.qk_dim}, sizes.dtype),
                     zeros({sizes.batch, sizes.length, sizes.heads, sizes.v_dim}, sizes.dtype)};
  const int64_t heads = std::max(sizes.heads, sizes.qk_heads);
  if (spec.decay) inputs.log_decay = zeros({sizes.batch, sizes.length, heads}, accumulator);
  if (sizes.initial_state)
    inputs.initial_state =
        zeros({sequences, heads, state_rows(spec, sizes.qk_dim), state_columns(spec, sizes.v_dim)}, accumulator);
  inputs.cu_seqlens = sizes.cu_seqlens;
  return inputs;
}

// Tensors of these sizes for checks: nothing reads or writes their elements.
MixerInputs inputs_without_memory(const MixerSpec& spec, const MixerSizes& sizes) {
  const auto tensor = [&](const std::vector<int64_t>& shape, DType dtype) {
    return Tensor::view(reinterpret_cast<void*>(uintptr_t{4096}), shape, dtype, sizes.device);
  };
  MixerInputs inputs{tensor({sizes.batch, sizes.length, sizes.qk_heads, sizes.qk_dim}, sizes.dtype),
                     tensor({sizes.batch, sizes.length, sizes.qk_heads, sizes.qk_dim}, sizes.dtype),
                     tensor({sizes.batch, sizes.length, sizes.heads, sizes.v_dim}, sizes.dtype)};
  if (spec.decay)
    inputs.log_decay = tensor({sizes.batch, sizes.length, std::max(sizes.heads, sizes.qk_heads)}, DType::f32);
  inputs.cu_seqlens = sizes.cu_seqlens;
  return inputs;
}

}  // namespace

MixerCost mixer_cost(const MixerSpec& spec, const MixerSizes& sizes, const MixerOptions& options) try {
  constexpr std::string_view kOperation = "mixer_cost";
  check_spec(kOperation, internal(kOperation, spec));
  require(options.chunk >= 0, "{}: argument \"chunk\" is {}, expected 0 or more", kOperation, options.chunk);
  // The CPU would look at the decays.
  MixerSpec counted = spec;
  if (sizes.device.is_cpu()) counted.decay = counted.signed_decay = false;
  const bool states = sizes.initial_state || options.final_state;
  MixerOptions without_state = options;
  without_state.final_state = false;
  const bool f16 = !sizes.device.is_cpu() && sizes.dtype == DType::f16;
  MixerSizes computed = sizes;
  if (f16) computed.dtype = ops::external(computed_dtype(internal(kOperation, options)));
  const KeepCurrentDevice keep(internal(sizes.device));
  Call call = call_of(kOperation, counted, inputs_without_memory(counted, computed), without_state);
  if (f16) call.options = computed_options(call.options, call.shape, call.device());
  require(!states || call.shape.state_rows > 0, "{}: there is no state of constant size for {} and dimension {}",
          kOperation, to_string(call.spec), call.shape.qk_dim);
  const std::vector<Segment> segments =
      segments_of(kOperation, call.inputs.boundaries, call.shape.batch, call.shape.length);
  MixerCost cost;
  const int64_t chunk = options.chunk > 0 ? options.chunk
                                          : default_chunk(call.spec, call.shape.qk_dim, call.shape.v_dim, call.device(),
                                                          call.inputs.q.dtype());
  furious::Form form = call.options.form;
#ifdef FURIOUS_CUDA
  if (!call.device().is_cpu()) {
    if (states)
      form = furious::Form::chunked;
    else if (form == furious::Form::automatic)
      form = cuda::choose_form(
          {call.spec, call.shape, call.inputs, segments, chunk, furious::MixerResult(), call.options.precision});
  }
#endif
  if (form == furious::Form::automatic) form = choose_form(call.spec, call.shape, call.inputs, segments, chunk);
  const bool chunked = form == furious::Form::chunked;
  cost.form = static_cast<Form>(form);
  cost.chunk = chunked ? chunk : call.shape.length;
  const auto flops = [&](Pass pass) {
    return chunked ? chunked_flops(call.shape, segments, chunk, pass) : parallel_flops(call.shape, segments, pass);
  };
  cost.forward_flops = flops(Pass::forward);
  cost.backward_flops = flops(Pass::backward);
  const auto bytes = [](const furious::Shape& shape, furious::DType dtype) {
    return shape.elements() * static_cast<int64_t>(size_of(dtype));
  };
  cost.state_bytes = bytes(call.state_shape(), call.accumulator());
  const int64_t numbers = spec.norm == Norm::none ? 0 : spec.score == Score::exponential ? 2 : 1;
  cost.output_bytes = bytes(call.out_shape(), internal(sizes.dtype)) +
                      numbers * bytes(call.normalizer_shape(), call.accumulator()) +
                      (options.final_state ? cost.state_bytes : 0);
  return cost;
} catch (...) {
  rethrow_as_error();
}

MixerScratch mixer_scratch(const MixerSpec& spec, const MixerSizes& sizes, const MixerOptions& options) try {
  const MixerInputs inputs = zero_inputs(spec, sizes);
  // The first run makes what lives as long as the process, like the workspace of cuBLASLt.
  MixerResult result = mixer_forward(spec, inputs, options);
  const MixerGradients gradients = mixer_backward(spec, inputs, result, result.out, {}, options);
  const furious::Device device = internal(sizes.device);
  const KeepCurrentDevice keep(device);
  // Threads of a loop would not allocate in an arena of this one.
  const int64_t workers = device.is_cpu() ? threads() : 1;
  const ThreadLimit limit(device.is_cpu() ? 1 : 0);
  Arena arena(device);
  const auto peak = [&](const auto& pass) {
    const Arena::Scope scope(arena);
    arena.reset_peak();
    pass();
    furious::synchronize(device);
    return static_cast<int64_t>(arena.usage().peak) * workers;
  };
  result.states = {};
  MixerScratch scratch;
  scratch.forward_bytes = peak([&] { mixer_forward(spec, inputs, options, result); });
  scratch.backward_bytes = peak([&] { mixer_backward(spec, inputs, result, result.out, {}, options, gradients); });
  return scratch;
} catch (...) {
  rethrow_as_error();
}

}  // namespace furious::ops
