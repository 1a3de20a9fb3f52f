#include "eval/needle.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <span>

#include "base/error.h"
#include "base/random.h"
#include "data/records.h"
#include "data/synthetic.h"
#include "infer/model_parts.h"

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

// Whole lines, at most so many bytes and less than kNear fewer: where the next line is longer, part of it.
template <class Line>
std::string hay_of(std::span<const Line> lines, size_t bytes, Draw& draw) {
  std::string hay;
  while (true) {
    const size_t first = draw.below(lines.size());  // and on from there: a text of one's own keeps its order
    for (size_t i = 0; i < lines.size(); ++i) {
      const std::string_view line = lines[(first + i) % lines.size()];
      const size_t room = bytes - hay.size();
      const bool fits = line.size() + 1 <= room;
      if (!fits && room < kNear) return hay;
      hay += fits ? line : beginning_of(line, room - 1);
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
  require(static_cast<size_t>(length) > around, "niah: a length of {} characters, but task and question alone take {}",
          length, around);
  const size_t wanted = static_cast<size_t>(length) - around;
  std::string hay = options.hay.empty() ? hay_of<std::string_view>(kOwnHay, wanted, draw)
                                        : hay_of<std::string>(options.hay, wanted, draw);
  const auto place = static_cast<size_t>(std::llround(depth / 100 * static_cast<double>(hay.size())));
  hay.insert(place_for_needle(hay, place), needle);
  return {std::string(kTask) + hay + std::string(kQuestion), key, length, depth};
}

template <class Number>
Number number_of(const std::string& text, const std::string& field, const std::string& path, size_t record) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  require(error == std::errc() && end == text.data() + text.size(),
          "\"{}\", record {}: {} is \"{}\", expected a number", path, record + 1, field, text);
  return value;
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
  require(!options.lengths.empty() && !options.depths.empty(), "niah: there are no lengths, or no depths, to ask for");
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

std::vector<Needle> read_needles(const std::string& path) {
  const auto records = read_records(path, {"prompt", "answer", "context_length", "depth_percent"});
  require(!records.empty(), "niah: \"{}\" holds no questions", path);
  std::vector<Needle> needles;
  for (size_t i = 0; i < records.size(); ++i) {
    const auto& fields = records[i];
    needles.push_back({fields[0], fields[1], number_of<int64_t>(fields[2], "context_length", path, i),
                       number_of<double>(fields[3], "depth_percent", path, i)});
    require(!without_space(fields[0]).empty() && !without_space(fields[1]).empty(),
            "\"{}\", record {}: its {} is empty", path, i + 1, without_space(fields[0]).empty() ? "prompt" : "answer");
  }
  return needles;
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

bool answers(std::string_view text, std::string_view answer) {
  const auto trim = [](std::string_view& x) { x.remove_prefix(std::min(x.find_first_not_of(" \t\n\r"), x.size())); };
  trim(text);
  trim(answer);
  while (!answer.empty() && std::isspace(static_cast<unsigned char>(answer.back())) != 0) answer.remove_suffix(1);
  if (answer.empty() || !text.starts_with(answer)) return false;
  return text.size() == answer.size() || std::isalnum(static_cast<unsigned char>(text[answer.size()])) == 0;
}

std::string answer_of(const Model& model, const Needle& needle) {
  Session session(model);
  session.read(needle.prompt);
  WriteOptions options;
  options.sampling.temperature = 0;
  // The answer, perhaps white space before it, and what shows that it has ended.
  options.tokens = static_cast<int64_t>(model.parts().tokenizer->encode_continuation(needle.answer).size()) + 2;
  return session.write(options).front().text;
}

NeedleGrid::NeedleGrid(std::vector<int64_t> its_lengths, std::vector<double> its_depths)
    : lengths(ascending(std::move(its_lengths))),
      depths(ascending(std::move(its_depths))),
      cells(lengths.size() * depths.size()) {}

Accuracy& NeedleGrid::at(double depth, int64_t length) {
  const auto row = std::find(depths.begin(), depths.end(), depth) - depths.begin();
  const auto column = std::find(lengths.begin(), lengths.end(), length) - lengths.begin();
  return cells.at(static_cast<size_t>(row) * lengths.size() + static_cast<size_t>(column));
}

Accuracy NeedleGrid::total() const {
  Accuracy sum;
  for (const Accuracy& cell : cells) sum += cell;
  return sum;
}

NeedleGrid ask_needles(const std::vector<Needle>& needles, const Answerer& answerer, const NeedleProgress& progress) {
  std::vector<int64_t> lengths;
  std::vector<double> depths;
  for (const Needle& needle : needles) {
    lengths.push_back(needle.length);
    depths.push_back(needle.depth);
  }
  NeedleGrid grid(std::move(lengths), std::move(depths));
  for (size_t i = 0; i < needles.size(); ++i) {
    grid.at(needles[i].depth, needles[i].length) += {answers(answerer(needles[i]), needles[i].answer) ? 1 : 0, 1};
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
