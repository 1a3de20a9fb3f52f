#include "data/byte_stream.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <vector>

#include "base/error.h"

namespace furious {
namespace {

constexpr size_t kInputBytes = 256 << 10;

class PlainStream final : public ByteStream {
 public:
  explicit PlainStream(const std::string& path)
      : path_(path), handle_(path == "-" ? ::dup(STDIN_FILENO) : ::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    require(handle_ >= 0, "cannot open \"{}\": {}", path, std::strerror(errno));
  }
  ~PlainStream() override { ::close(handle_); }
  PlainStream(const PlainStream&) = delete;
  PlainStream& operator=(const PlainStream&) = delete;

  size_t read(char* out, size_t bytes) override {
    size_t done = 0;
    while (done < bytes) {
      const ssize_t got = ::read(handle_, out + done, bytes - done);
      if (got < 0 && errno == EINTR) continue;
      require(got >= 0, "cannot read \"{}\" at byte {}: {}", path_, consumed_, std::strerror(errno));
      if (got == 0) break;
      done += static_cast<size_t>(got);
      consumed_ += got;
    }
    return done;
  }
  void skip(int64_t bytes) override {
    if (bytes == 0) return;  // of a pipe, more than nothing cannot be skipped
    require(::lseek(handle_, bytes, SEEK_CUR) >= 0, "cannot seek in \"{}\": {}", path_, std::strerror(errno));
    consumed_ += bytes;
  }
  int64_t consumed() const override { return consumed_; }

 private:
  std::string path_;
  int handle_;
  int64_t consumed_ = 0;
};

// Common to both decompressors: a buffer of compressed input, and the messages for its defects.
class CompressedStream : public ByteStream {
 public:
  CompressedStream(const std::string& path, std::string_view format)
      : path_(path), format_(format), file_(path), input_(kInputBytes) {}
  int64_t consumed() const override { return file_.consumed(); }

 protected:
  std::span<const char> refill() {
    const size_t bytes = file_.read(input_.data(), input_.size());
    // Compressed nothing still has a header and an end: this file was not written completely.
    require(bytes > 0 || file_.consumed() > 0,
            "\"{}\" is empty, which is not valid {} data; write it again, or leave it out", path_, format_);
    return {input_.data(), bytes};
  }
  [[noreturn]] void truncated() const {
    fail("\"{}\" is truncated: it ends inside its {} data, at byte {} of the file (byte {} of the text)", path_,
         format_, file_.consumed(), produced_);
  }
  [[noreturn]] void broken(std::string_view reason) const {
    fail("\"{}\" is damaged: broken {} data before byte {} of the file (byte {} of the text): {}", path_, format_,
         file_.consumed(), produced_, reason);
  }
  int64_t produced_ = 0;

 private:
  std::string path_;
  std::string format_;
  PlainStream file_;
  std::vector<char> input_;
};

class GzipStream final : public CompressedStream {
 public:
  explicit GzipStream(const std::string& path) : CompressedStream(path, "gzip") {
    require(::inflateInit2(&state_, 15 + 16) == Z_OK, "zlib failed to initialize");
  }
  ~GzipStream() override { ::inflateEnd(&state_); }
  GzipStream(const GzipStream&) = delete;
  GzipStream& operator=(const GzipStream&) = delete;

  size_t read(char* out, size_t bytes) override {
    size_t done = 0;
    while (done < bytes) {
      if (state_.avail_in == 0 && !next_input()) break;
      if (!inside_ && ::inflateReset(&state_) != Z_OK) broken("zlib failed to initialize");
      inside_ = true;
      const size_t space = std::min<size_t>(bytes - done, 1 << 30);
      state_.next_out = reinterpret_cast<Bytef*>(out + done);
      state_.avail_out = static_cast<uInt>(space);
      const int result = ::inflate(&state_, Z_NO_FLUSH);
      done += space - state_.avail_out;
      produced_ += static_cast<int64_t>(space - state_.avail_out);
      if (result == Z_STREAM_END)
        inside_ = false;  // a file may hold several members, one after the other
      else if (result != Z_OK && result != Z_BUF_ERROR)
        broken(state_.msg ? state_.msg : "not gzip");
    }
    return done;
  }

 private:
  bool next_input() {
    const auto input = refill();
    if (input.empty() && inside_) truncated();
    state_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(input.data()));
    state_.avail_in = static_cast<uInt>(input.size());
    return !input.empty();
  }

  z_stream state_ = {};
  bool inside_ = false;
};

class ZstdStream final : public CompressedStream {
 public:
  explicit ZstdStream(const std::string& path) : CompressedStream(path, "zstd"), state_(ZSTD_createDStream()) {
    require(state_ != nullptr, "zstd failed to initialize");
  }
  ~ZstdStream() override { ZSTD_freeDStream(state_); }
  ZstdStream(const ZstdStream&) = delete;
  ZstdStream& operator=(const ZstdStream&) = delete;

  size_t read(char* out, size_t bytes) override {
    ZSTD_outBuffer output = {out, bytes, 0};
    while (output.pos < output.size) {
      // A full output buffer may have left decoded bytes inside, so the end of the input alone is not the end.
      if (input_.pos == input_.size && !may_hold_output_ && !next_input()) break;
      const size_t before = output.pos;
      const size_t result = ZSTD_decompressStream(state_, &output, &input_);
      if (ZSTD_isError(result)) broken(ZSTD_getErrorName(result));
      inside_ = result != 0;
      may_hold_output_ = inside_ && output.pos == output.size;
      produced_ += static_cast<int64_t>(output.pos - before);
    }
    return output.pos;
  }

 private:
  bool next_input() {
    const auto input = refill();
    if (input.empty() && inside_) truncated();
    input_ = {input.data(), input.size(), 0};
    return !input.empty();
  }

  ZSTD_DStream* state_;
  ZSTD_inBuffer input_ = {nullptr, 0, 0};
  bool inside_ = false;
  bool may_hold_output_ = false;
};

}  // namespace

void ByteStream::skip(int64_t bytes) {
  std::vector<char> discarded(kInputBytes);
  while (bytes > 0) {
    const size_t got = read(discarded.data(), static_cast<size_t>(std::min<int64_t>(bytes, kInputBytes)));
    if (got == 0) return;
    bytes -= static_cast<int64_t>(got);
  }
}

std::unique_ptr<ByteStream> open_byte_stream(const std::string& path) {
  if (path.ends_with(".gz")) return std::make_unique<GzipStream>(path);
  if (path.ends_with(".zst")) return std::make_unique<ZstdStream>(path);
  return std::make_unique<PlainStream>(path);
}

}  // namespace furious
