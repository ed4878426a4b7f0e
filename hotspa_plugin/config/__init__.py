"""The configuration of ``hotspa train``: its models, how a file is read, and the commented default file."""

from hotspa_plugin.config.model import PRESETS, ModelConfig
from hotspa_plugin.config.opening import open_data
from hotspa_plugin.config.reader import parse_config, read_config
from hotspa_plugin.config.template import default_config_text
from hotspa_plugin.config.training import (
    DEFAULT_POOL,
    DataConfig,
    OptimizerConfig,
    RecordConfig,
    RunConfig,
    TrainingConfig,
)

__all__ = [
    "DEFAULT_POOL",
    "PRESETS",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RecordConfig",
    "RunConfig",
    "TrainingConfig",
    "default_config_text",
    "open_data",
    "parse_config",
    "read_config",
]
