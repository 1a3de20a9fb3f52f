// furious/mixer.h for the Python side, which allocates the results and names the arguments.
#include "furious/mixer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "tensors.h"

namespace furious_python {
namespace {

namespace ops = furious::ops;

// What a call computes, made once for each set of options.
struct MixerCall {
  std::string text;  // the options, as the Python side writes them
  ops::MixerSpec spec;
  ops::MixerOptions options;
};

MixerCall call_of(const std::string& text, const std::string& score, const std::string& norm, bool decay,
                  std::optional<double> scale, int degree, bool signed_decay, const std::string& form, int64_t chunk,
                  bool final_state, const std::string& precision) {
  MixerCall call;
  call.text = text;
  call.spec.score = ops::score_from_name(score);
  call.spec.norm = ops::norm_from_name(norm);
  call.spec.decay = decay;
  call.spec.degree = degree;
  call.spec.signed_decay = signed_decay;
  if (scale.has_value() && !(*scale > 0))
    throw furious::Error("mixer: argument \"scale\" is " + std::to_string(*scale) +
                         ", expected a number above 0, or None for 1/sqrt(K)");
  call.spec.scale = static_cast<float>(scale.value_or(0));
  call.options.form = ops::form_from_name(form);
  call.options.chunk = chunk;
  call.options.final_state = final_state;
  call.options.precision = ops::precision_from_name(precision);
  return call;
}

// What the forward pass leaves for the backward pass, beside tensors.
struct MixerRan {
  ops::Form form = ops::Form::automatic;
  int64_t chunk = 0;
  std::string kernel;
  ops::Tensor states;
};

using Starts = std::vector<int64_t>;
using Stream = std::optional<uintptr_t>;  // a cudaStream_t; None: on a CPU

template <class Work>
auto on_stream(const ops::Tensor& q, Stream stream, const Work& work) {
  const nb::gil_scoped_release release;
  std::optional<ops::StreamScope> scope;
  if (stream.has_value() && q && !q.device().is_cpu()) scope.emplace(q.device(), reinterpret_cast<void*>(*stream));
  return work();
}

ops::MixerInputs inputs_of(nb::handle q, nb::handle k, nb::handle v, nb::handle log_decay, nb::handle initial_state,
                           Starts cu_seqlens) {
  return {tensor_of(q, "q"),
          tensor_of(k, "k"),
          tensor_of(v, "v"),
          tensor_of(log_decay, "log_decay"),
          tensor_of(initial_state, "initial_state"),
          std::move(cu_seqlens)};
}

MixerRan forward(const MixerCall& call, nb::handle q, nb::handle k, nb::handle v, nb::handle log_decay,
                 nb::handle initial_state, Starts cu_seqlens, nb::handle out, nb::handle normalizer, nb::handle maximum,
                 nb::handle final_state, Stream stream) {
  const ops::MixerInputs inputs = inputs_of(q, k, v, log_decay, initial_state, std::move(cu_seqlens));
  ops::MixerResult into;
  into.out = tensor_of(out, "out", true);
  into.normalizer = tensor_of(normalizer, "normalizer", true);
  into.maximum = tensor_of(maximum, "maximum", true);
  into.final_state = tensor_of(final_state, "final_state", true);
  ops::MixerResult result =
      on_stream(inputs.q, stream, [&] { return ops::mixer_forward(call.spec, inputs, call.options, into); });
  return {result.form, result.chunk, std::move(result.kernel), std::move(result.states)};
}

// For frameworks whose arrays cannot be written: results in memory of the library.
nb::tuple forward_new(const MixerCall& call, nb::handle q, nb::handle k, nb::handle v, nb::handle log_decay,
                      nb::handle initial_state, Starts cu_seqlens) {
  const ops::MixerInputs inputs = inputs_of(q, k, v, log_decay, initial_state, std::move(cu_seqlens));
  const ops::MixerResult result = on_stream(inputs.q, uintptr_t{0}, [&] {
    ops::MixerResult made = ops::mixer_forward(call.spec, inputs, call.options);
    ops::synchronize(inputs.q.device());
    return made;
  });
  return nb::make_tuple(result.out, result.final_state ? nb::cast(result.final_state) : nb::none());
}

void backward(const MixerCall& call, int form, int64_t chunk, nb::handle states, nb::handle q, nb::handle k,
              nb::handle v, nb::handle log_decay, nb::handle initial_state, Starts cu_seqlens, nb::handle out,
              nb::handle normalizer, nb::handle maximum, nb::handle final_state, nb::handle out_gradient,
              nb::handle final_state_gradient, nb::handle dq, nb::handle dk, nb::handle dv, nb::handle dlog_decay,
              nb::handle dinitial_state, Stream stream) {
  const ops::MixerInputs inputs = inputs_of(q, k, v, log_decay, initial_state, std::move(cu_seqlens));
  ops::MixerResult result;
  result.out = tensor_of(out, "out");
  result.normalizer = tensor_of(normalizer, "normalizer");
  result.maximum = tensor_of(maximum, "maximum");
  result.final_state = tensor_of(final_state, "final_state");
  result.form = static_cast<ops::Form>(form);
  result.chunk = chunk;
  result.states = tensor_of(states, "states");
  const ops::MixerGradients into{tensor_of(dq, "dq", true), tensor_of(dk, "dk", true), tensor_of(dv, "dv", true),
                                 tensor_of(dlog_decay, "dlog_decay", true),
                                 tensor_of(dinitial_state, "dinitial_state", true)};
  const ops::Tensor gradient = tensor_of(out_gradient, "out_gradient");
  const ops::Tensor state_gradient = tensor_of(final_state_gradient, "final_state_gradient");
  on_stream(inputs.q, stream,
            [&] { ops::mixer_backward(call.spec, inputs, result, gradient, state_gradient, call.options, into); });
}

void step(const MixerCall& call, nb::handle q, nb::handle k, nb::handle v, nb::handle log_decay, nb::handle state,
          nb::handle out, Stream stream) {
  const ops::Tensor own_q = tensor_of(q, "q"), own_k = tensor_of(k, "k"), own_v = tensor_of(v, "v"),
                    own_decay = tensor_of(log_decay, "log_decay"), own_state = tensor_of(state, "state", true),
                    own_out = tensor_of(out, "out", true);
  on_stream(own_q, stream, [&] { ops::mixer_step(call.spec, own_q, own_k, own_v, own_decay, own_state, own_out); });
}

std::pair<int64_t, int64_t> state_shape(const MixerCall& call, int64_t qk_dim, int64_t v_dim) {
  return {ops::state_rows(call.spec, qk_dim), ops::state_columns(call.spec, v_dim)};
}

}  // namespace

void bind_mixer(nb::module_& module) {
  nb::class_<MixerCall>(module, "MixerCall")
      .def_ro("text", &MixerCall::text)
      .def("state_shape", &state_shape, "Rows D and columns of the state; 0 rows: there is none of constant size.")
      .def_prop_ro("final_state", [](const MixerCall& call) { return call.options.final_state; })
      .def_prop_ro("has_normalizer", [](const MixerCall& call) { return call.spec.norm == ops::Norm::sum; })
      .def_prop_ro("has_maximum", [](const MixerCall& call) {
        return call.spec.norm == ops::Norm::sum && call.spec.score == ops::Score::exponential;
      });
  nb::class_<MixerRan>(module, "MixerRan")
      .def_prop_ro("form", [](const MixerRan& ran) { return ops::name_of(ran.form); })
      .def_prop_ro("form_index", [](const MixerRan& ran) { return static_cast<int>(ran.form); })
      .def_ro("chunk", &MixerRan::chunk)
      .def_ro("kernel", &MixerRan::kernel)
      .def("states", [](const MixerRan& ran) -> nb::object {
        return ran.states ? nb::object(capsule_of(ran.states)) : nb::none();
      });
  module.def("mixer_call", &call_of, nb::arg("text"), nb::arg("score"), nb::arg("norm"), nb::arg("decay"),
             nb::arg("scale").none(), nb::arg("degree"), nb::arg("signed_decay"), nb::arg("form"), nb::arg("chunk"),
             nb::arg("final_state"), nb::arg("precision"));
  module.def("mixer_names", &ops::mixer_names, "The mixers of the paper by name.");
  module.def("mixer_forward", &forward, nb::arg("call"), nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(),
             nb::arg("log_decay").none(), nb::arg("initial_state").none(), nb::arg("cu_seqlens"), nb::arg("out").none(),
             nb::arg("normalizer").none(), nb::arg("maximum").none(), nb::arg("final_state").none(),
             nb::arg("stream").none());
  module.def("mixer_forward_new", &forward_new, nb::arg("call"), nb::arg("q").none(), nb::arg("k").none(),
             nb::arg("v").none(), nb::arg("log_decay").none(), nb::arg("initial_state").none(), nb::arg("cu_seqlens"));
  module.def("mixer_backward", &backward, nb::arg("call"), nb::arg("form"), nb::arg("chunk"), nb::arg("states").none(),
             nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("log_decay").none(),
             nb::arg("initial_state").none(), nb::arg("cu_seqlens"), nb::arg("out").none(),
             nb::arg("normalizer").none(), nb::arg("maximum").none(), nb::arg("final_state").none(),
             nb::arg("out_gradient").none(), nb::arg("final_state_gradient").none(), nb::arg("dq").none(),
             nb::arg("dk").none(), nb::arg("dv").none(), nb::arg("dlog_decay").none(), nb::arg("dinitial_state").none(),
             nb::arg("stream").none());
  module.def("mixer_step", &step, nb::arg("call"), nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(),
             nb::arg("log_decay").none(), nb::arg("state").none(), nb::arg("out").none(), nb::arg("stream").none());
}

}  // namespace furious_python
