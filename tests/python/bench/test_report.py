"""What follows from a report: ratios, means, tables, comparison, figures. All on made-up times."""

from __future__ import annotations

import builtins
import json
import sys

import pytest

from bench import made_up
from hopper_attention.bench import compare, goals, plots, record, suites, table


def reached(report, entry):
    return [verdict.reached for verdict in goals.of_case(report, entry) if verdict.judged]


def grid(expression: str) -> suites.Case:
    (case,) = suites.select("prefill", expression)
    return case


FA3_BEST = grid("head_dim == 128 and not causal and seqlen_q == 512")
CUDNN_BEST = grid("head_dim == 128 and causal and seqlen_q == 512")


def test_rates():
    case = grid("head_dim == 128 and not causal and seqlen_q == 16384")
    entry = made_up.entry(case, ours=4000.0, fa3=5000.0)
    assert record.rate(entry) == pytest.approx(4 * 16384**2 * 128 * 16 / 4000 / 1e6)
    assert record.speedup(entry, "fa3") == 1.25
    assert record.speedup(entry, "cudnn") is None
    (case,) = suites.select("decode", "name == 'b64 4k, 32/8, d128'")
    entry = made_up.entry(case, ours=250.0)
    assert record.rate(entry) == pytest.approx(4295, abs=1)
    report = made_up.report([entry])
    assert record.fraction(report, entry) == pytest.approx(4295 / 4400, rel=1e-3)
    assert record.over_floor(report, entry) == pytest.approx(250 - 244, abs=0.1)


def test_best_known_is_fa3_scaled():
    entry = made_up.entry(FA3_BEST, ours=100.0, fa3=137.3, cudnn=50.0)
    assert record.best_known_us(entry) == pytest.approx(100.0)  # 1.373, and cuDNN is not the best there
    assert record.over_best(entry) == pytest.approx(1.0)


@pytest.mark.parametrize(("cudnn", "expected"), [(90.0, 90.0), (110.0, 100.0)])
def test_best_known_is_cudnns_own_time_where_it_is_the_best_and_faster(cudnn, expected):
    entry = made_up.entry(CUDNN_BEST, ours=100.0, fa3=132.9, cudnn=cudnn)
    assert record.best_known_us(entry) == pytest.approx(expected)


def test_best_known_needs_fa3_and_the_grid():
    assert record.best_known_us(made_up.entry(FA3_BEST, ours=1.0, cudnn=1.0)) is None
    assert record.best_known_us(made_up.entry(suites.engine()[0], ours=1.0, fa3=1.0)) is None
    packed = suites.varlen()[0]
    assert packed.name == suites.prefill()[0].name, "the same sizes, through another call"
    assert record.best_known_us(made_up.entry(packed, ours=1.0, fa3=1.0)) is None


def test_a_wrong_answer_has_no_time():
    entry = made_up.entry(FA3_BEST, ours=1.0, fa3=100.0)
    entry["results"]["ours"]["check"]["passed"] = False
    assert record.time_us(entry) is None and record.rate(entry) is None
    assert record.speedup(entry, "fa3") is None and record.over_best(entry) is None
    entry = made_up.entry(FA3_BEST, ours=100.0, fa3=1.0)
    entry["results"]["fa3"]["check"]["passed"] = False
    assert record.speedup(entry, "fa3") is None and record.peers_of([entry]) == []


def test_geometric_mean():
    assert record.geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert record.geometric_mean([]) is None


def test_the_table_of_a_suite():
    entries = [made_up.entry(FA3_BEST, ours=100.0, fa3=120.0), made_up.entry(CUDNN_BEST, ours=100.0, fa3=80.0)]
    found = table.suite_table(made_up.report(entries), "prefill", entries)
    assert found.columns[:6] == ["case", "us", "TFLOP/s", "of matmul", "x fa3", "x best"]
    assert found.rows[0][:2] == ["d128 full 512", "100.0"] and found.rows[0][4] == "1.20"
    assert found.rows[0][5] == f"{1.2 / 1.373:.2f}"
    text = "\n".join(found.notes)
    assert "x fa3: geometric mean 0.980 over 2 cases, least 0.800 (d128 causal 512)" in text
    assert "x best known, 512 and 1k" in text


def test_cases_without_a_figure_say_why():
    skipped = made_up.entry(FA3_BEST)
    skipped.update(status="skipped", reason="head_dim: no kernel")
    wrong = made_up.entry(CUDNN_BEST, fa3=100.0)
    wrong.update(status="wrong", reason="elementwise 9 > 2.5")
    found = table.suite_table(made_up.report([]), "prefill", [skipped, wrong])
    assert [row[-1] for row in found.rows] == ["skipped: head_dim: no kernel", "wrong: elementwise 9 > 2.5"]
    assert all(row[1] == "-" for row in found.rows)
    assert "2 of 2 cases without a figure of ours" in found.notes
    assert table.one_line(skipped).endswith("d128 full 512: skipped: head_dim: no kernel")


def test_goals_and_peers_that_ran_nowhere():
    case = suites.engine()[0]
    assert case.goal == 1.06
    entries = [made_up.entry(case, ours=100.0, fa3=106.1), made_up.entry(case, ours=100.0, fa3=105.9)]
    for entry in entries:
        entry["left_out"] = {"flash": "no kernel", "ours, dense": "for varlen cases"}
    notes = table.suite_table(made_up.report(entries), "engine", entries).notes
    assert "goals reached: 1 of 2" in notes and "flash nowhere: no kernel" in notes
    assert not any("ours, dense" in note for note in notes)


def test_scaling_is_time_for_each_pair_over_16k():
    entries = [made_up.entry(case, ours=case.flops() * 1e-9) for case in suites.scaling()]
    entries[0]["results"]["ours"]["us"] *= 1.1
    entries[3]["results"]["ours"]["us"] *= 1.04
    assert [v.found for v in goals.of_scaling(entries)] == pytest.approx([1.1, 1.0, 1.04, 1.0])
    notes = table.suite_table(made_up.report(entries), "scaling", entries).notes
    assert "b1 4k, 16 heads, d128: time for each visible pair, over 16k 1.1 (at most 1.12)" in notes
    assert "goals reached: 3 of 4" in notes
    assert "not reached: b1 64k, 16 heads, d128: time for each visible pair, over 16k 1.04 (at most 1.03)" in notes


def test_plain_text_keeps_columns_in_line(capsys, monkeypatch):
    table.show(made_up.full())
    text = capsys.readouterr().out
    assert "bf16 matmul 800 TFLOP/s, read 4400 GB/s, copy 4200 GB/s" in text
    for suite in suites.SUITES:
        assert f"{suite}: our speed" in text
    lines = text.split("prefill: our speed")[1].splitlines()[1:38]
    column = lines[0].index("TFLOP/s") + len("TFLOP/s")
    assert all(line[column - 1].isdigit() and line[column] == " " for line in lines[1:])


def test_a_terminal_without_rich_gets_plain_text(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    real = builtins.__import__

    def without_rich(name, *args, **given):
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *args, **given)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    table.show(made_up.full())
    assert "d256 causal 16k" in capsys.readouterr().out


def test_rich_prints_the_same_cells(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "250")
    report = made_up.full()
    report["cases"][0]["results"]["ours"]["note"] = "[a note]"
    assert table.print_rich(table.head(report), table.tables(report))
    text = capsys.readouterr().out
    assert "d256 causal 16k" in text and "x best known" in text and "[a note]" in text


def test_comparison_is_relative_to_fa3():
    """The card is 10 % slower in the new run; ours gained 10 % on FA3."""
    old = made_up.report([made_up.entry(FA3_BEST, ours=100.0, fa3=100.0), made_up.entry(CUDNN_BEST, ours=100.0)])
    new = made_up.report(
        [made_up.entry(FA3_BEST, ours=100.0, fa3=110.0), made_up.entry(CUDNN_BEST, ours=80.0, fa3=100.0)]
    )
    new["cases"].append(made_up.entry(suites.engine()[0], ours=1.0))
    found = compare.compare(old, new)
    assert [row[-2:] for row in found.rows] == [["+10.0 %", "fa3"], ["+25.0 %", "-"]]
    assert "relative to FA3: geometric mean +10.0 % over 1 cases" in found.notes
    assert "by time alone: geometric mean +25.0 % over 1 cases" in found.notes


def test_comparison_with_nothing_in_common():
    found = compare.compare(made_up.report([]), made_up.full())
    assert found.rows == [] and found.notes == ["the two reports have no case in common"]


def test_a_report_survives_its_file(tmp_path):
    report = made_up.full()
    (tmp_path / "r.json").write_text(json.dumps(report))
    loaded = record.load(str(tmp_path / "r.json"))
    assert [table.plain(t) for t in table.tables(loaded)] == [table.plain(t) for t in table.tables(report)]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 0, "cases": []}'])
def test_other_files_are_no_reports(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match="r.json"):
        record.load(str(tmp_path / "r.json"))


def test_figures(tmp_path):
    pytest.importorskip("matplotlib")
    report = made_up.full()
    report["cases"][0]["results"] = {}
    found = plots.draw(report, str(tmp_path / "figures"))
    assert [path.rsplit("/", 1)[1] for path in found] == ["prefill.png", "decode.png"]
    for path in found:
        with open(path, "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"
    assert plots.draw(made_up.report([]), str(tmp_path)) == []


def test_every_batch_and_head_ratio_has_a_line_or_a_point():
    entries = [made_up.entry(case, ours=1.0) for case in suites.decode()]
    lines = plots.decode_lines(entries)
    plain = [c for c in suites.decode() if c.page_size == 16 and c.seqlen_q == 1 and not c.lengths and c.window[0] < 0]
    assert set(lines) == {(case.head_dim, case.heads_q, case.heads_k, case.batch) for case in plain}
    assert sum(map(len, lines.values())) == len(plain) and min(map(len, lines.values())) == 1


def test_decode_goals_and_best_known():
    case = next(c for c in suites.decode() if c.name == "b1 8k, 8/1, d128")
    entry = made_up.entry(case, ours=8.0, fa3=28.4)  # best is FlashInfer's 11.1 where FA3 takes 14.2
    assert record.best_known_us(entry) == pytest.approx(22.2) and record.over_best(entry) == pytest.approx(22.2 / 8)
    slow = made_up.entry(case, ours=9.0, fa3=10.0)
    report = made_up.report([entry, slow])
    assert reached(report, entry) == [True, True]
    assert reached(report, slow) == [False, False]
    (found,) = table.tables(report)
    assert "goal x best" in found.columns and "goal us" in found.columns
    notes = "\n".join(found.notes)
    assert "goals reached: 2 of 4" in notes and "short contexts and few heads" in notes


def test_goals_of_the_read_rate():
    case = next(c for c in suites.decode() if c.name == "b32 8k, 32/8, d128, contiguous")
    report = made_up.report([])
    at_rate = case.kv_bytes() / report["ceilings"]["read_gbs"] / 1e3
    assert reached(report, made_up.entry(case, ours=at_rate / 0.985)) == [True]
    assert reached(report, made_up.entry(case, ours=at_rate / 0.97)) == [False]


def test_goals_of_us_over_the_floor():
    case = next(c for c in suites.decode() if c.name == "b64 8k, 8/1, d128")
    report = made_up.report([])
    floor = case.kv_bytes() / report["ceilings"]["read_gbs"] / 1e3
    report["cases"] = [made_up.entry(case, ours=floor + over) for over in (4.9, 5.1)]
    assert [reached(report, entry) for entry in report["cases"]] == [[True], [False]]
    (found,) = table.tables(report)
    # batch_invariant and the mean of short contexts were not measured
    assert found.columns[2:5] == ["GB/s", "of read", "us over floor"]
    assert "goal us over floor" in found.columns and "goals reached: 1 of 2, 5 not judged" in found.notes


def test_goals_of_means_need_all_of_their_cases():
    def judged(entries):
        found = goals.of_suite(made_up.report([]), "prefill", entries)
        return {v.what: v for v in found if "mean" in v.what and v.judged}

    entries = [made_up.entry(case, ours=100.0, fa3=100.0) for case in suites.prefill()]
    for entry in entries:
        entry["results"]["fa3"]["us"] = record.over_best(entry) ** -1 * 102.0  # 1.02 of the best everywhere
    found = judged(entries)
    assert {what: (v.bound, v.reached) for what, v in found.items()} == {
        "x best known: geometric mean": (1.0, True),
        "x best known, 512 and 1k: geometric mean": (1.05, False),
    }
    assert judged(entries[:-1]).keys() == {"x best known, 512 and 1k: geometric mean"}
    assert judged(entries[1:]) == {}
    notes = table.suite_table(made_up.report(entries), "prefill", entries).notes
    assert "goals reached: 37 of 38" in notes
    assert any(note.startswith("x best known, 512 and 1k: geometric mean 1.020 (goal 1.05)") for note in notes)


@pytest.mark.parametrize(("dense", "given", "made", "expected"), [(100, 101, 105, [1, 1]), (100, 103, 107, [0, 0])])
def test_goals_on_two_times_of_one_measurement(dense, given, made, expected):
    case = next(case for case in suites.varlen() if case.equal_lengths)
    times = {"ours": float(given), "ours, dense": float(dense), "ours, no metadata": float(made)}
    assert reached(made_up.report([]), made_up.report([made_up.entry(case, **times)])["cases"][0]) == expected


def test_small_kernels_and_host_times_have_goals_too():
    report = made_up.report([])
    report["kernels"] = [{"case": "merge", "us": 1.5, "goal us": 1.0, "of copy": 0.9, "goal of copy": 0.85}]
    report["kernels"] += [{"case": "combine", "us": "-", "goal us": 1.0, "of copy": "-", "goal of copy": 0.85}]
    limits = {"x torch.add": 1.0, "limit": 1.5}
    report["host"] = [{"case": "dense", "implementation": who, **limits} for who in ("ours", "fa3")]
    assert [v.reached for v in goals.of_report(report)] == [False, True, False, False, True]
    small, host = table.tables(report)
    assert small.notes == [
        "goals reached: 1 of 4",
        "not reached: merge: us 1.5 (at most 1)",
        "not reached: combine: us without a figure (at most 1)",
        "not reached: combine: of copy without a figure (at least 0.85)",
    ]
    assert host.notes == ["goals reached: 1 of 1"]


def test_rows_of_small_kernels_are_a_table():
    report = made_up.report([])
    report["kernels"] = [{"case": "merge", "us": 1.5, "goal us": "-", "remark": ""}]
    (found,) = table.tables(report)
    assert found.rows == [["merge", "1.50", "-", ""]]


def test_small_kernels_that_fail_are_a_goal_missed():
    report = made_up.report([])
    report["kernels"] = [
        {"case": "metadata", "us": "-", "goal us": "-", "goal of copy": "-", "remark": "failed: wrong"}
    ]
    assert [str(v) for v in goals.of_report(report) if v.missed] == ["metadata: us without a figure"]


@pytest.mark.parametrize("status", ["wrong", "failed", "skipped"])
@pytest.mark.parametrize("suite", ["prefill", "decode", "engine", "mixed", "scaling"])
def test_a_case_that_ours_did_not_time_raises_no_score(suite, status):
    """As many goals are judged as before, and none more is reached."""
    cases = suites.select(suite, None)
    variants = {w for case in cases for within in case.within for w in (within.name, within.of)} - {"ours"}
    entries = [
        made_up.entry(case, ours=case.flops() * 1e-9, fa3=case.flops() * 0.9e-9, **dict.fromkeys(variants, 1e9))
        for case in cases
    ]
    report = made_up.report(entries)
    before = goals.of_report(report)
    assert before and all(v.judged for v in before)
    for entry in report["cases"]:
        timed = dict(entry["results"])
        entry.update(status=status, results={"fa3": timed["fa3"]})
        after = goals.of_report(report)
        assert [v.what for v in after] == [v.what for v in before] and all(v.judged for v in after)
        assert all(was.reached or not now.reached for was, now in zip(before, after, strict=True))
        entry.update(status="ok", results=timed)


def test_a_pair_is_missed_if_the_other_call_failed_and_not_judged_if_it_was_not_tried():
    case = next(case for case in suites.engine() if case.name.endswith("fp16"))
    entry = made_up.report([made_up.entry(case, ours=100.0)])["cases"][0]
    (found,) = goals.of_case({"ceilings": {}}, entry)
    assert not found.judged and not found.missed
    assert goals.lines([found]) == ["goals reached: 0 of 0, 1 not judged", f"not judged: {found.what}"]
    entry["left_out"]["ours, bf16"] = "no kernel"
    (found,) = goals.of_case({"ceilings": {}}, entry)
    assert found.missed and goals.lines([found])[0] == "goals reached: 0 of 1"


def test_without_a_peer_its_goals_are_not_judged():
    entry = made_up.entry(suites.engine()[0], ours=100.0)
    assert [(v.judged, v.reached) for v in goals.of_case({"ceilings": {}}, entry)] == [(False, False)]


def test_cases_that_a_report_does_not_have_are_not_judged():
    entries = [made_up.entry(case, ours=case.flops() * 1e-9) for case in suites.scaling()]
    found = goals.of_report(goals.with_todays(made_up.report(entries[:-1])))
    assert [v.judged for v in found] == [True, True, True, False]
    assert goals.count(found) == "3 of 3, 1 not judged"


def test_a_figure_that_rounds_to_the_bound_it_misses_has_more_digits():
    assert str(goals.Verdict("time", 1.12038, 1.12, at_least=False)) == "time 1.12038 (at most 1.12)"
    assert str(goals.Verdict("time", 1.11998, 1.12, at_least=False)) == "time 1.12 (at most 1.12)"
    assert str(goals.Verdict("speed", 1.09, 1.12)) == "speed 1.09 (at least 1.12)"
