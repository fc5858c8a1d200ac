"""Every wrong command ends with one line that names the key, the value and what is valid; exit 2; nothing is written."""

import os
from pathlib import Path

import pytest
import yaml

from tests.cli.command import refused, run

#: command line → what its message must say
CASES: dict[str, tuple[str, ...]] = {
    # names
    "micro_batc=3": ("micro_batc=3", "is not a key", "did you mean micro_batch?"),
    "foo=1": ("foo=1", "is not a key", "--help"),
    "+foo=1": ("foo=1", "is not a key"),
    "modell=debug": ("modell=debug", "did you mean model?"),
    "modell.dim=3": ("modell.dim=3", "did you mean model.dim?"),
    "model.dimm=3": ("model.dimm=3", "did you mean model.dim?", "model.head_dim"),
    "model=dense_1bb": ("model=dense_1bb", "did you mean dense_1b?", "debug"),
    "reduction=zero2,zero9": ("reduction=zero9", "is not an option", "did you mean zero2?", "fsdp"),
    "compile=on": ("compile=on", "is not an option", "layer, none"),
    "compile.kernels=adam": (
        "compile.kernels=adam",
        "must be auto, inductor, fused, or some of",
        "did you mean adamw?",
    ),
    "compile.kernels=[adamw]": ("compile.kernels=[adamw]",),
    "compile.kernels=loss+loss": ("compile.kernels=loss+loss", "each once"),
    "model=../secret": ("model=../secret", "is not an option"),
    "sweeps=nope": ("sweeps=nope", "is not an option", "dp2_reductions"),
    "recipe=nope": ("recipe=nope", "is not an option", "dense_1b_h200"),
    "model=glob(x*)": ("model=glob(x*)", "has no values"),
    "model/dim=3": ("model/dim=3", "model.dim=3"),
    "data/path=x": ("data/path=x", "data.path=x"),
    "schema=train": ("schema=train", "is not a key"),
    "micro_batch": ("micro_batch", "micro_batch=…"),
    "=3": ("=3", "is not key=value"),
    "env.=3": ("env.=3", "is not key=value"),
    "+micro_batch=4": ("micro_batch", "write micro_batch=4"),
    "~micro_batch": ("~micro_batch", "can't be removed"),
    # numbers
    "micro_batch=0": ("micro_batch=0", "an integer between 1 and"),
    "micro_batch=-1": ("micro_batch=-1", "an integer between 1 and"),
    "micro_batch=99999999999": ("micro_batch=99999999999", "1048576"),
    "micro_batch=1e30": ("micro_batch=1e30", "an integer"),
    "micro_batch=1.5": ("micro_batch=1.5", "an integer"),
    "micro_batch=four": ("micro_batch=four", "an integer"),
    "micro_batch=true": ("micro_batch=true", "an integer"),
    "micro_batch=null": ("micro_batch=null", "an integer"),
    "micro_batch=": ("micro_batch=:", "an integer"),
    "micro_batch=[4,8]": ("micro_batch=[4,8]", "an integer"),
    "micro_batch={a:1}": ("micro_batch={a:1}", "an integer"),
    "micro_batch=4&8": ("micro_batch=4&8", "an integer"),
    "micro_batch=[4": ("micro_batch=[4", "an integer"),
    "micro_batch=1,,2": ("micro_batch=1,,2", "an integer"),
    "seed=-1": ("seed=-1", "an integer between 0 and"),
    "optim.lr=nan": ("optim.lr=nan", "a number between 0 and 1000"),
    "optim.lr=inf": ("optim.lr=inf", "a number between 0 and 1000"),
    "optim.lr=fast": ("optim.lr=fast", "a number between 0 and 1000"),
    "optim.beta2=1": ("optim.beta2=1.0", "a number between 0 and"),
    "model.rope_scaling=null": ("model.rope_scaling=null", "a mapping of factor, low_freq_factor"),
    "model.rope_scaling={facto:8}": ("model.rope_scaling.facto", "did you mean model.rope_scaling.factor?"),
    "model.rope_scaling.factor=0.5": ("model.rope_scaling.factor=0.5", "a number between 1 and"),
    "model.rope_scaling.high_freq_factor=1": (
        "high_freq_factor=1.0",
        "must be above model.rope_scaling.low_freq_factor=1",
    ),
    "model.dim=null": ("model.dim=null", "an integer between"),
    "model.tied=maybe": ("model.tied=maybe", "true or false"),
    "timeout=0": ("timeout=0", "between 0.1 and", "or null"),
    "nproc=0": ("nproc=0", "an integer between 1 and"),
    "parallelism.dp_shard=0": ("parallelism.dp_shard=0", "a degree between 1 and", "or auto (-1)"),
    "parallelism.pp_split=[2,a]": ("parallelism.pp_split=[2,a]", "a list of integers or null"),
    "parallelism.tp=2.5": ("parallelism.tp=2.5", "an integer or auto"),
    "parallelism.tp=some": ("parallelism.tp=some", "a degree between 1 and", "or auto (-1)"),
    "parallelism.tp=3 nproc=3 reduction=fsdp": ("parallelism.tp=3", "must divide model.heads=4 (valid: 1, 2)"),
    "parallelism.tp=2 reduction=zero2": ("parallelism.tp=2", "zero2 goes with cp only"),
    "parallelism.tp=2 reduction=fsdp seq_len=33": ("seq_len=33", "a multiple of cp x tp = 2 (nearest: 32, 34)"),
    "parallelism.tp=auto parallelism.cp=auto": ("parallelism.tp=-1", "give all but one of pp, cp and tp"),
    "parallelism.ep=2": ("parallelism.ep=2", "model=debug has no experts"),
    "reduction=fsdp reduction.reshard_after_forward=3 nproc=4": ("reshard_after_forward=3", "(valid: 2)"),
    "reduction=fsdp reduction.reshard_after_forward=some": ("reshard_after_forward=some", "true or false, an integer"),
    "reduction.transport=nccl": ("reduction.transport=nccl", "collective or peer"),
    "reduction=zero2rs reduction.transport=peer": (
        "reduction.transport=peer",
        "here reduction=zero2rs; set it to collective",
    ),
    "reduction.transport=peer nproc=2": ("reduction.transport=peer", "device=cpu; set it to collective"),
    "micro_batch=4,8,0 reduction=zero2,ddp": ("micro_batch=0", "an integer between 1 and"),
    "micro_batch=range(1,9,0)": ("micro_batch=range(1,9,0)", "must not be zero"),
    "micro_batch=range(4,2)": ("micro_batch=range(4,2)", "has no values"),
    "micro_batch=interval(1,4)": ("micro_batch=interval(1,4)", "a,b,c"),
    # words, mappings, lists
    "env.WORLD_SIZE=3": ("env.WORLD_SIZE=3", "is set for each rank by the launcher"),
    "device=gpu": ("device=gpu", "auto, cuda, cpu"),
    "code=old": ("code=old", "new"),
    "model=[debug,dense_1b]": ("model=[debug,dense_1b]", "the name of an option"),
    "model={name:x}": ("model={name:x}", "the name of an option"),
    "memory=none,null": ("memory=none,null", "the name of an option"),
    "optim=null": ("optim=null", "the name of an option"),
    "model.name={a:1}": ("model.name={a:1}", "text"),
    "env=3": ("env=3", "a mapping"),
    "env.A={b:c}": ("env.A={b:c}", "text"),
    "env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments": ("env.PYTORCH_CUDA_ALLOC_CONF=", "expandable_segments:True"),
    "micro_batch=4 micro_batch=8": ("micro_batch=8", "twice", "micro_batch=4,8"),
    "name=a name=b": ("name=b", "twice"),
    "launch=local,local": ("launch=local,local", "can't be swept"),
    "repeats=2,3": ("repeats=2,3", "can't be swept"),
    "hydra/launcher=joblib": ("hydra/launcher=joblib", "launch="),
    "hydra.mode=RUN": ("hydra.mode=RUN", "launch="),
    "hydra.sweep.dir=x": ("hydra.sweep.dir=x", "out="),
    # interpolation
    "micro_batch=${nothing}": ("micro_batch=${nothing}", "nothing"),
    "micro_batch=${nope:1}": ("micro_batch=${nope:1}", "nope"),
    "micro_batch=${seq_len": ("micro_batch=${seq_len", "an integer"),
    "seq_len=${oc.env:NOT_SET_ANYWHERE}": ("seq_len=${oc.env:NOT_SET_ANYWHERE}", "NOT_SET_ANYWHERE"),
    # names and places
    "name=": ("name=", "a folder name"),
    "name=a/b": ("name=a/b", "a folder name"),
    "name=..": ("name=..", "a folder name"),
    f"name={'x' * 300}": ("name=xxx", "at most 200 bytes"),
    "out=": ("out=", "a folder"),
    "data.path=not/there": ("data.path=not/there", "is not there", "a UTF-8 file, a folder or a glob"),
    "data.path=*.none": ("data.path=*.none", "matches no file"),
    "data.path=": ("data.path=", "a UTF-8 file"),
    "data.path=/dev/null": ("data.path=/dev/null", "neither a file nor a folder"),
    "data.tokenizer=not/there.json": ("data.tokenizer=not/there.json", "No such file"),
    # flags
    "--nope": ("--nope", "is not a flag", "--multirun"),
    "--multi": ("--multi", "did you mean --multirun?"),
    "-x": ("-x", "is not a flag"),
    "--cfg": ("--cfg", "expected one argument"),
    "--cfg nope": ("--cfg", "nope", "job"),
    "--config-dir not/there": ("--config-dir=not/there", "is not a folder"),
    "--config-name nope": ("nope", "Cannot find primary config"),
    "--experimental-rerun x": ("--experimental-rerun", "name="),
}


#: one of each way to an error, for `make test`; all of them take a process each, and run in `make test-all`
QUICK = (
    "micro_batc=3", "+foo=1", "model.dimm=3", "model=dense_1bb", "reduction=zero2,zero9", "model=../secret", "sweeps=nope",
    "model/dim=3", "schema=train", "=3", "~micro_batch", "micro_batch=0", "micro_batch=four", "micro_batch=[4", "optim.lr=nan",
    "parallelism.dp_shard=0", "micro_batch=range(4,2)", "device=gpu", "model={name:x}", "name=a name=b", "repeats=2,3",
    "hydra.mode=RUN", "micro_batch=${nope:1}", "name=a/b", "data.path=not/there", "--nope", "--cfg nope",
    "--experimental-rerun x",
)  # fmt: skip


@pytest.mark.parametrize(
    "line", [line if line in QUICK else pytest.param(line, marks=pytest.mark.slow) for line in CASES],
    ids=[line[:40] for line in CASES],
)  # fmt: skip
def test_refused_in_one_line(tmp_path: Path, line: str) -> None:
    refused(line.split(" "), tmp_path, *CASES[line])


def test_there_are_enough_kinds() -> None:
    assert len(CASES) >= 40 and set(QUICK) <= set(CASES)


#: what only shows once this machine has been looked at, or when all is put together
LATE: dict[str, tuple[str, ...]] = {
    "nproc=1000": ("nproc=1000", "at most"),
    "model.heads=3": ("model.kv_heads=2", "must divide model.heads=3"),
    "reduction=fsdp parallelism.cp=2 model.heads=5 model.kv_heads=5": ("parallelism.cp=2", "valid: 1, 5", "ring"),
    "global_batch=7,9,11": ("global_batch=7", "multiple of micro_batch", "8"),
}


@pytest.mark.parametrize("line", LATE)
def test_refused_after_the_probe(tmp_path: Path, line: str) -> None:
    refused(line.split(" "), tmp_path, *LATE[line])


def test_not_utf8(tmp_path: Path) -> None:
    refused(["name=\udcff\udcfe"], tmp_path, "name=", "is not text")


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused(["out=file"], tmp_path, "out=file", "can't be written")
    refused(["out=file/below"], tmp_path, "out=file/below", "can't be written")


def test_data_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "circle").mkdir()
    (tmp_path / "circle" / "again").symlink_to("../circle")
    (tmp_path / "nothing.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    for path, words in {
        "empty": "no file in it",
        "loop": "symlink loop",
        "circle": "symlink loop",
        "nothing.txt": "empty file",
        "latin.txt": "not UTF-8",
    }.items():
        refused([f"data.path={path}"], tmp_path, f"data.path={path}", words)
    refused(["data.tokenizer=latin.txt"], tmp_path, "data.tokenizer=latin.txt", "not a tokenizer.json")


def test_data_without_permission(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("text")
    secret.chmod(0)
    # root reads everything, unless it gives up that capability
    prefix = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all") if os.getuid() == 0 else ()
    refused(["data.path=secret.txt"], tmp_path, "data.path=secret.txt", "Permission denied", prefix=prefix)


def test_one_bad_value_among_good_ones_writes_nothing(tmp_path: Path) -> None:
    refused(["-m", "reduction=zero2,ddp", "micro_batch=2,4,-8", "name=x"], tmp_path, "micro_batch=-8")


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("model/mine.yaml", "name: mine\ndim: wide\n", ("model/mine.yaml", "dim", "an integer")),
        (
            "model/mine.yaml",
            "name: mine\ndimm: 3\n",
            ("model/mine.yaml", "dimm", "is not a key", "did you mean model.dim?"),
        ),
        ("model/mine.yaml", "name: [\n", ("mine.yaml", "line", "is not YAML")),
        ("model/mine.yaml", "name: mine\n", ("model.dim", "has no value")),
        ("model/mine.yaml", "- a\n- b\n", ("model/mine.yaml",)),
        ("model/mine.yaml", "defaults: [nope]\n", ("nope",)),
    ],
)
def test_own_option_that_is_wrong(tmp_path: Path, file: str, text: str, words: tuple[str, ...]) -> None:
    path = tmp_path / "own" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    refused(["--config-dir=own", "model=mine"], tmp_path, *words)


def named(folder: Path, sweeper: str) -> list[str]:
    """Arguments for a named grid of one's own."""
    path = folder / "own" / "sweeps" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(f"# @package _global_\nhydra: {{sweeper: {sweeper}}}\n")
    return ["--config-dir=own", "sweeps=mine"]


@pytest.mark.parametrize("sweeper", ["{grids: [5]}", "{params: 5}"])
def test_a_grid_that_is_none(tmp_path: Path, sweeper: str) -> None:
    refused(named(tmp_path, sweeper), tmp_path, "hydra.sweeper.grids=5", "must list mappings of keys to values")


def test_an_interpolation_in_a_grid_is_each_points(tmp_path: Path) -> None:
    grid = '{device: cpu, micro_batch: "2,4", env.A: "${micro_batch}"}'
    done = run([*named(tmp_path, f"{{grids: [{grid}]}}"), "name=x", "steps=1", "seq_len=8", "model.dim=8"], tmp_path)
    assert done.code == 0, done.out + done.err
    found = [yaml.safe_load(f.read_text()) for f in (tmp_path / "outputs" / "x").glob("*/config.yaml")]
    assert sorted((c["micro_batch"], c["env"]["A"]) for c in found) == [(2, "2"), (4, "4")]


def test_a_plan_of_a_named_sweep_knows_what_is_done(tmp_path: Path) -> None:
    args = ["name=x", "device=cpu", "steps=1", "seq_len=8", "model.dim=8"]
    done = run(["global_batch=8,7", *args], tmp_path)
    assert done.code == 0 and "x: 2 points, 1 invalid" in done.out, done.out + done.err
    plan = run(["global_batch=8,7,16", *args, "plan=true"], tmp_path)
    assert [line.split()[0] for line in plan.out.splitlines()[:3]] == ["ok", "invalid", "pending"], plan.out


def test_impossible_points_are_listed_and_the_rest_counts(tmp_path: Path) -> None:
    done = run(["global_batch=8,7", "plan=true"], tmp_path)
    assert done.code == 0
    assert "pending" in done.out and "invalid" in done.out and "multiple of micro_batch" in done.out
    assert "nothing was written" in done.out and not list(tmp_path.iterdir())
