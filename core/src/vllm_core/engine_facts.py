"""What is known of an engine from its blueprint, which holds its configuration, its model and its Plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_core.models import labels
from vllm_core.models.labels import Labels

if TYPE_CHECKING:
    from vllm_core.launch import Blueprint


class EngineFacts:
    """Facts of an engine that has been planned; demotions of a run replace the blueprint."""

    _design: Blueprint | None = None

    @property
    def _blueprint(self) -> Blueprint:
        assert self._design is not None, "start() was not awaited"
        return self._design

    @property
    def config(self) -> Any:
        """The engine's configuration."""
        return self._blueprint.config

    @property
    def runner(self) -> str:
        """``generate`` or ``pooling``."""
        return self._blueprint.runner

    @property
    def labels(self) -> Labels | None:
        """The classes of a model that classifies."""
        design = self._blueprint
        return labels.read(design.source.config) if design.spec.num_labels else None

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The model's own sampling defaults."""
        return self._blueprint.source.generation_config

    @property
    def model_names(self) -> list[str]:
        """Names that the model answers to."""
        config = self._blueprint.config.model
        return list(config.served_model_name) or [config.model]

    @property
    def plan_text(self) -> str:
        """The Plan for a person."""
        from vllm_core.registry import explain

        return explain.to_text(self._blueprint.plan)

    @property
    def platform_info(self) -> dict[str, str]:
        """Labels of the metric ``vllm:platform_info``."""
        plan = self._blueprint.plan
        return {
            "platform": plan.platform,
            "distribution": f"{plan.distribution} {plan.distribution_version}",
            "device": plan.device.name,
            "architecture": plan.device.architecture,
            "dtype": plan.dtype,
            "kv_dtype": plan.kv_dtype,
            "track": plan.track,
        }

    @property
    def plan_json(self) -> bytes:
        """The Plan as JSON, demotions of this run included."""
        from vllm_core.registry import explain

        return explain.to_json(self._blueprint.plan)

    @property
    def num_demotions(self) -> int:
        """Providers that failed, and that another one replaced."""
        return len(self._blueprint.plan.demotions)
