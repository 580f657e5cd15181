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

// What one attention launch has of its own; a run has one or two.
struct Part {
  const fp_kernel* attention;
  const fp_kernel* merge;
  const fp_kv_boxes* boxes;
  const AttentionParams* params;
  const MergeParams* merge_params;
  int32_t num_ctas;
  int32_t num_merges;
};

Part first_part(const fp_run_args& args) {
  return {args.attention, args.merge, args.boxes, args.params, args.merge_params, args.num_ctas, args.num_merges};
}

// Two launches over the same tensors.
class Parts {
 public:
  explicit Parts(const fp_run_args& args)
      : first_(*args.params), second_(*args.params), merge_(*args.merge_params), parts_{first_part(args), {}} {
    const fp_second_part& own = *args.second;
    first_.beside = Beside::first;
    second_.beside = Beside::second;
    second_.plan = merge_.plan = own.plan;
    second_.partial_out = own.partial_out;
    second_.partial_lse = own.partial_lse;
    second_.box_tokens = own.box_tokens;
    second_.query_box_rows = own.query_box_rows;
    merge_.partial_out = own.partial_out;
    merge_.partial_lse = own.partial_lse;
    parts_[0].params = &first_;
    parts_[1] = {own.attention, own.merge, own.boxes, &second_, &merge_, own.num_ctas, own.num_merges};
  }
  Parts(const Parts&) = delete;
  Parts& operator=(const Parts&) = delete;

  const Part* begin() const { return parts_; }
  const Part* end() const { return parts_ + 2; }

 private:
  AttentionParams first_, second_;
  MergeParams merge_;
  Part parts_[2];
};

int32_t launch_attention(const fp_run_args& args, const Part& part, MaskTilesParams& mask_tiles) {
  const cuda::Driver& driver = *part.attention->driver;
  KvMaps maps;  // left as it is where the kernel takes none
  if (part.boxes != nullptr) {
    const int32_t status = cuda::encode_maps(driver, *part.boxes, *part.params, maps);
    if (status != FP_OK) return status;
  }
  void* params[] = {const_cast<AttentionParams*>(part.params), const_cast<VariantArgs*>(variant_of(args)), &maps,
                    &mask_tiles};
  // Without it the second launch would wait for the first, and leave most of the SMs idle.
  const bool enable_pdl = args.enable_pdl != 0 || part.params->beside == Beside::second;
  const auto result = launch_kernel({part.attention, part.num_ctas, args.stream, enable_pdl}, params);
  return result == cuda::success ? FP_OK : cuda::fail(result, "launching the attention kernel");
}

int32_t launch_merge(const fp_run_args& args, const Part& part) {
  if (part.merge == nullptr || part.num_merges <= 0) return FP_OK;
  const int grid = std::min(part.num_merges, merge_ctas_per_sm * part.merge->info.num_sms);
  void* params[] = {const_cast<MergeParams*>(part.merge_params)};
  const auto result = launch_kernel({part.merge, grid, args.stream, args.enable_pdl != 0}, params);
  return result == cuda::success ? FP_OK : cuda::fail(result, "launching the merge kernel");
}

int32_t launch_parts(const fp_run_args& args) {
  const Parts parts(args);
  MaskTilesParams mask_tiles{};
  for (const Part& part : parts) {
    if (int32_t status = launch_attention(args, part, mask_tiles); status != FP_OK) return status;
  }
  for (const Part& part : parts) {
    if (int32_t status = launch_merge(args, part); status != FP_OK) return status;
  }
  return FP_OK;
}

int32_t run_on_cuda(const fp_run_args& args) {
  cuda::CurrentContext current(*args.attention->driver, args.attention->context);
  if (args.second != nullptr) return launch_parts(args);
  MaskTilesParams mask_tiles{};
  if (args.mask_tiles != nullptr) {
    mask_tiles = *args.mask_tiles_params;
    void* mask_params[] = {&mask_tiles, const_cast<VariantArgs*>(variant_of(args))};
    const fp_kernel_info& info = args.mask_tiles->info;
    const int grid = info.ctas_per_sm * info.num_sms;
    auto result = launch_kernel({args.mask_tiles, grid, args.stream, args.enable_pdl != 0}, mask_params);
    if (result != cuda::success) return cuda::fail(result, "launching the kernel of mask tiles");
  }
  const Part part = first_part(args);
  const int32_t status = launch_attention(args, part, mask_tiles);
  return status == FP_OK ? launch_merge(args, part) : status;
}

int32_t run_part_on_cpu(const fp_run_args& args, const Part& part) {
  const fp_cpu_attention attention = part.attention->cpu;
  const VariantArgs* variant = variant_of(args);
  parallel_for(part.num_ctas, [&](int cta) { attention(part.params, variant, cta, cta + 1); });
  return part.num_merges > 0 ? merge_partials(*part.merge_params, args.out_dtype) : FP_OK;
}

int32_t run_on_cpu(const fp_run_args& args) {
  if (args.second == nullptr) return run_part_on_cpu(args, first_part(args));
  for (const Part& part : Parts(args)) {
    if (int32_t status = run_part_on_cpu(args, part); status != FP_OK) return status;
  }
  return FP_OK;
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
