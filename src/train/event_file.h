// Event files of TensorBoard: records (TFRecord) that hold Event messages in protobuf's encoding.
//
//   record  length u64, masked CRC-32C of the length u32, message, masked CRC-32C of the message u32
//   Event   wall_time = 1 (double), step = 2, file_version = 3, summary = 5, session_log = 7
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace furious {

inline constexpr std::string_view kEventFilePrefix = "events.out.tfevents.", kEventFileSuffix = ".furious";

// The values of one step: a message of type Summary.
class EventValues {
 public:
  void add_number(std::string_view tag, double value);
  void add_text(std::string_view tag, std::string_view text);
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// What a file begins with: its version, and the begin of a session, at which a running TensorBoard forgets the points
// of the files before it.
std::string event_file_start(double time);
std::string event_record(double time, int64_t step, const EventValues& values);

uint32_t crc32c(std::string_view bytes);

}  // namespace furious
