// A language model inside a program: load a checkpoint, feed a prompt, stream what the model writes, keep the state.
//
//     cmake -S . -B build -DCMAKE_PREFIX_PATH=<where furious was installed> && cmake --build build
//     build/embed <checkpoint> "Once upon a time" story.state    starts a text and saves its state
//     build/embed <checkpoint> "" story.state                    continues it
#include <furious/model.h>

#include <exception>
#include <filesystem>
#include <iostream>
#include <string_view>

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: embed CHECKPOINT PROMPT STATE_FILE\n";
    return 2;
  }
  const std::string_view prompt = argv[2];
  const std::filesystem::path state = argv[3];
  try {
    const furious::Model model = furious::Model::load(argv[1]);
    std::cerr << model.arch() << ", " << model.parameters() << " parameters\n";

    furious::Session session(model);
    if (prompt.empty()) session.load(state);
    session.read(prompt);

    furious::WriteOptions options;
    options.tokens = 100;
    options.sampling.temperature = 0.7;
    session.write(options, [](std::string_view piece, int) {
      std::cout << piece << std::flush;
      return true;  // false would end the text here
    });
    std::cout << '\n';
    session.save(state);
  } catch (const std::exception& error) {
    std::cerr << "embed: " << error.what() << '\n';
    return 1;
  }
}
