#include "base/build_info.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "base/build_info.cpp"
#include "hwy/foreach_target.h"
// Must follow foreach_target.h, which includes this file once per target.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace furious {
namespace HWY_NAMESPACE {

int64_t running_target() {
  return HWY_TARGET;
}

}  // namespace HWY_NAMESPACE
}  // namespace furious
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace furious {

HWY_EXPORT(running_target);

std::string version() {
  return FURIOUS_VERSION;
}

std::string compiler() {
#if defined(__clang__)
  return fmt::format("clang++ {}.{}.{}", __clang_major__, __clang_minor__, __clang_patchlevel__);
#else
  return fmt::format("g++ {}.{}.{}", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
#endif
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name")) return line.substr(std::min(line.find(':') + 2, line.size()));
  return "unknown";
}

namespace {

// Highway's name for AVX-512 is AVX3.
std::string target_name(int64_t target) {
  std::string name = hwy::TargetName(target);
  if (name.starts_with("AVX3")) name.replace(0, 4, "AVX-512");
  return name;
}

}  // namespace

std::string simd_target() {
  std::string built;
  for (int64_t rest = HWY_TARGETS; rest != 0; rest &= rest - 1)
    built += (built.empty() ? "" : ", ") + target_name(rest & -rest);
  return fmt::format("{} (built for {})", target_name(HWY_DYNAMIC_DISPATCH(running_target)()), built);
}

}  // namespace furious
#endif
