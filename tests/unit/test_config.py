"""A cluster file's mistakes: all at once, each with file, line, key, what is wrong and what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpupp.errors import CpuppError, CpuppErrors, ExitCode
from cpupp.launch.config import load_cluster
from cpupp.plan.cluster import ClusterSpec
from cpupp.render import error_page, flat

GOOD = """\
name: pair
model:
  path: /models/x
parallel: {pipeline: 2}
hosts:
  - name: a
    ssh: me@10.0.0.1:22
  - name: b
    ssh: me@10.0.0.2
engine:
  args: {max_model_len: 1024}
"""

FIVE_MISTAKES = """\
name: pair
model:
  path: /models/x
parallel: {pipeline: 3}
hosts:
  - name: a
    ssh: me@10.0.0.1
    slotz: 2
  - name: a
    ssh: me@10.0.0.2
engine:
  executor: ray
  env: {OMP_NUM_THREADS: 4}
"""

FIVE_ERRORS = """\
error: pair.yaml:4: parallel: pipeline(3) * tensor(1) = 3 != slots(1 + 1 = 2)
  hint: set pipeline to 2, or make the slots of all hosts sum to 3
error: pair.yaml:8: hosts[0].slotz: unknown key
  hint: did you mean `slots`? valid here: name, ssh, local, address, slots, cores, engine
error: pair.yaml:9: hosts[1].name: host name 'a' is used twice (first on line 6)
  hint: give every entry its own name; two entries may be one machine
error: pair.yaml:12: engine.executor: executor 'ray' is not supported: cpupp starts vLLM's own multi-node executor \
(mp); Ray would need a cluster of its own on every host
  hint: valid: mp
error: pair.yaml:13: engine.env.OMP_NUM_THREADS: must be text, not the number 4
  hint: quote it: `OMP_NUM_THREADS: "4"`
5 errors
"""


def load(tmp_path: Path, text: str | bytes) -> ClusterSpec:
    """Write a file and load it."""
    path = tmp_path / "pair.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_cluster(path)


def errors(tmp_path: Path, text: str | bytes) -> list[CpuppError]:
    """The errors of a file, with the folder cut off."""
    with pytest.raises(CpuppError) as caught:
        load(tmp_path, text)
    found = flat(caught.value)
    for error in found:
        assert error.where.startswith(f"{tmp_path}/pair.yaml")
        error.where = error.where.removeprefix(f"{tmp_path}/")
        assert error.hint
        assert error.exit_code == ExitCode.CONFIG
    return found


def only(tmp_path: Path, text: str | bytes) -> tuple[str, str, str]:
    """Code, text and hint of a file's one error."""
    (error,) = errors(tmp_path, text)
    return error.code, str(error), error.hint


def test_a_good_file(tmp_path: Path) -> None:
    spec = load(tmp_path, GOOD)
    assert [host.name for host in spec.hosts] == ["a", "b"]
    assert spec.network.master_port == "auto"
    assert spec.engine.args == {"max_model_len": 1024}


def test_five_mistakes_at_once(tmp_path: Path) -> None:
    assert error_page(errors(tmp_path, FIVE_MISTAKES), 100_000).text() == FIVE_ERRORS


def test_the_exit_code_of_several_errors_is_the_first_ones(tmp_path: Path) -> None:
    with pytest.raises(CpuppErrors) as caught:
        load(tmp_path, FIVE_MISTAKES)
    assert caught.value.exit_code == ExitCode.CONFIG


FILES = [
    (b"", "pair.yaml: is empty"),
    (b"  \n# nothing\n", "pair.yaml: a cluster file is a mapping (key: value), this is nothing"),
    (b"- a\n- b\n", "pair.yaml: a cluster file is a mapping (key: value), this is a list"),
    (b"just text\n", "pair.yaml: a cluster file is a mapping (key: value), this is the text 'just text'"),
    (b"\x7fELF\x02\x01\x00\x00", "pair.yaml: is a binary file, not a cluster file"),
    (b"name: x\nmodel: \xff\xfe\n", "pair.yaml:2: is not UTF-8 text (byte 0xff)"),
    (b"#" * (1 << 20) + b"##", "pair.yaml: is larger than 1 MiB: not a cluster file"),
    (b"name: \x07\n", "pair.yaml:1: holds the character U+0007, which YAML does not allow"),
]


@pytest.mark.parametrize(("raw", "text"), FILES)
def test_what_is_no_cluster_file(tmp_path: Path, raw: bytes, text: str) -> None:
    assert only(tmp_path, raw)[1] == text


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text(GOOD)
    with pytest.raises(CpuppError) as caught:
        load_cluster(tmp_path / "reel.yaml")
    assert str(caught.value) == f"{tmp_path}/reel.yaml: no such file"
    assert caught.value.hint == "YAML files there: real.yaml"


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CpuppError, match="is a folder, not a cluster file"):
        load_cluster(tmp_path)


def test_a_byte_order_mark_and_utf16_are_read(tmp_path: Path) -> None:
    assert load(tmp_path, b"\xef\xbb\xbf" + GOOD.encode()).name == "pair"
    assert load(tmp_path, GOOD.encode("utf-16")).name == "pair"


SYNTAX = [
    (
        "name: a\n\tmodel: x\n",
        "pair.yaml:2:1: not valid YAML: found character '\\t' that cannot start any token",
        "tabs",
    ),
    ("name: a: b\n", "pair.yaml:1:8: not valid YAML: mapping values are not allowed here", "colon too many"),
    ("name: [a, b\n", "pair.yaml:2:1: not valid YAML: expected ',' or ']', but got '<stream end>'", "not closed"),
    ("name: 'a\n", "pair.yaml:2:1: not valid YAML: found unexpected end of stream", "quote is not closed"),
    ("name: a\n---\nname: b\n", "pair.yaml:2:1: not valid YAML: but found another document", "one document"),
    ("name: *x\n", "pair.yaml:1:7: not valid YAML: found undefined alias 'x'", "define it"),
    ("name: &a [*a]\n", "pair.yaml:1:7: not valid YAML: an alias contains itself", "yaml.md"),
    ("? [a, b]\n: c\n", "pair.yaml:1:3: not valid YAML: a key must be plain text", "yaml.md"),
    ("name: !!python/none x\n", "pair.yaml:1:7: not valid YAML: could not determine a constructor", "tag"),
]


@pytest.mark.parametrize(("text", "message", "hint"), SYNTAX)
def test_yaml_syntax_has_line_and_column(tmp_path: Path, text: str, message: str, hint: str) -> None:
    code, found, advice = only(tmp_path, text)
    assert code == "CONFIG-YAML"
    assert found.startswith(message)
    assert hint in advice


def test_aliases_cannot_blow_up_a_small_file(tmp_path: Path) -> None:
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]\n" for n in range(1, 9))
    assert "aliases make the file too large" in only(tmp_path, f"l0: &l0 [x, x]\n{levels}")[1]


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    text = GOOD.replace("  - name: a\n", "  - &one\n    name: a\n").replace(
        "  - name: b\n    ssh: me@10.0.0.2\n", "  - {<<: *one, name: b}\n"
    )
    assert [(h.name, h.ssh) for h in load(tmp_path, text).hosts] == [("a", "me@10.0.0.1:22"), ("b", "me@10.0.0.1:22")]


def test_yaml_surprises_stay_text(tmp_path: Path) -> None:
    spec = load(tmp_path, GOOD.replace("engine:\n", "engine:\n  env: {A: 2026-01-02, B: 22:22}\n"))
    assert spec.engine.env == {"A": "2026-01-02", "B": "22:22"}


WAITING = [
    (
        "deadlines: {joi: 3}",
        "deadlines.joi: unknown key",
        "did you mean `join`? valid here: connect, spawn, import, join",
    ),
    ("deadlines: {import: soon}", "deadlines.import: 'soon' is no time to wait", "a number of seconds above 0"),
    ("deadlines: {import_: 3}", "deadlines.import_: unknown key", "did you mean `import`?"),
    ("deadlines: {load: 0}", "deadlines.load: 0 is no time to wait", "a number of seconds above 0"),
    ("deadlines: {load: .inf}", "deadlines.load: inf is no time to wait", "up to 10000000, without quotes"),
    ("deadlines: {load: '60'}", "deadlines.load: '60' is no time to wait", "without quotes"),
    ("deadlines: {warm_up: }", "deadlines.warm_up: nothing is no time to wait", "a number of seconds above 0"),
    (
        "deadlines: 60",
        "deadlines: must be a mapping (key: value), not the number 60",
        "valid keys: connect, spawn, import",
    ),
    ("join: 60", "join: unknown key", "did you mean `deadlines.join`?"),
    ("restart: {policy: always}", "restart.policy: policy 'always' is not supported", "valid: never, on-failure"),
    ("restart: {max: 0}", "restart.max: must be at least 1, not 0", "at least 1"),
    ("restart: {retries: 2}", "restart.retries: unknown key", "did you mean `restart.max`?"),
    ("restart: {backoff: true}", "restart.backoff: true is no time to wait", "a number of seconds"),
]


@pytest.mark.parametrize(("line", "message", "hint"), WAITING)
def test_deadlines_and_restarts(tmp_path: Path, line: str, message: str, hint: str) -> None:
    _, text, advice = only(tmp_path, f"{GOOD}{line}\n")
    assert text.startswith(f"pair.yaml:12: {message}")
    assert hint in advice


def test_times_may_be_written_without_a_point(tmp_path: Path) -> None:
    spec = load(tmp_path, GOOD + "deadlines: {import: 90, join: 0.5}\nrestart: {policy: on-failure}\n")
    assert (spec.deadlines.import_, spec.deadlines.join, spec.deadlines.spawn) == (90.0, 0.5, 60.0)
    assert (spec.restart.policy, spec.restart.max, spec.restart.backoff) == ("on-failure", 3, 5.0)


# A line of GOOD, what stands there instead, and the one error: line, message, hint.
MISTAKES = [
    ("name: pair", "nmae: pair", 1, "nmae: unknown key", "did you mean `name`?"),
    ("name: pair", "# none", 2, "name: is missing", "add it, for example `name: pair`"),
    ("name: pair", "name: my cluster", 1, "name: 'my cluster' is no name", "letters, digits"),
    ("name: pair", "name: 7", 1, "name: must be text, not the number 7", 'quote it: `name: "7"`'),
    ("name: pair", "name: pair\nname: b", 2, "name: is written twice (lines 1 and 2)", "keep one"),
    ("  path: /models/x", "  pth: /models/x", 3, "model.pth: unknown key", "did you mean `path`?"),
    ("  path: /models/x", "  path: ''", 3, "model.path: must not be empty", "write a value"),
    ("  path: /models/x", "  path: --help", 3, "model.path: '--help' would be taken as an option", "./--help"),
    (
        "parallel: {pipeline: 2}",
        "parallel: {pipeline: '2'}",
        4,
        "parallel.pipeline: must be a whole number",
        "quotes out",
    ),
    ("parallel: {pipeline: 2}", "parallel: {pipeline: 2.0}", 4, "parallel.pipeline: must be a whole number", "yaml.md"),
    (
        "parallel: {pipeline: 2}",
        "parallel: {pipeline: 0}",
        4,
        "parallel.pipeline: must be at least 1, not 0",
        "at least 1",
    ),
    ("parallel: {pipeline: 2}", "parallel: {pipeline: 2, layers: [1]}", 4, "parallel.layers: has 1 numbers", "leave"),
    (
        "parallel: {pipeline: 2}",
        "parallel: 2",
        4,
        "parallel: must be a mapping (key: value), not the number 2",
        "tensor",
    ),
    (
        "parallel: {pipeline: 2}",
        "parallel:",
        4,
        "parallel: must be a mapping (key: value), not nothing",
        "remove the line",
    ),
    (
        "parallel: {pipeline: 2}",
        "parallel: {pipeline: 3, tensor: 2}",
        4,
        "parallel: pipeline(3) * tensor(2) = 6 != slots(1 + 1 = 2)",
        "set pipeline to 1, or make the slots of all hosts sum to 6",
    ),
    (
        "parallel: {pipeline: 2}",
        "pipeline_parallel_size: 2\nparallel: {pipeline: 2}",
        4,
        "unknown key",
        "parallel.pipeline",
    ),
    ("  - name: b", "  - name: a", 8, "hosts[1].name: host name 'a' is used twice (first on line 6)", "own name"),
    ("    ssh: me@10.0.0.2", "    user: me", 9, "hosts[1].user: unknown key", "hosts[].ssh"),
    ("    ssh: me@10.0.0.2", "    slots: 1", 8, "hosts[1]: has neither `ssh` nor `local: true`", "add `ssh"),
    ("    ssh: me@10.0.0.2", "    ssh: b\n    local: true", 8, "hosts[1]: has both `ssh` and `local: true`", "keep"),
    (
        "    ssh: me@10.0.0.2",
        "    ssh: ssh me@b",
        9,
        "hosts[1].ssh: 'ssh me@b' is a command or a URL",
        "user@host:port",
    ),
    (
        "    ssh: me@10.0.0.2",
        "    ssh: me@b:port",
        9,
        "hosts[1].ssh: 'me@b:port' is no SSH target",
        "[user@]host[:port]",
    ),
    ("    ssh: me@10.0.0.2", "    ssh: b\n    address: b.lan", 10, "hosts[1].address: 'b.lan' is no IP", "not a name"),
    ("    ssh: me@10.0.0.2", "    ssh: b\n    address: '[fd00::2]'", 10, "'[fd00::2]' is no IP address", "brackets"),
    ("    ssh: me@10.0.0.2", "    ssh: b\n    address: 127.0.0.1", 10, "127.0.0.1 is loopback", "leave it out"),
    ("    ssh: me@10.0.0.2", "    ssh: b\n    cores: [1, 1]", 10, "hosts[1].cores: CPU 1 is listed twice", "once"),
    ("    ssh: me@10.0.0.2", "    ssh: b\n    cores: 0-3", 10, "must be a list, not the text '0-3'", "yaml.md"),
    (
        "    ssh: me@10.0.0.2",
        "    ssh: b\n    local: 'no'",
        10,
        "hosts[1].local: must be true or false",
        "without quotes",
    ),
    (
        "engine:",
        "engine:\n  communicator: links2",
        11,
        "communicator 'links2' is not supported",
        "links, fallback, stock",
    ),
    ("engine:", "engine:\n  max_num_seqs: 3", 11, "engine.max_num_seqs: unknown key", "go under engine.args"),
    ("engine:", "engine:\n  env: {A: true}", 11, "engine.env.A: must be text, not true", 'quote it: `A: "true"`'),
    ("engine:", "engine:\n  env: {A B: x}", 11, "engine.env['A B']: is no name of a variable", "underscores"),
    (
        "engine:",
        "engine:\n  env: {MASTER_PORT: '1'}",
        11,
        "cpupp sets this variable itself",
        "use `network.master_port`",
    ),
    ("engine:", "engine:\n  env: {PYTHONPATH: x}", 11, "cpupp sets this variable itself", "remove the line: the site"),
    ("engine:", "engine:\n  env: {VLLM_CPU_KVCACHE_SPACE: 1.5GiB}", 11, "is not a whole number of GiB", "integer"),
    (
        "  args: {max_model_len: 1024}",
        "  args: {--tensor-parallel-size: 2}",
        11,
        "engine.args.--tensor-parallel-size: cpupp sets this argument itself",
        "use `parallel.tensor`",
    ),
    ("  args: {max_model_len: 1024}", "  args: {data_parallel_size: 2}", 11, "sets this argument", "one replica"),
    ("  args: {max_model_len: 1024}", "  args: {data-parallel-rank: 2}", 11, "sets this argument", "one replica"),
    ("  args: {max_model_len: 1024}", "  args: {tensor-parallel-size: 2}", 11, "sets this", "`parallel.tensor`"),
    ("  args: {max_model_len: 1024}", "  args: {Tensor_Parallel: 2}", 11, "sets this", "`parallel.tensor`"),
    ("  args: {max_model_len: 1024}", "  args: {ssl_certfile: x}", 11, "sets this", "a proxy in front of it: remove"),
    ("  args: {max_model_len: 1024}", "  args: {max model len: 2}", 11, "is no argument name", "max_model_len"),
    ("  args: {max_model_len: 1024}", "  args: {a_b: 1, a-b: 2}", 11, "is the same argument as a_b", "keep one"),
    ("engine:", "network: {backend: ccl}\nengine:", 10, "vLLM on CPU has no oneCCL backend", "valid: auto, shm, gloo"),
    ("engine:", "network: {backend: mpi}\nengine:", 10, "PyTorch's wheels are built without MPI", "auto, shm, gloo"),
    ("engine:", "network: {interface: '^lo,docker0'}\nengine:", 10, "'^lo,docker0' is no interface name", "crash gloo"),
    ("engine:", "network: {master_port: 70000}\nengine:", 10, "network.master_port: 70000 is no port", "1 to 65535"),
    ("engine:", "network: {master_port: 8000}\nengine:", 10, "8000 is also serve.port", "auto"),
    ("engine:", "network: {master_addr: localhost}\nengine:", 10, "localhost is loopback, but there are 2", "leave"),
    ("engine:", "network: {master_addr: 127.0.1.1}\nengine:", 10, "127.0.1.1 is loopback, but there are 2", "leave"),
    ("engine:", "serve: {port: true}\nengine:", 10, "serve.port: must be a whole number, not true", "yaml.md"),
    ("engine:", "master_port: 1\nengine:", 10, "master_port: unknown key", "did you mean `network.master_port`?"),
]


@pytest.mark.parametrize(("line", "instead", "number", "message", "hint"), MISTAKES, ids=lambda v: str(v)[:40])
def test_each_mistake(tmp_path: Path, line: str, instead: str, number: int, message: str, hint: str) -> None:
    assert f"{line}\n" in GOOD
    found = errors(tmp_path, GOOD.replace(f"{line}\n", f"{instead}\n"))
    match = [e for e in found if message in e.message and hint in e.hint and e.where == f"pair.yaml:{number}"]
    assert match, [(e.where, e.message, e.hint) for e in found]
    if "ssh" not in line:
        assert len(found) == 1, [e.message for e in found]


UNREADABLE = [
    ("!!int x", "'x' is no int that can be read"),
    ("!!float x", "'x' is no float that can be read"),
    ("!!bool maybe", "'maybe' is no bool that can be read"),
    ("!!timestamp maybe", "'maybe' is no timestamp that can be read"),
    ("0x_", "'0x_' is no int that can be read"),
    ("9" * 5000, f"'{'9' * 40}' is no int that can be read"),
]


@pytest.mark.parametrize(("value", "message"), UNREADABLE, ids=lambda v: str(v)[:20])
def test_a_value_that_yaml_cannot_read_has_its_place(tmp_path: Path, value: str, message: str) -> None:
    code, text, hint = only(tmp_path, GOOD.replace("max_model_len: 1024", f"max_model_len: {value}"))
    assert (code, text) == ("CONFIG-YAML", f"pair.yaml:11:25: not valid YAML: {message}")
    assert hint == "correct the value, or quote it to have it as text"


def test_an_equals_sign_is_text(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD.replace("max_model_len: 1024", "x: =")).engine.args == {"x": "="}
    assert "merge key" in only(tmp_path, GOOD.replace("max_model_len: 1024", "x: <<"))[2]


@pytest.mark.parametrize("ssh", ["b", "me@b", "me@b:2222", "[fd00::2]:22", "me@[fd00::2]", "my-alias.lan"])
def test_ssh_targets_that_are_fine(tmp_path: Path, ssh: str) -> None:
    assert load(tmp_path, GOOD.replace("me@10.0.0.2", f"'{ssh}'")).hosts[1].ssh == ssh


def test_loopback_is_fine_where_every_host_is_here(tmp_path: Path) -> None:
    text = GOOD.replace("ssh: me@10.0.0.1:22", "local: true").replace("ssh: me@10.0.0.2", "ssh: me@127.0.0.1:2222")
    assert load(tmp_path, text + "network: {master_addr: localhost}\n").network.master_addr == "localhost"


def test_two_entries_with_one_target_are_allowed(tmp_path: Path) -> None:
    assert len(load(tmp_path, GOOD.replace("10.0.0.2", "10.0.0.1")).hosts) == 2
