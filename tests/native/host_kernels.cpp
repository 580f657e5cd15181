// CPU "attention kernels" for tests/host/test_host*.py, which check how CTAs are distributed instead of attention.
#include "flashpage.h"

static thread_local char thread_mark;

// Counts the runs of each CTA in params->out, i32 [num_ctas], and stores an address that identifies the thread in
// params->q, void* [num_ctas].
extern "C" void count_ctas(const flashpage::AttentionParams* params, const flashpage::VariantArgs*, int32_t begin,
                           int32_t end) {
  for (int32_t cta = begin; cta < end; ++cta) {
    __atomic_fetch_add(static_cast<int32_t*>(params->out) + cta, 1, __ATOMIC_RELAXED);
    volatile float sum = 0;
    for (int i = 0; i < 20000; ++i) sum = sum + i;  // some 20 us, so that other threads find CTAs left
    const_cast<const void**>(static_cast<const void* const*>(params->q))[cta] = &thread_mark;
  }
}

// A run inside each CTA of a run: params->k.data is fp_run, params->v.data its arguments, one for each CTA.
extern "C" void run_inside(const flashpage::AttentionParams* params, const flashpage::VariantArgs*, int32_t begin,
                           int32_t) {
  auto run = reinterpret_cast<int32_t (*)(const fp_run_args*)>(const_cast<void*>(params->k.data));
  run(static_cast<const fp_run_args*>(params->v.data) + begin);
}
