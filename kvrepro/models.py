"""Which models there are, and loading one: embedded, from a hub, or from a local folder.

    kvrepro models                       # the registry
    kvrepro run --model smollm2-135m     # embedded: needs a package index once, then nothing
    kvrepro run --model gemma3-270m      # embedded, too: 253 MB on first use; most of its layers have a sliding window
    kvrepro run --model llama-3.1-8b     # a model of the papers, from a hub at a pinned commit; name@revision: another
    kvrepro run --model owner/name       # a hub id, or owner/name@revision
    kvrepro run --model path/to/folder   # what save_pretrained wrote, safetensors only

Whatever the source, the model comes back in eval mode, with kvrepro's attention, and set up for greedy decoding that
stops on every end token it has. Code shipped with a checkpoint is never run, and nothing is unpickled. A registered
hub model may also lie in the cache folder, as `$KVREPRO_CACHE/NAME`: the way onto a machine without a hub, and the
way for LongChat-7B, whose weights on the hub are pickles. transformers reads those (by torch's `weights_only`, and the
tokenizer with sentencepiece and protobuf installed):

    AutoModelForCausalLM.from_pretrained("lmsys/longchat-7b-v1.5-32k", dtype="auto").save_pretrained(FOLDER)
    AutoTokenizer.from_pretrained("lmsys/longchat-7b-v1.5-32k").save_pretrained(FOLDER)
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrepro import embedded
from kvrepro.errors import UserError, out_of_memory

if TYPE_CHECKING:
    import torch

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text")
"""Values of `config.model_type` whose attention kvrepro knows."""

DTYPES = ("float32", "bfloat16", "float16")
SAFE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}  # how files are read, always

# Chat models end a turn on another token than the document, and checkpoints often list only one of them.
END_TOKENS = (
    "<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>",
)  # fmt: skip

# FastChat's "vicuna" conversation, which LongBench uses for LongChat; the tokenizer itself has no template.
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions. "
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}USER: {{ message['content'] }} "
    "{% elif message['role'] == 'assistant' %}ASSISTANT: {{ message['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


@dataclass(frozen=True)
class ModelRow:
    """One line of the registry.

    `context` is the longest sequence in tokens, prompt and answer; `stop` the tokens that end an answer; `dtype` what
    `load` uses unless told otherwise; `revision` what pins the weights, a sha256 for an embedded model and a commit
    for one of a hub. `template` is a chat template for a tokenizer that has none. `expects` is the full cache's
    published average over LongBench's 16 sets (see `kvrepro.gate`).
    """

    name: str
    kind: str  # embedded or hub
    architecture: str
    context: int | None
    chat: bool
    stop: tuple[str, ...]
    dtype: str | None  # None: the checkpoint's own
    source: str
    revision: str | None
    license: str
    weights: str  # a key of `embedded.MODELS`, which several rows may share, or a hub id
    template: str | None = None
    expects: float | None = None


def _embedded(name: str, architecture: str, context: int, chat: bool, stop: tuple[str, ...]) -> ModelRow:
    """The row of `embedded.MODELS[name]`."""
    model = embedded.MODELS[name]
    more = f" and {len(model.wheels) - 1} more" if len(model.wheels) > 1 else ""
    return ModelRow(
        name=name,
        kind="embedded",
        architecture=architecture,
        context=context,
        chat=chat,
        stop=stop,
        dtype="float32",
        source=f"{model.wheels[0].requirement}{more} ({model.gguf})",
        revision=f"sha256:{model.sha256}",
        license=model.license,
        weights=name,
    )


_SMOLLM2 = _embedded("smollm2-135m", "llama", 8192, True, ("<|im_end|>", "<|endoftext|>"))
_SMOLLM2_MHA = replace(
    _SMOLLM2, name="smollm2-135m-mha", source="smollm2-135m, KV projections copied to every head"
)
_GEMMA3 = _embedded("gemma3-270m", "gemma3_text", 32768, False, ("<eos>", "<end_of_turn>"))


def _hub_row(
    name: str, source: str, revision: str, architecture: str, context: int, stop: tuple[str, ...], license: str,
    **more: Any,
) -> ModelRow:  # fmt: skip
    return ModelRow(
        name=name, kind="hub", architecture=architecture, context=context, chat=True, stop=stop, dtype="bfloat16",
        source=source, revision=revision, license=license, weights=source, **more,
    )  # fmt: skip


# The models of the papers. Expectations: SelKV's full-cache averages, at 3500 tokens (LongChat: 31500).
_PAPERS = (
    _hub_row(
        "longchat-7b", "lmsys/longchat-7b-v1.5-32k", "16deb633ef4d6a18d5750239edc5a85ffeaf3918",
        "llama", 32768, ("</s>",), "Llama 2 community licence", template=VICUNA, expects=34.75,
    ),
    _hub_row(
        "llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "0e9e39f249a16976918f6564b8830bc894c89659",
        "llama", 131072, ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), "Llama 3.1 community licence",
        expects=40.54,
    ),
    _hub_row(
        "gemma-2-9b", "google/gemma-2-9b-it", "11c9b309abf73637e4b6f9a3fa1e92e615547819",
        "gemma2", 8192, ("<end_of_turn>", "<eos>"), "Gemma terms of use (ai.google.dev/gemma/terms)", expects=42.98,
    ),
    _hub_row(
        "mistral-7b-v0.3", "mistralai/Mistral-7B-Instruct-v0.3", "c170c708c41dac9275d15a8fff4eca08d52bab71",
        "mistral", 32768, ("</s>",), "Apache-2.0",
    ),
    _hub_row(
        "qwen2-1.5b", "Qwen/Qwen2-1.5B-Instruct", "ba1cf1846d7df0a0591d6c00649f57e798519da8",
        "qwen2", 32768, ("<|im_end|>", "<|endoftext|>"), "Apache-2.0",
    ),
    _hub_row(
        "qwen2-7b", "Qwen/Qwen2-7B-Instruct", "f2826a00ceef68f0f2b946d945ecc0477ce4450c",
        "qwen2", 32768, ("<|im_end|>", "<|endoftext|>"), "Apache-2.0",
    ),
)  # fmt: skip
REGISTRY = {row.name: row for row in (_SMOLLM2, _SMOLLM2_MHA, _GEMMA3, *_PAPERS)}


def available() -> list[ModelRow]:
    """The registered models; any hub id or local folder of a `SUPPORTED` architecture works too."""
    return list(REGISTRY.values())


def row_of(name: str) -> ModelRow | None:
    """The registered row that `load(name)` goes by, if any: a model may be given by its hub id, too."""
    if name in REGISTRY or _is_path(name):
        return REGISTRY.get(name)
    base = name.partition("@")[0]
    return next((row for row in _PAPERS if base in (row.name, row.source)), None)


def context(name: str, model: Any) -> int:
    """The longest sequence, in tokens, that the model loaded as `name` takes."""
    row = row_of(name)
    return row.context if row and row.context else getattr(model.config, "max_position_embeddings", 1 << 30)


def revision(name: str, model: Any) -> str | None:
    """What identifies the weights of the model loaded as `name`: a sha256, a hub's commit, or nothing (a folder)."""
    row = row_of(name)
    if row and row.kind == "embedded":
        return row.revision
    folder = Path(model.config.name_or_path)
    return folder.name if folder.parent.name == "snapshots" else None


def load(
    name: str,
    device: str = "cpu",
    dtype: str | torch.dtype | None = None,
    attn_implementation: str = "kvrepro",
) -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Parameters
    ----------
    name
        A registered name, an existing folder, or a hub id; `@revision` behind a model of a hub takes another commit,
        branch or tag than the registered one or the default.
    device
        "cpu", "cuda" or "cuda:N".
    dtype
        "float32", "bfloat16", "float16" or a torch dtype; default: the registered one, else the checkpoint's own.
    attn_implementation
        The attention function; anything but kvrepro's own gives a plain transformers model.

    Returns
    -------
    model, tokenizer
        The model in eval mode with a greedy `generation_config`; the tokenizer pads on the left.

    Raises
    ------
    UserError
        No such model, not reachable, gated, an unsupported architecture, too big for memory, or no such device.
    """
    where = _device(device)
    row = row_of(name)
    wanted = _dtype(dtype or (row.dtype if row else None))
    folder = _fetch(name, row, lambda folder: _check(name, folder, where, wanted))

    if attn_implementation == "kvrepro":
        import kvrepro.hf  # noqa: F401  registers the attention function
    try:
        tokenizer = _tokenizer(name, folder, row)
        model = _from_folder(name, folder, wanted, attn_implementation)
        _greedy(model, tokenizer, row.stop if row else ())
        if name == _SMOLLM2_MHA.name:
            to_mha(model)
        model.to(where)
    except (MemoryError, RuntimeError, OSError) as error:
        if not out_of_memory(error):
            raise
        raise UserError(
            f"{name} does not fit into the memory of {where}; take a smaller model, dtype bfloat16, or another device"
        ) from error
    return model.eval(), tokenizer


def load_tokenizer(name: str) -> Any:
    """The tokenizer that `load` gives with a model; of the weights, at most the files are fetched."""
    row = row_of(name)
    return _tokenizer(name, _fetch(name, row, lambda folder: _check_architecture(name, folder)), row)


def to_mha(model: Any) -> Any:
    """Give every query head its own copy of its group's key and value projection, in place.

    The function of the model is unchanged, but its cache now has one head per query head: a multi-head-attention
    model to test methods on, without another download.

    Parameters
    ----------
    model
        A causal model whose layers have separate `k_proj` and `v_proj` (not phi3, which fuses them).
    """
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    for layer in model.model.layers:
        attention = layer.self_attn
        for projection in (attention.k_proj, attention.v_proj):
            for parameter in projection.parameters():  # weight, and bias where there is one
                heads = parameter.data.unflatten(0, (-1, attention.head_dim))  # [Hkv, D, ...]
                parameter.data = heads.repeat_interleave(group, dim=0).flatten(0, 1)  # [H * D, ...]
            projection.out_features *= group
        attention.num_key_value_groups = 1
    config.num_key_value_heads = config.num_attention_heads
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings and progress bars of transformers inside the block, and leave its settings as found."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _device(device: str) -> str:
    import torch

    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise UserError(f"unknown device '{device}'; use cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UserError(f"no device '{device}': torch sees {count} CUDA devices; use cpu or a lower number")
    return str(device)


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | str:
    import torch

    if dtype is None:
        return "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype '{dtype}'; use {', '.join(DTYPES)}")
    return getattr(torch, dtype)


def _is_path(name: str) -> bool:
    return Path(name).expanduser().is_dir() or name.startswith((".", "/", "~"))


def _fetch(name: str, row: ModelRow | None, check: Callable[[Path], None]) -> Path:
    """The folder of a model; `check` sees its config before gigabytes are fetched."""
    base, _, asked = name.partition("@")
    if row and row.kind == "embedded":
        folder = embedded.fetch(row.weights)
    elif row is None and _is_path(name):
        folder = _local(name)
    elif row and not asked and (copy := embedded.cache_dir() / row.name).is_dir():
        print(f"taking {row.name} from {copy}", file=sys.stderr, flush=True)
        folder = _local(str(copy))
    else:
        home = str(embedded.cache_dir() / row.name) if row else "a folder and give that"
        return _hub(name, row.source if row else base, asked or (row.revision if row else None), home, check)
    check(folder)
    return folder


def _local(name: str) -> Path:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise UserError(f"no folder {name}; check the path (registered models: {', '.join(REGISTRY)})")
    if not list(folder.glob("*.safetensors")):
        raise UserError(
            f"no *.safetensors in {folder}: other formats can run code; save it with save_pretrained"
        )
    return folder


def _hub(name: str, repository: str, revision: str | None, home: str, check: Callable[[Path], None]) -> Path:
    """Fetch a hub model into the hub client's own cache: first the config, so that a refusal costs no gigabytes."""
    if "/" not in repository:
        raise UserError(
            f"unknown model '{name}'; registered are {', '.join(REGISTRY)}, "
            "otherwise give a folder or a hub id owner/name"
        )
    print(f"fetching {name} (or finding it in the hub cache)", file=sys.stderr, flush=True)
    check(_snapshot(name, repository, revision, home, ["config.json"]))
    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
    folder = _snapshot(name, repository, revision, home, wanted)
    if not list(folder.glob("*.safetensors")):
        raise UserError(
            f"{repository} has no *.safetensors at {folder.name[:12]}, and pickled weights are not read, they can run "
            f"code; name a revision that has them ({name.partition('@')[0]}@REVISION), or load it with transformers "
            f"(weights_only) and save_pretrained model and tokenizer into {home}"
        )
    return folder


def _snapshot(name: str, repository: str, revision: str | None, home: str, wanted: list[str]) -> Path:
    """The hub client's folder of a repository's files; every failure is one line."""
    import huggingface_hub as hub
    from huggingface_hub import errors
    from huggingface_hub.utils import logging
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        """Its bar, on a terminal only."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **({"disable": None} | kwargs))

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it tells of each of its tries
    try:
        return Path(
            hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=wanted,
                ignore_patterns=["original/*", "consolidated*"],  # the same weights again, in another format
                endpoint=os.environ.get("HF_ENDPOINT"),  # as it is now, not as it was at import
                tqdm_class=Bar,
            )
        )
    except errors.GatedRepoError as error:
        raise UserError(
            f"{name} is gated: accept its licence on the hub ({repository}), set HF_TOKEN, and run again"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{repository} has no revision '{revision}'; give another one as {name.partition('@')[0]}@REVISION"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"no model '{repository}' on the hub, or it is private; check the spelling, or set HF_TOKEN"
        ) from error
    except errors.HFValidationError as error:
        raise UserError(f"'{repository}' is not a hub id (owner/name) and no folder has that name") from error
    except Exception as error:  # the client raises its own, its HTTP library's and the system's exceptions
        # where it has no copy to fall back on, the answer it got is the cause
        cause = error.__cause__ or error
        codes = [getattr(getattr(e, "response", None), "status_code", None) for e in (error, cause)]
        if (status := codes[0] or codes[1]) in (401, 403):
            raise UserError(f"the hub refuses {name} ({status}): set a HF_TOKEN that may read it") from error
        reason = f"it answers {status}" if status else type(cause).__name__
        raise UserError(
            f"cannot fetch {name} from the hub ({reason}); check the network and the disk, or put a local copy "
            f"(safetensors) into {home}"
        ) from error
    finally:
        logging.set_verbosity(level)


def _check_architecture(name: str, folder: Path) -> None:
    try:
        kind = json.loads((folder / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{name} has no readable config.json; is it a transformers model?") from error
    if kind not in SUPPORTED:
        raise UserError(
            f"{name} has the architecture '{kind}', which is not supported; supported are {', '.join(SUPPORTED)}"
        )


def _check(name: str, folder: Path, device: str, dtype: torch.dtype | str) -> None:
    """Refuse by the config alone what cannot be run."""
    from transformers import AutoConfig

    _check_architecture(name, folder)
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, **SAFE)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{name} has a config.json that transformers cannot read ({type(error).__name__})"
        ) from error
    _check_memory(name, config, _resolved(config, dtype), device)


def _resolved(config: Any, dtype: torch.dtype | str) -> torch.dtype:
    """The dtype to load in: where none is asked for, the checkpoint's own."""
    import torch

    return dtype if isinstance(dtype, torch.dtype) else config.dtype or torch.float32


def _check_memory(name: str, config: Any, dtype: torch.dtype, device: str) -> None:
    """Refuse before reading gigabytes what cannot fit: parameters alone, against what is free now."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    need = parameters * dtype.itemsize
    for where, have in _free(device).items():
        if need > have:
            raise UserError(
                f"{name} needs {need / 2**30:.1f} GiB for its weights in {str(dtype).removeprefix('torch.')}, and "
                f"{where} has {have / 2**30:.1f} GiB free; take a smaller model, dtype bfloat16, or another device"
            )


def _free(device: str) -> dict[str, int]:
    """Free bytes of every memory that weights pass through."""
    import psutil
    import torch

    free = {"cpu": psutil.virtual_memory().available}  # on their way to a GPU, too
    if device != "cpu":
        free[device] = torch.cuda.mem_get_info(device)[0]
    return free


def _tokenizer(name: str, folder: Path, row: ModelRow | None) -> Any:
    from transformers import AutoTokenizer

    old = (folder / "tokenizer.model").exists() and not (folder / "tokenizer.json").exists()
    if old and find_spec("sentencepiece") is None:
        raise UserError(
            f"{name} has a SentencePiece tokenizer.model and no tokenizer.json; pip install sentencepiece protobuf, or "
            f"load the tokenizer with transformers where they are installed and save_pretrained it into {folder}"
        )
    with _readable(name, folder):
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", **SAFE)
    if row and tokenizer.chat_template is None:
        tokenizer.chat_template = row.template
    return tokenizer


def _from_folder(name: str, folder: Path, dtype: torch.dtype | str, attn_implementation: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with _readable(name, folder):
        config = AutoConfig.from_pretrained(folder, **SAFE)
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=_resolved(config, dtype),
            attn_implementation=attn_implementation,
            use_safetensors=True,
            output_loading_info=True,
            **SAFE,
        )
    # transformers fills what a checkpoint lacks with random numbers and only warns
    if report["missing_keys"]:
        raise UserError(f"{name} lacks the weights {sorted(report['missing_keys'])[0]}...; fetch it again")
    return model


@contextmanager
def _readable(name: str, folder: Path) -> Iterator[None]:
    """What transformers says of a damaged folder, in one line."""
    from safetensors import SafetensorError

    kinds = (OSError, ValueError, ImportError, KeyError, SafetensorError)
    try:
        with quiet():
            yield
    except Exception as error:
        # tokenizers raises a bare Exception
        if out_of_memory(error) or not (isinstance(error, kinds) or type(error) is Exception):
            raise
        first = next(iter(str(error).splitlines()), "")[:200]
        raise UserError(
            f"cannot load {name}: {type(error).__name__}: {first}; check the folder {folder}"
        ) from error


def _greedy(model: Any, tokenizer: Any, more: tuple[str, ...]) -> None:
    """Greedy decoding, stopping on all end tokens; a checkpoint's sampling and penalty settings are dropped."""
    from transformers import GenerationConfig

    known = model.generation_config.eos_token_id
    stop = set(known if isinstance(known, list) else [known]) | {tokenizer.eos_token_id}
    added = tokenizer.get_added_vocab()
    stop |= {added[token] for token in (*END_TOKENS, *more) if token in added}
    ids = sorted(stop - {None})
    if tokenizer.pad_token_id is None and ids:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(ids[0])
    model.generation_config = GenerationConfig(
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ids or None,
        pad_token_id=tokenizer.pad_token_id,
    )
