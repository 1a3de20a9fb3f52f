// furious/model.h: models, sessions and batches of sequences.
#include "furious/model.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <filesystem>
#include <memory>
#include <span>
#include <utility>

#include "guarded.h"
#include "tensors.h"

namespace furious_python {
namespace {

using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<int32_t> vector_of(const Ids& ids) {
  return {ids.data(), ids.data() + ids.size()};
}

// What a model writes may be bytes that are no text.
nb::str text_of(std::string_view text) {
  PyObject* const result = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (result == nullptr) throw nb::python_error();
  return nb::steal<nb::str>(result);
}

furious::Model load(const std::string& path, const std::string& arch, const std::string& tokenizer,
                    const std::string& device, const std::string& dtype, int64_t heads, int threads, bool bos) {
  const nb::gil_scoped_release release;
  return furious::Model::load(path, {arch, tokenizer, device, dtype, heads, threads, bos});
}

nb::ndarray<nb::numpy, float> logits_of(const furious::Model& model, const Ids& ids) {
  const auto vocabulary = static_cast<size_t>(model.vocabulary());
  std::vector<float> values(ids.size() * vocabulary);
  {
    const nb::gil_scoped_release release;
    model.logits(std::span(ids.data(), ids.size()), values.data());
  }
  return array_of(std::move(values), {ids.size(), vocabulary});
}

using GuardedSession = Guarded<furious::Session>;

// Called without the GIL. Control-C ends the work with a KeyboardInterrupt.
furious::ReadProgress progress_of(const nb::object& progress) {
  return [&progress](int64_t read, int64_t all) {
    const nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (progress.is_none()) return true;
    const nb::object answer = progress(read, all);
    return answer.is_none() || nb::cast<bool>(nb::bool_(answer));
  };
}

bool read_texts(GuardedSession& session, const std::vector<std::string>& texts, bool each, const nb::object& progress) {
  return session.with([&](furious::Session& own) {
    return each ? own.read_each(texts, progress_of(progress)) : own.read(texts.front(), progress_of(progress));
  });
}

bool read_ids(GuardedSession& session, const std::vector<Ids>& ids, bool each, const nb::object& progress) {
  std::vector<std::vector<int32_t>> own_ids;
  own_ids.reserve(ids.size());
  for (const Ids& one : ids) own_ids.push_back(vector_of(one));
  return session.with([&](furious::Session& own) {
    return each ? own.read_ids_each(own_ids, progress_of(progress))
                : own.read_ids(own_ids.front(), progress_of(progress));
  });
}

std::vector<furious::Text> write(GuardedSession& session, const furious::Sampling& sampling, int64_t tokens,
                                 const std::vector<std::string>& stop, const nb::object& show) {
  return session.with([&](furious::Session& own) {
    furious::WriteOptions options;
    options.tokens = tokens;
    options.sampling = sampling;
    options.stop = stop;
    return own.write(options, [&](std::string_view piece, int sequence) {
      const nb::gil_scoped_acquire gil;
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (show.is_none()) return true;
      const nb::object answer = show(text_of(piece), sequence);
      return answer.is_none() || nb::cast<bool>(nb::bool_(answer));
    });
  });
}

nb::dict dict_of(furious::SequenceState state) {
  nb::dict arrays;
  for (furious::NamedArray& array : state.arrays) {
    const std::vector<size_t> shape(array.shape.begin(), array.shape.end());
    arrays[array.name.c_str()] = array_of(std::move(array.values), shape);
  }
  nb::dict dict;
  dict["model"] = state.model;
  dict["tokens"] = state.tokens;
  dict["pending"] = state.pending;
  const size_t recent = state.recent.size();
  dict["recent"] = array_of(std::move(state.recent), {recent});
  dict["arrays"] = arrays;
  return dict;
}

furious::SequenceState state_of(const nb::dict& dict) {
  furious::SequenceState state;
  state.model = nb::cast<std::string>(dict["model"]);
  state.tokens = nb::cast<int64_t>(dict["tokens"]);
  state.pending = nb::cast<int64_t>(dict["pending"]);
  state.recent = vector_of(nb::cast<Ids>(dict["recent"]));
  for (const auto& [name, values] : nb::cast<nb::dict>(dict["arrays"])) {
    const auto array = nb::cast<nb::ndarray<const float, nb::c_contig, nb::device::cpu>>(values);
    furious::NamedArray& own = state.arrays.emplace_back();
    own.name = nb::cast<std::string>(name);
    for (size_t i = 0; i < array.ndim(); ++i) own.shape.push_back(static_cast<int64_t>(array.shape(i)));
    own.values.assign(array.data(), array.data() + array.size());
  }
  return state;
}

nb::list states(GuardedSession& session) {
  std::vector<furious::SequenceState> own = session.with([](furious::Session& s) { return s.states(); });
  nb::list list;
  for (furious::SequenceState& state : own) list.append(dict_of(std::move(state)));
  return list;
}

void set_states(GuardedSession& session, const nb::list& list) {
  std::vector<furious::SequenceState> own;
  for (const nb::handle state : list) own.push_back(state_of(nb::cast<nb::dict>(state)));
  session.with([&](furious::Session& s) { s.set_states(own); });
}

nb::ndarray<nb::numpy, float> session_logits(GuardedSession& session, int sequence) {
  std::vector<float> values = session.with([&](furious::Session& own) { return own.logits(sequence); });
  const size_t size = values.size();
  return array_of(std::move(values), {size});
}

const char* name_of(furious::Ending ending) {
  switch (ending) {
    case furious::Ending::tokens:
      return "tokens";
    case furious::Ending::eos:
      return "eos";
    case furious::Ending::stop:
      return "stop";
    case furious::Ending::interrupted:
      return "interrupted";
  }
  return "";
}

// (id, log P, [(id, log P) most probable]) of each.
nb::list tuples_of(const std::vector<furious::WrittenToken>& tokens) {
  nb::list list;
  for (const furious::WrittenToken& token : tokens) {
    nb::list most;
    for (const furious::TokenLogProbability& other : token.most_probable)
      most.append(nb::make_tuple(other.id, other.log_probability));
    list.append(nb::make_tuple(token.id, token.log_probability, most));
  }
  return list;
}

furious::Sampling sampling(double temperature, int64_t top_k, double top_p, double min_p, double repetition_penalty,
                           double frequency_penalty, double presence_penalty, uint64_t seed, const nb::dict& logit_bias,
                           int64_t log_probabilities) {
  furious::Sampling own;
  own.temperature = temperature;
  own.top_k = top_k;
  own.top_p = top_p;
  own.min_p = min_p;
  own.repetition_penalty = repetition_penalty;
  own.frequency_penalty = frequency_penalty;
  own.presence_penalty = presence_penalty;
  own.seed = seed;
  own.log_probabilities = log_probabilities;
  for (const auto& [id, value] : logit_bias) own.logit_bias.push_back({nb::cast<int32_t>(id), nb::cast<double>(value)});
  return own;
}

using GuardedBatch = Guarded<furious::SequenceBatch>;

bool batch_read(GuardedBatch& batch, const std::vector<std::pair<int, Ids>>& prompts, const nb::object& progress) {
  std::vector<furious::SequenceBatch::Prompt> own_prompts;
  own_prompts.reserve(prompts.size());
  for (const auto& [sequence, ids] : prompts) own_prompts.push_back({sequence, vector_of(ids)});
  return batch.with([&](furious::SequenceBatch& own) { return own.read(own_prompts, progress_of(progress)); });
}

nb::list batch_step(GuardedBatch& batch, const std::vector<int>& sequences) {
  return tuples_of(batch.with([&](furious::SequenceBatch& own) { return own.step(sequences); }));
}

void bind_batch(nb::module_& module) {
  using Batch = furious::SequenceBatch;
  nb::class_<GuardedBatch>(module, "SequenceBatch")
      .def(
          "__init__",
          [](GuardedBatch* self, const furious::Model& model, int capacity) {
            new (self) GuardedBatch("sequence batch", model, capacity);
          },
          nb::arg("model"), nb::arg("capacity"))
      .def("add", [](GuardedBatch& batch) { return batch.with([](Batch& own) { return own.add(); }); })
      .def("add_state",
           [](GuardedBatch& batch, const nb::dict& state) {
             const furious::SequenceState given = state_of(state);
             return batch.with([&](Batch& own) { return own.add(given); });
           })
      .def("fork",
           [](GuardedBatch& batch, int sequence) { return batch.with([&](Batch& own) { return own.fork(sequence); }); })
      .def("remove", [](GuardedBatch& batch, int sequence) { batch.with([&](Batch& own) { own.remove(sequence); }); })
      .def("sequences", [](GuardedBatch& batch) { return batch.with([](Batch& own) { return own.sequences(); }); })
      .def("read", &batch_read, nb::arg("prompts"), nb::arg("progress").none())
      .def("set_sampling",
           [](GuardedBatch& batch, int sequence, const furious::Sampling& sampling) {
             batch.with([&](Batch& own) { own.set_sampling(sequence, sampling); });
           })
      .def("step", &batch_step)
      .def("step_ids",
           [](GuardedBatch& batch, const std::vector<int>& sequences, const Ids& ids) {
             const std::vector<int32_t> given = vector_of(ids);
             batch.with([&](Batch& own) { own.step(sequences, given); });
           })
      .def("logits",
           [](GuardedBatch& batch, int sequence) {
             std::vector<float> values = batch.with([&](Batch& own) { return own.logits(sequence); });
             const size_t size = values.size();
             return array_of(std::move(values), {size});
           })
      .def("state", [](GuardedBatch& batch,
                       int sequence) { return dict_of(batch.with([&](Batch& own) { return own.state(sequence); })); })
      .def("tokens", [](GuardedBatch& batch,
                        int sequence) { return batch.with([&](Batch& own) { return own.tokens(sequence); }); })
      .def("bytes", [](GuardedBatch& batch) { return batch.with([](Batch& own) { return own.bytes(); }); })
      .def("close", &GuardedBatch::close);
}

void bind_session(nb::module_& module) {
  nb::class_<GuardedSession>(module, "Session")
      .def(
          "__init__",
          [](GuardedSession* self, const furious::Model& model, int sequences) {
            new (self) GuardedSession("session", model, sequences);
          },
          nb::arg("model"), nb::arg("sequences"))
      .def("read_texts", &read_texts, nb::arg("texts"), nb::arg("each"), nb::arg("progress").none())
      .def("read_ids", &read_ids, nb::arg("ids"), nb::arg("each"), nb::arg("progress").none())
      .def("step", [](GuardedSession& session,
                      const Ids& ids) { session.with([&](furious::Session& own) { own.step(vector_of(ids)); }); })
      .def("logits", &session_logits, nb::arg("sequence"))
      .def("write", &write, nb::arg("sampling"), nb::arg("tokens"), nb::arg("stop"), nb::arg("show").none())
      .def("fork",
           [](GuardedSession& session) {
             return new GuardedSession("session", session.with([](furious::Session& own) { return own.fork(); }));
           })
      .def("save", [](GuardedSession& session,
                      const std::string& file) { session.with([&](furious::Session& own) { own.save(file); }); })
      .def("load", [](GuardedSession& session,
                      const std::string& file) { session.with([&](furious::Session& own) { own.load(file); }); })
      .def("save_bytes",
           [](GuardedSession& session) {
             const auto bytes = session.with([](furious::Session& own) { return own.save_bytes(); });
             return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
           })
      .def("load_bytes",
           [](GuardedSession& session, const nb::bytes& bytes) {
             const std::span data(reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size());
             session.with([&](furious::Session& own) { own.load_bytes(data); });
           })
      .def("states", &states)
      .def("set_states", &set_states)
      .def("close", &GuardedSession::close)
      .def("sequences", [](GuardedSession& s) { return s.with([](furious::Session& own) { return own.sequences(); }); })
      .def("tokens", [](GuardedSession& s) { return s.with([](furious::Session& own) { return own.tokens(); }); })
      .def("tokens_of",
           [](GuardedSession& s, int sequence) {
             return s.with([&](furious::Session& own) { return own.tokens(sequence); });
           })
      .def("bytes", [](GuardedSession& s) { return s.with([](furious::Session& own) { return own.bytes(); }); });
}

}  // namespace

void bind_model(nb::module_& module) {
  nb::class_<furious::Model>(module, "Model")
      .def_static("load", &load, nb::arg("path"), nb::arg("arch"), nb::arg("tokenizer"), nb::arg("device"),
                  nb::arg("dtype"), nb::arg("heads"), nb::arg("threads"), nb::arg("bos"))
      .def_prop_ro("arch", &furious::Model::arch)
      .def_prop_ro("parameters", &furious::Model::parameters)
      .def_prop_ro("vocabulary", &furious::Model::vocabulary)
      .def_prop_ro("config", &furious::Model::config)
      .def("fingerprint", &furious::Model::fingerprint, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("bos", &furious::Model::bos)
      .def_prop_ro("eos", &furious::Model::eos)
      .def("encode",
           [](const furious::Model& model, const std::string& text) {
             const nb::gil_scoped_release release;
             return model.encode(text);
           })
      .def("prompt",
           [](const furious::Model& model, const std::string& text) {
             const nb::gil_scoped_release release;
             return model.prompt(text);
           })
      .def("decode", [](const furious::Model& model, const Ids& ids) { return text_of(model.decode(vector_of(ids))); })
      .def("logits", &logits_of)
      .def("scores",
           [](const furious::Model& model, const Ids& ids) {
             std::vector<double> scores;
             {
               const nb::gil_scoped_release release;
               scores = model.scores(vector_of(ids));
             }
             const size_t size = scores.size();
             return array_of(std::move(scores), {size});
           })
      .def("text_scores", [](const furious::Model& model, const std::string& text) {
        std::vector<furious::TokenLogProbability> scores;
        {
          const nb::gil_scoped_release release;
          scores = model.text_scores(text);
        }
        nb::list list;
        for (const auto& score : scores) list.append(nb::make_tuple(score.id, score.log_probability));
        return list;
      });
  nb::class_<furious::Sampling>(module, "Sampling");
  module.def("sampling", &sampling);
  nb::class_<furious::Text>(module, "Text", "What a session has written.")
      .def_prop_ro("text", [](const furious::Text& text) { return text_of(text.text); })
      .def_ro("tokens", &furious::Text::tokens)
      .def_ro("ids", &furious::Text::ids)
      .def_prop_ro(
          "ending", [](const furious::Text& text) { return name_of(text.ending); },
          "Why it ended: tokens, eos, stop or interrupted.")
      .def_prop_ro(
          "log_probabilities", [](const furious::Text& text) { return tuples_of(text.log_probabilities); },
          "For each token (id, log P, [(id, log P) most probable]).")
      .def("__str__", [](const furious::Text& text) { return text_of(text.text); });
  bind_session(module);
  bind_batch(module);
}

}  // namespace furious_python
