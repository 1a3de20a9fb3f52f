#include "furious/model.h"

#include "base/boundary.h"
#include "base/error.h"
#include "base/parallel.h"
#include "decode/model_parts.h"
#include "model/checkpoint.h"
#include "tensor/device.h"

namespace furious {
Model::Parts::Parts(LanguageModel model, std::shared_ptr<const Tokenizer> its_tokenizer, bool bos, int its_threads)
    : language_model(std::move(model)), threads(its_threads), tokenizer(std::move(its_tokenizer)) {
  const int64_t known = language_model.config().vocabulary;
  require(tokenizer->vocabulary_size() <= known,
          "the tokenizer has {} token ids, the model has {}; load the tokenizer that the model was trained with",
          tokenizer->vocabulary_size(), known);
  require(!bos || tokenizer->bos() >= 0,
          "the option bos is set, but the tokenizer has no bos token; unset it, or use another tokenizer");
  const bool wants_bos = bos || language_model.config().bos || tokenizer->eos() < 0;
  start = wants_bos ? tokenizer->bos() : tokenizer->eos();
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
  const std::string dtype = !options.dtype.empty() ? options.dtype : device.is_cpu() ? "f32" : "bf16";
  require(dtype == "f32" || dtype == "bf16", "dtype is {}, expected f32 or bf16", dtype);
  const std::filesystem::path path = checkpoint_of(given);
  LanguageModel model = load_model(path, options.arch, device, options.heads);
  model.set_compute(compute_in(dtype_from_name(dtype), device));
  if (dtype == "bf16") model.round_weights();
  const auto folder = std::filesystem::is_directory(path) ? path : path.parent_path();
  auto tokenizer = load_tokenizer(options.tokenizer.empty() ? folder.string() : options.tokenizer);
  return Model(std::make_shared<const Parts>(std::move(model), std::move(tokenizer), options.bos, options.threads));
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

}  // namespace furious
