#include "base/boundary.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <vector>

#include "support.h"

namespace furious {
namespace {

using testing::expect_error;

template <class Throw>
void at_the_boundary(Throw&& body) try {
  body();
} catch (...) {
  rethrow_as_error();
}

TEST(Boundary, ConvertsStandardExceptionsToErrors) {
  expect_error([] { at_the_boundary([] { throw Error("as it was"); }); }, {"as it was"});
  expect_error([] { at_the_boundary([] { throw std::bad_alloc(); }); }, {"not enough memory"});
  expect_error([] { at_the_boundary([] { std::vector<char>().reserve(~size_t{0}); }); }, {"too large"});
  expect_error([] { at_the_boundary([] { static_cast<void>(std::filesystem::file_size("/no/such/file")); }); },
               {"/no/such/file: No such file"});
  expect_error([] { at_the_boundary([] { std::filesystem::rename("/no/a", "/no/b"); }); }, {"/no/a to /no/b"});
  expect_error([] { at_the_boundary([] { throw std::system_error(EAGAIN, std::generic_category(), "thread"); }); },
               {"thread", "ulimit"});
  expect_error([] { at_the_boundary([] { nlohmann::json::parse("{").at("x"); }); }, {"JSON"});
  expect_error([] { at_the_boundary([] { nlohmann::json(1).get<std::string>(); }); }, {"JSON", "type"});
  expect_error([] { at_the_boundary([] { std::stod("x"); }); }, {"internal error", "report"});
  struct Own {};
  EXPECT_THROW(at_the_boundary([] { throw Own(); }), Own);  // of a callback
  EXPECT_THROW(at_the_boundary([] { throw std::runtime_error("own"); }), std::runtime_error);
}

TEST(Boundary, MessageOfAnyException) {
  const auto words = [](auto exception) { return words_of(std::make_exception_ptr(exception)); };
  EXPECT_EQ(words(Error("an error")), "an error");
  EXPECT_EQ(words(std::runtime_error("another")), "another");
  EXPECT_NE(words(std::bad_alloc()).find("not enough memory"), std::string::npos);
  EXPECT_EQ(words(3), "an unknown exception");
}

}  // namespace
}  // namespace furious
