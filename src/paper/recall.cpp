#include "paper/recall.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "data/synthetic.h"

namespace furious {
namespace {

using Json = nlohmann::ordered_json;

RecallTask recall_task(int64_t rows, int64_t pairs, uint64_t seed) {
  RecallOptions options;
  options.batch = rows;
  options.pairs = pairs;
  options.length = 4 * pairs;  // no filler: the pairs, then each key once more
  options.vocabulary_size = LookupOptions().vocabulary_size;
  options.seed = seed;
  return RecallTask(options);
}

}  // namespace

std::vector<SmallModel> recall_models(const RecallStudy& study) {
  for (const int64_t pairs : study.pairs) recall_task(study.rows, pairs, 0);  // checks them
  std::vector<SmallModel> models;
  for (const std::string& arch : study.archs)
    for (const int64_t dim : study.dims) {
      require(study.base.hidden % dim == 0,
              "recall: a width of {} is not a multiple of the head dimension {}; change --hidden or --dims",
              study.base.hidden, dim);
      models.push_back({fmt::format("{}-{}", preset(arch).name, dim), study.base});
      models.back().options.arch = arch;
      models.back().options.heads = study.base.hidden / dim;
    }
  return models;
}

std::vector<RecallCell> recall_cells(const RecallStudy& study, const std::vector<LanguageModel>& trained) {
  const int64_t longest = 4 * *std::ranges::max_element(study.pairs);
  std::vector<RecallCell> cells;
  for (const LanguageModel& model : trained) {
    const ModelConfig& config = model.config();
    const int64_t bytes = cache_numbers(config, longest) * static_cast<int64_t>(sizeof(float));
    for (const int64_t pairs : study.pairs)
      cells.push_back({config.arch, config.head_dim, bytes, pairs,
                       accuracy(model, recall_task(study.rows, pairs, ~study.base.seed), 1)});
  }
  return cells;
}

std::vector<HeatMap> recall_maps(const RecallStudy& study, const std::vector<RecallCell>& cells) {
  std::vector<HeatMap> maps;
  const size_t columns = study.pairs.size(), cells_of_map = columns * study.dims.size();
  for (size_t i = 0; i < cells.size(); ++i) {
    const RecallCell& cell = cells[i];
    if (i % cells_of_map == 0) {
      maps.push_back({cell.arch, "pairs", "state", {}, {}, {}});
      for (const int64_t pairs : study.pairs) maps.back().columns.push_back(std::to_string(pairs));
    }
    if (i % columns == 0)
      maps.back().rows.push_back(
          fmt::format("d {} ({:.1f} KB)", cell.head_dim, static_cast<double>(cell.sequence_bytes) / 1e3));
    maps.back().cells.push_back({cell.found.right, cell.found.asked});
  }
  return maps;
}

Json recall_json(const RecallStudy& study, const std::vector<RecallCell>& cells) {
  Json written = Json::array();
  for (const RecallCell& cell : cells)
    written.push_back({{"arch", cell.arch},
                       {"head_dim", cell.head_dim},
                       {"sequence_bytes", cell.sequence_bytes},
                       {"pairs", cell.pairs},
                       {"right", cell.found.right},
                       {"asked", cell.found.asked}});
  return {{"steps", study.base.steps}, {"cells", written}};
}

}  // namespace furious
