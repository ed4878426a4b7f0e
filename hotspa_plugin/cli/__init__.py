"""The command ``hotspa``. Modules import what is heavy inside their functions, so that ``hotspa --help`` is instant."""
