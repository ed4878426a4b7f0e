"""Transports: how messages of one round get from rank to rank."""

from hotspa_plugin.resharding.transports.loopback import LoopbackTransport, LoopbackWorld
from hotspa_plugin.resharding.transports.protocol import Message, Transport, Work
from hotspa_plugin.resharding.transports.torch_distributed import TorchDistributedTransport

__all__ = ["LoopbackTransport", "LoopbackWorld", "Message", "TorchDistributedTransport", "Transport", "Work"]
