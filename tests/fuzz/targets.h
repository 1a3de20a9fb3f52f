// What reads files that may come from anywhere, as functions of the bytes of such a file. A file is accepted or refused
// with an Error; a crash, another exception, or the report of a sanitizer is a defect.
//
// libFuzzer calls them with what it makes of tests/fuzz/corpus (`make fuzz`, entry.cpp); the tests call them with the
// corpus alone (corpus_test.cpp), so that a defect that was found once stays found. A file that libFuzzer reports goes
// into the corpus with the repair.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace furious::fuzz {

// Whether the file was accepted.
bool safetensors(std::string_view bytes);  // also the index of several, which begins with {
bool config(std::string_view bytes);
bool state(std::string_view bytes);
bool manifest(std::string_view bytes);
bool progress(std::string_view bytes);  // with its checksum made right
bool tokenizer(std::string_view bytes);

struct Target {
  const char* name;
  bool (*run)(std::string_view);
};
inline constexpr Target kTargets[] = {{"safetensors", safetensors}, {"config", config},     {"state", state},
                                      {"manifest", manifest},       {"progress", progress}, {"tokenizer", tokenizer}};

// Files as this program writes them, with the name of their target: what a fuzzer begins with.
std::vector<std::pair<std::string, std::string>> good_files();

}  // namespace furious::fuzz
