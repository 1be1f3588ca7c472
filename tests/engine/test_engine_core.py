"""Requests in, steps, outputs out: text, stops, families, aborts and failures."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ingle.engine.engine_core import EngineCore
from ingle.engine.streams import add_output, merge_output
from ingle.errors import CapacityError, EngineDeadError, RequestError
from ingle.request import RequestOutput, SamplingParams

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{**GREEDY, "max_tokens": 8, **options})


def drain(core: EngineCore) -> dict[str, RequestOutput]:
    """Steps until nothing is left; every request's whole output."""
    whole: dict[str, RequestOutput] = {}
    while core.has_work():
        for output in core.step():
            assert output.request_id not in whole or not whole[output.request_id].finished
            add_output(whole, output)
        core.scheduler.check_integrity()
    return whole


def assert_idle(core: EngineCore) -> None:
    stats = core.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
    assert (stats.kv_cache_used_blocks, stats.kv_cache_usage_perc) == (0, 0.0)
    core.scheduler.check_integrity()


def test_text_tokens_and_finish_come_out_as_deltas(
    core_of: Any, undisturbed_tokens: Any, text_of: Any
) -> None:
    core = core_of()
    core.add_request("a", [1, 2, 3], greedy(), "abc")
    outputs = []
    while core.has_work():
        outputs += core.step()
    expected, _ = undisturbed_tokens([1, 2, 3], greedy(), 0, 100)
    assert [o.outputs[0].token_ids for o in outputs] == [[token] for token in expected]
    assert "".join(o.outputs[0].text for o in outputs) == text_of(expected)
    assert [o.finished for o in outputs] == [False] * 7 + [True]
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert {(o.request_id, o.prompt, tuple(o.prompt_token_ids)) for o in outputs} == {
        ("a", "abc", (1, 2, 3))
    }
    assert_idle(core)


def test_many_requests_at_once_equal_each_alone(core_of: Any, undisturbed_tokens: Any) -> None:
    core = core_of(num_blocks=14, max_num_batched_tokens=9)
    prompts = {f"r{n}": [1 + n % 3] * (1 + n) + [5] for n in range(12)}
    for name, prompt in prompts.items():
        core.add_request(name, prompt, greedy(max_tokens=10))
    whole = drain(core)
    assert core.stats().num_preemptions_total > 0
    for name, prompt in prompts.items():
        tokens, reason = undisturbed_tokens(prompt, greedy(max_tokens=10), 0, 52)
        assert whole[name].outputs[0].token_ids == tokens
        assert whole[name].outputs[0].finish_reason == reason
    assert_idle(core)


def test_without_max_tokens_it_goes_on_to_the_end_of_the_context(core_of: Any) -> None:
    core = core_of(max_model_len=20)
    core.add_request("a", [1, 2, 3], greedy(max_tokens=None))
    (output,) = drain(core)["a"].outputs
    assert len(output.token_ids) == 17
    assert output.finish_reason == "length"


def test_the_context_is_never_longer_than_the_cache(core_of: Any) -> None:
    core = core_of(num_blocks=4, max_model_len=100)
    assert core.info.max_model_len == 12
    with pytest.raises(RequestError, match="context is 12"):
        core.add_request("a", [1] * 12, greedy())


@pytest.mark.parametrize(
    ("prompt", "params", "param", "code"),
    [
        ([], greedy(), "prompt", None),
        ([23], greedy(), "prompt", None),
        ([-1], greedy(), "prompt", None),
        ([1, True], greedy(), "prompt", None),
        ([1, 2.0], greedy(), "prompt", None),
        ([1] * 100, greedy(), "prompt", "context_length_exceeded"),
        ([1] * 100, greedy(max_tokens=None), "prompt", "context_length_exceeded"),
        ([1] * 200, greedy(), "prompt", "context_length_exceeded"),
        ([1] * 95, greedy(max_tokens=6), "max_tokens", "context_length_exceeded"),
        ([1], greedy(max_tokens=10**9), "max_tokens", "context_length_exceeded"),
        ([1], greedy(stop_token_ids=(23,)), "stop_token_ids", None),
        ([1], greedy(logit_bias={99: 1.0}), "logit_bias", None),
    ],
)
def test_a_wrong_request_is_refused_by_field(
    core_of: Any, prompt: Any, params: SamplingParams, param: str, code: str | None
) -> None:
    core = core_of()
    with pytest.raises(RequestError) as caught:
        core.add_request("a", prompt, params)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert not core.has_work()
    core.add_request("a", [1] * 95, greedy(max_tokens=5))
    drain(core)


def test_an_id_in_use_is_refused_and_free_again_afterwards(core_of: Any) -> None:
    core = core_of()
    core.add_request("a", [1], greedy())
    with pytest.raises(RequestError, match="in use"):
        core.add_request("a", [2], greedy())
    core.abort("a")
    core.add_request("a", [2], greedy())
    assert drain(core)["a"].prompt_token_ids == [2]


def test_a_full_queue_refuses_and_takes_again(core_of: Any) -> None:
    core = core_of(max_num_seqs=1, max_queue_len=2)
    for name in "ab":
        core.add_request(name, [1], greedy())
    assert not core.has_room()
    with pytest.raises(CapacityError, match="--max-queue-len is 2"):
        core.add_request("c", [1], greedy())
    core.step()
    core.add_request("c", [1], greedy())
    assert set(drain(core)) == {"a", "b", "c"}


def test_a_family_has_n_different_completions_and_one_prompt(core_of: Any) -> None:
    core = core_of()
    params = SamplingParams(n=3, temperature=1.0, max_tokens=6, ignore_eos=True, seed=5)
    core.add_request("a", list(range(1, 10)), params)
    (whole,) = drain(core).values()
    assert whole.finished
    completions = {c.index: c for c in whole.outputs}
    assert sorted(completions) == [0, 1, 2]
    assert {len(c.token_ids) for c in completions.values()} == {6}
    assert len({tuple(c.token_ids) for c in completions.values()}) == 3
    assert core.runner.num_computed == 9 + 2 + 3 * 5
    stats = core.stats()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (9, 18)
    single = core_of()
    single.add_request(
        "b",
        list(range(1, 10)),
        SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, seed=5),
    )
    assert drain(single)["b"].outputs[0].token_ids == completions[0].token_ids


def test_a_family_is_finished_when_its_last_completion_is(core_of: Any) -> None:
    core = core_of()
    core.add_request("a", [4], SamplingParams(n=4, max_tokens=60, seed=1))
    outputs = []
    while core.has_work():
        outputs += core.step()
    reasons = [c.finish_reason for o in outputs for c in o.outputs if c.finish_reason]
    assert len(reasons) == 4
    assert "stop" in reasons
    assert [o.finished for o in outputs].count(True) == 1
    assert outputs[-1].finished


def test_requests_without_a_seed_differ_and_an_engine_seed_repeats_them(core_of: Any) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True)
    runs = []
    for _ in range(2):
        core = core_of()
        for name in "ab":
            core.add_request(name, [1, 2, 3], params)
        whole = drain(core)
        runs.append([whole[name].outputs[0].token_ids for name in "ab"])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_a_stop_string_ends_the_request_before_itself(core_of: Any, text_of: Any) -> None:
    core = core_of()
    core.add_request("plain", [3, 1], greedy(max_tokens=30))
    text = drain(core)["plain"].outputs[0].text
    stop = text[9:12]
    at = text.index(stop)
    core.add_request("cut", [3, 1], greedy(max_tokens=30, stop=("zzz", stop)))
    core.add_request(
        "kept", [3, 1], greedy(max_tokens=30, stop=(stop,), include_stop_str_in_output=True)
    )
    core.add_request("late", [3, 1], greedy(max_tokens=30, stop=(stop,), min_tokens=at + 8))
    whole = drain(core)
    (cut,), (kept,), (late,) = (whole[name].outputs for name in ("cut", "kept", "late"))
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (text[:at], "stop", stop)
    assert len(cut.token_ids) <= at + 3 + 2
    assert kept.text == text[: at + 3]
    assert late.text.startswith(text[: at + 3])
    assert_idle(core)


def test_text_held_back_for_a_stop_string_comes_at_the_end(core_of: Any) -> None:
    core = core_of()
    core.add_request("plain", [3, 1], greedy())
    text = drain(core)["plain"].outputs[0].text
    core.add_request("held", [3, 1], greedy(stop=(text[-3:] + "z",)))
    (held,) = drain(core)["held"].outputs
    assert (held.text, held.finish_reason) == (text, "length")


def test_a_stop_string_in_the_last_token_wins_over_the_length(core_of: Any) -> None:
    core = core_of()
    core.add_request("plain", [3, 1], greedy())
    text = drain(core)["plain"].outputs[0].text
    core.add_request("cut", [3, 1], greedy(stop=(text[-3:],)))
    (cut,) = drain(core)["cut"].outputs
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (text[:-3], "stop", text[-3:])
    assert core.stats().requests_finished_total == {"length": 1, "stop": 1}


def test_a_stop_token_is_no_part_of_the_text_unless_asked(core_of: Any, text_of: Any) -> None:
    core = core_of()
    core.add_request("plain", [3, 1], greedy())
    tokens = drain(core)["plain"].outputs[0].token_ids
    third = tokens[2]
    at = tokens.index(third)
    core.add_request("cut", [3, 1], greedy(stop_token_ids=(third,)))
    core.add_request(
        "kept", [3, 1], greedy(stop_token_ids=(third,), include_stop_str_in_output=True)
    )
    whole = drain(core)
    (cut,), (kept,) = whole["cut"].outputs, whole["kept"].outputs
    assert cut.token_ids == kept.token_ids == tokens[: at + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", third)
    assert cut.text == text_of(tokens[:at])
    assert kept.text == text_of(tokens[: at + 1])


def test_special_tokens_are_left_out_of_the_text_unless_asked(core_of: Any) -> None:
    core = core_of()
    core.add_request("skip", [4], greedy(max_tokens=90))
    core.add_request("show", [4], greedy(max_tokens=90, skip_special_tokens=False))
    whole = drain(core)
    assert 0 in whole["skip"].outputs[0].token_ids
    assert "<eos>" not in whole["skip"].outputs[0].text
    assert "<eos>" in whole["show"].outputs[0].text


def test_logprobs_come_with_every_token_when_asked(core_of: Any) -> None:
    core = core_of()
    core.add_request("with", [1], greedy(logprobs=0))
    core.add_request("without", [1], greedy())
    whole = drain(core)
    logprobs = whole["with"].outputs[0].logprobs
    assert logprobs is not None
    assert [entry.token_id for entry in logprobs] == whole["with"].outputs[0].token_ids
    assert whole["without"].outputs[0].logprobs is None


def test_no_tokens_wanted_ends_at_once(core_of: Any) -> None:
    core = core_of()
    core.add_request("a", [1] * 100, greedy(max_tokens=0, n=2))
    whole = drain(core)["a"]
    assert whole.finished
    assert [(c.text, c.finish_reason) for c in whole.outputs] == [("", "length")] * 2
    assert core.runner.num_steps == 0


def test_an_abort_ends_the_whole_family_and_frees_everything(core_of: Any) -> None:
    core = core_of()
    core.add_request("a", [1] * 9, SamplingParams(n=4, max_tokens=50, ignore_eos=True))
    core.add_request("b", [2], greedy())
    for _ in range(3):
        core.step()
    output = core.abort("a")
    assert output is not None
    assert output.finished
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 4
    assert core.abort("a") is None
    assert core.abort("nobody") is None
    assert set(drain(core)) == {"b"}
    assert core.stats().requests_finished_total["abort"] == 4
    assert_idle(core)


def test_cached_prompt_tokens_are_reported(core_of: Any) -> None:
    core = core_of()
    core.add_request("a", [1, 2, 3, 4, 5, 6], greedy(max_tokens=1))
    drain(core)
    core.add_request("b", [1, 2, 3, 4, 5, 6], greedy(max_tokens=1))
    assert drain(core)["b"].num_cached_tokens == 5
    stats = core.stats()
    assert (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) == (12, 5)


def test_counts_and_histograms_are_exact(core_of: Any) -> None:
    core = core_of()
    for n in range(10):
        core.add_request(f"r{n}", [n + 1] * 3, greedy(max_tokens=10))
    drain(core)
    stats = core.stats()
    assert stats.prompt_tokens_total == 30
    assert stats.generation_tokens_total == 100
    assert stats.time_to_first_token_seconds.count == 10
    assert stats.inter_token_seconds.count == 90
    assert stats.request_seconds.count == 10
    assert stats.requests_finished_total == {"length": 10}


def test_one_failing_row_ends_alone(core_of: Any, undisturbed_tokens: Any) -> None:
    core = core_of()
    core.runner.row_error = lambda item: "NaN logits" if item.prompt_token_ids == [6] else None
    core.add_request("bad", [6], greedy())
    core.add_request("good", [7], greedy())
    whole = drain(core)
    (bad,), (good,) = whole["bad"].outputs, whole["good"].outputs
    assert (bad.finish_reason, bad.error) == ("error", "NaN logits")
    assert good.token_ids == undisturbed_tokens([7], greedy(), 0, 100)[0]
    assert_idle(core)


def test_text_that_cannot_be_made_ends_its_request_alone(core_of: Any) -> None:
    core = core_of()
    core.add_request("bad", [6], greedy())
    core.add_request("good", [7], greedy())
    core.step()
    (bad,) = (s for s in core.scheduler.running if s.request_id == "bad")
    core._outputs._texts[bad.sequence_id].push = lambda _: 1 / 0
    whole = drain(core)
    assert whole["bad"].outputs[0].finish_reason == "error"
    assert len(whole["good"].outputs[0].token_ids) == 7
    assert_idle(core)


@pytest.mark.parametrize("kind", [MemoryError, CapacityError])
def test_out_of_memory_ends_the_newest_request_and_keeps_the_rest(
    core_of: Any, undisturbed_tokens: Any, kind: type[Exception]
) -> None:
    core = core_of()
    core.add_request("old", [6], greedy())
    core.step()
    for name, token in (("b", 7), ("c", 8)):
        core.add_request(name, [token], greedy())

    def run_out(plan: Any) -> None:
        if len(plan.scheduled) > 2:
            raise kind

    core.runner.before = run_out
    whole = drain(core)
    assert whole["c"].outputs[0].finish_reason == "error"
    assert "memory" in (whole["c"].outputs[0].error or "")
    assert len(whole["old"].outputs[0].token_ids) == 7
    assert whole["b"].outputs[0].token_ids == undisturbed_tokens([7], greedy(), 0, 100)[0]
    assert_idle(core)


def test_a_failed_step_kills_the_engine_for_good_and_frees_everything(core_of: Any) -> None:
    core = core_of()
    for name, token in (("a", 6), ("b", 7), ("c", 8)):
        core.add_request(name, [token], greedy(max_tokens=50))

    def fail(plan: Any) -> None:
        if core.runner.num_steps > 10:
            raise ValueError("secret 0x7f00")

    core.runner.before = fail
    with pytest.raises(EngineDeadError) as caught:
        drain(core)
    assert "ValueError" in str(caught.value)
    assert "0x7f" not in str(caught.value)
    for call in (core.step, lambda: core.add_request("d", [1], greedy())):
        with pytest.raises(EngineDeadError):
            call()
    assert not core.has_work()
    assert_idle(core)


def test_a_stall_is_an_error_and_no_endless_loop(core_of: Any) -> None:
    core = core_of()
    core.add_request("a", [6], greedy())
    core.scheduler.waiting.clear()
    with pytest.raises(EngineDeadError):
        core.step()


def test_the_log_has_one_line_per_request_and_no_prompt(
    core_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    core = core_of()
    caplog.set_level(logging.DEBUG, "ingle")
    core.add_request("name", [3, 1, 2], greedy(), "cab")
    drain(core)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "'name': 3 prompt tokens (0 cached), 8 generated, length" in line
    assert "cab" not in line


def test_an_idle_engine_checks_itself_when_debugging(
    core_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    core = core_of()
    caplog.set_level(logging.DEBUG, "ingle")
    core.add_request("a", [3, 1, 2], greedy(max_tokens=1))
    core.scheduler.blocks._num_holders[30] = 1
    with pytest.raises(EngineDeadError, match="RuntimeError"):
        core.step()


def test_a_hundred_requests_with_every_tenth_aborted(core_of: Any) -> None:
    core = core_of(num_blocks=120, max_num_seqs=16, max_model_len=400)
    sizes = {}
    for n in range(100):
        count = 3 if n % 15 == 0 else 1
        wanted = 300 if n % 10 == 0 else 20
        sizes[f"r{n}"] = (count, wanted)
        core.add_request(f"r{n}", [1 + n % 22] * (n % 30 + 1), greedy(n=count, max_tokens=wanted))
    whole: dict[str, RequestOutput] = {}
    while core.has_work():
        for output in core.step():
            add_output(whole, output)
        for name, (_, wanted) in sizes.items():
            if wanted == 300 and name in whole and not whole[name].finished:
                merge_output(whole[name], core.abort(name))
        core.scheduler.check_integrity()
    for name, (count, wanted) in sizes.items():
        reasons = {c.finish_reason for c in whole[name].outputs}
        if wanted == 300:
            assert reasons == {"abort"}
        else:
            assert [len(c.token_ids) for c in whole[name].outputs] == [20] * count
            assert reasons == {"length"}
    core.add_request("r0", [1], greedy())
    assert drain(core)["r0"].finished
    assert_idle(core)
