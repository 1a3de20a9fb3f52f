// Readers of untrusted files, as functions of the bytes of such a file. A file is accepted or refused
// with an Error; a crash, another exception, or the report of a sanitizer is a defect.
//
// libFuzzer calls them with mutations of tests/fuzz/corpus (`make fuzz`, entry.cpp); the tests call them with the
// corpus itself (corpus_test.cpp), as a regression test. Add a file that libFuzzer reports
// to the corpus together with the fix.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace furious::fuzz {

// Whether the file was accepted.
bool safetensors(std::string_view bytes);  // also the index of several, which begins with {
bool pickle(std::string_view bytes);
bool config(std::string_view bytes);
bool state(std::string_view bytes);
bool manifest(std::string_view bytes);
bool progress(std::string_view bytes);   // with a corrected checksum
bool tokenizer(std::string_view bytes);  // a SentencePiece model
bool tokenizer_json(std::string_view bytes);
bool request(std::string_view bytes);       // the body of a request to the server
bool csv(std::string_view bytes);           // a file of a corpus, with a column "text"
bool json_records(std::string_view bytes);  // likewise, with fields "text"
bool html(std::string_view bytes);          // accepted if it has text

struct Target {
  const char* name;
  bool (*run)(std::string_view);
};
inline constexpr Target kTargets[] = {{"safetensors", safetensors},
                                      {"pickle", pickle},
                                      {"config", config},
                                      {"state", state},
                                      {"manifest", manifest},
                                      {"progress", progress},
                                      {"tokenizer", tokenizer},
                                      {"tokenizer_json", tokenizer_json},
                                      {"request", request},
                                      {"csv", csv},
                                      {"json_records", json_records},
                                      {"html", html}};

// Valid files with the name of their target: the seeds of the corpus.
std::vector<std::pair<std::string, std::string>> good_files();

}  // namespace furious::fuzz
