"""``fastroof best``: the deployment to run, the runners-up, why, and how to start it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fastroof.acceptance import parse_accepted
from fastroof.cli.best_answer import (
    deployment_document,
    print_answer,
    print_command,
    print_how_to_run,
    print_saved,
)
from fastroof.cli.fleet_options import ROUTER
from fastroof.cli.named_plans import DRAFTS, read_plan
from fastroof.cli.option_groups import ENGINE_FACTS
from fastroof.cli.options import GPU_NAMES, LIMITS_MS, Json, flag_of, limited_percentile, option
from fastroof.cli.output import duration, print_json, print_line
from fastroof.cli.shared_budget import TRAFFIC, one_for_all, print_shares, shared_document, shared_question
from fastroof.cli.workload_options import AT_ONCE, READ, REPLAYED, workload_requests
from fastroof.command_group import Group, GroupValues, taking, warn
from fastroof.errors import SweepError
from fastroof.host import share_heaps, usable_processors
from fastroof.progress import shown_progress

if TYPE_CHECKING:
    from fastroof.engines.launch import Command
    from fastroof.sweep import Recommendation
    from fastroof.sweep.replay import Replay


def parse_prices(given: list[str]) -> float | dict[str, float] | None:
    """Read prices of a GPU for an hour: ``h100=2.5`` each, or one number for all."""
    prices: dict[str, float] = {}
    for text in given:
        gpu, equals, number = text.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if not 0.0 < price < float("inf") or (equals and not gpu):
            raise typer.BadParameter(f"--price takes GPU=PRICE, as h100=2.5, a number above 0; got {text!r}")
        prices[gpu] = price
    if "" in prices and len(prices) > 1:
        raise typer.BadParameter("--price takes one number for all GPUs, or GPU=PRICE for each; got both")
    return prices.get("", prices or None)


EPILOG: Final = (
    """\b
Examples:
  fastroof best --model Qwen/Qwen3-32B-FP8 --gpu h100 --gpus 8 --isl 4000 --osl 500 --ttft 500 --tpot 30
  fastroof best --model llama-3.1-70b --dtype bf16 --dtype fp8 --gpu h100 --gpu h200 --gpus 8 \\
      --engine vllm --engine sglang --isl 4000 --osl 500 --tpot 30 --price h100=2.5 --price h200=3.5
  fastroof best --model deepseek-v3 --gpu h200 --gpus 8 --isl 2000 --osl 1000 --tpot 50 --save deepseek
  fastroof sweep --example > my.toml; fastroof best my.toml --runners-up 5
  fastroof best my.toml --mean
  fastroof best --model llama-3.1-70b --gpu h100 --rate 20 --isl 4000 --osl 500 --ttft 500 --tpot 30
  fastroof best --model llama-3.1-70b --model qwen3-8b --gpu h100 --gpus 16 --rate 4 --rate 30 \\
      --isl 3000 --isl 500 --osl 600 --osl 200 --tpot 40
  fastroof best --model llama-3.1-70b --gpus 8 --trace mooncake.jsonl --router prefix_aware \\
      --kv-tiers vllm-offloading:200GB --ttft 10000 --tpot 100
  fastroof best --model llama-3.1-8b --gpus 8 --trace agents.jsonl --sessions --ttft 2000 --tpot 40

With --model, every layout of a copy is compared (with experts also attention data parallelism, and experts
whole or split over all GPUs; across nodes pipeline stages and wide expert parallelism), with copies that fill
the GPUs, separate workers for prefill and decode, and several limits of the engine's steps.
--most-gpus-each 8 leaves out layouts across nodes, --mode aggregated separate workers.

Limits are on the 99th percentile: the leaders by the closed form are simulated with requests that arrive at
random, and everything in the answer is at the rate that each serves within the limits. --mean applies them to
means, with clients that send their next request when they are answered. The first line names the limits that
were not given: for TTFT 1 s more than a prompt alone takes on the fastest compared deployment. --ttft inf is
no limit, --e2e replaces both defaults. A specification has its own limits only. Of deployments
that tie, the simplest is first. A runner-up is the best deployment of another GPU, mode, layout, dtype, KV
cache or engine. --save writes the command that starts a copy, one that measures it, the engine's YAML, a
manifest and the rows.

With --trace, deployments are those of `fastroof simulate`, at the engine's own limits of a step: each serves
the trace once, and all of its requests count. The load is the highest rate within the limits, --rate of the
trace (its sessions/s if it has some), --clients, or the most --sessions at once. Deployments are simulated in
the order of the closed form, with a cache that loses nothing, until no other could serve more. The command of
`fastroof simulate` that gives the same figures is printed.

With --rate but no --trace, the models share the GPUs, which are of one kind. Without --gpus each gets the
fewest that hold its rate within the limits. Otherwise the smallest ratio of held to wanted rate is made as
large as possible. --rate, --isl, --osl, --ttft, --tpot, --itl, --e2e and --prefix-hit are then given once for
all models, or once per --model in the same order. A SPEC.toml of gpu, total_gpus and [[traffic]] tables sets
every option per model: model, isl, osl, requests_per_s, tpot_ms, dtype, engine, ...

\b
JSON: objective, configurations (deployments compared), candidates (these under each load), skipped (plans
that could not be compiled), total_s, answers, deployments, would_fit (model: a row on enough GPUs), saved
(paths).
answers: one object per model and load [group, candidates, feasible, infeasible (reason: candidates, by
means), choices, nearest (if no deployment is within the limits: row, values, exceeds (value over limit),
limits_on), limits_on (p99 or mean), why_mean (why not a percentile), simulated (deployments), families,
default_limits (ms)].
families: one object per way to deploy that was tried [family (aggregated, experts_across_nodes,
stages_across_nodes or disaggregated), choice (its best), gain (share above the best aggregated within a
node)].
choices: one object per deployment, the best first [objective, relative_error (of a decode step's time),
behind (share of the best; below 0: ahead, less simple), is_tie, tie_within (the error of the comparison),
at_edge (at the specification's largest load), margins [name, value, limit, left (share of the limit)], row
(columns of a sweep's results), percentile].
percentile: null with limits_on mean; else it decides behind and is_tie, and times in row are means at its
rate [requests_per_s, low, high (steps one standard error longer and shorter), tokens_per_s_per_gpu, limit
(the binding one), place (rank by the closed form), why_not (why it was not simulated), values_ms (percentiles
at the rate, by limit), clients (mean requests in the system), requests (simulated), sampling_error (relative,
over draws of the arrivals; of the best)].
engines: one object per engine. deployments: one object or null per answer [checkpoint, engine, release (of
the arguments), image, copies, gpus_each, servers (role: command, config, environment), router (the same; null
if none), placement [role, number, gpus, host, port, side_port], benchmark, benchmark_clients, benchmark_rate
(requests/s; 0 for clients), price [an_hour, of_output, of_all (per million tokens)], notes].

\b
JSON with --rate: gpu, total_gpus (without --gpus 0 if no number of GPUs holds all rates), scale (smallest
ratio of held to wanted rate; 0 if the GPUs cannot run all models), gpus_left, needed_gpus (that hold all
wanted rates; null if none were found), shares, questions (a model on a number of GPUs), total_s, saved.
shares: one object per model [model, isl, osl, wanted_requests_per_s, held_requests_per_s, ratio, gpus,
needed_gpus, default_limits, answer, deployment (as above)].

\b
JSON with --trace: isl, osl of answers are means; simulate: the words of a command per deployment.
"""
    + ENGINE_FACTS
)

_FEW_SKIPPED: Final = 2


QUESTION: Final[Group] = {
    "gpu": option(
        list[str],
        "GPU (see fastroof gpus) or path of a gpu.toml; repeatable.  [default: h100]",
        "GPU",
        *GPU_NAMES,
    ),
    "total_gpus": option(
        int,
        "Number of GPUs to fill.  [default: with --rate as few as suffice]",
        None,
        "--gpus",
        "--total-gpus",
        min=1,
    ),
    "isl": option(list[int], "Prompt length.", "TOKENS", min=1),
    "osl": option(list[int], "Output length.", "TOKENS", min=1),
    "requests_per_s": option(
        list[float],
        "Wanted requests per second, once for all models or once per --model: the models share the GPUs.",
        "PER_S",
        "--rate",
    ),
    "ttft_ms": option(
        list[float],
        "Maximum time to first token; inf for none.  [default: 1 s + the prompt alone]",
        "MS",
        "--ttft",
    ),
    "tpot_ms": option(
        list[float], "Maximum time per output token; inf for none.  [default: 50]", "MS", "--tpot"
    ),
    "itl_ms": option(list[float], "Maximum time between two tokens.", "MS", "--itl"),
    "request_latency_ms": option(list[float], "Maximum time of a request.", "MS", "--e2e"),
    "dtype": option(
        list[str], "Format of weights, as in fastroof step; repeatable.  [default: the checkpoint's]", "DTYPE"
    ),
    "kv_dtype": option(
        list[str],
        "KV cache: bf16, fp8, nvfp4, int8_per_token_head; repeatable.  [default: the checkpoint's]",
        "DTYPE",
    ),
    "engine": option(
        list[str],
        "Serving engine (see fastroof engines) or .toml file; repeatable.  [default: vllm]",
        "ENGINE",
    ),
    "max_num_batched_tokens": option(
        list[int],
        "Maximum number of tokens in a step; repeatable.  "
        "[default: the engines' own and smaller powers of two from 1024]",
        "TOKENS",
        min=1,
    ),
    "max_num_seqs": option(
        list[int],
        "Maximum number of concurrent sequences; repeatable.  "
        "[default: the engines' own and smaller ones from 16]",
        "REQUESTS",
        min=1,
    ),
    "mode": option(
        list[str],
        "aggregated, or disaggregated: separate workers prefill and decode; repeatable.  [default: both]",
        "MODE",
    ),
    "most_gpus_each": option(
        int, "Maximum GPUs of a copy; 8 leaves out layouts across nodes.  [default: no limit]", "GPUS", min=1
    ),
    "prefix_hit": option(list[float], "Share of a prompt in the prefix cache.  [default: 0]", "SHARE"),
    "front_end": option(
        str,
        "Front end, in TTFT: plain, dynamo, none or milliseconds a request.  [default: the engine's own]",
        "NAME|MS",
    ),
    "lora": option(
        str,
        "LoRA adapters of all requests, as in `fastroof step` (modelled).  [default: none]",
        "RANK[:ADAPTERS[:MODULES]]",
    ),
    "objective": option(
        str,
        "Metric to optimize: tokens_per_s_per_gpu, tokens_per_s_per_user, goodput, cost "
        "or energy (joules per output token).  "
        "[default: cost with --price, else tokens_per_s_per_gpu]",
        "METRIC",
    ),
    "tables": option(
        str, "Measured tables: a folder, or datasheet for none.  [default: each GPU's own]", "PATH"
    ),
    "allow_modelled": option(
        bool,
        "Use the datasheet model for kernels that were not measured.",
        None,
        "--allow-modelled",
        default=False,
    ),
}
"""What to deploy, and for which load, as arguments of :func:`fastroof.recommend`."""


REPLAY: Final[Group] = {
    **REPLAYED,
    "trace": (REPLAYED["trace"][0], None),
    **READ,
    **AT_ONCE,
    **ROUTER,
    **DRAFTS,
}
"""A trace to judge deployments by, instead of --isl and --osl, and draft tokens."""

SEARCH: Final[Group] = {
    "runners_up": option(int, "Maximum number of runners-up.", default=3, min=0),
    **{name: LIMITS_MS[name] for name in ("percentile", "mean")},
    "requests": option(
        int,
        "Number of requests to simulate.  [default: 20 per client, from 10000 to 40000]",
        None,
        "--num-requests",
        min=2,
    ),
    "seed": option(int, "Seed of their arrivals.", default=0, min=0),
    "threads": option(int, "Number of threads.  [default: all processors]", min=1),
}
"""How deployments are compared, as arguments of :func:`fastroof.recommend`."""


@taking(question=QUESTION, replayed=REPLAY, search=SEARCH)
def best(
    *,
    spec: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SPEC.toml]",
            help="Specification of deployments, instead of --model.  [default: `fastroof sweep --example`]",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Hugging Face id, preset (see fastroof models) or config.json; repeatable.",
        ),
    ] = None,
    question: GroupValues,
    replayed: GroupValues,
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="[GPU=]PRICE", help="Price per GPU hour, as h100=2.5; repeatable."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write scripts, a manifest and rows to.")
    ] = None,
    manifest: Annotated[
        str | None,
        typer.Option(
            metavar="PLATFORM",
            help="Platform of the manifest: kubernetes, dynamo or llm-d.  [default: kubernetes]",
        ),
    ] = None,
    search: GroupValues,
    as_json: Json = False,
) -> None:
    """Recommend a deployment, with reasons and commands to start it."""
    from fastroof import recommend
    from fastroof.sweep import recommend_for_spec
    from fastroof.sweep.recommendations.files import check_place

    question = {**question, "allow_modelled": question["allow_modelled"] or None}
    question["speculation"] = _speculation({name: replayed.pop(name) for name in DRAFTS})
    given = {name: value for name, value in question.items() if value not in (None, [])}
    replay = _replay(replayed, given)
    if replay is not None and search["requests"] is not None:
        raise SweepError("--num-requests draws requests; --limit takes the first ones of a trace")
    _check_question(spec, model, given, has_trace=replay is not None)
    percentile = limited_percentile(search["percentile"], search.pop("mean"))
    if manifest is not None and save is None:
        raise typer.BadParameter(f"--manifest {manifest} needs --save DIR")
    platform = manifest or "kubernetes"
    if save is not None:
        check_place(save, platform)
    options = {**search, "gpu_hour_price": parse_prices(price or []), "percentile": percentile}
    options["threads"] = search["threads"] or usable_processors()
    share_heaps(1)
    shared = None if replay is not None else shared_question(spec, model, given)
    if shared is not None:
        _answer_shared(shared, options, save, platform, as_json=as_json)
        return
    given = one_for_all(given)
    with shown_progress("best", "candidates", quiet=as_json) as shown:
        if model:
            found = recommend(model, **given, **options, replay=replay, progress=shown)
        elif spec is not None:
            found = recommend_for_spec(spec, **options, progress=shown)
        else:
            found = _of_example(options | {"progress": shown})
    written = [] if save is None else found.save(save, platform)
    commands = [] if replay is None else _simulations(found, replay, replayed)
    if as_json:
        print_json(
            {
                **answers_document(vars(found.answers)),
                "deployments": [deployment_document(one) for one in found.deployments],
                "engines": found.engines,
                "would_fit": found.would_fit,
                **({} if replay is None else {"simulate": [command.words() for command in commands]}),
                "saved": [str(path) for path in written],
            }
        )
        return
    _print(found, is_question=bool(model), replay=replay)
    if replay is not None:
        _print_simulations(found, replay, commands)
    if len(found.deployments) > 1 and model:
        print_line(
            f"each model was compared alone on all {given['total_gpus']} GPUs; --rate, once for all or once "
            "per --model, shares them"
        )
    if written:
        print_saved(written)


def _answer_shared(
    question: dict[str, Any] | Path,
    options: dict[str, Any],
    save: Path | None,
    manifest: str,
    *,
    as_json: bool,
) -> None:
    """Print how several models share GPUs, and how to run each."""
    from fastroof import recommend_shared

    with shown_progress("best", "questions", quiet=as_json) as shown:
        found = recommend_shared(question, **options, progress=shown)
    runs = [share.recommendation for share in found.shares]
    written = [] if save is None else found.save(save, manifest)
    if as_json:
        document = shared_document(found)
        for share, run in zip(document["shares"], runs, strict=True):
            share["answer"] = None if run is None else answers_document(run.answers.answers[0])
            share["deployment"] = None if run is None else deployment_document(run.deployments[0])
        print_json({**document, "saved": [str(path) for path in written]})
        return
    print_shares(found)
    for run in runs:
        if run is not None:
            answer = run.answers.answers[0]._replace(default_limits={})
            print_answer(answer, run.answers.objective, None, run.engine_titles)
            if run.deployments[0] is not None:
                print_how_to_run(run.deployments[0])
    print_line(
        f"{found.questions} questions (a model on a number of GPUs) answered in {duration(found.total_s)}"
    )
    if written:
        print_saved(written)


_NEEDED: Final = ("total_gpus", "isl", "osl")


_FLAGS: Final = {**TRAFFIC, "total_gpus": "--gpus"}


def _flag(name: str) -> str:
    return _FLAGS.get(name, flag_of(name))


def _replay(replayed: GroupValues, given: dict[str, Any]) -> Replay | None:
    """Read the trace to judge deployments by, and take its load out of the question."""
    others = {name: value for name, value in replayed.items() if name not in ("router", "prefix_cache")}
    if replayed["trace"] is None:
        alone = [flag_of(name) for name, value in others.items() if value not in (None, [], False)]
        if alone:
            raise SweepError(f"{alone[0]} needs --trace, the requests to replay")
        return None
    from fastroof.sweep.replay import Replay

    rates = given.pop("requests_per_s", [None])
    if len(rates) > 1:
        raise SweepError(f"--trace is replayed at one --rate, got {len(rates)}")
    own = (*AT_ONCE, *ROUTER)
    trace = workload_requests(**{name: value for name, value in replayed.items() if name not in own})
    return Replay(trace, rate=rates[0], **{name: replayed[name] for name in own})


def _simulations(found: Recommendation, replay: Replay, replayed: GroupValues) -> list[Command]:
    """Return the commands that simulate the recommended deployments at their loads."""
    from fastroof.engines.launch import Command
    from fastroof.sweep.replay import simulate_options

    usual = {name: default for name, (_, default) in ROUTER.items()}
    typed = {name: value for name, value in replayed.items() if value not in (usual.get(name), None, [])}
    for load in ("clients", "sessions", "rate_scale"):
        typed.pop(load, None)
    commands = []
    for spec, answer in zip(found.specs, found.answers.answers, strict=True):
        if answer.choices:
            options = {**simulate_options(spec, answer.choices[0].row, replay), **typed}
            each = {name: value if isinstance(value, list) else [value] for name, value in options.items()}
            arguments = [
                (flag_of(name),) if value is True else (flag_of(name), str(value))
                for name, values in each.items()
                for value in values
            ]
            commands.append(Command(("fastroof", "simulate"), tuple(arguments)))
    return commands


def _print_simulations(found: Recommendation, replay: Replay, commands: Sequence[Command]) -> None:
    """Print the commands that simulate deployments, and what the replay and other commands leave out."""
    from fastroof.simulation.steady import TURNOVERS

    for command in commands:
        print_line("to simulate it:")
        print_command(command)
    if commands:
        tiers = "" if replay.kv_tiers is None else f"KV tiers {replay.kv_tiers} are not in the commands, and "
        print_line(f"{tiers}the benchmark sends requests of the mean lengths, not the trace's")
    for answer in found.answers.answers:
        at_once = answer.choices[0].row["clients"] if answer.choices else 0.0
        if at_once * TURNOVERS > len(replay.trace):
            warn(
                f"{len(replay.trace):,} requests are few for {at_once:,.0f} at once: the start and the end "
                "of the replay weigh; `fastroof capacity` repeats a trace"
            )


def _speculation(given: GroupValues) -> dict[str, Any] | None:
    """Return draft tokens as a specification has them; None without any."""
    if all(value is None for value in given.values()):
        return None
    if given["num_draft_tokens"] is None or given["accepted"] is None:
        raise SweepError("draft tokens need --num-draft-tokens and --accepted")
    table = {**given, "accepted": parse_accepted("--accepted", given["accepted"])}
    draft, name, gpu, own = read_plan(text := table.pop("draft") or "none")
    if name or gpu or not own.keys() <= {"tp", "dtype"}:
        raise SweepError(f"--draft is MODEL[,tp=1,dtype=bf16], got {text!r}")
    return {**table, "draft": draft, **{f"draft_{word}": value for word, value in own.items()}}


def _check_question(
    spec: Path | None, model: list[str] | None, given: dict[str, Any], *, has_trace: bool
) -> None:
    """Check that the options give either a whole question or a specification."""
    if model and spec is not None:
        raise SweepError(f"give --model or a specification, got --model {model[0]} and {spec}")
    if model:
        # with rates the fewest GPUs are the answer
        is_free = "total_gpus" not in given and "requests_per_s" in given and not has_trace
        needed = _NEEDED[:1] if has_trace else _NEEDED[is_free:]
        missing = [_flag(name) for name in needed if name not in given]
        if missing:
            example = "--rate 20" if is_free else "--gpus 8"
            raise SweepError(
                f"--model needs {', '.join(map(_flag, needed))} too, as in {example} --isl 4000 --osl 500; "
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
            )
    elif given:
        options = ", ".join(map(_flag, given))
        what = f"{spec} sets that: change it there" if spec else "name a model with --model"
        raise SweepError(f"{options} {'belongs' if len(given) == 1 else 'belong'} to --model; {what}")
    elif has_trace:
        raise SweepError("--trace belongs to --model; name a model with --model")


def _of_example(options: dict[str, Any]) -> Recommendation:
    from importlib import resources

    from fastroof.sweep import recommend_for_spec

    packaged = resources.files("fastroof.sweep.deployments") / "example.toml"
    with resources.as_file(packaged) as example:
        return recommend_for_spec(example, **options)


def answers_document(value: Any) -> Any:
    """Return answers, their choices and margins as objects for JSON."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: answers_document(item) for name, item in value._asdict().items()}
    if isinstance(value, dict):
        return {name: answers_document(item) for name, item in value.items()}
    return [answers_document(item) for item in value] if isinstance(value, list | tuple) else value


def _print(found: Recommendation, *, is_question: bool, replay: Replay | None = None) -> None:
    answers = found.answers
    for answer, deployment in zip(answers.answers, found.deployments, strict=True):
        would_fit = found.would_fit.get(answer.group["model"])
        print_answer(answer, answers.objective, would_fit, found.engine_titles, replay)
        if deployment is not None:
            print_how_to_run(deployment)
    skipped = answers.skipped
    if is_question and len(skipped) > _FEW_SKIPPED:
        print_line(f"left out: {len(skipped)} layouts, such as {skipped[0]} (--json names all)")
        skipped = ()
    for why in skipped:
        print_line(f"left out: {why}")
    simulated = sum(answer.simulated for answer in answers.answers)
    of_them = f", {simulated:,} of them simulated," if simulated else ""
    print_line(f"{answers.configurations:,} deployments compared{of_them} in {duration(answers.total_s)}")
