// The C interface: furious/furious.h.
#include <algorithm>
#include <exception>
#include <new>
#include <string>

#include "base/boundary.h"
#include "base/error.h"
#include "base/parallel.h"
#include "decode/decoder.h"
#include "decode/model_parts.h"
#include "decode/state_file.h"
#include "furious/furious.h"
#include "furious/model.h"

using namespace furious;

struct furious_model {
  Model model;
};

struct furious_session {
  explicit furious_session(const Model& its_model)
      : model(its_model),
        decoder(std::make_unique<Decoder>(model.parts().language_model, 1, model.parts().tokenizer->vocabulary_size())),
        slot(decoder->start()) {}

  Model model;
  std::unique_ptr<Decoder> decoder;
  int32_t slot;
  furious_sampling sampling{};
  bool has_sampling = false;
  // A pass over the weights failed: what the slot holds is undefined (decoder.h).
  bool broken = false;
};

namespace {

thread_local std::string last_error;
thread_local bool last_error_is_lost = false;  // there was no memory for it

void remember(const std::string& message) noexcept try {
  last_error_is_lost = false;
  last_error = message;
} catch (...) {
  last_error_is_lost = true;
}

class InvalidArgument : public Error {
 public:
  using Error::Error;
};
class BufferTooSmall : public Error {
 public:
  using Error::Error;
};

// Runs a function; its exception becomes a status and the thread's message.
template <class Function>
furious_status guarded(Function&& function) noexcept {
  furious_status status = FURIOUS_ERROR;
  try {
    try {
      function();
      return FURIOUS_OK;
    } catch (const InvalidArgument&) {
      status = FURIOUS_INVALID_ARGUMENT;
      throw;
    } catch (const BufferTooSmall&) {
      status = FURIOUS_BUFFER_TOO_SMALL;
      throw;
    } catch (const OutOfMemory&) {
      status = FURIOUS_OUT_OF_MEMORY;
      throw;
    } catch (const std::bad_alloc&) {
      status = FURIOUS_OUT_OF_MEMORY;
      throw;
    }
  } catch (...) {
    try {
      remember(words_of(std::current_exception()));
    } catch (...) {
      last_error_is_lost = true;
    }
  }
  return status;
}

template <class... Args>
void demand(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) throw InvalidArgument(fmt::format(format, std::forward<Args>(args)...));
}

void given(const char* function, const char* argument, const void* pointer) {
  demand(pointer != nullptr, "{}: argument \"{}\" is null; give an address", function, argument);
}

const Model& model_of(const char* function, const furious_model* model) {
  given(function, "model", model);
  return model->model;
}

template <class SessionType>
SessionType& session_of(const char* function, SessionType* session) {
  given(function, "session", session);
  require(!session->broken,
          "{}: an earlier call failed while the session was reading, so its state is undefined; load a state or make a "
          "new session",
          function);
  return *session;
}

// Stores the result's size, and the result where there is a buffer.
template <class T>
void give(const char* function, std::span<const T> result, T* buffer, size_t capacity, size_t* size) {
  *size = result.size();
  if (buffer == nullptr && capacity == 0) return;
  given(function, "buffer", buffer);
  if (capacity < result.size())
    throw BufferTooSmall(fmt::format("{}: the buffer has room for {}, the result has {}; give a larger one", function,
                                     capacity, result.size()));
  std::ranges::copy(result, buffer);
}

std::string text_or_empty(const char* text) {
  return text != nullptr ? text : "";
}

Sampling sampling_of(const furious_sampling& options) {
  Sampling sampling;
  sampling.temperature = options.temperature;
  sampling.top_k = options.top_k;
  sampling.top_p = options.top_p;
  sampling.min_p = options.min_p;
  sampling.repetition_penalty = options.repetition_penalty;
  sampling.frequency_penalty = options.frequency_penalty;
  sampling.presence_penalty = options.presence_penalty;
  sampling.seed = options.seed;
  return sampling;
}

bool same(const furious_sampling& a, const furious_sampling& b) {
  return a.temperature == b.temperature && a.top_k == b.top_k && a.top_p == b.top_p && a.min_p == b.min_p &&
         a.repetition_penalty == b.repetition_penalty && a.frequency_penalty == b.frequency_penalty &&
         a.presence_penalty == b.presence_penalty && a.seed == b.seed;
}

// A pass over the weights: where it fails the session cannot go on.
template <class Function>
void read_in(furious_session& session, Function&& function) {
  session.broken = true;
  function();
  session.broken = false;
}

void check_id(const char* function, const furious_session& session, int32_t id) {
  const int64_t vocabulary = session.model.vocabulary();
  demand(id >= 0 && id < vocabulary, "{}: token {}, expected 0 to {}", function, id, vocabulary - 1);
}

}  // namespace

const char* furious_version(void) {
  return FURIOUS_VERSION;
}

const char* furious_last_error(void) {
  return last_error_is_lost ? "not enough memory" : last_error.c_str();
}

void furious_load_options_init(furious_load_options* options) {
  if (options != nullptr) *options = {nullptr, nullptr, "auto", nullptr, 0, 0};
}

furious_status furious_model_load(const char* path, const furious_load_options* options, furious_model** model) {
  return guarded([&] {
    given("furious_model_load", "path", path);
    given("furious_model_load", "model", model);
    LoadOptions load;
    if (options != nullptr) {
      load.arch = text_or_empty(options->arch);
      load.tokenizer = text_or_empty(options->tokenizer);
      if (options->device != nullptr) load.device = options->device;
      load.dtype = text_or_empty(options->dtype);
      load.threads = options->threads;
      load.bos = options->bos != 0;
    }
    *model = new furious_model{Model::load(path, load)};
  });
}

void furious_model_free(furious_model* model) {
  delete model;
}

furious_status furious_model_vocabulary(const furious_model* model, int64_t* vocabulary) {
  return guarded([&] {
    given("furious_model_vocabulary", "vocabulary", vocabulary);
    *vocabulary = model_of("furious_model_vocabulary", model).vocabulary();
  });
}

furious_status furious_model_start_token(const furious_model* model, int32_t* id) {
  return guarded([&] {
    given("furious_model_start_token", "id", id);
    *id = model_of("furious_model_start_token", model).parts().start;
  });
}

furious_status furious_model_end_token(const furious_model* model, int32_t* id) {
  return guarded([&] {
    given("furious_model_end_token", "id", id);
    *id = model_of("furious_model_end_token", model).parts().tokenizer->eos();
  });
}

furious_status furious_model_encode(const furious_model* model, const char* text, size_t text_bytes, int32_t* ids,
                                    size_t capacity, size_t* count) {
  return guarded([&] {
    constexpr const char* kFunction = "furious_model_encode";
    const Model& own = model_of(kFunction, model);
    given(kFunction, "count", count);
    if (text_bytes > 0) given(kFunction, "text", text);
    const std::vector<int32_t> result = own.encode(text_bytes > 0 ? std::string_view(text, text_bytes) : "");
    give<int32_t>(kFunction, result, ids, capacity, count);
  });
}

furious_status furious_model_decode(const furious_model* model, const int32_t* ids, size_t count, char* text,
                                    size_t capacity, size_t* bytes) {
  return guarded([&] {
    constexpr const char* kFunction = "furious_model_decode";
    const Model& own = model_of(kFunction, model);
    given(kFunction, "bytes", bytes);
    if (count > 0) given(kFunction, "ids", ids);
    const std::string result = own.decode(std::vector<int32_t>(ids, ids + count));
    give<char>(kFunction, result, text, capacity, bytes);
  });
}

furious_status furious_session_new(const furious_model* model, furious_session** session) {
  return guarded([&] {
    constexpr const char* kFunction = "furious_session_new";
    const Model& own = model_of(kFunction, model);
    given(kFunction, "session", session);
    const ThreadLimit limit(own.parts().threads);
    *session = new furious_session(own);
  });
}

furious_status furious_session_fork(const furious_session* session, furious_session** forked) {
  return guarded([&] {
    constexpr const char* kFunction = "furious_session_fork";
    const furious_session& own = session_of(kFunction, session);
    given(kFunction, "forked", forked);
    const ThreadLimit limit(own.model.parts().threads);
    auto copy = std::make_unique<furious_session>(own.model);
    if (own.decoder->tokens(own.slot) > 0) copy->decoder->restore(copy->slot, own.decoder->contents(own.slot));
    *forked = copy.release();
  });
}

void furious_session_free(furious_session* session) {
  delete session;
}

furious_status furious_session_prefill(furious_session* session, const int32_t* ids, size_t count) {
  return guarded([&] {
    constexpr const char* kFunction = "furious_session_prefill";
    furious_session& own = session_of(kFunction, session);
    if (count == 0) return;
    given(kFunction, "ids", ids);
    for (size_t i = 0; i < count; ++i) check_id(kFunction, own, ids[i]);
    const ThreadLimit limit(own.model.parts().threads);
    read_in(own, [&] { own.decoder->read(own.slot, {ids, count}); });
  });
}

furious_status furious_session_step(furious_session* session, int32_t id) {
  return guarded([&] {
    constexpr const char* kFunction = "furious_session_step";
    furious_session& own = session_of(kFunction, session);
    check_id(kFunction, own, id);
    const ThreadLimit limit(own.model.parts().threads);
    Tensor token = Tensor::empty({1, 1}, DType::i32);
    *token.data<int32_t>() = id;
    read_in(own, [&] { own.decoder->read_token({&own.slot, 1}, token); });
  });
}

furious_status furious_session_logits(const furious_session* session, float* logits, size_t capacity, size_t* count) {
  return guarded([&] {
    constexpr const char* kFunction = "furious_session_logits";
    const furious_session& own = session_of(kFunction, session);
    given(kFunction, "count", count);
    require(own.decoder->tokens(own.slot) > 0, "{}: nothing has been read yet; read a token first", kFunction);
    const Tensor here = to_device(own.decoder->logits(own.slot), {});
    give<float>(kFunction, std::span(here.data<float>(), static_cast<size_t>(here.elements())), logits, capacity,
                count);
  });
}

void furious_sampling_init(furious_sampling* sampling) {
  if (sampling == nullptr) return;
  const Sampling defaults;
  *sampling = {defaults.temperature,
               defaults.top_k,
               defaults.top_p,
               defaults.min_p,
               defaults.repetition_penalty,
               defaults.frequency_penalty,
               defaults.presence_penalty,
               defaults.seed};
}

furious_status furious_session_sample(furious_session* session, const furious_sampling* sampling, int32_t* id) {
  return guarded([&] {
    constexpr const char* kFunction = "furious_session_sample";
    furious_session& own = session_of(kFunction, session);
    given(kFunction, "id", id);
    furious_sampling wanted;
    furious_sampling_init(&wanted);
    if (sampling != nullptr) wanted = *sampling;
    check_sampling(sampling_of(wanted));
    require(own.decoder->tokens(own.slot) > 0, "{}: nothing has been read yet; read a token first", kFunction);
    const ThreadLimit limit(own.model.parts().threads);
    if (!own.has_sampling || !same(own.sampling, wanted)) {
      own.decoder->set_sampling(own.slot, sampling_of(wanted));
      own.sampling = wanted;
      own.has_sampling = true;
    }
    read_in(own, [&] { *id = own.decoder->step({&own.slot, 1}).wait()[0]; });
  });
}

furious_status furious_session_tokens(const furious_session* session, int64_t* tokens) {
  return guarded([&] {
    constexpr const char* kFunction = "furious_session_tokens";
    const furious_session& own = session_of(kFunction, session);
    given(kFunction, "tokens", tokens);
    *tokens = own.decoder->tokens(own.slot);
  });
}

furious_status furious_session_bytes(const furious_session* session, int64_t* bytes) {
  return guarded([&] {
    constexpr const char* kFunction = "furious_session_bytes";
    const furious_session& own = session_of(kFunction, session);
    given(kFunction, "bytes", bytes);
    *bytes = own.decoder->bytes(own.slot);
  });
}

namespace {

std::vector<SlotContents> contents_to_save(const char* function, const furious_session& own) {
  require(own.decoder->tokens(own.slot) > 0, "{}: nothing has been read yet; read a token first", function);
  return {own.decoder->contents(own.slot)};
}

// A session that fails to restore the state stays as it was.
void replace_state(furious_session& session, std::string_view source, const std::vector<SlotContents>& saved) {
  require(saved.size() == 1, "{}: the state of {} sequences, expected one; load it with furious::Session", source,
          saved.size());
  furious_session loaded(session.model);
  loaded.decoder->restore(loaded.slot, saved[0]);
  session = std::move(loaded);
}

}  // namespace

furious_status furious_session_save(const furious_session* session, const char* path) {
  return guarded([&] {
    constexpr const char* kFunction = "furious_session_save";
    const furious_session& own = session_of(kFunction, session);
    given(kFunction, "path", path);
    const ThreadLimit limit(own.model.parts().threads);
    save_state(path, contents_to_save(kFunction, own), own.model.parts().language_model.config(),
               own.model.parts().fingerprint());
  });
}

furious_status furious_session_load(furious_session* session, const char* path) {
  return guarded([&] {
    constexpr const char* kFunction = "furious_session_load";
    given(kFunction, "session", session);
    given(kFunction, "path", path);
    const Model::Parts& parts = session->model.parts();
    const ThreadLimit limit(parts.threads);
    replace_state(*session, path, load_state(path, parts.language_model.config(), parts.fingerprint()));
  });
}

furious_status furious_session_save_bytes(const furious_session* session, void* buffer, size_t capacity,
                                          size_t* bytes) {
  return guarded([&] {
    constexpr const char* kFunction = "furious_session_save_bytes";
    const furious_session& own = session_of(kFunction, session);
    given(kFunction, "bytes", bytes);
    const ThreadLimit limit(own.model.parts().threads);
    const std::vector<std::byte> state = state_bytes(
        contents_to_save(kFunction, own), own.model.parts().language_model.config(), own.model.parts().fingerprint());
    give<std::byte>(kFunction, state, static_cast<std::byte*>(buffer), capacity, bytes);
  });
}

furious_status furious_session_load_bytes(furious_session* session, const void* buffer, size_t bytes) {
  return guarded([&] {
    constexpr const char* kFunction = "furious_session_load_bytes";
    given(kFunction, "session", session);
    given(kFunction, "buffer", buffer);
    const Model::Parts& parts = session->model.parts();
    const ThreadLimit limit(parts.threads);
    const std::span state(static_cast<const std::byte*>(buffer), bytes);
    replace_state(*session, kFunction, load_state(state, parts.language_model.config(), parts.fingerprint()));
  });
}
