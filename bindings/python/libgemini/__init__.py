"""libgemini: memory of models that are larger than the GPU. PyTorch users want libgemini.torch.

SPDX-License-Identifier: Apache-2.0
"""

from .abi import GeminiError
from .manager import Manager, Range, parse_bytes
from .updates import Span

__all__ = ["GeminiError", "Manager", "Range", "Span", "parse_bytes", "version"]


def version() -> str:
    """The version of the C library that is loaded.

    Returns:
        "MAJOR.MINOR.PATCH".
    """
    from . import abi

    return abi.library().version().decode()
