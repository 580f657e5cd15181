// fp_run and fp_launch: once a layer, so nothing here allocates, locks, waits or asks the device anything, and every
// call may stand in a stream capture.
#include <algorithm>

#include "cpu/cpu_ops.h"
#include "cpu/threads.h"
#include "cuda/fork.h"
#include "cuda/kernel.h"
#include "cuda/tensor_maps.h"
#include "errors.h"

namespace flashpage::host {
namespace {

constexpr int merge_ctas_per_sm = 4;  // they have little to do; more than can be resident only add launch work

constexpr VariantArgs no_variant{};

const VariantArgs* variant_of(const fp_run_args& args) { return args.variant != nullptr ? args.variant : &no_variant; }

struct Launch {
  const fp_kernel* kernel;
  int grid;
  int cluster_size;  // below 2: no clusters
  void* stream;
  bool enable_pdl;
};

// The kernel's context must be current.
cuda::Result launch_kernel(const Launch& launch, void** params) {
  const fp_kernel& kernel = *launch.kernel;
  const cuda::LaunchShape shape(kernel.info, launch.grid, launch.cluster_size, static_cast<cuda::Stream>(launch.stream),
                                launch.enable_pdl);
  return kernel.driver->launch_kernel_ex(shape.config(), kernel.function, params, nullptr);
}

// What one attention launch has of its own; a run has one or two.
struct Part {
  const fp_kernel* attention;
  const fp_kernel* merge;
  const fp_kv_boxes* boxes;
  const AttentionParams* params;
  const MergeParams* merge_params;
  int32_t num_ctas;
  int32_t cluster_size;
  int32_t merge_ctas;
};

Part first_part(const fp_run_args& args) {
  return {args.attention,    args.merge,    args.boxes,        args.params,
          args.merge_params, args.num_ctas, args.cluster_size, args.merge_ctas};
}

// The other launch over the same tensors.
class SecondPart {
 public:
  explicit SecondPart(const fp_run_args& args) : params_(*args.params), merge_params_(*args.merge_params) {
    const fp_second_part& own = *args.second;
    params_.plan = merge_params_.plan = own.plan;
    params_.partial_out = own.partial_out;
    params_.partial_lse = own.partial_lse;
    params_.box_tokens = own.box_tokens;
    params_.query_box_rows = own.query_box_rows;
    params_.out_box_rows = own.out_box_rows;
    params_.cta_rows = own.cta_rows;
    merge_params_.partial_out = own.partial_out;
    merge_params_.partial_lse = own.partial_lse;
    part_ = {own.attention, own.merge, own.boxes, &params_, &merge_params_, own.num_ctas, 0, own.merge_ctas};
  }
  SecondPart(const SecondPart&) = delete;
  SecondPart& operator=(const SecondPart&) = delete;

  const Part& part() const { return part_; }

 private:
  AttentionParams params_;
  MergeParams merge_params_;
  Part part_;
};

// Where a launch goes, and whether it may begin before the one ahead of it there has ended.
struct Place {
  void* stream;
  bool enable_pdl;
};

int32_t launch_attention(const fp_run_args& args, const Part& part, Place place, MaskTilesParams& mask_tiles) {
  KvMaps maps;  // left as it is where the kernel takes none
  if (part.boxes != nullptr) {
    const int32_t status = cuda::encode_maps(*part.attention->driver, *part.boxes, *part.params, maps);
    if (status != FP_OK) return status;
  }
  void* params[] = {const_cast<AttentionParams*>(part.params), const_cast<VariantArgs*>(variant_of(args)), &maps,
                    &mask_tiles};
  const auto result =
      launch_kernel({part.attention, part.num_ctas, part.cluster_size, place.stream, place.enable_pdl}, params);
  return result == cuda::success ? FP_OK : cuda::fail(result, "launching the attention kernel");
}

int32_t launch_merge(const Part& part, Place place) {
  if (part.merge == nullptr || part.merge_ctas <= 0) return FP_OK;
  const int grid = std::min(part.merge_ctas, merge_ctas_per_sm * part.merge->info.num_sms);
  void* params[] = {const_cast<MergeParams*>(part.merge_params)};
  const auto result = launch_kernel({part.merge, grid, 0, place.stream, place.enable_pdl}, params);
  return result == cuda::success ? FP_OK : cuda::fail(result, "launching the merge kernel");
}

// Behind an event: the attention launch waits for all that came before it. The merge is its dependent as ever.
int32_t launch_forked(const fp_run_args& args, const Part& part, void* stream) {
  MaskTilesParams mask_tiles{};
  const int32_t status = launch_attention(args, part, {stream, false}, mask_tiles);
  return status == FP_OK ? launch_merge(part, {stream, args.enable_pdl != 0}) : status;
}

// Side by side, on two streams: on one stream the second would not begin before the first ends, not even as a dependent
// that has SMs of its own. The first goes first, so that whole SMs are free for all its CTAs.
int32_t launch_parts(const fp_run_args& args) {
  const SecondPart second(args);
  const fp_fork& fork = *args.second->fork;
  const auto stream = static_cast<cuda::Stream>(args.stream);
  if (int32_t status = cuda::fork_from(fork, stream); status != FP_OK) return status;
  int32_t status = launch_forked(args, first_part(args), fork.stream);
  if (status == FP_OK) status = launch_forked(args, second.part(), args.stream);
  // Also after a failure: what was launched is done before whatever follows on the caller's stream.
  const int32_t joined = cuda::join_into(fork, stream);
  return status == FP_OK ? joined : status;
}

// A kernel of as many CTAs as are resident, whose result the attention kernel waits for.
int32_t launch_ahead(const fp_kernel& kernel, Place place, void** params, const char* what) {
  const int grid = kernel.info.ctas_per_sm * kernel.info.num_sms;
  const auto result = launch_kernel({&kernel, grid, 0, place.stream, place.enable_pdl}, params);
  return result == cuda::success ? FP_OK : cuda::fail(result, what);
}

int32_t find_mask_tiles(const fp_kernel& kernel, const MaskTilesParams& mask_tiles, const VariantArgs* variant,
                        Place place) {
  void* params[] = {const_cast<MaskTilesParams*>(&mask_tiles), const_cast<VariantArgs*>(variant)};
  return launch_ahead(kernel, place, params, "launching the kernel of mask tiles");
}

int32_t run_on_cuda(const fp_run_args& args) {
  cuda::CurrentContext current(*args.attention->driver, args.attention->context);
  if (args.second != nullptr) return launch_parts(args);
  const Place place{args.stream, args.enable_pdl != 0};
  MaskTilesParams mask_tiles{};
  if (args.mask_tiles_params != nullptr) mask_tiles = *args.mask_tiles_params;
  if (args.mask_tiles != nullptr) {
    const int32_t status = find_mask_tiles(*args.mask_tiles, mask_tiles, variant_of(args), place);
    if (status != FP_OK) return status;
  }
  if (args.gather_rows != nullptr) {
    void* params[] = {const_cast<GatherRowsParams*>(args.gather_params)};
    const int32_t status = launch_ahead(*args.gather_rows, place, params, "launching the kernel that gathers rows");
    if (status != FP_OK) return status;
  }
  const Part part = first_part(args);
  const int32_t status = launch_attention(args, part, place, mask_tiles);
  return status == FP_OK ? launch_merge(part, place) : status;
}

int32_t run_part_on_cpu(const fp_run_args& args, const Part& part) {
  const fp_cpu_attention attention = part.attention->cpu;
  const VariantArgs* variant = variant_of(args);
  parallel_for(part.num_ctas, [&](int cta) { attention(part.params, variant, cta, cta + 1); });
  return part.merge_ctas > 0 ? merge_partials(*part.merge_params, args.out_dtype) : FP_OK;
}

int32_t run_on_cpu(const fp_run_args& args) {
  const int32_t status = run_part_on_cpu(args, first_part(args));
  return status == FP_OK && args.second != nullptr ? run_part_on_cpu(args, SecondPart(args).part()) : status;
}

}  // namespace
}  // namespace flashpage::host

using namespace flashpage;

int32_t fp_run(const fp_run_args* args) {
  if (args->num_ctas <= 0) return FP_OK;
  return args->attention->cpu == nullptr ? host::run_on_cuda(*args) : host::run_on_cpu(*args);
}

int32_t fp_find_mask_tiles(const fp_kernel* kernel, const MaskTilesParams* params, void* stream) {
  cuda::CurrentContext current(*kernel->driver, kernel->context);
  return host::find_mask_tiles(*kernel, *params, &host::no_variant, {stream, false});
}

int32_t fp_launch(const fp_kernel* kernel, const void* params, int32_t grid, void* stream, int32_t enable_pdl) {
  if (grid <= 0) return FP_OK;
  if (kernel->cpu != nullptr)
    return host::fail(FP_INTERNAL, "fp_launch takes CUDA kernels; a CPU kernel runs through fp_run");
  cuda::CurrentContext current(*kernel->driver, kernel->context);
  void* kernel_params[] = {const_cast<void*>(params)};
  auto result = host::launch_kernel({kernel, grid, 0, stream, enable_pdl != 0}, kernel_params);
  return result == cuda::success ? FP_OK : cuda::fail(result, "launching the kernel");
}
