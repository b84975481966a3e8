"""Track `transformers`: any Hugging Face causal model or encoder, rewired onto core's ops.

The model's own code runs, as transformers ships it; its attention goes through the public `AttentionInterface` to the
bound ops and the paged KV, its linear layers are built anew on the op `linear`. Modules that compute what core's ops
compute are exchanged for them: norms, gated MLPs, attention with its products, pre-norm layers, whole bodies. Which these
are is found out by running the class at a small width (`trial.py`, `recognise.py`). Nothing of transformers is patched and
no code of a model repository is run. `describe` reads the config (`description.py`), `build` makes the model (`model.py`,
`exchange.py`).
transformers is imported here and nowhere else in core.
"""

from __future__ import annotations

from vllm_core.models.transformers_track.description import describe
from vllm_core.models.transformers_track.model import build

__all__ = ["build", "describe"]
