// The memory that training needs, compared with what is free before anything is allocated.
#pragma once

#include <cstdint>
#include <string>

#include "model/cost.h"
#include "train/data_parallel.h"

namespace furious {

// The estimate for one rank; `options` are its own (DataParallel::rank_options), with any number of micro-batches.
TrainingMemory needed_memory(const TrainOptions& options, const ModelConfig& config, const DataParallel& parallel);

// Which flags would make training fit into so many bytes.
std::string memory_advice(const TrainOptions& options, const ModelConfig& config, int64_t available,
                          const DataParallel& parallel);

// Throws if the device has too little free memory.
void check_memory(const TrainOptions& options, const ModelConfig& config, const DataParallel& parallel);

std::string gib(int64_t bytes);  // "1.50 GiB"

}  // namespace furious
