#include "cpu/row_ops.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/cpu_features.h"
#include "cpu/elements.h"

namespace flashpage::host {
namespace {

template <class T>
[[gnu::always_inline]] inline void add_loop(float* sum, const T* values, float weight, int n) {
  for (int i = 0; i < n; ++i) sum[i] += weight * to_float(values[i]);
}
template <class T>
[[gnu::always_inline]] inline void store_loop(T* out, const float* sum, float scale, int n) {
  for (int i = 0; i < n; ++i) out[i] = from_float<T>(sum[i] * scale);
}

template <class T>
void add_baseline(float* sum, const T* values, float weight, int n) {
  add_loop(sum, values, weight, n);
}
template <class T>
void store_baseline(T* out, const float* sum, float scale, int n) {
  store_loop(out, sum, scale, n);
}

#if defined(__x86_64__)

template <class T>
[[gnu::target("avx2,fma")]] void add_avx2(float* sum, const T* values, float weight, int n) {
  add_loop(sum, values, weight, n);
}
template <class T>
[[gnu::target("avx2,fma")]] void store_avx2(T* out, const float* sum, float scale, int n) {
  store_loop(out, sum, scale, n);
}

// Half has conversion instructions, which compilers do not use in a loop.
[[gnu::target("avx2,fma,f16c")]] void add_f16c(float* sum, const Half* values, float weight, int n) {
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 x = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values + i)));
    _mm256_storeu_ps(sum + i, _mm256_fmadd_ps(_mm256_set1_ps(weight), x, _mm256_loadu_ps(sum + i)));
  }
  add_loop(sum + i, values + i, weight, n - i);
}
[[gnu::target("avx2,fma,f16c")]] void store_f16c(Half* out, const float* sum, float scale, int n) {
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(sum + i), _mm256_set1_ps(scale));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  store_loop(out + i, sum + i, scale, n - i);
}

template <class T>
RowOps<T> choose() {
  const CpuFeatures& has = cpu_features();
  if (!has.avx2 || !has.fma) return {add_baseline<T>, store_baseline<T>};
  if constexpr (is_same<T, Half>) {
    if (has.f16c) return {add_f16c, store_f16c};
  }
  return {add_avx2<T>, store_avx2<T>};
}

#else

template <class T>
RowOps<T> choose() {
  return {add_baseline<T>, store_baseline<T>};
}

#endif

}  // namespace

template <class T>
const RowOps<T>& row_ops() {
  static const RowOps<T> chosen = choose<T>();
  return chosen;
}
template const RowOps<float>& row_ops<float>();
template const RowOps<Half>& row_ops<Half>();
template const RowOps<Bf16>& row_ops<Bf16>();
template const RowOps<E4m3>& row_ops<E4m3>();

}  // namespace flashpage::host
