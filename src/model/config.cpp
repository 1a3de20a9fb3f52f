#include "model/config.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/names.h"

namespace furious {
namespace {

// Linear attention with an output norm and nothing else: what the paper's ablations start from.
BlockConfig plain() {
  BlockConfig block;
  block.score = Score::linear;
  block.norm = Norm::none;
  block.decay = DecayKind::none;
  block.conv_window = 0;
  return block;
}

BlockConfig with(BlockConfig block, auto&& change) {
  change(block);
  return block;
}

BlockConfig with_conv(BlockConfig block, int64_t window, bool silu_on_qk = false) {
  block.conv_window = window;
  if (silu_on_qk) block.qk_activation = Activation::silu;
  return block;
}

// 2Mamba with another score. Odd powers can sum to nothing, so an output norm takes the place of the sum.
BlockConfig power_of(int64_t degree) {
  BlockConfig block;
  block.score = Score::power;
  block.score_degree = degree;
  block.norm = degree % 2 == 0 ? Norm::sum : Norm::none;
  return block;
}
BlockConfig series_to(int64_t degree) {
  BlockConfig block;
  block.score = Score::series;
  block.score_degree = degree;
  return block;
}

std::vector<Preset> main_presets() {
  const BlockConfig mamba2s = with(with_conv(plain(), 2), [](BlockConfig& b) {
    b.decay = DecayKind::softplus;
    b.discretize = Discretization::dt;
  });
  const BlockConfig two_mamba;
  return {
      {"softmax", "softmax attention with rotary positions",
       with(plain(),
            [](BlockConfig& b) {
              b.score = Score::exponential;
              b.norm = Norm::sum;
              b.rope = true;
            })},
      {"softmax-qk-norm", "softmax attention with rotary positions and an RMSNorm of Q and K per head, as in Qwen3",
       with(plain(),
            [](BlockConfig& b) {
              b.score = Score::exponential;
              b.norm = Norm::sum;
              b.rope = b.qk_norm = true;
            })},
      {"linear", "linear attention, ReLU features, softmax normalization",
       with(plain(),
            [](BlockConfig& b) {
              b.norm = Norm::sum;
              b.qk_activation = Activation::relu;
            })},
      {"linear-outnorm", "linear attention with an output norm: the base of the ablations", plain()},
      {"mamba2", "Mamba-2: conv 4 + SiLU, original A-mask, discretization, D, Z gate",
       with(with_conv(plain(), 4),
            [](BlockConfig& b) {
              b.conv_silu = true;
              b.decay = DecayKind::original;
              b.discretize = Discretization::dt;
              b.dt_bias = b.d_residual = b.z_gate = true;
            })},
      {"mamba2-paper",
       "the authors' Mamba-2 baseline: one head with a state of 128, the rest of the width a gated branch",
       with(with_conv(plain(), 2),
            [](BlockConfig& b) {
              b.conv_bias = b.z_gate_bias = false;
              b.conv_silu = true;
              b.decay = DecayKind::original;
              b.discretize = Discretization::dt;
              b.dt_bias = b.d_residual = b.z_gate = true;
              b.out_norm_eps = 1e-5f;
              b.scale = 1;
            }),
       128},
      {"mamba2s", "Mamba-2S: conv 2, softplus A-mask, discretization", mamba2s},
      {"2mamba", "2Mamba: squared score, conv 2, softplus A-mask, softmax normalization", two_mamba},
      {"2mamba-dt", "2Mamba with value discretization",
       with(two_mamba, [](BlockConfig& b) { b.discretize = Discretization::dt; })},
      {"2mamba-e", "2Mamba-E: exponential score",
       with(two_mamba, [](BlockConfig& b) { b.score = Score::exponential; })},
      {"2mamba-e-dt", "2Mamba-E with value discretization",
       with(two_mamba,
            [](BlockConfig& b) {
              b.score = Score::exponential;
              b.discretize = Discretization::dt;
            })},
      {"2mamba-outnorm", "2Mamba with an output norm instead",
       with(two_mamba, [](BlockConfig& b) { b.norm = Norm::none; })},
      {"2mamba-outnorm-dt", "2Mamba with an output norm instead and value discretization",
       with(two_mamba,
            [](BlockConfig& b) {
              b.norm = Norm::none;
              b.discretize = Discretization::dt;
            })},
      {"2mamba-square-mask", "2Mamba with the square after the mask: (QK ⊙ A)²",
       with(two_mamba, [](BlockConfig& b) { b.square_mask = true; })},
      {"2mamba-3", "2Mamba of third order: score x³, output norm", power_of(3)},
      {"2mamba-4", "2Mamba of fourth order: score x⁴", power_of(4)},
      {"2mamba-series-2", "2Mamba-E with the exponential cut off after x²/2", series_to(2)},
      {"2mamba-series-4", "2Mamba-E with the exponential cut off after x⁴/24", series_to(4)},
      {"fox", "Forgetting Transformer: exponential score, log-sigmoid decay, no convolution",
       with(plain(),
            [](BlockConfig& b) {
              b.score = Score::exponential;
              b.norm = Norm::sum;
              b.decay = DecayKind::log_sigmoid;
              b.decay_bias = true;
            })},
      {"mamba2s-silu", "Mamba-2S + SiLU on Q and K",
       with(mamba2s, [](BlockConfig& b) { b.qk_activation = Activation::silu; })},
      {"mamba2s-d", "Mamba-2S + D residual", with(mamba2s, [](BlockConfig& b) { b.d_residual = true; })},
      {"mamba2s-z", "Mamba-2S + Z gate", with(mamba2s, [](BlockConfig& b) { b.z_gate = true; })},
  };
}

// The rows of the paper's tables that are not architectures of their own.
std::vector<Preset> ablation_presets() {
  std::vector<Preset> rows;
  rows.push_back({"outnorm-relu", "output norm + ReLU",
                  with(plain(), [](BlockConfig& b) { b.qk_activation = Activation::relu; })});
  for (int64_t window : {2, 3, 4}) {
    rows.push_back({fmt::format("outnorm-conv{}", window), fmt::format("output norm + conv {}", window),
                    with_conv(plain(), window)});
    rows.push_back({fmt::format("outnorm-conv{}-silu", window), fmt::format("output norm + conv {} + SiLU", window),
                    with_conv(plain(), window, true)});
  }
  rows.push_back({"outnorm-d", "output norm + D residual", with(plain(), [](BlockConfig& b) { b.d_residual = true; })});
  rows.push_back({"outnorm-z", "output norm + Z gate", with(plain(), [](BlockConfig& b) { b.z_gate = true; })});
  rows.push_back({"outnorm-dt", "output norm + value discretization",
                  with(plain(), [](BlockConfig& b) { b.discretize = Discretization::dt; })});
  for (const auto& [name, kind] : {std::pair{"original", DecayKind::original}, {"softplus", DecayKind::softplus}}) {
    const auto masked = [kind = kind](BlockConfig& b) { b.decay = kind; };
    rows.push_back(
        {fmt::format("outnorm-a-{}", name), fmt::format("output norm + {} A-mask", name), with(plain(), masked)});
    rows.push_back({fmt::format("conv2-a-{}", name), fmt::format("output norm + conv 2 + {} A-mask", name),
                    with(with_conv(plain(), 2), masked)});
  }
  return rows;
}

template <class Entry>
const Entry& find_by_name(std::string_view kind, std::string_view name, const std::vector<Entry>& entries) {
  std::vector<std::string> known;
  for (const Entry& entry : entries) {
    if (entry.name == name) return entry;
    known.push_back(entry.name);
  }
  unknown_name(kind, name, known);
}

}  // namespace

MixerSpec BlockConfig::mixer() const {
  MixerSpec spec;
  spec.score = score;
  spec.degree = static_cast<int>(score_degree);
  spec.decay = decay != DecayKind::none;
  spec.signed_decay = decay == DecayKind::softplus2 || decay == DecayKind::silu;
  spec.norm = norm;
  spec.scale = scale;
  spec.window = window;
  return spec;
}

int64_t ModelConfig::heads() const {
  return std::max({q_heads, k_heads, v_heads});
}

int64_t ModelConfig::states() const {
  return std::lcm(std::lcm(k_heads, v_heads), block.decay == DecayKind::none ? 1 : decays());
}

const std::vector<Preset>& presets() {
  static const std::vector<Preset> all = [] {
    std::vector<Preset> list = main_presets();
    for (Preset& row : ablation_presets()) list.push_back(std::move(row));
    return list;
  }();
  return all;
}

const Preset& preset(std::string_view name) {
  return find_by_name("architecture", name, presets());
}

const std::vector<Size>& sizes() {
  static const std::vector<Size> all{{"tiny", 128, 256, 4, 5},
                                     {"mini", 384, 768, 6, 8},
                                     {"small", 1024, 2048, 16, 20},
                                     {"medium", 1536, 3072, 24, 27}};
  return all;
}

int64_t size_heads(std::string_view size) {
  return find_by_name("size", size, sizes()).heads;
}

ModelConfig model_config(std::string_view arch, std::string_view size, int64_t vocabulary) {
  const Preset& architecture = preset(arch);
  const Size& dimensions = find_by_name("size", size, sizes());
  ModelConfig config;
  config.arch = architecture.name;
  config.block = architecture.block;
  config.vocabulary = vocabulary;
  config.hidden = dimensions.hidden;
  config.intermediate = dimensions.intermediate;
  config.layers = dimensions.layers;
  set_heads(config, architecture, dimensions.heads);
  check_config(config);
  return config;
}

void set_heads(ModelConfig& config, const Preset& preset, int64_t heads) {
  config.head_dim = config.qk_dim = config.hidden / heads;
  config.branch = 0;
  if (preset.single_head_state > 0) {
    heads = 1;
    config.qk_dim = preset.single_head_state;
    config.branch = config.hidden - config.head_dim;
  }
  config.q_heads = config.k_heads = config.v_heads = heads;
}

void check_config(const ModelConfig& config) {
  const BlockConfig& block = config.block;
  const auto positive = [](std::string_view what, int64_t value) {
    require(value >= 1, "model: {} is {}, expected 1 or more", what, value);
  };
  positive("vocabulary", config.vocabulary);
  positive("hidden", config.hidden);
  if (config.mlp != Mlp::none) positive("intermediate", config.intermediate);
  require(config.mlp != Mlp::none || (config.intermediate == 0 && !config.mlp_bias),
          "model: no MLP, but intermediate is {} or there is a bias", config.intermediate);
  positive("layers", config.layers);
  for (int64_t own : {config.q_heads, config.k_heads, config.v_heads})
    require(own >= 1 && config.heads() % own == 0, "model: {} heads, expected a divisor of {}", own, config.heads());
  require(config.decay_heads == 0 || (config.decay_heads > 0 && config.heads() % config.decay_heads == 0 &&
                                      block.has_decay_projection() && block.decay != DecayKind::softplus_dt),
          "model: {} heads of decay need a decay with a projection and without dt, and {} heads that they divide",
          config.decay_heads, config.heads());
  require(block.window == 0 || (block.window > 0 && block.score == Score::exponential && block.norm == Norm::sum &&
                                block.decay == DecayKind::none),
          "model: a sliding window of {} tokens, but only softmax without decay has one", block.window);
  for (int64_t dim : {config.head_dim, config.qk_dim})
    require(dim >= kSmallestDim && dim <= kLargestDim, "model: head dimension {}, expected {} to {}", dim, kSmallestDim,
            kLargestDim);
  require(config.branch >= 0, "model: branch is {}, expected 0 or more", config.branch);
  require(block.out_norm_groups == 1 || (block.norm == Norm::none && block.out_norm_groups >= 1 &&
                                         config.out_width() % block.out_norm_groups == 0),
          "model: an output norm of {} groups needs no norm in the mixer and a width of {} that they divide",
          block.out_norm_groups, config.out_width());
  require(!block.z_gate_sigmoid || (block.z_gate && block.norm == Norm::sum),
          "model: z_gate_sigmoid needs z_gate and the sum norm");
  require(!block.qk_norm_per_head || block.qk_norm, "model: qk_norm_per_head needs qk_norm");
  require(block.conv_window == 0 || (block.conv_window >= 2 && block.conv_window <= 4),
          "model: conv window {}, expected 0 (none), 2, 3 or 4", block.conv_window);
  require(block.qk_activation <= Activation::silu,
          "model: an activation of Q and K that is none of none, relu and silu");
  require(!block.conv_silu || block.conv_window > 0, "model: SiLU after a convolution, but there is no convolution");
  const bool power = block.score == Score::power, series = block.score == Score::series;
  if (power)
    require(block.score_degree >= 3 && block.score_degree <= kLargestDegree,
            "model: score power with score_degree {}, expected 3 to {}; 1 and 2 are the scores linear and squared",
            block.score_degree, kLargestDegree);
  else if (series)
    require(block.score_degree >= 1 && block.score_degree <= kLargestDegree,
            "model: score series with score_degree {}, expected 1 to {}", block.score_degree, kLargestDegree);
  else
    require(block.score_degree == 0, "model: score_degree {}, but only the scores power and series have a degree",
            block.score_degree);
  const bool odd = block.score == Score::linear || ((power || series) && block.score_degree % 2 == 1);
  require(!block.qk_norm || block.qk_activation == Activation::none,
          "model: qk_norm and an activation of Q and K; use one of them");
  require(!odd || block.norm != Norm::sum || block.qk_activation == Activation::relu,
          "model: {} score under the sum norm needs features that are not negative (its sum may be 0 otherwise); "
          "use ReLU on Q and K, or no norm in the mixer",
          block.score == Score::linear ? "a linear" : "an odd");
  require(!block.square_mask || (block.score == Score::squared && block.decay != DecayKind::none),
          "model: square_mask needs the squared score and a decay");
  require(!block.decay_bias || block.has_decay_projection(), "model: decay_bias, but the decay has no projection");
  require(!block.dt_bias || block.has_dt(), "model: dt bias without a dt: neither discretization nor original decay");
  require(block.dt_limit == 0 || (block.has_dt() && block.dt_limit > 0),
          "model: dt_limit {} needs a dt; use discretize=dt or decay=original, or a dt_limit of 0", block.dt_limit);
  require(block.dt_least == 0 ||
              (block.has_dt() && block.dt_least > 0 && (block.dt_limit == 0 || block.dt_least <= block.dt_limit)),
          "model: dt_least {} needs a dt, and a dt_limit that is not smaller", block.dt_least);
  const bool per_value =
      block.d_residual || block.discretize == Discretization::dt || block.discretize == Discretization::sigmoid;
  require(!per_value || config.v_heads == config.heads(),
          "model: {} heads of V shared by {}, but dt and D are of each head; use as many heads of V, or neither",
          config.v_heads, config.heads());
  const RopeScaling& scaling = block.rope_scaling;
  require(scaling == RopeScaling() || (block.rope && scaling.factor > 0 && scaling.original >= 0 &&
                                       (scaling.original == 0 || scaling.high > scaling.low)),
          "model: rotary positions scaled by {} from {} to {} turns; expected rope, a positive factor and a range",
          scaling.factor, scaling.low, scaling.high);
  require(!block.rope || config.qk_dim % 2 == 0, "model: rotary positions need an even head dimension, got {}",
          config.qk_dim);
}

int64_t state_numbers(const ModelConfig& config) {
  const MixerSpec spec = config.block.mixer();
  return config.states() * state_rows(spec, config.qk_dim) * state_columns(spec, config.head_dim);
}

int64_t cache_numbers(const ModelConfig& config, int64_t length) {
  const int64_t kept = config.block.window > 0 ? std::min(length, config.block.window) : length;
  const int64_t key_value = kept * (config.k_heads * config.qk_dim + config.v_heads * config.head_dim);
  const int64_t state = state_numbers(config);
  const int64_t conv = std::max<int64_t>(0, config.block.conv_window - 1) * config.qkv_width();
  return config.layers * (conv + (state > 0 ? std::min(key_value, state) : key_value));
}

}  // namespace furious
