#include "model/mean_decay.h"

#include <cmath>
#include <numeric>

#include "base/error.h"
#include "ops/elementwise.h"
#include "ops/nn/embedding.h"

namespace furious {
namespace {

// How the log-decay of a layer is made.
struct DecaySource {
  Value log_decay = kNo;
  Value x = kNo;          // projection that the head function reads; kNo: the original decay
  Value dt = kNo;         // time step that is a factor of the decay
  Weight shift = kNo;     // A_log, or the bias of x
  HeadFunction function;  // of x
  float factor = 1;       // of the original decay
};

DecaySource decay_source(const Plan& plan) {
  DecaySource source;
  for (const Op& op : plan.ops)
    if (const auto* mixer = std::get_if<MixerOp>(&op)) source.log_decay = mixer->log_decay;
  Value wanted = source.log_decay;
  for (size_t i = plan.ops.size(); i-- > 0 && wanted != kNo;) {
    const Op& op = plan.ops[i];
    if (outputs_of(op).front() != wanted) continue;
    if (const auto* original = std::get_if<OriginalDecayOp>(&op)) {
      source.dt = original->dt;
      source.shift = original->a_log;
      source.factor = original->factor;
      break;
    }
    if (const auto* product = std::get_if<DiscretizeOp>(&op)) {
      source.dt = product->dt;
      wanted = product->x;
    }
    if (const auto* head = std::get_if<HeadFunctionOp>(&op)) {
      source.x = head->x;
      source.shift = head->bias;
      source.function = head->function;
      break;
    }
  }
  return source;
}

Tensor on_cpu(const Tensor& tensor) {
  return to_device(to_dtype(tensor, DType::f32), {});
}

double mean_of(const Tensor& x) {
  const float* const values = x.data<float>();
  return std::accumulate(values, values + x.elements(), 0.0) / static_cast<double>(x.elements());
}

// The bias that gives the mean, by bisection. A decay that may be positive has one below 0 from a bias of 0 on.
float bias_for(double mean, const DecaySource& source, const Tensor& x, const Tensor& dt) {
  const Tensor bias = Tensor::empty({x.size(2)}, DType::f32);
  const auto excess = [&](double value) {
    fill(bias, static_cast<float>(value));
    const Tensor decay = head_function_forward(x, bias, source.function);
    if (dt)
      for (int64_t i = 0; i < decay.elements(); ++i) decay.data<float>()[i] *= dt.data<float>()[i];
    return mean_of(decay) - mean;
  };
  const bool may_grow = source.function.f == Activation::silu || source.function.f == Activation::softplus2;
  double low = may_grow ? 0 : -60, high = 60;
  const bool rises = excess(low) < 0;
  require(rises != (excess(high) < 0), "decay: no bias gives a mean log-decay of {}; choose one between -10 and -1e-6",
          mean);
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    ((excess(middle) < 0) == rises ? low : high) = middle;
  }
  return static_cast<float>((low + high) / 2);
}

// Runs the layers one after the other.
using Observer = std::function<void(size_t layer, Value value, const Tensor& written)>;
void observe_layers(const LanguageModel& model, const Tensor& tokens, const Observer& observe) {
  const Compute& compute = model.compute();
  WholeSequences sequences({}, compute);
  Variable x(embedding_forward(model.embedding_table(), model.checked_ids("tokens", tokens), compute.activations));
  for (size_t i = 0; i < model.layers().size(); ++i) {
    const PlanRunner runner(model.plan(), model.layers()[i], compute, Tape::off(), sequences);
    x = runner.run(x, [&](Value value, const Variable& written) { observe(i, value, written.value()); });
  }
}

}  // namespace

ModelConfig with_settable_decay(ModelConfig config) {
  require(config.block.decay != DecayKind::none,
          "decay: {} has no decay; leave out the mean log-decay or choose a preset with a decay, such as 2mamba",
          config.arch);
  if (config.block.has_decay_projection()) config.block.decay_bias = true;
  return config;
}

void set_mean_log_decay(const LanguageModel& model, const Tensor& tokens, double mean) {
  require(mean < 0 && std::isfinite(mean), "decay: a mean log-decay of {} is not negative; use one such as -0.001",
          mean);
  const DecaySource source = decay_source(model.plan());
  require(source.shift != kNo, "decay: {} has no parameter that shifts its decay; make it with with_settable_decay",
          model.config().arch);
  Tensor x, dt;
  // Before the operations that read the parameter run.
  observe_layers(model, tokens, [&](size_t layer, Value value, const Tensor& written) {
    if (value == source.x) x = on_cpu(written);
    if (value == source.dt) dt = on_cpu(written);
    if (value != (source.dt == kNo ? source.x : source.dt)) return;
    const Tensor& parameter = model.layers()[layer][static_cast<size_t>(source.shift)].value();
    const Tensor shift = on_cpu(parameter);
    if (source.x != kNo) {
      fill(shift, bias_for(mean, source, x, dt));
    } else {
      const double now = mean_of(original_decay_forward(dt, shift, source.factor));
      for (int64_t i = 0; i < shift.elements(); ++i) shift.data<float>()[i] += static_cast<float>(std::log(mean / now));
    }
    copy_between(parameter, shift);
  });
}

std::vector<double> mean_log_decays(const LanguageModel& model, const Tensor& tokens) {
  const DecaySource source = decay_source(model.plan());
  std::vector<double> means;
  if (source.log_decay == kNo) return means;
  observe_layers(model, tokens, [&](size_t, Value value, const Tensor& written) {
    if (value == source.log_decay) means.push_back(mean_of(on_cpu(written)));
  });
  return means;
}

}  // namespace furious
