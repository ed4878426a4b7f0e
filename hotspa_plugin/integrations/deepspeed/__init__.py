"""DeepSpeed: hot switching as an option of its engine. ``hotspa_plugin.deepspeed`` is the public module."""
