"""Parts for a serving loop of one's own: the engine's side of attention, and a small engine that uses it.

Attention, between a model's layers and the wrappers' plan and run (`flashpage.integrations`):

* gather          page numbers of a batch from a table of slots: one kernel, and its CPU version
* transfer        numbers from the host to a device in one copy
* token_pool      two levels of memory: request -> slots (RequestTable), slots -> K and V (TokenPool)
* forward_batch   the attention's view of a step (ForwardBatch) and of a layer (AttentionLayer)
* kv_parts        which tokens of its requests a layer sees: all, a window, the decoder's, the encoder's
* indices         those tokens as CSR page tables
* backend         AttentionBackend: metadata once a step, forward once a layer
* paged_attention PagedAttention: flashpage's backend
* graph_plans     PagedAttention's plans for captured steps
* trees           masks of speculative tokens
* drafts          several steps of a draft model, planned together
* graph_runner    captured decode steps by batch size

The engine, requests in and greedy tokens out (`flashpage.engine`):

* request         one request: its tokens, and where it stands
* blocks          the paged pool: which request has which block, and which tokens blocks still hold
* scheduler       which tokens of which requests the next step computes
* batch           those tokens as tensors
* runner          launches a step of the model, eager or a captured graph; its tokens stay on the device
* engine          the loop around them: launch a step, read the tokens of the one before
"""
