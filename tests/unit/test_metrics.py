"""Metrics by name and programs as metrics: what they score, get and give, and one sentence for each failure."""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import sacrebleu

from deepspeed_nmt.cli import main
from deepspeed_nmt.config import load_config, validate
from deepspeed_nmt.errors import ConfigError, MetricError
from deepspeed_nmt.evaluate.command_metrics import CommandMetric, ScoredFiles, read_sentence_scores
from deepspeed_nmt.evaluate.metrics import METRICS, Scorer, TextMetric, in_language, warn_of_spaces
from deepspeed_nmt.text import TextForm
from deepspeed_nmt.train.configuration import ValidationConfig

RAW, TOKENISED, UNKNOWN = TextForm(form="raw"), TextForm(form="tokenised"), TextForm()
MOSES = TextForm(form="moses", source_lang="de", target_lang="en")
REFERENCES = [
    "&quot; It costs 3.50 &amp; more , &quot; said Ms. Well @-@ Known - she didn &apos;t laugh .",
    "The house ( built in 1990 ) is red , isn &apos;t it ?",
    "They are 20 % cheaper : that &apos;s good .",
    "He came , he saw , he &apos;s gone .",
]
HYPOTHESES = [
    "&quot; It costs 3.50 &amp; more , &quot; said Mrs. Well @-@ Known - she did not laugh .",
    "The house ( built in 1991 ) is red , isn &apos;t it ?",
    "They are 20 % cheaper : that is nice .",
    "He came , he saw and he &apos;s gone .",
]
PLAIN_REFERENCES = [
    '"It costs 3.50 & more," said Ms. Well-Known - she didn\'t laugh.',
    "The house (built in 1990) is red, isn't it?",
    "They are 20% cheaper: that's good.",
    "He came, he saw, he's gone.",
]
PLAIN_HYPOTHESES = [
    '"It costs 3.50 & more," said Mrs. Well-Known - she did not laugh.',
    "The house (built in 1991) is red, isn't it?",
    "They are 20% cheaper: that is nice.",
    "He came, he saw and he's gone.",
]


def chosen(text: TextForm, **settings: Any) -> tuple[list[str], str]:
    """The names of the metrics for a form of text, and the name of the measure that chooses the best checkpoint."""
    metrics, best = ValidationConfig(**settings).chosen(text)
    return [metric.name for metric in metrics], "loss" if best is None else best.name


def test_auto_takes_the_metrics_that_the_text_allows() -> None:
    assert chosen(RAW) == chosen(UNKNOWN) == (["bleu"], "bleu")
    assert chosen(MOSES) == (["bleu", "bleu_tokenised"], "bleu")
    assert chosen(TOKENISED) == (["bleu_tokenised"], "bleu_tokenised")
    assert chosen(MOSES, best_by="bleu_tokenised") == (["bleu", "bleu_tokenised"], "bleu_tokenised")
    assert chosen(RAW, best_by="chrf") == (["bleu", "chrf"], "chrf")


def test_a_metric_that_the_text_does_not_allow_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(TOKENISED, metrics=["bleu", "bleu_tokenised", "chrf"])
    first, second = caught.value.problems
    assert first.startswith("the metric bleu needs plain text, but the text is tokenised by unknown rules; set ")
    assert second.startswith("the metric chrf needs plain text")
    with pytest.raises(
        ConfigError, match="needs tokenised text, but the text is raw, and its target language is not"
    ):
        chosen(RAW, metrics=["bleu_tokenised"])


def test_bleu_has_the_tokenizer_of_the_language(caplog: pytest.LogCaptureFixture) -> None:
    chinese = ["这是一个很长的中文句子。", "他昨天去了北京。"]
    bleu = METRICS["bleu"]
    assert isinstance(bleu, TextMetric) and bleu.score(chinese, chinese) == 0.0
    for code, tokenizer in (
        *(
            ("zh", "zh"),
            ("zh-cn", "zh"),
            ("zho", "zh"),
            ("th", "char"),
            ("tha", "char"),
            ("de", "13a"),
            (None, "13a"),
        ),
    ):
        metric = in_language(bleu, code)
        assert isinstance(metric, TextMetric) and f"tok:{tokenizer}|" in metric.signature() and metric.name == "bleu"
        assert metric.score(chinese, chinese) == (0.0 if tokenizer == "13a" else pytest.approx(100.0))
    ter = in_language(METRICS["ter"], "ja")
    assert isinstance(ter, TextMetric) and ter.score([chinese[0].replace("长", "短")], chinese[:1]) < 20.0
    assert in_language(METRICS["ter"], "de") is METRICS["ter"]
    text = TextForm("raw", target_lang="zh")
    metrics, best = ValidationConfig().chosen(text)
    assert Scorer(metrics, text, chinese)(chinese) == {"bleu": pytest.approx(100.0)} and best == metrics[0]
    warn_of_spaces("references", chinese, metrics)
    warn_of_spaces("references", ["Das ist ein Satz mit 北京."], [bleu])
    warn_of_spaces("references", chinese, [ter])
    assert not caplog.messages
    warn_of_spaces("references", chinese, [METRICS["ter"]])
    assert "ter takes them for one word" in caplog.text
    caplog.clear()
    warn_of_spaces("references", chinese, [bleu])
    assert "2 of 2 lines" in caplog.text and "--language" in caplog.text


def test_bleu_of_moses_text_is_that_of_detokenised_text_and_13a_over_tokens_overstates_it() -> None:
    names = ("bleu", "bleu_tokenised", "chrf", "ter")
    scores = Scorer([METRICS[name] for name in names], MOSES, REFERENCES)(HYPOTHESES)
    expected = sacrebleu.corpus_bleu(PLAIN_HYPOTHESES, [PLAIN_REFERENCES]).score
    overstated = Scorer([METRICS["bleu"]], UNKNOWN, REFERENCES)(HYPOTHESES)["bleu"]
    assert scores["bleu"] == pytest.approx(expected, abs=1e-9)
    assert overstated == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], force=True).score, abs=1e-9)
    assert overstated - scores["bleu"] > 1.0
    multi = sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True)
    assert scores["bleu_tokenised"] == pytest.approx(multi.corpus_score(HYPOTHESES, [REFERENCES]).score, abs=1e-9)
    assert scores["chrf"] == pytest.approx(
        sacrebleu.corpus_chrf(PLAIN_HYPOTHESES, [PLAIN_REFERENCES]).score, abs=1e-9
    )
    assert scores["ter"] == pytest.approx(sacrebleu.corpus_ter(PLAIN_HYPOTHESES, [PLAIN_REFERENCES]).score, abs=1e-9)


def test_raw_text_is_tokenised_for_multi_bleu() -> None:
    raw = TextForm(form="raw", target_lang="en")
    scores = Scorer([METRICS["bleu_tokenised"], METRICS["bleu"]], raw, PLAIN_REFERENCES)(PLAIN_HYPOTHESES)
    # Without option -a the tokenizer does not split Well-Known.
    sides = [[line.replace(" @-@ ", "-") for line in side] for side in (HYPOTHESES, REFERENCES)]
    tokens = Scorer([METRICS["bleu_tokenised"]], TOKENISED, sides[1])(sides[0])
    assert scores["bleu_tokenised"] == pytest.approx(tokens["bleu_tokenised"], abs=1e-9)
    assert scores["bleu"] == pytest.approx(sacrebleu.corpus_bleu(PLAIN_HYPOTHESES, [PLAIN_REFERENCES]).score)


@pytest.fixture
def files(tmp_path: Path) -> ScoredFiles:
    """Three files of two lines, and the place for scores of sentences."""
    for name in ("hypothesis", "reference", "source"):
        (tmp_path / name).write_text(f"{name} one\n{name} two\n")
    return ScoredFiles(*(tmp_path / name for name in ("hypothesis", "reference", "source", "sentences")))


def program(path: Path, *lines: str, first: str = "#!/bin/sh") -> Path:
    path.write_text("\n".join([first, *lines]) + "\n")
    path.chmod(0o755)
    return path


def parsed(text: str) -> CommandMetric:
    metric = CommandMetric.parse(text)
    assert metric is not None
    return metric


def problem_of(*metrics: str, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        validate({"validation": {"metrics": list(metrics), **settings}})
    (problem,) = caught.value.problems
    return problem


def failure(metric: CommandMetric, files: ScoredFiles, limit_s: float = 20.0) -> str:
    with pytest.raises(MetricError) as caught:
        metric.score(files, limit_s)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "name", "path", "late", "higher"),
    [
        ("command:/opt/comet.sh", "comet", "/opt/comet.sh", False, True),
        ("mqm=command:/opt/a=b:c.sh:lower", "mqm", "/opt/a=b:c.sh", False, False),
        ("command:/opt/metric x:lower", "y", "/opt/metric x", False, False),
    ],
)
def test_settings_name_a_program(text: str, name: str, path: str, late: bool, higher: bool) -> None:
    metric = parsed(text if name != "y" else f"y={text}")
    assert (metric.name, str(metric.path), metric.late, metric.higher_is_better) == (name, path, late, higher)
    assert CommandMetric.parse(str(metric)) == metric
    assert CommandMetric.parse("bleu") is None and CommandMetric.parse("command:") is None


def test_names_of_programs_are_those_of_no_other_measure() -> None:
    for text in ("command:/x/bleu.sh", "loss=late:/x/y", "command:/x/mean.py"):
        assert f"{text}', whose name is that of another measure" in problem_of(text)
    assert "'command:/x/a' and 'late:/y/a.py', which are both a; put" in problem_of("command:/x/a", "late:/y/a.py")
    assert "is 'b'" in problem_of("command:/x/a", best_by="b")


def test_a_program_chooses_and_its_path_becomes_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["validation.metrics=[bleu,command:a.sh:lower]", "validation.best_by=mean/a", "validation.sets.n=x"]
    config = load_config(settings=settings).resolved().validation
    assert config.metrics == ("bleu", f"a=command:{tmp_path}/a.sh:lower")
    assert not config.is_higher_better("a") and not config.is_higher_better("n/a")
    assert config.is_higher_better("mean/bleu") and not config.is_higher_better("ter")
    assert config.value_of("valid/bleu of ab", -1.5) == -1.5 and config.value_of("valid/mean/ter", -1.5) == 1.5
    assert config.value_of("valid/loss", -1.5) == 1.5 and config.value_of(None, -1.5) == 1.5
    for form, kind in (("raw", "plain"), ("tokenised", "tokenised")):
        metrics, best = ValidationConfig(metrics=("a=command:/a",), best_by="auto").chosen(TextForm(form))
        assert best is not None and metrics == (best,) and (best.name, best.kind) == ("a", kind)


def test_a_program_gets_three_files_and_no_place_among_ranks(
    tmp_path: Path, files: ScoredFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURM_NTASKS", "DEEPSPEED_NMT_STATUS"):
        monkeypatch.setenv(name, "1")
    path = program(
        tmp_path / "my metric.sh",
        'head -n 1 "$1" "$2" "$3" >&2',
        '[ -z "$RANK$WORLD_SIZE$MASTER_ADDR$SLURM_NTASKS$DEEPSPEED_NMT_STATUS" ] || exit 1',
        '[ "$#" = 3 ] || exit 2',
        'printf "0.25\\n 1e0 \\n" > "$DEEPSPEED_NMT_SENTENCES"',
        "echo loading 7; echo -2.5; echo; echo ' '",
    )
    assert parsed(f"a=command:{path}").score(files, 20.0) == -2.5
    assert files.sentences is not None
    assert read_sentence_scores(files.sentences, 2) == [0.25, 1.0]
    assert read_sentence_scores(files.sentences, 3) is None and read_sentence_scores(tmp_path / "none", 0) is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["echo 3; echo bad input >&2; exit 4"], "ended with status 4: 'bad input'"),
        (["kill -SEGV $$"], "was killed by SIGSEGV"),
        (["echo 3; echo done"], "is 'done', and not a finite number"),
        (["echo nan"], "is 'nan', and not a finite number"),
    ],
)
def test_each_failure_is_a_sentence(lines: list[str], message: str, tmp_path: Path, files: ScoredFiles) -> None:
    path = program(tmp_path / "m.sh", *lines)
    said = failure(parsed(f"command:{path}"), files)
    assert said.endswith(f"the metric m, {message}") and str(path) in said and "\n" not in said


def test_without_a_temporary_file_a_metric_is_not_known(
    tmp_path: Path, files: ScoredFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    said = failure(parsed(f"command:{program(tmp_path / 'm.sh', 'echo 1')}"), files)
    assert "the metric m, has no temporary file: [Errno 2] No such file or directory" in said


def test_a_program_that_takes_too_long_is_ended_with_its_children(tmp_path: Path, files: ScoredFiles) -> None:
    path = program(tmp_path / "m.sh", f'sleep 60 & echo "$!" > "{tmp_path}/child"; wait; echo 1')
    said = failure(parsed(f"command:{path}"), files, limit_s=0.5)
    assert f"{path}, the metric m, took more than 0.5 s" in said
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    deadline = time.monotonic() + 20
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(MetricError, match="was ended, because the run stops"):
        parsed(f"command:{path}").score(files, 60.0, lambda: True)


def test_a_file_that_is_no_program_is_refused(tmp_path: Path, files: ScoredFiles) -> None:
    plain = tmp_path / "plain.sh"
    plain.write_text("#!/bin/sh\necho 1\n")
    assert parsed(f"command:{plain}").problem.endswith(f"is not executable; run `chmod +x {plain}`")
    assert parsed(f"a=command:{tmp_path}").problem.startswith(f"{tmp_path}, the metric a, is not a file")
    assert "does not exist; correct" in parsed("command:/none/a").problem
    other = program(tmp_path / "other.sh", "echo 1", first="#!/none/sh")
    assert not parsed(f"command:{other}").problem
    assert "cannot be started (No such file or directory); does its first line" in failure(
        parsed(f"command:{other}"), files
    )


def test_a_late_program_is_not_waited_for_and_writes_its_number(tmp_path: Path, files: ScoredFiles) -> None:
    path = program(tmp_path / "m.sh", f'while ! [ -e "{tmp_path}/go" ]; do sleep 0.02; done; echo 0.5 > "$4"; echo 7')
    metric, result = parsed(f"late:{path}"), tmp_path / "result"
    process = metric.start(files, result, tmp_path / "log")
    assert process.poll() is None and metric.read(result) is None
    result.write_text("")
    assert metric.read(result) is None, "it may be written by now"
    (tmp_path / "go").touch()
    assert process.wait(20) == 0 and metric.read(result) == 0.5
    assert (tmp_path / "log").read_text() == "7\n"
    assert os.getsid(os.getpid()) != process.pid
    result.write_text("loading\n")
    with pytest.raises(MetricError, match=r"result, of the metric m, is 'loading'"):
        metric.read(result)


def test_score_prints_the_chosen_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hyp").write_bytes(b"a b c d e\nf\rg\n")  # of two lines, also for Python's open()
    (tmp_path / "ref").write_text("a b c d e\nf h\n")
    path = program(tmp_path / "words.sh", 'cat "$1" "$3" | wc -w')
    lines = program(
        tmp_path / "lines.py", "import sys", "print(len(open(sys.argv[1]).readlines()))", first=f"#!{sys.executable}"
    )
    command = ["score", "--hypothesis", str(tmp_path / "hyp"), "--reference", str(tmp_path / "ref"), "--metrics"]
    source = ["--source", str(tmp_path / "ref")]
    assert main([*command, "ter", f"command:{path}", *source]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "ter = 14.29" and said[1].startswith("  nrefs:1|case:lc|") and said[2] == "words = 14.0000"
    assert said[3].startswith(f"  command:{path}|sha256:") and len(said) == 5, "and copies of the source"
    assert main([*command, f"command:{lines}", *source]) == 0 and "lines = 2.0000" in capsys.readouterr().out
    assert main([*command, f"command:{path}"]) == 2
    assert "the metric words needs --source and one --reference" in capsys.readouterr().err
    program(path, "exit 1")
    assert main([*command, f"command:{path}", *source]) == 2
    assert f"{path}, the metric words, ended with status 1" in capsys.readouterr().err
