"""One guarded import per plugin: `Loaded`, or `Failed` with the stage, the cause and the exception.

Every plugin is registered with a pluggy manager of its own, so that none can disturb another's hooks.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import importlib_metadata
import pluggy

from vllm_core.api import (
    API_VERSION,
    ENTRY_POINT_GROUP,
    PLATFORM_HOOKS,
    PROJECT,
    BackendSpec,
    ConfigPatch,
    Device,
    DeviceFacts,
    DeviceSpec,
    Manifest,
    Offer,
    PlatformSpec,
    ProbeReport,
    ProgramOffer,
)
from vllm_core.api.version import parse
from vllm_core.errors import PluginError, VLLMCoreError, nearest
from vllm_core.registry.discover import Found, find_in
from vllm_core.registry.plan import Failed, Stage
from vllm_core.registry.validate import check_manifest, check_offers, check_programs

if TYPE_CHECKING:
    from vllm_core.registry.plan import Plan

T = TypeVar("T")


def attempt(call: Callable[[], T]) -> T | Exception:
    """Run plugin code and return its exception instead of raising it. The one place that catches broadly."""
    try:
        return call()
    except SystemExit as error:
        return RuntimeError(f"it called sys.exit({error.code!r})")
    except Exception as error:  # noqa: BLE001 - plugin code may raise anything; the error is kept and reported
        return error


def describe_error(error: BaseException) -> str:
    """One line: type, message, and the place in the plugin."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if len(frames) > 1 else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}{place}" if text else f"{type(error).__name__}{place}"


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A plugin that was imported and whose hooks and manifest are in order. `manifest` is None for kernels alone.

    The methods call the hooks. What a hook raises becomes a PluginError, except errors of vllm_core.errors.
    """

    found: Found
    manifest: Manifest | None
    plugin: Any
    hooks: Any

    @property
    def newer(self) -> bool:
        """Whether it was built for a later minor version of the API than this core has."""
        return self.manifest is not None and parse(self.manifest.api_version) > API_VERSION

    def probe(self) -> ProbeReport:
        """Look at this machine. Only for the child process of `registry.probe`."""
        report: ProbeReport = self._call("probe", ProbeReport)
        return report

    def configure(self, config: Mapping[str, Any], explicit: frozenset[str]) -> ConfigPatch:
        """Ask for the platform's changes to a complete configuration of which the user set ``explicit``."""
        patch: ConfigPatch = self._call("configure", ConfigPatch, config=config, explicit=explicit)
        return patch

    def programs(self, device: DeviceFacts) -> tuple[ProgramOffer, ...]:
        """The plugin's own step programs, checked. Raises PluginError."""
        programs = self._call("programs", Sequence, device=device)
        problem = check_programs(programs)
        if problem is not None:
            raise self._error("programs", problem.cause, "programs of different names", problem.fix)
        return tuple(programs)

    def start(self, device: DeviceFacts, sharers: int = 1) -> None:
        """Run the start hook of an engine process, one of ``sharers`` on the device."""
        self._call("start", object, device=device, sharers=sharers)

    def create_device(self, facts: DeviceFacts) -> Device:
        """Open the device in this process."""
        device: Device = self._call("create_device", Device, facts=facts)
        return device

    def offers(self, device: DeviceFacts) -> tuple[Offer, ...]:
        """The ops it implements for ``device``, checked. Raises PluginError."""
        (offers,) = self._call("offers", Sequence, device=device) or ((),)
        problem = check_offers(offers, newer=self.newer)
        if problem is not None:
            raise self._error("offers", problem.cause, "offers as vllm_core.api.Offer describes them", problem.fix)
        return tuple(offers)

    def _call(self, hook: str, kind: type, **arguments: object) -> Any:
        result = attempt(lambda: getattr(self.hooks, hook)(**arguments))
        if isinstance(result, VLLMCoreError):
            raise result
        if isinstance(result, Exception):
            error = self._error(hook, describe_error(result), "a hook that returns", "report this to the plugin's authors")
            raise error from result
        if not isinstance(result, kind):
            found = f"it returned {type(result).__name__}"
            raise self._error(hook, found, kind.__name__, "report this to the plugin's authors")
        return result

    def _error(self, hook: str, found: str, expected: str, fix: str) -> PluginError:
        on = f"{self.found.key} {self.found.version}, hook {hook!r}"
        return PluginError("Plugin failed", on=on, found=found, expected=expected, fix=fix)


def load(found: Found) -> Loaded | Failed:
    """Import, register and check one plugin. Imports nothing else."""
    plugin = attempt(importlib_metadata.EntryPoint(found.entry_point, found.value, ENTRY_POINT_GROUP).load)
    if isinstance(plugin, Exception):
        fix = f"pip install --force-reinstall {found.distribution}, or uninstall it; `vllm-core doctor` shows missing libraries"
        return _failed(found, "import", describe_error(plugin), fix, plugin)
    manager = pluggy.PluginManager(PROJECT)
    for spec in (PlatformSpec, DeviceSpec, BackendSpec):
        manager.add_hookspecs(spec)
    registered = attempt(lambda: manager.register(plugin, name=found.key))
    if isinstance(registered, Exception):
        cause = " ".join(str(registered).split())
        return _failed(found, "hooks", cause, "give the hook the arguments that vllm_core.api.hooks declares", registered)
    return _check_hooks(found, manager) or _check_manifest(found, plugin, manager)


def _check_hooks(found: Found, manager: pluggy.PluginManager) -> Failed | None:
    pending = attempt(manager.check_pending)
    if isinstance(pending, Exception):
        name = getattr(pending, "message", str(pending)).split("'")[1:2]
        fix = nearest(name[0], PLATFORM_HOOKS) if name else "see vllm_core.api.hooks"
        return _failed(found, "hooks", " ".join(str(pending).split()), fix, pending)
    hooks = [hook for hook in PLATFORM_HOOKS if getattr(manager.hook, hook).get_hookimpls()]
    required = ("offers",) if found.kernels_only else PLATFORM_HOOKS
    missing = [hook for hook in required if hook not in hooks]
    if not missing:
        return None
    if hooks == ["offers"]:
        return _failed(
            found,
            "hooks",
            f"{found.key} implements the hook 'offers' alone, but its entry point names a platform",
            "name the entry point PLATFORM.NAME if it adds kernels to another's platform; else implement the other hooks",
        )
    cause = f"{found.key} does not implement the hook {', '.join(map(repr, missing))}"
    return _failed(found, "hooks", cause, "implement it, marked with vllm_core.api.hookimpl")


def _check_manifest(found: Found, plugin: object, manager: pluggy.PluginManager) -> Loaded | Failed:
    if found.kernels_only:
        return Loaded(found, None, plugin, manager.hook)
    manifest = attempt(manager.hook.manifest)
    if isinstance(manifest, Exception):
        cause = f"the hook 'manifest' raised {describe_error(manifest)}"
        return _failed(found, "manifest", cause, "report this to the plugin's authors", manifest)
    problem = check_manifest(manifest, found.entry_point)
    if problem is not None:
        return _failed(found, problem.stage, problem.cause, problem.fix)
    return Loaded(found, manifest, plugin, manager.hook)


def _failed(found: Found, stage: Stage, cause: str, fix: str, error: Exception | None = None) -> Failed:
    return Failed(
        distribution=found.distribution, entry_point=found.entry_point, stage=stage, cause=cause, fix=fix, error=error
    )


def open_platform(plan: Plan) -> Loaded:
    """Load the plan's plugin, and no other, in an engine process. Raises PluginError."""
    on = f"{plan.distribution}:{plan.entry_point}"
    fix = "plan again in the environment where the engine runs"
    found = next((one for one in find_in(plan.distribution) if one.key == on), None)
    if found is None:
        raise PluginError("Plugin of the plan is missing", on=on, found="not installed here", expected="it installed", fix=fix)
    if found.version != plan.distribution_version:
        expected = f"version {plan.distribution_version}, for which the plan was made"
        raise PluginError("Plugin of the plan has changed", on=on, found=found.version, expected=expected, fix=fix)
    for owner in sorted(set(plan.owners.values())):
        if any(owner == f"{one.distribution} {one.version}" for one in find_in(owner.rpartition(" ")[0])):
            continue
        expected = f"{owner}, whose ops the plan has"
        raise PluginError("Plugin of the plan has changed", on=owner, found="not installed here", expected=expected, fix=fix)
    loaded = load(found)
    if isinstance(loaded, Failed):
        error = PluginError(
            "Plugin failed", on=on, found=loaded.cause, expected=f"stage {loaded.stage} to pass", fix=loaded.fix
        )
        raise error from loaded.error
    return loaded
