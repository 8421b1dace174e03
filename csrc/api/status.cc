// SPDX-License-Identifier: Apache-2.0
#include "api/status.h"

#include <cstdarg>
#include <cstdio>

#define JAXFLASH_STRINGIFY(x) #x
#define JAXFLASH_VERSION_TEXT(major, minor, patch) \
  JAXFLASH_STRINGIFY(major) "." JAXFLASH_STRINGIFY(minor) "." JAXFLASH_STRINGIFY(patch)

namespace jaxflash {
namespace {

// A fixed buffer, because reporting a failure must not allocate.
thread_local char last_error[512] = "";

}  // namespace

jaxflash_status fail(jaxflash_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace jaxflash

const char* jaxflash_status_name(jaxflash_status status) {
  switch (status) {
    case JAXFLASH_OK:
      return "OK";
    case JAXFLASH_INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case JAXFLASH_UNSUPPORTED:
      return "UNSUPPORTED";
    case JAXFLASH_UNAVAILABLE:
      return "UNAVAILABLE";
    case JAXFLASH_INTERNAL:
      return "INTERNAL";
  }
  return "UNKNOWN_STATUS";
}

const char* jaxflash_last_error(void) { return jaxflash::last_error; }

const char* jaxflash_version(void) {
  return JAXFLASH_VERSION_TEXT(JAXFLASH_VERSION_MAJOR, JAXFLASH_VERSION_MINOR,
                               JAXFLASH_VERSION_PATCH);
}
