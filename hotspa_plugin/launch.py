"""``torchrun ... -m hotspa_plugin.launch [--cpu] SCRIPT ARGUMENTS``: runs a Megatron script with hot switching at hand.

For scripts that must not be touched: the hooks are installed first, then the script runs as it would by itself.
"""

from hotspa_plugin.integrations.megatron.megatron_training.launcher import main

if __name__ == "__main__":
    main()
