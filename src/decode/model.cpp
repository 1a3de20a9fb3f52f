#include "furious/model.h"

#include <algorithm>
#include <cstring>

#include "base/boundary.h"
#include "base/error.h"
#include "base/parallel.h"
#include "decode/model_parts.h"
#include "decode/state_file.h"
#include "model/checkpoint.h"
#include "model/config_json.h"
#include "tensor/device.h"

namespace furious {
Model::Parts::Parts(LanguageModel model, std::shared_ptr<const Tokenizer> its_tokenizer, bool bos, int its_threads,
                    bool published)
    : language_model(std::move(model)), threads(its_threads), tokenizer(std::move(its_tokenizer)) {
  const int64_t known = language_model.config().vocabulary;
  require(tokenizer->vocabulary_size() <= known,
          "the tokenizer has {} token ids, the model has {}; load the tokenizer that the model was trained with",
          tokenizer->vocabulary_size(), known);
  require(!bos || tokenizer->bos() >= 0,
          "the option bos is set, but the tokenizer has no bos token; unset it, or use another tokenizer");
  const bool says_it = published && tokenizer->kind() == "tokenizer.json";
  const bool wants_bos =
      bos || (says_it ? tokenizer->begins_with_bos() : language_model.config().bos || tokenizer->eos() < 0);
  start = wants_bos ? tokenizer->bos() : says_it ? -1 : tokenizer->eos();
}

const std::string& Model::Parts::fingerprint() const {
  std::call_once(fingerprinted_,
                 [this] { fingerprint_ = furious::fingerprint(language_model, tokenizer->fingerprint()); });
  return fingerprint_;
}

std::vector<int32_t> Model::Parts::prompt(std::string_view text) const {
  std::vector<int32_t> ids;
  if (start >= 0) ids.push_back(start);
  if (text.empty() && ids.empty() && tokenizer->eos() >= 0) ids.push_back(tokenizer->eos());
  if (text.empty()) return ids;
  const std::vector<int32_t> own = tokenizer->encode(text);
  ids.insert(ids.end(), own.begin(), own.end());
  return ids;
}

Model::Model(std::shared_ptr<const Parts> parts) : parts_(std::move(parts)) {}

const Model::Parts& Model::parts() const {
  require(parts_ != nullptr, "model: it was moved from; use the object it was moved to");
  return *parts_;
}

Model Model::load(const std::filesystem::path& given, const LoadOptions& options) try {
  require(options.threads >= 0 && options.threads <= 4096, "threads is {}, expected 0 to 4096; 0 is all cores",
          options.threads);
  const ThreadLimit limit(options.threads);
  const Device device = usable_device(options.device);
  const bool is_named = !options.dtype.empty() && options.dtype != "auto";
  const std::string dtype = is_named ? options.dtype : device.is_cpu() ? "f32" : "bf16";
  require(dtype == "f32" || dtype == "bf16", "dtype is {}, expected f32 or bf16", dtype);
  const std::filesystem::path path = checkpoint_of(given);
  const auto folder = std::filesystem::is_directory(path) ? path : path.parent_path();
  load_config(path, options.arch, options.heads);  // what is no model has no tokenizer either: say the former
  require(!options.tokenizer.empty() || has_tokenizer(folder),
          "{} has no tokenizer beside it; give the one that the model was trained with by the option tokenizer "
          "(--tokenizer): a SentencePiece model, a tokenizer.json, a folder with one, or \"byte\"",
          path.string());
  LanguageModel model = load_model(path, options.arch, device, options.heads, options.progress,
                                   dtype == "bf16" ? WeightDType::bf16 : WeightDType::as_stored);
  model.set_compute(compute_in(dtype_from_name(dtype), device));
  auto tokenizer = load_tokenizer(options.tokenizer.empty() ? folder.string() : options.tokenizer);
  return Model(std::make_shared<const Parts>(std::move(model), std::move(tokenizer), options.bos, options.threads,
                                             model_format(path) != nullptr));
} catch (...) {
  rethrow_as_error();
}

std::string Model::arch() const {
  return parts().language_model.config().arch;
}

int64_t Model::parameters() const {
  return parameter_count(parts().language_model.config());
}

int64_t Model::vocabulary() const {
  return parts().language_model.config().vocabulary;
}

std::string Model::config() const try { return config_to_json(parts().language_model.config()); } catch (...) {
  rethrow_as_error();
}

std::string Model::fingerprint() const try {
  const ThreadLimit limit(parts().threads);
  return parts().fingerprint();
} catch (...) {
  rethrow_as_error();
}

int32_t Model::bos() const {
  return parts().tokenizer->bos();
}

int32_t Model::eos() const {
  return parts().tokenizer->eos();
}

std::vector<int32_t> Model::prompt(std::string_view text) const try { return parts().prompt(text); } catch (...) {
  rethrow_as_error();
}

std::vector<int32_t> Model::encode(std::string_view text) const try {
  return parts().tokenizer->encode(text);
} catch (...) {
  rethrow_as_error();
}

std::string Model::decode(const std::vector<int32_t>& ids) const try {
  return parts().tokenizer->decode(ids);
} catch (...) {
  rethrow_as_error();
}

namespace {

// Ids as a row [1, count], checked.
Tensor row_of(std::string_view what, std::span<const int32_t> ids, int64_t vocabulary) {
  for (const int32_t id : ids)
    require(id >= 0 && id < vocabulary, "{}: token {}, expected 0 to {}", what, id, vocabulary - 1);
  const Tensor row = Tensor::empty({1, static_cast<int64_t>(ids.size())}, DType::i32);
  std::ranges::copy(ids, row.data<int32_t>());
  return row;
}

std::vector<double> scores_of(const Model::Parts& parts, std::span<const int32_t> ids) {
  if (ids.size() < 2) return {};
  const LanguageModel& model = parts.language_model;
  const int64_t vocabulary = model.config().vocabulary;
  const Tensor tokens = row_of("model.scores", ids.first(ids.size() - 1), vocabulary);
  const Tensor targets = row_of("model.scores", ids.subspan(1), vocabulary);
  const Tensor losses = Tensor::empty(targets.shape(), DType::f32, model.device());
  model.loss(Tape::off(), tokens, targets, {}, losses);
  const Tensor here = to_device(losses, {});
  std::vector<double> scores(static_cast<size_t>(here.elements()));
  std::ranges::transform(std::span(here.data<float>(), scores.size()), scores.begin(),
                         [](float loss) { return -loss; });
  return scores;
}

}  // namespace

void Model::logits(std::span<const int32_t> ids, float* out) const try {
  const Parts& own = parts();
  const ThreadLimit limit(own.threads);
  if (ids.empty()) return;
  require(out != nullptr, "model.logits: no memory for the logits was given");
  const Tensor row = row_of("model.logits", ids, own.language_model.config().vocabulary);
  const Tensor logits = own.language_model.logits(row);
  std::memcpy(out, logits.raw(), logits.bytes());
} catch (...) {
  rethrow_as_error();
}

std::vector<float> Model::logits(const std::vector<int32_t>& ids) const try {
  std::vector<float> out(ids.size() * static_cast<size_t>(vocabulary()));
  logits(ids, out.data());
  return out;
} catch (...) {
  rethrow_as_error();
}

std::vector<double> Model::scores(const std::vector<int32_t>& ids) const try {
  const ThreadLimit limit(parts().threads);
  return scores_of(parts(), ids);
} catch (...) {
  rethrow_as_error();
}

std::vector<TokenLogProbability> Model::text_scores(std::string_view text) const try {
  const ThreadLimit limit(parts().threads);
  const std::vector<int32_t> ids = parts().prompt(text);
  const std::vector<double> scores = scores_of(parts(), ids);
  std::vector<TokenLogProbability> tokens;
  for (size_t i = 0; i < scores.size(); ++i) tokens.push_back({ids[i + 1], scores[i]});
  return tokens;
} catch (...) {
  rethrow_as_error();
}

}  // namespace furious
