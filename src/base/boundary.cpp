#include "base/boundary.h"

#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <system_error>

#include "base/error.h"
#include "base/json.h"

namespace furious {
namespace {

std::string words_of(const std::filesystem::filesystem_error& error) {
  std::string paths = error.path1().string();
  if (!error.path2().empty()) paths += " to " + error.path2().string();
  if (paths.empty()) paths = "a file";
  return fmt::format("{}: {}; check the path and its permissions", paths, error.code().message());
}

}  // namespace

void rethrow_as_error() {
  try {
    throw;
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {  // allocations of tensors throw an Error that names their size
    fail("not enough memory; use a smaller model, batch or length, or end other programs");
  } catch (const std::filesystem::filesystem_error& error) {
    fail("{}", words_of(error));
  } catch (const std::system_error& error) {
    fail("{}: refused by the system; check its limits (ulimit -a)", error.what());
  } catch (const nlohmann::json::exception& error) {
    fail("internal error: unexpected JSON value: {}; please report this message", json_reason(error.what()));
  } catch (const std::length_error& error) {
    fail("an allocation is too large ({}); use smaller sizes", error.what());
  } catch (const std::logic_error& error) {
    fail("internal error: {}; please report this message", error.what());
  }
}

std::string words_of(const std::exception_ptr& exception) {
  try {
    try {
      std::rethrow_exception(exception);
    } catch (...) {
      rethrow_as_error();
    }
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an unknown exception";
  }
}

}  // namespace furious
