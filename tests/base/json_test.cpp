#include "base/json.h"

#include <cmath>

#include "base/number.h"
#include "data/corpus.h"

namespace furious {
namespace {

using testing::expect_error;
using testing::TemporaryFolder;

std::string nested(int depth, const std::string& inside = "") {
  return std::string(depth, '[') + inside + std::string(depth, ']');
}

TEST(Json, ErrorsNameFileAndPlace) {
  const TemporaryFolder folder;
  expect_error([&] { read_json(folder.path("none.json")); }, {"none.json", "no such file"});
  const std::string path = folder.write("bad.json", "{\"a\": 1,\n  \"b\": }");
  expect_error([&] { read_json(path); }, {"bad.json", "not JSON", "line 2, column 8"});
  expect_error([] { parse_json("", "x.json"); }, {"x.json", "line 1, column 1"});
  expect_error([] { parse_json("{} {}", "x.json"); }, {"x.json", "column 4"});
  expect_error([] { parse_json("\"\xFF\"", "x.json"); }, {"x.json"});
  expect_error([] { parse_json(std::string_view("{}\0x", 4), "x.json"); }, {"x.json", "zero byte"});
  expect_error([] { parse_json("1e999", "x.json"); }, {"x.json"});
}

TEST(Json, LimitsOfBytesAndDepth) {
  EXPECT_EQ(parse_json(nested(64), "x").size(), 1u);
  expect_error([] { parse_json(nested(65), "x.json"); }, {"x.json", "more than 64 levels deep", "byte 64"});
  expect_error([] { parse_json(std::string(5'000'000, '['), "x.json"); }, {"x.json", "deep"});
  EXPECT_EQ(parse_json("[\"[[[[\\\"[[[[\"]", "x", {.depth = 1}).size(), 1u);  // brackets in a string do not count
  const TemporaryFolder folder;
  expect_error([&] { read_json(folder.write("large.json", "[1, 2]"), {.bytes = 5}); }, {"large.json", "5"});
  expect_error([&] { parse_json("[1, 2]", "large.json", {.bytes = 5}); }, {"large.json", "5"});
}

TEST(Json, PythonsWordsAreNullWhereAllowed) {
  const std::string text = R"({"a": Infinity, "b": [-Infinity, NaN], "c": "NaN \" Infinity", "NaN": 1})";
  const nlohmann::json json = parse_json(text, "x", {.python_words = true});
  EXPECT_TRUE(json["a"].is_null());
  EXPECT_TRUE(json["b"][0].is_null());
  EXPECT_TRUE(json["b"][1].is_null());
  EXPECT_EQ(json["c"], "NaN \" Infinity");
  EXPECT_EQ(json["NaN"], 1);
  expect_error([&] { parse_json(text, "x"); }, {"x", "not JSON"});
}

TEST(JsonValue, NamesTheKey) {
  const nlohmann::json json = parse_json(
      R"({"a": {"b": [1, {"c": "text"}]}, "big": 18446744073709551615, "half": 0.5, "none": null, "n": [1, null, 2.5]})",
      "x.json");
  const JsonValue value(json, "x.json");
  EXPECT_EQ(value.at("a").at("b").items()[1].at("c").text(), "text");
  EXPECT_EQ(value.at("a").at("b").items()[0].integer(1, 1), 1);
  EXPECT_EQ(value.at("big").whole(), ~uint64_t{0});
  EXPECT_TRUE(std::isnan(value.at("none").number_or_nan()));
  EXPECT_EQ(value.at("n").numbers()[2], 2.5);
  EXPECT_FALSE(value.has("none"));
  EXPECT_FALSE(value.has("other"));
  expect_error([&] { value.at("a").at("b").items()[1].at("c").integer(0, 9); },
               {"x.json", "\"a.b[1].c\" is \"text\"", "integer from 0 to 9"});
  expect_error([&] { value.at("a").at("b").items()[0].integer(2, 3); }, {"\"a.b[0]\" is 1", "from 2 to 3"});
  expect_error([&] { value.at("big").integer(-1, INT64_MAX); }, {"\"big\" is 18446744073709551615"});
  expect_error([&] { value.at("half").integer(0, 1); }, {"\"half\" is 0.5"});
  expect_error([&] { value.at("half").whole(); }, {"\"half\""});
  expect_error([&] { value.at("a").at("d"); }, {"x.json", "\"a.d\" is missing"});
  expect_error([&] { value.at("a").text(); }, {"\"a\" is an object, expected a string"});
  expect_error([&] { value.at("half").at("x"); }, {"\"half\" is 0.5, expected an object"});
  expect_error([&] { value.at("half").items(); }, {"expected a list"});
  expect_error([&] { value.at("half").flag(); }, {"expected true or false"});
  expect_error([&] { value.at("a").number(); }, {"expected a number"});
  expect_error([&] { value.at("a").numbers(); }, {"\"a\"", "list of numbers"});
  expect_error([&] { value.at("a").at("b").numbers(); }, {"\"a.b\"", "list of numbers"});
  expect_error([&] { value.at("a").texts(); }, {"\"a.b\" is a list, expected a string"});
  const nlohmann::json list = nlohmann::json::array();
  expect_error([&] { JsonValue(list, "y.json").at("a"); }, {"y.json: the file is a list, expected an object"});
}

TEST(ParseNumber, AllOrNothing) {
  EXPECT_EQ(parse_number<int64_t>("-12"), -12);
  EXPECT_EQ(parse_number<int>("fF", 16), 255);
  EXPECT_EQ(parse_number<double>("1.5e3"), 1500.0);
  for (const char* text : {"", " 1", "1 ", "+1", "1x", "x", "1.5", "99999999999999999999"})
    EXPECT_FALSE(parse_number<int64_t>(text)) << text;
  for (const char* text : {"", "1,5", "e", "1e999"}) EXPECT_FALSE(parse_number<double>(text)) << text;
}

}  // namespace
}  // namespace furious
