"""LongBench from its official places: data sets from the hub, prompts and lengths from the authors' repository.

Everything is pinned twice, by commit and by sha256, so another file never becomes another result. Data sets come as
plain files (an archive of JSONL, a JSON array), because `datasets` 4 and later runs no loading scripts and the
official repository has nothing else; they stay in the hub client's own cache and `HF_ENDPOINT`, `HF_TOKEN` and
`HF_HUB_OFFLINE` work as always. The three small protocol files are kept in `$KVREPRO_CACHE`.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from kvrepro.embedded import cache_dir, sha256
from kvrepro.errors import UserError


@dataclass(frozen=True)
class Dataset:
    """One file of a dataset repository at a commit."""

    repository: str
    revision: str
    file: str
    sha256: str


# THUDM/LongBench and THUDM/LongBench-v2 under their present names
LONGBENCH = Dataset(
    "zai-org/LongBench",
    "5e628be450b7e67fb7ae6e201bd6d8f7056f7672",
    "data.zip",  # 114 MB: data/<dataset>.jsonl and data/<dataset>_e.jsonl
    "cb45b11a4133c6bc1d6a44b0f8e701335ff1e543195db1103472e575857f7f64",
)
LONGBENCH_V2 = Dataset(
    "zai-org/LongBench-v2",
    "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9",
    "data.json",  # 465 MB
    "15d61c22d92c96900b3c4948b6aeea218d3214b676a65df48e7b8555604c7fe2",
)

PROTOCOL_URL = "https://raw.githubusercontent.com/THUDM/LongBench/2e00731f8d0bff23dc4325161044d0ed8af94c1e"
PROTOCOL = {  # name: path in the repository, sha256
    "dataset2prompt.json": (
        "LongBench/config/dataset2prompt.json",
        "56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30",
    ),
    "dataset2maxlen.json": (
        "LongBench/config/dataset2maxlen.json",
        "72966b3c0933e214591637fb085798c5e687ebff4ddaab5d99bbc31120532022",
    ),
    "0shot.txt": (
        "prompts/0shot.txt",
        "68a162252bc9ff71d5d7abca3d69bb31aac3c35f832d657a2866f2018b8a6950",
    ),
}
TRIES = 3

_LOCAL = "or give a folder with the files (--data DIR or KVREPRO_LONGBENCH)"


def dataset(wanted: Dataset) -> Path:
    """The verified local copy of a data set, fetched on first use.

    Raises
    ------
    UserError
        Not reachable, refused, not there, broken off for good, or other bytes than pinned.
    """
    import huggingface_hub as hub

    name = f"{wanted.repository}/{wanted.file}"
    try:
        path = Path(
            hub.hf_hub_download(
                wanted.repository,
                wanted.file,
                repo_type="dataset",
                revision=wanted.revision,
                endpoint=os.environ.get("HF_ENDPOINT"),  # as it is now, not as it was at import
            )
        )
    except Exception as error:  # the client raises its own, its HTTP library's and the system's exceptions
        # where it has no copy to fall back on, the answer it got is the cause
        statuses = [
            getattr(getattr(e, "response", None), "status_code", None) for e in (error, error.__cause__)
        ]
        cause = type(error.__cause__ or error).__name__
        raise UserError(_reason(name, statuses[0] or statuses[1], cause)) from error
    if (found := sha256(path)) != wanted.sha256:
        path.resolve().unlink()  # the blob; what is left points nowhere, and the next run fetches anew
        raise UserError(_other_bytes(name, found, wanted.sha256))
    return path


def protocol(name: str) -> str:
    """The text of an official protocol file, a key of `PROTOCOL`, fetched on first use.

    Raises
    ------
    UserError
        As for `dataset`.
    """
    remote, wanted = PROTOCOL[name]
    path = cache_dir() / "longbench" / name
    try:
        content = path.read_bytes()
    except OSError:
        content = b""
    if hashlib.sha256(content).hexdigest() != wanted:  # not there yet, or damaged
        content = _get(f"{PROTOCOL_URL}/{remote}", name)
        if (found := hashlib.sha256(content).hexdigest()) != wanted:
            raise UserError(_other_bytes(name, found, wanted))
        _keep(path, content)
    return content.decode()


def _get(url: str, name: str) -> bytes:
    reason = ""
    for _ in range(TRIES):
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise UserError(_reason(name, error.code, "HTTPError")) from error
        except (OSError, HTTPException) as error:  # refused, reset, or ended too soon
            reason = type(error).__name__
    raise UserError(_reason(name, None, reason))


def _keep(path: Path, content: bytes) -> None:
    """Write and rename, so that a reader never sees half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        Path(file.name).replace(path)
    except OSError as error:
        raise UserError(
            f"cannot write the cache folder {path.parent}: {error.strerror or error}; "
            "free some space or point KVREPRO_CACHE to another folder"
        ) from error


def _reason(name: str, status: int | None, kind: str) -> str:
    if status in (401, 403):
        return (
            f"{name} is refused ({status}); it is gated or private there; accept its terms, log in with "
            f"'hf auth login' or HF_TOKEN, {_LOCAL}"
        )
    if status == 404:
        return f"{name} is not there (404) at its pinned commit; check HF_ENDPOINT, {_LOCAL}"
    answer = f"the server answers {status}" if status else kind
    return f"cannot fetch {name} ({answer}); check the network and the disk and run again, {_LOCAL}"


def _other_bytes(name: str, found: str, wanted: str) -> str:
    return (
        f"{name} came with sha256 {found[:12]}..., not the pinned {wanted[:12]}...; it was not kept; run again, or "
        "look why the server gives another file (HF_ENDPOINT?)"
    )
