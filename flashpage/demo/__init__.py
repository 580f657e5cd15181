"""A small model decodes a batch through paged KV; its tokens are checked against torch (`make demo`)."""
