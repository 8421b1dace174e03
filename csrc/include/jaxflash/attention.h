/* SPDX-License-Identifier: Apache-2.0
 *
 * jaxflash C API: exact attention with O(length) memory, forward and backward.
 *
 *   s   = scale * q k^T                 float32
 *   s   = softcap * tanh(s / softcap)   if softcap > 0
 *   s  += bias - slope * |i + query_offset - j|
 *   s   = -inf where mask, lengths, causality, window or segments hide (i, j)
 *   lse = log(sum_j exp(s) [+ exp(sink)])
 *   out = dropout(exp(s - lse)) v
 *
 * A row that sees no key has out = 0 and lse = -inf, or its sink where it has one; a
 * row past q_seq_lengths has out = 0 and lse = -inf.
 *
 * Letters of shapes: B batch, T query length, S key/value length, N query heads,
 * K key/value heads (query head n reads key/value head n / (N / K)), H query/key
 * head dim, Hv value head dim.
 *
 * Rules of the interface
 * - Plain structs, no allocation, no hidden state, safe to call from many threads.
 *   The caller owns every buffer, workspace included, and passes the stream or
 *   executor that runs the work.
 * - Zero-initialise every struct, then set struct_size and the members that you use:
 *   zero means "absent" or "off" everywhere, except window_left and window_right,
 *   where -1 means unlimited.
 * - On any status but JAXFLASH_OK nothing was written to the outputs, except that after
 *   JAXFLASH_INTERNAL their contents are undefined.
 * - Bytes outside the described elements are never read or written. Outputs overlap
 *   neither inputs nor each other.
 * - Lengths go to 2^30 - 1024; query offsets are clamped to +-2^30.
 */
#ifndef JAXFLASH_ATTENTION_H_
#define JAXFLASH_ATTENTION_H_

#include <stddef.h>
#include <stdint.h>

#define JAXFLASH_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

#define JAXFLASH_VERSION_MAJOR 0
#define JAXFLASH_VERSION_MINOR 1
#define JAXFLASH_VERSION_PATCH 0

/* Batch axes that a call may have after adjacent axes that every tensor walks in one
 * stride were merged. */
#define JAXFLASH_MAX_BATCH_RANK 6

typedef enum jaxflash_status {
  JAXFLASH_OK = 0,
  JAXFLASH_INVALID_ARGUMENT = 1, /* the call can never work: shapes, strides, values */
  JAXFLASH_UNSUPPORTED = 2,      /* a valid call that this backend does not serve */
  JAXFLASH_UNAVAILABLE = 3,      /* no such backend in this build or on this device */
  JAXFLASH_INTERNAL = 4          /* the device or its driver reported an error */
} jaxflash_status;

typedef enum jaxflash_dtype {
  JAXFLASH_NO_DTYPE = 0,
  JAXFLASH_FLOAT32 = 1,
  JAXFLASH_BFLOAT16 = 2,
  JAXFLASH_FLOAT16 = 3,
  JAXFLASH_INT32 = 4,
  JAXFLASH_UINT32 = 5,
  JAXFLASH_BOOL = 6, /* one byte, zero or one */
  JAXFLASH_INT8 = 7
} jaxflash_dtype;

typedef enum jaxflash_precision {
  JAXFLASH_PRECISION_DEFAULT = 0, /* float32 inputs: float32-class accuracy */
  JAXFLASH_PRECISION_BF16X3 = 1,
  JAXFLASH_PRECISION_TF32 = 2
} jaxflash_precision;

/* A strided view. Strides count elements and may be 0 (broadcast) on inputs. The
 * core axes of `strides` are named at each member below, leftmost first. */
typedef struct jaxflash_tensor {
  void* data; /* NULL: absent */
  int32_t dtype;
  int32_t reserved;
  int64_t batch_strides[JAXFLASH_MAX_BATCH_RANK];
  int64_t strides[3];
} jaxflash_tensor;

typedef struct jaxflash_attention_params {
  size_t struct_size; /* sizeof(jaxflash_attention_params) */

  int32_t batch_rank; /* 0 .. JAXFLASH_MAX_BATCH_RANK; 0 means one batch element */
  int32_t is_causal;
  int64_t batch_shape[JAXFLASH_MAX_BATCH_RANK];
  int64_t q_len;          /* T */
  int64_t kv_len;         /* S */
  int64_t num_heads;      /* N */
  int64_t num_kv_heads;   /* K, divides N */
  int64_t head_dim;       /* H */
  int64_t value_head_dim; /* Hv */

  int64_t window_left;  /* visible: j >= i + query_offset - window_left;  -1 = all */
  int64_t window_right; /* visible: j <= i + query_offset + window_right; -1 = all */
  float softcap;        /* 0 = off */
  float dropout_rate;   /* 0 = off */
  int32_t deterministic;
  int32_t precision; /* jaxflash_precision */

  /* Inputs. q, k and v share one dtype. */
  jaxflash_tensor q; /* [T, N, H] */
  jaxflash_tensor k; /* [S, K, H] */
  jaxflash_tensor v; /* [S, K, Hv] */

  jaxflash_tensor scale;          /* [] float32; absent: 1 / sqrt(H) */
  jaxflash_tensor query_offset;   /* [] int32: position of query 0 counted from key 0 */
  jaxflash_tensor q_seq_lengths;  /* [] int32 */
  jaxflash_tensor kv_seq_lengths; /* [] int32 */
  jaxflash_tensor bias;           /* [N, T, S] any float dtype */
  jaxflash_tensor mask;           /* [N, T, S] bool, true = may attend */
  jaxflash_tensor q_segment_ids;  /* [T] int32 */
  jaxflash_tensor kv_segment_ids; /* [S] int32 */
  jaxflash_tensor sinks;          /* [N] float32 */
  jaxflash_tensor alibi_slopes;   /* [N] float32 */
  jaxflash_tensor dropout_seed;   /* [2] uint32: Philox key of this batch element */

  /* Outputs of the forward pass, inputs of the backward pass. */
  jaxflash_tensor out; /* [T, N, Hv], dtype of q */
  jaxflash_tensor lse; /* [N, T] float32, natural logarithm */

  /* Optional, where q has 16 bits: what rounding took from out, to be handed on as it
   * is. With it, delta has eight bits more, which the gradients need where queries,
   * keys or values have a large common part, such as an offset or an outlier channel.
   */
  jaxflash_tensor out_low; /* [T, N, Hv] int8 */
} jaxflash_attention_params;

/* dS = P o (dP - delta + d_lse), delta = rowsum(d_out o out), dP = d_out v^T. */
typedef struct jaxflash_attention_backward_params {
  size_t struct_size; /* sizeof(jaxflash_attention_backward_params) */
  jaxflash_attention_params forward;

  jaxflash_tensor d_out; /* [T, N, Hv], dtype of q */
  jaxflash_tensor d_lse; /* [N, T] float32; absent: zero */

  /* Wanted gradients; absent: not computed. Each but dbias covers the whole batch
   * shape, also where the operand was broadcast: the caller sums. dq, dk and dv have
   * the dtype of q or float32. */
  jaxflash_tensor dq;     /* [T, N, H] */
  jaxflash_tensor dk;     /* [S, K, H]  summed over the N / K heads of the group */
  jaxflash_tensor dv;     /* [S, K, Hv] likewise */
  jaxflash_tensor dscale; /* [N, T] float32: contribution of each row, to be summed */
  jaxflash_tensor dbias;  /* [N, T, S] any float dtype: summed in float32 over its axes
                           * of stride 0, batch axes too, whatever strides bias has.
                           * Of an empty batch it is 0 */
  jaxflash_tensor dsinks; /* [N, T] float32: contribution of each row, to be summed */
  jaxflash_tensor dalibi; /* [N, T] float32: contribution of each row, to be summed */
} jaxflash_attention_backward_params;

/* How the CPU backend runs in parallel. parallel_for must call task(argument, i) once
 * for every i in [0, count), in any order and on any threads, and return when all calls
 * have returned. num_threads is a hint for splitting the work. A task uses up to 300 KB
 * of its thread's stack. */
typedef struct jaxflash_executor {
  void* context;
  int32_t num_threads;
  void (*parallel_for)(void* context, int64_t count,
                       void (*task)(void* argument, int64_t index), void* argument);
} jaxflash_executor;

/* A CUDA device, as far as the choice of kernels and grids depends on it. */
typedef struct jaxflash_cuda_device {
  int32_t compute_capability; /* 90 for 9.0 */
  int32_t num_sms;
  int32_t shared_memory_of_block; /* bytes, at most, opted in */
  int32_t shared_memory_of_sm;    /* bytes */
} jaxflash_cuda_device;

/* One kernel of a pass, as it would be launched. Members that mean nothing for a kernel
 * are 0. */
typedef struct jaxflash_kernel {
  const char* name;   /* of its function, as profilers show it; static text */
  int32_t block_q;    /* rows of Q in a tile */
  int32_t block_kv;   /* keys in a tile */
  int32_t num_stages; /* of the tiles that stream through shared memory */
  int32_t num_threads;
  int64_t num_blocks;
  int64_t shared_memory_bytes; /* of a block, dynamic */
} jaxflash_kernel;

#define JAXFLASH_MAX_KERNELS 4

/* Which kernels serve a call, and why. */
typedef struct jaxflash_explanation {
  size_t struct_size;      /* sizeof(jaxflash_explanation) */
  const char* family;      /* "sm80", "sm90", or "none"; static text */
  const char* reason;      /* why this family; static text */
  size_t workspace_bytes;  /* that these kernels use; the query covers all families */
  int32_t is_reproducible; /* whether each run gives the same bits */
  int32_t num_kernels;
  jaxflash_kernel kernels[JAXFLASH_MAX_KERNELS]; /* in the order of their launches */
} jaxflash_explanation;

/* Static text: the name of a status, and the version as "0.1.0". */
JAXFLASH_API const char* jaxflash_status_name(jaxflash_status status);
JAXFLASH_API const char* jaxflash_version(void);

/* The sentence that explains the last failure on the calling thread: argument, what was
 * expected, what came. It stays as it is until a call fails on this thread again, or
 * the thread ends. */
JAXFLASH_API const char* jaxflash_last_error(void);

/* CPU. executor NULL: everything runs on the calling thread. Workspace: any alignment
 * of 64 bytes or more; NULL is fine where the query answers 0. */
JAXFLASH_API jaxflash_status jaxflash_attention_forward_workspace_cpu(
    const jaxflash_attention_params* params, size_t* bytes);
JAXFLASH_API jaxflash_status jaxflash_attention_forward_cpu(
    const jaxflash_attention_params* params, void* workspace, size_t workspace_bytes,
    const jaxflash_executor* executor);
JAXFLASH_API jaxflash_status jaxflash_attention_backward_workspace_cpu(
    const jaxflash_attention_backward_params* params, size_t* bytes);
JAXFLASH_API jaxflash_status jaxflash_attention_backward_cpu(
    const jaxflash_attention_backward_params* params, void* workspace,
    size_t workspace_bytes, const jaxflash_executor* executor);

/* CUDA. Pointers are device pointers of the current device, stream is a cudaStream_t;
 * the calls only enqueue work on it (they may be captured into a CUDA graph).
 * Workspace: 128-byte aligned device memory. The queries need no device. */
JAXFLASH_API jaxflash_status jaxflash_attention_forward_workspace_cuda(
    const jaxflash_attention_params* params, size_t* bytes);
JAXFLASH_API jaxflash_status
jaxflash_attention_forward_cuda(const jaxflash_attention_params* params,
                                void* workspace, size_t workspace_bytes, void* stream);
JAXFLASH_API jaxflash_status jaxflash_attention_backward_workspace_cuda(
    const jaxflash_attention_backward_params* params, size_t* bytes);
JAXFLASH_API jaxflash_status
jaxflash_attention_backward_cuda(const jaxflash_attention_backward_params* params,
                                 void* workspace, size_t workspace_bytes, void* stream);

/* What the call would launch on a device; NULL: on the current one. They launch
 * nothing, and with a device given need none. Of the pointers in `params` only
 * presence and alignment matter. What makes a call fail before it launches fails here
 * too. */
JAXFLASH_API jaxflash_status jaxflash_attention_explain_forward_cuda(
    const jaxflash_attention_params* params, const jaxflash_cuda_device* device,
    jaxflash_explanation* explanation);
JAXFLASH_API jaxflash_status jaxflash_attention_explain_backward_cuda(
    const jaxflash_attention_backward_params* params,
    const jaxflash_cuda_device* device, jaxflash_explanation* explanation);

#ifdef __cplusplus
}
#endif

#endif /* JAXFLASH_ATTENTION_H_ */
