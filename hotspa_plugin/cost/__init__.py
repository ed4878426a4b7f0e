"""Time, memory and communication of strategies, predicted from figures that were measured or published."""

from hotspa_plugin.cost.communication import STAY, CommunicationModel, Transition
from hotspa_plugin.cost.memory import BucketMemory, MemoryModel
from hotspa_plugin.cost.micro_batch import MicroBatchCost, pipeline_s, shared_cores_s
from hotspa_plugin.cost.profile import ModelSizes, Profile, StageFigures, read_profile
from hotspa_plugin.cost.published import published_model, published_models, published_profile
from hotspa_plugin.cost.step import StepTime, exposed_reduce_s

__all__ = [
    "STAY",
    "BucketMemory",
    "CommunicationModel",
    "MemoryModel",
    "MicroBatchCost",
    "ModelSizes",
    "Profile",
    "StageFigures",
    "StepTime",
    "Transition",
    "exposed_reduce_s",
    "pipeline_s",
    "published_model",
    "published_models",
    "published_profile",
    "read_profile",
    "shared_cores_s",
]
