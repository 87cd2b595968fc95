"""What lies where: parameters in one-dimensional buffers, and buffers cut into equal chunks.

Pure arithmetic on names, shapes and integers. Refuses to know processes, devices and `torch.distributed`.
"""

from shardwise.layout.layout import SLOT_BYTES, Layout, Request, Slot, pack
from shardwise.layout.placement import DATA_PARALLEL, Placement, Role

__all__ = ["DATA_PARALLEL", "Layout", "Placement", "Request", "Role", "SLOT_BYTES", "Slot", "pack"]
