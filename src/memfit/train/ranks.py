"""Several ranks of one run: the devices that a configuration names for them."""

from __future__ import annotations

from memfit.capture.trace_source import machine_of
from memfit.devices import several_devices
from memfit.errors import ConfigError
from memfit.hardware.topology import Topology
from memfit.train.assemble import Assembly
from memfit.train.config import Config
from memfit.units import format_bytes, parse_bytes


def devices(config: Config, assembly: Assembly, device: str | None = None) -> Topology | None:
    """The devices that a configuration names; None where it is for one.

    Args:
        config: of the run.
        assembly: what it describes.
        device: as for `memfit.plan`.

    Raises:
        InputError: they cannot be read, or are not alike.
        ConfigError: the budget is more than a device has; or there is a DeepSpeed configuration, which says itself how to share the step out.
    """
    if config.fit.devices is None:
        return None
    if assembly.deepspeed is not None:
        raise ConfigError("fit.devices and a DeepSpeed configuration do not go together yet: leave out one of them")
    found = several_devices(config.fit.devices, machine_of(assembly.model, device))
    each = found.devices[0].memory_bytes
    assert config.fit.budget is not None, "whoever plans has one"
    asked = parse_bytes(config.fit.budget, total_bytes=each)
    if asked > each:
        raise ConfigError(
            f"fit.budget: {format_bytes(asked)} is more than the {format_bytes(each)} that each of the {len(found.devices)} devices has: lower it, or name "
            "larger devices"
        )
    return found


def one_device(config: Config, what: str) -> None:
    """Check that a configuration is for one device.

    Raises:
        ConfigError: it names several.
    """
    if config.fit.devices is not None:
        raise ConfigError(
            f"fit.devices: {what} is of one device, and {config.fit.devices!r} names several: leave fit.devices out"
        )
