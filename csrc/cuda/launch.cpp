// fp_run and fp_launch are called once a layer, so nothing here allocates, locks, waits or queries the device, and
// every call may be part of a stream capture.
#include "cpu/threads.h"
#include "cuda/fork.h"
#include "cuda/kernel.h"
#include "cuda/tensor_maps.h"
#include "errors.h"

namespace flashpage::host {
namespace {

constexpr VariantArgs no_variant{};
constexpr MaskTilesParams no_mask_tiles{};

const VariantArgs* variant_of(const fp_run_launch& launch) {
  return launch.variant != nullptr ? launch.variant : &no_variant;
}

// The kernel's context must be current.
int32_t launch_kernel(const fp_kernel& kernel, int grid, int cluster_size, void* stream, bool pdl,
                      const void* const* params) {
  const cuda::LaunchShape shape(kernel.info, grid, cluster_size, static_cast<cuda::Stream>(stream),
                                pdl && kernel.waits_itself);
  const auto result =
      kernel.driver->launch_kernel_ex(shape.config(), kernel.function, const_cast<void**>(params), nullptr);
  return result == cuda::success ? FP_OK : cuda::fail(result, ("launching " + kernel.entry).c_str());
}

int32_t launch_one(const fp_run_args& args, const fp_run_launch& launch) {
  KvMaps maps;  // not initialised if the kernel takes none
  if (launch.boxes != nullptr) {
    const auto& params = *static_cast<const AttentionParams*>(launch.params);
    const int32_t status = cuda::encode_maps(*launch.kernel->driver, *launch.boxes, params, maps);
    if (status != FP_OK) return status;
  }
  const void* params[] = {launch.params, variant_of(launch), &maps,
                          launch.mask_tiles != nullptr ? launch.mask_tiles : &no_mask_tiles};
  return launch_kernel(*launch.kernel, launch.grid, launch.cluster_size,
                       launch.is_aside ? args.fork->stream : args.stream, args.enable_pdl && launch.is_dependent,
                       params);
}

int32_t run_on_cuda(const fp_run_args& args) {
  const fp_kernel& first = *args.launches[0].kernel;
  cuda::CurrentContext current(*first.driver, first.context);
  int32_t status = current.status();
  if (status != FP_OK) return status;
  const auto stream = static_cast<cuda::Stream>(args.stream);
  if (args.fork != nullptr) status = cuda::fork_from(*args.fork, stream);
  if (status != FP_OK) return status;
  for (int i = 0; i < args.count && status == FP_OK; ++i) status = launch_one(args, args.launches[i]);
  if (args.fork == nullptr) return status;
  // Joins also after a failure, so that everything launched is done before later work on the caller's stream.
  const int32_t joined = cuda::join_into(*args.fork, stream);
  return status == FP_OK ? joined : status;
}

int32_t run_on_cpu(const fp_run_args& args) {
  for (int i = 0; i < args.count; ++i) {
    const fp_run_launch& launch = args.launches[i];
    const VariantArgs* variant = variant_of(launch);
    parallel_for(launch.grid, [&](int cta) { launch.kernel->cpu(launch.params, variant, cta, cta + 1); });
  }
  return FP_OK;
}

}  // namespace
}  // namespace flashpage::host

using namespace flashpage;

int32_t fp_run(const fp_run_args* args) {
  if (args->count <= 0) return FP_OK;
  const bool on_cuda = args->launches[0].kernel->cpu == nullptr;
  return host::guarded("fp_run", [&] { return on_cuda ? host::run_on_cuda(*args) : host::run_on_cpu(*args); });
}

int32_t fp_launch(const fp_kernel* kernel, const void* params, int32_t grid, void* stream, int32_t enable_pdl) {
  if (grid <= 0) return FP_OK;
  if (kernel->cpu != nullptr)
    return host::fail(FP_INTERNAL, "fp_launch takes CUDA kernels; a CPU kernel runs through fp_run");
  cuda::CurrentContext current(*kernel->driver, kernel->context);
  if (int32_t status = current.status(); status != FP_OK) return status;
  return host::launch_kernel(*kernel, grid, 0, stream, enable_pdl != 0, &params);
}

void fp_point(const fp_bound_run* run, void* q, void* k, void* v, void* out, void* lse) {
  for (int i = 0; i < run->num_parts; ++i) {
    const fp_bound_part& part = run->parts[i];
    *part.q = q;
    part.k_view->data = k;
    part.v_view->data = v;
    part.params->out = part.merge_params->out = out;
    part.params->lse = part.merge_params->lse = static_cast<float*>(lse);
  }
}
