// The chat templates of checkpoints are programs in Jinja. The well-known ones are recognized by their text; none is
// run.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace furious::serve {

struct KnownTemplate {
  std::string name;            // of ChatTemplate::names()
  std::string default_system;  // the system message of a conversation without one
  bool bos = false;            // it begins with bos
};

// What a template consists of, independently of how it is written: white space that does not show, quotes, message.role
// for message['role'], strip() for trim, outputs in several parts and the texts of errors are one form.
std::string normal_form(std::string_view source);

std::optional<KnownTemplate> recognized(std::string_view source);

// The name of the template that this one resembles, for advice; empty: none.
std::string similar_template(std::string_view source);

}  // namespace furious::serve
