"""Importing this module makes ``deepspeed.initialize`` honour a ``hotspa`` block in the DeepSpeed configuration.

``initialize`` does the same explicitly, ``uninstall`` puts DeepSpeed's own function back.
"""

from hotspa_plugin.integrations.deepspeed.engine import HotSwitchEngine
from hotspa_plugin.integrations.deepspeed.initialize import initialize, install, uninstall

__all__ = ["HotSwitchEngine", "initialize", "install", "uninstall"]

install()
