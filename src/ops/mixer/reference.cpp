#include "ops/mixer/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/elementwise.h"

namespace furious::reference {
namespace {

using Vector = std::vector<double>;

double at(const Tensor& tensor, int64_t b, int64_t t, int64_t h, int64_t c) {
  const int64_t index = b * tensor.stride(0) + t * tensor.stride(1) + h * tensor.stride(2) + c * tensor.stride(3);
  return tensor.data<double>()[index];
}

// φ from its definition, independent of the code in features.h, of which this is the oracle. The index of the 1 is
// x.size().
class Features {
 public:
  explicit Features(const FeatureMap& map) : degree_(static_cast<size_t>(map.degree)) {
    const auto width = static_cast<size_t>(map.width()), dim = static_cast<size_t>(map.dim);
    std::vector<size_t> indices(degree_);
    for (size_t last = degree_; last > 0;) {
      double square = map.one ? 1 : std::tgamma(map.degree + 1);
      for (size_t n = 0; n < degree_; ++n)  // the m-th of an index divides by m
        if (indices[n] < dim)
          square /= static_cast<double>(
              std::count(indices.begin(), indices.begin() + static_cast<int64_t>(n) + 1, indices[n]));
      factors_.push_back(std::sqrt(square));
      indices_.insert(indices_.end(), indices.begin(), indices.end());
      for (last = degree_; last > 0 && indices[last - 1] + 1 == width;) --last;
      if (last > 0) std::fill(indices.begin() + static_cast<int64_t>(last) - 1, indices.end(), indices[last - 1] + 1);
    }
  }

  size_t size() const { return factors_.size(); }

  Vector of(Vector x) const {
    x.push_back(1);
    Vector phi = factors_;
    for (size_t i = 0; i < indices_.size(); ++i) phi[i / degree_] *= x[indices_[i]];
    return phi;
  }

  // dx = (∂φ/∂x)ᵀ dphi.
  Vector gradient(Vector x, const Vector& dphi) const {
    x.push_back(1);
    Vector dx(x.size());
    for (size_t i = 0; i < indices_.size(); ++i) {
      const size_t f = i / degree_;
      double slope = factors_[f] * dphi[f];
      for (size_t other = f * degree_; other < (f + 1) * degree_; ++other)
        if (other != i) slope *= x[indices_[other]];
      dx[indices_[i]] += slope;
    }
    dx.pop_back();
    return dx;
  }

 private:
  size_t degree_;
  std::vector<size_t> indices_;  // degree_ for each feature
  Vector factors_;
};

double dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// One document of one head in double precision.
struct Head {
  const MixerSpec& spec;
  const Features features;
  size_t length, columns;
  std::vector<Vector> q, k, u;  // q scaled; u = [v, 1], or v without normalizer
  Vector decay;                 // A_t
  std::vector<Vector> initial;  // [D][columns], or empty

  Head(const MixerSpec& mixer, const MixerShape& shape, const MixerInputs& in, const Segment& segment, int64_t head)
      : spec(mixer), features(shape.features), length(segment.length()), columns(shape.state_columns) {
    double sum = 0;
    for (int64_t t = segment.begin; t < segment.end; ++t) {
      const auto row = [&](const Tensor& x, int64_t first = 0) {
        Vector values;
        for (int64_t c = 0; t >= first && c < x.size(3); ++c)
          values.push_back(at(x, segment.batch, t - first, head / (shape.heads / x.size(2)), c));
        return values;
      };
      q.push_back(row(in.q, shape.first_query));  // empty before the first
      for (double& value : q.back()) value *= static_cast<double>(shape.scale);
      k.push_back(row(in.k));
      u.push_back(row(in.v));
      if (spec.norm == Norm::sum) u.back().push_back(1);
      if (spec.decay) sum += at(in.log_decay, segment.batch, t, head, 0);
      decay.push_back(sum);
    }
    if (!in.initial_state || segment.begin != 0) return;
    for (int64_t f = 0; f < shape.state_rows; ++f) {
      initial.emplace_back();
      for (size_t c = 0; c < columns; ++c)
        initial.back().push_back(at(in.initial_state, segment.batch, head, f, static_cast<int64_t>(c)));
    }
  }

  // The first key that a row sees.
  size_t first_key(size_t i) const {
    const auto window = static_cast<size_t>(spec.window);
    return window > 0 && i >= window ? i - window + 1 : 0;
  }

  bool saturates() const { return spec.score == Score::exponential && spec.norm == Norm::none; }

  // The logarithm of the mask's factor, and whether it is held at its largest value, where its derivative is zero.
  double between(size_t i, size_t j) const {
    return held(i, j) ? static_cast<double>(kLargestExponent) : decay[i] - decay[j];
  }
  bool held(size_t i, size_t j) const {
    return spec.signed_decay && decay[i] - decay[j] >= static_cast<double>(kLargestExponent);
  }

  // The largest exponent of row i: weights of softmax are taken relative to it.
  double maximum(size_t i) const {
    if (spec.score != Score::exponential || spec.norm != Norm::sum) return 0;
    double largest = -std::numeric_limits<double>::infinity();
    for (size_t j = first_key(i); j <= i; ++j) largest = std::max(largest, dot(q[i], k[j]) + between(i, j));
    return largest;
  }

  // f and f' where they are polynomials.
  double value(double s) const {
    if (spec.score == Score::linear) return s;
    if (spec.score == Score::squared) return s * s;
    if (spec.score == Score::power) return std::pow(s, spec.degree);
    double sum = 0;
    for (int n = 0; n <= spec.degree; ++n) sum += std::pow(s, n) / std::tgamma(n + 1);
    return sum;
  }
  double slope(double s) const {
    if (spec.score == Score::linear) return 1;
    if (spec.score == Score::squared) return 2 * s;
    if (spec.score == Score::power) return spec.degree * std::pow(s, spec.degree - 1);
    double sum = 0;
    for (int n = 1; n <= spec.degree; ++n) sum += std::pow(s, n - 1) / std::tgamma(n);
    return sum;
  }

  double weight(size_t i, size_t j, double shift) const {
    const double s = dot(q[i], k[j]);
    if (spec.score != Score::exponential) return value(s) * std::exp(between(i, j));
    const double exponent = saturates() ? std::min(s, static_cast<double>(kLargestExponent)) : s;
    return std::exp(exponent + between(i, j) - shift);
  }

  // ∂w/∂S.
  double weight_gradient(size_t i, size_t j, double shift) const {
    const double s = dot(q[i], k[j]);
    if (spec.score != Score::exponential) return slope(s) * std::exp(between(i, j));
    if (saturates() && s >= static_cast<double>(kLargestExponent)) return 0;
    return weight(i, j, shift);
  }

  // Σ_j w_ij u_j, the initial state's part included.
  Vector row(size_t i, double shift) const {
    Vector y(u[i].size());
    for (size_t j = first_key(i); j <= i; ++j) {
      const double w = weight(i, j, shift);
      for (size_t c = 0; c < y.size(); ++c) y[c] += w * u[j][c];
    }
    if (initial.empty()) return y;
    const Vector phi = features.of(q[i]);
    for (size_t f = 0; f < phi.size(); ++f)
      for (size_t c = 0; c < y.size(); ++c) y[c] += std::exp(decay[i]) * phi[f] * initial[f][c];
    return y;
  }

  double reciprocal(double normalizer) const {
    if (spec.norm == Norm::none) return 1;
    // Squares and exponentials sum to a negative n by rounding only.
    const bool positive = spec.score == Score::squared || spec.score == Score::exponential;
    return (positive ? normalizer : std::fabs(normalizer)) < static_cast<double>(kSmallestNormalizer) ? 0
                                                                                                      : 1 / normalizer;
  }

  std::vector<Vector> final_state() const {
    std::vector<Vector> state(features.size(), Vector(columns));
    for (size_t f = 0; f < initial.size(); ++f)
      for (size_t c = 0; c < columns; ++c) state[f][c] = std::exp(decay.back()) * initial[f][c];
    for (size_t j = 0; j < length; ++j) {
      const Vector phi = features.of(k[j]);
      for (size_t f = 0; f < phi.size(); ++f)
        for (size_t c = 0; c < columns; ++c) state[f][c] += std::exp(decay.back() - decay[j]) * phi[f] * u[j][c];
    }
    return state;
  }
};

MixerInputs to_double(const MixerInputs& in) {
  MixerInputs out;
  out.q = to_dtype(in.q, DType::f64);
  out.k = to_dtype(in.k, DType::f64);
  out.v = to_dtype(in.v, DType::f64);
  if (in.log_decay) out.log_decay = to_dtype(in.log_decay.split_dim(2, in.log_decay.size(2), 1), DType::f64);
  if (in.initial_state) out.initial_state = to_dtype(in.initial_state, DType::f64);
  return out;
}

// A double tensor to compute in, written to `out` at the end.
class Output {
 public:
  explicit Output(const Tensor& out) : out_(out) {
    if (out) values_ = Tensor::zeros(out.shape(), DType::f64);
  }
  void write() const {
    if (out_) copy(out_, values_);
  }
  explicit operator bool() const { return out_.defined(); }
  int64_t heads() const { return values_.size(2); }
  double& operator()(int64_t i, int64_t j, int64_t k, int64_t l) const {
    return values_.data<double>()[i * values_.stride(0) + j * values_.stride(1) + k * values_.stride(2) + l];
  }
  double& operator()(int64_t i, int64_t j, int64_t k) const { return (*this)(i, j, 0, k); }

 private:
  Tensor out_, values_;
};

}  // namespace

void mixer_forward(const MixerSpec& spec, const MixerShape& shape, const MixerInputs& inputs,
                   const std::vector<Segment>& segments, const MixerResult& result) {
  const MixerInputs in = to_double(inputs);
  const Output out(result.out), normalizer(result.normalizer), maximum(result.maximum);
  const Output final_state(result.final_state);
  for (const Segment& segment : segments) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      const Head head(spec, shape, in, segment, h);
      for (auto i = static_cast<size_t>(shape.first_query); i < head.length; ++i) {
        const int64_t t = segment.begin + static_cast<int64_t>(i) - shape.first_query;  // of the queries
        const double shift = head.maximum(i);
        const Vector y = head.row(i, shift);
        const double factor = head.reciprocal(y.back());
        for (int64_t c = 0; c < shape.v_dim; ++c) out(segment.batch, t, h, c) = y[c] * factor;
        if (normalizer) normalizer(segment.batch, h, t) = y.back();
        if (maximum) maximum(segment.batch, h, t) = shift;
      }
      if (!final_state || segment.end != shape.length) continue;
      const std::vector<Vector> state = head.final_state();
      for (size_t f = 0; f < state.size(); ++f)
        for (size_t c = 0; c < head.columns; ++c)
          final_state(segment.batch, h, static_cast<int64_t>(f), static_cast<int64_t>(c)) = state[f][c];
    }
  }
  for (const Output* output : {&out, &normalizer, &maximum, &final_state}) output->write();
}

namespace {

// All gradients of one document of one head, with respect to the scaled q.
struct HeadGradients {
  std::vector<Vector> dq, dk, du, d_initial;
  Vector d_decay;  // dA_t

  HeadGradients(const Head& head, const std::vector<Vector>& g, const std::vector<Vector>& d_final)
      : dq(head.length, Vector(head.q[0].size())),
        dk(head.length, Vector(head.k[0].size())),
        du(head.length, Vector(head.u[0].size())),
        d_initial(head.initial.size(), Vector(head.columns)),
        d_decay(head.length) {
    for (size_t i = 0; i < head.length; ++i) row(head, i, g[i]);
    if (!d_final.empty()) state(head, d_final);
  }

 private:
  void row(const Head& head, size_t i, const Vector& g) {
    const double shift = head.maximum(i);
    const Vector y = head.row(i, shift);
    const double r = head.reciprocal(y.back());
    // The gradient of [y_i, n_i]: g/n, and −(g·o)/n for the normalizer.
    Vector dy(y.size());
    for (size_t c = 0; c < g.size(); ++c) {
      dy[c] = g[c] * r;
      if (head.spec.norm == Norm::sum) dy.back() -= g[c] * y[c] * r * r;
    }
    for (size_t j = head.first_key(i); j <= i; ++j) {
      const double w = head.weight(i, j, shift);
      const double dw = dot(dy, head.u[j]);
      const double ds = head.weight_gradient(i, j, shift) * dw;
      for (size_t c = 0; c < dq[i].size(); ++c) {
        dq[i][c] += ds * head.k[j][c];
        dk[j][c] += ds * head.q[i][c];
      }
      for (size_t c = 0; c < dy.size(); ++c) du[j][c] += w * dy[c];
      if (head.held(i, j)) continue;
      d_decay[i] += w * dw;
      d_decay[j] -= w * dw;
    }
    if (head.initial.empty()) return;
    const double reach = std::exp(head.decay[i]);
    const Vector phi = head.features.of(head.q[i]);
    Vector dphi(phi.size());
    for (size_t f = 0; f < phi.size(); ++f) {
      dphi[f] = reach * dot(head.initial[f], dy);
      d_decay[i] += phi[f] * dphi[f];
      for (size_t c = 0; c < dy.size(); ++c) d_initial[f][c] += reach * phi[f] * dy[c];
    }
    const Vector through = head.features.gradient(head.q[i], dphi);
    for (size_t c = 0; c < through.size(); ++c) dq[i][c] += through[c];
  }

  void state(const Head& head, const std::vector<Vector>& d_final) {
    const std::vector<Vector> state = head.final_state();
    for (size_t f = 0; f < state.size(); ++f) d_decay.back() += dot(state[f], d_final[f]);
    for (size_t f = 0; f < d_initial.size(); ++f)
      for (size_t c = 0; c < head.columns; ++c) d_initial[f][c] += std::exp(head.decay.back()) * d_final[f][c];
    for (size_t j = 0; j < head.length; ++j) {
      const double reach = std::exp(head.decay.back() - head.decay[j]);
      const Vector phi = head.features.of(head.k[j]);
      Vector dphi(phi.size());
      for (size_t f = 0; f < phi.size(); ++f) {
        dphi[f] = reach * dot(d_final[f], head.u[j]);
        d_decay[j] -= phi[f] * dphi[f];
        for (size_t c = 0; c < head.columns; ++c) du[j][c] += reach * phi[f] * d_final[f][c];
      }
      const Vector through = head.features.gradient(head.k[j], dphi);
      for (size_t c = 0; c < through.size(); ++c) dk[j][c] += through[c];
    }
  }
};

}  // namespace

void mixer_backward(const MixerSpec& spec, const MixerShape& shape, const MixerInputs& inputs,
                    const std::vector<Segment>& segments, const Tensor& out_gradient,
                    const Tensor& final_state_gradient, const MixerGradients& gradients) {
  const MixerInputs in = to_double(inputs);
  const Tensor g_all = to_dtype(out_gradient, DType::f64);
  const Tensor d_final_all = final_state_gradient ? to_dtype(final_state_gradient, DType::f64) : Tensor();
  const Output dq(gradients.q), dk(gradients.k), dv(gradients.v), d_initial(gradients.initial_state);
  const Output da(gradients.log_decay ? gradients.log_decay.split_dim(2, shape.heads, 1) : Tensor());
  for (const Segment& segment : segments) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      const Head head(spec, shape, in, segment, h);
      std::vector<Vector> g, d_final;
      for (int64_t t = segment.begin; t < segment.end; ++t) {
        g.emplace_back();
        for (int64_t c = 0; c < shape.v_dim; ++c) g.back().push_back(at(g_all, segment.batch, t, h, c));
      }
      for (int64_t f = 0; d_final_all && segment.end == shape.length && f < shape.state_rows; ++f) {
        d_final.emplace_back();
        for (int64_t c = 0; c < shape.state_columns; ++c)
          d_final.back().push_back(at(d_final_all, segment.batch, h, f, c));
      }
      const HeadGradients d(head, g, d_final);
      double sum = 0;
      for (int64_t i = segment.length() - 1; i >= 0; --i) {
        const int64_t t = segment.begin + i;
        for (int64_t c = 0; c < shape.qk_dim; ++c) {
          dq(segment.batch, t, h / (shape.heads / shape.q_heads), c) += d.dq[i][c] * static_cast<double>(shape.scale);
          dk(segment.batch, t, h / (shape.heads / shape.k_heads), c) += d.dk[i][c];
        }
        for (int64_t c = 0; c < shape.v_dim; ++c)
          dv(segment.batch, t, h / (shape.heads / shape.v_heads), c) += d.du[i][c];
        sum += d.d_decay[i];
        if (da) da(segment.batch, t, h, 0) = sum;
      }
      for (size_t f = 0; d_initial && f < d.d_initial.size(); ++f)
        for (size_t c = 0; c < head.columns; ++c)
          d_initial(segment.batch, h, static_cast<int64_t>(f), static_cast<int64_t>(c)) = d.d_initial[f][c];
    }
  }
  for (const Output* output : {&dq, &dk, &dv, &da, &d_initial}) output->write();
}

}  // namespace furious::reference
