"""`flashinfer.sparse`: attention over blocks of tokens that a table names."""

from .wrappers.block_sparse import BlockSparseAttentionWrapper
from .wrappers.variable_sparse import VariableBlockSparseAttentionWrapper

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"]
