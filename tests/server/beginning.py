"""Bodies of an engine's process that do not come to serve; nothing here loads torch."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

from smkern.server.messages import Failed, Fault


def fails(connection: Connection, options: dict[str, Any]) -> None:
    connection.send(Failed(Fault("ConfigError", f"{options['model']} has no config.json")))


def dies(connection: Connection, options: dict[str, Any]) -> None:
    os._exit(3)
