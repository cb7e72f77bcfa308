"""Agents' programs with the stock clients through the real engines: the white box's tokens, and a merge to its end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from opd import cluster
from opd.config import PipelineConfig
from opd.config.sections import ClusterConfig
from opd.files import blake3_file
from opd.records.types import Prompt, RolloutBatch
from opd.rollouts.vllm import VLLMRolloutEngine
from opd.run.paths import RunPaths
from opd.settings.yaml_files import validate_section
from opd.traces.record import read_traces
from pipelines.specs import rollout_spec
from tests.chaos import Merge, in_method, lives, place_of_its_own
from tests.integration.test_agents import largest_gap_by_turn
from tests.integration.test_merge import opd, records, write

# What tests/integration/corridor.py does, as a program. Its last argument says which client, and whether it streams.
PROGRAM = """
import json, os, sys
task, client, stream = json.load(sys.stdin), sys.argv[1], "stream" in sys.argv
length, vowels, turns, chat = task["metadata"]["length"], 0, 0, []

def ask_openai():
    import openai
    with openai.OpenAI() as made:
        reply = made.chat.completions.create(model="any", messages=chat, temperature=0.1, max_tokens=99, stream=stream)
        if stream:
            return "".join(chunk.choices[0].delta.content or "" for chunk in reply)
        return reply.choices[0].message.content

def ask_anthropic():
    import anthropic
    asked = {"model": "any", "messages": chat, "max_tokens": 99, "extra_body": {"temperature": 0.1}}
    with anthropic.Anthropic() as made:
        if not stream:
            return made.messages.create(**asked).content[0].text
        with made.messages.stream(**asked) as events:
            return events.get_final_message().content[0].text

chat.append({"role": "user", "content": f"{task['prompt']} {length}-"})
while turns < length:
    text = ask_openai() if client == "openai" else ask_anthropic()
    turns += 1
    vowels += sum(map(text.lower().count, "aeiou"))
    chat += [{"role": "assistant", "content": text}, {"role": "user", "content": f" {vowels}-"}]
if "rewrites" in sys.argv:
    chat[:] = [{"role": "user", "content": f"all {vowels}-"}]
    ask_openai() if client == "openai" else ask_anthropic()
print(json.dumps({"reward": 0.1 * vowels}))
"""


def pipeline_with(domain: dict[str, Any], student: Path) -> PipelineConfig:
    return validate_section(
        PipelineConfig,
        {
            "name": "test",
            "student": {"model": student},
            "experts": {"left": {"model": student, "domain": "left"}},
            "domains": {"left": domain},
            "rollout": {"max_new_tokens": 8, "max_model_len": 96},
            "trainer": {"ranks": 1, "steps": 1, "samples_per_step": 6},
        },
        "test",
    )


def test_the_same_tokens_in_white_and_in_black(tmp_path: Path, make_model_dir: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    student = make_model_dir(tmp_path / "student", seed=3)
    tokenizer = AutoTokenizer.from_pretrained(student)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["python", str(tmp_path / "program.py")]
    ways: dict[str, dict[str, Any]] = {"white": {"environment": {"name": "tests.integration.corridor:Corridor"}}}
    for client in (["openai"], ["openai", "stream"], ["anthropic"], ["anthropic", "stream"]):
        agent = {"command": [*command, *client], "render": "text", "metadata": ["length"], "parallel": 2}
        ways[" ".join(client)] = {"agent": agent}
    prompts = [
        Prompt(
            id=f"left/{n}", domain="left", token_ids=tuple(tokenizer(f"go {n}")["input_ids"]), text=f"go {n}",
            metadata={"length": n},
        )
        for n in (1, 4)
    ]  # fmt: skip
    batches: dict[str, RolloutBatch] = {}
    greedy: dict[str, Any] = {}
    with cluster.ray_session(ClusterConfig(), 8):
        specs = {
            name: rollout_spec(pipeline_with(domain, student), student, len(tokenizer), (tokenizer.eos_token_id,))
            for name, domain in ways.items()
        }
        engine = VLLMRolloutEngine(specs["white"], tokenizer)
        engine.wait_ready()
        for name, spec in specs.items():
            engine._spec = spec
            batches[name] = engine.generate(prompts, step=1, policy_version=0)
            greedy[name] = [completion.episode.rollouts for completion in engine.answer(prompts)]  # type: ignore[union-attr]
    white = batches.pop("white")
    gaps = largest_gap_by_turn(list(white.rollouts), str(student))
    assert len(gaps) >= 4 and max(gaps.values()) < 1e-3
    for name, batch in batches.items():
        assert batch.episodes["left"].stop_reasons == {"done": 2}, (name, batch.episodes)
        assert batch.episodes["left"].audit == white.episodes["left"].audit, name
        for found, wanted in zip(
            [*batch.rollouts, *(r for rs in greedy[name] for r in rs)],
            [*white.rollouts, *(r for rs in greedy["white"] for r in rs)],
            strict=True,
        ):
            same = ("sample_id", "prompt_ids", "response_ids", "spans", "stop_reason")
            assert all(getattr(found, key) == getattr(wanted, key) for key in same), name
            assert found.reward == pytest.approx(wanted.reward)
            assert found.behaviour_logprobs == pytest.approx(wanted.behaviour_logprobs, abs=1e-4)


def black_box_pipeline(root: Path, pipeline: dict[str, Any]) -> Path:
    """Both domains have a program: one streams with OpenAI's client and rewrites its history, the other has Anthropic's."""
    (root / "program.py").write_text(PROGRAM)
    for name, client in (("left", ["openai", "stream", "rewrites"]), ("right", ["anthropic"])):
        for file, lengths in ((name, range(1, 5)), (f"{name}-eval", [2])):
            rows = [{"prompt": f"go {file}{n}", "metadata": {"length": n}} for n in lengths]
            (root / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        agent = {"command": ["python", "program.py", *client], "render": "text", "metadata": ["length"], "parallel": 2}
        pipeline["domains"][f"{name}-domain"]["agent"] = agent
    pipeline["rollout"] = {"max_new_tokens": 8, "max_model_len": 96}
    pipeline["trainer"] |= {"steps": 1, "samples_per_step": 4}
    del pipeline["domains"]["right-domain"]["eval"]
    return write(root, pipeline)


@pytest.mark.slow
def test_the_stock_clients_drive_a_merge_to_its_end(tmp_path: Path, pipeline: dict[str, Any]) -> None:
    run = tmp_path / "run"
    done = opd("merge", black_box_pipeline(tmp_path, pipeline), "--run-dir", run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for record in records(run):
        for name, forks in (("left", 2), ("right", 0)):
            found = record["episodes"][f"{name}-domain"]
            assert (found["episodes"], found["trained"], found["forks"], found["broken"]) == (2, 1.0, forks, 0), found
            assert found["stop_reasons"] == {"done": 2} and found["reward"] is not None
            assert record["domains"][f"{name}-domain"]["tokens"] == found["tokens"]
        assert record["logprob_gap"] < 1e-3 and record["probe_gap"] < 1e-3
    assert json.loads((run / "evaluation" / "after.json").read_text())["scores"]["left-domain"]["turns"] == 3
    (kept,) = RunPaths(run).traces_by_step().values()
    traces = read_traces(kept).episodes
    assert {trace.domain for trace in traces} == {"left-domain", "right-domain"}
    for trace in traces:
        wrote = [piece for segment in trace.segments for piece in segment.pieces if piece.origin == "policy"]
        assert wrote, "the policy wrote something"
        assert all(len(piece.losses) == len(piece.texts) == piece.length for piece in wrote), "a loss for each token"
        assert (len(trace.segments) == 2) == (trace.domain == "left-domain"), "a history that was rewritten is a fork"
    tree = opd("traces", run, "--step", "last", cwd=tmp_path)
    assert tree.returncode == 0 and "+1, fork of 000001/left-domain/" in tree.stdout
    assert '<section id="traces">' in (run / "report.html").read_text()


def programs_of(engine: int) -> list[psutil.Process]:
    """The agents' programs that this process has started, and that have begun: each is at work for seconds."""
    found = []
    for child in psutil.Process(engine).children():
        with contextlib.suppress(psutil.Error):
            found += [child] if any(word.endswith("program.py") for word in child.cmdline()) else []
    return found


@pytest.mark.slow
def test_an_engine_that_is_killed_under_its_agents_repeats_their_episodes(
    tmp_path: Path, pipeline: dict[str, Any]
) -> None:
    """The endpoint lives in the engine's process, so it dies with it; the merge ends with the weights of an undisturbed one."""
    file, whole = black_box_pipeline(tmp_path, pipeline), tmp_path / "whole"
    done = opd("merge", file, "--run-dir", whole, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with place_of_its_own() as place:  # its path is short: Ray's sockets lie below it
        shutil.copy(tmp_path / "program.py", place)
        struck = place / "run"
        merge, deadline = Merge([file, "--run-dir", struck], struck, place), time.monotonic() + 300
        programs: list[psutil.Process] = []
        while not programs:
            assert merge.driver.poll() is None and time.monotonic() < deadline, merge.errors.read_text()
            merge.look()
            pid = in_method(merge, "engine", "episodes") if (struck / "evaluation" / "expert.json").exists() else None
            if pid is not None and merge.records == 0:
                programs = programs_of(pid)
            time.sleep(0.02)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert merge.wait(300) == 0, merge.errors.read_text()
        (record,) = records(struck)
        assert record["restarted"] and record["episodes"] == records(whole)[0]["episodes"]
        weights = [blake3_file(run / "model" / "model.safetensors") for run in (whole, struck)]
        assert weights[0] == weights[1]
        assert not [program for program in programs if lives(program)], "a program ends when nobody answers it"
        assert not list((place / "tmp").glob("opd-*")), "the directories of its programs went with it"
