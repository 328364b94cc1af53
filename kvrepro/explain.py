"""What a method does and which of its settings a paper fixes: ``kvrepro explain METHOD``."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from typing import Any

from .methods import method_class


def explain(name: str) -> dict[str, Any]:
    """A method's summary, formula, paper, schedule, settings and arms.

    Parameters
    ----------
    name : str
        ``"selkv"``, or an arm, ``"selkv/evict"``: its own settings are marked.

    Returns
    -------
    dict
        ``settings`` is a list of dicts with name, default, meaning, source (what the paper says, or our choice) and
        choices.

    Raises
    ------
    UserError
        An unknown method or arm.
    """
    from .methods import make

    base, _, _ = name.partition("/")
    cls, made = method_class(base), make(name)
    return {
        "method": name,
        "summary": inspect.getdoc(cls),
        "formula": cls.formula,
        "paper": cls.paper,
        "schedule": cls.schedule,
        "settings": [
            {
                "name": field.name,
                "default": getattr(made, field.name),
                "meaning": field.metadata["doc"],
                "source": field.metadata["source"],
                "choices": list(field.metadata["choices"] or []),
            }
            for field in dataclasses.fields(cls)
        ],
        "arms": {arm: dict(settings) for arm, settings in cls.arms.items()},
    }


SCHEDULES = {
    "one-shot": "compresses once, right after the prompt was attended to",
    "chunked": "attends and compresses chunk by chunk, inside the forward pass",
    "driven": "needs passes of its own through the model: kvrepro.prefill(model, cache, input_ids) before generate()",
}


def text(found: dict[str, Any], width: int = 110) -> str:
    """The same for a person."""
    lines = [f"{found['method']}  ({found['paper']})", "", found["summary"], ""]
    method, _, arm = found["method"].partition("/")
    changed = found["arms"].get(arm, {})
    lines += [
        f"formula (of {method}; the arm changes the marked settings)" if arm else "formula"
    ] + textwrap.wrap(found["formula"], width, initial_indent="  ", subsequent_indent="  ")
    lines += [f"schedule\n  {found['schedule']}: {SCHEDULES[found['schedule']]}", "settings"]
    for row in found["settings"]:
        shown = f"  {row['name']} = {row['default']!r}"
        if len(row["choices"]) > 1 and len(row["choices"]) < 10:
            shown += "   of " + ", ".join(map(repr, row["choices"]))
        if row["name"] in changed:
            shown += "   <- set by this arm"
        lines += [shown, f"      {row['meaning']}  [{row['source']}]"]
    if not found["settings"]:
        lines.append("  none")
    if found["arms"]:
        lines.append("arms")
        for arm, settings in found["arms"].items():
            lines.append(f"  {method}/{arm}: " + ", ".join(f"{k}={v!r}" for k, v in settings.items()))
    return "\n".join(lines)
