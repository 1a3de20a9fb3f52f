// The boundary to programs that use the library: only furious::Error crosses it, with words for the user.
#pragma once

#include <exception>
#include <string>

namespace furious {

// The message of an Error, and of what the language and its library throw: no memory, files that cannot be looked at.
std::string words_of(const std::exception_ptr& exception);

// In a handler: throws what was caught again, as an Error where it is none. What a callback of the caller throws stays
// what it is, if it is a class of its own or a plain std::runtime_error.
//   Model Model::load(…) try {
//     …
//   } catch (...) {
//     rethrow_as_error();
//   }
[[noreturn]] void rethrow_as_error();

}  // namespace furious
