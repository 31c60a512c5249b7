#!/bin/sh
# llm-d-inference-sim's configuration and latencies, from its own source: what it makes of an exported file.
#
#     sh benchmarks/upstream/llm_d.sh CHECKOUT
#
# CHECKOUT: a checkout of llm-d/llm-d-inference-sim. Needs Go of its go.mod, and logr, uuid and yaml.v3: from a module
# proxy, or in the folder $GO_SOURCES as Debian's golang-*-dev packages lay them (/usr/share/gocode/src). Python needs
# fastroof; $PYTHON names it. Only pkg/common's Configuration and latencies.go are built: no server, no requests,
# no LoRA.
set -eu
checkout=$(cd "${1:?usage: llm_d.sh CHECKOUT}" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
module=github.com/llm-d/llm-d-inference-sim
mkdir -p "$build/pkg/common" "$build/pkg/llm-d-inference-sim"
cp -r "$checkout/pkg/common/logging" "$build/pkg/common"
for file in config.go config_fake_metrics.go utils.go; do cp "$checkout/pkg/common/$file" "$build/pkg/common"; done
cp "$checkout/pkg/llm-d-inference-sim/latencies.go" "$build/pkg/llm-d-inference-sim"
cp "$checkout/go.sum" "$build"
{
    echo "module $module"
    grep -E '^go ' "$checkout/go.mod"
    for needed in github.com/go-logr/logr github.com/google/uuid gopkg.in/yaml.v3; do
        echo "require $(grep -oE "$needed v[^ ]+" "$checkout/go.mod" | head -1)"
        [ -z "${GO_SOURCES:-}" ] || echo "replace $needed => $GO_SOURCES/$needed"
    done
} >"$build/go.mod"
cat >"$build/pkg/common/read.go" <<'END'
package common

// of the parser of flags and of KV events, which need more modules; the file names no LoRA and no endpoint
func (c *Configuration) unmarshalLoras() error     { return nil }
func ParseEndpointPort(string) (string, int, bool) { return "", 0, false }

func Read(path string) (*Configuration, error) {
	config := newConfig()
	if err := config.load(path); err != nil {
		return nil, err
	}
	return config, config.validate()
}
END
cat >"$build/pkg/llm-d-inference-sim/asked_test.go" <<'END'
package llmdinferencesim

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/llm-d/llm-d-inference-sim/pkg/common"
)

func TestAsked(t *testing.T) {
	config, err := common.Read(os.Getenv("ASKED_CONFIG"))
	if err != nil {
		t.Fatal(err)
	}
	var asked, answers [][2]int64
	text, _ := os.ReadFile(os.Getenv("ASKED"))
	if err := json.Unmarshal(text, &asked); err != nil {
		t.Fatal(err)
	}
	random := common.NewRandom(1, 1)
	if config.LatencyCalculator != common.PerPromptTokenLatencyCalculator {
		t.Fatalf("calculator %q", config.LatencyCalculator)
	}
	calculator := newPerTokenCalculator(config, random)
	for _, one := range asked {
		first := calculator.GetTimeToFirstToken(&TTFTParams{PromptTokens: int(one[1]), RunningReqs: one[0]})
		next := calculator.GetInterTokenLatency(&InterTokenParams{RunningReqs: one[0]})
		answers = append(answers, [2]int64{first.Nanoseconds(), next.Nanoseconds()})
	}
	text, _ = json.Marshal(answers)
	if err := os.WriteFile(os.Getenv("ANSWERS"), text, 0o644); err != nil {
		t.Fatal(err)
	}
}
END
PYTHONPATH=$root "${PYTHON:-python}" - "$checkout" "$build" <<'END'
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import fastroof
from benchmarks.upstream.steps import print_errors, print_exact, version
from fastroof.backends.llm_d import fit_llm_d, llm_d_yaml, simulated_ms

at, build = version(Path(sys.argv[1])), Path(sys.argv[2])
plan = fastroof.compile_plan("llama-3.1-8b", "h100")
fit = fit_llm_d(plan)
(build / "config.yaml").write_text(llm_d_yaml(plan, fit))
points = np.stack([fit.clients, fit.isl], 1).astype(int)
(build / "asked.json").write_text(json.dumps(points.tolist()))
paths = {"ASKED_CONFIG": "config.yaml", "ASKED": "asked.json", "ANSWERS": "answers.json"}
environment = {**os.environ, "GOFLAGS": "-mod=mod", **{name: str(build / path) for name, path in paths.items()}}
command = ["go", "test", "-count=1", "-run", "TestAsked", "./pkg/llm-d-inference-sim"]
done = subprocess.run(command, cwd=build, env=environment, capture_output=True, text=True, check=False)
if done.returncode:
    sys.exit(done.stdout + done.stderr)
first_ms, next_ms = np.array(json.loads((build / "answers.json").read_text())).T / 1e6
name = "llm-d-inference-sim"
expected = simulated_ms(fit.latencies, fit.clients, fit.isl)
print_exact(name, at, np.r_[first_ms, next_ms].tolist(), np.concatenate(expected).tolist(), "answers")
print_errors(name, at, "TTFT", first_ms / fit.ttft_ms - 1)
print_errors(name, at, "ITL", next_ms / fit.tpot_ms - 1)
END
