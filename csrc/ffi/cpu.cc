// SPDX-License-Identifier: Apache-2.0
//
// XLA FFI handlers of the CPU backend.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "ffi/bind.h"
#include "ffi/handlers.h"

namespace jaxflash::ffi {
namespace {

using ::xla::ffi::Error;

// One parallel_for on XLA's intra-op pool. Its threads may all be blocked elsewhere, in
// a collective for instance, so nobody waits for a task that has not begun: the caller
// takes items from the counter itself and waits only for items that helpers have taken.
// A helper may begin after the loop is over; it then finds the counter exhausted and
// touches nothing but this shared state.
class ParallelLoop {
 public:
  using Task = void (*)(void* argument, int64_t index);

  ParallelLoop(int64_t count, Task task, void* argument)
      : count_(count), task_(task), argument_(argument) {}

  void take_items() {
    int64_t done = 0;
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) {
      task_(argument_, i);
      ++done;
    }
    if (done == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    finished_ += done;
    if (finished_ == count_) all_finished_.notify_one();
  }

  void wait_for_taken_items() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_finished_.wait(lock, [this] { return finished_ == count_; });
  }

 private:
  const int64_t count_;
  const Task task_;
  void* const argument_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable all_finished_;
  int64_t finished_ = 0;
};

void parallel_for(void* context, int64_t count, ParallelLoop::Task task,
                  void* argument) {
  auto* pool = static_cast<xla::ffi::ThreadPool*>(context);
  const int64_t helpers = std::min(pool->num_threads(), count) - 1;
  if (helpers <= 0) {
    for (int64_t i = 0; i < count; ++i) task(argument, i);
    return;
  }
  const auto loop = std::make_shared<ParallelLoop>(count, task, argument);
  for (int64_t i = 0; i < helpers; ++i) {
    pool->Schedule([loop] { loop->take_items(); });
  }
  loop->take_items();
  loop->wait_for_taken_items();
}

jaxflash_executor make_executor(xla::ffi::ThreadPool* pool) {
  const int64_t threads = std::max<int64_t>(pool->num_threads(), 1);
  return {pool, static_cast<int32_t>(threads), parallel_for};
}

Error forward(xla::ffi::ThreadPool pool, xla::ffi::RemainingArgs arguments,
              xla::ffi::RemainingRets results, xla::ffi::Dictionary attributes) {
  Call call;
  if (Error error = bind(arguments, results, attributes, &call); error.failure()) {
    return error;
  }
  const jaxflash_executor executor = make_executor(&pool);
  return to_error(jaxflash_attention_forward_cpu(&call.params.forward, call.workspace,
                                                 call.workspace_bytes, &executor));
}

Error backward(xla::ffi::ThreadPool pool, xla::ffi::RemainingArgs arguments,
               xla::ffi::RemainingRets results, xla::ffi::Dictionary attributes) {
  Call call;
  if (Error error = bind(arguments, results, attributes, &call); error.failure()) {
    return error;
  }
  const jaxflash_executor executor = make_executor(&pool);
  return to_error(jaxflash_attention_backward_cpu(&call.params, call.workspace,
                                                  call.workspace_bytes, &executor));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxflashCpuForward, forward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxflashCpuBackward, backward,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs());

}  // namespace jaxflash::ffi
