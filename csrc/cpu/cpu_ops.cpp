#include "cpu/cpu_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/row_ops.h"
#include "cpu/threads.h"
#include "errors.h"

namespace flashpage::host {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr int chunk = 128;                  // elements of a row that are summed at a time
constexpr i64 bytes_per_task = 256 * 1024;  // a smaller task is not worth waking a thread

// The states of one output row: values [num_states][head_dim] and their LSEs (base 2), with strides in elements.
template <class T>
struct States {
  const T* values;
  const float* lse;
  i64 value_stride;
  i64 lse_stride;
  int count;
};

// out = sum of 2^(lse_i - max) * values_i over the sum of the weights, in the states' order; returns the joint LSE. A
// state with LSE = -inf saw no token, so its values are not read. If that holds for all states, out = 0 and LSE = -inf.
template <class In, class Out>
float combine(const States<In>& states, int head_dim, Out* out) {
  const RowOps<In>& in = row_ops<In>();
  const RowOps<Out>& rounded = row_ops<Out>();
  float highest = -infinity;
  for (int i = 0; i < states.count; ++i) highest = std::max(highest, states.lse[i * states.lse_stride]);
  float total = 0;
  for (int begin = 0; begin < head_dim; begin += chunk) {
    const int n = std::min(chunk, head_dim - begin);
    float sum[chunk] = {};
    total = 0;
    for (int i = 0; i < states.count; ++i) {
      const float lse = states.lse[i * states.lse_stride];
      if (lse == -infinity) continue;
      const float weight = std::exp2(lse - highest);
      total += weight;
      in.add_weighted(sum, states.values + i * states.value_stride + begin, weight, n);
    }
    rounded.store_scaled(out + begin, sum, total == 0 ? 0.0f : 1 / total, n);
  }
  return total == 0 ? -infinity : highest + std::log2(total);
}

template <class Out>
void merge_item(const MergeParams& params, const MergeItem& item) {
  for (int r = 0; r < item.num_rows; ++r) {
    u32 row, head_in_group;
    params.group.divmod(item.first_packed_row + r, row, head_in_group);
    const i64 q_row = item.q_begin + static_cast<i64>(row);
    const i64 head = static_cast<i64>(item.kv_head) * params.group.divisor + head_in_group;
    const i64 first = item.partial_row + static_cast<i64>(r);
    const States<float> states{params.partial_out + first * params.head_dim_vo, params.partial_lse + first,
                               static_cast<i64>(item.partial_stride) * params.head_dim_vo, item.partial_stride,
                               item.num_partials};
    Out* out = static_cast<Out*>(params.out) + q_row * params.out_row_stride + head * params.out_head_stride;
    const float lse = combine(states, params.head_dim_vo, out);
    if (params.lse != nullptr) params.lse[q_row * params.num_q_heads + head] = lse;
  }
}

// The distance of two addresses in elements.
template <class T>
i64 distance(const void* from, const void* to) {
  return (reinterpret_cast<i64>(to) - reinterpret_cast<i64>(from)) / static_cast<i64>(sizeof(T));
}

// Merges a row, unless the mask leaves it out.
template <class T>
void merge_row(const MergeStatesParams& params, i64 row) {
  if (params.mask != nullptr && params.mask[row] == 0) return;
  for (i64 head = 0; head < params.num_heads; ++head) {
    const i64 value_offset = row * params.v_row_stride + head * params.v_head_stride;
    const i64 lse_offset = row * params.s_row_stride + head;
    States<T> states{static_cast<const T*>(params.v) + value_offset, params.s + lse_offset, params.v_state_stride,
                     params.s_state_stride, params.num_states};
    if (params.v_other != nullptr) {  // two separate tensors: their distance is the stride
      states.value_stride = distance<T>(params.v, params.v_other);
      states.lse_stride = distance<float>(params.s, params.s_other);
      states.count = 2;
    }
    T* out = static_cast<T*>(params.out) + (row * params.num_heads + head) * params.head_dim;
    params.lse[row * params.num_heads + head] = combine(states, params.head_dim, out);
  }
}

// Calls body(first, last) over ranges of [0, count), each large enough for a thread; a step reads and writes `bytes`.
template <class F>
void parallel_ranges(i64 count, i64 bytes, F&& body) {
  const i64 step = std::max<i64>(1, bytes_per_task / std::max<i64>(1, bytes));
  parallel_for(static_cast<int>((count + step - 1) / step),
               [&](int task) { body(task * step, std::min(count, (task + 1) * step)); });
}

template <class T>
void merge_states(const MergeStatesParams& params) {
  const i64 bytes = static_cast<i64>(params.num_states + 1) * params.num_heads * params.head_dim * sizeof(T);
  parallel_ranges(params.rows, bytes, [&](i64 first, i64 last) {
    for (i64 row = first; row < last; ++row) merge_row<T>(params, row);
  });
}

// Copies one token's heads; one memcpy if the heads are consecutive in both places.
struct HeadCopy {
  i64 bytes;        // of one head
  i64 from_stride;  // bytes between heads
  i64 to_stride;
  int heads;

  void operator()(const char* from, char* to) const {
    if (from_stride == bytes && to_stride == bytes) {
      std::memcpy(to, from, bytes * heads);
      return;
    }
    for (int head = 0; head < heads; ++head) std::memcpy(to + head * to_stride, from + head * from_stride, bytes);
  }
};

void append(const AppendParams& params, i64 element) {
  const HeadCopy copy_key{params.head_dim_qk * element, params.key_head_stride * element,
                          params.k.head_stride * element, params.num_kv_heads};
  const HeadCopy copy_value{params.head_dim_vo * element, params.value_head_stride * element,
                            params.v.head_stride * element, params.num_kv_heads};
  const auto keys = static_cast<const char*>(params.append_key);
  const auto values = static_cast<const char*>(params.append_value);
  const auto k = static_cast<char*>(const_cast<void*>(params.k.data));
  const auto v = static_cast<char*>(const_cast<void*>(params.v.data));
  parallel_ranges(params.nnz, 2 * (copy_key.bytes + copy_value.bytes) * params.num_kv_heads, [&](i64 first, i64 last) {
    for (i64 i = first; i < last; ++i) {
      u32 page_in_request, token;
      params.page.divmod(params.positions[i], page_in_request, token);
      const i64 page = params.kv_indices[params.kv_indptr[params.batch_indices[i]] + static_cast<i64>(page_in_request)];
      copy_key(keys + i * params.key_row_stride * element,
               k + (page * params.k.page_stride + token * params.k.token_stride) * element);
      copy_value(values + i * params.value_row_stride * element,
                 v + (page * params.v.page_stride + token * params.v.token_stride) * element);
    }
  });
}

void gather_slots(const GatherSlotsParams& p) {
  const i64 pages = p.indptr[p.batch] - p.indptr[0];
  const i64 bytes = (pages / std::max(1, p.batch) + 1) * 2 * static_cast<i64>(sizeof(i32));
  parallel_ranges(p.batch, bytes, [&](i64 first, i64 last) {
    for (i64 r = first; r < last; ++r) {
      const i32* slots = p.table + p.rows[r] * p.table_row_stride + (p.starts == nullptr ? 0 : p.starts[r]);
      for (i64 i = 0; i < p.indptr[r + 1] - p.indptr[r]; ++i)
        p.indices[p.indptr[r] + i] = static_cast<i32>(p.page.div(slots[i * p.page.divisor]));
    }
  });
}

int32_t bad_element_type(int32_t element_type) {
  return fail(FP_INTERNAL, "element type %d is none of 0 (fp32), 1 (fp16), 2 (bf16)", element_type);
}

}  // namespace

template <class Out>
void merge_partials(const void* merge_params, const VariantArgs*, int32_t, int32_t) {
  const auto& params = *static_cast<const MergeParams*>(merge_params);
  const MergeItem* items = plan_merges(params.plan);
  parallel_for(params.plan->num_merges, [&](int i) { merge_item<Out>(params, items[i]); });
}

template void merge_partials<float>(const void*, const VariantArgs*, int32_t, int32_t);
template void merge_partials<Half>(const void*, const VariantArgs*, int32_t, int32_t);
template void merge_partials<Bf16>(const void*, const VariantArgs*, int32_t, int32_t);
template void merge_partials<E4m3>(const void*, const VariantArgs*, int32_t, int32_t);

}  // namespace flashpage::host

using namespace flashpage::host;

int32_t fp_cpu_merge_states(const flashpage::MergeStatesParams* params, int32_t element_type) {
  if (element_type == 0) return merge_states<float>(*params), FP_OK;
  if (element_type == 1) return merge_states<flashpage::Half>(*params), FP_OK;
  if (element_type == 2) return merge_states<flashpage::Bf16>(*params), FP_OK;
  return bad_element_type(element_type);
}

int32_t fp_cpu_append(const flashpage::AppendParams* params, int32_t element_bytes) {
  append(*params, element_bytes);
  return FP_OK;
}

int32_t fp_cpu_gather_slots(const flashpage::GatherSlotsParams* params) {
  gather_slots(*params);
  return FP_OK;
}
