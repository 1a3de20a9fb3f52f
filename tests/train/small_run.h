// A corpus and options for runs that take milliseconds.
#pragma once

#include "data/corpus.h"
#include "data/tokenize.h"
#include "furious/train.h"

namespace furious::testing {

inline std::string small_data(const TemporaryFolder& folder, const std::string& name = "data") {
  Random random(99);
  TokenizeOptions options;
  options.inputs = {folder.write(name + ".jsonl", json_lines(random_documents(random, 200)))};
  options.tokenizer = "byte";
  options.out = folder.path(name);
  options.test_fraction = 0.1;
  tokenize_corpus(options);
  return options.out;
}

inline TrainOptions small_options(const std::string& data, const std::string& out) {
  TrainOptions options;
  options.device = "cpu";
  options.hidden = options.intermediate = 32;
  options.heads = options.layers = 2;
  options.data = data;
  options.out = out;
  options.batch = 4;
  options.length = 24;
  options.steps = 12;
  options.lr = 1e-2;
  options.warmup = 4;
  options.eval_every = 5;
  options.eval_batches = 2;
  options.save_every = 3;
  return options;
}

}  // namespace furious::testing
