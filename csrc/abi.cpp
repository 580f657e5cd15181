// What Python checks when it loads the library: the ABI's version and the size of every struct it mirrors.
#include <cstring>

#include "flashpage.h"

using namespace flashpage;

int32_t fp_abi_version() { return 13; }

int64_t fp_sizeof(const char* struct_name) {
  // The name in flashpage/native/library.py, which differs from the C name where the C struct is part of the C ABI.
  struct Entry {
    const char* name;
    int64_t size;
  };
  static constexpr Entry entries[] = {
      {"FastDiv", sizeof(FastDiv)},
      {"KvView", sizeof(KvView)},
      {"AttentionParams", sizeof(AttentionParams)},
      {"VariantTensor", sizeof(VariantTensor)},
      {"VariantArgs", sizeof(VariantArgs)},
      {"MaskTilesParams", sizeof(MaskTilesParams)},
      {"MergeParams", sizeof(MergeParams)},
      {"MergeStatesParams", sizeof(MergeStatesParams)},
      {"AppendParams", sizeof(AppendParams)},
      {"GatherSlotsParams", sizeof(GatherSlotsParams)},
      {"GatherRowsParams", sizeof(GatherRowsParams)},
      {"BlockPattern", sizeof(BlockPattern)},
      {"BlockAttentionParams", sizeof(BlockAttentionParams)},
      {"BlockWriteParams", sizeof(BlockWriteParams)},
      {"WorkItem", sizeof(WorkItem)},
      {"MergeItem", sizeof(MergeItem)},
      {"CtaItems", sizeof(CtaItems)},
      {"CtaStart", sizeof(CtaStart)},
      {"PlanHeader", sizeof(PlanHeader)},
      {"IndexArray", sizeof(fp_index_array)},
      {"ProblemStruct", sizeof(fp_problem)},
      {"Schedule", sizeof(fp_schedule)},
      {"Tables", sizeof(fp_tables)},
      {"PlanResult", sizeof(fp_plan_result)},
      {"Parts", sizeof(fp_parts)},
      {"MaskedBatch", sizeof(fp_masked_batch)},
      {"KernelInfo", sizeof(fp_kernel_info)},
      {"DeviceInfo", sizeof(fp_device_info)},
      {"BoxForm", sizeof(fp_box_form)},
      {"KvBoxes", sizeof(fp_kv_boxes)},
      {"SecondPart", sizeof(fp_second_part)},
      {"RunArgs", sizeof(fp_run_args)},
      {"Python", sizeof(fp_python)},
      {"TensorForm", sizeof(fp_tensor_form)},
      {"BoundRun", sizeof(fp_bound_run)},
      {"LengthsStruct", sizeof(fp_lengths)},
      {"SlotsCall", sizeof(fp_slots_call)},
  };
  for (const Entry& entry : entries) {
    if (std::strcmp(entry.name, struct_name) == 0) return entry.size;
  }
  return -1;
}
