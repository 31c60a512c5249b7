"""InferSim's method in plain Python: one query, one scenario at a time, for reading.

The order of operations is that of the recorded answers, so results are equal to the last bit. What
InferSim raises is raised as Raised, with its words. Files are split into cells once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GIB = 1024**3
# fp16 and fp8 TFLOP/s, default MFU, memory GiB, GB/s of memory, NVLink, network
GPUS = {
    "H20": (148, 296, 0.6, 96, 4096 * 0.8, 900 * 0.8 / 2, 50 * 0.8),
    "H800": (989, 1979, 0.35, 80, 3430 * 0.8, 400 * 0.8 / 2, 50 * 0.8),
}


class Raised(Exception):
    """What InferSim raises."""


class Tree:
    """A bench_data tree: the cells of every line but the first, by path; and what was printed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.split: dict[str, list[list[str]] | None] = {}
        self.printed: list[str] = []

    def cells(self, path: str) -> list[list[str]] | None:
        if path not in self.split:
            file = self.root / path
            lines = file.read_text().splitlines()[1:] if file.exists() else None
            self.split[path] = None if lines is None else [line.split(",") for line in lines]
        return self.split[path]


def mfu(cell: str) -> float:
    return round(float(cell), 3)


def attn_decode_mfu(
    tree: Tree, device: str, kind: str, sizes: tuple[int, ...], batch: int, kv_len: int, fp8_kv: bool
) -> float:
    """Return the MFU of the nearest row, by the plain sum of differences."""
    path = f"{kind}/decode/{device.lower()}/{'-'.join(map(str, sizes))}.csv"
    cells = tree.cells(path)
    if cells is None:
        tree.printed.append(f"Warning: bench_data/{path} not exists")
        return GPUS[device][2]
    usable = [c for c in cells if c[1] == ("fp8" if fp8_kv else "bf16")]
    if not usable:
        raise Raised("ValueError: min() arg is an empty sequence")
    return mfu(min(usable, key=lambda c: abs(int(c[2]) - batch) + abs(int(c[3]) - kv_len))[5])


def attn_prefill_mfu(tree: Tree, device: str, kind: str, sizes: tuple[int, ...], seq_len: int) -> float:
    """Return the MFU of the last row before the first longer one."""
    path = f"{kind}/prefill/{device.lower()}/{'-'.join(map(str, sizes))}.csv"
    cells = tree.cells(path)
    if cells is None:
        tree.printed.append(f"Warning: bench_data/{path} not exist.")
        return 0.9
    found = GPUS[device][2]
    for c in cells:
        if int(c[1]) > seq_len:
            break
        found = mfu(c[3])
    return found


def gemm_mfu(tree: Tree, device: str, m: int, k: int, n: int) -> float:
    """Return the MFU at the nearest shape that is not smaller, at the last m that is not larger."""
    cells = tree.cells(f"gemm/{device.lower()}/data.csv") or []
    least, shape = 1e9, None
    for c in cells:
        row_k, row_n = int(c[1]), int(c[2])
        distance = (k - row_k) ** 2 + (n - row_n) ** 2
        if row_k >= k and row_n >= n and distance < least:
            least, shape = distance, (row_k, row_n)
    found = GPUS[device][2]
    for c in cells:
        if (int(c[1]), int(c[2])) == shape and int(c[0]) <= m:
            found = mfu(c[4])
    return found


def grouped_gemm_mfu(
    tree: Tree, device: str, phase: str, layer: tuple[int, ...], tokens: int
) -> tuple[float, float]:
    """MFUs of up and down: decode takes the nearest row of the layer, prefill the floor."""
    cells = tree.cells(f"grouped_gemm/{phase}/{device.lower()}/data.csv") or []
    cells = [c for c in cells if tuple(map(int, c[:6])) == layer]
    found = GPUS[device][2], GPUS[device][2]
    if not cells:
        tree.printed.append(f"Warning: grouped_gemm {phase} mfu not found, will use default mfu.")
        return found
    if phase == "decode":
        nearest = min(cells, key=lambda c: abs(int(c[6]) - tokens))
        return mfu(nearest[9]), mfu(nearest[11])
    for c in cells:
        if int(c[6]) > tokens:
            break
        found = mfu(c[9]), mfu(c[11])
    return found


def gdn_latency_us(tree: Tree, device: str, phase: str, layer: tuple[int, ...], tokens: int) -> float:
    """Latency of the nearest row, scaled to the tokens."""
    path = f"gdn/{phase}/{device.lower()}/{'-'.join(map(str, layer))}.csv"
    cells = tree.cells(path)
    if cells is None:
        raise Raised(f"AssertionError: Error: bench_data/{path} not exist.")
    nearest = min(cells, key=lambda c: abs(int(c[0]) - tokens))
    scale = int(nearest[0]) / tokens
    return sum(float(us) / scale for us in nearest[1:])


def evaluate(tree: Tree, config: Mapping[str, Any], scenario: Mapping[str, Any]) -> dict[str, Any]:
    """All columns of one scenario; a phase that raises keeps what it had, and the reason."""
    tree.printed = []
    p = _sizes_and_rates(config, SimpleNamespace(**scenario))
    out: dict[str, Any] = _memory_and_flops(p)
    warnings = [] if out["kv_fits"] else ["!Error: need smaller kvcache"]
    for phase, letter in (("prefill", "p"), ("decode", "d")):
        try:
            _step(tree, p, phase, letter, out)
        except Raised as error:
            out[f"{letter}_error"] = str(error)
        except ZeroDivisionError:
            out[f"{letter}_error"] = "ZeroDivisionError: float division by zero"
    if out.get("tpot_ms", 0) > p.s.target_tpot:
        warnings.append("!Error: TPOT > SLO, need smaller GFLOPs to speedup")
    out["warnings"] = " | ".join(sorted({*warnings, *tree.printed}))
    return out


def _sizes_and_rates(config: Mapping[str, Any], s: Any) -> Any:
    """Everything that the formulas name, in one namespace."""
    if config["model_type"] in ("qwen3_5", "qwen3_5_moe"):
        config = config["text_config"]
    p = SimpleNamespace(s=s, hid=config["hidden_size"], L=config["num_hidden_layers"])
    p.H, p.KV = config["num_attention_heads"], config["num_key_value_heads"]
    interval = config.get("full_attention_interval")
    p.hybrid = interval is not None
    p.L_full = p.L // interval if p.hybrid else p.L
    p.L_lin = p.L - p.L_full
    p.mla = "kv_lora_rank" in config
    if p.mla:
        p.ql, p.kl, p.vd = (config[key] for key in ("q_lora_rank", "kv_lora_rank", "v_head_dim"))
        p.no, p.ro = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    else:
        p.D = config.get("head_dim") or p.hid // p.H
    p.moe = "num_routed_experts" in config or "num_experts" in config
    p.E = config.get("num_routed_experts") or config.get("num_experts") or 1
    p.I = config["moe_intermediate_size" if p.moe else "intermediate_size"]
    p.topk = config["num_experts_per_tok"] if p.moe else 1
    p.shared = config.get("num_shared_experts", 0) if p.moe else 0
    if p.hybrid:
        p.conv = config["linear_conv_kernel_dim"]
        p.nk, p.dk = config["linear_num_key_heads"], config["linear_key_head_dim"]
        p.nv, p.dv = config["linear_num_value_heads"], config["linear_value_head_dim"]
    p.tp, p.W = s.tp_size, s.world_size
    p.h, p.kv, p.It = p.H // p.tp, p.KV // p.tp, p.I // p.tp
    p.wb, p.kvb = (1 if s.fp8_gemm else 2), (1 if s.fp8_kv else 2)
    p.fp16, fp8, _, p.mem, p.bw, p.nvlink, p.rdma = GPUS[s.device]
    p.peak = fp8 if s.fp8_gemm else p.fp16
    p.bs = s.decode_bs or math.ceil(s.target_tgs * s.target_tpot / 1000)
    p.ctx = int(s.isl + s.osl / 2)
    return p


def _memory_and_flops(p: Any) -> dict[str, Any]:
    s, hid, h = p.s, p.hid, p.h
    if p.mla:
        q, kv = p.ql * h * (p.no + p.ro), p.kl * h * (p.no + p.vd)
        attention = p.wb * (hid * p.ql + q + hid * p.kl + kv + hid * h * p.vd)
        p.kv_token = p.L * (p.kl + p.ro) * p.kvb
        core = 2 * h * p.ctx * (2 * p.kl + p.ro)
        absorbed = h * p.no * p.kl + h * p.kl * p.vd
        others = 2 * (hid * p.ql + q + hid * (p.kl + p.ro) + absorbed + h * p.vd * hid)
    else:
        attention = p.wb * hid * p.D * (2 * h + 2 * p.kv)
        p.kv_token = 2 * p.L * p.kv * p.D * p.kvb
        core = 4 * h * p.D * p.ctx
        others = 2 * (hid * (h + 2 * p.kv) * p.D + h * p.D * hid)
    p.expert = p.wb * 3 * hid * p.It
    experts = p.expert * (p.shared + p.E / p.W if p.tp == 1 else p.shared + p.E)
    p.states = None
    if p.hybrid:
        keys, values = p.nk * p.dk, p.nv * p.dv
        linear = p.wb * hid * (2 * keys + 2 * values + 2 * p.nv) + p.conv * (2 * keys + values)
        params = (experts * p.L + p.L_full * attention + p.L_lin * linear) / GIB
        p.kv_token = p.kv_token / p.L * p.L_full
        p.states = p.L_lin * ((values + 2 * keys) * (p.conv - 1) * 2 + p.nv * p.dk * p.dv * 4)
    else:
        params = (attention + experts) / GIB * p.L
    kv_memory = p.mem - params - 15 - 5
    a_request, longest = kv_memory * GIB / p.bs, s.isl + s.osl
    too_large = p.kv_token * longest + p.states > a_request if p.hybrid else p.kv_token > a_request / longest
    return {
        "params_per_gpu_gib": params,
        "kvcache_mem_gib": kv_memory,
        "kvcache_bytes_per_token": p.kv_token,
        "states_bytes": p.states,
        "target_bs": p.bs,
        "avg_context_len": p.ctx,
        "kv_fits": 0 if too_large else 1,
        "flops_attn_core_g": core / 1e9,
        "flops_moe_g": (p.shared + p.topk) * 3 * 2 * hid * p.It / 1e9,
        "flops_others_g": others / 1e9,
    }


def _step(tree: Tree, p: Any, phase: str, letter: str, out: dict[str, Any]) -> None:
    """One prefill or decode step: every part of a layer, then all layers."""
    s, prefill = p.s, phase == "prefill"
    m = s.max_prefill_tokens if prefill else p.bs

    def put(**parts: float) -> None:
        out.update({f"{letter}_{name}": value for name, value in parts.items()})

    def gemm_s(k: int, n: int) -> float:
        return 2 * m * k * n / 1e9 / (p.peak * 1024 * gemm_mfu(tree, s.device, m, k, n))

    def sent_s(tokens: int, element_bytes: int, gb_per_s: float) -> float:
        return tokens * p.hid * element_bytes / GIB / gb_per_s

    # full attention
    kind = "mla" if p.mla else "mha"
    sizes = (p.h, p.no if prefill else p.kl, p.ro) if p.mla else (p.h, p.kv, p.D)
    if prefill:
        width = p.no + p.ro + p.vd if p.mla else 0
        flops = 2 * p.H * s.isl * width if p.mla else 4 * p.h * p.D * s.isl
        found = attn_prefill_mfu(tree, s.device, kind, sizes, s.isl)
        core = s.isl * (flops / 1e9) / 1.8 / (p.fp16 * 1024 * found)
        load = p.kv_token * s.isl / p.L / GIB / p.bw
    else:
        flops = 2 * p.H * p.ctx * (2 * p.kl + p.ro) if p.mla else 4 * p.h * p.D * p.ctx
        found = attn_decode_mfu(tree, s.device, kind, sizes, p.bs, p.ctx, s.fp8_kv)
        core = p.bs * (flops / 1e9) / (p.fp16 * 1024 * found)
        load = p.kv_token * p.ctx * p.bs / p.L / GIB / p.bw
    attention = max(core, load)
    put(attn_mfu=found, attn_core_s=core, kv_load_s=load, attn_core_max_s=attention)
    if p.mla:
        others = gemm_s(p.hid, p.ql) + gemm_s(p.ql, p.h * (p.no + p.ro)) + gemm_s(p.hid, p.kl + p.ro)
        others = others + gemm_s(p.h * p.no, p.kl) + gemm_s(p.h * p.kl, p.vd) + gemm_s(p.h * p.vd, p.hid)
    else:
        others = gemm_s(p.hid, (p.h + 2 * p.kv) * p.D) + gemm_s(p.h * p.D, p.hid)
    put(attn_others_s=others)

    # gated delta net
    if p.hybrid:
        layer = (p.conv, p.nk, p.dk, p.nv, p.dv)
        us = gdn_latency_us(tree, s.device, phase, layer, s.isl if prefill else p.bs)
        states = p.states * (1 if prefill else p.bs) / p.L_lin / GIB / p.bw
        linear = max(us / 1e6, states)
        width = 2 * p.nk * p.dk + 2 * p.nv * p.dv
        linear_others = gemm_s(p.hid, width) * (width + 2 * p.nv) / width + gemm_s(p.nv * p.dv, p.hid)
        put(lin_core_us=us, lin_states_s=states, lin_core_max_s=linear, lin_others_s=linear_others)

    # experts, or the MLP
    if p.W // p.tp == 0:
        raise Raised("ZeroDivisionError: world_size // tp_size is 0")
    if p.moe:
        layer = (p.E, p.W, p.E // (p.W // p.tp), p.topk, p.hid, p.It)
        found = max(grouped_gemm_mfu(tree, s.device, phase, layer, m))
    else:
        found = gemm_mfu(tree, s.device, m, p.hid, 2 * p.I // p.W)
    one_gemm = 2 * p.hid * p.It
    gflop = one_gemm * m * p.topk * 3 / 1e9 if prefill else m * p.topk * 3 / 1e9 * one_gemm
    routed = gflop / (p.peak * 1024 * found)
    load = p.expert * p.E / (p.W // p.tp) / GIB / p.bw
    experts = max(routed, load)
    put(moe_mfu=found, routed_s=routed, moe_load_s=load)
    if p.shared:
        up, down = gemm_s(p.hid, 2 * p.It * p.shared), gemm_s(p.It * p.shared, p.hid)
        put(shared_up_s=up, shared_down_s=down)
        experts = experts + (up + down)
    put(moe_s=experts)

    # communication
    network = p.rdma if s.num_nodes > 1 else p.nvlink
    before = after = tp_comm = 0.0
    if p.W > 1 and not s.deepep:
        before = after = sent_s(m * p.W, 2, network)
    elif p.W > 1 and prefill:
        before = sent_s(m * (s.num_nodes - 1), 1, p.rdma) + sent_s(m, 1, p.nvlink)
        after = sent_s(m * (s.num_nodes - 1), 2, p.rdma) + sent_s(m, 2, p.nvlink)
    elif p.W > 1:
        before, after = sent_s(m * p.topk, 1, network), sent_s(m * p.topk, 2, network)
    if p.tp > 1:
        tp_comm = m * p.hid * 2 * 2 * (p.tp - 1) / p.tp / GIB / p.nvlink
    put(comm1_s=before, comm2_s=after, tp_comm_s=tp_comm)

    # all layers
    tokens = m
    if p.hybrid:
        chunks = m / s.isl if prefill else 1
        step = (attention * chunks + others) * p.L_full + (linear * chunks + linear_others) * p.L_lin
        step = step + experts * p.L + (2 * tp_comm if p.tp > 1 else before + after) * p.L
    elif prefill:
        attention = attention * math.ceil(m / s.isl)
        step = (attention + experts + others + (before + after) + tp_comm) * p.L
        if s.tbo:
            tokens = 2 * m
            mixed, moe = (attention + others) / s.sm_ratio, experts / s.sm_ratio
            step = (max(mixed, before) + max(mixed, after) + max(moe, before) + max(moe, after)) * p.L
    else:
        step = (attention + others + experts + (before + after) + tp_comm) * p.L
        if s.tbo:
            tokens = 2 * m
            step = 2 * max(attention + others, experts + before + after) * p.L
    overhead_ms = 30 if prefill else 2 if p.hybrid else 5
    step_ms = step * 1000 + overhead_ms
    out["ttft_ms" if prefill else "tpot_ms"] = step_ms
    out[f"{phase}_tgs"] = tokens / p.tp / (step_ms / 1000)
