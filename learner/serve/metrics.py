"""Prometheus text of the policy server, under vLLM's names, so that one scraper reads both."""

from __future__ import annotations

from learner.serve.engine import InferenceEngine


def render_metrics(engine: InferenceEngine, num_in_flight: int) -> str:
    """Gauges and counters as Prometheus text; plain reads, so momentarily inconsistent ones are possible.

    `vllm:kv_cache_usage_perc` is the fraction (0 to 1) of cache rows in use, which is what admission waits for.
    """
    stats = engine.stats
    running = engine.num_running
    rows: list[tuple[str, str, float, str]] = [
        ("num_requests_running", "gauge", running, "Sequences being decoded."),
        ("num_requests_waiting", "gauge", max(num_in_flight - running, 0), "Requests without a cache row."),
        ("kv_cache_usage_perc", "gauge", running / engine.max_batch, "Cache rows in use, 1 is all."),
        ("prompt_tokens_total", "counter", stats.prompt_tokens, "Prompt tokens admitted."),
        ("prefix_cache_hits_total", "counter", stats.shared_prompt_tokens, "Prompt tokens copied from a sibling."),
        ("generation_tokens_total", "counter", stats.sampled_tokens, "Tokens sampled."),
        ("engine_steps_total", "counter", stats.steps, "Decode steps."),
        ("weight_version", "gauge", engine.weight_version, "Version of the weights in use."),
    ]
    lines: list[str] = []
    for name, kind, value, text in rows:
        lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} {kind}", f"vllm:{name} {value!r}"]
    lines += ["# HELP vllm:request_success_total Requests that ended.", "# TYPE vllm:request_success_total counter"]
    lines += [
        f'vllm:request_success_total{{finished_reason="{reason}"}} {count}'
        for reason, count in list(stats.finished.items())
    ]
    return "\n".join(lines) + "\n"
