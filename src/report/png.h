// PNG images, converted from SVG by an installed program.
#pragma once

#include <filesystem>
#include <string>

namespace furious {

// Throws, with the package to install, where no program can turn SVG into PNG.
void check_png();

void write_png(const std::filesystem::path& path, const std::string& svg);

}  // namespace furious
