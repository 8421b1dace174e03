// SPDX-License-Identifier: Apache-2.0
//
// Binds the CPU kernels of libjaxflash on float32 NumPy arrays with pybind11.
#include <jaxflash/attention.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <vector>

namespace py = pybind11;
using Array = py::array_t<float>;

namespace {

int32_t num_cores() {
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

// Runs the tasks of the library on all cores, that of the caller included.
void parallel_for(void*, int64_t count, void (*task)(void*, int64_t), void* argument) {
  std::atomic<int64_t> next{0};
  auto take_items = [&] {
    for (int64_t i; (i = next++) < count;) task(argument, i);
  };
  std::vector<std::thread> helpers;
  try {
    for (int64_t i = 1; i < std::min<int64_t>(num_cores(), count); ++i) {
      helpers.emplace_back(take_items);
    }
  } catch (const std::exception&) {
    // No exception may pass through the library, and fewer threads do the work too.
  }
  take_items();
  for (std::thread& helper : helpers) helper.join();
}

jaxflash_executor all_cores() { return {nullptr, num_cores(), parallel_for}; }

void check(jaxflash_status status) {
  if (status != JAXFLASH_OK) throw std::invalid_argument(jaxflash_last_error());
}

// The library takes strides as they are, so views need no copy.
jaxflash_tensor view(const Array& array, int core_rank) {
  jaxflash_tensor tensor{};
  tensor.data = const_cast<float*>(array.data());
  tensor.dtype = JAXFLASH_FLOAT32;
  const int batch_rank = static_cast<int>(array.ndim()) - core_rank;
  for (int i = 0; i < array.ndim(); ++i) {
    const int64_t stride = array.strides(i) / static_cast<int64_t>(sizeof(float));
    if (i < batch_rank) {
      tensor.batch_strides[i] = stride;
    } else {
      tensor.strides[i - batch_rank] = stride;
    }
  }
  return tensor;
}

jaxflash_attention_params make_params(const Array& q, const Array& k, const Array& v,
                                      const Array& out, const Array& lse,
                                      bool is_causal) {
  if (q.ndim() != 4 || k.ndim() != 4 || v.ndim() != 4) {
    throw std::invalid_argument(
        "q, k and v must have the axes [B, length, heads, dim]");
  }
  if (k.shape(0) != q.shape(0) || v.shape(0) != q.shape(0) ||
      v.shape(1) != k.shape(1) || v.shape(2) != k.shape(2) ||
      k.shape(3) != q.shape(3)) {
    throw std::invalid_argument("q, k and v must agree in batch, lengths and dims");
  }
  jaxflash_attention_params params{};
  params.struct_size = sizeof(params);
  params.batch_rank = 1;
  params.batch_shape[0] = q.shape(0);
  params.q_len = q.shape(1);
  params.num_heads = q.shape(2);
  params.head_dim = q.shape(3);
  params.kv_len = k.shape(1);
  params.num_kv_heads = k.shape(2);
  params.value_head_dim = v.shape(3);
  params.window_left = params.window_right = -1;
  params.is_causal = is_causal;
  params.q = view(q, 3);
  params.k = view(k, 3);
  params.v = view(v, 3);
  params.out = view(out, 3);
  params.lse = view(lse, 2);
  return params;
}

// Room for the library's scratch data, 64-byte aligned.
class Workspace {
 public:
  explicit Workspace(size_t bytes) : buffer_(bytes + kAlignment) {}
  void* data() {
    void* pointer = buffer_.data();
    size_t space = buffer_.size();
    return std::align(kAlignment, space - kAlignment, pointer, space);
  }

 private:
  static constexpr size_t kAlignment = 64;
  std::vector<unsigned char> buffer_;
};

std::tuple<Array, Array> forward(const Array& q, const Array& k, const Array& v,
                                 bool is_causal) {
  Array out(std::vector<py::ssize_t>{q.shape(0), q.shape(1), q.shape(2), v.shape(3)});
  Array lse(std::vector<py::ssize_t>{q.shape(0), q.shape(2), q.shape(1)});
  const jaxflash_attention_params params = make_params(q, k, v, out, lse, is_causal);
  size_t bytes = 0;
  check(jaxflash_attention_forward_workspace_cpu(&params, &bytes));
  Workspace workspace(bytes);
  const jaxflash_executor executor = all_cores();
  {
    const py::gil_scoped_release other_threads_may_run;
    check(jaxflash_attention_forward_cpu(&params, workspace.data(), bytes, &executor));
  }
  return {out, lse};
}

std::tuple<Array, Array, Array> backward(const Array& q, const Array& k, const Array& v,
                                         const Array& out, const Array& lse,
                                         const Array& d_out, bool is_causal) {
  const bool same_shape = out.ndim() == 4 && d_out.ndim() == 4 && lse.ndim() == 3 &&
                          std::equal(out.shape(), out.shape() + 4, d_out.shape()) &&
                          std::equal(out.shape(), out.shape() + 3, q.shape()) &&
                          lse.shape(0) == q.shape(0) && lse.shape(1) == q.shape(2) &&
                          lse.shape(2) == q.shape(1) && out.shape(3) == v.shape(3);
  if (!same_shape) {
    throw std::invalid_argument("out, lse and d_out must have the shapes of forward");
  }
  jaxflash_attention_backward_params params{};
  params.struct_size = sizeof(params);
  params.forward = make_params(q, k, v, out, lse, is_causal);
  auto like = [](const Array& array) {
    return Array(std::vector<py::ssize_t>(array.shape(), array.shape() + array.ndim()));
  };
  Array dq = like(q);
  Array dk = like(k);
  Array dv = like(v);
  params.d_out = view(d_out, 3);
  params.dq = view(dq, 3);
  params.dk = view(dk, 3);
  params.dv = view(dv, 3);
  size_t bytes = 0;
  check(jaxflash_attention_backward_workspace_cpu(&params, &bytes));
  Workspace workspace(bytes);
  const jaxflash_executor executor = all_cores();
  {
    const py::gil_scoped_release other_threads_may_run;
    check(jaxflash_attention_backward_cpu(&params, workspace.data(), bytes, &executor));
  }
  return {dq, dk, dv};
}

}  // namespace

PYBIND11_MODULE(embedded_attention, module) {
  module.def("forward", &forward, py::arg("q"), py::arg("k"), py::arg("v"),
             py::arg("is_causal"), "q [B, T, N, H], k, v [B, S, K, H] -> out, lse");
  module.def("backward", &backward, py::arg("q"), py::arg("k"), py::arg("v"),
             py::arg("out"), py::arg("lse"), py::arg("d_out"), py::arg("is_causal"),
             "-> dq, dk, dv");
}
