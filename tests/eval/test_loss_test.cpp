#include "eval/test_loss.h"

#include <filesystem>
#include <set>

#include "data/corpus.h"
#include "data/tokenize.h"

namespace furious {
namespace {

using namespace furious::testing;

class TestLossTest : public ::testing::Test {
 protected:
  Dataset tokenized(const std::vector<std::string>& documents, const std::string& tokenizer) const {
    TokenizeOptions options;
    options.inputs = {folder.write("documents.jsonl", json_lines(documents))};
    options.tokenizer = tokenizer;
    options.out = folder.path("data");
    options.test_fraction = 0;
    tokenize_corpus(options);
    return Dataset(options.out);
  }
  static DatasetBatches batches(const Dataset& data, Packing packing) {
    BatchOptions options;
    options.batch = 3;
    options.length = 16;
    options.packing = packing;
    options.order = Order::once;
    return {data, Split::train, options};
  }
  TemporaryFolder folder;
};

// From logits, without the fused loss.
double loss_of(const LanguageModel& model, const std::vector<int32_t>& tokens) {
  const auto length = static_cast<int64_t>(tokens.size()) - 1;
  const Tensor logits = model.logits(int_tensor_of({tokens.begin(), tokens.end() - 1}, {1, length}));
  double sum = 0;
  for (int64_t t = 0; t < length; ++t) {
    const std::vector<double> row = to_doubles(logits.select(0, 0).select(0, t));
    double total = 0;
    for (const double logit : row) total += std::exp(logit);
    sum += std::log(total) - row[static_cast<size_t>(tokens[t + 1])];
  }
  return sum;
}

TEST_F(TestLossTest, IsTheSumOverTheWindows) {
  Random random(1);
  const Dataset data = tokenized(random_documents(random, 5), "byte");
  const LanguageModel model(model_config("2mamba", "tiny", 258), 3);
  const TokenView& view = data.tokens(Split::train);
  const DatasetBatches source = batches(data, Packing::packed);
  const TestLoss loss = test_loss(model, source, source.steps(), data.tokenizer().get());
  EXPECT_EQ(loss.tokens, view.size() - 1);
  double expected = 0;
  for (int64_t begin = 0; begin + 1 < view.size(); begin += 16) {
    std::vector<int32_t> window(std::min<int64_t>(17, view.size() - begin));
    view.copy(begin, static_cast<int64_t>(window.size()), window.data());
    expected += loss_of(model, window);
  }
  EXPECT_NEAR(loss.sum, expected, 1e-4 * expected);
  EXPECT_NEAR(loss.perplexity(), std::exp(expected / static_cast<double>(loss.tokens)), 1e-2 * loss.perplexity());
  EXPECT_NEAR(loss.bits_per_byte() * std::log(2.0), loss.sum / static_cast<double>(loss.text_bytes), 1e-9);
}

TEST_F(TestLossTest, CountsTheBytesOfTheText) {
  Random random(2);
  const std::vector<std::string> documents = random_documents(random, 40);
  const LanguageModel model(model_config("linear", "tiny", 400), 3);
  for (const std::string& tokenizer : {std::string("byte"), folder.write("t.model", small_model())}) {
    std::filesystem::remove_all(folder.path("data"));
    const Dataset data = tokenized(documents, tokenizer);
    const DatasetBatches source = batches(data, Packing::packed);
    const TestLoss loss = test_loss(model, source, source.steps(), data.tokenizer().get());
    int32_t first = 0;
    data.tokens(Split::train).copy(0, 1, &first);
    const auto first_bytes = static_cast<int64_t>(data.tokenizer()->first_piece(first).size());
    EXPECT_EQ(loss.text_bytes, data.tokens(Split::train).text_bytes() - first_bytes) << tokenizer;
  }
}

TEST_F(TestLossTest, EveryPackingAndAPartOfTheBatches) {
  Random random(3);
  const std::vector<std::string> documents = random_documents(random, 20);
  const Dataset data = tokenized(documents, "byte");
  const LanguageModel model(model_config("mamba2s", "tiny", 258), 3);
  const DatasetBatches isolated = batches(data, Packing::isolated), rows = batches(data, Packing::rows);
  const int64_t inside = data.tokens(Split::train).size() - data.tokens(Split::train).documents();
  EXPECT_EQ(test_loss(model, isolated, isolated.steps()).tokens, inside);
  int64_t cut = 0;
  for (const std::string& text : documents) cut += std::min<int64_t>(16, static_cast<int64_t>(text.size()));
  EXPECT_EQ(test_loss(model, rows, rows.steps()).tokens, cut);
  const auto after_one = [](int64_t done, const TestLoss&) { return done < 1; };
  EXPECT_EQ(test_loss(model, rows, 1).sum, test_loss(model, rows, 9, nullptr, after_one).sum);
}

TEST_F(TestLossTest, RefusesDataWithMoreIdsThanTheModel) {
  const Dataset data = tokenized({"a text"}, "byte");
  const LanguageModel model(model_config("linear", "tiny", 200), 3);
  expect_error([&] { test_loss(model, batches(data, Packing::packed), 1); }, {"258 token ids", "200", "tokenizer"});
}

TEST_F(TestLossTest, LossesByPositionAddUpToTheLoss) {
  Random random(5);
  const Dataset data = tokenized(random_documents(random, 9), "byte");
  const LanguageModel model(model_config("2mamba", "tiny", 258), 3);
  for (const Packing packing : {Packing::packed, Packing::isolated, Packing::rows}) {
    const DatasetBatches source = batches(data, packing);
    std::vector<PositionLoss> places = position_losses(16);
    const TestLoss loss = test_loss(model, source, source.steps(), nullptr, {}, &places);
    double sum = 0;
    int64_t tokens = 0;
    for (const PositionLoss& place : places) {
      sum += place.sum;
      tokens += place.tokens;
    }
    EXPECT_NEAR(sum, loss.sum, 1e-9 * loss.sum);
    EXPECT_EQ(tokens, loss.tokens);
    // Place by place, from the positions in the rows or documents.
    std::vector<int64_t> expected(places.size());
    for (int64_t step = 0; step < source.steps(); ++step) {
      const Batch batch = source.at(step);
      std::set<int64_t> starts;
      if (batch.boundaries)
        for (int64_t i = 0; i < batch.boundaries.elements(); ++i) starts.insert(batch.boundaries.data<int32_t>()[i]);
      int64_t known = 0;
      for (int64_t i = 0; i < batch.targets.elements(); ++i) {
        known = i % 16 == 0 || starts.contains(i) ? 1 : known + 1;
        if (batch.targets.data<int32_t>()[i] < 0) continue;
        for (size_t p = 0; p < places.size(); ++p) expected[p] += known >= places[p].first && known <= places[p].last;
      }
    }
    for (size_t p = 0; p < places.size(); ++p) EXPECT_EQ(places[p].tokens, expected[p]) << p;
  }
}

TEST(PositionLosses, PowersOfTwo) {
  const auto ends = [](int64_t length) {
    std::vector<std::pair<int64_t, int64_t>> found;
    for (const PositionLoss& place : position_losses(length)) found.emplace_back(place.first, place.last);
    return found;
  };
  using Ends = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(ends(1), (Ends{{1, 1}}));
  EXPECT_EQ(ends(2), (Ends{{1, 1}, {2, 2}}));
  EXPECT_EQ(ends(16), (Ends{{1, 1}, {2, 2}, {3, 4}, {5, 8}, {9, 16}}));
  EXPECT_EQ(ends(11), (Ends{{1, 1}, {2, 2}, {3, 4}, {5, 8}, {9, 11}}));
}

}  // namespace
}  // namespace furious
