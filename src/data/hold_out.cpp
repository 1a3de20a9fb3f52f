#include "data/hold_out.h"

#include <algorithm>

#include "base/error.h"
#include "base/hash.h"
#include "base/random.h"

namespace furious {
namespace {

constexpr uint64_t kHeldOutStream = 0x68656c646f7574;  // "heldout"
constexpr int64_t kBoundaryWindow = 64 << 10;          // in which a paragraph, line or word begins

// Whether each file with text would be held out; stops when both answers were given.
bool leaves_a_split_empty(const std::vector<InputFile>& files, const ReaderOptions& reader, const HoldOut& options) {
  bool in_split[2] = {false, false};
  for (const InputFile& file : files) {
    BlockReader blocks({file}, reader);
    Block block;
    if (!blocks.next(block)) continue;
    for_each_document_part(block, reader, [&](const DocumentPart& part) {
      in_split[is_held_out(part.text, options.seed, options.fraction)] = true;
    });
    if (in_split[0] && in_split[1]) return false;
  }
  return in_split[0] || in_split[1];
}

int64_t text_bytes(const InputFile& file) {
  if (file.is_plain()) return file.size;
  const auto stream = open_text_stream(file);
  std::vector<char> buffer(1 << 20);
  int64_t bytes = 0;
  while (const size_t got = stream->read(buffer.data(), buffer.size())) bytes += static_cast<int64_t>(got);
  return bytes;
}

// The index after the last `ending` of the text; 0: there is none.
size_t after_last(std::string_view text, std::string_view ending) {
  const size_t at = text.rfind(ending);
  return at == text.npos ? 0 : at + ending.size();
}

// The begin of a paragraph, line, word or character, the first of these that there is, at or before `at`.
int64_t boundary_before(const InputFile& file, int64_t at) {
  const int64_t begin = std::max<int64_t>(0, at - std::min(kBoundaryWindow, at / 2));
  const auto stream = open_text_stream(file);
  stream->skip(begin);
  std::string window(static_cast<size_t>(at - begin + 1), '\0');
  window.resize(stream->read(window.data(), window.size()));
  size_t last = window.empty() ? 0 : window.size() - 1;  // of the byte that would be the first of the tail
  for (const std::string_view ending : {"\n\n", "\n\r\n", "\n", " "})
    if (const size_t found = after_last(std::string_view(window).substr(0, last), ending))
      return begin + static_cast<int64_t>(found);
  while (last > 0 && (static_cast<unsigned char>(window[last]) & 0xC0) == 0x80) --last;
  return begin + static_cast<int64_t>(last);
}

}  // namespace

bool is_held_out(std::string_view text, uint64_t seed, double fraction) {
  const RandomBits bits = random_bits(seed, kHeldOutStream, hash_of(text.substr(0, 64 << 10)));
  const uint64_t number = uint64_t{bits.word[0]} << 21 ^ bits.word[1] >> 11;  // 53 bits
  return static_cast<double>(number) * 0x1p-53 < fraction;
}

void hold_out_tail(std::vector<InputFile>& files, const ReaderOptions& reader, const HoldOut& options) {
  if (options.fraction <= 0 || reader.split_on_blank_line || !std::ranges::all_of(files, &InputFile::is_text) ||
      !leaves_a_split_empty(files, reader, options))
    return;
  int64_t total = 0, longest = 0;
  InputFile* chosen = nullptr;
  for (InputFile& file : files) {
    const int64_t bytes = text_bytes(file);
    total += bytes;
    if (bytes <= longest) continue;
    longest = bytes;
    chosen = &file;
  }
  const auto part = [](double fraction, int64_t bytes) {
    return static_cast<int64_t>(fraction * static_cast<double>(bytes));
  };
  const int64_t least = std::min(options.least_tail, total / 10);
  const int64_t tail =
      std::min(std::max(part(options.fraction, total), least), part(std::max(0.5, options.fraction), longest));
  const int64_t test_from = boundary_before(*chosen, longest - tail);
  require(tail > 0 && test_from > 0 && test_from < longest,
          "tokenize: \"{}\" is too short to hold out its end as the test split; use more text, --test FILE, a larger "
          "--test-fraction, or --test-fraction 0 for no test split",
          chosen->path);
  chosen->test_from = test_from;
}

}  // namespace furious
