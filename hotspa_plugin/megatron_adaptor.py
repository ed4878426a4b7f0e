"""``import hotspa_plugin.megatron_adaptor`` after ``import torch`` lets a Megatron script take ``--hotspa-pool``.

This is the one module that changes another package by being imported: it installs the hooks that
``hotspa patch list`` names. Without ``--hotspa-pool`` on the command line Megatron behaves as it does without them.
"""

from hotspa_plugin.integrations.megatron.megatron_training.inventory import install

install()
