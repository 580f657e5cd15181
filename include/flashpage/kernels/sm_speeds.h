// What each SM reads from the L2 while all do: there its way to the L2 is the limit, and flashpage/sm_speeds.py
// concludes what that way leaves it of the memory's bandwidth. One CTA an SM.
#pragma once
#include "flashpage/params.h"
#include "flashpage/ptx/clock.h"
#include "flashpage/ptx/griddepcontrol.h"

namespace flashpage {

struct SmSpeeds {
  static constexpr int threads = 512;
  static constexpr int shared_bytes = 200 * 1024;  // not used: one CTA fills an SM

  FP_DEVICE static void run(const SmSpeedsParams& p) {
    __shared__ float speed;
    ptx::grid_dependency_wait();
    u32 sm = ptx::sm_index();
    if (threadIdx.x == 0) speed = 0;
    u64 begin = ptx::nanoseconds();
    __syncthreads();
    Reader reader{static_cast<const uint4*>(p.buffer), static_cast<u32>(p.buffer_bytes / batch_bytes)};
    reader.read(p.edge);
    float warp_speed = reader.read(p.window);
    reader.read(p.edge);
    if (threadIdx.x % 32 == 0) atomicAdd(&speed, warp_speed);
    if (reader.seen == 0x9e3779b9) speed = -1;  // so that no load is left out; if it happens, one SM's speed is off
    __syncthreads();
    if (threadIdx.x == 0 && sm < gridDim.x) {
      p.begins[sm] = begin;
      p.speeds[sm] = speed;
    }
    ptx::grid_dependency_launch();
  }

 private:
  static constexpr u32 in_flight = 16;  // loads of a thread
  static constexpr u32 batch_bytes = threads * in_flight * sizeof(uint4);

  // Each CTA goes round the buffer from a place of its own, each warp at its own pace.
  struct Reader {
    const uint4* buffer;
    u32 num_batches;
    u32 batch = blockIdx.x % num_batches;
    u32 seen = 0;

    // For so many nanoseconds; returns the warp's GB/s.
    FP_DEVICE float read(u64 nanoseconds) {
      u64 begin = ptx::nanoseconds(), passed = 0;
      u32 count = 0;
      for (; passed < nanoseconds; ++count) {
        read_batch();
        passed = ptx::nanoseconds() - begin;
      }
      return static_cast<float>(count * (batch_bytes / threads * 32)) / static_cast<float>(passed);
    }

    FP_DEVICE void read_batch() {
      const uint4* from = buffer + batch * (batch_bytes / sizeof(uint4)) + threadIdx.x;
      uint4 values[in_flight];
#pragma unroll
      for (u32 i = 0; i < in_flight; ++i) values[i] = __ldcg(from + i * threads);
#pragma unroll
      for (u32 i = 0; i < in_flight; ++i) seen ^= values[i].x ^ values[i].y ^ values[i].z ^ values[i].w;
      batch = batch + 1 == num_batches ? 0 : batch + 1;
    }
  };
};

}  // namespace flashpage
