#include "decode/token_plan.h"

#include <algorithm>
#include <array>

namespace furious {
namespace {

class Fuser {
 public:
  explicit Fuser(const Plan& plan)
      : plan_(plan), readers_(plan.values.size()), writer_(plan.values.size(), kNo), joined_(plan.ops.size()) {
    for (size_t i = 0; i < plan.ops.size(); ++i) {
      for (const Value v : inputs_of(plan.ops[i])) readers_[v].push_back(static_cast<int>(i));
      for (const Value v : outputs_of(plan.ops[i])) writer_[v] = static_cast<int>(i);
    }
  }

  TokenPlan fuse() {
    for (size_t i = 0; i < plan_.values.size(); ++i) places_.push_back({static_cast<Value>(i), 0});
    std::vector<std::vector<TokenOp>> at(plan_.ops.size());  // by the operation of the plan they replace
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      const int op = static_cast<int>(i);
      if (joined_[i]) continue;
      if (const auto* split = as<SplitOp>(op)) place_parts(*split);
      if (as<MixerOp>(op)) at[i] = {fuse_mixer(op)};
      if (as<RmsNormOp>(op) || as<SwigluOp>(op) || as<LinearOp>(op)) at[i] = fuse_linear(op);
    }
    TokenPlan result{plan_, {}, {}};
    for (size_t i = 0; i < plan_.ops.size(); ++i) {
      if (!at[i].empty())
        std::ranges::move(at[i], std::back_inserter(result.ops));
      else if (!joined_[i])
        result.ops.push_back({plan_.ops[i], {static_cast<int>(i)}});
    }
    result.places = std::move(places_);
    return result;
  }

 private:
  template <class T>
  const T* as(int op) const {
    return op == kNo ? nullptr : std::get_if<T>(&plan_.ops[op]);
  }
  // The only operation that reads a value, if it is of this type.
  template <class T>
  int only_reader(Value v) const {
    return v != kNo && v != plan_.output && readers_[v].size() == 1 && as<T>(readers_[v][0]) ? readers_[v][0] : kNo;
  }
  template <class T>
  int only_reader_of_type(Value v) const {
    int found = kNo;
    for (const int reader : readers_[v])
      if (as<T>(reader)) found = found == kNo ? reader : kNo;
    return found;
  }
  void join(std::vector<int>& covers, int op) {
    covers.push_back(op);
    joined_[op] = true;
  }
  static TokenOp finished(std::variant<FusedLinear, FusedMixer, Op> op, std::vector<int> covers) {
    std::ranges::sort(covers);
    return {std::move(op), std::move(covers)};
  }

  void place_parts(const SplitOp& split) {
    int64_t column = places_[split.x].column;
    for (const Value part : split.parts) {
      places_[part] = {places_[split.x].value, column};
      column += plan_.values[part].width();
    }
  }

  TokenOp fuse_mixer(int op) {
    const MixerOp& mixer = *as<MixerOp>(op);
    FusedMixer fused{mixer, mixer.q, mixer.k, mixer.v, {}, kNo, kNo, mixer.y};
    std::vector<int> covers;
    join(covers, op);
    const auto* rope_q = as<RopeOp>(writer_[mixer.q]);
    const auto* rope_k = as<RopeOp>(writer_[mixer.k]);
    if (rope_q && rope_k && readers_[mixer.q].size() == 1 && readers_[mixer.k].size() == 1 &&
        rope_q->pairing == rope_k->pairing && rope_q->base == rope_k->base && rope_q->scaling == rope_k->scaling) {
      fused.rope = *rope_q;
      fused.q = rope_q->x;
      fused.k = rope_k->x;
      join(covers, writer_[mixer.q]);
      join(covers, writer_[mixer.k]);
    }
    if (const auto* discretize = as<DiscretizeOp>(writer_[mixer.v]); discretize && readers_[mixer.v].size() == 1) {
      fused.v = discretize->x;
      fused.dt = discretize->dt;
      join(covers, writer_[mixer.v]);
    }
    const int after = only_reader<ResidualOp>(mixer.y);
    if (after != kNo && as<ResidualOp>(after)->v == fused.v) {
      fused.d = as<ResidualOp>(after)->d;
      fused.y = as<ResidualOp>(after)->y;
      join(covers, after);
    }
    return finished(fused, std::move(covers));
  }

  // Fuses a norm or gate with the products that read it, or a product without either.
  std::vector<TokenOp> fuse_linear(int first) {
    FusedLinear input;
    std::vector<int> before, products;
    if (const auto* linear = as<LinearOp>(first)) {
      input.x = linear->x;
      products = {first};
    } else {
      const Value h = outputs_of(plan_.ops[first])[0];
      const bool all_products =
          h != plan_.output && std::ranges::all_of(readers_[h], [&](int reader) { return as<LinearOp>(reader); });
      if (!all_products) return {};
      if (const auto* norm = as<RmsNormOp>(first)) {
        if (plan_.values[norm->y].heads > 0) return {};
        input.x = norm->x, input.gate = norm->gate, input.norm = norm->weight, input.eps = norm->eps;
      } else {
        input.x = as<SwigluOp>(first)->up, input.gate = as<SwigluOp>(first)->gate;
      }
      before = {first};
      products = readers_[h];
    }
    std::vector<TokenOp> result;
    std::vector<int> covers = before;
    FusedLinear plain = input;
    for (const int product : products) {
      if (joined_[product]) continue;
      const LinearOp& linear = *as<LinearOp>(product);
      const int gated = gated_pair(linear);
      if (gated == kNo) {
        covers.push_back(product);
        for (size_t i = 0; i < linear.weights.size(); ++i) plain.parts.push_back(part_of(linear, i, covers));
        continue;
      }
      FusedLinear pair = input;
      pair.parts = {{.kind = FusedLinear::Kind::swiglu,
                     .weight = linear.weights[0],
                     .second = linear.weights[1],
                     .y = as<SwigluOp>(gated)->y}};
      std::vector<int> own = before;
      own.push_back(product);
      own.push_back(gated);
      result.push_back(finished(pair, own));
    }
    // Wide parts first; those for time steps have one row per head.
    std::ranges::stable_partition(plain.parts,
                                  [](const auto& part) { return part.kind != FusedLinear::Kind::softplus; });
    if (plain.parts.size() > FusedLinear::kMostParts) return {};
    if (!plain.parts.empty()) result.insert(result.begin(), finished(plain, covers));
    for (const TokenOp& op : result)
      for (const int i : op.covers) joined_[i] = true;
    return result;
  }

  // The SwigluOp that multiplies silu of the first result by the second, if no other operation reads either.
  int gated_pair(const LinearOp& linear) const {
    if (linear.y.size() != 2) return kNo;
    const int op = only_reader<SwigluOp>(linear.y[0]);
    return op != kNo && op == only_reader<SwigluOp>(linear.y[1]) && as<SwigluOp>(op)->gate == linear.y[0] ? op : kNo;
  }

  FusedLinear::Part part_of(const LinearOp& linear, size_t i, std::vector<int>& covers) {
    FusedLinear::Part part{.weight = linear.weights[i], .bias = linear.bias, .y = linear.y[i]};
    if (linear.residual != kNo) {
      part.kind = FusedLinear::Kind::add;
      part.residual = linear.residual;
      return part;
    }
    if (const int op = only_reader<ConvOp>(part.y); op != kNo && part.bias == kNo) {
      const ConvOp& conv = *as<ConvOp>(op);
      part.conv_weight = conv.weight;
      part.bias = conv.bias;
      part.activation = conv.activation;
      part.y = conv.y;
      covers.push_back(op);
    }
    if (const int op = only_reader<SplitOp>(part.y); op != kNo) join_qk_activation(part, op, covers);
    if (const int op = only_reader<HeadFunctionOp>(part.y); op != kNo) join_head_function(part, op, covers);
    return part;
  }

  void join_qk_activation(FusedLinear::Part& part, int split_op, std::vector<int>& covers) {
    const SplitOp& split = *as<SplitOp>(split_op);
    std::array<int, 2> ops{};
    for (size_t i = 0; i < ops.size(); ++i) ops[i] = only_reader<ActivationOp>(split.parts[i]);
    if (ops[0] == kNo || ops[1] == kNo || as<ActivationOp>(ops[0])->f != as<ActivationOp>(ops[1])->f) return;
    part.qk_activation = as<ActivationOp>(ops[0])->f;
    place_parts(split);
    covers.push_back(split_op);
    for (size_t i = 0; i < ops.size(); ++i) {
      part.qk_width += plan_.values[split.parts[i]].width();
      places_[as<ActivationOp>(ops[i])->y] = places_[split.parts[i]];
      covers.push_back(ops[i]);
    }
  }

  void join_head_function(FusedLinear::Part& part, int op, std::vector<int>& covers) {
    const HeadFunctionOp& head = *as<HeadFunctionOp>(op);
    const HeadFunction plain{Activation::softplus, head.function.factor};
    if (head.function != plain || part.bias != kNo) return;
    part.kind = FusedLinear::Kind::softplus;
    part.bias = head.bias;
    part.factor = head.function.factor;
    part.y = head.y;
    covers.push_back(op);
    const int decay = only_reader_of_type<OriginalDecayOp>(head.y);
    if (decay == kNo || as<OriginalDecayOp>(decay)->factor != 1) return;
    part.a_log = as<OriginalDecayOp>(decay)->a_log;
    part.decay = as<OriginalDecayOp>(decay)->y;
    covers.push_back(decay);
  }

  const Plan& plan_;
  std::vector<std::vector<int>> readers_;  // of each value
  std::vector<int> writer_;                // of each value
  std::vector<char> joined_;               // operations of the plan that a fused one covers
  std::vector<TokenPlan::Place> places_;
};

}  // namespace

TokenPlan plan_tokens(const Plan& plan) {
  return Fuser(plan).fuse();
}

}  // namespace furious
