#include "serve/template_source.h"

#include <array>
#include <cctype>
#include <vector>

#include "base/hash.h"

namespace furious::serve {
namespace {

bool is_blank(char c) {
  return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

// A part of a template: text that is shown, an expression that is shown, or a statement.
struct Part {
  enum class Kind { text, output, statement, comment };
  Kind kind = Kind::text;
  std::string inner;                                 // without the brackets and the dashes in them
  bool strips_before = false, strips_after = false;  // {%- and -%}
};

// Unfinished brackets are text, which no known template has.
std::vector<Part> parts_of(std::string_view source) {
  std::vector<Part> parts;
  while (!source.empty()) {
    size_t open = 0;
    for (; open + 1 < source.size(); ++open)
      if (source[open] == '{' && (source[open + 1] == '{' || source[open + 1] == '%' || source[open + 1] == '#')) break;
    if (open + 1 >= source.size()) open = source.size();
    if (open > 0) parts.push_back({Part::Kind::text, std::string(source.substr(0, open))});
    source.remove_prefix(open);
    if (source.empty()) break;
    const char mark = source[1];
    const std::string closing = {mark == '{' ? '}' : mark, '}'};
    const size_t close = source.find(closing, 2);
    if (close == std::string_view::npos) {
      parts.push_back({Part::Kind::text, std::string(source)});
      break;
    }
    Part part;
    part.kind = mark == '{' ? Part::Kind::output : mark == '%' ? Part::Kind::statement : Part::Kind::comment;
    std::string_view inner = source.substr(2, close - 2);
    part.strips_before = inner.starts_with('-');
    if (part.strips_before) inner.remove_prefix(1);
    part.strips_after = inner.ends_with('-');
    if (part.strips_after) inner.remove_suffix(1);
    part.inner = inner;
    parts.push_back(std::move(part));
    source.remove_prefix(close + 2);
  }
  return parts;
}

// The text that is shown between two parts, with the settings trim_blocks and lstrip_blocks of transformers: a line
// break after a statement and blanks before one do not show.
std::string shown_text(const std::vector<Part>& parts, size_t i) {
  std::string text = parts[i].inner;
  const auto is_block = [](const Part& part) {
    return part.kind == Part::Kind::statement || part.kind == Part::Kind::comment;
  };
  if (i > 0 && parts[i - 1].strips_after)
    while (!text.empty() && is_blank(text.front())) text.erase(0, 1);
  else if (i > 0 && is_block(parts[i - 1]) && text.starts_with('\n'))
    text.erase(0, 1);
  if (i + 1 >= parts.size()) return text;
  if (parts[i + 1].strips_before) {
    while (!text.empty() && is_blank(text.back())) text.pop_back();
  } else if (is_block(parts[i + 1])) {
    const size_t last = text.find_last_not_of(" \t");
    const bool line_start = last == std::string::npos ? i == 0 || is_block(parts[i - 1]) : text[last] == '\n';
    if (line_start) text.resize(last == std::string::npos ? 0 : last + 1);
  }
  return text;
}

// A literal with its quotes, always single ones, and line breaks as \n.
std::string literal(std::string_view content) {
  std::string out = "'";
  for (const char c : content) {
    if (c == '\n')
      out += "\\n";
    else if (c == '\'')
      out += "\\'";
    else
      out += c;
  }
  return out + "'";
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
}

// Literals rewritten, and everything else without white space.
std::string normal_expression(std::string_view source) {
  std::string out, code;
  const auto end_code = [&] {
    replace_all(code, "message.role", "message['role']");
    replace_all(code, "message.content", "message['content']");
    replace_all(code, ".strip()", "|trim");
    out += code;
    code.clear();
  };
  // Words of statements stay apart.
  const auto is_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; };
  for (size_t i = 0; i < source.size();) {
    const char c = source[i];
    if (c == '\'' || c == '"') {
      end_code();
      size_t end = i + 1;
      std::string content;
      for (; end < source.size() && source[end] != c; ++end) {
        if (source[end] == '\\' && end + 1 < source.size() && (source[end + 1] == '\'' || source[end + 1] == '"'))
          ++end;
        content += source[end];
      }
      out += literal(content);
      i = end + 1;
    } else if (is_blank(c)) {
      size_t end = i;
      while (end < source.size() && is_blank(source[end])) ++end;
      if (!code.empty() && is_word(code.back()) && end < source.size() && is_word(source[end])) code += ' ';
      i = end;
    } else {
      code += c;
      ++i;
    }
  }
  end_code();
  return out;
}

// raise_exception('…') without the words.
void drop_error_texts(std::string& text) {
  const std::string_view call = "raise_exception('";
  for (size_t at = 0; (at = text.find(call, at)) != std::string::npos; ++at) {
    const size_t end = text.find("')", at);
    if (end == std::string::npos) return;
    text.replace(at, end + 2 - at, "raise_exception()");
  }
}

constexpr std::string_view kSystemOpen = "'<|im_start|>system\\n", kSystemClose = "<|im_end|>\\n'";

struct Known {
  std::string_view name;
  uint64_t hash;  // of the normal form
};

// A template that shows its own system message has it replaced by nothing here.
constexpr auto kKnown = std::to_array<Known>({
    {"chatml", 0xfcf211bbcdf036a1},
    {"chatml", 0xf80ed6bda98c86b0},  // with a default system message
    {"llama3", 0x9fc5528b8ef03432},
    {"llama3", 0xa2655cccd9f6222a},  // always ready to answer
    {"llama2", 0x44a8a7093edeca7a},
    {"llama2", 0xff87bfb8ff8046cc},  // with system messages between others
    {"mistral", 0x188ab3de16b2ffc0},
    {"zephyr", 0x5ca0f12f1b8b2b61},  // also TinyLlama's
});

}  // namespace

std::string normal_form(std::string_view source) {
  const std::vector<Part> parts = parts_of(source);
  std::string out;
  const auto show = [&](const std::string& expression) {
    if (out.ends_with("}}")) {
      out.resize(out.size() - 2);
      out += "+" + expression + "}}";
    } else {
      out += "{{" + expression + "}}";
    }
  };
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].kind == Part::Kind::text) {
      const std::string text = shown_text(parts, i);
      if (!text.empty() && !(i + 1 == parts.size() && text == "\n")) show(literal(text));  // Jinja drops the last one
    } else if (parts[i].kind == Part::Kind::output) {
      show(normal_expression(parts[i].inner));
    } else if (parts[i].kind == Part::Kind::statement) {
      out += "{%" + normal_expression(parts[i].inner) + "%}";
    }
  }
  drop_error_texts(out);
  for (size_t at = 0; (at = out.find("'+'", at)) != std::string::npos;) {  // 'a'+'b' is 'ab'
    out.erase(at, 3);
  }
  replace_all(out, "{%if not add_generation_prompt is defined%}{%set add_generation_prompt=false%}{%endif%}", "");
  return out;
}

std::optional<KnownTemplate> recognized(std::string_view source) {
  std::string form = normal_form(source);
  KnownTemplate found;
  const std::string_view bos = "{{bos_token}}";
  const auto recognize = [&] {
    for (const Known& known : kKnown)
      if (known.hash == hash_of(form)) return found.name = known.name, true;
    return false;
  };
  if (recognize()) return found;
  const size_t open = form.find(kSystemOpen);
  const size_t close = open == std::string::npos ? open : form.find(kSystemClose, open);
  if (close != std::string::npos) {
    const size_t begin = open + kSystemOpen.size();
    found.default_system = form.substr(begin, close - begin);
    if (found.default_system.find('\'') != std::string::npos) return std::nullopt;  // not a single literal
    replace_all(found.default_system, "\\n", "\n");
    form.erase(begin, close - begin);
    if (recognize()) return found;
  }
  if (!form.starts_with(bos)) return std::nullopt;
  form.erase(0, bos.size());
  found.bos = true;
  return recognize() ? std::optional(found) : std::nullopt;
}

std::string similar_template(std::string_view source) {
  const auto has = [&](std::string_view text) { return source.find(text) != std::string_view::npos; };
  if (has("<|im_start|>")) return "chatml";
  if (has("<|start_header_id|>")) return "llama3";
  if (has("<<SYS>>")) return "llama2";
  if (has("[INST]")) return "mistral";
  if (has("<|user|>") && has("eos_token")) return "zephyr";
  return {};
}

}  // namespace furious::serve
