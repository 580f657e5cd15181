// fp_run and fp_launch: once a layer, so nothing here allocates, locks, waits or asks the device anything, and every
// call may stand in a stream capture.
#include <algorithm>

#include "cpu_ops.h"
#include "errors.h"
#include "kernel.h"
#include "tensor_maps.h"
#include "threads.h"

namespace flashpage::host {
namespace {

constexpr int merge_ctas_per_sm = 4;  // merge items are short; more CTAs than can be resident only add launch work

const VariantArgs* variant_of(const fp_run_args& args) {
  static constexpr VariantArgs none{};
  return args.variant != nullptr ? args.variant : &none;
}

struct Launch {
  const fp_kernel* kernel;
  int grid;
  void* stream;
  bool enable_pdl;
};

// The kernel's context must be current.
cuda::Result launch_kernel(const Launch& launch, void** params) {
  cuda::LaunchAttribute pdl{};
  pdl.id = cuda::launch_attribute_programmatic_stream_serialization;
  pdl.value.programmatic_stream_serialization_allowed = 1;
  const cuda::LaunchConfig config{
      .grid_x = static_cast<unsigned>(launch.grid),
      .grid_y = 1,
      .grid_z = 1,
      .block_x = static_cast<unsigned>(launch.kernel->info.threads),
      .block_y = 1,
      .block_z = 1,
      .shared_bytes = static_cast<unsigned>(launch.kernel->info.shared_bytes),
      .stream = static_cast<cuda::Stream>(launch.stream),
      .attributes = &pdl,
      .num_attributes = launch.enable_pdl ? 1u : 0u,
  };
  return launch.kernel->driver->launch_kernel_ex(&config, launch.kernel->function, params, nullptr);
}

int32_t run_on_cuda(const fp_run_args& args) {
  const fp_kernel* attention = args.attention;
  cuda::CurrentContext current(*attention->driver, attention->context);
  KvMaps maps;  // left as it is where the kernel takes none
  if (args.boxes != nullptr) {
    const int32_t status = cuda::encode_maps(*attention->driver, *args.boxes, *args.params, maps);
    if (status != FP_OK) return status;
  }
  MaskTilesParams mask_tiles{};
  if (args.mask_tiles != nullptr) {
    mask_tiles = *args.mask_tiles_params;
    void* mask_params[] = {&mask_tiles, const_cast<VariantArgs*>(variant_of(args))};
    const fp_kernel_info& info = args.mask_tiles->info;
    const int grid = info.ctas_per_sm * info.num_sms;
    auto result = launch_kernel({args.mask_tiles, grid, args.stream, args.enable_pdl != 0}, mask_params);
    if (result != cuda::success) return cuda::fail(result, "launching the kernel of mask tiles");
  }
  void* attention_params[] = {const_cast<AttentionParams*>(args.params), const_cast<VariantArgs*>(variant_of(args)),
                              &maps, &mask_tiles};
  auto result = launch_kernel({attention, args.num_ctas, args.stream, args.enable_pdl != 0}, attention_params);
  if (result != cuda::success) return cuda::fail(result, "launching the attention kernel");
  if (args.merge == nullptr || args.num_merges <= 0) return FP_OK;
  const int grid = std::min(args.num_merges, merge_ctas_per_sm * args.merge->info.num_sms);
  void* merge_params[] = {const_cast<MergeParams*>(args.merge_params)};
  result = launch_kernel({args.merge, grid, args.stream, args.enable_pdl != 0}, merge_params);
  return result == cuda::success ? FP_OK : cuda::fail(result, "launching the merge kernel");
}

int32_t run_on_cpu(const fp_run_args& args) {
  const fp_cpu_attention attention = args.attention->cpu;
  const VariantArgs* variant = variant_of(args);
  parallel_for(args.num_ctas, [&](int cta) { attention(args.params, variant, cta, cta + 1); });
  return args.num_merges > 0 ? merge_partials(*args.merge_params, args.out_dtype) : FP_OK;
}

}  // namespace
}  // namespace flashpage::host

using namespace flashpage;

int32_t fp_run(const fp_run_args* args) {
  if (args->num_ctas <= 0) return FP_OK;
  return args->attention->cpu == nullptr ? host::run_on_cuda(*args) : host::run_on_cpu(*args);
}

int32_t fp_launch(const fp_kernel* kernel, const void* params, int32_t grid, void* stream, int32_t enable_pdl) {
  if (grid <= 0) return FP_OK;
  if (kernel->cpu != nullptr)
    return host::fail(FP_INTERNAL, "fp_launch takes CUDA kernels; a CPU kernel runs through fp_run");
  cuda::CurrentContext current(*kernel->driver, kernel->context);
  void* kernel_params[] = {const_cast<void*>(params)};
  auto result = host::launch_kernel({kernel, grid, stream, enable_pdl != 0}, kernel_params);
  return result == cuda::success ? FP_OK : cuda::fail(result, "launching the kernel");
}
