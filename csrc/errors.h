// The sentence behind fp_last_error(): one per thread, written by whoever returns a status other than FP_OK.
#pragma once
#include <cstdint>

#include "flashpage.h"

namespace flashpage::host {

// Keeps the sentence (printf style) and returns `status`, so that a failure is one statement.
__attribute__((format(printf, 2, 3))) int32_t fail(fp_status status, const char* format, ...);

}  // namespace flashpage::host
