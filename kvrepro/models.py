"""Which models there are, and loading one: embedded, from a hub, or from a local folder.

    kvrepro models                       # the registry
    kvrepro run --model smollm2-135m     # embedded: needs a package index once, then nothing
    kvrepro run --model gemma3-270m      # embedded, too: 253 MB on first use; most of its layers have a sliding window
    kvrepro run --model owner/name       # a hub id, or owner/name@revision
    kvrepro run --model path/to/folder   # what save_pretrained wrote, safetensors only

Whatever the source, the model comes back in eval mode, with kvrepro's attention, and set up for greedy decoding that
stops on every end token it has. Code shipped with a checkpoint is never run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrepro import embedded
from kvrepro.errors import UserError

if TYPE_CHECKING:
    import torch

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text")
"""Values of `config.model_type` whose attention kvrepro knows."""

DTYPES = ("float32", "bfloat16", "float16")

# Chat models end a turn on another token than the document, and checkpoints often list only one of them.
END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")


@dataclass(frozen=True)
class ModelRow:
    """One line of the registry.

    `context` is the longest prompt in tokens, `dtype` what `load` uses unless told otherwise, `revision` what pins
    the weights: a sha256 for an embedded model, a commit or branch for a hub id.
    """

    name: str
    kind: str  # embedded, hub or local
    architecture: str
    context: int | None
    chat: bool
    stop: tuple[str, ...]
    dtype: str | None  # None: the checkpoint's own
    source: str
    revision: str | None
    license: str
    weights: str  # a key of `embedded.MODELS`; several rows may share one


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
REGISTRY = {row.name: row for row in (_SMOLLM2, _SMOLLM2_MHA, _GEMMA3)}


def available() -> list[ModelRow]:
    """The registered models; any hub id or local folder of a `SUPPORTED` architecture works too."""
    return list(REGISTRY.values())


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
        A registered name, an existing folder, or a hub id `owner/name[@revision]`.
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
    row = REGISTRY.get(name)
    wanted = _dtype(dtype or (row.dtype if row else None))
    folder = embedded.fetch(row.weights) if row else _local(name) if _is_path(name) else _hub(name)
    _check_architecture(name, folder)

    import torch

    if attn_implementation == "kvrepro":
        import kvrepro.hf  # noqa: F401  registers the attention function
    try:
        model, tokenizer = _from_folder(name, folder, where, wanted, attn_implementation)
        if name == _SMOLLM2_MHA.name:
            to_mha(model)
        model.to(where)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise UserError(
            f"{name} does not fit into the memory of {where}; take a smaller model, dtype bfloat16, or another device"
        ) from error
    return model.eval(), tokenizer


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


def _local(name: str) -> Path:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise UserError(f"no folder {name}; check the path (registered models: {', '.join(REGISTRY)})")
    if not list(folder.glob("*.safetensors")):
        raise UserError(
            f"no *.safetensors in {folder}: other formats can run code; save it with save_pretrained"
        )
    return folder


def _hub(name: str) -> Path:
    """Fetch a hub model into the hub client's own cache: first the config, so that a refusal costs no gigabytes."""
    repository, _, revision = name.partition("@")
    if "/" not in repository:
        raise UserError(
            f"unknown model '{name}'; registered are {', '.join(REGISTRY)}, "
            "otherwise give a folder or a hub id owner/name"
        )

    import huggingface_hub as hub
    from huggingface_hub import errors

    def fetch(*patterns: str) -> Path:
        copies = ["original/*", "consolidated*"]  # the same weights again, in another format
        return Path(
            hub.snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=list(patterns),
                ignore_patterns=copies,
            )
        )

    try:
        _check_architecture(name, fetch("config.json"))
        print(f"fetching {name} (or finding it in the hub cache)", file=sys.stderr, flush=True)
        return fetch("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
    except UserError:
        raise
    except errors.GatedRepoError as error:
        raise UserError(
            f"{name} is gated: accept its licence on the hub, set HF_TOKEN, and run again"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{repository} has no revision '{revision}'; check the name after the @") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"no model '{repository}' on the hub, or it is private; check the spelling, or set HF_TOKEN"
        ) from error
    except errors.HFValidationError as error:
        raise UserError(f"'{repository}' is not a hub id (owner/name) and no folder has that name") from error
    except Exception as error:  # the client raises its own, its HTTP library's and the system's exceptions
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise UserError(f"the hub refuses {name} ({status}): set a HF_TOKEN that may read it") from error
        raise UserError(
            f"cannot fetch {name} from the hub ({type(error).__name__}); check the network and the disk, "
            "or give the path of a local copy"
        ) from error


def _check_architecture(name: str, folder: Path) -> None:
    try:
        kind = json.loads((folder / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{name} has no readable config.json; is it a transformers model?") from error
    if kind not in SUPPORTED:
        raise UserError(
            f"{name} has the architecture '{kind}', which is not supported; supported are {', '.join(SUPPORTED)}"
        )


def _check_memory(name: str, config: Any, dtype: torch.dtype, device: str) -> None:
    """Refuse before reading gigabytes what cannot fit: parameters alone, against what is free now."""
    import psutil
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    need = parameters * dtype.itemsize
    free = {"cpu": psutil.virtual_memory().available}  # weights pass through here on their way to a GPU, too
    if device != "cpu":
        free[device] = torch.cuda.mem_get_info(device)[0]
    for where, have in free.items():
        if need > have:
            raise UserError(
                f"{name} needs {need / 2**30:.1f} GiB for its weights in {str(dtype).removeprefix('torch.')}, and "
                f"{where} has {have / 2**30:.1f} GiB free; take a smaller model, dtype bfloat16, or another device"
            )


def _from_folder(
    name: str, folder: Path, device: str, dtype: torch.dtype | str, attn_implementation: str
) -> tuple[Any, Any]:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    safe: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        with quiet():
            config = AutoConfig.from_pretrained(folder, **safe)
            resolved = dtype if isinstance(dtype, torch.dtype) else config.dtype or torch.float32
            _check_memory(name, config, resolved, device)
            tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", **safe)
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=resolved,
                attn_implementation=attn_implementation,
                use_safetensors=True,
                output_loading_info=True,
                **safe,
            )
    except UserError:
        raise
    except (OSError, ValueError, ImportError, KeyError, SafetensorError) as error:
        first = next(iter(str(error).splitlines()), "")[:200]
        raise UserError(
            f"cannot load {name}: {type(error).__name__}: {first}; check the folder {folder}"
        ) from error
    # transformers fills what a checkpoint lacks with random numbers and only warns
    if report["missing_keys"]:
        raise UserError(f"{name} lacks the weights {sorted(report['missing_keys'])[0]}...; fetch it again")
    _greedy(model, tokenizer)
    return model, tokenizer


def _greedy(model: Any, tokenizer: Any) -> None:
    """Greedy decoding, stopping on all end tokens; a checkpoint's sampling and penalty settings are dropped."""
    from transformers import GenerationConfig

    known = model.generation_config.eos_token_id
    stop = set(known if isinstance(known, list) else [known]) | {tokenizer.eos_token_id}
    added = tokenizer.get_added_vocab()
    stop |= {added[token] for token in END_TOKENS if token in added}
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
