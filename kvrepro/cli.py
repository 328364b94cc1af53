"""The command line.  Bad input is one clear line and exit code 2.

kvrepro run --profile quick            measure a profile into results/quick
kvrepro table results/quick            the main table
kvrepro figures results/quick          draw the figures from stored results
kvrepro claims                         what the papers claim, held against stored results
kvrepro explain selkv                  what a method does, and who says so
kvrepro generate --method selkv --retain 0.25 --prompt-file notes.txt
kvrepro compare results/quick data/results/quick     does one run agree with another, or --published with the papers?
kvrepro doctor                         is this machine ready?
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from .errors import UserError, out_of_memory


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    # Read when torch is imported, which no command does before this: threads that wait spin for some microseconds, then
    # sleep.  The default spins far longer, which costs a factor of two to four as soon as anything else runs beside.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        given.command(given)
        return 0
    except UserError as error:
        said = str(error)
    except BrokenPipeError:  # a reader such as head went away
        sys.stderr.close()
        return 0
    except (OSError, MemoryError, RuntimeError) as error:
        if out_of_memory(error):
            said = (
                "out of memory; close other programs, or take a smaller profile, fewer arms (--methods), a smaller model or "
                "--dtype bfloat16"
            )
        elif isinstance(error, OSError):
            where = f"{error.filename}: " if error.filename else ""
            said = f"{where}{error.strerror or error}; check the path and run again"
        else:
            raise
    except KeyboardInterrupt:
        said = "stopped; every file that was written is whole, run the same command again"
    print(f"kvrepro: {said}", file=sys.stderr)
    return 2


# Commands


def run(given: argparse.Namespace) -> None:
    from . import runner, studies

    path = runner.run(
        studies.of(given.study, given.profile) if given.study else given.profile,
        given.model,
        out=given.out
        or f"results/{runner.folder(given.profile, given.model, given.device, given.study, given.context)}",
        device=given.device,
        dtype=given.dtype,
        methods=_names(given.methods),
        task_names=_names(given.tasks),
        limit=given.limit,
        retain=None if given.retain is None else [given.retain],
        context=given.context,
        data=given.data,
        gated=not given.no_gate,
        executor=given.executor,
        workers=given.workers,
    )
    print(f"{path}")


def table(given: argparse.Namespace) -> None:
    from . import results

    frame = results.main_table(results.load(given.folder))
    if given.json:
        print(frame.reset_index().to_json(orient="records"))
    else:
        print(results.as_text(frame))


def figures(given: argparse.Namespace) -> None:
    from . import analyses

    for path in analyses.draw(given.folder, given.to):
        print(path)


def claims(given: argparse.Namespace) -> None:
    from . import claims as module
    from .measure import readings

    judged = module.judge_all(
        given.folder, profile=given.profile, model=given.model, device=given.device, quiet=False
    )
    print(json.dumps([one.as_dict() for one in judged]) if given.json else readings.claims_as_text(judged))


def compare(given: argparse.Namespace) -> None:
    from . import compare as module
    from . import plots

    if (given.other is None) != given.published:
        raise UserError("compare RUN with a second run, or with --published; give one of the two")
    run = module.read(given.run)
    if given.published:
        averages, gaps = module.beside(run)
        said = module.text_beside(run, averages, gaps)
        figure, name = plots.beside_published(gaps), "published"
        found = {
            "run": run.made, "what_differs": module.apart(run), "averages": _records(averages.reset_index()),
            "differences": _records(gaps),
        }  # fmt: skip
    else:
        other = module.read(given.other)
        table = module.differences(run, other)
        said = module.text(run, other, table)
        figure, name = plots.agreement(table[table["scope"] == module.AVERAGE]), "runs"
        found = {
            "first": run.made, "second": other.made, "what_differs": module.notes(run, other),
            "differences": _records(table),
        }  # fmt: skip
    paths = [str(path) for path in plots.save(figure, given.to, name)]
    if given.json:
        print(json.dumps(found | {"conclusion": said.splitlines()[-1], "figure": paths}))
    else:
        print(said + "\n\n" + "\n".join(paths))


def doctor(given: argparse.Namespace) -> None:
    from . import doctor as module

    found = []
    for check in module.checks():
        found.append(check)
        if not given.json:
            print(check, flush=True)
    if given.json:
        print(json.dumps([asdict(check) for check in found]))
    module.verdict(found)


def models(given: argparse.Namespace) -> None:
    from .models import available

    rows = [asdict(row) for row in available()]
    shown = ("name", "kind", "architecture", "context", "dtype", "license", "source")
    _rows(
        rows if given.json else [{key: row[key] for key in shown} for row in rows],
        given.json,
        "any hub id or local folder of a supported architecture works too; --json shows revisions and stop tokens",
    )


def methods(given: argparse.Namespace) -> None:
    from .methods import available, method_class

    _rows(
        [
            {
                "method": name, "schedule": method_class(name).schedule, "paper": method_class(name).paper,
                "arms": ", ".join(method_class(name).arms),
            }
            for name in available()
        ],
        given.json,
        "kvrepro explain METHOD tells more",
    )  # fmt: skip


def explain(given: argparse.Namespace) -> None:
    from . import explain as module

    found = module.explain(given.method)
    print(json.dumps(found) if given.json else module.text(found))


def generate(given: argparse.Namespace) -> None:
    from . import generate as module

    names, shown = _names(given.method) or [], Path(given.heatmap) if given.heatmap else None
    module.check(names, given.retain, given.budget)
    if shown is not None and (shown.is_dir() or not shown.parent.is_dir()):
        raise UserError(f"--heatmap {shown} is no file in a folder that exists; give one such as notes.html")
    asked = module.ask(
        given.model, _text_of(given.prompt_file), given.question, max_new_tokens=given.max_new_tokens,
        device=given.device, dtype=given.dtype,
    )  # fmt: skip
    budget = {"retain": given.retain, "budget": given.budget}
    alone = len(names) == 1
    found = module.generate(asked, names[0], **budget) if alone else module.compare(asked, names, **budget)
    if shown is not None:
        from .results import write_atomic

        answers = {row["method"]: row["answer"] for row in ([found] if alone else found["methods"])}
        write_atomic(shown, module.heatmap(asked, names, **budget, answers=answers).encode())
        found["heatmap"] = str(shown)
    if given.json:
        print(json.dumps(found))
    else:
        print(module.text(found) if alone else module.side_by_side(found))
        if shown is not None:
            print(f"\n{shown}")


def vectors(given: argparse.Namespace) -> None:
    from . import vectors as module

    paths = module.write(given.folder)
    print(f"{len(paths)} files in {given.folder}")


def notebooks(given: argparse.Namespace) -> None:
    from . import notebooks as module

    module.execute(
        given.out or f"results/{given.profile}/notebooks", profile=given.profile, model=given.model,
        device=given.device, retain=given.retain, figures=given.figures, only=given.only,
    )  # fmt: skip


def demo(given: argparse.Namespace) -> None:
    from . import demo as module

    module.run(given.model, given.device, given.to)


def bench_harness(given: argparse.Namespace) -> None:
    from .measure import harness

    found = harness.run(
        given.model, context=given.context, repeats=given.repeats, device=given.device, dtype=given.dtype
    )
    _give(found, given.json, harness.text(found))


def bench_prefill(given: argparse.Namespace) -> None:
    from .measure import prefill

    found = prefill.run(
        given.model, contexts=given.context, methods=_names(given.methods) or prefill.METHODS, retain=given.retain,
        repeats=given.repeats, memory_repeats=given.memory_repeats, device=given.device, dtype=given.dtype,
    )  # fmt: skip
    _give(found, given.json, prefill.text(found))


def bench_slimmer(given: argparse.Namespace) -> None:
    from .measure import slimmer

    found = slimmer.run(
        given.model, context=given.context, chunks=given.chunk, budget=given.budget, repeats=given.repeats,
        device=given.device, dtype=given.dtype,
    )  # fmt: skip
    _give(found, given.json, slimmer.text(found))


def bench_decode(given: argparse.Namespace) -> None:
    from .measure import decode

    found = decode.run(
        given.model, contexts=given.context, batches=given.batch, retains=given.retain, repeats=given.repeats,
        device=given.device, dtype=given.dtype,
    )  # fmt: skip
    _give(found, given.json, decode.text(found))


def bench_kernels(given: argparse.Namespace) -> None:
    from .measure import kernels

    found = kernels.run(
        given.shape, contexts=given.context, batches=given.batch, retain=given.retain, repeats=given.repeats,
        device=given.device, dtype=given.dtype,
    )  # fmt: skip
    _give(found, given.json, kernels.text(found))


# Parsing


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, too, instead of the whole usage."""
        self.exit(2, f"kvrepro: {message}; `{self.prog} --help` shows what there is\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvrepro",
        description="Reproduce and check KV-cache merging: SelKV, KVSlimmer and their baselines.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, action: Any, about: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=about, description=about)
        sub.set_defaults(command=action)
        return sub

    sub = command("run", run, "measure a profile's arms on its samples; goes on where it was stopped")
    _model(sub)
    sub.add_argument(
        "--profile",
        default="quick",
        help="smoke, quick or full; with --data longbench, ruler or papers (default: quick)",
    )
    sub.add_argument(
        "--study",
        help="a larger grid for one question: methods, slimmer, released, positions, selectors, sweep, sweep-chunked",
    )
    sub.add_argument(
        "--methods", help="arms, comma separated, instead of the profile's (e.g. full,selkv,selkv/evict)"
    )
    sub.add_argument("--tasks", help="tasks, comma separated, instead of the profile's")
    sub.add_argument("--limit", type=int, help="samples a task, at most")
    sub.add_argument("--retain", type=float, help="share of entries to keep, instead of the profile's")
    sub.add_argument("--context", type=int, help="longest prompt in tokens, instead of the profile's")
    sub.add_argument(
        "--data",
        help="folder with LongBench or RULER rows (JSONL), or hub; makes tasks such as longbench/qasper known",
    )
    sub.add_argument(
        "--out", help="results folder (default: results/PROFILE[-STUDY][-CONTEXT][-MODEL][-cuda])"
    )
    sub.add_argument(
        "--no-gate", action="store_true", help="go on where the full cache scores far below what is published"
    )
    sub.add_argument(
        "--executor",
        default="local",
        choices=("local", "ray"),
        help="ray: many devices, of this machine or of the cluster at RAY_ADDRESS (default: local)",
    )
    sub.add_argument(
        "--workers",
        type=_positive,
        help="of ray (default: one for each GPU, on CPUs one for every four of a machine)",
    )

    sub = command("table", table, "the main table of a results folder")
    sub.add_argument("folder")
    _json(sub)

    sub = command("figures", figures, "draw the figures from stored results, without a model")
    sub.add_argument("folder")
    sub.add_argument("--to", default="figures", help="where to write them (default: figures)")

    sub = command("claims", claims, "what the papers claim, held against stored results, without a model")
    sub.add_argument(
        "folder",
        nargs="?",
        help="a run, or a folder of runs (default: results, else what the repository carries)",
    )
    sub.add_argument("--profile", default="quick", help="whose runs (default: quick)")
    sub.add_argument("--model", default="smollm2-135m", help="the runs' model")
    sub.add_argument("--device", default="cpu", help="the runs' device")
    _json(sub)

    sub = command(
        "compare", compare, "a run beside another one or beside what the papers publish: does it agree?"
    )
    sub.add_argument("run", help="a results folder, one's own or a carried one (data/results/quick)")
    sub.add_argument("other", nargs="?", help="a second one")
    sub.add_argument("--published", action="store_true", help="the papers' numbers instead of a second run")
    sub.add_argument(
        "--to", default="results/compare", help="where to write the figure (default: results/compare)"
    )
    _json(sub)

    sub = command("doctor", doctor, "is this machine ready? packages, memory, model cache, disk, network")
    _json(sub)

    sub = command("models", models, "the models known by name")
    _json(sub)
    sub = command("methods", methods, "the methods and their arms")
    _json(sub)
    sub = command("explain", explain, "a method's formula, settings and defaults, and who says so")
    sub.add_argument("method", help="e.g. selkv or selkv/evict")
    _json(sub)

    sub = command(
        "generate", generate, "answer a prompt with a compressed cache, and show what the cache held"
    )
    _model(sub)
    sub.add_argument(
        "--method",
        default="selkv",
        help="an arm of `kvrepro methods`, or several, comma separated, side by side (default: selkv)",
    )
    sub.add_argument("--retain", type=float, help="share of entries to keep (default: 0.25)")
    sub.add_argument("--budget", type=int, help="entries to keep, instead of --retain")
    sub.add_argument("--prompt-file", required=True, help="a UTF-8 text file, - for standard input")
    sub.add_argument("--question", help="put behind the text")
    sub.add_argument(
        "--heatmap", metavar="FILE.html", help="show there what was kept, merged and dropped, token by token"
    )
    sub.add_argument("--max-new-tokens", type=int, default=64, help="of the answer, at most (default: 64)")
    _json(sub)

    sub = command("vectors", vectors, "write known-answer files of every method")
    sub.add_argument("folder")

    sub = command("notebooks", notebooks, "execute the notebooks through papermill")
    _model(sub)
    sub.add_argument("--profile", default="quick")
    sub.add_argument("--retain", type=float)
    sub.add_argument("--out", help="where to write them (default: results/PROFILE/notebooks)")
    sub.add_argument("--figures", default="figures", help="where they write figures (default: figures)")
    sub.add_argument("--only", help="a part of a notebook's name")

    sub = command("demo", demo, "one prompt, three methods, one figure")
    _model(sub)
    sub.add_argument("--to", default="results/demo", help="where to write the figure (default: results/demo)")

    bench = commands.add_parser("bench", help="measure speed").add_subparsers(required=True, metavar="WHAT")
    sub = bench.add_parser("harness", help="time of twelve one-shot arms on a sample against one arm alone")
    sub.set_defaults(command=bench_harness)
    _model(sub)
    sub.add_argument("--context", type=int, default=2048)
    sub.add_argument("--repeats", type=_positive, default=3)
    _json_to(sub)
    sub = bench.add_parser(
        "prefill", help="time and memory of prefill and compression against the plain prefill"
    )
    sub.set_defaults(command=bench_prefill)
    _model(sub)
    _shape(sub)
    sub.add_argument(
        "--context", type=_positive, nargs="+", default=[4096], help="tokens of the prompt (default: 4096)"
    )
    sub.add_argument("--methods", help="arms, comma separated (default: selkv,snapkv,pyramidkv,h2o,bifocal)")
    sub.add_argument("--retain", type=float, default=0.25, help="share of entries to keep (default: 0.25)")
    sub.add_argument("--repeats", type=_positive, default=5, help="of each arm, interleaved (default: 5)")
    sub.add_argument(
        "--memory-repeats",
        type=_positive,
        default=2,
        help="processes that measure memory, of each arm (default: 2)",
    )
    _json_to(sub)
    sub = bench.add_parser("slimmer", help="latency, memory and KL of KVSlimmer against AsymKV")
    sub.set_defaults(command=bench_slimmer)
    _model(sub)
    _shape(sub)
    sub.add_argument("--context", type=_positive, default=4096, help="tokens of the prompt (default: 4096)")
    sub.add_argument(
        "--chunk", type=_positive, nargs="+", default=[512], help="tokens a chunk, one or more (default: 512)"
    )
    sub.add_argument(
        "--budget", type=_positive, default=1056, help="entries to hold, 32 sinks among them (default: 1056)"
    )
    sub.add_argument(
        "--repeats", type=_positive, default=3, help="processes a cell, interleaved (default: 3)"
    )
    _json_to(sub)
    sub = bench.add_parser(
        "decode",
        help="time a decoded token by part, bytes and peak memory, over context, batch and retention",
    )
    sub.set_defaults(command=bench_decode)
    _model(sub)
    _shape(sub)
    sub.add_argument(
        "--context", type=_positive, nargs="+", default=[1000, 10_000, 100_000],
        help="tokens seen before (default: 1000 10000 100000)",
    )  # fmt: skip
    sub.add_argument(
        "--batch",
        type=_positive,
        nargs="+",
        default=[1, 4, 8],
        help="rows that decode together (default: 1 4 8)",
    )
    sub.add_argument(
        "--retain", type=_share, nargs="+", default=[0.5, 0.25, 0.1],
        help="shares of entries to keep (default: 0.5 0.25 0.1)",
    )  # fmt: skip
    sub.add_argument("--repeats", type=_positive, default=3, help="of each arm, interleaved (default: 3)")
    _json_to(sub)
    sub = bench.add_parser("kernels", help="time the kernels that read entries with a bias, on one layer")
    sub.set_defaults(command=bench_kernels)
    sub.add_argument("--shape", default="llama-3.1-8b", help="a paper's model (default: llama-3.1-8b)")
    sub.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    sub.add_argument("--dtype", help="float32, bfloat16 or float16 (default: bfloat16)")
    sub.add_argument(
        "--context", type=_positive, nargs="+", default=[1024, 8192, 32768, 131072],
        help="tokens seen before (default: 1024 8192 32768 131072)",
    )  # fmt: skip
    sub.add_argument("--batch", type=_positive, nargs="+", default=[1, 8], help="rows (default: 1 8)")
    sub.add_argument("--retain", type=_share, default=0.25, help="share of entries to keep (default: 0.25)")
    sub.add_argument("--repeats", type=_positive, default=3, help="of each kernel, interleaved (default: 3)")
    _json_to(sub)
    return parser


def _model(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--model", default="smollm2-135m", help="a name of `kvrepro models`, a folder or a hub id"
    )
    sub.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    sub.add_argument("--dtype", help="float32, bfloat16 or float16 (default: the model's)")


def _shape(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--shape", dest="model", type=lambda name: f"shape:{name}", metavar="NAME",
        help="instead of --model: a paper's model with random weights, nothing to fetch (llama-3.1-8b, ...)",
    )  # fmt: skip


def _json(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--json", action="store_true", help="for a program to read")


def _json_to(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--json", type=_new_file, nargs="?", const="-", metavar="FILE",
        help="for a program to read: instead of the table, or into a file beside it",
    )  # fmt: skip


def _new_file(given: str) -> str:
    if not Path(given).parent.is_dir() or Path(given).is_dir():
        raise argparse.ArgumentTypeError(f"{given}: no such folder, or one itself")
    return given


def _share(given: str) -> float:
    try:
        share = float(given)
    except ValueError:
        share = 0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{given} is not a share above 0 and at most 1")
    return share


def _positive(given: str) -> int:
    if not given.isdecimal() or int(given) < 1:
        raise argparse.ArgumentTypeError(f"{given} is not a whole number of at least 1")
    return int(given)


def _names(given: str | None) -> list[str] | None:
    return None if given is None else [name.strip() for name in given.split(",") if name.strip()]


def _records(table: Any) -> Any:
    return json.loads(table.to_json(orient="records"))


def _give(found: dict[str, Any], to: str | None, text: str) -> None:
    """The table; with --json the numbers instead, with --json FILE both."""
    if to == "-":
        print(json.dumps(found))
        return
    if to is not None:
        from .results import write_atomic

        write_atomic(Path(to), json.dumps(found, indent=1).encode())
    print(text)


def _text_of(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read {path}; {reason}; give a UTF-8 text file") from error


def _rows(rows: list[dict[str, Any]], as_json: bool, note: str) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    widths = {key: max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]}
    for row in [{key: key for key in rows[0]}, *rows]:
        print(
            "  ".join(
                str(row[key] if row[key] is not None else "-").ljust(width) for key, width in widths.items()
            ).rstrip()
        )
    print(f"\n{note}")


if __name__ == "__main__":
    sys.exit(main())
