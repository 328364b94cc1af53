"""The record of the offline tasks: which package versions, which texts, which samples.

``data/pydoc_manifest.json`` lies beside the package folder, in a checkout and in the editable installation that the
project uses alike. `load` refuses to hand out samples that are not the recorded ones: results of two machines are only
comparable on the same text.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrepro.errors import UserError
from kvrepro.tasks import corpus, pydoc
from kvrepro.tasks.base import Sample

PATH = Path(__file__).resolve().parents[2] / "data" / "pydoc_manifest.json"
CONTEXTS = (1024, 1536, 2048, 4096, 8192)
SAMPLES = 64

_REWRITE = "run python -m kvrepro.tasks.pydoc --write-manifest"


def load(task: str, limit: int, context: int) -> list[Sample]:
    """The first ``limit`` samples of an offline task, checked against the manifest.

    Beyond the recorded contexts and indices only the packages' texts are checked, which settle the samples as well.

    Raises
    ------
    UserError
        If a package's version or text, or a sample, is not the recorded one.
    """
    recorded = read()
    check_packages(recorded["packages"])
    samples = [pydoc.build(task, context, index) for index in range(limit)]
    hashes = recorded["samples"].get(task, {}).get(str(context), "").split()
    for sample, wanted in zip(samples, hashes, strict=False):
        if short_hash(sample) != wanted:
            raise UserError(
                f"sample {sample.id} is not the recorded one; the packages match {PATH.name}, so the task builder was "
                f"changed; restore it, or {_REWRITE}"
            )
    return samples


def read() -> dict[str, Any]:
    """The stored manifest."""
    try:
        stored: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{PATH} is missing; offline tasks are checked against it; restore it from git, or {_REWRITE}"
        ) from None
    return stored


def check_packages(recorded: dict[str, dict[str, str]]) -> None:
    """Compare installed packages with recorded versions and texts.

    Raises
    ------
    UserError
        Naming the package that differs, what was recorded, what was found, and the version to install.
    """
    for package in corpus.PACKAGES:
        wanted, found = recorded[package]["version"], corpus.package_version(package)
        if found != wanted:
            raise UserError(
                f"package {package} has version {found}, the offline tasks were recorded with {wanted}; their text "
                f"comes from its sources; install the locked version: pip install {package}=={wanted}"
            )
        text, sha256 = corpus.fingerprint(package), recorded[package]["sha256"]
        if text != sha256:
            raise UserError(
                f"package {package} {found} has other source text (sha256 {text[:8]}) than the {package} {wanted} "
                f"recorded for the offline tasks ({sha256[:8]}); its files were changed; reinstall it: "
                f"pip install --force-reinstall {package}=={wanted}"
            )


def short_hash(sample: Sample) -> str:
    """Eight hex digits over all of a sample but its id, so that equal hashes mean equal questions."""
    return hashlib.sha256(repr(replace(sample, id="")).encode()).hexdigest()[:8]


def write() -> None:
    """Record the installed packages and the samples built from them."""
    packages = {
        p: {"version": corpus.package_version(p), "sha256": corpus.fingerprint(p)} for p in corpus.PACKAGES
    }
    samples = {
        task: {
            str(context): " ".join(short_hash(pydoc.build(task, context, i)) for i in range(SAMPLES))
            for context in CONTEXTS
        }
        for task in pydoc.BUILDERS
    }
    text = json.dumps({"packages": packages, "samples": samples}, indent=1)
    PATH.write_text(text + "\n", encoding="utf-8", newline="\n")
