# Writes a C++ file with a file's bytes: cmake -DINPUT=page.html -DOUTPUT=page.cpp -DHEADER=serve/page.h
#   -DFUNCTION=furious::serve::page_html -P embed.cmake
file(READ "${INPUT}" bytes HEX)
string(LENGTH "${bytes}" digits)
math(EXPR size "${digits} / 2")
string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "'\\\\x\\1'," bytes "${bytes}")
file(WRITE "${OUTPUT}" "#include \"${HEADER}\"\n
namespace {
constexpr char kBytes[${size}] = {\n${bytes}};
}  // namespace\n
std::string_view ${FUNCTION}() {
  return {kBytes, sizeof(kBytes)};
}\n")
