"""Files of a model's folder that are JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smkern.atomic import read_whole
from smkern.errors import SmkernError
from smkern.strict_json import parse


def read_json(path: Path, error: type[SmkernError]) -> Mapping[str, Any]:
    """The object in a JSON file.

    Raises:
        error: no such file, or no JSON object in it.
    """
    try:
        found = parse(read_whole(path))
    except OSError as reason:
        raise error(f"{path} cannot be read ({reason.strerror}): pass a model's folder") from None
    except ValueError as reason:
        raise error(f"{path} is not JSON ({reason}): download it again") from None
    if not isinstance(found, dict):
        raise error(f"{path} holds a {type(found).__name__}, wanted an object: download it again")
    return found
