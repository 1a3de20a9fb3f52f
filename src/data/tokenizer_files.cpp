#include "data/tokenizer_files.h"

#include <sentencepiece_processor.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "data/byte_pairs.h"
#include "data/sentencepiece_model.h"
#include "data/tokenization_furious.h"
#include "data/utf8.h"

namespace furious {
namespace {

using Json = nlohmann::ordered_json;

Json special_token(int32_t id, const std::string& content) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", true}};
}

// bos, where texts begin with it, and the text.
Json template_of(bool bos, int32_t id, const std::string& content) {
  const Json special{{"SpecialToken", {{"id", content}, {"type_id", 0}}}};
  const auto sequence = [](const char* name, int type) {
    return Json{{"Sequence", {{"id", name}, {"type_id", type}}}};
  };
  Json single = Json::array(), pair = Json::array(), tokens = Json::object();
  if (bos) {
    single.push_back(special);
    pair.push_back(special);
    tokens[content] = {{"id", content}, {"ids", Json::array({id})}, {"tokens", Json::array({content})}};
  }
  single.push_back(sequence("A", 0));
  pair.push_back(sequence("A", 0));
  pair.push_back(sequence("B", 1));
  return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", tokens}};
}

// PreTrainedTokenizerFast uses tokenizer.json as it is; other classes replace parts of it.
Json config_of(const char* kind, bool bos, const std::string& bos_token, const std::string& eos_token) {
  return {{"tokenizer_class", "PreTrainedTokenizerFast"},
          {kSavedKindKey, kind},
          {"bos_token", bos_token},
          {"eos_token", eos_token},
          {"add_bos_token", bos},
          {"add_eos_token", false},
          {"clean_up_tokenization_spaces", false},
          {"split_special_tokens", true}};  // "<s>" in a text is text
}

Json model_of(Json vocabulary, Json merges, const Json& unknown, bool byte_fallback) {
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", unknown},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", byte_fallback},
          {"byte_fallback", byte_fallback},
          {"ignore_merges", false},
          {"vocab", std::move(vocabulary)},
          {"merges", std::move(merges)}};
}

Json document(Json added, Json normalizer, Json pre_tokenizer, Json post_processor, Json decoder, Json model) {
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", std::move(added)},
          {"normalizer", std::move(normalizer)},
          {"pre_tokenizer", std::move(pre_tokenizer)},
          {"post_processor", std::move(post_processor)},
          {"decoder", std::move(decoder)},
          {"model", std::move(model)}};
}

TokenizerFiles with_config(TokenizerFiles files, const Json& config) {
  files["tokenizer_config.json"] = config.dump(2) + "\n";
  return files;
}

// Every pair of pieces that makes a piece, the best piece first.
Json merges_of(const sentencepiece::SentencePieceProcessor& processor) {
  struct Pair {
    float score;
    int32_t result, left, right;
  };
  IdOfText ids;
  for (int32_t id = 0; id < processor.GetPieceSize(); ++id)
    if (!processor.IsControl(id) && !processor.IsUnknown(id) && !processor.IsByte(id) && !processor.IsUnused(id))
      ids.emplace(processor.IdToPiece(id), id);
  std::vector<Pair> pairs;
  for (const auto& [piece, id] : ids) {
    const std::string_view text = piece;
    for (size_t cut = utf8_bytes_of(text[0]); cut < text.size(); cut += utf8_bytes_of(text[cut])) {
      const auto left = ids.find(text.substr(0, cut)), right = ids.find(text.substr(cut));
      if (left != ids.end() && right != ids.end())
        pairs.push_back({processor.GetScore(id), id, left->second, right->second});
    }
  }
  std::ranges::sort(pairs, [](const Pair& a, const Pair& b) {
    return std::tuple(-a.score, a.result, a.left, a.right) < std::tuple(-b.score, b.result, b.left, b.right);
  });
  Json merges = Json::array();
  for (const Pair& pair : pairs)
    merges.push_back(Json::array({processor.IdToPiece(pair.left), processor.IdToPiece(pair.right)}));
  return merges;
}

}  // namespace

TokenizerFiles byte_tokenizer_files(bool bos) {
  const std::string bos_token = "<|bos|>", eos_token = "<|eos|>";
  Json vocabulary = Json::object();
  for (int byte = 0; byte < 256; ++byte) vocabulary[letter_of_byte(static_cast<unsigned char>(byte))] = byte;
  const auto byte_level = [](bool regex) {
    return Json{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", regex}};
  };
  const Json json = document(Json::array({special_token(256, bos_token), special_token(257, eos_token)}), nullptr,
                             byte_level(false), template_of(bos, 256, bos_token), byte_level(true),
                             model_of(std::move(vocabulary), Json::array(), nullptr, false));
  return with_config({{"tokenizer.json", json.dump(1) + "\n"}}, config_of("byte", bos, bos_token, eos_token));
}

TokenizerFiles sentencepiece_files(const std::string& model, bool bos) {
  sentencepiece::SentencePieceProcessor processor;
  require(processor.LoadFromSerializedProto(model).ok(), "tokenizer: its SentencePiece model cannot be read again");
  TokenizerFiles files{{"tokenizer.model", model}};
  const bool has_all = processor.bos_id() >= 0 && processor.eos_id() >= 0;
  if (!is_plain_byte_pair_model(model) || !has_all) {
    files["tokenization_furious.py"] = kTokenizationFurious;
    const Json code{{"AutoTokenizer", Json::array({"tokenization_furious.FuriousTokenizer", nullptr})}};
    return with_config(std::move(files), {{"tokenizer_class", "FuriousTokenizer"},
                                          {"auto_map", code},
                                          {kSavedKindKey, "sentencepiece"},
                                          {"begin_with_bos", bos},  // the library drops add_bos_token on saving
                                          {"clean_up_tokenization_spaces", false}});
  }
  const auto name_of = [&](int32_t id) { return processor.IdToPiece(id); };
  const std::string unknown = name_of(processor.unk_id());
  Json vocabulary = Json::object(), added = Json::array();
  for (int32_t id = 0; id < processor.GetPieceSize(); ++id) {
    vocabulary[name_of(id)] = id;
    if (processor.IsControl(id) || processor.IsUnknown(id)) added.push_back(special_token(id, name_of(id)));
  }
  const Json replace{{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "▁"}};
  const Json restore{{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}};
  const Json normalizer{{"type", "Sequence"},
                        {"normalizers", Json::array({Json{{"type", "Prepend"}, {"prepend", "▁"}}, replace})}};
  const Json strip{{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}};
  const Json decoder{
      {"type", "Sequence"},
      {"decoders", Json::array({restore, Json{{"type", "ByteFallback"}}, Json{{"type", "Fuse"}}, strip})}};
  const Json json =
      document(std::move(added), normalizer, nullptr, template_of(bos, processor.bos_id(), name_of(processor.bos_id())),
               decoder, model_of(std::move(vocabulary), merges_of(processor), unknown, true));
  files["tokenizer.json"] = json.dump(1) + "\n";
  Json config = config_of("sentencepiece", bos, name_of(processor.bos_id()), name_of(processor.eos_id()));
  config["unk_token"] = unknown;
  return with_config(std::move(files), config);
}

}  // namespace furious
