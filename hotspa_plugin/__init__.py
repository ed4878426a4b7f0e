"""Hot switching of parallel strategies inside one optimizer step, for Megatron-core and DeepSpeed.

Importing this package changes nothing in any other package.
"""

__version__ = "0.1.0"
