// Staging slots: a plan is written to a slot, and one copy moves it to the int workspace.
#include "plan/slots.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/driver.h"
#include "plan/parts.h"

using namespace flashpage;

namespace {

constexpr int first_slots = 2;  // one being copied, one being written
// Limit of all slots in flight. A host that plans further ahead waits, because all programs share pinned memory.
constexpr int64_t most_bytes = 64 << 20;
constexpr int64_t most_slots_at_least = 4;
constexpr int calm_uses = 256;  // after so many without need of the older half, a ring gives it back

enum class SlotState {
  free,
  in_flight,  // `copied` fires when the copy is done
};

struct Slot {
  void* bytes = nullptr;
  cuda::Event copied = nullptr;
  SlotState state = SlotState::free;
};

}  // namespace

struct fp_slots {
  const cuda::Driver* driver = nullptr;  // null: plain memory
  cuda::Context context = nullptr;
  int64_t slot_bytes = 0;
  std::vector<Slot> slots;
  size_t next = 0;  // the ring's oldest slot
  int calm = 0;     // uses in a row that needed no more than the newer half
  const void* last = nullptr;
};

namespace {

// Plain memory needs one slot, because its copy ends at once.
int first_slots_of(const fp_slots& ring) { return ring.driver == nullptr ? 1 : first_slots; }

int32_t add_slot(fp_slots& ring) {
  ring.slots.reserve(ring.slots.size() + 1);  // first, so that a failure leaves nothing to free
  Slot slot;
  if (ring.driver != nullptr) {
    const cuda::Driver& cuda = *ring.driver;
    FP_CUDA_TRY(event_create, &slot.copied, cuda::event_disable_timing);
    if (auto result = cuda.mem_host_alloc(&slot.bytes, ring.slot_bytes, cuda::host_alloc_portable)) {
      cuda.event_destroy(slot.copied);
      return cuda::fail(result, "allocating pinned memory for a plan");
    }
  } else if (slot.bytes = std::aligned_alloc(64, (ring.slot_bytes + 63) / 64 * 64); slot.bytes == nullptr) {
    return host::fail(FP_INTERNAL, "no memory for a plan of %lld bytes", static_cast<long long>(ring.slot_bytes));
  }
  ring.slots.insert(ring.slots.begin() + ring.next, slot);
  return FP_OK;
}

bool is_free(const fp_slots& ring, Slot& slot) {
  if (slot.state == SlotState::in_flight && ring.driver->event_query(slot.copied) == cuda::success) {
    slot.state = SlotState::free;
  }
  return slot.state == SlotState::free;
}

void release(fp_slots& ring, Slot& slot) {
  if (ring.driver == nullptr) {
    std::free(slot.bytes);
    return;
  }
  if (slot.state == SlotState::in_flight) ring.driver->event_synchronize(slot.copied);
  ring.driver->event_destroy(slot.copied);
  ring.driver->mem_free_host(slot.bytes);
}

void remove_slot(fp_slots& ring, size_t place) {
  ring.slots.erase(ring.slots.begin() + place);
  if (place < ring.next) --ring.next;
  if (ring.next >= ring.slots.size()) ring.next = 0;
}

// Gives back the older half of a ring that a burst of plans has made larger.
void shrink(fp_slots& ring) {
  const size_t count = ring.slots.size(), fewer = std::max<size_t>(first_slots, count / 2);
  if (count <= fewer) return;
  const size_t oldest_of_fewer = (ring.next + count - fewer) % count;
  ring.calm = is_free(ring, ring.slots[oldest_of_fewer]) ? ring.calm + 1 : 0;
  if (ring.calm < calm_uses) return;
  ring.calm = 0;
  for (size_t left = count - fewer; left > 0 && is_free(ring, ring.slots[ring.next]); --left) {
    release(ring, ring.slots[ring.next]);
    remove_slot(ring, ring.next);
  }
}

// Advances the ring until its oldest slot is free. If all are in use, adds a slot or waits for the oldest copy.
int32_t find_slot(fp_slots& ring) {
  shrink(ring);
  for (size_t tried = 0; tried < ring.slots.size(); ++tried) {
    if (is_free(ring, ring.slots[ring.next])) return FP_OK;
    ring.next = (ring.next + 1) % ring.slots.size();
  }
  const auto count = static_cast<int64_t>(ring.slots.size());
  if (count < std::max(most_slots_at_least, most_bytes / ring.slot_bytes)) return add_slot(ring);
  const cuda::Driver& cuda = *ring.driver;
  FP_CUDA_TRY(event_synchronize, ring.slots[ring.next].copied);
  ring.slots[ring.next].state = SlotState::free;
  return FP_OK;
}

// Copies the oldest slot's bytes to the device in the stream's order; the slot stays in use until they are there.
int32_t copy_on_device(fp_slots& ring, void* destination, int64_t bytes, cuda::Stream stream, int32_t& was_captured) {
  const cuda::Driver& cuda = *ring.driver;
  Slot& slot = ring.slots[ring.next];
  int capture;
  FP_CUDA_TRY(stream_is_capturing, stream, &capture);
  FP_CUDA_TRY(memcpy_htod_async, reinterpret_cast<cuda::DevicePointer>(destination), slot.bytes, bytes, stream);
  ring.last = slot.bytes;
  const bool is_captured = capture != cuda::capture_status_none;
  const cuda::Result recorded = is_captured ? cuda::success : cuda.event_record(slot.copied, stream);
  if (is_captured || recorded != cuda::success) {
    // A graph copies from the slot at every replay, or no event tells when this copy is done: the slot leaves the ring,
    // neither written nor freed again.
    remove_slot(ring, ring.next);
    was_captured |= is_captured;
    return recorded == cuda::success ? FP_OK : cuda::fail(recorded, cuda.event_record_symbol);
  }
  slot.state = SlotState::in_flight;
  ring.next = (ring.next + 1) % ring.slots.size();
  return FP_OK;
}

// Replaces the slots by larger ones of `bytes` each; the old ones are freed when nothing reads them any more.
int32_t grow(fp_slots& ring, int64_t bytes) {
  fp_slots larger;
  larger.driver = ring.driver;
  larger.context = ring.context;
  larger.slot_bytes = bytes;
  int32_t status = FP_OK;
  for (int i = 0; i < first_slots_of(ring) && status == FP_OK; ++i) {
    status = host::guarded("fp_plan_batch", [&] { return add_slot(larger); });
  }
  if (status == FP_OK) std::swap(ring, larger);
  for (Slot& slot : larger.slots) release(larger, slot);
  return status;
}

// Plans into a free slot by `write(bytes, capacity)`. If the slot is too small, write sets call.result.used_bytes to
// the size that it needs, and the ring grows.
template <class Write>
int32_t write_into_slot(fp_plan_call& call, Write&& write) {
  fp_slots& ring = *call.slots;
  const auto try_once = [&]() -> int32_t {
    if (int32_t status = find_slot(ring); status != FP_OK) return status;
    return write(ring.slots[ring.next].bytes, std::min(call.capacity, ring.slot_bytes));
  };
  const int32_t status = try_once();
  const int64_t needed = call.result.used_bytes;
  if (status != FP_WORKSPACE_TOO_SMALL || needed <= ring.slot_bytes || needed > call.capacity) return status;
  int64_t bytes = ring.slot_bytes;
  while (bytes < needed) bytes *= 2;
  const int32_t grown = grow(ring, bytes);
  return grown == FP_OK ? try_once() : grown;
}

template <class Write>
int32_t write_plan(fp_plan_call& call, Write&& write) {
  const fp_slots& ring = *call.slots;
  if (ring.driver == nullptr) return write_into_slot(call, write);
  cuda::CurrentContext current(*ring.driver, ring.context);
  if (int32_t status = current.status(); status != FP_OK) return status;
  cuda::RelaxedCapture relaxed(*ring.driver);
  return write_into_slot(call, write);
}

}  // namespace

fp_slots* fp_slots_create(int32_t device, int64_t slot_bytes) {
  fp_slots* ring = nullptr;
  const int32_t made = host::guarded("fp_slots_create", [&]() -> int32_t {
    ring = new fp_slots;
    ring->slot_bytes = std::max<int64_t>(slot_bytes, 64);
    if (device < 0) return add_slot(*ring);
    ring->context = cuda::primary_context(device);
    if (ring->context == nullptr) return FP_CUDA_ERROR;
    ring->driver = cuda::driver();
    cuda::RelaxedCapture relaxed(*ring->driver);
    cuda::CurrentContext current(*ring->driver, ring->context);
    int32_t status = current.status();
    for (int i = 0; i < first_slots && status == FP_OK; ++i) status = add_slot(*ring);
    return status;
  });
  if (made == FP_OK) return ring;
  fp_slots_destroy(ring);
  return nullptr;
}

void fp_slots_destroy(fp_slots* ring) {
  if (ring == nullptr) return;
  if (ring->driver == nullptr) {
    for (Slot& slot : ring->slots) release(*ring, slot);
  } else {
    cuda::RelaxedCapture relaxed(*ring->driver);
    cuda::CurrentContext current(*ring->driver, ring->context);
    for (Slot& slot : ring->slots) release(*ring, slot);
  }
  delete ring;
}

int32_t host::slots_plan(fp_plan_call& call) {
  fp_plan_result& result = call.result;
  return write_plan(call, [&](void* bytes, int64_t room) -> int32_t {
    const int32_t status = fp_plan(&call.problem, call.schedule, bytes, room, &result);
    if (status != FP_OK) return status;
    call.exceeded = result.num_partial_rows > call.most_partial_rows ? FP_LIMIT_PARTIAL_ROWS
                    : result.max_q_len > call.batch->longest_q       ? FP_LIMIT_Q_LEN
                    : result.max_kv_len > call.batch->longest_kv     ? FP_LIMIT_KV_LEN
                                                                     : 0;
    return call.exceeded == 0 ? FP_OK : FP_OVER_LIMIT;
  });
}

int32_t host::slots_plan_parts(fp_plan_call& call) {
  fp_parts& parts = *call.parts;
  parts.most_partial_rows = call.most_partial_rows;
  const int32_t status = write_plan(call, [&](void* bytes, int64_t room) -> int32_t {
    const int32_t planned = plan_parts(call.problem, parts, bytes, room, call.result);
    if (planned != FP_OK) return planned;
    // Longer requests than the caller allowed are for slots_plan to refuse.
    const bool fits = std::ranges::all_of(parts.results, [&](const fp_plan_result& part) {
      return part.max_q_len <= call.batch->longest_q && part.max_kv_len <= call.batch->longest_kv;
    });
    return fits && parts.few_ctas != 0 ? FP_OK : FP_OTHER_BATCH;
  });
  call.made_parts = status == FP_OK;
  return status;
}

int32_t host::slots_publish(fp_plan_call& call, void* stream) {
  fp_slots& ring = *call.slots;
  if (ring.driver == nullptr) {
    ring.last = ring.slots[ring.next].bytes;
    std::memcpy(call.destination, ring.last, call.result.used_bytes);
    return FP_OK;
  }
  cuda::CurrentContext current(*ring.driver, ring.context);
  if (int32_t status = current.status(); status != FP_OK) return status;
  return copy_on_device(ring, call.destination, call.result.used_bytes, static_cast<cuda::Stream>(stream),
                        call.was_captured);
}

int32_t fp_slots_copy(fp_slots* ring, const void* bytes, int64_t size, void* destination, void* stream) {
  if (size > ring->slot_bytes) {
    return host::fail(FP_INTERNAL, "%lld bytes do not fit a slot of %lld", static_cast<long long>(size),
                      static_cast<long long>(ring->slot_bytes));
  }
  if (ring->driver == nullptr) {
    std::memcpy(destination, bytes, size);
    return FP_OK;
  }
  cuda::CurrentContext current(*ring->driver, ring->context);
  if (int32_t status = current.status(); status != FP_OK) return status;
  {
    cuda::RelaxedCapture relaxed(*ring->driver);
    const int32_t status = host::guarded("fp_slots_copy", [&] { return find_slot(*ring); });
    if (status != FP_OK) return status;
  }
  std::memcpy(ring->slots[ring->next].bytes, bytes, size);
  int32_t was_captured = 0;
  return copy_on_device(*ring, destination, size, static_cast<cuda::Stream>(stream), was_captured);
}

const void* fp_slots_last(const fp_slots* ring) { return ring->last; }
