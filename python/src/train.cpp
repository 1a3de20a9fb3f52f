// furious/train.h: training as the command line does it.
#include "furious/train.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "guarded.h"
#include "tensors.h"

namespace furious_python {
namespace {

furious::TrainResult train(const furious::TrainOptions& options, const nb::object& step, const nb::object& message) {
  bool stopped = false;
  furious::TrainObserver observer;
  if (!message.is_none()) {
    observer.message = [&](const std::string& text) {
      const nb::gil_scoped_acquire gil;
      message(text);
    };
  }
  observer.step = [&](const furious::TrainStep& done) {
    const nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (step.is_none()) return;
    const nb::object answer = step(done);
    stopped = !answer.is_none() && !nb::cast<bool>(nb::bool_(answer));
  };
  observer.stop = [&] { return stopped; };
  const nb::gil_scoped_release release;
  return furious::train(options, observer);
}

using GuardedTrainer = Guarded<furious::Trainer>;
using Ids = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Weights = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

furious::TokenBatch batch_of(const Ids& ids, const std::optional<Ids>& targets, const std::optional<Weights>& weights,
                             const std::vector<int64_t>& documents) {
  furious::TokenBatch batch;
  batch.rows = static_cast<int64_t>(ids.shape(0));
  batch.length = static_cast<int64_t>(ids.shape(1));
  batch.ids.assign(ids.data(), ids.data() + ids.size());
  if (targets) batch.targets.assign(targets->data(), targets->data() + targets->size());
  if (weights) batch.weights.assign(weights->data(), weights->data() + weights->size());
  batch.documents = documents;
  return batch;
}

nb::dict dict_of(furious::TokenBatch batch) {
  const std::vector<size_t> shape{static_cast<size_t>(batch.rows), static_cast<size_t>(batch.length)};
  nb::dict dict;
  dict["ids"] = array_of(std::move(batch.ids), shape);
  dict["targets"] = batch.targets.empty() ? nb::none() : nb::cast(array_of(std::move(batch.targets), shape));
  dict["weights"] = batch.weights.empty() ? nb::none() : nb::cast(array_of(std::move(batch.weights), shape));
  dict["documents"] = batch.documents;
  return dict;
}

nb::ndarray<nb::numpy, float> copy_of(furious::NamedArray array) {
  const std::vector<size_t> shape(array.shape.begin(), array.shape.end());
  return array_of(std::move(array.values), shape);
}

void bind_trainer(nb::module_& module) {
  const auto batch_call = [](auto method) {
    return [method](GuardedTrainer& trainer, const Ids& ids, const std::optional<Ids>& targets,
                    const std::optional<Weights>& weights, const std::vector<int64_t>& documents) {
      const furious::TokenBatch batch = batch_of(ids, targets, weights, documents);
      return trainer.with([&](furious::Trainer& own) { return (own.*method)(batch); });
    };
  };
  nb::class_<GuardedTrainer>(module, "Trainer")
      .def("__init__",
           [](GuardedTrainer* self, const furious::TrainOptions& options, int64_t vocabulary,
              const std::string& tokenizer) {
             new (self) GuardedTrainer("trainer", options, furious::TrainerSetup{vocabulary, tokenizer, {}});
           })
      .def_static(
          "resume",
          [](const std::string& checkpoint, const std::optional<furious::TrainOptions>& options) {
            return new GuardedTrainer("trainer", furious::Trainer::resume(checkpoint, options));
          },
          nb::arg("checkpoint"), nb::arg("options").none())
      .def("step", batch_call(&furious::Trainer::step), nb::arg("ids"), nb::arg("targets").none(),
           nb::arg("weights").none(), nb::arg("documents"))
      .def("backward", batch_call(&furious::Trainer::backward), nb::arg("ids"), nb::arg("targets").none(),
           nb::arg("weights").none(), nb::arg("documents"))
      .def("evaluate", batch_call(&furious::Trainer::evaluate), nb::arg("ids"), nb::arg("targets").none(),
           nb::arg("weights").none(), nb::arg("documents"))
      .def("data_batch",
           [](GuardedTrainer& trainer, int64_t step) {
             return dict_of(trainer.with([&](furious::Trainer& own) { return own.data_batch(step); }));
           })
      .def("test_loss",
           [](GuardedTrainer& trainer) { return trainer.with([](furious::Trainer& own) { return own.test_loss(); }); })
      .def(
          "set_learning_rate",
          [](GuardedTrainer& trainer, std::optional<double> rate) {
            trainer.with([&](furious::Trainer& own) { own.set_learning_rate(rate); });
          },
          nb::arg("rate").none())
      .def("parameter_names",
           [](GuardedTrainer& trainer) {
             return trainer.with([](furious::Trainer& own) { return own.parameter_names(); });
           })
      .def("parameter",
           [](GuardedTrainer& trainer, const std::string& name) {
             return copy_of(trainer.with([&](furious::Trainer& own) { return own.parameter(name); }));
           })
      .def("gradient",
           [](GuardedTrainer& trainer, const std::string& name) {
             return copy_of(trainer.with([&](furious::Trainer& own) { return own.gradient(name); }));
           })
      .def("set_parameter",
           [](GuardedTrainer& trainer, const std::string& name,
              const nb::ndarray<const float, nb::c_contig, nb::device::cpu>& values) {
             const std::vector<float> own_values(values.data(), values.data() + values.size());
             trainer.with([&](furious::Trainer& own) { own.set_parameter(name, own_values); });
           })
      .def("save", [](GuardedTrainer& trainer,
                      const std::string& folder) { trainer.with([&](furious::Trainer& own) { own.save(folder); }); })
      .def("steps_done",
           [](GuardedTrainer& t) { return t.with([](furious::Trainer& own) { return own.steps_done(); }); })
      .def("vocabulary",
           [](GuardedTrainer& t) { return t.with([](furious::Trainer& own) { return own.vocabulary(); }); })
      .def("options", [](GuardedTrainer& t) { return t.with([](furious::Trainer& own) { return own.options(); }); })
      .def("close", &GuardedTrainer::close);
}

void bind_options(nb::module_& module) {
  using Options = furious::TrainOptions;
  nb::class_<Options>(module, "TrainOptions", "The options of `furious train`.")
      .def(nb::init<>())
      .def_rw("arch", &Options::arch)
      .def_rw("size", &Options::size)
      .def_rw("hidden", &Options::hidden)
      .def_rw("intermediate", &Options::intermediate)
      .def_rw("heads", &Options::heads)
      .def_rw("layers", &Options::layers)
      .def_rw("qk_heads", &Options::qk_heads)
      .def_rw("qk_dim", &Options::qk_dim)
      .def_rw("tie_embeddings", &Options::tie_embeddings)
      .def_rw("switches", &Options::switches)
      .def_rw("init", &Options::init)
      .def_rw("initialization", &Options::initialization)
      .def_rw("data", &Options::data)
      .def_rw("packing", &Options::packing)
      .def_rw("bos", &Options::bos)
      .def_rw("batch", &Options::batch)
      .def_rw("length", &Options::length)
      .def_rw("accumulate", &Options::accumulate)
      .def_rw("seed", &Options::seed)
      .def_rw("shuffle_window", &Options::shuffle_window)
      .def_rw("steps", &Options::steps)
      .def_rw("lr", &Options::lr)
      .def_rw("warmup", &Options::warmup)
      .def_rw("schedule", &Options::schedule)
      .def_rw("schedule_steps", &Options::schedule_steps)
      .def_rw("decay_steps", &Options::decay_steps)
      .def_rw("min_lr", &Options::min_lr)
      .def_rw("optimizer", &Options::optimizer)
      .def_rw("weight_decay", &Options::weight_decay)
      .def_rw("beta1", &Options::beta1)
      .def_rw("beta2", &Options::beta2)
      .def_rw("eps", &Options::eps)
      .def_rw("decay_on", &Options::decay_on)
      .def_rw("muon_momentum", &Options::muon_momentum)
      .def_rw("clip", &Options::clip)
      .def_rw("z_loss", &Options::z_loss)
      .def_rw("ema", &Options::ema)
      .def_rw("device", &Options::device)
      .def_rw("dtype", &Options::dtype)
      .def_rw("mixer_precision", &Options::mixer_precision)
      .def_rw("threads", &Options::threads)
      .def_rw("recompute", &Options::recompute)
      .def_rw("reduce", &Options::reduce)
      .def_rw("timeout", &Options::timeout)
      .def_rw("out", &Options::out)
      .def_rw("resume", &Options::resume)
      .def_rw("resume_previous", &Options::resume_previous)
      .def_rw("eval_every", &Options::eval_every)
      .def_rw("eval_batches", &Options::eval_batches)
      .def_rw("save_every", &Options::save_every)
      .def_rw("keep", &Options::keep)
      .def_rw("sample_every", &Options::sample_every)
      .def_rw("sample_tokens", &Options::sample_tokens)
      .def_rw("log_values", &Options::log_values)
      .def_rw("log", &Options::log);
}

}  // namespace

void bind_train(nb::module_& module) {
  bind_options(module);
  nb::class_<furious::TrainStep>(module, "TrainStep", "A step of training that is done.")
      .def_ro("step", &furious::TrainStep::step, "1, 2, …")
      .def_ro("loss", &furious::TrainStep::loss)
      .def_ro("lr", &furious::TrainStep::lr)
      .def_ro("gradient_norm", &furious::TrainStep::gradient_norm)
      .def_ro("tokens", &furious::TrainStep::tokens, "Targets of the batch.")
      .def_ro("tokens_per_second", &furious::TrainStep::tokens_per_second)
      .def_ro("mfu", &furious::TrainStep::mfu)
      .def_ro("memory", &furious::TrainStep::memory, "Largest memory of tensors in the step, in bytes.")
      .def_ro("seconds", &furious::TrainStep::seconds, "Of a run: time in training since its start.")
      .def_ro("time", &furious::TrainStep::time, "Of a run: seconds since 1970.")
      .def_ro("total_tokens", &furious::TrainStep::total_tokens, "Of a run: since its start.")
      .def_ro("total_flops", &furious::TrainStep::total_flops, "Of a run: since its start.")
      .def_ro("test_loss", &furious::TrainStep::test_loss, "None where it was not computed.")
      .def_ro("sample", &furious::TrainStep::sample)
      .def_ro("value_rms", &furious::TrainStep::value_rms);
  nb::class_<furious::TrainResult>(module, "TrainResult")
      .def_ro("steps", &furious::TrainResult::steps, "Done since the start of the run.")
      .def_ro("stopped", &furious::TrainResult::stopped)
      .def_ro("last", &furious::TrainResult::last)
      .def_ro("checkpoint", &furious::TrainResult::checkpoint, "The newest.");
  bind_trainer(module);
  module.def("train", &train, nb::arg("options"), nb::arg("step").none(), nb::arg("message").none());
  module.def("options_of_run", &furious::options_of_run, nb::arg("run"), nb::arg("previous") = false,
             "The options to resume a run; None if there is none.");
}

}  // namespace furious_python
