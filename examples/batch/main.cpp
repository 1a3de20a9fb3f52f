// Continuous batching: prompts of different lengths share the steps of a model. A sequence joins when a place is free,
// and leaves at its end while the others go on.
//
//     cmake -S . -B build -DCMAKE_PREFIX_PATH=<where furious was installed> && cmake --build build
//     build/batch <checkpoint> "Once upon a time" "The dragon" "In the morning" …
#include <furious/model.h>

#include <exception>
#include <iostream>
#include <map>
#include <string>
#include <vector>

namespace {

constexpr int kAtATime = 2;
constexpr size_t kMostTokens = 40;

struct Request {
  std::string prompt;
  std::vector<int32_t> written;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: batch CHECKPOINT PROMPT...\n";
    return 2;
  }
  try {
    const furious::Model model = furious::Model::load(argv[1]);
    furious::SequenceBatch batch(model, kAtATime);
    std::map<int, Request> running;  // by the number of the sequence
    int next = 2;                    // of the prompts

    while (next < argc || !running.empty()) {
      // New sequences: their prompts are read together.
      std::vector<furious::SequenceBatch::Prompt> prompts;
      while (next < argc && running.size() < kAtATime) {
        const int sequence = batch.add();
        furious::Sampling sampling;
        sampling.temperature = 0.7;
        sampling.seed = static_cast<uint64_t>(next);
        batch.set_sampling(sequence, sampling);
        running[sequence] = {argv[next], {}};
        prompts.push_back({sequence, model.prompt(argv[next])});
        ++next;
      }
      batch.read(prompts);

      // One token of each.
      const std::vector<int> sequences = batch.sequences();
      const std::vector<furious::WrittenToken> tokens = batch.step(sequences);
      for (size_t i = 0; i < sequences.size(); ++i) {
        Request& request = running[sequences[i]];
        request.written.push_back(tokens[i].id);
        if (tokens[i].id != model.eos() && request.written.size() < kMostTokens) continue;
        std::cout << request.prompt << model.decode(request.written) << "\n---\n";
        batch.remove(sequences[i]);
        running.erase(sequences[i]);
      }
    }
  } catch (const std::exception& error) {
    std::cerr << "batch: " << error.what() << '\n';
    return 1;
  }
}
