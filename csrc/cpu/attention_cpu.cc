// SPDX-License-Identifier: Apache-2.0
//
// C API entry points of the CPU backend.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "api/status.h"
#include "api/validate.h"
#include "cpu/cpu_info.h"
#include "cpu/problem.h"
#include "jaxflash/attention.h"

namespace jaxflash::cpu {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

float half_to_float(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  float value;
  if (magnitude >= 0x7c00u) {
    const uint32_t bits = 0x7f800000u | (magnitude & 0x3ffu) << 13;
    std::memcpy(&value, &bits, 4);
  } else if (magnitude < 0x400u) {
    value = static_cast<float>(magnitude) * 0x1p-24f;
  } else {
    const uint32_t bits = (magnitude << 13) + ((127u - 15u) << 23);
    std::memcpy(&value, &bits, 4);
  }
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const float magnitude = std::fabs(value);
  if (magnitude != magnitude) return sign | 0x7e00u;
  if (magnitude >= 65520.0f) return sign | 0x7c00u;
  if (magnitude < 0x1p-14f) {
    return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f));
  }
  bits &= 0x7fffffffu;
  bits += 0xfffu + (bits >> 13 & 1u);
  return sign | static_cast<uint16_t>((bits >> 13) - ((127u - 15u) << 10));
}

float load(const jaxflash_tensor& t, int64_t index) {
  if (t.dtype == JAXFLASH_FLOAT32) return static_cast<const float*>(t.data)[index];
  const uint16_t raw = static_cast<const uint16_t*>(t.data)[index];
  if (t.dtype == JAXFLASH_FLOAT16) return half_to_float(raw);
  const uint32_t bits = static_cast<uint32_t>(raw) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t float_to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float round_to(int32_t dtype, float value) {
  if (dtype == JAXFLASH_FLOAT32) return value;
  if (dtype == JAXFLASH_FLOAT16) return half_to_float(float_to_half(value));
  const uint32_t bits = static_cast<uint32_t>(float_to_bfloat16(value)) << 16;
  std::memcpy(&value, &bits, 4);
  return value;
}

void store(const jaxflash_tensor& t, int64_t index, float value) {
  if (t.dtype == JAXFLASH_FLOAT32) {
    static_cast<float*>(t.data)[index] = value;
  } else {
    static_cast<uint16_t*>(t.data)[index] =
        t.dtype == JAXFLASH_FLOAT16 ? float_to_half(value) : float_to_bfloat16(value);
  }
}

// One (batch element, head) of a call, row by row.
struct Head {
  const jaxflash_attention_params& p;
  int64_t b, n, kv;
  Visibility visible;
  float scale;

  Head(const jaxflash_attention_params& params, int64_t batch, int64_t head)
      : p(params),
        b(batch),
        n(head),
        kv(head / (params.num_heads / params.num_kv_heads)),
        visible(params, batch),
        scale(scale_of(params, batch)) {}

  int64_t offset(const jaxflash_tensor& t, int64_t row, int64_t head) const {
    const char* base = static_cast<const char*>(t.data);
    const char* start = batch_pointer<const char>(p, t, b);
    return (start - base) + row * t.strides[0] + head * t.strides[1];
  }

  void row(const jaxflash_tensor& t, int64_t row, int64_t head, float* x) const {
    const int64_t start = offset(t, row, head);
    for (int64_t h = 0; h < p.head_dim; ++h) x[h] = load(t, start + h * t.strides[2]);
  }

  float dot(const float* x, const jaxflash_tensor& t, int64_t row, int64_t head) const {
    const int64_t start = offset(t, row, head);
    float sum = 0;
    for (int64_t h = 0; h < p.head_dim; ++h)
      sum += x[h] * load(t, start + h * t.strides[2]);
    return sum;
  }

  void add(float factor, const jaxflash_tensor& t, int64_t row, int64_t head,
           float* x) const {
    const int64_t start = offset(t, row, head);
    for (int64_t h = 0; h < p.head_dim; ++h)
      x[h] += factor * load(t, start + h * t.strides[2]);
  }

  void put(const jaxflash_tensor& t, int64_t row, int64_t head, const float* x,
           float factor) const {
    const int64_t start = offset(t, row, head);
    for (int64_t h = 0; h < p.head_dim; ++h)
      store(t, start + h * t.strides[2], factor * x[h]);
  }

  float row_value(const jaxflash_tensor& t, int64_t i) const {
    return load(t, offset(t, n, i));
  }

  int64_t keys(int64_t i) const {
    return i < visible.q_rows ? visible.key_limit(i) : 0;
  }
};

void forward_row(const Head& h, int64_t i) {
  const auto& p = h.p;
  float q[kMaxHeadDim], acc[kMaxHeadDim] = {};
  h.row(p.q, i, h.n, q);
  float m = -kInfinity, sum = 0;
  const int64_t keys = h.keys(i);
  for (int64_t j = 0; j < keys; ++j) {
    const float s = h.scale * h.dot(q, p.k, j, h.kv);
    if (!(s <= m)) {
      const float alpha = m == -kInfinity ? 0.0f : std::exp(m - s);
      for (int64_t c = 0; c < p.head_dim; ++c) acc[c] *= alpha;
      sum *= alpha;
      m = s;
    }
    const float prob = m == -kInfinity ? 0.0f : std::exp(s - m);
    sum += prob;
    h.add(round_to(p.q.dtype, prob), p.v, j, h.kv, acc);
  }
  h.put(p.out, i, h.n, acc, sum == 0 ? 0.0f : 1 / sum);
  store(p.lse, h.offset(p.lse, h.n, i), sum == 0 ? -kInfinity : m + std::log(sum));
}

struct RowGradient {
  float q[kMaxHeadDim], d_out[kMaxHeadDim];
  float lse, delta;

  RowGradient(const Head& h, const jaxflash_attention_backward_params& b, int64_t i) {
    float out[kMaxHeadDim];
    h.row(h.p.q, i, h.n, q);
    h.row(b.d_out, i, h.n, d_out);
    h.row(h.p.out, i, h.n, out);
    lse = h.row_value(h.p.lse, i);
    delta = b.d_lse.data == nullptr ? 0.0f : -h.row_value(b.d_lse, i);
    for (int64_t c = 0; c < h.p.head_dim; ++c) delta += d_out[c] * out[c];
  }
};

void backward_query(const Head& h, const jaxflash_attention_backward_params& b,
                    int64_t i) {
  float dq[kMaxHeadDim] = {};
  float dscale = 0;
  const int64_t keys = h.keys(i);
  if (keys > 0) {
    const RowGradient r(h, b, i);
    for (int64_t j = 0; j < keys; ++j) {
      const float s = h.dot(r.q, h.p.k, j, h.kv);
      const float prob = std::exp(h.scale * s - r.lse);
      const float ds = prob * (h.dot(r.d_out, h.p.v, j, h.kv) - r.delta);
      dscale += ds * s;
      h.add(ds, h.p.k, j, h.kv, dq);
    }
  }
  if (b.dq.data != nullptr) h.put(b.dq, i, h.n, dq, h.scale);
  if (b.dscale.data != nullptr) store(b.dscale, h.offset(b.dscale, h.n, i), dscale);
}

void backward_key(const jaxflash_attention_backward_params& b, int64_t batch,
                  int64_t kv, int64_t j) {
  const auto& p = b.forward;
  const int64_t group = p.num_heads / p.num_kv_heads;
  float dk[kMaxHeadDim] = {}, dv[kMaxHeadDim] = {};
  const Head first(p, batch, kv * group);
  if (j < first.visible.kv_rows) {
    for (int64_t n = kv * group; n < (kv + 1) * group; ++n) {
      const Head h(p, batch, n);
      for (int64_t i = h.visible.first_row(j); i < h.visible.q_rows; ++i) {
        const RowGradient r(h, b, i);
        const float prob = std::exp(h.scale * h.dot(r.q, p.k, j, kv) - r.lse);
        const float ds = prob * (h.dot(r.d_out, p.v, j, kv) - r.delta);
        for (int64_t c = 0; c < p.head_dim; ++c) {
          dv[c] += prob * r.d_out[c];
          dk[c] += ds * r.q[c];
        }
      }
    }
  }
  if (b.dk.data != nullptr) first.put(b.dk, j, kv, dk, first.scale);
  if (b.dv.data != nullptr) first.put(b.dv, j, kv, dv, 1.0f);
}

template <class F>
void parallel_for(const jaxflash_executor* executor, int64_t count, F body) {
  auto task = [](void* argument, int64_t index) {
    (*static_cast<F*>(argument))(index);
  };
  if (executor == nullptr || count < 2) {
    for (int64_t i = 0; i < count; ++i) body(i);
  } else {
    executor->parallel_for(executor->context, count, task, &body);
  }
}

constexpr Support kSupport = {"cpu", kMaxHeadDim, /*float32=*/true};

}  // namespace

const char* simd_target() { return "baseline"; }

}  // namespace jaxflash::cpu

using namespace jaxflash;  // NOLINT

extern "C" {

jaxflash_status jaxflash_attention_forward_workspace_cpu(
    const jaxflash_attention_params* params, size_t* bytes) {
  (void)params;
  *bytes = 0;
  return JAXFLASH_OK;
}

jaxflash_status jaxflash_attention_forward_cpu(const jaxflash_attention_params* params,
                                               void*, size_t,
                                               const jaxflash_executor* executor) {
  jaxflash_status status = validate_forward(params);
  if (status == JAXFLASH_OK) status = check_support(*params, cpu::kSupport);
  if (status != JAXFLASH_OK) return status;
  const int64_t rows = batch_size(*params) * params->num_heads;
  cpu::parallel_for(executor, rows, [&](int64_t index) {
    const cpu::Head head(*params, index / params->num_heads, index % params->num_heads);
    for (int64_t i = 0; i < params->q_len; ++i) cpu::forward_row(head, i);
  });
  return JAXFLASH_OK;
}

jaxflash_status jaxflash_attention_backward_workspace_cpu(
    const jaxflash_attention_backward_params* params, size_t* bytes) {
  (void)params;
  *bytes = 0;
  return JAXFLASH_OK;
}

jaxflash_status jaxflash_attention_backward_cpu(
    const jaxflash_attention_backward_params* params, void*, size_t,
    const jaxflash_executor* executor) {
  jaxflash_status status = validate_backward(params);
  if (status == JAXFLASH_OK) status = check_support(params->forward, cpu::kSupport);
  if (status != JAXFLASH_OK) return status;
  const auto& p = params->forward;
  cpu::parallel_for(executor, batch_size(p) * p.num_heads, [&](int64_t index) {
    const cpu::Head head(p, index / p.num_heads, index % p.num_heads);
    for (int64_t i = 0; i < p.q_len; ++i) cpu::backward_query(head, *params, i);
  });
  cpu::parallel_for(executor, batch_size(p) * p.num_kv_heads, [&](int64_t index) {
    for (int64_t j = 0; j < p.kv_len; ++j) {
      cpu::backward_key(*params, index / p.num_kv_heads, index % p.num_kv_heads, j);
    }
  });
  return JAXFLASH_OK;
}

}  // extern "C"
