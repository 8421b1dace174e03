// SPDX-License-Identifier: Apache-2.0
//
// How the library reports failures: a status, and one sentence per thread.
#ifndef JAXFLASH_CSRC_API_STATUS_H_
#define JAXFLASH_CSRC_API_STATUS_H_

#include "jaxflash/attention.h"

namespace jaxflash {

// Stores the sentence that jaxflash_last_error() returns on this thread and hands the
// status back, so that a check reads `return fail(JAXFLASH_INVALID_ARGUMENT, ...)`.
// The sentence names the argument, what was expected and what came.
[[gnu::format(printf, 2, 3)]] jaxflash_status fail(jaxflash_status status,
                                                   const char* format, ...);

}  // namespace jaxflash

// Hands a failure on to the caller.
#define JAXFLASH_RETURN_IF_ERROR(expression)      \
  do {                                            \
    const jaxflash_status status_ = (expression); \
    if (status_ != JAXFLASH_OK) return status_;   \
  } while (false)

#endif  // JAXFLASH_CSRC_API_STATUS_H_
