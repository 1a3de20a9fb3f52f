#include "data/html.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <optional>
#include <utility>

#include "base/number.h"

namespace furious {
namespace {

// The character references of HTML 4, sorted by name.
constexpr std::pair<std::string_view, uint32_t> kEntities[] = {
    {"AElig", 198},   {"Aacute", 193},  {"Acirc", 194},    {"Agrave", 192},  {"Alpha", 913},    {"Aring", 197},
    {"Atilde", 195},  {"Auml", 196},    {"Beta", 914},     {"Ccedil", 199},  {"Chi", 935},      {"Dagger", 8225},
    {"Delta", 916},   {"ETH", 208},     {"Eacute", 201},   {"Ecirc", 202},   {"Egrave", 200},   {"Epsilon", 917},
    {"Eta", 919},     {"Euml", 203},    {"Gamma", 915},    {"Iacute", 205},  {"Icirc", 206},    {"Igrave", 204},
    {"Iota", 921},    {"Iuml", 207},    {"Kappa", 922},    {"Lambda", 923},  {"Mu", 924},       {"Ntilde", 209},
    {"Nu", 925},      {"OElig", 338},   {"Oacute", 211},   {"Ocirc", 212},   {"Ograve", 210},   {"Omega", 937},
    {"Omicron", 927}, {"Oslash", 216},  {"Otilde", 213},   {"Ouml", 214},    {"Phi", 934},      {"Pi", 928},
    {"Prime", 8243},  {"Psi", 936},     {"Rho", 929},      {"Scaron", 352},  {"Sigma", 931},    {"THORN", 222},
    {"Tau", 932},     {"Theta", 920},   {"Uacute", 218},   {"Ucirc", 219},   {"Ugrave", 217},   {"Upsilon", 933},
    {"Uuml", 220},    {"Xi", 926},      {"Yacute", 221},   {"Yuml", 376},    {"Zeta", 918},     {"aacute", 225},
    {"acirc", 226},   {"acute", 180},   {"aelig", 230},    {"agrave", 224},  {"alefsym", 8501}, {"alpha", 945},
    {"amp", 38},      {"and", 8743},    {"ang", 8736},     {"apos", 39},     {"aring", 229},    {"asymp", 8776},
    {"atilde", 227},  {"auml", 228},    {"bdquo", 8222},   {"beta", 946},    {"brvbar", 166},   {"bull", 8226},
    {"cap", 8745},    {"ccedil", 231},  {"cedil", 184},    {"cent", 162},    {"chi", 967},      {"circ", 710},
    {"clubs", 9827},  {"cong", 8773},   {"copy", 169},     {"crarr", 8629},  {"cup", 8746},     {"curren", 164},
    {"dArr", 8659},   {"dagger", 8224}, {"darr", 8595},    {"deg", 176},     {"delta", 948},    {"diams", 9830},
    {"divide", 247},  {"eacute", 233},  {"ecirc", 234},    {"egrave", 232},  {"empty", 8709},   {"emsp", 8195},
    {"ensp", 8194},   {"epsilon", 949}, {"equiv", 8801},   {"eta", 951},     {"eth", 240},      {"euml", 235},
    {"euro", 8364},   {"exist", 8707},  {"fnof", 402},     {"forall", 8704}, {"frac12", 189},   {"frac14", 188},
    {"frac34", 190},  {"frasl", 8260},  {"gamma", 947},    {"ge", 8805},     {"gt", 62},        {"hArr", 8660},
    {"harr", 8596},   {"hearts", 9829}, {"hellip", 8230},  {"iacute", 237},  {"icirc", 238},    {"iexcl", 161},
    {"igrave", 236},  {"image", 8465},  {"infin", 8734},   {"int", 8747},    {"iota", 953},     {"iquest", 191},
    {"isin", 8712},   {"iuml", 239},    {"kappa", 954},    {"lArr", 8656},   {"lambda", 955},   {"lang", 9001},
    {"laquo", 171},   {"larr", 8592},   {"lceil", 8968},   {"ldquo", 8220},  {"le", 8804},      {"lfloor", 8970},
    {"lowast", 8727}, {"loz", 9674},    {"lrm", 8206},     {"lsaquo", 8249}, {"lsquo", 8216},   {"lt", 60},
    {"macr", 175},    {"mdash", 8212},  {"micro", 181},    {"middot", 183},  {"minus", 8722},   {"mu", 956},
    {"nabla", 8711},  {"nbsp", 160},    {"ndash", 8211},   {"ne", 8800},     {"ni", 8715},      {"not", 172},
    {"notin", 8713},  {"nsub", 8836},   {"ntilde", 241},   {"nu", 957},      {"oacute", 243},   {"ocirc", 244},
    {"oelig", 339},   {"ograve", 242},  {"oline", 8254},   {"omega", 969},   {"omicron", 959},  {"oplus", 8853},
    {"or", 8744},     {"ordf", 170},    {"ordm", 186},     {"oslash", 248},  {"otilde", 245},   {"otimes", 8855},
    {"ouml", 246},    {"para", 182},    {"part", 8706},    {"permil", 8240}, {"perp", 8869},    {"phi", 966},
    {"pi", 960},      {"piv", 982},     {"plusmn", 177},   {"pound", 163},   {"prime", 8242},   {"prod", 8719},
    {"prop", 8733},   {"psi", 968},     {"quot", 34},      {"rArr", 8658},   {"radic", 8730},   {"rang", 9002},
    {"raquo", 187},   {"rarr", 8594},   {"rceil", 8969},   {"rdquo", 8221},  {"real", 8476},    {"reg", 174},
    {"rfloor", 8971}, {"rho", 961},     {"rlm", 8207},     {"rsaquo", 8250}, {"rsquo", 8217},   {"sbquo", 8218},
    {"scaron", 353},  {"sdot", 8901},   {"sect", 167},     {"shy", 173},     {"sigma", 963},    {"sigmaf", 962},
    {"sim", 8764},    {"spades", 9824}, {"sub", 8834},     {"sube", 8838},   {"sum", 8721},     {"sup", 8835},
    {"sup1", 185},    {"sup2", 178},    {"sup3", 179},     {"supe", 8839},   {"szlig", 223},    {"tau", 964},
    {"there4", 8756}, {"theta", 952},   {"thetasym", 977}, {"thinsp", 8201}, {"thorn", 254},    {"tilde", 732},
    {"times", 215},   {"trade", 8482},  {"uArr", 8657},    {"uacute", 250},  {"uarr", 8593},    {"ucirc", 251},
    {"ugrave", 249},  {"uml", 168},     {"upsih", 978},    {"upsilon", 965}, {"uuml", 252},     {"weierp", 8472},
    {"xi", 958},      {"yacute", 253},  {"yen", 165},      {"yuml", 255},    {"zeta", 950},     {"zwj", 8205},
    {"zwnj", 8204}};
constexpr size_t kLongestEntity = 8;
constexpr size_t kLongestReference = 16;  // that can be decoded: &#x followed by digits, or a name

// References to the control characters 128 to 159 mean those of Windows-1252.
constexpr std::array<uint16_t, 32> kWindows = {0x20AC, 0x81,   0x201A, 0x192,  0x201E, 0x2026, 0x2020, 0x2021,
                                               0x2C6,  0x2030, 0x160,  0x2039, 0x152,  0x8D,   0x17D,  0x8F,
                                               0x90,   0x2018, 0x2019, 0x201C, 0x201D, 0x2022, 0x2013, 0x2014,
                                               0x2DC,  0x2122, 0x161,  0x203A, 0x153,  0x9D,   0x17E,  0x178};

constexpr std::string_view kRawElements[] = {"iframe", "noembed", "noframes", "script", "style"};

// Elements that begin a line, and those that leave a blank one.
constexpr std::string_view kBlocks[] = {
    "address", "article",  "aside",      "body",   "caption", "center", "dd",    "details", "div",     "dl",
    "dt",      "fieldset", "figcaption", "figure", "footer",  "form",   "frame", "head",    "header",  "hr",
    "html",    "legend",   "li",         "main",   "menu",    "nav",    "ol",    "option",  "section", "summary",
    "table",   "tbody",    "tfoot",      "thead",  "title",   "tr",     "ul"};
constexpr std::string_view kParagraphs[] = {"blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "p", "pre"};

template <size_t N>
bool contains(const std::string_view (&names)[N], std::string_view name) {
  return std::ranges::find(names, name) != std::end(names);
}

bool is_space(char c) {
  return c == ' ' || c == '\n' || c == '\t' || c == '\r' || c == '\f';
}

bool is_letter(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) && static_cast<unsigned char>(c) < 0x80;
}

bool is_letter_or_digit(char c) {
  return is_letter(c) || (c >= '0' && c <= '9');
}

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

std::string utf8_of(uint32_t code) {
  if (code == 0 || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) code = 0xFFFD;
  const auto tail = [&](int shift) { return static_cast<char>(0x80 | (code >> shift & 0x3F)); };
  if (code < 0x80) return {static_cast<char>(code)};
  if (code < 0x800) return {static_cast<char>(0xC0 | code >> 6), tail(0)};
  if (code < 0x10000) return {static_cast<char>(0xE0 | code >> 12), tail(6), tail(0)};
  return {static_cast<char>(0xF0 | code >> 18), tail(12), tail(6), tail(0)};
}

struct Reference {
  uint32_t code = 0;
  size_t length = 0;  // with the & and, where there is one, the semicolon
};

size_t with_semicolon(std::string_view text, size_t length) {
  return length < text.size() && text[length] == ';' ? length + 1 : length;
}

std::optional<Reference> numeric_reference(std::string_view text) {
  const bool hexadecimal = text.size() > 2 && lower(text[2]) == 'x';
  const size_t begin = hexadecimal ? 3 : 2;
  const auto is_digit = [&](char c) {
    return (c >= '0' && c <= '9') || (hexadecimal && lower(c) >= 'a' && lower(c) <= 'f');
  };
  size_t end = begin;
  while (end < text.size() && is_digit(text[end])) ++end;
  if (end == begin) return std::nullopt;
  const auto number = parse_number<uint32_t>(text.substr(begin, end - begin), hexadecimal ? 16 : 10);
  uint32_t code = number.value_or(0);
  if (code >= 0x80 && code < 0xA0) code = kWindows[code - 0x80];
  return Reference{code, with_semicolon(text, end)};
}

// A name may end without a semicolon where no letter or digit follows it.
std::optional<Reference> named_reference(std::string_view text) {
  size_t end = 1;
  while (end < text.size() && end <= kLongestEntity && is_letter_or_digit(text[end])) ++end;
  const std::string_view name = text.substr(1, end - 1);
  const auto found = std::ranges::lower_bound(kEntities, name, {}, [](const auto& entity) { return entity.first; });
  if (found == std::end(kEntities) || found->first != name) return std::nullopt;
  if (end < text.size() && is_letter_or_digit(text[end])) return std::nullopt;
  return Reference{found->second, with_semicolon(text, end)};
}

// The index of `wanted`, which is in lower case.
size_t find_lower(std::string_view text, std::string_view wanted, size_t begin) {
  const auto found = std::search(text.begin() + static_cast<std::ptrdiff_t>(begin), text.end(), wanted.begin(),
                                 wanted.end(), [](char a, char b) { return lower(a) == b; });
  return found == text.end() ? text.npos : static_cast<size_t>(found - text.begin());
}

}  // namespace

void HtmlText::feed(std::string_view bytes, std::string& out) {
  waiting_ += bytes;
  read(false, out);
}

void HtmlText::finish(std::string& out) {
  read(true, out);
  waiting_.clear();
}

void HtmlText::read(bool at_end, std::string& out) {
  size_t at = 0;
  while (at < waiting_.size()) {
    if (in_tag_) {
      if (!read_tag(at)) break;
    } else if (!until_.empty()) {
      const size_t end = find_lower(waiting_, until_, at);
      if (end == waiting_.npos) {
        at = std::max(at, waiting_.size() - std::min(waiting_.size(), until_.size() - 1));
        break;
      }
      at = until_.starts_with('<') ? end : end + until_.size();
      until_.clear();
    } else if (waiting_[at] == '<') {
      const size_t before = at;
      if (!read_markup(at, at_end)) break;
      if (at == before) put(std::string_view(waiting_).substr(at++, 1), out);  // a character
    } else if (waiting_[at] == '&') {
      if (!read_reference(at, at_end, out)) break;
    } else {
      const size_t end = std::min(waiting_.find_first_of("<&", at), waiting_.size());
      put(std::string_view(waiting_).substr(at, end - at), out);
      at = end;
    }
  }
  waiting_.erase(0, at);
}

// What begins with "<": moves `at` behind the beginning of a comment or tag, or not at all. False: more bytes are
// needed.
bool HtmlText::read_markup(size_t& at, bool at_end) {
  const std::string_view rest = std::string_view(waiting_).substr(at);
  if (rest.size() < 4 && !at_end) return false;
  if (rest.starts_with("<!--")) {
    until_ = "-->";
    at += 2;  // "<!-->" is a comment
    return true;
  }
  size_t name = 1;
  if (rest.size() > name && rest[name] == '/') ++name;
  const bool is_tag = rest.size() > name && is_letter(rest[name]);
  const bool is_other = rest.size() > 1 && (rest[1] == '!' || rest[1] == '?');  // <!doctype>, <?xml?>
  if (!is_tag && !is_other) return true;
  in_tag_ = true;
  tag_.clear();
  quote_ = before_ = 0;
  at += is_tag ? name : 2;
  if (is_tag && name == 2) tag_ = "/";
  if (is_other) tag_ = "!";
  return true;
}

// The rest of a tag; false: it goes on.
bool HtmlText::read_tag(size_t& at) {
  constexpr size_t kLongestName = 32;
  for (; at < waiting_.size(); ++at) {
    const char c = waiting_[at];
    if (quote_ != 0) {
      if (c == quote_) quote_ = 0;
      continue;
    }
    if (c == '>') {
      ++at;
      in_tag_ = false;
      end_tag();
      return true;
    }
    if ((c == '"' || c == '\'') && before_ == '=' && tag_ != "!") quote_ = c;
    // The name ends at the first character that belongs to none, after which `before_` is set.
    if (before_ == 0 && (is_letter_or_digit(c) || c == '-') && tag_.size() < kLongestName)
      tag_ += lower(c);
    else if (!is_space(c))
      before_ = c;
    else if (before_ == 0)
      before_ = ' ';
  }
  return false;
}

void HtmlText::end_tag() {
  const bool closes = tag_.starts_with('/');
  const std::string_view name = std::string_view(tag_).substr(closes ? 1 : 0);
  if (contains(kParagraphs, name)) {
    breaks_ = std::max(breaks_, 2);
  } else if (name == "br") {
    breaks_ = std::min(breaks_ + 1, 2);
  } else if (contains(kBlocks, name)) {
    breaks_ = std::max(breaks_, 1);
  } else if (name == "td" || name == "th") {
    if (!closes) space_ = '\t';
  }
  after_pre_ = !closes && name == "pre";
  if (name == "pre") preformatted_ = std::clamp(preformatted_ + (closes ? -1 : 1), 0, 100);
  if (!closes && contains(kRawElements, name)) until_ = "</" + std::string(name);
}

bool HtmlText::read_reference(size_t& at, bool at_end, std::string& out) {
  const std::string_view rest = std::string_view(waiting_).substr(at, kLongestReference);
  if (rest.size() < kLongestReference && !at_end && rest.find(';') == rest.npos) return false;
  const auto reference = rest.starts_with("&#") ? numeric_reference(rest) : named_reference(rest);
  if (!reference) {
    put("&", out);
    ++at;
    return true;
  }
  constexpr uint32_t kNoBreakSpace = 0xA0;
  put(reference->code == kNoBreakSpace ? " " : utf8_of(reference->code), out);
  at += reference->length;
  return true;
}

void HtmlText::put(std::string_view text, std::string& out) {
  if (std::exchange(after_pre_, false) && text.starts_with('\n')) text.remove_prefix(1);
  for (size_t at = 0; at < text.size();) {
    if (preformatted_ == 0 && is_space(text[at])) {
      if (space_ == 0) space_ = ' ';
      ++at;
      continue;
    }
    size_t end = at;
    while (end < text.size() && (preformatted_ > 0 || !is_space(text[end]))) ++end;
    put_word(text.substr(at, end - at), out);
    at = end;
  }
}

// With the line breaks or the space that precede it.
void HtmlText::put_word(std::string_view word, std::string& out) {
  if (!empty_ && breaks_ > 0)
    out.append(static_cast<size_t>(breaks_), '\n');
  else if (!empty_ && space_ != 0)
    out += space_;
  breaks_ = 0;
  space_ = 0;
  out += word;
  empty_ = false;
}

std::string html_to_text(std::string_view page) {
  HtmlText reader;
  std::string text;
  reader.feed(page, text);
  reader.finish(text);
  return text;
}

}  // namespace furious
