// The demo: a tokenizer, shards and several small models from some text, all models trained on the same batches.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/token_shards.h"
#include "furious/model.h"
#include "report/chart.h"
#include "report/table.h"
#include "train/training.h"

namespace furious {

struct DemoOptions {
  std::vector<std::string> text;  // files; empty: the dictionary of Debian's package dict-gcide
  std::vector<std::string> archs{"2mamba", "mamba2", "softmax"};
  std::string out = "demo";  // folder for tokenizer, shards, models and chart
  int64_t steps = 220;
  int32_t vocabulary = 4096;
};

// The steps of the demo, to be called in this order.
class Demo {
 public:
  static constexpr int64_t kBatch = 8, kLength = 256;

  struct Model {
    std::string arch;
    std::unique_ptr<Training> trainer;
    std::vector<double> losses;  // of the steps
    double seconds = 0;          // of all steps
    double test_loss = 0;
  };

  explicit Demo(DemoOptions options);  // an Error if there is no text

  int64_t train_tokenizer();  // returns the bytes of text read
  Manifest tokenize(const std::function<bool()>& stop = {});
  void make_models();
  void step();                                 // one step of every model, on the same batch
  void evaluate();                             // test losses
  void save();                                 // checkpoints in OUT/ARCH and the chart in OUT/loss.svg
  std::vector<Text> samples(int count) const;  // of the first model

  const std::vector<Model>& models() const { return models_; }

 private:
  DemoOptions options_;
  std::vector<std::string> inputs_;
  std::vector<Model> models_;
};

Table demo_table(const Demo& demo);  // sizes, losses, rates and cache memory
Chart demo_chart(const Demo& demo);  // training losses

}  // namespace furious
