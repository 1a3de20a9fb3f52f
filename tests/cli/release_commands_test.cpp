// `furious eval` and `furious generate` on a folder that the authors' trainer wrote, by running the binary.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/run.h"
#include "data/batches.h"
#include "data/corpus.h"
#include "data/tokenize.h"
#include "eval/test_loss.h"
#include "model/checkpoint.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using testing::expect_run;
using testing::run;
using testing::TemporaryFolder;

const std::string kFolders = FURIOUS_RELEASE_DATA;
constexpr const char* kType = "squared__sm_norm__A_mask_type_neg_softplus__in_conv_k_2";

class ReleaseCommands : public ::testing::Test {
 protected:
  // The folder's weights and tokenizer, without its configuration.
  std::string bare(const std::string& name) const {
    const std::string out = folder.path("bare");
    fs::remove_all(out);
    fs::create_directories(out);
    for (const char* file : {"model.safetensors", "tokenizer.model", "config.pt"})
      fs::copy_file(fs::path(kFolders) / name / file, fs::path(out) / file);
    return out;
  }

  TemporaryFolder folder;
  std::string squared = kFolders + "/2mamba-squared", softmax = kFolders + "/2mamba-softmax";
};

TEST_F(ReleaseCommands, Generate) {
  const std::string flags = " --prompt 'the cat' --tokens 5 --temperature 0 --threads 1";
  for (const std::string& model : {squared, softmax}) {
    const auto tokens = load_tokenizer(model)->encode("the cat").size();
    expect_run("generate " + model + flags, 0,
               {fmt::format("prompt: {} tokens", tokens + 1), "config.pt is pickled and not read"});  // bos before it
  }

  const auto text_of = [&](const std::string& arguments) {
    const testing::RunResult result = run("generate " + arguments + flags);
    EXPECT_EQ(result.code, 0) << result.output;
    const size_t begin = result.output.find("architecture\n");  // the end of the note
    return result.output.substr(begin, result.output.rfind("prompt: ") - begin);
  };
  const std::string text = text_of(squared);
  for (const std::string arch : {"2mamba", kType}) EXPECT_EQ(text_of(bare("2mamba-squared") + " --arch " + arch), text);
  EXPECT_EQ(text_of(squared + " --bos --heads 2 --arch 2mamba"), text);

  expect_run("generate " + bare("2mamba-squared") + flags, 1, {"--arch", "2mamba, 2mamba-e"});
  expect_run("generate " + bare("2mamba-squared") + flags + " --arch squared__sm_nrm", 1, {"sm_nrm", "\"sm_norm\""});
  expect_run("generate " + squared + flags + " --heads 4", 1, {"2 heads, not 4"});
  expect_run("generate " + squared + flags + " --heads 0", 2, {"--heads"});
  expect_run("generate --help", 0, {"--arch", "--heads", "--bos", "authors"});
}

TEST_F(ReleaseCommands, Eval) {
  testing::Random random(1);
  TokenizeOptions tokenize;
  tokenize.inputs = {folder.write("in.jsonl", testing::json_lines(testing::random_documents(random, 20)))};
  tokenize.tokenizer = squared + "/tokenizer.model";
  tokenize.out = folder.path("data");
  tokenize.test_fraction = 0.4;
  tokenize_corpus(tokenize);
  const Dataset dataset(tokenize.out);

  const auto loss_of = [&](Packing packing, bool bos) {
    BatchOptions options;
    options.batch = 4;
    options.length = 48;
    options.packing = packing;
    options.bos = bos;
    options.order = Order::once;
    const DatasetBatches batches(dataset, Split::test, options);
    return test_loss(load_model(squared), batches, batches.steps()).mean();
  };
  const auto eval = [&](const std::string& model, const std::string& more = "") {
    return fmt::format("eval {} --data {} --batch 4 --length 48 --device cpu {}", model, tokenize.out, more);
  };
  const auto per_token = [](double loss) { return fmt::format("{:.5f} per token", loss); };
  const double rows = loss_of(Packing::rows, true), packed = loss_of(Packing::packed, false);
  ASSERT_GT(std::abs(rows - loss_of(Packing::rows, false)), 1e-3);
  const std::string json = folder.path("loss.json");
  expect_run(eval(squared, "--json " + json), 0,
             {per_token(rows), "(test, rows, bos)", "config.pt is pickled and not read"});
  EXPECT_EQ(nlohmann::json::parse(testing::read_file(json)).at("bos"), true);
  expect_run(eval(squared, "--packing packed"), 0, {per_token(packed), "(test, packed)"});
  expect_run(eval(squared, "--packing packed --bos"), 1, {"--packing rows"});
  for (const std::string arch : {"2mamba", kType})
    expect_run(eval(bare("2mamba-squared"), "--heads 2 --arch " + arch), 0, {per_token(rows), "(test, rows, bos)"});
  expect_run(eval(bare("2mamba-squared")), 1, {"--arch"});
  expect_run(eval(bare("2mamba-squared"), "--arch 2mamba --heads 3"), 1, {"2 heads, not 3"});

  // A model in our format uses packed windows, and rows with bos on request.
  LanguageModel model = load_model(squared);
  const std::string ours = folder.path("ours");
  fs::create_directories(ours);
  save_model(ours, model);
  expect_run(eval(ours), 0, {per_token(rows), "(test, rows, bos)"});
  auto config = nlohmann::json::parse(testing::read_file(ours + "/config.json"));
  config.erase("bos");
  folder.write("ours/config.json", config.dump());
  expect_run(eval(ours), 0, {per_token(packed), "(test, packed)"});
  expect_run(eval(ours, "--bos"), 0, {per_token(rows), "(test, rows, bos)"});
}

}  // namespace
}  // namespace furious
