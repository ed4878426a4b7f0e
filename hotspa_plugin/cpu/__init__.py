"""Runs CUDA-only Python code on the CPU, for demos, tests and CI. Opt-in: ``hotspa_plugin.cpu.enable()``."""

from hotspa_plugin.cpu.redirect import disable, enable, is_enabled

__all__ = ["disable", "enable", "is_enabled"]
