"""`scripts/beside_vllm.py` with a made-up vLLM: what it is given, and the table."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from megatron_hybrid_prefix.bench.scenarios import SCENARIOS
from megatron_hybrid_prefix.models.config import get_preset
from megatron_hybrid_prefix.models.hf.dimensions import config_json_of, family_of
from tests.harness.limits import HANG_S

SCRIPT = Path(__file__).parents[2] / "scripts" / "beside_vllm.py"
VLLM = """
import json, os, sys
from types import SimpleNamespace as Made
__version__, SamplingParams, given = "0.0", dict, open(os.environ["GIVEN"], "a")
sys.modules["vllm.platforms"] = Made(current_platform=Made(get_device_name=lambda: "a card"))
def tell(*what): print(json.dumps(what), file=given, flush=True)
class LLM:
    def __init__(self, model, **arguments):
        assert not {name.split(".")[0] for name in sys.modules} & {"torch", "megatron", "megatron_hybrid_prefix"}
        tell("built", json.load(open(model + "/config.json")), arguments["load_format"], arguments.get("mamba_cache_mode"))
        self.reused = {True: 8000, False: None}[arguments["enable_prefix_caching"]]
    def reset_prefix_cache(self): tell("reset")
    def generate(self, prompts, params, use_tqdm):
        tell("sent", [prompt["prompt_token_ids"] for prompt in prompts])
        return [Made(outputs=[Made(token_ids=[0] * params["max_tokens"])], num_cached_tokens=self.reused) for _ in prompts]
"""


def test_it_sends_the_prompts_of_bench_to_the_shape_of_the_preset(tmp_path):
    (tmp_path / "vllm.py").write_text(VLLM)
    given, report = tmp_path / "given", tmp_path / "report.json"
    settings = [f"enable_prefix_caching={value}" for value in ("false", "true,mamba_cache_mode=align", "wrong")]
    command = [sys.executable, SCRIPT, *settings, "--repeats", "2", "--seed", "7", "--json", report]
    made_up = os.environ | {"PYTHONPATH": str(tmp_path), "GIVEN": str(given)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=made_up)
    assert result.returncode == 1, result.stderr
    head, _, *lines = result.stdout.splitlines()
    assert [line.count("|") for line in lines] == [head.count("|")] * 3
    for line, texts in zip(lines, (["(?)"], ["(8,000)", f"vLLM 0.0, {settings[1]}"], ["exit code 1"]), strict=True):
        assert all(text in line for text in texts)
    rows = json.loads(report.read_text())["rows"]
    assert [len(row.get("samples", [])) for row in rows.values()] == [2, 2, 0]

    config = replace(get_preset("hybrid-4b"), state_dtype="bfloat16")
    shared = SCENARIOS["shared_prefix"](requests=3, shared_tokens=8192, own_tokens=300, generate=4, cold_prompts=0)
    different = [
        SCENARIOS["no_reuse"](requests=requests, prompt_tokens=length, generate=1)
        for requests, length in ((32, 512), (64, 64))
    ]
    rounds = []
    for seed in ("7 -1", "7 0", "7 1"):
        rounds += [["sent", [prompt]] for prompt in shared.workload(random.Random(seed), config.vocab_size)[0]]
        for scenario in different:
            rounds += [["reset"], ["sent", scenario.workload(random.Random(seed), config.vocab_size)]]
    off, on, wrong = (
        ["built", config_json_of(family_of(config), config), "dummy", mode] for mode in (None, "align", None)
    )
    assert [json.loads(line) for line in given.read_text().splitlines()] == [off, *rounds, on, *rounds, wrong]
