"""What a checkpoint says of the run that saved it, beside DeepSpeed's own state."""

from __future__ import annotations

import os

import torch

CLIENT_STATE = "hotspa"  # the key in DeepSpeed's client state


def check_saved_home(folder: str, tag: str | None, home: str) -> None:
    """Raises ValueError where the checkpoint ``tag`` (None: the latest) in ``folder`` was saved under another home.

    What is missing, or was saved without hot switching, is left to DeepSpeed.
    """
    if tag is None:
        latest = os.path.join(folder, "latest")
        if not os.path.isfile(latest):
            return
        with open(latest, encoding="utf-8") as file:
            tag = file.read().strip()
    path = os.path.join(folder, str(tag), "mp_rank_00_model_states.pt")
    if not os.path.isfile(path):
        return
    saved = torch.load(path, map_location="cpu", weights_only=False, mmap=True).get(CLIENT_STATE)
    if saved is not None and saved["home"] != home:
        raise ValueError(
            f"checkpoint {folder}/{tag} was saved with home {saved['home']}, this run has home {home}: set hotspa.home "
            f"to {saved['home']}, or start from its exported weights (save_pretrained, or gather_parameters)"
        )
