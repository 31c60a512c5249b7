"""Job files parse as what they are, quote what they are given, and are followed to their end."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fastroof.errors import MeasureError
from kernels_bench.cli import app
from kernels_bench.jobs.job_files import JobOptions, render_kubernetes, render_slurm
from kernels_bench.jobs.submit import submit_kubernetes, submit_slurm

HOSTILE = [
    "plain",
    "with space",
    "quote's",
    'double "quotes"',
    "$(touch pwned)",
    "`touch pwned`",
    "$HOME ${PATH} $$ $(HOME)",
    "a;touch pwned&&b|c>d",
    "back\\slash *?[x]",
    "größe 日本",
    "percent%j #hash: {yaml}",
]
SLURM = JobOptions("results/h100", budget_s=540)
KUBERNETES = JobOptions("h100/run-1", image="registry.example/fastroof:1", claim="results", budget_s=540)


def directives(script: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.MULTILINE)
    assert len(dict(found)) == len(found)
    return dict(found)


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def recording(folder: Path, name: str) -> Path:
    """A command that writes down its arguments, one a line."""
    log = folder / f"{name}.log"
    executable(folder / "bin" / name, f'#!/bin/sh\nprintf "%s\\n" "$@" >> {shlex.quote(str(log))}\n')
    return log


def run_script(script: str, folder: Path, shell: str = "bash") -> None:
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder)}
    done = subprocess.run([shell], input=script, text=True, cwd=folder, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr


# -- Slurm ---------------------------------------------------------------------------------------


def test_slurm_directives_say_what_was_asked() -> None:
    options = replace(
        SLURM, name="h100-run", num_gpus=4, num_cpus=32, memory_gib=200, time_limit_s=90061,
        partition="gpu", account="proj_1",
    )  # fmt: skip
    script = render_slurm(options)
    assert script.startswith("#!/bin/bash\n#SBATCH")
    assert directives(script) == {
        "job-name": "h100-run", "nodes": "1", "ntasks": "1", "cpus-per-task": "32", "mem": "200G",
        "gres": "gpu:4", "time": "1-01:01:01", "output": "h100-run-%j.log",
        "partition": "gpu", "account": "proj_1",
    }  # fmt: skip
    # sbatch stops reading directives at the first command.
    assert script.index("#SBATCH --account") < script.index("set -euo pipefail")


def test_a_script_without_options_has_no_empty_directives() -> None:
    assert set(directives(render_slurm(SLURM))) == {
        "job-name", "nodes", "ntasks", "cpus-per-task", "mem", "gres", "time", "output",
    }  # fmt: skip


@pytest.mark.parametrize("word", HOSTILE)
def test_hostile_words_reach_the_command_whole(word: str, tmp_path: Path) -> None:
    log = recording(tmp_path, "kernels-bench")
    options = replace(SLURM, output=f"out/{word}", grid=word, arguments=("--only", word))
    run_script(render_slurm(options), tmp_path)
    assert log.read_text().splitlines() == [
        "run", "--output", f"out/{word}", "--deadline", "1740", "--budget", "540", "--only", word, "--", word,
    ]  # fmt: skip
    assert (tmp_path / "out" / word).is_dir()
    assert not (tmp_path / "pwned").exists()


def test_a_job_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    log = recording(tmp_path, "kernels-bench")
    (tmp_path / "results" / "h100").mkdir(parents=True)
    (tmp_path / "results" / "h100" / "journal-x.jsonl").touch()
    run_script(render_slurm(SLURM), tmp_path)
    assert log.read_text().splitlines() == ["resume", "results/h100", "--deadline", "1740"]


@pytest.mark.parametrize(
    ("image", "given"),
    [("registry/fast:1", "docker://registry/fast:1"), ("a/b.sif", "a/b.sif"), ("oras://x/y", "oras://x/y")],
)
def test_an_image_runs_in_apptainer(image: str, given: str, tmp_path: Path) -> None:
    log = recording(tmp_path, "apptainer")
    run_script(render_slurm(replace(SLURM, image=image, output="o p")), tmp_path)
    assert log.read_text().splitlines()[:7] == [
        "exec",
        "--nv",
        "--bind",
        "o p",
        given,
        "kernels-bench",
        "run",
    ]


def test_a_failing_run_fails_the_job(tmp_path: Path) -> None:
    executable(tmp_path / "bin" / "kernels-bench", "#!/bin/sh\nexit 1\n")
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash"], input=render_slurm(SLURM), text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 1


# -- Kubernetes ----------------------------------------------------------------------------------


def manifest(options: JobOptions) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="pyyaml parses the manifest")
    [document] = yaml.safe_load_all(render_kubernetes(options))
    assert isinstance(document, dict)
    return document


def as_kubernetes_expands(word: str, environment: dict[str, str]) -> str:
    """What the kubelet makes of a command's word: $(NAME) is a variable if there is one, $$ is a $."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))",
        lambda m: "$" if m[1] == "$" else environment.get(m[2], m[0]),
        word,
    )


def test_a_manifest_says_what_was_asked() -> None:
    job = manifest(replace(KUBERNETES, name="h100-run", num_gpus=2, num_cpus=16, memory_gib=100))
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == ("batch/v1", "Job", "h100-run")
    assert job["spec"]["activeDeadlineSeconds"] == 1800
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] == "registry.example/fastroof:1"
    assert container["resources"]["limits"] == {"cpu": "16", "memory": "100Gi", "nvidia.com/gpu": "2"}
    assert pod["restartPolicy"] == "Never"
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert claims == ["results"]
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert mounts == {"results": "/results", "shm": "/dev/shm"}


def test_restricted_pod_security_and_openshift_admit_it() -> None:
    """The rules of Kubernetes' "restricted" profile, and no user id, which OpenShift's SCC sets itself."""
    pod = manifest(KUBERNETES)["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert all("hostPath" not in volume for volume in pod["volumes"])
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    user = manifest(replace(KUBERNETES, user_id=1000))["spec"]["template"]["spec"]["securityContext"]
    assert (user["runAsUser"], user["fsGroup"]) == (1000, 1000)


@pytest.mark.parametrize("word", HOSTILE)
def test_hostile_words_survive_yaml_kubernetes_and_the_shell(word: str, tmp_path: Path) -> None:
    log = recording(tmp_path, "kernels-bench")
    options = replace(KUBERNETES, output=word, grid=word, arguments=("--only", word))
    [container] = manifest(options)["spec"]["template"]["spec"]["containers"]
    shell, flag, script = (as_kubernetes_expands(w, {"HOME": "/tmp"}) for w in container["command"])
    assert (shell, flag) == ("/bin/sh", "-c")
    # The mount is elsewhere here, and the word itself has no slash at its front.
    run_script(script.replace("/results/", f"{tmp_path}/", 1), tmp_path, "sh")
    told = log.read_text().splitlines()
    assert told == [
        "run", "--output", f"{tmp_path}/{word}", "--deadline", "1740", "--budget", "540", "--only", word,
        "--", word,
    ]  # fmt: skip
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("word", ["true", "null", "1e3", "123", "no"])
def test_names_that_yaml_would_read_as_something_else_stay_names(word: str) -> None:
    job = manifest(replace(KUBERNETES, name=word, claim=word))
    volumes = job["spec"]["template"]["spec"]["volumes"]
    assert (job["metadata"]["name"], volumes[0]["persistentVolumeClaim"]["claimName"]) == (word, word)


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "Upper"}, "name 'Upper'"),
        ({"name": "a\n#SBATCH --uid=0"}, "is not a valid name"),
        ({"output": ""}, "is not a folder name"),
        ({"output": "-rf"}, "is not a folder name"),
        ({"output": "a\nb"}, "cannot be printed"),
        ({"arguments": ("a\x00b",)}, "cannot be printed"),
        ({"image": "two words"}, "is not an image"),
        ({"image": "--privileged"}, "is not an image"),
        ({"num_gpus": 0}, "at least 1 of GPUs, got 0"),
        ({"memory_gib": -1}, "GiB of memory"),
        ({"budget_s": 0}, "at least 1 s"),
        ({"budget_s": 1700}, r"1700 s of budget and 180 s .* are 1880 s"),
        ({"time_limit_s": 60, "budget_s": None}, "is too short"),
    ],
)
def test_options_that_cannot_be(change: dict[str, Any], words: str) -> None:
    with pytest.raises(MeasureError, match=words):
        replace(SLURM, **change)


def test_options_that_one_cluster_cannot_take() -> None:
    with pytest.raises(MeasureError, match="partition 'a b'"):
        render_slurm(replace(SLURM, partition="a b"))
    for change, words in (
        ({"image": ""}, "needs --image"),
        ({"claim": ""}, "needs --claim"),
        ({"claim": "A_b"}, "claim 'A_b'"),
        ({"output": "/etc"}, "must lie on the claim"),
        ({"output": "a/../../b"}, "must lie on the claim"),
        ({"user_id": 0}, "root"),
    ):
        with pytest.raises(MeasureError, match=words):
            render_kubernetes(replace(KUBERNETES, **change))


# -- following -----------------------------------------------------------------------------------

FAKE_SBATCH = """#!/bin/sh
cat > {folder}/submitted
echo "{answer}"
"""
# Answers with one line of {folder}/states after another, the last one for ever.
FAKE_STATES = """#!/bin/sh
n=$(cat {folder}/count 2>/dev/null || echo 0)
n=$((n + 1))
echo $n > {folder}/count
line=$(sed -n "${{n}}p" {folder}/states)
[ -n "$line" ] || line=$(tail -n 1 {folder}/states)
case "$line" in
    fail) echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1 ;;
    gone) {gone} ;;
    *) {show} ;;
esac
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing of a cluster on it but what the test puts there."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "cat", "sed", "tail", "echo"):
        (tools / name).symlink_to(shutil.which(name) or "")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{tools}")
    return tmp_path


def fake_slurm(folder: Path, states: list[str], accounted: str = "", answer: str = "42") -> None:
    (folder / "states").write_text("".join(f"{s}\n" for s in states))
    names = {"folder": shlex.quote(str(folder))}
    executable(folder / "bin" / "sbatch", FAKE_SBATCH.format(**names, answer=answer))
    gone = 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'
    executable(folder / "bin" / "squeue", FAKE_STATES.format(**names, gone=gone, show='echo "$line"'))
    if accounted:
        executable(folder / "bin" / "sacct", f'#!/bin/sh\necho "{accounted}"\n')


def test_a_slurm_job_is_followed_to_its_end(cluster: Path) -> None:
    fake_slurm(cluster, ["PENDING", "PENDING", "RUNNING", "COMPLETING", "gone"], "COMPLETED", "42;west")
    said: list[str] = []
    ended = submit_slurm(render_slurm(SLURM), said.append, poll_s=0.0)
    assert (ended.job, ended.state) == ("42", "COMPLETED")
    assert (cluster / "submitted").read_text() == render_slurm(SLURM)
    assert said[0].startswith("submitted as job 42")
    states = [line.removeprefix("job 42: ") for line in said[1:]]
    assert states == ["PENDING", "RUNNING", "COMPLETING", "COMPLETED"]


def test_a_queue_that_fails_now_and_then_does_not_end_the_job(cluster: Path) -> None:
    fake_slurm(cluster, ["PENDING", "fail", "fail", "fail", "RUNNING", "fail", "fail", "COMPLETED"])
    said: list[str] = []
    assert submit_slurm("x", said.append, poll_s=0.0).state == "COMPLETED"
    assert said[1:] == ["job 42: PENDING", "job 42: RUNNING", "job 42: COMPLETED"]


@pytest.mark.parametrize("state", ["FAILED", "TIMEOUT", "OUT_OF_MEMORY", "CANCELLED by 1000", "NODE_FAIL"])
def test_a_job_that_does_not_complete_is_an_error(state: str, cluster: Path) -> None:
    fake_slurm(cluster, ["RUNNING", "gone"], accounted=state)
    with pytest.raises(MeasureError, match=f"job 42 ended as {state.split()[0]}; its log is"):
        submit_slurm("x", lambda _: None, poll_s=0.0)


def test_a_cluster_that_stays_silent_is_an_error_that_names_the_job(cluster: Path) -> None:
    fake_slurm(cluster, ["PENDING", "fail"])
    with pytest.raises(MeasureError, match="job 42 was submitted and may still run"):
        submit_slurm("x", lambda _: None, poll_s=0.0)


def test_scontrol_answers_where_there_are_no_accounts(cluster: Path) -> None:
    fake_slurm(cluster, ["RUNNING", "gone"])
    executable(
        cluster / "bin" / "scontrol", '#!/bin/sh\necho "JobId=42 JobName=x JobState=COMPLETED Reason=None"\n'
    )
    assert submit_slurm("x", lambda _: None, poll_s=0.0).state == "COMPLETED"


def test_what_sbatch_says_is_the_error(cluster: Path) -> None:
    executable(cluster / "bin" / "sbatch", '#!/bin/sh\necho "sbatch: error: invalid partition" >&2\nexit 1\n')
    with pytest.raises(MeasureError, match="sbatch: error: invalid partition"):
        submit_slurm("x", lambda _: None, poll_s=0.0)


def test_without_a_cluster_the_error_says_what_would_do(cluster: Path) -> None:
    with pytest.raises(MeasureError, match="needs sbatch on the PATH"):
        submit_slurm("x", lambda _: None)
    with pytest.raises(MeasureError, match="needs kubectl or oc on the PATH"):
        submit_kubernetes("x", lambda _: None)


FAKE_KUBECTL = """#!/bin/sh
[ "$1" = "-n" ] && {{ echo "$2" > {folder}/namespace; shift 2; }}
case "$1 $2" in
    "create -f") cat > {folder}/submitted; echo job.batch/h100-run; exit 0 ;;
    "get pods") cat {folder}/pods; exit 0 ;;
esac
"""


def fake_kubernetes(
    folder: Path, answers: list[dict[str, Any]], pods: Any = None, name: str = "kubectl"
) -> None:
    (folder / "states").write_text("".join(json.dumps({"status": a}) + "\n" for a in answers))
    (folder / "pods").write_text(json.dumps({"items": pods or []}))
    names = {"folder": shlex.quote(str(folder))}
    follow = FAKE_STATES.format(**names, gone="exit 1", show='echo "$line"').removeprefix("#!/bin/sh\n")
    executable(folder / "bin" / name, FAKE_KUBECTL.format(**names) + follow)


COMPLETE = {"conditions": [{"type": "Complete", "status": "True"}]}


@pytest.mark.parametrize("name", ["kubectl", "oc"])
def test_a_kubernetes_job_is_followed_to_its_end(name: str, cluster: Path) -> None:
    pods = [
        {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "status": {"phase": "Failed"}},
        {"metadata": {"creationTimestamp": "2026-01-01T00:01:00Z"}, "status": {"phase": "Running"}},
    ]
    fake_kubernetes(cluster, [{}, {"active": 1}, COMPLETE], pods, name)
    said: list[str] = []
    ended = submit_kubernetes(render_kubernetes(KUBERNETES), said.append, namespace="perf", poll_s=0.0)
    assert (ended.job, ended.state) == ("job.batch/h100-run", "Complete")
    assert (cluster / "submitted").read_text() == render_kubernetes(KUBERNETES)
    assert (cluster / "namespace").read_text() == "perf\n"
    assert f"{name} -n perf logs job.batch/h100-run" in said[0]
    assert said[1:] == ["job.batch/h100-run: Running", "job.batch/h100-run: Complete"]


def test_a_pod_that_waits_says_for_what(cluster: Path) -> None:
    reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    pods = [{"metadata": {}, "status": {"phase": "Pending", "conditions": [reason]}}]
    fake_kubernetes(cluster, [{}, COMPLETE], pods)
    said: list[str] = []
    submit_kubernetes("x", said.append, poll_s=0.0)
    assert said[1] == "job.batch/h100-run: Pending (Unschedulable: 0/3 nodes)"
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff"}}}
    (cluster / "count").unlink()
    fake_kubernetes(
        cluster, [{}, COMPLETE], [{"status": {"phase": "Pending", "containerStatuses": [waiting]}}]
    )
    said.clear()
    submit_kubernetes("x", said.append, poll_s=0.0)
    assert said[1] == "job.batch/h100-run: Pending (ImagePullBackOff)"


def test_a_kubernetes_job_that_fails_says_why(cluster: Path) -> None:
    failed = {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}
    fake_kubernetes(cluster, [{}, failed])
    with pytest.raises(MeasureError, match=r"ended as Failed \(DeadlineExceeded\); kubectl logs"):
        submit_kubernetes("x", lambda _: None, poll_s=0.0)


# -- the commands --------------------------------------------------------------------------------


def test_the_command_prints_writes_and_submits(cluster: Path) -> None:
    asked = ["job", "slurm", "--output", "results/h100", "--budget", "540", "--time", "30"]
    printed = CliRunner().invoke(app, asked)
    assert printed.exit_code == 0, printed.output
    assert printed.output == render_slurm(SLURM)
    written = CliRunner().invoke(app, [*asked, "-o", str(cluster / "job.sh")])
    assert written.exit_code == 0
    assert (cluster / "job.sh").read_text() == printed.output
    fake_slurm(cluster, ["COMPLETED"])
    followed = CliRunner().invoke(app, [*asked, "--submit", "--poll-seconds", "0"])
    assert followed.exit_code == 0, followed.output
    assert (cluster / "submitted").read_text() == printed.output
    assert "the tables are in results/h100" in followed.output


def test_arguments_after_two_dashes_go_to_the_run() -> None:
    asked = [
        "job",
        "kubernetes",
        "--image",
        "a:1",
        "--claim",
        "results",
        "--",
        "--only",
        "gemm",
        "--seed",
        "3",
    ]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert "--only gemm --seed 3" in result.output


@pytest.mark.slow
def test_errors_are_one_line_and_exit_code_2() -> None:
    command = [sys.executable, "-m", "kernels_bench", "job", "slurm", "--output", "x", "--budget", "9999"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"kernels-bench: error: a time limit of 1800 s is too short: .*\n", done.stderr)


def test_the_templates_are_packaged() -> None:
    from importlib.resources import files

    templates = files("kernels_bench.jobs") / "templates"
    assert sorted(p.name for p in templates.iterdir()) == ["kubernetes.yaml", "slurm.sh"]
