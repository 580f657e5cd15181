#include "errors.h"

#include <cstdarg>
#include <cstdio>

namespace flashpage::host {

static thread_local char last_error[1024] = "";

int32_t fail(fp_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
  return status;
}

}  // namespace flashpage::host

const char* fp_last_error() { return flashpage::host::last_error; }
