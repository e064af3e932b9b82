"""Errors as OpenAI's API words them, and which of them an error of the engine is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from smkern.server.messages import Fault


class ApiError(Exception):
    """What a client is told, and the status.

    Args:
        message: What is wrong, the limit and the remedy.
        status: The HTTP status.
        param: The parameter that is wrong.
        code: A name that programs look at.
        headers: Further headers of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": str(self), "type": kind, "param": self.param, "code": self.code,
            }
        }  # fmt: skip


REFUSALS = ("RequestError", "OutOfPagesError", "ArgumentError")
"""Classes of errors that say that a request was wrong."""


def of_engine(fault: Fault) -> ApiError:
    """An error of the engine, as a client is told it: the engine's number of a prompt is none of
    the client's, and a parameter has OpenAI's name."""
    if fault.kind in REFUSALS:
        message = re.sub(r"^prompt \d+", "the prompt", fault.message)
        return ApiError(message.replace("max_new_tokens", "max_tokens"))
    status = 503 if fault.kind in ("EngineDeadError", "StalledError", "DeviceError") else 500
    return ApiError(f"{fault.kind}: {fault.message}", status=status, code="engine_error")
