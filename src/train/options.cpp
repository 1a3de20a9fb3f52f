#include "train/options.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "base/build_info.h"
#include "base/error.h"
#include "base/file.h"
#include "base/hash.h"
#include "base/names.h"
#include "base/number.h"
#include "base/parallel.h"
#include "data/batches.h"
#include "data/utf8.h"
#include "model/config_json.h"
#include "model/language_model.h"
#include "tensor/device.h"

namespace furious {
namespace {

constexpr int64_t kAny = int64_t{1} << 60;  // and one more, or twice as many, is still a number

template <class Number>
Number parsed(const std::string& name, const std::string& text) {
  const auto value = parse_number<Number>(text);
  require(value.has_value(), "{}: \"{}\" is no {}number", name, text, std::is_floating_point_v<Number> ? "" : "whole ");
  return *value;
}

class Table {
 public:
  std::vector<TrainOption> rows;
  bool fixed = false;  // of the rows that follow

  void text(const std::string& name, std::string TrainOptions::*field, const std::string& help,
            const std::vector<std::string>& choices = {}) {
    add(
        name, help, TrainOption::Kind::text, [field](const TrainOptions& o) { return o.*field; },
        [name, field, choices](TrainOptions& o, const std::string& value) {
          if (!choices.empty() && std::find(choices.begin(), choices.end(), value) == choices.end())
            unknown_name(name, value, choices);
          o.*field = value;
        });
  }

  template <class Number>
  void number(const std::string& name, Number TrainOptions::*field, std::type_identity_t<Number> least,
              std::type_identity_t<Number> most, const std::string& help) {
    add(
        name, help, TrainOption::Kind::number, [field](const TrainOptions& o) { return fmt::format("{}", o.*field); },
        [=](TrainOptions& o, const std::string& value) {
          const auto n = parsed<Number>(name, value);
          require(n >= least && n <= most, "{} is {}, expected {}{}", name, n, least,
                  static_cast<double>(most) >= 1e18 ? " or more" : fmt::format(" to {}", most));
          o.*field = n;
        });
  }

  void flag(const std::string& name, bool TrainOptions::*field, const std::string& help) {
    add(
        name, help, TrainOption::Kind::flag,
        [field](const TrainOptions& o) { return std::string(o.*field ? "true" : "false"); },
        [name, field](TrainOptions& o, const std::string& value) {
          require(value == "true" || value == "false", "{}: \"{}\" is neither true nor false", name, value);
          o.*field = value == "true";
        });
  }

  void resume(const std::string& name, const std::string& help) {
    add(
        name, help, TrainOption::Kind::flag,
        [](const TrainOptions& o) {
          return std::string(!o.resume ? "false" : o.resume_previous ? kPrevious : "true");
        },
        [name](TrainOptions& o, const std::string& value) {
          require(value == "true" || value == "false" || value == kPrevious, "{}: \"{}\" is not true, false or {}",
                  name, value, kPrevious);
          o.resume = value != "false";
          o.resume_previous = value == kPrevious;
        });
  }

 private:
  static constexpr const char* kPrevious = "previous";

  void add(const std::string& name, const std::string& help, TrainOption::Kind kind,
           std::function<std::string(const TrainOptions&)> get,
           std::function<void(TrainOptions&, const std::string&)> set) {
    rows.push_back({name, help, kind, fixed, std::move(get), std::move(set)});
  }
};

std::vector<TrainOption> make_table() {
  using O = TrainOptions;
  Table t;
  t.fixed = true;
  t.text("arch", &O::arch, "Architecture; `furious presets` lists them");
  t.text("size", &O::size, "tiny, mini, small, medium");
  t.number("hidden", &O::hidden, 0, 1 << 20, "Width of the model, instead of the size's");
  t.number("intermediate", &O::intermediate, 0, 1 << 20, "Width of the MLP, instead of the size's");
  t.number("heads", &O::heads, 0, 1 << 16, "Heads, instead of the size's");
  t.number("layers", &O::layers, 0, 1 << 16, "Layers, instead of the size's");
  t.number("qk-heads", &O::qk_heads, 0, 1 << 16, "Heads of Q and K, shared by the others; 0: no sharing");
  t.number("qk-dim", &O::qk_dim, 0, kLargestDim,
           "Dimension of Q and K in a head, which decides the size of the state; 0: that of V");
  t.flag("tie-embeddings", &O::tie_embeddings, "Use the embedding as output projection");
  t.text("switches", &O::switches, "Of the block, instead of the architecture's: conv_window=3,norm=none");
  t.text("initialization", &O::initialization,
         "How new weights are drawn: furious, pytorch (inside layers as nn.Linear and nn.Conv1d start), identity (the "
         "convolution passes the current token on)",
         initialization_names());
  t.text("packing", &O::packing, "packed, isolated (documents do not see each other), rows (one each, padded)",
         {name_of(Packing::packed), name_of(Packing::isolated), name_of(Packing::rows)});
  t.flag("bos", &O::bos, "With rows: each begins with bos");
  t.number("batch", &O::batch, 1, 1 << 24, "Sequences in a step");
  t.number("length", &O::length, 1, 1 << 26, "Tokens in a sequence");
  t.number("seed", &O::seed, 0, std::numeric_limits<uint64_t>::max(), "Of weights and order of the data");
  t.fixed = false;
  t.text("data", &O::data, "Folder of `furious tokenize`, or synthetic:recall, synthetic:passkey, synthetic:lookup");
  t.text("init", &O::init, "Begin with the weights of this model");
  t.number("accumulate", &O::accumulate, 1, 1 << 24, "Compute a batch in so many parts");
  t.number("steps", &O::steps, 1, kAny, "Steps of the optimizer in all");
  t.number("lr", &O::lr, 0, 1e3, "Largest learning rate");
  t.number("warmup", &O::warmup, 0, kAny, "Steps of linear growth to it");
  t.number("schedule-steps", &O::schedule_steps, 0, kAny, "Step at which the linear fall reaches zero; 0: the last");
  t.number("weight-decay", &O::weight_decay, 0, 1e3, "Of AdamW");
  t.number("beta1", &O::beta1, 0, 1, "Of AdamW");
  t.number("beta2", &O::beta2, 0, 1, "Of AdamW");
  t.number("eps", &O::eps, 1e-30, 1, "Of AdamW: added to the root of the second moment");
  t.number("clip", &O::clip, 0, 1e9, "Largest norm of the gradient; 0: any");
  t.text("device", &O::device, "cpu, cuda, cuda:N; auto: a GPU if there is one");
  t.text("dtype", &O::dtype,
         "Of products, on a GPU also of activations: f32, bf16; tf32: f32 with products in TF32; auto: bf16 on a GPU",
         {"auto", "f32", "tf32", "bf16"});
  t.text("mixer-precision", &O::mixer_precision,
         "Of the products inside the mixer, on a GPU: bf16, tf32, tf32x3, f32; auto: as the activations",
         mixer_precision_names());
  t.number("threads", &O::threads, 0, 4096, "0: all cores");
  t.flag("recompute", &O::recompute, "Run layers again in the backward pass: less memory, more work");
  t.text("reduce", &O::reduce, "With several processes, what gradients are sent in: f32, bf16", {"f32", "bf16"});
  t.number("timeout", &O::timeout, 1, 1e9, "Seconds after which a process that does not answer is lost");
  t.text("out", &O::out, "Folder of the run");
  t.resume("resume",
           "Go on from the newest checkpoint, bit for bit; --resume=previous: from the newest undamaged one before it");
  t.number("eval-every", &O::eval_every, 0, kAny, "Steps between test losses; 0: never");
  t.number("eval-batches", &O::eval_batches, 0, kAny, "Batches of a test loss; 0: all");
  t.number("save-every", &O::save_every, 0, kAny, "Steps between checkpoints; 0: only at the end");
  t.number("keep", &O::keep, 1, kAny, "Checkpoints that stay");
  t.number("sample-every", &O::sample_every, 0, kAny, "Steps between samples of text; 0: none");
  t.number("sample-tokens", &O::sample_tokens, 1, 1 << 20, "Tokens of a sample");
  t.flag("log-values", &O::log_values, "Log how large the values of each layer are, with every test loss");
  return t.rows;
}

std::string toml_string(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + "\"";
}

}  // namespace

const std::vector<TrainOption>& train_options() {
  static const std::vector<TrainOption> table = make_table();
  return table;
}

void set_train_option(TrainOptions& options, const std::string& name, const std::string& text) {
  std::vector<std::string> known;
  for (const TrainOption& option : train_options()) {
    if (option.name == name) return option.set(options, text);
    known.push_back(option.name);
  }
  unknown_name("option", name, known);
}

std::map<std::string, std::string> to_texts(const TrainOptions& options) {
  std::map<std::string, std::string> texts;
  for (const TrainOption& option : train_options()) texts[option.name] = utf8_of_bytes(option.get(options));
  return texts;
}

std::string to_toml(const TrainOptions& options) {
  std::string text;
  for (const TrainOption& option : train_options()) {
    const std::string value = utf8_of_bytes(option.get(options));
    text += fmt::format("{} = {}\n", option.name, option.kind == TrainOption::Kind::text ? toml_string(value) : value);
  }
  return text;
}

TrainOptions from_toml(const std::string& text) {
  TrainOptions options;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line.starts_with('#')) continue;
    const size_t equals = line.find(" = ");
    require(equals != std::string::npos, "\"{}\" is no option with its value", printable(line));
    std::string value = line.substr(equals + 3);
    if (value.size() >= 2 && value.starts_with('"') && value.ends_with('"')) {
      std::string plain;
      for (size_t i = 1; i + 1 < value.size(); ++i) plain += value[value[i] == '\\' && i + 2 < value.size() ? ++i : i];
      value = plain;
    }
    set_train_option(options, line.substr(0, equals), bytes_of_utf8(value));
  }
  return options;
}

void check_train_options(const TrainOptions& options) {
  TrainOptions ignored;
  for (const TrainOption& option : train_options()) option.set(ignored, option.get(options));  // a program may set any
  require(options.batch % options.accumulate == 0, "train: a batch of {} cannot be computed in {} equal parts",
          options.batch, options.accumulate);
  require(options.schedule_steps == 0 || options.schedule_steps > options.warmup,
          "train: schedule-steps is {}, expected more than the {} of warmup", options.schedule_steps, options.warmup);
  require(!options.bos || packing_from_name(options.packing) == Packing::rows,
          "train: --bos begins rows, but the packing is {}; use --packing rows, or begin documents with bos by "
          "`furious tokenize --bos`",
          options.packing);
  require(options.beta1 < 1 && options.beta2 < 1, "train: beta1 and beta2 are {} and {}, expected less than 1",
          options.beta1, options.beta2);
}

void check_division(const TrainOptions& options, int ranks) {
  const int64_t unit = ranks * options.accumulate;
  if (options.batch % unit == 0) return;
  std::vector<int64_t> counts;
  for (int64_t count = 1; count <= options.batch / options.accumulate && counts.size() < 12; ++count)
    if (options.batch % (count * options.accumulate) == 0) counts.push_back(count);
  const int64_t below = options.batch / unit * unit;
  fail("train: a batch of {} cannot be shared by {} ranks{}; start {} of them, or take a batch of {}{}", options.batch,
       ranks, options.accumulate > 1 ? fmt::format(" in {} parts each", options.accumulate) : "",
       fmt::join(counts, ", "), below > 0 ? fmt::format("{} or ", below) : "", below + unit);
}

namespace {

// Where a launcher shows every process one GPU, that is its own.
Device device_of_rank(const std::string& name, const Communicator& ranks) {
  if (ranks.size() == 1) return usable_device(name);
  Device device = usable_device(name.starts_with("cuda") ? "cuda" : name);
  if (device.is_cpu()) return device;
  const auto found = static_cast<int>(describe_cuda_devices().size());
  require(found == 1 || found >= ranks.local_size(),
          "train: {} ranks on this machine, but {} GPUs; start as many ranks as there are GPUs, or use --device cpu",
          ranks.local_size(), found);
  device.index = ranks.local_rank() % found;
  return device;
}

}  // namespace

TrainOptions resolved(TrainOptions options, const Communicator& ranks) {
  const Device device = device_of_rank(options.device, ranks);
  options.device = name_of(device);
  if (options.dtype == "auto") options.dtype = device.is_cpu() ? "f32" : "bf16";
  require(!device.is_cpu() || options.mixer_precision == "auto" || options.mixer_precision == "f32",
          "train: mixer-precision is {}, but a CPU computes mixers in f32 only; use --mixer-precision auto, or a GPU",
          options.mixer_precision);
  return options;
}

std::string slow_precision(const TrainOptions& options) {
  if (device_from_name(options.device).is_cpu()) return {};
  if (options.dtype == "f32")
    return "--dtype f32 leaves the tensor cores unused: a step takes roughly ten times as long as in bf16; use --dtype "
           "bf16, or tf32 where activations must be f32";
  if (options.dtype == "tf32")
    return "--dtype tf32 takes roughly three times as long as bf16; use --dtype bf16 unless activations must be f32";
  if (options.mixer_precision == "auto" || options.mixer_precision == "bf16") return {};
  return fmt::format(
      "--mixer-precision {} makes the mixer roughly {} times as slow as bf16; use --mixer-precision auto",
      options.mixer_precision,
      options.mixer_precision == "tf32"     ? "five"
      : options.mixer_precision == "tf32x3" ? "nine"
                                            : "thirteen");
}

void check_same_everywhere(const TrainOptions& options, std::map<std::string, std::string> things,
                           Communicator& ranks) {
  if (ranks.size() == 1) return;
  ranks.agree([&] {
    for (const auto& [name, text] : to_texts(options))
      if (!std::set<std::string>{"device", "threads", "data"}.contains(name)) things["--" + name] = text;
    things["device"] = device_from_name(options.device).is_cpu() ? "cpu" : "cuda";
    things["program"] =
        fmt::format("furious {}, {:016x}", version(), hash_of_large(MappedFile("/proc/self/exe").bytes()));
  });
  const std::vector<std::string> all = ranks.all_gather(nlohmann::json(things).dump());
  ranks.agree([&] {
    for (const auto& [name, text] : nlohmann::json::parse(all.front()).get<std::map<std::string, std::string>>())
      require(things[name] == text, "its {} is {}, but rank 0 has {}; start all ranks with the same", name,
              things[name], text);
  });
}

int threads_for(const TrainOptions& options, const Communicator& ranks) {
  const auto asked = static_cast<int>(options.threads);
  if (ranks.size() == 1) return asked;
  return asked > 0 ? std::min(asked, ranks.cores()) : ranks.cores();
}

std::vector<KeyValue> key_values(const std::string& text) {
  std::vector<KeyValue> found;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    const size_t equals = part.find('=');
    require(equals != std::string::npos && equals > 0, "\"{}\" in \"{}\" is no key=value", part, text);
    found.push_back({part.substr(0, equals), part.substr(equals + 1)});
    begin = end + 1;
  }
  return found;
}

ModelConfig model_config(const TrainOptions& options, int64_t vocabulary) {
  ModelConfig config = model_config(options.arch, options.size, vocabulary);
  if (options.hidden > 0) config.hidden = options.hidden;
  if (options.intermediate > 0) config.intermediate = options.intermediate;
  if (options.layers > 0) config.layers = options.layers;
  const int64_t heads = options.heads > 0 ? options.heads : size_heads(options.size);
  require(config.hidden % heads == 0, "train: a width of {} cannot be shared by {} heads", config.hidden, heads);
  set_heads(config, preset(options.arch), heads);
  if (options.qk_heads > 0) config.q_heads = config.k_heads = options.qk_heads;
  if (options.qk_dim > 0) config.qk_dim = options.qk_dim;
  config.tie_embeddings = options.tie_embeddings;
  for (const auto& [key, value] : key_values(options.switches)) set_switch(config.block, key, value);
  check_config(config);
  return config;
}

double learning_rate(const TrainOptions& options, int64_t step) {
  const int64_t end = options.schedule_steps > 0 ? options.schedule_steps : std::max(options.steps, options.warmup + 1);
  const int64_t done = step - 1;
  if (done < options.warmup) return options.lr * static_cast<double>(step) / static_cast<double>(options.warmup);
  const double left = static_cast<double>(end - done) / static_cast<double>(end - options.warmup);
  return options.lr * std::clamp(left, 0.0, 1.0);
}

}  // namespace furious
