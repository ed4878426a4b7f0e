"""Hot switching inside ``megatron.training``: flags, hooks, data and log lines for users' own launch scripts.

Nothing here is imported before it is asked for: ``import hotspa_plugin.megatron_adaptor`` installs the hooks.
"""
