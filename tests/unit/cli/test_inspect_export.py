"""`inspect` and `export` on journals written as a run writes them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from qwengyre.cli.main import application
from qwengyre.cli.output import write_text
from qwengyre.core.arrays import LOGPROB, TOKEN, pack
from qwengyre.core.records import End, Outcome, Validity
from qwengyre.gateway.templates.jinja import ChatTemplate
from qwengyre.journal import Journal
from qwengyre.recorded.run import RecordedRun
from qwengyre.runtime.records import CallCounts, ControllerRecord, Decided, ExecutionDone
from qwengyre.scheduler.commands import Dispatch
from qwengyre.testing.call_records import PLAIN
from qwengyre.trajectory.records import CallFinished, CallStarted, Closed, GatewayRecord, Opened, RoleHints, TokensSampled
from qwengyre.warmup.chat_template import CHAT_TEMPLATE

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
SUB = RoleHints("chat", system_digest="sub", num_tools=1)


def byte_tokenizer(folder: Path) -> Tokenizer:
    """One token a byte, and the markers of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return tokenizer


class Book:
    """Writes the gateway's journal of a few executions."""

    def __init__(self, path: Path, first_session: int = 0):
        self.journal = Journal.open(path, GatewayRecord)
        self.num_sessions = first_session

    def execution(
        self, name: str, calls: list[tuple], *, attempt: int = 0, closed: bool = True, temperature: float = 1.0
    ) -> None:
        session = self.num_sessions
        self.num_sessions += 1
        self.journal.append(Opened(session, name, attempt, 0, temperature, True, 1000, 100, "policy"))
        for call, (base, base_tokens, context, sampled, hints) in enumerate(calls):
            self.journal.append(
                CallStarted(
                    session,
                    call,
                    base,
                    base_tokens,
                    pack(context, TOKEN),
                    "root" if base < 0 else "extends",
                    hints,
                    call,
                    b"k",
                    0,
                    0,
                    "chat",
                )
            )
            logprobs = pack([-0.5] * len(sampled), LOGPROB)
            self.journal.append(TokensSampled(session, call, pack(sampled, TOKEN), logprobs, 3, "cell-1"))
            self.journal.append(CallFinished(session, call, "stop", len(sampled), 0, False, call + 0.5, 0, 0.0, "", len(sampled)))
        if closed:
            self.journal.append(Closed(session))


def done(name: str, score: float, validity: Validity = Validity.VALID, attempt: int = 0) -> ExecutionDone:
    outcome = Outcome(End.EXITED, validity, score, "digest", 2.5)
    return ExecutionDone(name, int(name[1:7]), attempt, "repo-a", 1.0, outcome, CallCounts(), 1.0)


MAIN = (-1, 0, [1, 2, 3], [4, 5], PLAIN)
LONGER = (0, 5, [6], [7, 8], PLAIN)
HELPER = (-1, 0, [9, 9], [5], SUB)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "journal").mkdir(parents=True)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    tables = (
        f'[tasks]\nfamily = ""\ntrain = "{tasks}"',
        '[harness]\ncommand = ["true"]',
        '[gateway]\nrenderer = { name = "qwen3" }',
    )
    (folder / "config.toml").write_text("\n".join(tables) + "\n")
    book = Book(folder / "journal" / "gateway.log")
    book.execution("e000000-0", [MAIN], closed=False)
    book.execution("e000000-0", [MAIN, LONGER, HELPER], attempt=1)
    book.execution("e000000-1", [MAIN])
    book.execution("e000001-0", [MAIN], temperature=0.0)
    book.execution("e000002-0", [MAIN], closed=False)
    book.journal.close()
    with Journal.open(folder / "journal" / "controller.log", ControllerRecord) as journal:
        journal.append(Decided((Dispatch(0, "train", 3, 2), Dispatch(1, "evaluation", 3, 1), Dispatch(2, "train", 3, 2))))
        for record in (done("e000000-0", 1.0, attempt=1), done("e000000-1", 0.5), done("e000001-0", 0.25)):
            journal.append(record)
    return folder


def call(*arguments: object) -> str:
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(application(words), words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: object) -> str:
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(application(words), words)
    assert result.exit_code == 2
    return result.output


class TestInspect:
    def test_lists_the_attempt_that_counted(self, run):
        lines = [json.loads(line) for line in call("inspect", run, "--json").splitlines()]
        assert [(line["execution"], line["attempt"], line["kind"], line["reward"], line["end"]) for line in lines] == [
            ("e000000-0", 1, "train", 1.0, "exited"),
            ("e000000-1", 0, "train", 0.5, "exited"),
            ("e000001-0", 0, "evaluation", 0.25, "exited"),
            ("e000002-0", 0, "train", None, "open"),
        ]
        assert lines[0]["roles"] == {"main": 2, "sub-agent": 1}
        assert (lines[0]["num_calls"], lines[0]["num_distinct_tokens"]) == (3, 11)

    def test_table_has_a_row_for_each(self, run):
        printed = call("inspect", run)
        assert "e000000-0" in printed
        assert "2 main, 1 sub-agent" in printed

    def test_tree_of_one_execution(self, run):
        printed = call("inspect", run, "--execution", "e000000-0")
        assert "main  4 context  4 trained  v3  a1c0, a1c1  root" in printed
        assert "sub-agent  2 context  1 trained" in printed
        assert "reward 1.000 (valid)" in printed

    def test_earlier_attempt_is_there_too(self, run):
        assert "v3  c0  root" in call("inspect", run, "--execution", "e000000-0", "--attempt", 0)

    def test_page_needs_no_other_file(self, run, tmp_path):
        page = tmp_path / "tree.html"
        call("inspect", run, "--execution", "e000000-0", "--html", page)
        text = page.read_text()
        assert text.count('class="node"') == 2
        assert "http" not in text.replace("http-equiv", "")

    def test_rules_of_a_harness_can_be_given(self, run, tmp_path):
        rules = tmp_path / "rules.toml"
        rules.write_text('[[harness]]\nname = "mine"\ndetect = [{has_tools = true}]\nside = [{has_tools = true}]\n')
        line = json.loads(call("inspect", run, "--json", "--harness-rules", rules).splitlines()[0])
        assert (line["harness"], line["roles"]) == ("mine", {"side": 3})
        assert "--harness-rules: cannot read" in refused("inspect", run, "--harness-rules", tmp_path / "missing.toml")

    def test_rules_of_a_run_are_those_in_its_folder(self, run):
        (run / "harness-rules.toml").write_text('[[harness]]\nname = "kept"\ndetect = [{has_tools = true}]\n')
        assert json.loads(call("inspect", run, "--json").splitlines()[0])["harness"] == "kept"

    def test_a_run_of_another_version_is_read_and_what_is_not_understood_is_named(self, run, tmp_path):
        renamed = '[gone]\nkey = 1\n[trajectory]\nj_most = 2\nj_max = 1\ndivide_by_std = "no"\n'
        (run / "config.toml").write_text(renamed)
        assert "e000000-0" in call("inspect", run)
        printed = call("export", run, "--out", tmp_path / "rows.parquet")
        assert "not understood: trajectory.j_most, trajectory.divide_by_std" in printed
        assert "wrote 3 trajectories" in printed, "j_max holds"

    def test_unknown_execution_names_what_there_is(self, run):
        assert "e000000-1" in refused("inspect", run, "--execution", "e9")

    def test_unknown_attempt(self, run):
        assert "has no attempt 7" in refused("inspect", run, "--execution", "e000000-0", "--attempt", 7)

    def test_options_that_would_change_nothing_are_refused(self, run, tmp_path):
        assert "--html: this is for the tree of one execution" in refused("inspect", run, "--html", tmp_path / "tree.html")
        assert "--attempt: this is for the tree of one execution" in refused("inspect", run, "--attempt", 0)
        assert "--json: this is for the list" in refused("inspect", run, "--execution", "e000000-0", "--json")

    def test_no_run_folder(self, tmp_path):
        assert "no config.toml" in refused("inspect", tmp_path)

    def test_another_journal_of_a_run(self, run):
        assert "give the run folder, or its gateway.log" in refused("inspect", run / "journal" / "controller.log")

    @pytest.mark.parametrize("lose", [lambda journal: journal.unlink(), lambda journal: journal.write_bytes(b"")])
    def test_a_run_that_has_lost_its_scores_says_so(self, run, lose):
        lose(run / "journal" / "controller.log")
        assert "controller.log is missing or empty, and with it every score" in call("inspect", run)

    def test_journal_of_a_gateway_that_ran_alone(self, run):
        lines = [json.loads(line) for line in call("inspect", run / "journal" / "gateway.log", "--json").splitlines()]
        assert (lines[0]["execution"], lines[0]["reward"], lines[0]["end"]) == ("e000000-0", None, "closed")


class TestOfALiveRun:
    """The journals grow while they are read, and end anywhere."""

    def test_an_execution_that_opens_between_two_readings_is_not_seen(self, run):
        seen = RecordedRun.open(run).last_attempts()
        first = next(seen)
        book = Book(run / "journal" / "gateway.log", first_session=5)
        book.execution("e000002-1", [MAIN], closed=False)
        book.execution("e000002-0", [MAIN, LONGER], attempt=1)
        book.journal.close()
        assert [one.opened.execution for one in (first, *seen)] == ["e000000-0", "e000000-1", "e000001-0", "e000002-0"]

    def test_an_execution_that_was_dispatched_after_the_scores_were_read_is_not_seen(self, run):
        recorded = RecordedRun.open(run)
        assert not recorded.scores.is_empty
        book = Book(run / "journal" / "gateway.log", first_session=5)
        book.execution("e000003-0", [MAIN], closed=False)
        book.journal.close()
        assert "e000003-0" not in [one.opened.execution for one in recorded.last_attempts()]

    def test_wherever_the_journals_end_every_reader_reads_them(self, run, tmp_path):
        journals = [run / "journal" / name for name in ("controller.log", "gateway.log")]
        whole = [journal.read_bytes() for journal in journals]
        for share in range(41):
            for journal, data in zip(journals, whole, strict=True):
                journal.write_bytes(data[: len(data) * share // 40])
            num_listed = call("inspect", run, "--json").count('"execution"')
            call("export", run, "--out", tmp_path / "x.parquet")
            num_rows = pq.read_metadata(tmp_path / "x.parquet").num_rows
            call("report", run)
            assert num_listed <= 4 and num_rows <= 4
        assert (num_listed, num_rows) == (4, 4)

    @pytest.mark.parametrize("begun", [False, True], ids=["policy being made", "gateway being started"])
    def test_before_the_first_call_there_is_nothing_yet(self, begun, run, tmp_path):
        for journal in (run / "journal").iterdir():
            journal.unlink()
        if begun:
            Journal.open(run / "journal" / "controller.log", ControllerRecord).close()
        note = "note: this run has not recorded a call yet"
        assert call("inspect", run, "--json").splitlines() == [note]
        assert note in call("export", run, "--out", tmp_path / "x.parquet")
        assert "there are: none yet" in refused("inspect", run, "--execution", "e000000-0")

    def test_a_run_that_has_lost_its_calls_says_so(self, run):
        (run / "journal" / "gateway.log").unlink()
        assert "gateway.log: there is no journal here" in refused("inspect", run)


class TestParquet:
    def test_one_row_per_trajectory_with_rewards_and_advantages(self, run, tmp_path):
        out = tmp_path / "rows.parquet"
        assert "wrote 4 trajectories" in call("export", run, "--out", out)
        rows = pq.read_table(out).to_pylist()
        picked = [(row["execution"], row["role"], row["reward"], row["advantage"]) for row in rows]
        assert sorted(picked, key=repr) == [
            ("e000000-0", "main", 1.0, 0.25),
            ("e000000-0", "sub-agent", 1.0, 0.25),
            ("e000000-1", "main", 0.5, -0.25),
            ("e000002-0", "main", None, None),
        ]
        main = next(row for row in rows if row["execution"] == "e000000-0" and row["role"] == "main")
        assert main["token_ids"] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert main["mask"] == [False, False, False, True, True, False, True, True]
        assert main["logprobs"] == [0, 0, 0, -0.5, -0.5, 0, -0.5, -0.5]
        assert main["versions"] == [-1, -1, -1, 3, 3, -1, 3, 3]

    def test_bounded_and_filtered(self, run, tmp_path):
        out = tmp_path / "rows.parquet"
        call("export", run, "--out", out, "--j-max", 1, "--min-reward", 0.9)
        assert [row["role"] for row in pq.read_table(out).to_pylist()] == ["main"]


class TestChat:
    def test_messages_tools_and_weights_are_read_off_the_tokens(self, tmp_path):
        tokenizer = byte_tokenizer(tmp_path / "model")
        prompt = (
            "<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
            '{"type": "function", "function": {"name": "read", "parameters": {}}}\n</tools>\n\nFor each function call, return a json object '
            "with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
            '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\nRead it.<|im_end|>\n<|im_start|>assistant\n"
        )
        answer = (
            '<think>\nHm.\n</think>\n\nOn it.\n<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call><|im_end|>'
        )
        result = "\n<|im_start|>user\n<tool_response>\nsecret\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        last = "<think>\n\n</think>\n\nDone.<|im_end|>"
        prompt_T, answer_T, result_T, last_T = (tokenizer.encode(text).ids for text in (prompt, answer, result, last))
        book = Book(tmp_path / "gateway.log")
        base_tokens = len(prompt_T) + len(answer_T)
        book.execution("solo", [(-1, 0, prompt_T, answer_T, PLAIN), (0, base_tokens, result_T, last_T, PLAIN)])
        book.journal.close()
        out = tmp_path / "chat.jsonl"
        call("export", tmp_path / "gateway.log", "--out", out, "--tokenizer", tmp_path / "model", "--renderer", "qwen3")
        (line,) = out.read_text().splitlines()
        row = msgspec.json.decode(line)
        assert row["tools"] == [{"type": "function", "function": {"name": "read", "parameters": {}}}]
        assert row["renders_back"] is True
        assert [{**message, "tool_calls": None} if "tool_calls" in message else message for message in row["messages"]] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Read it."},
            {"role": "assistant", "content": "On it.", "weight": 1, "reasoning_content": "Hm.", "tool_calls": None},
            {"role": "tool", "content": "secret", "tool_call_id": "call_0"},
            {"role": "assistant", "content": "Done.", "weight": 1},
        ]
        (tool_call,) = row["messages"][2]["tool_calls"]
        assert tool_call["id"] == "call_0"
        assert json.loads(tool_call["function"]["arguments"]) == {"path": "a"}

    @pytest.mark.parametrize(
        ("answer", "num_calls"),
        [
            ('<tool_call>\n{"name": "read", "arguments": {"path":"a"}}\n</tool_call>', 1),
            ('<tool_call>\n{"name": "read", "arguments": {"path":   "\\u00e4", "n": 1.0}}\n</tool_call>', 1),
            ('On it.\n<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>\n<tool_call>\n'
             '{"name": "read", "arguments": { }}\n</tool_call>', 2),
            ('<tool_call>\n{"name":"read","arguments":{"path":"a"}}\n</tool_call>', 0),
            ('<tool_call>\n{"arguments": {"path": "a"}, "name": "read"}\n</tool_call>', 0),
            ('<tool_call>\n{"name": "read", "arguments": {"path": "a}\n</tool_call>', 0),
            ('<tool_call>\n{"name": "read", "arguments": {"path": "', 0),
            ('<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>\nAnd more.', 0),
            ("Done.\n\n", 0),
            ("  Done.", 0),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("ends", ["<|im_end|>", ""])
    @pytest.mark.parametrize("before", ["Be brief.", "Be brief.\n\n", "# Tools\nHave fun."])
    def test_every_conversation_renders_back_to_the_recorded_text(self, before, ends, answer, num_calls, tmp_path):
        tokenizer = byte_tokenizer(tmp_path / "model")
        (tmp_path / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        tools = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}]
        template = ChatTemplate.from_folder(tmp_path / "model")
        asked = [{"role": "system", "content": before}, {"role": "user", "content": "Read it."}]
        prompt = template.render(asked, tools=tools, add_generation_prompt=True)
        result = "\n<|im_start|>user\n<tool_response>\n a\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        first, last = tokenizer.encode(answer + "<|im_end|>").ids, tokenizer.encode(answer + ends).ids
        prompt_T, result_T = tokenizer.encode(prompt).ids, tokenizer.encode(result).ids
        book = Book(tmp_path / "gateway.log")
        book.execution("solo", [(-1, 0, prompt_T, first, PLAIN), (0, len(prompt_T) + len(first), result_T, last, PLAIN)])
        book.journal.close()
        (tmp_path / "model" / "renderer.json").write_text('{"name": "qwen3", "enable_thinking": false}')
        out = tmp_path / "chat.jsonl"
        call("export", tmp_path / "gateway.log", "--out", out, "--tokenizer", tmp_path / "model")
        row = json.loads(out.read_text())
        written = template.render(row["messages"], tools=row["tools"])
        recorded = tokenizer.decode([*prompt_T, *first, *result_T, *last], skip_special_tokens=False)
        assert written == recorded.removesuffix("<|im_end|>") + "<|im_end|>\n"
        assert row["renders_back"] is True and row["tools"] == tools
        assert [len(message.get("tool_calls", ())) for message in row["messages"] if message["role"] == "assistant"] == [
            num_calls,
            num_calls,
        ]

    def test_a_conversation_that_does_not_render_back_says_so(self, tmp_path):
        tokenizer = byte_tokenizer(tmp_path / "model")
        book = Book(tmp_path / "gateway.log")
        prompt, answer = "<|im_start|>user\n\nRead.<|im_end|>\n<|im_start|>assistant\n", "No reasoning at all.<|im_end|>"
        book.execution("solo", [(-1, 0, tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids, PLAIN)])
        book.journal.close()
        out = tmp_path / "chat.jsonl"
        said = call("export", tmp_path / "gateway.log", "--out", out, "--tokenizer", tmp_path / "model", "--renderer", "qwen3")
        assert "note: 1 do not render back" in said
        row = json.loads(out.read_text())
        assert row["renders_back"] is False
        assert [message["content"] for message in row["messages"]] == ["\nRead.", "No reasoning at all."]

    @pytest.mark.parametrize("name", ["absent/x.parquet", "absent/x.jsonl", "folder.parquet"])
    def test_a_file_that_cannot_be_written_is_named(self, name, run, tmp_path):
        (tmp_path / "folder.parquet").mkdir()
        tokenizer = tmp_path / "model"
        byte_tokenizer(tokenizer)
        assert f"{name}: cannot be written" in refused("export", run, "--out", tmp_path / name, "--tokenizer", tokenizer)

    def test_a_pipe_is_written_to_and_stays_a_pipe(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        write_text(tmp_path / "pipe", "said")
        assert (os.read(reader, 9), (tmp_path / "pipe").is_fifo()) == (b"said", True)
        os.close(reader)

    def test_a_name_that_tells_no_format_is_refused(self, run, tmp_path):
        assert "its name does not say which format" in refused("export", run, "--out", tmp_path / "x.csv")

    def test_a_damaged_journal_leaves_the_last_export_as_it_was(self, run, tmp_path):
        out = tmp_path / "x.parquet"
        out.write_bytes(b"the last export")
        journal = run / "journal" / "gateway.log"
        data = bytearray(journal.read_bytes())
        data[len(data) // 2] ^= 0xFF
        journal.write_bytes(data)
        assert "unreadable at byte" in refused("export", run, "--out", out)
        assert out.read_bytes() == b"the last export"
        assert not list(tmp_path.glob(".x.parquet*"))

    def test_without_a_tokenizer_it_says_which_option_to_give(self, run, tmp_path):
        assert "--tokenizer" in refused("export", run, "--out", tmp_path / "chat.jsonl")

    def test_a_run_whose_renderer_nobody_knows_is_asked_to_name_one(self, run, tmp_path):
        byte_tokenizer(tmp_path / "model")
        (run / "config.toml").write_text((run / "config.toml").read_text().replace('"qwen3"', '"auto"'))
        message = refused("export", run, "--out", tmp_path / "chat.jsonl", "--tokenizer", tmp_path / "model")
        assert "--renderer: no renderer is known for" in message

    def test_another_tokenizer_is_noticed(self, run, tmp_path):
        byte_tokenizer(tmp_path / "model")
        message = refused("export", run, "--out", tmp_path / "chat.jsonl", "--tokenizer", tmp_path / "model")
        assert "<|im_start|>" in message
