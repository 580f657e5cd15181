"""What a serving loop of one's own needs: the engine's side of attention, and a small engine over it.

Attention, between a model's layers and the wrappers' plan and run (`flashpage.integrations`):

* gather          page numbers of a batch, out of a table of slots: one kernel, and its CPU twin
* token_pool      the two levels: request -> slots (RequestTable), slots -> K and V (TokenPool)
* forward_batch   a step as attention sees it, and what a layer asks of it
* kv_parts        which tokens of its requests a layer sees: all, a window, its own, the encoder's
* indices         those parts as CSR page tables
* backend         AttentionBackend: metadata once a step, forward once a layer
* paged_attention PagedAttention: the backend of this library
* graph_plans     its plans of captured steps
* trees           masks of speculative tokens
* drafts          steps of a draft model, planned together
* graph_runner    captured decode steps by batch size

The engine, requests in and greedy tokens out (`flashpage.engine`):

* request         one request: its tokens, and where it stands
* blocks          the paged pool: which request has which block, and which blocks hold which tokens already
* scheduler       which tokens of which requests the next step computes
* batch           those tokens as tensors
* runner          a step of the model: eager, or a captured graph
* engine          the loop around them
"""
