"""The launchers. Each file of this folder declares one way to start worker processes as its `LAUNCHER`."""

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.suggest import did_you_mean
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.spec.registry import registered
from tinkerflow.deployments.launching import Launcher

LAUNCHERS = registered(__name__, "LAUNCHER", Launcher)


def launcher_of(settings: Settings) -> Launcher | None:
    """The launcher that the settings name. The default is this machine, or None if other workers join by themselves.

    UserError: no launcher has the name.
    """
    name = settings.launcher or ("" if settings.group else "local")
    if name and name not in LAUNCHERS:
        raise UserError(f"launcher {name!r}: must be one of {', '.join(LAUNCHERS)}{did_you_mean(name, LAUNCHERS)}")
    return LAUNCHERS[name] if name else None


__all__ = ["LAUNCHERS", "launcher_of"]
