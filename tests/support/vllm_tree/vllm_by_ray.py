"""A platform plugin of vLLM: its platform for the CPU, which refuses Ray only because it names no resource of Ray's."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


def platform() -> str:
    """vLLM calls this entry point of the group `vllm.platform_plugins`."""
    return "vllm_by_ray.CpuPlatformOfRay"


class CpuPlatformOfRay(CpuPlatform):
    ray_device_key = "GPU"  # Ray counts the cards that it is told of, and looks for none

    @classmethod
    def device_control_id_to_physical_device_id(cls, device_id: str) -> int:
        """The NUMA node of a card."""
        return 0
