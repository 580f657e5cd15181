"""PyTorch's attention functions on flashpage's kernels: after `import flashpage.torch_attention`,
`torch.nn.attention.activate_flash_attention_impl("flashpage")`."""

from .engines.pytorch.registration import NAME, register

__all__ = ["NAME", "register"]
