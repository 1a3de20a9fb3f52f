#include "train/options.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numbers>
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
#include "tensor/device.h"
#include "train/log_writer.h"

namespace furious {
namespace {

constexpr int64_t kAny = int64_t{1} << 60;  // arithmetic on it does not overflow
constexpr const char *kConstant = "constant", *kLinear = "linear", *kCosine = "cosine", *kWsd = "wsd";

template <class Number>
Number parsed(const std::string& name, const std::string& text) {
  const auto value = parse_number<Number>(text);
  require(value.has_value(), "{}: \"{}\" is not {}", name, text,
          std::is_floating_point_v<Number> ? "a number" : "an integer");
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

  void log_formats(const std::string& name, std::string TrainOptions::*field, const std::string& help) {
    add(
        name, help, TrainOption::Kind::text, [field](const TrainOptions& o) { return o.*field; },
        [field](TrainOptions& o, const std::string& value) {
          log_formats_from_names(value);
          o.*field = value;
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
    rows.push_back({name, {}, help, kind, fixed, std::move(get), std::move(set)});
  }
};

std::vector<TrainOption> make_table() {
  using O = TrainOptions;
  Table t;
  t.fixed = true;
  t.text("arch", &O::arch, "Architecture of the model; `furious presets` lists them");
  t.text("size", &O::size, "Size of the model: tiny, mini, small, medium");
  t.number("hidden", &O::hidden, 0, 1 << 20, "Width of the model (hidden size); 0: that of --size");
  t.number("intermediate", &O::intermediate, 0, 1 << 20, "Width of the MLP (intermediate size); 0: that of --size");
  t.number("heads", &O::heads, 0, 1 << 16, "Number of heads; 0: that of --size");
  t.number("layers", &O::layers, 0, 1 << 16, "Number of layers; 0: that of --size");
  t.number("qk-heads", &O::qk_heads, 0, 1 << 16, "Number of heads of Q and K, shared by the heads of V; 0: no sharing");
  t.number("qk-dim", &O::qk_dim, 0, kLargestDim,
           "Dimension of Q and K in a head, which determines the size of the state; 0: that of V");
  t.flag("tie-embeddings", &O::tie_embeddings, "Use the embedding as output projection");
  t.text("switches", &O::switches, "Switches of the block to change: conv_window=3,norm=none");
  t.text(
      "initialization", &O::initialization,
      "Initialization of new weights: furious, pytorch (layers as nn.Linear and nn.Conv1d), identity (the convolution "
      "starts as the identity)",
      initialization_names());
  t.text("packing", &O::packing,
         "Rows of a batch: packed (windows over the concatenated documents), isolated (the same, with attention "
         "limited to "
         "the document), rows (one document per row, padded)",
         {name_of(Packing::packed), name_of(Packing::isolated), name_of(Packing::rows)});
  t.flag("bos", &O::bos, "With --packing rows: begin every row with bos");
  t.number("batch", &O::batch, 1, 1 << 24, "Number of sequences in a step, over all processes");
  t.number("length", &O::length, 1, 1 << 26, "Number of tokens in a sequence");
  t.number("seed", &O::seed, 0, std::numeric_limits<uint64_t>::max(),
           "Seed of the weights and of the order of the data");
  t.number("shuffle-window", &O::shuffle_window, 0, kAny,
           "Shuffle the rows within windows of this many rows (documents with --packing rows); 0: all of the data");
  t.fixed = false;
  t.text("data", &O::data,
         "Folder of token shards written by `furious tokenize`; several as a:0.7,b:0.3, with shares of the rows; or "
         "synthetic:recall, synthetic:passkey, synthetic:lookup");
  t.text("init", &O::init, "Start from the weights of this model");
  t.number("accumulate", &O::accumulate, 1, 1 << 24, "Number of micro-batches in a batch (gradient accumulation)");
  t.number("steps", &O::steps, 1, kAny, "Number of optimizer steps in total");
  t.number("lr", &O::lr, 0, 1e3, "Learning rate after the warm-up");
  t.number("warmup", &O::warmup, 0, kAny, "Number of steps of linear warm-up");
  t.text(
      "schedule", &O::schedule,
      "Learning rate after the warm-up: constant, linear (decay), cosine, wsd (warm-up, stable, decay: constant, then "
      "linear decay at the end)",
      {kConstant, kLinear, kCosine, kWsd});
  t.number("schedule-steps", &O::schedule_steps, 0, kAny,
           "Step at which the decay of the learning rate ends; 0: the last step");
  t.number("decay-steps", &O::decay_steps, 0, kAny,
           "Number of steps of the decay, before its end; 0: all after the warm-up, with wsd a fifth of all steps");
  t.number("min-lr", &O::min_lr, 0, 1e3, "Learning rate with which the decay ends");
  t.fixed = true;
  t.text("optimizer", &O::optimizer,
         "Optimizer: adamw, or muon (Muon for the matrices of the layers, AdamW for the rest)", {"adamw", "muon"});
  t.fixed = false;
  t.number("weight-decay", &O::weight_decay, 0, 1e3, "Weight decay of AdamW and Muon");
  t.text("decay-on", &O::decay_on,
         "Parameters with weight decay: all, matrices (no vectors, norms, convolutions), layers (the same without "
         "embedding and output projection)",
         {"all", "matrices", "layers"});
  t.number("beta1", &O::beta1, 0, 1, "Decay of the first moment of AdamW");
  t.number("beta2", &O::beta2, 0, 1, "Decay of the second moment of AdamW");
  t.number("eps", &O::eps, 1e-30, 1, "Epsilon of AdamW, added to the root of the second moment");
  t.number("muon-momentum", &O::muon_momentum, 0, 1, "Momentum of Muon");
  t.number("clip", &O::clip, 0, 1e9, "Clip the gradient to this norm; 0: no clipping");
  t.rows.back().alias = "grad-clip";
  t.number("z-loss", &O::z_loss, 0, 1e3,
           "Factor of the squared log-sum-exp of the logits, which is added to the loss in training; 0: none");
  t.fixed = true;
  t.number("ema", &O::ema, 0, 1,
           "Decay of an exponential moving average of the weights, saved as a model in the folder ema of every "
           "checkpoint; 0: none");
  t.fixed = false;
  t.text("device", &O::device, "Device: cpu, cuda or cuda:N; auto: a GPU if there is one");
  t.text("dtype", &O::dtype,
         "Dtype of matrix products, on a GPU also of activations: f32, bf16, tf32 (f32 with products in TF32), or fp8 "
         "(bf16 "
         "with the products of linear layers in 8 bits, each matrix with a scale of its own); auto: bf16 on a GPU, f32 "
         "on a "
         "CPU",
         {"auto", "f32", "tf32", "bf16", "fp8"});
  t.text("mixer-precision", &O::mixer_precision,
         "Precision of the products inside the mixer, on a GPU: bf16, tf32, tf32x3, f32; auto: that of the activations",
         mixer_precision_names());
  t.number("threads", &O::threads, 0, 4096, "Number of CPU threads; 0: all cores");
  t.flag("recompute", &O::recompute,
         "Recompute layers in the backward pass (activation checkpointing): less memory, more computation");
  t.text("reduce", &O::reduce, "Dtype in which several processes send gradients: f32, bf16", {"f32", "bf16"});
  t.number("timeout", &O::timeout, 1, 1e9, "Seconds after which a process that does not answer counts as lost");
  t.text("out", &O::out, "Folder of the run: log, options and checkpoints");
  t.resume("resume",
           "Resume from the newest checkpoint, bit for bit; --resume=previous: from the newest undamaged older one");
  t.number("eval-every", &O::eval_every, 0, kAny, "Compute the test loss every N steps; 0: never");
  t.number("eval-batches", &O::eval_batches, 0, kAny, "Number of batches of a test loss; 0: the whole test split");
  t.number("save-every", &O::save_every, 0, kAny, "Save a checkpoint every N steps; 0: only at the end");
  t.number("keep", &O::keep, 1, kAny, "Number of checkpoints to keep");
  t.number("sample-every", &O::sample_every, 0, kAny, "Generate a sample of text every N steps; 0: never");
  t.number("sample-tokens", &O::sample_tokens, 1, 1 << 20, "Number of tokens in a sample");
  t.flag("log-values", &O::log_values,
         "Log the RMS of the values that enter the mixer of each layer, with every test loss");
  t.log_formats("log", &O::log,
                "Copies of log.jsonl for other programs: csv (log.csv), tensorboard (event files), or csv,tensorboard");
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
    if (option.name == name || option.alias == name) return option.set(options, text);
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
    require(equals != std::string::npos, "\"{}\" is not an option and its value; expected NAME = VALUE",
            printable(line));
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
  for (const TrainOption& option : train_options())
    option.set(ignored, option.get(options));  // a program may set any value
  require(options.batch % options.accumulate == 0,
          "train: a batch of {} cannot be divided into {} micro-batches; change --batch or "
          "--accumulate",
          options.batch, options.accumulate);
  require(options.schedule_steps == 0 || options.schedule_steps > options.warmup,
          "train: schedule-steps is {}, expected more than warmup ({})", options.schedule_steps, options.warmup);
  require(
      !options.bos || packing_from_name(options.packing) == Packing::rows,
      "train: --bos needs --packing rows, but the packing is {}; use --packing rows, or write bos into the shards with "
      "`furious tokenize --bos`",
      options.packing);
  require(options.beta1 < 1 && options.beta2 < 1, "train: beta1 and beta2 are {} and {}, expected less than 1",
          options.beta1, options.beta2);
  require(options.muon_momentum < 1, "train: muon-momentum is {}, expected less than 1", options.muon_momentum);
  require(options.ema < 1, "train: ema is {}, expected less than 1, such as 0.999", options.ema);
  require(options.min_lr <= options.lr, "train: min-lr is {}, expected at most lr ({})", options.min_lr, options.lr);
}

void check_division(const TrainOptions& options, int ranks) {
  const int64_t unit = ranks * options.accumulate;
  if (options.batch % unit == 0) return;
  std::vector<int64_t> counts;
  for (int64_t count = 1; count <= options.batch / options.accumulate && counts.size() < 12; ++count)
    if (options.batch % (count * options.accumulate) == 0) counts.push_back(count);
  const int64_t below = options.batch / unit * unit;
  fail("train: a batch of {} cannot be divided among {} ranks{}; start {} of them, or use a batch of {}{}",
       options.batch, ranks,
       options.accumulate > 1 ? fmt::format(" with {} micro-batches each", options.accumulate) : "",
       fmt::join(counts, ", "), below > 0 ? fmt::format("{} or ", below) : "", below + unit);
}

namespace {

// A launcher may make a single GPU visible to each process.
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
          "train: mixer-precision {} is not supported on a CPU; use --mixer-precision auto, or a GPU",
          options.mixer_precision);
  return options;
}

std::string slow_precision(const TrainOptions& options) {
  if (device_from_name(options.device).is_cpu()) return {};
  if (options.dtype == "f32")
    return "--dtype f32 does not use the tensor cores: a step needs roughly ten times as long as in bf16; use --dtype "
           "bf16, or tf32 where activations must be f32";
  if (options.dtype == "tf32")
    return "--dtype tf32 needs roughly three times as long as bf16; use --dtype bf16 unless activations must be f32";
  if (options.mixer_precision == "auto" || options.mixer_precision == "bf16") return {};
  return fmt::format(
      "--mixer-precision {} makes the mixer roughly {} times as slow as bf16; use --mixer-precision auto",
      options.mixer_precision,
      options.mixer_precision == "tf32"     ? "five"
      : options.mixer_precision == "tf32x3" ? "nine"
                                            : "thirteen");
}

std::string low_rate(const TrainOptions& options) {
  if (options.steps >= options.warmup || options.lr == 0) return {};
  return fmt::format(
      "the rate never reaches --lr {}: it ends at {:.3g}, since the warm-up takes {} steps and the run has {}; give a "
      "shorter --warmup",
      options.lr, learning_rate(options, options.steps), options.warmup, options.steps);
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
      require(things[name] == text,
              "its {} is {}, but rank 0 has {}; start all ranks with the same options and program", name, things[name],
              text);
  });
}

int threads_for(const TrainOptions& options, const Communicator& ranks) {
  const auto chosen = static_cast<int>(options.threads);
  if (ranks.size() == 1) return chosen;
  return chosen > 0 ? std::min(chosen, ranks.cores()) : ranks.cores();
}

std::vector<KeyValue> key_values(const std::string& text) {
  std::vector<KeyValue> found;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    const size_t equals = part.find('=');
    require(equals != std::string::npos && equals > 0, "\"{}\" in \"{}\" is not KEY=VALUE", part, text);
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
  require(config.hidden % heads == 0, "train: a width of {} is not a multiple of {} heads; change --hidden or --heads",
          config.hidden, heads);
  set_heads(config, preset(options.arch), heads);
  if (options.qk_heads > 0) config.q_heads = config.k_heads = options.qk_heads;
  if (options.qk_dim > 0) config.qk_dim = options.qk_dim;
  config.tie_embeddings = options.tie_embeddings;
  for (const auto& [key, value] : key_values(options.switches)) set_switch(config.block, key, value);
  check_config(config);
  return config;
}

const std::vector<std::string>& model_option_names() {
  static const std::vector<std::string> names = {"arch",   "size",     "hidden", "intermediate",   "heads",
                                                 "layers", "qk-heads", "qk-dim", "tie-embeddings", "switches"};
  return names;
}

TrainOptions model_options(const ModelConfig& config) {
  TrainOptions options;
  options.arch = config.arch;
  const int64_t heads = config.heads() + config.branch / config.head_dim;  // beside a branch there is one
  const auto size = std::ranges::find_if(sizes(), [&](const Size& one) {
    return one.hidden == config.hidden && one.intermediate == config.intermediate && one.layers == config.layers &&
           one.heads == heads;
  });
  if (size != sizes().end()) {
    options.size = size->name;
  } else {
    options.hidden = config.hidden;
    options.intermediate = config.intermediate;
    options.layers = config.layers;
    options.heads = heads;
  }
  if (config.k_heads != config.heads()) options.qk_heads = config.k_heads;
  if (config.branch == 0 && config.qk_dim != config.head_dim) options.qk_dim = config.qk_dim;
  options.tie_embeddings = config.tie_embeddings;
  const auto known = std::ranges::find(presets(), config.arch, &Preset::name);
  if (known != presets().end()) options.switches = switches_between(known->block, config.block);
  return options;
}

Compute compute_options(const TrainOptions& options, Device device) {
  const bool fp8 = options.dtype == "fp8";
  Compute compute = compute_in(fp8 || options.dtype == "bf16" ? DType::bf16 : DType::f32, device);
  if (fp8) compute.precision = MatmulPrecision::fp8;
  if (options.dtype == "tf32") compute.precision = MatmulPrecision::tf32;
  compute.recompute = options.recompute;
  compute.mixer = mixer_precision_from_name(options.mixer_precision);
  return compute;
}

DecayRange decay_range(const TrainOptions& options) {
  if (options.schedule == kConstant) return {kAny, kAny + 1};
  const int64_t end = options.schedule_steps > 0 ? options.schedule_steps : std::max(options.steps, options.warmup + 1);
  int64_t length = options.decay_steps;
  if (length == 0) length = options.schedule == kWsd ? std::max<int64_t>(1, end / 5) : end;
  return {std::max(options.warmup, end - length), end};
}

bool has_stable_phase(const TrainOptions& options) {
  return options.schedule == kWsd;
}

double learning_rate(const TrainOptions& options, int64_t step) {
  const int64_t done = step - 1;
  if (done < options.warmup) return options.lr * static_cast<double>(step) / static_cast<double>(options.warmup);
  const auto [begin, end] = decay_range(options);
  double left = std::clamp(static_cast<double>(end - done) / static_cast<double>(end - begin), 0.0, 1.0);
  if (options.schedule == kCosine) left = (1 + std::cos(std::numbers::pi * (1 - left))) / 2;
  return options.min_lr + (options.lr - options.min_lr) * left;
}

}  // namespace furious
