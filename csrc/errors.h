// The sentence that fp_last_error() returns: one for each thread, set by the function that returns a status other than
// FP_OK.
#pragma once
#include <cstdint>
#include <exception>

#include "flashpage.h"

namespace flashpage::host {

// Stores the sentence (printf style) and returns `status`, so that a failure is one statement.
__attribute__((format(printf, 2, 3))) int32_t fail(fp_status status, const char* format, ...);

// Calls `work`, whose allocations may fail: C++ exceptions must not leave a function of the C ABI.
template <class Work>
int32_t guarded(const char* function, Work&& work) noexcept {
  try {
    return work();
  } catch (const std::exception& error) {
    return fail(FP_INTERNAL, "%s: no memory (%s)", function, error.what());
  }
}

}  // namespace flashpage::host
