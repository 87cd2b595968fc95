"""Parameters that a module uses although another one owns them.

A released parameter that is touched while the model runs is fetched on demand (`released.py`), so nothing has to be
registered. The two functions exist because other libraries call them; they check their arguments.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.errors import ParameterError, explain

__all__ = ["register_external_parameter", "unregister_external_parameter"]


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that `module` uses `parameter` in its forward although it is not its own. Not needed, and without effect.

    Raises:
        ParameterError: the arguments are not a module and a parameter.
    """
    arguments: list[Any] = [module, parameter]
    if not (isinstance(arguments[0], nn.Module) and isinstance(arguments[1], nn.Parameter)):
        raise ParameterError(
            explain(
                "an external parameter is registered for a module",
                expected="(nn.Module, nn.Parameter)",
                found=f"({type(module).__name__}, {type(parameter).__name__})",
            )
        )


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`; likewise without effect."""
    register_external_parameter(module, parameter)
