// The boundary of the library: only furious::Error crosses it, with a message for the user.
#pragma once

#include <exception>
#include <string>

namespace furious {

// The message of an Error, or of a standard exception (bad_alloc, filesystem_error, ...) put into words for the user.
std::string words_of(const std::exception_ptr& exception);

// In a catch block: rethrows the current exception, converted to an Error if it is a standard exception. Exceptions of
// a caller's callback pass unchanged if they are a class of its own or a plain std::runtime_error.
//   Model Model::load(…) try {
//     …
//   } catch (...) {
//     rethrow_as_error();
//   }
[[noreturn]] void rethrow_as_error();

}  // namespace furious
