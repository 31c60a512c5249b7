"""Hand a job file to the cluster's own command and follow the job to its end."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fastroof.documents import parse_json
from fastroof.errors import MeasureError

Say = Callable[[str], None]

MOST_FAILURES: Final = 5
"""A controller that is busy answers with an error now and then; so many in a row are not."""
_SLURM_GOES_ON: Final = {
    "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD",
    "REQUEUE_FED", "RESIZING", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "RESV_DEL_HOLD",
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    # Its id or name.
    job: str
    # The cluster's word for it: ``COMPLETED``, ``Complete``.
    state: str


def submit_slurm(script: str, say: Say, poll_s: float = 10.0) -> Ended:
    """Submit a batch script and wait until its job has ended."""
    sbatch = _found(
        ("sbatch",), "submit on a login node of the cluster, or leave --submit out and copy the file"
    )
    job = _told([sbatch, "--parsable"], script).strip().partition(";")[0]
    say(f"submitted as job {job}; scancel {job} stops it")
    state = _follow(lambda: _slurm_state(job), say, f"job {job}", poll_s)
    if state != "COMPLETED":
        raise MeasureError(f"job {job} ended as {state}; its log is <name>-{job}.log where it was submitted")
    return Ended(job, state)


def submit_kubernetes(manifest: str, say: Say, namespace: str = "", poll_s: float = 10.0) -> Ended:
    """Create a Job and wait until it has ended."""
    program = _found(("kubectl", "oc"), "install one, or leave --submit out and create the file elsewhere")
    client = [program, *(["-n", namespace] if namespace else [])]
    name = _told([*client, "create", "-f", "-", "-o", "name"], manifest).strip()
    words = " ".join(["kubectl" if program.endswith("kubectl") else "oc", *client[1:]])
    say(f"created {name}; {words} delete {name} stops it, {words} logs {name} shows what it prints")
    state = _follow(lambda: _kubernetes_state(client, name), say, name, poll_s)
    if not state.startswith("Complete"):
        raise MeasureError(f"{name} ended as {state}; {words} logs {name} may show why")
    return Ended(name, state)


# -- following -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    word: str
    ended: bool


def _follow(look: Callable[[], _State], say: Say, job: str, poll_s: float) -> str:
    """Follow a job until it ends; print its state when it changes."""
    last, failures = "", 0
    while True:
        try:
            state = look()
        except MeasureError as error:
            failures += 1
            if failures >= MOST_FAILURES:
                raise MeasureError(
                    f"{job} was submitted and may still run, but the cluster does not answer: {error}"
                ) from error
        else:
            failures = 0
            if state.word != last:
                say(f"{job}: {state.word}")
                last = state.word
            if state.ended:
                return state.word
        time.sleep(poll_s)


def _slurm_state(job: str) -> _State:
    try:
        word = _told(["squeue", "--noheader", "--jobs", job, "--format", "%T"]).strip()
    except MeasureError:
        # Jobs that ended some minutes ago are unknown to squeue.
        word = ""
    if not word:
        word = _accounted(job)
    # "CANCELLED by 1000" and the like.
    word = word.split()[0].rstrip("+") if word else ""
    if not word:
        raise MeasureError(f"neither squeue nor sacct nor scontrol knows job {job}")
    return _State(word, word not in _SLURM_GOES_ON)


def _accounted(job: str) -> str:
    """Return the state of a job that has left the queue; not every cluster keeps accounts."""
    try:
        told = _told(
            ["sacct", "--noheader", "--parsable2", "--allocations", "--jobs", job, "--format", "State"]
        )
        if told.strip():
            return told.split("\n")[0]
    except MeasureError:
        pass
    shown = _told(["scontrol", "--oneliner", "show", "job", job])
    states = [part.partition("=")[2] for part in shown.split() if part.startswith("JobState=")]
    return states[0] if states else ""


def _kubernetes_state(client: Sequence[str], name: str) -> _State:
    status = _json(_told([*client, "get", name, "-o", "json"])).get("status", {})
    for condition in status.get("conditions", []):
        if condition.get("status") == "True" and condition.get("type") in ("Complete", "Failed"):
            reason = condition.get("reason", "")
            kind = condition["type"]
            return _State(f"{kind} ({reason})" if reason and kind == "Failed" else kind, True)
    return _State(_pod_state(client, name), False)


def _pod_state(client: Sequence[str], name: str) -> str:
    """Return what the newest pod of a job is at, with the reason it waits for."""
    selector = f"job-name={name.rpartition('/')[2]}"
    pods = _json(_told([*client, "get", "pods", "-l", selector, "-o", "json"])).get("items", [])
    if not pods:
        return "waiting for a pod"
    newest = max(pods, key=lambda pod: str(pod.get("metadata", {}).get("creationTimestamp", "")))
    status = newest.get("status", {})
    phase = str(status.get("phase", "unknown"))
    waits = [
        str(container["state"]["waiting"].get("reason", ""))
        for container in status.get("containerStatuses", [])
        if "waiting" in container.get("state", {})
    ]
    waits += [
        f"{condition.get('reason', '')}: {condition.get('message', '')}"
        for condition in status.get("conditions", [])
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False"
    ]
    return f"{phase} ({waits[0]})" if waits and waits[0] else phase


# -- commands ------------------------------------------------------------------------------------


def _found(names: Sequence[str], otherwise: str) -> str:
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return path
    raise MeasureError(f"--submit needs {' or '.join(names)} on the PATH, and none was found: {otherwise}")


def _told(command: Sequence[str], text: str | None = None) -> str:
    """Return what a command prints; its own words are the error where it fails."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except OSError as error:
        raise MeasureError(f"{command[0]}: {error.strerror or error}") from error
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split())
        raise MeasureError(f"{command[0]} {command[1]} failed: {words or f'exit code {done.returncode}'}")
    return done.stdout


def _json(text: str) -> dict[str, Any]:
    try:
        document = parse_json(text, "what the cluster answered", MeasureError)
    except MeasureError as error:
        raise MeasureError(f"the cluster answered no JSON: {text[:80]!r}") from error
    return document if isinstance(document, dict) else {}
