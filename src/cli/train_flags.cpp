#include "cli/train_flags.h"

#include <algorithm>

#include "cli/flags.h"

namespace furious::cli {

TrainFlags::TrainFlags(CLI::App& command, const TrainOptions& defaults, const std::vector<std::string>& names) {
  for (const TrainOption& option : train_options()) {
    if (!names.empty() && std::find(names.begin(), names.end(), option.name) == names.end()) continue;
    const std::string flag = "--" + option.name + (option.alias.empty() ? "" : ",--" + option.alias);
    if (option.kind == TrainOption::Kind::flag) {
      flags_.emplace_back(&option, command.add_flag(flag, option.help));
      continue;
    }
    CLI::Option* added = command.add_option(flag, option.help)->check(parsed_by([&option](const std::string& text) {
      TrainOptions ignored;
      option.set(ignored, text);
    }));
    added->take_last();
    added->type_name(option.kind == TrainOption::Kind::number ? "NUMBER" : "TEXT");
    if (const std::string value = option.get(defaults); !value.empty()) added->default_str(value);
    flags_.emplace_back(&option, added);
  }
}

void TrainFlags::apply(TrainOptions& options) const {
  for (const auto& [option, flag] : flags_) {
    if (flag->count() == 0) continue;
    const auto text = flag->as<std::string>();
    const bool is_word = option->kind != TrainOption::Kind::flag || text == "previous";  // of --resume=previous
    option->set(options, is_word ? text : fmt::format("{}", flag->as<bool>()));  // --recompute, --recompute=false
  }
}

std::set<std::string> TrainFlags::given() const {
  std::set<std::string> names;
  for (const auto& [option, flag] : flags_)
    if (flag->count() > 0) names.insert(option->name);
  return names;
}

RecipeFlag::RecipeFlag(CLI::App& command) {
  std::string help = "Use the options of the paper's training; flags override them:";
  for (const Recipe& one : recipes()) help += fmt::format("\n{}: {}", one.name, one.about);
  CLI::Option* named =
      command.add_option("--recipe", name_, help)->check(parsed_by([](const std::string& name) { recipe(name); }));
  command.add_flag("--paper", paper_, "The same as --recipe paper")->excludes(named);
}

}  // namespace furious::cli
