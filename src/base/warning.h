// Warnings: what works, but not as well as it could.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace furious {

// Prints "warning: MESSAGE" to stderr when this process gives the key for the first time. Never fails for want of a
// stderr.
void warn_once(std::string_view key, std::string_view message);

// Receives the messages instead of stderr, from any thread; an empty function: stderr again.
void set_warning_output(std::function<void(const std::string&)> write);

// All keys are new again: for tests.
void reset_warnings();

}  // namespace furious
