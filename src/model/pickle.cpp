#include "model/pickle.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/names.h"

namespace furious {
namespace {

namespace fs = std::filesystem;
using Bytes = std::span<const std::byte>;

constexpr size_t kMostPickleBytes = size_t{64} << 20;
constexpr size_t kMostEntries = 1 << 20;

// Of the file that is being read.
struct Reporter {
  const fs::path& path;

  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail("{}: {}; the file is damaged or holds more than tensors: convert it to safetensors", path.string(),
         fmt::format(format, std::forward<Args>(args)...));
  }
};

// Little-endian numbers at any offset, checked.
class Source {
 public:
  Source(Bytes bytes, Reporter report) : bytes_(bytes), report_(report) {}

  template <class Number>
  Number at(uint64_t offset) const {
    Number number = 0;
    std::memcpy(&number, range(offset, sizeof(Number)).data(), sizeof(Number));
    return number;
  }
  Bytes range(uint64_t offset, uint64_t count) const {
    if (offset > bytes_.size() || count > bytes_.size() - offset) report_.refuse("it ends too early");
    return bytes_.subspan(offset, count);
  }
  std::string text(uint64_t offset, uint64_t count) const {
    const Bytes own = range(offset, count);
    return {reinterpret_cast<const char*>(own.data()), own.size()};
  }
  uint64_t size() const { return bytes_.size(); }
  const Reporter& report() const { return report_; }

 private:
  Bytes bytes_;
  Reporter report_;
};

// The files of a ZIP archive by name.
class Archive {
 public:
  explicit Archive(const Source& source) : source_(source) {
    const auto [at, entries] = directory();
    if (entries > kMostEntries) refuse("{} files in the archive", entries);
    uint64_t offset = at;
    for (uint64_t i = 0; i < entries; ++i) offset = read_entry(offset);
  }

  const std::map<std::string, Bytes>& files() const { return files_; }

 private:
  static constexpr uint32_t kEnd = 0x06054b50, kEnd64 = 0x06064b50, kEnd64Locator = 0x07064b50, kEntry = 0x02014b50,
                            kLocal = 0x04034b50;
  static constexpr uint64_t kEndBytes = 22, kLocatorBytes = 20, kEntryBytes = 46, kLocalBytes = 30;
  static constexpr uint32_t kElsewhere = 0xffffffff;  // the number is among the 64-bit ones

  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    source_.report().refuse(format, std::forward<Args>(args)...);
  }

  // Where the directory begins, and the number of its entries.
  std::pair<uint64_t, uint64_t> directory() const {
    if (source_.size() < kEndBytes) refuse("it is no ZIP archive");
    const uint64_t last = source_.size() - kEndBytes;
    uint64_t end = last;
    while (source_.at<uint32_t>(end) != kEnd) {  // a comment may follow it
      if (end == 0 || last - end > 65535) refuse("it is no ZIP archive");
      --end;
    }
    if (end >= kLocatorBytes && source_.at<uint32_t>(end - kLocatorBytes) == kEnd64Locator) {
      const auto end64 = source_.at<uint64_t>(end - kLocatorBytes + 8);
      if (source_.at<uint32_t>(end64) != kEnd64) refuse("its directory is missing");
      return {source_.at<uint64_t>(end64 + 48), source_.at<uint64_t>(end64 + 32)};
    }
    return {source_.at<uint32_t>(end + 16), source_.at<uint16_t>(end + 10)};
  }

  // Returns where the next entry begins.
  uint64_t read_entry(uint64_t at) {
    if (source_.at<uint32_t>(at) != kEntry) refuse("its directory is damaged");
    const auto method = source_.at<uint16_t>(at + 10);
    uint64_t packed = source_.at<uint32_t>(at + 20), size = source_.at<uint32_t>(at + 24),
             local = source_.at<uint32_t>(at + 42);
    const uint64_t name_bytes = source_.at<uint16_t>(at + 28), extra_bytes = source_.at<uint16_t>(at + 30),
                   comment_bytes = source_.at<uint16_t>(at + 32), extra = at + kEntryBytes + name_bytes;
    const std::string name = source_.text(at + kEntryBytes, name_bytes);
    for (uint64_t field = extra; field + 4 <= extra + extra_bytes; field += 4 + source_.at<uint16_t>(field + 2)) {
      if (source_.at<uint16_t>(field) != 1) continue;  // 64-bit numbers, of those that do not fit, in this order
      uint64_t number = field + 4;
      for (uint64_t* const value : {&size, &packed, &local})
        if (*value == kElsewhere) *value = source_.at<uint64_t>(std::exchange(number, number + 8));
    }
    if (method != 0 || packed != size) refuse("\"{}\" in it is compressed", printable(name));
    if (source_.at<uint32_t>(local) != kLocal) refuse("\"{}\" in it is damaged", printable(name));
    const uint64_t begin = local + kLocalBytes + source_.at<uint16_t>(local + 26) + source_.at<uint16_t>(local + 28);
    if (!files_.try_emplace(name, source_.range(begin, size)).second) refuse("\"{}\" is in it twice", printable(name));
    return extra + extra_bytes + comment_bytes;
  }

  const Source& source_;
  std::map<std::string, Bytes> files_;
};

struct StorageType {
  std::string_view name, dtype;
  uint64_t bytes;
};
constexpr StorageType kStorages[] = {
    {"FloatStorage", "F32", 4}, {"HalfStorage", "F16", 2}, {"BFloat16Storage", "BF16", 2}, {"DoubleStorage", "F64", 8}};

struct Node {
  enum class Kind {
    nothing,
    number,
    text,
    list,
    dictionary,
    mark,
    ordered_dictionary,
    rebuild,
    storage_type,
    storage,
    tensor
  };
  Kind kind = Kind::nothing;
  int64_t number = 0;        // of a storage: its elements; of a tensor: its first
  std::string text;          // of a storage: its key
  std::vector<Node*> items;  // of a dictionary: keys and values in turn
  const StorageType* type = nullptr;
  Node* storage = nullptr;
  std::vector<int64_t> shape, strides;
};
using Kind = Node::Kind;

// Runs the instructions. All nodes belong to the machine, so that they may refer to each other in any way.
class Machine {
 public:
  explicit Machine(const Source& source) : source_(source) {}

  const Node& run() {
    for (;;) {
      const auto code = static_cast<unsigned char>(next<uint8_t>());
      if (code == '.') return *pop();
      execute(code);
    }
  }

 private:
  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    source_.report().refuse(format, std::forward<Args>(args)...);
  }
  template <class Number>
  Number next() {
    const auto number = source_.at<Number>(at_);
    at_ += sizeof(Number);
    return number;
  }
  std::string next_text(uint64_t count) {
    std::string text = source_.text(at_, count);
    at_ += count;
    return text;
  }
  std::string next_line() {
    std::string line;
    for (char c = 0; (c = static_cast<char>(next<uint8_t>())) != '\n';) line += c;
    return line;
  }

  Node* make(Kind kind) {
    if (nodes_.size() == kMostNodes) refuse("the pickle has more than {} values", kMostNodes);
    nodes_.push_back(std::make_unique<Node>());
    nodes_.back()->kind = kind;
    return nodes_.back().get();
  }
  void push(Node* node) { stack_.push_back(node); }
  Node* pop() {
    if (stack_.empty()) refuse("an instruction of the pickle finds no value");
    Node* const node = stack_.back();
    stack_.pop_back();
    return node;
  }
  Node* top(Kind kind) {
    if (stack_.empty() || stack_.back()->kind != kind) refuse("the pickle fills something else than a container");
    return stack_.back();
  }
  std::vector<Node*> pop_to_mark() {
    std::vector<Node*> items;
    for (Node* node = pop(); node->kind != Kind::mark; node = pop()) items.push_back(node);
    std::ranges::reverse(items);
    return items;
  }
  void push_number(int64_t number) {
    push(make(Kind::number));
    stack_.back()->number = number;
  }
  void push_text(std::string text) {
    push(make(Kind::text));
    stack_.back()->text = std::move(text);
  }
  void push_list(std::vector<Node*> items) {
    push(make(Kind::list));
    stack_.back()->items = std::move(items);
  }
  void push_tuple(int count) {
    std::vector<Node*> items(count);
    for (int i = count; i-- > 0;) items[i] = pop();
    push_list(std::move(items));
  }
  void memoize(uint64_t index) {
    if (stack_.empty()) refuse("an instruction of the pickle finds no value");
    memo_[index] = stack_.back();
  }
  void recall(uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) refuse("the pickle refers to a value that is missing");
    push(found->second);
  }
  void add_items(Kind kind, const std::vector<Node*>& items) {
    Node* const container = top(kind);
    if (kind == Kind::dictionary && items.size() % 2 != 0)
      refuse("a dictionary in the pickle has a name without a value");
    container->items.insert(container->items.end(), items.begin(), items.end());
  }

  void push_global() {
    const std::string module = next_line(), name = next_line();
    if (module == "collections" && name == "OrderedDict") return push(make(Kind::ordered_dictionary));
    if (module == "torch._utils" && name == "_rebuild_tensor_v2") return push(make(Kind::rebuild));
    const auto type = std::ranges::find(kStorages, name, &StorageType::name);
    if (module != "torch" || type == std::end(kStorages))
      refuse("the pickle asks for {}.{}", printable(module), printable(name));
    push(make(Kind::storage_type));
    stack_.back()->type = type;
  }

  // ("storage", type, key, device, elements)
  void push_storage() {
    const Node& id = *pop();
    const auto& items = id.items;
    const bool fits = id.kind == Kind::list && items.size() == 5 && items[0]->text == "storage" &&
                      items[1]->kind == Kind::storage_type && items[2]->kind == Kind::text &&
                      items[4]->kind == Kind::number && items[4]->number >= 0;
    if (!fits) refuse("the pickle refers to something else than a storage of numbers");
    Node* const storage = make(Kind::storage);
    storage->type = items[1]->type;
    storage->text = items[2]->text;
    storage->number = items[4]->number;
    push(storage);
  }

  static bool are_numbers(const Node& list) {
    return list.kind == Kind::list && std::ranges::all_of(list.items, [](const Node* item) {
             return item->kind == Kind::number && item->number >= 0;
           });
  }
  static std::vector<int64_t> numbers_of(const Node& list) {
    std::vector<int64_t> numbers;
    for (const Node* item : list.items) numbers.push_back(item->number);
    return numbers;
  }

  void reduce() {
    const Node& arguments = *pop();
    const Node& function = *pop();
    const auto& items = arguments.items;
    if (function.kind == Kind::ordered_dictionary && arguments.kind == Kind::list && items.empty())
      return push(make(Kind::dictionary));
    // storage, first element, sizes, strides, …
    const bool fits = function.kind == Kind::rebuild && arguments.kind == Kind::list && items.size() >= 4 &&
                      items[0]->kind == Kind::storage && items[1]->kind == Kind::number && items[1]->number >= 0 &&
                      are_numbers(*items[2]) && are_numbers(*items[3]) &&
                      items[2]->items.size() == items[3]->items.size() && items[2]->items.size() <= kMostDimensions;
    if (!fits) refuse("the pickle calls something else than a tensor");
    Node* const tensor = make(Kind::tensor);
    tensor->storage = items[0];
    tensor->number = items[1]->number;
    tensor->shape = numbers_of(*items[2]);
    tensor->strides = numbers_of(*items[3]);
    push(tensor);
  }

  void push_long() {
    const auto bytes = next<uint8_t>();
    if (bytes > 8) refuse("a number in the pickle does not fit 64 bits");
    uint64_t number = 0;
    for (int i = 0; i < bytes; ++i) number |= static_cast<uint64_t>(next<uint8_t>()) << (8 * i);
    if (bytes > 0 && bytes < 8 && (number >> (8 * bytes - 1) & 1)) number |= ~uint64_t{0} << (8 * bytes);
    push_number(static_cast<int64_t>(number));
  }

  void execute(unsigned char code) {
    switch (code) {
      case 0x80:  // the protocol
        next<uint8_t>();
        return;
      case 0x95:  // a frame
        next<uint64_t>();
        return;
      case 'c':
        return push_global();
      case 'Q':
        return push_storage();
      case 'R':
        return reduce();
      case 'b':  // attributes of a dictionary: torch's names of versions
        pop();
        return;
      case 'N':
      case 0x88:  // true
      case 0x89:  // false
        return push(make(Kind::nothing));
      case '(':
        return push(make(Kind::mark));
      case ')':
      case ']':
        return push_list({});
      case '}':
        return push(make(Kind::dictionary));
      case 't':
        return push_list(pop_to_mark());
      case 0x85:
      case 0x86:
      case 0x87:
        return push_tuple(code - 0x84);
      case 'a':
        return add_items(Kind::list, {pop()});
      case 'e':
        return add_items(Kind::list, pop_to_mark());
      case 's': {
        Node* const value = pop();
        Node* const key = pop();
        return add_items(Kind::dictionary, {key, value});
      }
      case 'u':
        return add_items(Kind::dictionary, pop_to_mark());
      default:
        return execute_number(code);
    }
  }

  void execute_number(unsigned char code) {
    switch (code) {
      case 'X':
        return push_text(next_text(next<uint32_t>()));
      case 0x8c:
        return push_text(next_text(next<uint8_t>()));
      case 'J':
        return push_number(next<int32_t>());
      case 'K':
        return push_number(next<uint8_t>());
      case 'M':
        return push_number(next<uint16_t>());
      case 0x8a:
        return push_long();
      case 'q':
        return memoize(next<uint8_t>());
      case 'r':
        return memoize(next<uint32_t>());
      case 0x94:
        return memoize(memo_.size());
      case 'h':
        return recall(next<uint8_t>());
      case 'j':
        return recall(next<uint32_t>());
      default:
        refuse("the pickle has an instruction 0x{:02x}, which no dictionary of tensors needs", code);
    }
  }

  const Source& source_;
  uint64_t at_ = 0;
  static constexpr size_t kMostNodes = size_t{1} << 22, kMostDimensions = 32;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<Node*> stack_;
  std::map<uint64_t, Node*> memo_;
};

// The bytes of a tensor that lies in its storage row by row.
Bytes bytes_of(const Node& tensor, Bytes storage, const std::string& name, const Reporter& report) {
  constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
  const uint64_t size = tensor.storage->type->bytes;
  uint64_t elements = 1, without_zeros = 1;  // a dimension of 0 does not excuse the others
  for (size_t i = tensor.shape.size(); i-- > 0;) {
    const auto own = static_cast<uint64_t>(tensor.shape[i]);
    if (own > 1 && static_cast<uint64_t>(tensor.strides[i]) != elements)
      report.refuse("tensor \"{}\" is not stored row by row", printable(name));
    const uint64_t least = std::max<uint64_t>(own, 1);
    if (without_zeros > kMost / least) report.refuse("tensor \"{}\" is too large", printable(name));
    without_zeros *= least;
    elements *= own;
  }
  const auto first = static_cast<uint64_t>(tensor.number);
  const uint64_t there = storage.size() / size;
  if (first > there || elements > there - first)
    report.refuse("tensor \"{}\" ends behind its storage", printable(name));
  return storage.subspan(first * size, elements * size);
}

}  // namespace

std::vector<StoredTensor> read_pickled_tensors(const fs::path& path) {
  const auto file = std::make_shared<const MappedFile>(path);
  const Reporter report{path};
  const Source source(file->bytes(), report);
  const Archive archive(source);
  const auto pickle = std::ranges::find_if(archive.files(), [](const auto& entry) {
    return entry.first.ends_with("/data.pkl") || entry.first == "data.pkl";
  });
  if (pickle == archive.files().end()) report.refuse("the archive holds no data.pkl");
  if (pickle->second.size() > kMostPickleBytes) report.refuse("its data.pkl has {} bytes", pickle->second.size());
  const std::string folder = pickle->first.substr(0, pickle->first.size() - std::string_view("data.pkl").size());
  if (const auto order = archive.files().find(folder + "byteorder"); order != archive.files().end())
    if (std::string_view(reinterpret_cast<const char*>(order->second.data()), order->second.size()) != "little")
      report.refuse("its numbers are not little-endian");

  const Source code(pickle->second, report);
  Machine machine(code);
  const Node& all = machine.run();
  if (all.kind != Kind::dictionary) report.refuse("the pickle is no dictionary");
  std::vector<StoredTensor> tensors;
  for (size_t i = 0; i < all.items.size(); i += 2) {
    const Node &name = *all.items[i], &tensor = *all.items[i + 1];
    if (name.kind != Kind::text || tensor.kind != Kind::tensor)
      report.refuse("the pickle holds more than tensors by name");
    const auto storage = archive.files().find(folder + "data/" + tensor.storage->text);
    if (storage == archive.files().end())
      report.refuse("the storage of tensor \"{}\" is missing", printable(name.text));
    const Bytes bytes = bytes_of(tensor, storage->second, name.text, report);
    tensors.push_back({name.text, std::string(tensor.storage->type->dtype), tensor.shape, bytes, file});
  }
  std::ranges::sort(tensors, {}, &StoredTensor::name);
  const auto twice = std::ranges::adjacent_find(tensors, {}, &StoredTensor::name);
  if (twice != tensors.end()) report.refuse("tensor \"{}\" appears twice", printable(twice->name));
  return tensors;
}

}  // namespace furious
