// `furious data`: what token shards contain.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/flags.h"
#include "cli/json_file.h"
#include "data/batches.h"
#include "data/dataset.h"
#include "data/utf8.h"
#include "report/table.h"

namespace furious::cli {
namespace {

using Json = nlohmann::ordered_json;

struct ShowCommand {
  std::string folder, json;
  int64_t samples = 3, sample_bytes = 400;

  void run() const;
};

// Documents by length: bucket b has those of 2^b to 2^(b+1) − 1 tokens.
struct Lengths {
  struct Bucket {
    int64_t documents = 0, tokens = 0;
  };
  std::vector<Bucket> buckets;
  std::vector<int64_t> sorted;

  explicit Lengths(const TokenView& tokens) {
    sorted.reserve(static_cast<size_t>(tokens.documents()));
    for (int64_t i = 0; i < tokens.documents(); ++i) {
      const int64_t length = tokens.document(i).length();
      const auto bucket = static_cast<size_t>(std::bit_width(static_cast<uint64_t>(length)) - 1);
      if (bucket >= buckets.size()) buckets.resize(bucket + 1);
      ++buckets[bucket].documents;
      buckets[bucket].tokens += length;
      sorted.push_back(length);
    }
    std::ranges::sort(sorted);
  }

  int64_t quantile(double part) const {
    return sorted[static_cast<size_t>(part * static_cast<double>(sorted.size() - 1))];
  }
};

std::string ratio(int64_t a, int64_t b) {
  return b > 0 ? fmt::format("{:.2f}", static_cast<double>(a) / static_cast<double>(b)) : "-";
}

void print_splits(const Dataset& data) {
  Table table{{"split", "documents", "tokens", "bytes of text", "bytes/token", "tokens/document", "shards"}, {}};
  for (const Split split : kSplits) {
    const ShardInfo total = data.manifest()[split].total();
    table.rows.push_back({name_of(split), fmt::format("{}", total.documents), fmt::format("{}", total.tokens),
                          fmt::format("{}", total.bytes), ratio(total.bytes, total.tokens),
                          ratio(total.tokens, total.documents),
                          fmt::format("{}", data.manifest()[split].shards.size())});
  }
  fmt::print("{}", to_text(table));
}

void print_lengths(Split split, const Lengths& lengths, int64_t documents) {
  constexpr int64_t kBarWidth = 40;
  const auto largest = std::ranges::max_element(lengths.buckets, {}, &Lengths::Bucket::documents)->documents;
  Table table{{"tokens", "documents", "share", ""}, {}};
  for (size_t b = 0; b < lengths.buckets.size(); ++b) {
    const Lengths::Bucket& bucket = lengths.buckets[b];
    if (table.rows.empty() && bucket.documents == 0) continue;
    const int64_t low = int64_t{1} << b;
    const int64_t bar = (bucket.documents * kBarWidth + largest - 1) / largest;
    std::string blocks;
    for (int64_t i = 0; i < bar; ++i) blocks += "█";
    table.rows.push_back(
        {low == 1 ? "1" : fmt::format("{} to {}", low, 2 * low - 1), fmt::format("{}", bucket.documents),
         fmt::format("{:.1f} %", 100.0 * static_cast<double>(bucket.documents) / static_cast<double>(documents)),
         blocks});
  }
  fmt::print("\nlengths of the {} documents (shortest {}, median {}, 99 % up to {}, longest {}):\n{}", name_of(split),
             lengths.sorted.front(), lengths.quantile(0.5), lengths.quantile(0.99), lengths.sorted.back(),
             to_text(table));
}

// The begin of a document as text on one line: control characters are escaped.
std::string sample_of(const Dataset& data, const TokenView& tokens, int64_t document, int64_t bytes) {
  const DocumentRange range = tokens.document(document);
  std::vector<int32_t> ids(static_cast<size_t>(std::min(range.length(), bytes)));
  tokens.copy(range.begin, static_cast<int64_t>(ids.size()), ids.data());
  std::string text = data.tokenizer()->decode(ids);
  const bool cut = static_cast<int64_t>(ids.size()) < range.length() || static_cast<int64_t>(text.size()) > bytes;
  text.resize(std::min(text.size(), static_cast<size_t>(bytes)));
  text.resize(valid_utf8_prefix(text));
  std::string line;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n')
      line += "\\n";
    else if (byte < 0x20 || byte == 0x7F)
      line += fmt::format("\\x{:02x}", byte);
    else
      line += c;
  }
  return line + (cut ? "…" : "");
}

Json split_json(const Dataset& data, Split split, const Lengths& lengths) {
  const ShardInfo total = data.manifest()[split].total();
  Json json = {{"documents", total.documents},
               {"tokens", total.tokens},
               {"bytes", total.bytes},
               {"shards", data.manifest()[split].shards.size()}};
  json["lengths"] = Json::array();
  for (size_t b = 0; b < lengths.buckets.size(); ++b)
    json["lengths"].push_back({{"from", int64_t{1} << b},
                               {"documents", lengths.buckets[b].documents},
                               {"tokens", lengths.buckets[b].tokens}});
  return json;
}

void ShowCommand::run() const {
  std::error_code ignored;
  require(std::filesystem::exists(folder, ignored) || folder.find(',') == folder.npos,
          "data show: \"{}\" does not exist; a mixture is shown one folder at a time", folder);
  JsonFile file(json);
  const Dataset data(folder);
  const TokenizerInfo& tokenizer = data.manifest().tokenizer;
  fmt::print("tokenizer    {}, {} ids, bos {}, eos {}\nfingerprint  {}\n", tokenizer.kind, tokenizer.vocabulary_size,
             tokenizer.bos, tokenizer.eos, tokenizer.fingerprint);
  if (data.manifest().replaced > 0)
    fmt::print("replaced     {} broken UTF-8 sequences by U+FFFD\n", data.manifest().replaced);
  fmt::print("\n");
  print_splits(data);
  Json all = {{"tokenizer",
               {{"kind", tokenizer.kind},
                {"fingerprint", tokenizer.fingerprint},
                {"vocabulary_size", tokenizer.vocabulary_size},
                {"bos", tokenizer.bos},
                {"eos", tokenizer.eos}}}};
  for (const Split split : kSplits) {
    const TokenView& tokens = data.tokens(split);
    const Lengths lengths(tokens);
    if (tokens.documents() > 0) print_lengths(split, lengths, tokens.documents());
    all[name_of(split)] = split_json(data, split, lengths);
  }
  for (const Split split : kSplits) {
    const TokenView& tokens = data.tokens(split);
    for (int64_t i = 0; i < std::min(samples, tokens.documents()); ++i) {
      const int64_t document = Permutation(tokens.documents(), 0, 0)(i);
      fmt::print("\n{} document {}, {} tokens:\n{}\n", name_of(split), document, tokens.document(document).length(),
                 sample_of(data, tokens, document, sample_bytes));
    }
  }
  file.write(all);
}

}  // namespace

void add_data(CLI::App& app) {
  CLI::App* data = app.add_subcommand("data", "Show what token shards contain");
  data->require_subcommand(1);
  data->footer("Example: furious data show shards");
  auto options = std::make_shared<ShowCommand>();
  CLI::App* command = data->add_subcommand(
      "show", "Show the documents, lengths, tokenizer and samples of a folder written by `furious tokenize`");
  command->add_option("shards", options->folder, "Folder of token shards, written by `furious tokenize`")->required();
  command->add_option("--samples", options->samples, "Number of documents of each split to print")
      ->check(at_least(0))
      ->capture_default_str();
  command->add_option("--sample-bytes", options->sample_bytes, "Number of bytes to print of a document")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  add_json(*command, options->json, "Write the numbers to this JSON file");
  command->footer("Example: furious data show shards --samples 5");
  command->callback([options] { options->run(); });
}

}  // namespace furious::cli
