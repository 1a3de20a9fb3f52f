// Makes programs: what has been recorded is cut into pieces, and these get their places in the kernel's memory.
#include <cstring>
#include <vector>

#include "decode/token_kernel.cuh"
#include "gpu/launch.cuh"
#include "tensor/arena.h"

namespace furious {
namespace cuda {
namespace {

int window_bytes(int tokens, int qk_dim, int v_dim) {
  return tokens * (qk_dim + v_dim) * 2;
}
int row_bytes(int v_dim) {  // of a state
  return padded(v_dim) * 4 + 4;
}

// What has been recorded, and where the activations of the program lie that the calls have elsewhere.
struct Recorder {
  struct Mail {
    const char* begin;  // of what it stands for
    int64_t numbers, bytes_each;
    char* words;    // the first copy
    int operation;  // that wrote it last
  };
  Device device;
  std::vector<Tensor>& held;
  std::vector<TokenPiece> operations = {};
  std::vector<Mail> mails = {};

  Tensor partials = {};
  char* free = nullptr;  // what is left of the memory for mail
  int64_t free_bytes = 0;

  // Of the first copy; the others lie kCopyBytes apart. No word of them has a tag.
  char* room_for(int64_t bytes) {
    constexpr int64_t kLine = 128;
    bytes = (bytes + kLine - 1) / kLine * kLine;
    require(bytes <= kCopyBytes, "token_program: {} bytes of activations, expected {} at most", bytes, kCopyBytes);
    if (bytes > free_bytes) {
      held.push_back(Tensor::zeros({kCopies * kCopyBytes / 4}, DType::i32, device));
      free = static_cast<char*>(held.back().raw());
      free_bytes = kCopyBytes;
    }
    free += bytes;
    free_bytes -= bytes;
    return free - bytes;
  }
  // Steps have one memory for their partial sums, which so stays in the L2 cache: who writes there for the next step
  // has read what comes of all sums of the one before.
  uint64_t* partials_for(int64_t numbers) {
    if (!partials || partials.size(0) < 2 * numbers) {
      partials = Tensor::zeros({2 * numbers}, DType::i32, device);  // no word has a tag
      held.push_back(partials);
    }
    return static_cast<uint64_t*>(partials.raw());
  }

  // Memory is used again within the work: the latest is meant.
  Mail& latest(const void* x) {
    for (auto mail = mails.rbegin(); mail != mails.rend(); ++mail) {
      const int64_t offset = static_cast<const char*>(x) - mail->begin;
      if (offset >= 0 && offset < mail->numbers * mail->bytes_each) return *mail;
    }
    fail("token_program: an operation reads what none has written");
  }
  template <class T>
  T* mail_of(T* x) {
    const Mail& mail = latest(x);
    const int64_t offset = reinterpret_cast<const char*>(x) - mail.begin;
    return reinterpret_cast<T*>(mail.words + 2 * offset);
  }
  // Twice the bytes, for the tags. What comes to lie in the same place again, of the same size, has the same.
  template <class T>
  T* mail_for(T* x, int64_t numbers, int64_t bytes_each) {
    for (const Mail& mail : mails)
      if (mail.begin == reinterpret_cast<const char*>(x) && mail.numbers == numbers && mail.bytes_each == bytes_each) {
        Mail again = mail;
        again.operation = static_cast<int>(operations.size());
        mails.push_back(again);
        return reinterpret_cast<T*>(again.words);
      }
    char* const words = room_for(2 * numbers * bytes_each);
    mails.push_back(
        {reinterpret_cast<const char*>(x), numbers, bytes_each, words, static_cast<int>(operations.size())});
    return reinterpret_cast<T*>(words);
  }
};

thread_local Recorder* recorder = nullptr;

// Cuts an operation into pieces. Returns the bytes that each needs.
std::vector<int> cut(const TokenPiece& operation, const TokenRoom& room, int blocks, std::vector<TokenPiece>& pieces) {
  std::vector<int> bytes;
  int share = 1, most = 1;
  if (operation.kind == TokenPiece::Kind::linear) {
    const int groups = operation.linear.pairs() ? 2 : 1, tile = groups * 8 * row_units(operation.linear.k) * 16;
    share = divide_up(operation.linear.tiles, blocks);
    most = std::clamp(room.largest() / tile, 1, kMostGroups / groups);
    for (int begin = 0; begin < share; begin += most)
      bytes.push_back(std::min(most, share - begin) * tile + TokenRoom::kBehind);
  } else if (operation.kind == TokenPiece::Kind::step) {
    const StepCall& step = operation.step;
    const int window = window_bytes(step.tokens, step.cache.qk_dim, step.cache.v_dim),
              row = row_bytes(step.cache.v_dim);
    share = step.rows;
    most = std::min((room.largest() - window) / row, kMostRows) / 4 * 4;
    most = divide_up(divide_up(share, divide_up(share, most)), 4) * 4;
    for (int begin = 0; begin < share; begin += most) bytes.push_back(most * row + (begin == 0 ? window : 0));
  } else {
    bytes.push_back(0);
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    TokenPiece piece = operation;
    piece.begin = static_cast<int>(i) * most;
    piece.count = operation.kind == TokenPiece::Kind::step ? most : std::min(most, share - piece.begin);
    piece.share = share;
    piece.first = i == 0;
    piece.last = i + 1 == bytes.size();
    pieces.push_back(piece);
  }
  return bytes;
}

// Gives every piece its place in the ring, one behind the other, and the piece that must have been used before.
void place(std::vector<TokenPiece>& pieces, const std::vector<int>& bytes, int ring) {
  int at = 0;
  for (size_t p = 0; p < pieces.size(); ++p) {
    const int size = divide_up(bytes[p], 128) * 128;
    if (at + size > ring) at = 0;
    pieces[p].at = at;
    // A slot is written anew when all warps are done with its last piece: when they have used the one after it.
    int needs = static_cast<int>(p) - kSlots + 2;
    for (size_t q = 0; q < p; ++q)
      if (pieces[q].at < at + size && at < pieces[q].at + bytes[q]) needs = std::max(needs, static_cast<int>(q) + 1);
    pieces[p].needs = std::max(needs, 0);
    at += size;
  }
}

}  // namespace

bool recording_program() {
  return recorder != nullptr;
}

void record(const EmbeddingCall& call) {
  TokenPiece piece{};
  piece.kind = TokenPiece::Kind::embedding;
  piece.embedding = call;
  piece.embedding.out = recorder->mail_for(call.out, int64_t{call.batch} * call.dim, 2);
  recorder->operations.push_back(piece);
}

void record(const LinearCall& call) {
  TokenPiece piece{};
  piece.kind = TokenPiece::Kind::linear;
  piece.linear = call;
  piece.linear.x = recorder->mail_of(call.x);
  if (call.gate) piece.linear.gate = recorder->mail_of(call.gate);
  for (int p = 0; p < call.parts; ++p) {
    LinearPart& part = piece.linear.part[p];
    const int64_t numbers = int64_t{call.batch} * part.rows;
    if (part.kind == TokenPart::Kind::add) {
      Recorder::Mail& mail = recorder->latest(part.out);
      piece.added_to = mail.operation;
      mail.operation = static_cast<int>(recorder->operations.size());
      part.out = recorder->mail_of(static_cast<char*>(part.out));
    } else if (part.kind == TokenPart::Kind::softplus && part.decay)
      part.decay = recorder->mail_for(part.decay, numbers, 4);
    else if (part.kind == TokenPart::Kind::softplus)
      part.out = recorder->mail_for(static_cast<char*>(part.out), numbers, 4);
    else if (!part.f32_out)
      part.out = recorder->mail_for(static_cast<char*>(part.out), numbers, 2);
  }
  recorder->operations.push_back(piece);
}

void record(const MixerStep& from, const Tensor& out) {
  StepCall call{};
  call.cache = from.cache;
  call.slot_of_row = from.rows;
  call.heads = from.heads;
  const auto words = [](const Token<__nv_bfloat16>& x) {
    return Token<uint32_t>{reinterpret_cast<const uint32_t*>(recorder->mail_of(x.data)), x.row_stride, x.head_stride,
                           x.own_heads};
  };
  call.q = words(from.q);
  call.k = words(from.k);
  call.v = words(from.v);
  if (from.log_decay) call.log_decay = recorder->mail_of(from.log_decay);
  call.blocks = std::max(1, multiprocessors() / call.heads);
  call.rows = divide_up(divide_up(call.cache.state_rows, call.blocks), 4) * 4;
  call.tokens = divide_up(kStepTokens, call.blocks);
  const Cache& cache = call.cache;
  call.partial_numbers = call.blocks * (cache.v_dim + 1);
  call.columns = divide_up(cache.v_dim, call.blocks);
  call.q_sharers = cache.heads / from.q.own_heads;
  call.k_sharers = cache.heads / cache.k_heads;
  call.v_sharers = cache.heads / cache.v_heads;
  call.rows_at_once = 128 / cache.v_dim;
  call.part_of_row = divide_up(1 << 18, cache.v_dim);
  call.partials = recorder->partials_for(int64_t{call.heads} * call.partial_numbers);
  call.out = reinterpret_cast<uint32_t*>(
      recorder->mail_for(static_cast<__nv_bfloat16*>(out.raw()), int64_t{call.heads} * call.cache.v_dim, 2));
  TokenPiece piece{};
  piece.kind = TokenPiece::Kind::step;
  piece.step = call;
  recorder->operations.push_back(piece);
}

}  // namespace cuda

struct TokenProgram::Parts {
  Device device;
  Arena arena{device};
  std::vector<Tensor> held = {};
  cuda::TokenWork work = {};
  int bytes = 0;  // of shared memory
};

bool TokenProgram::fits(Device device, const Sizes& sizes) {
  using namespace cuda;
  (void)stream(device);  // makes it current
  if (!has_token_kernel() || sizes.batch > kMostSequences || sizes.head_dim % 8 != 0 || sizes.widest % 8 != 0 ||
      sizes.widest_pair % 8 != 0 || sizes.head_dim > kLargestHead || sizes.batch * sizes.heads > multiprocessors())
    return false;
  const TokenRoom room(sizes.batch, sizes.widest);
  const auto dim = static_cast<int>(sizes.head_dim);
  const auto rows_fit = [&](int64_t rows, int64_t k) {
    return rows * row_units(static_cast<int>(k)) * 16 <= room.largest();
  };
  return rows_fit(8, sizes.widest) && rows_fit(16, sizes.widest_pair) &&
         window_bytes(kMostTokens, dim, dim) + kFewestRows * row_bytes(dim) <= room.largest();
}

int TokenProgram::resident_blocks(Device device, int shared_bytes) {
  (void)cuda::stream(device);  // makes it current
  return cuda::has_token_kernel() ? cuda::resident_token_blocks(shared_bytes) : 0;
}

TokenProgram::TokenProgram(Device device, const std::function<void()>& work) : parts_(new Parts{device}) {
  using namespace cuda;
  (void)stream(device);
  Recorder recording{device, parts_->held};
  {
    const Arena::Scope scope(parts_->arena);
    recorder = &recording;
    try {
      work();
    } catch (...) {
      recorder = nullptr;
      throw;
    }
    recorder = nullptr;
  }
  std::vector<TokenPiece>& operations = recording.operations;

  int64_t batch = 1, widest = 8;
  std::vector<SlotRecord*> slots;
  for (const TokenPiece& operation : operations) {
    if (operation.kind == TokenPiece::Kind::step) {
      slots.push_back(operation.step.cache.slots);
      parts_->work.slot_of_row = operation.step.slot_of_row;
    }
    if (operation.kind != TokenPiece::Kind::linear) continue;
    batch = std::max<int64_t>(batch, operation.linear.batch);
    widest = std::max<int64_t>(widest, operation.linear.k);
  }
  const TokenRoom room(batch, widest);
  std::vector<TokenPiece> pieces;
  std::vector<int> bytes;
  for (TokenPiece& operation : operations) {
    operation.final = &operation == &operations.back();
    operation.operation = static_cast<int>(&operation - operations.data());
    for (int of_piece : cut(operation, room, multiprocessors(), pieces)) bytes.push_back(of_piece);
  }
  place(pieces, bytes, room.ring);

  const auto on_device = [&](const void* from, size_t size) {
    const Tensor there = Tensor::empty({static_cast<int64_t>(size / 4)}, DType::i32, device);
    memory::copy(device, there.raw(), {}, from, size);
    parts_->held.push_back(there);
    return there.raw();
  };
  std::vector<char> descriptions(pieces.size() * kDescriptionBytes);
  for (size_t p = 0; p < pieces.size(); ++p)
    std::memcpy(descriptions.data() + p * kDescriptionBytes, static_cast<const void*>(&pieces[p]), sizeof(TokenPiece));
  TokenWork& made = parts_->work;
  made.pieces = static_cast<const uint4*>(on_device(descriptions.data(), descriptions.size()));
  made.count = static_cast<int>(pieces.size());
  const std::vector<unsigned> tags(static_cast<size_t>(multiprocessors()), 1);  // no word has this one
  made.tags = static_cast<unsigned*>(on_device(tags.data(), tags.size() * sizeof(unsigned)));
  made.operations = static_cast<int>(operations.size());
  made.slots = static_cast<SlotRecord* const*>(on_device(slots.data(), slots.size() * sizeof(SlotRecord*)));
  made.caches = static_cast<int>(slots.size());
  made.rows = static_cast<int>(batch);
  made.warp_activations = room.warp_activations / 16;
  made.sums = room.sums;
  parts_->bytes = room.all;
}

TokenProgram::~TokenProgram() {
  // The memory goes back to the device, which may not have done its last run.
  if (parts_) synchronize(parts_->device);
}

void TokenProgram::run(const Tensor& ids) const {
  cuda::TokenWork work = parts_->work;
  work.ids = ids.data<int32_t>();
  work.id_stride = static_cast<int>(ids.stride(0));
  run_token_kernel(parts_->device, work, parts_->bytes);
}

}  // namespace furious
