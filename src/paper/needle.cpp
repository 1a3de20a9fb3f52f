#include "paper/needle.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <span>
#include <unordered_map>

#include "base/error.h"
#include "base/file.h"
#include "base/number.h"
#include "base/numpy_shuffle.h"
#include "base/random.h"
#include "data/records.h"
#include "data/synthetic.h"
#include "decode/model_parts.h"

namespace furious {
namespace {

constexpr std::string_view kTask =
    "An important pass key is hidden in the text below. Find it and remember it: it is asked for at the end.\n\n";
constexpr std::string_view kQuestion = "\n\nWhat is the pass key? The pass key is";

constexpr std::array<std::string_view, 16> kOwnHay = {
    "The river runs past the old mill and on to the sea.",
    "Nobody had seen the cat since the early morning.",
    "Bread is best on the day it leaves the oven.",
    "A light wind moved the leaves of the tall trees.",
    "The train was late, as it was on most evenings.",
    "She read the letter twice and put it back.",
    "In autumn the hills turn red, and then brown.",
    "The shop on the corner sells paper and string.",
    "Children were playing at the edge of the field.",
    "It takes an hour to walk around the lake.",
    "The clock in the hall has stopped again.",
    "Most of the boats were still in the harbour.",
    "He knew the road well and did not need a map.",
    "There was snow on the roofs for the first time.",
    "The soup was hot, and there was enough for all.",
    "Far away a dog barked, and then it was quiet.",
};

std::string needle_text(const std::string& key) {
  return fmt::format("The pass key is {0}. Remember it. {0} is the pass key. ", key);
}

// Random numbers of one question.
class Draw {
 public:
  Draw(uint64_t seed, uint64_t question) : seed_(seed), stream_(question) {}
  size_t below(size_t count) {
    return static_cast<size_t>(uint64_t{random_bits(seed_, stream_, counter_++).word[0]} * count >> 32);
  }

 private:
  uint64_t seed_, stream_, counter_ = 0;
};

constexpr size_t kNear = 160;  // about a sentence or two

bool starts_character(std::string_view text, size_t place) {
  return place >= text.size() || (static_cast<unsigned char>(text[place]) & 0xC0) != 0x80;
}

// The beginning of a line, not longer than `most`: up to a space near its end, or a whole character.
std::string_view beginning_of(std::string_view line, size_t most) {
  const size_t space = line.rfind(' ', most);
  if (space != line.npos && space + kNear > most) return line.substr(0, space);
  while (!starts_character(line, most)) --most;
  return line.substr(0, most);
}

// Whole lines of between most - kNear and `most` bytes; part of the next line where it is longer.
template <class Line>
std::string hay_of(std::span<const Line> lines, size_t bytes, Draw& draw) {
  std::string hay;
  while (true) {
    const size_t first = draw.below(lines.size());  // and on from there: a text of one's own keeps its order
    for (size_t i = 0; i < lines.size(); ++i) {
      const std::string_view line = lines[(first + i) % lines.size()];
      const size_t space = bytes - hay.size();
      const bool fits = line.size() + 1 <= space;
      if (!fits && space < kNear) return hay;
      hay += fits ? line : beginning_of(line, space - 1);
      hay += ' ';
    }
  }
}

// The place nearest to this one where a needle can go: between two sentences, or if there are none near, two words.
size_t place_for_needle(const std::string& text, size_t place) {
  const auto between_words = [&](size_t i) { return i == 0 || i == text.size() || text[i - 1] == ' '; };
  const auto between_sentences = [&](size_t i) {
    const bool ended = i >= 2 && std::string_view(".!?").find(text[i - 2]) != std::string_view::npos;
    return between_words(i) && (i == 0 || i == text.size() || ended);
  };
  const auto nearest = [&](size_t farthest, auto&& good) {
    for (size_t away = 0; away <= farthest; ++away) {
      if (place >= away && good(place - away)) return place - away;
      if (place + away <= text.size() && good(place + away)) return place + away;
    }
    return text.npos;
  };
  const size_t found = nearest(kNear, between_sentences);
  return found != text.npos ? found : nearest(text.size(), between_words);
}

Needle make_needle(const NeedleGridOptions& options, int64_t length, double depth, uint64_t question) {
  Draw draw(options.seed, question);
  std::string key(1, static_cast<char>('1' + draw.below(9)));
  while (static_cast<int64_t>(key.size()) < options.digits) key += static_cast<char>('0' + draw.below(10));
  const std::string needle = needle_text(key);
  const size_t around = kTask.size() + needle.size() + kQuestion.size();
  require(static_cast<size_t>(length) > around,
          "niah: a length of {} characters is too short; task and question alone have {}", length, around);
  const size_t wanted = static_cast<size_t>(length) - around;
  std::string hay = options.hay.empty() ? hay_of<std::string_view>(kOwnHay, wanted, draw)
                                        : hay_of<std::string>(options.hay, wanted, draw);
  const auto place = static_cast<size_t>(std::llround(depth / 100 * static_cast<double>(hay.size())));
  hay.insert(place_for_needle(hay, place), needle);
  return {std::string(kTask) + hay + std::string(kQuestion), key, length, depth};
}

template <class Number>
Number number_of(const std::string& text, const std::string& field, const std::string& path, int64_t row) {
  const auto value = parse_number<Number>(text);
  require(value.has_value(), "\"{}\", record {}: {} is \"{}\", expected a number", path, row + 1, field, text);
  return *value;
}

// The numbers of the rows to ask, in order, found in a first pass over the file.
std::vector<int64_t> chosen_rows(const std::string& path, const NeedleRows& rows) {
  std::vector<int64_t> lengths;
  const auto see = [&](int64_t row, const std::vector<std::string>& texts) {
    lengths.push_back(number_of<int64_t>(texts[0], "context_length", path, row));
  };
  const int64_t count = for_each_record(path, {"context_length"}, {.visit = see});
  std::vector<int64_t> order = rows.indices;
  if (order.empty() && rows.shuffle) order = numpy_shuffle(*rows.shuffle, count);
  if (order.empty())
    for (int64_t row = 0; row < count; ++row) order.push_back(row);
  std::vector<bool> seen(static_cast<size_t>(count));
  std::vector<int64_t> chosen;
  for (const int64_t row : order) {
    require(row >= 0 && row < count,
            "niah: row {} does not exist: \"{}\" has {}, counted from 0; use the row numbers "
            "of this file",
            row, path, count);
    require(!seen[static_cast<size_t>(row)], "niah: row {} is listed twice; list it once", row);
    seen[static_cast<size_t>(row)] = true;
    if (rows.below > 0 && lengths[static_cast<size_t>(row)] >= rows.below) continue;
    chosen.push_back(row);
    if (rows.questions > 0 && static_cast<int64_t>(chosen.size()) == rows.questions) break;
  }
  require(!chosen.empty() || count == 0, "niah: none of the {} questions of \"{}\" is selected; increase --below",
          order.size(), path);
  return chosen;
}

std::string without_space(std::string_view text) {
  std::string kept;
  std::copy_if(text.begin(), text.end(), std::back_inserter(kept),
               [](unsigned char c) { return std::isspace(c) == 0; });
  return kept;
}

template <class Value>
std::vector<Value> ascending(std::vector<Value> values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return values;
}

}  // namespace

std::vector<Needle> make_needles(const NeedleGridOptions& options) {
  require(!options.lengths.empty() && !options.depths.empty(),
          "niah: no lengths or no depths; give --lengths and --depths");
  require(options.questions >= 1 && options.digits >= 1, "niah: {} questions, {} digits; expected 1 or more",
          options.questions, options.digits);
  for (const double depth : options.depths)
    require(depth >= 0 && depth <= 100, "niah: a depth of {} percent, expected 0 to 100", depth);
  std::vector<Needle> needles;
  for (const int64_t length : options.lengths)
    for (const double depth : options.depths)
      for (int64_t i = 0; i < options.questions; ++i)
        needles.push_back(make_needle(options, length, depth, needles.size()));
  return needles;
}

NeedleRows paper_needle_rows() {
  NeedleRows rows;
  rows.shuffle = 420;
  rows.below = 32768;
  rows.questions = 1000;
  return rows;
}

std::vector<Needle> read_needles(const std::string& path, const NeedleRows& rows) {
  require(rows.indices.empty() || !rows.shuffle, "niah: row numbers and shuffling exclude each other; choose one");
  std::vector<Needle> needles;
  std::unordered_map<int64_t, size_t> places;  // of the rows that were chosen
  const bool all = rows.indices.empty() && !rows.shuffle && rows.below <= 0 && rows.questions <= 0;
  if (!all)
    for (const int64_t row : chosen_rows(path, rows)) places.emplace(row, places.size());
  needles.resize(places.size());
  int64_t bytes = 0;
  RecordVisitor visitor;
  if (!all) visitor.wanted = [&](int64_t row) { return places.contains(row); };
  visitor.visit = [&](int64_t row, std::vector<std::string>& texts) {
    for (const size_t field : {0, 1})
      require(!without_space(texts[field]).empty(), "\"{}\", record {}: its {} is empty", path, row + 1,
              field == 0 ? "prompt" : "answer");
    bytes += static_cast<int64_t>(texts[0].size());
    require(bytes <= rows.most_bytes,
            "niah: the questions of \"{}\" need more than {} bytes of memory; use fewer (--questions, --below)", path,
            rows.most_bytes);
    Needle needle{std::move(texts[0]), std::move(texts[1]), number_of<int64_t>(texts[2], "context_length", path, row),
                  number_of<double>(texts[3], "depth_percent", path, row), row};
    if (all)
      needles.push_back(std::move(needle));
    else
      needles[places.at(row)] = std::move(needle);
  };
  for_each_record(path, {"prompt", "answer", "context_length", "depth_percent"}, visitor);
  require(!needles.empty(), "niah: \"{}\" has no questions", path);
  for (const Needle& needle : needles) require(needle.row >= 0, "\"{}\" changed while it was read; try again", path);
  return needles;
}

std::vector<int64_t> read_row_numbers(const std::string& path) {
  const std::string text = read_text(path);
  std::vector<int64_t> rows;
  size_t line = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string word = without_space(std::string_view(text).substr(begin, end - begin));
    begin = end + 1;
    ++line;
    if (word.empty()) continue;
    const auto row = parse_number<int64_t>(word);
    require(row.has_value() && *row >= 0,
            "\"{}\", line {}: \"{}\" is not a row number; expected one per line, counted from 0", path, line,
            word.substr(0, 40));
    rows.push_back(*row);
  }
  require(!rows.empty(), "\"{}\" has no row numbers", path);
  return rows;
}

std::string row_numbers(const std::vector<Needle>& needles) {
  std::string text;
  for (const Needle& needle : needles) text += fmt::format("{}\n", needle.row);
  return text;
}

void check_expressible(const std::vector<Needle>& needles, const Tokenizer& tokenizer) {
  for (size_t i = 0; i < needles.size(); ++i)
    for (const std::string* text : {&needles[i].answer, &needles[i].prompt}) {
      if (without_space(tokenizer.decode(tokenizer.encode(*text))) == without_space(*text)) continue;
      fail(
          "niah: the model's tokenizer cannot express the {} of question {} (\"{}\"): it loses characters, so no "
          "answer "
          "could be right; this model needs other questions (--data)",
          text == &needles[i].answer ? "answer" : "prompt", i + 1, text->substr(0, 40));
    }
}

bool answers(std::string_view text, std::string_view answer, AnswerRule rule) {
  if (rule == AnswerRule::paper) {
    const std::string_view word = text.substr(0, text.find(' '));
    std::string digits;
    std::copy_if(word.begin(), word.end(), std::back_inserter(digits), [](char c) { return c >= '0' && c <= '9'; });
    return digits == answer;
  }
  const auto trim = [](std::string_view& x) { x.remove_prefix(std::min(x.find_first_not_of(" \t\n\r"), x.size())); };
  trim(text);
  trim(answer);
  while (!answer.empty() && std::isspace(static_cast<unsigned char>(answer.back())) != 0) answer.remove_suffix(1);
  if (answer.empty() || !text.starts_with(answer)) return false;
  return text.size() == answer.size() || std::isalnum(static_cast<unsigned char>(text[answer.size()])) == 0;
}

std::string last_tokens_text(const Tokenizer& tokenizer, const std::string& prompt, const Text& written,
                             int64_t count) {
  const int64_t missing = count - (written.tokens - (written.ending == Ending::eos ? 1 : 0));
  if (missing <= 0) return written.text.substr(written.text.starts_with(' ') ? 1 : 0);
  const std::vector<int32_t> ids = tokenizer.encode(prompt);
  const size_t tail = std::min(static_cast<size_t>(missing), ids.size());
  return tokenizer.decode(std::span(ids).last(tail)) + written.text;
}

NeedleAnswer answer_of(const Model& model, const Needle& needle, AnswerRule rule) {
  constexpr int64_t kPaperTokens = 10;
  const Tokenizer& tokenizer = *model.parts().tokenizer;
  Session session(model);
  session.read(needle.prompt);
  NeedleAnswer answer;
  answer.prompt_tokens = session.tokens();
  WriteOptions options;
  options.sampling.temperature = 0;
  if (rule == AnswerRule::whole) {
    // The answer, perhaps white space before it, and what shows that it has ended.
    options.tokens = static_cast<int64_t>(tokenizer.encode_continuation(needle.answer).size()) + 2;
    answer.text = session.write(options).front().text;
    return answer;
  }
  options.tokens = kPaperTokens;
  const Text written = session.write(options).front();
  answer.text = last_tokens_text(tokenizer, needle.prompt, written, kPaperTokens);
  return answer;
}

NeedleGrid::NeedleGrid(std::vector<int64_t> its_lengths, std::vector<double> its_depths)
    : lengths(ascending(std::move(its_lengths))),
      depths(ascending(std::move(its_depths))),
      cells(lengths.size() * depths.size()),
      prompt_tokens(lengths.size()) {}

size_t NeedleGrid::column_of(int64_t length) const {
  return static_cast<size_t>(std::find(lengths.begin(), lengths.end(), length) - lengths.begin());
}

Accuracy& NeedleGrid::at(double depth, int64_t length) {
  const auto row = std::find(depths.begin(), depths.end(), depth) - depths.begin();
  return cells.at(static_cast<size_t>(row) * lengths.size() + column_of(length));
}

Accuracy NeedleGrid::at_length(size_t column) const {
  Accuracy sum;
  for (size_t cell = column; cell < cells.size(); cell += lengths.size()) sum += cells[cell];
  return sum;
}

double NeedleGrid::mean_tokens(size_t column) const {
  const int64_t asked = at_length(column).asked;
  return asked == 0 ? 0 : static_cast<double>(prompt_tokens[column]) / static_cast<double>(asked);
}

Accuracy NeedleGrid::total() const {
  Accuracy sum;
  for (const Accuracy& cell : cells) sum += cell;
  return sum;
}

const std::vector<int64_t> kPaperNeedleLengths{1024, 2048, 4096, 8192, 16384};
const std::vector<int64_t> kPaperNeedleTokens{355, 631, 1182, 2286, 4497};
const std::vector<PaperNeedles> kPaperNeedles{
    {"Mamba-2", {0.94, 0.45, 0.15, 0.027, 0.025}}, {"Softmax", {1, 1, 1, 0.94, 0.38}}, {"2Mamba", {1, 1, 1, 1, 0.95}}};

NeedleGrid ask_needles(const std::vector<Needle>& needles, const Answerer& answerer, const NeedleProgress& progress,
                       AnswerRule rule) {
  std::vector<int64_t> lengths;
  std::vector<double> depths;
  for (const Needle& needle : needles) {
    lengths.push_back(needle.length);
    depths.push_back(needle.depth);
  }
  NeedleGrid grid(std::move(lengths), std::move(depths));
  for (size_t i = 0; i < needles.size(); ++i) {
    const Needle& needle = needles[i];
    const NeedleAnswer answer = answerer(needle);
    grid.at(needle.depth, needle.length) += {answers(answer.text, needle.answer, rule) ? 1 : 0, 1};
    grid.prompt_tokens[grid.column_of(needle.length)] += answer.prompt_tokens;
    if (progress && !progress(static_cast<int64_t>(i) + 1, grid)) break;
  }
  return grid;
}

NeedleGrid ask_small_model(const LanguageModel& model, const std::vector<int64_t>& lengths,
                           const std::vector<double>& depths, int64_t questions, uint64_t seed) {
  NeedleGrid grid(lengths, depths);
  for (const int64_t length : grid.lengths)
    for (const double depth : grid.depths)
      grid.at(depth, length) = accuracy(
          model, NeedleTask({questions, length, static_cast<int32_t>(model.config().vocabulary), depth / 100, seed}),
          1);
  return grid;
}

}  // namespace furious
