// The part of the C ABI that plans a batch in one call (csrc/plan/plan_call.cpp).
#pragma once
#include "flashpage.h"

// One batch: its lengths, copied from the caller's tensors, and its page numbers.
struct fp_batch {
  fp_index_array q_indptr, kv_indptr, last_page_len, kv_lens;  // written: as in fp_problem
  char* copies;                                                // of the four arrays, in this order
  int64_t bytes_of_a_copy;                                     // capacity for requests + 1 numbers of 64 bits
  int32_t q_len_per_request;                                   // rows of every request; 0: q_indptr gives them
  int32_t requests;                                            // written
  int64_t rows;              // written: of q, from q_indptr's first entry to its last (0 without)
  int64_t rows_end;          // written: q_indptr's last entry; without: the rows of all requests
  int64_t kv_begin, kv_end;  // written: kv_indptr's first and last entry
  int64_t least_rows;        // written: fewest rows of a request that has any, by q_indptr (0 without)
  int64_t most_rows;         // written: most rows of a request
  int64_t typical_rows;      // written by planning: rows of a request by which its kernel is chosen
  int32_t* page_buffer;      // not null: captured launches read page numbers here; numbers elsewhere are copied here
  int64_t page_buffer_entries;
  fp_slots* page_slots;         // copy page numbers of the host to a buffer on a card; null: they are not taken
  const int32_t* page_source;   // written: page numbers that the next published plan copies to page_buffer; or null
  const int32_t* page_numbers;  // written: where kernels read them
  int32_t* page_copies;         // the CPU's kernels read copies, so that later changes do not make them read elsewhere;
                                // int64 page numbers of the host become int32 here
  int64_t most_page_copies;     // capacity of page_copies
  int32_t max_page;             // written: the largest page number in use; -1: unknown
  int32_t device_type;          // of the kernels, as in DLPack
  int32_t device_index;
  int32_t is_paged;         // page numbers are needed
  int32_t has_full_pages;   // last_page_len and kv_lens need not be given
  int32_t checks_pages;     // page numbers on a card must be checked, so they are never taken here
  int32_t is_staged;        // plans and page numbers stay on the host until fp_plan_publish
  int64_t most_total_rows;  // limits of a batch; larger rows_end or kv_end are refused before planning
  int64_t most_entries;
  int32_t least_requests, most_requests;  // limits of a batch
  int64_t longest_q, longest_kv;          // limits of a request; refused before the plan is copied
  const int32_t* row_runs;                // as in fp_problem
  int32_t num_row_runs;
};

// Computes the sums of lengths that were not taken by fp_py_plan.
FP_API void fp_batch_sum_up(fp_batch*);

// A row of the table that classifies a batch by how many tokens its rows see; the first row that fits decides.
struct fp_context_row {
  int32_t contexts;                  // the class
  int64_t most_rows;                 // of the batch
  double least_rows_of_request;      // of a row's request, on average
  double least_tokens, most_tokens;  // seen by a row (contexts_of)
  int32_t has_equal_rows;            // 1: only batches whose requests with rows have equally many
  int32_t tile, usual_tile;          // not 0: only batches of which row tiles of `tile` packed rows compute at most
  double most_padding;               // so many times as much as tiles of `usual_tile`
};
struct fp_context_table {
  fp_context_row rows[16];
  int32_t count;
  int32_t group;  // query heads of a KV head
  double hidden;  // tokens hidden from a row for each row of its request: half a token if causal
};
// The class of requests with so many rows and tokens each; 0 if no row fits.
FP_API int32_t fp_contexts_of(const fp_context_table*, int32_t requests, const int32_t* q_lens, const int32_t* kv_lens);

// The batches that a kernel serves: typical rows of a request.
struct fp_row_class {
  int64_t least, most;
};

enum fp_limit : int32_t {
  FP_LIMIT_ROWS = 1,
  FP_LIMIT_ENTRIES = 2,
  FP_LIMIT_PARTIAL_ROWS = 3,
  FP_LIMIT_Q_LEN = 4,
  FP_LIMIT_KV_LEN = 5,
  FP_LIMIT_REQUESTS = 6,
};

// The plans of one set of options: everything but the batch.
struct fp_plan_call {
  fp_batch* batch;
  fp_problem problem;  // the arrays and the number of requests are written
  fp_slots* slots;
  void* destination;
  int64_t capacity;
  const fp_schedule* schedule;
  fp_row_class row_class;  // that the schedule's kernel serves; most < 0: no kernel is chosen yet
  int32_t contexts;        // the class that the kernel serves; below 0: any
  int32_t weighs_rows;     // 1: rows count by the tokens that they see; 0: their average is typical
  int32_t made_parts;      // written: 1 if there are two plans, which `parts` describes
  const fp_context_table* context_table;
  fp_parts* parts;         // null: no batch is divided
  fp_row_class few_class;  // that the kernels of the two parts serve
  fp_row_class many_class;
  int64_t most_partial_rows;
  double gathered_rows_of_request;  // a batch with at least so many rows in a request, or
  double gathered_rows;             // in total may gain from gathering its K and V
  int32_t exceeded;                 // written with FP_OVER_LIMIT: fp_limit
  int32_t was_captured;             // written: 1 after a plan that was captured by a graph
  fp_plan_result result;            // written; with two plans: the sums
};
// Plans the current batch. is_chosen: the schedules are known to fit it; otherwise FP_OTHER_BATCH is returned if they
// may not.
FP_API int32_t fp_plan_batch(fp_plan_call*, void* stream, int32_t is_chosen);
// The class of the current batch's contexts, by the call's table.
FP_API int32_t fp_plan_contexts(const fp_plan_call*);
// Copies a staged plan to its destination, and page numbers that fp_py_plan took to their buffer, in the stream's
// order.
FP_API int32_t fp_plan_publish(fp_plan_call*, void* stream);
// Takes (address of an fp_plan_call, stream, q_indptr, kv_indptr, last_page_len, kv_lens, page numbers). Lengths are
// host tensors or None (kv_indptr is required, q_indptr if the batch has no q_len_per_request, and last_page_len or
// kv_lens for pages of several tokens that may be partly filled); page numbers may be None. Copies the lengths and
// plans. If captured launches read page numbers from a buffer, page numbers of the host are copied there after the
// plan, in the stream's order.
FP_API void* fp_py_plan(void* self, void* const* arguments, intptr_t count);
