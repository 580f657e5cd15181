// The C ABI of libflashpage.so, the host library: planner, pinned plan slots, CUDA driver launches, the CPU's threads.
// Python binds it with ctypes (flashpage/native/library.py); csrc/abi_structs.py reads the structs from here. Every
// function that can fail returns a status, and fp_last_error() returns this thread's sentence. Nothing throws, and
// nothing touches CUDA before the first fp_cuda_* call.
#pragma once
#include <cstdint>

#include "flashpage/params/block_params.h"
#include "flashpage/params/params.h"
#include "flashpage/plan/schedule.h"
#include "flashpage/plan/visible.h"

#define FP_API extern "C" __attribute__((visibility("default")))

enum fp_status : int32_t {
  FP_OK = 0,
  FP_BAD_LENGTHS = 1,          // fp_plan_result::error says which array, where and why
  FP_WORKSPACE_TOO_SMALL = 2,  // fp_plan_result says how much is needed
  FP_CUDA_ERROR = 3,
  FP_NO_CUDA = 4,
  FP_INTERNAL = 5,
  // The fast path does not apply, and nothing was done: Python takes the other path.
  FP_OTHER_TENSORS = 6,  // fp_py_run: not the tensors that the structs are bound to; fp_py_plan: lengths on a device
  FP_OTHER_PAGES = 7,    // fp_py_plan: the page numbers cannot be taken as they are; the lengths are taken
  FP_OTHER_BATCH = 8,    // fp_py_plan: the batch may need other kernels; lengths and page numbers are taken
  FP_OVER_LIMIT = 9,     // a plan exceeds a limit (plan_call.h, fp_limit) and was not copied
};

FP_API const char* fp_last_error();
// Identifies the headers from which the library was built; flashpage/native/structs.py has the same text.
FP_API const char* fp_abi_fingerprint();

// ---------------------------------------------------------------- planner (csrc/plan/planner.cpp,
// include/flashpage/plan/)

// A host array of int32 or int64, possibly strided. data == nullptr: not given.
struct fp_index_array {
  const void* data;
  int64_t stride;  // elements
  int32_t is_int64;
  int32_t length;
};

struct fp_problem {
  int32_t batch;
  int32_t q_len_per_request;     // used if q_indptr is not given
  fp_index_array q_indptr;       // rows, [batch + 1]
  fp_index_array kv_indptr;      // paged: pages; ragged: tokens; [batch + 1]
  fp_index_array last_page_len;  // paged; [batch]
  fp_index_array kv_lens;        // tokens; replaces last_page_len if given; [batch]
  int32_t page_size;             // tokens; 0: ragged
  int32_t num_q_heads;
  int32_t num_kv_heads;
  flashpage::Visibility visibility;
  int32_t has_custom_mask;  // 1: mask_offset counts bytes of a packed mask, in which each request's q_len * kv_len bits
                            // start on a byte
  int32_t has_mask_tiles;   // 1: mask_offset counts tile cells (mask function) instead of bytes of a packed mask
  int32_t least_rows;       // rows of q; requests with fewer have no work in this plan
  int32_t most_rows;        // requests with more have no work in this plan; 0: any number
  const int32_t* row_runs;  // [num_row_runs, 3], as plan::RowRun: rows, the first token that they may see, the end;
                            // null: all rows of a request may see all of its tokens
  int32_t num_row_runs;
};

using fp_schedule = flashpage::plan::Schedule;

struct fp_plan_result {
  int32_t num_ctas, num_items, num_merges, num_partial_rows;
  int64_t used_bytes;  // of the buffer
  int64_t total_q, total_kv, total_pages;
  int32_t max_q_len, max_kv_len;
  double cost_total_ns, cost_max_ns;  // sum and maximum over CTAs
  int32_t cluster_size;       // of the launch; 1: each unit has a CTA; 0: units are anywhere, for any cluster size
  int32_t most_merge_rounds;  // flashpage::merge_rounds of one cut unit; 0: none is cut
  int64_t mask_bytes;
  int64_t tile_cells;  // cells of a mask function's tiles for one KV head
  // With status FP_BAD_LENGTHS: which array (1 q_indptr, 2 kv_indptr, 3 last_page_len, 4 kv_lens), entry, value,
  // reason.
  int32_t error_array;
  int32_t error_reason;  // fp_length_error
  int64_t error_index, error_value, error_limit;
};

enum fp_length_error : int32_t {
  FP_LENGTH_NOT_ZERO_FIRST = 1,  // indptr[0] is negative (a non-zero start is allowed)
  FP_LENGTH_DECREASES = 2,       // indptr[i + 1] < indptr[i]
  FP_LENGTH_OUTSIDE = 3,         // last_page_len outside 1..page_size (without pages: 0..page_size)
  FP_LENGTH_TOO_MANY = 4,        // kv_lens[i] exceeds the request's pages; error_limit is their capacity
  FP_LENGTH_OVERFLOW = 5,        // a total does not fit in 31 bits
  FP_LENGTH_PARTS = 6,           // rows see tokens in more parts than a plan can have
};

// Writes header, CTA ranges, items and merges to `buffer` (any memory that the host can write). Balance, except for
// units with CTAs of their own (plan/own_ctas.h) and for dealt units (plan/whole_units.h): the costliest CTA is at most
// 3% above the mean, or above it by at most the cost of a piece and of one range that cannot be divided (a unit shorter
// than two of its shortest pieces and a tile_kv, or that many tokens of a longer one; times the KV heads of one CTA if
// num_ctas is not a multiple of num_kv_heads).
FP_API int32_t fp_plan(const fp_problem*, const fp_schedule*, void* buffer, int64_t capacity, fp_plan_result*);
// flashpage::merge_rounds.
FP_API int32_t fp_merge_rounds(int32_t partials, int32_t jobs);
// Upper bounds for every batch within the capacities: bytes of the plan, and rows of the partial buffers. max_q_rows 0:
// each request has one row; max_kv_tokens_of_one 0: one request may have all tokens. A fixed split's bound is far lower
// if one request can have neither all rows nor all tokens.
FP_API int32_t fp_plan_bounds(int32_t max_batch, int64_t max_q_rows, int64_t max_kv_tokens,
                              int64_t max_kv_tokens_of_one, int32_t num_q_heads, int32_t num_kv_heads,
                              const flashpage::Visibility*, const fp_schedule*, int64_t* plan_bytes,
                              int64_t* partial_rows);

// Lengths in the memory of the device that plans (csrc/plan/table_planner.cpp, include/flashpage/plan/tables.h).
struct fp_tables {
  const int32_t* q_indptr;      // rows, [batch + 1]; null: q_len_per_request rows each
  const void* seq_lens;         // tokens, [batch]
  const void* table_rows;       // rows of the block tables, [batch]; null: 0, 1, 2, ...
  const int32_t* num_requests;  // [1]; null: batch
  int64_t table_stride;  // entries from a row of the block tables [num_table_rows, table_columns] of i32 to the next
  int32_t num_table_rows;
  int32_t table_columns;   // pages
  int32_t lens_are_int64;  // seq_lens
  int32_t rows_are_int64;  // table_rows
  int32_t batch;
  int32_t q_len_per_request;
  int32_t max_rows;  // of q, if q_indptr is given
  int32_t page_size;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  flashpage::Visibility visibility;
};
// Bytes of the int workspace (for the plan and for planning) and rows of the partial buffers that suffice for all
// lengths.
FP_API int32_t fp_tables_bounds(const fp_tables*, const fp_schedule*, int64_t* bytes, int64_t* partial_rows);
// Plans into `destination`, as fp_plan does for the same lengths. With a kernel, this launches it on `stream` and
// returns; with null, the CPU plans before this returns.
struct fp_kernel;
FP_API int32_t fp_tables_plan(const fp_kernel*, const fp_tables*, const fp_schedule*, void* destination,
                              int64_t capacity, void* stream, int32_t enable_pdl);

// ---------------------------------------------------------------- plan slots (csrc/plan/slots.cpp)

// A ring of staging slots for one device. Plans in flight never overwrite each other's bytes: slots whose copy is in
// flight are skipped. If all are, the ring grows, up to 64 MiB, and then the host waits for the oldest copy. A ring
// that was larger than plans need for a long time gives slots back. device < 0: plain memory.
struct fp_slots;
FP_API fp_slots* fp_slots_create(int32_t device, int64_t slot_bytes);
FP_API void fp_slots_destroy(fp_slots*);
// Copies `size` bytes, at most a slot's size, from host memory in `stream`'s order. The source may be reused at once.
FP_API int32_t fp_slots_copy(fp_slots*, const void* bytes, int64_t size, void* destination, void* stream);
// The bytes of the newest plan on the host (for work_items(), explain() and pictures); valid until the next plan.
FP_API const void* fp_slots_last(const fp_slots*);

// A mixed batch as two plans, one for the requests with few rows and one for those with many. Two kernels run side by
// side, each with a share of the CTAs (csrc/plan/parts.cpp).
struct fp_parts {
  int32_t most_few_rows;  // rows of q that a request of the first part may have
  int32_t few_ctas;  // written with the plan: CTAs of the first part; 0: one plan is better, and there are no parts
  float full_speed_share;     // fraction of the CTAs with which the first part is as fast as with all
  float reading_share;        // of its cost, what reading keys and values takes of it
  float least_gain_ns;        // a smaller gain is not worth two plans,
  float least_gain_share;     // and this fraction of one plan's cost is added to it
  int64_t most_partial_rows;  // capacity of the partial buffers
  const fp_schedule* whole;   // schedule of a single plan; the other two are for the parts, with all CTAs:
  const fp_schedule* few;
  const fp_schedule* many;
  // Written by fp_parts_count.
  int64_t few_requests, few_rows, many_requests, many_rows;  // rows of q
  int64_t few_typical_rows;                                  // by which the kernel of few rows is chosen
  // Written with the plan.
  double whole_ns, parts_ns;   // costs by the schedules
  int64_t second_offset;       // bytes from the first plan to the second
  int64_t second_partial_row;  // first partial row of the second plan
  flashpage::plan::Schedule schedules[2];
  fp_plan_result results[2];
};
// Counts the requests and rows of each part, ignoring requests without rows. Wrong lengths are reported by planning.
FP_API void fp_parts_count(const fp_problem*, fp_parts*);

// ---------------------------------------------------------------- kernels and launches (csrc/cuda/)

struct fp_kernel;  // a CPU function or a CUDA function of one device

struct fp_kernel_info {
  int32_t threads;       // of a CTA
  int32_t shared_bytes;  // dynamic shared memory
  int32_t ctas_per_sm;   // resident, by the occupancy calculator
  int32_t num_sms;       // CUDA: of the device; CPU: threads of the pool
  int32_t registers, local_bytes;
  int32_t cluster_rows;  // packed rows of a unit that a cluster can merge; 0: the kernel does not use clusters
  int32_t clusters[5];   // of 1, 2, 4, 8 and 16 CTAs: how many run at once; 0: that size cannot run
};

// A CPU kernel: does the work of CTAs [cta_begin, cta_end).
typedef void (*fp_cpu_function)(const void* params, const flashpage::VariantArgs*, int32_t cta_begin, int32_t cta_end);
FP_API fp_kernel* fp_kernel_from_function(fp_cpu_function);
// The CPU's kernel that merges partial results (MergeParams) in a launch of one CTA; never destroyed.
// element_type: of out, 0 fp32, 1 fp16, 2 bf16, 3 e4m3
FP_API const fp_kernel* fp_cpu_merge_kernel(int32_t element_type);

struct fp_device_info {
  char name[128];
  int32_t sm;  // 90 for compute capability 9.0
  int32_t num_sms;
  int64_t memory_bytes, l2_bytes;
  int32_t shared_bytes_per_cta, shared_bytes_per_sm;
  int32_t clock_khz, memory_khz, memory_bus_bits;
  int32_t driver_version;
};
FP_API int32_t fp_cuda_device_count();  // 0 without a driver; creates no context
FP_API int32_t fp_cuda_device_info(int32_t device, fp_device_info*);
// Loads a cubin or PTX (cuLibraryLoadData) and resolves `entry` for this device. The image has its launch shape in the
// global `extern "C" __device__ const int flashpage_launch[3] = {threads, dynamic shared bytes, cluster rows}`; the
// last is fp_kernel_info::cluster_rows, 0 if the kernel is not launched with clusters.
FP_API fp_kernel* fp_cuda_kernel_load(int32_t device, const void* image, int64_t size, const char* entry);
FP_API void fp_kernel_destroy(fp_kernel*);
FP_API int32_t fp_kernel_describe(const fp_kernel*, fp_kernel_info*);

// A kernel that loads K, V or q by boxes (tensor maps, SWIZZLE_128B), or stores out by them, takes flashpage::KvMaps as
// its third parameter. Maps are encoded at every run, because addresses change from layer to layer; dimensions and
// strides are bound beforehand.
struct fp_box_form {
  int32_t element_bytes;  // 1 or 2
  int32_t box[4];         // elements
  int64_t dims[4];        // elements: columns, tokens of a page, heads, pages
  int64_t strides[3];     // bytes: between tokens, heads, pages
};
struct fp_kv_boxes {
  fp_box_form k, v, q, out;  // element_bytes 0: the kernel uses no boxes for this tensor
};

// A batch whose mask tiles are computed, or upper bounds of all batches.
struct fp_masked_batch {
  int64_t mask_bytes;  // as in fp_plan_result
  int64_t tile_cells;  // as in fp_plan_result
  int64_t rows;
  int32_t requests;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t has_custom_mask;
  int32_t tile_heads;  // KV heads with tiles of their own: 1 or all
};
// Returns the number of 8-byte cells for the tiles, the queue of units and the bits of mixed tiles
// (tile/mask/mask_tiles.h). Writes all sizes, and the offsets of queue, list and bits.
FP_API int64_t fp_mask_cells(const fp_masked_batch*, const fp_schedule*, flashpage::MaskTilesParams*);

// A stream next to the caller's, for a run of two parts, and the events that fork and join it (csrc/cuda/fork.cpp). It
// belongs to one wrapper, whose runs follow each other.
struct fp_fork;
FP_API fp_fork* fp_fork_create(int32_t device);  // null after an error; works during a capture
FP_API void fp_fork_destroy(fp_fork*);

// One launch of a run. A kernel takes as many of the parameters as it has, in this order.
struct fp_run_launch {
  const fp_kernel* kernel;
  const void* params;                     // of the kernel's own type
  const flashpage::VariantArgs* variant;  // null: nothing was captured
  const fp_kv_boxes*
      boxes;  // third parameter: flashpage::KvMaps of the tensors in `params`, which are AttentionParams; or null
  const flashpage::MaskTilesParams* mask_tiles;  // null: the kernel has no mask tiles
  int32_t grid;                                  // CTAs; on the CPU: calls of the function
  int32_t cluster_size;                          // `grid` is a multiple of it; below 2: no clusters
  // With fp_run_args::enable_pdl: the kernel itself waits for the launch before it on its stream.
  int32_t is_dependent;
  int32_t is_aside;  // 1: on the stream of fp_run_args::fork instead of the caller's
};

// One attention call with its launches in order (flashpage/plan/launches.py). On the CPU each launch runs on the pool
// and ends before the next one begins.
struct fp_run_args {
  fp_run_launch launches[4];
  int32_t count;       // of launches; 0: nothing to do
  int32_t enable_pdl;  // programmatic dependent launch; ignored for kernels of PTX, which do not wait
  const fp_fork*
      fork;  // not null: a second stream forks from the caller's before the first launch and joins it after the last
  void* stream;
};
FP_API int32_t fp_run(const fp_run_args*);
// Launches any other kernel (merge_states, append): one struct of parameters by value.
FP_API int32_t fp_launch(const fp_kernel*, const void* params, int32_t grid, void* stream, int32_t enable_pdl);

// ---------------------------------------------------------------- called by Python itself (csrc/python.cpp)

// Functions of the running interpreter's stable ABI, torch's DLPack functions, and what else torch knows of a tensor.
// The latter take an at::Tensor, or the TensorImpl that it consists of; flashpage/native/fastcall.py has their names.
struct fp_python {
  void* (*long_from_long)(long);
  void* (*long_as_void_ptr)(void*);
  void (*err_clear)();
  void* (*eval_save_thread)();
  void (*eval_restore_thread)(void*);
  const void* none;
  const void* tensors;       // DLPackExchangeAPI, of torch.Tensor.__dlpack_c_exchange_api__; null: torch has none
  const void* tensor_class;  // torch.Tensor
  int64_t tensor_offset;     // bytes from a Python object of that class to its at::Tensor
  bool (*is_negative)(const void* tensor);
  bool (*is_inference)(const void* tensor);
  bool (*requires_grad)(const void* tensor_impl);
  bool (*is_grad_enabled)();
  int32_t (*storage_bytes)(const void* tensor, int64_t* bytes);
  int32_t (*storage_offset)(const void* tensor, int64_t* elements);
  void (*bump_version)(const void* tensor);  // not for inference tensors
};
// To be called before any fp_py_*. Returns FP_OTHER_TENSORS if the DLPack functions are missing or of an unknown
// version; then no function that takes tensors may be called.
FP_API int32_t fp_python_set(const fp_python*);

// The properties of a tensor that decide how it is bound: all but its address. The last run's address and size of the
// storage are kept because the storage is compared with the tensor only if either has changed.
struct fp_tensor_form {
  int32_t device_type;  // DLPack's numbers
  int32_t device_index;
  int32_t dtype;
  int32_t dims;  // -1: not given
  int64_t shape[5];
  int64_t strides[5];
  int64_t bytes;  // from the first element to the end of the last one
  const void* last_data;
  int64_t last_storage_bytes;
};

// The structs of one attention launch and its merge.
struct fp_bound_part {
  flashpage::AttentionParams* params;
  flashpage::MergeParams* merge_params;
  // Where the addresses of q and of the cache go: in params, or in the parameters of the kernel that copies them
  // before.
  const void** q;
  flashpage::KvView* k_view;
  flashpage::KvView* v_view;
  flashpage::KvView* key_scales;  // of formats, likewise
  flashpage::KvView* value_scales;
};

// A run whose structs are bound: the tensors that they fit, and where the tensors' addresses go.
struct fp_bound_run {
  fp_run_args* args;
  fp_bound_part parts[2];
  int32_t num_parts;
  int64_t v_offset;            // bytes from K to V if the cache is one tensor
  int64_t alignment_masks[4];  // addresses of q, K, V and out must have none of these bits
  fp_tensor_form q, k, v, out, lse;
  // The last columns of q's rows, if another tensor has them; dims -1: q has all. Kernels read all columns from q's
  // address, so that a tail may only be bound where it continues q's rows (flashpage/wrappers/latent_attention.py).
  fp_tensor_form q_tail;
  int64_t q_tail_offset;                    // bytes from q to its tail
  fp_tensor_form key_scales, value_scales;  // of formats; dims -1: the run has none
  int64_t scale_masks[2];                   // addresses of those must have none of these bits
};
// Sets the addresses of a run's tensors in the structs.
FP_API void fp_point(const fp_bound_run*, void* q, void* k, void* v, void* out, void* lse);

// All fp_py_* are METH_FASTCALL functions that return an int, because ctypes would take 0.06 us to convert each
// argument. These two take (address of an fp_bound_run, q, k or the cache, v or None, out, lse or None, stream) and
// return a status, and after them the scales of K and V in formats and the last columns of q, any of which may be None.
// fp_py_bind ignores the stream. fp_py_bind stores the tensors' properties; fp_py_run compares them. Each sets the
// addresses in the structs and bumps the versions of what is written; fp_py_run then calls fp_run. They return
// FP_OTHER_TENSORS if a tensor is not plain (csrc/python.h, read_tensor), or if one that is written may share memory
// with another.
FP_API void* fp_py_bind(void* self, void* const* arguments, intptr_t count);
FP_API void* fp_py_run(void* self, void* const* arguments, intptr_t count);
// Any number of tensors: FP_OTHER_TENSORS where one is no plain one, or has no elements.
FP_API void* fp_py_judge(void* self, void* const* arguments, intptr_t count);

// ---------------------------------------------------------------- the CPU's own (csrc/cpu/threads.cpp,
// csrc/cpu/cpu_ops.cpp)

FP_API int32_t fp_cpu_threads();                           // of the pool
FP_API int32_t fp_cpu_set_threads(int32_t n);              // 0: the default, the cores that this process may use
FP_API int32_t fp_cpu_features(char* text, int32_t size);  // "avx2,fma,f16c,avx512f,...": features of this machine
// element_type: 0 fp32, 1 fp16, 2 bf16
FP_API int32_t fp_cpu_merge_states(const flashpage::MergeStatesParams*, int32_t element_type);
FP_API int32_t fp_cpu_append(const flashpage::AppendParams*, int32_t element_bytes);
FP_API int32_t fp_cpu_gather_slots(const flashpage::GatherSlotsParams*);
