// The part of the C ABI that plans a batch in one call (csrc/plan/plan_call.cpp).
#pragma once
#include "flashpage.h"

// One batch: its lengths, copied from the caller's tensors, and its page numbers.
struct fp_batch {
  fp_index_array q_indptr, kv_indptr, last_page_len, kv_lens;  // written: as fp_problem has them
  char* copies;                                                // of the four arrays, one after the other
  int64_t bytes_of_a_copy;                                     // room for requests + 1 numbers of 64 bits
  int32_t q_len_per_request;                                   // rows of every request; 0: q_indptr says
  int32_t requests;                                            // written
  int64_t rows;                 // written: of q, from q_indptr's first entry to its last (0 without)
  int64_t rows_end;             // written: q_indptr's last entry; without: the rows of all requests
  int64_t kv_begin, kv_end;     // written: kv_indptr's first and last entry
  int64_t least_rows;           // written: of a request that has any, as q_indptr says (0 without)
  int64_t most_rows;            // written
  const int32_t* page_buffer;   // not null: where captured launches read page numbers; they are taken in no other place
  const int32_t* page_numbers;  // written: where kernels read them
  int32_t* page_copies;         // the CPU: its kernels read copies, so that no later change makes them read elsewhere
  int64_t most_page_copies;     // room there
  int32_t max_page;             // written: the largest one in use; -1: not known
  int32_t device_type;          // of the kernels, as DLPack has it
  int32_t device_index;
  int32_t is_paged;         // page numbers are needed
  int32_t checks_pages;     // page numbers on a card are looked at, too: never taken here
  int64_t most_total_rows;  // limits of all batches; rows_end and kv_end beyond them are refused before planning
  int64_t most_entries;
  int64_t longest_q, longest_kv;  // limits of one request, refused before the plan is copied
};

// Fills in what follows from lengths that were written by another way than fp_py_plan.
FP_API void fp_batch_sum_up(fp_batch*);

// A row of the table that puts a batch into a class by what its rows see; the first row that fits it decides.
struct fp_context_row {
  int32_t contexts;                  // the class
  int64_t most_rows;                 // of the batch
  double least_rows_of_request;      // on average
  double least_tokens, most_tokens;  // that a row sees, on average
};
struct fp_context_table {
  fp_context_row rows[4];
  int32_t count;
  int32_t page_size;  // tokens of an entry; at least 1
  double hidden;      // tokens that a row does not see for each row of its request: half of them if causal
};
// The class of a batch; 0 where no row fits.
FP_API int32_t fp_contexts_of(const fp_context_table*, int64_t requests, int64_t rows, int64_t tokens);

// Batches that one kernel is for, by the rows of a request on average, rounded up.
struct fp_row_class {
  int64_t least, most;
};

enum fp_limit : int32_t {
  FP_LIMIT_ROWS = 1,
  FP_LIMIT_ENTRIES = 2,
  FP_LIMIT_PARTIAL_ROWS = 3,
  FP_LIMIT_Q_LEN = 4,
  FP_LIMIT_KV_LEN = 5,
};

// The plans of one set of options: everything but the batch.
struct fp_plan_call {
  fp_batch* batch;
  fp_problem problem;  // the arrays and the number of requests are written
  fp_slots* slots;
  void* destination;
  int64_t capacity;
  const fp_schedule* schedule;
  fp_row_class row_class;  // that the schedule's kernel is for; most < 0: none was chosen yet
  int32_t contexts;        // the class that the kernel is for; below 0: any
  int32_t made_parts;      // written: there are two plans, as `parts` says
  const fp_context_table* context_table;
  fp_parts* parts;         // null: no batch is divided
  fp_row_class few_class;  // that the kernels of both parts are for
  fp_row_class many_class;
  int64_t most_partial_rows;
  double gathered_rows_of_request;  // a batch of at least so many, or
  double gathered_rows;             // so many in all, may want its K and V gathered
  int32_t exceeded;                 // written with FP_OVER_LIMIT: fp_limit
  int32_t was_captured;             // written: 1 after a plan that a graph captured
  fp_plan_result result;            // written; of two plans: the sums
};
// Plans the batch that is held. is_chosen: the schedules are right for it; else FP_OTHER_BATCH where they may not be.
FP_API int32_t fp_plan_batch(fp_plan_call*, void* stream, int32_t is_chosen);
// (address of an fp_plan_call, stream, q_indptr, kv_indptr, last_page_len, kv_lens, page numbers): takes the lengths,
// each a tensor on the host or None (kv_indptr must be given, and q_indptr where the batch has no q_len_per_request),
// and the page numbers, None for none, and plans.
FP_API void* fp_py_plan(void* self, void* const* arguments, intptr_t count);
