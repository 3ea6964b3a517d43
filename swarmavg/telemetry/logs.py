"""Loggers. A library never configures logging: records go to the standard library's loggers under ``swarmavg``, which are
silent until the application configures them; only the command line renders.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import structlog

logging.getLogger("swarmavg").addHandler(logging.NullHandler())


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A structlog logger over ``logging.getLogger(name)``: ``log.info("round finished", seconds=0.2)``."""
    return cast(
        structlog.stdlib.BoundLogger,
        structlog.wrap_logger(
            logging.getLogger(name),
            processors=[structlog.stdlib.filter_by_level, _render],
            wrapper_class=structlog.stdlib.BoundLogger,
            context_class=dict,
        ),
    )


def _render(_logger: Any, _method: str, event: structlog.typing.EventDict) -> tuple[tuple[str], dict[str, Any]]:
    """``event key=value key=value`` as the message, and the fields under ``record.swarmavg`` for structured handlers."""
    passed = {key: event.pop(key) for key in ("exc_info", "stack_info", "stacklevel") if key in event}
    message = str(event.pop("event", ""))
    fields = " ".join(f"{key}={value}" for key, value in event.items())
    text = f"{message} {fields}".rstrip()
    return (text,), {"extra": {"swarmavg": dict(event)}, **passed}
