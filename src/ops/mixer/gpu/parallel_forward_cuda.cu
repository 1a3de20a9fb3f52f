// The parallel form on tensor cores, forward: which calls it computes, and how their inputs are laid out.
#include "gpu/device.h"
#include "ops/elementwise.h"
#include "ops/mixer/gpu/parallel_passes.cuh"

namespace furious::cuda {

WideInputs::WideInputs(const MixerInputs& inputs) {
  const auto wide = [](const Tensor& x) {
    if (rows_are_wide(x)) return x;
    const Tensor rows =
        Tensor::zeros({x.size(0), x.size(1), x.size(2), (x.size(3) + 7) / 8 * 8}, x.dtype(), x.device());
    copy(rows.slice(-1, 0, x.size(3)), x);
    return rows;
  };
  q = wide(inputs.q);
  k = wide(inputs.k);
  v = wide(inputs.v);
}

void WideInputs::put_into(Parallel& m) const {
  m.q = heads_of<bfloat16>(q, m.heads);
  m.k = heads_of<bfloat16>(k, m.heads);
  m.v = heads_of<bfloat16>(v, m.heads);
}

bool parallel_supports(const MixerCall& call) {
  const std::string_view forced = forced_kernel();
  const int qk_dim = static_cast<int>(call.shape.qk_dim), v_dim = static_cast<int>(call.shape.v_dim);
  const auto has_layout = [&]<Target kTarget>() { return with_layout<kTarget>(qk_dim, v_dim, [](auto, auto) {}); };
  return forced != "tiles" && forced != "simple" && call.inputs.q.dtype() == DType::bf16 &&
         product_precision(call) == MixerPrecision::bf16 && call.shape.length <= (int64_t{1} << 30) &&
         has_layout.template operator()<Target::out>() && has_layout.template operator()<Target::dq>() &&
         has_layout.template operator()<Target::dk>() && has_layout.template operator()<Target::dv>();
}

bool on_hopper(Device device) {
  return is_hopper(device) && forced_kernel() != "tensor cores";
}

bool hopper_supports_wide_rows(const MixerCall& call) {
  const MixerShape& shape = call.shape;
  return on_hopper(call.inputs.q.device()) && parallel_supports(call) &&
         std::max(shape.qk_dim, shape.v_dim) <= kLargestHopperDim &&
         (call.spec.score != Score::exponential || call.spec.norm == Norm::sum) && call.spec.degree == 0 &&
         !call.spec.signed_decay;
}

bool hopper_supports(const MixerCall& call) {
  return hopper_supports_wide_rows(call) && rows_are_wide(call.inputs.q) && rows_are_wide(call.inputs.k) &&
         rows_are_wide(call.inputs.v);
}

void parallel_forward(const MixerCall& call, const TokenTables& tables, const Tensor& past) {
  Parallel m = parallel_of(call, tables);
  if (hopper_supports(call) && !past) return hopper_forward(call, m);
  const WideInputs inputs(call.inputs);
  inputs.put_into(m);
  m.state_part = floats(past);
  run_pass<Target::out>(call, m);
}

void inside_chunks_forward(const MixerCall& call, const TokenTables& tables, int64_t chunk, const Tensor& past,
                           const Tensor& past_n) {
  Parallel m = parallel_of(call, tables);
  m.chunk = static_cast<int>(chunk);
  m.past = heads_of<bfloat16>(past, call.shape.heads);
  m.past_n = floats(past_n);
  hopper_forward(call, m);
}

}  // namespace furious::cuda
