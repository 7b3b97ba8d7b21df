"""``vllm-gsd inspect --prompt``: an engine answers the prompt, and the page shows its steps."""

import json
import re
import subprocess
import sys
from pathlib import Path

from vllm_gsd.tools.inspect.trace import read_traces

VLLM_GSD = str(Path(sys.executable).with_name("vllm-gsd"))
ENGINE = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 1 << 26}


def test_a_prompt(text_pair, preforked, tmp_path):
    trace, page = tmp_path / "trace.jsonl", tmp_path / "page.html"
    options = {
        "--prompt": "</script>",
        "--target": text_pair.target,
        "--draft": text_pair.draft,
        "--max-tokens": 24,
        "--engine-args": json.dumps(ENGINE),
        "--trace": trace,
        "--out": page,
    }
    arguments = [str(part) for option in options.items() for part in option]
    done = subprocess.run([preforked, VLLM_GSD, "inspect", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    ((name, request),) = read_traces(trace).items()
    assert summary == {"page": str(page), "request": name, "steps": len(request.steps)}
    assert 1 < sum(len(step["tokens"]["token"]) for step in request.steps) <= 24
    data = re.search('id="data">(.*?)</script>', page.read_text())[1]
    assert json.loads(data)["steps"] == request.steps
    assert "user: &lt;/script&gt;" in page.read_text()
