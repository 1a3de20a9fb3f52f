#include "ops/mixer/mixer.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/names.h"
#include "base/parallel.h"
#include "ops/elementwise.h"
#include "ops/mixer/cost.h"
#include "ops/mixer/features.h"
#include "ops/mixer/mixer_kernels.h"
#include "ops/mixer/reference.h"
#include "tensor/check.h"

namespace furious {
namespace {

struct NamedSpec {
  std::string_view name;
  MixerSpec spec;
};

constexpr NamedSpec kNamed[] = {
    {"softmax", {Score::exponential, false, Norm::sum}},
    {"linear", {Score::linear, false, Norm::sum}},
    {"linear-outnorm", {Score::linear, false, Norm::none}},
    {"mamba2", {Score::linear, true, Norm::none}},
    {"mamba2s", {Score::linear, true, Norm::none}},
    {"2mamba", {Score::squared, true, Norm::sum}},
    {"2mamba-dt", {Score::squared, true, Norm::sum}},
    {"2mamba-e", {Score::exponential, true, Norm::sum}},
    {"fox", {Score::exponential, true, Norm::sum}},
    {"2mamba-3", {Score::power, true, Norm::none, 0, 3}},
    {"2mamba-4", {Score::power, true, Norm::sum, 0, 4}},
    {"2mamba-series-2", {Score::series, true, Norm::sum, 0, 2}},
    {"2mamba-series-4", {Score::series, true, Norm::sum, 0, 4}},
};

constexpr std::string_view kFormNames[] = {"auto", "parallel", "chunked", "reference"};
constexpr std::string_view kPrecisionNames[] = {"auto", "bf16", "tf32", "tf32x3", "f32"};

void check_decay(const ArgumentCheck& check, const Tensor& log_decay, bool any_sign) {
  const auto scan = [&](auto zero) {
    using T = decltype(zero);
    const T* data = log_decay.data<T>();
    for (int64_t b = 0; b < log_decay.size(0); ++b)
      for (int64_t t = 0; t < log_decay.size(1); ++t)
        for (int64_t h = 0; h < log_decay.size(2); ++h) {
          const T value = data[b * log_decay.stride(0) + t * log_decay.stride(1) + h * log_decay.stride(2)];
          require(std::isfinite(value) && (any_sign || value <= 0),
                  "{}: argument \"log_decay\" holds {} at [{}, {}, {}], expected finite values{}", check.operation(),
                  value, b, t, h, any_sign ? "" : " of at most 0");
        }
  };
  if (log_decay.dtype() == DType::f64)
    scan(double{});
  else
    scan(float{});
}

void check_chunk(std::string_view operation, int64_t chunk) {
  require(chunk >= 0, "{}: argument \"chunk\" is {}, expected 0 or more", operation, chunk);
}

void check_form(std::string_view operation, Form form, Device device) {
  require(device.is_cpu() || form != Form::reference,
          "{}: argument \"form\" is reference, but tensors are on {}; the oracle is on the CPU only", operation,
          name_of(device));
}

void check_precision(std::string_view operation, MixerPrecision precision, Device device) {
  require(!device.is_cpu() || precision == MixerPrecision::automatic || precision == MixerPrecision::f32,
          "{}: argument \"precision\" is {}, but tensors are on the CPU, which computes in f32; use auto or f32",
          operation, name_of(precision));
}

std::vector<DType> input_dtypes(Form form) {
  if (form == Form::reference) return {DType::f64, DType::f32, DType::bf16, DType::f16};
  return {DType::f32, DType::bf16, DType::f16};
}

void check_qkv(const ArgumentCheck& check, const MixerInputs& in, Form form) {
  check.rank("q", in.q, 4);
  check.dtype("q", in.q, input_dtypes(form));
  require(in.first_query >= 0, "{}: argument \"first_query\" is {}, expected 0 or more", check.operation(),
          in.first_query);
  const auto like_q = [&](std::string_view argument, const Tensor& x, int64_t dim, int64_t length) {
    check.shape(argument, x, {in.q.size(0), length, ArgumentCheck::kAny, dim});
    check.dtype(argument, x, {in.q.dtype()});
    check.device(argument, x, in.q.device());
    check.unit_inner_stride(argument, x);
  };
  like_q("q", in.q, in.q.size(3), in.q.size(1));
  like_q("k", in.k, in.q.size(3), in.first_query + in.q.size(1));
  check.rank("v", in.v, 4);
  like_q("v", in.v, in.v.size(3), in.first_query + in.q.size(1));
  require(in.q.size(0) >= 1 && in.q.size(1) >= 1 && in.q.size(2) >= 1,
          "{}: argument \"q\" has shape {}, expected at least one batch, token and head", check.operation(),
          to_string(in.q.shape()));
  for (const auto& [argument, x] : {std::pair<std::string_view, const Tensor&>{"q", in.q}, {"v", in.v}})
    require(x.size(3) >= kSmallestDim && x.size(3) <= kLargestDim,
            "{}: argument \"{}\" has dimension {} per head, expected {} to {}", check.operation(), argument, x.size(3),
            kSmallestDim, kLargestDim);
  require(
      in.first_query == 0 || ((form == Form::automatic || form == Form::parallel || form == Form::reference) &&
                              !in.boundaries && !in.initial_state),
      "{}: argument \"first_query\" is {}, which only the parallel form without boundaries and states computes; give "
      "the queries of all tokens",
      check.operation(), in.first_query);
}

void check_state(const ArgumentCheck& check, std::string_view argument, const Tensor& state, const MixerSpec& spec,
                 const MixerShape& shape, DType dtype, Device device) {
  require(shape.state_rows > 0,
          "{}: argument \"{}\" was given, but there is no state of constant size for {} and dimension {}",
          check.operation(), argument, to_string(spec), shape.qk_dim);
  check.dense(argument, state, dtype, {shape.batch, shape.heads, shape.state_rows, shape.state_columns}, device);
}

DType accumulator_of(const Tensor& x) {
  return x.dtype() == DType::f64 ? DType::f64 : DType::f32;
}

bool is_f16_on_gpu(const MixerInputs& in) {
  return !in.q.device().is_cpu() && in.q.dtype() == DType::f16;
}
// log_decay with a head for each head of the result: the kernels know no other.
MixerInputs with_all_decays(MixerInputs in, int64_t heads) {
  const Tensor own = in.log_decay;
  const int64_t group = heads / own.size(2);
  in.log_decay = Tensor::empty({own.size(0), own.size(1), heads}, own.dtype(), own.device());
  const Tensor groups = in.log_decay.split_dim(2, own.size(2), group);
  for (int64_t i = 0; i < group; ++i) copy(groups.select(3, i), own);
  return in;
}

// own = the sum over the heads that each of its heads serves, of contiguous gradients.
void sum_decay_gradients(const Tensor& all, const Tensor& own) {
  const int64_t group = all.size(2) / own.size(2);
  const Tensor sum = Tensor::zeros(own.shape(), own.dtype(), own.device());
  if (own.dtype() == DType::f64) {  // of the oracle
    for (int64_t i = 0; i < all.elements(); ++i) sum.data<double>()[i / group] += all.data<double>()[i];
  } else {
    const Tensor groups = all.split_dim(2, own.size(2), group);
    for (int64_t i = 0; i < group; ++i) add_into(sum, to_dtype(groups.select(3, i), DType::f32));
  }
  copy(own, sum);
}

MixerInputs in_dtype(MixerInputs in, DType dtype) {
  for (Tensor* x : {&in.q, &in.k, &in.v}) *x = to_dtype(*x, dtype);
  return in;
}

}  // namespace

DType computed_dtype(const MixerOptions& options) {
  return options.precision == MixerPrecision::bf16 ? DType::bf16 : DType::f32;
}
MixerOptions computed_options(MixerOptions options, [[maybe_unused]] const MixerShape& shape,
                              [[maybe_unused]] Device device) {
  if (options.precision == MixerPrecision::bf16) options.precision = MixerPrecision::automatic;
#ifdef FURIOUS_CUDA
  else if (options.precision == MixerPrecision::automatic && cuda::has_tiles(shape, device))
    options.precision = MixerPrecision::tf32;
#endif
  return options;
}

MixerSpec mixer_spec(std::string_view name) {
  for (const NamedSpec& known : kNamed)
    if (known.name == name) return known.spec;
  unknown_name("mixer", name, mixer_names());
}

const std::vector<std::string>& mixer_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const NamedSpec& known : kNamed) list.emplace_back(known.name);
    return list;
  }();
  return names;
}

std::string to_string(const MixerSpec& spec) {
  constexpr std::string_view kScores[] = {"linear", "squared", "exponential", "power", "series"};
  return fmt::format("{}{}, {}, {}", kScores[static_cast<int>(spec.score)],
                     spec.degree > 0 ? fmt::format(" {}", spec.degree) : "",
                     !spec.decay         ? "no decay"
                     : spec.signed_decay ? "signed decay"
                                         : "decay",
                     spec.norm == Norm::sum ? "sum" : "none") +
         (spec.window > 0 ? fmt::format(", window {}", spec.window) : "");
}

Form form_from_name(std::string_view name) {
  std::vector<std::string> known;
  for (size_t i = 0; i < std::size(kFormNames); ++i) {
    if (kFormNames[i] == name) return static_cast<Form>(i);
    known.emplace_back(kFormNames[i]);
  }
  unknown_name("form", name, known);
}

std::string_view name_of(Form form) {
  return kFormNames[static_cast<int>(form)];
}

const std::vector<std::string>& mixer_precision_names() {
  static const std::vector<std::string> names(std::begin(kPrecisionNames), std::end(kPrecisionNames));
  return names;
}

MixerPrecision mixer_precision_from_name(std::string_view name) {
  const auto found = std::ranges::find(kPrecisionNames, name);
  if (found == std::end(kPrecisionNames)) unknown_name("mixer precision", name, mixer_precision_names());
  return static_cast<MixerPrecision>(found - std::begin(kPrecisionNames));
}

std::string_view name_of(MixerPrecision precision) {
  return kPrecisionNames[static_cast<int>(precision)];
}

int64_t state_rows(const MixerSpec& spec, int64_t qk_dim) {
  const FeatureMap map = feature_map(spec, qk_dim);
  return map.degree > 0 ? FeatureMap::tuples(map.width(), map.degree) : 0;
}

int64_t state_columns(const MixerSpec& spec, int64_t v_dim) {
  return v_dim + (spec.norm == Norm::sum ? 1 : 0);
}

void check_spec(std::string_view operation, const MixerSpec& spec) {
  require(spec.scale >= 0 && std::isfinite(spec.scale), "{}: argument \"scale\" is {}, expected 0 or more", operation,
          spec.scale);
  if (spec.score == Score::power)
    require(spec.degree >= 3 && spec.degree <= kLargestDegree,
            "{}: argument \"degree\" is {} for the score power, expected 3 to {}; 1 and 2 are the scores linear and "
            "squared",
            operation, spec.degree, kLargestDegree);
  else if (spec.score == Score::series)
    require(spec.degree >= 1 && spec.degree <= kLargestDegree,
            "{}: argument \"degree\" is {} for the score series, expected 1 to {}; all terms are the score exponential",
            operation, spec.degree, kLargestDegree);
  else
    require(spec.degree == 0, "{}: argument \"degree\" is {}, expected 0; only the scores power and series have one",
            operation, spec.degree);
  require(spec.decay || !spec.signed_decay,
          "{}: argument \"signed_decay\" is set, but the spec has no decay; set decay too", operation);
  require(
      spec.window == 0 ||
          (spec.window > 0 && spec.score == Score::exponential && spec.norm == Norm::sum && !spec.decay),
      "{}: argument \"window\" is {}, expected 0, or a positive one with an exponential score, sum norm and no decay",
      operation, spec.window);
}

MixerShape check_mixer(std::string_view operation, const MixerSpec& spec, const MixerInputs& in, Form form) {
  const ArgumentCheck check(operation);
  check_spec(operation, spec);
  check_qkv(check, in, form);
  require(form != Form::chunked || state_rows(spec, in.q.size(3)) > 0,
          "{}: argument \"form\" is chunked, but there is no state of constant size for {} and dimension {}; use "
          "parallel",
          operation, to_string(spec), in.q.size(3));
  MixerShape shape;
  shape.batch = in.q.size(0);
  shape.length = in.k.size(1);
  shape.first_query = in.first_query;
  shape.q_heads = in.q.size(2);
  shape.k_heads = in.k.size(2);
  shape.v_heads = in.v.size(2);
  shape.heads = shape.decay_heads = std::max({shape.q_heads, shape.k_heads, shape.v_heads});
  shape.qk_dim = in.q.size(3);
  shape.v_dim = in.v.size(3);
  shape.features = feature_map(spec, shape.qk_dim);
  shape.state_rows = state_rows(spec, shape.qk_dim);
  shape.state_columns = state_columns(spec, shape.v_dim);
  shape.scale = spec.scale > 0 ? spec.scale : 1.0f / std::sqrt(static_cast<float>(shape.qk_dim));
  for (const auto& [argument, x] : {std::pair<std::string_view, const Tensor&>{"q", in.q}, {"k", in.k}, {"v", in.v}})
    require(x.size(2) > 0 && shape.heads % x.size(2) == 0,
            "{}: argument \"{}\" has {} heads (shape {}), expected a divisor of {}", operation, argument, x.size(2),
            to_string(x.shape()), shape.heads);
  require(spec.decay == in.log_decay.defined(), "{}: argument \"log_decay\" {}", operation,
          spec.decay ? "is missing, but the spec has decay" : "was given, but the spec has no decay");
  if (spec.decay) {
    check.shape("log_decay", in.log_decay, {shape.batch, shape.length, ArgumentCheck::kAny});
    shape.decay_heads = in.log_decay.size(2);
    require(shape.decay_heads > 0 && shape.heads % shape.decay_heads == 0,
            "{}: argument \"log_decay\" has {} heads (shape {}), expected {} or a divisor of it", operation,
            shape.decay_heads, to_string(in.log_decay.shape()), shape.heads);
    check.dtype("log_decay", in.log_decay, {accumulator_of(in.q)});
    check.device("log_decay", in.log_decay, in.q.device());
    if (in.q.device().is_cpu()) check_decay(check, in.log_decay, spec.signed_decay);
  }
  if (in.initial_state)
    check_state(check, "initial_state", in.initial_state, spec, shape, accumulator_of(in.q), in.q.device());
  return shape;
}

namespace {
// A chunk longer than the text is as long as the text, but for kernels that want multiples of 256.
int64_t chunk_of(const MixerOptions& options, const MixerSpec& spec, const MixerShape& shape, Device device,
                 DType dtype) {
  const int64_t chunk =
      options.chunk > 0 ? options.chunk : default_chunk(spec, shape.qk_dim, shape.v_dim, device, dtype);
  return std::min(chunk, std::max<int64_t>(1, (shape.length + 255) / 256) * 256);
}
}  // namespace

MixerResult mixer_forward(const MixerSpec& spec, const MixerInputs& inputs, const MixerOptions& options,
                          const MixerResult& into) {
  constexpr std::string_view kOperation = "mixer_forward";
  const MixerShape shape = check_mixer(kOperation, spec, inputs, options.form);
  if (shape.decay_heads < shape.heads) return mixer_forward(spec, with_all_decays(inputs, shape.heads), options, into);
  const std::vector<Segment> segments = segments_of(kOperation, inputs.boundaries, shape.batch, shape.length);
  check_chunk(kOperation, options.chunk);
  require(!options.final_state || shape.state_rows > 0,
          "{}: argument \"final_state\" was requested, but there is no state of constant size for {} and dimension {}",
          kOperation, to_string(spec), shape.qk_dim);
  require(!options.final_state || shape.first_query == 0,
          "{}: argument \"first_query\" is {}, but a final state was requested; give the queries of all tokens",
          kOperation, shape.first_query);
  const Device device = inputs.q.device();
  const int64_t chunk = chunk_of(options, spec, shape, device, inputs.q.dtype());
  check_form(kOperation, options.form, device);
  check_precision(kOperation, options.precision, device);
  if (is_f16_on_gpu(inputs)) {
    const DType dtype = computed_dtype(options);
    if (into.out)
      ArgumentCheck(kOperation)
          .dense("into.out", into.out, DType::f16, {shape.batch, shape.queries(), shape.heads, shape.v_dim}, device);
#ifdef FURIOUS_CUDA
    cuda::warn_where_slow({spec, shape, inputs, segments, chunk, into, options.precision});
#endif
    MixerResult computed_into = into;
    computed_into.out = {};
    MixerResult result =
        mixer_forward(spec, in_dtype(inputs, dtype), computed_options(options, shape, device), computed_into);
    if (into.out) copy(into.out, result.out);
    result.out = into.out ? into.out : to_dtype(result.out, DType::f16);
    return result;
  }
  MixerResult result;
  const DType accumulator = accumulator_of(inputs.q);
  const auto output = [&](std::string_view argument, const Tensor& given, DType dtype, const Shape& wanted) {
    if (!given) return Tensor::empty(wanted, dtype, device);
    ArgumentCheck(kOperation).dense(argument, given, dtype, {wanted.begin(), wanted.end()}, device);
    return given;
  };
  const Shape per_query{shape.batch, shape.heads, shape.queries()};
  result.out = output("into.out", into.out, inputs.v.dtype(), {shape.batch, shape.queries(), shape.heads, shape.v_dim});
  if (spec.norm == Norm::sum) {
    result.normalizer = output("into.normalizer", into.normalizer, accumulator, per_query);
    if (spec.score == Score::exponential) result.maximum = output("into.maximum", into.maximum, accumulator, per_query);
  }
  if (options.final_state)
    result.final_state = output("into.final_state", into.final_state, accumulator,
                                {shape.batch, shape.heads, shape.state_rows, shape.state_columns});
  result.form = options.form == Form::automatic && shape.first_query > 0 ? Form::parallel : options.form;
#ifdef FURIOUS_CUDA
  if (!device.is_cpu()) {
    if (inputs.initial_state || options.final_state)
      result.form = Form::chunked;
    else if (result.form == Form::automatic)
      result.form = cuda::choose_form({spec, shape, inputs, segments, chunk, result, options.precision});
    result.chunk = result.form == Form::parallel ? shape.length : chunk;
    std::string_view kernel;
    result.states =
        cuda::mixer_forward({spec, shape, inputs, segments, result.chunk, result, options.precision, &kernel});
    result.kernel = kernel;
    return result;
  }
#endif
  if (result.form == Form::automatic) result.form = choose_form(spec, shape, inputs, segments, chunk);
  result.kernel = result.form == Form::reference ? "reference" : "cpu";
  if (result.form == Form::reference)
    reference::mixer_forward(spec, shape, inputs, segments, result);
  else
    cpu::mixer_forward({spec, shape, inputs, segments, result.form == Form::parallel ? shape.length : chunk, result});
  return result;
}

MixerGradients mixer_backward(const MixerSpec& spec, const MixerInputs& inputs, const MixerResult& result,
                              const Tensor& out_gradient, const Tensor& final_state_gradient,
                              const MixerOptions& options, const MixerGradients& into) {
  constexpr std::string_view kOperation = "mixer_backward";
  const ArgumentCheck check(kOperation);
  const Form form = options.form == Form::automatic ? result.form : options.form;
  check_chunk(kOperation, options.chunk);
  const MixerShape shape = check_mixer(kOperation, spec, inputs, form);
  require(shape.first_query == 0,
          "{}: argument \"first_query\" is {}, but only the forward pass has it; give the queries of all tokens",
          kOperation, shape.first_query);
  const std::vector<Segment> segments = segments_of(kOperation, inputs.boundaries, shape.batch, shape.length);
  const std::vector<int64_t> out_shape{shape.batch, shape.length, shape.heads, shape.v_dim};
  const DType accumulator = accumulator_of(inputs.q);
  const Device device = inputs.q.device();
  check_form(kOperation, form, device);
  check_precision(kOperation, options.precision, device);
  check.shape("result.out", result.out, out_shape);
  check.dtype("result.out", result.out, {inputs.v.dtype()});
  check.unit_inner_stride("result.out", result.out);
  check.shape("out_gradient", out_gradient, out_shape);
  check.dtype("out_gradient", out_gradient, {inputs.v.dtype()});
  check.device("out_gradient", out_gradient, inputs.v.device());
  check.unit_inner_stride("out_gradient", out_gradient);
  if (spec.norm == Norm::sum)
    check.dense("result.normalizer", result.normalizer, accumulator, {shape.batch, shape.heads, shape.length}, device);
  if (spec.norm == Norm::sum && spec.score == Score::exponential)
    check.dense("result.maximum", result.maximum, accumulator, {shape.batch, shape.heads, shape.length}, device);
  if (final_state_gradient) {
    check_state(check, "final_state_gradient", final_state_gradient, spec, shape, accumulator, device);
    check_state(check, "result.final_state", result.final_state, spec, shape, accumulator, device);
  }

  MixerGradients gradients = into;
  const auto gradient_of = [&](std::string_view argument, Tensor& gradient, const Tensor& input) {
    if (!gradient) {
      gradient = Tensor::empty_like(input);
      return;
    }
    check.shape(argument, gradient, {input.shape().begin(), input.shape().end()});
    check.dtype(argument, gradient, {input.dtype()});
    check.device(argument, gradient, input.device());
    if (input.rank() == 4) check.unit_inner_stride(argument, gradient);
  };
  gradient_of("into.q", gradients.q, inputs.q);
  gradient_of("into.k", gradients.k, inputs.k);
  gradient_of("into.v", gradients.v, inputs.v);
  if (spec.decay) gradient_of("into.log_decay", gradients.log_decay, inputs.log_decay);
  if (inputs.initial_state) {
    gradient_of("into.initial_state", gradients.initial_state, inputs.initial_state);
    check.contiguous("into.initial_state", gradients.initial_state);
  }

  if (shape.decay_heads < shape.heads) {
    const MixerInputs all = with_all_decays(inputs, shape.heads);
    const MixerGradients of_all = mixer_backward(spec, all, result, out_gradient, final_state_gradient, options,
                                                 {gradients.q, gradients.k, gradients.v, {}, gradients.initial_state});
    sum_decay_gradients(of_all.log_decay, gradients.log_decay);
    return gradients;
  }
  if (is_f16_on_gpu(inputs)) {
    const DType dtype = computed_dtype(options);
    MixerResult computed = result;
    computed.out = to_dtype(result.out, dtype);
    const MixerGradients wide = mixer_backward(spec, in_dtype(inputs, dtype), computed, to_dtype(out_gradient, dtype),
                                               final_state_gradient, computed_options(options, shape, device),
                                               {{}, {}, {}, gradients.log_decay, gradients.initial_state});
    copy(gradients.q, wide.q);
    copy(gradients.k, wide.k);
    copy(gradients.v, wide.v);
    return gradients;
  }
  const int64_t chunk = chunk_of(options, spec, shape, device, inputs.q.dtype());
#ifdef FURIOUS_CUDA
  if (!device.is_cpu()) {
    const bool parallel = form == Form::parallel && !inputs.initial_state && !final_state_gradient;
    const int64_t used = result.states ? result.chunk : parallel ? shape.length : chunk;
    cuda::mixer_backward({spec, shape, inputs, segments, used, result, options.precision}, out_gradient,
                         final_state_gradient, gradients);
    return gradients;
  }
#endif
  if (form == Form::reference)
    reference::mixer_backward(spec, shape, inputs, segments, out_gradient, final_state_gradient, gradients);
  else
    cpu::mixer_backward({spec, shape, inputs, segments, form == Form::parallel ? shape.length : chunk, result},
                        out_gradient, final_state_gradient, gradients);
  return gradients;
}

Variable mixer(Tape& tape, const MixerSpec& spec, const Variable& q, const Variable& k, const Variable& v,
               const Variable& log_decay, const Tensor& boundaries, const MixerOptions& options) {
  MixerInputs inputs{q.value(), k.value(), v.value(), log_decay ? log_decay.value() : Tensor(), boundaries, {}};
  MixerResult result = mixer_forward(spec, inputs, options);
  return tape.record(result.out, {q, k, v, log_decay}, [=](const Tensor& gradient) {
    MixerGradients gradients{q.new_gradient(), k.new_gradient(), v.new_gradient(), {}, {}};
    if (log_decay) gradients.log_decay = log_decay.new_gradient();
    mixer_backward(spec, inputs, result, gradient, {}, options, gradients);
    q.add_gradient(gradients.q);
    k.add_gradient(gradients.k);
    v.add_gradient(gradients.v);
    if (log_decay) log_decay.add_gradient(gradients.log_decay);
  });
}

}  // namespace furious
