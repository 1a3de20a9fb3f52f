// The report of cache memory by sequence length: table, chart and JSON.
#pragma once

#include <nlohmann/json.hpp>

#include "paper/cache_memory.h"
#include "report/chart.h"
#include "report/table.h"

namespace furious {

Table table_of(const CacheMemory& memory);  // in KB
Chart chart_of(const CacheMemory& memory);
nlohmann::ordered_json to_json(const CacheMemory& memory);

}  // namespace furious
